"""What only this catches: a measurement (docs/measure_node.sh) that is cut off, fails or is continued, and then lacks a
run or has it twice; figures without a floor or an expected one beside them; what the check says of a machine; and what
the columns make of nvidia-smi's samples.

With programs on the CPU and tiny shapes; and, to be cut off in every step, with a clock that only runs take time of.
"""
import collections
import csv
import os
import re
import sys
import time
import types

import pytest
from conftest import ROOT

import measure_node
import measure_node_machine as machine

STEPS = list(measure_node.STEPS)
SECONDS = 50.0  # of each run by the clock below


def table(folder, step):
    path = folder / f"{step}.csv"
    return list(csv.DictReader(open(path, newline=""))) if path.exists() else []


# ---- the programs ----
def measured(run, *flags, code=0, binaries=None, out="out", env=None):
    return run("bash", ROOT / "docs/measure_node.sh", "--bin", binaries or run.binaries, "--out", out, *flags,
               code=code, seconds=120, env=env)


def has(run, step, status, name, count, note=""):
    found = [row for row in table(run.folder / "out", step) if row["status"] == status and row["run"].startswith(name)]
    assert len(found) == count and all(re.search(note, row["note"], re.S) for row in found), found
    assert all(row[column] for row in found for column in ("hardware", "commit", "date")), found
    return found


def test_too_little_time_then_every_run_then_nothing_again(run):
    steps = "--device cpu ceilings slice links rank_70b"
    measured(run, "--minutes 0.05", steps).says("the time is over at ceilings, copy, bf16", where="out")
    assert {path.name for path in (run.folder / "out").iterdir()} == {"check.csv"}
    measured(run, steps)
    for row in has(run, "ceilings", "ok", "copy, bf16", 4):
        assert float(row["value"]) >= 0 and row["expected"], row
    steps_of = [has(run, "slice", "ok", "bf16, 4 micro-batches", 23)[0], *has(run, "rank_70b", "ok", "first stage", 1)]
    for row in steps_of:
        assert all(float(row[column]) > 0 for column in ("step_s", "expected_s", "tokens_per_s", "peak_gib")), row
    ops = {row["op"]: row for row in table(run.folder / "out", "slice")[1:]}
    for op in ("matmul", "attention", "attention_backward", "adamw", "whole_step"):
        assert float(ops[op]["ms"]) > 0 and float(ops[op]["expected_ms"]) > 0, ops[op]
    assert float(ops["adamw"]["floor_ms"]) > 0
    columns = open(run.folder / "out/slice.csv").readline()
    assert ",ms,floor_ms,expected_ms," in columns and ",step_s,floor_s,expected_s," in columns
    assert float(has(run, "links", "ok", "all-reduce over 2", 42)[0]["expected"]) == 3.6e11
    has(run, "links", "ok", "links of 2", 1)
    before = {path.name: path.read_text() for path in (run.folder / "out").iterdir() if path.name != "check.csv"}
    measured(run, steps)
    assert {name: (run.folder / "out" / name).read_text() for name in before} == before


def test_floor_and_expected_step_are_those_of_the_cost_model(binaries):
    file = ROOT / "08_3d_full/plan/clusters/h100-8"
    node = types.SimpleNamespace(bin=binaries, cluster=True, end=float("inf"), file=file)
    words = [*measure_node.words_of(measure_node.SLICE), "--dtype", "bf16"]
    plan = machine.Node.expected(node, words)
    assert plan["matmul"] > plan["attention_backward"] > plan["attention"] > 1
    row = measure_node.step_row(measure_node.SLICE, plan, 0.106932)  # as on the card: docs/results/gpu/slice.csv
    assert row["tokens_per_s"] == pytest.approx(76610, rel=1e-4) and row["expected_s"] == plan["the step"] / 1e3
    assert row["mfu"] == pytest.approx(0.530, rel=2e-3) and row["floor_s"] == pytest.approx(0.0567, rel=2e-3)
    assert row["model_tflops_per_rank"] == pytest.approx(524.4, rel=2e-3) and 24 < plan["peak memory"] < 28
    words = [*measure_node.words_of((*measure_node.SLICE[:7], 4)), "--dtype", "bf16", "--pp", "2"]
    several = machine.Node.expected(node, words, 8)  # says "2 of 8 ranks"
    assert several["% of"] == plan["% of"] == 989 and several["computation"] < several["the step"]


