#!/usr/bin/env python3
"""Does the short form of the tests notice what the long form notices? Makes the mistakes of mutants.txt, one at a time,
in a clone of HEAD, builds it, and runs the tests of the mistake's chapter, 08_grid and refusals.

    python3 tests/mutants/run.py [NAME ...]      all mistakes, or these; rows that results.csv has are not run again
    python3 tests/mutants/run.py --report        who noticed which mistake
    python3 tests/mutants/run.py --self-test     the list and this program; builds nothing

short: one eighth of the long grids (tests/support.h), with --short-label only the tests that have this CTest label.
long: everything; it runs where short has not noticed the mistake, or with --both. A test that fails, crashes or does
not end has noticed it; a mistake that does not build is an error of the list. Exit code 1 for errors, 2 for bad input.
"""
import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import mutants
import results
from mutants import CHAPTERS, HERE, LIST, ROOT, Error, Mutant, Refused


def targets(chapter, known):
    """What is built for a chapter: its programs and tests, 08_grid, the refusals. known: the build's targets."""
    found = [f"tests_{chapter}", "test_08", "test_refusals"] + ["crash_log"] * (chapter == "08")
    if missing := [name for name in found if name not in known]:
        raise Refused(f"the build has no target {', '.join(missing)}: targets() in run.py names them")
    return found


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


