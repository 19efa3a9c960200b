"""A run's model and optimizer in double precision, and what known faults compute otherwise; rules.py names them.

A fault is a function of a right model (llama.py): the attributes and methods that it replaces, or None if this model
cannot have it. A method that takes the place of another is given the model and the right method first.
"""

import copy
import functools
import math
import re

import numpy as np

from .llama import AdamW, Llama, Muon
from .runs import DIGITS
from .tape import Value

EXACT_FLOPS = 2e11  # up to which exact gradients are computed, in a few seconds: 6 per parameter and token
OTHERS = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


def planted(model, fault):
    """The model with a fault; None if it cannot have it."""
    changes = fault(model)
    if changes is not None:
        vars(model).update(changes)
    return None if changes is None else model


def settings(run):
    """A run's optimizer, as its flags state it; None where they do not."""
    values = [run.flag(key) for key in ("beta1", "beta2", "eps", "weight-decay", "clip")]
    kind = Muon if run.optimizer() == "muon" else AdamW
    return kind(*values) if all(map(math.isfinite, values)) else None


def model_of(run, weights):
    """A run's model, or None: its configuration is not one that llama.py computes."""
    mup, hidden = run.flag("mup", 0), run.model.get("hidden_size", 0)
    balance = ("aux_loss", "router_z_loss", "capacity_factor", "router_bias_rate")
    balance = {name: run.flag(name.replace("_", "-"), 0) for name in balance}
    if balance["aux_loss"] > 0 and run.flags.get("aux-loss-over") == "batch":  # it needs the loads of the step before
        return None
    try:
        scale = mup / hidden if mup > 0 else 1.0
        return Llama(run.model, weights, run.document_token, run.flag("z-loss", 0), scale, balance)
    except (KeyError, TypeError, NotImplementedError, ZeroDivisionError):
        return None


def exact_gradients(run):
    """Those of step 1, from the run's stored weights; None if that is too much or unknown."""
    step, parameters = run.steps[0], sum(math.prod(run.initial.shape(name)) for name in run.initial.tensors)
    if 6 * parameters * sum(map(len, step.targets)) > EXACT_FLOPS or run.flags.get("fp8", "off") != "off":
        return None
    if "num_experts_per_tok" in run.model:  # in double precision some token may choose another expert
        return None
    model = model_of(run, run.initial.all())
    try:
        with np.errstate(all="ignore"):
            return model and model.loss_and_gradients(*step.arrays())[1]
    except (KeyError, ValueError, IndexError):
        return None


def method(name, function, **values):
    """The fault of a method that is this function."""
    return lambda m: {name: functools.partial(function, m, getattr(m, name), **values)}


def value(name, of):
    """The fault of an attribute that is this function of the right model."""
    return lambda m: {name: of(m)}


def never(logit):
    """In place of a logit: no probability, no gradient."""
    return 0 * logit - 1e9, 0 * logit


def rounded(x, dtype):
    """To the nearest number of a dtype."""
    if dtype == "fp32":
        return x.astype(np.float32).astype(np.float64)
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2 ** DIGITS[dtype]) / 2 ** DIGITS[dtype], exponent)


# ---- conventions of the forward pass
def rope_table(m, right, positions, dtype):
    return [rounded(x, dtype) for x in right(positions)]


def rope_angles(m, right, positions, dtype):
    positions, frequencies = rounded(positions * 1.0, dtype), rounded(m.frequencies, dtype)
    angles = rounded(positions[:, None, :, None] * frequencies, dtype)
    return np.cos(angles), np.sin(angles)


def rope_interleaved(m, right, x, sign, which):
    """Pairs (0, 1), (2, 3), ... instead of (0, D/2), (1, D/2 + 1), ..."""
    halves = right(np.concatenate([x[..., 0::2], x[..., 1::2]], axis=3), sign, which)
    return np.stack(np.split(halves, 2, axis=3), axis=4).reshape(x.shape)


