"""Repeats a reference run with a PyTorch model and records it for docs/compare.py: copy this file (docs/validate.md).

    reference = Reference(folder); record = Recorder(reference, out); record.load(model)
    for step in reference:               # step.inputs, step.targets (-1: none), step.lr
        ...                              # your forward and backward pass, your reduction over ranks
        record.gradients(model)          # before clipping
        ...                              # your clipping and optimizer
        record.step(model, loss, grad_norm, lr, inputs, targets)     # what your code used
    record.write()                       # every rank calls all of it; rank 0 writes
"""
import json
import math
import os
import pathlib
import re
import shutil
import types

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import distribute_tensor

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
PREFIXES = r"module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def norm_of(tensors):
    return math.sqrt(sum(float(t.detach().double().pow(2).sum()) for t in tensors))


class Reference:
    """config: Hugging Face's keys. dtype. weights: {Hugging Face's name: tensor}. Iterates over its steps."""
    def __init__(self, folder):
        self.folder = folder
        self.json = json.loads(pathlib.Path(folder, "reference.json").read_text())
        self.config, self.dtype = self.json["model"], DTYPES[self.json["dtype"]]
        self.weights = load_file(os.path.join(folder, "initial.safetensors"))
        flag = {key: float(self.json["flags"][key]) for key in ("beta1", "beta2", "eps", "weight-decay", "clip")}
        self.betas, self.decay = (flag["beta1"], flag["beta2"]), flag["weight-decay"]  # decay: of matrices only
        self.eps, self.clip = flag["eps"], flag["clip"]  # clip 0: none

    def __iter__(self):
        for entry in self.json["steps"]:
            tokens = torch.tensor(entry["tokens"])
            targets = torch.tensor(entry["targets"]) if "targets" in entry else tokens[:, 1:].contiguous()
            yield types.SimpleNamespace(tokens=tokens, inputs=tokens[:, :-1], targets=targets, lr=entry["lr"])

    def adamw(self, parameters):
        """torch's AdamW with the reference's settings; set every group's "lr" before each step."""
        groups = [{"params": [p], "weight_decay": self.decay if p.dim() > 1 else 0.0} for p in parameters]
        return torch.optim.AdamW(groups, lr=1.0, betas=self.betas, eps=self.eps)


class Recorder:
    """names: your parameter's name -> Hugging Face's (wrappers' prefixes are taken off). shards: {"q_proj": dimension}
    that tensor parallelism cuts, in the order of tp_rank. DTensors are gathered, pipeline stages collected by names.
    interleaved: RoPE turns pairs (0, 1), (2, 3), ...; rows of q and k are reordered."""
    def __init__(self, reference, folder, names=None, shards=None, tp_rank=0, tp_size=1, interleaved=False,
                 layout=None):
        self.reference, self.folder, self.names = reference, folder, names or (lambda name: name)
        self.shards, self.tp_rank, self.tp_size, self.interleaved = shards or {}, tp_rank, tp_size, interleaved
        self.layout, self.files, self.steps, config = layout or {}, {}, [], reference.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.parts = {"qkv_proj": (heads, kv_heads, kv_heads), "gate_up_proj": (1, 1)}
        self.half = (config.get("head_dim") or config["hidden_size"] // heads) // 2
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def _name(self, name):
        return self.names(re.sub(PREFIXES, "", name))

    def _rows(self, name, tensor, back=False):
        if not self.interleaved or name.split(".")[-2] not in ("q_proj", "k_proj"):
            return tensor
        shape = (-1, 2, self.half) if back else (-1, self.half, 2)
        return tensor.reshape(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _split(self, name, tensor):
        part = name.split(".")[-2]
        if part not in FUSED:
            return [(name, tensor)]
        pieces = tensor.split([len(tensor) * n // sum(self.parts[part]) for n in self.parts[part]])
        return [(name.replace(part, each), piece) for each, piece in zip(FUSED[part], pieces)]

    def _save(self, file, tensors, dtype=None):
        mine, full = {}, {}
        for name, tensor in tensors:
            tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()
            mine.update(self._split(self._name(name), tensor))
        everyone = [(self.tp_rank, mine)] * self.world if self.rank == 0 else None
        if self.world > 1:
            dist.gather_object((self.tp_rank, mine), everyone)
        for name in {name: 0 for _, theirs in everyone or [] for name in theirs}:
            ranks = {rank: theirs[name] for rank, theirs in reversed(everyone) if name in theirs}
            pieces, dimension = [ranks[rank] for rank in sorted(ranks)], self.shards.get(name.split(".")[-2])
            whole = pieces[0] if dimension is None else torch.cat(pieces, dimension)
            full[name] = self._rows(name, whole).to(dtype or whole.dtype).contiguous()
        if self.reference.config.get("tie_word_embeddings"):
            full.pop("lm_head.weight", None)
        self.files[file] = full

    @torch.no_grad()
    def load(self, model):
        for name, p in model.named_parameters():
            name = self._name(name)
            fused, pieces = name.split(".")[-2], []
            for each in [name.replace(fused, part) for part in FUSED.get(fused, (fused,))]:
                w, dimension = self.reference.weights[each], self.shards.get(each.split(".")[-2])
                w = self._rows(each, w, back=True)
                pieces.append(w if dimension is None else w.chunk(self.tp_size, dimension)[self.tp_rank])
            w = torch.cat(pieces).to(device=p.device, dtype=p.dtype)
            if hasattr(p, "full_tensor"):
                w = distribute_tensor(w, p.device_mesh, p.placements)
            p.copy_(w)
        self._save("initial", model.named_parameters(), self.reference.dtype)

    def gradients(self, model):
        if len(self.steps) < 2:
            self._save("gradients_2" if self.steps else "gradients", ((n, p.grad) for n, p in model.named_parameters()))

    def step(self, model, loss, grad_norm, lr, inputs, targets):
        """After the update. inputs, targets (samples, seq_len): the full batch that your loader read."""
        entry = dict(self.reference.json["steps"][len(self.steps)])
        last = torch.where(targets[:, -1:].cpu() < 0, torch.tensor(entry["tokens"])[:, -1:], targets[:, -1:].cpu())
        entry.update(tokens=torch.cat([inputs.cpu(), last], 1).tolist(), targets=targets.tolist())
        for key, x in {"loss": torch.as_tensor(loss).detach(), "grad_norm": grad_norm, "lr": lr}.items():
            entry[key] = float(x) if math.isfinite(x) else None
        self.steps.append(entry)
        if len(self.steps) <= 2:
            self._save(f"after_step_{len(self.steps)}", model.named_parameters(), self.reference.dtype)

    def hooks(self, model):
        """Optional: records every module's output of the first forward pass, (samples, seq_len, width)."""
        def keep(name, output):
            if not self.steps and torch.is_tensor(output):
                self.files.setdefault("activations", {}).setdefault(name, output.detach().cpu().contiguous().clone())
        for name, module in model.named_modules():
            name = self._name(name + ".weight").removesuffix(".weight")
            module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))

    def write(self):
        if self.rank:
            return
        os.makedirs(self.folder, exist_ok=True)
        for name, tensors in self.files.items():
            save_file(tensors, os.path.join(self.folder, f"{name}.safetensors"))
        shutil.copy(os.path.join(self.reference.folder, "config.json"), self.folder)
        pathlib.Path(self.folder, "reference.json").write_text(json.dumps(
            {**self.reference.json, "version": 3, "layout": self.layout, "steps": self.steps}))
