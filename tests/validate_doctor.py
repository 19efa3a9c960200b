"""The doctor of docs/validate: every fault that it knows, planted, must be named, and no other."""

import math
import re
import time

import numpy as np
import references
import validate.later
from validate import comparison, conventions, doctor, facts, replays
from validate.llama import norm_of
from validate.runs import Run
from validate_bench import check, agrees, slice_of


def named(c):
    return re.findall(r"explains A's numbers to rounding: (.*)", doctor.report(c))


def replayed(bench):
    """Every known fault, planted in the first reference that shows it. {fault: references that show it}."""
    shown_by, began = {}, time.monotonic()
    runs = {name: Run(str(bench.reference(name))) for name in references.REFERENCES}
    for fault, kind in replays.KNOWN.items():
        if not slice_of(fault):
            continue
        shown_by[fault] = []
        for name, run in runs.items():
            result = comparison.model_of(run, run.initial.all(), kind).loss_and_gradients(*run.steps[0].arrays())
            loss, gradients = result
            if not gradients or set(gradients) != set(run.gradients.tensors):
                continue
            if max(comparison.deviation(n, g, run.gradients.read(n)).relative for n, g in gradients.items()) <= 1e-10:
                continue
            shown_by[fault].append(name)
            if len(shown_by[fault]) > 1:
                continue
            c = bench.compared(
                bench.reference(name),
                lambda content: content["steps"][0].update(loss=loss, grad_norm=norm_of(gradients)),
                {"gradients": gradients},
            )
            names = named(c)
            check(len(names) == 1 and fault in names[0].split(" or "), f"{fault} in {name} is named, not {names}")
        check(shown_by[fault] or fault in UNSEEN, f"{fault}: no reference shows it")
    print(f"ok   {len(shown_by)} replays, {time.monotonic() - began:.0f} s")
    return shown_by


# The models of docs/references have these values, or two key/value heads and four query heads.
UNSEEN = {
    "RoPE: base 10000",
    "RMSNorm: eps 1e-05",
    "RoPE: scaling of frequencies ignored",
    "experts: weights of a token sum to 1",
} | {
    f"tensor parallelism ({n} ranks): no f{of}, the inputs' gradients are not summed"
    for n in (4, 8)
    for of in ("", " in the blocks")
} | {
    f"tensor parallelism: gradients of {n} copies of each key/value head are not summed" for n in (4, 8)
} | {f"tensor parallelism ({n} ranks): gradients of q's and k's norms are not summed" for n in (4, 8)}


def weighted(bench):
    """Weights of targets: which targets count, and how often."""
    for name, expected, weights in (
        ("gqa", "only samples 0-3 of 8 count, 2 times", lambda right: right * np.repeat([2.0, 0.0], 4)[:, None]),
        (
            "masked",
            "mean of means: each of 4 parts of the batch",
            lambda right: right * np.repeat(right.sum() / 4 / right.reshape(4, -1).sum(axis=1), 2)[:, None],
        ),
        ("masked", "the mask of targets is ignored", lambda right: np.ones(right.shape)),
        (
            "masked",
            "the mask of targets is late by one position",
            lambda right: np.concatenate([np.zeros((8, 1)), right[:, :-1]], axis=1),
        ),
        ("tied", "only samples 6-7 of 8 count, 1 times", lambda right: right * (np.arange(8) > 5)[:, None]),
        ("gqa", "", lambda right: right * np.linspace(0.5, 1.5, right.size).reshape(right.shape)),
    ):
        run = Run(str(bench.reference(name)))
        tokens, targets = run.steps[0].arrays()

        class Weighted(comparison.Llama):
            def target_weights(self, targets_, weights=weights, right=targets >= 0):
                return weights(right) / right.sum()

        model = comparison.model_of(run, run.initial.all(), Weighted)
        loss, gradients = model.loss_and_gradients(tokens, np.array(run.steps[0].tokens)[:, 1:])
        c = bench.compared(
            bench.reference(name),
            lambda content: content["steps"][0].update(loss=loss, grad_norm=norm_of(gradients)),
            {"gradients": gradients},
        )
        report = doctor.report(c)
        names = re.findall(r"explains A's numbers to rounding: (.*)", report)
        check(names[0].startswith(expected) if expected else not names, f"weights of targets: {expected!r}: {names}")
        check("weights of targets, 1 is right" in report, f"weights of targets are said: {report}")


