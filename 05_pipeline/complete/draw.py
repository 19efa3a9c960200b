#!/usr/bin/env python3
"""Draws pipeline timelines: one panel each, one row per rank.

    python3 05_pipeline/complete/draw.py TIMELINES.json OUT.png

TIMELINES.json: {"title": [[{"step": "F0.1", "begin": 0.0, "end": 1.0}, ...] per rank], ...}, as the program writes it.
"""
import json
import pathlib
import sys

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs"))
import style

# Of even and of odd chunks. Time is not memory, so these say nothing about the kinds of style.KINDS.
COLOURS = {"F": (style.BLUE, "#99bbdd"), "B": (style.GREEN, "#88cc99"), "I": ("#66aa55", "#aaddaa"),
           "W": (style.YELLOW, "#eee0a0")}


def draw(axis, title, ranks):
    total = max(span["end"] for spans in ranks for span in spans)
    for rank, spans in enumerate(ranks):
        for span in spans:
            name, _, chunk = span["step"].partition(".")
            width = span["end"] - span["begin"]
            axis.barh(rank, width, left=span["begin"], height=0.86, color=COLOURS[name[0]][int(chunk or 0) % 2],
                      edgecolor="white", lw=0.5)
            if width > total / 90:
                axis.text(span["begin"] + width / 2, rank, name[1:], ha="center", va="center", fontsize=6)
    busy = sum(span["end"] - span["begin"] for spans in ranks for span in spans)
    axis.set_title(f"{title} — idle {100 * (1 - busy / (total * len(ranks))):.1f}%", fontsize=8, loc="left")
    axis.set(yticks=range(len(ranks)), yticklabels=[f"rank {i}" for i in range(len(ranks))], xlim=(0, total),
             ylim=(len(ranks) - 0.5, -0.5), facecolor="#eeeeee")
    axis.tick_params(labelsize=7)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    timelines = json.load(open(sys.argv[1]))
    ranks = max(len(each) for each in timelines.values())
    figure, axes = plt.subplots(len(timelines), 1, figsize=(11, (0.5 + 0.28 * ranks) * len(timelines) + 0.3), squeeze=False)
    for axis, (title, spans) in zip(axes[:, 0], timelines.items()):
        draw(axis, title, spans)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=130, format="png")


if __name__ == "__main__":
    main()
