"""What ops ask of their operands, and the errors that name what was wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from anydevice.core.primitives import Primitives, Shape
from anydevice.engines.ownership import owner_of
from anydevice.engines.registry import row_of
from anydevice.errors import ConfigurationError
from anydevice.ops.dispatch import (
    Array,
    known,
    primitives,
    together,
    truth_values,
    whole_numbers,
    wrong_kind,
)
from anydevice.ops.numbers import in_words, plain_number


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
