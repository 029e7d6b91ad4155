"""Cases of the optimizers' updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydevice.check import budgets
from anydevice.check.drawing import Call, Draw, call
from anydevice.check.rows import Benchmark, Case, Make, Row, per_element

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
