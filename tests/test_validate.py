"""docs/compare.py and its doctor. Only this catches: a verdict, a place or a name of a fault that is wrong; references
that are not what docs/references.py makes; a NumPy Llama that is not the programs' in one of the references' models.
"""

import json
import math
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
SOME = "model.layers.1.mlp.up_proj.weight"
PATTERN = r"explains A's numbers to rounding: (.*)"


class Bench:
    """Folders in which runs are made and altered."""

    def __init__(self, programs, work):
        self.programs, self.work = programs, work

    def reference(self, name, dtype="fp64", *more):
        """One of docs/references.py's, made once."""
        out = self.work / "-".join([dtype, *more]).replace("/", "_")
        if not (out / name).exists():
            out.mkdir(exist_ok=True)
            references.make(self.programs, out, name, dtype, more)
        return out / name

    def altered(self, base, change=None, files=None, dtype="F64", to="altered"):
        """A copy of a run: change(reference.json), files {file: {name: values} or a function of them}."""
        folder = self.work / to
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        if change:
            content = json.loads((folder / "reference.json").read_text())
            content = change(content) or content
            (folder / "reference.json").write_text(json.dumps(content))
        for file, tensors in (files or {}).items():
            tensors = tensors(getattr(Run(str(base)), file).all()) if callable(tensors) else tensors
            write_safetensors(folder / f"{file}.safetensors", tensors, dtype)
        return folder

    def compared(self, base, change=None, files=None, tolerance=None, dtype="F64", swapped=False):
        pair = [self.altered(base, change, files, dtype), base]
        return compared(*(pair[::-1] if swapped else pair), tolerance)

    def planted(self, base, loss, gradients, dtype="F64", **more):
        """Compared with a copy that has this loss and these gradients in step 1."""
        change = step(1, loss=loss, grad_norm=norm_of(gradients))
        return self.compared(base, change, {"gradients": gradients, **more}, dtype=dtype)


@pytest.fixture(scope="module")
def bench(binaries, tmp_path_factory):
    np.seterr(all="ignore")
    folder = tmp_path_factory.mktemp("validate")
    yield Bench(binaries, folder)
    shutil.rmtree(folder)


def compared(a, b, tolerance=None):
    return comparison.Comparison(str(a), str(b), tolerance)


def agrees(c):
    return not c.differences()


def kinds(c):
    return [line.split(":")[0] for line in c.differences()]


def named(c):
    return re.findall(PATTERN, doctor.report(c))


def step(number, **values):
    """A change of reference.json: values, or functions of the old ones."""

    def change(content):
        entry = content["steps"][number - 1]
        entry.update({key: value(entry[key]) if callable(value) else value for key, value in values.items()})

    return change


def flags(**values):
    return lambda content: content["flags"].update({key.replace("_", "-"): value for key, value in values.items()})


def scaled(names, factor, file="gradients"):
    return {file: lambda t: {n: x * (factor if any(each in n for each in names) else 1) for n, x in t.items()}}


def noise(change, file):
    return {file: lambda t: {n: change(x, np.cos(np.arange(x.size)).reshape(x.shape)) for n, x in t.items()}}


def part(name, at, value, file="gradients"):
    """value: a factor, or a function of one element."""

    def altered(tensors):
        tensors[name][at] = value(tensors[name][at]) if callable(value) else tensors[name][at] * value
        return tensors

    return {file: altered}


def model_of(run, fault=lambda m: {}):
    return replays.planted(replays.model_of(run, run.initial.all()), fault)


# ---- the equations
ROUTERS = (
    "--qk-norm on --router-normalize off --dense-layers 1",  # Qwen3-MoE
    "--aux-loss 0.5 --router-z-loss 0.3",
    "--capacity-factor 0.8 --aux-loss 0.2 --top-k 3",
    "--router sigmoid --qk-norm on --shared-experts 1",  # DeepSeek-V3's, as dots.llm1 has it
    "--router sigmoid --qk-norm on --shared-experts 2 --dense-layers 1 --experts 8 --expert-groups 4 --top-groups 2 "
    "--top-k 3 --router-scale 2.5 --router-bias-rate 0.0625 --aux-loss 0.5 --router-z-loss 0.3",
    "--router sigmoid --router-normalize off --qk-norm on --shared-experts 1 --capacity-factor 0.8",
)
MODELS = [*references.REFERENCES] + [f"experts {flags}" for flags in ROUTERS]


