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
from anydevice._ops import elementwise as _elementwise
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
from tests.comparing import COPIED, assert_same_values

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def put(values: Any, dtype: Any = np.float32) -> Any:
    return engine.place(np.asarray(values, dtype), engine.devices()[0])


def host(x: Any) -> Any:
    return engine.to_host(x).astype(np.float64)


def test_bfloat16_changes_places_bit_for_bit() -> None:
    x = put([[1.5, -2.25], [3.0, math.nan]], BFLOAT16)
    assert XP.dtype(XP.where(put([True, False], bool), x, 0.5)).name == "bfloat16"
    assert_same_values(
        host(XP.where(put([True, False], bool), x, 0.5)), [[1.5, 0.5], [3.0, 0.5]], because=COPIED
    )
    taken = XP.take(x, put([1, 5, 0], np.int32), 0)
    assert_same_values(
        host(taken), [[3.0, math.nan], [math.nan, math.nan], [1.5, -2.25]], because=COPIED
    )
    assert_same_values(host(XP.concat([x, x], 0)), np.tile(host(x), (2, 1)), because=COPIED)


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
    np.testing.assert_allclose(
        host(found), host(a) @ host(b), rtol=float(np.finfo(np.float16).eps) * 5
    )


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_its_own_versions_are_the_definitions(dtype: Any) -> None:
    drawn = np.random.default_rng(0)
    gate, up = (put(10 * drawn.standard_normal((33, 65)), dtype) for _ in range(2))
    loose = 1e-6 if dtype == np.float32 else 1e-14
    np.testing.assert_allclose(
        host(FUSED["silu"](gate)), host(_elementwise._silu(gate)), rtol=loose, atol=loose
    )
    np.testing.assert_allclose(
        host(FUSED["swiglu"](gate, up)),
        host(_elementwise._swiglu(gate, up)),
        rtol=loose,
        atol=loose,
    )


def test_16_bits_are_left_to_the_definitions() -> None:
    x = put(np.ones(3), np.float16)
    assert FUSED["silu"](x) is NotImplemented
    assert FUSED["swiglu"](x, x) is NotImplemented
