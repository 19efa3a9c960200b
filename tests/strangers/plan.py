"""The conventions and the parallelism of trainer.py, right. plants.py has its subclasses with one fault each."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_reduced(x, group):
    x = x.clone().contiguous()
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x


class Sum(torch.autograd.Function):
    """Sums over a group in the forward pass (g), or its gradient in the backward pass (f)."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.backward = group, backward
        return all_reduced(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduced(gradient, ctx.group) if ctx.backward else gradient, None, None, None


class Gather(torch.autograd.Function):
    """Concatenates the context ranks' keys; the gradient goes back to their owners."""

    @staticmethod
    def forward(ctx, x, group, plan):
        ctx.group, ctx.plan = group, plan
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        if not ctx.plan.return_keys:
            return gradient.chunk(size, 2)[rank], None, None
        return all_reduced(gradient, ctx.group).chunk(size, 2)[rank], None, None


class Plan:
    reports_given_lr = True
    return_keys = True

    def __init__(self, config, args):
        self.config, self.tp, self.cp, self.dp = config, args.tp, args.cp, args.dp
        self.norm_eps, self.base, self.dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
        self.tp_rank = self.cp_rank = self.dp_rank = 0
        self.tp_group = self.cp_group = self.dp_group = None

    def connect(self):
        if not dist.is_initialized():
            return
        rank = dist.get_rank()
        self.tp_rank, self.cp_rank, self.dp_rank = rank % self.tp, rank // self.tp % self.cp, rank // self.tp // self.cp
        shape = torch.arange(self.tp * self.cp * self.dp).reshape(self.dp, self.cp, self.tp)
        for axis, name in ((2, "tp"), (1, "cp"), (0, "dp")):
            for ranks in shape.movedim(axis, 2).reshape(-1, shape.shape[axis]).tolist():
                group = dist.new_group(ranks)
                if rank in ranks:
                    setattr(self, f"{name}_group", group)

    def read(self, step):
        return step.inputs, step.targets

    def rows(self, per_rank, begin, micro):
        begin += self.dp_rank * per_rank
        return slice(begin, begin + micro)

    # ---- conventions
    def positions(self, first, count):
        return torch.arange(first, first + count)

    def table(self, positions):
        frequencies = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = torch.outer(positions.double(), frequencies)
        return angles.cos().to(torch.get_default_dtype()), angles.sin().to(torch.get_default_dtype())

    def begin(self, tokens, first, length):
        self.cos, self.sin = self.table(self.positions(first, tokens.shape[1]))
        self.mask = self.visible(torch.arange(first, first + tokens.shape[1])[:, None], torch.arange(length))

    def visible(self, query, key):
        return query >= key

    def rotate(self, x, which):
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def scale(self, dim):
        return 1 / math.sqrt(dim)

    def repeat(self, x, group):
        return x.repeat_interleave(group, 1)

    def values(self, v):
        return v

    def gated(self, gate, up):
        return F.silu(gate) * up

    def norm(self, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def embed(self, table, tokens):
        return table(tokens)

    def head_weight(self, weight):
        return weight

    def logits(self, logits):
        return logits

    def aims(self, targets):
        return targets

    # ---- parallelism
    def f(self, x, half):
        return Sum.apply(x, self.tp_group, False, True) if self.tp > 1 else x

    def g(self, x, half):
        return Sum.apply(x, self.tp_group, True, False) if self.tp > 1 else x

    def normalised(self, loss, targets, counts, micro_batches):
        return loss / counts

    def backward(self, loss, begin, last, model):
        loss.backward()

    def reduce(self, parameters):
        for p in parameters:
            p.grad.copy_(all_reduced(all_reduced(p.grad, self.dp_group), self.cp_group))

    def after_backward(self, model):
        pass

    # ---- optimizer
    def optimizer(self, reference, model):
        return reference.adamw(model.parameters())

    def zero(self, optimizer, number):
        optimizer.zero_grad()

    def clip(self, parameters, norm, bound, model):
        if bound > 0:
            for p in parameters:
                p.grad.mul_(min(1.0, bound / (norm + 1e-6)))

    def lr(self, reference, number, given):
        return given

    def update(self, optimizer, model, number):
        optimizer.step()

    def after_update(self, model, number):
        pass
