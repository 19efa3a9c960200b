#!/usr/bin/env bash
# The one command: installs what is missing, builds, and trains a small Llama on this repository's own text; then begins
# again on two ranks. Until chapter 08 exists it runs the chapters that there are.
#   bash 08_3d_full/demo.sh [flags of the training program]
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/setup.sh build
echo "== training 01_single_gpu: watch the loss fall from ln 256 = 5.5"
build/bin/01_single_gpu --steps 400 --eval-every 100 --generate 300 "$@"

echo
echo "== the first five steps on one rank; then on two: data-parallel, ZeRO-3, tensor-parallel, in a pipeline, context-parallel: the same losses"
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
build/bin/01_single_gpu --steps 5 | grep '^step'
mpirun --oversubscribe -np 2 build/bin/02_data_parallel --steps 5 --tables off | grep '^step'
mpirun --oversubscribe -np 2 build/bin/03_zero --zero 3 --steps 5 --tables off | grep '^step'
mpirun --oversubscribe -np 2 build/bin/04_tensor_parallel --tp 2 --sequence-parallel on --steps 5 --tables off | grep '^step'
mpirun --oversubscribe -np 2 build/bin/05_pipeline --pp 2 --pipeline zero-bubble --steps 5 --tables off | grep '^step'
mpirun --oversubscribe -np 2 build/bin/06_context_parallel --cp 2 --steps 5 --tables off | grep '^step'
echo "== and in 8 bits, with a quarter of the optimizer's moments: nearly the same"
build/bin/07_fp8 --fp8 current --optimizer adamw8bit --steps 5 --tables off | grep '^step'
