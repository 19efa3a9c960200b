#!/usr/bin/env bash
# Fault drills: nine incidents on a few CPU ranks, to be explained from logs, metrics and traces (docs/drills)
#   bash docs/drill.sh list
#   bash docs/drill.sh start NAME|NUMBER [--seed N]
#   bash docs/drill.sh rerun NAME [--on RANKS] [FLAG ...]     the same job on the same, still faulty, machines
#   bash docs/drill.sh answer NAME FIELD=VALUE ... [--json]
#   bash docs/drill.sh hint NAME | solution NAME
set -euo pipefail
command -v python3 >/dev/null || { echo "drill: python3 is not there" >&2; exit 2; }
exec python3 "$(dirname "${BASH_SOURCE[0]}")/drills/drill.py" "$@"
