#!/usr/bin/env python3
"""Holds the lessons (README.md, */README.md, docs/*.md, docs/results/*.md) to the code; exits with 1 and FILE:LINE where they differ.

    python3 tests/lessons.py BIN_FOLDER [--write] [--run] | --self-test        --run: also what programs print (slow)

snippets   `<!-- cut: FILE NAME -->` before a fence: it is the region of FILE between the lines `// tag::NAME[]` and
           `// end::NAME[]` (`#` in scripts), dedented, without lines of markers. --write cuts the fence anew.
commands   build/bin/..., mpirun, bash, python3, cmake, ctest, in code or inline: can be pasted (no placeholder, no `a|b`), and
           name programs, flags, values, scripts, targets and tests that exist. `<!-- template: WHY -->` before a block or
           a paragraph: its commands are filled in by the reader; only their programs and flags are checked.
printed    `<!-- prints: COMMAND -->` before a fence: with --run, the lines of COMMAND's output from the fence's first line to
           the next empty one. `<!-- prints times: COMMAND -->`: numbers with a decimal point may differ. --write refreshes.
links      relative ones lead to files; a `name` in a table row of "The code" stands in one of the files that the row links.
traps      each item of a section "Traps" names `tests/NN_x.cpp: "test case"` (or a script's case) that exists.
"""
import argparse
import dataclasses
import difflib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap

MARKER = re.compile(r"^\s*(?://|#) (tag|end)::([a-z0-9_-]+)\[\]\s*$")
DIRECTIVE = re.compile(r"^\s*<!-- (cut|template|prints|prints times): (.*?) -->\s*$")
FENCE = re.compile(r"^\s*(```+|~~~+)(\w*)\s*$")
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:build/bin/|(?:mpirun|srun|bash|python3|cmake|ctest) )")
SOURCES = {".h", ".cpp", ".inc", ".cu", ".cuh", ".py", ".sh", ".txt"}
# The options of other people's programs that lessons use, and how many words follow each.
OPTIONS = {
    "mpirun": {"-np": 1, "-q": 0, "-x": 1, "--oversubscribe": 0, "--allow-run-as-root": 0, "--hostfile": 1, "--map-by": 1,
               "--bind-to": 1},
    "srun": {"--mpi": 1, "--cpu-bind": 1},
    "cmake": {"-S": 1, "-B": 1, "-G": 1, "-j": 1, "--build": 1, "--target": 0},
    "ctest": {"--test-dir": 1, "--output-on-failure": 0, "-V": 0, "-R": 1, "-L": 1, "-LE": 1},
}


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
        if directive:
            directives.append((directive[1], directive[2], i + 1))
            i += 1
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
            while end < len(lines) and lines[end].strip() and not FENCE.match(lines[end]) and not DIRECTIVE.match(lines[end]) \
                    and not lines[i].startswith("#"):
                end += 1
            take("text", i, end)
            i = end
    if directives:
        blocks.append(Block("text", len(lines), [], "", directives))
    return blocks


def cmake_names(text):
    """Targets and tests that a CMakeLists.txt makes: loops are unrolled, calls are read by their names."""
    def unroll(match):
        return "\n".join(match[3].replace("${" + match[1] + "}", value) for value in match[2].split())
    text = re.sub(r"function\(.*?endfunction\(\)", "", re.sub(r"#.*", "", text), flags=re.S)
    text = re.sub(r"foreach\((\w+)\s+([^)]*)\)(.*?)endforeach\(\)", unroll, text, flags=re.S)
    targets, tests = set(), set()
    for call, name in re.findall(r"(\w+)\(\s*(?:NAME )?([\w.-]+)", text):
        if call in ("add_executable", "add_chapter", "add_custom_target"):
            targets.add(name)
        elif call in ("add_unit_test", "add_ranks_test"):
            targets.add("test_" + name)
            tests.add(name)
        elif call in ("add_script_test", "add_test"):
            tests.add(name)
    return targets, tests


class Program:
    """What a program's --help says: {flag: None (a switch), or the set of possible values, empty: any}."""

    def __init__(self, path):
        text = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, env=mpi_environment()).stdout
        self.flags, self.positionals = {}, len(re.findall(r"^  \w+ [A-Z]+ REQUIRED", text, re.M))
        for flag, kind, values in re.findall(r"^ +(?:-\w,)?(--[a-z0-9-]+)(?: ([A-Z]+)(?::([^\s=]+))?)?", text, re.M):
            self.flags[flag] = set(values.split("|")) if "|" in values else set() if kind else None


