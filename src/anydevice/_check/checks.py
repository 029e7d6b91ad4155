"""One case of one op with its arguments and expected result, ready to run on any engine.

The reference is computed once and compared with every engine's result. Gradients are compared with
central differences of the reference: the number that is differentiated is a sum of an op's first
result, each element with a weight of its own. Steps of 1e-5 in float64 give ten digits, more than
any dtype under test but float64 needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf
from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._check import reference
from anydevice._check.cases.case import SMALLEST_NORMAL, Call, Case, Draw, Row
from anydevice._check.cases.drawn import as_drawn
from anydevice._check.compare import ROUNDING_UNIT, Difference, compare, computing_unit, leaves
from anydevice._check.runners import scope_of
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import Record, replace

Array = np.ndarray[Any, Any]

GRADIENT_CASE = "small arguments"

SHRINKING_SECONDS = 1.0
"""The longest time for making a call smaller."""

_STEP = 1e-5
_ALLOWED = {"float16": 2.0**-7, "bfloat16": 2.0**-4, "float32": 2.0**-16, "float64": 1e-8}
"""Allowed error of a gradient, in parts of the largest: less than a forgotten factor or term."""

_CONSUMING = ("cache_write",)
"""Ops that may write to their arguments."""

_COMPILES_EACH_STEP = ("jax",)
"""Engines that compile each step of a gradient separately, unless the whole is compiled."""


class Trial(Record):
    """The arguments of a case in one dtype, and the results that an engine must give.

    `wants` has a list of results for each reference that is right; `budgets` and `types` have one
    entry for each result.
    """

    row: Row
    case: Case
    dtype: str
    call: Call
    wants: tuple[list[Array], ...]
    budgets: list[Array]
    types: list[str]


class GradientTrial(Record):
    """Small arguments of an op, and the gradient by each floating-point one."""

    row: Row
    dtype: str
    call: Call
    weights: Array
    wants: list[Array]


def prepare(row: Row, case: Case, dtype: str) -> Trial:
    """Draw the arguments of a case and compute what must come out."""
    made = row.draw(case, dtype)
    want = _reference(row, made)
    wants = [want]
    if case.denormal:
        wants.append(_reference(row, mapped(made, lambda x: _flush_subnormals(x, dtype))))
    comparable = [list(leaves(_comparable(row, wanted, made))) for wanted in wants]
    types = list(row.gives(dtype, made))
    types += types[-1:] * (len(comparable[0]) - len(types))
    wide = mapped(made, widened)
    coarse = ROUNDING_UNIT.get(dtype, 0.0) / computing_unit(row.inside or dtype)
    with np.errstate(all="ignore"):
        budgets = list(leaves(row.budget(want, coarse, *wide.arguments, **wide.options)))
    return Trial(row, case, dtype, made, tuple(comparable), budgets, types)


def run(trial: Trial, engine: Engine, device: Device) -> str | Difference | None:
    """Compute a trial; return what is wrong with its results, or `None`. Raises engines' errors."""
    layout = trial.case.layout if trial.case.strided else ""
    result = compute(trial.row, trial.call, engine, device, layout)
    for x in leaves(result):
        if not engine.owns(x):
            return f"gave a {type(x).__module__}.{type(x).__name__}, not an array of {engine.name}"
        here = engine.devices_of(x)
        if device not in here:
            return f"the result is on {', '.join(map(str, here)) or 'no known device'}"
    got = list(leaves(_comparable(trial.row, _read(result, engine), trial.call)))
    if len(got) != len(trial.types):
        return f"gave {len(got)} arrays instead of {len(trial.types)}"
    for number, array in enumerate(got):
        wrong = _judge(trial, number, array)
        if wrong is not None:
            return wrong
    return None


def run_twice(trial: Trial, engine: Engine, device: Device) -> str | Difference | None:
    """Run a trial, then with other numbers of the same shapes, beside arrays of a first call."""
    placed: list[Any] = []

    def put(x: Array) -> Any:
        placed.append(place(x, engine, device))
        return placed[-1]

    def read(arrays: Sequence[Any]) -> list[bytes]:
        return [np.array(engine.to_host(x)).tobytes() for x in arrays]

    if (problem := run(trial, engine, device)) is not None:
        return problem
    made = mapped(trial.call, lambda x: np.flip(x, 0).copy() if x.ndim else x)
    other = prepare(trial.row, replace(trial.case, make=partial(as_drawn, made)), trial.dtype)
    with scope_of(engine, device):
        given = mapped(trial.call, put)
        before = read(placed)
        results = list(leaves(getattr(ops, trial.row.op)(*given.arguments, **given.options)))
        first = read(results)
        problem = run(other, engine, device)
        if read(results) != first:
            return "a later call changed the result"
        if read(placed) != before and trial.row.op not in _CONSUMING:
            return "it changed its arguments"
    return problem


