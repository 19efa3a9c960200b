"""What a comparison shows about the place of a difference, in the order in which a training step is computed: forward,
backward, update, the next steps. Only what the numbers say; no cause is guessed (that is doctor.py's).
"""

import fractions
import functools
import math
import re

import numpy as np

from .comparison import UPDATE_TOLERANCES, deviation, norm, relative, settings
from .llama import clip_factor

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
    return listed(sorted(names, key=lambda name: place(name) or (2,)))


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
    """(which gradients, the least multiple, the largest) if all that are wrong are multiples of B's; else None."""
    wrong = [d for d in c.gradients if d.wrong]
    if not wrong or not all(d.rest <= (d.bound if c.exact else c.tolerance) for d in wrong):
        return None
    which = f"all {len(wrong)}" if len(wrong) == len(c.gradients) else f"the {len(wrong)} wrong ones"
    return which, min(d.multiple for d in wrong), max(d.multiple for d in wrong)


def one_multiple(c):
    """In words, if it is the same for all: "all 39 are 4 x the reference's, nothing else"; else None."""
    found = multiples(c)
    if not found or not found[2] - found[1] <= 4 * c.tolerance * abs(found[2]):
        return None
    return f"{found[0]} are {multiple_in_words(found[2])} x the reference's, nothing else"


def multiples_in_words(c):
    if one_multiple(c):
        return [f"gradients: {one_multiple(c)}"]
    if not multiples(c):
        return []
    which, least, most = multiples(c)
    return [
        f"gradients: {which} are multiples of the reference's, {multiple_in_words(least)} to "
        f"{multiple_in_words(most)}, nothing else"
    ]


# ---- the update of step 1, from A's own gradients
def variants(c, names):
    """{a description: function of (name, weight before, gradient) -> weight after}; first B's own settings."""
    a, b = c.a, c.b
    o = settings(b)
    lr, per_step = b.steps[0].lr, a.steps[0].grad_norm
    norms = {name: norm(a.gradients.read(name)) for name in names}
    total = math.sqrt(sum(n * n for n in norms.values()))

    def update(
        eps=o.eps,
        clip=o.clip,
        decay=o.decay,
        lr=lr,
        inside=False,
        correct=True,
        l2=False,
        coupled=True,
        decays=lambda name, w: w.ndim == 2,
        factor=None,
        direction=None,
    ):
        def after(name, w, g):
            scale = factor(name, g) if factor else clip_factor(total, clip)
            g = g * scale
            of_w = decay if decays(name, w) else 0.0
            if l2:
                g, of_w = g + of_w * w, 0.0
            m, v = (g, g * g) if correct else ((1 - o.beta1) * g, (1 - o.beta2) * g * g)
            with np.errstate(divide="ignore", invalid="ignore"):
                u = direction(g) if direction else m / (np.sqrt(v + eps) if inside else np.sqrt(v) + eps)
            return w - lr * np.where(np.isfinite(u), u, 0) - (lr if coupled else 1) * of_w * w

        return after

    def every(name, w):
        return True

    found = {
        "as the reference's": update(),
        "eps inside the square root": update(inside=True),
        "no bias correction": update(correct=False),
        "weight decay in the gradient (Adam with L2)": update(l2=True),
        "weight decay of norms and biases too": update(decays=every),
        "no weight decay": update(decay=0.0),
        "no weight decay of the embedding": update(decays=lambda name, w: w.ndim == 2 and "embed" not in name),
        "no weight decay of embedding and head": update(
            decays=lambda name, w: w.ndim == 2 and "embed" not in name and "lm_head" not in name
        ),
        "weight decay of the norms only": update(decays=lambda name, w: w.ndim != 2),
        "weight decay not multiplied by lr": update(coupled=False),
        "no clipping": update(clip=0.0),
        "weight decay 0.01, torch's default, of everything": update(decay=0.01, decays=every),
        "weight decay 0.01, torch's default": update(decay=0.01),
        "clipping of each parameter by its own norm": update(factor=lambda name, g: clip_factor(norms[name], o.clip)),
        "clipping of each element": update(factor=lambda name, g: np.clip(g, -o.clip, o.clip) / np.where(g, g, 1)),
        "clipping by the norm that A reports, which is not its gradients'": update(
            factor=lambda name, g: clip_factor(per_step, o.clip)
        ),
        "plain SGD": update(direction=lambda g: g),
        "the sign of the gradient": update(direction=np.sign),
        "no update at all": lambda name, w, g: w,
    }
    for eps in (1e-5, 1e-6, 1e-8, 1e-12, 1e-15):
        if abs(eps - o.eps) > 1e-3 * o.eps:
            found[f"eps {eps:g}"] = update(eps=eps)
    for key in ("min-lr", "lr"):
        rate = b.flag(key)
        if math.isfinite(rate) and abs(rate - lr) > 1e-6 * lr:
            found[f"the learning rate {rate:g} (--{key}) instead of {lr:g}"] = update(lr=rate)
    for shards in (2, 4, 8):

        def by_shard(name, g, shards=shards, cache={}):
            if shards not in cache:  # of each rank's rows of every parameter
                cache[shards] = [
                    math.sqrt(sum(norm(part) ** 2 for part in parts))
                    for parts in zip(*(np.array_split(a.gradients.read(n), shards) for n in names))
                ]
            factors = [
                np.full(len(part), clip_factor(n, o.clip))
                for part, n in zip(np.array_split(np.arange(len(g)), shards), cache[shards])
            ]
            return np.concatenate(factors).reshape((-1,) + (1,) * (g.ndim - 1))

        found[f"clipping by the norm of each rank's shard of rows ({shards} ranks)"] = update(factor=by_shard)
    return found


