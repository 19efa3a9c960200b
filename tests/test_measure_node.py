"""What only this catches: a measurement (docs/measure_node.sh) that is cut off, fails or is resumed, and then lacks a
run or has it twice; and what its columns make of nvidia-smi's samples.

With programs on the CPU and tiny shapes; and, to be cut off in every part, with a clock that only runs take time of.
"""
import collections
import csv
import os
import re
import shutil
import sys
import time
import types

import pytest
from conftest import ROOT

import measure_node
import measure_node_machine

PARTS = list(measure_node.PARTS)
SECONDS = 5.0  # of each run by the clock below


def table(folder, part):
    path = folder / f"{part}.csv"
    return list(csv.DictReader(open(path, newline=""))) if path.exists() else []


# ---- the programs ----
def measured(run, *flags, code=0, binaries=None, out="out", env=None, tiny="--scale tiny --ranks 2 --commit c0ffee"):
    out = ["--out", out] if out else []  # the caller's folder
    return run("bash", ROOT / "docs/measure_node.sh", "--bin", binaries or run.binaries, *out, tiny, *flags, code=code,
               seconds=120, env=env)


def has(run, part, status, name, count, note=""):
    found = [row for row in table(run.folder / "out", part) if row["status"] == status and row["run"].startswith(name)]
    assert len(found) == count and all(re.search(note, row["note"], re.S) for row in found), found
    assert all(row[column] for row in found for column in ("hardware", "commit", "date", "command")), found


def test_too_little_time_then_every_run_then_nothing_again(run):
    measured(run, "--device cpu --minutes 0.05 ceilings links rank_slices")
    has(run, "ceilings", "not reached", "", 1)
    resumed = "--device cpu --resume ceilings links rank_slices"
    measured(run, resumed)
    for part, name, count in (("ceilings", "copy", 8), ("links", "all-reduce over 2", 30), ("links", "links of 2", 2),
                              ("rank_slices", "", 12)):
        has(run, part, "ok", name, count)
    has(run, "ceilings", "not reached", "", 0)
    before = {path.name: path.read_text() for path in (run.folder / "out").iterdir()}
    measured(run, resumed)
    assert {path.name: path.read_text() for path in (run.folder / "out").iterdir()} == before


def test_a_failing_run_and_missing_programs_are_recorded(run):
    binaries = run.folder / "bin"
    binaries.mkdir()
    for path in run.binaries.iterdir():
        if not re.match("test_measure$|test_0[1-8]|07_fp8$", path.name):
            (binaries / path.name).symlink_to(path)
    for name, says in ("test_measure", "a reason"), ("07_fp8", "07_fp8: rank 0: out of GPU memory: 9 bytes"):
        (binaries / name).write_text(f'#!/bin/bash\necho "{says}"\nexit 3\n')
        (binaries / name).chmod(0o755)
    measured(run, "--device cpu tests_01 tests ceilings links fp8", code=1, binaries=binaries)
    has(run, "ceilings", "ok", "copy", 8)
    has(run, "links", "failed", "all-reduce over 2", 1, "^exit code 3; .*a reason")
    has(run, "fp8", "not run", "fp8 ", 4, "^out of GPU memory: 9 bytes$")
    for part, count in ("tests", 7), ("tests_01", 1):
        has(run, part, "not run", "", count, "is not there")
    assert "a reason\n" in (run.folder / "out/failed.log").read_text()


