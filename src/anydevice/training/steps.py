"""What a step of training is made of, and what steppers of every kind have in common.

Steps around a compiled loss: for engines that take gradients only of compiled code.

Steps that are one compiled function: for engines that take gradients inside compiled code.

One step of training, as fast as the engine can: gradients, clipping, update.

Where gradients may be taken inside compiled code, the whole step is one compiled function that is
given its parameters for good. Elsewhere the loss is compiled, gradients are taken of it, and the
engine's own kernels update the parameters where they lie. Either way nothing is read back: what
the step counts and watches stays on the device, so that the next step can be started at once.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.compiling.versions import FallbackFunction, compilers_for
from anydevice.core.device import Device
from anydevice.core.donation import consuming
from anydevice.core.dtypes import DTYPES
from anydevice.core.engine import Absent, Engine
from anydevice.core.primitives import Autodiff
from anydevice.core.record import Record
from anydevice.core.trees import Tree, leaves, mapped, refilled
from anydevice.engines import registry
from anydevice.engines.lookup import place_of
from anydevice.errors import DeviceNotFoundError
from anydevice.models.precision import LossScale, Policy, ScaleState, cast_parameters
from anydevice.nn.layer import Array, Layer, Run
from anydevice.nn.losses import Loss, is_wide_inside
from anydevice.nn.optimizers import Optimizer, clipped
from anydevice.nn.random_choice import folded_seed
from anydevice.ops.dispatch import own_version, primitives
from anydevice.settings.files import compiled_folder


class StepConfig(Record):
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
        self, engine: Engine, device: Device, recipe: StepConfig, standing: Standing, seed: int
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
        self._ways = compilers_for(engine, recipe.optimize).compilers
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
        return FallbackFunction(function, ways, self._say)

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
            return nonfinite(value)
        last = ops.multiply(nonfinite(value), at_minimum(scale))
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
            skip = nonfinite(norm) if skip is None else skip
        return gradients, nonfinite(total(gradients)) if skip is None else skip


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


def at_minimum(scale: ScaleState) -> Array:
    """1.0 where the scale of a loss cannot become smaller, else 0.0."""
    return as_float(ops.less_equal(scale["scale"], 1.0))


def added(total: Tree, new: Tree) -> Tree:
    """The sums of two nests, array by array."""
    pairs = zip(leaves(total), leaves(new), strict=True)
    return refilled(total, [ops.add(a, b) for a, b in pairs])


def as_float(truth: Array) -> Array:
    """1.0 for what is true, 0.0 for what is not."""
    return ops.astype(truth, "float32")


def nonfinite(value: Array) -> Array:
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


class SplitStepper(Stepper):
    """Gradients are taken of the compiled loss, and the engine's kernels update in place."""

    def __init__(
        self, engine: Engine, device: Device, recipe: StepConfig, standing: Standing, seed: int
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
        return nonfinite(total(self.parameters))

    def _steps_taken(self) -> int:
        if self._scale is None:
            return self.started
        return self._count(self._taken)

    def _made_ready(self, share: float) -> tuple[Tree, Array]:
        if share == 1.0 and self.recipe.clip is None and self._scale is None:
            return self._total, nonfinite(total(self._total))
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
            ops.maximum(failed, ops.multiply(stays, at_minimum(scale))),
            self._scaling.after(scale, goes),
        )


_UNDER_WAY = 2
"""Steps that may be under way when another one is started: one computes while one waits."""


class FusedStepper(Stepper):
    """A step is one compiled function, which consumes the parameters, the state and the counts."""

    def __init__(
        self, engine: Engine, device: Device, recipe: StepConfig, standing: Standing, seed: int
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
            failed = ops.maximum(counts["failed"], ops.multiply(stays, at_minimum(scale)))
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
    return nonfinite(total(parameters))


def stepper_for(device: Device, recipe: StepConfig, standing: Standing, seed: int) -> Stepper:
    """The stepper that suits the engine of a device, which holds the arrays of `standing`.

    They are consumed: nobody else may use them afterwards. Raises `UnsupportedError`, with the
    engines that can, where the engine has no gradients.
    """
    if device.engine is None:
        raise DeviceNotFoundError(f"no installed library drives {device}: {device.why_not}")
    engine = registry.load(device.engine)
    autodiff = engine.autodiff
    if isinstance(autodiff, Absent):
        raise autodiff.error()
    kind = FusedStepper if autodiff.compiles else SplitStepper
    return kind(engine, place_of(device), recipe, standing, seed)