def run_draw(
    trial: Trial, engine: Engine, device: Device, ends: float = inf
) -> str | Difference | None:
    """Run a trial; describe a fault in the smallest such call (delta debugging: Zeller, 1999)."""
    problem = run(trial, engine, device)
    ends = min(ends, time.monotonic() + SHRINKING_SECONDS)
    sizes = {size for x in trial.call.arrays() for size in x.shape if size > 1 and problem}
    for size, half in product(sorted(sizes, reverse=True), (0, 1)):
        made = mapped(trial.call, partial(_halve, size, half))
        case = replace(trial.case, make=partial(as_drawn, made))
        with suppress(Exception):  # sizes that do not fit each other
            smaller = run_draw(prepare(trial.row, case, trial.dtype), engine, device, ends)
            if smaller is not None or time.monotonic() > ends:
                return smaller or problem
    text = trial.call.describe(trial.row.op)
    return replace(problem, call=text) if isinstance(problem, Difference) else problem


def _halve(size: int, half: int, x: Array) -> Array:
    """Cut all axes of one size to their first half, or their second."""
    part = slice(size // 2, None) if half else slice(size // 2)
    return x[tuple(part if n == size else slice(None) for n in x.shape)]


def compute(row: Row, made: Call, engine: Engine, device: Device, layout: str = "") -> Any:
    """Run an op on a device; returns the result of its engine, and raises its errors."""
    with scope_of(engine, device):
        placed = mapped(made, lambda x: _place_as(layout, x, engine, device))
        function = row.function or getattr(ops, row.op)
        return function(*placed.arguments, **placed.options)


def prepare_gradient(row: Row, dtype: str) -> GradientTrial:
    """Draw the arguments for an op's gradient and compute it from the reference."""
    assert row.gradient is not None
    draw = Draw(DTYPES[dtype], f"{row.op} gradient")
    made = row.gradient(draw)
    wide = mapped(made, widened)
    shape = np.shape(next(leaves(reference.call(row.op, *wide.arguments, **wide.options))))
    # Quarters, which every type holds exactly.
    weights = np.where(draw.chance(*shape), 1.0, -1.0) + draw.integers(-2, 3, *shape) / 4

    def value() -> float:
        result = next(leaves(reference.call(row.op, *wide.arguments, **wide.options)))
        return float(np.sum(result * weights))

    wants = [_differences(x, value) for x in leaves(list(wide.arguments)) if _is_floating(x)]
    return GradientTrial(row, dtype, made, weights, wants)


def run_gradient(trial: GradientTrial, engine: Engine, device: Device) -> str | Difference | None:
    """Differentiate on a device; return what is wrong with the gradients, or `None`.

    Raises `UnsupportedError` if it has none, and whatever else the engine raises.
    """
    autodiff = engine.autodiff
    if isinstance(autodiff, Absent):
        raise autodiff.error()
    kind = trial.row.gives(trial.dtype, trial.call)[0]
    weights = engine.place(trial.weights.astype(DTYPES[kind].numpy()), device)
    placed = mapped(trial.call, lambda x: place(x, engine, device))
    by = [_is_floating(value) for value in trial.call.arguments]
    first = [value for value, counts in zip(placed.arguments, by, strict=True) if counts]

    def value(arrays: list[Any]) -> Any:
        left = iter(arrays)
        arguments = [
            next(left) if counts else value
            for value, counts in zip(placed.arguments, by, strict=True)
        ]
        result = next(leaves(getattr(ops, trial.row.op)(*arguments, **placed.options)))
        return ops.sum(ops.multiply(result, weights))

    differentiated = autodiff.value_and_grad(value)
    compiler = engine.compiler
    if engine.name in _COMPILES_EACH_STEP and not isinstance(compiler, Absent):
        differentiated = compiler.compile(differentiated)
    with scope_of(engine, device):
        _, gradients = differentiated(first)
    return _judge_gradients(trial, [engine.to_host(gradient) for gradient in leaves(gradients)])


def place(x: Array, engine: Engine, device: Device) -> Any:
    """Copy an array to the device; integers may become shorter ones."""
    return engine.place(x, device, narrow=x.dtype.kind in "iu")


def _place_as(layout: str, x: Array, engine: Engine, device: Device) -> Any:
    """Copy an array into a layout; transposed, of three axes the last one stays contiguous."""
    if not (layout and x.ndim) or (layout == "transposed" and x.ndim < 2):
        return place(x, engine, device)
    if layout == "reversed":
        return ops.flip(place(np.flip(x).copy(), engine, device))
    if layout != "transposed":  # x lies in a larger array
        axis, step = (0 if layout == "offset" else -1), (2 if layout == "stepped" else 1)
        twice = np.repeat(x, 2, axis) if step == 2 else np.concatenate([x, x], axis)
        size = x.shape[axis]
        start, stop = (size, 2 * size) if layout == "offset" else (0, step * size)
        return ops.slice_axis(place(twice, engine, device), axis, start, stop, step)
    axes = list(range(x.ndim))
    one = -3 if x.ndim > 2 else -1
    axes[one], axes[-2] = axes[-2], axes[one]
    turned = np.ascontiguousarray(np.transpose(x, axes))
    return ops.permute(place(turned, engine, device), axes)


def widened(x: Array) -> Array:
    """Return the same numbers as float64, int64 or bool, exactly, for the reference."""
    return x if x.dtype == bool else x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)


