"""Steps for a loss that is a function of parameters, as fast as the engine can.

If the engine takes gradients inside compiled code, the whole step is one compiled function that
consumes its parameters. Otherwise the loss is compiled, gradients are taken of it, and the engine's
own kernels update the parameters in place. On an accelerator nothing is read back: counts and
failures stay on the device, so that the next step can start at once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.device import not_driven
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine, consuming
from anydevice._core.primitives import Autodiff
from anydevice._core.protocols import Stepper, StepState
from anydevice._core.trees import (
    Tree,
    TreeT,
    combined,
    leaf_names,
    leaves,
    mapped,
    partition,
    refilled,
)
from anydevice._libraries.precision import LossScale, ScaleState
from anydevice._machine.engines import registry
from anydevice._nn.layer import Run, state_leaves
from anydevice._nn.optimizers import BuiltIn
from anydevice._nn.random_choice import folded_seed
from anydevice._ops.dispatch import primitives
from anydevice._train.step_config import CompiledSteps, StepConfig, nonfinite, total
from anydevice._train.strategy import Strategy

_FLOAT32, _INT32 = DTYPES["float32"], DTYPES["int32"]
_Carry = tuple[Tree, Any, dict[str, Array], Any]
"""Arrays that a compiled step consumes: trained parameters, optimizer state, counts and scale."""

_SERIAL = 2_000_000
"""Size of a step (parameters used) up to which a second thread does not help."""


def stepper_for(
    strategy: Strategy,
    config: StepConfig,
    state: StepState,
    seed: int,
    kind: type[FunctionStepper] | None = None,
) -> Stepper:
    """Return the stepper for the engine of the devices, by default of the fastest kind."""
    device = strategy.device
    if device.engine is None:
        raise not_driven(device)
    engine = registry.load(device.engine)
    autodiff = engine.autodiff
    if isinstance(autodiff, Absent):
        raise autodiff.error()
    if kind is None:
        waits = device.kind != "cpu" or config.policy.needs_loss_scale
        kind = FusedStepper if autodiff.compiles else SplitStepper if waits else HostStepper
    return kind(engine, autodiff, strategy, config, state, seed)


class FunctionStepper(Stepper):
    """Takes steps for a loss that is a function of parameters."""

    config: StepConfig

    def __init__(
        self,
        engine: Engine,
        autodiff: Autodiff,
        strategy: Strategy,
        config: StepConfig,
        state: StepState,
        seed: int,
    ) -> None:
        self.engine = engine
        self.device = strategy.device
        self._strategy = strategy
        state = strategy.state(state, config.trained)
        self.config = strategy.config(config)
        self._autodiff = autodiff
        self._trained, self._fixed = state.parameters, None
        self._is_state: list[bool] = []
        self._fixed_names: list[str] = []
        if config.trained is not None and not all(config.trained):
            self._trained, self._fixed = partition(state.parameters, config.trained)
            of_all = state_leaves(config.layer, state.parameters)
            pairs = zip(of_all, config.trained, strict=True)
            self._is_state = [is_state for is_state, own in pairs if not own]
            self._fixed_names = leaf_names(self._fixed)
        self._optimizer_state = state.optimizer
        self._scale = state.scale
        self.started = state.started
        self.batches = state.batches
        self._total, self._added = state.total, state.added
        self._like = leaves(self._trained)[0]
        self._xp = primitives(self._like)
        self._seed: Array | int = self._number(folded_seed(seed), np.int32)
        self._scaling = LossScale()
        self.compiler = self._make_compiler()
        if config.policy.needs_loss_scale and self._scale is None:
            self._scale = strategy.numbers(self._scaling.start(self._like))
        self._evaluate: dict[bool, Callable[..., Any]] = {}
        self._plus: Callable[[Tree, Tree], Tree] = _add_trees
        self._start(state.steps)

    def _make_compiler(self) -> CompiledSteps:
        optimize = self.config.optimize
        if optimize == "none" and self._strategy.must_compile:
            optimize = "default"
        return CompiledSteps(self.engine, optimize, fixed=self.config.is_ours)

    def _evaluate_batch(self, parameters: Tree, batch: Any, with_output: bool) -> tuple[Array, Any]:
        batch = self._strategy.divide_rows(batch)
        value, output = self.config.value_and_output(parameters, batch, Run())
        return value, output if with_output else None

    @abstractmethod
    def _start(self, steps: int) -> None:
        """Build the functions of a step, and its counters on the device."""

    @property
    def parameters(self) -> Tree:
        own = self._trained if self._fixed is None else combined(self._trained, self._fixed)
        return self._strategy.joined(own, "parameters")

    @property
    def state(self) -> StepState:
        joined = self._strategy.joined
        return StepState(
            self.parameters,
            joined(self._optimizer_state, "optimizer"),
            self.batches,
            self.started,
            self._steps_taken(),
            self._scale,
            joined(self._total, "total"),
            self._added,
        )

    def drop(self) -> None:
        self._total, self._added = None, 0.0

    def evaluate(self, batch: Any, *, with_output: bool = False) -> tuple[Array, Any]:
        if with_output not in self._evaluate:
            whole = partial(self._evaluate_batch, with_output=with_output)
            self._evaluate[with_output] = self.compiler.compiled(whole)
        parameters = self.parameters
        if self._strategy.is_sharded:
            parameters = self._strategy.readable(parameters)
        value: tuple[Array, Any] = self._evaluate[with_output](parameters, batch)
        return value

    @property
    def failed(self) -> bool:
        return bool(self._failed_steps()) or bool(self._count(self._failed_weights()))

    @property
    def failed_since(self) -> int:
        return self.started + 1 - self._failed_steps()

    @property
    def skipped_steps(self) -> int:
        return self.started - self._steps_taken()

    @abstractmethod
    def _failed_steps(self) -> int:
        """Return the number of steps started since the first failed one."""

    def _failed_weights(self) -> Array:
        """Return 1.0 if a parameter is infinite or NaN, else 0.0."""
        raise NotImplementedError

    @abstractmethod
    def _steps_taken(self) -> int:
        """Return the number of steps that changed the parameters."""

    def scope_of(self, batch: Any) -> Callable[[], AbstractContextManager[Any]]:
        """Return a scope with one thread for a small step on the CPU."""
        shape = tuple(getattr(batch[0], "shape", ())) if isinstance(batch, tuple) else ()
        if self.compiler.compiles or not shape or self.device.kind != "cpu":
            return nullcontext
        output = self.config.layer.output(shape[1:])
        if isinstance(output, dict):
            return nullcontext
        outputs = math.prod((shape[0], *output[:-1]))
        uses = outputs * sum(math.prod(x.shape) for x in leaves(self._trained))
        return self.engine.serial_scope if uses <= _SERIAL else nullcontext

    def _count(self, value: Array) -> int:
        return int(self.engine.to_host(value))

    def _number(self, value: float, kind: Any) -> Array:
        """Return a number as a 0-d array on the device."""
        return self._strategy.numbers(self.engine.place(np.asarray(value, kind), self.device))

    def _loss(
        self,
        trained: Tree,
        fixed: Tree,
        batch: Any,
        seed: Array | int,
        number: Array | int,
        scale: Array | None,
        rows: tuple[int, int, int] | None = None,
    ) -> tuple[Array, list[Array]]:
        """Return the scaled loss of a batch, and the new state of the layers."""
        parameters = trained if fixed is None else combined(trained, fixed)
        updates: dict[tuple[str, str], Array] = {}
        run = Run(True, seed, number, updates=updates, frozen=self.config.frozen, rows=rows)
        value = self.config.value(parameters, self._strategy.divide_rows(batch), run)
        if scale is not None:
            value = ops.multiply(value, scale)
        # Layers that did not run keep their state.
        named = {f"{path}.{name}": x for (path, name), x in updates.items()}
        parts = zip(self._fixed_names, leaves(fixed), self._is_state, strict=True)
        return value, [named.get(name, leaf) for name, leaf, is_state in parts if is_state]

    def _keep_state(self, state: list[Array]) -> None:
        if state:
            new = iter(state)
            pairs = zip(leaves(self._fixed), self._is_state, strict=True)
            fixed = [next(new) if is_state else leaf for leaf, is_state in pairs]
            self._fixed = refilled(self._fixed, fixed)

    def _state(self, fixed: Tree) -> list[Array]:
        pairs = zip(leaves(fixed), self._is_state, strict=True)
        return [leaf for leaf, is_state in pairs if is_state]

    def _failure(self, value: Array, scale: ScaleState | None) -> Array:
        """Return 1.0 if a loss fails the training, else 0.0."""
        if scale is None:
            return nonfinite(value)
        # An infinite loss may become finite with a smaller scale; NaN does not.
        last = ops.multiply(nonfinite(value), _at_minimum(scale))
        return ops.maximum(ops.astype(ops.isnan(value), "float32"), last)

    def _add_up(self, gradients: Tree, weight: float) -> None:
        """Add the gradients of a batch to the accumulated ones."""
        if weight != 1.0:
            gradients = mapped(lambda x: ops.multiply(x, weight), gradients)
        self._total = gradients if self._total is None else self._plus(self._total, gradients)
        self._added += weight
        self.batches += 1

    def _ready(self, gradients: Tree, scale: ScaleState | None, share: float) -> tuple[Tree, Array]:
        """Return the gradients for the update, and 1.0 if it must be skipped, else 0.0."""
        skip = None
        if scale is not None:
            skip = ops.astype(ops.logical_not(self._scaling.finite(gradients)), "float32")
            skip = ops.minimum(self._strategy.over_shards(skip), 1.0)
            gradients = self._scaling.unscaled(gradients, scale)
        if share != 1.0:
            gradients = mapped(lambda gradient: ops.multiply(gradient, share), gradients)
        if self.config.clip is not None:
            gradients, norm = self._strategy.clip_gradients(gradients, self.config.clip)
            skip = nonfinite(norm) if skip is None else skip
        return gradients, nonfinite(self._total_of(gradients)) if skip is None else skip

    def _total_of(self, tree: Tree) -> Any:
        """Return a float32 that is finite if all numbers of a tree are, in all processes."""
        return self._strategy.over_shards(total(tree))


class SplitStepper(FunctionStepper):
    """Takes gradients of the compiled loss; the engine's kernels update in place."""

    def _start(self, steps: int) -> None:
        loss = self.compiler.compiled(self._loss)
        differentiate = partial(self._autodiff.value_and_grad, more=True)
        self._loss_and_gradients = self._strategy.gradients(differentiate, loss)
        self._failed = self._xp.full((), 0, _FLOAT32, self._like)
        self._since = self._failed
        self._taken_steps = self._number(steps, np.int32)
        self._readies: dict[float, Callable[..., Any]] = {}
        self._plus = self.compiler.compiled(_add_trees)

    def add(self, batch: Any, weight: float = 1.0) -> Array:
        number = self._xp.full((), self.batches + 1, _INT32, self._like)
        factor = None if self._scale is None else self._scale["scale"]
        (value, state), gradients = self._loss_and_gradients(
            self._trained, self._fixed, batch, self._seed, number, factor
        )
        if factor is not None:
            value = ops.divide(value, factor)
        self._failed = self._xp.maximum(self._failed, self._failure(value, self._scale))
        if state:
            good = ops.less(self._failed, 1.0)
            self._keep_state(_select(good, state, self._state(self._fixed)))
        self._add_up(gradients, weight)
        return value

    def move(self, rate: float) -> None:
        gradients, skip = self._made_ready(1.0 / self._added)
        self.drop()
        stays = self._xp.maximum(skip, self._failed)
        self.started += 1
        if self._scale is None:
            # Filled on the device: copying a number there would wait for all steps in flight.
            step = self._xp.full((), self.started, _FLOAT32, self._like)
        else:
            step = ops.add(self._taken_steps, 1)
        with consuming(stays):
            trained, state = self.config.optimizer.update(
                self._trained, gradients, self._optimizer_state, step, rate
            )
        self._trained = _unless(stays, trained, self._trained)
        if self._scale is None:
            self._optimizer_state = state
            self._failed = stays
        else:
            self._optimizer_state = _unless(stays, state, self._optimizer_state)
            goes = ops.less(stays, 1.0)
            self._taken_steps = ops.where(goes, ops.add(self._taken_steps, 1), self._taken_steps)
            last = ops.multiply(stays, _at_minimum(self._scale))
            self._failed = ops.maximum(self._failed, last)
            self._scale = self._scaling.after(self._scale, goes)
        self._since = self._xp.add(self._since, self._failed)

    def _failed_steps(self) -> int:
        return self._count(self._since)

    def _failed_weights(self) -> Array:
        return nonfinite(self._total_of(self._trained))

    def _steps_taken(self) -> int:
        return self.started if self._scale is None else self._count(self._taken_steps)

    def _made_ready(self, share: float) -> tuple[Tree, Array]:
        if share == 1.0 and self.config.clip is None and self._scale is None:
            return self._total, nonfinite(self._total_of(self._total))
        if share not in self._readies:
            ready = partial(self._ready, share=share)
            plain = self._strategy.is_sharded
            self._readies[share] = ready if plain else self.compiler.compiled(ready)
        result: tuple[Tree, Array] = self._readies[share](self._total, self._scale)
        return result


