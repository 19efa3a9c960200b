"""A mixture of experts in the place of the MLP, as Mixtral, Qwen3-MoE and dots.llm1 (DeepSeek-V3's router) have it.

R = B T rows, N experts, k of each row
"""

import math

import numpy as np

from .tape import Value, elementwise, log_sum_exp, shares


def sigmoid(x):
    y = 1 / (1 + np.exp(-x))
    return y, y * (1 - y)


def exponential(x):
    y = np.exp(x - x.max(axis=1, keepdims=True))
    return y, y


class Experts:
    """A part of Llama (llama.py). What the loss adds for balance, and a capacity, are in the flags of the run."""

    def __init__(self, config, aux_loss=0.0, router_z_loss=0.0, capacity_factor=0.0, router_bias_rate=0.0):
        kind = config["model_type"]
        self.count = config.get("n_routed_experts") or config.get("num_experts") or config["num_local_experts"]
        self.sigmoid, self.scale = kind == "dots1", config.get("routed_scaling_factor", 1.0)
        self.groups, self.top_groups = config.get("n_group", 1), config.get("topk_group", 1)
        self.top_k, self.normalized = config["num_experts_per_tok"], config.get("norm_topk_prob", False)
        self.block, self.names = "mlp.", ("gate_proj", "up_proj", "down_proj")
        if kind == "mixtral":
            self.normalized, self.block, self.names = True, "block_sparse_moe.", ("w1", "w3", "w2")
        self.aux_loss, self.router_z_loss = aux_loss, router_z_loss
        self.aux_of_all = 0.0  # of Hugging Face's balancing loss: f and P are means over the rows of all layers at once
        self.capacity_factor, self.router_bias_rate = capacity_factor, router_bias_rate
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
        moves = {name: self.router_bias_rate * np.sign(load.mean() - load) for name, load in self.loads.items()}
        return {**weights, **{name: weights[name] + move for name, move in moves.items()}}

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
        """x (B, T, E) -> (B, T, E)."""
        length, rows, block = x.x.shape[1], x.reshape(-1, x.x.shape[2]), prefix + self.block
        logits = llama.linear(block + "gate", rows)
        p = elementwise(logits, sigmoid) if self.sigmoid else shares(elementwise(logits, exponential))
        name = block + "gate.e_score_correction_bias"
        bias = llama.w.get(name, np.zeros(self.count))
        chosen = self.choose(p.x + self.bias_in_choice * bias)
        if name in llama.w:
            self.loads[name] = np.bincount(chosen.ravel(), minlength=self.count)
        raw = (p + Value(self.bias_in_weights * bias))[np.arange(len(chosen))[:, None], chosen]
        weights = llama.hook((shares(raw) if self.normalized else raw) * self.scale, "router")
        kept, y = self.kept(chosen, length), []
        for expert in range(self.count):
            row, slot = np.nonzero((chosen == expert) & kept)
            z = llama.mlp(f"{block}experts.{expert}.", llama.hook(rows[row], "expert"), self.names)
            y.append((row, z, weights[row, slot]))
        self.balance(llama, logits, p, chosen, length)
        y = self.together(y, rows).reshape(*x.x.shape)
        if block + "shared_experts.gate_proj.weight" not in llama.w:
            return y
        return y + llama.mlp(block + "shared_experts.", llama.hook(x, "shared")) * self.shared_scale

    def together(self, parts, rows):
        """(R, E): the sum of (its rows, outputs, weights) of each expert."""
        y = np.zeros_like(rows.x)
        for row, z, weights in parts:
            y[row] += weights.x[:, None] * z.x

        def back(d):
            for row, z, weights in parts:
                yield weights.x[:, None] * d[row]
                yield np.sum(d[row] * z.x, axis=1)

        return Value(y, back, *(value for _, z, weights in parts for value in (z, weights)))

    def balance(self, llama, logits, p, chosen, length):
        """What the loss adds: the mean over sequences of sum f_i P_i, P_i of each row's scores as shares of their sum;
        the mean square of the routers' log-sum-exp."""
        by_score, lse = np.zeros(p.x.shape), log_sum_exp(logits.x)
        for first in range(0, len(chosen), length):
            slots = np.bincount(chosen[first : first + length].ravel(), minlength=self.count)
            by_score[first : first + length] = slots / len(chosen) * self.count / (self.top_k * length)
        scores, slots = shares(p) if self.sigmoid else p, llama.slots
        slots.append(np.bincount(chosen.ravel(), minlength=self.count))

        def balancing():
            of_all = self.count * sum(slots) / (len(slots) * len(chosen)) ** 2
            return llama.experts.aux_loss * by_score + llama.experts.aux_of_all * of_all

        llama.penalties.append((scores, balancing))
        softmax = np.exp(logits.x - lse)
        llama.penalties.append((logits, lambda: 2 * llama.experts.router_z_loss / len(chosen) * lse * softmax))
