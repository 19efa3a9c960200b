#!/usr/bin/env python3
"""The arithmetic of docs/claims.md: every figure from the shapes of the models, from bits, or from a small simulation.
Nothing of the programs is used, so that their output and these lines are two derivations.

    python3 docs/claims.py            all rows
    python3 docs/claims.py M2 P1      these rows
    python3 docs/claims.py --lost DIR DIR      weights of two steps: which updates would bf16 master weights lose?

A line: row, what, value, how.
"""
import argparse
import array
import json
import math
import pathlib
import struct
import sys

from claims_models import (A100, BF16, CARD, DAY, FP32, GB, H100, LLAMA_70B, LLAMA_7B, LLAMA_8B, MASTER, MOMENTS,
                           NVLINK, ROWS, SUSTAINED, TFLOPS, idle, order, row, simulate)

# ---- memory ----------------------------------------------------------------------------------------------------------

@row("M1")
def bytes_per_parameter():
    yield "bf16 gradients", BF16 + BF16 + MASTER + MOMENTS, "weight 2 + gradient 2 + master 4 + moments 4 + 4"
    yield "fp32 gradients", BF16 + FP32 + MASTER + MOMENTS, "weight 2 + gradient 4 + master 4 + moments 4 + 4"


@row("M2")
def memory_7b():
    states = 16 * LLAMA_7B.parameters()
    yield "states", states / GB, "16 bytes x 6.74e9"
    yield "total", (states + LLAMA_7B.activations(2048)) / GB, "and one sequence of 2,048: blocks, logits"
    yield "fp32 gradients", (states + 2 * LLAMA_7B.parameters() + LLAMA_7B.activations(4096)) / GB, \
        "18 bytes, one sequence of 4,096"


@row("M3")
def memory_70b():
    yield "16 bytes", 16 * LLAMA_70B.parameters() / GB, "16 bytes x 70.55e9"
    yield "18 bytes", 18 * LLAMA_70B.parameters() / GB, "18 bytes x 70.55e9"


@row("M4")
def memory_70b_12():
    yield "states", (MASTER + MOMENTS) * LLAMA_70B.parameters() / GB, "4 + 8 bytes x 70.55e9: master weights, moments"
    yield "no masters", (BF16 + BF16 + MOMENTS) * LLAMA_70B.parameters() / GB, \
        "2 + 2 + 8 bytes: weights, gradients, moments"


@row("M5")
def memory_70b_small():
    n = LLAMA_70B.parameters()
    yield "all bf16", (BF16 + BF16 + 2 * BF16) * n / GB, "2 + 2 + 4 bytes: everything in bf16, no masters"
    yield "8-bit moments", (BF16 + BF16 + MASTER + 2 * (1 + FP32 / 256)) * n / GB, \
        "2 + 2 + 4 + 2 x (1 + 4/256): one fp32 scale per 256 values"


@row("M6")
def moments_7b():
    yield "fp32", FP32 * LLAMA_7B.parameters() / GB, "4 bytes x 6.74e9, each of two"
    yield "bf16", BF16 * LLAMA_7B.parameters() / GB, "2 bytes x 6.74e9, each of two"


@row("M7")
def zero_stages():
    n, ranks = LLAMA_7B.parameters() / GB, 4
    for name, states in (("12 bytes", MOMENTS), ("16 bytes", MASTER + MOMENTS)):
        for stage in range(4):
            shares = [BF16 / (ranks if stage >= 3 else 1), BF16 / (ranks if stage >= 2 else 1),
                      states / (ranks if stage >= 1 else 1)]
            yield f"{name} stage {stage}", n * sum(shares), \
                " + ".join(f"{share:g}" for share in shares) + " bytes x 6.74e9"


@row("M8")
def zero3_16():
    n = LLAMA_70B.parameters() / 16 / GB
    yield "params", BF16 * n, "2 bytes x 70.55e9 / 16"
    yield "grads", BF16 * n, "2 bytes x 70.55e9 / 16"
    yield "optimizer", (MASTER + MOMENTS) * n, "12 bytes x 70.55e9 / 16"


@row("M9")
def fp8_weights():
    matrices = LLAMA_70B.layers * LLAMA_70B.block_matrices()
    others = LLAMA_70B.parameters() - matrices
    yield "weights", (matrices + BF16 * others) / GB, "1 byte x the blocks' matrices + 2 bytes x embedding, head, norms"
    yield "everything in 8 bits", LLAMA_70B.parameters() / GB, "1 byte x 70.55e9"


