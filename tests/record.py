#!/usr/bin/env python3
"""Records what every chapter does, to hold a refactoring to it: after it, the file is the same byte for byte.

    python3 tests/record.py BIN_FOLDER FILE [ONLY]        ONLY: commands whose name contains it

For each command: losses and norms of all steps, bytes by operation, every rank's ledger, and the sha256 of the gradients
of step 1, of the weights after step 1, and of the weights in the end. Where code that moves is contracted into other
multiply-adds, build both sides with -DCMAKE_CXX_FLAGS=-ffp-contract=off. Left out is what depends on the clock: seconds,
and of a pipeline the peaks to which messages add that have not been taken yet.
"""
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

SMALL = "--layers 4 --hidden 64 --heads 8 --kv-heads 2 --ffn 96 --vocab 259 --seq-len 64 --global-batch 16 --init-std 0.1"
FAKE = "--comm fake --fake-world 64 --model 125m --seq-len 256 --global-batch 16 --micro-batch 1 --dtype bf16"
COMMANDS = {  # name: (ranks, program, flags)
    "01 default": (1, "01_single_gpu", ""),
    "01 accumulation, full recomputation": (1, "01_single_gpu", "--micro-batch 4 --recompute full"),
    "01 selective, bf16": (1, "01_single_gpu", "--recompute selective --dtype bf16 --grad-dtype bf16"),
    "01 pointwise, fp64, linear": (1, "01_single_gpu", "--recompute pointwise --dtype fp64 --grad-dtype fp64 --lr-schedule linear"),
    "01 wsd, evaluation, bf16": (1, "01_single_gpu", "--dtype bf16 --lr-schedule wsd --eval-every 2 --warmup-steps 1"),
    "01 constant, no clipping": (1, "01_single_gpu", "--lr-schedule constant --clip 0 --weight-decay 0 --micro-batch 8"),
    "02 overlapped": (4, "02_data_parallel", "--bucket-mb 0.1"),
    "02 naive": (2, "02_data_parallel", "--bucket-mb 0 --overlap off --all-reduce naive --micro-batch 4"),
    "02 ring": (3, "02_data_parallel", "--all-reduce ring --global-batch 12"),
    "02 pipelined": (4, "02_data_parallel", "--all-reduce pipelined --dtype bf16"),
    "02 halving": (4, "02_data_parallel", "--all-reduce halving --eval-every 2"),
    "02 library": (2, "02_data_parallel", "--all-reduce library --dtype fp64 --grad-dtype fp64"),
    "02 fake": (1, "02_data_parallel", "--comm fake --fake-world 8 --fake-rank 3 --global-batch 64"),
    "03 stage 0": (4, "03_zero", "--zero 0 --overlap off"),
    "03 stage 1": (4, "03_zero", "--zero 1 --micro-batch 2 --bucket-mb 0.1"),
    "03 stage 2, hybrid": (4, "03_zero", "--zero 2 --hybrid-shard 2 --micro-batch 2"),
    "03 stage 3, bf16": (4, "03_zero", "--zero 3 --dtype bf16 --prefetch 2 --eval-every 2"),
    "03 stage 3, recomputation, no prefetch": (3, "03_zero", "--zero 3 --recompute full --prefetch 0 --overlap off --global-batch 12"),
    "03 offload optimizer": (2, "03_zero", "--zero 2 --offload optimizer --dtype bf16"),
    "03 offload all, hybrid": (4, "03_zero", "--zero 3 --offload all --hybrid-shard 2 --micro-batch 2"),
    "04 tp 2": (2, "04_tensor_parallel", "--tp 2"),
    "04 tp 4, kv heads copied, sequence parallel": (4, "04_tensor_parallel", "--tp 4 --sequence-parallel on --dtype fp64 --grad-dtype fp64"),
    "04 tp 2, overlap, dp 2": (4, "04_tensor_parallel", "--tp 2 --dp 2 --sequence-parallel on --tp-overlap on --micro-batch 4"),
    "04 tp 4, recomputation, bf16": (4, "04_tensor_parallel", "--tp 4 --recompute full --dtype bf16 --eval-every 2"),
    "05 naive": (2, "05_pipeline", "--pp 2 --pipeline naive"),
    "05 gpipe, dp 2": (4, "05_pipeline", "--pp 2 --dp 2 --pipeline gpipe --micro-batch 2"),
    "05 1f1b": (4, "05_pipeline", "--pp 4 --micro-batch 2 --eval-every 2"),
    "05 interleaved, recomputation": (2, "05_pipeline", "--pp 2 --pipeline interleaved --recompute full"),
    "05 zero-bubble": (4, "05_pipeline", "--pp 4 --pipeline zero-bubble --micro-batch 1"),
    "05 zero-bubble, uneven, bf16": (2, "05_pipeline", "--pp 2 --stage-layers 3,1 --pipeline zero-bubble --dtype bf16"),
    "06 ring": (2, "06_context_parallel", "--cp 2 --cp-algorithm ring"),
    "06 zigzag, dp 2": (4, "06_context_parallel", "--cp 2 --dp 2 --recompute selective --eval-every 2"),
    "06 ulysses": (2, "06_context_parallel", "--cp 2 --cp-algorithm ulysses"),
    "06 hybrid": (4, "06_context_parallel", "--cp 4 --cp-algorithm hybrid --dtype fp64 --grad-dtype fp64"),
    "06 gather": (4, "06_context_parallel", "--cp 4 --cp-algorithm gather --dtype bf16"),
    "07 current": (1, "07_fp8", "--fp8 current --dtype bf16"),
    "07 delayed, tp 2": (4, "07_fp8", "--fp8 delayed --tp 2 --fp8-history 2 --micro-batch 4"),
    "07 rowwise, 8-bit AdamW": (2, "07_fp8", "--fp8 rowwise --optimizer adamw8bit --zero 1"),
    "07 blockwise": (1, "07_fp8", "--fp8 blockwise --hidden 128 --ffn 256 --kv-heads 8 --recompute selective"),
    "07 zero 3 gathers fp8": (4, "07_fp8", "--fp8 current --zero 3 --dtype bf16 --eval-every 2"),
    "07 zero 3, fp8, hybrid, 8-bit": (4, "07_fp8", "--fp8 delayed --zero 3 --hybrid-shard 2 --optimizer adamw8bit"),
    "08 one rank": (1, "08_3d_full", ""),
    "08 dp 2 tp 2 pp 2 zero 1": (8, "08_3d_full", "--dp 2 --tp 2 --pp 2 --zero 1 --micro-batch 2"),
    "08 dp 2 tp 2 pp 2 zero 2": (8, "08_3d_full", "--dp 2 --tp 2 --pp 2 --zero 2 --micro-batch 2 --pipeline zero-bubble"),
    "08 zero 3, sequence, cp, interleaved": (8, "08_3d_full", "--cp 2 --tp 2 --pp 2 --sequence-parallel on --zero 3 --pipeline interleaved --eval-every 2"),
    "08 zero 3, tp 4, overlap, fp64": (8, "08_3d_full", "--tp 4 --dp 2 --zero 3 --sequence-parallel on --tp-overlap on --dtype fp64 --grad-dtype fp64"),
    "08 fp8, zero 3, tp 2, pp 2, 8-bit": (8, "08_3d_full", "--tp 2 --pp 2 --dp 2 --zero 3 --fp8 current --optimizer adamw8bit --dtype bf16"),
    "08 offload, tp 2, cp 2": (8, "08_3d_full", "--tp 2 --cp 2 --dp 2 --zero 2 --offload optimizer --cp-algorithm ulysses"),
    "08 fake": (1, "08_3d_full", "--comm fake --fake-world 16 --fake-rank 9 --tp 2 --pp 2 --dp 2 --cp 2 --zero 3"),
    "08 dry run": (1, "08_3d_full", FAKE + " --tp 4 --pp 4 --zero 1 --sequence-parallel on --recompute full --dry-run"),
    "08 dry run, zero 3, offload all": (1, "08_3d_full", FAKE + " --global-batch 64 --zero 3 --offload all --dry-run"),
    "08 dry run, fp8, cp": (1, "08_3d_full", FAKE + " --tp 2 --cp 4 --pp 2 --zero 3 --fp8 current --optimizer adamw8bit --dry-run"),
}


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensors(path):  # the data behind a safetensors header, which holds no more than names and places
    data = path.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little"):]).hexdigest()


