"""What tests/validate.py and validate_doctor.py share: runs that are made, altered and compared."""

import hashlib
import json
import os
import pathlib
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # small matrices
sys.path[:0] = [str(ROOT / "docs")]
from validate import comparison  # noqa: E402  before NumPy: finds a Python that has it
from validate.runs import Run, write_safetensors  # noqa: E402
import numpy as np  # noqa: E402
import references  # noqa: E402

np.seterr(all="ignore")
FAILED = []


def check(ok, what):
    if not ok:
        FAILED.append(what)
        print(f"FAIL {what}")


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
            write_safetensors(folder / f"{file}.safetensors", tensors, dtype)
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
