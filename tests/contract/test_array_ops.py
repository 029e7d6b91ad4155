"""The ops for library authors: one meaning on every engine."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import ops, to_numpy
from anydevice._check import checks as trials
from anydevice._check.cases.case import LARGE
from anydevice._check.cases.table import TABLE
from anydevice._core.primitives import PrimitivesOf
from anydevice._engines import trust
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, EXACT, assert_same_integers, assert_same_values

from .home import Home
from .test_ops import CASES

ONE_DEVICE = True  # see conftest.py
PAGE = Path(__file__).parents[2] / "docs" / "computing.md"
ELSEWHERE = {case[0] for case in CASES.values()} | {*vars(PrimitivesOf)} - {"full", "arange"}
"""The ops of `test_ops.py` and `test_primitives.py`; two more take more here than as primitives."""


@pytest.mark.parametrize("op", [op for op in TABLE if op not in ELSEWHERE])
def test_it_is_what_the_reference_says(at: Home, op: str) -> None:
    """A few cases: all of them, in every dtype, are the work of `anydevice verify`."""
    row, wrong, done = TABLE[op], [], 0
    with trust.trial([]):
        for dtype in (first := row.dtypes[0], row.dtypes[-1]):
            cases = [case for case in row.cases_for(dtype) if case.dtypes != LARGE]
            for case in (cases[0], *cases[1:][-1:]) if dtype == first else cases[:1]:
                try:
                    found = trials.run(trials.prepare(row, case, dtype), at.engine, at.device)
                except UnsupportedError:
                    continue
                done += 1
                wrong += [] if found is None else [f"{dtype}, {case.name}: {found}"]
    assert not wrong, "\n".join(wrong)
    assert done


def kmeans() -> Any:
    """The function that the page shows."""
    (block,) = re.findall(r"^def kmeans.*?\n\n\n", PAGE.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {"ops": ops}
    exec(block, names)
    assert len(block.strip().splitlines()) == 6, "a line that names it, and five"
    return names["kmeans"]


def test_k_means(at: Home) -> None:
    draw = np.random.default_rng(5)
    middles = np.array([[0.0, 0.0, 0.0], [4.0, 0.0, 1.0], [0.0, 5.0, -3.0]])
    points = np.concatenate([draw.normal(middle, 0.3, (40, 3)) for middle in middles])
    x = at.put(points, "float32")
    found = at.get(kmeans()(x, ops.slice_axis(x, 0, 0, 120, 40)))
    np.testing.assert_allclose(found, points.reshape(3, 40, 3).mean(1), rtol=1e-4, atol=1e-4)
    assert found.dtype == np.float32


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_of_all_kinds(at: Home, dtype: str) -> None:
    facts = np.iinfo(dtype)
    x = np.array([[3, facts.max, facts.min, 3], [7, 7, facts.max, 0]], dtype)
    there = at.put(x, dtype)
    for descending in (False, True):
        order = np.argsort(-x.astype(object) if descending else x, -1, kind="stable")
        assert_same_integers(at.get(ops.argsort(there, -1, descending)), order)
        ordered = at.get(ops.sort(there, -1, descending))
        assert_same_integers(ordered, np.take_along_axis(x, order, -1))
        assert ordered.dtype == dtype
    assert_same_integers(at.get(ops.argmin(there)), np.argmin(x, -1))
    assert_same_integers(at.get(ops.any(there, 0)), (x != 0).any(0))
    assert_same_integers(at.get(ops.all(there, 0)), (x != 0).all(0))
    small = at.put([[1, 2, 3], [2, 0, 5]], dtype)
    for name, want in [("prod", [6, 0]), ("cumulative_sum", [[1, 3, 6], [2, 2, 7]])]:
        result = at.get(getattr(ops, name)(small, axis=1))
        assert (result.tolist(), result.dtype) == (want, dtype)
    assert at.get(ops.clip(small, 1, 2)).tolist() == [[1, 2, 2], [2, 1, 2]]
    assert at.get(ops.round(small)).tolist() == [[1, 2, 3], [2, 0, 5]]
    assert at.get(ops.isfinite(small)).all()
    assert at.get(ops.flip(small, 1)).tolist() == [[3, 2, 1], [5, 0, 2]]
    assert at.get(ops.einsum("ij->j", small)).tolist() == [3, 2, 8]
    assert at.get(ops.arange(7, 1, -3, like=there)).tolist() == [7, 4]
    assert at.get(ops.one_hot(small, 300))[0].argmax(-1).tolist() == [1, 2, 3]


def test_booleans(at: Home) -> None:
    x = at.put([[True, False, True], [False, False, True]], "bool")
    assert at.get(ops.sort(x, 1)).tolist() == [[False, True, True], [False, False, True]]
    assert at.get(ops.argsort(x, 1, descending=True)).tolist() == [[0, 2, 1], [2, 0, 1]]
    assert at.get(ops.argmin(x, 1)).tolist() == [1, 0]
    for name, want in [("prod", [0, 0]), ("cumulative_sum", [[1, 1, 2], [0, 0, 1]])]:
        result = at.get(getattr(ops, name)(x, axis=1))
        assert (result.tolist(), result.dtype) == (want, np.int32)
    assert at.get(ops.ones_like(x)).all()
    assert at.get(ops.eye(2, like=x)).tolist() == [[True, False], [False, True]]
    assert at.get(ops.pad(x, [(0, 0), (1, 0)], True))[:, 0].all()


def test_the_smaller_of_zeros_of_both_signs_is_neither(at: Home) -> None:
    """Stable: they are equal, so that they stay in their order."""
    x = at.put([0.0, -0.0, -1.0, 0.0, -0.0], "float32")
    assert at.get(ops.argsort(x)).tolist() == [2, 0, 1, 3, 4]
    assert at.get(ops.argsort(x, descending=True)).tolist() == [0, 1, 3, 4, 2]
    signs = np.signbit(at.get(ops.sort(x))).tolist()
    assert signs == [True, False, True, False, True]


def test_new_arrays_are_where_the_other_is(at: Home) -> None:
    x = at.put([1.5, 2.5], "float32")
    for made in (
        ops.zeros((2, 2), like=x),
        ops.full(3, 0.5, like=x, dtype="float16"),
        ops.arange(0.5, 2.0, 0.25, like=x),
        ops.eye(3, like=x),
        ops.full_like(x, math.nan),
    ):
        assert at.device in at.engine.devices_of(made)
    assert at.get(ops.full(3, 0.5, like=x, dtype="float16")).dtype == np.float16
    assert at.get(ops.arange(0.5, 2.0, 0.25, like=x)).tolist() == [0.5, 0.75, 1, 1.25, 1.5, 1.75]


def test_the_norm_of_nothing_has_a_slope(at: Home) -> None:
    autodiff: Any = at.engine.autodiff
    if not hasattr(autodiff, "value_and_grad"):
        pytest.skip(str(autodiff))
    x = at.put([[0.0, 0.0], [3.0, 4.0]], "float32")
    _, slope = autodiff.value_and_grad(lambda y: ops.sum(ops.vector_norm(y, 1)))(x)
    np.testing.assert_allclose(to_numpy(slope), [[0, 0], [0.6, 0.8]], rtol=1e-6)


INF, NAN = math.inf, math.nan
DIVISIONS = [
    *((6.0, 0.1, 59.0, 6.0 % 0.1), (-7.0, 2.0, -4.0, 1.0), (7.0, -2.0, -4.0, -1.0)),
    *((1.0, INF, 0.0, 1.0), (-1.0, INF, -1.0, INF), (1.0, -INF, -1.0, -INF), (0.0, 2.0, 0.0, 0.0)),
    *((INF, 2.0, INF, NAN), (INF, -2.0, -INF, NAN), (-INF, INF, NAN, NAN), (0.0, 0.0, NAN, NAN)),
    *((3.0, 0.0, INF, NAN), (-3.0, 0.0, -INF, NAN), (-1e-20, 1.0, -1.0, 1.0), (NAN, 1.0, NAN, NAN)),
]
"""Dividends, divisors, and what the standard says of `floor_divide` and `remainder`."""


def test_division_of_special_numbers_is_that_of_the_standard(at: Home) -> None:
    a, b, whole, rest = np.array(DIVISIONS, np.float32).T
    there = at.put(a, "float32"), at.put(b, "float32")
    assert_same_values(at.get(ops.floor_divide(*there)), whole, because=EXACT)
    np.testing.assert_allclose(at.get(ops.remainder(*there)), rest, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_no_integer_divisor_or_shift_ends_the_process(at: Home, dtype: str) -> None:
    """By 0, and the least integer by -1, stop a program in C; shifts by too much are open there."""
    facts = np.iinfo(dtype)
    a = np.array([7, 100, facts.min, facts.min, facts.max, 5], dtype)
    b = np.array([2, 0, 0, -1 if facts.min else 3, 7, 7], np.int64).astype(dtype)
    x, y = at.put(a, dtype), at.put(b, dtype)
    quotients = [int(m) // int(n) if n else 0 for m, n in zip(a, b, strict=True)]
    rests = [int(m) % int(n) if n else 0 for m, n in zip(a, b, strict=True)]
    wrapped = np.array(quotients, np.int64).astype(dtype)
    for result, want in ((ops.floor_divide(x, y), wrapped), (ops.remainder(x, y), rests)):
        assert (at.get(result).tolist(), at.get(result).dtype) == ([*map(int, want)], dtype)
    for op in (ops.floor_divide, ops.remainder):
        assert at.get(op(x, 0)).tolist() == [0] * 6
    bits = facts.bits
    far = at.put(np.array([0, 1, bits - 1, bits, 100, 100], dtype), dtype)
    left = [int(m) << int(n) if n < bits else 0 for m, n in zip(a, at.get(far), strict=True)]
    shifted = at.get(ops.bitwise_left_shift(x, far))
    assert_same_integers(shifted, np.array([n % 2**bits for n in left], np.uint64).astype(dtype))
    right = [int(m) >> min(int(n), 63) for m, n in zip(a, at.get(far), strict=True)]
    assert at.get(ops.bitwise_right_shift(x, far)).tolist() == right
    assert_same_integers(at.get(ops.bitwise_invert(x)), ~a)
    assert at.get(ops.ceil(x)).dtype == at.get(ops.trunc(x)).dtype == dtype


def test_small_numbers_keep_their_digits(at: Home) -> None:
    x = at.put([1e-12, -1e-12, 3e-8], "float32")
    for op in (ops.log1p, ops.expm1, ops.asinh, ops.sinh, ops.atan, ops.tan):
        np.testing.assert_allclose(at.get(op(x)), [1e-12, -1e-12, 3e-8], rtol=1e-6)


def test_sizes_that_depend_on_numbers(at: Home) -> None:
    x = at.put([[3.0, 0.0, NAN], [3.0, -0.0, NAN]], "float32")
    assert [at.get(one).tolist() for one in ops.nonzero(x)] == [[0, 0, 1, 1], [0, 2, 0, 2]]
    assert_same_values(at.get(ops.unique_values(x)), [0, 3, NAN, NAN], because=COPIED)
