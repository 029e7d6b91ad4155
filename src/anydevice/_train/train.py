"""`nn.train`: train a model, with checkpoints, validation and early stopping."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anydevice._arrays.memory.out_of_memory import translating_oom
from anydevice._arrays.memory.stats import memory_stats
from anydevice._compile.compile import Compiled
from anydevice._core import checks, hooks
from anydevice._core.device import Device
from anydevice._core.files import check_writable, is_there, remove_leftovers
from anydevice._core.record import Record, replace
from anydevice._core.table import Table
from anydevice._core.text import format_size
from anydevice._formats.model import checked_path
from anydevice._libraries.precision import Policy
from anydevice._nn.layer import Layer
from anydevice._nn.losses import Loss, threshold_of
from anydevice._nn.model import Model, built_for
from anydevice._nn.optimizers import Schedule
from anydevice._parallel.mesh import Devices, Mesh
from anydevice._train.batches import Batches, Data, checked_data, first_of, length_of
from anydevice._train.callbacks import Callback, TrainingEvent, callbacks_of
from anydevice._train.checkpoint import LoopState, is_checkpoint, sole_training
from anydevice._train.history import History
from anydevice._train.loop import Interrupts, TrainLoop, TrainOptions
from anydevice._train.metrics import Metric, Specs, metrics_of
from anydevice._train.pipeline import pipeline_reason
from anydevice._train.progress import TrainingProgress
from anydevice._train.step_config import default_optimize
from anydevice._train.strategy import mesh_of
from anydevice._train.training import PathLike, Training, TrainingOptions
from anydevice.errors import ConfigurationError


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


class Trained(Record):
    """The result of `nn.train`: the trained model, its history, and how it was trained.

    `stopped` is the reason for an early stop.
    """

    model: Any
    history: History
    stopped: str | None = None
    report: TrainingReport | None = None

    def __str__(self) -> str:
        parts = [each for each in (self.model, self.report, self.history) if each is not None]
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


def train(
    model: Any,
    data: Data,
    optimizer: Any,
    loss: Loss | str | None = None,
    *,
    epochs: int,
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
) -> Trained:
    """Train a model on all batches of `data` in each epoch, and return the result.

    `model` is a `nn.Model`, a layer (its input size is then taken from the first batch), or a
    module of PyTorch, Flax NNX, Equinox or MLX; `nn.Training` lists their optimizers and losses.
    `data` is an iterable of batches `(x, y)`, such as a list or a `DataLoader`, which is iterated
    once per epoch. It can also be a function of the seed and the epoch (1, 2, …) that returns the
    batches of that epoch, always the same for the same arguments; `nn.Batches` is one that shuffles
    arrays. `loss` is a function of the output and `y`, or its name. `x` and `y` are arrays of any
    library or lists of numbers; float64 is rounded to float32.

    >>> import numpy
    >>> from anydevice import nn
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
      its devices, or a `parallel.Mesh`. One process drives several through JAX. Each batch is
      divided over them, and losses equal those of one device, up to rounding; the returned model
      is on the first device.
    - `strategy`: "replicate" has all parameters on each of the devices, "shard" divides them and
      the optimizer's state; "auto" replicates if that takes less than half of the memory. The
      report gives the choice and its reason.
    - `precision`: "float32"; "mixed" computes in 16 bits and keeps parameters in 32; or "bfloat16"
      or "float16" throughout. The default is "float32", or "mixed" if the setting `mixed_precision`
      is on.
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
    why = pipeline_reason(model, device, devices, strategy)
    device, mesh = (device, None) if why else mesh_of(device, devices, strategy)
    if isinstance(model, Compiled):
        device = model.device if device is None else device
        precision, optimize = precision or model.policy.name, optimize or model.optimize
        model = model.model
    if isinstance(validation, float | int):
        data, validation = _split(data, validation, seed or 0)
    if isinstance(model, Layer):
        model = _build_model(model, data, seed or 0, device)
    measured = _metrics_of(metrics, model, validation)
    epochs = checks.integer("epochs", epochs, 1)
    patience = None if patience is None else checks.integer("patience", patience, 1)
    save_every = None if save_every is None else checks.integer("save_every", save_every, 1)
    if save_every is not None and save is None:
        raise ConfigurationError("save_every= needs save=", source="save_every")
    common = TrainingOptions(
        device if mesh is None else None,
        devices if why else mesh,
        strategy if why or mesh else "auto",
        precision,
        optimize,
        accumulate,
        clip,
        schedule,
        seed,
    )
    leads = mesh is None or mesh.rank == 0
    with _saving(save, resume, leads) as target:
        source, length = _source(resume, target), length_of(data)
        training = Training.with_options(model, optimizer, checked_data(data, epochs), loss, common)
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
            found = training.resume(source, settings, patient=patient, optimize=optimize)
            begun, best = found.loop, found.best
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
        if source is not None and begun.epoch > epochs:
            _print_nothing_left(source, begun.epoch - 1, epochs)
        with (
            translating_oom(chosen),
            TrainingProgress(epochs, length, done, progress if leads else False) as shown,
            Interrupts() as interrupts,
        ):
            interrupts.acknowledge = lambda: shown.ends("stopping; Ctrl-C again: now")
            stepper = training.stepper
            loop = TrainLoop(options, training, begun, best, shown)

            def acknowledge() -> None:
                stepper.compiler.quiet = True  # a terminal interrupts compilers too
                when = "once compiled" if loop.is_compiling else "after this step"
                shown.ends(f"stopping {when}; Ctrl-C again: now")

            interrupts.acknowledge = acknowledge
            stopped = loop.run(interrupts)
        if stopped == "Ctrl-C":
            where = f"saved to {target}, go on with resume=" if target else "nothing was saved"
            print(f"stopped by Ctrl-C after step {stepper.started}: {where}", file=sys.stderr)
        elif policy.needs_loss_scale and 0 < stepper.started == stepper.skipped_steps:
            _print_all_left_out(stepper.started, policy)
        best = loop.best if patience is not None else None
        final = stepper.parameters if best is None else best
        how = training.config.optimize
        report = TrainingReport(
            chosen,
            stepper.engine.name,
            policy,
            how,
            stepper.compiler.how,
            training.strategy.text,
            memory_stats(chosen).peak,
        )
        return Trained(training.model_with(final), loop.state.history, stopped, report)


