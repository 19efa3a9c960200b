#!/bin/bash
# Checkpoints on the command line: what is refused (exit code 2, one line, nothing touched), signals, full disks, folders
# that go away, and what a run leaves and continues.
# Run: bash tests/08_checkpoint.sh build/bin
program=08_3d_full
. "$(dirname "$0")/ranks.sh"
shape=(--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8
    --init-std 0.1 --lr 0.001)

# start RANKS FLAG...: one rank without mpirun. code, seconds, $work/out, $work/err
start() {
    local begin=$SECONDS
    [ "$1" -gt 1 ] && { run "$1" "$bin/$program" "${@:2}"; return; }
    timeout -k 5 60 "$bin/$program" "${@:2}" >"$work/out" 2>"$work/err"
    code=$?
    seconds=$((SECONDS - begin))
}
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

# ---- tied embeddings: 8 ranks -> one -> 4 --------------------------------------------------------------------------

tied=("${shape[@]}" --tied-embeddings on --dtype fp64 --steps 6)
start 1 "${tied[@]}" --metrics tied.jsonl
start 8 "${tied[@]}" --tp 2 --dp 2 --pp 2 --checkpoint-dir tied --stop-after 2 --metrics tied-8.jsonl
start 1 "${tied[@]}" --checkpoint-dir tied --resume --stop-after 4 --metrics tied-1.jsonl
start 4 "${tied[@]}" --tp 4 --checkpoint-dir tied --resume --metrics tied-4.jsonl
verdict "tied embeddings: dp 2, tp 2, pp 2, then one rank, then tp 4" "$(ends 0 20)$(python3 - <<'P'
import json
steps = lambda *names: [(e["loss"], e["grad_norm"]) for name in names for e in map(json.loads, open(name))
                        if e["event"] == "step"]
one, parts = steps("tied.jsonl"), steps("tied-8.jsonl", "tied-1.jsonl", "tied-4.jsonl")
if not (len(one) == len(parts) == 6 and all(abs(x / y - 1) <= 1e-10 for a, b in zip(one, parts) for x, y in zip(a, b))):
    print(one, "not", parts)
P
)"
rm -rf tied tied*.jsonl

# ---- refused ---------------------------------------------------------------------------------------------------------

edit() { # PYTHON: changes m, the manifest of ck/step-4; t[file][tensor] = [dtype, shape, bytes] if it says so
    python3 - "$1" <<'P'
import json, struct, sys, zlib
folder, code = "ck/step-4/", sys.argv[1]
m, t = json.load(open(folder + "manifest.json")), {}
if code.startswith("\n"):
    for entry in m["files"]:
        blob = open(folder + entry["name"], "rb").read()
        size = struct.unpack("<Q", blob[:8])[0]
        header = json.loads(blob[8:8 + size])
        t[entry["name"]] = {name: [e["dtype"], e["shape"], blob[8 + size:][slice(*e["data_offsets"])]]
                            for name, e in header.items() if name != "__metadata__"}
exec(code)
for entry in m["files"] if t else []:  # the manifest agrees with what was changed
    header, data = {}, b""
    for name, (dtype, shape, values) in t[entry["name"]].items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    blob = struct.pack("<Q", len(text)) + text + data
    open(folder + entry["name"], "wb").write(blob)
    entry.update(bytes=len(blob), crc32=zlib.crc32(blob), tensors=list(header))
json.dump(m, open(folder + "manifest.json", "w"), indent=1)
P
}
raw() { printf "$1" >ck/step-4/manifest.json; }
refused() { # NAME RANKS "PART|PART" COMMAND FLAG...: ck is a copy of base, changed by COMMAND. Several run at a time
    number=$((number + 1))
    while [ "$(jobs -rp | wc -l)" -ge 4 ]; do wait -n; done
    (refused_alone "$@") >"$work/case-$(printf %03d $number).txt" 2>&1 &
}
refused_alone() {
    local parts before
    IFS='|' read -ra parts <<<"$3"
    work=$work/case-$number
    mkdir "$work" && cd "$work" && cp -a ../base ck
    eval "$4" || verdict "the setting of: $1" "cannot be made"
    before=$(state ck)
    start "$2" --steps 8 --metrics m.jsonl "${@:5}"
    verdict "refused: $1" "$(ends 2 10)$(says "${parts[@]}")$(
        [ "$(grep -c "^$program: " "$work/err")" = 1 ] || echo "not one line: $(head -c 800 "$work/err"); ")$(
        [ "$2" -gt 1 ] || [ "$(wc -l <"$work/err")" = 1 ] || echo "more than a line: $(head -c 800 "$work/err"); ")$(
        grep -iE "MPI_ABORT|^rank [0-9]+:" "$work/err")$(
        [ "$(state ck)" = "$before" ] || echo "ck has changed: $(ls -A ck | tr '\n' ' '); ")$(
        ls -A | grep -vE '^(ck|err|out)$')" # such as a metrics file
}
all_refused() { # waits for them
    wait
    cat case-*.txt
    [ "$(cat case-*.txt | grep -c "^ok ")" = $number ] || failed=1
    rm -r case-*
}
number=0
resume() { refused "$1" "$2" "$3" "$4" "${shape[@]}" --tp "$2" --resume --checkpoint-dir ck; } # NAME RANKS PARTS COMMAND
older="(try --resume-from ck/step-2)"

