"""What the commands of the lessons print, held to the pages: the lines of every `prints:`. Each command runs once, in
an empty folder that looks like the repository's root, on the CPU, with one thread per rank. And docs/predict.py's
questions:

    <!-- ask: LABEL | 3 | SEE: TEXT -->   between `prints:` and its table or fence: a question about the number in the
                                          row that begins so and in this column (3.2: the second number there; in a
                                          fence two spaces separate columns). SEE: words of the README that begin the
                                          explanation. Where the figure is in GB or MB, TEXT says so ("How many GB")

Whole numbers must be equal, others to the printed digits, and 5e-6 beside: another CPU's matrix products round
differently. Of `prints times:` only whole numbers count.
"""
import collections
import dataclasses
import re
import subprocess

import programs
from lessons_commands import working_folder
from lessons_text import parse

NUMBER = re.compile(r"(?<![\w.])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[−+-]?\d+)?(?:·10[⁻⁰¹²³⁴-⁹]+)?"
                    r"(?!\w|\.\d)")
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
ROUNDING = 5e-6  # relative


class FigureError(Exception):
    """What is wrong with a directive or its command, in one line."""


@dataclasses.dataclass
class Number:
    """A number as it is printed."""
    begin: int
    text: str

    @property
    def value(self):
        mantissa, _, power = self.text.partition("·10")
        value = float(mantissa.replace(",", "").translate(SUPERSCRIPTS))
        return value * 10.0 ** int(power.translate(SUPERSCRIPTS)) if power else value

    @property
    def unit(self):
        """Of the last digit; 0: a whole number."""
        match = re.fullmatch(r"[+−-]?[\d,]+(?:\.(\d+))?(?:e(.+))?(?:·10(.+))?", self.text)
        power = int((match[2] or match[3] or "0").translate(SUPERSCRIPTS))
        return 10.0 ** (power - len(match[1] or "")) if match[1] or power else 0.0

    def agrees(self, actual):
        return abs(actual - self.value) <= self.unit / 2 * 1.000002 + (ROUNDING if self.unit else 0) * abs(self.value)


def numbers(text):
    return [Number(match.start(), match[0]) for match in NUMBER.finditer(text)]


def agree(shown, printed, times=False):
    """Whether two lines agree, however many spaces they have; times: but for numbers with a decimal point."""
    def words(line):
        return NUMBER.sub("#", line).split()
    return words(shown) == words(printed) and all(
        a.agrees(b.value) or times and a.unit for a, b in zip(numbers(shown), numbers(printed)))


class Runner:
    """Runs each command once; its lines."""

    def __init__(self, root, binaries, limit=300.0, announce=None):
        self.root, self.bin, self.limit, self.announce, self.runs = root, binaries, limit, announce, {}

    def run(self, command):
        if command not in self.runs:
            if self.announce:
                self.announce(command)
            try:
                self.runs[command] = self.start(command)
            except FigureError as error:
                self.runs[command] = error
        if isinstance(self.runs[command], FigureError):
            raise self.runs[command]
        return self.runs[command]

    def start(self, command):
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                       "EMULATE_GPUS": "0"}
        with working_folder(self.root, self.bin) as folder:
            code, out, err = programs.run(["bash", "-c", command], self.limit, environment, cwd=folder,
                                          stdin=subprocess.DEVNULL)
        if code is None:
            raise FigureError(f"{command} did not end within {self.limit:g} s")
        if code != 0:
            raise FigureError(f"{command} ended with {code}: {(err or out).strip().splitlines()[-1:]}")
        return [*(each.rstrip() for each in out.split("\n")), ""]


# ---- what stands in a README ----------------------------------------------------------------------------------------

@dataclasses.dataclass
class Shown:
    """A fence, table or paragraph with what a command prints."""
    block: object
    command: str
    times: bool = False
    slow: bool = False

    def printed(self, lines):
        """The same part of the command's output."""
        parts = [lines[i:lines.index("", i)] for i, each in enumerate(lines)
                 if each and agree(self.block.lines[0], each, self.times)]
        if not parts:
            raise FigureError(f"the output of {self.command} has no line \"{self.block.lines[0]}\"")
        return next(filter(self.agrees, parts), parts[0])

    def agrees(self, printed):
        return len(printed) == len(self.block.lines) and all(
            agree(a, b, self.times) for a, b in zip(self.block.lines, printed))


