# What the scripts share that start programs under mpirun. Sourced with the folder of the programs as $1 and the name of
# the chapter's program in $program; leaves the shell in $work.
. "$(dirname "$0")/verdict.sh"
bin=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none # some containers forbid it, and Open MPI then says so at every message
cd "$work" || exit 1

# run RANKS COMMAND...: one without mpirun. code, seconds, $work/out, $work/err
run() {
    local begin=$SECONDS mpirun=(mpirun --oversubscribe -np "$1")
    [ "$1" -gt 1 ] || mpirun=()
    timeout -k 5 $((60 * patience)) "${mpirun[@]}" "${@:2}" >"$work/out" 2>"$work/err"
    code=$?
    seconds=$((SECONDS - begin))
}
# The same where all ranks end with a usage error: mpirun need not leave the others its second to end in.
run_refused() { OMPI_MCA_odls_base_sigkill_timeout=0 run "$@"; }
# says PART...: every part is in stderr. Prints what is missing.
says() {
    local part missing=
    for part; do grep -qF -- "$part" "$work/err" || missing+="'$part' "; done
    [ -z "$missing" ] || echo "${missing}not in: $(head -c 1500 "$work/err")"
}
# A limit for a machine whose unit (budgets.txt) is five CPU seconds; run.sh gives a slower one as much more.
patience=${TRAIN70B_PATIENCE:-1}
within() { [ "$seconds" -le $(($1 * patience)) ] || echo "took $seconds s; "; } # SECONDS
ends() { # CODE WITHIN_SECONDS
    [ "$code" = "$1" ] || echo "exit code $code, not $1; "
    within "$2"
}

strike() { # SIGNAL VICTIM RANKS COMMAND...: sends it to a rank that trains, after 20 steps; --metrics m.jsonl is added
    rm -f m.jsonl
    timeout -k 5 $((90 * patience)) mpirun --oversubscribe -np "$3" "${@:4}" --metrics m.jsonl >"$work/out" 2>"$work/err" &
    local mpirun_pid=$! i pid victim=
    for ((i = 0; i < 600; ++i)); do
        [ "$(grep -c '"event":"step"' m.jsonl 2>/dev/null)" -ge 20 ] 2>/dev/null && break
        sleep 0.1
    done
    for pid in $(pgrep -f -- "--metrics m.jsonl"); do
        [ "$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')" = "$2" ] &&
            [ "$(readlink -f "/proc/$pid/cwd")" = "$(readlink -f "$work")" ] && victim=$pid
    done
    [ -n "$victim" ] || echo "no rank $2 to strike; "
    local begin=$SECONDS
    kill "-$1" "$victim"
    wait $mpirun_pid
    code=$?
    seconds=$((SECONDS - begin))
}

tables="--tables off" # where the program has such a flag
# Real ranks; most of what is refused is in refusals.cpp.
refused() { # NAME RANKS "PART|PART" FLAG...: exit code 2; one line of the program's own; nothing on disk
    local parts
    IFS='|' read -ra parts <<<"$3"
    rm -f ./*.jsonl
    run_refused "$2" "$bin/$program" --steps 1 $tables --metrics m.jsonl "${@:4}"
    verdict "refused: $1" "$(ends 2 10)$(says "${parts[@]}")$(
        [ "$(grep -c "^$program: " "$work/err")" = 1 ] || echo "not one line: $(head -c 800 "$work/err")")$(
        grep -iE "MPI_ABORT|^rank [0-9]+:" "$work/err")$(ls | grep -v '^\(out\|err\)$')"
}

# ---- good runs of a small model, whose flags are in ${shape[@]} ----
one_rank() { # FLAG...: chapter 01's run of two steps: one, one_reference
    "$bin/01_single_gpu" "${shape[@]}" --steps 2 --save-hf one --save-reference one_reference "$@" >"$work/out" 2>"$work/err"
    verdict "one rank's run" "$([ $? = 0 ] || cat "$work/err")"
}
like_one_rank() { # REFERENCE: prints what `compare` says if the reference run is not near one_reference
    "$bin/compare" "$1" one_reference 2>&1 | tail -n 1 | grep -qi "within" ||
        "$bin/compare" "$1" one_reference 2>&1 | head -c 600
}
reference_runs() { # "FLAG..."...: a run on four ranks with each list of flags is near one rank's
    local flags
    for flags; do
        rm -rf several several_reference
        run 4 "$bin/$program" "${shape[@]}" $flags --steps 2 --tables off --save-hf several \
            --save-reference several_reference --comm-check on
        verdict "a reference run with $flags" "$(ends 0 20)$(like_one_rank several_reference)"
    done
}
loads_and_saves() { # RANKS FLAG...: ranks that load `one` and save it write the same file
    run "$1" "$bin/$program" --load-hf one --data "$root/README.md" --seq-len 16 --global-batch 4 --steps 0 --tables off \
        --save-hf again "${@:2}"
    verdict "loaded by $1 ranks, saved by them: the same file" "$(ends 0 20)$(
        cmp one/model.safetensors again/model.safetensors 2>&1)"
}
evaluated_run() { # FLAG...: two steps on two ranks, evaluation after each: m.jsonl, t.json. Prints what is wrong.
    run 2 "$bin/$program" "${shape[@]}" --data "$root/README.md" --steps 2 --val-fraction 0.2 --eval-every 1 \
        --tables off --metrics m.jsonl --trace t.json "$@"
    ends 0 20
    cat "$work/err"
    [ "$(grep -c '"event":"eval"' m.jsonl)" = 2 ] || echo "no evaluation; "
}
equal_comm_bytes() { # of the steps in m.jsonl
    [ "$(grep '"event":"step"' m.jsonl | sed 's/.*"comm_bytes"//' | sort -u | wc -l)" = 1 ] || echo "steps differ in bytes; "
}
