#!/usr/bin/env python3
"""Prints the tables and sections of docs/configurations.md: what the planner says of each case.

    python3 docs/configurations.py [CASE ...] [--bin build/bin]

CASE: 7b-8, 70b-64, ...: its section; without any, the tables of all cases, in minutes.
"""
import argparse
import json
import pathlib
import re
import tempfile
import textwrap

import programs
import tables

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Name: the flags of build/bin/plan. Batches: 4M tokens (Llama 1 and 2), 3.2M (GPT-3), 16M (Llama 3). --model 70b is
# Llama 3's shape; 70b-64 trains it with Llama 2's batch and length.
CASES = {
    "7b-8": "--model 7b --gpus 8 --cluster h100-8.json --seq-len 4096 --global-batch 1024",
    "13b-8": "--model 13b --gpus 8 --cluster h100-8.json --seq-len 4096 --global-batch 1024",
    "30b-16": "--model 30b --gpus 16 --cluster h100-8x8.json --seq-len 2048 --global-batch 2048",
    "70b-64": "--model 70b --gpus 64 --cluster h100-8x8.json --seq-len 4096 --global-batch 1024",
    "175b-256": "--model 175b --gpus 256 --cluster h100-32x8.json --seq-len 2048 --global-batch 1536",
    "175b-512": "--model 175b --gpus 512 --cluster h100-64x8.json --seq-len 2048 --global-batch 1536",
    "405b-16384": "--model 405b --gpus 16384 --cluster h100-16384.json --seq-len 8192 --global-batch 2048",
    "8b-128-1m": "--model 8b --gpus 128 --cluster h100-32x8.json --seq-len 1048576 --global-batch 16"
                 " --simulations 6",  # the planner's default takes minutes
    "mixtral-64": "--model mixtral-8x7b --gpus 64 --cluster h100-8x8.json --seq-len 4096 --global-batch 1024",
}
KINDS = ["params", "grads", "optimizer", "activations", "comm", "workspace", "total"]


def plan(folder, name):
    """The program's report, as JSON."""
    with tempfile.TemporaryDirectory() as work:
        path = pathlib.Path(work, "plan.json")
        programs.output([folder / "plan", *CASES[name].split(), "--json", path], cwd=ROOT)
        return json.loads(path.read_text("utf-8"))


def human(number):
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"


def gigabytes(number):
    return f"{number / 1e9:.2f}" if number < 9.95e9 else f"{number / 1e9:.1f}"


def chosen(report):
    best = report["best"][0]
    words = [f"tp {best['tp']}"] + [f"{axis} {best[axis]}" for axis in ("cp", "pp") if best[axis] > 1]
    groups = f" in groups of {best['hybrid_shard']}" if best["hybrid_shard"] else ""
    words += [f"dp {best['dp']}"] + [f"ep {ep}" for ep in [best.get("ep", 1)] if ep > 1]
    words += [f"ZeRO-{best['zero']}{groups}"]
    if best["pp"] > 1:
        chunks = f" x{best['virtual_stages']}" if best["pipeline"] == "interleaved" else ""
        words.append(best["pipeline"] + chunks)
    return ", ".join(words)


def wrapped(text, indent, width=110):
    lines = textwrap.wrap(text, width - len(" \\"), initial_indent=indent, subsequent_indent=indent + "    ",
                          break_long_words=False, break_on_hyphens=False)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def section(name, report):
    """A case: what was asked, the decision steps, the command."""
    best = report["best"][0]
    lines = [*wrapped(f"build/bin/plan {CASES[name]}", "    "), ""]
    lines += [f"{number}. {step}" for number, step in enumerate(report["steps"], 1)]
    command = best["dry_run"].replace("build/bin/08_3d_full", f"mpirun -np {report['gpus']} build/bin/08_3d_full")
    command = re.sub(r" --comm fake --fake-world \d+ --dry-run$", "", command)
    # The world of the file's hosts: a reader adds --hostfile, --data, --steps and the checkpoint's folder.
    return lines + ["", *wrapped(command, "    ")]


def alternatives(name, report):
    """What the decision steps say of layouts that were not chosen: their step over the chosen one's, and why."""
    text = " ".join(report["steps"])

    def said(pattern):
        found = re.search(pattern, text)
        return ": ".join(found.groups()).replace(" x", "×") if found else "-"

    why = r" the chosen step \(([^)]*)\)"
    patterns = [r"= (\S+) GB of states", r"(ZeRO-\d) over \d+ devices holds (\S+ GB)", rf"takes (\S+ x){why}",
                rf"tp 1: (\S+ x){why}", rf"over nodes: (\S+ x){why}",
                rf"(?:without a pipeline|best with one): ((?:pp \d+, )?\S+ x){why}", rf"(cp \d+[,:] \S+ x){why}",
                r"bubble (\S+%) by", r"attention is (\S+) of"]
    cells = [said(pattern) for pattern in patterns]
    return [name] + ["the same" if at > 2 and cell == cells[2] != "-" else cell for at, cell in enumerate(cells)]


def all_tables(reports):
    """A row for each case."""
    def layout(name, report):
        best = report["best"][0]
        sequence = ("on, overlap" if best["tp_overlap"] else "on") if best["sequence_parallel"] else "off"
        return [name, chosen(report), best["micro_batch"], best["recompute"], sequence, f"{best['step_s']:.1f}",
                f"{best['tokens_per_s_per_gpu']:.0f}", f"{100 * best['mfu']:.1f}%", f"{100 * best['pp_wait']:.1f}%"]

    def memory(name, report):
        return [name] + [gigabytes(report["best"][0]["memory"][kind]) for kind in KINDS]

    def budget(name, report):
        days = report["budget"]
        cells = [name, human(days["tokens_per_day"]), human(days["chinchilla"]["tokens"])]
        for run in ("chinchilla", "tokens"):
            cells += [f"{days[run]['days']:.1f}", human(days[run]["gpu_hours"]), human(days[run]["price"])]
        return cells + [gigabytes(days["checkpoint_bytes"])]

    days = ["days", "GPU-hours", "dollars"]
    tokens = human(next(iter(reports.values()))["budget"]["tokens"]["tokens"])
    for make, head in (
            (layout, ["model-GPUs", "layout", "micro-batch", "recompute", "sequence parallel", "step, s",
                      "tokens/s/GPU", "MFU", "pp wait"]),
            (memory, ["GB of the largest rank", *KINDS]),
            (alternatives, ["model-GPUs", "states, GB", "ZeRO alone", "its step", "tp 1", "tp 16", "other pp",
                            "other cp", "bubble", "attention"]),
            (budget, ["model-GPUs", "tokens per day", "20 per parameter", *days,
                      *(f"{tokens}: {each}" for each in days), "checkpoint, GB"])):
        yield from [*tables.markdown(head, [make(name, report) for name, report in reports.items()]), ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of: " + ", ".join(CASES))
    parser.add_argument("--bin", default="build/bin", type=pathlib.Path)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(CASES)}")
    reports = {name: plan(arguments.bin.resolve(), name) for name in arguments.cases or CASES}
    lines = [line for name in arguments.cases for line in section(name, reports[name])] or all_tables(reports)
    print("\n".join(lines))


if __name__ == "__main__":
    programs.start(main)
