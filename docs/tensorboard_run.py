#!/usr/bin/env python3
"""Every number of a run's --metrics, by step, for TensorBoard (pip install tensorboard).

    python3 docs/tensorboard_run.py LOGS run.jsonl other.jsonl        LOGS/run, LOGS/other
    tensorboard --logdir LOGS

Names: loss, grad_norm, lr, memory/peak/total, comm_bytes/dp.all_reduce, ...; eval/loss of evaluations. A loss or norm
that is not finite is NaN; what a run does not know (null) is left out. Bad input: one line, exit code 2.
"""
import math
import os
import sys

from plot_run import events, names_of
from usage import Parser, UsageError, check, ends_with_one_line

FINITE = ("loss", "grad_norm", "param_norm")  # null: not finite


def scalars(value, name=""):
    """[(name, number)] of an event."""
    if isinstance(value, dict):
        return [each for key in value for each in scalars(value[key], f"{name}/{key}" if name else key)]
    if value is None and name.split("/")[-1] in FINITE:
        return [(name, math.nan)]
    return [(name, float(value))] if isinstance(value, (int, float)) else []


def main():
    parser = Parser(__doc__)
    parser.add_argument("logs", metavar="LOGS")
    parser.add_argument("files", metavar="metrics.jsonl", nargs="+")
    options = parser.parse_args()
    runs = {os.path.join(options.logs, os.path.splitext(name)[0]): events(path)
            for path, name in zip(options.files, names_of(options.files))}
    check(len(runs) == len(options.files), "metrics.jsonl", "two files have one name")
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise UsageError(f"needs tensorboard: {sys.executable} -m pip install tensorboard") from None
    for folder in runs:
        check(not os.path.exists(folder), folder, "is already there (name other LOGS: TensorBoard shows both)")
    for folder, found in runs.items():
        writer = Writer(folder)
        for kind, of_steps in found.items():
            for step, event in sorted(of_steps.items()):
                for name, number in scalars({key: event[key] for key in event if key != "step"}):
                    writer.add_scalar(name if kind == "step" else f"{kind}/{name}", number, step)
        writer.close()
        print(folder)


if __name__ == "__main__":
    ends_with_one_line(main)
