#!/usr/bin/env python3
"""Compares the first moments of two checkpoints, which after step 1 are (1 - beta1) times the gradients of that step
(times the same number if the norm was clipped): how runs with experts, which --save-reference refuses, are compared.

    python3 docs/drills/moments.py A/step-1 B/step-1

Prints each parameter whose moments differ, of experts also which of them, with the factor of A over B. Exit code 0: all
within 0.1%; 1: not; 2: bad input.
"""
import array
import json
import math
import pathlib
import re
import struct
import sys

TOLERANCE = 1e-3  # of a parameter, or of an expert; rounding in fp32 is some 1e-6
TYPES = {"F32": "f", "F64": "d"}
NAME = re.compile(r"exp_avg/(.+)\[(\d+):(\d+)(?:,(\d+):(\d+))?\]")


class Usage(Exception):
    """Bad input: one line, exit code 2."""


def tensors(path):
    data = path.read_bytes()
    length, = struct.unpack_from("<Q", data)
    for name, its in json.loads(data[8:8 + length]).items():
        found = NAME.fullmatch(name)
        if found:
            if its["dtype"] not in TYPES:
                raise Usage(f"{path}: moments in {its['dtype']}: needs --optimizer adamw")
            begin, end = its["data_offsets"]
            yield found.groups(), array.array(TYPES[its["dtype"]], data[8 + length + begin:8 + length + end])


class Moments:
    """{parameter: {(row, column): value}} of a checkpoint, whose rectangles may lie in any of its files."""

    def __init__(self, folder):
        folder = pathlib.Path(folder)
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            self.step, self.experts = manifest["step"], int(manifest["flags"].get("experts") or 0)
            self.values = {}
            for entry in manifest["files"]:
                for (name, *numbers), data in tensors(folder / entry["name"]):
                    r0, r1, c0, c1 = (int(x) if x else default for x, default in zip(numbers, (0, 0, 0, 1)))
                    its = self.values.setdefault(name, {})
                    width = c1 - c0
                    its.update(((r0 + i // width, c0 + i % width), x) for i, x in enumerate(data))
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise Usage(f"{folder}: no full checkpoint ({type(error).__name__}: {error})") from None


def factor(a, b, cells):
    """(A over B by least squares, how far A is from B, relative to B); of zeros (1, 0)."""
    square = sum(b[cell] ** 2 for cell in cells)
    apart = math.sqrt(sum((a[cell] - b[cell]) ** 2 for cell in cells))
    if square == 0:
        return (1.0, 0.0) if apart == 0 else (math.inf, math.inf)
    return sum(a[cell] * b[cell] for cell in cells) / square, apart / math.sqrt(square)


def parts_of(name, cells, experts):
    """[(what, cells)]: of a parameter of experts, each of them."""
    if ".experts." not in name or not experts:
        return [("", cells)]
    each = (max(row for row, _ in cells) + 1) // experts
    parts = [[] for _ in range(experts)]
    for cell in cells:
        parts[cell[0] // each].append(cell)
    return [(f", expert {number}", part) for number, part in enumerate(parts)]


def compare(a, b):
    """[line] of what differs, the parameter with the largest difference first."""
    found = []
    for name in b.values:
        lines, worst = [], 0.0
        for what, cells in parts_of(name, list(b.values[name]), b.experts):
            ratio, apart = factor(a.values[name], b.values[name], cells)
            if not apart <= TOLERANCE:
                lines.append(f"{name}{what}: {ratio:.4f} times, {apart:.2g} apart")
                worst = max(worst, apart)
        if lines:
            found.append((worst, lines))
    return [line for _, lines in sorted(found, key=lambda each: -each[0]) for line in lines], len(found)


def main():
    try:
        if len(sys.argv) != 3:
            raise Usage("takes two checkpoints: python3 docs/drills/moments.py A/step-1 B/step-1")
        a, b = map(Moments, sys.argv[1:])
        if a.step != b.step or {name: set(its) for name, its in a.values.items()} != {
                name: set(its) for name, its in b.values.items()}:
            raise Usage(f"{sys.argv[1]}, {sys.argv[2]}: not of the same step and model")
    except Usage as usage:
        print(f"moments.py: {' '.join(str(usage).split())}", file=sys.stderr)
        return 2
    lines, count = compare(a, b)
    for line in lines:
        print(line)
    print(f"{count} of {len(b.values)} parameters differ by more than {TOLERANCE:.1%}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
