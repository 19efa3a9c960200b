"""The machine that measure_node.py measures: it runs commands there, and keeps a record of each."""
import collections
import ctypes
import datetime
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import threading
import time

import programs
import tables
from measure_node_readers import NotTested, Unreadable, found
from measure_node_shapes import SCALES, SMALL


class OutOfTime(Exception):
    pass


class Usage(Exception):
    pass


LEAST_DRIVER = 580  # of CUDA 13
LIBC = ctypes.CDLL(None)
# What nvidia-smi says while runs are measured: clocks, power, what limits them, and who else is there.
COLUMNS = ["sm_mhz", "power_w", "limited_by", "others"]
PERIOD_MS = 500
QUERY = "index,clocks.sm,power.draw,clocks_event_reasons.active,memory.used"
# Bits of clocks_event_reasons.active; the first, an idle GPU, is none of interest.
REASONS = {0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
           0x20: "temperature (software)", 0x40: "temperature (hardware)", 0x80: "power brake", 0x100: "display clocks"}
COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def clean(text):
    return " ".join(re.sub(r"[^\x20-\x7e\n]", "", text).split())


REASON = re.compile(r"check failed|rror\b|ERROR|cannot|not allocate|timeout|emulate: ")


def last_lines(text):
    """The first line that sounds like a reason and the last ones, without the blocks that mpirun draws."""
    own = re.sub(r"^-{40,}\s*\n.*?^-{40,}\s*\n", "", text + "\n", flags=re.M | re.S)
    lines = (own if own.strip() else text).strip().splitlines()
    reason = [line for line in lines[:-5] if REASON.search(line)][:1]
    return clean("\n".join([line[:300] for line in [*reason, *lines[-5:]]]))


def shown(value):
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def ends_with_this():
    """In the child: it ends if this script is killed."""
    PR_SET_PDEATHSIG = 1
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


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
        self.child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                      encoding="utf-8", stdin=subprocess.DEVNULL, preexec_fn=before_exec)
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
            asked = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", timeout=10)
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


