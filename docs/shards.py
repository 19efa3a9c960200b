"""Reads and writes token shards and masks (docs/data-format.md)."""
import os
import shutil
import struct

from usage import check, opened
import numpy as np

WIDTHS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # of ids, by magic number and version
MASK = (20261122, 1)
MOST_ID = 2**32 - 1
TOKENS = 1 << 26  # of a shard


def read(path, dtype, begin=0, count=None):
    """Numbers of a file from byte `begin` on, mapped."""
    with opened(path) as file:
        size = file.seek(0, 2)
    whole, rest = divmod(size - begin, np.dtype(dtype).itemsize)
    check(whole >= (count or 0) and (count is not None or not rest), path, f"truncated: it ends after {size} bytes")
    count = whole if count is None else count
    return np.memmap(path, dtype, "r", begin, count) if count else np.empty(0, dtype)


def read_shard(path):
    magic, version, count = map(int, read(path, "<i4", 0, 256)[:3])
    check((magic, version) in WIDTHS, path, f"magic number {magic}, version {version} (must be one of "
          f"{', '.join(map(str, WIDTHS))}; ids without a header: try convert_tokens.py nanogpt)")
    check(not os.path.lexists(path.removesuffix(".bin") + ".mask.bin"), path,
          "has a mask (--data reads both as they are)")
    ids = read(path, WIDTHS[magic, version], 1024)
    check(len(ids) == count, path, f"truncated or corrupt: the header says {count} tokens, the file has {len(ids)}")
    return ids


def check_new(out):
    check(not os.path.lexists(out) or (os.path.isdir(out) and not os.listdir(out)), out,
          "is already there (must be a new folder: a run trains on every shard of a folder)")


class Shards:
    """OUT/00000.bin, OUT/00000.mask.bin, ...: written to OUT.partial, which becomes OUT at the end, or goes away."""

    def __init__(self, out, largest, masked):
        self.out, self.partial, self.masked = out, os.path.abspath(out) + ".partial", masked
        self.kind = (20240520, 1) if largest < 1 << 16 else (20240801, 7)
        self.files, self.waiting, self.parts = 0, 0, []

    def __enter__(self):
        check_new(self.out)
        os.makedirs(self.partial)
        return self

    def add(self, ids, targets):
        self.parts.append((np.asarray(ids, WIDTHS[self.kind]), np.asarray(targets, np.uint8)))
        self.waiting += len(ids)
        if self.waiting >= TOKENS:
            self.write(self.waiting // TOKENS * TOKENS)

    def write(self, until):
        """The first `until` waiting ids, whole shards of them, or all."""
        ids, targets = (np.concatenate(each) for each in zip(*self.parts))
        for begin in range(0, until, TOKENS):
            files = {".bin": (self.kind, ids), ".mask.bin": (MASK, targets)}
            for end in list(files)[:1 + bool(self.masked)]:
                kind, values = files[end][0], files[end][1][begin:begin + TOKENS]
                with open(f"{self.partial}/{self.files:05}{end}", "wb") as file:
                    file.write(struct.pack("<256i", *kind, len(values), *[0] * 253) + values.tobytes())
            self.files += 1
        self.parts, self.waiting = [(ids[until:], targets[until:])], len(ids) - until

    def __exit__(self, error, *_):
        try:
            if error is None:
                self.write(self.waiting)
                os.rename(self.partial, self.out)
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)
