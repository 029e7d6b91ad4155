"""Values and base classes that libraries share with trainings, proofs and processes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from anydevice._core.array import Array
from anydevice._core.record import Record
from anydevice._core.trees import Tree

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anydevice._core.device import Device
    from anydevice._core.engine import Engine
    from anydevice._train.step_config import CompiledSteps

    Numbers = npt.NDArray[np.generic]
    Cells = npt.NDArray[np.int64]

Function = Callable[..., Any]


# Tracers of proofs


class FixedTensor(NamedTuple):
    """A tensor that does not depend on the model's input; `off` bounds its relative error."""

    value: Numbers
    off: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


class SymbolicTensor(NamedTuple):
    """A tensor that depends on the input: indices of a network's cells, for a batch of one."""

    cells: Cells

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cells.shape


TracedTensor = FixedTensor | SymbolicTensor
Padding = Sequence[tuple[int, int]]
"""The widths before and after, for each axis."""


class Windows(NamedTuple):
    """Windows along each axis; a transposed convolution has `more` elements at their ends."""

    stride: Sequence[int]
    padding: Padding
    dilation: Sequence[int]
    more: Sequence[int] | None = None


# Trainings


class StepState(Record):
    """Everything that changes from step to step, and that another run needs to continue.

    `started` counts all steps, `steps` those that changed something: a scaled loss may overflow.
    `total` has the accumulated gradients, of total weight `added`. `own` is a stepper's private
    state.
    """

    parameters: Any
    optimizer: Any
    batches: int = 0
    started: int = 0
    steps: int = 0
    scale: dict[str, Array] | None = None
    total: Tree = None
    added: float = 0.0
    own: Any = None


class Stepper(ABC):
    """Takes steps. `parameters` and `state` are valid until the next step.

    `add` accumulates the gradients of `accumulate` batches, and `move` takes a step by their mean,
    weighted by their rows; `step` does both for a single batch. `step` and `add` return the loss
    before the step, as an array without axes. After the first NaN or infinite loss or gradient, no
    step changes the parameters; if a scaled loss overflows, only that step changes nothing.
    `started` and `batches` are counters.
    """

    engine: Engine
    device: Device
    config: Any
    compiler: CompiledSteps
    started: int
    batches: int

    @property
    @abstractmethod
    def parameters(self) -> Tree:
        """The present parameters, trained or not."""

    @property
    @abstractmethod
    def state(self) -> StepState:
        """The present state."""

    @property
    def rate(self) -> float:
        """The optimizer's rate for the next step; NaN if it does not report one."""
        return math.nan

    def step(self, batch: Any, rate: float) -> Array:
        """Take one step by one batch."""
        value = self.add(batch)
        self.move(rate)
        return value

    @abstractmethod
    def add(self, batch: Any, weight: float = 1.0) -> Array:
        """Add the gradients of one batch to those of the next `move`."""

    @abstractmethod
    def move(self, rate: float) -> None:
        """Take one step by the weighted mean of the added gradients."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the added gradients."""

    @abstractmethod
    def evaluate(self, batch: Any, *, with_output: bool = False) -> tuple[Array, Any]:
        """Return the loss of a batch that is not trained on, and the output, if it is wanted."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether a loss, a gradient or a parameter is NaN or infinite; waits for all steps."""

    @property
    @abstractmethod
    def failed_since(self) -> int:
        """The first step with a NaN or infinite loss or gradient; else the next step."""

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """The steps without effect, because a scaled loss overflowed; waits for all steps."""

    def scope_of(self, batch: Any) -> Callable[[], AbstractContextManager[Any]]:
        """Return the block in which a step of this batch runs."""
        return nullcontext


class Processes(Record):
    """Processes that compute together: the rank of this one, from 0, and their number."""

    rank: int
    size: int

    @abstractmethod
    def wait(self) -> None:
        """Wait until every process has reached this call."""


class Launched(Record):
    """The variables of a launcher: the rank of this process, and the number of all.

    `local` is the rank on this machine. `here` is the number of processes on it, `None` if the
    launcher does not say.
    """

    rank: int
    size: int
    local: int
    here: int | None
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether all processes run on this machine."""
        return self.here == self.size or self.address in ("127.0.0.1", "::1", "localhost")
