"""Arrays that share memory: which of a tree's arrays do, and how they share it again elsewhere.

Two views of one memory that overlap are moved as the one stretch of memory that both lie in, and
become two views of the copy. Views that do not overlap cannot tell whether they still lie beside
each other, so they are moved one by one unless moving them as one costs little more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anydevice.core.device import Device
from anydevice.core.dtypes import DTYPES, DType
from anydevice.core.engine import Engine, Storage
from anydevice.core.record import Record
from anydevice.engines.lookup import owner_of
from anydevice.errors import UnsupportedError

_MOST_WORK = 10_000
_SOMEWHERE = 1 << 40  # NumPy takes an address of 0 for a missing one


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
    spans = sorted(_spans(values, positions), key=lambda span: (span.place, span.start))
    together: list[list[_Span]] = []
    reach = 0
    for span in spans:
        if together and span.place == together[-1][0].place and span.start < reach:
            together[-1].append(span)
            reach = max(reach, span.stop)
        else:
            together.append([span])
            reach = span.stop
    return [
        _as_stretch(values, group)
        for near in together
        for group in _overlapping(near)
        if len(group) > 1
    ]


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


class _Span(Record):
    """Where an array begins and ends in its allocation, which library and device are part of."""

    place: tuple[str, str, int, int]
    start: int
    stop: int
    position: int
    storage: Storage
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.storage.shape) * self.itemsize

    def touched(self) -> Any:
        """An array of nothing that lies as this one does: only good for asking what overlaps."""
        return np.asarray(_Outline(self))


class _Outline:
    """Addresses for NumPy to compare. Nothing is ever read there."""

    def __init__(self, span: _Span) -> None:
        self.__array_interface__ = {
            "data": (_SOMEWHERE + span.storage.offset, True),
            "shape": span.storage.shape,
            "strides": span.storage.strides,
            "typestr": f"|V{span.itemsize}",
            "version": 3,
        }


def _spans(values: Sequence[Any], positions: Sequence[int]) -> list[_Span]:
    return [span for position in positions if (span := _span(values[position], position))]


def _span(value: Any, position: int) -> _Span | None:
    """Where an array lies; `None` where it shares nothing, or nothing is known of it."""
    owner = owner_of(value)
    if owner is None or not owner.has_views or not _is_plain(value, owner):
        return None
    try:
        storage, itemsize = owner.storage(value), owner.dtype_of(value).itemsize
    except Exception:  # a type or layout of its own: moving it alone says what is wrong
        return None
    if storage is None or 0 in storage.shape:
        return None
    start = stop = storage.offset
    for length, stride in zip(storage.shape, storage.strides, strict=True):
        way = (length - 1) * stride
        start, stop = (start + way, stop) if way < 0 else (start, stop + way)
    place = (owner.name, str(owner.devices_of(value)[0]), *storage.allocation)
    return _Span(place, start, stop + itemsize, position, storage, itemsize)


def _overlapping(spans: list[_Span]) -> list[list[_Span]]:
    """Spans that lie near each other, in groups that are to be moved as one.

    All of them, where moving them together is hardly more than moving each. Columns of a large
    matrix lie near each other too, but have no byte in common: they are not to drag it along.
    """
    whole = max(span.stop for span in spans) - spans[0].start
    if whole <= 2 * sum(span.nbytes for span in spans):
        return [spans]
    groups: list[list[_Span]] = []
    for span in spans:
        met = [group for group in groups if any(_meet(span, other) for other in group)]
        groups = [group for group in groups if group not in met]
        groups.append(sorted((one for group in (*met, [span]) for one in group), key=_start))
    return groups


def _start(span: _Span) -> int:
    return span.start


def _meet(one: _Span, other: _Span) -> bool:
    if one.stop <= other.start or other.stop <= one.start:
        return False
    try:
        effort: Any = _MOST_WORK  # NumPy's own annotation knows two numbers only
        return bool(np.shares_memory(one.touched(), other.touched(), effort))
    except np.exceptions.TooHardError:
        return True


def _as_stretch(values: Sequence[Any], spans: list[_Span]) -> Stretch:
    start, stop = spans[0].start, max(span.stop for span in spans)
    first = values[spans[0].position]
    owner = owner_of(first)
    assert owner is not None
    memory = owner.view(first, DTYPES["uint8"], start, (1,), (stop - start,))
    views = tuple(
        View(
            span.position,
            owner.dtype_of(values[span.position]),
            span.storage.offset - start,
            span.storage.strides,
            span.storage.shape,
        )
        for span in spans
    )
    return Stretch(memory, owner, views)


def _is_plain(value: Any, owner: Engine) -> bool:
    """Whether its bytes are all there is to it: no mask beside them, no foreign byte order."""
    if owner.name != "numpy":
        return True
    return type(value) in (np.ndarray, np.memmap) and value.dtype.isnative