def explained_updates(c):
    """(rest, description) of B's own settings, and of the variants, best first: how far A's weights are, in bounds."""
    names = [name for name in c.names[1] if name in c.names[0] and name in c.a.after_step_1.tensors]
    tensors = [(name, c.a.initial.read(name), c.a.gradients.read(name), c.a.after_step_1.read(name)) for name in names]
    rests = []
    for description, after in variants(c, names).items():
        worst = 0.0
        for name, w, g, stored in tensors:
            expected = after(name, w, g)
            rounding = c.rounding(stored, expected) + c.rounding_of_clipped(name, settings(c.b))
            left = np.maximum(np.abs(stored - expected) - rounding, 0)
            size = next((d.size for d in c.updates if d.name == name), norm(expected - w))
            worst = max(worst, relative(norm(left), size) / c.update_bound)
        rests.append((worst if math.isfinite(worst) else math.inf, description))
    return rests[0], sorted(rests[1:])


def expected_updates(c, names):
    """(name, weight before, after, what A's own gradients and B's settings give) of each."""
    for name in names:
        yield name, c.a.initial.read(name), c.a.after_step_1.read(name), c.expected_update(c.a, name, settings(c.b))


def multiple_of_update(c, wrong):
    """[a line] if the wrong updates are one multiple of what they should be."""
    found = [
        deviation(name, after - w, expected - w, 0) for name, w, after, expected in expected_updates(c, wrong)
    ]
    least, most = min(d.multiple for d in found), max(d.multiple for d in found)
    if not all(d.rest <= c.update_bound for d in found) or not most - least <= c.update_bound * abs(most):
        return []
    return [f"update: {multiple_in_words(most)} times what A's own gradients give"]


def without_masters(c):
    """[a line] if bf16 weights are near the right ones, by units in the last place."""
    if not c.masters:
        return []
    for name, _, after, expected in expected_updates(c, [d.name for d in c.updates]):
        if not (np.abs(after - expected) <= 4 * c.rounding(after, expected)).all():
            return []
    return ["update: within two units in the last place of bf16: does A update fp32 master weights?"]


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
    first, others = explained_updates(c)
    exact = [description for rest, description in others if rest <= 1] if first[0] > 1 else []
    if exact:
        lines.append("update: exactly what A's own gradients give with " + ", or with ".join(exact))
    else:
        lines.append("update: none of the known variants of AdamW and clipping explains it")
        lines += multiple_of_update(c, wrong) or without_masters(c)
    return lines, exact


def router_biases(c):
    """Lines about the biases of routers after step 1, and names of what explains them."""
    if not any(d.wrong for d in c.biases) or any(d.wrong for d in c.weights):
        return [], []
    a, b = (
        np.concatenate([run.after_step_1.read(d.name) - run.initial.read(d.name) for d in c.biases])
        for run in (c.a, c.b)
    )
    lines = [f"router's bias: wrong: {listed(d.name for d in c.biases if d.wrong)}"]
    multiple, rest = (d := deviation("", a, b)).multiple, d.rest
    if not np.isfinite(a).all():
        return lines + ["router's bias: not finite"], []
    if not b.any():
        return lines, ["biases of routers are moved, and the reference's are not"]
    if not a.any():
        return lines, ["biases of routers are not moved"]
    if norm(a + b) <= 1e-3 * norm(b):
        return lines, ["biases of routers are moved towards the load, not against it"]
    if rest <= 1e-3:
        return lines, [f"biases of routers are moved by {multiple:.4g} x the rate"]
    return lines + [f"router's bias: {int((np.sign(a) != np.sign(b)).sum())} of {len(a)} experts move another way"], []


def first_wrong(deviations):
    steps = [int(d.name.split()[1]) for d in deviations if d.wrong]
    return min(steps) if steps else None


def islands(c):
    """fp64 with parts in fp32: everything within fp32's bound, and not within fp64's."""
    if c.dtype != "fp64" or c.problems or any(d.wrong for d in c.weights):
        return []
    worst = max(
        (
            d.relative / (UPDATE_TOLERANCES if d in c.updates else 1)
            for each in (c.gradients, c.updates, c.losses, c.norms)
            for d in each
        ),
        default=0,
    )
    others = [d.wrong for each in (c.gradients, c.updates, c.norms) for d in each]
    if c.tolerance < worst <= 1e-6 and not any(others):
        return [f"only losses deviate, by {worst:.2g}: are they recorded in fp32?"]
    if c.tolerance < worst <= 1e-6:
        return [
            f"all within {worst:.2g}: as far as fp32's rounding goes. Does A compute RoPE's tables, norms, softmax or "
            "the loss in fp32? --tolerance 5e-6 compares it as an fp32 run"
        ]
    return []


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
    lines += backward(c) + multiples_in_words(c)
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
