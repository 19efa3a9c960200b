#!/usr/bin/env python3
"""Runs a training command until it succeeds: restarts it from its newest checkpoint, without the hosts that are lost.

    python3 08_3d_full/checkpoint/restart.py [options] -- mpirun -np 16 --hostfile hosts --map-by ppr:8:node \\
        build/bin/08_3d_full --tp 8 --checkpoint-dir checkpoints --checkpoint-every 100 ...

What the exit code of the command means:
    0    finished (or stopped as SIGUSR1 asked): ends
    2    a usage error, which another try would repeat: the first attempt ends with it; a later one is a failure
    3    --probe strict found slow ranks: restarts without their hosts
    else a failure: restarts

Every attempt, the first too, continues what is in --checkpoint-dir: if that has a folder step-N with a manifest.json,
--resume is added, and --resume-from, which says where the run began, is left out. So this loop can be started again
with the same words. A run from the beginning needs another or an emptied folder. Steps after the checkpoint are
repeated, and appear twice in the metrics: the later line counts. If --replica-check found replicas that differ, the
checkpoints since the last check are renamed to step-N.suspect (or .suspect-2, ...), and nothing resumes from them. An
injected fault (--inject) strikes once: restarts leave the flag out.

After each failure every host of the host file is checked (--host-check), and left out if the check fails. The ranks
move to the hosts that remain: list spare hosts last in the host file. With too few slots, data parallelism shrinks to
the largest size that divides the batch, and --ep with it; a checkpoint can be loaded in any layout.

Gives up (exit code 1) after --max-failures failures in a row without a checkpoint beyond the newest so far. SIGTERM,
SIGINT, SIGHUP and SIGUSR1 are passed on to the command, and end this loop with its exit code. In a Slurm job, Slurm
chooses the hosts: the command runs once, and after a failure the job is requeued; .restart.json in --checkpoint-dir
has the count of its failures. If srun asks for more nodes (-N, with --ntasks-per-node) than the job has this time,
-N shrinks, to nodes that data parallelism fills.
"""
import argparse
import concurrent.futures
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

USAGE_ERROR, PROBE_FAILED = 2, 3  # exit codes of the program
RANK_FLAGS = ("-np", "--np", "-n", "-c")
NODE_FLAGS = ("-N", "--nodes")  # of srun
HOST_FLAGS = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "--default-hostfile")
COUNT = ".restart.json"  # in --checkpoint-dir: the failures in a row of a Slurm job
LONGEST_LINE, LONGEST_WAIT = 1 << 20, 300.0
HOST = re.compile("[A-Za-z0-9._:][A-Za-z0-9._:-]*")  # nothing that a shell or ssh would take for something else
# What the program prints if replicas differ, and of slow ranks.
DIFFER = re.compile(r"replicas differ after step \d+; after step (\d{1,18}) they were equal")
SLOW = re.compile(r"rank \d+ on (\S+) has \d+% of the median")


