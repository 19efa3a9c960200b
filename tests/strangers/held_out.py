#!/usr/bin/env python3
"""Held-out plants: silent faults of real trainers, in a trainer written without knowledge of the doctor.

python3 tests/strangers/held_out.py build/bin [PLANT...]     # OMP_NUM_THREADS=1
Pipeline (two stages, micro-batches by send and recv), tensor parallelism with sequence parallelism and a divided
vocabulary, data parallelism, ZeRO-1; fp32, fp64, bf16. TABLE says of each plant what docs/compare.py must say.
"""
import math, pathlib, re, shutil, subprocess, sys, tempfile
from multiprocessing.context import ForkProcess as Process

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
sys.path[:0] = [str(DOCS)]
try:
    import safetensors, torch
except ImportError:
    sys.exit(print("skipped: no torch with safetensors: plants in foreign code were not tried"))
import torch.distributed as dist
import torch.nn.functional as F
from references import masked_text
from torch import nn
from torch_reference import Recorder, Reference

PLANT = ""

def up(x):
    return x.float() if x.dtype == torch.bfloat16 else x
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    dist.all_reduce(y := up(x).contiguous().clone(), op, group=group)
    return y.to(x.dtype)
def all_gather(x, group):
    dist.all_gather(pieces := [torch.empty_like(up(x)) for _ in range(group.size())], up(x).contiguous(), group=group)
    return torch.cat(pieces, 1).to(x.dtype)
def reduce_scatter(x, group):
    return all_reduce(x, group).chunk(group.size(), 1)[group.rank()].contiguous()

def pair(there, back):
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return there(x, group)
        @staticmethod
        def backward(ctx, g):
            return back(g, ctx.group), None
    return Pair.apply
gather, scatter = pair(all_gather, reduce_scatter), pair(reduce_scatter, all_gather)  # of the sequence
total = pair(all_reduce, lambda g, group: g)

class Linear(nn.Module):
    """Weights are fp32 or fp64; bf16 is what they are cast to where they are used."""
    def __init__(self, inner, outer, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outer)) if bias else None
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps
    def forward(self, x):
        y = up(x)
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)

