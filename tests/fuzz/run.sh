#!/usr/bin/env bash
# Fuzzes the readers of files under the address and undefined-behaviour sanitizers. A target is a file NAME.cpp here
# (fuzz.h says how to add one). Builds what each needs and runs all, an equal share of SECONDS each; exit code 1 on a
# finding, whose input stays in the folder that is named.
#   bash tests/fuzz/run.sh SECONDS [NAME ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:?bash tests/fuzz/run.sh SECONDS [NAME ...]}
shift
if ! command -v clang++ >/dev/null || ! echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    clang++ -x c++ -fsanitize=fuzzer,address,undefined - -o /dev/null 2>/dev/null; then
    echo "skipped: clang is not installed"
    exit 0
fi
[ $# -gt 0 ] || for file in tests/fuzz/*.cpp; do
    name=$(basename "$file" .cpp)
    [ "$name" = main ] || set -- "$@" "$name"
done

build=${FUZZ_BUILD:-build-fuzz}
mkdir -p "$build"
[[ $build = /* ]] || build=$PWD/$build
flags=(-std=c++20 -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined
    -fno-sanitize-recover=all -DTRAIN70B_CUDA=0 -DTRAIN70B_SOURCE_DIR="\"$PWD\"" -Wno-unknown-pragmas -I.)
# What the targets need, and three of core/, which all need, as two files. Ops first: layers has functions of
# their names.
{
    echo core/check.cpp core/dtype.cpp core/platform/linux/files.cpp
    for name; do sed -n 's|^// sources: ||p' "tests/fuzz/$name.cpp"; done
} | tr ' ' '\n' | sort -u | while read -r source; do
    for folder in "" 01_single_gpu/ 01_single_gpu/complete/; do [ ! -f "$folder$source" ] || break; done
    echo "#include \"$folder$source\""
done >"$build/sources"
awk '/\/ops\//' "$build/sources" >"$build/model.new"
awk '!/\/ops\/|0[78]_/' "$build/sources" >>"$build/model.new"
awk '/0[78]_/' "$build/sources" >"$build/readers.new"
for part in model readers; do
    cmp -s "$build/$part.new" "$build/$part.cpp" || cp "$build/$part.new" "$build/$part.cpp"
done
for source in "$build/readers.cpp" "$build/model.cpp" tests/fuzz/main.cpp "${@/%/.cpp}"; do
    [ -f "$source" ] || source=tests/fuzz/$source
    object=$build/$(basename "$source" .cpp).o # older than a file of the repository: made again
    [ -f "$object" ] && [ -z "$(find 0*/ tests/fuzz "$source" -name '*.[ch]*' -newer "$object" -print -quit)" ] ||
        echo "$source $object"
done | xargs -r -L 1 -P "$(nproc)" bash -c '"${@:1:$#-2}" -c "${@: -2:1}" -o "${@: -1}"' bash \
    clang++ "${flags[@]}" -fsanitize=fuzzer-no-link

failed=0
for name; do
    objects=("$build/main.o" "$build/$name.o" "$build/model.o" "$build/readers.o")
    # What the readers do not call need not be there.
    clang++ "${flags[@]}" -fsanitize=fuzzer "${objects[@]}" -lfmt -lz -no-pie -Wl,--unresolved-symbols=ignore-all -o "$build/$name"
    corpus=$build/$name.corpus
    FUZZ_SEEDS=$corpus "$build/$name"
    log=$build/$name.log
    code=0
    "$build/$name" "$corpus" -dict="$corpus.dict" -max_total_time=$((seconds / $#)) -timeout=5 -rss_limit_mb=1024 \
        -malloc_limit_mb=1024 -max_len=8192 -artifact_prefix="$build/$name-" -print_final_stats=1 >"$log" 2>&1 || code=$?
    if [ $code != 0 ]; then
        failed=1
        echo "FAIL fuzzing $name:"
        grep -aE "ERROR|ParseDictionary|SUMMARY|runtime error|check failed|terminate|what\(\)|^ *#[0-9]+ .*train70b|Test unit written" "$log" | head -n 25
    else
        awk -v name="$name" '/number_of_executed_units/ { n = $2 } /average_exec_per_sec/ { rate = $2 } /^#.* cov: / { cov = $4 }
            END { printf "fuzzing %-14s %9d inputs, %6d per second, %d branches, no finding\n", name, n, rate, cov }' "$log"
    fi
done
exit $failed
