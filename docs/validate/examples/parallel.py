# torchrun --nproc-per-node 8 docs/validate/examples/parallel.py docs/references/gqa out/mine 2 2
# tensor (here 2) and pipeline (here 2) parallelism; the rest of the ranks is data-parallel
import math, pathlib, sys
sys.path[:0] = [str(pathlib.Path(__file__).parents[2])]
import torch, torch.distributed as dist, torch.nn.functional as F, transformers
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_reference import Recorder, Reference
MICRO_BATCHES = 2
dist.init_process_group("gloo")
tp, pp, rank = int(sys.argv[3]), int(sys.argv[4]), dist.get_rank()
dp = dist.get_world_size() // (tp * pp)
mesh = dist.device_mesh.init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
first, last, before, after = stage == 0, stage == pp - 1, rank - dp * tp, rank + dp * tp
if pp > 1:  # a tied matrix is on the first and on the last stage
    ends = dist.new_subgroups_by_enumeration([[i, i + (pp - 1) * dp * tp] for i in range(dp * tp)])[0]
reference = Reference(sys.argv[1])
config = transformers.AutoConfig.from_pretrained(sys.argv[1], torch_dtype=reference.dtype)
model = transformers.AutoModelForCausalLM.from_config(config).to(reference.dtype)
body, tied, layers = model.model, config.tie_word_embeddings, config.num_hidden_layers
# A stage keeps its own layers, under the numbers that they have in the whole model.
body.layers = torch.nn.ModuleDict(
    {str(i): body.layers[i] for i in range(stage * layers // pp, (stage + 1) * layers // pp)})
if not first and not (last and tied):
    del body.embed_tokens
if not last:
    del body.norm, model.lm_head
columns, rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), (
    "self_attn.o_proj", "mlp.down_proj")
for layer in body.layers.values():
    parallelize_module(layer, mesh["tp"], {**{name: ColwiseParallel() for name in columns},
                                           **{name: RowwiseParallel() for name in rows}})
record = Recorder(reference, sys.argv[2], layout={"tp": tp, "pp": pp, "dp": dp, "micro_batches": MICRO_BATCHES})
record.load(model)
optimizer = reference.adamw(model.parameters())


def sum_over(axis, x):
    dist.all_reduce(x, group=mesh.get_group(axis))


def forward(inputs):
    """(what the stage received, its output): embeddings or the stage before, this stage's layers, logits."""
    if first:
        x = received = body.embed_tokens(inputs)
    else:
        received = torch.empty(*inputs.shape, config.hidden_size, dtype=reference.dtype)
        dist.recv(received, before)
        x = received.requires_grad_()
    rope = body.rotary_emb(x, torch.arange(inputs.shape[1])[None])
    for layer in body.layers.values():
        x = layer(x, position_embeddings=rope, attention_mask=None)
    if not last:
        dist.send(x.detach().contiguous(), after)
        return received, x
    return received, model.lm_head(body.norm(x))


for step in reference:
    model.zero_grad()
    samples, passes, loss = step.inputs.chunk(dp)[replica], [], torch.zeros((), dtype=torch.float64)
    targets, counted = step.targets.chunk(dp)[replica].chunk(MICRO_BATCHES), (step.targets >= 0).sum()
    for inputs in samples.chunk(MICRO_BATCHES):
        passes.append(forward(inputs))
    for (received, y), aims in zip(passes, targets):
        if last:
            y = F.cross_entropy(y.flatten(0, 1), aims.flatten(), ignore_index=-1, reduction="sum") / counted
            loss += y.detach()
            y.backward()
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, after)
            y.backward(gradient)
        if not first:
            dist.send(received.grad, before)
    for name, p in model.named_parameters():
        local = p.grad.to_local() if hasattr(p, "to_local") else p.grad
        sum_over("dp", local)
        if "q_norm" in name or "k_norm" in name:
            sum_over("tp", local)  # of this rank's heads so far
        if tied and "embed_tokens" in name and pp > 1:
            dist.all_reduce(local, group=ends)  # of the embedding and of the head
    record.gradients(model)
    mine = [p.grad for n, p in model.named_parameters() if first or not (tied and "embed" in n)]  # each once
    square = sum((g.full_tensor() if hasattr(g, "full_tensor") else g).double().square().sum() for g in mine)
    for axis, x in (("pp", square), ("pp", loss), ("dp", loss)):
        sum_over(axis, x)
    norm = math.sqrt(square)
    for p in model.parameters():
        p.grad *= min(1, (reference.clip or math.inf) / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = step.lr
    optimizer.step()
    record.step(model, loss, norm, step.lr, step.inputs, step.targets)
record.write()
dist.destroy_process_group()
