"""Cases of the ops that work along axes: reductions, their indices and their order."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._check import budgets
from anydevice._check.cases.case import (
    EVERYTHING,
    FLOATS,
    INTEGERS,
    LARGE,
    NUMBERS,
    Call,
    Case,
    Draw,
    Make,
    Row,
    call,
    condition,
    index,
    planted,
    same,
)
from anydevice._check.cases.layers import HIDDEN, VOCABULARY
from anydevice._core.record import replace


def along(*shape: int, kind: str = "normal", **options: Any) -> Make:
    return lambda draw: call(getattr(draw, kind)(*shape), **options)


_ROWS_TIMED: dict[str, Any] = {
    "gpu": {"16,384 rows of 4096": along(16384, HIDDEN, axis=-1)},
    "cpu": {"1,024 rows of 4096": along(1024, HIDDEN, axis=-1)},
}
_LONG_ROWS = {"16 rows of 32000": along(16, VOCABULARY)}
_WORDS_TIMED: dict[str, Any] = {"gpu": _LONG_ROWS, "cpu": _LONG_ROWS}

_WITH_NAN = planted((4, 7), {(0, 3): np.nan, (1, 0): np.inf, (2, 6): -np.inf}, axis=-1)
_ENDING_WITH_NAN = planted((3, 100003), {(0, -1): np.nan, (1, -1): np.inf}, axis=-1)


def _of_one_sign(draw: Draw) -> Call:
    """Draw rows in which 0 would be the largest, or the smallest."""
    x = draw.positive(2, 77)
    x[0] *= -1
    return call(x, axis=-1)


def _infinite(draw: Draw) -> Call:
    return call(draw.listed([[-np.inf] * 3, [np.inf] * 3, [-np.inf, 1.0, 2.0]]), axis=-1)


def _ending_most(*shape: int) -> Make:
    """Put the largest element at the end of the first row, the smallest at the end of others."""

    def make(draw: Draw) -> Call:
        x = draw.heavy(*shape)
        x[1:, -1] *= -1
        return call(x, axis=-1)

    return make


_REDUCED = (
    Case("rows of 4096", along(3, HIDDEN, axis=-1)),
    Case("all", along(5, 7, 9)),
    Case("no rows", along(0, 7, axis=1)),
    Case("a middle axis from behind", along(3, 5, 7, axis=-2)),
    Case("very long", along(1000003, axis=0), FLOATS),
    Case("nan and infinities", _WITH_NAN, FLOATS),
    Case("of one sign", _of_one_sign),
    Case("infinities alone", _infinite, FLOATS),
    Case("the end of a million", _ending_most(2, 1000003), LARGE),
    Case("nan at the end", _ENDING_WITH_NAN, LARGE),
    Case("a million in all", along(1031, 1033, kind="heavy"), LARGE),
    Case("many rows", along(70001, 17, axis=-1), LARGE),
    Case("many columns", along(17, 70001, axis=0), LARGE),
    Case("long columns", along(70001, 17, axis=0, kind="positive"), LARGE),
)
_ADDED = (
    *_REDUCED,
    Case("a million that grow", along(1000003, axis=0, kind="positive"), FLOATS),
    Case("sixteen million that grow", along(2**24 + 43, kind="positive"), LARGE),
    Case("sums that grow", along(2, 5003, axis=-1, kind="positive"), FLOATS),
    Case("the last counts most", along(3, 1001, axis=-1, kind="heavy"), FLOATS),
    Case("large", along(3, 33, axis=-1, kind="large"), FLOATS),
)


_COMPARED = (
    *_REDUCED,
    Case("all digits", lambda draw: call(_of_near_ones(draw).arguments[0], axis=-1), INTEGERS),
)


def _near_one(*shape: int, **options: Any) -> Make:
    def make(draw: Draw) -> Call:
        if draw.dtype.kind == "int":
            return call(draw.integers(-2, 3, *shape), **options)
        return call(draw.uniform(0.9, 1.1, *shape), **options)

    return make


_MULTIPLIED = (
    Case("rows of 17", _near_one(65, 17, axis=-1)),
    Case("long rows", _near_one(2, 1031, axis=-1), FLOATS),
    Case("of nothing", _near_one(3, 0, axis=1)),
    Case("many rows", _near_one(70001, 5, axis=-1), LARGE),
    Case("long columns", _near_one(2053, 5, axis=0), LARGE),
    Case("nan and infinities", _WITH_NAN, FLOATS),
)


def _mostly(true: bool, *shape: int, rare: float = 0.05, **options: Any) -> Make:
    """Draw rows in which nearly all elements are zero, or nearly none."""

    def make(draw: Draw) -> Call:
        x = draw.normal(*shape)
        filled = np.where(x == 0, x.dtype.type(1), x)
        few = draw.chance(*shape, of=rare)
        return call(np.where(few ^ true, filled, filled * 0).astype(x.dtype), **options)

    return make


def _truth(op: str, true: bool) -> Row:
    return Row(
        op,
        (
            Case("many rows of 17", _mostly(true, 257, 17, axis=-1)),
            Case("all", _mostly(true, 5, 7, rare=0)),
            Case("of nothing", _mostly(true, 3, 0, axis=1)),
            Case("one of a million", _mostly(true, 3, 333667, axis=1, rare=3e-6), LARGE),
            Case("long columns", _mostly(true, 70001, 17, axis=0, rare=1e-5), LARGE),
            Case("nan and infinities", _WITH_NAN, FLOATS),
            Case(
                "nan among zeros",
                lambda draw: call(draw.listed([[np.nan, 0.0], [0.0, -0.0]]), axis=1),
                FLOATS,
            ),
        ),
        EVERYTHING,
        gives=condition,
        **_ROWS_TIMED,
    )


_LOGSUMEXP = (
    Case("rows of 4096", along(3, HIDDEN, axis=-1)),
    Case("large", lambda draw: call(draw.uniform(-60000, 60000, 3, 33), axis=-1)),
    Case("far below zero", lambda draw: call(draw.uniform(-2000, -1000, 3, 101), axis=-1)),
    Case("nan and infinities", _WITH_NAN),
    Case("infinities alone", _infinite),
    Case("many rows", along(70001, 17, axis=-1), LARGE),
)
_NORM = (
    Case("rows of 4096", along(3, HIDDEN, axis=-1)),
    Case("all", along(5, 7, 9)),
    Case("magnitudes", along(3, 101, axis=-1, ord=1)),
    Case("the largest", along(3, 101, axis=-1, ord=np.inf)),
    Case("cubes", along(3, 101, axis=-1, ord=3)),
    Case("roots", along(3, 7, axis=-1, ord=0.5)),
    Case("a count", _mostly(False, 5, 101, axis=-1, ord=0)),
    Case("large", along(3, 33, axis=-1, kind="large"), ("float32", "bfloat16", "float64")),
    Case("nan and infinities", _WITH_NAN),
    Case("squares that grow", along(2, 8192, axis=-1, kind="positive")),
)


_SUM_WITH_NAN = planted(
    (4, 7), {(0, 3): np.nan, (1, 2): np.inf, (2, 4): -np.inf, (3, 1): np.inf, (3, 5): -np.inf}
)
_CUMULATIVE_SUM = Row(
    "cumulative_sum",
    (
        Case("rows of 513", along(3, 513, axis=-1)),
        Case("from nothing on", along(3, 17, axis=0, include_initial=True)),
        Case("sums that grow", along(2, 5003, axis=-1, kind="positive"), FLOATS),
        Case("a million that grow", along(1000003, axis=0, kind="positive"), LARGE),
        Case("long columns", along(70001, 5, axis=0), LARGE),
        Case("nan and infinities", _SUM_WITH_NAN, FLOATS),
    ),
    NUMBERS,
    budgets.of_magnitudes(
        "cumulative_sum", lambda x, axis=-1, include_initial=False: x.shape[axis]
    ),
    gradient=along(3, 5, axis=-1),
    **_ROWS_TIMED,
)


def _reduction(op: str, cases: tuple[Case, ...] = _REDUCED, **how: Any) -> Row:
    return Row(
        op,
        cases,
        gradient=along(3, 5, axis=-1),
        **_ROWS_TIMED,
        **how,
    )


_CUMULATIVE_PROD = replace(
    _CUMULATIVE_SUM,
    op="cumulative_prod",
    cases=(
        Case("rows of 17", _near_one(65, 17, axis=-1)),
        Case("from nothing on", _near_one(3, 17, axis=0, include_initial=True)),
        Case("long columns", _near_one(2053, 5, axis=0), LARGE),
        Case("nan and infinities", _WITH_NAN, FLOATS),
    ),
    budget=lambda want, coarse, x, **how: (64 + budgets.growth(x.shape[-1])) * np.abs(want),
)


def _search(rows: int, *shape: int, **options: Any) -> Make:
    return lambda draw: call(np.sort(draw.normal(rows)), draw.normal(*shape), **options)


_ODD = [np.nan, 3, -np.inf, np.inf, 0]
_SEARCHSORTED = Row(
    "searchsorted",
    (
        Case("of 1031", _search(1031, 7, 33)),
        Case("in a million", _search(1000003, 1031), LARGE),
        Case("nan", lambda draw: call(draw.listed([1, 3, 3, np.inf]), draw.listed(_ODD)), FLOATS),
    ),
    NUMBERS,
    gives=index,
    gpu={"65,536 in 32000": _search(VOCABULARY, 65536)},
    cpu={"4,096 in 32000": _search(VOCABULARY, 4096)},
    # Some checks change the order of arguments.
    function=lambda x1, x2, **how: ops.searchsorted(ops.sort(x1), x2, **how),
)


def _sparse(op: str, gives: Any) -> Row:
    """Describe an op whose result is as long as x has such numbers."""
    cases = (Case("few", _mostly(False, 257, 17)), Case("most", _mostly(True, 3, 5, 7)))
    odd = Case("nan and infinities", lambda draw: call(draw.special(0.0, 1.0, np.nan)), FLOATS)
    timed = {"512 × 4096": _mostly(False, 512, HIDDEN)}
    return Row(op, (*cases, odd), EVERYTHING, gives=gives, gpu=timed, cpu=timed)


def _spread(*, middle: float = 0.0, **options: Any) -> Make:
    return lambda draw: call(draw.normal(3, 1001, middle=middle), axis=-1, **options)


_SPREAD = (
    Case("rows of 4096", along(3, HIDDEN, axis=-1)),
    Case("of a sample", _spread(correction=1)),
    Case("nothing left to divide by", along(3, 1, axis=-1, correction=1), FLOATS),
    Case("far from zero", _spread(middle=100.0)),
    Case("farther from zero", _spread(middle=4000.0), ("float32", "float64")),
    Case("very long", along(1000003, axis=0, kind="positive"), FLOATS),
    Case("nan and infinities", _WITH_NAN, FLOATS),
    Case("the last counts most", along(3, 1001, axis=-1, kind="heavy"), FLOATS),
    Case("large", along(3, 33, axis=-1, kind="large"), ("float32", "bfloat16", "float64")),
    Case("long columns", along(70001, 17, axis=0, kind="positive"), LARGE),
    Case("many rows", along(70001, 17, axis=-1), LARGE),
)


def of(shape: tuple[int, ...], *arguments: Any) -> Make:
    return lambda draw: call(draw.digits(*shape), *arguments)


def _ties(draw: Draw) -> Call:
    return call(draw.listed([[1, 3, 3, 2], [0, 0, 0, 0], [5, 1, 5, 5]]))


def _ties_far_apart(draw: Draw) -> Call:
    x = -draw.positive(3, 100003)
    x[0, [70000, 90000]], x[1, [0, 100002]], x[2, [65536, 65537]] = 1, 1, 1
    return call(x)


def _of_near_ones(draw: Draw) -> Call:
    """Return integers; several become the same number in float32."""
    rows = np.arange(2**24, 2**24 + 40, dtype=np.int32).reshape(4, 10)
    return call(rows[:, [3, 1, 8, 2, 9, 0, 7, 6, 5, 4]])


_ARGMAX = Row(
    "argmax",
    (
        Case("rows of 32000", along(3, VOCABULARY)),
        Case("no rows", along(0, 4)),
        Case("equal ones", _ties),
        Case("nan and infinities", _WITH_NAN, FLOATS),
        Case("of one sign", _of_one_sign),
        Case("infinities alone", _infinite, FLOATS),
        Case("all digits", _of_near_ones, INTEGERS),
        Case("the end of a million", _ending_most(2, 1000003), LARGE),
        Case("equal ones far apart", _ties_far_apart, LARGE),
        Case("nan at the end", _ENDING_WITH_NAN, LARGE),
        Case("many rows", along(70001, 17), LARGE),
        Case("long columns", along(70001, 17, axis=0), LARGE),
    ),
    NUMBERS,
    gives=index,
    **_WORDS_TIMED,
)


_LOWEST_TIES = Case("equal ones that are least", lambda draw: call(-_ties(draw).arguments[0]))
_ARGMIN = replace(_ARGMAX, op="argmin", cases=(*_ARGMAX.cases, _LOWEST_TIES))


def _repeat(*shape: int, **options: Any) -> Make:
    """Draw numbers that occur several times each."""

    def make(draw: Draw) -> Call:
        if draw.dtype.kind == "bool":
            return call(draw.chance(*shape), **options)
        few = draw.integers(-9, 10, *shape)
        return call(few.astype(draw.dtype.numpy()), **options)

    return make


def _unordered_nan(descending: bool) -> Make:
    def make(draw: Draw) -> Call:
        x = np.tile(draw.special(), (3, 2))
        x[1], x[2, :3] = x[1, ::-1], draw.listed([np.nan, 2, np.nan])
        return call(x, descending=descending)

    return make


def _near_order(draw: Draw) -> Call:
    """Draw one row that is sorted except at its ends, and one in reverse order."""
    x = np.sort(draw.normal(2, 100003), -1)
    x[0, [0, -1]], x[1] = x[0, [-1, 0]], x[1, ::-1]
    return call(x)


def _order(op: str, gives: Any, gradient: Make | None) -> Row:
    return Row(
        op,
        (
            Case("rows of 1031", along(5, 1031)),
            Case("equal ones", _repeat(3, 501)),
            Case("equal ones that fall", _repeat(3, 501, descending=True)),
            Case("all digits", _of_near_ones, INTEGERS),
            Case("nan, infinities and limits", _unordered_nan(False), FLOATS),
            Case("nan, infinities and limits, falling", _unordered_nan(True), FLOATS),
            Case("nearly in order", _near_order, LARGE),
            Case("200,003 of few", _repeat(200003), LARGE),
            Case("many rows", along(20011, 17), LARGE),
        ),
        EVERYTHING,
        gives=gives,
        signs=op == "sort",
        gradient=gradient,
        **_WORDS_TIMED,
    )


_DIFF = Row(
    "diff",
    (
        Case("rows of 513", along(3, 513)),
        Case("twice", along(3, 33, axis=-1, n=2)),
        Case("all digits", of((7, 129)), FLOATS),
        Case("nan and infinities", _WITH_NAN, FLOATS),
    ),
    NUMBERS,
    budgets.of_diff,
    gradient=along(3, 5),
    **_ROWS_TIMED,
)


def _long_rows(draw: Draw) -> Call:
    """Rows with a few NaN, with NaN throughout, with equal ones, and with infinities."""
    x = draw.normal(4, 5003)
    x[0, [7, 4000]], x[1] = np.nan, np.nan
    x[2], x[3, ::2] = np.round(x[2]), -np.inf
    return call(x, 7)


_LARGEST_WITH_NAN = planted((3, 9), {(0, 4): np.nan, (1, 2): np.inf, (1, 5): -np.inf}, 3)


def _values_at_indices(result: Any, made: Call) -> Any:
    """Replace indices by values, as any of equal ones is right; check that the indices differ."""
    values, indices = result
    x = np.asarray(made.arguments[0])
    inside = np.clip(np.asarray(indices), 0, max(0, x.shape[-1] - 1)).astype(np.int64)
    ordered = np.sort(np.asarray(indices, np.int64), axis=-1)
    distinct = (np.diff(ordered, axis=-1) > 0).all(-1)
    return values, np.take_along_axis(x, inside, -1).astype(x.dtype), distinct, indices * 0


_TOP_K = Row(
    "top_k",
    (
        Case("50 of 32000", of((2, VOCABULARY), 50)),
        Case("all", of((3, 9), 9)),
        Case("one", of((2, 3, 77), 1)),
        Case("one row", of((17,), 5)),
        Case("equal ones", lambda draw: call(_ties(draw).arguments[0], 3)),
        Case("no rows", of((0, 9), 2)),
        Case("nan and infinities", _LARGEST_WITH_NAN, FLOATS),
        Case("of one sign", lambda draw: call(_of_one_sign(draw).arguments[0], 5)),
        Case("infinities alone", lambda draw: call(_infinite(draw).arguments[0], 2), FLOATS),
        Case("all digits", lambda draw: call(_of_near_ones(draw).arguments[0], 4), INTEGERS),
        Case("nan and equal ones in long rows", _long_rows, FLOATS),
        Case("1,031 of 100,003", lambda draw: call(draw.heavy(2, 100003), 1031), LARGE),
        Case("many rows", of((70001, 17), 3), LARGE),
    ),
    NUMBERS,
    gives=lambda dtype, made: (dtype, dtype, "bool", "int32"),
    comparable=_values_at_indices,
    gpu={"50 of 16 × 32000": of((16, VOCABULARY), 50)},
    cpu={"50 of 16 × 32000": of((16, VOCABULARY), 50)},
)


ALONG_AXES: tuple[Row, ...] = (
    _reduction(
        "sum",
        (
            *_ADDED,
            Case("nothing to add", along(3, 0, axis=1)),
            Case(
                "integers that grow",
                lambda draw: call(draw.integers(-(2**20), 2**20 + 1, 3, 1001), axis=-1),
                INTEGERS,
            ),
        ),
        dtypes=NUMBERS,
        budget=budgets.of_reduction("sum"),
    ),
    _reduction("mean", _ADDED, budget=budgets.of_reduction("mean")),
    _reduction("var", _SPREAD, budget=budgets.of_var),
    _reduction("std", _SPREAD, budget=budgets.of_std),
    _reduction("max", _COMPARED, dtypes=NUMBERS),
    _reduction("min", _COMPARED, dtypes=NUMBERS),
    _reduction("prod", _MULTIPLIED, dtypes=NUMBERS, budget=budgets.of_norm),
    _truth("any", False),
    _truth("all", True),
    _reduction("logsumexp", _LOGSUMEXP, budget=budgets.of_logsumexp),
    _reduction("vector_norm", _NORM, budget=budgets.of_norm),
    _CUMULATIVE_SUM,
    _CUMULATIVE_PROD,
    _SEARCHSORTED,
    replace(_truth("any", False), op="count_nonzero", gives=index),
    _sparse("nonzero", index),
    _sparse("unique_values", same),
    _DIFF,
    _ARGMAX,
    _ARGMIN,
    _TOP_K,
    _order("sort", same, along(3, 5)),
    _order("argsort", index, None),
)
