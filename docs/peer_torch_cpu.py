#!/usr/bin/env python3
"""Chapter 01 against PyTorch on the same CPU: the same Llama shape, one training step, tokens per second.

    python3 docs/peer_torch_cpu.py [--model default|125m|all] [--dtype fp32|bf16] [--rounds 5] [--threads 2]

PyTorch runs a plain model (RMSNorm, RoPE, grouped-query attention by scaled_dot_product_attention, SwiGLU, untied head,
AdamW, clipping), eager and under torch.compile; in bf16 under autocast: its weights are fp32, as our masters are. A
round runs our program, eager and compiled one after another, so that whatever else the machine does hits all three; the
table has the medians, and the median of the rounds' ratios.
"""
import argparse
import os
import re
import statistics
import sys
import time

import programs
import tables

# layers, hidden, heads, key/value heads, ffn, vocabulary; sequence length, sequences; timed steps in a round
SHAPES = {
    "default": ((4, 128, 8, 4, 384, 256), 128, 16, 10),
    "125m": ((12, 768, 12, 12, 2048, 32000), 512, 4, 2),
}


def build_model(torch, shape, seq_len):
    nn, F = torch.nn, torch.nn.functional
    layers, hidden, heads, kv_heads, ffn, vocab = shape
    dim = hidden // heads
    angles = torch.outer(torch.arange(seq_len).double(), 1e4 ** (-torch.arange(0, dim, 2).double() / dim))
    angles = torch.cat([angles, angles], 1)

    def linear(a, b):
        return nn.Linear(a, b, bias=False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
            self.qkv, self.o = linear(hidden, (heads + 2 * kv_heads) * dim), linear(hidden, hidden)
            self.gate_up, self.down = linear(hidden, 2 * ffn), linear(ffn, hidden)
            self.register_buffer("cos", angles.cos().float(), persistent=False)
            self.register_buffer("sin", angles.sin().float(), persistent=False)

        def rotate(self, x):  # (B, heads, T, D), by halves
            a, b = x.chunk(2, -1)
            return x * self.cos + torch.cat([-b, a], -1) * self.sin

        def forward(self, x):
            B, T, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(B, T, heads + 2 * kv_heads, dim).transpose(1, 2)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True,
                                               enable_gqa=heads != kv_heads)
            x = x + self.o(y.transpose(1, 2).reshape(B, T, hidden))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocab, hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(hidden, eps=1e-5), linear(hidden, vocab)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    return Model()


class Torch:
    """A training step of the shape, eager or compiled; timed() gives seconds per step."""

    def __init__(self, torch, name, compiled, dtype):
        shape, seq_len, sequences, self.steps = SHAPES[name]
        torch.manual_seed(1)
        model = build_model(torch, shape, seq_len)
        forward = torch.compile(model) if compiled else model
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        batch = torch.randint(0, shape[-1], (2, sequences, seq_len))

        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = forward(batch[0], batch[1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad(set_to_none=True)

        self.step = step
        for _ in range(3):
            step()

    def timed(self):
        seconds = []
        for _ in range(self.steps):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def ours(binary, name, dtype, threads):
    """tokens/s that --bench prints (median of five steps), and attention's multiples of its floor."""
    _, seq_len, sequences, _ = SHAPES[name]
    flags = [] if name == "default" else ["--model", name]
    command = [binary, *flags, "--seq-len", str(seq_len), "--micro-batch", str(sequences),
               "--global-batch", str(sequences), "--dtype", dtype, "--bench"]
    text = programs.output(command, environment={"OPENBLAS_NUM_THREADS": str(threads)})
    step = re.search(r"a step of (\d+) tokens: ([\d.]+) ms", text)
    floors = [re.search(rf"^{op} +\d+ +[\d.]+ +[\d.]+ +([\d.]+)", text, re.M)
              for op in ("attention", "attention_backward")]
    return float(step[1]) / float(step[2]) * 1e3, [float(found[1]) for found in floors]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--binary", default="build/bin/01_single_gpu")
    options = parser.parse_args()
    if not os.access(options.binary, os.X_OK):
        sys.exit(f"{options.binary} is not there: build the target 01_single_gpu, or name it with --binary")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch loads its OpenMP
    try:
        import torch
    except ImportError:
        sys.exit("this comparison needs PyTorch: pip install torch (the CPU wheel is enough)")
    torch.set_num_threads(options.threads)
    os.environ.pop("OMP_NUM_THREADS")

    print(f"{programs.hardware()}, {options.threads} threads, PyTorch {torch.__version__}, {options.dtype}, "
          f"{options.rounds} rounds\n")
    head = ["tokens/s", "ours", "torch eager", "torch.compile", "ours / eager", "ours / compile", "attention, x floor"]
    print("\n".join(tables.markdown(head, [])))
    for name in SHAPES if options.model == "all" else [options.model]:
        _, seq_len, sequences, _ = SHAPES[name]
        eager, compiled = (Torch(torch, name, compiled, options.dtype) for compiled in (False, True))
        rounds, floors = [], []
        for _ in range(options.rounds):
            tokens_per_s, times_floor = ours(options.binary, name, options.dtype, options.threads)
            floors.append(times_floor)
            rounds.append((tokens_per_s, *(seq_len * sequences / peer.timed() for peer in (eager, compiled))))
        median = [statistics.median(column) for column in zip(*rounds)]
        ratios = [statistics.median(r[0] / r[i] for r in rounds) for i in (1, 2)]
        forward, backward = (statistics.median(column) for column in zip(*floors))
        print(f"| {name} | {median[0]:,.0f} | {median[1]:,.0f} | {median[2]:,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} "
              f"| {forward:.1f} forward, {backward:.1f} backward |", flush=True)


if __name__ == "__main__":
    main()
