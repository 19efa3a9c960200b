"""What only this catches: a wrong decision of the restart loop (08_3d_full/checkpoint/restart.py) about an ended job.

Its decisions with restart_stub.py in the place of mpirun, then with the program.
"""
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import PATIENCE, ROOT, Process

sys.path.append(str(ROOT / "08_3d_full/checkpoint"))
import restart  # noqa: E402

LOOP = ["env", "-u", "SLURM_JOB_ID", sys.executable, str(ROOT / "08_3d_full/checkpoint/restart.py")]
KINDS = {r"continues from": "continues", r"attempt \d+: exit code": "failed", r"attempt \d+:": "start",
         r"next attempt": "wait", r"ended": "end", r"the run has finished": "finished", r"gives up": "gives_up",
         r"not restarted": "usage", r"requeues": "requeues", r"\S+ is set aside": "set_aside",
         r"\S+ is left out": "left_out", r"\d+ slots are left": "fits", r"\S+ is not in the host file": "unknown"}


def kinds(err):
    """Of the loop's lines in stderr, one word each."""
    said = re.findall(r"^restart: (.*)", err, re.M)
    return " ".join(next((kind for begin, kind in KINDS.items() if re.match(begin, line)), line) for line in said)


class Loop:
    """A run of restart.py over the stub; what it did, by the names of the cases below."""

    def __init__(self, at, plan, options="", flags="", hosts="", down="", folders="", environment={}, during=None):
        self.at = at
        (at / "plan.json").write_text(json.dumps(plan))
        (at / "hosts").write_text(hosts)
        (at / "down").write_text(down + "\n")
        for name in folders.split():
            (at / name).mkdir(parents=True, exist_ok=True)
            (at / name / "manifest.json").write_text("{}")
        loop = [*LOOP[:3], *(f"{name}={value}" for name, value in environment.items()), *LOOP[3:], "--backoff", "0.01"]
        words = [*loop, "--host-check", "! grep -qxF -- {host} down", *options.split(), "--",
                 ROOT / "tests/restart_stub.py", "-np", "8", *(["--hostfile", "hosts"] if hosts else []), "program",
                 "--checkpoint-dir", "d", *flags.split()]
        self.process = Process(words, at, {})
        if during:
            during(self)
        self.done = self.process.end()
        self.code, self.out, self.err = self.done.code, self.done.out, self.done.err
        self.runs = [json.loads(line) for line in (at / "calls.jsonl").read_text().splitlines()]
        self.calls, self.events = len(self.runs), kinds(self.err)
        self.resumed = [call["words"].count("--resume") for call in self.runs]
        self.hosts = [re.sub(r" slots=\d+\n", "", call["hosts"]) for call in self.runs]  # their letters
        self.ranks, self.dp, self.ep, self.inject, self.resume_from = map(
            self.values, ("-np", "--dp", "--ep", "--inject", "--resume-from"))
        self.failures = [int(count) for count in re.findall(r"\(failure (\d+); ", self.err)]
        self.waits = [float(seconds) for seconds in re.findall(r"next attempt in (\S+) s", self.err)]
        self.checkpoints = " ".join(sorted(path.name for path in (at / "d").iterdir())) if (at / "d").exists() else ""

    def values(self, flag):
        """Of the flag, as --flag VALUE or --flag=VALUE, in each call."""
        found = [re.search(rf"(?:^| ){flag}[ =](\S+)", " ".join(call["words"])) for call in self.runs]
        return [match and match[1] for match in found]


def ends(code, **more):
    return {"code": code, **more}


OK, FAILS = ends(0), ends(1)
THREE, TWO = "a slots=4\nb slots=4 # the second\n\nc slots=4\n", "a slots=4\nb slots=4\n"
SLOW = ends(3, out="slow: rank 1 on a has 50% of the median product, 384 x 384, rank 5 on b has 60% of the "
            "median tp, shift over 2")
DIFFER = ends(1, checkpoints=[10, 20, 30],
              out="step\n" * 30000 + "replicas differ after step 31; after step 19 they were equal")
