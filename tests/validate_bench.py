"""What tests/validate.py and validate_doctor.py share: runs that are made, altered and compared."""

import hashlib
import json
import os
import pathlib
import shutil
import struct
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # small matrices
sys.path[:0] = [str(ROOT / "docs")]
try:
    import numpy as np
except ImportError:
    os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)  # Debian's has its packages
import references  # noqa: E402
from validate import comparison  # noqa: E402
from validate.runs import Run  # noqa: E402

np.seterr(all="ignore")
FAILED = []


def check(ok, what):
    if not ok:
        FAILED.append(what)
        print(f"FAIL {what}")


def write_tensors(path, tensors, dtype="F64"):
    numbers = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]
    head, data = {}, b""
    for name, values in tensors.items():
        values = np.ascontiguousarray(values, np.float64)
        if dtype == "BF16":
            values = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        blob = values.astype(numbers).tobytes()
        head[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    head = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


class Bench:
    """Folders in which runs are made and altered."""

    def __init__(self, programs):
        self.programs, self.work = programs, pathlib.Path(tempfile.mkdtemp())

    def reference(self, name, dtype="fp64", *more):
        """One of docs/references.py's, made once."""
        out = self.work / "-".join([dtype, *more]).replace("/", "_")
        if not (out / name).exists():
            out.mkdir(exist_ok=True)
            references.make(self.programs, out, name, dtype, more)
        return out / name

    def altered(self, base, change=None, files=None, dtype="F64"):
        """A copy of a run: change(reference.json), files {file: {name: values} or a function of them}."""
        folder = self.work / "altered"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        if change:
            content = json.loads((folder / "reference.json").read_text())
            content = change(content) or content
            (folder / "reference.json").write_text(json.dumps(content))
        for file, tensors in (files or {}).items():
            if callable(tensors):
                tensors = tensors(getattr(Run(str(base)), file).all())
            write_tensors(folder / f"{file}.safetensors", tensors, dtype)
        return folder

    def compared(self, base, change=None, files=None, tolerance=None, dtype="F64", swapped=False):
        pair = [str(self.altered(base, change, files, dtype)), str(base)]
        return comparison.Comparison(*(pair[::-1] if swapped else pair), tolerance)


def agrees(c):
    return not c.differences()


def slice_of(name):
    wanted = os.environ.get("TRAIN70B_TEST_SLICE", "all")
    return (
        wanted in ("all", "")
        or not wanted.isdigit()
        or int(hashlib.sha1(name.encode()).hexdigest(), 16) % 8 == int(wanted)
    )
