#!/usr/bin/env python3
"""Holds the lessons (README.md, */README.md, */REFERENCE.md, */experts/*.md, docs/*.md, docs/*/*.md) to the code;
exit code 1, FILE:LINE and the difference where they disagree. tests/test_lessons.py does it for every page.

    python3 tests/lessons.py BIN_FOLDER [FILE.md ...] [--write] [--run] [--all]
        FILE.md: only these lessons; --run: also what programs print (minutes); --all: what takes minutes each, too;
        --write: mends what is stale

snippets   `<!-- cut: FILE NAME -->` before a fence: it is the region of FILE between the lines `// tag::NAME[]` and
           `// end::NAME[]` (`#` in scripts), dedented, without lines of markers.
commands   build/bin/, mpirun, bash, python3, cmake, ctest, in code or inline: can be pasted (no placeholder or `a|b`),
           and name programs, flags, values, scripts, targets and tests that exist. `<!-- template: WHY -->` before a
           block or a paragraph: the reader fills its commands in; only their programs and flags are checked.
printed    with --run (tests/lessons_printed.py). `<!-- prints: COMMAND -->` before a fence, a table or a paragraph:
           the lines of COMMAND's output from its first line to the next empty one. `<!-- prints times: COMMAND -->`: numbers with a
           decimal point may differ. `<!-- prints slow: COMMAND -->`: only with --all. `ask`: a question of
           docs/predict.py.
quotes     `<!-- quotes: ../PAGE.md -->` before a fence, a table or a paragraph: each of its lines stands in that page, which
           is held to the code itself; spaces, and what begins a quotation or an item, do not count.
links      lead to files, and to headings that are there; a `name` in a table row of "The complete version" stands in a
           file that the row links.
pictures   docs/results/NAME.png has its NAME.csv, with `# command: ...` (checked as above) or `# computed` on top.
exercises  each numbered item of a section "Exercises" has <details><summary>Hint</summary> ... </details> below it (or
           Answer), with text in it; its commands are checked like all others.
shape      a lesson that has "The same in PyTorch" has all sections of SHAPE, no more words than MOST_WORDS, and ★ to ★★★ at
           exercises and rows of "The complete version"; a REFERENCE.md some of REFERENCE's, in their order.
minutes    "N minutes to read" is what `reading_minutes` counts, to a fifth.
traps      each item of a section "Traps" names `tests/NN_x.cpp: "test case"` (or a script's case) that exists.
"""
import argparse
import difflib
import functools
import pathlib
import re
import sys
import textwrap

from lessons_commands import COMMAND, LOOP, Commands, test_cases
from lessons_printed import Readme, Runner, check
from lessons_text import Change, parse, reading_minutes, rewrite

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [path for pattern in ("README.md", "*/README.md", "*/REFERENCE.md", "*/experts/*.md", "docs/*.md",
                              "docs/*/*.md") for path in sorted(ROOT.glob(pattern))]

MARKER = re.compile(r"^\s*(?://|#) (tag|end)::([a-z0-9_-]+)\[\]\s*$")
SOURCES = {".h", ".cpp", ".inc", ".cu", ".cuh", ".py", ".sh", ".txt"}
SHAPE = ["The idea", "minimal.cpp", "The complete version", "The same in PyTorch", "Traps", "Predict, then run",
         "Exercises", "Interview questions", "What to read"]
REFERENCE = ["Flags", "Formulas", "What happens inside", "Limits", "Speed", "Traps", "Exercises", "Questions", "Sources"]
MOST_WORDS = {"08_3d_full": 6000, "experts": 3000}  # others: 4,500


