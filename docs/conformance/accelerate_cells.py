"""Accelerate around Hugging Face's class: DDP, FSDP2, tensor parallelism, gradient accumulation, its own clipping.

    torchrun --nproc-per-node 4 docs/conformance/accelerate_cells.py docs/references/masked out/mine data=fsdp accumulate=2
"""
import cell
import torch, torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DataLoaderConfiguration, DistributedType

# data: ddp, fsdp; accumulate: micro-batches of each rank, by accelerator.accumulate() and backward()
# loss: sums as the guide of gradient accumulation has it, over the counted targets of all; or mean, of each micro-batch
reference, out, options = cell.start(data="ddp", accumulate=1, loss="sums")
rank, world = cell.gloo()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    reshard_after_forward=True) if options.data == "fsdp" else None
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=options.accumulate,
                          dataloader_config=DataLoaderConfiguration(split_batches=False))
if options.data == "fsdp":  # on a CPU it leaves the plugin aside and takes DDP: the state is set as on a GPU
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
model = cell.hugging_face(reference)
record = cell.Recorder(reference, out, layout={"dp": world, "micro_batches": options.accumulate})
record.load(model)
groups = [{"params": [p], "weight_decay": reference.decay * (p.dim() > 1)} for p in model.parameters()]
adamw = torch.optim.AdamW(groups, lr=1.0, betas=reference.betas, eps=reference.eps)
model, optimizer = accelerator.prepare(model, adamw)
sharded = any(hasattr(p, "full_tensor") for p in model.parameters())
cell.check(sharded == (options.data == "fsdp"), f"{options.data}: Accelerate took {accelerator.distributed_type}")
divisor = world * options.accumulate  # backward() divides by the micro-batches, the wrapper by the ranks
for step in reference:
    counted, total = (step.targets >= 0).sum(), torch.zeros((), dtype=torch.float64)
    for inputs, targets in cell.micro_batches(step, world, rank, options.accumulate):
        with accelerator.accumulate(model):
            logits = model(input_ids=inputs, use_cache=False, **cell.documents(reference, inputs)).logits
            loss = cell.scaled_loss(options.loss, logits, targets, counted, divisor)
            total += loss.detach() / divisor
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                record.gradients(model)
                norm = accelerator.clip_grad_norm_(model.parameters(), reference.clip or 1e30)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            for group in optimizer.param_groups:
                group["lr"] = step.lr
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(total)
    record.step(model, total, norm, step.lr, step.inputs, step.targets)
cell.end(record)
