"""PyTorch's own parallelism around Hugging Face's class: DDP, FSDP2, DTensor's tensor and sequence parallelism, their
products, gradient accumulation. Pipelines: torch_pipeline_cells.py.

    torchrun --nproc-per-node 4 docs/conformance/torch_cells.py docs/references/masked out/mine dp=2 tp=2 data=fsdp
"""
import contextlib
import cell
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)

# data: ddp, fsdp (a unit per block), root (one unit), keep (parameters stay after the forward pass), hybrid (2 x dp/2)
reference, out, options = cell.start(dp=1, tp=1, cp=1, data="fsdp", accumulate=1, sequence="off")
rank, world = cell.gloo()
dp, tp, cp = options.dp, options.tp, options.cp
mesh = dist.device_mesh.init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
replica = mesh.get_local_rank("dp")
model = cell.hugging_face(reference)
body = model.model


def tensor_parallel():
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    split = options.sequence == "on"  # between the products each rank has its part of the sequence
    for layer in body.layers:
        plan = {name: ColwiseParallel() if name.split(".")[-1] in columns else RowwiseParallel(
                    output_layouts=Shard(1) if split else Replicate())
                for name, _ in layer.named_modules() if name.split(".")[-1] in columns + rows}
        if split:
            plan.update({"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()})
            plan["self_attn"] = PrepareModuleInput(input_kwarg_layouts={"hidden_states": Shard(1)},
                                                   desired_input_kwarg_layouts={"hidden_states": Replicate()})
            plan["mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(layer, mesh["tp"], plan)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())} if split else {
            "lm_head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)


if tp > 1:
    tensor_parallel()
if options.data != "ddp" and dp > 1:
    shards = dist.device_mesh.init_device_mesh(
        "cpu", (2, dp // 2), mesh_dim_names=("replicate", "shard")) if options.data == "hybrid" else mesh["dp"]
    for module in (*body.layers, model) if options.data != "root" else (model,):
        fully_shard(module, mesh=shards, reshard_after_forward=options.data != "keep")
record = cell.Recorder(reference, out, layout={key: n for key, n in vars(options).items() if isinstance(n, int)})
record.load(model)
wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp")) \
    if options.data == "ddp" and dp > 1 else model
optimizer = reference.adamw(model.parameters())


def sequence_split(buffers):
    if cp == 1:
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import context_parallel

    return context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1] * len(buffers))


for step in reference:
    model.zero_grad()
    total, counted = torch.zeros((), dtype=torch.float64), (step.targets >= 0).sum()
    for i, (inputs, targets) in enumerate(cell.micro_batches(step, dp, replica, options.accumulate)):
        last = i == options.accumulate - 1
        if dp > 1 and options.data != "ddp":
            model.set_requires_gradient_sync(last)
        positions = torch.arange(inputs.shape[1]).expand(inputs.shape).clone()
        inputs, targets = inputs.clone(), targets.clone()
        with sequence_split([inputs, targets, positions]), (
                contextlib.nullcontext() if last or wrapped is model else wrapped.no_sync()):
            more = {"position_ids": positions, **cell.documents(reference, inputs)}
            loss = cell.loss_of(wrapped(input_ids=inputs, use_cache=False, **more).logits, targets, counted)
            (loss * dp).backward()  # DDP and FSDP divide by the number of ranks
        total += loss.detach()
    for axis in ("dp", "cp"):
        dist.all_reduce(total, group=mesh.get_group(axis))
    cell.update(record, model, optimizer, step, total)
cell.end(record)
