"""Faults of conventions: Llamas whose forward pass computes one thing otherwise. replays.py lists them."""

import numpy as np

from .llama import Llama
from .runs import DIGITS


def rounded(x, dtype):
    """To the nearest number of a dtype."""
    if dtype == "fp32":
        return x.astype(np.float32).astype(np.float64)
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2 ** DIGITS[dtype]) / 2 ** DIGITS[dtype], exponent)


# ---- conventions of the forward pass
class RopeTable(Llama):
    """cos and sin are rounded."""

    dtype = "bf16"

    def cos_sin(self, positions):
        return tuple(rounded(x, self.dtype) for x in super().cos_sin(positions))


class RopeAngles(Llama):
    """The angles, and thereby positions x frequencies, are rounded."""

    dtype = "bf16"

    def cos_sin(self, positions):
        angles = rounded(
            rounded(positions * 1.0, self.dtype)[:, None, :, None] * rounded(self.frequencies, self.dtype), self.dtype
        )
        return np.cos(angles), np.sin(angles)


class RopeBase(Llama):
    base = 10000.0

    def __init__(self, config, *args, **more):
        super().__init__({**config, "rope_theta": self.base}, *args, **more)


class RopeUnscaled(Llama):
    def __init__(self, config, *args, **more):
        super().__init__({**config, "rope_scaling": None}, *args, **more)


class RopeExponent(Llama):
    """Frequencies base^(-i / D) instead of base^(-2 i / D)."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.frequencies = self.config.get("rope_theta", 10000.0) ** (-np.arange(self.dim // 2) / self.dim)


class RopeInterleaved(Llama):
    """Pairs (0, 1), (2, 3), ... instead of (0, D/2), (1, D/2 + 1), ..."""

    def rotate(self, x, sign, which):
        cos, sin = self.angles
        first, second = x[..., 0::2], x[..., 1::2]
        y = np.empty_like(x)
        y[..., 0::2], y[..., 1::2] = first * cos - sign * second * sin, second * cos + sign * first * sin
        return y


class RopeBackwards(Llama):
    def rotate(self, x, sign, which):
        return super().rotate(x, -sign, which)


class RopeOnly(Llama):
    """Only q or only k is rotated, or neither."""

    rotated = ""

    def rotate(self, x, sign, which):
        return super().rotate(x, sign, which) if which in self.rotated else x


class RopeNoSine(Llama):
    def cos_sin(self, positions):
        cos, sin = super().cos_sin(positions)
        return cos, 0 * sin


def chunks(length, ranks):
    """(length): the context-parallel rank of each position; and the positions of a rank."""
    size = -(-length // ranks)
    return np.arange(length) // size, size


class PositionsPerChunk(Llama):
    """Positions begin at 0 on each of `ranks` context ranks."""

    ranks = 2

    def positions(self, tokens):
        return super().positions(tokens) % chunks(tokens.shape[1], self.ranks)[1]


class PositionsOffByOneOnQueries(Llama):
    def rotate(self, x, sign, which):
        if which == "k":
            return super().rotate(x, sign, which)
        angles, self.angles = self.angles, self.shifted
        y = super().rotate(x, sign, which)
        self.angles = angles
        return y

    def cos_sin(self, positions):
        self.shifted = super().cos_sin(positions + 1)
        return super().cos_sin(positions)


class AttentionScale(Llama):
    power = -1.0  # of the head size; -0.5 is right

    def attention_scale(self):
        return self.dim**self.power


class ScaleOfHidden(Llama):
    def attention_scale(self):
        return self.config["hidden_size"] ** -0.5


class Mask(Llama):
    """Query i sees keys up to i + ahead."""

    ahead = 1

    def visible(self, tokens):
        place = np.arange(tokens.shape[1])
        seen = (place[:, None] + self.ahead >= place) & (place >= self.starts(tokens)[:, :, None])
        seen[:, 0, 0] = True
        return seen


class NoDocuments(Llama):
    def starts(self, tokens):
        return np.zeros_like(tokens)


class TokenBeginsDocument(Llama):
    """The document token is the first of the next document, not the last of its own."""

    def starts(self, tokens):
        begins = np.where(tokens == self.document_token, np.arange(tokens.shape[1]), 0)
        return np.maximum.accumulate(begins, axis=1)


class MaskIgnoresDocuments(Llama):
    def visible(self, tokens):
        place = np.arange(tokens.shape[1])
        return np.broadcast_to(place[:, None] >= place, (len(tokens), len(place), len(place)))


class MaskPerBlock(Llama):
    """Causal within every block of context-parallel ranks, instead of on the diagonal only."""

    ranks = 2

    def visible(self, tokens):
        place = np.arange(tokens.shape[1]) % chunks(tokens.shape[1], self.ranks)[1]
        return super().visible(tokens) & (place[:, None] >= place)


class MaskOwnBlock(Llama):
    """Context-parallel ranks never see the others' keys."""

    ranks = 2

    def visible(self, tokens):
        chunk, _ = chunks(tokens.shape[1], self.ranks)
        return super().visible(tokens) & (chunk[:, None] == chunk)


