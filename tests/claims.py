#!/usr/bin/env python3
"""Holds docs/claims.md to the programs and to docs/claims.py; exit code 1, with the row, where a figure or a verdict is
wrong.

    python3 tests/claims.py BIN_FOLDER [--write] [--list]     --write: correct stale figures; --list: rows and verdicts
    python3 tests/claims.py BIN_FOLDER [--all] [--slice] [--record]     which rows: below
    python3 tests/claims.py --self-test

A row of the page: name | quoted | here | verdict | shown by. A command of the page ends with `# run N`; where rows also
use it with other options, `# run N; also --zero 1, --zero 2`. A comment above the table (`measured: computed`, in
tests/lessons_figures.py) has the expressions:

    M1 | 2: ...    what the quoted numbers are here. Within 5%, or what stands behind ~, the verdict must be right or
                   right if, else wrong
    M1 | 3: ...    the numbers of "here", to the printed digits; M1 | 4: those of the verdict

with run3.printed(...), run3(zero=1).sent() and all of tests/lessons_figures.py; and

    arithmetic("what")      the value in the line of docs/claims.py that has the row's name and these words
    agree(a, b)             a, if b is the same to 0.1%; agree(a, b, 2): to 2%
    inside(x, y)            the quoted numbers, pairs of limits, where x and y are inside, else x and y
    quoted                  the quoted numbers

Numbers in `code` are conditions and formulas, and not compared; all others are. "shown by" must name the runs that the
expressions use, and `arithmetic` if they use that. Each command runs once. Then every number of the row is changed, one
at a time, and must be found. A row with four columns (name | quoted | verdict | reference) is by reading. A line
"- M1, M2: ..." says who quotes these rows; all others are marked *(draft)*, and no row is both.

A row that passed before is checked again only if it, its commands, its arithmetic or the sources of the programs
changed (tests/checked.py); the page as a whole always. --record keeps what passed for all. --all checks every row
again; --slice, of the rows that changed, the eighth that TRAIN70B_TEST_SLICE says, and all rows where it is "all".
"""
import argparse
import math
import pathlib
import re
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
sys.path.insert(0, str(ROOT / "tests"))
from checked import RECORD  # noqa: E402
from lessons import parse  # noqa: E402
from lessons_figures import Readme, cells_of, plain  # noqa: E402
from lessons_runs import FigureError, Run, Runner, numbers  # noqa: E402
from predict import Check, UsageError, test_slice  # noqa: E402

ARITHMETIC = "python3 docs/claims.py"
VERDICTS = ("right if", "right", "wrong", "open")
QUOTED, HERE, VERDICT, SHOWN = 2, 3, 4, 5  # columns
TOLERANCE = 0.05  # of a quoted number
RUN = re.compile(r"#\s*run (\d+)(?:; also (.*))?$")


def masked(text):
    """The page without the digits of `code`, names (ZeRO-3) and run N in tables; other numbers keep their places."""
    def letters(match):
        return re.sub(r"\d", "x", match[0])

    def of_line(line):
        return re.sub(r"`[^`]*`|\b[A-Za-z]+-\d|\brun \d+", letters, line) if line.startswith("|") else line
    return "\n".join(map(of_line, text.split("\n")))


def variant(command, options):
    """The command with other values of options, and options that it lacks."""
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        command, count = re.subn(rf"(?<=\s){flag} \S+", f"{flag} {value}", command)
        if count == 0:
            command += f" {flag} {value}"
    return command


class Command:
    """A numbered command of the page, in expressions."""

    def __init__(self, run, number, command, variants, options=None):
        self.run, self.number, self.command, self.variants, self.options = run, number, command, variants, options or {}

    def __call__(self, **options):
        for name, value in options.items():
            text = f"--{name.replace('_', '-')} {value}"
            if text not in self.variants and f" {text} " not in f" {self.command} ":
                raise FigureError(f"run {self.number} with {text}: the page does not say so (# run N; also ...)")
        return Command(self.run, self.number, self.command, self.variants, {**self.options, **options})

    def __getattr__(self, name):
        return getattr(self.run(variant(self.command, self.options)), name)


