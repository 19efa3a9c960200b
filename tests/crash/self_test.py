"""lose.py and log.cpp against small writers, correct ones and ones that leave out what they need.

Run: python3 tests/crash/self_test.py build/lib/libcrash_log.so
"""
import os
import pathlib
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import lose  # noqa: E402

LIBRARY = pathlib.Path(sys.argv[1]).resolve()
SEEDS = 60
NEW, OLD = b"new" * 1000, b"old" * 900
TOOLS = """
import ctypes, errno, os, sys
def save(path, content, sync=True, flags=os.O_TRUNC):
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | flags, 0o644)
    for at in range(0, len(content), 500):
        os.write(fd, content[at:at + 500])
    if sync: os.fsync(fd)
    os.close(fd)
def sync(folder):
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
NEW, OLD = b"new" * 1000, b"old" * 900
"""
failed = []


def expect(name, holds, detail=""):
    print(f"ok   {name}" if holds else f"FAIL {name}: {detail}")
    if not holds:
        failed.append(name)


class Run:
    """A writer in a folder of its own, which holds what `before` wrote there."""

    def __init__(self, script, before="", shell=False, explained=True, **environment):
        self.scratch = tempfile.TemporaryDirectory()
        self.folder, self.side = pathlib.Path(self.scratch.name, "folder"), pathlib.Path(self.scratch.name, "logs")
        self.folder.mkdir()
        python = [sys.executable, "-S", "-E", "-c"]
        subprocess.run([*python, TOOLS + before], cwd=self.folder, check=True)
        lose.start(self.folder, self.side)
        environment = os.environ | environment | {
            "LD_PRELOAD": str(LIBRARY), "CRASH_FOLDER": str(self.folder), "CRASH_LOG": str(self.side)}
        command = ["bash", "-c", script] if shell else [*python, TOOLS + script]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        self.code, self.output = done.returncode, done.stdout + done.stderr
        self.logs = lose.Logs(self.side)
        self.unexplained = lose.check(self.folder, self.logs)
        if explained and self.unexplained:
            expect("the logs explain the folder", False, f"{self.unexplained}, {self.output}")

    def outcomes(self, moment=None, names=None, data=None):
        """What is left under any of many seeds, each once."""
        state = self.logs.state(self.logs.until(moment))
        found = []
        for seed in range(SEEDS):
            left = state.left(names, data, random.Random(seed))
            if left not in found:
                found.append(left)
        return found

    def at_any_moment(self):
        for moment in range(len(self.logs.moments)):
            yield from self.outcomes(moment)


def whole(left, path="file", contents=(NEW,)):
    return left.get(path) in contents


replace = """
save("file.tmp", NEW{file})
{first}
os.rename("file.tmp", "file")
{last}
"""
run = Run(replace.format(file="", first="", last='sync(".")'), 'save("file", OLD)')
expect("a correct replacement: new at the end, under every seed", all(whole(left) for left in run.outcomes()))
expect("a correct replacement: old or new at every moment",
       all(whole(left, contents=(OLD, NEW)) for left in run.at_any_moment()))
expect("a correct replacement: both occur", len({left["file"] for left in run.at_any_moment()}) == 2)
expect("what keeps all of it is what is there", run.outcomes(None, "all", "keep") == [lose.real(run.folder)])

run = Run(replace.format(file=", sync=False", first="", last='sync(".")'), 'save("file", OLD)')
left = {left["file"] for left in run.outcomes()}
expect("without fsync of the file: damaged under some seed", any(bytes not in (OLD, NEW) for bytes in left))
expect("without fsync of the file: empty, cut short, zeros and garbage all occur",
       b"" in left and bytes(len(NEW)) in left and any(0 < len(b) < len(NEW) for b in left) and
       any(len(b) == len(NEW) and b.strip(b"\0new") for b in left), [len(b) for b in left])

run = Run(replace.format(file="", first="", last=""), 'save("file", OLD)')
left = run.outcomes()
expect("without fsync of the folder: old under some seed, new under some",
       any(whole(x, contents=(OLD,)) for x in left) and any(whole(x) for x in left))
run = Run('save("file", NEW)')
expect("a new file without fsync of its folder: missing under some seed", any("file" not in x for x in run.outcomes()))

late = 'fd = os.open("file", os.O_WRONLY); os.fsync(fd); sync(".")'
run = Run(replace.format(file=", sync=False", first="", last=late), 'save("file", OLD)')
expect("a rename before the file's fsync: new at the end", all(whole(x) for x in run.outcomes()))
expect("a rename before the file's fsync: damaged at some moment",
       any(not whole(x, contents=(OLD, NEW)) for x in run.at_any_moment()))

folder = """
os.mkdir("step.tmp")
save("step.tmp/rank-0", NEW{file})
save("step.tmp/rank-1", NEW)
{inner}
save("step.tmp/manifest", b"all there")
{manifest}
os.rename("step.tmp", "step")
{outer}
"""
def complete(left):
    return "step/manifest" not in left or (left["step/manifest"] == b"all there" and whole(left, "step/rank-0") and
                                           whole(left, "step/rank-1"))
good = {"file": "", "inner": 'sync("step.tmp")', "manifest": 'sync("step.tmp")', "outer": 'sync(".")'}
run = Run(folder.format(**good))
expect("a folder that is renamed when complete: there at the end", all("step/manifest" in x for x in run.outcomes()))
expect("a folder that is renamed when complete: complete or absent at every moment",
       all(complete(x) for x in run.at_any_moment()))
for name, without in (("a file's fsync", {"file": ", sync=False"}),
                      ("the inner folder's", {"inner": "", "manifest": ""})):
    run = Run(folder.format(**good | without))
    expect(f"a folder without {name}: incomplete under some seed", any(not complete(x) for x in run.outcomes()))
