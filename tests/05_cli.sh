#!/bin/bash
# The command line of chapter 05: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/05_cli.sh build/bin
program=05_pipeline
. "$(dirname "$0")/ranks.sh"

tables= refused "a drawing where no file can be" 2 "--draw nowhere/x.png: cannot be written" --draw nowhere/x.png
tables= refused "the toy on three ranks" 3 "--toy-deadlock on: is played by two ranks" --toy-deadlock on

# Schedules, in a folder beside the one that must stay empty.
files=$(mktemp -d)
trap 'rm -rf "$work" "$files"' EXIT
printf 'F0 F1 B0 B1\nF0 B0 F1 B1\n' >"$files/good.txt"
# Exercise 4: ZB-H2
printf 'F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\nF0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3\n' >"$files/h2.txt"
printf 'F0 F1 B0 B1\nF0 B0 F1\n' >"$files/half.txt"
printf 'F0 B0 F1 B1\nF0 F1 B0 B1\n' >"$files/cycle.txt"

run 2 "$bin/$program" --toy-deadlock on --comm-timeout 2
verdict "the toy hangs, and the watchdog says where" "$([ "$code" != 0 ] || echo "exit code 0; ")$(
    within 15)$(
    grep -q "rank 0 at F1 sends activations of micro-batch 1 to rank 1; rank 1 at B0 sends the gradient" "$work/out" ||
        echo "no cycle in $(head -c 600 "$work/out"); ")$(grep -q "world.send" "$work/err" || echo "no send in $(head -c 600 "$work/err")")"

shape=(--layers 8 --hidden 32 --heads 4 --ffn 48 --vocab 259 --seq-len 16 --global-batch 8 --init-std 0.1 --lr 0.001)
"$bin/schedule" --name zb-v --stages 4 --micro-batches 8 --write "$files/zb_v.txt" >"$work/out" 2>"$work/err"
one_rank
reference_runs "--pipeline file:$files/zb_v.txt"
shape[1]=4 # layers
one_rank
reference_runs "--pipeline 1f1b" "--pipeline zero-bubble --recompute full" "--pp 2 --pipeline interleaved" "--pp 2 --pipeline gpipe --stage-layers 1,3" \
    "--pp 2 --pipeline dualpipe-v" "--pp 2 --pipeline file:$files/good.txt --micro-batch 2" \
    "--pp 2 --pipeline file:$files/h2.txt"
if ! ldd "$bin/$program" | grep -q asan; then # OpenBLAS retries for ever to map its buffers
    least=300000 # in which the program itself has room
    while (ulimit -v $least; "$bin/$program" --version >/dev/null 2>&1; [ $? = 127 ]); do least=$((least + 20000)); done
    run 2 bash -c "ulimit -v $least -t 20;"' exec "$@"' bash "$bin/$program" "${shape[@]}" --steps 1 --tables off
    verdict "too little address space" "$(ends 2 20)$(says "$program: ulimit -v $least: leaves no room")$(
        [ "$(grep -c "^$program: " "$work/err")" = 1 ] || echo "not one line: $(head -c 800 "$work/err")")"
fi
loads_and_saves 4
verdict "evaluation, trace, metrics" "$(evaluated_run)$(
    grep -q '"pp.send":16384' m.jsonl || echo "pp.send is not 8 x 16 x 32 x 4: $(grep -o '"pp.send":[0-9]*' m.jsonl | head -n 1); ")"
drawing=() name="p'; touch pwned; echo '.png" # no shell may read this
if /usr/bin/python3 -c "import matplotlib" 2>/dev/null || python3 -c "import matplotlib" 2>/dev/null; then
    drawing=(--draw "$name")
    echo kept >"$name.json"
fi
run 2 "$bin/$program" "${shape[@]}" --steps 1 --pipeline-trace p.json --pipeline zero-bubble "${drawing[@]}"
verdict "the tables, a trace of the pipeline" "$(ends 0 60)$(for word in "zero-bubble" "simulated from measured times" "measured (" "in flight"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)$(grep -q '"name":"W7"' p.json || echo "no W7 in the trace")"
if [ -n "${drawing[*]}" ]; then
    verdict "a drawing" "$(head -c 8 "$name" 2>/dev/null | grep -q PNG || echo "no PNG")$(grep -v '^kept$' "$name.json")$(
        ls | grep -v '^\(out\|err\|.*\.jsonl\|[tp]\.json\|p.*\.png\|p.*\.png\.json\|one.*\|several.*\|again\)$')"
