"""The tables of docs/silent-bugs.md: what was wrong in each thread, and the cells of docs/results/silent_bugs.csv."""

import pathlib
import re

import bugs
import checks
import tables

BEGIN, END = "<!-- silent_bugs: (.*) -->", "<!-- end -->"
PAGE = pathlib.Path(__file__).resolve().parents[1] / "silent-bugs.md"
CHECKS = {"curve": "loss curve", "digits": "loss by digits", "norm": "gradient norm", "weights": "weights after a step",
          "gradients": "step-1 gradients", "fp64": "all of it in fp64", "replicas": "replica check",
          "calls": "call checking"}


def cell(row, check):
    """As the page shows it; in bold where the check sees the bug."""
    seen, value = checks.sees(row)[check], row[check]
    text = {"curve": f"step {value}", "digits": f"step {value}", "replicas": f"after step {value}", "calls": "yes",
            "norm": f"step {value}" + (f", × {float(row['norm_ratio']):.3g}" if value == "1" else ""),
            "weights": value, "gradients": value, "fp64": value.replace("lr", "learning rate")}[check]
    if seen:
        return f"**{text}**"
    return "none" if value == "none" else "no"


def cells_table(rows):
    lines = []
    for row in rows:
        flags = re.sub(r"--data \.\./text\.bin --val-fraction 0", "masked targets", row["flags"])
        flags = f"`{flags}`" if "masked" not in flags else flags
        flags = flags if row["flags"] else "one rank"
        lines.append([f"`{row['bug']}`", flags, *(cell(row, check) for check in CHECKS)])
    seen = [sum(checks.sees(row)[check] for row in rows) for check in CHECKS]
    head = ["patch", "flags", *CHECKS.values()]
    return "\n".join([*tables.markdown(head, lines, "-" * len(head)),
                      f"| **seen, of {len(rows)}** | | " + " | ".join(map(str, seen)) + " |"])


def counted(rows, controls):
    seen = {check: sum(checks.sees(row)[check] for row in rows) for check in CHECKS}
    at_end = sum(checks.beyond(float(row["gap"]), 0, float(row["spread"])) for row in rows)
    unseen = [f"`{row['bug']}`" for row in rows if not any(checks.sees(row)[check] for check in
                                                         ("norm", "weights", "gradients", "fp64", "replicas", "calls"))]
    spreads = [float(row["spread"]) for row in controls]
    gaps = [abs(float(row["gap"])) for row in controls]
    with_copies = sum(row["replicas"] != "none" for row in rows)
    return (
        f"**The loss curve sees {seen['curve']} of {len(rows)} within {checks.SHAPE['steps']} steps**, and {at_end} of "
        f"them still at the end. Beside a right run of the same samples, the gradient norm sees {seen['norm']} in the "
        f"first {checks.EARLY} steps, the losses' digits {seen['digits']}, the gradients of step 1 see "
        f"{seen['gradients']}, the weights after it {seen['weights']}, the comparison in fp64 {seen['fp64']}, the "
        f"replica check {seen['replicas']} of the {with_copies} whose layout has replicas, call checking "
        f"{seen['calls']}. {', '.join(unseen) or 'None'} is seen by the losses only. The right program, in the "
        f"{len(controls)} layouts: every cell is *no*; its curves end within {max(gaps):.1g} of one rank's, where "
        f"seeds differ by {min(spreads):.2f} to {max(spreads):.2f}."
    )


def links(threads):
    return ", ".join(f"[{text}](https://github.com/{path})" for text, path in threads)


def catalogue(list_of):
    rows = [[number, links(threads), words, how] for number, threads, words, how in list_of]
    return "\n".join(tables.markdown(["", "thread", "what was wrong", ""], rows, ":---"))


def numbered():
    run, others, number = [], [], 0
    for threads, words, name in bugs.THREADS:
        number += 1
        (run if name else others).append((number, threads, words, f"`{name}`" if name else "*not run*"))
    return run, others


def parts(rows):
    """{name of a part of the page: its text}."""
    of_bugs = {row["bug"]: row for row in rows if row["bug"] != "right"}
    in_order = [of_bugs[bug.name] for bug in bugs.RUN if bug.name in of_bugs]
    run, others = numbered()
    return {"count": counted(in_order, [row for row in rows if row["bug"] == "right"]), "cells": cells_table(in_order),
            "run": catalogue(run), "others": catalogue(others)}


def differs(page, rows, write):
    """Lines that say which part is not as the CSV and bugs.py have it; none after `write`."""
    text, lines = page.read_text(encoding="utf-8"), []
    places, new = tables.parts(text, BEGIN, END), {name: f"{wanted}\n" for name, wanted in parts(rows).items()}
    for name, wanted in new.items():
        found = text[slice(*places[name])] if name in places else None
        if found is None:
            lines.append(f"{page.name}: has no part {name}")
        elif found != wanted:
            was, now = found.split("\n"), wanted.split("\n")
            at = next((i for i, pair in enumerate(zip(was, now)) if pair[0] != pair[1]), min(len(was), len(now)))
            lines.append(f"{page.name}, {name}: line {at + 1} is not that of the CSV: {(was + [''])[at][:150]}")
    if write:
        page.write_text(tables.with_parts(text, BEGIN, END, new), encoding="utf-8")
        return [line for line in lines if "has no part" in line]
    return lines
