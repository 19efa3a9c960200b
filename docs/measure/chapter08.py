"""Chapter 08: everything together; and README.md's table of all chapters."""
import json
import pathlib
import re
import statistics
import subprocess
import sys

import programs
import tables
import validate_simulation
from measure import box, on_links, show
from style import ON_DEVICE as KINDS
from validate_simulation import HALVES, MODEL, words

ZERO3 = ("--model 70b --fake-world 16 --zero 3 --dtype bf16 --recompute full --seq-len 4096 --global-batch 16 "
         "--micro-batch 1")


def zero3(runs):
    kinds = ("params", "grads", "optimizer", "activations", "workspace", "host", "total")
    narrow = "--grad-dtype bf16"
    rows = []
    for flags in ("", "--offload optimizer", "--offload all", narrow, f"{narrow} --optimizer adamw8bit",
                  f"{narrow} --optimizer adamw8bit --fp8 current"):
        booked = runs.booked(f"{ZERO3} {flags}")
        rows.append([flags and f"`{flags}`", *(f"{booked.get(kind, 0) / 1e9:.2f}" for kind in kinds)])
    show(["additional flags", *kinds[:-1], "total, GB"], rows)


def ranks(runs):
    mesh = "--dp 2 --tp 2 --pp 2 --zero 1 --sequence-parallel on --micro-batch 4"
    one, eight = (runs.run(n, "08_3d_full", f"--steps 100 --stop-after 20 {flags}").steps
                  for n, flags in ((1, ""), (8, mesh)))
    show(["step", "one rank", "eight ranks, dp 2 · tp 2 · pp 2, ZeRO-1, sequence parallel"],
         [[i, f"{one[i - 1]['loss']:.9g}", f"{eight[i - 1]['loss']:.9g}"] for i in (1, 2, 5, 10, 20)], ":::")


def expert_parallel(runs):
    rows = []
    for label, n, program, flags in [("one rank", 1, "01_single_gpu", ""),
                                     *((f"`--ep {ep}`", 8, "08_3d_full", f"--ep {ep}") for ep in (1, 2, 4, 8))]:
        run = runs.run(n, program, f"--steps 4 --experts 8 {flags}")
        rows.append([label, f"{run.last['loss']:.4f}", *run.peaks("params", "activations"),
                     *(run.sent(name) for name in ("dp.all_reduce", "edp.all_reduce", "ep.all_to_all"))])
    show(["", "loss, step 4", "params", "activations", "dp: dense gradients", "edp: experts' gradients", "ep: rows"],
         rows)


# Technique, ranks, the file to read, flags. In fp64: 50 steps do not amplify its rounding to a digit that is printed.
FRONT = [
    ("one device", 1, "01_single_gpu/", ""),
    ("data parallel", 2, "02_data_parallel/", "--tables off"),
    ("ZeRO-3", 2, "03_zero/", "--zero 3 --tables off"),
    ("tensor parallel", 2, "04_tensor_parallel/", "--tp 2 --tables off"),
    ("pipeline", 2, "05_pipeline/", "--pp 2 --tables off"),
    ("context parallel", 2, "06_context_parallel/", "--cp 2 --tables off"),
    ("FP8", 1, "07_fp8/", "--dtype bf16 --fp8 current --optimizer adamw8bit --tables off"),
    ("all of 02 to 06", 8, "08_3d_full/", "--tp 2 --cp 2 --pp 2 --zero 1 --sequence-parallel on"),
]


def front(runs):
    """README.md's table"""
    print(f"{'':<17}{'':>5}{'lines of':>14}{'loss at step':>18}{'rank 0: MiB of':>20}{'MB':>11}\n"
          f"{'chapter':<17}ranks{'minimal':>14}{'1':>9}{'50':>12}{'param':>8}{'grad':>6}{'optim':>6}{'activ':>6}"
          f"{'sent':>6}")
    for technique, ranks, folder, flags in FRONT:
        program, fp64 = folder[:-1], "--dtype" not in flags
        flags = f"{flags} --layers 2 --seq-len 64 --global-batch 4 --steps 50".split() + ["--dtype", "fp64"] * fp64
        steps = runs.steps(ranks, program, flags, "front.jsonl")
        # In 8 bits the second decimal differs between CPUs.
        losses = "".join(f"{steps[i]['loss']:12.7f}" if fp64 else f"{steps[i]['loss']:6.1f}{'':6}" for i in (0, -1))
        memory = "".join(f"{steps[-1]['memory']['peak'][kind] / 2**20:6.1f}" for kind in KINDS[:4])
        lines = sum(path.read_text("utf-8").count("\n") for path in pathlib.Path(folder).glob("minimal.*"))
        print(f"{program[:2]} {technique:<16}{ranks:>3}{lines:>14}{losses}{memory}"
              f"{sum(steps[-1]['comm_bytes'].values()) / 1e6:6.1f}", flush=True)
        (runs.folder / "front.jsonl").unlink()