def mpi_environment():
    return dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                OMPI_MCA_btl_vader_single_copy_mechanism="none", OMPI_MCA_rmaps_base_oversubscribe="1")


class Lessons:
    def __init__(self, root, programs):
        self.root, self.bin = root, programs
        self.errors, self.programs, self.outputs, self.not_built = [], {}, {}, set()
        self.targets, self.tests = set(), set()
        for file in (root / "CMakeLists.txt", root / "tests/CMakeLists.txt"):
            targets, tests = cmake_names(file.read_text()) if file.exists() else (set(), set())
            self.targets |= targets
            self.tests |= tests

    def error(self, path, line, message):
        self.errors.append(f"{path.relative_to(self.root)}:{line}: {message}")

    def check(self, write=False, run=False):
        for path in self.sources():
            self.check_markers(path)
        for pattern in ("README.md", "*/README.md", "docs/*.md", "docs/results/*.md"):
            for path in sorted(self.root.glob(pattern)):
                self.check_lesson(path, write, run)
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
        with tempfile.TemporaryDirectory() as folder:
            for entry in self.root.iterdir():
                if entry.name not in ("build", ".git"):
                    os.symlink(entry, pathlib.Path(folder, entry.name))
            pathlib.Path(folder, "build").mkdir()
            os.symlink(self.bin, pathlib.Path(folder, "build/bin"))
            done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=mpi_environment())
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
                if COMMAND.match(joined):
                    found.append((begin, joined))
                joined = ""
        return found

    def check_command(self, path, line, command, block, template):
        def wrong(message):
            self.error(path, line, f"{message}, in: {command}")
        if template:
            for name, rest in re.findall(r"build/bin/([\w.-]+)([^|]*)", command):
                program = self.program(name, wrong)
                for flag in re.findall(r"(?<=\s)--[a-z0-9-]+", rest):
                    if program and flag not in program.flags:
                        wrong(f"{name} has no {flag}")
            return
        unquoted = re.sub(r"(^|\s)#.*", "", re.sub(r"'[^']*'|\"[^\"]*\"", "quoted", command))
        bad = re.search(r"[|&;<>(){}\[\]*?~`…]|\.\.\.", unquoted)
        if bad:
            return wrong(f"\"{bad[0]}\" cannot be pasted")
        known = set(re.findall(r"\bfor (\w+) in|\b(\w+)=", "\n".join(block.lines)))
        for variable in re.findall(r"\$(\w+)", re.sub(r"'[^']*'", "", command)):
            if not any(variable in names for names in known):
                return wrong(f"${variable} is not set")
        words = shlex.split(command, comments=True)
        for before, word in zip(["", *words], words):
            if re.fullmatch(r"[A-Z][A-Z_]*", word) and before != "-x":
                return wrong(f"{word} is a placeholder")
        while "=" in words[0] and not words[0].startswith("-"):
            words.pop(0)
        if words[0] in ("mpirun", "srun"):
            words = self.skip_options(words[0], words[1:], wrong)
        if not words:
            return
        first, rest = words[0], words[1:]
        if first.startswith("build/bin/"):
            self.check_program(first[len("build/bin/"):], rest, wrong)
        elif first == "bash" and rest[0] == "-c":
            for name in re.findall(r"build/bin/([\w.-]+)", rest[1]):
                self.program(name, wrong)
        elif first in ("bash", "python3"):
            script = self.root / rest[0]
            if not script.is_file():
                return wrong(f"there is no {rest[0]}")
            for flag in rest[1:]:
                if flag.startswith("--") and flag.split("=")[0] not in script.read_text():
                    wrong(f"{rest[0]} has no {flag}")
        elif first == "cmake":
            for word in self.skip_options(first, rest, wrong):
                if word.startswith("-D"):
                    if word[2:].split("=")[0] not in (self.root / "CMakeLists.txt").read_text():
                        wrong(f"CMakeLists.txt does not know {word}")
                elif word not in self.targets:
                    wrong(f"there is no target {word}")
        elif first == "ctest":
            for before, word in zip(rest, rest[1:]):
                if before == "-R" and not any(re.search(word, test) for test in self.tests):
                    wrong(f"no test is called {word}")
            for word in self.skip_options(first, rest, wrong):
                wrong(f"unexpected {word}")
        else:
            wrong(f"{first} is no program that lessons use")

    def skip_options(self, program, words, wrong):
        """The words behind a foreign program's options; of cmake and ctest, all words that are none."""
        others = []
        while words:
            name, equals, _ = words[0].partition("=")
            if name in OPTIONS[program]:
                words = words[1:] if equals else words[1 + OPTIONS[program][name]:]
            elif name.startswith("-") and not name.startswith("-D"):
                wrong(f"{program} with {name}: not among the options that lessons use")
                words = words[1:]
            elif program in ("mpirun", "srun"):
                return words
            else:
                others.append(words[0])
                words = words[1:]
        return others

    def program(self, name, wrong):
        if name not in self.targets:
            wrong(f"CMake builds no program {name}")
        elif not (self.bin / name).is_file():
            self.not_built.add(name)
        elif not name.startswith("test_"):
            if name not in self.programs:
                self.programs[name] = Program(self.bin / name)
            return self.programs[name]

    def check_program(self, name, words, wrong):
        for word in words:
            if name.startswith("test_") and word.startswith("-tc="):
                cases = self.cases(self.root / "tests" / (name[len("test_"):] + ".cpp"))
                if not any(re.fullmatch(re.escape(word[4:]).replace(r"\*", ".*"), case) for case in cases):
                    wrong(f"no test case is called {word[4:]}")
        program = self.program(name, wrong)
        if not program:
            return
        positionals = program.positionals
        while words:
            flag, equals, value = words[0].partition("=")
            if not flag.startswith("--"):
                if positionals == 0:
                    return wrong(f"unexpected {flag}")
                positionals, words = positionals - 1, words[1:]
                continue
            if flag not in program.flags:
                return wrong(f"{name} has no {flag}")
            values = program.flags[flag]
            words = words[1:]
            if values is None:
                continue
            if not equals:
                if not words:
                    return wrong(f"{flag} without a value")
                value, words = words[0], words[1:]
            if values and value not in values and "$" not in value:
                wrong(f"{flag} {value} is none of {'|'.join(sorted(values))}")

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

    def cases(self, file):
        """The names of a file's test cases; of a script, whatever stands in quotes."""
        text = file.read_text()
        if file.suffix != ".cpp":
            return re.findall(r'"([^"\n]*)"', text)
        return ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', name)).replace('\\"', '"')
                for name in re.findall(r'TEST_CASE\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', text)]

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
                elif case not in self.cases(self.root / file):
                    self.error(path, number, f"{file} has no test case \"{case}\"")

    def check_lesson(self, path, write, run):
        blocks, section, changes = parse(path.read_text()), "", []
        for block in blocks:
            template = any(name == "template" for name, _, _ in block.directives)
            if block.kind == "text" and block.lines and block.lines[0].startswith("#"):
                section = block.lines[0].lstrip("#").strip()
            for name, text, line in block.directives:
                if name == "cut":
                    changes.append((block, self.cut(path, block, text, line)))
                elif name.startswith("prints"):
                    self.check_command(path, line, text, block, False)
                    if run:
                        changes.append((block, self.prints(path, block, text, line, name == "prints times")))
                elif not block.lines:
                    self.error(path, line, "template: nothing behind it")
            for line, command in self.commands(block):
                self.check_command(path, line, command, block, template)
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
            print(f"wrote {path.relative_to(self.root)}")


