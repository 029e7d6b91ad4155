"""Callbacks: functions that are called while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from logging import Logger
from math import isnan
from typing import Any

from anydevice._core import checks
from anydevice._core.record import Record
from anydevice._train.history import Epoch, History
from anydevice.errors import ConfigurationError

_NUMBERS = ("loss", "validation", "rate", "seconds")


class TrainingEvent(Record):
    """The state of a training, as passed to a callback.

    `steps` is the number of steps so far, `epoch` the current epoch or the one that just ended,
    `rate` the rate of the last step. `ended` is the epoch that just ended, `None` within an epoch.
    `model()` and `loss()` wait for the device. A `nn.Model` is a copy, which later steps do not
    change; a module of PyTorch, Flax NNX or MLX is the original.
    """

    epoch: int
    steps: int
    rate: float
    history: History
    ended: Epoch | None
    model: Callable[[], Any]
    loss: Callable[[], float]
    stop: Callable[[], None]


class Callback:
    """A hook called after steps and epochs; a subclass overrides the methods it needs.

    A checkpoint that is due is written first: an error in a callback ends the training, but the
    file has the trained parameters.

    >>> class StopsWhenGood(nn.Callback):
    ...     def epoch(self, event):
    ...         if event.ended.loss < 0.1:
    ...             event.stop()
    """

    def step(self, event: TrainingEvent) -> None:
        """Run after each step. Reading the loss in every step waits for the device every time."""

    def epoch(self, event: TrainingEvent) -> None:
        """Run after each epoch and its validation."""


class Log(Callback):
    """A callback that sends the losses, the rate and the metrics of each epoch to your logger.

    `target` has `add_scalar(name, value, step)`, like a TensorBoard `SummaryWriter`, or
    `log(dict)`, like a run of Weights & Biases. With `every=100`, the loss and the rate of every
    100th step are sent too, the loss as `step_loss`; reading it waits for the device.

    >>> class Printed:
    ...     def log(self, values):
    ...         print(values)
    >>> from anydevice._train.history import Epoch
    >>> Log(Printed()).send(Epoch(1, 0.5, None, 0.1, 10, 1.5))
    {'loss': 0.5, 'rate': 0.1, 'seconds': 1.5, 'epoch': 1, 'step': 10}

    Raises `ConfigurationError` for a target with neither method.
    """

    def __init__(self, target: Any, *, every: int | None = None) -> None:
        writes = callable(getattr(target, "add_scalar", None))
        logs = callable(getattr(target, "log", None)) and not isinstance(target, Logger)
        if not writes and not logs:
            raise ConfigurationError(
                f"nn.Log: {target!r} has neither add_scalar(name, value, step), as a TensorBoard "
                "SummaryWriter has it, nor log(dict); a function that is called with each epoch "
                "is a callback itself",
                source="target",
            )
        self.target = target
        self.every = None if every is None else checks.integer("every", every, 1, owner="nn.Log")
        self._writes = writes

    def step(self, event: TrainingEvent) -> None:
        """Send the loss of a step if one is due."""
        if self.every is not None and event.steps % self.every == 0:
            values = {"step_loss": event.loss(), "rate": event.rate}
            self._send(values, event.epoch, event.steps)

    def epoch(self, event: TrainingEvent) -> None:
        """Send the numbers of an epoch that ended."""
        if event.ended is not None:
            self.send(event.ended)

    def send(self, epoch: Epoch) -> None:
        """Send the numbers of an epoch, metrics under their own names."""
        names = ("loss", "rate", "seconds") if epoch.validation is None else _NUMBERS
        numbers = {name: getattr(epoch, name) for name in names} | dict(epoch.metrics or {})
        if epoch.left_out:
            numbers["left_out"] = epoch.left_out
        self._send(numbers, epoch.epoch, epoch.steps)

    def _send(self, numbers: dict[str, Any], epoch: int, step: int) -> None:
        if isnan(numbers["rate"]):  # an optimizer of another library may not report it
            del numbers["rate"]
        if not self._writes:
            self.target.log({**numbers, "epoch": epoch, "step": step})
            return
        for name, value in {**numbers, "epoch": epoch}.items():
            self.target.add_scalar(name, value, step)


class _EpochFunction(Callback):
    """A plain function, called after each epoch."""

    def __init__(self, function: Callable[[TrainingEvent], Any]) -> None:
        self._function = function

    def epoch(self, event: TrainingEvent) -> None:
        self._function(event)


def callbacks_of(spec: Any) -> list[Callback]:
    """Return a list of callbacks; raise `ConfigurationError` for anything else."""
    callbacks = list(spec) if isinstance(spec, Iterable) and not callable(spec) else [spec]
    for callback in callbacks:
        if not isinstance(callback, Callback) and not callable(callback):
            raise ConfigurationError(
                "a callback is a nn.Callback, or a function that is called after each epoch, not "
                f"{callback!r}",
                source="callbacks",
            )
    return [c if isinstance(c, Callback) else _EpochFunction(c) for c in callbacks]


def step_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the callbacks that override `step`."""
    own = [c for c in callbacks if type(c).step is not Callback.step]
    return [c for c in own if not isinstance(c, Log) or c.every is not None]
