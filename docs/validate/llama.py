"""A Llama in the precision of its weights, from its equations alone: forward and hand-made backward pass, and AdamW.

tests/test_reference.py holds it to the programs, tests/test_validate.py to their reference runs. What replays.py
replaces, a convention or a step of the backward pass, is an attribute or a method of its own.

B samples, T tokens, E hidden, H query heads, K key/value heads, D head size, F ffn, V vocabulary
"""

import functools
import math

import numpy as np

from .experts import Experts


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


def product(x, w):
    """x (B, T, in), w (in, out): as one matrix product, eight times as fast as NumPy's for stacks of matrices."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[1])


def chain(x, *layers):
    """The layers one after another, and their backward passes in reverse."""
    backs = []
    for layer in layers:
        x, back = layer(x)
        backs.insert(0, back)
    return x, lambda gradient: functools.reduce(lambda dy, back: back(dy), backs, gradient)


class Llama:
    """Each layer's function returns its result and, as a closure, the gradient of its input from that of its output.
    A backward pass may run again."""

    def __init__(self, config, weights, document_token=None, z_loss=0.0, logit_scale=1.0, balance=None):
        self.config, self.w, self.grad, self.activations = config, weights, {}, None
        self.check = lambda name, gradient: None  # called with each gradient when it is complete; may raise
        self.layers, self.eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.frequencies = rope_frequencies(config)
        self.dim = 2 * len(self.frequencies)
        self.attention_scale = 1 / math.sqrt(self.dim)
        self.key_head = np.repeat(np.arange(self.kv_heads), self.heads // self.kv_heads)  # (H): of each query head
        self.tied = bool(config.get("tie_word_embeddings"))
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
        """x (B, heads, T, D); sign -1: back, which is also the gradient."""
        cos, sin = self.angles[which]
        first, second = np.split(x, 2, axis=3)
        return np.concatenate([first * cos - sign * second * sin, second * cos + sign * first * sin], axis=3)

    def activation(self, gate):
        """The activation and its derivative."""
        sigmoid = 1 / (1 + np.exp(-gate))
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))

    def aims(self, tokens, targets):
        return targets

    def target_weights(self, targets):
        """What each target counts in the loss; -1 is ignored."""
        counted = targets >= 0
        return counted / counted.sum()

    # ---- what may pass between ranks in the backward pass. One rank: nothing
    def passed(self, gradient, at):
        """A gradient on its way to what came before. at: "attention", "mlp", "head", the exit of a half block or of the
        head; a linear layer, at its input; "router", "expert", "shared", what goes into those."""
        return gradient

    def own(self, gradient, name):
        """What of the gradient of a layer's output its weight's gradient is computed from."""
        return gradient

    def add(self, name, gradient):
        self.grad[name] = self.grad[name] + gradient if name in self.grad else gradient
        if self.complete(name):
            self.check(name, self.grad[name])

    def complete(self, name):
        """Whether a gradient that is added is all of it: those of a tied weight are two."""
        return not (self.tied and "embed_tokens" in name)

    def seen(self, name, x):
        if self.activations is not None:
            self.activations[name] = x
        return x

    # ---- layers
    def linear(self, name, x):  # (B, T, in) -> (B, T, out)
        w, bias = self.w[name + ".weight"], self.w.get(name + ".bias")
        y = product(x, w.T) if bias is None else product(x, w.T) + bias

        def backward(dy):
            own = self.own(dy, name).reshape(-1, len(w))
            self.add(name + ".weight", own.T @ x.reshape(-1, w.shape[1]))
            if bias is not None:
                self.add(name + ".bias", own.sum(axis=0))
            return self.passed(product(dy, w), name)

        return self.seen(name, y), backward

    def rmsnorm(self, name, x):
        w = self.w[name + ".weight"]
        r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)

        def backward(dy):
            self.add(name + ".weight", np.sum(self.own(dy, name) * x * r, axis=tuple(range(x.ndim - 1))))
            dn = dy * w
            return r * dn - x * r**3 * np.mean(dn * x, axis=-1, keepdims=True)

        return self.seen(name, x * r * w), backward

    def attention(self, q, k, v, visible):
        """q (B, H, T, D); k, v (B, K, T, D) -> (B, H, T, D)."""
        head = self.key_head
        k_all, v_all = k[:, head], v[:, head]
        scores = np.where(visible[:, None], q @ k_all.swapaxes(2, 3) * self.attention_scale, -np.inf)
        p = np.exp(scores - scores.max(axis=3, keepdims=True))
        p /= p.sum(axis=3, keepdims=True)
        out = p @ v_all

        def backward(dout):
            delta = np.sum(dout * out, axis=3, keepdims=True)
            dq, dk, dv = self.attention_backward(q, k_all, v_all, p, dout, delta)
            return dq, self.of_group(dk, "k"), self.of_group(dv, "v")

        return out, backward

    def attention_backward(self, q, k, v, p, dout, delta):
        ds = p * (dout @ v.swapaxes(2, 3) - delta) * self.attention_scale
        return ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout

    def of_group(self, gradient, which):
        """The gradient of each key/value head: the sum over its query heads."""
        total = np.zeros((gradient.shape[0], self.kv_heads) + gradient.shape[2:], gradient.dtype)
        for query, key in enumerate(self.key_head):
            total[:, key] += gradient[:, query]
        return total

    def by_head(self, x):
        return x.reshape(x.shape[0], x.shape[1], -1, self.dim).swapaxes(1, 2)

    def together(self, x):
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def before_attention(self, name, which):
        """The layers of q or k between its projection and attention: its norm, if there is one, and RoPE."""
        normed = [lambda x: self.rmsnorm(name + "norm", x)] if name + "norm.weight" in self.w else []
        return [*normed, lambda x: (self.rotate(x, 1, which), lambda dy: self.rotate(dy, -1, which))]

    def heads_of(self, n, prefix, which):
        """q, k or v of a normed input, and its backward pass."""
        name = f"{prefix}self_attn.{which}_"
        layers = [lambda x: self.linear(name + "proj", x), lambda x: (self.by_head(x), self.together)]
        return chain(n, *layers, *([] if which == "v" else self.before_attention(name, which)))

    def attention_half(self, prefix, x, visible):
        n, norm_back = self.rmsnorm(prefix + "input_layernorm", x)
        (q, q_back), (k, k_back), (v, v_back) = (self.heads_of(n, prefix, which) for which in "qkv")
        mixed, mix_back = self.attention(q, k, v, visible)
        context = self.seen(prefix + "self_attn.context", self.together(mixed))
        y, out_back = self.linear(prefix + "self_attn.o_proj", context)

        def backward(dy):
            dq, dk, dv = mix_back(self.by_head(out_back(self.passed(dy, "attention"))))
            return norm_back(v_back(dv) + q_back(dq) + k_back(dk))

        return y, backward

    def mlp_half(self, prefix, x, _):
        n, norm_back = self.rmsnorm(prefix + "post_attention_layernorm", x)
        if self.experts and prefix + "mlp.gate_proj.weight" not in self.w:
            y, back = self.experts.layer(self, prefix, n)
        else:
            y, back = self.mlp(prefix + "mlp.", n)
        return y, lambda dy: norm_back(back(self.passed(dy, "mlp")))

    def mlp(self, prefix, x):
        gate, gate_back = self.linear(prefix + "gate_proj", x)
        up, up_back = self.linear(prefix + "up_proj", x)
        active, slope = self.activation(gate)
        y, down_back = self.linear(prefix + "down_proj", active * up)

        def backward(dy):
            dh = down_back(dy)
            return gate_back(dh * up * slope) + up_back(dh * active)

        return y, backward

    def embedding(self, tokens):
        table = self.w["model.embed_tokens.weight"]

        def backward(dx):
            gradient = np.zeros_like(table)
            np.add.at(gradient, tokens, self.own(dx, "model.embed_tokens"))
            self.add("model.embed_tokens.weight", gradient)

        return self.seen("model.embed_tokens", table[tokens]), backward

    def head(self, x):
        name = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        w = self.w[name]

        def backward(dy):
            own = self.own(dy, "lm_head").reshape(-1, len(w))
            self.add(name, (own.T @ x.reshape(-1, w.shape[1])) * self.logit_scale)
            return product(self.passed(dy, "head"), w) * self.logit_scale

        return self.seen("lm_head", product(x, w.T) * self.logit_scale), backward

    def forward(self, tokens):
        """The hidden state before the head, (B, T, E), and its backward pass."""
        dtype, place = self.w["model.embed_tokens.weight"].dtype, np.arange(tokens.shape[1])
        self.angles = {
            which: [x.astype(dtype, copy=False) for x in self.cos_sin(self.positions(tokens, which))] for which in "qk"
        }
        visible = self.visible(place[:, None], place, self.starts(tokens)[:, :, None])
        visible = np.broadcast_to(visible, (len(tokens), len(place), len(place)))
        x, embedding_back = self.embedding(tokens)
        backs = []
        for layer in range(self.layers):
            for half in (self.attention_half, self.mlp_half):
                y, back = half(f"model.layers.{layer}.", x, visible)
                x = x + y
                backs.append(back)
        n, norm_back = self.rmsnorm("model.norm", x)

        def backward(dn):
            dx = norm_back(dn)
            for back in reversed(backs):
                dx = dx + back(dx)
            embedding_back(dx)

        return n, backward

    def loss_of_logits(self, logits, targets):
        """(B, T): each target's loss without z-loss; (B, T, V): its gradient with it. Of -1: those of token 0."""
        top = logits.max(axis=2, keepdims=True)
        lse = top + np.log(np.exp(logits - top).sum(axis=2, keepdims=True))
        at = np.maximum(targets, 0)[:, :, None]
        gradient = np.exp(logits - lse) * (1 + 2 * self.z_loss * lse)
        np.put_along_axis(gradient, at, np.take_along_axis(gradient, at, axis=2) - 1, axis=2)
        return (lse - np.take_along_axis(logits, at, axis=2))[:, :, 0], gradient

    def loss(self, tokens, targets):
        """tokens, targets (B, T). The mean loss over the targets that are not -1, without z-loss; its backward pass."""
        targets = self.aims(tokens, targets)
        n, body_back = self.forward(tokens)
        logits, head_back = self.head(n)
        weights = self.target_weights(targets)
        losses, dlogits = self.loss_of_logits(logits, targets)
        dlogits *= weights[:, :, None]
        return float(np.sum(losses * weights)), lambda: body_back(head_back(dlogits))

    def gradients(self, backward):
        """{name: gradient}."""
        self.grad = {}
        backward()
        return self.grad

    def loss_and_gradients(self, tokens, targets):
        loss, backward = self.loss(tokens, targets)
        return loss, self.gradients(backward)


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
