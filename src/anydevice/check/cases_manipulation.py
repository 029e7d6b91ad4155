"""Cases of the ops that reduce, pick, shape and convert."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydevice.check import budgets
from anydevice.check.budgets import Budget
from anydevice.check.case import (
    EVERYTHING,
    FLOATS,
    NUMBERS,
    Benchmark,
    Call,
    Case,
    Draw,
    Make,
    Row,
    call,
    index,
)
from anydevice.check.cases_layers import HIDDEN, VOCABULARY


def _along(*shape: int, kind: str = "normal", **options: Any) -> Make:
    return lambda draw: call(getattr(draw, kind)(*shape), **options)


def _with_nan(draw: Draw) -> Call:
    x = draw.normal(4, 7)
    x[0, 3], x[1, 0], x[2, 6] = float("nan"), float("inf"), float("-inf")
    return call(x, axis=-1)


_REDUCED = (
    Case("rows of 4096", _along(3, HIDDEN, axis=-1)),
    Case("all", _along(5, 7, 9)),
    Case("the first axis", _along(257, 5, axis=0)),
    Case("two axes, kept", _along(3, 5, 7, axis=(0, 2), keepdims=True)),
    Case("one element", _along(1, axis=0)),
    Case("no axis", _along()),
    Case("no rows", _along(0, 7, axis=1)),
    Case("very long", _along(1000003, axis=0), FLOATS),
    Case("nan and infinities", _with_nan, FLOATS),
    Case("elements that lie apart", _along(9, 33, axis=-1), strided=True),
)
_REDUCE_BENCHMARKS = (
    Benchmark("16,384 rows of 4096", "gpu", _along(16384, HIDDEN, axis=-1)),
    Benchmark("1,024 rows of 4096", "cpu", _along(1024, HIDDEN, axis=-1)),
)


def _sums(op: str, budget: Budget, dtypes: tuple[str, ...]) -> Row:
    more = (
        Case("sums that grow", _along(2, 5003, axis=-1, kind="positive"), FLOATS),
        Case("the last counts most", _along(3, 1001, axis=-1, kind="heavy"), FLOATS),
        Case("large", _along(3, 33, axis=-1, kind="large"), FLOATS),
    )
    empty = (Case("nothing to add", _along(3, 0, axis=1)),) if op == "sum" else ()
    return Row(
        op,
        (*_REDUCED, *more, *empty),
        dtypes,
        budget,
        gradient=_along(3, 5, axis=-1),
        benchmarks=_REDUCE_BENCHMARKS,
    )


def _extremes(op: str) -> Row:
    return Row(op, _REDUCED, NUMBERS, gradient=_along(3, 5, axis=-1), benchmarks=_REDUCE_BENCHMARKS)


def _ties(draw: Draw) -> Call:
    return call(draw.listed([[1, 3, 3, 2], [0, 0, 0, 0], [5, 1, 5, 5]]))


_ARGMAX = Row(
    "argmax",
    (
        Case("rows of 32000", _along(3, VOCABULARY)),
        Case("another axis", _along(5, 77, 3, axis=1)),
        Case("the first axis", _along(65, 3, axis=0)),
        Case("equal ones", _ties),
        Case("elements that lie apart", _along(9, 33), strided=True),
        Case("one column", _along(4, 1)),
        Case("no rows", _along(0, 4)),
        Case("nan and infinities", _with_nan, FLOATS),
    ),
    NUMBERS,
    gives=index,
    benchmarks=(
        Benchmark("16 rows of 32000", "gpu", _along(16, VOCABULARY)),
        Benchmark("16 rows of 32000", "cpu", _along(16, VOCABULARY)),
    ),
)


def _largest(*shape: int, k: int) -> Make:
    return lambda draw: call(draw.normal(*shape), k)


def _largest_with_nan(draw: Draw) -> Call:
    x = draw.normal(3, 9)
    x[0, 4], x[1, 2], x[1, 5] = float("nan"), float("inf"), float("-inf")
    return call(x, 3)


def _values_at_indices(result: Any, made: Call) -> Any:
    """Of equal numbers any index is right: compare what lies there, and that no two are one."""
    values, indices = result
    x = np.asarray(made.arguments[0])
    inside = np.clip(np.asarray(indices), 0, max(0, x.shape[-1] - 1)).astype(np.int64)
    ordered = np.sort(np.asarray(indices, np.int64), axis=-1)
    distinct = (np.diff(ordered, axis=-1) > 0).all(-1)
    return values, np.take_along_axis(x, inside, -1).astype(x.dtype), distinct, indices * 0


def _top_k_types(dtype: str, made: Call) -> tuple[str, ...]:
    return (dtype, dtype, "bool", "int32")


_TOP_K = Row(
    "top_k",
    (
        Case("50 of 32000", _largest(2, VOCABULARY, k=50)),
        Case("all", _largest(3, 9, k=9)),
        Case("one", _largest(2, 3, 77, k=1)),
        Case("one row", _largest(17, k=5)),
        Case("equal ones", lambda draw: call(_ties(draw).arguments[0], 3)),
        Case("no rows", _largest(0, 9, k=2)),
        Case("nan and infinities", _largest_with_nan, FLOATS),
    ),
    NUMBERS,
    gives=_top_k_types,
    comparable=_values_at_indices,
    benchmarks=(
        Benchmark("50 of 16 × 32000", "gpu", _largest(16, VOCABULARY, k=50)),
        Benchmark("50 of 16 × 32000", "cpu", _largest(16, VOCABULARY, k=50)),
    ),
)


def _picked(rows: int, width: int, *ids: int) -> Make:
    return lambda draw: call(draw.normal(rows, width), draw.integers(0, rows, *ids))


def _picked_outside(draw: Draw) -> Call:
    return call(draw.normal(9, 5), np.array([0, 8, 9, -1, 100000], np.int32))


def _with_long_ids(draw: Draw) -> Call:
    return call(draw.normal(9, 5), draw.integers(0, 9, 4).astype(np.int64))


def _rows_twice(made: Call, result_bytes: int) -> int:
    """Only the rows that are picked are read."""
    return 2 * result_bytes + int(made.arguments[1].nbytes)


_EMBEDDING = Row(
    "embedding",
    (
        Case("2 × 7 tokens", _picked(1000, 129, 2, 7)),
        Case("one token", _picked(17, 1, 1)),
        Case("a single id", lambda draw: call(draw.normal(5, 3), np.array(3, np.int32))),
        Case("no tokens", _picked(5, 3, 0)),
        Case("ids of 64 bits", _with_long_ids),
        Case("ids out of range", _picked_outside),
    ),
    gradient=lambda draw: call(draw.normal(4, 3), np.array([1, 3, 1], np.int32)),
    benchmarks=(
        Benchmark("16,384 tokens", "gpu", _picked(VOCABULARY, HIDDEN, 1, 16384)),
        Benchmark("256 tokens", "cpu", _picked(VOCABULARY, 1024, 1, 256)),
    ),
    moved=_rows_twice,
    operations=lambda made: 0,
)


def _taken(shape: tuple[int, ...], axis: int, *ids: int) -> Make:
    def make(draw: Draw) -> Call:
        return call(draw.normal(*shape), draw.integers(0, shape[axis], *ids), axis)

    return make


def _taken_outside(draw: Draw) -> Call:
    return call(draw.normal(3, 5), np.array([4, 5, -1, 0], np.int32), 1)


_TAKE = Row(
    "take",
    (
        Case("rows", _taken((33, 17), 0, 9)),
        Case("elements that lie apart", _taken((33, 17), 0, 9), strided=True),
        Case("another axis", _taken((3, 33, 5), 1, 2, 4)),
        Case("from behind", _taken((3, 33), -1, 7)),
        Case("none", _taken((3, 33), 1, 0)),
        Case("out of range", _taken_outside),
        Case("ids of 64 bits", _with_long_ids),
    ),
    EVERYTHING,
    gradient=lambda draw: call(draw.normal(3, 4), np.array([2, 0, 2], np.int32), 1),
    benchmarks=(
        Benchmark("4,096 rows of 4096", "gpu", _taken((VOCABULARY, HIDDEN), 0, 4096)),
        Benchmark("256 rows of 1024", "cpu", _taken((VOCABULARY, 1024), 0, 256)),
    ),
    moved=_rows_twice,
    operations=lambda made: 0,
)


def _of(shape: tuple[int, ...], *arguments: Any) -> Make:
    return lambda draw: call(draw.normal(*shape), *arguments)


def _shaped(op: str, gpu: Make, cpu: Make, gradient: Make, **cases: Make) -> Row:
    return Row(
        op,
        (
            *(Case(name.replace("_", " "), make) for name, make in cases.items()),
            Case("elements that lie apart", gradient, strided=True),
        ),
        EVERYTHING,
        gradient=gradient,
        benchmarks=(
            Benchmark("4,096 × 4096", "gpu", gpu),
            Benchmark("512 × 4096", "cpu", cpu),
        ),
        operations=lambda made: 0,
    )


def _joined(*shapes: tuple[int, ...], axis: int = 0) -> Make:
    return lambda draw: call([draw.normal(*shape) for shape in shapes], axis)


def _converted(target: str) -> tuple[Case, ...]:
    cases = [
        Case(f"to {target}", _of((3, 77), target)),
        Case(f"none to {target}", _of((0,), target)),
    ]
    if target in FLOATS:
        special = lambda draw: call(draw.special(), target)  # noqa: E731
        cases.append(Case(f"nan, infinities and limits to {target}", special, FLOATS))
    return tuple(cases)


_ASTYPE = Row(
    "astype",
    tuple(case for target in EVERYTHING for case in _converted(target)),
    EVERYTHING,
    gives=lambda dtype, made: (made.arguments[1],),
    gradient=_of((3, 5), "float32"),
    benchmarks=(
        Benchmark("16,384 rows of 4096 to float32", "gpu", _of((16384, HIDDEN), "float32")),
        Benchmark("512 rows of 4096 to float32", "cpu", _of((512, HIDDEN), "float32")),
    ),
    operations=lambda made: 0,
)

MANIPULATION: tuple[Row, ...] = (
    _sums("sum", budgets.of_sum, NUMBERS),
    _sums("mean", budgets.of_mean, FLOATS),
    _extremes("max"),
    _extremes("min"),
    _ARGMAX,
    _TOP_K,
    _EMBEDDING,
    _TAKE,
    _shaped(
        "reshape",
        _of((4096, HIDDEN), (HIDDEN, 32, 128)),
        _of((512, HIDDEN), (512, 32, 128)),
        _of((3, 4), (2, 6)),
        split=_of((6, 8), (2, 3, 8)),
        one_size_left_open=_of((6, 8), (4, -1)),
        to_no_axis=_of((1, 1), ()),
        empty=_of((0, 4), (2, 0)),
    ),
    _shaped(
        "permute",
        _of((4096, HIDDEN), (1, 0)),
        _of((512, HIDDEN), (1, 0)),
        _of((2, 3), (1, 0)),
        heads=_of((2, 7, 4, 16), (0, 2, 1, 3)),
        all=_of((3, 5, 7), (2, 0, 1)),
        nothing=_of((3, 5), (0, 1)),
        empty=_of((0, 4), (1, 0)),
    ),
    _shaped(
        "concat",
        _joined((2048, HIDDEN), (2048, HIDDEN)),
        _joined((256, HIDDEN), (256, HIDDEN)),
        lambda draw: call([draw.normal(2, 3), draw.normal(1, 3)]),
        rows=_joined((3, 5), (1, 5), (7, 5)),
        columns=_joined((3, 5), (3, 1), axis=-1),
        one=_joined((3, 5)),
        with_an_empty_one=_joined((0, 5), (2, 5)),
    ),
    _shaped(
        "part",
        _of((8192, HIDDEN), 0, 0, 4096),
        _of((1024, HIDDEN), 0, 0, 512),
        _of((3, 5), 1, 1, 4, 2),
        rows=_of((9, 5), 0, 2, 7),
        every_other_column=_of((9, 5), 1, 1, 5, 2),
        from_behind=_of((3, 9, 5), -1, 0, 3),
        none=_of((9, 5), 0, 4, 4),
        all=_of((9, 5), 0, 0, 9),
    ),
    _shaped(
        "broadcast_to",
        _of((1, HIDDEN), (4096, HIDDEN)),
        _of((1, HIDDEN), (512, HIDDEN)),
        _of((1, 3), (2, 3)),
        rows=_of((5,), (3, 5)),
        a_middle_axis=_of((3, 1, 5), (3, 4, 5)),
        no_axis=_of((), (2, 3)),
        empty=_of((1, 5), (0, 5)),
    ),
    _ASTYPE,
)
