#!/usr/bin/env python3
"""Grades the puzzle fit-70b (docs/labs/README.md): grade.py BUILD FILE prints the rows of the score card as JSON.

Memory and bytes are those of a dry run of build/bin/08_3d_full; links and FLOP/s are in 08_3d_full/complete/layout/links.json.
Exit code 2, one line on stderr: flags that are not the student's to choose.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
# GPUs, tokens, sequences, GB of a GPU: of the task, or of a seed (lab.json).
WORLD, SEQ_LEN, GLOBAL_BATCH, DEVICE_GB = map(int, os.environ.get("LAB_RUN", "32 8192 16 80").split())
NODE, RESERVE_GB, MOST = 8, 8, 0.05
GIVEN = {"--model": "70b", "--dtype": "bf16", "--seq-len": str(SEQ_LEN), "--global-batch": str(GLOBAL_BATCH),
         "--comm": "fake", "--fake-world": str(WORLD), "--dry-run": None}
CHOSEN = ("--tp", "--cp", "--dp", "--pp", "--zero", "--sequence-parallel", "--recompute", "--pipeline",
          "--virtual-stages", "--stage-layers", "--micro-batch", "--cp-algorithm", "--ulysses-size", "--prefetch",
          "--bucket-mb")

# Chapter 05's formulas of the bubble: p ranks, m micro-batches, v chunks per rank.
BUBBLES = {"naive": lambda p, m, v: (p - 1) / p, "gpipe": lambda p, m, v: (p - 1) / (m + p - 1),
           "1f1b": lambda p, m, v: (p - 1) / (m + p - 1), "interleaved": lambda p, m, v: (p - 1) / (v * m + p - 1),
           "zero-bubble": lambda p, m, v: (p - 1) / (3 * m + p - 1), "zb-v": lambda p, m, v: (p - 1) / (6 * m + p - 1),
           "dualpipe-v": lambda p, m, v: (p - 1) / (6 * m + p - 1)}
# What recomputation adds to a step's operations: chapter 01, "The arithmetic".
RECOMPUTED = {"none": 0.0, "pointwise": 0.0, "selective": 0.024, "full": 1 / 3}


def refuse(line):
    print(f"fit-70b: {line}", file=sys.stderr)
    sys.exit(2)


def read_flags(path):
    """{flag: value}, in the file's order."""
    words = [word for line in path.read_text("utf-8").split("\n") for word in line.split("#")[0].split()]
    flags = {}
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag in GIVEN:
            refuse(f"{flag} is given: {' '.join(f'{name} {value or str()}'.strip() for name, value in GIVEN.items())}")
        if flag not in CHOSEN:
            refuse(f"{flag} is not one of the flags to choose: {' '.join(CHOSEN)}")
        if not equals and (not words or words[0].startswith("--")):
            refuse(f"{flag} has no value")
        if flag in flags:
            refuse(f"{flag} is there twice")
        flags[flag] = value if equals else words.pop(0)
    if flags.get("--pipeline", "1f1b").startswith("file:"):
        refuse("--pipeline: one of the schedules by name")
    if not flags:
        refuse(f"{path.name} has no flags yet")
    return flags


def dry_run(build, flags, *more):
    program = build / "bin/08_3d_full"
    if not program.is_file():
        refuse(f"{program} is not there: cmake --build {build} --target 08_3d_full")
    command = [str(program)] + [word for pair in {**GIVEN, **flags}.items() for word in pair if word is not None]
    return subprocess.run(command + list(more), capture_output=True, encoding="utf-8", cwd=ROOT, timeout=120)


def memory_of_ranks(output):
    """[(ranks, GB of each kind)] from the dry run's last table."""
    lines = output.split("\n")
    header = next(i for i, line in enumerate(lines) if re.match(r"ranks +params ", line))
    kinds = lines[header].split()[1:]
    rows = [re.match(r"(\S+ \(stage \d+\)) +(.*)", line) for line in lines[header + 1:]]
    return [(row[1], dict(zip(kinds, map(float, row[2].split())))) for row in rows if row]


