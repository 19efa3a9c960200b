#!/usr/bin/env python3
"""Draws the pictures of all chapters from their CSVs; runs nothing. docs/measure.py writes the CSVs, docs/published.py
that of its name, docs/measure_node.sh those in gpu.

    python3 docs/plots.py [NAME ...] [--data docs/results] [--out docs/results]

NAME: 01_loss, 05_measured, ...; default: every picture whose NAME.csv lies in the folder of the data.
"""
import argparse
import pathlib
import statistics
import sys

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

import programs
import style
import tables

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "05_pipeline/complete"))
from plot_timelines import draw as timelines_of_ranks, legend as legend_of_passes


def groups(rows, *columns):
    """{value or values of the columns: rows}, in the order of their first rows."""
    result = {}
    for row in rows:
        key = row[columns[0]] if len(columns) == 1 else tuple(row[column] for column in columns)
        result.setdefault(key, []).append(row)
    return result


def numbers(rows, column, scale=1.0):
    return [scale * float(row[column]) for row in rows]


def timelines(panels, height, kinds, label, mark_update):
    """One stacked area of memory per panel, {title: rows}, with the turn from forward to backward pass marked."""
    figure, axes = plt.subplots(1, len(panels), figsize=(13, height), sharey=True)
    for axis, (title, rows) in zip(axes, panels.items()):
        axis.stackplot(range(len(rows)), [numbers(rows, kind, 2**-20) for kind in kinds], labels=kinds,
                       colors=[style.KINDS[kind] for kind in kinds], lw=0)
        phases = [row["phase"].split()[0] for row in rows]
        marks = [("forward", 0), ("backward", phases.index("backward"))]
        if mark_update and "update" in phases:
            axis.axvline(phases.index("update"), color="#333333", lw=0.6, ls=":")
        for name, at in marks:
            axis.axvline(at, color="#333333", lw=0.6, ls=":")
            axis.text(at, 1.0, " " + name, fontsize=8, va="bottom", transform=axis.get_xaxis_transform())
        axis.set(xlabel="allocations during one step", xlim=(0, len(rows) - 1), ylim=(0, None))
        axis.set_title(title, fontsize=10, pad=16)
    axes[0].set_ylabel(label)
    axes[-1].legend(fontsize=8, loc="upper right")
    return figure


def memory_bars(axis, names, rows):
    """One stacked bar of every kind's peak per row."""
    bottom = [0.0] * len(rows)
    for kind in style.ON_DEVICE:
        heights = numbers(rows, kind, 2**-20)
        axis.bar(range(len(rows)), heights, bottom=bottom, color=style.KINDS[kind], label=kind)
        bottom = [low + high for low, high in zip(bottom, heights)]
    axis.set_xticks(range(len(rows)), names)
    axis.legend(fontsize=8)


def loss(rows):
    figure, axis = plt.subplots(figsize=(7, 3.6))
    steps = numbers(rows, "step")
    axis.plot(steps, numbers(rows, "loss"), color=style.BLUE, lw=1.4)
    axis.axhline(5.545, color="#999999", lw=0.8, ls=":")
    axis.text(steps[-1], 5.5, "ln 256: knowing nothing", ha="right", va="top", fontsize=8, color="#666666")
    axis.set(xlabel="step", ylim=(0, 6))
    axis.set_ylabel("loss (nats per byte)", color=style.BLUE)
    rate = axis.twinx()
    rate.plot(steps, numbers(rows, "lr"), color=style.YELLOW, lw=1.1, ls="--")
    rate.set_ylabel("learning rate", color="#998800")
    rate.set_ylim(bottom=0)
    losses = numbers(rows, "loss")
    end = sum(losses[-10:]) / 10
    axis.set_title(f"{len(steps)} steps: the loss falls from {losses[0]:.2f} to {end:.2f} (mean of the last ten)",
                   fontsize=10)
    return figure


def recompute_memory(rows):
    levels = {f"--recompute {level}": mine for level, mine in groups(rows, "recompute").items()}
    figure = timelines(levels, 3.8, style.ON_DEVICE, "MiB", mark_update=True)
    plt.setp(figure.axes, xticks=[], xlabel="one step")
    figure.set_size_inches(9.5, 3.8)
    figure.suptitle("The more is recomputed, the lower the peak; with full, one block at a time", fontsize=11)
    return figure


