"""Subclasses of Plan, each with one fault.

PLANTS: {name: class}; EXPECTED: {name: (phase, place, name of the fault)} for tests/strangers/run.py.
"""

import torch
import torch.nn.functional as F
from plan import Plan, Sum

PLANTS, EXPECTED = {"none": Plan}, {"none": ("agree", "", "")}
LATER = "later"


def plant(phase, place="", named=""):
    """Registers a fault. phase: forward, backward, update, later, agree. place, named: words that must be printed."""

    def register(kind):
        PLANTS[kind.__name__], EXPECTED[kind.__name__] = kind, (phase, place, named)
        return kind

    return register


# ---- RoPE and attention
@plant("forward", named="base 500000")
class rope_base(Plan):
    def __init__(self, *args):
        super().__init__(*args)
        self.base = 5e5


@plant("forward", named="cos and sin in bf16")
class rope_table_bf16(Plan):
    def table(self, positions):
        return tuple(x.to(torch.bfloat16).to(x.dtype) for x in super().table(positions))


@plant("forward", named="interleaved")
class rope_interleaved(Plan):
    def rotate(self, x, which):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1).flatten(-2)


@plant("forward", named="k is not rotated")
class rope_k_not_rotated(Plan):
    def rotate(self, x, which):
        return super().rotate(x, which) if which == "q" else x


@plant("agree")
class rope_positions_plus_one(Plan):
    def positions(self, first, count):
        return super().positions(first + 1, count)


@plant("forward", named="1 / D")
class attention_scale(Plan):
    def scale(self, dim):
        return 1 / dim


@plant("forward", named="one token ahead")
class mask_ahead(Plan):
    def visible(self, query, key):
        return query + 1 >= key


@plant("forward", named="tiled")
class heads_tiled(Plan):
    def repeat(self, x, group):
        return x.repeat(1, group, 1, 1)


# ---- norm and MLP
@plant("forward", named="GELU instead")
class gelu(Plan):
    def gated(self, gate, up):
        return F.gelu(gate) * up


@plant("forward", named="swapped")
class gate_and_up(Plan):
    def gated(self, gate, up):
        return F.silu(up) * gate


@plant("forward", named="eps 1e-06")
class norm_eps(Plan):
    def __init__(self, *args):
        super().__init__(*args)
        self.norm_eps = 1e-6


