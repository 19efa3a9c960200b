#!/usr/bin/env python3
"""In the place of mpirun (test_restart.py): does what the next entry of plan.json says, and records its call."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

words = sys.argv[1:]
calls = pathlib.Path("calls.jsonl")
number = len(calls.read_text().splitlines()) if calls.exists() else 0
plan = json.loads(pathlib.Path("plan.json").read_text())
do = plan[min(number, len(plan) - 1)]
hosts = pathlib.Path(words[words.index("--hostfile") + 1]).read_text() if "--hostfile" in words else ""
with calls.open("a") as file:
    file.write(json.dumps({"words": words, "time": time.time(), "hosts": hosts}) + "\n")
for step in do.get("checkpoints", []) + do.get("incomplete", []):
    pathlib.Path("d", f"step-{step}").mkdir(parents=True)
    if step not in do.get("incomplete", []):
        pathlib.Path("d", f"step-{step}", "manifest.json").write_text("{}")
print(do.get("out", ""), flush=True)
sys.stdout.buffer.write(bytes(do.get("bytes", [])))
print(do.get("err", ""), file=sys.stderr, flush=True)
if "hang" in do:  # two processes; this one notes the signals it gets, and ends on them if it may
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")

    def got(number, frame):
        with open("signals", "a") as file:
            file.write(signal.Signals(number).name + "\n")
        if do["hang"] == "ends":
            sys.exit(do.get("code", 0))
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, got)
    pathlib.Path("ready").write_text("")
    while True:
        time.sleep(0.05)
if do.get("code", 0) < 0:
    os.kill(os.getpid(), -do["code"])
sys.exit(do.get("code", 0))
