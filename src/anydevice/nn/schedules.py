"""How the rate changes from step to step. Steps count from 1."""

from __future__ import annotations

import math
from typing import Any

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError


class Schedule(Record):
    """A rate for each step: called with the number of the step, which counts from 1.

    One of your own gives `__call__`.
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        for name, value in self.__dict__.items():
            self._refuse(name, value)

    def _refuse(self, name: str, value: Any) -> None:
        if isinstance(value, Schedule):
            return
        whole = name in ("steps", "every")
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fits or not (1 if whole else 0) <= value < math.inf:
            kind = "a whole number from 1 on" if whole else "a finite number from 0 on"
            raise ConfigurationError(
                f"{type(self).__name__}: {name} must be {kind}, not {value!r}",
                source=f"{type(self).__name__}.{name}",
            )

    def __call__(self, step: int) -> float:
        """The rate of this step."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class ConstantRate(Schedule):
    """The same rate throughout."""

    rate: float

    def __call__(self, step: int) -> float:
        return float(self.rate)


class WarmUp(Schedule):
    """Over `steps` steps a rate that grows in equal parts, then what `then` says.

    `then` begins anew: its step 1 is the first one after the warm-up. A number stands for a
    constant rate.

    >>> rate = WarmUp(4, then=0.8)
    >>> [rate(step) for step in (1, 2, 4, 5, 100)]
    [0.2, 0.4, 0.8, 0.8, 0.8]
    """

    steps: int
    then: float | Schedule

    def __call__(self, step: int) -> float:
        if step > self.steps:
            return self._then(step - self.steps)
        return self._then(1) * step / self.steps

    def _then(self, step: int) -> float:
        return self.then(step) if isinstance(self.then, Schedule) else float(self.then)


class CosineRate(Schedule):
    """From `rate` at the first of `steps` steps down half a cosine to `floor` after the last.

    >>> rate = CosineRate(1.0, steps=4)
    >>> [round(rate(step), 3) for step in (1, 3, 5, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """

    rate: float
    steps: int
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        share = min(max(step - 1, 0) / self.steps, 1.0)
        return self.floor + (self.rate - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


class SteppedRate(Schedule):
    """A rate that is multiplied by `factor` after `every` so many steps.

    >>> rate = SteppedRate(1.0, every=10, factor=0.5)
    >>> [rate(step) for step in (1, 10, 11, 21)]
    [1.0, 1.0, 0.5, 0.25]
    """

    rate: float
    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (max(step - 1, 0) // self.every))
