#!/usr/bin/env python3
"""What was checked before: docs/predict.py and tests/claims.py run a documented command again only if its key is new.

A key is a hash of
    sources    of the programs that it, or a Python script that it names, starts: *.h, *.cpp, *.json of the program's
               chapter and all lower ones, of files with a main() only its own; CMakeLists.txt. No comments, no
               formatting; no CUDA, all runs are on the CPU
    files      of the repository that it names, the Python modules that they import, the course's text
    text       the command, the expressions, and the figures that these are held to

What passes becomes a line "KEY  PAGE  NAME" of BUILD_FOLDER/checked.txt; --record, after a whole run that passed,
writes the lines of today's keys to docs/results/checked.txt. Both are read. Only an entire line counts: what is damaged
is run again. What a program prints that is older than its sources is checked, but not recorded. Argument: --self-test
"""
import hashlib
import json
import os
import pathlib
import re
import sys
import urllib.parse

SCRIPTS = {"compare": "docs/compare.py"}  # links to them among the programs
RECORD, CORPUS = "docs/results/checked.txt", "docs/data/corpus.txt"
MAINS = {"schedule": "05_pipeline/schedule_main.cpp",
         "plan": "08_3d_full/plan/main.cpp"}  # of all other programs: NAME/main.cpp
PROGRAM = re.compile(r"build/bin/([\w.-]+)")
# Comments, literals, and what a quotation mark may belong to: 1'000, names before a string.
TOKEN = re.compile(r"""//(?:\\\n|[^\n])* | /\*.*?\*/ | (?:u8|[uUL])?R"([^\s()\\]{0,16})\(.*?\)\1"
                       | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | \.?\d(?:'?[\w.])* | [A-Za-z_]\w*""", re.S | re.X)


def cpp_code(text):
    """C++ without comments, and without white space that means nothing; the preprocessor's lines remain lines."""
    def token(match):
        if match[0].startswith(("//", "/*")):
            return " "
        return urllib.parse.quote(match[0]) if match[0][-1] in "\"'" else match[0]  # a literal keeps its white space
    parts = re.split(r"^([ \t]*#.*)$", TOKEN.sub(token, text).replace("\\\n", " "), flags=re.M)
    parts = [" ".join(part.split()) for part in parts]  # every second one is such a line
    return "\n".join(part if i % 2 else re.sub(r" ?([(){}\[\],;]) ?", r"\1", part) for i, part in enumerate(parts))


def cmake_code(text):
    return " ".join(re.sub(r'("(?:\\.|[^"\\])*")|#.*', r"\1", text).split())


def lines_of(path):
    text = path.read_text(errors="replace") if path.is_file() else ""
    return {line for line in text.split("\n") if re.fullmatch(r"[0-9a-f]{16}  \S+  \S.*", line)}


def write(path, lines):
    if lines != lines_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(lines, key=lambda line: (line[16:], line))
        path.with_suffix(".tmp").write_text("".join(f"{line}\n" for line in ordered))
        os.replace(path.with_suffix(".tmp"), path)


