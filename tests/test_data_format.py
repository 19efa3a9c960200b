"""Only this catches: shards of docs/make_shards.py and docs/convert_tokens.py that are not what the programs read, or
not what the files said; input that they take wrongly, or leave something of."""
import json
import os
import resource
import struct
import subprocess
import sys

import pytest

from conftest import ROOT, refused

import convert_tokens
import make_shards
import shards

END = 1  # the document token
# In place of Hugging Face's tokenizers: word N of the vocabulary is "wN".
TOKENIZER = """
class Encoding:
    def __init__(self, ids):
        self.ids = ids
class Tokenizer:
    @staticmethod
    def from_file(path):
        tokenizer = Tokenizer()
        tokenizer.size = int(open(path).read())
        return tokenizer
    def get_vocab(self):
        return {f"w{i}": i for i in range(self.size)}
    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return Encoding([int(word[1:]) for word in text.split()])
"""


def documents(vocabulary):
    """[(tokens, how many of them are a prompt)]: texts and dialogues in turn."""
    lengths = [5 + i % 17 for i in range(60)]
    return [([2 + (7 * i + 3 * k) ** 2 % (vocabulary - 2) for k in range(length)], length // 2 if i % 2 else 0)
            for i, length in enumerate(lengths)]


def as_json(tokens, prompt):
    words = [f"w{token}" for token in tokens]
    whole = {"text": " ".join(words)}
    return json.dumps({"prompt": " ".join(words[:prompt]), "answer": " ".join(words[prompt:])} if prompt else whole)


def read(path):
    """(magic, version, count, the file behind its header)."""
    blob = path.read_bytes()
    magic, version, count, *rest = struct.unpack("<256i", blob[:1024])
    assert not any(rest), path
    return magic, version, count, blob[1024:]


@pytest.mark.parametrize("vocabulary, magic, version, code", [(300, 20240520, 1, "H"), (70000, 20240801, 7, "I")])
def test_make_shards_writes_what_the_programs_train_on(run, vocabulary, magic, version, code):
    expected = documents(vocabulary)
    lines = [as_json(*document) for document in expected]
    expected.append(([2, 3, 4], 0))
    for name, text in (("tokenizers.py", TOKENIZER), ("tokenizer.json", str(vocabulary)),
                       ("a.jsonl", "\ufeff" + "\r\n".join(lines[:40])), ("b.jsonl", "\n\n".join(lines[40:]) + "\n"),
                       ("c.txt", "\ufeffw2\nw3 w4\n")):
        (run.folder / name).write_text(text)
    done = run(sys.executable, ROOT / "docs/make_shards.py", f"tokenizer.json w{END} out a.jsonl b.jsonl c.txt",
               env={"PYTHONPATH": os.fspath(run.folder)})
    done.says(f"--document-token {END}\n", where="out")

    tokens = [token for words, _ in expected for token in [*words, END]]
    mask = [int(k >= prompt) for words, prompt in expected for k in range(len(words) + 1)]
    content = struct.pack(f"<{len(tokens)}{code}", *tokens)
    assert read(run.folder / "out/00000.bin") == (magic, version, len(tokens), content)
    assert read(run.folder / "out/00000.mask.bin") == (20261122, 1, len(tokens), bytes(mask))

    done = run("01_single_gpu", "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --device cpu --seq-len 16",
               f"--global-batch 4 --vocab {vocabulary} --data out --steps 3 --metrics m.jsonl")
    share, shares = sum(mask) / len(mask), [event["targets"] / 64 for event in done.events()]
    assert len(shares) == 3 and all(abs(each - share) <= 0.2 for each in shares), (shares, share)


# ---- other programs' files, byte by byte ----------------------------------------------------------------------------
DOCUMENTS = [[7, 1, 9], [], [1], [5, 6, 2, 3], [100, 127, 0], [0]]
MARKED = [7, 1, 9, 1, 1, 5, 6, 2, 3, 1, 100, 127, 0, 1, 0, 1]  # the same, each ended by 1
IDS = sum(DOCUMENTS, [])
MOST = {"B": 255, "b": 127, "H": 65535, "h": 32767, "I": 2**32 - 1, "i": 2**31 - 1, "Q": 2**32 - 1, "q": 2**32 - 1}
NUMPY = {"B": "|u1", "b": "|i1", "H": "<u2", "h": "<i2", "I": "<u4", "i": "<i4", "Q": "<u8", "q": "<i8", "f": "<f4"}
CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8, "I": 9, "Q": 10}  # of Megatron


def raw(ids, kind="H"):
    return struct.pack(f"<{len(ids)}{kind}", *ids)


