"""Chapter 02: data parallelism on 1 to 8 ranks; its three forms; all-reduce algorithms."""
import pathlib
import re

import programs
import tables
from measure import show

PROGRAM = "02_data_parallel"
FORMS = (("naive", "0", "off"), ("bucketed", "25", "off"), ("bucketed", "1", "off"), ("overlapped", "25", "on"),
         ("overlapped", "1", "on"))


def ranks(runs):
    rows = []
    for n in (1, 2, 4, 8):
        run = runs.run(n, PROGRAM, "--steps 4 --init-std 0.1 --tables off")
        rows.append([n, run.loss(), run.norm(), *run.peaks("params", "grads", "optimizer", "activations"),
                     run.sent("dp.all_reduce") if n > 1 else "none"])
    show(["N", "loss at step 4", "gradient norm", "params", "grads", "optimizer", "activations",
          "`dp.all_reduce` bytes per step"], rows, "::::::::")


def forms_of(runs):
    """[form, bucket in MiB, seconds of the quickest step, and of its collectives, bytes, all-reduces]"""
    for form, bucket, overlap in FORMS:
        run = runs.run(2, PROGRAM, f"--steps 30 --bucket-mb {bucket} --overlap {overlap} --tables off")
        calls = int(re.search(r"in (\d+) bucket", run.text)[1])
        quickest = min(run.steps, key=lambda step: step["step_s"])
        yield [form, bucket, quickest["step_s"], quickest["comm_s"], run.last["comm_bytes"]["dp.all_reduce"], calls]


def forms(runs):
    show(["form", "bucket", "step", "in collectives", "bytes sent", "all-reduces"],
         [[form, f"{bucket} MiB" if bucket != "0" else "one per parameter", f"{1e3 * step:.1f} ms",
           f"{1e3 * comm:.2f} ms", f"{count:,}", calls] for form, bucket, step, comm, count, calls in forms_of(runs)])


def overlap(_):
    """a step of Llama-3 8B on one sequence of 8,192 tokens per GPU, 6,667 tokens/s, fp32 gradients, a bucket per unit;
    the backward pass takes two thirds of the time, divided by FLOPs; a bucket's all-reduce takes 2 n (N-1)/N bytes /
    rate"""
    width, ffn, vocabulary, blocks, tokens = 4096, 14336, 128256, 32, 8192
    block, head = 2 * width * (width + 1024) + 3 * width * ffn + 2 * width, width * vocabulary
    # In the order of the backward pass: [parameters, FLOPs per token in the forward pass]
    units = [[head, 2 * head], *([block, 2 * block + 2 * width * tokens] for _ in range(blocks)), [head, 0]]
    step, flops = tokens / 6667, sum(each for _, each in units)
    rows = [["title", "lane", "what", "begin", "end"]]
    node, card = (7 / 8, 370e9), (1, 45e9)  # the share that a rank sends twice, bytes per second
    for title, (share, rate), first in (("8 GPUs, after the backward pass", node, step),
                                        ("8 GPUs, overlapped", node, 0),
                                        ("many nodes, one card each, overlapped", card, 0)):
        time, free = step / 3, first
        rows.append([title, "computes", "forward", "0", f"{time:.6f}"])
        for parameters, each in units:
            begin, time = time, time + 2 / 3 * step * each / flops
            if each:
                rows.append([title, "computes", "backward", f"{begin:.6f}", f"{time:.6f}"])
            begin = max(time, free)
            free = begin + 2 * 4 * parameters * share / rate
            rows.append([title, "sends", "all-reduce", f"{begin:.6f}", f"{free:.6f}"])
    return rows


def all_reduce(runs):
    """time and bus bandwidth of each all-reduce over the size of the message, on two ranks"""
    return runs.table(2, "test_measure", ["all-reduce"], "--csv", "all_reduce.csv")


def nodes(runs):
    """all-reduce over 6 ranks on three nodes, links of 800, 200 and 80 Mbit/s each way, by size and algorithm;
    computed: the bytes that the busiest node sends / the link's rate, n times 5/3 (ring), 4/3 (hierarchical), 3/2"""
    rows = [["mbit_per_s", "bytes", "algorithm", "seconds", "computed_s"]]
    box = ["bash", "docs/cluster/box.sh"]
    runs.commands.append("python3 docs/measure.py 02_nodes")
    for rate in (800, 200, 80):
        table = runs.folder / f"nodes_{rate}.csv"
        if not table.exists():
            programs.output([*box, "up", "--nodes", 3, "--slots", 2, "--rate", f"{rate}mbit"])
            try:  # a node has its own /tmp
                file = pathlib.Path("/run/train70b-box/all_reduce.csv")
                program = [runs.programs / "test_measure", "all-reduce", "--largest-mb", 4, "--csv", file]
                programs.output([*box, "exec", 0, "mpirun", "-np", 6, *program])
                table.write_text(file.read_text("utf-8"), "utf-8")
            finally:
                programs.output([*box, "down"])
        for row in tables.read(table):
            sent = {"ring": 5 / 3, "hierarchical": 4 / 3, "tree": 3 / 2}.get(row["algorithm"])
            rows.append([rate, row["bytes"], row["algorithm"], row["seconds"],
                         f"{sent * int(row['bytes']) / (rate * 1e6 / 8):.6g}" if sent else ""])
    return rows


PRINTED = {"02_ranks": ranks, "02_forms": forms}
