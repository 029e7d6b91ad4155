"""What every engine promises: placing an array, reading it back, multiplying, waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice.core.backends import BACKENDS
from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines import registry
from anydevice.errors import DeviceNotFoundError, UnsupportedError

EXACT_EVERYWHERE = ("float32", "float16", "int32", "int16", "int8", "uint8", "bool")
REFUSED_BY_SOME = ("float64", "complex128", "int64", "uint64", ml_dtypes.bfloat16)
LAYOUTS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "transposed": lambda: np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "reversed": lambda: np.arange(6, dtype=np.float32)[::-1],
    "strided": lambda: np.arange(12, dtype=np.float32)[::3],
    "single": lambda: np.array(2.5, dtype=np.float32),
    "empty": lambda: np.zeros((0, 3), dtype=np.float32),
    "read-only": lambda: np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32),
    "many dimensions": lambda: np.arange(24, dtype=np.float32).reshape(1, 2, 3, 1, 4),
}


def whole_numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(np.float32)


def test_the_engine_is_the_one_the_registry_names(engine: Engine) -> None:
    assert registry.load(engine.name) is engine
    assert {d.backend for d in engine.devices()} <= set(registry.row_of(engine.name).backends)


def test_devices_are_listed_once_and_each_has_a_native_object(
    engine: Engine, device: Device
) -> None:
    assert len(set(engine.devices())) == len(engine.devices())
    assert device in engine.devices()
    assert engine.native(device) is not None


@pytest.mark.parametrize("dtype", EXACT_EVERYWHERE)
def test_an_array_comes_back_as_it_was(engine: Engine, device: Device, dtype: str) -> None:
    host = np.arange(12).reshape(3, 4).astype(dtype)
    back = engine.to_host(engine.from_host(host, device))
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape) == (host.dtype, host.shape)
    np.testing.assert_array_equal(back, host)


@pytest.mark.parametrize("dtype", REFUSED_BY_SOME, ids=str)
def test_nothing_loses_precision_unasked(engine: Engine, device: Device, dtype: Any) -> None:
    host = (np.arange(1, 5) * (2**40 + 1)).astype(dtype)
    refused, placed = None, None
    try:
        placed = engine.from_host(host, device)
    except UnsupportedError as error:
        refused = error
    if refused is None:
        np.testing.assert_array_equal(engine.to_host(placed), host)
    else:
        assert refused.absent is not None
        assert refused.absent.instead in str(refused)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_arrives(engine: Engine, device: Device, layout: str) -> None:
    host = LAYOUTS[layout]()
    back = engine.to_host(engine.from_host(host, device))
    assert back.shape == host.shape
    np.testing.assert_array_equal(back, host)


def test_what_is_placed_is_a_copy(engine: Engine, device: Device) -> None:
    host = np.ones((64, 64), dtype=np.float32)
    placed = engine.from_host(host, device)
    host[:] = 7
    assert (engine.to_host(placed) == 1).all()


def test_what_is_read_back_belongs_to_the_caller(engine: Engine, device: Device) -> None:
    placed = engine.from_host(np.ones((64, 64), dtype=np.float32), device)
    engine.to_host(placed)[:] = 7
    assert (engine.to_host(placed) == 1).all()


def test_an_array_knows_where_it_is(engine: Engine, device: Device) -> None:
    assert device in engine.devices_of(engine.from_host(whole_numbers(3, 4), device))


def test_an_engine_owns_its_arrays_and_nothing_else(engine: Engine, device: Device) -> None:
    assert engine.owns(engine.from_host(whole_numbers(2), device))
    for other in ([1.0], 1.0, "array", None, object()):
        assert not engine.owns(other)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 7, 3), (1, 1, 1), (64, 33, 17)])
def test_a_product_is_right_and_stays_there(
    engine: Engine, device: Device, rows: int, inner: int, columns: int
) -> None:
    a, b = whole_numbers(rows, inner), whole_numbers(inner, columns)
    with engine.default_scope(device):
        product = engine.matmul(engine.from_host(a, device), engine.from_host(b, device))
        engine.synchronize(device)
    assert device in engine.devices_of(product)
    np.testing.assert_array_equal(engine.to_host(product), a.astype(np.float64) @ b)


def test_moving_reaches_every_device(engine: Engine, device: Device) -> None:
    host = whole_numbers(4, 4)
    for target in engine.devices():
        moved = engine.move(engine.from_host(host, device), target)
        assert target in engine.devices_of(moved)
        np.testing.assert_array_equal(engine.to_host(moved), host)


def test_moving_to_where_it_is_gives_the_same_object(engine: Engine, device: Device) -> None:
    placed = engine.from_host(whole_numbers(4), device)
    assert engine.move(placed, device) is placed


USES: dict[str, Callable[[Engine, Device, Device], Any]] = {
    "native": lambda engine, here, there: engine.native(there),
    "from_host": lambda engine, here, there: engine.from_host(whole_numbers(2), there),
    "move": lambda engine, here, there: engine.move(
        engine.from_host(whole_numbers(2), here), there
    ),
    "synchronize": lambda engine, here, there: engine.synchronize(there),
    "default_scope": lambda engine, here, there: engine.default_scope(there),
}


@pytest.mark.parametrize("use", USES)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    engine: Engine, device: Device, use: str
) -> None:
    seen = {d.backend for d in engine.devices()}
    missing = [Device(device.backend, 99), *(Device(name) for name in BACKENDS if name not in seen)]
    for there in missing:
        with pytest.raises(DeviceNotFoundError) as caught:
            USES[use](engine, device, there)
        assert str(there) in str(caught.value)
        assert str(device) in str(caught.value)


def test_a_scope_ends_with_its_block(engine: Engine, device: Device) -> None:
    with pytest.raises(ZeroDivisionError), engine.default_scope(device):
        raise ZeroDivisionError
    with engine.default_scope(device):
        assert device in engine.devices_of(engine.from_host(whole_numbers(2), device))
