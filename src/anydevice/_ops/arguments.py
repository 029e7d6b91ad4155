"""Checks of the arguments of ops, and their error messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from anydevice._core.array import Array, ArrayT
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.hooks import is_loaded
from anydevice._core.primitives import Primitives, PrimitivesOf, Shape
from anydevice._machine.engines.registry import owner_of, row_of
from anydevice._ops.dispatch import (
    float_primitives,
    is_one_library,
    known,
    known_bool,
    known_float,
    known_integer,
    number_primitives,
    primitives,
    type_name,
    wrong_dtype,
)
from anydevice.errors import ConfigurationError

NUMBERS = (int, float, bool)
FLOAT32, INT32 = DTYPES["float32"], DTYPES["int32"]

Operands = tuple[PrimitivesOf[Any], Any, Any]

_PYTHON_TYPES = {"bool": bool, "int": int, "uint": int, "float": float}


# Errors


def wrong(op: str, what: str) -> ConfigurationError:
    """Return the error for an argument that an op cannot take."""
    return ConfigurationError(f"{op}: {what}", source=op)


def wrong_shapes(op: str, rule: str, advice: str = "", /, **arrays: Array) -> ConfigurationError:
    """Return the error for shapes that do not fit, with the rule, the shapes and advice.

    >>> str(wrong_shapes("matmul", "b must have two axes", b=numpy.ones(3)))
    'matmul: b must have two axes, but b is (3,)'
    """
    shown = ", ".join(f"{name} is {tuple(x.shape)}" for name, x in arrays.items())
    return wrong(op, f"{rule}, but {shown}{advice}")


def different_shapes(op: str, **two: Array) -> ConfigurationError:
    """Return the error for two arrays that must have the shape of the first.

    >>> str(different_shapes("add", x=numpy.ones((2, 1)), y=numpy.ones(2)))
    'add: x and y must have the same shape, but x is (2, 1), y is (2,); use y.reshape(2, 1)'
    """
    first, second = two
    advice = reshape_advice(second, two[second], tuple(two[first].shape))
    return wrong_shapes(op, f"{first} and {second} must have the same shape", advice, **two)


def reshape_advice(name: str, x: Array, shape: tuple[int, ...]) -> str:
    """Return advice: the call that gives an array this shape; empty if none does."""
    if math.prod(tuple(x.shape)) != math.prod(shape):
        return ""
    return f"; use {name}.reshape({', '.join(map(str, shape))})"


def different_dtypes(op: str, **arrays: Array) -> ConfigurationError:
    """Return the error for arrays that must have one dtype."""
    dtypes = {name: primitives(x, op, name).dtype(x).name for name, x in arrays.items()}
    shown = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
    return wrong(op, f"arrays must have the same dtype, but {shown}; use astype on one of them")


def in_words(value: Any) -> str:
    """Return a value as an error shows it: a number or text itself, the type of anything else.

    >>> in_words(0.5), in_words(numpy.ones(3))
    ('0.5', 'a numpy.ndarray')
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return repr(value)
    return f"a {type_name(kind)}"


# Numbers


def python_number(x: Any) -> Any:
    """Return a NumPy scalar as a Python number, which has no dtype; anything else as it is.

    >>> python_number(1 / numpy.sqrt(64)), python_number(numpy.int8(3)), python_number("text")
    (0.125, 3, 'text')
    """
    if type(x) in NUMBERS or known(x) is not None:
        return x
    kind = _scalar_kind(type(x))
    return x if kind is None else _PYTHON_TYPES[kind](x)


def _scalar_kind(kind: type) -> str | None:
    """Return the kind of a NumPy scalar type, such as int; `None` for any other type."""
    if not is_loaded("numpy"):
        return None
    import numpy

    if not issubclass(kind, numpy.generic):
        return None
    row = DTYPES.get(numpy.dtype(kind).name)
    return row.kind if row is not None and row.kind in _PYTHON_TYPES else None


# PyTorch's compiler runs this while it looks through the caller, and keeps the answer.
_scalar_kind._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_finite(number: Any) -> bool:
    """Whether it is a finite Python number; booleans and arrays are not."""
    return type(number) in (int, float) and -math.inf < number < math.inf


def integer(op: str, name: str, value: Any, more: str = "") -> int:
    """Return the value as a Python integer; a boolean, a fraction and anything else is refused."""
    number: int = python_number(value)
    if not _is_integer(number):
        wanted = f"an integer{more and ' ' + more}"
        raise wrong(op, f"{name} must be {wanted}, not {in_words(number)}")
    return number


def _is_integer(number: Any) -> bool:
    """Whether it is an integer, or a symbolic one of traced code."""
    return type(number) is int or (
        type(number) is not bool and hasattr(number, "__index__") and known(number) is None
    )


def finite_numbers(
    op: str, rule: str, holds: Callable[[float], bool], **numbers: Any
) -> tuple[Any, ...]:
    """Return the numbers as Python's own; raise for one that is not finite or breaks the rule.

    >>> finite_numbers("update_adam", "of 0 or more", lambda number: number >= 0, decay=0.5)
    (0.5,)
    """
    values = tuple([python_number(number) for number in numbers.values()])
    for name, number in zip(numbers, values, strict=True):
        if not is_finite(number) or not holds(number):
            raise wrong(op, f"{name} must be a finite number {rule}, not {in_words(number)}")
    return values


