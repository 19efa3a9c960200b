#!/usr/bin/env python3
"""Writes the tables of docs/configurations.md, or compares them with what the planner says now.

    python3 docs/configurations.py [CASE ...] [--bin build/bin] [--write]

CASE: 7b-8, 70b-64, ...; default: all. Without --write the exit code is 1 and the first difference is printed if a line
of the document differs: words exactly, numbers by more than 1%. What stands between `<!-- plan: NAME -->` and
`<!-- end of plan -->` is written by this script; the rest of the document by hand.
"""
import argparse
import json
import pathlib
import re
import sys
import tempfile
import textwrap

import programs
import tables

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/configurations.md"
TOLERANCE = 0.01
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
BEGIN, END = r"<!-- plan: (\S+) -->", "<!-- end of plan -->"
KINDS = ["params", "grads", "optimizer", "activations", "comm", "workspace", "total"]
COMMENT = "<!-- not measured: predicted; written by docs/configurations.py, compared by tests/test_plan.py -->"


def plan(folder, name):
    """The program's report, as JSON."""
    with tempfile.TemporaryDirectory() as work:
        path = pathlib.Path(work, "plan.json")
        programs.output([folder / "plan", *CASES[name].split(), "--json", path], cwd=ROOT)
        return json.loads(path.read_text())


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
    lines += ["", "<!-- template: the hosts, the data and the number of steps are the reader's -->",
              *wrapped(command, "    "), ""]
    lines += [f"Predicted by {best['predicted_by']}: {best['tokens_per_s_per_gpu']:.0f} tokens/s per GPU, MFU "
              f"{100 * best['mfu']:.1f}%, pp wait {100 * best['pp_wait']:.1f}%, a step of {best['step_s']:.1f} s."]
    return lines


def blocks(reports):
    """What the script writes: name of the block: its lines; a table's rows stand for one case each."""
    def rows(make):
        return [make(name, report) for name, report in reports.items()]

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
    made = {
        "layouts": (layout, ["model-GPUs", "layout", "micro-batch", "recompute", "sequence parallel", "tokens/s/GPU", "MFU",
                             "GB"]),
        "memory": (memory, ["GB of the largest rank", *KINDS]),
        "budget": (budget, ["model-GPUs", "tokens per day", "20 per parameter", *days, "the budget", *days,
                            "checkpoint, GB"])}
    found = {name: [COMMENT, *tables.markdown(head, rows(make))] for name, (make, head) in made.items()}
    return found | {name: section(name, report) for name, report in reports.items()}


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")


def differ(a, b):
    """Whether two lines differ in words, or in numbers by more than the tolerance."""
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return True
    pairs = zip(NUMBER.findall(a), NUMBER.findall(b))
    return any(not abs(float(x) - float(y)) <= TOLERANCE * max(abs(float(x)), abs(float(y))) + 0.11 for x, y in pairs)


def compare(name, old, new, reports):
    """The first difference of a block, or None. Of a table: rows of the cases that were planned."""
    if name not in CASES:
        old, new = ([line for line in lines if line.startswith("|") and line[2:].split(" |")[0] in reports]
                    for lines in (old, new))
    for a, b in zip(old, new):
        if differ(a, b):
            return f"{DOCUMENT.name}, {name}:\n- {a}\n+ {b}"
    return None if len(old) == len(new) else f"{DOCUMENT.name}, {name}: {len(old)} lines, not {len(new)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--bin", default="build/bin", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(CASES)}")
    if arguments.write and arguments.cases:
        parser.error("--write: writes all cases (leave out their names)")
    folder = arguments.bin.resolve()
    if not (folder / "plan").exists():
        parser.error(f"--bin {arguments.bin}: has no program `plan`")
    reports = {name: plan(folder, name) for name in arguments.cases or CASES}
    new, text = blocks(reports), DOCUMENT.read_text()
    found = {name: text[begin:end] for name, (begin, end) in tables.parts(text, BEGIN, END).items()}
    if missing := sorted(new.keys() - found.keys()):
        sys.exit(f"{DOCUMENT.name}: has no block {missing[0]}")
    if arguments.write:
        lines = {name: "".join(f"{line}\n" for line in each) for name, each in new.items()}
        DOCUMENT.write_text(tables.with_parts(text, BEGIN, END, lines))
        return
    for name in new:
        if difference := compare(name, found[name].splitlines(), new[name], reports):
            sys.exit(difference)
    print(f"{len(reports)} of {len(CASES)} configurations are those of docs/configurations.md")


if __name__ == "__main__":
    main()
