"""DeepSpeed around Hugging Face's class, on the CPU's accelerator: ZeRO's stages, its own accumulation and clipping.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 docs/conformance/deepspeed_cells.py docs/references/masked out/mine zero=3
"""
import cell
import torch, torch.distributed as dist
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

# loss: sums over the counted targets of all ranks; or mean, of each micro-batch over its own
reference, out, options = cell.start(zero=1, accumulate=1, loss="sums")
rank, world = cell.gloo()
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
samples = len(next(iter(reference)).inputs)
config = {"train_batch_size": samples, "train_micro_batch_size_per_gpu": samples // world // options.accumulate,
          "gradient_accumulation_steps": options.accumulate, "gradient_clipping": reference.clip,
          "zero_optimization": {"stage": options.zero}, "zero_allow_untested_optimizer": True,
          "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9, "communication_data_type": "fp32"}
whole = cell.hugging_face(reference)
whole.load_state_dict(reference.weights, strict=False)
groups = [{"params": [p], "weight_decay": reference.decay * (p.dim() > 1)} for p in whole.parameters()]
adamw = torch.optim.AdamW(groups, lr=1.0, betas=reference.betas, eps=reference.eps)
engine, optimizer, _, _ = deepspeed.initialize(model=whole, optimizer=adamw, config=config)
kinds = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
cell.check(type(engine.optimizer).__name__ == kinds.get(options.zero, "AdamW"), f"{type(engine.optimizer)} for ZeRO {options.zero}")


class Gathered:
    """The engine's parameters, whole on every rank, for the recorder: .grad is what DeepSpeed gives for its update."""

    def __init__(self, gradients=False):
        self.parameters_ = {}
        for name, p in engine.module.named_parameters():
            value = safe_get_full_fp32_param(p) if options.zero else p.detach()
            self.parameters_[name] = torch.nn.Parameter((p if value is None else value).detach().clone())
            if gradients:
                self.parameters_[name].grad = (safe_get_full_grad(p) if options.zero else p.grad).detach().clone()

    def named_parameters(self):
        return self.parameters_.items()


record = cell.Recorder(reference, out, layout={"dp": world, "micro_batches": options.accumulate})
record._save("initial", Gathered().named_parameters(), reference.dtype)
divisor = world * options.accumulate  # backward() divides by the micro-batches, the reduction by the ranks
for step in reference:
    counted, total = (step.targets >= 0).sum(), torch.zeros((), dtype=torch.float64)
    for inputs, targets in cell.micro_batches(step, world, rank, options.accumulate):
        logits = engine(input_ids=inputs, use_cache=False, **cell.documents(reference, inputs)).logits
        loss = cell.scaled_loss(options.loss, logits, targets, counted, divisor)
        total += loss.detach() / divisor
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            gathered = Gathered(gradients=True)
            record.gradients(gathered)
            norm = cell.norm(record, gathered)  # where ZeRO 0 gives none
            for group in optimizer.param_groups:
                group["lr"] = step.lr
        engine.step()
    dist.all_reduce(total)
    record.step(Gathered(), total, engine.get_global_grad_norm() or norm, step.lr, step.inputs, step.targets)
cell.end(record)