def mup(rows):
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    colours = (style.GREY, style.BLUE, style.GREEN, style.RED)
    for axis, (given, mine) in zip(axes, groups(rows, "mup").items()):
        for colour, (width, points) in zip(colours, groups(mine, "hidden").items()):
            rates, losses = numbers(points, "lr"), numbers(points, "loss")
            axis.semilogx(rates, losses, color=colour, marker="o", ms=3, lw=1.4, label=f"hidden {width}")
            best = min(range(len(losses)), key=losses.__getitem__)
            axis.plot(rates[best], losses[best], color=colour, marker="*", ms=13, ls="")
        axis.set(xlabel="--lr", title="without muP" if given == "off" else f"--mup {given}")
    axes[0].set_ylabel("training loss (nats per byte)")
    axes[0].legend(fontsize=8)
    return figure


def all_reduce(rows):
    looks = {"library": ("black", "s", "--", "MPI_Allreduce"), "naive": (style.RED, "x", "-", "naive"),
             "ring": (style.BLUE, "o", "-", "ring, halving (the same on two ranks)"),
             "pipelined": (style.GREEN, "^", "-", "pipelined ring")}
    figure, axis = plt.subplots(figsize=(7, 3.8))
    for algorithm, mine in groups(rows, "algorithm").items():
        if algorithm in looks:
            colour, marker, line, label = looks[algorithm]
            axis.semilogx(numbers(mine, "bytes"), numbers(mine, "bus_bytes_per_s", 1e-9), color=colour, marker=marker,
                          ls=line, ms=5, lw=1.4, label=label, base=2)
    axis.set(ylabel="bus bandwidth (GB/s): n / t · 2 (N−1)/N", xlabel="message", ylim=(0, 13))
    axis.set_xticks([2**10, 2**14, 2**18, 2**22, 2**26], ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"])
    axis.set_title(f"{rows[0]['ranks']} ranks on one CPU: the pipelined ring is fastest from 16 MiB on", fontsize=10)
    axis.legend(fontsize=8, loc="upper left")
    return figure


def nodes(rows):
    looks = {"ring": (style.BLUE, "o", "-"), "hierarchical": (style.GREEN, "^", "--"), "tree": (style.RED, "s", ":")}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=(1, 1.1))
    for algorithm, (colour, marker, line) in looks.items():
        mine = [row for row in rows if row["algorithm"] == algorithm]
        fast = [row for row in mine if row["mbit_per_s"] == "800"]
        axes[0].loglog(numbers(fast, "bytes"), numbers(fast, "seconds", 1e3), marker, color=colour, ms=6, base=2,
                       label=algorithm)
        axes[0].loglog(numbers(fast, "bytes"), numbers(fast, "simulated_s", 1e3), line, color=colour, base=2)
        for place, row in enumerate(row for row in mine if row["bytes"] == str(4 << 20)):
            at = place + 0.27 * (list(looks).index(algorithm) - 1)
            axes[1].plot(at, 1e3 * float(row["seconds"]), marker, color=colour, ms=8)
            axes[1].plot([at - 0.12, at + 0.12], [1e3 * float(row["simulated_s"])] * 2, color="black", lw=1.6)
    axes[0].set_xticks([2**10, 2**14, 2**18, 2**22], ["1 KiB", "16 KiB", "256 KiB", "4 MiB"])
    axes[0].set(ylabel="ms", xlabel="message", title="800 Mbit/s")
    axes[0].set_yscale("log", base=10)
    axes[0].legend(fontsize=9)
    axes[1].set_yscale("log")
    axes[1].set_xticks(range(3), ["800", "200", "80"])
    axes[1].set(xlabel="link (Mbit/s)", ylabel="ms", title="4 MiB")
    figure.suptitle("Three nodes of two ranks: the tree is first with small messages, rings in two levels with large\n"
                    f"(marks: measured; lines: simulated, {median_error(rows, 'seconds'):.0f}% off in the median)",
                    fontsize=11)
    return figure


def sites(rows):
    looks = {"20": (style.RED, "s", "-"), "80": (style.BLUE, "o", "--"), "800": (style.GREEN, "^", ":")}
    figure, axis = plt.subplots(figsize=(7, 3.8))
    alone = min(numbers(rows, "step_s"))
    for rate, (colour, marker, line) in looks.items():
        mine = [row for row in rows if row["mbit_per_s"] == rate]
        exchange = 8 * 3_412_480 / (1e6 * float(rate))  # of two ranks each sends its 853,120 fp32 numbers once
        every = numbers(mine[1:], "outer_steps")
        axis.loglog(every, numbers(mine[1:], "step_s"), marker, color=colour, ms=7, label=f"{rate} Mbit/s")
        axis.plot(every, [alone + exchange / steps for steps in every], line, color=colour, lw=1.4)
        axis.plot(0.6, float(mine[0]["step_s"]), marker, color=colour, ms=7, mfc="none")
    axis.set_xticks([0.6, *every], ["gradients", *(f"{steps:g}" for steps in every)])
    axis.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axis.minorticks_off()
    axis.set(xlabel="steps between exchanges (H)", ylabel="s per step")
    gradients, *_, last = numbers([row for row in rows if row["mbit_per_s"] == "20"], "step_s")
    axis.set_title(f"Two sites, 20 Mbit/s between them: {gradients / last:.0f} times as fast if they exchange every "
                   "20th step\n(marks: measured; lines: a step alone + 8 n / (H · rate))", fontsize=10)
    axis.legend(fontsize=9)
    return figure