class HostStepper(SplitStepper):
    """Steps on a CPU: reading a number costs no wait there, so a failed step is not begun."""

    def _start(self, steps: int) -> None:
        super()._start(steps)
        self._steps_failed = 0
        self._is_failing = False
        self._arrays: Any = leaves(self._trained)  # lists are reused: updates write into them
        optimizer = self.config.optimizer
        self._lists: Any = None
        if isinstance(optimizer, BuiltIn) and optimizer.is_uniform:
            self._lists = {name: leaves(tree) for name, tree in self._optimizer_state.items()}

    def add(self, batch: Any, weight: float = 1.0) -> Array:
        number = self._xp.full((), self.batches + 1, _INT32, self._like)
        (value, state), gradients = self._loss_and_gradients(
            self._trained, self._fixed, batch, self._seed, number, None
        )
        self._is_failing = self._is_failing or not math.isfinite(value)
        if not self._is_failing:
            self._keep_state(state)
        self._add_up(gradients, weight)
        return value

    def move(self, rate: float) -> None:
        gradients, skip = self._made_ready(1.0 / self._added)
        self.drop()
        self.started += 1
        self._is_failing = self._is_failing or bool(skip)
        if self._is_failing:
            self._steps_failed += 1
            return
        update = self.config.optimizer.update
        with consuming():
            if self._lists is None:
                self._trained, self._optimizer_state = update(
                    self._trained, gradients, self._optimizer_state, self.started, rate
                )
                return
            arrays: Any
            arrays, self._lists = update(
                self._arrays, leaves(gradients), self._lists, self.started, rate
            )
        if not all(map(is_, arrays, self._arrays)):
            self._arrays, self._trained = arrays, refilled(self._trained, arrays)

    @property
    def state(self) -> StepState:
        if self._lists is not None:
            self._optimizer_state = {
                name: refilled(self._trained, arrays) for name, arrays in self._lists.items()
            }
        return super().state

    @property
    def failed(self) -> bool:
        return self._is_failing or not math.isfinite(self._total_of(self._trained))

    def _failed_steps(self) -> int:
        return self._steps_failed


