#!/usr/bin/env python3
"""Measures a machine with 1 to 8 GPUs, in order of value; docs/measure_node.sh finds or makes a build and starts this.

    bash docs/measure_node.sh [--minutes 9] [--resume] [PART ...]

PARTS: parts
Each part has a CSV in --out. A run is one command; its rows are written as soon as it has ended, each with status,
hardware, driver, commit, date and command:
    ok          it ended with code 0, and its output held what was asked for
    failed      note: the exit code and the last lines; more in failed.log beside the CSVs
    timeout     it took longer than its limit
    not run     note: why it cannot run here, as "out of GPU memory"
    not tested  a test that found nothing to test here
    not reached the time of --minutes was over before it began, or before it ended
Rows of the same run on the same hardware are replaced, others are kept. --resume leaves out what this commit has
already run on this hardware, also what failed; what was not run or not reached is tried.
Exit code: 0; 1 if a run failed or took too long; 2 without a usable GPU, and for wrong options.
"""
import argparse
import dataclasses
import itertools
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time

import programs
import tables
from measure_node_machine import Node, OutOfTime, Usage
from measure_node_readers import (Unreadable, csv_of, doctest, fp8_products, limits, links_of, op_row,
                                  sanitizer_summary, steps_of, torch_attention, torch_steps)
from measure_node_shapes import SCALES, SMALL, resized

GPU_RESULTS = pathlib.Path("docs/results/gpu")
RECIPES = ("current", "delayed", "rowwise", "blockwise")


def ceilings(node):
    """a large copy and a large product: cold, and after seconds without a pause, as in training"""
    for dtype in ("bf16", "fp32"):
        node.run(f"copy, {dtype} product", ["01_single_gpu", *SMALL.flags(), "--dtype", dtype, "--bench", *node.side()],
                 limits)


def train_slice(node, name, program, flags=(), micro_batches=1):
    shape = resized(node.scale.slice, global_batch=micro_batches)
    node.run(name, [program, *shape.flags(), "--dtype", "bf16", "--steps", str(node.scale.steps), *flags],
             steps_of(node, shape), file_flag="--metrics")


def steps_of_a_slice(node):
    """training steps of a few layers of 8B in bf16, of one and four micro-batches"""
    train_slice(node, "bf16", "01_single_gpu")
    train_slice(node, "bf16, 4 micro-batches", "01_single_gpu", micro_batches=4)


def attention(node):
    """attention and its backward pass in a layer of 8B, by length, and inside documents"""
    for length in node.scale.attention:
        attention_of(node, f"{length} tokens", length)
    length = node.scale.attention[0]
    attention_of(node, f"{length} tokens, documents", length, ["--document-token", "10"])


def attention_of(node, name, length, flags=()):
    shape = resized(node.scale.slice, layers=1, vocab=256, seq_len=length)
    node.run(name, ["01_single_gpu", *shape.flags(), "--dtype", "bf16", *node.side(), *flags],
             csv_of("ops", lambda row: {"tokens": length, **op_row(node, row)},
                    lambda row: row["op"].startswith("attention")), file_flag="--bench-csv")


def rank_slices(node):
    """one rank of 64 (or 16) of a 70B run, its peers simulated, with every recomputation: no communication"""
    mesh = "--tp 8 --pp 4 --zero 1 --sequence-parallel on"
    runs = [("first stage", 64, 0, mesh, "none"), ("first stage", 64, 0, mesh, "full"),
            ("last stage", 64, 63, mesh, "none"), ("zero-3", 16, 0, "--zero 3", "full"),
            ("first stage", 64, 0, mesh, "pointwise"), ("first stage", 64, 0, mesh, "selective"),
            ("first stage, fp8 blockwise", 64, 0, mesh + " --fp8 blockwise", "none"),
            ("first stage, zero-bubble", 64, 0, mesh + " --pipeline zero-bubble", "none"),
            ("zero-3", 16, 0, "--zero 3", "none"), ("zero-3", 16, 0, "--zero 3", "pointwise"),
            ("zero-3, 8-bit adamw, bf16 gradients", 16, 0, "--zero 3 --optimizer adamw8bit --grad-dtype bf16", "full"),
            ("last stage", 64, 63, mesh, "full")]
    for name, world, rank, flags, recompute in runs:
        steps = str(min(node.scale.steps, 4))
        node.run(f"{name}, recompute {recompute}",
                 ["08_3d_full", *node.scale.rank.flags(), "--dtype", "bf16", "--recompute", recompute, "--comm", "fake",
                  "--fake-world", str(world), "--fake-rank", str(rank), *flags.split(), "--steps", steps],
                 steps_of(node, node.scale.rank, simulated=world), file_flag="--metrics")


