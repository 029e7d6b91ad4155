"""What others may do while a model trains: look, write down, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError
from anydevice.nn.model import Model
from anydevice.training.history import Epoch, History


class Moment(Record):
    """A moment of a training, as a callback sees it.

    `steps` were taken so far, `epoch` is the one under way or just ended, `rate` that of the last
    step. `ended` is the epoch that ended now, `None` within one. `model()` and `loss()` ask the
    device, and wait for it: the model is a copy, which stays as it is.
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
    """Is told of steps and epochs; what it does not want to know it leaves as it is here.

    Where the training is saved at that moment, that is done before: an error in a callback ends the
    training, and what was learned is in the file.

    >>> from anydevice import nn
    >>> class StopsWhenGood(nn.Callback):
    ...     def epoch(self, moment):
    ...         if moment.ended.loss < 0.1:
    ...             moment.stop()
    """

    def step(self, moment: Moment) -> None:
        """After each step. Asking for the loss each time makes training wait each time."""

    def epoch(self, moment: Moment) -> None:
        """After each epoch, and its validation."""


class _EpochFunction(Callback):
    """A plain function, called after each epoch."""

    def __init__(self, function: Callable[[Moment], Any]) -> None:
        self._function = function

    def epoch(self, moment: Moment) -> None:
        self._function(moment)


def callbacks_of(spec: Any) -> list[Callback]:
    """One callback, or each of several; raises `ConfigurationError` for what is none."""
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


def wants_steps(callbacks: list[Callback]) -> list[Callback]:
    """Those that have something to do after each step."""
    return [each for each in callbacks if type(each).step is not Callback.step]