def agree(a, b, percent=0.1):
    for x, y in zip(*([each] if isinstance(each, (int, float)) else each for each in (a, b)), strict=True):
        if not abs(x - y) <= percent / 100 * abs(y):
            raise FigureError(f"the programs have {x:.10g}, the arithmetic {y:.10g}")
    return a


class Row(Run):
    """The names that the expressions of the page may use."""
    commands = {}

    def names(self, row):
        quoted = [number.value for number in numbers(row[QUOTED - 1])]

        def arithmetic(*what):
            found = []
            for each in what:
                lines = [line.split("  ") for line in self.runner.run(ARITHMETIC).lines]
                values = [cells[2] for cells in lines if cells[:2] == [row[0], each]]
                if len(values) != 1:
                    raise FigureError(f"docs/claims.py has no line \"{row[0]}  {each}\"")
                found.append(float(values[0]))
            return found[0] if len(found) == 1 else found

        def inside(*values):
            limits = zip(quoted[::2], quoted[1::2])
            return [each for (low, high), value in zip(limits, values, strict=True)
                    for each in ((low, high) if low <= value <= high else (value, value))]
        commands = {f"run{number}": Command(self.runner.run, number, *entry) for number, entry in self.commands.items()}
        return {**commands, "arithmetic": arithmetic, "inside": inside, "agree": agree, "quoted": quoted}


class Rows(Runner):
    commands = {}

    def run(self, command):
        if command != "computed":
            return super().run(command)
        row = Row(self, command, [], [])
        row.commands = self.commands
        return row


