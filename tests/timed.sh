#!/usr/bin/env bash
# Runs a test and appends "NAME SECONDS" to FILE: CPU time, user and system, of all its processes.
#   bash tests/timed.sh FILE NAME COMMAND...
"${@:3}"
code=$?
used=$(mktemp)
times >"$used" # not in a pipe: a subshell has children of its own
tail -n 1 "$used" | tr 'ms' '  ' | LC_ALL=C awk -v name="$2" '{printf "%s %.2f\n", name, $1 * 60 + $2 + $3 * 60 + $4}' >>"$1"
rm "$used"
exit $code
