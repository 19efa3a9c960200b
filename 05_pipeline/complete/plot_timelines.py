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
from matplotlib.patches import Patch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs"))
import programs
import style

# Four shades that differ in grey, too; odd chunks are hatched. They say nothing about the kinds of style.KINDS.
COLOURS = {"F": "#99bbdd", "B": style.GREEN, "I": "#6db565", "W": "#eee0a0"}
MEANINGS = {"F": "F: forward", "B": "B: backward (I + W)", "I": "I: gradient of the input",
            "W": "W: gradient of the weights"}


def draw(axis, title, spans, longest=None):
    """longest: of the panels that share this scale."""
    ranks, total = max(span["tid"] for span in spans) + 1, max(span["ts"] + span["dur"] for span in spans)
    for span in spans:
        step, _, chunk = span["name"].partition(".")
        axis.barh(span["tid"], span["dur"], left=span["ts"], height=0.86, color=COLOURS[step[0]], edgecolor="white",
                  lw=0.5, hatch="////" if int(chunk or 0) % 2 else None)
        if span["dur"] > (longest or total) / 70:
            axis.text(span["ts"] + span["dur"] / 2, span["tid"], step[1:], ha="center", va="center", fontsize=7,
                      color="white" if step[0] == "B" else "black", clip_on=True)
    busy = sum(span["dur"] for span in spans)
    axis.set_title(f"{title} — idle {100 * (1 - busy / (total * ranks)):.1f}%", fontsize=8, loc="left")
    axis.set(yticks=range(ranks), yticklabels=[f"rank {i}" for i in range(ranks)], xlim=(0, total),
             ylim=(ranks - 0.5, -0.5), facecolor="#eeeeee")
    axis.tick_params(labelsize=7)


def legend(figure, passes, chunks):
    """Below the panels."""
    handles = [Patch(color=COLOURS[each], label=MEANINGS[each]) for each in passes]
    if chunks > 1:
        handles.append(Patch(facecolor="#cccccc", edgecolor="white", hatch="////", label="second chunk"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)


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
