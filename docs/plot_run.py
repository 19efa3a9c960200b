#!/usr/bin/env python3
"""Draws runs by the files of their --metrics, over each other: loss, gradient norm, tokens per second.

    python3 docs/plot_run.py run.jsonl other.jsonl --out run.png

--out: .png, .svg, .pdf, default run.png. Dots are validation losses. A run may still grow: half a last line is left
out. Where a run was resumed, the steps of the last attempt count. Bad input: one line, exit code 2.
"""
import io
import json
import math
import os
import sys

from usage import Parser, UsageError, check, ends_with_one_line, opened, shown

PANELS = {"loss": "loss", "grad_norm": "gradient norm", "tokens_per_s": "tokens/s"}


def events(path):
    """{kind: {step: event}} of the file's steps and evaluations."""
    found = {"step": {}, "eval": {}}
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                event = json.loads(line)
                if event["event"] in found:
                    step = int(event["step"])
                    if event["event"] == "step" and step in found["step"]:  # resumed: the earlier attempt's are void
                        found = {kind: {s: each[s] for s in each if s < step} for kind, each in found.items()}
                    found[event["event"]][step] = event
            except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
                raise UsageError(f"{shown(path)}: line {number} is not an event of --metrics") from None
    check(found["step"], path, "has no steps (must be a file of --metrics)")
    return found


def curve(of_steps, key, path):
    """(steps, values), not a number where the event has null."""
    steps = sorted(of_steps)
    values = [math.nan if of_steps[step].get(key) is None else of_steps[step][key] for step in steps]
    check(all(isinstance(value, (int, float)) for value in values), path, f"{key} is not a number in every step")
    return steps, values


def names_of(paths):
    """The shortest ends of the paths that tell them apart."""
    parts = [os.path.abspath(path).split("/") for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def draw(runs):
    """A figure of {name: {key of PANELS or "eval": (steps, values)}}."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots(len(PANELS), sharex=True)
    for axis, (key, label) in zip(axes, PANELS.items()):
        for number, (name, curves) in enumerate(runs.items()):
            axis.plot(*curves[key], lw=1, color=f"C{number % 10}", label=name)
        axis.set(ylabel=label)
        axis.grid(alpha=0.3)
    for number, curves in enumerate(runs.values()):
        axes[0].plot(*curves["eval"], ls="", marker="o", ms=3, color=f"C{number % 10}")
    if any(value > 0 for curves in runs.values() for value in curves["grad_norm"][1]):
        axes[1].set_yscale("log")
    axes[-1].set(xlabel="step", ylim=(0, None))
    axes[0].legend(fontsize=8)
    return figure


def main():
    parser = Parser(__doc__)
    parser.add_argument("files", metavar="metrics.jsonl", nargs="+")
    parser.add_argument("--out", metavar="FILE", default="run.png")
    options = parser.parse_args()
    kind = os.path.splitext(options.out)[1][1:]
    check(kind in ("png", "svg", "pdf"), "--out", f"{options.out} must end with .png, .svg or .pdf")
    runs = {}
    for path, name in zip(options.files, names_of(options.files)):
        found = events(path)
        runs[name] = {"eval": curve(found["eval"], "loss", path),
                      **{key: curve(found["step"], key, path) for key in PANELS}}
    picture = io.BytesIO()
    try:
        draw(runs).savefig(picture, format=kind, dpi=130)
    except ImportError:
        raise UsageError(f"needs matplotlib: {sys.executable} -m pip install matplotlib") from None
    with open(options.out, "wb") as file:
        file.write(picture.getvalue())
    print(options.out)


if __name__ == "__main__":
    ends_with_one_line(main)
