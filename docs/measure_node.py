#!/usr/bin/env python3
"""Measures a machine with 1 to 8 GPUs, in order of value; docs/measure_node.sh finds or makes a build and starts this.

    bash docs/measure_node.sh [--minutes 9] [--resume] [PART ...]

PARTS: parts
Each part has a CSV in --out. A run is one command; its rows are written as soon as it has ended, each with status,
hardware, driver, commit, date and command:
    ok          it ended with code 0, and its output held what was asked for
    failed      note: the exit code and the last lines; more in failed.log beside the CSVs
    timeout     it took longer than its limit
    not run     note: why it cannot run here
    not tested  a test that found nothing to test here
    not reached the time of --minutes was over before it began, or before it ended
Rows of the same run on the same hardware are replaced, others are kept. --resume leaves out what this commit has
already run on this hardware, also what failed; what was not run or not reached is tried.
Exit code: 0; 1 if a run failed or took too long; 2 without a usable GPU, and for wrong options.
"""
import argparse
import ctypes
import csv
import dataclasses
import datetime
import hashlib
import importlib.util
import io
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import measure

GPU_RESULTS = pathlib.Path("docs/results/gpu")
# Rates of other programs on the same hardware: a large copy (bytes read and written) and a bf16 product of 8192^3.
REFERENCE = {"NVIDIA H200": {"copy": 4.3e12, "product": 795e12}}
RECIPES = ("current", "delayed", "rowwise", "blockwise")
BF16_BOUND = 2e-2  # of a layout's loss against one rank's: that of tests/08_grid.cpp


