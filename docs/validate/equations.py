"""The model and the optimizer that a run states, in double precision."""

import math

import numpy as np

from .llama import AdamW, Llama

# The exact gradients are computed where that takes a few seconds: 6 FLOPs per parameter and token.
EXACT_FLOPS = 2e11


def settings(run):
    """A run's optimizer, as its flags state it; None where they do not."""
    values = [run.flag(key) for key in ("beta1", "beta2", "eps", "weight-decay", "clip")]
    return AdamW(*values) if all(map(math.isfinite, values)) else None


def model_of(run, weights):
    """A run's model in double precision, or None: its configuration is not one that llama.py computes."""
    mup, hidden = run.flag("mup", 0), run.model.get("hidden_size", 0)
    try:
        return Llama(
            run.model,
            weights,
            document_token=run.document_token,
            z_loss=run.flag("z-loss", 0),
            logit_scale=mup / hidden if mup > 0 else 1.0,
            balance={
                "aux_loss": run.flag("aux-loss", 0),
                "of_batch": run.flags.get("aux-loss-over") == "batch",
                "z_loss": run.flag("router-z-loss", 0),
                "capacity_factor": run.flag("capacity-factor", 0),
                "bias_rate": run.flag("router-bias-rate", 0),
            },
        )
    except (KeyError, TypeError, NotImplementedError, ZeroDivisionError):
        return None


def exact_gradients(run):
    """Those of step 1 in double precision, from the run's stored weights; None if that is too much or unknown."""
    step, parameters = run.steps[0], sum(math.prod(run.initial.shape(name)) for name in run.initial.tensors)
    if 6 * parameters * sum(map(len, step.targets)) > EXACT_FLOPS or run.flags.get("fp8", "off") != "off":
        return None
    if "num_experts_per_tok" in run.model:  # in double precision some token may choose another expert
        return None
    model = model_of(run, run.initial.all())
    try:
        with np.errstate(all="ignore"):
            return model and model.loss_and_gradients(*step.arrays())[1]
    except (KeyError, ValueError, IndexError):
        return None
