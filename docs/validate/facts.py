"""What a comparison shows about the place of a difference, in the order in which a training step is computed: forward,
backward, update, the next steps. Only what the numbers say; no cause is guessed (that is doctor.py's).
"""

import fractions
import functools
import math
import re

import numpy as np

from . import rules
from .comparison import UPDATE_TOLERANCES, deviation, norm, relative
from .equations import settings
from .replays import planted

# Within a block, in the order of the backward pass; parameters of one product stand together.
PARTS = (
    ("mlp.down_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.gate",),
    ("post_attention_layernorm",),
    ("self_attn.o_proj",),
    ("self_attn.v_proj",),
    ("self_attn.q_norm", "self_attn.k_norm"),
    ("self_attn.q_proj", "self_attn.k_proj"),
    ("input_layernorm",),
)


def as_mlp(name):
    """Of an expert's parameter: that of an MLP which it stands for."""
    for theirs, mine in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = re.sub(rf"\.experts\.(\d+)\.{theirs}\.", rf".experts.\1.{mine}.", name)
    return re.sub(r"\.(experts\.\d+|shared_experts)\.", ".", name.replace(".block_sparse_moe.", ".mlp."))


def place(name):
    """Of a parameter in the backward pass, first the head; None: not a parameter of these models."""
    fixed = {"lm_head.weight": (-2,), "model.norm.weight": (-1,), "model.embed_tokens.weight": (1, 0)}
    if name in fixed:
        return fixed[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(?:weight|bias)", as_mlp(name))
    for i, parts in enumerate(PARTS):
        if match and match[2] in parts:
            return 0, -int(match[1]), i
    return None


def kind(name):
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    return re.sub(r"^model\.(layers\.\d+\.(self_attn\.|mlp\.|block_sparse_moe\.)?)?|\.weight$", "", name)


def expert(name):
    """The number of the expert whose parameter it is; None: of none."""
    match = re.search(r"\.experts\.(\d+)\.", name)
    return int(match[1]) if match else None


def listed(names):
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def in_words(names, every):
    """A set of parameters: "all norms", "every k_proj", or some of them by name."""
    names, every = set(names), set(every)
    if names == every:
        return f"all {len(every)}"
    kinds = {kind(name) for name in names}
    if names == {name for name in every if kind(name) in kinds}:
        norms = {kind(name) for name in every if "norm" in name}
        if kinds == norms:
            return "all norms, nothing else"
        if kinds == {kind(name) for name in every} - norms:
            return "all but the norms"
        return ("every " if len(names) > len(kinds) else "") + ", ".join(sorted(kinds))
    experts = {expert(name) for name in names}
    if None not in experts and names == {name for name in every if expert(name) in experts}:
        return f"all of expert{'s' * (len(experts) > 1)} {ranges(experts)}"
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    if layers and names == {n for n in every if n.startswith("model.layers.") and n.split(".")[2] in layers}:
        return f"layer{'s' * (len(layers) > 1)} {ranges(map(int, layers))}"
    return listed(sorted(names, key=lambda name: (place(name) or (2,), name)))


def ranges(numbers):
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [f"{low}-{high}" if high > low else str(low) for low, high in parts]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more ranges" if len(shown) > 6 else "")


def multiple_in_words(x):
    """4, 1/3, sqrt(2), or six digits."""
    fraction = fractions.Fraction(x).limit_denominator(64)
    if fraction and abs(x / float(fraction) - 1) <= 1e-5:
        return str(fraction)
    root = fractions.Fraction(x * x).limit_denominator(64)
    if x > 0 and root and abs(x * x / float(root) - 1) <= 1e-5:
        return f"sqrt({root})"
    return f"{x:.6g}"


def in_groups(values):
    """[2, 2, 0, 0] -> "0-1: 2, 2-3: 0"."""
    text, begin = [], 0
    for i in range(1, len(values) + 1):
        if i == len(values) or abs(values[i] - values[begin]) > 1e-3 * max(1, abs(values[begin])):
            number = multiple_in_words(values[begin]) if abs(values[begin]) > 1e-9 else "0"
            text.append(f"{begin}{f'-{i - 1}' if i - 1 > begin else ''}: {number}")
            begin = i
    return ", ".join(text[:8]) + (" ..." if len(text) > 8 else "")


def norms(x, axis, size=1):
    """The norm of each `size` rows (axis 0) or columns (axis 1)."""
    x = x if axis == 0 else np.swapaxes(x, 0, 1)
    return np.sqrt(np.sum((x * x).reshape(len(x) // size, -1), axis=1))


def where(name, a, b, bound, config):
    """Heads, rows, columns or tokens that are wrong, if not all are; "" otherwise."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = kind(name).split(".")[0]
    if a.ndim < 2 or not np.isfinite(a).all():
        return ""
    views = [("row", 0, 1), ("column", 1, 1)]
    if part in ("q_proj", "k_proj", "v_proj"):
        views = [("head", 0, dim)] + views
    elif part == "o_proj":
        views = [("head", 1, dim)] + views
    elif part in ("embed_tokens", "lm_head"):
        views[0] = ("row of token", 0, 1)
    for what, axis, size in views:
        if a.shape[axis] % size:
            continue
        left, whole = norms(a - b, axis, size), norms(b, axis, size)
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong = np.flatnonzero(~((left == 0) | (left / whole <= bound)))
        if 0 < len(wrong) < len(left):
            zero = not norms(a, axis, size)[wrong].any()
            return f"{what + 's' * (len(wrong) > 1)} {ranges(wrong)} of {len(left)} only" + (
                ", which are 0" if zero else ""
            )
    return ""


def backward(c):
    order = sorted((place(d.name), d.name, d) for d in c.gradients if place(d.name) is not None)
    wrong = [i for i, (_, _, d) in enumerate(order) if d.wrong]
    if not wrong:
        return []
    first = wrong[0]
    names = [name for at, name, d in order[first:] if at == order[first][0] and d.wrong]
    line = (
        f"right down to {order[first - 1][1]}; first wrong: "
        if first
        else "wrong from the first gradient on, or before it: "
    )
    line += listed(names)
    d = order[first][2]
    try:
        spot = where(d.name, c.a.gradients.read(d.name), c.b.gradients.read(d.name), d.bound, c.b.model)
    except (KeyError, ZeroDivisionError, ValueError):
        spot = ""
    right = [name for _, name, d in order[first:] if not d.wrong]
    lines = ["backward: " + line + (f" ({spot})" if spot else "")]
    everything = in_words([d.name for _, _, d in order if d.wrong], [name for _, name, _ in order])
    lines.append(f"gradients: wrong: {everything}" + (f"; right after the first: {listed(right)}" if right else ""))
    return lines


def multiples(c):
    """Whether all gradients that are wrong are multiples of B's: (in words, the multiple if it is one, else None)."""
    wrong = [d for d in c.gradients if d.wrong]
    if not wrong or not all(d.rest <= (d.bound if c.exact else c.tolerance) for d in wrong):
        return None, None
    which = f"all {len(wrong)}" if len(wrong) == len(c.gradients) else f"the {len(wrong)} wrong ones"
    least, most = min(d.multiple for d in wrong), max(d.multiple for d in wrong)
    if most - least <= 4 * c.tolerance * abs(most):
        return f"{which} are {multiple_in_words(most)} x the reference's, nothing else", most
    several = f"{multiple_in_words(least)} to {multiple_in_words(most)}"
    return f"{which} are multiples of the reference's, {several}, nothing else", None


# ---- the update of step 1, from A's own gradients
def explained_updates(c):
    """The names of rules.updates() that give A's weights, the best first; none if B's own settings do."""
    names = [name for name in c.names[1] if name in c.names[0] and name in c.a.after_step_1.tensors]
    weights, gradients, after = (
        {name: file.read(name) for name in names} for file in (c.a.initial, c.a.gradients, c.a.after_step_1)
    )
    sizes = {d.name: d.size for d in c.updates}

    def rest(fault):
        """How far A's weights are, in bounds; None: no fault."""
        optimizer = planted(settings(c.b), fault)
        expected, worst = optimizer and optimizer.step(weights, gradients, c.b.steps[0].lr), 0.0
        for name in names if expected else ():
            rounding = c.rounding(after[name], expected[name]) + c.rounding_of_clipped(name, settings(c.b))
            left = norm(np.maximum(np.abs(after[name] - expected[name]) - rounding, 0))
            deviates = relative(left, sizes.get(name, norm(expected[name] - weights[name]))) / c.update_bound
            worst = max(worst, deviates if math.isfinite(deviates) else math.inf)
        return worst if expected else math.inf

    if rest(lambda optimizer: {}) <= 1:
        return []
    rests = sorted((rest(fault), name) for name, fault in rules.updates(c).items())
    return [name for each, name in rests if each <= 1]


def near_updates(c, wrong):
    """[a line] if the wrong updates are one multiple of what they should be, or some units in the last place off."""

    def expected(names):
        """(weight before, after, what A's own gradients and B's settings give) of each."""
        for name in names:
            yield c.a.initial.read(name), c.a.after_step_1.read(name), c.expected_update(c.a, name, settings(c.b))

    found = [deviation("", after - w, right - w) for w, after, right in expected(wrong)]
    least, most = min(d.multiple for d in found), max(d.multiple for d in found)
    if all(d.rest <= c.update_bound for d in found) and most - least <= c.update_bound * abs(most):
        return [f"update: {multiple_in_words(most)} times what A's own gradients give"]
    every = expected(d.name for d in c.updates) if c.masters else ()
    close = [(np.abs(after - right) <= 4 * c.rounding(after, right)).all() for _, after, right in every]
    if close and all(close):
        return ["update: within two units in the last place of bf16: does A update fp32 master weights?"]
    return []


@functools.lru_cache(maxsize=1)  # facts() and the doctor ask of one comparison
def update(c):
    """Lines about the weights after step 1, and the variants that explain them."""
    if not c.updates or not c.check_updates or settings(c.b) is None or not any(d.wrong for d in c.updates):
        return [], []
    if c.b.flag("mup", 0) > 0 or [d for d in c.weights if d.wrong]:
        return ["update: wrong"], []
    wrong = [d.name for d in c.updates if d.wrong]
    lines = [f"update: wrong: {in_words(wrong, [d.name for d in c.updates])}"]
    unchanged = []
    for name in wrong:
        same = c.a.after_step_1.read(name) == c.a.initial.read(name)
        rows = same.reshape(len(same), -1).all(axis=1)
        if rows.any() and not rows.all():
            unchanged.append(f"rows {ranges(np.flatnonzero(rows))} of {len(rows)} of {name}")
    if unchanged:
        lines.append(f"update: bitwise as before it: {listed(unchanged)}")
    exact = explained_updates(c)
    if exact:
        lines.append("update: exactly what A's own gradients give with " + ", or with ".join(exact))
    else:
        lines.append("update: none of the known variants of AdamW and clipping explains it")
        lines += near_updates(c, wrong)
    return lines, exact


def router_biases(c):
    """Lines about the biases of routers after step 1, and names of what explains them."""
    if not any(d.wrong for d in c.biases) or any(d.wrong for d in c.weights):
        return [], []
    a, b = (
        np.concatenate([run.after_step_1.read(d.name) - run.initial.read(d.name) for d in c.biases])
        for run in (c.a, c.b)
    )
    lines, d = [f"router's bias: wrong: {listed(d.name for d in c.biases if d.wrong)}"], deviation("", a, b)
    if not np.isfinite(a).all():
        return lines + ["router's bias: not finite"], []
    for explains, name in (
        (not b.any(), "biases of routers are moved, and the reference's are not"),
        (not a.any(), "biases of routers are not moved"),
        (norm(a + b) <= 1e-3 * norm(b), "biases of routers are moved towards the load, not against it"),
        (d.rest <= 1e-3, f"biases of routers are moved by {d.multiple:.4g} x the rate"),
    ):
        if explains:
            return lines, [name]
    return lines + [f"router's bias: {int((np.sign(a) != np.sign(b)).sum())} of {len(a)} experts move another way"], []


def first_wrong(deviations):
    steps = [int(d.name.split()[1]) for d in deviations if d.wrong]
    return min(steps) if steps else None


def islands(c):
    """fp64 with parts in fp32: everything within fp32's bound, and not within fp64's."""
    if c.dtype != "fp64" or c.problems or any(d.wrong for d in c.weights):
        return []
    kinds = (c.gradients, 1), (c.updates, UPDATE_TOLERANCES), (c.norms, 1), (c.losses, 1)
    worst = max((d.relative / tolerances for each, tolerances in kinds for d in each), default=0)
    if not c.tolerance < worst <= 1e-6:
        return []
    if not any(d.wrong for each, _ in kinds[:3] for d in each):
        return [f"only losses deviate, by {worst:.2g}: are they recorded in fp32?"]
    return [
        f"all within {worst:.2g}: as far as fp32's rounding goes. Does A compute RoPE's tables, norms, softmax or "
        "the loss in fp32? --tolerance 5e-6 compares it as an fp32 run"
    ]


def facts(c):
    """One line each; none if the runs agree."""
    if not c.differences():
        return []
    lines = islands(c)
    step_1 = [d for d in c.losses if d.name == "step 1"]
    if step_1:
        lines.append(
            f"forward: wrong: the loss of step 1, by {step_1[0].relative:.3g}"
            if step_1[0].wrong
            else "forward: right (the loss of step 1)"
        )
    lines += backward(c) + [f"gradients: {words}" for words in multiples(c)[:1] if words]
    if not any(d.wrong for d in c.gradients) and any(d.wrong and d.name == "step 1" for d in c.norms):
        lines.append("norm: that of step 1 is wrong, although every gradient is right")
    lines += update(c)[0] + router_biases(c)[0]
    later = [d.name for d in c.updates_2 if d.wrong]
    if later and not any(d.wrong for d in c.updates):
        lines.append(
            f"update of step 2, from A's own gradients: wrong: {in_words(later, [d.name for d in c.updates_2])}"
        )
    for what, deviations in (("loss", c.losses), ("norm", c.norms)):
        if first_wrong(deviations):
            lines.append(f"first wrong {what}: step {first_wrong(deviations)}")
    return lines
