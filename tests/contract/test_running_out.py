"""Running out of memory, for real, on every engine: our error, again and again, and then on."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy
import psutil
import pytest

import anydevice
from anydevice import ops
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Engine
from anydevice.errors import OutOfMemoryError

ONE_DEVICE = True  # see conftest.py
Where = tuple[Engine, Device]
Short = tuple[Device, int]
LIMIT = 2**25
IN_A_ROW = 100
SLACK = 32 * 2**20  # bytes that the process may have grown by: less than one array of a failed try


@pytest.fixture
def where(engine: Engine, device: Device) -> Where:
    return engine, device


@pytest.fixture
def short(where: Where) -> Iterator[Short]:
    """A device with its engine, and how many float32 are more than it has room for."""
    engine, device = where
    here = Device(device, engine=engine.name)
    cannot = engine.memory.set_limit(device, LIMIT)
    yield here, LIMIT // 2 if cannot is None else 2**48
    engine.memory.set_limit(device, None)


def large(count: int) -> Any:
    """So many numbers, which take no room where they are."""
    return numpy.broadcast_to(numpy.float32(1), (2**10, count // 2**10))


def test_what_has_no_room_is_our_error(where: Where, short: Short) -> None:
    device, count = short
    if where[0].name == "numpy":
        pytest.skip("what is on the CPU already is not moved there")
    with pytest.raises(OutOfMemoryError) as caught:
        anydevice.to_device({"x": [large(count)]}, device)
    error = caught.value
    assert str(error).startswith("['x'][0]: ")
    assert "is out of memory" in str(error)
    assert "find_batch_size" in str(error)
    assert any("smaller batch" in tip for tip in error.advice)
    assert error.asked is None or error.asked == count * 4
    assert error.__cause__ is not None
    assert error.device in (where[1], Device("cpu"))


def test_the_process_goes_on(where: Where, short: Short) -> None:
    """A hundred failures in a row leave nothing behind, and what fits still works after each."""
    engine, _ = where
    device, count = short
    small = numpy.arange(1024, dtype=numpy.float32).reshape(32, 32)

    def fail(*, computes: bool) -> None:
        if engine.name != "numpy":  # what is on the CPU already is not moved there
            with pytest.raises(OutOfMemoryError):
                anydevice.to_device(large(count), device)
        if computes and not engine.shares_memory:  # such a library takes the process down at that
            one = anydevice.to_device(small[:1, :1], device)
            with pytest.raises(OutOfMemoryError):
                anydevice.to_numpy(ops.add(ops.broadcast_to(one, (2**24, count // 2**24)), one))
        here = anydevice.to_device(small, device)
        assert (anydevice.to_numpy(ops.add(here, here)) - (small + small)).max() == 0

    began = time.monotonic()
    fail(computes=True)
    waits = time.monotonic() - began > 5  # an allocator that waits for memory
    for _ in range(4):
        fail(computes=not waits)
    gc.collect()
    before, used = psutil.Process().memory_info().rss, engine.memory.use(where[1])
    for _ in range(IN_A_ROW):
        fail(computes=not waits)
    gc.collect()
    after, now_used = psutil.Process().memory_info().rss, engine.memory.use(where[1])
    assert after - before < SLACK
    assert now_used is None or (used is not None and now_used.in_use == used.in_use)


def test_the_largest_batch_that_fits_is_found(where: Where, short: Short) -> None:
    engine, device = where
    count = short[1]
    tried = []

    def step(size: int) -> object:
        tried.append(size)
        shape = (size, 1024) if size <= 8 else (2**20, count // 2**20)
        return engine.empty(shape, DTYPES["float32"], device)

    gc.collect()
    used = engine.memory.use(device)
    assert anydevice.find_batch_size(step, 128) == 8
    assert tried == [128, 64, 32, 16, 8]
    now_used = engine.memory.use(device)
    assert now_used is None or (used is not None and now_used.in_use == used.in_use)
    assert anydevice.find_batch_size(step, 128) == 8
    assert len(tried) == 5
