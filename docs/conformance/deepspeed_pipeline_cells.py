"""DeepSpeed's pipeline engine over Hugging Face's layers: PipelineModule, train_batch, its own loop of micro-batches.
Clipping is this file's: train_batch clips before a hook could see the gradients.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 docs/conformance/deepspeed_pipeline_cells.py docs/references/gqa out/mine pp=2
"""
import cell
import torch
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule

reference, out, options = cell.start(pp=2, dp=1, micro_batches=4)
rank, world = cell.gloo()
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
whole, counted = cell.hugging_face(reference), None
body, layers = whole.model, whole.config.num_hidden_layers


class Block(torch.nn.Module):
    def __init__(self, i):
        super().__init__()
        self.layer = body.layers[i]

    def forward(self, x):
        rope = body.rotary_emb(x, torch.arange(x.shape[1])[None])
        return self.layer(x, position_embeddings=rope, attention_mask=None)


def names(name):
    i, rest = int(name.split(".")[0]), name.partition(".")[2]
    if i in (0, layers + 1, layers + 2):
        return {0: "model.embed_tokens.", layers + 1: "model.norm.", layers + 2: "lm_head."}[i] + rest
    return f"model.layers.{i - 1}." + rest.removeprefix("layer.")


def loss_of(logits, targets):  # train_batch() averages over micro-batches and ranks
    return cell.loss_of(logits, targets, counted) * (options.micro_batches * options.dp)


parts = [body.embed_tokens, *(LayerSpec(Block, i) for i in range(layers)), body.norm, whole.lm_head]
net = PipelineModule(parts, num_stages=options.pp, loss_fn=loss_of, partition_method="uniform")
samples = len(next(iter(reference)).inputs)
config = {"train_batch_size": samples, "train_micro_batch_size_per_gpu": samples // options.dp // options.micro_batches,
          "gradient_accumulation_steps": options.micro_batches, "gradient_clipping": 0.0, "steps_per_print": 10**9}
layout = {"pp": options.pp, "dp": options.dp, "micro_batches": options.micro_batches}
record = cell.Recorder(reference, out, names, layout=layout)
record.load(net)
parameters = list(net.parameters())
groups = [{"params": [p], "weight_decay": reference.decay * (p.dim() > 1)} for p in parameters]
adamw = torch.optim.AdamW(groups, lr=1.0, betas=reference.betas, eps=reference.eps)
engine, _, _, _ = deepspeed.initialize(model=net, optimizer=adamw, model_parameters=parameters, config=config)
norm = None


def before(*_):
    global norm
    record.gradients(net)
    norm = cell.norm(record, net)
    for p in parameters:
        p.grad *= min(1, (reference.clip or 1e30) / (norm + 1e-6))


adamw.register_step_pre_hook(before)
replica = engine.grid.get_data_parallel_rank()
for step in reference:
    counted = (step.targets >= 0).sum()
    for group in adamw.param_groups:
        group["lr"] = step.lr
    share = [x.chunk(options.dp)[replica].contiguous().chunk(options.micro_batches) for x in (step.inputs, step.targets)]
    loss = engine.train_batch(iter(list(zip(*share))))
    record.step(net, loss, norm, step.lr, step.inputs, step.targets)
cell.end(record)
