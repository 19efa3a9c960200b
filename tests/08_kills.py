"""Checkpoints against power cuts and SIGKILL (tests/crash): whatever a cut leaves, the newest folder step-N with a
manifest is complete and no older than the last that the run had committed, and --resume reproduces the uninterrupted
run's losses.

1. Recorded: one run under the log. A cut at any moment of it, under many seeds: checked without running anything; some
   of them are then resumed. The same with one kind of fsync taken out of the log, as if the program left it out: each
   must be missed.
2. Killed: all ranks are killed at a random moment, or one rank instead of its n-th operation; then a cut, and --resume.

Run: python3 tests/08_kills.py build/bin build/tests/libcrash_log.so
An eighth per commit; all with TRAIN70B_TEST_SLICE=all.
"""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).parent / "crash"))
import lose  # noqa: E402
from verdicts import exit_code, verdict  # noqa: E402

BIN, LIBRARY = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
SLICE = os.environ.get("TRAIN70B_TEST_SLICE", "0")
ALL = SLICE == "all"
SEED = 0 if ALL else int(SLICE) % 8 + 1
STEPS = 24
SHAPE = ("--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8 "
         f"--steps {STEPS} --checkpoint-dir run/d --checkpoint-every 1 --metrics m.jsonl").split()
LAYOUTS = ([], ["--tp", "2", "--zero", "1"], ["--pp", "2", "--zero", "3"], ["--zero", "2", "--keep", "1"])


