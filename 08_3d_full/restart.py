#!/usr/bin/env python3
"""Runs a training command until it succeeds: restarts it from its newest checkpoint, without the hosts that failed.

    python3 08_3d_full/restart.py [options] -- mpirun -np 16 --hostfile hosts --map-by ppr:8:node \\
        build/bin/08_3d_full --tp 8 --checkpoint-dir checkpoints --checkpoint-every 100 --metrics run.jsonl ...

What the exit code of the command means:
    0    finished (or stopped as SIGUSR1 asked): ends
    2    a usage error, which another try would repeat: ends
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
code. Events are printed, one line each, to stderr, and written as JSON lines to --log.
"""
import argparse
import concurrent.futures
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

PROBE_FAILED = 3
KEPT_LINES = 20000
LAUNCHER_COUNT = ("-np", "--np", "-n", "-c")
LAUNCHER_HOSTS = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "--default-hostfile")


class Command:
    """The words of a command line whose flags can be read and replaced: --flag VALUE or --flag=VALUE."""

    def __init__(self, words):
        self.words = list(words)

    def get(self, *names, default=None):
        for i, word in enumerate(self.words):
            if word in names and i + 1 < len(self.words):
                return self.words[i + 1]
            if word.split("=", 1)[0] in names and "=" in word:
                return word.split("=", 1)[1]
        return default

    def number(self, name, default):
        value = self.get(name)
        return int(value) if value and value.isdigit() else default

    def set(self, value, *names):
        for i, word in enumerate(self.words):
            if word in names and i + 1 < len(self.words):
                self.words[i + 1] = str(value)
                return
            if word.split("=", 1)[0] in names and "=" in word:
                self.words[i] = f"{word.split('=', 1)[0]}={value}"
                return
        self.words += [names[0], str(value)]

    def remove(self, name):
        for i, word in enumerate(self.words):
            if word == name or word.startswith(name + "="):
                del self.words[i:i + (2 if word == name else 1)]
                return


def read_hosts(path):
    """[(name, slots)] of an Open MPI host file."""
    hosts = []
    for line in pathlib.Path(path).read_text().splitlines():
        words = line.split("#")[0].split()
        if words:
            slots = re.search(r"\bslots\s*=\s*(\d+)", line.split("#")[0])
            if not slots:
                raise ValueError(f"{path}: '{line.strip()}': slots=N is missing")
            hosts.append((words[0], int(slots[1])))
    if not hosts:
        raise ValueError(f"{path}: no host")
    return hosts


