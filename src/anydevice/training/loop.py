"""The training loop: batches, steps, validation, and reading the losses now and then.

Losses are read from the device only now and then; in between, steps start without waiting. The
batches since the last reading are kept, so that the one that failed can be run again to find the
layer.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from anydevice import ops
from anydevice.core.record import Record, replace
from anydevice.core.trees import Tree, leaves, mapped
from anydevice.errors import AnyDeviceError, ConfigurationError
from anydevice.nn.layer import Run
from anydevice.nn.model import Model
from anydevice.nn.optimizers import rate_of
from anydevice.training.batches import Batch, batch_name, first_of, placed_batches
from anydevice.training.callbacks import Callback, Moment, step_callbacks
from anydevice.training.checkpoints import Checkpoint, LoopState, write_checkpoint
from anydevice.training.failures import (
    TrainedBatch,
    check_loss,
    check_shape,
    explain_error,
    failure,
    wrong_batch,
    wrong_target,
)
from anydevice.training.history import Epoch, History
from anydevice.training.progress import TrainingProgress
from anydevice.training.steps import Stepper
from anydevice.transfer.moving import to_numpy

_READ_EVERY = 0.5
"""Seconds from one reading of the losses to the next."""

_MOST_BYTES = 256 * 2**20
"""Bytes of batches that are kept between two readings."""

_MOST_BATCHES = 512
"""Batches between two readings."""

_VALIDATION = "validation"
_NOT_TRAINING = Run()
_IN_FLIGHT = 2
"""Losses of the validation in flight, so that the device has work."""


class TrainOptions(Record):
    """The options of a training."""

    data: Any
    validation: Any
    epochs: int
    seed: int
    rate: Callable[[int], float]
    patience: int | None
    callbacks: Sequence[Callback]
    save: Path | None
    save_every: int | None
    settings: Mapping[str, Any]


class Training:
    """A training; `run` trains until the end, and returns the reason where that is early.

    `is_compiling` while a step runs that is compiled first.
    """

    def __init__(
        self,
        options: TrainOptions,
        model: Model,
        stepper: Stepper,
        state: LoopState,
        best: Tree,
        progress: TrainingProgress,
    ) -> None:
        self.options = options
        self.state = state
        self.best = best
        self.is_compiling = False
        self._model = model
        self._stepper = stepper
        self._progress = progress
        self._step_callbacks = step_callbacks(options.callbacks)
        self._stop: str | None = None
        self._last_reading = time.monotonic()
        self._began = self._last_reading
        self._last_finite: float | None = None
        self._last_loss = math.nan
        self._passed = 0
        self._kept_bytes = 0
        self._unread: list[tuple[Any, Any, int, int, Any]] = []
        """The batches since the last reading: x, y, number, step, loss on the device."""
        self._validation = (
            None
            if options.validation is None
            else Validation(options.validation, options.seed, stepper)
        )
        self._scopes: dict[Any, Callable[[], AbstractContextManager[Any]]] = {}
        """Where a step runs, by the shapes of its batch."""
        self._rate = state.rate

    def run(self, interrupts: Interrupts) -> str | None:
        epochs = range(self.state.epoch, self.options.epochs + 1)
        if epochs and self._validation is not None:
            self._validation.check(self.state.epoch)
        for epoch in epochs:
            if self._is_patience_over():
                break
            if interrupts.asked:  # before the first step
                self._stop = "Ctrl-C"
                self._save()
                break
            if self._one_epoch(epoch, interrupts):
                break
        return self._stop

    def model(self) -> Model:
        """The model with a copy of the current parameters."""
        return self._model.with_parameters(copied(self._stepper.parameters))

    # One epoch

    def _one_epoch(self, epoch: int, interrupts: Interrupts) -> bool:
        """Train for an epoch, or for the rest of it; whether that was the last one."""
        self._began = time.monotonic()
        before = self.state.position
        count = self._batches(epoch, interrupts)
        if self._stop is not None:
            self._read_losses()
            self._save()
            return True
        if not before + count:
            raise ConfigurationError(f"data gave no batches in epoch {epoch}", source="data")
        self._progress.learned(before + count)
        self._read_losses()
        self._end_epoch(epoch)
        if interrupts.asked:
            self._stop = "Ctrl-C"
        return self._stop is not None

    def _batches(self, epoch: int, interrupts: Interrupts) -> int:
        options, stepper = self.options, self._stepper
        accumulate, skipped = stepper.config.accumulate, self.state.position
        count = waiting = 0
        given = placed_batches(options.data, options.seed, epoch, stepper.device, skip=skipped)
        batches = self._until_interrupted(given, interrupts)
        for x, y in batches:
            shape = getattr(x, "shape", None), getattr(y, "shape", None)
            if is_new := shape not in self._scopes:
                self._begin(x, epoch, skipped + count + 1)
                self._scopes[shape] = stepper.scope_of(x)
            if not waiting:
                self._rate = self._rate_of_next()
            passed = stepper.batches - waiting
            try:
                with self._scopes[shape]():
                    value = stepper.step(x, y, self._rate) if accumulate == 1 else stepper.add(x, y)
                if is_new:
                    check_loss(stepper.config, value)
            except Exception as error:
                if _is_interruption(error, interrupts):
                    self._stop = "Ctrl-C"
                    self._undo(waiting, passed)
                    batches.close()
                    return count - waiting
                where = batch_name("data", epoch, skipped + count + 1)
                instead = explain_error(error, stepper, x, y, where)
                if instead is error:
                    raise
                raise instead from None if isinstance(error, AnyDeviceError) else error
            if is_new:
                self.is_compiling = False
                self._progress.compiled()
            count += 1
            waiting = (waiting + 1) % accumulate
            step = stepper.started + (accumulate > 1)  # then it is yet to come
            self._unread.append((x, y, stepper.batches, step, value))
            self._kept_bytes += sum(
                [getattr(each, "nbytes", 0) for each in (*_arrays_in(x), *_arrays_in(y))]
            )
            if waiting:
                continue
            if accumulate > 1:
                stepper.move(self._rate)
            if self._after_step(epoch, interrupts):
                batches.close()
                return count
        if self._stop is not None:
            self._undo(waiting, stepper.batches - waiting)
            return count - waiting
        if waiting:
            stepper.move(self._rate)
            self._after_step(epoch, interrupts)
        return count

    def _until_interrupted(
        self, batches: Iterator[Batch], interrupts: Interrupts
    ) -> Generator[Batch, None, None]:
        """The batches; a Ctrl-C that ends their loader ends the training."""
        try:
            yield from batches
        except Exception as error:
            if not _is_interruption(error, interrupts):
                raise
            self._stop = "Ctrl-C"

    def _undo(self, waiting: int, passed: int) -> None:
        """Forget batches whose gradients wait for others, as if they were still to come."""
        if waiting:
            del self._unread[-waiting:]
        self._stepper.batches = passed

    def _begin(self, x: Any, epoch: int, number: int) -> None:
        """Check the first batch of a shape, and show that its step takes longer."""
        stepper = self._stepper
        check_shape(stepper.config, x, batch_name("data", epoch, number))
        if stepper.compiles:
            self.is_compiling = True
            self._progress.compiles(epoch, stepper.engine.name)

    def _rate_of_next(self) -> float:
        try:
            return rate_of(self.options.rate, self._stepper.started + 1)
        except ConfigurationError:
            if self._stepper.started:  # the steps before are good
                self._read_losses()
                self._save()
            raise

    def _after_step(self, epoch: int, interrupts: Interrupts) -> bool:
        """Read losses, save and call callbacks where it is time to; whether to stop."""
        due = time.monotonic() - self._last_reading >= _READ_EVERY
        if due or self._kept_bytes >= _MOST_BYTES or len(self._unread) >= _MOST_BATCHES:
            self._read_losses()
        save_every = self.options.save_every
        if save_every and self._stepper.started % save_every == 0:
            self._read_losses()
            self._save()
        for callback in self._step_callbacks:  # after the save: one that raises loses nothing
            callback.step(self._moment(epoch, None))
        if interrupts.asked:
            self._stop = "Ctrl-C"
        return self._stop is not None

    def _read_losses(self) -> None:
        """Read the losses since the last reading; raise where a step failed."""
        unread, self._unread, self._kept_bytes = self._unread, [], 0
        self._last_reading = time.monotonic()
        if not unread:
            return
        losses = [float(value) for value in to_numpy([value for *_, value in unread])]
        if self._stepper.failed:
            raise self._failure([TrainedBatch(*batch) for *batch, _ in unread])
        state = self.state
        lost, examples = state.lost, state.examples
        counts = [_examples_in(x) for x, *_ in unread]
        for loss, count in zip(losses, counts, strict=True):
            if math.isfinite(loss):  # a smaller scale of the loss fixes the others
                lost += loss * count
                examples += count
                self._last_finite = loss
        self._last_loss = losses[-1]
        self._passed += sum(counts)
        position = state.position + len(unread)
        self.state = replace(state, lost=lost, examples=examples, position=position)
        self._progress.tell(state.epoch, position, self._last_finite, self._rate, self._passed)

    def _failure(self, batches: list[TrainedBatch]) -> Exception:
        stepper = self._stepper
        since, name = stepper.failed_since, stepper.engine.name
        own = [batch for batch in batches if batch.step == since] or batches
        wrong = wrong_target(stepper.config, own)
        if wrong is not None:
            return wrong
        return failure(stepper.config, name, stepper.parameters, own, since, self.options.seed)

    def _end_epoch(self, epoch: int) -> None:
        state = self.state
        loss = state.lost / state.examples if state.examples else math.nan
        try:
            validation = None if self._validation is None else self._validation.loss(epoch)
        except AnyDeviceError:
            self._save()  # the trained parameters are good
            raise
        seconds = state.seconds + time.monotonic() - self._began
        stepper = self._stepper
        ended = Epoch(
            epoch, loss, validation, self._rate, stepper.started, seconds, stepper.left_out
        )
        judged = loss if validation is None else validation
        patient = self.options.patience is not None
        better = math.isfinite(judged) and (state.best is None or judged < state.best)
        self.state = LoopState(
            epoch=epoch + 1,
            history=History((*state.history, ended)),
            best=judged if patient and better else state.best,
            waited=0 if better or not patient else state.waited + 1,
        )
        if patient and better:
            self.best = copied(self._stepper.parameters)
        self._save()
        for callback in self.options.callbacks:
            callback.epoch(self._moment(epoch, ended))
        self._began = time.monotonic()

    def _is_patience_over(self) -> bool:
        patience = self.options.patience
        if patience is None or self.state.waited < patience or not self.state.history:
            return False
        self._stop = f"no better for {self.state.waited} epochs"
        return True

    def _moment(self, epoch: int, ended: Epoch | None) -> Moment:
        def stop() -> None:
            self._stop = "a callback"

        def loss() -> float:
            return float(to_numpy(self._unread[-1][-1])) if self._unread else self._last_loss

        history = self.state.history
        steps = self._stepper.started
        return Moment(epoch, steps, self._rate, history, ended, self.model, loss, stop)

    def _save(self) -> None:
        if self.options.save is None:
            return
        now = time.monotonic()
        state = replace(self.state, rate=self._rate)
        if state.position:
            state = replace(state, seconds=state.seconds + now - self._began)
        how = self._stepper.config.optimize
        checkpoint = Checkpoint(self._stepper.state, state, how, self.best)
        write_checkpoint(self.options.save, checkpoint, self.options.settings)


def copied(parameters: Tree) -> Tree:
    """A copy of all arrays on their device."""
    return mapped(lambda x: ops.multiply(x, 1.0), parameters)


def _arrays_in(tree: Any) -> list[Any]:
    return [tree] if hasattr(tree, "shape") else leaves(tree)


def _examples_in(x: Any) -> int:
    shape = _arrays_in(x)[0].shape
    return int(shape[0]) if shape else 1


def _is_interruption(error: Exception, interrupts: Interrupts) -> bool:
    """Whether Ctrl-C was the reason: a terminal sends it to compilers and loaders too."""
    return interrupts.asked and not isinstance(error, AnyDeviceError)


class Validation:
    """The loss of a stepper's parameters on data that it does not train on."""

    def __init__(self, data: Any, seed: int, stepper: Stepper) -> None:
        self._data = data
        self._seed = seed
        self._stepper = stepper
        self._run: Callable[..., Any] | None = None
        self._shapes: set[Any] = set()

    def check(self, epoch: int) -> None:
        """Check the first batch, before an epoch is trained for nothing.

        Raises `ConfigurationError` if it does not fit, and `VerificationError` if its loss
        cannot be finite. Data that can be iterated only once is not touched.
        """
        batch = first_of(self._data, self._seed, epoch, _VALIDATION)
        if batch is None:
            return
        where = batch_name(_VALIDATION, epoch, 1)
        check_shape(self._stepper.config, batch[0], where)
        self._check_batch(*batch, where)

    def loss(self, epoch: int) -> float:
        """The mean loss over all examples. Raises as `check` does, for any of the batches."""
        if self._run is None:
            self._run = self._stepper.compiled(self._loss_of)
        lost: list[tuple[float, int]] = []
        pending: deque[tuple[Any, Any, Any, str]] = deque()
        batches = placed_batches(
            self._data, self._seed, epoch, self._stepper.device, name=_VALIDATION
        )
        for number, (x, y) in enumerate(batches, 1):
            where = batch_name(_VALIDATION, epoch, number)
            pending.append((self._value(x, y, where), x, y, where))
            if len(pending) > _IN_FLIGHT:
                lost.append(self._waited(*pending.popleft()))
        lost += [self._waited(*each) for each in pending]
        examples = sum(count for _, count in lost)
        if not examples:
            raise ConfigurationError("validation gave no batches", source=_VALIDATION)
        return sum(loss * count for loss, count in lost) / examples

    def _value(self, x: Any, y: Any, where: str) -> Any:
        shape = getattr(x, "shape", None)
        if shape not in self._shapes:
            check_shape(self._stepper.config, x, where)
            self._shapes.add(shape)
        assert self._run is not None, "loss() makes it"
        try:
            return self._run(self._stepper.parameters, x, y)
        except AnyDeviceError as error:
            raise explain_error(error, self._stepper, x, y, where) from None

    def _waited(self, value: Any, x: Any, y: Any, where: str) -> tuple[float, int]:
        loss = float(to_numpy(value))
        if not math.isfinite(loss):
            self._check_batch(x, y, where)
        return loss, _examples_in(x)

    def _check_batch(self, x: Any, y: Any, where: str) -> None:
        wrong = wrong_batch(self._stepper.config, x, y, where)
        if wrong is not None:
            raise wrong

    def _loss_of(self, parameters: Tree, x: Any, y: Any) -> Any:
        return self._stepper.config.value(parameters, x, y, _NOT_TRAINING)


class Interrupts:
    """While the block runs, the first Ctrl-C only asks to stop; the second one interrupts.

    `asked` is true from the first one on, which calls `acknowledge` at once, wherever the program
    is: it must not wait, nor write to a Python stream. Only in the main thread, and only where no
    other handler is installed.
    """

    def __init__(self) -> None:
        self.asked = False
        self.acknowledge: Callable[[], None] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.acknowledge is not None:
            self.acknowledge()

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
