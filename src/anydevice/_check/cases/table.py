"""The table of cases: how every op is checked, judged and timed.

`anydevice verify`, `anydevice bench` and the tests all read it; an op without a row fails the
suite. A row (`_check/cases/case.py`) has

- cases: shapes of real models and awkward ones, each drawn from a seed and rounded to the dtype
  before the reference sees it;
- a budget, from which with the rule of `_check/compare.py` the tolerance of each element follows;
- benchmarks, at the sizes of a 7B model for a GPU and smaller ones for a CPU, with the bytes that
  a call must move and the operations that it must do.

It also decides what is out of range: reading there gives NaN (0 for integers and booleans), writing
leaves it out, a loss is NaN. Magnitudes go up to those whose squares float32 still holds: ops on
16-bit numbers compute in it.

>>> [case.name for case in TABLE["swiglu"].cases][:2]
['two rows of 14336', 'one row, odd width']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import numpy as np

from anydevice._check import budgets
from anydevice._check.cases.axes import ALONG_AXES, of
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
    per_element,
)
from anydevice._check.cases.decoding import ATTENTION
from anydevice._check.cases.elementwise import ELEMENTWISE
from anydevice._check.cases.layers import HIDDEN, LAYERS, VOCABULARY
from anydevice._check.cases.quantized import QUANTIZED
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice.errors import ConfigurationError

_Name = TypeVar("_Name", str, str | Device)

_NAMED = 4
"""The most ops that a message names; more are counted."""

_SHAPES: tuple[tuple[int, ...], ...] = ((33, 17), (129,), (1,), (0,), (2, 3, 5))
_MILLION: tuple[tuple[int, ...], ...] = ((1031, 1033), (3,), (70001,))
_MANY: tuple[tuple[int, ...], ...] = tuple((size % 7 + 1, size % 3 + 1) for size in range(70))


def _pick_rows(rows: int, width: int, *ids: int) -> Make:
    return lambda draw: call(draw.normal(rows, width), draw.integers(0, rows, *ids))


def _at(shape: tuple[int, ...], places: Any, *axis: int) -> Make:
    return lambda draw: call(draw.digits(*shape), np.array(places, np.int32), *axis)


_FAR = [0, 65535, 65536, 131072, 299999, 262144, 300006, 3]
"""Indices that do not fit 16 bits."""


def _special_at(places: Any) -> Make:
    return lambda draw: call(draw.special().reshape(3, 3), np.array(places, np.int32))


def _with_long_ids(draw: Draw) -> Call:
    return call(draw.normal(9, 5), draw.integers(0, 9, 4).astype(np.int64))


def _rows_twice(made: Call, result_bytes: int) -> int:
    """Count the bytes of the picked rows alone, read and written, and of the ids."""
    return 2 * result_bytes + int(made.arguments[1].nbytes)


_EMBEDDING = Row(
    "embedding",
    (
        Case("2 × 7 tokens", _pick_rows(1000, 129, 2, 7)),
        Case("one token", _pick_rows(17, 1, 1)),
        Case("a single id", _at((5, 3), 3)),
        Case("no tokens", _pick_rows(5, 3, 0)),
        Case("ids of 64 bits", _with_long_ids),
        Case("ids out of range", _at((9, 5), [0, 8, 9, -1, 100000])),
        Case("ids far out of range", _at((9, 5), [2**31 - 1, -(2**31), 65536, -9, 256, 3])),
        Case("ids above 65,535", _at((300007, 3), _FAR), LARGE),
        Case("many tokens", _pick_rows(150001, 3, 33, 1031), LARGE),
        Case("wide rows", _pick_rows(129, 4099, 3, 67), LARGE),
        Case("rows that lie apart", _pick_rows(33, 17, 9), strided=True),
        Case("nan, infinities and limits", _special_at([2, 0, 1, 1]), FLOATS),
    ),
    signs=True,
    gradient=_at((4, 3), [1, 3, 1]),
    gpu={"16,384 tokens": _pick_rows(VOCABULARY, HIDDEN, 1, 16384)},
    cpu={"256 tokens": _pick_rows(VOCABULARY, 1024, 1, 256)},
    moved=_rows_twice,
    operations=lambda made: 0,
)


def _take(shape: tuple[int, ...], axis: int, *ids: int) -> Make:
    return lambda draw: call(draw.digits(*shape), draw.integers(0, shape[axis], *ids), axis)


_TAKE = Row(
    "take",
    (
        Case("rows", _take((33, 17), 0, 9)),
        Case("out of range", _at((3, 5), [4, 5, -1, 0], 1)),
        Case("ids of 64 bits", _with_long_ids),
        Case("out of range, rows", _at((9, 5), [2**31 - 1, -(2**31), 65536, -9, 3])),
        Case("ids above 65,535", _at((300007, 3), _FAR), LARGE),
        Case("places above 65,535", _at((3, 300007), _FAR, 1), LARGE),
        Case("nan, infinities and limits", _special_at([2, 0, 1, 1]), FLOATS),
    ),
    EVERYTHING,
    signs=True,
    gradient=_at((3, 4), [2, 0, 2], 1),
    gpu={"4,096 rows of 4096": _take((VOCABULARY, HIDDEN), 0, 4096)},
    cpu={"256 rows of 1024": _take((VOCABULARY, 1024), 0, 256)},
    moved=_rows_twice,
    operations=lambda made: 0,
)


def _take_along(shape: tuple[int, ...], axis: int, *indices: int, low: int = 0) -> Make:
    """Take elements at indices from `low` on; `indices` is the shape of the indices."""
    high = shape[axis] - low
    return lambda draw: call(draw.digits(*shape), draw.integers(low, high, *indices), axis)


_TAKE_ALONG_AXIS = Row(
    "take_along_axis",
    (
        Case("of rows", _take_along((9, 33), -1, 9, 5)),
        Case("of nothing", lambda draw: call(draw.digits(2, 0), np.zeros((2, 3), np.int32))),
        Case("out of range", _take_along((9, 5), -1, 9, 17, low=-4)),
        Case("places above 65,535", _take_along((3, 300007), -1, 3, 17), LARGE),
        Case("places above 65,535, of columns", _take_along((300007, 3), 0, 17, 3), LARGE),
        Case("nan, infinities and limits", _special_at([[2, 0], [1, 1], [5, 2]]), FLOATS),
    ),
    EVERYTHING,
    signs=True,
    gradient=_take_along((3, 4), -1, 3, 5),
    gpu={"4,096 of 32000": _take_along((4096, VOCABULARY), -1, 4096, 64)},
    cpu={"256 of 32000": _take_along((256, VOCABULARY), -1, 256, 64)},
    moved=_rows_twice,
    operations=lambda made: 0,
)


def _shape_row(
    op: str, timed: Callable[[int], Make], gradient: Make, special: Make, **cases: Make
) -> Row:
    """Describe an op that moves elements; `timed` draws a benchmark of a number of rows."""
    named = (
        Case(name.replace("_", " "), make, LARGE if "million" in name else None)
        for name, make in cases.items()
    )
    return Row(
        op,
        (
            *named,
            Case("elements that lie apart", gradient, strided=True),
            Case("nan, infinities and limits", special, FLOATS),
        ),
        EVERYTHING,
        signs=True,
        gradient=gradient,
        gpu={"4,096 × 4096": timed(4096)},
        cpu={"512 × 4096": timed(512)},
        operations=lambda made: 0,
    )


def _join(*shapes: tuple[int, ...], axis: int = 0) -> Make:
    return lambda draw: call([draw.digits(*shape) for shape in shapes], axis)


def _special(*arguments: Any) -> Make:
    return lambda draw: call(draw.special().reshape(3, 3), *arguments)


def _cast_cases(target: str) -> tuple[Case, ...]:
    cases = [
        Case(f"to {target}", of((3, 77), target)),
        Case(f"of all sizes to {target}", _of_sizes(target), NUMBERS),
    ]
    if target in FLOATS:
        special = lambda draw: call(draw.special(), target)  # noqa: E731
        cases.append(Case(f"nan, infinities and limits to {target}", special, FLOATS))
    return tuple(cases)


def _of_sizes(target: str) -> Make:
    """Draw numbers up to the largest of the target, and fractions."""
    most = {"float16": 6e4, "int32": 2e9}.get(target, 3e9)

    def make(draw: Draw) -> Call:
        if draw.dtype.kind == "int":
            return call(
                draw.integers(-60000, 60001, 9, 33) if most < 1e9 else draw.digits(9, 33), target
            )
        scale = min(most, 6e4 if draw.dtype.name == "float16" else most)
        x = draw.uniform(-scale, scale, 9, 33)
        x[3:6], x[6:] = draw.uniform(-3, 3, 3, 33), draw.uniform(-1, 1, 3, 33)
        return call(x, target)

    return make


_ASTYPE = Row(
    "astype",
    tuple(case for target in EVERYTHING for case in _cast_cases(target)),
    EVERYTHING,
    gives=lambda dtype, made: (made.arguments[1],),
    gradient=of((3, 5), "float32"),
    gpu={"16,384 rows of 4096 to float32": of((16384, HIDDEN), "float32")},
    cpu={"512 rows of 4096 to float32": of((512, HIDDEN), "float32")},
    operations=lambda made: 0,
)


def _hot(low: int, high: int, shape: tuple[int, ...], classes: int) -> Make:
    return lambda draw: call(draw.integers(low, high, *shape), classes, draw.dtype.name)


_ONE_HOT = Row(
    "one_hot",
    (
        Case("2 × 7 of 33", _hot(0, 33, (2, 7), 33)),
        Case("out of range", _hot(-3, 9, (65,), 5)),
        Case("above 65,535", _hot(0, 70001, (17,), 70001), LARGE),
    ),
    EVERYTHING,
    gpu={"16,384 of 32000": lambda draw: call(draw.integers(0, VOCABULARY, 16384), VOCABULARY)},
    cpu={"1,024 of 1024": lambda draw: call(draw.integers(0, 1024, 1025), 1024)},
    operations=lambda made: 0,
)


def _like(*arguments: Any, count: int = 3, **options: Any) -> Make:
    return lambda draw: call(*arguments, like=draw.normal(count), **options)


def _create(op: str, *arguments: Any, large: tuple[Any, ...], **cases: tuple[Any, ...]) -> Row:
    """Describe an op that makes an array like another; `large` are a benchmark's arguments."""
    named = (Case(name.replace("_", " "), _like(*given), LARGE) for name, given in cases.items())
    to_float = Case("of another dtype", _like(*arguments, dtype="float16"), INTEGERS)
    return Row(
        op,
        (Case("plain", _like(*arguments)), *named, to_float),
        {"arange": NUMBERS, "linspace": FLOATS}.get(op, EVERYTHING),
        budgets.of_linspace if op == "linspace" else budgets.relative(4, once=True),
        gives=lambda dtype, made: (made.options.get("dtype") or dtype,),
        gpu={"16 million elements": _like(*large, count=1024)},
        cpu={"16 million elements": _like(*large, count=1024)},
        operations=lambda made: 0,
    )


