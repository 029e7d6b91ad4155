"""Where an array's memory is, who shares it, and when it may be touched."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.engine import Engine
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, EXACT, assert_same_bits, assert_same_values

from .bits import EXACT_EVERYWHERE, ROWS, moved, small_numbers
from .combinations import each

FLOAT32 = DTYPES["float32"]


@each(dtype=ROWS)
def test_an_empty_array_has_its_dtype(engine: Engine, device: Device, dtype: DType) -> None:
    made, _ = moved(lambda: engine.empty((3, 4), dtype, device))
    assert made is not None or dtype.name not in EXACT_EVERYWHERE
    if made is not None:
        engine.finish(made)
        assert engine.owns(made)
        assert engine.dtype_of(made) == dtype
        assert device in engine.devices_of(made)
        back = engine.to_host(made)
        assert (back.shape, back.dtype) == ((3, 4), dtype.numpy())


@each(shape=[(), (0, 2), (0, 3), (1, 2, 3, 1, 2)])
def test_empty_arrays_of_any_shape(engine: Engine, device: Device, shape: tuple[int, ...]) -> None:
    made = engine.empty(shape, FLOAT32, device)
    assert tuple(made.shape) == shape
    assert engine.to_host(made).shape == shape
    assert 0 not in shape or engine.storage(made) is None, "no elements lie nowhere"


@each(dtype=ROWS)
def test_an_array_knows_its_type(engine: Engine, device: Device, dtype: DType) -> None:
    host = small_numbers(dtype, 2, 3)
    placed, _ = moved(lambda: engine.place(host, device, narrow=True))
    if placed is not None:
        assert engine.dtype_of(placed) == DTYPES[engine.to_host(placed).dtype.name]
        assert not engine.is_traced(placed)


@each(name=EXACT_EVERYWHERE)
def test_memory_is_written_by_its_address(engine: Engine, device: Device, name: str) -> None:
    host = small_numbers(DTYPES[name], 5, 7)
    made = [engine.empty(host.shape, DTYPES[name], device) for _ in range(3)]
    addresses = [engine.address(x) for x in made]
    engine.finish(made)
    assert addresses == [engine.address(x) for x in made]
    if None in addresses:
        assert addresses == [None] * 3
        return
    assert len(set(addresses)) == 3
    if device.kind == "cpu":
        ctypes.memmove(addresses[1], host.ctypes.data, host.nbytes)
        assert_same_bits(engine.to_host(made[1]), host, because=COPIED)


def test_views_share_their_allocation(engine: Engine, device: Device) -> None:
    whole = engine.place(small_numbers(FLOAT32, 4, 6), device)
    apart = engine.place(small_numbers(FLOAT32, 4, 6), device)
    rows, columns = whole[1:], whole[:, 1::2]
    held = engine.storage(whole)
    if held is None:
        assert engine.storage(rows) is None
        return
    assert held.allocation == (held.address, held.size)
    assert held.size >= 4 * 6 * 4
    assert (held.shape, held.strides) == ((4, 6), (24, 4))
    for part, offset, strides in ((rows, 24, (24, 4)), (columns, 4, (24, 8))):
        storage = engine.storage(part)
        assert storage is not None
        assert storage.allocation == held.allocation
        assert storage.offset == held.offset + offset
        assert (storage.shape, storage.strides) == (tuple(part.shape), strides)
    other = engine.storage(apart)
    assert other is not None
    assert other.allocation != held.allocation
    assert engine.address(columns) is None
    if engine.address(whole) is not None:
        assert engine.address(whole) == held.address + held.offset
        assert engine.address(rows) == held.address + held.offset + 24


def test_views_are_read_as_they_are(engine: Engine, device: Device) -> None:
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    placed = engine.place(host, device)
    for part in (np.s_[1:], np.s_[:, ::2], np.s_[::2, 1::3], np.s_[2]):
        assert_same_values(engine.to_host(placed[part]), host[part], because=COPIED)
    assert_same_values(engine.to_host(placed.T), host.T, because=COPIED)


def test_finishing_takes_one_several_or_none(engine: Engine, device: Device) -> None:
    one = engine.place(small_numbers(FLOAT32, 64, 64), device)
    with engine.default_scope(device):
        several = [engine.matmul(one, one) for _ in range(3)]
        for arrays in (one, several, tuple(several), []):
            engine.finish(arrays)
    for x in several:
        assert_same_values(engine.to_host(x), engine.to_host(several[0]), because=COPIED)


def test_memory_figures_follow_what_is_placed(engine: Engine, device: Device) -> None:
    gc.collect()  # garbage of earlier tests would be freed while this one counts
    before = engine.memory.use(device)
    held = engine.place(np.ones((1024, 1024), np.float32), device)
    after = engine.memory.use(device)
    if before is None or after is None:
        assert before is after
        return
    assert after.in_use >= before.in_use + 4 * 2**20
    for figures in (before, after):
        assert 0 <= figures.in_use <= figures.reserved
        assert figures.peak is None or figures.peak >= figures.in_use
        assert not (figures.preallocated and device.kind == "cpu")
    del held
    engine.synchronize(device)
    gone = engine.memory.use(device)
    assert gone is not None
    assert gone.in_use <= after.in_use - 4 * 2**20


def test_what_no_array_uses_is_given_back(engine: Engine, device: Device) -> None:
    gc.collect()  # garbage of earlier tests would be freed while this one counts
    held = engine.place(np.ones((1024, 1024), np.float32), device)
    kept = engine.place(np.full((3,), 7, np.float32), device)
    before = engine.memory.use(device)
    del held
    engine.memory.release(device)
    after = engine.memory.use(device)
    assert_same_values(engine.to_host(kept), [7, 7, 7], because=COPIED)
    if before is not None and after is not None:
        assert after.in_use <= before.in_use - 4 * 2**20
        assert after.reserved <= before.reserved


def test_the_peak_is_looked_for_anew(engine: Engine, device: Device) -> None:
    held = engine.place(np.ones((1024, 1024), np.float32), device)
    del held
    engine.synchronize(device)
    with_it = engine.memory.use(device)
    engine.memory.reset_peak(device)
    without = engine.memory.use(device)
    if with_it is not None and without is not None and with_it.peak is not None:
        assert with_it.peak >= 4 * 2**20
        assert without.peak is not None
        assert without.peak <= with_it.peak


def test_a_view_is_made_from_its_place_in_memory(engine: Engine, device: Device) -> None:
    placed = engine.place(np.arange(12, dtype=np.float32).reshape(3, 4), device)
    column = (FLOAT32, 4, (16,), (3,))
    if not engine.has_views:
        with pytest.raises(UnsupportedError, match="no views"):
            engine.view(placed, *column)
        return
    whole = engine.storage(placed)
    assert whole is not None
    made = engine.view(placed, FLOAT32, whole.offset + 4, (16,), (3,))
    assert_same_values(engine.to_host(made), [1, 5, 9], because=COPIED)
    bits = engine.view(placed, DTYPES["uint8"], whole.offset, (1,), (48,))
    same = np.frombuffer(engine.to_host(bits).tobytes(), np.float32)
    assert_same_bits(same, np.arange(12, dtype=np.float32), because=COPIED)
    shared = engine.storage(made)
    assert shared is not None
    assert shared.allocation == whole.allocation


def test_what_another_thread_placed_may_be_used(engine: Engine, device: Device) -> None:
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    with ThreadPoolExecutor(1) as elsewhere:
        x = elsewhere.submit(engine.place, host, device).result()
    engine.receive([x])
    assert_same_values(engine.to_host(engine.matmul(x, x.T)), host @ host.T, because=EXACT)
