#!/usr/bin/env python3
"""Chapter 01's training step in PyTorch on a GPU: the same Llama shape, bf16 weights, fp32 masters and moments.

    python3 docs/peer_torch_gpu.py --layers 4 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 32768 \\
        --seq-len 8192 --forms eager,compile
    python3 docs/peer_torch_gpu.py --forms "" --attention 4096,8192

Prints one JSON line per form: the median step of --steps after --warmup; then one per length of --attention: causal
scaled_dot_product_attention, forward and backward, with events on the stream. The model is that of peer_torch_cpu.py.
"""
import argparse
import json
import statistics
import sys
import time

from peer_torch_cpu import build_model

try:
    import torch
except ImportError:
    sys.exit("this comparison needs PyTorch: pip install torch")


class MasterAdamW:
    """AdamW on fp32 copies of bf16 weights, with gradient clipping, as the trainer's."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self):
        for weight, master in zip(self.weights, self.masters):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self.adamw.zero_grad(set_to_none=True)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def step_line(options, device, form):
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    shape = (options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab)
    with device:
        model = build_model(torch, shape, options.seq_len).bfloat16()
        tokens = torch.randint(0, options.vocab, (options.micro_batch, options.seq_len + 1))
    optimizer = MasterAdamW(model)
    forward = torch.compile(model) if form == "compile" else model
    seconds = []
    for i in range(options.warmup + options.steps):
        synchronize(device)
        begin = time.perf_counter()
        loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        synchronize(device)
        if i >= options.warmup:
            seconds.append(time.perf_counter() - begin)
    step = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {"form": form, "torch": torch.__version__, "step_s": step, "loss": float(loss.detach()),
            "tokens_per_s": options.micro_batch * options.seq_len / step, "peak_gib": peak}


def median_ms(device, body, calls=11):
    for _ in range(3):
        body()
    times = []
    for _ in range(calls):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            body()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            begin = time.perf_counter()
            body()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def attention_line(options, device, length):
    width = options.hidden // options.heads
    sizes = [(1, heads, length, width) for heads in (options.heads, options.kv_heads, options.kv_heads)]
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes)

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                enable_gqa=options.heads != options.kv_heads)
    out = forward()
    gradient = torch.randn_like(out)
    forward_ms = median_ms(device, forward)
    backward_ms = median_ms(device, lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    pairs = options.heads * length * (length + 1) / 2
    return {"attention": length, "torch": torch.__version__, "forward_ms": forward_ms, "backward_ms": backward_ms,
            "forward_tflops": 4 * pairs * width / forward_ms / 1e9,
            "backward_tflops": 10 * pairs * width / backward_ms / 1e9}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"layers": 4, "hidden": 4096, "heads": 32, "kv-heads": 8, "ffn": 14336, "vocab": 32768, "seq-len": 8192,
                "micro-batch": 1, "steps": 10, "warmup": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--forms", default="eager,compile")
    parser.add_argument("--attention", default="", help="lengths, comma separated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    for form in filter(None, options.forms.split(",")):
        print(json.dumps(step_line(options, device, form)), flush=True)
    for length in filter(None, options.attention.split(",")):
        print(json.dumps(attention_line(options, device, int(length))), flush=True)


if __name__ == "__main__":
    main()
