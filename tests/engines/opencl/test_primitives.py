"""The primitives on OpenCL against NumPy's float64, as a CPU, as a GPU, and with small groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine
from anydevice._machine.discovery.discover import discover
from anydevice._machine.hardware.opencl.diagnosis import POCL
from anydevice.errors import UnsupportedError

cl = pytest.importorskip("pyopencl")

from anydevice._engines.opencl import buffers
from anydevice._engines.opencl.fused import KERNELS
from anydevice._engines.opencl.kernels import elementwise, programs
from anydevice._engines.opencl.primitives import PRIMITIVES as xp  # noqa: N811
from tests.comparing import EXACT, assert_same_values
from tests.programs import run_python

HERE = Device("opencl")
INTEGERS = ("int8", "int32", "int64", "uint8", "uint64")
ERRORS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 3e-6, "float64": 1e-13}
Put = Callable[..., Any]
Assume = Callable[..., None]
ON_CPU_AND_GPU = pytest.mark.parametrize("assumed", ["cpu", "gpu"], indirect=True)


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Numbers that the type holds, those of 16 bits included."""
    values = np.random.default_rng(seed).standard_normal(shape) * 3
    return np.asarray(abs(values) if dtype[0] == "u" else values).astype(DTYPES[dtype].numpy())


def check(got: Any, wanted: Any, dtype: str, scale: float = 1.0) -> None:
    wanted = np.asarray(wanted)
    assert got.shape == wanted.shape
    assert got.dtype == DTYPES[dtype].numpy()
    if dtype in ERRORS:
        with np.errstate(over="ignore"):
            wanted = wanted.astype(DTYPES[dtype].numpy()).astype(np.float64)
        error = ERRORS[dtype] * scale
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=error, atol=error)
    else:
        assert_same_values(got, wanted.astype(DTYPES[dtype].numpy()), because=EXACT)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_sums_of_whole_numbers(put: Put, get: Any, dtype: str) -> None:
    a, b = numbers((2, 3), dtype), numbers((2, 1), dtype, 1)
    assert_same_values(get(xp.add(put(a), put(b))), a + b, because=EXACT)
    assert get(xp.sum(put(a), 0)).dtype == a.dtype
    assert_same_values(get(xp.max(put(a), (0, 1))), a.max(), because=EXACT)
    assert_same_values(get(xp.min(put(a), 1)), a.min(1), because=EXACT)


def test_whole_numbers_and_booleans(put: Put, get: Any) -> None:
    whole, truths = np.array([-3, 0, 2], np.int32), np.array([True, False])
    for got, wanted in [
        (xp.floor(put(whole)), whole),
        (xp.isnan(put(whole)), [False] * 3),
        (xp.logical_not(put(whole)), [False, True, False]),
        (xp.less(put(truths), put(truths[::-1].copy())), [False, True]),
        (xp.less_equal(put(truths), put(truths)), [True, True]),
        (xp.where(put(whole), put(np.arange(3)), 7), [0, 7, 2]),
    ]:
        assert_same_values(get(got), wanted, because=EXACT)
    a = np.array([2, -3, 1, -1, -1, 5, 0], np.int32)
    b = np.array([10, 3, -2, -3, -2, -1, 0], np.int32)
    assert_same_values(get(xp.pow(put(a), put(b))), [1024, -27, 1, -1, 1, 0, 1], because=EXACT)


