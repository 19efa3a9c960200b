#!/usr/bin/env python3
"""docs/compare.py and its facts, on runs of build/bin and altered copies of them; then its doctor (validate_doctor.py).

Run:   python3 tests/validate.py build/bin [--table]
Whole, or an eighth of the faults (TRAIN70B_TEST_SLICE). --table: which of docs/references shows which fault.
"""

import math
import pathlib
import shutil
import subprocess
import sys
import time

from validate_bench import FAILED, ROOT, Bench, agrees, check, slice_of
import numpy as np
import references
from validate import comparison, conventions, facts
from validate.llama import norm_of
from validate.runs import Run, UsageError
from validate_doctor import (
    activations,
    claims,
    half_precision,
    later,
    named,
    replayed,
    router_biases,
    updates,
    weighted,
)


ROUTERS = (
    "--qk-norm on --router-normalize off --dense-layers 1",  # Qwen3-MoE
    "--aux-loss 0.5 --router-z-loss 0.3",
    "--capacity-factor 0.8 --aux-loss 0.2 --top-k 3",
    "--router sigmoid --qk-norm on --shared-experts 1",  # DeepSeek-V3's, as dots.llm1 has it
    "--router sigmoid --qk-norm on --shared-experts 2 --dense-layers 1 --experts 8 --expert-groups 4 --top-groups 2 "
    "--top-k 3 --router-scale 2.5 --router-bias-rate 0.0625 --aux-loss 0.5 --router-z-loss 0.3",
    "--router sigmoid --router-normalize off --qk-norm on --shared-experts 1 --capacity-factor 0.8",
)


# ---- the equations
def equations(bench):
    """The doctor's Llama and AdamW against the program: in gqa, and in the others in turn."""
    kinds = [(name,) for name in references.REFERENCES] + [("experts", *flags.split()) for flags in ROUTERS]
    for place, (name, *flags) in enumerate(kinds):
        if place and not slice_of(" ".join([name, *flags])):
            continue
        run = Run(str(bench.reference(name, "fp64", *flags)))
        name = " ".join([name, *flags])
        weights, optimizer = run.initial.all(), comparison.settings(run)
        off = []  # by how much each number is
        for i, step in enumerate(run.steps):
            model = comparison.model_of(run, weights)
            loss, gradients = model.loss_and_gradients(*step.arrays())
            off += [abs(loss / step.loss - 1), abs(norm_of(gradients) / step.grad_norm - 1)]
            if i == 0:
                check(set(gradients) == set(run.gradients.tensors), f"{name}: names of gradients")
                off += [comparison.deviation(key, g, run.gradients.read(key)).relative for key, g in gradients.items()]
            weights = optimizer.step(weights, gradients, step.lr)
            if model.experts:
                weights = model.experts.after_step(weights)
            if i == 0:
                off += [comparison.deviation(key, w, run.after_step_1.read(key)).relative for key, w in weights.items()]
        print(f"ok   {name}: six steps of NumPy against 01_single_gpu in fp64: {max(off):.1e}")
        check(all(x <= 1e-9 for x in off), f"{name}: NumPy against the program: {max(off):.2e}")
    stored = ROOT / "docs/references"
    for name in references.REFERENCES:  # those of the repository are what the command makes
        c = comparison.Comparison(str(stored / name), str(bench.reference(name, "fp32")))
        check(agrees(c), f"docs/references/{name} against what docs/references.py makes: {c.differences()}")


def gate_and_up(bench):
    """The replay of swapped names against the right model with swapped weights: in dense, routed and shared MLPs."""

    def swap(tensors):
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj", ".w1.": ".w3.", ".w3.": ".w1."}
        renamed = {}
        for name, values in tensors.items():
            old = next((part for part in other if part in name), None)
            renamed[name.replace(old, other[old]) if old else name] = values
        return renamed

    for name in ("gqa", "experts", "deepseek"):
        run = Run(str(ROOT / "docs/references" / name))
        weights, step = run.initial.all(), run.steps[0].arrays()
        loss, gradients = comparison.model_of(run, weights, conventions.GateAndUpSwapped).loss_and_gradients(*step)
        expected_loss, expected = comparison.model_of(run, swap(weights)).loss_and_gradients(*step)
        expected = swap(expected)
        check(
            loss == expected_loss and all(np.array_equal(gradients[key], g) for key, g in expected.items()),
            f"{name}: gate and up swapped",
        )
        check(not np.array_equal(gradients["lm_head.weight"], run.gradients.read("lm_head.weight")), f"{name}: no fault")


