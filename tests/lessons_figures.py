"""The figures of the lessons: which command prints each number of a README, and docs/predict.py's questions about them.
They stand in HTML comments above a table, a paragraph or a fence, like tests/lessons.py's `prints:`.

    <!-- measured: COMMAND      of every row. {1}: the text of the row's first cell, or its code if it has any;
                                {1:REGEX}: the regular expression's group in it. "computed": without a command
    row LABEL: COMMAND          another command for the row that begins with LABEL
    3: EXPRESSION               the numbers in column 3; also "3, 5-7"
    LABEL | 3: EXPRESSION       in column 3 of the row that begins with LABEL
    "4.97": EXPRESSION          above a paragraph: this number of it (with other words, so that it stands there once)
    left out 3, 5-7: WHY        columns; also left out row LABEL, left out LABEL | 3; of a paragraph left out "4.97"
    labels: 1-2                 columns that only name the row (default: 1)
    slow: WHY -->               the commands run only with --all
    <!-- not measured: WHY -->  the whole table or paragraph
    <!-- ask: LABEL | 3 | SEE: TEXT -->   a question about the number in that row and column (3.2: the second number
                                there); of a paragraph "4.97" in place of LABEL | 3; in a fence two spaces separate
                                columns. SEE: words of the README that begin the explanation. Where the figure is in
                                GB or MB, TEXT says so ("How many GB ...")

An EXPRESSION is Python, and its value a number or a list of them:

    step(4).loss                in the line of step 4 in the metrics (--metrics is added to the command)
    peak("grads")               bytes of rank 0 in the last step; ranks("grads"): of each rank
    sent("dp.all_reduce")       bytes that rank 0 sent in the last step; without a name: all but losses and norms
    last(10)                    the mean loss of the last ten steps
    printed("label", 2, after="title", below=1)
                                number in the second column of the output's line whose first column is "label" (two
                                spaces: of its first columns), behind the line that begins with "title"; below=1: of
                                the line below it
    pattern("regex")            the numbers that are its groups, in the output
    run("COMMAND")              an object with all of these, for another command
    command, row, head, column  the command, the texts of the row's cells, the column's heading and number
    ... ~ 1%   ... ~ 65536      the figure may differ by so much

Whole numbers must be equal, others to the printed digits, and 5e-6 beside: another CPU's matrix products round
differently. All programs run on the CPU, with one thread per rank.
"""
import dataclasses
import re

from lessons_runs import NUMBER, FigureError, numbers
from lessons_text import parse

ABOVE = "measured: or not measured: above says where from"


# ---- what stands in a README ----------------------------------------------------------------------------------------

@dataclasses.dataclass
class Figure:
    """A cell of a table, or a number of a paragraph."""
    line: int
    label: str                 # of its row
    head: str                  # of its column
    text: str
    begin: int                 # of the text in its line
    command: str = ""
    expression: str = ""
    tolerance: float = 0.0     # relative
    slack: float = 0.0         # absolute
    left_out: str = ""         # why
    slow: str = ""
    row: list = dataclasses.field(default_factory=list)
    first: object = None       # the figure in the table's first row
    column: int = 0
    name: str = ""             # of its row, short

    def actual(self, runner):
        return runner.run(self.command).evaluate(self.expression, self.row, self.head, self.column)


@dataclasses.dataclass
class Question:
    line: int
    see: str
    text: str
    figure: object
    index: int                 # of the number in the figure's text


def columns(text):
    found = []
    for part in text.split(","):
        begin, _, end = part.strip().partition("-")
        found += range(int(begin), int(end or begin) + 1)
    return found


def plain(cell):
    return re.sub(r"[`*]", "", cell).strip()


def begins(text, words):
    return text.startswith(words) and not re.match(r"\w", text[len(words):])


def cells_of(line):
    """[(text, begin)] of a table's row."""
    found, begin = [], line.index("|") + 1
    for match in re.finditer(r"(?<!\\)\|", line):
        if match.start() >= begin:
            found.append((line[begin:match.start()], begin))
            begin = match.end()
    return found


