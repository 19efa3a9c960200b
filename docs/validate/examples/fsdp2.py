# torchrun --nproc-per-node 4 docs/validate/examples/fsdp2.py docs/references/gqa out/mine
import math, pathlib, sys
sys.path[:0] = [str(pathlib.Path(__file__).parents[2])]
import torch, torch.distributed as dist, torch.nn.functional as F, transformers
from torch.distributed.fsdp import fully_shard
from torch_reference import Recorder, Reference
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
reference = Reference(sys.argv[1])
config = transformers.AutoConfig.from_pretrained(sys.argv[1], torch_dtype=reference.dtype)
model = transformers.AutoModelForCausalLM.from_config(config).to(reference.dtype)
for module in (*model.model.layers, model):
    fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
record = Recorder(reference, sys.argv[2], layout={"dp": world})
record.load(model)
optimizer = reference.adamw(model.parameters())
for step in reference:
    model.zero_grad()
    logits = model(input_ids=step.inputs.chunk(world)[rank], use_cache=False).logits
    mine, counted = step.targets.chunk(world)[rank], (step.targets >= 0).sum()
    loss = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), ignore_index=-1, reduction="sum") / counted
    (loss * world).backward()  # FSDP divides by the number of ranks
    record.gradients(model)  # before clipping
    dist.all_reduce(loss := loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), reference.clip or math.inf).full_tensor()
    for group in optimizer.param_groups:
        group["lr"] = step.lr
    optimizer.step()
    record.step(model, loss, norm, step.lr, step.inputs, step.targets)
record.write()
