"""Staged copies, with host memory on both sides: what the lanes do, without a device."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice._arrays.stage import Piece, Ring, cut, usable_cores
from anydevice._core.device import Device
from tests.comparing import assert_same_bits, assert_same_integers

CHUNK = 1000


class HostCopier:
    """A device whose memory is the host's, and whose copies end only when they are waited for."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.kept: dict[int, Any] = {}
        self.pending: dict[int, list[tuple[int, int, int]]] = {}
        self.marks: dict[int, tuple[int, int]] = {}
        self.threads: set[int] = set()
        self.copies = 0
        self.sources: list[int] = []
        self.readable: list[tuple[int, int]] = []
        self.with_files = False
        self.files: dict[int, Any] = {}
        self.fail_at = fail_at
        self._lock = threading.Lock()
        self._next = 0

    def enter(self) -> None:
        self.threads.add(threading.get_ident())

    def pinned(self, size: int) -> int:
        if self.with_files:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by give_back
            file.truncate(size)
            buffer: Any = ctypes.c_char.from_buffer(mmap.mmap(file.fileno(), size))
            self.files[ctypes.addressof(buffer)] = file
        else:
            buffer = ctypes.create_string_buffer(size)
        self.kept[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def file_of(self, address: int) -> int | None:
        file = self.files.get(address)
        return file and file.fileno()

    def is_pinned(self, address: int, size: int) -> bool:
        return any(start <= address < start + stretch for start, stretch in self.readable)

    def give_back(self, address: int) -> None:
        del self.kept[address]
        if address in self.files:
            self.files.pop(address).close()

    def stream(self) -> int:
        with self._lock:
            self._next += 1
            self.pending[self._next] = []
            return self._next

    def event(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def destroy(self, stream: int, *events: int) -> None:
        assert self.pending.pop(stream) == []

    def _copy(self, target: int, source: int, size: int, stream: int) -> None:
        assert threading.get_ident() in self.threads
        with self._lock:
            self.copies += 1
            if self.copies == self.fail_at:
                raise RuntimeError("the bus is gone")
            self.sources.append(source)
        self.pending[stream].append((target, source, size))

    copy_in = copy_out = _copy

    def mark(self, event: int, stream: int) -> None:
        self.marks[event] = (stream, len(self.pending[stream]))

    def wait(self, event: int) -> None:
        if event not in self.marks:
            return
        stream, count = self.marks.pop(event)
        for target, source, size in self.pending[stream][:count]:
            ctypes.memmove(target, source, size)
        del self.pending[stream][:count]
        for other, (its_stream, its_count) in list(self.marks.items()):
            if its_stream == stream:
                self.marks[other] = (stream, its_count - count)


def piece(host: np.ndarray[Any, Any], device: np.ndarray[Any, Any]) -> Piece:
    return Piece(host.ctypes.data, device.ctypes.data, host.nbytes)


def numbers(*sizes: int) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(len(sizes))
    return [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]


SIZES = [(1,), (CHUNK,), (CHUNK + 1,), (25 * CHUNK + 7,), (3, 0, 5000, 1)]


@pytest.mark.parametrize("lanes", [1, 2, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_byte_arrives_in_both_directions(lanes: int, sizes: tuple[int, ...]) -> None:
    copier = HostCopier()
    ring = Ring(copier, lanes, CHUNK)
    host = numbers(*sizes)
    there = [np.zeros_like(array) for array in host]
    back = [np.zeros_like(array) for array in host]
    ring.upload([piece(h, t) for h, t in zip(host, there, strict=True)])
    for h, t in zip(host, there, strict=True):
        assert_same_bits(h, t, because="it is only copied")
    ring.download([piece(b, t) for b, t in zip(back, there, strict=True)])
    for h, b in zip(host, back, strict=True):
        assert_same_bits(h, b, because="it is only copied")
    ring.close()
    assert copier.kept == {}
    assert copier.pending == {}


def test_the_ring_is_bounded_and_used_again() -> None:
    copier = HostCopier()
    ring = Ring(copier, 3, CHUNK)
    kept = set(copier.kept)
    assert len(kept) == 6
    for _ in range(3):
        (host,) = numbers(50 * CHUNK)
        there = np.zeros_like(host)
        ring.upload([piece(host, there)])
    assert set(copier.kept) == kept
    ring.close()


def test_the_bytes_may_come_from_elsewhere() -> None:
    ring = Ring(HostCopier(), 2, CHUNK)
    there = np.zeros(5 * CHUNK, np.uint8)

    def fill(buffer: int, part: Piece) -> None:
        ctypes.memset(buffer, part.host // CHUNK + 1, part.size)

    ring.upload([Piece(0, there.ctypes.data, there.nbytes)], fill)
    assert_same_integers(there, np.repeat(np.arange(1, 6), CHUNK))
    ring.close()


def test_an_error_in_one_lane_is_raised_after_all_have_stopped() -> None:
    """And nothing is in flight then, be it of lanes that went well: its memory may go."""
    copier = HostCopier(fail_at=4)
    ring = Ring(copier, 3, CHUNK)
    (host,) = numbers(20 * CHUNK)
    there = np.zeros_like(host)
    with pytest.raises(RuntimeError, match="the bus is gone"):
        ring.upload([piece(host, there)])
    assert not any(copier.pending.values())
    copier.fail_at = copier.copies + 4
    with pytest.raises(RuntimeError, match="the bus is gone"):
        ring.begin([piece(host, there)], None, ring.events())
    assert not any(copier.pending.values())
    ring.close()


def test_copies_from_several_threads_take_turns() -> None:
    ring = Ring(HostCopier(), 2, CHUNK)
    pairs = [(host, np.zeros_like(host)) for host in numbers(*[9 * CHUNK] * 8)]
    threads = [threading.Thread(target=ring.upload, args=([piece(h, t)],)) for h, t in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for host, there in pairs:
        assert_same_bits(host, there, because="it is only copied")
    ring.close()


def test_closing_leaves_no_thread() -> None:
    before = threading.active_count()
    ring = Ring(HostCopier(), 4, CHUNK)
    (host,) = numbers(50 * CHUNK)
    there = np.zeros_like(host)
    ring.upload([piece(host, there)])
    ring.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("with_files", [False, True])
def test_many_small_arrays_travel_together(with_files: bool) -> None:
    copier = HostCopier()
    copier.with_files = with_files
    ring = Ring(copier, 1, CHUNK)
    rows = numbers(*[96] * 55)
    there = np.zeros(96 * 55, np.uint8)
    for _ in range(2):
        there[:] = 0
        ring.upload_rows(rows, there.ctypes.data)
        assert_same_bits(there, np.concatenate(rows), because="it is only copied")
    assert copier.copies == 12
    ring.close()
    assert copier.kept == {}


def test_memory_that_is_pinned_already_goes_directly() -> None:
    copier = HostCopier()
    ring = Ring(copier, 2, CHUNK)
    pinned, pageable = numbers(3 * CHUNK + 5, 2 * CHUNK)
    copier.readable.append((pinned.ctypes.data, pinned.nbytes))
    there = [np.zeros_like(pinned), np.zeros_like(pageable)]
    ring.upload([piece(pinned, there[0]), piece(pageable, there[1])])
    assert_same_bits(there[0], pinned, because="it is only copied")
    assert_same_bits(there[1], pageable, because="it is only copied")
    direct = {pinned.ctypes.data + at for at in range(0, pinned.nbytes, CHUNK)}
    assert direct <= set(copier.sources)
    assert not any(
        pageable.ctypes.data <= source < pageable.ctypes.data + pageable.nbytes
        for source in copier.sources
    )
    ring.close()


def test_the_caller_s_own_thread_never_enters_the_device() -> None:
    copier = HostCopier()
    ring = Ring(copier, 2, CHUNK)
    host = numbers(2 * CHUNK)[0]
    room = np.zeros_like(host)
    ring.upload([piece(host, room)])
    rows = [np.arange(10, dtype=np.int32), np.arange(10, dtype=np.int32)]
    there = np.zeros((2, 10), np.int32)
    ring.upload_rows(rows, there.ctypes.data)
    ring.close()
    assert_same_bits(there, rows, because="it is only copied")
    assert threading.get_ident() not in copier.threads


@pytest.mark.parametrize("kind", ["gaps", "byte order", "bfloat16", "two axes", "plain"])
def test_arrays_are_packed_whatever_they_look_like(kind: str) -> None:
    base = [np.arange(i, i + 40, dtype=np.float32) for i in range(1500)]
    rows = {
        "gaps": [x[::2] for x in base],
        "byte order": [x.astype(">f4") for x in base],
        "bfloat16": [x.astype(ml_dtypes.bfloat16) for x in base],
        "two axes": [x.reshape(4, 10).T for x in base],
        "plain": [x[:2] for x in base],
    }[kind]
    copier = HostCopier()
    copier.with_files = True
    ring = Ring(copier, 2, 10 * CHUNK)
    there = np.zeros((1500, *rows[0].shape), rows[0].dtype.newbyteorder("="))
    ring.upload_rows(rows, there.ctypes.data)
    assert_same_bits(there, np.stack(rows), because="it is only copied")
    ring.close()
    assert copier.files == {}


def test_nothing_to_cut_and_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(cut([], 4)) == list(cut([Piece(0, 0, 0)], 4)) == []
    assert usable_cores() >= 1
    monkeypatch.setattr(Device, "status", None)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable_cores() == 1
