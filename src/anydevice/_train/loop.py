"""The loop of `nn.train`: epochs of a `Training`, validation, patience, saving, callbacks."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from anydevice._arrays.move import to_numpy
from anydevice._core.record import Record, replace
from anydevice._core.trees import Tree
from anydevice._libraries.layers import target_of
from anydevice._nn.layers import ACTIVATIONS
from anydevice._train.batches import (
    INPUT_ERRORS,
    batch_name,
    first_of,
    placed_batches,
    prefix_error,
    rows_of,
)
from anydevice._train.callbacks import Callback, TrainingEvent, step_callbacks
from anydevice._train.checkpoint import LoopState
from anydevice._train.failures import check_shape, explain_error, wrong_batch
from anydevice._train.history import Epoch, History
from anydevice._train.metrics import Metric
from anydevice._train.progress import TrainingProgress
from anydevice._train.step_config import copied
from anydevice._train.training import Training
from anydevice.errors import AnyDeviceError, ConfigurationError

_VALIDATION = "validation"


class TrainOptions(Record):
    """The options of the training loop; options of its steps are in `TrainingOptions`."""

    validation: Any
    epochs: int
    patience: int | None
    callbacks: Sequence[Callback]
    save: Path | None
    save_every: int | None
    settings: Mapping[str, Any]
    metrics: Sequence[Metric] = ()


class TrainLoop:
    """Runs a training; `run` trains until the end, and returns the reason of an early stop.

    `is_compiling` is true during a step that compiles first.
    """

    def __init__(
        self,
        options: TrainOptions,
        training: Training,
        state: LoopState,
        best: Tree,
        progress: TrainingProgress,
    ) -> None:
        self.options = options
        self.state = state
        self.best = best
        self.is_compiling = False
        self._training = training
        self._progress = progress
        self._step_callbacks = step_callbacks(options.callbacks)
        self._stop: str | None = None
        self._began = time.monotonic()
        self._last_finite: float | None = None
        self._last_loss = math.nan
        self._passed = 0
        self._validation = (
            None
            if options.validation is None
            else Validation(options.validation, training, options.metrics)
        )
        training.on_compile = self._compiles

    def run(self, interrupts: Interrupts) -> str | None:
        training = self._training
        if training.epoch <= self.options.epochs and self._validation is not None:
            self._validation.check()
        for epoch in training.epochs(self.options.epochs):
            if self._is_patience_over():
                break
            if training.strategy.is_asked(interrupts.asked):  # before the first step
                self._stop = "Ctrl-C"
                self._save()
                break
            if self._one_epoch(epoch, interrupts):
                break
        return self._stop

    # One epoch

    def _one_epoch(self, epoch: int, interrupts: Interrupts) -> bool:
        """Train for an epoch, or for the rest of it; return whether it was the last one."""
        self._began = time.monotonic()
        self._batches(epoch, interrupts)
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
        if self._training.strategy.is_asked(interrupts.asked):
            self._stop = "Ctrl-C"
        return self._stop is not None

    def _batches(self, epoch: int, interrupts: Interrupts) -> None:
        training = self._training
        batches = self._until_interrupted(training.batches(), interrupts)
        for batch in batches:
            try:
                training.advance(batch)
            except Exception as error:
                if _is_interruption(error, interrupts):
                    self._stop = "Ctrl-C"
                    break
                wrong_rate = isinstance(error, ConfigurationError) and error.source == "schedule"
                if training.steps and wrong_rate:  # the steps before it are good
                    self._read()
                    self._save()
                training.raise_for(error, batch)
            if not training.waiting and self._after_step(epoch, interrupts):
                break
        batches.close()
        if self._stop is not None:
            training.undo()
        elif training.finish():
            self._after_step(epoch, interrupts)

    def _until_interrupted(
        self, batches: Iterator[Any], interrupts: Interrupts
    ) -> Generator[Any, None, None]:
        """Yield the batches; if a Ctrl-C ends their loader, the training ends too."""
        try:
            yield from batches
        except Exception as error:
            if not _is_interruption(error, interrupts):
                raise
            self._stop = "Ctrl-C"

    def _compiles(self, begins: bool) -> None:
        """Note the begin or end of a step that compiles first."""
        self.is_compiling = begins
        if begins:
            stepper = self._training.stepper
            self._progress.compiles(self._training.epoch, stepper.engine.name)
        else:
            self._progress.compiled()

    def _after_step(self, epoch: int, interrupts: Interrupts) -> bool:
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
        if training.strategy.is_asked(interrupts.asked):
            self._stop = "Ctrl-C"
        return self._stop is not None

    def _read(self) -> None:
        """Read the losses since the last reading; raise if a step failed."""
        read = self._training.read()
        if not read:
            return
        state = self.state
        lost, examples = state.lost, state.examples
        for loss, count in read:
            if math.isfinite(loss):  # a smaller loss scale fixes the others
                lost += loss * count
                examples += count
                self._last_finite = loss
        self._last_loss = read[-1][0]
        self._passed += sum(count for _, count in read)
        self.state = replace(state, lost=lost, examples=examples)
        training = self._training
        self._progress.tell(
            training.epoch, training.position, self._last_finite, training.rate, self._passed
        )

    def _end_epoch(self, epoch: int) -> None:
        state, training = self.state, self._training
        loss = state.lost / state.examples if state.examples else math.nan
        try:
            nothing = None, None
            validation, metrics = nothing if self._validation is None else self._validation.result()
        except AnyDeviceError:
            self._save()  # the trained parameters are good
            raise
        seconds = state.seconds + time.monotonic() - self._began
        stepper = training.stepper
        steps, left_out = stepper.started, stepper.skipped_steps
        ended = Epoch(epoch, loss, validation, training.rate, steps, seconds, left_out, metrics)
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
        training.end_epoch()
        self._save()
        self._progress.ended(ended)
        for callback in self.options.callbacks:
            callback.epoch(self._event(epoch, ended))
        self._began = time.monotonic()

    def _is_patience_over(self) -> bool:
        patience = self.options.patience
        if patience is None or self.state.waited < patience or not self.state.history:
            return False
        self._stop = f"no better for {self.state.waited} epochs"
        return True

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


def _is_interruption(error: Exception, interrupts: Interrupts) -> bool:
    """Whether Ctrl-C caused the error: a terminal sends it to compilers and loaders too."""
    return interrupts.asked and not isinstance(error, AnyDeviceError)


class Validation:
    """The loss and metrics of a training's parameters on held-out data."""

    def __init__(self, data: Any, training: Training, metrics: Sequence[Metric] = ()) -> None:
        self._data = data
        self._metrics = metrics
        self._training = training
        self._shapes: set[Any] = set()

    def check(self) -> None:
        """Check the first batch, before an epoch is trained in vain.

        Raises `ConfigurationError` if it does not fit, and `VerificationError` if its loss
        cannot be finite. Data that can be iterated only once is not read.
        """
        training = self._training
        epoch = training.epoch
        batch = first_of(self._data, training.seed, epoch, _VALIDATION, training.form)
        if batch is None:
            return
        where = batch_name(_VALIDATION, epoch, 1)
        check_shape(training.config, batch, where)
        self._check_batch(batch, where)

    def result(self) -> tuple[float, dict[str, float] | None]:
        """Return the mean loss over all examples, and the metrics, if any.

        Raises as `check` does, for any of the batches.
        """
        lost: list[tuple[float, int]] = []
        states = [metric.start() for metric in self._metrics]
        pending: deque[tuple[Any, Any, str]] = deque()
        training = self._training
        batches = placed_batches(
            self._data,
            training.seed,
            training.epoch,
            training.device,
            name=_VALIDATION,
            form=training.form,
            ahead=training.strategy.is_ahead,
            place=training.strategy.place,
        )
        batches = training.strategy.together(batches, _VALIDATION, training.epoch)
        for number, batch in enumerate(batches, 1):
            where = batch_name(_VALIDATION, training.epoch, number)
            value, output = self._value(batch, where)
            if self._metrics:
                states = self._add_examples(states, output, batch, where)
            pending.append((value, batch, where))
            if len(pending) > training.strategy.in_flight:
                lost.append(self._wait_for(*pending.popleft()))
        lost += [self._wait_for(*each) for each in pending]
        examples = sum(count for _, count in lost)
        if not examples:
            raise ConfigurationError("validation gave no batches", source=_VALIDATION)
        mean = sum(loss * count for loss, count in lost) / examples
        pairs = zip(self._metrics, states, strict=True)
        return mean, {each.name: each.result(state) for each, state in pairs} or None

    def _add_examples(self, states: list[Any], output: Any, batch: Any, where: str) -> list[Any]:
        target = target_of(batch)
        if output is None or target is None:
            wants = (
                "a loss of (output, y)" if output is None else "batches (x, y), or with 'labels'"
            )
            raise ConfigurationError(f"{where}: metrics need {wants}", source="metrics")
        name = self._training.fused_activation
        if name is not None:  # the loss includes this activation, so the output lacks it
            output = ACTIVATIONS[name](output)
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
    """While the block runs, the first Ctrl-C only asks to stop; the second one interrupts.

    The first Ctrl-C sets `asked` and calls `acknowledge` at once, from the signal handler: it must
    neither wait nor write to a Python stream. Active only in the main thread, and only if no other
    handler is installed.
    """

    def __init__(self) -> None:
        self.asked = False
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
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.acknowledge is not None:
            self.acknowledge()

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
