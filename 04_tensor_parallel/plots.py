#!/usr/bin/env python3
"""The pictures of chapter 04: runs the program under mpirun and draws what it wrote.

    python3 04_tensor_parallel/plots.py [--out docs/results] [--bin build/bin]

04_memory.png         what a rank holds at the peak of a step, for tp 1, 2, 4, 8, with and without sequence parallelism
04_efficiency.png     the estimated share of the time that is computation, for the links of links.json (not a measurement)
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

TPS = (1, 2, 4, 8)


def peaks(program, tp, sequence, folder):
    """Bytes per kind on rank 0, at the peak of the second step."""
    metrics = folder / "metrics.jsonl"
    # As many key/value heads as query heads, so that all of a block divides.
    subprocess.run(["mpirun", "--oversubscribe", "-np", str(tp), program, "--tp", str(tp), "--kv-heads", "8",
                    "--sequence-parallel", "on" if sequence else "off", "--steps", "2", "--tables", "off",
                    "--metrics", metrics], check=True, stdout=subprocess.DEVNULL)
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["event"] == "step"]
    return steps[-1]["memory"]["peak"]


def draw_memory(program, out):
    figure, axis = plt.subplots(figsize=(7.5, 3.8))
    with tempfile.TemporaryDirectory() as folder:
        bars = [(f"tp {tp}" + (",\nsequence" if sequence else ""), peaks(program, tp, sequence, pathlib.Path(folder)))
                for tp in TPS for sequence in (False, True) if tp > 1 or not sequence]
    bottom = [0.0] * len(bars)
    for kind in style.ON_DEVICE:
        height = [bar[1][kind] / 2**20 for bar in bars]
        axis.bar([bar[0] for bar in bars], height, bottom=bottom, color=style.KINDS[kind], label=kind)
        bottom = [low + high for low, high in zip(bottom, height)]
    axis.set_ylabel("MiB on rank 0, peak of each kind")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "04_memory.png", dpi=130)


def draw_efficiency(program, out):
    with tempfile.TemporaryDirectory() as folder:
        table = pathlib.Path(folder) / "efficiency.csv"
        subprocess.run([program, "--steps", "0", "--efficiency-csv", table], check=True, stdout=subprocess.DEVNULL)
        rows = list(csv.DictReader(table.open()))
    figure, axis = plt.subplots(figsize=(6, 3.8))
    styles = dict(zip(dict.fromkeys(row["model"] for row in rows), (":", "-", "--")))
    colours = dict(zip(dict.fromkeys(row["link"] for row in rows), (style.GREEN, style.BLUE, style.RED, style.PURPLE)))
    for model, style in styles.items():
        for link, colour in colours.items():
            points = [(int(row["tp"]), 100 * float(row["efficiency"])) for row in rows
                      if (row["model"], row["link"]) == (model, link)]
            axis.plot(*zip(*points), style, color=colour, marker=".", label=f"{link}, {model}")
    axis.set(xlabel="tensor-parallel ranks", ylabel="computing, % of the time (estimated)", ylim=(0, 100))
    axis.set_xscale("log", base=2)
    axis.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
    axis.legend(fontsize=7, handlelength=3.5, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(out / "04_efficiency.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    arguments = parser.parse_args()
    program = arguments.bin / "04_tensor_parallel"
    draw_memory(program, arguments.out)
    draw_efficiency(program, arguments.out)


if __name__ == "__main__":
    main()
