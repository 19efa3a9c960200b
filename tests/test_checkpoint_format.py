"""Only this catches: checkpoints that are not as docs/checkpoint-format.md says, or that its two scripts misread."""
import json
import re
import sys

import numpy as np
import pytest

from checkpoint_reader import LEVELS, read, read_hf, to_bf16
from conftest import ROOT

SHAPE = ("--layers 4 --hidden 48 --heads 6 --kv-heads 2 --ffn 80 --vocab 259 --seq-len 24 --global-batch 4 "
         "--init-std 0.1 --lr 0.002 --warmup-steps 2 --steps 4 --stop-after 3")
BF16 = "--dtype bf16 --optimizer adamw8bit --fp8 delayed --fp8-history 4"
EIGHT = "--optimizer adamw8bit"
SPARSE = ("--dtype fp64 --qk-norm on --experts 4 --expert-ffn 32 --shared-experts 1 --dense-layers 1 --router sigmoid "
          "--router-bias-rate 0.01 --aux-loss-over batch")
RUNS = {  # name: ranks and flags; what a run resumes from is made first
    "one": (1, "--dtype fp64"),
    "tp-pp": (4, "--dtype fp64 --tp 2 --pp 2"),
    "dp-tp": (4, "--dtype fp64 --dp 2 --tp 2 --zero 1 --sequence-parallel on"),
    "dp-cp": (4, "--dtype fp64 --dp 2 --cp 2 --zero 3"),
    "muon-one": (1, "--dtype fp64 --optimizer muon"),
    "muon": (4, "--dtype fp64 --optimizer muon --tp 2 --dp 2 --zero 2"),
    "tied-one": (1, "--dtype fp64 --tied-embeddings on"),
    "tied": (4, "--dtype fp64 --tied-embeddings on --tp 2 --pp 2"),
    "bf16": (4, f"{BF16} --tp 2 --dp 2 --zero 2 --weights-every 2"),
    "bf16-again": (1, f"{BF16} --resume-from bf16/step-3"),
    "bf16-pp": (2, f"{BF16} --resume-from bf16/step-3 --pp 2"),
    "bf16-stages": (2, f"{BF16} --resume-from bf16-pp/step-3 --pp 2 --stage-layers 1,3"),
    "eight": (1, EIGHT),
    "eight-same": (1, f"{EIGHT} --resume-from eight/step-3"),
    "eight-rows": (4, f"{EIGHT} --resume-from eight/step-3 --dp 4 --zero 3"),
    "eight-columns": (4, f"{EIGHT} --resume-from eight/step-3 --tp 2 --pp 2"),
    "joined": (4, f"{EIGHT} --tp 2 --pp 2"),
    "joined-one": (1, f"{EIGHT} --resume-from joined/step-3"),
    "sparse-one": (1, SPARSE),
    "sparse": (4, f"{SPARSE} --dp 2 --tp 2 --ep 2 --sequence-parallel on --zero 1 --weights-every 3"),
}


@pytest.fixture(scope="module")
def folder(module_run):
    """folder(name): that of the run's checkpoints; beside it NAME-hf, its weights in Hugging Face's format."""
    def made(name):
        found = module_run.folder / name
        if not found.exists():
            ranks, flags = RUNS[name]
            for before in re.findall(r"--resume-from (\S+)/", flags):
                made(before)
            module_run("08_3d_full", SHAPE, flags, f"--checkpoint-dir {name} --save-hf {name}-hf", ranks=ranks)
        return found
    return made


def equal(a, b):
    same = [a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]) for name in a if name in b]
    return a.keys() == b.keys() and all(same)


def is_saved(states, folder, dtype):
    """Whether a Hugging Face folder has the weights of a checkpoint, bit for bit."""
    weights = {name.removeprefix("weight/"): values for name, values in states.items() if name.startswith("weight/")}
    if dtype == "bf16":
        weights = {name: to_bf16(values) for name, values in weights.items()}
    return equal(read_hf(folder), weights)


def relative_difference(a, b):
    assert a.keys() == b.keys()
    return np.max([np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name]) for name in a])


@pytest.mark.parametrize("name, like", [("tp-pp", "one"), ("dp-tp", "one"), ("dp-cp", "one"), ("tied", "tied-one"),
                                        ("muon", "muon-one"), ("sparse", "sparse-one")])
def test_all_states_of_a_layout_are_one_ranks(folder, name, like):
    manifest, states, _ = read(folder(name) / "step-3")
    _, one, _ = read(folder(like) / "step-3")
    assert (manifest["kind"], manifest["step"]) == ("full", 3)
    assert relative_difference(states, one) <= 1e-10
    assert ("weight/lm_head.weight" in states) == (like != "tied-one")
    if "sparse" not in name:  # whose files have experts one by one
        assert is_saved(one, folder(like).with_name(f"{like}-hf"), "fp64")


