"""Callbacks: functions that are called while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError
from anydevice.nn.model import Model
from anydevice.training.history import Epoch, History


class Moment(Record):
    """The state of a training, as a callback gets it.

    `steps` is the number of steps so far, `epoch` the current epoch or the one that just ended,
    `rate` that of the last step. `ended` is the epoch that just ended, `None` within one. `model()`
    and `loss()` wait for the device: the model is a copy that later steps do not change.
    """

    epoch: int
    steps: int
    rate: float
    history: History
    ended: Epoch | None
    model: Callable[[], Model]
    loss: Callable[[], float]
    stop: Callable[[], None]


class Callback:
    """Called after steps and epochs; a subclass overrides what it needs.

    A checkpoint due at this time is written first: an error in a callback ends the training, and
    the file has the trained parameters.

    >>> from anydevice import nn
    >>> class StopsWhenGood(nn.Callback):
    ...     def epoch(self, moment):
    ...         if moment.ended.loss < 0.1:
    ...             moment.stop()
    """

    def step(self, moment: Moment) -> None:
        """After each step. Reading the loss in each one makes each one wait for the device."""

    def epoch(self, moment: Moment) -> None:
        """After each epoch, and its validation."""


class _EpochFunction(Callback):
    """A plain function, called after each epoch."""

    def __init__(self, function: Callable[[Moment], Any]) -> None:
        self._function = function

    def epoch(self, moment: Moment) -> None:
        self._function(moment)


def callbacks_of(spec: Any) -> list[Callback]:
    """A list of callbacks; raises `ConfigurationError` for anything else."""
    several = isinstance(spec, Iterable) and not callable(spec)
    return [_as_callback(each) for each in (spec if several else [spec])]


def _as_callback(spec: Any) -> Callback:
    """The callback, or one that calls a function after each epoch."""
    if isinstance(spec, Callback):
        return spec
    if callable(spec):
        return _EpochFunction(spec)
    raise ConfigurationError(
        f"a callback is a nn.Callback, or a function that is called after each epoch, not {spec!r}",
        source="callbacks",
    )


def step_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Those that are called after each step."""
    return [each for each in callbacks if type(each).step is not Callback.step]
