"""Steps around a compiled loss: for engines that take gradients only of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.core.consuming import consuming
from anydevice.core.device import Device
from anydevice.core.dtypes import DTYPES
from anydevice.core.engine import Engine
from anydevice.nn.layer import Array
from anydevice.nn.trees import Tree, leaves
from anydevice.ops.dispatch import primitives
from anydevice.run.steps import (
    Recipe,
    Standing,
    Stepper,
    added,
    at_its_least,
    total,
    unless,
    unusable,
)


class OuterStepper(Stepper):
    """Gradients are taken of the compiled loss, and the engine's kernels update in place."""

    def __init__(
        self, engine: Engine, device: Device, recipe: Recipe, standing: Standing, seed: int
    ) -> None:
        super().__init__(engine, device, recipe, standing, seed)
        self._like = leaves(self.parameters)[0]
        self._of_loss = self._autodiff.value_and_grad(self.compiled(self._loss))
        self._failed = primitives(self._like).full((), 0, DTYPES["float32"], self._like)
        self._since = self._failed
        self._taken = self._number(standing.steps, np.int32)
        self._readies: dict[float, Callable[..., Any]] = {}
        self._plus = self.compiled(added)

    def step(self, x: Any, y: Any, rate: float) -> Array:
        value = self.add(x, y)
        self.move(rate)
        return value

    def add(self, x: Any, y: Any) -> Array:
        self.batches += 1
        batch = primitives(self._like).full((), self.batches, DTYPES["int32"], self._like)
        factor = None if self._scale is None else self._scale["scale"]
        value, gradients = self._of_loss(self.parameters, x, y, self._seed, batch, factor)
        if factor is not None:
            value = ops.divide(value, factor)
        self._failed = ops.maximum(self._failed, self._wrong(value, self._scale))
        self._total = gradients if self._total is None else self._plus(self._total, gradients)
        self._added += 1
        return value

    def move(self, rate: float) -> None:
        gradients, skip = self._made_ready(1.0 / self._added)
        self._total, self._added = None, 0
        stays = ops.maximum(skip, self._failed)
        self.started += 1
        # Filled on the device: a number that is copied there would wait for all that is under way.
        step = (
            primitives(self._like).full((), self.started, DTYPES["float32"], self._like)
            if self._scale is None
            else ops.add(self._taken, 1)
        )
        with consuming(stays):
            parameters, state = self.recipe.optimizer.update(
                self.parameters, gradients, self._state, step, rate
            )
        self.parameters = unless(stays, parameters, self.parameters)
        if self._scale is None:
            self._state = state
            self._failed = stays
        else:
            self._state = unless(stays, state, self._state)
            self._taken, self._failed, self._scale = self._scaled_on(
                self._taken, self._failed, self._scale, stays
            )
        self._since = ops.add(self._since, self._failed)

    def _failed_steps(self) -> Array:
        return self._since

    def _spoiled(self) -> Array:
        return unusable(total(self.parameters))

    def _steps_taken(self) -> int:
        if self._scale is None:
            return self.started
        return self._count(self._taken)

    def _made_ready(self, share: float) -> tuple[Tree, Array]:
        if share == 1.0 and self.recipe.clip is None and self._scale is None:
            return self._total, unusable(total(self._total))
        if share not in self._readies:

            def ready(gradients: Tree, scale: Any) -> Any:
                return self._ready(gradients, share, scale)

            self._readies[share] = self.compiled(ready)
        found: tuple[Tree, Array] = self._readies[share](self._total, self._scale)
        return found

    def _scaled_on(self, taken: Array, failed: Array, scale: Any, stays: Array) -> Any:
        goes = ops.less(stays, 1.0)
        taken = ops.where(goes, ops.add(taken, 1), taken)
        return (
            taken,
            ops.maximum(failed, ops.multiply(stays, at_its_least(scale))),
            self._scaling.after(scale, goes),
        )