@pytest.fixture
def nvidia_smi(tmp_path):
    """A PATH with a nvidia-smi of the tests' own."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path/nvidia-smi").symlink_to(ROOT / "tests/fake_nvidia_smi.sh")
    return f"{tmp_path}/path:{os.environ['PATH']}"


@pytest.mark.parametrize("words", ["measure.py 08_loss --out /dev/full", "configurations.py --bin /nowhere"])
def test_scripts_say_one_line_of_a_path_that_cannot_be_used(run, words):
    script, *words = words.split()
    done = run(sys.executable, ROOT / "docs" / script, *words, code=2)
    assert re.fullmatch(rf"{script}: /(dev/full|nowhere)[\w./]*: [^\n]+\n", done.err), done


def test_refuses_where_there_is_nothing_to_measure(run, nvidia_smi):
    measured(run, "--device cpu", out=None, tiny="", code=2).says("name another folder")
    done = measured(run, out=None, tiny="", code=2, env={"CUDA_VISIBLE_DEVICES": ""})
    assert len((done.out + done.err).splitlines()) == 2, done
    done = measured(run, out=None, tiny="", code=2, env={"PATH": nvidia_smi, "FAKE_DRIVER": "570.86.10"})
    assert "measure_node: driver 570.86.10: programs of CUDA 13 need 580 or later\n" in done.err, done


def test_an_emulated_gpu_has_clock_power_limits_others_and_memory_in_each_row(run, nvidia_smi):
    if "emulated" not in run("01_single_gpu", "--device cuda --steps 0", code=None).out:
        pytest.skip("the programs have no emulated GPU")
    measured(run, "slice", env={"PATH": nvidia_smi, "FAKE_APPS": r"123, 2000\n"})
    for row in table(run.folder / "out", "slice"):
        assert [row[name] for name in ("sm_mhz", "power_w", "limited_by", "others", "driver", "other_gib")] == [
            "1410", "690.5", "power cap", "1 processes, 1024 MiB in use", "580.95.05", "0.292969"]


# ---- cut off, with a clock of its own and programs that are not started ----
class Clocked:
    def __init__(self, monkeypatch, capsys, folder):
        self.folder, self.capsys, self.now = folder, capsys, 1000.0
        self.hangs = lambda words: False
        clocked = self

        class Node(measure_node_machine.Node):
            def look(self):
                self.peak, self.name, self.hardware, self.gpus = None, "a GPU", "1 x a GPU", 8
                self.ranks, self.commit = 2, "c0ffee"

            def execute(self, words, environment, limit):
                took = limit if clocked.hangs(words) else min(SECONDS, limit)
                clocked.now += took
                return (None if took < SECONDS or clocked.hangs(words) else 0), "nothing", took

            def commit_here(self):
                return "c0ffee"

        monkeypatch.setattr(measure_node, "Node", Node)
        for module in (measure_node, measure_node_machine):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        self.monkeypatch = monkeypatch
        (folder / "bin").mkdir()
        for name in ["01_single_gpu", "test_measure", "07_fp8", "08_3d_full", *(f"test_0{i}" for i in range(1, 9))]:
            (folder / "bin" / name).write_text("")
            (folder / "bin" / name).chmod(0o755)

    def __call__(self, out, *flags, seconds=None):
        """({part: rows}, what was printed) of a call that may take so many seconds."""
        minutes = [] if seconds is None else ["--minutes", str((seconds + 12) / 60)]
        folders = ["--out", str(self.folder / out), "--bin", str(self.folder / "bin")]
        self.monkeypatch.setattr(sys, "argv", ["measure_node.py", "--device", "cuda", "--scale", "tiny", "--least", "1",
                                               *folders, *minutes, *flags])
        began = self.now
        measure_node.main()
        assert seconds is None or self.now - began <= seconds
        return {part: rows for part in PARTS if (rows := table(self.folder / out, part))}, self.capsys.readouterr().out


@pytest.fixture
def clocked(monkeypatch, capsys, tmp_path):
    return Clocked(monkeypatch, capsys, tmp_path)


def runs_of(tables):
    return {part: sorted(row["run"] for row in rows) for part, rows in tables.items()}


def test_cut_off_in_each_part_and_resumed_is_whole(clocked):
    whole, _ = clocked("whole")
    assert list(whole) == PARTS
    assert all(len(set(names)) == len(names) for names in runs_of(whole).values())
    started = [part for part, rows in whole.items() for row in rows if float(row["seconds"]) > 0]
    for part in dict.fromkeys(started):  # cut in the middle of its first run
        cut, text = clocked(f"cut-{part}", seconds=SECONDS * (started.index(part) + 0.5))
        at = PARTS.index(part)
        assert {name: rows for name, rows in runs_of(cut).items() if name in PARTS[:at]} == {
            name: rows for name, rows in runs_of(whole).items() if name in PARTS[:at]}, part
        assert cut[part][-1]["note"].startswith("cut off after") and not set(cut) & set(PARTS[at + 1:]), part
        assert "not reached" in text
        done, _ = clocked(f"cut-{part}", "--resume")
        assert runs_of(done) == runs_of(whole), part
        assert not [row for rows in done.values() for row in rows if row["status"] == "not reached"], part
    # What is worth most comes first; nine minutes reach the tests of 01. The ranks of tests are those of CTest.
    assert PARTS[:6] == ["ceilings", "slice", "attention", "rank_slices", "ops", "tests_01"]
    assert PARTS[-1] == "sanitizer"
    assert sum(measure_node.PARTS[part].seconds for part in PARTS[:6]) <= 528
    ranks = {row["run"]: re.search(r" -np (\d+) ", row["command"])[1] for row in whole["tests"]}
    of_ctest = (ROOT / "tests/CMakeLists.txt").read_text()
    assert ranks == dict(re.findall(r"^add_cuda_test\((0[2-8]_cuda) (\d+)", of_ctest, re.M))


def test_runs_that_hang_run_again_on_one_stream(clocked):
    clocked.hangs = lambda words: "--tp 2 --" in " ".join(words) and "--comm-streams" not in words
    tables, _ = clocked("out", "layouts", "shared_card")
    hung = [row["run"] for row in tables["layouts"] if row["status"] == "timeout"]
    again = [row for row in tables["layouts"] if row["run"].endswith(", one stream")]
    assert len(hung) >= 3 and [row["run"] for row in again] == [f"{run}, one stream" for run in hung]
    assert all("--comm-streams one" in row["command"] and row["status"] != "timeout" for row in again)
    placed = collections.Counter(part for part in tables for row in tables[part]
                                 if "--map-by ppr:2:node --bind-to numa" in row["command"])
    assert placed == {"layouts": len(tables["layouts"]) - 1}  # all but one rank's


# ---- nvidia-smi ----
def test_columns_of_nvidia_smi(monkeypatch, nvidia_smi):
    for name, value in {"PATH": nvidia_smi, "FAKE_APPS": r"123, 2000\n77, 10\n", "CUDA_VISIBLE_DEVICES": "0",
                        "FAKE_SAMPLE": "1410, 690.5, 0x0000000000000024, 1024"}.items():
        monkeypatch.setenv(name, value)
    monitor = measure_node_machine.Monitor()
    end = time.monotonic() + 20
    while len(monitor.samples) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    begin = monitor.samples[0].time
    assert monitor.before() == "2 processes, 1024 MiB in use"
    assert monitor.during(begin, time.monotonic()) == {
        "sm_mhz": 1410, "power_w": 690.5, "limited_by": "power cap, temperature (software)"}
    assert monitor.during(begin - 20, begin - 10) == {}
    monitor.child.kill()
    monitor.child.wait()


def test_columns_of_two_gpus_and_of_lines_without_numbers(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monitor = measure_node_machine.Monitor()
    monitor.samples = [measure_node_machine.parsed(line, 1.0) for line in
                       ("0, 1900, 300.0, 0x0000000000000001, 5", "1, 1200, 700.0, 0x0000000000000008, 5")]
    assert monitor.during(0, 2) == {"sm_mhz": 1200, "power_w": 700, "limited_by": "hardware slowdown"}
    for line in ("", "Field \"x\" is not a valid field to query.", "0, [N/A], [N/A], [N/A], 5"):
        assert measure_node_machine.parsed(line, 1.0) is None
