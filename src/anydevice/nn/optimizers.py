"""Optimizers and schedules as frozen settings, and gradient clipping.

`init` returns the state of an optimizer, and `update` returns new parameters and a new state. Steps
count from 1; `step` and `rate` may be 0-d arrays, so that one compiled step works for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from anydevice import ops
from anydevice.core.trees import Tree, leaves, mapped, refilled
from anydevice.errors import ConfigurationError
from anydevice.nn.layer import (
    Settings,
    check_booleans,
    check_integers,
    check_numbers,
    is_number,
    setting_error,
)
from anydevice.ops.arguments import wide
from anydevice.ops.dispatch import primitives

Array = Any
Arrays = list[Array]
State = dict[str, Tree]


class Optimizer(Settings):
    """The base class of optimizers; `rate` is a number or a schedule.

    Your own optimizer defines `init` and `update`; `settings_fit` can check its fields.
    """

    rate: float | Schedule = 1e-3

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        if not isinstance(self.rate, Schedule):
            check_numbers(self, rate=self.rate)

    def rate_at(self, step: int) -> float:
        """The rate of a step, which counts from 1.

        Raises `ConfigurationError` if a schedule returns an invalid rate.
        """
        return rate_of(self.rate, step) if isinstance(self.rate, Schedule) else float(self.rate)

    def init(self, parameters: Tree) -> State:
        """The state before the first step: trees like the parameters, on the same device."""
        raise NotImplementedError(f"{type(self).__name__} has no init")

    def update(
        self,
        parameters: Tree,
        gradients: Tree,
        state: State,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, State]:
        """The parameters and the state after one step.

        Without `rate` it is that of `rate_at(step)`, for which the step must be a number.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update")