def llmc(ids, magic=20240520, version=1, kind="H", count=None):
    return struct.pack("<3i", magic, version, len(ids) if count is None else count).ljust(1024, b"\0") + raw(ids, kind)


def npy(ids, kind="H", shape=None, order="False"):
    shape = shape or f"({len(ids)},)"
    head = f"{{'descr': '{NUMPY.get(kind, kind)}', 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode() + raw(ids, kind if len(kind) == 1 else "B")


def index(kind="H", lengths=(3, 0, 1, 2, 2, 3, 1), ends=(0, 1, 2, 3, 5, 6, 7), pointers=None, more=b"", code=None):
    """Megatron's, of DOCUMENTS: the fourth has two sequences."""
    pointers = pointers or [sum(lengths[:i]) * struct.calcsize(kind) for i in range(len(lengths))]
    head = struct.pack("<QBQQ", 1, CODES[kind] if code is None else code, len(lengths), len(ends))
    return b"MMIDIDX\0\0" + head + raw(lengths, "i") + raw(pointers, "q") + raw(ends, "q") + more


def converted(folder):
    """(bytes of an id, ids, mask or None) of the folder's shards."""
    ids, masks, kind = [], [], None
    for path in sorted(folder.glob("*[0-9].bin")):
        magic, version, count, content = read(path)
        kind = {(20240520, 1): "H", (20240801, 7): "I"}[magic, version]
        ids += struct.unpack(f"<{count}{kind}", content)
    for path in sorted(folder.glob("*.mask.bin")):
        assert read(path)[:2] == (20261122, 1)
        masks += read(path)[3]
    assert len(masks) in (0, len(ids)) and not list(folder.parent.glob("*.partial"))
    return kind, ids, masks or None


def exact():
    """(what is converted, the files, the ids to come)"""
    for kind, most in MOST.items():
        ids = [0, 1, most, 3, most - 1]
        names = {"B": "uint8", "H": "uint16", "I": "uint32", "i": "int32", "q": "int64"}
        if kind in names:
            yield f"nanogpt OUT a --dtype {names[kind]}", {"a": raw(ids, kind)}, ids
        yield "npy OUT a.npy b.npy", {"a.npy": npy(ids, kind), "b.npy": npy(ids[:2], kind)}, ids + ids[:2]
        yield "megatron OUT a.bin", {"a.bin": raw(IDS, kind), "a.idx": index(kind)}, IDS
        yield "megatron OUT a --document-token 1", {"a.bin": raw(IDS, kind), "a.idx": index(kind)}, MARKED
    yield "nanogpt OUT a --document-token 1", {"a": raw(IDS)}, IDS
    yield "nanogpt OUT a", {"a": raw([0, 3, 1, 2] * 20)}, [0, 3, 1, 2] * 20
    yield "llmc OUT a b", {"a": llmc(IDS), "b": llmc([2**32 - 1], 20240801, 7, "I")}, IDS + [2**32 - 1]
    yield "megatron OUT a.idx", {"a.bin": raw(IDS), "a.idx": index(more=bytes(7))}, IDS  # with modes
    yield "npy OUT a", {"a": npy([1, 0, 2, 255], ">u2", "(2,)")}, [256, 767]
    rows = [1, 2, 3, 4, 5, 6]
    yield "npy OUT a --document-token 4", {"a": npy(rows, "i", "(2, 3)")}, [1, 2, 3, 4, 4, 5, 6, 4]
    yield "npy OUT a --document-token 4", {"a": npy(rows, "i", "(3, 2)", "True")}, [1, 4, 2, 5, 4, 3, 6, 4]
    yield "npy OUT a --document-token 70000", {"a": npy([1, 2, 3], "B", "(1, 3)")}, [1, 2, 3, 70000]


@pytest.mark.parametrize("chunk, size", [(1 << 24, 1 << 26), (1, 3), (4, 1)])
def test_conversion_is_exact(call, monkeypatch, tmp_path, chunk, size):
    monkeypatch.setattr(convert_tokens, "CHUNK", chunk)
    monkeypatch.setattr(shards, "TOKENS", size)
    for number, (words, files, ids) in enumerate(exact()):
        code, out, err = call(convert_tokens, words.replace("OUT", f"out{number}"), files)
        assert (code, err) == (0, ""), (words, err)
        assert converted(tmp_path / f"out{number}") == ("H" if max(ids) < 65536 else "I", ids, None), words
        assert f" {len(ids)} tokens" in out and f"--vocab {max(ids) + 1} " in out, out
        assert ("nothing marks" in out) == (words.startswith("megatron") and "--document" not in words), (words, out)


