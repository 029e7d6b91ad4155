"""The reference of the optimizers' updates: float64 NumPy, written from their papers' definitions.

Each takes lists of arrays and gives lists; see `check/reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = Any
Arrays = Sequence[Array]


def _sgd(
    parameters: Arrays,
    gradients: Arrays,
    velocities: Arrays | None,
    *,
    rate: float,
    momentum: float = 0.0,
    decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[list[Array], list[Array] | None]:
    forces = [g + decay * p for p, g in zip(parameters, gradients, strict=True)]
    if velocities is None:
        moved = [p - rate * force for p, force in zip(parameters, forces, strict=True)]
        return moved, None
    faster = [momentum * v + force for v, force in zip(velocities, forces, strict=True)]
    ahead = zip(forces, faster, strict=True)
    steps = [force + momentum * v if nesterov else v for force, v in ahead]
    return [p - rate * step for p, step in zip(parameters, steps, strict=True)], faster


def _adam(
    parameters: Arrays,
    gradients: Arrays,
    means: Arrays,
    squares: Arrays,
    step: Any,
    *,
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 0.0,
    decoupled: bool = True,
) -> tuple[list[Array], list[Array], list[Array]]:
    moved, new_means, new_squares = [], [], []
    for p, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
        g = gradient if decoupled else gradient + decay * p
        m = beta1 * mean + (1 - beta1) * g
        v = beta2 * square + (1 - beta2) * g**2
        update = m / (1 - beta1 ** float(step)) / (np.sqrt(v / (1 - beta2 ** float(step))) + eps)
        shrunk = p - rate * decay * p if decoupled else p
        moved.append(shrunk - rate * update)
        new_means.append(m)
        new_squares.append(v)
    return moved, new_means, new_squares


def _lion(
    parameters: Arrays,
    gradients: Arrays,
    means: Arrays,
    *,
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    decay: float = 0.0,
) -> tuple[list[Array], list[Array]]:
    moved, new_means = [], []
    for p, g, m in zip(parameters, gradients, means, strict=True):
        direction = np.sign(beta1 * m + (1 - beta1) * g)
        moved.append(p - rate * (direction + decay * p))
        new_means.append(beta2 * m + (1 - beta2) * g)
    return moved, new_means


UPDATES: Mapping[str, Callable[..., Any]] = {
    "update_sgd": _sgd,
    "update_adam": _adam,
    "update_lion": _lion,
}
