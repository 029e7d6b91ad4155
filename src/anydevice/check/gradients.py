"""Are an engine's gradients right? They are compared with central differences of the reference.

The number that is differentiated is a sum of an op's first result, each element with a weight of
its own. Steps of 1e-5 in float64 give ten digits, more than any type under test but float64 needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anydevice import ops
from anydevice.check import reference
from anydevice.check.case import Call, Draw, Row
from anydevice.check.comparing import Difference, compare, computing_unit, leaves
from anydevice.check.runners import scope_of
from anydevice.check.trials import mapped, place, widened
from anydevice.core.device import Device
from anydevice.core.dtypes import DTYPES
from anydevice.core.engine import Absent, Engine
from anydevice.core.record import Record

Array = Any
CASE = "small arguments"

_STEP = 1e-5
_ALLOWED = {"float16": 2.0**-7, "bfloat16": 2.0**-4, "float32": 2.0**-16, "float64": 1e-8}
"""How far off a gradient may be, as a part of the largest one by the same argument.

Sixteen roundings in 16 bits, and 256 in float32: a forgotten factor or term is far more.
"""


_COMPILES_EACH_STEP = ("jax",)
"""Engines that compile every step of a function unless they are given it whole.

A gradient has many, and is asked for inside of compiled code there.
"""


class Slope(Record):
    """Small arguments of an op, and the gradient by each floating one."""

    row: Row
    dtype: str
    call: Call
    weights: Array
    wants: list[Array]


def prepare(row: Row, dtype: str, seed: int = 0) -> Slope:
    """Draw the arguments for an op's gradient and compute it from the reference."""
    assert row.gradient is not None
    draw = Draw(DTYPES[dtype], f"{row.op} gradient", seed)
    made = row.gradient(draw)
    wide = mapped(made, widened)
    shape = np.shape(next(leaves(reference.call(row.op, *wide.arguments, **wide.options))))
    # Quarters, which every type holds exactly.
    weights = np.where(draw.chance(*shape), 1.0, -1.0) + draw.integers(-2, 3, *shape) / 4

    def value() -> float:
        result = next(leaves(reference.call(row.op, *wide.arguments, **wide.options)))
        return float(np.sum(result * weights))

    wants = [_differences(array, value) for array in _floating(wide)]
    return Slope(row, dtype, made, weights, wants)


def run(slope: Slope, engine: Engine, device: Device) -> str | Difference | None:
    """Let an engine differentiate: what is wrong with its gradients, if anything.

    Raises `UnsupportedError` where it has none, and whatever else the engine raises.
    """
    autodiff = engine.autodiff
    if isinstance(autodiff, Absent):
        raise autodiff.error()
    kind = slope.row.gives(slope.dtype, slope.call)[0]
    weights = engine.place(slope.weights.astype(DTYPES[kind].numpy()), device)
    placed = mapped(slope.call, lambda x: place(x, engine, device))
    by = [_holds_numbers(value) for value in slope.call.arguments]
    first = [value for value, counts in zip(placed.arguments, by, strict=True) if counts]

    def value(arrays: list[Any]) -> Any:
        left = iter(arrays)
        arguments = [
            next(left) if counts else value
            for value, counts in zip(placed.arguments, by, strict=True)
        ]
        result = next(leaves(getattr(ops, slope.row.op)(*arguments, **placed.options)))
        return ops.sum(ops.multiply(result, weights))

    differentiated = autodiff.value_and_grad(value)
    compiler = engine.compiler
    if engine.name in _COMPILES_EACH_STEP and not isinstance(compiler, Absent):
        differentiated = compiler.compile(differentiated)
    with scope_of(engine, device):
        _, gradients = differentiated(first)
    return _judged(slope, [engine.to_host(each) for each in leaves(gradients)])


def _judged(slope: Slope, got: list[Array]) -> str | Difference | None:
    if len(got) != len(slope.wants):
        return f"gave {len(got)} gradients instead of {len(slope.wants)}"
    for array, want in zip(got, slope.wants, strict=True):
        if array.shape != want.shape or array.dtype.name != slope.dtype:
            here, there = f"{array.dtype.name} {array.shape}", f"{slope.dtype} {want.shape}"
            return f"gave a gradient of {here} instead of {there}"
        part = max(_ALLOWED[slope.dtype], _ALLOWED[slope.row.inside or slope.dtype])
        part *= max(1.0, float(np.abs(want).max()))
        wrong = compare(array, [want], part / computing_unit(slope.dtype), slope.dtype, slope.dtype)
        if wrong is not None:
            return wrong
    return None


def _differences(array: Array, value: Any) -> Array:
    """How fast `value()` grows by each element of an array that it reads."""
    slopes = np.empty(array.shape)
    for at in np.ndindex(array.shape):
        here = array[at]
        array[at] = here + _STEP
        above = value()
        array[at] = here - _STEP
        slopes[at] = (above - value()) / (2 * _STEP)
        array[at] = here
    return slopes


def _floating(wide: Call) -> list[Array]:
    return [x for x in leaves(list(wide.arguments)) if _holds_numbers(x)]


def _holds_numbers(value: Any) -> bool:
    """Whether an argument is a floating-point array, or a list of such."""
    first = value[0] if isinstance(value, list) else value
    return isinstance(first, np.ndarray) and first.dtype.kind not in "biu"
