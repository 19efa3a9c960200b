#!/usr/bin/env python3
"""The conformance board (docs/conformance.md) against the folders' record of it, docs/results/conformance.csv: its tables
are what the CSV gives, every framework has a row and a pinned version, every red cell has a patch and is green with it.
No cell is run. Then a dozen wrong boards, each of which must be noticed.

Run:   python3 tests/conformance.py
"""
import copy
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / "docs/conformance")]
import board  # noqa: E402


def first(table, **wanted):
    return next(row for row in table if all(row[key] == value for key, value in wanted.items()))


def other_verdict(table):
    first(table, verdict="agrees")["verdict"] = "differs"


def no_patch(table):
    first(table, verdict="differs").update(patch="", patched="")


def patch_that_does_not_help(table):
    first(table, verdict="differs")["patched"] = "differs"


def patch_not_run(table):
    first(table, verdict="differs")["patched"] = "not run"


def long_patch(table):
    first(table, verdict="differs")["patch"] += " ; sed" * board.PATCH_LINES


def too_far(table):
    first(table, verdict="agrees")["worst gradient"] = "0.0137"


def not_a_number(table):
    first(table, verdict="agrees")["worst gradient"] = "nan"


def no_line(table):
    first(table, verdict="stops")["cause"] = "it needs a GPU"


def path_of_a_machine(table):
    first(table, verdict="stops")["cause"] += " (/home/me/venv/lib/torch.py)"


def other_version(table):
    table[0]["version"] = "2.6.0"


def unknown_verdict(table):
    table[0]["verdict"] = "green"


def framework_without_a_row(table):
    table[:] = [row for row in table if row["framework"] != "nanotron"]


def cell_left_out(table):
    table.remove(first(table, framework="picotron"))


def few_cells(table):
    for row in table:
        row.update(verdict="not run")


PLANTS = (other_verdict, no_patch, patch_that_does_not_help, patch_not_run, long_patch, too_far, not_a_number, no_line,
          path_of_a_machine, other_version, unknown_verdict, framework_without_a_row, cell_left_out, few_cells)


def main():
    table, page, pinned, planned = board.read_rows(), board.PAGE.read_text(), board.versions(), board.cells()
    wrong = list(board.faults(table, page, pinned, planned))
    for plant in PLANTS:  # with the page that such a CSV gives: the row itself must be noticed
        changed = copy.deepcopy(table)
        plant(changed)
        if not list(board.faults(changed, board.page_with(changed), pinned, planned)):
            wrong.append(f"planted and not noticed: {plant.__name__}")
    if not list(board.faults(table, page.replace("| agrees |", "| differs |", 1), pinned, planned)):
        wrong.append("planted and not noticed: another verdict on the page than in the CSV")
    if not list(board.faults(table, page, {**pinned, "torch": ""}, planned)):
        wrong.append("planted and not noticed: a version that is not pinned")
    models = board.read_rows(board.RANDOM)
    if any(row["verdict"] != "agrees" for row in models) or len({row["flags"] for row in models}) < 20:
        wrong.append(f"{board.RANDOM.name}: 20 random models, all of which agree, are promised")
    print("\n".join(wrong) or f"{len(table)} cells as the CSV has them; {len(PLANTS) + 2} wrong boards noticed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
