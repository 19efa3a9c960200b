"""What the commands of the lessons print, held to the pages: every figure (lessons_figures.py) and every fence of
`prints:`. Bytes and counts exactly, losses to the printed digits and 5e-6 (another CPU's matrix products round
differently), times not at all. Each command runs once, in an empty folder that looks like the repository's root."""
import collections
import dataclasses
import re

from lessons_figures import Readme
from lessons_runs import FigureError, Runner, numbers
from lessons_text import Change


@dataclasses.dataclass
class Held:
    """What of a page is held to one command."""
    figures: list = dataclasses.field(default_factory=list)
    fences: list = dataclasses.field(default_factory=list)  # (block, whether only the words of times must be right)
    slow: str = ""                                          # why it runs only with --all


def commands_of(path):
    """{command: Held} of a page."""
    page, found = Readme(path), collections.defaultdict(Held)
    for figure in page.figures:
        if not figure.left_out:
            found[figure.command].figures.append(figure)
            found[figure.command].slow = found[figure.command].slow or figure.slow
    for block, command, _, name in page.fences:
        found[command].fences.append((block, name == "prints times"))
        found[command].slow = found[command].slow or "takes minutes" * (name == "prints slow")
    return found


class Printed:
    """lessons (lessons.py) takes what is wrong."""

    def __init__(self, lessons, limit=600, announce=None):
        self.lessons, self.runner = lessons, Runner(lessons.root, lessons.bin, limit, announce)

    def check(self, path, command, held):
        """Runs the command; [Change] of what is stale."""
        lines = [figure.line for figure in held.figures] + [block.line for block, _ in held.fences]
        try:
            run = self.runner.run(command)
        except FigureError as error:
            self.lessons.error(path, lines[0], str(error))
            return []
        changes = []
        for figure in held.figures:
            try:
                changes += self.figure(path, figure, run)
            except FigureError as error:
                self.lessons.error(path, figure.line, str(error))
        for block, times in held.fences:
            changes += self.fence(path, block, times, command, run.lines)
        return changes

    def figure(self, path, figure, run):
        changes, printed = [], numbers(figure.text)
        actual = run.evaluate(figure.expression, figure.row, figure.head, figure.column)
        if len(printed) != len(actual):
            raise FigureError(f"{figure.label}: \"{figure.text.strip()}\" has {len(printed)} numbers, "
                              f"{figure.expression} has {len(actual)}")
        for number, value in zip(printed, actual):
            if not isinstance(value, (int, float)):
                raise FigureError(f"{figure.expression} is {value!r}, no number")
            if not number.agrees(value, figure.tolerance, figure.slack):
                new = number.like(value)
                name = f"column \"{figure.head}\" of \"{figure.name}\"" if figure.head else "the text"
                self.lessons.error(path, figure.line,
                                   f"{name} has {number.text}, today {new} ({value!r}), by: {figure.command}")
                changes.append(Change(figure.line, figure.begin + number.begin, number.text, new,
                                      "" if figure.head else figure.label))
        return changes

    def fence(self, path, block, times, command, lines):
        """times: numbers with a decimal point may differ."""
        def words(line):
            return re.sub(r"\d+\.\d+", "#" if times else r"\g<0>", line).split()
        begin = next((i for i, each in enumerate(lines) if words(each) == words(block.lines[0])), None)
        if begin is None:
            self.lessons.error(path, block.line, f"the output of {command} has no line \"{block.lines[0]}\"")
            return []
        end = next((i for i in range(begin, len(lines)) if not lines[i]), len(lines))
        table = lines[begin:end]
        if [words(each) for each in table] == [words(each) for each in block.lines]:
            return []
        return self.lessons.differs(path, block, table, f"the output of {command}")
