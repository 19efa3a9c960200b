"""Starts programs, alone or under mpirun, and reads what they print and write."""
import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # some containers forbid it
               "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "GOMP_SPINCOUNT": "1000"}
STEP = re.compile(r"^the step +([\d.]+)", re.M)  # of the table that --simulate prints, in ms


class Failed(Exception):
    """A program ended with another exit code than 0, or not in time."""


@functools.cache
def open_mpi():
    """Whether mpirun is Open MPI's, whose options the others refuse."""
    return "Open MPI" in run(["mpirun", "--version"])[1]


def mpirun(ranks, *options):
    """options: Open MPI's."""
    return ["mpirun", *(["--oversubscribe", *options] if open_mpi() else []), "-np", str(ranks)]


def start(main):
    """Runs a script: it prints UTF-8 in any locale, and of a path that cannot be read or written says one line."""
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def members(session):
    """The processes of a session: mpirun gives its ranks groups of their own."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if stat.read_text("utf-8", "replace").rpartition(")")[2].split()[3] == str(session):
                found.append(int(stat.parent.name))
    return found


def stop(process, patience=8):
    """Ends the leader of a session and what it started; first asks mpirun, which ends its ranks, and waits so long."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None and patience:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(patience)
    for pid in members(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def run(words, limit=None, environment=None, **options):
    """(exit code, stdout, stderr); code None: it did not end within so many seconds. Nothing of it is left running."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    process = subprocess.Popen([str(word) for word in words], env={**ENVIRONMENT, **(environment or {})},
                               start_new_session=True, encoding="utf-8", errors="replace", **settings)
    try:
        out, err = process.communicate(timeout=limit)
        return process.returncode, out or "", err or ""
    except subprocess.TimeoutExpired:
        stop(process)
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired as late:  # what has left the group keeps them open
            out, err = ((text or b"").decode(errors="replace") for text in (late.output, late.stderr))
        return None, out or "", err or ""
    finally:
        stop(process)


def output(words, limit=None, environment=None, **options):
    """What it prints."""
    code, out, err = run(words, limit, environment, **options)
    if code != 0:
        lines = (err or out).strip().splitlines()
        ended = f"no end within {limit:g} s" if code is None else f"exit code {code}"
        raise Failed(lines[-1] if lines else ended)
    return out


def events(path, kind=None):
    """The lines of a --metrics file, or those of one kind."""
    lines = map(json.loads, pathlib.Path(path).read_text("utf-8").splitlines())
    return [line for line in lines if kind in (None, line["event"])]


def step_seconds(text):
    """Of a simulated step: what --simulate has printed."""
    found = STEP.search(text)
    if not found:
        raise Failed("--simulate prints no line \"the step\"")
    return float(found[1]) / 1e3


def hardware():
    lines = pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {len(models) or os.cpu_count()} cores"
