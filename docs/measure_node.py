#!/usr/bin/env python3
"""Checks and measures a machine with 1 to 8 GPUs, what is worth most first; docs/measure_node.sh starts this.

A run is one command. Its rows stand in STEP.csv as soon as it has ended: figures, each beside its floor, the time of
its work at the best rate, and what the cost model of --simulate expects; clock and power meanwhile. status: ok; failed
(note: the last lines; failed.log has more); timeout; not run (note: why); not tested. The same command again continues:
what this commit has run on this hardware, also what failed, is left out. Exit code: 0; 1 if a run failed or took too
long; 2 without a usable GPU.
"""
import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import programs
import tables
from measure_node_machine import CARDS, Node, execute, last_lines, look

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = ("layers", "hidden", "heads", "kv-heads", "ffn", "vocab", "seq-len", "global-batch", "micro-batch")
SLICE, BLOCK = (4, 4096, 32, 8, 14336, 32768, 8192, 1), (1, 8192, 64, 8, 28672, 32768, 4096, 1)  # of 8B, of 70B
EXPERTS, SMALL = (1, 2048, 16, 4, 6144, 32768, 4096, 1), (1, 64, 1, 1, 64, 256, 64, 1)
LAYOUT, SHARED = (8, 4096, 32, 8, 14336, 32768, 4096), (4, 1024, 8, 8, 2816, 32768, 1024, 4)
MESH, LLAMA_70B = "--tp 8 --pp 4 --zero 1 --sequence-parallel on", (80, 8192, 64, 8, 28672, 128256, 4096, 16)
RANKS = [*((f"8b, {name}", *flags, 0, 0, (32, *SLICE[1:5], 128256, 8192, 4)) for name, *flags in (
             ("8-bit adamw", "none", "--optimizer adamw8bit"), ("bf16 gradients", "full", "--grad-dtype bf16"))),
         *(("first stage", each) for each in ("full", "pointwise", "selective")),
         *(("last stage", each, MESH, 64, 63) for each in ("none", "full")),
         *((f"first stage, {each}", "none", f"{MESH} --{each}") for each in ("fp8 blockwise", "pipeline zero-bubble")),
         *(("zero-3", each, "--zero 3", 16) for each in ("full", "pointwise", "none")),
         ("zero-3, 8-bit adamw, bf16 gradients", "full", "--zero 3 --optimizer adamw8bit --grad-dtype bf16", 16)]
PRODUCT = ("rows", "in", "out", "bf16_tflops", "fp8_tflops", "casts_ms", "net_speedup")
RECIPES, FIRST_CASES = ("current", "delayed", "rowwise", "blockwise"), "*attention*,*product*"
ONE_CARD = ["env", f"CUDA_VISIBLE_DEVICES={CARDS.split(',')[0] or 0}"]
AS_HOSTS = [*ONE_CARD, *"NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_ALGO=Ring "
            "NCCL_PROTO=Simple bash -c".split(), 'NCCL_HOSTID=$OMPI_COMM_WORLD_RANK exec "$0" "$@"']
# GB/s of a copy and TFLOP/s of a bf16 product, cold and warm: 08_3d_full/complete/layout/device_model.cpp.
USUAL = {"A100": (1830, 268, 221), "H100": (3000, 794, 654), "H200": (4300, 795, 655), "B200": (6000, 1746, 1439)}
BENCH = (["--bench", "--bench-warm-ms", 2000], ["--bench", "--bench-warm-ms", 20, "--bench-side", 64])
LIMITS = re.compile(r"measured limits(, cold)?: copy ([\d.]+) GB/s, \w+ product ([\d.]+) TFLOP/s")


def words_of(shape):
    return [str(word) for name, size in zip(NAMES, (*shape, 1)) for word in (f"--{name}", size)]


