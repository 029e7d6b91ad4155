"""The table of cases: every row can be drawn, is judged by finite rules, and counts its work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydevice._check import checks as trials
from anydevice._check.cases.case import (
    FLOATS,
    LARGE,
    LARGE_KERNELS,
    SMALLEST_NORMAL,
    Call,
    Draw,
    Row,
)
from anydevice._check.cases.table import TABLE, row_of
from anydevice._check.compare import ROUNDING_UNIT, compare
from anydevice._core.dtypes import DTYPES
from tests.comparing import assert_same_bits
from tests.refusals import refuses

ROWS = list(TABLE.values())


def every_row(rows: list[Row]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.op)


class Shapes(Draw):
    """Draws arrays of the right shape and type that take up no memory."""

    def _count(self, shape: tuple[int, ...]) -> int:
        return 1

    def _fill(self, drawn: Any, shape: tuple[int, ...]) -> Any:
        return np.broadcast_to(drawn.astype(self.dtype.numpy())[:1].reshape(()), shape)

    def chance(self, *shape: int, of: float = 0.5) -> Any:
        return np.broadcast_to(super().chance(of=of), shape)


@every_row(ROWS)
def test_a_result_of_the_reference_itself_is_right(row: Row) -> None:
    """Rounded to the type, what must come out is within what is allowed; off by more, it is not."""
    for dtype in row.dtypes:
        for case in row.cases_for(dtype):
            if case.dtypes in (LARGE, LARGE_KERNELS):  # the reference takes seconds
                continue
            trial = trials.prepare(row, case, dtype)
            assert len(trial.wants[0]) == len(trial.types)
            for place, kind in enumerate(trial.types):
                want = np.asarray(trial.wants[0][place])
                with np.errstate(all="ignore"):
                    rounded = want.astype(DTYPES[kind].numpy())
                assert trials._judge(trial, place, rounded) is None, (case.name, dtype)


@every_row(ROWS)
def test_a_result_that_is_off_by_a_hundredth_is_wrong(row: Row) -> None:
    for dtype in row.dtypes:
        trial = trials.prepare(row, row.cases_for(dtype)[0], dtype)
        kind, want = trial.types[0], np.asarray(trial.wants[0][0])
        if kind not in ROUNDING_UNIT:
            off = want == 0 if kind == "bool" else want + 1
        else:
            off = want + 0.02 * (np.abs(want).max() or 1.0)
        with np.errstate(over="ignore"):
            wrong = trials._judge(trial, 0, off.astype(DTYPES[kind].numpy()))
        assert wrong is not None, dtype


@every_row(ROWS)
def test_what_is_drawn_depends_on_the_seed_alone(row: Row) -> None:
    dtype = row.dtypes[0]
    case = row.cases[0]
    one, same, other = (row.draw(case, dtype, seed).arrays() for seed in (0, 0, 1))
    for a, b in zip(one, same, strict=True):
        assert_same_bits(a, b, because="the same seed draws the same numbers")
    assert any(a.tobytes() != b.tobytes() for a, b in zip(one, other, strict=True))


@every_row(ROWS)
def test_every_op_is_timed_on_a_gpu_and_on_a_cpu(row: Row) -> None:
    assert {benchmark.place for benchmark in row.benchmarks} == {"gpu", "cpu"}
    for benchmark in row.benchmarks:
        made = benchmark.make(Shapes(DTYPES[row.dtypes[0]], row.op))
        size = sum(array.size for array in made.arrays())
        assert size > 1e3
        assert row.moved(made, 100) > 0
        assert row.operations(made) >= 0


def counted(op: str, name: str, *, result: int = 0) -> tuple[int, int]:
    """Operations and bytes of one benchmark in bfloat16."""
    row = TABLE[op]
    benchmark = next(each for each in row.benchmarks if each.name == name)
    made = benchmark.make(Shapes(DTYPES["bfloat16"], op))
    return row.operations(made), row.moved(made, result)


def test_work_is_counted_as_the_field_counts_it() -> None:
    assert counted("matmul", "8192³", result=2 * 8192**2) == (2 * 8192**3, 6 * 8192**2)
    assert counted("linear", "down of one token, 14336 → 4096")[0] == 2 * 14336 * 4096
    pairs = 4096 * 4097 // 2
    assert counted("attention", "4,096 tokens")[0] == 4 * 32 * 128 * pairs
    keys_and_values = 2 * 8 * 4096 * 128 * 2
    operations, read = counted("attention", "decoding 1 × 4,096")
    assert operations == 4 * 32 * 128 * 4096
    assert keys_and_values < read < 1.01 * keys_and_values
    assert counted("cache_write", "one token")[1] == 2 * 2 * 8 * 128
    assert counted("embedding", "16,384 tokens", result=1000)[1] == 2000 + 4 * 16384
    assert counted("conv2d", "1 image, 3 × 3, 64 channels")[0] == 2 * 28 * 28 * 64 * 64 * 9


def test_the_nasty_ones_are_there() -> None:
    for op in ("matmul", "softmax", "rmsnorm", "attention", "sum", "linear", "mean"):
        names = " ".join(case.name for case in TABLE[op].cases)
        assert "grow" in names or "alike" in names, op
    for op in ("matmul", "softmax", "rmsnorm", "layernorm", "sum", "cross_entropy"):
        assert any("the last counts most" in case.name for case in TABLE[op].cases), op
    for op in ("embedding", "take", "take_along_axis", "cache_write", "cross_entropy", "experts"):
        assert any("out of range" in case.name for case in TABLE[op].cases), op
    for row in ROWS:
        special = any("nan" in case.name for case in row.cases)
        assert special or row.op in WITHOUT_SPECIAL, row.op


WITHOUT_SPECIAL = {"logical_and", "logical_or", "logical_not"}
"""Of conditions there are only two."""
WITHOUT_SPECIAL |= {"logical_xor", *(op for op in TABLE if op.startswith("bitwise_"))}
"""Bits of integers and booleans."""
WITHOUT_SPECIAL |= {"linspace", "one_hot", "zeros", "ones", "arange", "eye"}
"""What they are given is shapes and integers."""


@pytest.mark.parametrize("dtype", FLOATS)
def test_drawn_numbers(dtype: str) -> None:
    draw = Draw(DTYPES[dtype], "numbers")
    kind = DTYPES[dtype].numpy()
    for array in (draw.normal(3, 5), draw.positive(7), draw.large(9), draw.special(2.0)):
        assert array.dtype == kind
    assert np.isfinite(draw.large(1000).astype(np.float64)).all()
    small = np.abs(draw.denormal(1000).astype(np.float64))
    assert ((small > 0) & (small < SMALLEST_NORMAL[dtype])).any()
    heavy = draw.heavy(2, 100).astype(np.float64)
    assert (heavy[:, -1] > np.abs(heavy[:, :-1]).max()).all()
    assert draw.normal().shape == ()


def test_long_arrays_repeat_what_was_drawn() -> None:
    long = Draw(DTYPES["float32"], "long").normal(3, 500_000)
    assert long.shape == (3, 500_000)
    assert not (long[0] == long[1]).any()


def test_whole_types() -> None:
    draw = Draw(DTYPES["int32"], "whole")
    assert draw.normal(5).dtype == draw.positive(5).dtype == np.int32
    assert (draw.positive(100) > 0).all()
    assert Draw(DTYPES["bool"], "conditions").normal(9).dtype == bool


def test_a_call_knows_its_arrays() -> None:
    a, b = np.ones(1), np.ones(2)
    assert [x.size for x in Call(([a, b], None, 3), {"mask": b}).arrays()] == [1, 2, 2]


def test_flushing_is_one_of_two_right_answers() -> None:
    row = TABLE["log"]
    case = next(case for case in row.cases if case.denormal)
    trial = trials.prepare(row, case, "float32")
    x = trial.call.arguments[0].astype(np.float64)
    flushed = np.where(np.abs(x) < SMALLEST_NORMAL["float32"], 0, x)
    with np.errstate(all="ignore"):
        assert trials._judge(trial, 0, np.log(x).astype(np.float32)) is None
        assert trials._judge(trial, 0, np.log(flushed).astype(np.float32)) is None
        assert compare(np.log(flushed).astype(np.float32), [np.log(x)], 9.0, *("float32",) * 2)


def test_an_op_without_a_row() -> None:
    refuses("there is no op 'dance'; the ops are matmul", row_of, "dance")
    refuses(r"no op 'sofmax'; did you mean 'softmax'\?$", row_of, "sofmax")