def record(folder, name, ranks, program, flags):
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                       OMPI_MCA_btl_vader_single_copy_mechanism="none", OPENBLAS_NUM_THREADS="1")
    dry, fake = "--dry-run" in flags, "--comm fake" in flags
    command = [] if ranks == 1 else ["mpirun", "--oversubscribe", "-np", str(ranks)]
    command += [str(folder / program), "--metrics", "m.jsonl", "--steps", "4"]
    command += flags.split() if dry else [*SMALL.split(), *flags.split()]
    # Chapter 08 has no --tables, and chapter 01 none either.
    if program not in ("01_single_gpu", "08_3d_full"):
        command += ["--tables", "off"]
    if not fake:
        command += ["--save-reference", "reference", "--save-hf", "weights"]
    # The last of a flag that is given twice counts, which CLI11 has to be told: keep each flag once.
    seen = {}
    words = command[command.index("--metrics"):]
    for i, word in enumerate(words):
        if word.startswith("--"):
            seen[word] = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else None
    command = command[:command.index("--metrics")] + [w for k, v in seen.items() for w in ([k] if v is None else [k, v])]
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            sys.exit(f"{name}: {' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        lines = [f"== {name}"]
        pipeline = any(f"--pp {n}" in flags for n in (2, 4))
        clock = ("activations", "total", "workspace", "comm") if pipeline and not dry else ()
        def memory(peak):
            return " ".join(f"{k}={v}" for k, v in peak.items() if k not in clock and not isinstance(v, dict))
        for line in pathlib.Path(work, "m.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                lines.append(f"step {event['step']} loss {event['loss']} norm {event['grad_norm']} lr {event['lr']} "
                             f"params {event['param_norm']}")
                lines.append("  bytes " + " ".join(f"{k}={v}" for k, v in event["comm_bytes"].items()))
                lines.append("  now   " + " ".join(f"{k}={v}" for k, v in event["memory"].items()
                                                   if k not in clock and k != "peak"))
                lines.append("  peak  " + memory(event["memory"]["peak"]))
            elif event["event"] == "eval":
                lines.append(f"  validation {event['loss']}")
            elif event["event"] == "summary":
                for rank, peak in enumerate(event["memory_per_rank"]):
                    lines.append(f"  rank {rank} " + memory(peak))
        if not fake:
            reference, weights = pathlib.Path(work, "reference"), pathlib.Path(work, "weights")
            for file in ("initial", "gradients", "after_step_1"):
                lines.append(f"  {file} {tensors(reference / f'{file}.safetensors')}")
            for path in sorted(weights.glob("*.safetensors")):
                lines.append(f"  weights {tensors(path)}")
            lines.append(f"  config {sha(weights / 'config.json')}")
        return "\n".join(lines) + "\n"


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    folder, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    only = sys.argv[3] if len(sys.argv) == 4 else ""
    text = ""
    for name, command in COMMANDS.items():
        if only in name:
            print(name, flush=True)
            text += record(folder, name, *command)
    out.write_text(text)


if __name__ == "__main__":
    main()
