"""Chapter 03: what each stage of ZeRO keeps and sends."""
import re

from measure import ONE_RANK, beside, four_steps, show

PROGRAM = "03_zero"
STAGES = (0, 1, 2, 3)


def states(runs):
    rows = []
    for model, devices in (("7b", 4), ("70b", 16), ("70b", 64)):
        def on(stage, offload="none"):
            return runs.booked(f"--model {model} --fake-world {devices} --zero {stage} --offload {offload} "
                               f"--dtype bf16 --recompute full --seq-len 512 --global-batch {devices} --micro-batch 1")
        kept = [on(stage) for stage in STAGES]
        rows.append([f"{model.upper()} on {devices}",
                     *(f"{sum(each[kind] for kind in ('params', 'grads', 'optimizer')) / 1e9:.1f}" for each in kept),
                     f"0 (host {on(3, 'all')['host'] / 1e9:.1f})"])
    rows.append(["formula, bytes per parameter", "18", "6 + 12/N", "2 + 16/N", "18/N", "0 (host: 18/N)"])
    show(["", "stage 0", "stage 1", "stage 2", "stage 3", "3, `--offload all`"], rows)


def stages(runs):
    flags = [*(f"--zero {stage}" for stage in STAGES), "--zero 3 --offload optimizer", "--zero 3 --offload all",
             "--zero 3 --hybrid-shard 2"]
    four_steps(runs, ["params", "grads", "optimizer", "workspace", "host", "sent per step"],
               [ONE_RANK, *((f"`{each}`", 4, PROGRAM, each) for each in flags)],
               lambda run: [*run.peaks("params", "grads", "optimizer", "workspace", "host"), run.sent()])


def wire(runs):
    rows = []
    for stage in STAGES:
        told = [runs.run(4, PROGRAM, f"--steps 1 --zero {stage} --micro-batch {size}").row("bytes that a rank")
                for size in (4, 2, 1)]
        rows.append([told[0][0], *(beside(measured, formula) for _, _, measured, formula, *_ in told), told[0][4]])
    show(["bytes sent per step", "m = 1", "m = 2", "m = 4", "formula × 3/4"], rows, "-:::-")


def prefetch(runs):
    rows = []
    for ahead in (0, 1, 2):
        run = runs.run(4, PROGRAM, f"--steps 2 --prefetch {ahead}")
        rows.append([ahead, run.row("bytes that a rank")[-1].split()[0], *run.peaks("workspace")])
    show(["`--prefetch`", "units unsharded at once", "workspace"], rows, ":::")


def muon(runs):
    rows = []
    for name in ("adamw", "muon"):
        one = runs.run(1, "01_single_gpu", f"--optimizer {name} --steps 1000 --eval-every 1000")
        several = [runs.run(4, "08_3d_full", f"--optimizer {name} --steps 2 --tables off --zero 1 {tp}".strip())
                   for tp in ("", "--tp 2")]
        sent = [run.sent("matrices.all_to_all") for run in several]
        rows.append([f"`{name}`", *(f"{one.steps[step - 1]['loss']:.4f}" for step in (100, 300, 1000)),
                     re.search(r"validation loss ([\d.]+)", one.text)[1], *one.peaks("optimizer"), *sent])
    show(["", "loss at step 100", "300", "1,000", "validation", "states", "sent, dp 4", "tp 2 × dp 2"], rows)


PRINTED = {"03_states": states, "03_stages": stages, "03_wire": wire, "03_prefetch": prefetch, "03_muon": muon}
