"""Arrays of JAX and their memory, on accelerators that are not here by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.engine import Engine, MemoryUse
from anydevice._core.hooks import load
from anydevice._engines import host
from anydevice._libraries.base import float64_scope
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_values

GIB = 2**30
CARD = Device("cuda", 0)
Counting = Callable[..., Engine]
jax = pytest.importorskip("jax")
engine = registry.load("jax")
CPU = Device("cpu")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    from anydevice._engines.jax import memory as facet

    def engine_with(**counted: int) -> Engine:
        stats = {"bytes_in_use": 3, **counted}
        card = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
        monkeypatch.setattr(type(engine), "native", lambda self, device: card)
        facet._preallocates.cache_clear()
        return engine

    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    return engine_with


@pytest.mark.parametrize(
    ("variable", "preallocated"),
    [
        ("UNRELATED=1", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE=true", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE=false", False),
        ("XLA_PYTHON_CLIENT_ALLOCATOR=platform", False),
    ],
)
def test_what_jax_took_at_its_start_is_told_from_use(
    counting: Counting, monkeypatch: pytest.MonkeyPatch, variable: str, preallocated: bool
) -> None:
    monkeypatch.setenv(*variable.split("="))
    memory = counting(pool_bytes=8, peak_bytes_in_use=4, bytes_limit=9).memory
    assert memory.use(CARD) == MemoryUse(3, 8, peak=4, limit=9, preallocated=preallocated)


def test_what_jax_does_not_count_is_left_out(counting: Callable[..., Engine]) -> None:
    memory = counting(bytes_limit=0).memory
    assert memory.use(CARD) == MemoryUse(3, 3, preallocated=True)


def test_jax_on_a_gpu_has_taken_its_limit(counting: Callable[..., Engine]) -> None:
    memory = counting(bytes_limit=75 * GIB).memory
    assert memory.set_limit(CARD, int(75.5 * GIB)) is None
    for limit in (60 * GIB, None):
        said = memory.set_limit(CARD, limit)
        assert said is not None
        assert "has already started, and may hold 75.0 GiB of cuda:0" in said
        assert "before JAX is first used" in said
    assert "on GPUs only" in str(memory.set_limit(Device("tpu"), GIB))
    assert memory.set_limit(Device("tpu"), None) is None
    memory.release(CARD)
    memory.reset_peak(CARD)


@pytest.mark.parametrize(
    ("message", "out"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20.00GiB.", True),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in hbm", True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("RESOURCE_EXHAUSTED: too many requests", False),
        ("INVALID_ARGUMENT: shapes", False),
    ],
)
def test_errors_of_jax(message: str, out: bool) -> None:
    import jax

    memory = registry.load("jax").memory
    assert memory.ran_out(jax.errors.JaxRuntimeError(message)) is out
    plainly = out and message.startswith("RESOURCE_EXHAUSTED: ")
    assert memory.ran_out(RuntimeError(message)) is plainly
    assert not memory.ran_out(RuntimeError(f"it said {message}"))


def test_native_and_default_devices() -> None:
    assert engine.native(CPU) == jax.devices("cpu")[0]
    for device in engine.devices():
        with engine.default_scope(device):
            assert jax.numpy.zeros(1).devices() == {engine.native(device)}


def test_a_traced_array_lives_nowhere_and_cannot_be_read() -> None:
    seen = []

    def look(x):  # type: ignore[no-untyped-def]
        seen.append((engine.owns(x), engine.devices_of(x), engine.is_traced(x), engine.address(x)))
        with pytest.raises(UnsupportedError, match="no numbers yet; read it outside"):
            engine.to_host(x)
        return x

    jax.jit(look)(np.float32(1))
    assert seen == [(True, (), True, None)]


def test_a_sharded_array_lives_on_all_its_devices_and_is_read_whole() -> None:
    cpus = jax.devices("cpu")
    mesh = jax.sharding.Mesh(np.array(cpus), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    numbers = np.arange(len(cpus) * 2, dtype=np.float32)
    x = jax.device_put(numbers, sharding)
    assert engine.devices_of(x) == tuple(Device("cpu", index) for index in range(len(cpus)))
    assert_same_values(engine.to_host(x), numbers, because=COPIED)
    assert len(cpus) == 1 or engine.address(x) is None


def test_an_array_in_another_order_has_no_address() -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    turned = layout.Format(layout.Layout(major_to_minor=(1, 0)), place)
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = jax.device_put(numbers, turned)
    if x.format.layout.major_to_minor != (1, 0):
        pytest.skip(f"JAX {jax.__version__} forgets the order where its cache has the program")
    assert engine.address(x) is None
    assert_same_values(engine.to_host(x), numbers, because=COPIED)


def test_several_numbers_in_one_byte_have_no_address() -> None:
    assert engine.address(jax.numpy.zeros(4, "int4")) is None


def test_float64_is_refused_while_x64_is_off() -> None:
    with pytest.raises(UnsupportedError) as caught:
        engine.place(np.zeros(2), CPU)
    assert str(caught.value) == (
        "JAX's 64-bit numbers are off, so this float64 array would be rounded to float32; "
        "call anydevice.configure(x64=True) first, or write x64 = true in anydevice.toml, "
        "or pass narrow=True to have it rounded"
    )
    with pytest.raises(UnsupportedError, match="64-bit numbers are off"):
        engine.empty((2,), as_dtype("float64"), CPU)
    with pytest.raises(UnsupportedError, match="64-bit numbers are off"):
        engine.adopt(np.zeros(64))


@pytest.mark.parametrize("name", ["float64", "int64"])
def test_64_bits_are_kept_while_x64_is_on(name: str) -> None:
    x = np.array([2**53 - 1]).astype(name)
    with float64_scope("jax"):
        placed = engine.place(x, CPU)
        assert placed.dtype == name
        assert_same_values(engine.to_host(placed), x, because=COPIED)
        assert engine.empty((2,), as_dtype(name), CPU).dtype == name


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_that_fit_32_bits_are_taken_with_a_warning(dtype: str) -> None:
    host.forget_warning()
    x = np.array([0, 7, 2**31 - 1], dtype)
    with pytest.warns(UserWarning, match=rf"{dtype} arrays .* become u?int32; call anydevice"):
        placed = engine.place(x, CPU)
    assert_same_values(engine.to_host(placed), x, because=COPIED)
    engine.place(x, CPU)  # a second warning would be an error here


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("dtype", "number"), [("int64", -(2**40)), ("uint64", 2**63)])
def test_integers_that_do_not_fit_are_refused(dtype: str, number: int, narrow: bool) -> None:
    with pytest.raises(UnsupportedError, match=f"this {dtype} array holds numbers that do not fit"):
        engine.place(np.array([number], dtype), CPU, narrow=narrow)


def test_what_jax_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="too large for float32"):
        engine.place(np.array([1e300]), CPU, narrow=True)
    placed = engine.place(np.array([np.inf, 1e-300, np.nan]), CPU, narrow=True)
    assert_same_values(engine.to_host(placed), [np.inf, 0, np.nan], because=COPIED)
    with pytest.raises(UnsupportedError, match="JAX has no float6_e2m3fn; convert the array"):
        engine.place(np.zeros(2, as_dtype("float6_e2m3fn").numpy()), CPU)
    key = jax.random.key(0)
    for use in (engine.to_host, engine.dtype_of):
        with pytest.raises(UnsupportedError, match="key<fry> is not a dtype"):
            use(key)


def test_waiting_covers_what_was_started() -> None:
    x = engine.place(np.ones((512, 512), np.float32), CPU)
    for _ in range(4):
        x = engine.matmul(x, x) / 512
    engine.synchronize(CPU)
    assert x.is_ready()


def test_what_is_more_than_jax_may_ever_hold_is_refused_at_once() -> None:
    card = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**31})
    refuse = load("anydevice._engines.jax.arrays:_refuse_impossible")
    refuse(2**31, card)
    with pytest.raises(MemoryError, match=f"tried to allocate {2**31 + 1} bytes") as refused:
        refuse(2**31 + 1, card)
    assert engine.memory.ran_out(refused.value)
    assert engine.memory.asked(refused.value) == 2**31 + 1
