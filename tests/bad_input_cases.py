"""The cases of bad_input.py, most of them generated: from the flags that each --help lists, from a good Hugging Face
folder, good shards and a good reference run with one thing wrong."""
import copy
import dataclasses
import json
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time

FIRST = "01_single_gpu"
PROGRAMS = [FIRST, "02_data_parallel", "03_zero", "04_tensor_parallel", "05_pipeline", "06_context_parallel", "07_fp8",
            "08_3d_full"]
# A small model: a bad input that is accepted by mistake soon ends. Flags of a case replace the same flags here.
SHAPE = {"--layers": "2", "--hidden": "32", "--heads": "4", "--kv-heads": "2", "--ffn": "48"}
RUN = {"--data": "text.txt", "--seq-len": "16", "--global-batch": "2", "--steps": "1", "--metrics": "m.jsonl",
       "--trace": "t.json", "--tables": "off", "--val-fraction": "0"}
TEXT = "".join(f"line {i} of a text\n" for i in range(100))
GENTLE = 40  # seconds, where more than one process starts


def words_of(program, given, without=()):
    """The arguments: the small model's flags that `given` has not, then `given`."""
    if program in ("compare", "schedule", "plan"):
        return list(given)
    defaults = dict(RUN) if "--load-hf" in given else {**SHAPE, **RUN}
    if program in (FIRST, "08_3d_full"):
        del defaults["--tables"]
    taken = {word.split("=")[0] for word in given if isinstance(word, str)} | set(without)
    return [word for flag, value in defaults.items() if flag not in taken for word in (flag, value)] + list(given)


def write_text(folder):
    (folder / "text.txt").write_text(TEXT)


def after(*steps):
    """A setup: the text, then each step."""
    def setup(folder):
        write_text(folder)
        for step in steps:
            step(folder)
    return setup


def flags_of(binaries, program):
    """{flag: type} of --help; "" for a switch without a value."""
    text = subprocess.run([os.path.join(binaries, program), "--help"], capture_output=True, text=True,
                          check=True).stdout
    return {flag: kind or "" for flag, kind in re.findall(r"^  (--[a-z0-9-]+)(?: (\S+))?(?: |$)", text, re.M)
            if flag != "--help"}


# ---- flags ---------------------------------------------------------------------------------------------------------
INTEGERS = ["x", "1.5", "-1", "-2147483649", "", " ", " 1", "1 ", "010", "0x10", "1e3", "1,2", "nan",
    "99999999999999999999",
            "1000000000000000001", str(2**57), str(2**63 - 1), str(2**64 + 1), "1" * 3000]
NUMBERS = ["x", "", " ", "nan", "-nan", "inf", "-inf", "infinity", "1e999", "-1", "1,5", "1e-3x", "0x", "0x1p-3",
    " 1e-3", "1e-3 ", "1 2", "9" * 3000]
PATHS = ["", "nowhere/file", "folder", "fifo", "loop", "text.txt/file", "n" * 300, "a\nb/file", "a\x1b[31m/file"]


def odd_files(folder):
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop2")
    (folder / "loop2").symlink_to("loop")


def shown(value):
    text = value if isinstance(value, str) else repr(value)
    return ascii(text if len(text) < 30 else text[:27] + "...")


def flag_cases(add, binaries):
    seen = set()
    for program in PROGRAMS + ["compare"]:
        for flag, kind in flags_of(binaries, program).items():
            of_a_path = kind.startswith("FILE") or kind in ("DIR", "PATH")
            first_time = flag not in seen
            seen.add(flag)
            values = []
            if kind.startswith("INT"):
                values = INTEGERS if flag != "--seed" else [v for v in INTEGERS if not v.isdigit() or int(v) >= 2**63
                                                            or v.startswith("0")]
                if kind == "INT,...":  # a list
                    values = [v for v in values if v != "1,2"] + ["1,,1", ",1", "1,", "1,x", ",".join(["1"] * 3000)]
            elif kind == "NUMBER":
                values = NUMBERS
            elif "|" in kind:
                word = kind.split("|")[0]
                values = ["bogus", "", word.upper() + "_", word + " ", word + "," + word, "\x1b[31m", "b" * 3000]
            elif of_a_path:
                values = PATHS + (["text.txt"] if kind == "DIR" else [])
                if kind == "DIR":
                    values = [value for value in values if value not in ("folder", "nowhere/file")]
                if flag in ("--save-hf", "--save-reference", "--checkpoint-dir"):
                    values = [value for value in values if not value.startswith("a")]
                if kind == "DIR" and flag == "--load-hf":
                    values = values + ["folder", "nowhere/file"]
            group = f"flags of {program[:2] if program != 'compare' else program}"
            if program not in (FIRST, "compare") and not of_a_path:  # the same checks: some of the values
                values = values[(len(flag) % 3)::3]
            if not first_time:  # the same code: once more only, by a value that differs with the program and flag
                values = values[(len(flag) + PROGRAMS.index(program)) % len(values):][:1] if values else []
            extra = ["a", "b"] if program == "compare" else ["--comm", "fake", "--fake-world", "2"] \
                if program != FIRST and not flag.startswith(("--comm", "--fake")) else []
            if flag in TABLE_FILES:
                extra = extra + ["--tables", "on"]
            without = ("--metrics", "--trace") if flag.startswith("--bench") else ()
            for value in values:
                add(group, f"{flag} {shown(value)}", program, extra + [flag, value],
                    "folder" if (flag, value) == ("--load-hf", "folder") else flag, after(odd_files), without)
            if not first_time:
                continue
            if kind:
                add(group, f"{flag} without its value", program, extra + [flag], flag, write_text)
                add(group, f"{flag}= without its value", program, extra + [flag + "=", "--steps", "1"]
                    if flag != "--steps" and program != "compare" else extra + [flag + "="], flag, write_text)
                good = {"INT": "1", "NUMBER": "0.5"}.get(kind, kind.split("|")[0] if "|" in kind else "1")
                if flag == "--stage-layers":
                    good = "1,1"
                add(group, f"{flag} given twice", program, extra + [flag, good, flag, good], flag, after(odd_files))
            else:
                add(group, f"{flag}=x", program, extra + [flag + "=x"], flag, write_text)
        for unknown in ("--stepz", "--", "stray", "-x", "--steps\n", "\x1b[31m", "--" + "x" * 3000, "é"):
            add("unknown words", f"{shown(unknown)}", program,
                (["a", "b"] if program == "compare" else []) + [unknown],
                [], write_text)


TABLE_FILES = ("--all-reduce-csv", "--modes-csv", "--efficiency-csv", "--links", "--draw", "--pipeline-trace",
               "--compare-csv")


