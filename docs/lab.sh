#!/usr/bin/env bash
# The labs: write the body of a function of this course, and have it graded (docs/labs/README.md).
#   bash docs/lab.sh list | start NAME | check NAME | hint NAME | solution NAME      --help: all options
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v python3 >/dev/null || { echo "lab.sh: python3 is not there" >&2; exit 2; }
exec python3 docs/labs/lab.py "$@"
