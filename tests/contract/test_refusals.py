"""What ops do not take, they refuse on every engine alike: by name, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._machine.engines import registry
from anydevice.errors import ConfigurationError
from tests.comparing import EXACT, assert_same_integers, assert_same_values

from .combinations import each
from .home import Home

ONE_DEVICE = True  # see conftest.py
Array = np.ndarray[Any, Any]
FLOATS: Array = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
WHOLE: Array = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
BYTES: Array = np.array([1, 2, 3], np.uint8)
TRUTHS: Array = np.array([[True, False, True], [False, True, True]])
HEADS: Array = np.ones((1, 1, 2, 4), np.float32)
PLACES: Array = np.array([0, 1], np.int32)


class Refusing(Home):
    """Checks that calls with arrays of the engine are refused."""

    def __call__(self, host: Array) -> Any:
        return self.engine.place(host, self.device)

    def refuses(self, expected: str, call: Callable[..., Any], *hosts: Array) -> None:
        with pytest.raises(ConfigurationError, match=expected):
            call(*(self(host) for host in hosts))


@pytest.fixture
def here(engine: Engine, device: Device) -> Refusing:
    return Refusing(engine, device)


# Arrays of two libraries. Those whose dtypes compare equal would mix without a word.

Mixed = Callable[[Callable[[Array], Any], Callable[[Array], Any]], Any]
F, W, T, H, P = FLOATS, WHOLE, TRUTHS, HEADS, PLACES
MIXED: dict[str, tuple[str, str, Mixed]] = {
    "add": ("a", "b", lambda u, v: ops.add(u(F), v(F))),
    "equal": ("a", "b", lambda u, v: ops.equal(u(W), v(W))),
    "logical_and": ("a", "b", lambda u, v: ops.logical_and(u(T), v(T))),
    "matmul": ("a", "b", lambda u, v: ops.matmul(u(F), v(F))),
    "linear": ("x", "weight", lambda u, v: ops.linear(u(F), v(F))),
    "linear, bias": ("x", "bias", lambda u, v: ops.linear(u(F), u(F), v(F[:, 0]))),
    "where": ("condition", "a", lambda u, v: ops.where(u(T), v(F), v(F))),
    "where, operands": ("a", "b", lambda u, v: ops.where(u(T), u(F), v(F))),
    "where, a number": ("condition", "b", lambda u, v: ops.where(u(T), 0.0, v(F))),
    "concat": ("first", "another", lambda u, v: ops.concat([u(F), v(F)])),
    "rmsnorm": ("x", "weight", lambda u, v: ops.rmsnorm(u(F), v(F[0]))),
    "layernorm": ("x", "bias", lambda u, v: ops.layernorm(u(F), None, v(F[0]))),
    "swiglu": ("gate", "up", lambda u, v: ops.swiglu(u(F), v(F))),
    "embedding": ("weight", "ids", lambda u, v: ops.embedding(u(F), v(P))),
    "take": ("x", "indices", lambda u, v: ops.take(u(F), v(P))),
    "cache_write": ("cache", "positions", lambda u, v: ops.cache_write(u(H), u(H), v(P))),
    "cross_entropy": ("logits", "targets", lambda u, v: ops.cross_entropy(u(F), v(P))),
    "mean_squared_error": ("x", "y", lambda u, v: ops.mean_squared_error(u(F), v(F))),
    "rope": ("x", "positions", lambda u, v: ops.rope(u(H), v(P))),
    "attention": ("q", "k", lambda u, v: ops.attention(u(H), v(H), v(H))),
    "attention, lengths": (
        "q",
        "lengths",
        lambda u, v: ops.attention(*[u(H)] * 3, lengths=v(P[:1])),
    ),
    "attention, sinks": ("q", "sinks", lambda u, v: ops.attention(*[u(H)] * 3, sinks=v(F[0, :1]))),
    "attention, mask": ("q", "mask", lambda u, v: ops.attention(*[u(H)] * 3, mask=v(T[:1, :2]))),
}


@pytest.mark.parametrize("case", MIXED)
def test_arrays_of_two_libraries_are_refused_by_name(here: Refusing, case: str) -> None:
    first, second, mixed = MIXED[case]
    other = registry.load("numpy" if here.engine.name != "numpy" else _first_beside_numpy())
    cpu = next(device for device in other.devices() if device.backend == "cpu")

    def there(host: Array) -> Any:
        return other.place(host, cpu)

    ours = registry.row_of(here.engine.name).label
    theirs = registry.row_of(other.name).label
    name = re.escape(case.partition(",")[0])
    expected = f"^{name}: {first} is an array of {ours} and {second} one of {theirs}; .*to_device"
    with pytest.raises(ConfigurationError, match=expected):
        mixed(here, there)
    expected = f"^{name}: {first} is an array of {theirs} and {second} one of {ours}; .*to_device"
    with pytest.raises(ConfigurationError, match=expected):
        mixed(there, here)


def _first_beside_numpy() -> str:
    rows = registry.BUILT_IN.values()
    beside = (row for row in rows if row.name != "numpy" and "cpu" in row.backends)
    found = next((row.name for row in beside if find_spec(row.module.partition(".")[0])), None)
    return found or pytest.skip("numpy alone is installed")


# Numbers that are none of the array's type


@pytest.mark.parametrize("op", [ops.add, ops.multiply, ops.less, ops.maximum, ops.power])
def test_a_number_outside_of_the_arrays_type_is_refused(here: Refusing, op: Any) -> None:
    name = op.__name__
    told = rf"^{name}: 1099511627776 does not fit into int32 \(-2147483648 to 2147483647\)"
    here.refuses(told + r".*astype\(a, 'int64'\)", lambda x: op(x, 2**40), WHOLE)
    here.refuses(told + r".*astype\(b, 'int64'\)", lambda x: op(2**40, x), WHOLE)
    here.refuses(rf"^{name}: -1 does not fit into uint8 \(0 to 255", lambda x: op(x, -1), BYTES)
    here.refuses(rf"^{name}: 256 does not fit into uint8", lambda x: op(x, np.int64(256)), BYTES)
    here.refuses(rf"^{name}: 0\.5 is not an integer, and a", lambda x: op(x, 0.5), WHOLE)
    here.refuses(
        rf"^{name}: float32 does not hold an integer of 1329 bits", lambda x: op(x, 10**400), FLOATS
    )


def test_numbers_at_the_ends_of_a_type_are_taken(here: Refusing) -> None:
    for number in (-(2**31), 2**31 - 1):
        assert here.engine.to_host(ops.equal(here(WHOLE), number)).tolist() == [[False] * 3] * 2
    assert here.engine.to_host(ops.less(here(BYTES), 255)).tolist() == [True] * 3
    assert here.engine.to_host(ops.add(here(FLOATS), 2**40)).ravel().tolist() == [2.0**40] * 6
    assert_same_integers(here.engine.to_host(ops.equal(here(TRUTHS), 1)), TRUTHS)


def test_where_refuses_such_numbers_too(here: Refusing) -> None:
    told = "^where: -1 does not fit into uint8"
    here.refuses(told, lambda c, x: ops.where(c, x, -1), TRUTHS[0], BYTES)
    here.refuses("^where: 2 does not fit into bool", lambda c: ops.where(c, c, 2), TRUTHS)


def test_integers_have_no_negative_powers(here: Refusing) -> None:
    told = r"^power: integers have no power -1, and a is int32; use astype\(a"
    here.refuses(told, lambda x: ops.power(x, -1), WHOLE)
    result = here.engine.to_host(ops.power(here(FLOATS), -1))
    np.testing.assert_allclose(result, 1 / FLOATS, rtol=1e-6)


# Booleans


@pytest.mark.parametrize(
    "name", ["negative", "abs", "sign", "floor", "relu", "subtract", "power", "matmul", "linear"]
)
def test_booleans_are_no_numbers(here: Refusing, name: str) -> None:
    op = getattr(ops, name)
    two = name in ("subtract", "power", "matmul", "linear")
    told = f"^{name}: this is an array of bool, and the op takes numbers; use astype"
    here.refuses(told, op, *[TRUTHS] * (1 + two))
    if name in ("subtract", "power"):
        here.refuses(told, lambda x: op(x, True), TRUTHS)
        here.refuses(told, lambda x: op(1, x), TRUTHS)


def test_what_booleans_do_is_the_same_everywhere(here: Refusing) -> None:
    x, y = here(TRUTHS), here(TRUTHS[::-1].copy())
    expected = {"add": np.logical_or, "multiply": np.logical_and, "maximum": np.logical_or}
    for name, same in expected.items():
        result = here.engine.to_host(getattr(ops, name)(x, y))
        assert result.dtype == np.bool_
        assert_same_values(result, same(TRUTHS, TRUTHS[::-1]), because=EXACT)


# Axes

ALONG_ONE: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": ops.softmax,
    "log_softmax": ops.log_softmax,
    "argmax": ops.argmax,
    "concat": lambda x, axis: ops.concat([x, x], axis),
    "slice_axis": lambda x, axis: ops.slice_axis(x, axis, 0, 1),
}
ALONG_SEVERAL: dict[str, Callable[[Any, Any], Any]] = {
    "sum": ops.sum,
    "mean": ops.mean,
    "max": ops.max,
    "min": ops.min,
}


@pytest.mark.parametrize("name", [*ALONG_ONE, *ALONG_SEVERAL])
def test_odd_axes(here: Refusing, name: str) -> None:
    op = (ALONG_ONE | ALONG_SEVERAL)[name]
    for odd, shown in ((1.0, r"1\.0"), (True, "True"), ("last", "'last'")):
        told = f"^{name}: axis must be an integer.*, not {shown}$"
        here.refuses(told, lambda x, odd=odd: op(x, odd), FLOATS)
    for far in (2, -3):
        told = rf"^{name}: axis {far} is out of range: x is \(2, 3\)"
        here.refuses(told, lambda x, far=far: op(x, far), FLOATS)
    if name in ALONG_ONE:
        here.refuses(f"^{name}: axis must be an integer.* not None", lambda x: op(x, None), FLOATS)
        here.refuses(f"^{name}: axis must be an integer.* a tuple", lambda x: op(x, (0,)), FLOATS)
    else:
        here.refuses(f"^{name}: .* names an axis twice", lambda x: op(x, (0, -2)), FLOATS)
        here.refuses(f"^{name}: axis must be an integer", lambda x: op(x, (0, 1.0)), FLOATS)


# Shapes, orders and counts


@pytest.mark.parametrize("name", ["reshape", "broadcast_to"])
def test_odd_shapes(here: Refusing, name: str) -> None:
    op = getattr(ops, name)
    for odd, shown in (
        ((2, 3.0), r"but 3\.0 is in it"),
        ((True, 2, 3), "but True is in it"),
        (("2", 3), "but '2' is in it"),
        (6.0, r"not 6\.0"),
        (None, "not None"),
    ):
        told = f"^{name}: a shape must be integers, {shown}$"
        here.refuses(told, lambda x, odd=odd: op(x, odd), FLOATS)


@each(shape=[(-1, -1), (-2, 3), (-1, 0), (4, -1), (7,), (), (-2, -3)])
def test_shapes_that_an_array_does_not_have(here: Refusing, shape: tuple[int, ...]) -> None:
    told = rf"^reshape: the shape {re.escape(str(shape))} must have as many elements as x"
    here.refuses(told, lambda x: ops.reshape(x, shape), FLOATS)


@each(shape=[(-1, 2, 3), (3,), (2, 4), (-2, 3)])
def test_shapes_that_an_array_is_not_repeated_to(here: Refusing, shape: tuple[int, ...]) -> None:
    told = rf"^broadcast_to: x must broadcast to {re.escape(str(shape))}, but x is \(2, 3\)"
    here.refuses(told, lambda x: ops.broadcast_to(x, shape), FLOATS)


def test_odd_orders(here: Refusing) -> None:
    for axes in ((0, 0), (0,), (0, 1, 0), ()):
        told = rf"^permute: {re.escape(str(axes))} must name each axis of x once"
        here.refuses(told, lambda x, axes=axes: ops.permute(x, axes), FLOATS)
    here.refuses(r"^permute: axis 2 is out of range", lambda x: ops.permute(x, (0, 2)), FLOATS)
    fraction: Any = 1.0
    told = "^permute: axis must be an integer"
    here.refuses(told, lambda x: ops.permute(x, (0, fraction)), FLOATS)
    odd: Any
    for odd, shown in ((1, "1"), ("ab", "'ab'"), (None, "None")):
        told = f"^permute: axes must be a tuple of integers, not {shown}"
        here.refuses(told, lambda x, odd=odd: ops.permute(x, odd), FLOATS)


def test_odd_parts(here: Refusing) -> None:
    for start, stop, step in ((0, 3, 0), (0, 3, -1), (2, 1, 1), (-1, 2, 1), (0, 4, 1)):
        told = rf"^slice_axis: {start}:{stop}:{step} must be a range within axis 1, counted from"
        here.refuses(told, lambda x, at=(start, stop, step): ops.slice_axis(x, 1, *at), FLOATS)
    for odd, name in (((0.0, 2), "start"), ((0, 2.0), "stop"), ((0, 2, 1.0), "step")):
        told = f"^slice_axis: {name} must be an integer, not "
        here.refuses(told, lambda x, odd=odd: ops.slice_axis(x, 1, *odd), FLOATS)
    here.refuses("^slice_axis: start .* True", lambda x: ops.slice_axis(x, 1, True, 2), FLOATS)
    numbers: tuple[Any, ...] = np.int64(1), np.int64(1), np.int32(3)
    taken = ops.slice_axis(here(FLOATS), *numbers)
    assert here.engine.to_host(taken).tolist() == [[2, 3], [5, 6]]


def test_odd_counts(here: Refusing) -> None:
    for k in (-1, 0, 4):
        told = f"^top_k: k = {k} must be from 1 to the size of the last axis"
        here.refuses(told, lambda x, k=k: ops.top_k(x, k), FLOATS)
    for odd, shown in ((1.0, r"1\.0"), (True, "True"), (None, "None")):
        told = f"^top_k: k must be an integer, not {shown}"
        here.refuses(told, lambda x, odd=odd: ops.top_k(x, odd), FLOATS)


def test_odd_lists(here: Refusing) -> None:
    here.refuses("^concat: it takes a list of arrays, not a ", ops.concat, FLOATS)
    here.refuses("^concat: it needs at least one array", lambda _: ops.concat([]), FLOATS)
    here.refuses("^concat: another is not an array", lambda x: ops.concat([x, 1.0]), FLOATS)


def test_odd_epsilons(here: Refusing) -> None:
    for odd, shown in ((None, "None"), ("small", "'small'"), (True, "True")):
        told = f"norm: eps must be a number, not {shown}"
        here.refuses(told, lambda x, w, odd=odd: ops.rmsnorm(x, w, odd), FLOATS, FLOATS[0])
        here.refuses(told, lambda x, odd=odd: ops.layernorm(x, None, None, odd), FLOATS)
