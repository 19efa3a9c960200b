"""For claims.py: the rows, the models by their shapes, and pipelines simulated slot by slot."""
import dataclasses




GB, TFLOPS, DAY = 1e9, 1e12, 86400
BF16, FP32 = 2, 4                                        # bytes
MASTER, MOMENTS = FP32, 2 * FP32
A100, H100 = 312 * TFLOPS, 989 * TFLOPS                  # data sheets: bf16, without sparsity
SUSTAINED = 600 * TFLOPS                                 # assumed, per GPU
NVLINK, CARD = 370e9, 45e9                               # bytes/s: docs/links.md
ROWS = {}


def row(name):
    def add(function):
        ROWS[name] = function
        return function
    return add


@dataclasses.dataclass
class Llama:
    """The shapes of Llama-2 and Llama-3: RMSNorm, grouped-query attention, SwiGLU, a head of its own."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    @property
    def kv_width(self):
        return self.hidden // self.heads * self.kv_heads

    def block_matrices(self):
        E, F, K = self.hidden, self.ffn, self.kv_width
        return sum(rows * columns for rows, columns in [(E, E), (K, E), (K, E), (E, E), (F, E), (F, E), (E, F)])

    def blocks(self):
        return self.layers * (self.block_matrices() + 2 * self.hidden)

    def parameters(self):
        return self.blocks() + self.hidden + 2 * self.vocab * self.hidden

    def attention_flops(self, tokens):
        """Per token, forward: two products of tokens/2 keys on average."""
        return 2 * 2 * self.layers * self.hidden * tokens / 2

    def flops(self, tokens):
        """Per token of a sequence, forward and backward; the input embedding is a look-up."""
        return 6 * (self.parameters() - self.vocab * self.hidden) + 3 * self.attention_flops(tokens)

    def kept_per_token(self):
        """Bytes that one block keeps without recomputation: see chapter 01's table."""
        E, F, K = self.hidden, self.ffn, self.kv_width
        return BF16 * (2 * E + (E + 2 * K) + E + 2 * E + 3 * F) + FP32 * (2 + self.heads)

    def activations(self, tokens):
        """Bytes at the peak without recomputation: every block, the logits, two rows of width hidden."""
        return tokens * (self.layers * self.kept_per_token() + BF16 * (self.vocab + 2 * self.hidden))


LLAMA_7B = Llama(32, 4096, 32, 32, 11008, 32000)
LLAMA_8B = Llama(32, 4096, 32, 8, 14336, 128256)
LLAMA_70B = Llama(80, 8192, 64, 8, 28672, 128256)

# ---- pipeline --------------------------------------------------------------------------------------------------------

def order(name, stages, micro_batches, stage):
    """[(letter, micro-batch)] of a rank."""
    warmup = {"naive": 1, "gpipe": micro_batches, "1f1b": min(micro_batches, stages - stage)}[name]
    steps = [("F", m) for m in range(warmup)]
    for m in range(micro_batches):
        steps += [("B", m)] + [("F", m + warmup)] * (m + warmup < micro_batches)
    return steps


def simulate(name, stages, micro_batches, forward=1, backward=2):
    """(time of a step, most micro-batches in flight on rank 0)"""
    orders = [order(name, stages, micro_batches, stage) for stage in range(stages)]
    done, clock, at = {}, [0] * stages, [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        before = list(at)
        for stage in range(stages):
            if at[stage] == len(orders[stage]):
                continue
            letter, m = orders[stage][at[stage]]
            neighbour = stage - 1 if letter == "F" else stage + 1
            needs = (letter, m, neighbour)
            if 0 <= neighbour < stages and needs not in done:
                continue
            clock[stage] = max(clock[stage], done.get(needs, 0)) + (forward if letter == "F" else backward)
            done[letter, m, stage] = clock[stage]
            at[stage] += 1
        assert at != before, "deadlock"
    in_flight, most = 0, 0
    for letter, _ in orders[0]:
        in_flight += 1 if letter == "F" else -1
        most = max(most, in_flight)
    return max(clock), most


def idle(name, stages, micro_batches):
    return 100 * (1 - 3 * micro_batches / simulate(name, stages, micro_batches)[0])
