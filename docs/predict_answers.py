"""The questions of predict.py: what an answer means, how far it is from the figure, and the points for it."""
import dataclasses
import pathlib
import re
import sys

from lessons_printed import numbers

UNITS = {"": 1, "b": 1, "bytes": 1, "k": 1e3, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20,
         "gib": 2**30, "m": 1e6, "g": 1e9, "million": 1e6, "thousand": 1e3}
LEVELS = [(10, "exact"), (7, "within 10%"), (4, "within a factor of 2"), (1, "the right direction"), (0, "missed")]
SKIPPED = ("?", "")
MOST = 1e100


class UsageError(Exception):
    pass


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
        if not first or first.row == self.figure.row:
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
            self.say(f"    known: {figure.first.label}: {figure.first.text.strip()} ({figure.head})")
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
        self.say(f"    row: {' | '.join(asked.figure.cells)}  ({result['table']})")
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
        if not pathlib.Path(path).is_file() and pathlib.Path(path).exists():
            raise UsageError(f"--answers {path}: is not a regular file")
        lines = pathlib.Path(path).read_text("utf-8").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--answers {path}: {getattr(error, 'strerror', None) or 'is no text'}") from None
    answers = []
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
