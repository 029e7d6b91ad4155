"""Interfaces that libraries implement, and through which other packages reach them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from anydevice._core.array import Array
from anydevice._core.record import Record
from anydevice._core.trees import Tree
from anydevice.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from anydevice._core.device import Device
    from anydevice._core.engine import Engine

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
    """The windows of a convolution or a pooling, along each axis."""

    stride: Sequence[int]
    padding: Padding
    dilation: Sequence[int]


class Trace(Protocol):
    """The operations of one run of a model; shapes are NumPy's, with a batch of one in front."""

    path: str
    """The module that runs now, for errors."""
    input: SymbolicTensor

    def refuse(self, feature: str) -> UnsupportedError:
        """Return the error for a feature that cannot be traced."""

    def rearrange(
        self, change: Callable[..., npt.NDArray[np.generic]], *tensors: TracedTensor
    ) -> TracedTensor:
        """Move elements: `change` gets NumPy arrays, and copies elements without computing."""

    def pad(self, a: TracedTensor, widths: Padding, fill: float) -> TracedTensor: ...
    def constant(self, number: float) -> FixedTensor: ...
    def add(self, a: TracedTensor, b: TracedTensor, scale: float = 1.0) -> TracedTensor:
        """Compute `a + scale * b`."""

    def multiply(self, a: TracedTensor, b: TracedTensor) -> TracedTensor: ...
    def divide(self, a: TracedTensor, b: TracedTensor) -> TracedTensor: ...
    def maximum(self, a: TracedTensor, b: TracedTensor) -> TracedTensor: ...
    def minimum(self, a: TracedTensor, b: TracedTensor) -> TracedTensor: ...
    def clip(self, a: TracedTensor, low: float | None, high: float | None) -> TracedTensor: ...
    def compare(self, a: TracedTensor, b: TracedTensor, greater: bool) -> TracedTensor: ...
    def select(self, where: TracedTensor, yes: TracedTensor, no: TracedTensor) -> TracedTensor: ...
    def function(self, name: str, a: TracedTensor) -> TracedTensor:
        """Apply the elementwise function of this name."""

    def absolute(self, a: TracedTensor) -> TracedTensor: ...
    def leaky_relu(self, a: TracedTensor, slope: float) -> TracedTensor: ...
    def cube(self, a: TracedTensor) -> TracedTensor: ...
    def sqrt(self, a: TracedTensor) -> TracedTensor: ...
    def log(self, a: TracedTensor) -> TracedTensor: ...
    def erf(self, a: TracedTensor, complement: bool = False) -> TracedTensor: ...
    def sum(
        self, a: TracedTensor, axes: Sequence[int], keep: bool, mean: bool = False
    ) -> TracedTensor: ...
    def largest(self, a: TracedTensor, axes: Sequence[int], keep: bool) -> TracedTensor: ...
    def matmul(self, a: TracedTensor, b: TracedTensor) -> TracedTensor: ...
    def linear(
        self, a: TracedTensor, weight: TracedTensor, bias: TracedTensor | None
    ) -> TracedTensor:
        """Compute `a @ weight + bias`, in one node if the weights are fixed."""

    def convolution(
        self,
        a: TracedTensor,
        weight: TracedTensor,
        bias: TracedTensor | None,
        windows: Windows,
        groups: int,
    ) -> TracedTensor:
        """Convolve (1, channels, …) with kernels (outputs, channels / groups, …)."""

    def pool(
        self,
        kind: Literal["max", "mean", "sum"],
        a: TracedTensor,
        size: Sequence[int],
        windows: Windows,
    ) -> TracedTensor:
        """Reduce each window over the last axes."""

    def softmax(self, a: TracedTensor, axis: int) -> TracedTensor: ...
    def log_softmax(self, a: TracedTensor, axis: int) -> TracedTensor: ...
    def batch_norm(
        self,
        a: TracedTensor,
        weight: TracedTensor | None,
        bias: TracedTensor | None,
        mean: TracedTensor,
        variance: TracedTensor,
        eps: float,
    ) -> TracedTensor: ...
    def layer_norm(
        self,
        a: TracedTensor,
        axes: int,
        weight: TracedTensor | None,
        bias: TracedTensor | None,
        eps: float,
    ) -> TracedTensor:
        """Normalize over the last `axes` axes."""


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


class StepCompiler(Protocol):
    """Compiles the functions of a step; `how` describes it, a `quiet` one does not warn."""

    how: str
    quiet: bool

    @property
    def compiles(self) -> bool:
        """Whether the first step of each shape is compiled."""

    def compiled(self, function: Function, *donate: str) -> Function:
        """Return the function, compiled if the engine can and the config asks for it."""


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
    compiler: StepCompiler
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


class ModuleStrategy(Protocol):
    """The part of a training strategy that the stepper of a library's own modules uses."""

    device: Device
    is_several: bool

    def optimizer_state(self, saved: Any, optimizer: Any) -> Any:
        """Return an optimizer's state, read from a file, in the form that it loads."""

    def module_loss(self, loss: Function, batch: Any) -> Any:
        """Return this process's part of the batch's loss to differentiate; `None` without rows."""

    def module_total(self, value: Any, like: Any) -> Any:
        """Return the loss of a whole batch, given the result of `module_loss`."""

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        """Turn the gradients of weights into those of whole batches."""

    def over_shards(self, number: Any) -> Any:
        """Return the sum of a number over the processes that hold parts of the parameters."""


class Processes(Record):
    """Processes that compute together: the rank of this one, from 0, and their number."""

    rank: int
    size: int

    @abstractmethod
    def wait(self) -> None:
        """Wait until every process has reached this call."""


class MeshLike(Protocol):
    """Devices that compute together, as `parallel.Mesh` describes them."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this process."""

    @property
    def replicate(self) -> int:
        """The number of groups, each with a full copy."""

    @property
    def shard(self) -> int:
        """The number of devices in a group."""

    @property
    def size(self) -> int:
        """The number of devices, including those of other processes."""

    @property
    def group(self) -> Processes | None:
        """The processes; `None` if there is only one."""


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
