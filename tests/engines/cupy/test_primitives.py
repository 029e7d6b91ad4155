"""What is peculiar to CuPy: gaps in `bfloat16`, several devices, and no word from the host."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._machine.engines import registry
from anydevice.errors import AnyDeviceError, UnsupportedError

try:
    engine = registry.load("cupy")
except AnyDeviceError as error:
    pytest.skip(str(error), allow_module_level=True)
if not engine.devices():
    pytest.skip("CuPy sees no device here", allow_module_level=True)

import cupy

from anydevice._engines.cupy.fused import FUSED
from anydevice._engines.cupy.primitives import PRIMITIVES as XP

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def put(values: Any, dtype: Any = np.float32) -> Any:
    return engine.place(np.asarray(values, dtype), engine.devices()[0])


def host(x: Any) -> Any:
    return engine.to_host(x).astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 300), (300, 5)),
        ((1, 300), (300, 1)),
        ((1, 1, 300), (300, 1)),
        ((2, 4, 300), (300, 5)),
        ((2, 3, 4, 300), (3, 300, 5)),
    ],
)
def test_products_of_16_bits_add_up_in_float32(dtype: Any, shapes: Any) -> None:
    drawn = np.random.default_rng(0)
    a, b = (put(drawn.random(shape), dtype) for shape in shapes)
    found = XP.matmul(a, b)
    assert found.dtype == dtype
    np.testing.assert_allclose(host(found), host(a) @ host(b), rtol=5 * 2.0**-10)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BFLOAT16])
def test_the_first_of_several_that_are_not_numbers(dtype: Any) -> None:
    row = np.zeros(5000)
    row[[1234, 3000, 4999]] = math.nan
    row[17] = math.inf
    x = put(row, dtype)
    assert XP.argmax(x, 0).item() == 1234
    values, places = XP.top_k(x, 4)
    assert places.tolist() == [1234, 3000, 4999, 17]
    assert np.isnan(host(values)[:3]).all()


def test_rows_that_go_nowhere_disturb_none_that_go_somewhere() -> None:
    x = put(np.arange(12).reshape(2, 1, 3, 2))
    new = put(100 + np.arange(12).reshape(2, 1, 3, 2))
    written = XP.write(x, new, put([[2, 3, -1], [7, -5, 3]], np.int32))
    expected = [[[[0, 1], [2, 3], [100, 101]]], [[[6, 7], [8, 9], [10, 11]]]]
    assert host(written).tolist() == expected
    assert written is x


def test_a_type_that_cupy_lacks_is_named() -> None:
    with pytest.raises(UnsupportedError, match="CuPy has no float8_e4m3fn"):
        XP.full((1,), 0, DTYPES["float8_e4m3fn"], put([0]))


@pytest.mark.skipif(len(engine.devices()) < 2, reason="needs two devices")
def test_results_are_where_the_operands_are() -> None:
    there = engine.place(np.ones((2, 2), np.float32), Device(engine.devices()[0].backend, 1))
    assert cupy.cuda.runtime.getDevice() == 0
    for made in (
        XP.add(there, 1.0),
        XP.matmul(there, there),
        XP.full((1,), 0, XP.dtype(there), there),
    ):
        assert made.device.id == 1


def test_16_bits_are_left_to_the_definitions() -> None:
    x = put(np.ones(3), np.float16)
    assert FUSED["silu"](x) is NotImplemented
    assert FUSED["swiglu"](x, x) is NotImplemented
