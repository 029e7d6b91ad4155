"""`nn.train`: a loop over a `Training` with validation, patience, callbacks and checkpoints."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, cast, overload

from anydevice._arrays.memory.out_of_memory import translating_oom
from anydevice._arrays.memory.stats import PeakMeter, memory_stats
from anydevice._arrays.move import to_numpy
from anydevice._compile.compile import Compiled
from anydevice._core import checks, hooks
from anydevice._core.device import Device
from anydevice._core.files import check_writable, is_there, remove_leftovers
from anydevice._core.names import other_keywords
from anydevice._core.record import Record, replace
from anydevice._core.table import Table
from anydevice._core.text import format_size, say
from anydevice._core.trees import Tree
from anydevice._formats.model import checked_path
from anydevice._libraries.layers import target_of
from anydevice._libraries.precision import Policy
from anydevice._nn.layer import Layer
from anydevice._nn.layers import with_activation
from anydevice._nn.losses import Loss, threshold_of
from anydevice._nn.model import Model, built_for
from anydevice._nn.optimizers import Schedule
from anydevice._parallel.mesh import Devices, Mesh
from anydevice._train.batches import (
    INPUT_ERRORS,
    Batches,
    Data,
    batch_name,
    batches_of,
    checked_data,
    first_of,
    length_of,
    prefix_error,
    rows_of,
)
from anydevice._train.callbacks import Callback, TrainingEvent, callbacks_of, step_callbacks
from anydevice._train.checkpoint import LoopState, is_checkpoint, lock_training
from anydevice._train.data_parallel import mesh_of
from anydevice._train.failures import check_shape, explain_error, wrong_batch
from anydevice._train.history import Epoch, History, TrainingProgress
from anydevice._train.metrics import Metric, Specs, metrics_of
from anydevice._train.pipeline import pipeline_reason
from anydevice._train.processes import train_in_processes
from anydevice._train.step_config import copied, default_optimize
from anydevice._train.training import ModelT, PathLike, Training
from anydevice.errors import AnyDeviceError, ConfigurationError

_VALIDATION = "validation"
P = ParamSpec("P")


class TrainingReport(Record):
    """How a model was trained: where, in which precision, and how its steps were compiled.

    `spread` describes the placement on several devices, and the reason. `peak` is the peak device
    memory of this process so far, `None` if it is not measured.
    """

    device: Device
    engine: str
    policy: Policy
    optimize: str
    how: str
    spread: str | None = None
    peak: int | None = None

    def __str__(self) -> str:
        return "\n".join(f"{name:<10} {text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        return hooks.render(Table(self._rows()), "html")

    def _rows(self) -> list[tuple[str, str]]:
        several = [] if self.spread is None else [("devices", self.spread)]
        return [
            ("device", f"{self.device}, {self.engine}"),
            *several,
            ("precision", str(self.policy)),
            ("optimize", f"{self.optimize}: {self.how}"),
        ]


class Trained(Record, Generic[ModelT]):
    """The result of `nn.train`; `stopped` is the reason for an early stop, `report` how it ran.

    `averaged` is the model with the parameters that `nn.EMA` averages; `None` without it.
    """

    model: ModelT
    history: History
    stopped: str | None = None
    report: TrainingReport | None = None
    averaged: Any = None

    def __str__(self) -> str:
        parts = [part for part in (self.model, self.report, self.history) if part is not None]
        ended = "" if self.stopped is None else f"\nstopped: {self.stopped}"
        return "\n\n".join(map(str, parts)) + ended

    def _repr_html_(self) -> str:
        rows = [] if self.report is None else self.report._rows()
        if self.report is not None and self.report.peak is not None:
            rows.append(("peak memory", f"{format_size(self.report.peak)}, of the process"))
        if self.stopped is not None:
            rows.append(("stopped", self.stopped))
        return self.history._repr_html_() + hooks.render(Table(rows), "html")

    def plot(self, path: PathLike) -> None:
        """Draw the losses into an `.svg` picture, as `history.plot` does."""
        self.history.plot(path)


class _Train(Protocol[P]):
    """The type of `nn.train`: a layer becomes a model, and other models keep their type."""

    @overload
    def __call__(self, model: Layer, /, *args: P.args, **kwargs: P.kwargs) -> Trained[Model]: ...
    @overload
    def __call__(self, model: Compiled, /, *args: P.args, **kwargs: P.kwargs) -> Trained[Any]: ...
    @overload
    def __call__(self, model: ModelT, /, *args: P.args, **kwargs: P.kwargs) -> Trained[ModelT]: ...


def _keeping_type(function: Callable[Concatenate[Any, P], Any]) -> _Train[P]:
    return cast("_Train[P]", function)


@_keeping_type
@other_keywords("training")
def train(
    model: Any,
    data: Data,
    optimizer: Any,
    loss: Loss | str | None = None,
    *,
    epochs: int,
    size: int | None = None,
    device: Device | str | None = None,
    devices: Mesh | Devices | None = None,
    strategy: str = "auto",
    precision: str | None = None,
    optimize: str | None = None,
    validation: Data | float | None = None,
    metrics: Specs = (),
    patience: int | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    schedule: Schedule | Any = None,
    callbacks: Callback
    | Callable[[TrainingEvent], Any]
    | Sequence[Callback | Callable[[TrainingEvent], Any]] = (),
    seed: int | None = None,
    save: PathLike | None = None,
    save_every: int | None = None,
    resume: PathLike | bool | None = None,
    progress: bool | None = None,
) -> Trained[Any]:
    """Train a model on all batches of `data` in each epoch, and return the result.

    `model` is a `nn.Model`, a layer (its input size is then taken from the first batch), or a
    module of PyTorch, Flax NNX, Equinox or MLX; `nn.Training` lists their optimizers and losses.
    `data` is an iterable of batches `(x, y)`, such as a list or a `DataLoader`, which is iterated
    once per epoch. It can also be a function of the seed and the epoch (1, 2, …) that returns the
    batches of that epoch, always the same for the same arguments; `nn.Batches` is one that shuffles
    arrays, and a tuple of two arrays `(x, y)` stands for one with batches of `size` rows, 32 by
    default. `loss` is a function of the output and `y`, or its name; "sgd", "adam" and "adamw" name
    optimizers with our defaults. `x` and `y` are arrays of any library or lists of numbers; float64
    is rounded to float32.

    >>> x = numpy.linspace(-1, 1, 64, dtype=numpy.float32).reshape(64, 1)
    >>> model = nn.build(nn.Dense(1, 16), "tanh", nn.Dense(16, 1), device="cpu")
    >>> data = nn.Batches(x, x**2, size=16)
    >>> adam, error = nn.Adam(1e-2), nn.mean_squared_error
    >>> trained = train(model, data, adam, error, epochs=30, optimize="none")
    >>> trained.history[-1].loss < 0.05 < trained.history[0].loss
    True

    An `nn.Model` is not changed, and neither is a module of Equinox; other modules are trained in
    place. The default `device` is the device of the parameters; on the CPU, the engine of an
    `nn.Model` is torch, jax or mlx, preferably one already imported. The same seed gives the same
    training. Further options:

    - `devices`: several devices, in place of `device`: a list, the name of a backend for all of
      its devices, or a `parallel.Mesh`. JAX drives several in this process; for PyTorch, a list
      starts a process for each. Each batch is divided over them, and losses equal those of one
      device, up to rounding; the returned model is on the first device.
    - `strategy`: "replicate" has all parameters on each of the devices, "shard" divides them and
      the optimizer's state; "auto" replicates if that takes less than half of the memory. The
      report gives the choice and its reason.
    - `precision`: "float32"; "mixed" computes in 16 bits and keeps parameters in 32, and
      "mixed_float16" does so in float16 everywhere; or "bfloat16" or "float16" throughout. In
      float16, the loss is scaled so that small gradients do not become 0. A step whose scaled
      gradients overflow changes nothing and halves the scale, and `history` counts it in
      `left_out`. The default is "float32", or "mixed" if the setting `mixed_precision` is on.
    - `optimize`: "none" compiles nothing, "default" compiles each step, "aggressive" takes more
      time for faster code. The default is "default", but "none" for modules of PyTorch, and for a
      small training (parameters times batches) by PyTorch on a CPU, which would end before it is
      compiled. A resumed training keeps its setting.
    - `validation`: data to compute a loss on after each epoch. Its first batch is checked before
      the training, unless it can be iterated only once. A number such as 0.2 holds back that share
      of an `nn.Batches`: examples chosen by the seed, or the last ones of data without `shuffle`.
    - `metrics`: "accuracy", "f1" and others, or your own functions, as in `nn.evaluate`: computed
      with the validation, for `history.metrics`.
    - `patience`: stop after this number of epochs without a smaller loss (of the validation, if it
      is given), and return the parameters of the best epoch.
    - `accumulate`: average the gradients of this number of batches for each step.
    - `clip`: the largest global norm of the gradients.
    - `schedule`: the rate of each step, instead of the optimizer's.
    - `callbacks`: one or several functions that are called after each epoch, or `nn.Callback`s.
    - `save`: a `.safetensors` file that is written atomically after each epoch, after every
      `save_every` steps, at the end and at Ctrl-C, before callbacks are called.
    - `resume`: such a file to continue from; `True` for the file of `save`, if it exists; `False`
      to start again and replace it. The result is exactly the same as without a break if the
      batches depend on the seed and the epoch alone. A new patience counts from the resumed epoch.
    - `progress`: a progress bar with the loss, the rate, the speed and the time left; by default
      shown on a terminal and in a notebook, and elsewhere a line an epoch on the error stream.

    The first Ctrl-C ends the training after the current step, the second at once. Raises
    `UnsupportedError`, with the engines that can train, if the device's engine has no gradients;
    `VerificationError`, with the step and the layer, if a value becomes NaN or infinite;
    `ConfigurationError` for invalid options, if the file of `save` exists and `resume` is not
    given, if another training is saving to it now, and if the file to resume from belongs to
    another training; `TransferError` if that file is damaged, or the file of `save` cannot be
    written.
    """
    arrays, data, validation = data, batches_of(data, size), batches_of(validation, size, False)
    if size is not None and data is arrays:
        text = (
            f"size={size!r} is for data=(x, y), and this data, a {type(data).__name__}, has its own"
        )
        raise ConfigurationError(text, source="size")
    del arrays, size
    given = dict(locals())
    if isinstance(model, Compiled):
        device = model.device if device is None and devices is None else device
        precision, optimize = precision or model.policy.name, optimize or model.optimize
        model = model.model
    if isinstance(validation, float | int):
        if not isinstance(data, Batches):
            raise ConfigurationError(
                f"validation={validation!r} holds back a share of examples in arrays, "
                f"nn.Batches(x, y, size=32), and this data is a {type(data).__name__}; split it "
                "before, and give validation= its other part",
                source="validation",
            )
        data, validation = data.split(validation, seed or 0)
    if isinstance(model, Layer):
        model = _build_model(model, data, seed or 0, device if devices is None else "cpu")
    why = pipeline_reason(model, device, devices, strategy)
    device, mesh = (device, None) if why else mesh_of(model, device, devices, strategy)
    threshold = threshold_of(model.layer) if isinstance(model, Model) else 0.0
    measured = metrics_of(metrics, threshold)
    if measured and validation is None:
        raise ConfigurationError(
            "metrics are computed on data that is not trained on: give validation= too, such as "
            "validation=0.2",
            source="metrics",
        )
    epochs = checks.integer("epochs", epochs, 1)
    patience = None if patience is None else checks.integer("patience", patience, 1)
    save_every = None if save_every is None else checks.integer("save_every", save_every, 1)
    if save_every is not None and save is None:
        raise ConfigurationError("save_every= needs save=", source="save_every")
    if isinstance(device, tuple):
        given |= {"model": model, "precision": precision, "optimize": optimize}
        return train_in_processes(train, given, device, Interrupts())
    leads = mesh is None or mesh.rank == 0
    with _saving(save, resume, leads) as target:
        source, length = _source(resume, target), length_of(data)
        training = Training(
            model,
            optimizer,
            checked_data(data, epochs),
            loss,
            device=device if mesh is None else None,
            devices=devices if why else mesh,
            strategy=strategy if why or mesh else "auto",
            precision=precision,
            optimize=optimize,
            accumulate=accumulate,
            clip=clip,
            schedule=schedule,
            seed=seed,
        )
        chosen, policy = training.device, training.config.policy
        if optimize is None and isinstance(model, Model):
            how = default_optimize(chosen, model, epochs, length)
            training.config = replace(training.config, optimize=how)
        settings: dict[str, Any] = {}
        if target is not None or source is not None:
            settings = training.settings(validation)
        begun, best = LoopState(), None
        if source is not None:
            patient = patience is not None
            checkpoint = training.resume(source, settings, patient=patient, optimize=optimize)
            begun, best = checkpoint.loop, checkpoint.best
        options = TrainOptions(
            None if validation is None else checked_data(validation, epochs, "validation"),
            epochs,
            patience,
            callbacks_of(callbacks),
            target,
            save_every,
            settings,
            measured,
        )
        done = (begun.epoch - 1) * (length or 0) + begun.position
        if leads and source is not None and begun.epoch > epochs:
            more = "" if begun.epoch - 1 == epochs else f", more than epochs={epochs}"
            say(
                f"{source} has {begun.epoch - 1} epochs already{more}: nothing is left to train, "
                "and a larger epochs= goes on"
            )
        with (
            translating_oom(chosen),
            TrainingProgress(epochs, length, done, progress if leads else False) as shown,
            Interrupts() as interrupts,
        ):
            interrupts.acknowledge = lambda: shown.ends("stopping; Ctrl-C again: now")
            stepper = training.stepper
            loop = TrainLoop(options, training, begun, best, shown, interrupts)

            def acknowledge() -> None:
                stepper.compiler.quiet = True  # a terminal interrupts compilers too
                when = "once compiled" if loop.is_compiling else "after this step"
                shown.ends(f"stopping {when}; Ctrl-C again: now")

            interrupts.acknowledge = acknowledge
            stopped = loop.run()
        if leads and stopped == "Ctrl-C":
            where = f"saved to {target}, go on with resume=" if target else "nothing was saved"
            say(f"stopped by Ctrl-C after step {stepper.started}: {where}")
        elif leads and policy.needs_loss_scale and 0 < stepper.started == stepper.skipped_steps:
            say(
                f"nothing was learned: each of the {stepper.started} steps was left out, since "
                f"numbers were too large for {policy.compute}; give smaller inputs, train for more "
                'steps, or take precision="bfloat16" or "float32"'
            )
        best = loop.best if patience is not None else None
        final = stepper.parameters if best is None else best
        report = TrainingReport(
            chosen,
            stepper.engine.name,
            policy,
            training.config.optimize,
            stepper.compiler.how,
            training.strategy.text,
            memory_stats(chosen).peak,
        )
        averaged, history = training.averaged, loop.state.history
        return Trained(training.model_with(final), history, stopped, report, averaged)


@contextmanager
def _saving(
    save: PathLike | None, resume: PathLike | bool | None, leads: bool
) -> Iterator[Path | None]:
    """Run a block with the file to save to: writable, locked, and not overwritten by mistake."""
    if save is None or not leads:
        yield None if save is None else checked_path(save)
        return
    target = checked_path(save)
    check_writable(target)
    with lock_training(target):
        if resume is None and is_there(target):
            on = "resume=True goes on with it" if is_checkpoint(target) else "it is not a training"
            raise ConfigurationError(
                f"save: {target} exists already; {on}, resume=False replaces it",
                source="save",
            )
        remove_leftovers(target)
        yield target


def _source(resume: PathLike | bool | None, save: Path | None) -> Path | None:
    """Return the file to resume from, if any."""
    if resume is None or resume is False:
        return None
    if resume is not True:
        return checked_path(resume)
    if save is None:
        raise ConfigurationError("resume=True needs save=", source="resume")
    return save if is_there(save) else None


def _build_model(layer: Layer, data: Any, seed: int, device: Any) -> Model:
    """Return a model of a layer, with the input size of the first batch."""
    first = first_of(data, seed, 1, "data")
    if first is None:
        raise ConfigurationError(
            f"data can be iterated only once, so {layer.label} cannot learn its input size from "
            "it; make the model with nn.build(…, input_shape=…)",
            source="model",
        )
    return built_for(layer, first[0], seed, device)


class TrainOptions(Record):
    """The options of the training loop; a `Training` has those of its steps."""

    validation: Any
    epochs: int
    patience: int | None
    callbacks: Sequence[Callback]
    save: Path | None
    save_every: int | None
    settings: Mapping[str, Any]
    metrics: Sequence[Metric] = ()


class TrainLoop:
    """Runs a training; `is_compiling` is true during a step that compiles first."""

    def __init__(
        self,
        options: TrainOptions,
        training: Training[Any],
        state: LoopState,
        best: Tree,
        progress: TrainingProgress,
        interrupts: Interrupts,
    ) -> None:
        self.options = options
        self.state = state
        self.best = best
        self.is_compiling = False
        self._training = training
        self._progress = progress
        self._interrupts = interrupts
        self._step_callbacks = step_callbacks(options.callbacks)
        self._stop: str | None = None
        self._began = time.monotonic()
        self._last_finite: float | None = None
        self._last_loss = math.nan
        self._passed = 0
        self._validation: Validation | None = None
        if options.validation is not None:
            self._validation = Validation(options.validation, training, options.metrics)
        training.on_compile = self._compiles

    def run(self) -> str | None:
        """Train until the end; return the reason of an early stop."""
        training, options = self._training, self.options
        if training.epoch <= options.epochs and self._validation is not None:
            self._validation.check()
        for epoch in training.epochs(options.epochs):
            waited = self.state.waited if self.state.history else 0
            if options.patience is not None and waited >= options.patience:
                self._stop = f"no better for {waited} epochs"
                break
            if self._stops():  # before the first step
                self._save()
                break
            if self._one_epoch(epoch):
                break
        return self._stop

    # One epoch

    def _stops(self) -> bool:
        """Whether Ctrl-C in any process, or a callback, stops the training now."""
        if self._training.strategy.should_stop(self._interrupts.requested):
            self._stop = "Ctrl-C"
        return self._stop is not None

    def _is_interruption(self, error: Exception) -> bool:
        """Whether Ctrl-C caused the error: a terminal sends it to compilers and loaders too."""
        return self._interrupts.requested and not isinstance(error, AnyDeviceError)

    def _one_epoch(self, epoch: int) -> bool:
        """Train for an epoch, or for the rest of it; return whether it was the last one."""
        self._began, self._meter = time.monotonic(), PeakMeter(self._training.device)
        self._batches(epoch)
        if self._stop is not None:
            self._read()
            self._save()
            return True
        count = self._training.position
        if not count:
            raise ConfigurationError(f"data gave no batches in epoch {epoch}", source="data")
        self._progress.learned(count)
        self._read()
        self._end_epoch(epoch)
        return self._stops()

    def _batches(self, epoch: int) -> None:
        training = self._training
        batches = self._until_interrupted(training.batches())
        for batch in batches:
            try:
                training.advance(batch)
            except Exception as error:
                if self._is_interruption(error):
                    self._stop = "Ctrl-C"
                    break
                wrong_rate = isinstance(error, ConfigurationError) and error.source == "schedule"
                if training.steps and wrong_rate:  # the steps before it are good
                    self._read()
                    self._save()
                training.raise_for(error, batch)
            if not training.waiting and self._after_step(epoch):
                break
        batches.close()
        if self._stop is not None:
            training.undo()
        elif training.finish():
            self._after_step(epoch)

    def _until_interrupted(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield the batches; if a Ctrl-C ends their loader, the training ends too."""
        try:
            yield from batches
        except Exception as error:
            if not self._is_interruption(error):
                raise
            self._stop = "Ctrl-C"

    def _compiles(self, begins: bool) -> None:
        """Note the begin or end of a step that compiles first."""
        self.is_compiling = begins
        if begins:
            self._progress.compiles(self._training.epoch, self._training.stepper.engine.name)
        else:
            self._progress.compiled()

    def _after_step(self, epoch: int) -> bool:
        """Read losses, save and call callbacks if due; return whether to stop."""
        training = self._training
        if training.is_due():
            self._read()
        save_every = self.options.save_every
        if save_every and training.steps % save_every == 0:
            self._read()
            self._save()
        for callback in self._step_callbacks:  # after the save, so an error loses nothing
            callback.step(self._event(epoch, None))
        return self._stops()

    def _read(self) -> None:
        """Read the losses since the last reading; raise if a step failed."""
        training, state = self._training, self.state
        losses = training.read()
        if not losses:
            return
        lost, examples = state.lost, state.examples
        for loss, count in losses:
            if math.isfinite(loss):  # a smaller loss scale fixes the others
                lost += loss * count
                examples += count
                self._last_finite = loss
        self._last_loss = losses[-1][0]
        self._passed += sum(count for _, count in losses)
        self.state = replace(state, lost=lost, examples=examples)
        self._progress.tell(
            training.epoch, training.position, self._last_finite, training.rate, self._passed
        )

    def _end_epoch(self, epoch: int) -> None:
        state, training = self.state, self._training
        loss = state.lost / state.examples if state.examples else math.nan
        validation = metrics = None
        try:
            if self._validation is not None:
                validation, metrics = self._validation.result()
        except AnyDeviceError:
            self._save()  # the trained parameters are good
            raise
        seconds = state.seconds + time.monotonic() - self._began
        steps, skipped = training.steps, training.stepper.skipped_steps
        peak = self._meter.peak
        ended = Epoch(
            epoch, loss, validation, training.rate, steps, seconds, skipped, metrics, peak
        )
        judged = loss if validation is None else validation
        patient = self.options.patience is not None
        better = math.isfinite(judged) and (state.best is None or judged < state.best)
        self.state = LoopState(
            history=History((*state.history, ended)),
            best=judged if patient and better else state.best,
            waited=0 if better or not patient else state.waited + 1,
        )
        if patient and better:
            self.best = copied(training.parameters)
        training.judge(judged)
        training.end_epoch()
        self._save()
        self._progress.ended(ended)
        for callback in self.options.callbacks:
            callback.epoch(self._event(epoch, ended))
        self._began = time.monotonic()

    def _event(self, epoch: int, ended: Epoch | None) -> TrainingEvent:
        training = self._training

        def stop() -> None:
            self._stop = "a callback"

        def loss() -> float:
            last = training.last_loss()
            return self._last_loss if last is None else last

        history = self.state.history
        return TrainingEvent(
            epoch, training.steps, training.rate, history, ended, lambda: training.model, loss, stop
        )

    def _save(self) -> None:
        if self.options.save is None:
            return
        state = self.state
        if self._training.position:
            state = replace(state, seconds=state.seconds + time.monotonic() - self._began)
        self._training.write(self.options.save, state, self.options.settings, self.best)