@row("M10")
def fp8_gradients():
    yield "fp32", FP32 * LLAMA_70B.parameters() / GB, "4 bytes x 70.55e9, in FP8 runs too"


@row("M11")
def eight_devices():
    n = LLAMA_70B.parameters() / 8 / GB
    yield "no masters", (BF16 + BF16 + 2 * (1 + FP32 / 256)) * n, "2 + 2 + 2.03 bytes x 70.55e9 / 8"


@row("M12")
def context_262k():
    local = 262144 // 8
    yield "none", LLAMA_8B.activations(local) / GB, "8B, 262,144 / 8 tokens of a rank: blocks, logits"
    yield "inputs", local * LLAMA_8B.layers * BF16 * LLAMA_8B.hidden / GB, "only the blocks' inputs"


@row("M13")
def gpt2_formula():
    L, h, v = LLAMA_70B.layers, LLAMA_70B.hidden, LLAMA_70B.vocab
    yield "formula", (h * v + L * (12 * h * h + 13 * h) + 2 * h) / 1e9, \
        "h v + L (12 h^2 + 13 h) + 2 h: GPT's blocks, tied head"
    yield "count", LLAMA_70B.parameters() / 1e9, "sum over all tensors"


@row("M14")
def recompute_memory():
    yield "block", LLAMA_7B.kept_per_token() / (BF16 * LLAMA_7B.hidden), "bytes kept by a block / bytes of its input"


@row("M15")
def recompute_growth():
    yield "per block", BF16 * 4096 * LLAMA_7B.hidden / 1e6, "MB: the input of one block, 4,096 tokens x 4,096 x 2 bytes"
    yield "square root", (8 - math.sqrt(32)) / (math.sqrt(32) - 4), \
        "growth from 32 to 64 blocks / from 16 to 32, if O(sqrt L)"


# ---- communication ---------------------------------------------------------------------------------------------------

def ring(ranks):
    """Sends of one rank in a ring all-reduce of one value per rank and segment, which must end with the sums."""
    values = [[rank + segment for segment in range(ranks)] for rank in range(ranks)]
    sent = 0
    for step in range(2 * (ranks - 1)):
        messages = []
        for rank in range(ranks):
            segment = (rank - step) % ranks if step < ranks - 1 else (rank + 1 - (step - ranks + 1)) % ranks
            messages.append(((rank + 1) % ranks, segment, values[rank][segment]))
        for to, segment, value in messages:
            values[to][segment] = values[to][segment] + value if step < ranks - 1 else value
        sent += 1
    assert all(each == [sum(r + s for r in range(ranks)) for s in range(ranks)] for each in values)
    return sent / ranks  # segments of n / ranks


@row("C1")
def all_reduce():
    for ranks in (4, 64):
        yield f"{ranks} ranks", ring(ranks), "a ring, step by step: segments sent by a rank / segments of the array"


def speedup(model, tokens, bandwidth):
    """Of 8 ranks over one, if no communication is hidden."""
    compute = model.flops(8192) * tokens / SUSTAINED
    return 8 * compute / (compute + ring(8) * FP32 * model.parameters() / bandwidth)


@row("C2")
def eight_gpus():
    compute, wait = LLAMA_8B.flops(8192) / SUSTAINED, ring(8) * FP32 * LLAMA_8B.parameters() / NVLINK
    tokens = 15 * wait / compute
    yield "exposed share", 100 * (1 - 7.5 / 8), "%: 1 - 7.5 / 8"
    yield "8192 tokens", speedup(LLAMA_8B, 8192, NVLINK), "8B, fp32 gradients, 370 GB/s, 600 TFLOP/s, nothing hidden"
    yield "tokens", tokens, "tokens per GPU and step from which it is 7.5: compute = 15 x communication"
    yield "speedup", speedup(LLAMA_8B, tokens, NVLINK), "with that many tokens"
    yield "one card", speedup(LLAMA_8B, 8192, CARD), "45 GB/s: one network card per GPU and one GPU per node"


@row("C3")
def zero3_traffic():
    for name, params, grads in (("equal dtypes", FP32, FP32), ("bf16 parameters", BF16, FP32)):
        yield name, (2 * params + grads) / (2 * grads), \
            "(gather + gather + reduce-scatter) / (all-reduce = 2 gradients)"
    yield "two micro-batches", 2 * (2 * FP32 + FP32) / (2 * FP32), "all three again for each micro-batch"


