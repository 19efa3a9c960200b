"""What only this catches: a wrong decision of the restart loop (08_3d_full/checkpoint/restart.py) about an ended job.

Its decisions with restart_stub.py in the place of mpirun, then with the program.
"""
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ENVIRONMENT, PATIENCE, ROOT, Process

LOOP = [sys.executable, str(ROOT / "08_3d_full/checkpoint/restart.py")]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Loop:
    """A run of restart.py over the stub; what it did, by the names of the cases below."""

    def __init__(self, at, plan, options="", flags="", hosts="", down="", metrics=True, folders="", during=None):
        self.at = at
        (at / "plan.json").write_text(json.dumps(plan))
        (at / "hosts").write_text(hosts)
        (at / "down").write_text(down + "\n")
        for name in folders.split():
            (at / name).mkdir(parents=True)
            (at / name / "manifest.json").write_text("{}")
        loop = [*LOOP, "--backoff", "0.01", "--log", "log.jsonl", "--host-check", "! grep -qx {host} down"]
        hosts = ["--hostfile", "hosts"] if hosts else []
        metrics = ["--metrics", "m.jsonl"] if metrics else []
        words = [*loop, *options.split(), "--", ROOT / "tests/restart_stub.py", "-np", "8", *hosts, "program",
                 "--checkpoint-dir", "d", *metrics, *flags.split()]
        self.process = Process(words, at, {})
        if during:
            during(self)
        self.done = self.process.end()
        self.code, self.out, self.err = self.done.code, self.done.out, self.done.err
        self.runs, self.log = lines(at / "calls.jsonl"), lines(at / "log.jsonl")
        self.calls, self.events = len(self.runs), " ".join(event["event"] for event in self.log)
        self.last, self.message = (self.log[-1].get(key) if self.log else "" for key in ("event", "message"))
        self.resumed = [call["words"].count("--resume") for call in self.runs]
        self.hosts = [re.sub(r" slots=\d+\n", "", call["hosts"]) for call in self.runs]  # their letters
        self.ranks, self.dp, self.probe = map(self.values, ("-np", "--dp", "--probe"))
        self.resume_from = self.values("--resume-from")
        self.suspects = [event["host"] for event in self.log if event["event"] == "suspect"]
        self.why = [event["why"] for event in self.log if event["event"] == "suspect"]
        self.failures = [event["failures"] for event in self.log if event["event"] == "failed"]
        self.steps = [event["step"] for event in self.log if event["event"] == "failed"]
        self.waits = [event["seconds"] for event in self.log if event["event"] == "wait"]
        self.checkpoints = " ".join(sorted(path.name for path in (at / "d").iterdir())) if (at / "d").exists() else ""

    def values(self, flag):
        """Of the flag, as --flag VALUE or --flag=VALUE, in each call."""
        found = [re.search(rf"(?:^| ){flag}[ =](\S+)", " ".join(call["words"])) for call in self.runs]
        return [each and each[1] for each in found]


def ends(code, **more):
    return {"code": code, **more}


OK, FAILS = ends(0), ends(1)
THREE, TWO = "a slots=4\nb slots=4 # the second\n\nc slots=4\n", "a slots=4\nb slots=4\n"
ON_A_AND_B = {"event": "hosts", "hosts": ["a"] * 4 + ["b"] * 4}
ALL_BUT_7 = "".join(f"rank {rank}: world.barrier #3 has not ended after 30 s (--comm-timeout): a rank of its group is "
                    "missing\n" for rank in range(7))
DIED = ends(137, err="mpirun noticed that process rank 5 with PID 0 on node b exited on signal 9 (Killed).")
SLOW = ends(3, events=[{"event": "probe", "slow": [
    {"rank": 1, "host": "a", "what": "product, 384 x 384", "of_median": 0.5}]}])
SLOW_PRINTED = ends(3, out="slow: rank 1 on a has 50% of the median product, 384 x 384, rank 5 on b has 60% of the "
                    "median tp, shift over 2")
USAGE = ends(2, out="tiny: 31.9k parameters", err="Warning: a host was added\nprogram: --pp 3: 2 ranks")
DIFFER_ERR = ("rank 0: --replica-check: after step 31: the weight of x differs on ranks 5 and 6 from ranks 0 and 1; "
              "resume from the newest checkpoint before step 20")
