"""Chapter 07: what 8 bits save in memory and on the wire, and what recipes do to the loss."""
import bisect
import statistics

from measure import beside, show

PROGRAM = "07_fp8"
PRECISIONS = {"fp32 gradients, AdamW": "fp32", "bf16 gradients": "bf16",
              "bf16 gradients, `adamw8bit`": "bf16 --optimizer adamw8bit",
              "and FP8": "bf16 --optimizer adamw8bit --fp8 current",
              "and the optimizer offloaded": "bf16 --optimizer adamw8bit --fp8 current --offload optimizer"}
DEVICE = 80  # GB
RECIPES = "current", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", "int8"


def large_model(runs):
    kinds = ["params", "grads", "optimizer", "workspace", "activations", "total", "host"]
    rows = []
    for name, flags in PRECISIONS.items():
        def on(devices):
            return runs.booked(f"--dtype bf16 --micro-batch 1 --model 70b --zero 3 --recompute full --seq-len 4096 "
                               f"--fake-world {devices} --global-batch {devices} --grad-dtype {flags}")
        needed = 1 + bisect.bisect_left(range(1, 64), True, key=lambda devices: on(devices)["total"] <= DEVICE * 1e9)
        peak = on(8)
        rows.append([name, *(f"{peak.get(kind, 0) / 1e9:.1f}" for kind in kinds), needed])
    show(["", *kinds, "devices needed"], rows)


def by_step(runs, program, common, variants, file, value):
    """A column for each variant, {name: flags}: value(step)."""
    columns = []
    for name, chosen in variants.items():
        own = file.format(name.replace(",", "").replace(" ", "_"))
        steps = runs.steps(1, program, f"{common} {chosen}".split(), own)
        columns.append([name, *map(value, steps)])
    return list(zip(["step", *range(1, len(columns[0]))], *columns))


def fp8_loss(runs):
    """training losses of bf16, of every recipe, of 8-bit moments and of bf16 with other seeds"""
    flags = {"bf16": "off", **{name: name for name in RECIPES},
             "bf16, adamw8bit": "off --optimizer adamw8bit", "current, adamw8bit": "current --optimizer adamw8bit",
             **{f"bf16, seed {seed}": f"off --seed {seed}" for seed in range(2, 6)}}
    return by_step(runs, PROGRAM, "--dtype bf16 --lr 1e-3 --steps 300 --tables off --fp8", flags, "{}.jsonl",
                   lambda step: step["loss"])


def recipes(runs):
    names, *rows = fp8_loss(runs)
    _, first, *others = zip(*rows)
    shown = [[names[1], f"{statistics.mean(first[-10:]):.4f}", "", ""]]
    for name, losses in zip(names[2:], others):
        distance = [a - b for a, b in zip(losses, first)]
        shown.append([name, f"{statistics.mean(losses[-10:]):.4f}", f"{statistics.mean(distance[-10:]):+.3f}",
                      f"{max(map(abs, distance)):.3f}"])
    show(["", "mean of the last ten losses", "difference from the first row", "largest difference at any step"], shown)


def precisions(runs):
    rows = []
    for flags in ("--fp8 off", "--fp8 off --optimizer adamw8bit", *(f"--fp8 {name}" for name in RECIPES)):
        run = runs.run(1, PROGRAM, f"--dtype bf16 --steps 2 {flags}")
        measured, (states, activations) = run.row("bytes of rank 0"), run.row("bytes of rank 0", 1)
        rows.append([measured[0], *measured[1:3], *map(beside, measured[3:5], (states, activations))])
    show(["", "params", "grads", "optimizer", "activations"], rows)


def wire(runs):
    rows = []
    for recipe in ("off", "current"):
        run = runs.run(2, PROGRAM, f"--steps 2 --zero 3 --dtype bf16 --tables off --fp8 {recipe}")
        sent = [run.sent(f"dp.{name}") for name in ("all_gather", "reduce_scatter", "all_reduce")]
        rows.append([f"`{recipe}`", *sent, f"{run.last['loss']:.2f}"])
    show(["", "dp.all_gather", "dp.reduce_scatter", "dp.all_reduce", "loss at step 2"], rows)


PRINTED = {"07_memory": large_model, "07_recipes": recipes, "07_precisions": precisions, "07_wire": wire}
