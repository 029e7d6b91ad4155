"""How OpenCL C computes with each element type, and what a device has none of."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydevice.core.dtypes import DTYPES, DType
from anydevice.core.engine import Absent
from anydevice.core.record import Record
from anydevice.engines.host import known_dtype
from anydevice.engines.opencl_programs import limits


class Number(Record):
    """An element type in a kernel: kept in memory as `element`, computed with as `number`.

    `name` says which of the functions of `kernels/numbers.cl` read and write it.
    """

    name: str
    element: str
    number: str
    scalar: Any
    """The NumPy type that a single number is passed to a kernel as."""

    @property
    def floating(self) -> bool:
        return self.number in ("float", "double")

    def defines(self, prefix: str = "") -> dict[str, object]:
        """What the kernels call the type: NAME, ELEMENT, NUMBER, LOAD and STORE."""
        return {
            f"{prefix}NAME": self.name,
            f"{prefix}ELEMENT": self.element,
            f"{prefix}NUMBER": self.number,
            f"{prefix}LOAD": f"load_{self.name}",
            f"{prefix}STORE": f"store_{self.name}",
        }


_NUMBERS: dict[str, Number] = {
    row.name: row
    for row in (
        Number("bool", "uchar", "uchar", np.uint8),
        Number("int8", "char", "char", np.int8),
        Number("int16", "short", "short", np.int16),
        Number("int32", "int", "int", np.int32),
        Number("int64", "long", "long", np.int64),
        Number("uint8", "uchar", "uchar", np.uint8),
        Number("uint16", "ushort", "ushort", np.uint16),
        Number("uint32", "uint", "uint", np.uint32),
        Number("uint64", "ulong", "ulong", np.uint64),
        Number("float16", "ushort", "float", np.float32),
        Number("bfloat16", "ushort", "float", np.float32),
        Number("float32", "float", "float", np.float32),
        Number("float64", "double", "double", np.float64),
    )
}

_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def number_of(dtype: DType, context: Any) -> Number:
    """How the device of a context computes with a type.

    Raises `UnsupportedError` for `float64` where the device has none, and for the types that no
    kernel computes with: complex numbers and those of 8 bits and less.
    """
    number = _NUMBERS.get(dtype.name)
    if number is None:
        raise Absent(
            f"OpenCL computes with no {dtype}", instead="convert the array before it is placed"
        ).error()
    if number.number == "double" and not limits(context).has_doubles:
        name = context.devices[0].name.strip()
        raise Absent(
            f"the OpenCL device {name} has no float64", instead="convert the array to float32"
        ).error()
    return number


def accumulator_of(number: Number) -> Number:
    """The type that sums of a type are kept in until they are complete."""
    return _NUMBERS["float32"] if number.number == "float" else number


def bits_of(dtype: DType) -> Number:
    """The type to copy elements as, whatever they are."""
    if dtype.itemsize not in _BITS:
        raise Absent(
            f"OpenCL rearranges no {dtype}", instead="convert the array before it is placed"
        ).error()
    return _NUMBERS[_BITS[dtype.itemsize]]


def scalar(value: float | int | bool, dtype: DType, number: Number) -> Any:
    """A Python number as an argument of a kernel, rounded to the type of the arrays beside it."""
    return np.array(value).astype(dtype.numpy()).astype(number.scalar)[()]


def scalar_bits(value: float | int | bool, dtype: DType) -> Any:
    """The bits of a Python number in a type, as an argument of a kernel that copies."""
    return np.array(value).astype(dtype.numpy()).view(bits_of(dtype).scalar)[()]


def dtype_of(x: Any) -> DType:
    """The type of an array's elements."""
    return known_dtype(x.dtype)


BOOL = DTYPES["bool"]
INT32 = DTYPES["int32"]
FLOAT32 = DTYPES["float32"]
