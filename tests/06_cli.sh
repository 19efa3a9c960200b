#!/bin/bash
# The command line of chapter 06: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/06_cli.sh build/bin
program=06_context_parallel
. "$(dirname "$0")/ranks.sh"

refused "heads that Ulysses cannot divide" 3 "--heads 8 and --kv-heads 4 are not divisible by 3 (try --cp 2)" --cp-algorithm ulysses --seq-len 129

shape=(--layers 1 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 4 --init-std 0.1 --lr 0.001)
one_rank
reference_runs "--cp-algorithm ring" "--cp-algorithm zigzag --recompute full" "--cp-algorithm ulysses" "--cp-algorithm hybrid" \
    "--cp-algorithm gather --recompute pointwise" "--cp 2 --dp 2 --micro-batch 1"
verdict "evaluation, trace, metrics" "$(evaluated_run)$(
    grep -q '"cp_ring.send_recv"' m.jsonl || echo "no cp_ring.send_recv; ")"
run 2 "$bin/$program" "${shape[@]}" --steps 1 --cp-algorithm gather --tables off --metrics m.jsonl --trace t.json --memory-timeline t.csv
verdict "gather: trace, metrics, timeline" "$(ends 0 20)$(cat "$work/err")$(
    for word in '"cp_gather.all_gather"' '"cp_gather.reduce_scatter"'; do grep -q "$word" m.jsonl || echo "no $word; "; done)$(
    grep -q 'cp_gather.all_gather' t.json || echo "not in the trace; ")$(
    grep -q ',comm,' t.csv || echo "no timeline; ")"
run 2 "$bin/$program" "${shape[@]}" --steps 1
verdict "the tables" "$(ends 0 60)$(for word in "hybrid 2 x 1" "gather" "CPU ms" "one rank's / N"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)"
exit $failed
