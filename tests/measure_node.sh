#!/bin/bash
# docs/measure_node.sh on the CPU with tiny shapes: what it records of runs that succeed, fail, or are not reached.
# Run: bash tests/measure_node.sh build/bin
bin=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 1
. tests/verdict.sh

node() { # FOLDER_OF_PROGRAMS WORDS...: code, $work/log
    bash docs/measure_node.sh --bin "$1" --out "$work/out" --commit c0ffee --device cpu --scale tiny --ranks 2 \
        "${@:2}" >"$work/log" 2>&1
    code=$?
}
ends() { [ "$code" = "$1" ] || echo "exit code $code, not $1: $(tail -3 "$work/log"); "; }
rows() { # PART: status and run of each row, and what its columns lack
    python3 - "$work/out/$1.csv" <<'PY'
import csv, sys
for row in csv.DictReader(open(sys.argv[1], newline="")):
    blank = [name for name in ("hardware", "commit", "date", "command") if not row[name]]
    print(row["status"], row["run"], row["note"], *(f"has no {name}" for name in blank))
PY
}
expect() { # PART PATTERN COUNT: so many rows begin with the pattern
    local found
    found=$(rows "$1" | grep -c "^$2")
    [ "$found" = "$3" ] || echo "$1: $found rows of '$2', not $3: $(rows "$1" | head -c 600); "
}

node "$bin" --minutes 0.05 ceilings rank_slices
verdict "too little time: nothing runs, and that is recorded" "$(ends 0)$(expect ceilings 'not reached' 1)"

node "$bin" --resume ceilings rank_slices
verdict "every run of two parts" "$(ends 0)$(expect ceilings 'ok copy' 4)$(expect ceilings 'ok all-reduce over 2' 30)$(
    expect rank_slices ok 6)$(rows ceilings | grep 'has no')$(expect ceilings 'not reached' 0)"

cp -r "$work/out" "$work/before"
node "$bin" --resume ceilings rank_slices
verdict "resumed at the end: nothing runs again" "$(ends 0)$(diff -r "$work/before" "$work/out")"

mkdir "$work/bin"
ln -s "$bin"/* "$work/bin"
rm -f "$work/bin/"{02_data_parallel,test_0[1-8]}
printf '#!/bin/bash\necho "a reason"\nexit 3\n' >"$work/bin/02_data_parallel"
chmod +x "$work/bin/02_data_parallel"
node "$work/bin" tests ceilings
verdict "a failing run and missing programs are recorded, the rest runs" "$(ends 1)$(expect ceilings 'ok copy' 4)$(
    expect ceilings 'failed all-reduce over 2 exit code 3; .*a reason' 1)$(expect tests 'not run .* is not there' 8)$(
    grep -qx 'a reason' "$work/out/failed.log" || echo "not in failed.log; ")"

bash docs/measure_node.sh --bin "$bin" --device cpu >"$work/log" 2>&1
code=$?
verdict "no results of a CPU among those of GPUs" "$(ends 2)$(
    grep -q 'name another folder' "$work/log" || cat "$work/log")"
CUDA_VISIBLE_DEVICES='' bash docs/measure_node.sh --bin "$bin" >"$work/log" 2>&1
code=$?
verdict "no GPU: one line" "$(ends 2)$([ "$(wc -l <"$work/log")" = 1 ] || cat "$work/log")"
exit $failed