run = Run(folder.format(**good | {"outer": ""}))
expect("a folder without the outer fsync: not there under some seed",
       any("step/manifest" not in x for x in run.outcomes()))

run = Run('os.unlink("file")', 'save("file", OLD)')
expect("removed without fsync: there again under some seed", any(whole(x, contents=(OLD,)) for x in run.outcomes()) and
       any("file" not in x for x in run.outcomes()))
run = Run('os.unlink("file"); sync(".")', 'save("file", OLD)')
expect("removed with fsync: never there", all("file" not in x for x in run.outcomes()))
run = Run('os.unlink("a/b/file"); os.rmdir("a/b"); os.rmdir("a"); sync(".")',
          'os.makedirs("a/b"); save("a/b/file", OLD)')
expect("a tree removed: gone with the fsync above it", run.outcomes() == [{}])

run = Run('save("file", NEW, sync=False)', 'save("file", OLD)')
left = {x["file"] for x in run.outcomes()}
expect("truncated and written again without fsync: old, cut short and new all occur",
       {OLD, NEW} <= left and any(len(b) < len(NEW) and b != OLD for b in left))
run = Run('save("file", NEW, sync=False, flags=os.O_APPEND)', 'save("file", OLD)')
expect("appended without fsync: the old bytes stay", all(x["file"].startswith(OLD) for x in run.outcomes()))
run = Run('fd = os.open("file", os.O_RDWR); os.pwrite(fd, b"HEAD", 0); os.fsync(fd); os.pwrite(fd, b"tail", 2000); '
          'os.ftruncate(fd, 2500); os.lseek(fd, 2500, 0); os.writev(fd, [b"a", b"b"])', 'save("file", OLD)')
left = {x["file"] for x in run.outcomes()}
expect("written in place: what was synced stays, the rest may", all(b[:4] == b"HEAD" for b in left) and
       {len(b) for b in left} >= {2500, 2502, 2700} and any(b[2000:2004] == b"tail" for b in left), left)

names = 'for name in "abcdef": save(name, b"x")'
run = Run(names)
in_order = [dict.fromkeys("abcdef"[:n]).keys() for n in range(7)]
expect("a prefix of the changes of names", all(x.keys() in in_order for x in run.outcomes(None, "prefix")))
expect("a subset of them", any(x.keys() not in in_order for x in run.outcomes(None, "subset")))

children = """
for name in "abc":
    if os.fork() == 0:
        save(name, NEW)
        sync(".")
        os._exit(0)
for _ in "abc": os.wait()
"""
run = Run(children)
expect("three processes, each with its fsync: all there", all(all(whole(x, n) for n in "abc") for x in run.outcomes()))
expect("three processes: three logs", len(list(run.side.glob("*.jsonl"))) == 3)

run = Run("mkdir -p a/b && dd if=/dev/zero of=a/b/c bs=9 count=1 status=none && mv a/b/c d && "
          "dd if=d of=e conv=fsync status=none && rm -r a && sync .", shell=True)
expect("a shell's commands", run.code == 0 and all(x.keys() == {"d", "e"} for x in run.outcomes()), run.output)

errors = """
def error(action):
    try: action()
    except OSError as e: return e.errno
assert error(lambda: os.open("file", os.O_CREAT | os.O_EXCL)) == errno.EEXIST
assert error(lambda: os.write(os.open("file", os.O_RDONLY), b"x")) == errno.EBADF
assert error(lambda: os.mkdir("folder/none")) == errno.ENOENT
assert error(lambda: os.rename("none", "file")) == errno.ENOENT
assert error(lambda: os.rmdir("file")) == errno.ENOTDIR
"""
run = Run(errors, 'save("file", OLD)')
expect("operations that fail: the same errors, no effect", run.code == 0 and run.outcomes() == [{"file": OLD}],
       run.output)

run = Run('a, b = os.open("file", os.O_RDONLY), os.open("copy", os.O_CREAT | os.O_WRONLY); os.copy_file_range(a, b, 9)',
          'save("file", OLD)', explained=False)
expect("a write that the library does not see is found by check", run.unexplained == ["copy: other bytes"],
       run.output)

script = folder.format(**good)
total, killed = len(Run(script).logs.operations), 0
for at in range(1, total + 1):
    run = Run(script, CRASH_KILL_AT=str(at))
    killed += run.code == -9 and len(run.logs.operations) == at
    if not all(complete(x) for x in run.outcomes()):
        expect(f"killed at operation {at}", False)
expect(f"killed at each of {total} operations: complete or absent", killed == total, f"{killed} were killed")

run = Run(folder.format(**good | {"file": ", sync=False"}))
texts = {";".join(lose.cut(run.folder, run.logs, seed=seed)) for seed in range(SEEDS)}
expect("cut replaces the folder, and says what is lost",
       "" in texts and any("rank-0: other bytes" in text for text in texts), texts)
expect("the same seed leaves the same",
       lose.cut(run.folder, run.logs, seed=7) == lose.cut(run.folder, run.logs, seed=7) and
       lose.real(run.folder) == run.logs.state(run.logs.until()).left(None, None, random.Random(7)))
(run.folder / "another").write_text("")
for arguments in (["check"], ["list"], ["cut", "--seed", "3", "--at", "5"]):
    done = subprocess.run([sys.executable, lose.__file__, arguments[0], run.folder, run.side, *arguments[1:]],
                          capture_output=True, text=True)
    expect(f"lose.py {' '.join(arguments)}",
           done.returncode == (1 if arguments == ["check"] else 0) and done.stdout, done)
sys.exit(1 if failed else 0)
