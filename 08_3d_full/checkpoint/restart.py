#!/usr/bin/env python3
"""Runs a training command until it succeeds: restarts it from its newest checkpoint, without the hosts that failed.

    python3 08_3d_full/checkpoint/restart.py [options] -- mpirun -np 16 --hostfile hosts --map-by ppr:8:node \\
        build/bin/08_3d_full --tp 8 --checkpoint-dir checkpoints --checkpoint-every 100 --metrics run.jsonl ...

What the exit code of the command means:
    0    finished (or stopped as SIGUSR1 asked): ends
    2    a usage error, which another try would repeat: ends. Except where the newest checkpoint is of the last
         step (ends with 0), and where another run still writes to --checkpoint-dir (a failure)
    3    --probe strict found slow ranks: restarts without their hosts
    else a failure: restarts

Every attempt, the first too, continues what is in --checkpoint-dir: if that has a folder step-N with a manifest.json,
--resume is added, and --resume-from, which says where the run began, is left out. So this loop can be started again
with the same words, after a reboot or at a job's time limit, whether the file of --metrics is still there or not; the
event "continues" says from which step. A run from the beginning, or from an earlier step, needs another or an emptied
folder. Steps after that checkpoint are repeated, and appear twice in the metrics: the later line counts.

After each failure every host of the host file is checked (--host-check). A host is left out if the check fails, if the
probe finds it slow, or if --strikes failures in a row name it: mpirun ("process rank 3 ... on node NAME"), the
watchdog (a rank that says nothing when all others report a timeout), or --replica-check. The ranks move to the hosts
that remain: list spare hosts last in the host file. With too few slots, data parallelism shrinks to the largest size
for which --global-batch is divisible; a checkpoint can be loaded in any layout.

If --replica-check found replicas that differ, the checkpoints since the last check are renamed to step-N.suspect (or
.suspect-2, ... if that exists), so that the next attempt resumes from an earlier one, and the host of a rank that
differs from a majority is named. This, like slow ranks, is read from the metrics or, without --metrics, from what the
program prints; only checkpoints count as progress then.
An injected fault (--inject) strikes once: restarts leave the flag out.

Gives up (exit code 1) after --max-failures failures in a row without one step beyond the best so far, according to the
metrics and the checkpoints. SIGTERM, SIGINT and SIGUSR1 are passed on to the command, and end this loop with its exit
code. If this loop is killed, the command gets SIGTERM. Events are printed, one line each, to stderr, and written as
JSON lines to --log.
"""
import argparse
import concurrent.futures
import ctypes
import errno
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

from restart_command import Command, LAUNCHER_COUNT, LAUNCHER_HOSTS, layout_for, whole
from restart_readers import (BUSY, FINISHED, PROBE_FAILED, error_line, hosts_in, last_equal, newest_checkpoint,
                             read_hosts, read_metrics, step_of, suspects)

KEPT_LINES = 20000
LONGEST_LINE, MOST_KEPT = 1 << 20, 1 << 16  # the hosts of 16,384 ranks are a line of 100 kB
PR_SET_PDEATHSIG = 1
prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)  # Linux has it


def end_with(parent):
    """In a new process: SIGTERM, at which mpirun ends its ranks, if the parent dies, whatever it dies of."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def write(stream, data):
    """Unbuffered. What a full disk or a closed stream does not take is dropped: the run goes on."""
    try:
        while data:
            data = data[os.write(stream.fileno(), data):]
    except (OSError, AttributeError):
        pass


def free_name(path):
    """path, or path-2, path-3, ..., whichever does not exist."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


