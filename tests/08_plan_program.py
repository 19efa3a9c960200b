#!/usr/bin/env python3
"""The planner as a program: exit codes, its files, and that chapter 08 accepts the layouts and books the memory that it
printed; then a share of docs/configurations.md (TRAIN70B_TEST_SLICE=all: everything). Exit code 1 on the first error.

    python3 tests/08_plan_program.py BIN_FOLDER
"""
import csv
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from lessons_commands import mpi_environment  # noqa: E402

THOROUGH = os.environ.get("TRAIN70B_TEST_SLICE") == "all"
# Few simulations, for time.
SMALL = "--simulations 12 --model 1b --gpus 8 --cluster h100-8.json --seq-len 1024 --global-batch 32"
# A model for which memory decides: two nodes.
TIGHT = "--simulations 10 --model 30b --gpus 16 --cluster h100-8x8.json --seq-len 2048 --global-batch 32"
# Experts: their memory and rows, with tp, cp and pipelines beside ep.
SPARSE = "--simulations 10 --model mixtral-8x7b --gpus 32 --cluster h100-8x8.json --seq-len 4096 --global-batch 64"
LARGE = "--simulations 0 --model 70b --gpus 64 --cluster h100-8x8.json --seq-len 4096 --global-batch 128"


def fail(text):
    sys.exit(f"08_plan_program: {text}")


def check(condition, text):
    if not condition:
        fail(text)


class Planner:
    def __init__(self, folder, work):
        self.folder, self.work = folder, work

    def run(self, program, words):
        return subprocess.run([str(self.folder / program), *words], cwd=ROOT, capture_output=True, text=True,
                              timeout=300, env=mpi_environment())

    def plan(self, flags, code=0):
        done = self.run("plan", flags.split())
        check(done.returncode == code, f"plan {flags}: exit code {done.returncode}, not {code}\n{done.stderr[:1000]}")
        return done

    def report(self, flags):
        path = self.work / "plan.json"
        text = self.plan(f"{flags} --json {path}").stdout
        return text, json.loads(path.read_text())

    def booked(self, command, rank):
        """The peak of a rank's dry run: bytes by kind."""
        words = command.split()
        check(words[0] == "build/bin/08_3d_full", f"the command begins with {words[0]}")
        done = self.run("08_3d_full", words[1:] + ["--fake-rank", str(rank)])
        check(done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stderr[:1000]}")
        table = done.stdout[done.stdout.index(f"rank {rank}: bytes"):]
        return {kind: int(number) for kind, number in re.findall(r"^(\w+) +(\d+)", table, re.M)}


def dry_runs(planner, flags, count):
    """Chapter 08 accepts the printed layouts, and books what the formula says."""
    text, report = planner.report(flags)
    check(len(report["best"]) == 10, f"{flags}: {len(report['best'])} layouts, not 10")
    for layout in report["best"]:
        check(layout["dry_run"] in text, f"{flags}: the text has no {layout['dry_run']}")
        check(layout["memory"]["total"] <= report["limit_bytes"], f"{layout['flags']}: does not fit")
        check(0 < layout["mfu"] < 1 and layout["step_s"] > 0, f"{layout['flags']}: MFU {layout['mfu']}")
    order(flags, report)
    for layout in report["best"][:count]:
        found = planner.booked(layout["dry_run"], layout["largest_rank"])
        expected = layout["memory"]
        for kind in expected:
            check(found.get(kind) == expected[kind],
                  f"{layout['dry_run']}: {kind}: {found.get(kind)} bytes booked, {expected[kind]} printed")


def order(flags, report):
    """Layouts that are called equal are within 4% of the fastest of them; those after them are slower."""
    best, memory = report["best"], report["device_bytes"]
    classes = {}
    for place, layout in enumerate(best, 1):
        check(layout["equal_to"] <= place, f"{flags}: place {place} is equal to {layout['equal_to']}")
        classes.setdefault(layout["equal_to"], []).append(layout)
    check(list(classes) == sorted(classes), f"{flags}: classes {list(classes)}")
    slowest = 0
    for layouts in classes.values():
        seconds = [layout["step_s"] for layout in layouts]
        check(max(seconds) <= 1.04 * min(seconds) and min(seconds) >= slowest, f"{flags}: {seconds} after {slowest}")
        tight = [report["limit_bytes"] - layout["memory"]["total"] < memory / 10 for layout in layouts]
        check(tight == sorted(tight), f"{flags}: layouts without a tenth of the memory free: {tight}")
        slowest = max(seconds)


def first_list(planner):
    """Comes before the simulation, and has fewer rows than the last; nothing else is on stderr of a short run."""
    done = planner.plan(SMALL)
    check(0 < done.stdout.find("first list, by the estimate") < done.stdout.find("the 10 best"), done.stdout[:600])
    check(done.stderr == "" or all(line.startswith("plan: ") and line.endswith("%")
                                   for line in done.stderr.splitlines()), done.stderr)
    check("first list" not in planner.plan(LARGE).stdout, "a first list without a simulation")


