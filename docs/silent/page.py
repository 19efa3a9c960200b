"""The tables of docs/silent-bugs.md: what was wrong in each thread, and the cells of docs/results/silent_bugs.csv."""

import itertools
import pathlib
import re

import bugs
import checks
import tables

BEGIN, END = "<!-- silent_bugs: (.*) -->", "<!-- end -->"
PAGE = pathlib.Path(__file__).resolve().parents[1] / "silent-bugs.md"
CHECKS = {"curve": "loss curve, step", "digits": "loss by digits, step", "norm": "gradient norm, step",
          "weights": "weights after a step", "gradients": "step-1 gradients", "fp64": "all of it in fp64",
          "replicas": "replica check, step", "calls": "call checking"}


def cell(row, check):
    """As the page shows it: empty where the check does not see the bug."""
    value = row[check]
    if not checks.sees(row)[check]:
        return "none" if value == "none" else ""
    if check == "norm" and value == "1":
        return f"1, × {float(row['norm_ratio']):.3g}"
    return value.removeprefix("gradient ").replace("lr", "learning rate")


def cells_table(rows):
    lines = []
    for row in rows:
        flags = re.sub("--data .*", "masked targets", row["flags"]) or "one rank"
        flags = re.sub(r"--(\S+) (\S+)", r"\1=\2", flags)
        lines.append([f"`{row['bug']}`", flags, *(cell(row, check) for check in CHECKS)])
    head = ["patch", "flags", *CHECKS.values()]
    return "\n".join(tables.markdown(head, lines, "-" * len(head)))


def counted(rows, controls):
    seen = {check: sum(checks.sees(row)[check] for row in rows) for check in CHECKS}
    at_end = sum(checks.beyond(float(row["gap"]), 0, float(row["spread"])) for row in rows)
    unseen = [f"`{row['bug']}`" for row in rows if not any(checks.sees(row)[check] for check in
                                                         ("norm", "weights", "gradients", "fp64", "replicas", "calls"))]
    spreads = [float(row["spread"]) for row in controls]
    gaps = [abs(float(row["gap"])) for row in controls]
    with_copies = sum(row["replicas"] != "none" for row in rows)
    return (
        f"- **The loss curve sees {seen['curve']} of {len(rows)}** within {checks.SHAPE['steps']} steps, {at_end} of "
        f"them still at the end.\n"
        f"- Beside a right run: the gradient norm {seen['norm']} and the losses' digits {seen['digits']} in the first "
        f"{checks.EARLY} steps, step 1's gradients {seen['gradients']}, the weights after it {seen['weights']}, the "
        f"comparison in fp64 {seen['fp64']}. {', '.join(unseen) or 'None'} is seen by the losses only.\n"
        f"- Without one: the replica check {seen['replicas']} of the {with_copies} whose layout has replicas, call "
        f"checking {seen['calls']}.\n"
        f"- No check sees the right program in {len(controls)} layouts; its curves end within "
        f"{max(gaps):.1g} of one rank's, where seeds differ by {min(spreads):.2f} to {max(spreads):.2f}."
    )


def catalogue(run):
    """The threads whose bugs are run, with the names of their patches, or the others."""
    items = []
    for threads, words, name in bugs.THREADS:
        if bool(name) == run:
            links = ", ".join(f"[{text}](https://github.com/{path})" for text, path in threads)
            items.append(f"- {links}" + f", `{name}`" * run + f": {words}")
    return "\n".join(items)


def parts(rows):
    """{name of a part of the page: its text}."""
    of_bugs = {row["bug"]: row for row in rows if row["bug"] != "right"}
    in_order = [of_bugs[bug.name] for bug in bugs.RUN if bug.name in of_bugs]
    return {"count": counted(in_order, [row for row in rows if row["bug"] == "right"]), "cells": cells_table(in_order),
            "run": catalogue(True), "others": catalogue(False)}


def differs(rows, write):
    """Lines that say which part the page lacks, and its first line that is not the CSV's; or it is written anew."""
    text, new = PAGE.read_text(encoding="utf-8"), {name: f"{wanted}\n" for name, wanted in parts(rows).items()}
    lines = [f"{PAGE.name}: has no part {name}" for name in new if name not in tables.parts(text, BEGIN, END)]
    wanted = tables.with_parts(text, BEGIN, END, new)
    if write:
        PAGE.write_text(wanted, encoding="utf-8")
        return lines
    pairs = enumerate(itertools.zip_longest(text.split("\n"), wanted.split("\n"), fillvalue=""), 1)
    wrong = [f"{PAGE.name}:{at}: is not that of the CSV: {was[:150]}" for at, (was, now) in pairs if was != now]
    return lines + wrong[:1]
