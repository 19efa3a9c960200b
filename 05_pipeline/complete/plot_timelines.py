#!/usr/bin/env python3
"""Draws pipeline timelines: one panel each, one row per rank.

    python3 05_pipeline/complete/plot_timelines.py TRACE.json OUT.png

TRACE.json: Chrome trace events, as --pipeline-trace writes them: a process per timeline, a thread per rank.
"""
import json
import pathlib
import sys

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs"))
import programs
import style

# Of even and of odd chunks. Time is not memory, so these say nothing about the kinds of style.KINDS.
COLOURS = {"F": (style.BLUE, "#99bbdd"), "B": (style.GREEN, "#88cc99"), "I": ("#66aa55", "#aaddaa"),
           "W": (style.YELLOW, "#eee0a0")}


def draw(axis, title, spans):
    ranks, total = max(span["tid"] for span in spans) + 1, max(span["ts"] + span["dur"] for span in spans)
    for span in spans:
        step, _, chunk = span["name"].partition(".")
        axis.barh(span["tid"], span["dur"], left=span["ts"], height=0.86, color=COLOURS[step[0]][int(chunk or 0) % 2],
                  edgecolor="white", lw=0.5)
        if span["dur"] > total / 90:
            axis.text(span["ts"] + span["dur"] / 2, span["tid"], step[1:], ha="center", va="center", fontsize=6)
    busy = sum(span["dur"] for span in spans)
    axis.set_title(f"{title} — idle {100 * (1 - busy / (total * ranks)):.1f}%", fontsize=8, loc="left")
    axis.set(yticks=range(ranks), yticklabels=[f"rank {i}" for i in range(ranks)], xlim=(0, total),
             ylim=(ranks - 0.5, -0.5), facecolor="#eeeeee")
    axis.tick_params(labelsize=7)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    events = json.load(open(sys.argv[1], encoding="utf-8"))["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    timelines = [[event for event in events if event["ph"] == "X" and event["pid"] == i] for i in range(len(titles))]
    ranks = 1 + max(span["tid"] for spans in timelines for span in spans)
    figure, axes = plt.subplots(len(titles), 1, figsize=(11, (0.5 + 0.28 * ranks) * len(titles) + 0.3), squeeze=False)
    for axis, title, spans in zip(axes[:, 0], titles, timelines):
        draw(axis, title, spans)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=130, format="png")


if __name__ == "__main__":
    programs.start(main)
