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
    words += [f"dp {best['dp']}", f"ZeRO-{best['zero']}{groups}"]
    if best["pp"] > 1:
        chunks = f" x {best['virtual_stages']}" if best["pipeline"] == "interleaved" else ""
        words.append(best["pipeline"] + chunks)
    return " · ".join(words)


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
    lines += ["", *wrapped(command, "    "), ""]
    lines += [f"Predicted by {best['predicted_by']}: {best['tokens_per_s_per_gpu']:.0f} tokens/s per GPU, MFU "
              f"{100 * best['mfu']:.1f}%, pp wait {100 * best['pp_wait']:.1f}%, a step of {best['step_s']:.1f} s."]
    return lines


def all_tables(reports):
    """A row for each case."""
    def layout(name, report):
        best = report["best"][0]
        sequence = ("on, overlap" if best["tp_overlap"] else "on") if best["sequence_parallel"] else "off"
        return [name, chosen(report), best["micro_batch"], best["recompute"], sequence,
                f"{best['tokens_per_s_per_gpu']:.0f}", f"{100 * best['mfu']:.1f}%", gigabytes(best["memory"]["total"])]

    def memory(name, report):
        return [name] + [gigabytes(report["best"][0]["memory"][kind]) for kind in KINDS]

    def budget(name, report):
        days = report["budget"]
        cells = [name, human(days["tokens_per_day"])]
        for run in ("chinchilla", "tokens"):
            cells += [human(days[run]["tokens"]), f"{days[run]['days']:.1f}", human(days[run]["gpu_hours"]),
                      human(days[run]["price"])]
        return cells + [gigabytes(days["checkpoint_bytes"])]

    days = ["days", "GPU-hours", "dollars"]
    for make, head in (
            (layout, ["model-GPUs", "layout", "micro-batch", "recompute", "sequence parallel", "tokens/s/GPU", "MFU",
                      "GB"]),
            (memory, ["GB of the largest rank", *KINDS]),
            (budget, ["model-GPUs", "tokens per day", "20 per parameter", *days, "the budget", *days,
                      "checkpoint, GB"])):
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
