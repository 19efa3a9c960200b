#!/usr/bin/env bash
# Builds and tests; installs what is missing. tests/README.md: which test answers for what.
#   bash tests/run.sh            the short tier: each technique at its smallest telling size
#   bash tests/run.sh 04         the same of one chapter
#   bash tests/run.sh --commit   what .ci/run runs: the short tier, emulated kernels; in turn a slice under the
#                                sanitizers, or a quarter of the slow tests, fuzzing, and another configuration
#   bash tests/run.sh --all      everything at full size, all configurations
# Ends with what was skipped, the ten dearest tests, and the units: its wall seconds divided by those that
# `g++ -std=c++20 -O2 -c tests/unit.cpp` takes in the same run. Exit code 1 if a test fails.
set -euo pipefail
cd "$(dirname "$0")/.."
tier=short chapter=
for word; do
    case "$word" in
        --commit | --all) tier=${word#--} ;;
        0[1-8]) chapter=$word ;;
        *) echo "tests/run.sh: $word: unknown; valid: 01 to 08, --commit, --all" >&2; exit 2 ;;
    esac
done
if [ -n "$chapter" ] && [ "$tier" != short ]; then
    echo "tests/run.sh: $chapter: --$tier is of all chapters; for one: ctest --test-dir build -R ^$chapter" >&2
    exit 2
fi
began=$SECONDS
commit=$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0)
if [ "$tier" = all ]; then
    export TRAIN70B_TEST_SLICE=all EMULATE_RACES=1
else # which eighth of long grids: tests/support.h
    export TRAIN70B_TEST_SLICE=$((0x$commit % 8)) TRAIN70B_TEST_DRAW=$((0x$commit))
    export EMULATE_SEED=$((0x$commit % 1000 + 1))
    if ((0x$commit / 32 % 2)); then export EMULATE_NCCL=ring; fi
fi
strict=() # a folder that demo.sh built is not built again for warnings
[ "$tier" = short ] || strict=(-DTRAIN70B_WERROR=ON)
turn=$((0x$commit / 8 % 4)) half=$((0x$commit / 64 % 2)) # of what takes turns; each has all eighths

parts=() failed=() skipped=()
part() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    echo "== $name"
    "${@:2}" || failed+=("$name")
    parts+=("$((SECONDS - start)) s $name")
}
gpu=() architectures=()
if ! nvidia-smi -L >/dev/null 2>&1; then
    architectures=("-DTRAIN70B_CUDA_ARCH=80;90a-real")
    if [ "$tier" = all ]; then architectures=("-DTRAIN70B_CUDA_ARCH=80-real;89-real;90a-real;100"); fi
    gpu=(-LE '^gpu$')
    skipped+=("the tests NN_cuda: no GPU here")
fi
tests() { # BUILD_FOLDER CTEST_OPTION...
    rm -f "$1/tests.xml"
    ctest --test-dir "$1" -j "$(nproc)" --output-on-failure --output-junit tests.xml "${gpu[@]}" "${@:2}"
}
names_of() { # CTEST_OPTION...: of the tests that these select
    ctest --test-dir build -N "$@" | sed -n 's/^ *Test *#[0-9]*: //p' | xargs | sed 's/ /, /g'
}
compile_unit() { # unit: seconds
    local start=${EPOCHREALTIME/./}
    g++ -std=c++20 -O2 -c tests/unit.cpp -o /dev/null
    unit=$(awk -v us=$((${EPOCHREALTIME/./} - start)) 'BEGIN {print us / 1e6}')
}

# The configurations that CMake offers besides those that are tested anyway: built, and a training step each. The first:
# as on another system, with the newest clang that has OpenMP, or else g++. The last: only with --all.
clang=
for name in clang++-{21..16}; do
    [ -z "$clang" ] || break
    if echo '#include <omp.h>' | "$name" -fopenmp -x c++ -fsyntax-only - 2>/dev/null; then clang=$(type -P "$name"); fi
done
configurations=("-DTRAIN70B_CUDA=OFF -DTRAIN70B_ARCH= -DTRAIN70B_PLAIN=ON -DTRAIN70B_ONEDNN=OFF${clang:+ -DCMAKE_CXX_COMPILER=$clang}"
    "-DTRAIN70B_CUDA=EMULATE" "-DTRAIN70B_CUDA=EMULATE -DTRAIN70B_SANITIZE=address,undefined")
configuration() { # NUMBER TARGET...
    if [ "$1" = 0 ]; then local -x CMAKE_GENERATOR="Unix Makefiles"; fi
    local options=${configurations[$1]} folder=build-configuration-$1 device=cpu
    if [[ $options = *EMULATE* ]]; then device=cuda; fi
    if [[ $options = *SANITIZE* ]]; then folder=build-sanitize; fi # all but what computes is there
    # shellcheck disable=SC2086
    bash tests/setup.sh "$folder" "${strict[@]}" $options "${@:2}" || return 1 # part() suspends set -e
    "$folder/bin/01_single_gpu" --device $device --layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16 \
        --global-batch 2 --steps 2
}
cuda_build() { grep -q "^CMAKE_CUDA_COMPILER:[A-Z]*=/" build/CMakeCache.txt; }

