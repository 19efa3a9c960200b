"""picotron, a clone on PYTHONPATH: its model and parallelisms, its train_step, and train.py's own statements that wrap the
model. The loop around them is this file's: train.py has no clipping and one AdamW for all parameters.
flash_attn is stubbed and FLASH_ATTEN=0, as picotron's README has it for the CPU.

    torchrun --nproc-per-node 4 docs/conformance/picotron_cells.py docs/references/gqa out/mine tp=2 pp=2
"""
import ast, os, pathlib, sys, types
import cell
import torch, torch.distributed as dist, torch.nn.functional as F  # noqa: F401  F for train.py

reference, out, options = cell.start(dp=1, pp=1, cp=1, tp=1, engine="1f1b", micro_batch=1)
for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.layers", "flash_attn.layers.rotary",
             "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.layer_norm"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].flash_attn_func = sys.modules[name].apply_rotary_emb = sys.modules[name].layer_norm_fn = None
torch.cuda.synchronize = lambda *_: None  # its messages call it on a CPU, too
os.environ.update(FLASH_ATTEN="0", DEVICE="cpu")
rank, world = cell.gloo()
import picotron.process_group_manager as pgm

pgm.setup_process_group_manager(tp_size=options.tp, cp_size=options.cp, pp_size=options.pp, dp_size=options.dp)
groups = pgm.process_group_manager
from picotron.context_parallel.context_parallel import apply_context_parallel  # noqa: F401  for train.py's statements
from picotron.data_parallel.data_parallel import DataParallelBucket  # noqa: F401
from picotron.model import Llama
from picotron.pipeline_parallel.pipeline_parallel import (
    PipelineParallel, train_step_pipeline_1f1b, train_step_pipeline_afab)
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.utils import average_loss_across_dp_cp_ranks

train_py = next(path for path in (pathlib.Path(each) / "train.py" for each in sys.path) if path.exists())
tree = ast.parse(train_py.read_text("utf-8"))


def statements(word):
    """Runs train.py's own: a function, or those of its main block that have this word."""
    nodes = [n for n in (*tree.body[:-1], *tree.body[-1].body) if word in ast.unparse(n).split("\n")[-1] or
             getattr(n, "name", "") == word]
    exec(compile(ast.Module(nodes, []), str(train_py), "exec"), globals())


NAMES = {"decoder_layers.": "model.layers.", ".attention.": ".self_attn.", "out_proj": "o_proj", "final_proj": "lm_head",
         "final_norm": "model.norm", "embedding.": "model.embed_tokens."}
SHARDS = {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0),
          "o_proj": 1, "down_proj": 1}


def names(name):
    for mine, theirs in NAMES.items():
        name = name.replace(mine, theirs)
    return name


config = types.SimpleNamespace(**{**reference.config, "max_position_embeddings": reference.json["seq_len"]})
model = Llama(config=config)
model = apply_tensor_parallel(model) if options.tp > 1 else model
model = PipelineParallel(model, config) if options.pp > 1 else model
layout = {key: getattr(options, key) for key in ("dp", "pp", "cp", "tp")}
record = cell.Recorder(reference, out, names, SHARDS if options.tp > 1 else {}, groups.tp_rank, options.tp, layout=layout)
record.load(model)
statements("apply_context_parallel(model)")
statements("DataParallelBucket(model)")
statements("train_step")
optimizer = reference.adamw(model.parameters())


class Loader:
    """What picotron's MicroBatchDataLoader gives: this rank's samples, and its part of each sequence."""

    def __init__(self, step):
        part = [x.chunk(options.dp)[groups.dp_rank].chunk(options.cp, 1)[groups.cp_rank] for x in (step.inputs, step.targets)]
        self.parts = list(zip(*(x.contiguous().split(options.micro_batch) for x in part)))
        self.grad_acc_steps = len(self.parts)
        self.shape = (*self.parts[0][0].shape, config.hidden_size)
        self.iterator = iter(self.parts)

    def __next__(self):
        inputs, targets = next(self.iterator)
        return {"input_ids": inputs, "target_ids": targets, "position_ids": torch.arange(inputs.shape[1])}


for step in reference:
    optimizer.zero_grad()
    loader = Loader(step)
    if options.pp > 1:
        engine = train_step_pipeline_afab if options.engine == "afab" else train_step_pipeline_1f1b
        loss = engine(model, loader, loader.shape, torch.device("cpu"), reference.dtype)
    else:
        loss = train_step(model, loader, "cpu")  # noqa: F821  of train.py
    loss = [average_loss_across_dp_cp_ranks(loss, "cpu")]
    if options.pp > 1:
        dist.broadcast_object_list(loss, groups.pp_last_rank, group=groups.pp_group)
    cell.update(record, model, optimizer, step, loss[0])
    if hasattr(model, "reset"):
        model.reset()
cell.end(record)
