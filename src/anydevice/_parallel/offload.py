"""Parts of a model that lie in host memory or on disk, brought to a device as they are computed.

Two parts are on the device at once: the one that computes, and the next, which a thread brings
meanwhile. On CUDA, host memory is pinned in place when it is first brought, and copied on a stream
of its own, by a call for each array: many threads that copy small pieces wait for each other. The
bytes of files, and of memory that cannot be pinned, go through the ring of pinned buffers.

Files are read by position, not through a memory map: a map of a file that became shorter ends the
process, and a read is an error that names the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from mmap import PAGESIZE
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from anydevice._arrays.stage import WORTH_STAGING, Piece, Ring, ring_of
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, DType, as_dtype
from anydevice._core.engine import Engine
from anydevice._core.files import PlainFile, write_whole
from anydevice._core.locks import ForkSafeLock, started
from anydevice._core.record import Record
from anydevice._engines.cuda_driver import CudaDriver, driver_of
from anydevice._formats.safetensors import header_of, open_safetensors
from anydevice._libraries.registry import part as library_part
from anydevice.errors import AnyDeviceError, ConfigurationError

_ALIGNED = 256
"""Alignment of the arrays of a part, in bytes."""

_SLOTS = 2
_BYTES = DTYPES["uint8"]


class KeptArray(Record):
    """An array that lies elsewhere: at an address of host memory, or at a position of a file."""

    shape: tuple[int, ...]
    dtype: DType
    start: int
    file: PlainFile | None = None
    holder: Any = None
    """The array whose elements these are, to notice writes into it."""

    memory: Any = None
    """The object that keeps the memory at the address alive."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance in bytes between neighbours along each axis, in C order."""
        size = self.dtype.itemsize
        return tuple(prod(self.shape[axis + 1 :]) * size for axis in range(len(self.shape)))

    def read(self, target: int, first: int, size: int) -> None:
        """Copy some of its bytes to an address of host memory."""
        if self.file is None:
            ctypes.memmove(target, self.start + first, size)
        else:
            memory = (ctypes.c_uint8 * size).from_address(target)
            self.file.read_into(memoryview(memory), self.start + first)

    def on_host(self) -> Any:
        """Return a NumPy array of its own."""
        raw = np.empty(self.nbytes, np.uint8)
        self.read(raw.ctypes.data, 0, raw.nbytes)
        return raw.view(self.dtype.numpy()).reshape(self.shape)

    def refresh(self) -> None:
        """Copy the holder's bytes again if they have changed."""


class _CopiedArray(KeptArray):
    """A copy of an array that is not contiguous."""

    engine: Any = None
    version: Any = None
    """The version of the holder when it was copied, in a list."""

    def refresh(self) -> None:
        now = _version_of(self.holder)
        if self.version != [now] or (now is None and self.engine.name != "jax"):
            self.version[:] = [now]
            np.copyto(self.memory, self.engine.to_host(self.holder))


Parts = Sequence[Sequence[KeptArray]]


def kept_in_memory(array: Any, engine: Engine) -> KeptArray:
    """Return an array of an engine that is in host memory."""
    address = engine.address(array)
    shape, dtype = tuple(array.shape), engine.dtype_of(array)
    if address is not None:
        return KeptArray(shape, dtype, address, None, array, array)
    own = np.ascontiguousarray(engine.to_host(array))
    version = [_version_of(array)]
    return _CopiedArray(shape, dtype, own.ctypes.data, None, array, own, engine, version)