DIFFER = ends(1, checkpoints=[10, 20, 30], err=DIFFER_ERR,
              events=[ON_A_AND_B, {"event": "replicas_differ", "step": 31, "equal": 19}])
DIFFER_PRINTED = ends(1, checkpoints=[10, 20, 30], err=DIFFER_ERR,
                      out="vm: ranks\na: ranks 0 to 3, b: ranks 4 to 7\n" + "step\n" * 30000 +
                      "replicas differ after step 31; after step 19 they were equal")
MANY = "9" * 5000
GARBAGE = [ends(1, out="a: ranks 0 to 900000000"),
           ends(1, out="a: ranks 0 to 1", bytes=[*range(256)] * 9, raw="[" * 100000 + '\n{"event": "step"}\n\udcff\n',
                err=f"rank 7 has not responded for 3\nrank {MANY} has not responded for 3\n"
                f"replicas differ after step 2; after step {MANY} they were equal",
                events=[{"event": "step", "step": "2"}, {"event": "step", "step": float("nan")}, {"event": ["step"]},
                        {"step": 3}, 4, {"event": "hosts", "hosts": 7}, {"event": "replicas_differ", "equal": "1"}]),
           ends(1, events=[{"event": "probe"}]),
           ends(1, events=[{"event": "probe", "slow": [{"rank": 1, "host": "a"}]}])]


def finished(step):
    return [ends(1, checkpoints=[step]),
            ends(2, err=f"program: d/step-{step}: is of step {step}, and --steps is 8 (try --steps 16)")]


