"""Optimizers' updates on JAX: one compiled program for a whole list.

The rate and the count of steps are arguments of the program, so that they may change at each step.
The other numbers are constants of it, and keep all of Python's digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Arrays = Sequence[Any]


def update_sgd(
    parameters: Arrays,
    gradients: Arrays,
    velocities: Arrays | None,
    rate: Any,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> Any:
    """The op of that name."""
    lists = [list(parameters), list(gradients), None if velocities is None else list(velocities)]
    return _sgd(*lists, rate, momentum, decay, nesterov)


def update_adam(
    parameters: Arrays,
    gradients: Arrays,
    means: Arrays,
    squares: Arrays,
    step: Any,
    rate: Any,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: bool,
) -> Any:
    """The op of that name."""
    lists = [list(arrays) for arrays in (parameters, gradients, means, squares)]
    return _adam(*lists, step, rate, beta1, beta2, eps, decay, decoupled)


def update_lion(
    parameters: Arrays,
    gradients: Arrays,
    means: Arrays,
    rate: Any,
    beta1: float,
    beta2: float,
    decay: float,
) -> Any:
    """The op of that name."""
    lists = [list(arrays) for arrays in (parameters, gradients, means)]
    return _lion(*lists, rate, beta1, beta2, decay)


def _wide(like: Any) -> Callable[[Any], Any]:
    """What brings an array or a number into the type in which `like` is computed."""
    kind = like.dtype if like.dtype == jnp.float64 else jnp.float32
    return lambda x: jnp.asarray(x).astype(kind)


@partial(jax.jit, static_argnums=(4, 5, 6), inline=True)
def _sgd(
    parameters: Any,
    gradients: Any,
    velocities: Any,
    rate: Any,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> Any:
    moved, kept = [], []
    for at, parameter in enumerate(parameters):
        wide = _wide(parameter)
        p, step = wide(parameter), wide(gradients[at])
        step = step + decay * p if decay else step
        if velocities is not None:
            velocity = momentum * wide(velocities[at]) + step
            kept.append(velocity.astype(velocities[at].dtype))
            step = step + momentum * velocity if nesterov else velocity
        moved.append((p - wide(rate) * step).astype(parameter.dtype))
    return moved, None if velocities is None else kept


@partial(jax.jit, static_argnums=(6, 7, 8, 9, 10), inline=True)
def _adam(
    parameters: Any,
    gradients: Any,
    means: Any,
    squares: Any,
    step: Any,
    rate: Any,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: bool,
) -> Any:
    moved, new_means, new_squares = [], [], []
    for at, parameter in enumerate(parameters):
        wide = _wide(parameter)
        p, g, pace, count = wide(parameter), wide(gradients[at]), wide(rate), wide(step)
        g = g if decoupled else g + decay * p
        mean = beta1 * wide(means[at]) + (1 - beta1) * g
        square = beta2 * wide(squares[at]) + (1 - beta2) * g * g
        change = mean / _grown(beta1, count) / (jnp.sqrt(square / _grown(beta2, count)) + eps)
        p = p - pace * decay * p if decoupled else p
        moved.append((p - pace * change).astype(parameter.dtype))
        new_means.append(mean.astype(means[at].dtype))
        new_squares.append(square.astype(squares[at].dtype))
    return moved, new_means, new_squares


@partial(jax.jit, static_argnums=(4, 5, 6), inline=True)
def _lion(
    parameters: Any,
    gradients: Any,
    means: Any,
    rate: Any,
    beta1: float,
    beta2: float,
    decay: float,
) -> Any:
    moved, kept = [], []
    for at, parameter in enumerate(parameters):
        wide = _wide(parameter)
        p, g, m = wide(parameter), wide(gradients[at]), wide(means[at])
        direction = jnp.sign(beta1 * m + (1 - beta1) * g)
        moved.append((p - wide(rate) * (direction + decay * p)).astype(parameter.dtype))
        kept.append((beta2 * m + (1 - beta2) * g).astype(means[at].dtype))
    return moved, kept


def _grown(beta: float, count: Any) -> Any:
    """`1 - beta**count`, without the digits that the difference would lose."""
    return -jnp.expm1(count * math.log(beta)) if beta else jnp.ones_like(count)
