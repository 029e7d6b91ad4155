"""NumPy's primitives, and its own versions of ops, which large arrays take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice._core.dtypes import DTYPES
from anydevice._core.primitives import PrimitivesOf
from anydevice._engines.numpy.fused import FUSED
from anydevice._engines.numpy.primitives import PRIMITIVES as XP
from anydevice._ops import elementwise as _elementwise
from anydevice._ops import reduce as _norm
from tests.comparing import COPIED, assert_same_values, rounding

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATING = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
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
LARGE = (3, 70, 401)


def test_every_primitive_is_there() -> None:
    names = {name for name in vars(PrimitivesOf) if not name.startswith("_")}
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
    small = np.array([-80.0, -700.0])
    assert XP.sigmoid(small) == pytest.approx(np.exp(small), rel=1e-15)


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


def drawn(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


CASES: list[tuple[str, Callable[..., Any], Callable[[Any], tuple[Any, ...]]]] = [
    ("softmax", _norm._softmax, lambda x: (x, 2)),
    ("rmsnorm", _norm._rmsnorm, lambda x: (x, drawn(401, seed=1), 1e-6)),
    ("silu", _elementwise._silu, lambda x: (x,)),
    ("swiglu", _elementwise._swiglu, lambda x: (x, x[::-1])),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "definition", "arguments"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
def test_large_arrays(name: str, definition: Any, arguments: Any, dtype: Any, turned: bool) -> None:
    x = drawn(401, 70, 3, dtype=dtype).transpose() if turned else drawn(*LARGE, dtype=dtype)
    x[0, 0, :3], x[1, 1, 5], x[2, 2, 7] = (-200, 200, 0), math.nan, math.inf
    given = arguments(x)
    copies = [y.copy() for y in given if isinstance(y, np.ndarray)]
    found, expected = FUSED[name](*given), definition(*given)
    assert found.dtype == expected.dtype
    loose = rounding(dtype, 401)
    np.testing.assert_allclose(found, expected, rtol=loose, atol=loose)
    for before, y in zip(copies, given, strict=False):
        assert_same_values(before, y, because=COPIED)


def test_what_is_left_to_the_definitions() -> None:
    for name, _, arguments in CASES:
        assert FUSED[name](*arguments(drawn(1, 2, 401))) is NotImplemented
        assert FUSED[name](*arguments(drawn(*LARGE, dtype=np.float16))) is NotImplemented
    assert FUSED["softmax"](drawn(*LARGE), 0) is NotImplemented
