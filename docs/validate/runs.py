"""Reads reference runs (docs/reference-format.md). What a folder lacks or states wrongly is one line, a UsageError."""

import contextlib
import itertools
import json
import math
import os
import re
import stat
import struct

import numpy as np

FORMAT, VERSIONS = "train70b reference run", (1, 2, 3)
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
DIGITS = {"fp64": 53, "fp32": 24, "bf16": 8}  # of the significand; the least exact last


class UsageError(Exception):
    pass


def quoted(text):
    """On one line, whatever the text holds."""
    return '"' + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)) + '"'


def shown(path):
    return path if path.isprintable() else quoted(path)


@contextlib.contextmanager
def opened(path, hint=""):
    """A regular file: a FIFO would block for ever."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"{shown(path)}: cannot be read: not a file{hint}")
        with open(path, "rb") as file:
            yield file
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown(path)}: cannot be read: {getattr(error, 'strerror', None) or error}{hint}") from None


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308


class Safetensors:
    """One file; tensors are read when they are asked for, as doubles."""

    def __init__(self, path):
        self.path = path
        with opened(path) as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            head = file.read(size) if size < 1 << 27 else b""
        self.begin = 8 + len(head)
        try:
            entries = json.loads(head)
            entries.pop("__metadata__", None)
            self.tensors = {
                name: (DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{shown(path)}: is not a safetensors file of F64, F32, F16 or BF16") from None
        data = os.path.getsize(path) - self.begin
        for name, (dtype, shape, begin, end) in self.tensors.items():
            whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
            if not whole or end > data or end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
                raise UsageError(f"{shown(path)}: {quoted(name)} does not lie within the file: is it cut?")
        if not self.tensors:
            raise UsageError(f"{shown(path)}: has no tensors")

    def shape(self, name):
        return self.tensors[name][1]

    def dtype(self, name):
        """fp64, fp32 or bf16: what rounding the stored numbers have at least."""
        return {"<f8": "fp64", "<f4": "fp32"}.get(self.tensors[name][0], "bf16")

    def read(self, name):
        dtype, shape, begin, end = self.tensors[name]
        with open(self.path, "rb") as file:
            file.seek(self.begin + begin)
            values = np.frombuffer(file.read(end - begin), dtype)
        if dtype == "<u2":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float64).reshape(shape)

    def all(self):
        return {name: self.read(name) for name in self.tensors}


class Step:
    """One entry of "steps". tokens (samples, seq_len + 1), targets (samples, seq_len), -1: ignored; both as lists."""

    def __init__(self, entry, refuse):
        entry = {"lr": None, **entry} if isinstance(entry, dict) else {}

        def number(key):
            value = entry.get(key, "none")
            if value is not None and not is_number(value):
                refuse(f'"{key}" must be a number')
            return math.nan if value is None else float(value)  # null stands for NaN

        def samples(key):
            value = entry.get(key)
            if not isinstance(value, list) or not all(isinstance(sample, list) for sample in value):
                refuse(f'"{key}" must be a list of samples')
            for token in itertools.chain(*value):
                if type(token) is not int or not -(2**63) <= token < 2**63:
                    refuse(f"has token {json.dumps(token)[:40]} (must be an integer)")
            return value

        self.loss, self.grad_norm, self.lr = number("loss"), number("grad_norm"), number("lr")
        if self.grad_norm < 0:
            refuse(f'"grad_norm" is {self.grad_norm:g} (must not be negative)')
        self.tokens = samples("tokens")
        self.targets = samples("targets") if "targets" in entry else [sample[1:] for sample in self.tokens]

    def arrays(self):
        """inputs and targets, (samples, seq_len)."""
        return np.array(self.tokens)[:, :-1], np.array(self.targets)


class Run:
    def __init__(self, folder):
        self.folder = folder
        path = os.path.join(folder, "reference.json")

        def refuse(why):
            raise UsageError(f"{shown(path)}: {why}")

        def constant(name):
            raise ValueError(f"{name} is no JSON")

        try:
            with opened(path, " (must be a folder that --save-reference wrote)") as stored:
                text = stored.read()
            file = json.loads(text.decode(), parse_constant=constant)
        except RecursionError:
            refuse("nested deeper than 64")
        except ValueError as error:
            refuse(f"is not JSON: {error}")
        file = file if isinstance(file, dict) else {}
        self.version, self.flags, self.dtype = file.get("version"), file.get("flags", {}), file.get("dtype", "fp32")
        if self.version not in VERSIONS or type(self.version) is not int or file.get("format") != FORMAT:
            refuse(f'is not a "{FORMAT}" of version 1, 2 or 3')
        if not isinstance(self.flags, dict):
            refuse('"flags" is not an object')
        self.model = file["model"] if isinstance(file.get("model"), dict) else {}
        if self.dtype not in list(DIGITS):
            refuse('"dtype" must be fp32, bf16 or fp64')
        self.document_token = file.get("document_token")
        steps = file.get("steps")
        if not isinstance(steps, list) or not steps:
            refuse('"steps" must be a list with at least one step')
        self.steps = [Step(entry, lambda why, i=i: refuse(f"steps[{i}] {why}")) for i, entry in enumerate(steps)]
        self.initial, self.gradients = self.file("initial"), self.file("gradients")
        self.after_step_1 = self.file("after_step_1", optional=True)
        # Version 3, all optional: docs/torch_reference.py writes them.
        self.gradients_2, self.after_step_2 = self.file("gradients_2", True), self.file("after_step_2", True)
        self.activations = self.file("activations", True)

    def file(self, name, optional=False):
        path = os.path.join(self.folder, name + ".safetensors")
        return None if optional and not os.path.lexists(path) else Safetensors(path)

    def flag(self, name, default=math.nan):
        """The value of a flag, stored as text or as a number; NaN if there is none."""
        value = self.flags.get(name, default)
        if isinstance(value, str):
            value = float(value) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value) else math.nan
        return float(value) if is_number(value) else math.nan

    def gentle(self):
        """Whether AdamW amplifies rounding so little that fp64 runs can be checked for more steps."""
        small = all(self.flag(name) <= most for name, most in (("lr", 3e-3), ("init-std", 0.1)))
        return small and self.flag("warmup-steps") >= 20 and self.flag("eps") >= 1e-8

    def optimizer(self):
        return self.flags.get("optimizer", "adamw")


def write_safetensors(path, tensors, dtype="F64"):
    """{name: values} in one dtype; numbers are rounded to fp16 and fp32, and cut to bf16."""
    entries, data = {}, b""
    for name, values in tensors.items():
        values = np.asarray(values, np.float64)
        if dtype == "BF16":
            values = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        stored = values.astype(DTYPES[dtype]).tobytes()
        offsets = [len(data), len(data) + len(stored)]
        entries[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += stored
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + data)