resume "a truncated file" 2 "ck/step-4/rank-00001.safetensors: has |truncated|$older" \
    "truncate -s -100 ck/step-4/rank-00001.safetensors"
resume "a flipped bit in a file" 2 "ck/step-4/rank-00001.safetensors: corrupt|$older" \
    "python3 -c \"f = open('ck/step-4/rank-00001.safetensors', 'r+b'); f.seek(9999); b = f.read(1)[0]; f.seek(9999); f.write(bytes([b ^ 4]))\""
resume "a missing file" 2 "ck/step-4/rank-00000.safetensors: missing|$older" "rm ck/step-4/rank-00000.safetensors"
resume "a folder in place of a file" 1 "rank-00000.safetensors: missing, or not a regular file" \
    "rm ck/step-4/rank-00000.safetensors; mkdir ck/step-4/rank-00000.safetensors"
resume "a link to a device" 1 "rank-00000.safetensors: missing, or not a regular file" \
    "ln -sf /dev/zero ck/step-4/rank-00000.safetensors"
resume "a FIFO in place of the manifest" 1 "ck/step-4/manifest.json: " \
    "rm ck/step-4/manifest.json; mkfifo ck/step-4/manifest.json"
for name in ../step-2/rank-00000.safetensors /etc/passwd sub/rank-00000.safetensors . .. "" 'x\\u0000y' 'new\\nline' .lock; do
    resume "a file named '$name'" 1 "ck/step-4/manifest.json: |$older" \
        "sed -i 's|\"name\": \"rank-00000.safetensors\"|\"name\": \"$name\"|' ck/step-4/manifest.json; ! grep -q '\"rank-00000' ck/step-4/manifest.json"
done
tensors='m["files"][0]["tensors"]'
resume "overlapping rectangles" 1 "overlap|$older" "edit '$tensors.append(m[\"files\"][1][\"tensors\"][0])'"
resume "a missing rectangle" 1 "elements are in no file|$older" "edit 'del $tensors[0]'"
resume "an unknown state" 1 "velocity/" "edit '$tensors[0] = $tensors[0].replace(\"weight/\", \"velocity/\")'"
resume "an unknown parameter" 1 "is not a parameter of the model" \
    "edit '$tensors[0] = $tensors[0].replace(\"embed_tokens\", \"tokens\")'"
resume "a rectangle outside the parameter" 1 "but the parameter is" \
    "edit '$tensors[0] = \"weight/model.norm.weight[0:999]\"'"
resume "a rectangle that is none" 1 "is not part of a full checkpoint" \
    "edit '$tensors[0] = \"weight/model.norm.weight[5:2]\"'"
resume "a rectangle of huge numbers" 1 "ck/step-4/manifest.json: " \
    "edit '$tensors[0] = \"weight/model.norm.weight[0:999999999999999999]\"'"
resume "a file listed twice" 1 "overlap" "edit 'm[\"files\"].append(m[\"files\"][0])'"
resume "no files" 1 "elements are in no file" "edit 'm[\"files\"] = []'"
resume "a newer version" 1 "format version 2, but this program reads version 1" "edit 'm[\"version\"] = 2'"
resume "another format" 1 "its format is" "edit 'm[\"format\"] = \"x\"'"
resume "an unknown kind" 1 "\"kind\" is \"some\"" "edit 'm[\"kind\"] = \"some\"'"
resume "weights with moments" 1 "is not part of a weights checkpoint" "edit 'm[\"kind\"] = \"weights\"'"
resume "not JSON" 1 "ck/step-4/manifest.json: |$older" "raw 'step 4'"
resume "an empty manifest" 1 "ck/step-4/manifest.json: |$older" "raw ''"
resume "a list" 1 "not a JSON object" "raw '[]'"
resume "lists in lists" 1 "ck/step-4/manifest.json: " \
    "python3 -c \"open('ck/step-4/manifest.json', 'w').write('[' * 100000 + ']' * 100000)\""
