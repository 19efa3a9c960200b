"""What only this catches: a replica that dies, hangs or comes back (--elastic on) and changes a loss, stops the others,
or takes part with other weights."""
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import programs
import pytest
from conftest import ENVIRONMENT, PATIENCE, ROOT

SHAPE = "--layers 2 --heads 4 --hidden 32 --ffn 48 --seq-len 16 --micro-batch 1 --dtype fp64".split()


class Replicas:
    """A lighthouse, and replicas that the test starts."""

    def __init__(self, run, count, *flags, awaits=()):
        self.folder, self.bin, self.flags, self.started = run.folder, pathlib.Path(run.binaries), flags, []
        words = [sys.executable, ROOT / "08_3d_full/checkpoint/lighthouse.py", "--replicas", count]
        self.lighthouse = self.start([*words, *(["--awaits", *awaits] if awaits else [])], stdout=subprocess.PIPE)
        self.address = re.search(r"--lighthouse (\S+)", self.lighthouse.stdout.readline())[1]

    def start(self, words, **more):
        process = subprocess.Popen([str(word) for word in words], cwd=self.folder, env=ENVIRONMENT, encoding="utf-8",
                                   start_new_session=True, **more)
        self.started.append(process)
        return process

    def replica(self, number, *flags, ranks=1):
        """One more start of it; its metrics are in NUMBER-START.jsonl."""
        name = f"{number}-{sum(path.name.startswith(f'{number}-') for path in self.folder.glob('*.err')) + 1}"
        mpirun = programs.mpirun(ranks) if ranks > 1 else []
        with open(self.folder / f"{name}.err", "w", encoding="utf-8") as file:
            return self.start([*mpirun, self.bin / "08_3d_full", *SHAPE, *self.flags, *flags, "--elastic", "on",
                               "--lighthouse", self.address, "--replica", number, "--metrics", f"{name}.jsonl"],
                              stdout=subprocess.DEVNULL, stderr=file)

    def ends(self, *processes, code=0):
        for process in processes:
            assert process.wait(180 * PATIENCE) == code, self.said()

    def said(self):
        return "\n".join(path.read_text("utf-8") for path in sorted(self.folder.glob("*.err")))

    def losses(self, name):
        return {line["step"]: line["loss"] for line in programs.events(self.folder / f"{name}.jsonl", "step")}

    def members(self, name):
        return [(line["step"], line["replicas"]) for line in
                map(json.loads, (self.folder / f"{name}.jsonl").read_text("utf-8").splitlines())
                if line["event"] == "replicas"]


@pytest.fixture
def replicas(run):
    made = []

    def make(*words, **more):
        made.append(Replicas(run, *words, **more))
        return made[-1]
    yield make
    for each in made:
        for process in each.started:
            programs.stop(process, 0)


def undisturbed(run, *flags):
    run("01_single_gpu", *SHAPE, *flags, "--metrics", "one.jsonl")
    return {line["step"]: line["loss"] for line in programs.events(run.folder / "one.jsonl", "step")}