def files(planner):
    """--csv has the table of the text, --json the same layouts; twice the same."""
    path = planner.work / "plan.csv"
    text, report = planner.report(f"{SMALL} --csv {path}")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    check(len(rows) == 10, f"--csv: {len(rows)} rows")
    for row, layout in zip(rows, report["best"]):
        check(row["layout"] in text, f"--csv: {row['layout']} is not in the text")
        check(abs(float(row["step, s"]) - layout["step_s"]) <= 1e-5 * layout["step_s"], f"--csv: step {row['step, s']}")
        check(int(float(row["GB"])) == layout["memory"]["total"], f"--csv: memory {row['GB']}")
    again, same = planner.report(f"{SMALL} --csv {path}")
    check(text == again and report == same, "two runs differ")
    shorter = planner.report(f"{SMALL} --best 3")[1]["best"]
    check(len(shorter) == 3 and shorter[0] == report["best"][0], "--best 3")


def choices(planner):
    """Flags that narrow the choice do, and nothing else."""
    flags = "--tp 2,4 --zero 1 --recompute full,selective --micro-batch 2 --sequence-parallel on"
    for layout in planner.report(f"{SMALL} {flags}")[1]["best"]:
        check(layout["tp"] in (2, 4) and layout["zero"] in (0, 1) and layout["micro_batch"] == 2, str(layout))
        check(layout["recompute"] in ("full", "selective") and layout["sequence_parallel"], str(layout))
    hybrid = planner.report(f"{SMALL} --zero 3 --hybrid-shard 4 --tp 1 --cp 1 --pp 1")[1]["best"]
    check(hybrid and all("--hybrid-shard 4" in layout["dry_run"] for layout in hybrid), "--hybrid-shard 4")
    overlap = planner.report(f"{SMALL} --tp 2 --tp-overlap off")[1]["best"]
    check(overlap and all("--tp-overlap" not in layout["dry_run"] for layout in overlap), "--tp-overlap off")
    fastest = [min(planner.report(SMALL + flag)[1]["best"], key=lambda layout: layout["step_s"])
               for flag in ("", " --fp8 current")]
    faster = fastest[1]
    check(faster["step_s"] < fastest[0]["step_s"], "FP8 is not faster")
    check("--fp8 current" in faster["dry_run"], "--fp8 is not in the command")


def experts(planner):
    """--ep narrows the choice, and what it does not go with is refused in one line."""
    text, report = planner.report(SPARSE.replace("--simulations 10", "--simulations 0") + " --ep 4")
    best = report["best"]
    check("Data parallelism alone: not among the layouts that --ep asks for." in text, text[:2000])
    check(best and all(layout["ep"] == 4 and "--ep 4 " in layout["dry_run"] for layout in best), "--ep 4")
    for model, flag, part in (("8b", "--ep 2", "needs a model with experts"),
                              ("mixtral-8x7b", "--fp8 current", "not supported with --experts"),
                              ("mixtral-8x7b", "--ep 3", "ep 3: --experts 8 is not divisible by it"),
                              ("mixtral-8x7b", "--tp 2 --sequence-parallel off", "tp 2: experts need")):
        error = planner.plan(f"{LARGE.replace('70b', model)} {flag}", code=2).stderr
        check(error.count("\n") == 1 and part in error, f"{flag}: {error}")


def too_small(planner):
    """Exit code 2, one line; the number of GPUs that it names works, and one node less does not."""
    flags = "--model 70b --cluster h100-8x8.json --seq-len 4096 --global-batch 960 --simulations 0 --gpus "
    error = planner.plan(flags + "8", code=2).stderr
    check(error.count("\n") == 1, f"not one line: {error}")
    found = re.search(r"fits in no layout: ([\d.]+) GB per device are missing \(([\d.]+) of ([\d.]+) GB.*"
                      r"the fewest that work: --gpus (\d+)", error)
    check(found, error)
    missing, needed, limit = map(float, found.groups()[:3])
    check(missing > 0 and abs(needed - limit - missing) <= 0.1, error)
    enough = int(found[4])
    planner.plan(flags + str(enough))
    if enough > 8:
        planner.plan(flags + str(enough - 8), code=2)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1]).resolve()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        planner = Planner(folder, pathlib.Path(work))
        dry_runs(planner, SMALL, 10)
        dry_runs(planner, TIGHT, 10)
        dry_runs(planner, LARGE, 10 if THOROUGH else 3)
        dry_runs(planner, SPARSE, 10 if THOROUGH else 3)
        dry_runs(planner, f"{SPARSE} --tp 2,4 --ep 2,4 --pp 2,4", 10 if THOROUGH else 3)
        experts(planner)
        first_list(planner)
        files(planner)
        choices(planner)
        too_small(planner)
    names = [] if THOROUGH else ["7b-8"]
    done = subprocess.run([sys.executable, str(ROOT / "docs/configurations.py"), *names, "--bin", str(folder)],
                          cwd=ROOT, timeout=1200)
    check(done.returncode == 0, "docs/configurations.md is not what the planner says")
    print(f"the planner's files, exit codes and dry runs: fine; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
