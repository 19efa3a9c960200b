#!/usr/bin/env python3
"""What a power cut may leave of a folder, from the logs of the processes that wrote to it (log.cpp).

    lose.py start FOLDER LOGS                 copies the folder as it is; all of that is on the disk
    LD_PRELOAD=libcrash_log.so CRASH_FOLDER=FOLDER CRASH_LOG=LOGS program ...
    lose.py check FOLDER LOGS                 exit code 1 unless the logs explain every byte of the folder
    lose.py list FOLDER LOGS                  the moments: before and after every operation, numbered
    lose.py cut FOLDER LOGS [--at MOMENT] [--seed S] [--names HOW] [--data HOW]
                                              replaces the folder by what a cut at this moment (default: the last) may
                                              leave

The rules are those of POSIX, which promises nothing but fsync:
  - A byte is on the disk if a later fsync of its file has completed. Of other writes, --data: keep (all are there),
    drop (none), prefix (the first ones, the last of them torn), zeros or garbage (the length is there, the bytes are
    not); default: one of these for each file, by the seed.
  - A name (created, renamed, removed) is on the disk if a later fsync of its folder has completed. Of other changes,
    --names: all, none, prefix (a journal's: the first ones in time), subset (any of them); default: by the seed.
  - A rename is atomic. An operation that the cut interrupted counts as a change that no fsync covers.
"""
import argparse
import itertools
import json
import pathlib
import random
import shutil
import sys

NAMES, DATA = ("all", "none", "prefix", "subset"), ("keep", "drop", "prefix", "zeros", "garbage")
START, COPY = "start.json", "start"
NEVER = float("inf")


class File:
    def __init__(self, content=b""):
        self.start = content
        self.changes = []  # {"write": bytes or "truncate": size, "at", "end", "durable"}

    def content(self, how, pick):
        """The bytes that are left; pick: a random.Random."""
        pending = [change for change in self.changes if not change["durable"]]
        kept = pick.randrange(len(pending) + 1) if pending else 0
        data = bytearray(self.start)
        seen = 0
        for change in self.changes:
            new = change.get("write")
            if not change["durable"]:
                seen += 1
                if how == "drop" or how == "prefix" and seen > kept:
                    continue
                if new is not None and how == "prefix" and seen == kept:
                    new = new[:pick.randrange(len(new) + 1)]
                elif new is not None and how == "zeros":
                    new = bytes(len(new))
                elif new is not None and how == "garbage":
                    new = pick.randbytes(len(new))
            if new is None:
                size = change["truncate"]
                data = data[:size] + bytes(max(0, size - len(data)))
            else:
                at = change["at"]
                data += bytes(max(0, at - len(data)))
                data[at:at + len(new)] = new
        return bytes(data)


class Folder:
    def __init__(self):
        self.gone = False  # removed; its inode may be another's by now
        self.start = {}
        self.now = {}  # as the processes saw it
        self.changes = []  # {"name", "to": File, Folder or None, "operation", "end", "durable"}

    def change(self, name, to, operation):
        self.changes.append({"name": name, "to": to, "operation": operation["order"], "end": operation["end"],
                             "durable": False})
        old = self.now.pop(name, None)
        if isinstance(old, Folder) and to is None and operation["op"] == "unlink":
            old.gone = True
        if to is not None:
            self.now[name] = to


def start(folder, logs):
    folder, logs = pathlib.Path(folder), pathlib.Path(logs)
    logs.mkdir(parents=True, exist_ok=True)
    inodes = {"": folder.stat().st_ino}
    for path in folder.rglob("*"):
        inodes[str(path.relative_to(folder))] = path.stat().st_ino
    for old in logs.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(folder, logs / COPY)
    (logs / START).write_text(json.dumps(inodes))


