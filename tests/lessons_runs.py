"""What a command prints and writes, run once for all figures that are taken of it: its lines, tables and files."""
import dataclasses
import json
import math
import pathlib
import re
import subprocess

import programs
from lessons_commands import working_folder

NUMBER = re.compile(r"(?<![\w.])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[−+-]?\d+)?(?:·10[⁻⁰¹²³⁴-⁹]+)?"
                    r"(?!\w|\.\d)")
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
ROUNDING = 5e-6  # relative
BUILTINS = {"abs": abs, "float": float, "int": int, "len": len, "log": math.log, "max": max, "min": min, "range": range,
            "round": round, "str": str, "sum": sum, "zip": zip}


class FigureError(Exception):
    """What is wrong with a directive or its command, in one line."""


class Record(dict):
    __getattr__ = dict.__getitem__


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

    def agrees(self, actual, tolerance=0.0, slack=0.0):
        value, unit = self.value, self.unit
        if not unit and float(actual).is_integer():
            return abs(actual - value) <= max(tolerance * abs(value), slack)
        if value == 0:
            return abs(actual) <= unit / 2
        rounding = ROUNDING if unit else 0
        return abs(actual - value) <= max((unit or 1) * 0.500001 + max(rounding, tolerance) * abs(value), slack)

    def like(self, actual):
        """The text of another value in this one's form."""
        if "e" in self.text:
            return f"{actual:.{len(re.match(r'[^e]*?(?:[.]([0-9]*))?e', self.text)[1] or '')}e}"
        if "·10" in self.text:
            mantissa, power = f"{actual:.{len(self.text.split('·')[0].partition('.')[2])}e}".split("e")
            return mantissa + "·10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        decimals, comma = len(self.text.partition(".")[2]), "," if "," in self.text or len(self.text) < 4 else ""
        sign = "+" if self.text[0] == "+" else "-"
        return f"{actual:{sign}{comma}.{decimals}f}".replace("-", "−" if "−" in self.text else "-")


def numbers(text):
    return [Number(match.start(), match[0]) for match in NUMBER.finditer(text)]


# ---- running --------------------------------------------------------------------------------------------------------

class Run:
    """What a command has printed and written; the names that expressions may use."""

    def __init__(self, runner, command, lines, metrics):
        self.runner, self.command, self.lines = runner, command, lines
        self.events = [json.loads(line, object_hook=Record) for line in metrics]

    def step(self, number):
        found = [each for each in self.events if each.event == "step" and each.step == number]
        if not found:
            raise FigureError(f"the metrics have no step {number}")
        return found[-1]

    def steps(self):
        return [each for each in self.events if each.event == "step"]

    def summary(self):
        return next(each for each in self.events if each.event == "summary")

    def peak(self, kind):
        return self.steps()[-1].memory.peak[kind]

    def ranks(self, kind):
        return [each[kind] for each in self.summary().memory_per_rank]

    def sent(self, *names):
        bytes_of = self.steps()[-1].comm_bytes
        return sum(count for name, count in bytes_of.items()
                   if (name in names if names else not name.endswith("scalar")))

    def last(self, count):
        return sum(each.loss for each in self.steps()[-count:]) / count

    def printed(self, label, column, after="", below=0):
        """The number or numbers in a column of the printed line that begins with the label, or of one below it."""
        begin = next((i for i, line in enumerate(self.lines) if line.startswith(after)), None) if after else 0
        if begin is None:
            raise FigureError(f"the output has no line \"{after}\"")
        first, table = label.split("  "), [re.split(r"\s{2,}", line.strip()) for line in self.lines[begin:]]
        for i, cells in enumerate(table):
            if cells[:len(first)] == first and len(table[i + below]) >= column:
                found = [int(n.value) if not n.unit else n.value for n in numbers(table[i + below][column - 1])]
                return found[0] if len(found) == 1 else found
        raise FigureError(f"the output has no line \"{label}\" with {column} columns")

    def pattern(self, regex):
        match = re.search(regex, "\n".join(self.lines), re.M)
        if not match:
            raise FigureError(f"the output has no {regex}")
        found = [float(each.replace(",", "")) for each in match.groups()]
        return found[0] if len(found) == 1 else found

    def run(self, command):
        return self.runner.run(command)

    def names(self, row):
        """What an expression in this row of a table may use."""
        return {name: getattr(self, name) for name in ("step", "steps", "summary", "peak", "ranks", "sent", "last",
                                                       "printed", "pattern", "run")}

    def evaluate(self, expression, row=(), head="", column=0):
        try:
            value = eval(expression, {"__builtins__": BUILTINS, **self.names(row), "row": row, "head": head,
                                      "column": column, "command": self.command})
        except FigureError:
            raise
        except Exception as error:
            raise FigureError(f"{expression}: {type(error).__name__}: {error}") from None
        return list(value) if isinstance(value, (list, tuple)) else [value]


class Runner:
    """Runs each command once, in an empty folder that looks like the repository's root."""

    def __init__(self, root, binaries, limit=300.0, announce=None):
        self.root, self.bin, self.limit, self.announce, self.runs = root, binaries, limit, announce, {}

    def run(self, command):
        if command == "computed":
            return Run(self, command, [], [])
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
        line = command
        if re.search(r"build/bin/\d\d_", command) and "--metrics" not in command and "--dry-run" not in command:
            line += " --metrics metrics.jsonl"
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                       "EMULATE_GPUS": "0"}
        with working_folder(self.root, self.bin) as folder:
            code, out, err = programs.run(["bash", "-c", line], self.limit, environment, cwd=folder,
                                          stdin=subprocess.DEVNULL)
            metrics = [line for path in sorted(pathlib.Path(folder).glob("*.jsonl")) if not path.is_symlink()
                       for line in path.read_text().splitlines()]
        if code is None:
            raise FigureError(f"{command} did not end within {self.limit:g} s")
        if code != 0:
            said = (err or out).strip().split("\n")[-1]
            raise FigureError(f"{command} ended with {code}: {said}")
        return Run(self, command, [each.rstrip() for each in out.split("\n")], metrics)
