"""Everything that computes each element of a result from elements of the operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from anydevice.core.dtypes import DType
from anydevice.core.record import Record
from anydevice.engines import opencl_programs as programs
from anydevice.engines import opencl_views as views
from anydevice.engines.opencl_indexing import extent, index_types, is_wide, walk
from anydevice.engines.opencl_numbers import Number, bits_of, dtype_of
from anydevice.engines.opencl_queues import queue_of_context

Ints = tuple[int, ...]

_GROUP = 256


class Reading(Record):
    """An array that a kernel reads, with the strides by which it walks through the result's shape.

    In the text of a kernel the one by the name of `a` is: `a` its element, `pa` its memory, and
    `ia` the place of the element there.
    """

    array: Any
    number: Number
    strides: Ints


def reading(x: Any, number: Number, shape: Ints) -> Reading:
    """An array that is repeated to the shape of the result."""
    return Reading(x, number, views.broadcast_strides(x, shape))


def run(
    body: str,
    readings: Mapping[str, Reading],
    out: Any,
    number: Number,
    *,
    shape: Ints | None = None,
    strides: Ints | None = None,
    extras: Sequence[tuple[str, Number | None, Any]] = (),
) -> Any:
    """Run a kernel over a shape, that of `out` where none is named, and return `out`.

    `body` is a statement; the result is `pr` at `ir`, the work item `item`. `extras` are further
    arguments: name, type (`None` for an index) and value.
    """
    shape = out.shape if shape is None else shape
    count = prod(shape)
    if not count:
        return out
    strides = views.strides_of(out) if strides is None else strides
    sizes, steps = views.collapsed(shape, strides, *(each.strides for each in readings.values()))
    arrays = [out, *(each.array for each in readings.values())]
    starts = [views.offset_of(x) for x in arrays]
    far = max(extent(s, sizes, t) for s, t in zip(starts, steps, strict=True))
    far = max(far, count, *(value for _, kind, value in extras if kind is None), 0)
    numbers = (number, *(each.number for each in readings.values()))
    more = tuple((name, kind) for name, kind, _ in extras)
    context = out.context
    names = ("r", *readings)
    route = walk(sizes, steps, names)
    texts = (route.sizes_text, route.strides_text, route.offsets_text)
    key = (context, body, names, numbers, more, *texts)
    kernel = _kernel(*key, is_wide(far), programs.assumed)
    arguments: list[Any] = [count, *route.sizes]
    for x, start in zip(arrays, starts, strict=True):
        arguments += (x.base_data, start)
    arguments += (*route.strides, *(value for _, _, value in extras))
    kernel.over(queue_of_context(context), count, *arguments, wait_for=views.events_of(*arrays))
    return out


@lru_cache(maxsize=4096)
def _kernel(
    context: Any,
    body: str,
    names: tuple[str, ...],
    numbers: tuple[Number, ...],
    extras: tuple[tuple[str, Number | None], ...],
    sizes_text: str,
    strides_text: str,
    offsets_text: str,
    wide: bool,
    assumed: programs.Assumed,
) -> programs.Kernel:
    types, index = index_types(wide)
    defines: dict[str, object] = {**types, **numbers[0].defines()}
    operands, scalars, read, places = "", [], "", offsets_text
    for name, number in zip(names, numbers, strict=True):
        const = "" if name == "r" else "const "
        operands += f", __global {const}{number.element} *p{name}, const INDEX start_{name}"
        scalars += [None, index]
        places += f" const size_t i{name} = start_{name} + item_at_{name};"
        if name != "r":
            read += f"const {number.number} {name} = load_{number.name}(p{name}, i{name}); "
    more = [(name, index if kind is None else kind.scalar) for name, kind in extras]
    operands += strides_text
    for name, kind in extras:
        operands += f", const {'INDEX' if kind is None else kind.number} {name}"
    defines |= {"PLACES": sizes_text, "OPERANDS": operands, "OFFSETS": places}
    defines |= {"READ": read, "BODY": body, "WHOLE_POWERS": int("whole_power" in body)}
    sizes = [index] * (1 + sizes_text.count(","))
    steps = [index] * strides_text.count(",")
    scalars = [*sizes, *scalars, *steps, *(kind for _, kind in more)]
    return programs.kernel(context, "elementwise.cl", "elementwise", defines, scalars, _GROUP)


def copy(x: Any, out: Any) -> Any:
    """Copy the elements of an array, whatever they are, into another of the same shape."""
    number = bits_of(dtype_of(x))
    return run("pr[ir] = a;", {"a": Reading(x, number, views.strides_of(x))}, out, number)


def plain(x: Any) -> Any:
    """The array with its elements in C order: itself where they are so already."""
    if views.is_plain(x):
        return x
    return copy(x, views.new(x.shape, dtype_of(x), x.context))


def filled(shape: Ints, value: Any, dtype: DType, number: Number, context: Any) -> Any:
    """A new array, every element `value`, a number of the type that `number` says."""
    out = views.new(shape, dtype, context)
    return run("STORE(pr, ir, value);", {}, out, number, extras=[("value", number, value)])
