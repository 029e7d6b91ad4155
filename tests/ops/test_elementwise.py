"""Ops on single elements: their results, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from tests.comparing import EXACT, assert_same_values
from tests.refusals import refuses

Array = np.ndarray[Any, Any]
TWO = ["add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "equal", "less"]
TWO += ["less_equal"]
FLOATING_ONLY = ["exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "isnan"]


@pytest.mark.parametrize("name", TWO)
def test_two_arrays_must_fit(name: str) -> None:
    op = getattr(ops, name)
    refuses(rf"^{name}: .*a is \(2, 3\), b is \(2,\)", op, np.ones((2, 3)), np.ones(2))
    refuses(
        f"^{name}: .*a is float64, b is float32; use ast", op, np.ones(2), np.ones(2, np.float32)
    )
    refuses("of type list", op, np.ones(2), [1, 2])


def test_a_number_takes_over_the_type() -> None:
    half = np.ones(2, ml_dtypes.bfloat16)
    assert ops.add(half, 0.5).dtype == half.dtype
    assert ops.multiply(np.ones(2, np.int8), 2).dtype == np.int8
    refuses(r"add: 0\.5 is not an integer, and a is int64", ops.add, np.arange(3), 0.5)


def test_arrays_of_two_libraries_are_told_apart() -> None:
    import torch

    said = "^add: a is an array of NumPy and b one of PyT"
    refuses(said, ops.add, np.ones(2, np.float32), torch.ones(2))
    said, one = "^where: condition is an array of NumPy and a ", torch.ones(1)
    refuses(said, ops.where, np.array([True]), one, one)


@pytest.mark.parametrize("name", FLOATING_ONLY)
def test_integers_are_refused_where_the_result_would_not_be_whole(name: str) -> None:
    refuses(f"^{name}: this is an array of int64.*astype", getattr(ops, name), np.arange(3))
    refuses(r"^divide: ", ops.divide, np.arange(3), np.arange(3))


@pytest.mark.parametrize("name", ["negative", "abs", "sign", "floor", "relu"])
def test_integers_stay_whole(name: str) -> None:
    result = getattr(ops, name)(np.array([-2, 0, 3], np.int32))
    assert result.dtype == np.int32


def test_booleans() -> None:
    a, b = np.array([True, True, False]), np.array([True, False, False])
    assert ops.logical_and(a, b).tolist() == [True, False, False]
    assert ops.logical_or(a, b).tolist() == [True, True, False]
    assert ops.logical_not(a).tolist() == [False, False, True]
    for op in (ops.logical_and, ops.logical_or):
        refuses("booleans", op, np.ones(2), np.ones(2))
    refuses("booleans", ops.logical_not, np.ones(2))


def test_where() -> None:
    condition = np.array([[True], [False]])
    a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    assert ops.where(condition, a, b).tolist() == [[1, 2], [3, 4]]
    assert ops.where(condition, a, 0).tolist() == [[1, 2], [0, 0]]
    assert ops.where(condition, 0, b).tolist() == [[0, 0], [3, 4]]
    refuses("1 and 2 are both numbers", ops.where, condition, 1, 2)
    refuses(r"condition is \(3,\), a is \(2,\)", ops.where, np.array([True] * 3), a, b)
    refuses("booleans", ops.where, a, a, b)
    refuses("not an integer", ops.where, condition, np.arange(2), 0.5)


@pytest.mark.parametrize("name", TWO)
def test_two_numbers_are_refused(name: str) -> None:
    refuses(f"^{name}: 1 and 2.0 are both numbers; one of", getattr(ops, name), 1, np.float64(2))


def test_what_numpy_has_for_no_number_of_ours_is_refused() -> None:
    for odd in (np.datetime64("2020-01-01"), np.str_("text"), np.longdouble(1)):
        refuses(
            r"^add: b is not an array, but of type numpy\.", ops.add, np.ones(2, np.float32), odd
        )


@pytest.mark.parametrize("first", [2.0, 3])
def test_the_compiler_of_torch_looks_through_a_number_that_comes_first(first: float) -> None:
    import torch

    compiled = torch.compile(lambda x: ops.subtract(first, x), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [first - 1] * 2


pytestmark = pytest.mark.usefixtures("either_version")


def test_what_does_not_fit_is_named() -> None:
    refuses(r"gate is \(2, 3\), up is \(3,\)", ops.swiglu, np.ones((2, 3)), np.ones(3))
    refuses("same dtype", ops.swiglu, np.ones(3), np.ones(3, np.float32))
    for op in (ops.silu, ops.gelu):
        refuses("floating-point numbers", op, np.arange(3))


def test_rounding_is_to_even_on_either_way(either_version: None) -> None:
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.4999, 1e30, -np.inf], np.float32)
    assert ops.round(halves).tolist()[:6] == [-2, -2, 0, 0, 2, 2]
    assert_same_values(ops.round(halves), np.rint(halves), because=EXACT)
    whole = np.array([2**53 + 1], np.int64)
    assert ops.round(whole) is whole


def test_limits() -> None:
    x = np.array([-2, 0, 5], np.int32)
    assert ops.clip(x) is x
    assert ops.clip(x, np.int64(-1), np.array([3, 3, 3], np.int32)).tolist() == [-1, 0, 3]
    assert ops.clip(x, max=1).tolist() == [-2, 0, 1]
    for limits, words in [
        ({"min": 0.5}, r"clip: 0.5 is not an integer, and x is int32; use astype\(x, 'float32'\)"),
        (
            {"max": np.ones(3)},
            "clip: arrays must have the same dtype, but x is int32, max is float64",
        ),
        (
            {"min": np.ones(2, np.int32)},
            r"the shapes of x and min must broadcast, but x is \(3,\), min",
        ),
        ({"min": "low"}, "clip: min is not an array, but of type str"),
    ]:
        refuses(words, ops.clip, x, **limits)
    refuses("clip: this is an array of bool", ops.clip, np.array([True]), 0, 1)


def test_a_slope_is_a_number() -> None:
    for slope in (math.nan, "steep", True, np.ones(2)):
        refuses("leaky_relu: slope must be a finite number", ops.leaky_relu, np.ones(2), slope)