class Restarter:
    def __init__(self, options, words):
        self.options, self.original = options, Command(words)
        self.folder, self.metrics = self.original.get("--checkpoint-dir"), self.original.get("--metrics")
        self.hosts_file, self.hosts = self.original.get(*LAUNCHER_HOSTS), []
        self.scratch = tempfile.TemporaryDirectory(prefix="restart-")
        self.log = open(options.log, "ab", buffering=0) if options.log else None
        self.child, self.stopping = None, None
        self.lines, self.errors, self.named, self.probe_pointless, self.layout = [], [], {}, False, None
        self.printed_hosts = None
        self.best = newest_checkpoint(self.folder)

    def event(self, kind, text, **values):
        self.say(text)
        line = json.dumps({"event": kind, "time": round(time.time(), 3), **values}).encode() + b"\n"
        try:
            if self.log and self.log.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.log = None
            self.say(f"--log {self.options.log}: {error.strerror}: goes on without it")

    def say(self, text):
        text = "".join(each if each.isprintable() else "?" for each in text)
        write(sys.stderr, f"restart: {text}\n".encode(errors="replace"))

    # ---- one attempt ----

    def command(self, attempt):
        command = Command(self.original.words)
        layout = None
        if self.hosts_file:
            ranks, slots = whole(command.get(*LAUNCHER_COUNT)), sum(n for _, n in self.hosts)
            if slots < ranks:
                layout = layout_for(command, slots)
                if layout is None:
                    return None
                command.set(layout[0], *LAUNCHER_COUNT)
                if command.get("--dp") is not None:
                    command.set(layout[1], "--dp")
                if self.layout != layout:
                    self.event("smaller", f"{slots} slots remain: {layout[0]} ranks, --dp {layout[1]}", slots=slots,
                               ranks=layout[0], dp=layout[1])
                self.layout = layout
            path = pathlib.Path(self.scratch.name, f"hosts-{attempt}")
            path.write_text("".join(f"{name} slots={slots}\n" for name, slots in self.hosts))
            command.set(path, *LAUNCHER_HOSTS)
        if attempt > 1:
            command.remove("--inject")
        newest, start = newest_checkpoint(self.folder), command.get("--resume-from")
        if newest and "--resume" not in command.words:
            command.remove("--resume-from")
            command.words.append("--resume")
            if attempt == 1:
                self.event("continues", f"continues from {self.folder}/step-{newest}" +
                           (f", not --resume-from {start}" if start else "") +
                           "; another run needs another or an emptied folder", step=newest)
        if attempt > 1 and self.options.probe_every and (attempt - 1) % self.options.probe_every == 0 and \
                not self.probe_pointless:
            command.set("strict", "--probe")
        return command

    def relay(self, stream, to, *kept):
        for data in iter(lambda: stream.readline(LONGEST_LINE), b""):
            write(to, data)
            line = data.decode(errors="replace")
            self.printed_hosts = hosts_in(line) or self.printed_hosts
            for lines in kept:
                lines.append(line[:MOST_KEPT])
                del lines[:-KEPT_LINES]

    def run(self, words):
        """The exit code; negative if a signal ended the command."""
        self.lines, self.errors, self.printed_hosts, me = [], [], None, os.getpid()
        # A session of its own: Ctrl-C reaches the command through this program only.
        self.child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                                      preexec_fn=lambda: end_with(me))
        if self.stopping:
            self.pass_on(self.stopping)
        relays = [threading.Thread(target=self.relay, args=pair, daemon=True)
                  for pair in ((self.child.stdout, sys.stdout, self.lines),
                               (self.child.stderr, sys.stderr, self.lines, self.errors))]
        for relay in relays:
            relay.start()
        killed_at = None
        while True:
            try:
                code = self.child.wait(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                if self.stopping in (signal.SIGTERM, signal.SIGINT) and killed_at is None:
                    killed_at = time.monotonic() + self.options.grace
                if killed_at is not None and time.monotonic() > killed_at:
                    self.end_group()
        self.end_group()  # what is left of it
        for relay in relays:
            relay.join(timeout=10)
        self.child = None
        return code

    def end_group(self):
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except OSError:
            pass

    def pass_on(self, number, _frame=None):
        self.stopping = signal.Signals(number)
        child = self.child
        if child is not None and child.poll() is None:
            child.send_signal(number)

    # ---- after a failure ----

    def unreachable(self):
        def answers(host):
            if not self.options.host_check:
                if host in ("localhost", socket.gethostname()):
                    return True
                command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, "true"]
            else:
                command = ["sh", "-c", self.options.host_check.replace("{host}", host)]
            try:
                return subprocess.run(command, timeout=self.options.host_timeout, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
            except subprocess.TimeoutExpired:
                return False

        names = [name for name, _ in self.hosts]
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            return [name for name, up in zip(names, pool.map(answers, names)) if not up]

    def set_aside(self, events):
        """After a failed --replica-check: the checkpoints since the replicas were last equal are not resumed from."""
        equal = last_equal(events, "".join(self.lines))
        if equal is None or not self.folder:
            return
        for path in sorted(pathlib.Path(self.folder).glob("step-*")):
            if step_of(path) > equal:
                aside = free_name(path.with_name(path.name + ".suspect"))
                path.rename(aside)
                self.event("set_aside", f"{path} is set aside as {aside.name}: replicas were last equal after step "
                           f"{equal}", checkpoint=str(path), aside=str(aside))

    def leave_out(self, code, events):
        """Takes the hosts that failed out of self.hosts."""
        found = suspects(code, "".join(self.lines), self.printed_hosts, events)
        for host, why in found.items():
            self.event("suspect", f"{host}: {why}", host=host, why=why)
        self.named = {host: self.named.get(host, 0) + 1 for host in found}
        bad = {host: "does not answer the check" for host in self.unreachable()}
        for host, why in found.items():
            if code == PROBE_FAILED or self.named[host] >= self.options.strikes:
                bad.setdefault(host, why)
        for host, why in bad.items() if self.hosts else ():
            left = [entry for entry in self.hosts if entry[0] != host]
            # A slow or suspect host is better than none.
            if len(left) == len(self.hosts) or why != "does not answer the check" and (
                    layout_for(self.original, sum(slots for _, slots in left)) is None):
                self.event("kept", f"{host} stays: nothing can replace it", host=host, why=why)
                self.probe_pointless = self.probe_pointless or code == PROBE_FAILED
                continue
            self.hosts = left
            self.event("left_out", f"{host} is left out: {why}", host=host, why=why)

    # ---- the loop ----

    def loop(self):
        failures, attempt, wait = 0, 0, self.options.backoff
        while True:
            attempt += 1
            command = self.command(attempt)
            if command is None:
                self.event("gave_up", "no layout fits the hosts that remain", hosts=self.hosts)
                return 1
            began = time.time_ns()
            self.event("start", f"attempt {attempt}: {' '.join(map(str, command.words))}", attempt=attempt,
                       command=[str(word) for word in command.words])
            try:
                code = self.run([str(word) for word in command.words])
            except OSError as error:
                self.event("usage", f"cannot start: {error}", error=str(error))
                return 2
            if code == 0 or self.stopping:
                self.event("end", f"ended with exit code {code}" +
                           (f" after {self.stopping.name}" if self.stopping else ""), code=code, attempt=attempt,
                           signal=self.stopping.name if self.stopping else None)
                return code if code >= 0 else 128 - code
            said = error_line(self.errors, map(str, command.words)) if code == 2 else ""
            if re.search(FINISHED, said):
                self.event("end", f"the run has finished: {self.folder}/step-{newest_checkpoint(self.folder)} is of "
                           "its last step", code=0, attempt=attempt, signal=None)
                return 0
            if code == 2 and BUSY not in said:
                self.event("usage", f"not retried: a usage error: {said or '(no message)'}", code=code, message=said)
                return 2
            events = read_metrics(self.metrics, began)
            step = max([event["step"] for event in events if event["event"] == "step"] +
                       [newest_checkpoint(self.folder)])
            failures, wait = (0, self.options.backoff) if step > self.best else (failures, wait)
            failures += 1
            self.event("failed", f"attempt {attempt}: exit code {code} after step {step} (failure {failures}; "
                       f"gives up at {self.options.max_failures} in a row without a new step)", code=code,
                       attempt=attempt, step=step, failures=failures)
            self.best = max(self.best, step)
            self.set_aside(events)
            self.leave_out(code, events)
            if failures >= self.options.max_failures:
                self.event("gave_up", f"gave up: {failures} failures in a row without a step beyond {self.best}",
                           failures=failures, step=self.best)
                return 1
            self.event("wait", f"next attempt in {wait:g} s", seconds=wait)
            until = time.monotonic() + wait
            while time.monotonic() < until and not self.stopping:
                time.sleep(0.05)
            wait = min(2 * wait, self.options.backoff_most)
            if self.stopping:
                self.event("end", f"ended by {self.stopping.name} between two attempts", code=code, attempt=attempt,
                           signal=self.stopping.name)
                return 1


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"restart.py: {' '.join(message.split())}\n")


