"""The machine that measure_node.py measures: what it has and lacks; runs on it, and a CSV row for each figure."""
import contextlib
import ctypes
import datetime
import glob
import json
import os
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import programs
import tables

BEGAN, CUDA, CARDS = time.monotonic(), os.getenv("CUDA_HOME", "/usr/local/cuda"), os.getenv("CUDA_VISIBLE_DEVICES", "")
SMI = ["nvidia-smi", "--format=csv,noheader,nounits", *([f"--id={CARDS}"] if CARDS else [])]
# Bits of clocks_event_reasons.active; the first, an idle GPU, is none of interest.
LIMITS = {0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
          0x20: "temperature (software)", 0x40: "temperature (hardware)", 0x80: "power brake", 0x100: "display clocks"}
REASON = re.compile(r".*(?:check failed|rror\b|ERROR|cannot|not allocate|timeout|emulate: ).*")
ENDS = "run status sm_mhz power_w limited_by others seconds note hardware driver commit date command".split()


def execute(words, limit):
    """(exit code or None at the limit, output, seconds); nothing of it is left running."""
    begin = time.monotonic()
    try:
        code, text, _ = programs.run(words, limit, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    except OSError as why:
        code, text = 127, str(why)
    return code, re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text), time.monotonic() - begin


def last_lines(text):  # and the first that sounds like a reason; without the blocks that mpirun draws
    own = re.sub(r"^-{40,}\s*\n.*?^-{40,}\s*\n", "", text + "\n", flags=re.M | re.S)
    lines = (own if own.strip() else text).strip().splitlines()
    return " ".join(" ".join(line[:300] for line in [*filter(REASON.match, lines[:-5]), ""][:1] + lines[-5:]).split())


def said(*words):  # nothing where it is not there, fails, or does not answer
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, encoding="utf-8", timeout=4, check=True).stdout
    return ""


def version(library, function):  # the number that a C function stores; 0: no such library
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(library), function)(ctypes.byref(number))
    return number.value


def add_libraries(folder):
    old = programs.ENVIRONMENT.get("LD_LIBRARY_PATH")
    programs.ENVIRONMENT["LD_LIBRARY_PATH"] = f"{folder}:{old}" if old else folder


def slurm(gpus):  # what to type for GPUs and cores: srun does not take the number of cores from salloc
    job = int("0" + re.match(r"\d*", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))[0])
    enough = f"--gpus-per-node={gpus} --cpus-per-task={max(job, 2 * gpus)}"
    typed = f"srun {enough}" if job >= 2 * gpus else f"salloc --nodes=1 {enough} srun {enough}"
    return f"type {typed} --pty bash docs/measure_node.sh" if "SLURM_JOB_ID" in os.environ else ""


