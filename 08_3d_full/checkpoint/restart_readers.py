"""What restart.py reads: host files, checkpoint folders, metrics, what a command prints. Any of it may be garbage."""
import json
import os
import pathlib
import re

PROBE_FAILED = 3
# Two usage errors of 08_3d_full (checkpoint_folder.cpp).
FINISHED, BUSY = r"is of step ([0-9]+), and --steps is \1 ", "another run is writing there"
# What is read of the metrics.
EVENTS = {"step": {"step": int}, "replicas_differ": {"equal": int}, "hosts": {"hosts": [str]},
          "probe": {"slow": [{"rank": int, "host": str, "what": str, "of_median": float}]}}


def read_hosts(path):
    """[(name, slots)] of an Open MPI host file."""
    hosts = []
    for line in pathlib.Path(path).read_text(errors="replace").splitlines():
        words = line.split("#")[0].split()
        if words:
            slots = re.search(r"\bslots\s*=\s*([0-9]{1,9})\b", line.split("#")[0])
            if not slots:
                raise ValueError(f"'{line.strip()[:80]}': slots=N is missing")
            hosts.append((words[0], int(slots[1])))
    if not hosts:
        raise ValueError("no host")
    return hosts


def step_of(path):
    """N of step-N, or 0."""
    return int(path.name[5:]) if re.fullmatch("step-[0-9]+", path.name) else 0


def newest_checkpoint(folder):
    """N of the newest folder/step-N with a manifest, or 0."""
    found = pathlib.Path(folder).glob("step-*/manifest.json") if folder else ()
    return max((step_of(path.parent) for path in found), default=0)


def fits(value, kind):
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(fits(value.get(name), its) for name, its in kind.items())
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    return isinstance(value, kind) if kind is str else type(value) in (int, kind) and abs(value) < 1e12


def read_metrics(path, since):
    """The events, without those that lack what EVENTS says of their kind, if the file was written since then (ns)."""
    events = []
    if not path or not os.path.isfile(path) or os.stat(path).st_mtime_ns < since:
        return events
    with open(path, errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue  # as the line that a killed run was writing
            if isinstance(event, dict) and "event" in event and fits(event, EVENTS.get(str(event["event"]), {})):
                events.append(event)
    return events


def hosts_in(line):
    """The host of each rank in "node-0: ranks 0 to 7, node-1: rank 8", or None if the line is another."""
    entry = r"([^\s,]+): ranks? ([0-9]{1,6})(?: to ([0-9]{1,6}))?"  # more ranks than that are garbage
    if ": rank" not in line or not re.fullmatch(f"{entry}(?:, {entry})*", line.strip()):
        return None
    hosts = []
    for host, first, last in re.findall(entry, line):
        if int(first) != len(hosts):
            return None
        hosts += [host] * (int(last or first) + 1 - int(first))
    return hosts


def error_line(lines, words):
    """What the command `words` said of its failure on stderr, best in the name of one of its programs."""
    lines, names = [line.strip() for line in lines], {os.path.basename(word) for word in words}
    for wanted in (lambda line: line.split(":")[0] in names, lambda line: re.match(r"\S+: ", line), bool):
        if found := next(filter(wanted, lines), None):
            return found
    return ""


def suspects(code, text, printed_hosts, events):
    """{host: why} of the hosts that a failure names: exit code, output, hosts of the ranks in it, metrics."""
    if code == PROBE_FAILED:
        probes = [event for event in events if event["event"] == "probe"]
        return {slow["host"]: f"slow: rank {slow['rank']}, {slow['what']}, {slow['of_median']:.0%} of the median"
                for slow in (probes[-1]["slow"] if probes else [])} or \
               {host: f"slow: rank {rank}, {what}, {percent}% of the median" for rank, host, percent, what in
                re.findall(r"rank (\d+) on (\S+) has (\d+)% of the median (.+?)(?=, rank \d+ on |$)", text, re.M)}
    found = {}
    died = r"process rank (\d+) with PID \d+ on node (\S+) (exited on signal \d+[^.\n]*)"
    for rank, host, how in re.findall(died, text):
        found[host] = f"rank {rank} {how}"
    for host in re.findall(r"Remote daemon: \[\[[^\]\n]*\][^\]\n]*\] on node (\S+)", text):
        found[host] = "mpirun lost its daemon"
    hosts = [printed_hosts or []] + [event["hosts"] for event in events if event["event"] == "hosts"]
    hosts = {str(rank): host for rank, host in enumerate(hosts[-1])}
    differs = re.search(r"--replica-check: .* differs on ranks? ([\d, and]+) from ", text)
    for rank in re.findall(r"\d+", differs[1]) if differs else ():
        if rank in hosts:
            found[hosts[rank]] = f"rank {rank} holds other values than its replicas"
    if not found:
        for rank in set(re.findall(r"rank (\d+) has not responded for", text)) & hosts.keys():
            found[hosts[rank]] = f"rank {rank} does not respond"
    if not found and "(--comm-timeout)" in text:
        silent = hosts.keys() - re.findall(r"^rank (\d+): ", text, re.M)
        if 0 < len(silent) < len(hosts) / 2:
            found = {hosts[rank]: f"rank {rank} is silent" for rank in silent}
    return found


def last_equal(events, text):
    """The step after which the replicas were last equal, if they differ now, or None."""
    equal = [event["equal"] for event in events[-3:] if event["event"] == "replicas_differ"]
    if not equal:  # no metrics
        printed = r"replicas differ after step \d+; after step ([0-9]{1,18}) they were equal"
        equal = [int(step) for step in re.findall(printed, text)]
    return equal[-1] if equal else None
