"""Chapter 08: everything together; and README.md's table of all chapters."""
import json
import pathlib
import re
import subprocess
import sys

import programs
from measure import show
from style import ON_DEVICE as KINDS

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


PRINTED = {"front": front, "08_zero3": zero3, "08_ranks": ranks, "08_ep": expert_parallel}
