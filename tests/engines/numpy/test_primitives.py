"""NumPy's primitives keep the promises of `_core/primitives.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice._core.dtypes import DTYPES
from anydevice._core.primitives import Primitives
from anydevice._engines.numpy.primitives import PRIMITIVES as XP
from tests.comparing import COPIED, assert_same_values

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = [np.dtype(np.float16), BFLOAT16]
FLOATING = [*HALVES, np.dtype(np.float32), np.dtype(np.float64)]
REAL = [*FLOATING, np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint8)]

ONE: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "erf": math.erf,
    "abs": math.fabs,
    "negative": lambda x: -x,
    "floor": math.floor,
    "sign": lambda x: math.copysign(1, x),
}


def test_every_primitive_is_there() -> None:
    names = {name for name in vars(Primitives) if not name.startswith("_")}
    assert len(names) > 45
    assert {name for name in names if not callable(getattr(XP, name, None))} == set()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("name", ONE)
def test_a_function_of_one_array_is_rounded_once(name: str, dtype: np.dtype[Any]) -> None:
    x = np.array([0.001, 0.3, 0.5, 0.9, 1.0, 2.5, 3.75, 7.0]).astype(dtype)
    result = getattr(XP, name)(x)
    exact = np.array([ONE[name](float(value)) for value in x])
    assert result.dtype == dtype
    # float32 and its 24 bits stand between 16-bit numbers and the exact result.
    spacing = float(ml_dtypes.finfo(dtype).eps)
    assert np.all(np.abs(result.astype(np.float64) - exact) <= np.abs(exact) * spacing * 1.01)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add", [4, 5]),
        ("subtract", [2, 3]),
        ("multiply", [3, 4]),
        ("pow", [3, 4]),
        ("maximum", [3, 4]),
        ("minimum", [1, 1]),
    ],
)
def test_two_operands_keep_their_type(name: str, expected: list[int], dtype: np.dtype[Any]) -> None:
    a, b = np.array([3, 4]).astype(dtype), np.array([1]).astype(dtype)
    for second in (b, 1):
        result = getattr(XP, name)(a, second)
        assert result.dtype == dtype
        assert result.astype(int).tolist() == expected


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("name", ["abs", "negative", "sign", "floor", "sum", "max", "min"])
def test_results_have_the_type_of_the_array(name: str, dtype: np.dtype[Any]) -> None:
    x = np.array([0, 1, 3]).astype(dtype)
    axes = ((0,),) if name in ("sum", "max", "min") else ()
    assert getattr(XP, name)(x, *axes).dtype == dtype


def test_a_number_takes_over_the_type_of_the_array_on_either_side() -> None:
    x = np.array([1, 2], np.float32)
    assert XP.divide(x, 3).dtype == np.float32
    assert XP.subtract(1, x).tolist() == [0, -1]
    assert XP.where(x < 2, 0.5, x).tolist() == [0.5, 2]
    assert XP.where(x < 2, x.astype(BFLOAT16), 7).dtype == BFLOAT16


def test_results_without_axes_are_arrays() -> None:
    x = np.array(2.0, np.float32)
    for result in (XP.exp(x), XP.add(x, 1), XP.less(x, 3), XP.sum(np.ones(3), 0), XP.isnan(x)):
        assert isinstance(result, np.ndarray)
        assert result.shape == ()


def test_comparisons_and_truth_values() -> None:
    a, b = np.array([1.0, 2.0, math.nan]), np.array([1.0, 3.0, math.nan])
    assert XP.equal(a, b).tolist() == [True, False, False]
    assert XP.less(a, b).tolist() == [False, True, False]
    assert XP.less_equal(a, b).tolist() == [True, True, False]
    yes, no = np.array([True, True, False]), np.array([True, False, False])
    assert XP.logical_and(yes, no).tolist() == [True, False, False]
    assert XP.logical_or(yes, no).tolist() == [True, True, False]
    assert XP.logical_not(yes).tolist() == [False, False, True]
    assert XP.isnan(a.astype(BFLOAT16)).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_of_small_numbers_do_not_get_stuck(dtype: np.dtype[Any]) -> None:
    ones = np.ones((1000, 3), dtype)
    assert XP.sum(ones, 0).astype(float).tolist() == [1000.0] * 3
    assert XP.sum(ones, (0, 1), True).shape == (1, 1)
    product = XP.matmul(np.ones((1, 1000), dtype), ones)
    assert product.dtype == dtype
    assert product.astype(float).tolist() == [[1000.0] * 3]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_what_is_not_a_number_stays_so(dtype: np.dtype[Any]) -> None:
    x = np.array([[1.0, math.nan, 3.0], [5.0, 5.0, 2.0]]).astype(dtype)
    for name in ("max", "min", "sum"):
        result = getattr(XP, name)(x, 1).astype(float)
        assert math.isnan(result[0])
        assert not math.isnan(result[1])
    assert np.isnan(XP.maximum(x, 0).astype(float))[0, 1]
    assert np.isnan(XP.minimum(x, 0).astype(float))[0, 1]
    assert XP.argmax(x, 1).tolist() == [1, 0]
    values, places = XP.top_k(x, 2)
    assert places.tolist() == [[1, 2], [0, 1]]
    assert values.astype(float)[1].tolist() == [5, 5]
    assert values.dtype == dtype
    assert places.dtype == XP.argmax(x, 0).dtype == np.int32


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_the_largest_whole_numbers_are_found(dtype: type[np.generic]) -> None:
    x = np.array([3, 0, 100, 100, 7], dtype)
    values, places = XP.top_k(x, 3)
    assert (values.tolist(), places.tolist()) == ([100, 100, 7], [2, 3, 4])


def test_nothing_warns() -> None:
    x = np.array([0.0, -1.0, math.inf, math.nan, 1e30, -1e30], np.float32)
    for name in ONE:
        getattr(XP, name)(x)
        getattr(XP, name)(x.astype(BFLOAT16))
    XP.divide(x, 0)
    XP.multiply(x, x)
    XP.pow(x, 0.5)
    XP.astype(x, DTYPES["int32"])
    XP.astype(x, DTYPES["float16"])
    assert XP.sigmoid(x).tolist()[:3] == [0.5, pytest.approx(1 / (1 + math.e)), 1.0]


def test_the_error_function_is_exact_to_the_last_digits() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=20_000) * 2, np.logspace(-300, 1, 5_000), [5.97, -6, 40]])
    exact = np.array([math.erf(value) for value in x])
    assert np.max(np.abs(XP.erf(x) - exact) / np.abs(exact)) < 1e-15
    single = x[np.abs(x) > 1e-30].astype(np.float32)
    exact = np.array([math.erf(value) for value in single])
    assert np.max(np.abs(XP.erf(single) - exact) / np.abs(exact)) < 1.2e-7
    assert XP.erf(np.array([math.inf, -math.inf, -0.0, math.nan])).tolist() == pytest.approx(
        [1, -1, 0, math.nan], nan_ok=True
    )
    assert math.copysign(1, XP.erf(np.array(-0.0)).item()) == -1
    assert XP.erf(np.ones((2, 0, 3))).shape == (2, 0, 3)


def test_small_results_of_sigmoid_keep_their_digits() -> None:
    x = np.array([-80.0, -700.0])
    assert XP.sigmoid(x) == pytest.approx(np.exp(x), rel=1e-15)


def test_making() -> None:
    like = np.ones(1)
    assert XP.full((2, 1), -math.inf, DTYPES["bfloat16"], like).astype(float).tolist() == [
        [-math.inf],
        [-math.inf],
    ]
    assert XP.arange(3, DTYPES["int32"], like).dtype == np.int32
    assert XP.arange(3, DTYPES["bfloat16"], like).astype(float).tolist() == [0, 1, 2]
    values = np.array([1, 2], np.float32)
    assert XP.asarray(values, like).tolist() == [1, 2]
    assert XP.dtype(values) is DTYPES["float32"]


def test_types_and_shapes() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert XP.astype(x, DTYPES["float32"]) is x
    assert XP.astype(x, DTYPES["bfloat16"]).dtype == BFLOAT16
    assert XP.reshape(x, (4, -1)).shape == (4, 6)
    assert XP.permute_dims(x, (2, 0, 1)).shape == (4, 2, 3)
    assert XP.broadcast_to(x[:1], (5, 3, 4)).shape == (5, 3, 4)
    assert XP.concat([x, x], -1).shape == (2, 3, 8)
    assert_same_values(XP.slice_axis(x, -1, 1, 4, 2), x[..., 1:4:2], because=COPIED)
    assert_same_values(XP.slice_axis(x, 1, 1, 3), x[:, 1:3], because=COPIED)


@pytest.mark.parametrize("dtype", [*FLOATING, np.dtype(np.int32), np.dtype(bool)], ids=str)
def test_indices_out_of_range_read_nothing(dtype: np.dtype[Any]) -> None:
    x = np.ones((2, 3)).astype(dtype)
    nothing = 0.0 if dtype.kind in "ib" else math.nan
    for axis in (1, -1):
        taken = XP.take(x, np.array([[0, 3], [-1, 2]]), axis)
        assert taken.dtype == dtype
        assert taken.shape == (2, 2, 2)
        wanted = [1.0, nothing, nothing, 1.0]
        assert taken[0].astype(float).ravel().tolist() == pytest.approx(wanted, nan_ok=True)
        along = XP.take_along_axis(x, np.array([[0, 3, -1]], np.int8), axis)
        assert along.shape == (2, 3)
        wanted = [1.0, nothing, nothing]
        assert along[1].astype(float).tolist() == pytest.approx(wanted, nan_ok=True)


def test_indices_in_range_read_what_is_there() -> None:
    x = np.arange(6.0).reshape(2, 3)
    assert_same_values(XP.take(x, np.array([1, 0]), 0), x[::-1], because=COPIED)
    assert XP.take(x, np.array(2), 1).tolist() == [2, 5]
    assert XP.take_along_axis(x, np.array([[2], [0]]), 1).tolist() == [[2], [3]]


def test_nothing_can_be_read_of_nothing() -> None:
    empty = np.ones((2, 0))
    assert np.isnan(XP.take(empty, np.array([0, 1, 2]), 1)).shape == (2, 3)
    assert np.isnan(XP.take_along_axis(empty, np.zeros((1, 3), int), -1)).all()
    assert XP.take_along_axis(empty, np.zeros((1, 3), int), 1).shape == (2, 3)
    assert XP.take(empty, np.zeros((0,), int), 1).shape == (2, 0)


def test_writing_leaves_out_what_is_out_of_range() -> None:
    cache = np.zeros((2, 1, 3, 2), np.float32)
    new = np.arange(1, 9, dtype=np.float32).reshape(2, 1, 2, 2)
    written = XP.write(cache, new, np.array([[2, 0], [3, -1]]))
    assert written[0, 0].tolist() == [[3, 4], [0, 0], [1, 2]]
    assert not written[1].any()


def test_writing_does_not_touch_what_may_only_be_read() -> None:
    cache = np.zeros((1, 1, 3, 1))
    cache.flags.writeable = False
    written = XP.write(cache, np.ones((1, 1, 1, 1)), np.array([[1]]))
    assert written.ravel().tolist() == [0, 1, 0]
    assert not cache.any()


def test_products_broadcast_and_keep_whole_numbers() -> None:
    a, b = np.ones((4, 1, 2, 3), np.int32), np.ones((5, 3, 2), np.int32)
    product = XP.matmul(a, b)
    assert (product.shape, product.dtype, product.max()) == ((4, 5, 2, 2), np.int32, 3)
