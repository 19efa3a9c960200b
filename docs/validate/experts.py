"""A mixture of experts in the place of the MLP, as Mixtral and Qwen3-MoE have it: forward and hand-made backward pass.

R = B T rows, N experts, k of each row
"""

import math

import numpy as np


class Experts:
    """A part of Llama (llama.py). What the loss adds for balance, and a capacity, are in the flags of the run."""

    def __init__(self, config, aux_loss=0.0, z_loss=0.0, capacity_factor=0.0):
        self.count = config.get("num_experts") or config["num_local_experts"]
        self.top_k, self.normalized = config["num_experts_per_tok"], config.get("norm_topk_prob", False)
        self.block, self.names = "mlp.", ("gate_proj", "up_proj", "down_proj")
        if config["model_type"] == "mixtral":
            self.normalized, self.block, self.names = True, "block_sparse_moe.", ("w1", "w3", "w2")
        self.aux_loss, self.z_loss, self.capacity_factor = aux_loss, z_loss, capacity_factor

    def kept(self, chosen, length):
        """(R, k): whether a slot is within its expert's capacity, the earlier positions of a sequence first."""
        kept = np.ones(chosen.shape, bool)
        if self.capacity_factor > 0:
            capacity = math.ceil(self.capacity_factor * length * self.top_k / self.count)
            for first in range(0, len(chosen), length):
                taken = np.zeros(self.count, int)
                for row in range(first, first + length):
                    kept[row] = taken[chosen[row]] < capacity
                    taken[chosen[row]] += 1
        return kept

    def layer(self, llama, prefix, x):
        """x (B, T, E) -> (B, T, E). llama.add() is given the gradients."""
        length, rows = x.shape[1], x.reshape(-1, x.shape[2])
        router = llama.w[prefix + self.block + "gate.weight"]
        logits = rows @ router.T
        top = logits.max(axis=1, keepdims=True)
        lse = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        p = np.exp(logits - lse)
        chosen = np.argsort(-p, axis=1, kind="stable")[:, : self.top_k]  # of equal scores the first
        raw, kept = np.take_along_axis(p, chosen, axis=1), self.kept(chosen, length)
        total = raw.sum(axis=1, keepdims=True) if self.normalized else 1.0
        weights, y, backs = raw / total, np.zeros_like(rows), []
        for expert in range(self.count):
            row, slot = np.nonzero((chosen == expert) & kept)
            z, back = self.expert(llama, f"{prefix}{self.block}experts.{expert}.", rows[row])
            y[row] += weights[row, slot, None] * z
            backs.append((row, slot, z, back))

        def backward(dy):
            dy, dx, dweights = dy.reshape(rows.shape), np.zeros_like(rows), np.zeros_like(weights)
            for row, slot, z, back in backs:
                dweights[row, slot] = np.sum(dy[row] * z, axis=1)
                dx[row] += llama.of_expert(back(weights[row, slot, None] * dy[row]))
            dweights = llama.of_router(dweights)
            if self.normalized:
                dweights = dweights - np.sum(dweights * weights, axis=1, keepdims=True)
            aux_loss, z_loss = llama.balance()
            dp = aux_loss * self.unevenness(chosen, p.shape, length)
            np.put_along_axis(dp, chosen, np.take_along_axis(dp, chosen, axis=1) + dweights / total, axis=1)
            dlogits = p * (dp - np.sum(dp * p, axis=1, keepdims=True)) + 2 * z_loss / len(rows) * lse * p
            llama.add(prefix + self.block + "gate.weight", dlogits.T @ rows)
            return (dx + dlogits @ router).reshape(x.shape)

        return y.reshape(x.shape), backward

    def unevenness(self, chosen, shape, length):
        """The gradient by each score of the mean over sequences of sum f_i P_i."""
        gradient = np.zeros(shape)
        for first in range(0, len(chosen), length):
            slots = np.bincount(chosen[first : first + length].ravel(), minlength=self.count)
            gradient[first : first + length] = slots / len(chosen) * self.count / (self.top_k * length)
        return gradient

    def expert(self, llama, prefix, x):
        gate_w, up_w, down_w = (llama.w[f"{prefix}{name}.weight"] for name in self.names)
        gate, up = x @ gate_w.T, x @ up_w.T
        active, slope = llama.activation(gate)

        def backward(dz):
            dh = dz @ down_w
            dgate, dup = dh * up * slope, dh * active
            for name, gradient in zip(self.names, (dgate.T @ x, dup.T @ x, dz.T @ (active * up))):
                llama.add(f"{prefix}{name}.weight", gradient)
            return dgate @ gate_w + dup @ up_w

        return (active * up) @ down_w.T, backward
