#!/bin/bash
# Drills: each fault that --inject knows ends the run, or does not, as its lesson says; --replica-check finds a flipped
# bit in every layout that has replicas, and nothing in a correct run.
# Run: bash tests/08_faults.sh build/bin
program=08_3d_full
. "$(dirname "$0")/ranks.sh"
shape=(--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8 --init-std 0.1 --lr 0.001)
train() { run 4 "$bin/$program" "${shape[@]}" --steps 6 "$@"; }
losses() { grep '"event":"step"' "$1" | grep -o '"loss":[0-9.]*'; }
announced() { # KIND RANK STEP: at the start, and when it strikes
    grep -qF "FAULT INJECTION: $1 of rank $2 at step $3" "$work/out" || echo "not announced; "
    says "FAULT INJECTION: rank $2: $1 at step $3"
}
steps_of() { grep -c '"event":"step"' "$1"; }
tables= # it has no such flag
refused "a rank that does not exist" 2 "--inject kill:2:1: valid ranks are 0 to 1" --inject nan:0:1,kill:2:1
refused "a deadlock of one group" 2 "--inject deadlock:0:1: takes two groups|--tp 2 --dp 2" --inject deadlock:0:1
refused "a wrong group of what is no expert's" 2 "--inject wrong-group:0:1:lm_head.weight: \"lm_head.weight\" is no parameter of experts" \
    --experts 8 --ep 2 --inject wrong-group:0:1:lm_head.weight
refused "replicas where nothing is replicated" 2 "--replica-check 1: --zero 3 keeps one copy|--hybrid-shard" --replica-check 1 --zero 3
refused "replicas of pipeline stages" 2 "--replica-check 1: no two ranks hold the same" --replica-check 1 --pp 2

# ---- faults that end a run ----
train --inject kill:1:3 --metrics m.jsonl
verdict "kill: the others end at once" "$([ "$code" != 0 ] || echo "exit code 0; ")$(within 5)$(
    announced kill 1 3)$([ "$(steps_of m.jsonl)" = 2 ] || echo "$(steps_of m.jsonl) steps; ")$(
    grep -q '"--inject":"kill:1:3"\|"inject":"kill:1:3"' m.jsonl || echo "not in the metrics")"
train --inject hang:2:3 --comm-timeout 2
verdict "hang: ends after the timeout, naming the collective" "$(ends 1 9)$(announced hang 2 3)$(
    says "dp.all_reduce #" "has not ended after 2 s (--comm-timeout)" "NOT ENDED")"
train --inject stop:2:3 --comm-timeout 2
verdict "stop: ends after the timeout" "$(ends 1 9)$(announced stop 2 3)$(says "has not ended after 2 s (--comm-timeout)")"
for zero in "--zero 0" "--zero 1" "--zero 2" "--zero 3" "--zero 3 --offload all" "--dp 2 --tp 2 --zero 1"; do
    train --inject nan:1:3 $zero
    name=$(sed -n 's/.*the gradient of \(.*\) has a NaN$/\1/p' "$work/err")
    verdict "nan with $zero: exit code 1, the parameter is named" "$(ends 1 8)$(announced nan 1 3)$(
        [ -n "$name" ] || echo "no parameter; ")$(
        says "$program: step 3: loss" "first non-finite parameter: $name (its gradient) on rank 1 (1 of 4 ranks has one)")"
done
train --inject nan:2:3:model.layers.1.mlp.gate_proj.weight
verdict "nan in a parameter: that one" "$(ends 1 8)$(
    says "first non-finite parameter: model.layers.1.mlp.gate_proj.weight (its gradient) on rank 2 (1 of 4 ranks has one)")"