def positions(change):
    """change(right positions, "q" or "k", T)."""
    return method("positions", lambda m, right, tokens, which: change(right(tokens, which), which, tokens.shape[1]))


def chunk(length, ranks):
    """Positions of a context-parallel rank."""
    return -(-length // ranks)


def mask(ahead):
    """Query i sees keys up to i + ahead, within its document, and the first itself."""
    return method("visible", lambda m, right, q, k, start: (q + ahead >= k) & (k >= start) | (q == 0) & (k == 0))


def mask_of_chunks(ranks, rule):
    """rule(positions of queries, of keys, of one rank)."""
    return method("visible", lambda m, right, q, k, start: right(q, k, start) & rule(q, k, chunk(len(k), ranks)))


def token_begins_document(m, right, tokens):
    """The document token is the first of the next document, not the last of its own."""
    return np.maximum.accumulate(np.where(tokens == m.document_token, np.arange(tokens.shape[1]), 0), axis=1)


def gelu(m, right, gate):
    phi = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(gate / np.sqrt(2)))
    return gate * phi, phi + gate * np.exp(-gate * gate / 2) / np.sqrt(2 * np.pi)


def gelu_tanh(m, right, gate):
    c, k = np.sqrt(2 / np.pi), 0.044715
    t = np.tanh(c * (gate + k * gate**3))
    return 0.5 * gate * (1 + t), 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * c * (1 + 3 * k * gate * gate)


def gate_and_up_swapped(m, right, name):
    return right(re.sub("gate_proj|up_proj|w1|w3", lambda found: OTHERS[found[0]], name))


def experts(**values):
    """Experts (experts.py) with other values, or with functions of the right ones."""

    def fault(m):
        if not m.experts:
            return None
        altered = copy.copy(m.experts)
        vars(altered).update({key: value(altered) if callable(value) else value for key, value in values.items()})
        return {"experts": altered}

    return fault


def with_balance(m, right, loss):
    """The balancing loss, sum f P, is in the recorded loss, too."""
    return loss + sum(float(np.sum(value.x * gradient())) for value, gradient in m.penalties[::2])


def balance(recorded=False, **values):
    """Experts with another balancing loss."""
    return lambda m: m.experts and {**experts(**values)(m), **(method("recorded", with_balance)(m) if recorded else {})}


def layer_norm(m, right, name, x):
    """The mean is subtracted first."""

    def centred(x):
        return x - x.mean(axis=-1, keepdims=True)

    return right(name, Value(centred(x.x), lambda d: [centred(d)], x))


def eps_outside(m, right, name, x):
    """x / (rms + eps), where eps belongs under the root."""
    w, rms = m.weight(name + ".weight"), np.sqrt(np.mean(x.x * x.x, axis=-1, keepdims=True))
    r = 1 / (rms + m.eps)

    def back(d):
        dn, per = d * w.x, np.divide(r * r, rms, out=np.zeros_like(r), where=rms > 0)
        yield r * dn - x.x * per * np.mean(dn * x.x, axis=-1, keepdims=True)
        yield np.sum(m.own(d, name) * x.x * r, axis=tuple(range(d.ndim - 1)))

    return m.seen(name, Value(x.x * r * w.x, back, x, w))


def no_norm(m, right, name, x, names):
    w = m.weight(name + ".weight")
    return Value(x.x, lambda d: (d, 0 * w.x), x, w) if name.endswith(names) else right(name, x)


def shifted_twice(m, right, tokens, targets):
    """The last of each sample has no target."""
    return np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], axis=1)


# ---- the backward pass of one rank
def times(factor, *places):
    """Of gradients on their way (Llama.passed)."""
    return method("passed", lambda m, right, gradient, at: factor * gradient if at in places else gradient)


def tied_without(name):
    return lambda m: {"own": lambda gradient, layer: 0 * gradient if layer == name else gradient} if m.tied else None


