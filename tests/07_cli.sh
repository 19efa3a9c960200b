#!/bin/bash
# The command line of chapter 07: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/07_cli.sh build/bin
program=07_fp8
. "$(dirname "$0")/ranks.sh"

refused "outputs that do not divide on a rank" 2 "q, k, v: 120 outputs (--hidden, --heads, --kv-heads) on a rank are not divisible by 16 (try 128)" --tp 2 --fp8-strict on --hidden 144 --heads 6 --kv-heads 2

small=(--hidden 128 --heads 4 --kv-heads 2 --vocab 256 --seq-len 32 --global-batch 8)
shape=("${small[@]}" --layers 2 --ffn 256 --lr 0.001 --steps 4)
losses() { grep '"event":"step"' "$1" | grep -o '"loss":[0-9.]*'; }
"$bin/01_single_gpu" "${shape[@]}" --metrics one.jsonl >"$work/out" 2>"$work/err"
run 1 "$bin/$program" "${shape[@]}" --fp8 off --tables off --metrics off.jsonl
verdict "off: chapter 01's losses, bit for bit" "$(ends 0 20)$([ "$(losses one.jsonl)" = "$(losses off.jsonl)" ] || echo "other losses")"
for recipe in current delayed rowwise blockwise; do
    run 1 "$bin/$program" "${shape[@]}" --fp8 $recipe --tables off --metrics $recipe.jsonl
    verdict "$recipe: other losses" "$(ends 0 20)$([ "$(losses off.jsonl)" != "$(losses $recipe.jsonl)" ] || echo "the same losses")$(
        grep -q "8 of 8 linear layers" "$work/out" || echo "not all layers: $(cat "$work/out")")"
done
run 1 "$bin/$program" "${shape[@]}" --fp8 off --dtype fp64
verdict "fp64: one row of a table, 16 bytes of moments" "$(ends 0 40)$(
    parameters=$((2 * 256 * 128 + 128 + 2 * (2 * 128 + 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256)))
    [ "$(grep -c -- " $((16 * parameters)) " "$work/out")" = 2 ] || cat "$work/out")"
verdict "delayed is not current, from the second step on" "$(
    [ "$(losses delayed.jsonl | sed -n 1p)" = "$(losses current.jsonl | sed -n 1p)" ] || echo "other first losses; ")$(
    [ "$(losses delayed.jsonl | tail -n 1)" != "$(losses current.jsonl | tail -n 1)" ] || echo "the same last loss")"
run 1 "$bin/$program" "${small[@]}" --layers 2 --ffn 200 --steps 1 --tables off
verdict "a layer that stays is named once" "$(ends 0 20)$(
    [ "$(grep -c "stays in fp32: down: 200 inputs (--ffn) on a rank are not divisible by 16 (try 208)" "$work/out")" = 1 ] || cat "$work/out")$(
    grep -q "6 of 8 linear layers" "$work/out" || cat "$work/out")"
for flags in "--zero 3" "--zero 3 --optimizer adamw8bit --dtype bf16" "--tp 2" "--tp 2 --fp8 blockwise"; do
    run 2 "$bin/$program" "${shape[@]}" $flags --tables off --metrics two.jsonl --comm-check on
    verdict "two ranks with $flags" "$(ends 0 20)$(
        python3 - two.jsonl one.jsonl <<'P'
import json, sys
two, one = ([json.loads(l)["loss"] for l in open(f) if '"event":"step"' in l] for f in sys.argv[1:])
if not (len(two) == len(one) == 4 and all(abs(a - b) <= 0.05 for a, b in zip(two, one))):
    print(two, one)
P
)"
done
for recipe in off current; do
    run 2 "$bin/$program" "${shape[@]}" --zero 3 --dtype bf16 --fp8 $recipe --tables off --metrics $recipe.jsonl
done
verdict "ZeRO-3 gathers a block's matrices in half the bytes" "$(python3 - off.jsonl current.jsonl <<'P'
import json, sys
off, on = ([json.loads(l) for l in open(f) if '"event":"step"' in l][-1]["comm_bytes"]["dp.all_gather"] for f in sys.argv[1:])
matrices = 2 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256)  # elements of the two blocks
sent = 2 * matrices / 2  # forward and backward, half of it from the other rank: in bytes of codes
norms = 2 * 2 * 128 * 2  # of the blocks, which travel beside the codes
if not (off - on <= sent and off - on >= sent - 2 * norms):
    print(off, on, sent)
P
)"
run 1 "$bin/$program" "${small[@]}" --layers 2 --ffn 256 --steps 1
verdict "the tables" "$(ends 0 60)$(for word in "mxfp8, scale: OCP floor" "mxfp8, rounded up" "blockwise" "current, adamw8bit"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)"
run 1 "$bin/$program" "${small[@]}" --layers 2 --ffn 256 --lr 1e30 --clip 0 --warmup-steps 0 --steps 9 --tables off
verdict "a run that breaks says so" "$(ends 1 20)$(says "first non-finite parameter")"
exit $failed