def look():
    """In at most 20 s: [(what, what it has, what to do), ...], bytes of a GPU, GB/s of its links, options of CMake."""
    asked = "--query-gpu=name,driver_version,memory.total,memory.used,pcie.link.gen.max,pcie.link.width.max"
    cards = [line.split(", ") for line in said(*SMI, asked).splitlines() if line.count(", ") == 5]
    name, driver, *numbers = cards[0] if cards else [""] * 6
    memory, used, *pcie = (int(number) if number.isdigit() else 0 for number in numbers)  # "[N/A]": 0
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{CUDA}/bin") or ""
    programs.ENVIRONMENT["PATH"] += f":{os.path.dirname(nvcc)}" if nvcc else ""
    toolkit = 1000 * int(("0" + "".join(re.findall(r"release (\d+)", said(nvcc, "--version")))))
    known, compat = (version(f"{place}libcuda.so.1", "cuDriverGetVersion") for place in ("", f"{CUDA}/compat/"))
    if 0 < known < toolkit <= compat:  # NVIDIA's package for an older driver
        add_libraries(f"{CUDA}/compat")
        known = compat
    nccl, options = version("libnccl.so.2", "ncclGetVersion"), []
    for folder in [] if nccl else [each for path in sys.path for each in glob.glob(f"{path}/nvidia/*/lib")]:
        add_libraries(folder)  # the packages have cuBLAS, too
        if number := version(f"{folder}/libnccl.so.2", "ncclGetVersion"):
            nccl, options = number, [f"-DNCCL_LIBRARY={folder}/libnccl.so.2", f"-DNCCL_INCLUDE_DIR={folder}/../include"]
    mpi, ranks, cores = said("mpirun", "--version").split("\n")[0], len(cards) or 1, len(os.sched_getaffinity(0))
    links = list(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", said("nvidia-smi", "nvlink", "-s", "-i", "0"))))
    lanes = 0.985 * 2 ** (pcie[0] - 3) * pcie[1]
    return [
        ("driver", f"{driver}, CUDA {known // 1000}.{known % 100 // 10}" if known else driver,
         f"older than nvcc: install cuda-compat-{toolkit // 1000}-0 or a newer driver, or load CUDA {known // 1000}"
         if 0 < known < toolkit else "" if driver or known else slurm(8) or "install NVIDIA's driver"),
        ("GPUs", f"{len(cards)} x {name}, {memory} MiB, {used} of it in use" if cards else "",
         "nvidia-smi shows none" if not cards else "wait for the others" if used > 2000 else ""),
        ("nvcc", nvcc, "" if nvcc else "to build here, module load cuda or install cuda-toolkit"),
        ("NCCL", f"{nccl // 10000}.{nccl % 10000 // 100}.{nccl % 100}" if nccl else "",
         "module load nccl, apt install libnccl-dev, or pip install nvidia-nccl-cu13" if not nccl else
         "from 2.26 on it keeps one order of several groups' kernels" if nccl < 22600 else ""),
        ("MPI", mpi, "" if mpi else "module load openmpi, or apt install libopenmpi-dev openmpi-bin"),
        ("cores", f"{cores} for {ranks} rank{'s' * (ranks > 1)}",
         "" if cores >= 2 * ranks else slurm(ranks) or "allow two for each rank (taskset, docker --cpuset-cpus)"),
        ("links", f"{len(links)} NVLinks, {sum(links):.0f} GB/s" if links else f"PCIe, {lanes:.0f} GB/s" * (lanes > 0),
         "" if links or lanes else "nvidia-smi does not say"),
    ], memory * 2**20, sum(links) or lanes, options


def watched(lines):  # of nvidia-smi's samples: of the GPU with the lowest clock, and of that with most power
    samples = [words for line in lines if len(words := line.split(", ")) == 5 and "N/A" not in line]
    def middles(column):
        return [statistics.median(float(s[column]) for s in samples if s[0] == gpu) for gpu in {s[0] for s in samples}]
    bits = {bit for sample in samples for bit in LIMITS if int(sample[3], 16) & bit}
    return {"sm_mhz": min(middles(1)), "power_w": max(middles(2)),
            "limited_by": ", ".join(LIMITS[bit] for bit in sorted(bits))} if samples else {}


class Node:
    def __init__(self, options, **facts):
        self.__dict__ |= vars(options) | facts
        self.end = BEGAN + 60 * self.minutes - 10 if self.minutes else float("inf")
        self.folder = tempfile.TemporaryDirectory(prefix="measure_node.")
        self.file, self.samples, self.statuses = pathlib.Path(self.folder.name) / "file", [], {}
        pathlib.Path(f"{self.file}.json").write_text(json.dumps({**self.cluster, "nodes": 8}), "utf-8")
        if self.device == "cuda" and shutil.which("nvidia-smi"):
            asked = "--query-gpu=index,clocks.sm,power.draw,clocks_event_reasons.active,memory.used"
            smi = subprocess.Popen([*SMI, asked, "-lms=500"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, encoding="utf-8")
            threading.Thread(target=lambda: [self.samples.append(line) for line in smi.stdout], daemon=True).start()

    def begin(self, step):
        self.step, self.path = step, self.out / f"{step}.csv"
        self.rows = tables.read(self.path) if self.path.exists() else []

    def done(self, name):  # the rows of a run that stands: of this commit, whatever came of it
        rows = [row for row in self.rows if row["status"] != "not run" and
                (row["run"], row["hardware"], row["commit"]) == (name, self.hardware, self.commit)]
        self.statuses |= {(self.step, name): row["status"] for row in rows}
        return rows

    def record(self, name, status, rows, note="", command="", seconds=0, **columns):  # replaces those on this hardware
        common = {"run": name, "status": status, "seconds": f"{seconds:.2f}", "hardware": self.hardware,
                  "driver": self.driver, "commit": self.commit, "command": command, **columns,
                  "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        rows = [{key: f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
                 for key, value in {**row, **common, "note": note or row.get("note", "")}.items()} for row in rows]
        self.statuses[self.step, name] = status
        self.rows = [row for row in self.rows if (row["run"], row["hardware"]) != (name, self.hardware)] + rows
        figures = dict.fromkeys(key for row in [*rows, *self.rows] for key in row if key not in ENDS)
        tables.write(self.path, self.rows, [*ENDS[:2], *figures, *ENDS[2:]])
        print(f"{self.step:12} {status:11} {seconds:7.2f} s  {name}" + f"  ({note[:150]})" * bool(note), flush=True)
        return rows

    def expected(self, words, ranks=1):
        """A step by the cost model: ms of ops, "computation", "the step"; "peak memory", GB; "MFU"; "% of" TFLOP/s."""
        fake, limit = ["--fake-world", ranks, "--simulate", f"{self.file}.json"], min(60, self.end - time.monotonic())
        command = [self.bin / "08_3d_full", *words, "--comm", "fake", *fake]
        code, text, _ = execute(command, limit) if self.cluster else (0, "", 0)
        print(f"no expected figure: {last_lines(text)}\n" * (code != 0), end="")
        found = re.findall(r"(?m)^(\S.*?)  +(?:[\d.]+ +)?([\d.]+) +[\d.]+%$", text)
        found += re.findall(r"(peak memory|MFU|% of) ([\d.]+)", text)
        return {key: float(value) for key, value in found if code == 0}

    def run(self, name, command, parse, ranks=1, limit=150, before=(), file_flag=None):
        """Runs a program of the build (or a script of docs), records its rows and returns them."""
        if rows := self.done(name):
            return rows
        program = command[0] if "/" in command[0] else self.bin / command[0]
        words = [*before, program, *command[1:], *([] if "test_0" in command[0] else ["--device", self.device]),
                 *([file_flag, self.file] if file_flag else [])]
        if ranks > 1:
            own = self.device == "cuda" and ranks <= self.gpus and not before  # each on the socket of its pinned memory
            placed = ["--map-by", f"ppr:{ranks}:node", "--bind-to", "numa"] if own else ["--bind-to", "none"]
            words = [*programs.mpirun(ranks, *placed), *words]
        text = shlex.join(map(str, words)).replace(str(self.file), "FILE")
        for missing in filter(lambda each: not shutil.which(each) and not os.path.exists(each), [words[0], program]):
            return self.record(name, "not run", [{}], f"{missing} is not there", text)
        left, first = self.end - time.monotonic(), len(self.samples)
        self.file.unlink(missing_ok=True)
        code, output, seconds = execute(words, min(limit, left)) if left > 10 else (None, "", 0)
        if code is None and limit > left:
            raise TimeoutError(f"{self.step}, {name}")
        rows, status, note = [{}], "ok", ""
        try:
            parsed = list(parse(output))  # of a failed run: what there is
            rows, status = parsed, parsed[0].get("status", status)
        except (OSError, ValueError, LookupError, TypeError) as why:  # the output does not hold what was asked for
            status, note = "failed", f"{type(why).__name__}: {why}"
        if code != 0:
            status, note = ("timeout", f"no end within {limit} s") if code is None else ("failed", f"exit code {code}")
        if status == "failed" and (lacks := re.search(r"out of GPU memory: .*|.*needs PyTorch.*", output)):
            status, note = "not run", lacks[0]
        if status in ("failed", "timeout"):
            note = f"{note}; {last_lines(output)}"[:1000]
            with open(self.out / "failed.log", "a", encoding="utf-8") as log:
                log.write(f"==== {self.step}: {name}\n{text}\n{output[-20000:]}\n")
        others = self.samples[first - 1].split(", ")[-1].strip() + " MiB in use" if first else ""  # before the run
        return self.record(name, status, rows, note, text, seconds, others=others, **watched(self.samples[first:]))
