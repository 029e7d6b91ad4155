"""Elements by their places: taking, writing and joining. The elements are copied as bits."""

from __future__ import annotations

from collections.abc import Sequence

from pyopencl.array import Array

from anydevice._engines.host import no_dtype
from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.buffers import Ints
from anydevice._engines.opencl.kernels.elementwise import Reading, copy, plain, run
from anydevice._engines.opencl.kernels.programs import bits_of, dtype_of, number_of, scalar_bits
from anydevice._engines.opencl.kernels.reductions import axes_of
from anydevice._engines.primitives import missing_value

_TAKE = "const long at = (long)b; pr[ir] = at >= 0 && at < size ? pa[ia + at * step] : none;"
_WRITE = "const long at = (long)b; if (at >= 0 && at < size) pr[ir + at * step] = a;"


def _with(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at + 1 :])


def take(x: Array, indices: Array, axis: int) -> Array:
    """Return the slices of `x` at these indices; NaN or 0 for those out of range."""
    (at,) = axes_of(axis, x.ndim)
    before, after = x.shape[:at], x.shape[at + 1 :]
    shape = before + indices.shape + after
    own = buffers.strides_of(x)
    from_x = own[:at] + (0,) * indices.ndim + own[at + 1 :]
    from_indices = (0,) * at + buffers.strides_of(indices) + (0,) * len(after)
    return _gather(x, indices, at, shape, from_x, from_indices)


def take_along_axis(x: Array, indices: Array, axis: int) -> Array:
    """Return one element for each index, NaN or 0 if out of range; checks the shapes."""
    (at,) = axes_of(axis, x.ndim)
    if indices.ndim != x.ndim:
        raise ValueError(f"indices {indices.shape} have not the axes of an array {x.shape}")
    around = buffers.broadcast_shape(_with(x.shape, at, 1), _with(indices.shape, at, 1))
    shape = _with(around, at, indices.shape[at])
    from_x = buffers.broadcast_strides(x, _with(around, at, x.shape[at]))
    from_x = _with(from_x, at, 0)
    return _gather(x, indices, at, shape, from_x, buffers.broadcast_strides(indices, shape))


def _gather(
    x: Array, indices: Array, axis: int, shape: Ints, from_x: Ints, from_indices: Ints
) -> Array:
    dtype = dtype_of(x)
    bits = bits_of(dtype)
    out = buffers.new(shape, dtype, x.context)
    if not out.size:
        return out
    none = scalar_bits(missing_value(dtype), dtype)
    if not x.size:
        return run("pr[ir] = none;", {}, out, bits, extras=[("none", bits, none)])
    readings = {"a": Reading(x, bits, from_x), "b": _reading_of_indices(indices, from_indices)}
    step, size = buffers.strides_of(x)[axis], x.shape[axis]
    extras = [("step", None, step), ("size", None, size), ("none", bits, none)]
    return run(_TAKE, readings, out, bits, extras=extras)


def _reading_of_indices(indices: Array, strides: Ints) -> Reading:
    dtype = dtype_of(indices)
    if dtype.kind not in ("int", "uint"):
        raise no_dtype(f"{dtype} is no dtype for indices", "convert the indices to int32")
    return Reading(indices, number_of(dtype, indices.context), strides)


def write(x: Array, new: Array, positions: Array) -> Array:
    """Replace rows of `x`, in a copy if it is a view; raises `ValueError` if shapes do not fit."""
    batch, heads, keys, size = x.shape
    tokens = new.shape[2]
    if new.shape != (batch, heads, tokens, size) or positions.shape != (batch, tokens):
        raise ValueError(
            f"rows {new.shape} at positions {positions.shape} cannot be written into an array "
            f"{x.shape}"
        )
    if x.dtype != new.dtype:
        what = f"{new.dtype} cannot be written into an array of {x.dtype}"
        raise no_dtype(what, "convert the new rows first")
    dtype, bits = dtype_of(x), bits_of(dtype_of(x))
    target = x if buffers.may_be_written(x) else copy(x, buffers.new(x.shape, dtype, x.context))
    if not new.size or not x.size:
        return target
    to_batch, to_head, step, to_element = buffers.strides_of(target)
    at_batch, at_token = buffers.strides_of(positions)
    readings = {
        "a": Reading(new, bits, buffers.strides_of(new)),
        "b": _reading_of_indices(positions, (at_batch, 0, at_token, 0)),
    }
    return run(
        _WRITE, readings, target, bits,
        shape=new.shape, strides=(to_batch, to_head, 0, to_element),
        extras=[("step", None, step), ("size", None, keys)],
    )  # fmt: skip


def concat(arrays: Sequence[Array], axis: int) -> Array:
    """Join arrays along an axis; raises `ValueError` if the shapes do not fit."""
    first = arrays[0]
    (at,) = axes_of(axis, first.ndim)
    around = first.shape[:at], first.shape[at + 1 :]
    for x in arrays:
        if x.ndim != first.ndim or (x.shape[:at], x.shape[at + 1 :]) != around:
            raise ValueError(f"arrays {first.shape} and {x.shape} cannot be joined at axis {axis}")
    length = sum(x.shape[at] for x in arrays)
    out = buffers.new((*around[0], length, *around[1]), dtype_of(first), first.context)
    place, strides = 0, buffers.strides_of(out)
    for x in arrays:
        if x.size:
            copy(x, buffers.view(out, x.shape, strides, place * strides[at]))
        place += x.shape[at]
    return out


def slice_axis(x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
    """Return a view of the elements from `start` up to `stop` along an axis."""
    (at,) = axes_of(axis, x.ndim)
    count = max(0, -(-(stop - start) // step))
    shape = _with(x.shape, at, count)
    if not x.size or not count:
        return buffers.new(shape, dtype_of(x), x.context)
    own = buffers.strides_of(x)
    strides = _with(own, at, own[at] * step)
    return buffers.view(x, shape, strides, buffers.offset_of(x) + start * own[at])


def reshaped(x: Array, shape: Ints) -> Array:
    """Return the elements in C order in another shape: a view, or a copy where none would do."""
    if shape == x.shape:
        return x
    if not x.size:
        return buffers.new(shape, dtype_of(x), x.context)
    strides = buffers.reshaped_strides(x, shape)
    if strides is None:
        x = plain(x)
        strides = buffers.plain_strides(shape)
    return buffers.view(x, shape, strides, buffers.offset_of(x))