def size_cases(add):
    """Each flag's value is allowed, the model or the batch is impossible here."""
    for flags, expected in (
            ("--layers 1000000000", "--layers"), ("--ffn 1000000000", "--ffn"), ("--vocab 1000000000", "--vocab"),
            ("--hidden 1000000000", "--hidden"), ("--hidden 1000000000 --heads 500000000", "--hidden"),
            ("--heads 1000000000", "--heads"), ("--kv-heads 1000000000", "--kv-heads"),
            ("--hidden 33", "--hidden"), ("--hidden 36 --heads 4", "--heads"), ("--hidden 2048", "--heads"),
            ("--heads 5", "--heads"), ("--heads 4 --kv-heads 3", "--kv-heads"),
            ("--head-dim 5", "--head-dim"), ("--head-dim 258", "--head-dim"), ("--head-dim 1000000000", "--head-dim"),
            ("--heads 1000000000 --head-dim 256", "--heads"), ("--qkv-bias on --qk-norm on", "--qkv-bias"),
            ("--model qwen2.5-7b --qk-norm on", "--qk-norm"), ("--model qwen3-8b --head-dim 7", "--head-dim"),
            ("--seq-len 1000000000", "--seq-len"), ("--seq-len 1900", "--seq-len"),
            ("--global-batch 1000000000 --hidden 128", "--global-batch 1000000000"),
            ("--micro-batch 1000000000 --global-batch 1000000000 --hidden 128", "--micro-batch"),
            ("--micro-batch 3", "--micro-batch"), ("--micro-batch 1000000000", "--micro-batch"),
            ("--vocab 64", "--vocab"), ("--vocab 1", "--vocab"),
            ("--min-lr 1 --lr 0.5", "--min-lr"), ("--lr 0 --min-lr 1e-300", "--min-lr"),
            ("--document-token 256", "--document-token"), ("--vocab 128 --document-token 128", "--document-token"),
            ("--document-token 1000000000", "--document-token"),
            ("--eval-every 1", "--eval-every"), ("--eval-every 1 --val-fraction 0.000001", "--eval-every"),
            ("--dtype fp64 --grad-dtype bf16", "--grad-dtype"), ("--grad-dtype bf16", "--grad-dtype"),
            ("--grad-dtype fp64", "--grad-dtype"), ("--dtype fp64 --device cuda", "--dtype"),
            ("--dtype bf16 --grad-dtype fp64", "--grad-dtype"),
            ("--save-reference d --steps 0", "--save-reference")):
        add("sizes", flags, FIRST, flags.split(), expected)
    for model in ("30b", "70b", "175b", "405b"):
        for program in (FIRST, "03_zero", "08_3d_full"):
            add("sizes", f"--model {model}", program, ["--model", model, "--data", "text.txt"], f"--model {model}",
                without=SHAPE)
    for flag, size in (("--batch-ramp", "--global-batch 16"), ("--seq-ramp", "--seq-len 16")):
        for value in ("", "x", "4", "4:16", "4:16:", ":16:4", "4:16:0", "4:16:5:1", "4:16:1.5", "-4:16:5", "0:16:5", "16:4:5",
                "4:16:1000001", "4:16:99999999999999999999", "4:8:5", "4:32:5", "4 :16:5", "04:16:5", "nan:16:5"):
            add("sizes", f"{flag} {shown(value)}", "08_3d_full", [flag, value] + size.split(), flag)
    for flags, expected in (
            ("--seq-ramp 3:16:5", "--seq-ramp"), ("--batch-ramp 3:16:5 --global-batch 16 --micro-batch 2", "--batch-ramp"),
            ("--batch-ramp 4:16:5 --global-batch 16 --save-reference d", "--save-reference"),
            ("--prompt text --data shard.bin", "--prompt"), ("--comm fake --fake-world 2 --sample-every 1", "--sample-every")):
        add("sizes", flags, "08_3d_full", flags.split(), expected,
            after(lambda folder: (folder / "shard.bin").write_bytes(shard())))
    add("sizes", "--bench --save-hf", FIRST, ["--bench", "--save-hf", "d"], "--save-hf",
        without=("--metrics", "--trace"))
    add("sizes", "--bench --save-reference", FIRST, ["--bench", "--save-reference", "d"], "--save-reference",
        without=("--metrics", "--trace"))
    add("sizes", "--bench --generate", FIRST, ["--bench", "--generate", "1"], "--generate",
        without=("--metrics", "--trace"))
    add("sizes", "--bench-side without --bench", FIRST, ["--bench-side", "10"], "--bench-side",
        without=("--metrics", "--trace"))
    add("sizes", "--bench-side beyond memory", FIRST, ["--bench", "--bench-side", "1000000"], "--bench-side",
        without=("--metrics", "--trace"))


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
            ("07_fp8", 2, "--compare-csv c.csv", "--compare"),
            ("07_fp8", 2, "--compare 10 --dtype fp64 --fp8 off", "--compare"), ("07_fp8", 4, "--tp 3", "--tp 3"),
            ("07_fp8", 2, "--compare 10", "--compare"),
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


# ---- data and token shards -----------------------------------------------------------------------------------------
MAGIC16, MAGIC32, MASK = 20240520, 20240801, 20261122


def shard(magic=MAGIC16, version=1, count=200, tokens=None, width=2, header=1024):
    tokens = [i % 256 for i in range(200)] if tokens is None else tokens
    head = struct.pack("<3i", magic, version, count).ljust(header, b"\0")[:header]
    return head + b"".join(struct.pack("<H" if width == 2 else "<I", token) for token in tokens)


def mask(bytes_, magic=MASK, version=1):
    return struct.pack("<3i", magic, version, len(bytes_)).ljust(1024, b"\0") + bytes(bytes_)


