"""Known faults, each as a Llama that computes one thing otherwise: here those of the backward pass and of parallel
ranks, in conventions.py those of the forward pass. doctor.py asks which of them, if any, gives a run's numbers to
rounding. KNOWN lists all; a new one is a class and a line there.
"""

import numpy as np

from . import conventions as of
from .llama import Llama

RANKS = (2, 4, 8)


# ---- the backward pass of one rank
class Backward(Llama):
    only_backward = True


class OnlyFirstQueryHead(Backward):
    """The gradient of keys and values is that of the group's first query head."""

    def of_group(self, gradient, head):
        return gradient[:, np.searchsorted(head, np.arange(self.kv_heads))]


class MeanOverQueryHeads(Backward):
    def of_group(self, gradient, head):
        return super().of_group(gradient, head) * self.kv_heads / self.heads


class CopiedHeads(Backward):
    """Tensor parallelism over more ranks than key/value heads: each of `copies` ranks has the weights of one, and keeps
    the gradient by its own query heads; that of their input is summed."""

    copies, kept = 2, ()

    def of_group(self, gradient, head):  # of k, then of v
        group = self.heads // self.kv_heads
        first = np.arange(self.heads) % group * self.copies < group
        self.kept = self.kept[-1:] + (super().of_group(gradient * first[:, None, None], head),)
        return super().of_group(gradient, head)

    def own(self, gradient, name):
        if not name.endswith(("k_proj", "v_proj")):
            return gradient
        dk, dv = self.kept
        return self.together(self.rotate(dk, -1, "k") if name.endswith("k_proj") else dv)

    def gradients(self, backward):
        if self.heads // self.kv_heads % self.copies or any("k_norm" in name for name in self.w):
            return None
        return super().gradients(backward)


class HeadNormsNotSummed(Backward):
    """Tensor parallelism: the gradients of q's and k's norms are those of the first rank's heads."""

    ranks = 2

    def own(self, gradient, name):
        return part(gradient, 1, self.ranks) if name.endswith(("q_norm", "k_norm")) else gradient


class TiedPart(Backward):
    """A tied weight has only the gradient of the head, or only that of the embedding."""

    lost = "model.embed_tokens"

    def own(self, gradient, name):
        return 0 * gradient if name == self.lost else gradient

    def gradients(self, backward):
        return super().gradients(backward) if self.tied else None


class Balanced(Backward):
    """Coefficients are added to those of the balancing loss and of the router's z-loss."""

    more = 0.0, 0.0

    def balance(self):
        return tuple(x + more for x, more in zip(super().balance(), self.more))


class RouterWithoutWeights(Backward):
    def of_router(self, gradient):
        return 0 * gradient


class ExpertsWithoutInput(Backward):
    def of_expert(self, gradient):
        return 0 * gradient


class SharedWithoutInput(Backward):
    def of_shared(self, gradient):
        return 0 * gradient


# ---- parallel ranks
def part(x, axis, ranks, rank=0):
    """Zero outside a rank's part of an axis."""
    inside = np.arange(x.shape[axis]) // (x.shape[axis] // ranks) == rank
    return x * inside.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


class NoSumAtF(Backward):
    """Tensor parallelism without f: the gradient of a column-parallel layer's input is each rank's own part."""

    ranks, rank, head_too = 2, 0, True

    def keep(self, x, axis):
        return part(x, axis, self.ranks, self.rank)

    def of_input(self, gradient, name):
        return self.keep(gradient, 2) if name.endswith(("o_proj", "down_proj")) else gradient

    def g(self, gradient, half):
        return self.keep(gradient, 2) if half == "head" and self.head_too else gradient

    def sharded(self, name):
        return "_proj" in name or "lm_head" in name and self.head_too

    def complete(self, name):
        return self.rank == 0 and not self.sharded(name) and super().complete(name)

    def gradients(self, backward):
        size = self.heads, self.kv_heads, self.config["intermediate_size"]
        if any(n % self.ranks for n in size):
            return None
        total = {}
        for self.rank in range(self.ranks):
            for name, g in super().gradients(backward).items():
                if name.endswith(("o_proj.weight", "down_proj.weight")):  # its columns are this rank's
                    g = self.keep(g, 1)
                elif name == "lm_head.weight" and self.head_too:
                    g = self.keep(g, 0)
                if self.rank == 0 or self.sharded(name):
                    total[name] = total.get(name, 0) + g
        return total


class SumAtG(Backward):
    """Tensor parallelism whose all-reduce at the exit sums in the backward pass, too: equal gradients, ranks times."""

    ranks, halves = 2, ("attention", "mlp")

    def g(self, gradient, half):
        return gradient * self.ranks if half in self.halves else gradient


