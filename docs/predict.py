#!/usr/bin/env python3
"""Predict, then run: asks the questions of a chapter, runs its commands, and scores the answers.

    python3 docs/predict.py 05 [--question N] [--build build] [--list]     --list: the questions only, runs nothing;
                                                                           05: or another chapter, or experts
    python3 docs/predict.py 05 --answers FILE [--json]                     one answer per line, for a teacher's script
    python3 docs/predict.py --check [NN ...] [--write] [--all] [--record]  every printed number against its command
                                                                           (without NN also README.md's, docs/appendix.md's, experts/README.md's)

An answer is a number: 4096, 1.5 MB (10^6), 1.5 MiB (2^20), 27%, 3/16 (of what the table's first row has, where the
figure is in bytes or a count), `same` (as the first row's). `?`, an empty line or the end of the input skips the
question. Points: 10 for an exact answer (to 0.1%, as 12.8 MB for 12,796,800, or to the digits that the lesson
prints), 7 within 10%, 4 within a factor of 2, 1 for the right direction from the first row's figure; 0 for the wrong
one, unless within 10%. Where the figure is the same as the first row's, 10 (to 1%) or 0.

Questions, figures and their commands stand in the READMEs, in comments above the tables (tests/lessons_figures.py has
the syntax). --check runs those commands and compares: bytes and counts exactly, losses to the printed digits and 5e-6
(another CPU's matrix products round differently), times not at all. A command that passed before is run again only if
the sources of its program or the figures changed (tests/checked.py); --record keeps what passed for all. It ends with
how many rows were checked, unchanged or left out, and why, and which commands ran; exit code 1, with FILE:LINE and both
numbers, if a figure is stale; --write corrects it in the README, for the next check. --all runs everything again, also
what takes minutes; --slice runs, of what changed, the eighth that TRAIN70B_TEST_SLICE says (tests/support.h), or, where
that is "all", everything again but what takes minutes. Bad input ends with exit code 2.
"""
import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXPERTS = "08_3d_full/experts/README.md"  # a lesson of its own inside a chapter
sys.path.insert(0, str(ROOT / "tests"))
from checked import RECORD, Checked  # noqa: E402
from lessons import Lessons  # noqa: E402
from lessons_commands import Commands  # noqa: E402
from lessons_figures import Readme  # noqa: E402
from lessons_runs import FigureError, Runner, numbers  # noqa: E402
from predict_answers import LEVELS, Quiz, UsageError, counted, read_answers  # noqa: E402


# ---- the check -------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Part:
    """A figure, or a fence: what a command's output is held to."""
    line: int
    rows: int
    count: int                 # of its numbers
    held: list
    figure: object = None
    fence: tuple = ()


