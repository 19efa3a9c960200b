#!/usr/bin/env python3
"""The pictures of chapter 08, from the metrics of two runs (08_3d_full/demo.sh makes them).

    python3 08_3d_full/plots.py --one out/one.jsonl --eight out/eight.jsonl [--out docs/results --prefix 08_]

loss.png       both losses, and how far they are apart
memory.png     what each rank holds, by kind, beside one rank
"""
import argparse
import json
import pathlib
import sys

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
import style


def read(path):
    lines = [json.loads(line) for line in open(path)]
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    summary = [line for line in lines if line["event"] == "summary"][-1]
    return losses, summary["memory_per_rank"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=pathlib.Path, required=True)
    parser.add_argument("--eight", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--prefix", default="")
    arguments = parser.parse_args()
    (one, memory_of_one), (eight, memory_of_eight) = read(arguments.one), read(arguments.eight)

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    steps = range(1, len(one) + 1)
    left.plot(steps, one, color=style.BLUE, label="one rank")
    left.plot(steps, eight, color=style.RED, linestyle="--", label="dp 2 x tp 2 x pp 2")
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    right.semilogy(steps, [max(abs(a - b) / a, 1e-10) for a, b in zip(one, eight)], color=style.GREEN)
    right.set(xlabel="step", ylabel="|difference| / loss")
    right.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(arguments.out / f"{arguments.prefix}loss.png", dpi=130)

    figure, axes = plt.subplots(figsize=(7, 3.4))
    ranks = [("one\nrank", memory_of_one[0])] + [(f"rank {i}", peak) for i, peak in enumerate(memory_of_eight)]
    bottom = [0.0] * len(ranks)
    for kind in style.ON_DEVICE:
        heights = [peak[kind] / 2**20 for _, peak in ranks]
        axes.bar(range(len(ranks)), heights, bottom=bottom, color=style.KINDS[kind], label=kind)
        bottom = [b + h for b, h in zip(bottom, heights)]
    axes.set(xticks=range(len(ranks)), xticklabels=[name for name, _ in ranks], ylabel="MiB, peak of each kind")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(arguments.out / f"{arguments.prefix}memory.png", dpi=130)


if __name__ == "__main__":
    main()
