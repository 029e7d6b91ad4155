"""Arrays that share memory: which of a tree's arrays do, and how they share it again elsewhere.

Two views of one memory that overlap are moved as the one stretch of memory that both lie in, and
become two views of the copy. Views that do not overlap cannot tell whether they still lie beside
each other, so they are moved one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anydevice.core.device import Device
from anydevice.core.dtypes import DTYPES, DType
from anydevice.core.engine import Engine, Storage
from anydevice.core.record import Record
from anydevice.engines.ownership import owner_of
from anydevice.errors import UnsupportedError


class View(Record):
    """An array as a part of a stretch of memory: from which byte on, and how it is laid out."""

    position: int
    """Its number among the arrays that were asked about."""
    dtype: DType
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]


class Stretch(Record):
    """Memory that several arrays share: its bytes as an array of their library, and the views."""

    memory: Any
    owner: Engine
    views: tuple[View, ...]

    def again(self, memory: Any, engine: Engine) -> dict[int, Any]:
        """The same views of a copy of the memory, by their numbers."""
        whole = engine.storage(memory)
        start = whole.offset if whole else 0
        return {
            view.position: engine.view(
                memory, view.dtype, start + view.offset, view.strides, view.shape
            )
            for view in self.views
        }


def stretches(values: Sequence[Any], positions: Sequence[int]) -> list[Stretch]:
    """The memory that at least two of the arrays at these positions overlap in.

    An array that its library knows no memory of shares none.
    """
    spans = sorted(_spans(values, positions), key=lambda span: span[:4])
    found: list[Stretch] = []
    together: list[_Span] = []
    reach = 0
    for span in spans:
        key, start, stop = span[:2], span[2], span[3]
        if together and key == together[0][:2] and start < reach:
            together.append(span)
            reach = max(reach, stop)
            continue
        found += _as_stretch(values, together, reach)
        together, reach = [span], stop
    return found + _as_stretch(values, together, reach)


def can_hold(engine: Engine, device: Device, stretch: Stretch) -> bool:
    """Whether an engine has such views of memory on a device, of these types."""
    if not engine.has_views:
        return False
    try:
        for dtype in {view.dtype for view in stretch.views}:
            engine.empty((0,), dtype, device)
    except UnsupportedError:
        return False
    lying_well = all(
        step % view.dtype.itemsize == 0 and step >= 0
        for view in stretch.views
        for step in (view.offset, *view.strides)
    )
    return lying_well or engine.name == stretch.owner.name == "numpy"


_Span = tuple[tuple[str, str], tuple[int, int], int, int, int, Storage]
"""Library and device, allocation, first and last byte in it, position, storage."""


def _spans(values: Sequence[Any], positions: Sequence[int]) -> list[_Span]:
    spans: list[_Span] = []
    for position in positions:
        value = values[position]
        owner = owner_of(value)
        if owner is None or not owner.has_views:
            continue
        storage = owner.storage(value)
        if storage is None or 0 in storage.shape or not _is_native(value):
            continue
        low = high = storage.offset
        for length, stride in zip(storage.shape, storage.strides, strict=True):
            way = (length - 1) * stride
            low, high = (low + way, high) if way < 0 else (low, high + way)
        place = (owner.name, str(owner.devices_of(value)[0]))
        high += owner.dtype_of(value).itemsize
        spans.append((place, storage.allocation, low, high, position, storage))
    return spans


def _as_stretch(values: Sequence[Any], spans: list[_Span], stop: int) -> list[Stretch]:
    if len(spans) < 2:
        return []
    start = spans[0][2]
    first = values[spans[0][4]]
    owner = owner_of(first)
    assert owner is not None
    memory = owner.view(first, DTYPES["uint8"], start, (1,), (stop - start,))
    views = tuple(
        View(
            position,
            owner.dtype_of(values[position]),
            storage.offset - start,
            storage.strides,
            storage.shape,
        )
        for _, _, _, _, position, storage in spans
    )
    return [Stretch(memory, owner, views)]


def _is_native(value: Any) -> bool:
    return bool(getattr(value.dtype, "isnative", True))
