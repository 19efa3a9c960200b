"""Runs restart.py over a stub for mpirun, for 08_restart.py."""
import json
import pathlib
import subprocess
import sys
import tempfile



ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sys.argv[1]).resolve()
LOOP = [sys.executable, str(ROOT / "08_3d_full/checkpoint/restart.py")]
# Does what the next entry of plan.json says, and records how it was called.
STUB = """#!/usr/bin/env python3
import json, os, pathlib, signal, subprocess, sys, time
words = sys.argv[1:]
calls = pathlib.Path("calls.jsonl")
number = len(calls.read_text().splitlines()) if calls.exists() else 0
plan = json.loads(pathlib.Path("plan.json").read_text())
do = plan[min(number, len(plan) - 1)]
hosts = words[words.index("--hostfile") + 1] if "--hostfile" in words else None
with calls.open("a") as file:
    hosts = pathlib.Path(hosts).read_text() if hosts else ""
    file.write(json.dumps({"words": words, "time": time.time(), "hosts": hosts}) + "\\n")
with open("m.jsonl" if "--metrics" in words else os.devnull, "a" if "--resume" in words else "w",
          errors="surrogateescape") as metrics:
    metrics.write(do.get("raw", ""))
    for event in do.get("events", []):
        metrics.write(json.dumps(event) + "\\n")
    for step in do.get("steps", []):
        metrics.write(json.dumps({"event": "step", "step": step, "loss": 5.0}) + "\\n")
for step in do.get("checkpoints", []):
    folder = pathlib.Path("d", f"step-{step}")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
for step in do.get("incomplete", []):
    pathlib.Path("d", f"step-{step}").mkdir(parents=True)
print(do.get("out", ""), flush=True)
sys.stdout.buffer.write(bytes(do.get("bytes", [])))
print(do.get("err", ""), file=sys.stderr, flush=True)
if "hang" in do:  # two processes that note the signals they get, and end on SIGTERM if they may
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
    def got(number, frame):
        with open("signals", "a") as file:
            file.write(signal.Signals(number).name + "\\n")
        if do["hang"] == "ends":
            sys.exit(do.get("code", 0))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, got)
    pathlib.Path("ready").write_text("")
    while True:
        time.sleep(0.05)
if do.get("code", 0) < 0:
    os.kill(os.getpid(), -do["code"])
sys.exit(do.get("code", 0))
"""


def unlike(what, found, wanted):
    return "" if found == wanted else f"{what}: {found}, not {wanted}"


class Loop:
    """A run of restart.py over the stub in a folder of its own."""

    def __init__(self, plan, options=(), flags=(), hosts=None, down=(), during=None, metrics=True, folders=()):
        self.scratch = tempfile.TemporaryDirectory()
        self.at = pathlib.Path(self.scratch.name)
        (self.at / "plan.json").write_text(json.dumps(plan))
        for name in folders:
            (self.at / name).mkdir(parents=True)
            (self.at / name / "manifest.json").write_text("{}")
        stub = self.at / "mpirun"
        stub.write_text(STUB)
        stub.chmod(0o755)
        (self.at / "down").write_text("\n".join(down) + "\n")
        host_flags = []
        if hosts:
            (self.at / "hosts").write_text(hosts)
            host_flags = ["--hostfile", "hosts"]
        command = [*LOOP, "--backoff", "0.01", "--log", "log.jsonl", "--host-check", "! grep -qx {host} down", *options,
                   "--", str(stub), "-np", "8", *host_flags, "program", "--checkpoint-dir", "d",
                   *(["--metrics", "m.jsonl"] if metrics else []), *flags]
        self.process = subprocess.Popen(command, cwd=self.at, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        errors="replace")
        if during:
            during(self)
        try:
            self.out, self.err = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.out, self.err = self.process.communicate()
        self.code = self.process.returncode
        self.calls = self.lines("calls.jsonl")
        self.events = self.lines("log.jsonl")
        self.kinds = [event["event"] for event in self.events]

    def lines(self, name):
        path = self.at / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def value(self, call, flag):
        words = self.calls[call]["words"]
        return words[words.index(flag) + 1] if flag in words else None
