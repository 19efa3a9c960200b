"""Repeats a reference run with a PyTorch model and records it for docs/compare.py: copy this file (docs/validate.md).

    reference = Reference(folder); record = Recorder(reference, out); record.load(model)
    for step in reference:               # step.inputs, step.targets (-1: none), step.lr
        ...                              # your forward and backward pass, your reduction over ranks
        record.gradients(model)          # before your clipping and optimizer, then
        record.step(model, loss, grad_norm, lr, inputs, targets)     # what your code used
    record.write()                       # every rank calls all of it; rank 0 writes
DDP's ranks may give step() their local batches and losses: it gathers them. Other layouts give those of all ranks.
Of experts the flags aux-loss, router-z-loss, capacity-factor and router-bias-rate (docs/reference-format.md) are yours to
apply; `loss` is without the first two. A router's bias is a buffer, or a parameter without gradient.
"""
import json, math, pathlib, re, types
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import distribute_tensor

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
PREFIXES = r"module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
BIAS = "e_score_correction_bias"  # of a sigmoid router: in fp32, a buffer, without gradient
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

def check(right, message):
    if not right: raise SystemExit(f"torch_reference: {message}")

class Reference:
    """config: Hugging Face's keys. dtype. weights: {Hugging Face's name: tensor}. Iterates over its steps."""
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.json = json.loads((self.folder / "reference.json").read_text("utf-8"))
        self.config, self.dtype = self.json["model"], DTYPES[self.json["dtype"]]
        self.weights = load_file(self.folder / "initial.safetensors")
        flag = {key: float(self.json["flags"][key]) for key in ("beta1", "beta2", "eps", "weight-decay", "clip")}
        self.betas, self.decay = (flag["beta1"], flag["beta2"]), flag["weight-decay"]  # decay: of matrices only
        self.eps, self.clip = flag["eps"], flag["clip"]  # clip 0: none

    def __iter__(self):
        for entry in self.json["steps"]:
            tokens = torch.tensor(entry["tokens"])
            targets = torch.tensor(entry["targets"]) if "targets" in entry else tokens[:, 1:].contiguous()
            yield types.SimpleNamespace(tokens=tokens, inputs=tokens[:, :-1], targets=targets, lr=entry["lr"])

    def adamw(self, parameters):
        """torch's AdamW with the reference's settings, in bf16 on fp32 masters; set "lr" of all groups in each step."""
        pairs = [(p, p.detach().float().requires_grad_() if p.dtype == torch.bfloat16 else p)
                 for p in parameters if p.requires_grad]
        groups = [{"params": [w], "weight_decay": self.decay * (w.dim() > 1)} for _, w in pairs]
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=self.betas, eps=self.eps)
        of = lambda p, w: torch.zeros_like(w) if p.grad is None else p.grad.to(w.dtype)  # None: no token chose an expert
        before = lambda *_: [setattr(w, "grad", of(p, w)) for p, w in pairs] and None
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: [p.data.copy_(w.data) for p, w in pairs] and None)
        return optimizer