class Directive:
    """The entries of a `measured:` comment."""

    def __init__(self, text):
        lines = re.sub(r"\\\n\s*", "", text).split("\n")
        self.command, self.rows, self.values, self.outs, self.labels, self.slow = lines[0].strip(), {}, {}, {}, [1], ""
        for line in filter(None, map(str.strip, lines[1:])):
            match = re.match(r'((?:left out )?"[^"]*"|[^:]*): (.*)$', line)
            if not match:
                raise FigureError(f"\"{line}\" is no entry of measured:")
            key, value = match[1].strip(), match[2].strip()
            if key == "slow":
                self.slow = value
            elif key == "labels":
                self.labels = columns(value)
            elif key.startswith("row "):
                self.rows[key[4:]] = value
            else:
                entries = self.outs if key.startswith("left out ") else self.values
                entries[key.removeprefix("left out ")] = value

    def command_of(self, row, label_matches):
        command = self.command
        for label, other in self.rows.items():
            if label_matches(label):
                command = other

        def cell(match):
            text = row[int(match[1]) - 1]
            text = " ".join(re.findall(r"`([^`]+)`", text)) or plain(text)
            found = re.search(match[2] or "(.*)", text)
            if not found:
                raise FigureError(f"{match[0]} is not in the row \"{text}\"")
            return found[1]
        return " ".join(re.sub(r"\{(\d)(?::([^}]*))?\}", cell, command).split())

    def entry(self, entries, label_matches, column):
        """(value, key) of the entry for a cell: those of a row before those of a column."""
        of_row, of_column = None, None
        for key, value in entries.items():
            label, bar, numbers_ = key.rpartition("|")
            if key.startswith("row ") and label_matches(key[4:]):
                of_row = of_row or value
            elif bar and column in columns(numbers_) and label_matches(label.strip()):
                of_row = value
            elif not bar and re.fullmatch(r"[\d, -]+", key) and column in columns(key):
                of_column = value
        return of_row or of_column or ""


