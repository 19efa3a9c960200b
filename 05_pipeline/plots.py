#!/usr/bin/env python3
"""The pictures of chapter 05: runs the program under mpirun and draws the timelines that it wrote.

    python3 05_pipeline/plots.py [--out docs/results] [--bin build/bin]

05_schedules.png      every schedule on 4 stages and 8 micro-batches, equal stages, B = 2F (simulated)
05_measured.png       1f1b and zero-bubble on 2 ranks: simulated from the measured times of their steps, and as measured
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

from draw import draw


def timelines(program, ranks, flags):
    """{title: [[{"step", "begin", "end"}, ...] per rank]}, from the Chrome trace of a run."""
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        subprocess.run(["mpirun", "--oversubscribe", "-np", str(ranks), program, "--steps", "1", *flags,
                        "--pipeline-trace", trace], check=True, stdout=subprocess.DEVNULL)
        events = json.loads(trace.read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    result = {title: [[] for _ in range(ranks)] for title in titles.values()}
    for e in events:
        if e["ph"] == "X":
            result[titles[e["pid"]]][e["tid"]].append(
                {"step": e["name"], "begin": e["ts"] / 1e6, "end": (e["ts"] + e["dur"]) / 1e6})
    return list(result.items())


def save(panels, path):
    ranks = max(len(spans) for _, spans in panels)
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, (0.55 + 0.24 * ranks) * len(panels) + 0.3), squeeze=False)
    for axis, (title, spans) in zip(axes[:, 0], panels):
        draw(axis, title, spans)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    arguments = parser.parse_args()
    program = arguments.bin / "05_pipeline"
    small = ["--layers", "8", "--hidden", "32", "--heads", "4", "--ffn", "48", "--seq-len", "16", "--global-batch", "8"]
    save([timelines(program, 4, [*small, "--pipeline", name])[0]
          for name in ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")], arguments.out / "05_schedules.png")
    panels = []
    for name in ("1f1b", "zero-bubble"):
        panels += [(f"{name}: {title}", spans)
                   for title, spans in timelines(program, 2, ["--global-batch", "8", "--pipeline", name])[1:]]
    save(panels, arguments.out / "05_measured.png")


if __name__ == "__main__":
    main()
