"""Copies between ordinary memory and a device, through a ring of pinned buffers.

A device reads pinned memory by itself at the speed of the bus, but ordinary memory only through
the CPU. Several lanes, each a thread with its own stream and two pinned buffers, fill one buffer
while the other is in flight: copying by the CPU and by the bus overlap, and many cores share the
first. Each device has one ring, made on the first large copy and freed by `release`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from anydevice._arrays.memory.stats import on_release
from anydevice._core.device import Device
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record
from anydevice._engines.cuda_driver import CudaDriver, driver_of
from anydevice._machine.engines.registry import place_of

CHUNK = 4 * 2**20
MOST_LANES = 12
WORTH_STAGING = 2**20
"""Bytes below which the library's own copy is as quick."""

_BUFFERS = 2
_MOST_AT_ONCE = 1024  # arrays in one call, a limit of the system

Fill = Callable[[int, "Piece"], None]
"""Puts the bytes of a piece into the pinned memory at an address."""


class Piece(Record):
    """One part of a copy: its address on both sides, and its size; `fill` may number `host`."""

    host: int
    device: int
    size: int


def cut(pieces: Sequence[Piece], chunk: int) -> Iterator[Piece]:
    for piece in pieces:
        for start in range(0, piece.size, chunk):
            size = min(chunk, piece.size - start)
            yield Piece(piece.host + start, piece.device + start, size)


class _Lane:
    """A stream with its pinned buffers; used by one thread at a time."""

    def __init__(self, copier: CudaDriver, chunk: int) -> None:
        self.copier = copier
        self.stream = copier.stream()
        self.buffers = [copier.pinned(chunk) for _ in range(_BUFFERS)]
        self.events = [copier.event() for _ in range(_BUFFERS)]

    def upload(self, pieces: Iterator[Piece], fill: Fill | None) -> None:
        self.begin(pieces, fill)
        self.finish()

    def begin(self, pieces: Iterator[Piece], fill: Fill | None) -> None:
        """Start copies; the last ones are in flight when it returns."""
        turns = itertools.cycle(zip(self.buffers, self.events, strict=True))
        for piece, (buffer, event) in zip(pieces, turns, strict=False):
            self.copier.wait(event)
            source = self._fill(buffer, piece, fill)
            self.copier.copy_in(piece.device, source, piece.size, self.stream)
            self.copier.mark(event, self.stream)

    def _fill(self, buffer: int, piece: Piece, fill: Fill | None) -> int:
        """Return the address of pinned memory with the piece: the buffer, or the piece's own."""
        if fill is not None:
            fill(buffer, piece)
        elif self.copier.is_pinned(piece.host, piece.size):
            return piece.host
        else:
            ctypes.memmove(buffer, piece.host, piece.size)
        return buffer

    def download(self, pieces: Iterator[Piece]) -> None:
        turns = itertools.cycle(zip(self.buffers, self.events, strict=True))
        waiting: list[tuple[Piece, int, Any]] = []
        for piece, (buffer, event) in zip(pieces, turns, strict=False):
            if len(waiting) == _BUFFERS:
                self._empty(*waiting.pop(0))
            self.copier.copy_out(buffer, piece.device, piece.size, self.stream)
            self.copier.mark(event, self.stream)
            waiting.append((piece, buffer, event))
        for copy in waiting:
            self._empty(*copy)

    def finish(self) -> None:
        for event in self.events:
            self.copier.wait(event)

    def _empty(self, piece: Piece, buffer: int, event: Any) -> None:
        self.copier.wait(event)
        ctypes.memmove(piece.host, buffer, piece.size)

    def close(self) -> None:
        self.finish()
        for buffer in self.buffers:
            self.copier.give_back(buffer)
        self.copier.destroy(self.stream, *self.events)


class NoThreadsError(Exception):
    """The system gives this process no further thread."""


def _started_threads(count: int, copier: CudaDriver) -> ThreadPoolExecutor:
    """Return threads that all run already, so that handing them work cannot fail."""
    threads = ThreadPoolExecutor(
        count, thread_name_prefix="anydevice copy", initializer=copier.enter
    )
    go_on = threading.Event()
    try:
        for _ in range(count):  # each waits, so the next needs a thread of its own
            threads.submit(go_on.wait)
    except RuntimeError:
        go_on.set()
        threads.shutdown()
        raise NoThreadsError from None
    go_on.set()
    return threads


