"""Only this catches: a checkpoint damaged, or older than one that the run has announced, after a power cut or a kill.

strace logs what four ranks do to a folder. What a cut at any moment may leave follows from POSIX, which promises only:
  - Bytes are on the disk if a later fsync of their file has ended. Of others all may be there, none, the first ones, or
    the file's length with zeros or garbage in any of its pages.
  - A name (created, renamed, removed) is on the disk if a later fsync of its folder has ended. Of others all may be
    there, none, the first ones (a journal's), or any of them. A rename is atomic.
  - What the cut interrupts may be done or not, and no fsync covers it.
"""
import ast
import json
import os
import random
import re
import shutil
import subprocess
import types
import zlib

import pytest

from conftest import SLICE, in_turn

RANKS, STEPS, CUTS = 4, 150, 3200 if SLICE == "all" else 400
SHAPE = ("--layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 16 --vocab 259 --seq-len 16 --global-batch 4 "
         "--steps 1000000 --warmup-steps 5 --checkpoint-dir run/d")
WRITES, UNTIL = "--checkpoint-every 1 --metrics m.jsonl", f"--stop-after {STEPS}"
LAYOUTS = ("--zero 0", "--tp 2 --zero 1", "--cp 2 --zero 3", "--zero 2 --keep 1")
CALLS = {"open": "open,openat,creat", "write": "write,writev", "fsync": "fsync,fdatasync",
         "rename": "rename,renameat,renameat2", "mkdir": "mkdir,mkdirat", "unlink": "unlink,unlinkat,rmdir"}
# A log for each thread; times in nanoseconds; the paths of descriptors; all bytes that are written.
STRACE = ("-ff --seccomp-bpf -y -s 10000000 --absolute-timestamps=format:unix,precision:ns --syscall-times=ns "
          f"-e trace={','.join(CALLS.values())} -o logs/rank")
LINE = re.compile(r"(\d+\.\d{9}) (\w+)\((.*)\) += (-?\d+).* <(\d+\.\d{9})>")
TEXT = re.compile(r'(?:<([^>]*)>, |iov_base=)?"((?:[^"\\]|\\.)*)"')  # and the path of the descriptor before it
FSYNCS = {"a rank's file": ".*/rank-[^/]*", "the manifest": ".*/manifest.json", "a checkpoint's folder": "d/step-[^/]*",
          "--checkpoint-dir": "d", "the folder above it": ""}
NEVER, PAGE = float("inf"), 4096


def operation_of(line, work):
    """What a line of the log has done to work/run, whose path is "" here, or to m.jsonl; or None."""
    found = LINE.match(line)
    if not found or int(found[4]) < 0:
        return None
    name, arguments = found[2], found[3]
    call = next(call for call, names in CALLS.items() if name in names.split(","))
    if call == "open" and name != "creat" and "O_CREAT" not in arguments and "O_TRUNC" not in arguments:
        return None
    texts = TEXT.findall(arguments)
    if call in ("write", "fsync"):
        paths = [re.match(r"\d+<(.*?)>", arguments)[1]]
    else:
        paths = [os.path.join(work, at, text) for at, text in texts]
    paths = [os.path.relpath(path, work) for path in paths]
    if not all(path == "m.jsonl" or path.split("/")[0] == "run" for path in paths):
        return None
    begin, took = (int(time.replace(".", "")) for time in (found[1], found[5]))
    data = b"".join(ast.literal_eval(f'b"{text}"') for _, text in texts) if call == "write" else b""
    return types.SimpleNamespace(call=call, paths=[path.removeprefix("run").strip("/") for path in paths], begin=begin,
                                 end=begin + took, data=data[:int(found[4])], truncates="O_TRUNC" in arguments)


class Log:
    """What the ranks did, in the order of the ends. A folder is there from the beginning of its mkdir on: another rank
    may use it before the call's end is noted."""

    def __init__(self, work):
        lines = [line for path in (work / "logs").iterdir() for line in path.read_text().splitlines()]
        found = filter(None, [operation_of(line, work) for line in lines])
        found = sorted(found, key=lambda each: each.begin if each.call == "mkdir" else each.end)
        self.operations = [each for each in found if each.paths != ["m.jsonl"]]
        for number, operation in enumerate(self.operations):
            operation.number = number
        self.moments = [time for each in self.operations for time in (each.begin, each.end)]
        # (time, step): the run says that a checkpoint is complete.
        self.announced = [(each.begin, event["step"]) for each in found if each.paths == ["m.jsonl"]
                          for event in map(json.loads, each.data.splitlines()) if event["event"] == "checkpoint"]

    def without(self, kind):
        """The operations without one kind of fsync."""
        path = re.compile(FSYNCS[kind])
        return [each for each in self.operations if each.call != "fsync" or not path.fullmatch(each.paths[0])]


