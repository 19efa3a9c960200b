#!/bin/bash
# The command line of chapter 01 as its user meets it. A bad input ends with exit code 2 and one line on stderr that
# names the flag or the file and says what would work, and leaves nothing on disk. A good run writes the files it
# promised, and only those.
# Run: bash tests/01_cli.sh build/bin
. "$(dirname "$0")/verdict.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
program=$(cd "$1" && pwd)/01_single_gpu
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir "$work/run" && cd "$work/run" || exit 1 # every program runs here: what it leaves behind is easily seen

# Runs the program on the tiny shape with the flags given, which replace the shape's own: code, $work/out, $work/err.
run() {
    local shape=(--data "$work/text.txt" --layers 1 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 16
        --global-batch 2 --steps 3) flags=() i
    for ((i = 0; i < ${#shape[@]}; i += 2)); do
        case " $* " in *" ${shape[i]} "*) ;; *) flags+=("${shape[@]:i:2}") ;; esac
    done
    "$program" "${flags[@]}" "$@" >"$work/out" 2>"$work/err"
    code=$?
}

# expect_line EXIT_CODE PART...: the exit code, and one line on stderr that contains every part. Prints what is wrong.
expect_line() {
    local line part
    line=$(cat "$work/err")
    [ "$code" = "$1" ] || echo "exit code $code, not $1; "
    [ -n "$line" ] && [ "$(wc -l <"$work/err")" = 1 ] || echo "stderr is not one line: $line; "
    for part in "${@:2}"; do
        case $line in *"$part"*) ;; *) echo "'$part' is not in: $line; " ;; esac
    done
}

# refused NAME "PART|PART" FLAG...: exit code 2, one line with every part, and an empty folder.
refused() {
    local parts
    IFS='|' read -ra parts <<<"$2"
    run --metrics m.jsonl --trace t.json --memory-timeline t.csv "${@:3}"
    verdict "refused: $1" "$(expect_line 2 "${parts[@]}")$(ls -A)"
    rm -rf "$work/run/"*
}

# Files: a text, and an llm.c shard of 256 int32 (magic, version, tokens) and then uint16 tokens.
for ((i = 0; i < 100; ++i)); do echo "line $i of a text"; done >"$work/text.txt"
{
    printf '\x88\xd8\x34\x01\x01\0\0\0\xc8\0\0\0'
    head -c 1412 /dev/zero
} >"$work/good.bin"

# Most of what is refused is in refusals_01.cpp.
refused "unknown flag" "--stepz|did you mean --steps?" --stepz 3

# outputs that are no regular file
ln -s soft.json "$work/link.json"
run --trace "$work/link.json"
verdict "a link is followed, not replaced" "$([ "$code" = 0 ] || cat "$work/err")$(
    [ -L "$work/link.json" ] && [ -f "$work/soft.json" ] || ls -l "$work")"
if mknod "$work/null" c 1 3 2>/dev/null; then
    run --trace "$work/null" --memory-timeline "$work/null" --metrics "$work/null"
    verdict "a device stays one" "$([ "$code" = 0 ] || cat "$work/err")$([ -c "$work/null" ] || ls -l "$work/null")"
fi