def _print_nothing_left(source: Path, done: int, epochs: int) -> None:
    more = "" if done == epochs else f", more than epochs={epochs}"
    print(
        f"{source} has {done} epochs already{more}: nothing is left to train, "
        "and a larger epochs= goes on",
        file=sys.stderr,
    )


def _print_all_left_out(steps: int, policy: Policy) -> None:
    print(
        f"nothing was learned: each of the {steps} steps was left out, since numbers were too "
        f"large for {policy.compute}; give smaller inputs, train for more steps, or take "
        'precision="bfloat16" or "float32"',
        file=sys.stderr,
    )


@contextmanager
def _saving(
    save: PathLike | None, resume: PathLike | bool | None, leads: bool
) -> Iterator[Path | None]:
    """Run a block with the file to save to, locked against other trainings.

    The process that writes checks that it is writable, and is not overwritten by mistake.
    """
    if save is None or not leads:
        yield None if save is None else checked_path(save)
        return
    target = checked_path(save)
    check_writable(target)
    with sole_training(target):
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


def _split(data: Any, share: float, seed: int) -> tuple[Data, Data]:
    if not isinstance(data, Batches):
        raise ConfigurationError(
            f"validation={share!r} holds back a share of examples in arrays, nn.Batches(x, y, "
            f"size=32), and this data is a {type(data).__name__}; split it before, and give "
            "validation= its other part",
            source="validation",
        )
    return data.split(share, seed)


def _metrics_of(metrics: Specs, model: Any, validation: Any) -> list[Metric]:
    threshold = threshold_of(model.layer) if isinstance(model, Model) else 0.0
    found = metrics_of(metrics, threshold)
    if found and validation is None:
        raise ConfigurationError(
            "metrics are computed on data that is not trained on: give validation= too, such as "
            "validation=0.2",
            source="metrics",
        )
    return found


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