class Claims(Check):
    """The page against its commands. Check has the comparison of a figure, and writes."""

    def __init__(self, root, programs, slice_=None, announce=None, everything=False):
        super().__init__(root, programs, slice_, everything=everything)
        self.runner = Rows(root, programs, 300, announce)
        self.verdicts = {}  # of each row
        self.passed = {}    # row: what self.record takes of it

    def page(self, path, text, write=False, only=None):
        """Checks the text of the page, or only the figures of one row; --write changes the file."""
        self.read_commands(path, text)
        page, changes = Readme(path, masked(text)), []
        for line, message in page.errors:
            self.error(path, line, message)
        if page.errors:  # of a table: its rows would have no figures
            return
        rows = {}
        for number, line in enumerate(text.split("\n"), 1):
            if re.match(r"\| [A-Z]\d+ \|", line):
                cells = [cell.strip() for cell, _ in cells_of(line)]
                if cells[0] in rows:
                    self.error(path, number, f"{cells[0]} for the second time")
                rows[cells[0]] = (number, cells)
        figures = {name: [figure for figure in page.figures if figure.row[0] == name] for name in rows}
        said = {name for names in re.findall(r"^- ((?:[A-Z]\d+(?:, )?)+):", text, re.M) for name in names.split(", ")}
        for name in sorted(said - rows.keys()):
            self.error(path, 1, f"who says {name}: there is no such row")
        used = set()
        for name, (line, cells) in rows.items():
            before = len(self.errors)
            if (name in said) == ("*(draft)*" in cells[QUOTED - 1]):
                self.error(path, line, f"{name}: who says it? Either a line \"- {name}: ...\" or *(draft)*")
            runs = self.row(path, line, name, cells, figures[name])
            used |= runs
            measured = [figure for figure in figures[name] if not figure.left_out]
            if not measured or only not in (None, name):
                continue
            if only is None:
                entry, commands = self.entry(path, name, cells, measured, runs)
                if self.leave(path, name, entry, measured):
                    continue
            for figure in measured:
                try:
                    changes += self.value(path, figure)
                except FigureError as error:
                    self.error(path, line, f"{name}: {error}")
            if only is None and len(self.errors) == before:
                self.passed[name] = entry, commands
            elif only is None:
                self.record.result(entry, commands, False)
        for number in sorted(self.runner.commands.keys() - used):
            self.error(path, 1, f"run {number}: no row uses it")
        if not rows:
            self.error(path, 1, "the page has no rows")
        if write and changes:
            self.write(path, changes)

    def entry(self, path, name, cells, figures, runs):
        """(line, commands) of a row, for self.record."""
        commands = [self.runner.commands[number] for number in sorted(runs & self.runner.commands.keys())]
        arithmetic = []
        if any("arithmetic(" in figure.expression for figure in figures):
            try:
                lines = [line.split("  ") for line in self.runner.run(ARITHMETIC).lines]
                arithmetic = [cells[1:3] for cells in lines if cells[0] == name]
            except FigureError:
                pass  # the row will say so
        held = [cells, [[figure.column, *figure.held()] for figure in figures], commands, arithmetic]
        commands = [command for command, _ in commands]
        return self.record.line(str(path.relative_to(self.root)), name, commands, held), commands

    def leave(self, path, name, entry, figures):
        """Whether the row is left out: it did not change, or is in another slice."""
        in_slice = self.in_slice(name)
        for figure in figures:
            count = len(numbers(figure.text))
            if self.record.is_known(entry):
                self.add(self.unchanged[path.parent.name], figure.line, count, 1)
            elif not in_slice:
                self.skip(path, figure.line, count, "in another slice")
        self.not_run += self.record.is_known(entry)
        return self.record.is_known(entry) or not in_slice

    def read_commands(self, path, text):
        self.runner.commands.clear()
        for block in parse(text):
            for line, command in self.lessons.commands(block):
                found = RUN.search(command)
                if not found:
                    continue
                number, command = int(found[1]), command[:found.start()].strip()
                if number in self.runner.commands:
                    self.error(path, line, f"run {number} for the second time")
                variants = [each.strip() for each in (found[2] or "").split(",")]
                for each in filter(None, variants):
                    self.known.check(variant(command, dict([each.removeprefix("--").split(" ")])), [], False,
                                     lambda message: self.error(path, line, f"{message}, in run {number}"))
                self.runner.commands[number] = command, variants

    def row(self, path, line, name, cells, figures):
        """What stands in the cells; the numbers of the runs that the row uses."""
        by_reading = len(cells) == SHOWN - 1  # name | quoted | verdict | reference
        verdict = re.match(r"\*\*(.*?)\*\*", cells[VERDICT - 1 - by_reading]) if len(cells) >= SHOWN - 1 else None
        if not verdict or verdict[1] not in VERDICTS:
            self.error(path, line, f"{name}: no verdict among {', '.join(VERDICTS)}")
            return set()
        self.verdicts[name] = verdict[1]
        if by_reading:
            if not re.search(r"https://\S+", cells[-1]):
                self.error(path, line, f"{name}: no reference")
            return set()
        expressions = " ".join(figure.expression for figure in figures)
        used = {int(number) for number in re.findall(r"\brun(\d+)\b", expressions)}
        named = {int(number) for number in re.findall(r"run (\d+)", plain(cells[SHOWN - 1]))}
        if used != named:
            self.error(path, line, f"{name}: says run {sorted(named)}, uses run {sorted(used)}")
        if ("arithmetic(" in expressions) != ("arithmetic" in cells[SHOWN - 1]):
            self.error(path, line, f"{name}: \"arithmetic\" is named or used, and not both")
        if not used and "arithmetic(" not in expressions and verdict[1] != "open":
            self.error(path, line, f"{name}: neither a run nor arithmetic shows it")
        columns = {figure.column for figure in figures}
        if verdict[1] != "open" and HERE not in columns:
            self.error(path, line, f"{name}: no number of it is checked")
        if any(figure.left_out and (verdict[1] != "open" or figure.column != QUOTED) for figure in figures):
            self.error(path, line, f"{name}: only what an open claim quotes is left out")
        return used

    def value(self, path, figure):
        """[change] of a figure that is stale; quoted numbers against the verdict."""
        actual, printed = figure.actual(self.runner), numbers(figure.text)
        for value in actual:
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise FigureError(f"{figure.expression} is {value!r}, no number")
        if figure.column != QUOTED:
            return self.figure(path, figure, printed, actual)
        if len(printed) != len(actual):
            raise FigureError(f"{len(printed)} quoted numbers, {figure.expression} has {len(actual)}")
        good = all(abs(number.value - value) <= (figure.tolerance or TOLERANCE) * abs(value)
                   for number, value in zip(printed, actual))
        self.count(path, figure.line, len(printed))
        verdict = self.verdicts.get(figure.row[0], "open")
        if verdict != "open" and good != verdict.startswith("right"):
            raise FigureError(f"the verdict is \"{verdict}\", but quoted are {[n.value for n in printed]}, "
                              f"here {[float(f'{value:.6g}') for value in actual]}")
        return []