class Readme:
    """Figures, fences and questions of a README; what is wrong with its directives."""

    def __init__(self, path):
        self.path, self.figures, self.fences, self.questions = path, [], [], []
        self.errors, self.unsaid = [], []  # [(line, message)]: of directives; of numbers without any
        text = path.read_text()
        # ask: and measured: may name a heading or any words, outside of comments
        self.words = " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.S).split())
        section = ""
        for block in parse(text):
            if block.kind == "text" and block.lines and block.lines[0].startswith("#"):
                section = block.lines[0].lstrip("#").strip()
            try:
                self.read(block, section)
            except (FigureError, ValueError, IndexError) as error:
                self.errors.append((block.directives[0][2] if block.directives else block.line, str(error)))

    def read(self, block, section):
        found = {name: (text, line) for name, text, line in block.directives}
        asks = [(text, line) for name, text, line in block.directives if name == "ask"]
        is_table = block.kind == "text" and len(block.lines) > 2 and all(each.startswith("|") for each in block.lines)
        figures = []
        if "measured" in found:
            directive = Directive(found["measured"][0])
            if block.kind == "fence" or not block.lines:
                raise FigureError("measured: no table and no paragraph behind it")
            figures = self.table(block, directive) if is_table else self.paragraph(block, directive)
        elif name := next((each for each in ("prints", "prints times", "prints slow") if each in found), ""):
            self.fences.append((block, *found[name], name))
            figures = self.fence(block, found[name][0])
        elif is_table and "not measured" not in found:
            cells = [plain(each) for line in block.lines[2:] for each, _ in cells_of(line)[1:]]
            if count := sum(bool(NUMBER.match(each)) for each in cells):
                self.unsaid.append((block.line, f"a table with {count} numbers: {ABOVE}"))
        elif block.kind == "text" and section == "Predict, then run" and not found:
            precise = [n for n in numbers(re.sub(r"`[^`]*`|\]\([^)]*\)", "", " ".join(block.lines)))
                       if "," in n.text or n.unit]
            if precise:
                self.unsaid.append((block.line, f"{precise[0].text}: {ABOVE}"))
        if "measured" in found:
            self.figures += figures
        for text, line in asks:
            self.ask(" ".join(text.split()), line, figures)

    def table(self, block, directive):
        head, figures, firsts = [plain(text) for text, _ in cells_of(block.lines[0])], [], {}
        used = set()
        for number, line in list(enumerate(block.lines, block.line))[2:]:
            cells = cells_of(line)
            row = [text for text, _ in cells]
            label = " ".join(" ".join(plain(text) for text in row).split())

            def matches(wanted):
                good = plain(row[0]) == wanted or begins(label, wanted) and \
                    not any(plain(cells_of(other)[0][0]) == wanted for other in block.lines[2:])
                if good:
                    used.add(wanted)
                return good
            command = directive.command_of(row, matches)
            for column, (text, begin) in enumerate(cells, 1):
                if column in directive.labels or not numbers(text):
                    continue
                value = directive.entry(directive.values, matches, column)
                out = directive.entry(directive.outs, matches, column)
                if not value and not out:
                    raise FigureError(f"column {column} of the row \"{label}\" has numbers, but no entry")
                figure = Figure(number, label, head[column - 1], text, begin, command, *self.tolerance(value), out,
                                directive.slow, [plain(each) for each in row], column=column)
                names = [plain(row[each - 1]) for each in directive.labels]
                names = [f"{head[each - 1]} {name}" if NUMBER.fullmatch(name) else name
                         for each, name in zip(directive.labels, names)]
                figure.name = " ".join(names) or "the first row"
                figure.first = None if out else firsts.setdefault(column, figure)
                figures.append(figure)
        for key in [*directive.rows, *directive.values, *directive.outs]:
            label = key.removeprefix("row ").rpartition("|")[0].strip() if "|" in key else \
                key.removeprefix("row ") if key in directive.rows or key.startswith("row ") else ""
            if label and label not in used:
                raise FigureError(f"no row begins with \"{label}\"")
        return figures

    def tolerance(self, value):
        """(expression, relative tolerance, absolute tolerance)"""
        match = re.fullmatch(r"(.*?) ~ ([\d.]+)(%?)", value)
        if not match:
            return value, 0.0, 0.0
        return match[1], float(match[2]) / 100 if match[3] else 0.0, 0.0 if match[3] else float(match[2])

    def paragraph(self, block, directive):
        figures, text = [], "\n".join(block.lines)
        for out, entries in ((False, directive.values), (True, directive.outs)):
            for key, value in entries.items():
                words = key.strip('"')
                if not key.startswith('"') or text.count(words) != 1:
                    raise FigureError(f"{key} does not stand in the paragraph once")
                at = text.index(words)
                line = text[:at].count("\n")
                begin = at - (text.rfind("\n", 0, at) + 1)
                figures.append(Figure(block.line + line, words, "", words, begin, " ".join(directive.command.split()),
                                      *self.tolerance("" if out else value), value if out else "", directive.slow))
        return figures

    def fence(self, block, command):
        """Figures for questions only: the fence is compared as a whole."""
        figures = []
        for number, line in enumerate(block.lines, block.line):
            cells = re.split(r"\s{2,}", line.strip())
            for column, text in enumerate(cells, 1):
                figures.append(Figure(number, cells[0], "", text, line.index(text), command,
                                      f"printed({cells[0]!r}, {column})", column=column))
        return figures

    def ask(self, text, line, figures):
        match = re.match(r'(?:"(?P<words>[^"]*)"|(?P<label>.*?) \| (?P<column>\d+)(?:\.(?P<index>\d))?) \| '
                         r'(?P<see>[^:|]*?): (?P<text>.*)$', text)
        if not match:
            return self.errors.append((line, "ask: is LABEL | COLUMN | SEE: TEXT, or \"NUMBER\" | SEE: TEXT"))
        if match["words"]:
            found = [each for each in figures if each.label == match["words"]]
        else:
            in_column = [each for each in figures if each.column == int(match["column"])]
            found = [each for each in in_column if each.label == match["label"] or
                     match["label"] in (each.name, each.row and each.row[0])]
            found = found or [each for each in in_column if begins(each.label, match["label"])]
        index = int(match["index"] or 1) - 1
        if len(found) != 1 or found[0].left_out or index >= len(numbers(found[0].text)):
            return self.errors.append((line, f"ask: \"{text.split(':')[0]}\" is not one figure that is measured"))
        if match["see"] != "-" and match["see"] not in self.words:
            self.errors.append((line, f"ask: \"{match['see']}\" does not stand in the README"))
        self.questions.append(Question(line, match["see"], match["text"], found[0], index))

    def line_of(self, words):
        """The first line, outside of comments, in which the words stand."""
        inside = False
        for number, line in enumerate(self.path.read_text().split("\n"), 1):
            inside = inside or line.lstrip().startswith("<!--")
            if not inside and words in line:
                return number
            inside = inside and "-->" not in line
        return 1
