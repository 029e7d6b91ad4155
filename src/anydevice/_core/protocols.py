"""Protocols between the folders of libraries and the rooms above them, which they do not import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from anydevice.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.generic]
    Cells = npt.NDArray[np.int64]


class FixedTensor(NamedTuple):
    """A tensor that does not depend on the model's input; `off` bounds its relative error."""

    value: Numbers
    off: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


class SymbolicTensor(NamedTuple):
    """A tensor that depends on the input: numbers of cells of a network, for a batch of one."""

    cells: Cells

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cells.shape


TracedTensor = FixedTensor | SymbolicTensor
Padding = Sequence[tuple[int, int]]
"""The widths before and after, for each axis."""


class Trace(Protocol):
    """The operations of one run of a model, as a tracer of a library records them.

    Shapes are those of NumPy, with a batch of one example in front.
    """

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
        """Apply the elementwise function that networks know by this name."""

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
        stride: Sequence[int],
        padding: Padding,
        dilation: Sequence[int],
        groups: int,
    ) -> TracedTensor:
        """Convolve (1, channels, …) with kernels (outputs, channels / groups, …)."""

    def pool(
        self,
        kind: Literal["max", "mean", "sum"],
        a: TracedTensor,
        size: Sequence[int],
        stride: Sequence[int],
        padding: Padding,
        dilation: Sequence[int] | None = None,
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