def run(what, *command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")
    if done.returncode:
        lines = done.stdout.splitlines() or [f"exit code {done.returncode}"]
        raise Error(f"{what}: " + next((line for line in lines if re.search(r"\berror\b", line, re.I)), lines[-1]))
    return done.stdout


class Work:
    """A clone of HEAD and its build folder, which the next mistake uses again, and the next time."""

    def __init__(self, folder, options):
        self.folder, self.source, self.build, self.options = folder, folder / "source", folder / "build", options
        if not self.source.exists():
            run("git clone", "git", "clone", "--quiet", "--no-checkout", ROOT, self.source)
        run("git fetch", "git", "-C", self.source, "fetch", "--quiet", ROOT, "HEAD")
        run("git checkout", "git", "-C", self.source, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
        self.commit = run("git", "git", "-C", self.source, "rev-parse", "--short=12", "HEAD").strip()
        generator = [] if (self.build / "CMakeCache.txt").exists() else ["-G", "Ninja"]
        run("cmake", "cmake", "-S", self.source, "-B", self.build, "-DTRAIN70B_CUDA=OFF", *generator)
        names = run("cmake", "cmake", "--build", self.build, "--target", "help")
        self.targets = set(re.findall(r"^(?:\.\.\. )?([\w-]+)", names, flags=re.M))
        (folder / "logs").mkdir(exist_ok=True)

    @contextlib.contextmanager
    def with_texts(self, texts):
        """Files with other texts, and as they were when this ends, however it ends."""
        before = {file: (self.source / file).read_text() for file in texts}
        try:
            self.write(texts)
            yield
        finally:
            self.write(before)  # with the time of now: the next build compiles them again

    def write(self, texts):
        for file, text in texts.items():
            (self.source / file).write_text(text)

    def compile(self, chapter):
        run("does not build", "cmake", "--build", self.build, "-j", self.options.jobs, "--target",
            *targets(chapter, self.targets))

    def limit_tests(self, seconds):
        """ctest --timeout alone does not lower the limits that tests have."""
        run("cmake", "cmake", self.build)  # writes the tests' own
        for file in self.build.rglob("CTestTestfile.cmake"):
            file.write_text(limited(file.read_text(), seconds))

    def test(self, mutant, form):
        """The tests that failed, and the seconds of all."""
        short, options = form == "short", self.options
        seconds = options.timeout if short else options.long_timeout
        self.limit_tests(seconds)
        report, log = self.folder / "tests.xml", self.folder / "logs" / f"{mutant.name}-{form}.txt"
        report.unlink(missing_ok=True)
        command = ["ctest", "--test-dir", self.build, "-R", rf"^({mutant.chapter}_|08_grid$|refusals$)", "--timeout", seconds,
                   "-j", options.jobs, "--output-on-failure", "--output-junit", report]
        command += ["--stop-on-failure"] if options.first else []
        command += ["-L", options.short_label] if short and options.short_label else []
        part = str(options.eighth) if short else "all"
        began = time.monotonic()
        with open(log, "w", encoding="utf-8") as output, subprocess.Popen(
                list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TRAIN70B_TEST_SLICE": part}) as ctest:
            try:
                ctest.wait()
            except BaseException:  # Ctrl-C: not without the ranks
                os.killpg(ctest.pid, signal.SIGTERM)
                raise
        if not report.exists():
            raise Error(f"ctest has written no report: {log}")
        return results.failed_tests(report.read_text(errors="replace"), seconds), time.monotonic() - began


def limited(text, seconds):
    return re.sub(r'\bTIMEOUT "(\d+)"', lambda own: f'TIMEOUT "{min(int(own[1]), seconds)}"', text)


def try_mutant(work, mutant, rows, options):
    unchanged = not mutant.patches and not mutant.lab
    forms = results.missing_forms(rows, mutant, options.both)
    if not forms or (unchanged and forms == ["long"] and not options.both):
        return
    with work.with_texts(mutants.changed(mutant, work.source)):
        work.compile(mutant.chapter)
        while forms:
            form = forms.pop(0)
            failed, seconds = work.test(mutant, form)
            verdict = "caught" if failed else "passed" if unchanged else "SURVIVED"
            print(f"{seconds:6.0f} s  {form:5}  {verdict:8}  {mutant.name}: {'; '.join(failed) or mutant.what}",
                  flush=True)
            if unchanged and failed:
                raise Error("these tests fail without a mistake")
            results.add(options.csv, rows, results.row(mutant, form, failed, seconds, work.commit))
            if not forms and not unchanged:
                forms = results.missing_forms(rows, mutant, options.both)


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of at least 1")
    return int(text)


def parse():
    parser = Parser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/mutants", help="the clone and its build")
    parser.add_argument("--csv", type=pathlib.Path, default=HERE / "results.csv")
    parser.add_argument("--slice", default="0/1", metavar="I/N", help="the I-th of N parts of the list, from 0")
    parser.add_argument("--both", action="store_true", help="the long form also of what the short form has caught")
    parser.add_argument("--first", action="store_true", help="a form ends at its first failing test")
    parser.add_argument("--unchanged", action="store_true", help="first each chapter's tests without a mistake")
    parser.add_argument("--short-label", metavar="LABEL", help="CTest's label of the tests of the short form")
    parser.add_argument("--eighth", type=int, choices=range(8), default=0, help="in the short form, of the long grids")
    parser.add_argument("--timeout", type=positive, default=120, help="seconds of a short test [%(default)s]")
    parser.add_argument("--long-timeout", type=positive, default=900, help="seconds of a long one [%(default)s]")
    parser.add_argument("-j", "--jobs", type=positive, default=os.cpu_count())
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    return parser.parse_args()


def try_all(listed, rows, options):
    for mutant in listed:
        mutants.changed(mutant, ROOT)  # refused now, not after an hour
    if options.unchanged:
        of_chapters = [each for each in CHAPTERS if any(mutant.chapter == each for mutant in listed)]
        listed = [Mutant(f"unchanged-{each}", each, "no mistake") for each in of_chapters] + listed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `finally`
    work, errors = Work(options.work.resolve(), options), 0
    for mutant in listed:
        try:
            try_mutant(work, mutant, rows, options)
        except Error as error:
            errors += 1
            print(f"ERROR  {mutant.name}: {error}", flush=True)
    return 1 if errors else 0


def main():
    try:
        options = parse()
        if options.self_test:
            import self_test
            return self_test.main()
        listed = mutants.chosen(mutants.read(LIST), options.names, mutants.part(options.slice))
        rows = results.read(options.csv)
        return results.report(listed, rows) if options.report else try_all(listed, rows, options)
    except (Refused, Error, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, Error) else 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
