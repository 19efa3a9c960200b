#!/usr/bin/env python3
"""docs/measure_node.py cut off in each of its parts, and resumed: with a clock that only runs take time of, and programs
that are not started. And what its monitor makes of nvidia-smi's samples.

    python3 tests/measure_node_cuts.py
"""
import contextlib
import csv
import io
import os
import pathlib
import re
import stat
import sys
import tempfile
import time
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import measure_node  # noqa: E402
import measure_node_machine  # noqa: E402
import measure_node_monitor  # noqa: E402

SECONDS = 5.0  # of each run
FAILED = []


def expect(condition, *what):
    if not condition:
        FAILED.append(what)
        print("FAIL", *what)


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


def measure(folder, out, seconds, resume=False, parts=(), hangs=lambda words: False):
    """The statuses by part, in the order of the parts, of a call that may take so many seconds; and what it printed."""
    clock = Clock()

    class FakeNode(measure_node_machine.Node):
        def look(self):
            self.peak, self.name, self.hardware, self.gpus = None, "a GPU", "1 x a GPU", 8
            self.ranks, self.commit = 2, "c0ffee"

        def execute(self, words, environment, limit):
            if hangs(words):
                clock.now += limit
                return None, "nothing", limit
            clock.now += min(SECONDS, limit)
            return (0 if limit >= SECONDS else None), "nothing", min(SECONDS, limit)

        def commit_here(self):
            return "c0ffee"

    modules = (measure_node, measure_node_machine)
    kept = measure_node.Node, [module.time for module in modules], sys.argv
    fake_time = types.SimpleNamespace(monotonic=clock.monotonic)
    measure_node.Node = FakeNode
    for module in modules:
        module.time = fake_time
    sys.argv = ["measure_node.py", "--device", "cuda", "--scale", "tiny", "--out", str(out),
                "--bin", str(folder), "--least", "1",
                *(["--resume"] if resume else []), *(["--minutes", str((seconds + 12) / 60)] if seconds else []), *parts]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            measure_node.main()
    finally:
        measure_node.Node, (modules[0].time, modules[1].time), sys.argv = kept
    rows = {}
    for part in measure_node.PARTS:
        path = out / f"{part}.csv"
        if path.exists():
            rows[part] = list(csv.DictReader(open(path, newline="")))
    return rows, text.getvalue(), clock.now - 1000


def cuts(work):
    programs = work / "bin"
    programs.mkdir()
    names = ["01_single_gpu", "02_data_parallel", "07_fp8", "08_3d_full", *(f"test_0{i}" for i in range(1, 9))]
    for name in names:
        (programs / name).write_text("")
        (programs / name).chmod(stat.S_IRWXU)
    whole, _, seconds = measure(programs, work / "whole", None)
    expect(list(whole) == list(measure_node.PARTS), "parts of a whole run", list(whole))
    runs = {part: [row["run"] for row in rows] for part, rows in whole.items()}
    expect(all(len(set(names)) == len(names) for names in runs.values()), "two runs of one name", runs)
    started = [(part, row["run"]) for part, rows in whole.items() for row in rows if float(row["seconds"]) > 0]
    order = list(measure_node.PARTS)
    expect(order[:6] == ["ceilings", "slice", "attention", "rank_slices", "ops", "tests_01"], "order", order)
    expect(order[-1] == "sanitizer", "the sanitizer is not last", order)
    capped = {part: measure_node.PARTS[part].seconds for part in order}
    expect(sum(capped[part] for part in order[:6]) <= 528, "nine minutes do not reach the tests of 01", capped)
    of_ctest = dict(re.findall(r"^add_cuda_test\((0[2-8]_cuda) (\d+)", (ROOT / "tests/CMakeLists.txt").read_text(), re.M))
    ranks = {row["run"]: re.search(r" -np (\d+) ", row["command"]).group(1) for row in whole["tests"]}
    expect(ranks == of_ctest and len(ranks) == 7, "ranks of the chapters' tests", ranks, of_ctest)

    for part in order:  # cut in the middle of the first run of this part
        first = next((i for i, (of, _) in enumerate(started) if of == part), None)
        if first is None:
            continue  # nothing of it runs here
        out = work / f"cut-{part}"
        cut, text, took = measure(programs, out, SECONDS * first + SECONDS / 2)
        expect(took <= SECONDS * first + SECONDS / 2, part, "took", took)
        for earlier in order[:order.index(part)]:
            expect([row["run"] for row in cut.get(earlier, [])] == runs[earlier], part, "cut: earlier part", earlier)
        expect(cut[part][-1]["note"].startswith("cut off after"), part, "cut:", cut[part][-1])
        later = [name for name in order[order.index(part) + 1:] if name in cut and cut[name]]
        expect(not later, part, "cut: later parts have rows", later)
        expect("not reached" in text, part, "cut: the summary does not say so")
        done, _, _ = measure(programs, out, None, resume=True)
        expect({name: sorted(row["run"] for row in rows) for name, rows in done.items()} ==
               {name: sorted(names) for name, names in runs.items()}, part, "resumed: other runs than a whole one")
        expect(not [row for rows in done.values() for row in rows if row["status"] == "not reached"], part,
               "resumed: something is not reached")
    print(f"ok   cut in {len(order)} parts and resumed; whole: {len(started)} runs, {seconds:.0f} s of a fake clock")


