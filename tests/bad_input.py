#!/usr/bin/env python3
"""Tries bad input: flags, layouts, data, Hugging Face folders, reference runs, output paths, full disks.

    python3 tests/bad_input.py BIN_FOLDER [--slice I/N] [--group NAME] [--list]     --slice: every N-th case; -: as
                                                                                   TRAIN70B_TEST_SLICE says
    python3 tests/bad_input.py --self-test

Right is: exit code 2 within seconds; one line on stderr that begins with the program's name, contains the flag or the
file and has no control characters; less than 1 GiB of memory; the folder afterwards byte for byte as before. Every
case starts in a folder of its own. Prints a table by group, and every wrong case with its output; exit code 1 if there
is one. The cases: bad_input_cases.py.
"""
import argparse
import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

LONGEST_LINE = 2000   # bytes
MOST_MEMORY = 1 << 30  # bytes, of a process that refuses its input
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
               "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "GOMP_SPINCOUNT": "1000",
               "PYTHONDONTWRITEBYTECODE": "1"}


@dataclasses.dataclass
class Case:
    group: str
    name: str
    program: str
    arguments: list             # str or bytes
    expected: list              # what the line contains; one str: one part
    setup: object = None        # called with the empty folder
    ranks: int = 1              # more than 1: under mpirun
    code: int = 2
    streams: str = ""           # a shell's redirections, such as ">&-"
    environment: dict = dataclasses.field(default_factory=dict)
    limit: float = 20           # seconds
    meanwhile: object = None    # called with the folder and the process while the program runs
    left: tuple = ()            # names of files that a run that began may leave
    lines: int = 1              # on stderr; -1: any number, one of them as expected
    mount: str = ""             # options of a tmpfs mounted at the folder "disk", filled by `setup` first
    gone: bool = False          # the working folder is deleted before the program starts
    whole_lines: str = ""       # a file left that must end with a whole line


def snapshot(folder):
    """{path: (mode, content or target)} of everything in the folder."""
    found = {}
    for at, folders, files in os.walk(os.fsencode(folder)):
        for name in folders + files:
            path = os.path.join(at, name)
            info = os.lstat(path)
            what = b""
            if stat.S_ISLNK(info.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    what = hashlib.sha256(file.read()).digest()
            found[os.path.relpath(path, os.fsencode(folder))] = (info.st_mode, what)
    return found


def without_mpirun(text):
    """Without mpirun's notice that a rank ended with a code other than 0, which stands between two rules."""
    return re.sub(rb"-{74}\n(?:Primary job|mpirun detected).*?-{74}\n", b"", text, flags=re.S)


def wrong_line(case, errors):
    """What is wrong with stderr."""
    wrong = []
    lines = errors.split(b"\n")
    if case.lines == 0:
        return [] if not errors else ["stderr is not empty"]
    if len(lines) != 2 or lines[1]:
        wrong.append(f"{len(lines) - 1} lines")
    line = lines[0]
    if case.lines < 0:
        line = next((one for one in lines if one.startswith(case.program.encode())), b"")
        wrong = []
    if not line.startswith(os.path.basename(case.program).encode() + b": "):
        wrong.append("does not begin with the program's name")
    if any(byte < 32 or byte == 127 for byte in line):
        wrong.append("control characters")
    try:
        line.decode()
    except UnicodeDecodeError:
        wrong.append("not UTF-8")
    if len(line) >= LONGEST_LINE:
        wrong.append(f"{len(line)} bytes")
    for part in [case.expected] if isinstance(case.expected, str) else case.expected:
        if part.encode() not in line:
            wrong.append(f"'{part}' is not in the line")
    return wrong


def run(case, binaries, above):
    """(problem or "", stderr, seconds)."""
    folder, session = pathlib.Path(tempfile.mkdtemp(dir=above)), tempfile.mkdtemp(dir=above)
    mounted = None
    try:
        if case.setup:
            case.setup(folder)
        if case.mount:
            mounted = folder / "disk"
            for attempt in range(100):  # busy while another thread's child still holds a file open
                if subprocess.run(["mount", "-o", "remount," + case.mount, mounted], capture_output=True,
                                  check=attempt == 99).returncode == 0:
                    break
                time.sleep(0.02)
        before = snapshot(folder)
        words = [os.path.join(binaries, case.program), *case.arguments]
        environment = {**os.environ, **ENVIRONMENT, **case.environment}
        if case.ranks > 1:
            words = ["mpirun", "--oversubscribe", "-np", str(case.ranks), *words]
            environment["OMPI_MCA_odls_base_sigkill_timeout"] = "0"  # seconds; all ranks end with the same usage error
            environment["OMPI_MCA_orte_tmpdir_base"] = session  # two mpiruns at once may delete a folder that they share
        if case.gone:
            words = ["bash", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "bash", *words]
        if case.streams:
            words = ["bash", "-c", 'exec "$@" ' + case.streams, "bash", *words]
        with tempfile.TemporaryFile(dir=above) as out, tempfile.TemporaryFile(dir=above) as errors:
            begin = time.monotonic()
            process = subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                                       env=environment, start_new_session=True)
            if case.meanwhile:
                case.meanwhile(folder, process)
            late = False
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if not late and time.monotonic() - begin > case.limit:
                    late = True
                    os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.003)
            seconds = time.monotonic() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            errors.seek(0)
            said = without_mpirun(errors.read(1 << 20))
        wrong = []
        if late:
            wrong.append(f"no end within {case.limit:g} s")
        elif process.returncode != case.code:
            wrong.append(f"exit code {process.returncode}, not {case.code}")
        wrong += wrong_line(case, said)
        if usage.ru_maxrss * 1024 > MOST_MEMORY:
            wrong.append(f"{usage.ru_maxrss >> 10} MiB of memory")
        if case.whole_lines and not (folder / case.whole_lines).read_bytes().endswith(b"\n"):
            wrong.append(f"{case.whole_lines} ends within a line")
        after = snapshot(folder)
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
                         and not any(os.fsencode(name) == path for name in case.left))
        if changed:
            wrong.append(f"left or changed: {changed[:5]}")
        return "; ".join(wrong), said, seconds
    finally:
        if mounted:
            subprocess.run(["umount", mounted], check=False)
        for made in (folder, session):
            shutil.rmtree(made, ignore_errors=True)