def median_error(rows, measured):
    """In percent, of what is simulated."""
    return 100 * statistics.median(abs(float(row["simulated_s"]) / float(row[measured]) - 1)
                                   for row in rows if row["simulated_s"])


def steps_on_nodes(rows):
    panels = groups(rows, "mbit_per_s")
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 4.2), sharey=True)
    for axis, (rate, mine) in zip(axes, panels.items()):
        places = range(len(mine))
        axis.semilogx(numbers(mine, "measured_s"), places, "o", color=style.CYAN, ms=9, label="measured")
        axis.plot(numbers(mine, "simulated_s"), places, "|", color="black", ms=15, mew=2, label="simulated")
        axis.set_yticks(places, [row["layout"] for row in mine], fontsize=9)
        ticks = [0.1, 0.2, 0.5, 1, 2, 5]
        axis.set_xticks(ticks, ticks)
        axis.set(xlabel="a step (s)", title=f"{rate} Mbit/s", xlim=(0.1, 5))
        axis.grid(axis="x", lw=0.4)
    axes[0].invert_yaxis()
    axes[-1].legend(fontsize=9)
    across, inside = (float(row["measured_s"]) for layout in ("tp across the nodes", "tp in the nodes, dp across")
                      for row in panels["200"] if row["layout"] == layout)
    figure.suptitle(f"tp across nodes is {across / inside:.0f} times as slow as inside at 200 Mbit/s; the simulator is "
                    f"{median_error(rows, 'measured_s'):.0f}% off in the median", fontsize=11)
    return figure


def overlap(rows):
    colours = {"forward": style.CYAN, "backward": style.BLUE, "all-reduce": style.PURPLE}
    panels = groups(rows, "title")
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 4.4), sharex=True)
    for axis, (title, mine) in zip(axes, panels.items()):
        for row in mine:
            begin, end, computes = float(row["begin"]), float(row["end"]), row["lane"] == "computes"
            axis.barh(int(computes), end - begin, left=begin, color=colours[row["what"]], edgecolor="white",
                      lw=0.3 * computes)
        computed, sent = (max(numbers(each, "end")) for each in groups(mine, "lane").values())
        axis.axvline(computed, color="black", lw=0.8, ls=":")
        axis.text(sent + 0.02, 0, f"{1e3 * (sent - computed):.0f} ms exposed", va="center", fontsize=9)
        axis.set_yticks([0, 1], ["sends", "computes"], fontsize=8)
        axis.set_title(f"{title}: {sent:.2f} s", fontsize=9, loc="left")
    axes[-1].set(xlabel="time (s)", xlim=(0, 2.25))
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes[0].legend(patches, colours, fontsize=8, loc="lower right")
    figure.suptitle("Overlap hides all but the last 14 of 152 ms, while the link is fast enough", fontsize=11)
    return figure


def zero_memory(rows):
    divided = {"0": "all of it", "1": "optimizer / 4", "2": "and gradients / 4", "3": "and parameters / 4"}
    stages = {f"--zero {stage}: {divided[stage]}": mine for stage, mine in groups(rows, "stage").items()}
    # The mountain of activations on top of what this chapter moves.
    kinds = ["params", "grads", "optimizer", "workspace", "comm", "activations"]
    figure = timelines(stages, 3.8, kinds, "MiB on rank 0 of 4", mark_update=False)
    plt.setp(figure.axes, xticks=[], xlabel="one step")
    figure.set_size_inches(9.5, 3.8)
    figure.suptitle("Each ZeRO stage divides one more kind of memory by the four ranks; gathered units come and go",
                    fontsize=11)
    return figure


