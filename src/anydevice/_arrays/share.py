"""Arrays that share memory: which ones of a tree do, and how they share it after a move.

Two views that overlap are moved as the one block of memory that both lie in, and become two views
of the copy. Views that do not overlap cannot tell whether they still lie beside each other, so
they are moved one by one unless moving them as one costs little more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.engine import Engine, Storage
from anydevice._core.record import Record, replace
from anydevice._machine.engines.registry import owner_of
from anydevice.errors import UnsupportedError

_MOST_WORK = 10_000
_SOMEWHERE = 1 << 40  # NumPy takes an address of 0 for a missing one


class View(Record):
    """An array as a part of a block of memory: its first byte, and its layout."""

    position: int
    """The index among the given arrays."""
    dtype: DType
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]


class SharedMemory(Record):
    """Memory that several arrays share: its bytes as an array of their library, and the views."""

    memory: Array
    owner: Engine
    views: tuple[View, ...]

    def views_of(self, memory: Array, engine: Engine) -> dict[int, Array]:
        """Return the same views of a copy of the memory, by position."""
        whole = engine.storage(memory)
        start = whole.offset if whole else 0
        return {
            view.position: engine.view(
                memory, view.dtype, start + view.offset, view.strides, view.shape
            )
            for view in self.views
        }

    def cast(self, dtype: DType) -> SharedMemory | None:
        """Return the same views of a copy in another dtype, where floating dtypes differ from it.

        `None` if they are not all of one dtype, or do not begin at whole elements of it.
        """
        own, size = self.views[0].dtype, self.views[0].dtype.itemsize
        if own == dtype or all(view.dtype.kind != "float" for view in self.views):
            return self
        steps = (step for view in self.views for step in (view.offset, *view.strides))
        if any(view.dtype != own for view in self.views) or any(step % size for step in steps):
            return None
        elements = self.owner.view(
            self.memory, own, self._start(self.memory), (size,), (self.memory.shape[0] // size,)
        )
        copy = cast(elements, self.owner, dtype)
        length = elements.shape[0] * dtype.itemsize
        memory = self.owner.view(copy, DTYPES["uint8"], self._start(copy), (1,), (length,))
        views = (
            replace(
                view,
                dtype=dtype,
                offset=view.offset // size * dtype.itemsize,
                strides=tuple(step // size * dtype.itemsize for step in view.strides),
            )
            for view in self.views
        )
        return SharedMemory(memory, self.owner, tuple(views))

    def _start(self, memory: Array) -> int:
        whole = self.owner.storage(memory)
        return whole.offset if whole else 0


def cast(x: Array, engine: Engine, dtype: DType) -> Array:
    """Return an array in another dtype, where it is; numbers too large for it become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return engine.ops.astype(x, dtype)


def shared_memory(values: Sequence[Array], positions: Sequence[int]) -> list[SharedMemory]:
    """Find the memory that at least two of the arrays at these positions overlap in.

    An array whose library knows nothing of its memory shares none.
    """
    known = [span for position in positions if (span := _span(values[position], position))]
    spans = sorted(known, key=lambda span: (span.place, span.start))
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
        _as_shared(values, group)
        for near in together
        for group in _overlapping(near)
        if len(group) > 1
    ]


def can_hold(engine: Engine, device: Device, shared: SharedMemory) -> bool:
    """Whether an engine has such views on a device, of these dtypes."""
    if not engine.has_views:
        return False
    try:
        for dtype in {view.dtype for view in shared.views}:
            engine.empty((0,), dtype, device)
    except UnsupportedError:
        return False
    aligned = all(
        step % view.dtype.itemsize == 0 and step >= 0
        for view in shared.views
        for step in (view.offset, *view.strides)
    )
    return aligned or engine.name == shared.owner.name == "numpy"


class _Span(Record):
    """The bytes of an array in memory; `place` is its library, device and allocation."""

    place: tuple[str, str, int, int]
    start: int
    stop: int
    position: int
    storage: Storage
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.storage.shape) * self.itemsize

    def outline(self) -> Any:
        """Return an array with this layout and no data: only good for asking what overlaps."""
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


def _span(value: Array, position: int) -> _Span | None:
    """Return the span of an array; `None` if it shares nothing, or nothing is known of it."""
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
    """Neighbouring spans in groups that are moved as one.

    All of them, where moving them together is hardly more than moving each. Columns of a large
    matrix are neighbours too, but have no byte in common, and must not drag the matrix along.
    """
    whole = max(span.stop for span in spans) - spans[0].start
    if whole <= 2 * sum(span.nbytes for span in spans):
        return [spans]
    groups: list[list[_Span]] = []
    for span in spans:
        met = [group for group in groups if any(_meet(span, other) for other in group)]
        groups = [group for group in groups if group not in met]
        together = (one for group in (*met, [span]) for one in group)
        groups.append(sorted(together, key=attrgetter("start")))
    return groups


def _meet(one: _Span, other: _Span) -> bool:
    if one.stop <= other.start or other.stop <= one.start:
        return False
    try:
        effort: Any = _MOST_WORK  # NumPy's own annotation knows two numbers only
        return bool(np.shares_memory(one.outline(), other.outline(), effort))
    except np.exceptions.TooHardError:
        return True


def _as_shared(values: Sequence[Array], spans: list[_Span]) -> SharedMemory:
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
    return SharedMemory(memory, owner, views)


def _is_plain(value: Array, owner: Engine) -> bool:
    """Whether it is nothing but its bytes: no mask beside them, no foreign byte order."""
    if owner.name != "numpy":
        return True
    if not isinstance(value, np.ndarray) or type(value) not in (np.ndarray, np.memmap):
        return False
    return bool(value.dtype.isnative)
