#!/usr/bin/env python3
"""Holds docs/silent-bugs.md: its tables are those of docs/results/silent_bugs.csv, every row is of the patch and layout
that are there now, every patch applies, and the right program is seen by no check.

    python3 tests/silent_bugs.py BIN_FOLDER

The right program runs in an eighth of the layouts (TRAIN70B_TEST_SLICE, tests/support.h). Where that is "all", all bugs
are made, built and run again, in BIN_FOLDER/../silent: the checks must see what the CSV says that they see.
"""
import csv
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

from verdicts import exit_code, verdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("docs_silent_bugs", ROOT / "docs/silent_bugs.py")
silent = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(silent)
checks, bugs, comparison = silent.checks, silent.bugs, silent.comparison


def program(*words):
    command = [sys.executable, str(ROOT / "docs/silent_bugs.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def every_patch(listed):
    for name, patch in listed.items():
        try:
            changed = silent.mutants.changed(patch, ROOT)
            same = [file for file, text in changed.items() if text == (ROOT / file).read_text()]
            lines = sum(max(len(before), len(after)) for _, before, after in patch.patches)
            problem = f"changes nothing in {same}" if same else f"{lines} lines" if lines > 10 else ""
        except silent.mutants.Refused as refused:
            problem = str(refused)
        if problem:
            verdict(f"the patch {name}", problem)
    verdict(f"{len(listed)} patches apply")
    threads = [thread for each in bugs.THREADS for thread in each[0]]
    named = [name for *_, name in bugs.THREADS if name]
    verdict(f"{len(bugs.THREADS)} bugs: a thread each, none twice",
            *[f"{path} twice" for path in {path for _, path in threads} if [p for _, p in threads].count(path) > 1],
            f"not run, or twice: {sorted(named)}" if sorted(named) != sorted(bug.name for bug in bugs.RUN) else "")


def planted(folder):
    """The page and the CSV with one thing wrong in each: --check must say so."""
    rows = silent.read()

    def check(name, change_rows, change_page, *parts):
        mine, own_page = [dict(row) for row in rows], silent.page.PAGE.read_text()
        change_rows(mine)
        with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, checks.COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(mine)
        (folder / "page.md").write_text(change_page(own_page))
        done = program("--check", "--csv", folder / "rows.csv", "--page", folder / "page.md")
        verdict(f"planted: {name}",
                f"exit code {done.returncode}: {done.stdout}{done.stderr}" if done.returncode != 1 else "",
                *[f"no {part} in: {done.stdout}" for part in parts if part not in done.stdout])

    def of(name):
        return lambda mine: next(row for row in mine if row["bug"] == name)

    def seen_by_replicas(mine):
        of("own-keys-in-ring-backward")(mine)["replicas"] = "1"

    def wrong_control(mine):
        of("right")(mine)["gradients"] = "nan"

    def other_patch(mine):
        of("norms-decay")(mine)["text"] = "0123456789"

    check("a wrong cell of the CSV", seen_by_replicas, lambda page: page, "page.md, cells: line")
    check("a NaN of the right program", wrong_control, lambda page: page, "the right program", "gradients")
    check("a row of another patch", other_patch, lambda page: page, "norms-decay has no row of its patch",
          "norms-decay: a row of another patch")
    check("a wrong cell of the page", lambda mine: None, lambda page: page.replace("**after step 1**", "no", 1),
          "page.md, cells: line")
    check("a wrong count", lambda mine: None, lambda page: page.replace("curve sees ", "curve sees 1", 1),
          "page.md, count: line 1")
    check("a missing part", lambda mine: None, lambda page: page.replace("silent_bugs: run", "silent_bugs: ran"),
          "has no part run")


def right(binaries, folder, chosen):
    """The cells of step 1 and of the replica check of the right program, once more."""
    silent.text(folder)
    for i, bug in enumerate(chosen):
        here = folder / f"layout-{i}"
        here.mkdir()
        name, ranks = binaries / "08_3d_full", checks.ranks_of(bug.layout)
        checks.run(name, 1, checks.flags_of(bug.model, steps=4, save_reference="one"), here)
        checks.run(name, ranks, checks.flags_of(bug.model, bug.layout, steps=4, save_reference="mine"), here)
        c = comparison.Comparison(str(here / "mine"), str(here / "one"))
        weights = checks.weights_after(c.a, c.b)
        flags = checks.flags_of(bug.model, bug.layout, steps=4, replica_check=1)
        found = checks.replicas(name, ranks, flags, here)
        verdict(f"the right program, {bug.layout or 'one rank'} {bug.model}", *c.differences(),
                "" if weights <= checks.WEIGHTS else f"weights after step 1 by {weights}",
                "" if found in ("no", "none") else f"replicas differ after step {found}")


def everything(binaries, folder):
    """All rows again: the same checks see the same bugs."""
    done = program("--csv", folder / "again.csv", "--work", binaries.parent / "silent")
    again = {row["text"]: row for row in silent.read(folder / "again.csv")}
    verdict("all bugs again", done.stderr if done.returncode else "")
    for row in silent.read():
        other = again.get(row["text"])
        same = other and checks.sees(other) == checks.sees(row)
        verdict(f"again: {row['bug']}, {row['flags']}", "" if same else f"was {row}, is {other}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    binaries, part = pathlib.Path(sys.argv[1]).resolve(), os.environ.get("TRAIN70B_TEST_SLICE", "0")
    done = program("--check")
    verdict("the page, the CSV, the patches", done.stdout + done.stderr if done.returncode else "")
    every_patch(silent.patches())
    layouts = silent.controls()
    chosen = [bug for i, bug in enumerate(layouts) if part == "all" or i % 8 == int(part) % 8]
    with tempfile.TemporaryDirectory(prefix="train70b_silent_") as name:
        planted(pathlib.Path(name))
        right(binaries, pathlib.Path(name), chosen)
        if part == "all":
            everything(binaries, pathlib.Path(name))
    sys.exit(exit_code())


if __name__ == "__main__":
    main()
