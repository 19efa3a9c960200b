#!/usr/bin/env python3
"""Predict, then run: asks the questions of a chapter, runs its commands, and scores the answers.

    python3 docs/predict.py 05 [--question N] [--build build] [--list]     --list: the questions only, runs nothing
    python3 docs/predict.py 05 --answers FILE [--json]                     one answer per line, for a teacher's script
    python3 docs/predict.py --check [NN ...] [--write] [--all] [--record]  every printed number against its command
                                                                           (without NN also README.md's and docs/appendix.md's)

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
sys.path.insert(0, str(ROOT / "tests"))
from checked import RECORD, Checked  # noqa: E402
from lessons import Lessons  # noqa: E402
from lessons_commands import Commands  # noqa: E402
from lessons_figures import FigureError, Readme, Runner, numbers  # noqa: E402

UNITS = {"": 1, "b": 1, "bytes": 1, "k": 1e3, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20,
         "gib": 2**30, "m": 1e6, "g": 1e9, "million": 1e6, "thousand": 1e3}
LEVELS = [(10, "exact"), (7, "within 10%"), (4, "within a factor of 2"), (1, "the right direction"), (0, "missed")]
SKIPPED = ("?", "")
MOST = 1e100


class UsageError(Exception):
    pass


# ---- answers ---------------------------------------------------------------------------------------------------------

def counted(n, word):
    return f"{n} {word}{'' if n == 1 else 's'}"


def parse_answer(text):
    """(kind, number): kind is "same", "%", "/", "bytes" or "number"; None: skipped."""
    text = text.strip().lower().replace(",", "").replace("−", "-")
    if text in SKIPPED:
        return None
    if text in ("same", "the same"):
        return "same", 0.0
    fraction = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*/\s*([0-9]+(?:\.[0-9]+)?)", text)
    match = re.fullmatch(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*(%|[a-z]*)", text)
    kind = None
    if fraction and 0 < float(fraction[2]) < MOST:
        kind, value = "/", float(fraction[1]) / float(fraction[2])
    elif match and match[2] == "%":
        kind, value = "%", float(match[1]) / 100
    elif match and match[2] in UNITS:
        kind, value = "bytes" if "b" in match[2] else "number", float(match[1]) * UNITS[match[2]]
    short = text if len(text) <= 40 else text[:40] + "..."
    if kind is None:
        raise UsageError(f"\"{short}\" is no number; valid: 4096, 1.5 MB, 2 GiB, 27%, 3/16, same, or ? to skip")
    if not abs(value) < MOST:
        raise UsageError(f"\"{short}\" is too large")
    return kind, value


@dataclasses.dataclass
class Asked:
    """A question with what the README prints about it."""
    number: int
    question: object

    @property
    def figure(self):
        return self.question.figure

    @property
    def printed(self):
        return numbers(self.figure.text)[self.question.index]

    @property
    def is_percent(self):
        printed = self.printed
        return self.figure.text[printed.begin + len(printed.text):].lstrip().startswith("%")

    @property
    def scale(self):
        """(name, bytes) of the figure's unit, where the question says that it is GB or MB."""
        unit = re.search(r"\b[GM]B\b", self.question.text)
        if not unit or self.is_percent or self.printed.value > 1e5:
            return "", 1.0
        return unit[0], UNITS[unit[0].lower()]

    @property
    def first(self):
        """What the same column has in the table's first row: known to the reader. None: nothing."""
        first = self.figure.first
        if not first or first is self.figure or first.left_out:
            return None
        found = numbers(first.text)
        return found[self.question.index].value if self.question.index < len(found) else None

    def value(self, answer):
        """The answer in the figure's unit."""
        kind, value = answer
        if kind == "bytes":
            return value / self.scale[1]
        if kind == "same":
            if self.first is None:
                raise UsageError("\"same\" as what? This question has no first row to compare with")
            return self.first
        if kind == "number":
            return value
        if self.is_percent:
            return 100 * value
        share_of_first = self.first is not None and not self.printed.unit  # bytes and counts
        return value * self.first if share_of_first else value

    def form(self, value):
        text = f"{value:,.0f}" if float(value).is_integer() and 1000 <= abs(value) < 1e15 else f"{value:.9g}"
        return text + ("%" if self.is_percent else f" {self.scale[0]}".rstrip())

    def points(self, predicted, actual):
        """(points, why, relative error)"""
        error = abs(predicted - actual) / abs(actual) if actual else float("inf") if predicted else 0.0
        factor = max(predicted / actual, actual / predicted) if predicted * actual > 0 else float("inf")
        first = self.first
        if first is not None and abs(actual - first) <= 1e-5 * abs(first):  # nothing between is nearly right
            return (*(LEVELS[0] if error <= 0.01 else (0, "it does not change")), error)
        wrong_direction = first is not None and (predicted - first) * (actual - first) <= 0
        if error <= 1e-3 or self.printed.agrees(predicted):
            level = 0
        elif error <= 0.1:
            level = 1
        elif factor <= 2 and not wrong_direction:
            level = 2
        elif first is not None and (predicted - first) * (actual - first) > 0:
            level = 3
        else:
            level = 4
        points, name = LEVELS[level]
        if level == 4 and wrong_direction:
            name = "no change predicted" if predicted == first else "the wrong direction"
        return points, name, error


