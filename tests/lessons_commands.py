"""The commands of the lessons, for tests/lessons.py: what of them exists, and whether they can be pasted."""
import contextlib
import os
import pathlib
import re
import shlex
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
import programs  # noqa: E402

COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:build/bin/|(?:mpirun|srun|bash|python3|cmake|ctest) )")
LOOP = re.compile(r"^for (\w+) in ([^;]*); do\b ?(.*?)(?:; done)?$")
# The options of other people's programs that lessons use, and how many words follow each.
OPTIONS = {
    "mpirun": {"-np": 1, "-q": 0, "-x": 1, "--oversubscribe": 0, "--allow-run-as-root": 0, "--hostfile": 1,
               "--map-by": 1, "--bind-to": 1},
    "srun": {"--mpi": 1, "--cpu-bind": 1},
    "cmake": {"-S": 1, "-B": 1, "-G": 1, "-j": 1, "--build": 1, "--target": 0},
    "pytest": {"-k": 1, "-q": 0, "-x": 0},
    "ctest": {"--test-dir": 1, "--output-on-failure": 0, "-V": 0, "-R": 1, "-L": 1, "-LE": 1},
}


def cmake_names(text):
    """Targets and tests that a CMakeLists.txt makes: loops are unrolled, calls are read by their names."""
    def unroll(match):
        return "\n".join(match[3].replace("${" + match[1] + "}", value) for value in match[2].split())
    text = re.sub(r"function\(.*?endfunction\(\)", "", re.sub(r"#.*", "", text), flags=re.S)
    text = re.sub(r"foreach\((\w+)\s+([^)]*)\)(.*?)endforeach\(\)", unroll, text, flags=re.S)
    targets, tests = set(), set()
    targets.update(re.findall(r"CREATE_LINK \S+ \S+/([\w.-]+)", text))
    for call, name in re.findall(r"(\w+)\(\s*(?:NAME )?([\w.-]+)", text):
        if call in ("add_executable", "add_program", "add_chapter", "add_custom_target"):
            targets.add(name)
            if call == "add_chapter":
                targets.add(name[:2] + "_minimal")
        elif call in ("add_unit_test", "add_ranks_test", "add_minimal_test", "add_cuda_test"):
            targets.add("test_" + name[:2])
            tests.add(name)
            if call == "add_cuda_test":  # where nvcc compiles the CUDA path, on the emulated GPU too
                tests.add(name.replace("cuda", "emulated"))
        elif re.fullmatch(r"add_\w+_tests?|add_pytest", call):
            tests.add(name)
    return targets, tests


class Program:
    """What a program's --help says: {flag: None (a switch), or the set of possible values, empty: any}."""

    def __init__(self, path):
        if path.name.endswith("_minimal"):  # no flags, at most one word
            self.flags, self.positionals = {}, 1
            return
        text = programs.output([path, "--help"], 60)
        self.flags, self.positionals = {}, len(re.findall(r"^  [A-Z]+ [A-Z]+  ", text, re.M))
        for flag, value in re.findall(r"^  (?:-\w,)?(--[a-z0-9-]+)(?: (\S+))?", text, re.M):
            self.flags[flag] = set(value.split("|")) if "|" in value else set() if value else None


@contextlib.contextmanager
def working_folder(root, binaries):
    """An empty folder that looks like the repository's root, for commands that write files."""
    with tempfile.TemporaryDirectory() as folder:
        for entry in root.iterdir():
            if entry.name not in ("build", ".git"):
                os.symlink(entry, pathlib.Path(folder, entry.name))
        pathlib.Path(folder, "build").mkdir()
        os.symlink(binaries, pathlib.Path(folder, "build/bin"))
        yield folder


def test_cases(file):
    """The names of a file's test cases; of a Python file, its tests and whatever stands in quotes."""
    text = file.read_text("utf-8")
    if file.suffix != ".cpp":
        return re.findall(r'"([^"\n]*)"', text) + re.findall(r"def (test_\w+)", text)
    return ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', name)).replace('\\"', '"')
            for name in re.findall(r'TEST_CASE\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', text)]


class Commands:
    """What a repository's root and a folder of programs have to offer, and the check of a command against it."""

    def __init__(self, root, binaries):
        self.root, self.bin = root, binaries
        self.programs, self.not_built = {}, set()
        self.targets, self.tests = set(), set()
        for file in (root / "CMakeLists.txt", root / "tests/CMakeLists.txt"):
            targets, tests = cmake_names(file.read_text("utf-8")) if file.exists() else (set(), set())
            self.targets |= targets
            self.tests |= tests

    def check(self, command, code, template, wrong):
        """Calls wrong(message) for what does not hold; code: the lines of the block in which the command stands."""
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
        loops = {loop[1]: loop[2].split() for loop in map(LOOP.match, map(str.strip, code)) if loop}
        for variable in re.findall(r"\$(\w+)", re.sub(r"'[^']*'", "", command)):
            for value in loops.get(variable, []):
                self.check(command.replace("$" + variable, value), code, template, wrong)
            return None if variable in loops else wrong(f"${variable} is not set")
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
        elif rest[:2] == ["-m", "pytest"]:
            self.check_pytest(rest[2:], wrong)
        elif first in ("bash", "python3"):
            script = self.root / rest[0]
            if not script.is_file():
                return wrong(f"there is no {rest[0]}")
            if "--" in rest:  # a script that starts another command
                self.check(shlex.join(rest[rest.index("--") + 1:]), code, template, wrong)
                rest = rest[:rest.index("--")]
            for flag in rest[1:]:
                if flag.startswith("--") and flag.split("=")[0] not in script.read_text("utf-8"):
                    wrong(f"{rest[0]} has no {flag}")
        elif first == "cmake":
            for word in self.skip_options(first, rest, wrong):
                if word.startswith("-D"):
                    if word[2:].split("=")[0] not in (self.root / "CMakeLists.txt").read_text("utf-8"):
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

    def check_pytest(self, words, wrong):
        """Of -k, that each word stands in a test file or in its name."""
        texts = [path.name + path.read_text("utf-8") for path in sorted((self.root / "tests").glob("test_*.py"))]
        for before, expression in zip(words, words[1:]):
            for word in re.findall(r"\w+", expression) if before == "-k" else []:
                if word not in ("and", "or", "not") and not any(word in text for text in texts):
                    wrong(f"no test of Python has {word} in its name")
        for file in self.skip_options("pytest", words, wrong):
            if not (self.root / file.split("::")[0]).is_file():
                wrong(f"there is no {file}")

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
                files = (self.root / "tests").glob(name[len("test_"):] + "_*.cpp")
                cases = [case for file in files for case in test_cases(file)]
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
            if "file:SCHEDULE" in values and value.startswith("file:"):
                continue
            if values and value not in values:
                wrong(f"{flag} {value} is none of {'|'.join(sorted(values))}")