def write_parts(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write NumPy arrays as a safetensors file, whole or not at all."""
    table: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        table[name] = {
            "dtype": as_dtype(array.dtype).code,
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    raw = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in arrays.values())
    write_whole(path, [len(header).to_bytes(8, "little"), header, *raw])


def read_parts(path: Path) -> dict[str, KeptArray]:
    """Return every tensor of a safetensors file, which is open while they are."""
    file = open_safetensors(path)
    try:
        entries = header_of(file).entries.values()
    except BaseException:
        file.close()
        raise
    weakref.finalize(file, os.close, file.number)
    return {entry.name: KeptArray(entry.shape, entry.dtype, entry.start, file) for entry in entries}


class _Arrived(Record):
    """A part in a slot; `settle` waits for its copies, `state` has the versions of its arrays."""

    number: int
    slot: int
    arrays: list[Any]
    settle: Callable[[], None]
    state: Any


class Fetcher:
    """Brings parts to a device in order, and begins again after the last.

    `acquire` returns the arrays of a part; call `release` once the computation with them has
    started. A part out of order is brought too, and the order goes on there. A thread holds the
    lock `turn` from the first part to the last.
    """

    def __init__(self, parts: Parts, device: Device, engine: Engine) -> None:
        self.turn = ForkSafeLock(reentrant=True)
        self._parts = parts
        for part in parts:
            _state(part)  # raises for weights that do not tell when they change
        kind = engine.native(device).type if engine.name == "torch" else None
        # Only the ring, and the driver beside it, write memory of a card.
        is_written = kind == "cpu" or (kind == "cuda" and ring_of(device) is not None)
        self._slots = (_Written if is_written else _Placed)(parts, device, engine)
        self._thread: _Worker | None = None
        self._held: dict[int, int] = {}
        self._done: dict[int, Callable[[], None] | None] = {}

    def acquire(self, number: int) -> list[Any]:
        """Return the arrays of a part on the device."""
        worker = self._worker(number)
        while True:
            arrived = worker.ready.get()
            if isinstance(arrived, BaseException):
                self._thread = None
                raise arrived
            arrived.settle()
            if arrived.number == number and arrived.state == _state(self._parts[number]):
                self._held[number] = arrived.slot
                return arrived.arrays
            worker.next = number
            worker.free.put((arrived.slot, None))

    def release(self, number: int, result: Any) -> None:
        """Free the memory of a part for another one, once `result`, computed with it, is there."""
        slot = self._held.pop(number)
        self._done[slot] = self._slots.done(result)
        if self._thread is not None:
            self._thread.free.put((slot, self._done[slot]))

    def close(self) -> None:
        """End the thread, and drop the parts that it brought; `acquire` starts another one."""
        worker, self._thread = self._thread, None
        if worker is not None:
            worker.stop()
            worker.join()  # else it might still write into the memory of the next one

    def __del__(self) -> None:
        worker = getattr(self, "_thread", None)
        if worker is not None:
            worker.stop()  # it keeps the memory until it ends

    def _worker(self, number: int) -> _Worker:
        if self._thread is None or not self._thread.is_alive():  # a fork leaves threads behind
            worker = _Worker(len(self._parts), partial(_bring, self._parts, self._slots))
            worker.next = number
            for slot in set(range(_SLOTS)) - set(self._held.values()):
                worker.free.put((slot, self._done.get(slot)))
            if not started(worker):
                raise AnyDeviceError("no thread could be started to load parts of the model")
            self._thread = worker
        return self._thread


class _Worker(threading.Thread):
    """Fills free slots, one part after the other. When it ends, no copy is in flight."""

    def __init__(self, count: int, bring: Callable[[int, int], _Arrived]) -> None:
        super().__init__(name="anydevice offload", daemon=True)
        self.next = 0
        self.free: SimpleQueue[tuple[int, Callable[[], None] | None] | None] = SimpleQueue()
        self.ready: SimpleQueue[_Arrived | BaseException] = SimpleQueue()
        self._count, self._bring, self._stopped = count, bring, False

    def stop(self) -> None:
        self._stopped = True
        self.free.put(None)

    def run(self) -> None:
        try:
            self._fill()
        except BaseException as error:  # `acquire` raises it
            self.ready.put(error)

    def _fill(self) -> None:
        begun: dict[int, _Arrived] = {}
        try:
            while (token := self.free.get()) is not None and not self._stopped:
                slot, done = token
                if done is not None:
                    done()
                number, self.next = self.next, (self.next + 1) % self._count
                begun[slot] = self._bring(number, slot)
                self.ready.put(begun[slot])
        finally:
            for arrived in begun.values():
                arrived.settle()


def _bring(parts: Parts, slots: Any, number: int, slot: int) -> _Arrived:
    state = _state(parts[number])
    for array in parts[number]:
        array.refresh()
    arrays, settle = slots.bring(parts[number], slot)
    try:
        for file in {array.file for array in parts[number] if array.file is not None}:
            file.confirm_unchanged()
    except BaseException:
        settle()
        raise
    return _Arrived(number, slot, arrays, settle, state)


def _state(part: Sequence[KeptArray]) -> list[Any]:
    """Return the versions of the arrays, which change when PyTorch writes into one."""
    return [_version_of(array.holder) for array in part]


def _version_of(holder: Any) -> int | None:
    """Return the counter of writes into a tensor of PyTorch; other arrays have none."""
    try:
        version: int | None = getattr(holder, "_version", None)
    except RuntimeError as error:
        raise ConfigurationError(
            "weights made in torch.inference_mode() do not tell when they change, so they cannot "
            "be loaded ahead; make or load the model under torch.no_grad() instead",
            source="model",
        ) from error
    return version


class _Written:
    """Memory of a device that is written again and again; PyTorch's tensors are views of it."""

    def __init__(self, parts: Parts, device: Device, engine: Engine) -> None:
        self._parts, self._device, self._engine = parts, device, engine
        size = max(_size(part) for part in parts)
        self._memory = [engine.empty((size,), _BYTES, device) for _ in range(_SLOTS)]
        self._ring: Ring | None = None
        self._marks: list[Any] = []
        self._direct: _Direct | None = None
        self._views: dict[Any, list[Any]] = {}
        # Earlier computations may still use the memory.
        self._unused = self.done(None)

    def bring(self, part: Sequence[KeptArray], slot: int) -> tuple[list[Any], Callable[[], None]]:
        if self._unused is not None:
            self._unused()
            self._unused = None
        address = self._engine.address(self._memory[slot])
        assert address is not None
        offsets = list(accumulate([_align(array.nbytes) for array in part], initial=0))[:-1]
        arrays = self._arrays(part, slot, offsets)
        ring = ring_of(self._device)  # a new one if memory was released since
        if ring is None and self._engine.native(self._device).type == "cpu":
            for entry, offset in zip(part, offsets, strict=True):
                entry.read(address + offset, 0, entry.nbytes)
            return arrays, _nothing
        if ring is None:
            raise AnyDeviceError("no thread could be started to load parts of the model")
        if self._direct is None:
            place = self._engine.native(self._device)
            self._direct = _Direct(self._device.index, place, self._parts)
        settle = self._direct.begin(part, slot, [address + offset for offset in offsets])
        if settle is not None:
            return arrays, settle
        if ring is not self._ring:
            self._ring, self._marks = ring, [ring.events() for _ in range(_SLOTS)]
        pieces, fill = _pieces(part, offsets, address)
        ring.begin(pieces, fill, self._marks[slot])
        return arrays, partial(ring.wait, self._marks[slot])

    def _arrays(self, part: Sequence[KeptArray], slot: int, offsets: Sequence[int]) -> list[Any]:
        key = slot, tuple((array.shape, array.dtype) for array in part)
        if key not in self._views:
            view, memory = self._engine.view, self._memory[slot]
            self._views[key] = [
                view(memory, array.dtype, offset, array.strides, array.shape)
                for array, offset in zip(part, offsets, strict=True)
            ]
        return self._views[key]

    def done(self, result: Any) -> Callable[[], None] | None:
        place = self._engine.native(self._device)
        if place.type == "cpu":  # a CPU has computed its results by now
            return None
        return library_part("torch", "pipeline").wait_for_computed(place)


class _Direct:
    """Copies from memory that it pins in place on a stream of its own; small arrays are joined."""

    def __init__(self, index: int, place: Any, parts: Parts) -> None:
        self._driver = driver_of(index)
        self._stream = library_part("torch", "pipeline").CopyStream(place)
        self._parts, self._spans = parts, _spans(parts)
        self._pinned: dict[int, Any] = {}
        self._refused: set[int] = set()
        self._buffers: list[int] = []
        self._small = max(_size(list(filter(_is_small, part))) for part in parts)
        unpin = weakref.finalize(self, _unpin, self._driver, self._pinned, self._buffers)
        unpin.atexit = False

    def begin(
        self, part: Sequence[KeptArray], slot: int, targets: Sequence[int]
    ) -> Callable[[], None] | None:
        """Start the copies of a part; return a function that waits, `None` if it is not pinned."""
        self._driver.enter()  # cheap, and needed in each thread
        if not all(map(self._is_readable, part)):
            return None
        stream = ctypes.c_void_p(self._stream.handle)
        try:
            for array, source, target in zip(part, self._sources(part, slot), targets, strict=True):
                if array.nbytes:
                    self._driver.copy_in(target, source, array.nbytes, stream)
        except BaseException:
            self._stream.synchronize()  # the memory may go to others now
            raise
        return self._stream.mark()

    def _sources(self, part: Sequence[KeptArray], slot: int) -> list[int]:
        """Return the addresses at which a part is pinned; the slot's buffer is free again."""
        if not self._buffers and self._small:
            self._buffers += [self._driver.pinned(self._small) for _ in range(_SLOTS)]
        addresses, free = [], self._buffers[slot] if self._buffers else 0
        for array in part:
            addresses.append(free if _is_small(array) else array.start)
            if _is_small(array):
                array.read(free, 0, array.nbytes)
                free += _align(array.nbytes)
        return addresses

    def _is_readable(self, array: KeptArray) -> bool:
        """Pin an array if it is not small; return whether it can be copied from."""
        if array.file is not None:
            return False
        if _is_small(array):
            return True
        start, end = self._spans[bisect_right(self._spans, (array.start, sys.maxsize)) - 1]
        if start in self._pinned or start in self._refused:
            return start in self._pinned
        if self._driver.pin(start, end - start):
            self._pinned[start] = self._parts  # which keep the memory
            return True
        if self._driver.is_pinned(array.start, array.nbytes):  # by other code, which unpins it
            return True
        self._refused.add(start)
        return False


def _spans(parts: Parts) -> list[tuple[int, int]]:
    """Return the spans of memory to pin, in order; tensors that share a page are in one."""
    spans: list[tuple[int, int]] = []
    large = {
        (array.start, array.start + array.nbytes)
        for part in parts
        for array in part
        if array.file is None and not _is_small(array)
    }
    for start, end in sorted(large):
        if spans and start // PAGESIZE <= (spans[-1][1] - 1) // PAGESIZE:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _is_small(array: KeptArray) -> bool:
    return array.nbytes < WORTH_STAGING


def _unpin(driver: CudaDriver, pinned: dict[int, Any], buffers: list[int]) -> None:
    """Unpin memory, in a thread of its own: the caller's may have another device."""

    def work() -> None:
        driver.enter()
        for address in pinned:
            driver.unpin(address)
        pinned.clear()
        for address in buffers:
            driver.give_back(address)

    thread = threading.Thread(target=work, name="anydevice unpin")
    if started(thread):
        thread.join()


class _Placed:
    """New arrays for each part, for engines with immutable arrays."""

    def __init__(self, parts: Parts, device: Device, engine: Engine) -> None:
        self._device, self._engine = device, engine

    def bring(self, part: Sequence[KeptArray], slot: int) -> tuple[list[Any], Callable[[], None]]:
        arrays = [self._engine.place(array.on_host(), self._device) for array in part]
        self._engine.finish(arrays)
        return arrays, _nothing

    def done(self, result: Any) -> Callable[[], None] | None:
        return None if result is None else partial(self._engine.finish, [result])


def _pieces(
    part: Sequence[KeptArray], offsets: Sequence[int], address: int
) -> tuple[list[Piece], Any]:
    """Return the copies of a part, and a function that fills a piece unless the ring does."""
    pairs = list(zip(part, offsets, strict=True))
    if all(array.file is None for array in part):
        return [Piece(array.start, address + offset, array.nbytes) for array, offset in pairs], None

    def fill(buffer: int, piece: Piece) -> None:
        at = bisect_right(offsets, piece.host) - 1
        part[at].read(buffer, piece.host - offsets[at], piece.size)

    return [Piece(offset, address + offset, array.nbytes) for array, offset in pairs], fill


def _size(part: Sequence[KeptArray]) -> int:
    return sum(_align(array.nbytes) for array in part)


def _align(size: int) -> int:
    return -(-max(size, 1) // _ALIGNED) * _ALIGNED


def _nothing() -> None:
    return None
