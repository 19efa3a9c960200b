#!/usr/bin/env python3
"""Makes the nine reference runs of docs/references, or the same in fp64 or bf16. docs/validate.md has their table.

Run:   python3 docs/references.py [--programs build/bin] [--out docs/references] [--dtype fp32|fp64|bf16]
"""

import argparse
import json
import pathlib
import struct
import subprocess
import tempfile

import programs
from validate.runs import Safetensors, write_safetensors

# Some 40,000 parameters each.
SHAPE = "--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --init-std 0.1".split()
RUN = "--seq-len 32 --global-batch 8 --steps 6 --clip 0.5 --eps 1e-5".split()
# What each has beside that; "hf": the family whose parameters Hugging Face has and Llama has not. "model": flags of a
# model that is saved, whose routers are given biases, and loaded.
REFERENCES = {
    "gqa": {},
    "masked": {"flags": "--document-token 46 --val-fraction 0", "masks": True},
    "tied": {"flags": "--tied-embeddings on"},
    "biases": {"hf": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "biases": True},
    "qk-norm": {
        "hf": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
        "head_norms": True,
    },
    "experts": {"flags": "--experts 4 --top-k 2 --expert-ffn 16 --aux-loss 0"},
    "deepseek": {
        "model": "--router sigmoid --qk-norm on --experts 16 --top-k 3 --expert-ffn 8 --shared-experts 1 "
        "--dense-layers 1 --expert-groups 4 --top-groups 2 --router-scale 2.5",
        "flags": "--aux-loss 0",
    },
    "muon": {"flags": "--optimizer muon"},
    "clipped": {"flags": "--clip 0.05 --eps 1e-3 --lr 0.01 --weight-decay 0.3 --warmup-steps 2"},
}


def normal(seed, count):
    """Numbers of mean 0 and variance 1, the same on every machine."""
    numbers, state = [], seed
    for _ in range(count):
        total = 0
        for _ in range(12):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            total += state >> 40
        numbers.append(total / 2**24 - 6)
    return numbers


def hugging_face(folder, config, kind):
    """Adds to a folder that --save-hf wrote the parameters of Qwen2 or Qwen3; or changes the biases of its routers."""
    file = folder / "model.safetensors"
    tensors = Safetensors(str(file)).all()
    for layer in range(config["num_hidden_layers"]):
        bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        if "model" in kind:
            if bias in tensors:
                tensors[bias] = [0.05 * x for x in normal(layer, len(tensors[bias]))]
            continue
        if "head_norms" in kind:
            sizes = {"q_norm.weight": 8, "k_norm.weight": 8}
        else:
            sizes = {"q_proj.bias": 32, "k_proj.bias": 16, "v_proj.bias": 16}
        for i, (name, size) in enumerate(sizes.items()):
            values = [("norm" in name) + 0.1 * x for x in normal(100 * layer + i, size)]
            tensors[f"model.layers.{layer}.self_attn.{name}"] = values
    write_safetensors(file, tensors, "F32")
    (folder / "config.json").write_text(json.dumps({**config, **kind.get("hf", {})}), "utf-8")


def masked_text(folder, text):
    """The text as a shard; of each 40 tokens, the first 3 to 29 are no targets. docs/data-format.md."""
    text = text[:60000]
    targets = bytes(int(i % 40 >= 3 + (i // 40 * 7) % 27) for i in range(len(text)))
    for name, magic, tokens in (
        ("text.bin", 20240520, b"".join(struct.pack("<H", c) for c in text)),
        ("text.mask.bin", 20261122, targets),
    ):
        (folder / name).write_bytes(struct.pack("<3i", magic, 1, len(text)).ljust(1024, b"\0") + tokens)


def make(programs, out, name, dtype="fp32", more=()):
    kind = REFERENCES[name]
    corpus = pathlib.Path(__file__).resolve().parent / "data/corpus.txt"
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)

        def run(*words):
            command = [programs / "01_single_gpu", *words, "--device", "cpu"]
            done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", cwd=work)
            if done.returncode:
                raise SystemExit(done.stderr or done.stdout)

        model, data = SHAPE, corpus
        if "hf" in kind or "model" in kind:
            run(*model, *kind.get("model", "").split(), "--steps", "0", "--save-hf", work / "model")
            hugging_face(work / "model", json.loads((work / "model/config.json").read_text("utf-8")), kind)
            model = ["--load-hf", work / "model"]
        if "masks" in kind:
            masked_text(work, corpus.read_bytes())
            data = work / "text.bin"
        words = [*RUN, *kind.get("flags", "").split(), *more]
        flags = dict(zip(words[::2], words[1::2]))  # the last of those given twice
        words = [word for pair in flags.items() for word in pair]
        run(*model, *words, "--data", data, "--dtype", dtype, "--save-reference", out / name)
    reference = out / name / "reference.json"  # paths are this machine's
    file = json.loads(reference.read_text("utf-8"))
    file["flags"].pop("config", None)  # the flags once more
    for flag in ("data", "save-reference", "load-hf"):
        if flag in file["flags"]:
            file["flags"][flag] = pathlib.Path(file["flags"][flag]).name
    reference.write_text(json.dumps(file) + "\n", "utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("--programs", type=pathlib.Path, default=here / "build/bin")
    parser.add_argument("--out", type=pathlib.Path, default=here / "docs/references")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "fp64", "bf16"])
    args = parser.parse_args()
    if not (args.programs / "01_single_gpu").is_file():
        parser.error(f"--programs {args.programs}: has no 01_single_gpu (bash tests/setup.sh builds it)")
    for name in REFERENCES:
        make(args.programs.resolve(), args.out.resolve(), name, args.dtype)
        print(args.out / name)


if __name__ == "__main__":
    programs.start(main)
