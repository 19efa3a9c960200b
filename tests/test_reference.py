"""Chapter 01's training from a loaded model against NumPy in double (docs/validate/llama.py).

Four clipped AdamW steps on one sample of seq-len + 1 tokens: loss and gradient norm, through files.
"""
import json
import math
import shutil

import pytest

np = pytest.importorskip("numpy")
from conftest import ROOT  # noqa: E402
from validate.llama import AdamW, Llama, norm_of  # noqa: E402
from validate.runs import Safetensors  # noqa: E402

TOLERANCE = 5e-6
SAMPLE = b"Of arms and of a man: 34 tokens!!!"
SHAPE = "--layers 2 --hidden 48 --heads 6 --kv-heads 2 --ffn 80 --seq-len 33 --init-std 0.1"
# Of the 4 pairs one stays, one is blended, two are slowed down.
LLAMA3 = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}
FLAGS = {"lr": 0.001, "min-lr": 0.0001, "warmup-steps": 2, "lr-schedule": "cosine", "steps": 4, "weight-decay": 0.1,
         "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip": 0.5}
# What differs. Learning rates are small, or eps holds the updates back, because AdamW's first steps divide tiny
# gradients by their own size: what fp32 rounds away in them would come back as a whole step.
CASES = {"clipped, warm-up and cosine": {}, "no clipping, linear": {"clip": 100, "lr-schedule": "linear", "lr": 0.0003},
         "constant, other betas, strong decay": {"lr-schedule": "constant", "beta1": 0.8, "beta2": 0.99,
                                                 "weight-decay": 2},
         "large eps, large steps": {"eps": 0.001, "lr": 0.02, "clip": 2},
         "documents that end with a space": {"document-token": 32, "lr": 0.0003},
         "documents, several ends in a row, one at the last place": {"document-token": 33},
         "llama3 rope scaling": {}}


def learning_rate(step, flags):
    peak, warmup, steps = flags["lr"], flags["warmup-steps"], flags["steps"]
    if step <= warmup:
        return peak * step / warmup
    if flags["lr-schedule"] == "constant":
        return peak
    done = (step - warmup) / (steps - warmup)
    left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[flags["lr-schedule"]]
    return flags["min-lr"] + (peak - flags["min-lr"]) * left


def train(folder, flags):
    """Yields loss and gradient norm (before clipping) of each step."""
    config, weights = json.loads((folder / "config.json").read_text()), Safetensors(folder / "model.safetensors").all()
    tokens = np.frombuffer(SAMPLE, np.uint8).astype(int)
    optimizer = AdamW(*(flags[key] for key in ("beta1", "beta2", "eps", "weight-decay", "clip")))
    for step in range(1, flags["steps"] + 1):
        model = Llama(config, weights, flags.get("document-token"))
        loss, gradients = model.loss_and_gradients(tokens[None, :-1], tokens[None, 1:])
        assert gradients.keys() == weights.keys()
        yield loss, norm_of(gradients)
        weights = optimizer.step(weights, gradients, learning_rate(step, flags))


@pytest.fixture(scope="module")
def models(module_run):
    """A folder with `model`, `llama3` and sample.txt."""
    folder = module_run.folder
    (folder / "sample.txt").write_bytes(SAMPLE)
    module_run("01_single_gpu", SHAPE, "--steps 0 --save-hf model")
    shutil.copytree(folder / "model", folder / "llama3")
    config = json.loads((folder / "model/config.json").read_text())
    assert config.keys() >= LLAMA3.keys()
    (folder / "llama3/config.json").write_text(json.dumps(config | LLAMA3))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_numpy(module_run, models, name):
    flags, model = FLAGS | CASES[name], "llama3" if "llama3" in name else "model"
    words = [f"--{key} {value}" for key, value in flags.items()]
    done = module_run("01_single_gpu", f"--load-hf {model} --data sample.txt --seq-len 33 --global-batch 1", *words,
                      "--metrics m.jsonl")
    steps, expected = done.events(), list(train(models / model, flags))
    assert len(steps) == len(expected) == 4
    for step, (loss, norm) in zip(steps, expected):
        for found, value in (step["loss"], loss), (step["grad_norm"], norm):
            assert abs(found / value - 1) <= TOLERANCE, f"{found} is not {value}\n{done}"


def test_save_load_save(module_run, models):
    module_run("01_single_gpu", "--load-hf llama3 --steps 0 --save-hf again")
    module_run("01_single_gpu", "--load-hf again --steps 0 --save-hf third")
    llama3, again, third = ({path.name: path.read_bytes() for path in (models / name).iterdir()}
                            for name in ("llama3", "again", "third"))
    assert llama3["model.safetensors"] == again["model.safetensors"] and again == third


DEFAULTS = json.loads((ROOT / "tests/hf_defaults.json").read_text())


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_of_transformers(family, run):
    """What 01_hf_config.cpp compares with is the class's; and every key that the class writes is known."""
    small = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    config = pytest.importorskip("transformers").AutoConfig.for_model(family, **small, **DEFAULTS[family]["needs"])
    theirs = config.to_dict()
    theirs["rope_theta"] = theirs["rope_parameters"]["rope_theta"]
    theirs["head_dim"] = theirs.get("head_dim")
    if not theirs.get("output_router_logits"):
        theirs["router_aux_loss_coef"] = 0  # nothing is added to the loss
    if theirs.get("use_sliding_window") is False:
        theirs["sliding_window"] = 4096  # what the class sets to None
    heads = config.num_attention_heads
    for key, value in DEFAULTS[family]["defaults"].items():
        computed = {"num_key_value_heads": heads, "head_dim": 512 // heads}.get(key) if value is None else None
        assert theirs[key] in (value, computed), key
    config.save_pretrained(run.folder / "hf")
    run.refused("01_single_gpu", "--load-hf hf", says=["has neither model.safetensors nor"])
