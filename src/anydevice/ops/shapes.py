"""What ops ask of their operands, and the errors that name what was wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anydevice.core.dtypes import DType
from anydevice.core.primitives import Primitives, Shape
from anydevice.errors import ConfigurationError
from anydevice.ops.dispatch import Array, known, primitives
from anydevice.ops.numbers import NUMBERS, plain_number

NO_TYPE = Ellipsis
"""What has no element type has this one; NumPy would take `None` for `float64`."""


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


def paired(op: str, a: Array, b: Array) -> tuple[Primitives, Array, Array]:
    """Two arrays that go together, or an array and a number, with the primitives for them.

    Numbers of NumPy's come back as Python's, which take over the type of the array. Raises
    `ConfigurationError` where the element types differ, or the shapes do not broadcast.
    """
    xp = known(a)
    if xp is None:
        return _led_by_a_number(op, a, b)
    if type(b) in NUMBERS:
        _refuse_fraction(op, b, xp, a=a)
        return xp, a, b
    if a.dtype != getattr(b, "dtype", NO_TYPE):
        number = plain_number(b)
        if number is b:
            raise unlike(op, a=a, b=b)
        return paired(op, a, number)
    left, right = a.shape, b.shape
    if left != right and not broadcasts(left, right):
        raise wrong_shapes(op, "the shapes of a and b broadcast", a=a, b=b)
    # A number of NumPy's has a type and a shape, as if it were an array.
    return xp, a, b if right else plain_number(b)


def _led_by_a_number(op: str, a: Array, b: Array) -> tuple[Primitives, Array, Array]:
    """The same, where the type of a is not known: a number, or an array of a new type."""
    a, b = plain_number(a), plain_number(b)
    if type(a) not in NUMBERS:
        primitives(a, op, "a")  # from now on its type is known
        return paired(op, a, b)
    if type(b) in NUMBERS:
        raise wrong(op, f"{a} and {b} are both numbers; one of them is an array")
    xp = primitives(b, op, "b")
    _refuse_fraction(op, a, xp, b=b)
    return xp, a, b


def _refuse_fraction(op: str, number: float, xp: Primitives, **beside: Array) -> None:
    if type(number) is float:
        for name, x in beside.items():
            dtype = xp.dtype(x)
            if dtype.kind != "float":
                raise wrong(
                    op,
                    f"{number} is no whole number, but {name} is {dtype}; "
                    f"use astype({name}, 'float32')",
                )


def unlike(op: str, **arrays: Array) -> ConfigurationError:
    """The error for arrays that are not of one library, or not of one element type."""
    types = {name: primitives(x, op, name).dtype(x).name for name, x in arrays.items()}
    if len(set(types.values())) > 1:
        shown = ", ".join(f"{name} is {dtype}" for name, dtype in types.items())
        return wrong(op, f"arrays have one element type, but {shown}; use astype on one of them")
    kinds = ", ".join(
        f"{n} is a {type(x).__module__}.{type(x).__name__}" for n, x in arrays.items()
    )
    return wrong(op, f"arrays are of one library, but {kinds}; place both with to_device")


def same_type(op: str, a: Array, **others: Array) -> None:
    """Refuse arrays whose element types differ from that of the first."""
    for name, other in others.items():
        if a.dtype != getattr(other, "dtype", NO_TYPE):
            raise unlike(op, **{"the first": a, name: other})


def floating(op: str, x: Array) -> Primitives:
    """The primitives for an array of floating numbers; any other is refused."""
    xp = primitives(x, op)
    dtype = xp.dtype(x)
    if dtype.kind != "float":
        raise _not_of_kind(op, dtype, "floating numbers; use astype(x, 'float32')")
    return xp


def whole(op: str, name: str, x: Array) -> None:
    """Refuse indices, counts and places that are not whole numbers."""
    dtype = primitives(x, op, name).dtype(x)
    if dtype.kind != "int" and dtype.kind != "uint":
        raise _not_of_kind(op, dtype, f"whole numbers in {name}; use astype({name}, 'int32')")


def truths(op: str, x: Array, name: str = "") -> Primitives:
    """The primitives for an array of truth values; any other is refused."""
    xp = primitives(x, op, name)
    dtype = xp.dtype(x)
    if dtype.kind != "bool":
        raise _not_of_kind(op, dtype, "truth values; compare first, as in ops.less(x, 0)")
    return xp


def _not_of_kind(op: str, dtype: DType, wanted: str) -> ConfigurationError:
    return wrong(op, f"this is an array of {dtype}, and it takes {wanted}")


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes broadcast.

    >>> broadcasts((2, 3), (1,)), broadcasts((2, 3), (2,))
    (True, False)
    """
    return all(m == n or m == 1 or n == 1 for m, n in zip(a[::-1], b[::-1], strict=False))


def axis_of(op: str, x: Array, axis: int) -> int:
    """The axis counted from the front."""
    count: int = x.ndim
    if type(axis) is not int:
        axis = plain_number(axis)
    if not -count <= axis < count:
        raise wrong_shapes(op, f"axis {axis} is one of x", x=x)
    return axis % count


def axes_of(op: str, x: Array, axis: int | Sequence[int] | None) -> tuple[int, ...]:
    """The axes counted from the front; all of them for `None`."""
    if axis is None:
        return tuple(range(len(x.shape)))
    if isinstance(axis, int) or isinstance(axis := plain_number(axis), int):
        return (axis_of(op, x, axis),)
    axes = tuple(axis_of(op, x, one) for one in axis)
    if len(set(axes)) != len(axes):
        raise wrong_shapes(op, f"the axes {tuple(axis)} are different ones", x=x)
    return axes


def size_of(shape: Shape) -> int:
    """How many elements an array of this shape has."""
    return math.prod(shape)


def pair_of(op: str, name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    """A number for both height and width, or one for each; neither is smaller than `least`."""
    one = plain_number(value)
    both = (one, one) if isinstance(one, int) else tuple(one)
    if len(both) != 2 or min(both) < least:
        raise wrong(op, f"{name} is a whole number from {least} on, or two, but it is {value!r}")
    return both
