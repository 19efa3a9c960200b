"""Runs a right and a patched program and says what each check sees: the cells of docs/results/silent_bugs.csv."""

import math
import re
import shutil

import programs
from validate import comparison

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv-heads": 2, "ffn": 48, "seq-len": 32, "init-std": 0.1,
         "global-batch": 8, "steps": 300}
SEEDS = range(1, 9)
WINDOW = 20       # losses whose mean is taken
EARLY = 100       # steps, of a run or after its resumption, in which losses and norms are compared by digits: later,
                  # rounding may choose another expert
DIGITS = 1e-4     # of a loss: the right program in another layout deviates by less (rows "right" of the CSV)
DASHBOARD = 0.01  # of a gradient norm, which a person sees in a plot
WEIGHTS = 1e-2    # of an update: rounding turns the sign of gradients that are almost 0
CHECKED = 40      # steps with --replica-check
COLUMNS = ("bug", "text", "ranks", "flags", "spread", "gap", "curve", "digits", "norm_ratio", "norm", "weights",
           "gradients", "parameter", "fp64", "replicas", "calls")


class Failed(Exception):
    """A run that should have ended well has not, or the input is bad: one line for the user."""


def flags_of(model, layout="", **more):
    """Later ones replace earlier ones. None: a flag without a value."""
    values = dict(SHAPE)
    for text in (model, layout):
        words = text.split()
        values.update(zip((word[2:] for word in words[::2]), words[1::2]))
    values.update({name.replace("_", "-"): value for name, value in more.items()})
    return [word for name, value in values.items() for word in [f"--{name}"] + [str(value)] * (value is not None)]


def ranks_of(layout):
    words = layout.split()
    sizes = dict(zip(words[::2], words[1::2]))
    return math.prod(int(sizes.get(axis, 1)) for axis in ("--tp", "--cp", "--dp", "--pp"))


def run(program, ranks, flags, folder, allowed=(0,)):
    """(exit code, what was printed)."""
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    code, out, err = programs.run([*programs.mpirun(ranks, "-q"), program, *flags], 900, environment, cwd=folder)
    if code is None or allowed and code not in allowed:
        raise Failed(f"{program.name} {' '.join(flags)}: exit code {code}: {(out + err)[-1500:]}")
    return code, out + err


def steps_in(file):
    """[(loss, gradient norm)] of a metrics file, by step; NaN where a run has ended itself."""
    events = programs.events(file, "step") if file.exists() else []
    steps = {event["step"]: (event["loss"], event["grad_norm"]) for event in events}
    nothing = (math.nan, math.nan)
    return [tuple(math.nan if x is None else float(x) for x in steps.get(step, nothing))
            for step in range(1, SHAPE["steps"] + 1)]


def means(losses):
    """Of the last WINDOW losses at each step, from step WINDOW on."""
    return [sum(losses[end - WINDOW:end]) / WINDOW for end in range(WINDOW, len(losses) + 1)]


def first(wrong, begin=1):
    """The number of the first step of which that holds, or "no"."""
    return next((begin + i for i, each in enumerate(wrong) if each), "no")


def curve_of(losses, right):
    """The step at which, for the WINDOW-th time in a row, the mean differs by more than the spread; or "no"."""
    theirs = means([loss for loss, _ in right.steps])
    out = [beyond(x, y, spread) for x, y, spread in zip(means(losses), theirs, right.spread)]
    return first((all(out[end - WINDOW:end]) for end in range(WINDOW, len(out) + 1)), 2 * WINDOW - 1)


def beyond(x, y, bound):
    """Whether x differs from y by more; NaN does."""
    return not abs(x - y) <= bound


class Right:
    """The right program on one rank, with the flags of a model: its curves of all seeds, its references."""

    def __init__(self, program, model, folder):
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.curves = {}
        for seed in SEEDS:
            save = {"save_reference": "fp32"} if seed == SEEDS[0] else {}
            run(program, 1, flags_of(model, seed=seed, metrics=f"{seed}.jsonl", **save), folder)
            self.curves[seed] = steps_in(folder / f"{seed}.jsonl")
        run(program, 1, flags_of(model, steps=4, dtype="fp64", save_reference="fp64"), folder)
        by_seed = [means([loss for loss, _ in curve]) for curve in self.curves.values()]
        self.spread = [max(at) - min(at) for at in zip(*by_seed)]
        self.steps = self.curves[SEEDS[0]]


