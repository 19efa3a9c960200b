#!/usr/bin/env bash
# The labs: write the body of a function of this course, and have it graded (docs/labs/README.md).
#   bash docs/lab.sh list | start NAME [--seed YOU] | check NAME | hint NAME | solution NAME      --help: all options
#   bash docs/lab.sh check fit-70b --leaderboard FILE --as YOU | student-tree FOLDER
set -euo pipefail
command -v python3 >/dev/null || { echo "lab.sh: python3 is not there" >&2; exit 2; }
export PYTHONUTF8=1 # the lessons' characters in any locale
exec python3 "$(dirname "${BASH_SOURCE[0]}")/labs/lab.py" "$@"
