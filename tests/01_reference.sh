#!/bin/bash
# Training from a loaded model, against tests/01_reference.py: loss and gradient norm of four clipped AdamW steps on one
# sample of seq-len + 1 tokens. Then build/bin/compare as its user meets it.
# Run: bash tests/01_reference.sh build/bin
set -u
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
bin=$(cd "$1" && pwd)
reference=$(cd "$(dirname "$0")" && pwd)/01_reference.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
for python in python3 /usr/bin/python3 ""; do # the one that has numpy
    [ -z "$python" ] && { echo "no python3 with numpy (Debian: python3-numpy)"; exit 1; }
    $python -c 'import numpy' 2>/dev/null && break
done
failed=0
fail() {
    echo "FAIL $1"
    failed=1
}

# parity NAME MODEL_DIR FLAG=VALUE...: four steps from the model in MODEL_DIR, by both programs. Learning rates are
# small, or eps holds the updates back, because AdamW's first steps divide tiny gradients by their own size: what fp32
# rounds away in them would come back as a whole step.
parity() {
    declare -A value=([lr]=0.001 [min-lr]=0.0001 [warmup-steps]=2 [lr-schedule]=cosine [steps]=4 [weight-decay]=0.1
        [beta1]=0.9 [beta2]=0.95 [eps]=1e-8 [clip]=0.5)
    local name=$1 model=$2 pair flags=() pairs=()
    for pair in "${@:3}"; do value[${pair%=*}]=${pair#*=}; done
    for pair in "${!value[@]}"; do
        flags+=("--$pair" "${value[$pair]}")
        pairs+=("$pair=${value[$pair]}")
    done
    echo "-- $name"
    "$bin/01_single_gpu" --load-hf "$model" --data sample.txt --seq-len 33 --global-batch 1 "${flags[@]}" \
        --metrics m.jsonl >out 2>&1 || { cat out; fail "$name: the run"; return; }
    $python "$reference" "$model" sample.txt m.jsonl "${pairs[@]}" || fail "$name"
}

printf 'Of arms and of a man: 34 tokens!!!' >sample.txt
shape=(--layers 2 --hidden 48 --heads 6 --kv-heads 2 --ffn 80 --seq-len 33 --init-std 0.1)
"$bin/01_single_gpu" "${shape[@]}" --steps 0 --save-hf model >out 2>&1 || { cat out; fail "--save-hf"; }
parity "clipped, warm-up and cosine" model
parity "no clipping, linear" model clip=100 lr-schedule=linear lr=0.0003
parity "constant, other betas, strong decay" model lr-schedule=constant beta1=0.8 beta2=0.99 weight-decay=2
parity "large eps, large steps" model eps=0.001 lr=0.02 clip=2
parity "documents that end with a space" model document-token=32 lr=0.0003
parity "documents: several ends in a row, one at the last place" model document-token=33

mkdir llama3 && cp model/model.safetensors llama3/
llama3='{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,'
llama3+=' "original_max_position_embeddings": 64}' # of the 4 pairs, one stays, one is blended, two are slowed down
sed "s/\"rope_scaling\": null/\"rope_scaling\": $llama3/; s/\"rope_theta\": 10000.0/\"rope_theta\": 500.0/" \
    model/config.json >llama3/config.json
parity "llama3 rope scaling" llama3

# save, load, save
"$bin/01_single_gpu" --load-hf llama3 --steps 0 --save-hf again >out 2>&1 || { cat out; fail "--load-hf"; }
"$bin/01_single_gpu" --load-hf again --steps 0 --save-hf third >out 2>&1 || { cat out; fail "--load-hf again"; }
cmp llama3/model.safetensors again/model.safetensors && diff -r again third || fail "save, load, save"

# compare: micro-batches only change the order of sums; another seed changes everything; a folder that is none
run=("${shape[@]}" --global-batch 4 --steps 4)
"$bin/01_single_gpu" "${run[@]}" --save-reference a >out 2>&1 || { cat out; fail "--save-reference"; }
"$bin/01_single_gpu" "${run[@]}" --micro-batch 1 --save-reference b >out 2>&1 || { cat out; fail "--save-reference"; }
"$bin/01_single_gpu" "${run[@]}" --seed 2 --save-reference c >out 2>&1 || { cat out; fail "--save-reference"; }
"$bin/compare" a b || fail "compare: the same run in micro-batches"
"$bin/compare" a c >out && fail "compare: another seed"
"$bin/compare" a c --tolerance 1 >out && fail "compare: other tokens"
"$bin/compare" a model >out 2>err
[ $? = 2 ] && [ "$(wc -l <err)" = 1 ] && grep -q 'model/reference.json' err || fail "compare: no reference run"
exit $failed
