"""What two reference runs have in common and where they differ, in numbers. docs/reference-format.md states every rule.

The first run is A, the second, the reference, is B.
"""

import dataclasses
import math

import numpy as np

from .llama import Muon, clip_factor, norm_of
from .replays import exact_gradients, settings
from .runs import DIGITS, Run, quoted, shown

TOLERANCES = {"fp64": 1e-10, "fp32": 5e-6, "bf16": 2e-2}  # of ||a - b|| / ||b||, for a correct implementation
# The update of step 1 divides gradients by their magnitude: in fp32, (1 - beta2) / (1 - beta2^1) alone is off by up to
# 1.3e-5 for beta2 = 0.999. Its bound is this many tolerances; a wrong weight decay of 0.1 deviates by 0.1 x std.
UPDATE_TOLERANCES = 20
# bf16: a gradient may be this many times as far from the exact one as B's. Measured on Hugging Face's classes: up to
# 2.0 (docs/validate.md). The embedding's, where it is stored in bf16, may have been rounded after each of its n
# additions: it deviates by some sqrt(n) half units.
ROUNDINGS, HALF_UNIT = 3.0, 2.0**-9
CLIPPED_IN_BF16 = 3 * HALF_UNIT  # torch's clip_grad_norm_ rounds the norm, the factor and each product
CHECKED_STEPS = {"bf16": 4, "fp32": 4, "fp64": 2}  # then AdamW amplifies the rounding of the first steps
CHECKED_STEPS_GENTLE = 20
FLAGS = (
    "beta1 beta2 eps weight-decay clip z-loss mup mtp-loss aux-loss router-z-loss capacity-factor router-bias-rate"
).split()
MODEL = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers head_dim rms_norm_eps "
    "rope_theta tie_word_embeddings num_experts_per_tok moe_intermediate_size norm_topk_prob n_shared_experts n_group "
    "topk_group routed_scaling_factor first_k_dense_replace sliding_window layer_types "
    "train70b_layer_types train70b_sinks train70b_mtp kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim"
).split()


@dataclasses.dataclass
class Deviation:
    name: str  # a parameter, or "step 3"
    relative: float  # ||a - b|| / ||b||; in bf16 ||a - exact|| / ||exact||, where the exact gradients are known
    size: float  # ||b||
    bound: float = math.inf
    # a is best explained as multiple x b, up to rest = ||a - multiple b|| / ||multiple b||
    multiple: float = 1.0
    rest: float = 0.0

    @property
    def wrong(self):
        return not self.relative <= self.bound


def relative(difference, size):
    """0 if both are equal, infinite if only b is 0; NaN stays NaN."""
    return 0.0 if difference == 0 else difference / abs(size) if size else difference * math.inf


def is_router_bias(name):
    """What decides on a token's experts beside its scores (DeepSeek-V3): without gradient, and stored in fp32."""
    return name.endswith("e_score_correction_bias")


def norm(x):
    return float(np.sqrt(np.sum(x * x)))


def beyond(x, expected, rounding):
    """||x - expected|| without what rounding explains; NaN if x is not finite."""
    return norm(np.where(np.isfinite(x), np.maximum(np.abs(x - expected) - rounding, 0), np.nan))


def deviation(name, a, b, bound=math.inf):
    size = norm(b)
    multiple = float(np.sum(a * b)) / size**2 if size > 0 else 1.0
    rest = relative(norm(a - multiple * b), multiple * size)
    return Deviation(name, relative(norm(a - b), size), size, bound, multiple, rest)


def worst_first(deviations):
    """By how much the bound is exceeded; NaN first."""
    every = [(d, d.relative / (d.bound if 0 < d.bound < math.inf else 1)) for d in deviations]
    return [d for d, excess in sorted(every, key=lambda each: -math.inf if math.isnan(each[1]) else -each[1])]


def spacing(dtype, x):
    """The distance between adjacent numbers of a dtype at x."""
    return np.where(x == 0, 0, np.exp2(np.floor(np.log2(np.where(x == 0, 1, np.abs(x)))) + 1 - DIGITS[dtype]))


