"""Only this catches: real runs' folders of checkpoints: what is kept, signals, a folder that goes away, a full disk."""
import hashlib
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest
from checkpoint_reader import read
from conftest import PATIENCE

PROGRAM = "08_3d_full"
SHAPE = ("--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8 "
         "--init-std 0.1 --lr 0.001 --metrics m.jsonl")
HERE = SHAPE + " --checkpoint-dir ck"
LONG = HERE + " --steps 1000000"


def losses(done):
    return {event["step"]: event["loss"] for event in done.events()}


def newest(folder):
    return max((int(path.name[5:]) for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name)), default=0)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def without_leftovers(folder):
    return not [name for name in names(folder) if "tmp" in name or "probe" in name]


@pytest.fixture(scope="module")
def base(module_run):
    """(the losses of 8 steps, a folder with checkpoints of steps 2 and 4 and their weights), by two ranks."""
    whole = losses(module_run(PROGRAM, SHAPE, "--tp 2 --steps 8", ranks=2))
    module_run(PROGRAM, SHAPE, "--tp 2 --steps 8 --stop-after 4 --checkpoint-dir base",
               "--checkpoint-every 2 --weights-every 2", ranks=2)
    folder = module_run.folder / "base"
    assert names(folder) == [".lock", "step-2", "step-4", "weights-2", "weights-4"] and len(whole) == 8
    return whole, folder


@pytest.fixture
def ck(base, tmp_path):
    """A copy of that folder, for this test."""
    (tmp_path / "m.jsonl").write_text((base[1].parent / "m.jsonl").read_text())
    return pathlib.Path(shutil.copytree(base[1], tmp_path / "ck", symlinks=True))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[9999] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("flags, says", [
    ("--resume --tp 2 --checkpoint-dir ck", "ck/step-4/rank-00001.safetensors: corrupt|(try --resume-from ck/step-2)"),
    ("--checkpoint-dir ck", "ck: has the checkpoints of another run, up to step-4 (try --resume, or another folder)"),
    ("--checkpoint-dir /proc/self", "--checkpoint-dir /proc/self"),
], ids=["a flipped bit in the second rank's file", "another run's folder", "a folder that cannot be written"])
def test_refused_by_two_ranks_and_nothing_is_touched(run, ck, flags, says):
    """Most of what is refused is in refusals_checkpoint.cpp."""
    flip_a_bit(ck / "step-4/rank-00001.safetensors")
    (ck.parent / "m.jsonl").unlink()

    def content():
        return {path: hashlib.sha256(path.read_bytes()).digest() if path.is_file() else None for path in ck.rglob("*")}

    before = content()
    run.refused(PROGRAM, SHAPE, "--steps 8", flags, ranks=2, says=says.split("|"))
    assert content() == before


def test_resume_continues_the_metrics_and_removes_what_a_crash_has_left(run, base, ck):
    for name in ("step-7.tmp", "weights-3.tmp", "mine.tmp"):
        (ck / name).mkdir()
    (ck / "step-7.tmp/rank-00000.json").write_text("x")
    four = [line for line in (ck.parent / "m.jsonl").read_text().splitlines() if "summary" not in line]
    (ck.parent / "m.jsonl").write_text("\n".join(four) + '\n{"event":"ste')  # half a line
    done = run(PROGRAM, HERE, "--tp 2 --steps 8 --resume", ranks=2)
    assert losses(done) == base[0]
    summary, = done.events("summary")  # of steps 5 to 8, 8 sequences of 32 tokens each
    assert math.isclose(summary["tokens_per_s"] * summary["seconds"], 4 * 8 * 32, rel_tol=1e-6)
    assert names(ck) == [".lock", "mine.tmp", "step-4", "step-8", "weights-2", "weights-4"]
    read(ck / "step-8")


def test_resume_with_another_schedule_says_so_and_keep_keeps(run, ck):
    done = run(PROGRAM, HERE, "--steps 12 --resume --checkpoint-every 1 --keep 3 --lr-schedule constant")
    done.says("differs from the checkpoint's run: --steps 12, not 8, --lr-schedule constant, not cosine", where="out")
    steps = [name for name in names(ck) if name.startswith("step-")]
    assert len(steps) == 3 and "step-12" in steps


