#!/usr/bin/env bash
# Records small runs of foreign code, which tests/validate.py compares where there is no torch. Needs torch (2.15 ran),
# transformers and safetensors.
#   bash tests/strangers/record.sh build/bin PYTHON
set -euo pipefail
bin=$(cd "$1" && pwd)
python=$2
cd "$(dirname "$0")/../.."
to=tests/strangers/recorded examples=docs/validate/examples
rm -rf "$to" && mkdir -p "$to"
"$bin/01_single_gpu" --layers 2 --hidden 16 --heads 4 --kv-heads 2 --ffn 24 --seq-len 16 --global-batch 8 --steps 4 \
    --init-std 0.1 --clip 0.5 --eps 1e-5 --save-reference "$to/reference" >/dev/null
"$python" "$examples/hugging_face.py" "$to/reference" "$to/hugging_face"
"$python" -m torch.distributed.run --standalone --nproc-per-node 4 "$examples/fsdp2.py" "$to/reference" "$to/fsdp2"
"$python" -m torch.distributed.run --standalone --nproc-per-node 8 "$examples/parallel.py" "$to/reference" \
    "$to/tp2_pp2_dp2" 2 2
"$python" tests/strangers/trainer.py "$to/reference" "$to/tp2_cp2_dp2" --tp 2 --cp 2 --dp 2
"$python" tests/strangers/trainer.py "$to/reference" "$to/plant_tp_no_f" --tp 2 --plant tp_no_f
"$python" tests/strangers/trainer.py "$to/reference" "$to/plant_beta2" --dp 2 --plant beta2
rm "$to"/*/*_2.safetensors # of step 2: as large as those of step 1
du -sh "$to"
