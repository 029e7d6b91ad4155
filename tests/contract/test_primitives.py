"""Every primitive of every engine, against NumPy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, as_dtype
from anydevice._core.engine import Engine
from anydevice._core.primitives import Primitives
from anydevice.errors import UnsupportedError
from tests.comparing import EXACT, assert_same_values

from .combinations import each
from .home import Home

ONE_DEVICE = True  # see conftest.py
FLOATS = ("float32", "float16", "bfloat16", "float64")
NUMBERS = (*FLOATS, "int32")
ALL = (*NUMBERS, "bool")
NAN, INF = float("nan"), float("inf")
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
ALLOWED = {"float16": 2, "bfloat16": 2, "float32": 32, "float64": 32}
"""How many of its smallest steps a result may be off: 16-bit numbers are rounded once."""


class Primitive(Home):
    """The primitives of an engine, on one of its devices."""

    @property
    def xp(self) -> Primitives:
        return self.engine.ops

    def get(self, x: Any) -> np.ndarray[Any, Any]:
        """What is there, as numbers that NumPy can compare."""
        host = self.engine.to_host(x)
        return host if host.dtype.kind in "biu" else host.astype(np.float64)

    def is_like(self, x: Any, expected: Any, dtype: str, scale: float = 1.0) -> None:
        """Fail unless `x` is what was expected, of that type, but for its roundings."""
        assert self.xp.dtype(x).name == dtype
        found, expected = self.get(x), np.asarray(expected)
        assert found.shape == expected.shape
        if dtype in EPSILON:
            relative = ALLOWED[dtype] * EPSILON[dtype]
            with np.errstate(over="ignore"):
                rounded = expected.astype(DTYPES[dtype].numpy()).astype(np.float64)
            np.testing.assert_allclose(found, rounded, rtol=relative, atol=relative * scale / 8)
        else:
            assert_same_values(found, expected, because=EXACT)


@pytest.fixture
def at(engine: Engine, device: Device) -> Primitive:
    return Primitive(engine, device)


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray[Any, Any]:
    """Numbers from -4 to 4 that the type can hold exactly, as float64 or what NumPy has for it."""
    drawn = np.random.default_rng(seed).uniform(-4, 4, shape)
    host = drawn.astype(DTYPES[dtype].numpy())
    return host.astype(np.float64) if dtype in FLOATS else host


# Making, types and shapes


@each(dtype=ALL, shape=[(), (3,), (2, 0), (2, 3, 4)])
def test_full(at: Primitive, dtype: str, shape: tuple[int, ...]) -> None:
    like = at.put(np.zeros(1), dtype)
    x = at.xp.full(shape, 1, DTYPES[dtype], like)
    at.is_like(x, np.ones(shape), dtype)
    assert at.engine.devices_of(x) == at.engine.devices_of(like)


@each(dtype=NUMBERS, stop=[0, 1, 7])
def test_arange(at: Primitive, dtype: str, stop: int) -> None:
    like = at.put(np.zeros(1), dtype)
    x = at.xp.arange(stop, DTYPES[dtype], like)
    at.is_like(x, np.arange(stop), dtype)
    assert at.engine.devices_of(x) == at.engine.devices_of(like)


@each(dtype=ALL, shape=[(), (5,), (2, 0), (2, 3)])
def test_asarray(at: Primitive, dtype: str, shape: tuple[int, ...]) -> None:
    like = at.put(np.zeros(1), dtype)
    values = numbers(*shape, dtype=dtype).astype(DTYPES[dtype].numpy())
    x = at.xp.asarray(values, like)
    at.is_like(x, values if values.dtype.kind in "bi" else values.astype(np.float64), dtype)
    assert at.engine.devices_of(x) == at.engine.devices_of(like)


@each(source=ALL, target=ALL)
def test_astype(at: Primitive, source: str, target: str) -> None:
    host = np.abs(numbers(3, 4, dtype=source)) if source in NUMBERS else numbers(3, 4, dtype="bool")
    like, x = at.put([0], target), at.put(host, source)
    if target == "bool":
        expected: Any = host != 0
    else:
        expected = np.trunc(host) if target == "int32" else host
    y = at.xp.astype(x, at.xp.dtype(like))
    at.is_like(y, expected, target)
    assert source != target or y is x


@each(dtype=DTYPES)
def test_a_type_that_the_engine_lacks_is_refused(at: Primitive, dtype: str) -> None:
    x = at.put([1], "float32")
    try:
        at.engine.empty((1,), DTYPES[dtype], at.device)
    except UnsupportedError:
        with pytest.raises(UnsupportedError):
            at.xp.astype(x, DTYPES[dtype])
        with pytest.raises(UnsupportedError):
            at.xp.full((1,), 0, DTYPES[dtype], x)


@each(dtype=ALL)
def test_shapes(at: Primitive, dtype: str) -> None:
    host = numbers(2, 3, 4, dtype=dtype)
    x, xp = at.put(host, dtype), at.xp
    at.is_like(xp.reshape(x, (4, 6)), host.reshape(4, 6), dtype)
    at.is_like(xp.reshape(x, (-1, 2)), host.reshape(-1, 2), dtype)
    at.is_like(xp.permute_dims(x, (2, 0, 1)), host.transpose(2, 0, 1), dtype)
    at.is_like(xp.permute_dims(x, [0, 2, 1]), host.transpose(0, 2, 1), dtype)
    turned = xp.permute_dims(x, (2, 1, 0))
    at.is_like(xp.reshape(turned, (6, 4)), host.transpose(2, 1, 0).reshape(6, 4), dtype)
    wide = xp.broadcast_to(xp.slice_axis(x, 1, 1, 2), (5, 2, 3, 4))
    at.is_like(wide, np.broadcast_to(host[:, 1:2], (5, 2, 3, 4)), dtype)
    at.is_like(xp.broadcast_to(xp.reshape(xp.slice_axis(x, 0, 0, 1), (12,)), (2, 12)),
               np.broadcast_to(host[0].ravel(), (2, 12)), dtype)  # fmt: skip


@each(dtype=ALL, axis=[0, 1, -1])
def test_concat_and_slice_axis(at: Primitive, dtype: str, axis: int) -> None:
    a, b = numbers(2, 3, dtype=dtype), numbers(2, 3, dtype=dtype, seed=1)
    joined = at.xp.concat([at.put(a, dtype), at.put(b, dtype), at.put(a, dtype)], axis)
    expected = np.concatenate([a, b, a], axis)
    at.is_like(joined, expected, dtype)
    size = expected.shape[axis]
    for start, stop, step in [(0, size, 1), (1, size - 1, 2), (2, 2, 1), (0, size, 4)]:
        some = np.take(expected, range(start, stop, step), axis)
        at.is_like(at.xp.slice_axis(joined, axis, start, stop, step), some, dtype)


# One array

UNARY: dict[str, tuple[Callable[..., Any], Any, tuple[str, ...]]] = {
    "abs": (np.abs, None, NUMBERS),
    "negative": (np.negative, None, NUMBERS),
    "sign": (np.sign, None, NUMBERS),
    "floor": (np.floor, None, FLOATS),
    "exp": (np.exp, None, FLOATS),
    "log": (np.log, np.abs, FLOATS),
    "sqrt": (np.sqrt, np.abs, FLOATS),
    "rsqrt": (lambda x: 1 / np.sqrt(x), np.abs, FLOATS),
    "sin": (np.sin, None, FLOATS),
    "cos": (np.cos, None, FLOATS),
    "tanh": (np.tanh, None, FLOATS),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), None, FLOATS),
    "erf": (np.vectorize(math.erf, otypes=[float]), None, FLOATS),
    "isnan": (np.isnan, None, FLOATS),
    "logical_not": (np.logical_not, None, ("bool",)),
}


def types_and_shapes(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """One op in every shape, the others in one: libraries compile for each type and shape."""
    shapes = [(), (3, 0, 2)] if name == "exp" else []
    return [(dtype, (7, 33)) for dtype in UNARY[name][2]] + [("float32", s) for s in shapes]


@pytest.mark.parametrize("name", UNARY)
@each(("dtype", "shape"), types_and_shapes)
def test_one_array(at: Primitive, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    reference, domain, _ = UNARY[name]
    host = numbers(*shape, dtype=dtype)
    host = domain(host) if domain else host
    result = "bool" if name in ("isnan", "logical_not") else dtype
    at.is_like(getattr(at.xp, name)(at.put(host, dtype)), reference(host), result)


@pytest.mark.parametrize("name", ["abs", "exp", "erf", "isnan"])
def test_one_array_that_does_not_lie_in_order(at: Primitive, name: str) -> None:
    reference, domain, _ = UNARY[name]
    host = numbers(6, 5)
    host = domain(host) if domain else host
    x = at.xp.slice_axis(at.xp.permute_dims(at.put(host, "float32"), (1, 0)), 1, 1, 6, 2)
    result = "bool" if name == "isnan" else "float32"
    at.is_like(getattr(at.xp, name)(x), reference(host.T[:, 1::2]), result)


@each(dtype=FLOATS)
@pytest.mark.parametrize("name", [name for name in UNARY if name != "logical_not"])
def test_one_array_of_what_is_no_number_or_infinite(at: Primitive, name: str, dtype: str) -> None:
    host = np.array([NAN, INF, -INF, 0.0, 1.0])
    with np.errstate(all="ignore"):
        expected = UNARY[name][0](host)
    result = "bool" if name == "isnan" else dtype
    at.is_like(getattr(at.xp, name)(at.put(host, dtype)), expected, result)


# Two arrays, or an array and a number

BINARY: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "add": (np.add, NUMBERS),
    "subtract": (np.subtract, NUMBERS),
    "multiply": (np.multiply, NUMBERS),
    "divide": (np.divide, FLOATS),
    "maximum": (np.maximum, NUMBERS),
    "minimum": (np.minimum, NUMBERS),
    "equal": (np.equal, ALL),
    "less": (np.less, NUMBERS),
    "less_equal": (np.less_equal, NUMBERS),
    "logical_and": (np.logical_and, ("bool",)),
    "logical_or": (np.logical_or, ("bool",)),
}
TO_BOOL = ("equal", "less", "less_equal", "logical_and", "logical_or")
BROADCAST = [
    ((4, 5), (4, 5)),
    ((2, 1, 3), (4, 1)),
    ((4, 1), (5,)),
    ((), (3,)),
    ((), ()),
    ((0, 3), (1, 3)),
    ((1,), (2, 3)),
]


def types_and_pairs(name: str) -> list[tuple[Any, ...]]:
    """Every shape for one op that computes and one that compares."""
    pairs = BROADCAST if name in ("add", "less") else []
    every = [(dtype, *BROADCAST[1]) for dtype in BINARY[name][1]]
    return every + [("float32", *pair) for pair in pairs if pair != BROADCAST[1]]


@pytest.mark.parametrize("name", BINARY)
@each(("dtype", "left", "right"), types_and_pairs)
def test_two_arrays(at: Primitive, name: str, dtype: str, left: Any, right: Any) -> None:
    a, b = numbers(*left, dtype=dtype), numbers(*right, dtype=dtype, seed=1)
    result = "bool" if name in TO_BOOL else dtype
    found = getattr(at.xp, name)(at.put(a, dtype), at.put(b, dtype))
    at.is_like(found, BINARY[name][0](a, b), result)


@each("dtype", lambda name: NUMBERS if name in ("add", "less") else ("float32", "int32"))
@pytest.mark.parametrize("name", [name for name in BINARY if not name.startswith("logical")])
def test_an_array_and_a_number(at: Primitive, name: str, dtype: str) -> None:
    if name == "divide" and dtype == "int32":
        return  # integers are not divided
    host = numbers(2, 3, dtype=dtype)
    host = np.where(host == 0, host.dtype.type(1), host)
    x, result = at.put(host, dtype), "bool" if name in TO_BOOL else dtype
    reference, found = BINARY[name][0], getattr(at.xp, name)
    for value in (2, -1) if dtype == "int32" else (2, 0.5, -1):
        at.is_like(found(x, value), reference(host, value), result)
        at.is_like(found(value, x), reference(value, host), result)


def test_truths_and_fractions_beside_arrays(at: Primitive) -> None:
    x = at.put([True, False], "bool")
    at.is_like(at.xp.logical_and(x, True), [True, False], "bool")
    at.is_like(at.xp.logical_and(False, x), [False, False], "bool")
    at.is_like(at.xp.logical_or(x, True), [True, True], "bool")
    at.is_like(at.xp.logical_or(False, x), [True, False], "bool")
    x = at.put([1, 2, 3], "int32")
    at.is_like(at.xp.add(x, 1.5), [2, 3, 4], "int32")
    at.is_like(at.xp.multiply(2.5, x), [2, 4, 6], "int32")
    at.is_like(at.xp.where(at.put([True, False, True], "bool"), x, 7.9), [1, 7, 3], "int32")


@each(dtype=FLOATS)
def test_pow(at: Primitive, dtype: str) -> None:
    base, exponent = np.abs(numbers(4, 5, dtype=dtype)), numbers(5, dtype=dtype, seed=1)
    a, b, xp = at.put(base, dtype), at.put(exponent, dtype), at.xp
    at.is_like(xp.pow(a, b), base**exponent, dtype)
    for value in (0, 1, 2, 3, -1, 0.5, -0.5):
        at.is_like(xp.pow(a, value), base ** float(value), dtype)
    at.is_like(xp.pow(2, b), 2.0**exponent, dtype)
    at.is_like(xp.pow(at.put([NAN, 0, INF], dtype), 2), [NAN, 0, INF], dtype)


@each(dtype=FLOATS)
def test_the_larger_and_the_smaller_pass_on_what_is_no_number(at: Primitive, dtype: str) -> None:
    a, b = at.put([NAN, 1, -INF, NAN], dtype), at.put([0, NAN, 2, NAN], dtype)
    at.is_like(at.xp.maximum(a, b), [NAN, NAN, 2, NAN], dtype)
    at.is_like(at.xp.minimum(a, b), [NAN, NAN, -INF, NAN], dtype)
    at.is_like(at.xp.maximum(a, 0), [NAN, 1, 0, NAN], dtype)
    at.is_like(at.xp.minimum(0, a), [NAN, 0, -INF, NAN], dtype)
    at.is_like(at.xp.equal(a, a), [False, True, True, False], "bool")
    at.is_like(at.xp.less(a, b), [False, False, True, False], "bool")
    at.is_like(at.xp.less_equal(a, a), [False, True, True, False], "bool")


@each(dtype=ALL)
def test_where(at: Primitive, dtype: str) -> None:
    condition = numbers(3, 1, 4, seed=2) > 0
    a, b = numbers(2, 4, dtype=dtype), numbers(1, dtype=dtype, seed=1)
    test, x, y = at.put(condition, "bool"), at.put(a, dtype), at.put(b, dtype)
    at.is_like(at.xp.where(test, x, y), np.where(condition, a, b), dtype)
    one, zero = (True, False) if dtype == "bool" else (1, 0)
    at.is_like(at.xp.where(test, x, zero), np.where(condition, a, a.dtype.type(0)), dtype)
    at.is_like(at.xp.where(test, one, x), np.where(condition, a.dtype.type(1), a), dtype)


def test_where_takes_the_one_side_whatever_the_other_is(at: Primitive) -> None:
    x = at.put([NAN, 1, INF], "float32")
    at.is_like(at.xp.where(at.xp.isnan(x), 0.0, x), [0, 1, INF], "float32")
    at.is_like(at.xp.where(at.xp.isnan(x), x, -INF), [NAN, -INF, -INF], "float32")


# Along axes

AXES: list[Any] = [0, 1, -1, (0, 1), (0, -1), (0, 1, 2), ()]


@each(
    ("dtype", "axis", "keepdims"),
    [("float32", axis, False) for axis in AXES]
    + [("float32", axis, True) for axis in (1, (0, -1), ())]
    + [(dtype, (0, -1), False) for dtype in NUMBERS[1:]],
)
def test_sums_and_extremes(at: Primitive, dtype: str, axis: Any, keepdims: bool) -> None:
    host = numbers(3, 4, 5, dtype=dtype)
    x = at.put(host, dtype)
    at.is_like(at.xp.sum(x, axis, keepdims), host.sum(axis, keepdims=keepdims), dtype, scale=60)
    at.is_like(at.xp.max(x, axis, keepdims), host.max(axis, keepdims=keepdims), dtype)
    at.is_like(at.xp.min(x, axis, keepdims), host.min(axis, keepdims=keepdims), dtype)


def test_sums_and_extremes_of_what_does_not_lie_in_order(at: Primitive) -> None:
    host = numbers(6, 5)
    x = at.xp.slice_axis(at.xp.permute_dims(at.put(host, "float32"), (1, 0)), 1, 1, 6, 2)
    for axis in (0, 1, (0, 1)):
        at.is_like(at.xp.sum(x, axis), host.T[:, 1::2].sum(axis), "float32", scale=30)
        at.is_like(at.xp.max(x, axis), host.T[:, 1::2].max(axis), "float32")


@each(dtype=NUMBERS)
def test_a_sum_of_nothing_is_zero(at: Primitive, dtype: str) -> None:
    x = at.put(np.zeros((3, 0)), dtype)
    at.is_like(at.xp.sum(x, 1), np.zeros(3), dtype)
    at.is_like(at.xp.sum(x, 0), np.zeros(0), dtype)


@each(dtype=["float16", "bfloat16"], axis=[0, 1])
def test_16_bit_sums_are_rounded_once(at: Primitive, dtype: str, axis: int) -> None:
    host = np.ones((5000, 3) if axis == 0 else (3, 5000))
    at.is_like(at.xp.sum(at.put(host, dtype), axis), np.full(3, 5000.0), dtype)


@each(dtype=FLOATS)
def test_extremes_pass_on_what_is_no_number(at: Primitive, dtype: str) -> None:
    x = at.put([[1, NAN, 3], [-INF, 2, INF], [NAN, NAN, NAN]], dtype)
    at.is_like(at.xp.max(x, 1), [NAN, INF, NAN], dtype)
    at.is_like(at.xp.min(x, 1), [NAN, -INF, NAN], dtype)
    at.is_like(at.xp.sum(x, 1), [NAN, NAN, NAN], dtype)


def test_extremes_and_largest_of_truths(at: Primitive) -> None:
    x = at.put([[True, False], [False, False]], "bool")
    at.is_like(at.xp.max(x, 1), [True, False], "bool")
    at.is_like(at.xp.min(x, 0), [False, False], "bool")
    largest, places = at.xp.top_k(at.put([False, True, False], "bool"), 1)
    at.is_like(largest, [True], "bool")
    at.is_like(places, [1], "int32")


@each(("dtype", "axis"), [*((dtype, 1) for dtype in ALL), ("float32", 0), ("float32", -1)])
def test_argmax(at: Primitive, dtype: str, axis: int) -> None:
    host = np.round(numbers(40, 30)).astype(DTYPES[dtype].numpy())
    host = host.astype(np.float64) if dtype in FLOATS else host
    at.is_like(at.xp.argmax(at.put(host, dtype), axis), host.argmax(axis), "int32")


@each(dtype=FLOATS)
def test_argmax_takes_what_is_no_number_for_the_largest(at: Primitive, dtype: str) -> None:
    x = at.put([[1, NAN, INF, NAN], [0, 5, 5, 1], [-INF, -INF, -INF, -INF]], dtype)
    at.is_like(at.xp.argmax(x, 1), [1, 1, 0], "int32")


@each(("dtype", "k"), [*((dtype, 3) for dtype in NUMBERS), ("float32", 1), ("float32", 10)])
def test_top_k(at: Primitive, dtype: str, k: int) -> None:
    host = np.random.default_rng(0).permuted(np.arange(40).reshape(4, 10), axis=1) - 20
    largest, places = at.xp.top_k(at.put(host, dtype), k)
    order = np.argsort(-host, axis=1)[:, :k]
    at.is_like(places, order, "int32")
    at.is_like(largest, np.take_along_axis(host, order, 1), dtype)


@each(dtype=FLOATS)
def test_top_k_takes_what_is_no_number_for_the_largest(at: Primitive, dtype: str) -> None:
    host = [1, NAN, INF, -1, np.copysign(NAN, -1)]
    largest, places = at.xp.top_k(at.put(host, dtype), 3)
    at.is_like(largest, [NAN, NAN, INF], dtype)
    assert sorted(at.get(places)[:2]) == [1, 4]
    assert at.get(places)[2] == 2


# Products and places

PRODUCTS = [
    ((3, 4), (4, 5)),
    ((1, 7), (7, 1)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (6, 4, 2)),
    ((3, 0), (0, 4)),
    ((0, 4), (4, 2)),
    ((65, 129), (129, 33)),
    ((5, 1, 9), (5, 9, 3)),
]


@each(
    ("dtype", "left", "right"),
    [("float32", *pair) for pair in PRODUCTS]
    + [(dtype, *pair) for dtype in FLOATS[1:] for pair in (PRODUCTS[3], PRODUCTS[6])],
)
def test_matmul(at: Primitive, dtype: str, left: Any, right: Any) -> None:
    a, b = numbers(*left, dtype=dtype), numbers(*right, dtype=dtype, seed=1)
    found = at.xp.matmul(at.put(a, dtype), at.put(b, dtype))
    at.is_like(found, a @ b, dtype, scale=16 * math.sqrt(max(1, left[-1])))


@each(dtype=FLOATS)
def test_matmul_of_what_does_not_lie_in_order(at: Primitive, dtype: str) -> None:
    a, b = numbers(2, 3, 4, dtype=dtype), numbers(2, 5, 4, dtype=dtype, seed=1)
    turned = at.xp.permute_dims(at.put(b, dtype), (0, 2, 1))
    at.is_like(at.xp.matmul(at.put(a, dtype), turned), a @ b.transpose(0, 2, 1), dtype, scale=32)


@each(dtype=["float16", "bfloat16"])
def test_16_bit_products_are_rounded_once(at: Primitive, dtype: str) -> None:
    row, column = at.put(np.ones((1, 5000)), dtype), at.put(np.ones((5000, 1)), dtype)
    at.is_like(at.xp.matmul(row, column), [[5000.0]], dtype)


def test_float32_products_are_float32_ones(at: Primitive) -> None:
    a = 1 + numbers(64, 64) * 2.0**-12  # what fewer bits of mantissa would lose
    b = numbers(64, 64, seed=1)
    a = a.astype(np.float32).astype(np.float64)
    found = at.get(at.xp.matmul(at.put(a, "float32"), at.put(b, "float32")))
    np.testing.assert_allclose(found, a @ b, rtol=0, atol=64 * 4 * 2.0**-22)


def gathered(host: Any, indices: Any, axis: int) -> Any:
    """`numpy.take`, and what is said of indices out of range."""
    nothing = NAN if host.dtype.kind == "f" else 0
    inside = (indices >= 0) & (indices < host.shape[axis])
    axis %= host.ndim
    found = np.take(host, np.where(inside, indices, 0), axis)
    inside = inside.reshape((1,) * axis + indices.shape + (1,) * (host.ndim - 1 - axis))
    return np.where(inside, found, nothing).astype(host.dtype)


@each(
    ("dtype", "axis", "shape"),
    [("float32", axis, shape) for axis in (0, 1, -1) for shape in [(), (4,), (2, 3), (0,)]]
    + [(dtype, 1, (2, 3)) for dtype in ALL[1:]],
)
def test_take(at: Primitive, dtype: str, axis: int, shape: tuple[int, ...]) -> None:
    host = numbers(3, 5, 2, dtype=dtype)
    indices = np.random.default_rng(0).integers(0, host.shape[axis], shape)
    found = at.xp.take(at.put(host, dtype), at.put(indices, "int32"), axis)
    at.is_like(found, gathered(host, np.asarray(indices), axis), dtype)


@each(dtype=ALL, axis=[0, 1])
def test_take_out_of_range_reads_nothing(at: Primitive, dtype: str, axis: int) -> None:
    host = numbers(3, 5, dtype=dtype)
    indices = np.array([0, -1, 2, 7, 2**31 - 1, -(2**31)])
    found = at.xp.take(at.put(host, dtype), at.put(indices, "int32"), axis)
    at.is_like(found, gathered(host, indices, axis), dtype)


@each(kind=["int8", "uint8", "int16", "int64", "uint32"])
def test_indices_are_integers_of_any_type(at: Primitive, kind: str) -> None:
    host, indices = numbers(300, 2), np.array([[0, 5], [100, 3]])
    if as_dtype(kind).kind == "int":
        indices[1, 1] = -3
    try:
        places = at.engine.place(indices.astype(kind), at.device, narrow=True)
    except UnsupportedError as error:
        pytest.skip(str(error))
    x = at.put(host, "float32")
    at.is_like(at.xp.take(x, places, 0), gathered(host, indices, 0), "float32")
    rows = at.xp.reshape(places, (4, 1))
    expected = gathered(host, indices.reshape(4), 0)[:, :1]
    at.is_like(at.xp.take_along_axis(at.xp.slice_axis(x, 1, 0, 1), rows, 0), expected, "float32")


@each(dtype=ALL)
def test_an_axis_of_nothing_has_nothing_to_take(at: Primitive, dtype: str) -> None:
    nothing: Any = NAN if dtype in FLOATS else 0
    x, indices = at.put(np.zeros((0, 2)), dtype), at.put([0, 1, -1], "int32")
    at.is_like(at.xp.take(x, indices, 0), np.full((3, 2), nothing), dtype)
    column = at.xp.reshape(indices, (3, 1))
    at.is_like(at.xp.take_along_axis(x, column, 0), np.full((3, 2), nothing), dtype)


@each(("axis", "shape"), [(0, (2, 4)), (1, (3, 1)), (-1, (1, 6)), (-1, (3, 0))], dtype=ALL)
def test_take_along_axis(at: Primitive, dtype: str, axis: int, shape: tuple[int, ...]) -> None:
    host = numbers(3, 4, dtype=dtype)
    indices = np.random.default_rng(0).integers(-1, host.shape[axis] + 1, shape)
    inside = (indices >= 0) & (indices < host.shape[axis])
    nothing = host.dtype.type(NAN if dtype in FLOATS else 0)
    wanted = [*host.shape]
    wanted[axis] = shape[axis]
    safe = np.broadcast_to(np.where(inside, indices, 0), wanted)
    expected = np.where(inside, np.take_along_axis(host, safe, axis), nothing)
    found = at.xp.take_along_axis(at.put(host, dtype), at.put(indices, "int32"), axis)
    at.is_like(found, expected, dtype)


def written(host: Any, new: Any, positions: Any) -> Any:
    result = host.copy()
    for batch, row in enumerate(positions):
        for token, place in enumerate(row):
            if 0 <= place < host.shape[2]:
                result[batch, :, place] = new[batch, :, token]
    return result


POSITIONS: list[list[list[int]]] = [
    [[5, 6, 7], [-1, 0, 100]],
    [[2], [5]],
    [[6], [-1]],
    [[0, 1, 2], [3, 4, 5]],
    [[-1, -1, 1], [6, 7, 8]],
    [[2**31 - 1, 1, 0], [-(2**31), 5, 2]],
    [[], []],
]


@each(
    ("dtype", "positions"),
    [("float32", positions) for positions in POSITIONS]
    + [(dtype, positions) for dtype in ALL[1:] for positions in POSITIONS[:2]],
)
def test_write(at: Primitive, dtype: str, positions: list[list[int]]) -> None:
    host = numbers(2, 3, 6, 4, dtype=dtype)
    new = numbers(2, 3, len(positions[0]), 4, dtype=dtype, seed=1)
    x, rows = at.put(host, dtype), at.put(new, dtype)
    places = at.put(np.array(positions).reshape(2, -1), "int32")
    at.is_like(at.xp.write(x, rows, places), written(host, new, positions), dtype)
    at.is_like(rows, new, dtype)


def test_write_again_and_again(at: Primitive) -> None:
    expected = np.zeros((1, 2, 8, 4))
    x = at.put(expected, "float32")
    for token in range(10):
        new = numbers(1, 2, 1, 4, seed=token)
        x = at.xp.write(x, at.put(new, "float32"), at.put([[token]], "int32"))
        expected = written(expected, new, [[token]])
    at.is_like(x, expected, "float32")


def test_write_takes_rows_that_do_not_lie_in_order(at: Primitive) -> None:
    host, new = numbers(2, 3, 6, 4), numbers(2, 5, 3, 4, seed=1)
    rows = at.xp.permute_dims(at.put(new, "float32"), (0, 2, 1, 3))
    places = np.array([[3, 2, 1, 9, 0], [0, 1, 2, 3, 4]])
    found = at.xp.write(at.put(host, "float32"), rows, at.put(places, "int32"))
    at.is_like(found, written(host, new.transpose(0, 2, 1, 3), places), "float32")


def test_nothing_else_changes_its_operands(at: Primitive) -> None:
    host = numbers(4, 6)
    x, y = at.put(host, "float32"), at.put(host, "float32")
    for name in UNARY:
        getattr(at.xp, name)(x)
    for name in BINARY:
        getattr(at.xp, name)(x, y)
    at.xp.concat([x, y], 0)
    at.xp.sum(x, 0), at.xp.max(x, 0), at.xp.top_k(x, 2), at.xp.argmax(x, 0)
    at.xp.take(x, at.put([1, 9], "int32"), 0)
    at.is_like(x, host, "float32")
    at.is_like(y, host, "float32")
