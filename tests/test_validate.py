"""docs/compare.py and its doctor. Only this catches: a verdict, a place or a name of a fault that is wrong; references
that are not what docs/references.py makes; a NumPy Llama that is not the programs' in one of the references' models.
"""

import functools
import json
import math
import pathlib
import re
import shutil

import numpy as np
import pytest
import references
from conftest import ROOT, in_turn
from validate import comparison, doctor, facts, replays, rules
from validate.llama import norm_of
from validate.runs import Run, UsageError, write_safetensors

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GQA, MASKED, DEEPSEEK = "gqa fp64", "masked fp64", "deepseek fp32 --router-bias-rate 0.01"
BALANCED = "experts fp64 --aux-loss 0.01 --router-z-loss 0.01 --window 7 --window-every 2 --sinks on"
SOME = "model.layers.1.mlp.up_proj.weight"
BIAS = "mlp.gate.e_score_correction_bias"
BAD = [{"version": 4}, {"version": "2"}, {"dtype": "fp16"}, {"flags": 7}, {"steps": []}, {"steps": {}}, {"steps": [{}]}]
REPLAYS = {**rules.FORWARD, **rules.BACKWARD}
PATTERN = r"explains A's numbers to rounding: (.*)"


@pytest.fixture(scope="module")
def reference(binaries, tmp_path_factory):
    """reference(words): a run of docs/references.py, made once; words: its name, its dtype, more flags."""
    work = tmp_path_factory.mktemp("validate")

    @functools.cache
    def made(words):
        name, dtype, *more = words.split()
        out = work / "-".join([name, dtype, *more]).replace("/", "_")
        out.mkdir()
        references.make(binaries, out, name, dtype, more)
        return Run(str(out / name))

    yield made
    shutil.rmtree(work)


def merge(content, changes):
    for key, new in changes.items():
        if isinstance(new, dict) and new:
            merge(content[key], new)
        else:
            content[key] = new(content) if callable(new) else new
    return content


