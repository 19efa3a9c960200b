#!/usr/bin/env python3
"""The conformance board: runs the cells of cells.json and writes docs/results/conformance.csv and the table of
docs/conformance.md. docs/conformance/run.sh calls it in the environment that it makes.

Run:   python3 docs/conformance/board.py --out out/conformance [--only picotron] [--again] [--reference docs/references/gqa]
       python3 docs/conformance/board.py --write         # from the cells that have run: conformance.csv and conformance.md
       python3 docs/conformance/board.py --check         # that the page is what the CSV gives; all that the board promises
Watch: one line per cell. A cell that has run is not run again, so that the command can be repeated after an end.
"""
import argparse
import csv
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COLUMNS = ("framework", "version", "layout", "ranks", "reference", "worst gradient", "verdict", "cause", "patch", "patched",
           "thread", "seconds")
VERDICTS = ("agrees", "differs", "stops", "hangs", "not run")
BEGIN, END = "<!-- board: written by board.py --write -->", "<!-- end of board -->"
PATCH_LINES = 5


def cells():
    return json.loads((HERE / "cells.json").read_text())


def versions():
    """{framework: version or commit}, as run.sh installs them."""
    lines = [line.split("#")[0].strip() for line in (HERE / "requirements.txt").read_text().split("\n")]
    pinned = dict(line.split("==") for line in lines if line)
    return {**pinned, **json.loads((HERE / "commits.json").read_text())}


# ---- running
def overlay(out, patch):
    """A folder that holds a package with the patch, for PYTHONPATH. Each line of the patch is `sed -i EXPRESSION FILE`."""
    folder = out / "patched" / re.sub(r"\W+", "-", json.dumps(patch))[:120]
    for expression, file in patch:
        package, target = file.split("/")[0], folder / file
        if not (folder / package).exists():
            source = find(package)
            if source.is_dir():
                shutil.copytree(source, folder / package, symlinks=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder / package)
        if not (target.parent / (target.name + ".before")).exists():
            shutil.copy(target, target.parent / (target.name + ".before"))
        before = target.read_text()
        subprocess.run(["sed", "-i", "-E", expression, str(target)], check=True)
        if target.read_text() == before and str(folder) not in DONE:
            raise SystemExit(f"{file}: sed '{expression}' changes nothing")
    DONE.add(str(folder))
    return folder


DONE = set()


def find(package):
    for folder in [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]:
        if folder and (pathlib.Path(folder) / package).exists():
            return pathlib.Path(folder) / package
    raise SystemExit(f"{package}: is not installed here")


def launch(cell, reference, folder, log, patch=None):
    """(seconds, exit code or None if it did not end in time)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
                   "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", **cell.get("environment", {})}
    if patch:
        paths = [str(overlay(folder.parent, patch)), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell["ranks"]),
             str(HERE / cell["script"]), str(reference), str(folder), *cell.get("options", "").split()]
    begin = time.time()
    with open(log, "w") as file:
        run = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            return time.time() - begin, run.wait(cell.get("minutes", 4) * 60)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return time.time() - begin, None


def compare(folder, reference):
    """(verdict, worst gradient, cause)."""
    run = subprocess.run([sys.executable, str(ROOT / "docs/compare.py"), str(folder), str(reference), "--diagnose"],
                         capture_output=True, text=True)
    (folder.parent / f"{folder.name}.compare").write_text(run.stdout + run.stderr)
    if run.returncode == 2:
        return "stops", "", run.stderr.strip()
    gradients = re.search(r"gradients at step 1.*\n.*\n +(\S+)", run.stdout)
    named = re.findall(r"^  (?:named|diagnosis|it is): (.*)$", run.stdout, re.M)
    return ("differs" if run.returncode else "agrees"), gradients[1], "; ".join(named)


def where_it_stopped(log):
    """The innermost line of the first traceback, and its message."""
    text = log.read_text(errors="replace")
    text = re.sub(r"^\[(?:rank|default)\d+\]:? ?", "", text, flags=re.M)
    frames = re.findall(r'^ *File "([^"]+)", line (\d+)', text.split("\ntorch.distributed.elastic")[0], re.M)
    errors = re.findall(r"^((?:[\w.]+)(?:Error|Exception|NotImplemented\w*)\b.*)$", text, re.M)
    first = text.find("Traceback")
    block = re.search(r'Traceback.*?\n(?=\S)(?:(?!Traceback)\S.*)', text[first:], re.S) if first >= 0 else None
    if block:
        frames = re.findall(r'^ *File "([^"]+)", line (\d+)', block[0], re.M)
        errors = [block[0].strip().split("\n")[-1]]
    file = re.sub(r".*/(?:site-packages|conformance|clones/[^/]+)/", "", frames[-1][0]) if frames else ""
    return (f"{file}:{frames[-1][1]}: " if frames else "") + (errors[0] if errors else text.strip()[-200:])


def run(cell, out, reference):
    name = re.sub(r"[^\w.]+", "-", f"{cell['framework']} {cell['layout']} {reference.name}").strip("-")
    result = out / f"{name}.json"
    if result.exists():
        return json.loads(result.read_text())
    row = {"verdict": {}}
    for which, patch in [("as it is", None), *([("patched", cell["patch"])] if cell.get("patch") else [])]:
        folder, log = out / (name + "-patched" * bool(patch)), out / (name + "-patched" * bool(patch) + ".log")
        shutil.rmtree(folder, ignore_errors=True)
        begin = time.time()
        seconds, code = launch(cell, reference, folder, log, patch)
        if code is None:
            verdict = "hangs", "", f"nothing within {cell.get('minutes', 4)} minutes"
        elif code:
            verdict = "stops", "", where_it_stopped(log)
        else:
            verdict = compare(folder, reference)
        row[which] = {"verdict": verdict[0], "gradient": verdict[1], "cause": verdict[2], "seconds": round(time.time() - begin)}
        print(f"{cell['framework']:<14}{cell['layout']:<44}{which:<10}{verdict[0]:<9}{verdict[1]:<10}{verdict[2][:150]}", flush=True)
    row["reference"] = reference.name
    result.write_text(json.dumps(row, indent=1))
    return row