def layout_for(command, slots):
    """(ranks, dp) of the largest data parallelism that fits, or None."""
    tp, cp, pp = (command.number(flag, 1) for flag in ("--tp", "--cp", "--pp"))
    copy, batch = tp * cp * pp, command.number("--global-batch", 16)
    micro = command.number("--micro-batch", 1 if pp > 1 else 0)
    shard = command.number("--hybrid-shard", 0)
    ranks = int(command.get(*LAUNCHER_COUNT, default="0"))
    for dp in range(min(slots, ranks) // copy, 0, -1):
        divides = batch % (dp * micro) == 0 if micro else batch % dp == 0
        if divides and (shard in (0, 1) or dp * cp % shard == 0 or shard >= dp * cp):
            return copy * dp, dp
    return None


def newest_checkpoint(folder):
    """N of the newest folder/step-N with a manifest, or 0."""
    steps = [int(path.parent.name[5:]) for path in pathlib.Path(folder).glob("step-*/manifest.json")
             if path.parent.name[5:].isdigit()] if folder else []
    return max(steps, default=0)


def read_metrics(path):
    events = []
    try:
        with open(path) as lines:
            for line in lines:
                try:
                    events.append(json.loads(line))
                except ValueError:
                    pass  # the line that a killed run was writing
    except (OSError, TypeError):
        pass
    return [event for event in events if isinstance(event, dict)]


def free_name(path):
    """path, or path-2, path-3, ..., whichever does not exist."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def hosts_in(line):
    """The host of each rank in "node-0: ranks 0 to 7, node-1: rank 8", or None if the line is another."""
    entry = r"([^\s,]+): ranks? (\d+)(?: to (\d+))?"
    if ": rank" not in line or not re.fullmatch(f"{entry}(?:, {entry})*", line.strip()):
        return None
    hosts = []
    for host, first, last in re.findall(entry, line):
        if int(first) != len(hosts):
            return None
        hosts += [host] * (int(last or first) + 1 - int(first))
    return hosts


class Restarter:
    def __init__(self, options, words):
        self.options, self.original = options, Command(words)
        self.folder, self.metrics = self.original.get("--checkpoint-dir"), self.original.get("--metrics")
        self.hosts_file = self.original.get(*LAUNCHER_HOSTS)
        self.hosts = read_hosts(self.hosts_file) if self.hosts_file else []
        self.scratch = tempfile.TemporaryDirectory(prefix="restart-")
        self.log = open(options.log, "a") if options.log else None
        self.child, self.stopping = None, None
        self.lines, self.named, self.probe_pointless, self.layout = [], {}, False, None
        self.printed_hosts = None
        self.best = newest_checkpoint(self.folder)

    def event(self, kind, text, **values):
        print(f"restart: {text}", file=sys.stderr, flush=True)
        if self.log:
            self.log.write(json.dumps({"event": kind, "time": round(time.time(), 3), **values}) + "\n")
            self.log.flush()

    # ---- one attempt ----

    def command(self, attempt):
        command = Command(self.original.words)
        layout = None
        if self.hosts_file:
            ranks, slots = int(command.get(*LAUNCHER_COUNT, default="0")), sum(n for _, n in self.hosts)
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

    def relay(self, stream, to):
        for line in stream:
            to.write(line)
            to.flush()
            self.lines.append(line)
            self.printed_hosts = hosts_in(line) or self.printed_hosts
            del self.lines[:-KEPT_LINES]

    def run(self, words):
        """The exit code; negative if a signal ended the command."""
        self.lines, self.printed_hosts = [], None
        # A session of its own: Ctrl-C reaches the command through this program only.
        self.child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                      errors="replace", start_new_session=True)
        if self.stopping:
            self.pass_on(self.stopping)
        relays = [threading.Thread(target=self.relay, args=pair, daemon=True)
                  for pair in ((self.child.stdout, sys.stdout), (self.child.stderr, sys.stderr))]
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

    def suspects(self, code, events):
        """{host: why} of the hosts that this failure names."""
        text = "".join(self.lines)
        if code == PROBE_FAILED:
            probes = [event for event in events if event.get("event") == "probe"]
            return {slow["host"]: f"slow: rank {slow['rank']}, {slow['what']}, {slow['of_median']:.0%} of the median"
                    for slow in (probes[-1]["slow"] if probes else [])} or \
                   {host: f"slow: rank {rank}, {what}, {percent}% of the median" for rank, host, percent, what in
                    re.findall(r"rank (\d+) on (\S+) has (\d+)% of the median (.+?)(?=, rank \d+ on |$)", text, re.M)}
        found = {}
        died = r"process rank (\d+) with PID \d+ on node (\S+) (exited on signal \d+[^.\n]*)"
        for rank, host, how in re.findall(died, text):
            found[host] = f"rank {rank} {how}"
        for host in re.findall(r"Remote daemon: \[\[[^\]]*\][^\]]*\] on node (\S+)", text):
            found[host] = "mpirun lost its daemon"
        ranks = [hosts for hosts in (self.printed_hosts,) if hosts] + \
                [event["hosts"] for event in events if event.get("event") == "hosts"]
        differs = re.search(r"--replica-check: .* differs on ranks? ([\d, and]+) from ", text)
        if ranks and differs:
            for rank in re.findall(r"\d+", differs[1]):
                found[ranks[-1][int(rank)]] = f"rank {rank} holds other values than its replicas"
        if ranks and not found:
            for rank in re.findall(r"rank (\d+) has not responded for", text):
                found[ranks[-1][int(rank)]] = f"rank {rank} does not respond"
            if "(--comm-timeout)" in text and not found:
                heard = {int(rank) for rank in re.findall(r"^rank (\d+): ", text, re.M)}
                silent = [rank for rank in range(len(ranks[-1])) if rank not in heard]
                if 0 < len(silent) < len(ranks[-1]) / 2:
                    found = {ranks[-1][rank]: f"rank {rank} is silent" for rank in silent}
        return found

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
                                      capture_output=True).returncode == 0
            except subprocess.TimeoutExpired:
                return False

        names = [name for name, _ in self.hosts]
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            return [name for name, up in zip(names, pool.map(answers, names)) if not up]

    def set_aside(self, events):
        """After a failed --replica-check: the checkpoints since the replicas were last equal are not resumed from."""
        equal = [event["equal"] for event in events[-3:] if event.get("event") == "replicas_differ"]
        if not equal:  # no metrics
            printed = r"replicas differ after step \d+; after step (\d+) they were equal"
            equal = [int(step) for step in re.findall(printed, "".join(self.lines))]
        if not equal or not self.folder:
            return
        for path in sorted(pathlib.Path(self.folder).glob("step-*")):
            if path.name[5:].isdigit() and int(path.name[5:]) > equal[-1]:
                aside = free_name(path.with_name(path.name + ".suspect"))
                path.rename(aside)
                self.event("set_aside", f"{path} is set aside as {aside.name}: replicas were last equal after step "
                           f"{equal[-1]}", checkpoint=str(path), aside=str(aside))

    def leave_out(self, code, events):
        """Takes the hosts that failed out of self.hosts."""
        suspects = self.suspects(code, events)
        for host, why in suspects.items():
            self.event("suspect", f"{host}: {why}", host=host, why=why)
        self.named = {host: self.named.get(host, 0) + 1 for host in suspects}
        bad = {host: "does not answer the check" for host in self.unreachable()}
        for host, why in suspects.items():
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
            if code == 2:
                usage = [line.strip() for line in self.lines if re.match(r"^\S+: ", line)]
                self.event("usage", f"not retried: a usage error: {usage[0] if usage else '(no message)'}", code=code,
                           message=usage[0] if usage else "")
                return 2
            fresh = self.metrics and os.path.exists(self.metrics) and os.stat(self.metrics).st_mtime_ns >= began
            events = read_metrics(self.metrics) if fresh else []
            step = max([event.get("step", 0) for event in events if event.get("event") == "step"] +
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


def main():
    words = sys.argv[1:]
    own, command = (words[:words.index("--")], words[words.index("--") + 1:]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="restart.py [options] -- COMMAND...")
    parser.add_argument("--max-failures", type=int, default=3, metavar="M", help="in a row without a new step [3]")
    parser.add_argument("--backoff", type=float, default=5, metavar="S",
                        help="seconds before the first restart; doubles [5]")
    parser.add_argument("--backoff-most", type=float, default=300, metavar="S", help="[300]")
    parser.add_argument("--probe-every", type=int, default=3, metavar="N",
                        help="--probe strict at every N-th restart; 0: never [3]")
    parser.add_argument("--strikes", type=int, default=2, metavar="N",
                        help="leave a host out that so many failures in a row name [2]")
    parser.add_argument("--host-check", metavar="'CMD {host}'", help="exit code 0: the host is well [ssh {host} true]")
    parser.add_argument("--host-timeout", type=float, default=30, metavar="S", help="for the check [30]")
    parser.add_argument("--grace", type=float, default=60, metavar="S",
                        help="after SIGTERM or SIGINT, before the command is killed [60]")
    parser.add_argument("--log", metavar="FILE", help="events as JSON lines, appended")
    options = parser.parse_args(own)
    if not command:
        parser.error("no command; put it behind --")
    if options.max_failures < 1 or options.strikes < 1 or options.probe_every < 0 or options.backoff < 0:
        parser.error("--max-failures and --strikes must be at least 1, --probe-every and --backoff at least 0")
    try:
        restarter = Restarter(options, command)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if restarter.hosts and not (restarter.original.get(*LAUNCHER_COUNT) or "").isdigit():
        parser.error("with a host file, the number of ranks is needed: mpirun -np N")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, restarter.pass_on)
    sys.exit(restarter.loop())


if __name__ == "__main__":
    main()
