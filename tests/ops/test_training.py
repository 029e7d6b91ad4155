"""The steps of optimizers against those of torch, over several steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from tests.comparing import rounding
from tests.refusals import refuses

Array = np.ndarray[Any, Any]
STEPS = 6


def start() -> tuple[list[Array], list[list[Array]]]:
    """Parameters, and the gradients of each step."""
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(3, 4), (5,), ()]
    parameters = [np.asarray(rng.normal(size=shape)) for shape in shapes]
    gradients = [[np.asarray(rng.normal(size=shape)) for shape in shapes] for _ in range(STEPS)]
    return parameters, gradients


def by_torch(make: Callable[[Any], Any]) -> list[Array]:
    import torch

    parameters, gradients = start()
    theirs = [torch.nn.Parameter(torch.from_numpy(each.copy())) for each in parameters]
    optimizer = make(theirs)
    for step in gradients:
        for parameter, gradient in zip(theirs, step, strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return [each.detach().numpy() for each in theirs]


def zeros(parameters: list[Array]) -> list[Array]:
    return [np.zeros_like(each) for each in parameters]


def close(ours: list[Array], theirs: list[Array]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_is_that_of_torch(momentum: float, decay: float, nesterov: bool) -> None:
    import torch

    theirs = by_torch(
        lambda p: torch.optim.SGD(
            p, lr=0.1, momentum=momentum, weight_decay=decay, nesterov=nesterov
        )
    )
    parameters, gradients = start()
    velocities: Any = zeros(parameters) if momentum else None
    for step in gradients:
        parameters, velocities = ops.update_sgd(
            parameters,
            step,
            velocities,
            rate=0.1,
            momentum=momentum,
            decay=decay,
            nesterov=nesterov,
        )
    close(parameters, theirs)
    assert (velocities is None) == (not momentum)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("counted", [int, np.array], ids=["number", "array"])
def test_adam_is_that_of_torch(
    decay: float, decoupled: bool, counted: Callable[[int], Any]
) -> None:
    import torch

    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = by_torch(lambda p: kind(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay))
    parameters, gradients = start()
    means, squares = zeros(parameters), zeros(parameters)
    for count, step in enumerate(gradients, 1):
        parameters, means, squares = ops.update_adam(
            parameters,
            step,
            means,
            squares,
            counted(count),
            rate=0.01 if counted is int else np.array(0.01),
            beta1=0.8,
            beta2=0.95,
            eps=1e-6,
            decay=decay,
            decoupled=decoupled,
        )
    close(parameters, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_its_formula(decay: float) -> None:
    parameters, gradients = start()
    expected, memory = [each.copy() for each in parameters], zeros(parameters)
    means = zeros(parameters)
    for step in gradients:
        parameters, means = ops.update_lion(parameters, step, means, rate=0.01, decay=decay)
        for at, gradient in enumerate(step):
            direction = np.sign(0.9 * memory[at] + 0.1 * gradient)
            expected[at] = expected[at] - 0.01 * (direction + decay * expected[at])
            memory[at] = 0.99 * memory[at] + 0.01 * gradient
    close(parameters, expected)
    close(means, memory)


def test_an_array_that_counts_loses_no_digits_in_float32() -> None:
    one, zero = [np.ones(1, np.float32)], [np.zeros(1, np.float32)]
    for step in (1, 2, 1000, 100_000):
        by_number = ops.update_adam(zero, one, zero, zero, step, rate=1.0)[0][0]
        by_array = ops.update_adam(zero, one, zero, zero, np.array(step), rate=1.0)[0][0]
        np.testing.assert_allclose(by_array, by_number, rtol=rounding(np.float32, 10))
    forgetful = ops.update_adam(zero, one, zero, zero, np.array(3), rate=1.0, beta1=0.0)
    assert forgetful[0][0] == pytest.approx(
        -math.sqrt((1 - 0.999**3) / 0.001), rel=rounding(np.float32, 10)
    )


def test_each_result_has_the_type_of_what_it_replaces() -> None:
    half = [np.ones(3, ml_dtypes.bfloat16)]
    full = [np.zeros(3, np.float32)]
    parameters, means, squares = ops.update_adam(half, half, full, full, 1, rate=1e-3)
    assert [each[0].dtype for each in (parameters, means, squares)] == [
        ml_dtypes.bfloat16,
        np.float32,
        np.float32,
    ]
    parameters, kept = ops.update_sgd(half, full, full, rate=np.array(0.5), momentum=0.5)
    assert kept is not None
    assert (parameters[0].dtype, kept[0].dtype) == (ml_dtypes.bfloat16, np.float32)
    parameters, means = ops.update_lion(half, half, full, rate=np.array(0.25), decay=0.5)
    assert parameters[0].astype(float).tolist() == [0.625] * 3
    mixed = ops.update_adam(
        [*half, np.ones(2)],
        [*half, np.ones(2)],
        [*full, np.zeros(2)],
        [*full, np.zeros(2)],
        1,
        rate=0.1,
    )
    assert [each.dtype for each in mixed[0]] == [ml_dtypes.bfloat16, np.float64]


def test_nothing_given_is_changed() -> None:
    parameters, gradients = start()
    means, squares = zeros(parameters), zeros(parameters)
    before = [each.copy() for each in parameters]
    ops.update_adam(parameters, gradients[0], means, squares, 1, rate=0.1, decay=0.1)
    ops.update_sgd(parameters, gradients[0], means, rate=0.1, momentum=0.9)
    ops.update_lion(parameters, gradients[0], means, rate=0.1)
    close(parameters, before)
    assert not any(each.any() for each in (*means, *squares))


def test_no_parameters() -> None:
    assert ops.update_sgd([], [], None, rate=0.1) == ([], None)
    assert ops.update_sgd([], [], [], rate=0.1) == ([], [])
    assert ops.update_adam([], [], [], [], 1, rate=0.1) == ([], [], [])
    assert ops.update_lion([], [], [], rate=0.1) == ([], [])


def test_what_does_not_fit_is_named() -> None:
    one, two = [np.ones(2)], [np.ones(2), np.ones(3)]
    refuses(
        "momentum needs velocities; start with zeros",
        ops.update_sgd,
        one,
        one,
        None,
        rate=0.1,
        momentum=0.9,
    )
    refuses("1 parameters and 2 gradients", ops.update_sgd, one, two, None, rate=0.1)
    refuses(
        r"means\[0\] must have the shape .*it is \(3,\)",
        ops.update_lion,
        one,
        one,
        two[1:],
        rate=0.1,
    )
    refuses("of type NoneType", ops.update_adam, one, [None], one, one, 1, rate=0.1)
