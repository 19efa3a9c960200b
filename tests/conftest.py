"""Fixtures of the Python tests (tests/test_*.py): the built programs, on one rank or several, in a folder of the
test's own.

    python3 -m pytest -k resume                        Debian's python3-pytest; everything: python3 -m pytest
    TRAIN70B_BUILD=build-sanitize python3 -m pytest -k 04      the programs of another build folder
"""
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs")]

import programs  # noqa: E402

PATIENCE = int(os.environ.get("TRAIN70B_PATIENCE", "1"))  # how many times longer limits are here (run.sh)
SLICE = os.environ.get("TRAIN70B_TEST_SLICE", "0")  # of long grids: an eighth, 0 to 7, or "all" (tests/support.h)
ENVIRONMENT = {**programs.ENVIRONMENT, "OMP_NUM_THREADS": "1",
               "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}  # the programs' python3: this one


def in_turn(cases, parts=8):
    """Of a long list every `parts`-th, from a place that the commit's hash gives (run.sh), or all."""
    begin = int(os.environ.get("TRAIN70B_TEST_DRAW", SLICE if SLICE != "all" else "0")) % parts
    return list(cases) if SLICE == "all" else list(cases)[begin::parts]


class Done:
    """What a program left: code, out, err, seconds, its folder."""

    def __init__(self, words, folder, code, out, err, seconds):
        self.words, self.folder, self.code, self.out, self.err, self.seconds = words, folder, code, out, err, seconds

    def __str__(self):
        ended = f"exit code {self.code} after {self.seconds:.1f} s"
        return f"{' '.join(self.words)}\n{ended}\n{self.out[-2000:]}\n{self.err[-3000:]}"

    def says(self, *parts, where="err"):
        """Every part is in stderr (or `where`)."""
        missing = [part for part in parts if part not in getattr(self, where)]
        assert not missing, f"not said: {missing}\n{self}"
        return self

    def within(self, seconds):
        assert self.seconds <= seconds * PATIENCE, f"took {self.seconds:.1f} s, not {seconds}\n{self}"
        return self

    def events(self, kind="step", file="m.jsonl"):
        """The events of a --metrics file."""
        return programs.events(self.folder / file, kind)


class Process:
    """A program that runs; every process of it ends with the test."""

    def __init__(self, words, folder, environment):
        self.words, self.folder, self.began = list(map(str, words)), folder, time.monotonic()
        self.out, self.err = (open(folder / f".{self.began}.{name}", "w+", errors="replace") for name in ("out", "err"))
        self.process = subprocess.Popen(
            self.words, cwd=folder, stdout=self.out, stderr=self.err, stdin=subprocess.DEVNULL,
            env={**ENVIRONMENT, **environment}, start_new_session=True)

    def rank(self, number):
        """The process id of a rank of mpirun."""
        for pid in programs.members(self.process.pid):
            if f"OMPI_COMM_WORLD_RANK={number}" in pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0"):
                return pid
        raise AssertionError(f"no rank {number}")

    def wait_for_steps(self, count, file="m.jsonl", seconds=60):
        end = time.monotonic() + seconds * PATIENCE
        while not (self.folder / file).exists() or (self.folder / file).read_text().count('"event":"step"') < count:
            assert self.process.poll() is None and time.monotonic() < end, f"no step {count}\n{self.end(1)}"
            time.sleep(0.05)

    def strike(self, sent, rank):
        """Sends a signal to a rank; seconds count from here on."""
        os.kill(self.rank(rank), sent)
        self.began = time.monotonic()

    def end(self, seconds=60):
        """Waits, and ends what has not ended: exit code 124."""
        try:
            code = self.process.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            code = 124
        took = time.monotonic() - self.began
        self.kill()
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
            file.close()
            os.unlink(file.name)
        return Done(self.words, self.folder, code, *texts, took)

    def kill(self):
        programs.stop(self.process, 0)


@pytest.fixture(scope="session", autouse=True)
def folder_of_mpi(tmp_path_factory):
    """Open MPI's own folder: where two jobs share one, the first that ends may delete what the other needs."""
    for environment in (ENVIRONMENT, programs.ENVIRONMENT):
        environment["OMPI_MCA_orte_tmpdir_base"] = str(tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="session")
def build():
    folder = ROOT / os.environ.get("TRAIN70B_BUILD", "build")
    if not (folder / "bin/01_single_gpu").exists():
        pytest.exit(f"{folder}: no programs; bash tests/setup.sh builds them, TRAIN70B_BUILD names another folder", 2)
    return folder


@pytest.fixture(scope="session")
def binaries(build):
    return build / "bin"


class Programs:
    """Runs programs of the build in a folder."""

    def __init__(self, binaries, folder):
        self.binaries, self.folder, self.started = binaries, folder, []

    def command(self, program, flags, ranks=1):
        words = [word for flag in flags for word in (flag.split() if isinstance(flag, str) else [str(flag)])]
        found = self.binaries / program
        start = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
        return start + [str(found if found.exists() else program)] + words

    def start(self, program, *flags, ranks=1, env=None):
        """flags: texts, split at spaces, or paths, which are not. ranks above 1: under mpirun."""
        self.started.append(Process(self.command(program, flags, ranks), self.folder, env or {}))
        return self.started[-1]

    def __call__(self, program, *flags, ranks=1, code=0, seconds=60, env=None):
        """The same, to its end, which must have this exit code (None: any) and come within so many seconds."""
        done = self.start(program, *flags, ranks=ranks, env=env).end(seconds)
        assert code in (None, done.code), f"exit code {done.code}, not {code}\n{done}"
        return done

    def refused(self, program, *flags, says=(), ranks=1, seconds=10, env=None):
        """A usage error: exit code 2, one line of the program's own with every part of `says`, nothing left on disk."""
        before = set(self.folder.iterdir())
        # Where all ranks end, mpirun need not leave the others its second to end in.
        done = self(program, *flags, ranks=ranks, code=2, seconds=seconds,
                    env={"OMPI_MCA_odls_base_sigkill_timeout": "0", **(env or {})})
        own = [line for line in done.err.splitlines() if line.startswith(f"{program}: ")]
        assert len(own) == 1 and "MPI_ABORT" not in done.err.upper(), f"not one line\n{done}"
        missing = [part for part in ([says] if isinstance(says, str) else says) if part not in own[0]]
        assert not missing, f"not said: {missing}\n{done}"
        left = set(self.folder.iterdir()) - before
        assert not left, f"left behind: {sorted(path.name for path in left)}"
        return done


def programs_in(binaries, folder):
    started = Programs(binaries, folder)
    yield started
    for process in started.started:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run(binaries, tmp_path):
    """run(program, flags...): see Programs. tmp_path is its folder."""
    yield from programs_in(binaries, tmp_path)


@pytest.fixture(scope="module")
def module_run(binaries, tmp_path_factory):
    """The same in one folder for all tests of a file: what one leaves, the next may use."""
    yield from programs_in(binaries, tmp_path_factory.mktemp("module"))


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """call(program, words, files): (code, stdout, stderr) of a program of docs/, in this process, in a folder of
    the test's own with these files."""
    import usage
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def call(program, words, files):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        monkeypatch.setattr(sys, "argv", [program.__name__ + ".py", *words.split()])
        try:
            usage.ends_with_one_line(program.main)
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()
    return call


def refused(folder, ended, files, program, says):
    """What `call` gave is bad input: exit code 2, one line of the program's, nothing but these files in the folder."""
    code, _, err = ended
    assert code == 2 and err.count("\n") == 1 and err.startswith(f"{program}.py: ") and says in err, (says, ended)
    assert {path.name for path in folder.iterdir()} == set(files), (says, list(folder.iterdir()))
