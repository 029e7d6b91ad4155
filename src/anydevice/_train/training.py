"""`nn.Training`: a training for your own loop, step by step."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakValueDictionary, finalize

from anydevice._arrays.memory.allocator import return_freed_memory
from anydevice._arrays.memory.out_of_memory import translating_oom
from anydevice._arrays.move import to_numpy
from anydevice._compile.compile import OPTIMIZATIONS
from anydevice._core import checks
from anydevice._core.array import ScalarArray
from anydevice._core.device import Device
from anydevice._core.files import remove_leftovers
from anydevice._core.names import other_keywords
from anydevice._core.protocols import Stepper, StepState
from anydevice._core.record import NOTHING, Record, replace
from anydevice._core.text import shortened, warn
from anydevice._core.trees import Tree, leaf_names, leaves, partition, refilled
from anydevice._formats.model import checked_path
from anydevice._formats.packed import unpacked
from anydevice._libraries.layers import ModuleLayer, layer_of, optimizer_of
from anydevice._libraries.native import NativeAdapter, cast_weights
from anydevice._libraries.precision import policy_of
from anydevice._libraries.registry import adapter_of, compile_device, part, training_device
from anydevice._machine.engines import registry
from anydevice._nn.layer import Layer, Run, state_leaves
from anydevice._nn.losses import fuse_loss, fused_activation, loss_of, remark_on
from anydevice._nn.model import Model, frozen_layers, trained_leaves
from anydevice._nn.optimizers import AVERAGE, EMA, SGD, Optimizer, Schedule, rate_of
from anydevice._parallel.mesh import Devices, Mesh, one_a_process
from anydevice._train import failures, randomness
from anydevice._train.batches import (
    batch_name,
    checked_data,
    may_shuffle,
    module_batch,
    names_batch,
    pair_of,
    placed_batches,
    rows_of,
)
from anydevice._train.checkpoint import (
    Checkpoint,
    LoopState,
    lock_training,
    read_checkpoint,
    settings_of,
    write_checkpoint,
)
from anydevice._train.data_parallel import mesh_of, strategy_for
from anydevice._train.pipeline import PipelineStepper, PipelineStrategy, pipelined
from anydevice._train.step_config import CompiledSteps, StepConfig, copied
from anydevice._train.stepper import stepper_for
from anydevice.errors import AnyDeviceError, ConfigurationError, TransferError

PathLike = str | os.PathLike[str]
ModelT = TypeVar("ModelT")

_READ_EVERY = 0.5
"""Seconds between two readings of the losses."""

_READ_TOGETHER = 8
"""Batches between two readings in several processes."""

_MOST_BYTES = 256 * 2**20
"""Maximum bytes of batches kept between two readings."""

_MOST_BATCHES = 512
"""Maximum batches between two readings."""

_ARRAYS = ("parameters", "optimizer", "scale", "total", "own")
"""Fields of a step's state that may be on several devices."""

_CLIP = "it is the largest norm of the gradients"
_warned: set[str] = set()
_locks: WeakValueDictionary[Path, ExitStack] = WeakValueDictionary()
"""The locks of the files that trainings of this process save to."""


class _LossWithModels(Record):
    """A loss that takes models by name; the target comes with their parameters."""

    loss: Any
    layers: tuple[tuple[str, Layer], ...]

    def __call__(self, output: Any, target: Any) -> Any:
        target, present = target
        models = {name: partial(own.apply, present[name], run=Run()) for name, own in self.layers}
        return self.loss(output, target, **models)


