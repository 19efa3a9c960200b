"""What a comparison shows about the place of a difference, in the order in which a training step is computed: forward,
backward, update, the next steps. Only what the numbers say; no cause is guessed (that is doctor.py's).
"""

import fractions
import functools
import itertools
import math
import re

import numpy as np

from . import rules
from .comparison import UPDATE_TOLERANCES, beyond, deviation, norm, relative
from .replays import planted, settings

MLP = r"(mlp|block_sparse_moe)\.(experts\.\d+\.|shared_experts\.)?"
# Within a block, in the order of the backward pass; parameters of one product stand together.
PARTS = (
    MLP + "(down_proj|w2)",
    MLP + "(gate_proj|up_proj|w1|w3)",
    r"(mlp|block_sparse_moe)\.gate",
    r"post_attention_layernorm",
    r"self_attn\.o_proj",
    r"self_attn\.v_proj",
    r"self_attn\.[qk]_norm",
    r"self_attn\.[qk]_proj",
    r"input_layernorm",
)


def place(name):
    """Of a parameter in the backward pass, first the head; None: not a parameter of these models."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    for i, part in enumerate(PARTS):
        if match and re.fullmatch(part, match[2]):
            return 0, -int(match[1]), i
    return {"lm_head.weight": (-2,), "model.norm.weight": (-1,), "model.embed_tokens.weight": (1, 0)}.get(name)


def kind(name):
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    return re.sub(r"^model\.(layers\.\d+\.(self_attn\.|mlp\.|block_sparse_moe\.)?)?|\.weight$", "", name)


def listed(names):
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def in_words(names, every):
    """A set of parameters: "all norms", "every k_proj", or some of them by name."""
    names, every = set(names), set(every)

    def kinds_of(key):
        """The kinds of these names, if every parameter of these kinds is among them."""
        kinds = {key(name) for name in names}
        return kinds if None not in kinds and names == {name for name in every if key(name) in kinds} else set()

    def number(pattern, name):
        match = re.search(pattern, name)
        return int(match[1]) if match else None

    if names == every:
        return f"all {len(every)}"
    kinds, norms = kinds_of(kind), {kind(name) for name in every if "norm" in name}
    if kinds and kinds == norms:
        return "all norms, nothing else"
    if kinds and kinds == {kind(name) for name in every} - norms:
        return "all but the norms"
    if kinds:
        return ("every " if len(names) > len(kinds) else "") + ", ".join(sorted(kinds))
    for what, pattern in (("all of expert", r"\.experts\.(\d+)\."), ("layer", r"^model\.layers\.(\d+)\.")):
        numbers = kinds_of(functools.partial(number, pattern))
        if numbers:
            return f"{what}{'s' * (len(numbers) > 1)} {ranges(numbers)}"
    return listed(sorted(names, key=lambda name: (place(name) or (2,), name)))


def ranges(numbers):
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in runs]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more ranges" if len(shown) > 6 else "")


def multiple_in_words(x):
    """4, 1/3, sqrt(2), or six digits."""
    for number, words in ((x, "{}"), (x * x if x > 0 else 0, "sqrt({})")):
        fraction = fractions.Fraction(number).limit_denominator(64)
        if fraction and abs(number / float(fraction) - 1) <= 1e-5:
            return words.format(fraction)
    return f"{x:.6g}"


def in_groups(values):
    """[2, 2, 0, 0] -> "0-1: 2, 2-3: 0"."""
    text, begin = [], 0
    for i in range(1, len(values) + 1):
        if i == len(values) or abs(values[i] - values[begin]) > 1e-3 * max(1, abs(values[begin])):
            number = multiple_in_words(values[begin]) if abs(values[begin]) > 1e-9 else "0"
            text.append(f"{ranges(range(begin, i))}: {number}")
            begin = i
    return ", ".join(text[:8]) + (" ..." if len(text) > 8 else "")


def norms(x, axis, size):
    """The norm of each `size` rows (axis 0) or columns (axis 1)."""
    x = x if axis == 0 else np.swapaxes(x, 0, 1)
    return np.sqrt(np.sum((x * x).reshape(len(x) // size, -1), axis=1))


def where(c, d):
    """Heads, rows, columns or tokens that are wrong, in parentheses, if not all are; "" otherwise."""
    a, b, part = c.a.gradients.read(d.name), c.b.gradients.read(d.name), kind(d.name).split(".")[0]
    rows = "row of token" if part in ("embed_tokens", "lm_head") else "row"
    views, heads = [(rows, 0, 1), ("column", 1, 1)], {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    try:
        dim = c.b.model.get("head_dim") or c.b.model["hidden_size"] // c.b.model["num_attention_heads"]
    except (KeyError, ZeroDivisionError):
        return ""
    if part in heads:
        views.insert(0, ("head", heads[part], dim))
    for what, axis, size in views if a.ndim > 1 and np.isfinite(a).all() else ():
        if a.shape[axis] % size:
            continue
        left, whole = norms(a - b, axis, size), norms(b, axis, size)
        wrong = np.flatnonzero(~((left == 0) | (left / whole <= d.bound)))
        if 0 < len(wrong) < len(left):
            zero = "" if norms(a, axis, size)[wrong].any() else ", which are 0"
            return f" ({what}{'s' * (len(wrong) > 1)} {ranges(wrong)} of {len(left)} only{zero})"
    return ""


def backward(c):
    order = sorted(((place(d.name), d.name, d) for d in c.gradients if place(d.name)), key=lambda each: each[:2])
    first = next((i for i, (_, _, d) in enumerate(order) if d.wrong), None)
    if first is None:
        return []
    names = [name for at, name, d in order[first:] if at == order[first][0] and d.wrong]
    line = f"right down to {order[first - 1][1]}; first wrong: "
    line = line if first else "wrong from the first gradient on, or before it: "
    right = [name for _, name, d in order[first:] if not d.wrong]
    everything = in_words([name for _, name, d in order if d.wrong], [name for _, name, _ in order])
    return [
        f"backward: {line}{listed(names)}{where(c, order[first][2])}",
        f"gradients: wrong: {everything}" + (f"; right after the first: {listed(right)}" if right else ""),
    ]


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
        """How far A's weights are; infinite: no fault, or no number."""
        optimizer = planted(settings(c.b), fault)
        expected, rests = optimizer and optimizer.step(weights, gradients, c.b.steps[0].lr), []
        for name in names if expected else ():
            rounding = c.rounding(after[name], expected[name]) + c.rounding_of_clipped(name)
            left = beyond(after[name], expected[name], rounding)
            rests.append(relative(left, sizes.get(name, norm(expected[name] - weights[name]))))
        return max(rests, default=0.0) if expected and all(map(math.isfinite, rests)) else math.inf

    if rest(lambda optimizer: {}) <= c.update_bound:
        return []
    rests = sorted((rest(fault), name) for name, fault in rules.updates(c).items())
    return [name for each, name in rests if each <= c.update_bound]


