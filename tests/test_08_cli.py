"""Only this catches: chapter 08's files and tables: layouts through files, dry run, probe, --simulate, a rank lost."""
import collections
import json
import re
import signal
import socket
import sys

import numpy as np
import pytest

from checkpoint_reader import read_hf
from conftest import ROOT, in_turn
from one_rank import DATA, like_one_rank, one_rank, same_run

PROGRAM = "08_3d_full"
SHAPE = ("--layers 4 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 --global-batch 8 "
         "--init-std 0.1 --lr 0.001")
LAYOUTS = ["--dp 2 --tp 2 --pp 2 --zero 1",
           "--tp 2 --sequence-parallel on --cp 2 --pp 2 --pipeline zero-bubble --zero 3",
           "--cp 2 --pp 2 --dp 2 --pipeline interleaved --zero 2 --micro-batch 1",
           "--tp 4 --dp 2 --zero 3 --tp-overlap on --sequence-parallel on"]


def test_refused_by_four_ranks(run):
    """Most of what is refused is in refusals.cpp."""
    says = "--tp 2 x --cp 1 x --dp 4 x --pp 1 = 8 ranks, but there are 4 (try mpirun -np 8, or --dp 2)"
    run.refused(PROGRAM, "--steps 1 --metrics m.jsonl --tp 2 --dp 4", ranks=4, says=says)


@pytest.fixture(scope="module")
def one(module_run):
    one_rank(module_run, SHAPE)
    return module_run


@pytest.mark.parametrize("flags", in_turn(LAYOUTS, 2))
def test_a_layouts_reference_weights_and_evaluations_are_one_ranks(one, flags):
    like_one_rank(one, PROGRAM, SHAPE, flags, ranks=8)
    several, expected = (read_hf(one.folder / name) for name in ("several", "one"))
    assert several.keys() == expected.keys()
    for name in expected:
        assert np.max(np.abs(several[name] - expected[name])) <= 1e-4, name


Model = collections.namedtuple("Model", "flags training saved_by loaded_by")
MODELS = {
    "experts and biases": Model(
        "--router sigmoid --qk-norm on --experts 4 --expert-ffn 16 --shared-experts 1", "--router-bias-rate 0.05",
        "--dp 2 --pp 2 --ep 2", ["--tp 2 --pp 2 --sequence-parallel on --ep 2 --zero 3", "--dp 4 --ep 4 --zero 1"]),
    "tied": Model("--tied-embeddings on", "", "--tp 2 --pp 2 --zero 3",
                  ["--pp 4", "--tp 2 --pp 2 --zero 3 --pipeline interleaved --micro-batch 1", "--tp 4"])}


@pytest.mark.parametrize("name", in_turn(MODELS, 2))
def test_a_model_goes_from_a_pipeline_through_a_file_to_one_rank_and_to_layouts(run, name):
    model = MODELS[name]
    training = [*DATA, "--dtype fp64 --steps 3", model.training]
    run(PROGRAM, SHAPE, *training, model.flags, model.saved_by, "--save-hf model", ranks=4)
    loads = [*training, "--seq-len 32 --global-batch 8 --lr 0.001 --load-hf model --hf-ignore vocab_size"]
    run(PROGRAM, *loads, "--save-reference loaded_one")
    for number, flags in enumerate(model.loaded_by):
        run(PROGRAM, *loads, flags, f"--save-reference loaded{number}", ranks=4)
        same_run(run, f"loaded{number}", "loaded_one", "1e-10")
    saved = read_hf(run.folder / "model")
    if name == "tied":
        assert not [each for each in saved if "lm_head" in each]
        assert json.loads((run.folder / "model/config.json").read_text())["tie_word_embeddings"]
    else:
        biases = [values for each, values in saved.items() if each.endswith("correction_bias")]
        assert len(biases) == 4 and all((np.abs(values) > 0.04).any() for values in biases), "no bias has moved"


# ---- the probe -------------------------------------------------------------------------------------------------------


def test_probe_prints_the_layout_the_links_and_the_memory(run):
    done = run(PROGRAM, SHAPE, "--tp 2 --pp 2 --steps 1 --probe on", ranks=4)
    done.says("stage 1", "probe of 4 ranks", "tp, all-reduce over 2", "pp, message of 2 stages", "formula", where="out")


def finds_rank_3_slow(done):
    events = {event["event"]: event for kind in ("hosts", "probe") for event in done.events(kind)}
    slow = events["probe"]["slow"]
    return (events["hosts"]["hosts"] == [socket.gethostname()] * 4 and
            all(each["host"] == socket.gethostname() and each["of_median"] < 0.8 for each in slow) and
            any(each["rank"] == 3 and each["what"].startswith("product") for each in slow))