def tensor_memory(rows):
    figure, axis = plt.subplots(figsize=(7.5, 3.8))
    memory_bars(axis, [f"tp {row['tp']}" + ",\nsequence" * (row["sequence_parallel"] == "on") for row in rows], rows)
    axis.bar_label(axis.containers[-1], [f"{sum(numbers([row], kind)[0] for kind in style.ON_DEVICE) / 2**20:.0f}"
                                         for row in rows], padding=2)
    axis.set_ylabel("MiB on rank 0, peak of each kind")
    axis.margins(y=0.1)
    one, plain, sequence = (numbers(rows, "activations")[i] for i in (0, -2, -1))
    axis.set_title(f"Eight ranks divide activations by {one / plain:.1f}, and by {one / sequence:.1f} with sequence "
                   "parallelism", fontsize=11)
    return figure


def efficiency(rows):
    """A panel per link, a line per model."""
    links = groups(rows, "link")
    figure, axes = plt.subplots(1, len(links), figsize=(8.4, 3.6), sharey=True)
    for axis, (link, mine) in zip(axes, links.items()):
        looks = zip("so^", ("#99bbdd", style.BLUE, "black"))
        for (model, points), (marker, colour) in zip(groups(mine, "model").items(), looks):
            shares = numbers(points, "efficiency", 100)
            axis.plot(numbers(points, "tp"), shares, color=colour, marker=marker, ms=4)
            axis.annotate(model.upper(), (16, shares[-1]), (6, -3), textcoords="offset points", fontsize=9)
        axis.axhline(50, color="#999999", lw=0.8, ls=":")
        axis.set(xlabel="tensor-parallel ranks", xscale="log", ylim=(0, 100), xlim=(1.8, 30))
        axis.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
        axis.minorticks_off()
        axis.set_title(link, fontsize=10)
    axes[0].set_ylabel("computing, % of the time (estimate)")
    eight = [sorted(float(row["efficiency"]) for row in mine if row["tp"] == "8") for mine in links.values()]
    figure.suptitle(f"8 ranks compute {eight[0][0]:.0%} to {eight[0][-1]:.0%} of the time over NVLink, "
                    f"{eight[-1][0]:.0%} to {eight[-1][-1]:.0%} over a network card each", fontsize=11)
    return figure


def spans(rows, scale=1.0):
    """What plot_timelines.py draws."""
    return [{"name": row["step"], "tid": int(row["rank"]), "ts": scale * float(row["begin"]),
             "dur": scale * (float(row["end"]) - float(row["begin"]))} for row in rows]


def pipeline(rows, scale, unit, inches, longest=None):
    """A panel for each title, all on one scale, which ends at `longest`."""
    panels = groups(rows, "title")
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, inches), sharex=True)
    for axis, (title, steps) in zip(axes, panels.items()):
        end = scale * max(numbers(steps, "end"))
        cut = ", cut off here" if longest and end > longest else ""
        timelines_of_ranks(axis, title.split(", 4 stages")[0], spans(steps, scale), longest)
        axis.set_title(f"{axis.get_title(loc='left')} of {end:.1f}{unit}{cut}", fontsize=9, loc="left")
    axes[-1].set_xlim(0, longest or scale * max(numbers(rows, "end")))
    return figure, axes


def schedules(rows):
    figure, axes = pipeline(rows, 1, "", 10.5, 34)
    axes[-1].set_xlabel("time, in forward passes of a stage (backward: two)")
    legend_of_passes(figure, "FBIW", 2)
    figure.suptitle("Seven schedules on 4 ranks, 8 micro-batches, one scale: from 75% idle to 6%", fontsize=11)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure


