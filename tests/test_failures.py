"""Ranks that disagree, die, hang or are interrupted: the run ends in time, and says who and where."""
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import time

import programs
import pytest
from conftest import PATIENCE, SLICE, in_turn

DATA_PARALLEL = "02_data_parallel"
MODEL = "--layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16 --tables off"

# ---- ranks that disagree (02_faults.cpp): way and flags, exit code, seconds, what is said ----
WAYS = [
    ("skip", 1, 10, ["mismatch", "rank 0: dp.all_reduce #101, 1000 fp32", "rank 1: dp.barrier #101",
                     "tests/02_faults.cpp"]),
    ("skip-one-of-many", 1, 10, ["mismatch", "rank 0: dp.all_reduce #105", "rank 1: dp.finish #105"]),
    ("size", 1, 10, ["mismatch", "rank 0: dp.all_reduce #101, 1000 fp32",
                     "rank 1: dp.all_reduce #101, 500 fp32"]),
    ("dtype", 1, 10, ["mismatch", "rank 1: dp.all_reduce #101, 1000 bf16"]),
    ("reduction", 1, 10, ["mismatch", "rank 1: dp.all_reduce #101, 1000 fp32 max"]),
    ("root", 1, 10, ["mismatch", "from rank 0", "from rank 1"]),
    ("counts", 1, 10, ["mismatch", "rank 1 sends 11 elements to rank 2, which expects 10",
                       "rank 2: dp.all_to_all #101, fp32 by counts"]),
    ("counts --comm-check off", 1, 10,
     ["mismatch: rank 1 sent more than the 40 bytes this rank expected"]),
    ("scalar", 1, 10, ["mismatch", "dp.scalar #101, 1 numbers", "dp.barrier #101"]),
    ("message-too-long", 1, 10,
     ["mismatch", "rank 1: check failed", "rank 0 sent more than the 2000 bytes"]),
    ("message-too-short", 1, 10,
     ["mismatch", "rank 1: check failed", "rank 0 sent 2000 bytes, this rank expected 4000"]),
    # A rank that is missing is found by the clock, by name, with the log of the last 64.
    ("silence --comm-check off --comm-timeout 3", 1, 9,
     ["dp.all_reduce #101, 1000 fp32 has not ended after 3 s (--comm-timeout)", "NOT ENDED", "its last 64 collectives",
      "dp.all_reduce #38,", "dp.all_reduce #100,"]),
    # A rank hangs where no collective in the log waits for it: its heartbeat stops, or the others wait in MPI_Init.
    ("stop-while-writing --comm-timeout 2", 1, 9,
     ["rank 1 has not responded for 2 s (--comm-timeout) while files are read or written"]),
    ("stop-in-setup --comm-timeout 2", 1, 9, ["rank 1 has not responded for 2 s (--comm-timeout)"]),
    ("stop-at-start --comm-timeout 1", 1, 12, ["MPI_Init has not ended after 5 s (--comm-timeout)"]),
    ("write-for-long --comm-timeout 1", 0, 30, []),
    ("lone-usage --comm-timeout 60", 2, 10, ["rank 1: --here: not foreseen"]),
    ("check", 1, 5, ["rank 1: check failed: !odd_one: 1 is not 2 (tests/02_faults.cpp:"]),
    ("throw", 1, 10, ["rank 1: a disk is full"])]


@pytest.mark.parametrize("way, code, seconds, parts", WAYS, ids=[row[0] for row in WAYS])
def test_disagree(run, way, code, seconds, parts):
    done = run("test_02_faults", way, ranks=3, code=code).within(seconds).says(*parts)
    assert (code or not done.err) and "dp.all_reduce #36," not in done.err, done


def test_usage_error_of_one_rank(run):
    run.refused("test_02_faults", "usage", says="--here: rank 1 has no such disk; --there works", ranks=3, seconds=5)


# ---- chapter 02's program ----
@pytest.mark.parametrize("flags, parts", [
    ("--comm fake --fake-world 4", ["--comm fake", "one process"]),
    ("--trace nowhere/t.json", ["--trace nowhere/t.json", "existing, writable folder"])])  # which only rank 0 opens
def test_refused(run, flags, parts):
    run.refused(DATA_PARALLEL, MODEL, "--steps 1 --metrics m.jsonl", flags, says=parts, ranks=2)


def test_help_once(run):
    assert run(DATA_PARALLEL, "--help", ranks=2).within(5).out.count("--all-reduce ") == 1


