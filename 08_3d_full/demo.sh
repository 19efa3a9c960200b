#!/usr/bin/env bash
# The one command: installs what is missing, builds chapter 01's program and trains a small Llama on this repository's
# own text; builds chapter 08's meanwhile and trains the same on eight ranks (2 data-parallel x 2 tensor-parallel x 2
# pipeline stages), for their losses to be compared. Then every technique by itself, and the pictures of the run.
#   bash 08_3d_full/demo.sh [FOLDER [STEPS [BUILD]]]        of metrics and pictures; default: out/, 100 steps, build/
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$checkout/out} build=${3:-$checkout/build}
mkdir -p "$out" "$build"
out=$(cd "$out" && pwd) build=$(cd "$build" && pwd) # the caller's, wherever that is
cd "$checkout"
# The chapters' programs, with CUDA where a GPU is there; a folder that is configured already stays as it is.
cuda=()
[ -f "$build/CMakeCache.txt" ] || [ -e /dev/nvidia0 ] || cuda=(-DTRAIN70B_CUDA=OFF)
bash tests/setup.sh "$build" ${cuda[@]+"${cuda[@]}"} 01_single_gpu
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
steps=${2:-100}
# Open MPI wants to be told that cores are shared; MPICH's mpirun knows no such option.
shared=()
case "$(mpirun --version 2>/dev/null)" in *"Open MPI"*) shared=(--oversubscribe) ;; esac
ranks() { mpirun ${shared[@]+"${shared[@]}"} -np "$1" "$build/bin/$2" "${@:3}"; }

echo
echo "== one rank: watch the loss fall from ln 256 = 5.5 (chapter 08 is being built meanwhile)"
bash tests/setup.sh "$build" 08_3d_full >"$out/build.txt" 2>&1 &
building=$!
"$build/bin/01_single_gpu" --steps "$steps" --metrics "$out/one.jsonl"
wait $building || { cat "$out/build.txt" >&2; exit 1; }

echo
echo "== the same on eight ranks, and the losses side by side"
ranks 8 08_3d_full --dp 2 --tp 2 --pp 2 --zero 1 --sequence-parallel on --micro-batch 4 --steps "$steps" \
    --eval-every 50 --metrics "$out/eight.jsonl"
python3 - "$out/one.jsonl" "$out/eight.jsonl" <<'P'
import json, sys
one, eight = ([json.loads(line)["loss"] for line in open(path, encoding="utf-8") if '"event":"step"' in line]
              for path in sys.argv[1:])
print(f"{'step':>6}{'one rank':>14}{'eight ranks':>14}{'apart':>12}")
for step in sorted({s for s in (1, 2, 3, 5, 10, 20, 50, len(one)) if s <= len(one)}):
    a, b = one[step - 1], eight[step - 1]
    print(f"{step:>6}{a:>14.8f}{b:>14.8f}{abs(a - b) / a:>12.1e}")
print("(Training amplifies the last bits: other sums, other roundings. Over the first steps the losses agree to 6 digits.)")
P

echo
bash tests/setup.sh "$build" 02_data_parallel 03_zero 04_tensor_parallel 05_pipeline 06_context_parallel 07_fp8
echo
echo "== the first three steps with each technique by itself, on two ranks: the same losses"
two() { ranks 2 "$@" --steps 3 --tables off | grep '^step'; }
"$build/bin/01_single_gpu" --steps 3 | grep '^step'
two 02_data_parallel
two 03_zero --zero 3
two 04_tensor_parallel --tp 2 --sequence-parallel on
two 05_pipeline --pp 2 --pipeline zero-bubble
two 06_context_parallel --cp 2
echo "== and in 8 bits, with a quarter of the optimizer's moments: nearly the same"
"$build/bin/07_fp8" --fp8 current --optimizer adamw8bit --steps 3 --tables off | grep '^step'

for python in python3 /usr/bin/python3; do
    "$python" -c "import matplotlib" 2>/dev/null || continue
    "$python" docs/measure.py 08_loss 08_memory --runs "$out" --out "$out" >/dev/null  # from the two runs above
    "$python" docs/plots.py 08_loss 08_memory --data "$out" --out "$out" >/dev/null
    echo "== pictures: $out/08_loss.png, $out/08_memory.png"
    break
done