class Logs:
    def __init__(self, logs):
        self.logs = pathlib.Path(logs)
        self.operations = []
        for path in sorted(self.logs.glob("*.jsonl")):
            data = path.with_suffix(".data").read_bytes()
            begun = {}
            for line in path.read_text().split("\n")[:-1]:  # what a killed process left of a line has no end
                entry = json.loads(line)
                if "begin" in entry:
                    begun[entry["begin"]] = entry
                    entry["begin"], entry["end"], entry["result"] = entry.pop("t"), NEVER, None
                    if "bytes" in entry:
                        entry["write"] = data[entry["data"]:entry["data"] + entry["bytes"]]
                    entry["process"] = path.stem
                    self.operations.append(entry)
                else:
                    done = begun[entry["end"]]
                    done["end"], done["result"] = entry["t"], entry["result"]
                    done["made"] = entry.get("inode")
        times = {operation["begin"] for operation in self.operations}
        self.moments = sorted(times | {o["end"] for o in self.operations if o["end"] != NEVER})

    def until(self, moment=None):
        """The operations of a cut right after a moment (a number of `moments`), in order."""
        time = NEVER if moment is None else self.moments[moment]
        kept = []
        for operation in self.operations:
            if operation["begin"] > time or operation["result"] == -1:  # later, or without any effect
                continue
            operation = dict(operation)
            if operation["end"] > time:
                operation["end"], operation["result"] = NEVER, None
            kept.append(operation)
        kept.sort(key=lambda o: (o["end"], o["begin"]))
        for order, operation in enumerate(kept):
            operation["order"] = order
        return kept

    def state(self, operations):
        return State(self.logs, operations)


class State:
    def __init__(self, logs, operations):
        inodes = json.loads((logs / START).read_text())
        self.root, self.objects = Folder(), {}
        for path, inode in sorted(inodes.items()):
            copied = logs / COPY / path
            thing = self.root if path == "" else Folder() if copied.is_dir() else File(copied.read_bytes())
            self.objects[inode] = thing
            if path:
                parent = self.walk(str(pathlib.PurePosixPath(path).parent).removeprefix("."))
                parent.start[copied.name] = parent.now[copied.name] = thing
        # In the order of their ends. But what a process did in a folder may have ended before the end of another's
        # mkdir was noted: then the mkdir is taken first.
        self.mkdirs = [operation for operation in operations
                       if operation["op"] == "mkdir" and (operation["result"] is None or operation["result"] >= 0)]
        for operation in operations:
            if operation["result"] is None or operation["result"] >= 0:
                getattr(self, operation["op"])(operation)

    def walk(self, path):
        at = self.root
        for part in filter(None, path.split("/")):
            at = at.now[part]
        return at

    def folder(self, name):
        """Of a name in the logs: [inode, name, path of the folder]."""
        found = self.objects.get(name[0])
        if isinstance(found, Folder) and not found.gone:
            return found
        for operation in self.mkdirs:
            path = f"{operation['name'][2]}/{operation['name'][1]}"
            if operation.get("made") == name[0] or not operation.get("made") and path == name[2]:
                self.mkdir(operation)
                break
        found = self.objects.get(name[0])
        if not isinstance(found, Folder) or found.gone:  # of a mkdir whose end was not logged
            found = self.objects[name[0]] = self.walk(name[2])
        return found

    def made(self, operation, thing):
        if operation.get("made"):
            self.objects[operation["made"]] = thing
        self.folder(operation["name"]).change(operation["name"][1], thing, operation)

    def open(self, operation):
        file = self.folder(operation["name"]).now.get(operation["name"][1])
        known = self.objects.get(operation.get("made"))
        another = known is not file if known is not None else bool(operation.get("made"))
        if not isinstance(file, File) or another:
            self.made(operation, File())
        elif operation["truncate"]:
            file.changes.append({"truncate": 0, "end": operation["end"], "durable": False})

    def write(self, operation):
        done = operation["result"]
        self.objects[operation["inode"]].changes.append(
            {"write": operation["write"][:done], "at": operation["at"], "end": operation["end"], "durable": False})

    def truncate(self, operation):
        self.objects[operation["inode"]].changes.append(
            {"truncate": operation["size"], "end": operation["end"], "durable": False})

    def fsync(self, operation):
        if operation["result"] is None:
            return
        for change in self.objects[operation["inode"]].changes:
            if change["end"] <= operation["begin"]:
                change["durable"] = True

    def mkdir(self, operation):
        if operation in self.mkdirs:
            self.mkdirs.remove(operation)
            self.made(operation, Folder())

    def unlink(self, operation):
        removed = self.folder(operation["name"]).now.get(operation["name"][1])
        if isinstance(removed, Folder) and removed.now:
            return  # not ended: a folder that is not empty stays
        self.folder(operation["name"]).change(operation["name"][1], None, operation)

    def rename(self, operation):
        if "name" not in operation or "to" not in operation:
            raise SystemExit(f"lose.py: a rename between the folder and elsewhere cannot be undone: {operation}")
        folder, to = self.folder(operation["name"]), self.folder(operation["to"])
        thing = folder.now.get(operation["name"][1])
        if thing is None:
            return  # not ended, and another process was first
        folder.change(operation["name"][1], None, operation)
        to.change(operation["to"][1], thing, operation)

    # ---- what is left ----

    def all_folders(self):
        seen, queue = {}, [self.root]
        while queue:
            folder = queue.pop()
            if id(folder) in seen:
                continue
            seen[id(folder)] = folder
            things = itertools.chain(folder.start.values(), (change["to"] for change in folder.changes))
            queue += [thing for thing in things if isinstance(thing, Folder)]
        return seen.values()

    def left(self, names="all", data="keep", pick=None):
        """{path: bytes, or None for a folder}; names, data: None is by chance."""
        pick = pick or random.Random(0)
        names = names or pick.choice(NAMES)
        pending = sorted({change["operation"] for folder in self.all_folders() for change in folder.changes
                          if not change["durable"]})
        share = pick.choice((0.2, 0.5, 0.8))
        kept = {"all": pending, "none": [], "prefix": pending[:pick.randrange(len(pending) + 1)],
                "subset": [operation for operation in pending if pick.random() < share]}[names]
        kept = set(kept)
        found = {}

        def visit(folder, path, above):
            entries = dict(folder.start)
            for change in folder.changes:
                if change["durable"] or change["operation"] in kept:
                    entries.pop(change["name"], None)
                    if change["to"] is not None:
                        entries[change["name"]] = change["to"]
            for name, thing in sorted(entries.items()):
                if isinstance(thing, File):
                    found[path + name] = thing.content(data or pick.choice(DATA), pick)
                elif thing not in above:  # a folder that would hold itself is lost
                    found[path + name] = None
                    visit(thing, path + name + "/", above + [thing])

        visit(self.root, "", [self.root])
        return found