def test_bf16_has_fp32_masters_of_the_saved_weights_and_weights_alone_have_no_more(folder):
    _, states, rows = read(folder("bf16") / "step-3")
    assert is_saved(states, folder("bf16").with_name("bf16-hf"), "bf16")
    head = states["weight/lm_head.weight"]
    assert (to_bf16(head).astype(np.uint32) << 16).tobytes() != head.tobytes(), "no fp32 masters"
    assert rows and all(len(each) == 4 for each in rows.values())
    assert all(number >= 0 for each in rows.values() for row in each for number in row)
    manifest, weights, none = read(folder("bf16") / "weights-2")
    assert manifest["kind"] == "weights" and {name.split("/")[0] for name in weights} == {"weight"} and not none
    folder("bf16-again")
    assert is_saved(states, folder("bf16").with_name("bf16-again-hf"), "bf16")


@pytest.mark.parametrize("name", ["bf16-pp", "bf16-stages"])
def test_another_layout_or_other_stages_take_the_largest_fp8_numbers_of_all_ranks(folder, name):
    rows = read(folder("bf16") / "step-3")[2]
    assert any(each[0] != each[-1] for each in rows.values()), "all ranks have the same"
    assert read(folder(name) / "step-3")[2] == {key: [list(map(max, *each))] for key, each in rows.items()}


@pytest.mark.parametrize("name", ["eight-same", "eight-rows", "eight-columns"])
def test_8_bit_moments_stay_where_blocks_stay_or_are_cut(folder, name):
    assert equal(read(folder(name) / "step-3")[1], read(folder("eight") / "step-3")[1])


def test_8_bit_moments_are_quantized_again_where_blocks_are_joined(folder):
    _, columns, _ = read(folder("joined") / "step-3")
    _, joined, _ = read(folder("joined-one") / "step-3")
    differ = total = 0
    for name, values in columns.items():
        state = name.split("/")[0]
        if state == "weight":
            assert np.array_equal(values, joined[name]), name
            continue
        before, after = values.ravel().astype(np.float64), joined[name].ravel().astype(np.float64)
        # Half of the widest gap between two levels, of the largest magnitude that a block can have.
        bound = np.diff(LEVELS[state]).max() / 2 * 1.0001
        largest = [np.abs(before[begin:begin + 256]).max() for begin in range(0, len(before), 256)]
        assert (np.abs(before - after) <= bound * np.repeat(largest, 256)[:len(before)]).all(), name
        assert state == "exp_avg" or ((before > 0) == (after > 0)).all(), f"{name}: a second moment became 0"
        differ += (before != after).sum()
        total += len(before)
    assert 0 < differ / total < 0.5


def test_experts_biases_and_loads_are_one_ranks_and_weights_alone_have_the_biases(folder):
    states, rows = read(folder("sparse") / "step-3")[1:]
    one = read(folder("sparse-one") / "step-3")[2]
    biases = {f"experts/model.layers.{layer}.mlp.gate.weight.bias" for layer in (1, 2, 3)}
    assert {name for name in one if name.endswith(".bias")} == biases and len(one) == 6
    assert rows == {name: row * 4 for name, row in one.items()} and all(any(one[name][0]) for name in biases)
    saved = read_hf(folder("sparse").with_name("sparse-hf"))
    for name in biases:
        stored = saved[name.removeprefix("experts/").removesuffix("weight.bias") + "e_score_correction_bias"]
        assert stored.dtype == "<f4" and stored.tolist() == one[name][0], name
    _, weights, kept = read(folder("sparse") / "weights-3")
    assert kept == {name: rows[name] for name in biases}
    assert equal(weights, {name: values for name, values in states.items() if name.startswith("weight/")})


# ---- the document's programs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documented(module_run):
    """Runs one of the two."""
    return lambda *words, code=0: module_run(sys.executable, f"{ROOT}/docs/{' '.join(words)}", code=code)


def refuses(done, what):
    assert done.err.count("\n") == 1 and what in done.err, done


@pytest.mark.parametrize("name", ["one/step-3", "dp-cp/step-3", "bf16/step-3", "bf16/weights-2", "eight-columns/step-3",
                                  "sparse/step-3", "sparse/weights-3"])
def test_the_documents_programs_read_the_same_numbers(module_run, folder, documented, name):
    work = folder(name.split("/")[0]).parent
    manifest, states, rows = read(work / name)
    documented("read_checkpoint.py", name, "full.npz")
    experts = {key: np.float32(each[0]) for key, each in rows.items() if key.startswith("experts/")}
    assert equal(dict(np.load(work / "full.npz")), states | experts)
    if experts:
        refuses(documented("checkpoint_to_hf.py", name, "refused", code=1), "has experts")
        assert not (work / "refused").exists()
        return
    documented("checkpoint_to_hf.py", name, "converted")
    assert is_saved(states, work / "converted", manifest["dtype"])
    if name.endswith("step-3"):
        mine, theirs = ((work / each / "config.json").read_text() for each in ("converted", f"{name.split('/')[0]}-hf"))
        assert json.loads(mine) == json.loads(theirs)
        module_run("08_3d_full", "--load-hf converted --seq-len 24 --global-batch 4 --steps 1 --hf-ignore vocab_size")


def test_the_documents_reader_sees_a_flipped_bit(folder, documented):
    path = folder("tied-one") / "step-3/rank-00000.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    refuses(documented("read_checkpoint.py", "tied-one/step-3", "x.npz", code=1), "rank-00000.safetensors: corrupt")
    path.write_bytes(good)
