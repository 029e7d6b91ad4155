"""What a step of training is made of, and what steppers of every kind have in common."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
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
from anydevice.nn.losses import Loss, is_wide_inside
from anydevice.nn.optimizers import Optimizer
from anydevice.nn.random_choice import folded_seed
from anydevice.nn.trees import Tree, leaves, mapped, refilled
from anydevice.ops.dispatch import own_version
from anydevice.run.precision import LossScale, Policy, ScaleState, cast_parameters
from anydevice.run.versions import FirstThatWorks, ways_of


class Recipe(Record):
    """All that a step is made of; `layer` is the one whose output the loss takes."""

    layer: Layer
    loss: Loss
    optimizer: Optimizer
    policy: Policy
    clip: float | None = None
    accumulate: int = 1
    optimize: str = "default"

    def value(self, parameters: Tree, x: Any, y: Any, run: Run) -> Array:
        """The loss for one batch, a float32; a function that compilers can look through."""
        policy = self.policy
        if policy.casts_parameters:
            parameters = policy.for_computing(parameters)
        output = self.layer.apply(parameters, policy.for_computing(x), run)
        if not policy.is_narrow:
            return self.loss(output, y)
        if not is_wide_inside(self.loss):
            output = cast_parameters(output, "float32")
        return ops.astype(self.loss(output, y), "float32")


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
    the first loss or gradient on that is no number, or infinite, no step changes the parameters any
    more; a loss that is scaled may overflow, and that step alone changes nothing. `started` and
    `batches` count. What is `quiet` does not say what could not be compiled.
    """

    quiet = False

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
        self._ways = ways_of(engine, recipe.optimize).ways
        self._fell_back = False
        if self._ways and not isinstance(engine.compiler, Absent):
            engine.compiler.keep(str(compiled_folder(engine.name)))
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
    def failed(self) -> bool:
        """Whether a loss, gradients or the parameters are of no use; waits for all steps."""
        return bool(self._count(self._failed_steps())) or bool(self._count(self._spoiled()))

    @property
    def failed_since(self) -> int:
        """The first step whose loss or gradients were of no use; else the one that comes next."""
        return self.started + 1 - self._count(self._failed_steps())

    @property
    def left_out(self) -> int:
        """The steps that changed nothing, because a scaled loss overflowed; waits for all steps."""
        return self.started - self._steps_taken()

    @abstractmethod
    def _failed_steps(self) -> Array:
        """How many steps were started from the first one on that was of no use."""

    @abstractmethod
    def _spoiled(self) -> Array:
        """1.0 where a parameter is infinite or no number, else 0.0."""

    @abstractmethod
    def _steps_taken(self) -> int:
        """The steps that changed the parameters; scaled losses may have left some out."""

    def compiled(self, function: Callable[..., Any], *donate: str) -> Callable[..., Any]:
        """The function, compiled where the engine can and the recipe wants it.

        Where compiling fails, it is run as it is written, which is said once.
        """
        if not self._ways:
            return function
        ways = [(name, partial(make, donate=donate)) for name, make in self._ways]
        return FirstThatWorks(function, ways, self._say)

    def _say(self, what: str) -> None:
        if not self._fell_back and not self.quiet:
            self._fell_back = True
            warnings.warn(
                f"a part of the training step is {what}, which is slower; optimize='none' "
                "compiles nothing",
                stacklevel=2,
            )

    def _count(self, value: Array) -> int:
        return int(self.engine.to_host(value))

    def _number(self, value: float, kind: Any) -> Array:
        """A number as an array without axes on the device."""
        return self.engine.place(np.asarray(value, kind), self.device)

    def _loss(
        self, parameters: Tree, x: Any, y: Any, seed: Array, batch: Array, scale: Array | None
    ) -> Array:
        value = self.recipe.value(parameters, x, y, Run(training=True, seed=seed, step=batch))
        return value if scale is None else ops.multiply(value, scale)

    def _wrong(self, value: Array, scale: ScaleState | None) -> Array:
        """1.0 where a loss is of no use for good, else 0.0.

        An infinite one may be the scale's doing, and become finite with a smaller one; what is no
        number was so before.
        """
        if scale is None:
            return unusable(value)
        last = ops.multiply(unusable(value), at_its_least(scale))
        return ops.maximum(as_float(ops.isnan(value)), last)

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
        return gradients, unusable(total(gradients)) if skip is None else skip


def total(tree: Tree) -> Array:
    """A float32 that is finite where all numbers of a nest are, short of absurdly large ones."""
    arrays = leaves(tree)
    found = own_version(arrays[0], "total_size", _total)(arrays)
    return _total(arrays) if found is NotImplemented else found


def _total(arrays: list[Array]) -> Array:
    sums = [ops.reshape(ops.astype(_sum(x), "float32"), (1,)) for x in arrays]
    return ops.sum(ops.concat(sums, axis=0))


def _sum(x: Array) -> Array:
    # Column by column first: XLA adds numbers on the CPU side by side only where it keeps an axis.
    return ops.sum(ops.sum(x, axis=0)) if x.ndim > 1 else ops.sum(x)


def at_its_least(scale: ScaleState) -> Array:
    """1.0 where the scale of a loss cannot become smaller, else 0.0."""
    return as_float(ops.less_equal(scale["scale"], 1.0))


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
