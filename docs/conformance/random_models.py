#!/usr/bin/env python3
"""The board's known-good cells on models that nobody chose: random shapes and settings, repeated from what 01_single_gpu
writes. Every model is run on one rank and in the next known-good layouts of the board; all must agree.

Run:   python3 docs/conformance/random_models.py --out out/random --models 20 --more 2 --programs build/bin
Watch: docs/results/conformance_random.csv, one line per model and cell. Exit code 1 if one differs.
"""
import argparse
import pathlib
import random
import sys

import board
import programs  # board has set the path
import tables

COLUMNS = ("model", "framework", "layout", "worst gradient", "verdict", "flags")


def flags_of(seed):
    """Shapes that every layout of the board can cut in two."""
    draw = random.Random(seed).choice
    kv, group, size = draw([2, 4]), draw([1, 2, 3]), draw([4, 8, 12, 16])
    return {"layers": draw([2, 3, 4, 5]), "hidden": kv * group * size, "heads": kv * group, "kv-heads": kv,
            "ffn": 2 * draw(range(12, 60)), "seq-len": 4 * draw(range(4, 13)), "global-batch": 8, "steps": 4, "seed": seed,
            "init-std": draw([0.05, 0.08, 0.1]), "lr": draw([0.001, 0.003]), "clip": draw([0, 0.3, 1]),
            "weight-decay": draw([0, 0.1, 0.3]), "eps": draw(["1e-5", "1e-6"])}


def known_good():
    """One cell after another, each framework in turn; those whose model is not the reference's family are left out."""
    agreed = {(row["framework"], row["layout"]) for row in tables.read(board.CSV) if row["verdict"] == "agrees"}
    good = [cell for cell in board.cells() if (cell["framework"], cell["layout"]) in agreed and cell["ranks"] <= 4
            and cell["reference"] in ("gqa", "masked")]
    by = {}
    for cell in good[1:]:  # good[0] runs on every model
        by.setdefault(cell["framework"], []).append(cell)
    order = sorted((i, list(by).index(name), cell["layout"]) for name, own in by.items() for i, cell in enumerate(own))
    return good[0], [by[list(by)[f]][i] for i, f, _ in order]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=board.ROOT / "out/random")
    parser.add_argument("--programs", type=pathlib.Path, default=board.ROOT / "build/bin")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--more", type=int, default=1, help="layouts of each model besides one rank")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    one, others = known_good()
    table = []
    for i in range(args.models):
        flags = [word for key, x in flags_of(i + 1).items() for word in (f"--{key}", str(x))]
        reference = out / f"model-{i + 1}"
        if not reference.exists():
            program = args.programs.resolve() / "01_single_gpu"
            programs.output([program, *flags, "--device", "cpu", "--save-reference", reference])
        for cell in (one, *(others[(i * args.more + j) % len(others)] for j in range(args.more))):
            cell = {**cell, "reference": reference.name}
            verdict, gradient, cause, _ = board.run({k: v for k, v in cell.items() if k != "patch"}, out, out)["as it is"]
            table.append({"model": i + 1, "framework": cell["framework"], "layout": cell["layout"], "worst gradient": gradient,
                          "verdict": verdict, "flags": " ".join(flags)})
            if verdict != "agrees":
                print(f"model {i + 1}: {verdict}: {cause}")
    tables.write(board.RANDOM, table, COLUMNS)
    return any(row["verdict"] != "agrees" for row in table)


if __name__ == "__main__":
    sys.exit(main())
