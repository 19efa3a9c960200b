#!/usr/bin/env bash
# The one command: installs what is missing, builds, and trains a small Llama on this repository's own text.
# Until chapter 08 exists it runs the newest chapter there is.
#   bash 08_3d_full/demo.sh [flags of the program]
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/setup.sh build
echo "== training 01_single_gpu: watch the loss fall from ln 256 = 5.5"
build/bin/01_single_gpu --steps 400 --eval-every 100 --generate 300 "$@"