AGAIN = DIFFER | {"checkpoints": [20, 30]}
GARBAGE = [ends(1, bytes=[*range(256)] * 9999, out="rank 1 on a has 5% of the median"),
           ends(1, out=f"replicas differ after step 2; after step {'9' * 5000} they were equal")]
TWICE = "start failed wait start end"

CASES = {  # what the calls of the program do; what the loop is given; what it does
    "success at once": ([ends(0, out="trained", err="a warning")], {},
                        dict(events="start end", err="a warning", out="trained")),
    "two failures, then success": (
        [ends(1, checkpoints=[2]), ends(137), OK], dict(flags="--inject kill:1:3"),
        dict(resumed=[0, 1, 1], inject=["kill:1:3", None, None], events="start failed wait " + TWICE,
             err="exit code 137 (failure 2; gives up at 3 in a row without a checkpoint beyond step 2)")),
    "started again continues from the newest, and says so": (
        [FAILS, OK], dict(folders="d/step-9 d/step-30 d/step-40.suspect d/step-50.tmp d/step-²"),
        dict(resumed=[1, 1], events="continues " + TWICE, err="continues from d/step-30;")),
    "resume-from until there is a checkpoint": (
        [FAILS, ends(1, checkpoints=[42]), OK], dict(flags="--resume-from e/step-40", folders="e/step-40"),
        dict(resumed=[0, 0, 1], resume_from=["e/step-40", "e/step-40", None])),
    "started again with resume-from, from the newest": (
        [OK], dict(flags="--resume-from=d/step-40", folders="d/step-40 d/step-60"),
        dict(resumed=[1], resume_from=[None], err="continues from d/step-60, not --resume-from d/step-40")),
    "no complete checkpoint: from the start": ([ends(1, incomplete=[2, "3.tmp"]), OK], {}, dict(resumed=[0, 0])),
    "gives up, with growing waits": (
        [FAILS], dict(options="--max-failures 4 --backoff 0.1"), dict(code=1, calls=4, waits=[0.1, 0.2, 0.4])),
    "failures with progress between them do not add up": (
        [FAILS, ends(1, checkpoints=[5]), FAILS, ends(1, checkpoints=[10]), OK], dict(options="--max-failures 3"),
        dict(failures=[1, 1, 2, 1])),
    "an older checkpoint is no progress": (
        [FAILS, ends(1, checkpoints=[3]), FAILS], dict(folders="d/step-9"), dict(code=1, failures=[1, 2, 3])),
    "a command that was killed is started again": ([ends(-9), OK], {}, dict(calls=2)),
    "a usage error is not retried": (
        [ends(2, err="program: --pp 3: 2 ranks")], {},
        dict(code=2, events="start usage", err="program: --pp 3: 2 ranks")),
    "a usage error of a later attempt is a failure": ([FAILS, ends(2), OK], {}, dict(calls=3)),
    "the run has finished": ([ends(1, checkpoints=[8])], dict(flags="--steps 8"),
                             dict(events="start failed wait finished", err="finished: d/step-8 is of its last step")),
    "a step beyond the last is the program's error": ([ends(2)], dict(flags="--steps 8", folders="d/step-9"),
                                                      dict(code=2, calls=1)),
    "garbage is passed on, and means nothing": (
        [*GARBAGE, OK], dict(hosts=THREE, folders="d/step-2"),
        dict(events="continues start failed wait " + TWICE, checkpoints="step-2")),
    # hosts
    "a host that does not answer is replaced by the spare one": (
        [FAILS, FAILS, OK], dict(hosts=THREE, down="b"), dict(hosts=["abc", "ac", "ac"], ranks=["8"] * 3)),
    "without a spare host, half the data parallelism": (
        [FAILS, OK], dict(flags="--tp 2 --dp 4 --global-batch 16", hosts=TWO, down="a"),
        dict(hosts=["ab", "b"], ranks=["8", "4"], dp=["4", "2"], events="start failed left_out wait fits start end")),
    "and as many expert-parallel ranks as divide those of a stage": (
        [FAILS, OK], dict(flags="--experts 8 --ep=4 --global-batch 18", hosts="a slots=2\nb slots=6\n", down="a"),
        dict(ranks=["8", "6"], dp=[None, None], ep=["4", "2"], err="6 slots are left: 6 ranks, dp 6, ep 2\n")),
    "no layout fits": ([FAILS], dict(flags="--tp=8", hosts=TWO, down="a"),
                       dict(code=1, events="start failed left_out wait gives_up")),
    "no host is left": ([FAILS], dict(hosts=THREE, down="a\nb\nc"), dict(code=1, calls=1)),
    "slow hosts are left out": (
        [SLOW, OK], dict(hosts="a slots=8\nc slots=8\n"),
        dict(hosts=["ac", "c"], events="start failed left_out unknown wait start end")),
    "slow hosts of another failure stay": ([SLOW | {"code": 1}, OK], dict(hosts=THREE), dict(hosts=["abc"] * 2)),
    # replicas that differ: later checkpoints are set aside
    "replicas differ": (
        [DIFFER, OK], {}, dict(checkpoints="step-10 step-20.suspect step-30.suspect", resumed=[0, 1])),
    "replicas differ again: free names": (
        [DIFFER, AGAIN, AGAIN, OK], dict(options="--max-failures 9"),
        dict(failures=[1, 2, 3], resumed=[0, 1, 1, 1],
             checkpoints="step-10 step-20.suspect step-20.suspect-2 step-20.suspect-3 "
             "step-30.suspect step-30.suspect-2 step-30.suspect-3")),
    "nothing but suspect checkpoints: from the start": (
        [DIFFER | {"checkpoints": [20]}, FAILS, OK], dict(folders="d/step-20.suspect"),
        dict(resumed=[0, 0, 0], checkpoints="step-20.suspect step-20.suspect-2")),
}


