#!/bin/bash
# Checkpoints on the command line: what is refused (exit code 2, one line, nothing touched), signals, full disks, folders
# that go away, and what a run leaves and continues.
# Run: bash tests/08_checkpoint.sh build/bin
program=08_3d_full
. "$(dirname "$0")/ranks.sh"
shape=(--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8
    --init-std 0.1 --lr 0.001)

start() { run "$1" "$bin/$program" "${@:2}"; } # RANKS FLAG...
losses() { # FILE [FIRST [LAST]]: of these steps
    python3 - "$@" <<'P'
import json, sys
first, last = [*map(int, sys.argv[2:]), 0, 10**9][:2] if len(sys.argv) < 4 else map(int, sys.argv[2:4])
for line in open(sys.argv[1]):
    event = json.loads(line)
    if event["event"] == "step" and first <= event["step"] <= last:
        print(event["step"], event["loss"])
P
}
state() { # FOLDER: names, kinds, sizes, bytes
    (cd "$1" 2>/dev/null && find . -printf '%p %y %s %l\n' | sort && find . -type f -exec sha256sum {} + | sort) | sha256sum
}
newest() { ls "$1" | sed -n 's/^step-\([0-9]*\)$/\1/p' | sort -n | tail -n 1; }
begin_run() { # COMMAND...: in the background, until it has trained 5 steps: pid; problem
    problem="has not begun; "
    rm -f m.jsonl
    "$@" --steps 1000000 --metrics m.jsonl >"$work/out" 2>"$work/err" &
    pid=$!
    for ((i = 0; i < 300; ++i)); do
        [ "$(grep -c '"event":"step"' m.jsonl 2>/dev/null)" -ge 5 ] 2>/dev/null && { problem=; return; }
        sleep 0.1
    done
}
end_run() { # waits: code, seconds
    local begin=$SECONDS
    for ((i = 0; i < 200; ++i)); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$pid" 2>/dev/null
    wait "$pid"
    code=$?
    seconds=$((SECONDS - begin))
}

start 2 "${shape[@]}" --tp 2 --steps 8 --metrics whole.jsonl
verdict "a run of 8 steps" "$(ends 0 20)$(cat "$work/err" | head -c 300)"
start 2 "${shape[@]}" --tp 2 --steps 8 --stop-after 4 --checkpoint-every 2 --weights-every 2 --checkpoint-dir base \
    --metrics m.jsonl
verdict "--stop-after 4 --checkpoint-every 2 --weights-every 2" "$(ends 0 20)$(
    [ "$(ls base | tr '\n' ' ')" = "step-2 step-4 weights-2 weights-4 " ] || ls base)"

# ---- tied embeddings: 4 ranks -> one -------------------------------------------------------------------------------

tied=("${shape[@]}" --tied-embeddings on --dtype fp64 --steps 6)
start 1 "${tied[@]}" --metrics tied.jsonl
start 4 "${tied[@]}" --tp 2 --pp 2 --checkpoint-dir tied --stop-after 3 --metrics tied-4.jsonl
start 1 "${tied[@]}" --checkpoint-dir tied --resume --metrics tied-1.jsonl
verdict "tied embeddings: tp 2, pp 2, then one rank" "$(ends 0 20)$(python3 - <<'P'
import json
steps = lambda *names: [(e["loss"], e["grad_norm"]) for name in names for e in map(json.loads, open(name))
                        if e["event"] == "step"]
one, parts = steps("tied.jsonl"), steps("tied-4.jsonl", "tied-1.jsonl")
if not (len(one) == len(parts) == 6 and all(abs(x / y - 1) <= 1e-10 for a, b in zip(one, parts) for x, y in zip(a, b))):
    print(one, "not", parts)
P
)"
rm -rf tied tied*.jsonl

# ---- refused ---------------------------------------------------------------------------------------------------------

refused() { # NAME "PART|PART" COMMAND FLAG...: by two ranks. ck is a copy of base, changed by COMMAND
    local parts before
    IFS='|' read -ra parts <<<"$2"
    rm -rf ck m.jsonl && cp -a base ck
    eval "$3" || verdict "the setting of: $1" "cannot be made"
    before=$(state ck)
    run_refused 2 "$bin/$program" "${shape[@]}" --steps 8 --metrics m.jsonl "${@:4}"
    verdict "refused: $1" "$(ends 2 10)$(says "${parts[@]}")$(
        [ "$(grep -c "^$program: " "$work/err")" = 1 ] || echo "not one line: $(head -c 800 "$work/err"); ")$(
        grep -iE "MPI_ABORT|^rank [0-9]+:" "$work/err")$(
        [ "$(state ck)" = "$before" ] || echo "ck has changed: $(ls -A ck | tr '\n' ' '); ")$(
        [ ! -e m.jsonl ] || echo "a metrics file")"
}
# Most of what is refused is in refusals_checkpoint.cpp.
here=("${shape[@]}" --checkpoint-dir ck)
refused "a flipped bit in the second rank's file" "ck/step-4/rank-00001.safetensors: corrupt|(try --resume-from ck/step-2)" \
    "python3 -c \"f = open('ck/step-4/rank-00001.safetensors', 'r+b'); f.seek(9999); b = f.read(1)[0]; f.seek(9999); f.write(bytes([b ^ 4]))\"" \
    --tp 2 --resume --checkpoint-dir ck
