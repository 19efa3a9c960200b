#!/usr/bin/env bash
# Checks a machine with GPUs, builds if needed, measures:  bash docs/measure_node.sh [--minutes 9] [STEP ...] or --help
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || { echo "needs python3, 3.9 or later" >&2; exit 2; }
exec python3 "$(dirname "${BASH_SOURCE[0]}")/measure_node.py" "$@"
