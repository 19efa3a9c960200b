#!/usr/bin/env python3
"""Holds the lessons (README.md, */README.md, */experts/README.md, docs/*.md, docs/*/*.md) to the code; exit code 1, FILE:LINE and the
difference where they disagree.

    python3 tests/lessons.py BIN_FOLDER [FILE.md ...] [--write] [--run]
                                                  FILE.md: only these lessons; --run: also what programs print (slow)
    python3 tests/lessons.py --self-test

snippets   `<!-- cut: FILE NAME -->` before a fence: it is the region of FILE between the lines `// tag::NAME[]` and
           `// end::NAME[]` (`#` in scripts), dedented, without lines of markers. --write cuts the fence anew.
commands   build/bin/, mpirun, bash, python3, cmake, ctest, in code or inline: can be pasted (no placeholder or `a|b`),
           and name programs, flags, values, scripts, targets and tests that exist. `<!-- template: WHY -->` before a
           block or a paragraph: the reader fills its commands in; only their programs and flags are checked.
printed    `<!-- prints: COMMAND -->` before a fence: with --run, the lines of COMMAND's output from the fence's first
           line to the next empty one. `<!-- prints times: COMMAND -->`: numbers with a decimal point may differ.
           `<!-- prints slow: COMMAND -->`: docs/predict.py --check runs it only with --all. --write prints the fence anew.
figures    `measured`, `not measured` and `ask` belong to docs/predict.py.
links      relative ones lead to files; a `name` in a table row of "The code" stands in a file that the row links.
pictures   docs/results/NAME.png has its NAME.csv, with `# command: ...` (checked as above) or `# computed` on top.
exercises  each numbered item of a section "Exercises" has <details><summary>Hint</summary> ... </details> below it (or
           Answer), with text in it; its commands are checked like all others.
minutes    "N minutes to read" is what `reading_minutes` counts, to a fifth.
traps      each item of a section "Traps" names `tests/NN_x.cpp: "test case"` (or a script's case) that exists.
"""
import argparse
import dataclasses
import difflib
import pathlib
import re
import subprocess
import sys
import textwrap

from lessons_commands import COMMAND, LOOP, Commands, mpi_environment, test_cases, working_folder

MARKER = re.compile(r"^\s*(?://|#) (tag|end)::([a-z0-9_-]+)\[\]\s*$")
DIRECTIVE = re.compile(r"^\s*<!-- (cut|template|prints|prints times|prints slow|measured|not measured|ask): (.*)$")
FENCE = re.compile(r"^\s*(```+|~~~+)(\w*)\s*$")
SOURCES = {".h", ".cpp", ".inc", ".cu", ".cuh", ".py", ".sh", ".txt"}
@dataclasses.dataclass
class Block:
    """A fence, an indented block of code, or a paragraph of text."""
    kind: str
    line: int  # of its first line of content, from 1
    lines: list
    language: str = ""
    directives: list = dataclasses.field(default_factory=list)  # [(name, text, line)]


def parse(text):
    """The blocks of a Markdown file, in order."""
    lines, blocks, directives, i = text.split("\n"), [], [], 0

    def take(kind, begin, end, language=""):
        blocks.append(Block(kind, begin + 1, lines[begin:end], language, list(directives)))
        directives.clear()

    while i < len(lines):
        directive, fence = DIRECTIVE.match(lines[i]), FENCE.match(lines[i])
        if directive:  # to the line that ends with -->
            end = next((k for k in range(i, len(lines)) if lines[k].rstrip().endswith("-->")), len(lines) - 1)
            text = "\n".join([directive[2], *lines[i + 1:end + 1]]).rstrip().removesuffix("-->").rstrip()
            directives.append((directive[1], text, i + 1))
            i = end + 1
        elif fence:
            end = next((k for k in range(i + 1, len(lines)) if lines[k].strip() == fence[1]), len(lines))
            take("fence", i + 1, end, fence[2])
            i = end + 1
        elif not lines[i].strip():
            i += 1
        elif lines[i].startswith("    "):
            end = i
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            while not lines[end - 1].strip():
                end -= 1
            take("indented", i, end)
            i = end
        else:
            end = i + 1
            while end < len(lines) and lines[end].strip() and not lines[i].startswith("#") and \
                    not FENCE.match(lines[end]) and not DIRECTIVE.match(lines[end]):
                end += 1
            take("text", i, end)
            i = end
    if directives:
        blocks.append(Block("text", len(lines), [], "", directives))
    return blocks


def reading_minutes(text):
    """Without what is folded away: 150 words of text a minute, 15 seconds for a row of a table and a line of code."""
    words = rows = 0
    for block in parse(re.sub(r"<details>.*?</details>", "", text, flags=re.S)):
        for line in block.lines:
            if block.kind != "text" or line.startswith("|"):
                rows += bool(line.strip())
            else:
                words += len(line.split())
    return words / 150 + rows / 4