def other(number):
    """The text of a number that differs by more than rounding, and by more than what the verdicts allow."""
    value = number.value
    for changed in (value + 3 * (number.unit or 1), value * 1.5 + 1):
        text = number.like(changed)
        if text != number.text:
            return text
    raise AssertionError(number.text)


def planted(checker, path, text):
    """[what is not found] if one number at a time is wrong, in the rows that passed; those without any are recorded."""
    missed, count, lines, errors = [], 0, text.split("\n"), checker.errors
    page = Readme(path, masked(text))
    for figure in page.figures:
        name, verdict = figure.row[0], checker.verdicts.get(figure.row[0])
        for number in numbers(figure.text) if name in checker.passed else []:
            wrong = [other(number)]
            if figure.column == QUOTED:  # another limit of a range may be as right on one side
                wrong = [number.like(number.value * 3 + 1), number.like(number.value / 3)]
                if not verdict.startswith("right"):
                    continue  # another wrong number is as wrong
            at, line = figure.begin + number.begin, lines[figure.line - 1]
            checker.errors = []
            for each in wrong:
                lines[figure.line - 1] = line[:at] + each + line[at + len(number.text):]
                checker.page(path, "\n".join(lines), only=name)
            lines[figure.line - 1] = line
            count += 1
            if not any(f": {name}: " in error or f" of \"{name}\" " in error for error in checker.errors):
                missed.append(f"{path.name}:{figure.line}: {name}: {wrong[0]} in place of {number.text} is not found")
    for name, (entry, commands) in checker.passed.items():
        checker.record.result(entry, commands, not any(f": {name}: " in each for each in missed))
    checker.record.save()
    checker.errors = errors + missed
    return missed, count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", nargs="?", type=pathlib.Path, help="folder of the programs")
    parser.add_argument("--write", action="store_true", help="correct stale figures in the page")
    parser.add_argument("--list", action="store_true", help="print the rows with their verdicts")
    parser.add_argument("--all", action="store_true", help="every row again")
    parser.add_argument("--slice", action="store_true", help="of what changed an eighth, by TRAIN70B_TEST_SLICE")
    parser.add_argument("--record", action="store_true", help=f"keep what passed in {RECORD}")
    parser.add_argument("--self-test", action="store_true", help="check the check on a small page")
    arguments = parser.parse_args()
    if arguments.self_test:
        from claims_self_test import self_test  # which imports this file
        return self_test()
    if not arguments.bin or not arguments.bin.is_dir():
        parser.error("which folder of programs?")
    if arguments.record and arguments.slice:
        parser.error("--record needs the whole check: leave out --slice")
    try:
        part = test_slice()
    except UsageError as error:
        parser.error(str(error))
    began, path = time.monotonic(), ROOT / "docs/claims.md"

    def announce(command):
        print(f"{time.monotonic() - began:6.1f} s  {command}", file=sys.stderr, flush=True)
    checker = Claims(ROOT, arguments.bin.resolve(), part if arguments.slice and part != "all" else None, announce,
                     arguments.all or part == "all")
    checker.page(path, path.read_text(), arguments.write)
    if arguments.list:
        for name, verdict in checker.verdicts.items():
            print(f"{name:4} {verdict}")
    for each in checker.written:
        print(f"wrote {each}")
    figures, unchanged = checker.checked[path.parent.name][1], checker.unchanged[path.parent.name][1]
    missed, count = planted(checker, path, path.read_text())
    print(f"{count} wrong figures planted, one at a time: {count - len(missed)} found")
    checker.report_runs("claim", time.monotonic() - began)
    if arguments.record:
        checker.save([str(path.relative_to(ROOT))])
    for error in checker.errors:
        print(error)
    print(f"{len(checker.verdicts)} claims, {figures} numbers checked, {unchanged} unchanged: " +
          (f"{len(checker.errors)} differences" if checker.errors else "every figure is what its command gives"))
    return bool(checker.errors)


if __name__ == "__main__":
    sys.exit(main())
