#!/usr/bin/env python3
"""Runs make_shards.py of docs/data-format.md with a tokenizer that splits words, checks its files byte by byte, and
trains on them; exit code 1 and a line for what is wrong.

    python3 tests/data_format.py BIN_FOLDER
"""
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
END = 1  # the document token
SHAPE = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --device cpu --seq-len 16 --global-batch 4".split()
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
    """[(tokens, which of them are targets)]: texts and dialogues in turn."""
    found = []
    for i in range(60):
        words = [2 + (7 * i + 3 * k) ** 2 % (vocabulary - 2) for k in range(5 + i % 17)]
        prompt = len(words) // 2 if i % 2 else 0
        found.append((words, [0] * prompt + [1] * (len(words) - prompt)))
    return found


def as_json(tokens, mask):
    def text(part):
        return " ".join(f"w{token}" for token in part)
    if 0 not in mask:
        return json.dumps({"text": text(tokens)})
    prompt = mask.index(1)
    return json.dumps({"prompt": text(tokens[:prompt]), "answer": text(tokens[prompt:])})


def read(path):
    """(magic, version, the file behind its header)."""
    blob = path.read_bytes()
    magic, version, count, *rest = struct.unpack("<256i", blob[:1024])
    assert not any(rest), path
    return magic, version, count, blob[1024:]


def check(binaries, work, vocabulary, errors):
    expected = documents(vocabulary)
    (work / "tokenizer.json").write_text(str(vocabulary))
    lines = [as_json(*document) for document in expected]
    (work / "a.jsonl").write_text("\n".join(lines[:40]) + "\n")
    (work / "b.jsonl").write_text("\n".join(lines[40:]) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(work)}
    subprocess.run([sys.executable, "make_shards.py", "tokenizer.json", str(END), "out", "a.jsonl", "b.jsonl"],
                   cwd=work, env=environment, check=True)
    tokens = [token for words, _ in expected for token in [*words, END]]
    mask = [bit for _, bits in expected for bit in [*bits, 1]]
    wide = vocabulary > 65536
    magic, version, count, body = read(work / "out/00000.bin")
    if (magic, version, count) != ((20240801, 7) if wide else (20240520, 1)) + (len(tokens),):
        errors.append(f"vocabulary {vocabulary}: the shard's header is {magic}, {version}, {count}")
    if body != struct.pack(f"<{len(tokens)}{'I' if wide else 'H'}", *tokens):
        errors.append(f"vocabulary {vocabulary}: the shard's tokens are not those of the documents")
    if read(work / "out/00000.mask.bin") != (20261122, 1, len(tokens), bytes(mask)):
        errors.append(f"vocabulary {vocabulary}: the mask is not that of the documents")

    # The share of the targets is the mask's.
    command = [str(binaries / "01_single_gpu"), *SHAPE, "--vocab", str(min(vocabulary, 70000)), "--data", "out",
               "--steps", "3", "--metrics", "m.jsonl"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        errors.append(f"vocabulary {vocabulary}: {done.stderr.strip()}")
        return
    events = [json.loads(line) for line in (work / "m.jsonl").read_text().splitlines()]
    share = sum(mask) / len(mask)
    steps = [event["targets"] / 64 for event in events if event["event"] == "step"]
    if len(steps) != 3 or not all(abs(targets - share) <= 0.2 for targets in steps):
        errors.append(f"vocabulary {vocabulary}: the shares of targets are {steps}, in all it is {share:.2f}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    program, = re.findall(r"```python\n(# make_shards.py\n.*?)```", (ROOT / "docs/data-format.md").read_text(), re.S)
    errors = []
    for vocabulary in (300, 70000):
        with tempfile.TemporaryDirectory() as folder:
            work = pathlib.Path(folder)
            (work / "make_shards.py").write_text(program)
            (work / "tokenizers.py").write_text(TOKENIZER)
            check(pathlib.Path(sys.argv[1]).resolve(), work, vocabulary, errors)
    for error in errors:
        print(error)
    print(f"{len(errors)} differences" if errors else "the shards of docs/data-format.md are what the programs read")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
