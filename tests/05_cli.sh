#!/bin/bash
# The command line of chapter 05: good runs through files, and bad input: one line, exit code 2 on all ranks.
# Run: bash tests/05_cli.sh build/bin
program=05_pipeline
. "$(dirname "$0")/ranks.sh"

refused "more stages than layers" 4 "--pp 4: more stages than --layers 2" --pp 4 --layers 2
refused "layers that do not divide" 3 "--layers 4 is not divisible by --pp 3 (try --layers 3 or 6, or --stage-layers 2,1,1)" --pp 3 --global-batch 15
refused "stages that do not sum" 2 "--stage-layers 2,1: 3 layers; the model has 4" --stage-layers 2,1
refused "too many stages listed" 2 "--stage-layers 2,1,1: lists 3 stages; --pp 2 makes 2" --stage-layers 2,1,1
refused "a stage of nothing" 2 "--stage-layers 4,0: each stage needs at least one layer" --stage-layers 4,0
refused "a stage that is no number" 2 "--stage-layers" --stage-layers 2,x
refused "interleaved without whole groups" 4 "--pipeline interleaved: 6 micro-batches are not divisible by --pp 4 (try 4 or 8)" \
    --pp 4 --layers 8 --pipeline interleaved --global-batch 6
refused "chunks of another schedule" 2 "--virtual-stages 2: --pipeline 1f1b has one model chunk per rank (try --pipeline interleaved)" --virtual-stages 2
refused "a schedule that is none" 2 "--pipeline|1f1b|zero-bubble|file:SCHEDULE" --pipeline 2f2b
refused "chunks of a V" 2 "--virtual-stages 3: --pipeline zb-v has two model chunks per rank (try --pipeline interleaved)" --pipeline zb-v --virtual-stages 3
refused "more stages of a V than layers" 4 "--pp 4 x 2 chunks of --pipeline zb-v = 8: more stages than --layers 4" --pipeline zb-v
refused "a V on one stage" 2 "--pipeline dualpipe-v: needs at least two pipeline ranks (try --pp 2)" --pipeline dualpipe-v --pp 1
refused "too few micro-batches for dualpipe-v" 2 "--pipeline dualpipe-v: 3 micro-batches are fewer than 4 on --pp 2 (try 4, or zb-v)" \
    --pipeline dualpipe-v --global-batch 3

# Schedules from files, in a folder beside the one that must stay empty.
files=$(mktemp -d)
trap 'rm -rf "$work" "$files"' EXIT
printf 'F0 F1 B0 B1\nF0 B0 F1 B1\n' >"$files/good.txt"
# Exercise 4: ZB-H2
printf 'F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\nF0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3\n' >"$files/h2.txt"
printf 'F0 F1 B0 B1\nF0 b0 F1 B1\n' >"$files/typo.txt"
printf 'F0 F1 B0 B1\nF0 B0 F1\n' >"$files/half.txt"
printf 'F0 B0 F1 B1\nF0 F1 B0 B1\n' >"$files/cycle.txt"
refused "a schedule's file that is not there" 2 "--pipeline file:$files/none.txt: cannot be read" --pipeline "file:$files/none.txt"
refused "a schedule's file that is a folder" 2 "--pipeline file:$files: is not a regular file" --pipeline "file:$files"
refused "no file" 2 "--pipeline" --pipeline file:
refused "a typo in a schedule" 2 "typo.txt, line 2, word 2 \"b0\": is no step" --pipeline "file:$files/typo.txt" --global-batch 2
refused "half a schedule" 2 "half.txt: rank 1: micro-batch 1 goes through chunk 0 as \"F\"" --pipeline "file:$files/half.txt" --global-batch 2
refused "a schedule that deadlocks" 2 "cycle.txt: rank 0 at B0 waits for the gradient of micro-batch 0 from rank 1; rank 1 at F1" \
    --pipeline "file:$files/cycle.txt" --global-batch 2
refused "a schedule of other micro-batches" 2 "good.txt: is for 2 micro-batches, and there are 4" --pipeline "file:$files/good.txt" --global-batch 4
refused "a schedule of other ranks" 4 "good.txt: has steps for 2 ranks, and --pp is 4 (try --pp 2)" --pipeline "file:$files/good.txt" --global-batch 2
refused "chunks beside a file" 2 "--virtual-stages 2: the chunks of --pipeline file:$files/good.txt are in the file" \
    --pipeline "file:$files/good.txt" --virtual-stages 2
