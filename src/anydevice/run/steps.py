"""What a step of training is made of, and what steppers of every kind have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.choose.files import compiled_folder
from anydevice.core.device import Device
from anydevice.core.engine import Absent, Engine
from anydevice.core.primitives import Autodiff
from anydevice.core.record import Record
from anydevice.nn.clipping import clipped
from anydevice.nn.layer import Array, Layer, Run
from anydevice.nn.losses import Loss
from anydevice.nn.optimizers import Optimizer
from anydevice.nn.random_choice import folded_seed
from anydevice.nn.trees import Tree, leaves, mapped, refilled
from anydevice.run.precision import LossScale, Policy, ScaleState


class Recipe(Record):
    """All that a step is made of; `layer` is the one whose output the loss takes."""

    layer: Layer
    loss: Loss
    optimizer: Optimizer
    policy: Policy
    clip: float | None = None
    accumulate: int = 1
    compiles: bool = True

    def value(self, parameters: Tree, x: Any, y: Any, run: Run) -> Array:
        """The loss for one batch; a function that compilers can look through."""
        if self.policy.casts_parameters:
            parameters = self.policy.for_computing(parameters)
        return self.loss(self.layer.apply(parameters, self.policy.for_computing(x), run), y)


class Standing(Record):
    """Where training stands: what changes from step to step, and all that another run needs.

    `started` are all steps, `steps` those that changed something: a scaled loss may overflow.
    """

    parameters: Tree
    state: Tree
    batches: int = 0
    started: int = 0
    steps: int = 0
    scale: ScaleState | None = None


class Stepper(ABC):
    """Takes steps. `parameters` and `standing` are where they led, and serve until the next one.

    Gradients of `accumulate` batches are added up by `add`, and `move` goes by their mean; `step`
    is both for a single batch. Each gives the loss as an array without axes, before the step. From
    the first one on that is no number, or infinite, no step changes the parameters any more.
    `started` and `batches` count.
    """

    def __init__(
        self, engine: Engine, device: Device, recipe: Recipe, standing: Standing, seed: int
    ) -> None:
        autodiff = engine.autodiff
        if isinstance(autodiff, Absent):
            raise autodiff.error()
        self.engine = engine
        self.device = device
        self.recipe = recipe
        self._autodiff: Autodiff = autodiff
        self.parameters = standing.parameters
        self._state = standing.state
        self._scale = standing.scale
        self.started = standing.started
        self.batches = standing.batches
        self._total: Tree = None
        self._added = 0
        self._seed = self._number(folded_seed(seed), np.int32)
        self._scaling = LossScale()
        if recipe.policy.needs_loss_scale and self._scale is None:
            self._scale = self._scaling.start(leaves(self.parameters)[0])

    @property
    def standing(self) -> Standing:
        """Where training stands now."""
        return Standing(
            self.parameters,
            self._state,
            self.batches,
            self.started,
            self._steps_taken(),
            self._scale,
        )

    @abstractmethod
    def step(self, x: Any, y: Any, rate: float) -> Array:
        """One step by one batch."""

    @abstractmethod
    def add(self, x: Any, y: Any) -> Array:
        """Add the gradients of one batch to those that the next `move` goes by."""

    @abstractmethod
    def move(self, rate: float) -> None:
        """One step by the mean of the gradients that were added."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether a loss, or gradients that were looked at, were of no use; waits for all steps."""

    @abstractmethod
    def _steps_taken(self) -> int:
        """The steps that changed the parameters; scaled losses may have left some out."""

    def compiled(self, function: Callable[..., Any], *donate: str) -> Callable[..., Any]:
        """The function, compiled where the engine can and the recipe wants it."""
        compiler = self.engine.compiler
        if isinstance(compiler, Absent) or not self.recipe.compiles:
            return function
        compiler.keep(str(compiled_folder(self.engine.name)))
        return compiler.compile(function, donate=donate)

    def _number(self, value: float, kind: Any) -> Array:
        """A number as an array without axes on the device."""
        return self.engine.place(np.asarray(value, kind), self.device)

    def _loss(
        self, parameters: Tree, x: Any, y: Any, seed: Array, batch: Array, scale: Array | None
    ) -> Array:
        value = self.recipe.value(parameters, x, y, Run(training=True, seed=seed, step=batch))
        return value if scale is None else ops.multiply(value, scale)

    def _ready(self, gradients: Tree, share: float, scale: ScaleState | None) -> tuple[Tree, Array]:
        """The gradients that the update takes, and 1.0 where they are not to be used, else 0.0."""
        skip = None
        if scale is not None:
            skip = as_float(ops.logical_not(self._scaling.finite(gradients)))
            gradients = self._scaling.unscaled(gradients, scale)
        if share != 1.0:
            gradients = mapped(lambda gradient: ops.multiply(gradient, share), gradients)
        if self.recipe.clip is not None:
            gradients, norm = clipped(gradients, self.recipe.clip)
            skip = unusable(norm) if skip is None else skip
        return gradients, skip


def added(total: Tree, new: Tree) -> Tree:
    """The sums of two nests, array by array."""
    pairs = zip(leaves(total), leaves(new), strict=True)
    return refilled(total, [ops.add(a, b) for a, b in pairs])


def as_float(truth: Array) -> Array:
    """1.0 for what is true, 0.0 for what is not."""
    return ops.astype(truth, "float32")


def unusable(value: Array) -> Array:
    """1.0 where a number is infinite or none, else 0.0."""
    return as_float(ops.isnan(ops.subtract(value, value)))


def chosen(goes: Array, new: Tree, old: Tree) -> Tree:
    """The new nest where a condition holds, else the old one."""
    pairs = zip(leaves(new), leaves(old), strict=True)
    return refilled(new, [ops.where(goes, after, before) for after, before in pairs])


def unless(stays: Array, new: Tree, old: Tree) -> Tree:
    """The new nest, with the old numbers where nothing was to change, unless written in place."""
    pairs = zip(leaves(new), leaves(old), strict=True)
    if all(after is before for after, before in pairs):
        return new
    return chosen(ops.less(stays, 1.0), new, old)