@pytest.mark.parametrize("flag, code", in_turn([("strict", 3), ("on", 0)], 2))
def test_probe_names_the_slow_rank_and_strict_ends_the_run(run, binaries, flag, code):
    """Four ranks on two cores, and what else runs: one of three attempts shows who is slow."""
    flags = f"{SHAPE} --steps 1 --probe {flag} --metrics m.jsonl"
    for _ in range(3):
        # The oldest kernels make a rank slow.
        words = [flags, ": -np 1 env ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Prescott", binaries / PROGRAM, flags]
        done = run(PROGRAM, *words, ranks=3, code=None)
        if done.code == code and finds_rank_3_slow(done):
            assert bool(done.events()) == (flag == "on"), done
            assert flag == "on" or "exit code 3" in done.out, done
            return
    pytest.fail(f"not found in three attempts\n{done}")


# ---- a dry run, one rank of many, a trace ----------------------------------------------------------------------------


def test_a_dry_run_of_70b_on_64_ranks_books_what_the_formula_says(run):
    done = run(PROGRAM, "--model 70b --comm fake --fake-world 64 --tp 8 --pp 4 --zero 1 --sequence-parallel on",
               "--dtype bf16 --recompute full --seq-len 4096 --global-batch 16 --micro-batch 1 --dry-run")
    text = done.says("largest: rank", where="out").out
    for kind in ("params", "grads", "optimizer"):
        assert re.search(rf"^{kind} +(\d+) +\1$", text, re.M), f"{kind} is not the formula's\n{text}"
    totals = [float(line.split()[-2]) for line in text.splitlines() if "(stage" in line]
    assert totals and all(0 < total < 80 for total in totals), totals


def rank_of(done):
    return done.events("summary")[0]["memory_per_rank"][0]["rank"]


def test_a_dry_run_writes_its_files(run):
    done = run(PROGRAM, SHAPE, "--comm fake --fake-world 4 --fake-rank 3 --pp 2 --dry-run --metrics m.jsonl",
               "--memory-timeline t.csv")
    assert rank_of(done) == 3 and (run.folder / "t.csv").stat().st_size > 0


def test_one_rank_of_16_really_computes(run):
    done = run(PROGRAM, SHAPE, "--comm fake --fake-world 16 --fake-rank 5 --tp 2 --pp 2 --cp 2 --steps 2",
               "--metrics m.jsonl")
    assert len(done.events()) == 2 and rank_of(done) == 5


def test_a_trace_has_all_ranks_with_their_places_and_metrics_the_slowest(run):
    flags = "--tp 2 --pp 2 --dp 2 --micro-batch 1 --steps 2 --trace t.json --metrics m.jsonl"
    done = run(PROGRAM, SHAPE, flags, ranks=8)
    events = json.loads((run.folder / "t.json").read_text())["traceEvents"]
    titles = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert titles == {rank: f"rank {rank} (tp {rank % 2}, dp {rank // 2 % 2}, pp {rank // 4})" for rank in range(8)}
    for rank in range(8):
        spans = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        names = [span["name"] for span in spans]
        assert names.count("update") >= 2 and names.count("tp.all_reduce") >= 2, (rank, names)
        assert any(span.get("args", {}).get("group") == "tp" for span in spans), rank
    for step in done.events():
        slowest = step["straggler"]
        assert 0 <= slowest["rank"] < 8 and slowest["waited_s"] >= 0
        assert 0 < slowest["median_busy_s"] <= slowest["busy_s"]
    run(sys.executable, ROOT / "docs/prometheus.py", "--once m.jsonl p.prom")
    assert "train70b_step 2\n" in (run.folder / "p.prom").read_text()


# ---- a rank that dies or stands still --------------------------------------------------------------------------------


@pytest.mark.parametrize("sent, rank, seconds, says", [
    (signal.SIGKILL, 3, 5, ["terminated by SIGTERM"]),
    (signal.SIGSTOP, 6, 9, ["has not ended after 4 s (--comm-timeout)", "NOT ENDED"])], ids=["KILL", "STOP"])
def test_all_end_with_a_rank(run, sent, rank, seconds, says):
    process = run.start(PROGRAM, SHAPE, "--tp 2 --pp 2 --dp 2 --zero 1 --micro-batch 1 --steps 1000000",
                        "--comm-timeout 4 --metrics m.jsonl", ranks=8)
    process.wait_for_steps(20)
    process.strike(sent, rank)
    done = process.end(60).within(seconds).says(*says)
    assert done.code not in (0, 124), done


# ---- a simulated step ------------------------------------------------------------------------------------------------

