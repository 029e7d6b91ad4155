"""How the rate changes from step to step. Steps count from 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError
from anydevice.nn import settings


class Schedule(Record):
    """A rate for each step: called with the number of the step, which counts from 1.

    One of your own gives `__call__`; `settings_fit` may refuse fields that make no sense.
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.settings_fit()

    def settings_fit(self) -> None:
        """Raise `ConfigurationError` where the fields make no sense; called once, at the start."""

    def __call__(self, step: int) -> float:
        """The rate of this step."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class ConstantRate(Schedule):
    """The same rate throughout."""

    rate: float

    def settings_fit(self) -> None:
        settings.numbers(self, rate=self.rate)

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

    def settings_fit(self) -> None:
        settings.whole_numbers(self, steps=self.steps)
        if not isinstance(self.then, Schedule):
            settings.numbers(self, then=self.then)

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

    def settings_fit(self) -> None:
        settings.whole_numbers(self, steps=self.steps)
        settings.numbers(self, rate=self.rate, floor=self.floor)

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

    def settings_fit(self) -> None:
        settings.whole_numbers(self, every=self.every)
        settings.numbers(self, rate=self.rate, factor=self.factor)

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (max(step - 1, 0) // self.every))


def rate_of(schedule: Callable[[int], float], step: int) -> float:
    """The rate that a schedule gives for a step, where it is one.

    >>> rate_of(lambda step: 1 / step, 4)
    0.25

    Raises `ConfigurationError`, with the step, for what is no finite number from 0 on.
    """
    given = schedule(step)
    try:
        rate = float(given)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise ConfigurationError(
            f"the schedule gives {given!r} for step {step}, and a rate is a finite number from 0 "
            "on",
            source="schedule",
        )
    return rate
