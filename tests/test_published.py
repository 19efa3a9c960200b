"""Only this catches: a docs/results/08_published.csv that is not what docs/results/08_published.json and the simulation
give."""
import math
import re
import statistics

import published
import pytest
import tables
from conftest import ROOT, in_turn

RESULTS = ROOT / "docs/results"
DATA, _ = published.read_rows(RESULTS / "08_published.json", [])
WRITTEN = tables.read(RESULTS / "08_published.csv")
PAIRS = list(zip(DATA["rows"], WRITTEN))


def near(actual, expected, tolerance):
    return math.isclose(actual, expected, rel_tol=tolerance)


def test_published_rows_are_those_of_the_json():
    names = [row["name"] for row in DATA["rows"]]
    assert len(set(names)) == len(names)
    assert names == [line["row"] for line in WRITTEN]
    assert [row["role"] for row in DATA["rows"]] == [line["role"] for line in WRITTEN]
    assert {line["role"] for line in WRITTEN} <= {"calibration", "held out", "doubtful"}
    assert sum(line["role"] == "calibration" for line in WRITTEN) <= 3
    errors = [abs(float(line["error"])) for line in WRITTEN if line["role"] == "held out"]
    assert statistics.median(errors) <= 15


def test_published_values_and_formulas():
    for row, line in PAIRS:
        value, ratio = published.published(row, DATA), float(line["predicted"]) / float(line["published"])
        assert near(float(line["published"]), value, 1e-4), row["name"]
        assert near(ratio, 1 + float(line["error"]) / 100, 2e-3), row["name"]
        if "tflops" in row:  # the source gives both
            counted = DATA["sources"][row["source"]]["flops"]
            flops = published.flops_per_token(DATA["models"][row["model"]], row["seq_len"], counted)
            assert near(value * flops / 1e12, row["tflops"], 2e-3), row["name"]


def test_published_comparisons_are_what_the_planner_calls_equal():
    median = statistics.median(published.comparison_errors(DATA, WRITTEN))
    equal = float(re.search(r"kEqual = ([\d.]+);", (ROOT / "08_3d_full/plan/explain.h").read_text())[1])
    assert abs(median / 100 - equal) <= 0.005


@pytest.mark.parametrize("row, line", in_turn(PAIRS), ids=lambda value: value.get("name", ""))
def test_published_prediction(binaries, row, line):
    """Simulated again."""
    predicted = published.simulate(row, DATA, binaries / "08_3d_full", ROOT / "08_3d_full/plan/clusters")
    assert near(predicted, float(line["predicted"]), 2e-3)