class FusedStepper(FunctionStepper):
    """A step is one compiled function, which consumes the parameters, the state and the counts."""

    def _start(self, steps: int) -> None:
        self._counts: dict[str, Array] = {
            "batches": self._number(self.batches, np.int32),
            "steps": self._number(steps, np.int32),
            "failed": self._number(0, np.float32),
            "since": self._number(0, np.float32),
        }
        self._whole = self.compiler.compiled(self._whole_step, "carry")
        self._first = self.compiler.compiled(self._gradients, "counts")
        self._more = self.compiler.compiled(self._gradients, "total", "counts")
        self._check_weights = self.compiler.compiled(lambda tree: nonfinite(total(tree)))
        self._updates: dict[float, Callable[..., Any]] = {}
        self._last_rate: tuple[float, Array] = (0.0, self._number(0, np.float32))
        self._in_flight: deque[Array] = deque()

    def step(self, batch: Any, rate: float) -> Array:
        self._check_batch(batch)
        self._carry, state, value = self._whole(
            self._carry, self._fixed, batch, self._seed, self._rate(rate)
        )
        self._keep_state(state)
        self.batches += 1
        self.started += 1
        return self._wait_for_few(value)

    def add(self, batch: Any, weight: float = 1.0) -> Array:
        self._check_batch(batch)
        gradients = self._first if self._total is None else self._more
        factor = None if weight == 1.0 else self._number(weight, np.float32)
        given = self._trained, self._scale, self._fixed, batch, self._seed, factor
        self._total, self._counts, state, value = gradients(self._total, self._counts, *given)
        self._keep_state(state)
        self.batches += 1
        self._added += weight
        return self._wait_for_few(value)

    def move(self, rate: float) -> None:
        share = 1.0 / self._added
        if share not in self._updates:
            update = partial(self._update, share=share)
            self._updates[share] = self.compiler.compiled(update, "carry")
        self._carry = self._updates[share](self._carry, self._total, self._rate(rate))
        self.drop()
        self.started += 1
        if not self._strategy.in_flight:
            self.engine.finish(self._counts)

    def _check_batch(self, batch: Any) -> None:
        if not self._strategy.checks_batches:
            return
        rest = self._seed, self._number(self.batches + 1, np.int32), None

        def loss(part: Any, rows: Any) -> Array:
            return self._loss(self._trained, self._fixed, part, *rest, rows)[0]

        self._strategy.check_batch(batch, loss)

    def _failed_steps(self) -> int:
        return self._count(self._counts["since"])

    def _failed_weights(self) -> Array:
        return self._check_weights(self._trained)

    def _steps_taken(self) -> int:
        return self._count(self._counts["steps"])

    def _rate(self, rate: float) -> Array:
        last = self._last_rate[0]
        if rate is not last and rate != last:  # NaN (the optimizer's own rate) != NaN
            self._last_rate = rate, self._number(rate, np.float32)
        return self._last_rate[1]

    def _wait_for_few(self, value: Array) -> Array:
        """Wait until few steps are in flight, so that neither memory nor a lazy graph grows."""
        self._in_flight.append(value)
        if len(self._in_flight) > self._strategy.in_flight:
            self.engine.finish(self._in_flight.popleft())
        return value

    @property
    def _carry(self) -> _Carry:
        return self._trained, self._optimizer_state, self._counts, self._scale

    @_carry.setter
    def _carry(self, carry: _Carry) -> None:
        self._trained, self._optimizer_state, self._counts, self._scale = carry

    def _whole_step(self, carry: _Carry, fixed: Tree, batch: Any, seed: Array, rate: Array) -> Any:
        trained, state, counts, scale = carry
        total, counts, own, value = self._gradients(
            None, counts, trained, scale, fixed, batch, seed, None
        )
        return self._update((trained, state, counts, scale), total, rate, 1.0), own, value

    def _gradients(
        self, total: Tree, counts: Any, trained: Tree, scale: Any, fixed: Tree, batch: Any,
        seed: Array, weight: Array | None,
    ) -> Any:  # fmt: skip
        number = ops.add(counts["batches"], 1)
        factor = None if scale is None else scale["scale"]
        differentiate = partial(self._autodiff.value_and_grad, more=True)
        loss_and_gradients = self._strategy.gradients(differentiate, self._loss)
        (value, state), gradients = loss_and_gradients(trained, fixed, batch, seed, number, factor)
        if factor is not None:
            value = ops.divide(value, factor)
        failed = ops.maximum(counts["failed"], self._failure(value, scale))
        if state:
            state = _select(ops.less(failed, 1.0), state, self._state(fixed))
        if weight is not None:

            def weigh(x: Array) -> Array:
                return ops.multiply(x, ops.astype(weight, primitives(x).dtype(x)))

            gradients = mapped(weigh, gradients)
        if total is not None:
            gradients = _add_trees(total, gradients)
        return gradients, {**counts, "batches": number, "failed": failed}, state, value

    def _update(self, carry: _Carry, total: Tree, rate: Array, share: float) -> _Carry:
        trained, state, counts, scale = carry
        gradients, skip = self._ready(total, scale, share)
        stays = ops.maximum(skip, counts["failed"])
        goes = ops.less(stays, 1.0)
        steps = ops.add(counts["steps"], 1)
        new, after = self.config.optimizer.update(trained, gradients, state, steps, rate)
        failed = stays
        if scale is not None:
            failed = ops.maximum(counts["failed"], ops.multiply(stays, _at_minimum(scale)))
            scale = self._scaling.after(scale, goes)
            after = _select(goes, after, state)  # a skipped step keeps the old state
        counts = {
            "batches": counts["batches"],
            "steps": ops.where(goes, steps, counts["steps"]),
            "failed": failed,
            "since": ops.add(counts["since"], failed),
        }
        return _select(goes, new, trained), after, counts, scale


def _at_minimum(scale: ScaleState) -> Array:
    """Return 1.0 if the loss scale cannot shrink further, else 0.0."""
    return ops.astype(ops.less_equal(scale["scale"], 1.0), "float32")


def _add_trees(total: Tree, new: Tree) -> Tree:
    """Return the sum of two trees, array by array."""
    return refilled(total, list(map(ops.add, leaves(total), leaves(new))))


def _select(goes: Array, new: TreeT, old: TreeT) -> TreeT:
    """Return the new tree if a condition holds, else the old one."""
    pairs = zip(leaves(new), leaves(old), strict=True)
    return refilled(new, [ops.where(goes, after, before) for after, before in pairs])


def _unless(stays: Array, new: Tree, old: Tree) -> Tree:
    """Return the old tree if `stays` is 1, else the new one; in-place updates are kept."""
    if all(map(is_, leaves(new), leaves(old))):
        return new
    return _select(ops.less(stays, 1.0), new, old)