for axis in "--tp 2 --dp 2" "--tp 2 --cp 2 --zero 1"; do
    train $axis --inject deadlock:1:3 --comm-timeout 2
    verdict "deadlock with $axis: two ranks wait in either group" "$(ends 1 9)$(announced deadlock 1 3)$(announced deadlock 2 3)$(
        says "has not ended after 2 s (--comm-timeout)")$(
        for call in "rank [12]:   tp.scalar" "rank [03]:   [a-z_]*.scalar"; do
            [ "$(grep -cE "$call.*NOT ENDED" "$work/err")" = 2 ] || echo "not two: $call; "
        done)"
done
for axis in "--dp 4" "--tp 4" "--zero 1" "--zero 3"; do
    train $axis --inject skip-collective:1:3 --comm-check on
    verdict "skip-collective with $axis: found at once by --comm-check" "$(ends 1 6)$(announced skip-collective 1 3)$(
        says "mismatch" "scalar")"
done
for axis in "--dp 4" "--tp 4" "--pp 2 --dp 2" "--pp 2 --tp 2"; do
    train $axis --inject skip-collective:1:3 --comm-check off --comm-timeout 2
    verdict "skip-collective with $axis: otherwise by a message of another length or after the timeout" "$(ends 1 9)$(
        grep -qE "has not ended after 2 s \(--comm-timeout\)|message truncated" "$work/err" || head -c 800 "$work/err")"
done

# ---- faults that do not ----
train --metrics plain.jsonl
verdict "no fault" "$(ends 0 10)$(grep -q "FAULT" "$work/out" "$work/err" && echo "a fault is named")"
train --inject slow:1:4 --metrics m.jsonl
verdict "slow: completes, with the same losses" "$(ends 0 10)$(announced slow 1 4)$(
    [ "$(losses m.jsonl)" = "$(losses plain.jsonl)" ] || echo "other losses")"
# steps of many milliseconds: the machine's scheduler takes turns of a few
run 2 "$bin/$program" --layers 2 --hidden 128 --heads 4 --ffn 256 --seq-len 64 --global-batch 16 --steps 60 \
    --inject slow:1:31 --metrics m.jsonl
verdict "slow: the steps take longer" "$(ends 0 10)$(python3 - m.jsonl <<'P'
import json, statistics, sys
times = [json.loads(line)["step_s"] for line in open(sys.argv[1]) if '"event":"step"' in line]
ratio = statistics.median(times[30:]) / statistics.median(times[:30])
if not ratio > 1.4:
    print("only", ratio)
P
)"
train --inject bitflip:3:2 --metrics m.jsonl
verdict "bitflip: silent, other losses from the next step on" "$(ends 0 10)$(announced bitflip 3 2)$(
    [ "$(losses m.jsonl | head -n 2)" = "$(losses plain.jsonl | head -n 2)" ] || echo "other losses before it; ")$(
    [ "$(losses m.jsonl)" != "$(losses plain.jsonl)" ] || echo "the same losses")"
train --inject slow:0:2,bitflip:3:2,kill:2:5 --metrics m.jsonl
verdict "a list of faults" "$([ "$code" != 0 ] || echo "exit code 0; ")$(announced slow 0 2)$(announced bitflip 3 2)$(announced kill 2 5)"
run 1 "$bin/01_single_gpu" "${shape[@]}" --steps 6 --dtype fp64 --save-reference one
left_out=model.layers.1.mlp.gate_proj.weight
for axis in "--zero 0" "--zero 1 --micro-batch 1" "--zero 2 --micro-batch 1" "--zero 3 --recompute full" "--tp 2 --dp 2 --zero 0" \
    "--pp 2 --dp 2 --pipeline zero-bubble --zero 1"; do
    train --dtype fp64 $axis --inject wrong-sum:3:1:$left_out --save-reference four
    verdict "wrong-sum with $axis: completes" "$(ends 0 10)$(announced wrong-sum 3 1)"
    "$bin/compare" four one >"$work/out"
    verdict "wrong-sum with $axis: one gradient is wrong" "$([ $? = 1 ] || echo "compare: not exit code 1; ")$(
        grep -q "gradient: $left_out at step 1 by 0\.[1-9].*(1 of 21 exceed it)" "$work/out" || cat "$work/out")"
    rm -rf four
