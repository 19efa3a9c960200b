#!/usr/bin/env python3
"""The pictures of chapter 01: runs the program and draws what it wrote.

    python3 01_single_gpu/plots.py [--out docs/results] [--bin build/bin]

01_loss.png    training loss of the default run, and the learning rate
01_memory.png  bytes by kind over the second training step at the four recompute levels: parameters, gradients and optimizer
               lie flat, activations rise in the forward pass and fall in the backward pass
"""
import argparse
import csv
import json
import pathlib
import subprocess
import sys
import tempfile

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))
import style


def run(program, *flags):
    subprocess.run([program, *map(str, flags)], check=True, stdout=subprocess.DEVNULL)


def loss_picture(program, folder, out):
    metrics = folder / "loss.jsonl"
    run(program, "--metrics", metrics)
    steps = [line for line in map(json.loads, open(metrics)) if line["event"] == "step"]
    x = [line["step"] for line in steps]
    figure, axis = plt.subplots(figsize=(7, 3.6))
    axis.plot(x, [line["loss"] for line in steps], color=style.BLUE, lw=1.4, label="loss")
    axis.axhline(5.545, color="#999999", lw=0.8, ls=":")
    axis.text(x[-1], 5.5, "ln 256: knowing nothing", ha="right", va="top", fontsize=8, color="#666666")
    axis.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, 6))
    rate = axis.twinx()
    rate.plot(x, [line["lr"] for line in steps], color=style.RED, lw=0.9, ls="--")
    rate.set_ylabel("learning rate", color=style.RED)
    rate.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(out / "01_loss.png", dpi=130)


def memory_over_second_step(program, folder, level):
    timeline = folder / f"{level}.csv"
    run(program, "--steps", 2, "--recompute", level, "--memory-timeline", timeline)
    rows = list(csv.DictReader(open(timeline)))
    starts = [i for i, row in enumerate(rows) if row["phase"] == "forward 0" and rows[i - 1]["phase"] != "forward 0"]
    return rows[starts[1]:]


def memory_picture(program, folder, out):
    levels = ["none", "pointwise", "selective", "full"]
    figure, axes = plt.subplots(1, len(levels), figsize=(13, 3.6), sharey=True)
    for axis, level in zip(axes, levels):
        rows = memory_over_second_step(program, folder, level)
        x = range(len(rows))
        stack = [[int(row[kind]) / 2**20 for row in rows] for kind in style.ON_DEVICE]
        axis.stackplot(x, stack, labels=style.ON_DEVICE, colors=style.colours(style.ON_DEVICE), lw=0)
        backward = next(i for i, row in enumerate(rows) if row["phase"].startswith("backward"))
        update = next((i for i, row in enumerate(rows) if row["phase"] == "update"), len(rows))
        for at, name in [(0, "forward"), (backward, "backward"), (update, "update")]:
            axis.axvline(at, color="#333333", lw=0.6, ls=":")
            if name != "update":
                axis.text(at, axis.get_ylim()[1], " " + name, fontsize=8, va="bottom")
        axis.set_title(f"--recompute {level}", fontsize=10, pad=16)
        axis.set_xlabel("bookings during one step")
    axes[0].set_ylabel("MiB")
    axes[-1].legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(out / "01_memory.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    program = args.bin / "01_single_gpu"
    with tempfile.TemporaryDirectory() as folder:
        loss_picture(program, pathlib.Path(folder), args.out)
        memory_picture(program, pathlib.Path(folder), args.out)
    print(f"wrote {args.out}/01_loss.png and {args.out}/01_memory.png")


if __name__ == "__main__":
    main()
