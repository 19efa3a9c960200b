"""Bad input: layouts, schedules, and what `plan` is asked for."""
import json

from bad_input_common import SHAPE, after, flags_of, odd_files
from bad_input_flags import INTEGERS, NUMBERS


def layout_cases(add):
    fake = ["--comm", "fake", "--fake-world"]
    for program, world, flags, expected in (
            ("02_data_parallel", 3, "--dp 2", "--dp 2"), ("02_data_parallel", 3, "", "--global-batch"),
            ("02_data_parallel", 4, "--micro-batch 1", "--global-batch"),
            ("02_data_parallel", 1000000000, "", "--fake-world"),
            ("02_data_parallel", 4, "--fake-rank 4", "--fake-rank"),
            ("02_data_parallel", 4, "--save-hf d", "--save-hf"),
            ("02_data_parallel", 4, "--save-reference d", "--save-reference"),
            ("02_data_parallel", 2, "--all-reduce-csv a.csv", "--all-reduce-csv"),
            ("02_data_parallel", 2, "--modes-csv a.csv", "--modes-csv"),
            ("02_data_parallel", 2, "--all-reduce-csv a.csv --tables on", "--all-reduce-csv"),
            ("03_zero", 4, "--global-batch 4 --hybrid-shard 3", "--hybrid-shard"),
            ("03_zero", 2, "--hybrid-shard 4", "--hybrid-shard"),
            ("03_zero", 2, "--zero 0 --hybrid-shard 2", "--hybrid-shard"),
            ("03_zero", 2, "--zero 0 --offload all", "--offload"),
            ("03_zero", 2, "--zero 1 --offload all", "--offload"),
            ("03_zero", 2, "--zero 2 --prefetch 2", "--prefetch"),
            ("03_zero", 2, "--zero 0 --prefetch 0", "--prefetch"),
            ("04_tensor_parallel", 4, "--tp 3", "--tp 3"), ("04_tensor_parallel", 3, "", "--tp 3"),
            ("04_tensor_parallel", 8, "--tp 8", "--tp 8"), ("04_tensor_parallel", 4, "--dp 3", "--dp 3"),
            ("04_tensor_parallel", 4, "--tp 2 --dp 4", "--dp 4"),
            ("04_tensor_parallel", 4, "--tp 4 --sequence-parallel on --seq-len 18", "--seq-len"),
            ("04_tensor_parallel", 2, "--ffn 49", "--ffn"), ("04_tensor_parallel", 6,
                "--heads 6 --kv-heads 2 --hidden 36 --tp 3", "--kv-heads"),
            ("04_tensor_parallel", 2, "--tp 1000000000", "--tp"),
            ("04_tensor_parallel", 2, "--links l.json", "--links"),
            ("04_tensor_parallel", 2, "--efficiency-csv e.csv", "--efficiency-csv"),
            ("05_pipeline", 3, "--pp 3", "--pp 3"), ("05_pipeline", 3, "--layers 4", "--layers"),
            ("05_pipeline", 4, "--pp 3", "--pp 3"), ("05_pipeline", 4, "--dp 3", "--dp 3"),
            ("05_pipeline", 2, "--stage-layers 1,,1", "--stage-layers"),
            ("05_pipeline", 2, "--stage-layers 2", "--stage-layers"),
            ("05_pipeline", 2, "--stage-layers 2,0", "--stage-layers"),
            ("05_pipeline", 2, "--stage-layers 2,2", "--stage-layers"),
            ("05_pipeline", 2, "--virtual-stages 2", "--virtual-stages"),
            ("05_pipeline", 2, "--pipeline interleaved --virtual-stages 1000000000", "--virtual-stages"),
            ("05_pipeline", 2, "--pipeline interleaved --virtual-stages 3", "--virtual-stages"),
            ("05_pipeline", 2, "--pp 1 --pipeline interleaved", "--pipeline"),
            ("05_pipeline", 2, "--pipeline interleaved --layers 4 --global-batch 3", "--pipeline"),
            ("05_pipeline", 2, "--pp 1000000000", "--pp"), ("05_pipeline", 2, "--global-batch 1000000000",
                "--global-batch"),
            ("05_pipeline", 2, "--draw p.png", "--draw"), ("05_pipeline", 2, "--pipeline-trace p.json",
                "--pipeline-trace"),
            ("05_pipeline", 2, "--draw p.png --tables on", "--draw"),
            ("05_pipeline", 4, "--toy-deadlock on", "--toy-deadlock"),
            ("06_context_parallel", 3, "--cp 3", "--cp 3"), ("06_context_parallel", 4, "--cp 3", "--cp 3"),
            ("06_context_parallel", 4, "--dp 3", "--dp 3"), ("06_context_parallel", 2, "--seq-len 18 --cp 2",
                "--seq-len"),
            ("06_context_parallel", 8, "--cp-algorithm ulysses", "--cp"),
            ("06_context_parallel", 4, "--cp-algorithm hybrid --ulysses-size 3", "--ulysses-size"),
            ("06_context_parallel", 4, "--ulysses-size 2", "--ulysses-size"),
            ("06_context_parallel", 4, "--cp-algorithm hybrid --ulysses-size 1000000000", "--ulysses-size"),
            ("06_context_parallel", 2, "--cp 1000000000", "--cp"),
            ("07_fp8", 2, "--fp8 current --dtype fp64", "--fp8"),
            ("07_fp8", 2, "--optimizer adamw8bit --dtype fp64 --fp8 off", "--optimizer"),
            ("07_fp8", 2, "--fp8-strict on --ffn 50", "--fp8-strict"),
            ("07_fp8", 4, "--tp 3", "--tp 3"),
            ("07_fp8", 2, "--fp8-margin 010", "--fp8-margin"), ("07_fp8", 2, "--fp8-margin 17", "--fp8-margin"),
            ("07_fp8", 2, "--fp8-history 1000000000 --fp8 delayed", "--fp8-history"),
            ("08_3d_full", 4, "--pp 3", "--pp 3"), ("08_3d_full", 4, "--tp 2 --dp 4", "--dp"),
            ("08_3d_full", 4, "--tp 3", "--tp"), ("08_3d_full", 4, "--cp 3", "--cp"),
            ("08_3d_full", 8, "--tp 2 --cp 4 --cp-algorithm ulysses", "--cp"),
            ("08_3d_full", 8, "--tp 4 --cp 2 --sequence-parallel on --seq-len 20", "--seq-len"),
            ("08_3d_full", 2, "--tp 2 --tp-overlap on --fp8 current", "--tp-overlap"),
            ("08_3d_full", 2, "--pipeline interleaved", "--pipeline"), ("08_3d_full", 2, "--probe on", "--probe"),
            ("08_3d_full", 2, "--probe-file p.json", "--probe-file"),
            ("08_3d_full", 2, "--offload optimizer", "--offload"), ("08_3d_full", 2, "--save-hf d", "--save-hf"),
            ("08_3d_full", 1000000, "--tp 1000000 --dry-run", "--tp"),
            ("08_3d_full", 2, "--dry-run --eval-every 1 --val-fraction 0", "--eval-every"),
            ("08_3d_full", 2, "--dry-run --layers 1000000000 --pp 2 --dp 1", "--layers")):
        add("layouts", f"{program} of {world}: {flags}", program, fake + [str(world)] + flags.split(), expected)
    for program, flags, expected in (
            ("02_data_parallel", "--dp 3", "--dp 3"), ("02_data_parallel", "--global-batch 3", "--global-batch"),
            ("02_data_parallel", "--comm fake --fake-world 4", "--comm fake"),
            ("02_data_parallel", "--comm nccl --device cpu", "--comm nccl"),
            ("03_zero", "--hybrid-shard 3", "--hybrid-shard"), ("03_zero", "--trace nowhere/t.json", "--trace"),
            ("03_zero", "--zero 3 --prefetch 1000000000 --metrics nowhere/m", "--metrics"),
            ("04_tensor_parallel", "--tp 3", "--tp 3"), ("04_tensor_parallel", "--dp 3", "--dp 3"),
            ("05_pipeline", "--pp 3", "--pp 3"), ("05_pipeline", "--stage-layers 2,2", "--stage-layers"),
            ("05_pipeline", "--draw d/p.png --tables on", "--draw"),
            ("06_context_parallel", "--cp 3", "--cp 3"), ("07_fp8", "--tp 3", "--tp 3"),
            ("08_3d_full", "--tp 3", "--tp"), ("08_3d_full", "--dry-run", "--dry-run"),
            ("08_3d_full", "--pp 2 --metrics nowhere/m", "--metrics"), ("08_3d_full", "--data nowhere", "--data"),
            ("08_3d_full", "--save-hf text.txt", "--save-hf"), ("08_3d_full", "--load-hf nowhere", "--load-hf"),
            ("08_3d_full", "--inject nan:0:1:", "--inject"), ("08_3d_full", "--inject nan:0:1:model.x", "--inject"),
            ("08_3d_full", "--inject nan:0:1:lm_head.weight:1", "--inject"),
            ("08_3d_full", "--inject kill:0:1:lm_head.weight", "--inject"),
            ("08_3d_full", "--inject deadlock:0:1", "--inject"), ("08_3d_full", "--inject wrong-sum:2:1", "--inject"),
            ("08_3d_full", "--model 405b", "--model")):
        add("layouts", f"{program}: {flags}", program, flags.split(), expected, ranks=2,
            without=SHAPE if "--model" in flags else ())