def test_masks(call, tmp_path):
    masks = npy([1, 0, 0, 1], "B"), npy([1, 0, 0, 1], "?", "(2, 2)"), npy([9, -100, -100, 0], "q")  # the last: labels
    for number, mask in enumerate(masks):
        files = {"a": npy([9, 8, 7, 0], "H", "(2, 2)"), "m": mask}
        assert call(convert_tokens, f"npy {number} a --mask m --document-token 8", files)[::2] == (0, "")
        assert converted(tmp_path / str(number)) == ("H", [9, 8, 7, 0, 8], [1, 0, 0, 1, 1])


MEGATRON = {"a.bin": raw(IDS)}
WRONG = [  # (words, files, what the line says)
    ("nanogpt out a", {"a": raw(IDS)[:-1]}, "a: truncated"),
    ("nanogpt out a", {"a": ""}, "a: no tokens"), ("nanogpt out a", {"a": raw(range(99), "I")}, "try --dtype uint32"),
    ("nanogpt out a", {"a": llmc(IDS)}, "try convert_tokens.py llmc"),
    ("nanogpt out a", {"a": npy(IDS)}, "try convert_tokens.py npy"),
    ("nanogpt out a", {"a": index()}, "try convert_tokens.py megatron"),
    ("nanogpt out a --dtype int32", {"a": raw([1, 2, -3], "i")}, "a: id -3 at 2 (must be 0 to 4294967295)"),
    ("nanogpt out a --dtype int64", {"a": raw([1, 2**32], "q")}, "a: id 4294967296 at 1 "),
    ("nanogpt out a --dtype float32", {"a": ""}, "--dtype"),
    ("nanogpt out a --document-token 4", {"a": raw(IDS)}, "--document-token: 4 is nowhere in a"),
    ("nanogpt out a --document-token -1", {"a": raw(IDS)}, "--document-token"),
    ("nanogpt out a --document-token 4294967296", {"a": raw(IDS)}, "--document-token"),
    ("nanogpt out .", {}, ".: cannot be read: not a file"), ("nanogpt out none", {}, "none: cannot be read: No such"),
    ("nanogpt . a", {"a": raw(IDS)}, ".: is already there"), ("nanogpt a a", {"a": raw(IDS)}, "a: is already there"),
    ("nanogpt a/out a", {"a": raw(IDS)}, "a/out.partial: Not a directory"),
    ("nanogpt", {}, "required"), ("foo out a", {}, "foo"), ("nanogpt out a --foo", {"a": raw(IDS)}, "--foo"),
    ("llmc out a", {"a": llmc(IDS)[:1000]}, "a: truncated"), ("llmc out a", {"a": llmc(IDS)[:-1]}, "a: truncated"),
    ("llmc out a", {"a": llmc(IDS)[:-2]}, "the header says 12 tokens, the file has 11"),
    ("llmc out a", {"a": llmc(IDS, count=-1)}, "says -1 tokens"),
    ("llmc out a", {"a": llmc(IDS, 20240522)}, "magic number 20240522, version 1 (must be "),
    ("llmc out a.bin", {"a.bin": llmc(IDS), "a.mask.bin": ""}, "a.bin: has a mask"),
    ("llmc out a", {"a": llmc(IDS, version=7)}, "version 7 (must be "),
    ("llmc out a", {"a": raw(range(999))}, "try convert_tokens.py nanogpt"),
    ("megatron out a", MEGATRON, "a.idx: cannot be read"),
    ("megatron out a", {"a.idx": index()}, "a.bin: cannot be read"),
    *(("megatron out a.bin", {**MEGATRON, "a.idx": wrong}, "a.idx: " + says) for wrong, says in (
        (index()[:33], "truncated"), (index()[:-1], "truncated or corrupt"), (index(more=b"1"), "truncated or corrupt"),
        (b"TNTIDX\0\0" + index()[8:], "must begin"), (index()[:9] + b"\2" + index()[10:], "must begin"),
        (index("f", code=7), "ids of type 7 (must be integers"), (index(code=0), "ids of type 0"),
        (index("Q", code=8), "its sequences, of 12 tokens, are not the 12 of a.bin one after another"),
        (index("I"), "its sequences, of 12 tokens, are not the 6 of"),
        (index(lengths=(3, 0, 1, 2, 2, 3, 2)), "its sequences, of 13 tokens, are not the 12 of"),
        (index(lengths=(3, 0, 1, 2, 2, 5, -1)), "its sequences"),
        (index(pointers=[0, 6, 6, 8, 12, 16, 20]), "its sequences"),
        *((index(ends=ends), "corrupt: its documents") for ends in ((0, 1, 2), (0, 5, 2, 7), (1, 7), ())))),
    *(("npy out a", {"a": wrong}, "a: is truncated, or not integers") for wrong in (
        npy(IDS)[:-1], npy(IDS)[:50], npy(IDS)[:5], b"", "text", npy([1.5], "f"), npy([1], "?"), npy([1], "B", "()"),
        npy([1], "B", "(1, 1, 1)"), npy([1], "|O", "(1,)"), npy(IDS, shape="(-1,)"), npy(IDS, shape="((("),
        b"PK\3\4" + bytes(99))),
    ("npy out a", {"a": npy([])}, "a: no tokens"), ("npy out a", {"a": npy([3, -1], "b")}, "a: id -1 at 1 "),
    ("npy out a", {"a": npy([2**64 - 1], "Q")}, "a: id 18446744073709551615 at 0 "),
    *(("npy out a --mask m", {"a": npy([9, 8]), "m": wrong}, "m: " + says) for wrong, says in (
        (npy([1]), "must have the ids' shape"), (npy([1, 0], shape="(2, 1)"), "must have the ids' shape"),
        (npy([2, 0]), "must be of 1 and 0, or of ids and -100"), (npy([8, -100], "h"), "must be of 1 and 0"),
        (npy([1.0, 0.0], "f"), "is truncated, or not integers"))),
    ("npy out a b --mask m", {"a": npy([9]), "b": npy([9]), "m": npy([1])}, "--mask: must be given for each of 2"),
]


