"""Which targets counted, and how often: solved from the gradient of the head, which is a sum over the targets, by least
squares. doctor.py tries this first.
"""

import fractions

import numpy as np

from .comparison import norm, relative
from .facts import in_groups, ranges
from .replays import value

SAMPLES = 4096  # targets whose weights are solved for: a system of that size


def rows(doctor):
    """(name, rows): what part of the head's gradient is the head's alone."""
    if not doctor.b.model.get("tie_word_embeddings"):
        return "lm_head.weight", slice(None)
    name = "model.embed_tokens.weight"
    return name, np.setdiff1d(np.arange(len(doctor.weights[name])), doctor.tokens)


def head_is_right(doctor):
    name, of_head = rows(doctor)
    a, right = doctor.measured[name][of_head], doctor.right[1][name][of_head]
    return len(right) > 0 and relative(norm(a - right), norm(right)) <= doctor.bounds[name]


def solved(doctor, targets):
    """(B, T): how often A counts each target, 1 if as it should; None: its head's gradient is right, or no such sum."""
    name, of_head = rows(doctor)
    measured = doctor.measured[name][of_head]
    if targets.size > SAMPLES or head_is_right(doctor) or len(measured) == 0:
        return None
    model = doctor.model()
    n = model.forward(doctor.tokens)
    _, d = model.loss_of_logits(model.head(n).x, targets)
    d = d.reshape(targets.size, -1)[:, of_head] * model.logit_scale
    h = n.x.reshape(targets.size, -1)
    gram = (d @ d.T) * (h @ h.T)
    right = np.einsum("tv,ve,te->t", d, measured, h, optimize=True)
    values, vectors = np.linalg.eigh(gram)  # of least norm among those that fit best
    vectors = vectors[:, values > 1e-13 * values[-1]]
    weights = vectors @ ((vectors.T @ right) / values[-vectors.shape[1] :])
    rest = norm((d * weights[:, None]).T @ h - measured)
    if not relative(rest, norm(measured)) <= doctor.bounds[name]:
        return None
    return weights.reshape(targets.shape) * (doctor.reference_targets >= 0).sum()


def explain(doctor):
    """Whether weights of targets explain all gradients; lines and names of them are the doctor's then."""
    targets, right = np.array(doctor.a.steps[0].tokens)[:, 1:], doctor.reference_targets >= 0  # without masks
    weights, of_a = solved(doctor, targets), doctor.a.steps[0].loss
    for candidate, words, name in patterns(weights, right) if weights is not None else ():
        if (candidate == right).all():
            continue
        model = doctor.model(value("target_weights", lambda m: lambda targets: candidate / right.sum()))
        loss, backward = model.loss(doctor.tokens, targets)
        rest = doctor.tried(lambda model: doctor.replay(model, None, backward), model)
        if rest is None or not rest <= 1:
            continue
        doctor.lines.append(f"weights of targets, 1 is right, from the head's gradient: {words}")
        said = "is neither that of these weights nor right" if doctor.c.forward_wrong() else "is right"
        said = "counts the same" if relative(abs(of_a - loss), loss) <= doctor.c.tolerance else said
        doctor.lines.append(f"  they give every gradient to rounding; A's loss {said}")
        doctor.names += [name] if name else []
        return True
    return False


def patterns(w, right):
    """(weights, in words, a name or None), the simplest first. The least squares leave open how equal tokens with equal
    pasts share their weight, so that patterns are made from medians; the caller holds them to all gradients.
    """

    def median(values):
        x = float(np.median(values)) if len(values) else 1.0
        near = float(fractions.Fraction(x).limit_denominator(64))
        return near if abs(near - x) <= 1e-3 * max(1.0, abs(x)) else x

    def medians(w, right):
        """Of each row."""
        return np.array([median(each[counts]) for each, counts in zip(w, right)])

    def means(axis, word, whole, numbers):
        """Each part of the samples or positions is divided by its own number of targets."""
        size = right.shape[axis]
        for parts in (n for n in numbers if size % n == 0):
            counts = right.sum(axis=1 - axis).reshape(parts, -1).sum(axis=1)
            exact = np.repeat(right.sum() / parts / np.maximum(counts, 1), size // parts)
            name = f"mean of means: each of {parts} parts of the {whole} divides by its own number of targets"
            yield np.expand_dims(exact, 1 - axis) * right, f"by {word}: {in_groups(exact)}", name

    for by, edge, word in ((1, 0, "late"), (-1, -1, "early")):
        for first in (True, False):
            moved = np.roll(right, by, axis=1)
            moved[:, edge] = first
            words = f"{(moved & ~right).sum()} count that should not, {(right & ~moved).sum()} do not that should"
            for counted in (right.sum(), moved.sum()):
                yield moved * (right.sum() / counted), words, f"the mask of targets is {word} by one position"
    if not right.all():
        words = f"all of the {(~right).sum()} targets that should not count do"
        for level in (1.0, right.sum() / right.size):
            yield np.full(right.shape, level), words, "the mask of targets is ignored"
    yield from means(0, "sample", "batch", range(2, len(w) + 1))
    values = medians(w, right)
    kept, name = values != 0, None
    if not kept.all() and len(set(values[kept])) == 1:
        name = (
            f"only samples {ranges(np.flatnonzero(kept))} of {len(w)} count, {values[kept][0]:g} times: "
            "others are lost, by data-parallel ranks whose gradients are not reduced or that read the same data, "
            "or by micro-batches that are not accumulated"
        )
    yield values[:, None] * right, f"by sample: {in_groups(values)}", name
    values = medians(w.T, right.T)
    yield values[None, :] * right, f"by position: {in_groups(values)}", None
    yield from means(1, "position", "sequence", (2, 4, 8))
    yield w, f"from {w.min():.3g} to {w.max():.3g}", None