def test_a_failing_run_and_missing_programs_are_recorded(run):
    binaries = run.folder / "bin"
    binaries.mkdir()
    for path in run.binaries.iterdir():
        if not re.match("test_measure$|test_0[1-8]|07_fp8$", path.name):
            (binaries / path.name).symlink_to(path)
    for name, says in ("test_measure", "a reason"), ("07_fp8", "07_fp8: rank 0: out of GPU memory: 9 bytes"):
        (binaries / name).write_text(f'#!/bin/bash\necho "{says}"\nexit 3\n')
        (binaries / name).chmod(0o755)
    steps = "--device cpu kernels tests ceilings links fp8"
    measured(run, steps, code=1, binaries=binaries).says("links: all-reduce over 2: failed", where="out")
    has(run, "ceilings", "ok", "copy", 8)
    has(run, "links", "failed", "all-reduce over 2", 1, "^exit code 3; .*a reason")
    has(run, "fp8", "not run", "fp8 ", 4, "^out of GPU memory: 9 bytes$")
    for step, count in ("tests", 9), ("kernels", 1):
        has(run, step, "not run", "", count, "is not there")
    assert "a reason\n" in (run.folder / "out/failed.log").read_text()
    measured(run, "--device cpu links products", code=1, binaries=binaries)  # it stands, and is told again
    has(run, "products", "not run", "all", 1, "^not here: products in bf16")
    has(run, "links", "failed", "all-reduce over 2", 1)


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


def test_refuses_where_there_is_nothing_to_measure(run):
    measured(run, "--device cpu slices", code=2).says("slices: the steps are kernels, nccl, ceilings, ")
    done = measured(run, code=2, env={"CUDA_VISIBLE_DEVICES": "", "EMULATE_GPUS": "0"})
    assert len(done.err.splitlines()) == 1 and done.err.startswith("measure_node: 01_single_gpu: --device cuda: "), done
    assert not (run.folder / "out").exists()


def test_an_emulated_gpu_has_clock_power_limits_others_and_memory_in_each_row(run, nvidia_smi):
    if "emulated" not in run("01_single_gpu", "--device cuda --steps 0", code=None).out:
        pytest.skip("the programs have no emulated GPU")
    measured(run, "slice", env={"PATH": nvidia_smi})
    for row in table(run.folder / "out", "slice"):
        assert [row[name] for name in ("sm_mhz", "power_w", "limited_by", "others", "driver")] == [
            "1410", "690.5", "power cap", "1024 MiB in use", "570.86.10"]


