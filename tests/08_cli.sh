#!/bin/bash
# The command line of chapter 08: layouts through files, the dry run, the probe, and bad input: one line, exit code 2 on all
# ranks.
# Run: bash tests/08_cli.sh build/bin
program=08_3d_full
. "$(dirname "$0")/ranks.sh"

tables= # it has no such flag
refused "a product unlike the ranks" 4 "--tp 2 x --cp 1 x --dp 4 x --pp 1 = 8 ranks, but there are 4 (try mpirun -np 8, or --dp 2)" --tp 2 --dp 4

shape=(--layers 4 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8 --init-std 0.1
    --lr 0.001 --data "$root/README.md")
losses() { grep '"event":"step"' "$1" | grep -o '"loss":[0-9.]*'; }
same_evals() { # FILE FILE: prints them where they are not within the course's bound
    python3 - "$@" <<'P'
import json, sys
a, b = ([json.loads(l)["loss"] for l in open(name) if '"event":"eval"' in l] for name in sys.argv[1:])
if not (len(a) == len(b) == 2 and all(abs(x / y - 1) <= 5e-6 for x, y in zip(a, b))):
    print("evaluations", a, "not", b)
P
}
one_rank --val-fraction 0.2 --eval-every 1 --metrics one.jsonl
run 1 "$bin/$program" "${shape[@]}" --steps 2 --val-fraction 0.2 --eval-every 1 --metrics m.jsonl
verdict "on one rank: chapter 01's losses, bit for bit" "$(ends 0 20)$([ "$(losses m.jsonl)" = "$(losses one.jsonl)" ] || echo "other losses")"
layouts=("--dp 2 --tp 2 --pp 2 --zero 1" "--tp 2 --sequence-parallel on --cp 2 --pp 2 --pipeline zero-bubble --zero 3"
    "--cp 2 --pp 2 --dp 2 --pipeline interleaved --zero 2 --micro-batch 1" "--tp 4 --dp 2 --zero 3 --tp-overlap on --sequence-parallel on")
slice=${TRAIN70B_TEST_SLICE:-all}
if [ "$slice" != all ]; then layouts=("${layouts[@]:slice % 2 * 2:2}"); fi # half of them, in turn
for flags in "${layouts[@]}"; do
    rm -rf layout layout_reference
    run 8 "$bin/$program" "${shape[@]}" $flags --steps 2 --val-fraction 0.2 --eval-every 1 --save-hf layout --save-reference layout_reference \
        --metrics m.jsonl --comm-check on
    verdict "reference, weights and evaluation with $flags" "$(ends 0 40)$(like_one_rank layout_reference)$(
        same_evals m.jsonl one.jsonl)$(
        python3 - layout one <<'P'
import json, pathlib, struct, sys
def tensors(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, t in json.loads(data[8:8 + size]).items():
            if name != "__metadata__":
                begin, end = t["data_offsets"]
                found[name] = struct.unpack(f"<{(end - begin) // 4}f", data[8 + size + begin:8 + size + end])
    return found
a, b = (tensors(f) for f in sys.argv[1:])
if not a or a.keys() != b.keys():
    print("other tensors", sorted(a), sorted(b))
for name in a:
    far = max(abs(x - y) for x, y in zip(a[name], b[name]))
    if not (far <= 1e-4 and len(a[name]) == len(b[name])):
        print(name, far)
P
)"
done

# Models in Hugging Face's format, from a pipeline to one rank and back: tied, and with a sigmoid router's biases.
shape_loaded=(--seq-len 32 --global-batch 8 --lr 0.001 --dtype fp64 --load-hf model)
goes_round() { # WHAT "FLAG..." (of the model) "FLAG..." (of all runs) "FLAG..." (of the layout that saves it) "FLAG..." (that load it)...
    local what=$1 all=$3 flags
    rm -rf model loaded_one
    run 4 "$bin/$program" "${shape[@]}" --dtype fp64 --steps 2 $2 $all $4 --save-hf model
    verdict "$what is saved" "$(ends 0 20)"
    run 1 "$bin/$program" "${shape_loaded[@]}" --steps 2 $all --save-reference loaded_one
    verdict "$what is loaded on one rank" "$(ends 0 20)"
    for flags in "${@:5}"; do
        run 4 "$bin/$program" "${shape_loaded[@]}" $all $flags --steps 2 --save-reference loaded
        verdict "$what is loaded with $flags: one rank's run" "$(ends 0 20)$(
            "$bin/compare" loaded loaded_one 2>&1 | tail -n 1 | grep -q "agree within 1e-10" || "$bin/compare" loaded loaded_one 2>&1)"
        rm -rf loaded
    done
}
goes_round "a model with experts and biases" "--router sigmoid --qk-norm on --experts 4 --expert-ffn 16 --shared-experts 1" "--router-bias-rate 0.05" \
    "--dp 2 --pp 2 --ep 2" "--tp 2 --pp 2 --sequence-parallel on --ep 2 --zero 3" "--dp 4 --ep 4 --zero 1"
