#!/usr/bin/env python3
"""Runs the programs and writes the data of the pictures in docs/results, one NAME.csv each; docs/plots.py draws them.

    python3 docs/measure.py [NAME ...] [--bin build/bin] [--out docs/results] [--runs FOLDER]
    python3 docs/measure.py TABLE [--bin build/bin] [--runs FOLDER]

NAME: 01_loss, 05_measured, ...; default: all but 02_nodes, 02_sites and 08_nodes (as root), about twenty minutes. A CSV
begins with comment lines: what it holds, the commands that made it (from the repository's root; the file that a flag
names is then read) and the hardware, or "computed".
TABLE: a comparison table of a lesson, printed, not written: front (README.md's), 03_wire, ... (docs/measure/*.py)
--runs keeps what the programs wrote in FOLDER, and takes from there what an earlier run has left.
"""
import argparse
import json
import math
import os
import pathlib
import statistics
import tempfile
import time

import programs
import tables
from measure import Runs, chapter01, chapter02, chapter03, chapter04, chapter05, chapter06, chapter07, chapter08
from measure.chapter02 import all_reduce, nodes, overlap
from measure.chapter07 import by_step, fp8_loss
from style import ON_DEVICE as KINDS


def loss(runs):
    """training loss and learning rate of chapter 01's default run"""
    steps = runs.steps(1, "01_single_gpu", [], "default.jsonl")
    return [["step", "loss", "lr"], *([line["step"], line["loss"], line["lr"]] for line in steps)]


def second_step(timeline, until_update):
    """The rows of a memory timeline that belong to the second training step: [phase, bytes of each kind]."""
    rows = [[row[name] for name in ("phase", *KINDS)] for row in tables.read(timeline)]
    first = [i for i, row in enumerate(rows) if row[0] == "forward 0" and rows[i - 1][0] != "forward 0"][1]
    rows = rows[first:]
    if until_update:
        rows = rows[:max(i for i, row in enumerate(rows) if row[0] == "update") + 1]
    return rows


def recompute_memory(runs):
    """bytes by kind at every allocation of the second training step, at the four levels of recomputation"""
    rows = [["recompute", "phase", *KINDS]]
    for level in ("none", "pointwise", "selective", "full"):
        timeline = runs.file(1, "01_single_gpu", ["--steps", "2", "--recompute", level], "--memory-timeline",
                             f"{level}.csv")
        rows += [[level, *row] for row in second_step(timeline, until_update=False)]
    return rows


def reading(runs):
    """milliseconds of a step that go into data, median and largest of 20 steps of 64 samples, from 512 MiB of shards:
    read by the step itself, and by the thread that is two steps ahead, from a cold and a warm page cache"""
    return runs.table(1, "test_measure_data", [], "--csv", "reading.csv")


def mup(runs):
    """training loss, mean of the last 10 of 100 steps, at each learning rate and width, with and without muP from the
    base width 64; heads of 16, two layers, the learning rate constant after a warmup of 10 steps"""
    rows = [["mup", "hidden", "lr", "loss"]]
    for given in ("off", "64"):
        for hidden in (64, 128, 256, 512):
            for lr in ("5e-4", "1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2"):
                flags = (f"--layers 2 --hidden {hidden} --heads {hidden // 16} --kv-heads {hidden // 16} "
                         f"--ffn {3 * hidden} --init-std 0.1 --seq-len 64 --global-batch 8 --steps 100 "
                         f"--warmup-steps 10 --lr-schedule constant --lr {lr}").split()
                flags += [] if given == "off" else ["--mup", given]
                steps = runs.steps(1, "01_single_gpu", flags, f"mup_{given}_{hidden}_{lr}.jsonl")
                losses = [line["loss"] for line in steps]
                rows.append([given, hidden, lr, round(statistics.mean(losses[-10:]), 4)])
    return rows


