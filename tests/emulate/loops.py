#!/usr/bin/env python3
"""Which for loops of the .cu and .cuh files never went on after their first pass, in all runs of the emulated GPU? A
kernel's loop over columns may be taken once by every test and be wrong in what every real model needs.

    tests/emulate/loops.py FOLDER       where runs with EMULATE_LOOPS=FOLDER left what they took
    tests/emulate/loops.py --self-test  the exceptions of loops.txt exist, and a loop is found

Exit code 1 if a loop went on in no run and is not in loops.txt.
"""
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from transform import loop_number, loops, without_comments  # noqa: E402


def all_loops():
    """{number: (file, line, the loop's text)}"""
    found = {}
    for path in sorted([*ROOT.glob("0*/**/*.cu"), *ROOT.glob("0*/**/*.cuh")]):
        name, text = str(path.relative_to(ROOT)), without_comments(path.read_text())
        for line, _, _ in loops(text):
            number = loop_number(name, line)
            if found.get(number, (name, line))[:2] != (name, line):
                sys.exit(f"{name}:{line} and {found[number][0]}:{found[number][1]} have one number: add a blank line")
            found[number] = name, line, text.splitlines()[line - 1].strip()
    return found


def exceptions(known):
    """Loops that may not go on: "FILE  START OF THE LOOP  # why" in loops.txt."""
    texts = {(name, text) for name, _, text in known.values()}
    allowed = set()
    for entry in (HERE / "loops.txt").read_text().splitlines():
        if not entry or entry.startswith("#"):
            continue
        name, text = entry.split("  # ")[0].split("  ", 1)
        fits = {each for each in texts if each[0] == name and each[1].startswith(text)}
        if not fits:
            sys.exit(f"tests/emulate/loops.txt: {name} has no loop that begins with {text}")
        allowed |= fits
    return allowed


def main():
    known = all_loops()
    allowed = exceptions(known)
    if sys.argv[1:] == ["--self-test"]:
        columns = [each for each in known.values() if each[0].endswith("rmsnorm.cu") and "c < cols" in each[2]]
        print(f"{len(known)} loops, {len(allowed)} exceptions, {len(columns)} over RMSNorm's columns")
        sys.exit(not columns)
    reports = list(pathlib.Path(sys.argv[1]).iterdir())
    taken = {int(number) for report in reports for number in report.read_text().split()}
    missing = [each for number, each in known.items() if number not in taken and (each[0], each[2]) not in allowed]
    for name, line, text in sorted(missing):
        print(f"{name}:{line}: no test takes this loop twice: {text}")
    print(f"{len(known)} loops in {len(reports)} runs, {len(missing)} never go on, {len(allowed)} may not")
    sys.exit(bool(missing or not reports))


if __name__ == "__main__":
    main()
