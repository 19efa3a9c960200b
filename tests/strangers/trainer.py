"""A small PyTorch trainer that this course did not write its programs after: a Llama with tensor, context and data
parallelism by torch.distributed, and what a plant (plants.py) changes in it. One process per rank, gloo.

Run:   python3 tests/strangers/trainer.py REFERENCE OUT [--tp N] [--cp N] [--dp N] [--micro N] [--plant NAME]
"""

import argparse
import math
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(pathlib.Path(__file__).parents[2] / "docs"), str(pathlib.Path(__file__).parent)]
import plants  # noqa: E402
from plan import Gather, all_reduced  # noqa: E402
from torch_reference import Recorder, Reference  # noqa: E402

SHARDS = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1, lm_head=0)


class Norm(nn.Module):
    def __init__(self, size, plan):
        super().__init__()
        self.weight, self.eps, self.plan = nn.Parameter(torch.ones(size)), plan.norm_eps, plan

    def forward(self, x):
        return self.plan.norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c, plan):
        super().__init__()
        self.plan, self.dim = plan, c["head_dim"]
        e, q, k = c["hidden_size"], c["num_attention_heads"] // plan.tp, c["num_key_value_heads"] // plan.tp
        bias = c.get("attention_bias", False) or c.get("architectures", [""])[0].startswith("Qwen2")
        self.q_proj = nn.Linear(e, q * self.dim, bias=bias)
        self.k_proj, self.v_proj = nn.Linear(e, k * self.dim, bias=bias), nn.Linear(e, k * self.dim, bias=bias)
        self.o_proj = nn.Linear(q * self.dim, e, bias=False)
        if c.get("architectures", [""])[0].startswith("Qwen3"):
            self.q_norm, self.k_norm = Norm(self.dim, plan), Norm(self.dim, plan)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def forward(self, x, mask):
        plan = self.plan
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = plan.rotate(q, "q"), plan.rotate(k, "k")
        if plan.cp > 1:
            k, v = Gather.apply(k, plan.cp_group, plan), Gather.apply(v, plan.cp_group, plan)
        v = plan.values(v)
        group = q.shape[1] // k.shape[1]
        k, v = plan.repeat(k, group), plan.repeat(v, group)
        scores = (q @ k.transpose(2, 3)) * plan.scale(self.dim)
        y = torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, c, plan):
        super().__init__()
        e, f = c["hidden_size"], c["intermediate_size"] // plan.tp
        self.plan, self.gate_proj, self.up_proj = plan, nn.Linear(e, f, bias=False), nn.Linear(e, f, bias=False)
        self.down_proj = nn.Linear(f, e, bias=False)

    def forward(self, x):
        return self.down_proj(self.plan.gated(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, c, plan):
        super().__init__()
        self.plan, e = plan, c["hidden_size"]
        self.input_layernorm, self.self_attn = Norm(e, plan), Attention(c, plan)
        self.post_attention_layernorm, self.mlp = Norm(e, plan), Mlp(c, plan)

    def forward(self, x, mask):
        f, g = self.plan.f, self.plan.g
        x = x + g(self.self_attn(f(self.input_layernorm(x), "attention"), mask), "attention")
        return x + g(self.mlp(f(self.post_attention_layernorm(x), "mlp")), "mlp")


class Body(nn.Module):
    def __init__(self, c, plan):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c, plan) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], plan)


