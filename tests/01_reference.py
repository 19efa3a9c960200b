"""Four AdamW steps of a Llama in double precision, from its equations alone (docs/validate/llama.py).

Run:   01_reference.py MODEL_DIR TOKEN_FILE METRICS.jsonl FLAG=VALUE...
MODEL_DIR holds config.json and safetensors; TOKEN_FILE one byte per token, inputs and targets of one sample; METRICS is
what the program under test wrote. Exits with 1 where a loss or a gradient norm is off by more than 5e-6.
"""
import json
import math
import os
import pathlib
import sys

import numpy as np

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / "docs")]
from validate.llama import AdamW, Llama, norm_of  # noqa: E402
from validate.runs import Safetensors  # noqa: E402

TOLERANCE = 5e-6


def learning_rate(step, flags):
    peak, warmup, steps = flags["lr"], int(flags["warmup-steps"]), int(flags["steps"])
    if step <= warmup:
        return peak * step / warmup
    if flags["lr-schedule"] == "constant":
        return peak
    done = (step - warmup) / (steps - warmup)
    left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[flags["lr-schedule"]]
    return flags["min-lr"] + (peak - flags["min-lr"]) * left


def train(config, weights, sample, flags, document_token):
    """Yields loss and gradient norm (before clipping) of each step."""
    optimizer = AdamW(*(flags[key] for key in ("beta1", "beta2", "eps", "weight-decay", "clip")))
    for step in range(1, int(flags["steps"]) + 1):
        model = Llama(config, weights, document_token)
        loss, gradients = model.loss_and_gradients(sample[None, :-1], sample[None, 1:])
        assert gradients.keys() == weights.keys()
        yield loss, norm_of(gradients)
        weights = optimizer.step(weights, gradients, learning_rate(step, flags))


def main():
    folder, token_file, metrics = sys.argv[1:4]
    flags = dict(argument.split("=") for argument in sys.argv[4:])
    flags = {key: value if key == "lr-schedule" else float(value) for key, value in flags.items()}
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    weights = Safetensors(os.path.join(folder, "model.safetensors")).all()
    document_token = flags.pop("document-token", None)
    with open(token_file, "rb") as file:
        sample = np.frombuffer(file.read(), np.uint8).astype(int)
    with open(metrics) as file:
        steps = [line for line in map(json.loads, file) if line["event"] == "step"]
    worst = {"loss": 0.0, "grad_norm": 0.0}
    expected = list(train(config, weights, sample, flags, document_token))
    passed = len(steps) == len(expected) > 0
    for got, (loss, norm) in zip(steps, expected):
        for key, value in (("loss", loss), ("grad_norm", norm)):
            error = abs(got[key] / value - 1)
            worst[key] = max(worst[key], error)
            passed = passed and error <= TOLERANCE
        print(f"step {got['step']}: loss {got['loss']:.9g} against {loss:.9g}, "
              f"|g| {got['grad_norm']:.9g} against {norm:.9g}")
    print(f"{'ok' if passed else 'FAIL'}: worst deviation of the loss {worst['loss']:.2e}, "
          f"of the gradient norm {worst['grad_norm']:.2e}")
    sys.exit(0 if passed else 1)


main()