refused "no micro-batch" 2 "--global-batch 2 is not divisible by --micro-batch 4 x 1 data-parallel ranks (try --global-batch 4)" --global-batch 2 --micro-batch 4
refused "zero micro-batches" 2 "--global-batch|integer >= 1" --global-batch 0
refused "more stages than ranks" 2 "--pp 4: 2 ranks are not divisible by 4 (try mpirun -np 4, or --pp 2)" --pp 4
refused "--pp and --dp unlike the ranks" 4 "--dp 4: there are 4 ranks, 2 per model copy (try mpirun -np 8, or --dp 2)" --pp 2 --dp 4
refused "a drawing without tables" 2 "--draw, --pipeline-trace: belong to the tables" --draw x.png

tables_on() { # NAME RANKS PART FLAG...: as refused, with the tables
    run_refused "$2" "$bin/$program" --steps 1 --metrics m.jsonl "${@:4}"
    verdict "refused: $1" "$(ends 2 10)$(says "$3")$(ls | grep -v '^\(out\|err\)$')"
}
tables_on "a drawing of one rank" 1 "one stage is no pipeline to show" --draw x.png
tables_on "a drawing where no file can be" 2 "--draw nowhere/x.png: cannot be written" --draw nowhere/x.png
tables_on "the toy on three ranks" 3 "--toy-deadlock on: is played by two ranks" --toy-deadlock on

run 2 "$bin/$program" --toy-deadlock on --comm-timeout 2
verdict "the toy hangs, and the watchdog says where" "$([ "$code" != 0 ] || echo "exit code 0; ")$(
    [ "$seconds" -le 15 ] || echo "$seconds s; ")$(
    grep -q "rank 0 at F1 sends activations of micro-batch 1 to rank 1; rank 1 at B0 sends the gradient" "$work/out" ||
        echo "no cycle in $(head -c 600 "$work/out"); ")$(grep -q "world.send" "$work/err" || echo "no send in $(head -c 600 "$work/err")")"

shape=(--layers 4 --hidden 32 --heads 4 --ffn 48 --vocab 259 --seq-len 16 --global-batch 8 --init-std 0.1 --lr 0.001)
one_rank
"$bin/schedule" --name zb-v --stages 4 --micro-batches 8 --write "$files/zb_v.txt" >"$work/out" 2>"$work/err"
reference_runs "--pipeline 1f1b" "--pipeline zero-bubble --recompute full" "--pp 2 --pipeline interleaved" "--pp 2 --pipeline gpipe --stage-layers 1,3" \
    "--pp 2 --pipeline dualpipe-v" "--pp 2 --pipeline file:$files/good.txt --micro-batch 2" \
    "--pp 2 --pipeline file:$files/h2.txt"
shape[1]=8 # layers
one_rank
reference_runs "--pipeline file:$files/zb_v.txt"
shape[1]=4
one_rank
loads_and_saves 4
verdict "evaluation, trace, metrics" "$(evaluated_run)$(
    grep -q '"pp.send":16384' m.jsonl || echo "pp.send is not 8 x 16 x 32 x 4: $(grep -o '"pp.send":[0-9]*' m.jsonl | head -n 1); ")"
run 2 "$bin/$program" "${shape[@]}" --steps 1 --pipeline-trace p.json --pipeline zero-bubble
verdict "the tables, a trace of the pipeline" "$(ends 0 60)$(for word in "zero-bubble" "simulated from measured times" "measured (" "in flight"; do
    grep -qF -- "$word" "$work/out" || echo "no '$word'; "; done)$(grep -q '"name":"W7"' p.json || echo "no W7 in the trace")"
if /usr/bin/python3 -c "import matplotlib" 2>/dev/null || python3 -c "import matplotlib" 2>/dev/null; then
    name="p'; touch pwned; echo '.png" # no shell may read this
    echo kept >"$name.json"
    run 2 "$bin/$program" "${shape[@]}" --steps 1 --draw "$name"
    verdict "a drawing" "$(ends 0 60)$(head -c 8 "$name" 2>/dev/null | grep -q PNG || echo "no PNG")$(grep -v '^kept$' "$name.json")$(
        ls | grep -v '^\(out\|err\|.*\.jsonl\|[tp]\.json\|p.*\.png\|p.*\.png\.json\|one.*\|several.*\|again\)$')"