def test_what_cannot_be_converted_is_refused(call, tmp_path):
    for words, files, says in WRONG:
        for path in tmp_path.iterdir():
            path.unlink()
        refused(tmp_path, call(convert_tokens, words, files), files, "convert_tokens", says)


def test_nothing_is_left_of_a_full_disk(tmp_path):
    (tmp_path / "a").write_bytes(raw(range(5000)))
    ended = subprocess.run([sys.executable, ROOT / "docs/convert_tokens.py", "nanogpt", "out", "a"], cwd=tmp_path,
                           capture_output=True, text=True,
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
    refused(tmp_path, (ended.returncode, ended.stdout, ended.stderr), ["a"], "convert_tokens", "File too large")


LINES = [("[1, 2]", "not an object"), ("null", "not an object"), ('"text"', "not an object"), ("{", "not an object"),
         ("text", "not an object"), ("[" * 100000, "not an object"), ("\0", "not an object"),
         (b"\xef\xbb\xbf{}", "not an object"),
         ('{"text": null}', "text is not a string"), ('{"prompt": "w2", "answer": 5}', "answer is not a string"),
         (r'{"text": "\ud800"}', "text is not a string of Unicode"), ("{}", "no text, prompt or answer"),
         (b'{"text": "caf\xe9"}', "not UTF-8 at byte 14"), ('{"text": "w2"}\n'.encode("utf-16"), "not UTF-8 at byte 1"),
         ('{\n"text": "w2"}', "not an object")]
MAKE = [("t 1 out none", {}, "none: cannot be read"), ("t 1 out .", {}, ".: cannot be read: not a file"),
        ("t 1 out a", {"a": " \n\n"}, "a: no documents"), ("t 1 out a", {"a": ""}, "a: no documents"),
        ("t 1 out", {}, "required"),
        *((f"t {token} out a", {}, f"{token}: is no token of t") for token in ("x", "-1", "300", "w300", "9" * 30)),
        ("t 1 out a.txt", {"a.txt": b"w2 \xe9"}, "a.txt: not UTF-8 at byte 4"),
        ("t 1 out a.txt", {"a.txt": "\n"}, "a.txt: no documents"),
        ("none 1 out a", {}, "none: cannot be read"), ("a 1 out a", {"a": "x"}, "a: is no tokenizer.json"),
        ("t 1 a a", {}, "a: is already there")]


def test_lines_that_are_no_documents_are_named(call, tmp_path):
    files = {"tokenizers.py": TOKENIZER, "t": "300", "a": '{"text": "w5"}\n'}
    for words, content, says in MAKE:
        content = {**files, **content}
        refused(tmp_path, call(make_shards, words, content), content, "make_shards", says)
        (tmp_path / "a.txt").unlink(missing_ok=True)
    for content, says in LINES:
        line = content.encode() if isinstance(content, str) else content
        content = {**files, "b": b'{"text": "w5"}\n' * 2 + line}
        refused(tmp_path, call(make_shards, "t 1 out a b", content), content, "make_shards", "b:3: " + says)