def test_a_number_beside_an_array_takes_its_type(put: Put, get: Any) -> None:
    x = numbers((5,), "bfloat16")
    for got, wanted in [
        (xp.subtract(1.5, put(x)), 1.5 - x.astype(np.float64)),
        (xp.divide(put(x), 3), x.astype(np.float64) / 3),
        (xp.maximum(put(x), -0.5), np.maximum(x.astype(np.float64), -0.5)),
    ]:
        check(get(got), wanted, "bfloat16")
    rounded = put(np.array([0.1], DTYPES["bfloat16"].numpy()))
    assert get(xp.equal(rounded, 0.1)).all()
    assert_same_values(get(xp.add(put(np.arange(3)), 2)), [2, 3, 4], because=EXACT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_16_bits_is_read_and_rounded(put: Put, get: Any, dtype: str) -> None:
    own = DTYPES[dtype].numpy()
    every = np.arange(2**16, dtype=np.uint16).view(own)
    wide = get(xp.astype(put(every), DTYPES["float32"]))
    assert_same_values(wide, every.astype(np.float32), because=EXACT)
    with np.errstate(all="ignore"):
        between = np.concatenate([wide, np.nextafter(wide, np.float32(np.inf))])
        more = [1e38, -1e38, 65520]
        between = np.concatenate([between, between * np.float32(1.00390625), more])
        rounded = between.astype(np.float32).astype(own)
    got = get(xp.astype(put(between.astype(np.float32)), DTYPES[dtype]))
    assert_same_values(got.astype(np.float32), rounded.astype(np.float32), because=EXACT)


def test_float64_is_rounded_once(put: Put, get: Any) -> None:
    just_above = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, 1e300, np.inf, np.nan, -0.0])
    got = get(xp.astype(put(just_above), DTYPES["bfloat16"])).astype(np.float64)
    assert_same_values(got, [1 + 2**-7, 1, np.inf, np.inf, np.nan, 0], because=EXACT)
    just_above = np.array([1 + 2**-11 + 2**-40, 1 + 2**-11])
    got = get(xp.astype(put(just_above), DTYPES["float16"])).astype(np.float64)
    assert_same_values(got, [1 + 2**-10, 1], because=EXACT)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_types_are_converted(put: Put, get: Any, dtype: str) -> None:
    x = np.array([0, 1, 5, 2.75], np.float32)
    got = get(xp.astype(put(x), DTYPES[dtype]))
    assert_same_values(got, x.astype(DTYPES[dtype].numpy()), because=EXACT)
    back = get(xp.astype(put(got), DTYPES["int32"]))
    assert_same_values(back, got.astype(np.int32), because=EXACT)
    same = put(got)
    assert xp.astype(same, DTYPES[dtype]) is same
    assert xp.dtype(same) == DTYPES[dtype]


def test_making(put: Put, get: Any) -> None:
    like = put(np.ones(2, np.float32))
    check(get(xp.full((2, 3), 0.1, DTYPES["bfloat16"], like)), np.full((2, 3), 0.1), "bfloat16")
    assert_same_values(get(xp.full((), True, DTYPES["bool"], like)), True, because=EXACT)
    assert np.signbit(get(xp.full((1,), -0.0, DTYPES["float32"], like))).all()
    assert_same_values(get(xp.arange(5, DTYPES["int64"], like)), np.arange(5), because=EXACT)
    check(get(xp.arange(5, DTYPES["float16"], like)), np.arange(5), "float16")
    assert get(xp.arange(0, DTYPES["int32"], like)).shape == (0,)
    small = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert_same_values(get(xp.asarray(small.T, like)), small.T, because=EXACT)
    assert get(xp.asarray(np.ones((0, 2)), like)).shape == (0, 2)
    narrow = small.astype(DTYPES["bfloat16"].numpy())
    assert_same_values(get(xp.asarray(narrow, like)), narrow, because=EXACT)


def test_views_and_their_copies(put: Put, get: Any) -> None:
    host = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    x = put(host)
    turned = xp.permute_dims(x, (2, 0, -2))
    assert_same_values(get(turned), host.transpose(2, 0, 1), because=EXACT)
    some = xp.slice_axis(turned, 0, 1, 4, 2)
    wanted = host.transpose(2, 0, 1)[1:4:2]
    assert_same_values(get(some), wanted, because=EXACT)
    assert_same_values(get(xp.add(some, 1)), wanted + 1, because=EXACT)
    assert_same_values(get(xp.sum(some, 1)), wanted.sum(1), because=EXACT)
    assert_same_values(get(xp.reshape(some, (3, -1))), wanted.reshape(3, -1), because=EXACT)
    assert_same_values(get(xp.reshape(x, (6, 1, 4))), host.reshape(6, 1, 4), because=EXACT)
    assert_same_values(get(xp.reshape(x, (2, 12))), host.reshape(2, 12), because=EXACT)
    rows = xp.slice_axis(x, 1, 1, 3)
    four = host[:, 1:].reshape((2,) * 4)
    assert_same_values(get(xp.reshape(rows, (2, 2, 2, 2))), four, because=EXACT)
    wide = xp.broadcast_to(xp.slice_axis(x, 2, 0, 1), (5, 2, 3, 6))
    assert_same_values(get(wide), np.broadcast_to(host[..., :1], (5, 2, 3, 6)), because=EXACT)
    assert_same_values(get(xp.reshape(wide, (-1,))), get(wide).reshape(-1), because=EXACT)
    assert xp.reshape(x, (2, 3, 4)) is x
    assert get(xp.slice_axis(x, 0, 1, 1)).shape == (0, 3, 4)
    one = put(np.float32(2).reshape(()))
    assert get(xp.reshape(one, (1, 1))).tolist() == [[2]]
    assert get(xp.broadcast_to(one, (2,))).tolist() == [2, 2]


