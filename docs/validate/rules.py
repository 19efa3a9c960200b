"""All faults that the doctor knows, by the phase in which they show: a new one is a line here.

FORWARD, BACKWARD: of a Llama (llama.py), replayed in double precision from a run's weights and tokens (replays.py).
updates(): of the weights after step 1, from the run's own gradients. LATER: what lasts from step to step. Each is a
fault as replays.py has them, the last two of an AdamW.
"""

import math

import numpy as np

from . import replays as of
from .experts import sigmoid
from .llama import clip_factor, norm_of, rope_frequencies
from .replays import method, value
from .tape import elementwise

RANKS = (2, 4, 8)
NORMS = ("layernorm", "model.norm")


def frequencies(**config):
    return value("frequencies", lambda m: rope_frequencies({**m.config, **config}))


# ---- a Llama's
FORWARD = {
    "RoPE: scaling of frequencies ignored": frequencies(rope_scaling=None),
    "RoPE: interleaved pairs": method("rotate", of.rope_interleaved),
    "RoPE: frequencies base^(-i / D)": value(
        "frequencies", lambda m: np.sqrt(rope_frequencies({**m.config, "rope_scaling": None}))
    ),
    "RoPE: rotated backwards": of.positions(lambda right, which, length: -right),
    "RoPE: the sine is lost": method("cos_sin", lambda m, right, at: [right(at)[0], 0 * right(at)[1]]),
    "RoPE: k is not rotated": of.positions(lambda right, which, length: right * (which == "q")),
    "RoPE: q is not rotated": of.positions(lambda right, which, length: right * (which == "k")),
    "RoPE: nothing is rotated": of.positions(lambda right, which, length: 0 * right),
    "RoPE: positions of q are one too large": of.positions(lambda right, which, length: right + (which == "q")),
    "documents are ignored: attention sees the others, positions do not restart": value(
        "starts", lambda m: np.zeros_like
    ),
    "documents: attention sees the others, positions restart": method(
        "visible", lambda m, right, query, key, start: query >= key
    ),
    "documents: their token is the next document's first": method("starts", of.token_begins_document),
    "attention: scaled by 1 / D": value("attention_scale", lambda m: 1 / m.dim),
    "attention: not scaled": value("attention_scale", lambda m: 1.0),
    "attention: scaled by 1 / sqrt(hidden)": value("attention_scale", lambda m: m.config["hidden_size"] ** -0.5),
    "attention: the mask sees one token ahead": of.mask(1),
    "attention: no causal mask": of.mask(1 << 30),
    "attention: a token does not see itself": of.mask(-1),
    "attention: windows of one token more": value("window", lambda m: m.window + (m.window > 0)),
    "attention: windows are ignored": value("window", lambda m: 0),
    "attention: windows in all layers": value("layer_types", lambda m: None),
    "attention: sinks are ignored": method(
        "attention",
        lambda m, right, q, k, v, seen, *sinks: right(q, k, v, seen, *(elementwise(s, of.never) for s in sinks)),
    ),
    "grouped heads: tiled instead of repeated": value("key_head", lambda m: np.arange(m.heads) % m.kv_heads),
    "grouped heads: all use the first key/value head": value("key_head", lambda m: np.zeros(m.heads, int)),
    "MLP: GELU instead of SiLU": method("activation", of.gelu),
    "MLP: GELU by tanh instead of SiLU": method("activation", of.gelu_tanh),
    "MLP: ReLU instead of SiLU": method("activation", lambda m, right, x: (np.maximum(x, 0), (x > 0) * 1.0)),
    "MLP: sigmoid instead of SiLU": method("activation", lambda m, right, x: sigmoid(x)),
    "MLP: gate and up are swapped": method("weight", of.gate_and_up_swapped),
    "experts: weights of a token do not sum to 1": of.experts(normalized=False),
    "experts: weights of a token sum to 1": of.experts(normalized=True),
    "experts: one more of each token": of.experts(top_k=lambda e: min(e.top_k + 1, e.count)),
    "experts: one less of each token": of.experts(top_k=lambda e: max(e.top_k - 1, 1)),
    "experts: scores by a softmax instead of a sigmoid": of.experts(sigmoid=False),
    "experts: scores by a sigmoid instead of a softmax": of.experts(sigmoid=True),
    "experts: weights are not scaled": of.experts(scale=1.0),
    "experts: chosen from all groups": of.experts(groups=1),
    "experts: the bias is ignored": of.experts(bias_in_choice=0),
    "experts: the bias is in their weights, too": of.experts(bias_in_weights=1),
    "experts: groups are chosen by their best expert": of.experts(counted=1),
    "experts: groups are chosen by the sum of all of their experts": of.experts(counted=1000),
    "experts: the shared experts are left out": of.experts(shared_scale=0.0),
    "experts: the shared experts are scaled, too": of.experts(shared_scale=lambda right: right.scale),
    "RMSNorm: gain 1 + w": value("w", lambda m: {name: w + ("norm" in name) for name, w in m.w.items()}),
    "RMSNorm: the mean is subtracted": method("rmsnorm", of.layer_norm),
    "RMSNorm: x / (rms + eps)": method("rmsnorm", of.eps_outside),
    "RMSNorm: none before the head": method("rmsnorm", of.no_norm, names=("model.norm",)),
    "embedding: times sqrt(hidden)": method(
        "embedding", lambda m, right, tokens: right(tokens) * math.sqrt(m.config["hidden_size"])
    ),
    "targets: shifted twice": method("aims", of.shifted_twice),
    "targets: not shifted": method("aims", lambda m, right, tokens, aims: np.where(aims >= 0, tokens, -1)),
    "q, k, v: biases are ignored": method(
        "weight", lambda m, right, name: right(name) * (0.0 if name.endswith(".bias") else 1.0)
    ),
    "q, k: norms are ignored": method("rmsnorm", of.no_norm, names=("q_norm", "k_norm")),
    "q, k: norms after RoPE": method("before_attention", lambda m, right, *given: right(*given)[::-1]),
}
BACKWARD = {
    "grouped heads: gradient of the first query head only": method(
        "of_group", lambda m, right, d, which: d[:, np.searchsorted(m.key_head, np.arange(m.kv_heads))]
    ),
    "grouped heads: mean over query heads instead of their sum": method(
        "of_group", lambda m, right, *given: right(*given) * m.kv_heads / m.heads
    ),
    "experts: the router has no gradient from their weights": of.times(0, "router"),
    "experts: their input has no gradient from them": of.times(0, "expert"),
    "experts: the shared experts' input has no gradient from them": of.times(0, "shared"),
    "experts: the balancing loss is left out": of.balance(aux_loss=0.0),
    "experts: the balancing loss is in the recorded loss": of.balance(recorded=True),
    "experts: the router's z-loss is left out": of.experts(router_z_loss=0.0),
    "tied weights: gradient of the embedding is lost": of.tied_without("model.embed_tokens"),
    "tied weights: gradient of the head is lost": of.tied_without("lm_head"),
}
for dtype in ("bf16", "fp32"):
    FORWARD[f"RoPE: cos and sin in {dtype}"] = method("cos_sin", of.rope_table, dtype=dtype)
    FORWARD[f"RoPE: angles in {dtype}"] = method("cos_sin", of.rope_angles, dtype=dtype)
