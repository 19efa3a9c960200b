"""Runs the jobs of a drill, and keeps their artefacts."""
import re
import shutil
import subprocess
import sys

from evidence import ROOT, node_of
import programs  # evidence has set the path

LIMIT = 90  # seconds of a run: each takes a few
ENVIRONMENT = {"OMP_NUM_THREADS": "1",
               # Time for every rank to print its log before the launcher kills it.
               "OMPI_MCA_odls_base_sigkill_timeout": "3"}
OUTPUT = {"--metrics": "metrics.jsonl", "--trace": "trace.json"}
# Chapter 01's program has no other flags of the jobs.
ONE_RANK = {"--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--seq-len", "--init-std", "--global-batch",
            "--steps", "--lr", "--save-reference", "--dtype", "--experts", "--qk-norm", "--tied-embeddings"}


class Usage(Exception):
    """Bad input: one line, exit code 2."""


def pairs_of(words):
    """{flag: value, or None} of a command line's words."""
    flags, i = {}, 0
    while i < len(words):
        if not words[i].startswith("--") or words[i] == "--":
            raise Usage(f"{words[i]}: must be a flag of 08_3d_full, as in --comm-check on")
        flag, equals, value = words[i].partition("=")
        i += 1
        if not equals:
            value = words[i] if i < len(words) and not words[i].startswith("--") else None
            i += value is not None
        flags[flag] = value
    return flags


def words_of(flags):
    return [word for flag, value in flags.items() for word in ([flag] if value is None else [flag, value])]


def run(command, folder):
    """Exit code, or None after LIMIT seconds; output in launcher.log."""
    with open(folder / "launcher.log", "wb") as log:
        return programs.run(command, LIMIT, ENVIRONMENT, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)[0]


class Runner:
    def __init__(self, programs):
        self.programs = programs.resolve()
        missing = [name for name in ("08_3d_full", "01_single_gpu", "compare") if not (self.programs / name).is_file()]
        if missing or not shutil.which("mpirun"):
            what = f"{self.programs / missing[0]}" if missing else "mpirun"
            raise Usage(f"no {what}: run `bash tests/setup.sh`, which installs and builds what is missing")

    def job(self, name, flags, fault, ranks, folder, rank_names=None):
        """Runs a job with its faults in an empty folder; leaves the artefacts without a word of the faults."""
        flags = {**flags, **OUTPUT}
        if fault:
            flags["--inject"] = ",".join(":".join(map(str, (kind, rank, step))) + (":" + param if param else "")
                                         for kind, rank, step, param in fault)
        (folder / "logs").mkdir()
        own_log = 'exec "$0" "$@" >"logs/rank-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}.log" 2>&1'
        code = run([*programs.mpirun(ranks), "sh", "-c", own_log, self.programs / "08_3d_full", *words_of(flags)], folder)
        (folder / "launcher.log").rename(folder / "logs/mpirun.log")
        if code is None:
            raise Usage(f"the job has not ended after {LIMIT} s, and takes a few on an idle machine: end what else "
                        "runs here, and start again")
        clean(folder, name, rank_names or list(range(ranks)))
        trace = folder / "trace.json"
        if trace.exists() and not trace.stat().st_size:  # of a run that was ended from outside
            trace.unlink()
        if (folder / "metrics.jsonl").exists():
            subprocess.run([sys.executable, str(ROOT / "docs/prometheus.py"), "--once", "metrics.jsonl",
                            "metrics.prom"], cwd=folder, check=True)
        return code

    def one_rank(self, flags, folder, metrics=None):
        own = {flag: value for flag, value in flags.items() if flag in ONE_RANK}
        if metrics:
            own["--metrics"] = metrics
        code = run([str(self.programs / "01_single_gpu"), *words_of(own)], folder)
        text = (folder / "launcher.log").read_text("utf-8")
        (folder / "launcher.log").unlink()
        if code != 0:
            raise Usage("the run on one rank has failed: " + (text.strip() or "no output").splitlines()[-1])

    def evidence_folder(self, incident, case, its, work):
        """The folder in which a piece of evidence is looked for: that of another run."""
        on = its.on or list(range(case.ranks))
        flags, fault = {**case.flags, **its.rerun}, moved(case.fault, on)
        if self.job(incident.name, flags, fault, len(on), work, on) == 2:  # the fault has no place in that layout
            shutil.rmtree(work)
            work.mkdir()
            self.job(incident.name, flags, [], len(on), work, on)
        if its.one_rank:
            self.one_rank({**case.flags, **its.rerun, "--save-reference": "one"}, work, "one.jsonl")
            run([str(self.programs / "compare"), "reference", "one"], work)
            (work / "launcher.log").rename(work / "compare.txt")
        return work


def moved(fault, on):
    """The faults of a job on some of the ranks only: they stay with the device."""
    return [(kind, on.index(rank), step, param) for kind, rank, step, param in fault if rank in on]


def clean(folder, name, rank_names):
    """Hides the lines and flags that announce the fault, and this machine's name behind those of the job's nodes."""
    nodes = {}
    for rank, device in enumerate(rank_names):
        nodes.setdefault(node_of(name, device), []).append(rank)
    told = "".join(f"{node}: rank{'s' if len(its) > 1 else ''} {' and '.join(map(str, its))}\n"
                   for node, its in nodes.items())
    for path in [path for path in folder.rglob("*") if path.suffix in (".log", ".json", ".jsonl")]:
        text = path.read_text("utf-8", errors="replace")
        if path.suffix == ".log":
            text = "".join(line for line in text.splitlines(keepends=True) if "FAULT INJECTION" not in line)
            text = re.sub(r"^\S+: ranks? 0(?: (?:to|and) \d+)?\n", told, text, flags=re.M)
            text = re.sub(r"process rank (\d+) with PID \d+ on node \S+",
                          lambda found: f"process rank {found[1]} on node {node_of(name, rank_names[int(found[1])])}",
                          text)
            text = re.sub(r"^\[[^\]\s:]+:\d+\]", "[launcher]", text, flags=re.M)
        else:
            text = re.sub(r'"inject":\s*"[^"]*",?\s*', "", text)
            text = re.sub(r'inject = \\"[^"]*\\"\\n', "", text)  # and of flags.config
        path.write_text(text, "utf-8")