@row("C4")
def tensor_parallel():
    for ranks in (2, 4, 8):
        yield f"{ranks} ranks", 4 * ring(ranks), "4 all-reduces of B T h elements, around a ring"


@row("C6")
def links():
    yield "NVLink 3", 12 * 4 * 50 / 8, "GB/s, one direction: 12 links x 4 lanes x 50 Gb/s"
    yield "NVLink 4", 18 * 2 * 100 / 8, "GB/s, one direction: 18 links x 2 lanes x 100 Gb/s"
    yield "PCIe 4", 16 * 16 * 128 / 130 / 8, "GB/s, one direction: 16 lanes x 16 GT/s x 128/130"
    yield "PCIe 5", 16 * 32 * 128 / 130 / 8, "GB/s, one direction: 16 lanes x 32 GT/s x 128/130"


@row("C7")
def zero3_shares():
    yield "share", 1 / 4, "of every layer's parameters on each of 4 ranks"


@row("P1")
def naive_pipeline():
    yield "idle", idle("naive", 4, 16), "%: simulated, 4 stages, one micro-batch at a time"


@row("P2")
def bubble():
    time = simulate("1f1b", 4, 16)[0]
    yield "of the step", 100 * (time - 48) / time, "%: simulated, 4 stages, 16 micro-batches: 9 of 57"
    yield "of the ideal time", 100 * (time - 48) / 48, "%: 9 of 48"


@row("P3")
def in_flight():
    yield "ratio", simulate("gpipe", 4, 16)[1] / simulate("1f1b", 4, 16)[1], \
        "micro-batches in flight on rank 0: GPipe / 1F1B"


@row("P4")
def micro_batches():
    yield "4 stages", idle("1f1b", 4, 16), "%: simulated, m = 4 p"
    yield "8 stages", idle("1f1b", 8, 32), "%: simulated, m = 4 p"
    yield "64 stages", idle("1f1b", 64, 256), "%: simulated, m = 4 p"
    yield "limit", 100 / 5, "%: (p - 1) / (4 p + p - 1) for large p"


@row("P5")
def order_of_rank_0():
    for name in ("1f1b", "gpipe"):
        letters = [letter for letter, _ in order(name, 4, 16, 0)]
        yield name, letters.index("B"), "forward passes of rank 0 before its first backward pass"


@row("P6")
def zero_bubble():
    yield "ZB-H1", 100 * 3 / (3 * 16 + 3), "%: (p - 1) (F + I - W) = 3 of 51, with F = I = W"


# ---- precision -------------------------------------------------------------------------------------------------------

def decode(code, exponent_bits, mantissa_bits, has_infinity):
    """Value of an 8-bit code without its sign; None: infinity or NaN."""
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    if exponent == top and (has_infinity or mantissa == (1 << mantissa_bits) - 1):
        return None
    fraction = mantissa / (1 << mantissa_bits)
    return (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)


@row("F1")
def fp8_range():
    for name, bits in (("E4M3", (4, 3, False)), ("E5M2", (5, 2, True))):
        values = [decode(code, *bits) for code in range(128)]
        yield name, max(value for value in values if value is not None), "largest of its 128 codes"


