#!/usr/bin/env python3
"""The picture of chapter 03: runs the program at each stage and draws rank 0's memory over one training step.

    python3 03_zero/plots.py [--ranks 4] [--out docs/results] [--bin build/bin]

03_memory.png    bytes by kind over the second step, stages 0 to 3: what lies flat shrinks to 1/N kind by kind, and in stage 3
                 the gathered units pass through the workspace one after the other
"""
import argparse
import csv
import pathlib
import subprocess
import sys
import tempfile

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
import style

KINDS = ["params", "grads", "optimizer", "workspace", "comm", "activations"]  # the mountain on top of what this chapter moves
# Few tokens and wide blocks, so that the model's own bytes can be seen beside the activations.
SHAPE = ["--layers", "6", "--hidden", "256", "--ffn", "768", "--seq-len", "32", "--global-batch", "4"]


def second_step(program, ranks, stage, folder):
    timeline = folder / f"{stage}.csv"
    subprocess.run(["mpirun", "--oversubscribe", "-np", str(ranks), program, *SHAPE, "--steps", "2", "--zero", str(stage),
                    "--tables", "off", "--memory-timeline", timeline], check=True, stdout=subprocess.DEVNULL)
    rows = list(csv.DictReader(open(timeline)))
    starts = [i for i, row in enumerate(rows) if row["phase"] == "forward 0" and rows[i - 1]["phase"] != "forward 0"]
    ends = [i for i, row in enumerate(rows) if i > starts[1] and row["phase"] == "update"]
    return rows[starts[1]:ends[-1] + 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.8), sharey=True)
    with tempfile.TemporaryDirectory() as folder:
        for stage, axis in enumerate(axes):
            rows = second_step(arguments.bin / "03_zero", arguments.ranks, stage, pathlib.Path(folder))
            layers = [[int(row[kind]) / 2**20 for row in rows] for kind in KINDS]
            axis.stackplot(range(len(rows)), layers, colors=style.colours(KINDS), labels=KINDS, lw=0)
            turn = next(i for i, row in enumerate(rows) if row["phase"].startswith("backward"))
            axis.axvline(turn, color="black", lw=0.7, ls=":")
            axis.set(title=f"stage {stage}", xlabel="allocations: forward | backward, update", xlim=(0, len(rows) - 1))
            axis.set_xticks([])
    axes[0].set_ylabel(f"MiB on rank 0 of {arguments.ranks}")
    axes[3].legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(arguments.out / "03_memory.png", dpi=130)


if __name__ == "__main__":
    main()
