#!/usr/bin/env python3
"""Holds docs/results/08_published.csv, docs/published.md and chapter 08's README to docs/results/08_published.json and
the program: python3 tests/published.py BIN_FOLDER [--self-test]

rows        each row of the JSON is in the CSV, with the value that docs/published.py converts; at most three calibrate
formulas    where a source gives tokens/s and TFLOP/s, the FLOPs of a token agree to 0.2%
prediction  a twelfth of the rows, simulated again, agree with the CSV to 0.2% (TRAIN70B_TEST_SLICE=all: all rows)
comparisons what plan/explain.h calls equal is the median error of the ratio of two predictions
lesson      docs/published.md and the README's table are what docs/published.py writes
"""
import csv
import os
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import published

RESULTS = ROOT / "docs" / "results"
SHARE = 12


def near(actual, expected, tolerance):
    return abs(actual / expected - 1) <= tolerance  # False for NaN


def check_rows(data, written):
    names = [row["name"] for row in data["rows"]]
    if len(set(names)) < len(names):
        yield "two rows of 08_published.json have one name"
    if names != [row["row"] for row in written]:
        yield "08_published.csv has other rows than 08_published.json"
        return
    for row, line in zip(data["rows"], written):
        if row["role"] not in ("calibration", "held out", "doubtful") or row["role"] != line["role"]:
            yield f"{row['name']}: role {row['role']}, in the CSV {line['role']}"
        if not near(float(line["published"]), published.published(row, data), 1e-4):
            yield f"{row['name']}: published {line['published']} in the CSV, not what the JSON says"
        if not near(float(line["predicted"]), float(line["published"]) * (1 + float(line["error"]) / 100), 2e-3):
            yield f"{row['name']}: the CSV's error is not that of its figures"
    if sum(row["role"] == "calibration" for row in data["rows"]) > 3:
        yield "more than three rows calibrate"
    errors = [abs(float(line["error"])) for line in written if line["role"] == "held out"]
    if not statistics.median(errors) <= 15:
        yield f"the median error of the held-out rows is {statistics.median(errors):.1f}%"


def check_comparisons(data, written):
    """The planner calls equal what the median of the comparisons cannot tell apart."""
    median = statistics.median(published.comparison_errors(data, written))
    equal = float(re.search(r"kEqual = ([\d.]+);", (ROOT / "08_3d_full/plan/explain.h").read_text())[1])
    if not abs(median / 100 - equal) <= 0.005:
        yield f"the ratio of two predictions is off by {median:.1f}%; plan/explain.h calls {100 * equal:g}% equal"


def check_formulas(data):
    for row in data["rows"]:
        if "tflops" in row:
            counted = data["sources"][row["source"]]["flops"]
            flops = published.flops_per_token(data["models"][row["model"]], row["seq_len"], counted)
            actual = published.published(row, data) * flops / 1e12
            if not near(actual, row["tflops"], 2e-3):
                yield f"{row['name']}: {actual:.1f} TFLOP/s by the formula, {row['tflops']} in the source"


def check_predictions(data, written, program):
    part = os.environ.get("TRAIN70B_TEST_SLICE", "0")
    for i, (row, line) in enumerate(zip(data["rows"], written)):
        if part != "all" and i % SHARE != int(part) % SHARE:
            continue
        seconds = published.simulate(row, data, program, ROOT / "08_3d_full" / "clusters")
        actual = row["global_batch"] * row["seq_len"] / seconds / row["gpus"]
        if not near(actual, float(line["predicted"]), 2e-3):
            yield f"{row['name']}: predicts {actual:.5g}, the CSV has {line['predicted']}"


def check_lesson(data, written):
    for path, text in published.lessons(data, written, ROOT).items():
        if text != (ROOT / path).read_text():
            yield f"{path}: its tables are not those of 08_published.csv (run python3 docs/published.py --lesson)"


def problems(data, written, program=None):
    yield from check_rows(data, written)
    yield from check_formulas(data)
    yield from check_comparisons(data, written)
    yield from check_lesson(data, written)
    if program:
        yield from check_predictions(data, written, program)


def self_test(data, written):
    """Each check finds what it is for."""
    def found(change):
        rows, lines = [dict(row) for row in data["rows"]], [dict(line) for line in written]
        change(rows, lines)
        changed = {**data, "rows": rows}
        return [*check_rows(changed, lines), *check_formulas(changed), *check_comparisons(changed, lines),
                *check_lesson(changed, lines)]

    def given(rows):
        return next(row for row in rows if "tflops" in row)

    cases = {"left out": lambda rows, lines: lines.pop(),
             "other value": lambda rows, lines: lines[0].update(published="1"),
             "other prediction": lambda rows, lines: lines[0].update(predicted="1"),
             "NaN": lambda rows, lines: lines[0].update(published="nan"),
             "four calibrate": lambda rows, lines: [x.update(role="calibration") for x in rows[:4] + lines[:4]],
             "ratios that are off": lambda rows, lines: [line.update(error=str(30 * (i % 3))) for i, line in enumerate(lines)],
             "large errors": lambda rows, lines: [line.update(error="50") for line in lines],
             "other shape": lambda rows, lines: given(rows).update(seq_len=2 * given(rows)["seq_len"]),
             "other error in the lesson": lambda rows, lines: lines[5].update(error="-77.7")}
    return [f"self-test: {name}: not found" for name, change in cases.items() if not found(change)]


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-") and sys.argv[1] != "--self-test":
        sys.exit(__doc__)
    data, _ = published.read_rows(RESULTS / "08_published.json", [])
    written = published.read_csv(RESULTS / "08_published.csv")
    if sys.argv[1] == "--self-test":
        wrong = self_test(data, written)
    else:
        wrong = list(problems(data, written, pathlib.Path(sys.argv[1]) / "08_3d_full"))
    print("\n".join(wrong) or "published throughput: rows, formulas, predictions and lessons agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