def test_loss_that_is_not_finite(run):
    """One line, with the parameter and the rank; an alarm."""
    done = run(DATA_PARALLEL, MODEL, "--global-batch 6 --steps 9 --lr 1e30 --warmup-steps 0 --clip 0 --metrics m.jsonl",
               ranks=3, code=1).within(10)
    line = r"^02_data_parallel: step \d+: loss .*first non-finite parameter: model\..* on rank 0 \(3 of 3 ranks have"
    assert len(re.findall(line, done.err, re.M)) == 1, done
    assert not re.search(r"MPI_ABORT|^rank \d+:", done.err, re.M | re.I), done
    last = json.loads((run.folder / "m.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["kind"]) == ("alarm", "non_finite"), last


def test_too_little_address_space(run, binaries):
    program = binaries / DATA_PARALLEL
    if "asan" in subprocess.run(["ldd", program], capture_output=True, text=True).stdout:
        pytest.skip("OpenBLAS retries for ever to map its buffers")
    least = 300_000  # KiB in which the program itself has room
    while run("prlimit", f"--as={1024 * least}", program, "--version", code=None).code == 127:
        least += 20_000
    done = run("prlimit", f"--as={1024 * least} --cpu=20", program, MODEL, "--steps 1", ranks=2, code=2).within(20)
    assert done.err.count(f"{DATA_PARALLEL}: ") == 1, done
    done.says(f"{DATA_PARALLEL}: ulimit -v {least}: leaves no room")


# ---- ranks and mpirun that are killed, stopped or interrupted ----
# start-up: a random time after the launch; training: after some steps; saving: while the weights are written.
TIMEOUT = 4
LIMIT = {"start-up": TIMEOUT + 4 + 5, "training": TIMEOUT + 5, "saving": TIMEOUT + 5}  # MPI_Init has 4 s more
SIGNALS = ["KILL", "TERM", "INT", "QUIT", "SEGV", "STOP", "mpirun KILL", "mpirun TERM", "mpirun INT"]
ALWAYS = [("training", "KILL"), ("training", "STOP"), ("saving", "STOP")]
OTHERS = [(moment, what) for what in SIGNALS for moment in LIMIT if (moment, what) not in ALWAYS]


def ranks_of(process, program):
    """{rank: process id} of those that have not ended."""
    found = {}
    for pid in programs.members(process.process.pid):
        try:
            rank = re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)\0", pathlib.Path(f"/proc/{pid}/environ").read_bytes())
            if rank and os.readlink(f"/proc/{pid}/exe").endswith(program):  # a zombie has neither
                found[int(rank[1])] = pid
        except OSError:
            pass  # it has ended
    return found


class Missed(AssertionError):
    """The run had ended before the moment came."""


def wait_for(condition, process):
    end = time.monotonic() + 60 * PATIENCE
    while not condition():
        if process.process.poll() is not None or time.monotonic() > end:
            raise Missed(process.end(1))
        time.sleep(0.005)


def writes_weights(pid):
    """Its file has no name yet."""
    try:
        names = [os.readlink(entry) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return sum("(deleted)" in name and "/d/" in name for name in names) > 1


def complete(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    ends = [entry["data_offsets"][1] for name, entry in json.loads(data[8:8 + size]).items() if name != "__metadata__"]
    return len(data) == 8 + size + max(ends)


def struck(run, moment, what):
    """Four ranks, after a signal to one of them or to mpirun."""
    program, flags = DATA_PARALLEL, f"{MODEL} --steps 1000000"
    if moment == "saving":
        program = "08_3d_full"
        flags = "--tp 2 --dp 2 --zero 1 --layers 8 --hidden 512 --heads 4 --ffn 1536 --seq-len 16 --steps 1"
    process = run.start(program, flags, f"--global-batch 4 --comm-timeout {TIMEOUT}",
                        "--metrics m.jsonl --trace t.json --save-hf d", ranks=4)
    if moment == "start-up":
        wait_for(lambda: len(ranks_of(process, program)) == 4, process)
        time.sleep(random.uniform(0, 0.8))
    else:
        process.wait_for_steps(random.randint(1, 60) if moment == "training" else 1)
    if moment == "saving":
        writer = ranks_of(process, program)[0]
        wait_for(lambda: writes_weights(writer), process)
        time.sleep(random.uniform(0, 0.02))
    found = ranks_of(process, program)
    if len(found) < 4:
        raise Missed(process.end(1))
    victim = process.process.pid if "mpirun" in what else found[random.randrange(4)]
    os.kill(victim, getattr(signal, "SIG" + what.split()[-1]))
    process.began, run.victim = time.monotonic(), [rank for rank in found if found[rank] == victim]
    while process.process.poll() is None or ranks_of(process, program):
        if time.monotonic() > process.began + LIMIT[moment] * PATIENCE:
            raise TimeoutError(f"ranks {sorted(ranks_of(process, program))} are left\n{process.end(0)}")
        time.sleep(0.02)
    return process.end()


@pytest.mark.parametrize("moment, what", ALWAYS + in_turn(OTHERS) * (2 if SLICE == "all" else 1))
def test_signal(run, moment, what):
    """All ends in time with an exit code other than 0, and no file is left incomplete."""
    try:
        done = struck(run, moment, what)
    except Missed:
        done = struck(run, moment, what)
    assert done.code != 0 or moment == "saving", done  # all may have been written before the signal
    for path in run.folder.rglob("*"):
        assert not path.name.endswith(".tmp"), path
        assert path.name != "model.safetensors" or complete(path), path
    if moment == "training":  # what was before is there
        assert any(event["ph"] == "X" for event in json.loads((run.folder / "t.json").read_text())["traceEvents"])
    if (moment, what) == ("training", "KILL"):
        done.within(5).says("terminated by SIGTERM", "dp.all_reduce #")
    elif (moment, what) == ("training", "STOP"):
        done.says("NOT ENDED")
        wait = r"rank \d: dp\.(all_reduce|scalar) #\d+.* has not ended after 4 s \(--comm-timeout\)"
        assert re.search(wait, done.err), done
        assert set(re.findall(r"rank (\d) has not responded", done.err)) == {str(rank) for rank in run.victim}, done