CASES = {  # what the calls of the program do; what the loop is given; what it does
    "success at once": ([ends(0, out="trained", err="a warning")], {},
                        dict(events="start end", err="a warning", out="trained")),
    "two failures, then success": (
        [ends(1, steps=[1, 2], checkpoints=[2]), ends(137, steps=[3]), OK], {},
        dict(resumed=[0, 1, 1], events="start failed wait start failed wait start end",
             err="exit code 137 after step 3 (failure 1; gives up at 3 in a row without a new step)")),
    "started again continues, and says so": (
        [ends(1, steps=[31]), OK], dict(folders="d/step-20 d/step-30 d/step-40.suspect"),
        dict(resumed=[1, 1], events="continues start failed wait start end", err="continues from d/step-30;")),
    "resume-from until there is a checkpoint": (
        [ends(1, steps=[41]), ends(1, steps=[42], checkpoints=[42]), OK],
        dict(flags="--resume-from e/step-40", folders="e/step-40"),
        dict(resumed=[0, 0, 1], resume_from=["e/step-40", "e/step-40", None])),
    "started again with resume-from, from the newest": (
        [OK], dict(flags="--resume-from=d/step-40", folders="d/step-40 d/step-60"),
        dict(resumed=[1], resume_from=[None], err="continues from d/step-60, not --resume-from d/step-40")),
    "no complete checkpoint: from the start": (
        [ends(1, steps=[1, 2, 3], incomplete=[2, "3.tmp"]), OK], {}, dict(resumed=[0, 0])),
    "gives up, with growing waits": (
        [FAILS], dict(options="--max-failures 4 --backoff 0.1 --backoff-most 0.3"),
        dict(code=1, calls=4, last="gave_up", waits=[0.1, 0.2, 0.3])),
    "failures with progress between them do not add up": (
        [ends(1, steps=[1]), ends(1, steps=[1, 2]), ends(1, steps=[1, 2, 3]), OK], dict(options="--max-failures 2"),
        dict(calls=4)),
    "the same steps again are no progress": (
        [ends(1, steps=[1, 2, 3]), ends(1, steps=[1, 2]), ends(1, steps=[1, 2, 3])], {}, dict(code=1, calls=3)),
    "a checkpoint is progress": ([ends(1, steps=[1], checkpoints=[5]), FAILS], {}, dict(code=1, failures=[1, 2, 3])),
    "a command that was killed is started again": ([ends(-9), OK], {}, dict(calls=2)),
    "a usage error is not retried": (
        [USAGE], {}, dict(code=2, events="start usage", message="program: --pp 3: 2 ranks")),
    "the run has finished": (finished(8), {}, dict(last="end", err="restart: the run has finished: d/step-8 ")),
    "a step beyond the last is a usage error": (finished(9), {}, dict(code=2, last="usage")),
    "garbage is printed and written": (
        [*GARBAGE, OK], dict(options="--max-failures 99 --backoff-most 0.01", folders="d/step-² d/step-2"),
        dict(events="continues " + "start failed wait " * len(GARBAGE) + "start end")),
    "a log on a full disk": (
        [FAILS, OK], dict(options="--log /dev/full"),
        dict(calls=2, err="restart: --log /dev/full: No space left on device: goes on without it")),
    # hosts
    "a host that does not answer is replaced by the spare one": (
        [FAILS, OK], dict(hosts=THREE, down="b"), dict(hosts=["abc", "ac"], ranks=["8", "8"])),
    "without a spare host, half the data parallelism": (
        [FAILS, OK], dict(flags="--tp 2 --dp 4 --global-batch 16", hosts=TWO, down="a"),
        dict(hosts=["ab", "b"], ranks=["8", "4"], dp=["4", "2"])),
    "the largest dp that divides the batch, 4 of 5 slots": (
        [FAILS, OK],
        dict(flags="--global-batch 16 --micro-batch 2", hosts="a slots=3\nb slots=3\nc slots=2\n", down="a"),
        dict(ranks=["8", "4"], dp=[None, None])),
    "no layout fits": ([FAILS], dict(flags="--tp=8", hosts=TWO, down="a"), dict(code=1, calls=1, last="gave_up")),
    "no host is left": ([FAILS], dict(hosts=THREE, down="a\nb\nc"), dict(code=1, calls=1)),
    "a host whose process dies twice is left out": (
        [DIED, DIED, OK], dict(hosts=THREE), dict(hosts=["abc", "abc", "ac"])),
    "the host of the only rank that reports nothing": (
        [ends(1, err=ALL_BUT_7, events=[ON_A_AND_B]), OK], dict(options="--strikes 1", hosts=THREE),
        dict(hosts=["abc", "ac"], suspects=["b"])),
    "the host of a rank without a heartbeat": (
        [ends(1, events=[ON_A_AND_B], err="rank 0: rank 6 has not responded for 30 s (--comm-timeout) while files are "
              "read or written"), OK], dict(options="--strikes 1", hosts=THREE), dict(hosts=["abc", "ac"])),
    "a slow host is left out": (
        [FAILS, SLOW, FAILS, OK], dict(options="--probe-every 1 --max-failures 9", hosts=THREE),
        dict(hosts=["abc", "abc", "bc", "bc"])),
    "slow hosts without metrics": (
        [SLOW_PRINTED, OK], dict(hosts=THREE + "e slots=4\n", metrics=False),
        dict(hosts=["abce", "ce"], why=["slow: rank 1, product, 384 x 384, 50% of the median",
                                        "slow: rank 5, tp, shift over 2, 60% of the median"])),
    "a slow host that nothing replaces stays, and is not probed again": (
        [FAILS, SLOW, OK], dict(options="--probe-every 1", flags="--tp 8", hosts=TWO),
        dict(probe=[None, "strict", None], hosts=["ab", "ab", "ab"])),
    "the probe at every third restart": (
        [FAILS], dict(options="--probe-every 3 --max-failures 7", flags="--probe on"),
        dict(code=1, probe=["on", "on", "on", "strict", "on", "on", "strict"])),
    # replicas that differ: later checkpoints are set aside, the host is named
    "replicas differ": (
        [DIFFER, OK], dict(options="--strikes 1", hosts=THREE),
        dict(checkpoints="step-10 step-20.suspect step-30.suspect", hosts=["abc", "ac"], resumed=[0, 1])),
    "replicas differ again, without metrics: free names": (
        [DIFFER_PRINTED, *[DIFFER_PRINTED | {"checkpoints": [20, 30]}] * 2, OK],
        dict(options="--max-failures 9 --strikes 3", hosts=THREE, metrics=False),
        dict(steps=[30, 30, 30], resumed=[0, 1, 1, 1], hosts=["abc", "abc", "abc", "ac"],
             checkpoints="step-10 step-20.suspect step-20.suspect-2 step-20.suspect-3 "
             "step-30.suspect step-30.suspect-2 step-30.suspect-3")),
    "nothing but suspect checkpoints: from the start": (
        [DIFFER_PRINTED | {"checkpoints": [20]}, FAILS, OK], dict(metrics=False, folders="d/step-20.suspect"),
        dict(resumed=[0, 0, 0], checkpoints="step-20.suspect step-20.suspect-2")),
}