def find(words, names):
    """(place, value) of the first of the flags in a command line, as --flag VALUE or --flag=VALUE, or (None, None)."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names and (equals or i + 1 < len(words)):
            return i, value if equals else words[i + 1]
    return None, None


def integer(words, *names, default=None):
    text = find(words, names)[1]
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else default


def replace(words, names, value=None):
    """Sets a flag that is given; None: removes it."""
    i, _ = find(words, names)
    if i is not None:
        name, equals, _ = words[i].partition("=")
        words[i:i + (1 if equals else 2)] = [] if value is None else [name, str(value)]


def read_hosts(path):
    """{name: slots} of an Open MPI host file."""
    hosts, file = {}, pathlib.Path(path)
    if file.exists() and not file.is_file():
        raise ValueError("is no regular file")
    for line in file.read_text("utf-8", "replace").splitlines():
        if line := line.split("#")[0].strip():
            slots = re.search(r"\bslots\s*=\s*([0-9]{1,9})\b", line)
            if not slots:
                raise ValueError(f"'{line[:80]}': slots=N is missing")
            if not HOST.fullmatch(name := line.split()[0]):
                raise ValueError(f"'{name[:80]}': is no name of a host")
            hosts[name] = hosts.get(name, 0) + int(slots[1])
    if not hosts:
        raise ValueError("no host")
    return hosts


def answers(host, check, timeout):
    """Whether the host passes --host-check. The shell gets its name as one quoted word."""
    if not check and host in ("localhost", socket.gethostname()):
        return True
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", host, "true"]
    command = ["sh", "-c", check.replace("{host}", shlex.quote(host))] if check else ssh
    try:
        return subprocess.run(command, timeout=timeout, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def layout_for(words, slots, per_node=1):
    """(ranks, dp, ep) of the largest data parallelism that fits and fills its nodes, or None."""
    tp, cp, pp = (max(1, integer(words, flag, default=1)) for flag in ("--tp", "--cp", "--pp"))
    batch, ramp = integer(words, "--global-batch", default=16), find(words, ["--batch-ramp"])[1] or ""
    if begin := re.match("[0-9]{1,9}", ramp):
        batch = math.gcd(batch, int(begin[0]))  # which divides every batch of the ramp
    micro = max(1, integer(words, "--micro-batch", default=1))
    shard = max(1, integer(words, "--hybrid-shard", default=1))
    ep = integer(words, "--ep", default=1)
    replica = tp * cp * pp
    for dp in range(min(slots // replica, batch), 0, -1):
        if batch % (dp * micro) == 0 and dp * cp % shard == 0 and dp * replica % per_node == 0:
            return dp * replica, dp, math.gcd(ep, dp * tp * cp)  # ep divides what it did, and the ranks of a stage
    return None


def checkpoints(folder):
    """[(N, path)] of the folders step-N."""
    found = pathlib.Path(folder).glob("step-*") if folder else ()
    return [(int(path.name[5:]), path) for path in sorted(found) if re.fullmatch("step-[0-9]+", path.name)]


def newest_checkpoint(folder):
    """N of the newest folder step-N with a manifest, or 0."""
    return max((n for n, path in checkpoints(folder) if (path / "manifest.json").exists()), default=0)


def set_aside(folder, equal):
    """Renames the checkpoints after step `equal`, the last one at which the replicas were equal."""
    for _, path in (entry for entry in checkpoints(folder) if entry[0] > equal):
        names = (path.with_name(f"{path.name}.suspect{f'-{n}' if n > 1 else ''}") for n in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        path.rename(aside)
        say(f"{path} is set aside as {aside.name}: replicas were last equal after step {equal}")


def write(stream, data):
    """Unbuffered. What a full disk or a closed stream does not take is dropped: the run goes on."""
    with contextlib.suppress(OSError, AttributeError):
        while data:
            data = data[os.write(stream.fileno(), data):]


def say(text):
    text = "".join(character if character.isprintable() else "?" for character in text)
    write(sys.stderr, f"restart: {text}\n".encode(errors="replace"))


class Restarter:
    def __init__(self, options, words, hosts):
        self.options, self.words, self.hosts = options, words, hosts  # hosts: {name: slots}; None: no host file
        self.folder, self.job = find(words, ["--checkpoint-dir"])[1], os.environ.get("SLURM_JOB_ID")
        self.scratch = tempfile.TemporaryDirectory(prefix="restart-")
        self.child, self.stopping = None, None
        self.failures, self.newest = 0, newest_checkpoint(self.folder)  # in a row; the newest checkpoint so far

    def command(self, first):
        """The words of an attempt; None: no layout fits the hosts that remain."""
        words, slots, per_node, flags = list(self.words), math.inf, 1, RANK_FLAGS
        ranks = integer(words, *flags, default=0)
        if self.hosts is not None:
            slots = sum(self.hosts.values())
        elif self.job and (nodes := integer(words, *NODE_FLAGS)):
            per_node, flags = integer(words, "--ntasks-per-node", default=1), NODE_FLAGS
            slots, ranks = int(os.environ["SLURM_JOB_NUM_NODES"]) * per_node, nodes * per_node
        if slots < ranks:
            if (layout := layout_for(words, slots, per_node)) is None:
                return None
            say("{} slots are left: {} ranks, dp {}, ep {}".format(slots, *layout))
            for names, value in zip((flags, ["--dp"], ["--ep"]), (layout[0] // per_node, *layout[1:])):
                replace(words, names, value)
        if self.hosts is not None:
            file = pathlib.Path(self.scratch.name, "hosts")
            file.write_text("".join(f"{name} slots={count}\n" for name, count in self.hosts.items()), "utf-8")
            replace(words, HOST_FLAGS, file)
        if not first:
            replace(words, ["--inject"])
        if (newest := newest_checkpoint(self.folder)) and "--resume" not in words:
            start = find(words, ["--resume-from"])[1]
            replace(words, ["--resume-from"])
            words.append("--resume")
            if first:
                say(f"continues from {self.folder}/step-{newest}" + (f", not --resume-from {start}" if start else "") +
                    "; another run needs another or an emptied folder")
        return words

    def relay(self, stream):
        """Passes on what the command prints, and keeps what it says of replicas and slow ranks."""
        for data in iter(lambda: stream.readline(LONGEST_LINE), b""):
            write(sys.stdout, data)
            line = data.decode(errors="replace")
            if found := DIFFER.search(line):
                self.equal = int(found[1])
            self.slow += SLOW.findall(line)

    def run(self, words):
        """The exit code; negative if a signal ended the command."""
        self.equal, self.slow = None, []
        # A session of its own: Ctrl-C reaches the command through this program only.
        self.child = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        if self.stopping:
            self.child.send_signal(self.stopping)
        relay = threading.Thread(target=self.relay, args=[self.child.stdout], daemon=True)
        relay.start()
        code = self.child.wait()
        with contextlib.suppress(OSError):
            os.killpg(self.child.pid, signal.SIGKILL)  # what is left of it: no two attempts run at once
        relay.join(timeout=10)
        return code

    def pass_on(self, number, _frame):
        self.stopping = signal.Signals(number)
        if self.child is not None:
            self.child.send_signal(number)

    def leave_out_hosts(self, slow):
        """Takes the hosts that are slow or fail the check out of self.hosts."""
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            up = pool.map(lambda host: answers(host, self.options.host_check, self.options.host_timeout), self.hosts)
            failed = {host: "fails the check" for host, answered in zip(self.hosts, up) if not answered}
        for host, why in (dict.fromkeys(slow, "slow") | failed).items():
            left_out = self.hosts.pop(host, None) is not None
            say(f"{host} {'is left out' if left_out else 'is not in the host file'}: {why}")

    def count_of_job(self):
        """Continues the count of failures of a job that Slurm has started again."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            count = json.loads(pathlib.Path(self.folder, COUNT).read_text("utf-8"))
            if count["job"] == self.job:
                self.failures, self.newest = int(count["failures"]), int(count["newest"])

    def requeue(self):
        """Has Slurm start the job again. Writes its count of failures first: without it there would be no limit."""
        file = pathlib.Path(self.folder, COUNT)
        file.parent.mkdir(parents=True, exist_ok=True)
        count = {"job": self.job, "failures": self.failures, "newest": self.newest}
        new = file.with_suffix(".new")
        new.write_text(json.dumps(count) + "\n", "utf-8")
        new.rename(file)
        say(f"requeues job {self.job}")
        done = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, encoding="utf-8")
        if done.returncode:  # when a node is gone, Slurm itself may have been first: it ends what runs in the job
            said = done.stderr.strip()
            if done.returncode != -signal.SIGTERM and "pending" not in said:
                raise OSError(f"scontrol requeue: {said or done.returncode}")
            say(f"Slurm has requeued job {self.job} itself")

    def after_failure(self, attempt, code):
        """What is done before the next attempt. False: there is none."""
        if self.equal is not None:
            set_aside(self.folder, self.equal)
        newest = newest_checkpoint(self.folder)
        self.failures = 1 if newest > self.newest else self.failures + 1
        self.newest = max(newest, self.newest)
        say(f"attempt {attempt}: exit code {code} (failure {self.failures}; gives up at {self.options.max_failures} in "
            f"a row without a checkpoint beyond step {self.newest})")
        if self.failures >= self.options.max_failures:
            return False
        if self.job:
            self.requeue()
            return False
        if self.hosts is not None:
            self.leave_out_hosts(self.slow if code == PROBE_FAILED else [])
        wait = min(self.options.backoff * 2.0 ** min(self.failures - 1, 60), LONGEST_WAIT)
        say(f"next attempt in {wait:g} s")
        until = time.monotonic() + wait
        while time.monotonic() < until and not self.stopping:
            time.sleep(0.05)
        if self.stopping:
            say(f"ended by {self.stopping.name} between two attempts")
        return not self.stopping

    def loop(self):
        """Returns the exit code."""
        self.count_of_job()
        for attempt in itertools.count(1):
            newest = newest_checkpoint(self.folder)
            if newest and newest == integer(self.words, "--steps"):
                say(f"the run has finished: {self.folder}/step-{newest} is of its last step")
                return 0
            first = attempt == 1 and self.failures == 0
            words = self.command(first)
            if words is None:
                say("gives up: no layout fits the hosts that remain")
                return 1
            say(f"attempt {attempt}: {' '.join(words)}")
            code = self.run(words)
            if code == 0 or self.stopping:
                say(f"ended with exit code {code}" + (f" after {self.stopping.name}" if self.stopping else ""))
                return code if code >= 0 else 128 - code
            if code == USAGE_ERROR and first:
                say("not restarted: a usage error")
                return code
            if not self.after_failure(attempt, code):
                return 1