def layouts(work):
    def hangs(words):
        return "--tp 2 --" in " ".join(words) and "--comm-streams" not in words
    rows = measure(work / "bin", work / "hang", None, parts=["layouts", "shared_card"], hangs=hangs)[0]["layouts"]
    hung = [row["run"] for row in rows if row["status"] == "timeout"]
    expect(len(hung) >= 3, "runs that hang", hung)
    again = [row for row in rows if row["run"].endswith(", one stream")]
    expect([row["run"] for row in again] == [f"{run}, one stream" for run in hung], "runs on one stream", again)
    expect(all("--comm-streams one" in row["command"] and row["status"] != "timeout" for row in again), again)
    placed = "--map-by ppr:2:node --bind-to numa"
    for part, count in ("layouts", len(rows) - 1), ("shared_card", 0):
        there = csv.DictReader(open(work / "hang" / f"{part}.csv", newline=""))
        expect(sum(placed in row["command"] for row in there) == count, part, "placement of ranks")
    print(f"ok   {len(hung)} runs that hang, again on one stream; ranks of their own GPU on one socket each")


def monitor(work):
    link = work / "path"
    link.mkdir()
    (link / "nvidia-smi").symlink_to(ROOT / "tests/fake_nvidia_smi.sh")
    kept = dict(os.environ)
    os.environ.update(PATH=f"{link}:{os.environ['PATH']}", FAKE_APPS="123, 2000\\n77, 10\\n",
                      FAKE_SAMPLE="1410, 690.5, 0x0000000000000024, 1024", CUDA_VISIBLE_DEVICES="0")
    try:
        watch = measure_node_monitor.Monitor()
        for _ in range(200):
            if len(watch.samples) > 2:
                break
            time.sleep(0.02)
        begin, others = watch.samples[0].time, watch.before()
        columns = watch.during(begin, time.monotonic())
        expect(others == "2 processes, 1024 MiB in use", others)
        expect(columns == {"sm_mhz": 1410, "power_w": 690.5, "limited_by": "power cap, temperature (software)"}, columns)
        expect(watch.during(begin - 20, begin - 10) == {}, "samples of another time")
        child = watch.child
        watch.stop()
        expect(child.returncode is not None, "nvidia-smi goes on")
        two = measure_node_monitor.Monitor.__new__(measure_node_monitor.Monitor)
        two.samples = [measure_node_monitor.parsed(line, 1.0) for line in
                       ("0, 1900, 300.0, 0x0000000000000001, 5", "1, 1200, 700.0, 0x0000000000000008, 5")]
        expect(two.during(0, 2) == {"sm_mhz": 1200, "power_w": 700, "limited_by": "hardware slowdown"}, two.during(0, 2))
        for line in ("", "Field \"x\" is not a valid field to query.", "0, [N/A], [N/A], [N/A], 5"):
            expect(measure_node_monitor.parsed(line, 1.0) is None, line)
    finally:
        os.environ.clear()
        os.environ.update(kept)
    print("ok   the monitor's columns")


with tempfile.TemporaryDirectory() as folder:
    cuts(pathlib.Path(folder))
    layouts(pathlib.Path(folder))
    monitor(pathlib.Path(folder))
sys.exit(1 if FAILED else 0)