def _of_one_value(op: str, *arguments: Any) -> Row:
    return Row(
        op,
        (
            Case("odd width", of((3, 77), *arguments)),
            Case("nan and infinities", lambda draw: call(draw.special(), *arguments), FLOATS),
        ),
        EVERYTHING,
        gives=lambda dtype, made: (made.options.get("dtype") or dtype,),
        gpu={"4,096 × 4096": of((4096, HIDDEN), *arguments)},
        cpu={"512 × 4096": of((512, HIDDEN), *arguments)},
        operations=lambda made: 0,
    )


_SHAPED_LIKE: dict[str, tuple[Any, ...]] = {
    "no_axis": ((),),
    "one_size": (7,),
    "empty": ((0, 2),),
    "a_million": ((1031, 1033),),
    "large": ((4096, 4096),),
}

_MADE: tuple[Row, ...] = (
    _create("zeros", (3, 5), **_SHAPED_LIKE),
    _create("ones", (3, 5), **_SHAPED_LIKE),
    _create(
        "full",
        (3, 5),
        1,
        nan=((2, 3), np.nan),
        infinity=(4, -np.inf),
        a_fraction=((), 0.375),
        large=((4096, 4096), 1),
    ),
    _create(
        "arange",
        9,
        from_another=(3, 11),
        by_threes=(-4, 11, 3),
        backwards=(11, -4, -3),
        fractions=(0.25, 3.0, 0.375),
        none=(5, 5),
        the_other_way=(5, 1),
        a_million=(7, 1000003),
        large=(2**24,),
    ),
    _create("linspace", -3.0, 5, 11, one=(2, 3, 1), falling=(9, -2.5, 77), large=(0, 1, 2**24)),
    _create("eye", 5, wide=(3, 7), high=(7, 3), empty=(0,), many=(1031, 1033), large=(4096,)),
    _of_one_value("zeros_like"),
    _of_one_value("ones_like"),
    _of_one_value("full_like", 1),
)