class Check:
    """Every figure of some READMEs against what its command gives."""

    def __init__(self, root, programs, slice_=None, slow=False, announce=None, everything=False):
        self.root, self.bin, self.slice, self.slow = root, programs, slice_, slow
        self.runner = Runner(root, programs, 3600 if slow else 600, announce)
        self.errors, self.stale, self.written, self.order, self.keys = [], [], [], {}, {}
        self.checked = collections.defaultdict(lambda: [set(), 0])              # chapter: rows, numbers
        self.unchanged = collections.defaultdict(lambda: [set(), 0])            # the same, since they were checked
        self.left_out = collections.defaultdict(lambda: [set(), 0])             # (chapter, why): rows, numbers
        self.known, self.lessons = Commands(root, programs), Lessons(root, programs)
        self.record, self.not_run = Checked(root, programs, everything), 0

    def error(self, path, line, message):
        self.errors.append(f"{path.relative_to(self.root)}:{line}: {message}")

    def in_slice(self, command):
        number = self.order.setdefault(command, len(self.order))
        return self.slice is None or number % 8 == self.slice

    def skip(self, path, line, count, why, rows=1):
        self.add(self.left_out[path.parent.name, why], line, count, rows)

    def count(self, path, line, count, rows=1):
        self.add(self.checked[path.parent.name], line, count, rows)

    def add(self, entry, line, count, rows):
        entry[0] |= set(range(line, line + rows))
        entry[1] += count

    def readme(self, path, write=False):
        readme, changes = Readme(path), []
        for line, message in readme.errors:
            self.error(path, line, message)
        for line, rows, count, why in readme.unmarked:
            self.skip(path, line, count, why, rows)
        for figure in readme.figures:
            if figure.left_out:
                self.skip(path, figure.line, len(numbers(figure.text)), figure.left_out)
        for command, parts in self.commands_of(readme).items():
            changes += self.command(path, command, parts)
        self.record.save()
        if write and changes:
            self.write(path, changes)

    def commands_of(self, readme):
        """{command: [Part]}"""
        found = collections.defaultdict(list)
        for figure in readme.figures:
            if not figure.left_out:
                found[figure.command].append(Part(figure.line, 1, len(numbers(figure.text)), figure.held(), figure))
        for fence in readme.fences:
            block, command, _, name = fence
            found[command].append(Part(block.line, len(block.lines), sum(len(numbers(each)) for each in block.lines),
                                       [name == "prints times", block.lines], fence=fence))
        return found

    def command(self, path, command, parts):
        """[change] of what is stale, if the command has to run."""
        before, figures = len(self.errors), [part.figure for part in parts if part.figure]
        if figures and command != "computed":
            self.known.check(command, [], False,
                             lambda message: self.error(path, figures[0].line, f"{message}, in: {command}"))
        commands = [command, *(figure.expression for figure in figures)]
        line = self.record.line(str(path.relative_to(self.root)), command, commands, [part.held for part in parts])
        slow = next((figure.slow for figure in figures if figure.slow), "")
        if any(part.fence and part.fence[3] == "prints slow" for part in parts):
            slow = "takes minutes"
        in_slice = self.in_slice(command)
        if self.record.is_known(line):
            self.not_run += 1
            for part in parts:
                self.add(self.unchanged[path.parent.name], part.line, part.count, part.rows)
            return []
        if slow and not self.slow or not in_slice:
            why = f"only with --all: {slow}" if slow and not self.slow else "in another slice"
            for part in parts:
                self.skip(path, part.line, part.count, why, part.rows)
            return []
        changes = []
        for part in parts:
            try:
                changes += self.fence(path, *part.fence) if part.fence else \
                    self.figure(path, part.figure, numbers(part.figure.text), part.figure.actual(self.runner))
            except FigureError as error:
                self.error(path, part.line, str(error))
                if isinstance(self.runner.runs.get(command), FigureError):
                    break
        self.record.result(line, commands, len(self.errors) == before)
        return changes

    def fence(self, path, block, command, line, name):
        """[change] of a fence that is stale."""
        self.lessons.errors = []
        self.lessons.outputs[command] = self.runner.run(command).lines
        table = self.lessons.prints(path, block, command, line, name == "prints times")
        self.count(path, block.line, sum(len(numbers(each)) for each in block.lines), len(block.lines))
        self.errors += self.lessons.errors
        self.stale += [each for each in self.lessons.errors if "\n---" in each]
        return [] if table is None else [(block.line, 0, block.lines, table)]

    def figure(self, path, figure, printed, actual):
        """[(line, begin, old, new)] of what is stale."""
        changes = []
        if len(printed) != len(actual):
            self.error(path, figure.line, f"{figure.label}: \"{figure.text.strip()}\" has {len(printed)} numbers, "
                       f"{figure.expression} has {len(actual)}")
            return changes
        self.count(path, figure.line, len(printed))
        for number, value in zip(printed, actual):
            if not isinstance(value, (int, float)):
                self.error(path, figure.line, f"{figure.expression} is {value!r}, no number")
            elif not number.agrees(value, figure.tolerance, figure.slack):
                new = number.like(value)
                name = f"column \"{figure.head}\" of \"{figure.name}\"" if figure.head else "the text"
                self.error(path, figure.line,
                           f"{name} has {number.text}, today {new} ({value!r}), by: {figure.command}")
                self.stale.append(self.errors[-1])
                changes.append((figure.line, figure.begin + number.begin, number.text, new))
                if not figure.head:
                    self.keys[figure.label] = figure.label.replace(number.text, new)
        return changes

    def write(self, path, changes):
        lines = path.read_text().split("\n")
        for line, begin, old, new in sorted(changes, key=lambda change: change[:2], reverse=True):
            if isinstance(old, list):  # a fence
                lines[line - 1:line - 1 + len(old)] = new
                self.written.append(f"{path.relative_to(self.root)}:{line}: the fence")
                continue
            text = lines[line - 1]
            lines[line - 1] = text[:begin] + new + text[begin + len(old):]
            self.written.append(f"{path.relative_to(self.root)}:{line}: {old} -> {new}")
        text = "\n".join(lines)
        for old, new in self.keys.items():  # a paragraph's numbers are named by themselves
            text = text.replace(f"\"{old}\":", f"\"{new}\":").replace(f"\"{old}\" |", f"\"{new}\" |")
        self.keys.clear()
        self.errors = [each for each in self.errors if each not in self.stale]
        path.write_text(text)

    def report(self):
        for chapter in sorted({*self.checked, *self.unchanged, *(chapter for chapter, _ in self.left_out)}):
            rows, count = self.checked[chapter]
            print(f"{chapter}: {len(rows)} rows checked, {count} numbers")
            if self.unchanged[chapter][1]:
                rows, count = self.unchanged[chapter]
                print(f"    unchanged since it was checked: {len(rows)} rows, {count} numbers")
            for (other, why), (lines, amount) in sorted(self.left_out.items(), key=str):
                if other == chapter:
                    print(f"    left out: {len(lines)} rows, {amount} numbers: {why}")
        for word, counts in (("checked", self.checked), ("unchanged", self.unchanged)):
            print(f"all: {sum(len(rows) for rows, _ in counts.values())} rows {word}, "
                  f"{sum(count for _, count in counts.values())} numbers")

    def report_runs(self, unit, seconds):
        """Which commands ran, the slowest first."""
        for command, took in sorted(self.runner.seconds.items(), key=lambda item: -item[1]):
            print(f"{took:7.1f} s  {command}")
        print(f"{counted(len(self.runner.runs), 'command')} run, {counted(self.not_run, unit)} unchanged since the "
              f"last check, {seconds:.0f} s")
        if self.record.held_back:
            print(f"not recorded, for they are older than their sources: {', '.join(sorted(self.record.held_back))}")

    def save(self, pages):
        """With --record, after a whole run."""
        if self.errors or self.written:
            print(f"{RECORD} remains as it is: {'figures differ' if self.errors else 'check what was written first'}")
        else:
            self.record.record(pages)


