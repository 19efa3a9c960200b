"""torchtitan's llama3: its parallelize_llama and pipeline_llm, and its Trainer's train_step with loss and clipping.
Trainer.__init__ wants a GPU, a tokenizer and a data set; this file gives train_step what __init__ would have set.

    torchrun --nproc-per-node 4 docs/conformance/torchtitan_cells.py docs/references/gqa out/mine tp=2 pp=2
"""
import functools, types
import cell
import torch, torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"  # else it takes "cuda" where there is no device
import torchtitan.models.llama3 as llama3
import torchtitan.trainer as titan
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention

# attention: sdpa; or flex, which torchtitan's configurations take. backend: of its sharding. replicate: of dp's ranks
reference, out, options = cell.start(dp=1, replicate=1, cp=1, tp=1, pp=1, sequence=1, schedule="1F1B", accumulate=1,
                                     micro_batch=1, attention="sdpa", backend="partial_dtensor", balance="headtail")
rank, world = cell.gloo()
if options.attention == "sdpa":
    llama3.get_attention_config = lambda *_, **__: ScaledDotProductAttention.Config()
samples, length, c = len(next(iter(reference)).inputs), reference.json["seq_len"], reference.config
local = samples // options.dp // options.accumulate
parallelism = ParallelismConfig(
    data_parallel_replicate_degree=options.replicate, data_parallel_shard_degree=options.dp // options.replicate,
    context_parallel_degree=options.cp, tensor_parallel_degree=options.tp, pipeline_parallel_degree=options.pp,
    enable_sequence_parallel=bool(options.sequence), pipeline_parallel_schedule=options.schedule, spmd_backend=options.backend,
    pipeline_parallel_microbatch_size=options.micro_batch, pipeline_parallel_first_stage_less_layers=0,
    context_parallel_load_balancer=None if options.balance == "none" else options.balance,
    pipeline_parallel_last_stage_less_layers=0)
training = TrainingConfig(local_batch_size=local, global_batch_size=samples, seq_len=length, max_norm=reference.clip or 1e30,
                          mixed_precision_param="float32", disable_cuda_graphs=True)
dims = ParallelDims.from_config(parallelism, world)
dims.build_mesh()
titan.dist_utils.set_spmd_backend(options.backend)
width, heads = c["hidden_size"], c["num_attention_heads"]
model_config = llama3.Llama3Model.Config(
    dim=width, vocab_size=c["vocab_size"], norm=llama3.RMSNorm.Config(normalized_shape=width, eps=c["rms_norm_eps"]),
    tok_embeddings=llama3.Embedding.Config(num_embeddings=c["vocab_size"], embedding_dim=width),
    lm_head=llama3.Linear.Config(in_features=width, out_features=c["vocab_size"]),
    layers=llama3._build_llama3_layers(
        n_layers=c["num_hidden_layers"], dim=width, n_heads=heads, n_kv_heads=c["num_key_value_heads"],
        hidden_dim=c["intermediate_size"], fuse_qkv=False, attn_backend="flex",
        rope=ComplexRoPE.Config(dim=c["head_dim"], max_seq_len=length, theta=c["rope_theta"])))
config = types.SimpleNamespace(parallelism=parallelism, training=training, debug=None)
model_config.update_from_config(config=config)
model = model_config.build()
loss_fn = CrossEntropyLoss.Config(global_vocab_size=c["vocab_size"]).build(compile_config=CompileConfig())
more = dict(parallel_dims=dims, training=training, parallelism=parallelism, compile_config=CompileConfig(), ac_config=None,
            dump_folder=f"{out}.titan")
self = types.SimpleNamespace(pp_has_first_stage=True, pp_has_last_stage=True)
if options.pp > 1:
    self.pp_schedule, self.model_parts, self.pp_has_first_stage, self.pp_has_last_stage = llama3.pipeline_llm(
        model, device=torch.device("cpu"), model_config=model_config, parallelize_fn=llama3.parallelize_llama,
        loss_fn=loss_fn, **more)
else:
    self.model_parts = [llama3.parallelize_llama(model, **more)]
for part in self.model_parts:
    part.init_states(buffer_device=torch.device("cpu"))
NAMES = {"tok_embeddings": "model.embed_tokens", "attention.qkv_linear.wq": "self_attn.q_proj",
         "attention.qkv_linear.wk": "self_attn.k_proj", "attention.qkv_linear.wv": "self_attn.v_proj",
         "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
         "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def names(name):
    name = name.partition(".")[2]  # behind the part's number
    for mine, theirs in NAMES.items():
        name = name.replace(mine, theirs)
    return "model." + name if name.startswith(("layers.", "norm.")) else name


everything = torch.nn.ModuleList(self.model_parts)
layout = {key: getattr(options, key) for key in ("dp", "cp", "tp", "pp")}
record = cell.Recorder(reference, out, names, interleaved=True, layout=layout)
record.load(everything)
adamw, result, now = reference.adamw(everything.parameters()), {}, None
clip = titan.dist_utils.clip_grad_norm_
titan.dist_utils.clip_grad_norm_ = lambda *a, **k: (record.gradients(everything), clip(*a, **k))[1]
vars(self).update(
    config=config, model_config=model_config, parallel_dims=dims, device=torch.device("cpu"), loss_fn=loss_fn, step=0,
    ntokens_seen=0, gradient_accumulation_steps=options.accumulate,
    num_pipeline_parallel_microbatches=local // options.micro_batch if options.pp > 1 else 1,
    optimizers=types.SimpleNamespace(zero_grad=adamw.zero_grad, step=adamw.step),
    lr_schedulers=types.SimpleNamespace(get_metrics=dict, step=lambda: None),
    checkpointer=types.SimpleNamespace(maybe_wait_for_staging=lambda: None),
    metrics_processor=types.SimpleNamespace(should_log=lambda _: True, log=lambda step, loss, worst, norm, **_:
                                            result.update(loss=loss, norm=norm)),
    train_context=titan.dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False))
for name in ("post_dataloading_process", "forward_backward_step", "pp_forward_backward_step", "_forward_backward_body"):
    setattr(self, name, functools.partial(getattr(titan.Trainer, name), self))
self.fwd_bwd_fn = self._forward_backward_body
replica = dims.get_mesh("batch").get_local_rank() if options.dp > 1 else 0
for step in reference:
    size = options.micro_batch if options.pp > 1 else local
    inputs, targets = (x.chunk(options.dp)[replica].contiguous().split(size) for x in (step.inputs, step.targets))
    batches = [({"input": x, "positions": torch.arange(length).repeat(len(x), 1)}, torch.where(y < 0, titan.IGNORE_INDEX, y))
               for x, y in zip(inputs, targets)]
    for group in adamw.param_groups:
        group["lr"] = step.lr
    titan.Trainer.train_step(self, iter(batches))
    loss = [result["loss"]]
    dist.broadcast_object_list(loss, world - 1)  # the last stage has it
    record.step(everything, loss[0], result["norm"], step.lr, step.inputs, step.targets)
cell.end(record)
