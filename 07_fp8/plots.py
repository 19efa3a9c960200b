#!/usr/bin/env python3
"""The pictures of chapter 07.

    python3 07_fp8/plots.py [--out docs/results] [--losses docs/results/07_loss.csv]

07_formats.png     rounding error of E4M3, E5M2 and bf16 against magnitude (computed)
07_loss.png        losses of bf16 and of each recipe, and their distance, from --compare-csv
"""
import argparse
import csv
import pathlib
import sys

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
import style

COLOURS = ["black", style.BLUE, style.RED, style.GREEN, style.YELLOW, style.CYAN, style.PURPLE]
FORMATS = [("E4M3", 3, -6, 448), ("E5M2", 2, -14, 57344), ("bf16", 7, -126, 3.4e38)]  # mantissa bits, smallest exponent


def rounded(x, mantissa_bits, smallest_exponent, largest):
    unit = 2.0 ** (np.maximum(np.floor(np.log2(x)), smallest_exponent) - mantissa_bits)
    return np.minimum(np.round(x / unit) * unit, largest)


def draw_formats(path):
    figure, axes = plt.subplots(figsize=(7, 3.2))
    below = 10 ** np.linspace(-10, 0, 300 * 40)  # of the tensor's largest value, which is scaled to the format's largest
    for (name, mantissa, exponent, largest), colour in zip(FORMATS, COLOURS[1:]):
        scale = largest if name != "bf16" else 1.0
        x = below * scale
        error = np.abs(rounded(x, mantissa, exponent, largest) - x) / x
        worst = error.reshape(300, 40).max(axis=1)
        axes.loglog(below.reshape(300, 40)[:, 0], np.maximum(worst, 1e-4), color=colour, label=name)
    axes.set(xlabel="magnitude, as a share of the tensor's largest", ylabel="largest relative error", ylim=(1e-3, 2))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_losses(csv_path, path):
    with open(csv_path, newline="") as file:
        names, *rows = list(csv.reader(file))
    values = np.array(rows, dtype=float)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    window = 10
    for i, name in enumerate(names[1:], 1):
        left.plot(values[:, 0], values[:, i], color=COLOURS[i - 1], linewidth=1, label=name)
        if i == 1:
            continue
        distance = np.convolve(values[:, i] - values[:, 1], np.ones(window) / window, "valid")
        right.plot(values[window - 1:, 0], distance, color=COLOURS[i - 1], linewidth=1, label=name)
    left.set(xlabel="step", ylabel="loss")
    left.legend(fontsize=8)
    right.set(xlabel="step", ylabel=f"loss - loss of {names[1]}, mean of {window}", ylim=(-0.1, 0.1))
    right.axhline(0, color="black", linewidth=0.5)
    right.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--losses", type=pathlib.Path, default=pathlib.Path("docs/results/07_loss.csv"))
    arguments = parser.parse_args()
    draw_formats(arguments.out / "07_formats.png")
    if not arguments.losses.exists():
        parser.exit(2, f"{arguments.losses}: build/bin/07_fp8 --dtype bf16 --lr 1e-3 --steps 0 --compare 300 "
                       f"--compare-csv {arguments.losses} makes it\n")
    draw_losses(arguments.losses, arguments.out / "07_loss.png")


if __name__ == "__main__":
    main()