class Attention(nn.Module):
    def __init__(self, c, tp):
        super().__init__()
        heads, kv, hidden = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
        self.tp, self.d, self.theta, self.fair = tp, c["head_dim"], c["rope_theta"], hidden // heads
        self.mine, bias = heads // tp.size(), c["model_type"] == "qwen2"
        copied = kv % tp.size() > 0  # all key/value heads on every rank
        self.q_proj = Linear(hidden, self.mine * self.d, bias)
        self.k_proj, self.v_proj = (Linear(hidden, kv // (1 if copied else tp.size()) * self.d, bias) for _ in "kv")
        self.o_proj = Linear(self.mine * self.d, hidden)
        if c["model_type"] == "qwen3":
            self.q_norm, self.k_norm = (Norm(self.d, c["rms_norm_eps"]) for _ in "qk")
        first = tp.rank() * self.mine if copied else 0
        self.kv_of = (first + torch.arange(self.mine)) // (heads // kv)
    def rope(self, x, positions):
        pairs = torch.arange(0, self.d, 2, dtype=torch.float64)
        turns = self.theta ** -(pairs / (self.fair if PLANT == "rope-exponent" else self.d))
        kind = torch.bfloat16 if PLANT == "bf16-positions" else torch.float64
        angle = positions.to(kind)[:, None, :, None] * turns.to(kind)
        cos, sin = up(angle).cos().to(up(x).dtype), up(angle).sin().to(up(x).dtype)
        a, b = up(x).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    def forward(self, x, positions, seen):
        x = gather(x, self.tp)
        q, k, v = (f(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, positions), self.rope(k, positions)[:, self.kv_of]
        scores = up(q) @ up(k).transpose(-1, -2) / math.sqrt(self.d)
        shares = F.dropout(scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), 0.1, PLANT == "dropout")
        y = (shares @ up(v[:, self.kv_of])).to(x.dtype).transpose(1, 2).flatten(2)
        return scatter(self.o_proj(y), self.tp)
class Mlp(nn.Module):
    def __init__(self, c, tp):
        super().__init__()
        self.tp, hidden, inner = tp, c["hidden_size"], c["intermediate_size"] // tp.size()
        self.gate_proj, self.up_proj = (Linear(hidden, inner) for _ in "gu")
        self.down_proj = Linear(inner, hidden)
    def forward(self, x):
        x = gather(x, self.tp)
        return scatter(self.down_proj(F.silu(up(self.gate_proj(x))).to(x.dtype) * self.up_proj(x)), self.tp)
class Block(nn.Module):
    def __init__(self, c, tp):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(c["hidden_size"], c["rms_norm_eps"]) for _ in "12")
        self.self_attn, self.mlp = Attention(c, tp), Mlp(c, tp)
    def forward(self, x, positions, seen):
        x = x + self.self_attn(self.input_layernorm(x), positions, seen)
        return x + self.mlp(self.post_attention_layernorm(x))

class Stage(nn.Module):
    """Tokens or the stage before's activations -> activations, or in the last stage the sum of the targets' losses."""
    def __init__(self, c, tp, stage, stages, dtype):
        super().__init__()
        hidden, self.tp, self.dtype, self.width = c["hidden_size"], tp, dtype, c["vocab_size"] // tp.size()
        self.first, self.last, self.model = stage == 0, stage == stages - 1, nn.Module()
        if self.first:
            self.model.embed_tokens = nn.Embedding(self.width, hidden)
        mine = torch.arange(c["num_hidden_layers"]).chunk(stages)[stage].tolist()
        self.model.layers = nn.ModuleDict({str(i): Block(c, tp) for i in mine})
        if self.last:
            self.model.norm, self.lm_head = Norm(hidden, c["rms_norm_eps"]), Linear(hidden, self.width)
        if self.first and self.last and c["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight
    def forward(self, x, positions, seen, targets):
        start = self.tp.rank() * self.width
        if self.first:
            here = (x >= start) & (x < start + self.width)
            rows = F.embedding((x - start) * here, self.model.embed_tokens.weight) * here[..., None]
            x = scatter(rows, self.tp).to(self.dtype)
        for block in self.model.layers.values():
            x = block(x, positions, seen)
        if not self.last:
            return x
        logits = up(self.lm_head(gather(self.model.norm(x), self.tp)))
        logits = F.pad(logits, (0, 24 if PLANT == "padded-vocabulary" and start else 0))
        top = all_reduce(logits.detach().amax(-1), self.tp, dist.ReduceOp.MAX)
        log_sum = top + total((logits - top[..., None]).exp().sum(-1), self.tp).log()
        here = (targets >= start) & (targets < start + self.width)
        right = total(logits.gather(-1, ((targets - start) * here)[..., None])[..., 0] * here, self.tp)
        return ((log_sum - right) * (targets >= 0)).sum()

class Adam:
    """AdamW of flat masters, one of matrices, one of the rest. ZeRO-1: each rank of the group has a piece of both."""
    def __init__(self, model, reference, group):
        self.group = group
        self.sets = [[p for p in model.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
        self.masters = [nn.Parameter(self.mine([p.detach() for p in each])) for each in self.sets]
        groups = [{"params": [w], "weight_decay": x} for w, x in zip(self.masters, (reference.decay, 0.0))]
        peak = float(reference.json["flags"]["lr"])
        self.adamw = torch.optim.AdamW(groups, lr=peak, betas=reference.betas, eps=reference.eps)
    def mine(self, tensors):
        flat = torch.cat([t.flatten() for t in tensors])
        flat = F.pad(flat, (0, -len(flat) % self.group.size()))
        return flat.chunk(self.group.size())[self.group.rank()].clone()
    @torch.no_grad()
    def step(self, lr, factor):
        for group in self.adamw.param_groups[:1 if PLANT == "first-group" else None]:
            group["lr"] = lr
        for master, each in zip(self.masters, self.sets):
            master.grad = self.mine([p.grad * factor for p in each])
        self.adamw.step()
        for master, each in zip(self.masters, self.sets):
            flat = all_gather(master.detach()[None], self.group)[0]
            for p in each:
                p.copy_(flat[:p.numel()].view_as(p))
                flat = flat[p.numel():]

def documents(inputs, token):
    """Positions and which (query, key) pairs attention sees, for documents that end with the token."""
    index = torch.arange(inputs.shape[1]).expand_as(inputs)
    ends = inputs == token if token is not None else torch.zeros_like(inputs)
    document = ends.cumsum(1) - ends.long()
    begins = F.pad((index + 1) * ends, (1, 0))[:, :-1].cummax(1).values
    seen = (index[:, :, None] >= index[:, None]) & (document[:, :, None] == document[:, None])
    return index if PLANT == "no-op-positions" else index - begins, seen

def train(rank, layout, micro, folder, out, store):
    pp, tp, dp, zero = layout
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=pp * tp * dp)
    mesh = dist.init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    stages, replicas, shards = (mesh.get_group(name) for name in ("pp", "dp", "tp"))
    reference = Reference(folder)
    c, stored = reference.config, torch.float64 if reference.dtype == torch.float64 else torch.float32
    model = Stage(c, shards, stages.rank(), pp, reference.dtype).to(stored)
    pieces = replicas if zero else dist.new_subgroups(1)[0]  # of one rank
    early = Adam(model, reference, pieces)
    rows = ["q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "k_proj", "v_proj"]
    cut = dict.fromkeys(rows[:5 if c["num_key_value_heads"] % tp else None], 0) | {"o_proj": 1, "down_proj": 1}
    tied = pp > 1 and c["tie_word_embeddings"]  # the last stage has a copy
    record = Recorder(reference, out, shards=cut if tp > 1 else {}, tp_rank=shards.rank(), tp_size=tp,
                      layout={"pp": pp, "tp": tp, "dp": dp})
    record.load(model)
    if pp == tp == 1:
        record.hooks(model)
    named = dict(model.named_parameters())
    twice = named.get("lm_head.weight") if tied else None
    optimizer = early if PLANT == "stale-masters" else Adam(model, reference, pieces)
    below, above, before, scale = rank - dp * tp, rank + dp * tp, {}, 1024.0 if PLANT == "no-op-scale" else 1.0
    forgotten = {"head-norms": ("q_norm", "k_norm"), "copied-kv": ("k_proj", "v_proj")}.get(PLANT, ())
    for step in reference:
        model.zero_grad()
        now = {name: p.detach().clone() for name, p in named.items()}
        for name in named if PLANT == "stale-block" and before else []:
            named[name].data.copy_((before if "layers.1." in name else now)[name])
        inputs, targets = step.inputs.chunk(dp)[replicas.rank()], step.targets.chunk(dp)[replicas.rank()]
        positions, seen = documents(inputs, reference.json.get("document_token"))
        counted = (targets >= 0).sum() * dp if PLANT == "counted-per-rank" else (step.targets >= 0).sum()
        parts = list(zip(*(t.chunk(micro) for t in (inputs, positions, seen, targets))))
        kept, loss = [], torch.zeros((), dtype=torch.float64)
        for x, *rest in parts[::-1 if PLANT == "no-op-order" else 1]:
            if not model.first:
                dist.recv(x := torch.empty(len(x), x.shape[1] // tp, c["hidden_size"], dtype=stored), below)
                x = x.to(reference.dtype).requires_grad_()
            y = model(x, *rest)
            if model.last:
                y = y / counted
                loss += y.detach() * (shards.rank() == 0)
            else:
                dist.send(up(y.detach()).contiguous(), above)
            kept.append((x, y))
        for x, y in kept[::-1 if PLANT == "gradient-order" else 1] if model.last else []:
            (y * scale).backward()
            if not model.first:
                dist.send(up(x.grad).contiguous(), below)
        for _, y in kept if not model.last else []:
            dist.recv(g := torch.empty_like(up(y.detach())), above)
            y.backward(g.to(y.dtype))
        for name, p in named.items():
            if PLANT == "stale-block" and before:
                p.data.copy_(now[name])
            dist.all_reduce(p.grad.div_(scale), group=replicas)
            if name.split(".")[-2] not in (*cut, *forgotten):
                dist.all_reduce(p.grad, group=shards)
        if tied and PLANT != "tied-stages":
            dist.all_reduce((named["model.embed_tokens.weight"] if model.first else twice).grad, group=stages)
        record.gradients(model)
        square = torch.zeros((), dtype=torch.float64)
        for name, p in named.items():
            if p is not twice and (name.split(".")[-2] in cut or shards.rank() == 0):
                square += p.grad.double().pow(2).sum()
        dist.all_reduce(square, group=shards)
        if PLANT != "stage-norm":
            dist.all_reduce(square, group=stages)
        norm = float(square.sqrt())
        optimizer.step(step.lr, min(1, reference.clip / (norm + 1e-6)))
        dist.all_reduce(loss)
        record.step(model, loss, norm, step.lr, step.inputs, step.targets)
        before = now
    record.write()
    dist.destroy_process_group()

# Flags of build/bin/01_single_gpu. "masked": text with masked targets, of docs/references.py.
def shape(layers, hidden, heads, kv, ffn, length, batch, seed):
    return (f"--steps 6 --device cpu --clip 0.4 --eps 1e-5 --init-std 0.1 --layers {layers} --hidden {hidden}"
            f" --heads {heads} --kv-heads {kv} --ffn {ffn} --seq-len {length} --global-batch {batch} --seed {seed}")

SMALL, LATIN = shape(3, 48, 6, 2, 72, 24, 8, 3), shape(2, 40, 4, 1, 56, 28, 8, 5) + " --head-dim 16"
WIDE, LONG = shape(4, 64, 4, 2, 96, 20, 12, 11) + " --vocab 320", shape(2, 32, 4, 4, 64, 400, 4, 9)
TIED, BIASES, HEAD_NORMS = f"{SMALL} --tied-embeddings on", f"{WIDE} --qkv-bias on", f"{WIDE} --qk-norm on"
DOCUMENTS = f"{WIDE} masked --document-token 46"
ATTENTION = "first wrong activation: model.layers.0.self_attn.(o_proj|q_proj|k_proj|context)"
# dtype, (pipeline, tensor, data, ZeRO-1), micro-batches, flags; then what compare must say: phase, place, name or none
TABLE = {
    "tied-stages": ("fp32", (2, 1, 2, 0), 2, TIED, "backward", "wrong: embed_tokens$", "gradient of the head is lost"),
    "counted-per-rank": ("fp64", (2, 1, 2, 0), 2, f"{WIDE} masked", "forward", "sample: 0-5: .* 6-11:",
                         "mean of means: each of 2 parts"),
    "head-norms": ("fp64", (2, 2, 1, 0), 3, HEAD_NORMS, "backward", "gradients: wrong: every k_norm, q_norm;",
                   "q's and k's norms are not summed"),
    "stage-norm": ("fp64", (2, 2, 1, 0), 2, SMALL, "update", "first wrong norm: step 1", ""),
    "stale-masters": ("bf16", (1, 1, 2, 0), 1, SMALL, "update", "wrong: all but the norms", ""),
    "stale-block": ("fp32", (1, 1, 4, 1), 1, SMALL, "later", "first wrong loss: step 2", ""),
    "copied-kv": ("fp64", (1, 2, 2, 0), 2, LATIN, "backward", "gradients: wrong: every k_proj, v_proj;",
                  "gradients of 2 copies of each key/value head are not summed"),
    "bf16-positions": ("bf16", (1, 2, 1, 0), 1, LONG, "forward", "first wrong: .*k_proj.*q_p", "RoPE: angles in bf16"),
    "first-group": ("fp32", (1, 1, 2, 0), 2, BIASES, "update", "every input_layernorm, k_proj.bias, norm, p", ""),
    "gradient-order": ("fp64", (2, 1, 1, 0), 4, WIDE, "backward", "first wrong: model.layers.1.mlp.down_proj", ""),
    "padded-vocabulary": ("fp32", (2, 2, 1, 0), 2, SMALL, "forward", "or before it: lm_head", ""),
    "rope-exponent": ("fp32", (1, 1, 2, 1), 1, LATIN, "forward", ATTENTION, ""),
    "dropout": ("fp32", (1, 1, 2, 0), 1, SMALL, "forward", ATTENTION, ""),
    "no-op-positions": ("fp64", (1, 2, 1, 0), 2, DOCUMENTS, "agrees", "", ""),
    "no-op-scale": ("bf16", (1, 1, 2, 0), 2, SMALL, "agrees", "", ""),
    "no-op-order": ("fp32", (2, 1, 2, 0), 4, TIED, "agrees", "", ""),
}
for layout, model in {(2, 1, 2, 0): TIED, (2, 2, 1, 0): HEAD_NORMS, (1, 2, 2, 0): LATIN, (2, 1, 1, 0): DOCUMENTS,
                      (1, 1, 4, 1): BIASES, (1, 1, 2, 1): TIED, (1, 1, 2, 0): HEAD_NORMS, (1, 2, 1, 0): LONG}.items():
    for dtype in ("fp32", "fp64", "bf16"):
        TABLE[f"none-{dtype}-{'x'.join(map(str, layout))}"] = (dtype, layout, 2, model, "agrees", "", "")

def reference_run(programs, folder, dtype, flags):
    words, text = flags.replace(" masked", "").split(), DOCS / "data/corpus.txt"
    if " masked" in flags:
        masked_text(folder.parent, text.read_bytes())
        words, text = words + ["--val-fraction", "0"], folder.parent / "text.bin"
    words = ["01_single_gpu", *words, "--data", text, "--dtype", dtype, "--save-reference", folder]
    subprocess.run(words, executable=programs / words[0], check=True, capture_output=True)
    return folder
def phase_of(said):
    """The first phase that is called wrong; RoPE's faults are the forward pass's."""
    wrong = ["forward"] if "rounding: RoPE" in said else re.findall("^  (forward|backward|update): .*wrong", said, re.M)
    return wrong[0] if wrong else "later" if "in the order of computation" in said else "agrees"
def run(name, programs):
    global PLANT
    work = pathlib.Path(tempfile.mkdtemp())
    PLANT, (dtype, layout, micro, flags, phase, place, right) = name, TABLE[name]
    reference, mine = reference_run(programs, work / "reference", dtype, flags), work / "mine"
    ranks = [Process(target=train, args=(rank, layout, micro, reference, mine, work / "store"))
             for rank in range(math.prod(layout[:3]))]
    for process in ranks:
        process.start()
    if any([process.join() or process.exitcode for process in ranks]):
        raise SystemExit(f"{name}: a rank failed")
    words = [sys.executable, DOCS / "compare.py", mine, reference, "--diagnose"]
    done = subprocess.run(words, capture_output=True, text=True)
    shutil.rmtree(work)
    said, found = done.stdout, phase_of(done.stdout)
    names = re.findall("explains A's numbers.*?: (.*)", said)
    named = len(names) == 1 and re.search(right, names[0]) if right else not names
    met = done.returncode == (phase != "agrees") and found == phase and re.search(place, said, re.M) and named
    print(f"{name:24} {dtype}  {'x'.join(map(str, layout))}  {found:9} {'; '.join(names) or '-'}", flush=True)
    if not met:
        print(f"    NOT AS EXPECTED: {phase}, place '{place}', name '{right or 'none'}'\n{said}", flush=True)
    return met
def main():
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(TABLE):
        raise SystemExit(f"{__doc__}\nPlants: {' '.join(TABLE)}")
    sys.exit(not all([run(name, pathlib.Path(sys.argv[1]).resolve()) for name in sys.argv[2:] or TABLE]))

if __name__ == "__main__":
    main()