@dataclasses.dataclass
class Figure:
    """A cell of what is shown."""
    shown: Shown
    row: int                   # among its lines
    column: int                # from 1
    first: object = None       # of a table: the figure in this column's first row with numbers

    @property
    def cells(self):
        return cells_of(self.shown.block.lines[self.row])

    command = property(lambda self: self.shown.command)
    line = property(lambda self: self.shown.block.line + self.row)
    text = property(lambda self: self.cells[self.column - 1])
    head = property(lambda self: "" if self.first is None else cells_of(self.shown.block.lines[0])[self.column - 1])
    label = property(lambda self: self.cells[0] or "the first row")

    def actual(self, runner):
        """The numbers that the command prints there."""
        lines = self.shown.printed(runner.run(self.command))
        cells = cells_of(lines[self.row]) if self.row < len(lines) else []
        if self.column > len(cells):
            raise FigureError(f"the output of {self.command} has no row \"{self.label}\" with column {self.column}")
        return [each.value for each in numbers(cells[self.column - 1])]


@dataclasses.dataclass
class Question:
    line: int
    see: str
    text: str
    figure: Figure
    index: int                 # of the number in the figure's text


def cells_of(line):
    """The texts of a row: of a table, or of a fence, where two spaces separate them."""
    if not line.startswith("|"):
        return re.split(r"\s{2,}", line.strip())
    return [re.sub(r"[`*]", "", cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


class Readme:
    """What commands print in a README, and the questions about it; what is wrong with the directives."""

    def __init__(self, path):
        self.path, self.shown, self.questions, self.errors = path, [], [], []  # errors: [(line, message)]
        text = path.read_text("utf-8")
        # ask: may name a heading or any words, outside of comments
        self.words = " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.S).split())
        for block in parse(text):
            shown = None
            for name, command, line in block.directives:
                if not name.startswith("prints"):
                    continue
                if not block.lines:
                    self.errors.append((line, "prints: nothing behind it"))
                    continue
                shown = Shown(block, " ".join(command.split()), name == "prints times", name == "prints slow")
                self.shown.append(shown)
            for name, text, line in block.directives:
                if name == "ask":
                    self.ask(" ".join(text.split()), line, shown)

    def ask(self, text, line, shown):
        match = re.match(r"(?P<label>.*?) \| (?P<column>\d+)(?:\.(?P<index>\d))? \| (?P<see>[^:|]*?): (?P<text>.*)$",
                         text)
        if not match or not shown:
            return self.errors.append((line, "ask: is LABEL | COLUMN | SEE: TEXT, between prints: and its lines"))
        figure = self.figure(shown, match["label"], int(match["column"]))
        index = int(match["index"] or 1) - 1
        if not figure or index >= len(numbers(figure.text)):
            return self.errors.append((line, f"ask: \"{text.split(':')[0]}\" is not one figure that is printed"))
        if match["see"] != "-" and match["see"] not in self.words:
            self.errors.append((line, f"ask: \"{match['see']}\" does not stand in the README"))
        self.questions.append(Question(line, match["see"], match["text"], figure, index))

    def figure(self, shown, label, column):
        """Of the row whose first cell is the label, or which begins with it; None, unless there is one."""
        is_table = shown.block.lines[0].startswith("|")
        rows = [(i, cells_of(line)) for i, line in enumerate(shown.block.lines) if i >= 2 * is_table]
        rows = [(i, cells) for i, cells in rows if len(cells) >= column and numbers(cells[column - 1])]
        found = [i for i, cells in rows if cells[0] == label] or \
                [i for i, cells in rows if re.match(re.escape(label) + r"(?!\w)", " ".join(" ".join(cells).split()))]
        first = Figure(shown, rows[0][0], column) if rows and is_table else None
        return Figure(shown, found[0], column, first) if len(found) == 1 else None

    def line_of(self, words):
        """The first line, outside of comments, in which the words stand."""
        inside = False
        for number, line in enumerate(self.path.read_text("utf-8").split("\n"), 1):
            inside = inside or line.lstrip().startswith("<!--")
            if not inside and words in line:
                return number
            inside = inside and "-->" not in line
        return 1


def commands_of(path):
    """{command: [Shown]} of a page."""
    found = collections.defaultdict(list)
    for shown in Readme(path).shown:
        found[shown.command].append(shown)
    return found


def check(lessons, runner, path, shown):
    """Holds a part of the page to its command, which runs; [Change] of what is stale."""
    block = shown.block
    try:
        printed = shown.printed(runner.run(shown.command))
    except FigureError as error:
        lessons.error(path, block.line, str(error))
        return []
    return [] if shown.agrees(printed) else lessons.differs(path, block, printed, f"the output of {shown.command}")