class Validation:
    """The loss and metrics of a training's parameters on held-out data."""

    def __init__(self, data: Any, training: Training[Any], metrics: Sequence[Metric] = ()) -> None:
        self._data = data
        self._metrics = metrics
        self._training = training
        self._shapes: set[Any] = set()

    def check(self) -> None:
        """Check the first batch, unless it can be read only once, before training in vain."""
        training = self._training
        epoch = training.epoch
        batch = first_of(self._data, training.seed, epoch, _VALIDATION, training.form)
        if batch is None:
            return
        where = batch_name(_VALIDATION, epoch, 1)
        check_shape(training.config, batch, where)
        self._check_batch(batch, where)

    def result(self) -> tuple[float, dict[str, float] | None]:
        """Return the mean loss over all examples, and the metrics, if any."""
        lost: list[tuple[float, int]] = []
        states: list[Any] = [None for _ in self._metrics]
        pending: deque[tuple[Any, Any, str]] = deque()
        training = self._training
        batches = training.place_batches(self._data, _VALIDATION)
        for number, batch in enumerate(batches, 1):
            where = batch_name(_VALIDATION, training.epoch, number)
            value, output = self._value(batch, where)
            if self._metrics:
                states = self._add_examples(states, output, batch, where)
            pending.append((value, batch, where))
            if len(pending) > training.strategy.in_flight:
                lost.append(self._wait_for(*pending.popleft()))
        lost += [self._wait_for(*value) for value in pending]
        examples = sum(count for _, count in lost)
        if not examples:
            raise ConfigurationError("validation gave no batches", source=_VALIDATION)
        mean = sum(loss * count for loss, count in lost) / examples
        pairs = zip(self._metrics, states, strict=True)
        return mean, {metric.name: metric.result(state) for metric, state in pairs} or None

    def _add_examples(self, states: list[Any], output: Any, batch: Any, where: str) -> list[Any]:
        target = target_of(batch)
        if output is None or target is None:
            needs = "a loss of (output, y)"
            if output is not None:
                needs = "batches (x, y), or with 'labels'"
            raise ConfigurationError(f"{where}: metrics need {needs}", source="metrics")
        # The loss includes this activation, so the output lacks it.
        output = with_activation(output, self._training.fused_activation)
        output, target = self._training.strategy.readable((output, target))
        try:
            pairs = zip(self._metrics, states, strict=True)
            return [metric.add(state, output, target) for metric, state in pairs]
        except INPUT_ERRORS as error:
            prefix_error(error, where)
            raise

    def _value(self, batch: Any, where: str) -> tuple[Any, Any]:
        shape = getattr(batch[0], "shape", None) if isinstance(batch, tuple) else None
        if shape not in self._shapes:
            check_shape(self._training.config, batch, where)
            self._shapes.add(shape)
        try:
            return self._training.stepper.evaluate(batch, with_output=bool(self._metrics))
        except AnyDeviceError as error:
            raise explain_error(error, self._training.stepper, batch, where) from None

    def _wait_for(self, value: Any, batch: Any, where: str) -> tuple[float, int]:
        loss = float(to_numpy(value))
        if not math.isfinite(loss):
            self._check_batch(batch, where)
        return loss, rows_of(batch)

    def _check_batch(self, batch: Any, where: str) -> None:
        batch = self._training.strategy.readable(batch)
        wrong = wrong_batch(self._training.config, batch, where)
        if wrong is not None:
            raise wrong


class Interrupts:
    """While the block runs, the first Ctrl-C only requests a stop; the second one interrupts.

    The first one calls `acknowledge` from the signal handler, so it must neither wait nor write to
    a Python stream. Active only in the main thread, if no other handler is installed.
    """

    def __init__(self) -> None:
        self.requested = False
        self.acknowledge: Callable[[], None] | None = None
        self._before: Any = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data worker, which ends with the training
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self.acknowledge is not None:
            self.acknowledge()

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