resume "half a manifest" 1 "ck/step-4/manifest.json: " "truncate -s 3000 ck/step-4/manifest.json"
for pair in step=0 step=-4 step=4.5 step=5 step=99999999999999999999999 step=1e400 step=null 'step=\"4\"' version=-1 \
    ranks=0 next_sample=31 'dtype=\"bf16\"' \
    'dtype=\"fp8\"' 'optimizer=\"adamw8bit\"' bytes=-1 bytes=9223372036854775808 crc32=4294967296 crc32=-1 \
    num_hidden_layers=9999999999 hidden_size=0 \
    num_attention_heads=7 rms_norm_eps=NaN 'rope_theta=2.0' \
    'rope_scaling={\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 64}' \
    'flags={}' 'data={}' 'files={}' 'model=null' 'tensors=[1]'; do
    resume "$pair in the manifest" 1 "$program: |ck/step-4" "python3 - '${pair%%=*}' \"${pair#*=}\" <<'P'
import re, sys
text = open('ck/step-4/manifest.json').read()
key, value = sys.argv[1:]
value_of = r'(\{[^{}]*\}|\[[^\[\]]*\]|[^,\n]*)' if key not in ('files', 'model') else r'(\[.*\]|\{.*?\n \})'
text, n = re.subn(r'\"%s\": %s' % (key, value_of), lambda _: '\"%s\": %s' % (key, value), text, count=1, flags=re.S)
open('ck/step-4/manifest.json', 'w').write(text)
sys.exit(n != 1)
P"
done
# What agrees with its checksum, but not with what it says.
first='t["rank-00000.safetensors"]'
resume "fp64 values" 2 "rank-00000.safetensors: tensor|must be fp32" "edit '
for x in $first.values(): x[0] = \"F64\"; x[2] += x[2]'"
resume "a tensor of another shape than its rectangle" 2 "rank-00000.safetensors: tensor" "edit '
name = next(iter($first)); $first[name][1] = [1]; $first[name][2] = bytes(4)'"
resume "codes in a run of adamw" 2 "rank-00000.safetensors: tensor|must be fp32" "edit '
for name, x in $first.items():
    if name.startswith(\"exp\"): x[0] = \"U8\"; x[2] = x[2][::4]'"
resume "scales without codes" 2 "rank-00000.safetensors: tensor" "edit '
$first[\"scale/model.norm.weight[0:32]\"] = [\"F32\", [2, 1], bytes(8)]'"

changed() { # FLAG VALUE [PART]: resumes with another value
    local flags=" ${shape[*]} " part=${3:-"$1 "}
    [[ $flags == *" $1 "* ]] && flags=$(sed -E "s/ $1 [^ ]+/ $1 $2/" <<<"$flags") || flags+=" $1 $2"
    refused "another $1" 1 "$part" : $flags --resume --checkpoint-dir ck
}
for pair in "--layers 4" "--hidden 64" "--heads 2" "--kv-heads 4" "--ffn 64" "--vocab 260"; do
    changed $pair "a checkpoint of another model: its ${pair% *} is"
done
changed --tied-embeddings on "a checkpoint of another model: its --tied-embeddings is off, but this run's is on (try --tied-embeddings off)"
echo "Another text, which is long enough for some samples: $(seq 999)" >text.txt
for pair in "--dtype bf16" "--dtype fp64 --grad-dtype fp64" "--optimizer adamw8bit" "--seed 2" "--seq-len 16" \
    "--global-batch 4" "--val-fraction 0.2" "--fp8 current" "--document-token 10"; do
    changed ${pair%% *} "${pair#* }" "${pair%% *} "
done
changed --data ../text.txt "--data ../text.txt: is not the data of the checkpoint ck/step-4"

here=("${shape[@]}" --checkpoint-dir ck)
refused "the folder of checkpoints" 2 "ck: is not a checkpoint: it has no manifest.json (must be DIR/step-N)" : \
    "${shape[@]}" --resume-from ck
refused "a checkpoint that is being written" 1 "is not a checkpoint" "mkdir ck/step-9.tmp" "${shape[@]}" \
    --resume-from ck/step-9.tmp
refused "a folder that is none" 1 "nothing: is not a folder" : "${shape[@]}" --resume-from nothing
refused "a file" 1 "text.txt: is not a folder" : "${shape[@]}" --resume-from ../text.txt
refused "weights only" 2 "ck/weights-4: holds the weights only; a run goes on from a full checkpoint" : "${shape[@]}" \
    --resume-from ck/weights-4
refused "--resume in an empty folder" 2 "--resume: ck has no complete checkpoint" "rm -r ck; mkdir ck" "${here[@]}" \
    --resume
refused "--resume where there is no folder" 1 "--resume: ck has no complete checkpoint" "rm -r ck" "${here[@]}" --resume
refused "--resume with what a crash has left" 1 "--resume: ck has no complete checkpoint" \
    "rm -r ck/step-2 ck/weights-*; mv ck/step-4 ck/step-4.tmp" "${here[@]}" --resume
refused "another run's folder" 2 \
    "--checkpoint-dir ck: has the checkpoints of another run, up to step-4 (try --resume, or another folder)" : "${here[@]}"
refused "an older checkpoint beside newer ones" 2 \
    "--checkpoint-dir ck: has checkpoints up to step-4, which a run from ck/step-2 would overwrite" : \
    "${here[@]}" --resume-from ck/step-2
refused "two ways to resume" 1 \
    "--resume: goes on from the newest checkpoint, --resume-from from ck/step-2 (use one of the two)" : \
    "${here[@]}" --resume --resume-from ck/step-2
refused "no step left" 1 "ck/step-8: is of step 8, and --steps is 8 (try --steps 16)" \
    "mv ck/step-4 ck/step-8; sed -i 's/\"step\": 4/\"step\": 8/; s/\"next_sample\": 32/\"next_sample\": 64/' ck/step-8/manifest.json" "${here[@]}" --resume
for flag in "--checkpoint-every 2" "--weights-every 2" "--keep 2" --resume; do
    refused "$flag without a folder" 1 "${flag% *}: needs --checkpoint-dir DIR" : "${shape[@]}" $flag
done
refused "--keep 0" 1 "--keep" : "${here[@]}" --keep 0
refused "a stop after the end" 1 "--stop-after 9: must be at most --steps 8" : "${here[@]}" --resume --stop-after 9
refused "an empty name" 1 "--checkpoint-dir|empty path" : "${shape[@]}" --checkpoint-dir ""
refused "a simulated group" 1 "--checkpoint-dir ck: with --comm fake" : "${here[@]}" --comm fake --fake-world 4
refused "a reference run that begins later" 1 "--save-reference r: a reference run begins at step 1" : "${here[@]}" \
    --resume --save-reference r
refused "a file in place of the folder" 2 "--checkpoint-dir ../text.txt" : "${shape[@]}" --checkpoint-dir ../text.txt
refused "a folder that cannot be made" 2 "--checkpoint-dir /proc/checkpoints" : "${shape[@]}" --checkpoint-dir \
    /proc/checkpoints
refused "a folder that cannot be written" 2 "--checkpoint-dir /proc/self" : "${shape[@]}" --checkpoint-dir /proc/self
all_refused

# ---- flipped bits in the manifest: refused, or the same losses -------------------------------------------------------

verdict "flipped bits in the manifest" "$(python3 - "$bin/$program" "${shape[@]}" <<'P'
import concurrent.futures, json, os, random, shutil, subprocess, sys
text = open("base/step-4/manifest.json", "rb").read()
head = text.index(b'"files"')
random.seed(os.environ.get("TRAIN70B_SEED", "1"))
places = [(random.randrange(head), random.randrange(8)) for _ in range(20)]
places += [(random.randrange(len(text)), random.randrange(8)) for _ in range(6)]
places += [(text.index(b'"step": 4') + 8, bit) for bit in (0, 1)]

def losses(path):
    return [(e["step"], e["loss"]) for e in map(json.loads, open(path)) if e["event"] == "step"]

def start(number, changed):
    folder = f"flip-{number}"
    shutil.copytree("base/step-4", f"{folder}/step-4")
    open(f"{folder}/step-4/manifest.json", "wb").write(changed)
    done = subprocess.run([*sys.argv[1:], "--steps", "8", "--stop-after", "5", "--resume-from", f"{folder}/step-4", "--metrics",
                           f"{folder}/m.jsonl"], capture_output=True, text=True, errors="replace", timeout=60)
    found = losses(f"{folder}/m.jsonl") if done.returncode == 0 else os.path.exists(f"{folder}/m.jsonl")
    shutil.rmtree(folder)
    return done, found

def flip(place):
    at, bit = place
    changed = bytearray(text)
    changed[at] ^= 1 << bit
    done, found = start(f"{at}-{bit}", changed)
    line = text[text.rfind(b"\n", 0, at) + 1:text.find(b"\n", at)].strip()
    if done.returncode == 0:
        loaded.append(line)
        return f"{line}, bit {bit}: other losses, {found}; " if found != expected else ""
    good = done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("08_3d_full: ") and not found
    return "" if good else f"{line}, bit {bit}: exit code {done.returncode}: {done.stderr[:300]}; "

loaded = []
done, expected = start("none", text)
if done.returncode != 0 or len(expected) != 1:
    print(done.returncode, done.stderr, expected)
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print("".join(pool.map(flip, sorted(set(places)))), end="")
print(f"{len(places) - len(loaded)} of {len(places)} flips are refused; loaded:", *loaded, file=sys.stderr)
P
)"

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
    [ "$seconds" -le 8 ] || echo "took $seconds s; ")$(last=$(newest ck)
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
    cat /dev/zero >full/ballast 2>/dev/null
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
    umount full
else
    echo "skip a full disk: tmpfs cannot be mounted here"
fi
exit $failed
