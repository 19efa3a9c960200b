"""The bugs of docs/silent-bugs.md that are run (patches/NAME.diff), and the layouts in which they show."""

import dataclasses
import json
import pathlib


@dataclasses.dataclass
class Bug:
    name: str
    layout: str = ""   # flags of the parallel run; the right run has one rank
    model: str = ""    # flags of both
    resumed: int = 0   # the step after which the run ends and is resumed


RUN = [
    Bug("last-micro-batch-only", "--pp 2 --micro-batch 2"),
    Bug("divided-after-each-pass", "--pp 2 --micro-batch 2"),
    Bug("gradient-of-a-sum", "--pp 2 --micro-batch 2"),
    Bug("clipped-by-stage", "--pp 2 --micro-batch 2"),
    Bug("tied-copies-apart", "--pp 2 --micro-batch 2", "--tied-embeddings on"),
    Bug("final-norm-apart", "--tp 2 --sequence-parallel on"),
    Bug("key-value-copies-apart", "--tp 2", "--kv-heads 1"),
    Bug("cp-not-summed-without-dp", "--cp 2"),
    Bug("own-keys-in-ring-backward", "--cp 2 --cp-algorithm ring"),
    Bug("divided-by-cp", "--cp 2"),
    Bug("last-micro-batch-not-reduced", "--dp 2 --micro-batch 1"),
    Bug("weights-one-update-old", "--dp 2 --zero 1"),
    Bug("reduction-not-awaited", "--dp 2 --tp 2 --sequence-parallel on"),
    Bug("reduction-awaited-too-late", "--dp 2 --pp 2 --micro-batch 2", "--tied-embeddings on"),
    Bug("samples-twice", "--dp 2"),
    Bug("mean-of-ranks", "--dp 2", "--data ../text.bin --val-fraction 0"),
    Bug("mean-of-micro-batches", "--micro-batch 1", "--data ../text.bin --val-fraction 0"),
    Bug("documents-seen-together", "--dp 2", "--document-token 10"),
    Bug("rope-in-bf16", "--dp 2"),
    Bug("experts-times-ep", "--dp 2 --ep 2", "--experts 4"),
    Bug("not-zeroed", ""),
    Bug("norms-decay", "--dp 2"),
    Bug("schedule-by-samples", "--dp 2"),
    Bug("moments-not-restored", "--dp 2", "", 150),
]

# (threads, what was wrong, the patch that makes it here or ""). Each thread was read before it was listed; what it says
# is of the version that it names.
THREADS = [(entry["threads"], entry["wrong"], entry["patch"])
           for entry in json.loads((pathlib.Path(__file__).parent / "threads.json").read_text(encoding="utf-8"))]