def shape_of(n, L, E, H, K, F, V, T, B):  # without hardware, to try this script: of a second or two
    return (min((L + 1) // 2, 4), 32, 8, 8, 32, 256, min(T // 256, 128), B) if n.tiny else (L, E, H, K, F, V, T, B)


def step_row(shape, plan, step_s, key="the step"):
    floor = plan["the step"] / 1e3 * plan["MFU"] / 100 if plan else 0  # the model's FLOPs at the data sheet's rate
    return {"step_s": step_s, "floor_s": floor or "", "expected_s": plan[key] / 1e3 if plan else "",
            "tokens_per_s": shape[6] * shape[7] / step_s, "mfu": floor / step_s or "",
            "model_tflops_per_rank": floor * plan.get("% of", 0) / step_s or ""}


def tests(n, name, chapter, *words, **options):
    def rows(text):
        (cases, failed, count), = re.findall(r"test cases: +(\d+) .* (\d+) failed.*\n.*assertions: +(\d+)", text)
        note = "; ".join(sorted(set(re.findall(r"NOT TESTED: .*|skipped: .*", text))))
        yield {"status": "not tested" if count == "0" or re.search("no (usable )?GPU|no CUDA", note) else "ok",
               "cases": cases, "failed": failed, "assertions": count, "note": note}
    n.run(name, [f"test_0{chapter}", f"--source-file=*/0{chapter}_cuda*.cpp", *words], rows, limit=300, **options)


def ceilings(n, dtype):
    def rows(text):
        usual = USUAL.get(n.known, ("", "", "")) if dtype == "bf16" else (*USUAL.get(n.known, ("",))[:1], "", "")
        for cold, *values in LIMITS.findall(text):
            for i, quantity, unit in ((0, "copy", "GB/s"), (1, f"{dtype} product", "TFLOP/s")):
                yield {"quantity": quantity, "state": "cold" if cold else "warm", "value": values[i], "unit": unit,
                       "expected": usual[i if cold else 2 * i]}
    n.run(f"copy, {dtype} product", ["01_single_gpu", *words_of(SMALL), "--dtype", dtype, *BENCH[n.tiny]], rows)


def train(n, name, shape, flags="", program="01_single_gpu", ranks=1, simulated=0, steps=0, more="", reference=None,
          before=()):
    if rows := n.done(name):
        return rows
    words = [*words_of(shape), "--dtype", "bf16", *flags.split()]
    plan = n.expected(words, simulated or ranks)
    if (need := plan.get("peak memory", 0) * 1e9) > n.memory > 0:
        return n.record(name, "not run", [{}], f"needs {need / 1e9:.1f} GB, the card has {n.memory / 1e9:.1f}")

    def rows(_):
        steps = programs.events(n.file, "step")
        timed = sorted(steps[5:] or steps[1:], key=lambda step: step["step_s"])
        middle, key = timed[len(timed) // 2], "computation" if simulated else "the step"
        row = {"ranks": simulated or ranks, **step_row(shape, plan, middle["step_s"], key), "comm_s": middle["comm_s"],
               "peak_gib": max(step["memory"]["peak"]["total"] for step in steps) / 2**30,
               "expected_gib": need / 2**30 or "", "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"]}
        for key, used in {"device_gib": "used", "other_gib": "other"}.items() if "device_memory" in steps[-1] else ():
            row[key] = max(step["device_memory"][used] for step in steps) / 2**30
        if reference and reference[0].get("first_loss"):
            row["loss_difference"] = abs(row["first_loss"] / float(reference[0]["first_loss"]) - 1)
            if not row["loss_difference"] <= 2e-2:  # the bound of bf16 in tests/08_grid.cpp
                raise ValueError(f"first loss {row['first_loss']}, of one rank {reference[0]['first_loss']}")
        yield row
    return n.run(name, [program, *words, "--steps", steps or (2 if n.tiny else 15), *more.split()], rows, ranks,
                 before=before, file_flag="--metrics")


def ops(n, name, shape, flags="", wanted=""):
    words = [*words_of(shape), "--dtype", "bf16", *flags.split()]
    def rows(text):
        plan = n.expected(words)
        copy, product = (max(float(limit[i]) for limit in LIMITS.findall(text)) or float("inf") for i in (1, 2))
        for row in tables.read(n.file):
            ms, gflops, gbytes = (float(row[key] or 0) for key in ("ms", "gflops", "gbytes_per_s"))
            if row["op"].startswith(wanted):
                yield {**dict.fromkeys(("op", "calls", "ms", "floor_ms", "expected_ms")), **row,
                       "floor_ms": ms * max(gflops / 1e3 / product, gbytes / copy) or "",
                       "expected_ms": plan.get("the step" if row["op"] == "whole_step" else row["op"])}
    n.run(name, ["01_single_gpu", *words, *BENCH[n.tiny]], rows, file_flag="--bench-csv")


def attention(n, length, documents=""):
    shape = shape_of(n, 1, *SLICE[1:5], 256, length, 1)
    ops(n, f"{length} tokens" + ", documents" * bool(documents), shape, documents, "attention")


def torch(n):
    shape = shape_of(n, *SLICE)
    def rows(text):
        plan = n.expected([*words_of(shape), "--dtype", "bf16"])
        for each in map(json.loads, re.findall(r"(?m)^\{.*", text)):
            yield {**(step_row(shape, plan, each["step_s"]) if "form" in each else {}), **each}
    words = [*words_of(shape)[:14], "--attention", f"{shape[6]},{4 * shape[6]}"]
    n.run("PyTorch", ["docs/peer_torch_gpu.py", *words], rows, before=[sys.executable], limit=300)


def one_of(n, name, recompute, flags=MESH, world=64, rank=0, shape=LLAMA_70B):
    train(n, f"{name}, recompute {recompute}", shape_of(n, *shape), f"--recompute {recompute} {flags}", "08_3d_full",
          simulated=world, steps=4, more=f"--comm fake --fake-world {world} --fake-rank {rank}" * (world > 0))


def links(n):
    def rows(_):
        usual, text = n.cluster.get("nvlink", {}), n.file.read_text("utf-8")
        listed = [{"link": name, **link} for name, link in json.loads(text).items() if isinstance(link, dict)] \
            if text[0] == "{" else tables.read(n.file)
        for row in listed:
            yield {"bytes_per_s": row.pop("bus_bytes_per_s", None) or row["bytes_per_s"], "line_rate": n.link * 1e9,
                   "expected": usual.get("bytes_per_s"), "each_s": row.pop("seconds"), **row,
                   "expected_s": usual.get("seconds")}
    for ranks in sorted({2, n.ranks}) if n.ranks > 1 else ():
        n.run(f"all-reduce over {ranks}", ["test_measure", "all-reduce", "--largest-mb", 1 if n.tiny else 256], rows,
              ranks, 240, file_flag="--csv")
        words = [*words_of((*SMALL[:-1], ranks)), "--steps", 1, "--comm-timeout", 120]
        n.run(f"links of {ranks}", ["08_3d_full", *words], rows, ranks, file_flag="--probe-file")


def train_layouts(n, shape, backend, listed, before=()):
    reference = train(n, "one rank", shape)
    comm = f"--comm {backend}" + " --comm-timeout 120" * (n.device == "cuda")  # NCCL connects some ten groups
    for ranks, flags in listed:
        for name, streams in (("", ""), (", one stream", " --comm-streams one")):
            row, *_ = train(n, f"{backend} {ranks}: {flags}{name}", shape, flags, "08_3d_full", ranks, before=before,
                            more=comm + streams, reference=None if "fp8" in flags else reference)
            if row["status"] != "timeout" and "--comm-timeout" not in row["note"]:
                break  # else: do the groups wait for each other?


def layouts(n):
    N, listed = n.ranks, []
    axes = [(a, b, c) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) for c in (1, 2, 4, 8) if N % (a * b * c) == 0]
    for zero in (1, 3, 2, 0):
        for tp, pp, cp in sorted(axes, key=lambda a: (sum(x > 1 for x in a), a[::-1])):
            dp = N // (tp * pp * cp)
            stage, sequence = zero if dp * cp > 1 else 0, " --sequence-parallel on" * (tp > 1)
            listed.append(f"--dp {dp} --tp {tp} --pp {pp} --cp {cp} --zero {stage}{sequence}")
    X = N & -N  # the part of N that is a power of two; dp takes the rest
    listed += [f"--dp {N} --zero 3 --fp8 current", *(f"--dp {N // X} --{flags}" for flags in (
        f"tp {X} --tp-overlap on", f"tp {X} --fp8 blockwise", f"pp {X} --pipeline zero-bubble",
        f"pp {X} --pipeline gpipe", f"cp {X} --cp-algorithm ring", f"cp {X} --cp-algorithm ulysses",
        f"cp {X} --cp-algorithm gather") if X > 1)]
    if N > 1:
        shape = shape_of(n, *LAYOUT, N if n.tiny or 8 % N else 8)
        train_layouts(n, shape, "auto", [(N, flags) for flags in dict.fromkeys(listed)])


STEPS = {  # in order: what is measured, and how
    "kernels": ("01_cuda's cases of attention and products: kernels against the CPU", lambda n: tests(
        n, "attention, products", 1, f"--test-case={FIRST_CASES}", "--test-case-exclude=*beyond*")),
    "nccl": ("02_cuda, two ranks over NCCL: on two cards, or on one that counts as two hosts", lambda n: tests(
        n, "02_cuda", 2, ranks=2, before=() if n.gpus > 1 else AS_HOSTS)),
    "ceilings": ("a large copy and a large product, cold, and after seconds without a pause", lambda n: [
        ceilings(n, dtype) for dtype in ("bf16", "fp32")]),
    "slice": ("four layers of 8B in bf16, four micro-batches a step: the step, every op of it", lambda n: (
        train(n, "bf16, 4 micro-batches", shape_of(n, *SLICE[:7], 4)),
        n.device == "cuda" and train(n, "bf16, 4 micro-batches, autotuned", shape_of(n, *SLICE[:7], 4),
                                     more=f"--matmul-autotune {n.file}.matmul"),
        ops(n, "bf16, 4 micro-batches, ops", shape_of(n, *SLICE[:7], 4)))),
    "attention": ("attention and its gradient in a layer of 8B, 8,192 and 32,768 tokens", lambda n: [
        attention(n, length) for length in (8192, 32768)]),
    "fp8": ("three steps of the slice by each FP8 recipe", lambda n: [
        train(n, f"fp8 {each}", shape_of(n, *SLICE), f"--fp8 {each}", "07_fp8", steps=3, more="--tables off")
        for each in RECIPES]),
    "torch": ("the slice in PyTorch, eager and compiled, and its attention", torch),
    "tests_01": ("the other cases of 01_cuda", lambda n: (
        tests(n, "others", 1, f"--test-case-exclude={FIRST_CASES}"),
        tests(n, "long attention", 1, "--test-case=*beyond*attention*"))),
    "rank_70b": ("one rank of 64 of a 70B run, its peers simulated", lambda n: one_of(n, "first stage", "none")),
    "links": ("several GPUs: all-reduces of 1 KiB and more, bandwidth and latency of the links", links),
    "layouts": ("several GPUs: every mesh and ZeRO stage that they allow against one rank's loss", layouts),
    "tests": ("the CUDA tests of 03 to 08 on two ranks (08: four); on one card over NCCL where they end", lambda n: (
        [tests(n, f"0{i}_cuda", i, ranks=4 if i == 8 else 2) for i in range(3, 9)],
        [tests(n, f"0{i}_cuda, nccl", i, ranks=2, before=AS_HOSTS) for i in (3, 5, 7) if n.gpus < 2])),
    "ops": ("every op of the slice, of a layer of 70B, of experts; other lengths of attention, documents", lambda n: (
        ops(n, "8b slice, bf16", shape_of(n, *SLICE)), ops(n, "70b block, bf16", shape_of(n, *BLOCK)),
        ops(n, "experts, bf16", shape_of(n, *EXPERTS), "--experts 128 --top-k 8"),  # as Qwen3-30B-A3B's
        attention(n, 8192, "--document-token 10"), [attention(n, length) for length in (4096, 16384, 131072)])),
    "products": ("products in bf16 and by each FP8 recipe, with the casts", lambda n: [
        n.run(recipe, ["test_measure", "products", "--fp8", recipe], lambda text: [
            dict(zip(PRODUCT, row)) for row in re.findall(r"(?m)^ *(\d+)" + r" +([\d.]+)" * 6 + " x", text)])
        for recipe in RECIPES if not n.tiny]),
    "rank_slices": ("all of 8B; other ranks of 70B: recomputation, last stage, FP8, zero-bubble, ZeRO-3", lambda n: [
        one_of(n, *each) for each in RANKS]),
    "shared_card": ("two and four ranks on one card, through host memory, against one rank", lambda n: train_layouts(
        n, shape_of(n, *SHARED), "staged" if n.device == "cuda" else "mpi",
        [(2, "--dp 2 --zero 1"), (2, "--tp 2 --sequence-parallel on"), (2, "--pp 2"), (2, "--cp 2"),
         (4, "--dp 2 --tp 2 --zero 3"), (4, "--pp 2 --tp 2"), (4, "--cp 2 --dp 2 --zero 2")], ONE_CARD))}


def probed(options, checked, cmake):
    """What 01_single_gpu prints; it is built first if it is not there, does not start or has no CUDA."""
    words = [options.bin / "01_single_gpu", *words_of(SMALL), "--dtype", "bf16", "--steps", 0]
    code, text, _ = execute([*words, "--device", options.device], 120)
    if options.bin == ROOT / "build/bin" and (code == 127 or "this build has no CUDA" in text):
        build = ["bash", "tests/setup.sh", "build", "-DTRAIN70B_CUDA=ON", "-DCMAKE_CUDA_COMPILER=nvcc", *cmake]
        if lacking := [what for what, has, _ in checked if what in ("nvcc", "NCCL", "MPI") and not has]:
            text = f"{text.strip()}; it cannot be built without {' and '.join(lacking)}"
        elif subprocess.call(build, env=programs.ENVIRONMENT) == 0:
            code, text, _ = execute([*words, "--device", options.device], 120)
    if code != 0:
        print(f"measure_node: {last_lines(text)}", file=sys.stderr)
        sys.exit(2)
    return text


def main():
    about = "\n    ".join([f"{__doc__}\nSteps:", *(f"{step:12} {what}" for step, (what, _) in STEPS.items())])
    parser = argparse.ArgumentParser(prog="bash docs/measure_node.sh", description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="check: only what is here; default: all")
    parser.add_argument("--minutes", type=float, help="end within so many minutes, building included")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSVs [docs/results/gpu; without a GPU out/gpu]")
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/bin", help="programs, also built elsewhere")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this out")
    options = parser.parse_args()
    if unknown := set(options.steps) - {"check", *STEPS}:
        parser.error(f"{', '.join(unknown)}: the steps are {', '.join(STEPS)}, and check")
    options.bin, options.out = options.bin.resolve(), options.out and options.out.resolve()
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for variable in [each for each in programs.ENVIRONMENT if re.match("SLURM|PMI", each)]:
        del programs.ENVIRONMENT[variable]  # mpirun starts its ranks here, as from a plain shell
    programs.ENVIRONMENT |= {"OMPI_MCA_plm": "isolated", "OMPI_MCA_ess_singleton_isolated": "1"}
    checked, memory, link, cmake = look()
    print(*(f"{what:7} {has or 'not found'}" + f": {do}" * bool(do) for what, has, do in checked), sep="\n", flush=True)
    if options.steps == ["check"]:
        return 0
    device = re.search(r" on cuda \((.*), (\d+) visible\)", probed(options, checked, cmake))
    name, gpus = (device[1], int(device[2])) if device else (programs.hardware(), 0)
    tiny = not device or "emulated" in name
    known = "".join(re.findall(r"\b(?:A100|H100|H200|B200)\b", name)[:1]) or "H100" * tiny
    clusters = sorted(pathlib.Path("08_3d_full/plan/clusters").glob(f"{known.lower()}-8*.json")) if known else []
    options.out = options.out or ROOT / ("out/gpu" if tiny else "docs/results/gpu")
    n = Node(options, hardware=f"{gpus} x {name}" if device else name, driver=checked[0][1].split(",")[0], gpus=gpus,
             ranks=min(gpus or 2, 8), memory=memory, link=link, tiny=tiny, known=known,
             commit=execute([options.bin / "01_single_gpu", "--version"], 60)[1].split()[-1],
             cluster=json.loads(clusters[0].read_text("utf-8")) if clusters else {})
    print(f"{n.hardware}, commit {n.commit}: results in {n.out}", flush=True)
    n.out.mkdir(parents=True, exist_ok=True)
    try:
        n.begin("check")
        n.record("check", "ok", [dict(zip(("what", "found", "advice"), each)) for each in checked])
        for step in [step for step in STEPS if step in (n.steps or STEPS)]:
            n.begin(step)
            STEPS[step][1](n)
            if n.hardware not in [row["hardware"] for row in n.rows]:
                n.record("all", "not run", [{}], f"not here: {STEPS[step][0]}")
    except TimeoutError as over:
        print(f"the time is over at {over}; the same command goes on from there")
    bad = [": ".join((*run, status)) for run, status in n.statuses.items() if status in ("failed", "timeout")]
    print("\n".join(bad) or "no run failed")
    return 1 if bad else 0


if __name__ == "__main__":
    programs.start(main)
