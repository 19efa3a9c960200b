#!/usr/bin/env bash
# Builds and tests; installs what is missing. tests/README.md: which test is in which tier, and what only it catches.
#   bash tests/run.sh            what a change can break: each technique at its smallest telling size
#   bash tests/run.sh --commit   what .ci/run runs after that: emulated kernels, a quarter of the slow scripts, a slice
#                                under the sanitizers, fuzzing, one of the other configurations in turn
#   bash tests/run.sh --all      everything at full size, all configurations; documented commands run again
# Ends with the seconds and units (tests/budgets.txt) of each part, and with what was skipped; exit code 1 if a test
# fails or a part uses more than its budget. --write-times writes the CPU seconds of the tests to tests/README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
tier=change write_times=
for word; do
    case "$word" in
        --commit | --all) tier=${word#--} ;;
        --write-times) write_times=1 ;;
        *) echo "tests/run.sh: $word: unknown; valid: --commit, --all, --write-times" >&2; exit 2 ;;
    esac
done
commit=$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0)
if [ "$tier" = all ]; then
    EMULATE_LOOPS=$(mktemp -d)
    export TRAIN70B_TEST_SLICE=all EMULATE_RACES=1 EMULATE_LOOPS
else # which eighth of long grids: tests/support.h
    export TRAIN70B_TEST_SLICE=$((0x$commit % 8)) EMULATE_SEED=$((0x$commit % 1000 + 1))
    if ((0x$commit / 32 % 2)); then export EMULATE_NCCL=ring; fi
fi
turn=$((0x$commit / 8 % 4)) # of what takes turns; each has all eighths

cpu_file=$(mktemp)
trap 'rm -f "$cpu_file"' EXIT
measure() { # cpu: the CPU seconds of all child processes so far. Not in a subshell, which has children of its own.
    times >"$cpu_file"
    cpu=$(tail -n 1 "$cpu_file" | tr 'ms' '  ' | awk '{print $1 * 60 + $2 + $3 * 60 + $4}')
}
times=() failed=() skipped=()
part() { # NAME BUDGET COMMAND...
    local name=$1 budget=$2 began=$SECONDS cpu before
    measure
    before=$cpu
    shift 2
    echo "== $name"
    "$@" || failed+=("$name")
    measure
    times+=("$budget $((SECONDS - began)) $(awk -v now="$cpu" -v before="$before" 'BEGIN {print now - before}') $name")
}
tests() { # BUILD_FOLDER CTEST_OPTION...
    rm -f "$1/cpu_seconds.txt"
    ctest --test-dir "$1" -j "$(nproc)" --output-on-failure "${@:2}"
}
cuda_build() { grep -q "^CMAKE_CUDA_COMPILER:[A-Z]*=/" build/CMakeCache.txt; }

# The configurations that CMake offers besides those that are tested anyway: built, and a training step each.
configurations=("-DTRAIN70B_CUDA=OFF" "-DTRAIN70B_CUDA=EMULATE" "-DTRAIN70B_CUDA=EMULATE -DTRAIN70B_SANITIZE=address,undefined")
configuration() { # NUMBER TARGET...
    local options=${configurations[$1]} folder=build-configuration-$1 device=cpu
    if [[ $options = *EMULATE* ]]; then device=cuda; fi
    if [[ $options = *SANITIZE* ]]; then folder=build-sanitize; fi # all but what computes is there
    # shellcheck disable=SC2086
    bash tests/setup.sh "$folder" $options "${@:2}" || return 1 # part() suspends set -e
    "$folder/bin/01_single_gpu" --device $device --layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16 \
        --global-batch 2 --steps 2
}

bash tests/setup.sh --packages # the unit is a compilation that includes three of them
unit=$(python3 tests/report.py unit)
TRAIN70B_PATIENCE=$(awk -v unit="$unit" 'BEGIN {print int(unit / 5 + 0.8)}') # ranks.sh
export TRAIN70B_PATIENCE
budget() { if [ "$tier" = all ]; then echo -; else echo "$1"; fi; } # of a part; everything has none
slice=$([ "$tier" = all ] && echo all || echo "eighth $TRAIN70B_TEST_SLICE")
part "build" build bash tests/setup.sh build -DTRAIN70B_CUDA=AUTO
if [ "$tier" = all ]; then
    part "tests, everything" - tests build
    if cuda_build; then part "loops of kernels" - python3 tests/emulate/loops.py "$EMULATE_LOOPS"; fi
else
    labels=$tier
    if [ "$tier" = commit ]; then
        labels="(commit|turn-$turn)"
        skipped+=("$(ctest --test-dir build -N -L "^turn-[^$turn]\$" | sed -n 's/^ *Test *#[0-9]*: //p' | xargs | sed 's/ /, /g'): another commit's turn")
    fi
    part "tests: $tier, $slice of the long grids" "$tier" tests build -L "^$labels\$"
fi
if [ ${#failed[@]} = 0 ] && [ "$tier" != change ]; then
    seconds=$([ "$tier" = all ] && echo 60 || echo 12)
    part "fuzzing" "$(budget fuzzing)" bash tests/fuzz/run.sh "$seconds"
    emulate=OFF only=() targets=() other=()
    if [ "$tier" = all ]; then
        if cuda_build; then emulate=EMULATE; fi
    else # every fourth chapter
        for chapter in 01 02 03 04 05 06 07 08; do
            if (((10#$chapter - 1) % 4 == turn)); then targets+=("test_$chapter"); else other+=("$chapter"); fi
        done
        only=(-L '^sanitized$' -R "^($(IFS='|' && echo "${targets[*]#test_}"))_")
        skipped+=("chapters ${other[*]} under the sanitizers: another commit's turn")
    fi
    part "build with sanitizers" "$(budget sanitizers-build)" bash tests/setup.sh build-sanitize \
        -DTRAIN70B_SANITIZE=address,undefined -DTRAIN70B_CUDA=$emulate "${targets[@]}"
    part "tests under the sanitizers" "$(budget sanitizers)" tests build-sanitize "${only[@]}"
    of_turn=$((0x$commit % ${#configurations[@]}))
    for number in "${!configurations[@]}"; do
        if [[ ${configurations[$number]} = *EMULATE* ]] && ! cuda_build; then
            skipped+=("configuration ${configurations[$number]}: no headers of CUDA here")
        elif [ "$tier" = all ]; then
            part "configuration ${configurations[$number]}" - configuration "$number"
        elif [ "$number" = $of_turn ]; then
            targets=(01_single_gpu)
            if [[ ${configurations[$number]} = *EMULATE* ]]; then targets+=(objects_01_cuda); fi
            part "configuration ${configurations[$number]}" configuration configuration "$number" "${targets[@]}"
        else
            skipped+=("configuration ${configurations[$number]}: another commit's turn")
        fi
    done
fi
unit=$(python3 tests/report.py unit "$unit")
[ -z "$write_times" ] || python3 tests/report.py write "$unit" build
printf '%s\n' "${skipped[@]}" | python3 tests/report.py skipped "$tier" build build-sanitize
printf '%s\n' "${times[@]}" | python3 tests/report.py budgets "$unit" build build-sanitize || failed+=("a budget")
if [ ${#failed[@]} -gt 0 ]; then
    printf '== FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "== all tests passed"