class Thing:
    """A file or a folder, and its changes since it was made: of a file (offset, bytes), or None where it became empty;
    of a folder {name: Thing, or None}."""

    def __init__(self):
        self.changes, self.size, self.entries = [], 0, {}  # the last two as the ranks see them

    def change(self, number, end, what):
        self.changes.append(types.SimpleNamespace(number=number, end=end, what=what, durable=False))

    def content(self, pick):
        """A file's bytes after a cut; without `pick` all of them."""
        how = pick.choice(("all", "none", "first", "zeros", "pages")) if pick else "all"
        unsynced = sum(not change.durable for change in self.changes)
        kept = pick.randrange(unsynced + 1) if pick else 0
        data, seen = bytearray(), 0
        for change in self.changes:
            seen += not change.durable
            loses = not change.durable and how != "all"
            if loses and (how == "none" or how == "first" and seen > kept):
                continue
            if change.what is None:
                data.clear()
            at, new = change.what or (0, b"")
            if loses and how == "first" and seen == kept:
                new = new[:pick.randrange(len(new) + 1)]
            elif loses and how == "zeros":
                new = bytes(len(new))
            elif loses and how == "pages":
                pages = [new[begin:begin + PAGE] for begin in range(0, len(new), PAGE)]
                new = b"".join(pick.choice((page, bytes(len(page)), pick.randbytes(len(page)))) for page in pages)
            data += bytes(max(0, at - len(data)))
            data[at:at + len(new)] = new
        return bytes(data)


class Folder(Thing):
    def change(self, number, end, what):
        super().change(number, end, what)
        self.entries |= what


class Disk:
    """The folder after a cut right after `moment`."""

    def __init__(self, operations, moment=NEVER):
        self.root = Folder()
        self.folders = [self.root]
        for operation in operations:
            if operation.begin <= moment:
                self.apply(operation, operation.end if operation.end <= moment else NEVER)

    def at(self, path):
        thing = self.root
        for name in filter(None, path.split("/")):
            thing = thing.entries[name]
        return thing

    def apply(self, operation, end):
        path, call = operation.paths[0], operation.call
        above, _, name = path.rpartition("/")
        if call == "fsync":
            for change in self.at(path).changes if end < NEVER else []:
                change.durable = change.durable or change.end <= operation.begin
        elif call == "write":
            self.at(path).change(operation.number, end, (self.at(path).size, operation.data))
            self.at(path).size += len(operation.data)
        elif call == "open" and self.at(above).entries.get(name):
            self.at(path).size *= not operation.truncates
            self.at(path).change(operation.number, end, None if operation.truncates else (0, b""))
        elif call == "rename":
            to, _, new = operation.paths[1].rpartition("/")
            assert to == above, f"a rename between folders: {operation.paths}"
            self.at(above).change(operation.number, end, {name: None, new: self.at(path)})
        else:
            thing = {"open": Thing, "mkdir": Folder, "unlink": lambda: None}[call]()
            self.folders += [thing] if call == "mkdir" else []
            self.at(above).change(operation.number, end, {name: thing})

    def left(self, pick=None):
        """{path: bytes, or None for a folder}: by chance, or all of it."""
        kept = sorted({change.number for folder in self.folders for change in folder.changes if not change.durable})
        if pick:
            some = [n for n in kept if pick.random() < 0.5]
            kept = pick.choice((kept, [], kept[:pick.randrange(len(kept) + 1)], some))
        found = {}

        def visit(folder, path):
            entries = {}
            for change in folder.changes:
                if change.durable or change.number in kept:
                    entries |= change.what
            for name, thing in entries.items():
                if isinstance(thing, Folder):
                    found[path + name] = None
                    visit(thing, f"{path}{name}/")
                elif thing:
                    found[path + name] = thing.content(pick)

        visit(self.root, "")
        return found


def on_disk(folder):
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def newest_of(left):
    """The newest step-N with a manifest (0: none), and what is wrong with it."""
    manifests = filter(None, [re.fullmatch(r"d/step-(\d+)/manifest\.json", path) for path in left])
    step = max((int(found[1]) for found in manifests), default=0)
    if step == 0:
        return 0, ""
    try:
        manifest = json.loads(left[f"d/step-{step}/manifest.json"])
        files = {entry["name"]: (entry["bytes"], entry["crc32"]) for entry in manifest["files"]}
        assert manifest["step"] == step and len(files) == RANKS
    except (ValueError, AssertionError) as error:
        return step, f"the manifest of step-{step}: {error!r}"
    there = {name: (len(data), zlib.crc32(data)) for name in files if (data := left.get(f"d/step-{step}/{name}"))}
    damaged = [name for name in files if there.get(name) != files[name]]
    return step, f"step-{step}: damaged: {damaged}" if damaged else ""


