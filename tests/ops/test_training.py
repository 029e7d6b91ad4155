"""Steps of optimizers: their dtypes, edges and refusals. Their results are cases of the table."""

from __future__ import annotations

import math
from copy import deepcopy
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from tests.comparing import COPIED, assert_same_values, rounding
from tests.refusals import refuses

Array = np.ndarray[Any, Any]


def test_an_array_that_counts_loses_no_digits_in_float32() -> None:
    one, zero = [np.ones(1, np.float32)], [np.zeros(1, np.float32)]
    for step in (1, 2, 1000, 100_000):
        by_number = ops.update_adam(zero, one, zero, zero, step, rate=1.0)[0][0]
        by_array = ops.update_adam(zero, one, zero, zero, np.array(step), rate=1.0)[0][0]
        np.testing.assert_allclose(by_array, by_number, rtol=rounding(np.float32, 10))
    forgetful = ops.update_adam(zero, one, zero, zero, np.array(3), rate=1.0, beta1=0.0)
    assert forgetful[0][0] == pytest.approx(
        -math.sqrt((1 - 0.999**3) / 0.001), rel=rounding(np.float32, 10)
    )


def test_each_result_has_the_type_of_what_it_replaces() -> None:
    half = [np.ones(3, ml_dtypes.bfloat16)]
    full = [np.zeros(3, np.float32)]
    parameters, means, squares = ops.update_adam(half, half, full, full, 1, rate=1e-3)
    kinds = [arrays[0].dtype for arrays in (parameters, means, squares)]
    assert kinds == [ml_dtypes.bfloat16, np.float32, np.float32]
    parameters, kept = ops.update_sgd(half, full, full, rate=np.array(0.5), momentum=0.5)
    assert kept is not None
    assert (parameters[0].dtype, kept[0].dtype) == (ml_dtypes.bfloat16, np.float32)
    parameters, means = ops.update_lion(half, half, full, rate=np.array(0.25), decay=0.5)
    assert parameters[0].astype(float).tolist() == [0.625] * 3
    two, state = [*half, np.ones(2)], [*full, np.zeros(2)]
    mixed = ops.update_adam(two, two, state, state, 1, rate=0.1)
    assert [each.dtype for each in mixed[0]] == [ml_dtypes.bfloat16, np.float64]


def test_nothing_given_is_changed() -> None:
    draw = np.random.default_rng(0)
    lists = [[draw.random((3, 4)), draw.random(5)] for _ in range(4)]
    before = deepcopy(lists)
    ops.update_adam(*lists, 1, rate=0.1, decay=0.1)
    ops.update_sgd(*lists[:3], rate=0.1, momentum=0.9)
    ops.update_lion(*lists[:3], rate=0.1)
    for old, new in zip(chain(*before), chain(*lists), strict=True):
        assert_same_values(new, old, because=COPIED)


def test_no_parameters() -> None:
    assert ops.update_sgd([], [], None, rate=0.1) == ([], None)
    assert ops.update_sgd([], [], [], rate=0.1) == ([], [])
    assert ops.update_adam([], [], [], [], 1, rate=0.1) == ([], [], [])
    assert ops.update_lion([], [], [], rate=0.1) == ([], [])


def test_what_does_not_fit_is_named() -> None:
    one, two = [np.ones(2)], [np.ones(2), np.ones(3)]
    said = "momentum needs velocities; start with zeros"
    refuses(said, ops.update_sgd, one, one, None, rate=0.1, momentum=0.9)
    refuses("1 parameters and 2 gradients", ops.update_sgd, one, two, None, rate=0.1)
    said = r"means\[0\] must have the shape .*it is \(3,\)"
    refuses(said, ops.update_lion, one, one, two[1:], rate=0.1)
    refuses("of type NoneType", ops.update_adam, one, [None], one, one, 1, rate=0.1)
