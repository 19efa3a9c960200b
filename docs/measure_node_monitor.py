"""What nvidia-smi says of the GPUs while runs are measured: clocks, power, what limits them, and who else is there."""
import collections
import os
import shutil
import statistics
import subprocess
import threading
import time

COLUMNS = ["sm_mhz", "power_w", "limited_by", "others"]
PERIOD_MS = 500
QUERY = "index,clocks.sm,power.draw,clocks_event_reasons.active,memory.used"
# Bits of clocks_event_reasons.active; the first, an idle GPU, is none of interest.
REASONS = {0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
           0x20: "temperature (software)", 0x40: "temperature (hardware)", 0x80: "power brake", 0x100: "display clocks"}

Sample = collections.namedtuple("Sample", "time gpu mhz watts reasons mib")


def parsed(line, now):
    """None: a line that is no sample, or has none of the numbers ("[N/A]" of a MIG slice)."""
    words = [word.strip() for word in line.split(",")]
    try:
        return Sample(now, words[0], float(words[1]), float(words[2]), int(words[3], 16), float(words[4]))
    except (ValueError, IndexError):
        return None


class Monitor:
    """Reads nvidia-smi's samples in a thread. Without nvidia-smi, or where it fails, every row's columns stay empty."""

    def __init__(self, before_exec=None):
        self.samples, self.child = [], None
        self.tool = shutil.which("nvidia-smi")
        if not self.tool:
            return
        words = [self.tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible:
            words.append(f"--id={visible}")
        self.child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                      stdin=subprocess.DEVNULL, preexec_fn=before_exec)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.child.stdout:
            sample = parsed(line, time.monotonic())
            if sample:
                self.samples.append(sample)

    def before(self):
        """Memory and processes on the GPUs while no program of ours runs: other tenants."""
        if not self.child:
            return ""
        words = [self.tool, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.run(words, capture_output=True, text=True, timeout=10)
        except subprocess.TimeoutExpired:
            return "nvidia-smi does not answer"
        lines = [line for line in asked.stdout.splitlines() if line.split(",")[0].strip().isdigit()]
        latest = {sample.gpu: sample.mib for sample in self.samples[-16:]}  # of at most 8 GPUs
        used = f", {sum(latest.values()):.0f} MiB in use" if latest else ""
        return f"{len(lines)} processes{used}" if asked.returncode == 0 else ""

    def during(self, begin, end):
        """The columns of a run between these times: of the GPU with the lowest clock, and of that with most power."""
        here = [sample for sample in list(self.samples) if begin <= sample.time <= end]
        if not here:
            return {}
        def middles(key):
            return [statistics.median(key(s) for s in here if s.gpu == gpu) for gpu in {s.gpu for s in here}]
        bits = {bit for sample in here for bit in REASONS if sample.reasons & bit}
        return {"sm_mhz": min(middles(lambda s: s.mhz)), "power_w": max(middles(lambda s: s.watts)),
                "limited_by": ", ".join(REASONS[bit] for bit in sorted(bits))}

    def stop(self):
        if self.child:
            self.child.terminate()
            self.child.wait()
            self.child = None