def updates(bench):
    base = bench.reference("clipped")
    c = bench.compared(base)
    names = c.names[1]
    same = {}
    for variant, after in facts.variants(c, names).items():
        weights = {n: after(n, c.a.initial.read(n), c.a.gradients.read(n)) for n in names}
        changed = bench.compared(base, files={"after_step_1": weights})
        if agrees(changed):
            same[variant] = True
            continue
        if not slice_of(variant):
            continue
        found = named(changed)
        check(len(found) == 1 and variant in found[0].split(" or "), f"update: {variant} is named, not {found}")
    check(
        set(same) == {"as the reference's", "clipping by the norm that A reports, which is not its gradients'"},
        f"variants that the reference does not show: {sorted(same)}",
    )
    noise = {"after_step_1": lambda t: {n: w + 1e-6 * np.cos(np.arange(w.size)).reshape(w.shape) for n, w in t.items()}}
    check(named(bench.compared(base, files=noise)) == [], "an unknown update is not named")


def router_biases(bench):
    base = bench.reference("deepseek", "fp32", "--router-bias-rate", "0.01")
    before, after = Run(str(base)).initial.all(), Run(str(base)).after_step_1.all()
    biases = {name for name in before if comparison.is_router_bias(name)}
    check(len(biases) == 2 and biases.isdisjoint(Run(str(base)).gradients.tensors), "the biases of two layers")
    check(agrees(bench.compared(base)), "biases agree with themselves")
    one = sorted(biases)[0]
    for multiple, of, name in (
        (0, biases, "biases of routers are not moved"),
        (-1, biases, "biases of routers are moved towards the load, not against it"),
        (10, biases, "biases of routers are moved by 10 x the rate"),
        (-1, {one}, None),
    ):
        c = bench.compared(
            base,
            files={
                "after_step_1": lambda tensors: {
                    n: before[n] + multiple * (after[n] - before[n]) if n in of else w for n, w in tensors.items()
                }
            },
            dtype="F32",
        )
        check([line.split(":")[0] for line in c.differences()] == ["router's bias after step 1"], f"a bias moved {multiple}")
        check(named(c) == ([name] if name else []), f"a bias moved {multiple} is named, not {named(c)}")
    drifted = {"initial": lambda tensors: {n: w + 64 * (n in biases) for n, w in tensors.items()}}  # far beyond a move
    same = {**drifted, "after_step_1": drifted["initial"]}
    still = {**drifted, "after_step_1": lambda tensors: drifted["initial"]({**tensors, **{n: before[n] for n in biases}})}
    moved = bench.altered(base, files=same, dtype="F32").rename(bench.work / "far")
    check(agrees(bench.compared(moved)), "biases far from 0 agree with themselves")
    c = comparison.Comparison(str(bench.altered(base, files=still, dtype="F32")), str(moved), 0.5)
    check([d.name for d in c.biases if d.wrong] == sorted(biases), f"biases far from 0 that do not move: {c.biases}")
    c = bench.compared(bench.reference("deepseek", "fp32"), files={"after_step_1": after}, dtype="F32")
    check(named(c) == ["biases of routers are moved, and the reference's are not"], f"moved without being asked: {named(c)}")

    def without(file, name):
        return {file: lambda tensors: {n: w for n, w in tensors.items() if n != name}}

    for file in ("initial", "after_step_1"):
        c = bench.compared(base, files=without(file, one), dtype="F32")
        check(len(c.differences()) == 1 and one in c.differences()[0], f"{file} without a bias: {c.differences()}")
        facts.facts(c)
    nan = {"after_step_1": lambda tensors: {n: w * math.nan if n == one else w for n, w in tensors.items()}}
    c = bench.compared(base, files=nan, dtype="F32", tolerance=1.0)
    check(not agrees(c) and "router's bias: not finite" in facts.facts(c), "a bias that is NaN")
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    c = bench.compared(
        base, files={"gradients": lambda t: {n: g * (2 if n == shared else 1) for n, g in t.items()}}, dtype="F32"
    )
    check(any(f"first wrong: {shared}" in line for line in facts.facts(c)), f"a shared expert's place: {facts.facts(c)}")


