"""The restart loop (08_3d_full/checkpoint/restart.py): its decisions with a stub for mpirun, then with the program.

Run: python3 tests/08_restart.py build/bin
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
import tempfile
import threading
import time

from restart_loop import BIN, LOOP, Loop, ROOT, unlike
from verdicts import exit_code, verdict


loop = Loop([{"code": 0, "out": "trained", "err": "a warning"}])
verdict("success at once", unlike("code", loop.code, 0), unlike("events", loop.kinds, ["start", "end"]),
        "" if "trained" in loop.out and "a warning" in loop.err else "the output is not passed on")

loop = Loop([{"code": 1, "steps": [1, 2], "checkpoints": [2]}, {"code": 1, "steps": [3]}, {"code": 0}])
verdict("two failures, then success", unlike("code", loop.code, 0), unlike("calls", len(loop.calls), 3),
        unlike("--resume", ["--resume" in call["words"] for call in loop.calls], [False, True, True]),
        unlike("events", loop.kinds, ["start", "failed", "wait"] * 2 + ["start", "end"]))

loop = Loop([{"code": 1, "steps": [31]}, {"code": 0}], folders=["d/step-20", "d/step-30", "d/step-40.suspect"])
verdict("started again: continues from the first attempt on, and says so", unlike("code", loop.code, 0),
        unlike("--resume", [call["words"].count("--resume") for call in loop.calls], [1, 1]),
        unlike("events", loop.kinds, ["continues", "start", "failed", "wait", "start", "end"]),
        unlike("step", loop.events[0].get("step"), 30),
        "" if "continues from d/step-30;" in loop.err else loop.err)
for given in (["--resume-from", "e/step-40"], ["--resume-from=e/step-40"]):
    loop = Loop([{"code": 1, "steps": [41]}, {"code": 1, "steps": [42], "checkpoints": [42]}, {"code": 0}], flags=given,
                folders=["e/step-40"])
    words = [call["words"] for call in loop.calls]
    verdict(f"{given[0]}: until there is a checkpoint, then --resume", unlike("code", loop.code, 0),
            unlike("--resume", ["--resume" in call for call in words], [False, False, True]),
            unlike("--resume-from", [any("e/step-40" in word for word in call) for call in words], [True, True, False]),
            unlike("end", words[-1][-2:], ["m.jsonl", "--resume"]))
loop = Loop([{"code": 0}], flags=["--resume-from", "d/step-40"], folders=["d/step-40", "d/step-60"])
verdict("started again with --resume-from: continues from the newest", unlike("code", loop.code, 0),
        unlike("--resume-from", loop.value(0, "--resume-from"), None),
        unlike("end", loop.calls[0]["words"][-1], "--resume"),
        "" if "continues from d/step-60, not --resume-from d/step-40" in loop.err else loop.err)

loop = Loop([{"code": 1, "steps": [1, 2, 3], "incomplete": [2, "3.tmp"]}, {"code": 0}])
verdict("no complete checkpoint: from the start, without --resume", unlike("code", loop.code, 0),
        unlike("--resume", ["--resume" in call["words"] for call in loop.calls], [False, False]))

loop = Loop([{"code": 1}], ["--max-failures", "4", "--backoff", "0.1", "--backoff-most", "0.3"])
waits = [event["seconds"] for event in loop.events if event["event"] == "wait"]
gaps = [b["time"] - a["time"] for a, b in zip(loop.calls, loop.calls[1:])]
verdict("gives up after M failures, with growing waits", unlike("code", loop.code, 1),
        unlike("calls", len(loop.calls), 4), unlike("last", loop.kinds[-1], "gave_up"),
        unlike("waits", waits, [0.1, 0.2, 0.3]),
        "" if all(gap >= wait for gap, wait in zip(gaps, waits)) else f"waited {gaps}")

progress = [{"code": 1, "steps": list(range(1, n + 1))} for n in range(1, 7)]
loop = Loop([*progress, {"code": 0}], ["--max-failures", "2"])
verdict("failures with progress between them do not add up", unlike("code", loop.code, 0),
        unlike("calls", len(loop.calls), 7))
loop = Loop([{"code": 1, "steps": [*range(1, 31)]}, {"code": 137, "steps": [*range(1, 61)]}, {"code": 0}])
text = "exit code 137 after step 60 (failure 1; gives up at 3 in a row without a new step)"
verdict("what a failure with new steps says", "" if text in loop.err else loop.err)
loop = Loop([{"code": 1, "steps": [1, 2, 3]}, {"code": 1, "steps": [1, 2]}, {"code": 1, "steps": [1, 2, 3]}])
verdict("the same steps again are no progress", unlike("code", loop.code, 1), unlike("calls", len(loop.calls), 3))
loop = Loop([{"code": 1, "steps": [1], "checkpoints": [5]}, {"code": 1}, {"code": 1}, {"code": 1}])
verdict("a checkpoint is progress", unlike("calls", len(loop.calls), 3), unlike(
    "failures", [event["failures"] for event in loop.events if event["event"] == "failed"], [1, 2, 3]))
loop = Loop([{"code": -9}, {"code": 0}])
verdict("a command that was killed is started again", unlike("code", loop.code, 0), unlike("calls", len(loop.calls), 2))

wrong = {"code": 2, "out": "tiny: 31.9k parameters", "err": "Warning: a host was added\nprogram: --pp 3: 2 ranks"}
loop = Loop([wrong])
verdict("a usage error is not retried, its line is shown", unlike("code", loop.code, 2),
        unlike("calls", len(loop.calls), 1), unlike("events", loop.kinds, ["start", "usage"]),
        unlike("message", loop.events[-1].get("message"), "program: --pp 3: 2 ranks"))
busy = {"code": 2, "err": "program: --checkpoint-dir d: another run is writing there (use another folder)"}
loop = Loop([busy, busy, {"code": 0}])
verdict("a folder that another run holds: tried again", unlike("code", loop.code, 0),
        unlike("calls", len(loop.calls), 3))
for step, code, last in ((8, 0, "end"), (9, 2, "usage")):
    loop = Loop([{"code": 1, "checkpoints": [step]},
                 {"code": 2, "err": f"program: d/step-{step}: is of step {step}, and --steps is 8 (try --steps 16)"}])
    verdict(f"step {step} of 8: exit code {code}", unlike("code", loop.code, code),
            unlike("last", loop.kinds[-1], last), "" if code or "restart: the run has finished: d/step-8 " in loop.err else loop.err)

# What a job prints and writes.
many = "9" * 5000
garbage = [{"out": "a: ranks 0 to 900000000"},
           {"out": "a: ranks 0 to 1", "bytes": [*range(256)] * 9, "raw": "[" * 100000 + '\n{"event": "step"}\n\udcff\n',
            "err": f"rank 7 has not responded for 3\nrank {many} has not responded for 3\n"
                   f"replicas differ after step 2; after step {many} they were equal",
            "events": [{"event": "step", "step": "2"}, {"event": "step", "step": float("nan")}, {"event": ["step"]},
                       {"step": 3}, 4, {"event": "hosts", "hosts": 7}, {"event": "replicas_differ", "equal": "1"}]},
           {"events": [{"event": "probe"}], "code": 3},
           {"events": [{"event": "probe", "slow": [{"rank": 1, "host": "a"}]}], "code": 3}]
loop = Loop([*({"code": 1} | each for each in garbage), {"code": 0}],
            ["--max-failures", "99", "--backoff-most", "0.01"], folders=["d/step-²", "d/step-2"])
verdict("garbage is printed and written: restarted", unlike("code", loop.code, 0),
        loop.err if "Traceback" in loop.err else "", unlike("events", loop.kinds, ["continues", *["start", "failed", "wait"] * len(garbage), "start", "end"]))
loop = Loop([{"code": 1}, {"code": 0}], ["--log", "/dev/full"])
said = "restart: --log /dev/full: No space left on device: goes on without it"
verdict("--log on a full disk: said once", unlike("code", loop.code, 0), unlike("said", loop.err.count(said), 1))
with open("/dev/full", "w") as full:
    done = subprocess.run([*LOOP, "--", "seq", "100000"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
verdict("stdout on a full disk: the command goes on", unlike("code", done.returncode, 0), unlike(
    "lines", len(done.stderr.splitlines()), 2))

with tempfile.TemporaryDirectory() as scratch:
    garbled = pathlib.Path(scratch, "hosts")
    garbled.write_bytes(bytes(range(256)))
    mpirun = ["--", "mpirun", "x", "--hostfile"]
    for words, part in ((["--max-failures", "2"], "no command"),
                        (["--max-failures", "0", "--", "true"], "--max-failures"),
                        (["--backoff", "nan", "--", "true"], "--backoff: nan: must be a number from 0"),
                        (["--backoff-most", "-5", "--", "true"], "--backoff-most: -5: must be a number from 0"),
                        (["--strikes", "1.5", "--", "true"], "--strikes: 1.5: must be an integer from 1"),
                        (["--log", scratch, "--", "true"], f"--log {scratch}: Is a directory"),
                        ([*mpirun, "/none", "-np", "2"], "--hostfile /none: No such file"),
                        ([*mpirun, str(garbled), "-np", "2"], f"--hostfile {garbled}: "),
                        (["--", "/no/program"], "cannot start")):
        done = subprocess.run([*LOOP, *words], capture_output=True, text=True)
        lines = [line for line in done.stderr.splitlines() if "attempt 1:" not in line]
        verdict(f"refused: {part}", unlike("code", done.returncode, 2),
                "" if len(lines) == 1 and part in lines[0] else done.stderr)

# ---- hosts ----
ALL, WITHOUT_B = "a slots=4\nb slots=4\nc slots=4\n", "a slots=4\nc slots=4\n"
HOSTS = "a slots=4\nb slots=4 # the second\n\nc slots=4\n"


loop = Loop([{"code": 1}, {"code": 0}], hosts=HOSTS, down=["b"])
verdict("a host that does not answer is replaced by the spare one", unlike("code", loop.code, 0),
        unlike("hosts", loop.calls[-1]["hosts"], WITHOUT_B), unlike("-np", loop.value(1, "-np"), "8"))
loop = Loop([{"code": 1}, {"code": 0}], flags=["--tp", "2", "--dp", "4", "--global-batch", "16"], hosts=HOSTS[:33],
            down=["a"])
verdict("without a spare one: half the data parallelism", unlike("code", loop.code, 0),
        unlike("hosts", loop.calls[-1]["hosts"], "b slots=4\n"), unlike("-np", loop.value(1, "-np"), "4"),
        unlike("--dp", loop.value(1, "--dp"), "2"), unlike("before", loop.value(0, "--dp"), "4"))
loop = Loop([{"code": 1}, {"code": 0}], flags=["--global-batch", "16", "--micro-batch", "2"],
            hosts="a slots=3\nb slots=3\nc slots=2\n", down=["a"])
verdict("the largest dp that divides the batch: 4 of 5 slots", unlike("-np", loop.value(1, "-np"), "4"),
        unlike("--dp", loop.value(1, "--dp"), None))
loop = Loop([{"code": 1}], flags=["--tp=8"], hosts=HOSTS[:33], down=["a"])
verdict("no layout fits", unlike("code", loop.code, 1), unlike("calls", len(loop.calls), 1),
        unlike("last", loop.kinds[-1], "gave_up"))
loop = Loop([{"code": 1}], hosts=HOSTS, down=["a", "b", "c"])
verdict("no host is left", unlike("code", loop.code, 1), unlike("calls", len(loop.calls), 1))

died = {"code": 137, "err": "mpirun noticed that process rank 5 with PID 0 on node b exited on signal 9 (Killed)."}
loop = Loop([died, died, {"code": 0}], hosts=HOSTS)
verdict("a host whose process dies twice is left out the second time",
        unlike("hosts", [call["hosts"] for call in loop.calls], [ALL, ALL, WITHOUT_B]))
timeout = "".join(f"rank {rank}: world.barrier #3 has not ended after 30 s (--comm-timeout): a rank of its group is "
                  "missing\n" for rank in range(7))
silent = {"code": 1, "err": timeout, "events": [{"event": "hosts", "hosts": ["a"] * 4 + ["b"] * 4}]}
loop = Loop([silent, {"code": 0}], ["--strikes", "1"], hosts=HOSTS)
verdict("the host of the only rank that reports nothing", unlike("hosts", loop.calls[-1]["hosts"], WITHOUT_B),
        unlike("suspect", [e["host"] for e in loop.events if e["event"] == "suspect"], ["b"]))
beat = silent | {"err": "rank 0: rank 6 has not responded for 30 s (--comm-timeout) while files are read or written"}
loop = Loop([beat, {"code": 0}], ["--strikes", "1"], hosts=HOSTS)
verdict("the host of a rank without a heartbeat", unlike("hosts", loop.calls[-1]["hosts"], WITHOUT_B))

slow = {"code": 3, "events": [{"event": "probe", "slow": [
    {"rank": 1, "host": "a", "what": "product, 384 x 384", "of_median": 0.5}]}]}
loop = Loop([{"code": 1}, slow, {"code": 1}, {"code": 0}], ["--probe-every", "1", "--max-failures", "9"], hosts=HOSTS)
verdict("a slow host is left out", unlike("hosts", loop.calls[-1]["hosts"], "b slots=4\nc slots=4\n"))
printed = {"code": 3, "out": "slow: rank 1 on a has 50% of the median product, 384 x 384, rank 5 on b has 60% of the "
           "median tp, shift over 2"}
loop = Loop([printed, {"code": 0}], hosts=HOSTS + "e slots=4\n", metrics=False)
verdict("slow hosts without --metrics", unlike("hosts", loop.calls[-1]["hosts"], "c slots=4\ne slots=4\n"), unlike(
    "why", [e["why"] for e in loop.events if e["event"] == "suspect"],
    ["slow: rank 1, product, 384 x 384, 50% of the median", "slow: rank 5, tp, shift over 2, 60% of the median"]))
loop = Loop([{"code": 1}, slow, {"code": 0}], ["--probe-every", "1"], flags=["--tp", "8"], hosts=HOSTS[:33])
verdict("a slow host that nothing replaces stays, and is not probed again", unlike("code", loop.code, 0),
        unlike("--probe", [loop.value(i, "--probe") for i in range(3)], [None, "strict", None]),
        unlike("hosts", loop.calls[-1]["hosts"], "a slots=4\nb slots=4\n"))
loop = Loop([{"code": 1}] * 7, ["--probe-every", "3", "--max-failures", "7"], flags=["--probe", "on"])
verdict("the probe at every third restart", unlike("--probe", [loop.value(i, "--probe") for i in range(7)],
                                                   ["on", "on", "on", "strict", "on", "on", "strict"]))


hosts = {"event": "hosts", "hosts": ["a"] * 4 + ["b"] * 4}
differ = {"code": 1, "checkpoints": [10, 20, 30],
          "events": [hosts, {"event": "replicas_differ", "step": 31, "equal": 19}],
          "err": "rank 0: --replica-check: after step 31: the weight of x differs on ranks 5 and 6 from ranks 0 and 1; "
                 "resume from the newest checkpoint before step 20"}
printed = {key: differ[key] for key in ("code", "checkpoints", "err")} | {
    "out": "vm: ranks\na: ranks 0 to 3, b: ranks 4 to 7\n" + "step\n" * 30000 +
           "replicas differ after step 31; after step 19 they were equal"}
for name, plan, metrics in (("--metrics", differ, True), ("no --metrics", printed, False)):
    loop = Loop([plan, {"code": 0}], ["--strikes", "1"], hosts=HOSTS, metrics=metrics)
    verdict(f"replicas that differ, {name}: later checkpoints are set aside, the host is named",
            unlike("code", loop.code, 0), unlike("checkpoints", sorted(path.name for path in (loop.at / "d").iterdir()),
                                                 ["step-10", "step-20.suspect", "step-30.suspect"]),
            unlike("hosts", loop.calls[-1]["hosts"], WITHOUT_B),
            "" if "--resume" in loop.calls[1]["words"] else "no --resume")
again = {key: printed[key] for key in ("code", "err", "out")} | {"checkpoints": [20, 30]}
loop = Loop([printed, again, again, {"code": 0}], ["--max-failures", "9"], hosts=HOSTS, metrics=False)
verdict("a checkpoint is set aside again: under a free name", unlike("code", loop.code, 0), unlike(
    "checkpoints", sorted(path.name for path in (loop.at / "d").iterdir()),
    ["step-10", *(f"step-{step}.suspect{end}" for step in (20, 30) for end in ("", "-2", "-3"))]),
    unlike("steps", [event["step"] for event in loop.events if event["event"] == "failed"], [30, 30, 30]))
only = {key: printed[key] for key in ("code", "err", "out")} | {"checkpoints": [20]}
loop = Loop([only, {"code": 1}, {"code": 0}], metrics=False, folders=["d/step-20.suspect"])
verdict("nothing but suspect checkpoints: from the start", unlike("code", loop.code, 0),
        unlike("--resume", ["--resume" in call["words"] for call in loop.calls], [False, False, False]),
        unlike("checkpoints", sorted(path.name for path in (loop.at / "d").iterdir()),
               ["step-20.suspect", "step-20.suspect-2"]))


# ---- signals ----
def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def send(*numbers):
    def during(loop):
        for _ in range(200):
            if (loop.at / "ready").exists():
                break
            time.sleep(0.05)
        for number in numbers:
            loop.process.send_signal(number)
            time.sleep(0.2)
    return during


for number, code in ((signal.SIGUSR1, 0), (signal.SIGTERM, 143), (signal.SIGINT, 130)):
    loop = Loop([{"hang": "ends", "code": code}], during=send(number))
    pids = (loop.at / "pids").read_text().split()
    verdict(f"{number.name} is passed on, and ends the loop", unlike("code", loop.code, code),
            unlike("calls", len(loop.calls), 1),
            unlike("got", (loop.at / "signals").read_text().split(), [number.name]),
            unlike("signal", loop.events[-1].get("signal"), number.name),
            *(f"process {pid} is left" for pid in pids if alive(pid)))
loop = Loop([{"hang": "never"}], ["--grace", "1"], during=send(signal.SIGUSR1, signal.SIGTERM))
verdict("a command that ignores SIGTERM is killed after --grace", unlike("code", loop.code, 128 + signal.SIGKILL),
        unlike("got", (loop.at / "signals").read_text().split(), ["SIGUSR1", "SIGTERM"]),
        *(f"process {pid} is left" for pid in (loop.at / "pids").read_text().split() if alive(pid)))
loop = Loop([{"hang": "ends"}], during=send(signal.SIGKILL))
pids = [int(pid) for pid in (loop.at / "pids").read_text().split()]
until = time.monotonic() + 10
while alive(pids[0]) and time.monotonic() < until:
    time.sleep(0.05)
verdict("a loop that is killed ends its command", f"process {pids[0]} is left" if alive(pids[0]) else "",
        unlike("got", loop.at.joinpath("signals").exists() and (loop.at / "signals").read_text().split(), ["SIGTERM"]))
for pid in filter(alive, pids):
    os.kill(pid, signal.SIGKILL)


def while_waiting(loop):
    for _ in range(200):
        if (loop.at / "log.jsonl").exists() and '"wait"' in (loop.at / "log.jsonl").read_text():
            break
        time.sleep(0.05)
    loop.process.send_signal(signal.SIGTERM)


began = time.monotonic()
loop = Loop([{"code": 1}], ["--backoff", "1000", "--backoff-most", "1000"], during=while_waiting)
verdict("SIGTERM between two attempts ends the loop", unlike("code", loop.code, 1), unlike("calls", len(loop.calls), 1),
        "" if time.monotonic() - began < 20 else "took too long")

# ---- with the program ----
SHAPE = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8".split()


def losses(path):
    """{step: the losses that the run, resumed or not, printed for it}."""
    found = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            found.setdefault(event["step"], set()).add(event["loss"])
    return found


def program(folder, words, *loop, ranks="4"):
    os.environ["OMP_NUM_THREADS"] = "1"
    command = [*loop, "mpirun", "--oversubscribe", "-np", ranks, str(BIN / "08_3d_full"), *SHAPE, "--steps", "40",
               *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    done = program(folder, ["--metrics", "plain.jsonl"])
    verdict("a run without a failure", unlike("code", done.returncode, 0), done.stderr[:500])
    plain = losses(folder / "plain.jsonl")
    for fault in ("kill:1:31", "hang:2:31", "nan:0:31", "bitflip:3:31"):
        words = ["--checkpoint-dir", f"d-{fault[:3]}", "--checkpoint-every", "1", "--metrics", "m.jsonl",
                 "--inject", fault, "--comm-timeout", "3", "--replica-check", "1"]
        done = program(folder, words, *LOOP, "--backoff", "0.1", "--log", f"{fault[:3]}.jsonl", "--")
        events = [json.loads(line) for line in (folder / f"{fault[:3]}.jsonl").read_text().splitlines()]
        resumed = "--resume" in events[-2].get("command", [])
        verdict(f"the program with {fault}: restarted once, resumed, every loss that of a run without it",
                unlike("code", done.returncode, 0), "" if losses(folder / "m.jsonl") == plain else "other losses",
                unlike("events", [event["event"] for event in events if event["event"] in ("start", "failed", "end")],
                       ["start", "failed", "start", "end"]), "" if resumed else "not resumed",
                done.stderr[-1500:] if done.returncode else "")
    # How many of the checkpoints are complete by then depends on the disk.
    words = "--checkpoint-dir d --checkpoint-every 1 --keep 40 --inject bitflip:3:31 --replica-check 10"
    done = program(folder, words.split(), *LOOP, "--backoff", "0.1", "--log", "out.jsonl", "--")
    events = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    aside = [int(event["checkpoint"].rsplit("-", 1)[1]) for event in events if event["event"] == "set_aside"]
    resumed = [int(step) for step in re.findall(r"^resumes d/step-(\d+):", done.stdout, re.M)]
    loss = re.findall(r"^step +40/40 +loss (\S+)", done.stdout, re.M)
    host = [event["host"] for event in events if event["event"] == "suspect"]
    verdict("the program with a flipped bit, without --metrics: resumed from before it",
            unlike("code", done.returncode, 0), "" if min(aside, default=30) > 29 else f"set aside: {aside}",
            unlike("attempts", [event["event"] for event in events].count("start"), 2),
            "" if max(resumed, default=0) <= 29 else f"resumed: {resumed}",
            unlike("suspect", host, [socket.gethostname()]),
            unlike("last loss", loss[-1:], [f"{min(plain[40]):.4f}"]), done.stderr[-1500:] if done.returncode else "")

    # Two words of the program that the loop knows: it waits 5 s for the lock.
    (folder / "e").mkdir()
    lock = open(folder / "e/.lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    log = folder / "e.jsonl"

    def release():
        for _ in range(600):
            if log.exists() and '"failed"' in log.read_text():
                break
            time.sleep(0.1)
        lock.close()

    threading.Thread(target=release).start()
    for name, kinds in (("a folder that another run holds: tried again", ["start", "failed", "wait", "start", "end"]),
                        ("the program has finished: exit code 0", ["continues", "start", "end"])):
        log.unlink(missing_ok=True)
        done = program(folder, ["--checkpoint-dir", "e"], *LOOP, "--backoff", "0.1", "--log", "e.jsonl", "--",
                       ranks="1")
        events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
        verdict(name, unlike("code", done.returncode, 0), unlike("events", events, kinds),
                done.stderr[-1500:] if done.returncode else "")

# ---- the job script of docs/cluster.md ----
finds = re.findall(r"^latest=.*$", (ROOT / "docs" / "cluster.md").read_text(), re.M)
for found, folders in (("", ["step-16.suspect", "step-16.suspect-2", "step-20.tmp", "weights-8"]),
                       ("--resume", ["step-16.suspect", "step-12"])):
    with tempfile.TemporaryDirectory(suffix=".tmp") as scratch:  # whatever the folder's own name is
        for name in folders:
            pathlib.Path(scratch, "d", name).mkdir(parents=True)
            pathlib.Path(scratch, "d", name, "manifest.json").write_text("{}")
        done = subprocess.run(["bash", "-c", f"{''.join(finds)}\necho ${{latest:+--resume}}"], capture_output=True,
                              text=True, env=dict(os.environ, RUN=f"{scratch}/d"))
        verdict(f"the job script with {' '.join(folders)}: {found or 'from the start'}",
                unlike("flag", done.stdout.strip(), found), done.stderr)
sys.exit(exit_code())