def test_views_of_pyopencl(put: Put, get: Any) -> None:
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = put(host)
    for view, wanted in [(x[1:, 2:4], host[1:, 2:4]), (x.T, host.T), (x[::-1], host[::-1])]:
        assert_same_values(get(xp.multiply(view, 2)), wanted * 2, because=EXACT)
        assert_same_values(get(xp.max(view, 0)), wanted.max(0), because=EXACT)
    assert_same_values(get(xp.matmul(x[1:], x.T[:, 2:])), host[1:] @ host.T[:, 2:], because=EXACT)


def test_shapes_that_do_not_fit_are_refused(put: Put) -> None:
    x, y = put(np.ones((2, 3), np.float32)), put(np.ones((2, 4), np.float32))
    square, whole = put(np.ones((1, 1, 2, 2), np.float32)), put(np.ones((1, 2), np.int32))
    for call, text in [
        (lambda: xp.reshape(x, (4, 2)), r"\(2, 3\) cannot be given the shape \(4, 2\)"),
        (lambda: xp.permute_dims(x, (0, 0)), r"\(0, 0\) is no order of the axes"),
        (lambda: xp.broadcast_to(x, (2, 4)), r"\(2, 3\) cannot be repeated to \(2, 4\)"),
        (lambda: xp.broadcast_to(x, (3,)), "cannot be repeated"),
        (lambda: xp.concat([x, y], 0), "cannot be joined at axis 0"),
        (lambda: xp.add(x, y), "shape"),
        (lambda: xp.sum(x, 2), "no axis 2 in an array of 2 axes"),
        (lambda: xp.sum(x, (0, -2)), "named twice"),
        (lambda: xp.max(xp.slice_axis(x, 0, 0, 0), 0), "max of no elements"),
        (lambda: xp.argmax(xp.slice_axis(x, 0, 0, 0), 0), "largest of no elements"),
        (lambda: xp.top_k(x, 4), "no 4 largest"),
        (lambda: xp.matmul(x, y), r"\(2, 3\) cannot be multiplied by a matrix \(2, 4\)"),
        (lambda: xp.take_along_axis(x, put(np.zeros(2, np.int32)), 0), "have not the axes"),
        (lambda: xp.write(square, square, whole), None),
        (lambda: xp.write(square, xp.slice_axis(square, 3, 0, 1), whole), "cannot be written into"),
    ]:
        if text is None:
            call()
            continue
        with pytest.raises(ValueError, match=text):
            call()


def test_what_opencl_does_not_compute_is_refused(put: Put) -> None:
    whole, real = put(np.ones((1, 1, 2, 2), np.int32)), put(np.ones((1, 1, 2, 2), np.float32))
    for call, text in [
        (lambda: xp.exp(whole), "OpenCL has no exp of int32; convert the array to float32"),
        (lambda: xp.divide(whole, 2), "has no divide of int32"),
        (lambda: xp.add(whole, real), "no add of int32 and float32; convert one"),
        (lambda: xp.sum(put(np.ones(2, np.complex64)), 0), "computes with no complex64"),
        (
            lambda: xp.slice_axis(xp.concat([put(np.ones(2, np.complex128))] * 2, 0), 0, 0, 1),
            "rearranges",
        ),
        (lambda: xp.take(real, real, 0), "float32 is no dtype for indices; convert"),
        (lambda: xp.write(real, whole, put(np.ones((1, 2), np.int32))), "cannot be written into"),
    ]:
        with pytest.raises(UnsupportedError, match=text) as caught:
            call()
        assert caught.value.absent is not None


