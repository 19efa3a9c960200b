"""A Llama in the precision of its weights, from its equations alone, and AdamW. tape.py goes back.

tests/test_reference.py holds it to the programs, tests/test_validate.py to their reference runs. What replays.py
replaces, a convention or a step of the backward pass, is an attribute or a method of its own.

B samples, T tokens, E hidden, H query heads, K key/value heads, D head size, F ffn, V vocabulary
"""

import math

import numpy as np

from .experts import Experts
from .tape import Value, backward, elementwise, log_sum_exp, product


def rope_frequencies(config):
    """One per pair of a head's D elements, scaled as Llama 3.1 does where the configuration says so."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = config.get("rope_theta", 10000.0) ** (-2.0 * np.arange(dim // 2) / dim)
    scaling = config.get("rope_scaling")
    if not scaling:
        return frequencies
    if scaling.get("rope_type") != "llama3":
        raise NotImplementedError(f"rope_scaling {scaling.get('rope_type')}")
    wavelength = 2 * math.pi / frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies


class Llama:
    def __init__(self, config, weights, document_token=None, z_loss=0.0, logit_scale=1.0, balance=None):
        if config.get("train70b_mtp"):
            raise NotImplementedError("multi-token prediction")
        self.config, self.w, self.activations = config, weights, None
        self.layers, self.eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.frequencies = rope_frequencies(config)
        self.dim = 2 * len(self.frequencies)
        self.attention_scale = 1 / math.sqrt(self.dim)
        self.key_head = np.repeat(np.arange(self.kv_heads), self.heads // self.kv_heads)  # (H): of each query head
        self.tied = bool(config.get("tie_word_embeddings"))
        self.window = config.get("sliding_window") or 0
        self.layer_types = config.get("train70b_layer_types") or config.get("layer_types")  # None: windows in all
        self.document_token, self.z_loss, self.logit_scale = document_token, z_loss, logit_scale
        self.experts = Experts(config, **(balance or {})) if "num_experts_per_tok" in config else None

    # ---- conventions
    def starts(self, tokens):
        """(B, T): the first position of each token's document."""
        starts = np.zeros_like(tokens)
        if self.document_token is not None:
            ends = tokens[:, :-1] == self.document_token  # behind each begins another document
            starts[:, 1:] = np.maximum.accumulate(np.where(ends, np.arange(1, tokens.shape[1]), 0), axis=1)
        return starts

    def positions(self, tokens, which):
        """(B, T): of queries ("q") or keys ("k"), for RoPE."""
        return np.arange(tokens.shape[1]) - self.starts(tokens)

    def visible(self, query, key, start):
        """May the query at a position see the key at another? start (B, T, 1): of the query's document."""
        return (query >= key) & (key >= start)

    def cos_sin(self, positions):
        angles = positions[:, None, :, None] * self.frequencies  # (B, 1, T, D / 2)
        return np.cos(angles), np.sin(angles)

    def rotate(self, x, sign, which):
        """x (B, heads, T, D), an array; sign -1: back, which is also the gradient."""
        cos, sin = self.angles[which]
        first, second = np.split(x, 2, axis=3)
        return np.concatenate([first * cos - sign * second * sin, second * cos + sign * first * sin], axis=3)

    def activation(self, gate):
        """The activation and its derivative, arrays."""
        sigmoid = 1 / (1 + np.exp(-gate))
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))

    def aims(self, tokens, targets):
        return targets

    def recorded(self, loss):
        """What is recorded of a loss."""
        return loss

    def target_weights(self, targets):
        """What each target counts in the loss; -1 is ignored."""
        counted = targets >= 0
        return counted / counted.sum()

    # ---- what may pass between ranks in the backward pass. One rank: nothing
    def passed(self, gradient, at):
        """A gradient on its way to what came before. at: "attention", "mlp", "head", the exit of a half block or of the
        head; a linear layer, at its input; "router", "expert", "shared", what goes into those (2-D: rows)."""
        return gradient

    def own(self, gradient, name):
        """What of the gradient of a layer's output its weight's gradient is computed from."""
        return gradient

    def hook(self, x, at):
        return Value(x.x, lambda d: [self.passed(d, at)], x)

    # ---- layers
    def weight(self, name):
        return self.leaves.setdefault(name, Value(self.w[name], name=name))

    def seen(self, name, value):
        if self.activations is not None and value.x.ndim > 2:  # not of rows that experts have
            self.activations[name] = value.x
        return value

    def linear(self, name, x):  # (..., in) -> (..., out)
        w = self.weight(name + ".weight")
        bias = [self.weight(name + ".bias")] if name + ".bias" in self.w else []

        def back(d):
            own = self.own(d, name).reshape(-1, len(w.x))
            yield self.passed(product(d, w.x), name)
            yield own.T @ x.x.reshape(-1, w.x.shape[1])
            yield own.sum(axis=0)

        return self.seen(name, Value(sum((b.x for b in bias), product(x.x, w.x.T)), back, x, w, *bias))

    def rmsnorm(self, name, x):
        w, r = self.weight(name + ".weight"), 1 / np.sqrt(np.mean(x.x * x.x, axis=-1, keepdims=True) + self.eps)

        def back(d):
            dn = d * w.x
            yield r * dn - x.x * r**3 * np.mean(dn * x.x, axis=-1, keepdims=True)
            yield np.sum(self.own(d, name) * x.x * r, axis=tuple(range(d.ndim - 1)))

        return self.seen(name, Value(x.x * r * w.x, back, x, w))

    def attention(self, q, k, v, visible, *sinks):
        """q (B, H, T, D); k, v (B, K, T, D) -> (B, H, T, D). sinks (H), or none: logits of keys without a value."""
        sink = np.reshape([s.x for s in sinks] or -np.inf, (-1, 1, 1))
        k_all, v_all = k.x[:, self.key_head], v.x[:, self.key_head]
        scores = np.where(visible[:, None], q.x @ k_all.swapaxes(2, 3) * self.attention_scale, -np.inf)
        top = np.maximum(scores.max(axis=3, keepdims=True), sink)
        p = np.exp(scores - top)
        total = p.sum(axis=3, keepdims=True) + np.exp(sink - top)
        p /= total
        out = p @ v_all

        def back(d):
            delta = np.sum(d * out, axis=3, keepdims=True)
            dq, dk, dv = self.attention_backward(q.x, k_all, v_all, p, d, delta)
            dsink = -np.sum(np.exp(sink - top) / total * delta, axis=(0, 2, 3))
            return dq, self.of_group(dk, "k"), self.of_group(dv, "v"), dsink

        return Value(out, back, q, k, v, *sinks)

    def attention_backward(self, q, k, v, p, dout, delta):
        ds = p * (dout @ v.swapaxes(2, 3) - delta) * self.attention_scale
        return ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout

    def of_group(self, gradient, which):
        """The gradient of each key/value head: the sum over its query heads."""
        total = np.zeros((gradient.shape[0], self.kv_heads) + gradient.shape[2:], gradient.dtype)
        for query, key in enumerate(self.key_head):
            total[:, key] += gradient[:, query]
        return total

    def rope(self, x, which):
        return Value(self.rotate(x.x, 1, which), lambda d: [self.rotate(d, -1, which)], x)

    def before_attention(self, name, which):
        """The layers of q or k between its projection and attention: its norm, if there is one, and RoPE."""
        normed = [lambda x: self.rmsnorm(name + "norm", x)] if name + "norm.weight" in self.w else []
        return [*normed, lambda x: self.rope(x, which)]

    def heads_of(self, n, prefix, which):
        """q, k or v of a normed input."""
        name, (samples, length) = f"{prefix}self_attn.{which}_", n.x.shape[:2]
        x = self.linear(name + "proj", n).reshape(samples, length, -1, self.dim).swapaxes(1, 2)
        for layer in self.before_attention(name, which) if which != "v" else ():
            x = layer(x)
        return x

    def attention_half(self, prefix, x, visible):
        n = self.rmsnorm(prefix + "input_layernorm", x)
        sinks = [self.weight(prefix + "self_attn.sinks")] if prefix + "self_attn.sinks" in self.w else []
        mixed = self.attention(*(self.heads_of(n, prefix, which) for which in "qkv"), visible, *sinks)
        context = self.seen(prefix + "self_attn.context", mixed.swapaxes(1, 2).reshape(*n.x.shape[:2], -1))
        return self.hook(self.linear(prefix + "self_attn.o_proj", context), "attention")

    def mlp_half(self, prefix, x):
        n = self.rmsnorm(prefix + "post_attention_layernorm", x)
        if self.experts and prefix + "mlp.gate_proj.weight" not in self.w:
            return self.hook(self.experts.layer(self, prefix, n), "mlp")
        return self.hook(self.mlp(prefix + "mlp.", n), "mlp")

    def mlp(self, prefix, x, names=("gate_proj", "up_proj", "down_proj")):
        gate, up = (self.linear(prefix + name, x) for name in names[:2])
        return self.linear(prefix + names[2], elementwise(gate, self.activation) * up)

    def embedding(self, tokens):
        table = self.weight("model.embed_tokens.weight")

        def back(d):
            gradient = np.zeros_like(table.x)
            np.add.at(gradient, tokens, self.own(d, "model.embed_tokens"))
            yield gradient

        return self.seen("model.embed_tokens", Value(table.x[tokens], back, table))

    def head(self, x):
        w = self.weight("model.embed_tokens.weight" if self.tied else "lm_head.weight")

        def back(d):
            yield product(self.passed(d, "head"), w.x) * self.logit_scale
            yield (self.own(d, "lm_head").reshape(-1, len(w.x)).T @ x.x.reshape(-1, w.x.shape[1])) * self.logit_scale

        return self.seen("lm_head", Value(product(x.x, w.x.T) * self.logit_scale, back, x, w))

    def forward(self, tokens):
        """The hidden state before the head, (B, T, E)."""
        # penalties: (a Value, a function of its additional gradient); slots: how often a layer chose each expert
        self.leaves, self.penalties, self.slots = {}, [], []
        dtype, place = self.w["model.embed_tokens.weight"].dtype, np.arange(tokens.shape[1])
        self.angles = {
            which: [x.astype(dtype, copy=False) for x in self.cos_sin(self.positions(tokens, which))] for which in "qk"
        }
        visible = self.visible(place[:, None], place, self.starts(tokens)[:, :, None])
        visible = np.broadcast_to(visible, (len(tokens), len(place), len(place)))
        x = self.embedding(tokens)
        inside = visible & (place[:, None] - place < self.window) if self.window else visible
        for layer in range(self.layers):
            seen = inside if not self.layer_types or self.layer_types[layer] == "sliding_attention" else visible
            x = x + self.attention_half(f"model.layers.{layer}.", x, seen)
            x = x + self.mlp_half(f"model.layers.{layer}.", x)
        return self.rmsnorm("model.norm", x)

    def loss_of_logits(self, logits, targets):
        """(B, T): each target's loss without z-loss; (B, T, V): its gradient with it. Of -1: those of token 0."""
        lse = log_sum_exp(logits)
        at = np.maximum(targets, 0)[:, :, None]
        gradient = np.exp(logits - lse) * (1 + 2 * self.z_loss * lse)
        np.put_along_axis(gradient, at, np.take_along_axis(gradient, at, axis=2) - 1, axis=2)
        return (lse - np.take_along_axis(logits, at, axis=2))[:, :, 0], gradient

    def loss(self, tokens, targets):
        """tokens, targets (B, T). The mean loss over the targets that are not -1, without z-loss; its backward pass."""
        targets = self.aims(tokens, targets)
        logits = self.head(self.forward(tokens))
        weights, penalties = self.target_weights(targets), self.penalties
        losses, dlogits = self.loss_of_logits(logits.x, targets)
        dlogits *= weights[:, :, None]
        return float(np.sum(losses * weights)), lambda: backward(
            (logits, dlogits), *((value, gradient()) for value, gradient in penalties)
        )

    def gradients(self, back, check=lambda name, gradient: None):
        """{name: gradient}; check is called with each when it is complete, and may raise."""
        found = {}
        for name, gradient in back():
            check(name, gradient)
            found[name] = gradient
        return found

    def loss_and_gradients(self, tokens, targets):
        loss, back = self.loss(tokens, targets)
        return loss, self.gradients(back)


