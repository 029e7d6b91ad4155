"""Ops on single elements: of one array, of two, or of an array and a number; NaN stays NaN.

Two arrays are of one library and one dtype, and their shapes broadcast. In compiled functions too,
a NumPy constant does not mix with arrays of another library. A number takes the dtype of the array,
on either side, and raises an error if that dtype cannot hold it: a fraction beside integers, -1
beside uint8. A NumPy scalar is a number like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from anydevice._core.array import Array, ArrayT
from anydevice._ops.arguments import (
    NUMBERS,
    bool_primitives,
    broadcasts,
    checked_operands,
    exact_primitives,
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
    own_version,
    primitives,
    run2,
    run3,
)


class Unary(Protocol):
    """The type of an op on one array."""

    def __call__(self, x: ArrayT) -> ArrayT: ...


class Binary(Protocol):
    """The type of an op on two arrays, or on an array and a number."""

    def __call__(self, a: ArrayT | float, b: ArrayT | float) -> ArrayT: ...


Definition = Callable[..., Any]
"""From primitives and operands to the result."""


def _is_float(xp: Any, a: Any, b: Any) -> bool:
    return bool(xp.dtype(a if type(a) not in NUMBERS else b).kind == "float")


def _invert(xp: Any, x: Any) -> Any:
    dtype = xp.dtype(x)
    least = -1 if dtype.kind == "int" else 2**dtype.bits - 1
    return xp.logical_not(x) if dtype.kind == "bool" else xp.subtract(least, x)


def _divisor(xp: Any, b: Any) -> tuple[Any, Any]:
    """Return integers that are safe to divide by, and factors of the quotients.

    Processors stop a program that divides by 0, or the least integer by -1: 1 takes their place.
    """
    if type(b) in NUMBERS:
        return (1, int(b)) if b in (0, -1) else (b, 1)
    unsafe = xp.equal(b, 0)
    unsafe = xp.logical_or(unsafe, xp.equal(b, -1)) if xp.dtype(b).kind == "int" else unsafe
    return xp.where(unsafe, 1, b), xp.where(unsafe, b, 1)


def _remainder(xp: Any, a: Any, b: Any) -> Any:
    return xp.remainder(a, b if _is_float(xp, a, b) else _divisor(xp, b)[0])


def _floor_divide(xp: Any, a: Any, b: Any) -> Any:
    """Divide what the remainder leaves, as Python does: `floor(a / b)` may be 1 too large."""
    if not _is_float(xp, a, b):
        divisor, factor = _divisor(xp, b)
        return xp.multiply(xp.floor_divide(a, divisor), factor)
    array = a if type(a) not in NUMBERS else b
    own = own_version(array, "floor_divide", _floor_divide)
    if own is not _floor_divide:
        return own(a, b)
    dtype = xp.dtype(array)
    a, b = (xp.full((), x, dtype, array) if type(x) in NUMBERS else x for x in (a, b))
    a, b = widened(xp, a), widened(xp, b)
    rest, quotient, sign = xp.remainder(a, b), xp.divide(a, b), xp.sign(a)
    differs = xp.less(xp.multiply(sign, xp.sign(rest)), 0)
    rest = xp.where(differs, xp.subtract(rest, b), rest)  # of the sign of a: nothing overflows
    whole = xp.divide(xp.subtract(a, rest), b)
    whole = xp.where(differs, xp.subtract(whole, 1), whole)
    below = xp.floor(whole)
    whole = xp.where(xp.less(0.5, xp.subtract(whole, below)), xp.add(below, 1), below)
    by_infinity = xp.where(xp.less(xp.multiply(sign, xp.sign(b)), 0), -1.0, quotient)
    whole = xp.where(xp.equal(xp.abs(b), math.inf), by_infinity, whole)
    is_plain = xp.logical_or(xp.equal(xp.abs(a), math.inf), xp.equal(b, 0))
    return xp.astype(xp.where(is_plain, quotient, whole), dtype)


def _shift(xp: Any, a: Any, b: Any, *, left: bool) -> Any:
    """Shift all bits out where b is negative or too large, which libraries leave open."""
    dtype = xp.dtype(a if type(a) not in NUMBERS else b)
    b = xp.full((), b, dtype, a) if type(b) in NUMBERS else b
    far = xp.logical_or(xp.less(b, 0), xp.less(dtype.bits - 1, b))
    shift = xp.bitwise_left_shift if left else xp.bitwise_right_shift
    result = shift(a, xp.where(far, dtype.bits - 1, b))
    return xp.where(far, 0, result) if left or dtype.kind == "uint" else result


_DEFINITIONS: dict[str, Definition] = {
    "bitwise_invert": _invert,
    "bitwise_left_shift": partial(_shift, left=True),
    "bitwise_right_shift": partial(_shift, left=False),
    "ceil": lambda xp, x: xp.ceil(x) if xp.dtype(x).kind == "float" else x,
    "floor_divide": _floor_divide,
    "greater": lambda xp, a, b: xp.less(b, a),
    "greater_equal": lambda xp, a, b: xp.less_equal(b, a),
    "isinf": lambda xp, x: xp.equal(xp.abs(x), math.inf),
    "logical_xor": lambda xp, a, b: xp.logical_not(xp.equal(a, b)),
    "not_equal": lambda xp, a, b: xp.logical_not(xp.equal(a, b)),
    "positive": lambda xp, x: xp.multiply(x, 1),
    "reciprocal": lambda xp, x: xp.divide(1.0, x),
    "remainder": _remainder,
    "signbit": lambda xp, x: xp.less(xp.copysign(1.0, x), 0),
    "square": lambda xp, x: xp.multiply(x, x),
    "trunc": lambda xp, x: xp.trunc(x) if xp.dtype(x).kind == "float" else x,
}
"""Ops that no library has, or that libraries do not have in one way."""


def _unary(
    name: str, meaning: str, given: str, result: str,
    take: Callable[[str, Any], Any] = float_primitives,
) -> Unary:  # fmt: skip
    """Return an op on one array of the dtypes whose primitives `take` gives."""
    define = _DEFINITIONS.get(name)

    def op(x: ArrayT) -> Any:
        xp = take(name, x)
        return getattr(xp, name)(x) if define is None else define(xp, x)

    return cast("Unary", _op(op, name, meaning, given, result))


def _binary(name: str, meaning: str, given: str, result: str) -> Binary:
    """Return an op on two operands; `arguments.py` has the dtypes that it takes."""
    define = _DEFINITIONS.get(name)

    def op(a: ArrayT | float, b: ArrayT | float) -> Any:
        xp, a, b = operands(name, a, b)
        return getattr(xp, name)(a, b) if define is None else define(xp, a, b)

    return cast("Binary", _op(op, name, meaning, given, result))


def _prefer_own(
    name: str, meaning: str, given: str, result: str, definition: Definition,
    version: Callable[..., Any] = number_version,
) -> Unary:  # fmt: skip
    """Return the op on one array that engines may have a version of their own of."""

    def op(x: ArrayT) -> ArrayT:
        own = version(x, name, definition)(x)
        return cast("ArrayT", definition(x) if own is NotImplemented else own)

    return cast("Unary", _op(op, name, meaning, given, result))


def _op(op: Any, *texts: str) -> Any:
    return compiled(document(op, *texts))


def document(op: Any, name: str, meaning: str, given: str, result: str) -> Any:
    """Name an op; `given` has lists of numbers, for arrays, or numbers."""
    arrays = ", ".join(f"numpy.array({x})" if x[0] == "[" else x for x in given.split("; "))
    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"Return {meaning}.\n\n>>> {name}({arrays}).tolist()\n{result}\n"
    return op


def _relu(x: ArrayT) -> ArrayT:
    return primitives(x).maximum(x, 0)


def _isfinite(x: ArrayT) -> ArrayT:
    xp = primitives(x)
    return xp.equal(x, x) if known_float(x) is None else xp.less(xp.abs(x), math.inf)


def _silu(x: ArrayT) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    return xp.astype(xp.multiply(y, xp.sigmoid(y)), xp.dtype(x))


_number = partial(_unary, take=number_primitives)
abs = _number("abs", "the magnitude of x", "[1, -2]", "[1, 2]")  # noqa: A001  as everywhere
ceil = _number("ceil", "the least integer from x on", "[-0.5, 2]", "[-0.0, 2.0]")
floor = _number("floor", "the largest integer that is not above x", "[-0.5, 1.5]", "[-1.0, 1.0]")
negative = _number("negative", "`-x`", "[1, -2]", "[-1, 2]")
positive = _number("positive", "`+x`", "[1, -2]", "[1, -2]")
sign = _number("sign", "-1, 0 or 1", "[-3.0, 0.0, 0.5]", "[-1.0, 0.0, 1.0]")
square = _number("square", "`x × x`", "[3, -2]", "[9, 4]")
trunc = _number("trunc", "x without its fraction", "[-1.5, 2]", "[-1.0, 2.0]")
acos = _unary("acos", "the inverse cosine, from 0 to π", "[1.0, 2.0]", "[0.0, nan]")
acosh = _unary("acosh", "the inverse hyperbolic cosine", "[1.0, 0.0]", "[0.0, nan]")
asin = _unary("asin", "the inverse sine, from -π/2 to π/2", "[0.0, 2.0]", "[0.0, nan]")
asinh = _unary("asinh", "the inverse hyperbolic sine", "[0.0]", "[0.0]")
atan = _unary("atan", "the inverse tangent, from -π/2 to π/2", "[0.0]", "[0.0]")
atanh = _unary("atanh", "the inverse hyperbolic tangent", "[0.0, 1.0]", "[0.0, inf]")
cos = _unary("cos", "the cosine", "[0.0, 0.0]", "[1.0, 1.0]")
cosh = _unary("cosh", "the hyperbolic cosine", "[0.0]", "[1.0]")
erf = _unary("erf", "the error function", "[0.0, numpy.inf]", "[0.0, 1.0]")
exp = _unary("exp", "the exponential function", "[0.0, -numpy.inf]", "[1.0, 0.0]")
expm1 = _unary("expm1", "`exp(x) - 1`, exact for small x", "[1e-20]", "[1e-20]")
isinf = _unary("isinf", "whether x is infinite: booleans", "[-numpy.inf, 1]", "[True, False]")
isfinite = _prefer_own(
    "isfinite", "whether x is a finite number", "[1, numpy.inf]", "[True, False]", _isfinite
)
isnan = _unary("isnan", "whether x is NaN: booleans", "[1.0, numpy.nan]", "[False, True]")
log = _unary("log", "the natural logarithm; NaN below 0", "[1.0, 0.0, -1]", "[0.0, -inf, nan]")
log10 = _unary("log10", "the logarithm to base 10", "[100.0, 0.0]", "[2.0, -inf]")
log1p = _unary("log1p", "`log(1 + x)`, exact for small x", "[1e-20]", "[1e-20]")
log2 = _unary("log2", "the logarithm to base 2", "[8.0, 0.0]", "[3.0, -inf]")
reciprocal = _unary("reciprocal", "`1 / x`", "[4.0]", "[0.25]")
relu = _prefer_own("relu", "the larger of x and 0; NaN stays", "[-1.0, 2.0]", "[0.0, 2.0]", _relu)
rsqrt = _unary("rsqrt", "one over the square root", "[4.0, 0.0]", "[0.5, inf]")
sigmoid = _unary("sigmoid", "`1 / (1 + exp(-x))`, without overflow", "[0, -1e9]", "[0.5, 0.0]")
signbit = _unary("signbit", "whether the sign is set: booleans", "[-0.0, 0]", "[True, False]")
silu = _prefer_own("silu", "`x × sigmoid(x)`", "[0.0, 100.0]", "[0.0, 100.0]", _silu, float_version)
sin = _unary("sin", "the sine", "[0.0, 0.0]", "[0.0, 0.0]")
sinh = _unary("sinh", "the hyperbolic sine", "[0.0]", "[0.0]")
sqrt = _unary("sqrt", "the square root", "[4.0, -1.0]", "[2.0, nan]")
tan = _unary("tan", "the tangent", "[0.0]", "[0.0]")
tanh = _unary("tanh", "the hyperbolic tangent", "[0.0, numpy.inf]", "[0.0, 1.0]")
_exact, _bool = partial(_unary, take=exact_primitives), partial(_unary, take=bool_primitives)
bitwise_invert = _exact("bitwise_invert", "all bits inverted", "[5, -1]", "[-6, 0]")
logical_not = _bool("logical_not", "whether it is false", "[True, False]", "[False, True]")
add = _binary("add", "`a + b`", "[[1], [2]]; [10, 20]", "[[11, 21], [12, 22]]")
atan2 = _binary("atan2", "the angle of the point (b, a), from -π to π", "[0.0]; [1.0]", "[0.0]")
bitwise_and = _binary("bitwise_and", "the bits that both have", "[6]; 3", "[2]")
bitwise_left_shift = _binary(
    "bitwise_left_shift", "a with its bits b places higher; 0 if b is negative or too large",
    "[3, 3]; [2, 64]", "[12, 0]",
)  # fmt: skip
bitwise_or = _binary("bitwise_or", "the bits that at least one has", "[6]; 3", "[7]")
bitwise_right_shift = _binary(
    "bitwise_right_shift", "a with its bits b places lower; its sign alone if b is too large",
    "[13, -1]; [2, 64]", "[3, -1]",
)  # fmt: skip
bitwise_xor = _binary("bitwise_xor", "the bits that only one has", "[6]; 3", "[5]")
copysign = _binary("copysign", "a with the sign of b", "[3.0]; [-0.0]", "[-3.0]")
divide = _binary("divide", "`a / b`; 0 / 0 is NaN", "[1.0, -1, 0]; 0", "[inf, -inf, nan]")
equal = _binary("equal", "whether a is b: booleans", "[0, 1, 2]; 1", "[False, True, False]")
floor_divide = _binary(
    "floor_divide", "`a / b` rounded down, as Python's `//`; an integer by 0 gives 0",
    "[7, -7, 7]; [2, 2, 0]", "[3, -4, 0]",
)  # fmt: skip
greater = _binary("greater", "whether a > b: booleans", "[0, 1]; 0", "[False, True]")
greater_equal = _binary("greater_equal", "whether a ≥ b: booleans", "[0, 1]; 1", "[False, True]")
hypot = _binary("hypot", "`sqrt(a² + b²)`, without overflow", "[3.0]; [4.0]", "[5.0]")
less = _binary("less", "whether a < b: booleans", "[0, 1]; 1", "[True, False]")
less_equal = _binary("less_equal", "whether a ≤ b: booleans", "[0, 1]; 0", "[True, False]")
logaddexp = _binary("logaddexp", "`log(exp(a) + exp(b))`", "[1000.0]; [0.0]", "[1000.0]")
logical_and = _binary("logical_and", "whether both are true", "[True]; [False]", "[False]")
logical_or = _binary("logical_or", "whether one is true", "[True]; [False]", "[True]")
logical_xor = _binary("logical_xor", "whether only one is true", "[True]; [True]", "[False]")
maximum = _binary("maximum", "the larger one; NaN propagates", "[-1.0, numpy.nan]; 0", "[0.0, nan]")
minimum = _binary("minimum", "the smaller one; NaN propagates", "[1.0, numpy.nan]; 0", "[0.0, nan]")
multiply = _binary("multiply", "`a × b`, element by element", "[1, 2]; [3, 4]", "[3, 8]")
not_equal = _binary("not_equal", "whether a is not b: booleans", "[0, 1]; 1", "[True, False]")
remainder = _binary(
    "remainder", "the rest of `floor_divide`, of the sign of b, as Python's `%`",
    "[7, -7, 7]; [2, 2, -2]", "[1, 1, -1]",
)  # fmt: skip
subtract = _binary("subtract", "`a - b`", "[0, 1, 2]; 1", "[-1, 0, 1]")


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
