#!/usr/bin/env python3
"""Reads a checkpoint (docs/checkpoint-format.md) with NumPy: every state of every parameter as one array.

    python3 docs/read_checkpoint.py DIR/step-12 full.npz
"""
import json
import re
import struct
import sys
import zlib

import validate  # noqa: F401  first: it finds the Python that has NumPy
import numpy as np

import programs


def levels():
    first, second, top = [0.0], [0.0], 1e-6
    for decade in range(7):
        n = 2 ** decade
        first += [top * (0.1 + 0.9 * i / n) for i in range(1, n + 1)]
        second += [top * (0.1 + 0.9 * i / (2 * n)) for i in range(1, 2 * n + 1)]
        top *= 10
    return {"exp_avg": np.float32([-x for x in first[:0:-1]] + first), "exp_avg_sq": np.float32(second)}


LEVELS, DTYPES = levels(), {"F64": "<f8", "F32": "<f4", "BF16": "<u2", "U8": "u1"}
NAME = re.compile(r"(\w+)/(.+)\[(\d+):(\d+)(?:,(\d+):(\d+))?\]")


def tensors(path):
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, t in header.items():
        if name != "__metadata__":  # mapped, not read
            yield name, np.memmap(path, DTYPES[t["dtype"]], "r", 8 + length + t["data_offsets"][0], tuple(t["shape"]))


class Checkpoint:
    def __init__(self, folder):
        with open(f"{folder}/manifest.json", encoding="utf-8") as file:
            self.manifest = json.load(file)
        if (self.manifest["format"], self.manifest["version"]) != ("train70b checkpoint", 1):
            sys.exit(f"{folder}: another format or version")
        self.pieces, self.fp8 = {}, []  # (state, parameter) -> [((r0, r1, c0, c1), array)]
        self.experts = {}  # name -> row
        for entry in self.manifest["files"]:
            path, crc = f"{folder}/{entry['name']}", 0
            with open(path, "rb") as file:
                while chunk := file.read(1 << 24):
                    crc = zlib.crc32(chunk, crc)
            if crc != entry["crc32"]:
                sys.exit(f"{path}: corrupt")
            for name, values in tensors(path):
                if name.startswith("fp8/"):
                    self.fp8.append((name[4:], values))
                    continue
                if name.startswith("experts/"):  # equal in all files
                    self.experts[name] = values
                    continue
                if name.startswith(("skip_step/", "loss_scale/")):
                    continue
                state, param, *numbers = NAME.fullmatch(name).groups()
                r0, r1, c0, c1 = (int(x) if x else default for x, default in zip(numbers, (0, 0, 0, 1)))
                self.pieces.setdefault((state, param), []).append(((r0, r1, c0, c1), values))

    def keys(self):
        return [key for key in self.pieces if key[0] != "scale"]

    def shape(self, param):
        rects, values = zip(*self.pieces["weight", param])
        shape = max(r[1] for r in rects), max(r[3] for r in rects)
        return shape[:values[0].ndim]

    def full(self, state, param):
        shape = self.shape(param)
        width, missing = (shape[1] if len(shape) == 2 else 1), np.prod(shape)
        full = np.empty((shape[0], width), np.float64 if self.manifest["dtype"] == "fp64" else np.float32)
        for (r0, r1, c0, c1), values in self.pieces[state, param]:
            if values.dtype == np.uint8:
                scale = dict(self.pieces["scale", param])[r0, r1, c0, c1][list(LEVELS).index(state)]
                r, c = np.arange(r0, r1)[:, None], np.arange(c0, c1)
                if c1 - c0 == width:
                    block = (r * width + c) // 256 - r0 * width // 256
                else:
                    block = (r - r0) * ((c1 - c0 + 254) // 256 + 1) + (r * width + c) // 256 - (r * width + c0) // 256
                values = scale[block] * LEVELS[state][values.reshape(block.shape)]
            if values.dtype == np.uint16:  # BF16: the upper half of an fp32
                values = (values.astype(np.uint32) << 16).view(np.float32)
            full[r0:r1, c0:c1] = values.reshape(r1 - r0, c1 - c0)
            missing -= values.size
        if missing != 0:
            sys.exit(f"{state}/{param}: {missing} elements are missing")
        return full.reshape(shape)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    checkpoint = Checkpoint(sys.argv[1])
    full = {f"{state}/{param}": checkpoint.full(state, param) for state, param in checkpoint.keys()}
    np.savez(sys.argv[2], **full, **checkpoint.experts)


if __name__ == "__main__":
    programs.start(main)