class Lessons:
    def __init__(self, root, programs):
        self.root, self.bin = root, programs
        self.errors, self.written, self.outputs, self.known = [], [], {}, Commands(root, programs)

    def error(self, path, line, message):
        self.errors.append(f"{path.relative_to(self.root)}:{line}: {message}")

    def check(self, write=False, run=False, only=()):
        for path in self.sources():
            self.check_markers(path)
        for pattern in ("README.md", "*/README.md", "*/experts/README.md", "docs/*.md", "docs/*/*.md"):
            for path in sorted(self.root.glob(pattern)):
                if not only or path in only:
                    self.check_lesson(path, write, run)
        for picture in sorted(self.root.glob("docs/results/*.png")):
            self.check_picture(picture)
        return self.errors

    def sources(self):
        return [path for folder in [self.root / "tests", *sorted(self.root.glob("[0-9][0-9]_*"))]
                for path in sorted(folder.rglob("*")) if path.suffix in SOURCES and path.is_file()]

    # ---- snippets ----

    def check_markers(self, path):
        open_regions = {}
        for number, line in enumerate(path.read_text().split("\n"), 1):
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
        for line in (self.root / file).read_text().split("\n"):
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
        return self.replacement(path, block, lines, f"{file}, region {name}")

    def replacement(self, path, block, lines, source, same=False):
        """None if the block has these lines, else the lines, after an error with the difference."""
        if same or block.lines == lines:
            return None
        name = f"{path.relative_to(self.root)}:{block.line}"
        self.error(path, block.line, f"differs from {source}\n" +
                   "\n".join(difflib.unified_diff(block.lines, lines, name, source, lineterm="")))
        return lines

    # ---- what programs print ----

    def prints(self, path, block, command, line, times):
        if block.kind != "fence" or not block.lines:
            return self.error(path, line, "prints: no fence behind it")
        if command not in self.outputs:
            self.outputs[command] = self.output(command)
        lines, words = self.outputs[command], lambda text: re.sub(r"\d+\.\d+", "#" if times else r"\g<0>", text).split()
        begin = next((i for i, each in enumerate(lines) if words(each) == words(block.lines[0])), None)
        if begin is None:
            return self.error(path, block.line, f"the output of {command} has no line \"{block.lines[0]}\"")
        end = next((i for i in range(begin, len(lines)) if not lines[i]), len(lines))
        table = lines[begin:end]
        same = [words(each) for each in table] == [words(each) for each in block.lines]
        return self.replacement(path, block, table, f"the output of {command}", same)

    def output(self, command):
        """The lines that a command prints, run in a folder that looks like the repository's root."""
        with working_folder(self.root, self.bin) as folder:
            done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True,
                                  env=mpi_environment())
        if done.returncode != 0:
            print(f"{command} ended with {done.returncode}\n{done.stderr}", file=sys.stderr)
        return [line.rstrip() for line in done.stdout.split("\n")]

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
        head = [line for line in path.read_text().split("\n") if line.startswith("# ")]
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
            if section.startswith("The code") and line.startswith("|") and files:
                text = "\n".join(file.read_text() for file in files if file.is_file())
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

    def check_minutes(self, path, text):
        stated, counted = re.search(r"(\d+) minutes to read", text), reading_minutes(text)
        if stated and not abs(int(stated[1]) - counted) <= counted / 5:
            self.error(path, text[:stated.start()].count("\n") + 1,
                       f"{stated[1]} minutes to read, counted are {counted:.0f}")

    def check_lesson(self, path, write, run):
        self.check_exercises(path, path.read_text())
        self.check_minutes(path, path.read_text())
        blocks, section, changes = parse(path.read_text()), "", []
        for block in blocks:
            template = any(name == "template" for name, _, _ in block.directives)
            if block.kind == "text" and block.lines and block.lines[0].startswith("#"):
                section = block.lines[0].lstrip("#").strip()
            for name, text, line in block.directives:
                if name == "cut":
                    changes.append((block, self.cut(path, block, text, line)))
                elif name.startswith("prints"):
                    self.check_command(path, line, text, [], False)
                    if run:
                        changes.append((block, self.prints(path, block, text, line, name == "prints times")))
                elif not block.lines:
                    self.error(path, line, f"{name}: nothing behind it")
            for line, command in self.commands(block):
                self.check_command(path, line, command, block.lines, template)
            if block.kind == "text":
                self.check_links(path, block, section)
                if section == "Traps":
                    self.check_traps(path, block)
        changes = [(block, lines) for block, lines in changes if lines is not None]
        if write and changes:
            text = path.read_text().split("\n")
            for block, lines in reversed(changes):
                text[block.line - 1:block.line - 1 + len(block.lines)] = lines
            path.write_text("\n".join(text))
            self.errors = [each for each in self.errors if "\n---" not in each]
            self.written.append(path.relative_to(self.root))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", nargs="?", type=pathlib.Path, help="folder of the programs")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="only these lessons [default: all]")
    parser.add_argument("--write", action="store_true", help="rewrite the fences that differ")
    parser.add_argument("--run", action="store_true", help="also run the commands whose output is shown")
    parser.add_argument("--self-test", action="store_true", help="check the checks on a miniature of this repository")
    arguments = parser.parse_args()
    if arguments.self_test:
        from lessons_self_test import self_test
        sys.exit(self_test(Lessons))
    if not arguments.bin:
        parser.error("which folder of programs?")
    lessons = Lessons(pathlib.Path(__file__).resolve().parents[1], arguments.bin.resolve())
    only = [file.resolve() for file in arguments.files]
    for file in only:
        if file.suffix != ".md" or not file.is_file():
            parser.error(f"{file} is no lesson")
    errors = lessons.check(arguments.write, arguments.run, only)
    for path in lessons.written:
        print(f"wrote {path}")
    for error in errors:
        print(error)
    if lessons.known.not_built:
        print(f"not built, so their flags were not checked: {', '.join(sorted(lessons.known.not_built))}")
    print(f"{len(errors)} differences" if errors else "the lessons agree with the code")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
