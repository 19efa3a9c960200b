#!/bin/bash
# Ranks that die, hang or disagree: the run ends within seconds and says why. And bad input: one line, exit code
# 2 on all ranks.
# Run: bash tests/02_failures.sh build/bin
program=02_data_parallel
. "$(dirname "$0")/ranks.sh"

# ---- ranks that disagree ----
disagree() { # WAY PART...
    run 3 "$bin/test_02_faults" "$1"
    verdict "disagree: $1" "$(ends 1 10)$(says "mismatch" "${@:2}")"
}
disagree skip "rank 0 of 3: dp.all_reduce #101, 1000 fp32" "rank 1 of 3: dp.barrier #101" tests/02_faults.cpp
disagree skip-one-of-many "rank 0 of 3: dp.all_reduce #105" "rank 1 of 3: dp.finish #105"
disagree size "rank 0 of 3: dp.all_reduce #101, 1000 fp32" "rank 1 of 3: dp.all_reduce #101, 500 fp32"
disagree dtype "rank 1 of 3: dp.all_reduce #101, 1000 bf16"
disagree reduction "rank 1 of 3: dp.all_reduce #101, 1000 fp32 max"
disagree root "from rank 0" "from rank 1"
disagree counts "rank 1 sends 11 elements to rank 2, which expects 10" "rank 2 of 3: dp.all_to_all #101, fp32 by counts"
disagree scalar "dp.scalar #101, 1 numbers" "dp.barrier #101"
disagree message-too-long "rank 1: check failed" "rank 0 of the group sent more than the 2000 bytes"
disagree message-too-short "rank 1: check failed" "rank 0 of the group sent 2000 bytes, this rank expected 4000"

run 3 "$bin/test_02_faults" counts --comm-check off
verdict "counts that disagree, without the check" "$(ends 1 10)$(
    says "mismatch: rank 1 of the group sent more than the 40 bytes this rank expected")"

# Without the check a rank that is missing is found by the clock, by name, with the log of the last 64.
run 3 "$bin/test_02_faults" silence --comm-check off --comm-timeout 3
verdict "a missing rank" "$(ends 1 8)$(says "dp.all_reduce #101, 1000 fp32 has not ended after 3 s (--comm-timeout)" \
    "NOT ENDED" "its last 64 collectives" "dp.all_reduce #38," "dp.all_reduce #100,")$(
    grep -q "dp.all_reduce #36," "$work/err" && echo "more than 64 are listed")"

# A rank that hangs where no collective in the log waits for it: its heartbeat stops, or the others wait in MPI_Init.
run 3 "$bin/test_02_faults" stop-while-writing --comm-timeout 2
verdict "a rank that hangs while files are written" "$(ends 1 9)$(
    says "rank 1 has not responded for 2 s (--comm-timeout) while files are read or written")"
run 3 "$bin/test_02_faults" stop-in-setup --comm-timeout 2
verdict "a rank that hangs while the run is set up" "$(ends 1 9)$(says "rank 1 has not responded for 2 s (--comm-timeout)")"
run 3 "$bin/test_02_faults" stop-at-start --comm-timeout 1
verdict "a rank that hangs before MPI is up" "$(ends 1 12)$(says "MPI_Init has not ended after 5 s (--comm-timeout)")"
run 3 "$bin/test_02_faults" write-for-long --comm-timeout 1
verdict "a rank that writes for longer than --comm-timeout" "$(ends 0 30)$(cat "$work/err")"

run 3 "$bin/test_02_faults" usage
verdict "a usage error of one rank" "$(ends 2 5)$(says "test_02_faults: --here: rank 1 has no such disk; --there works")$(
    [ "$(grep -c -- --here "$work/err")" = 1 ] || echo "not one line: $(cat "$work/err")")$(grep -i abort "$work/err" | grep -v "job has been")"
run 3 "$bin/test_02_faults" lone-usage --comm-timeout 60
verdict "a usage error of one rank while the others wait" "$(ends 2 10)$(says "rank 1: --here: not foreseen")"
run 3 "$bin/test_02_faults" check
verdict "a broken invariant" "$(ends 1 5)$(says "rank 1: check failed: !odd_one: 1 is not 2 (tests/02_faults.cpp:")"
run 3 "$bin/test_02_faults" throw
verdict "an error of one rank" "$(ends 1 10)$(says "rank 1: a disk is full")"

run 3 "$bin/02_data_parallel" --layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16 --global-batch 6 --tables off --steps 9 \
    --lr 1e30 --warmup-steps 0 --clip 0 --metrics m.jsonl
verdict "a loss that is not finite: one line, with the parameter and the rank" "$(ends 1 10)$(
    [ "$(grep -c "^02_data_parallel: step [0-9]*: loss .*first non-finite parameter: model\..* on rank 0 (3 of 3 ranks have one)" "$work/err")" = 1 ] ||
        head -c 800 "$work/err")$(grep -iE "MPI_ABORT|^rank [0-9]+:" "$work/err")$(
    tail -n 1 m.jsonl | grep -q '"event":"alarm","kind":"non_finite"' || tail -n 1 m.jsonl)"
rm -f m.jsonl

# ---- ranks that die or hang in the middle of training ----
training=("$bin/02_data_parallel" --layers 1 --hidden 32 --heads 4 --ffn 48 --seq-len 16 --global-batch 6 --steps 1000000
    --tables off)
strike KILL 1 3 "${training[@]}"
verdict "SIGKILL: the others end at once, with their logs" "$([ "$code" != 0 ] || echo "exit code 0")$(
    within 5)$(says "rank 0: terminated by SIGTERM" "rank 2: terminated by SIGTERM" "dp.all_reduce #")"
strike STOP 1 3 "${training[@]}" --comm-timeout 4
verdict "SIGSTOP: the watchdog names the wait" "$([ "$code" != 0 ] || echo "exit code 0")$(
    within 9)$(says "has not ended after 4 s (--comm-timeout)" "NOT ENDED")$(
    grep -Eq "rank [02]: dp\.(all_reduce|scalar) #[0-9]+.* has not ended" "$work/err" || echo "the wait is not named; ")"

# ---- bad input ----
refused "a batch that does not divide" 3 "--global-batch 16|3 data-parallel ranks (try --global-batch 18)" --global-batch 16
refused "--comm fake in several processes" 2 "--comm fake|one process" --comm fake --fake-world 4
refused "an output file that only rank 0 opens" 2 "--trace nowhere/t.json|existing, writable folder" --trace nowhere/t.json
run 2 "$bin/02_data_parallel" --help
verdict "--help, once" "$(ends 0 5)$([ "$(grep -c -- '--all-reduce ' "$work/out")" = 1 ] || echo "not once")"
exit $failed
