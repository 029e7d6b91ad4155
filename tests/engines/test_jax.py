from __future__ import annotations

import numpy as np
import pytest

from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.errors import UnsupportedError

jax = pytest.importorskip("jax")
engine = registry.load("jax")
CPU = Device("cpu")


def test_native_is_a_jax_device() -> None:
    assert engine.native(CPU) == jax.devices("cpu")[0]


def test_the_scope_sets_jaxs_default_device() -> None:
    for device in engine.devices():
        with engine.default_scope(device):
            assert jax.numpy.zeros(1).devices() == {engine.native(device)}


def test_a_traced_array_lives_nowhere() -> None:
    seen = []

    def look(x):  # type: ignore[no-untyped-def]
        seen.append((engine.owns(x), engine.devices_of(x)))
        return x

    jax.jit(look)(np.float32(1))
    assert seen == [(True, ())]


def test_a_sharded_array_lives_on_all_its_devices() -> None:
    cpus = jax.devices("cpu")
    mesh = jax.sharding.Mesh(np.array(cpus), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(np.zeros(len(cpus) * 2, np.float32), sharding)
    assert engine.devices_of(x) == tuple(Device("cpu", index) for index in range(len(cpus)))


def test_float64_is_refused_while_x64_is_off() -> None:
    with pytest.raises(UnsupportedError) as caught:
        engine.from_host(np.zeros(2), CPU)
    assert str(caught.value) == (
        "JAX would make this float64 array float32, because its 64-bit numbers are off; "
        "call anydevice.configure(x64=True) first, or convert the array yourself"
    )


def test_float64_is_kept_while_x64_is_on() -> None:
    x = np.array([1 + 1e-12])
    with jax.enable_x64(True):
        placed = engine.from_host(x, CPU)
        assert placed.dtype == np.float64
        np.testing.assert_array_equal(engine.to_host(placed), x)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_whole_numbers_that_fit_32_bits_are_taken(dtype: str) -> None:
    x = np.array([0, 7, 2**31 - 1], dtype)
    np.testing.assert_array_equal(engine.to_host(engine.from_host(x, CPU)), x)


@pytest.mark.parametrize(("dtype", "number"), [("int64", -(2**40)), ("uint64", 2**63)])
def test_whole_numbers_that_do_not_fit_are_refused(dtype: str, number: int) -> None:
    with pytest.raises(UnsupportedError, match=f"this {dtype} array"):
        engine.from_host(np.array([number], dtype), CPU)


def test_waiting_covers_what_was_started() -> None:
    x = engine.from_host(np.ones((512, 512), np.float32), CPU)
    for _ in range(4):
        x = engine.matmul(x, x) / 512
    engine.synchronize(CPU)
    assert x.is_ready()