echo kept >m.jsonl
run --metrics m.jsonl --trace nowhere/t.json
verdict "a refused run leaves an older file as it was" "$(expect_line 2 --trace)$(grep -v '^kept$' m.jsonl)"
rm -f ./*

run --device cuda --steps 0
if [ "$code" = 0 ]; then echo "ok   (--device cuda works on this machine: its refusal is not tested)"; else
    refused "no CUDA" "--device cuda|try --device cpu" --device cuda
fi

run --help
verdict "--help" "$([ "$code" = 0 ] || echo "exit code $code")$(cat "$work/err")$(ls -A)$(
    for flag in --model --kv-heads --data --lr-schedule --recompute --memory-timeline --generate; do
        grep -q -- "$flag " "$work/out" || echo "$flag is not explained; "
    done)"

run --lr 1e30 --warmup-steps 0 --clip 0 --metrics m.jsonl --trace t.json --memory-timeline t.csv
verdict "a loss that is not finite names step and parameter" \
    "$(expect_line 1 'step 2: loss' ' model.' --lr)$(ls | grep -v m.jsonl)"
verdict "and the steps before it are on record" "$([ "$(grep -c '"event":"step"' m.jsonl)" = 1 ] || cat m.jsonl)"
rm -f ./*

if command -v script >/dev/null; then # on a terminal, where the last progress line is still open
    (ulimit -f 20; script -qec "'$program' --data '$work/text.txt' --layers 1 --hidden 32 --heads 4 \
        --kv-heads 2 --ffn 48 --seq-len 16 --global-batch 2 --steps 200 --metrics m.jsonl" /dev/null) >"$work/out" 2>&1
    verdict "an error begins a line" "$(grep -q 'm.jsonl: write failed' "$work/out" || cat "$work/out")$(
        grep 'eta.*write failed' "$work/out")"
    rm -f ./*
fi

(ulimit -f 8; run --save-hf d; exit "$code"); code=$?
verdict "a file beyond ulimit -f ends the run" "$(expect_line 1 '--save-hf d' 'File too large')$(ls -A)"
rm -rf d

# What the libraries read before main() begins.
for setting in OMP_NUM_THREADS=0 OMP_NUM_THREADS=abc OPENBLAS_NUM_THREADS=1.5; do
    export "$setting"
    refused "$setting" "$setting: must be an integer from 1"
    export OMP_NUM_THREADS=2
    unset OPENBLAS_NUM_THREADS
done
if ! ldd "$program" | grep -q asan; then # OpenBLAS retries for ever to map its buffers
    limited() { (ulimit -v "$1" -t 20; OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 run "${@:2}"; exit "$code"); code=$?; }
    least=150000 # in which the program itself has room, with CUDA's libraries if it is linked with them
    while limited $least --version && [ "$code" = 127 ]; do least=$((least + 20000)); done
    for limit in $least $((least + 140000)); do # not enough before main(), and for the first product
        limited "$limit" --metrics m.jsonl
        verdict "ulimit -v $limit" "$(expect_line 2 "ulimit -v $limit: leaves no room" "try ulimit -v ")$(ls -A)"
    done
    limited "$(sed 's/.*try ulimit -v \([0-9]*\).*/\1/' "$work/err")"
    verdict "the limit that it suggests" "$([ "$code" = 0 ] || echo "exit code $code")$(cat "$work/err")"
fi

if [ -c /dev/full ]; then # a device that is always full
    run --metrics /dev/full
    verdict "metrics that cannot be written end the run" "$(expect_line 1 '--metrics /dev/full')"
fi

