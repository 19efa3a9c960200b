#!/usr/bin/env bash
# The planner stands alone: the files below include nothing of MPI, BLAS, CLI11, threads or source locations, map no
# files, compile with clang 14's library too (no from_chars of double, no <source_location>), and need
# no other library.
#   bash tests/plan_alone.sh "COMPILER FLAG..."      with clang where it is found, or with the compiler
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=$1
if command -v clang++ >/dev/null; then compiler="clang++ -std=c++20"; else echo "skipped: no clang++"; fi
files=(01_single_gpu/{core/fmt,core/check,core/dtype,config,core/files,core/json,report/table}.cpp
    04_tensor_parallel/{cluster,device}.cpp
    05_pipeline/{schedule,schedule_v,schedule_checks,schedule_file,schedule_report,simulate,stages}.cpp
    06_context_parallel/context_layout.cpp 08_3d_full/{mesh,config}.cpp)
for file in 08_3d_full/plan/*.cpp; do # all but what runs the program: dry runs, and the planner's main()
    case $file in */main.cpp | */dry_run.cpp | */record.cpp | */simulate_flag.cpp | */simulate_best.cpp) ;; *) files+=("$file") ;; esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '#include "%s"\n' "${files[@]}" >"$work/all.cpp" # one file compiles in a tenth of the time of sixty
flags=("-DTRAIN70B_SOURCE_DIR=\".\"" -I. "$work/all.cpp")

forbidden='/mpi\.h|/cblas\.h|/nccl\.h|/omp\.h|/CLI/|bits/std_thread|/thread$|/source_location$'
forbidden+='|sys/mman\.h|02_data_parallel/'
found=$($compiler -M "${flags[@]}" | tr ' \\' '\n\n' | grep -E "$forbidden" || true)
[ -z "$found" ] || { echo "FAIL included:" $found; exit 1; }
$compiler -c "${flags[@]}" -o "$work/all.o"
# What the object refers to and does not define must be the C and C++ libraries'.
foreign=$(nm -uC "$work/all.o" | grep -E 'train70b|U (MPI|cblas|nccl|omp|GOMP|mmap)' || true)
[ -z "$foreign" ] || { echo "FAIL needed:" $foreign; exit 1; }
echo "ok   ${#files[@]} files of the planner stand alone"