class HeadsTiled(Llama):
    """Query head h uses key/value head h mod K."""

    def key_head(self):
        return np.arange(self.heads) % self.kv_heads


class FirstKeyHead(Llama):
    def key_head(self):
        return np.zeros(self.heads, int)


class GeluTanh(Llama):
    def activation(self, gate):
        c, k = np.sqrt(2 / np.pi), 0.044715
        t = np.tanh(c * (gate + k * gate**3))
        return 0.5 * gate * (1 + t), 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * c * (1 + 3 * k * gate * gate)


class Gelu(Llama):
    def activation(self, gate):
        # erf by its series and continued fraction would be long: math.erf, element by element
        from math import erf

        phi = 0.5 * (1 + np.vectorize(erf, otypes=[float])(gate / np.sqrt(2)))
        return gate * phi, phi + gate * np.exp(-gate * gate / 2) / np.sqrt(2 * np.pi)


class Relu(Llama):
    def activation(self, gate):
        return np.maximum(gate, 0), (gate > 0) * 1.0


class Sigmoid(Llama):
    def activation(self, gate):
        y = 1 / (1 + np.exp(-gate))
        return y, y * (1 - y)


class GateAndUpSwapped(Llama):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        if self.experts:
            gate, up, down = self.experts.names
            self.experts.names = up, gate, down

    def linear(self, name, x):
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}  # also of shared experts
        for old, new in swap.items():
            if name.endswith(old):
                return super().linear(name[: -len(old)] + new, x)
        return super().linear(name, x)


class OfExperts(Llama):
    """Experts (experts.py) with other values."""

    values = {}

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        for name, value in self.values.items() if self.experts else ():
            setattr(self.experts, name, value)


class SharedScaled(Llama):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        if self.experts:
            self.experts.shared_scale = self.experts.scale


class TopK(Llama):
    more = 1

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        if self.experts:
            self.experts.top_k = min(max(self.experts.top_k + self.more, 1), self.experts.count)


class NormEps(Llama):
    value = 1e-6

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.eps = self.value


class NormGainPlusOne(Llama):
    def norm_gain(self, w):
        return 1 + w


class LayerNorm(Llama):
    """The mean is subtracted first."""

    def rmsnorm(self, name, x):
        y, back = super().rmsnorm(name, x - x.mean(axis=-1, keepdims=True))

        def backward(dy):
            dx = back(dy)
            return dx - dx.mean(axis=-1, keepdims=True)

        return y, backward


class NoFinalNorm(Llama):
    def rmsnorm(self, name, x):
        if name != "model.norm":
            return super().rmsnorm(name, x)

        def backward(dy):
            self.add(name + ".weight", np.zeros(x.shape[-1]))
            return dy

        return x, backward


class EmbeddingScaled(Llama):
    def embedding(self, tokens):
        scale = np.sqrt(self.config["hidden_size"])
        x, back = super().embedding(tokens)
        return x * scale, lambda dx: back(dx * scale)


class TargetsShifted(Llama):
    """The loss shifts targets that were shifted before; the last of each sample has none."""

    def shift(self, targets):
        return np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], axis=1)


class TargetsAreInputs(Llama):
    def loss(self, tokens, targets):
        return super().loss(tokens, np.where(targets >= 0, tokens, -1))


class NoBias(Llama):
    def linear(self, name, x):
        bias = self.w.get(name + ".bias")
        if bias is None:
            return super().linear(name, x)
        weights, self.w = self.w, {key: w for key, w in self.w.items() if key != name + ".bias"}
        y, back = super().linear(name, x)
        self.w = weights

        def backward(dy):
            self.add(name + ".bias", np.zeros_like(bias))
            return back(dy)

        return y, backward


class NoHeadNorm(Llama):
    def rmsnorm(self, name, x):
        if not name.endswith(("q_norm", "k_norm")):
            return super().rmsnorm(name, x)

        def backward(dy):
            self.add(name + ".weight", np.zeros(x.shape[-1]))
            return dy

        return x, backward


class HeadNormAfterRope(Llama):
    def attention_half(self, prefix, x, visible):
        if prefix + "self_attn.q_norm.weight" not in self.w:
            return super().attention_half(prefix, x, visible)
        rotate, names = self.rotate, {"q": prefix + "self_attn.q_norm", "k": prefix + "self_attn.k_norm"}
        norm, backs = super().rmsnorm, {}

        def rotate_then_norm(x, sign, which):
            if sign == 1:
                y, backs[which] = norm(names[which], rotate(x, 1, which))
                return y
            return rotate(self.backs[prefix][which](x), -1, which)

        if not hasattr(self, "backs"):
            self.backs = {}
        self.backs[prefix] = backs
        self.rotate, self.rmsnorm = rotate_then_norm, lambda name, x: (
            (x, lambda dy: dy) if name in names.values() else norm(name, x)
        )
        y, back = super().attention_half(prefix, x, visible)
        del self.rotate, self.rmsnorm

        def backward(dy):
            self.rotate = rotate_then_norm
            dx = back(dy)
            del self.rotate
            return dx

        return y, backward