def zero_memory(runs):
    """bytes by kind on rank 0 of 4 at every allocation of the second training step, ZeRO stages 0 to 3"""
    # Few tokens and wide blocks, so that the model's own bytes can be seen beside the activations.
    shape = "--layers 6 --hidden 256 --ffn 768 --seq-len 32 --global-batch 4 --steps 2".split()
    rows = [["stage", "phase", *KINDS]]
    for stage in "0123":
        timeline = runs.file(4, "03_zero", [*shape, "--tables", "off", "--zero", stage], "--memory-timeline",
                             f"zero_{stage}.csv")
        rows += [[stage, *row] for row in second_step(timeline, until_update=True)]
    return rows


def tensor_memory(runs):
    """peak bytes of each kind on rank 0 in the second step, for tp 1, 2, 4, 8, with and without sequence parallelism"""
    rows = [["tp", "sequence_parallel", *KINDS]]
    for tp in (1, 2, 4, 8):
        for sequence in ("off", "on")[:1 if tp == 1 else 2]:
            # As many key/value heads as query heads, so that all of a block divides.
            flags = f"--tp {tp} --kv-heads 8 --sequence-parallel {sequence} --steps 2 --tables off".split()
            peak = runs.steps(tp, "04_tensor_parallel", flags, f"tp_{tp}_{sequence}.jsonl")[-1]["memory"]["peak"]
            rows.append([tp, sequence, *(peak[kind] for kind in KINDS)])
    return rows


def efficiency(runs):
    """estimated share of the time that is computation, with the links of 08_3d_full/complete/layout/links.json"""
    flags = ["--tp-efficiency", "08_3d_full/complete/layout/links.json"]
    return runs.table(1, "plan", flags, "--csv", "efficiency.csv")


def timelines(runs, ranks, flags, name):
    """[[title, rank, step, begin, end], ...], seconds, and {title: end of the last step}, of a pipeline's trace."""
    file = runs.file(ranks, "05_pipeline", flags, "--pipeline-trace", name)
    trace = json.loads(file.read_text("utf-8"))["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    rows = [[titles[e["pid"]], e["tid"], e["name"], f"{e['ts'] / 1e6:.6f}", f"{(e['ts'] + e['dur']) / 1e6:.6f}"]
            for e in trace if e["ph"] == "X"]
    ends = {title: max(float(row[4]) for row in rows if row[0] == title) for title in titles.values()}
    return rows, ends


SPANS = ["title", "rank", "step", "begin", "end"]
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")


def schedules(runs):
    """every schedule on 4 stages and 8 micro-batches as simulated: equal stages, B = 2F; begin and end in units of F"""
    rows = [SPANS]
    for name in SCHEDULES:
        flags = ["--name", name, "--stages", "4", "--micro-batches", "8"]
        title = f"{name}, 4 stages, 8 micro-batches: equal stages, B = 2F"
        for span in tables.read(runs.file(1, "schedule", flags, "--spans-csv", f"schedule_{name}.csv")):
            rows.append([title, span["rank"], span["step"], *(f"{float(span[at]):.6f}" for at in ("begin", "end"))])
    return rows


def the_v(runs):
    """zb-v on 4 ranks and 8 micro-batches as simulated: equal stages, B = 2F; begin and end in units of F"""
    return [row for row in schedules(runs) if row == SPANS or row[0].startswith("zb-v")]


def measured_pipeline(runs):
    """1f1b and zero-bubble on 2 ranks: simulated from the measured times of their steps, and as measured, in seconds;
    of five runs the one whose measured step is the shortest"""
    rows = [SPANS]
    for name in ("1f1b", "zero-bubble"):
        tries = [timelines(runs, 2, ["--global-batch", "8", "--steps", "1", "--pipeline", name], f"{name}_{i}.json")
                 for i in range(1, 6)]
        spans, ends = min(tries, key=lambda each: list(each[1].values())[-1])
        rows += [[f"{name}: {row[0]}", *row[1:]] for row in spans if row[0] != next(iter(ends))]
    return rows


def causal(runs):
    """the rank that has each query of a sequence, plain ring and zigzag on 4 ranks; query q sees q + 1 keys"""
    rows, ranks, tokens = [["algorithm", "query", "rank"]], 4, 64
    for algorithm, stretches in (("ring", 1), ("zigzag", 2)):
        for query in range(tokens):
            stretch = query * ranks * stretches // tokens
            rows.append([algorithm, query, stretch if stretch < ranks else 2 * ranks - 1 - stretch])
    return rows


