"""For measure.py: tables that are printed: README.md's, and the memory of large models by chapter 08's dry run."""
import bisect
import pathlib
import re

import programs
from style import ON_DEVICE as KINDS


def booked(runs, flags):
    """GB of each kind at its own peak; "total": at the peak of their sum."""
    command = f"--comm fake --fake-rank 0 --dry-run --dtype bf16 --micro-batch 1 {flags}".split()
    text = programs.output([runs.programs / "08_3d_full", *command])
    table = text[text.index("rank 0: bytes"):]
    return {kind: int(count) / 1e9 for kind, count in re.findall(r"^(\w+) +(\d+)", table, re.M)}


LENGTHS = [("8b", 4096, 1), ("8b", 131072, 1), ("8b", 131072, 8), ("8b", 262144, 8), ("8b", 1048576, 32),
           ("8b", 1048576, 128), ("70b", 131072, 8), ("70b", 131072, 32), ("70b", 1048576, 128)]


def lengths(runs):
    """chapter 06: one sequence on so many context-parallel ranks"""
    text = runs.folder / "text.txt"
    text.write_text("text " * 300000)  # more tokens than the longest sequence
    print("one sequence, zigzag: GB of one rank beside parameters, gradients and optimizer states\n"
          "        tokens  ranks  no recomputation  full recomputation")
    for model, tokens, ranks in LENGTHS:
        peaks = []
        for recompute in ("none", "full"):
            run = booked(runs, f"--model {model} --fake-world {ranks} --cp {ranks} --seq-len {tokens} --global-batch 1 "
                               f"--recompute {recompute} --data {text}")
            peaks.append(run["total"] - run["params"] - run["grads"] - run["optimizer"])
        print(f"{model:<4}{tokens:>10}{ranks:>7}{peaks[0]:>18.1f}{peaks[1]:>20.1f}")


PRECISIONS = {"fp32 gradients, AdamW": "fp32", "bf16 gradients": "bf16",
              "bf16 gradients, adamw8bit": "bf16 --optimizer adamw8bit",
              "and FP8": "bf16 --optimizer adamw8bit --fp8 current",
              "and the optimizer offloaded": "bf16 --optimizer adamw8bit --fp8 current --offload optimizer"}
DEVICE = 80  # GB


def large_model(runs):
    """chapter 07: 70B on eight devices, and how many would be needed"""
    kinds = ["params", "grads", "optimizer", "workspace", "activations", "total", "host"]
    print("70b on 8 devices, ZeRO-3, a sequence of 4096 on each, full recomputation: GB of one device\n"
          f"{'':<28}{''.join(f'{kind:>13}' for kind in kinds)}  devices of {DEVICE} GB needed")
    for name, flags in PRECISIONS.items():
        def on(devices):
            return booked(runs, f"--model 70b --zero 3 --recompute full --seq-len 4096 --fake-world {devices} "
                                f"--global-batch {devices} --grad-dtype {flags}")
        needed = 1 + bisect.bisect_left(range(1, 64), True, key=lambda devices: on(devices)["total"] <= DEVICE)
        peak = on(8)
        print(f"{name:<28}{''.join(f'{peak.get(kind, 0):>13.1f}' for kind in kinds)}{needed:>18}", flush=True)


# Technique, ranks, the file to read, flags. In fp64: 50 steps do not amplify its rounding to a digit that is printed.
FRONT = [
    ("one device", 1, "01_single_gpu/", ""),
    ("data parallel", 2, "02_data_parallel/", "--tables off"),
    ("ZeRO-3", 2, "03_zero/", "--zero 3 --tables off"),
    ("tensor parallel", 2, "04_tensor_parallel/", "--tp 2 --tables off"),
    ("pipeline", 2, "05_pipeline/", "--pp 2 --tables off"),
    ("context parallel", 2, "06_context_parallel/", "--cp 2 --tables off"),
    ("FP8", 1, "07_fp8/", "--dtype bf16 --fp8 current --optimizer adamw8bit --tables off"),
    ("all of 02 to 06", 8, "08_3d_full/", "--tp 2 --cp 2 --pp 2 --zero 1 --sequence-parallel on"),
]


def front(runs):
    """README.md's table"""
    print(f"{'':<17}{'':>5}{'lines of':>14}{'loss at step':>18}{'rank 0: MiB of':>20}{'MB':>11}\n"
          f"{'chapter':<17}ranks{'minimal':>14}{'1':>9}{'50':>12}{'param':>8}{'grad':>6}{'optim':>6}{'activ':>6}"
          f"{'sent':>6}")
    for technique, ranks, folder, flags in FRONT:
        program, fp64 = folder[:-1], "--dtype" not in flags
        flags = f"{flags} --layers 2 --seq-len 64 --global-batch 4 --steps 50".split() + ["--dtype", "fp64"] * fp64
        steps = runs.steps(ranks, program, flags, "front.jsonl")
        # In 8 bits the second decimal differs between CPUs.
        losses = "".join(f"{steps[i]['loss']:12.7f}" if fp64 else f"{steps[i]['loss']:6.1f}{'':6}" for i in (0, -1))
        memory = "".join(f"{steps[-1]['memory']['peak'][kind] / 2**20:6.1f}" for kind in KINDS[:4])
        lines = sum(path.read_text().count("\n") for path in pathlib.Path(folder).glob("minimal.*"))
        print(f"{program[:2]} {technique:<16}{ranks:>3}{lines:>14}{losses}{memory}"
              f"{sum(steps[-1]['comm_bytes'].values()) / 1e6:6.1f}", flush=True)
        (runs.folder / "front.jsonl").unlink()
