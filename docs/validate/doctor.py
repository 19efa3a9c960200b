"""Which known fault explains a run's numbers to rounding? Nothing is learnt and no threshold is tuned: a fault is named
only if, computed in double precision from the run's own weights and tokens, it gives all of its numbers within
compare's bounds. Otherwise the facts stand, and it is said that no known fault explains them.

Tried in the order of a step: the weights of the targets (by least squares from the head's gradient), conventions and
parallel faults (replays.py), the update (facts.py), what lasts from step to step (later.py).
"""

import concurrent.futures
import math
import os

import numpy as np

from . import activations, facts, later
from .comparison import model_of, norm, relative, settings
from .llama import Llama, clip_factor
from .replays import KNOWN

SAMPLES = 4096  # targets whose weights are solved for: a system of that size
NEAR = 100  # bounds, up to which a fault that explains nothing is named among the nearest
SINGLE = 1e-3  # a replay in single precision that is off by more is not A's; closer ones run again in double


class Rejected(Exception):
    """A replay that is not A's; the argument is its deviation so far, in bounds, None if it is right so far."""


class Doctor:
    def __init__(self, c):
        self.c, self.a, self.b, self.rests = c, c.a, c.b, []
        self.tokens, _ = self.a.steps[0].arrays()
        self.reference_targets = self.b.steps[0].arrays()[1]
        self.weights = self.a.initial.all()
        self.measured = {name: self.a.gradients.read(name) for name in c.names[1]}
        self.bounds = {d.name: d.bound for d in c.gradients}
        self.lines, self.names = [], []

    def model(self, kind=Llama, weights=None):
        return model_of(self.b, dict(weights or self.weights), kind)

    def deviations(self, loss, gradients):
        """(deviation, bound) of A's loss and gradients of step 1 from these."""
        if loss is not None:
            yield relative(abs(self.a.steps[0].loss - loss), loss), self.c.tolerance
        for name, g in gradients.items():
            if name in self.bounds:
                yield relative(norm(self.measured[name] - g), norm(g)), self.bounds[name]

    def rest(self, loss, gradients):
        """The largest of them, in bounds. inf: not these parameters, or not finite."""
        if set(gradients) != set(self.measured):
            return math.inf
        rests = [deviation / bound for deviation, bound in self.deviations(loss, gradients)]
        return max(rests) if all(map(math.isfinite, rests)) else math.inf

    def say(self, text):
        self.lines.append(text)

    def name(self, faults):
        """Those that explain everything; more than one cannot be told apart here."""
        if faults:
            self.names.append(" or ".join(faults))

    # ---- weights of targets
    def rows(self):
        """(name, rows): what part of the head's gradient is the head's alone."""
        if not self.b.model.get("tie_word_embeddings"):
            return "lm_head.weight", slice(None)
        vocabulary = self.weights["model.embed_tokens.weight"].shape[0]
        absent = np.ones(vocabulary, bool)
        absent[np.unique(self.tokens)] = False
        return "model.embed_tokens.weight", np.flatnonzero(absent)

    def head_is_right(self):
        name, rows = self.rows()
        a, right = self.measured[name][rows], self.right[1][name][rows]
        return len(right) > 0 and relative(norm(a - right), norm(right)) <= self.bounds[name]

    def solve_targets(self):
        """(B, T): how often A counts each target, 1 if as it should; None: its head's gradient is right, or no such sum.
        """
        name, rows = self.rows()
        targets = self.all_targets()
        if targets.size > SAMPLES or self.head_is_right() or len(self.measured[name][rows]) == 0:
            return None
        model = self.model()
        n, _ = model.forward(self.tokens)
        logits, _ = model.head(n)
        _, d = model.loss_of_logits(logits, targets)
        d = d.reshape(targets.size, -1)[:, rows] * model.logit_scale
        h = n.reshape(targets.size, -1)
        gram = (d @ d.T) * (h @ h.T)
        right = np.einsum("tv,ve,te->t", d, self.measured[name][rows], h, optimize=True)
        values, vectors = np.linalg.eigh(gram)  # of least norm among those that fit best
        vectors = vectors[:, values > 1e-13 * values[-1]]
        weights = vectors @ ((vectors.T @ right) / values[-vectors.shape[1] :])
        rest = norm((d * weights[:, None]).T @ h - self.measured[name][rows])
        if not relative(rest, norm(self.measured[name][rows])) <= self.bounds[name]:
            return None
        counted = (self.reference_targets >= 0).sum()
        return weights.reshape(targets.shape) * counted

    def all_targets(self):
        """Targets without masks: each token's next one."""
        return np.array(self.a.steps[0].tokens)[:, 1:]

    def explain_targets(self):
        weights = self.solve_targets()
        if weights is None:
            return False
        right = self.reference_targets >= 0
        for candidate, words, name in self.patterns(weights, right):
            if (candidate == right).all():
                continue

            class Weighted(Llama):
                def target_weights(self, targets, candidate=candidate):
                    return candidate / right.sum()

            model = self.model(Weighted)
            model.check = lambda name, gradient: self.judge(None, {name: gradient})
            try:
                loss, gradients = model.loss_and_gradients(self.tokens, self.all_targets())
            except Rejected:
                continue
            if not self.rest(None, gradients) <= 1 or self.same_as_right(None, gradients, 1):
                continue
            self.say(f"weights of targets, 1 is right, from the head's gradient: {words}")
            of_loss = relative(abs(self.a.steps[0].loss - loss), loss) <= self.c.tolerance
            other = "is neither that of these weights nor right" if self.c.forward_wrong() else "is right"
            self.say(
                "  they give every gradient to rounding; A's loss " + ("counts the same" if of_loss else other)
            )
            if name:
                self.names.append(name)
            return True
        return False

    def patterns(self, w, right):
        """(weights, in words, a name or None), the simplest first. The least squares leave open how equal tokens with
        equal pasts share their weight, so that patterns are made from medians; the caller holds them to all gradients.
        """
        samples, length = w.shape

        def nice(x):
            near = float(facts.fractions.Fraction(float(x)).limit_denominator(64))
            return near if abs(near - x) <= 1e-3 * max(1.0, abs(x)) else float(x)

        def median(values):
            return nice(np.median(values)) if len(values) else 1.0

        for by, word in ((1, "late"), (-1, "early")):
            for first in (True, False):
                moved = np.full_like(right, first)
                if by == 1:
                    moved[:, 1:] = right[:, :-1]
                else:
                    moved[:, :-1] = right[:, 1:]
                for counted in (right.sum(), moved.sum()):
                    yield (
                        moved * (right.sum() / counted),
                        self.set_words(moved, right),
                        f"the mask of targets is {word} by one position",
                    )
        if not right.all():
            for level in (1.0, right.sum() / right.size):
                yield (
                    np.full(right.shape, level),
                    f"all of the {int((~right).sum())} targets that should not count do",
                    "the mask of targets is ignored",
                )
        for groups in (g for g in range(2, samples + 1) if samples % g == 0):
            counts = np.repeat(right.sum(axis=1).reshape(groups, -1).sum(axis=1), samples // groups)
            if counts.all():
                exact = right.sum() / groups / counts
                yield (
                    exact[:, None] * right,
                    "by sample: " + facts.in_groups(exact),
                    f"mean of means: each of {groups} parts of the batch divides by its own number of targets",
                )
        values = np.array([median(w[i][right[i]]) for i in range(samples)])
        kept = values != 0
        name = None
        if not kept.all() and len(set(values[kept])) == 1:
            name = (
                f"only samples {facts.ranges(np.flatnonzero(kept))} of {samples} count, {values[kept][0]:g} times: "
                "others are lost, by data-parallel ranks whose gradients are not reduced or that read the same data, "
                "or by micro-batches that are not accumulated"
            )
        yield values[:, None] * right, "by sample: " + facts.in_groups(values), name
        values = np.array([median(w[:, t][right[:, t]]) for t in range(length)])
        yield values[None, :] * right, "by position: " + facts.in_groups(values), None
        for parts in (2, 4, 8):
            if length % parts == 0:
                counts = np.stack([each.sum(axis=1) for each in np.split(right, parts, axis=1)], axis=1)
                exact = right.sum() / parts / np.repeat(np.maximum(counts.sum(axis=0), 1), length // parts)
                yield (
                    exact[None, :] * right,
                    "by position: " + facts.in_groups(exact),
                    f"mean of means: each of {parts} parts of the sequence divides by its own number of targets",
                )
        yield w, f"from {w.min():.3g} to {w.max():.3g}", None

    @staticmethod
    def set_words(counted, right):
        return (
            f"{int((counted & ~right).sum())} count that should not, {int((right & ~counted).sum())} do not that should"
        )

    # ---- replays
    def judge(self, loss, gradients, slack=0.0):
        """Ends a replay at its first number that is not A's."""
        found = list(self.deviations(loss, gradients))
        if not all(deviation <= bound + slack for deviation, bound in found):
            rest = max(deviation / bound for deviation, bound in found)
            raise Rejected(None if self.same_as_right(loss, gradients) else rest)

    def run_replay(self, kind, weights, slack=0.0):
        """The loss and the gradients of a fault; None: this model cannot have it."""
        if kind.only_backward:
            model, loss, backward = self.whole, self.right[0], self.backward
            model.__class__ = kind  # what the backward pass calls is looked up when it runs
            self.judge(loss, {}, slack)
        else:
            model = self.model(kind, weights)
            loss, backward = model.loss(self.tokens, self.reference_targets)

        model.check = lambda name, gradient: self.judge(loss, {name: gradient}, slack)
        gradients = model.gradients(backward)
        return gradients and (loss, gradients)

    def logits(self, kind):
        """The loss and the logits of one sample."""
        model = self.model(kind)
        model.activations = {}
        loss, _ = model.loss(self.tokens[self.sample], self.reference_targets[self.sample])
        return loss, model.activations["lm_head"]

    def is_near(self, kind):
        """Cheap tests of a fault of the forward pass: Rejected, or whether it changes one sample of this batch."""
        (loss, logits), (right_loss, right) = self.logits(kind), self.right_logits
        moved = max(abs(loss - right_loss), relative(norm(logits - right), norm(right)))
        if moved > NEAR * self.c.tolerance and self.forward_is_right:
            raise Rejected(moved / self.c.tolerance)
        if moved > 0:
            try:
                self.run_replay(kind, self.single, SINGLE)
            except Rejected as rejected:
                if rejected.args[0] is None or rejected.args[0] < math.inf:  # not an overflow
                    raise
        return moved > 0

    def replay(self, kind):
        """The rest of a fault; None: it changes nothing here, or this model cannot have it."""
        try:
            with np.errstate(all="ignore"):  # of this thread
                if not kind.only_backward and not self.is_near(kind):
                    return None
                result = self.run_replay(kind, self.weights)
                return None if not result or self.same_as_right(*result) else self.rest(*result)
        except Rejected as rejected:
            return rejected.args[0]
        except (ValueError, IndexError, KeyError, ZeroDivisionError):
            return None

    def explain_replays(self):
        self.forward_is_right = not self.c.forward_wrong() and self.head_is_right()
        self.sample = slice(0, 1)
        if self.b.document_token is not None:  # one with documents, if there are any
            i = int(np.argmax((self.tokens[:, :-1] == self.b.document_token).sum(axis=1)))
            self.sample = slice(i, i + 1)
        self.right_logits = self.logits(Llama)
        self.single = {name: w.astype(np.float32) for name, w in self.weights.items()}
        backward = {name: kind for name, kind in KNOWN.items() if kind.only_backward}
        forward = {name: kind for name, kind in KNOWN.items() if not kind.only_backward}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            rests = dict(zip(forward, pool.map(self.replay, forward.values())))
        for name, kind in backward.items():  # one after another, on the right model
            rests[name] = self.replay(kind)
        self.rests = sorted((rest, name) for name, rest in rests.items() if rest is not None)
        self.name([name for rest, name in self.rests if rest <= 1])

    def same_as_right(self, loss, gradients, share=0.1):
        """Whether this fault changes nothing here, within a share of the bounds: it then explains nothing."""
        right_loss, right = self.right
        of_loss = 0.0 if loss is None else relative(abs(loss - right_loss), right_loss)
        return of_loss <= self.c.tolerance * share and all(
            relative(norm(gradients[name] - right[name]), norm(right[name])) <= self.bounds.get(name, 0) * share
            for name in right
            if name in gradients
        )

    # ---- what lasts from step to step
    def explain_later(self):
        if settings(self.b) is None or not self.b.adamw() or self.b.flag("mup", 0) > 0:
            return
        if not any(d.wrong for each in (self.c.losses, self.c.norms) for d in each):
            self.say("losses and norms are right: of step 1 and later ones nothing is left to be explained")
            return
        judged = {d.name for d in self.c.losses}
        steps = [i for i in range(self.c.steps) if f"step {i + 1}" in judged]

        def rest(numbers, of):
            """The largest deviation from a run, in tolerances, up to the first that is more than 1."""
            worst = 0.0
            with np.errstate(all="ignore"):  # of this thread
                for i, number in zip(range(2 * len(steps)), numbers):
                    step = of.steps[steps[i // 2]]
                    x = step.grad_norm if i % 2 else step.loss
                    worst = max(worst, relative(abs(x - number), number) / self.c.tolerance)
                    if not worst <= 1:
                        break
            return worst if math.isfinite(worst) else math.inf

        faults = later.faults(self)
        if not rest(faults.pop("right")(), self.b) <= 1:
            self.say("what lasts from step to step: not tried, since rounding grows too fast in these steps")
            return
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            rests = pool.map(lambda fault: rest(fault(), self.a), faults.values())
            self.rests = sorted(zip(rests, faults))
        self.name([name for r, name in self.rests if r <= 1])

    def cause_of_multiple(self):
        """Of gradients that are all one multiple of the reference's."""
        o, multiple = settings(self.b), facts.multiples(self.c)[2]
        clipped = clip_factor(self.b.steps[0].grad_norm, o.clip) if o else 1.0
        if clipped < 1 and abs(multiple / clipped - 1) <= 4 * self.c.tolerance:
            return "they were recorded after clipping; record.gradients belongs before it"
        return "a sum for a mean over ranks or micro-batches, or the reverse"

    def run(self):
        c = self.c
        if c.problems or any(d.wrong for d in c.weights) or not (c.same_tokens and c.same_targets):
            self.say("the runs do not begin alike: see the lines above")
            return
        model = self.model()
        try:
            model.activations = {} if self.a.activations else None
            loss, self.backward = model.loss(self.tokens, self.reference_targets)
            self.whole, self.right = model, (loss, model.gradients(self.backward))
        except (AttributeError, KeyError, ValueError, IndexError):
            self.say("B is no model that docs/validate/llama.py computes: nothing could be tried")
            return
        of_b = max(
            relative(norm(self.b.gradients.read(name) - g), norm(g)) / self.bounds[name]
            for name, g in self.right[1].items()
            if name in self.bounds
        )
        if not of_b <= 1:
            self.say("B's gradients are not those of its equations (fp8?): nothing could be tried")
            return
        if self.a.activations:
            self.say(activations.first_wrong(self.a.activations, model, self.c.tolerance))
        if c.forward_wrong() or any(d.wrong for d in c.gradients):
            scaled = facts.one_multiple(c)
            if scaled and not c.forward_wrong():
                self.names.append(f"{scaled}: {self.cause_of_multiple()}")
            elif not self.explain_targets():
                self.explain_replays()
        elif any(d.wrong for d in c.updates) and c.check_updates:
            self.name(facts.update(c)[1])
        elif any(d.wrong for d in c.biases):
            self.name(facts.router_biases(c)[1])
        else:
            self.explain_later()

    def report(self):
        self.run()
        lines = [f"  {line}" for line in self.lines]
        for name in self.names:
            lines.append(f"  explains A's numbers to rounding: {name}")
        if not self.names:
            lines.append("  no known fault explains A's numbers")
        if self.rests:
            near = [f"{rest:.3g} ({name})" for rest, name in self.rests[:3] if rest <= NEAR]
            if len(near) < len(self.rests):
                near.append(f"{'others' if near else 'all'} from {self.rests[len(near)][0]:.3g} on")
            lines.append(f"  nearest of {len(self.rests)} faults that were tried, 1 is the bound: {'; '.join(near)}")
        return "diagnosis:\n" + "\n".join(lines) + "\n"


def report(c):
    """The lines of --diagnose for runs that differ."""
    return Doctor(c).report()
