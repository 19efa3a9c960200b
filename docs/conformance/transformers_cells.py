"""transformers by itself: Trainer with its own loss, accumulation and data parallelism, or tensor parallelism by tp_plan.

    torchrun --nproc-per-node 2 docs/conformance/transformers_cells.py docs/references/masked out/mine accumulate=2
"""
import cell
import torch, torch.distributed as dist, transformers

reference, out, options = cell.start(by="trainer", accumulate=1)
rank, world = cell.gloo()
steps = list(reference)


def tensor_parallel():
    """from_pretrained with tp_plan="auto": the plan of the model's own configuration."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    folder = cell.folder_of(reference, out)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh, dtype=reference.dtype)
    record = cell.Recorder(reference, out, layout={"tp": world})
    record.load(model)
    optimizer = reference.adamw(model.parameters())
    for step in steps:
        model.zero_grad()
        logits = model(input_ids=step.inputs, use_cache=False, **cell.documents(reference, step.inputs)).logits
        loss = cell.loss_of(logits, step.targets, (step.targets >= 0).sum())
        loss.backward()
        cell.update(record, model, optimizer, step, loss)
    cell.end(record)


class Samples(torch.utils.data.Dataset):
    """All steps' samples, one behind the other; labels as Trainer wants them, which shifts them: one token more."""

    def __len__(self):
        return sum(len(step.inputs) for step in steps)

    def __getitem__(self, i):
        step = steps[i // len(steps[0].inputs)]
        inputs, targets = (x[i % len(steps[0].inputs)] for x in (step.inputs, step.targets))
        more = {key: x[0] for key, x in cell.documents(reference, inputs[None]).items()}
        # The first label predicts nothing; the last target needs an input of its own, which is seen by nobody.
        labels = torch.cat([torch.tensor([-100]), torch.where(targets < 0, -100, targets)])
        inputs = torch.cat([inputs, inputs[-1:]])
        if more:
            n = len(inputs)
            mask = torch.eye(n, dtype=torch.bool)[None]
            mask[0, :-1, :-1] = more["attention_mask"]
            more = {"attention_mask": mask, "position_ids": torch.cat([more["position_ids"], torch.zeros(1, dtype=torch.long)])}
        return {"input_ids": inputs, "labels": labels, **more}


def trainer():
    model = cell.hugging_face(reference)
    record = cell.Recorder(reference, out, layout={"dp": world, "micro_batches": options.accumulate})
    record.load(model)
    optimizer = reference.adamw(model.parameters())
    state = {}

    def before(*_):  # behind backward(); Trainer's own clipping is off
        record.gradients(model)
        state["norm"] = cell.norm(record, model)
        for p in model.parameters():
            p.grad *= min(1, (reference.clip or 1e30) / (state["norm"] + 1e-6))

    class Now(transformers.TrainerCallback):
        def on_log(self, arguments, now, control, logs=None, **_):
            if "loss" in logs:
                step = steps[now.global_step - 1]
                record.step(model, logs["loss"], state["norm"], step.lr, step.inputs, step.targets)

    optimizer.register_step_pre_hook(before)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: steps[min(n, len(steps) - 1)].lr)
    per_device = len(steps[0].inputs) // (world * options.accumulate)
    arguments = transformers.TrainingArguments(
        output_dir=f"{out}.trainer", use_cpu=True, per_device_train_batch_size=per_device,
        gradient_accumulation_steps=options.accumulate, max_steps=len(steps), max_grad_norm=0.0, logging_steps=1,
        logging_nan_inf_filter=False, save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
        train_sampling_strategy="sequential",
        **({"ddp_backend": "gloo"} if world > 1 else {}))
    transformers.Trainer(model, arguments, train_dataset=Samples(), optimizers=(optimizer, rates), callbacks=[Now()]).train()
    cell.end(record)


tensor_parallel() if options.by == "tp_plan" else trainer()