@pytest.mark.parametrize("name", CASES)
def test_decides(name, tmp_path):
    plan, given, expected = CASES[name]
    loop = Loop(tmp_path, plan, **given)
    for what, wanted in {"code": 0, **expected}.items():
        found = getattr(loop, what)
        if what in ("out", "err"):
            assert found.count(wanted) == 1, loop.done
        else:
            assert found == (wanted.strip() if what == "events" else wanted), f"{what}\n{loop.done}"
    times = [run["time"] for run in loop.runs]
    assert all(after - before >= wait for before, after, wait in zip(times, times[1:], loop.waits))


def test_stdout_on_a_full_disk():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*LOOP, "--", "seq", "100000"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 2, done.stderr


@pytest.mark.parametrize("words, part", [
    ("--max-failures 2", "no command"),
    ("--max-failures 0 -- true", "--max-failures"),
    ("--backoff nan -- true", "--backoff: nan: must be a number from 0"),
    ("--backoff-most -5 -- true", "--backoff-most: -5: must be a number from 0"),
    ("--strikes 1.5 -- true", "--strikes: 1.5: must be an integer from 1"),
    ("--log . -- true", "--log .: Is a directory"),
    ("-- mpirun x --hostfile /none -np 2", "--hostfile /none: No such file"),
    ("-- mpirun x --hostfile garbled -np 2", "--hostfile garbled: "),
    ("-- /no/program", "cannot start")])
def test_refuses(words, part, tmp_path):
    (tmp_path / "garbled").write_bytes(bytes(range(256)))
    done = subprocess.run([*LOOP, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "attempt 1:" not in line]
    assert done.returncode == 2 and len(said) == 1 and part in said[0], done.stderr


# ---- signals ----
def wait_until(true, seconds=10):
    end = time.monotonic() + seconds * PATIENCE
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def send(*numbers):
    def during(loop):
        wait_until(lambda: (loop.at / "ready").exists())
        for number in numbers:
            loop.process.process.send_signal(number)
            time.sleep(0.2)
    return during


@pytest.mark.parametrize("hang, sent, code", [
    ("ends", [signal.SIGUSR1], 0), ("ends", [signal.SIGTERM], 143), ("ends", [signal.SIGINT], 130),
    ("never", [signal.SIGUSR1, signal.SIGTERM], 128 + signal.SIGKILL)])
def test_signals_are_passed_on_and_end_the_loop(hang, sent, code, tmp_path):
    loop = Loop(tmp_path, [{"hang": hang, "code": code}], "--grace 1", during=send(*sent))
    assert loop.code == code and loop.calls == 1, loop.done
    assert (tmp_path / "signals").read_text().split() == [number.name for number in sent]
    assert hang == "never" or loop.log[-1]["signal"] == sent[0].name
    left = [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)]
    assert not left


def test_a_loop_that_is_killed_ends_its_command(tmp_path):
    Loop(tmp_path, [{"hang": "ends"}], during=send(signal.SIGKILL))
    command, child = (tmp_path / "pids").read_text().split()
    assert wait_until(lambda: not alive(command))
    assert (tmp_path / "signals").read_text().split() == ["SIGTERM"]
    os.kill(int(child), signal.SIGKILL)


def test_sigterm_between_two_attempts_ends_the_loop(tmp_path):
    def during(loop):
        log = tmp_path / "log.jsonl"
        wait_until(lambda: log.exists() and '"wait"' in log.read_text())
        loop.process.process.send_signal(signal.SIGTERM)
    loop = Loop(tmp_path, [FAILS], "--backoff 1000 --backoff-most 1000", during=during)
    assert loop.code == 1 and loop.calls == 1
    loop.done.within(20)