def near_updates(c, wrong):
    """[a line] if the wrong updates are one multiple of what they should be, or some units in the last place off."""

    def expected(name):
        """(weight before, after, what A's own gradients and B's settings give)."""
        return c.a.initial.read(name), c.a.after_step_1.read(name), c.expected_update(c.a, name)

    found = [deviation("", after - w, right - w) for w, after, right in map(expected, wrong)]
    least, most = min(d.multiple for d in found), max(d.multiple for d in found)
    if all(d.rest <= c.update_bound for d in found) and most - least <= c.update_bound * abs(most):
        return [f"update: {multiple_in_words(most)} times what A's own gradients give"]
    every = [expected(d.name) for d in c.updates if c.masters]
    if every and all((np.abs(after - right) <= 4 * c.rounding(after, right)).all() for _, after, right in every):
        return ["update: within two units in the last place of bf16: does A update fp32 master weights?"]
    return []


@functools.lru_cache(maxsize=1)  # facts() and the doctor ask of one comparison
def update(c):
    """Lines about the weights after step 1, and the variants that explain them."""
    if not c.updates or not c.check_updates or c.stated is None or not any(d.wrong for d in c.updates):
        return [], []
    if c.b.flag("mup", 0) > 0 or [d for d in c.weights if d.wrong]:
        return ["update: wrong"], []
    wrong = [d.name for d in c.updates if d.wrong]
    lines = [f"update: wrong: {in_words(wrong, [d.name for d in c.updates])}"]
    same = {name: c.a.after_step_1.read(name) == c.a.initial.read(name) for name in wrong}
    rows = {name: x.reshape(len(x), -1).all(axis=1) for name, x in same.items()}
    some = {name: x for name, x in rows.items() if x.any() and not x.all()}
    unchanged = [f"rows {ranges(np.flatnonzero(x))} of {len(x)} of {name}" for name, x in some.items()]
    lines += [f"update: bitwise as before it: {listed(unchanged)}"] if unchanged else []
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
    if rounding := islands(c):
        return rounding  # which has no place
    step_1, later = next(d for d in c.losses if d.name == "step 1"), [d.name for d in c.updates_2 if d.wrong]
    by = f"the loss of step 1, by {step_1.relative:.3g}"
    near = f"within the bound ({by} of {step_1.bound:g})" if step_1.relative > step_1.bound / 10 else None
    forward = f"wrong: {by}" if step_1.wrong else near or "right (the loss of step 1)"
    lines = [f"forward: {forward}", *backward(c)]
    lines += [f"gradients: {words}" for words in multiples(c)[:1] if words]
    if not any(d.wrong for d in c.gradients) and any(d.wrong and d.name == "step 1" for d in c.norms):
        lines.append("norm: that of step 1 is wrong, although every gradient is right")
    lines += update(c)[0] + router_biases(c)[0]
    if later and not any(d.wrong for d in c.updates):
        words = in_words(later, [d.name for d in c.updates_2])
        lines.append(f"update of step 2, from A's own gradients: wrong: {words}")
    for what, deviations in (("loss", c.losses), ("norm", c.norms)):
        steps = [int(d.name.split()[1]) for d in deviations if d.wrong]
        lines += [f"first wrong {what}: step {min(steps)}"] if steps else []
    return lines