class Recorder:
    """names: a function or a table, your parameter's name (less wrappers' prefixes) -> Hugging Face's; fused ones are
    called ...self_attn.qkv_proj.weight (rows: all of q, then k, v) and ...mlp.gate_up_proj.weight; all experts of a layer
    ...mlp.experts.gate_up_proj (N, 2F, E) and ...mlp.experts.down_proj (N, E, F), as in transformers 5. shards: {"q_proj":
    dimension} that tensor parallelism cuts, in the order of tp_rank. DTensors are gathered, pipeline stages collected
    by names. interleaved: RoPE turns pairs (0, 1), (2, 3), ...; rows of q and k, and their norms', are reordered."""
    def __init__(self, reference, out, names=None, shards=None, tp_rank=0, tp_size=1, interleaved=False, layout=None):
        self.reference, self.folder = reference, pathlib.Path(out)
        self.names = names.get if isinstance(names, dict) else names or (lambda name: name)
        self.shards, self.tp_rank, self.tp_size, self.interleaved = shards or {}, tp_rank, tp_size, interleaved
        self.layout, self.files, self.steps, config = layout or {}, {}, [], reference.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.parts = {"qkv_proj": (heads, kv_heads, kv_heads), "gate_up_proj": (1, 1)}
        self.experts = next((config[k] for k in ("n_routed_experts", "num_experts", "num_local_experts") if k in config), 0)
        self.mixtral = config.get("model_type") == "mixtral"
        self.half = (config.get("head_dim") or config["hidden_size"] // heads) // 2
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def _name(self, name):
        name = self.names(re.sub(PREFIXES, "", name)) or name
        tied = self.reference.config.get("tie_word_embeddings") and name == "lm_head.weight"
        if self.mixtral: name = name.replace(".mlp.", ".block_sparse_moe.")
        return "model.embed_tokens.weight" if tied else name

    def _tensors(self, model):
        if not any(name.endswith(BIAS) for name in self.reference.weights): return list(model.named_parameters())
        buffers = [(name, b) for name, b in model.named_buffers() if self._name(name).endswith(BIAS)]
        return [*model.named_parameters(), *buffers]

    def _pieces(self, name):
        """The Hub's names of what a fused parameter holds, in the order of its rows."""
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            part = name.split(".")[-2]
            return [name.replace(part, each) for each in FUSED.get(part, (part,))]
        parts = [MIXTRAL[each] if self.mixtral else each for each in FUSED.get(last, (last,))]
        return [f"{prefix}.{expert}.{part}.weight" for expert in range(self.experts) for part in parts]

    def _rows(self, name, tensor, back=False):
        if not self.interleaved or name.split(".")[-2] not in ("q_proj", "k_proj", "q_norm", "k_norm"): return tensor
        shape = (-1, 2, self.half) if back else (-1, self.half, 2)
        return tensor.reshape(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _split(self, name, tensor):
        names = self._pieces(name)
        if tensor.dim() == 3: tensor = tensor.flatten(0, 1)
        sizes = self.parts.get(name.split(".")[-2], [1] * len(names))
        return list(zip(names, tensor.split([len(tensor) * n // sum(sizes) for n in sizes])))

    def _save(self, file, tensors, dtype=None):
        mine, full = {}, {}
        for name, tensor in tensors:
            check(tensor is not None, f"{name} has no gradient: call record.gradients(model) behind backward()")
            tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()
            mine.update(self._split(self._name(name), tensor))
        everyone = [(self.tp_rank, mine)] * self.world if self.rank == 0 else None
        if self.world > 1:
            dist.gather_object((self.tp_rank, mine), everyone)
        for name in {name: 0 for _, theirs in everyone or [] for name in theirs}:
            ranks = {rank: theirs[name] for rank, theirs in reversed(everyone) if name in theirs}
            pieces, dimension = [ranks[rank] for rank in sorted(ranks)], self.shards.get(name.split(".")[-2])
            whole = pieces[0] if dimension is None else torch.cat(pieces, dimension)
            own = torch.float32 if name.endswith(BIAS) else dtype or whole.dtype
            full[name] = self._rows(name, whole).to(own).contiguous()
        expected = {name for name in self.reference.weights if dtype or not name.endswith(BIAS)}  # dtype: of weights
        missing = sorted(expected - full.keys()) if self.rank == 0 else []
        check(not missing, f"{file}: none of your parameters is {missing[:1]}: does `names` give Hugging Face's names?")
        self.files[file] = full

    @torch.no_grad()
    def load(self, model):
        for name, p in ((self._name(name), p) for name, p in self._tensors(model)):
            pieces = []
            for each in self._pieces(name):
                check(each in self.reference.weights, f"the reference has no {each}: give its name by `names`")
                dimension, w = self.shards.get(each.split(".")[-2]), self.reference.weights[each]
                w = self._rows(each, w, back=True)
                pieces.append(w if dimension is None else w.chunk(self.tp_size, dimension)[self.tp_rank])
            if name.endswith(BIAS): p.data = p.data.float()  # model.to(bf16) has rounded it
            w = torch.cat(pieces).to(device=p.device, dtype=p.dtype)
            if p.dim() == 3: w = w.unflatten(0, (self.experts, -1))
            check(w.shape == p.shape, f"{name} is {tuple(p.shape)}, not {tuple(w.shape)}: is `shards` right?")
            p.copy_(distribute_tensor(w, p.device_mesh, p.placements) if hasattr(p, "full_tensor") else w)
        self._save("initial", self._tensors(model), self.reference.dtype)

    def gradients(self, model):
        def of(name, p):  # an expert that no token chose may have none
            return torch.zeros_like(p) if p.grad is None and ".experts." in self._name(name) else p.grad
        if len(self.steps) < 2:
            trained = [(n, p) for n, p in model.named_parameters() if not self._name(n).endswith(BIAS)]
            self._save("gradients_2" if self.steps else "gradients", ((n, of(n, p)) for n, p in trained))

    def step(self, model, loss, grad_norm, lr, inputs, targets):
        """After the update. inputs, targets (samples, seq_len): of all ranks, as your loader read them; < 0: none."""
        check(len(self.steps) < len(self.reference.json["steps"]), "more steps than the reference has")
        entry = dict(self.reference.json["steps"][len(self.steps)])
        tokens, inputs, targets = torch.tensor(entry["tokens"]), inputs.cpu().long(), targets.cpu().long().clamp(min=-1)
        if self.tp_size == 1 < self.world and len(inputs) * self.world == len(tokens):
            inputs, targets, loss = self._gathered(tokens[:, :-1], inputs, targets, loss)
        check(inputs.shape == targets.shape == tokens[:, 1:].shape, "inputs, targets: must be those of all ranks, "
              f"{tuple(tokens[:, 1:].shape)}, not {tuple(inputs.shape)} and {tuple(targets.shape)}")
        last = torch.where(targets[:, -1:] < 0, tokens[:, -1:], targets[:, -1:])
        entry.update(tokens=torch.cat([inputs, last], 1).tolist(), targets=targets.tolist())
        for key, x in {"loss": loss, "grad_norm": grad_norm, "lr": lr}.items():
            x = float(x.detach() if torch.is_tensor(x) else x)
            entry[key] = x if math.isfinite(x) else None
        self.steps.append(entry)
        if len(self.steps) <= 2:
            self._save(f"after_step_{len(self.steps)}", self._tensors(model), self.reference.dtype)

    def _gathered(self, whole, *mine):
        """DDP's local inputs and targets as one batch, in the order of ranks or, if the whole has them so, in turn; the
        mean of losses."""
        everyone = [None] * self.world
        dist.all_gather_object(everyone, mine)
        inputs, targets, losses = zip(*everyone)
        inputs, targets = torch.stack(inputs), torch.stack(targets)
        if torch.equal(inputs.transpose(0, 1).flatten(0, 1), whole):
            inputs, targets = inputs.transpose(0, 1), targets.transpose(0, 1)
        return inputs.flatten(0, 1), targets.flatten(0, 1), sum(map(float, losses)) / self.world

    def hooks(self, model):
        """Optional: records every module's output of the first forward pass, (samples, seq_len, width)."""
        def keep(name, output):
            if not self.steps and torch.is_tensor(output):
                self.files.setdefault("activations", {}).setdefault(name, output.detach().cpu().contiguous().clone())
        for name, module in model.named_modules():
            for own, _ in list(module.named_parameters(recurse=False))[:1]:
                name = self._name(f"{name}.{own}").rpartition(".")[0]
                module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))

    def write(self):
        check("gradients" in self.files, "call record.gradients(model) behind backward(), before clipping")
        if self.rank: return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.files.items():
            save_file(tensors, self.folder / f"{name}.safetensors")
        (self.folder / "config.json").write_bytes((self.reference.folder / "config.json").read_bytes())
        run = {**self.reference.json, "version": 3, "layout": self.layout, "steps": self.steps}
        (self.folder / "reference.json").write_text(json.dumps(run), "utf-8")
