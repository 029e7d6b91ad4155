"""One case of one op, ready to be run anywhere: its arguments and what must come out.

The reference is computed once and compared with every engine's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.check import reference
from anydevice.check.case import SMALLEST_NORMAL, Call, Case, Row
from anydevice.check.comparing import ROUNDING_UNIT, Difference, compare, computing_unit, leaves
from anydevice.check.runners import scope_of
from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.core.record import Record

Array = Any


class Trial(Record):
    """The arguments of a case in one dtype, and what an engine is measured by.

    `wants` has one list of results for each reference that may be met; `budgets` and `types` have
    one entry for each result.
    """

    row: Row
    case: Case
    dtype: str
    call: Call
    wants: tuple[list[Array], ...]
    budgets: list[Array]
    types: list[str]


def prepare(row: Row, case: Case, dtype: str, seed: int = 0) -> Trial:
    """Draw the arguments of a case and compute what must come out."""
    made = row.draw(case, dtype, seed)
    want = _reference(row, made)
    wants = [want]
    if case.denormal:
        wants.append(_reference(row, mapped(made, lambda x: _flushed(x, dtype))))
    comparable = [list(leaves(_comparable(row, each, made))) for each in wants]
    types = list(row.gives(dtype, made))
    types += types[-1:] * (len(comparable[0]) - len(types))
    return Trial(row, case, dtype, made, tuple(comparable), _budgets(row, want, made, dtype), types)


def run(trial: Trial, engine: Engine, device: Device) -> str | Difference | None:
    """Let an engine compute a trial on a device: what is wrong with its results, if anything.

    Whatever the engine raises is raised.
    """
    put = _place_strided if trial.case.strided else place
    with scope_of(engine, device):
        placed = mapped(trial.call, lambda x: put(x, engine, device))
        result = getattr(ops, trial.row.op)(*placed.arguments, **placed.options)
    for array in leaves(result):
        problem = _misplaced(array, engine, device)
        if problem:
            return problem
    got = list(leaves(_comparable(trial.row, _read(result, engine), trial.call)))
    if len(got) != len(trial.types):
        return f"gave {len(got)} arrays instead of {len(trial.types)}"
    for number, array in enumerate(got):
        wrong = _judged(trial, number, array)
        if wrong is not None:
            return wrong
    return None


def place(x: Array, engine: Engine, device: Device) -> Any:
    """A copy of an array on the device; integers may become shorter ones."""
    return engine.place(x, device, narrow=x.dtype.kind in "iu")


def _place_strided(x: Array, engine: Engine, device: Device) -> Any:
    """The same, with elements that do not follow each other in memory, where it has two axes.

    The last axis stays as it is where there are three, as in heads that are cut from one product.
    """
    if x.ndim < 2:
        return place(x, engine, device)
    axes = list(range(x.ndim))
    one = -3 if x.ndim > 2 else -1
    axes[one], axes[-2] = axes[-2], axes[one]
    turned = np.ascontiguousarray(np.transpose(x, axes))
    return ops.permute(place(turned, engine, device), axes)


def widened(x: Array) -> Array:
    """The same numbers as float64, int64 or bool: exact, and what the reference works with."""
    return x if x.dtype == bool else x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)


def _reference(row: Row, made: Call) -> Any:
    wide = mapped(made, widened)
    return reference.call(row.op, *wide.arguments, **wide.options)


def _budgets(row: Row, want: Any, made: Call, dtype: str) -> list[Array]:
    wide = mapped(made, widened)
    coarse = ROUNDING_UNIT.get(dtype, 0.0) / computing_unit(row.inside or dtype)
    with np.errstate(all="ignore"):
        return list(leaves(row.budget(want, coarse, *wide.arguments, **wide.options)))


def _judged(trial: Trial, number: int, got: Array) -> str | Difference | None:
    kind, shape = trial.types[number], np.shape(trial.wants[0][number])
    if got.dtype.name != kind:
        return f"gave {got.dtype.name} instead of {kind}"
    if got.shape != shape:
        return f"gave the shape {got.shape} instead of {shape}"
    # What `comparable` adds beside the results is exact.
    budget = trial.budgets[number] if number < len(trial.budgets) else 0.0
    wants = [want[number] for want in trial.wants]
    return compare(got, wants, budget, trial.row.inside or trial.dtype, kind)


def _misplaced(x: Any, engine: Engine, device: Device) -> str | None:
    if not engine.owns(x):
        return f"gave a {type(x).__module__}.{type(x).__name__}, which is no array of {engine.name}"
    here = engine.devices_of(x)
    if device not in here:
        return f"the result is on {', '.join(map(str, here)) or 'no known device'}"
    return None


def _comparable(row: Row, result: Any, made: Call) -> Any:
    return result if row.comparable is None else row.comparable(result, made)


def _read(result: Any, engine: Engine) -> Any:
    if isinstance(result, list | tuple):
        return [_read(each, engine) for each in result]
    return None if result is None else engine.to_host(result)


def _flushed(x: Array, dtype: str) -> Array:
    return x if x.dtype.kind in "biu" else np.where(np.abs(x) < SMALLEST_NORMAL[dtype], x * 0, x)


def mapped(made: Call, change: Callable[[Array], Any]) -> Call:
    """The call with every array of it changed by a function."""

    def each(value: Any) -> Any:
        if isinstance(value, list):
            return [each(one) for one in value]
        return change(value) if isinstance(value, np.ndarray) else value

    return Call(
        tuple(each(value) for value in made.arguments),
        {name: each(value) for name, value in made.options.items()},
    )
