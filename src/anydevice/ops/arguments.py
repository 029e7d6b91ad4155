"""Numbers beside arrays: Python's own, and those of NumPy, which are taken for the same.

What ops ask of their operands, and the errors that name what was wrong.

Two operands that go together: arrays of one library and one type, or an array and a number.

Numbers that say how an op is to be computed: what they must be.

Floating numbers of 16 bits are computed with as `float32`, and rounded once, at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from anydevice.core.dtypes import DTYPES, DType
from anydevice.core.primitives import Primitives, Shape
from anydevice.engines.lookup import owner_of
from anydevice.engines.registry import row_of
from anydevice.errors import ConfigurationError
from anydevice.ops.dispatch import (
    Array,
    floating,
    floats,
    known,
    numeric,
    primitives,
    together,
    truth_values,
    whole_numbers,
    wrong_kind,
)

NUMBERS = (int, float, bool)

_MAKERS = {"bool": bool, "int": int, "uint": int, "float": float}


def plain_number(x: Any) -> Any:
    """A number of NumPy's as one of Python's, which has no element type; anything else as it is.

    >>> import numpy
    >>> plain_number(1 / numpy.sqrt(64)), plain_number(numpy.int8(3)), plain_number("text")
    (0.125, 3, 'text')
    """
    if type(x) in NUMBERS or known(x) is not None:
        return x
    maker = _maker_of(type(x))
    return x if maker is None else _MAKERS[maker](x)


def plain_numbers(*numbers: Any) -> tuple[Any, ...]:
    """Each of them as `plain_number` gives it."""
    return tuple([plain_number(x) for x in numbers])


def in_words(value: Any) -> str:
    """A value as an error shows it: numbers and texts themselves, of anything else the type.

    >>> import numpy
    >>> in_words(0.5), in_words(numpy.ones(3))
    ('0.5', 'a numpy.ndarray')
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return repr(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else _with_module(kind)


def _with_module(kind: type) -> str:
    return f"a {kind.__module__}.{kind.__name__}"


def _maker_of(kind: type) -> str | None:
    """What makes a Python number of NumPy's of this type; `None` where it is no such number."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not issubclass(kind, numpy.generic):
        return None
    row = DTYPES.get(numpy.dtype(kind).name)
    return row.kind if row is not None and row.kind in _MAKERS else None


# PyTorch's compiler runs this while it looks through the caller, and keeps the answer.
_maker_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def wrong(op: str, what: str) -> ConfigurationError:
    """The error for an argument that an op cannot take."""
    return ConfigurationError(f"{op}: {what}", source=op)


def wrong_shapes(op: str, rule: str, **arrays: Array) -> ConfigurationError:
    """The error for shapes that do not fit: what the rule is, and what the shapes are.

    >>> import numpy
    >>> str(wrong_shapes("matmul", "a has as many columns as b has rows", a=numpy.ones((2, 3))))
    'matmul: a has as many columns as b has rows, but a is (2, 3)'
    """
    shown = ", ".join(f"{name} is {tuple(x.shape)}" for name, x in arrays.items())
    return wrong(op, f"{rule}, but {shown}")


def same_library(op: str, name: str, a: Array, another: str, b: Array) -> None:
    """Refuse two arrays of different libraries, even where they would mix.

    The same holds inside of compiled functions: a constant of NumPy's beside what JAX traces is
    refused as it is beside an array, so that code does the same whether it is compiled or not.
    """
    if together(a, b):
        return
    if primitives(a, op, name) is not primitives(b, op, another):
        raise wrong(
            op,
            f"{name} is an array of {_library(a)} and {another} one of {_library(b)}; "
            "make them one library's with anydevice.to_device(…, device, convert=True)",
        )


def _library(x: Array) -> str:
    engine = owner_of(x)
    return type(x).__module__ if engine is None else row_of(engine.name).label


def unlike(op: str, **arrays: Array) -> ConfigurationError:
    """The error for arrays that are not of one element type."""
    types = {name: primitives(x, op, name).dtype(x).name for name, x in arrays.items()}
    shown = ", ".join(f"{name} is {dtype}" for name, dtype in types.items())
    return wrong(op, f"arrays have one element type, but {shown}; use astype on one of them")


def same_type(op: str, a: Array, **others: Array) -> None:
    """Refuse arrays whose library or element type is not that of the first."""
    for name, other in others.items():
        if type(other) is not type(a):
            same_library(op, "the first", a, name, other)
        if a.dtype != other.dtype:
            raise unlike(op, **{"the first": a, name: other})


def whole(op: str, name: str, x: Array, beside: Array = None, called: str = "x") -> None:
    """Refuse indices, counts and places that are not whole numbers.

    And those of another library than the array that they go with, `beside`, which is `called` so.
    """
    if beside is not None and type(x) is not type(beside):
        same_library(op, called, beside, name, x)
    if whole_numbers(x) is None:
        dtype = primitives(x, op, name).dtype(x)
        if dtype.kind not in ("int", "uint"):
            raise wrong_kind(op, dtype, f"whole numbers in {name}; use astype({name}, 'int32')")


def truths(
    op: str, x: Array, name: str = "", beside: Array = None, called: str = "x"
) -> Primitives:
    """The primitives for an array of truth values; any other is refused, as by `whole`."""
    if beside is not None and type(x) is not type(beside):
        same_library(op, called, beside, name, x)
    xp = truth_values(x)
    if xp is None:
        xp = primitives(x, op, name)
        dtype = xp.dtype(x)
        if dtype.kind != "bool":
            raise wrong_kind(op, dtype, "truth values; compare first, as in ops.less(x, 0)")
    return xp


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes broadcast.

    >>> broadcasts((2, 3), (1,)), broadcasts((2, 3), (2,))
    (True, False)
    """
    return all(m == n or m == 1 or n == 1 for m, n in zip(a[::-1], b[::-1], strict=False))


def axis_of(op: str, x: Array, axis: int) -> int:
    """The axis counted from the front."""
    if type(axis) is not int:
        axis = whole_number(op, "axis", axis)
    count: int = x.ndim
    if not -count <= axis < count:
        raise wrong_shapes(op, f"axis {axis} is one of x", x=x)
    return axis % count


def axes_of(op: str, x: Array, axis: int | Sequence[int] | None) -> tuple[int, ...]:
    """The axes counted from the front; all of them for `None`."""
    if type(axis) is int:
        return (axis_of(op, x, axis),)
    if axis is None:
        return tuple(range(x.ndim))
    if not isinstance(axis, tuple | list):
        return (axis_of(op, x, whole_number(op, "axis", axis, "or several")),)
    axes = tuple([axis_of(op, x, one) for one in axis])
    if len(set(axes)) != len(axes):
        raise wrong_shapes(op, f"the axes {tuple(axis)} are different ones", x=x)
    return axes


def whole_number(op: str, name: str, value: Any, more: str = "") -> int:
    """The number as Python's own; a truth value, a fraction and anything else is refused."""
    number: int = plain_number(value)
    if not _counts(number):
        wanted = f"a whole number{more and ' ' + more}"
        raise wrong(op, f"{name} is {wanted}, but it is {in_words(number)}")
    return number


def shape_of(op: str, shape: int | Sequence[int]) -> Shape:
    """A shape that was asked for, as a tuple of Python's whole numbers; -1 is left as it is."""
    if _counts(plain_number(shape)):
        return (plain_number(shape),)
    try:
        sizes = tuple([plain_number(size) for size in shape])  # type: ignore[union-attr]
    except TypeError:
        raise wrong(op, f"a shape is whole numbers, but it is {in_words(shape)}") from None
    for size in sizes:
        if not _counts(size):
            raise wrong(op, f"a shape is whole numbers, but {in_words(size)} is in it")
    return sizes


def _counts(number: Any) -> bool:
    """Whether it is a whole number; also one that stands for any, while code is traced."""
    return type(number) is int or (
        type(number) is not bool and hasattr(number, "__index__") and known(number) is None
    )


def size_of(shape: Shape) -> int:
    """How many elements an array of this shape has."""
    return math.prod(shape)


def pair_of(op: str, name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    """A number for both height and width, or one for each; neither is smaller than `least`."""
    if type(value) is int and value >= least:
        return value, value
    one = plain_number(value)
    both = tuple(map(plain_number, one)) if isinstance(one, tuple | list) else (one, one)
    if len(both) != 2 or any(type(each) is not int or each < least for each in both):
        raise wrong(op, f"{name} is a whole number from {least} on, or two, but it is {value!r}")
    return both


Operands = tuple[Primitives, Array, Array]

_TAKES = {"divide": floating, "subtract": numeric, "power": numeric}
"""What an op asks of the array, where it does not take all."""


def paired(op: str, a: Array, b: Array) -> Operands:
    """Two arrays that go together, or an array and a number, with the primitives for them.

    Numbers come back as Python's, which take over the type of the array. Raises
    `ConfigurationError` where the libraries or element types differ, where the shapes do not
    broadcast, and where a number is none of the array's type.
    """
    kind = type(b)
    if kind is type(a):
        xp = known(a) if op not in _TAKES else floats(a)
        if xp is not None and a.dtype == b.dtype:
            left, right = a.shape, b.shape
            if left == right or broadcasts(left, right):
                return xp, a, b
    elif kind is float:
        xp = floats(a)
        if xp is not None:
            return xp, a, b
    return _paired_with_care(op, a, b)


def paired_truths(op: str, a: Array, b: Array) -> Operands:
    """The same for truth values; any other arrays are refused."""
    if type(a) is type(b):
        xp = truth_values(a)
        if xp is not None and a.dtype == b.dtype:
            left, right = a.shape, b.shape
            if left == right or broadcasts(left, right):
                return xp, a, b
    truths(op, a, "a")
    return _paired_with_care(op, a, b)


def _paired_with_care(op: str, a: Array, b: Array) -> Operands:
    """The same as `paired`, whatever the operands are, with the error that says what is wrong."""
    xp, a, b = _of_any_kind(op, a, b)
    if type(a) in NUMBERS or type(b) in NUMBERS:
        return xp, a, b
    if a.dtype != b.dtype:
        raise unlike(op, a=a, b=b)
    if not broadcasts(a.shape, b.shape):
        raise wrong_shapes(op, "the shapes of a and b broadcast", a=a, b=b)
    return xp, a, b


def _of_any_kind(op: str, a: Array, b: Array) -> Operands:
    """The operands where they are not simply floating numbers in arrays of one type."""
    a, b = plain_number(a), plain_number(b)
    if type(b) in NUMBERS:
        if type(a) in NUMBERS:
            raise wrong(op, f"{a} and {b} are both numbers; one of them is an array")
        xp = primitives(a, op, "a")
        return xp, a, _beside(op, b, xp, "a", a)
    if type(a) in NUMBERS:
        xp = primitives(b, op, "b")
        return xp, _beside(op, a, xp, "b", b), b
    same_library(op, "a", a, "b", b)
    if op in _TAKES:
        _TAKES[op](op, a)
    return primitives(a), a, b


def _beside(op: str, number: float, xp: Primitives, name: str, x: Array) -> float:
    """The number, where it is one of the array's type."""
    if op in _TAKES:
        _TAKES[op](op, x)
    dtype = xp.dtype(x)
    if dtype.kind == "float" or dtype.kind == "complex":
        return _finite(op, number, dtype)
    if type(number) is float:
        what = f"{number} is no whole number, but {name} is {dtype}"
        raise wrong(op, f"{what}; use astype({name}, 'float32')")
    low, high = _range(dtype)
    if not low <= number <= high:
        what = f"{number} is outside of {dtype}, which is from {low} to {high}, and so is {name}"
        raise wrong(op, f"{what}; use astype({name}, 'int64') or a smaller number")
    return number


def _finite(op: str, number: float, dtype: DType) -> float:
    # No library takes a whole number of any size; some take none of more than 32 bits.
    if type(number) is not int or -(2**31) <= number < 2**31:
        return number
    try:
        return float(number)
    except OverflowError:
        raise wrong(
            op, f"a whole number of {number.bit_length()} bits is none of {dtype}"
        ) from None


def _range(dtype: DType) -> tuple[int, int]:
    """The smallest and the largest number of a type of whole numbers, or of truth values."""
    if dtype.kind == "bool":
        return 0, 1
    if dtype.kind == "uint":
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


_INFINITE = float("inf")


def is_finite(number: Any) -> bool:
    """Whether it is a number of Python's that has an end; truth values and arrays are none.

    >>> is_finite(0.5), is_finite(float("nan")), is_finite(True), is_finite("1")
    (True, False, False, False)
    """
    return type(number) in (int, float) and -_INFINITE < number < _INFINITE


def numbers_that(
    op: str, rule: str, holds: Callable[[float], bool], **numbers: Any
) -> tuple[Any, ...]:
    """The numbers as Python's own; the first that is not finite or breaks the rule is refused.

    >>> numbers_that("update_adam", "is at least 0", lambda number: number >= 0, decay=0.5)
    (0.5,)
    """
    plain = tuple([plain_number(number) for number in numbers.values()])
    for name, number in zip(numbers, plain, strict=True):
        if not is_finite(number) or not holds(number):
            raise wrong(op, f"{name} is a number that {rule}, but it is {in_words(number)}")
    return plain


def number_or_array(op: str, name: str, value: Any, kinds: tuple[str, ...]) -> Any:
    """A number of Python's, or an array without axes whose element type is of one of the kinds.

    Whether a number has an end is not looked at: code that is compiled for any rate would be
    compiled anew for each.
    """
    number = plain_number(value)
    if type(number) in (int, float):
        return number
    xp = known(number)
    if xp is None or number.shape or xp.dtype(number).kind not in kinds:
        here = in_words(number)
        if xp is not None:
            here = f"an array of {xp.dtype(number)} of the shape {tuple(number.shape)}"
        raise wrong(op, f"{name} is a number, or an array of one without axes, but it is {here}")
    return number


FLOAT32 = DTYPES["float32"]
INT32 = DTYPES["int32"]
BOOL = DTYPES["bool"]


def wide(dtype: DType) -> DType:
    """The type in which an op computes: `float64` for itself, `float32` for all others.

    >>> wide(DTYPES["bfloat16"]).name, wide(DTYPES["float64"]).name
    ('float32', 'float64')
    """
    return dtype if dtype.bits == 64 and dtype.kind == "float" else FLOAT32


def widened(xp: Primitives, x: Array) -> Array:
    """The array as `float32` where it holds floating numbers of fewer bits, else itself."""
    dtype = xp.dtype(x)
    return xp.astype(x, FLOAT32) if dtype.kind == "float" and dtype.bits < 32 else x
