"""Steps that are one compiled function: for engines that take gradients inside compiled code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.nn.layer import Array
from anydevice.nn.trees import Tree
from anydevice.run.steps import (
    Recipe,
    Standing,
    Stepper,
    added,
    at_its_least,
    chosen,
    total,
    unusable,
)

_UNDER_WAY = 2
"""Steps that may be under way when another one is started: one computes while one waits."""


class WholeStepper(Stepper):
    """A step is one compiled function, which consumes the parameters, the state and the counts."""

    def __init__(
        self, engine: Engine, device: Device, recipe: Recipe, standing: Standing, seed: int
    ) -> None:
        super().__init__(engine, device, recipe, standing, seed)
        self._counts: dict[str, Array] = {
            "batches": self._number(self.batches, np.int32),
            "steps": self._number(standing.steps, np.int32),
            "failed": self._number(0, np.float32),
            "since": self._number(0, np.float32),
        }
        consumed = ("parameters", "state", "counts", "scale")
        self._whole = self.compiled(self._whole_step, *consumed)
        self._gradients = self.compiled(self._first_gradients, "counts")
        self._more = self.compiled(self._further_gradients, "total", "counts")
        self._are_spoiled = self.compiled(_spoiled)
        self._updates: dict[float, Callable[..., Any]] = {}
        self._rates: tuple[float, Array] = (0.0, self._number(0, np.float32))
        self._started: deque[Array] = deque()

    def step(self, x: Any, y: Any, rate: float) -> Array:
        self.parameters, self._state, self._counts, self._scale, value = self._whole(
            self.parameters, self._state, self._counts, self._scale, x, y, self._seed,
            self._rate(rate),
        )  # fmt: skip
        self.batches += 1
        self.started += 1
        return self._kept_short(value)

    def add(self, x: Any, y: Any) -> Array:
        rest = (self._counts, self._scale, x, y, self._seed)
        if self._total is None:
            self._total, self._counts, value = self._gradients(self.parameters, *rest)
        else:
            self._total, self._counts, value = self._more(self.parameters, self._total, *rest)
        self.batches += 1
        self._added += 1
        return self._kept_short(value)

    def move(self, rate: float) -> None:
        share = 1.0 / self._added
        if share not in self._updates:

            def update(
                parameters: Tree, state: Tree, counts: Any, scale: Any, total: Tree, rate: Array
            ) -> Any:
                return self._updated(parameters, state, counts, scale, total, rate, share)

            consumed = ("parameters", "state", "counts", "scale")
            self._updates[share] = self.compiled(update, *consumed)
        self.parameters, self._state, self._counts, self._scale = self._updates[share](
            self.parameters, self._state, self._counts, self._scale, self._total, self._rate(rate)
        )
        self._total, self._added = None, 0
        self.started += 1

    def _failed_steps(self) -> Array:
        return self._counts["since"]

    def _spoiled(self) -> Array:
        return self._are_spoiled(self.parameters)

    def _steps_taken(self) -> int:
        return self._count(self._counts["steps"])

    def _rate(self, rate: float) -> Array:
        if rate != self._rates[0]:
            self._rates = rate, self._number(rate, np.float32)
        return self._rates[1]

    def _kept_short(self, value: Array) -> Array:
        """Wait until few steps are under way: neither memory nor a lazy graph grows on and on."""
        self._started.append(value)
        if len(self._started) > _UNDER_WAY:
            self.engine.finish(self._started.popleft())
        return value

    def _whole_step(
        self,
        parameters: Tree,
        state: Tree,
        counts: dict[str, Array],
        scale: Any,
        x: Any,
        y: Any,
        seed: Array,
        rate: Array,
    ) -> Any:
        total, counts, value = self._first_gradients(parameters, counts, scale, x, y, seed)
        return *self._updated(parameters, state, counts, scale, total, rate, 1.0), value

    def _first_gradients(
        self, parameters: Tree, counts: dict[str, Array], scale: Any, x: Any, y: Any, seed: Array
    ) -> Any:
        batch = ops.add(counts["batches"], 1)
        factor = None if scale is None else scale["scale"]
        of_loss = self._autodiff.value_and_grad(self._loss)
        value, gradients = of_loss(parameters, x, y, seed, batch, factor)
        if factor is not None:
            value = ops.divide(value, factor)
        failed = ops.maximum(counts["failed"], self._wrong(value, scale))
        return gradients, {**counts, "batches": batch, "failed": failed}, value

    def _further_gradients(
        self,
        parameters: Tree,
        total: Tree,
        counts: dict[str, Array],
        scale: Any,
        x: Any,
        y: Any,
        seed: Array,
    ) -> Any:
        new, counts, value = self._first_gradients(parameters, counts, scale, x, y, seed)
        return added(total, new), counts, value

    def _updated(
        self,
        parameters: Tree,
        state: Tree,
        counts: dict[str, Array],
        scale: Any,
        total: Tree,
        rate: Array,
        share: float,
    ) -> Any:
        gradients, skip = self._ready(total, share, scale)
        stays = ops.maximum(skip, counts["failed"])
        goes = ops.less(stays, 1.0)
        steps = ops.add(counts["steps"], 1)
        new, after = self.recipe.optimizer.update(parameters, gradients, state, steps, rate)
        failed = stays
        if scale is not None:
            failed = ops.maximum(counts["failed"], ops.multiply(stays, at_its_least(scale)))
            scale = self._scaling.after(scale, goes)
            after = chosen(goes, after, state)  # else a step that is left out is the last one
        counts = {
            "batches": counts["batches"],
            "steps": ops.where(goes, steps, counts["steps"]),
            "failed": failed,
            "since": ops.add(counts["since"], failed),
        }
        return chosen(goes, new, parameters), after, counts, scale


def _spoiled(parameters: Tree) -> Array:
    return unusable(total(parameters))
