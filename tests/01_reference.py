"""Four AdamW steps of a Llama in double precision, from its equations alone: forward and hand-made backward pass.

Run:   01_reference.py MODEL_DIR TOKEN_FILE METRICS.jsonl FLAG=VALUE...
MODEL_DIR holds config.json and safetensors; TOKEN_FILE one byte per token, inputs and targets of one sample; METRICS is
what the program under test wrote. Exits with 1 where a loss or a gradient norm is off by more than 5e-6.

T tokens, E hidden, H query heads, K key/value heads, D head size, F ffn, V vocabulary
"""
import glob
import json
import math
import os
import struct
import sys

import numpy as np

TOLERANCE = 5e-6


def load_weights(folder):
    weights = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        with open(path, "rb") as file:
            blob = file.read()
        (length,) = struct.unpack("<Q", blob[:8])
        for name, entry in json.loads(blob[8:8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(blob[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                assert entry["dtype"] == "F32", entry
                values = np.frombuffer(blob[begin:end], "<f4")
            weights[name] = values.astype(np.float64).reshape(entry["shape"])
    return weights


def rope_frequencies(config):
    dim = config["hidden_size"] // config["num_attention_heads"]
    frequencies = []
    for pair in range(dim // 2):
        frequency = config.get("rope_theta", 10000.0) ** (-2.0 * pair / dim)
        scaling = config.get("rope_scaling")
        if scaling:
            assert scaling["rope_type"] == "llama3"
            wavelength = 2 * math.pi / frequency
            context = scaling["original_max_position_embeddings"]
            longest, shortest = context / scaling["low_freq_factor"], context / scaling["high_freq_factor"]
            if wavelength > longest:
                frequency /= scaling["factor"]
            elif wavelength > shortest:
                blend = (context / wavelength - scaling["low_freq_factor"]) / (
                    scaling["high_freq_factor"] - scaling["low_freq_factor"])
                frequency = (1 - blend) * frequency / scaling["factor"] + blend * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


class Llama:
    """Each layer's function gives its result and, as a closure, the gradient of its input from that of its output."""

    def __init__(self, config, weights):
        self.w, self.grad = weights, {}
        self.layers, self.eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.frequencies = rope_frequencies(config)
        self.document_token = None

    def linear(self, name, x):  # (T, in) -> (T, out)
        w = self.w[name]

        def backward(dy):
            self.grad[name] = dy.T @ x
            return dy @ w
        return x @ w.T, backward

    def rmsnorm(self, name, x):
        w = self.w[name]
        r = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.eps)

        def backward(dy):
            self.grad[name] = np.sum(dy * x * r, axis=0)
            dn = dy * w
            return r * dn - x * r ** 3 * np.mean(dn * x, axis=1, keepdims=True)
        return x * r * w, backward

    def rotate(self, x, sign):  # (T, heads, D); sign -1: back, which is also the gradient
        angles = (np.arange(len(x)) - self.starts)[:, None, None] * self.frequencies
        cos, sin = np.cos(angles), sign * np.sin(angles)
        first, second = np.split(x, 2, axis=2)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)

    def attention(self, q, k, v):  # q (T, H, D); k, v (T, K, D) -> (T, H, D), causal
        length, _, dim = q.shape
        group = self.heads // self.kv_heads
        k_all, v_all = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k_all) / math.sqrt(dim)
        seen = np.tril(np.ones((length, length), bool)) & (np.arange(length) >= self.starts[:, None])
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=2, keepdims=True))
        p /= p.sum(axis=2, keepdims=True)

        def backward(dout):
            dp = np.einsum("ihd,jhd->hij", dout, v_all)
            ds = p * (dp - np.sum(dp * p, axis=2, keepdims=True)) / math.sqrt(dim)
            of_group = lambda g: g.reshape(length, self.kv_heads, group, dim).sum(axis=2)
            return (np.einsum("hij,jhd->ihd", ds, k_all), of_group(np.einsum("hij,ihd->jhd", ds, q)),
                    of_group(np.einsum("hij,ihd->jhd", p, dout)))
        return np.einsum("hij,jhd->ihd", p, v_all), backward

    def attention_half(self, prefix, x):
        length = len(x)
        n, norm_back = self.rmsnorm(prefix + "input_layernorm.weight", x)
        flat, back = zip(*(self.linear(f"{prefix}self_attn.{which}_proj.weight", n) for which in "qkv"))
        q, k, v = (part.reshape(length, -1, 2 * len(self.frequencies)) for part in flat)
        mixed, mix_back = self.attention(self.rotate(q, 1), self.rotate(k, 1), v)
        y, out_back = self.linear(prefix + "self_attn.o_proj.weight", mixed.reshape(length, -1))

        def backward(dy):
            dq, dk, dv = mix_back(out_back(dy).reshape(mixed.shape))
            parts = (self.rotate(dq, -1), self.rotate(dk, -1), dv)
            return norm_back(sum(f(d.reshape(length, -1)) for f, d in zip(back, parts)))
        return y, backward

    def mlp_half(self, prefix, x):
        n, norm_back = self.rmsnorm(prefix + "post_attention_layernorm.weight", x)
        gate, gate_back = self.linear(prefix + "mlp.gate_proj.weight", n)
        up, up_back = self.linear(prefix + "mlp.up_proj.weight", n)
        sigmoid = 1 / (1 + np.exp(-gate))
        y, down_back = self.linear(prefix + "mlp.down_proj.weight", gate * sigmoid * up)

        def backward(dy):
            dh = down_back(dy)
            dgate = dh * up * sigmoid * (1 + gate * (1 - sigmoid))
            return norm_back(gate_back(dgate) + up_back(dh * gate * sigmoid))
        return y, backward

    def loss_and_gradients(self, tokens, targets):
        length = len(tokens)
        ends = np.flatnonzero(tokens == self.document_token)  # behind each begins another document
        self.starts = np.array([max((end + 1 for end in ends if end < t), default=0) for t in range(length)])
        x = self.w["model.embed_tokens.weight"][tokens]
        halves = []
        for layer in range(self.layers):
            for half in (self.attention_half, self.mlp_half):
                y, back = half(f"model.layers.{layer}.", x)
                x = x + y
                halves.append(back)
        n, norm_back = self.rmsnorm("model.norm.weight", x)
        logits, head_back = self.linear("lm_head.weight", n)
        logits = logits - logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        rows = np.arange(length)
        dlogits = np.exp(log_p)
        dlogits[rows, targets] -= 1
        dx = norm_back(head_back(dlogits / length))
        for back in reversed(halves):
            dx = dx + back(dx)
        table = self.grad["model.embed_tokens.weight"] = np.zeros_like(self.w["model.embed_tokens.weight"])
        np.add.at(table, tokens, dx)
        return -log_p[rows, targets].mean(), self.grad


