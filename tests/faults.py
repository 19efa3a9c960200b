#!/usr/bin/env python3
"""Ranks that are killed, stopped or interrupted at random moments, and mpirun itself: does everything end in time?

    python3 tests/faults.py BIN_FOLDER [--trials N] [--seed S] [--all]

Each trial starts 08_3d_full on 4 ranks with --comm-timeout 4, waits for a moment (start-up: a random time after the
launch; training: after a random number of steps; saving: while the weights are written), and sends a signal to one rank
or to mpirun. Right is: everything has ended within the timeout and 5 seconds (start-up: 4 more, as MPI_Init has), with
an exit code other than 0, no rank is left, and no file is left incomplete. Without --all, and unless
TRAIN70B_TEST_SLICE is "all": a few trials. Prints a table of right / tried; exit code 1 if a trial is wrong.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

RANKS, TIMEOUT = 4, 4
LIMIT = {"start-up": TIMEOUT + 4 + 5, "training": TIMEOUT + 5, "saving": TIMEOUT + 5}
RANK_SIGNALS = ["KILL", "TERM", "INT", "QUIT", "SEGV", "STOP"]
MPIRUN_SIGNALS = ["mpirun KILL", "mpirun TERM", "mpirun INT"]
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMP_NUM_THREADS": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "GOMP_SPINCOUNT": "1000"}


def ranks_in(folder, program):
    """{rank: pid} of the program's processes that work in this folder."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.readlink(entry / "cwd") == str(folder) and os.readlink(entry / "exe") == program:
                environment = (entry / "environ").read_bytes()
                rank = environment.split(b"OMPI_COMM_WORLD_RANK=")[1].split(b"\0")[0]
                if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found[int(rank)] = int(entry.name)
        except (OSError, IndexError):
            pass
    return found


def steps_in(path):
    return path.read_bytes().count(b'"event":"step"') if path.exists() else 0


def open_files_of(pid):
    """The names of a process's open regular files, as /proc tells."""
    try:
        return [os.readlink(entry) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.005)
    return False


def trial(program, moment, what, dice):
    """(problem or "", seconds until all had ended)."""
    with tempfile.TemporaryDirectory(prefix="train70b_faults_") as name:
        folder = pathlib.Path(name).resolve()
        metrics = folder / "m.jsonl"
        saving = moment == "saving"
        size = ["--hidden", "512", "--ffn", "1536", "--layers", "8"] if saving else ["--hidden", "32", "--ffn", "48"]
        words = [program, "--tp", "2", "--dp", "2", "--zero", "1", "--heads", "4", "--kv-heads", "2", "--seq-len", "16",
                 "--global-batch", "4", "--steps", "1" if saving else "1000000", "--comm-timeout", str(TIMEOUT),
                 "--metrics", "m.jsonl", "--trace", "t.json", "--save-hf", "d", *size]
        with open(folder / "err", "wb") as errors:
            mpirun = subprocess.Popen(["mpirun", "--oversubscribe", "-np", str(RANKS), *words], cwd=folder,
                                      env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                      stderr=errors, start_new_session=True)
            try:
                return strike(mpirun, program, folder, metrics, moment, what, dice)
            finally:  # whatever is left
                for pid in [mpirun.pid] * (mpirun.poll() is None) + list(ranks_in(folder, program).values()):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                mpirun.wait()


def strike(mpirun, program, folder, metrics, moment, what, dice):
    if moment == "start-up":
        if not wait_for(lambda: len(ranks_in(folder, program)) == RANKS, mpirun):
            return "the ranks did not start", 0
        time.sleep(dice.uniform(0, 0.8))
    else:
        steps = dice.randint(1, 60) if moment == "training" else 1
        if not wait_for(lambda: steps_in(metrics) >= steps, mpirun):
            return "no step", 0
        if moment == "saving":  # a rank is in the writing of weights: its file has no name yet
            writer = ranks_in(folder, program).get(0, 0)
            unnamed = lambda: [path for path in open_files_of(writer) if "(deleted)" in path and "/d/" in path]
            if not wait_for(lambda: len(unnamed()) > 1, mpirun):
                return "it saved too fast to be struck", 0
            time.sleep(dice.uniform(0, 0.02))
    found = ranks_in(folder, program)
    by_mpirun, name = what.startswith("mpirun "), what.split()[-1]
    if not by_mpirun and not found:
        return "no rank to strike", 0
    victim = mpirun.pid if by_mpirun else dice.choice(sorted(found.values()))
    begin = time.monotonic()
    try:
        os.kill(victim, getattr(signal, "SIG" + name))
    except ProcessLookupError:
        return "it had ended already", 0
    limit = LIMIT[moment]
    while time.monotonic() - begin < limit + 5:
        if mpirun.poll() is not None and not ranks_in(folder, program):
            break
        time.sleep(0.02)
    seconds = time.monotonic() - begin
    left = ranks_in(folder, program)
    wrong = []
    if mpirun.poll() is None or left:
        wrong.append(f"mpirun {'has ended' if mpirun.poll() is not None else 'runs'}, ranks {sorted(left)} are left")
    elif seconds > limit:
        wrong.append(f"took {seconds:.1f} s")
    if mpirun.poll() == 0 and moment != "saving":  # saving: all was written before the signal
        wrong.append("exit code 0")
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(".tmp"):
            wrong.append(f"{path.name} is left")
        if path.name == "model.safetensors":
            data = path.read_bytes()
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8:8 + size])
            end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
            if len(data) != 8 + size + end:
                wrong.append("model.safetensors is incomplete")
    return "; ".join(wrong), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries")
    parser.add_argument("--trials", type=int, default=2, help="of each cell of the table, with --all")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--all", action="store_true", default=os.environ.get("TRAIN70B_TEST_SLICE") == "all")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    program = os.path.realpath(os.path.join(options.binaries, "08_3d_full"))
    moments = list(LIMIT)
    signals = RANK_SIGNALS + MPIRUN_SIGNALS
    cells = [(moment, what) for moment in moments for what in signals for _ in range(options.trials)]
    if not options.all:
        cells = [("start-up", "STOP"), ("training", dice.choice(MPIRUN_SIGNALS)), ("saving", "STOP"),
                 ("saving", dice.choice(["KILL", "TERM"]))]
    right, tried, slowest, failed = collections.Counter(), collections.Counter(), collections.Counter(), 0
    for moment, what in cells:
        problem, seconds = trial(program, moment, what, dice)
        if problem.startswith(("it saved", "it had")):  # the moment was missed
            problem, seconds = trial(program, moment, what, dice)
        tried[moment, what] += 1
        right[moment, what] += not problem
        slowest[moment, what] = max(slowest[moment, what], seconds)
        if problem:
            failed = 1
            print(f"WRONG {what} in {moment}: {problem}", flush=True)
    print(f"\nfaults on {RANKS} ranks, --comm-timeout {TIMEOUT}, seed {options.seed}: right / tried, slowest end")
    print(f"{'signal':<14}" + "".join(f"{moment:>20}" for moment in moments))
    for what in signals:
        if any(tried[moment, what] for moment in moments):
            row = [f"{right[cell]:>6} /{tried[cell]:>3}{slowest[cell]:>8.1f} s" if tried[cell] else " " * 20
                   for cell in [(moment, what) for moment in moments]]
            print(f"{what:<14}" + "".join(row))
    return failed


if __name__ == "__main__":
    sys.exit(main())