done
train --inject wrong-sum:3:4 --replica-check 1 --metrics m.jsonl
verdict "wrong-sum: the replicas stay equal; other losses from the next step on" "$(ends 0 10)$(
    [ "$(losses m.jsonl | head -n 4)" = "$(losses plain.jsonl | head -n 4)" ] || echo "other losses before it; ")$(
    [ "$(losses m.jsonl)" != "$(losses plain.jsonl)" ] || echo "the same losses")"
sparse="--dtype fp64 --experts 8 --ep 2 --zero 1"
train $sparse --metrics sparse.jsonl
train $sparse --inject wrong-group:1:4,wrong-group:3:4 --replica-check 1 --metrics m.jsonl
norms() { grep '"event":"step"' "$1" | grep -o '"grad_norm":[0-9.]*'; }
verdict "wrong-group: the replicas stay equal; another norm from its step on, other losses from the next" "$(ends 0 10)$(
    [ "$(norms m.jsonl | head -n 3)" = "$(norms sparse.jsonl | head -n 3)" ] || echo "other norms before it; ")$(
    [ "$(norms m.jsonl | sed -n 4p)" != "$(norms sparse.jsonl | sed -n 4p)" ] || echo "the same norm; ")$(
    [ "$(losses m.jsonl | head -n 4)" = "$(losses sparse.jsonl | head -n 4)" ] || echo "other losses before it; ")$(
    [ "$(losses m.jsonl | sed -n 5p)" != "$(losses sparse.jsonl | sed -n 5p)" ] || echo "the same loss")"
run 1 "$bin/01_single_gpu" "${shape[@]}" --steps 6 --dtype fp64 --experts 8 --save-reference sparse_one
train $sparse --inject wrong-group:1:1,wrong-group:3:1 --save-reference halved
"$bin/compare" halved sparse_one >"$work/out"
verdict "wrong-group: half of the experts' gradients are halved in a reference" "$([ $? = 1 ] || echo "compare: not exit code 1; ")$(
    grep -q "the 24 wrong ones are 1/2 x the reference's, nothing else" "$work/out" || cat "$work/out")"
train --inject bitflip:1:2:model.norm.weight --replica-check 1
verdict "bitflip in a parameter: that one" "$(ends 1 10)$(
    says "--replica-check: after step 2: the weight of model.norm.weight differs on rank 1 from ranks 0, 2 and 3")"

