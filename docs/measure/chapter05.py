"""Chapter 05: every schedule on four stages; the bubble by formula, as simulated and as measured."""
from measure import four_steps, show

PROGRAM = "05_pipeline"
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")


def of_ranks(runs, flags, *kinds):
    """Bytes on each of four stages, by dry runs: in a real one a few messages more may be in flight."""
    common = "--fake-world 4 --pp 4 --layers 8 --global-batch 16 --micro-batch 1"
    booked = [runs.booked(f"{common} --fake-rank {rank} {flags}") for rank in range(4)]
    return [" · ".join(f"{each[kind]:,}" for each in booked) for kind in kinds]


def schedules(runs):
    rows = [("one rank, `--micro-batch 1`", 1, "01_single_gpu", "--layers 8 --micro-batch 1")]
    rows += [(f"`{name}`", 4, PROGRAM, f"--layers 8 --pipeline {name}") for name in SCHEDULES]
    kept = [["–", "–"], *(of_ranks(runs, f"--pipeline {name}", "params", "activations") for name in SCHEDULES)]
    four_steps(runs, ["params of rank 0, 1, 2, 3", "activations of rank 0, 1, 2, 3", "rank 0 sends"], rows,
               lambda run: [*kept.pop(0), run.sent("pp.send")])


def bubble(runs):
    rows = []
    for name in SCHEDULES[:5]:
        few, many = (runs.run(2, PROGRAM, f"--steps 5 --global-batch {m} --pipeline {name}").row("from the measured")
                     for m in (4, 16))
        rows.append([name, *few[2:5], *many[2:6]])
    show(["idle share of the step", "m = 4: formula", "simulated", "measured", "m = 16: formula", "simulated",
          "measured", "step"], rows)


PRINTED = {"05_stages": schedules, "05_bubble": bubble}