refused "another run's folder" \
    "--checkpoint-dir ck: has the checkpoints of another run, up to step-4 (try --resume, or another folder)" : \
    --checkpoint-dir ck
refused "a folder that cannot be written" "--checkpoint-dir /proc/self" : --checkpoint-dir /proc/self

# ---- what continues --------------------------------------------------------------------------------------------------

rm -rf ck && cp -a base ck && cp "$work/whole.jsonl" m.jsonl
mkdir ck/step-7.tmp ck/weights-3.tmp ck/mine.tmp && echo x >ck/step-7.tmp/rank-00000.json
sed -i '/"step":5,/,$d' m.jsonl && printf '{"event":"ste' >>m.jsonl # four steps, half a line
start 2 "${shape[@]}" --tp 2 --steps 8 --resume --checkpoint-dir ck --metrics m.jsonl
verdict "resumed: the losses of the whole run, the metrics file continued, half a line and leftovers removed" "$(ends 0 20)$(
    [ "$(losses m.jsonl)" = "$(losses whole.jsonl)" ] || echo "other losses $(losses m.jsonl); ")$(
    [ "$(ls ck | tr '\n' ' ')" = "mine.tmp step-4 step-8 weights-2 weights-4 " ] || ls ck)"
start 1 "${shape[@]}" --steps 12 --resume --checkpoint-dir ck --checkpoint-every 1 --keep 3 --lr-schedule constant \
    --metrics m.jsonl
verdict "--keep 3; another schedule is said" "$(ends 0 20)$(
    [ "$(ls -d ck/step-* | wc -l)" = 3 ] && [ -e ck/step-12 ] || ls ck)$(
    grep -q "differs from the checkpoint's run: --steps 12, not 8, --lr-schedule constant, not cosine" "$work/out" || cat "$work/out")"
rm -rf ck && cp -a base ck && rm -r ck/step-4
for step in 5 6 7 8; do cp -a ck/weights-4 ck/weights-$step && rm ck/weights-$step/rank-00001*; done # of the run before
start 1 "${shape[@]}" --steps 8 --resume --checkpoint-dir ck --weights-every 4
verdict "weights that are there already are written again" "$(ends 0 20)$(cat "$work/err")$(
    ls ck | grep tmp)$(python3 "$root/tests/checkpoint_reader.py" --read ck/weights-8 2>&1 | grep -v "all is there")"
python3 "$root/tests/checkpoint_reader.py" --read ck/step-8 >read.txt 2>&1
verdict "another reader" "$(grep -q "step 8, full" read.txt || cat read.txt)"
rm -rf ck linked && mkdir ck linked && mv base/step-2 linked/ && ln -s "$PWD/linked/step-2" ck/step-2
start 1 "${shape[@]}" --steps 8 --stop-after 3 --resume --checkpoint-dir ck
verdict "a link to a checkpoint is one" "$(ends 0 20)$([ -e ck/step-3 ] || ls ck)"
mv linked/step-2 base/

# ---- signals ---------------------------------------------------------------------------------------------------------

stopped() { # RANKS: the run in ck has ended as asked. Resumes for 3 steps; a run without the signal has the same losses
    local last
    ends 0 10
    last=$(losses m.jsonl | tail -n 1 | cut -d ' ' -f 1)
    [ "$(newest ck)" = "$last" ] || echo "the newest is of step $(newest ck), not $last; "
    ls ck | grep tmp
    start "$1" "${shape[@]}" --tp "$1" --steps 1000000 --resume --checkpoint-dir ck --stop-after $((last + 3)) \
    --metrics m.jsonl
    ends 0 20
    start "$1" "${shape[@]}" --tp "$1" --steps 1000000 --stop-after $((last + 3)) --metrics w.jsonl
    [ "$(losses m.jsonl)" = "$(losses w.jsonl)" ] || echo "other losses than without a signal; "
}
rm -rf ck
begin_run mpirun --oversubscribe -np 2 "$bin/$program" "${here[@]}" --tp 2
timeout 60 "$bin/$program" "${here[@]}" --steps 1000000 --metrics second.jsonl >out2 2>err2
code2=$?
verdict "refused: a second run in the same folder" "$problem$([ $code2 = 2 ] || echo "exit code $code2; ")$(
    [ ! -e second.jsonl ] || echo "a metrics file; ")$(
    [ "$(wc -l <err2)" = 1 ] && grep -qF -- "--checkpoint-dir ck: another run is writing there" err2 || cat err2)$(
    kill -0 $pid || echo "the first one has ended")"