# ---- the checks of this file ----------------------------------------------------------------------------------------

MINIATURE = {
    "CMakeLists.txt": "option(TRAIN70B_X)\nadd_chapter(03_zero below)\n",
    "tests/CMakeLists.txt": "foreach(name zero cuda)\n    add_unit_test(03_${name} lib)\nendforeach()\n",
    "tests/03_zero.cpp": 'TEST_CASE(\n    "the ledger: each stage "\n    "counts") {\n',
    "03_zero/zero.cpp": "void f() {\n    // tag::around[]\n    gather(unit);\n    // tag::inner[]\n    if (x) {\n        g();\n"
                        "    }\n    // end::inner[]\n    // end::around[]\n}\n",
    "bin/03_zero": "#!/bin/sh\necho '  --zero TEXT:0|1|2|3=0   stage'\necho '  --dry-run   book'\necho\n"
                   "echo 'stage   bytes   time'\necho '1       100     2.50 ms'\n",
    "03_zero/README.md": textwrap.dedent("""\
        # Chapter
        See [zero](zero.cpp), run `build/bin/03_zero --zero 2`.

            mpirun --oversubscribe -np 2 build/bin/03_zero --zero 1 \\
                --dry-run                              # a comment: a|b ...
            cmake --build build --target 03_zero test_03_cuda
            ctest --test-dir build -R '^03'

        <!-- template: S is a stage -->
            build/bin/03_zero --zero S

        <!-- cut: 03_zero/zero.cpp around -->
        ```cpp
        gather(unit);
        if (x) {
            g();
        }
        ```

        <!-- prints times: build/bin/03_zero -->
        ```
        stage   bytes   time
        1       100     9.99 ms
        ```

        ## The code
        | file | see |
        |---|---|
        | [zero.cpp](zero.cpp) | `gather` |

        ## Traps
        1. *One.* Nothing breaks.
           `tests/03_zero.cpp: "the ledger: each stage counts"`
        """)}