def formats(runs):
    """largest relative rounding error in each octave, of values as a share of the tensor's largest, which is scaled to
    the format's largest"""
    rows = [["format", "magnitude", "error"]]
    for name, mantissa_bits, smallest_exponent, scale in (("E4M3", 3, -6, 448), ("E5M2", 2, -14, 57344),
                                                          ("bf16", 7, -126, 1)):
        for octave in range(math.floor(math.log2(1e-10 * scale)), math.ceil(math.log2(scale))):
            unit, errors = 2.0 ** (max(octave, smallest_exponent) - mantissa_bits), []
            for x in (2.0**octave * (1 + i / 1000) for i in range(1000)):
                if x <= scale:
                    errors.append(abs(round(x / unit) * unit - x) / x)
            rows.append([name, f"{2.0**octave / scale:.4g}", f"{max(errors):.4g}"])
    return rows


def one_and_eight(runs):
    one = runs.metrics(1, "01_single_gpu", ["--steps", "100"], "one.jsonl")
    mesh = "--dp 2 --tp 2 --pp 2 --zero 1 --sequence-parallel on --micro-batch 4 --steps 100 --eval-every 50"
    eight = runs.metrics(8, "08_3d_full", mesh.split(), "eight.jsonl")
    return one, eight


def mesh_loss(runs):
    """losses of one rank and of eight, dp 2 x tp 2 x pp 2 with ZeRO-1 and sequence parallelism"""
    one, eight = ([line for line in run if line["event"] == "step"] for run in one_and_eight(runs))
    rows = [[a["step"], a["loss"], b["loss"]] for a, b in zip(one, eight)]
    return [["step", "one rank", "dp 2 x tp 2 x pp 2"], *rows]


def mesh_memory(runs):
    """peak bytes of each kind, one rank and each of eight (dp 2 x tp 2 x pp 2 with ZeRO-1 and sequence parallelism)"""
    one, eight = (next(line for line in run if line["event"] == "summary") for run in one_and_eight(runs))
    one, eight = one["memory_per_rank"], eight["memory_per_rank"]
    peaks = {"one rank": one[0], **{f"rank {i}": peak for i, peak in enumerate(eight)}}
    return [["rank", *KINDS], *([name, *(peak[kind] for kind in KINDS)] for name, peak in peaks.items())]


def mesh_bytes(runs):
    """bytes that rank 16 (second of four stages) sends in a step of 70B on 8 nodes of 8, tp 8 x pp 4 x dp 2, by axis"""
    layout = ("--model 70b --comm fake --fake-world 64 --tp 8 --pp 4 --zero 1 --sequence-parallel on --dtype bf16 "
              "--seq-len 4096 --global-batch 256 --micro-batch 1 --dry-run --fake-rank 16")
    sent = runs.steps(1, "08_3d_full", layout.split(), "mesh.jsonl")[0]["comm_bytes"]
    return [["axis", "bytes"], *([axis, sum(sent[name] for name in sent if name.startswith(axis + "."))]
                                 for axis in ("tp", "pp", "dp"))]


def expert_load(runs):
    """load of the busiest of 8 experts over the mean, in the worst layer: without balancing, with a loss, with biases"""
    flags = {"none": "--aux-loss 0", "loss": "", "biases": "--aux-loss 0 --router sigmoid --router-bias-rate 0.01"}
    return by_step(runs, "01_single_gpu", "--experts 8 --steps 1000", flags, "load_{}.jsonl",
                   lambda step: step["experts"]["max_over_mean"])