kill -USR1 $pid
end_run
verdict "SIGUSR1 to mpirun: ends after the step, complete; --resume goes on as if nothing had been" "$problem$(stopped 2)"
rm -rf ck
begin_run "$bin/$program" "${here[@]}" --checkpoint-every 2
kill -TERM $pid
end_run
verdict "SIGTERM without mpirun: the same" "$problem$(says "SIGTERM: stops after this step")$(stopped 1)"

rm -rf ck
begin_run mpirun --oversubscribe -np 2 "$bin/$program" "${here[@]}" --tp 2 --checkpoint-every 1
kill -TERM $pid
end_run
verdict "SIGTERM to mpirun: ends, the newest complete checkpoint stays and is gone on from" "$([ "$code" != 0 ] || echo "exit code 0; ")$(
    within 8)$(last=$(newest ck)
    start 2 "${here[@]}" --tp 2 --steps 1000000 --resume --stop-after $((last + 2)) --metrics m2.jsonl
    ends 0 20
    [ "$(newest ck)" = $((last + 2)) ] || ls -A ck
    ls -A ck | grep -E "tmp|probe"
    losses m.jsonl $((last + 1)) $((last + 2)) >a.txt
    losses m2.jsonl | head -n "$(wc -l <a.txt)" | cmp - a.txt 2>&1)"

# ---- what cannot be written ------------------------------------------------------------------------------------------

goes_on() { # it trains 5 more steps
    local last
    last=$(wc -l <m.jsonl)
    for ((i = 0; i < 100; ++i)); do [ "$(wc -l <m.jsonl)" -ge $((last + 5)) ] && return; sleep 0.1; done
    echo "does not go on: $(tail -n 3 "$work/err"); "
}
wait_for_line() { # FILE TEXT
    for ((i = 0; i < 100; ++i)); do grep -qF -- "$2" "$1" && return; sleep 0.1; done
    echo "no '$2': $(tail -n 3 "$1"); "
}
rm -rf ck
begin_run mpirun --oversubscribe -np 2 "$bin/$program" "${here[@]}" --tp 2 --checkpoint-every 2
mv ck gone
problem+=$(wait_for_line "$work/out" "not written; there is no complete checkpoint")$(goes_on)
kill -USR1 $pid
end_run
verdict "the folder is removed during the run: training goes on, exit code 1 at the end" "$problem$(ends 1 10)$(
    says "cannot be created (No such file or directory)" "could not be written; there is no complete checkpoint")$(
    grep -q '"event":"checkpoint_failed"' m.jsonl || echo "no event")"

mkdir -p full
if mount -t tmpfs -o size=3M none full 2>/dev/null; then
    trap 'umount "$work/full" 2>/dev/null; rm -rf "$work"' EXIT
    begin_run mpirun --oversubscribe -np 2 "$bin/$program" "${shape[@]}" --checkpoint-dir full/ck --tp 2 \
    --checkpoint-every 2 --keep 1
    for ((i = 0; i < 10; ++i)); do # again: a checkpoint that fails leaves its space
        cat /dev/zero >>full/ballast 2>/dev/null
        sleep 0.1
    done
    problem+=$(wait_for_line "$work/out" "not written; the newest is step-")$(goes_on)
    kill -USR1 $pid
    end_run
    verdict "the disk is full: training goes on, exit code 1 at the end" "$problem$(ends 1 10)$(
        says "No space left on device" "could not be written; the newest is step-$(newest full/ck)")$(ls -A full/ck | grep -E "tmp")"
    rm full/ballast
    last=$(newest full/ck)
    start 1 "${shape[@]}" --checkpoint-dir full/ck --resume --steps 1000000 --stop-after $((last + 2)) --metrics \
    m2.jsonl
    verdict "the checkpoint before it is complete" "$(ends 0 20)$([ "$(newest full/ck)" = $((last + 2)) ] || ls full/ck)"
    rm -r full/ck
    start 1 "${shape[@]}" --checkpoint-dir full/ck --steps 1000000 --stop-after 4 --checkpoint-every 1 --keep 4
    # The first and the last step's are there; one between waits while another is being written, on a slow machine.
    mapfile -t older < <(ls full/ck | sed -n 's/^step-\([0-9]*\)$/\1/p' | sort -n | head -n -1)
    cat /dev/zero >full/ballast 2>/dev/null
    start 2 "${shape[@]}" --checkpoint-dir full/ck --tp 2 --steps 1000000 --stop-after 7 --checkpoint-every 1 --keep 1 --resume
    verdict "a full disk: what --keep does not keep makes room for the next checkpoint" "$(ends 0 20)$(
        says "No space left on device")$(
        grep -q "step-4; the disk is full: removes ${#older[@]} older ones, up to step-${older[-1]} (--keep 1)" "$work/out" ||
            grep "checkpoint" "$work/out")$(
        [ "$(ls full/ck)" = step-7 ] || ls full/ck)"
    umount full
else
    echo "skip a full disk: tmpfs cannot be mounted here"
fi
exit $failed
