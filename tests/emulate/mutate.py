#!/usr/bin/env python3
"""Do the CUDA tests notice a mistake? Removes or inverts, one at a time, each barrier, event, wait and bound check of
the .cu and .cuh files, doubles each stride of a loop, makes each 64-bit number an int, and runs the tests of that file on
the emulated GPU.

    tests/emulate/mutate.py BUILD [--only REGEX] [--list] [--jobs N] [--csv FILE] [--plants]

--plants: the mistakes of plants.txt instead, with plants.csv as the record (its format: ../mutants/mutants.txt).

BUILD: configured with -DTRAIN70B_CUDA=EMULATE and built. A mutant is caught if a test fails, faults or hangs. The
sources stay as they are. Exit code 1 if fewer than nine in ten are caught.
"""
import argparse
import concurrent.futures
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests/mutants")]
import mutants as patches  # noqa: E402
from transform import closing, without_comments  # noqa: E402

# file: the tests that are to notice, each (chapter, ranks, doctest's arguments, environment)
OPS = [("01", 1, ["-tce=*attention*"], {})]
ATTENTION = [("01", 1, ["-tc=*attention*,*merging*"], {"TRAIN70B_TEST_SLICE": str(n)}) for n in range(8)]
ROUTING = [("01", 1, ["-tc=*router*,*slots*,*equal scores*,*of any number of rows*,*of no rows*", "-tce=*2^31*"], {})]
MODEL = [("01", 1, [], {"TRAIN70B_TEST_SLICE": "2", "EMULATE_STREAMS": "lazy"})]
NCCL = [("02", 2, [], {"EMULATE_STREAMS": s, "EMULATE_SEED": seed, "TRAIN70B_TEST_SLICE": part})
        for s, seed, part in (("random", "1", "0"), ("lazy", "2", "2"), ("random", "3", "4"), ("eager", "4", "6"))]
OFFLOAD = [("03", 2, [], {"EMULATE_STREAMS": s, "TRAIN70B_TEST_SLICE": part})
           for s, part in (("lazy", "5"), ("random", "6"), ("random", "4"))]
FP8 = [("07", 1, ["-tce=training*"], {})]
TALL = {"01": [("01", 1, ["-tc=*beyond 2^31*"], {"EMULATE_TAIL": "8", "EMULATE_RACES": "0"})],
        "07": [("07", 1, ["-tc=*beyond 2^31*"], {"EMULATE_TAIL": "8", "EMULATE_RACES": "0"})]}
TESTS = {"attention": ATTENTION, "routing": ROUTING, "grouped_matmul": ROUTING, "backend_nccl": NCCL,
         "cuda_device": MODEL + OFFLOAD, "fp8_cuda": FP8, "cuda.cuh": OPS + FP8, "": OPS}

HOST_STATEMENTS = (r"\b(?:CUDA_CHECK\((?:cudaEventRecord|cudaStreamWaitEvent|cudaEventSynchronize|cudaStreamSynchronize)\b"
                   r"|cuda_synchronize\(|ready_\.block\(|end_->block\(|after_wait_->synchronize\(|synchronize\(\);)")


