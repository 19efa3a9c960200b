"""A mixture of experts in the place of the MLP, as Mixtral, Qwen3-MoE and dots.llm1 (DeepSeek-V3's router) have it:
forward and hand-made backward pass.

R = B T rows, N experts, k of each row
"""

import math

import numpy as np


class Experts:
    """A part of Llama (llama.py). What the loss adds for balance, and a capacity, are in the flags of the run."""

    def __init__(self, config, aux_loss=0.0, of_batch=False, z_loss=0.0, capacity_factor=0.0, bias_rate=0.0):
        if of_batch and aux_loss > 0:
            raise NotImplementedError("aux-loss-over batch, which needs the loads of the step before")
        kind = config["model_type"]
        self.count = config.get("n_routed_experts") or config.get("num_experts") or config["num_local_experts"]
        self.sigmoid, self.scale = kind == "dots1", config.get("routed_scaling_factor", 1.0)
        self.groups, self.top_groups = config.get("n_group", 1), config.get("topk_group", 1)
        self.top_k, self.normalized = config["num_experts_per_tok"], config.get("norm_topk_prob", False)
        self.block, self.names = "mlp.", ("gate_proj", "up_proj", "down_proj")
        if kind == "mixtral":
            self.normalized, self.block, self.names = True, "block_sparse_moe.", ("w1", "w3", "w2")
        self.aux_loss, self.z_loss, self.capacity_factor, self.bias_rate = aux_loss, z_loss, capacity_factor, bias_rate
        self.counted, self.shared_scale = 2, 1.0  # of a group's experts, for its score; of the shared experts' output
        self.bias_in_choice, self.bias_in_weights = 1, 0
        self.loads = {}  # of each bias, in the last forward pass: how often each expert was chosen

    def choose(self, scores):
        """(R, k): of equal scores the first. Of groups, the best ones by the sum of their two best scores."""
        if self.groups > 1:
            of_group = scores.reshape(len(scores), self.groups, -1)
            best = np.argsort(-np.sort(of_group, axis=2)[:, :, -self.counted :].sum(axis=2), axis=1, kind="stable")
            left_out = np.ones(of_group.shape[:2], bool)
            np.put_along_axis(left_out, best[:, : self.top_groups], False, axis=1)
            scores = np.where(np.repeat(left_out, of_group.shape[2], axis=1), -np.inf, scores)
        return np.argsort(-scores, axis=1, kind="stable")[:, : self.top_k]

    def after_step(self, weights):
        """The weights with the biases moved against the load of the last forward pass."""
        moved = dict(weights)
        for name, load in self.loads.items():
            moved[name] = weights[name] + self.bias_rate * np.sign(load.mean() - load)
        return moved

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
        softmax = np.exp(logits - lse)
        p = 1 / (1 + np.exp(-logits)) if self.sigmoid else softmax
        name = prefix + self.block + "gate.e_score_correction_bias"
        bias = llama.w.get(name, np.zeros(self.count))
        chosen = self.choose(p + self.bias_in_choice * bias)
        if name in llama.w:
            self.loads[name] = np.bincount(chosen.ravel(), minlength=self.count)
        raw = np.take_along_axis(p + self.bias_in_weights * bias, chosen, axis=1)
        kept = self.kept(chosen, length)
        total = raw.sum(axis=1, keepdims=True) if self.normalized else 1.0
        weights, y, backs = self.scale * raw / total, np.zeros_like(rows), []
        for expert in range(self.count):
            row, slot = np.nonzero((chosen == expert) & kept)
            z, back = self.expert(llama, f"{prefix}{self.block}experts.{expert}.", rows[row])
            y[row] += weights[row, slot, None] * z
            backs.append((row, slot, z, back))
        y, shared_back = y.reshape(x.shape), lambda dy: 0.0
        if prefix + self.block + "shared_experts.gate_proj.weight" in llama.w:
            z, shared_back = llama.mlp(prefix + self.block + "shared_experts.", x)
            y = y + self.shared_scale * z

        def backward(dy):
            dx_shared = llama.passed(shared_back(self.shared_scale * dy), "shared")
            dy, dx, dweights = dy.reshape(rows.shape), np.zeros_like(rows), np.zeros_like(weights)
            for row, slot, z, back in backs:
                dweights[row, slot] = np.sum(dy[row] * z, axis=1)
                dx[row] += llama.passed(back(weights[row, slot, None] * dy[row]), "expert")
            dweights = llama.passed(dweights, "router")
            by_total = np.sum(dweights * weights, axis=1, keepdims=True) if self.normalized else 0.0
            dweights = self.scale * dweights - by_total
            dp = llama.experts.aux_loss * self.unevenness(chosen, p.shape, length)
            if self.sigmoid:  # the loss takes each row's scores as shares of their sum
                shares = p / p.sum(axis=1, keepdims=True)
                dp = (dp - np.sum(dp * shares, axis=1, keepdims=True)) / p.sum(axis=1, keepdims=True)
            np.put_along_axis(dp, chosen, np.take_along_axis(dp, chosen, axis=1) + dweights / total, axis=1)
            slope = dp * (1 - p) if self.sigmoid else dp - np.sum(dp * p, axis=1, keepdims=True)
            dlogits = p * slope + 2 * llama.experts.z_loss / len(rows) * lse * softmax
            llama.add(prefix + self.block + "gate.weight", dlogits.T @ rows)
            return (dx + dlogits @ router).reshape(x.shape) + dx_shared

        return y, backward

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