fi
mkdir fake
printf '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho Traceback >&2\necho "Error: no ink" >&2\nexit 3\n' >fake/python3
chmod +x fake/python3
PATH=$PWD/fake:$PATH run 2 "$bin/$program" "${shape[@]}" --steps 1 --draw q.png
verdict "a drawing that fails" "$(ends 1 60)$(says "ended with exit code 3: Error: no ink")$(
    grep Traceback "$work/err")$(ls | grep q.png)"

# ---- the program schedule: no mpirun, under a second ----
sandbox() { # FLAG...: code, seconds, $work/out, $work/err
    local begin=$SECONDS
    timeout -k 5 20 "$bin/schedule" "$@" >"$work/out" 2>"$work/err"
    code=$?
    seconds=$((SECONDS - begin))
}
prints() { # PART...: every part is in stdout. Prints what is missing.
    local part
    for part; do grep -qF -- "$part" "$work/out" || echo "no '$part' in $(head -c 1200 "$work/out"); "; done
}
rm -f "$work"/sandbox*
sandbox
verdict "a table of all schedules" "$(ends 0 5)$(prints "zb-v         25.5   5.9%     5.9%      0.0%     0.0%" "dualpipe-v   25.5")"
sandbox --file "$files/zb_v.txt" --steps 2 --csv sandbox.csv --spans-csv sandbox_spans.csv --write sandbox.txt
verdict "a file: checked, simulated, drawn as text, written as data" "$(ends 0 5)$(
    prints "buffered sends:     all ranks reach the end" "blocking sends:     would deadlock: rank" \
        "5.9% by the clock (25.5), 0.0% of the longest rank's own span (24)" "rank 3  |" "each rank goes on" "zb_v.txt")$(
    sed -n 2p sandbox.csv | grep -q ',4,8,2,1,1,1,0,1,0 7,0,24,24,' || cat sandbox.csv)$(
    [ "$(wc -l <sandbox_spans.csv)" = 385 ] || wc -l sandbox_spans.csv)$(diff <(tail -n +2 sandbox.txt) <(tail -n +2 "$files/zb_v.txt"))"
if [ -n "${drawing[*]}" ]; then
    sandbox --name dualpipe-v --stages 2 --micro-batches 4 --draw sandbox.png
    verdict "a schedule as PNG" "$(ends 0 30)$(head -c 8 sandbox.png | grep -q PNG || echo "no PNG")"
fi
sandbox --name 1f1b --stages 4 --micro-batches 8 --costs 1,1.5,0.5 --hop 0.25 --slow-rank 1=2
verdict "costs, hop, a slow rank" "$(ends 0 5)$(prints "F 1, I 1.5, W 0.5, hop 0.25, rank 1 x 2" "1     1")"
sandbox --name 1f1b --stages 4 --micro-batches 16
verdict "steps that are too short for numbers: none of their pass has one" "$(ends 0 5)$(prints "rank 0  |FF")$(
    grep '^rank' "$work/out" | grep '[FB][0-9]')"
sandbox --file "$files/h2.txt" --steps 3
verdict "ZB-H2: no idle time in a rank's own span" "$(ends 0 5)$(
    prints "0.0% of the longest rank's own span (12)" "its own first step               37         13                12")"
sandbox --file "$files/half.txt"
verdict "an incomplete schedule: exit code 1" "$(ends 1 5)$(says "half.txt: is not complete: rank 1: micro-batch 1 goes through chunk 0 as \"F\"")"
sandbox --file "$files/cycle.txt"
verdict "a deadlock: exit code 1, and who waits for whom" "$(ends 1 5)$(says "cycle.txt: deadlocks, however messages are sent: rank 0 at B0 waits")"
sandbox --name 1f1b --costs 1e-320,1,1 --slow-rank 1=1e-320
verdict "numbers that are nearly 0" "$(ends 0 5)$(cat "$work/err")"
exit $failed
