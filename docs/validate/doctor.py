"""Which known fault explains a run's numbers to rounding? Nothing is learnt and no threshold is tuned: a fault is named
only if, computed in double precision from the run's own weights and tokens, it gives all of its numbers within
compare's bounds. Otherwise the facts stand, and it is said that no known fault explains them.

Tried in the order of a step: the weights of the targets (targets.py), the faults of rules.py: of the forward and the
backward pass, of the update (facts.py), of what lasts from step to step.
"""

import concurrent.futures
import math
import os

import numpy as np

from . import activations, facts, rules, targets
from .comparison import norm, relative
from .llama import clip_factor, norm_of
from .replays import model_of, planted, settings

NEAR = 100  # bounds, up to which a fault that explains nothing is named among the nearest


class Rejected(Exception):
    """A replay that is far from A's; the argument is its deviation so far, in bounds, None if it is right so far."""


class Doctor:
    def __init__(self, c):
        self.c, self.a, self.b, self.rests = c, c.a, c.b, []
        self.tokens, _ = self.a.steps[0].arrays()
        self.reference_targets = self.b.steps[0].arrays()[1]
        self.weights = self.a.initial.all()
        self.measured = {name: self.a.gradients.read(name) for name in c.names[1]}
        self.bounds = {d.name: d.bound for d in c.gradients}
        self.lines, self.names = [], []

    def model(self, fault=lambda model: {}, weights=None):
        return planted(model_of(self.b, dict(weights or self.weights)), fault)

    def judged(self, rests, names):
        """Names the faults that explain everything; more than one cannot be told apart here."""
        self.rests = sorted(pair for pair in zip(rests, names) if pair[0] is not None)
        self.name([name for rest, name in self.rests if rest <= 1])

    def name(self, faults):
        self.names += [" or ".join(faults)] if faults else []

    # ---- one replay
    def rest(self, of, loss, gradients):
        """By how many bounds these deviate, at most, from the loss and the gradients `of` step 1; infinite of NaN."""
        rests = [] if loss is None else [relative(abs(of[0] - loss), loss) / self.c.tolerance]
        for name in [name for name in gradients if name in self.bounds]:
            g = gradients[name]
            rests.append(relative(norm(of[1][name] - g), norm(g)) / self.bounds[name])
        return max(rests, default=0.0) if all(map(math.isfinite, rests)) else math.inf

    def judge(self, loss, gradients):
        """The rest of A's loss and gradients. Rejects a replay at the first that is far from A's."""
        rest = self.rest((self.a.steps[0].loss, self.measured), loss, gradients)
        if not rest <= NEAR:
            raise Rejected(None if self.rest(self.right, loss, gradients) <= 0.1 else rest)
        return rest

    def replay(self, model, loss, backward):
        """The rest of a model's numbers. Rejected: they are the right ones, or one of them is far from A's."""
        gradients = model.gradients(backward, lambda name, gradient: self.judge(loss, {name: gradient}))
        if self.rest(self.right, loss, gradients) <= 0.1:
            raise Rejected(None)
        return self.judge(loss, gradients) if set(gradients) == set(self.measured) else math.inf

    def logits(self, model):
        """The loss and the logits of one sample."""
        model.activations = {}
        loss, _ = model.loss(self.tokens[self.sample], self.reference_targets[self.sample])
        return loss, model.activations["lm_head"]

    def replay_forward(self, fault):
        """First of one sample: most faults end there."""
        model, (right_loss, right) = self.model(fault), self.right_logits
        if model is None:
            return None
        loss, logits = self.logits(model)
        moved = max(abs(loss - right_loss), relative(norm(logits - right), norm(right)))
        if moved > NEAR * self.c.tolerance and self.forward_is_right:
            return moved / self.c.tolerance
        if not moved > 0:  # nor NaN
            return None
        model = self.model(fault)
        return self.replay(model, *model.loss(self.tokens, self.reference_targets))

    def replay_backward(self, fault):
        """On the right model, whose forward pass it shares."""
        right = dict(vars(self.whole))
        try:
            if planted(self.whole, fault) is None:
                return None
            loss = self.whole.recorded(self.right[0])
            self.judge(loss, {})
            return self.replay(self.whole, loss, self.backward)
        finally:
            vars(self.whole).clear()
            vars(self.whole).update(right)

    def tried(self, replay, fault):
        """The rest of a fault; None: it changes nothing here, or this model cannot have it."""
        try:
            with np.errstate(all="ignore"):  # of this thread
                return replay(fault)
        except Rejected as rejected:
            return rejected.args[0]
        except (ValueError, IndexError, KeyError, ZeroDivisionError):
            return None

    def explain_replays(self):
        self.forward_is_right = not self.c.forward_wrong() and targets.head_is_right(self)
        self.sample = slice(0, 1)
        if self.b.document_token is not None:  # one with documents, if there are any
            i = int(np.argmax((self.tokens[:, :-1] == self.b.document_token).sum(axis=1)))
            self.sample = slice(i, i + 1)
        self.right_logits = self.logits(self.model())
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            rests = list(pool.map(lambda fault: self.tried(self.replay_forward, fault), rules.FORWARD.values()))
        rests += [self.tried(self.replay_backward, fault) for fault in rules.BACKWARD.values()]
        self.judged(rests, [*rules.FORWARD, *rules.BACKWARD])

    # ---- what lasts from step to step
    def trained(self, optimizer=lambda optimizer: {}, rates=list, accumulate=False, clip_in_place=False, late=False):
        """Each step's loss and norm with what rules.LATER says; none: the reference has this."""
        optimizer = planted(settings(self.b), optimizer)
        if optimizer is None:
            return
        clip, optimizer.clip = optimizer.clip, 0.0 if clip_in_place else optimizer.clip
        weights, before, total = self.weights, self.weights, {}
        for i, (step, lr) in enumerate(zip(self.a.steps, rates([step.lr for step in self.a.steps[: self.c.steps]]))):
            model, (loss, g) = self.whole, self.right  # those of step 1, whatever follows
            if i > 0:
                model = self.model(weights=before if late else weights)
                loss, backward = model.loss(*step.arrays())
            yield loss
            g = model.gradients(backward) if i > 0 else g
            total = {name: total.get(name, 0) + g[name] for name in g} if accumulate else g
            norm = norm_of(total)
            yield norm
            if clip_in_place:
                total = {name: g * clip_factor(norm, clip) for name, g in total.items()}
            before, weights = weights, optimizer.step(weights, total, lr)
            if model.experts:
                weights = model.experts.after_step(weights)

    def rest_of_steps(self, plan, run):
        """The largest deviation of a run's judged losses and norms, in tolerances, up to the first that is more than 1;
        None: the reference has this."""
        judged, worst = {d.name for d in self.c.losses}, None
        steps = [step for i, step in enumerate(run.steps[: self.c.steps]) if f"step {i + 1}" in judged]
        numbers = [x for step in steps for x in (step.loss, step.grad_norm)]
        with np.errstate(all="ignore"):  # of this thread
            for x, number in zip(numbers, self.trained(**plan)):
                deviates = relative(abs(x - number), number) / self.c.tolerance
                worst = max(worst or 0.0, deviates if math.isfinite(deviates) else math.inf)
                if worst > 1:
                    break
        return worst

    def explain_later(self):
        if self.c.stated is None or self.b.optimizer() not in ("adamw", "muon") or self.b.flag("mup", 0) > 0:
            return
        if not any(d.wrong for d in self.c.losses + self.c.norms):
            self.lines.append("losses and norms are right: of step 1 and later ones nothing is left to be explained")
        elif not self.rest_of_steps({}, self.b) <= 1:
            self.lines.append("what lasts from step to step: not tried, since rounding grows too fast in these steps")
        else:
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                rests = pool.map(lambda plan: self.rest_of_steps(plan, self.a), rules.LATER.values())
                self.judged(rests, rules.LATER)

    # ---- all
    def cause_of(self, multiple):
        """Of gradients that are all one multiple of the reference's."""
        clipped = clip_factor(self.b.steps[0].grad_norm, self.c.stated.clip) if self.c.stated else 1.0
        if clipped < 1 and abs(multiple / clipped - 1) <= 4 * self.c.tolerance:
            return "they were recorded after clipping; record.gradients belongs before it"
        return "a sum for a mean over ranks or micro-batches, or the reverse"

    def why_not(self):
        """Why nothing can be tried; None: the right model and its numbers are known."""
        c = self.c
        if c.problems or any(d.wrong for d in c.weights) or not (c.same_tokens and c.same_targets):
            return "the runs do not begin alike: see the lines above"
        try:
            self.whole = model = model_of(self.b, dict(self.weights))
            model.activations = {} if self.a.activations else None
            loss, self.backward = model.loss(self.tokens, self.reference_targets)
            self.right = loss, model.gradients(self.backward)
        except (AttributeError, KeyError, ValueError, IndexError):
            return "B is no model that docs/validate/llama.py computes: nothing could be tried"
        for name, g in self.right[1].items():
            of_b = relative(norm(self.b.gradients.read(name) - g), norm(g)) if name in self.bounds else 0.0
            if not of_b <= self.bounds.get(name, 0.0):
                return "B's gradients are not those of its equations (fp8?): nothing could be tried"
        return None

    def explain(self):
        c, cannot = self.c, self.why_not()
        if cannot:
            self.lines.append(cannot)
            return
        if self.a.activations:
            self.lines.append(activations.first_wrong(self.a.activations, self.whole, c.tolerance))
        if c.forward_wrong() or any(d.wrong for d in c.gradients):
            words, multiple = facts.multiples(c)
            if multiple is not None and not c.forward_wrong():
                self.names.append(f"{words}: {self.cause_of(multiple)}")
            elif not targets.explain(self):
                self.explain_replays()
        elif any(d.wrong for d in c.updates) and c.check_updates:
            self.name(facts.update(c)[1])
        elif any(d.wrong for d in c.biases):
            self.name(facts.router_biases(c)[1])
        else:
            self.explain_later()


def report(c):
    """The lines of --diagnose for runs that differ."""
    doctor = Doctor(c)
    doctor.explain()
    lines = doctor.lines + [f"explains A's numbers to rounding: {name}" for name in doctor.names]
    rounding = "; fp32's rounding would" if facts.islands(c) else ""
    lines += [] if doctor.names else [f"no known fault explains A's numbers{rounding}"]
    if doctor.rests:
        near = [f"{rest:.3g} ({name})" for rest, name in doctor.rests[:3] if rest <= NEAR]
        if len(near) < len(doctor.rests):
            near.append(f"{'others' if near else 'all'} from {doctor.rests[len(near)][0]:.3g} on")
        tried = f"nearest of {len(doctor.rests)} faults that were tried, 1 is the bound"
        lines.append(f"{tried}: {'; '.join(near)}")
    return "diagnosis:\n" + "".join(f"  {line}\n" for line in lines)