def measured_schedules(rows):
    figure, axes = pipeline(rows, 1e3, " ms", 5.2)
    axes[-1].set_xlabel("time (ms)")
    legend_of_passes(figure, "FBIW", 1)
    figure.suptitle("Two CPU cores: zero-bubble idles less, but I + W take longer than B", fontsize=11)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def the_v(rows, end=11):
    """The way of micro-batch 0 through ZB-V."""
    figure, axis = plt.subplots(figsize=(9, 3.4))
    timelines_of_ranks(axis, "", spans([row for row in rows if float(row["begin"]) < end]))
    first = [row for row in rows if row["step"][0] in "FI" and row["step"][1:].partition(".")[0] == "0"]
    first.sort(key=lambda row: float(row["begin"]))
    middles = [(float(row["begin"]) + float(row["end"])) / 2 for row in first]
    axis.plot(middles, numbers(first, "rank"), color=style.RED, lw=2, marker="o", ms=4)
    axis.axvline(4, color=style.RED, lw=1, ls=":")
    axis.set(xlabel="time, in forward passes of a whole rank (a chunk: 0.5)", xlim=(0, end))
    axis.set_title("ZB-V on 4 ranks: micro-batch 0 (red) goes down and up the V in 2p = 8 passes of a chunk;\n"
                   "rank 0 has run 8 forward passes by then, and waits for nothing", fontsize=10, loc="left")
    legend_of_passes(figure, "FIW", 2)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def causal(rows):
    colours = [style.BLUE, style.RED, style.GREEN, style.YELLOW]  # of the ranks
    algorithms = groups(rows, "algorithm")
    figure, axes = plt.subplots(1, 2 * len(algorithms), figsize=(10.5, 3), width_ratios=[1, 0.8] * len(algorithms))
    for i, (algorithm, mine) in enumerate(algorithms.items()):
        triangle, work = axes[2 * i], axes[2 * i + 1]
        image, pairs = [], [0] * len(colours)
        for query, row in enumerate(mine):
            rank = int(row["rank"])
            pairs[rank] += query + 1
            colour, white = matplotlib.colors.to_rgb(colours[rank]), (1, 1, 1)
            image.append([colour if key <= query else white for key in range(len(mine))])
        triangle.imshow(image, interpolation="nearest")
        ends = [query for query in range(1, len(mine)) if mine[query]["rank"] != mine[query - 1]["rank"]]
        for first, end in zip([0, *ends], [*ends, len(mine)]):
            triangle.text(-2, (first + end) / 2, mine[first]["rank"], ha="right", va="center", fontsize=9)
        triangle.set(title=f"{algorithm}: queries of rank", xlabel="keys", xticks=[], yticks=[])
        bars = work.bar(range(len(pairs)), [100 * each / sum(pairs) for each in pairs], color=colours)
        work.bar_label(bars, fmt="%.0f%%", fontsize=9)
        work.set(ylabel="share of the work (%)", xlabel="rank", xticks=range(len(pairs)), ylim=(0, 50))
        work.set_title("the last rank has 43%" if algorithm == "ring" else "all have the same", loc="left")
    return figure


def formats(rows):
    figure, axis = plt.subplots(figsize=(7, 3.4))
    places = {"E4M3": (2e-3, 3.5e-2, "E4M3: 3 bits of mantissa"), "E5M2": (2e-9, 0.135, "E5M2: 2 bits of mantissa"),
              "bf16": (1e-5, 5e-3, "bf16: 7 bits")}
    looks = ((style.BLUE, 2.4), (style.RED, 1.4), (style.GREEN, 1))
    for (name, mine), (colour, width) in zip(groups(rows, "format").items(), looks):
        axis.step([*numbers(mine, "magnitude"), 1], [*numbers(mine, "error"), float(mine[-1]["error"])], where="post",
                  color=colour, lw=width)
        axis.text(*places[name], color=colour, fontsize=9)
    axis.set(xlabel="magnitude, as a share of the tensor's largest", xscale="log", xlim=(1e-10, 1.5),
             ylabel="largest relative error", yscale="log", ylim=(1e-3, 2))
    axis.set_title("E4M3 errs half as much as E5M2, in the upper 4.5 decades; E5M2 has 9 of them", fontsize=11)
    axis.grid(alpha=0.3)
    return figure


def fp8_loss(rows, window=20):
    """What recipes change, as lines; what another seed changes, as a band."""
    first = numbers(rows, "bf16")
    means = {}
    for name in [name for name in rows[0] if name not in ("step", "bf16")]:
        distance = [a - b for a, b in zip(numbers(rows, name), first)]
        means[name] = [sum(distance[i - window:i]) / window for i in range(window, len(rows) + 1)]
    seeds = [values for name, values in means.items() if "seed" in name]
    recipes = {name: values for name, values in means.items() if "seed" not in name}
    steps = numbers(rows, "step")[window - 1:]
    figure, axis = plt.subplots(figsize=(7.5, 3.8))
    axis.fill_between(steps, *([end(each) for each in zip(*seeds)] for end in (min, max)), color="#dddddd", lw=0,
                      label=f"bf16, {len(seeds)} other seeds")
    for (name, values), colour, dashes in zip(sorted(recipes.items(), key=lambda item: -item[1][-1]),
                                              (style.PURPLE, style.BLUE, style.GREEN, style.CYAN, style.RED, "black",
                                               style.YELLOW, style.BLUE, style.GREEN),
                                              ("-", "--", "-.", "-", "--", ":", "-", ":", ":")):
        axis.plot(steps, values, dashes, color=colour, lw=1.4, label=name)
    axis.axhline(0, color="black", lw=0.6)
    axis.set(xlabel="step", ylabel=f"loss − loss of bf16, mean of {window} steps", xlim=(0, steps[-1]))
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    recipe, seed = (max(abs(each) for values in group for each in values) for group in (recipes.values(), seeds))
    axis.set_title(f"A recipe moves the loss by up to {recipe:.2f}, another seed by up to {seed:.2f}", fontsize=11)
    return figure