def number_or_array(op: str, name: str, value: Any, kinds: tuple[str, ...]) -> Any:
    """Return a number, perhaps NaN, or an array without axes whose dtype is of one of the kinds."""
    number = python_number(value)
    if type(number) in (int, float):
        return number
    is_array = hasattr(number, "shape") and hasattr(number, "dtype")
    xp = primitives(number, op, name) if is_array else known(number)
    if xp is None or number.shape or xp.dtype(number).kind not in kinds:
        shown = in_words(number)
        if xp is not None:
            shown = f"an array of {xp.dtype(number)} of the shape {tuple(number.shape)}"
        raise wrong(op, f"{name} must be a number, or an array without axes, not {shown}")
    return number


# Shapes and axes


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes broadcast.

    >>> broadcasts((2, 3), (1,)), broadcasts((2, 3), (2,))
    (True, False)
    """
    return all(m == n or m == 1 or n == 1 for m, n in zip(a[::-1], b[::-1], strict=False))


def axis_of(op: str, x: Array, axis: int) -> int:
    """Return the axis counted from the front."""
    if type(axis) is not int:
        axis = integer(op, "axis", axis)
    count: int = x.ndim
    if not -count <= axis < count:
        raise wrong(op, f"axis {axis} is out of range: x is {tuple(x.shape)}")
    return axis % count


def axes_of(op: str, x: Array, axis: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the axes counted from the front; all of them for `None`."""
    if type(axis) is int:
        return (axis_of(op, x, axis),)
    if axis is None:
        return tuple(range(x.ndim))
    if not isinstance(axis, tuple | list):
        return (axis_of(op, x, integer(op, "axis", axis, "or several")),)
    axes = tuple([axis_of(op, x, one) for one in axis])
    if len(set(axes)) != len(axes):
        raise wrong(op, f"{tuple(axis)} names an axis twice: x is {tuple(x.shape)}")
    return axes


def shape_of(op: str, shape: int | Sequence[int]) -> Shape:
    """Return a shape as a tuple of Python integers; a size of -1 is allowed."""
    if _is_integer(python_number(shape)):
        return (python_number(shape),)
    try:
        sizes = tuple([python_number(size) for size in shape])  # type: ignore[union-attr]
    except TypeError:
        raise wrong(op, f"a shape must be integers, not {in_words(shape)}") from None
    for size in sizes:
        if not _is_integer(size):
            raise wrong(op, f"a shape must be integers, but {in_words(size)} is in it")
    return sizes


