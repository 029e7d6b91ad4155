"""Memory of JAX on accelerators that are not here, with a stand-in for what it counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anydevice._core.device import Device
from anydevice._core.engine import Engine, MemoryUse
from anydevice._machine.engines import registry

GIB = 2**30
CARD = Device("cuda", 0)


class Counting:
    """A device of JAX that counts what it holds."""

    platform = "gpu"

    def __init__(self, **counted: int) -> None:
        self.counted = {"bytes_in_use": 3, **counted}

    def memory_stats(self) -> dict[str, int]:
        return self.counted


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    from anydevice._engines.jax import memory as facet

    def engine_with(**counted: int) -> Engine:
        engine = registry.load("jax")
        monkeypatch.setattr(type(engine), "native", lambda self, device: Counting(**counted))
        facet._preallocates.cache_clear()
        return engine

    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    return engine_with


@pytest.mark.parametrize(
    ("variable", "value", "preallocated"),
    [
        ("UNRELATED", "1", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "true", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", False),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", False),
    ],
)
def test_what_jax_took_at_its_start_is_told_from_use(
    counting: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    preallocated: bool,
) -> None:
    monkeypatch.setenv(variable, value)
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
