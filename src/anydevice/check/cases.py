"""The table of cases: for every op, what it is checked with, judged by and timed with.

`anydevice verify`, `anydevice bench` and the tests all read it; an op without a row fails the
suite. A row (`check/case.py`) has

- cases: shapes of real models and awkward ones, each drawn from a seed and rounded to the dtype
  before the reference sees it;
- a budget, from which with the rule of `check/comparing.py` the tolerance of each element follows;
- benchmarks, at the sizes of a 7B model for a GPU and smaller ones for a CPU, with the bytes that
  a call must move and the operations that it must do.

It also decides what is out of range: reading there gives NaN (0 for integers and booleans), writing
leaves it out, a loss is NaN. Magnitudes go up to those whose squares float32 still holds: ops on
16-bit numbers compute in it.

>>> [case.name for case in TABLE["swiglu"].cases][:2]
['two rows of 14336', 'one row, odd width']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import numpy as np

from anydevice.check import budgets
from anydevice.check.case import Benchmark, Call, Case, Draw, Make, Row, call, per_element
from anydevice.check.cases_elementwise import ELEMENTWISE
from anydevice.check.cases_layers import ATTENTION, LAYERS
from anydevice.check.cases_manipulation import MANIPULATION
from anydevice.core.device import Device
from anydevice.core.dtypes import as_dtype
from anydevice.errors import ConfigurationError

_Name = TypeVar("_Name", str, str | Device)

_NAMED = 4
"""So many ops are named in a sentence; more are counted."""

_SHAPES: tuple[tuple[int, ...], ...] = ((33, 17), (129,), (1,), (0,), (2, 3, 5))


def _states(count: int, shapes: tuple[tuple[int, ...], ...] = _SHAPES, **options: Any) -> Make:
    """Parameters, gradients and so many states; a second state holds squares."""

    def make(draw: Draw) -> Call:
        lists = [[draw.normal(*shape) for shape in shapes] for _ in range(min(count, 1) + 2)]
        if count == 2:
            lists.append([draw.uniform(0.01, 1, *shape) for shape in shapes])
        return call(*lists, **options)

    return make


def _without_velocity(draw: Draw) -> Call:
    made = _states(0, rate=0.1, decay=0.01)(draw)
    return call(*made.arguments, None, **made.options)


def _adam(step: int, *, fresh: bool = False, as_array: bool = False, **options: Any) -> Make:
    def make(draw: Draw) -> Call:
        made = _states(2, rate=0.01, **options)(draw)
        parameters, gradients, means, squares = made.arguments
        if fresh:
            means, squares = ([array * 0 for array in state] for state in (means, squares))
        at = np.array(step, np.int32) if as_array else step
        return call(parameters, gradients, means, squares, at, **made.options)

    return make


def _adam_of(rows: int) -> Make:
    def make(draw: Draw) -> Call:
        made = _states(2, ((rows, 4096),), rate=0.01)(draw)
        return call(*made.arguments, 7, **made.options)

    return make


def _benchmarks(gpu: Make, cpu: Make) -> tuple[Benchmark, ...]:
    return (
        Benchmark("4,096 × 4096", "gpu", gpu),
        Benchmark("256 × 4096", "cpu", cpu),
    )


UPDATES: tuple[Row, ...] = (
    Row(
        "update_sgd",
        (
            Case("with momentum", _states(1, rate=0.1, momentum=0.9, decay=0.01)),
            Case("without velocities", _without_velocity),
            Case("Nesterov", _states(1, rate=0.1, momentum=0.9, nesterov=True)),
        ),
        budget=budgets.of_update,
        benchmarks=_benchmarks(
            _states(1, ((4096, 4096),), rate=0.1, momentum=0.9),
            _states(1, ((256, 4096),), rate=0.1, momentum=0.9),
        ),
        operations=per_element(4),
    ),
    Row(
        "update_adam",
        (
            Case("AdamW, step 7", _adam(7, decay=0.1)),
            Case("the first step", _adam(1, fresh=True)),
            Case("step 10,000", _adam(10000)),
            Case("Adam with decay", _adam(3, decay=0.1, decoupled=False)),
            Case("the step as an array", _adam(5, as_array=True, beta1=0.8, beta2=0.95, eps=1e-6)),
        ),
        budget=budgets.of_update,
        benchmarks=_benchmarks(_adam_of(4096), _adam_of(256)),
        operations=per_element(12),
    ),
    Row(
        "update_lion",
        (
            Case("with decay", _states(1, rate=0.01, decay=0.1)),
            Case("without decay", _states(1, rate=0.01, beta1=0.95, beta2=0.98)),
        ),
        budget=budgets.of_update,
        benchmarks=_benchmarks(
            _states(1, ((4096, 4096),), rate=0.01), _states(1, ((256, 4096),), rate=0.01)
        ),
        operations=per_element(6),
    ),
)


TABLE: Mapping[str, Row] = {
    row.op: row for row in (*LAYERS, *ATTENTION, *MANIPULATION, *ELEMENTWISE, *UPDATES)
}


def row_of(op: str) -> Row:
    """The row of an op.

    Raises `ConfigurationError` where there is none: with the name that was meant, or all of them.
    """
    if op not in TABLE:
        meant = get_close_matches(op, TABLE, 1)
        hint = f"did you mean {meant[0]!r}?" if meant else f"the ops are {', '.join(TABLE)}"
        raise ConfigurationError(f"there is no op {op!r}; {hint}", "op")
    return TABLE[op]


def select(
    ops: str | Sequence[str] | None,
    dtypes: str | Sequence[str] | None,
    table: Sequence[Row] | None = None,
) -> tuple[list[Row], list[str] | None]:
    """The rows and dtypes that were asked for; all rows of the table where none are named.

    Raises `ConfigurationError` for a name that nothing has, and with what there is, where no row
    has any of the dtypes.

    >>> rows, dtypes = select("argmax", "float32")
    >>> [row.op for row in rows], dtypes
    (['argmax'], ['float32'])
    """
    named, asked = one_or_more(ops), one_or_more(dtypes)
    rows = list(table or TABLE.values()) if named is None else [row_of(op) for op in named]
    kinds = None if asked is None else [as_dtype(dtype).name for dtype in asked]
    if any(kinds is None or dtype in kinds for row in rows for dtype in row.dtypes):
        return rows, kinds
    had = ", ".join(dict.fromkeys(dtype for row in rows for dtype in row.dtypes))
    if not had or not kinds:
        raise ConfigurationError(
            "no op or no dtype is named, so that there is nothing to do; leave the argument out "
            "for all of them",
            "ops" if not had else "dtypes",
        )
    names = ", ".join(row.op for row in rows) if len(rows) <= _NAMED else f"these {len(rows)} ops"
    lack, have = ("has", "it has") if len(rows) == 1 else ("have", "they have")
    raise ConfigurationError(f"{names} {lack} no case in {', '.join(kinds)}; {have} {had}", "dtype")


def one_or_more(names: _Name | Sequence[_Name] | None) -> list[_Name] | None:
    """The names as a list, where one alone may stand for a list of one.

    >>> one_or_more("softmax"), one_or_more(["add", "exp"]), one_or_more(None)
    (['softmax'], ['add', 'exp'], None)
    """
    if names is None:
        return None
    return [names] if isinstance(names, str | Device) else list(names)