def data_cases(add):
    def file(name, content, **more):
        add("data", f"{name}", FIRST, ["--data", name], [name] if name.isprintable() and name.isascii() else "--data",
            after(lambda folder: (folder / name).write_bytes(content)), **more)

    good = shard()
    for length in (0, 1, 4, 11, 12, 1000, 1023, 1024, 1025, len(good) - 1, len(good) + 1, len(good) + 2):
        file(f"cut_{length}.bin", (good + b"\0\0")[:length])
    for magic in (0, -1, MAGIC16 + 1, MAGIC32 + 1, 0x20240520,
            int.from_bytes(struct.pack(">i", MAGIC16), "little", signed=True)):
        file(f"magic_{magic}.bin", shard(magic))
    for version in (0, 2, 7, 99, -1, 2**31 - 1):
        file(f"version_{version}.bin", shard(version=version))
    for count in (-1, 0, 1, 16, 199, 201, 2**31 - 1, -2**31):
        file(f"count_{count}.bin", shard(count=count))
    file("version_of_32.bin", shard(MAGIC32, 1, 200, width=4))
    file("wide_as_narrow.bin", shard(MAGIC16, 1, 200, width=4))
    file("narrow_as_wide.bin", shard(MAGIC32, 7, 200))
    for at, token in ((0, 256), (100, 65535), (199, 300)):
        file(f"token_{at}_{token}.bin", shard(tokens=[token if i == at else 1 for i in range(200)]))
    for at, token in ((0, 256), (199, 2**32 - 1), (5, 2**31)):
        file(f"wide_token_{at}_{token}.bin", shard(MAGIC32, 7, tokens=[token if i == at else 1 for i in range(200)],
            width=4))
    file("empty.txt", b"")
    file("short.txt", b"only")
    file("one.txt", b"1")
    file("sixteen.txt", b"x" * 16)
    file("text.bin", TEXT.encode())
    file("zeros.bin", b"\0" * 4096)
    file("words.txt\n", b"few")
    file("\x1b[31mred.txt", b"few")
    file("é.txt", b"few")

    def folder_of(name, *files):
        def setup(folder):
            (folder / name).mkdir()
            for file_name, content in files:
                (folder / name / file_name).write_bytes(content)
        return setup
    for name, files, expected in (
            ("no_files", [], "no_files"), ("hidden_only", [(".hidden", b"text" * 100)], "hidden_only"),
            ("one_bad_shard", [("a.bin", good), ("b.bin", good[:-1])], "b.bin"),
            ("one_other_shard", [("a.bin", good), ("b.bin", shard(7))], "b.bin"),
            ("empty_files", [("a.txt", b""), ("b.txt", b"")], "empty_files"),
            ("latin", [(b"\xe9.bin".decode(errors="surrogateescape"), good[:-1])], "--data")):
        add("data", f"folder {name}", FIRST, ["--data", name], expected, after(folder_of(name, *files)))
    for name, step in (("fifo", lambda f: os.mkfifo(f / "fifo")), ("loop", lambda f: (f / "loop").symlink_to("loop")),
                       ("dangling", lambda f: (f / "dangling").symlink_to("nowhere"))):
        add("data", name, FIRST, ["--data", name], ["--data", name], after(step))
        add("data", name + ".bin", FIRST, ["--data", name + ".bin"], ["--data", name + ".bin"],
            after(step, lambda f, name=name: (f / name).rename(f / (name + ".bin"))))
        add("data", f"{name} in a folder", FIRST, ["--data", "folder"], ["--data", "folder"],
            after(lambda f: (f / "folder").mkdir(), step, lambda f, name=name: (f / name).rename(f / "folder" / name)))
    for name, make, expected in (
            ("a text that leads nowhere", lambda f: (f / "b").symlink_to("nowhere"), "folder/b"),
            ("a text that is a loop", lambda f: (f / "b").symlink_to("b"), "folder/b"),
            ("a text that is a FIFO", lambda f: os.mkfifo(f / "b"), "folder/b"),
            ("a link to a folder", lambda f: (f / "b").symlink_to("/proc/self/task"), ["folder/b", "a link to a folder"]),
            ("a shard that leads nowhere", lambda f: (f / "b.bin").symlink_to("nowhere"), "folder/b.bin"),
            ("a mask that leads nowhere", lambda f: (f / "a.mask.bin").symlink_to("nowhere"), "folder/a.mask.bin"),
            ("a mask that is a folder", lambda f: (f / "a.mask.bin").mkdir(), "folder/a.mask.bin"),
            ("a mask that is a FIFO", lambda f: os.mkfifo(f / "a.mask.bin"), "folder/a.mask.bin")):
        first = ("a.bin", good) if "shard" in name or "mask" in name else ("a.txt", TEXT.encode())
        setup = after(folder_of("folder", first), lambda folder, make=make: make(folder / "folder"))
        add("data", f"a folder with {name}", FIRST, ["--data", "folder"], expected, setup)
        if "mask" in name:
            add("masks", name, FIRST, ["--data", "folder/a.bin"], expected, setup)
    for path in ("/dev/null", "/dev/zero", "/dev/stdin", "/proc/1/task", "/proc/self/mem", "/proc/self/fd",
            "/sys/kernel/mm",
                 "/", "/proc/self/task"):
        if path != "/":
            add("data", path, FIRST, ["--data", path], ["--data", path])
    add("data", "a Latin-1 name that is not there", FIRST, ["--data", b"caf\xe9.txt"], "--data")
    add("data", "a sequence as long as a sparse file", FIRST,
        ["--data", "sparse.txt", "--seq-len", "100000000", "--vocab", "256"],
        "--seq-len", after(lambda f: os.truncate(f / "text.txt", 0), lambda f: os.mknod(f / "sparse.txt"),
                           lambda f: os.truncate(f / "sparse.txt", 1 << 28)), limit=GENTLE)
    def masked(name, content):
        add("masks", name, FIRST, ["--data", "a.bin"], ["--data a.mask.bin"],
            after(lambda folder: (folder / "a.bin").write_bytes(good),
                  lambda folder: (folder / "a.mask.bin").write_bytes(content)))

    ones = mask([1] * 200)
    for length in (0, 1000, 1024, len(ones) - 1, len(ones) + 1):
        masked(f"cut to {length}", (ones + b"\1")[:length])
    for count in (199, 201, 0):
        masked(f"of {count} tokens", mask([1] * count))
    for magic, version in ((MAGIC16, 1), (MAGIC32, 7), (MASK, 2), (0, 1)):
        masked(f"magic number {magic}, version {version}", mask([1] * 200, magic, version))
    for at, byte in ((0, 2), (199, 255)):
        masked(f"{byte} at {at}", mask([byte if i == at else 1 for i in range(200)]))
    add("masks", "a mask without its shard", FIRST, ["--data", "a.mask.bin"], ["--data a.mask.bin", "is a mask"],
        after(lambda folder: (folder / "a.mask.bin").write_bytes(ones)))
    for name, files, expected in (
            ("a mask without its shard in a folder", [("b.bin", good), ("a.mask.bin", ones)], "folder/a.mask.bin"),
            ("a folder of masks", [("a.mask.bin", ones)], "folder/a.mask.bin"),
            ("a shard without a mask", [("a.bin", good), ("a.mask.bin", ones), ("b.bin", good)], "folder/b.bin")):
        add("masks", name, FIRST, ["--data", "folder"], expected, after(folder_of("folder", *files)))
    add("masks", "--mask-document-ends without a document token", FIRST, ["--mask-document-ends", "on"],
        ["--mask-document-ends", "--document-token"])

    two = after(lambda folder: (folder / "other.txt").write_text(TEXT))
    for data, expected in (
            ("text.txt:0.7,other.txt:0.2", "sum to 0.9"), ("text.txt:0.9", "sum to 0.9"),
            ("text.txt:0.5,other.txt:0.500002", "sum to 1"), ("text.txt:0,other.txt:0", "sum to 0"),
            ("text.txt:-0.5,other.txt:1.5", "at least 0"), ("text.txt:nan,other.txt:1", "at least 0"),
            ("text.txt:inf,other.txt:0", "at least 0"), ("text.txt:1e400,other.txt:1", "no weight"),
            ("text.txt:0.5,other.txt", "no weight"), ("text.txt:0.5,", "no weight"), (":0.5,text.txt:0.5", "no path"),
            ("text.txt:0.5,other.txt:0.5:x", "no weight"), ("text.txt:0x1p-1,other.txt:0.5", "no weight"),
            ("text.txt:0.5,text.txt:0.5", "one source"), ("text.txt:0.5,./text.txt:0.5", "one source"),
            ("text.txt:0.5,.:0.5", "one source"), ("text.txt:0.5,missing:0.5", "missing"),
            ("text.txt:1,missing:0", "missing"), ("text.txt,other.txt", "text.txt,other.txt")):
        add("mixtures", data, FIRST, ["--data", data], ["--data", expected], two)
    add("mixtures", "an output that is a source", FIRST,
        ["--data", "text.txt:0.5,other.txt:0.5", "--metrics", "other.txt"], ["--metrics other.txt", "--data"], two)
    add("mixtures", "an output that is a mask", FIRST, ["--data", "a.bin", "--metrics", "a.mask.bin"],
        ["--metrics a.mask.bin", "--data"], after(lambda folder: (folder / "a.bin").write_bytes(good),
                                                  lambda folder: (folder / "a.mask.bin").write_bytes(ones)))
    add("mixtures", "on ranks", "02_data_parallel", ["--data", "text.txt:0.7,other.txt:0.2"], ["--data", "sum to 0.9"],
        two, ranks=2, limit=GENTLE)
    # while the program reads it
    for program, ranks in ((FIRST, 1), ("02_data_parallel", 2)):
        def shrink(folder, process):
            def wait():
                for _ in range(500):
                    metrics = folder / "m.jsonl"
                    if process.poll() is not None or (metrics.exists() and b'"step"' in metrics.read_bytes()):
                        break
                    time.sleep(0.01)
                os.truncate(folder / "data.txt", 0)
            threading.Thread(target=wait).start()
        add("data", "a file that shrinks while training", program, ["--data", "data.txt", "--steps", "1000000"],
            ["--data", "data.txt"],
            after(lambda f: (f / "data.txt").write_text(TEXT * 100)), ranks=ranks, code=1, meanwhile=shrink,
            left=("m.jsonl", "data.txt"), limit=GENTLE, lines=1 if ranks == 1 else -1)


# ---- Hugging Face folders ------------------------------------------------------------------------------------------
def read_tensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + size]), data[8 + size:]


def safetensors(header, data, size=None, text=None):
    text = json.dumps(header).encode() if text is None else text
    return struct.pack("<Q", len(text) if size is None else size) + text + data


class Doubled:
    """JSON text with a key twice."""