verdict "its biases have moved" "$(python3 - "$root/docs" model/model.safetensors <<'P'
import sys
sys.path[:0] = [sys.argv[1]]
from validate import comparison
from validate.runs import Safetensors
biases = {name: values for name, values in Safetensors(sys.argv[2]).all().items() if name.endswith("e_score_correction_bias")}
if len(biases) != 4 or not all((abs(values) > 0.04).any() for values in biases.values()):
    print(biases)
P
)"
goes_round "a tied model" "--tied-embeddings on" "" "--tp 2 --pp 2 --zero 3" "--pp 4" "--tp 2 --pp 2 --zero 3 --pipeline interleaved --micro-batch 1" "--tp 4"
verdict "it is tied" "$(grep -q '"tie_word_embeddings": true' model/config.json || echo "not tied; ")$(
    grep -aq lm_head model/model.safetensors && echo "with a head")"
run 1 "$bin/$program" "${shape[@]}" --comm fake --fake-world 4 --tp 2 --pp 2 --tied-embeddings on --dry-run
verdict "a dry run of a tied model: params, grads and optimizer the formula's" "$(ends 0 20)$(for kind in params grads optimizer; do
    grep -qE "^$kind +([0-9]+) +\\1\$" "$work/out" || echo "not the formula's: $(grep "^$kind" "$work/out"); "; done)"

run 4 "$bin/$program" "${shape[@]}" --tp 2 --pp 2 --steps 1 --probe on
verdict "the probe, the picture, the memory" "$(ends 0 30)$(for word in "stage 1" "probe of 4 ranks" "tp, all-reduce over 2" "pp, shift over 2" "formula"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)"
slow_rank() { # of m.jsonl: whether its events name rank 3 and its host
    python3 -c "
import json, socket
events = {e['event']: e for e in map(json.loads, open('m.jsonl'))}
hosts, slow = events['hosts']['hosts'], events['probe']['slow']
if hosts != [hosts[0]] * 4 or not hosts[0] or not all(s['host'] == hosts[0] and s['of_median'] < 0.8 for s in slow):
    print('hosts', hosts, slow)
if not any(s['rank'] == 3 and s['what'].startswith('product') for s in slow):
    print('rank 3 is not slow:', slow)"
}
# OpenBLAS's oldest kernels make a rank slow.
mixed() { run 3 "$bin/$program" "$@" : -np 1 env OPENBLAS_CORETYPE=Prescott "$bin/$program" "$@"; }
strict() { ends 3 20; slow_rank; grep -qF "exit code 3" "$work/out" || echo "no word of it"; grep '"event":"step"' m.jsonl; }
goes_on() { ends 0 20; slow_rank; grep -q '"event":"step"' m.jsonl || echo "it did not train"; }
probe() { # strict|on CHECK: four ranks on two cores, and what else runs: one of three attempts shows who is slow
    local attempt
    for attempt in 1 2 3; do
        mixed "${shape[@]}" --steps 1 --probe "$1" --metrics m.jsonl
        problem=$("$2")
        [ -n "$problem" ] || break
    done
}
probe strict strict
verdict "--probe strict: exit code 3, and who is slow" "$problem"
probe on goes_on
verdict "--probe on: who is slow, and the run goes on" "$problem"
run 1 "$bin/$program" --model 70b --comm fake --fake-world 64 --tp 8 --pp 4 --zero 1 --sequence-parallel on --dtype bf16 --recompute full \
    --seq-len 4096 --global-batch 16 --micro-batch 1 --dry-run