def norm_of(gradients):
    return math.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))


def clip_factor(norm, clip):
    """What gradients of this norm are multiplied by; clip 0: no clipping."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


class AdamW:
    """Clipping and AdamW of docs/reference-format.md."""

    coupled, in_gradient, corrected = True, False, True  # weight decay times lr; in the gradient; corrected for bias

    def __init__(self, beta1, beta2, eps, decay, clip):
        self.beta1, self.beta2, self.eps, self.decay, self.clip = beta1, beta2, eps, decay, clip
        self.m, self.v, self.t = {}, {}, 0

    def decays(self, name, w):
        return w.ndim == 2

    def clipped(self, gradients):
        factor = clip_factor(norm_of(gradients), self.clip)
        return {name: g * factor for name, g in gradients.items()}

    def direction(self, m, v):
        size = np.sqrt(v) + self.eps
        return np.divide(m, size, out=np.zeros_like(m), where=size != 0)

    def step(self, weights, gradients, lr):
        """The new weights. Those without a gradient are biases of routers."""
        self.t, gradients, after = self.t + 1, self.clipped(gradients), dict(weights)
        for name, g in gradients.items():
            w = weights[name]
            decay = self.decay if self.decays(name, w) else 0.0
            if self.in_gradient:
                g, decay = g + decay * w, 0.0
            self.m[name] = m = self.beta1 * self.m.get(name, 0) + (1 - self.beta1) * g
            self.v[name] = v = self.beta2 * self.v.get(name, 0) + (1 - self.beta2) * g * g
            if self.corrected:
                m, v = m / (1 - self.beta1**self.t), v / (1 - self.beta2**self.t)
            after[name] = w - lr * self.direction(m, v) - (lr if self.coupled else 1.0) * decay * w
        return after


class Muon(AdamW):
    """Muon of 01_single_gpu/complete/muon.h for the matrices of blocks, AdamW for the rest."""

    MOMENTUM = 0.95

    @staticmethod
    def takes(name, w):
        return w.ndim == 2 and ".layers." in name

    @staticmethod
    def moved(w, u, lr, decay):
        """w after an update by the orthogonalized u."""
        x = u / max(norm_of({0: u}), 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return w * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(w.shape)) * x

    def step(self, weights, gradients, lr):
        averages, after = dict(self.m), super().step(weights, gradients, lr)
        for name, g in self.clipped(gradients).items():
            if self.takes(name, weights[name]):
                g = (1 - self.MOMENTUM) * g
                self.m[name] = m = self.MOMENTUM * averages.get(name, 0) + g
                after[name] = self.moved(weights[name], g + self.MOMENTUM * m, lr, self.decay)
        return after