class Training(Generic[ModelT]):
    """Training in your own loop: it moves batches, computes gradients, clips, steps and saves.

    `model` is a `nn.Model`, or a module of PyTorch, Flax NNX, Equinox or MLX. `optimizer` is one of
    `nn`, or of the module's library: `torch.optim`, optax, `mlx.optimizers`. `loss` is a function
    of the output and the targets, or its name. If its first parameter is called `model`, it gets
    the model and the batch instead: `loss(model, x, y)`. It can be left out for a model with a loss
    in its output, as in Hugging Face. `loader` gives the batches, like the data of `nn.train`:
    pairs, or dicts of the model's arguments.

    >>> x = numpy.linspace(-1, 1, 64, dtype=numpy.float32).reshape(64, 1)
    >>> model = nn.build(nn.Dense(1, 16), "tanh", nn.Dense(16, 1), device="cpu")
    >>> data = nn.Batches(x, x**2, size=16)
    >>> training = Training(model, nn.Adam(1e-2), data, "mean_squared_error")
    >>> losses = []
    >>> for epoch in training.epochs(30):
    ...     for batch in training:
    ...         losses.append(training.step(batch))
    >>> float(losses[-1]) < 0.05 < float(losses[0])
    True
    >>> tuple(training.model([[0.5]]).shape), training.steps
    ((1, 1), 120)

    A module of PyTorch, Flax NNX or MLX is trained in place; `training.model` is the trained model
    of any kind. Further options, as in `nn.train`:

    - `devices` and `strategy`: several devices.
    - `precision`: "float32", "mixed", "mixed_float16", "bfloat16" or "float16"; `skipped_steps`
      counts the steps in which a loss scaled for float16 overflowed.
    - `accumulate`: steps use the mean gradient of this number of batches, weighted by their rows.
    - `clip`: the largest global norm of the gradients.
    - `schedule`: the rate of each step, or a scheduler of `torch.optim.lr_scheduler`.
    - `others`: other trainings, such as `{"judge": discriminator}` of a GAN; the loss gets their
      current models, in inference mode, under these names, as in `loss(output, y, judge)`.
    - `seed`: decides dropout and the shuffling of data. Modules of PyTorch and MLX use the global
      random numbers of these libraries, which are seeded only if `seed` is given.
    """

    @other_keywords("training")
    def __init__(
        self,
        model: ModelT,
        optimizer: Any,
        loader: Any = None,
        loss: Any = None,
        *,
        device: Device | str | None = None,
        devices: Mesh | Devices | None = None,
        strategy: str = "auto",
        precision: str | None = None,
        optimize: str | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        schedule: Any = None,
        others: Mapping[str, Training[Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        if optimize is not None and optimize not in OPTIMIZATIONS:
            raise ConfigurationError(
                f"optimize is one of {', '.join(OPTIMIZATIONS)}, not {optimize!r}",
                source="optimize",
            )
        accumulate = checks.integer("accumulate", accumulate, 1)
        clip = None if clip is None else checks.number("clip", clip, above=0, note=_CLIP)
        seed = None if seed is None else checks.integer("seed", seed, 0)
        self._own_optimizer = own = optimizer_of(optimizer)
        """The optimizer of a step; `None` if it is one of PyTorch's."""
        model, why = pipelined(model, device, devices, strategy)
        if why is not None:
            device, devices, strategy = None, None, "auto"
        line = None if why is None else PipelineStrategy(model, why)
        self._given: Any = model
        self._data, self._optimizer = loader, optimizer
        device, mesh = mesh_of(model, device, devices, strategy)
        if isinstance(device, tuple):
            raise one_a_process(len(device), "torch")
        self._schedule = schedule
        self.seed = seed or 0
        self.fused_activation: Any = None
        """The final activation of the model, if the loss includes it; those of heads by name."""
        frozen: frozenset[str] = frozenset()
        if isinstance(model, Model):
            self.device = line.device if line else training_device(NativeAdapter(model), device)
            if loss is None:
                raise ConfigurationError(
                    "loss is missing: give a function of (output, y), or a name such as "
                    "'cross_entropy'",
                    source="loss",
                )
            loss = loss_of(loss)
            inner = model.layer.alone
            layer, changed = fuse_loss(inner, loss)
            layer = layer if inner is model.layer else replace(model.layer, layer=layer)
            self.fused_activation = fused_activation(loss, inner) if changed else None
            trained, frozen = trained_leaves(model), frozen_layers(model)
            remark = remark_on(inner, loss)
            if remark is not None and remark not in _warned:
                _warned.add(remark)
                warn(remark)
            parameters = model.parameters
        else:
            layer = layer_of(model)
            adapter = adapter_of(model)
            self.device = line.device if line else compile_device(adapter, device, compiled=False)
            loss = None if loss is None else loss_of(loss, of_module=True)
            parameters = layer.parameters
            trained = [not state for state in state_leaves(layer, parameters)]
        _check_library(layer, optimizer)
        self.strategy = line or strategy_for(mesh, strategy, self.device, parameters)
        policy = policy_of(precision, self.device)
        self.strategy.check(layer, frozen, policy, own)
        has_stepper = isinstance(layer, ModuleLayer) and layer.has_stepper
        self.config = StepConfig(
            layer,
            loss,
            own if own is not None else SGD(),
            policy,
            clip,
            accumulate,
            optimize or ("none" if has_stepper else "default"),
            None if has_stepper or all(trained) else tuple(trained),
            frozen,
        )
        self._others = self._with_others(others or {}, mesh is not None or line is not None)
        if not any(trained):
            advice = ""
            if has_stepper and leaves(parameters):
                advice = "; model.requires_grad_() unfreezes those that it has"
            elif leaves(parameters) and hasattr(model, "unfreeze"):
                advice = "; model.unfreeze() changes that"
            text = f"this model has no parameters to train{advice}"
            raise ConfigurationError(text, source="model")
        self._like = parameters
        self._rate_at = self._rates(own)
        if has_stepper:
            if own is None:
                own_schedule = schedule if self._rate_at is None else None
                part("torch", "step").check_parts(model, optimizer, own_schedule)
            theirs = optimizer if own is None else None
            layer = self.strategy.module(layer, policy.parameters, theirs)
            self.config = replace(self.config, layer=layer)
            self._like = layer.parameters
        if isinstance(layer, ModuleLayer) and seed is not None:
            randomness.seed_modules(layer.library, seed)
        self._stepper: Stepper | None = None
        self.epoch, self.position = 1, 0
        self.waiting = 0
        """The number of batches with accumulated gradients that no step has used yet."""
        self.rate = 0.0
        self._judged: list[float] = []  # losses of epochs, for schedules that depend on them
        self._factor = 1.0
        self._first_rows = 0
        self._placed: Any = None
        self.form = module_batch if isinstance(layer, ModuleLayer) else pair_of
        self._unread: list[tuple[failures.TrainedBatch, Any]] = []
        """The batches since the last reading, with their losses on the device."""
        self._kept_bytes = 0
        self._last_reading = time.monotonic()
        self._scopes: dict[Any, tuple[Callable[[], AbstractContextManager[Any]], int]] = {}
        """The context in which a step runs, and the bytes of its batch, by the batch's shapes."""
        self._random: Mapping[str, Any] = NOTHING
        """Random states at the start of the epoch, and to continue with."""
        self.on_compile: Callable[[bool], None] | None = None

    # The loop

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, from 1 or from where a loaded file stopped.

        Raises `ConfigurationError` if the loader does not give batches in each of them.
        """
        if self._data is not None:
            checked_data(self._data, count - self.epoch + 1, "loader")
        while self.epoch <= count:
            before = self.epoch
            yield before
            if self.epoch == before:  # the loop did not iterate over this training
                self.end_epoch()
        self.read()  # so that a training shorter than a second fails too

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches left in the current epoch, on the device."""
        if self._data is None:
            raise ConfigurationError(
                "this training has no loader; give one, or call step() with batches of your own",
                source="loader",
            )
        empty = not self.position
        for batch in self.batches():
            empty = False
            self._placed = batch
            yield batch
        if empty:
            raise ConfigurationError(
                f"loader gave no batches in epoch {self.epoch}", source="loader"
            )
        self.end_epoch()

    def step(self, batch: Any) -> ScalarArray:
        """Train on a batch, and return its loss as an array on the device.

        Every `accumulate` batches, the parameters change. Raises `VerificationError`, with the step
        and the layer, if a value became NaN or infinite: at once or within a second.
        """
        if batch is not self._placed:
            batch = self.strategy.place(self.form(batch))
            if self.strategy.is_several:
                where = batch_name("data", self.epoch, self.position + 1)
                self.strategy.meet(rows_of(batch), where)
        self._placed = None
        try:
            value = self.advance(batch)
        except Exception as error:
            self.raise_for(error, batch)
        if not self.waiting and self.is_due():
            self.read()
        return value

    @property
    def model(self) -> ModelT:
        """The model with the present parameters; a module of PyTorch, NNX or MLX is the original.

        An `nn.Model` is a copy, which later steps do not change.
        """
        in_place = self._has_stepper and getattr(self.config.layer, "given", None) is self._given
        return self._given if in_place else self.model_with(copied(self.parameters))

    @property
    def averaged(self) -> Any:
        """The model with the parameters that `nn.EMA` averages; `None` with other optimizers."""
        if not isinstance(self._own_optimizer, EMA):
            return None
        state, parameters = self.stepper.state, self.parameters
        own = state.optimizer if state.own is None else unpacked(state.own)["optimizer"]["state"]
        names = zip(leaf_names(own[AVERAGE]), leaves(own[AVERAGE]), strict=True)
        average, now = dict(names), copied(parameters)
        pairs = zip(leaf_names(parameters), leaves(parameters), strict=True)
        model = self.model_with(refilled(parameters, [average.get(name, x) for name, x in pairs]))
        if isinstance(self.config.layer, ModuleLayer):
            model = deepcopy(model)
            self.model_with(now)
        return model

    def judge(self, loss: float) -> None:
        """Tell the schedule the loss of an epoch; `nn.PlateauRate` lowers the rate by it."""
        self._set_judged([*self._judged, min(sys.float_info.max, float(loss))])  # NaN too

    def _set_judged(self, losses: Sequence[float]) -> None:
        own = getattr(self._own_optimizer, "rate", None)
        schedule = own if self._schedule is None else self._schedule
        self._judged = list(losses)
        self._factor = schedule.factor_after(losses) if isinstance(schedule, Schedule) else 1.0

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return 0 if self._stepper is None else self._stepper.started

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because a loss scaled for float16 overflowed."""
        return 0 if self._stepper is None else self._stepper.skipped_steps

    def save(self, path: PathLike) -> None:
        """Save the whole training in a `.safetensors` file, atomically.

        The file has the parameters, the state of the optimizer and the schedule, the random
        states, and the position in the data. Raises `ConfigurationError`, with the process, if
        another process trains and has last saved to this file.
        """
        self.read()
        target = checked_path(path)
        if self.strategy.leads:
            self._lock(target)
        self.write(target, LoopState(), self.settings())
        remove_leftovers(target)

    def load(self, path: PathLike) -> None:
        """Continue from a file of `save`, exactly as without a break.

        Batches that `for batch in training` gave are not given again. Raises `ConfigurationError`,
        with the first difference, if the file is from another training, and `TransferError` if it
        is damaged.
        """
        self.resume(checked_path(path), self.settings())

    def _lock(self, path: Path) -> None:
        lock = _locks.get(path)
        if lock is None:
            release = lock_training(path).close
            lock = _locks[path] = ExitStack()
            finalize(lock, release)
        self._file = lock

    # Used by nn.train

    @property
    def stepper(self) -> Stepper:
        """The stepper, made on first use."""
        if self._stepper is None:
            with translating_oom(self.device):
                self._stepper = self._stepper_for(self._first_state())
        return self._stepper

    @property
    def parameters(self) -> Tree:
        return self.stepper.parameters

    def model_with(self, parameters: Any) -> Any:
        """Return the model with these parameters."""
        layer, parameters = self.config.layer, self.strategy.whole(parameters)
        if isinstance(layer, ModuleLayer):
            return layer.finished(parameters)
        return self._given.with_parameters(parameters)

    def batches(self) -> Iterator[Any]:
        """Yield the batches left in the epoch, on the device."""
        if not self.position:
            shuffles = may_shuffle(self._data)
            self._random = {"epoch": randomness.host_state(self._data)} if shuffles else {}
        elif "epoch" in self._random:
            randomness.set_host_state(self._random["epoch"], self._data)
        return self.place_batches(self._data, "data", self.position)

    def place_batches(self, data: Any, name: str, skip: int = 0) -> Iterator[Any]:
        """Yield the batches of data in this epoch, on the device, without the first `skip`."""
        strategy = self.strategy
        batches = placed_batches(
            data,
            self.seed,
            self.epoch,
            self.device,
            skip=skip,
            ahead=strategy.is_ahead,
            name=name,
            form=self.form,
            skipped=self._after_skipping,
            place=strategy.place,
        )
        return strategy.together(batches, name, self.epoch, skip)

    def _after_skipping(self) -> None:
        # On an accelerator only the data draws from the host: batches are placed ahead.
        if "now" in self._random and self.device.kind == "cpu":
            randomness.set_host_state(self._random["now"], self._data)

    def advance(self, batch: Any) -> Any:
        """Train on a placed batch, without reading losses or explaining errors."""
        stepper, accumulate = self.stepper, self.config.accumulate
        shape = _shapes(batch)
        is_new = shape not in self._scopes
        if is_new:
            failures.check_shape(
                self.config, batch, batch_name("data", self.epoch, self.position + 1)
            )
            if stepper.compiler.compiles and self.on_compile is not None:
                self.on_compile(True)
            size = sum([getattr(x, "nbytes", 0) for x in leaves(batch)])
            self._scopes[shape] = stepper.scope_of(batch), size
        scope, size = self._scopes[shape]
        if not self.waiting:
            rates = self._rate_at
            self.rate = stepper.rate if rates is None else rate_of(rates, stepper.started + 1)
            if self._factor != 1.0:
                self.rate *= self._factor
        with scope():
            if accumulate == 1:
                value = stepper.step(self._join_models(batch), self.rate)
            else:
                rows = rows_of(batch)
                self._first_rows = self._first_rows if self.waiting else rows
                value = stepper.add(self._join_models(batch), rows / self._first_rows)
        if is_new:
            failures.check_loss(self.config, value)
            if self.on_compile is not None:
                self.on_compile(False)
        self.position += 1
        self.waiting = (self.waiting + 1) % accumulate
        step = stepper.started + (accumulate > 1)  # with accumulation, the step is yet to come
        self._unread.append((failures.TrainedBatch(batch, stepper.batches, step), value))
        self._kept_bytes += size
        if accumulate > 1 and not self.waiting:
            stepper.move(self.rate)
        return value

    def _join_models(self, batch: Any) -> Any:
        """Return a batch for a step: with the present parameters of other trainings, if any."""
        if not isinstance(self.config.loss, _LossWithModels):
            return batch
        if not isinstance(batch, tuple) or len(batch) != 2:
            text = "with others=, a batch must be a pair (x, y); y may be None"
            raise ConfigurationError(text, source="data")
        present = {name: other.parameters for name, other in self._others.items()}
        return batch[0], (batch[1], present)

    def _with_others(self, others: Mapping[str, Any], several: bool) -> Mapping[str, Any]:
        """Return the other trainings; the loss then takes their models by name."""
        layers = []
        for name, other in others.items():
            models: list[Any] = [getattr(own, "_given", None) for own in (self, other)]
            if several or not all(isinstance(model, Model) for model in models):
                text = f"others[{name!r}] must be an nn.Training of an nn.Model on one device"
                raise ConfigurationError(f"{text}, as this one is", source="others")
            layers.append((name, models[1].layer))
        if layers:
            loss = _LossWithModels(self.config.loss, tuple(layers))
            self.config = replace(self.config, loss=loss)
        return others

    def raise_for(self, error: Exception, batch: Any) -> NoReturn:
        """Raise an error of this batch, or a better explanation of it."""
        of_schedule = isinstance(error, ConfigurationError) and error.source == "schedule"
        if of_schedule or names_batch(error):
            raise error
        where = batch_name("data", self.epoch, self.position + 1)
        instead = failures.explain_error(error, self.stepper, self._join_models(batch), where)
        if instead is error:
            raise error
        raise instead from None if isinstance(error, AnyDeviceError) else error

    def finish(self) -> bool:
        """Take the step of accumulated batches; return whether there were any."""
        if not self.waiting:
            return False
        self.waiting = 0
        self.stepper.move(self.rate)
        return True

    def undo(self) -> None:
        """Forget the accumulated batches, as if they were still to come."""
        if self.waiting:
            del self._unread[-self.waiting :]
            self.position -= self.waiting
            self.stepper.batches -= self.waiting
            self.waiting = 0
            self.stepper.drop()

    def is_due(self) -> bool:
        """Whether it is time to read the losses."""
        passed = time.monotonic() - self._last_reading >= _READ_EVERY
        if self.strategy.is_several:  # all processes must read after the same step
            passed = len(self._unread) >= _READ_TOGETHER
        return passed or self._kept_bytes >= _MOST_BYTES or len(self._unread) >= _MOST_BATCHES

    def read(self) -> list[tuple[float, int]]:
        """Return the losses since the last reading, with their examples; raise if a step failed."""
        unread, self._unread, self._kept_bytes = self._unread, [], 0
        self._last_reading = time.monotonic()
        if not unread:
            return []
        batches, values = zip(*unread, strict=True)
        # One by one is faster on a CPU.
        on_cpu = self.device.kind == "cpu"
        losses = [x.item() for x in values] if on_cpu else to_numpy(list(values))
        results = [(float(x), rows_of(b.batch)) for x, b in zip(losses, batches, strict=True)]
        if self.stepper.failed:
            raise self._failure(list(batches))
        return results

    def last_loss(self) -> float | None:
        """Return the loss of the last unread batch; wait for it."""
        return float(to_numpy(self._unread[-1][1])) if self._unread else None

    def settings(self, validation: Any = None) -> dict[str, Any]:
        """Return the settings that resuming requires, as JSON."""
        settings = settings_of(self.config, self.seed, self._schedule, self._data, validation)
        if self._own_optimizer is None:
            part("torch", "step").check_all_held(self.config.layer, self._optimizer)
            settings["optimizer"] = {"kind": type(self._optimizer).__name__}
            if self._schedule is not None and self._rate_at is None:
                settings["schedule"] = {"kind": type(self._schedule).__name__}
        if isinstance(self._given, Model):
            settings["frozen"] = sorted(self._given.frozen) or None
        return settings

    def write(
        self, path: Path, loop: LoopState, settings: Mapping[str, Any], best: Tree = None
    ) -> None:
        """Write a checkpoint, with the state of the surrounding loop."""
        loop = replace(loop, epoch=self.epoch, position=self.position, rate=self.rate)
        loop = replace(loop, judged=tuple(self._judged))
        random = dict(self._random) if self.position else {}
        if isinstance(self.config.layer, ModuleLayer) or may_shuffle(self._data):
            random |= {
                "now": randomness.host_state(self._data),
                "device": randomness.device_state(self.device),
            }
        state, saved = self.stepper.state, self.strategy.saved
        state = replace(state, **{name: saved(getattr(state, name)) for name in _ARRAYS})
        checkpoint = Checkpoint(
            state, loop, self.config.optimize, saved(best), random, self._first_rows
        )
        if self.strategy.leads:
            write_checkpoint(path, checkpoint, settings)
        self.strategy.wait()

    def resume(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        patient: bool = False,
        optimize: str | None = None,
    ) -> Checkpoint:
        """Continue from a checkpoint and return it; `optimize` overrides how it was compiled."""
        checkpoint = read_checkpoint(
            path,
            settings,
            self._like,
            None if self._has_stepper else self._own_optimizer,
            self.strategy.reads_to,
            patient=patient,
            trained=self.config.trained,
        )
        self.config = replace(self.config, optimize=optimize or checkpoint.optimize)
        try:
            with translating_oom(self.device):
                self._stepper = self._stepper_for(checkpoint.step)
            if "now" in checkpoint.random:
                randomness.set_host_state(checkpoint.random["now"], self._data)
                randomness.set_device_state(self.device, checkpoint.random["device"])
        except AnyDeviceError:
            raise
        except Exception as error:  # libraries raise their own for states that do not fit
            raise TransferError(
                f"{path} does not fit this model, optimizer and schedule "
                f"({shortened(str(error), 200)}); use those that it was saved with, or another path"
            ) from error
        loop = checkpoint.loop
        self.epoch, self.position, self.rate = loop.epoch, loop.position, loop.rate
        self._set_judged(loop.judged)
        self.waiting = self.position % self.config.accumulate if checkpoint.step.added else 0
        self._first_rows = checkpoint.rows
        self._random, self._unread, self._kept_bytes = checkpoint.random, [], 0
        best = None if checkpoint.best is None else self.strategy.parameters(checkpoint.best)
        return replace(checkpoint, best=best)

    def end_epoch(self) -> None:
        """Go on to the next epoch."""
        self.finish()
        self.epoch += 1
        self.position = 0

    def _failure(self, batches: list[failures.TrainedBatch]) -> Exception:
        stepper, readable = self.stepper, self.strategy.readable
        since, name = stepper.failed_since, stepper.engine.name
        own = [batch for batch in batches if batch.step == since] or batches
        own = [batch._replace(batch=self._join_models(readable(batch.batch))) for batch in own]
        parameters = readable(stepper.parameters)
        wrong = failures.wrong_target(self.config, parameters, own)
        return wrong or failures.failure(self.config, name, parameters, own, since, self.seed)

    def _rates(self, own: Optimizer | None) -> Callable[[int], float] | None:
        """Return the rate of each step; `None` if the optimizer or its schedule sets it."""
        schedule = self._schedule
        if hasattr(schedule, "get_last_lr"):
            if own is not None:
                raise ConfigurationError(
                    "a scheduler of PyTorch needs an optimizer of PyTorch; give one of "
                    "torch.optim, or a schedule such as nn.WarmUp",
                    source="schedule",
                )
            return None
        if schedule is None:
            return None if own is None or math.isnan(own.rate_at(1)) else own.rate_at
        if not callable(schedule):
            raise ConfigurationError(
                "schedule must give the rate of each step, as nn.CosineRate(1e-3, steps=1000) or "
                f"a function of the step does, and is {schedule!r}; a constant rate belongs to "
                "the optimizer",
                source="schedule",
            )
        if own is not None and math.isnan(own.rate_at(1)):
            raise ConfigurationError(
                f"{_with_library(self._optimizer)} has its own rate: give the schedule to it",
                source="schedule",
            )
        rates: Callable[[int], float] = schedule
        return rates

    def _first_state(self) -> StepState:
        config = self.config
        if self._has_stepper:
            return StepState(self._like, {})
        parameters = self.strategy.parameters(self._like)
        parameters = copied(cast_weights(config.layer, parameters, config.policy.parameters))
        trained = parameters
        if config.trained is not None:
            trained, _ = partition(parameters, config.trained)
        return StepState(parameters, config.optimizer.init(trained))

    @property
    def _has_stepper(self) -> bool:
        """Whether the library of the module has a stepper of its own."""
        layer = self.config.layer
        return isinstance(layer, ModuleLayer) and layer.has_stepper

    def _stepper_for(self, state: StepState) -> Stepper:
        if (self.device.backend, self.device.engine) == ("cpu", "torch"):  # others reuse memory
            return_freed_memory()
        if self._has_stepper:
            given = self._optimizer if self._own_optimizer is None else None
            schedule = self._schedule if self._rate_at is None else None
            config = self.strategy.config(self.config)
            compiler = CompiledSteps(registry.load("torch"), config.optimize, fixed=config.is_ours)
            stepper: Stepper = part("torch", "step").TorchStepper(
                self.strategy, config, state, compiler, given, schedule
            )
            return stepper
        kind = PipelineStepper if isinstance(self.strategy, PipelineStrategy) else None
        return stepper_for(self.strategy, self.config, state, self.seed, kind)


def _with_library(value: Any) -> str:
    """Return the class name of a value with its library, such as torch's AdamW."""
    return f"{type(value).__module__.split('.')[0]}'s {type(value).__name__}"


def _check_library(layer: Any, optimizer: Any) -> None:
    """Raise if the optimizer belongs to another library than the module."""
    library = layer.library if isinstance(layer, ModuleLayer) else None
    name = type(optimizer).__module__.split(".")[0]
    needed = {"optax": "jax", "mlx": "mlx", "torch": "torch"}.get(name)
    if needed is None or isinstance(optimizer, Optimizer) or needed == library:
        return
    whose = "a nn.Model" if library is None else f"a module of {library}"
    raise ConfigurationError(
        f"{_with_library(optimizer)} does not train {whose}; give one such as nn.AdamW(1e-3)",
        source="optimizer",
    )


def _shapes(batch: Any) -> Any:
    parts = batch.values() if type(batch) is dict else batch
    if type(batch) in (tuple, dict):
        return tuple([getattr(part, "shape", None) for part in parts])
    return getattr(batch, "shape", None)