def hf_cases(add, base):
    config = json.loads((base / "config.json").read_text())
    header, data = read_tensors(base / "model.safetensors")
    first = next(name for name in header if name != "__metadata__")

    def folder_with(**files):
        """Copies the good folder to hf and replaces files: name__ext=bytes, None: removed."""
        def setup(folder):
            write_text(folder)
            shutil.copytree(base, folder / "hf")
            for name, content in files.items():
                path = folder / "hf" / name.replace("__", ".")
                if content is None:
                    path.unlink()
                else:
                    path.write_bytes(content)
        return setup

    def case(name, setup, expected, **more):
        add("Hugging Face folders", name, FIRST, ["--load-hf", "hf"], expected, setup, **more)

    def changed(key, value):
        copied = {**config, key: value}
        return json.dumps(copied).encode()

    needed = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
        "rms_norm_eps"]
    for key in needed:
        without = {k: v for k, v in config.items() if k != key}
        case(f"config.json without {key}", folder_with(config__json=json.dumps(without).encode()),
            ["config.json", key])
    integers = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size",
                "head_dim", "max_position_embeddings"]
    for key in integers:
        for value in ("32", [1], {"a": 1}, True, 0, -1, 1.5, 2**31, 2**63 - 1, 2**64, 1e30):
            case(f"config.json {key} {value!r}", folder_with(config__json=changed(key, value)), ["config.json", key])
    for key in ("rms_norm_eps", "rope_theta"):
        for value in ("1e-5", [1], {}, True, 0, -1e-5):
            case(f"config.json {key} {value!r}", folder_with(config__json=changed(key, value)), ["config.json", key])
        for value in ("NaN", "Infinity", "1e999"):
            text = json.dumps({**config, key: 7e77}).replace("7e+77", value).encode()
            case(f"config.json {key} {value}", folder_with(config__json=text), ["config.json"])
    for value in (1e308, 1e-308, 0.5):
        case(f"config.json rope_theta {value!r}", folder_with(config__json=changed("rope_theta", value)), "rope_theta")
    for key, value in (("model_type", "gemma2"), ("model_type", "qwen3_moe"), ("model_type", 1),
                       ("hidden_act", "gelu"), ("hidden_act", ["silu"]),
            ("attention_bias", True),
                       ("attention_bias", "yes"), ("mlp_bias", True), ("tie_word_embeddings", True),
                       ("tie_word_embeddings", 1), ("tie_word_embeddings", "yes"), ("tie_word_embeddings", [True]),
                       ("quantization_config", {"a": 1}),
                       ("partial_rotary_factor", 0.5), ("rope_scaling", []),
                       ("rope_scaling", {"type": "dynamic", "factor": 2}), ("rope_scaling", {"type": "linear"}),
                       ("rope_scaling", {"rope_type": "linear", "factor": "2"}),
                       ("rope_scaling", {"rope_type": "linear", "factor": 0}),
                       ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
                       ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
                       ("layer_types", ["full_attention", "sliding_attention"]), ("layer_types", "full_attention"),
                       ("head_dim", 7), ("head_dim", 258), ("num_experts", 8), ("num_local_experts", 8),
                       ("rope_scaling", {"rope_type": "llama3"}), ("rope_scaling", {"rope_type": 3}),
                       ("rope_scaling", "none"),
                       ("rope_scaling", {"rope_type": "llama3", "factor": "8", "low_freq_factor": 1,
                           "high_freq_factor": 4, "original_max_position_embeddings": 8192}),
                       ("rope_scaling", {"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1,
                           "high_freq_factor": 4, "original_max_position_embeddings": 8192}),
                       ("rope_scaling", {"rope_type": "linear", "factor": 1e300}),
                       ("rope_scaling", {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                           "high_freq_factor": 1, "original_max_position_embeddings": 8192}),
                       ("rope_scaling", {"factor": 2}), ("rope_parameters", {"rope_theta": -1}),
                       ("rope_parameters", 7),
                       ("hidden_act", "\x1b[31m\n"), ("model_type", "m" * 3000)):
        case(f"config.json {key} {shown(value)}", folder_with(config__json=changed(key, value)), ["config.json", key])
    for name, changes, key in (
            ("a mistral without sliding_window", {"model_type": "mistral"}, "sliding_window"),
            ("a mistral with a window", {"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
            ("a qwen2 with windows", {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
             "use_sliding_window"),
            ("a qwen3 with windows", {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
             "use_sliding_window"),
            ("a qwen2 whose use_sliding_window is 1", {"model_type": "qwen2", "use_sliding_window": 1},
             "use_sliding_window"),
            ("a qwen2 whose max_window_layers is text",
             {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
            ("a qwen3 with biases", {"model_type": "qwen3", "attention_bias": True}, "attention_bias")):
        case(f"config.json of {name}", folder_with(config__json=json.dumps({**config, **changes}).encode()),
            ["config.json", key])
    for name, changes, tensor in (("qwen2", {"model_type": "qwen2"}, "self_attn.q_proj.bias is missing"),
                                  ("qwen3", {"model_type": "qwen3"}, "self_attn.q_norm.weight is missing"),
                                  ("wider heads", {"head_dim": 10}, "self_attn.q_proj.weight")):
        case(f"config.json of {name}, unlike the weights",
            folder_with(config__json=json.dumps({**config, **changes}).encode()), tensor)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads"):
        other = {"num_attention_heads": 2, "num_key_value_heads": 1}.get(key, 2 * config[key])
        case(f"config.json {key} unlike the weights", folder_with(config__json=changed(key, other)), "hf")
    for name, text, expected in (
            ("empty", b"", "config.json"), ("a list", b"[]", "config.json"), ("a number", b"7", "config.json"),
            ("null", b"null", "config.json"),
            ("cut", json.dumps(config).encode()[:-10], "config.json"),
            ("more after it", json.dumps(config).encode() + b"{}", "config.json"),
            ("not UTF-8", b'{"model_type": "\xff\xfe"}', "config.json"), ("of zeros", b"\0" * 100, "config.json"),
            ("a comment", b"// comment\n" + json.dumps(config).encode(), "config.json"),
            ("nested lists", b"[" * 200000, "config.json"), ("nested objects", b'{"a":' * 200000, "config.json"),
            ("nested in a key", b'{"rope_scaling": ' + b"[" * 100 + b"]" * 100 + b"}", "config.json"),
            ("a key twice", b'{"hidden_size": 64, ' + json.dumps(config).encode()[1:], ["config.json", "hidden_size"]),
            ("UTF-16", json.dumps(config).encode("utf-16"), "config.json"),
            ("a newline in a string", b'{"model_type": "a\nb"}', "config.json")):
        case(f"config.json {name}", folder_with(config__json=text), expected)
    case("no config.json", folder_with(config__json=None), "config.json")
    case("no weights", folder_with(model__safetensors=None), "hf")

    # model.safetensors
    good = safetensors(header, data)
    for length in (0, 1, 7, 8, 9, 100, len(good) - len(data) - 1, len(good) - len(data), len(good) - 1):
        case(f"model.safetensors cut to {length}", folder_with(model__safetensors=good[:length]), "model.safetensors")
    case("model.safetensors with a byte more", folder_with(model__safetensors=good + b"\0"), "model.safetensors")
    for size in (0, 1, 2**31, 2**62, 2**63, 2**64 - 1, 2**64 - 8, len(good)):
        case(f"model.safetensors: header of {size} bytes", folder_with(model__safetensors=safetensors(header, data,
            size)), "model.safetensors")
    for name, text in (("[]", b"[]"), ("7", b"7"), ("{", b"{"),
            ("nested lists", b'{"a":{"shape":' + b"[" * 200000 + b"}}"), ("null", b"null"),
                       ("nested objects", b'{"a":' * 200000), ("zeros", b"\0" * 64), ("not UTF-8", b'{"\xff": {}}')):
        case(f"model.safetensors: header {name}", folder_with(model__safetensors=safetensors(header, data,
            text=text)), "model.safetensors")

    def entry(**fields):
        copied = copy.deepcopy(header)
        for key, value in fields.items():
            if value is None:
                del copied[first][key]
            else:
                copied[first][key] = value
        return safetensors(copied, data)
    begin, end = header[first]["data_offsets"]
    shape = header[first]["shape"]
    for name, fields in (
            ("no dtype", {"dtype": None}), ("dtype I64", {"dtype": "I64"}), ("dtype F16", {"dtype": "F16"}),
            ("dtype 7", {"dtype": 7}),
            ("dtype BF16", {"dtype": "BF16"}), ("dtype F64", {"dtype": "F64"}),
            ("dtype with ESC", {"dtype": "\x1b[31m"}), ("dtype long", {"dtype": "F" * 3000}),
            ("no shape", {"shape": None}), ("shape 7", {"shape": 7}), ("shape empty", {"shape": []}),
            ("shape negative", {"shape": [-shape[0], -shape[1]]}),
            ("shape of strings", {"shape": ["1"]}), ("shape fractional", {"shape": [1.5]}),
            ("shape transposed", {"shape": [shape[1], shape[0]]}),
            ("shape flat", {"shape": [shape[0] * shape[1]]}), ("shape of three", {"shape": [1] + shape}),
            ("shape of 2^62", {"shape": [2**62, 4]}),
            ("shape of 2^63", {"shape": [2**63, 2]}), ("shape of 2^64", {"shape": [2**64]}),
            ("shape with zero", {"shape": [0, 2**60]}),
            ("shape of 300000 ones", {"shape": [1] * 300000}), ("shape of 300000 strings", {"shape": ["1"] * 300000}),
            ("shape 2^32 x 2^32", {"shape": [2**32, 2**32]}),
            ("no offsets", {"data_offsets": None}), ("offsets 7", {"data_offsets": 7}),
            ("offsets of one", {"data_offsets": [0]}), ("offsets of three", {"data_offsets": [0, 1, 2]}),
            ("offsets negative", {"data_offsets": [-1, end]}), ("offsets reversed", {"data_offsets": [end, begin]}),
            ("offsets beyond", {"data_offsets": [begin, 2**62]}),
            ("offsets 2^64", {"data_offsets": [begin, 2**64 - 1]}),
            ("offsets shifted", {"data_offsets": [begin + 4, end + 4]}),
            ("offsets shorter", {"data_offsets": [begin, end - 4]})):
        case(f"model.safetensors: {name}", folder_with(model__safetensors=entry(**fields)),
            ["model.safetensors", first])

    def tensors(change):
        copied = copy.deepcopy(header)
        change(copied)
        return safetensors(copied, data)
    case("a tensor missing", folder_with(model__safetensors=tensors(lambda h: h.pop(first))), "hf")
    case("a tensor renamed", folder_with(model__safetensors=tensors(lambda h: h.update(other=h.pop(first)))), "hf")
    case("a tensor more", folder_with(model__safetensors=tensors(lambda h: h.update(more={"dtype": "F32",
        "shape": [0], "data_offsets": [0, 0]}))), ["model.safetensors", "more"])
    case("a tensor more with ESC",
        folder_with(model__safetensors=tensors(lambda h: h.update({"\x1b[31m\n": {"dtype": "F32", "shape": [0],
            "data_offsets": [0, 0]}}))), "model.safetensors")
    case("a tensor more with a long name",
        folder_with(model__safetensors=tensors(lambda h: h.update({"m" * 5000: {"dtype": "F32", "shape": [0],
            "data_offsets": [0, 0]}}))), "model.safetensors")
    case("a tensor's entry is a list", folder_with(model__safetensors=tensors(lambda h: h.update({first: []}))),
        ["model.safetensors", first])
    case("a tensor's entry is null", folder_with(model__safetensors=tensors(lambda h: h.update({first: None}))),
        ["model.safetensors", first])
    twice = json.dumps(header)[:-1] + f', "{first}": {json.dumps(header[first])}' + "}"
    case("a tensor twice", folder_with(model__safetensors=safetensors(header, data, text=twice.encode())),
        ["model.safetensors", first])
    shape_twice = json.dumps(header).replace('"shape"', '"shape": [7], "shape"', 1)
    case("a shape twice", folder_with(model__safetensors=safetensors(header, data, text=shape_twice.encode())),
        ["model.safetensors", "shape"])

    # the index
    names = [name for name in header if name != "__metadata__"]
    def indexed(weight_map, text=None, *more):
        def setup(folder):
            folder_with()(folder)
            (folder / "hf/model.safetensors").rename(folder / "hf/a.safetensors")
            content = json.dumps({"weight_map": weight_map}).encode() if text is None else text
            (folder / "hf/model.safetensors.index.json").write_bytes(content)
            for step in more:
                step(folder / "hf")
        return setup
    full = {name: "a.safetensors" for name in names}
    index = "model.safetensors.index.json"
    for name, weight_map, expected in (
            ("traversal", {**full, first: "../hf/a.safetensors"}, index),
            ("absolute", {**full, first: "/etc/passwd"}, index), ("empty name", {**full, first: ""}, index),
            ("dots", {**full, first: ".."}, index), ("a dot", {**full, first: "."}, index),
            ("a number", {**full, first: 7}, index), ("null", {**full, first: None}, index),
            ("a list", {**full, first: ["a.safetensors"]}, index),
            ("a missing file", {**full, first: "b.safetensors"}, "b.safetensors"),
            ("a name of 300 bytes", {**full, first: "b" * 300}, "hf"),
            ("a name with ESC", {**full, first: "\x1b[31m"}, "hf"),
            ("a name with a newline", {**full, first: "a\nb"}, "hf"),
            ("a name with zero", {**full, first: "a.safetensors\0"}, "hf"),
            ("config.json as a shard", {**full, first: "config.json"}, "config.json"),
            ("a tensor more", {**full, "more": "a.safetensors"}, "more"),
            ("a tensor less", {k: v for k, v in full.items() if k != first}, first), ("empty", {}, index),
            ("a list of pairs", [[first, "a.safetensors"]], index),
            ("a long name", {**full, first: "b" * 5000}, "hf"), ("itself", {**full, first: index}, index)):
        case(f"index: {name}", indexed(weight_map), expected)
    for name, text in (("empty", b""), ("a list", b"[]"), ("no map", b"{}"), ("cut", b'{"weight_map": {'),
            ("null map", b'{"weight_map": null}'), ("nested", b"[" * 200000),
                       ("nested in the map", b'{"weight_map": {"a": ' + b"[" * 100000 + b"}}"),
                       ("not UTF-8", b'{"weight_map": {"\xff": "a.safetensors"}}')):
        case(f"index: {name}", indexed(None, text), index)
    case("index: a file with a tensor twice", indexed({**full, first: "b.safetensors"}, None,
        lambda hf: shutil.copy(hf / "a.safetensors", hf / "b.safetensors")), "b.safetensors")

    # what is no regular file
    for name in ("config.json", "model.safetensors", index):
        def remake(make, name=name):
            def setup(folder):
                (indexed(full) if name == index else folder_with())(folder)
                (folder / "hf" / name).unlink()
                make(folder / "hf" / name)
            return setup
        case(f"{name} is a folder", remake(lambda p: p.mkdir()), [name])
        case(f"{name} is a FIFO", remake(os.mkfifo), [name])
        case(f"{name} is a loop", remake(lambda p: p.symlink_to(p.name)), ["hf"])
        case(f"{name} is a device", remake(lambda p: p.symlink_to("/dev/zero")), [name])
        case(f"{name} leads nowhere", remake(lambda p: p.symlink_to("nowhere")), ["hf"])
    for name, value in (("a file", "text.txt"), ("nothing", "nowhere"), ("a FIFO", "fifo"), ("a loop", "loop"),
            ("a long name", "n" * 300), ("a Latin-1 name", b"caf\xe9")):
        add("Hugging Face folders", f"--load-hf {name}", FIRST, ["--load-hf", value], "--load-hf", after(odd_files))
    for flag in [*SHAPE, "--head-dim", "--qkv-bias", "--qk-norm", "--mup"]:
        value = "on" if flag.startswith("--q") else "2"
        add("Hugging Face folders", f"--load-hf with {flag}", FIRST, ["--load-hf", "hf", flag, value],
            [flag, "--load-hf"], folder_with())
    add("Hugging Face folders", "--load-hf with --tied-embeddings", FIRST,
        ["--load-hf", "hf", "--tied-embeddings", "on"], ["--tied-embeddings", "--load-hf"], folder_with())
    add("Hugging Face folders", "--load-hf with --model", FIRST, ["--load-hf", "hf", "--model", "tiny"],
        ["--model", "--load-hf"], folder_with())
    for ranks, program in ((2, "02_data_parallel"), (2, "08_3d_full")):
        add("Hugging Face folders", "a tensor missing", program, ["--load-hf", "hf"], "hf",
            folder_with(model__safetensors=tensors(lambda h: h.pop(first))), ranks=ranks)


# ---- compare -------------------------------------------------------------------------------------------------------
def compare_cases(add, base):
    good = json.loads((base / "reference.json").read_text())

    def runs(change=None, side="a"):
        def setup(folder):
            for name in ("a", "b"):
                shutil.copytree(base, folder / name)
            if change:
                change(folder / side)
        return setup

    def case(name, change, expected, **more):
        for side in ("a", "b"):
            add("compare", f"{side}: {name}", "compare", ["a", "b"],
                [f"{side}/"] + ([expected] if isinstance(expected, str) else expected),
                runs(change, side), **more)

    def text(content, name="reference.json"):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        return lambda run: (run / name).write_bytes(raw)

    def step(**fields):
        copied = copy.deepcopy(good)
        for key, value in fields.items():
            if value is Doubled:
                del copied["steps"][0][key]
            else:
                copied["steps"][0][key] = value
        return text(copied)
    name = "reference.json"
    for label, content in (("empty", b""), ("a list", b"[]"), ("cut", json.dumps(good).encode()[:-3]),
            ("nested", b"[" * 200000), ("null", b"null"), ("not UTF-8", b'{"\xff": 1}')):
        case(f"reference.json {label}", text(content), name)
    for key, value in (("format", "other"), ("format", 7), ("version", 99), ("version", "2"), ("version", 0),
            ("dtype", "fp16"), ("dtype", 7), ("flags", []), ("flags", 7), ("steps", {}), ("steps", []),
                       ("steps", 7), ("steps", None), ("steps", [7]), ("steps", [[]]), ("steps", [{}]),
                       ("steps", ["a"])):
        case(f"{key} {value!r}", text({**good, key: value}), name)
    for key in ("format", "version", "steps"):
        case(f"no {key}", text({k: v for k, v in good.items() if k != key}), name)
    for key in ("loss", "grad_norm", "tokens"):
        case(f"no {key}", step(**{key: Doubled}), [name, key])
    for key, value in (("loss", "5"), ("loss", []), ("loss", True), ("grad_norm", "2"), ("grad_norm", -1),
            ("grad_norm", {}), ("lr", "1"), ("tokens", 7), ("tokens", [7]), ("tokens", [[1.5]]), ("tokens", [["1"]]),
                       ("tokens", [[None]]), ("tokens", {}), ("tokens", [[True]]), ("tokens", [[2**64]]),
                       ("tokens", [[1e30]]), ("tokens", [["1" * 3000]])):
        case(f"{key} {shown(value)}", step(**{key: value}), [name, "token" if key == "tokens" else key])
    for file in ("initial.safetensors", "gradients.safetensors", "after_step_1.safetensors"):
        if file != "after_step_1.safetensors":
            case(f"no {file}", lambda run, file=file: (run / file).unlink(), file)
        case(f"{file} cut", lambda run, file=file: (run / file).write_bytes((run / file).read_bytes()[:-1]), file)
        case(f"{file} empty", text(b"", file), file)
        case(f"{file} without tensors", text(safetensors({}, b""), file), file)
        case(f"{file} a folder", lambda run, file=file: ((run / file).unlink(), (run / file).mkdir()), file)
        case(f"{file} a FIFO", lambda run, file=file: ((run / file).unlink(), os.mkfifo(run / file)), file)
    case("no reference.json", lambda run: (run / name).unlink(), name)
    case("reference.json a folder", lambda run: ((run / name).unlink(), (run / name).mkdir()), name)
    case("reference.json a FIFO", lambda run: ((run / name).unlink(), os.mkfifo(run / name)), name)
    case("reference.json a loop", lambda run: ((run / name).unlink(), (run / name).symlink_to(name)), name)
    for arguments, expected in (([], "A"), (["a"], "B"), (["a", "nowhere"], "nowhere"), (["nowhere", "b"], "nowhere"),
            (["a", "b", "c"], "c"), (["a", ""], "B"), (["", "b"], "A"),
            (["a", "b", "--tolerance", "2"], "--tolerance"),
                                (["a", "a/reference.json"], "a/reference.json"), (["a", "n" * 300], "n"),
                                (["a", b"caf\xe9"], "caf"), (["a", "x\ny"], "x")):
        add("compare", f"arguments {ascii(arguments)[:40]}", "compare", arguments, expected, runs())
    # a run that is wrong, and no bad input
    negative = copy.deepcopy(good)
    negative["steps"][0]["loss"] = -negative["steps"][0]["loss"]
    add("compare", "a loss with the wrong sign", "compare", ["a", "b"], [], runs(text(negative), "b"), code=1, lines=0)


# ---- output paths --------------------------------------------------------------------------------------------------
def cluster_files():
    """(bytes, what is wrong) of files that are no cluster."""
    good = {"name": "x", "device": {"name": "H100"}, "nodes": 2, "gpus_per_node": 8,
            "nvlink": {"bytes_per_s": 1e11, "seconds": 0}, "rail": {"bytes_per_s": 1e10, "seconds": 0}}
    for content, name in ((b"", "empty"), (b"[]", "a list"), (b"{}", "an object"), (b"[" * 100000, "nested"),
                          (b'{"name": "x", "device": {"name": "\x1b"}}', "ESC"), (b'{"nodes": 1e999}', "infinite"),
                          (b'{"name": "x", "name": "x"}', "a key twice")):
        yield content, name
    for path, values in (
            ("name", ("", 7, None)), ("device", (7, [], {}, "H1000", {"name": "mine"}, None)),
            ("nodes", (0, -1, 1.5, "2", 10**12, None)), ("gpus_per_node", (0, True, 10**6, None)),
            ("nvlink", (7, {}, [1])), ("rail", (None, {"bytes_per_s": 1})), ("nvls", (1, "true")),
            ("rails", (0, 1e9)), ("oversubscription", (0.5, -1)), ("cores", (0,)), ("links", ([],)),
            ("rail.bytes_per_s", (0, -1, "1", None)), ("rail.seconds", (-1, 2, [])), ("rail.speed", (1,)),
            ("host", ({"bytes_per_s": 0, "seconds": 1},)), ("device.peak_bf16", (0, "1")),
            ("device.product_efficiency", (0, 1.5)), ("device.attention", ([], 7, [[1, 2]], [[2, 1, 1], [1, 1, 1]])),
            ("device.pointwise_traffic", (7, [], {"add": 2}, {"add": [0, 1]}, {"add": [1, 0]}, {"matmul": [2, 1]})),
            ("device.streams", (0,)), ("device.launch_s", (-1,)), ("device.peak", (1,))):
        for value in values:
            bad = copy.deepcopy(good)
            *folders, key = path.split(".")
            inner = bad[folders[0]] if folders else bad
            inner[key] = value
            if value is None:
                del inner[key]
            yield json.dumps(bad).encode(), f"{path} {'missing' if value is None else json.dumps(value)}"


def simulate_cases(add):
    """--simulate and its files."""
    good = json.dumps({"name": "two", "device": "H100", "nodes": 1, "gpus_per_node": 2,
                       "nvlink": {"bytes_per_s": 1e11, "seconds": 0}})
    table = "op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n"
    for name, world, flags, expected in (
            ("fewer devices", 4, "", ["--simulate c.json", "2 devices"]),
            ("no simulated ranks", 0, "", "--simulate"),
            ("--device-csv alone", -2, "--device-csv o.csv", "--device-csv"),
            ("--simulate-slow alone", -2, "--simulate-slow 0:2", "--simulate-slow"),
            ("--simulate-slow-network alone", -2, "--simulate-slow-network 0:2", "--simulate-slow-network"),
            *((f"--simulate-slow-network {value}", 2, f"--simulate-slow-network {value}", "--simulate-slow-network")
              for value in ("x", "1:2", "-1:2", "0:0", "0:nan", "0:2,0:3")),
            ("--simulate-jitter alone", -2, "--simulate-jitter 0.1", "--simulate-jitter"),
            ("no such table", 2, "--device-csv nowhere", "--device-csv nowhere"),
            ("no table", 2, "--device-csv text.txt", "--device-csv text.txt"),
            ("a table without ops", 2, "--device-csv o.csv", "--device-csv o.csv"),
            ("the trace over the cluster", 2, "--trace c.json", ["--trace", "--simulate"]),
            *((f"--simulate-slow {value}", 2, f"--simulate-slow {value}", "--simulate-slow")
              for value in ("x", "0", "0:", ":2", "2:2", "-1:2", "0:0", "0:-1", "0:nan", "0:2,0:3", "0:2x", "0:2;1:2",
                            "0:1e999", "99999999999999999999:2"))):
        fake = ["--comm", "fake", "--fake-world", str(abs(world))] if world else []
        add("--simulate", name, "08_3d_full", fake + (["--simulate", "c.json"] if world >= 0 else []) + flags.split(),
            expected, after(lambda f: (f / "c.json").write_text(good), lambda f: (f / "o.csv").write_text(table)))
    add("--simulate", "FP8 on a device without", "08_3d_full",
        ["--comm", "fake", "--fake-world", "2", "--dtype", "bf16", "--fp8", "current", "--simulate", "c.json"],
        ["--fp8 current", "A100"], after(lambda f: (f / "c.json").write_text(good.replace("H100", "A100"))))
    for content, name in cluster_files():
        add("--simulate", name, "08_3d_full", ["--comm", "fake", "--fake-world", "2", "--simulate", "c.json"],
            "--simulate c.json", after(lambda f, content=content: (f / "c.json").write_bytes(content)))


def output_cases(add, base, binaries):
    def copies(folder):
        shutil.copytree(base, folder / "hf")
    files = [flag for flag, kind in flags_of(binaries, FIRST).items() if kind.startswith("FILE")]
    for flag in files:
        bench = ["--steps", "1"]
        without = ("--metrics", "--trace") if flag == "--bench-csv" else ()
        for path, expected in (("text.txt", "--data"), ("./text.txt", "--data"), ("hard.txt", "--data"),
                ("soft.txt", "--data"), ("folder", "folder"), ("folder/", "folder"), ("fifo", "FIFO"),
                ("loop", "loop"),
                               ("nowhere/x", "nowhere"), ("text.txt/x", "text.txt"), ("", "empty"), ("x/", "x/"),
                               ("n" * 256, "n")) + \
                ((("n" * 253, "n"),) if flag != "--metrics" else ()):
            add("output paths", f"{flag} {shown(path)}", FIRST, bench + [flag, path], [flag, expected],
                without=without,
                setup=after(odd_files, lambda f: os.link(f / "text.txt", f / "hard.txt"),
                    lambda f: (f / "soft.txt").symlink_to("text.txt")))
        add("output paths", f"{flag} over weights", FIRST, ["--load-hf", "hf", flag, "hf/model.safetensors"],
            [flag, "--load-hf"], after(copies))
        add("output paths", f"{flag} over config.json", FIRST, ["--load-hf", "hf", flag, "hf/config.json"],
            [flag, "--load-hf"], after(copies))
        for other in files + ["--save-hf", "--save-reference"]:
            if "--bench-csv" in (flag, other):
                continue  # alone, as --bench does not train
            if other > flag and not other.startswith("--save"):
                add("output paths", f"{flag} and {other}, one name", FIRST, [flag, "x", other, "./x"], [flag, other])
            elif other.startswith("--save"):
                add("output paths", f"{flag} in {other}", FIRST, [flag, "d/config.json", other, "d"], [flag, other],
                    after(lambda f: (f / "d").mkdir()))
        add("output paths", f"{flag} on a socket", FIRST, [flag, "socket"], [flag, "socket"],
            after(lambda f: os.mknod(f / "socket", 0o140644)))
        add("output paths", f"{flag} in a Latin-1 folder", FIRST, [flag, b"caf\xe9/x"], flag, without=without)
        add("output paths", f"{flag} in a folder with ESC", FIRST, [flag, "\x1b[31m\n/x"], flag, without=without)
        if os.geteuid() == 0:
            add("output paths", f"{flag} on a block device", FIRST, [flag, "block"], [flag, "block"],
                after(lambda f: os.mknod(f / "block", 0o060644, os.makedev(7, 250))))
    for flag, names in (("--save-hf", ["config.json", "model.safetensors", "model.safetensors.index.json"]),
                        ("--save-reference", ["config.json", "initial.safetensors", "gradients.safetensors",
                            "after_step_1.safetensors", "reference.json"])):
        for path, expected in (("text.txt", flag), ("fifo", flag), ("loop", flag), ("", "empty"),
                ("text.txt/d", flag), ("n" * 256, flag), ("d/" + "n" * 256, flag)):
            add("output paths", f"{flag} {shown(path)}", FIRST, [flag, path], [flag, expected], after(odd_files))
        for name in names:
            for what, make in (("folder", lambda p: p.mkdir()), ("FIFO", os.mkfifo),
                    ("loop", lambda p: p.symlink_to(p.name))):
                add("output paths", f"{flag} with a {what} {name}", FIRST, [flag, "d"], [flag, name],
                    after(lambda f: (f / "d").mkdir(), lambda f, name=name, make=make: make(f / "d" / name)))
        add("output paths", f"{flag} over --load-hf", FIRST, ["--load-hf", "hf", flag, "hf"], [flag, "--load-hf"],
            after(copies))
        add("output paths", f"{flag} in a deleted folder", FIRST, [flag, "d"], "--", deleted=True)
        add("output paths", f"{flag} in /proc", FIRST, [flag, "/proc/d"], flag)
    add("output paths", "--save-hf and --save-reference, one folder", FIRST,
        ["--save-hf", "d", "--save-reference", "d"], ["--save-hf", "--save-reference"])
    for program, flag, more in (("02_data_parallel", "--all-reduce-csv", []), ("02_data_parallel", "--modes-csv", []),
            ("04_tensor_parallel", "--efficiency-csv", []),
                                ("05_pipeline", "--pipeline-trace", []), ("05_pipeline", "--draw", []),
                                ("07_fp8", "--compare-csv", ["--compare", "1"])):
        for path in ("folder", "fifo", "loop", "nowhere/x", "text.txt"):
            add("output paths", f"{program} {flag} {path}", program, ["--tables", "on", flag, path] + more, flag,
                after(odd_files), ranks=2)
    for content, name in cluster_files():
        add("--links", name, "04_tensor_parallel", ["--tables", "on", "--links", "links.json"],
            ["--links", "links.json"],
            after(lambda f, content=content: (f / "links.json").write_bytes(content)))
    for name, step in (("a folder", lambda f: (f / "links.json").mkdir()),
            ("a FIFO", lambda f: os.mkfifo(f / "links.json")),
            ("a loop", lambda f: (f / "links.json").symlink_to("links.json")), ("nothing", lambda f: None)):
        add("--links", name, "04_tensor_parallel", ["--tables", "on", "--links", "links.json"],
            ["--links", "links.json"], after(step))
        add("--links", name, "04_tensor_parallel", ["--tables", "on", "--links", "links.json"],
            ["--links", "links.json"], after(step), ranks=2)


# ---- streams, full disks, read-only folders ------------------------------------------------------------------------
def stream_cases(add, binaries):
    for program in PROGRAMS + ["compare"]:
        if os.path.exists("/dev/full"):
            add("streams", f"{program} --help >/dev/full", program, None, "standard output", None, code=1,
                streams=">/dev/full", words=["--help"])
        add("streams", f"{program}: no stderr", program, None, [], None, lines=0, streams="2>&-", words=["--stepz"])
        add("streams", f"{program}: neither stream", program, None, [], None, lines=0, streams=">&- 2>&-",
            words=["--stepz"])
        add("streams", f"{program}: no stdin", program, None, ["--stepz"], None, streams="<&-",
            words=(["a", "b"] if program == "compare" else []) + ["--stepz"])
    add("streams", "a run >/dev/full", FIRST, [], "standard output", code=1, streams=">/dev/full",
        left=("m.jsonl", "t.json"))
    add("streams", "a run >&-: progress is not mixed into the metrics", FIRST, [], "--trace", code=2, streams=">&-",
        words=None, trace="nowhere/t.json")
    for flag in ("--metrics", "--trace", "--memory-timeline"):
        add("streams", f"{flag} /dev/full", FIRST, [flag, "/dev/full"], [flag, "/dev/full"], code=1,
            left=("m.jsonl", "t.json", "t.csv"))


def environment_cases(add):
    """What OpenMP and OpenBLAS read before the program begins."""
    for program in (FIRST, "08_3d_full", "compare", "schedule", "plan"):
        for value in ("0", "abc", "1.5", "-1", "", "99999999999"):
            add("environment", f"OMP_NUM_THREADS={shown(value)} {program}", program, [], "OMP_NUM_THREADS",
                environment={"OMP_NUM_THREADS": value})
    for program in (FIRST, "08_3d_full"):
        for value in ("0", "abc", "1.5", "-1", "1x", " 1", "1025"):
            add("environment", f"OPENBLAS_NUM_THREADS={value} {program}", program, [], "OPENBLAS_NUM_THREADS",
                environment={"OPENBLAS_NUM_THREADS": value})


def disk_cases(add):
    """A tmpfs of 128 KiB; the model's files do not fit. Or one that is read only."""
    def disk(folder):
        (folder / "disk").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder / "disk"], check=True)

    def fill(folder):
        disk(folder)
        try:
            (folder / "disk/fill").write_bytes(b"x" * (1 << 20))
        except OSError:
            pass

    def read_only(folder):
        disk(folder)
        (folder / "disk/d").mkdir()
        (folder / "disk/old").write_text("old")
    for path in ("disk/x", "disk/old", "disk/new/x"):
        for flag in ("--metrics", "--trace", "--memory-timeline", "--bench-csv"):
            add("full and read-only disks", f"{flag} {path}, read only", FIRST, [flag, path], [flag, path],
                after(read_only), mount="ro",
                without=("--metrics", "--trace") if flag == "--bench-csv" else ())
    for flag in ("--save-hf", "--save-reference"):
        for path in ("disk", "disk/d", "disk/new", "disk/new/er"):
            add("full and read-only disks", f"{flag} {path}, read only", FIRST, [flag, path], [flag, path],
                after(read_only), mount="ro")
        add("full and read-only disks", f"{flag}, too small a disk", FIRST, [flag, "disk/d"], [flag], after(disk),
            mount="rw", code=1,
            left=("m.jsonl", "t.json"), without=("--hidden",), more=["--hidden", "128"])
        add("full and read-only disks", f"{flag}, a full disk", FIRST, [flag, "disk/d"], [flag], after(fill),
            mount="rw", code=1, left=("m.jsonl", "t.json"))
    add("full and read-only disks", "two ranks, read only", "02_data_parallel", ["--metrics", "disk/m"],
        ["--metrics", "disk/m"], after(read_only), mount="ro", ranks=2)
    add("full and read-only disks", "two ranks, --save-hf, read only", "08_3d_full", ["--save-hf", "disk/d"],
        ["--save-hf"], after(read_only), mount="ro", ranks=2)
    for flag in ("--trace", "--memory-timeline"):
        add("full and read-only disks", f"{flag}, a full disk", FIRST, [flag, "disk/x"], [flag], after(fill),
            mount="rw", code=1, left=("m.jsonl", "t.json"))
    add("full and read-only disks", "--metrics ends with a whole line", FIRST,
        ["--metrics", "disk/m.jsonl", "--steps", "1000"], ["--metrics"], after(disk), mount="rw", code=1,
        left=("disk/m.jsonl",), whole_lines="disk/m.jsonl")


def can_mount():
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode != 0:
            return False
        return subprocess.run(["umount", folder], capture_output=True, check=False).returncode == 0


def all_cases(binaries, above, Case):
    """(cases, lines on what is skipped). `above`: a folder for the good files that cases copy."""
    cases, skipped = [], []

    def add(group, name, program, given, expected, setup=write_text, without=(), words=None, more=(), trace=None,
            deleted=False, **fields):
        arguments = words if words is not None else words_of(program, list(given) + list(more), without)
        if trace:
            arguments = [trace if before == "--trace" else word for before, word in zip([""] + arguments, arguments)]
        if deleted:
            arguments = [str(above / word) if word == "text.txt" else word for word in arguments]
        case = Case(group, name, program, arguments, expected, setup or write_text, gone=deleted, **fields)
        cases.append(case)

    (above / "text.txt").write_text(TEXT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for flag, steps in (("--save-hf", "0"), ("--save-reference", "2")):
        subprocess.run([os.path.join(binaries, FIRST), *[w for pair in SHAPE.items() for w in pair], "--data",
            "text.txt", "--seq-len", "16",
                        "--global-batch", "2", "--steps", steps, flag, flag[2:]], cwd=above, env=environment,
                        check=True, stdout=subprocess.DEVNULL)
    flag_cases(add, binaries)
    size_cases(add)
    layout_cases(add)
    schedule_cases(add)
    plan_cases(add, binaries)
    data_cases(add)
    hf_cases(add, above / "save-hf")
    compare_cases(add, above / "save-reference")
    simulate_cases(add)
    output_cases(add, above / "save-hf", binaries)
    stream_cases(add, binaries)
    environment_cases(add)
    if can_mount():
        disk_cases(add)
    else:
        skipped.append("full and read-only disks: this user cannot mount a tmpfs")
    fake = ["--comm", "fake", "--fake-world", "2"]
    again = [case for case in cases
             if case.program not in (FIRST, "compare", "schedule", "plan") and case.ranks == 1 and not case.streams
             and (case.arguments[-6:-2] == fake or "--comm" not in case.arguments)
             and "--dry-run" not in case.arguments and "--simulate" not in case.arguments]
    for case in again[::12]:
        at = len(case.arguments) - 6
        arguments = case.arguments
        if arguments[at:at + 4] == fake:
            arguments = arguments[:at] + arguments[at + 4:]
        cases.append(dataclasses.replace(case, group="on two ranks", arguments=arguments, ranks=2))
    for case in cases:
        if case.ranks > 1:
            case.limit = max(case.limit, GENTLE)
    return cases, skipped
