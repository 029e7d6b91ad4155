"""Products of matrices, convolutions and pools; images against torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from tests.refusals import refuses


def test_linear_of_no_inputs_is_the_bias() -> None:
    assert ops.linear(np.ones((2, 0)), np.ones((3, 0)), np.arange(3.0)).tolist() == [[0, 1, 2]] * 2


def test_integers_stay_whole() -> None:
    ones = np.ones((2, 2), np.int32)
    assert ops.matmul(ones, ones).dtype == np.int32
    assert ops.linear(ones, ones, ones[0]).dtype == np.int32
    assert ops.linear(ones, ones, ones[0]).tolist() == [[3, 3], [3, 3]]


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