@pytest.mark.parametrize("kind", MODELS[:1] + in_turn(MODELS[1:]))
def test_numpy_against_01_single_gpu(bench, kind):
    name, *more = kind.split()
    run = Run(str(bench.reference(name, "fp64", *more)))
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
def test_stored_references_are_what_the_command_makes(bench, name):
    assert compared(ROOT / "docs/references" / name, bench.reference(name, "fp32")).differences() == []


# ---- the verdict
VERDICTS = {  # of gqa in fp32, altered: (change of reference.json, files, tolerance, whether the runs agree)
    "a copy": (None, None, None, True),
    "loss within": (step(3, loss=lambda x: x * (1 + 1e-6)), None, None, True),
    "loss beyond": (step(3, loss=lambda x: x * (1 + 1e-5)), None, None, False),
    "loss of step 5": (step(5, loss=lambda x: x * 1.5), None, None, True),
    "norm": (step(4, grad_norm=lambda x: x * 1.1), None, None, False),
    "no norm": (step(2, grad_norm=None), None, None, False),
    "no loss": (step(2, loss=None), None, None, False),
    "lr": (step(2, lr=lambda x: x * 7), None, None, False),
    "lr within": (step(2, lr=lambda x: x * (1 + 1e-7)), None, None, True),
    "tokens": (step(2, tokens=lambda x: x[:-1] + [x[-1][:-1] + [0]]), None, 1.0, False),
    "a NaN in gradients": (None, part(SOME, (0, 5), math.nan), 1.0, False),
    "a NaN in weights": (None, part(SOME, (0, 5), math.nan, "after_step_1"), 1.0, False),
    "another bit": (None, part(SOME, (0, 0), lambda w: np.nextafter(*np.float32([w, 1])), "initial"), 1.0, False),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(bench, case, swapped):
    change, files, tolerance, right = VERDICTS[case]
    c = bench.compared(bench.reference("gqa", "fp32"), change, files, tolerance, "F32", swapped)
    assert agrees(c) == right, c.differences()
    assert "gradients" not in (files or {}) or c.gradients[0].name == SOME


def test_what_a_difference_is(bench):
    base = bench.reference("gqa", "fp32")
    c = bench.compared(base, files=part(SOME, (0, 5), lambda g: g - math.copysign(1e-3, g)), dtype="F32")
    assert kinds(c) == ["gradient", "weight after step 1"] and c.gradients[0].name == SOME
    assert abs(c.gradients[0].relative * c.gradients[0].size / 1e-3 - 1) <= 1e-3
    micro = compared(bench.reference("gqa", "fp32", "--micro-batch", "2"), base)
    assert agrees(micro) and micro.gradients[0].relative > 0
    other = compared(bench.reference("gqa", "fp32", "--seed", "2"), base, 1.0)
    assert not other.same_tokens and not agrees(other)
    exact = bench.reference("gqa")
    c = compared(base, exact)  # the less exact dtype's tolerance
    assert c.tolerance == 5e-6 and agrees(c)
    noisy = noise(lambda g, waves: g * (1 + 1e-7 * waves), "gradients")
    c = bench.compared(exact, files=noisy)
    assert not agrees(c) and "fp32's rounding" in facts.facts(c)[0]
    assert agrees(bench.compared(exact, files=noisy, tolerance=5e-6))

    def fewer(content):
        content["steps"] = content["steps"][:1]
        content["flags"]["eps"], content["model"]["rope_theta"] = "1e-3", 5e5

    c = bench.compared(base, fewer)
    assert agrees(c) and len(c.contradictions) == 2 and len(c.not_checked) == 2
    for ignored in (0, 1):
        targets = [sample[1:] for sample in Run(str(base)).steps[0].tokens]
        targets[0][0] = -1 if ignored else targets[0][0]
        assert agrees(bench.compared(base, step(1, targets=targets))) == (not ignored)


@pytest.mark.parametrize(
    "key, value",
    [("version", 4), ("version", "2"), ("dtype", "fp16"), ("steps", []), ("steps", {}), ("flags", 7), ("steps", [{}])],
)
def test_reference_json_is_refused(bench, key, value):
    with pytest.raises(UsageError, match="^[^\n]*reference.json[^\n]*$"):
        bench.compared(bench.reference("gqa", "fp32"), lambda content: {**content, key: value})


def test_files_names_and_shapes(bench):
    base = bench.reference("gqa", "fp32")

    def without(file, **more):
        folder = bench.altered(base, lambda content: {**content, **more})
        (folder / f"{file}.safetensors").unlink()
        return folder

    for file in ("gradients", "initial"):
        with pytest.raises(UsageError, match=rf"{file}\.safetensors: cannot be read"):
            compared(without(file), base)
    for pair in ((without("after_step_1"), base), (base, without("after_step_1"))):
        assert compared(*pair, 1.0).differences()[0].endswith("after_step_1.safetensors is missing")
    first = without("after_step_1", version=1)
    assert agrees(compared(first, first))
    files = {"gradients": {"lm_head.weight": np.zeros((32, 256)), "new": np.zeros(2)}}
    problems = bench.compared(base, files=files, dtype="F32", tolerance=1.0).problems
    assert len([p for p in problems if "gradients" in p]) == len(Run(str(base)).gradients.tensors) + 1
    assert any('"lm_head.weight" is (32, 256)' in p for p in problems)
    wrapped = {"gradients": lambda t: {f"module.{name}": g for name, g in t.items()}}
    assert 'strip "module."' in bench.compared(base, files=wrapped, dtype="F32").problems[0]


@pytest.mark.parametrize(
    "lr, number, factor, right",
    [("3e-3", 2, 1e-12, True), ("3e-3", 2, 1e-9, False), ("3e-3", 5, 1e-9, False), ("1e-2", 3, 1e-9, True)],
)
def test_fp64_checks_later_steps_of_gentle_runs(bench, lr, number, factor, right):
    base = bench.altered(bench.reference("gqa"), flags(lr=lr, eps="1e-8"), to="gentle")
    assert agrees(bench.compared(base, step(number, loss=lambda x: x * (1 + factor)))) == right


def test_hidden_settings(bench):
    """Runs that state B's settings and used others."""
    base = bench.reference("gqa", "fp32", "--steps", "1")
    for flag, value, stated in (("weight-decay", "0.05", "0.1"), ("clip", "0", "0.5"), ("eps", "1e-6", "1e-5")):
        run = bench.reference("gqa", "fp32", "--steps", "1", f"--{flag}", value)
        assert kinds(compared(bench.altered(run, flags(**{flag: stated})), base)) == ["weight after step 1"]


def test_an_element_that_rounding_turns_round_explains_its_weight_and_only_that(bench):
    base = bench.reference("gqa", "fp64", "--steps", "1")
    run, tiny = Run(str(base)), 1e-9
    o, lr = replays.settings(run), run.steps[0].lr
    factor = comparison.clip_factor(run.steps[0].grad_norm, o.clip)

    def with_gradient(used, stored):
        w = run.initial.read(SOME)[0, 5]
        after = w - lr * (used / (abs(used) + o.eps / factor) + o.decay * w)
        return {**part(SOME, (0, 5), lambda _: stored), **part(SOME, (0, 5), lambda _: after, "after_step_1")}

    other = bench.altered(base, files=with_gradient(tiny, tiny), to="tiny")
    for stored, right in ((-tiny, []), (tiny, [SOME])):
        c = compared(bench.altered(base, files=with_gradient(-tiny, stored)), other)
        assert [d.name for d in c.updates if d.wrong] == right


def test_bf16_is_judged_by_its_own_rounding(bench):
    for name in ("gqa", "qk-norm", "tied"):
        base = bench.reference(name, "bf16")
        c = bench.compared(base)
        assert agrees(c) and c.exact is not None
        for times, right in ((2.0, True), (2.9, True), (3.2, False)):
            rng, made = np.random.default_rng(1), {}
            for n, g in c.exact.items():
                of_b, noise = comparison.norm(c.b.gradients.read(n) - g), rng.standard_normal(g.shape)
                size = max(of_b, 2.0**-9 * comparison.norm(g)) * times
                made[n] = g + noise * (size / comparison.norm(noise))
            wrong = [d for d in bench.compared(base, files={"gradients": made}, dtype="F32").gradients if d.wrong]
            assert (not wrong) == right
    for fault in ("RoPE: base 500000", "attention: scaled by 1 / D"):
        run = Run(str(bench.reference("gqa", "bf16")))
        loss, gradients = model_of(run, rules.FORWARD[fault]).loss_and_gradients(*run.steps[0].arrays())
        c = bench.compared(bench.reference("gqa", "bf16"), files={"gradients": gradients}, dtype="F32")
        assert any(d.wrong for d in c.gradients)


def test_bf16_updates_of_master_weights(bench):
    base = bench.reference("clipped", "bf16")
    run = bench.reference("clipped", "bf16", "--weight-decay", "0")
    c = compared(bench.altered(run, flags(weight_decay="0.3")), base)
    assert kinds(c)[:1] == ["weight after step 1"] and "no weight decay" in " or ".join(named(c))
    # Clipping in bf16 rounds; a thirtieth of the update is not that. Without master weights some are a unit off.
    c, o = bench.compared(base), replays.settings(Run(str(base)))
    stored = {name: replays.rounded(c.b.gradients.read(name), "bf16") for name in c.names[1]}

    def updated(error):
        made = {}
        for name, g in stored.items():
            w = c.a.initial.read(name)
            s = g * comparison.clip_factor(c.a.steps[0].grad_norm, o.clip) * (1 + error)
            u = s / (np.abs(s) + o.eps) + (o.decay if w.ndim == 2 else 0) * w
            made[name] = replays.rounded(w - c.b.steps[0].lr * u, "bf16")
        return {"gradients": stored, "after_step_1": made}

    for error, right in ((0.0, True), (2.0**-8, True), (2.0**-5, False)):
        assert any(d.wrong for d in bench.compared(base, files=updated(error), dtype="BF16").updates) != right
    files = updated(0.0)
    for n, w in files["after_step_1"].items():
        w += comparison.spacing("bf16", w) * (np.arange(w.size).reshape(w.shape) % 7 == 3)
    said = facts.facts(bench.compared(base, files=files, dtype="BF16"))
    assert any("does A update fp32 master weights?" in line for line in said)


# ---- facts
LAYER = "model.layers.2."
FACTS = {  # of gqa in fp64: what is said, of a change of reference.json or of files
    "all 30 are 4 x the reference's, nothing else": scaled([""], 4),
    "all 30 are 1/3 x the reference's, nothing else": scaled([""], 1 / 3),
    "all 30 are sqrt(2) x the reference's, nothing else": scaled([""], math.sqrt(2)),
    "the 12 wrong ones are 2 x": scaled(["q_proj", "k_proj", "layernorm"], 2),
    "wrong: all norms, nothing else": scaled(["norm"], 2),
    "wrong: every k_proj": scaled(["k_proj"], 2),
    "wrong: layer 1": scaled(["layers.1."], 2),
    "wrong: all but the norms": scaled(["proj", "embed", "head"], 3),
    "right down to model.layers.1.self_attn.o_proj.weight; first wrong: model.layers.1.self_attn.v_proj.weight": scaled(
        ["layers.1.self_attn.v_proj", "layers.0.self_attn.q_proj"], 2
    ),
    "right after the first: model.layers.1.self_attn.k_proj.weight": scaled(["layers.1.self_attn.v_proj"], 2),
    "wrong from the first gradient on": scaled(["lm_head"], 2),
    "(head 1 of 2 only)": part(LAYER + "self_attn.v_proj.weight", np.s_[8:], 2),
    "(heads 0-1 of 4 only, which are 0)": part(LAYER + "self_attn.q_proj.weight", np.s_[:16], 0),
    "(head 3 of 4 only)": part(LAYER + "self_attn.o_proj.weight", np.s_[:, 24:], 2),
    "(rows 24-47 of 48 only)": part(LAYER + "mlp.up_proj.weight", np.s_[24:], 2),
    "(columns 0-15 of 48 only)": part(LAYER + "mlp.down_proj.weight", np.s_[:, :16], 2),
    "(row of tokens 101-102 of 256 only)": part("model.embed_tokens.weight", np.s_[101:103], 2),
    "forward: wrong: the loss of step 1": step(1, loss=5.0),
    "forward: right": step(2, loss=5.0),
    "first wrong loss: step 2": step(2, loss=5.0),
    "first wrong norm: step 2": step(2, grad_norm=5.0),
    "norm: that of step 1 is wrong, although every gradient is right": step(1, grad_norm=5.0),
    "only losses deviate": step(1, loss=lambda x: x + 1e-8),
}


@pytest.mark.parametrize("words", FACTS)
def test_fact(bench, words):
    change = FACTS[words]
    pair = (change, None) if callable(change) else (None, change)
    said = facts.facts(bench.compared(bench.reference("gqa"), *pair))
    assert any(words in line for line in said), said


def test_facts_of_updates(bench):
    base = bench.reference("gqa")
    run = Run(str(base))
    before, after = run.initial.all(), run.after_step_1.all()
    faster = {n: before[n] + (20 if "norm" in n else 1) * (w - before[n]) for n, w in after.items()}
    half = {n: np.r_[w[: len(w) // 2], before[n][len(w) // 2 :]] for n, w in after.items()}
    for weights, words in ((faster, "20 times what A's own gradients give"), (half, "as before it: rows 16-31 of 32")):
        assert words in "\n".join(facts.facts(bench.compared(base, files={"after_step_1": weights})))
    assert facts.facts(bench.compared(base)) == []


# ---- the doctor: each fault of rules.py, planted, is named, and nothing else
# The models of docs/references have these values, or two key/value heads and four query heads.
UNSEEN = (
    "RoPE: base 10000|RMSNorm: eps 1e-05|RoPE: scaling of frequencies ignored|experts: weights of a token sum to 1|"
    r"tensor parallelism \([48] ranks\): (no f|gradients of q's).*|tensor parallelism: gradients of [48] copies.*"
)
REPLAYS = {**rules.FORWARD, **rules.BACKWARD}


@pytest.mark.parametrize("fault", in_turn(REPLAYS))
def test_replay_is_named(bench, fault):
    """In the first reference that shows it."""
    for name in references.REFERENCES:
        run = Run(str(bench.reference(name)))
        model = model_of(run, REPLAYS[fault])
        loss, gradients = model.loss_and_gradients(*run.steps[0].arrays()) if model else (0, {})
        off = [comparison.deviation(n, g, run.gradients.read(n)).relative for n, g in gradients.items()]
        if set(gradients) == set(run.gradients.tensors) and not max(off) <= 1e-10:
            assert named(bench.planted(run.folder, loss, gradients)) == [fault]
            return
    assert re.fullmatch(UNSEEN, fault), "no reference shows it"


def test_update_is_named(bench):
    base = bench.reference("clipped")
    run, same = Run(str(base)), set()
    for i, (fault, change) in enumerate(rules.updates(bench.compared(base)).items()):
        optimizer = replays.planted(replays.settings(run), change)
        after = optimizer and optimizer.step(run.initial.all(), run.gradients.all(), run.steps[0].lr)
        c = bench.compared(base, files={"after_step_1": after} if after else None)
        if agrees(c):
            same.add(fault)
        elif i in in_turn(range(100)):
            assert named(c) == [fault]
    assert same == {"clipping by the norm that A reports, which is not its gradients'"}
    noisy = noise(lambda w, waves: w + 1e-6 * waves, "after_step_1")
    assert [named(bench.compared(base, files=noisy, tolerance=bound)) for bound in (None, 0.0)] == [[], []]


def test_what_lasts_is_named(bench):
    base = bench.reference("gqa")
    run = doctor.Doctor(bench.compared(base))
    assert run.why_not() is None
    for fault in in_turn(rules.LATER):
        numbers = list(run.trained(**rules.LATER[fault]))

        def change(content):
            for i, entry in enumerate(content["steps"]):
                entry["loss"], entry["grad_norm"] = numbers[2 * i : 2 * i + 2]

        c = bench.compared(base, change if numbers else step(2, loss=3.0), tolerance=1e-8)
        assert not any(d.wrong for d in c.losses if d.name == "step 1")
        assert named(c) == ([fault] if numbers else [])  # none: the reference has this
    assert named(bench.compared(base, step(3, loss=3.0))) == []


WEIGHTS = {  # of targets: (reference, how often each counts, of those that should)
    "only samples 0-3 of 8 count, 2 times": ("gqa", lambda right: right * np.repeat([2.0, 0.0], 4)[:, None]),
    "only samples 6-7 of 8 count, 1 times": ("tied", lambda right: right * (np.arange(8) > 5)[:, None]),
    "mean of means: each of 4 parts of the batch": (
        "masked",
        lambda right: right * np.repeat(right.sum() / 4 / right.reshape(4, -1).sum(axis=1), 2)[:, None],
    ),
    "the mask of targets is ignored": ("masked", lambda right: np.ones(right.shape)),
    "the mask of targets is late by one position": ("masked", lambda right: np.pad(right, ((0, 0), (1, 0)))[:, :-1]),
    "": ("gqa", lambda right: right * np.linspace(0.5, 1.5, right.size).reshape(right.shape)),
}


@pytest.mark.parametrize("expected", WEIGHTS)
def test_weights_of_targets_are_named(bench, expected):
    name, weights = WEIGHTS[expected]
    run = Run(str(bench.reference(name)))
    tokens, targets = run.steps[0].arrays()
    of_targets = weights(targets >= 0) / (targets >= 0).sum()
    model = model_of(run, lambda m: {"target_weights": lambda targets: of_targets})
    loss, gradients = model.loss_and_gradients(tokens, np.array(run.steps[0].tokens)[:, 1:])
    said = doctor.report(bench.planted(run.folder, loss, gradients))
    names = re.findall(PATTERN, said)
    assert "weights of targets, 1 is right" in said
    assert len(names) == 1 and names[0].startswith(expected) if expected else names == []
    if expected.startswith("only samples 0-3"):  # a right loss beside them
        said = doctor.report(bench.compared(run.folder, files={"gradients": gradients}))
        assert "A's loss is right" in said and "only samples 0-3" in said


def test_routers_biases(bench):
    base = bench.reference("deepseek", "fp32", "--router-bias-rate", "0.01")
    before, after = Run(str(base)).initial.all(), Run(str(base)).after_step_1.all()
    biases = {name for name in before if comparison.is_router_bias(name)}
    one = min(biases)
    assert len(biases) == 2 and biases.isdisjoint(Run(str(base)).gradients.tensors)
    assert agrees(bench.compared(base))
    for multiple, of, names in (
        (0, biases, ["biases of routers are not moved"]),
        (-1, biases, ["biases of routers are moved towards the load, not against it"]),
        (10, biases, ["biases of routers are moved by 10 x the rate"]),
        (-1, {one}, []),
    ):
        moved = {n: before[n] + multiple * (after[n] - before[n]) if n in of else w for n, w in after.items()}
        c = bench.compared(base, files={"after_step_1": moved}, dtype="F32")
        assert kinds(c) == ["router's bias after step 1"] and named(c) == names
    def drifted(weights):  # far beyond a move
        return {n: w + 64 * (n in biases) for n, w in weights.items()}

    start, still = drifted(before), {**after, **{n: before[n] for n in biases}}
    far = bench.altered(base, files={"initial": start, "after_step_1": drifted(after)}, dtype="F32", to="far")
    assert agrees(bench.compared(far))
    c = bench.compared(far, files={"after_step_1": drifted(still)}, dtype="F32", tolerance=0.5)
    assert [d.name for d in c.biases if d.wrong] == sorted(biases)
    c = bench.compared(bench.reference("deepseek", "fp32"), files={"after_step_1": after}, dtype="F32")
    assert named(c) == ["biases of routers are moved, and the reference's are not"]
    for file, tensors in (("initial", before), ("after_step_1", after)):
        c = bench.compared(base, files={file: {n: w for n, w in tensors.items() if n != one}}, dtype="F32")
        assert len(c.differences()) == 1 and one in c.differences()[0] and facts.facts(c) is not None
    nan = {"after_step_1": {**after, one: after[one] * math.nan}}
    c = bench.compared(base, files=nan, dtype="F32", tolerance=1.0)
    assert not agrees(c) and "router's bias: not finite" in facts.facts(c)
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    said = facts.facts(bench.compared(base, files=scaled([shared], 2), dtype="F32"))
    assert any(f"first wrong: {shared}" in line for line in said)


def test_activations(bench):
    base = bench.reference("gqa")
    run = Run(str(base))
    wrong = model_of(run, rules.FORWARD["context parallelism (2 ranks): positions begin at 0 on each"])
    right = model_of(run)
    wrong.activations, right.activations = {}, {}
    loss, gradients = wrong.loss_and_gradients(*run.steps[0].arrays())
    right.loss_and_gradients(*run.steps[0].arrays())
    count = len(right.activations)
    for samples in (8, 4):  # 4: of a micro-batch
        some = {n: x[:samples] for n, x in wrong.activations.items()}
        said = doctor.report(bench.planted(base, loss, gradients, activations=some))
        first = "first wrong activation: model.layers.0.self_attn.context, "
        assert first + f"samples 0-{samples - 1} of {samples}, positions 16-31 of 0-31" in said
    for activations, words in (  # of a fault that activations do not show
        ({n: x[:2] for n, x in right.activations.items()}, f"{count} are right, those of the first 2 of 8 samples"),
        ({n: x[:, :16] for n, x in right.activations.items() if x.ndim == 3}, "none could be compared"),
        ({**right.activations, "model.rotary": np.zeros((8, 32, 2))}, f"{count} are right; 1 could not be compared"),
    ):
        files = {**scaled([""], 2), "activations": activations}
        assert f"activations: {words}" in doctor.report(bench.compared(base, files=files))


def test_what_is_said_of_right_numbers_is_true(bench):
    base = bench.reference("gqa")
    run = Run(str(base))

    def rounded(content):
        for entry in content["steps"]:
            entry["loss"] = float(np.float32(entry["loss"]))

    said = doctor.report(bench.compared(base, rounded))
    assert "weights of targets" not in said and "no known fault" in said
    assert named(bench.compared(base, files=part(SOME, (0, 5), math.nan), tolerance=1.0)) == []
    factor = comparison.clip_factor(run.steps[0].grad_norm, replays.settings(run).clip)
    assert factor < 1
    for times, cause in ((factor, "recorded after clipping"), (4, "a sum for a mean")):
        names = named(bench.compared(base, files=scaled([""], times)))
        assert len(names) == 1 and cause in names[0]


def test_program(bench, run):
    """build/bin/compare as its user meets it."""
    base = bench.reference("gqa", "fp32")
    run("compare", base, base).says("the runs agree within 5e-06", where="out")
    done = run("compare", bench.altered(base, files=scaled([""], 2), dtype="F32"), base, "--diagnose", code=1)
    done.says("DIFFER", "all 30 are 2 x", "explains A's numbers", where="out")
    run.refused("compare", says="A is required")
    run.refused("compare", "a", says="B is required")
    run.refused("compare", "nowhere b", says="nowhere/reference.json")
    run.refused("compare", "a b --tolerance 2", says="--tolerance")
    run.refused("compare", "a b --stepz", says="--stepz")