def schedule_cases(add):
    """Pipeline schedules in files: of the program schedule, and of programs that train."""
    good = "F0 F1 B0 B1\nF0 B0 F1 B1\n"

    def bad(name, text, expected, flag="--file", program="schedule", ranks=1, more=()):
        content = text if isinstance(text, bytes) else text.encode()
        path = "my.txt" if flag == "--file" else "file:my.txt"
        add("schedules", f"{program}: {name}", program, [flag, path, *more], ["my.txt", expected],
            after(lambda folder: (folder / "my.txt").write_bytes(content)), ranks=ranks)

    typos = [("small letter", good.replace("B0", "b0", 1), 'line 1, word 3 "b0"'),
             ("another letter", good + "F0 G0\n", 'line 3, word 2 "G0"'),
             ("no number", good.replace("F1 B1", "F B1"), 'line 2, word 3 "F"'),
             ("negative", good.replace("F1 B1", "F-1 B1"), 'line 2, word 3 "F-1"'),
             ("a comma", good.replace("F0 ", "F0, ", 1), 'line 1, word 1 "F0,"'),
             ("chunk of nothing", good.replace("F0 ", "F0. ", 1), 'line 1, word 1 "F0."'),
             ("beyond int64", good.replace("F0 ", "F99999999999999999999 ", 1), "line 1, word 1"),
             ("a large micro-batch", good.replace("F1 ", "F999999999 ", 1), "line 1, word 2"),
             ("a large chunk", good.replace("F1 ", "F1.999999999 ", 1), "line 1, word 2"),
             ("bytes", b"\xff\xfe\0F0 B0\n", "line 1, word 1"), ("escapes", b"\x1b[31mF0 B0\n", "line 1, word 1"),
             ("nothing", "", "has no line of steps"), ("a comment", "# F0 B0\n", "has no line of steps"),
             ("a placement of none", "placement: w\n" + good, "line 1, word 2"),
             ("a V of one chunk", "placement: v\n" + good, "line 1, word 2"),
             ("stages twice", "stages: 0 / 0\n" + good, "line 1, word 4"),
             ("a stage too many", "stages: 0 / 1 / 2\n" + good, "line 1, word 6"),
             ("many chunks and ranks", "F0.3999 B0 " * 2000 + "\n" + "F0 B0\n" * 3000, "fewer steps"),
             ("a long word", "F" * 100000 + "\n", "line 1, word 1")]
    for name, text, expected in typos:
        bad(name, text, expected)
    for name, text, expected in typos[::3] + [("half of it", "F0 F1 B0 B1\nF0 B0 F1\n", "micro-batch 1"),
                                              ("a deadlock", "F0 B0 F1 B1\nF0 F1 B0 B1\n", "rank 0 at B0")]:
        for program in ("05_pipeline", "08_3d_full"):
            bad(name, text, expected, "--pipeline", program, 1,
                ["--comm", "fake", "--fake-world", "2", *(["--pp", "2"] if program == "08_3d_full" else [])])
    fake = "--pp 2 --comm fake --fake-world 2"
    for program, flags, expected in (
            ("08_3d_full", f"{fake} --pipeline file:my.txt --global-batch 4", "my.txt"),
            ("08_3d_full", f"{fake} --pipeline file:my.txt --virtual-stages 2", "--virtual-stages"),
            ("08_3d_full", "--pp 1 --pipeline file:my.txt", "my.txt"),
            ("08_3d_full", f"{fake} --pipeline file:my.txt --batch-ramp 1:2:5", "--batch-ramp"),
            ("08_3d_full", f"{fake} --pipeline file:my.txt --dry-run --global-batch 3", "my.txt"),
            ("08_3d_full", f"{fake} --pipeline dualpipe-v --layers 4 --global-batch 3", "dualpipe-v"),
            ("08_3d_full", f"{fake} --pipeline zb-v", "--layers"),
            ("08_3d_full", f"{fake} --pipeline zb-v --layers 4 --virtual-stages 4", "--virtual-stages"),
            ("05_pipeline", f"{fake} --pipeline file:", "--pipeline"),
            ("05_pipeline", f"{fake} --pipeline file:folder", "file:folder"),
            ("05_pipeline", f"{fake} --pipeline file:fifo", "file:fifo"),
            ("05_pipeline", f"{fake} --pipeline file:loop", "file:loop"),
            ("05_pipeline", f"{fake} --pipeline FILE:my.txt", "--pipeline"),
            ("schedule", "--file", "--file"), ("schedule", "--file nowhere", "--file nowhere"),
            ("schedule", "--file folder", "--file folder"), ("schedule", "--file fifo", "--file fifo"),
            ("schedule", "--file loop", "--file loop"), ("schedule", "--file /dev/zero", "--file /dev/zero"),
            ("schedule", "--file my.txt --name 1f1b", "--name"), ("schedule", "--name 2f2b", "--name"),
            ("schedule", "--name dualpipe-v --micro-batches 7", "--micro-batches"),
            ("schedule", "--name interleaved --micro-batches 7", "--micro-batches"),
            ("schedule", "--name zb-v --stages 1", "zb-v"), ("schedule", "--name 1f1b --virtual-stages 2", "--virtual-stages"),
            ("schedule", "--name interleaved --virtual-stages 4096 --stages 512 --micro-batches 4096", "micro-batches"),
            ("schedule", "--stages 512 --micro-batches 1000", "--micro-batches 1000"),
            ("schedule", "--name interleaved --virtual-stages 0", "--virtual-stages"),
            ("schedule", "--virtual-stages 2", "--virtual-stages"), ("schedule", "--steps 2", "--steps"),
            ("schedule", "--name 1f1b --steps 0", "--steps"), ("schedule", "--name 1f1b --steps 1001", "--steps"),
            ("schedule", "--stages 0", "--stages"), ("schedule", "--stages 1000000000", "--stages"),
            ("schedule", "--micro-batches 0", "--micro-batches"), ("schedule", "--micro-batches 1.5", "--micro-batches"),
            ("schedule", "--costs 1", "--costs"), ("schedule", "--costs 1,1", "--costs"),
            ("schedule", "--costs 1,1,1,1", "--costs"), ("schedule", "--costs 1,,1", "--costs"),
            ("schedule", "--costs 1,-1,1", "--costs"), ("schedule", "--costs nan,1,1", "--costs"),
            ("schedule", "--costs inf,1,1", "--costs"), ("schedule", "--costs 0,0,0", "--costs"),
            ("schedule", "--costs x", "--costs"), ("schedule", "--hop -1", "--hop"), ("schedule", "--hop nan", "--hop"),
            ("schedule", "--slow-rank 1", "--slow-rank"), ("schedule", "--slow-rank 1=", "--slow-rank"),
            ("schedule", "--slow-rank =2", "--slow-rank"), ("schedule", "--slow-rank 1=0", "--slow-rank"),
            ("schedule", "--slow-rank 1=nan", "--slow-rank"), ("schedule", "--slow-rank 4=2", "--slow-rank"),
            ("schedule", "--slow-rank 1=2,", "--slow-rank"), ("schedule", "--slow-rank 1=2,1=3", "--slow-rank"),
            ("schedule", "--slow-rank -1=2", "--slow-rank"),
            ("schedule", "--csv a.csv", "--csv"), ("schedule", "--name 1f1b --csv nowhere/a.csv", "--csv"),
            ("schedule", "--name 1f1b --csv folder", "--csv"), ("schedule", "--name 1f1b --csv fifo", "--csv"),
            ("schedule", "--name 1f1b --csv a --spans-csv a", "--spans-csv"),
            ("schedule", "--file my.txt --write my.txt", "--write"),
            ("schedule", "--file my.txt --stages 3", "--stages"),
            ("schedule", "--file my.txt --micro-batches 3", "--micro-batches"),
            ("schedule", "--file my.txt --virtual-stages 2", "--virtual-stages"),
            ("schedule", "--name 1f1b --draw nowhere/a.png", "--draw"), ("schedule", "--stagez 4", "--stagez"),
            ("schedule", "1f1b", "1f1b")):
        add("schedules", f"{program} {flags}", program, flags.split(), expected,
            after(odd_files, lambda folder: (folder / "my.txt").write_text(good)))
    add("schedules", "two ranks, a typo", "05_pipeline", ["--pipeline", "file:my.txt"], 'line 2, word 1 "x"',
        after(lambda folder: (folder / "my.txt").write_text("F0 B0\nx\n")), ranks=2)


