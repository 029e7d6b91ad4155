"""Elements by their places: taking, writing and joining. The elements are copied as bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anydevice.core.engine import Absent
from anydevice.engines.opencl import arrays as views
from anydevice.engines.opencl.kernels.elementwise import Reading, copy, plain, run
from anydevice.engines.opencl.kernels.programs import (
    Number,
    bits_of,
    dtype_of,
    number_of,
    scalar_bits,
)
from anydevice.engines.opencl.kernels.reductions import axes_of

Ints = tuple[int, ...]

_TAKE = "const long at = (long)b; pr[ir] = at >= 0 && at < size ? pa[ia + at * step] : none;"
_WRITE = "const long at = (long)b; if (at >= 0 && at < size) pr[ir + at * step] = a;"


def _with(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at + 1 :])


def take(x: Any, indices: Any, axis: int) -> Any:
    """The slices of `x` at these places; what is out of range is `nan`, or 0."""
    (at,) = axes_of(axis, x.ndim)
    before, after = x.shape[:at], x.shape[at + 1 :]
    shape = before + indices.shape + after
    own = views.strides_of(x)
    from_x = own[:at] + (0,) * indices.ndim + own[at + 1 :]
    from_indices = (0,) * at + views.strides_of(indices) + (0,) * len(after)
    return _taken(x, indices, at, shape, from_x, from_indices)


def take_along_axis(x: Any, indices: Any, axis: int) -> Any:
    """One element for each index; what is out of range is `nan`, or 0.

    Raises `ValueError` where the shapes do not fit.
    """
    (at,) = axes_of(axis, x.ndim)
    if indices.ndim != x.ndim:
        raise ValueError(f"indices {indices.shape} have not the axes of an array {x.shape}")
    around = views.broadcast_shape(_with(x.shape, at, 1), _with(indices.shape, at, 1))
    shape = _with(around, at, indices.shape[at])
    from_x = views.broadcast_strides(x, _with(around, at, x.shape[at]))
    from_x = _with(from_x, at, 0)
    return _taken(x, indices, at, shape, from_x, views.broadcast_strides(indices, shape))


def _taken(
    x: Any,
    indices: Any,
    axis: int,
    shape: Ints,
    from_x: Ints,
    from_indices: Ints,
) -> Any:
    dtype = dtype_of(x)
    bits = bits_of(dtype)
    out = views.new(shape, dtype, x.context)
    if not out.size:
        return out
    none = scalar_bits(float("nan") if dtype.kind in ("float", "complex") else 0, dtype)
    if not x.size:
        return run("pr[ir] = none;", {}, out, bits, extras=[("none", bits, none)])
    readings = {
        "a": Reading(x, bits, from_x),
        "b": Reading(indices, _whole(indices), from_indices),
    }
    step, size = views.strides_of(x)[axis], x.shape[axis]
    extras = [("step", None, step), ("size", None, size), ("none", bits, none)]
    return run(_TAKE, readings, out, bits, extras=extras)


def _whole(indices: Any) -> Number:
    dtype = dtype_of(indices)
    if dtype.kind not in ("int", "uint"):
        raise Absent(
            f"{dtype} is no type for indices", instead="convert the indices to int32"
        ).error()
    return number_of(dtype, indices.context)


def write(x: Any, new: Any, positions: Any) -> Any:
    """`x` (batch, heads, keys, size) with rows replaced, in its own memory where it is its own.

    A view of another array is copied first, so that the other one stays as it is. Raises
    `ValueError` where the shapes do not fit.
    """
    batch, heads, keys, size = x.shape
    tokens = new.shape[2]
    if new.shape != (batch, heads, tokens, size) or positions.shape != (batch, tokens):
        raise ValueError(
            f"rows {new.shape} at positions {positions.shape} cannot be written into an array "
            f"{x.shape}"
        )
    bits = bits_of(dtype_of(x))
    if x.dtype != new.dtype:
        raise Absent(
            f"{new.dtype} cannot be written into an array of {x.dtype}",
            instead="convert the new rows first",
        ).error()
    target = x if views.may_be_written(x) else copy(x, views.new(x.shape, dtype_of(x), x.context))
    if not new.size or not x.size:
        return target
    to_batch, to_head, step, to_element = views.strides_of(target)
    at_batch, at_token = views.strides_of(positions)
    readings = {
        "a": Reading(new, bits, views.strides_of(new)),
        "b": Reading(positions, _whole(positions), (at_batch, 0, at_token, 0)),
    }
    return run(
        _WRITE, readings, target, bits,
        shape=new.shape, strides=(to_batch, to_head, 0, to_element),
        extras=[("step", None, step), ("size", None, keys)],
    )  # fmt: skip


def concat(arrays: Sequence[Any], axis: int) -> Any:
    """The arrays one behind the other along an axis.

    Raises `ValueError` where the shapes do not fit.
    """
    first = arrays[0]
    (at,) = axes_of(axis, first.ndim)
    around = first.shape[:at], first.shape[at + 1 :]
    for x in arrays:
        if x.ndim != first.ndim or (x.shape[:at], x.shape[at + 1 :]) != around:
            raise ValueError(f"arrays {first.shape} and {x.shape} cannot be joined at axis {axis}")
    length = sum(x.shape[at] for x in arrays)
    out = views.new((*around[0], length, *around[1]), dtype_of(first), first.context)
    place, strides = 0, views.strides_of(out)
    for x in arrays:
        if x.size:
            copy(x, views.view(out, x.shape, strides, place * strides[at]))
        place += x.shape[at]
    return out


def part(x: Any, axis: int, start: int, stop: int, step: int) -> Any:
    """A view of the elements from `start` up to `stop` along an axis."""
    (at,) = axes_of(axis, x.ndim)
    count = max(0, -(-(stop - start) // step))
    shape = _with(x.shape, at, count)
    if not x.size or not count:
        return views.new(shape, dtype_of(x), x.context)
    own = views.strides_of(x)
    strides = _with(own, at, own[at] * step)
    return views.view(x, shape, strides, views.offset_of(x) + start * own[at])


def reshaped(x: Any, shape: Ints) -> Any:
    """The elements in C order in another shape: a view, or a copy where none would do."""
    if shape == x.shape:
        return x
    if not x.size:
        return views.new(shape, dtype_of(x), x.context)
    strides = views.reshaped_strides(x, shape)
    if strides is None:
        x = plain(x)
        strides = views.plain_strides(shape)
    return views.view(x, shape, strides, views.offset_of(x))
