"""nanotron: as far as it comes on a CPU.

    torchrun --nproc-per-node 1 docs/conformance/nanotron_cells.py docs/references/gqa out/mine
"""
import cell

reference, out, options = cell.start(dp=1, tp=1, pp=1, group="gloo")
if options.group == "gloo":
    cell.gloo()
from nanotron.parallel import ParallelContext

context = ParallelContext(tensor_parallel_size=options.tp, pipeline_parallel_size=options.pp, data_parallel_size=options.dp,
                          backend=options.group)
from nanotron.models.llama import LlamaForTraining  # noqa: F401

raise SystemExit("nanotron runs on a CPU now: this cell needs the rest of its adapter")