class Node:
    FIRST = ["run", "status"]
    LAST = [*COLUMNS, "seconds", "note", "hardware", "driver", "commit", "date", "command"]

    def __init__(self, options, started, folder):
        self.options, self.scale, self.bin = options, SCALES[options.scale], options.bin
        self.device, self.out = options.device, options.out
        self.end = started + 60 * options.minutes - 12 if options.minutes else float("inf")
        self.folder, self.file = folder, folder / "file"
        self.started = set()  # (part, run) of this call
        if not shutil.which("ssh") and not shutil.which("rsh"):
            programs.ENVIRONMENT.setdefault("OMPI_MCA_plm", "isolated")  # else Open MPI refuses to start at all
        self.part, self.columns, self.part_end, self.rows = None, (), float("inf"), []
        self.driver = self.driver_version() if self.device == "cuda" else ""
        print(f"driver: {self.driver or '-'}", flush=True)
        if re.match(r"\d+\.", self.driver) and int(self.driver.split(".")[0]) < LEAST_DRIVER:
            raise Usage(f"driver {self.driver}: programs of CUDA 13 need {LEAST_DRIVER} or later")
        self.look()
        self.monitor = Monitor(ends_with_this) if self.device == "cuda" else None

    def look(self):
        """What is here: the device's name as CUDA reports it, how many there are, the driver, the commit."""
        command = ["01_single_gpu", *SMALL.flags(), "--dtype", "bf16", "--steps", "0", "--device", self.device]
        code, text, _ = self.execute([str(self.bin / command[0]), *command[1:]], {}, 120)
        if code != 0:
            reason = clean(text)[-300:]
            raise Usage(f"no usable GPU: {reason}" if self.device == "cuda" else f"the programs do not run: {reason}")
        peak = re.search(r"of ([\d.]+) TFLOP/s, the dense bf16 peak", text)
        self.peak = float(peak[1]) * 1e12 if peak else None
        self.name, visible = programs.hardware(), 1
        if self.device == "cuda":
            match = found(r" on cuda \((.*), (\d+) visible\)", text, "name of the device")
            self.name, visible = match[1], int(match[2])
        self.hardware = f"{visible} x {self.name}" if self.device == "cuda" else self.name
        self.gpus = visible
        self.ranks = min(self.options.ranks or visible, 8)
        self.commit = self.options.commit or self.commit_here()

    def __str__(self):
        return f"{self.hardware}, driver {self.driver or '-'}, commit {self.commit}"

    def driver_version(self):
        if shutil.which("nvidia-smi"):
            code, text, _ = programs.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
            if code == 0 and text.strip():
                return text.split("\n")[0].strip()
        return "none"

    def commit_here(self):
        """Where there is no git, the programs themselves say which build this is."""
        try:
            commit = programs.output(["git", "rev-parse", "--short=12", "HEAD"]).strip()
            status = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/results"]
            return commit + ("+changes" if programs.output(status) else "")
        except (OSError, programs.Failed):
            return "build " + hashlib.sha256((self.bin / "08_3d_full").read_bytes()).hexdigest()[:12]

    def side(self):
        return ["--bench-side", str(self.scale.side), "--bench-warm-ms", str(self.scale.warm_ms)]

    def output(self, command):
        return self.execute([str(self.bin / command[0]), *command[1:]], {}, 60)[1]

    # -- records --

    def path(self):
        return self.out / f"{self.part}.csv"

    def begin(self, part, columns, seconds):
        self.part, self.columns, self.part_end = part, columns, min(self.end, time.monotonic() + seconds)
        self.rows = []
        if self.path().exists():
            self.rows = [row for row in tables.read(self.path()) if None not in row.values()]

    def mine(self, name):
        return [row for row in self.rows if row["run"] == name and row["hardware"] == self.hardware]

    def record(self, name, status, rows, seconds, note, command, watched=None):
        if status == "not reached" and any(row["status"] != "not reached" for row in self.mine(name)):
            return self.mine(name)
        common = {"run": name, "status": status, "seconds": f"{seconds:.2f}", "hardware": self.hardware,
                  "driver": self.driver, "commit": self.commit, "command": command,
                  "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        common |= watched or {}
        rows = [{key: shown(value) for key, value in {**row, **common, "note": note or row.get("note", "")}.items()}
                for row in rows]
        old = self.mine(name)
        at = self.rows.index(old[0]) if old else len(self.rows)
        self.rows = self.rows[:at] + rows + [row for row in self.rows[at:] if row not in old]
        self.out.mkdir(parents=True, exist_ok=True)
        tables.write(self.path(), self.rows, [*self.FIRST, *self.columns, *self.LAST])
        why = f"  ({note[:150]})" if note else ""
        print(f"{self.part:12} {status:11} {seconds:7.2f} s  {name}{why}", flush=True)
        return rows

    def done(self, name):
        """The rows of a run that need not be repeated."""
        rows = self.mine(name)
        if (self.part, name) in self.started:
            return rows
        kept = all(row["commit"] == self.commit and row["status"] not in ("not run", "not reached") for row in rows)
        return rows if self.options.resume and kept else []

    def skip(self, name, why, command=""):
        if not self.done(name):
            self.started.add((self.part, name))
            return self.record(name, "not run", [{}], 0, why, command)

    # -- runs --

    def torch(self, name, words, parse):
        if importlib.util.find_spec("torch") is None:
            return self.skip(name, "no PyTorch")
        self.run(name, ["docs/peer_torch_gpu.py", *words], parse, before=["python3"], limit=240)

    def run(self, name, command, parse, ranks=1, limit=150, environment=None, own_host=False, before=(),
            file_flag=None):
        """Runs a program of the build (or a script of docs), records its rows and returns them."""
        if rows := self.done(name):
            return rows
        environment = dict(environment or {})
        script = command[0].startswith("docs/")
        words = [command[0] if script else str(self.bin / command[0]), *command[1:]]
        if script or not command[0].startswith("test_0"):
            words += ["--device", self.device]
        words = [*before, *words]
        if file_flag:
            words += [file_flag, str(self.file)]
        if own_host:
            words = ["bash", "-c", f"NCCL_HOSTID=$OMPI_COMM_WORLD_RANK exec {shlex.join(words)}"]
        if ranks > 1:
            # A rank of its own GPU stays on one socket, with its threads and its pinned memory.
            own = self.device == "cuda" and ranks <= self.gpus and "CUDA_VISIBLE_DEVICES" not in environment
            placed = ["--map-by", f"ppr:{ranks}:node", "--bind-to", "numa"] if own else ["--bind-to", "none"]
            words = [*programs.mpirun(ranks, *placed), *words]
        text = " ".join([*(f"{key}={value}" for key, value in environment.items()), shlex.join(words)])
        text = text.replace(str(self.file), "FILE")
        program = self.bin / command[0]
        if not script and not os.access(program, os.X_OK):
            return self.skip(name, f"{program} is not there", text)
        if ranks > 1 and not shutil.which("mpirun"):
            return self.skip(name, "no mpirun in PATH", text)
        left = self.end - time.monotonic()
        if time.monotonic() > self.part_end or left < self.options.least:
            self.record(name, "not reached", [{}], 0, "nor the runs after it", text)
            raise OutOfTime
        self.file.unlink(missing_ok=True)
        if ranks == 1:
            environment["OMPI_MCA_ess_singleton_isolated"] = "1"  # starts without mpirun's daemon
        others, begin = self.monitor.before() if self.monitor else "", time.monotonic()
        code, output, seconds = self.execute(words, environment, min(limit, left))
        watched = {"others": others, **(self.monitor.during(begin, time.monotonic()) if self.monitor else {})}
        if code is None and limit > left:
            note = f"cut off after {seconds:.0f} s; nor the runs after it"
            self.record(name, "not reached", [{}], seconds, note, text, watched)
            raise OutOfTime
        rows, note = [{}], ""
        status = "timeout" if code is None else "failed" if code else "ok"
        try:
            rows = parse(output, self)  # of a failed run: what there is
        except NotTested as why:
            status, note = ("not tested", str(why)) if status == "ok" else (status, "")
        except (Unreadable, OSError, ValueError, KeyError, TypeError) as why:  # OSError: it wrote no file
            status, note = ("failed", f"{type(why).__name__}: {why}") if status == "ok" else (status, "")
        if status == "failed" and (full := re.search(r"rank \d+: (out of GPU memory: .*)", output)):
            status, note = "not run", full[1]
        if status in ("failed", "timeout"):
            ended = f"no end within {limit} s" if code is None else f"exit code {code}"
            note = "; ".join(filter(None, [note or ended, last_lines(output)]))[:1000]
            self.out.mkdir(parents=True, exist_ok=True)
            with open(self.out / "failed.log", "a", encoding="utf-8") as log:
                log.write(f"==== {self.part}: {name}\n{text}\n{output[-20000:]}\n")
        self.started.add((self.part, name))
        return self.record(name, status, rows, seconds, note, text, watched)

    def execute(self, words, environment, limit):
        """(exit code or None at the limit, output, seconds); nothing of it is left running."""
        begin = time.monotonic()
        with open(self.folder / "output", "w+b") as file:
            try:
                code, _, _ = programs.run(words, limit, environment, stdout=file, stderr=subprocess.STDOUT,
                                          stdin=subprocess.DEVNULL, preexec_fn=ends_with_this)
            except OSError as why:
                return 127, str(why), 0.0
            file.seek(0)
            return code, COLORS.sub("", file.read().decode(errors="replace")), time.monotonic() - begin

    def write_topology(self):
        """How the GPUs are connected, beside the CSVs."""
        if self.device == "cuda" and shutil.which("nvidia-smi"):
            self.out.mkdir(parents=True, exist_ok=True)
            text = COLORS.sub("", programs.run(["nvidia-smi", "topo", "-m"])[1])
            (self.out / "topology.txt").write_text(text, "utf-8")
