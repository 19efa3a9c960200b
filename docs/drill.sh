#!/usr/bin/env bash
# Fault drills: eleven incidents on a few CPU ranks, to be explained from logs, metrics, traces (docs/drills/README.md).
#   bash docs/drill.sh list | start NAME [--seed N] | rerun NAME [--on RANKS] [FLAG ...]
#   bash docs/drill.sh answer NAME FIELD=VALUE ... [--json] | hint NAME | solution NAME
set -euo pipefail
command -v python3 >/dev/null || { echo "drill: python3 is not there" >&2; exit 2; }
export PYTHONUTF8=1 # the lessons' characters in any locale
exec python3 "$(dirname "${BASH_SOURCE[0]}")/drills/drill.py" "$@"