@pytest.mark.parametrize("name", CASES)
def test_decides(name, tmp_path):
    plan, given, expected = CASES[name]
    loop = Loop(tmp_path, plan, **given)
    for what, wanted in {"code": 0, **expected}.items():
        found = getattr(loop, what)
        assert found.count(wanted) == 1 if what in ("out", "err") else found == wanted, f"{what}: {found}\n{loop.done}"
    times = [run["time"] for run in loop.runs]
    assert all(after - before >= wait for before, after, wait in zip(times, times[1:], loop.waits))


@pytest.mark.parametrize("flags, slots, layout", [
    ("-np 8", 5, (4, 4, 1)), ("-np 8 --micro-batch 2 --global-batch 12", 5, (3, 3, 1)),
    ("-np 3 --global-batch 1", 2, (1, 1, 1)), ("-np 8 --tp 2 --pp 2 --cp=2", 7, None),
    ("-np 16 --tp 2 --pp 2", 15, (8, 2, 1)), ("-np 8 --hybrid-shard 4", 7, (4, 4, 1)),
    ("-np 8 --hybrid-shard 8", 7, None), ("-np 8 --batch-ramp 6:12:9 --global-batch 12", 5, (3, 3, 1)),
    ("-np 32 --tp 2 --cp 2 --pp 2 --ep 16 --experts 16", 31, (16, 2, 8)), ("-np 8 --ep 8 --experts 8", 0, None)])
def test_layout_that_fits(flags, slots, layout):
    assert restart.layout_for(flags.split(), slots) == layout


def test_nodes_of_a_slurm_job_are_filled(tmp_path):
    """srun's --nodes shrinks to those of the job that data parallelism fills, not to a part of a node's ranks."""
    assert restart.layout_for("--tp 2 --global-batch 20".split(), 24) == (20, 10, 1)
    assert restart.layout_for("--tp 2 --global-batch 20".split(), 24, per_node=8) == (8, 4, 1)
    flags = "--nodes=4 --ntasks-per-node=2 --tp 2 --dp=4 --global-batch 16"
    for nodes, dp, err in (("4", "4", ""), ("3", "2", "6 slots are left: 4 ranks, dp 2, ep 1\n")):
        loop = Loop(tmp_path, [OK], flags=flags, environment={"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": nodes})
        assert loop.code == 0 and err in loop.err and loop.values("--nodes")[-1] == loop.dp[-1] == dp, loop.done


