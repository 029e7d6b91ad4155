"""What every engine promises: placing, reading back, moving to another engine, and trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from anydevice import device_of, ops
from anydevice._arrays.trees.tree import flatten
from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, as_dtype
from anydevice._core.engine import Engine
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice.errors import DeviceNotFoundError, UnsupportedError
from tests.comparing import COPIED, EXACT, assert_same_bits, assert_same_values

from .bits import EXACT_EVERYWHERE, ROWS, assert_same, moved, patterns, small_numbers
from .combinations import each


def integers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(np.float32)


def test_the_engine_is_the_one_the_registry_names(engine: Engine) -> None:
    assert registry.load(engine.name) is engine
    assert {d.backend for d in engine.devices()} <= set(registry.row_of(engine.name).backends)


def test_devices_are_listed_once_with_native_objects(engine: Engine, device: Device) -> None:
    assert len(set(engine.devices())) == len(engine.devices())
    assert device in engine.devices()
    assert engine.native(device) is not None


def test_what_is_placed_and_what_is_read_back_are_copies(engine: Engine, device: Device) -> None:
    host = np.ones((64, 64), dtype=np.float32)
    placed = engine.place(host, device)
    host[:] = 7
    assert (engine.to_host(placed) == 1).all()
    engine.to_host(placed)[:] = 7
    assert (engine.to_host(placed) == 1).all()


def test_the_device_of_an_array_makes_more_of_its_kind(engine: Engine, device: Device) -> None:
    x = engine.place(integers(2, 3), device)
    here = device_of(x)
    assert here is not None
    assert here.engine == engine.name
    assert here.engine_is_free, "nobody asked for the engine by its name"
    assert device_of({"x": x, "more": [x, "text"]}) == here
    total = ops.add(x, here(integers(2, 3)))
    assert here in engine.devices_of(total)


def test_an_engine_owns_its_arrays_and_nothing_else(engine: Engine, device: Device) -> None:
    assert engine.owns(engine.place(integers(2), device))
    for other in ([1.0], 1.0, "array", None, object()):
        assert not engine.owns(other)


@each(("rows", "inner", "columns"), [(5, 7, 3), (1, 1, 1), (64, 33, 17)])
def test_a_product_is_right_and_stays_there(
    engine: Engine, device: Device, rows: int, inner: int, columns: int
) -> None:
    a, b = integers(rows, inner), integers(inner, columns)
    with engine.default_scope(device):
        product = engine.matmul(engine.place(a, device), engine.place(b, device))
        engine.synchronize(device)
    assert device in engine.devices_of(product)
    assert_same_values(engine.to_host(product), a.astype(np.float64) @ b, because=EXACT)


def test_moving_reaches_every_device(engine: Engine, device: Device) -> None:
    host = integers(4, 4)
    for target in engine.devices():
        moved = engine.move(engine.place(host, device), target)
        assert target in engine.devices_of(moved)
        assert_same_values(engine.to_host(moved), host, because=COPIED)


def test_moving_to_where_it_is_gives_the_same_object(engine: Engine, device: Device) -> None:
    placed = engine.place(integers(4), device)
    assert engine.move(placed, device) is placed


USES: dict[str, Callable[[Engine, Device, Device], Any]] = {
    "native": lambda engine, here, there: engine.native(there),
    "place": lambda engine, here, there: engine.place(integers(2), there),
    "empty": lambda engine, here, there: engine.empty((2,), as_dtype("float32"), there),
    "memory.use": lambda engine, here, there: engine.memory.use(there),
    "memory.reset_peak": lambda engine, here, there: engine.memory.reset_peak(there),
    "memory.set_limit": lambda engine, here, there: engine.memory.set_limit(there, 2**30),
    "memory.release": lambda engine, here, there: engine.memory.release(there),
    "move": lambda engine, here, there: engine.move(engine.place(integers(2), here), there),
    "synchronize": lambda engine, here, there: engine.synchronize(there),
    "default_scope": lambda engine, here, there: engine.default_scope(there),
}


@each(use=USES)
def test_a_missing_device_is_refused(engine: Engine, device: Device, use: str) -> None:
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
        assert device in engine.devices_of(engine.place(integers(2), device))


def test_very_many_rows_are_separated(engine: Engine, device: Device) -> None:
    if device.index:
        return  # JAX compiles it for each device, which takes many seconds
    host = np.arange(1601 * 2, dtype=np.float32).reshape(1601, 2)
    rows = engine.separate(engine.place(host, device))
    assert len(rows) == 1601
    for number in (0, 499, 500, 1499, 1500, 1600):
        assert_same_values(engine.to_host(rows[number]), host[number], because=COPIED)


@each(dtype=["float32", "float16", "int32", "uint8", "bool"])
def test_rows_get_memory_of_their_own(engine: Engine, device: Device, dtype: str) -> None:
    host = np.arange(40).reshape(5, 2, 4).astype(dtype)
    rows = engine.separate(engine.place(host, device))
    assert len(rows) == 5
    for row, expected in zip(rows, host, strict=True):
        assert_same_values(engine.to_host(row), expected, because=COPIED)
        assert engine.devices_of(row) == engine.devices_of(rows[0])
    homes = [engine.storage(row) for row in rows]
    if all(homes):
        assert len({home.allocation for home in homes if home}) == 5


def test_each_takes_what_the_other_holds(place: Any, other: Any) -> None:
    arrived = []
    for dtype in ROWS:
        for host in (patterns(dtype), small_numbers(dtype, 3, 2), small_numbers(dtype, 0, 2)):

            def there(host: Any = host) -> Any:
                first = place.engine.place(host, place.device)
                second = other.engine.place(place.engine.to_host(first), other.device)
                return other.engine.to_host(second)

            back, warned = moved(there)
            if back is not None:
                assert_same(back, host, warned)
                arrived.append(dtype.name)
    assert set(EXACT_EVERYWHERE) <= set(arrived)


def test_each_takes_over_what_the_other_exports_or_says_why_not(place: Any, other: Any) -> None:
    for dtype in ROWS:
        host = small_numbers(dtype, 32, 2)
        refused = None
        try:
            x = place.engine.place(host.astype(host.dtype), place.device, narrow=True)
        except UnsupportedError:
            continue
        try:
            adopted = other.engine.adopt(place.engine.export(x))
        except UnsupportedError as error:
            refused = error
        if refused is not None:
            assert refused.absent is not None
            assert other.engine.dlpack in (None, refused.absent) or place.engine.dlpack
            continue
        assert other.engine.dlpack is None
        assert other.engine.owns(adopted)
        addresses = {place.engine.address(x), other.engine.address(adopted)} - {None}
        assert len(addresses) < 2, f"{dtype} was copied"
        assert_same_bits(other.engine.to_host(adopted), place.engine.to_host(x), because=COPIED)


def test_each_takes_over_its_own(place: Any, other: Any) -> None:
    if place.engine is not other.engine or place.engine.dlpack is not None:
        return
    x = place.engine.place(small_numbers(DTYPES["float32"], 32, 2), place.device)
    adopted = place.engine.adopt(place.engine.export(x))
    assert place.engine.address(adopted) == place.engine.address(x)
    assert place.engine.devices_of(adopted) == place.engine.devices_of(x)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Layer:
    weight: Any
    name: str


def is_array(value: Any) -> bool:
    return owner_of(value) is not None


def test_arrays_are_leaves_and_containers_are_made_anew(engine: Engine, device: Device) -> None:
    first, second, third = (engine.place(np.full(3, n, np.float32), device) for n in (1, 2, 3))
    tree = {
        "layers": [Layer(first, "a"), Layer(second, "b")],
        "tied": Pair(first, {"x": (third, "text", 1.5)}),
    }
    leaves, rebuild = flatten(tree, is_array)
    assert [leaf.path for leaf in leaves] == [
        "['layers'][0].weight",
        "['layers'][1].weight",
        "['tied'].second['x'][0]",
    ]
    for leaf, array in zip(leaves, (first, second, third), strict=True):
        assert leaf.value is array
    new = rebuild(["one", "two", "three"])
    assert new == {
        "layers": [Layer("one", "a"), Layer("two", "b")],
        "tied": Pair("one", {"x": ("three", "text", 1.5)}),
    }
    assert tree["layers"][0].weight is first
