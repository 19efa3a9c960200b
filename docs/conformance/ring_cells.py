"""ring-flash-attention, a clone on PYTHONPATH, as the attention of Hugging Face's class over a sequence cut in parts.
flash_attn needs a GPU: its two functions, forward and backward of one block, are this file's, by the definition in fp32.

    torchrun --nproc-per-node 4 docs/conformance/ring_cells.py docs/references/gqa out/mine by=zigzag
"""
import importlib, importlib.machinery, sys, types
import cell
import torch, torch.distributed as dist


def scores(q, k, softmax_scale, causal):
    """(B, H, Tq, Tk), in fp32; the last query sees the last key."""
    q, k = q.float().transpose(1, 2), k.float().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    s = q @ k.transpose(-1, -2) * softmax_scale
    seen = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    return s.masked_fill(~seen, float("-inf")) if causal else s


def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax):
    s, values = scores(q, k, softmax_scale, causal), v.float().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    return (s.softmax(-1) @ values).transpose(1, 2).to(q.dtype), s.logsumexp(-1), None, None


def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
             window_size_right, softcap, alibi_slopes, deterministic):
    group, heads = q.shape[2] // k.shape[2], k.shape[2]
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    p = (scores(q, k, softmax_scale, causal) - softmax_lse[..., None]).exp()
    d, keys, values = dout.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    ds = p * (d @ values.transpose(-1, -2) - (dout * out).sum(-1).transpose(1, 2)[..., None]) * softmax_scale
    dq.copy_((ds @ keys).transpose(1, 2))
    for whole, x in ((dk, ds.transpose(-1, -2) @ q.transpose(1, 2)), (dv, p.transpose(-1, -2) @ d)):
        whole.copy_(x.unflatten(1, (heads, group)).sum(2).transpose(1, 2))


interface = types.SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)
for name in ("flash_attn", "flash_attn.flash_attn_interface"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)  # transformers asks for it
    vars(sys.modules[name]).update(vars(interface), **dict.fromkeys(
        ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward", "_get_block_size_n")))
# load: the package; or its modules, without what its __init__ imports besides
reference, out, options = cell.start(by="zigzag", load="modules")
rank, world = cell.gloo()
if options.load == "modules":
    package = sys.modules["ring_flash_attn"] = types.ModuleType("ring_flash_attn")
    package.__path__ = [f"{folder}/ring_flash_attn" for folder in sys.path]
import transformers

if options.load == "package":
    importlib.import_module("ring_flash_attn")
file, function = {"ring": ("ring_flash_attn", "ring_flash_attn_func"), "stripe": ("stripe_flash_attn", "stripe_flash_attn_func"),
                  "zigzag": ("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func")}[options.by]
attend = getattr(importlib.import_module(f"ring_flash_attn.{file}"), function)


def attention(module, query, key, value, attention_mask, scaling, **_):
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    return attend(q, k, v, softmax_scale=scaling, causal=True, group=dist.group.WORLD), None


transformers.AttentionInterface.register("ring", attention)
model = cell.hugging_face(reference, attn_implementation="ring")
record = cell.Recorder(reference, out, layout={"cp": world})
record.load(model)
optimizer = reference.adamw(model.parameters())
tokens = torch.arange(reference.json["seq_len"])  # those of this rank
parts = tokens.chunk(2 * world)
mine = {"ring": tokens.chunk(world)[rank], "zigzag": torch.cat([parts[rank], parts[-1 - rank]]),
        "stripe": tokens[rank::world]}[options.by]
for step in reference:
    model.zero_grad()
    inputs, targets = step.inputs[:, mine], step.targets[:, mine]
    logits = model(input_ids=inputs, position_ids=mine.expand(inputs.shape), use_cache=False).logits
    loss = cell.loss_of(logits, targets, (step.targets >= 0).sum())
    loss.backward()
    total = loss.detach().double()
    for x in (total, *(p.grad for p in model.parameters())):
        dist.all_reduce(x)
    cell.update(record, model, optimizer, step, total)
cell.end(record)
