"""Known faults that step 1 does not show: of the loop, the schedule and the optimizer's state."""

from .comparison import settings
from .llama import AdamW, clip_factor, norm_of


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


def faults(doctor):
    """{name: a function that trains so, and yields each step's loss and norm}; "right" is none."""
    o = settings(doctor.b)
    rates = [step.lr for step in doctor.a.steps[: doctor.c.steps]]

    def train(optimizer=None, rates=rates, accumulate=False, late=False):
        # late: the forward pass uses the weights before the last update
        in_place = o.clip if accumulate == "clipped" else 0.0
        optimizer = optimizer or of(clip=0.0 if in_place else o.clip)
        weights, before, total = dict(doctor.weights), dict(doctor.weights), {}
        for i, (step, lr) in enumerate(zip(doctor.a.steps, rates)):
            if i == 0:
                model, (loss, g) = doctor.whole, doctor.right  # those of step 1, whatever follows
                yield loss
            else:
                model = doctor.model(weights=before if late else weights)
                loss, backward = model.loss(*step.arrays())
                yield loss
                g = model.gradients(backward)
            total = {name: total.get(name, 0) + g[name] for name in g} if accumulate else g
            norm = norm_of(total)
            yield norm
            factor = clip_factor(norm, in_place)
            total = {name: g * factor for name, g in total.items()}
            before, weights = weights, optimizer.step(weights, total, lr)
            if model.experts:
                weights = model.experts.after_step(weights)

    def of(kind=AdamW, **changed):
        values = {"beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "decay": o.decay, "clip": o.clip, **changed}
        return kind(**values)

    found = {
        "right": train,
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
            found[f"beta2 is {beta2}"] = lambda beta2=beta2: train(of(beta2=beta2))
    for beta1 in (0.0, 0.8, 0.9, 0.95):
        if abs(beta1 - o.beta1) > 1e-9:
            found[f"beta1 is {beta1}"] = lambda beta1=beta1: train(of(beta1=beta1))
    found["beta1 and beta2 are exchanged"] = lambda: train(of(beta1=o.beta2, beta2=o.beta1))
    return found