class FirstChunkOnly(Backward):
    """Context parallelism without the sum over its ranks: each weight's gradient is that of the first chunk, which is
    counted `times`."""

    ranks, times = 2, 1

    def own(self, gradient, name):
        axis = gradient.ndim - 2  # positions
        first = np.arange(gradient.shape[axis]) * self.ranks < gradient.shape[axis]
        return gradient * first[:, None] * self.times


class NormsNotSummed(FirstChunkOnly):
    """Sequence parallelism: the gradients of norms, but not of heads', are those of the first rank's positions."""

    def own(self, gradient, name):
        return super().own(gradient, name) if name.endswith(("layernorm", "model.norm")) else gradient


class BlockLse(Backward):
    """Ring attention whose backward pass normalises each block of keys by the block's own sum."""

    ranks = 2

    def attention_backward(self, q, k, v, p, dout, delta):
        chunk, _ = of.chunks(p.shape[3], self.ranks)
        p = p.copy()
        for i in range(self.ranks):
            keys = chunk == i
            total = p[..., keys].sum(axis=3, keepdims=True)
            p[..., keys] = np.divide(p[..., keys], total, out=np.zeros_like(p[..., keys]), where=total > 0)
        return super().attention_backward(q, k, v, p, dout, delta)


class KeysNotReturned(Backward):
    """Ring attention that loses the gradients of the other ranks' keys and values."""

    ranks = 2

    def attention_backward(self, q, k, v, p, dout, delta):
        chunk, _ = of.chunks(p.shape[3], self.ranks)
        dq, _, _ = super().attention_backward(q, k, v, p, dout, delta)
        own = p * (chunk[:, None] == chunk)
        _, dk, dv = super().attention_backward(q, k, v, own, dout, delta)
        return dq, dk, dv


def made(kind, **values):
    return type(kind.__name__, (kind,), values)


