#!/usr/bin/env python3
"""Compares two reference runs (docs/reference-format.md): every gradient of step 1, the weights after it, the losses
and gradient norms of the first steps. Losses alone may agree although gradients are scaled wrongly, because AdamW is
invariant to their scale. build/bin/compare is this program.

Run:   build/bin/01_single_gpu --steps 4 --save-reference a
       build/bin/01_single_gpu --steps 4 --micro-batch 4 --save-reference b
       python3 docs/compare.py a b
Watch: only the order of sums differs: deviations of about 1e-7. Exit code 0 if within the tolerance, 1 if not, 2 if a
folder is no reference run. --diagnose says which known fault, if any, explains the numbers of a run that differs.
"""

import argparse
import os
import re
import sys

sys.dont_write_bytecode = True
from validate import comparison, facts, runs  # noqa: E402  first: it finds the Python that has NumPy
import numpy  # noqa: E402

HELP = """Compare two reference runs, which --save-reference or docs/torch_reference.py wrote
Usage: compare [OPTIONS] A B

Positionals:
  A DIR                           folder of the run to check
  B DIR                           folder of the reference run

Options:
  -h,--help                       print this help and exit
  --version                       print the commit of the build and exit
  --tolerance NUMBER              maximum relative deviation [default: by dtype: fp64 1e-10, fp32 5e-6, bf16 rounding]
  --diagnose                      which known fault explains the numbers exactly, if one does
"""


class Arguments(argparse.ArgumentParser):
    def format_help(self):
        return HELP

    def error(self, message):
        raise runs.UsageError(f"{shown_value(message.removeprefix('argument '))} (--help lists all flags)")


class Once(argparse.Action):
    def __call__(self, parser, namespace, value, flag=None):
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "given twice")
        setattr(namespace, self.dest, value if self.nargs is None else True)


def tolerance(text):
    if not re.fullmatch(r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text) or not float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{shown_value(text)} must be a number >= 0 and <= 1")
    return float(text)


def folder(text):
    if text in ("", "--"):
        raise argparse.ArgumentTypeError("must name a folder")
    return text


def parse(words):
    parser = Arguments(allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"compare: commit {commit()}")
    parser.add_argument("--tolerance", action=Once, type=tolerance)
    parser.add_argument("--diagnose", action=Once, nargs=0)
    for name in "AB":
        parser.add_argument(name, type=folder)
    return parser.parse_args(words)


def commit():
    """Of the build that this was started from, as build/bin/compare or installed; otherwise unknown."""
    start = os.path.dirname(os.path.abspath(sys.argv[0]))
    for path in (os.path.join(start, "..", part, "version.cpp") for part in ("", "share/train70b")):
        if os.path.isfile(path) and (found := re.search(r'return "(\w[^"]*)"', open(path, encoding="utf-8").read())):
            return found[1]
    return "unknown"


def shown_value(value):
    value = runs.shown(value) if value else '""'
    return value if len(value) < 200 else value[:200] + "..."


def table(c):
    """Everything that is compared, and the verdict."""
    same = "equal" if c.same_targets else "equal, but the targets differ"
    rows = [("tokens", f"{same if c.same_tokens else 'differ'} ({c.samples} samples in {c.steps} steps)")]
    rows += [("contradiction", each) for each in c.contradictions] + [("not checked", each) for each in c.not_checked]
    for what, deviations in (
        ("initial weights", c.weights),
        ("weights after step 1" if c.check_updates else "weights after it, not checked", c.updates),
        ("routers' biases, step 1", c.biases),
        ("weights after step 2", c.updates_2),
        (f"losses, steps 1 to {len(c.losses)}", c.losses),
        ("gradient norms", c.norms),
        ("later losses, not checked", c.later_losses),
        ("later norms, not checked", c.later_norms),
    ):
        for d in deviations[:1]:
            rows.append((what, "equal" if d.relative == 0 else f"worst {d.relative:.3g}, {d.name}"))
    lines = c.problems + [f"{what:<25} {text}" for what, text in rows]
    shown = c.gradients[:5]
    lines += ["", f"gradients at step 1, the worst {len(shown)} of {len(c.gradients)} parameters"]
    if c.exact:
        lines.append(f"{'to the exact':>14}{'bound':>14}   parameter")
        lines += [f"{d.relative:>14.3g}{d.bound:>14.3g}   {d.name}" for d in shown]
    else:
        lines.append(f"{'|a-b| / |b|':>14}{'|b|':>14}   parameter")
        lines += [f"{d.relative:>14.3g}{d.size:>14.6g}   {d.name}" for d in shown]
    differences = c.differences()
    if differences:
        lines += ["", "the runs DIFFER:"] + ["  " + each for each in differences]
        lines += ["in the order of computation:"] + ["  " + each for each in facts.facts(c)]
        return "\n".join(lines) + "\n"
    within = f"{c.tolerance:g}" if not c.exact else "bf16's rounding"
    of = max(len(c.a.steps), len(c.b.steps))
    verdict = f"the runs agree within {within}" + (f" in the first {c.steps} of {of} steps" if c.steps < of else "")
    kinds = ("gradient", c.gradients), ("loss", c.losses), ("gradient norm", c.norms)
    worst = [(each[0].relative, f"{kind} {each[0].name}") for kind, each in kinds if each]
    if worst:
        largest = max(worst, key=lambda each: each[0])
        verdict += f"; largest deviation: {largest[1]} by {largest[0]:.3g}"
    return "\n".join(lines + ["", verdict]) + "\n"


def main(words):
    try:
        if sys.stdout:
            sys.stdout.reconfigure(errors="backslashreplace")
        asked = parse(words)
        with numpy.errstate(all="ignore"):
            c = comparison.Comparison(asked.A, asked.B, asked.tolerance)
            text = table(c)
            if asked.diagnose and c.differences():
                from validate import doctor

                text += doctor.report(c)
        if sys.stdout:
            sys.stdout.write(text)
            sys.stdout.flush()
        return 1 if c.differences() else 0
    except runs.UsageError as error:
        if sys.stderr:
            print(f"compare: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"compare: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        sys.stdout = None
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