def plan_cases(add, binaries):
    """The planner: every flag with values that are none, sizes that do not divide, and models that do not fit."""
    cluster = {"name": "a node", "device": "H100", "nodes": 1, "gpus_per_node": 8,
               "nvlink": {"name": "NVLink", "bytes_per_s": 3.6e11, "seconds": 1e-6},
               "host": {"name": "PCIe", "bytes_per_s": 5e10, "seconds": 1e-5}}
    small = ["--cluster", "my.json", "--model", "125m", "--gpus", "8", "--seq-len", "512", "--global-batch", "16",
             "--simulations", "1"]

    def bad(given, expected, without=(), **fields):
        """The small plan, with the flags of `given` instead of its own."""
        taken, words = {word for word in given if str(word).startswith("--")} | set(without), []
        for flag, value in zip(small[::2], small[1::2]):
            words += [] if flag in taken else [flag, value]
        name = " ".join(str(word) for word in given) or "without " + " ".join(without)
        add("plans", name[:100], "plan", words + list(given), expected,
            after(odd_files, lambda folder: (folder / "my.json").write_text(json.dumps(cluster))), **fields)

    numbers = {"INT": INTEGERS, "INT,...": [value for value in INTEGERS if value != "1,2"], "NUMBER": NUMBERS}
    for flag, kind in flags_of(binaries, "plan").items():
        if kind in numbers:
            for value in numbers[kind]:
                bad([flag, value], flag)
        elif "|" in kind or kind.endswith(",..."):
            for value in ("x", "", "ON", "1f1b,"):
                bad([flag, value], flag)
    for given, expected in (
            ("--cluster", "--cluster"), ("--cluster nowhere.json", "--cluster nowhere.json"),
            ("--cluster folder", "--cluster folder"), ("--cluster fifo", "--cluster fifo"),
            ("--cluster /dev/zero", "--cluster /dev/zero"), ("--json nowhere/a.json", "--json"),
            ("--json folder", "--json"), ("--csv fifo", "--csv"), ("--csv a --json a", ["--csv", "--json"]),
            ("--json my.json", ["--json", "--cluster"]), ("--csv my.json", ["--csv", "--cluster"]),
            ("--gpus 16", "--gpus 16"), ("--gpus 131073", "--gpus"),
            ("--tp 3", ["--tp 3", "--gpus 8"]), ("--tp 2,3", ["--tp 3", "--gpus 8"]), ("--pp 5", "--pp 5"),
            ("--dp 16", "--dp 16"), ("--tp 2 --pp 2 --cp 2 --dp 2", "no layout"),
            ("--heads 6 --hidden 768 --kv-heads 6 --tp 4", ["tp 4", "--heads 6"]),
            ("--micro-batch 3", "--micro-batch"), ("--pipeline interleaved --pp 1", "no layout"),
            ("--zero 4", "--zero"), ("--recompute some", "--recompute"), ("--pipeline 2f2b", "--pipeline"),
            ("--pipeline file:my.txt", "--pipeline"), ("--fp8 current --tp-overlap on", ["--tp-overlap", "--fp8"]),
            ("--hybrid-shard 3", "no layout"), ("--cluster " + 500 * "x", ["--cluster x", "File name too long"]),
            ("--model 70b", ["--model 70b", "fits in no layout", "GB", "--gpus"]),
            ("--vocab 1000000000", ["--vocab 1000000000", "fits in no layout"]),
            ("--seq-len 1000000000", ["--seq-len 1000000000", "fits in no layout"]),
            ("--model 7b --reserve-gb 79", ["--reserve-gb 79", "fits in no layout", "GB"]),
            ("--reserve-gb 86", "--reserve-gb"),
            ("--ep 4", ["--ep 4", "--experts"]), ("--experts 8 --fp8 current", ["--fp8", "--experts"]),
            ("--experts 8 --ep 3", ["ep 3", "--experts 8"]), ("--experts 8 --ep 16", "no layout"),
            ("--experts 8 --tp 2 --sequence-parallel off", ["no layout", "--sequence-parallel"]),
            ("--gpuz 8", "--gpuz"), ("125m", "125m"), ("--load-hf folder", "--load-hf")):
        bad(given.split(), expected)
    for without in (["--cluster"], ["--global-batch"]):
        bad([], without, without)
    for name, change, expected in (("no device", {"device": None}, "device"), ("a device of another kind", {"device": 8}, "device"),
                                   ("an unknown device", {"device": "Z9"}, "Z9"), ("no nodes", {"nodes": 0}, "nodes")):
        content = {**cluster, **change}
        add("plans", f"a cluster with {name}", "plan", small, ["--cluster", expected],
            after(lambda folder, content=content: (folder / "my.json").write_text(json.dumps(content))))
    flat = {**cluster, "device": "A100"}
    add("plans", "FP8 on a device without", "plan", [*small, "--fp8", "current"], ["--fp8 current", "A100"],
        after(lambda folder: (folder / "my.json").write_text(json.dumps(flat))))