fi
run_refused 2 "$bin/$program" "${shape[@]}" --steps 1 --draw one
verdict "refused: a drawing where a folder is" "$(ends 2 10)$(says "--draw one: is a folder (must name a file)")"
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
not_run() { # NAME PART FLAG...: bad input, in one line
    sandbox "${@:3}"
    verdict "schedule refuses: $1" "$(ends 2 5)$(says "$2")$([ "$(wc -l <"$work/err")" = 1 ] || cat "$work/err")$(
        ls "$files" | grep -v 'good.txt\|h2.txt\|typo.txt\|half.txt\|cycle.txt\|zb_v.txt')"
}
rm -f "$work"/sandbox*
sandbox
verdict "a table of all schedules" "$(ends 0 5)$(prints "zb-v         25.5   5.9%     5.9%      0.0%     0.0%" "dualpipe-v   25.5")"
sandbox --file "$files/zb_v.txt" --steps 2 --csv sandbox.csv --spans-csv sandbox_spans.csv --write sandbox.txt
verdict "a file: checked, simulated, drawn as text, written as data" "$(ends 0 5)$(
    prints "buffered sends:     all ranks reach the end" "synchronous sends:  deadlock: rank" \
        "5.9% by the clock (25.5), 0.0% of the longest rank's own span (24)" "rank 3  |" "each rank goes on" "zb_v.txt")$(
    sed -n 2p sandbox.csv | grep -q ',4,8,2,1,1,1,0,1,0 7,0,24,24,' || cat sandbox.csv)$(
    [ "$(wc -l <sandbox_spans.csv)" = 385 ] || wc -l sandbox_spans.csv)$(diff <(tail -n +2 sandbox.txt) <(tail -n +2 "$files/zb_v.txt"))"
if /usr/bin/python3 -c "import matplotlib" 2>/dev/null || python3 -c "import matplotlib" 2>/dev/null; then
    sandbox --name dualpipe-v --stages 2 --micro-batches 4 --draw sandbox.png
    verdict "a schedule as PNG" "$(ends 0 30)$(head -c 8 sandbox.png | grep -q PNG || echo "no PNG")"
fi
sandbox --name 1f1b --stages 4 --micro-batches 8 --costs 1,1.5,0.5 --hop 0.25 --slow-rank 1=2
verdict "costs, hop, a slow rank" "$(ends 0 5)$(prints "F 1, I 1.5, W 0.5, hop 0.25, rank 1 x 2" "1     1")"
sandbox --file "$files/h2.txt" --steps 3
verdict "ZB-H2: no idle time in a rank's own span" "$(ends 0 5)$(
    prints "0.0% of the longest rank's own span (12)" "its own first step               37         13                12")"
sandbox --file "$files/half.txt"
verdict "an incomplete schedule: exit code 1" "$(ends 1 5)$(says "half.txt: is not complete: rank 1: micro-batch 1 goes through chunk 0 as \"F\"")"
sandbox --file "$files/cycle.txt"
verdict "a deadlock: exit code 1, and who waits for whom" "$(ends 1 5)$(says "cycle.txt: deadlocks, however messages are sent: rank 0 at B0 waits")"
not_run "a typo" "typo.txt, line 2, word 2 \"b0\": is no step" --file "$files/typo.txt"
not_run "a file that is not there" "--file nothing.txt: cannot be read" --file nothing.txt
not_run "a file and a name" "--file good.txt and --name 1f1b: are two schedules" --file good.txt --name 1f1b
not_run "other stages" "--stages 3: --file $files/good.txt has 2" --file "$files/good.txt" --stages 3
not_run "other micro-batches" "--micro-batches 3: --file $files/good.txt has 2" --file "$files/good.txt" --micro-batches 3
not_run "costs that are none" "1,2 must be three numbers F,I,W" --costs 1,2
not_run "costs of nothing" "0,0,0 must be three numbers F,I,W that are not all 0" --costs 0,0,0
not_run "a rank that there is not" "--slow-rank 4=1.5: there are ranks 0 to 3" --slow-rank 4=1.5
not_run "a slow rank without a factor" "2 must be RANK=TIMES" --slow-rank 2
not_run "a rank that takes no time" "1=0 must be RANK=TIMES" --slow-rank 1=0
sandbox --name 1f1b --costs 1e-320,1,1 --slow-rank 1=1e-320
verdict "numbers that are nearly 0" "$(ends 0 5)$(cat "$work/err")"
yes "F0 B0" | head -n 5000 >many.txt
not_run "more ranks than are simulated" "--file many.txt: has 5000 lines of steps; at most 512" --file many.txt
not_run "too many passes in all" "--steps 1000: more than 2000000 passes in all; a training step has 8000 (try 250)" \
    --name 1f1b --micro-batches 1000 --steps 1000
not_run "too few micro-batches" "7 micro-batches are fewer than 8 on --stages 4 (try 8, or zb-v)" --name dualpipe-v --micro-batches 7
not_run "an output of no schedule" "--csv: needs a schedule" --csv "$files/a.csv"
not_run "one file for two" "--write" --file "$files/good.txt" --write "$files/good.txt"
not_run "a drawing where none can be" "--draw nowhere/x.png" --file "$files/good.txt" --draw nowhere/x.png
exit $failed