@functools.cache
def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    headings = [block.lines[0] for block in parse(page.read_text("utf-8")) if block.kind == "text" and block.lines]
    return {re.sub(r"[^\w -]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
            for line in headings if line.startswith("#")}


class Lessons:
    def __init__(self, binaries):
        self.root, self.bin = ROOT, binaries
        self.errors, self.written, self.known = [], [], Commands(ROOT, binaries)

    def error(self, path, line, message):
        self.errors.append(f"{path.relative_to(self.root)}:{line}: {message}")

    def check_all(self):
        """What belongs to no page: the markers of snippets, the pictures."""
        for path in self.sources():
            self.check_markers(path)
        for picture in sorted(self.root.glob("docs/results/*.png")):
            self.check_picture(picture)

    def sources(self):
        return [path for folder in [self.root / "tests", *sorted(self.root.glob("[0-9][0-9]_*"))]
                for path in sorted(folder.rglob("*")) if path.suffix in SOURCES and path.is_file()]

    # ---- snippets ----

    def check_markers(self, path):
        open_regions = {}
        for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
            marker = MARKER.match(line)
            if marker and marker[1] == "tag":
                if marker[2] in open_regions:
                    self.error(path, number, f"tag::{marker[2]}[] for the second time")
                open_regions[marker[2]] = number
            elif marker and open_regions.get(marker[2], 0) is not None:
                if marker[2] not in open_regions:
                    self.error(path, number, f"end::{marker[2]}[] without its tag::{marker[2]}[]")
                open_regions[marker[2]] = None
        for name, number in open_regions.items():
            if number:
                self.error(path, number, f"tag::{name}[] has no end::{name}[]")

    def region(self, file, name):
        """The lines of a region, or None."""
        lines, inside, found = [], False, False
        for line in (self.root / file).read_text("utf-8").split("\n"):
            marker = MARKER.match(line)
            if marker and marker[2] == name:
                inside, found = marker[1] == "tag", True
            elif inside and not marker:
                lines.append(line)
        return textwrap.dedent("\n".join(lines)).strip("\n").split("\n") if found else None

    def cut(self, path, block, text, line):
        file, _, name = text.partition(" ")
        if block.kind != "fence":
            return self.error(path, line, "cut: no fence behind it")
        if not (self.root / file).is_file():
            return self.error(path, line, f"cut: no file {file}")
        lines = self.region(file, name)
        if lines is None:
            return self.error(path, line, f"cut: {file} has no tag::{name}[]")
        return self.differs(path, block, lines, f"{file}, region {name}")

    def quotes(self, path, block, page):
        if not (path.parent / page).is_file():
            return self.error(path, block.line, f"quotes: no file {page}")
        words = " ".join(re.sub(r"^> ", "", (path.parent / page).read_text("utf-8"), flags=re.M).split())
        for number, line in enumerate(block.lines, block.line):
            if " ".join(re.sub(r"^[>-] ", "", line).split()) not in words:
                self.error(path, number, f"{page} does not say: {line}")

    def differs(self, path, block, lines, source):
        """[change] of a fence that does not have these lines, after an error with the difference."""
        if block.lines == lines:
            return []
        name = f"{path.relative_to(self.root)}:{block.line}"
        self.error(path, block.line, f"differs from {source}\n" +
                   "\n".join(difflib.unified_diff(block.lines, lines, name, source, lineterm="")))
        return [Change(block.line, block.lines, lines)]

    # ---- commands ----

    def commands(self, block):
        """[(line, command)]: lines of code with their continuations, and the inline code of a paragraph."""
        found = []
        if block.kind == "text":
            text = "\n".join(block.lines)
            for span in re.finditer(r"`([^`]+)`", text):
                command = " ".join(span[1].split())
                if COMMAND.match(command):
                    found.append((block.line + text[:span.start()].count("\n"), command))
        elif block.language in ("", "bash", "sh"):
            joined, begin = "", block.line
            for number, line in enumerate(block.lines, block.line):
                begin = begin if joined else number
                joined += line.strip()
                if joined.endswith("\\"):
                    joined = joined[:-1]
                    continue
                joined = LOOP.sub(r"\3", joined)
                if COMMAND.match(joined):
                    found.append((begin, joined))
                joined = ""
        return found

    def check_picture(self, picture):
        path = picture.with_suffix(".csv")
        if not path.exists():
            return self.error(picture, 1, "a picture without its CSV")
        head = [line for line in path.read_text("utf-8").split("\n") if line.startswith("# ")]
        commands = [number for number, line in enumerate(head) if line.startswith("# command: ")]
        for number in commands:
            self.check_command(path, number + 1, head[number].partition(": ")[2], [], False)
        if not commands and not any(line.startswith("# computed") for line in head):
            self.error(path, 1, "says neither a command nor that it is computed")

    def check_command(self, path, line, command, code, template):
        self.known.check(command, code, template, lambda message: self.error(path, line, f"{message}, in: {command}"))

    # ---- links, the walk through the code, traps ----

    def check_links(self, path, block, section):
        for number, line in enumerate(block.lines, block.line):
            targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", line) if not re.match(r"[a-z]+:|#", t)]
            files = [path.parent / target.split("#")[0] for target in targets]
            for target, file in zip(targets, files):
                if not file.exists():
                    self.error(path, number, f"link to {target}: there is no such file")
                elif "#" in target and file.suffix == ".md" and target.split("#")[1] not in anchors(file):
                    self.error(path, number, f"link to {target}: there is no such heading")
            for anchor in re.findall(r"\]\(#([^)\s]+)\)", line):
                if anchor not in anchors(path):
                    self.error(path, number, f"link to #{anchor}: there is no such heading")
            if section.startswith(("The code", "The complete version")) and line.startswith("|") and files:
                text = "\n".join(file.read_text("utf-8") for file in files if file.is_file())
                for name in re.findall(r"`([A-Za-z_]\w*(?:::\w+)*)(?:\([^`]*\))?`", line):
                    if not re.search(r"\b" + name.split("::")[-1] + r"\b", text):
                        self.error(path, number, f"`{name}` is in none of {', '.join(targets)}")

    def check_traps(self, path, block):
        items = []  # [line, text]
        for number, line in enumerate(block.lines, block.line):
            if re.match(r"(\d+\.|-|\*) ", line):
                items.append([number, line])
            elif items:
                items[-1][1] += " " + line.strip()
        for number, text in items:
            named = re.findall(r'`(tests/[\w.]+): "([^`]+)"`', text)
            if not named:
                self.error(path, number, "this trap names no test")
            for file, case in named:
                if not (self.root / file).is_file():
                    self.error(path, number, f"there is no {file}")
                elif case not in test_cases(self.root / file):
                    self.error(path, number, f"{file} has no test case \"{case}\"")

    def check_exercises(self, path, text):
        section, items, expected = False, [], 1  # [line, text]
        for number, line in enumerate(text.split("\n"), 1):
            section = line == "## Exercises" if line.startswith("## ") else section
            if section and (item := re.match(r"(\d+)\. ", line)):
                if int(item[1]) != expected:
                    self.error(path, number, f"exercise {item[1]}, where {expected} was expected")
                items.append([number, ""])
                expected = int(item[1]) + 1
            if section and items:
                items[-1][1] += line + "\n"
        for number, item in items:
            answer = re.search(r"^   <details><summary>(?:Hint|Answer)</summary>$(.*?)^   </details>$", item,
                               re.M | re.S)
            if not answer or item.count("<details>") != 1 or item.count("</details>") != 1:
                self.error(path, number, "this exercise has no <details><summary>Hint</summary>, or it is not closed")
            elif not re.match(r"\n\n.*\w.*\n\n$", answer[1], re.S):
                self.error(path, number, "the answer of this exercise is empty, or no empty lines surround its text")

    def check_shape(self, path, text):
        sections, words = re.findall(r"^## (.*)$", text, re.M), len(text.split())
        if path.name == "REFERENCE.md":
            shape, most = [name for name in REFERENCE if name in sections], 3000
        elif "The same in PyTorch" in sections:
            shape, most = SHAPE, MOST_WORDS.get(path.parent.name, 4500)
        else:
            return
        if sections != shape:
            self.error(path, 1, f"its sections are {sections}, not {shape}")
        if words > most:
            self.error(path, 1, f"{words} words are too many")
        for name, unmarked in ("Exercises", r"\d+\. (?!★{1,3} )"), ("The complete version", r"\| \["):
            section = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", text, re.M | re.S)
            for line in re.findall(rf"^{unmarked}.*$", section[1] if section else "", re.M):
                self.error(path, 1, f"without ★: {line}")

    def check_minutes(self, path, text):
        stated, counted = re.search(r"(\d+) minutes to read", text), reading_minutes(text)
        if stated and not abs(int(stated[1]) - counted) <= counted / 5:
            self.error(path, text[:stated.start()].count("\n") + 1,
                       f"{stated[1]} minutes to read, counted are {counted:.0f}")

    def check_lesson(self, path, write=False):
        self.check_exercises(path, path.read_text("utf-8"))
        self.check_minutes(path, path.read_text("utf-8"))
        self.check_shape(path, path.read_text("utf-8"))
        blocks, section, changes = parse(path.read_text("utf-8")), "", []
        for block in blocks:
            template = any(name == "template" for name, _, _ in block.directives)
            if block.kind == "text" and block.lines and block.lines[0].startswith("#"):
                section = block.lines[0].lstrip("#").strip()
            for name, text, line in block.directives:
                if name == "cut":
                    changes += self.cut(path, block, text, line) or []
                elif name == "quotes":
                    self.quotes(path, block, text)
                elif name.startswith("prints"):
                    self.check_command(path, line, text, [], False)
                elif not block.lines:
                    self.error(path, line, f"{name}: nothing behind it")
            for line, command in self.commands(block):
                self.check_command(path, line, command, block.lines, template)
            if block.kind == "text":
                self.check_links(path, block, section)
                if section == "Traps":
                    self.check_traps(path, block)
        for line, message in Readme(path).errors:
            self.error(path, line, message)
        if write:
            self.written += rewrite(path, changes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path, help="folder of the programs")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="only these lessons [default: all]")
    parser.add_argument("--write", action="store_true", help="rewrite what is stale")
    parser.add_argument("--run", action="store_true", help="also run the commands whose output is shown")
    parser.add_argument("--all", action="store_true", help="with --run: also those that take minutes")
    arguments = parser.parse_args()
    lessons = Lessons(arguments.bin.resolve())
    pages = [file.resolve() for file in arguments.files] or PAGES
    for page in pages:
        if page.suffix != ".md" or not page.is_file():
            parser.error(f"{page} is no lesson")
    lessons.check_all()
    for page in pages:
        lessons.check_lesson(page, arguments.write)
    runner = Runner(ROOT, lessons.bin, 3600, lambda command: print(command, file=sys.stderr, flush=True))
    for page in pages if arguments.run else []:
        changes = []
        for shown in Readme(page).shown:
            if shown.slow and not arguments.all:
                print(f"left out, only with --all: takes minutes: {shown.command}")
            else:
                changes += check(lessons, runner, page, shown)
        if arguments.write:
            lessons.written += rewrite(page, changes)
    for line in [f"wrote {each}" for each in lessons.written] + lessons.errors:
        print(line)
    if lessons.known.not_built:
        print(f"not built, so their flags were not checked: {', '.join(sorted(lessons.known.not_built))}")
    found = f"{len(lessons.errors)} differences" + ": again, to see what remains of them" * bool(lessons.written)
    print(found if lessons.errors else "the lessons agree with the code")
    sys.exit(bool(lessons.errors))


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # in any locale
    main()
