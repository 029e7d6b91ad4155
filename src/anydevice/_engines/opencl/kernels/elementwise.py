"""Kernels that compute each element of a result from elements of the operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import pyopencl as cl
from pyopencl.array import Array

from anydevice._core.dtypes import DType
from anydevice._core.primitives import BITWISE, OPTIONAL_ONE
from anydevice._core.record import Record
from anydevice._engines.host import no_dtype
from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.buffers import Ints
from anydevice._engines.opencl.kernels import programs
from anydevice._engines.opencl.kernels.programs import Number, bits_of, dtype_of

LARGEST_INDEX = 2**31 - 1
"""The largest index of 32 bits."""


class Walk(Record):
    """How a kernel walks through several arrays: the pieces of text, and the arguments for them."""

    sizes_text: str
    strides_text: str
    offsets_text: str
    sizes: Ints
    strides: Ints

    @property
    def arguments(self) -> Ints:
        return self.sizes + self.strides

    def defines(self, prefix: str) -> dict[str, object]:
        """Return the definitions of the pieces of text in kernels: SIZES, STRIDES and OFFSETS."""
        return {
            f"{prefix}SIZES": self.sizes_text,
            f"{prefix}STRIDES": self.strides_text,
            f"{prefix}OFFSETS": self.offsets_text,
        }


@lru_cache(maxsize=4096)
def walk(
    shape: Ints, strides: tuple[Ints, ...], names: tuple[str, ...], item: str = "item"
) -> Walk:
    """Return the walk through a shape from `buffers.collapsed`, with one name for each array."""
    rank = len(shape)
    lines = [f"size_t rest_{item} = {item};"]
    for axis in range(rank - 1, 0, -1):
        lines.append(
            f"const INDEX {item}{axis} = (UNSIGNED)rest_{item} % (UNSIGNED){item}_size{axis};"
        )
        lines.append(f"rest_{item} = (UNSIGNED)rest_{item} / (UNSIGNED){item}_size{axis};")
    lines.append(f"const INDEX {item}0 = rest_{item};")
    parameters: list[str] = []
    values: list[int] = []
    for name, steps in zip(names, strides, strict=True):
        terms: list[str] = []
        for axis, step in enumerate(steps):
            if axis == rank - 1 and step in (0, 1):
                terms += [f"{item}{axis}"] if step else []
                continue
            parameters.append(f", const INDEX {name}_{item}_stride{axis}")
            values.append(step)
            terms.append(f"{item}{axis} * {name}_{item}_stride{axis}")
        lines.append(f"const INDEX {item}_at_{name} = {' + '.join(terms) or '0'};")
    return Walk(
        sizes_text="".join(f", const INDEX {item}_size{axis}" for axis in range(1, rank)),
        strides_text="".join(parameters),
        offsets_text=" ".join(lines),
        sizes=tuple(shape[1:]),
        strides=tuple(values),
    )


def is_wide(*extents: int) -> bool:
    """Whether an index that goes so far needs 64 bits."""
    return max(extents) > LARGEST_INDEX


def extent(start: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return one past the index of the last element."""
    steps = ((size - 1) * max(step, 0) for size, step in zip(shape, strides, strict=True))
    return start + sum(steps) + 1


# The operations in OpenCL C: `a` and `b` are the operands, `NUMBER` is their type. An operation
# without a text for integers is not defined for them.

_SIGMOID = "(a >= 0 ? 1 / (1 + exp(-a)) : exp(a) / (1 + exp(a)))"

_REST = "{0} + ({0} != 0 && ({0} < 0) != (b < 0) ? b : 0)"  # of the sign of b

FLOATING: dict[str, str] = {
    **{name: f"{name}(a)" for name in OPTIONAL_ONE},
    **{name: f"{name}(a, b)" for name in ("atan2", "copysign", "hypot")},
    "logaddexp": "(a == b ? a + log((NUMBER)2) : fmax(a, b) + log1p(exp(-fabs(a - b))))",
    "floor_divide": "floor_division(a, b)",
    "remainder": _REST.format("fmod(a, b)"),
    "abs": "fabs(a)",
    "negative": "-a",
    "sign": "(isnan(a) ? a : (NUMBER)((a > 0) - (a < 0)))",
    "floor": "floor(a)",
    "round": "rint(a)",
    "exp": "exp(a)",
    "log": "log(a)",
    "sqrt": "sqrt(a)",
    "rsqrt": "rsqrt(a)",
    "sin": "sin(a)",
    "cos": "cos(a)",
    "tanh": "tanh(a)",
    "sigmoid": _SIGMOID,
    "erf": "erf(a)",
    "isnan": "isnan(a)",
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "divide": "a / b",
    "pow": "pow(a, b)",
    "maximum": "(a > b || a != a ? a : b)",
    "minimum": "(a < b || a != a ? a : b)",
    "silu": f"(a * {_SIGMOID})",
    "swiglu": f"(a * {_SIGMOID}) * b",
}

