"""What the cases of bad_input.py have in common: the programs, a small model, the folder that each begins with, and odd
files.
"""
import os
import re
import struct
import subprocess

FIRST = "01_single_gpu"
PROGRAMS = [FIRST, "02_data_parallel", "03_zero", "04_tensor_parallel", "05_pipeline", "06_context_parallel", "07_fp8",
            "08_3d_full"]
# A small model: a bad input that is accepted by mistake soon ends. Flags of a case replace the same flags here.
SHAPE = {"--layers": "2", "--hidden": "32", "--heads": "4", "--kv-heads": "2", "--ffn": "48"}
RUN = {"--data": "text.txt", "--seq-len": "16", "--global-batch": "2", "--steps": "1", "--metrics": "m.jsonl",
       "--trace": "t.json", "--tables": "off", "--val-fraction": "0"}
TEXT = "".join(f"line {i} of a text\n" for i in range(100))
GENTLE = 40  # seconds, where more than one process starts


def words_of(program, given, without=()):
    """The arguments: the small model's flags that `given` has not, then `given`."""
    if program in ("compare", "schedule", "plan"):
        return list(given)
    defaults = dict(RUN) if "--load-hf" in given else {**SHAPE, **RUN}
    if program in (FIRST, "08_3d_full"):
        del defaults["--tables"]
    taken = {word.split("=")[0] for word in given if isinstance(word, str)} | set(without)
    return [word for flag, value in defaults.items() if flag not in taken for word in (flag, value)] + list(given)


def write_text(folder):
    (folder / "text.txt").write_text(TEXT)


def after(*steps):
    """A setup: the text, then each step."""
    def setup(folder):
        write_text(folder)
        for step in steps:
            step(folder)
    return setup


def flags_of(binaries, program):
    """{flag: type} of --help; "" for a switch without a value."""
    text = subprocess.run([os.path.join(binaries, program), "--help"], capture_output=True, text=True,
                          check=True).stdout
    return {flag: kind or "" for flag, kind in re.findall(r"^  (--[a-z0-9-]+)(?: (\S+))?(?: |$)", text, re.M)
            if flag != "--help"}


def odd_files(folder):
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop2")
    (folder / "loop2").symlink_to("loop")


def shown(value):
    text = value if isinstance(value, str) else repr(value)
    return ascii(text if len(text) < 30 else text[:27] + "...")


MAGIC16, MAGIC32, MASK = 20240520, 20240801, 20261122


def shard(magic=MAGIC16, version=1, count=200, tokens=None, width=2, header=1024):
    tokens = [i % 256 for i in range(200)] if tokens is None else tokens
    head = struct.pack("<3i", magic, version, count).ljust(header, b"\0")[:header]
    return head + b"".join(struct.pack("<H" if width == 2 else "<I", token) for token in tokens)


def mask(bytes_, magic=MASK, version=1):
    return struct.pack("<3i", magic, version, len(bytes_)).ljust(1024, b"\0") + bytes(bytes_)