def same(losses, wanted, first, last):
    assert list(losses) == list(range(first, last + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(wanted[step], rel=1e-10), step


def test_killed_at_30_and_back_at_60(run, replicas):
    """Three replicas of tp 2 x pp 2; two divide 12 micro-batches as well."""
    flags = ["--global-batch", 12, "--steps", 100]
    wanted = undisturbed(run, *flags)
    on = replicas(3, *flags, "--tp", 2, "--pp", 2, awaits=["1:60"])
    live = [on.replica(number, ranks=4) for number in (0, 2)]
    assert on.replica(1, "--inject", "kill:0:30", ranks=4).wait(180 * PATIENCE) != 0
    back = on.replica(1, ranks=4)
    on.ends(*live, back, on.lighthouse)
    for name, first, last in (("0-1", 1, 100), ("2-1", 1, 100), ("1-1", 1, 29), ("1-2", 60, 100)):
        same(on.losses(name), wanted, first, last)
    assert on.members("0-1") == [(1, [0, 1, 2]), (30, [0, 2]), (60, [0, 1, 2])]


def test_one_that_comes_back_skips_the_same_steps(run, replicas):
    """Its window of losses and norms is the others': the updates of its own since then are too few for --skip-step."""
    noise = "".join(random.Random(2).choices("QZXJVKWY0123456789", k=40))
    words = "".join(random.Random(1).choices(("ab ", "cd ", "ef "), k=4000))
    (run.folder / "t.txt").write_text(words[:6000] + noise + words[6000:])
    flags = ["--global-batch", 4, "--steps", 140, "--data", "t.txt", "--lr", 0.01, "--skip-step", "on"]
    wanted = undisturbed(run, *flags)
    skipped = [line["step"] for line in programs.events(run.folder / "one.jsonl", "step") if line["skipped"]]
    assert any(90 < step < 140 for step in skipped), skipped
    on = replicas(2, *flags, awaits=["1:90"])
    live = on.replica(0)
    assert on.replica(1, "--inject", "kill:0:30").wait(180 * PATIENCE) != 0
    on.ends(live, on.replica(1), on.lighthouse)
    same(on.losses("0-1"), wanted, 1, 140)
    same(on.losses("1-2"), wanted, 90, 140)


def test_two_at_once_the_first_one_too_and_zero_3_inside(run, replicas):
    """Of 7 micro-batches one replica has 3 and the others 2, then one has all; some targets do not count."""
    flags = ["--global-batch", 14, "--steps", 12, "--eval-every", 4, "--val-fraction", 0.02]
    flags += ["--document-token", 101, "--mask-document-ends", "on"]
    wanted = undisturbed(run, *flags)
    on = replicas(3, *flags, "--zero", 3, awaits=["0:9", "2:9"])
    live = on.replica(1, ranks=2)
    lost = [on.replica(0, "--inject", "kill:1:5", ranks=2), on.replica(2, "--inject", "kill:0:5", ranks=2)]
    assert all(process.wait(180 * PATIENCE) for process in lost)
    on.ends(live, on.replica(2, ranks=2), on.replica(0, ranks=2), on.lighthouse)
    for name, first, last in (("0-1", 1, 4), ("1-1", 1, 12), ("2-2", 9, 12), ("0-2", 9, 12)):
        same(on.losses(name), wanted, first, last)
    assert on.members("1-1") in ([(1, [0, 1, 2]), (5, [1]), (9, [0, 1, 2])],  # seen together, or one after the other
                                 [(1, [0, 1, 2]), (5, [0, 1]), (5, [1]), (9, [0, 1, 2])],
                                 [(1, [0, 1, 2]), (5, [1, 2]), (5, [1]), (9, [0, 1, 2])])
    targets = [[line["targets"] for line in programs.events(run.folder / f"{name}.jsonl", "step")]
               for name in ("one", "1-1")]
    assert targets[0] == targets[1] and len(set(targets[0])) > 3
    evaluated = {line["step"]: line["loss"] for line in programs.events(run.folder / "one.jsonl", "eval")}
    assert {line["step"]: pytest.approx(line["loss"], rel=1e-10)
            for line in programs.events(run.folder / "1-1.jsonl", "eval")} == evaluated


def test_a_replica_that_hangs_is_left_out(run, replicas):
    """Samples are of a token shard: a thread reads them ahead, of a division that is not the next step's."""
    tokens = random.Random(1).choices(range(256), k=20000)
    (run.folder / "d.bin").write_bytes(struct.pack("<256i20000H", 20240520, 1, 20000, *[0] * 253, *tokens))
    flags = ["--global-batch", 6, "--steps", 8, "--data", "d.bin"]
    wanted = undisturbed(run, *flags)
    on = replicas(3, *flags, "--elastic-timeout", 6)
    live = [on.replica(number) for number in (0, 1)]
    hangs = on.replica(2, "--inject", "stop:0:4")
    begin = time.monotonic()
    on.ends(*live, on.lighthouse)
    assert time.monotonic() - begin < 30 * PATIENCE
    for name in ("0-1", "1-1"):
        same(on.losses(name), wanted, 1, 8)
    assert on.members("0-1") == [(1, [0, 1, 2]), (4, [0, 1])]
    hangs.send_signal(signal.SIGCONT)
    on.ends(hangs, code=1)
    assert "replica 2 was left out" in on.said()


def test_from_checkpoints_of_different_steps_until_all_are_lost(run, replicas):
    """Replica 1 has the newer one, from which replica 0 gets its states, and from these the weights of ZeRO-1."""
    flags = ["--global-batch", 6, "--steps", 9]
    wanted = undisturbed(run, *flags)
    for number, step in enumerate((2, 4)):
        run("08_3d_full", *SHAPE, *flags, "--checkpoint-dir", f"c{number}", "--stop-after", step)
    on = replicas(2, *flags, "--zero", 1)
    dies = ["--inject", "kill:0:8"]
    on.ends(*(on.replica(number, "--checkpoint-dir", f"c{number}", "--resume", *dies, ranks=2) for number in (0, 1)),
            code=128 + signal.SIGKILL)
    on.ends(on.lighthouse, code=1)
    for name in ("0-1", "1-1"):
        same(on.losses(name), wanted, 5, 7)


@pytest.mark.parametrize("flags, says", {
    "--elastic on": "needs --lighthouse HOST:PORT",
    "--replica 1": "need --elastic on",
    "--elastic on --lighthouse here --replica 0": "--lighthouse here: must be HOST:PORT",
    "--elastic on --lighthouse 127.0.0.1:1 --replica 0 --elastic-timeout 1": "127.0.0.1:1: Connection refused",
    "--elastic on --lighthouse x:1 --replica 0 --zero 1": "--zero 1 shards states over the data-parallel ranks of a replica",
    "--elastic on --lighthouse x:1 --replica 0 --elastic-timeout 30": "must be below --comm-timeout, 30",
    "--elastic on --lighthouse x:1 --replica 0 --comm fake --fake-world 2": "not with --comm fake",
    "--elastic on --lighthouse 127.0.0.1:1 --replica 0 --fp8 delayed": "cannot be done again: --fp8 delayed",
}.items())
def test_what_is_refused(run, flags, says):
    done = run("08_3d_full", *SHAPE[:-2], *flags.split(), code=2).says(says)
    assert done.err.count("\n") == 1, done


@pytest.mark.parametrize("flags", [["--global-batch", 2], ["--global-batch", 6, "--batch-ramp", "2:6:4"]])
def test_more_replicas_than_micro_batches(replicas, flags):
    on = replicas(3, *flags)
    on.ends(*(on.replica(number) for number in range(3)), code=2)
    assert on.said().count("there is work for 2 of 3") == 3


def test_one_stops_by_a_signal_and_the_others_go_on(run, replicas):
    flags = ["--global-batch", 6, "--steps", 300]
    on = replicas(2, *flags)
    stops, goes_on = (on.replica(number, "--checkpoint-dir", f"c{number}") for number in range(2))
    while not (run.folder / "0-1.jsonl").exists() or not on.losses("0-1"):
        time.sleep(0.01)
    stops.send_signal(signal.SIGUSR1)
    on.ends(stops, goes_on, on.lighthouse)
    assert 0 < int(next((run.folder / "c0").glob("step-*")).name[5:]) < 300
    same(on.losses("1-1"), undisturbed(run, *flags), 1, 300)


class Spoken:
    """A replica that only talks to the lighthouse."""

    def __init__(self, on, number, step=0, settings="same"):
        host, port = on.address.split(":")
        self.file = socket.create_connection((host, int(port)), 10).makefile("rw", encoding="utf-8")
        self.says(replica=number, step=step, addresses=[f"here:{number}"], timeout=4, settings=settings)

    def says(self, **words):
        self.file.write(json.dumps(words) + "\n")
        self.file.flush()

    def hears(self):
        line = self.file.readline()
        return json.loads(line) if line else None


def test_what_the_lighthouse_decides(replicas):
    on = replicas(3)
    strangers = [socket.create_connection(on.address.split(":"), 10) for _ in range(4)]
    for stranger, words in zip(strangers, (b"GET / HTTP/1.1\r\n\r\n", b'["replica"]\n', b'{"replica": 1}\n')):
        stranger.sendall(words)
    twin = Spoken(on, 0, 4)
    time.sleep(0.1)
    first = Spoken(on, 0, 4)
    assert twin.hears() is None
    assert Spoken(on, 1, 4, "others").hears() is None
    assert Spoken(on, 3, 4).hears() is None
    three = [first, Spoken(on, 1, 2), Spoken(on, 2, 3)]
    heard = [each.hears() for each in three]
    assert heard[0] == heard[1] == heard[2]
    assert (heard[0]["step"], heard[0]["heal"]) == (5, [[1, 0]])  # one at a time receives from one
    for each in three:
        each.says(complete=each is not three[1], why="lost")
    assert [each.hears()["heal"] for each in three] == [[[1, 0]]] * 3
    three[2].says(complete=True)
    time.sleep(2.5)  # those that heal may take longer than the timeout
    for each in three[:2]:
        each.says(complete=True)
    assert [each.hears()["heal"] for each in three] in ([[[2, 0]]] * 3, [[[2, 1]]] * 3)
    three[0].says(complete=True)
    three[2].says(complete=True)
    said = [each.hears() for each in three]  # but not one that has no part in it
    assert said[1] is None and said[0] == said[2]
    assert (said[0]["generation"], [number for number, _ in said[0]["members"]], said[0]["heal"]) == (3, [0, 2], [])
    for again in range(4):  # one that is always too late for the others
        for each in (three[2], three[0]):
            time.sleep(0.1)
            each.says(complete=False, why="no byte")
        said = [each.hears() for each in (three[2], three[0])]
        assert not said[0]["commit"] and said[0]["step"] == 5, again
    assert said[1] is None and [number for number, _ in said[0]["members"]] == [2]
    back = Spoken(on, 0, 5)
    time.sleep(0.3)  # until it is heard
    three[2].says(complete=True)
    assert three[2].hears()["heal"] == back.hears()["heal"] == [[0, 2]]  # though it says that it has seen this step
    waits = Spoken(on, 1, 5)
    three[2].says(over=True)
    assert waits.hears() == three[2].hears() == {"over": True}
    back.file.close()
    three[2].file.close()
    assert on.lighthouse.wait(10) == 0  # with a stranger still there