class _BuiltIn(Optimizer):
    """An optimizer whose step is one op over lists of arrays."""

    def _state_names(self) -> tuple[str, ...]:
        """The names of the trees of its state."""
        raise NotImplementedError

    def _moved(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        """The new parameters and trees of the state, given the old ones and the gradients."""
        raise NotImplementedError

    def init(self, parameters: Tree) -> State:
        return {name: zeros_like(parameters) for name in self._state_names()}

    def update(
        self,
        parameters: Tree,
        gradients: Tree,
        state: State,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, State]:
        names = self._state_names()
        trees = [parameters, gradients, *[state[name] for name in names]]
        rate = self.rate_at(step) if rate is None else rate
        new = self._moved([leaves(tree) for tree in trees], step, rate)
        moved, *states = [refilled(parameters, arrays) for arrays in new if arrays is not None]
        return moved, dict(zip(names, states, strict=True))


class SGD(_BuiltIn):
    """Stochastic gradient descent, with momentum if it is not 0.

    >>> import numpy
    >>> sgd, parameters = SGD(0.25), {"x": numpy.array([1.0])}
    >>> sgd.update(parameters, {"x": numpy.array([2.0])}, sgd.init(parameters), 1)[0]
    {'x': array([0.5])}
    """

    rate: float | Schedule = 1e-2
    momentum: float = 0.0
    decay: float = 0.0
    nesterov: bool = False

    def settings_fit(self) -> None:
        check_numbers(self, 1.0, momentum=self.momentum)
        check_numbers(self, decay=self.decay)
        check_booleans(self, nesterov=self.nesterov)
        if self.nesterov and not self.momentum:
            raise setting_error(self, "nesterov", "used with momentum, such as 0.9", True)

    def _state_names(self) -> tuple[str, ...]:
        return ("velocities",) if self.momentum else ()

    def _moved(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        parameters, gradients, *velocities = arrays
        return ops.update_sgd(
            parameters,
            gradients,
            velocities[0] if velocities else None,
            rate=rate,
            momentum=self.momentum,
            decay=self.decay,
            nesterov=self.nesterov,
        )


class Adam(_BuiltIn):
    """Adam; `decay` is L2 regularization, a multiple of the parameters added to the gradients."""

    rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0

    _decoupled = False

    def settings_fit(self) -> None:
        check_numbers(self, 1.0, beta1=self.beta1, beta2=self.beta2)
        check_numbers(self, eps=self.eps, decay=self.decay)

    def _state_names(self) -> tuple[str, ...]:
        return "means", "squares"

    def _moved(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        parameters, gradients, means, squares = arrays
        return ops.update_adam(
            parameters,
            gradients,
            means,
            squares,
            step,
            rate=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            decay=self.decay,
            decoupled=self._decoupled,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    rate: float | Schedule = 1e-3
    decay: float = 1e-2

    _decoupled = True


class Lion(_BuiltIn):
    """Lion: steps by the sign of the averaged gradient, with decoupled weight decay."""

    rate: float | Schedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    decay: float = 0.0

    def settings_fit(self) -> None:
        check_numbers(self, 1.0, beta1=self.beta1, beta2=self.beta2)
        check_numbers(self, decay=self.decay)

    def _state_names(self) -> tuple[str, ...]:
        return ("means",)

    def _moved(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        return ops.update_lion(
            *arrays, rate=rate, beta1=self.beta1, beta2=self.beta2, decay=self.decay
        )


def zeros_like(parameters: Tree) -> Tree:
    """A tree of zeros of the same shapes on the same devices: float64 for float64, else float32."""

    def zeros(parameter: Array) -> Array:
        xp = primitives(parameter)
        return xp.full(tuple(parameter.shape), 0, wide(xp.dtype(parameter)), parameter)

    return mapped(zeros, parameters)


class Schedule(Settings):
    """A rate for each step: called with the number of the step, which counts from 1.

    Your own schedule defines `__call__`; `settings_fit` can check its fields.
    """

    def __call__(self, step: int) -> float:
        """The rate of this step."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class ConstantRate(Schedule):
    """The same rate throughout."""

    rate: float

    def settings_fit(self) -> None:
        check_numbers(self, rate=self.rate)

    def __call__(self, step: int) -> float:
        return float(self.rate)


class WarmUp(Schedule):
    """A rate that grows linearly over `steps` steps, and then the rate of `then`.

    Step 1 of `then` is the first one after the warm-up. A number is a constant rate.

    >>> rate = WarmUp(4, then=0.8)
    >>> [rate(step) for step in (1, 2, 4, 5, 100)]
    [0.2, 0.4, 0.8, 0.8, 0.8]
    """

    steps: int
    then: float | Schedule

    def settings_fit(self) -> None:
        check_integers(self, steps=self.steps)
        if not isinstance(self.then, Schedule):
            check_numbers(self, then=self.then)

    def __call__(self, step: int) -> float:
        if step > self.steps:
            return self._then(step - self.steps)
        return self._then(1) * step / self.steps

    def _then(self, step: int) -> float:
        return self.then(step) if isinstance(self.then, Schedule) else float(self.then)


class CosineRate(Schedule):
    """Cosine decay from `rate` at step 1 to `floor` after `steps` steps.

    >>> rate = CosineRate(1.0, steps=4)
    >>> [round(rate(step), 3) for step in (1, 3, 5, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """

    rate: float
    steps: int
    floor: float = 0.0

    def settings_fit(self) -> None:
        check_integers(self, steps=self.steps)
        check_numbers(self, rate=self.rate, floor=self.floor)

    def __call__(self, step: int) -> float:
        share = min(max(step - 1, 0) / self.steps, 1.0)
        return self.floor + (self.rate - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


class SteppedRate(Schedule):
    """A rate that is multiplied by `factor` every `every` steps.

    >>> rate = SteppedRate(1.0, every=10, factor=0.5)
    >>> [rate(step) for step in (1, 10, 11, 21)]
    [1.0, 1.0, 0.5, 0.25]
    """

    rate: float
    every: int
    factor: float = 0.1

    def settings_fit(self) -> None:
        check_integers(self, every=self.every)
        check_numbers(self, rate=self.rate, factor=self.factor)

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (max(step - 1, 0) // self.every))


def rate_of(schedule: Callable[[int], float], step: int) -> float:
    """The rate that a schedule gives for a step.

    >>> rate_of(lambda step: 1 / step, 4)
    0.25

    Raises `ConfigurationError`, with the step, for anything but a finite number of 0 or more.
    """
    given = schedule(step)
    try:
        rate = float(given)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise ConfigurationError(
            f"the schedule returned {given!r} for step {step}; a rate must be a finite number of 0 "
            "or more",
            source="schedule",
        )
    return rate


def global_norm(gradients: Tree) -> Array:
    """The square root of the sum of all squares in a tree, computed in float32.

    It is float64 if all gradients are. Raises `ConfigurationError` if there are none.

    >>> import numpy
    >>> global_norm({"a": numpy.array([3.0]), "b": [numpy.array([[4.0]])]}).tolist()
    5.0
    """
    return ops.reshape(_norm(leaves(gradients)), ())


def clipped(gradients: Tree, limit: float) -> tuple[Tree, Array]:
    """The gradients, scaled down together if their global norm is above `limit`, and that norm.

    Smaller gradients are unchanged, bit for bit. If one is NaN, all become NaN, and so does the
    norm. Raises `ConfigurationError` for a limit that is not above 0.

    >>> import numpy
    >>> clipped({"a": numpy.array([3.0, 4.0])}, limit=1.0)[0]["a"].round(3).tolist()
    [0.6, 0.8]
    """
    if not is_number(limit) or not 0 < limit < math.inf:
        raise ConfigurationError(
            f"gradients are clipped to a finite norm above 0, not {limit!r}", source="limit"
        )
    arrays = leaves(gradients)
    norm = _norm(arrays)
    scale = ops.divide(float(limit), ops.maximum(norm, float(limit)))
    scaled = [_scaled(array, scale) for array in arrays]
    return refilled(gradients, scaled), ops.reshape(norm, ())


def _norm(arrays: list[Array]) -> Array:
    """The global norm, of shape (1,)."""
    if not arrays:
        raise ConfigurationError("there are no gradients in this tree, so they have no norm")
    types = {wide(primitives(array).dtype(array)).name for array in arrays}
    dtype = "float64" if types == {"float64"} else "float32"
    squares = [_square(array, dtype) for array in arrays]
    return ops.sqrt(ops.sum(ops.concat(squares, axis=0), axis=0, keepdims=True))


def _square(array: Array, dtype: str) -> Array:
    row = ops.astype(ops.reshape(array, (-1,)), dtype)
    return ops.sum(ops.multiply(row, row), axis=0, keepdims=True)


def _scaled(array: Array, scale: Array) -> Array:
    dtype = primitives(array).dtype(array)
    wider = ops.multiply(ops.astype(array, wide(dtype)), ops.astype(scale, wide(dtype)))
    return ops.reshape(ops.astype(wider, dtype), tuple(array.shape))
