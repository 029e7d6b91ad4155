"""Copies between the host and a device; large ones are staged through pinned memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from anydevice._arrays.stage import WORTH_STAGING, Piece, Ring, ring_of
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.engine import Engine
from anydevice.errors import UnsupportedError

MANY = 32
"""Number of arrays of one kind from which on it pays to copy them together."""

HostArray = np.ndarray[Any, Any]
_KIND = attrgetter("__class__", "dtype", "shape")
_TOGETHER = 2**28  # bytes of small arrays that are on the device twice for a moment


def upload(
    arrays: Sequence[Any], engine: Engine, device: Device, narrow: bool, failed_at: list[int]
) -> list[Array]:
    """NumPy arrays as arrays of an engine on a device, in their order.

    Where one cannot be placed, its position is appended to `failed_at` before the error is raised.
    """
    placed: list[Any] = [None] * len(arrays)
    staged: list[int] = []
    together = _upload_together(arrays, engine, device)
    for number, array in enumerate(arrays):
        if number in together:
            placed[number] = together[number]
            continue
        try:
            target = _staged_target(array, engine, device)
            if target is None:
                placed[number] = engine.place(array, device, narrow=narrow)
            else:
                placed[number] = target
                staged.append(number)
        except Exception:
            failed_at.append(number)
            raise
    ring = ring_of(device) if staged else None
    if ring is not None:
        _upload_staged([placed[n] for n in staged], [arrays[n] for n in staged], engine, ring)
    return placed


def _upload_together(
    arrays: Sequence[HostArray], engine: Engine, device: Device
) -> dict[int, Array]:
    """Place many small arrays of one kind together; return each, by position, in its own memory."""
    if device.backend != "cuda" or len(arrays) < MANY:
        return {}
    alike: dict[object, list[int]] = defaultdict(list)
    for number, kind in enumerate(map(_KIND, arrays)):
        alike[kind].append(number)
    placed: dict[int, Array] = {}
    for numbers in alike.values():
        first = arrays[numbers[0]]
        small = type(first) is np.ndarray and first.ndim and 0 < first.nbytes < WORTH_STAGING
        if small and len(numbers) >= MANY:
            placed.update(
                zip(numbers, _separated_rows(arrays, numbers, engine, device), strict=False)
            )
    return placed


def _separated_rows(
    arrays: Sequence[HostArray], numbers: list[int], engine: Engine, device: Device
) -> list[Array]:
    """Arrays of one dtype and shape: packed, copied, and separated again on the device."""
    ring = ring_of(device)
    if ring is None:
        return []
    first = arrays[numbers[0]]
    dtype = as_dtype(first.dtype)
    try:
        engine.empty((1, *first.shape), dtype, device)
    except UnsupportedError:
        return []  # the plain copy says what is wrong, or narrows
    size = max(MANY, _TOGETHER // first.nbytes)
    rows: list[Array] = []
    for start in range(0, len(numbers), size):
        some = [arrays[number] for number in numbers[start : start + size]]
        target = engine.empty((len(some), *first.shape), dtype, device)
        ring.upload_rows(some, _address(target, engine))
        rows += engine.separate(target)
    return rows


def download(array: Array, engine: Engine) -> HostArray:
    """Read an array of an engine as a NumPy array of its own."""
    places = engine.devices_of(array) if _large_size(array) else ()
    ring = ring_of(places[0]) if len(places) == 1 else None
    if ring is None or engine.address(array) is None:
        return engine.to_host(array)
    engine.finish([array])
    host = np.empty(tuple(array.shape), engine.dtype_of(array).numpy())
    ring.download([Piece(host.ctypes.data, _address(array, engine), host.nbytes)])
    return host


def move(
    array: Array,
    engine: Engine,
    places: Sequence[Device],
    device: Device,
    *,
    detached: bool = False,
) -> Array:
    """Move an array to another device of its own library.

    Large ones go from the host through the ring, unless a gradient has to flow through the copy;
    `detached` says that none has to.
    """
    history = getattr(array, "requires_grad", False) and not detached
    from_host = len(places) == 1 and places[0].backend == "cpu" and device.backend == "cuda"
    size = _large_size(array)
    source = engine.address(array) if from_host and not history and size else None
    ring = ring_of(device) if source is not None else None
    if source is None or ring is None:
        return engine.move(array, device)
    target = engine.empty(tuple(array.shape), engine.dtype_of(array), device)
    address = engine.address(target)
    if address is None:
        return engine.move(array, device)
    ring.upload([Piece(source, address, size)])
    return target


def _staged_target(array: HostArray, engine: Engine, device: Device) -> Array | None:
    """Memory on the device for an array that is worth staging; `None` for any other."""
    if array.nbytes < WORTH_STAGING or ring_of(device) is None:
        return None
    try:
        target = engine.empty(array.shape, as_dtype(array.dtype), device)
    except UnsupportedError:
        return None  # the plain copy says what is wrong, or narrows
    return None if engine.address(target) is None else target


def _upload_staged(
    targets: list[Array], arrays: list[HostArray], engine: Engine, ring: Ring
) -> None:
    # Held until the copy has ended: the pieces only know addresses.
    sources = [np.ascontiguousarray(array, array.dtype.newbyteorder("=")) for array in arrays]
    pairs = zip(targets, sources, strict=True)
    ring.upload([Piece(s.ctypes.data, _address(target, engine), s.nbytes) for target, s in pairs])


def _address(array: Array, engine: Engine) -> int:
    """Return the address of an array that is known to have one."""
    address = engine.address(array)
    assert address is not None
    return address


def _large_size(array: object) -> int:
    """Return the bytes of an array that is worth staging; 0 for any other."""
    try:
        size = getattr(array, "nbytes", 0)
    except RuntimeError:  # PyTorch knows none for sparse tensors
        return 0
    return size if isinstance(size, int) and size >= WORTH_STAGING else 0
