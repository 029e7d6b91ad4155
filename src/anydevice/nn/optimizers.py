"""Optimizers: frozen settings, and steps that are pure functions of trees.

`init` makes the state, and `update` gives new parameters and a new state. `step` counts from 1; it
and `rate` may be arrays without axes, so that one compiled step serves for all.
"""

from __future__ import annotations

from typing import Any

from anydevice import ops
from anydevice.core.record import Record
from anydevice.nn import settings
from anydevice.nn.schedules import Schedule, rate_of
from anydevice.nn.trees import Tree, leaves, mapped, refilled
from anydevice.ops.dispatch import primitives
from anydevice.ops.widening import wide

Array = Any
State = dict[str, Tree]


class Optimizer(Record):
    """What all optimizers have: a rate, which is a number or a schedule.

    One of your own gives `init` and `update`; `settings_fit` may refuse fields that make no sense.
    """

    rate: float | Schedule = 1e-3

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        if not isinstance(self.rate, Schedule):
            settings.numbers(self, rate=self.rate)
        self.settings_fit()

    def settings_fit(self) -> None:
        """Raise `ConfigurationError` where the fields make no sense; called once, at the start."""

    def rate_at(self, step: int) -> float:
        """The rate of a step, which counts from 1.

        Raises `ConfigurationError` where a schedule gives what is no rate.
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

    def _pace(self, step: int | Array, rate: float | Array | None) -> float | Array:
        if rate is not None:
            return rate
        return self.rate_at(step) if isinstance(self.rate, Schedule) else float(self.rate)


class SGD(Optimizer):
    """Steps down the gradient, with momentum where it is not 0.

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
        settings.numbers(self, 1.0, momentum=self.momentum)
        settings.numbers(self, decay=self.decay)
        settings.truths(self, nesterov=self.nesterov)
        if self.nesterov and not self.momentum:
            raise settings.refusal(self, "nesterov", "used with momentum, such as 0.9", True)

    def init(self, parameters: Tree) -> State:
        return {"velocities": zeros_like(parameters)} if self.momentum else {}

    def update(
        self,
        parameters: Tree,
        gradients: Tree,
        state: State,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, State]:
        moved, velocities = ops.update_sgd(
            leaves(parameters),
            leaves(gradients),
            leaves(state["velocities"]) if self.momentum else None,
            rate=self._pace(step, rate),
            momentum=self.momentum,
            decay=self.decay,
            nesterov=self.nesterov,
        )
        new = {} if velocities is None else {"velocities": refilled(parameters, velocities)}
        return refilled(parameters, moved), new


class Adam(Optimizer):
    """Adam; `decay` is added to the gradients as a multiple of the parameters."""

    rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0

    _decoupled = False

    def settings_fit(self) -> None:
        settings.numbers(self, 1.0, beta1=self.beta1, beta2=self.beta2)
        settings.numbers(self, eps=self.eps, decay=self.decay)

    def init(self, parameters: Tree) -> State:
        return {"means": zeros_like(parameters), "squares": zeros_like(parameters)}

    def update(
        self,
        parameters: Tree,
        gradients: Tree,
        state: State,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, State]:
        moved, means, squares = ops.update_adam(
            leaves(parameters),
            leaves(gradients),
            leaves(state["means"]),
            leaves(state["squares"]),
            step,
            rate=self._pace(step, rate),
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            decay=self.decay,
            decoupled=self._decoupled,
        )
        new = {"means": refilled(parameters, means), "squares": refilled(parameters, squares)}
        return refilled(parameters, moved), new


class AdamW(Adam):
    """Adam whose `decay` shrinks the parameters themselves."""

    rate: float | Schedule = 1e-3
    decay: float = 1e-2

    _decoupled = True


class Lion(Optimizer):
    """Steps of one size, by the signs of the mean gradients; `decay` shrinks the parameters."""

    rate: float | Schedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    decay: float = 0.0

    def settings_fit(self) -> None:
        settings.numbers(self, 1.0, beta1=self.beta1, beta2=self.beta2)
        settings.numbers(self, decay=self.decay)

    def init(self, parameters: Tree) -> State:
        return {"means": zeros_like(parameters)}

    def update(
        self,
        parameters: Tree,
        gradients: Tree,
        state: State,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, State]:
        moved, means = ops.update_lion(
            leaves(parameters),
            leaves(gradients),
            leaves(state["means"]),
            rate=self._pace(step, rate),
            beta1=self.beta1,
            beta2=self.beta2,
            decay=self.decay,
        )
        return refilled(parameters, moved), {"means": refilled(parameters, means)}


def zeros_like(parameters: Tree) -> Tree:
    """A tree of zeros in the same shapes and places: float64 for itself, else float32."""

    def zeros(parameter: Array) -> Array:
        xp = primitives(parameter)
        return xp.full(tuple(parameter.shape), 0, wide(xp.dtype(parameter)), parameter)

    return mapped(zeros, parameters)