# ---- the verdict
def verdicts(bench):
    base = bench.reference("gqa", "fp32")
    some = "model.layers.1.mlp.up_proj.weight"

    def poke(file, index, change):
        def altered(tensors):
            tensors[some].flat[index] = change(tensors[some].flat[index])
            return tensors

        return {file: altered}

    check(agrees(bench.compared(base)), "a copy agrees")
    micro = comparison.Comparison(str(bench.reference("gqa", "fp32", "--micro-batch", "2")), str(base))
    check(agrees(micro) and micro.gradients[0].relative > 0, "micro-batches agree, and are not equal")
    other = comparison.Comparison(str(bench.reference("gqa", "fp32", "--seed", "2")), str(base), 1.0)
    check(not other.same_tokens and not agrees(other), "another seed differs at any tolerance")
    c = bench.compared(base, files=poke("gradients", 5, lambda g: g - math.copysign(1e-3, g)), dtype="F32")
    check(
        [line.split(":")[0] for line in c.differences()] == ["gradient", "weight after step 1"], "an altered gradient"
    )
    check(
        c.gradients[0].name == some and abs(c.gradients[0].relative * c.gradients[0].size / 1e-3 - 1) <= 1e-3,
        "by how much",
    )
    for swapped in (False, True):
        c = bench.compared(
            base, files=poke("gradients", 5, lambda g: math.nan), dtype="F32", swapped=swapped, tolerance=1.0
        )
        check(not agrees(c) and c.gradients[0].name == some, "a NaN never passes")
        c = bench.compared(
            base, files=poke("after_step_1", 5, lambda g: math.nan), dtype="F32", swapped=swapped, tolerance=1.0
        )
        check(not agrees(c), "a NaN among weights never passes")
    c = bench.compared(
        base, files=poke("initial", 0, lambda w: np.nextafter(np.float32(w), np.float32(1))), dtype="F32", tolerance=1.0
    )
    check(c.differences()[0].startswith(f"initial weight: {some}"), "initial weights of one dtype are equal")

    def step(number, key, change):
        def altered(content):
            entry = content["steps"][number - 1]
            entry[key] = change(entry[key]) if callable(change) else change

        return altered

    for number, key, change, passes in (
        (3, "loss", lambda x: x * (1 + 1e-6), True),
        (3, "loss", lambda x: x * (1 + 1e-5), False),
        (5, "loss", lambda x: x * 1.5, True),
        (4, "grad_norm", lambda x: x * 1.1, False),
        (2, "grad_norm", None, False),
        (2, "loss", None, False),
        (2, "lr", lambda x: x * 7, False),
        (2, "lr", lambda x: x * (1 + 1e-7), True),
        (2, "tokens", lambda x: x[:-1] + [x[-1][:-1] + [0]], False),
    ):
        c = bench.compared(base, step(number, key, change))
        check(agrees(c) == passes, f"step {number}: {key} altered: {c.differences()}")
    for ignored, passes in ((0, True), (1, False)):

        def with_targets(content):
            entry = content["steps"][0]
            entry["targets"] = [sample[1:] for sample in entry["tokens"]]
            if ignored:
                entry["targets"][0][0] = -1

        check(agrees(bench.compared(base, with_targets)) == passes, f"targets, {ignored} ignored")
    for key, value in (("version", 4), ("version", "2"), ("dtype", "fp16"), ("steps", []), ("steps", {}), ("flags", 7)):
        try:
            bench.compared(base, lambda content: {**content, key: value})
            check(False, f"{key} {value} is refused")
        except UsageError as error:
            check("reference.json" in str(error) and "\n" not in str(error), f"{key} {value}: {error}")
    for file in ("gradients", "initial"):
        folder = bench.altered(base)
        (folder / f"{file}.safetensors").unlink()
        try:
            comparison.Comparison(str(folder), str(base))
            check(False, f"no {file}")
        except UsageError as error:
            check(f"{file}.safetensors: cannot be read" in str(error), str(error))
    folder = bench.altered(base)
    (folder / "after_step_1.safetensors").unlink()
    for pair in ((folder, base), (base, folder)):
        c = comparison.Comparison(*map(str, pair), 1.0)
        check(not agrees(c) and c.problems[0].endswith("after_step_1.safetensors is missing"), "a missing file differs")

    def version_1(content):
        content["version"] = 1

    first = bench.work / "version 1"
    shutil.copytree(bench.altered(base, version_1), first)
    (first / "after_step_1.safetensors").unlink()
    check(agrees(comparison.Comparison(str(first), str(first))), "version 1 has no weights after step 1")
    # names and shapes
    c = bench.compared(
        base,
        files={"gradients": {"lm_head.weight": np.zeros((32, 256)), "new": np.zeros(2)}},
        dtype="F32",
        tolerance=1.0,
    )
    count = len(Run(str(base)).gradients.tensors)
    check(len([p for p in c.problems if "gradients" in p]) == count + 1, "names that only one run has")
    check(any('"lm_head.weight" is (32, 256)' in p for p in c.problems), "another shape")
    c = bench.compared(base, files={"gradients": lambda t: {f"module.{name}": g for name, g in t.items()}}, dtype="F32")
    check('strip "module."' in c.problems[0], "a wrapper's prefix is recognised")
    # steps and settings

    def fewer(content):
        content["steps"] = content["steps"][:1]
        content["flags"]["eps"], content["model"]["rope_theta"] = "1e-3", 5e5

    c = bench.compared(base, fewer)
    check(agrees(c) and len(c.contradictions) == 2 and len(c.not_checked) == 2, "what is told: settings, steps")
    # fp64: two steps, and all where both runs are gentle; mixed dtypes: the less exact one's
    exact = bench.reference("gqa")

    def both(lr, number, factor, dtype="fp64"):
        def change(content):
            content["dtype"], content["flags"]["lr"], content["flags"]["eps"] = dtype, str(lr), "1e-8"
            content["steps"][number - 1]["loss"] *= factor

        pair = bench.work / "pair"
        shutil.rmtree(pair, ignore_errors=True)
        shutil.copytree(bench.altered(exact, change), pair)
        change_back = bench.altered(
            exact,
            lambda content: change(content)
            or content["steps"][number - 1].update(loss=content["steps"][number - 1]["loss"] / factor),
        )
        return agrees(comparison.Comparison(str(pair), str(change_back)))

    check(both(3e-3, 2, 1 + 1e-12) and not both(3e-3, 2, 1 + 1e-9), "fp64: step 2")
    check(not both(3e-3, 5, 1 + 1e-9) and both(1e-2, 3, 1 + 1e-9), "fp64: later steps only of gentle runs")
    c = comparison.Comparison(str(base), str(exact))
    check(c.tolerance == 5e-6 and agrees(c), "fp32 against fp64")
    # fp64 with parts in fp32 is said, and passes as fp32
    noisy = {
        "gradients": lambda t: {n: g * (1 + 1e-7 * np.sin(np.arange(g.size))).reshape(g.shape) for n, g in t.items()}
    }
    c = bench.compared(exact, files=noisy)
    check(not agrees(c) and "fp32's rounding" in facts.facts(c)[0], "fp64 with fp32 islands")
    check(agrees(bench.compared(exact, files=noisy, tolerance=5e-6)), "and --tolerance 5e-6")


