#!/bin/bash
# The command line of chapter 03: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/03_cli.sh build/bin
program=03_zero
. "$(dirname "$0")/ranks.sh"

refused "more than the host has" 2 "--offload optimizer: needs|of host memory on this node|are available" --model 405b --offload optimizer

# A model that is saved from shards and loaded into shards is the model, and a reference run is one rank's.
shape=(--layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16 --global-batch 4 --init-std 0.1 --lr 0.001)
one_rank
reference_runs "--zero 0" "--zero 1" "--zero 2 --hybrid-shard 2" "--zero 3" "--zero 3 --offload all --micro-batch 1"
loads_and_saves 2 --zero 3
verdict "evaluation, trace and timeline" "$(evaluated_run --zero 3 --memory-timeline t.csv --offload optimizer)$(equal_comm_bytes)$(
    grep -q split m.jsonl && echo "the split is a step's; ")$(head -n 1 t.csv | grep -q "total,host$" || echo "no host column; ")$(grep -q '"host":' m.jsonl || echo "no host bytes; ")"
workspace() { # of rank 0, at the peak of the last step: with gathered units, which a closure would keep from being freed
    run 2 "$bin/03_zero" "${shape[@]:2}" --layers "$1" --zero 3 --steps 2 --tables off --metrics m.jsonl
    grep '"step":2,' m.jsonl | sed 's/.*"peak"//' | grep -o '"workspace":[0-9]*'
}
few=$(workspace 3) many=$(workspace 6)
verdict "stage 3 holds no more units at once in a deeper model" "$([ -n "$few" ] && [ "$few" = "$many" ] || echo "$few in 3 layers, $many in 6")"
run 2 "$bin/03_zero" "${shape[@]}" --steps 1
verdict "the tables" "$(ends 0 60)$(for word in "stage 2" "offload all" "m G + P" "--prefetch 2" "70b on 64"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)"
exit $failed
