"""Losses: functions of an output and its target that give one number, added up in float32.

Those for classes take what the model gives before any softmax or sigmoid; see `folding`.
"""

from __future__ import annotations

from collections.abc import Callable

from anydevice import ops
from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Array
from anydevice.ops.dispatch import primitives
from anydevice.ops.widening import wide, widened

Loss = Callable[[Array, Array], Array]


def cross_entropy(output: Array, target: Array) -> Array:
    """The mean of -log(softmax(output)[target]): output (…, classes), target (…) whole numbers.

    >>> import numpy
    >>> cross_entropy(numpy.zeros((3, 2)), numpy.array([0, 1, 1])).round(4).tolist()
    0.6931
    """
    return ops.cross_entropy(output, target)


def mean_squared_error(output: Array, target: Array) -> Array:
    """The mean of (output - target)² over two arrays of one shape.

    An output of 16 bits is compared as float32, and its target may be that or of 16 bits too.

    >>> import numpy
    >>> mean_squared_error(numpy.array([1.0, 2.0]), numpy.array([1.0, 4.0])).tolist()
    2.0
    """
    xp = primitives(output, "mean_squared_error", "output")
    if primitives(target, "mean_squared_error", "target") is xp:
        output, target = widened(xp, output), widened(xp, target)
    return ops.mean_squared_error(output, target)


def binary_cross_entropy(output: Array, target: Array) -> Array:
    """The mean of -log(sigmoid(output)) where the target is 1 and -log(1 - that) where it is 0.

    Both have one shape. The output is taken before any sigmoid; the target may be truth values,
    whole numbers or shares from 0 to 1. Raises `ConfigurationError` where the shapes differ.

    >>> import numpy
    >>> binary_cross_entropy(numpy.array([0.0, 100.0]), numpy.array([1, 1])).round(4).tolist()
    0.3466
    """
    if tuple(output.shape) != tuple(target.shape):
        raise ConfigurationError(
            "binary_cross_entropy: output and target have one shape, but output is "
            f"{tuple(output.shape)}, target is {tuple(target.shape)}",
            source="binary_cross_entropy",
        )
    xp = primitives(output, "binary_cross_entropy", "output")
    dtype = wide(xp.dtype(output))
    # Logarithms of the two shares by one softmax: exact for large outputs, and smooth at 0.
    yes = ops.reshape(ops.astype(output, dtype), (*output.shape, 1))
    no = xp.full(tuple(yes.shape), 0, dtype, output)
    shares = ops.log_softmax(ops.concat([yes, no], axis=-1))
    wanted = ops.reshape(ops.astype(target, dtype), (*output.shape, 1))
    both = ops.concat([wanted, ops.subtract(1.0, wanted)], axis=-1)
    return ops.mean(ops.negative(ops.sum(ops.multiply(both, shares), axis=-1)))


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "binary_cross_entropy": binary_cross_entropy,
}
"""Each loss by its name."""

_WIDE_INSIDE: tuple[Loss, ...] = (*LOSSES.values(), ops.cross_entropy)


def is_wide_inside(loss: Loss) -> bool:
    """Whether a loss computes in float32 what it is given in 16 bits, and needs no wider copy.

    >>> is_wide_inside(cross_entropy), is_wide_inside(lambda output, target: output)
    (True, False)
    """
    # By identity: a loss of one's own may be what has no hash, or compares in ways of its own.
    return any(loss is own for own in _WIDE_INSIDE)


def loss_of(spec: Loss | str) -> Loss:
    """The function, or the loss of that name.

    >>> loss_of("cross_entropy").__name__
    'cross_entropy'
    """
    if callable(spec):
        return spec
    if not isinstance(spec, str) or spec not in LOSSES:
        raise ConfigurationError(
            f"there is no loss {spec!r}; take one of {', '.join(LOSSES)}, or a function of "
            "(output, target) that gives one number",
            source="loss",
        )
    return LOSSES[spec]