def test_slice():
    """TRAIN70B_TEST_SLICE (tests/support.h): "all", or which eighth."""
    text = os.environ.get("TRAIN70B_TEST_SLICE", "0")
    if text != "all" and not text.isdecimal():
        raise UsageError(f"TRAIN70B_TEST_SLICE={text}: is neither \"all\" nor a number")
    return text if text == "all" else int(text) % 8


def check(arguments, readmes, programs):
    part, began = test_slice(), time.monotonic()

    def announce(command):
        print(f"{time.monotonic() - began:6.0f} s  {command}", file=sys.stderr, flush=True)
    checker = Check(ROOT, programs, part if arguments.slice and part != "all" else None, arguments.all, announce,
                    arguments.all or part == "all")
    for path in readmes:
        checker.readme(path, arguments.write)
    checker.report()
    checker.report_runs("command", time.monotonic() - began)
    for each in checker.written:
        print(f"wrote {each}")
    if arguments.record:
        checker.save([str(path.relative_to(ROOT)) for path in readmes])
    for error in checker.errors:
        print(error)
    print(f"{len(checker.errors)} differences" if checker.errors else "every figure is what its command gives")
    return bool(checker.errors)


# ---- the command line ------------------------------------------------------------------------------------------------

def chapters(names):
    """The READMEs of the chapters."""
    readmes = sorted(ROOT.glob("[0-9][0-9]_*/README.md"))
    if not names:
        return readmes
    readmes += [path for path in (ROOT / EXPERTS,) if path.is_file()]
    found = []
    for name in names:
        matching = [path for path in readmes if name.strip("/") in (path.parent.name, path.parent.name[:2],
                                                                    path.parent.name[:2].lstrip("0"))]
        if not matching:
            raise UsageError(f"there is no chapter {name}; chapters: {', '.join(path.parent.name for path in readmes)}")
        found += matching
    return found