# ---- shapes ---------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    global_batch: int = 1
    micro_batch: int = 1

    def flags(self, *leave_out):
        values = [(field.name.replace("_", "-"), getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [word for name, value in values if name not in leave_out for word in (f"--{name}", str(value))]

    def flops_per_token(self):  # the programs' definition, flops_per_token() in 01_single_gpu/config.cpp
        E, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        block = 2 * E + 2 * (E + kv) * E + 3 * self.ffn * E
        return 6 * (self.layers * block + E + self.vocab * E) + 6 * self.layers * E * self.seq_len


LLAMA_8B = Shape(32, 4096, 32, 8, 14336, 32768, 8192)
LLAMA_70B = Shape(80, 8192, 64, 8, 28672, 128256, 4096)
SMALL = Shape(1, 64, 1, 1, 64, 256, 64)


@dataclasses.dataclass(frozen=True)
class Scale:
    slice: Shape           # a few layers of 8B
    block: Shape           # one layer of 70B
    attention: list        # lengths
    rank: Shape            # 70B, one rank of 64
    shared: Shape          # ranks that share a card
    layout: Shape          # one rank per GPU
    steps: int             # of which the first two warm up
    side: int              # of the product that measures the ceiling; 0: the program's default
    all_reduce_mb: int
    fp8_products: bool     # chapter 07's table has fixed, large shapes


def resized(shape, **sizes):
    return dataclasses.replace(shape, **sizes)


SCALES = {
    "full": Scale(
        slice=resized(LLAMA_8B, layers=4), block=resized(LLAMA_70B, layers=1, vocab=32768),
        attention=[4096, 8192, 16384, 32768], rank=resized(LLAMA_70B, global_batch=16),
        shared=Shape(4, 1024, 8, 8, 2816, 32768, 1024, global_batch=8),
        layout=resized(LLAMA_8B, layers=8, seq_len=4096, global_batch=8),
        steps=12, side=0, all_reduce_mb=256, fp8_products=True),
    # A few seconds for each run on a CPU, to try this script.
    "tiny": Scale(
        slice=SMALL, block=resized(SMALL, ffn=96), attention=[32, 64, 96, 128],
        rank=Shape(4, 64, 16, 8, 128, 256, 32, global_batch=16),
        shared=Shape(2, 32, 4, 4, 32, 256, 32, global_batch=8), layout=Shape(8, 32, 8, 8, 32, 256, 32, global_batch=8),
        steps=4, side=64, all_reduce_mb=1, fp8_products=False),
}


# ---- the parts, each a function of the node -------------------------------------------------------------------------

def tests(node):
    """the CUDA tests; those of several ranks on two, through host memory and, with two GPUs, NCCL"""
    for chapter in range(1, 9):
        node.run(f"0{chapter}_cuda", cuda_tests(chapter), doctest, ranks=min(chapter, 2), limit=300)


def cuda_tests(chapter):
    return [f"test_0{chapter}", f"--source-file=*/0{chapter}_cuda.cpp"]


def sanitizer(node):
    """compute-sanitizer on every case of 01_cuda"""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if node.device == "cpu" or not pathlib.Path(tool).exists():
        return node.skip("all", "no GPU" if node.device == "cpu" else "no compute-sanitizer")
    listed = node.output([*cuda_tests(1), "--list-test-cases"])
    cases = [line.strip() for line in listed.splitlines() if line.strip().startswith("cuda: ")]
    if not cases:
        return node.skip("all", "01_cuda has no cases")
    for check in ("memcheck", "racecheck"):
        for case in cases:
            pattern = case.replace(",", "?")  # a comma would separate two patterns
            node.run(f"{check}: {case}", [*cuda_tests(1), f"--test-case={pattern}"], sanitizer_summary,
                     before=[tool, "--tool", check, "--error-exitcode", "9"])


def ceilings(node):
    """large copy, large products, and the links between the GPUs"""
    for dtype in ("bf16", "fp32"):
        node.run(f"copy, {dtype} product", ["01_single_gpu", *SMALL.flags(), "--dtype", dtype, "--bench", *node.side()],
                 limits)
    if node.ranks < 2:
        return node.skip("links", "one GPU has no links")
    for ranks in sorted({2, node.ranks}):
        flags = resized(SMALL, global_batch=ranks).flags("micro-batch")
        node.run(f"all-reduce over {ranks}", ["02_data_parallel", *flags, "--steps", "1", "--all-reduce-mb",
                                              str(node.scale.all_reduce_mb)],
                 csv_of("all_reduce", lambda row: {"quantity": "bus bandwidth", "value": row["bus_bytes_per_s"] / 1e9,
                                                   "unit": "GB/s", **row}),
                 ranks=ranks, file_flag="--all-reduce-csv", limit=240)


def ops(node):
    """every op of a step against its floor: the larger of bytes over copy bandwidth and FLOPs over product rate"""
    for name, shape in (("8b slice", node.scale.slice), ("70b block", node.scale.block)):
        node.run(f"{name}, bf16", ["01_single_gpu", *shape.flags(), "--dtype", "bf16", *node.side()],
                 csv_of("ops", lambda row: op_row(node, row)), file_flag="--bench-csv")
    for recipe in RECIPES:
        if node.scale.fp8_products and node.device == "cuda":
            node.run(f"fp8 products, {recipe}", ["07_fp8", "--dtype", "bf16", "--fp8", recipe, "--steps", "0"],
                     fp8_products)
        else:
            node.skip(f"fp8 products, {recipe}", "its shapes are large and fixed")


def steps_of_a_slice(node):
    """training steps of a few layers of 8B: bf16, FP8 by every recipe, PyTorch"""
    shape = node.scale.slice
    run = ["--dtype", "bf16", "--steps", str(node.scale.steps)]
    node.run("bf16", ["01_single_gpu", *shape.flags(), *run], steps_of(node, shape), file_flag="--metrics")
    for recipe in RECIPES:
        node.run(f"fp8 {recipe}", ["07_fp8", *shape.flags(), *run, "--fp8", recipe, "--tables", "off"],
                 steps_of(node, shape), file_flag="--metrics")
    for form in ("eager", "compile"):
        node.torch(f"torch {form}", [*shape.flags("global-batch"), "--forms", form], torch_steps(node, shape))


def attention(node):
    """attention and its backward pass in a layer of 8B, by length; PyTorch's scaled_dot_product_attention"""
    for length in node.scale.attention:
        shape = resized(node.scale.slice, layers=1, vocab=256, seq_len=length)
        node.run(f"{length} tokens", ["01_single_gpu", *shape.flags(), "--dtype", "bf16", *node.side()],
                 csv_of("ops", lambda row: {"tokens": length, **op_row(node, row)},
                        lambda row: row["op"].startswith("attention")), file_flag="--bench-csv")
    for length in node.scale.attention:
        node.torch(f"{length} tokens, torch",
                   [*node.scale.slice.flags("global-batch", "seq-len"), "--forms", "", "--attention", str(length)],
                   torch_attention)


def rank_slices(node):
    """one rank of 64 (or 16) of a 70B run, its peers simulated: true shapes, no communication"""
    mesh = "--tp 8 --pp 4 --zero 1 --sequence-parallel on"
    for name, world, rank, flags in (
            ("first stage", 64, 0, mesh), ("last stage", 64, 63, mesh), ("zero-3", 16, 0, "--zero 3"),
            ("first stage, fp8 blockwise", 64, 0, mesh + " --fp8 blockwise"),
            ("zero-3, 8-bit adamw, bf16 gradients", 16, 0, "--zero 3 --optimizer adamw8bit --grad-dtype bf16"),
            ("first stage, zero-bubble", 64, 0, mesh + " --pipeline zero-bubble")):
        steps = str(min(node.scale.steps, 4))
        node.run(name, ["08_3d_full", *node.scale.rank.flags(), "--dtype", "bf16", "--recompute", "full", "--comm",
                        "fake", "--fake-world", str(world), "--fake-rank", str(rank), *flags.split(), "--steps", steps],
                 steps_of(node, node.scale.rank, simulated=world), file_flag="--metrics")


def shared_card(node):
    """two and four ranks on one card: through host memory, and NCCL between ranks that count as different hosts"""
    one_card = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    layouts = [(2, "--dp 2 --zero 1"), (2, "--tp 2 --sequence-parallel on"), (2, "--pp 2"), (2, "--cp 2"),
               (4, "--dp 2 --tp 2 --zero 3"), (4, "--pp 2 --tp 2"), (4, "--cp 2 --dp 2 --zero 2")]
    backend = "staged" if node.device == "cuda" else "mpi"
    trained = train_layouts(node, node.scale.shared, [(backend, *layout, one_card) for layout in layouts])
    as_hosts = {**one_card, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                "NCCL_MNNVL_ENABLE": "0", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    if node.device == "cpu":
        return node.skip("nccl", "no GPU")
    node.run("nccl 2: 02_cuda", cuda_tests(2), doctest, ranks=2, environment=as_hosts, own_host=True)
    train_layouts(node, node.scale.shared, [("nccl", ranks, flags, as_hosts) for ranks, flags in layouts[:6]], trained)


def layouts(node):
    """every mesh and ZeRO stage that the GPUs allow, one rank per GPU, against one rank's loss; then some variants"""
    if node.ranks < 2:
        return node.skip("all", "one GPU")
    n, listed = node.ranks, []
    axes = [a for a in itertools.product((1, 2, 4, 8), repeat=3) if n % (a[0] * a[1] * a[2]) == 0]
    for stages in ((1, 0), (3,), (2,), (0,)):
        for tp, pp, cp in sorted(axes, key=lambda a: (sum(x > 1 for x in a), a[::-1])):
            dp = n // (tp * pp * cp)
            zero = stages[0] if dp * cp > 1 else stages[-1]
            if dp * cp == 1 and zero > 0:
                continue
            flags = f"--dp {dp} --tp {tp} --pp {pp} --cp {cp} --zero {zero}" + " --sequence-parallel on" * (tp > 1)
            if flags not in listed:
                listed.append(flags)
    listed.append(f"--dp {n} --zero 3 --fp8 current")
    if (even := n & -n) > 1:  # the part of n that is a power of two; dp takes the rest
        listed += [f"{flags} --dp {n // even}" for flags in (
            f"--tp {even} --tp-overlap on", f"--tp {even} --fp8 blockwise", f"--pp {even} --pipeline zero-bubble",
            f"--pp {even} --pipeline gpipe", f"--cp {even} --cp-algorithm ring", f"--cp {even} --cp-algorithm ulysses",
            f"--cp {even} --cp-algorithm gather")]
    batch = 8 if 8 % n == 0 else n
    train_layouts(node, resized(node.scale.layout, global_batch=batch), [("auto", n, flags, {}) for flags in listed])


def train_layouts(node, shape, runs, reference=None):
    """Trains one rank, then each (backend, ranks, flags, environment), and compares losses."""
    train = ["--dtype", "bf16", "--steps", str(node.scale.steps)]
    reference = reference or node.run("one rank", ["01_single_gpu", *shape.flags(), *train], steps_of(node, shape),
                                      file_flag="--metrics")
    for backend, ranks, flags, environment in runs:
        node.run(f"{backend} {ranks}: {flags}",
                 ["08_3d_full", *shape.flags(), *train, "--comm", backend, *flags.split()],
                 steps_of(node, shape, ranks=ranks, reference=None if "fp8" in flags else reference),
                 ranks=ranks, environment=environment, own_host=backend == "nccl" and bool(environment),
                 file_flag="--metrics")
    return reference


STEP_COLUMNS = ("ranks", "tokens_per_s", "tokens_per_s_per_rank", "step_s", "model_tflops_per_rank", "mfu", "comm_s",
                "peak_gib", "first_loss", "last_loss", "loss_difference")
OP_COLUMNS = ("op", "calls", "ms", "floor_ms", "times_floor", "reference_floor_ms", "times_reference_floor", "share",
              "gflops", "gbytes_per_s")


@dataclasses.dataclass(frozen=True)
class Part:
    run: object
    columns: tuple
    seconds: int  # after so many, the other parts come first and the rest of this one last


PARTS = {
    "tests": Part(tests, ("cases", "failed", "assertions"), 120),
    "sanitizer": Part(sanitizer, ("errors", "warnings"), 90),
    "ceilings": Part(ceilings, ("quantity", "value", "unit", "reference", "ranks", "bytes", "algorithm",
                                "seconds_each"), 90),
    "ops": Part(ops, (*OP_COLUMNS, "rows", "in", "out", "bf16_tflops", "fp8_tflops", "casts_ms", "net_speedup"), 90),
    "slice": Part(steps_of_a_slice, STEP_COLUMNS, 180),
    "attention": Part(attention, ("tokens", *OP_COLUMNS), 120),
    "rank_slices": Part(rank_slices, STEP_COLUMNS, 180),
    "shared_card": Part(shared_card, (*STEP_COLUMNS, "cases", "failed", "assertions"), 180),
    "layouts": Part(layouts, STEP_COLUMNS, 3600),
}


# ---- what the programs print, as rows -------------------------------------------------------------------------------

class Unreadable(Exception):
    """The output does not hold what was asked for."""


class NotTested(Exception):
    pass


def found(pattern, text, what):
    match = re.search(pattern, text)
    if not match:
        raise Unreadable(f"the output has no {what}")
    return match


def doctest(text, _):
    cases = found(r"test cases:\s*(\d+) \|\s*(\d+) passed \|\s*(\d+) failed", text, "summary of the tests")
    assertions = int(found(r"assertions:\s*(\d+)", text, "number of assertions")[1])
    left_out = sorted(set(re.findall(r"NOT TESTED: .*|skipped: .*", text)))
    if assertions == 0 or any(re.search("no (usable )?GPU|no CUDA", line) for line in left_out):
        raise NotTested("; ".join(left_out) or "no assertions")
    return [{"cases": int(cases[1]), "failed": int(cases[3]), "assertions": assertions, "note": "; ".join(left_out)}]


def sanitizer_summary(text, _):
    row = doctest(text, None)[0]
    races = re.search(r"RACECHECK SUMMARY: .*?\((\d+) errors?, (\d+) warnings?\)", text)
    errors = races[1] if races else found(r"ERROR SUMMARY: (\d+) error", text, "summary of the sanitizer")[1]
    return [{"errors": int(errors), "warnings": int(races[2]) if races else 0, "note": row["note"]}]


def limits(text, node):
    match = found(r"measured limits: copy ([\d.]+) GB/s, (\w+) product ([\d.]+) TFLOP/s", text, "measured limits")
    known = REFERENCE.get(node.name, {})
    product = known.get("product", 0) / 1e12 if match[2] == "bf16" else 0
    copy = known.get("copy", 0) / 1e9
    return [{"quantity": "copy", "value": float(match[1]), "unit": "GB/s", "reference": copy or ""},
            {"quantity": f"{match[2]} product", "value": float(match[3]), "unit": "TFLOP/s",
             "reference": product or ""}]


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


def csv_of(kind, row_of, wanted=lambda row: True):
    def parse(_, node):
        rows = [{key: number(value) for key, value in row.items()}
                for row in csv.DictReader(io.StringIO(node.file_text()))]
        rows = [row_of(row) for row in rows if wanted(row)]
        if not rows:
            raise Unreadable(f"no rows of {kind}")
        if kind == "all_reduce":
            rows = [{**row, "seconds_each": row.pop("seconds")} for row in rows]
        return rows
    return parse


def op_row(node, row):
    ms, floor = row["ms"], row["floor_ms"]
    known, work = REFERENCE.get(node.name), all(isinstance(row[key], float) for key in ("gflops", "gbytes_per_s"))
    if known and work and ms > 0:
        reference = ms * max(row["gbytes_per_s"] * 1e9 / known["copy"], row["gflops"] * 1e9 / known["product"])
        row |= {"reference_floor_ms": round(reference, 4), "times_reference_floor": round(ms / reference, 2)}
    return {**row, "times_floor": round(ms / floor, 2) if isinstance(floor, float) and floor > 0 else ""}


def fp8_products(text, _):
    numbers = r"\s+([\d.]+)"
    lines = re.findall(r"^\s*(\d+)" + numbers * 5 + r"\s+([\d.]+) x", text, re.M)
    if not lines:
        raise Unreadable("the output has no table of products")
    names = ("rows", "in", "out", "bf16_tflops", "fp8_tflops", "casts_ms", "net_speedup")
    return [dict(zip(names, map(float, line))) for line in lines]


def rates(node, shape, ranks, tokens_per_s):
    flops = tokens_per_s * shape.flops_per_token() / ranks
    return {"ranks": ranks, "tokens_per_s": tokens_per_s, "tokens_per_s_per_rank": tokens_per_s / ranks,
            "model_tflops_per_rank": flops / 1e12}


def steps_of(node, shape, ranks=1, simulated=0, reference=None):
    def parse(_, node):
        steps = [line for line in map(json.loads, node.file_text().splitlines()) if line["event"] == "step"]
        timed = steps[2:] or steps[1:]
        if not timed:
            raise Unreadable("the metrics have no steps")
        middle = sorted(timed, key=lambda step: step["step_s"])[len(timed) // 2]
        first, last = steps[0]["loss"], steps[-1]["loss"]
        row = {**rates(node, shape, simulated or ranks, middle["tokens_per_s"]), "step_s": middle["step_s"],
               "mfu": middle["mfu"], "comm_s": middle["comm_s"], "first_loss": first, "last_loss": last,
               "peak_gib": max(step["memory"]["peak"]["total"] for step in steps) / 2**30}
        if simulated:
            row |= {"note": "tokens_per_s: if every rank took as long; losses among simulated peers mean nothing"}
        if reference and reference[0]["status"] == "ok":
            expected = float(reference[0]["first_loss"])
            row["loss_difference"] = abs(first - expected) / expected
            if not row["loss_difference"] <= BF16_BOUND:
                raise Unreadable(f"first loss {first}, of one rank {expected}")
        return [row]
    return parse


def json_lines(text):
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise Unreadable("no lines of JSON")
    return lines


def torch_steps(node, shape):
    def parse(text, _):
        line, = json_lines(text)
        row = rates(node, shape, 1, line["tokens_per_s"])
        mfu = row["model_tflops_per_rank"] * 1e12 / node.peak if node.peak else ""
        return [{**row, "step_s": line["step_s"], "mfu": mfu, "peak_gib": line["peak_gib"], "last_loss": line["loss"],
                 "note": f"PyTorch {line['torch']}"}]
    return parse


def torch_attention(text, _):
    line, = json_lines(text)
    return [{"tokens": line["attention"], "op": op, "calls": 1, "ms": line[f"{direction}_ms"],
             "gflops": 1e3 * line[f"{direction}_tflops"], "note": f"PyTorch {line['torch']}"}
            for op, direction in (("attention", "forward"), ("attention_backward", "backward"))]


# ---- the machine, the runs and their records ------------------------------------------------------------------------

class OutOfTime(Exception):
    pass


class Usage(Exception):
    pass


LIBC = ctypes.CDLL(None)
COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def clean(text):
    return " ".join(re.sub(r"[^\x20-\x7e\n]", "", text).split())


REASON = re.compile(r"check failed|rror\b|ERROR|cannot|not allocate|timeout|emulate: ")


def last_lines(text):
    """The first line that sounds like a reason and the last ones, without the blocks that mpirun draws."""
    own = re.sub(r"^-{40,}\s*\n.*?^-{40,}\s*\n", "", text + "\n", flags=re.M | re.S)
    lines = (own if own.strip() else text).strip().splitlines()
    reason = [line for line in lines[:-5] if REASON.search(line)][:1]
    return clean("\n".join([line[:300] for line in [*reason, *lines[-5:]]]))


def shown(value):
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def own_group():
    """In the child: a group of its own, which can be ended as one, and which ends if this script is killed."""
    os.setpgrp()
    PR_SET_PDEATHSIG = 1
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Node:
    FIRST = ["run", "status"]
    LAST = ["seconds", "note", "hardware", "driver", "commit", "date", "command"]

    def __init__(self, options, started, folder):
        self.options, self.scale, self.bin = options, SCALES[options.scale], options.bin
        self.device, self.out = options.device, options.out
        self.end = started + 60 * options.minutes - 12 if options.minutes else float("inf")
        self.folder, self.file, self.child = folder, folder / "file", None
        self.started = set()  # (part, run) of this call
        self.environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                                OMPI_MCA_btl_vader_single_copy_mechanism="none", GOMP_SPINCOUNT="1000")
        if not shutil.which("ssh") and not shutil.which("rsh"):
            self.environment.setdefault("OMPI_MCA_plm", "isolated")  # else Open MPI refuses to start at all
        self.part, self.part_end, self.rows = None, float("inf"), []
        self.look()

    def look(self):
        """What is here: the device's name as CUDA reports it, how many there are, the driver, the commit."""
        command = ["01_single_gpu", *SMALL.flags(), "--dtype", "bf16", "--steps", "0", "--device", self.device]
        code, text, _ = self.execute([str(self.bin / command[0]), *command[1:]], {}, 120)
        if code != 0:
            reason = clean(text)[-300:]
            raise Usage(f"no usable GPU: {reason}" if self.device == "cuda" else f"the programs do not run: {reason}")
        peak = re.search(r"of ([\d.]+) TFLOP/s, the dense bf16 peak", text)
        self.peak = float(peak[1]) * 1e12 if peak else None
        self.name, visible, self.driver = measure.hardware(), 1, ""
        if self.device == "cuda":
            match = found(r" on cuda \((.*), (\d+) visible\)", text, "name of the device")
            self.name, visible = match[1], int(match[2])
            self.driver = self.driver_version()
        self.hardware = f"{visible} x {self.name}" if self.device == "cuda" else self.name
        self.ranks = min(self.options.ranks or visible, 8)
        self.commit = self.options.commit or self.commit_here()

    def __str__(self):
        return f"{self.hardware}, driver {self.driver or '-'}, commit {self.commit}"

    def driver_version(self):
        if "emulated" in self.name:
            return "none"
        if shutil.which("nvidia-smi"):
            asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                   capture_output=True, text=True)
            if asked.returncode == 0 and asked.stdout.strip():
                return asked.stdout.split("\n")[0].strip()
        try:
            text = pathlib.Path("/proc/driver/nvidia/version").read_text()
            return found(r"(\d+\.\d[\d.]*)", text, "version")[1]
        except (OSError, Unreadable):
            return "unknown"

    def commit_here(self):
        """Where there is no git, the programs themselves say which build this is."""
        def git(*words):
            return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()
        try:
            changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/results")
            return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
        except (OSError, subprocess.CalledProcessError):
            return "build " + hashlib.sha256((self.bin / "08_3d_full").read_bytes()).hexdigest()[:12]

    def side(self):
        return ["--bench-side", str(self.scale.side)]

    def file_text(self):
        if not self.file.exists():
            raise Unreadable("the program wrote no file")
        return self.file.read_text()

    def output(self, command):
        return self.execute([str(self.bin / command[0]), *command[1:]], {}, 60)[1]

    # -- records --

    def path(self):
        return self.out / f"{self.part}.csv"

    def begin(self, part, seconds):
        self.part, self.part_end = part, min(self.end, time.monotonic() + seconds)
        self.rows = []
        if self.path().exists():
            with open(self.path(), newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if None not in row.values()]

    def mine(self, name):
        return [row for row in self.rows if row["run"] == name and row["hardware"] == self.hardware]

    def record(self, name, status, rows, seconds, note, command):
        if status == "not reached" and any(row["status"] != "not reached" for row in self.mine(name)):
            return self.mine(name)
        common = {"run": name, "status": status, "seconds": f"{seconds:.2f}", "hardware": self.hardware,
                  "driver": self.driver, "commit": self.commit, "command": command,
                  "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        rows = [{key: shown(value) for key, value in {**row, **common, "note": note or row.get("note", "")}.items()}
                for row in rows]
        old = self.mine(name)
        at = self.rows.index(old[0]) if old else len(self.rows)
        self.rows = self.rows[:at] + rows + [row for row in self.rows[at:] if row not in old]
        columns = [*self.FIRST, *PARTS[self.part].columns, *self.LAST]
        self.out.mkdir(parents=True, exist_ok=True)
        unfinished = self.path().with_suffix(".tmp")
        with open(unfinished, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(unfinished, self.path())
        why = f"  ({note[:150]})" if note else ""
        print(f"{self.part:12} {status:11} {seconds:7.2f} s  {name}{why}", flush=True)
        return rows

    def done(self, name):
        """The rows of a run that need not be repeated."""
        rows = self.mine(name)
        if (self.part, name) in self.started:
            return rows
        kept = all(row["commit"] == self.commit and row["status"] not in ("not run", "not reached") for row in rows)
        return rows if self.options.resume and kept else []

    def skip(self, name, why):
        if not self.done(name):
            self.started.add((self.part, name))
            self.record(name, "not run", [{}], 0, why, "")

    # -- runs --

    def torch(self, name, words, parse):
        if self.done(name):
            return
        if importlib.util.find_spec("torch") is None:
            return self.skip(name, "no PyTorch")
        self.run(name, ["docs/peer_torch_gpu.py", *words], parse, before=["python3"], limit=240)

    def run(self, name, command, parse, ranks=1, limit=150, environment=None, own_host=False, before=(),
            file_flag=None):
        """Runs a program of the build (or a script of docs), records its rows and returns them."""
        if rows := self.done(name):
            return rows
        script = command[0].startswith("docs/")
        words = [command[0] if script else str(self.bin / command[0]), *command[1:]]
        if script or not command[0].startswith("test_"):
            words += ["--device", self.device]
        words = [*before, *words]
        if file_flag:
            words += [file_flag, str(self.file)]
        if own_host:
            words = ["bash", "-c", f"NCCL_HOSTID=$OMPI_COMM_WORLD_RANK exec {shlex.join(words)}"]
        if ranks > 1:
            words = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *words]
        environment = dict(environment or {})
        text = " ".join([*(f"{key}={value}" for key, value in environment.items()), shlex.join(words)])
        text = text.replace(str(self.file), "FILE")
        program = self.bin / command[0]
        if not script and not os.access(program, os.X_OK):
            self.started.add((self.part, name))
            return self.record(name, "not run", [{}], 0, f"{program} is not there", text)
        if ranks > 1 and not shutil.which("mpirun"):
            self.started.add((self.part, name))
            return self.record(name, "not run", [{}], 0, "no mpirun in PATH", text)
        left = self.end - time.monotonic()
        if time.monotonic() > self.part_end or left < self.options.least:
            self.record(name, "not reached", [{}], 0, "nor the runs after it", text)
            raise OutOfTime
        self.file.unlink(missing_ok=True)
        if ranks == 1:
            environment["OMPI_MCA_ess_singleton_isolated"] = "1"  # starts without mpirun's daemon
        code, output, seconds = self.execute(words, environment, min(limit, left))
        if code is None and limit > left:
            note = f"cut off after {seconds:.0f} s; nor the runs after it"
            self.record(name, "not reached", [{}], seconds, note, text)
            raise OutOfTime
        rows, note = [{}], ""
        status = "timeout" if code is None else "failed" if code else "ok"
        try:
            rows = parse(output, self)  # of a failed run: what there is
        except NotTested as why:
            status, note = ("not tested", str(why)) if status == "ok" else (status, "")
        except (Unreadable, ValueError, KeyError, TypeError) as why:
            status, note = ("failed", f"{type(why).__name__}: {why}") if status == "ok" else (status, "")
        if status in ("failed", "timeout"):
            ended = f"no end within {limit} s" if code is None else f"exit code {code}"
            note = "; ".join(filter(None, [note or ended, last_lines(output)]))[:1000]
            self.out.mkdir(parents=True, exist_ok=True)
            with open(self.out / "failed.log", "a") as log:
                log.write(f"==== {self.part}: {name}\n{text}\n{output[-20000:]}\n")
        self.started.add((self.part, name))
        return self.record(name, status, rows, seconds, note, text)

    def execute(self, words, environment, limit):
        """(exit code or None at the limit, output, seconds); nothing of it is left running."""
        begin = time.monotonic()
        with open(self.folder / "output", "w+b") as file:
            try:
                self.child = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                              env={**self.environment, **environment}, preexec_fn=own_group)
            except OSError as why:
                return 127, str(why), 0.0
            try:
                code = self.child.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self.stop()
            file.seek(0)
            return code, COLORS.sub("", file.read().decode(errors="replace")), time.monotonic() - begin

    def stop(self):
        """Ends the child and its group: mpirun needs a moment to end its ranks."""
        child, self.child = self.child, None
        if child is None:
            return
        for kind, wait in ((signal.SIGTERM, 8), (signal.SIGKILL, 2)):
            if child.poll() is None:
                try:
                    os.killpg(child.pid, kind)
                    child.wait(wait)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
        try:
            os.killpg(child.pid, signal.SIGKILL)  # what it started and left
        except ProcessLookupError:
            pass


def summary(node, names, seconds):
    kinds = ("ok", "failed", "timeout", "not run", "not tested", "not reached")
    print(f"\n{node}: {seconds:.0f} s\n")
    print("| part | " + " | ".join(kinds) + " | seconds | file |\n|---|" + "---:|" * (len(kinds) + 1) + "---|")
    bad = []
    for name in names:
        node.begin(name, 0)
        here = [row for row in node.rows if (row["hardware"], row["commit"]) == (node.hardware, node.commit)]
        runs = {row["run"]: row for row in here}
        counts = [sum(row["status"] == kind for row in runs.values()) for kind in kinds]
        spent = sum(float(row["seconds"]) for row in runs.values())
        print(f"| {name} | " + " | ".join(str(count) if count else "" for count in counts) +
              f" | {spent:.0f} | {node.path() if runs else 'not reached'} |")
        bad += [f"{name}: {run}: {row['status']}: {row['note'][:200]}" for run, row in runs.items()
                if row["status"] in ("failed", "timeout")]
    print("\n" + "\n".join(bad) if bad else "\nno run failed")
    return 1 if bad else 0


def measure_all(node, names):
    for capped in (True, False):
        for name in names:
            node.begin(name, PARTS[name].seconds if capped else float("inf"))
            try:
                PARTS[name].run(node)
            except OutOfTime:
                if time.monotonic() > node.end - node.options.least:
                    return


def main():
    listed = "".join(f"\n    {name:12} {part.run.__doc__}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="bash docs/measure_node.sh",
                                     description=__doc__.replace(" parts\n", listed + "\n", 1),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--minutes", type=float, help="end within so many minutes, building included")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has run on this hardware")
    parser.add_argument("--out", type=pathlib.Path, default=GPU_RESULTS, help="folder of the CSVs [%(default)s]")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/bin"), help="the build [%(default)s]")
    parser.add_argument("--commit", help="of the build, where there is no git [git's, else the build's hash]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this out; needs --out")
    parser.add_argument("--scale", choices=SCALES, default="full", help="tiny: to try this out; needs --out")
    parser.add_argument("--ranks", type=int, help="ranks of links and layouts [one per GPU, at most 8]")
    parser.add_argument("--least", type=float, default=10, help="seconds that a run needs to be begun [%(default)s]")
    parser.add_argument("--seconds-used", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.monotonic() - options.seconds_used
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"{name} is none of {', '.join(PARTS)}")
    if options.out.resolve() == GPU_RESULTS.resolve() and (options.device == "cpu" or options.scale != "full"):
        parser.error(f"{GPU_RESULTS} is for GPUs at full scale: name another folder with --out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    node = None
    folder = tempfile.TemporaryDirectory(prefix="measure_node.")
    try:
        node = Node(options, started, pathlib.Path(folder.name))
        if "emulated" in node.name and options.out.resolve() == GPU_RESULTS.resolve():
            raise Usage(f"{node.name} is no hardware: name another folder than {GPU_RESULTS} with --out")
        names = [name for name in PARTS if not options.parts or name in options.parts]
        print(f"{node}; results in {options.out}", flush=True)
        measure_all(node, names)
        return summary(node, names, time.monotonic() - started)
    except (Usage, Unreadable) as why:
        print(f"measure_node: {why}", file=sys.stderr)
        return 2
    finally:
        if node:
            node.stop()
        folder.cleanup()


if __name__ == "__main__":
    sys.exit(main())
