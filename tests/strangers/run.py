#!/usr/bin/env python3
"""Plants every fault of plants.py in trainer.py and asks compare --diagnose. Needs torch >= 2.6 and safetensors.

Run:   python3 tests/strangers/run.py build/bin [--csv FILE] [PLANT ...]
Each plant twice: 4 layers x 32 in fp32 on 2 ranks, 3 layers x 48 in fp64 on 4. Detected: exit code 1. Phase: the first
of forward, backward, update, later steps that compare calls wrong. Place: the words that plants.py expects. Name: the
fault, among those that explain all numbers to rounding; any other name is a wrong one, and fails.
"""

import argparse
import concurrent.futures
import csv
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
COMPARE = HERE.parents[1] / "docs/compare.py"
try:
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise ImportError
    import safetensors  # noqa: F401
except ImportError:
    print("skipped: no torch >= 2.6 with safetensors: plants in foreign code were not tried")
    sys.exit(0)
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "docs")]
import plants  # noqa: E402
from references import masked_text  # noqa: E402

SIZES = {
    "small": "--layers 4 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 32 --global-batch 8 --dtype fp32",
    "wide": "--layers 3 --hidden 48 --heads 8 --kv-heads 4 --ffn 80 --seq-len 24 --global-batch 16 --dtype fp64",
}
COMMON = "--steps 4 --init-std 0.1 --clip 0.5 --eps 1e-5".split()


def references(binaries, work):
    """REFERENCE folders: SIZE and SIZE-masked, SIZE-tied."""
    masked_text(work, b" ".join(b"%d and %d" % (i * i % 97, i % 13) for i in range(8000)))
    for size, flags in SIZES.items():
        for kind, more in (
            ("", []),
            ("-masked", ["--data", str(work / "text.bin"), "--val-fraction", "0"]),
            ("-tied", ["--tied-embeddings", "on"]),
        ):
            command = [str(binaries / "01_single_gpu"), *flags.split(), *COMMON, *more]
            command += ["--save-reference", str(work / (size + kind))]
            done = subprocess.run(command, capture_output=True, text=True, cwd=work)
            if done.returncode:
                sys.exit(done.stderr)


def layout(name, ranks):
    kind = plants.PLANTS[name]
    for axis in ("tp", "cp", "dp"):
        if name.startswith(axis + "_"):
            return [f"--{axis}", str(ranks)]
    if name == "last_micro_batch":
        return ["--micro", str(8 // ranks)]
    return ["--dp", str(ranks)] if issubclass(kind, plants.Masks) else []


def judge(name, size, text, code):
    phase, place, named = plants.EXPECTED[name]
    names = re.findall(r"explains A's numbers to rounding: (.*)", text)
    wrong = {
        "forward": "forward: wrong" in text,
        "backward": "backward: " in text,
        "update": "update: wrong" in text,
        "later": "first wrong" in text and "step" in text,
    }
    found = next((each for each, is_wrong in wrong.items() if is_wrong), "agree")
    rests = re.search(r"1 is the bound: ([\d.e+-]+|inf) \(.*?\)(?:; (?:others from )?([\d.e+-]+|inf))?", text)
    right_name = any(named and named in each for each in names)
    return {
        "plant": name,
        "size": size,
        "detected": code == (0 if phase == "agree" else 1),
        "phase": found,
        "phase_right": found == phase or (phase == "forward" and "first gradient on, or before it" in text),
        "place_right": not place or place in text,
        "named": right_name,
        "expects_name": bool(named),
        "wrong_name": bool(names) and not right_name,
        "best": rests[1] if rests else "",
        "second": (rests[2] or "") if rests else "",
    }


def python(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)


def one(name, size, ranks, work, port):
    kind = plants.PLANTS[name]
    reference = work / (size + ("-masked" if issubclass(kind, plants.Masks) else "-tied" if "tied" in name else ""))
    out = work / f"out-{name}-{size}"
    words = [str(HERE / "trainer.py"), str(reference), str(out), "--plant", name, "--port", str(port)]
    done = python(*words, *layout(name, ranks))
    if done.returncode:
        return {"plant": name, "size": size}, done.stderr[-2000:]
    compared = python(str(COMPARE), str(out), str(reference), "--diagnose")
    return judge(name, size, compared.stdout, compared.returncode), compared.stdout + compared.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--csv")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp())
    references(args.binaries.resolve(), work)
    jobs = [(name, size, ranks) for size, ranks in (("small", 2), ("wide", 4)) for name in args.names or plants.PLANTS]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: one(*job[1], work, 29600 + job[0]), enumerate(jobs)))
    failed, rows = 0, []
    for row, text in results:
        ok = (
            all(row.get(key) for key in ("detected", "phase_right", "place_right"))
            and not row["wrong_name"]
            and (row["named"] or not row["expects_name"])
        )
        failed += not ok
        rows.append(row)
        print(
            f"{'ok  ' if ok else 'FAIL'} {row['plant']} ({row['size']}): "
            + ", ".join(f"{key} {value}" for key, value in list(row.items())[2:])
        )
        if not ok or args.show:
            print(
                "    "
                + "\n    ".join(text[text.find("the runs") :].splitlines() if "the runs" in text else text.splitlines())
            )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(max(rows, key=len)), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    faults = [row for row in rows if plants.EXPECTED[row["plant"]][0] != "agree" and "detected" in row]
    print(
        f"{len(faults)} faults: detected {sum(r['detected'] for r in faults)}, phase "
        f"{sum(r['phase_right'] for r in faults)}, place {sum(r['place_right'] for r in faults)}, named "
        f"{sum(r['named'] for r in faults)}; wrong names {sum(r['wrong_name'] for r in rows if 'wrong_name' in r)}"
    )
    shutil.rmtree(work)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