def hidden_settings(bench):
    """Runs that state B's settings and used others."""
    for flag, value, back in (("--weight-decay", "0.05", "0.1"), ("--clip", "0", "0.5"), ("--eps", "1e-6", "1e-5")):
        base = bench.reference("gqa", "fp32", "--steps", "1")
        run = bench.reference("gqa", "fp32", "--steps", "1", flag, value)
        folder = bench.altered(run, lambda content: content["flags"].update({flag[2:]: back}))
        c = comparison.Comparison(str(folder), str(base))
        check(
            [line.split(":")[0] for line in c.differences()] == ["weight after step 1"],
            f"{flag} {value} instead of {back}",
        )
    # an element of the gradient that rounding turns round explains its weight, and only that
    base, some = bench.reference("gqa", "fp64", "--steps", "1"), "model.layers.1.mlp.up_proj.weight"
    run = Run(str(base))
    o, lr, tiny = comparison.settings(run), run.steps[0].lr, 1e-9
    factor = min(1.0, o.clip / (run.steps[0].grad_norm + 1e-6))

    def with_gradient(g, file_g):
        w = run.initial.read(some).flat[5]
        gradients, after = run.gradients.all(), run.after_step_1.all()
        gradients[some].flat[5] = file_g
        after[some].flat[5] = w - lr * (g / (abs(g) + o.eps / factor) + o.decay * w)
        return {"gradients": gradients, "after_step_1": after}

    two = bench.work / "tiny"
    shutil.copytree(bench.altered(base, files=with_gradient(tiny, tiny)), two)
    for stored, passes in ((-tiny, True), (tiny, False)):
        folder = bench.altered(base, files=with_gradient(-tiny, stored))
        c = comparison.Comparison(str(folder), str(two))
        updates = [d for d in c.updates if d.wrong]
        check(
            (not updates) == passes or not passes and updates[0].name == some,
            f"a gradient turned round: {c.differences()}",
        )


