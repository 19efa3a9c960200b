"""Chapter 05's own: files of schedules, the program `schedule`, drawings, and the watchdog's report of a deadlock."""
import os
import pathlib

import pytest

from one_rank import like_one_rank, one_rank

MODEL = "--layers 8 --hidden 32 --heads 4 --ffn 48 --vocab 259 --seq-len 16 --global-batch 8 --init-std 0.1 --lr 0.001"
SCHEDULES = {"good": "F0 F1 B0 B1\nF0 B0 F1 B1\n",
             # Exercise 4: ZB-H2
             "h2": "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\nF0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3\n",
             "half": "F0 F1 B0 B1\nF0 B0 F1\n", "cycle": "F0 B0 F1 B1\nF0 F1 B0 B1\n"}


@pytest.fixture(scope="module")
def run(module_run):
    """In one folder, with the schedules."""
    for name, steps in SCHEDULES.items():
        (module_run.folder / f"{name}.txt").write_text(steps)
    module_run("schedule", "--name zb-v --stages 4 --micro-batches 8 --write zb_v.txt")
    one_rank(module_run, MODEL)
    return module_run


@pytest.mark.parametrize("flags", ["--pipeline file:zb_v.txt", "--pp 2 --pipeline file:good.txt --micro-batch 2",
                                   "--pp 2 --pipeline file:h2.txt"])
def test_a_schedule_of_a_file_trains_as_one_rank_does(run, flags):
    done = like_one_rank(run, "05_pipeline", MODEL, flags, "--tables off")
    chunks = 2 if "zb_v" in flags else 1  # rank 0's first sends activations, its second nothing but gradients
    sent = [step["comm_bytes"]["pp.send"] for step in done.events()]
    sequences = 8 if "zb_v" in flags else 4
    assert sent == [chunks * sequences * 16 * 32 * 4] * 3, sent


def test_a_drawing_where_no_file_can_be_or_of_no_step_is_refused(run):
    run.refused("05_pipeline", "--steps 0 --draw x.png", ranks=2, says="--draw, --pipeline-trace: show a step")
    run.refused("05_pipeline", "--steps 1 --draw nowhere/x.png", ranks=2,
                says="--draw nowhere/x.png: cannot be written")


def test_a_drawing_that_fails(run):
    """python3 is said to have matplotlib, and then ends with an error."""
    (run.folder / "fake").mkdir()
    fake = run.folder / "fake/python3"
    fake.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho Traceback >&2\necho "Error: no ink" >&2\nexit 3\n')
    fake.chmod(0o755)
    done = run("schedule", "--file good.txt --draw q.png", code=1, env={"PATH": f"{fake.parent}:{os.environ['PATH']}"})
    done.says("ended with exit code 3: Error: no ink")
    assert "Traceback" not in done.err and not list(run.folder.glob("q.png*")), done


def test_a_drawing(run):
    drawing = run.folder / "p'; touch pwned; echo '.png"  # no shell may read this
    beside = run.folder / f"{drawing.name}.json"
    beside.write_text("kept")
    before = set(run.folder.iterdir())
    run("schedule", "--name dualpipe-v --stages 2 --micro-batches 4 --draw", pathlib.Path(drawing.name))
    assert drawing.read_bytes()[1:4] == b"PNG" and beside.read_text() == "kept"
    assert set(run.folder.iterdir()) == before | {drawing}


# flags of `schedule`, exit code, what it says
SAID = {
    "": (0, ["zb-v         25.5   5.9%     5.9%      0.0%     0.0%", "dualpipe-v   25.5"]),
    "--name 1f1b --stages 4 --micro-batches 8 --costs 1,1.5,0.5 --hop 0.25 --slow-rank 1=2":
        (0, ["F 1, I 1.5, W 0.5, hop 0.25, rank 1 x 2", "1     1"]),
    "--name 1f1b --costs 1e-320,1,1 --slow-rank 1=1e-320": (0, []),  # nearly 0
    "--file h2.txt --steps 3":  # no idle time in a rank's own span
        (0, ["0.0% of the longest rank's own span (12)",
             "its own first step               37         13                12"]),
    "--file half.txt": (1, ['half.txt: is not complete: rank 1: micro-batch 1 goes through chunk 0 as "F"']),
    "--file cycle.txt": (1, ["cycle.txt: deadlocks, however messages are sent: rank 0 at B0 waits"])}


@pytest.mark.parametrize("flags", SAID)
def test_schedule(run, flags):
    code, parts = SAID[flags]
    done = run("schedule", flags, code=code).within(5).says(*parts, where="err" if code else "out")
    assert code or not done.err, done


def test_schedule_writes_what_it_read(run):
    done = run("schedule", "--file zb_v.txt --steps 2 --csv steps.csv --spans-csv spans.csv --write again.txt")
    done.within(5)
    done.says("buffered sends:     all ranks reach the end", "blocking sends:     would deadlock: rank",
              "5.9% by the clock (25.5), 0.0% of the longest rank's own span (24)", "rank 3  |", "each rank goes on",
              "zb_v.txt", where="out")
    lines = {name: (run.folder / name).read_text().splitlines()
             for name in ("steps.csv", "spans.csv", "again.txt", "zb_v.txt")}
    assert ",4,8,2,1,1,1,0,1,0 7,0,24,24," in lines["steps.csv"][1] and len(lines["spans.csv"]) == 385
    assert lines["again.txt"][1:] == lines["zb_v.txt"][1:]


def test_schedule_draws_steps_too_short_for_numbers_without(run):
    done = run("schedule", "--name 1f1b --stages 4 --micro-batches 16").within(5).says("rank 0  |FF", where="out")
    rows = [line for line in done.out.splitlines() if line.startswith("rank")]
    assert not any(f"{step}{digit}" in row for row in rows for step in "FB" for digit in range(10)), done