def at_least(least, kind):
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not least <= value <= 1e9:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text}: must be {what} from {least} to 10^9")
        return value
    return read


def main():
    words = sys.argv[1:]
    own, command = (words[:words.index("--")], words[words.index("--") + 1:]) if "--" in words else (words, [])
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    usage="restart.py [options] -- COMMAND...")
    for flag, least, default, name, text in (
            ("--max-failures", 1, 3, "M", "in a row without a new step"),
            ("--backoff", 0, 5.0, "S", "seconds before the first restart; doubles"),
            ("--backoff-most", 0, 300.0, "S", "seconds, at most"),
            ("--probe-every", 0, 3, "N", "--probe strict at every N-th restart; 0: never"),
            ("--strikes", 1, 2, "N", "leave a host out that so many failures in a row name"),
            ("--host-timeout", 0, 30.0, "S", "seconds for --host-check"),
            ("--grace", 0, 60.0, "S", "seconds after SIGTERM or SIGINT, before the command is killed")):
        parser.add_argument(flag, type=at_least(least, type(default)), default=default, metavar=name,
                            help=f"{text} [{default:g}]")
    parser.add_argument("--host-check", metavar="'CMD {host}'", help="exit code 0: the host is well [ssh {host} true]")
    parser.add_argument("--log", metavar="FILE", help="events as JSON lines, appended")
    options = parser.parse_args(own)
    if not command:
        parser.error("no command: it follows --, as in restart.py -- mpirun -np 4 build/bin/08_3d_full")
    try:
        restarter = Restarter(options, command)
    except OSError as error:
        parser.error(f"--log {options.log}: {error.strerror}" if error.filename == options.log else str(error))
    if restarter.hosts_file:
        flag = next(word for word in re.split("[ =]", " ".join(command)) if word in LAUNCHER_HOSTS)
        try:
            restarter.hosts = read_hosts(restarter.hosts_file)
        except (OSError, ValueError) as error:
            parser.error(f"{flag} {restarter.hosts_file}: {getattr(error, 'strerror', None) or error}")
        if whole(restarter.original.get(*LAUNCHER_COUNT)) is None:
            parser.error(f"-np: must be given with {flag}: mpirun -np N")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, restarter.pass_on)
    try:
        code = restarter.loop()
    except OSError as error:  # of the folders and files of the run
        restarter.event("gave_up", f"gave up: {error}", error=str(error))
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