def ops(node):
    """every op of a step against its floor: the larger of bytes over copy bandwidth and FLOPs over product rate"""
    scale = node.scale
    for name, shape, flags in (("8b slice", scale.slice, ""), ("70b block", scale.block, ""),
                               ("experts", scale.experts, scale.expert_flags)):
        node.run(f"{name}, bf16", ["01_single_gpu", *shape.flags(), *flags.split(), "--dtype", "bf16", *node.side()],
                 csv_of("ops", lambda row: op_row(node, row)), file_flag="--bench-csv")


def tests_01(node):
    """the CUDA tests of chapter 01: every kernel against the CPU"""
    node.run("01_cuda", cuda_tests(1), doctest, limit=300)


def fp8(node):
    """the slice and the products of its shapes in FP8, by every recipe"""
    for recipe in RECIPES:
        train_slice(node, f"fp8 {recipe}", "07_fp8", ["--fp8", recipe, "--tables", "off"])
    for recipe in RECIPES:
        if node.options.scale == "full" and node.device == "cuda":
            node.run(f"products, {recipe}", ["test_measure", "products", "--fp8", recipe], fp8_products)
        else:
            node.skip(f"products, {recipe}", "its shapes are large and fixed")


def torch(node):
    """PyTorch beside it: steps of the same slice, scaled_dot_product_attention by length"""
    shape = node.scale.slice
    node.torch("eager", [*shape.flags("global-batch"), "--forms", "eager"], torch_steps(node, shape))
    for length in node.scale.attention:
        words = [*shape.flags("global-batch", "seq-len"), "--forms", "", "--attention", str(length)]
        node.torch(f"{length} tokens", words, torch_attention)
    node.torch("compile", [*shape.flags("global-batch"), "--forms", "compile"], torch_steps(node, shape))


def links(node):
    """the links between the GPUs: all-reduces of 1 KiB and more, bandwidth and latency of a message"""
    if node.ranks < 2:
        return node.skip("all", "one GPU has no links")
    node.write_topology()
    for ranks in sorted({2, node.ranks}):
        flags = resized(SMALL, global_batch=ranks).flags("micro-batch")
        node.run(f"all-reduce over {ranks}",
                 ["test_measure", "all-reduce", "--largest-mb", str(node.scale.all_reduce_mb)],
                 csv_of("all_reduce", lambda row: {"quantity": "bus bandwidth", "value": row["bus_bytes_per_s"] / 1e9,
                                                   "unit": "GB/s", "seconds_each": row.pop("seconds"), **row}),
                 ranks=ranks, file_flag="--csv", limit=240)
        node.run(f"links of {ranks}", ["08_3d_full", *flags, "--steps", "1"], links_of(ranks), ranks=ranks,
                 file_flag="--probe-file")


def tests(node):
    """the CUDA tests of the other chapters, on two ranks (08: four), through host memory and, with as many GPUs, NCCL"""
    for chapter in range(2, 9):
        node.run(f"0{chapter}_cuda", cuda_tests(chapter), doctest, ranks=4 if chapter == 8 else 2, limit=300)


def cuda_tests(chapter):
    return [f"test_0{chapter}", f"--source-file=*/0{chapter}_cuda*.cpp"]


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
    # NCCL connects some ten groups in the first step.
    patient = ["--comm-timeout", "120"] if node.device == "cuda" else []
    for backend, ranks, flags, environment in runs:
        def train_once(name, *more):
            words = ["08_3d_full", *shape.flags(), *train, "--comm", backend, *flags.split(), *patient, *more]
            return node.run(name, words,
                            steps_of(node, shape, ranks=ranks, reference=None if "fp8" in flags else reference),
                            ranks=ranks, environment=environment, own_host=backend == "nccl" and bool(environment),
                            file_flag="--metrics")
        name = f"{backend} {ranks}: {flags}"
        if train_once(name)[0]["status"] == "timeout" or "--comm-timeout" in node.mine(name)[0]["note"]:
            train_once(f"{name}, one stream", "--comm-streams", "one")  # ends: the groups' kernels waited for each other
    return reference


