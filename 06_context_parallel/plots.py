#!/usr/bin/env python3
"""The picture of chapter 06: who sees what, and who has how much to do.

    python3 06_context_parallel/plots.py [--out docs/results]

06_causal.png      the causal triangle of 4 ranks: plain ring and zigzag; the share of each rank beside it (computed)
"""
import argparse
import pathlib
import sys

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
import style

COLOURS = [style.BLUE, style.RED, style.GREEN, style.YELLOW]  # of the ranks
RANKS = 4


def owner(token, tokens, chunks):
    """The rank whose query this is."""
    chunk = token * RANKS * chunks // tokens
    return chunk if chunk < RANKS else 2 * RANKS - 1 - chunk


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    arguments = parser.parse_args()
    tokens = 64
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.9), width_ratios=[1, 0.8, 1, 0.8])
    for panel, (name, chunks) in enumerate((("ring", 1), ("zigzag", 2))):
        image, work = [], [0] * RANKS
        for query in range(tokens):
            rank = owner(query, tokens, chunks)
            work[rank] += query + 1
            colour = matplotlib.colors.to_rgb(COLOURS[rank])
            image.append([colour if key <= query else (1, 1, 1) for key in range(tokens)])
        axes[2 * panel].imshow(image, interpolation="nearest")
        axes[2 * panel].set(title=name, xlabel="keys", ylabel="queries", xticks=[], yticks=[])
        total = sum(work)
        axes[2 * panel + 1].bar(range(RANKS), [100 * each / total for each in work], color=COLOURS)
        axes[2 * panel + 1].set(title="% of the work", xlabel="rank", xticks=range(RANKS), ylim=(0, 50))
    figure.tight_layout()
    figure.savefig(arguments.out / "06_causal.png", dpi=130)


if __name__ == "__main__":
    main()
