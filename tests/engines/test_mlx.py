from __future__ import annotations

import numpy as np
import pytest

from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.errors import UnsupportedError

mx = pytest.importorskip("mlx.core")
engine = registry.load("mlx")
CPU = Device("cpu")


def test_native_is_an_mlx_device() -> None:
    assert engine.native(CPU) == mx.Device(mx.cpu, 0)


def test_float64_is_kept_on_the_cpu() -> None:
    x = np.array([1 + 1e-12])
    placed = engine.from_host(x, CPU)
    assert placed.dtype == mx.float64
    np.testing.assert_array_equal(engine.to_host(placed), x)


def test_complex128_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="MLX has no complex128; use complex64"):
        engine.from_host(np.zeros(2, np.complex128), CPU)


def test_the_default_device_is_set_in_the_scope_and_restored_after_an_error() -> None:
    before = mx.default_device()
    seen = []

    def fail_inside() -> None:
        with engine.default_scope(CPU):
            seen.append(mx.default_device())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert seen == [mx.Device(mx.cpu, 0)]
    assert mx.default_device() == before
