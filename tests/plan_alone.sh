#!/usr/bin/env bash
# lib_plan stands alone: its sources include nothing of MPI, BLAS, CLI11, threads or source locations, map no files, and
# link to a program without any other library.
#   bash tests/plan_alone.sh BUILD "COMPILER FLAG..."
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 compiler=$2
sources=$(sed 's/;/\n/g' "$build/plan_sources.txt")
forbidden='/mpi\.h|/cblas\.h|/nccl\.h|/omp\.h|/CLI/|bits/std_thread|/thread$|/source_location$'
forbidden+='|sys/mman\.h|02_data_parallel/'
check() { # SOURCE
    local includes found
    includes=$($compiler -M -x c++ "$1") || exit 255
    found=$(tr ' \\' '\n\n' <<<"$includes" | grep -E "$forbidden" || true)
    [ -z "$found" ] || { echo "FAIL $1 includes" $found; exit 255; }
}
export -f check
export compiler forbidden
xargs -P "$(nproc)" -I{} bash -c 'check {}' <<<"$sources"
# What its objects refer to and nobody in it defines must be the C and C++ libraries'.
objects=$build/liblib_plan.a
undefined=$(comm -23 <(nm -u --format=posix "$objects" | awk 'NF >= 2 {print $1}' | sort -u) \
    <(nm --defined-only --format=posix "$objects" | awk 'NF >= 2 {print $1}' | sort -u))
foreign=$(c++filt <<<"$undefined" | grep -E 'train70b|^(MPI|cblas|nccl|omp|GOMP|mmap)' || true)
[ -z "$foreign" ] || { echo "FAIL lib_plan needs" $foreign; exit 1; }
echo "ok   $(wc -l <<<"$sources") sources of lib_plan stand alone"