_MOVED: dict[str, tuple[Any, ...]] = {"moveaxis": (0, 1), "repeat": (2, 1), "roll": (2, 1)}
_MOVED |= {"expand_dims": (1,), "tile": ((2, 1, 2),), "triu": (1,)}
_MOVED |= {"tril": (), "matrix_transpose": (), "unstack": (), "broadcast_arrays": ()}
"""Ops that move elements, with the arguments behind x."""


def _move_row(op: str, *arguments: Any) -> Row:
    return _shape_row(
        op,
        lambda rows: of((rows, HIDDEN), *arguments),
        of((3, 4), *arguments),
        _special(*arguments),
    )


def _grid(*sizes: int) -> Make:
    return lambda draw: call(draw.digits(sizes[0]), draw.digits(sizes[1]))


MANIPULATION: tuple[Row, ...] = (
    *(_move_row(op, *arguments) for op, arguments in _MOVED.items()),
    _shape_row(
        "squeeze",
        lambda rows: of((rows, 1, HIDDEN), 1),
        of((1, 3, 1), (0, -1)),
        lambda draw: call(draw.special()[None], 0),
    ),
    _shape_row(
        "meshgrid",
        lambda rows: _grid(rows, HIDDEN),
        _grid(3, 4),
        lambda draw: call(draw.special(), draw.digits(2)),
    ),
    _EMBEDDING,
    _TAKE,
    _TAKE_ALONG_AXIS,
    _shape_row(
        "reshape",
        lambda rows: of((rows, HIDDEN), (rows, 32, 128)),
        of((3, 4), (2, 6)),
        _special((9,)),
    ),
    _shape_row(
        "permute",
        lambda rows: of((rows, HIDDEN), (1, 0)),
        of((2, 3), (1, 0)),
        _special((1, 0)),
    ),
    _shape_row(
        "concat",
        lambda rows: _join((rows // 2, HIDDEN), (rows // 2, HIDDEN)),
        lambda draw: call([draw.normal(2, 3), draw.normal(1, 3)]),
        lambda draw: call([draw.special().reshape(3, 3), draw.normal(1, 3)]),
        many=_join(*((size % 4 + 1, 3) for size in range(40))),
        rows=_join((3, 5), (1, 5), (7, 5)),
        columns=_join((3, 5), (3, 1), axis=-1),
    ),
    _shape_row(
        "stack",
        lambda rows: _join((rows // 2, HIDDEN), (rows // 2, HIDDEN)),
        lambda draw: call([draw.normal(2, 3), draw.normal(2, 3)], 1),
        lambda draw: call([draw.special(), draw.special()]),
        rows=_join((3, 5), (3, 5), (3, 5)),
    ),
    _shape_row(
        "split",
        lambda rows: of((rows, HIDDEN), 4),
        of((3, 6), 2, 1),
        _special(3),
        rows=of((9, 5), 3),
        at_places=of((9, 5), [2, 2, 7]),
    ),
    _shape_row(
        "pad",
        lambda rows: of((rows, HIDDEN), ((0, 8), (8, 0))),
        of((2, 3), ((1, 0), (0, 2))),
        lambda draw: call(draw.special(), ((2, 1),), np.nan),
        another_value=of((3, 5), ((0, 1), (2, 3)), 1),
    ),
    _shape_row(
        "slice_axis",
        lambda rows: of((2 * rows, HIDDEN), 0, 0, rows),
        of((3, 5), 1, 1, 4, 2),
        _special(0, 0, 3),
        rows=of((9, 5), 0, 2, 7),
    ),
    _shape_row(
        "flip",
        lambda rows: of((rows, HIDDEN), 1),
        of((3, 5), 1),
        _special((0,)),
    ),
    _shape_row(
        "broadcast_to",
        lambda rows: of((1, HIDDEN), (rows, HIDDEN)),
        of((1, 3), (2, 3)),
        _special((2, 3, 3)),
        rows=of((5,), (3, 5)),
    ),
    _ASTYPE,
    _ONE_HOT,
    *_MADE,
)


# Optimizers


def _states(count: int, shapes: tuple[tuple[int, ...], ...] = _SHAPES, **options: Any) -> Make:
    """Parameters, gradients and `count` states; a second state holds squares."""

    def make(draw: Draw) -> Call:
        lists = [[draw.normal(*shape) for shape in shapes] for _ in range(min(count, 1) + 2)]
        if count == 2:
            lists.append([draw.uniform(0.01, 1, *shape) for shape in shapes])
        return call(*lists, **options)

    return make


def _unchanged_by(make: Make, odd: Sequence[float] = (np.nan, np.inf, -np.inf)) -> Make:
    """Set gradients and states to zero, and a few gradients to NaN or infinity."""

    def drawn(draw: Draw) -> Call:
        made = make(draw)
        parameters, gradients, *states = made.arguments
        zero_gradients = [array * 0 for array in gradients]
        zero_gradients[1][: len(odd)] = odd
        zeros = [s if not isinstance(s, list) else [array * 0 for array in s] for s in states]
        return call(parameters, zero_gradients, *zeros, **made.options)

    return drawn


def _adam(
    step: Any,
    shapes: tuple[tuple[int, ...], ...] = _SHAPES,
    *,
    fresh: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Make:
    def make(draw: Draw) -> Call:
        parameters, gradients, *states = _states(2, shapes)(draw).arguments
        if scale is not None:
            gradients = [(array * scale).astype(array.dtype) for array in gradients]
        if fresh:
            states = [[array * 0 for array in state] for state in states]
        return call(parameters, gradients, *states, step, rate=0.01, **options)

    return make


def _update(op: str, cases: tuple[Case, ...], timed: Callable[..., Make], operations: int) -> Row:
    return Row(
        op,
        cases,
        budget=budgets.of_update,
        gpu={"4,096 × 4096": timed(((4096, 4096),))},
        cpu={"256 × 4096": timed(((256, 4096),))},
        operations=per_element(operations),
    )


_FIVE = np.array(5, np.int32)
_NOT_HALF = ("float32", "bfloat16", "float64")
"""The dtypes that hold 1e-8."""

UPDATES: tuple[Row, ...] = (
    _update(
        "update_sgd",
        (
            Case("with momentum", _states(1, rate=0.1, momentum=0.9, decay=0.01)),
            Case(
                "without velocities",
                lambda draw: call(*_states(0)(draw).arguments, None, rate=0.1, decay=0.01),
            ),
            Case("Nesterov", _states(1, rate=0.1, momentum=0.9, nesterov=True)),
            Case(
                "Nesterov with decay",
                _states(1, rate=0.1, momentum=0.9, decay=0.1, nesterov=True),
            ),
            Case("velocities alone", _states(1, rate=0.1)),
            Case("a million", _states(1, _MILLION, rate=0.1, momentum=0.9, decay=0.01), LARGE),
            Case("many", _states(1, _MANY, rate=0.1, momentum=0.9), LARGE),
            Case("elements that lie apart", _states(1, rate=0.1, momentum=0.9), strided=True),
            Case("zeros, nan and infinities", _unchanged_by(_states(1, rate=0.1, momentum=0.9))),
        ),
        partial(_states, 1, rate=0.1, momentum=0.9),
        operations=4,
    ),
    _update(
        "update_adam",
        (
            Case("AdamW, step 7", _adam(7, decay=0.1)),
            Case("the first step", _adam(1, fresh=True)),
            Case("step 10,000", _adam(10000)),
            Case("Adam with decay", _adam(3, decay=0.1, decoupled=False)),
            Case("the step as an array", _adam(_FIVE, beta1=0.8, beta2=0.95, eps=1e-6)),
            Case("small beside eps", _adam(1, fresh=True, scale=1e-8), _NOT_HALF),
            Case("step 1,000,000", _adam(1000000)),
            Case("a million", _adam(7, _MILLION, decay=0.1), LARGE),
            Case(
                "a million, Adam with decay", _adam(7, _MILLION, decay=0.1, decoupled=False), LARGE
            ),
            Case("many", _adam(7, _MANY), LARGE),
            Case("elements that lie apart", _adam(7), strided=True),
            # On NVIDIA cards, PyTorch makes NaN of means and squares that would be infinite.
            Case("zeros and nan", _unchanged_by(_adam(7), [np.nan])),
        ),
        partial(_adam, 7),
        operations=12,
    ),
    _update(
        "update_lion",
        (
            Case("with decay", _states(1, rate=0.01, decay=0.1)),
            Case("without decay", _states(1, rate=0.01, beta1=0.95, beta2=0.98)),
            Case("a million", _states(1, _MILLION, rate=0.01, decay=0.1), LARGE),
            Case("many", _states(1, _MANY, rate=0.01), LARGE),
            Case("elements that lie apart", _states(1, rate=0.01), strided=True),
            Case("zeros, nan and infinities", _unchanged_by(_states(1, rate=0.01))),
        ),
        partial(_states, 1, rate=0.01),
        operations=6,
    ),
)


TABLE: Mapping[str, Row] = {
    row.op: row
    for row in (*LAYERS, *QUANTIZED, *ATTENTION, *ALONG_AXES, *MANIPULATION, *ELEMENTWISE, *UPDATES)
}


def row_of(op: str) -> Row:
    """Return the row of an op, or raise `ConfigurationError` with the name that was meant."""
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
    """Return the named rows and dtypes; all rows of the table if none are named.

    Raises `ConfigurationError` for an unknown name, and if no row has any of the dtypes.

    >>> rows, dtypes = select("argmax", "float32")
    >>> [row.op for row in rows], dtypes
    (['argmax'], ['float32'])
    """
    named, wanted = one_or_more(ops), one_or_more(dtypes)
    every = TABLE.values() if table is None else table
    rows = list(every) if named is None else [row_of(op) for op in named]
    kinds = None if wanted is None else [as_dtype(dtype).name for dtype in wanted]
    if any(kinds is None or dtype in kinds for row in rows for dtype in row.dtypes):
        return rows, kinds
    had = ", ".join(dict.fromkeys(dtype for row in rows for dtype in row.dtypes))
    if not had or not kinds:
        raise ConfigurationError(
            "the list of ops or of dtypes is empty, so there is nothing to do; leave the argument "
            "out to take all of them",
            "ops" if not had else "dtypes",
        )
    names = ", ".join(row.op for row in rows) if len(rows) <= _NAMED else f"these {len(rows)} ops"
    lack, have = ("has", "it has") if len(rows) == 1 else ("have", "they have")
    raise ConfigurationError(f"{names} {lack} no case in {', '.join(kinds)}; {have} {had}", "dtype")


def one_or_more(names: _Name | Sequence[_Name] | None) -> list[_Name] | None:
    """Return the names as a list; a single name becomes a list of one.

    >>> one_or_more("softmax"), one_or_more(["add", "exp"]), one_or_more(None)
    (['softmax'], ['add', 'exp'], None)
    """
    if names is None:
        return None
    return [names] if isinstance(names, str | Device) else list(names)