verdict "a dry run of 70B on 64: every rank under 80 GB, params, grads and optimizer the formula's" "$(ends 0 60)$(python3 - "$work/out" <<'P'
import re, sys
text = open(sys.argv[1]).read()
for kind in ("params", "grads", "optimizer"):
    match = re.search(rf"^{kind} +(\d+) +(\d+)$", text, re.M)
    if not match or match[1] != match[2]:
        print("not the formula's:", kind, match and match.groups())
totals = [float(line.split()[-2]) for line in text.splitlines() if "(stage" in line]
if not totals or not all(0 < total < 80 for total in totals):
    print("totals", totals)
P
)$(grep -q "^largest: rank" "$work/out" || echo "no largest rank")"
run 1 "$bin/$program" "${shape[@]}" --comm fake --fake-world 16 --tp 2 --cp 2 --pp 2 --zero 3 --dtype fp64 --dry-run
verdict "a dry run in fp64: params, grads and optimizer the formula's" "$(ends 0 60)$(for kind in params grads optimizer; do
    grep -qE "^$kind +([0-9]+) +\\1\$" "$work/out" || echo "not the formula's: $(grep "^$kind" "$work/out"); "; done)"
run 1 "$bin/$program" "${shape[@]}" --comm fake --fake-world 4 --fake-rank 3 --pp 2 --dry-run --metrics m.jsonl --memory-timeline t.csv
verdict "a dry run's files" "$(ends 0 20)$(grep '"event":"summary"' m.jsonl | grep -q '"rank":3' || echo "no rank 3")$([ -s t.csv ] || echo "no timeline")"
run 1 "$bin/$program" "${shape[@]}" --comm fake --fake-world 16 --fake-rank 5 --tp 2 --pp 2 --cp 2 --steps 2 --metrics m.jsonl
verdict "one rank of 16, really computed" "$(ends 0 30)$(grep -q '"rank":5' m.jsonl || echo "no rank 5: $(tail -n 1 m.jsonl | head -c 300)")"

run 8 "$bin/$program" "${shape[@]}" --tp 2 --pp 2 --dp 2 --micro-batch 1 --steps 2 --trace t.json --metrics m.jsonl
verdict "a trace of all ranks, with their places; the slowest rank; Prometheus" "$(ends 0 30)$(python3 "$root/docs/prometheus.py" --once m.jsonl p.prom)$(python3 - <<'P'
import json
events = json.load(open("t.json"))["traceEvents"]
titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
expected = {r: f"rank {r} (tp {r % 2}, dp {r // 2 % 2}, pp {r // 4})" for r in range(8)}
if titles != expected:
    print(titles)
for rank in range(8):
    spans = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
    for name, count in ("update", 2), ("tp.all_reduce", 2):
        if sum(e["name"] == name for e in spans) < count:
            print(f"rank {rank}: too few of {name}")
    if not any(e.get("args", {}).get("group") == "tp" for e in spans):
        print(f"rank {rank}: no span of the group tp")
steps = [e for e in map(json.loads, open("m.jsonl")) if e["event"] == "step"]
for step in steps:
    s = step["straggler"]
    if not (0 <= s["rank"] < 8 and 0 < s["median_busy_s"] <= s["busy_s"] and s["waited_s"] >= 0):
        print(s)
if "train70b_step 2\n" not in open("p.prom").read():
    print(open("p.prom").read()[:300])
P
)"
rm -f t.json p.prom

# ---- a rank that dies or stands still ----
training=("$bin/$program" "${shape[@]}" --tp 2 --pp 2 --dp 2 --zero 1 --micro-batch 1 --steps 1000000)
strike KILL 3 8 "${training[@]}"
verdict "SIGKILL: the others end at once" "$([ "$code" != 0 ] || echo "exit code 0")$(
    within 5)$(says "terminated by SIGTERM")"
strike STOP 6 8 "${training[@]}" --comm-timeout 4
verdict "SIGSTOP: all end within the timeout and 5 s" "$([ "$code" != 0 ] || echo "exit code 0")$(
    within 9)$(says "has not ended after 4 s (--comm-timeout)" "NOT ENDED")"
exit $failed
