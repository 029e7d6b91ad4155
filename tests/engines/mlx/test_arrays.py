from __future__ import annotations

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_values

mx = pytest.importorskip("mlx.core")
engine = registry.load("mlx")
CPU = Device("cpu")


def test_native_is_an_mlx_device() -> None:
    assert engine.native(CPU) == mx.Device(mx.cpu, 0)


def test_float64_is_kept_on_the_cpu() -> None:
    x = np.array([1 + 1e-12])
    placed = engine.place(x, CPU)
    assert placed.dtype == mx.float64
    assert_same_values(engine.to_host(placed), x, because=COPIED)


def test_complex128_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"MLX has no complex128, so .* narrow=True"):
        engine.place(np.zeros(2, np.complex128), CPU)
    with pytest.raises(UnsupportedError, match="MLX has no complex128; use complex64"):
        engine.empty((2,), as_dtype("complex128"), CPU)
    assert engine.place(np.ones(2, np.complex128), CPU, narrow=True).dtype == mx.complex64


def test_nothing_is_taken_over_but_what_it_holds_is_lent() -> None:
    with pytest.raises(UnsupportedError, match="MLX takes over no array without a copy"):
        engine.adopt(np.ones(3, np.float32))
    lent = np.from_dlpack(engine.export(mx.array([1.0]) + 1))
    assert_same_values(lent, [2], because=COPIED)


def test_what_is_finished_is_computed() -> None:
    later = [mx.ones(4) * number for number in range(3)]
    engine.finish(later)
    assert [np.asarray(x).tolist() for x in later] == [[n] * 4 for n in (0.0, 1.0, 2.0)]


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