def booked_step(build, flags, rank):
    """The config and the step of the metrics file of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "metrics.jsonl"
        done = dry_run(build, flags, "--fake-rank", str(rank), "--metrics", str(path))
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        events = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    return tuple(next(event for event in events if event["event"] == kind) for kind in ("config", "step"))


def figure(what, got, expected, unit, formula, good):
    return {"what": what, "got": got, "expected": expected, "unit": unit, "formula": formula, "good": good,
            "bound": "at most"}


def merit(build, flags):
    """For the leaderboard: (tokens/s/GPU, GB) of the planner's simulator on nodes of 8 H100."""
    text = dry_run(build, {**flags, "--simulate": "h100-8x8"}).stdout
    rate, memory = re.search(r"([\d,]+) per device", text), re.search(r"^peak memory ([\d.]+) GB", text, re.M)
    return int(rate[1].replace(",", "")), float(memory[1])


def main():
    build, path = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    flags = read_flags(path)
    if sys.argv[3:] == ["merit"]:
        return print(json.dumps(merit(build, flags)))
    rows = []

    def row(name, points, of, lesson, measured=(), remark="", **more):
        rows.append({"row": name, "points": points, "of": of, "lesson": lesson, "measured": list(measured),
                     "remark": remark, **more})

    layout_lesson = "08_3d_full/REFERENCE.md, \"Which techniques can be combined?\""
    done = dry_run(build, flags)
    if done.returncode != 0:
        line = next((line for line in done.stderr.split("\n") if line), f"exit code {done.returncode}")
        row("layout", 0, 1, layout_lesson, found=line)
        for name, of in (("memory", 3), ("network", 3), ("bubble", 2), ("recomputation", 1)):
            row(name, 0, of, layout_lesson, found="not a layout")
        return print(json.dumps(rows))
    axes = {axis: int(flags.get(f"--{axis}", "1")) for axis in ("tp", "cp", "pp")}
    axes["dp"] = WORLD // (axes["tp"] * axes["cp"] * axes["pp"])
    row("layout", 1, 1, layout_lesson)

    # The largest rank.
    ranks, held = max(memory_of_ranks(done.stdout), key=lambda each: each[1]["total"])
    total, room = held["total"], DEVICE_GB - RESERVE_GB
    states = held["params"] + held["grads"] + held["optimizer"]
    most = (f"Ranks {ranks}: {states:.1f} GB of parameters, gradients and optimizer states, "
            f"{held['activations']:.1f} GB of activations, {held['comm'] + held['workspace']:.1f} GB of buffers. ")
    if states > room:
        remark = ("The states alone do not fit: divide the layers further (tp, pp), or the states over data-parallel "
                  "ranks (zero).")
    elif flags.get("--sequence-parallel", "off") == "off" and axes["tp"] > 1:
        remark = "Without --sequence-parallel every rank of a tensor-parallel group keeps all norms and residuals."
    elif flags.get("--pipeline") in ("zero-bubble", "zb-v"):
        remark = (f"{flags['--pipeline']} keeps the inputs and gradients of its delayed weight gradients, the most on the "
                  "last stage.")
    else:
        remark = "Fewer micro-batches or chunks in flight, more ranks per layer, or recomputation."
    points = 3 if total <= room else 1 if total <= DEVICE_GB else 0
    row("memory", points, 3, "08_3d_full/README.md, \"The arithmetic\": 70B on 64 GPUs of 80 GB",
        [figure("largest rank", total, room, "GB", f"{DEVICE_GB} GB - {RESERVE_GB} GB in reserve", total <= room)],
        most + remark)

    # What a rank sends to groups that are larger than a node: of the first stage, and of the second.
    cluster = json.loads((ROOT / "08_3d_full/complete/layout/links.json").read_text("utf-8"))
    network = cluster["rail"]
    extent = {"tp": axes["tp"], "cp": axes["tp"] * axes["cp"], "dp": axes["tp"] * axes["cp"] * axes["dp"], "pp": WORLD}
    worst, seconds = {}, 0
    for rank in sorted({0, WORLD // axes["pp"] % WORLD}):
        config, step = booked_step(build, flags, rank)
        sent = {}
        for name, count in step["comm_bytes"].items():
            axis = name[:2]
            if extent[axis] > NODE:
                sent[axis] = sent.get(axis, 0) + count
        if sum(sent.values()) / network["bytes_per_s"] >= seconds:
            worst, seconds = sent, sum(sent.values()) / network["bytes_per_s"]
    compute = config["model"]["flops_per_token"] * SEQ_LEN * GLOBAL_BATCH / WORLD / cluster["device"]["flops_per_s"]
    share, axis = seconds / compute, max(worst, key=worst.get, default="")
    whole = axes["tp"] > 1 and flags.get("--sequence-parallel", "off") == "off"
    per_micro_batch = flags.get("--zero", "0") in ("2", "3")
    remark = {
        "tp": f"A tensor-parallel group of {axes['tp']} spans nodes, and sends {worst.get('tp', 0) / 1e9:.0f} GB per "
              "rank, in every layer and exposed: keep it inside a node.",
        "cp": f"tp x cp = {extent['cp']} spans nodes, and keys and values are sent in every layer and micro-batch.",
        "dp": "ZeRO-3 gathers every weight, and ZeRO-2 and 3 reduce every gradient, for every micro-batch: the fewer "
              "copies and the lower the stage, the less." if per_micro_batch else
              "Gradients of many gigabytes are summed over the network in every step, and this step is short: fewer "
              "copies, more stages.",
        "pp": "Without --sequence-parallel all ranks of a tensor-parallel group send the same, whole activations to "
              "the next stage." if whole else
              "Stages exchange activations once per micro-batch and chunk: fewer chunks, or fewer stages.",
        "": ""}[axis]
    row("network", 3 if share <= MOST else 1 if share <= 4 * MOST else 0, 3,
        "08_3d_full/complete/layout/links.json, and 08_3d_full/README.md, \"The idea\": a mesh",
        [figure("time of sending between nodes", round(share, 4), MOST, "of its computation",
                f"{sum(worst.values()) / 1e9:.1f} GB / {network['bytes_per_s'] / 1e9:.0f} GB/s, against {compute:.2f} s",
                share <= MOST)], remark)

    # The bubble, by chapter 05's formula.
    pipeline, p = flags.get("--pipeline", "1f1b"), axes["pp"]
    mine = GLOBAL_BATCH // axes["dp"]  # sequences
    m = mine // int(flags.get("--micro-batch", 1 if p > 1 else mine))
    v = int(flags.get("--virtual-stages", "2")) if pipeline == "interleaved" else 1
    bubble = BUBBLES[pipeline](p, m, v) if p > 1 else 0.0
    row("bubble", 2 if bubble <= MOST else 1 if bubble <= 2 * MOST else 0, 2,
        "05_pipeline/README.md, \"The arithmetic\"",
        [figure("idle share of the step", round(bubble, 4), MOST, "", f"{pipeline}, {p} stages, {m} micro-batches"
                + (f", {v} chunks per rank" if v > 1 else ""), bubble <= MOST)],
        f"There are no more micro-batches than {GLOBAL_BATCH} / dp: take a schedule with a smaller bubble, more chunks, "
        "or fewer stages.")

    extra = RECOMPUTED[flags.get("--recompute", "none")]
    row("recomputation", int(extra <= MOST), 1, "01_single_gpu/README.md, \"The arithmetic\": activations",
        [figure("additional operations", round(extra, 3), MOST, "", f"--recompute {flags.get('--recompute', 'none')}",
                extra <= MOST)],
        "Full recomputation runs the forward pass twice, a third more operations: it is for activations that do not "
        "fit otherwise.")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