for base in (1e4, 5e4, 1e5, 5e5, 1e6):
    FORWARD[f"RoPE: base {base:g}"] = frequencies(rope_theta=base)
for eps in (0.0, 1e-8, 1e-6, 1e-5, 1e-3):
    FORWARD[f"RMSNorm: eps {eps:g}"] = value("eps", lambda m, eps=eps: eps)
for recorded, also in ((False, ""), (True, ", and is in the recorded loss")):
    for x in (1e-4, 1e-3, 1e-2, 2e-2):
        BACKWARD |= {
            f"experts: a balancing loss of {x:g} is added{also}": of.balance(
                recorded, aux_loss=lambda e, x=x: e.aux_loss + x
            ),
            f"experts: the balancing loss is Hugging Face's, over all layers at once, of {x:g}{also}": of.balance(
                recorded, aux_loss=0.0, aux_of_all=x
            ),
        }
for x in (1e-4, 1e-3, 1e-2):
    BACKWARD |= {
        f"experts: a z-loss of the router of {x:g} is added": of.experts(
            router_z_loss=lambda e, x=x: e.router_z_loss + x
        ),
    }
for n in RANKS:
    by = f"context parallelism ({n} ranks): "
    FORWARD |= {
        by + "positions begin at 0 on each": of.positions(lambda right, _, length, n=n: right % of.chunk(length, n)),
        by + "causal mask on every block": of.mask_of_chunks(n, lambda q, k, size: q % size >= k % size),
        by + "no rank sees the others' keys": of.mask_of_chunks(n, lambda q, k, size: q // size == k // size),
    }
    BACKWARD |= {
        by + "backward with the block's own log-sum-exp": method("attention_backward", of.block_lse, ranks=n),
        by + "gradients of the others' keys are lost": method("attention_backward", of.keys_not_returned, ranks=n),
        by + "gradients are not summed": of.first_chunk_only(n),
        by + f"gradients are not summed, but multiplied by {n}": of.first_chunk_only(n, times=n),
        f"sequence parallelism ({n} ranks): gradients of norms are not summed": of.first_chunk_only(n, layers=NORMS),
        f"tensor parallelism: gradients of {n} copies of each key/value head are not summed": of.copied_heads(n),
    }
    by = f"tensor parallelism ({n} ranks): "
    BACKWARD |= {
        by + "gradients of q's and k's norms are not summed": method("own", of.head_norms_not_summed, ranks=n),
        by + "no f, the inputs' gradients are not summed": of.no_f(n, head_too=True),
        by + "no f in the blocks, the inputs' gradients are not summed": of.no_f(n, head_too=False),
        by + "g sums in the backward pass, too": of.times(n, "attention", "mlp"),
        by + "g of attention sums in the backward pass, too": of.times(n, "attention"),
        by + "g of mlp sums in the backward pass, too": of.times(n, "mlp"),
    }


# ---- an AdamW's
def clipped_by_shard(o, right, gradients, shards):
    """By the norm of each rank's rows of all parameters."""
    parts = {name: np.array_split(g, shards) for name, g in gradients.items()}
    factors = [clip_factor(norm_of({name: each[i] for name, each in parts.items()}), o.clip) for i in range(shards)]
    return {name: np.concatenate([g * factor for g, factor in zip(each, factors)]) for name, each in parts.items()}


def forgotten(o, right, *step, moments):
    """A step that takes itself for the first, with moments or without."""
    o.t = 0
    if not moments:
        o.m, o.v = {}, {}
    return right(*step)


def fixed(**values):
    """Settings of an AdamW; None if they are the right ones."""
    return lambda o: values if any(abs(x - getattr(o, key)) > 1e-6 * abs(x) for key, x in values.items()) else None


def decays(rule):
    """Of which parameters."""
    return method("decays", lambda o, right, name, w: rule(name, w))


def clipped(change):
    """change(the AdamW, a gradient)."""
    return method("clipped", lambda o, right, gradients: {name: change(o, g) for name, g in gradients.items()})


def at_rate(rate):
    return method("step", lambda o, right, weights, gradients, lr: right(weights, gradients, rate))


UPDATES = {
    "eps inside the square root": method("direction", lambda o, right, m, v: m / np.sqrt(v + o.eps)),
    "no bias correction": fixed(corrected=False),
    "weight decay in the gradient (Adam with L2)": fixed(in_gradient=True),
    "weight decay of norms and biases too": decays(lambda name, w: True),
    "no weight decay": fixed(decay=0.0),
    "no weight decay of the embedding": decays(lambda name, w: w.ndim == 2 and "embed" not in name),
    "no weight decay of embedding and head": decays(
        lambda name, w: w.ndim == 2 and "embed" not in name and "lm_head" not in name
    ),
    "weight decay of the norms only": decays(lambda name, w: w.ndim != 2),
    "weight decay not multiplied by lr": fixed(coupled=False),
    "no clipping": fixed(clip=0.0),
    "weight decay 0.01, torch's default, of everything": lambda o: {"decay": 0.01, "decays": lambda name, w: True},
    "weight decay 0.01, torch's default": fixed(decay=0.01),
    "clipping of each parameter by its own norm": clipped(lambda o, g: g * clip_factor(norm_of({0: g}), o.clip)),
    "clipping of each element": clipped(lambda o, g: np.clip(g, -o.clip, o.clip)),
    "plain SGD": method("direction", lambda o, right, m, v: m),
    "the sign of the gradient": method("direction", lambda o, right, m, v: np.sign(m)),
    "no update at all": method("step", lambda o, right, weights, *_: weights),
    **{f"eps {eps:g}": fixed(eps=eps) for eps in (1e-5, 1e-6, 1e-8, 1e-12, 1e-15)},
    **{
        f"clipping by the norm of each rank's shard of rows ({n} ranks)": method("clipped", clipped_by_shard, shards=n)
        for n in RANKS
    },
}


def updates(c):
    """UPDATES, and those that take a number from the runs."""
    found, lr, norm = dict(UPDATES), c.b.steps[0].lr, c.a.steps[0].grad_norm
    found["clipping by the norm that A reports, which is not its gradients'"] = clipped(
        lambda o, g: g * clip_factor(norm, o.clip)
    )
    for key in ("min-lr", "lr"):
        rate = c.b.flag(key)
        if math.isfinite(rate) and abs(rate - lr) > 1e-6 * lr:
            found[f"the learning rate {rate:g} (--{key}) instead of {lr:g}"] = at_rate(rate)
    return found


# optimizer: its fault. accumulate: gradients are not zeroed; clip_in_place: they stay as clipping left them. late: the
# forward pass uses the weights before the last update. rates: what becomes of the learning rates.
LATER = {
    "gradients are not zeroed between steps": {"accumulate": True},
    "gradients are not zeroed between steps, after clipping in place": {"accumulate": True, "clip_in_place": True},
    "the forward pass uses weights that are one update old": {"late": True},
    "the learning rate is late by one step": {"rates": lambda rates: rates[:1] + rates[:-1]},
    "the learning rate is early by one step": {"rates": lambda rates: rates[1:] + rates[-1:]},
    "the learning rate is that of step 1 in every step": {"rates": lambda rates: rates[:1] * len(rates)},
    "the moments are not kept": {"optimizer": method("step", forgotten, moments=False)},
    "the bias correction always is that of step 1": {"optimizer": method("step", forgotten, moments=True)},
    "no update reaches the forward pass": {"optimizer": UPDATES["no update at all"]},
    "clipping is not applied": {"optimizer": UPDATES["no clipping"]},
    **{f"beta2 is {beta2}": {"optimizer": fixed(beta2=beta2)} for beta2 in (0.9, 0.95, 0.98, 0.99, 0.999)},
    **{f"beta1 is {beta1}": {"optimizer": fixed(beta1=beta1)} for beta1 in (0.0, 0.8, 0.9, 0.95)},
    "beta1 and beta2 are exchanged": {"optimizer": lambda o: {"beta1": o.beta2, "beta2": o.beta1}},
}
