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

node "$bin" --minutes 0.05 ceilings links rank_slices
verdict "too little time: nothing runs, and that is recorded" "$(ends 0)$(expect ceilings 'not reached' 1)"

node "$bin" --resume ceilings links rank_slices
verdict "every run of three parts" "$(ends 0)$(expect ceilings 'ok copy' 8)$(expect links 'ok all-reduce over 2' 30)$(
    expect links 'ok links of 2' 2)$(expect rank_slices ok 12)$(
    rows ceilings | grep 'has no')$(expect ceilings 'not reached' 0)"

cp -r "$work/out" "$work/before"
node "$bin" --resume ceilings links rank_slices
verdict "resumed at the end: nothing runs again" "$(ends 0)$(diff -r "$work/before" "$work/out")"

mkdir "$work/bin"
ln -s "$bin"/* "$work/bin"
rm -f "$work/bin/"{02_data_parallel,test_0[1-8]}
printf '#!/bin/bash\necho "a reason"\nexit 3\n' >"$work/bin/02_data_parallel"
chmod +x "$work/bin/02_data_parallel"
node "$work/bin" tests_01 tests ceilings links
verdict "a failing run and missing programs are recorded, the rest runs" "$(ends 1)$(expect ceilings 'ok copy' 8)$(
    expect links 'failed all-reduce over 2 exit code 3; .*a reason' 1)$(
    expect tests 'not run .* is not there' 7)$(expect tests_01 'not run .* is not there' 1)$(
    grep -qx 'a reason' "$work/out/failed.log" || echo "not in failed.log; ")"

bash docs/measure_node.sh --bin "$bin" --device cpu >"$work/log" 2>&1
code=$?
verdict "no results of a CPU among those of GPUs" "$(ends 2)$(
    grep -q 'name another folder' "$work/log" || cat "$work/log")"
CUDA_VISIBLE_DEVICES='' bash docs/measure_node.sh --bin "$bin" >"$work/log" 2>&1
code=$?
verdict "no GPU: the driver and one line" "$(ends 2)$([ "$(wc -l <"$work/log")" = 2 ] || cat "$work/log")"
mkdir "$work/path"
ln -s "$PWD/tests/fake_nvidia_smi.sh" "$work/path/nvidia-smi"
PATH=$work/path:$PATH FAKE_DRIVER=570.86.10 bash docs/measure_node.sh --bin "$bin" >"$work/log" 2>&1
code=$?
verdict "an old driver: one line, before a program starts" "$(ends 2)$(
    grep -qx 'measure_node: driver 570.86.10: programs of CUDA 13 need 580 or later' "$work/log" || cat "$work/log")"
# With programs of the emulated GPU (-DTRAIN70B_CUDA=EMULATE): what nvidia-smi says, and the GPU's memory, in each row.
if "$bin/01_single_gpu" --device cuda --steps 0 2>&1 | grep -q emulated; then
    PATH=$work/path:$PATH FAKE_APPS='123, 2000\n' bash docs/measure_node.sh --bin "$bin" --out "$work/gpu" --commit c0ffee \
        --scale tiny slice >"$work/log" 2>&1
    code=$?
    verdict "the emulated GPU: clock, power, limits, others and memory in each row" "$(ends 0)$(
        python3 - "$work/gpu/slice.csv" <<'PY'
import csv, sys
for row in csv.DictReader(open(sys.argv[1], newline="")):
    seen = [row[name] for name in ("sm_mhz", "power_w", "limited_by", "others", "driver", "other_gib")]
    if seen != ["1410", "690.5", "power cap", "1 processes, 1024 MiB in use", "580.95.05", "0.292969"]:
        print(row)
PY
    )"
fi
exit $failed
