"""The loop of a training: batches in, steps, and now and then a look at how it goes.

The device is asked for losses only now and then; between two looks, steps are started one behind
the other. The batches since the last look are kept, so that one that cannot be trained on can be
run again to find the layer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from anydevice import ops
from anydevice.core.record import Record, replace
from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Run
from anydevice.nn.model import Model
from anydevice.nn.schedules import rate_of
from anydevice.nn.trees import Tree, leaves, mapped
from anydevice.run.batches import placed
from anydevice.run.callbacks import Callback, Moment, wants_steps
from anydevice.run.checkpoints import Checkpoint, Place, write_checkpoint
from anydevice.run.failures import Taken, failure
from anydevice.run.history import Epoch, History
from anydevice.run.interrupting import Interrupts
from anydevice.run.mistakes import check_loss, mistakes_explained, wrong_target
from anydevice.run.steps import Stepper
from anydevice.run.training_progress import TrainingProgress
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
        self._window: list[tuple[Taken, Any, int]] = []
        self._validating: Callable[..., Any] | None = None
        self._rate = place.rate

    def run(self) -> str | None:
        with Interrupts() as interrupts:
            for epoch in range(self.place.epoch, self.plan.epochs + 1):
                if self._is_patience_over() or self._one_epoch(epoch, interrupts):
                    break
        return self._stop

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
        accumulate = stepper.recipe.accumulate
        count = waiting = 0
        batches = placed(plan.data, plan.seed, epoch, stepper.device, skip=self.place.position)
        for x, y in batches:
            if not stepper.batches or not count:
                self._check(x)
            if not waiting:
                self._rate = self._rate_of_next()
            with mistakes_explained(stepper, x, y) if not count else nullcontext():
                value = self._taken(x, y)
                if not count:
                    check_loss(stepper.recipe, value)
            count += 1
            waiting = (waiting + 1) % accumulate
            self._keep(x, y, value)
            if waiting:
                continue
            if accumulate > 1:
                stepper.move(self._rate)
            if self._after_step(epoch, interrupts):
                batches.close()  # type: ignore[attr-defined]
                return count
        if waiting:
            stepper.move(self._rate)
            self._after_step(epoch, interrupts)
        return count

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

    def _check(self, x: Any) -> None:
        """Name the layer where a batch does not fit, before anything is compiled for it."""
        shape = getattr(x, "shape", None)
        if shape is not None:
            self._stepper.recipe.layer.output(tuple(shape[1:]))

    # Looking

    def _keep(self, x: Any, y: Any, value: Any) -> None:
        stepper = self._stepper
        step = stepper.started + (stepper.recipe.accumulate > 1)  # then it is yet to come
        taken = Taken(x, y, stepper.batches, step)
        self._window.append((taken, value, _examples(x)))
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

    def _failure(self, batches: list[Taken]) -> Exception:
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
        validation = self._validated(epoch)
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

    def _validated(self, epoch: int) -> float | None:
        if self.plan.validation is None:
            return None
        stepper = self._stepper
        if self._validating is None:
            self._validating = stepper.compiled(_applied(stepper))
        total, examples = 0.0, 0
        pending: deque[tuple[Any, int]] = deque()
        batches = placed(self.plan.validation, self.plan.seed, epoch, stepper.device)
        for x, y in batches:
            pending.append((self._validating(stepper.parameters, x, y), _examples(x)))
            if len(pending) > 2:
                value, count = pending.popleft()
                total, examples = total + float(to_numpy(value)) * count, examples + count
        for value, count in pending:
            total, examples = total + float(to_numpy(value)) * count, examples + count
        if not examples:
            raise ConfigurationError("validation gave no batches", source="validation")
        return total / examples

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


def _applied(stepper: Stepper) -> Callable[..., Any]:
    run = Run()

    def value(parameters: Tree, x: Any, y: Any) -> Any:
        return stepper.recipe.value(parameters, x, y, run)

    return value


def _examples(x: Any) -> int:
    shape = leaves(x)[0].shape
    return int(shape[0]) if shape else 1
