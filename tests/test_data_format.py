"""Only this catches: shards of docs/make_shards.py that are not what the programs read; lines that it takes
wrongly."""
import json
import os
import struct
import sys

import pytest

from conftest import ROOT

import make_shards
import usage

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
    for name, text in (("tokenizers.py", TOKENIZER), ("tokenizer.json", str(vocabulary)),
                       ("a.jsonl", "\ufeff" + "\r\n".join(lines[:40])), ("b.jsonl", "\n\n".join(lines[40:]) + "\n")):
        (run.folder / name).write_text(text)
    run(sys.executable, ROOT / "docs/make_shards.py", f"tokenizer.json {END} out a.jsonl b.jsonl",
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


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """start(program, words, files): (exit code, stdout, stderr), in a folder of the test's own, with these files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def start(program, words, files):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        monkeypatch.setattr(sys, "argv", [program.__name__ + ".py", *words.split()])
        try:
            usage.ends_with_one_line(program.main)
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()
    return start


def refused(folder, ended, files, program, says):
    code, _, err = ended
    assert code == 2 and err.count("\n") == 1 and err.startswith(f"{program}.py: ") and says in err, (says, ended)
    assert {path.name for path in folder.iterdir()} == set(files), (says, list(folder.iterdir()))


LINES = [("[1, 2]", "not an object"), ("null", "not an object"), ('"text"', "not an object"), ("{", "not an object"),
         ("text", "not an object"), ("[" * 100000, "not an object"), ("\0", "not an object"),
         (b"\xef\xbb\xbf{}", "not an object"),
         ('{"text": null}', "text is not a string"), ('{"prompt": "w2", "answer": 5}', "answer is not a string"),
         (r'{"text": "\ud800"}', "text is not a string of Unicode"), ("{}", "no text, prompt or answer"),
         (b'{"text": "caf\xe9"}', "not UTF-8 at byte 14"), ('{"text": "w2"}\n'.encode("utf-16"), "not UTF-8 at byte 1"),
         ('{\n"text": "w2"}', "not an object")]
MAKE = [("t 1 out none", {}, "none: cannot be read"), ("t 1 out .", {}, ".: cannot be read: not a file"),
        ("t 1 out a", {"a": " \n\n"}, "a: no documents"), ("t 1 out a", {"a": ""}, "a: no documents"),
        ("t 1 out", {}, "required"), ("t x out a", {}, "argument token"), ("t -1 out a", {}, "must be a document"),
        ("none 1 out a", {}, "none: cannot be read"), ("a 1 out a", {"a": "x"}, "a: is no tokenizer.json"),
        ("t 1 a a", {}, "a: is already there")]


def test_lines_that_are_no_documents_are_named(start, tmp_path):
    files = {"tokenizers.py": TOKENIZER, "t": "300", "a": '{"text": "w5"}\n'}
    for words, content, says in MAKE:
        refused(tmp_path, start(make_shards, words, {**files, **content}), files, "make_shards", says)
    for content, says in LINES:
        line = content.encode() if isinstance(content, str) else content
        content = {**files, "b": b'{"text": "w5"}\n' * 2 + line}
        refused(tmp_path, start(make_shards, "t 1 out a b", content), content, "make_shards", "b:3: " + says)
