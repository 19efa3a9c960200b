"""Chapter 02: data parallelism on 1 to 8 ranks; its three forms; all-reduce algorithms."""
import json
import pathlib
import re

import programs
import tables
from measure import box, on_links, show

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


def nodes_at(runs, mbit):
    """[bytes, algorithm, seconds measured, simulated], of three rounds each the least: others use the machine"""
    measured, simulated = {}, {}
    cluster, table = runs.folder / "cluster.json", runs.folder / "all_reduce.csv"
    known = json.loads(pathlib.Path("08_3d_full/plan/clusters/box.json").read_text("utf-8"))
    with box(3, mbit) as (mpirun, folder):
        def written(program, *flags):
            programs.output([*mpirun, runs.programs / program, *flags, folder / "file"])  # a node has its own /tmp
            return folder / "file"
        for _ in range(3):
            links = written("08_3d_full", *"--steps 1 --global-batch 6 --micro-batch 1 --probe-file".split())
            cluster.write_text(json.dumps(known | json.loads(links.read_text("utf-8"))), "utf-8")
            largest = ["--largest-mb", "4", "--csv"]
            programs.output([runs.programs / "test_measure", "simulated", "--cluster", cluster, *largest, table])
            for least, path in ((measured, written("test_measure", "all-reduce", *largest)), (simulated, table)):
                for row in tables.read(path):
                    key, seconds = (row["bytes"], row["algorithm"]), float(row["seconds"])
                    least[key] = min(seconds, least.get(key, seconds))
    return [[*key, f"{seconds:.6g}", f"{simulated[key]:.6g}" if key in simulated else ""]
            for key, seconds in measured.items()]


def nodes(runs):
    """all-reduce over 6 ranks on three nodes (docs/cluster/box.sh) that share two cores, links of 800, 200 and 80
    Mbit/s each way, by size and algorithm: measured, and simulated with links from --probe-file; of three rounds each
    the least"""
    return on_links(runs, "02_nodes", ["bytes", "algorithm", "seconds", "simulated_s"], nodes_at, (800, 200, 80))


def sites_at(runs, mbit):
    """[H, seconds of a step, of the longest step], of three rounds each the least; H is 0 for gradients"""
    rows = []
    with box(2, mbit) as (mpirun, folder):
        one_each = [*mpirun[:-1], "2", "--map-by", "node", runs.programs / PROGRAM, "--steps", "20", "--tables", "off"]
        for every in (0, 1, 2, 5, 10, 20):
            flags = ["--outer-steps", str(every)] if every else ["--overlap", "off"]
            rounds = []
            for _ in range(3):
                programs.output([*one_each, *flags, "--metrics", folder / "file"])
                seconds = [step["step_s"] for step in programs.events(folder / "file", "step")]
                rounds.append([sum(seconds) / len(seconds), max(seconds)])
            rows.append([every, *(f"{least:.4g}" for least in map(min, zip(*rounds)))])
    return rows


def sites(runs):
    """DiLoCo on two ranks, each on a node of its own (docs/cluster/box.sh), links of 800, 80 and 20 Mbit/s each way:
    seconds of a step over 20 steps, by steps between exchanges (0: gradients in every step); the least of three"""
    return on_links(runs, "02_sites", ["outer_steps", "step_s", "longest_s"], sites_at, (800, 80, 20))


PRINTED = {"02_ranks": ranks, "02_forms": forms}
