"""Only this catches: layouts of `plan` that chapter 08 refuses or books otherwise; its files, order and choices."""
import csv
import json
import re

import pytest

from conftest import SLICE

COUNT = 10 if SLICE == "all" else 3  # of ten layouts: chapter 08's dry runs
# Few simulations, for time.
SMALL = "--simulations 12 --model 1b --gpus 8 --cluster h100-8.json --seq-len 1024 --global-batch 32"
# A model for which memory decides: two nodes.
TIGHT = "--simulations 10 --model 30b --gpus 16 --cluster h100-8x8.json --seq-len 2048 --global-batch 32"
# Experts: their memory and rows, with tp, cp and pipelines beside ep.
SPARSE = "--simulations 10 --model mixtral-8x7b --gpus 32 --cluster h100-8x8.json --seq-len 4096 --global-batch 64"
LARGE = "--simulations 0 --model 70b --gpus 64 --cluster h100-8x8.json --seq-len 4096 --global-batch 128"


@pytest.fixture(scope="module")
def report(module_run):
    """report(flags): (what is printed, the same as JSON), once for the same flags."""
    found = {}

    def of(flags):
        if flags not in found:
            done = module_run("plan", flags, "--json plan.json --csv plan.csv", seconds=300)
            files = [(module_run.folder / name).read_text() for name in ("plan.json", "plan.csv")]
            found[flags] = done, json.loads(files[0]), list(csv.DictReader(files[1].splitlines()))
        return found[flags]
    return of


def best(report, flags):
    return report(flags)[1]["best"]


@pytest.mark.parametrize("flags, count", [(SMALL, 10), (TIGHT, 10), (LARGE, COUNT), (SPARSE, COUNT),
                                          (f"{SPARSE} --tp 2,4 --ep 2,4 --pp 2,4", COUNT)],
                         ids=["small", "tight", "large", "experts", "experts with tp, ep and pp"])
def test_chapter_08_accepts_the_layouts_and_books_the_memory_that_is_printed(report, run, flags, count):
    done, found, _ = report(flags)
    assert len(found["best"]) == 10
    for layout in found["best"]:
        done.says(layout["dry_run"], where="out")
        assert layout["memory"]["total"] <= found["limit_bytes"], layout
        assert 0 < layout["mfu"] < 1 and layout["step_s"] > 0, layout
    for layout in found["best"][:count]:
        program, *words = layout["dry_run"].split()
        assert program == "build/bin/08_3d_full"
        rank = layout["largest_rank"]
        text = run("08_3d_full", *words, f"--fake-rank {rank}", seconds=300).out.split(f"rank {rank}: bytes")[1]
        booked = {kind: int(number) for kind, number in re.findall(r"^(\w+) +(\d+)", text, re.M)}
        if layout["predicted_by"] == "simulation":
            assert booked.items() >= layout["memory"].items(), layout["dry_run"]
        else:
            assert layout["memory"]["total"] == pytest.approx(booked["total"], rel=0.03), layout["dry_run"]


@pytest.mark.parametrize("flags", [SMALL, TIGHT, LARGE, SPARSE], ids=["small", "tight", "large", "experts"])
def test_the_order_is_by_speed_where_it_differs_by_4_percent(report, flags):
    """Layouts that are called equal are within 4% of the fastest of them, those with free memory first."""
    found = report(flags)[1]
    classes = {}
    for place, layout in enumerate(found["best"], 1):
        assert layout["equal_to"] <= place
        classes.setdefault(layout["equal_to"], []).append(layout)
    assert list(classes) == sorted(classes)
    slowest = 0
    for layouts in classes.values():
        seconds = [layout["step_s"] for layout in layouts]
        assert max(seconds) <= 1.04 * min(seconds) and min(seconds) >= slowest, (seconds, slowest)
        tight = [found["limit_bytes"] - layout["memory"]["total"] < found["device_bytes"] / 10 for layout in layouts]
        assert tight == sorted(tight)
        slowest = max(seconds)