def pair_of(op: str, name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    """Return height and width from one integer or a pair; neither may be below `least`."""
    if type(value) is int and value >= least:
        return value, value
    one = python_number(value)
    both = tuple(map(python_number, one)) if isinstance(one, tuple | list) else (one, one)
    if len(both) != 2 or any(type(size) is not int or size < least for size in both):
        raise wrong(
            op, f"{name} must be an integer of {least} or more, or two of them, not {value!r}"
        )
    return both


# Arrays


def require_one_library(op: str, name: str, a: Array, another: str, b: Array) -> None:
    """Refuse arrays of two libraries, even where they would mix, as NumPy's in compiled code."""
    if is_one_library(a, b):
        return
    if primitives(a, op, name) is not primitives(b, op, another):
        raise wrong(
            op,
            f"{name} is an array of {_library(a)} and {another} one of {_library(b)}; "
            "convert one of them with anydevice.to_device(…, device, convert=True)",
        )


def _library(x: Array) -> str:
    engine = owner_of(x)
    return type(x).__module__ if engine is None else row_of(engine.name).label


def require_one_dtype(op: str, **arrays: Array) -> None:
    """Refuse arrays of several libraries or dtypes."""
    (first, a), *others = arrays.items()
    for name, other in others:
        if type(other) is not type(a):
            require_one_library(op, first, a, name, other)
        if a.dtype != other.dtype:
            raise different_dtypes(op, **{first: a, name: other})


def require_integers(
    op: str, name: str, x: Array, beside: Array | None = None, beside_name: str = "x"
) -> None:
    """Refuse indices that are not integers, or not of the library of `beside`."""
    if beside is not None and type(x) is not type(beside):
        require_one_library(op, beside_name, beside, name, x)
    if known_integer(x) is None:
        dtype = primitives(x, op, name).dtype(x)
        if dtype.kind not in ("int", "uint"):
            raise wrong_dtype(op, dtype, f"integers in {name}; use astype({name}, 'int32')")


def bool_primitives(
    op: str, x: ArrayT, name: str = "", beside: ArrayT | None = None, beside_name: str = "x"
) -> PrimitivesOf[ArrayT]:
    """Return the primitives for a boolean array; any other is refused, as by `require_integers`."""
    if beside is not None and type(x) is not type(beside):
        require_one_library(op, beside_name, beside, name, x)
    xp = known_bool(x)
    if xp is None:
        xp = primitives(x, op, name)
        dtype = xp.dtype(x)
        if dtype.kind != "bool":
            raise wrong_dtype(op, dtype, "booleans; compare first, as in ops.less(x, 0)")
    return xp


# Two operands: arrays of one library and dtype, or an array and a number


def exact_primitives(op: str, x: ArrayT) -> PrimitivesOf[ArrayT]:
    """Return the primitives for integers, and for booleans unless bits are shifted."""
    xp, is_shift = primitives(x, op), op.endswith("shift")
    dtype = xp.dtype(x)
    if dtype.kind not in ("int", "uint") and (is_shift or dtype.kind != "bool"):
        raise wrong_dtype(op, dtype, "integers" if is_shift else "integers or booleans")
    return xp


_OPS_BY_CHECK: dict[tuple[Callable[..., Any], Callable[..., Any]], str] = {
    (bool_primitives, known_bool): "logical_and logical_or logical_xor",
    (exact_primitives, known_integer): "bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift",
    (float_primitives, known_float): "divide atan2 copysign hypot logaddexp",
    (number_primitives, known_float): "subtract power floor_divide remainder",
}
_TAKES = {op: checks for checks, ops in _OPS_BY_CHECK.items() for op in ops.split()}
"""The check of the array by op, and a quick one that refuses too many; others take any array."""


def operands(op: str, a: Any, b: Any) -> Operands:
    """Return two arrays that go together, or an array and a number, with their primitives."""
    kind = type(b)
    if kind is type(a):
        xp = known(a) if op not in _TAKES else _TAKES[op][1](a)
        if xp is not None and a.dtype == b.dtype:
            left, right = a.shape, b.shape
            if left == right or broadcasts(left, right):
                return xp, a, b
    elif kind is float:
        xp = known_float(a)
        if xp is not None:
            return xp, a, b
    return checked_operands(op, a, b)


def checked_operands(op: str, a: Any, b: Any, names: tuple[str, str] = ("a", "b")) -> Operands:
    """Check any two operands, slowly; return them as `operands` does, or raise the error."""
    a, b = python_number(a), python_number(b)
    first, second = names
    if type(b) in NUMBERS:
        if type(a) in NUMBERS:
            raise wrong(op, f"{a} and {b} are both numbers; one of them must be an array")
        xp = primitives(a, op, first)
        return xp, a, _number_for(op, b, xp, first, a)
    if type(a) in NUMBERS:
        xp = primitives(b, op, second)
        return xp, _number_for(op, a, xp, second, b), b
    require_one_library(op, first, a, second, b)
    if op in _TAKES:
        _TAKES[op][0](op, a)
    if a.dtype != b.dtype:
        raise different_dtypes(op, **{first: a, second: b})
    if not broadcasts(a.shape, b.shape):
        rule = f"the shapes of {first} and {second} must broadcast"
        raise wrong_shapes(op, rule, **{first: a, second: b})
    return primitives(a), a, b


def _number_for(op: str, number: float, xp: Primitives, name: str, x: Array) -> float:
    """Return `number` if it fits the dtype of the array."""
    if op in _TAKES:
        _TAKES[op][0](op, x)
    return fit_number(op, number, xp.dtype(x), name)


def fit_number(op: str, number: float, dtype: DType, name: str, advice: str = "") -> float:
    """Return `number` if it fits `dtype`; `name` is used in the error."""
    if dtype.kind == "float" or dtype.kind == "complex":
        # Some libraries take no integer of more than 32 bits.
        if type(number) is not int or -(2**31) <= number < 2**31:
            return number
        try:
            return float(number)
        except OverflowError:
            what = f"{dtype} does not hold an integer of {number.bit_length()} bits"
            raise wrong(op, what) from None
    if type(number) is float:
        what = f"{number} is not an integer, and {name} is {dtype}"
        instead = advice or f"use astype({name}, 'float32')"
        raise wrong(op, f"{what}; {instead}")
    low = -(2 ** (dtype.bits - 1)) if dtype.kind == "int" else 0
    high = 1 if dtype.kind == "bool" else low + 2**dtype.bits - 1
    if not low <= number <= high:
        what = f"{number} does not fit into {dtype} ({low} to {high}), the dtype of {name}"
        instead = advice or f"use astype({name}, 'int64')"
        raise wrong(op, f"{what}; {instead}, or another number")
    return number


# The dtype in which an op computes


def wide(dtype: DType) -> DType:
    """Return the dtype in which an op computes: `float64` for itself, `float32` for all others.

    >>> wide(DTYPES["bfloat16"]).name, wide(DTYPES["float64"]).name
    ('float32', 'float64')
    """
    return dtype if dtype.bits == 64 and dtype.kind == "float" else FLOAT32


def widened(xp: PrimitivesOf[ArrayT], x: ArrayT) -> ArrayT:
    """Return the array, as `float32` if its floating-point dtype has fewer bits."""
    dtype = xp.dtype(x)
    return xp.astype(x, FLOAT32) if dtype.kind == "float" and dtype.bits < 32 else x