def dd_rate(folder, size):
    """Bytes per second of dd, which writes as many zeros to the same folder and calls fsync."""
    count = max(size // (4 << 20), 1)
    begin = time.monotonic()
    programs.output(["dd", "if=/dev/zero", f"of={folder}/dd", "bs=4M", f"count={count}", "conv=fsync"])
    seconds = time.monotonic() - begin
    os.remove(f"{folder}/dd")
    return count * (4 << 20) / seconds


def checkpoints(runs):
    """a checkpoint at every step, three times in turn with none: seconds per step of the whole run, the wait for the
    last checkpoint included, and the copy, for which a step waits, median; then the writing while nothing else runs,
    in turn with dd (bs=4M conv=fsync, the same size and folder), best of five, because others use the disk"""
    rows = [["what", "ranks", "checkpoint every", "s per step", "copy s", "bytes", "written B/s", "dd B/s"]]
    large = "--layers 8 --hidden 512 --ffn 1536 --seq-len 64"

    def run(ranks, flags, name, every):
        folder = runs.folder / name
        saving = ["--checkpoint-dir", str(folder), "--checkpoint-every", str(every)] if every else []
        events = runs.metrics(ranks, "08_3d_full", [*flags.split(), *saving], f"{name}.jsonl")
        summary = next(line for line in events if line["event"] == "summary")
        return summary, [line for line in events if line["event"] == "checkpoint"], folder

    for ranks, shape in {2: "--layers 6 --hidden 256 --ffn 768 --zero 1", 1: large}.items():
        for number in range(1, 4):
            for every in (0, 1):
                summary, written, _ = run(ranks, shape + " --steps 12", f"step_{ranks}_{number}_{every}", every)
                copy = round(statistics.median(line["copy_s"] for line in written), 5) if every else ""
                size = written[0]["bytes"] if every else ""
                rows.append([f"run {number}", ranks, every or "none", round(summary["seconds"] / 12, 4), copy, size])
    rates, dd = [], []
    for number in range(1, 6):
        _, written, folder = run(1, large + " --steps 1", f"write_{number}", 1)
        size = written[-1]["bytes"]
        rates.append(size / written[-1]["write_s"])
        dd.append(dd_rate(folder, size))
    rows.append(["writing", 1, 1, "", "", size, round(max(rates)), round(max(dd))])
    return rows


TABLES = {"01_loss": loss, "01_memory": recompute_memory, "01_data": reading, "01_mup": mup,
          "02_all_reduce": all_reduce, "02_nodes": nodes, "02_sites": chapter02.sites, "02_overlap": overlap,
          "03_memory": zero_memory, "04_memory": tensor_memory, "04_efficiency": efficiency, "05_schedules": schedules,
          "05_v": the_v, "05_measured": measured_pipeline, "06_causal": causal, "07_formats": formats,
          "07_loss": fp8_loss, "08_loss": mesh_loss, "08_memory": mesh_memory, "08_mesh": mesh_bytes,
          "08_experts": expert_load, "08_checkpoint": checkpoints, "08_elastic": chapter08.elastic,
          "08_nodes": chapter08.nodes}
AS_ROOT = "02_nodes", "02_sites", "08_nodes"
CHAPTERS = (chapter01, chapter02, chapter03, chapter04, chapter05, chapter06, chapter07, chapter08)
PRINTED = {name: table for chapter in CHAPTERS for name, table in chapter.PRINTED.items()}


def write(path, name, make, runs):
    rows = make(runs)
    ran = [f"command: {command}" for command in dict.fromkeys(runs.commands)]
    where = f"hardware: {programs.hardware()}" if ran else "computed by docs/measure.py"
    tables.write(path, rows, comments=[f"{name}: {' '.join(make.__doc__.split())}", *ran, where])
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of: " + ", ".join(TABLES))
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results"))
    parser.add_argument("--runs", type=pathlib.Path)
    arguments = parser.parse_args()
    printed = [PRINTED[name] for name in arguments.names if name in PRINTED]
    for name in arguments.names:
        if name not in (PRINTED if printed else TABLES):
            parser.error(f"{name} is none of {', '.join(TABLES)}; printed: {', '.join(PRINTED)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.runs or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for table in printed:
            table(Runs(arguments.bin.resolve(), folder.resolve()))
        if printed:
            return
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name in arguments.names or [name for name in TABLES if name not in AS_ROOT]:
            write(arguments.out / f"{name}.csv", name, TABLES[name], Runs(arguments.bin.resolve(), folder.resolve()))


if __name__ == "__main__":
    programs.start(main)
