"""megatron-core: GPTModel of its local layers, its DistributedDataParallel, schedules and finalize_model_grads. AdamW and
clipping are this file's. On a CPU megatron-core asks for CUDA; cuda=stub answers in its place.

    torchrun --nproc-per-node 4 docs/conformance/megatron_cells.py docs/references/gqa out/mine tp=2 pp=2
"""
import contextlib
import cell
import torch, torch.distributed as dist



class OnCpu(torch.overrides.TorchFunctionMode):
    """device="cuda" in the making of a tensor becomes the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


reference, out, options = cell.start(dp=1, cp=1, tp=1, pp=1, micro_batch=2, sequence=0, cuda="stub")
rank, world = cell.gloo()
if options.cuda == "stub":
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    OnCpu().__enter__()
from megatron.core import parallel_state as groups, tensor_parallel
if options.cuda == "stub":  # there is no dropout whose random numbers it would keep
    tensor_parallel.random.CudaRNGStatesTracker.add = lambda *_: None
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

c, length = reference.config, reference.json["seq_len"]
groups.initialize_model_parallel(options.tp, options.pp, context_parallel_size=options.cp)
layers, heads, kv, size = (c[k] for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"))
config = TransformerConfig(
    num_layers=layers, hidden_size=c["hidden_size"], ffn_hidden_size=c["intermediate_size"], num_attention_heads=heads,
    num_query_groups=kv, kv_channels=size, normalization="RMSNorm", layernorm_epsilon=c["rms_norm_eps"],
    gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
    attention_dropout=0.0, use_cpu_initialization=True, perform_initialization=False, params_dtype=reference.dtype,
    pipeline_dtype=reference.dtype, tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp,
    context_parallel_size=options.cp, sequence_parallel=bool(options.sequence), calculate_per_token_loss=True,
    gradient_accumulation_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
    num_layers_in_first_pipeline_stage=layers // 2 if options.pp == 2 and layers % 2 else None,
    finalize_model_grads_func=finalize_model_grads)
tensor_parallel.model_parallel_cuda_manual_seed(1)
first, last = groups.is_pipeline_first_stage(), groups.is_pipeline_last_stage()
model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), c["vocab_size"], length, first, last,
                 position_embedding_type="rope", rotary_base=c["rope_theta"], share_embeddings_and_output_weights=False)
FIXED = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight",
         "decoder.final_layernorm.weight": "model.norm.weight"}
NAMES = {"linear_proj": "self_attn.o_proj", "linear_fc2": "mlp.down_proj", "pre_mlp_layernorm": "post_attention_layernorm"}
SHARDS = {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
          "o_proj": 1, "down_proj": 1}


def pieces(name, tensor):
    """Hugging Face's names, and views of the tensor: a group of linear_qkv holds its heads of q, then k, then v."""
    if name in FIXED:
        return [(FIXED[name], tensor)]
    _, _, i, *rest = name.split(".")
    prefix = f"model.layers.{model.decoder.layers[int(i)].layer_number - 1}."
    part = rest[-2]
    if part == "linear_qkv":
        grouped = tensor.view(kv // options.tp, heads // kv + 2, size, -1)
        parts = {"q_proj": grouped[:, :-2], "k_proj": grouped[:, -2], "v_proj": grouped[:, -1]}
        return [(f"{prefix}self_attn.{each}.weight", view) for each, view in parts.items()]
    if part == "linear_fc1":
        return list(zip((f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), tensor.chunk(2)))
    return [(f"{prefix}{NAMES.get(part, part)}.weight", tensor)]


class Split:
    """The model's parameters under Hugging Face's names; .grad: what megatron-core has reduced."""

    def named_parameters(self):
        for name, p in model.named_parameters():
            gradients = pieces(name, p.main_grad if hasattr(p, "main_grad") else torch.zeros_like(p))
            for (each, w), (_, g) in zip(pieces(name, p.detach()), gradients):
                whole = torch.nn.Parameter(w.reshape(-1, *p.shape[1:]).clone())
                whole.grad = g.reshape(whole.shape).clone()
                yield each, whole


with torch.no_grad():
    for name, p in model.named_parameters():
        for each, view in pieces(name, p):
            w, d = reference.weights[each], SHARDS.get(each.split(".")[-2])
            view.copy_((w if d is None else w.chunk(options.tp, d)[groups.get_tensor_model_parallel_rank()]).reshape(view.shape))
layout = {key: getattr(options, key) for key in ("dp", "cp", "tp", "pp")}
record = cell.Recorder(reference, out, None, SHARDS if options.tp > 1 else {}, groups.get_tensor_model_parallel_rank(),
                       options.tp, layout=layout)
record._save("initial", Split().named_parameters(), reference.dtype)
ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), model)
config.no_sync_func = ddp.no_sync
optimizer = reference.adamw(model.parameters())
replica = groups.get_data_parallel_rank()
position, future = torch.arange(length)[None], ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def forward(batches, net):
    inputs, targets = next(batches)
    losses = net(inputs, position.expand(len(inputs), -1), future, labels=targets.clamp(min=0))

    def loss_of(output):
        counted = targets >= 0
        total = (output.float() * counted).sum()
        return total, counted.sum().to(torch.int), {"sum": total.detach()}
    return losses, loss_of


for step in reference:
    ddp.zero_grad_buffer()
    inputs, targets = (x.chunk(options.dp)[replica].contiguous().split(options.micro_batch) for x in (step.inputs, step.targets))
    sums = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(list(zip(inputs, targets))), model=[ddp], num_microbatches=len(inputs),
        seq_length=length, micro_batch_size=options.micro_batch, forward_only=False)
    loss = sum((each["sum"].double() for each in sums), torch.zeros((), dtype=torch.float64))
    for group in (groups.get_data_parallel_group(), groups.get_pipeline_model_parallel_group()):
        dist.all_reduce(loss, group=group)
    record.gradients(Split())
    norm = cell.norm(record, Split())
    for p in model.parameters():
        p.grad = p.main_grad * min(1, (reference.clip or 1e30) / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = step.lr
    optimizer.step()
    for p in model.parameters():
        p.grad = None
    record.step(Split(), loss / (step.targets >= 0).sum(), norm, step.lr, step.inputs, step.targets)
cell.end(record)