def later(bench):
    base = bench.reference("gqa")
    run = doctor.Doctor(bench.compared(base))
    run.whole = run.model()
    run.right = run.whole.loss_and_gradients(*run.a.steps[0].arrays())
    hidden = []
    for fault, numbers in validate.later.faults(run).items():
        if fault == "right" or not slice_of(fault):
            continue
        values = list(numbers())

        def change(content):
            for i, entry in enumerate(content["steps"]):
                entry["loss"], entry["grad_norm"] = values[2 * i : 2 * i + 2]

        c = comparison.Comparison(str(bench.altered(base, change)), str(base), 1e-8)
        if agrees(c) or any(d.wrong for d in c.losses if d.name == "step 1"):
            hidden.append(fault)
            continue
        found = named(c)
        check(len(found) == 1 and fault in found[0].split(" or "), f"later: {fault} is named, not {found}")
    check(not hidden, f"faults that six steps do not show: {hidden}")
    c = comparison.Comparison(str(bench.altered(base, lambda content: content["steps"][2].update(loss=3.0))), str(base))
    check(named(c) == [], "an unknown later fault is not named")


def activations(bench):
    base = bench.reference("gqa")
    run = Run(str(base))
    model = comparison.model_of(
        run, run.initial.all(), replays.KNOWN["context parallelism (2 ranks): positions begin at 0 on each"]
    )
    model.activations = {}
    loss, gradients = model.loss_and_gradients(*run.steps[0].arrays())
    c = bench.compared(
        base,
        lambda content: content.update(version=3) or content["steps"][0].update(loss=loss),
        {"gradients": gradients, "activations": model.activations},
    )
    said = doctor.report(c)
    first = "first wrong activation: model.layers.0.self_attn.context, "
    check(first + "samples 0-7 of 8, positions 16-31 of 0-31" in said, said)

    def report(files):  # of a fault that activations do not show
        doubled = {n: 2 * g for n, g in run.gradients.all().items()}
        return doctor.report(bench.compared(base, version_3, {"gradients": doubled, "activations": files}))

    def version_3(content):
        content["version"] = 3

    some = {n: x[:4] for n, x in model.activations.items()}  # of a micro-batch
    said = doctor.report(
        bench.compared(
            base,
            lambda content: content.update(version=3) or content["steps"][0].update(loss=loss),
            {"gradients": gradients, "activations": some},
        )
    )
    check("context, samples 0-3 of 4, positions 16-31" in said, said)
    right = comparison.model_of(run, run.initial.all())
    right.activations = {}
    right.loss_and_gradients(*run.steps[0].arrays())
    count = len(right.activations)
    said = report({n: x[:2] for n, x in right.activations.items()})
    check(f"activations: {count} are right, those of the first 2 of 8 samples" in said, said)
    said = report({n: x[:, :16] for n, x in right.activations.items() if x.ndim == 3})
    check("activations: none could be compared" in said, said)
    said = report({**right.activations, "model.rotary": np.zeros((8, 32, 2))})
    check(f"activations: {count} are right; 1 could not be compared" in said, said)


def claims(bench):
    """What is said of numbers that are right, or wrong by a cause outside the step, must be true."""
    base = bench.reference("gqa")
    run = Run(str(base))

    def rounded_losses(content):
        for entry in content["steps"]:
            entry["loss"] = float(np.float32(entry["loss"]))

    said = doctor.report(bench.compared(base, rounded_losses))
    check("weights of targets" not in said and "no known fault" in said, f"losses rounded to fp32: {said}")
    factor = comparison.clip_factor(run.steps[0].grad_norm, comparison.settings(run).clip)
    check(factor < 1, "the reference clips")
    for times, cause in ((factor, "recorded after clipping"), (4, "a sum for a mean")):
        scaled = {n: times * g for n, g in run.gradients.all().items()}
        names = named(bench.compared(base, files={"gradients": scaled}))
        check(len(names) == 1 and cause in names[0], f"gradients x {times:.3g}: {names}")
    # A loss that is right beside gradients that count only some samples
    weights = np.repeat([2.0, 0.0], 4)[:, None]

    class Weighted(comparison.Llama):
        def target_weights(self, targets):
            return weights * (targets >= 0) / (targets >= 0).sum()

    _, gradients = comparison.model_of(run, run.initial.all(), Weighted).loss_and_gradients(*run.steps[0].arrays())
    said = doctor.report(bench.compared(base, files={"gradients": gradients}))
    check("A's loss is right" in said and "only samples 0-3" in said, said)