def elastic(runs):
    """three replicas of tp 2 x pp 2; replica 1 is killed in step 30 and takes part again from step 60 on: who takes part,
    the loss beside one rank's, bytes that rank 0 of replica 0 sends to others, seconds; fp64"""
    flags = ("--layers 2 --heads 4 --hidden 32 --ffn 48 --seq-len 16 --micro-batch 1 --global-batch 12 --dtype fp64 "
             "--steps 100").split()
    one = runs.steps(1, "01_single_gpu", flags, "elastic_one.jsonl")
    file = runs.folder / "elastic_0.jsonl"
    runs.commands.append("python3 docs/measure.py 08_elastic")
    if not file.exists():
        lighthouse = subprocess.Popen([sys.executable, "08_3d_full/checkpoint/lighthouse.py", "--replicas", "3",
                                       "--awaits", "1:60"], stdout=subprocess.PIPE, encoding="utf-8")
        address = re.search(r"--lighthouse (\S+)", lighthouse.stdout.readline())[1]

        def replica(number, *more):
            return subprocess.Popen([*programs.mpirun(4), runs.programs / "08_3d_full", *flags, "--tp", "2", "--pp",
                                     "2", "--elastic", "on", "--lighthouse", address, "--replica", str(number), *more],
                                    env=programs.ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        live = [replica(0, "--metrics", file), replica(2)]
        replica(1, "--inject", "kill:0:30").wait()
        for process in (*live, replica(1), lighthouse):
            assert process.wait() == 0
    rows, replicas = [["step", "replicas", "loss", "one_rank", "sent_bytes", "step_s"]], ""
    for line in map(json.loads, file.read_text("utf-8").splitlines()):
        if line["event"] == "replicas":
            replicas = " ".join(map(str, line["replicas"]))
        if line["event"] == "step":
            rows.append([line["step"], replicas, line["loss"], one[line["step"] - 1]["loss"],
                         line["comm_bytes"]["replicas.all_reduce"], line["step_s"]])
    return rows


# Layout of four ranks on two nodes: flags, and what differs in one rank's shapes.
ON_NODES = {
    "dp 4, ring": ("--all-reduce ring", {}),
    "dp 4, hierarchical": ("--all-reduce hierarchical", {}),
    "dp 4, tree": ("--all-reduce tree", {}),
    "ZeRO-3 over 4": ("--zero 3", {}),
    "ZeRO-3 over 4, hierarchical": ("--zero 3 --all-reduce hierarchical", {}),
    "ZeRO-3, shards in a node": ("--zero 3 --hybrid-shard 2", {}),
    "tp in the nodes, dp across": ("--tp 2", HALVES),
    "tp across the nodes": ("--tp 4", {"--heads": 2, "--kv-heads": 1, "--ffn": 88}),
    "pp across, dp in the nodes": ("--pp 2", {"--layers": 2}),
    "pp across, tp in the nodes": ("--pp 2 --tp 2", HALVES | {"--layers": 2}),
}


class Box(validate_simulation.Machine):
    """The machine's ranks on the nodes of a box."""

    def start(self, ranks):
        return self.mpirun if ranks > 1 else []


def nodes_at(runs, mbit):
    """[layout, seconds of a step measured, simulated], of three rounds each the least: others use the machine"""
    best = {}
    with box(2, mbit) as (mpirun, folder):
        for _ in range(3):
            machine = Box(runs.programs, folder, 12)
            machine.mpirun = mpirun
            links = machine.links(4) | {"one_machine": True}
            for name, (layout, differs) in ON_NODES.items():
                flags = [*words(MODEL), *layout.split(), "--micro-batch", "8", "--global-batch", "32"]
                bench = machine.bench(MODEL | differs, 8, machine.cores)
                times = (machine.step_seconds(4, flags),
                         machine.simulated_seconds(4, flags, machine.cluster(links, bench), bench))
                best[name] = list(map(min, times, best.get(name, times)))
                print(" ", mbit, name, *times, file=sys.stderr, flush=True)
    return [[name, *(f"{seconds:.6g}" for seconds in times)] for name, times in best.items()]


def nodes(runs):
    """a step of four ranks on two nodes (docs/cluster/box.sh) that share two cores, links of 800 and 200 Mbit/s each
    way: the median measured, and simulated with ops from --bench on both cores and links from --probe-file; of three
    rounds each the least"""
    return on_links(runs, "08_nodes", ["layout", "measured_s", "simulated_s"], nodes_at, (800, 200))


def simulated(_):
    """docs/results/nodes.md: how far off the simulator is; the steps"""
    reduced = [row for row in tables.read("docs/results/02_nodes.csv") if row["simulated_s"]]
    steps = tables.read("docs/results/08_nodes.csv")
    large = [row for row in reduced if int(row["bytes"]) > 64 << 10]
    rows = []
    for name, mine in (("all-reduces", reduced), ("up to 64 KiB", [row for row in reduced if row not in large]),
                       *((f"from 256 KiB, {algorithm}", [row for row in large if row["algorithm"] == algorithm])
                         for algorithm in ("ring", "hierarchical", "tree")), ("steps", steps)):
        errors = [100 * (float(row["simulated_s"]) / float(row.get("seconds") or row["measured_s"]) - 1)
                  for row in mine]
        rows.append([name, len(errors), f"{statistics.median(map(abs, errors)):.0f}%", f"{min(errors):+.0f}%",
                     f"{max(errors):+.0f}%"])
    show(["simulated against measured", "cases", "median error", "from", "to"], rows)
    show(["Mbit/s", "layout", "measured, s", "simulated, s", "error"],
         [[row["mbit_per_s"], row["layout"], f"{float(row['measured_s']):.3f}", f"{float(row['simulated_s']):.3f}",
           f"{100 * (float(row['simulated_s']) / float(row['measured_s']) - 1):+.0f}%"] for row in steps], ":-:::")


PRINTED = {"08_simulated": simulated, "front": front, "08_zero3": zero3, "08_ranks": ranks, "08_ep": expert_parallel}
