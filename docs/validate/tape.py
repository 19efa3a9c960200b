"""Reverse-mode differentiation over NumPy: a Value knows what it was computed from, and how its gradient goes back."""

import itertools

import numpy as np

ORDER = itertools.count()


class Value:
    """back(gradient): those of the parents. A leaf, without parents, has a name; a constant has neither."""

    def __init__(self, x, back=None, *parents, name=None):
        self.x, self.back, self.parents, self.name, self.order = x, back, parents, name, next(ORDER)

    def __add__(self, other):
        return Value(self.x + other.x, lambda d: (d, d), self, other)

    def __mul__(self, other):
        """other: a Value of the same shape, or a number."""
        if not isinstance(other, Value):
            return Value(self.x * other, lambda d: [d * other], self)
        return Value(self.x * other.x, lambda d: (d * other.x, d * self.x), self, other)

    def reshape(self, *shape):
        return Value(self.x.reshape(shape), lambda d: [d.reshape(self.x.shape)], self)

    def swapaxes(self, *axes):
        return Value(self.x.swapaxes(*axes), lambda d: [d.swapaxes(*axes)], self)

    def __getitem__(self, at):
        """at: as NumPy has it, no element twice."""

        def back(d):
            whole = np.zeros_like(self.x)
            whole[at] = d
            return [whole]

        return Value(self.x[at], back, self)


def elementwise(x, of):
    """of(array): the result and its derivative."""
    y, slope = of(x.x)
    return Value(y, lambda d: [d * slope], x)


def shares(x):
    """Of the sum of the last axis."""
    total = x.x.sum(axis=-1, keepdims=True)
    y = x.x / total
    return Value(y, lambda d: [(d - np.sum(d * y, axis=-1, keepdims=True)) / total], x)


def log_sum_exp(x):
    """Of an array's last axis."""
    top = x.max(axis=-1, keepdims=True)
    return top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True))


def product(x, w):
    """x (..., in), w (in, out), arrays: as one matrix product, eight times as fast as NumPy's of stacks of matrices."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[1])


def backward(*roots):
    """(name, gradient) of each leaf below the roots, (Value, gradient), as soon as it is complete. May run again."""
    waiting = {}

    def add(value, gradient):
        _, before = waiting.get(value.order, (value, None))
        waiting[value.order] = value, gradient if before is None else before + gradient

    for root in roots:
        add(*root)
    while waiting:
        value, gradient = waiting.pop(max(waiting))
        if value.name:
            yield value.name, gradient
        for parent, its in zip(value.parents, value.back(gradient) if value.parents else ()):
            add(parent, its)