def test_a_first_list_comes_before_the_simulation(report):
    done = report(SMALL)[0]
    assert 0 < done.out.find("first list, by the estimate") < done.out.find("the 10 best")
    assert all(line.startswith("plan: ") and line.endswith("%") for line in done.err.splitlines()), done.err
    assert "first list" not in report(LARGE)[0].out


def test_csv_and_json_have_the_table_and_two_runs_are_equal(report, run):
    done, found, rows = report(SMALL)
    assert len(rows) == 10
    for row, layout in zip(rows, found["best"]):
        done.says(row["layout"], where="out")
        assert abs(float(row["step, s"]) - layout["step_s"]) <= 1e-5 * layout["step_s"]
        assert int(float(row["GB"])) == layout["memory"]["total"]
    again = run("plan", SMALL, "--json plan.json --csv plan.csv")
    assert again.out == done.out and json.loads((run.folder / "plan.json").read_text()) == found
    shorter = best(report, f"{SMALL} --best 3")
    assert len(shorter) == 3 and shorter[0] == found["best"][0]


def test_flags_narrow_the_choice(report):
    flags = "--tp 2,4 --zero 1 --recompute full,selective --micro-batch 2 --sequence-parallel on"
    for layout in best(report, f"{SMALL} {flags}"):
        assert layout["tp"] in (2, 4) and layout["zero"] in (0, 1) and layout["micro_batch"] == 2, layout
        assert layout["recompute"] in ("full", "selective") and layout["sequence_parallel"], layout
    hybrid = best(report, f"{SMALL} --zero 3 --hybrid-shard 4 --tp 1 --cp 1 --pp 1")
    assert hybrid and all("--hybrid-shard 4" in layout["dry_run"] for layout in hybrid)
    overlap = best(report, f"{SMALL} --tp 2 --tp-overlap off")
    assert overlap and all("--tp-overlap" not in layout["dry_run"] for layout in overlap)


def test_fp8_is_faster(report):
    lists = best(report, SMALL), best(report, f"{SMALL} --fp8 current")
    plain, fp8 = (min(each, key=lambda layout: layout["step_s"]) for each in lists)
    assert fp8["step_s"] < plain["step_s"] and "--fp8 current" in fp8["dry_run"]


def test_ep_narrows_the_choice(report):
    flags = SPARSE.replace("--simulations 10", "--simulations 0") + " --ep 4"
    report(flags)[0].says("Data parallelism alone: not among the layouts that --ep asks for.", where="out")
    assert best(report, flags) and all(each["ep"] == 4 and "--ep 4 " in each["dry_run"] for each in best(report, flags))


@pytest.mark.parametrize("model, flags, says", [
    ("8b", "--ep 2", "needs a model with experts"),
    ("mixtral-8x7b", "--fp8 current", "not supported with --experts"),
    ("mixtral-8x7b", "--ep 3", "ep 3: --experts 8 is not divisible by it"),
    ("mixtral-8x7b", "--tp 2 --sequence-parallel off", "tp 2: experts need")])
def test_experts_are_refused_what_they_do_not_go_with(run, model, flags, says):
    run.refused("plan", LARGE.replace("70b", model), flags, says=says)


def test_too_few_gpus_are_refused_with_the_fewest_that_work(run):
    flags = "--model 70b --cluster h100-8x8.json --seq-len 4096 --global-batch 960 --simulations 0 --gpus "
    error = run.refused("plan", flags + "8").err
    found = re.search(r"fits in no layout: ([\d.]+) GB per device are missing \(([\d.]+) of ([\d.]+) GB.*"
                      r"the fewest that work: --gpus (\d+)", error)
    missing, needed, limit, enough = map(float, found.groups())
    assert missing > 0 and abs(needed - limit - missing) <= 0.1 and enough > 8, error
    run("plan", f"{flags}{enough:.0f}")
    run.refused("plan", f"{flags}{enough - 8:.0f}")