# ---- the check ----
@pytest.fixture
def checked(tmp_path, monkeypatch, nvidia_smi):
    """checked(libraries, cores=..., **environment): {what: (found, advice)} on a machine of eight GPUs."""
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").write_text("#!/bin/bash\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    (tmp_path / "cuda/bin/nvcc").chmod(0o755)
    (tmp_path / "path/bash").symlink_to("/bin/bash")

    def check(libraries, cores=16, path=f"{tmp_path}/path", **environment):
        monkeypatch.setattr(machine, "CUDA", f"{tmp_path}/cuda")
        monkeypatch.setattr(machine, "version", lambda library, _: libraries.get(library.replace(str(tmp_path), ""), 0))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            monkeypatch.delenv(name)
        for name, value in {"PATH": path, **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(machine.programs, "ENVIRONMENT", {**os.environ, "PATH": f"{path}:/usr/bin:/bin"})
        found, *rest = machine.look()
        return {what: each for what, *each in found}, *rest
    return check


def test_check_of_a_whole_machine(checked, tmp_path):
    found, memory, link, options = checked({"libcuda.so.1": 13000, "libnccl.so.2": 22809},
                                  path=f"{tmp_path}/path:{os.environ['PATH']}")
    assert not [what for what, (_, advice) in found.items() if advice], found
    assert found["driver"][0] == "570.86.10, CUDA 13.0" and found["NCCL"][0] == "2.28.9"
    assert found["GPUs"][0].startswith("8 x NVIDIA H100 80GB HBM3, 81559 MiB") and memory == 81559 * 2**20
    assert found["links"][0] == "18 NVLinks, 478 GB/s" and abs(link - 478) < 1 and not options


def test_check_finds_nvcc_and_says_what_is_missing(checked, tmp_path):
    found, *_ = checked({"libcuda.so.1": 12080, "libnccl.so.2": 22304})
    assert found["nvcc"] == [f"{tmp_path}/cuda/bin/nvcc", ""]
    assert machine.programs.ENVIRONMENT["PATH"].endswith(f":{tmp_path}/cuda/bin")
    assert found["driver"] == ["570.86.10, CUDA 12.8",
                               "older than nvcc: install cuda-compat-13-0 or a newer driver, or load CUDA 12"]
    assert "2.26" in found["NCCL"][1] and found["NCCL"][0] == "2.23.4"


def test_check_takes_an_older_driver_and_nccl_from_packages(checked, tmp_path, monkeypatch):
    found, *_ = checked({"libcuda.so.1": 12080, "/cuda/compat/libcuda.so.1": 13000})
    assert found["driver"] == ["570.86.10, CUDA 13.0", ""] and "apt install libnccl-dev" in found["NCCL"][1]
    assert machine.programs.ENVIRONMENT["LD_LIBRARY_PATH"].split(":")[0] == f"{tmp_path}/cuda/compat"
    packages = tmp_path / "site/nvidia/nccl/lib"
    packages.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    found, _, _, options = checked({"/site/nvidia/nccl/lib/libnccl.so.2": 22703})
    assert found["NCCL"] == ["2.27.3", ""] and options[0] == f"-DNCCL_LIBRARY={packages}/libnccl.so.2"
    assert str(packages) in machine.programs.ENVIRONMENT["LD_LIBRARY_PATH"]
    # A driver of the same major version runs programs of a newer toolkit.
    assert checked({"libcuda.so.1": 13000})[0]["driver"][1] == ""


@pytest.mark.parametrize("job,typed", [
    ("96", "type srun --gpus-per-node=8 --cpus-per-task=96 --pty bash docs/measure_node.sh"),
    ("1(x2)", "type salloc --nodes=1 --gpus-per-node=8 --cpus-per-task=16 srun --gpus-per-node=8 --cpus-per-task=16 "
     "--pty bash docs/measure_node.sh")])
def test_check_says_what_to_type_under_slurm(checked, tmp_path, job, typed):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": job}
    assert checked({}, cores=1, **slurm)[0]["cores"] == ["1 for 8 ranks", typed]
    (tmp_path / "path/nvidia-smi").unlink()  # salloc alone: on the login node
    assert checked({}, **slurm)[0]["driver"] == ["", typed]
    assert "taskset" in checked({}, cores=0)[0]["cores"][1]


def test_check_ends_where_programs_hang(checked, tmp_path, monkeypatch):
    run, limits = machine.subprocess.run, []
    monkeypatch.setattr(machine.subprocess, "run", lambda words, timeout, **options: (
        limits.append(timeout), run(words, timeout=timeout / 20, **options))[1])
    for name in ("path/nvidia-smi", "path/mpirun", "cuda/bin/nvcc"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).write_text("#!/bin/bash\ntrap '' TERM\nfor i in {1..100}; do /bin/sleep 1; done\n")
        (tmp_path / name).chmod(0o755)
    assert checked({})[0]["GPUs"] == ["", "nvidia-smi shows none"]
    assert len(limits) >= 4 and sum(limits) <= 20


def test_usual_rates_are_those_of_the_cost_model():
    source = (ROOT / "08_3d_full/complete/layout/device_model.cpp").read_text()
    for each in re.findall(r"\{\.name = .*?\.attention", source, re.S):
        of = dict(re.findall(r"\.(\w+) = ([\d.e]+),", each))
        cold = float(of["peak_bf16"]) * float(of["product_efficiency"]) / 1e12
        assert measure_node.USUAL[re.search(r'name = "(\w+)"', each)[1]] == pytest.approx(
            (float(of["copy_bytes_per_s"]) / 1e9, cold, cold * float(of["sustained"])), rel=2e-3)


# ---- cut off, with a clock of its own and programs that are not started ----
class Clocked:
    def __init__(self, monkeypatch, capsys, folder):
        self.folder, self.capsys, self.now, self.hangs, self.name = folder, capsys, 1000.0, lambda words: False, "H100"
        self.commit = "c0ffee"

        def execute(words, limit):
            if words[-1] == "--version" or "--steps 0" in " ".join(map(str, words)):
                return 0, f"bf16 on cuda ({self.name}, 2 visible) 01_single_gpu: commit {self.commit}", 0
            if "--simulate" in words:
                return 0, "peak memory 90.00 GB on rank 0" if "--zero" in words and "3" in words else "", 0
            took = limit if self.hangs(words) else min(SECONDS, limit)
            self.now += took
            return (None if took < SECONDS or self.hangs(words) else 0), "nothing", took
        for module in (machine, measure_node):
            monkeypatch.setattr(module, "execute", execute)
        monkeypatch.setattr(machine, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(measure_node, "look", lambda: ([("driver", "580.1, CUDA 13.0", "")], 85.5e9, 478, []))
        monkeypatch.setattr(machine.programs, "ENVIRONMENT", dict(machine.programs.ENVIRONMENT))
        self.monkeypatch = monkeypatch
        (folder / "bin").mkdir()
        for name in ["01_single_gpu", "test_measure", "07_fp8", "08_3d_full", *(f"test_0{i}" for i in range(1, 9))]:
            (folder / "bin" / name).write_text("")
            (folder / "bin" / name).chmod(0o755)

    def __call__(self, out, *flags, seconds=None):
        """({step: rows}, what was printed) of a call that may take so many seconds."""
        minutes = [] if seconds is None else ["--minutes", str(seconds / 60)]
        folders = ["--out", str(self.folder / out), "--bin", str(self.folder / "bin")]
        self.monkeypatch.setattr(sys, "argv", ["measure_node.py", *folders, *minutes, *flags])
        began = self.now
        self.monkeypatch.setattr(machine, "BEGAN", began)
        measure_node.main()
        assert seconds is None or self.now - began <= seconds
        return {step: rows for step in STEPS if (rows := table(self.folder / out, step))}, self.capsys.readouterr().out


@pytest.fixture
def clocked(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    return Clocked(monkeypatch, capsys, tmp_path)


def runs_of(tables):
    return {step: sorted(row["run"] for row in rows) for step, rows in tables.items()}


def test_cut_off_in_each_step_and_continued_is_whole(clocked):
    whole, _ = clocked("whole")
    assert list(whole) == STEPS
    assert all(len(set(names)) == len(names) for names in runs_of(whole).values())
    started = [step for step, rows in whole.items() for row in rows if float(row["seconds"]) > 0]
    for step in dict.fromkeys(started):  # cut in the middle of its first run
        cut, text = clocked(f"cut-{step}", seconds=SECONDS * (started.index(step) + 0.5))
        at = STEPS.index(step)
        assert runs_of(cut) == {name: rows for name, rows in runs_of(whole).items() if name in STEPS[:at]}, step
        assert f"the time is over at {step}, " in text
        done, _ = clocked(f"cut-{step}")
        assert runs_of(done) == runs_of(whole), step
        assert all(row in done[name] for name, rows in cut.items() for row in rows if row["status"] != "not run")
    clocked.commit = "decade"  # another commit's rows are replaced, another GPU's stay
    assert [row["commit"] for row in clocked("whole", "nccl")[0]["nccl"]] == ["decade"]
    clocked.name = "L40S"
    after = clocked("whole", "nccl")[0]["nccl"]
    assert [(row["hardware"], row["run"]) for row in after] == [("2 x H100", "02_cuda"), ("2 x L40S", "02_cuda")]
    # What is worth most comes first. The ranks of tests are those of CTest.
    assert STEPS[:9] == "kernels nccl ceilings slice attention fp8 torch tests_01 rank_70b".split()
    ranks = {row["run"]: re.search(r" -np (\d+) ", row["command"])[1] for row in [*whole["nccl"], *whole["tests"]]}
    of_ctest = (ROOT / "tests/CMakeLists.txt").read_text()
    assert ranks == dict(re.findall(r"^add_cuda_test\((0[2-8]_cuda) (\d+)", of_ctest, re.M))
    for row in whole["rank_slices"]:  # 90 GB, on a card of 85.5
        large = row["run"].startswith("zero-3")
        assert row["status"] == ("not run" if large else "failed"), row
        assert row["note"].startswith("needs 90.0 GB, the card has 85.5") == large, row


def test_runs_that_hang_run_again_on_one_stream(clocked):
    clocked.hangs = lambda words: "--tp 2 --pp" in " ".join(map(str, words)) and "--comm-streams" not in words
    tables, _ = clocked("out", "layouts", "shared_card")
    hung = [row["run"] for row in tables["layouts"] if row["status"] == "timeout"]
    again = [row for row in tables["layouts"] if row["run"].endswith(", one stream")]
    assert hung and [row["run"] for row in again] == [f"{run}, one stream" for run in hung]
    assert all("--comm-streams one" in row["command"] and row["status"] != "timeout" for row in again)
    placed = collections.Counter(step for step in tables for row in tables[step]
                                 if "--map-by ppr:2:node --bind-to numa" in row["command"])
    started = [row for row in tables["layouts"] if row["command"]]
    assert placed == {"layouts": len(started) - 1}  # all but one rank's


# ---- nvidia-smi ----
def test_columns_of_samples():
    samples = ["0, 1900, 300.0, 0x0000000000000001, 5\n", "0, 1410, 690.5, 0x0000000000000024, 1024\n",
               "0, 1410, 690.5, 0x0000000000000004, 1024\n"]
    assert machine.watched(samples) == {
        "sm_mhz": 1410, "power_w": 690.5, "limited_by": "power cap, temperature (software)"}
    two = ["0, 1900, 300.0, 0x0000000000000001, 5\n", "1, 1200, 700.0, 0x0000000000000008, 5\n"]
    assert machine.watched(two) == {"sm_mhz": 1200, "power_w": 700, "limited_by": "hardware slowdown"}
    for line in ("", "Field \"x\" is not a valid field to query.", "0, [N/A], [N/A], [N/A], 5"):
        assert machine.watched([line]) == {}
