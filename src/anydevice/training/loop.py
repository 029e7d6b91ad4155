"""The loop of a training: batches in, steps, and now and then a look at how it goes.

The device is asked for losses only now and then; between two looks, steps are started one behind
the other. The batches since the last look are kept, so that one that cannot be trained on can be
run again to find the layer.

Ctrl-C that ends a loop at a good place instead of anywhere.

The loss of a model on data that it does not learn from.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from anydevice import ops
from anydevice.core.record import Record, replace
from anydevice.core.trees import Tree, leaves, mapped
from anydevice.errors import AnyDeviceError, ConfigurationError
from anydevice.nn.layer import Run
from anydevice.nn.model import Model
from anydevice.nn.optimizers import rate_of
from anydevice.training.batches import Batch, batch_name, examples_of, first_of, placed
from anydevice.training.callbacks import Callback, Moment, wants_steps
from anydevice.training.checkpoints import Checkpoint, Place, write_checkpoint
from anydevice.training.failures import (
    TrainedBatch,
    check_loss,
    check_shape,
    explained,
    failure,
    wrong_batch,
    wrong_target,
)
from anydevice.training.history import Epoch, History
from anydevice.training.progress import TrainingProgress
from anydevice.training.steps import Stepper
from anydevice.transfer.moving import to_numpy

_LOOK_EVERY = 0.5
"""Seconds from one look at the losses to the next."""

_MOST_KEPT = 256 * 2**20
"""Bytes of batches that are kept between two looks; more of them are a reason to look."""

_MOST_BETWEEN = 512
"""Batches between two looks."""


class Plan(Record):
    """What a training is asked to do."""

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
    """One training under way; `run` goes on until it ends, and says why where that is early."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        stepper: Stepper,
        place: Place,
        best: Tree,
        progress: TrainingProgress,
    ) -> None:
        self.plan = plan
        self.place = place
        self.best = best
        self._model = model
        self._stepper = stepper
        self._progress = progress
        self._of_steps = wants_steps(list(plan.callbacks))
        self._stop: str | None = None
        self._looked = time.monotonic()
        self._began = self._looked
        self._last_loss: float | None = None
        self._latest = math.nan
        self._passed = 0
        self._kept = 0
        self._window: list[tuple[TrainedBatch, Any, int]] = []
        self._validation = (
            None if plan.validation is None else Validation(plan.validation, plan.seed, stepper)
        )
        self._shapes: set[Any] = set()
        self._is_compiling = False
        self._rate = place.rate

    def run(self, interrupts: Interrupts) -> str | None:
        epochs = range(self.place.epoch, self.plan.epochs + 1)
        if epochs and self._validation is not None:
            self._validation.check(self.place.epoch)
        for epoch in epochs:
            if self._is_patience_over():
                break
            if interrupts.asked:  # before anything was begun
                self._stop = "Ctrl-C"
                self._save()
                break
            if self._one_epoch(epoch, interrupts):
                break
        return self._stop

    @property
    def is_compiling(self) -> bool:
        """Whether a step is under way that is compiled first."""
        return self._is_compiling

    def model(self) -> Model:
        """The model with a copy of the parameters of now."""
        return self._model.with_parameters(copied(self._stepper.parameters))

    # One epoch

    def _one_epoch(self, epoch: int, interrupts: Interrupts) -> bool:
        """Train for an epoch, or for what is left of it; whether that was the last one."""
        self._began = time.monotonic()
        before = self.place.position
        count = self._batches(epoch, interrupts)
        if self._stop is not None:
            self._look()
            self._save()
            return True
        if not before + count:
            raise ConfigurationError(f"data gave no batches in epoch {epoch}", source="data")
        self._progress.learned(before + count)
        self._look()
        self._end_epoch(epoch)
        if interrupts.asked:
            self._stop = "Ctrl-C"
        return self._stop is not None

    def _batches(self, epoch: int, interrupts: Interrupts) -> int:
        plan, stepper = self.plan, self._stepper
        accumulate, skipped = stepper.recipe.accumulate, self.place.position
        count = waiting = 0
        given = placed(plan.data, plan.seed, epoch, stepper.device, skip=skipped)
        batches = self._until_interrupted(given, interrupts)
        for x, y in batches:
            shape = getattr(x, "shape", None), getattr(y, "shape", None)
            if is_new := shape not in self._shapes:
                self._begin(x, epoch, skipped + count + 1)
            if not waiting:
                self._rate = self._rate_of_next()
            passed = stepper.batches - waiting
            try:
                value = self._taken(x, y)
                if is_new:
                    check_loss(stepper.recipe, value)
            except Exception as error:
                if _is_of_interruption(error, interrupts):
                    self._stop = "Ctrl-C"
                    self._undo(waiting, passed)
                    batches.close()
                    return count - waiting
                where = batch_name("data", epoch, skipped + count + 1)
                instead = explained(error, stepper, x, y, where)
                if instead is error:
                    raise
                raise instead from None if isinstance(error, AnyDeviceError) else error
            if is_new:
                self._shapes.add(shape)
                self._is_compiling = False
            count += 1
            waiting = (waiting + 1) % accumulate
            self._keep(x, y, value)
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
        """The batches; where a Ctrl-C ends who gives them, as it ends loaders, it ends training."""
        try:
            yield from batches
        except Exception as error:
            if not _is_of_interruption(error, interrupts):
                raise
            self._stop = "Ctrl-C"

    def _undo(self, waiting: int, passed: int) -> None:
        """Forget batches whose gradients wait for others, as if they were still to come."""
        if waiting:
            del self._window[-waiting:]
        self._stepper.batches = passed

    def _begin(self, x: Any, epoch: int, number: int) -> None:
        """Look at the first batch of a shape, and say that its step takes longer."""
        recipe = self._stepper.recipe
        check_shape(recipe, x, batch_name("data", epoch, number))
        if recipe.optimize != "none":
            self._is_compiling = True
            self._progress.begins(epoch, "compiling")

    def _taken(self, x: Any, y: Any) -> Any:
        if self._stepper.recipe.accumulate == 1:
            return self._stepper.step(x, y, self._rate)
        return self._stepper.add(x, y)

    def _rate_of_next(self) -> float:
        try:
            return rate_of(self.plan.rate, self._stepper.started + 1)
        except ConfigurationError:
            if self._stepper.started:  # what was learned before is good
                self._look()
                self._save()
            raise

    def _after_step(self, epoch: int, interrupts: Interrupts) -> bool:
        """Look, save and tell where it is time to; whether training is to stop."""
        plan = self.plan
        due = time.monotonic() - self._looked >= _LOOK_EVERY
        if due or self._kept >= _MOST_KEPT or len(self._window) >= _MOST_BETWEEN:
            self._look()
        if plan.save_every and self._stepper.started % plan.save_every == 0:
            self._look()
            self._save()
        for callback in self._of_steps:  # after the save: one that raises loses nothing
            callback.step(self._moment(epoch, None))
        if interrupts.asked:
            self._stop = "Ctrl-C"
        return self._stop is not None

    # Looking

    def _keep(self, x: Any, y: Any, value: Any) -> None:
        stepper = self._stepper
        step = stepper.started + (stepper.recipe.accumulate > 1)  # then it is yet to come
        taken = TrainedBatch(x, y, stepper.batches, step)
        self._window.append((taken, value, examples_of(x)))
        self._kept += sum(getattr(leaf, "nbytes", 0) for leaf in (*leaves(x), *leaves(y)))

    def _look(self) -> None:
        """Read the losses since the last look; raise where one is of no use."""
        window, self._window, self._kept = self._window, [], 0
        self._looked = time.monotonic()
        if not window:
            return
        losses = [float(value) for value in to_numpy([value for _, value, _ in window])]
        if self._stepper.failed:
            raise self._failure([taken for taken, _, _ in window])
        place = self.place
        lost, examples = place.lost, place.examples
        for loss, (_, _, count) in zip(losses, window, strict=True):
            if math.isfinite(loss):  # others are those that a smaller scale of the loss mends
                lost += loss * count
                examples += count
                self._last_loss = loss
        self._latest = losses[-1]
        self._passed += sum(count for _, _, count in window)
        position = place.position + len(window)
        self.place = replace(place, lost=lost, examples=examples, position=position)
        self._progress.tell(place.epoch, position, self._last_loss, self._rate, self._passed)

    def _failure(self, batches: list[TrainedBatch]) -> Exception:
        stepper = self._stepper
        since, name = stepper.failed_since, stepper.engine.name
        own = [taken for taken in batches if taken.step == since] or batches
        wrong = wrong_target(stepper.recipe, own)
        if wrong is not None:
            return wrong
        return failure(stepper.recipe, name, stepper.parameters, own, since, self.plan.seed)

    def _end_epoch(self, epoch: int) -> None:
        place = self.place
        loss = place.lost / place.examples if place.examples else math.nan
        try:
            validation = None if self._validation is None else self._validation.loss(epoch)
        except AnyDeviceError:
            self._save()  # what was learned is good
            raise
        seconds = place.seconds + time.monotonic() - self._began
        stepper = self._stepper
        ended = Epoch(
            epoch, loss, validation, self._rate, stepper.started, seconds, stepper.left_out
        )
        judged = loss if validation is None else validation
        patient = self.plan.patience is not None
        better = math.isfinite(judged) and (place.best is None or judged < place.best)
        self.place = Place(
            epoch=epoch + 1,
            history=History((*place.history, ended)),
            best=judged if patient and better else place.best,
            waited=0 if better or not patient else place.waited + 1,
        )
        if patient and better:
            self.best = copied(self._stepper.parameters)
        self._save()
        for callback in self.plan.callbacks:
            callback.epoch(self._moment(epoch, ended))
        self._began = time.monotonic()

    def _is_patience_over(self) -> bool:
        patience = self.plan.patience
        if patience is None or self.place.waited < patience or not self.place.history:
            return False
        self._stop = f"no better for {self.place.waited} epochs"
        return True

    # What others see

    def _moment(self, epoch: int, ended: Epoch | None) -> Moment:
        def stop() -> None:
            self._stop = "a callback"

        def loss() -> float:
            if self._window:
                return float(to_numpy(self._window[-1][1]))
            return self._latest

        history = self.place.history
        steps = self._stepper.started
        return Moment(epoch, steps, self._rate, history, ended, self.model, loss, stop)

    def _save(self) -> None:
        if self.plan.save is None:
            return
        now = time.monotonic()
        place = replace(self.place, rate=self._rate)
        if place.position:
            place = replace(place, seconds=place.seconds + now - self._began)
        checkpoint = Checkpoint(self._stepper.standing, place, self.best)
        write_checkpoint(self.plan.save, checkpoint, self.plan.settings)


