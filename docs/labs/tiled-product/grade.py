#!/usr/bin/env python3
"""Grades the lab tiled-product (docs/labs/README.md): grade.py BUILD FILE prints the rows of the score card as JSON.

The kernel is compiled for the emulated GPU (tests/emulate) and judged by what that reports. Exit code 2, one line on
stderr: no headers of CUDA, or a file that does not compile.
"""
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
EMULATE = ROOT / "tests/emulate"
PARTS = ("access", "block", "counts", "device_functions", "devices", "memory", "runtime")
HEADERS = ["/usr/local/cuda/include", ROOT / "cuda-headers/nvidia/cu13/include"]  # the toolkit's, those of pip
SECTORS = 2 * 4 * 2 * 32 * 4  # tiles, blocks, rounds, lines of a tile, sectors of 32 floats
SECONDS = 60


def refuse(line):
    print(f"tiled-product: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)


def headers(build):
    """The folder of CUDA's headers: that of the build, or one of HEADERS."""
    cache = (build / "CMakeCache.txt").read_text("utf-8") if (build / "CMakeCache.txt").exists() else ""
    known = re.findall(r"^(?:TRAIN70B_CUDA_HEADERS|CUDAToolkit_INCLUDE_DIR):\w+=(.*)$", cache, re.M)
    for folder in [*known, *HEADERS]:
        if (pathlib.Path(folder) / "cuda_runtime_api.h").exists():
            return folder
    return refuse("the emulated GPU needs CUDA's headers: pip install --no-deps --target cuda-headers "
                  "nvidia-cuda-runtime nvidia-cuda-crt")


def compiled(build, file):
    """The program: the kernel behind the emulator's translator, the emulator."""
    compiler = ["g++", "-std=c++20", "-O1", "-g1", "-gdwarf-4", "-march=x86-64-v3", f"-ffile-prefix-map={ROOT}=.",
                f"-I{EMULATE}/include", f"-isystem{headers(build)}"]
    environment = {**os.environ, "LC_ALL": "C"}
    (build / "lab").mkdir(parents=True, exist_ok=True)
    library, program = build / "libemulated_cuda.a", file.with_suffix(".program")
    with_harness, translated = file.with_suffix(".whole.cu"), file.with_suffix(".cpp")
    harness = pathlib.Path(__file__).parent / "harness.inc"
    with_harness.write_text(f"{file.read_text('utf-8')}\n{harness.read_text('utf-8')}", "utf-8")
    # A build without CUDA has no library.
    parts = [library] if library.exists() else [EMULATE / f"{part}.cpp" for part in PARTS]
    for command in ([sys.executable, EMULATE / "transform.py", file.name, with_harness, translated],
                    [*compiler, "-fsanitize=thread", "-c", translated, "-o", file.with_suffix(".o")],
                    [*compiler, file.with_suffix(".o"), *parts, "-lpthread", "-o", program]):
        done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", env=environment)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).split("\n")
            refuse(next((line for line in lines if "error" in line), lines[0]))
    return program


def run(program, *words, **settings):
    """(exit code, what it says)."""
    try:
        done = subprocess.run([program, *words], capture_output=True, encoding="utf-8", timeout=SECONDS,
                              env={**os.environ, **{f"EMULATE_{name}": value for name, value in settings.items()}})
    except subprocess.TimeoutExpired:
        return None, f"did not end within {SECONDS} s"
    return done.returncode, (done.stdout + done.stderr).strip()


def main():
    program = compiled(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
    rows = []

    def row(name, points, good, lesson, remark, found="", measured=()):
        rows.append({"row": name, "points": points * good, "of": points, "lesson": lesson, "measured": list(measured),
                     **({} if good else {"found": found, "remark": remark} if found else {"remark": remark})})

    code, said = run(program, ORDER="forward")
    for order in ("reverse", "random") if code == 0 else ():
        code, said = (code, said) if code else run(program, ORDER=order)
    row("right", 3, code == 0, "01_single_gpu/REFERENCE.md, \"Products by hand\"",
        "Every thread needs all 32 k of both tiles, those of this round and no others.", said.split("\n")[0])
    for order in ("forward", "random"):
        code, said = run(program, ORDER=order, RACES="1")
        if "race in" in said or code is None:
            break
    row("no race", 3, code is not None and "race in" not in said, "tests/emulate/README.md, \"Settings\"",
        "A tile must be complete before anyone reads it, and read by everyone before the next takes its place: one "
        "barrier for each.", next((line for line in said.split("\n") if "race in" in line), said))

    code, said = run(program, "first", STATS="1")
    counts = {what: (int(taken), int(best)) for what, taken, best in
              re.findall(r"product.*: (\w+ \w+), \d+ by warps: (\d+) \w+, (\d+) at best", said)}
    (reads, fewest), (writes, few) = (counts.get(f"shared {what}", (0, 0)) for what in ("reads", "writes"))
    row("bank conflicts", 3, 0 < reads == fewest and writes == few, "01_single_gpu/REFERENCE.md, \"Products by hand\"",
        "Nothing lies in shared memory." if reads == 0 else
        "In which banks do the words lie that the 32 lanes of a warp read for one j?" if reads > fewest else
        "Now the writes have the conflict: in which banks do the words lie that the lanes of a warp write?",
        measured=[{"what": f"turns of shared memory, {what}", "got": got, "expected": best, "unit": "",
                   "formula": "no bank conflict", "good": got == best} for what, got, best in
                  (("reads", reads, fewest), ("writes", writes, few))])
    sectors = counts.get("global reads", (0, 0))[0]
    row("global memory", 1, 0 < sectors <= SECTORS, "01_single_gpu/REFERENCE.md, \"Products by hand\"",
        "Each block reads each element of its tiles once; neighbouring lanes read neighbours.",
        measured=[{"what": "sectors read, M = N = K = 64", "got": sectors, "expected": SECTORS, "unit": "",
                   "formula": "2 tiles, 4 blocks, 2 rounds, 32 lines of 4", "good": 0 < sectors <= SECTORS}])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