# (what is changed, in which file, from, to, and what has to be said about it)
MUTATIONS = [
    ("a changed source", "03_zero/zero.cpp", "gather(unit);", "gather(next);", "README.md:14: differs from"),
    ("a changed snippet", "03_zero/README.md", "    g();\n", "    h();\n", "-    h();"),
    ("a region that is gone", "03_zero/zero.cpp", "::around[]", "::body[]", "has no tag::around[]"),
    ("a region without its end", "03_zero/zero.cpp", "    // end::inner[]\n", "", "tag::inner[] has no end"),
    ("a wrong flag", "03_zero/README.md", "--dry-run  ", "--dryrun  ", "03_zero has no --dryrun"),
    ("a wrong flag in a template", "03_zero/README.md", "--zero S", "--stage S", "03_zero has no --stage"),
    ("a wrong value", "03_zero/README.md", "--zero 1 ", "--zero 4 ", "--zero 4 is none of"),
    ("alternatives", "03_zero/README.md", "--zero 1 ", "--zero 1|2 ", "\"|\" cannot be pasted"),
    ("a placeholder", "03_zero/README.md", "-np 2", "-np N", "N is a placeholder"),
    ("a placeholder in the text", "03_zero/README.md", "--zero 2`", "--zero S`", "README.md:2: S is a placeholder"),
    ("dots", "03_zero/README.md", "--zero 1 ", "... ", "\"...\" cannot be pasted"),
    ("a missing program", "03_zero/README.md", "`build/bin/03_zero ", "`build/bin/03_zeros ", "builds no program 03_zeros"),
    ("a missing script", "03_zero/README.md", "cmake --build build", "bash tests/x.sh", "there is no tests/x.sh"),
    ("a missing target", "03_zero/README.md", "test_03_cuda", "test_03_gpu", "no target test_03_gpu"),
    ("a missing test", "03_zero/README.md", "'^03'", "'^04'", "no test is called ^04"),
    ("a missing link", "03_zero/README.md", "[zero](zero.cpp)", "[zero](zeros.cpp)", "link to zeros.cpp"),
    ("a missing name", "03_zero/README.md", "`gather`", "`unshard`", "`unshard` is in none of"),
    ("a trap without a test", "03_zero/README.md", "   `tests/03_zero.cpp: \"the ledger: each stage counts\"`\n", "",
     "this trap names no test"),
    ("a trap with a missing test", "03_zero/README.md", "stage counts", "stage measures", "has no test case"),
    ("another printed number", "bin/03_zero", "100 ", "101 ", "+1       101     2.50 ms"),
]


def self_test():
    failed = 0
    for name, file, old, new, said in [("nothing changed", "bin/03_zero", "", "", ""), *MUTATIONS]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            for path, text in MINIATURE.items():
                (root / path).parent.mkdir(exist_ok=True)
                (root / path).write_text(text.replace(old, new) if path == file and old else text)
            (root / "bin/03_zero").chmod(0o755)
            errors = Lessons(root, root / "bin").check(run=True)
            good = len(errors) == 1 and said in errors[0] if said else not errors
            if good and "snippet" in name:  # --write mends it
                Lessons(root, root / "bin").check(write=True)
                good = Lessons(root, root / "bin").check() == [] and (root / file).read_text() == MINIATURE[file]
        print(f"{'ok  ' if good else 'FAIL'} {name}" + ("" if good else ": " + ("\n".join(errors) or "no error")))
        failed += not good
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", nargs="?", type=pathlib.Path, help="folder of the programs")
    parser.add_argument("--write", action="store_true", help="rewrite the fences that differ")
    parser.add_argument("--run", action="store_true", help="also run the commands whose output is shown")
    parser.add_argument("--self-test", action="store_true", help="check the checks on a miniature of this repository")
    arguments = parser.parse_args()
    if arguments.self_test:
        sys.exit(self_test() > 0)
    if not arguments.bin:
        parser.error("which folder of programs?")
    lessons = Lessons(pathlib.Path(__file__).resolve().parents[1], arguments.bin.resolve())
    errors = lessons.check(arguments.write, arguments.run)
    for error in errors:
        print(error)
    if lessons.not_built:
        print(f"not built, so their flags were not checked: {', '.join(sorted(lessons.not_built))}")
    print(f"{len(errors)} differences" if errors else "the lessons agree with the code")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
