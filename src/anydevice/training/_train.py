"""`nn.train`: a model, data, an optimizer and a loss in; a trained model and its history out."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from anydevice.compiling._compile import OPTIMIZATIONS, Compiled
from anydevice.core.device import Device
from anydevice.core.files import check_writable, remove_leftovers
from anydevice.core.record import Record
from anydevice.core.trees import leaves
from anydevice.core.warn import warn
from anydevice.errors import ConfigurationError
from anydevice.memory.out_of_memory import explaining
from anydevice.models.detect import training_device
from anydevice.models.native import NativeAdapter
from anydevice.models.precision import Policy, cast_parameters, policy_of
from anydevice.nn.losses import Loss, folded, loss_of, remark_on
from anydevice.nn.model import Model
from anydevice.nn.optimizers import Optimizer, Schedule
from anydevice.saving.files import checked_path
from anydevice.training.batches import Data, checked_data, length_of
from anydevice.training.callbacks import Callback, Moment, callbacks_of
from anydevice.training.checkpoints import (
    Checkpoint,
    Place,
    is_checkpoint,
    read_checkpoint,
    settings_of,
)
from anydevice.training.history import History
from anydevice.training.loop import Interrupts, Plan, Training, copied
from anydevice.training.progress import TrainingProgress
from anydevice.training.steps import Standing, StepConfig, Stepper, stepper_for
from anydevice.transfer.moving import to_device

PathLike = str | os.PathLike[str]

_said: set[str] = set()


class Trained(Record):
    """What training gives: the model, how it went, and why it ended early where it did."""

    model: Model
    history: History
    stopped: str | None = None

    def __str__(self) -> str:
        ended = "" if self.stopped is None else f"\nstopped: {self.stopped}"
        return f"{self.model}\n\n{self.history}{ended}"


def train(
    model: Model | Compiled,
    data: Data,
    optimizer: Optimizer,
    loss: Loss | str,
    *,
    epochs: int,
    device: Device | str | None = None,
    precision: str | None = None,
    optimize: str | None = None,
    validation: Data | None = None,
    patience: int | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    schedule: Schedule | None = None,
    callbacks: Callback
    | Callable[[Moment], Any]
    | Sequence[Callback | Callable[[Moment], Any]] = (),
    seed: int = 0,
    save: PathLike | None = None,
    save_every: int | None = None,
    resume: PathLike | bool | None = None,
    progress: bool | None = None,
) -> Trained:
    """Train a model: for each epoch all batches of `data`, for each batch a step down the loss.

    `data` is batches `(x, y)` in anything that can be iterated once an epoch: a list, a
    `DataLoader`. A function is called with the seed and the number of the epoch, from 1 on, and
    gives the batches of that epoch, always the same ones for the same two numbers: `nn.Batches`
    is one that shuffles arrays. `loss` is a function of what the model gives and `y`, or its name.
    Arrays of any library and lists of numbers do; float64 is rounded to float32.

    >>> import numpy
    >>> from anydevice import nn
    >>> x = numpy.linspace(-1, 1, 64, dtype=numpy.float32).reshape(64, 1)
    >>> model = nn.build(nn.Dense(1, 16), "tanh", nn.Dense(16, 1), device="cpu")
    >>> data = nn.Batches(x, x**2, size=16)
    >>> adam, error = nn.Adam(1e-2), nn.mean_squared_error
    >>> trained = train(model, data, adam, error, epochs=30, optimize="none")
    >>> trained.history[-1].loss < 0.05 < trained.history[0].loss
    True

    The model that is given stays as it is. Without a `device` it is trained where its parameters
    are; on the CPU by torch, jax or mlx, the imported ones first. The same seed gives the same
    training. Further options:

    - `precision`: "float32"; "mixed" computes in 16 bits and keeps parameters in 32; or "bfloat16"
      or "float16" throughout. `optimize="none"` compiles nothing.
    - `validation`: data whose loss is computed after each epoch, and whose first batch is looked
      at before all else, where it can be had twice. `patience`: so many epochs
      without a better loss (of the validation, where there is one) end the training, and the
      parameters of the best epoch come back.
    - `accumulate`: each step goes by the mean gradient of so many batches. `clip`: the largest
      norm of all gradients together. `schedule`: a rate for each step, in place of the optimizer's.
    - `callbacks`: functions that are called after each epoch, or `nn.Callback`s; one or several.
    - `save`: a `.safetensors` file that is written after each epoch, after every `save_every`
      steps, at the end and at Ctrl-C, whole or not at all, and before callbacks are called.
      `resume`: such a file, to go on from as if nothing had happened, where the data of an epoch
      follow from the seed and the epoch; or `True`, for the file of `save` where it is there
      already; or `False`, to begin anew in its place. A patience that is new begins to count when
      it is resumed with.
    - `progress`: a bar with the loss, the rate, the speed and the time left; by default on a
      terminal.

    The first Ctrl-C ends the training after the step under way, the second at once. Raises
    `UnsupportedError`, with the engines that can, where the device's engine has no gradients;
    `VerificationError`, with the step and the layer, where something becomes infinite or no
    number; `ConfigurationError` for options that make no sense, where the file of `save` is there
    and `resume` is not given, and where a file to resume from is that of another training;
    `TransferError` where it is damaged, or that of `save` cannot be written.
    """
    if isinstance(model, Compiled):
        model, device, precision, optimize = _taken_apart(model, device, precision, optimize)
    _check(model, optimizer, epochs=epochs, accumulate=accumulate, optimize=optimize)
    _check_whole(patience=patience, save_every=save_every)
    clip, seed = _checked_clip(clip), _checked_seed(seed)
    _check_schedule(schedule)
    target = _target(save, resume)
    home = training_device(NativeAdapter(model), device)
    policy = policy_of(precision or "float32", home)
    of_loss = loss_of(loss)
    layer, _ = folded(model.layer, of_loss)
    remark = remark_on(model.layer, of_loss)
    if remark is not None:
        _say_once(remark)
    recipe = StepConfig(layer, of_loss, optimizer, policy, clip, accumulate, optimize or "default")
    settings = settings_of(recipe, seed, schedule, data, validation)
    source = _source(resume, target)
    checkpoint = None
    if source is not None:
        judged = patience is not None
        checkpoint = read_checkpoint(source, settings, model.parameters, home, judged=judged)
    if checkpoint is None:
        parameters = to_device(model.parameters, home, convert=True)
        with explaining(home):
            parameters = copied(cast_parameters(parameters, policy.parameters))
            checkpoint = Checkpoint(Standing(parameters, optimizer.init(parameters)), Place())
    plan = Plan(
        checked_data(data, epochs),
        None if validation is None else checked_data(validation, epochs, "validation"),
        epochs,
        seed,
        schedule if schedule is not None else optimizer.rate_at,
        patience,
        callbacks_of(callbacks),
        target,
        save_every,
        settings,
    )
    place, length = checkpoint.place, length_of(data)
    done = (place.epoch - 1) * (length or 0) + place.position
    if source is not None and place.epoch > epochs:
        _say_that_nothing_is_left(source, place.epoch - 1, epochs)
    with (
        explaining(home),
        TrainingProgress(epochs, length, done, progress) as shown,
        Interrupts() as interrupts,
    ):
        interrupts.acknowledge = lambda: shown.ends("stopping; Ctrl-C again: now")
        stepper = stepper_for(home, recipe, checkpoint.standing, seed)
        training = Training(plan, model, stepper, place, checkpoint.best, shown)
        interrupts.acknowledge = lambda: _acknowledge(training, stepper, shown)
        stopped = training.run(interrupts)
    if stopped == "Ctrl-C":
        where = f"saved to {target}, go on with resume=" if target else "nothing was saved"
        print(f"stopped by Ctrl-C after step {stepper.started}: {where}", file=sys.stderr)
    elif policy.needs_loss_scale and 0 < stepper.started == stepper.left_out:
        _say_that_all_was_left_out(stepper.started, policy)
    best = training.best if patience is not None else None
    final = stepper.parameters if best is None else best
    return Trained(model.with_parameters(final), training.place.history, stopped)


def _acknowledge(training: Training, stepper: Stepper, shown: TrainingProgress) -> None:
    """Say at once that a Ctrl-C was seen, and when it will have ended the training."""
    stepper.quiet = True  # a terminal interrupts compilers too, which is no reason for a warning
    when = "once compiled" if training.is_compiling else "after this step"
    shown.ends(f"stopping {when}; Ctrl-C again: now")


def _say_that_nothing_is_left(source: Path, done: int, epochs: int) -> None:
    more = "" if done == epochs else f", more than epochs={epochs}"
    print(
        f"{source} has {done} epochs already{more}: nothing is left to train, "
        "and a larger epochs= goes on",
        file=sys.stderr,
    )


def _say_that_all_was_left_out(steps: int, policy: Policy) -> None:
    print(
        f"nothing was learned: each of the {steps} steps was left out, since numbers were too "
        f"large for {policy.compute}; give smaller inputs, train for more steps, or take "
        'precision="bfloat16" or "float32"',
        file=sys.stderr,
    )


def _taken_apart(
    compiled: Compiled, device: Any, precision: str | None, optimize: str | None
) -> tuple[Model, Any, str, str]:
    """The model that was compiled, and what it was compiled for where nothing else is asked for."""
    if not isinstance(compiled.model, Model):
        raise ConfigurationError(
            f"nn.train takes a nn.Model, and this is a compiled {type(compiled.model).__name__}; "
            "train it with its own library",
            source="model",
        )
    home = compiled.device if device is None else device
    return compiled.model, home, precision or compiled.policy.name, optimize or compiled.optimize


def _target(save: PathLike | None, resume: PathLike | bool | None) -> Path | None:
    """The file that is saved to: one that can be written, and that nobody would miss."""
    if save is None:
        return None
    target = checked_path(save)
    if resume is None and target.exists():
        on = "resume=True goes on with it" if is_checkpoint(target) else "it is no training"
        raise ConfigurationError(
            f"save: {target} is there already; {on}, resume=False begins anew in its place",
            source="save",
        )
    check_writable(target)
    remove_leftovers(target)
    return target


def _source(resume: PathLike | bool | None, save: Path | None) -> Path | None:
    """The file to resume from, where there is one."""
    if resume is None or resume is False:
        return None
    if resume is not True:
        return checked_path(resume)
    if save is None:
        raise ConfigurationError(
            "resume=True goes on from the file of save=, and there is none", source="resume"
        )
    return save if save.exists() else None


def _check(
    model: Any, optimizer: Any, *, epochs: int, accumulate: int, optimize: str | None
) -> None:
    if not isinstance(model, Model):
        raise ConfigurationError(
            f"nn.train takes a nn.Model, not a {type(model).__name__}; make one with nn.build",
            source="model",
        )
    if not leaves(model.parameters):
        raise ConfigurationError("this model has no parameters to train", source="model")
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"optimizer must be one such as nn.AdamW(1e-3), not {optimizer!r}", source="optimizer"
        )
    if optimize is not None and optimize not in OPTIMIZATIONS:
        raise ConfigurationError(
            f"optimize is one of {', '.join(OPTIMIZATIONS)}, not {optimize!r}", source="optimize"
        )
    _check_whole(epochs=epochs, accumulate=accumulate)


def _check_whole(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"{name} must be a whole number from 1 on, not {value!r}", source=name
            )


def _checked_clip(clip: Any) -> float | None:
    if clip is None:
        return None
    if isinstance(clip, bool) or not isinstance(clip, Real) or not 0 < float(clip) < math.inf:
        raise ConfigurationError(
            f"clip is the largest norm of the gradients, a finite number above 0, not {clip!r}",
            source="clip",
        )
    return float(clip)


def _check_schedule(schedule: Any) -> None:
    if schedule is not None and not callable(schedule):
        raise ConfigurationError(
            "schedule gives the rate of each step, as nn.CosineRate(1e-3, steps=1000) does or a "
            f"function of the step, and is not {schedule!r}; a rate that stays is the optimizer's",
            source="schedule",
        )


def _checked_seed(seed: Any) -> int:
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigurationError(
            f"seed must be a whole number from 0 on, not {seed!r}", source="seed"
        )
    return number


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warn(text)
