"""The models and scales that measure_node.py trains."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    global_batch: int = 1
    micro_batch: int = 1

    def flags(self, *leave_out):
        values = [(field.name.replace("_", "-"), getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [word for name, value in values if name not in leave_out for word in (f"--{name}", str(value))]

    def flops_per_token(self):  # the programs' definition, flops_per_token() in 01_single_gpu/complete/config.cpp
        E, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        block = 2 * E + 2 * (E + kv) * E + 3 * self.ffn * E
        return 6 * (self.layers * block + E + self.vocab * E) + 6 * self.layers * E * self.seq_len


LLAMA_8B = Shape(32, 4096, 32, 8, 14336, 32768, 8192)
LLAMA_70B = Shape(80, 8192, 64, 8, 28672, 128256, 4096)
SMALL = Shape(1, 64, 1, 1, 64, 256, 64)


@dataclasses.dataclass(frozen=True)
class Scale:
    slice: Shape           # a few layers of 8B
    block: Shape           # one layer of 70B
    experts: Shape         # one layer with as many experts, of as many columns, as Qwen3-30B-A3B
    expert_flags: str
    attention: list        # lengths
    long_attention: int
    rank: Shape            # 70B, one rank of 64
    shared: Shape          # ranks that share a card
    layout: Shape          # one rank per GPU
    steps: int             # of which the first five warm up, as PyTorch's
    warm_ms: int           # without a pause, before a ceiling is measured warm
    side: int              # of the product that measures the ceiling; 0: the program's default
    all_reduce_mb: int


def resized(shape, **sizes):
    return dataclasses.replace(shape, **sizes)


SCALES = {
    "full": Scale(
        slice=resized(LLAMA_8B, layers=4), block=resized(LLAMA_70B, layers=1, vocab=32768),
        experts=Shape(1, 2048, 16, 4, 6144, 32768, 4096), expert_flags="--experts 128 --top-k 8 --expert-ffn 768",
        attention=[8192, 4096, 16384, 32768], long_attention=131072, rank=resized(LLAMA_70B, global_batch=16),
        shared=Shape(4, 1024, 8, 8, 2816, 32768, 1024, global_batch=8),
        layout=resized(LLAMA_8B, layers=8, seq_len=4096, global_batch=8),
        steps=15, warm_ms=2000, side=0, all_reduce_mb=256),
    # A few seconds for each run on a CPU, to try this script.
    "tiny": Scale(
        slice=SMALL, block=resized(SMALL, ffn=96), experts=SMALL, expert_flags="--experts 8 --top-k 2",
        attention=[32, 64, 96, 128], long_attention=160,
        rank=Shape(4, 64, 16, 8, 128, 256, 32, global_batch=16),
        shared=Shape(2, 32, 4, 4, 32, 256, 32, global_batch=8), layout=Shape(8, 32, 8, 8, 32, 256, 32, global_batch=8),
        steps=4, warm_ms=20, side=64, all_reduce_mb=1),
}
