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
refused "a schedule that is none" 2 "--pipeline|1f1b|zero-bubble" --pipeline 2f2b
refused "no micro-batch" 2 "--global-batch 2 is not divisible by --micro-batch 4 x 1 data-parallel ranks (try --global-batch 4)" --global-batch 2 --micro-batch 4
refused "zero micro-batches" 2 "--global-batch|integer >= 1" --global-batch 0
refused "more stages than ranks" 2 "--pp 4: 2 ranks are not divisible by 4 (try mpirun -np 4, or --pp 2)" --pp 4
refused "--pp and --dp unlike the ranks" 4 "--dp 4: there are 4 ranks, 2 per model copy (try mpirun -np 8, or --dp 2)" --pp 2 --dp 4
refused "a drawing without tables" 2 "--draw, --pipeline-trace: belong to the tables" --draw x.png

tables_on() { # NAME RANKS PART FLAG...: as refused, with the tables
    run "$2" "$bin/$program" --steps 1 --metrics m.jsonl "${@:4}"
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
reference_runs "--pipeline 1f1b" "--pipeline zero-bubble --recompute full" "--pp 2 --pipeline interleaved" "--pp 2 --pipeline gpipe --stage-layers 1,3"
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
run 2 "$bin/$program" "${shape[@]}" --steps 1 --draw one
verdict "refused: a drawing where a folder is" "$(ends 2 10)$(says "--draw one: is a folder (must name a file)")"
mkdir fake
printf '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho Traceback >&2\necho "Error: no ink" >&2\nexit 3\n' >fake/python3
chmod +x fake/python3
PATH=$PWD/fake:$PATH run 2 "$bin/$program" "${shape[@]}" --steps 1 --draw q.png
verdict "a drawing that fails" "$(ends 1 60)$(says "ended with exit code 3: Error: no ink")$(
    grep Traceback "$work/err")$(ls | grep q.png)"
exit $failed
