#!/usr/bin/env bash
# All tests: installs what is missing, builds, runs CTest; then once more, CPU only, under the address and
# undefined-behaviour sanitizers. Where nvcc builds the CUDA path, its tests run on the emulated GPU (tests/emulate). Ends
# with the seconds of each part.
#   bash tests/run.sh           the default: long grids run one eighth of their layouts, picked by the commit's hash;
#                               under the sanitizers the other grids run a quarter
#   bash tests/run.sh --fast    without the sanitizers
#   bash tests/run.sh --all     everything at full size; the scripts, and the kernels on the emulated GPU, under the
#                               sanitizers too
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-default}
case "$mode" in
    default | --fast | --all) ;;
    *) echo "tests/run.sh: $mode: unknown; --fast leaves out the sanitizers, --all runs everything" >&2; exit 2 ;;
esac
# Read by tests/support.h: "all", or which eighth.
export TRAIN70B_TEST_SLICE=all
if [ "$mode" != --all ]; then
    commit=$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0)
    TRAIN70B_TEST_SLICE=$((0x$commit % 8))
    export EMULATE_SEED=$((0x$commit % 1000 + 1))
fi

times=()
part() { # NAME COMMAND...
    local name=$1 began=$SECONDS
    shift
    echo "== $name"
    "$@"
    times+=("$(printf '%6d s  %s' $((SECONDS - began)) "$name")")
}

part "build" bash tests/setup.sh build -DTRAIN70B_CUDA=AUTO
slice=$([ "$mode" = --all ] && echo all || echo "eighth $TRAIN70B_TEST_SLICE")
part "tests, $slice of the long grids" ctest --test-dir build -j "$(nproc)" --output-on-failure
part "fuzzing" bash tests/fuzz/run.sh 60
if [ "$mode" != --fast ]; then
    cuda=$([ "$mode" = --all ] && grep -q "^CMAKE_CUDA_COMPILER:" build/CMakeCache.txt && echo EMULATE || echo OFF)
    part "build with sanitizers" bash tests/setup.sh build-sanitize -DTRAIN70B_SANITIZE=address,undefined \
        -DTRAIN70B_CUDA="$cuda"
    # The scripts start the programs again and again, which takes minutes under the sanitizers; what the programs are
    # made of is in the other tests.
    scripts=(-LE script)
    [ "$mode" != --all ] || scripts=()
    part "tests under the sanitizers" ctest --test-dir build-sanitize -j "$(nproc)" --output-on-failure "${scripts[@]}"
fi
printf '%s\n' "== seconds" "${times[@]}" "== all tests passed"