H100 = ["--simulate", ROOT / "08_3d_full/plan/clusters/h100-8x8.json"]
SMALL = "--layers 4 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 256 --seq-len 32"
FAKE = f"{SMALL} --comm fake --fake-world 16 --tp 2 --cp 2 --pp 2 --zero 1 --global-batch 16 --micro-batch 1"


def milliseconds(done):
    return float(re.search(r"^the step +([0-9.]+) +100.0%$", done.out, re.M)[1])


@pytest.fixture(scope="module")
def plain(module_run):
    return module_run(PROGRAM, FAKE, *H100, "--trace simulated.json")


def test_simulate_prints_parts_that_add_up_and_traces_the_step(plain):
    table = plain.out.split("simulated step")[1].split("\n\n")[0]
    *parts, (name, step) = [(name, float(ms)) for name, ms in re.findall(r"^(.+?) +([\d.]+) +[\d.]+%$", table, re.M)]
    assert name == "the step" and abs(sum(ms for _, ms in parts) - step) <= 1e-3 * len(parts), table
    assert {"computation", "pp: waiting for other ranks"} <= {name for name, _ in parts}, table
    events = json.loads((plain.folder / "simulated.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 8}
    assert {"F0", "B0", "matmul", "tp.all_reduce", "update"} <= {span["name"] for span in spans}
    assert all(span["ts"] >= 0 and span["dur"] >= 0 and span["ts"] + span["dur"] <= 1e3 * step + 1 for span in spans)
    assert any(event["ph"] == "C" and event["args"]["activations"] > 0 for event in events), "no memory"


@pytest.mark.parametrize("flags", ["--simulate-slow 5:3", "--simulate-slow-network 1:1000"])
def test_simulate_with_something_slow_takes_longer(run, plain, flags):
    assert milliseconds(run(PROGRAM, FAKE, *H100, flags)) > 1.05 * milliseconds(plain)


def test_simulate_with_one_stream_takes_longer(run):
    flags = ["--layers 4 --hidden 1024 --heads 8 --kv-heads 4 --ffn 2048 --vocab 256 --seq-len 512 --comm fake",
             "--fake-world 16 --tp 2 --sequence-parallel on --zero 3 --global-batch 16 --micro-batch 1", *H100]
    assert milliseconds(run(PROGRAM, *flags, "--comm-streams one")) > 1.1 * milliseconds(run(PROGRAM, *flags))


def test_simulate_says_that_it_leaves_out_the_hosts_update(run):
    run(PROGRAM, FAKE, *H100, "--offload optimizer").says("\ntoo fast: the host's update", where="out")


def test_dry_run_books_files_and_makes_none(run):
    done = run(PROGRAM, FAKE, "--dry-run --offload nvme --offload-dir no/such/folder")
    rows = {row[0]: row[1:] for row in map(str.split, done.out.splitlines()) if len(row) == 3}
    assert rows["optimizer"] == ["0", "0"] and rows["disk"][0] == rows["disk"][1] > "0" < rows["host"][0], done


def test_simulate_knows_the_all_reduce_of_cpu_ranks(run):
    flags = [SMALL, "--comm fake --fake-world 6 --global-batch 6 --simulate box --all-reduce"]
    ring, levels = (milliseconds(run(PROGRAM, *flags, algorithm)) for algorithm in ("ring", "hierarchical"))
    assert levels < 0.95 * ring


def test_simulates_jitter_is_the_seeds(run, plain):
    runs = [run(PROGRAM, FAKE, *H100, f"--simulate-jitter 0.1 --seed {seed}") for seed in (1, 1, 2)]
    first, again, other = map(milliseconds, runs)
    assert first == again and first != other and first != milliseconds(plain)


def test_simulate_on_probed_links_and_measured_ops(run):
    run(PROGRAM, SMALL, "--steps 1 --probe-file links.json", ranks=2)
    links = json.loads((run.folder / "links.json").read_text())
    assert links["nodes"] == 1 and links["gpus_per_node"] == 2 and links["host"]["bytes_per_s"] > 0, links
    device = {"name": "x", "peak_bf16": 1e11, "peak_fp32": 1e11, "product_efficiency": 1, "copy_bytes_per_s": 1e10,
              "memory_bytes": 1e9, "launch_s": 0, "host_s": 0, "streams": False}
    (run.folder / "here.json").write_text(json.dumps({"name": "here", "device": device, **links}))
    run("01_single_gpu", SMALL, "--micro-batch 2 --global-batch 2 --bench-csv ops.csv")
    done = run(PROGRAM, SMALL, "--comm fake --fake-world 2 --simulate here.json --device-csv ops.csv")
    assert milliseconds(done) > 0