def report(case, problem, said):
    where = f" on {case.ranks} ranks" if case.ranks > 1 else ""
    command = " ".join(word if isinstance(word, str) else repr(word) for word in case.arguments)
    print(f"WRONG {case.group}: {case.name}{where}: {problem}\n"
          f"      {case.program} {ascii(command)[:400]} {case.streams}\n"
          f"      {ascii(said.decode(errors='replace'))[:600]}")


def run_all(cases, binaries, above):
    """Prints the table; returns the number of wrong cases."""
    groups, wrong, begin = {}, 0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for case, (problem, said, seconds) in zip(cases, pool.map(lambda case: run(case, binaries, above), cases)):
            counts = groups.setdefault(case.group, [0, 0, 0])
            counts[0] += not problem
            counts[1] += 1
            counts[2] += seconds
            if problem:
                wrong += 1
                report(case, problem, said)
    print(f"\n{'bad input':<34}{'right / tried':>14}{'seconds':>10}")
    for group, (right, tried, seconds) in sorted(groups.items()):
        print(f"{group:<34}{right:>6} / {tried:>5}{seconds:>10.1f}")
    print(f"{'all':<34}{len(cases) - wrong:>6} / {len(cases):>5}{time.monotonic() - begin:>10.1f}")
    return wrong


FAKE = """#!/bin/bash
case $1 in
    right) echo "fake: --flag: must be otherwise" >&2; exit 2 ;;
    accepts) echo "fake: --flag: must be otherwise" >&2; exit 0 ;;
    fails) echo "fake: --flag: must be otherwise" >&2; exit 1 ;;
    silent) exit 2 ;;
    two-lines) printf 'fake: --flag: no\\nand more\\n' >&2; exit 2 ;;
    no-newline) printf 'fake: --flag: no' >&2; exit 2 ;;
    no-name) echo "--flag: no" >&2; exit 2 ;;
    other-flag) echo "fake: --other: no" >&2; exit 2 ;;
    escape) printf 'fake: --flag: \\033[31mno\\n' >&2; exit 2 ;;
    latin-1) printf 'fake: --flag: \\351\\n' >&2; exit 2 ;;
    long) printf 'fake: --flag %3000d\\n' 0 >&2; exit 2 ;;
    leaves) echo >file.tmp; echo "fake: --flag: no" >&2; exit 2 ;;
    overwrites) echo other >input; echo "fake: --flag: no" >&2; exit 2 ;;
    removes) rm input; echo "fake: --flag: no" >&2; exit 2 ;;
    replaces) rm fifo; echo >fifo; echo "fake: --flag: no" >&2; exit 2 ;;
    hangs) read <fifo ;;
    dies) kill -SEGV $$ ;;
    eats) python3 -c "x = b'x' * (3 << 29)"; echo "fake: --flag: no" >&2; exit 2 ;;
esac
"""


def self_test():
    """A program that behaves in each wrong way must be reported."""
    failed = 0
    with tempfile.TemporaryDirectory() as above:
        fake = pathlib.Path(above, "fake")
        fake.write_text(FAKE)
        fake.chmod(0o755)

        def setup(folder):
            (folder / "input").write_text("kept")
            os.mkfifo(folder / "fifo")

        for way in re.findall(r"^    ([a-z0-9-]+)\)", FAKE, re.M):
            problem, said, _ = run(Case("self-test", way, "fake", [way], "--flag", setup, limit=3), above, above)
            if (problem == "") != (way == "right"):
                print(f"FAIL self-test: {way}: {problem or 'not noticed'}: {said}")
                failed = 1
            else:
                print(f"ok   self-test: {way}: {problem}")
    return failed


def chosen_slice(text):
    """(i, n) of "i/n", or "-": tests/support.h's TRAIN70B_TEST_SLICE, "all" or which eighth, of which a fifth is taken;
    which one follows the commit, as EMULATE_SEED does."""
    if text == "-":
        eighth = os.environ.get("TRAIN70B_TEST_SLICE", "0")
        fifth = int(os.environ.get("EMULATE_SEED", "0")) % 5
        return (0, 1) if eighth == "all" else (int(eighth) % 8 + 8 * fifth, 40)
    i, n = (int(part) for part in text.split("/"))
    return i % n, n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", nargs="?")
    parser.add_argument("--slice", default="0/1")
    parser.add_argument("--group", default="", help="only groups whose name contains this")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    if not options.binaries:
        parser.error("BIN_FOLDER is missing")
    import bad_input_cases
    binaries = os.path.abspath(options.binaries)
    with tempfile.TemporaryDirectory(prefix="bad_input_") as above:
        cases, skipped = bad_input_cases.all_cases(binaries, pathlib.Path(above), Case)
        cases = [case for case in cases if options.group in case.group]
        i, n = chosen_slice(options.slice)
        cases = cases[i::n]
        if options.list:
            for case in cases:
                print(f"{case.group}: {case.name} ({case.program}, {case.ranks} ranks)")
            return 0
        for line in skipped:
            print(f"skipped: {line}")
        return 1 if run_all(cases, binaries, above) else 0


if __name__ == "__main__":
    sys.exit(main())