def copied(parameters: Tree) -> Tree:
    """Arrays of their own with the same numbers, where they are."""
    return mapped(lambda x: ops.multiply(x, 1.0), parameters)


def _is_of_interruption(error: Exception, interrupts: Interrupts) -> bool:
    """Whether a Ctrl-C was the reason: a terminal sends it to compilers and loaders as well."""
    return interrupts.asked and not isinstance(error, AnyDeviceError)


class Interrupts:
    """While the block runs, the first Ctrl-C only asks to stop; the second one interrupts.

    `asked` is true from the first one on, which calls `acknowledge` at once, wherever the program
    is: it may not wait, nor write to a stream of Python's. Only in the main thread, and only where
    nobody else has a handler of his own.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


_NAME = "validation"
_UNDER_WAY = 2
"""Losses that are not yet waited for, so that the device has something to do."""


class Validation:
    """Data, and the stepper whose parameters are judged by it."""

    def __init__(self, data: Any, seed: int, stepper: Stepper) -> None:
        self._data = data
        self._seed = seed
        self._stepper = stepper
        self._run: Callable[..., Any] | None = None
        self._shapes: set[Any] = set()

    def check(self, epoch: int) -> None:
        """Look at the first batch now, before an epoch is trained for nothing.

        Raises `ConfigurationError` where it does not fit, and `VerificationError` where its loss
        cannot be a number. What can be iterated only once is not touched.
        """
        batch = first_of(self._data, self._seed, epoch, _NAME)
        if batch is None:
            return
        where = batch_name(_NAME, epoch, 1)
        check_shape(self._stepper.recipe, batch[0], where)
        self._refuse_wrong(*batch, where)

    def loss(self, epoch: int) -> float:
        """The mean loss over all examples. Raises as `check` does, for any of the batches."""
        if self._run is None:
            self._run = self._stepper.compiled(_applied(self._stepper))
        lost: list[tuple[float, int]] = []
        pending: deque[tuple[Any, Any, Any, str]] = deque()
        batches = placed(self._data, self._seed, epoch, self._stepper.device, name=_NAME)
        for number, (x, y) in enumerate(batches, 1):
            where = batch_name(_NAME, epoch, number)
            pending.append((self._value(x, y, where), x, y, where))
            if len(pending) > _UNDER_WAY:
                lost.append(self._waited_for(*pending.popleft()))
        lost += [self._waited_for(*each) for each in pending]
        examples = sum(count for _, count in lost)
        if not examples:
            raise ConfigurationError("validation gave no batches", source=_NAME)
        return sum(loss * count for loss, count in lost) / examples

    def _value(self, x: Any, y: Any, where: str) -> Any:
        shape = getattr(x, "shape", None)
        if shape not in self._shapes:
            check_shape(self._stepper.recipe, x, where)
            self._shapes.add(shape)
        assert self._run is not None, "loss() makes it"
        try:
            return self._run(self._stepper.parameters, x, y)
        except AnyDeviceError as error:
            raise explained(error, self._stepper, x, y, where) from None

    def _waited_for(self, value: Any, x: Any, y: Any, where: str) -> tuple[float, int]:
        loss = float(to_numpy(value))
        if not math.isfinite(loss):
            self._refuse_wrong(x, y, where)
        return loss, examples_of(x)

    def _refuse_wrong(self, x: Any, y: Any, where: str) -> None:
        wrong = wrong_batch(self._stepper.recipe, x, y, where)
        if wrong is not None:
            raise wrong


def _applied(stepper: Stepper) -> Callable[..., Any]:
    run = Run()

    def value(parameters: Tree, x: Any, y: Any) -> Any:
        return stepper.recipe.value(parameters, x, y, run)

    return value