# ---- facts
def places(bench):
    base = bench.reference("gqa")

    def has(words, change=None, files=None):
        lines = facts.facts(bench.compared(base, change, files))
        check(any(words in line for line in lines), f"fact {words!r}: {lines}")

    def scaled(names, factor):
        return {
            "gradients": lambda t: {n: g * (factor if any(each in n for each in names) else 1) for n, g in t.items()}
        }

    has("all 30 are 4 x the reference's, nothing else", files=scaled([""], 4))
    has("all 30 are 1/3 x the reference's, nothing else", files=scaled([""], 1 / 3))
    has("all 30 are sqrt(2) x the reference's, nothing else", files=scaled([""], math.sqrt(2)))
    has("the 12 wrong ones are 2 x", files=scaled(["q_proj", "k_proj", "layernorm"], 2))
    has("wrong: all norms, nothing else", files=scaled(["norm"], 2))
    has("wrong: every k_proj", files=scaled(["k_proj"], 2))
    has("wrong: layer 1", files=scaled(["layers.1."], 2))
    has("wrong: all but the norms", files=scaled(["proj", "embed", "head"], 3))
    has(
        "right down to model.layers.1.self_attn.o_proj.weight; first wrong: model.layers.1.self_attn.v_proj.weight",
        files=scaled(["layers.1.self_attn.v_proj", "layers.0.self_attn.q_proj"], 2),
    )
    has("right after the first: model.layers.1.self_attn.k_proj.weight", files=scaled(["layers.1.self_attn.v_proj"], 2))
    has("wrong from the first gradient on", files=scaled(["lm_head"], 2))

    def part(name, at, value):
        def altered(tensors):
            tensors[name][at] *= value
            return tensors

        return {"gradients": altered}

    layer = "model.layers.2."
    has("(head 1 of 2 only)", files=part(layer + "self_attn.v_proj.weight", np.s_[8:], 2))
    has("(heads 0-1 of 4 only, which are 0)", files=part(layer + "self_attn.q_proj.weight", np.s_[:16], 0))
    has("(head 3 of 4 only)", files=part(layer + "self_attn.o_proj.weight", np.s_[:, 24:], 2))
    has("(rows 24-47 of 48 only)", files=part(layer + "mlp.up_proj.weight", np.s_[24:], 2))
    has("(columns 0-15 of 48 only)", files=part(layer + "mlp.down_proj.weight", np.s_[:, :16], 2))
    has("(row of tokens 101-102 of 256 only)", files=part("model.embed_tokens.weight", np.s_[101:103], 2))

    def loss(number, key="loss"):
        return lambda content: content["steps"][number - 1].update({key: 5.0})

    has("forward: wrong: the loss of step 1", loss(1))
    has("forward: right", loss(2))
    has("first wrong loss: step 2", loss(2))
    has("first wrong norm: step 2", loss(2, "grad_norm"))
    has("norm: that of step 1 is wrong, although every gradient is right", loss(1, "grad_norm"))
    has("only losses deviate", lambda content: content["steps"][0].update(loss=content["steps"][0]["loss"] + 1e-8))
    initial = Run(str(base)).initial.all()
    faster = {n: 20.0 if "norm" in n else 1.0 for n in initial}
    of_norms = {"after_step_1": lambda t: {n: initial[n] + faster[n] * (w - initial[n]) for n, w in t.items()}}
    has("update: 20 times what A's own gradients give", files=of_norms)
    half = {
        "after_step_1": lambda t: {
            n: np.concatenate([w[: len(w) // 2], Run(str(base)).initial.read(n)[len(w) // 2 :]]) for n, w in t.items()
        }
    }
    has("bitwise as before it: rows 16-31 of 32", files=half)
    check(facts.facts(bench.compared(base)) == [], "no facts where runs agree")


def recorded(bench):
    """Small runs of foreign code (tests/strangers/record.sh): this machine needs no torch."""
    folder = ROOT / "tests/strangers/recorded"
    expected = {
        "plant_tp_no_f": "tensor parallelism (2 ranks): no f, the inputs' gradients are not summed",
        "plant_beta2": "beta2 is 0.999",
    }
    for run in sorted(each for each in folder.iterdir() if each.name != "reference"):
        c = comparison.Comparison(str(run), str(folder / "reference"))
        names = [] if agrees(c) else named(c)
        if run.name in expected:
            check(len(names) == 1 and expected[run.name] in names[0].split(" or "), f"recorded: {run.name}: {names}")
        else:
            check(agrees(c), f"recorded: {run.name}: {c.differences()}")


def program(bench, binaries):
    """build/bin/compare as its user meets it."""
    base = bench.reference("gqa", "fp32")

    def run(*words):
        return subprocess.run([str(binaries / "compare"), *map(str, words)], capture_output=True, text=True)

    done = run(base, base)
    check(done.returncode == 0 and "the runs agree within 5e-06" in done.stdout, f"compare: {done}")
    altered = bench.altered(base, files={"gradients": lambda t: {n: 2 * g for n, g in t.items()}}, dtype="F32")
    done = run(altered, base, "--diagnose")
    check(
        done.returncode == 1
        and "DIFFER" in done.stdout
        and "all 30 are 2 x" in done.stdout
        and "explains A's numbers" in done.stdout,
        f"compare --diagnose: {done}",
    )
    for words, expected in (
        ([], "A is required"),
        (["a"], "B is required"),
        (["nowhere", base], "nowhere/reference.json"),
        ([base, base, "--tolerance", "2"], "--tolerance"),
        ([base, base, "--stepz"], "--stepz"),
    ):
        done = run(*words)
        check(
            done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1,
            f"compare {words}: {done}",
        )


def main():
    binaries = pathlib.Path(sys.argv[1]).resolve()
    bench = Bench(binaries)
    try:
        for part in (
            equations,
            gate_and_up,
            verdicts,
            hidden_settings,
            places,
            weighted,
            updates,
            router_biases,
            later,
            activations,
            claims,
            half_precision,
            recorded,
            replayed,
        ):
            began = time.monotonic()
            result = part(bench)
            print(f"     {part.__name__}: {time.monotonic() - began:.1f} s")
            if part is replayed and "--table" in sys.argv:
                for fault, names in result.items():
                    print(f"{fault}: {', '.join(names)}")
        program(bench, binaries)
    finally:
        shutil.rmtree(bench.work)
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