class Comparison:
    """problems: mismatched names, shapes, learning rates, a file that is missing; contradictions and not_checked do not
    decide. Lists of Deviations, worst first: weights, gradients, updates, biases (of routers), losses, norms.
    """

    def __init__(self, a, b, tolerance=None):
        self.a, self.b = a, b = Run(a), Run(b)
        self.dtype = max(a.dtype, b.dtype, key=list(DIGITS).index)
        self.tolerance = TOLERANCES[self.dtype] if tolerance is None else tolerance
        # In bf16 weights are rounded from fp32 master weights, which are computed as exactly as those of an fp32 run.
        self.masters = a.dtype == b.dtype == "bf16" and tolerance is None
        self.update_bound = UPDATE_TOLERANCES * (TOLERANCES["fp32"] if self.masters else self.tolerance)
        self.stated = settings(b)  # B's optimizer, or None
        self.problems, self.not_checked = [], []
        self.names = self.pair("initial"), self.pair("gradients")
        same = a.dtype == b.dtype
        self.weights = worst_first(
            deviation(name, a.initial.read(name), b.initial.read(name), 0 if same else self.tolerance)
            for name in self.names[0]
        )
        self.exact = None
        if self.dtype == "bf16" and tolerance is None:
            self.exact = exact_gradients(b)
            if self.exact is None:
                known = f"the exact ones are not known here; the bound is {self.tolerance:g}"
                self.not_checked.append(f"gradients against their own rounding: {known}")
        self.norm_bound = 0.0  # what these gradients may add to their norm, with B's own rounding
        self.gradients = worst_first(map(self.gradient, self.names[1]))
        if self.exact:
            self.norm_bound = math.sqrt(self.norm_bound) / norm_of(self.exact)
        self.compare_updates()
        self.compare_second_update()
        self.compare_steps()
        self.compare_settings()

    def pair(self, file):
        """The names of the tensors that both runs have in one shape; the others are problems."""
        a, b = getattr(self.a, file), getattr(self.b, file)
        names = []
        for name in a.tensors:
            if name not in b.tensors:
                hint = ""
                for prefix in ("module.", "_orig_mod.", "_fsdp_wrapped_module."):
                    if name.startswith(prefix) and name.replace(prefix, "") in b.tensors:
                        hint = f': strip "{prefix}" from the names'
                self.problems.append(f"{quoted(name)} is in {shown(a.path)} only{hint}")
            elif a.shape(name) != b.shape(name):
                shapes = f"{a.shape(name)} in {shown(a.path)} and {b.shape(name)} in {shown(b.path)}"
                self.problems.append(f"{quoted(name)} is {shapes}")
            else:
                names.append(name)
        self.problems += [f"{quoted(name)} is in {shown(b.path)} only" for name in b.tensors if name not in a.tensors]
        return sorted(names)

    def gradient(self, name):
        a, b = self.a.gradients.read(name), self.b.gradients.read(name)
        result = deviation(name, a, b, self.tolerance)
        exact = self.exact.get(name) if self.exact else None
        if exact is None or exact.shape != a.shape:
            return result
        least = HALF_UNIT  # B may have been lucky
        if "embed_tokens" in name and self.a.gradients.dtype(name) == "bf16":
            least *= math.sqrt(np.bincount(self.b.steps[0].arrays()[0].ravel()).max())
        of_b = relative(norm(b - exact), norm(exact))
        result.relative = relative(norm(a - exact), norm(exact))
        result.bound = ROUNDINGS * max(of_b, least)
        self.norm_bound += ((result.bound + of_b) * norm(exact)) ** 2
        return result

    def rounding(self, x, y):
        """Of stored weights: half a spacing where they are rounded from master weights, else one."""
        return (0.5 if self.masters else 1.0) * spacing(self.dtype, np.fmax(np.abs(x), np.abs(y)))

    def rounding_of_clipped(self, name):
        """What A's weight after step 1 may be off by because it clips in bf16: CLIPPED_IN_BF16."""
        factor, eps = clip_factor(self.a.steps[0].grad_norm, self.stated.clip), self.stated.eps
        if not self.masters or factor == 1 or self.a.gradients.dtype(name) != "bf16":
            return 0.0
        size = np.abs(self.a.gradients.read(name)) * factor
        return self.b.steps[0].lr * CLIPPED_IN_BF16 * size * eps / (size + eps) ** 2

    def expected_update(self, run, name):
        """The weight after step 1 that the run's own gradients give."""
        lr, mup = self.b.steps[0].lr, self.b.flag("mup", 0)
        g, w = run.gradients.read(name), run.initial.read(name)
        decay, size = self.stated.decay if w.ndim == 2 else 0.0, np.abs(g)
        if mup > 0 and ".layers." in name and w.ndim == 2:  # muP: the matrices of the blocks
            lr, decay = lr * mup / self.b.model["hidden_size"], decay / (mup / self.b.model["hidden_size"])
        if run.optimizer() == "muon" and Muon.takes(name, w):
            return Muon.moved(w, g, lr, decay)
        factor = clip_factor(run.steps[0].grad_norm, self.stated.clip)
        u = np.divide(g, size + self.stated.eps / factor, out=np.zeros_like(g), where=size > 0)
        return w - lr * (u + decay * w)

    def forward_wrong(self):
        """Whether the loss of step 1 is: the first number of a step."""
        return any(d.wrong for d in self.losses if d.name == "step 1")

    def compare_updates(self):
        """The weights after step 1: by how much A's are not what A's own gradients give, beyond rounding, relative to
        B's update. An element of the gradient that is almost 0 moves its weight by a full lr whatever its sign.
        """
        a, b = self.a, self.b
        missing = [run for run in (a, b) if run.after_step_1 is None]
        self.updates, self.biases = [], []
        self.check_updates = not missing and a.optimizer() == b.optimizer() in ("adamw", "muon")
        missing = [f"{shown(run.folder)}/after_step_1.safetensors is missing" for run in missing if run.version > 1]
        self.problems += missing
        if not self.check_updates:
            self.not_checked.append("the weights after step 1")
        if a.after_step_1 is None or b.after_step_1 is None:
            return
        for name in self.pair("after_step_1"):
            files = a.initial, b.initial, a.gradients, b.gradients, a.after_step_1
            shapes, bias = {file.shape(name) for file in files if name in file.tensors}, is_router_bias(name)
            if len(shapes) == 1 and all(name in names for names in self.names[: 1 if bias else 2]):  # else a problem
                (self.biases if bias else self.updates).append(self.update_deviation(name))
        self.updates, self.biases = worst_first(self.updates), worst_first(self.biases)
        if self.dtype == "bf16" and self.biases:  # one token that goes elsewhere may turn a bias round
            self.not_checked.append("routers' biases after step 1")
            self.biases = []

    def update_deviation(self, name):
        a, b = self.a, self.b
        x, y, before = (file.read(name) for file in (a.after_step_1, b.after_step_1, b.initial))
        size = norm(y - before)
        if is_router_bias(name):  # beyond rounding to fp32, relative to B's move if B has moved it
            left, size = beyond(x, y, spacing("fp32", y)), size or norm(y)
            return Deviation(name, relative(left, size), size, max(self.tolerance, TOLERANCES["fp32"]))
        expected, rounding = y, self.rounding(x, y)
        if self.stated and math.isfinite(b.steps[0].lr):
            expected, rounding = self.expected_update(a, name), rounding + self.rounding_of_clipped(name)
            if not self.masters:  # else the nearest bf16 to that
                expected = y + (expected - self.expected_update(b, name))
        return Deviation(name, relative(beyond(x, expected, rounding), size), size, self.update_bound)

    def compare_second_update(self):
        """Version 3: A's weights after step 2 against what B's AdamW makes of A's own two gradients: the moments."""
        a, b = self.a, self.b
        self.updates_2, optimizer = [], settings(b)
        if not (a.gradients_2 and a.after_step_2 and optimizer and self.check_updates) or b.flag("mup", 0) > 0:
            return
        names = [name for name in self.names[1] if name in self.names[0] and name in a.gradients_2.tensors]
        weights = {name: a.initial.read(name) for name in names}
        # Clipped in bf16: numerator and denominator are off by at most this share of what |g| gives.
        doubt, nothing = settings(b), {name: 0 * w for name, w in weights.items()}
        for gradients, step in ((a.gradients, b.steps[0]), (a.gradients_2, b.steps[min(1, len(b.steps) - 1)])):
            before, g = weights, {name: gradients.read(name) for name in names}
            weights = optimizer.step(weights, g, step.lr)
            of_size = doubt.step(nothing, {name: np.abs(x) for name, x in g.items()}, step.lr)
        for name in names:
            there = name in a.after_step_2.tensors
            stored = a.after_step_2.read(name) if there else np.full(weights[name].shape, np.nan)
            rounding = (1 if self.masters else 2) * self.rounding(stored, weights[name])
            if self.masters and optimizer.clip > 0:
                rounding = rounding + 2 * CLIPPED_IN_BF16 * np.abs(of_size[name])
            left, size = beyond(stored, weights[name], rounding), norm(weights[name] - before[name])
            self.updates_2.append(Deviation(name, relative(left, size), size, self.update_bound))
        self.updates_2 = worst_first(self.updates_2)

    def compare_steps(self):
        a, b = self.a, self.b
        self.steps = min(len(a.steps), len(b.steps))
        checked = CHECKED_STEPS[self.dtype]
        if self.dtype == "fp64" and a.gentle() and b.gentle():
            checked = CHECKED_STEPS_GENTLE
        common = list(zip(a.steps, b.steps))
        self.same_tokens = all(x.tokens == y.tokens for x, y in common)
        self.same_targets = all(x.targets == y.targets for x, y in common)
        self.samples = sum(len(x.tokens) for x, _ in common)
        for i, (x, y) in enumerate(common):
            if abs(x.lr - y.lr) > 1e-6 * abs(y.lr):
                self.problems.append(self.both(f"lr of step {i + 1} is", f"{x.lr:.9g}", f"{y.lr:.9g}"))

        def of_steps(key, bound):
            """Those that are judged, and the later ones."""
            pairs = [(getattr(x, key), getattr(y, key)) for x, y in common]
            every = [Deviation(f"step {i}", relative(abs(x - y), y), y, bound) for i, (x, y) in enumerate(pairs, 1)]
            return worst_first(every[:checked]), worst_first(every[checked:])

        self.losses, self.later_losses = of_steps("loss", self.tolerance)
        self.norms, self.later_norms = of_steps("grad_norm", max(self.tolerance, self.norm_bound))
        if len(a.steps) != len(b.steps):
            has = f"{shown(a.folder)} has {len(a.steps)}, {shown(b.folder)} has {len(b.steps)}"
            self.not_checked.append(f"all but the first {self.steps} steps: {has}")
        if self.steps == 1:
            self.not_checked.append("moments, learning rates, zeroed gradients: they show from step 2 on")

    def both(self, what, x, y):
        return f"{what} {x} in {shown(self.a.folder)}, {y} in {shown(self.b.folder)}"

    def compare_settings(self):
        """Settings that change the numbers, where both runs state them."""
        a, b = self.a, self.b
        flags = [(name, a.flag(name), b.flag(name)) for name in FLAGS]
        pairs = [(name, f"{x:g}", f"{y:g}") for name, x, y in flags if abs(x - y) > 1e-6 * abs(y)]
        keys = [key for key in MODEL if key in a.model and key in b.model and a.model[key] != b.model[key]]
        pairs += [(key, a.model[key], b.model[key]) for key in keys]
        self.contradictions = [self.both(f"{name} is", x, y) for name, x, y in pairs]

    def differences(self):
        """One line per kind that exceeds its bound; none: the runs agree."""
        lines = []
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            lines.append(self.problems[0] + more)
        if not self.same_tokens:
            lines.append("tokens: the runs trained on different tokens")
        elif not self.same_targets:
            lines.append("targets: the runs counted different targets")
        for kind, deviations, where in (
            ("initial weight", self.weights, " before step 1"),
            ("gradient", self.gradients, " at step 1"),
            ("weight after step 1", self.updates if self.check_updates else [], ""),
            ("router's bias after step 1", self.biases, ""),
            ("weight after step 2", self.updates_2, ", from the run's own gradients"),
            ("loss", self.losses, ""),
            ("gradient norm", self.norms, ""),
        ):
            wrong = [d for d in deviations if d.wrong]
            if wrong:
                of = " from the exact one" if kind == "gradient" and self.exact else ""
                exceed = f"more than {wrong[0].bound:g} ({len(wrong)} of {len(deviations)} exceed it)"
                lines.append(f"{kind}: {wrong[0].name}{where} by {wrong[0].relative:.3g}{of}, {exceed}")
        return lines