def half_precision(bench):
    """bf16 is judged by its own rounding."""
    for name in ("gqa", "qk-norm", "tied"):
        base = bench.reference(name, "bf16")
        c = bench.compared(base)
        check(agrees(c) and c.exact is not None, f"bf16: {name} agrees with itself: {c.differences()}")
        exact = c.exact

        def noisy(times):
            rng = np.random.default_rng(1)
            made = {}
            for n, g in exact.items():
                of_b = comparison.norm(c.b.gradients.read(n) - g)
                noise = rng.standard_normal(g.shape)
                made[n] = g + noise * (times * max(of_b, 2.0**-9 * comparison.norm(g)) / comparison.norm(noise))
            return {"gradients": made}

        for times, passes in ((2.0, True), (2.9, True), (3.2, False)):
            c2 = bench.compared(base, files=noisy(times), dtype="F32")
            wrong = [d for d in c2.gradients if d.wrong]
            check((not wrong) == passes, f"bf16: {name}: {times} times B's rounding")
    found = {}
    for fault in ("RMSNorm: eps 1e-06", "RoPE: base 500000", "attention: scaled by 1 / D"):
        run = Run(str(bench.reference("gqa", "bf16")))
        loss, gradients = comparison.model_of(run, run.initial.all(), replays.KNOWN[fault]).loss_and_gradients(
            *run.steps[0].arrays()
        )
        c = bench.compared(bench.reference("gqa", "bf16"), files={"gradients": gradients}, dtype="F32")
        found[fault] = any(d.wrong for d in c.gradients)
    run = bench.reference("clipped", "bf16", "--weight-decay", "0")  # what master weights show
    folder = bench.altered(run, lambda content: content["flags"].update({"weight-decay": "0.3"}))
    c = comparison.Comparison(str(folder), str(bench.reference("clipped", "bf16")))
    check(
        [line.split(":")[0] for line in c.differences()][:1] == ["weight after step 1"],
        f"bf16: decay {c.differences()}",
    )
    check("no weight decay" in " or ".join(named(c)), f"bf16: no weight decay is named: {named(c)}")
    # Clipping in bf16 rounds; a thirtieth of the update is not that. Without master weights some are a unit off.
    folder = bench.reference("clipped", "bf16")
    c = bench.compared(folder)
    o = comparison.settings(c.b)
    stored = {name: conventions.rounded(c.b.gradients.read(name), "bf16") for name in c.names[1]}

    def updated(error):
        made = {}
        for name, g in stored.items():
            w = c.a.initial.read(name)
            s = g * comparison.clip_factor(c.a.steps[0].grad_norm, o.clip) * (1 + error)
            u = s / (np.abs(s) + o.eps) + (o.decay if w.ndim == 2 else 0) * w
            made[name] = conventions.rounded(w - c.b.steps[0].lr * u, "bf16")
        return made

    for error, passes in ((0.0, True), (2.0**-8, True), (2.0**-5, False)):
        c2 = bench.compared(folder, files={"gradients": stored, "after_step_1": updated(error)}, dtype="BF16")
        check((not any(d.wrong for d in c2.updates)) == passes, f"bf16: clipped gradients off by {error:g}")
    off = {
        n: w + comparison.spacing("bf16", w) * (np.arange(w.size).reshape(w.shape) % 7 == 3)
        for n, w in updated(0.0).items()
    }
    lines = facts.facts(bench.compared(folder, files={"gradients": stored, "after_step_1": off}, dtype="BF16"))
    check(any("does A update fp32 master weights?" in line for line in lines), f"bf16: no master weights: {lines}")
    check(found["RoPE: base 500000"] and found["attention: scaled by 1 / D"], f"bf16: conventions are seen: {found}")
