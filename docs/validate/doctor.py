"""Which known fault explains a run's numbers to rounding? Nothing is learnt and no threshold is tuned: a fault is named
only if, computed in double precision from the run's own weights and tokens, it gives all of its numbers within
compare's bounds. Otherwise the facts stand, and it is said that no known fault explains them.

Tried in the order of a step: the weights of the targets (by least squares from the head's gradient), conventions and
parallel faults (replays.py), the update (facts.py), what lasts from step to step (below).
"""

import math

import numpy as np

from . import activations, facts
from .comparison import model_of, norm, relative, settings
from .llama import AdamW, Llama, clip_factor, norm_of
from .replays import KNOWN

SAMPLES = 4096  # targets whose weights are solved for: a system of that size
NEAR = 100  # bounds, up to which a fault that explains nothing is named among the nearest


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

    def rest(self, loss, gradients, partial=False):
        """The largest deviation of A's loss and gradients of step 1 from these, in bounds. inf: not these numbers."""
        if not partial and set(gradients) != set(self.measured):
            return math.inf
        worst = relative(abs(self.a.steps[0].loss - loss), loss) / self.c.tolerance if loss is not None else 0.0
        for name, g in gradients.items():
            if not np.isfinite(g).all():
                return math.inf
            worst = max(worst, relative(norm(self.measured[name] - g), norm(g)) / self.bounds[name])
        return worst if math.isfinite(worst) else math.inf

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

    def solve_targets(self):
        """(B, T): how often A counts each target, 1 if as it should; None: its head's gradient is not such a sum."""
        name, rows = self.rows()
        targets = self.all_targets()
        if targets.size > SAMPLES or name not in self.measured or len(self.measured[name][rows]) == 0:
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

            loss, gradients = self.model(Weighted).loss_and_gradients(self.tokens, self.all_targets())
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
    def after_head(self, loss, gradients):  # ends a replay that is not A's after a third of the work
        head = {name: g for name, g in gradients.items() if name == "lm_head.weight"}
        rest = self.rest(loss, head, partial=True)
        if not rest <= 1:
            raise Rejected(None if self.same_as_right(loss, head) else rest)

    def ends_early(self, model):
        """Makes a replay end at its first gradient that is not A's, if gradients are complete when they are added."""
        add, tied = model.add, self.b.model.get("tie_word_embeddings")

        def checked(name, gradient):
            add(name, gradient)
            one = {name: model.grad[name]}
            if name not in self.measured or tied and "embed_tokens" in name:
                return
            rest = self.rest(None, one, partial=True)
            if not rest <= 1:
                raise Rejected(None if self.same_as_right(None, one) else rest)

        model.add = checked

    def explain_replays(self):
        for name, kind in KNOWN.items():
            model = self.model(kind)
            model.after_head = self.after_head
            if kind.whole_head:
                self.ends_early(model)
            try:
                result = model.loss_and_gradients(self.tokens, self.reference_targets)
            except Rejected as rejected:
                if rejected.args[0] is not None:
                    self.rests.append((rejected.args[0], name))
                continue
            except (ValueError, IndexError, KeyError, ZeroDivisionError):
                continue  # a fault that this model cannot have
            if result and not self.same_as_right(*result):
                self.rests.append((self.rest(*result), name))
        self.rests.sort()
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
    def later(self):
        """{name: losses and norms of the common steps} of faults that step 1 does not show."""
        o = settings(self.b)
        rates = [step.lr for step in self.a.steps[: self.c.steps]]

        def train(optimizer=None, rates=rates, accumulate=False, late=False):
            # late: the forward pass uses the weights before the last update
            in_place = o.clip if accumulate == "clipped" else 0.0
            optimizer = optimizer or of(clip=0.0 if in_place else o.clip)
            weights, before, total, numbers = dict(self.weights), dict(self.weights), {}, []
            for step, lr in zip(self.a.steps, rates):
                model = self.model(weights=before if late else weights)
                loss, g = model.loss_and_gradients(*step.arrays())
                total = {name: total.get(name, 0) + g[name] for name in g} if accumulate else g
                numbers += [loss, norm_of(total)]
                factor = clip_factor(numbers[-1], in_place)
                total = {name: g * factor for name, g in total.items()}
                before, weights = weights, optimizer.step(weights, total, lr)
            return numbers

        class NoMoments(AdamW):
            def step(self, *args):
                self.m, self.v, self.t = {}, {}, 0
                return super().step(*args)

        class StuckCount(AdamW):
            def step(self, *args):
                self.t = 0
                return super().step(*args)

        class Nothing(AdamW):
            def step(self, weights, *_):
                return weights

        def of(kind=AdamW, **changed):
            values = {"beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "decay": o.decay, "clip": o.clip, **changed}
            return kind(**values)

        faults = {
            "gradients are not zeroed between steps": lambda: train(accumulate=True),
            "gradients are not zeroed between steps, after clipping in place": lambda: train(accumulate="clipped"),
            "the forward pass uses weights that are one update old": lambda: train(late=True),
            "the learning rate is late by one step": lambda: train(rates=[rates[0]] + rates[:-1]),
            "the learning rate is early by one step": lambda: train(rates=rates[1:] + rates[-1:]),
            "the learning rate is that of step 1 in every step": lambda: train(rates=rates[:1] * len(rates)),
            "the moments are not kept": lambda: train(of(NoMoments)),
            "the bias correction always is that of step 1": lambda: train(of(StuckCount)),
            "no update reaches the forward pass": lambda: train(of(Nothing)),
            "clipping is not applied": lambda: train(of(clip=0.0)),
        }
        for beta2 in (0.9, 0.95, 0.98, 0.99, 0.999):
            if abs(beta2 - o.beta2) > 1e-9:
                faults[f"beta2 is {beta2}"] = lambda beta2=beta2: train(of(beta2=beta2))
        for beta1 in (0.0, 0.8, 0.9, 0.95):
            if abs(beta1 - o.beta1) > 1e-9:
                faults[f"beta1 is {beta1}"] = lambda beta1=beta1: train(of(beta1=beta1))
        faults["beta1 and beta2 are exchanged"] = lambda: train(of(beta1=o.beta2, beta2=o.beta1))
        return train, faults

    def explain_later(self):
        if settings(self.b) is None or not self.b.adamw() or self.b.flag("mup", 0) > 0:
            return
        if not any(d.wrong for each in (self.c.losses, self.c.norms) for d in each):
            self.say("losses and norms are right: of step 1 and later ones nothing is left to be explained")
            return
        train, faults = self.later()
        judged = {d.name for d in self.c.losses}
        measured = [
            x
            for i, step in enumerate(self.a.steps[: self.c.steps])
            if f"step {i + 1}" in judged
            for x in (step.loss, step.grad_norm)
        ]

        def rest(numbers):
            deviations = [relative(abs(a - b), b) for a, b in zip(measured, numbers)]
            return max(deviations) / self.c.tolerance if all(map(math.isfinite, deviations)) else math.inf

        right = train()
        of_b = [x for step in self.b.steps[: len(measured) // 2] for x in (step.loss, step.grad_norm)]
        drift = max(relative(abs(x - y), y) for x, y in zip(right, of_b)) / self.c.tolerance
        if not drift <= 1:
            self.say("what lasts from step to step: not tried, since rounding grows too fast in these steps")
            return
        self.rests = sorted((rest(run()), name) for name, run in faults.items())
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
            self.right = model.loss_and_gradients(self.tokens, self.reference_targets)
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
