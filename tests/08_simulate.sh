#!/bin/bash
# --simulate and --probe-file of chapter 08: the tables and the trace of a simulated step; links that a simulation reads.
# Run: bash tests/08_simulate.sh build/bin
program=08_3d_full
. "$(dirname "$0")/ranks.sh"
clusters=$root/08_3d_full/clusters
shape=(--layers 4 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 256 --seq-len 32)
fake=(--comm fake --fake-world 16 --tp 2 --cp 2 --pp 2 --zero 1 --global-batch 16 --micro-batch 1)


milliseconds() { sed -nE 's/^the step +([0-9.]+) +100.0%$/\1/p' "$work/out"; }
run 1 "$bin/$program" "${shape[@]}" "${fake[@]}" --simulate "$clusters/h100-8x8.json" --trace t.json
plain=$(milliseconds)
verdict "a simulated step: its parts add up, its trace fits into it" "$(ends 0 20)$(python3 - "$work/out" t.json <<'P'
import json, re, sys
rows = re.findall(r"^(.+?) +([\d.]+) +([\d.]+)%$", open(sys.argv[1]).read().split("simulated step")[1].split("\n\n")[0], re.M)
*parts, (name, step, share) = [(name, float(ms), float(share)) for name, ms, share in rows]
if name != "the step" or not abs(sum(ms for _, ms, _ in parts) - step) <= 1e-3 * len(parts):
    print("the parts do not add up:", rows)
if not {"computation", "pp: waiting for other ranks"} <= {name for name, _, _ in parts}:
    print("rows", [name for name, _, _ in parts])
events = json.load(open(sys.argv[2]))["traceEvents"]
spans = [e for e in events if e["ph"] == "X"]
if {e["pid"] for e in spans} != {0, 8} or not {"F0", "B0", "matmul", "tp.all_reduce", "update"} <= {e["name"] for e in spans}:
    print("spans of", {e["pid"] for e in spans}, sorted({e["name"] for e in spans}))
if not all(e["ts"] >= 0 and e["dur"] >= 0 and e["ts"] + e["dur"] <= 1e3 * step + 1 for e in spans):
    print("a span outside the step")
if not any(e["ph"] == "C" and e["args"]["activations"] > 0 for e in events):
    print("no memory")
P
)"
run 1 "$bin/$program" "${shape[@]}" "${fake[@]}" --simulate "$clusters/h100-8x8.json" --simulate-slow 5:3
verdict "a slow rank" "$(ends 0 20)$(awk "BEGIN {exit !($(milliseconds) > 1.05 * $plain)}" || echo "$plain ms, $(milliseconds) ms")"
run 1 "$bin/$program" "${shape[@]}" "${fake[@]}" --simulate "$clusters/h100-8x8.json" --simulate-slow-network 1:1000
verdict "a slow network" "$(ends 0 20)$(awk "BEGIN {exit !($(milliseconds) > 1.05 * $plain)}" || echo "$plain ms, $(milliseconds) ms")"
between=(--layers 4 --hidden 1024 --heads 8 --kv-heads 4 --ffn 2048 --vocab 256 --seq-len 512 --comm fake --fake-world 16 --tp 2
    --sequence-parallel on --zero 3 --global-batch 16 --micro-batch 1 --simulate "$clusters/h100-8x8.json")
run 1 "$bin/$program" "${between[@]}"
groups=$(milliseconds)
run 1 "$bin/$program" "${between[@]}" --comm-streams one
verdict "--comm-streams one" "$(ends 0 20)$(awk "BEGIN {exit !($(milliseconds) > 1.1 * $groups)}" || echo "$groups ms, $(milliseconds) ms")"
run 1 "$bin/$program" "${shape[@]}" "${fake[@]}" --offload optimizer --simulate "$clusters/h100-8x8.json"
verdict "offload: the simulation says what it leaves out" "$(ends 0 20)$(grep -q "^too fast: the host's update" "$work/out" || echo "no note")"
jitter() { run 1 "$bin/$program" "${shape[@]}" "${fake[@]}" --simulate "$clusters/h100-8x8.json" --simulate-jitter 0.1 --seed "$1" && milliseconds; }
first=$(jitter 1) again=$(jitter 1) other=$(jitter 2)
verdict "jitter is the seed's" "$([ -n "$first" ] && [ "$first" = "$again" ] && [ "$first" != "$other" ] && [ "$first" != "$plain" ] ||
    echo "$plain, $first, $again, $other ms")"

run 2 "$bin/$program" "${shape[@]}" --steps 1 --probe-file links.json
python3 -c "
import json
links = json.load(open('links.json'))
assert links['nodes'] == 1 and links['gpus_per_node'] == 2 and links['host']['bytes_per_s'] > 0, links
device = {'name': 'x', 'peak_bf16': 1e11, 'peak_fp32': 1e11, 'product_efficiency': 1, 'copy_bytes_per_s': 1e10, 'memory_bytes': 1e9, 'launch_s': 0,
          'host_s': 0, 'streams': False}
json.dump({'name': 'here', 'device': device, **links}, open('here.json', 'w'))" 2>links.err
verdict "--probe-file" "$(ends 0 30)$(head -c 500 links.err)"
run 1 "$bin/01_single_gpu" "${shape[@]}" --micro-batch 2 --global-batch 2 --bench-csv ops.csv
verdict "--bench-csv" "$(ends 0 30)"
run 1 "$bin/$program" "${shape[@]}" --comm fake --fake-world 2 --simulate here.json --device-csv ops.csv
verdict "simulated on these links and ops" "$(ends 0 20)$([ -n "$(milliseconds)" ] || echo "no step")"
exit $failed
