#!/usr/bin/env bash
# Every header compiles alone, without precompiled ones: whoever includes it needs nothing else first.
#   bash tests/headers.sh "COMPILER FLAG..."      an eighth of them, as tests/support.h's TRAIN70B_TEST_SLICE says
set -euo pipefail
cd "$(dirname "$0")/.."
slice=${TRAIN70B_TEST_SLICE:-0}
headers=$(ls 0*/*.h 0*/*/*.h tests/*.h | awk -v slice="$slice" 'slice == "all" || NR % 8 == slice % 8')
check() { # HEADER: -x c++ would complain about #pragma once, a file that includes it does not
    echo "#include \"$1\"" | $compiler -fsyntax-only -x c++ - || { echo "FAIL $1"; exit 255; }
}
export compiler="$1"
export -f check
xargs -P "$(nproc)" -I{} bash -c 'check {}' <<<"$headers"
echo "ok   $(wc -l <<<"$headers") headers compile alone"
