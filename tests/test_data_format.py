"""Only this catches: shards of docs/data-format.md's make_shards.py that are not what the programs read."""
import json
import os
import re
import struct
import sys

import pytest

from conftest import ROOT

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
    program, = re.findall(r"```python\n(# make_shards.py\n.*?)```", (ROOT / "docs/data-format.md").read_text(), re.S)
    for name, text in (("make_shards.py", program), ("tokenizers.py", TOKENIZER), ("tokenizer.json", str(vocabulary)),
                       ("a.jsonl", "\n".join(lines[:40]) + "\n"), ("b.jsonl", "\n".join(lines[40:]) + "\n")):
        (run.folder / name).write_text(text)
    run(sys.executable, f"make_shards.py tokenizer.json {END} out a.jsonl b.jsonl",
        env={"PYTHONPATH": os.fspath(run.folder)})

    tokens = [token for words, _ in expected for token in [*words, END]]
    mask = [int(k >= prompt) for words, prompt in expected for k in range(len(words) + 1)]
    content = struct.pack(f"<{len(tokens)}{code}", *tokens)
    assert read(run.folder / "out/00000.bin") == (magic, version, len(tokens), content)
    assert read(run.folder / "out/00000.mask.bin") == (20261122, 1, len(tokens), bytes(mask))

    done = run("01_single_gpu", "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --device cpu --seq-len 16",
               f"--global-batch 4 --vocab {vocabulary} --data out --steps 3 --metrics m.jsonl")
    share, shares = sum(mask) / len(mask), [event["targets"] / 64 for event in done.events()]
    assert len(shares) == 3 and all(abs(each - share) <= 0.2 for each in shares), (shares, share)