class Checked:
    """The records of a repository and of the build folder around its programs; everything: run all again."""

    def __init__(self, root, programs, everything=False):
        self.root, self.bin, self.everything = root, programs, everything
        self.recorded, self.built = root / RECORD, programs.parent / "checked.txt"
        self.old = lines_of(self.recorded) | lines_of(self.built)
        self.now, self.failed, self.behind, self.held_back, self.code, self.hashes = set(), set(), set(), set(), {}, {}

    def programs(self, commands):
        """The programs that commands start; a script names a chapter's by the chapter's files."""
        scripts = [self.root / path for path in re.findall(r"[\w./-]+\.py\b", " ".join(commands))]
        text = "".join(path.read_text() for path in scripts if path.is_file())
        chapters = [name for name in re.findall(r"\b(\d\d_\w+)/", text) if (self.root / name / "main.cpp").is_file()]
        return sorted({*PROGRAM.findall(" ".join(commands)), *chapters} - {*SCRIPTS})

    def program(self, name):
        """The hash of a program's sources; "" if it belongs to no chapter."""
        if name not in self.hashes:
            main = self.root / MAINS.get(name, f"{name}/main.cpp")
            chapter = main.relative_to(self.root).parts[0]
            paths = [path for suffix in ("h", "cpp", "json") for path in self.root.glob(f"[0-9][0-9]_*/**/*.{suffix}")
                     if path.relative_to(self.root).parts[0] <= chapter]
            for path in paths:
                if path not in self.code:
                    self.code[path] = path.read_text() if path.suffix == ".json" else cpp_code(path.read_text())
            paths = [path for path in paths if path == main or "int main(" not in self.code[path]]
            text = json.dumps(sorted([str(path.relative_to(self.root)), self.code[path]] for path in paths))
            self.hashes[name] = hashlib.sha256(text.encode()).hexdigest() if paths else ""
            newest = [max([path.stat().st_mtime_ns for path in group if path.is_file()], default=0) for group in
                      ([path for path in paths if path.suffix != ".json"], [self.bin / name, self.bin / chapter])]
            self.behind |= {name} if newest[0] > newest[1] else set()  # any change below links the chapter's anew
        return self.hashes[name]

    def files(self, words):
        """[[path, hash]] of the repository's files that the words name."""
        found, todo = {}, [self.root / word for word in words if not word.startswith("build/")]
        for path in todo:
            if path not in found and self.root in path.parents and path.is_file():
                found[path] = hashlib.sha256(path.read_bytes()).hexdigest()
                if path.suffix == ".py":
                    folders = [path.parent, self.root / "docs", self.root / "tests"]
                    for module in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M):
                        for folder in folders:
                            todo += [folder / f"{module}.py", *sorted((folder / module).glob("*.py"))]
        return sorted([str(path.relative_to(self.root)), digest] for path, digest in found.items())

    def line(self, page, name, commands, held):
        """The line of a check: of what it runs, and of what that is held to. "": it has no key."""
        programs = self.programs(commands)
        hashes = [self.program(each) for each in programs]
        words = re.findall(r"[\w./-]+", " ".join(commands)) + [CORPUS] * bool(programs)
        words += [path for name, path in SCRIPTS.items() if f"build/bin/{name}" in words]
        cmake = cmake_code((self.root / "CMakeLists.txt").read_text()) if programs else ""
        text = json.dumps([programs, hashes, cmake, self.files(words), commands, held])
        line = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}  {page}  {' '.join(name.split())}" * all(hashes)
        self.now |= {line} & self.old
        return line

    def is_known(self, line):
        return not self.everything and line in self.old

    def result(self, line, commands, good):
        """A check has passed or failed."""
        if not good:
            self.failed.add(line)
            self.now.discard(line)
        elif behind := self.behind & set(self.programs(commands)):
            self.held_back |= behind
        elif line:
            self.now.add(line)

    def save(self):
        names = {line[16:] for line in self.now}
        write(self.built, {line for line in lines_of(self.built) if line[16:] not in names} - self.failed | self.now)

    def record(self, pages):
        """After a whole run of these pages: the repository's record has their lines of today, and those of others."""
        write(self.recorded, {line for line in lines_of(self.recorded) if line.split("  ")[1] not in pages} | self.now)


# Pairs of texts of one meaning, and of two.
SAME = [("int a; // one", "int a;  /* two\n */"), ("f(a,  b)", "f( a,\n  b )"), ("x = 1'000; // y'", "x = 1'000;"),
        ("s = \"//\"; // c", "s = \"//\";"), ("c = '\"'; /* \" */", "c = '\"';"), ("#if A // b\nc", "#if A\nc"),
        ("// a \\\nb\nc", "c"), ("R\"(a // \")\" /* b */;", "R\"(a // \")\";"), ("f('\\'') // '", "f('\\'')")]
OTHER = [("\"a // b\"", "\"a // c\""), ("\"a  b\"", "\"a b\""), ("a + +b", "a ++b"), ("x = 1'000", "x = 1'001"),
         ("R\"x(/* a */)\" )x\"", "R\"x(/* b */)\" )x\""), ("#define F (a)\nb", "#define F(a)\nb"),
         ("'/'; a//'\n;", "'/'; b//'\n;"), ("#if A\nb", "#if A b"), ("L'\"'; a; // \"", "L'\"'; b; // \""),
         ("\"\\\"/*\"; a; \"*/\"", "\"\\\"/*\"; b; \"*/\"")]


def self_test():
    wrong = [f"one meaning: {a!r} {b!r}" for a, b in SAME if cpp_code(a) != cpp_code(b)]
    wrong += [f"two meanings: {a!r} {b!r}" for a, b in OTHER if cpp_code(a) == cpp_code(b)]
    wrong += ["CMake"] * (cmake_code('set(A "#b") # c') != 'set(A "#b")')
    root = pathlib.Path(__file__).resolve().parent.parent
    programs = Checked(root, root / "build/bin").programs(["python3 docs/measure.py front"])
    wrong += [f"a script's programs: {programs}"] * (len(programs) != 8)
    print("\n".join(wrong) or f"ok   {len(SAME) + len(OTHER) + 2} texts")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(self_test() if sys.argv[1:] == ["--self-test"] else __doc__)