def at_least(least, kind):
    def read(text):
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= 1e9:
                return kind(text)
        what = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text}: must be {what} from {least} to 10^9")
    return read


def main():
    words = sys.argv[1:]
    own, command = (words[:words.index("--")], words[words.index("--") + 1:]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="restart.py [options] -- COMMAND...")
    parser.error = lambda message: parser.exit(2, f"restart.py: {' '.join(message.split())}\n")
    parser.add_argument("--max-failures", type=at_least(1, int), default=3, metavar="M",
                        help="in a row without a new checkpoint [3]")
    parser.add_argument("--backoff", type=at_least(0, float), default=5.0, metavar="S",
                        help="seconds before the first restart; doubles, to 300 at most [5]")
    parser.add_argument("--host-check", metavar="'CMD {host}'", help="exit code 0: the host is well [ssh {host} true]")
    parser.add_argument("--host-timeout", type=at_least(0, float), default=30.0, metavar="S",
                        help="seconds for --host-check [30]")
    options = parser.parse_args(own)
    if not command:
        parser.error("no command: it follows --, as in restart.py -- mpirun -np 4 build/bin/08_3d_full")
    if not shutil.which(command[0]):
        parser.error(f"{command[0]}: is not a program that can be started")
    if "SLURM_JOB_ID" in os.environ and find(command, ["--checkpoint-dir"])[1] is None:
        parser.error("--checkpoint-dir: must be given in a Slurm job: that folder has the count of its failures")
    (place, path), hosts = find(command, HOST_FLAGS), None
    if path is not None:
        flag = command[place].split("=")[0]
        try:
            hosts = read_hosts(path)
        except (OSError, ValueError) as error:
            parser.error(f"{flag} {path}: {getattr(error, 'strerror', None) or error}")
        if integer(command, *RANK_FLAGS) is None:
            parser.error(f"-np: must be given with {flag}: mpirun -np N")
    restarter = Restarter(options, command, hosts)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if number != signal.SIGHUP or signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, restarter.pass_on)
    try:
        sys.exit(restarter.loop())
    except OSError as error:  # of the folders of the run; of scontrol
        say(f"gives up: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