# ---- targets and loss
@plant("forward", named="shifted twice")
class labels_twice(Plan):
    def aims(self, targets):
        return torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], -1)], 1)

    def normalised(self, loss, targets, counts, micro_batches):
        return super().normalised(loss, targets, counts - len(targets) * (counts // targets.numel()), micro_batches)


class Masks(Plan):
    """Each rank or micro-batch has its own number of targets."""


@plant("forward", named="mean of means")
class mean_of_means(Masks):
    def normalised(self, loss, targets, counts, micro_batches):
        return loss / (targets >= 0).sum() / micro_batches / self.dp


@plant("forward", "weights of targets", "mask of targets is ignored")
class mask_ignored(Masks):
    def aims(self, targets):
        return self.full[self.at : self.at + len(targets)]

    def read(self, step):
        self.full, self.at = step.tokens[:, 1:], 0
        return super().read(step)

    def rows(self, per_rank, begin, micro):
        rows = super().rows(per_rank, begin, micro)
        self.at = rows.start
        return rows

    def normalised(self, loss, targets, counts, micro_batches):
        return loss / self.full.numel()


@plant("backward", named="x the reference's")
class sum_for_mean(Plan):
    def after_backward(self, model):
        for p in model.parameters():
            p.grad.mul_(4)


@plant("backward", "weights of targets", "only samples")
class dp_not_reduced(Plan):
    def reduce(self, parameters):
        for p in parameters:
            p.grad.mul_(self.dp)


@plant("forward", "weights of targets", "only samples")
class dp_same_data(Plan):
    def rows(self, per_rank, begin, micro):
        return slice(begin, begin + micro)


@plant("backward", "weights of targets", "only samples")
class last_micro_batch(Plan):
    def backward(self, loss, begin, last, model):
        if last:
            model.zero_grad()
        loss.backward()


# ---- context parallelism
@plant("forward", named="positions begin at 0")
class cp_positions(Plan):
    def positions(self, first, count):
        return super().positions(0, count)


@plant("forward", named="causal mask on every block")
class cp_mask(Plan):
    def visible(self, query, key):
        size = int(key[-1] + 1) // self.cp
        return super().visible(query, key) & (query % size >= key % size)


@plant("backward", named="gradients of the others' keys are lost")
class cp_keys_lost(Plan):
    return_keys = False


@plant("backward", named="gradients are not summed")
class cp_not_reduced(Plan):
    def reduce(self, parameters):
        pass


# ---- tensor parallelism
@plant("backward", "model.norm", "no f, the inputs")
class tp_no_f(Plan):
    def f(self, x, half):
        return x


@plant("backward", "post_attention_layernorm", "no f in the blocks")
class tp_no_f_in_blocks(Plan):
    def f(self, x, half):
        return super().f(x, half) if half == "head" else x


@plant("backward", "down_proj", "g sums in the backward")
class tp_g_twice(Plan):
    def g(self, x, half):
        return Sum.apply(x, self.tp_group, True, True)


# ---- grouped heads, ties
@plant("backward", "v_proj", "")
class one_head_lost(Plan):
    def values(self, v):
        keep = torch.ones(v.shape[1], 1, 1)
        keep[-1] = 0.5
        return v * keep + (v * (1 - keep)).detach()


@plant("backward", "embed_tokens", "gradient of the head is lost")
class tied_head_lost(Plan):
    def head_weight(self, weight):
        return weight.detach()


@plant("backward", "embed_tokens", "gradient of the embedding is lost")
class tied_embedding_lost(Plan):
    def embed(self, table, tokens):
        return F.embedding(tokens, table.weight.detach()) + 0 * table.weight.sum()


# ---- optimizer
class Own(torch.optim.Optimizer):
    """AdamW by hand."""

    def __init__(self, reference, model, **changed):
        self.r, self.names = reference, {p: name for name, p in model.named_parameters()}
        self.inside, self.correct, self.l2, self.decays, self.t = False, True, False, lambda name, p: p.dim() > 1, 0
        self.__dict__.update(changed)
        super().__init__([p for p in model.parameters()], {"lr": 1.0})

    @torch.no_grad()
    def step(self):
        (b1, b2), eps, self.t = self.r.betas, self.r.eps, self.t + 1
        for group in self.param_groups:
            for p in group["params"]:
                s, g = self.state[p], p.grad
                decay = self.r.decay if self.decays(self.names[p], p) else 0.0
                if self.l2:
                    g, decay = g + decay * p, 0.0
                s["m"] = b1 * s.get("m", torch.zeros_like(p)) + (1 - b1) * g
                s["v"] = b2 * s.get("v", torch.zeros_like(p)) + (1 - b2) * g * g
                m = s["m"] / (1 - b1**self.t if self.correct else 1)
                v = s["v"] / (1 - b2**self.t if self.correct else 1)
                u = m / ((v + eps).sqrt() if self.inside else v.sqrt() + eps)
                p.sub_(group["lr"] * (u + decay * p))


def own(**changed):
    def optimizer(self, reference, model):
        return Own(reference, model, **changed)

    return optimizer


@plant("update", named="eps inside")
class eps_inside(Plan):
    optimizer = own(inside=True)


@plant("update", named="no bias correction")
class no_correction(Plan):
    optimizer = own(correct=False)


@plant("update", named="L2")
class adam_l2(Plan):
    optimizer = own(l2=True)


@plant("update", "all norms", "decay of norms")
class norms_decay(Plan):
    optimizer = own(decays=lambda name, p: True)


@plant("update", "embed_tokens", "no weight decay of the embedding")
class embedding_no_decay(Plan):
    optimizer = own(decays=lambda name, p: p.dim() > 1 and "embed" not in name)


@plant("update", named="no clipping")
class no_clipping(Plan):
    def clip(self, parameters, norm, bound, model):
        pass


@plant("update", named="by its own norm")
class clip_each(Plan):
    def clip(self, parameters, norm, bound, model):
        for p in parameters:
            p.grad.mul_(min(1.0, bound / (float(p.grad.norm()) + 1e-6)))


@plant("update", "bitwise as before it: rows")
class shard_not_updated(Plan):
    def update(self, optimizer, model, number):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before):
                p[len(p) // 2 :] = old[len(p) // 2 :]


# ---- later steps
@plant(LATER, named="not zeroed")
class not_zeroed(Plan):
    def zero(self, optimizer, number):
        if number == 0:
            optimizer.zero_grad()


@plant(LATER, named="beta2 is 0.999")
class beta2(Plan):
    def optimizer(self, reference, model):
        reference.betas = (reference.betas[0], 0.999)
        return reference.adamw(model.parameters())


@plant(LATER, named="late by one step")
class lr_late(Plan):
    def lr(self, reference, number, given):
        return reference.json["steps"][max(0, number - 1)]["lr"]


@plant(LATER, named="one update old")
class stale_weights(Plan):
    """The forward pass of step t uses the weights of step t - 1."""

    def read(self, step):
        if getattr(self, "saved", None):
            with torch.no_grad():
                for p, (new, old) in self.saved.items():
                    p.copy_(old)
        return super().read(step)

    def update(self, optimizer, model, number):
        with torch.no_grad():
            if getattr(self, "saved", None):
                for p, (new, _) in self.saved.items():
                    p.copy_(new)
            before = {p: p.detach().clone() for p in model.parameters()}
        optimizer.step()
        self.saved = {p: (p.detach().clone(), old) for p, old in before.items()}


@plant(LATER, named="moments are not kept")
class moments_lost(Plan):
    def update(self, optimizer, model, number):
        optimizer.state.clear()
        optimizer.step()