INTEGER: dict[str, str] = {
    **dict(zip(BITWISE, ("a & b", "a << b", "a | b", "a >> b", "a ^ b"), strict=True)),
    "floor_divide": "a / b - (a % b != 0 && (a < 0) != (b < 0))",
    "remainder": _REST.format("a % b"),
    "abs": "(a < 0 ? -a : a)",
    "negative": "-a",
    "sign": "((a > 0) - (a < 0))",
    "floor": "a",
    "isnan": "0",
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "pow": "integer_power(a, b)",
    "maximum": "(a > b ? a : b)",
    "minimum": "(a < b ? a : b)",
}

BOOLEAN: dict[str, str] = {
    "logical_not": "a == 0",
    "equal": "a == b",
    "less": "a < b",
    "less_equal": "a <= b",
    "logical_and": "a != 0 && b != 0",
    "logical_or": "a != 0 || b != 0",
}
"""Comparisons, the same for all dtypes; their results are booleans, as those of `isnan`."""


def expression(operation: str, number: Number) -> str:
    """Return the text of an operation; raises `UnsupportedError` if the dtype has none."""
    own = FLOATING if number.floating else INTEGER
    text = BOOLEAN.get(operation) or own.get(operation)
    if text is None:
        what = f"OpenCL has no {operation} of {number.name}"
        raise no_dtype(what, "convert the array to float32")
    return text


def gives_booleans(operation: str) -> bool:
    """Whether the results are booleans, whatever the operands are."""
    return operation == "isnan" or operation in BOOLEAN


_GROUP = 256


class Reading(Record):
    """An array that a kernel reads: element `a`, memory `pa` and index `ia`, with its strides."""

    array: Any
    number: Number
    strides: Ints


def reading(x: Array, number: Number, shape: Ints) -> Reading:
    """Return an array that is repeated to the shape of the result."""
    return Reading(x, number, buffers.broadcast_strides(x, shape))


def run(
    body: str,
    readings: Mapping[str, Reading],
    out: Array,
    number: Number,
    *,
    shape: Ints | None = None,
    strides: Ints | None = None,
    extras: Sequence[tuple[str, Number | None, Any]] = (),
) -> Any:
    """Run the statement `body` over a shape, by default that of `out`, and return `out`."""
    shape = out.shape if shape is None else shape
    count = prod(shape)
    if not count:
        return out
    strides = buffers.strides_of(out) if strides is None else strides
    sizes, steps = buffers.collapsed(
        shape, strides, *(operand.strides for operand in readings.values())
    )
    arrays = [out, *(operand.array for operand in readings.values())]
    starts = [buffers.offset_of(x) for x in arrays]
    far = max(extent(s, sizes, t) for s, t in zip(starts, steps, strict=True))
    far = max(far, count, *(value for _, kind, value in extras if kind is None), 0)
    numbers = (number, *(operand.number for operand in readings.values()))
    more = tuple((name, kind) for name, kind, _ in extras)
    names = ("r", *readings)
    route = walk(sizes, steps, names)
    texts = (route.sizes_text, route.strides_text, route.offsets_text)
    kernel = _kernel(out.context, body, names, numbers, more, *texts, is_wide(far))
    arguments: list[Any] = [count, *route.sizes]
    for x, start in zip(arrays, starts, strict=True):
        arguments += (x.base_data, start)
    arguments += route.strides
    arguments += [value if kind is None else np.asarray(value) for _, kind, value in extras]
    kernel.over(count, *arguments, reads=arrays)
    return out


@lru_cache(maxsize=4096)
def _kernel(
    context: cl.Context, body: str, names: tuple[str, ...], numbers: tuple[Number, ...],
    extras: tuple[tuple[str, Number | None], ...],
    sizes_text: str, strides_text: str, offsets_text: str, wide: bool,
) -> programs.Kernel:  # fmt: skip
    operands, read, places = "", "", offsets_text
    for name, number in zip(names, numbers, strict=True):
        const = "" if name == "r" else "const "
        operands += f", __global {const}{number.element} *p{name}, const INDEX start_{name}"
        places += f" const size_t i{name} = start_{name} + item_at_{name};"
        if name != "r":
            read += f"const {number.number} {name} = load_{number.name}(p{name}, i{name}); "
    operands += strides_text
    for name, kind in extras:
        operands += f", const {'INDEX' if kind is None else kind.number} {name}"
    return programs.kernel(
        context, "elementwise.cl", "elementwise", numbers[0], wide, _GROUP,
        PLACES=sizes_text, OPERANDS=operands, OFFSETS=places, READ=read, BODY=body,
        INTEGER_POWERS="integer_power" in body, FLOOR_DIVISIONS="floor_division" in body,
    )  # fmt: skip


def copy(x: Array, out: Array) -> Array:
    """Copy the elements of an array, whatever they are, into another of the same shape."""
    number = bits_of(dtype_of(x))
    return run("pr[ir] = a;", {"a": Reading(x, number, buffers.strides_of(x))}, out, number)


def plain(x: Array) -> Array:
    """Return the array with its elements in C order: itself where they are so already."""
    if buffers.is_plain(x):
        return x
    return copy(x, buffers.new(x.shape, dtype_of(x), x.context))


def filled(shape: Ints, value: Any, dtype: DType, number: Number, context: cl.Context) -> Array:
    """Return a new array, every element `value`, a number of the type that `number` says."""
    out = buffers.new(shape, dtype, context)
    return run("STORE(pr, ir, value);", {}, out, number, extras=[("value", number, value)])
