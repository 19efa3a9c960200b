#!/usr/bin/env python3
"""Token shards with masks (docs/data-format.md) of texts and dialogues, one on each line of JSON.

    python3 docs/make_shards.py tokenizer.json 128001 OUT documents.jsonl ...

A line is {"text": "..."}, or {"prompt": "...", "answer": "..."}, of which only the answer is a target; a file NAME.txt
is one text. The token, an id or a name of tokenizer.json, ends each. OUT, a new folder, appears when all is read.
Bad input: one line, exit code 2.
"""
import json
import sys

from shards import Shards, check_new
from usage import Parser, UsageError, check, ends_with_one_line, opened

PARTS = {"text": 1, "prompt": 0, "answer": 1}  # 1: targets


def loaded(path):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("needs tokenizers and NumPy in one Python: python3 -m venv tok && tok/bin/pip install "
                         f"tokenizers numpy && tok/bin/python {sys.argv[0]} ...") from None
    with opened(path):
        pass
    try:
        return Tokenizer.from_file(path)
    except Exception:  # tokenizers has no narrower one
        raise UsageError(f"{path}: is no tokenizer.json of Hugging Face's tokenizers") from None


def whole_text(path):
    with opened(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 at byte {error.start + 1}") from None


def documents(path):
    """[(text, is it a target)] of each line, or of a file of text."""
    if path.endswith(".txt"):
        text = whole_text(path)
        yield from [[(text, 1)]] if text.strip() else []
        return
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            where, line = f"{path}:{number}", line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"")  # UTF-8's BOM
            if not line.strip():
                continue
            try:
                document = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise UsageError(f"{where}: not UTF-8 at byte {error.start + 1} of the line") from None
            except (ValueError, RecursionError):
                document = None
            check(isinstance(document, dict), where, 'not an object of JSON on one line, such as {"text": "..."}')
            texts = {name: document[name] for name in PARTS if name in document}
            check(texts, where, "no text, prompt or answer")
            for name, text in texts.items():
                check(isinstance(text, str) and text.encode(errors="replace").decode() == text, where,
                      f"{name} is not a string of Unicode")
            yield [(text, PARTS[name]) for name, text in texts.items()]


def main():
    parser = Parser(__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("token", help="ends each document: an id, or a name such as '</s>'")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("files", metavar="FILE", nargs="+")
    options = parser.parse_args()
    check_new(options.out)
    tokenizer = loaded(options.tokenizer)
    ids = tokenizer.get_vocab()
    token = int(options.token) if options.token.isdecimal() else ids.get(options.token)
    check(token in ids.values(), options.token, f"is no token of {options.tokenizer}, by id or name")
    count = 0
    with Shards(options.out, max(ids.values()), masked=True) as shards:
        for document in (each for path in options.files for each in documents(path)):
            count += 1
            for text, is_target in document:
                tokens = tokenizer.encode(text, add_special_tokens=False).ids
                shards.add(tokens, [is_target] * len(tokens))
            shards.add([token], [1])
        check(count, options.files[0], "no documents")
    print(f"{options.out}: {count} documents, {shards.files} shards, --document-token {token}")


if __name__ == "__main__":
    ends_with_one_line(main)