def bf16(x):
    """To nearest, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def fp32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


@row("F2")
def master_weights():
    for name, weight, update in (("norm weight", 1.0, 3e-4), ("weight late", 0.02, 3e-5)):
        for kind, rounded in (("bf16", bf16), ("fp32", fp32)):
            value = rounded(weight)
            for _ in range(500):
                value = rounded(value - update)
            yield f"{name} {kind}", value, f"{weight:g} after 500 updates of {update:g}"


@row("F3")
def fp8_speed():
    share = 6 * LLAMA_70B.layers * LLAMA_70B.block_matrices() / LLAMA_70B.flops(8192)
    yield "share", 100 * share, "% of the FLOPs: the blocks' products; 70B at 8,192 tokens"
    yield "speed", 1 / (1 - share + share / 2), "times, if these take half the time"


# ---- compute and cost ------------------------------------------------------------------------------------------------

TOKENS = 1.5e12


@row("T1")
def total_flops():
    yield "6 P T", 6 * LLAMA_70B.parameters() * TOKENS / 1e23, "10^23: 6 x 70.55e9 x 1.5e12"
    yield "with attention", LLAMA_70B.flops(8192) * TOKENS / 1e23, \
        "10^23: without the input embedding, with attention over 8,192 tokens"


def seconds(rate):
    return 6 * 70e9 * TOKENS / rate


@row("T2")
def gpu_seconds():
    yield "A100 at 40%", seconds(0.4 * A100) / 1e9, "10^9 GPU-seconds: 6.3e23 / (40% of 312 TFLOP/s)"
    yield "H100 at 40%", seconds(0.4 * H100) / 1e9, "10^9 GPU-seconds: 6.3e23 / (40% of 989 TFLOP/s)"
    yield "rate", 6 * 70e9 * TOKENS / 3.5e9 / TFLOPS, "TFLOP/s that 3.5e9 GPU-seconds need"
    yield "of A100", 100 * 6 * 70e9 * TOKENS / 3.5e9 / A100, "% of 312 TFLOP/s"
    yield "of 3.5 million", 6 * 70e9 * TOKENS / 3.5e6 / H100, "times an H100's peak that 3.5e6 GPU-seconds need"


@row("T3")
def days_and_dollars():
    sustained = seconds(400 * TFLOPS)
    yield "seconds", sustained / 1e9, "10^9 GPU-seconds at 400 TFLOP/s sustained"
    yield "days", sustained / 1024 / DAY, "on 1,024 GPUs"
    yield "dollars", sustained / 3600 * 4 / 1e6, "million, at 4 dollars per GPU and hour"
    yield "days of 3.5e9", 3.5e9 / 1024 / DAY, "on 1,024 GPUs"
    yield "dollars of 3.5e9", 3.5e9 / 3600 * 4 / 1e6, "million, at 4 dollars per GPU and hour"


@row("T4")
def samples_per_second():
    work = 6 * LLAMA_70B.parameters() * 4096
    for name, samples, gpus, peak in (("8 A100", 2.5, 8, A100), ("16 A100", 4.8, 16, A100), ("8 H100", 5.2, 8, H100)):
        yield name, 100 * samples * work / (gpus * peak), "% of peak: samples/s x 6 P x 4,096 / (GPUs x peak)"
        yield f"{name} at most", gpus * peak / work, "samples/s at 100% of peak"


@row("T5")
def million_tokens():
    yield "ranks", 8 * 4 * 8, "8 x 4 x 8"


@row("T6")
def recompute_flops():
    for name, model, tokens in (("7B", LLAMA_7B, 4096), ("70B", LLAMA_70B, 8192)):
        again = 2 * model.layers * model.block_matrices() + model.attention_flops(tokens)
        yield name, 100 * again / model.flops(tokens), f"%: every block's forward pass again, {tokens:,} tokens"


# ---- two steps of a run ----------------------------------------------------------------------------------------------

def weights(folder):
    """{name: fp32 values} of a model that --save-hf has written."""
    data = pathlib.Path(folder, "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            if entry["dtype"] != "F32":
                raise ValueError(f"{name} is {entry['dtype']}: only fp32 weights are masters")
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = array.array("f", data[begin:end])
    return found


def lost(before, after):
    """The share of updates between two steps that a bf16 master weight would not have taken."""
    old, new = weights(before), weights(after)
    for kind in ("matrices", "norms"):
        names = [name for name in old if ("norm" in name) == (kind == "norms")]
        updates = [(a, b - a) for name in names for a, b in zip(old[name], new[name], strict=True) if a != b]
        same = sum(bf16(bf16(weight) + update) == bf16(weight) for weight, update in updates)
        yield kind, 100 * same / len(updates), f"% of {len(updates):,} updates leave a bf16 weight as it was"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)} [default: all]")
    parser.add_argument("--lost", nargs=2, metavar="DIR",
                        help="models of two steps (--save-hf): which updates would bf16 master weights lose?")
    arguments = parser.parse_args()
    if arguments.lost:
        try:
            for what, value, how in lost(*arguments.lost):
                print(f"lost  {what}  {value:.10g}  {how}")
        except (OSError, ValueError) as error:
            print(f"claims.py: --lost {' '.join(arguments.lost)}: {error}", file=sys.stderr)
            return 2
        return 0
    for name in arguments.rows:
        if name not in ROWS:
            print(f"claims.py: there is no row {name} with arithmetic (try one of {', '.join(ROWS)})", file=sys.stderr)
            return 2
    for name in arguments.rows or ROWS:
        for what, value, how in ROWS[name]():
            print(f"{name}  {what}  {value:.10g}  {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