def test_resume_with_a_batch_that_the_ranks_left_divide(run, ck):
    run.refused(PROGRAM, HERE, "--steps 8 --resume", ranks=3, says=["--global-batch 8 is not", "try --global-batch 9)"])
    done = run(PROGRAM, HERE.replace("batch 8", "batch 6"), "--steps 8 --resume", ranks=3)
    done.says("differs from the checkpoint's run: --global-batch 6, not 8: from step 5 on, sample 32 (as many samples "
              "as before: --steps 10)", where="out")
    summary = done.events("summary")[-1]
    assert math.isclose(summary["tokens_per_s"] * summary["seconds"], 4 * 6 * 32, rel_tol=1e-6)
    assert [event["global_batch"] for event in done.events()[-4:]] == [6] * 4
    manifest = read(ck / "step-8")[0]
    assert manifest["next_sample"] == 4 * 8 + 4 * 6 and len(manifest["batches"]) == 2


def test_resume_writes_weights_again_that_are_there(run, ck):
    shutil.rmtree(ck / "step-4")
    for step in (5, 6, 7, 8):  # of the run before
        shutil.copytree(ck / "weights-4", ck / f"weights-{step}")
        (ck / f"weights-{step}/rank-00001.safetensors").unlink()
    done = run(PROGRAM, HERE, "--steps 8 --resume --weights-every 4")
    assert done.err == "" and without_leftovers(ck)
    assert read(ck / "weights-8")[0]["step"] == 8


def test_a_link_to_a_checkpoint_is_one(run, ck):
    (ck / "step-2").rename(ck.parent / "linked")
    shutil.rmtree(ck / "step-4")
    (ck / "step-2").symlink_to(ck.parent / "linked")
    run(PROGRAM, HERE, "--steps 8 --stop-after 3 --resume")
    assert (ck / "step-3").exists()


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_the_command_after_a_checkpoint_sees_complete_files_one_at_a_time_and_the_run_waits_for_it(run, base):
    command = 'echo begin >> log; cp -r "$TRAIN70B_CHECKPOINT" "$PWD/of-$(basename "$TRAIN70B_CHECKPOINT")"; ' \
              "sleep 0.2; echo end >> log"
    done = run(PROGRAM, HERE, "--tp 2 --steps 8 --checkpoint-every 1 --weights-every 4 --keep 9", "--after-checkpoint",
               pathlib.PurePath(command), ranks=2)  # one word
    assert losses(done) == base[0]
    folders = [event["folder"] for event in done.events("checkpoint")]
    status = {pathlib.Path(event["folder"]).name: event["status"] for event in done.events("after_checkpoint")}
    assert sorted(status) == sorted(folders) and status["step-8"] == 0 and None in status.values(), status
    for name, code in status.items():
        copy = run.folder / f"of-{name}"
        assert code in (0, None) and copy.exists() == (code == 0), status
        assert code is None or [path.read_bytes() for path in sorted(copy.iterdir())] == [
            path.read_bytes() for path in sorted((run.folder / "ck" / name).iterdir())]
    assert (run.folder / "log").read_text() == "begin\nend\n" * list(status.values()).count(0)


@pytest.mark.parametrize("command, status", [("echo no room >&2; exit 3", 3), ("kill -TERM $$", 143)])
def test_a_command_that_fails_after_a_checkpoint_is_a_warning(run, base, command, status):
    done = run(PROGRAM, HERE, "--tp 2 --steps 8 --checkpoint-every 4", "--after-checkpoint", pathlib.PurePath(command),
               ranks=2)
    assert losses(done) == base[0]
    said = f"warning: --after-checkpoint for ck/step-8: exit status {status}: {'no room' if status == 3 else ''}"
    done.says(said.strip(), where="out")
    assert done.events("after_checkpoint")[-1] == {"event": "after_checkpoint", "folder": "ck/step-8", "status": status}


def begin(run, *flags, ranks=2):
    """A long run that has trained five steps."""
    (run.folder / "m.jsonl").unlink(missing_ok=True)
    process = run.start(PROGRAM, *flags, ranks=ranks)
    process.wait_for_steps(5)
    return process


def send(process, which):
    os.kill(process.process.pid, which)


@pytest.mark.parametrize("which, ranks", [(signal.SIGUSR1, 2), (signal.SIGTERM, 1)], ids=["mpirun USR1", "a rank TERM"])
def test_a_signal_ends_a_run_that_resumes_as_if_nothing_had_been(run, which, ranks):
    process = begin(run, LONG, f"--tp {ranks}" + " --checkpoint-every 2" * (ranks == 1), ranks=ranks)
    if ranks > 1:
        second = run(PROGRAM, LONG.replace("m.jsonl", "second.jsonl"), code=2)
        assert second.err.count("\n") == 1 and not (run.folder / "second.jsonl").exists()
        second.says("--checkpoint-dir ck: another run is writing there")
        assert process.process.poll() is None
    send(process, which)
    done = process.end(10)
    assert done.code == 0, done
    last = max(losses(done))
    assert newest(run.folder / "ck") == last and without_leftovers(run.folder / "ck")
    if ranks == 1:
        done.says("SIGTERM: stops after this step")
    resumed = losses(run(PROGRAM, LONG, f"--tp {ranks} --resume --stop-after {last + 3}", ranks=ranks))
    whole = losses(run(PROGRAM, SHAPE, f"--steps 1000000 --tp {ranks} --stop-after {last + 3}", ranks=ranks))
    assert resumed == whole and len(whole) == last + 3


