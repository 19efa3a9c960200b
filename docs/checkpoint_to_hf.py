#!/usr/bin/env python3
"""Makes config.json and model.safetensors of a checkpoint without experts; one parameter is in memory at a time.

    python3 docs/checkpoint_to_hf.py DIR/step-12 OUT
"""
import json
import os
import sys

import validate  # noqa: F401  first: it finds the Python that has NumPy
import numpy as np

import programs
from read_checkpoint import Checkpoint


def to_bf16(x):  # the upper half of the float, rounded to nearest even
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    checkpoint, out = Checkpoint(sys.argv[1]), sys.argv[2]
    if "experts" in checkpoint.manifest:  # files have them one by one, under the names of a family
        sys.exit(f"{sys.argv[1]}: has experts (try 08_3d_full --save-hf)")
    if own := [key for key in checkpoint.manifest["model"] if key.startswith("train70b_")]:
        sys.exit(f"{sys.argv[1]}: no family of Hugging Face has {own[0]} (--sinks on, --window-every)")
    manifest, params = checkpoint.manifest, [param for state, param in checkpoint.keys() if state == "weight"]
    stored, width = {"fp64": ("F64", 8), "fp32": ("F32", 4), "bf16": ("BF16", 2)}[manifest["dtype"]]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for param in params:
        shape = checkpoint.shape(param)
        begin, end = end, end + int(np.prod(shape)) * width
        header[param] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
    os.makedirs(out, exist_ok=True)
    with open(f"{out}/model.safetensors", "wb") as file:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        mup = manifest["flags"].get("mup")  # the logits' multiplier, which Hugging Face's format does not have
        for param in params:
            values = checkpoint.full("weight", param)
            if mup and param == "model.norm.weight":
                values = (values * (int(mup) / manifest["model"]["hidden_size"])).astype(values.dtype)
            file.write((to_bf16(values) if stored == "BF16" else values).tobytes())
    with open(f"{out}/config.json", "w", encoding="utf-8") as file:
        json.dump({"max_position_embeddings": int(manifest["flags"]["seq-len"]), **manifest["model"]}, file, indent=2)


if __name__ == "__main__":
    programs.start(main)