def mesh_loss(rows):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    steps, (one, eight) = numbers(rows, "step"), [name for name in rows[0] if name != "step"]
    left.plot(steps, numbers(rows, one), color=style.BLUE, label=one)
    left.plot(steps, numbers(rows, eight), color=style.RED, ls="--", label=eight)
    left.set(xlabel="step", ylabel="loss")
    left.set_title("the curves lie on each other ...", fontsize=10)
    left.legend()
    apart = [(step, abs(a - b) / a) for step, a, b in zip(steps, numbers(rows, one), numbers(rows, eight))]
    right.semilogy(*zip(*(point for point in apart if point[1] > 0)), color=style.GREEN, marker=".", ms=4)
    equal = [step for step, difference in apart if difference == 0]
    right.semilogy(equal, [1e-8] * len(equal), color="black", marker="v", ms=5, ls="", label="equal in all digits: 0")
    right.set(xlabel="step", ylabel="|difference| / loss", ylim=(5e-9, 0.1))
    right.set_title("... and yet differ: rounding, which AdamW amplifies", fontsize=10)
    right.legend(loc="lower right")
    right.grid(alpha=0.3)
    return figure


def mesh_memory(rows):
    figure, axis = plt.subplots(figsize=(7, 3.6))
    memory_bars(axis, [row["rank"].replace(" ", "\n") for row in rows], rows)
    axis.set_ylabel("MiB, peak of each kind")
    one, first, last = (sum(float(rows[i][kind]) for kind in style.ON_DEVICE) for i in (0, 1, -1))
    axis.set_title(f"Eight ranks hold {first / one:.0%} (first stage) and {last / one:.0%} (last) of one rank's "
                   "peaks, not 12.5%", fontsize=10)
    return figure


