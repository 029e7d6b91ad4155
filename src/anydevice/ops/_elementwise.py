"""Ops on single elements: of one array, of two, or of an array and a number.

Two arrays are of one library and one element type, and their shapes broadcast; that they must be of
one library holds in compiled functions too, for constants of NumPy's. A number beside an array
takes over the array's type, whichever of them comes first, and is refused where it is none of that
type: a fraction beside whole numbers, -1 beside uint8. A number of NumPy's is a number like any
other. What is not a number stays so.

The functions between the layers of a network, element by element.
"""

from __future__ import annotations

import math

from anydevice.core.primitives import Primitives
from anydevice.ops.arguments import (
    NUMBERS,
    broadcasts,
    paired,
    paired_truths,
    same_library,
    same_type,
    truths,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice.ops.dispatch import (
    Array,
    floating,
    floating_version,
    numeric,
    numeric_version,
    primitives,
    truth_values,
)

NAMES = (
    *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"),
    *("equal", "less", "less_equal", "logical_and", "logical_or", "logical_not", "where"),
    *("negative", "abs", "sign", "floor", "exp", "log", "sqrt", "rsqrt"),
    *("sin", "cos", "tanh", "sigmoid", "erf", "isnan"),
)
"""The ops of this file: their arguments are arrays, or numbers beside them."""


def add(a: Array, b: Array) -> Array:
    """`a + b`, of the broadcast shape and their type.

    >>> import numpy
    >>> add(numpy.ones((2, 1)), numpy.arange(3.0)).tolist()
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    xp, a, b = paired("add", a, b)
    return xp.add(a, b)


def subtract(a: Array, b: Array) -> Array:
    """`a - b`, of the broadcast shape and their type.

    >>> import numpy
    >>> subtract(numpy.arange(3), 1).tolist(), subtract(1, numpy.arange(3)).tolist()
    ([-1, 0, 1], [1, 0, -1])
    """
    xp, a, b = paired("subtract", a, b)
    return xp.subtract(a, b)


def multiply(a: Array, b: Array) -> Array:
    """`a × b` element by element, of the broadcast shape and their type.

    >>> import numpy
    >>> multiply(numpy.arange(3), numpy.arange(3)).tolist()
    [0, 1, 4]
    """
    xp, a, b = paired("multiply", a, b)
    return xp.multiply(a, b)


def divide(a: Array, b: Array) -> Array:
    """`a / b` for floating numbers, of the broadcast shape and their type.

    Dividing by zero gives an infinity, and 0 / 0 what is not a number.

    >>> import numpy
    >>> divide(numpy.array([1.0, -1.0, 0.0]), 0).tolist()
    [inf, -inf, nan]
    """
    xp, a, b = paired("divide", a, b)
    return xp.divide(a, b)


def power(a: Array, b: Array) -> Array:
    """`a` to the power of b, of the broadcast shape and their type.

    Whole numbers have no negative powers: a negative number b is refused beside them, and in an
    array it gives what the library makes of it.

    >>> import numpy
    >>> power(numpy.array([1.0, 2.0, 3.0]), 2).tolist()
    [1.0, 4.0, 9.0]
    """
    xp, a, b = paired("power", a, b)
    if type(b) is int and b < 0:
        _refuse_negative_power(xp, a, b)
    return xp.pow(a, b)


def maximum(a: Array, b: Array) -> Array:
    """The larger of a and b, of the broadcast shape; what is not a number wins.

    >>> import numpy
    >>> maximum(numpy.array([-1.0, 2.0, numpy.nan]), 0).tolist()
    [0.0, 2.0, nan]
    """
    xp, a, b = paired("maximum", a, b)
    return xp.maximum(a, b)


def minimum(a: Array, b: Array) -> Array:
    """The smaller of a and b, of the broadcast shape; what is not a number wins.

    >>> import numpy
    >>> minimum(numpy.array([-1.0, 2.0, numpy.nan]), 0).tolist()
    [-1.0, 0.0, nan]
    """
    xp, a, b = paired("minimum", a, b)
    return xp.minimum(a, b)


def equal(a: Array, b: Array) -> Array:
    """Where a is b: truth values of the broadcast shape.

    >>> import numpy
    >>> equal(numpy.arange(3), 1).tolist()
    [False, True, False]
    """
    xp, a, b = paired("equal", a, b)
    return xp.equal(a, b)


def less(a: Array, b: Array) -> Array:
    """Where a is smaller than b: truth values of the broadcast shape.

    >>> import numpy
    >>> less(numpy.arange(3), 1).tolist()
    [True, False, False]
    """
    xp, a, b = paired("less", a, b)
    return xp.less(a, b)


def less_equal(a: Array, b: Array) -> Array:
    """Where a is smaller than b, or is b: truth values of the broadcast shape.

    >>> import numpy
    >>> less_equal(numpy.arange(3), 1).tolist()
    [True, True, False]
    """
    xp, a, b = paired("less_equal", a, b)
    return xp.less_equal(a, b)


def logical_and(a: Array, b: Array) -> Array:
    """Where both truth values hold, of the broadcast shape.

    >>> import numpy
    >>> logical_and(numpy.array([True, False]), numpy.array([True, True])).tolist()
    [True, False]
    """
    xp, a, b = paired_truths("logical_and", a, b)
    return xp.logical_and(a, b)


def logical_or(a: Array, b: Array) -> Array:
    """Where at least one of two truth values holds, of the broadcast shape.

    >>> import numpy
    >>> logical_or(numpy.array([True, False]), numpy.array([False, False])).tolist()
    [True, False]
    """
    xp, a, b = paired_truths("logical_or", a, b)
    return xp.logical_or(a, b)


def where(condition: Array, a: Array, b: Array) -> Array:
    """`a` where the truth value holds, b elsewhere; all three shapes broadcast.

    One of a and b may be a number, which takes over the type of the other.

    >>> import numpy
    >>> where(numpy.array([True, False]), numpy.array([1.0, 2.0]), 0).tolist()
    [1.0, 0.0]
    """
    xp = truth_values(condition)
    if xp is not None and type(condition) is type(a) is type(b) and a.dtype == b.dtype:
        shape = condition.shape
        if shape == a.shape and shape == b.shape:
            return xp.where(condition, a, b)
    xp = truths("where", condition, "condition")
    _, a, b = paired("where", a, b)
    _refuse_misfit(condition, "a", a)
    _refuse_misfit(condition, "b", b)
    return xp.where(condition, a, b)


def negative(x: Array) -> Array:
    """`-x`, of the same shape and type.

    >>> import numpy
    >>> negative(numpy.array([1, -2])).tolist()
    [-1, 2]
    """
    return numeric("negative", x).negative(x)


def abs(x: Array) -> Array:  # noqa: A001  the name that every array library has for it
    """The magnitude of x, of the same shape and type.

    >>> import numpy
    >>> abs(numpy.array([1, -2])).tolist()
    [1, 2]
    """
    return numeric("abs", x).abs(x)


def sign(x: Array) -> Array:
    """-1, 0 or 1, of the same shape and type.

    >>> import numpy
    >>> sign(numpy.array([-3.0, 0.0, 0.5])).tolist()
    [-1.0, 0.0, 1.0]
    """
    return numeric("sign", x).sign(x)


def floor(x: Array) -> Array:
    """The largest whole number that is not above x, of the same shape and type.

    >>> import numpy
    >>> floor(numpy.array([-0.5, 1.5])).tolist()
    [-1.0, 1.0]
    """
    return numeric("floor", x).floor(x)


def exp(x: Array) -> Array:
    """The exponential function of x, for floating numbers; of the same shape and type.

    >>> import numpy
    >>> exp(numpy.array([0.0, -numpy.inf])).tolist()
    [1.0, 0.0]
    """
    return floating("exp", x).exp(x)


def log(x: Array) -> Array:
    """The natural logarithm of floating numbers, of the same shape and type.

    That of 0 is minus infinity, that of a negative number is not a number.

    >>> import numpy
    >>> log(numpy.array([1.0, 0.0])).tolist()
    [0.0, -inf]
    """
    return floating("log", x).log(x)


def sqrt(x: Array) -> Array:
    """The square root of floating numbers, of the same shape and type.

    >>> import numpy
    >>> sqrt(numpy.array([4.0, -1.0])).tolist()
    [2.0, nan]
    """
    return floating("sqrt", x).sqrt(x)


def rsqrt(x: Array) -> Array:
    """One over the square root of floating numbers, of the same shape and type.

    >>> import numpy
    >>> rsqrt(numpy.array([4.0, 0.0])).tolist()
    [0.5, inf]
    """
    return floating("rsqrt", x).rsqrt(x)


def sin(x: Array) -> Array:
    """The sine of floating numbers, of the same shape and type.

    >>> import numpy
    >>> sin(numpy.zeros(2)).tolist()
    [0.0, 0.0]
    """
    return floating("sin", x).sin(x)


def cos(x: Array) -> Array:
    """The cosine of floating numbers, of the same shape and type.

    >>> import numpy
    >>> cos(numpy.zeros(2)).tolist()
    [1.0, 1.0]
    """
    return floating("cos", x).cos(x)


def tanh(x: Array) -> Array:
    """The hyperbolic tangent of floating numbers, of the same shape and type.

    >>> import numpy
    >>> tanh(numpy.array([0.0, numpy.inf])).tolist()
    [0.0, 1.0]
    """
    return floating("tanh", x).tanh(x)


def sigmoid(x: Array) -> Array:
    """`1 / (1 + exp(-x))` of floating numbers, of the same shape and type; it never overflows.

    >>> import numpy
    >>> sigmoid(numpy.array([0.0, -numpy.inf, 1000.0])).tolist()
    [0.5, 0.0, 1.0]
    """
    return floating("sigmoid", x).sigmoid(x)


def erf(x: Array) -> Array:
    """The error function of floating numbers, of the same shape and type.

    >>> import numpy
    >>> erf(numpy.array([0.0, numpy.inf])).tolist()
    [0.0, 1.0]
    """
    return floating("erf", x).erf(x)


def isnan(x: Array) -> Array:
    """Where x is not a number: truth values of the same shape.

    >>> import numpy
    >>> isnan(numpy.array([1.0, numpy.nan])).tolist()
    [False, True]
    """
    return floating("isnan", x).isnan(x)


def logical_not(x: Array) -> Array:
    """Where the truth value does not hold, of the same shape.

    >>> import numpy
    >>> logical_not(numpy.array([True, False])).tolist()
    [False, True]
    """
    xp = truth_values(x)
    return (truths("logical_not", x) if xp is None else xp).logical_not(x)


def _refuse_misfit(condition: Array, name: str, x: Array) -> None:
    if type(x) in NUMBERS:
        return
    same_library("where", "condition", condition, name, x)
    if not broadcasts(condition.shape, x.shape):
        rule = "the shapes broadcast"
        raise wrong_shapes("where", rule, condition=condition, **{name: x})


def _refuse_negative_power(xp: Primitives, a: Array, b: int) -> None:
    dtype = xp.dtype(a)
    if dtype.kind == "int" or dtype.kind == "uint":
        rule = f"whole numbers have no power {b}, and a is {dtype}; use astype(a, 'float32')"
        raise wrong("power", rule)


def relu(x: Array) -> Array:
    """The larger of x and 0, of the same shape and type; what is not a number stays so.

    >>> import numpy
    >>> relu(numpy.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    result = numeric_version(x, "relu", _relu)(x)
    return _relu(x) if result is NotImplemented else result


def silu(x: Array) -> Array:
    """`x × sigmoid(x)` of floating numbers, of the same shape and type.

    >>> import numpy
    >>> silu(numpy.array([0.0, 100.0])).tolist()
    [0.0, 100.0]
    """
    result = floating_version(x, "silu", _silu)(x)
    return _silu(x) if result is NotImplemented else result


def gelu(x: Array, approximate: bool = False) -> Array:
    """`x` times the share of the normal distribution below x, of the same shape and type.

    `approximate` takes the usual formula with a hyperbolic tangent, which is off by less than
    0.0005; models that were trained with it want it.

    >>> import numpy
    >>> gelu(numpy.array([0.0, 1.0])).round(4).tolist()
    [0.0, 0.8413]
    >>> gelu(numpy.array([0.0, 1.0]), approximate=True).round(4).tolist()
    [0.0, 0.8412]
    """
    result = floating_version(x, "gelu", _gelu)(x, approximate)
    return _gelu(x, approximate) if result is NotImplemented else result


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) × up for two arrays of one shape; of that shape and their type.

    >>> import numpy
    >>> swiglu(numpy.array([0.0, 100.0]), numpy.array([5.0, 2.0])).tolist()
    [0.0, 200.0]
    """
    own = floating_version(gate, "swiglu", _swiglu)
    if type(up) is not type(gate) or up.dtype != gate.dtype:
        same_type("swiglu", gate, up=up)
    if gate.shape != up.shape:
        raise wrong_shapes("swiglu", "gate and up have one shape", gate=gate, up=up)
    result = own(gate, up)
    return _swiglu(gate, up) if result is NotImplemented else result


def _relu(x: Array) -> Array:
    return primitives(x).maximum(x, 0)


def _silu(x: Array) -> Array:
    xp = primitives(x)
    y = widened(xp, x)
    return xp.astype(xp.multiply(y, xp.sigmoid(y)), xp.dtype(x))


def _gelu(x: Array, approximate: bool) -> Array:
    xp = primitives(x)
    y = widened(xp, x)
    if approximate:
        cube = xp.multiply(xp.multiply(y, y), xp.multiply(y, 0.044715))
        share = xp.tanh(xp.multiply(xp.add(y, cube), math.sqrt(2 / math.pi)))
    else:
        share = xp.erf(xp.multiply(y, math.sqrt(0.5)))
    return xp.astype(xp.multiply(xp.multiply(y, 0.5), xp.add(share, 1.0)), xp.dtype(x))


def _swiglu(gate: Array, up: Array) -> Array:
    xp = primitives(gate)
    y = widened(xp, gate)
    product = xp.multiply(xp.multiply(y, xp.sigmoid(y)), widened(xp, up))
    return xp.astype(product, xp.dtype(gate))
