#!/bin/bash
# The command line of chapter 04: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/04_cli.sh build/bin
program=04_tensor_parallel
. "$(dirname "$0")/ranks.sh"

refused "heads that do not divide" 3 "--heads 8 is not divisible by --tp 3 (try --tp 1, 2, 4 or 8)" --tp 3
refused "ffn that does not divide" 4 "--ffn 90 is not divisible by --tp 4 (try --tp 1 or 2)" --tp 4 --ffn 90
refused "key/value heads that neither divide nor can be copied" 4 "--kv-heads 6 is not divisible by --tp 4|(try --tp 1, 2, 3, 6 or 12)" \
    --heads 12 --kv-heads 6 --hidden 96 --ffn 96 --tp 4
refused "a sequence that does not divide" 2 "--sequence-parallel on: --seq-len 127 is not divisible by --tp 2 (try --seq-len 128)" \
    --tp 2 --sequence-parallel on --seq-len 127
refused "more tensor-parallel ranks than there are" 2 "--tp 4: 2 ranks are not divisible by 4 (try mpirun -np 4, or --tp 2)" --tp 4
refused "ranks that tp does not divide" 3 "--tp 2: 3 ranks are not divisible by 2 (try mpirun -np 4, or --tp 1)" --tp 2
refused "--tp and --dp unlike the ranks" 4 "--dp 4: there are 4 ranks, 2 per model copy (try mpirun -np 8, or --dp 2)" --tp 2 --dp 4
refused "--dp alone that does not divide the ranks" 4 "4 ranks are not divisible by --dp 3" --dp 3
refused "--tp of nothing" 2 "--tp|integer >= 1" --tp 0
refused "neither on nor off" 2 "--sequence-parallel|on" --sequence-parallel maybe
refused "overlap neither on nor off" 2 "--tp-overlap|on" --tp-overlap yes
refused "a checkpoint of simulated ranks" 1 "--save-hf x: with --comm fake" --comm fake --fake-world 4 --tp 2 --save-hf x
refused "links without tables" 2 "--links, --efficiency-csv" --links nowhere.json

links() { # NAME TEXT PART: a cluster that is none
    echo "$2" >links.json
    run_refused 2 "$bin/$program" --steps 1 --links links.json --metrics m.jsonl
    verdict "refused: $1" "$(ends 2 10)$(says "--links links.json: $3")$(ls | grep -v '^\(out\|err\|links.json\)$')"
    rm -f links.json
}
node='"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 8'
links "links that are no JSON" "nonsense" "truncated or corrupt"
links "no device" '{"name": "x"}' "device: is missing"
links "a device that is a list" '{"name": "x", "device": []}' "device: must be an object"
links "a device that nobody knows" '{"name": "x", "device": "H1000"}' "device: H1000 is not known (A100, H100, H200, B200;"
links "a link without bandwidth" "{$node, \"nvlink\": {\"seconds\": 1}}" "nvlink.bytes_per_s: is missing"
links "no bandwidth" "{$node, \"rail\": {\"bytes_per_s\": 0, \"seconds\": 1}}" "rail.bytes_per_s: must be above 0"
links "negative latency" "{$node, \"host\": {\"bytes_per_s\": 1e9, \"seconds\": -1}}" "host.seconds: must be at least 0"
links "no links" "{$node}" "nvlink: is missing, and host: 8 devices in a node"
links "one device without links" '{"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 1}' "has no link"
links "an unknown key" "{$node, \"links\": []}" "links: is no key of the format"
links "links that are nested deeply" "$(printf '%200000s' | tr ' ' '[')" "nested deeper than 64 levels"
mkfifo fifo
run_refused 2 "$bin/$program" --steps 1 --links fifo --metrics m.jsonl
verdict "refused: links from a FIFO" "$(ends 2 10)$(says "--links fifo: is not a regular file")"
rm -f fifo
run_refused 2 "$bin/$program" --steps 1 --links missing.json --metrics m.jsonl
verdict "refused: a file of links that is not there" "$(ends 2 10)$(says "--links missing.json: cannot be read")"

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