class Ring:
    """The lanes of one device: bounded, reused from copy to copy, freed by `close`."""

    def __init__(self, copier: CudaDriver, lanes: int, chunk: int = CHUNK) -> None:
        self._copier = copier
        self._chunk = chunk
        self._threads = _started_threads(lanes, copier)
        self._turn = ForkSafeLock()
        self._lanes = self._aside(lambda: [_Lane(copier, chunk) for _ in range(lanes)])

    def upload(self, pieces: Sequence[Piece], fill: Fill | None = None) -> None:
        """Copy every piece from the host to the device, by `fill` if given; wait for all."""
        self._run(lambda lane, shared: lane.upload(shared, fill), pieces)

    def begin(self, pieces: Sequence[Piece], fill: Fill | None, marks: Sequence[Any]) -> None:
        """Start the copies; `marks`, from `events`, are reached when they have arrived."""

        def start(lane: _Lane, shared: Iterator[Piece]) -> None:
            lane.begin(shared, fill)
            lane.copier.mark(marks[self._lanes.index(lane)], lane.stream)

        self._run(start, pieces)

    def events(self) -> list[Any]:
        events: list[Any] = self._aside(lambda: [self._copier.event() for _ in self._lanes])
        return events

    def wait(self, marks: Sequence[Any]) -> None:
        for mark in marks:
            self._copier.wait(mark)

    def upload_rows(self, rows: Sequence[Any], address: int) -> None:
        """Copy NumPy arrays of one dtype and shape, contiguously, to a device's address.

        They have at least one axis, and each fits into a buffer.
        """
        size = rows[0].nbytes
        some = max(1, self._chunk // size)

        def fill(buffer: int, piece: Piece) -> None:
            start = piece.host // size
            packed = rows[start : start + piece.size // size]
            if not _write_rows(packed, piece.size, self._copier.file_of(buffer)):
                memory = (ctypes.c_uint8 * piece.size).from_address(buffer)
                out = np.frombuffer(memoryview(memory), rows[0].dtype.newbyteorder("="))
                np.concatenate(packed, out=out.reshape(-1, *rows[0].shape[1:]))

        self.upload(
            [
                Piece(start * size, address + start * size, min(some, len(rows) - start) * size)
                for start in range(0, len(rows), some)
            ],
            fill,
        )

    def download(self, pieces: Sequence[Piece]) -> None:
        """Copy every piece from the device to the host; returns when all have arrived."""
        self._run(_Lane.download, pieces)

    def close(self) -> None:
        with self._turn.native:
            self._aside(lambda: [lane.close() for lane in self._lanes])
            self._lanes = []
            self._threads.shutdown()

    def _aside(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run `work` in a thread of the ring, which leaves the caller's current device alone."""
        return self._threads.submit(work, *arguments).result()

    def _run(self, work: Callable[[_Lane, Iterator[Piece]], None], pieces: Sequence[Piece]) -> None:
        with self._turn.native:
            shared = _Shared(cut(pieces, self._chunk))
            needed = sum(-(-piece.size // self._chunk) for piece in pieces)
            lanes = self._lanes[:needed]
            running = [self._threads.submit(work, lane, shared) for lane in lanes]
            wait(running)  # even if one failed: all use memory of the caller
            if any(future.exception() for future in running):  # and so do copies in flight
                wait([self._threads.submit(lane.finish) for lane in lanes])
            for future in running:
                future.result()


def _write_rows(rows: Sequence[Any], size: int, file: int | None) -> bool:
    """Pack arrays by writing them to the file that the buffer maps; `False` if impossible."""
    if file is None or not rows[0].dtype.isnative:
        return False
    try:
        done = 0
        for start in range(0, len(rows), _MOST_AT_ONCE):
            done += os.pwritev(file, rows[start : start + _MOST_AT_ONCE], done)
    except (BufferError, OSError, TypeError, ValueError):
        return False  # it has gaps, or Python has no buffer of this dtype
    return done == size


class _Shared(Iterator[Piece]):
    """One iterator that several threads draw from."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._lock = ForkSafeLock()

    def __next__(self) -> Piece:
        with self._lock.native:
            return next(self._pieces)


_rings: dict[tuple[int, int], Ring] = {}
_making = ForkSafeLock()


def ring_of(device: Device) -> Ring | None:
    """Return the ring for copies to and from a device; `None` if copies are not staged."""
    if device.backend != "cuda" or place_of(device) != device:  # a fake device is elsewhere
        return None
    key = (os.getpid(), device.index)  # a forked child has neither the threads nor the context
    with _making.native:
        if key not in _rings:
            lanes = max(1, min(MOST_LANES, usable_cores()))
            try:
                _rings[key] = Ring(driver_of(device.index), lanes)
            except NoThreadsError:
                return None
        return _rings[key]


@on_release
def release_ring(device: Device) -> None:
    """Give a ring's pinned memory and threads back; the next large copy makes a new one."""
    with _making.native:
        ring = _rings.pop((os.getpid(), device.index), None) if device.backend == "cuda" else None
    if ring is not None:
        ring.close()


def usable_cores() -> int:
    """Return the cores that this process may use, by its affinity and its container's quota."""
    status = Device("cpu").status
    usable = status.facts.details.get("usable_cores") if status else None
    return int(usable) if isinstance(usable, int | float) else os.cpu_count() or 1