def mesh_on_nodes(rows):
    """70B on 8 nodes of 8 GPUs, tp 8, pp 4, dp 2: nodes, ranks, and what a rank sends along each axis."""
    sent = {row["axis"]: float(row["bytes"]) / 1e9 for row in rows}
    figure, axis = plt.subplots(figsize=(9, 3.9))
    for stage in range(4):
        for copy in range(2):
            x, y, first = 3.3 * stage, 2.3 * (1 - copy), 16 * stage + 8 * copy
            axis.add_patch(plt.Rectangle((x, y), 2.5, 1.3, fill=False, lw=1.2))
            for gpu in range(8):
                at = (x + 0.1 + 0.58 * (gpu % 4), y + 0.72 - 0.6 * (gpu // 4))
                axis.add_patch(plt.Rectangle(at, 0.54, 0.46, color=(style.CYAN, style.YELLOW)[copy], lw=0))
                axis.text(at[0] + 0.27, at[1] + 0.22, first + gpu, ha="center", va="center", fontsize=9)
            if stage < 3:
                axis.annotate("", (x + 3.25, y + 0.65), (x + 2.55, y + 0.65),
                              arrowprops={"arrowstyle": "<->", "lw": 1.5})
                axis.text(x + 2.9, y + 0.8, "pp", ha="center", fontsize=10)
        axis.annotate("", (x + 1.25, 1.35), (x + 1.25, 2.25), arrowprops={"arrowstyle": "<->", "lw": 3})
        axis.text(x + 1.4, 1.8, "dp", va="center", fontsize=10)
        axis.text(x + 1.25, 3.7, f"stage {stage}: 20 layers", ha="center", fontsize=10)
    for copy in range(2):
        axis.text(-0.2, 2.3 * (1 - copy) + 0.65, f"half {copy} of\nthe batch", ha="right", va="center", fontsize=10)
    axis.text(-1.4, -0.6, f"A rank of stage 1 sends per step: {sent['tp']:,.0f} GB along tp, inside its node (a box); "
              f"{sent['dp']:.1f} GB along dp and {sent['pp']:.1f} GB along pp,\nover its card, to the rank in the same "
              "place of another node.", fontsize=10, va="center")
    axis.set(xlim=(-1.5, 12.6), ylim=(-1, 4))
    axis.axis("off")
    axis.set_title(f"70B on 8 nodes of 8 GPUs: with tp innermost {sent['tp'] / sum(sent.values()):.1%} of the bytes "
                   "stay inside a node", fontsize=11)
    return figure


def published(rows):
    """Predicted against published tokens/s per GPU; a grey band of 15%."""
    looks = {"calibration": (style.YELLOW, "*"), "held out": (style.BLUE, "o"), "doubtful": (style.GREY, "x")}
    figure, (points, errors) = plt.subplots(1, 2, figsize=(11, 4.8), width_ratios=(1, 1))
    ends = [0.8 * min(numbers(rows, "published")), 1.25 * max(numbers(rows, "published"))]
    points.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color=style.GREY, alpha=0.35, lw=0,
                        label="within 15%")
    points.plot(ends, ends, color="#999999", lw=0.8)
    for role, mine in groups(rows, "role").items():
        colour, marker = looks[role]
        points.loglog(numbers(mine, "published"), numbers(mine, "predicted"), color=colour, marker=marker, ls="",
                      ms=9 if marker == "*" else 4, label=f"{role} ({len(mine)})")
    off = [float(row["error"]) for row in rows if row["role"] == "held out"]
    figure.suptitle(f"Of {len(off)} held-out runs half are predicted to {statistics.median(map(abs, off)):.0f}%; "
                    f"{sum(error > 0 for error in off)} come out too fast", fontsize=11)
    points.set(xlabel="published tokens/s per GPU", ylabel="predicted tokens/s per GPU", xlim=ends)
    points.legend(fontsize=8)
    held = [row for row in rows if row["role"] == "held out"]
    kinds = groups(held, "software")
    for place, (kind, mine) in enumerate(kinds.items()):
        errors.plot([min(float(row["error"]), 100) for row in mine], [place] * len(mine), color=style.BLUE, marker="|",
                    ms=14, ls="", alpha=0.7)
    errors.axvspan(-15, 15, color=style.GREY, alpha=0.35, lw=0)
    errors.axvline(0, color="#999999", lw=0.8)
    errors.set_yticks(range(len(kinds)), [f"{kind} ({len(mine)})" for kind, mine in kinds.items()])
    errors.set(xlabel="error of held-out rows (%; 100 and more at the edge)", ylim=(-0.6, len(kinds) - 0.4))
    return figure


def expert_load(rows):
    figure, axis = plt.subplots(figsize=(7, 3.6))
    labels = {"none": ("no balancing", style.RED, 2), "loss": ("--aux-loss 0.01", style.CYAN, 1.2),
              "biases": ("--router-bias-rate 0.01", "black", 0.7)}
    for name, (label, colour, width) in labels.items():
        axis.plot(numbers(rows, "step"), numbers(rows, name), color=colour, lw=width, label=label)
    axis.axhline(1, color="#999999", lw=0.8, ls=":")
    axis.text(1000, 0.97, "1: an even load", ha="right", va="top", fontsize=9)
    axis.set(xlabel="step", ylabel="busiest expert, times the mean load", ylim=(0.7, 4.1))
    last = {name: sum(numbers(rows[-100:], name)) / 100 for name in labels}
    axis.set_title(f"Without balancing one expert gets every row ({last['none']:.1f} times the mean);\nwith a loss or "
                   f"with biases {last['loss']:.1f} and {last['biases']:.1f} times (last 100 steps)", fontsize=10)
    axis.legend(fontsize=9, loc="center right")
    return figure


# Arithmetic of one element / its bytes, as the .cu files have it, where an op's own count of FLOPs is 0. Another count
# would move a dot along the roof of memory, not nearer to it.
FLOPS_PER_BYTE = {"adamw": 15 / 30, "sum_squares": 2 / 4, "swiglu": 4 / 6, "swiglu_backward": 11 / 10, "add": 1 / 6,
                  "rmsnorm": 4 / 4, "add_rmsnorm": 5 / 8, "rmsnorm_backward": 10 / 6, "softmax_stats": 5 / 2,
                  "cross_entropy_backward": 6 / 4, "split_rope": 2.5 / 4, "split_rope_backward": 2.5 / 4,
                  "embedding_backward": 1 / 2}


def roofline(rows):
    """Of the first run's ops: the rate that each achieves beside what memory and tensor cores give, both measured on the
    idle card (ceilings.csv); and the share of that roof."""
    ceilings = tables.read(pathlib.Path(__file__).resolve().parent / "results/gpu/ceilings.csv")
    card = [row for row in ceilings if row["hardware"] == rows[0]["hardware"]]
    copy, product = (max(float(row["value"]) for row in card if row["quantity"] == quantity)
                     for quantity in ("copy", "bf16 product"))  # GB/s, TFLOP/s
    ops = [row for row in rows if row["run"] == rows[0]["run"]]
    step = next(float(row["ms"]) for row in ops if row["op"] == "whole_step")
    dots = []
    for row in ops:
        gflops, gbytes = (float(row[column] or 0) for column in ("gflops", "gbytes_per_s"))
        if row["op"] != "whole_step" and (gflops > 0 or row["op"] in FLOPS_PER_BYTE):
            intensity = gflops / gbytes if gflops else FLOPS_PER_BYTE[row["op"]]
            share = intensity * gbytes / min(copy * intensity, 1e3 * product)
            dots.append((row["op"], float(row["ms"]), gflops > 0, intensity, intensity * gbytes / 1e3, share))
    figure, (roof, shares) = plt.subplots(1, 2, figsize=(8.6, 4.2), width_ratios=(1.4, 1))
    ends, ridge = (0.1, 2e4), 1e3 * product / copy
    roof.loglog([ends[0], ridge, ends[1]], [copy * ends[0] / 1e3, product, product], color="black", lw=1.2)
    roof.text(9, 60, f"memory: {copy / 1e3:.1f} TB/s", ha="right", fontsize=9)
    roof.text(150, 1.1 * product, f"tensor cores: {product:.0f} TFLOP/s", ha="right", fontsize=9)
    for place, (name, ms, counted, intensity, rate, share) in enumerate(dots):
        roof.plot(intensity, rate, "o", ms=4 + ms**0.5, color=style.BLUE, fillstyle="full" if counted else "none")
        shares.barh(place, 100 * share, color=style.BLUE if counted else style.CYAN)
        shares.text(100 * share - 1.5, place, f"{100 * share:.0f}", ha="right", va="center", fontsize=8,
                    color="white" if counted else "black")
        if counted:
            part = rate / product
            at = ((0, 10), "center") if part > 0.8 else ((-9, -4), "right") if part > 0.5 else ((24, -18), "right")
            roof.annotate(name, (intensity, rate), at[0], textcoords="offset points", ha=at[1], fontsize=9)
    roof.set(xlabel="FLOPs per byte", ylabel="TFLOP/s", xlim=ends, ylim=(0.2, 3e3))
    roof.set_title("a dot per kernel; hollow: no FLOPs of its own count", fontsize=9)
    shares.set_yticks(range(len(dots)), [f"{name}, {ms:.1f} ms" for name, ms, *_ in dots], fontsize=9)
    shares.set(xlabel="% of its roof", xlim=(0, 100))
    shares.invert_yaxis()
    lost = {name: ms * (1 - share) for name, ms, _, _, _, share in dots}
    worst = sorted(lost, key=lost.get)[:-3:-1]
    figure.suptitle(f"Of the step's {step:.0f} ms, {worst[0]} loses {lost[worst[0]]:.0f} below its roof, {worst[1]} "
                    f"{lost[worst[1]]:.0f}, all others {sum(lost.values()) - lost[worst[0]] - lost[worst[1]]:.0f}", fontsize=11)
    return figure


PICTURES = {"01_loss": loss, "01_memory": recompute_memory, "01_mup": mup, "02_all_reduce": all_reduce,
            "02_nodes": nodes, "02_sites": sites, "02_overlap": overlap, "03_memory": zero_memory,
            "04_memory": tensor_memory, "04_efficiency": efficiency, "05_schedules": schedules, "05_v": the_v,
            "05_measured": measured_schedules, "06_causal": causal, "07_formats": formats, "07_loss": fp8_loss,
            "08_loss": mesh_loss, "08_memory": mesh_memory, "08_mesh": mesh_on_nodes, "08_nodes": steps_on_nodes,
            "08_experts": expert_load, "08_published": published, "gpu/ops": roofline}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of: " + ", ".join(PICTURES))
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    arguments = parser.parse_args()
    for name in arguments.names or [name for name in PICTURES if (arguments.data / f"{name}.csv").exists()]:
        if name not in PICTURES:
            parser.error(f"{name} is none of {', '.join(PICTURES)}")
        path = arguments.data / f"{name}.csv"
        if not path.exists():
            parser.error(f"{path} does not exist: docs/measure.py or docs/published.py writes it")
        figure = PICTURES[name](tables.read(path))
        if not name.startswith("05_"):  # theirs leave room for the legend
            figure.tight_layout()
        figure.savefig(arguments.out / f"{name}.png", dpi=130)
        plt.close(figure)
        print(arguments.out / f"{name}.png")


if __name__ == "__main__":
    programs.start(main)
