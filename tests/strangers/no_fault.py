#!/usr/bin/env python3
"""Right implementations, of which compare must report no difference and the doctor claim nothing: Hugging Face's class
on one rank and under FSDP2 on two (docs/validate/examples), this course in a mixed layout and on other OpenBLAS
kernels. fp32, fp64, bf16; init-std 0.02 and 0.1; 2 to 16 layers. Needs torch (2.15 ran), transformers, safetensors.

Run:   python3 tests/strangers/no_fault.py build/bin
"""

import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/validate/examples"
FLAGS = "--hidden 64 --heads 4 --kv-heads 2 --ffn 96 --seq-len 32 --global-batch 8 --steps 3 --lr-schedule constant"
KERNELS = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "SkylakeX")
LAYOUT = "--dp 2 --tp 2 --pp 2 --zero 1 --micro-batch 2 --sequence-parallel on"
try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError:
    print("skipped: no torch and transformers: right foreign code was not tried")
    sys.exit(0)


def run(command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
    if done.returncode not in (0, 1) or (done.returncode and "compare.py" not in str(command[1])):
        sys.exit(f"{command}: {done.stderr[-2000:]}")
    return done


def implementations(binaries, dtype, flags, reference, out):
    """Writes a run of each; yields (name, folder)."""
    yield "Hugging Face", out / "hf", [sys.executable, EXAMPLES / "hugging_face.py", reference, out / "hf"], {}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    yield "FSDP2", out / "fsdp2", [*launch, EXAMPLES / "fsdp2.py", reference, out / "fsdp2"], {}
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 8]
    words = [*flags, *LAYOUT.split(), "--save-reference", out / "mesh"]
    yield "dp 2, tp 2, pp 2", out / "mesh", [*mpirun, binaries / "08_3d_full", *words], {}
    if dtype != "bf16":  # no products by BLAS there
        for kernel in KERNELS:
            words = [binaries / "01_single_gpu", *flags, "--save-reference", out / kernel]
            yield kernel, out / kernel, words, {"OPENBLAS_CORETYPE": kernel}


def main(binaries):
    binaries, runs, claims = pathlib.Path(binaries).resolve(), 0, 0
    for layers in (2, 6, 16):
        for std in ("0.02", "0.1"):
            for dtype in ("fp32", "fp64", "bf16"):
                out = pathlib.Path(tempfile.mkdtemp())
                flags = ["--layers", str(layers), "--init-std", std, "--dtype", dtype, *FLAGS.split()]
                run([binaries / "01_single_gpu", *flags, "--save-reference", out / "reference"])
                for name, folder, command, variables in implementations(binaries, dtype, flags, out / "reference", out):
                    run(command, **variables)
                    # Both compute RoPE, norms and softmax in fp32 in every dtype.
                    more = ["--tolerance", "5e-6"] if dtype == "fp64" and name in ("Hugging Face", "FSDP2") else []
                    words = [sys.executable, ROOT / "docs/compare.py", folder, out / "reference", "--diagnose", *more]
                    done = run(words)
                    text = done.stdout[done.stdout.rfind("the runs") :]
                    runs, claims = runs + 1, claims + (done.returncode != 0 or "explain" in text)
                    print(f"{layers} layers, std {std}, {dtype}, {name}: {text.strip()}", flush=True)
    print(f"{runs} right runs, {claims} of them called different or explained")
    sys.exit(claims > 0)


if __name__ == "__main__":
    main(sys.argv[1])