def real(folder):
    folder = pathlib.Path(folder)
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def replace(folder, left):
    folder = pathlib.Path(folder)
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for path, content in sorted(left.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def differences(a, b):
    for path in sorted(a.keys() | b.keys()):
        if path not in a or path not in b:
            yield f"{path}: {'only in the logs' if path in a else 'not in the logs'}"
        elif a[path] != b[path]:
            yield f"{path}: {'other bytes' if a[path] is not None and b[path] is not None else 'a file and a folder'}"


def effects(operation):
    """What an operation that did not end may have done: all of it, nothing, or a write up to the end of a page."""
    yield operation
    yield None
    if operation["op"] == "write":
        for count in range(4096 - operation["at"] % 4096, len(operation["write"]), 4096):
            yield operation | {"write": operation["write"][:count]}


def check(folder, logs):
    """Differences between the folder and the logs, empty if the logs explain it."""
    operations = logs.until()
    ended = [operation for operation in operations if operation["end"] != NEVER]
    open_ones = [operation for operation in operations if operation["end"] == NEVER]
    there, first = real(folder), None
    for done in itertools.islice(itertools.product(*map(effects, open_ones)), 10000):
        try:
            state = logs.state(ended + [operation for operation in done if operation])
        except KeyError:  # what others did in a folder shows that its mkdir took place
            continue
        found = list(differences(state.left(), there))
        if not found:
            return []
        first = first or found
    return first


def lost(logs, state, left):
    return [text.replace("only in the logs", "lost").replace("not in the logs", "is there again")
            for text in differences(state.left(), left)]


def cut(folder, logs, moment=None, seed=0, names=None, data=None):
    """Replaces the folder; returns what is lost, as text."""
    state = logs.state(logs.until(moment))
    left = state.left(names, data, random.Random(seed))
    replace(folder, left)
    return lost(logs, state, left)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "check", "list", "cut"))
    parser.add_argument("folder")
    parser.add_argument("logs")
    parser.add_argument("--at", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", choices=NAMES)
    parser.add_argument("--data", choices=DATA)
    args = parser.parse_args()
    if args.action == "start":
        return start(args.folder, args.logs)
    logs = Logs(args.logs)
    if args.action == "check":
        found = check(args.folder, logs)
        print(*found, sep="\n", end="\n" if found else "")
        sys.exit(1 if found else 0)
    if args.action == "list":
        for number, moment in enumerate(logs.moments):
            for o in logs.operations:
                if moment in (o["begin"], o["end"]):
                    what = f"{o['op']} {o.get('name', ['', '', ''])[1]} {o.get('to', ['', '', ''])[1]}".strip()
                    print(f"{number:6} {'begins' if moment == o['begin'] else 'ends  '} {o['process']} {what}")
        return None
    found = cut(args.folder, logs, args.at, args.seed, args.names, args.data)
    print(f"seed {args.seed}:", "; ".join(found) or "nothing is lost")


if __name__ == "__main__":
    main()
