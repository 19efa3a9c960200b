"""What all cells share. A cell is one framework in one layout; it repeats a reference run and writes a folder for compare.py:

    torchrun --nproc-per-node 4 docs/conformance/torch_cells.py docs/references/masked out/mine dp=2 tp=2
"""
import datetime, math, os, pathlib, shutil, sys, types
sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]
import torch, torch.distributed as dist, torch.nn.functional as F
from torch_reference import Recorder, Reference, check  # noqa: F401  for the cells


def start(**defaults):
    """(reference, output folder, options): options are the words key=value, numbers where they are numbers."""
    if len(sys.argv) < 3 or "=" in sys.argv[1] + sys.argv[2]:
        raise SystemExit(f"usage: {sys.argv[0]} REFERENCE OUT [key=value ...]; keys: {', '.join(defaults)}")
    torch.set_num_threads(1)
    given = dict(word.split("=", 1) for word in sys.argv[3:])
    check(given.keys() <= defaults.keys(), f"unknown option among {sorted(given)}; there are {', '.join(defaults)}")
    options = {**defaults, **{key: int(x) if x.isdigit() else x for key, x in given.items()}}
    return Reference(sys.argv[1]), sys.argv[2], types.SimpleNamespace(**options)


def gloo():
    """(rank, ranks); a message that never comes ends the run."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
    return dist.get_rank(), dist.get_world_size()


def hugging_face(reference, **settings):
    import transformers

    config = transformers.AutoConfig.from_pretrained(reference.folder, dtype=reference.dtype)
    return transformers.AutoModelForCausalLM.from_config(config, **settings).to(reference.dtype)


def folder_of(reference, out):
    """The weights as from_pretrained reads them: config.json and model.safetensors."""
    folder = pathlib.Path(out).with_suffix(".model")
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in ("config.json", "config.json"), ("initial.safetensors", "model.safetensors"):
        shutil.copy(reference.folder / name, folder / f"{file}.{os.getpid()}")
        os.replace(folder / f"{file}.{os.getpid()}", folder / file)  # whole, whichever rank is first
    return folder


def documents(reference, inputs):
    """Positions and attention's mask where the reference has documents (docs/reference-format.md); else nothing."""
    end = reference.json.get("document_token")
    if end is None:
        return {}
    index = torch.arange(inputs.shape[1])
    before = F.pad((inputs == end).long().cumsum(1), (1, -1))  # ends before this token
    first = torch.where(F.pad(before[:, 1:] != before[:, :-1], (1, 0), value=True), index, 0).cummax(1).values
    seen = (index[:, None] >= index) & (before[:, :, None] == before[:, None, :])
    return {"position_ids": index - first, "attention_mask": seen[:, None]}


def loss_of(logits, targets, counted):
    """This part's share of the mean over all targets of the batch."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction="sum") / counted


def micro_batches(step, world, rank, count):
    """(inputs, targets) of each of a data-parallel rank's micro-batches."""
    return zip(*(x.chunk(world)[rank].chunk(count) for x in (step.inputs, step.targets)))


def scaled_loss(kind, logits, targets, counted, divisor):
    """For a framework that divides what it is given by the micro-batches of all ranks, `divisor` of them. kind: "sums",
    the share of the mean over all `counted` targets; "mean", over the micro-batch's own."""
    if kind == "sums":
        return loss_of(logits, targets, counted) * divisor
    return loss_of(logits, targets, (targets >= 0).sum())


def norm(record, model):
    """Of all gradients, from the tensors as they are gathered."""
    record._save("all", ((name, p.grad) for name, p in model.named_parameters()))
    value = [math.sqrt(sum(float(g.double().square().sum()) for g in record.files.pop("all").values()))]
    if record.world > 1:
        dist.broadcast_object_list(value, 0)
    return value[0]


def update(record, model, optimizer, step, loss):
    """What follows the backward pass where the framework leaves it to its user: clipping, the update, recording."""
    record.gradients(model)
    n = norm(record, model)
    for p in model.parameters():
        p.grad *= min(1, (record.reference.clip or math.inf) / (n + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = step.lr
    optimizer.step()
    record.step(model, loss, n, step.lr, step.inputs, step.targets)


def end(record):
    record.write()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # one of some 200 runs aborted behind this, in a thread that Python's end did not wait for