def test_a_lack_of_float64_is_said(put: Put, get: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(np.arange(4.0))
    about = programs.limits(x.context)
    lacking = Absent("the device has no float64", "convert the array to float32", "no_dtype")
    poorer = programs.Limits(**{**vars(about), "no_doubles": lacking})
    monkeypatch.setattr(programs, "limits", lambda context: poorer)
    with pytest.raises(UnsupportedError, match="has no float64; convert the array to float32"):
        xp.add(x, x)
    assert_same_values(get(xp.concat([x, x], 0)), [0, 1, 2, 3, 0, 1, 2, 3], because=EXACT)


def test_a_driver_that_crashes_with_float64_is_not_given_any(engine: Engine, put: Put) -> None:
    native = engine.native(HERE)
    if (native.platform.name, native.driver_version) != (POCL, "3.0-rc2"):
        pytest.skip("another driver, which may compute in float64")
    x = put(np.ones((2, 3)))
    for compute in (ops.softmax, ops.exp, partial(ops.sum, axis=0), partial(ops.add, x)):
        with pytest.raises(UnsupportedError) as caught:
            compute(x)
        assert caught.value.code == "driver_defect"
        assert caught.value.reasons[0].fix == "use float32, or install a later release of PoCL"
    finding = discover()["opencl"]
    assert finding.devices[0].facts.details["double"] is False
    assert any("PoCL 3.0-rc2" in note for note in finding.notes)
    assert_same_values(engine.to_host(x), np.ones((2, 3)), because=EXACT)  # moving is no computing


@pytest.mark.parametrize(
    ("assumed", "name", "dtype", "axes"),
    [
        ("cpu", "sum", "float32", (0, 1, 2, -1, (0, 2), (0, 1, 2))),
        ("gpu", "sum", "float32", (0, 1, 2, -1, (0, 2), (0, 1, 2))),
        ("gpu", "min", "float32", (1,)),
        ("gpu", "max", "bfloat16", (2,)),
        ("groups of 1", "sum", "float32", (0, (0, 2))),
        ("groups of 16", "sum", "bfloat16", (1, (0, 2))),
        ("groups of 16", "max", "float32", (0, -1)),
    ],
    indirect=["assumed"],
)
def test_reductions(put: Put, get: Any, assumed: None, name: str, dtype: str, axes: Any) -> None:
    """Every route by `sum`: the other reductions take the same ones, and some dtypes a sample."""
    x = numbers((3, 70, 5), dtype)
    exact = x.astype(np.float64)
    for axis in axes:
        got = get(getattr(xp, name)(put(x), axis))
        check(got, getattr(exact, name)(axis), dtype, 30)
    got = get(getattr(xp, name)(put(x), axes[-1], keepdims=True))
    check(got, getattr(exact, name)(axes[-1], keepdims=True), dtype, 30)


@ON_CPU_AND_GPU
def test_long_sums_are_exact_enough(put: Put, get: Any, assumed: None) -> None:
    x = np.random.default_rng(0).random(300_001, dtype=np.float32)
    got = float(get(xp.sum(put(x), 0)))
    assert got == pytest.approx(x.astype(np.float64).sum(), rel=1e-6)
    rounded = x[:50_000].astype(DTYPES["bfloat16"].numpy())
    got = float(get(xp.sum(put(rounded), 0)))
    assert got == pytest.approx(rounded.astype(np.float64).sum(), rel=4e-3)
    at = np.full(40_000, -1, np.int32)
    at[33_333] = 7
    assert get(xp.max(put(at), 0)) == 7


def test_reductions_pass_on_what_is_not_a_number(put: Put, get: Any, assume: Assume) -> None:
    assume(is_cpu=False)
    x = np.zeros((2, 90), np.float32)
    x[0, 77] = np.nan
    for name in ("sum", "max", "min"):
        assert np.isnan(get(getattr(xp, name)(put(x), 1))).tolist() == [True, False]
    assert get(xp.argmax(put(x), 1))[0] == 77
    assert get(xp.top_k(put(x), 2)[1])[0].tolist() == [77, 0]


def test_nothing_is_reduced(put: Put, get: Any) -> None:
    none = put(np.ones((0, 3), np.float32))
    assert_same_values(get(xp.sum(none, 0)), [0, 0, 0], because=EXACT)
    assert get(xp.sum(none, 1)).shape == (0,)
    assert get(xp.max(none, 1)).shape == (0,)
    assert get(xp.argmax(none, 1)).shape == (0,)
    assert get(xp.add(none, 1)).shape == (0, 3)
    assert get(xp.reshape(none, (3, 0, 7))).shape == (3, 0, 7)
    assert_same_values(get(xp.sum(put(np.float32(3).reshape(())), ())), 3, because=EXACT)


@pytest.mark.parametrize(
    ("assumed", "dtype"),
    [
        ("cpu", "float32"),
        ("groups of 1", "int32"),
        ("groups of 16", "bfloat16"),
        ("gpu", "float32"),
    ],
    indirect=["assumed"],
)
def test_where_the_largest_are(put: Put, get: Any, assumed: None, dtype: str) -> None:
    x = numbers((4, 37, 3), dtype).round()
    for axis in (0, 1, 2):
        got = get(xp.argmax(put(x), axis))
        assert got.dtype == np.int32
        assert_same_values(got, x.astype(np.float64).argmax(axis), because=EXACT)
    for k in (0, 1, 5, 37):
        values, places = xp.top_k(put(x.transpose(0, 2, 1)), k)
        order = np.argsort(-x.astype(np.float64).transpose(0, 2, 1), -1, kind="stable")[..., :k]
        assert_same_values(get(places), order, because=EXACT)
        wanted = np.take_along_axis(x.transpose(0, 2, 1), order, -1)
        assert_same_values(get(values), wanted, because=EXACT)


SHAPES = [
    ((1, 70), (70, 33), False),
    ((33, 65), (65, 17), True),
    ((64, 32), (32, 128), False),
    ((1, 1), (1, 1), False),
    ((3, 16), (16, 64), True),
    ((2, 1, 20, 9), (3, 9, 40), False),
    ((4, 3, 9), (9, 21), True),
]
"""Two shapes, and whether the second matrix is a transposed view: few rows and tiles, both ways."""


@pytest.mark.parametrize(
    ("assumed", "dtype", "shapes"),
    [
        ("cpu", "float32", SHAPES),
        ("gpu", "float32", SHAPES),
        ("groups of 1", "float32", SHAPES[:2]),
        ("groups of 16", "float32", SHAPES[:3]),
        ("cpu", "int32", SHAPES[:2]),
        ("gpu", "bfloat16", SHAPES[1:2]),
        ("gpu", "float64", SHAPES[1:2]),
        ("gpu", "float32", [((300, 100), (100, 260), False)]),
    ],
    indirect=["assumed"],
)
def test_products(put: Put, get: Any, assumed: None, dtype: str, shapes: Any) -> None:
    for a, b, is_transposed in shapes:
        x, y = numbers(a, dtype), numbers(b, dtype, 1)
        wanted = x.astype(np.float64) @ y.astype(np.float64)
        if is_transposed:
            axes = (*range(y.ndim - 2), -1, -2)
            placed = xp.permute_dims(put(y.swapaxes(-1, -2)), axes)
        else:
            placed = put(y)
        check(get(xp.matmul(put(x), placed)), wanted, dtype, 100 if dtype == "float32" else 10)


@ON_CPU_AND_GPU
def test_products_of_views(put: Put, get: Any, assumed: None) -> None:
    host = numbers((40, 2, 24), "float32")
    x = put(host)
    for axes in ((1, 0, 2), (1, 2, 0)):
        a, one = xp.permute_dims(x, axes), host.transpose(axes)
        b, two = xp.permute_dims(a, (0, 2, 1)), one.transpose(0, 2, 1)
        check(get(xp.matmul(a, b)), one.astype(np.float64) @ two.astype(np.float64), "float32", 100)
    few = xp.slice_axis(xp.permute_dims(x, (1, 0, 2)), 1, 3, 20, 5)
    rest = xp.slice_axis(xp.permute_dims(x, (1, 2, 0)), 2, 0, 40, 3)
    wanted = host.transpose(1, 0, 2)[:, 3:20:5] @ host.transpose(1, 2, 0)[:, :, ::3]
    check(get(xp.matmul(few, rest)), wanted, "float32", 100)
    grouped = xp.reshape(xp.permute_dims(x, (1, 0, 2)), (2, 2, 1, 20, 24))
    other = numbers((2, 2, 3, 24, 11), "float32", 2)
    wanted = host.transpose(1, 0, 2).reshape(2, 2, 1, 20, 24) @ other
    check(get(xp.matmul(grouped, put(other))), wanted, "float32", 100)


def test_large_tiles(put: Put, get: Any, assume: Assume, monkeypatch: pytest.MonkeyPatch) -> None:
    assume(is_cpu=False)
    monkeypatch.setattr(programs, "kernel_in_one_size", lambda *_, **defines: None)
    x = numbers((20, 20), "float32")
    check(get(xp.matmul(put(x), put(x))), x.astype(np.float64) @ x, "float32", 100)


@pytest.mark.parametrize("dtype", ["int16", "complex64"])
def test_taking(put: Put, get: Any, dtype: str) -> None:
    x = np.arange(24).reshape(2, 3, 4).astype(DTYPES[dtype].numpy())
    places = np.array([[2, -1], [3, 0]], np.int64)
    inside = np.isin(places, [0, 1, 2, 3])
    got = get(xp.take(put(x), put(places), 2))
    wanted = x.take(np.clip(places, 0, 3), 2)
    assert_same_values(got[..., inside], wanted[..., inside], because=EXACT)
    none = got[..., ~inside].astype(np.complex64)
    assert (np.isnan(none) if dtype != "int16" else none == 0).all()
    turned = xp.permute_dims(put(x), (2, 1, 0))
    got = get(xp.take(turned, put(np.array([1, 0], np.uint8)), 1))
    assert_same_values(got, x.transpose(2, 1, 0)[:, [1, 0]], because=EXACT)
    assert_same_values(get(xp.take(put(x), put(np.array(1)), 0)), x[1], because=EXACT)


def test_writing(put: Put, get: Any) -> None:
    cache, new = numbers((2, 3, 5, 4), "bfloat16"), numbers((2, 3, 2, 4), "bfloat16", 1)
    positions = np.array([[4, 0], [9, 2]], np.int32)
    wanted = cache.copy()
    wanted[0, :, [4, 0]] = new[0].swapaxes(0, 1)
    wanted[1, :, 2] = new[1, :, 1]
    placed = put(cache)
    written = xp.write(placed, put(new), put(positions))
    assert written.base_data is placed.base_data
    assert_same_values(get(written), wanted, because=EXACT)
    whole = put(cache)
    part = xp.permute_dims(put(new.swapaxes(1, 2)), (0, 2, 1, 3))
    seen = xp.reshape(whole, (2, 3, 5, 4, 1))
    written = xp.write(xp.reshape(seen, (2, 3, 5, 4)), part, put(positions))
    assert_same_values(get(written), wanted, because=EXACT)
    assert_same_values(get(whole), cache, because=EXACT)
    none = xp.write(written, xp.slice_axis(part, 2, 0, 0), put(np.zeros((2, 0), np.int32)))
    assert_same_values(get(none), wanted, because=EXACT)


def test_joining(put: Put, get: Any) -> None:
    host = np.arange(12, dtype=np.int64).reshape(3, 4)
    x = put(host)
    got = get(xp.concat([x, xp.slice_axis(x, 0, 0, 0), xp.slice_axis(x, 0, 1, 3)], 0))
    assert_same_values(got, np.concatenate([host, host[1:]]), because=EXACT)
    got = get(xp.concat([xp.permute_dims(x, (1, 0)), xp.permute_dims(x, (1, 0))], -1))
    assert_same_values(got, np.concatenate([host.T, host.T], 1), because=EXACT)


def test_arrays_of_other_queues_and_contexts(put: Put, get: Any, engine: Engine) -> None:
    queue = cl.CommandQueue(put(np.ones(1)).context)
    x = cl.array.to_device(queue, np.arange(2**16, dtype=np.float32), async_=True) + 1
    assert_same_values(get(xp.add(x, 1)), np.arange(2, 2**16 + 2), because=EXACT)
    context = cl.Context([engine.native(HERE)])
    x = cl.array.to_device(cl.CommandQueue(context), np.arange(5, dtype=np.float32))
    total = xp.add(x, x)
    assert total.context == context
    assert_same_values(get(total), [0, 2, 4, 6, 8], because=EXACT)


def test_sizes_of_a_users_own_array_may_be_numbers_of_numpy(put: Put, get: Any) -> None:
    queue = cl.CommandQueue(put(np.ones(1)).context)
    x = cl.array.Array(queue, (np.int64(2), np.int32(3)), np.float32)
    x.set(host := np.arange(6, dtype=np.float32).reshape(2, 3))
    assert {type(size) for size in x.shape} == {np.int64, np.int32}
    for result, wanted in (
        (ops.sum(x, 0), host.sum(0)),
        (ops.linear(x, x), host @ host.T),
        (ops.reshape(x, (3, 2)), host.reshape(3, 2)),
        (ops.broadcast_to(x, (4, 2, 3)), np.broadcast_to(host, (4, 2, 3))),
        (ops.pad(x, 1), np.pad(host, 1)),
        (ops.stack([x, x], 1), np.stack([host, host], 1)),
        (ops.argmax(x), host.argmax(-1)),
    ):
        assert_same_values(get(result), wanted, because=EXACT)
    powers = np.exp(host - host.max(-1, keepdims=True))
    check(get(ops.softmax(x)), powers / powers.sum(-1, keepdims=True), "float32")


def test_threads_share_kernels(put: Put, get: Any) -> None:
    wrong: list[int] = []

    def work(own: int) -> None:
        x = put(np.full(1000, own, np.float32))
        for _ in range(100):
            total = get(xp.add(x, own))
            wrong.extend([own] if (total != 2 * own).any() else [])

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_used_again_and_given_back(put: Put) -> None:
    x = put(np.ones(2**20, np.float32))
    pool = buffers.pool(x.context)
    pool.release()
    before = pool.held
    for _ in range(5):
        xp.add(x, 1)
    held = pool.held
    assert held >= before + x.nbytes
    xp.add(x, 1)
    assert pool.held == held
    pool.release()
    assert pool.held == before


@ON_CPU_AND_GPU
def test_large_indices(put: Put, get: Any, assumed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "LARGEST_INDEX", 0)
    x = numbers((20, 24), "float32")
    placed = put(x)
    assert_same_values(get(xp.add(placed, xp.slice_axis(placed, 0, 3, 4))), x + x[3], because=EXACT)
    check(get(xp.sum(placed, 0)), x.astype(np.float64).sum(0), "float32", 10)
    assert_same_values(get(xp.argmax(placed, 0)), x.argmax(0), because=EXACT)
    assert_same_values(get(xp.top_k(placed, 1)[1])[:, 0], x.argmax(1), because=EXACT)
    product = xp.matmul(placed, xp.permute_dims(placed, (1, 0)))
    check(get(product), x.astype(np.float64) @ x.T, "float32", 100)


def test_large_groups(put: Put, get: Any, assume: Assume, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, refused = programs.exact_kernel, []

    def smaller(*given: Any) -> Any:
        if given[-1] > 8:
            refused.append(given[-1])
            return None
        return exact(*given)

    monkeypatch.setattr(programs, "exact_kernel", smaller)
    assume(work_group=64, is_cpu=False)
    x = numbers((4, 100), "float32")
    check(get(xp.sum(put(x), 1)), x.astype(np.float64).sum(1), "float32", 10)
    assert refused == [64, 32, 16]
    weight = put(np.ones(100, np.float32))
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True))
    check(get(KERNELS["rmsnorm"](put(x), weight, 0.0)), wanted, "float32", 10)


def test_programs_are_kept_for_later_processes(tmp_path) -> None:
    program = (
        "import time, numpy as np\n"
        "from anydevice._core.device import Device\n"
        "from anydevice._machine.engines import registry\n"
        "from anydevice._engines.opencl.primitives import PRIMITIVES as xp\n"
        "engine = registry.load('opencl')\n"
        "x = engine.place(np.ones((40, 40), np.float32), Device('opencl'))\n"
        "began = time.process_time()\n"
        "engine.to_host(xp.matmul(xp.tanh(x), xp.exp(x)))\n"
        "print(time.process_time() - began)\n"
    )
    environment = {"POCL_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    times = []
    # What pytools says where pyopencl is old.
    quiet = ("-W", "ignore:Overwriting existing generated code")
    for _ in range(2):
        said = run_python(*quiet, "-c", program, env=environment)
        assert (said.returncode, said.stderr) == (0, "")
        times.append(float(said.stdout))
    assert times[1] < 0.6 * times[0], times