def learning_rate(step, flags):
    peak, warmup, steps = flags["lr"], int(flags["warmup-steps"]), int(flags["steps"])
    if step <= warmup:
        return peak * step / warmup
    if flags["lr-schedule"] == "constant":
        return peak
    done = (step - warmup) / (steps - warmup)
    left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[flags["lr-schedule"]]
    return flags["min-lr"] + (peak - flags["min-lr"]) * left


def train(model, tokens, targets, flags):
    """Yields loss and gradient norm (before clipping) of each step: clipped AdamW, decay of matrices only."""
    beta1, beta2 = flags["beta1"], flags["beta2"]
    m = {name: np.zeros_like(w) for name, w in model.w.items()}
    v = {name: np.zeros_like(w) for name, w in model.w.items()}
    for step in range(1, int(flags["steps"]) + 1):
        loss, gradients = model.loss_and_gradients(tokens, targets)
        assert gradients.keys() == model.w.keys()
        norm = math.sqrt(sum(np.sum(g * g) for g in gradients.values()))
        yield loss, norm
        factor = min(1.0, flags["clip"] / (norm + 1e-6))
        lr = learning_rate(step, flags)
        for name, w in model.w.items():
            g = gradients[name] * factor
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            m_hat, v_hat = m[name] / (1 - beta1 ** step), v[name] / (1 - beta2 ** step)
            decay = flags["weight-decay"] if w.ndim == 2 else 0.0
            model.w[name] = w - lr * (m_hat / (np.sqrt(v_hat) + flags["eps"]) + decay * w)


def main():
    folder, token_file, metrics = sys.argv[1:4]
    flags = dict(argument.split("=") for argument in sys.argv[4:])
    flags = {key: value if key == "lr-schedule" else float(value) for key, value in flags.items()}
    with open(os.path.join(folder, "config.json")) as file:
        model = Llama(json.load(file), load_weights(folder))
    model.document_token = flags.pop("document-token", None)
    with open(token_file, "rb") as file:
        sample = np.frombuffer(file.read(), np.uint8).astype(int)
    with open(metrics) as file:
        steps = [line for line in map(json.loads, file) if line["event"] == "step"]
    worst = {"loss": 0.0, "grad_norm": 0.0}
    expected = list(train(model, sample[:-1], sample[1:], flags))
    passed = len(steps) == len(expected) > 0
    for got, (loss, norm) in zip(steps, expected):
        for key, value in (("loss", loss), ("grad_norm", norm)):
            error = abs(got[key] / value - 1)
            worst[key] = max(worst[key], error)
            passed = passed and error <= TOLERANCE
        print(f"step {got['step']}: loss {got['loss']:.9g} against {loss:.9g}, "
              f"|g| {got['grad_norm']:.9g} against {norm:.9g}")
    print(f"{'ok' if passed else 'FAIL'}: worst deviation of the loss {worst['loss']:.2e}, "
          f"of the gradient norm {worst['grad_norm']:.2e}")
    sys.exit(0 if passed else 1)


main()
