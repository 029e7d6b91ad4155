"""Matrix products."""

from __future__ import annotations

from math import prod

from anydevice.core.primitives import Primitives
from anydevice.ops.arguments import (
    broadcasts,
    different_dtypes,
    require_one_library,
    widened,
    wrong_shapes,
)
from anydevice.ops.dispatch import Array, compiled, number_version, primitives, run3


@compiled
def matmul(a: Array, b: Array) -> Array:
    """The products of matrices (…, m, k) and (…, k, n): (…, m, n), of their dtype.

    The axes before the last two broadcast. 16-bit numbers are added up in float32 and rounded
    once.

    >>> import numpy
    >>> matmul(numpy.ones((5, 2, 3)), numpy.ones((3, 4))).shape
    (5, 2, 4)
    """
    own = number_version(a, "matmul", _matmul)
    if type(b) is not type(a):
        require_one_library("matmul", "a", a, "b", b)
    if a.dtype != b.dtype:
        raise different_dtypes("matmul", a=a, b=b)
    left, right = a.shape, b.shape
    if len(left) < 2 or len(right) < 2:
        raise wrong_shapes("matmul", "both have rows and columns", a=a, b=b)
    if left[-1] != right[-2]:
        raise wrong_shapes("matmul", "a has as many columns as b has rows", a=a, b=b)
    if len(left) > 2 and len(right) > 2 and not broadcasts(left[:-2], right[:-2]):
        raise wrong_shapes("matmul", "the axes before the last two broadcast", a=a, b=b)
    result = own(a, b)
    return _matmul(a, b) if result is NotImplemented else result


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """`x · weightᵀ + bias`, of the dtype of x.

    x is (…, in), weight (out, in), bias (out,) or `None`; the result is (…, out).

    >>> import numpy
    >>> linear(numpy.ones((2, 3)), numpy.ones((4, 3)), numpy.arange(4.0)).tolist()
    [[3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0]]
    """
    own = number_version(x, "linear", _linear)
    if type(weight) is not type(x):
        require_one_library("linear", "x", x, "weight", weight)
    if x.dtype != weight.dtype:
        raise different_dtypes("linear", x=x, weight=weight)
    shape, sizes = weight.shape, x.shape
    if len(shape) != 2 or not sizes or sizes[-1] != shape[1]:
        raise wrong_shapes("linear", "weight is (out, in) and x is (…, in)", x=x, weight=weight)
    if bias is not None:
        if type(bias) is not type(x):
            require_one_library("linear", "x", x, "bias", bias)
        if x.dtype != bias.dtype:
            raise different_dtypes("linear", x=x, bias=bias)
        if len(bias.shape) != 1 or bias.shape[0] != shape[0]:
            raise wrong_shapes("linear", "bias is (out,)", weight=weight, bias=bias)
    return run3(own, _linear, x, weight, bias)


def biased(xp: Primitives, product: Array, bias: Array | None, like: Array) -> Array:
    """A product and its bias, rounded to the dtype of `like`."""
    if bias is not None:
        product = xp.add(product, xp.astype(bias, xp.dtype(product)))
    return xp.astype(product, xp.dtype(like))


def _matmul(a: Array, b: Array) -> Array:
    return primitives(a).matmul(a, b)


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    xp = primitives(x)
    outputs, inputs = weight.shape
    rows = xp.reshape(x, (prod(x.shape[:-1]), inputs))
    columns = xp.permute_dims(weight, (1, 0))
    if bias is not None:  # the sum with it must be rounded only once
        rows, columns = widened(xp, rows), widened(xp, columns)
    product = biased(xp, xp.matmul(rows, columns), bias, x)
    return xp.reshape(product, (*x.shape[:-1], outputs))
