"""A Llama in the precision of its weights, from its equations alone: forward and hand-made backward pass, and AdamW.

tests/test_reference.py holds it to the programs, tests/validate.py to their reference runs. What docs/validate/replays.py
replaces, a convention or a step of the backward pass, is a method of its own.

B samples, T tokens, E hidden, H query heads, K key/value heads, D head size, F ffn, V vocabulary
"""

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


class Llama:
    """Each layer's function returns its result and, as a closure, the gradient of its input from that of its output."""

    only_backward = False  # a fault that leaves the forward pass as it is: doctor.py then computes that once for all

    def __init__(self, config, weights, document_token=None, z_loss=0.0, logit_scale=1.0, balance=None):
        self.config, self.w, self.grad, self.activations = config, weights, {}, None
        self.check = lambda name, gradient: None  # called with each gradient when it is complete; may raise
        self.layers, self.eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.frequencies = rope_frequencies(config)
        self.dim = 2 * len(self.frequencies)
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

    def positions(self, tokens):
        return np.arange(tokens.shape[1]) - self.starts(tokens)

    def visible(self, tokens):
        """(B, T, T): may query i see key j?"""
        place = np.arange(tokens.shape[1])
        return (place[:, None] >= place) & (place >= self.starts(tokens)[:, :, None])

    def cos_sin(self, positions):
        angles = positions[:, None, :, None] * self.frequencies  # (B, 1, T, D / 2)
        return np.cos(angles), np.sin(angles)

    def rotate(self, x, sign, which):
        """x (B, heads, T, D); sign -1: back, which is also the gradient. which: "q" or "k"."""
        cos, sin = self.angles
        first, second = np.split(x, 2, axis=3)
        return np.concatenate([first * cos - sign * second * sin, second * cos + sign * first * sin], axis=3)

    def attention_scale(self):
        return 1 / math.sqrt(self.dim)

    def key_head(self):
        """(H): the key/value head of each query head."""
        return np.repeat(np.arange(self.kv_heads), self.heads // self.kv_heads)

    def activation(self, gate):
        """The activation and its derivative."""
        sigmoid = 1 / (1 + np.exp(-gate))
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))

    def shift(self, targets):
        return targets

    def target_weights(self, targets):
        """What each target counts in the loss; -1 is ignored."""
        counted = targets >= 0
        return counted / counted.sum()

    def norm_gain(self, w):
        return w

    # ---- parallelism: what passes between ranks in the backward pass. One rank: nothing
    def f(self, gradient, half):
        """At the entrance of a half block ("attention", "mlp") or of the head."""
        return gradient

    def g(self, gradient, half):
        """At its exit."""
        return gradient

    def own(self, gradient, name):
        """What of the gradient of a layer's output its weight's gradient is computed from."""
        return gradient

    def of_input(self, gradient, name):
        """What goes on of the gradient of a linear layer's input."""
        return gradient

    # ---- experts
    def balance(self):
        """The coefficients of the balancing loss and of the router's z-loss."""
        return self.experts.aux_loss, self.experts.z_loss

    def of_router(self, gradient):
        """Of the weights of a token's experts."""
        return gradient

    def of_expert(self, gradient):
        """Of an expert's input."""
        return gradient

    def of_shared(self, gradient):
        """Of the shared experts' input."""
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
            return self.of_input(product(dy, w), name)

        return self.seen(name, y), backward

    def rmsnorm(self, name, x):
        w = self.norm_gain(self.w[name + ".weight"])
        r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)

        def backward(dy):
            self.add(name + ".weight", np.sum(self.own(dy, name) * x * r, axis=tuple(range(x.ndim - 1))))
            dn = dy * w
            return r * dn - x * r**3 * np.mean(dn * x, axis=-1, keepdims=True)

        return self.seen(name, x * r * w), backward

    def attention(self, q, k, v, visible):
        """q (B, H, T, D); k, v (B, K, T, D) -> (B, H, T, D)."""
        head = self.key_head()
        k_all, v_all = k[:, head], v[:, head]
        scores = np.where(visible[:, None], q @ k_all.swapaxes(2, 3) * self.attention_scale(), -np.inf)
        p = np.exp(scores - scores.max(axis=3, keepdims=True))
        p /= p.sum(axis=3, keepdims=True)
        out = p @ v_all

        def backward(dout):
            delta = np.sum(dout * out, axis=3, keepdims=True)
            dq, dk, dv = self.attention_backward(q, k_all, v_all, p, dout, delta)
            return dq, self.of_group(dk, head), self.of_group(dv, head)

        return out, backward

    def attention_backward(self, q, k, v, p, dout, delta):
        ds = p * (dout @ v.swapaxes(2, 3) - delta) * self.attention_scale()
        return ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout

    def of_group(self, gradient, head):
        """The gradient of each key/value head: the sum over its query heads."""
        total = np.zeros((gradient.shape[0], self.kv_heads) + gradient.shape[2:], gradient.dtype)
        for query, key in enumerate(head):
            total[:, key] += gradient[:, query]
        return total

    def by_head(self, x):
        return x.reshape(x.shape[0], x.shape[1], -1, self.dim).swapaxes(1, 2)

    def together(self, x):
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def attention_half(self, prefix, x, visible):
        n, norm_back = self.rmsnorm(prefix + "input_layernorm", x)
        (q, q_back), (k, k_back), (v, v_back) = (self.linear(f"{prefix}self_attn.{which}_proj", n) for which in "qkv")
        q, k, v = map(self.by_head, (q, k, v))
        q_norm, k_norm = prefix + "self_attn.q_norm", prefix + "self_attn.k_norm"
        q_norm_back = k_norm_back = lambda gradient: gradient
        if q_norm + ".weight" in self.w:
            (q, q_norm_back), (k, k_norm_back) = self.rmsnorm(q_norm, q), self.rmsnorm(k_norm, k)
        mixed, mix_back = self.attention(self.rotate(q, 1, "q"), self.rotate(k, 1, "k"), v, visible)
        y, out_back = self.linear(
            prefix + "self_attn.o_proj", self.seen(prefix + "self_attn.context", self.together(mixed))
        )

        def backward(dy):
            dq, dk, dv = mix_back(self.by_head(out_back(self.g(dy, "attention"))))
            dq, dk = q_norm_back(self.rotate(dq, -1, "q")), k_norm_back(self.rotate(dk, -1, "k"))
            parts = zip((v_back, q_back, k_back), (dv, dq, dk))
            return norm_back(self.f(sum(back(self.together(part)) for back, part in parts), "attention"))

        return y, backward

    def mlp_half(self, prefix, x, _):
        n, norm_back = self.rmsnorm(prefix + "post_attention_layernorm", x)
        if self.experts and prefix + "mlp.gate_proj.weight" not in self.w:
            y, back = self.experts.layer(self, prefix, n)
        else:
            y, back = self.mlp(prefix + "mlp.", n)
        return y, lambda dy: norm_back(self.f(back(self.g(dy, "mlp")), "mlp"))

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
            return product(dy, w) * self.logit_scale

        return self.seen("lm_head", product(x, w.T) * self.logit_scale), backward

    def forward(self, tokens):
        """The hidden state before the head, (B, T, E), and its backward pass."""
        dtype = self.w["model.embed_tokens.weight"].dtype
        self.angles = tuple(x.astype(dtype, copy=False) for x in self.cos_sin(self.positions(tokens)))
        visible = self.visible(tokens)
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
        """tokens, targets (B, T). The mean loss over the targets that are not -1, without z-loss; and its backward pass,
        which may run again."""
        targets = self.shift(targets)
        n, body_back = self.forward(tokens)
        logits, head_back = self.head(n)
        weights = self.target_weights(targets)
        losses, dlogits = self.loss_of_logits(logits, targets)
        dlogits *= weights[:, :, None]

        def backward():
            body_back(self.f(head_back(self.g(dlogits, "head")), "head"))

        return float(np.sum(losses * weights)), backward

    def gradients(self, backward):
        """{name: gradient}. Of a fault that this model cannot have: None."""
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
    """Clipping and AdamW of docs/reference-format.md; `decays`: of which parameters, by name and weight."""

    def __init__(self, beta1, beta2, eps, decay, clip, decays=lambda name, w: w.ndim == 2):
        self.beta1, self.beta2, self.eps, self.decay, self.clip, self.decays = beta1, beta2, eps, decay, clip, decays
        self.m, self.v, self.t = {}, {}, 0

    def step(self, weights, gradients, lr):
        """The new weights."""
        self.t += 1
        factor = clip_factor(norm_of(gradients), self.clip)
        after = {}
        for name, w in weights.items():
            if name not in gradients:  # a router's bias
                after[name] = w
                continue
            g = gradients[name] * factor
            self.m[name] = self.beta1 * self.m.get(name, 0) + (1 - self.beta1) * g
            self.v[name] = self.beta2 * self.v.get(name, 0) + (1 - self.beta2) * g * g
            m, v = self.m[name] / (1 - self.beta1**self.t), self.v[name] / (1 - self.beta2**self.t)
            after[name] = w - lr * (m / (np.sqrt(v) + self.eps) + (self.decay if self.decays(name, w) else 0) * w)
        return after
