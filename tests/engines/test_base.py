"""What libraries write when memory ran out, and the amount that each names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._engines.base import BaseEngine, amount_asked
from anydevice._machine.engines import registry

GIB = 2**30


@pytest.mark.parametrize(
    ("message", "amount"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of 139 GiB", 20 * GIB),
        ("MPS backend out of memory (MPS allocated: 9.57 GiB). Tried to allocate 256 bytes", 256),
        ("MPS backend out of memory. Tried to allocate 1.50 GB on private pool.", 3 * GIB // 2),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes.", 1234),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20.00GiB.", 20 * GIB),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 337623 bytes.", 337623),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.5MiB (2621440B) on", 5 * 2**19),
        ("Out of memory allocating 805,306,368 bytes (allocated so far: 5 bytes)", 805306368),
        ("out of memory to allocate 1073741824 bytes (total 12373894656 bytes)", GIB),
        ("[metal::malloc] Attempting to allocate 48736917632 bytes which is greater", 48736917632),
        ("[malloc] Unable to allocate 17 bytes.", 17),
        ("CUDA error: out of memory", None),
        ("create_buffer failed: INVALID_BUFFER_SIZE", None),
        ("", None),
    ],
)
def test_the_amount_is_read(message: str, amount: int | None) -> None:
    assert amount_asked(message) == amount


def test_more_than_any_machine_could_have_is_out_of_memory_too() -> None:
    import torch

    with pytest.raises(ValueError, match="array is too big") as caught:
        np.ones((2**40, 2**40), np.int8)
    assert registry.load("numpy").memory.ran_out(caught.value)
    assert registry.load("numpy").memory.asked(caught.value) is None
    with pytest.raises(RuntimeError) as failed:
        torch.empty((2**40, 2**40), dtype=torch.int8)
    assert registry.load("torch").memory.ran_out(failed.value)


@pytest.mark.needs("torch", "jax", "pyopencl", "mlx")
def test_nobody_takes_the_error_of_another_for_its_own() -> None:
    """The first engine that knows an error is the one that is asked about the device."""
    errors: dict[str, Any] = {}
    for name in ("numpy", "torch", "jax", "opencl", "mlx"):
        engine = registry.load(name)
        try:
            engine.empty((2**22, 2**24), DTYPES["float32"], engine.devices()[0])
        except Exception as error:
            errors[name] = error
    assert len(errors) == 5
    for name, failure in errors.items():
        others = [n for n in errors if n != name and registry.load(n).memory.ran_out(failure)]
        assert others == []


def test_the_old_name_of_slice_axis_works_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def part(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
            return x[start:stop:step]

    class Engine(BaseEngine):
        name = "numpy"

    monkeypatch.setattr("anydevice._engines.numpy.primitives.PRIMITIVES", Old())
    with pytest.warns(DeprecationWarning, match="numpy has `part` for the primitive `slice_axis`"):
        primitives = Engine().ops  # type: ignore[abstract]
    assert primitives.slice_axis(np.arange(5), 0, 1, 4, 2).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("places", "one_memory", "copied"),
    [
        (["cpu:1"], False, False),
        (["cpu:0", "cpu:1"], False, True),
        (["cpu:0", "cpu:1"], True, False),
    ],
)
def test_copies_between_memories(places: list[str], one_memory: bool, copied: bool) -> None:
    class Engine(BaseEngine):
        name = "numpy"
        shares_memory = one_memory

        def native(self, device: Device) -> object:
            return device

        def devices_of(self, x: object) -> tuple[Device, ...]:
            return tuple(map(Device, places))

        def to_host(self, x: Any) -> Any:
            return x

        def place(self, x: Any, device: Device, *, narrow: bool = False) -> Any:
            return np.array(x)

    x = np.ones(2)
    assert (Engine().move(x, Device("cpu:1")) is not x) is copied