def mutants_of(name):
    """(line, kind, what, begin, end, replacement) of each mutant of a file."""
    source = (ROOT / name).read_text()
    text = without_comments(source)
    line = lambda at: text[:at].count("\n") + 1
    found = []

    def add(begin, end, kind, new):
        found.append((line(begin), kind, " ".join(source[begin:end].split()), begin, end, new))

    for m in re.finditer(r"\b(?:__sync(?:threads|warp)|arrived)\(\);", text):
        add(m.start(), m.end(), "barrier removed", ";")
    for m in re.finditer(r'\basm volatile\("cp\.async\.wait_all;"[^;]*;', text):
        add(m.start(), m.end(), "wait removed", ";")
    for m in re.finditer(r"\b__syncthreads_or", text):
        add(m.start(), m.end(), "barrier removed", "")
    for m in re.finditer(HOST_STATEMENTS, text):
        end = text.index(";", closing(text, text.index("(", m.start()))) + 1
        statement = text[m.start():end]
        if "void " not in text[max(0, m.start() - 6):m.start()]:
            kind = "event removed" if re.search("Record|block|WaitEvent", statement) else "wait removed"
            add(m.start(), end, kind, ";")
    # Bounds: comparisons of order in conditions of if and ?:, not those of loops.
    for m in re.finditer(r"\bif (?:constexpr )?\(", text):
        end = closing(text, m.end() - 1)
        condition = text[m.end():end]
        compares = re.search(r"(?<![<>-])(<=?|>=?)(?![<>])", condition)
        if "constexpr" in m[0] or not compares or re.search("<<|exceptions", condition):
            continue
        declaration, semicolon, condition = condition.rpartition(";")
        begin = m.end() + len(declaration) + len(semicolon)
        leaves = re.match(r"\s*(return|continue|break)\b", text[end + 1:])
        add(begin, end, "bound removed", " false" if leaves else " true")
        add(begin, end, "bound inverted", f" !({condition.strip()})")
    for m in re.finditer(r"(?<=[=(,;{]) ?([^=(,;{}?]*?(?:\([^()]*\)[^=(,;{}?]*?)?(?:<|>=) [^=,;{}?]*?) \? ", text):
        if "<<" not in m[1] and "template" not in m[1]:
            add(m.start(1), m.end(1), "bound removed", " true")
            add(m.start(1), m.end(1), "bound inverted", f" !({m[1].strip()})")
    # Loops that go on by more than 1, and numbers that a real model's sizes need in 64 bits.
    for m in re.finditer(r"\bfor \(", text):
        header = text[m.end():closing(text, m.end() - 1)]
        step = re.search(r";[^;]*\b\w+ \+= ([^,;]+?)\s*$", header)
        if step:
            add(m.end() + step.start(1), m.end() + step.end(1), "stride doubled", f"2 * ({step[1]})")
    for m in re.finditer(r"\b(int64_t) \w+ = ", text):
        add(m.start(1), m.end(1), "64 bits to 32", "int")
    return [(name, number, kind, what, source[:begin] + new + source[end:])
            for number, kind, what, begin, end, new in sorted(found, key=lambda f: f[3])]


def plants():
    """Those of plants.txt, each in one file."""
    for plant in patches.read(Path(__file__).parent / "plants.txt", (".cu", ".cuh")):
        [(name, text)] = patches.changed(plant, ROOT).items()
        before = (ROOT / name).read_text().splitlines()
        line = next(i for i, pair in enumerate(zip(before, text.splitlines()), 1) if pair[0] != pair[1])
        yield name, line, plant.name, plant.what, text


class Build:
    """Its commands, and of each translated .cu file the file that is compiled: itself, or one that includes several."""

    def __init__(self, folder):
        self.folder = folder
        self.commands = {Path(c["output"]).name if "output" in c else c["file"]: c
                         for c in json.loads((folder / "compile_commands.json").read_text())}
        self.compiled = {}
        for file in sorted(c["file"] for c in self.commands.values()):
            if re.search(r"/emulated/.*\.cu\.cpp$", file):
                self.compiled[file] = file
            elif "/emulated_objects_" in file:  # CMake's own, of TRAIN70B_UNITY
                for source in re.findall(r'#include "(.*/emulated/.*\.cu\.cpp)"', Path(file).read_text()):
                    self.compiled[source] = file

    def compile_command(self, source):
        return next(c["command"] for c in self.commands.values() if c["file"] == source)

    def link_command(self, program):
        lines = subprocess.run(["ninja", "-C", str(self.folder), "-t", "commands", program], capture_output=True,
                               text=True, check=True)
        return lines.stdout.splitlines()[-1]

    def includers(self, name):
        """The sources that a file is compiled in."""
        if name.endswith(".cu"):
            return [s for s in self.compiled if s.endswith("/emulated/" + name + ".cpp")]
        everywhere = Path(name).name == "cuda.cuh"  # also through the others
        return [s for s in self.compiled if everywhere or name in Path(s).read_text()]


