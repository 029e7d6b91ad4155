"""Two operands that go together: arrays of one library and one type, or an array and a number."""

from __future__ import annotations

from anydevice.core.dtypes import DType
from anydevice.core.primitives import Primitives
from anydevice.ops.dispatch import (
    Array,
    floating,
    floats,
    known,
    numeric,
    primitives,
    truth_values,
)
from anydevice.ops.numbers import NUMBERS, plain_number
from anydevice.ops.shapes import broadcasts, same_library, truths, unlike, wrong, wrong_shapes

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