class Llama(nn.Module):
    def __init__(self, c, plan):
        super().__init__()
        self.plan, self.model, self.tied = plan, Body(c, plan), c.get("tie_word_embeddings", False)
        if not self.tied:
            self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"] // plan.tp, bias=False)

    def forward(self, tokens, first, length):
        """Logits of the tokens at positions first, ... of a sequence of `length`."""
        plan = self.plan
        plan.begin(tokens, first, length)
        x = plan.embed(self.model.embed_tokens, tokens)
        for block in self.model.layers:
            x = block(x, plan.mask)
        x = plan.f(self.model.norm(x), "head")
        w = plan.head_weight(self.model.embed_tokens.weight) if self.tied else self.lm_head.weight
        logits = x @ w.T
        if plan.tp > 1 and not self.tied:  # every rank needs all columns; their gradients are its own
            parts = [torch.empty_like(logits) for _ in range(plan.tp)]
            dist.all_gather(parts, logits.detach().contiguous(), group=plan.tp_group)
            parts[plan.tp_rank] = logits
            logits = torch.cat(parts, -1)
        return logits


def train(args):
    torch.set_num_threads(1)
    reference = Reference(args.reference)
    torch.set_default_dtype(reference.dtype)
    c = reference.config
    c.setdefault("head_dim", c["hidden_size"] // c["num_attention_heads"])
    plan = plants.PLANTS[args.plant](c, args)
    plan.connect()
    model = Llama(c, plan).to(reference.dtype)
    record = Recorder(
        reference,
        args.out,
        shards=SHARDS if plan.tp > 1 else {},
        tp_rank=plan.tp_rank,
        tp_size=plan.tp,
        layout={"tp": plan.tp, "cp": plan.cp, "dp": plan.dp},
    )
    record.load(model)
    if args.activations:
        record.hooks(model)
    parameters = list(model.parameters())
    optimizer = plan.optimizer(reference, model)
    for number, step in enumerate(reference):
        plan.zero(optimizer, number)
        inputs, targets = plan.read(step)
        per_rank, length = len(inputs) // plan.dp, inputs.shape[1]
        micro = args.micro or per_rank
        positions = slice(plan.cp_rank * length // plan.cp, (plan.cp_rank + 1) * length // plan.cp)
        counts, total = (targets >= 0).sum(), torch.zeros((), dtype=torch.float64)
        for i in range(0, per_rank, micro):
            rows = plan.rows(per_rank, i, micro)
            own, aims = inputs[rows, positions], targets[rows, positions]
            logits = model(own, positions.start, length)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(
                plan.logits(logits).flatten(0, 1), plan.aims(aims).flatten(), ignore_index=-1, reduction="sum"
            )
            loss = plan.normalised(loss, aims, counts, per_rank // micro)
            plan.backward(loss, i, i + micro >= per_rank, model)
            total += loss.detach()
        plan.reduce(parameters)
        plan.after_backward(model)
        whole = all_reduced(all_reduced(total, plan.dp_group), plan.cp_group) if dist.is_initialized() else total
        record.gradients(model)
        shard = [p.grad for p in parameters]
        squares = torch.stack([g.double().square().sum() for g in shard])
        if plan.tp > 1:
            for i, (name, _) in enumerate(model.named_parameters()):
                if name.split(".")[-2] in SHARDS:
                    squares[i] = all_reduced(squares[i : i + 1], plan.tp_group)[0]
        norm = math.sqrt(float(squares.sum()))
        plan.clip(parameters, norm, reference.clip, model)
        lr = plan.lr(reference, number, step.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        plan.update(optimizer, model, number)
        record.step(model, whole, norm, step.lr if plan.reports_given_lr else lr, inputs, targets)
        plan.after_update(model, number)
    record.write()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank_main(rank, args):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(args.tp * args.cp * args.dp), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port)
    )
    dist.init_process_group("gloo")
    train(args)


def main(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("reference")
    parser.add_argument("out")
    for name in ("tp", "cp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--micro", type=int, default=0)
    parser.add_argument("--port", type=int, default=29561)
    parser.add_argument("--activations", action="store_true")
    parser.add_argument("--plant", default="none", choices=sorted(plants.PLANTS))
    args = parser.parse_args(words)
    ranks = args.tp * args.cp * args.dp
    if ranks == 1:
        train(args)
    else:
        torch.multiprocessing.spawn(rank_main, (args,), nprocs=ranks)


if __name__ == "__main__":
    main()