def altered(base, edits, dtype=None, to="altered"):
    """A copy of a run. edits, or a function of the run that gives them: {file: {name: values}, a function of the run,
    or None: no file; "json": what to merge into reference.json, where functions are given what is beside them}.
    """
    folder = pathlib.Path(f"{base.folder}-{to}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base.folder, folder)
    for file, edit in (edits(base) if callable(edits) else edits).items():
        path = folder / f"{file}.safetensors"
        if file == "json":
            path = folder / "reference.json"
            path.write_text(json.dumps(merge(json.loads(path.read_text()), edit)))
        elif edit is None:
            path.unlink()
        else:
            tensors = edit(base) if callable(edit) else edit
            write_safetensors(path, tensors, dtype or {"fp64": "F64"}.get(base.dtype, "F32"))
    return Run(str(folder))


def compared(a, b, tolerance=None):
    return comparison.Comparison(a.folder, b.folder, tolerance)


def edited(base, edits, tolerance=None, dtype=None):
    return compared(altered(base, edits, dtype), base, tolerance)


def named(c):
    return re.findall(PATTERN, doctor.report(c))


# ---- edits
def step(number, **values):
    return {"json": {"steps": {number - 1: values}}}


def loss(number, factor):
    return step(number, loss=lambda s: s["loss"] * factor)


def each(change, file="gradients"):
    """change(name, values)"""
    return {file: lambda run: {n: change(n, x) for n, x in getattr(run, file).all().items()}}


def scaled(names, factor):
    return each(lambda n, x: x * (factor if any(name in n for name in names) else 1))


def part(name, at, change, file="gradients"):
    """change: of these elements, or a factor."""

    def changed(n, x):
        if n == name:
            x[at] = change(x[at]) if callable(change) else x[at] * change
        return x

    return each(changed, file)


def moved(times):
    """Step 1 moves weights times(name, weight) as far."""

    def after(run):
        before = run.initial.all()
        return {n: before[n] + times(n, w) * (w - before[n]) for n, w in run.after_step_1.all().items()}

    return {"after_step_1": after}


def computed(fault=None, weights=None, seen=None):
    """A function of a run: what a model with this fault gives in step 1; nothing if the run's cannot have it. weights:
    how often targets count, of those that should; seen(name, values): what is recorded of an activation.
    """

    def edits(run):
        model = replays.model_of(run, run.initial.all())
        if fault and replays.planted(model, REPLAYS[fault]) is None:
            return {}
        tokens, targets = run.steps[0].arrays()
        if weights:
            of_targets = weights(targets >= 0) / (targets >= 0).sum()
            model.target_weights, targets = lambda _: of_targets, np.array(run.steps[0].tokens)[:, 1:]
        model.activations = {} if seen else None
        loss, gradients = model.loss_and_gradients(tokens, targets)
        files = {"activations": {n: seen(n, x) for n, x in model.activations.items()}} if seen else {}
        return {**step(1, loss=model.recorded(loss), grad_norm=norm_of(gradients)), "gradients": gradients, **files}

    return edits


# ---- the equations
ROUTERS = (
    "--qk-norm on --router-normalize off --dense-layers 1",  # Qwen3-MoE
    "--aux-loss 0.5 --router-z-loss 0.3 --window 7 --window-every 2 --sinks on",
    "--capacity-factor 0.8 --aux-loss 0.2 --top-k 3",
    "--router sigmoid --qk-norm on --shared-experts 1",  # DeepSeek-V3's, as dots.llm1 has it
    "--router sigmoid --qk-norm on --shared-experts 2 --dense-layers 1 --experts 8 --expert-groups 4 --top-groups 2 "
    "--top-k 3 --router-scale 2.5 --router-bias-rate 0.0625 --aux-loss 0.5 --router-z-loss 0.3",
    "--router sigmoid --router-normalize off --qk-norm on --shared-experts 1 --capacity-factor 0.8",
)
MODELS = [f"{name} fp64" for name in references.REFERENCES] + [f"experts fp64 {flags}" for flags in ROUTERS]


@pytest.mark.parametrize("kind", MODELS[:1] + in_turn(MODELS[1:]))
def test_numpy_against_01_single_gpu(reference, kind):
    run = reference(kind)
    weights, optimizer, off = run.initial.all(), replays.settings(run), []  # off: by how much each number is
    for i, entry in enumerate(run.steps):
        model = replays.model_of(run, weights)
        loss, gradients = model.loss_and_gradients(*entry.arrays())
        off += [abs(loss / entry.loss - 1), abs(norm_of(gradients) / entry.grad_norm - 1)]
        weights = optimizer.step(weights, gradients, entry.lr)
        if model.experts:
            weights = model.experts.after_step(weights)
        for mine, stored in ((gradients, run.gradients), (weights, run.after_step_1)) if i == 0 else ():
            assert set(mine) == set(stored.tensors)
            off += [comparison.deviation(key, x, stored.read(key)).relative for key, x in mine.items()]
    assert all(x <= 1e-9 for x in off), max(off)


@pytest.mark.parametrize("name", references.REFERENCES)
def test_stored_references_are_what_the_command_makes(reference, name):
    assert compared(Run(str(ROOT / "docs/references" / name)), reference(f"{name} fp32")).differences() == []


# ---- the verdict
VERDICTS = {  # (reference, edits, tolerance, what is said; nothing: the runs agree)
    "gradient beyond": ("gqa fp32", scaled([SOME], 1 + 6e-6), None, f"gradient: {SOME} at step 1 by 6e-06"),
    "loss within": ("gqa fp32", loss(3, 1 + 1e-6), None, ""),
    "loss beyond": ("gqa fp32", loss(3, 1 + 1e-5), None, "loss: step 3 by 1e-05"),
    "loss of step 5": ("gqa fp32", loss(5, 1.5), None, ""),
    "norm": ("gqa fp32", step(4, grad_norm=lambda s: s["grad_norm"] * 1.1), None, "gradient norm: step 4"),
    "no loss": ("gqa fp32", step(2, loss=None), None, "loss: step 2 by nan"),
    "lr": ("gqa fp32", step(2, lr=lambda s: s["lr"] * 7), None, "lr of step 2 is"),
    "lr within": ("gqa fp32", step(2, lr=lambda s: s["lr"] * (1 + 1e-7)), None, ""),
    "tokens": ("gqa fp32", step(2, tokens=lambda s: s["tokens"][:-1] + [s["tokens"][-1][:-1] + [0]]), 1.0, "tokens:"),
    "targets": ("gqa fp32", step(1, targets=lambda s: [x[1:] for x in s["tokens"]]), None, ""),
    "a target less": ("gqa fp32", step(1, targets=lambda s: [[-1] + x[2:] for x in s["tokens"]]), None, "targets:"),
    "a NaN in gradients": ("gqa fp32", part(SOME, (0, 5), math.nan), 1.0, f"gradient: {SOME}"),
    "a NaN in weights": ("gqa fp32", part(SOME, (0, 5), math.nan, "after_step_1"), 1.0, f"weight after step 1: {SOME}"),
    "another bit": ("gqa fp32", part(SOME, (0, 0), lambda w: np.nextafter(*np.float32([w, 1])), "initial"), 1.0, SOME),
    "no weights after step 1": ("gqa fp32", {"after_step_1": None}, 1.0, "after_step_1.safetensors is missing"),
    "fp32's rounding": (GQA, scaled(["proj"], 1 + 1e-7), 5e-6, ""),
    "fp64, loss within": (GQA, loss(2, 1 + 1e-12), None, ""),
    "fp64, loss of step 5": (GQA, loss(5, 1 + 1e-9), None, "loss: step 5"),
    "fp64, loss of step 3 that is not gentle": (f"{GQA} --lr 1e-2", loss(3, 1 + 1e-9), None, ""),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(reference, case, swapped):
    name, edits, tolerance, said = VERDICTS[case]
    pair = [altered(reference(name), edits), reference(name)]
    c = compared(*(pair[::-1] if swapped else pair), tolerance)
    assert said in "".join(c.differences()) and (c.differences() == []) == (facts.facts(c) == []) == (said == "")


def test_what_a_difference_is(reference):
    base = reference("gqa fp32")
    micro = compared(reference("gqa fp32 --micro-batch 2"), base)
    assert not micro.differences() and micro.gradients[0].relative > 0
    other = compared(reference("gqa fp32 --seed 2"), base, 1.0)
    assert not other.same_tokens and other.differences()
    c = compared(base, reference(GQA))  # the less exact dtype's tolerance
    assert c.tolerance == 5e-6 and not c.differences()
    changes = {"steps": lambda content: content["steps"][:1], "flags": {"eps": "1e-3"}, "model": {"rope_theta": 5e5}}
    c = edited(base, {"json": changes})
    assert not c.differences() and len(c.contradictions) == 2 and len(c.not_checked) == 2
    first = altered(base, {"after_step_1": None, "json": {"version": 1}})
    assert compared(first, first).differences() == []
    problems = edited(base, {"gradients": {"lm_head.weight": np.zeros((32, 256)), "new": np.zeros(2)}}, 1.0).problems
    assert len([p for p in problems if "gradients" in p]) == len(base.gradients.tensors) + 1
    assert any('"lm_head.weight" is (32, 256)' in p for p in problems)
    wrapped = {"gradients": lambda run: {f"module.{name}": g for name, g in run.gradients.all().items()}}
    assert 'strip "module."' in edited(base, wrapped).problems[0]
    for flag, value, stated in (("weight-decay", "0.05", "0.1"), ("clip", "0", "0.5"), ("eps", "1e-6", "1e-5")):
        run = altered(reference(f"gqa fp32 --steps 1 --{flag} {value}"), {"json": {"flags": {flag: stated}}})
        c = compared(run, reference("gqa fp32 --steps 1"))
        assert [said.split(":")[0] for said in c.differences()] == ["weight after step 1"]


@pytest.mark.parametrize("file, edit", [("gradients", None), ("initial", None), *(("json", bad) for bad in BAD)])
def test_no_reference_run_is_refused(reference, file, edit):
    said = r"reference\.json" if edit else rf"{file}\.safetensors: cannot be read"
    with pytest.raises(UsageError, match=f"^[^\n]*{said}[^\n]*$"):
        altered(reference("gqa fp32"), {file: edit})


def test_an_element_that_rounding_turns_round_explains_its_weight_and_only_that(reference):
    run, tiny = reference(f"{GQA} --steps 1"), 1e-9
    o, lr = replays.settings(run), run.steps[0].lr
    factor = comparison.clip_factor(run.steps[0].grad_norm, o.clip)

    def with_gradient(used, stored):
        w = run.initial.read(SOME)[0, 5]
        after = w - lr * (used / (abs(used) + o.eps / factor) + o.decay * w)
        return {**part(SOME, (0, 5), lambda _: stored), **part(SOME, (0, 5), lambda _: after, "after_step_1")}

    other = altered(run, with_gradient(tiny, tiny), to="tiny")
    for stored, right in ((-tiny, []), (tiny, [SOME])):
        c = compared(altered(run, with_gradient(-tiny, stored)), other)
        assert [d.name for d in c.updates if d.wrong] == right


@pytest.mark.parametrize("name", ["gqa", "qk-norm", "tied"])
def test_bf16_is_judged_by_its_own_rounding(reference, name):
    base = reference(f"{name} bf16")
    c = edited(base, {})
    assert not c.differences() and c.exact is not None
    for times, right in ((2.0, True), (2.9, True), (3.2, False)):
        rng, made = np.random.default_rng(1), {}
        for n, g in c.exact.items():
            of_b, waves = comparison.norm(c.b.gradients.read(n) - g), rng.standard_normal(g.shape)
            size = max(of_b, 2.0**-9 * comparison.norm(g)) * times
            made[n] = g + waves * (size / comparison.norm(waves))
        assert any(d.wrong for d in edited(base, {"gradients": made}).gradients) != right
    for fault in ("RoPE: base 500000", "attention: scaled by 1 / D"):
        assert any(d.wrong for d in edited(base, computed(fault)).gradients)


def test_bf16_updates_of_master_weights(reference):
    base = reference("clipped bf16")
    run = reference("clipped bf16 --weight-decay 0")
    c = compared(altered(run, {"json": {"flags": {"weight-decay": "0.3"}}}), base)
    assert c.differences()[0].startswith("weight after step 1:") and "no weight decay" in " or ".join(named(c))
    # Clipping in bf16 rounds; a thirtieth of the update is not that. Without master weights some are a unit off.
    stored = {name: replays.rounded(g, "bf16") for name, g in base.gradients.all().items()}

    def updated(error):
        optimizer = replays.settings(base)
        clipped = {name: g * (1 + error) for name, g in optimizer.clipped(stored).items()}
        optimizer.clipped = lambda _: clipped
        after = optimizer.step(base.initial.all(), stored, base.steps[0].lr)
        return {"gradients": stored, "after_step_1": {name: replays.rounded(w, "bf16") for name, w in after.items()}}

    for error, right in ((0.0, True), (2.0**-8, True), (2.0**-5, False)):
        assert any(d.wrong for d in edited(base, updated(error), dtype="BF16").updates) != right
    files = updated(0.0)
    for n, w in files["after_step_1"].items():
        w += comparison.spacing("bf16", w) * (np.arange(w.size).reshape(w.shape) % 7 == 3)
    assert "does A update fp32 master weights?" in "".join(facts.facts(edited(base, files, dtype="BF16")))


# ---- facts
LAYER = "model.layers.2."
FACTS = {  # what is said of edits
    "all 30 are 1/3 x the reference's, nothing else": scaled([""], 1 / 3),
    "all 30 are sqrt(2) x the reference's, nothing else": scaled([""], math.sqrt(2)),
    "the 12 wrong ones are 2 x": scaled(["q_proj", "k_proj", "layernorm"], 2),
    "wrong: all norms, nothing else": scaled(["norm"], 2),
    "wrong: every k_proj": scaled(["k_proj"], 2),
    "wrong: layer 1": scaled(["layers.1."], 2),
    "wrong: all but the norms": scaled(["proj", "embed", "head"], 3),
    "right down to model.layers.1.self_attn.o_proj.weight;": scaled(["1.self_attn.v_proj", "0.self_attn.q_proj"], 2),
    "; first wrong: model.layers.1.self_attn.v_proj.weight": scaled(["1.self_attn.v_proj", "0.self_attn.q_proj"], 2),
    "right after the first: model.layers.1.self_attn.k_proj.weight": scaled(["layers.1.self_attn.v_proj"], 2),
    "wrong from the first gradient on": scaled(["lm_head"], 2),
    "(head 1 of 2 only)": part(LAYER + "self_attn.v_proj.weight", np.s_[8:], 2),
    "(heads 0-1 of 4 only, which are 0)": part(LAYER + "self_attn.q_proj.weight", np.s_[:16], 0),
    "(head 3 of 4 only)": part(LAYER + "self_attn.o_proj.weight", np.s_[:, 24:], 2),
    "(rows 24-47 of 48 only)": part(LAYER + "mlp.up_proj.weight", np.s_[24:], 2),
    "(columns 0-15 of 48 only)": part(LAYER + "mlp.down_proj.weight", np.s_[:, :16], 2),
    "(row of tokens 101-102 of 256 only)": part("model.embed_tokens.weight", np.s_[101:103], 2),
    "forward: wrong: the loss of step 1": loss(1, 1.5),
    "forward: right": loss(2, 1.5),
    "first wrong loss: step 2": loss(2, 1.5),
    "first wrong norm: step 2": step(2, grad_norm=5.0),
    "norm: that of step 1 is wrong, although every gradient is right": step(1, grad_norm=5.0),
    "only losses deviate": step(1, loss=lambda s: s["loss"] + 1e-8),
    "fp32's rounding": scaled(["proj"], 1 + 1e-7),
    "20 times what A's own gradients give": moved(lambda n, w: 20 if "norm" in n else 1),
    "as before it: rows 16-31 of 32": moved(lambda n, w: (np.indices(w.shape)[0] < len(w) // 2) * 1.0),
    "router's bias: not finite": moved(lambda n, w: math.nan if BIAS in n else 1),
    "first wrong: model.layers.1.mlp.shared_experts.up_proj.weight": scaled(["layers.1.mlp.shared_experts.up"], 2),
}


@pytest.mark.parametrize("words", FACTS)
def test_fact(reference, words):
    name = DEEPSEEK if re.search("router|shared", words) else GQA
    assert words in "\n".join(facts.facts(edited(reference(name), FACTS[words])))


def test_a_loss_within_its_bound_is_not_called_right_and_fp32s_rounding_has_no_place(reference):
    c = edited(reference("gqa fp32"), computed("RMSNorm: x / (rms + eps)"))
    assert facts.facts(c)[0].startswith("forward: within the bound (the loss of step 1, by 4.")
    for edits in computed("RoPE: cos and sin in fp32"), scaled(["proj"], 1 + 1e-7):
        lines = facts.facts(edited(reference(GQA), edits))
        assert len(lines) == 1 and "compute RoPE's tables, norms, softmax or the loss in fp32?" in lines[0]


# ---- the doctor: each fault of rules.py, planted, is named, and nothing else
# The models of docs/references have these values, or two key/value heads and four query heads.
UNSEEN = (
    "RoPE: base 10000|RMSNorm: eps 1e-05|RoPE: scaling of frequencies ignored|experts: weights of a token sum to 1|"
    r"tensor parallelism \([48] ranks\): (no f|gradients of q's).*|tensor parallelism: gradients of [48] copies.*"
)


@pytest.mark.parametrize("fault", in_turn(REPLAYS, 16))
def test_replay_is_named(reference, fault):
    for name in [f"{name} fp64" for name in references.REFERENCES] + [BALANCED]:
        c = edited(reference(name), computed(fault))
        if not c.problems and (c.forward_wrong() or any(d.wrong for d in c.gradients)):
            assert named(c) == [fault]
            return
    assert re.fullmatch(UNSEEN, fault), "no reference shows it"


def test_update_is_named(reference):
    run, same = reference("clipped fp64"), set()
    for i, (fault, change) in enumerate(rules.updates(edited(run, {})).items()):
        optimizer = replays.planted(replays.settings(run), change)
        after = optimizer and optimizer.step(run.initial.all(), run.gradients.all(), run.steps[0].lr)
        c = edited(run, {"after_step_1": after} if after else {})
        if not c.differences():
            same.add(fault)
        elif i in in_turn(range(100)):
            assert named(c) == [fault]
    assert same == {"clipping by the norm that A reports, which is not its gradients'"}
    assert named(edited(run, part(SOME, (0, 5), math.nan), 1.0)) == []
    uneven = moved(lambda n, w: 1 + 0.01 * np.cos(np.arange(w.size)).reshape(w.shape))
    assert [named(edited(run, uneven, bound)) for bound in (None, 0.0)] == [[], []]


def test_what_lasts_is_named(reference):
    base = reference(GQA)
    run = doctor.Doctor(edited(base, {}))
    assert run.why_not() is None
    for fault in in_turn(rules.LATER):
        numbers = list(run.trained(**rules.LATER[fault]))
        entries = zip(numbers[::2], numbers[1::2])
        steps = {i: {"loss": loss, "grad_norm": norm} for i, (loss, norm) in enumerate(entries)}
        c = edited(base, {"json": {"steps": steps}} if numbers else loss(2, 1.5), tolerance=1e-8)
        assert not any(d.wrong for d in c.losses if d.name == "step 1")
        assert named(c) == ([fault] if numbers else [])  # none: the reference has this


HALF = computed(weights=lambda w: w * np.outer(np.arange(8) < 4, 2))
MEANS = computed(weights=lambda w: w * np.repeat(w.sum() / w.reshape(4, -1).sum(1) / 4, 2)[:, None])
ROTATED = "context parallelism (2 ranks): positions begin at 0 on each"
GROUPED = "grouped heads: mean over query heads instead of their sum"
CONTEXT = "first wrong activation: model.layers.0.self_attn.context, samples"
COUNTS = "weights of targets, 1 is right"
NAMES = [  # (reference, edits, how the one name begins that is named, what is said beside it)
    (GQA, scaled([""], 4), "all 30 are 4 x the reference's, nothing else: a sum for a mean", ""),
    (GQA, {"gradients": lambda run: replays.settings(run).clipped(run.gradients.all())}, "all 30", "after clipping"),
    (GQA, {"json": {"steps": {i: {"loss": lambda s: float(np.float32(s["loss"]))} for i in range(6)}}}, "", ""),
    (GQA, loss(3, 1.5), "", "no known fault explains A's numbers"),
    (GQA, computed(ROTATED, seen=lambda n, x: x), ROTATED, f"{CONTEXT} 0-7 of 8, positions 16-31 of 0-31"),
    (GQA, computed(ROTATED, seen=lambda n, x: x[:4]), ROTATED, f"{CONTEXT} 0-3 of 4, positions 16-31 of 0-31"),
    (GQA, computed(GROUPED, seen=lambda n, x: x[:2]), GROUPED, ": 33 are right, those of the first 2 of 8 samples"),
    (GQA, computed(GROUPED, seen=lambda n, x: x[:, :1]), GROUPED, "activations: none could be compared"),
    (GQA, computed(GROUPED, seen=lambda n, x: x[:, n == "lm_head" :]), GROUPED, ": 32 are right; 1 could not be"),
    (GQA, HALF, "only samples 0-3 of 8 count, 2 times", COUNTS),
    (GQA, {"gradients": lambda run: HALF(run)["gradients"]}, "only samples 0-3 of 8 count", "A's loss is right"),
    (GQA, computed(weights=lambda w: w * np.linspace(0.5, 1.5, w.size).reshape(w.shape)), "", COUNTS),
    ("tied fp64", computed(weights=lambda w: w * np.outer(np.arange(8) > 5, 1)), "only samples 6-7 of 8", COUNTS),
    (MASKED, MEANS, "mean of means: each of 4 parts of the batch", COUNTS),
    (MASKED, computed(weights=np.ones_like), "the mask of targets is ignored", COUNTS),
    (MASKED, computed(weights=lambda w: np.pad(w, ((0, 0), (1, 0)))[:, :-1]), "the mask of targets is late", COUNTS),
    (DEEPSEEK, moved(lambda n, w: BIAS not in n), "biases of routers are not moved", ""),
    (DEEPSEEK, moved(lambda n, w: -1 if BIAS in n else 1), "biases of routers are moved towards the load", ""),
    (DEEPSEEK, moved(lambda n, w: 10 if BIAS in n else 1), "biases of routers are moved by 10 x the rate", ""),
    (DEEPSEEK, moved(lambda n, w: -1 if f"layers.1.{BIAS}" in n else 1), "", ""),
    ("deepseek fp32", each(lambda n, x: x + 0.1 * (BIAS in n), "after_step_1"), "biases of routers are moved, and", ""),
]


@pytest.mark.parametrize("name, edits, begin, said", in_turn(NAMES, 2))
def test_one_is_named(reference, name, edits, begin, said):
    c = edited(reference(name), edits)
    report = doctor.report(c)
    names = re.findall(PATTERN, report)
    assert len(names) == 1 and names[0].startswith(begin) if begin else names == []
    assert said in report and (said or COUNTS not in report), report
    assert "deepseek" not in name or [said.split(":")[0] for said in c.differences()] == ["router's bias after step 1"]


def test_routers_biases(reference):
    base = reference(DEEPSEEK)
    files = {"initial": base.initial.all(), "after_step_1": base.after_step_1.all()}
    biases = sorted(filter(comparison.is_router_bias, files["initial"]))
    assert len(biases) == 2 and not set(biases) & set(base.gradients.tensors)
    drifted = {file: {n: w + 64 * (n in biases) for n, w in files[file].items()} for file in files}
    far = altered(base, drifted, to="far")  # beyond a move
    assert edited(far, {}).differences() == []
    c = edited(far, moved(lambda n, w: int(n not in biases)), 0.5)
    assert [d.name for d in c.biases if d.wrong] == biases
    for file, tensors in files.items():
        c = edited(base, {file: {n: w for n, w in tensors.items() if n != biases[0]}})
        assert len(c.differences()) == 1 and biases[0] in c.differences()[0] and facts.facts(c) != []


def test_program(reference, run):
    """build/bin/compare as its user meets it."""
    base = reference("gqa fp32")
    a, b = (pathlib.Path(each.folder) for each in (altered(base, scaled([""], 2)), base))
    run("compare", b, b).says("the runs agree within 5e-06", where="out")
    done = run("compare", a, b, "--diagnose", code=1)
    done.says("DIFFER", "all 30 are 2 x", "explains A's numbers", where="out")
    run.refused("compare", "a", says="required: B")
    run.refused("compare", "nowhere b", says="nowhere/reference.json")
    run.refused("compare", "a b --tolerance 2", says="--tolerance")
    run.refused("compare", "a b --stepz", says="--stepz")