sanitizers() { # of every fourth chapter, or all
    local emulate=OFF targets=() only=() options=(-DTRAIN70B_SANITIZED_ONLY=OFF)
    if [ "$tier" = all ]; then
        if cuda_build; then emulate=EMULATE; fi
    else
        local names=() other=() name
        for name in 01 02 03 04 05 06 07 08; do
            if (((10#$name - 1) % 4 == turn)); then names+=("$name"); else other+=("$name"); fi
        done
        targets=("${names[@]/#/test_}")
        options=(-DTRAIN70B_SANITIZED_ONLY=ON)
        only=(-L '^sanitized$' -R "^($(IFS='|' && echo "${names[*]}"))_")
        skipped+=("chapters ${other[*]} under the sanitizers: another commit's turn")
    fi
    part "build with sanitizers" bash tests/setup.sh build-sanitize \
        "${strict[@]}" -DTRAIN70B_SANITIZE=address,undefined -DTRAIN70B_CUDA=$emulate "${options[@]}" "${targets[@]}"
    part "tests under the sanitizers" tests build-sanitize "${only[@]}"
}

other_configurations() { # one in turn, or all
    local number targets
    [ -n "$clang" ] || skipped+=("clang: no version from 16 on, or no libomp")
    for number in "${!configurations[@]}"; do
        targets=()
        if [[ ${configurations[$number]} = *EMULATE* ]] && ! cuda_build; then
            skipped+=("configuration ${configurations[$number]}: no headers of CUDA here")
            continue
        elif [ "$tier" != all ]; then
            if [ "$number" != $((0x$commit / 128 % 2)) ]; then
                skipped+=("configuration ${configurations[$number]}: another commit's turn")
                continue
            fi
            targets=(01_single_gpu)
            if [[ ${configurations[$number]} = *EMULATE* ]]; then targets+=(objects_01); fi
        fi
        part "configuration ${configurations[$number]}" configuration "$number" "${targets[@]}"
    done
}

bash tests/setup.sh --packages # the unit is a compilation that includes three of them
compile_unit
first_unit=$unit
# The time limits of tests are for a machine whose unit is less than 5 s; a slower one gets as many times more.
TRAIN70B_PATIENCE=$(awk -v unit="$unit" 'BEGIN {print int(unit / 5 + 1)}')
export TRAIN70B_PATIENCE
part "build" bash tests/setup.sh build "${strict[@]}" -DTRAIN70B_CUDA=AUTO \
    "${architectures[@]}" ${chapter:+"tests_$chapter"}
case "$tier" in
    short) what="eighth $TRAIN70B_TEST_SLICE of the long grids" only=(-L '^short$' ${chapter:+-R "^$chapter"}) ;;
    commit)
        slow=$([ $half = 0 ] && echo none || echo "turn-$turn") # beside the sanitizers there is no time for them
        what="eighth $TRAIN70B_TEST_SLICE of the long grids, slow ones: $slow"
        only=(-L "^(short|commit|$slow)\$")
        skipped+=("$(names_of -L ^turn- -LE "^$slow\$"): another commit's turn"
            "$(names_of -L '^all$'): only with --all")
        ;;
    all) what=everything only=() ;;
esac
part "tests: $what" tests build "${only[@]}"
if [ ${#failed[@]} = 0 ] && [ "$tier" != short ]; then
    if [ "$tier" = all ] || [ $half = 0 ]; then sanitizers; else skipped+=("the sanitizers: another commit's turn"); fi
    if [ "$tier" = all ] || [ $half = 1 ]; then
        part "fuzzing" bash tests/fuzz/run.sh $([ "$tier" = all ] && echo 60 || echo 12)
        other_configurations
    else
        skipped+=("fuzzing, other configurations: another commit's turn")
    fi
fi
wall=$((SECONDS - began))
compile_unit
printf '%s\n' "${parts[@]}" "${skipped[@]/#/skipped: }" | python3 tests/summary.py build build-sanitize
awk -v wall=$wall -v first="$first_unit" -v last="$unit" -v tier=$tier 'BEGIN {
    one = (first + last) / 2
    units = wall / one
    printf "== %d s, a unit of %.2f s: %.0f units\n", wall, one, units
    if (tier == "commit" && units > 180) print "== more than 180 units: see the dearest tests above"
    exit tier == "commit" && units > 260
}' || failed+=("more than 260 units")
if [ ${#failed[@]} -gt 0 ]; then
    printf '== FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "== all tests passed"