def weights_after(mine, right):
    """By how much the weights after step 1 differ, relative to the update: the worst parameter."""
    worst = 0.0
    for name in right.after_step_1.tensors:
        x, y, before = mine.after_step_1.read(name), right.after_step_1.read(name), right.initial.read(name)
        relative = comparison.relative(comparison.norm(x - y), comparison.norm(y - before))
        worst = relative if not relative <= worst else worst
    return worst


def fp64_of(c):
    """What the comparison in fp64 finds first: no, or the kind of number and its deviation."""
    found = c.differences()
    if not found:
        return "no"
    deviates = re.search(r" by ([-+.\de]+|inf|nan)", found[0])
    return found[0].split(":")[0].split(" of step")[0] + (f" {float(deviates[1]):.2g}" if deviates else "")


def cells(name, text, program, bug, right, folder):
    """A row of the CSV."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks = ranks_of(bug.layout)
    flags = lambda **more: flags_of(bug.model, bug.layout, **more)  # noqa: E731
    row = {"bug": name, "text": text, "ranks": ranks, "flags": " ".join([bug.layout, bug.model]).strip()}
    after = {}
    if bug.resumed:  # half of the steps, then the rest by a new process
        run(program, ranks, flags(metrics="half.jsonl", checkpoint_dir="run", stop_after=bug.resumed,
                                  save_reference="fp32"), folder)
        after = {"checkpoint_dir": "run", "resume": None}
        run(program, ranks, flags(metrics="rest.jsonl", **after), folder, (0, 1))
        half, rest = steps_in(folder / "half.jsonl"), steps_in(folder / "rest.jsonl")
        steps = half[:bug.resumed] + rest[bug.resumed:]
    else:
        run(program, ranks, flags(metrics="all.jsonl", save_reference="fp32"), folder, (0, 1))
        steps = steps_in(folder / "all.jsonl")
    losses, norms = zip(*steps)
    gap = means(losses)[-1] - means([loss for loss, _ in right.steps])[-1]
    row["spread"], row["gap"], row["curve"] = f"{right.spread[-1]:.3g}", f"{gap:.2g}", curve_of(losses, right)
    early = slice(bug.resumed, bug.resumed + EARLY)
    pairs = list(zip(steps, right.steps))[early]
    row["digits"] = first((beyond(x, y, DIGITS * abs(y)) for (x, _), (y, _) in pairs), early.start + 1)
    row["norm_ratio"] = f"{norms[0] / right.steps[0][1]:.4g}"
    row["norm"] = first((beyond(x, y, DASHBOARD * abs(y)) for (_, x), (_, y) in pairs), early.start + 1)
    c = comparison.Comparison(str(folder / "fp32"), str(right.folder / "fp32"))
    row["weights"] = f"{weights_after(c.a, c.b):.2g}"
    row["gradients"], row["parameter"] = f"{c.gradients[0].relative:.2g}", c.gradients[0].name
    run(program, ranks, flags(steps=4, dtype="fp64", save_reference="fp64"), folder)
    row["fp64"] = fp64_of(comparison.Comparison(str(folder / "fp64"), str(right.folder / "fp64")))
    row["replicas"] = replicas(program, ranks, flags(replica_check=1, stop_after=(bug.resumed or 0) + CHECKED,
                                                     **{"checkpoint_dir": "checked", **after}), folder)
    code, said = run(program, ranks, flags(steps=4, comm_check="on"), folder, ())
    if code and "--comm-check" not in said:
        raise Failed(f"{name}, --comm-check on: exit code {code}: {said[-1500:]}")
    row["calls"] = "yes" if code else "no"
    shutil.rmtree(folder)
    return row


def replicas(program, ranks, flags, folder):
    """The update after which --replica-check has found copies that differ; no; none: there are no copies."""
    code, text = run(program, ranks, flags, folder, ())
    if code == 2 and "--replica-check" in text:
        return "none"
    found = re.search(r"--replica-check: after step (\d+):", text)
    if code and not found:
        raise Failed(f"--replica-check: exit code {code}: {text[-1500:]}")
    return found[1] if found else "no"


def sees(row):
    """{check: whether the row's cell says that it has seen the bug}."""
    number = lambda key, bound: not float(row[key]) <= bound  # noqa: E731
    return {"curve": row["curve"] != "no", "digits": row["digits"] != "no", "norm": row["norm"] != "no",
            "weights": number("weights", WEIGHTS), "gradients": number("gradients", comparison.TOLERANCES["fp32"]),
            "fp64": row["fp64"] != "no", "replicas": row["replicas"] not in ("no", "none"),
            "calls": row["calls"] != "no"}
