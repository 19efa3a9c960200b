"""Chapter 04: what each layout of tensor parallelism keeps and sends."""
from measure import ONE_RANK, four_steps, show

PROGRAM = "04_tensor_parallel"
SEQUENCE, OVERLAP = " --sequence-parallel on", " --tp-overlap on"


def layouts(runs):
    flags = [(f"--tp {n}{sequence}", n) for n in (2, 4, 8) for sequence in ("", SEQUENCE)]
    flags += [(f"--tp 8{SEQUENCE}{OVERLAP}", 8), ("--tp 2 --dp 4", 8)]
    four_steps(runs, ["params", "grads", "optimizer", "activations", "comm"],
               [ONE_RANK, *((f"`{each}`", n, PROGRAM, each) for each, n in flags)],
               lambda run: run.peaks("params", "grads", "optimizer", "activations", "comm"))


def wire(runs):
    flags = [f"--tp {n}{sequence}" for n in (2, 4, 8) for sequence in ("", SEQUENCE)] + [f"--tp 8{SEQUENCE}{OVERLAP}"]
    rows = [runs.run(int(each.split()[1]), PROGRAM, f"--steps 1 {each}").row("bytes that a rank sends")
            for each in flags]
    show(["bytes sent", "a block, by formula", "a step", "formula", "a block's collectives"], rows, "-:::-")


PRINTED = {"04_layouts": layouts, "04_wire": wire}
