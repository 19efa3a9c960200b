"""torch.distributed.pipelining: its schedules over stages of Hugging Face's layers, with or without data parallelism.

    torchrun --nproc-per-node 2 docs/conformance/torch_pipeline_cells.py docs/references/masked out/mine schedule=1F1B
"""
import cell
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

reference, out, options = cell.start(pp=2, dp=1, schedule="1F1B", chunks=1, micro_batches=4)
rank, world = cell.gloo()
mesh = dist.device_mesh.init_device_mesh("cpu", (options.pp, options.dp), mesh_dim_names=("pp", "dp"))
replica, stage, stages = mesh.get_local_rank("dp"), mesh.get_local_rank("pp"), options.pp * options.chunks
whole = cell.hugging_face(reference)
layers = whole.config.num_hidden_layers


class Chunk(torch.nn.Module):
    """Part i of the model; its parameters keep the names that they have in the whole."""

    def __init__(self, i):
        super().__init__()
        self.first, self.last, body = i == 0, i == stages - 1, whole.model
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleDict(
            {str(n): body.layers[n] for n in range(i * layers // stages, (i + 1) * layers // stages)})
        if self.first:
            self.model.embed_tokens = body.embed_tokens
        if self.last:
            self.model.norm, self.lm_head = body.norm, whole.lm_head
        self.rotary = [body.rotary_emb]  # in a list: no part of the chunk's own

    def forward(self, x, positions, mask):
        x = self.model.embed_tokens(x) if self.first else x
        rope = self.rotary[0](x, positions)
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=rope, attention_mask=mask)
        return self.lm_head(self.model.norm(x)) if self.last else x


kind = get_schedule_class(options.schedule)
v_shape = "ZBV" in options.schedule or "DualPipe" in options.schedule
mine = [stage, stages - 1 - stage] if v_shape else list(range(stage, stages, options.pp))
parts = {i: Chunk(i) for i in mine}
model = torch.nn.ModuleList(parts.values())
if options.dp > 1:
    for part in parts.values():
        for module in (*part.model.layers.values(), part):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
layout = {"pp": options.pp, "dp": options.dp, "micro_batches": options.micro_batches}
record = cell.Recorder(reference, out, layout=layout, names=lambda name: name.partition(".")[2])
record.load(model)
optimizer = reference.adamw(model.parameters())
counted = None
pieces = [PipelineStage(part, i, stages, torch.device("cpu"), group=mesh.get_group("pp")) for i, part in parts.items()]
schedule = kind(pieces if issubclass(kind, PipelineScheduleMulti) else pieces[0], options.micro_batches, scale_grads=False,
                loss_fn=lambda logits, targets: cell.loss_of(logits, targets, counted) * options.dp)
for step in reference:
    model.zero_grad()
    counted, losses = (step.targets >= 0).sum(), []
    inputs, targets = (x.chunk(options.dp)[replica].contiguous() for x in (step.inputs, step.targets))
    more = cell.documents(reference, inputs) or {
        "position_ids": torch.arange(inputs.shape[1]).expand(inputs.shape), "attention_mask": None}
    given = {"positions": more["position_ids"].contiguous(), "mask": more["attention_mask"]}
    if 0 in mine:
        schedule.step(inputs, target=targets if stages - 1 in mine else None, losses=losses, **given)
    else:
        schedule.step(target=targets if stages - 1 in mine else None, losses=losses, **given)
    total = sum((each.detach().double() for each in losses), torch.zeros((), dtype=torch.float64)) / options.dp
    dist.all_reduce(total)
    cell.update(record, model, optimizer, step, total)
cell.end(record)
