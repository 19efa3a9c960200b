"""For measure.py: bytes of one rank of large models at the peak of a step, booked by chapter 08's dry run."""
import bisect
import re
import subprocess


def booked(runs, flags):
    """GB of each kind at its own peak; "total": at the peak of their sum."""
    command = f"--comm fake --fake-rank 0 --dry-run --dtype bf16 --micro-batch 1 {flags}".split()
    run = subprocess.run([runs.programs / "08_3d_full", *command], check=True, stdout=subprocess.PIPE, text=True)
    table = run.stdout[run.stdout.index("rank 0: bytes"):]
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
