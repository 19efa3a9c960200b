"""Bad input: values of every flag that --help lists, and sizes that do not fit together."""
from bad_input_common import FIRST, PROGRAMS, SHAPE, after, flags_of, odd_files, shard, shown, write_text

# ---- flags ---------------------------------------------------------------------------------------------------------
INTEGERS = ["x", "1.5", "-1", "-2147483649", "", " ", " 1", "1 ", "010", "0x10", "1e3", "1,2", "nan",
    "99999999999999999999",
            "1000000000000000001", str(2**57), str(2**63 - 1), str(2**64 + 1), "1" * 3000]
NUMBERS = ["x", "", " ", "nan", "-nan", "inf", "-inf", "infinity", "1e999", "-1", "1,5", "1e-3x", "0x", "0x1p-3",
    " 1e-3", "1e-3 ", "1 2", "9" * 3000]
PATHS = ["", "nowhere/file", "folder", "fifo", "loop", "text.txt/file", "n" * 300, "a\nb/file", "a\x1b[31m/file"]

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


TABLE_FILES = ("--all-reduce-csv", "--modes-csv", "--efficiency-csv", "--links", "--draw", "--pipeline-trace")


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
