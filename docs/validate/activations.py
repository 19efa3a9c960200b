"""Which recorded activation is the first wrong one in the order of the forward pass, and where in it."""

import math

import numpy as np

from .comparison import norm, relative
from .facts import ranges


def first_wrong(stored, model, bound):
    """In words. stored: a run's file. model: has computed the right ones, from the same weights and tokens.

    Of a micro-batch or a data-parallel rank only the first samples are recorded: these are compared.
    """
    compared, few, batch = 0, None, len(model.activations["model.embed_tokens"])
    for name, right in model.activations.items():
        if name not in stored.tensors or not stored.shape(name):
            continue
        right = right[: stored.shape(name)[0]]
        if math.prod(stored.shape(name)) != right.size:
            continue
        compared, few = compared + 1, len(right) if len(right) < batch else few
        a = stored.read(name).reshape(right.shape)
        if not relative(norm(a - right), norm(right)) <= bound:
            return f"first wrong activation: {name}, {where(name, a, right, bound, model.dim)}"
    left = len(stored.tensors) - compared
    text = f"activations: {compared} are right" if compared else "activations: none could be compared"
    text += f", those of the first {few} of {batch} samples" if few else ""
    if left and compared:
        text += f"; {left} could not be compared"
    return text + (": not (samples, seq_len, width), or of modules that Llama has not" if left else "")


def where(name, a, right, bound, dim):
    if right.ndim == 4:  # of heads
        a, right = a.swapaxes(1, 2), right.swapaxes(1, 2)
    error = np.sqrt(np.sum((a - right) ** 2, axis=-1))
    wrong = ~(error <= bound * max(norm(right) / math.sqrt(right.size), 1e-300))
    while wrong.ndim > 2:
        wrong = wrong.any(axis=-1)
    text = (
        f"samples {ranges(np.flatnonzero(wrong.any(axis=1)))} of {len(wrong)}, "
        f"positions {ranges(np.flatnonzero(wrong.any(axis=0)))} of 0-{wrong.shape[1] - 1}"
    )
    if name.endswith(("q_proj", "k_proj", "v_proj", "context")) and right.shape[-1] % dim == 0:
        each = np.abs(a - right).reshape(-1, right.shape[-1] // dim, dim).max(axis=(0, 2))
        heads = np.flatnonzero(~(each <= bound * np.abs(right).max()))
        text += f", heads {ranges(heads)} of {len(each)}"
    return text