class Place:
    """A folder with run/ (watched: the checkpoints' folder is created in it) and logs/."""

    def __init__(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.at = pathlib.Path(self.scratch.name)
        self.run = self.at / "run"
        self.run.mkdir()

    def command(self, flags, log=None):
        watched = []
        if log:
            lose.start(self.run, log)
            watched = ["-x", f"LD_PRELOAD={LIBRARY}", "-x", f"CRASH_FOLDER={self.run}", "-x", f"CRASH_LOG={log}"]
        for name in os.environ:
            if log and name.startswith("CRASH_KILL"):
                watched += ["-x", name]
        return ["mpirun", "--oversubscribe", "-np", "4", *watched, str(BIN / "08_3d_full"), *SHAPE, *flags]

    def train(self, flags, log=None):
        done = subprocess.run(self.command(flags, log), cwd=self.at, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr

    def losses(self):
        """{step: loss} of the last run in m.jsonl; the line that a kill cut short is left out."""
        found = {}
        for line in (self.at / "m.jsonl").read_text().splitlines():
            if '"event":"step"' in line and line.endswith("}"):
                event = json.loads(line)
                found[event["step"]] = event["loss"]
        return found


def complete(left):
    """({step: problem or ""} of every step-N with a manifest) in {path: content}."""
    found = {}
    for path in left:
        parts = path.split("/")
        if len(parts) != 3 or parts[0] != "d" or not parts[1].startswith("step-") or parts[2] != "manifest.json":
            continue
        if not parts[1][5:].isdigit():
            continue
        step, problem = int(parts[1][5:]), ""
        try:
            manifest = json.loads(left[path])
            if manifest["step"] != step or len(manifest["files"]) != 4:
                problem = f"step-{step}: another manifest"
            for file in manifest["files"]:
                data = left.get(f"d/step-{step}/{file['name']}")
                if data is None or len(data) != file["bytes"] or zlib.crc32(data) != file["crc32"]:
                    problem = f"step-{step}: {file['name']} is missing or damaged"
        except (ValueError, KeyError, TypeError) as error:
            problem = f"step-{step}: manifest {error!r}"
        found[step] = problem
    return found


def commits(logs):
    """[(time, step)]: from this time on step-N is on the disk: after its folder's rename an fsync has ended."""
    waiting, found = [], []
    for o in logs.until():
        if o["op"] == "rename" and o["result"] == 0 and o["to"][1].startswith("step-") and o["to"][1][5:].isdigit():
            waiting.append((o["end"], int(o["to"][1][5:]), o["to"][0]))
        if o["op"] == "fsync" and o["result"] == 0:
            for entry in [entry for entry in waiting if entry[2] == o["inode"] and entry[0] <= o["begin"]]:
                found.append((o["end"], entry[1]))
                waiting.remove(entry)
    return found


def fsyncs(logs):
    """{what: the fsyncs of it}."""
    names, found = {}, {}  # of files and folders, by inode; a file's or a folder's creation is logged before its fsync
    for o in logs.until():
        if o["op"] in ("open", "mkdir") and o.get("made"):
            names[o["made"]] = o["name"][1]
        if o["op"] == "fsync" and o["result"] == 0:
            name = names.get(o["inode"], "run")
            what = ("the ranks' files" if name.startswith("rank-") else "the manifest" if name == "manifest.json" else
                    "a checkpoint's folder" if name.startswith("step-") else
                    "--checkpoint-dir" if name == "d" else "the folder above it")
            found.setdefault(what, []).append((o["process"], o["begin"]))
    return found


def cuts(logs, pick, count, committed):
    """Problems of `count` cuts at random moments under random seeds, and the newest checkpoints that were left."""
    problems, newest_seen = [], set()
    for _ in range(count):
        moment, seed = pick.randrange(len(logs.moments)), pick.randrange(1 << 30)
        left = logs.state(logs.until(moment)).left(None, None, random.Random(seed))
        found = complete(left)
        newest = max(found, default=0)
        newest_seen.add(newest)
        last = max((step for time, step in committed if time <= logs.moments[moment]), default=0)
        if newest < last:
            problems.append(f"moment {moment}, seed {seed}: step-{last} was committed, step-{newest} is the newest")
        if newest and found[newest]:  # older ones may be half removed
            problems.append(f"moment {moment}, seed {seed}: {found[newest]}")
    return problems, newest_seen


def resumes(place, flags, plain):
    """Problems of going on from what is in the folder."""
    left = lose.real(place.run)
    newest = max(complete(left), default=0)
    if newest == STEPS:
        return ""
    code, error = place.train([*flags, "--resume"])
    if newest == 0:
        if code != 2 or "has no complete checkpoint" not in error:
            return f"no checkpoint: exit code {code}: {error[:300]}"
        code, error = place.train(flags)
    if code != 0:
        return f"step-{newest}: exit code {code}: {error[:400]}"
    found = {step: loss for step, loss in place.losses().items() if step > newest}
    wanted = {step: loss for step, loss in plain.items() if step > newest}
    return "" if found == wanted else f"step-{newest}: other losses: {found}, not {wanted}"


def kill_all(process):
    """SIGKILL to mpirun's descendants, then to mpirun: all started here."""
    family, queue = [], [process.pid]
    while queue:
        pid = queue.pop()
        try:
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                queue += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            pass
        family.append(pid)
    for pid in reversed(family):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    process.communicate()


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    plain = {}
    for number, flags in enumerate(LAYOUTS):
        if not ALL and number not in (SEED % len(LAYOUTS),):
            continue
        pick, name = random.Random(100 * SEED + number), " ".join(flags) or "--zero 0"
        place = Place()
        code, error = place.train(flags, place.at / "logs")
        plain[number] = place.losses()
        logs = lose.Logs(place.at / "logs")
        verdict(f"{name}: a run of {STEPS} steps, {len(commits(logs))} checkpoints", error[:500] if code else "",
                "" if len(plain[number]) == STEPS and len(commits(logs)) >= 2 else "too few steps or checkpoints",
                *lose.check(place.run, logs))
        problems, newest = cuts(logs, pick, 3000 if ALL else 400, commits(logs))
        verdict(f"{name}: cuts at any moment: the newest checkpoint is complete, and no older than the last commit",
                *problems, "" if len(newest) > 2 else f"only {newest}")
        for what, entries in fsyncs(logs).items():
            without = lose.Logs(place.at / "logs")
            without.operations = [o for o in without.operations if (o["process"], o["begin"]) not in entries]
            problems, _ = cuts(without, pick, 400, commits(logs))
            verdict(f"{name}: without the fsync of {what} a cut does damage", "" if problems else "none was found")
        verdict(f"{name}: the fsyncs", "" if len(fsyncs(logs)) == 5 else f"only {list(fsyncs(logs))}")

        found = []
        for _ in range(5 if ALL else 2):
            moment, seed = pick.randrange(len(logs.moments)), pick.randrange(1 << 30)
            lose.cut(place.run, logs, moment, seed)
            found.append(resumes(place, flags, plain[number]))
        verdict(f"{name}: recorded, cut, resumed", *found)

        found, moments = [], set()
        wanted = 10 if ALL else 3
        for kill in range(4 * wanted):
            if kill >= wanted and len(moments) > 1:  # on a slow machine checkpoints are few, and so are moments
                break
            place, log = Place(), None
            log = place.at / "logs"
            by_operation = kill % 2 == 1
            if by_operation:  # rank 0's, which also commits
                processes = [operation["process"] for operation in logs.operations]
                total = max(processes.count(process) for process in set(processes))
                os.environ["CRASH_KILL_AT"], os.environ["CRASH_KILL_RANK"] = str(pick.randrange(1, total)), "0"
            process = subprocess.Popen(place.command(flags, log), cwd=place.at, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, start_new_session=True)
            if by_operation:
                process.communicate(timeout=60)
                del os.environ["CRASH_KILL_AT"], os.environ["CRASH_KILL_RANK"]
            else:
                enough = pick.randrange(1, len(logs.operations))  # begun by all ranks together
                until = time.monotonic() + 60
                while process.poll() is None and time.monotonic() < until:
                    if sum(path.read_text().count('"begin"') for path in log.glob("*.jsonl")) >= enough:
                        break
                    time.sleep(0.002)
                kill_all(process)
            killed = lose.Logs(log)
            if not killed.operations:
                found.append(f"kill {kill}: no operation was logged")
                continue
            moments.add(len(killed.operations))
            found += [f"kill {kill}: {text}" for text in lose.check(place.run, killed)]
            if kill % 3 != 2:  # else what a kill alone leaves
                lose.cut(place.run, killed, None, pick.randrange(1 << 30))
            found.append(resumes(place, flags, plain[number]))
        verdict(f"{name}: killed, cut, resumed", *found, "" if len(moments) > 1 else "always the same moment")
    sys.exit(exit_code())


main()