def _known():
    yield "RoPE: cos and sin in bf16", of.RopeTable
    yield "RoPE: cos and sin in fp32", made(of.RopeTable, dtype="fp32")
    yield "RoPE: angles in bf16", of.RopeAngles
    yield "RoPE: angles in fp32", made(of.RopeAngles, dtype="fp32")
    for base in (1e4, 5e4, 1e5, 5e5, 1e6):
        yield f"RoPE: base {base:g}", made(of.RopeBase, base=base)
    yield "RoPE: scaling of frequencies ignored", of.RopeUnscaled
    yield "RoPE: interleaved pairs", of.RopeInterleaved
    yield "RoPE: frequencies base^(-i / D)", of.RopeExponent
    yield "RoPE: rotated backwards", of.RopeBackwards
    yield "RoPE: the sine is lost", of.RopeNoSine
    yield "RoPE: k is not rotated", made(of.RopeOnly, rotated="q")
    yield "RoPE: q is not rotated", made(of.RopeOnly, rotated="k")
    yield "RoPE: nothing is rotated", of.RopeOnly
    yield "RoPE: positions of q are one too large", of.PositionsOffByOneOnQueries
    yield "documents are ignored: attention sees the others, positions do not restart", of.NoDocuments
    yield "documents: attention sees the others, positions restart", of.MaskIgnoresDocuments
    yield "documents: their token is the next document's first", of.TokenBeginsDocument
    yield "attention: scaled by 1 / D", of.AttentionScale
    yield "attention: not scaled", made(of.AttentionScale, power=0.0)
    yield "attention: scaled by 1 / sqrt(hidden)", of.ScaleOfHidden
    yield "attention: the mask sees one token ahead", of.Mask
    yield "attention: no causal mask", made(of.Mask, ahead=1 << 30)
    yield "attention: a token does not see itself", made(of.Mask, ahead=-1)
    yield "grouped heads: tiled instead of repeated", of.HeadsTiled
    yield "grouped heads: all use the first key/value head", of.FirstKeyHead
    yield "grouped heads: gradient of the first query head only", OnlyFirstQueryHead
    yield "grouped heads: mean over query heads instead of their sum", MeanOverQueryHeads
    yield "MLP: GELU instead of SiLU", of.Gelu
    yield "MLP: GELU by tanh instead of SiLU", of.GeluTanh
    yield "MLP: ReLU instead of SiLU", of.Relu
    yield "MLP: sigmoid instead of SiLU", of.Sigmoid
    yield "MLP: gate and up are swapped", of.GateAndUpSwapped
    yield "experts: weights of a token do not sum to 1", made(of.OfExperts, values={"normalized": False})
    yield "experts: weights of a token sum to 1", made(of.OfExperts, values={"normalized": True})
    yield "experts: one more of each token", of.TopK
    yield "experts: one less of each token", made(of.TopK, more=-1)
    for factor in (1e-4, 1e-3, 1e-2):
        yield f"experts: a balancing loss of {factor:g} is added", made(Balanced, more=(factor, 0.0))
        yield f"experts: a z-loss of the router of {factor:g} is added", made(Balanced, more=(0.0, factor))
    yield "experts: the router has no gradient from their weights", RouterWithoutWeights
    yield "experts: their input has no gradient from them", ExpertsWithoutInput
    yield "experts: scores by a softmax instead of a sigmoid", made(of.OfExperts, values={"sigmoid": False})
    yield "experts: scores by a sigmoid instead of a softmax", made(of.OfExperts, values={"sigmoid": True})
    yield "experts: weights are not scaled", made(of.OfExperts, values={"scale": 1.0})
    yield "experts: chosen from all groups", made(of.OfExperts, values={"groups": 1})
    yield "experts: the bias is ignored", made(of.OfExperts, values={"bias_in_choice": lambda bias: 0 * bias})
    yield "experts: the bias is in their weights, too", made(of.OfExperts, values={"bias_in_weights": lambda bias: bias})
    yield "experts: groups are chosen by their best expert", made(of.OfExperts, values={"counted": 1})
    yield "experts: groups are chosen by the sum of all of their experts", made(of.OfExperts, values={"counted": 1000})
    yield "experts: the shared experts are left out", made(of.OfExperts, values={"shared_scale": 0.0})
    yield "experts: the shared experts are scaled, too", of.SharedScaled
    yield "experts: the shared experts' input has no gradient from them", SharedWithoutInput
    for eps in (0.0, 1e-8, 1e-6, 1e-5, 1e-3):
        yield f"RMSNorm: eps {eps:g}", made(of.NormEps, value=eps)
    yield "RMSNorm: gain 1 + w", of.NormGainPlusOne
    yield "RMSNorm: the mean is subtracted", of.LayerNorm
    yield "RMSNorm: none before the head", of.NoFinalNorm
    yield "embedding: times sqrt(hidden)", of.EmbeddingScaled
    yield "targets: shifted twice", of.TargetsShifted
    yield "targets: not shifted", of.TargetsAreInputs
    yield "q, k, v: biases are ignored", of.NoBias
    yield "q, k: norms are ignored", of.NoHeadNorm
    yield "q, k: norms after RoPE", of.HeadNormAfterRope
    yield "tied weights: gradient of the embedding is lost", TiedPart
    yield "tied weights: gradient of the head is lost", made(TiedPart, lost="lm_head")
    for n in RANKS:
        yield f"context parallelism ({n} ranks): positions begin at 0 on each", made(of.PositionsPerChunk, ranks=n)
        yield f"context parallelism ({n} ranks): causal mask on every block", made(of.MaskPerBlock, ranks=n)
        yield f"context parallelism ({n} ranks): no rank sees the others' keys", made(of.MaskOwnBlock, ranks=n)
        yield f"context parallelism ({n} ranks): backward with the block's own log-sum-exp", made(BlockLse, ranks=n)
        yield f"context parallelism ({n} ranks): gradients of the others' keys are lost", made(KeysNotReturned, ranks=n)
        for times in (1, n):
            yield (
                f"context parallelism ({n} ranks): gradients are not summed"
                + (f", but multiplied by {n}" if times > 1 else "")
            ), made(FirstChunkOnly, ranks=n, times=times)
        yield f"tensor parallelism: gradients of {n} copies of each key/value head are not summed", made(
            CopiedHeads, copies=n
        )
        yield f"tensor parallelism ({n} ranks): gradients of q's and k's norms are not summed", made(
            HeadNormsNotSummed, ranks=n
        )
        yield f"sequence parallelism ({n} ranks): gradients of norms are not summed", made(NormsNotSummed, ranks=n)
        yield (f"tensor parallelism ({n} ranks): no f, the inputs' gradients are not summed"), made(NoSumAtF, ranks=n)
        yield (f"tensor parallelism ({n} ranks): no f in the blocks, the inputs' gradients are not summed"), made(
            NoSumAtF, ranks=n, head_too=False
        )
        for halves in (("attention", "mlp"), ("attention",), ("mlp",)):
            which = f" of {halves[0]}" if len(halves) == 1 else ""
            yield f"tensor parallelism ({n} ranks): g{which} sums in the backward pass, too", made(
                SumAtG, ranks=n, halves=halves
            )


KNOWN = dict(_known())
