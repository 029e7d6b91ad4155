"""The loss of a model on data that it does not learn from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from anydevice.errors import AnyDeviceError, ConfigurationError
from anydevice.nn.layer import Run
from anydevice.nn.trees import Tree
from anydevice.run.batches import examples_of, first_of, placed, told_of
from anydevice.run.mistakes import check_shape, explained, wrong_batch
from anydevice.run.steps import Stepper
from anydevice.transfer.moving import to_numpy

_NAME = "validation"
_UNDER_WAY = 2
"""Losses that are not yet waited for, so that the device has something to do."""


class Validation:
    """Data, and the stepper whose parameters are judged by it."""

    def __init__(self, data: Any, seed: int, stepper: Stepper) -> None:
        self._data = data
        self._seed = seed
        self._stepper = stepper
        self._run: Callable[..., Any] | None = None
        self._shapes: set[Any] = set()

    def check(self, epoch: int) -> None:
        """Look at the first batch now, before an epoch is trained for nothing.

        Raises `ConfigurationError` where it does not fit, and `VerificationError` where its loss
        cannot be a number. What can be iterated only once is not touched.
        """
        batch = first_of(self._data, self._seed, epoch, _NAME)
        if batch is None:
            return
        where = told_of(_NAME, epoch, 1)
        check_shape(self._stepper.recipe, batch[0], where)
        self._refuse_wrong(*batch, where)

    def loss(self, epoch: int) -> float:
        """The mean loss over all examples. Raises as `check` does, for any of the batches."""
        if self._run is None:
            self._run = self._stepper.compiled(_applied(self._stepper))
        lost: list[tuple[float, int]] = []
        pending: deque[tuple[Any, Any, Any, str]] = deque()
        batches = placed(self._data, self._seed, epoch, self._stepper.device, name=_NAME)
        for number, (x, y) in enumerate(batches, 1):
            where = told_of(_NAME, epoch, number)
            pending.append((self._value(x, y, where), x, y, where))
            if len(pending) > _UNDER_WAY:
                lost.append(self._waited_for(*pending.popleft()))
        lost += [self._waited_for(*each) for each in pending]
        examples = sum(count for _, count in lost)
        if not examples:
            raise ConfigurationError("validation gave no batches", source=_NAME)
        return sum(loss * count for loss, count in lost) / examples

    def _value(self, x: Any, y: Any, where: str) -> Any:
        shape = getattr(x, "shape", None)
        if shape not in self._shapes:
            check_shape(self._stepper.recipe, x, where)
            self._shapes.add(shape)
        assert self._run is not None, "loss() makes it"
        try:
            return self._run(self._stepper.parameters, x, y)
        except AnyDeviceError as error:
            raise explained(error, self._stepper, x, y, where) from None

    def _waited_for(self, value: Any, x: Any, y: Any, where: str) -> tuple[float, int]:
        loss = float(to_numpy(value))
        if not math.isfinite(loss):
            self._refuse_wrong(x, y, where)
        return loss, examples_of(x)

    def _refuse_wrong(self, x: Any, y: Any, where: str) -> None:
        wrong = wrong_batch(self._stepper.recipe, x, y, where)
        if wrong is not None:
            raise wrong


def _applied(stepper: Stepper) -> Callable[..., Any]:
    run = Run()

    def value(parameters: Tree, x: Any, y: Any) -> Any:
        return stepper.recipe.value(parameters, x, y, run)

    return value
