# What the scripts share that start programs under mpirun. Sourced with the folder of the programs as $1 and the name of
# the chapter's program in $program; leaves the shell in an empty folder of its own, $work.
set -u
bin=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export OMPI_MCA_btl_vader_single_copy_mechanism=none # some containers forbid it, and Open MPI then says so at every message
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

failed=0
verdict() { # NAME PROBLEM: no problem is a pass
    if [ -z "$2" ]; then
        echo "ok   $1"
    else
        echo "FAIL $1: ${2//$'\n'/ }"
        failed=1
    fi
}

# run RANKS COMMAND...: code, seconds, $work/out, $work/err
run() {
    local begin=$SECONDS
    timeout -k 5 60 mpirun --oversubscribe -np "$1" "${@:2}" >"$work/out" 2>"$work/err"
    code=$?
    seconds=$((SECONDS - begin))
}
# says PART...: every part is in stderr. Prints what is missing.
says() {
    local part missing=
    for part; do grep -qF -- "$part" "$work/err" || missing+="'$part' "; done
    [ -z "$missing" ] || echo "${missing}not in: $(head -c 1500 "$work/err")"
}
# ends CODE WITHIN_SECONDS
ends() {
    [ "$code" = "$1" ] || echo "exit code $code, not $1; "
    [ "$seconds" -le "$2" ] || echo "took $seconds s; "
}

strike() { # SIGNAL VICTIM RANKS COMMAND...: sends it to a rank that trains, after 20 steps; --metrics m.jsonl is added
    rm -f m.jsonl
    timeout -k 5 90 mpirun --oversubscribe -np "$3" "${@:4}" --metrics m.jsonl >"$work/out" 2>"$work/err" &
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

refused() { # NAME RANKS "PART|PART" FLAG...: exit code 2; one line of the program's own; nothing on disk
    local parts
    IFS='|' read -ra parts <<<"$3"
    rm -f ./*.jsonl
    run "$2" "$bin/$program" --steps 1 --tables off --metrics m.jsonl "${@:4}"
    verdict "refused: $1" "$(ends 2 10)$(says "${parts[@]}")$(
        [ "$(grep -c "^$program: " "$work/err")" = 1 ] || echo "not one line: $(head -c 800 "$work/err")")$(
        grep -iE "MPI_ABORT|^rank [0-9]+:" "$work/err")$(ls | grep -v '^\(out\|err\)$')"
}