def programs_of(build, commands):
    """The folder of the programs; all that the commands name must be there."""
    folder = (pathlib.Path(build) if build else ROOT / "build").resolve() / "bin"
    fix = f"bash tests/setup.sh{f' {build}' if build else ''}"
    names = sorted({name for command in commands for name in re.findall(r"build/bin/([\w.-]+)", command)})
    missing = [name for name in names if not (folder / name).is_file()]
    if not folder.is_dir():
        raise UsageError(f"--build {build or 'build'}: there is no {build or 'build'}/bin (try {fix})")
    if missing:
        raise UsageError(f"--build {build or 'build'}: {', '.join(missing)} not built (try {fix})")
    return folder


def quiz(arguments):
    if len(arguments.chapter) != 1:
        names = ", ".join(path.parent.name for path in chapters([]))
        raise UsageError(f"which chapter? python3 docs/predict.py 05; chapters: {names}")
    readmes = chapters(arguments.chapter)
    readme = Readme(readmes[0])
    if readme.errors:
        raise UsageError(f"{readmes[0].relative_to(ROOT)}:{readme.errors[0][0]}: {readme.errors[0][1]}")
    out = sys.stderr if arguments.json else sys.stdout
    game = Quiz(readme, None, out)
    chosen = game.asked
    if arguments.question is not None:
        if not 1 <= arguments.question <= len(chosen):
            raise UsageError(f"--question {arguments.question}: chapter {readme.path.parent.name} has questions 1 to "
                             f"{len(chosen)}")
        chosen = chosen[arguments.question - 1:arguments.question]
    if arguments.list:
        for asked in chosen:
            print(f"{asked.number}. {asked.question.text}\n       {asked.figure.command}")
        return 0
    answers = read_answers(arguments.answers, chosen) if arguments.answers else None
    programs = programs_of(arguments.build, [asked.figure.command for asked in chosen])
    game.runner = Runner(ROOT, programs, 900)
    game.say(f"{readme.path.parent.name}: {counted(len(chosen), 'question')}. A number (1.5 MB, 27%, 3/16), `same`, or ? to skip.")
    results = game.run(chosen, answers)
    if arguments.json:
        print(json.dumps({"chapter": readme.path.parent.name, "questions": len(chosen),
                          "points": sum(each["points"] for each in results), "of": LEVELS[0][0] * len(chosen),
                          "answers": results}, indent=1, ensure_ascii=False))
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"predict.py: {' '.join(message.split())}\n")


def main(words=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapter", nargs="*", help="01 to 08, or experts")
    parser.add_argument("--build", help="build folder (build)")
    parser.add_argument("--question", type=int, help="only this one")
    parser.add_argument("--answers", help="file with one answer per line")
    parser.add_argument("--json", action="store_true", help="the results as JSON on stdout")
    parser.add_argument("--list", action="store_true", help="print the questions")
    parser.add_argument("--check", action="store_true", help="compare every figure with its command's")
    parser.add_argument("--write", action="store_true", help="with --check: correct stale figures")
    parser.add_argument("--all", action="store_true", help="with --check: everything again, also what takes minutes")
    parser.add_argument("--slice", action="store_true", help="with --check: an eighth, by TRAIN70B_TEST_SLICE")
    parser.add_argument("--record", action="store_true", help=f"with --check: keep what passed in {RECORD}")
    parser.add_argument("--self-test", action="store_true", help="check the check on a miniature of this repository")
    arguments = parser.parse_args(words)
    try:
        if arguments.self_test:
            from lessons_figures_self_test import self_test
            return self_test(sys.modules[__name__])
        if (arguments.write or arguments.all or arguments.slice or arguments.record) and not arguments.check:
            raise UsageError("--write, --all, --slice and --record belong to --check")
        if arguments.record and (arguments.slice or arguments.chapter):
            raise UsageError("--record needs the whole check: leave out --slice and the chapters")
        asking = arguments.answers or arguments.json or arguments.list or arguments.question is not None
        if arguments.check and asking:
            raise UsageError("--check asks nothing: leave out --question, --answers, --json, --list")
        if not arguments.check:
            return quiz(arguments)
        readmes = chapters(arguments.chapter)
        if not arguments.chapter:  # two more with figures, but no questions
            readmes += [path for path in (ROOT / "README.md", ROOT / "docs/appendix.md", ROOT / EXPERTS) if path.is_file()]
        commands = [figure.command for path in readmes for figure in Readme(path).figures]
        return check(arguments, readmes, programs_of(arguments.build, commands))
    except UsageError as error:
        print(f"predict.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except FigureError as error:
        print(f"predict.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