def test_sigterm_to_mpirun_leaves_the_newest_complete_checkpoint(run):
    process = begin(run, LONG, "--tp 2 --checkpoint-every 1")
    send(process, signal.SIGTERM)
    done = process.end(8)
    assert done.code not in (0, 124), done
    before, last = losses(done), newest(run.folder / "ck")
    assert last > 0
    (run.folder / "m.jsonl").unlink()
    resumed = losses(run(PROGRAM, LONG, f"--tp 2 --resume --stop-after {last + 2}", ranks=2))
    assert newest(run.folder / "ck") == last + 2 and without_leftovers(run.folder / "ck")
    assert len(resumed) == 2 and all(before.get(step, loss) == loss for step, loss in resumed.items())


# ---- what cannot be written ------------------------------------------------------------------------------------------


def goes_on_after(process, said):
    """Waits until a checkpoint was not written, and five steps more."""
    end = time.monotonic() + 20 * PATIENCE
    while said not in pathlib.Path(process.out.name).read_text():
        assert time.monotonic() < end, f"not said: {said}"
        time.sleep(0.05)
    process.wait_for_steps((process.folder / "m.jsonl").read_text().count('"event":"step"') + 5)


def test_a_folder_that_is_removed_does_not_end_the_training(run):
    process = begin(run, LONG, "--tp 2 --checkpoint-every 2")
    (run.folder / "ck").rename(run.folder / "gone")
    goes_on_after(process, "not written; there is no complete checkpoint")
    send(process, signal.SIGUSR1)
    done = process.end(10)
    assert done.code == 1 and done.events("checkpoint_failed"), done
    done.says("cannot be created (No such file or directory)", "could not be written; there is no complete checkpoint")


@pytest.fixture
def full(tmp_path):
    """A disk of 3 MB, and a function that fills it."""
    disk = tmp_path / "full"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3M", "none", disk], capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield disk, lambda: subprocess.run(f"cat /dev/zero >>{disk}/ballast", shell=True, capture_output=True)
    subprocess.run(["umount", disk], check=True)


def test_on_a_full_disk_the_training_goes_on_and_what_was_complete_stays(run, full):
    disk, fill = full
    on_disk = LONG.replace("--checkpoint-dir ck", "--checkpoint-dir full/ck")
    process = begin(run, on_disk, "--tp 2 --checkpoint-every 2 --keep 1")
    for _ in range(10):  # again: a checkpoint that fails leaves its space
        fill()
        time.sleep(0.1)
    goes_on_after(process, "not written; the newest is step-")
    send(process, signal.SIGUSR1)
    done = process.end(10)
    last = newest(disk / "ck")
    assert done.code == 1 and without_leftovers(disk / "ck"), done
    done.says("No space left on device", f"could not be written; the newest is step-{last}")
    (disk / "ballast").unlink()
    run(PROGRAM, on_disk, f"--resume --stop-after {last + 2}")
    assert newest(disk / "ck") == last + 2


def test_on_a_full_disk_what_keep_does_not_keep_makes_room(run, full):
    disk, fill = full
    on_disk = LONG.replace("--checkpoint-dir ck", "--checkpoint-dir full/ck")
    run(PROGRAM, on_disk, "--stop-after 4 --checkpoint-every 1 --keep 4")
    # The first and the last step's are there; one between waits while another is being written, on a slow machine.
    older = sorted(int(name[5:]) for name in names(disk / "ck") if name.startswith("step-"))[:-1]
    fill()
    done = run(PROGRAM, on_disk, "--tp 2 --stop-after 7 --checkpoint-every 1 --keep 1 --resume", ranks=2)
    done.says("No space left on device")
    removes = f"step-4; the disk is full: removes {len(older)} older ones, up to step-{older[-1]} (--keep 1)"
    done.says(removes, where="out")
    assert [name for name in names(disk / "ck") if name != ".lock"] == ["step-7"]
