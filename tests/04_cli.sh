#!/bin/bash
# The command line of chapter 04: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/04_cli.sh build/bin
program=04_tensor_parallel
. "$(dirname "$0")/ranks.sh"

refused "heads that do not divide" 3 "--heads 8 is not divisible by --tp 3 (try --tp 1, 2, 4 or 8)" --tp 3

# A model that is saved from its parts and loaded into parts is the model, and a reference run is one rank's.
shape=(--layers 1 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 16 --global-batch 4 --init-std 0.1 --lr 0.001)
one_rank
reference_runs "--tp 4" "--tp 4 --sequence-parallel on" "--tp 4 --sequence-parallel on --tp-overlap on" \
    "--tp 2 --dp 2 --tp-overlap on --micro-batch 1" "--dp 2 --sequence-parallel on --recompute full"
loads_and_saves 4
verdict "evaluation, trace, metrics" "$(evaluated_run --sequence-parallel on)$(
    grep -q '"tp.reduce_scatter"' m.jsonl || echo "no tp.reduce_scatter; ")$(equal_comm_bytes)"
run 4 "$bin/$program" "${shape[@]}" --steps 1 --efficiency-csv e.csv
verdict "the tables" "$(ends 0 60)$(for word in "tp 4, sequence, overlap" "6 all_gather, 4 reduce_scatter" "tp 4  " "NVLink" "70b, tp 8"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)$([ "$(wc -l <e.csv)" = 37 ] || echo "efficiency.csv: $(wc -l <e.csv) lines")"
exit $failed