def try_mutant(build, mutant, timeout):
    name, line, kind, what, text = mutant
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        changed = scratch / "changed" / name
        changed.parent.mkdir(parents=True)
        changed.write_text(text)
        made = scratch / "emulated" / (name + (".cpp" if name.endswith(".cu") else ""))
        made.parent.mkdir(parents=True)
        subprocess.run([sys.executable, ROOT / "tests/emulate/transform.py", name, changed, made], check=True)
        objects = {}
        includers = build.includers(name)
        for original in sorted({build.compiled[s] for s in includers}):
            command = shlex.split(build.compile_command(original))
            output = command[command.index("-o") + 1]
            new_output = str(scratch / f"{len(objects)}_{Path(output).name}")  # of two chapters, names may be equal
            objects[output] = new_output
            command[command.index("-o") + 1] = new_output
            narrow = kind == "64 bits to 32"  # -Wconversion notices what is implicit: here it is as if it were explicit
            command = [c for c in command if c != "-Werror"] + ["-Wno-conversion"] * narrow
            if name.endswith(".cu"):
                source = made
                if original not in includers:
                    source = scratch / Path(original).name
                    source.write_text(Path(original).read_text().replace(includers[0], str(made)))
                command[command.index(original)] = str(source)
            else:
                command.insert(1 if command[0].endswith("++") else 2, "-I" + str(scratch / "emulated"))
            for flag in ("-MD", "-MT", "-MF"):
                if flag in command:
                    at = command.index(flag)
                    del command[at:at + (1 if flag == "-MD" else 2)]
            result = subprocess.run(command, cwd=build.folder, capture_output=True, text=True)
            if result.returncode:
                first = next((l for l in result.stderr.splitlines() if "error" in l), "")
                return "does not compile", first[-160:]
        programs = {}
        for test in tests_of(mutant):
            program = f"test_{test[0]}"
            if program not in programs:
                programs[program] = scratch / program
                command = build.link_command(program)
                for old, moved in objects.items():
                    command = re.sub(r"(?<=\s)" + re.escape(old) + r"(?=\s)", moved, command)
                command = command.replace(f"-o bin/{program} ", f"-o {scratch / program} ")
                subprocess.run(command, shell=True, cwd=build.folder, check=True, capture_output=True)
            if seen := failure(scratch / program, test, timeout):
                return "caught", seen
        return "survived", ""


def tests_of(mutant):
    name, _, kind, *_ = mutant
    tall = TALL.get(name[:2], [])
    if kind == "64 bits to 32":
        return tall
    tests = next(t for key, t in TESTS.items() if key in Path(name).name)
    return tall + tests if kind.endswith("-32") else tests  # a plant's name


def failure(program, test, timeout):
    """What a test says that fails, faults or hangs; nothing if it passes."""
    chapter, ranks, arguments, environment = test
    start = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
    settings = {"OMP_NUM_THREADS": "1", "EMULATE_GPUS": str(ranks), "EMULATE_RACES": "1", "TRAIN70B_TEST_SLICE": "all",
                "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    with subprocess.Popen(start + [str(program), f"--source-file=*/{chapter}_cuda*.cpp", "--abort-after=1", *arguments],
                          cwd=ROOT, text=True, env={**os.environ, **settings, **environment}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, errors="replace") as run:
        try:
            output = run.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            run.terminate()
            run.communicate()
            return f"{program.name}: does not end"
    if not run.returncode:
        return ""
    lines = re.sub(r"\x1b\[[0-9;]*m|/\S*/emulated/", "", output).splitlines()
    shown = [l for l in lines if re.match("emulate: (race|illegal|deadlock|diverg)", l)] or \
            [l for l in lines if re.search("ERROR: |check failed", l)] or [l for l in lines if "emulate: " in l]
    return f"{program.name}: {shown[0][:160] if shown else 'exit code ' + str(run.returncode)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--only", default="", help="mutants whose 'file:line kind' matches")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plants", action="store_true")
    options = parser.parse_args()
    files = subprocess.run(["git", "ls-files", "*.cu", "*.cuh"], cwd=ROOT, capture_output=True, text=True, check=True)
    mutants = list(plants()) if options.plants else [m for name in files.stdout.split() for m in mutants_of(name)]
    mutants = [m for m in mutants if re.search(options.only, f"{m[0]}:{m[1]} {m[2]}")]
    if options.list:
        for name, line, kind, what, *_ in mutants:
            print(f"{name}:{line}  {kind}: {what}")
        print(len(mutants), "mutants")
        return
    build = Build(options.build.resolve())
    needed = {repr(test): test for mutant in mutants for test in tests_of(mutant)}
    for test in needed.values():  # with a test that fails anyway, all would seem caught
        if seen := failure(build.folder / "bin" / f"test_{test[0]}", test, options.timeout):
            sys.exit(f"{options.build} fails without a mutant: {seen}")
    rows = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        began = time.time()
        for mutant, (verdict, why) in zip(mutants, pool.map(lambda m: try_mutant(build, m, options.timeout), mutants)):
            name, line, kind, what, *_ = mutant
            rows.append([f"{name}:{line}", kind, what, verdict, why])
            print(f"{time.time() - began:6.0f} s  {verdict:9} {name}:{line}  {kind}: {what}  {why}", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["place", "kind", "code", "verdict", "noticed by"], *rows])
    real = [r for r in rows if r[3] != "does not compile"]
    caught = sum(r[3] == "caught" for r in real)
    print(f"{caught} of {len(real)} caught; {len(rows) - len(real)} do not compile")
    sys.exit(0 if caught >= 0.9 * len(real) else 1)


if __name__ == "__main__":
    main()