# good NAME CHECK FLAG...: exit code 0, silence on stderr, the three files and no others, nothing from the Python check.
good() {
    run "${@:3}" --metrics m.jsonl --trace t.json --memory-timeline t.csv
    verdict "good: $1" "$([ "$code" = 0 ] || echo "exit code $code")$(cat "$work/err")$(
        [ "$(ls -A | tr '\n' ' ')" = "m.jsonl t.csv t.json " ] || ls -A)$(
        python3 -c "$reader"$'\n'"$2" 2>&1)"
    rm -f ./*
}

# What every good run owes; the check of the case at hand follows it. Parameters of the shape: in the block two norms of
# 32, q and o 32 x 32, k and v 16 x 32, three of 48 x 32; then a norm of 32, embedding and head of 256 x 32: 24160.
reader='
import csv, json, re
kinds = ["params", "grads", "optimizer", "activations", "comm", "workspace"]
def expect(condition, *what):
    if not condition: print("unexpected:", *what)
lines = [json.loads(line) for line in open("m.jsonl")]
texts = [json.loads(line, parse_float=str) for line in open("m.jsonl")]  # numbers as they stand in the file
steps = [line for line in lines if line["event"] == "step"]
evals = [line for line in lines if line["event"] == "eval"]
config, summary = lines[0], lines[-1]
expect(config["event"] == "config" and config["model"]["parameters"] == 24160, config)
expect(re.fullmatch(r"[\w./+-]+", config["version"]["commit"]), config["version"])
expect(config["flags"]["layers"] == "1" and config["flags"]["lr-schedule"] == "cosine", config["flags"])
expect(summary["event"] == "summary" and summary["steps"] == len(steps), summary)
expect([step["step"] for step in steps] == list(range(1, len(steps) + 1)), steps)
expect(len(summary["memory_per_rank"]) == 1 and list(summary["memory_per_rank"][0]) == kinds + ["total"], summary)
for step in steps:
    expect(list(step) == ["event", "step", "loss", "grad_norm", "lr", "param_norm", "tokens_per_s", "mfu", "step_s",
                          "comm_s", "data_s", "memory", "comm_bytes"], list(step))
    memory, peak = step["memory"], step["memory"]["peak"]
    expect(list(memory) == kinds + ["peak"] and list(peak) == kinds + ["total"], memory)
    expect(all(peak[kind] >= memory[kind] >= 0 for kind in kinds), memory)
    expect(sum(memory[kind] for kind in kinds) <= peak["total"] <= sum(peak[kind] for kind in kinds), memory)
    expect(all(summary["memory_per_rank"][0][kind] >= peak[kind] for kind in peak), summary, peak)
    expect(memory["activations"] == 0 and peak["activations"] > 0 and memory["comm"] == 0, memory)
    expect(step["mfu"] is None and step["comm_bytes"] == {} and step["comm_s"] == 0, step)
    expect(0 < step["data_s"] < step["step_s"] and abs(step["tokens_per_s"] * step["step_s"] / 32 - 1) < 1e-6, step)
    expect(4 < step["loss"] < 7 and step["grad_norm"] > 0 and step["param_norm"] > 0, step)
for line in texts:
    for key in ("loss", "grad_norm", "param_norm"):
        digits = (line.get(key) or "0.0").split("e")[0].replace(".", "").lstrip("-0")
        expect(len(digits) <= (17 if config["flags"]["dtype"] == "fp64" else 9), key, line.get(key))
trace = json.load(open("t.json"))["traceEvents"]
titles = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
expect(titles == ["rank 0"], titles)
trace = [event for event in trace if event["ph"] != "M"]
micro_batches = 2 if config["flags"]["micro-batch"] == "1" else 1
for name, per_step in ("forward", micro_batches), ("backward", micro_batches), ("update", 1):
    spans = [event for event in trace if event["name"] == name and event["cat"] == "phase"]
    expect(len(spans) == per_step * len(steps), name, spans)
expect(all(event["ph"] == "X" and event["dur"] >= 0 and event["pid"] == 0 for event in trace), trace)
rows = list(csv.DictReader(open("t.csv")))
expect(list(rows[0]) == ["event", "seconds", "phase"] + kinds + ["total"], rows[0])
expect(all(int(row["total"]) == sum(int(row[kind]) for kind in kinds) for row in rows), "the total of a row")
expect([int(row["event"]) for row in rows] == list(range(len(rows))), "the numbers of the rows")
expect(all(float(a["seconds"]) <= float(b["seconds"]) for a, b in zip(rows, rows[1:])), "time running backwards")
for kind in kinds + ["total"]:
    highest = max(int(row[kind]) for row in rows)
    expect(not steps or highest == summary["memory_per_rank"][0][kind], kind, highest, summary)
def states(memory, params, grads, optimizer):
    expect((memory["params"], memory["grads"], memory["optimizer"]) == (params, grads, optimizer), memory)
'
good "three steps" 'expect(len(steps) == 3 and not evals)
for step in steps: states(step["memory"], 4 * 24160, 4 * 24160, 8 * 24160)
expect([step["lr"] for step in steps] == [0.003 * s / 20 for s in (1, 2, 3)], steps)'
good "fp64" 'for step in steps: states(step["memory"], 8 * 24160, 8 * 24160, 16 * 24160)
assert config["flags"]["grad-dtype"] == "fp64"' --dtype fp64
good "bf16, fp32 gradients" 'for step in steps: states(step["memory"], 2 * 24160, 4 * 24160, 12 * 24160)' --dtype bf16
good "bf16, bf16 gradients, evaluation" 'for step in steps: states(step["memory"], 2 * 24160, 2 * 24160, 12 * 24160)
expect([line["step"] for line in evals] == [2, 3], evals)
expect(all(4 < line["loss"] < 7 for line in evals), evals)' --dtype bf16 --grad-dtype bf16 --eval-every 2
good "micro-batches, full recomputation, fp64 said twice" 'expect(len(steps) == 3)' --micro-batch 1 --recompute full \
    --dtype fp64 --grad-dtype fp64 --device auto
good "no steps" 'expect(not steps and summary["loss"] is None, lines)' --steps 0
good "token shards" 'expect(len(steps) == 3, lines)' --data "$work/good.bin"

run --generate 30 && cp "$work/out" "$work/first" && run --generate 30
verdict "--generate repeats itself" "$([ "$code" = 0 ] || echo "exit code $code")$(
    diff <(tail -n 5 "$work/first") <(tail -n 5 "$work/out"))$(ls -A)"
"$program" --steps 0 >"$work/out" 2>"$work/err"
verdict "the repository's own text from any folder" "$([ $? = 0 ] || echo "exit code")$(cat "$work/err")$(ls -A)"

# ---- the commit of the build ----
run --steps 0 --metrics m.jsonl
commit=$(python3 -c 'import json; print(json.loads(open("m.jsonl").readline())["version"]["commit"])')
rm -f m.jsonl
run --version
verdict "--version: the metrics file's commit" "$([ "$code" = 0 ] || echo "exit code $code")$(
    [ "$(cat "$work/out")" = "01_single_gpu: commit $commit" ] || cat "$work/out")$(cat "$work/err")$(ls -A)"
"${program%/*}/compare" --version >"$work/out" 2>"$work/err"
verdict "--version of a program with other flags" "$([ $? = 0 ] || echo "exit code")$(
    [ "$(cat "$work/out")" = "compare: commit $commit" ] || cat "$work/out" "$work/err")"
if command -v git >/dev/null && command -v cmake >/dev/null; then
    mkdir -p "$work/repository/inner" && cd "$work/repository" || exit 1
    version() { # FOLDER: the commit that a build of it would have
        cmake -D SOURCE="$1" -D OUTPUT="$work/version.cpp" -P "$source/01_single_gpu/core/version.cmake" 2>&1
        sed -n 's/.*return "\(.*\)".*/\1/p' "$work/version.cpp"
    }
    version "$work/repository" >"$work/out"
    verdict "a build without git" "$([ "$(cat "$work/out")" = unknown ] || cat "$work/out")"
    echo 1 >file && git init -q && git add file && git -c user.name=x -c user.email=x commit -qm x
    version "$work/repository" >"$work/out"
    verdict "a build of a commit" "$([ "$(cat "$work/out")" = "$(git describe --always --abbrev=12)" ] || cat "$work/out")"
    touch -d 2001-01-01 "$work/version.cpp"
    version "$work/repository" >/dev/null
    verdict "an unchanged commit: nothing to compile" "$([ "$(date -r "$work/version.cpp" +%Y)" = 2001 ] || echo rewritten)"
    echo 2 >file
    version "$work/repository" >"$work/out"
    verdict "a build of changed files" "$(grep -q '^[0-9a-f]*-dirty$' "$work/out" || cat "$work/out")"
    version "$work/repository/inner" >"$work/out"
    verdict "a build inside another repository" "$([ "$(cat "$work/out")" = unknown ] || cat "$work/out")"
    cd "$work/run" || exit 1
fi

# A CPU that OpenBLAS takes for an older one: it says Prescott until the environment chooses.
cat >"$work/core.c" <<'C'
#include <stdlib.h>
const char* openblas_get_corename(void) {
    return getenv("OPENBLAS_CORETYPE") ? getenv("OPENBLAS_CORETYPE") : "Prescott";
}
C
if grep -q avx2 /proc/cpuinfo && ! ldd "$program" | grep -q asan && g++ -x c -shared -fPIC "$work/core.c" -o "$work/core.so"; then
    line=$(env -u OPENBLAS_CORETYPE LD_PRELOAD="$work/core.so" "$program" --steps 0 | head -1)
    [[ $line =~ \(OpenBLAS\ (Haswell|SkylakeX|Cooperlake)\ kernels ]] || bad="$line"
    line=$(OPENBLAS_CORETYPE=Nehalem LD_PRELOAD="$work/core.so" "$program" --steps 0 | head -1)
    [[ $line == *"(OpenBLAS Nehalem kernels"* ]] || bad="$line"
    verdict "kernels that fit the CPU, unless the environment chooses" "${bad:-}"
fi
exit $failed