def cuts(log, operations, seed):
    """(what is wrong, the newest step, what is left) of cuts at random moments."""
    pick = random.Random(f"{seed} {SLICE}")
    for _ in range(CUTS):
        moment = pick.choice(log.moments)
        left = Disk(operations, moment).left(pick)
        newest, wrong = newest_of(left)
        said = max((step for time, step in log.announced if time <= moment), default=0)
        yield wrong or (f"step-{said} was announced, step-{newest} is left" if newest < said else ""), newest, left


def losses_of(path):
    """{step: loss}; the line that a kill cut short is left out."""
    events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def goes_on(run, flags, left, losses):
    """A run that resumes from what is left has the losses that are known."""
    shutil.rmtree(run.folder / "run")
    for path, content in {"": None, **left}.items():
        place = run.folder / "run" / path
        place.mkdir() if content is None else place.write_bytes(content)
    (run.folder / "resumed.jsonl").unlink(missing_ok=True)
    newest, _ = newest_of(left)
    last = max(STEPS, newest + 20)
    command = ["08_3d_full", SHAPE, flags, f"--stop-after {last} --metrics resumed.jsonl"]
    if newest == 0:
        run(*command, "--resume", ranks=RANKS, code=2).says("has no complete checkpoint")
    run(*command, *["--resume"] * (newest > 0), ranks=RANKS)
    found = losses_of(run.folder / "resumed.jsonl")
    assert list(found) == list(range(newest + 1, last + 1)) and found.keys() & losses.keys()
    assert [(step, loss, losses[step]) for step, loss in found.items() if loss != losses.get(step, loss)] == []


@pytest.fixture(scope="module", params=in_turn(LAYOUTS, len(LAYOUTS)))
def recorded(request, module_run, binaries):
    """A run under strace: its flags, log, losses, and what it left."""
    if subprocess.run("strace -o /dev/null true", shell=True, capture_output=True).returncode:
        pytest.skip("no strace that may trace (Debian: apt-get install strace)")
    work = module_run.folder
    for name in ("run", "logs"):
        shutil.rmtree(work / name, ignore_errors=True)
        (work / name).mkdir()
    module_run("strace", STRACE, binaries / "08_3d_full", SHAPE, request.param, WRITES, UNTIL, ranks=RANKS)
    return request.param, Log(work), losses_of(work / "m.jsonl"), on_disk(work / "run")


def test_the_log_explains_every_byte(recorded):
    _, log, losses, there = recorded
    assert Disk(log.operations).left() == there
    assert len(losses) == STEPS and len(log.announced) > 1


def test_after_a_cut_the_newest_checkpoint_is_complete_and_none_that_was_announced_is_lost(recorded):
    found = list(cuts(recorded[1], recorded[1].operations, "cuts"))
    assert [wrong for wrong, *_ in found if wrong] == []
    assert len({newest for _, newest, _ in found}) > 2


@pytest.mark.parametrize("kind", FSYNCS)
def test_without_an_fsync_a_cut_does_damage(recorded, kind):
    assert any(wrong for wrong, *_ in cuts(recorded[1], recorded[1].without(kind), kind))


@pytest.mark.parametrize("nothing_is_complete", (True, False))
def test_a_run_resumes_after_a_cut(recorded, module_run, nothing_is_complete):
    flags, log, losses, _ = recorded
    found = cuts(log, log.operations, "resumes")
    left = next(left for _, newest, left in found if newest < STEPS and (newest == 0) == nothing_is_complete)
    goes_on(module_run, flags, left, losses)


# All ranks once there are so many steps; or any rank instead of this call of a thread, which writes or commits.
KILLS = (60, 90, 1, 200, "fsync:when=4", "rename:when=2", "unlink:when=6", "fsync:when=3")


@pytest.mark.parametrize("kill", in_turn(KILLS, 4))
def test_a_run_resumes_after_a_kill(run, recorded, binaries, kill):
    flags, _, losses, _ = recorded
    (run.folder / "run").mkdir()
    watched = [] if isinstance(kill, int) else ["strace", f"-f -o /dev/null -e inject={kill}:signal=KILL"]
    process = run.start(*watched, binaries / "08_3d_full", SHAPE, flags, WRITES, ranks=RANKS)
    if not watched:
        process.wait_for_steps(kill)
        process.kill()
    assert process.end().code != 0
    newest, wrong = newest_of(on_disk(run.folder / "run"))
    announced = re.findall(r'"event":"checkpoint","step":(\d+)', (run.folder / "m.jsonl").read_text())
    assert not wrong and newest >= max(map(int, announced), default=0), (wrong, newest, announced)
    goes_on(run, flags, on_disk(run.folder / "run"), losses | losses_of(run.folder / "m.jsonl"))
