"""A lab's own files, and the bodies of functions between markers."""
import hashlib
import itertools
import json
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
LABS = ROOT / "docs/labs"
MARKER = re.compile(r"^\s*// (tag|end)::([a-z0-9-]+)\[\]\s*$")
FULL_SECONDS = 900
MOST_MEMORY = 8 << 30  # bytes of addresses
ROW_SECONDS = 10  # more is a hang
SEED = re.compile(r"^\W*Seed (\S+): ", re.M)


class Refused(Exception):
    """One line for the user; exit code 2."""


def all_labs():
    return sorted((json.loads(path.read_text("utf-8"))["chapter"], path.parent.name)
                  for path in LABS.glob("*/lab.json"))


def person(text, what):
    if not re.fullmatch(r"\w[\w.-]{0,39}", text):
        raise Refused(f"{what} {text!r}: 1 to 40 letters, digits, dots and dashes, and no dash or dot first")
    return text


class Lab:
    def __init__(self, name, build, seed=None):
        names = [each for _, each in all_labs()]
        if name not in names:
            raise Refused(f"there is no lab {name}; the labs are: {', '.join(names)}")
        self.name, self.build, self.of = name, build, LABS / name
        self.about = json.loads((self.of / "lab.json").read_text("utf-8"))
        self.folder = build / "lab" / name
        self.source = ROOT / self.about["source"]  # of a puzzle: the file that `start` copies
        self.file = self.folder / self.source.name
        self.puzzle = "grader" in self.about
        self.seed = None if seed is None else person(seed, "--seed")

    def drawn(self):
        """{parameter: value} for the seed; all but the first combination of values, which is the course's own."""
        values = self.about.get("drawn", {}).get("values", {})
        draws = [dict(zip(values, each)) for each in itertools.product(*values.values())][1:]
        number = hashlib.sha256(f"{self.name} {self.seed}".encode()).digest()
        return draws[int.from_bytes(number, "big") % len(draws)] if self.seed and draws else {}

    def show(self, path):
        try:
            return str(path.relative_to(pathlib.Path.cwd()))
        except ValueError:
            return str(path)

    def task(self):
        text = (self.of / "task.md").read_text("utf-8").strip()
        drawn = self.drawn()
        mine = self.about["drawn"]["text"].format(**drawn) if drawn else "this lab is the same for all."
        return text + ("\n\n" + textwrap.fill(f"Seed {self.seed}: {mine}", 108)) * bool(self.seed)

    def hints(self):
        text = (self.of / "hints.md").read_text("utf-8")
        return [part.strip("\n") for part in re.split(r"^## \d\n", text, flags=re.M)[1:]]

    def tags(self):
        found = regions(self.source.read_text("utf-8"))
        return [name for name, _, _ in found if f"{name}-".startswith(f"lab-{self.name}-")]

    def blank(self):
        """The shipped source with this lab's bodies removed, the task in the place of the first."""
        if self.puzzle:
            task = [f"LAB {self.name}", ""] + self.task().split("\n")
            comment = "#" if self.source.suffix == ".txt" else "//"
            return "\n".join(f"{comment} {line}".rstrip() for line in task) + "\n" + self.source.read_text("utf-8")
        text, first = self.source.read_text("utf-8"), True
        for tag in self.tags():
            indent = body_of(text, tag)[1]
            what = tag.removeprefix(f"lab-{self.name}").lstrip("-") or "the body"
            lines = [f"// LAB {self.name}: {what}"]
            if first:
                lines += ["//"] + [f"// {line}".rstrip() for line in self.task().split("\n")]
            lines.append(self.about.get("blank", {}).get(tag) or f'CHECK(false, "{what} is not written yet");')
            text = replace(text, tag, textwrap.indent("\n".join(lines), indent))
            first = False
        return text

    def written(self):
        if not self.file.is_file():
            raise Refused(f"lab {self.name} has not been started: bash docs/lab.sh start {self.name}")
        try:
            text = self.file.read_text("utf-8")
        except UnicodeDecodeError:
            raise Refused(f"{self.show(self.file)} is no text: start --again begins anew") from None
        found = SEED.search(text)
        asked, self.seed = self.seed, found and person(found[1], "the file's seed")
        if asked and asked != self.seed:
            raise Refused(f"{self.show(self.file)} has {f'seed {self.seed}' if found else 'no seed'}, not {asked}")
        return text


def regions(text):
    """[(name, line of its first line, line behind its last)], from 0."""
    open_at, found = {}, []
    for number, line in enumerate(text.split("\n")):
        if marker := MARKER.match(line):
            if marker[1] == "tag":
                open_at[marker[2]] = number + 1
            elif marker[2] in open_at:
                found.append((marker[2], open_at.pop(marker[2]), number))
    return sorted(found, key=lambda each: each[1])


def region(text, tag):
    """The lines before a region, in it and behind it."""
    for name, begin, end in regions(text):
        if name == tag:
            lines = text.split("\n")
            return lines[:begin], lines[begin:end], lines[end:]
    raise Refused(f"the markers // tag::{tag}[] and // end::{tag}[] are gone from the file: "
                  "put them around your body again, or start --again")


def body_of(text, tag):
    """The lines of a region without the markers in it, and their indentation."""
    lines = [line for line in region(text, tag)[1] if not MARKER.match(line)]
    code = [line for line in lines if line.strip() and not line.startswith("#")]
    indent = min((len(line) - len(line.lstrip()) for line in code), default=0)
    return "\n".join(lines), " " * indent


def replace(text, tag, body):
    before, _, behind = region(text, tag)
    return "\n".join([*before, *body.split("\n"), *behind])