class Quiz:
    def __init__(self, readme, runner, out):
        self.readme, self.runner, self.out = readme, runner, out
        self.asked = [Asked(i, question) for i, question in enumerate(readme.questions, 1)]

    def say(self, text=""):
        print(text, file=self.out, flush=True)

    def situation(self, asked):
        figure, number = asked.figure, asked.number
        self.say(f"\nQuestion {number} of {len(self.asked)}")
        self.say(f"    {figure.command}")
        if asked.first is not None:
            self.say(f"    known: {figure.first.name}: {figure.first.text.strip()} ({figure.head})")
        self.say(asked.question.text)

    def score(self, asked, answer):
        """Runs the command; the result as a dictionary."""
        figure = asked.figure
        actual = figure.actual(self.runner)[asked.question.index]
        predicted = asked.value(answer)
        points, name, error = asked.points(predicted, actual)
        path = self.readme.path.relative_to(self.readme.path.parents[1])
        see = asked.question.see
        return {"question": asked.number, "text": asked.question.text, "command": figure.command, "row": figure.label,
                "predicted": predicted, "actual": actual, "relative_error": error if error < float("inf") else None,
                "points": points, "result": name, "see": f"{path}:{self.readme.line_of(see)}, \"{see}\"" if see != "-"
                else f"{path}:{figure.line}", "table": f"{path}:{figure.line}"}

    def show(self, result, asked):
        error = result["relative_error"]
        self.say(f"    predicted {asked.form(result['predicted'])}   actual {asked.form(result['actual'])}   "
                 f"error {'-' if error is None else f'{error:.1%}'}   {result['result']}: "
                 f"{counted(result['points'], 'point')}")
        self.say(f"    row: {' | '.join(asked.figure.row) or asked.figure.label}  ({result['table']})")
        self.say(f"    why: {result['see']}")

    def table(self, results):
        rows = [["question", "points", "predicted", "actual", "result"]]
        for each in results:
            form = self.asked[each["question"] - 1].form
            rows.append([str(each["question"]), str(each["points"]), form(each["predicted"]), form(each["actual"]),
                         each["result"]])
        widths = [max(map(len, column)) for column in zip(*rows)]
        self.say()
        for *numbers_, result in rows:
            self.say("  ".join([each.rjust(width) for each, width in zip(numbers_, widths)] + [result]))

    def run(self, chosen, answers=None):
        """[result] of the questions, answered from the list, or from the keyboard."""
        results = []
        for i, asked in enumerate(chosen):
            self.situation(asked)
            answer = answers[i] if answers is not None else self.prompt(asked)
            if answer == "end":
                break
            if answer is None:
                self.say("    skipped")
                continue
            self.say(f"    running: {asked.figure.command}")
            results.append(self.score(asked, answer))
            self.show(results[-1], asked)
        if len(results) > 1:
            self.table(results)
        points = sum(each["points"] for each in results)
        self.say(f"\n{points} of {LEVELS[0][0] * len(results)} points for {counted(len(results), 'answer')}"
                 + (f", {len(chosen) - len(results)} skipped" if len(results) < len(chosen) else ""))
        return results

    def prompt(self, asked):
        while True:
            print("> ", end="", file=self.out, flush=True)
            line = sys.stdin.readline()
            if not line:
                self.say()
                return "end"
            try:
                answer = parse_answer(line)
                if answer:
                    asked.value(answer)
                return answer
            except UsageError as error:
                self.say(f"    {error}")


def read_answers(path, chosen):
    try:
        if pathlib.Path(path).exists() and not pathlib.Path(path).is_file() and not pathlib.Path(path).is_dir():
            raise UsageError(f"--answers {path}: is not a regular file")
        lines = pathlib.Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--answers {path}: {getattr(error, 'strerror', None) or 'is no text'}") from None
    answers = []
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) > len(chosen):
        raise UsageError(f"--answers {path} has {len(lines)} lines for {len(chosen)} questions")
    for number, (asked, line) in enumerate(zip(chosen, lines), 1):
        try:
            answers.append(parse_answer(line))
            if answers[-1]:
                asked.value(answers[-1])
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
    return answers + [None] * (len(chosen) - len(answers))


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
    parser.add_argument("chapter", nargs="*", help="01 to 08")
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
        if not arguments.chapter:  # figures, no questions
            readmes += [path for path in (ROOT / "README.md", ROOT / "docs/appendix.md") if path.is_file()]
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
