"""Ops on single elements: of one array, of two, or of an array and a number; NaN stays NaN.

Two arrays are of one library and one dtype, and their shapes broadcast. In compiled functions too,
a NumPy constant does not mix with arrays of another library. A number takes the dtype of the array,
on either side, and raises an error if that dtype cannot hold it: a fraction beside integers, -1
beside uint8. A NumPy scalar is a number like any other.
"""

from __future__ import annotations

import math
from typing import Any

from anydevice._core.array import Array, ArrayT
from anydevice._ops.arguments import (
    NUMBERS,
    bool_operands,
    bool_primitives,
    broadcasts,
    checked_operands,
    in_words,
    is_finite,
    operands,
    python_number,
    require_one_dtype,
    require_one_library,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import (
    compiled,
    float_primitives,
    float_version,
    known_bool,
    known_float,
    known_integer,
    number_primitives,
    number_version,
    primitives,
    run2,
    run3,
)


@compiled
def add(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return `a + b`, of the broadcast shape and their dtype.

    >>> add(numpy.ones((2, 1)), numpy.arange(3.0)).tolist()
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    xp, a, b = operands("add", a, b)
    return xp.add(a, b)


@compiled
def subtract(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return `a - b`, of the broadcast shape and their dtype.

    >>> subtract(numpy.arange(3), 1).tolist(), subtract(1, numpy.arange(3)).tolist()
    ([-1, 0, 1], [1, 0, -1])
    """
    xp, a, b = operands("subtract", a, b)
    return xp.subtract(a, b)


@compiled
def multiply(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return `a × b` element by element, of the broadcast shape and their dtype.

    >>> multiply(numpy.arange(3), numpy.arange(3)).tolist()
    [0, 1, 4]
    """
    xp, a, b = operands("multiply", a, b)
    return xp.multiply(a, b)


@compiled
def divide(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return `a / b` for floating-point arrays, of the broadcast shape and their dtype.

    Dividing by zero gives an infinity, and 0 / 0 NaN.

    >>> divide(numpy.array([1.0, -1.0, 0.0]), 0).tolist()
    [inf, -inf, nan]
    """
    xp, a, b = operands("divide", a, b)
    return xp.divide(a, b)


@compiled
def power(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return `a` to the power of b, of the broadcast shape and their dtype.

    Integers have no negative powers: a negative number b raises an error with them, and in an array
    the result depends on the library.

    >>> power(numpy.array([1.0, 2.0, 3.0]), 2).tolist()
    [1.0, 4.0, 9.0]
    """
    xp, a, b = operands("power", a, b)
    if type(b) is int and b < 0 and xp.dtype(a).kind in ("int", "uint"):
        rule = f"integers have no power {b}, and a is {xp.dtype(a)}; use astype(a, 'float32')"
        raise wrong("power", rule)
    return xp.pow(a, b)


@compiled
def maximum(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return the larger of a and b, of the broadcast shape; NaN propagates.

    >>> maximum(numpy.array([-1.0, 2.0, numpy.nan]), 0).tolist()
    [0.0, 2.0, nan]
    """
    xp, a, b = operands("maximum", a, b)
    return xp.maximum(a, b)


@compiled
def minimum(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return the smaller of a and b, of the broadcast shape; NaN propagates.

    >>> minimum(numpy.array([-1.0, 2.0, numpy.nan]), 0).tolist()
    [-1.0, 0.0, nan]
    """
    xp, a, b = operands("minimum", a, b)
    return xp.minimum(a, b)


@compiled
def equal(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return whether a equals b: booleans of the broadcast shape.

    >>> equal(numpy.arange(3), 1).tolist()
    [False, True, False]
    """
    xp, a, b = operands("equal", a, b)
    return xp.equal(a, b)


@compiled
def not_equal(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return whether a differs from b: booleans of the broadcast shape; NaN equals nothing.

    >>> not_equal(numpy.arange(3), 1).tolist()
    [True, False, True]
    """
    xp, a, b = operands("not_equal", a, b)
    return xp.logical_not(xp.equal(a, b))


@compiled
def greater(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return whether a is larger than b: booleans of the broadcast shape.

    >>> greater(numpy.arange(3), 1).tolist()
    [False, False, True]
    """
    xp, a, b = operands("greater", a, b)
    return xp.less(b, a)


@compiled
def greater_equal(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return whether a is larger than b or equals it: booleans of the broadcast shape.

    >>> greater_equal(numpy.arange(3), 1).tolist()
    [False, True, True]
    """
    xp, a, b = operands("greater_equal", a, b)
    return xp.less_equal(b, a)


@compiled
def less(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return whether a is smaller than b: booleans of the broadcast shape.

    >>> less(numpy.arange(3), 1).tolist()
    [True, False, False]
    """
    xp, a, b = operands("less", a, b)
    return xp.less(a, b)


@compiled
def less_equal(a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return whether a is smaller than b or equals it: booleans of the broadcast shape.

    >>> less_equal(numpy.arange(3), 1).tolist()
    [True, True, False]
    """
    xp, a, b = operands("less_equal", a, b)
    return xp.less_equal(a, b)


@compiled
def logical_and(a: ArrayT, b: ArrayT) -> ArrayT:
    """Return whether both booleans are true, of the broadcast shape.

    >>> logical_and(numpy.array([True, False]), numpy.array([True, True])).tolist()
    [True, False]
    """
    xp, a, b = bool_operands("logical_and", a, b)
    return xp.logical_and(a, b)


@compiled
def logical_or(a: ArrayT, b: ArrayT) -> ArrayT:
    """Return whether at least one of two booleans is true, of the broadcast shape.

    >>> logical_or(numpy.array([True, False]), numpy.array([False, False])).tolist()
    [True, False]
    """
    xp, a, b = bool_operands("logical_or", a, b)
    return xp.logical_or(a, b)


@compiled
def where(condition: ArrayT, a: ArrayT | float, b: ArrayT | float) -> ArrayT:
    """Return `a` where the condition is true, b elsewhere; all three shapes broadcast.

    One of a and b may be a number, which takes the dtype of the other.

    >>> where(numpy.array([True, False]), numpy.array([1.0, 2.0]), 0).tolist()
    [1.0, 0.0]
    """
    xp = known_bool(condition)
    if xp is not None and type(condition) is type(a) is type(b) and a.dtype == b.dtype:
        shape = condition.shape
        if shape == a.shape and shape == b.shape:
            return xp.where(condition, a, b)
    xp = bool_primitives("where", condition, "condition")
    _, a, b = operands("where", a, b)
    _refuse_misfit(condition, "a", a)
    _refuse_misfit(condition, "b", b)
    return xp.where(condition, a, b)


@compiled
def negative(x: ArrayT) -> ArrayT:
    """Return `-x`, of the same shape and dtype.

    >>> negative(numpy.array([1, -2])).tolist()
    [-1, 2]
    """
    return number_primitives("negative", x).negative(x)


@compiled
def abs(x: ArrayT) -> ArrayT:  # noqa: A001  the name that every array library has for it
    """Return the magnitude of x, of the same shape and dtype.

    >>> abs(numpy.array([1, -2])).tolist()
    [1, 2]
    """
    return number_primitives("abs", x).abs(x)


@compiled
def sign(x: ArrayT) -> ArrayT:
    """Return -1, 0 or 1, of the same shape and dtype.

    >>> sign(numpy.array([-3.0, 0.0, 0.5])).tolist()
    [-1.0, 0.0, 1.0]
    """
    return number_primitives("sign", x).sign(x)


@compiled
def floor(x: ArrayT) -> ArrayT:
    """Return the largest integer that is not above x, of the same shape and dtype.

    >>> floor(numpy.array([-0.5, 1.5])).tolist()
    [-1.0, 1.0]
    """
    return number_primitives("floor", x).floor(x)


@compiled
def round(x: ArrayT) -> ArrayT:  # noqa: A001  the name that every array library has for it
    """Return the nearest integer, of the same shape and dtype; halves are rounded to the even one.

    >>> round(numpy.array([0.5, 1.5, -2.7])).tolist()
    [0.0, 2.0, -3.0]
    """
    own = number_version(x, "round", _round)
    if known_integer(x) is not None:
        return x
    result = own(x)
    return _round(x) if result is NotImplemented else result


def clip(
    x: ArrayT,
    min: ArrayT | float | None = None,  # noqa: A002  as everywhere
    max: ArrayT | float | None = None,  # noqa: A002  as everywhere
) -> ArrayT:
    """Return `x` limited to the range from `min` to `max`; where they cross, `max` wins.

    Each is a number, an array that broadcasts with x, or `None` for no limit. NaN stays NaN.

    >>> clip(numpy.array([-3.0, 0.5, 7.0]), 0, 1).tolist()
    [0.0, 0.5, 1.0]
    """
    own = number_version(x, "clip", _clip)
    low, high, plain = min, max, known_float(x) is not None
    if low is not None and not (plain and type(low) is float):
        _, _, low = checked_operands("clip", x, low, ("x", "min"))
    if high is not None and not (plain and type(high) is float):
        _, _, high = checked_operands("clip", x, high, ("x", "max"))
    return run3(own, _clip, x, low, high)


@compiled
def exp(x: ArrayT) -> ArrayT:
    """Return the exponential function of a floating-point array, of the same shape and dtype.

    >>> exp(numpy.array([0.0, -numpy.inf])).tolist()
    [1.0, 0.0]
    """
    return float_primitives("exp", x).exp(x)


@compiled
def log(x: ArrayT) -> ArrayT:
    """Return the natural logarithm of a floating-point array, of the same shape and dtype.

    The logarithm of 0 is minus infinity; that of a negative number is NaN.

    >>> log(numpy.array([1.0, 0.0])).tolist()
    [0.0, -inf]
    """
    return float_primitives("log", x).log(x)


@compiled
def sqrt(x: ArrayT) -> ArrayT:
    """Return the square root of a floating-point array, of the same shape and dtype.

    >>> sqrt(numpy.array([4.0, -1.0])).tolist()
    [2.0, nan]
    """
    return float_primitives("sqrt", x).sqrt(x)


@compiled
def rsqrt(x: ArrayT) -> ArrayT:
    """Return one over the square root of a floating-point array, of the same shape and dtype.

    >>> rsqrt(numpy.array([4.0, 0.0])).tolist()
    [0.5, inf]
    """
    return float_primitives("rsqrt", x).rsqrt(x)


@compiled
def sin(x: ArrayT) -> ArrayT:
    """Return the sine of a floating-point array, of the same shape and dtype.

    >>> sin(numpy.zeros(2)).tolist()
    [0.0, 0.0]
    """
    return float_primitives("sin", x).sin(x)


@compiled
def cos(x: ArrayT) -> ArrayT:
    """Return the cosine of a floating-point array, of the same shape and dtype.

    >>> cos(numpy.zeros(2)).tolist()
    [1.0, 1.0]
    """
    return float_primitives("cos", x).cos(x)


@compiled
def tanh(x: ArrayT) -> ArrayT:
    """Return the hyperbolic tangent of a floating-point array, of the same shape and dtype.

    >>> tanh(numpy.array([0.0, numpy.inf])).tolist()
    [0.0, 1.0]
    """
    return float_primitives("tanh", x).tanh(x)


@compiled
def sigmoid(x: ArrayT) -> ArrayT:
    """Return `1 / (1 + exp(-x))` of a floating-point array; same shape and dtype, no overflow.

    >>> sigmoid(numpy.array([0.0, -numpy.inf, 1000.0])).tolist()
    [0.5, 0.0, 1.0]
    """
    return float_primitives("sigmoid", x).sigmoid(x)


@compiled
def erf(x: ArrayT) -> ArrayT:
    """Return the error function of a floating-point array, of the same shape and dtype.

    >>> erf(numpy.array([0.0, numpy.inf])).tolist()
    [0.0, 1.0]
    """
    return float_primitives("erf", x).erf(x)


@compiled
def isnan(x: ArrayT) -> ArrayT:
    """Return whether x is NaN: booleans of the same shape.

    >>> isnan(numpy.array([1.0, numpy.nan])).tolist()
    [False, True]
    """
    return float_primitives("isnan", x).isnan(x)


@compiled
def isfinite(x: ArrayT) -> ArrayT:
    """Return whether x is neither infinite nor NaN: booleans of the same shape.

    >>> isfinite(numpy.array([1.0, numpy.inf, numpy.nan])).tolist()
    [True, False, False]
    """
    result = number_version(x, "isfinite", _isfinite)(x)
    return _isfinite(x) if result is NotImplemented else result


@compiled
def logical_not(x: ArrayT) -> ArrayT:
    """Return whether the boolean is false, of the same shape.

    >>> logical_not(numpy.array([True, False])).tolist()
    [False, True]
    """
    xp = known_bool(x)
    return (bool_primitives("logical_not", x) if xp is None else xp).logical_not(x)


@compiled
def relu(x: ArrayT) -> ArrayT:
    """Return the larger of x and 0, of the same shape and dtype; NaN stays NaN.

    >>> relu(numpy.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    result = number_version(x, "relu", _relu)(x)
    return _relu(x) if result is NotImplemented else result


def leaky_relu(x: ArrayT, slope: float = 0.01) -> ArrayT:
    """Return `x` where it is positive and `slope × x` elsewhere, of the same shape and dtype.

    >>> leaky_relu(numpy.array([-2.0, 3.0]), 0.25).tolist()
    [-0.5, 3.0]
    """
    own = float_version(x, "leaky_relu", _leaky_relu)
    slope = python_number(slope)
    if not is_finite(slope):
        raise wrong("leaky_relu", f"slope must be a finite number, not {in_words(slope)}")
    return run2(own, _leaky_relu, x, float(slope))


@compiled
def silu(x: ArrayT) -> ArrayT:
    """Return `x × sigmoid(x)` of a floating-point array, of the same shape and dtype.

    >>> silu(numpy.array([0.0, 100.0])).tolist()
    [0.0, 100.0]
    """
    result = float_version(x, "silu", _silu)(x)
    return _silu(x) if result is NotImplemented else result


def gelu(x: ArrayT, approximate: bool = False) -> ArrayT:
    """Return `x` times the normal distribution function of x, of the same shape and dtype.

    `approximate` uses the usual formula with a hyperbolic tangent, with an error below 0.0005; use
    it for models that were trained with it.

    >>> gelu(numpy.array([0.0, 1.0])).round(4).tolist()
    [0.0, 0.8413]
    >>> gelu(numpy.array([0.0, 1.0]), approximate=True).round(4).tolist()
    [0.0, 0.8412]
    """
    return run2(float_version(x, "gelu", _gelu), _gelu, x, approximate)


def swiglu(gate: ArrayT, up: ArrayT) -> ArrayT:
    """Return silu(gate) × up for two arrays of one shape; of that shape and their dtype.

    >>> swiglu(numpy.array([0.0, 100.0]), numpy.array([5.0, 2.0])).tolist()
    [0.0, 200.0]
    """
    own = float_version(gate, "swiglu", _swiglu)
    if type(up) is not type(gate) or up.dtype != gate.dtype:
        require_one_dtype("swiglu", gate=gate, up=up)
    if gate.shape != up.shape:
        raise wrong_shapes("swiglu", "gate and up must have the same shape", gate=gate, up=up)
    return run2(own, _swiglu, gate, up)


def _refuse_misfit(condition: Array, name: str, x: Any) -> None:
    if type(x) in NUMBERS:
        return
    require_one_library("where", "condition", condition, name, x)
    if not broadcasts(condition.shape, x.shape):
        rule = "the shapes must broadcast"
        raise wrong_shapes("where", rule, condition=condition, **{name: x})


def _relu(x: ArrayT) -> ArrayT:
    return primitives(x).maximum(x, 0)


def _isfinite(x: ArrayT) -> ArrayT:
    xp = primitives(x)
    return xp.equal(x, x) if known_float(x) is None else xp.less(xp.abs(x), math.inf)


def _round(x: ArrayT) -> ArrayT:
    xp = primitives(x)
    below = xp.floor(x)
    above, rest = xp.add(below, 1), xp.subtract(x, below)
    odd = xp.less(xp.multiply(xp.floor(xp.multiply(below, 0.5)), 2), below)
    up = xp.logical_or(xp.less(0.5, rest), xp.logical_and(xp.equal(rest, 0.5), odd))
    # An integer stays as it is; so do infinities, and numbers too large to have halves.
    return xp.where(xp.equal(below, x), x, xp.where(up, above, below))


def _clip(x: ArrayT, low: ArrayT | float | None, high: ArrayT | float | None) -> ArrayT:
    xp = primitives(x)
    x = x if low is None else xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


def _leaky_relu(x: ArrayT, slope: float) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    return xp.astype(xp.where(xp.less(y, 0), xp.multiply(y, slope), y), xp.dtype(x))


def _silu(x: ArrayT) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    return xp.astype(xp.multiply(y, xp.sigmoid(y)), xp.dtype(x))


def _gelu(x: ArrayT, approximate: bool) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    if approximate:
        cube = xp.multiply(xp.multiply(y, y), xp.multiply(y, 0.044715))
        share = xp.tanh(xp.multiply(xp.add(y, cube), math.sqrt(2 / math.pi)))
    else:
        share = xp.erf(xp.multiply(y, math.sqrt(0.5)))
    return xp.astype(xp.multiply(xp.multiply(y, 0.5), xp.add(share, 1.0)), xp.dtype(x))


def _swiglu(gate: ArrayT, up: ArrayT) -> ArrayT:
    xp = primitives(gate)
    y = widened(xp, gate)
    product = xp.multiply(xp.multiply(y, xp.sigmoid(y)), widened(xp, up))
    return xp.astype(product, xp.dtype(gate))
