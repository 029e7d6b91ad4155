"""Loss functions."""

from __future__ import annotations

from math import prod

from anydevice._core.array import ArrayT
from anydevice._ops.arguments import (
    different_shapes,
    require_integers,
    require_one_dtype,
    reshape_advice,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import float_version, primitives, run2


def cross_entropy(logits: ArrayT, targets: ArrayT) -> ArrayT:
    """Return the mean over all targets of -log(softmax(logits)[target]); one number.

    logits is (…, classes), before any softmax, and targets (…) holds integers. The result is
    float32, or float64 for such logits. A target outside of the classes makes it NaN.

    >>> import numpy
    >>> cross_entropy(numpy.array([[0.0, 0.0], [9.0, 9.0]]), numpy.array([0, 1])).round(4).tolist()
    0.6931
    """
    own = float_version(logits, "cross_entropy", _cross_entropy)
    shape = tuple(logits.shape)
    if shape and shape == tuple(getattr(targets, "shape", ())):
        raise wrong(
            "cross_entropy",
            f"targets has the same shape as logits, {shape}, like one-hot rows; it must hold the "
            "class number of each row: use targets.argmax(-1)",
        )
    require_integers("cross_entropy", "targets", targets, logits, "logits")
    if not shape or not shape[-1] or shape[:-1] != tuple(targets.shape):
        rule = "logits must be (…, classes) and targets (…)"
        advice = reshape_advice("targets", targets, shape[:-1]) if shape else ""
        raise wrong_shapes("cross_entropy", rule, advice, logits=logits, targets=targets)
    return run2(own, _cross_entropy, logits, targets)


def mean_squared_error(x: ArrayT, y: ArrayT) -> ArrayT:
    """Return the mean of (x - y)² over two arrays of one shape; one number.

    The result is float32, or float64 for such arrays.

    >>> import numpy
    >>> mean_squared_error(numpy.array([1.0, 2.0]), numpy.array([1.0, 4.0])).tolist()
    2.0
    """
    own = float_version(x, "mean_squared_error", _mean_squared_error)
    if type(y) is not type(x) or y.dtype != x.dtype:
        require_one_dtype("mean_squared_error", x=x, y=y)
    if x.shape != y.shape:
        raise different_shapes("mean_squared_error", x=x, y=y)
    return run2(own, _mean_squared_error, x, y)


def _cross_entropy(logits: ArrayT, targets: ArrayT) -> ArrayT:
    xp = primitives(logits)
    count, classes = prod(tuple(targets.shape)), logits.shape[-1]
    rows = widened(xp, xp.reshape(logits, (count, classes)))
    rows = xp.subtract(rows, xp.max(rows, 1, True))
    total = xp.log(xp.sum(xp.exp(rows), 1, True))
    chosen = xp.take_along_axis(rows, xp.reshape(targets, (count, 1)), 1)
    return xp.divide(xp.sum(xp.subtract(total, chosen), (0, 1)), float(count))


def _mean_squared_error(x: ArrayT, y: ArrayT) -> ArrayT:
    xp = primitives(x)
    off = xp.subtract(widened(xp, x), widened(xp, y))
    total = xp.multiply(off, off)
    axes = tuple(range(len(x.shape)))
    return xp.divide(xp.sum(total, axes), float(prod(x.shape))) if axes else total