# ---- with the program ----
def train(module_run, name, flags, options="", ranks=4):
    """Under the loop, with its log in name.jsonl, or without it: options is None."""
    shape = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 32 --global-batch 8 --steps 40"
    loop = [] if options is None else [*LOOP, "--backoff", "0.1", "--log", f"{name}.jsonl", *options.split(), "--"]
    words = [*loop, "mpirun", "--oversubscribe", "-np", str(ranks), module_run.binaries / "08_3d_full", *shape.split()]
    module_run.started.append(Process([*words, *flags.split()], module_run.folder, {}))
    done = module_run.started[-1].end(120)
    assert done.code == 0, done
    return done, lines(module_run.folder / f"{name}.jsonl")


def losses(done, file):
    """{step: the losses that the run, resumed or not, wrote for it}."""
    found = {}
    for event in done.events("step", file):
        found.setdefault(event["step"], set()).add(event["loss"])
    return found


@pytest.fixture(scope="module")
def plain(module_run):
    return losses(train(module_run, "plain", "--metrics plain-m.jsonl", None)[0], "plain-m.jsonl")


@pytest.mark.parametrize("fault", ["kill:1:31", "hang:2:31", "nan:0:31", "bitflip:3:31"])
def test_program_that_fails_is_resumed_with_the_losses_of_a_run_without(fault, module_run, plain):
    name = fault.split(":")[0]
    done, log = train(module_run, name, f"--checkpoint-dir d-{name} --checkpoint-every 1 --metrics {name}-m.jsonl "
                      f"--inject {fault} --comm-timeout 3 --replica-check 1")
    assert losses(done, f"{name}-m.jsonl") == plain
    kinds = [event["event"] for event in log if event["event"] in ("start", "failed", "end")]
    assert kinds == ["start", "failed", "start", "end"]
    assert "--resume" in log[-2]["command"]


def test_program_with_a_flipped_bit_resumes_from_before_it_without_metrics(module_run, plain):
    # How many of the checkpoints are complete by then depends on the disk.
    flags = "--checkpoint-dir d --checkpoint-every 1 --keep 40 --inject bitflip:3:31 --replica-check 10"
    done, log = train(module_run, "out", flags)
    aside = [int(event["checkpoint"].rsplit("-", 1)[1]) for event in log if event["event"] == "set_aside"]
    resumed = [int(step) for step in re.findall(r"^resumes d/step-(\d+):", done.out, re.M)]
    assert min(aside, default=30) > 29 and max(resumed, default=0) <= 29, done
    assert [event["event"] for event in log].count("start") == 2
    assert [event["host"] for event in log if event["event"] == "suspect"] == [socket.gethostname()]
    assert re.findall(r"^step +40/40 +loss (\S+)", done.out, re.M)[-1:] == [f"{min(plain[40]):.4f}"]


def test_program_whose_folder_is_held_is_tried_again_and_then_has_finished(module_run):
    """Two words of the program that the loop knows: it waits 5 s for the lock."""
    (module_run.folder / "e").mkdir()
    lock, log = open(module_run.folder / "e/.lock", "w"), module_run.folder / "e.jsonl"
    fcntl.flock(lock, fcntl.LOCK_EX)

    def release():
        wait_until(lambda: log.exists() and '"failed"' in log.read_text(), 60)
        lock.close()
    threading.Thread(target=release).start()
    for kinds in (["start", "failed", "wait", "start", "end"], ["continues", "start", "end"]):
        log.unlink(missing_ok=True)
        events = train(module_run, "e", "--checkpoint-dir e", ranks=1)[1]
        assert [event["event"] for event in events] == kinds


@pytest.mark.parametrize("folders, flag", [("step-16.suspect step-16.suspect-2 step-20.tmp weights-8", ""),
                                           ("step-16.suspect step-12", "--resume")])
def test_job_script_of_the_cluster_page(folders, flag, tmp_path):
    run = tmp_path / "of.tmp"  # whatever the folder's own name is
    for name in folders.split():
        (run / name).mkdir(parents=True)
        (run / name / "manifest.json").write_text("{}")
    finds = "".join(re.findall(r"^latest=.*$", (ROOT / "docs/cluster.md").read_text(), re.M))
    done = subprocess.run(["bash", "-c", f"{finds}\necho ${{latest:+--resume}}"], capture_output=True, text=True,
                          env={**ENVIRONMENT, "RUN": str(run)})
    assert done.stdout.strip() == flag, done.stderr