def copied_heads(copies):
    """Tensor parallelism over more ranks than key/value heads: each of `copies` ranks has the weights of one, and keeps
    the gradient by its own query heads; that of their input is summed."""

    def fault(m):
        group, kept = m.heads // m.kv_heads, {}
        if group % copies or any("k_norm" in name for name in m.w):
            return None
        first = np.arange(m.heads) % group * copies < group

        def of_group(gradient, which):
            kept[which] = Llama.of_group(m, gradient * first[:, None, None], which)
            return Llama.of_group(m, gradient, which)

        def own(gradient, name):
            if not name.endswith(("k_proj", "v_proj")):
                return gradient
            mine = kept["v"] if name.endswith("v_proj") else m.rotate(kept["k"], -1, "k")
            return mine.swapaxes(1, 2).reshape(gradient.shape)

        return {"of_group": of_group, "own": own}

    return fault


# ---- parallel ranks
def part(x, axis, ranks, rank=0):
    """Zero outside a rank's part of an axis."""
    inside = np.arange(x.shape[axis]) // (x.shape[axis] // ranks) == rank
    return x * inside.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def no_f(ranks, head_too):
    """Tensor parallelism without f: the gradient of a column-parallel layer's input is each rank's own part."""
    cut = ("o_proj", "down_proj", "head") if head_too else ("o_proj", "down_proj")
    axes = {"o_proj.weight": 1, "down_proj.weight": 1, "lm_head.weight": 0 if head_too else None}  # cut along

    def fault(m):
        if any(n % ranks for n in (m.heads, m.kv_heads, m.config["intermediate_size"])):
            return None

        def sharded(name):
            return "_proj" in name or "lm_head" in name and head_too

        def gradients(back, check=lambda name, gradient: None):
            total = {}
            for rank in range(ranks):
                m.passed = lambda d, at, rank=rank: part(d, 2, ranks, rank) if at.endswith(cut) and d.ndim > 2 else d
                for name, g in back():
                    axis = next((axis for end, axis in axes.items() if name.endswith(end)), None)
                    if sharded(name):
                        total[name] = total.get(name, 0) + (g if axis is None else part(g, axis, ranks, rank))
                    elif rank == 0:
                        check(name, g)
                        total[name] = g
            return total

        return {"gradients": gradients}

    return fault


def first_chunk_only(ranks, times=1, layers=("",)):
    """Context or sequence parallelism without the sum over its ranks: a weight's gradient is that of the first chunk of
    positions, which is counted `times`."""

    def own(m, right, gradient, name):
        axis = gradient.ndim - 2  # positions
        first = np.arange(gradient.shape[axis]) * ranks < gradient.shape[axis]
        return gradient * first[:, None] * times if name.endswith(layers) and gradient.ndim > 2 else gradient

    return method("own", own)


def head_norms_not_summed(m, right, gradient, name, ranks):
    """Tensor parallelism: the gradients of q's and k's norms are those of the first rank's heads."""
    return part(gradient, 1, ranks) if name.endswith(("q_norm", "k_norm")) else gradient


def block_lse(m, right, q, k, v, p, dout, delta, ranks):
    """Ring attention whose backward pass normalises each block of keys by the block's own sum."""
    p, size = p.copy(), chunk(p.shape[3], ranks)
    for first in range(0, p.shape[3], size):
        block = p[..., first : first + size]
        total = block.sum(axis=3, keepdims=True)
        np.divide(block, total, out=block, where=total > 0)
    return right(q, k, v, p, dout, delta)


def keys_not_returned(m, right, q, k, v, p, dout, delta, ranks):
    """Ring attention that loses the gradients of the other ranks' keys and values."""
    rank = np.arange(p.shape[3]) // chunk(p.shape[3], ranks)
    mine = p * (rank[:, None] == rank)
    return right(q, k, v, p, dout, delta)[0], *right(q, k, v, mine, dout, delta)[1:]
