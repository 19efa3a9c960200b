#!/bin/bash
# The command line of chapter 06: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/06_cli.sh build/bin
program=06_context_parallel
. "$(dirname "$0")/ranks.sh"

refused "a sequence that does not divide" 2 "--cp 2 --cp-algorithm ring: --seq-len 127 is not divisible by 2 (try --seq-len 128)" \
    --cp-algorithm ring --seq-len 127
refused "a sequence that zigzag cannot divide" 2 "--cp 2 --cp-algorithm zigzag: --seq-len 130 is not divisible by 2 x 2 (try --seq-len 132)" --seq-len 130
refused "heads that Ulysses cannot divide" 3 "--heads 8 and --kv-heads 4 are not divisible by 3 (try --cp 2)" --cp-algorithm ulysses --seq-len 129
refused "a group that does not divide" 4 "--cp 4 is not divisible by --ulysses-size 3 (try --ulysses-size 2)" --cp-algorithm hybrid --ulysses-size 3
refused "a group of another algorithm" 2 "--ulysses-size 2: --cp-algorithm zigzag has no such groups (try --cp-algorithm hybrid)" --ulysses-size 2
refused "an algorithm that is none" 2 "--cp-algorithm|zigzag|ulysses|gather" --cp-algorithm star
refused "a sequence that gather cannot divide" 2 "--cp 2 --cp-algorithm gather: --seq-len 130 is not divisible by 2 x 2 (try --seq-len 132)" --cp-algorithm gather --seq-len 130
refused "more context-parallel ranks than there are" 2 "--cp 4: 2 ranks are not divisible by 4 (try mpirun -np 4, or --cp 2)" --cp 4
refused "--cp and --dp unlike the ranks" 4 "--dp 4: there are 4 ranks, 2 per model copy (try mpirun -np 8, or --dp 2)" --cp 2 --dp 4
refused "--cp of nothing" 2 "--cp|integer >= 1" --cp 0

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
verdict "the tables" "$(ends 0 60)$(for word in "hybrid 2 x 1" "gather" "CPU ms" "one rank's / N" "dry run" "1048576"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)"
exit $failed