def long_attention(node):
    """attention of one long sequence"""
    attention_of(node, f"{node.scale.long_attention} tokens", node.scale.long_attention)


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


STEP_COLUMNS = ("ranks", "tokens_per_s", "tokens_per_s_per_rank", "step_s", "model_tflops_per_rank", "mfu", "comm_s",
                "peak_gib", "device_gib", "other_gib", "first_loss", "last_loss", "loss_difference")
OP_COLUMNS = ("op", "calls", "ms", "floor_ms", "times_floor", "reference_floor_ms", "times_reference_floor", "share",
              "gflops", "gbytes_per_s")
TEST_COLUMNS = ("cases", "failed", "assertions")


@dataclasses.dataclass(frozen=True)
class Part:
    run: object
    columns: tuple
    seconds: int  # after so many, the other parts come first and the rest of this one last


PARTS = {
    "ceilings": Part(ceilings, ("quantity", "state", "value", "unit", "reference"), 60),
    "slice": Part(steps_of_a_slice, STEP_COLUMNS, 60),
    "attention": Part(attention, ("tokens", *OP_COLUMNS), 80),
    "rank_slices": Part(rank_slices, STEP_COLUMNS, 120),
    "ops": Part(ops, OP_COLUMNS, 60),
    "tests_01": Part(tests_01, TEST_COLUMNS, 120),
    "fp8": Part(fp8, (*STEP_COLUMNS, "rows", "in", "out", "bf16_tflops", "fp8_tflops", "casts_ms", "net_speedup"), 90),
    "torch": Part(torch, (*STEP_COLUMNS, "tokens", "op", "calls", "ms", "gflops"), 240),
    "links": Part(links, ("quantity", "value", "unit", "ranks", "bytes", "algorithm", "seconds_each"), 120),
    "layouts": Part(layouts, STEP_COLUMNS, 3600),
    "tests": Part(tests, TEST_COLUMNS, 240),
    "shared_card": Part(shared_card, (*STEP_COLUMNS, *TEST_COLUMNS), 180),
    "long_attention": Part(long_attention, ("tokens", *OP_COLUMNS), 120),
    "sanitizer": Part(sanitizer, ("errors", "warnings"), 600),
}


def summary(node, names, seconds):
    kinds = ("ok", "failed", "timeout", "not run", "not tested", "not reached")
    print(f"\n{node}: {seconds:.0f} s\n")
    bad, lines = [], []
    for name in names:
        node.begin(name, PARTS[name].columns, 0)
        here = [row for row in node.rows if (row["hardware"], row["commit"]) == (node.hardware, node.commit)]
        runs = {row["run"]: row for row in here}
        counts = [sum(row["status"] == kind for row in runs.values()) for kind in kinds]
        spent = sum(float(row["seconds"]) for row in runs.values())
        lines.append([name, *(count or "" for count in counts), f"{spent:.0f}", node.path() if runs else "not reached"])
        bad += [f"{name}: {run}: {row['status']}: {row['note'][:200]}" for run, row in runs.items()
                if row["status"] in ("failed", "timeout")]
    print("\n".join(tables.markdown(["part", *kinds, "seconds", "file"], lines, "-" + ":" * (len(kinds) + 1) + "-")))
    print("\n" + "\n".join(bad) if bad else "\nno run failed")
    return 1 if bad else 0


def measure_all(node, names):
    for capped in (True, False):
        for name in names:
            node.begin(name, PARTS[name].columns, PARTS[name].seconds if capped else float("inf"))
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
    with tempfile.TemporaryDirectory(prefix="measure_node.") as folder:
        try:
            node = Node(options, started, pathlib.Path(folder))
            if "emulated" in node.name and options.out.resolve() == GPU_RESULTS.resolve():
                raise Usage(f"{node.name} is no hardware: name another folder than {GPU_RESULTS} with --out")
        except (Usage, Unreadable) as why:
            print(f"measure_node: {why}", file=sys.stderr)
            return 2
        names = [name for name in PARTS if not options.parts or name in options.parts]
        print(f"{node}; results in {options.out}", flush=True)
        measure_all(node, names)
        return summary(node, names, time.monotonic() - started)


if __name__ == "__main__":
    programs.start(main)
