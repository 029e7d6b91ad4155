"""Products of matrices, convolutions and pools; images against torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from tests.comparing import COPIED, assert_same_values
from tests.refusals import refuses

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_products_of_narrow_numbers_are_rounded_once(dtype: Any) -> None:
    x, weight = RNG.normal(size=(4, 300)).astype(dtype), RNG.normal(size=(5, 300)).astype(dtype)
    bias = RNG.normal(size=5).astype(dtype)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    eps = float(ml_dtypes.finfo(dtype).eps)
    for result, wanted in (
        (ops.matmul(x, weight.T), exact),
        (ops.linear(x, weight), exact),
        (ops.linear(x, weight, bias), exact + bias.astype(np.float64)),
    ):
        assert result.dtype == dtype
        np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=0.51 * eps, atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2, 3), (0, 3), (4, 0, 3)], ids=str)
def test_linear(shape: tuple[int, ...]) -> None:
    x, weight, bias = RNG.normal(size=shape), RNG.normal(size=(5, 3)), RNG.normal(size=5)
    np.testing.assert_allclose(ops.linear(x, weight), x @ weight.T, rtol=1e-12)
    np.testing.assert_allclose(ops.linear(x, weight, bias), x @ weight.T + bias, rtol=1e-12)


def test_linear_of_no_inputs_is_the_bias() -> None:
    assert ops.linear(np.ones((2, 0)), np.ones((3, 0)), np.arange(3.0)).tolist() == [[0, 1, 2]] * 2


def test_integers_stay_whole() -> None:
    ones = np.ones((2, 2), np.int32)
    assert ops.matmul(ones, ones).dtype == np.int32
    assert ops.linear(ones, ones, ones[0]).dtype == np.int32
    assert ops.linear(ones, ones, ones[0]).tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
@pytest.mark.parametrize("padding", [0, 1, (0, 2)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 4)])
def test_conv2d_is_that_of_torch(kernel: Any, stride: Any, padding: Any) -> None:
    import torch

    x, weight = RNG.normal(size=(2, 3, 8, 9)), RNG.normal(size=(4, 3, *kernel))
    bias = RNG.normal(size=4)
    for given in (None, bias):
        expected = torch.nn.functional.conv2d(
            torch.from_numpy(x),
            torch.from_numpy(weight),
            None if given is None else torch.from_numpy(given),
            stride,
            padding,
        )
        result = ops.conv2d(x, weight, given, stride, padding)
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stride", [None, 1, 3, (1, 2)])
@pytest.mark.parametrize("size", [1, 2, (3, 2), (8, 9)])
def test_pools_are_those_of_torch(size: Any, stride: Any) -> None:
    import torch

    x = RNG.normal(size=(2, 3, 8, 9))
    x[0, 0, 2, 2] = np.nan
    given = torch.from_numpy(x)
    largest = torch.nn.functional.max_pool2d(given, size, stride).numpy()
    means = torch.nn.functional.avg_pool2d(given, size, stride).numpy()
    assert_same_values(ops.max_pool2d(x, size, stride), largest, because=COPIED)
    np.testing.assert_allclose(ops.avg_pool2d(x, size, stride), means, rtol=1e-12)


def test_images_of_narrow_numbers_and_of_none() -> None:
    x = np.full((1, 1, 2, 2), 60000, np.float16)
    assert ops.avg_pool2d(x, 2).tolist() == [[[[60000]]]]
    bias = np.array([-60000], np.float16)
    product = ops.conv2d(x, np.ones((1, 1, 1, 2), np.float16), bias)
    assert product.tolist() == [[[[60000], [60000]]]]  # more than its type holds, in between
    assert ops.conv2d(np.ones((0, 3, 4, 4)), np.ones((2, 3, 3, 3))).shape == (0, 2, 2, 2)
    assert ops.max_pool2d(np.arange(4).reshape(1, 1, 2, 2), 2).tolist() == [[[[3]]]]


IMAGE = np.ones((2, 3, 4, 5))
FILTERS = np.ones((6, 3, 3, 3))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "columns": (
        lambda: ops.matmul(np.ones((2, 3)), np.ones((2, 3))),
        r"as many columns as b has rows, but a is \(2, 3\), b is \(2, 3\)",
    ),
    "vector": (lambda: ops.matmul(np.ones(3), np.ones((3, 2))), "both must have rows and columns"),
    "batches": (lambda: ops.matmul(np.ones((2, 2, 2)), np.ones((3, 2, 2))), "before the last two"),
    "types": (
        lambda: ops.matmul(np.ones((2, 2)), np.ones((2, 2), np.float32)),
        "a is float64, b is float32",
    ),
    "inputs": (lambda: ops.linear(np.ones((2, 3)), np.ones((3, 4))), r"weight must be \(out, in\)"),
    "scalar": (lambda: ops.linear(np.array(1.0), np.ones((3, 1))), r"x is \(\)"),
    "bias": (
        lambda: ops.linear(np.ones((2, 3)), np.ones((4, 3)), np.ones(3)),
        r"bias must be \(out,\), but weight is \(4, 3\), bias is \(3,\)",
    ),
    "weight": (lambda: ops.linear(np.ones(3), np.ones((4, 3), "f")), "weight is float32"),
    "narrow bias": (
        lambda: ops.linear(np.ones(3), np.ones((4, 3)), np.ones(4, np.float16)),
        "bias is float16",
    ),
    "channels": (lambda: ops.conv2d(IMAGE, np.ones((6, 2, 3, 3))), r"weight is \(6, 2, 3, 3\)"),
    "axes": (lambda: ops.conv2d(IMAGE[0], FILTERS), r"x is \(3, 4, 5\)"),
    "filters": (lambda: ops.conv2d(IMAGE, FILTERS, np.ones(3)), r"bias must be \(filters,\)"),
    "three": (lambda: ops.max_pool2d(IMAGE, (1, 2, 3)), "size must be an integer"),  # type: ignore[arg-type]
    "whole": (lambda: ops.avg_pool2d(IMAGE.astype(int), 2), "floating-point numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str) -> None:
    call, said = WRONG[name]
    refuses(said, call)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij,jk", [(3, 4), (4, 5)]),
        ("ab,ba->", [(3, 4), (4, 3)]),
        ("...ij,kj->k...i", [(2, 3, 4, 5), (6, 5)]),
        ("i...,i...->...", [(3, 4, 1), (3, 1, 5)]),
        ("iijj->ij", [(3, 3, 4, 4)]),
        ("iii", [(4, 4, 4)]),
        ("a,b,c,abc->", [(2,), (3,), (4,), (2, 3, 4)]),
        ("bhqd,bhkd,bhkv->bhqv", [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)]),
        (",->", [(), ()]),
        ("...,...", [(3,), (3,)]),
    ],
)
def test_sums_by_names_are_those_of_numpy(subscripts: str, shapes: Any) -> None:
    draw = np.random.default_rng(0)
    for arrays in (
        [draw.normal(size=shape) for shape in shapes],
        [draw.integers(-9, 9, shape) for shape in shapes],
    ):
        expected = np.einsum(subscripts, *arrays)
        result = ops.einsum(subscripts, *arrays)
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
        assert result.dtype == arrays[0].dtype


def test_a_sum_by_names_rounds_once() -> None:
    ones, small = np.ones((2, 4096), np.float16), np.full((4096, 4096), 0.25, np.float16)
    assert ops.einsum("ij,jk->i", ones, small[:, :3]).tolist() == [3072, 3072]


def test_names_that_do_not_fit() -> None:
    x = np.ones((2, 3))
    for given, words in [
        (("ij,jk", x), "'ij,jk' is for 2 arrays, not 1"),
        (("ijk", x), r"'ijk' must have a letter for each axis, but x is \(2, 3\)"),
        (("i1", x), "axes must be letters, or '...' once, not 'i1'"),
        (("......", x), "axes must be letters, or '...' once"),
        (("ij->ik", x), "only axes of the arrays, but it is 'ik' in 'ij->ik'"),
        (("ij->ii", x), "the result must have each axis once"),
        (("ii", x), "axis 'i' of 'ii' has two sizes: 2 and 3"),
        (("...,...", x, np.ones((2, 2))), "an axis of '...' of '...,...' has two sizes: 3 and 2"),
        (("ij,j", x, np.ones(3, np.float32)), "array 0 is float64, array 1 is float32"),
        ((x, "ij"), "subscripts must be a string, not a numpy.ndarray"),
        (("ij",), "there are no arrays for 'ij'"),
        (("ij", x > 0), "einsum: this is an array of bool"),
    ]:
        refuses(words, ops.einsum, *given)
    refuses(r"outer: both must be vectors, but a is \(2, 3\)", ops.outer, x, x)


def test_transposed_convolutions_that_do_not_fit() -> None:
    x, weight = np.ones((1, 2, 3, 3)), np.ones((2, 4, 2, 2))
    for given, words in [
        ((x, np.ones((3, 4, 2, 2))), r"weight \(channels, filters, height, width\), but x is"),
        (
            (x, weight, np.ones(2)),
            r"bias must be \(filters,\), but weight is \(2, 4, 2, 2\), bias is",
        ),
        ((x, weight, None, 2, 0, 2), r"output_padding must be smaller than the stride of \(2, 2\)"),
        ((x, weight, None, 1, 2), r"something must be left after a padding of \(2, 2\)"),
        ((x[:, :, :0], weight), "something must be left"),
    ]:
        refuses(words, ops.conv_transpose2d, *given)