def _reference(row: Row, made: Call) -> Any:
    wide = mapped(made, widened)
    if row.reference is not None:
        return row.reference(*wide.arguments, **wide.options)
    return reference.call(row.op, *wide.arguments, **wide.options)


def _judge(trial: Trial, number: int, got: Array) -> str | Difference | None:
    kind, shape = trial.types[number], np.shape(trial.wants[0][number])
    if got.dtype.name != kind:
        return f"gave {got.dtype.name} instead of {kind}"
    if got.shape != shape:
        return f"gave the shape {got.shape} instead of {shape}"
    # The results that `comparable` adds are exact.
    budget = trial.budgets[number] if number < len(trial.budgets) else 0.0
    wants = [want[number] for want in trial.wants]
    return compare(got, wants, budget, trial.row.inside or trial.dtype, kind, trial.row.signs)


def _comparable(row: Row, result: Any, made: Call) -> Any:
    return result if row.comparable is None else row.comparable(result, made)


def _read(result: Any, engine: Engine) -> Any:
    if isinstance(result, list | tuple):
        return [_read(part, engine) for part in result]
    return None if result is None else engine.to_host(result)


def _flush_subnormals(x: Array, dtype: str) -> Array:
    if x.dtype.kind in "biu":
        return x
    return np.where(np.abs(x) < SMALLEST_NORMAL[dtype], np.copysign(x.dtype.type(0), x), x)


def mapped(made: Call, change: Callable[[Array], Any]) -> Call:
    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(part) for part in value]
        if isinstance(value, QuantizedWeight):
            return value.with_arrays({name: change(x) for name, x in value.arrays.items()})  # type: ignore[arg-type]
        return change(value) if isinstance(value, np.ndarray) else value

    return Call(
        tuple(changed(value) for value in made.arguments),
        {name: changed(value) for name, value in made.options.items()},
    )


def _judge_gradients(trial: GradientTrial, got: list[Array]) -> str | Difference | None:
    if len(got) != len(trial.wants):
        return f"gave {len(got)} gradients instead of {len(trial.wants)}"
    for array, want in zip(got, trial.wants, strict=True):
        if array.shape != want.shape or array.dtype.name != trial.dtype:
            here, there = f"{array.dtype.name} {array.shape}", f"{trial.dtype} {want.shape}"
            return f"gave a gradient of {here} instead of {there}"
        part = max(_ALLOWED[trial.dtype], _ALLOWED[trial.row.inside or trial.dtype])
        part *= max(1.0, float(np.abs(want).max()))
        wrong = compare(array, [want], part / computing_unit(trial.dtype), trial.dtype, trial.dtype)
        if wrong is not None:
            return wrong
    return None


def _differences(array: Array, value: Any) -> Array:
    """Return the central differences of `value()` by each element of an array that it reads."""
    slopes = np.empty(array.shape)
    for at in np.ndindex(array.shape):
        here = array[at]
        array[at] = here + _STEP
        above = value()
        array[at] = here - _STEP
        slopes[at] = (above - value()) / (2 * _STEP)
        array[at] = here
    return slopes


def _is_floating(value: Any) -> bool:
    """Whether an argument is a floating-point array, or a list of such."""
    first = value[0] if isinstance(value, list) else value
    return isinstance(first, np.ndarray) and first.dtype.kind not in "biu"
