#!/usr/bin/env python3
"""Token files of other programs as shards (docs/data-format.md), with the same ids, masks and ends of documents.

    python3 docs/convert_tokens.py nanogpt OUT train.bin       ids without a header (--dtype, default uint16)
    python3 docs/convert_tokens.py llmc OUT a.bin b.bin        llm.c's header, then uint16 or uint32
    python3 docs/convert_tokens.py megatron OUT text_document  text_document.bin and .idx
    python3 docs/convert_tokens.py npy OUT ids.npy             integers; each row of a matrix is a document

Everything is read and checked before OUT, a new folder, is written. Bad input: one line, exit code 2.
"""
import os

from shards import MOST_ID, WIDTHS, Shards, check_new, read, read_shard
from usage import Parser, check, ends_with_one_line, opened, shown
import numpy as np

CHUNK = 1 << 24  # tokens in memory at a time
MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}  # 6 and 7: floats
MAGIC = {b"\x93NUMPY": "npy", b"MMIDIDX": "megatron", **{np.array(key, "<i4").tobytes(): "llmc" for key in WIDTHS}}


def nanogpt(path, dtype):  # as all readers: ids, and where documents end or None: where the token is
    with opened(path) as file:
        start = file.read(8)
    for magic, name in MAGIC.items():
        check(not start.startswith(magic), path, f"begins like a file of {name}: try convert_tokens.py {name}")
    ids = read(path, np.dtype(dtype).newbyteorder("<"))
    low, high = ids[:1 << 20:2], ids[1:1 << 20:2]  # of ids of 4 bytes, perhaps
    check(dtype != "uint16" or len(high) < 16 or high.max() > 3 or low.max() < 4, path,
          "every second id is below 4, as if ids had 4 bytes: try --dtype uint32")
    return ids, None


def megatron(path, _):
    stem = path[:-4] if path.endswith((".bin", ".idx")) else path
    index, head = stem + ".idx", read(stem + ".idx", "u1", 0, 34).tobytes()
    check(head[:17] == b"MMIDIDX\0\0\1".ljust(17, b"\0"), index, "must begin with MMIDIDX and version 1")
    check(head[17] in MEGATRON, index, f"ids of type {head[17]} (must be integers: one of {list(MEGATRON)})")
    count, ends = map(int, np.frombuffer(head, "<u8", 2, 18))
    check(os.path.getsize(index) - 34 - 12 * count - 8 * ends in (0, count), index, "truncated or corrupt: has not the "
          f"size of {count} sequences and {ends} borders of documents")  # and perhaps each sequence's mode
    lengths, pointers = read(index, "<i4", 34, count), read(index, "<i8", 34 + 4 * count, count)
    documents, ids = read(index, "<i8", 34 + 12 * count, ends), read(stem + ".bin", MEGATRON[head[17]])
    borders = np.append(0, np.cumsum(lengths, dtype=np.int64))
    check((lengths >= 0).all() and borders[-1] == len(ids) and (pointers == borders[:-1] * ids.itemsize).all(), index,
          f"its sequences, of {borders[-1]} tokens, are not the {len(ids)} of {shown(stem)}.bin one after another")
    check(ends > 0 and documents[0] == 0 and documents[-1] == count and (np.diff(documents) >= 0).all(), index,
          "corrupt: its documents are not all its sequences in their order")
    return ids, borders[documents[1:]]


def npy(path, _, kinds="iu"):
    with opened(path):
        pass
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        is_right = values.dtype.kind in kinds and values.ndim in (1, 2)
    except Exception:  # NumPy lets those of its header's parser through
        is_right = False
    check(is_right, path, "is truncated, or not integers of one or two dimensions as numpy.save writes them")
    return values.reshape(-1), np.arange(1, len(values) + 1) * values.shape[1] if values.ndim == 2 else None


def targets_of(mask, ids, ends):
    """Which ids are targets: 1 and not 0, or of labels those that are not -100."""
    values, rows = npy(mask, None, "iub")
    check(len(values) == len(ids) and (rows is None or np.array_equal(rows, ends)), mask, "must have the ids' shape")
    ignored = 0 if ((values == 0) | (values == 1)).all() else -100
    check(ignored == 0 or ((values == -100) | (values == ids)).all(), mask, "must be of 1 and 0, or of ids and -100")
    return values != ignored


def parts(path, ids, ends, targets, token):
    """(ids, which are targets) of some documents at a time, or of a stream's next ids."""
    borders, begin = np.append(np.arange(CHUNK, len(ids), CHUNK), len(ids)) if ends is None else ends, 0
    while begin < len(ids):
        first, last = borders.searchsorted((begin, begin + CHUNK), "right")
        end = borders[max(first, last - 1)]
        part, own = ids[begin:end], np.ones(end - begin, bool) if targets is None else targets[begin:end]
        wrong = (part < 0) | (part > MOST_ID)
        check(not wrong.any(), path, f"id {part[wrong.argmax()]} at {begin + wrong.argmax()} (must be 0 to {MOST_ID})")
        part = part.astype(np.uint32)
        if ends is not None and token is not None:  # documents that lack it get it
            after = np.unique(borders[first:max(first + 1, last)]) - begin
            after = after[part[after - 1] != token]
            part, own = np.insert(part, after, token), np.insert(own, after, True)
        yield part, own
        begin = end


READERS = {"nanogpt": nanogpt, "llmc": lambda path, _: (read_shard(path), None), "megatron": megatron, "npy": npy}


def main():
    parser = Parser(__doc__)
    parser.add_argument("format", choices=READERS)
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--dtype", default="uint16", choices=("uint8", "uint16", "uint32", "int32", "int64"))
    parser.add_argument("--document-token", metavar="N", type=int, help="appended to documents that do not end with it")
    parser.add_argument("--mask", metavar="FILE.npy", action="append", help="one per FILE: 1 and 0, or ids and -100")
    options = parser.parse_intermixed_args()
    token, masks = options.document_token, options.mask or [None] * len(options.files)
    check(token is None or 0 <= token <= MOST_ID, "--document-token", f"must be 0 to {MOST_ID}")
    check(len(masks) == len(options.files), "--mask", f"must be given for each of {len(options.files)} files")
    check_new(options.out)
    sources = []
    for path, mask in zip(options.files, masks):
        ids, ends = READERS[options.format](path, options.dtype)
        sources.append((path, ids, ends, targets_of(mask, ids, ends) if mask else None, token))
    counts = [(len(ids), int(ids.max()), np.count_nonzero(ids == token)) for each in sources for ids, _ in parts(*each)]
    check(counts, options.files[0], "no tokens")
    tokens, largest, ended = (total(column) for total, column in zip((sum, max, sum), zip(*counts)))
    check(token is None or ended, "--document-token", f"{token} is nowhere in {options.files[0]}")
    with Shards(options.out, largest, options.mask) as shards:
        for ids, targets in (part for each in sources for part in parts(*each)):
            shards.add(ids, targets)
    unmarked = token is None and any(ends is not None for _, _, ends, _, _ in sources)
    print(f"{options.out}: {tokens} tokens, {shards.files} shards, --vocab {largest + 1} or more"
          f"{'; nothing marks the ends of documents: --document-token does' if unmarked else ''}")


if __name__ == "__main__":
    ends_with_one_line(main)