# ---- replicas ----
found() { # STEP EQUAL PART...: exit code 1, one line, the step after which it was found and the last one before
    ends 1 10
    says "--replica-check: after step $1: the " "resume from the newest checkpoint before step $(($2 + 1))" "${@:3}"
    [ "$(grep -c -- "--replica-check: after" "$work/err")" = 1 ] || echo "not one line; "
    grep -q "\"event\":\"replicas_differ\",\"step\":$1,\"equal\":$2" m.jsonl || echo "no event; "
}
drill() { # "FLAG..." EVERY STEP EQUAL PART...: rank 3 flips a bit after step 2
    train --inject bitflip:3:2 --replica-check "$2" --metrics m.jsonl $1
    local name
    name=$(sed -n 's/.*after step 2: \(.*\), element.*/\1/p' "$work/err")
    verdict "a flipped bit with $1 --replica-check $2" "$(found "$3" "$4" "of $name differs " "${@:5}")"
}
drill "--zero 0" 1 2 1 "weight of" "on rank 3 from ranks 0, 1 and 2"
drill "--zero 0" 3 2 0 "on rank 3 from ranks 0, 1 and 2"
drill "--zero 0" 4 3 0 "on rank 3 from ranks 0, 1 and 2"
drill "--zero 0" 100 6 0 "on rank 3 from ranks 0, 1 and 2"
drill "--zero 1" 1 2 1 "on rank 3 from ranks 0, 1 and 2"
drill "--zero 2" 1 2 1 "on rank 3 from ranks 0, 1 and 2"
drill "--zero 2 --dtype bf16" 1 2 1 "on rank 3 from ranks 0, 1 and 2"
drill "--zero 3 --hybrid-shard 2" 2 3 1 "between ranks 1 and 3; to tell which is wrong takes a majority of three or more"
drill "--zero 3 --hybrid-shard 1" 2 3 1 "on rank 3 from ranks 0, 1 and 2"
drill "--zero 1 --hybrid-shard 2" 1 2 1 "on rank 3 from ranks 0, 1 and 2"
drill "--cp 2 --dp 2 --zero 0" 2 3 1 "on rank 3 from ranks 0, 1 and 2"
drill "--tp 2 --dp 2 --zero 0" 2 3 1 "between ranks 1 and 3"
train --pp 2 --zero 3 --tied-embeddings on --inject bitflip:0:2 --replica-check 1 --metrics m.jsonl
verdict "a flipped bit in the tied matrix" "$(found 2 1 "weight of model.embed_tokens.weight differs" "between ranks 0 and 2")"
train --experts 8 --ep 4 --zero 1 --inject bitflip:3:2:model.layers.0.mlp.experts.down_proj --replica-check 1
verdict "a flipped bit in the only copy of an expert: not compared, which the run says" "$(ends 0 10)$(
    grep -qF "not compared: the shards of the optimizer states, which have one copy; experts, which have one copy)" "$work/out" ||
        grep "replica check" "$work/out")"
train $sparse --inject bitflip:3:2:model.layers.0.mlp.experts.down_proj --replica-check 1 --metrics m.jsonl
verdict "a flipped bit in one of two copies" "$(found 2 1 "of model.layers.0.mlp.experts.down_proj differs" "between ranks 1 and 3")$(
    grep "replica check every.*experts" "$work/out")"
shape[5]=2 # heads; with one key/value head, two tensor-parallel ranks hold it
shape[7]=1

quiet() { # RANKS FLAG...
    run "$1" "$bin/$program" "${shape[@]}" --steps 4 --replica-check 1 "${@:2}"
    verdict "equal replicas: $1 ranks ${*:2}" "$(ends 0 30)$(grep -qF "replica check every step" "$work/out" ||
        echo "no check; ")$(cat "$work/err" | head -c 500)"
}
quiet 4 --tp 2 --dp 2 --sequence-parallel on --zero 0
shape[5]=4
shape[7]=2
quiet 4 --zero 0 --dtype bf16
quiet 4 --zero 1 --dtype bf16 --optimizer adamw8bit
quiet 4 --zero 0 --optimizer adamw8bit
quiet 4 --zero 2 --offload optimizer
quiet 4 --zero 3 --hybrid-shard 2 --dtype bf16
quiet 4 --zero 3 --hybrid-shard 2 --offload all
quiet 4 --zero 3 --hybrid-shard 2 --optimizer adamw8bit
quiet 4 --tp 4 --sequence-parallel on --zero 0
quiet 4 --tp 2 --dp 2 --sequence-parallel on --zero 3 --dtype bf16
quiet 8 --tp 2 --pp 2 --dp 2 --zero 1 --tp-overlap on --sequence-parallel on
quiet 8 --cp 2 --pp 2 --dp 2 --zero 0 --pipeline zero-bubble
quiet 4 --pp 2 --zero 3 --tied-embeddings on
quiet 8 --tp 2 --pp 2 --zero 1 --tied-embeddings on --sequence-parallel on --dtype bf16 --optimizer adamw8bit
quiet 8 --tp 2 --cp 2 --dp 2 --zero 2 --sequence-parallel on --fp8 delayed --dtype bf16
exit $failed