@pytest.mark.parametrize("does", ["kill -TERM $$", "echo Job is pending execution for job 7 >&2; exit 1"])
def test_slurm_requeues_first(does, tmp_path):
    """As when it finds a node missing before the command ends: it ends what runs in the job."""
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{does}\n")
    (tmp_path / "scontrol").chmod(0o755)
    loop = Loop(tmp_path, [FAILS], environment={"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert loop.code == 1 and loop.err.endswith("restart: Slurm has requeued job 7 itself\n"), loop.done


def test_ssh_takes_no_host_for_an_option(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; test "$2" = -n1\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert restart.answers("-n1", None, 9) and not restart.answers("-n2", None, 9)
    assert not restart.answers("-n1", "sleep 9; true {host}", 0.1)


@pytest.mark.parametrize("broken", [False, True])
def test_slurm_job_is_requeued_until_it_makes_no_progress(broken, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> requeued; exit {int(broken)}\n')
    (tmp_path / "scontrol").chmod(0o755)
    plan = [ends(1, checkpoints=[5]), FAILS, ends(2), ends(1, checkpoints=[6]), FAILS, FAILS]
    for job, failure, event in (("7", 1, "requeues"), ("7", 2, "requeues"), ("7", 3, ""), ("7_8", 1, "requeues"),
                                ("7_8", 2, "requeues"), ("7_8", 3, "")):
        loop = Loop(tmp_path, plan, hosts=THREE, down="a", flags="--inject kill:1:2", environment={
            "SLURM_JOB_ID": job, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
        assert (loop.code, loop.failures) == (1, [failure]) and loop.hosts[-1] == "abc", loop.done
        assert loop.events.split("failed")[1].split() == [event] * bool(event) + ["gives_up"] * broken * bool(event)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n" * 2 + "requeue 7_8\n" * 2
    assert loop.resumed == [0, 1, 1, 1, 1, 1] and loop.inject == ["kill:1:2", None, None] * 2
    assert loop.checkpoints == ".restart.json step-5 step-6"


def test_slow_ranks_are_read_as_they_are_printed():
    form = re.search(r'"\{\}(rank .* of the median \{\})"', (ROOT / "08_3d_full/watch/probe.cpp").read_text())[1]
    assert restart.SLOW.findall(", ".join([form.format(3, "node-0", 50.0, "product")] * 2)) == ["node-0"] * 2


def test_output_on_a_full_disk():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*LOOP, "--", "seq", "100000"], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0 and kinds(done.stderr) == "start end"
        assert subprocess.run([*LOOP, "--", "seq", "3"], stdout=subprocess.PIPE, stderr=full).stdout == b"1\n2\n3\n"


@pytest.mark.parametrize("words, part", [
    ("--max-failures 2", "no command"),
    ("--max-failures 0 -- true", "--max-failures"),
    ("--max-failures 1.5 -- true", "--max-failures: 1.5: must be an integer from 1"),
    ("--backoff nan -- true", "--backoff: nan: must be a number from 0"),
    ("-- mpirun x --hostfile /none -np 2", "--hostfile /none: No such file"),
    ("-- mpirun x --hostfile garbled -np 2", "--hostfile garbled: "),
    ("-- mpirun x --hostfile /dev/zero -np 2", "--hostfile /dev/zero: is no regular file"),
    ("-- mpirun x --hostfile fifo -np 2", "--hostfile fifo: is no regular file"),
    ("-- mpirun x --hostfile option -np 2", "--hostfile option: '-oProxyCommand=touch': is no name of a host"),
    ("-- mpirun x --hostfile command -np 2", "--hostfile command: 'a;touch': is no name of a host"),
    ("-- mpirun x --machinefile=good -np all", "-np: must be given with --machinefile"),
    ("-- /no/program", "/no/program: is not a program"),
    ("SLURM_JOB_ID=7 -- true", "--checkpoint-dir: must be given in a Slurm job")])
def test_refuses(words, part, tmp_path):
    (tmp_path / "garbled").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "fifo")
    for name, text in {"good": TWO, "option": "-oProxyCommand=touch slots=2", "command": "a;touch slots=2"}.items():
        (tmp_path / name).write_text(text)
    setting = [word for word in words.split() if word.startswith("SLURM")]
    done = subprocess.run([*LOOP[:3], *setting, *LOOP[3:], *words.split()[len(setting):]], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and part in done.stderr, done.stderr


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


@pytest.mark.parametrize("sent, hang, code", [
    (signal.SIGUSR1, "ends", 0), (signal.SIGTERM, "ends", 143), (signal.SIGINT, "dies", 130),
    (signal.SIGHUP, "dies", 129)])
def test_signals_are_passed_on_and_end_the_loop(sent, hang, code, tmp_path):
    def during(loop):
        wait_until((tmp_path / "ready").exists)
        loop.process.process.send_signal(sent)
    loop = Loop(tmp_path, [{"hang": hang, "code": code}], during=during)
    assert loop.code == code and loop.events == "start end", loop.done
    assert (tmp_path / "signals").read_text().split() == [sent.name] and f"after {sent.name}" in loop.err
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if alive(pid)]


def test_sigterm_between_two_attempts_ends_the_loop(tmp_path):
    def during(loop):
        wait_until(lambda: "next attempt" in pathlib.Path(loop.process.err.name).read_text())
        loop.process.process.send_signal(signal.SIGTERM)
    loop = Loop(tmp_path, [FAILS], "--backoff 1000", during=during)
    assert loop.code == 1 and loop.calls == 1 and loop.waits == [300]
    loop.done.within(20)


# ---- with the program ----
def train(module_run, flags, ranks=4, loop=LOOP, code=0):
    shape = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 32 --global-batch 8 --steps 40"
    loop = [*loop, "--backoff", "0.1", "--"] if loop else []
    words = [*loop, "mpirun", "--oversubscribe", "-np", str(ranks), module_run.binaries / "08_3d_full", *shape.split()]
    module_run.started.append(Process([*words, *flags.split()], module_run.folder, {}))
    done = module_run.started[-1].end(120)
    assert done.code == code, done
    return done


def losses(done, file):
    """{step: the losses that the run, resumed or not, wrote for it}."""
    found = {}
    for event in done.events("step", file):
        found.setdefault(event["step"], set()).add(event["loss"])
    return found


@pytest.fixture(scope="module")
def plain(module_run):
    return losses(train(module_run, "--metrics plain-m.jsonl", loop=[]), "plain-m.jsonl")


@pytest.mark.parametrize("fault", ["kill:1:31", "hang:2:31", "nan:0:31", "bitflip:3:31"])
def test_program_that_fails_is_resumed_with_the_losses_of_a_run_without(fault, module_run, plain):
    name = fault.split(":")[0]
    done = train(module_run, f"--checkpoint-dir d-{name} --checkpoint-every 1 --metrics {name}-m.jsonl "
                 f"--inject {fault} --comm-timeout 3 --replica-check 1")
    assert losses(done, f"{name}-m.jsonl") == plain
    assert kinds(done.err.replace("set aside", "left out")).replace("left_out ", "") == TWICE
    assert "--resume" in re.findall(r"attempt 2: (.*)", done.err)[0].split()


def test_program_with_a_flipped_bit_resumes_from_before_it(module_run, plain):
    # How many of the checkpoints are complete by then depends on the disk.
    done = train(module_run, "--checkpoint-dir d --checkpoint-every 1 --keep 40 --inject bitflip:3:31 "
                 "--replica-check 10")
    aside = [int(step) for step in re.findall(r"restart: d/step-(\d+) is set aside", done.err)]
    resumed = [int(step) for step in re.findall(r"^resumes d/step-(\d+):", done.out, re.M)]
    assert min(aside, default=30) > 29 and max(resumed, default=0) <= 29, done
    assert re.findall(r"^step +40/40 +loss (\S+)", done.out, re.M)[-1:] == [f"{min(plain[40]):.4f}"]


def test_program_whose_folder_is_held_ends_the_loop_and_then_finishes(module_run):
    (module_run.folder / "e").mkdir()
    with open(module_run.folder / "e/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        train(module_run, "--checkpoint-dir e", ranks=1, code=2).says("another run is writing there")
    for events in ("start end", "finished"):
        assert kinds(train(module_run, "--checkpoint-dir e", ranks=1).err) == events
