"""Builds a `Network` step by step: each layer becomes sums of cells and elementwise functions.

A cell is one number of one node: the cells of the input are 0, 1, …, and those of each new node
follow. A tensor is an array of cells in the shape of an example, so that reshaping, transposing,
slicing and joining are done on this array and cost the network nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import frexp, prod
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from anydevice._core.protocols import Windows
from anydevice._core.record import Record
from anydevice._core.text import format_size
from anydevice._nn.layer import Shape
from anydevice._proofs.checking.network import Floats, Network, Node
from anydevice.errors import ConfigurationError, UnsupportedError

Cells = npt.NDArray[np.int64]
Numbers = Floats | float
NO_CELL = -1
"""A zero, such as the padding of an image."""

MAX_BYTES = 4 << 30
"""The limit for the matrices of one network."""

ROUNDED = 2.0**-50
"""The relative error of numbers that take a few float64 operations."""

_LARGEST_FACTOR = 2.0**20
"""A norm with a larger one may overflow in float32 between the numbers that its nodes have."""

_BY_COLUMN = 4
"""Sums of at most this number of terms are stored term by term: most of these are diagonal."""

_NORM_ROUNDINGS = 12
"""Roundings of `x * weight * rsqrt(variance + eps)` in float32, with 4 ulp for the root."""

INSTEAD = (
    "proofs take dense and convolutional layers, also transposed, poolings, upsampling, "
    "paddings, batch norm, residual sums, ReLU, leaky ReLU, PReLU, clip, abs, hard sigmoid and "
    "swish, sigmoid, tanh, GELU, SiLU, ELU, softplus, Mish, and small norms, attention, LSTM, GRU"
)


class LoweredModel(Record):
    """A model as a network, and its shapes; `dropped` names a last softmax or log_softmax."""

    network: Network
    input_shape: Shape
    output_shape: Shape
    dropped: str = ""


class NodeOptions(TypedDict, total=False):
    """The function of a node, and the error of its sum, as a `Node` has them; 0 by default."""

    function: str
    roundings: int
    inexact: float


class Builder:
    """A network while it is built; `path` names the layer that is lowered, for errors."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.path = "the model"
        self.more_roundings = 0  # in each sum that is rounded
        self._bytes = 0
        self.nodes: list[Node] = []
        self._starts = [0, inputs]

    # Nodes

    def rows(
        self, cells: Cells, weights: Numbers, bias: Numbers = 0.0, **node: Unpack[NodeOptions]
    ) -> Cells:
        """Add a node with `sum over k of weights[r, k] * cells[r, k], + bias[r]` for each row r.

        Cells that are the same for all rows may be given as one row.
        """
        if (cells < NO_CELL).any():
            raise refused(self.path, "erf outside of a GELU, or log_softmax other than for classes")
        if not node.get("inexact", 0.0) < 0.5:
            lost = "constants too inexact in float32, which an untrained BatchNorm has"
            raise refused(self.path, lost, "train the model first")
        weights = np.asarray(weights, np.float64)
        size = len(np.broadcast_to(weights, np.broadcast_shapes(cells.shape, weights.shape)))
        offset = np.ascontiguousarray(np.broadcast_to(np.asarray(bias, np.float64), (size,)))
        self._refuse_nonfinite(weights, offset)
        if node.get("roundings"):
            node["roundings"] += self.more_roundings
        terms = self._merge(self._terms(cells, weights, size))
        inputs, matrices = tuple([n for n, _ in terms]), tuple([matrix for _, matrix in terms])
        return self._append(Node(inputs, matrices, offset, **node))

    def sums(
        self, cells: Cells, weights: Numbers, bias: Numbers = 0.0, **node: Unpack[NodeOptions]
    ) -> Cells:
        """Return the sum of `weights * cells` over the last axis, + bias; weights broadcast."""
        flat = cells.reshape(-1, cells.shape[-1])
        factors = np.broadcast_to(weights, cells.shape).reshape(flat.shape)
        return self.rows(flat, factors, bias, **node).reshape(cells.shape[:-1])

    def _append(self, node: Node) -> Cells:
        self.nodes.append(node)
        start = self._starts[-1]
        self._starts.append(start + node.size)
        return np.arange(start, start + node.size)

    def function(self, cells: Cells, name: str) -> Cells:
        """Apply an elementwise function, once for each cell."""
        unique, index = np.unique(cells, return_inverse=True)
        return self.rows(unique[:, None], 1.0, function=name)[index].reshape(cells.shape)

    def affine(
        self, cells: Cells, scale: Numbers = 1.0, shift: Numbers = 0.0, **node: Unpack[NodeOptions]
    ) -> Cells:
        """Return `scale * cell + shift` for each cell; both broadcast."""
        shape = np.broadcast_shapes(cells.shape, np.shape(scale), np.shape(shift))
        scales, shifts = np.broadcast_to(scale, shape), np.broadcast_to(shift, shape).reshape(-1)
        column = np.broadcast_to(cells, shape)[..., None]
        return self.sums(column, scales[..., None], shifts, **node)

    def shift(
        self, cells: Cells, shift: Floats, *, roundings: int = 0, inexact: float = 0.0
    ) -> Cells:
        """Return `cell + shift`; a product without a bias gets this bias instead of a new node."""
        shift = np.broadcast_to(np.asarray(shift, np.float64), cells.shape)
        number = int(self._node_of(cells.reshape(-1)[:1])[0]) if cells.size else 0
        start, size = self._starts[max(number, 0)], self._size(max(number, 0))
        columns = cells.reshape(-1) - start
        node = self.nodes[number - 1] if number > 0 else None
        is_whole = np.array_equal(np.sort(columns), np.arange(size))
        if node is None or not is_whole or node.function or node.bias.any() or not node.roundings:
            return self.affine(cells, 1.0, shift, roundings=roundings, inexact=inexact)
        self._refuse_nonfinite(shift)
        bias = np.zeros(size)
        bias[columns] = shift.reshape(-1)
        node = node._replace(
            bias=bias, roundings=node.roundings + roundings, inexact=max(node.inexact, inexact)
        )
        return self._append(node)[columns].reshape(cells.shape)

    def combine(
        self, parts: list[tuple[float, Cells]], shift: float = 0.0, **node: Unpack[NodeOptions]
    ) -> Cells:
        """Return the sum of tensors times a number each; their shapes broadcast."""
        shape = np.broadcast_shapes(*[cells.shape for _, cells in parts])
        columns = [np.broadcast_to(cells, shape) for _, cells in parts]
        weights = np.array([scale for scale, _ in parts])
        return self.sums(np.stack(columns, -1), weights, shift, **node)

    def constant(self, values: Floats, inexact: float = 0.0) -> Cells:
        """Return cells that are the same for every input."""
        values = np.asarray(values, np.float64)
        cells = np.zeros((values.size, 1), np.int64)
        return self.rows(cells, 0.0, values.reshape(-1), inexact=inexact).reshape(values.shape)

    # Layers

    def dense(
        self,
        cells: Cells,
        weight: Floats,
        bias: Floats | None,
        extra: int = 0,
        inexact: float = 0.0,
    ) -> Cells:
        """Return `x · weightᵀ + bias` of the last axis; `extra` is 1 if float32 rounds weights."""
        outputs, inputs = weight.shape
        examples = cells.reshape(-1, inputs)
        offset = np.zeros(outputs) if bias is None else bias
        rows = examples if len(examples) == 1 else np.repeat(examples, outputs, axis=0)
        weights, offsets = np.tile(weight, (len(examples), 1)), np.tile(offset, len(examples))
        roundings = inputs + 1 + extra
        y = self.rows(rows, weights, offsets, roundings=roundings, inexact=inexact)
        return y.reshape(*cells.shape[:-1], outputs)

    def convolution(
        self,
        cells: Cells,
        weight: Floats,
        bias: Floats | None,
        windows: Windows,
        groups: int = 1,
        extra: int = 0,
    ) -> Cells:
        """Convolve cells (channels, …) with kernels (outputs, channels / groups, …)."""
        if windows.more is not None:
            cells, weight, windows = _spread(cells, weight, windows, groups)
        elements = windows_of(cells, weight.shape[2:], windows)
        axes, (outputs, channels) = weight.ndim - 2, weight.shape[:2]
        sizes = elements.shape[1 : 1 + axes]
        terms = channels * prod(weight.shape[2:])
        rows, weights = [], []
        for group in range(groups):
            mine = elements[group * channels : (group + 1) * channels]
            patches = np.moveaxis(mine, 0, axes).reshape(prod(sizes), terms)
            kernels = weight[group * outputs // groups : (group + 1) * outputs // groups]
            rows.append(np.tile(patches, (len(kernels), 1)))
            weights.append(np.repeat(kernels.reshape(len(kernels), terms), prod(sizes), axis=0))
        offset = np.repeat(np.zeros(outputs) if bias is None else bias, prod(sizes))
        roundings = terms + 1 + extra
        y = self.rows(np.concatenate(rows), np.concatenate(weights), offset, roundings=roundings)
        return y.reshape(outputs, *sizes)

    def interpolate(self, cells: Cells, axis: int, size: int, scale: float, way: str) -> Cells:
        """Interpolate along an axis; the error bound includes rounded positions."""
        last, at = cells.shape[axis] - 1, np.arange(size, dtype=np.float64)
        if way == "align_corners":
            at *= last / max(size - 1, 1)
        elif way == "asymmetric":
            at /= scale
        elif way == "half_pixel" or size > 1:
            at = (at + 0.5) / scale - 0.5
        at = np.clip(at, 0, last)[:, None]
        index = np.floor(at).astype(int) + np.arange(-1, 3)
        near = np.moveaxis(cells, axis, -1)[..., np.clip(index, 0, last)]
        near = np.where((index >= 0) & (index <= last), near, NO_CELL)
        weights = np.maximum(1 - np.abs(at - index), 0)
        if (np.append(at, scale) * 1024 % 1).any():
            near = np.concatenate([near] * 3, -1)
            weights = np.concatenate([weights, np.ones(index.shape), -np.ones(index.shape)], -1)
        y = self.sums(near, weights, roundings=4 * last + 20, inexact=ROUNDED)
        return np.moveaxis(y, -1, axis)

    def mean(self, windows: Cells) -> Cells:
        """Return the mean over the last axis; padding counts as zeros."""
        return self.total(windows, 1 / windows.shape[-1])

    def total(self, cells: Cells, scale: float = 1.0) -> Cells:
        """Return the sum over the last axis, times a number."""
        count, inexact = cells.shape[-1], 0.0 if frexp(scale)[0] == 0.5 else ROUNDED
        roundings = count if scale == 1.0 else count + 2
        return self.sums(cells, scale, roundings=roundings, inexact=inexact)

    def maximum(self, a: Cells, b: Cells) -> Cells:
        """Return `max(a, b) = b + relu(a - b)`; an execution does not round it."""
        more = self.combine([(1.0, a), (-1.0, b)], function="relu")
        return self.combine([(1.0, b), (1.0, more)])

    def largest(self, windows: Cells) -> Cells:
        """Return the maximum over the last axis, pair by pair; padding is ignored."""
        if (windows == NO_CELL).all(-1).any():
            raise refused(self.path, "a maximum over nothing but padding")
        windows = np.where(windows == NO_CELL, windows.max(-1, keepdims=True), windows)
        while windows.shape[-1] > 1:
            even = windows.shape[-1] // 2 * 2
            pairs = self.maximum(windows[..., 0:even:2], windows[..., 1:even:2])
            windows = np.concatenate([pairs, windows[..., even:]], -1)
        return windows[..., 0]

    def leaky_relu(self, cells: Cells, slope: Numbers) -> Cells:
        """Return `slope * x + (1 - slope) * relu(x)`; the slopes broadcast."""
        both = np.stack([cells, self.function(cells, "relu")], -1)
        slopes = np.broadcast_to(slope, cells.shape)
        weights = np.stack([slopes, 1.0 - slopes], -1)
        return self.sums(both, weights, roundings=3, inexact=ROUNDED)

    def elu(self, cells: Cells, alpha: float) -> Cells:
        """Return an ELU as the one of alpha 1, and a ReLU."""
        curve = self.function(cells, "elu")
        if alpha == 1.0:
            return curve
        parts = [(alpha, curve), (1.0 - alpha, self.function(cells, "relu"))]
        return self.combine(parts, roundings=3, inexact=ROUNDED)

    def hard_sigmoid(self, cells: Cells, slope: float, shift: float) -> Cells:
        """Return `min(max(slope * x + shift, 0), 1)`; an execution may clip before it scales."""
        line = self.affine(cells, slope, shift, roundings=4, inexact=ROUNDED)
        return self.affine(self.clip(line, 0.0, 1.0), roundings=3)

    def hard_swish(self, cells: Cells) -> Cells:
        """Return `x * min(max(x + 3, 0), 6) / 6`, as `((c + 3/2)² - 9/4) / 6 + relu(x - 3)`.

        Here c is x, clipped to [-3, 3]. An execution rounds terms up to 4 times as large as these.
        """
        low = self.affine(cells, 1.0, 3.0, function="relu")
        top = self.affine(low, -1.0, 6.0, function="relu")  # 3 - c
        square = self.affine(top, -1.0, 4.5, function="square")
        parts = [(1 / 6, square), (1.0, self.affine(cells, 1.0, -3.0, function="relu"))]
        return self.combine(parts, -0.375, roundings=32, inexact=ROUNDED)

    def absolute(self, cells: Cells) -> Cells:
        """Return `relu(x) + relu(-x)`."""
        positive = self.function(cells, "relu")
        negative = self.combine([(-1.0, cells)], function="relu")
        return self.combine([(1.0, positive), (1.0, negative)])

    def clip(self, cells: Cells, low: float | None, high: float | None) -> Cells:
        """Return `min(max(x, low), high)`; `None` is no limit.

        Both limits are `high - relu(high - low - relu(x - low))`, so that intervals stay within.
        """
        if low is not None:
            above = self.combine([(1.0, cells)], -low, function="relu", roundings=rounds(low))
            if high is None:
                return above if low == 0 else self.combine([(1.0, above)], low)
            room, lost, inexact = high - low, rounds(low) + rounds(high), ROUNDED if low else 0.0
            rest = self.combine(
                [(-1.0, above)], room, function="relu", roundings=lost, inexact=inexact
            )
            return self.combine([(-1.0, rest)], high, roundings=rounds(high))
        if high is not None:
            rest = self.combine([(-1.0, cells)], high, function="relu", roundings=rounds(high))
            return self.combine([(-1.0, rest)], high)
        return cells

    def normalize(
        self, cells: Cells, weight: Floats, bias: Floats, mean: Floats, variance: Floats, eps: float
    ) -> Cells:
        """Return `(x - mean) * weight / sqrt(variance + eps) + bias` of (channels, …).

        The roundings also cover an execution as `x * scale + shift`.
        """
        over = (-1, *[1] * (cells.ndim - 1))
        factors = weight, 1 / np.sqrt(variance + eps), weight / np.sqrt(variance + eps)
        if any((np.abs(factor) > _LARGEST_FACTOR).any() for factor in factors):
            raise refused(self.path, f"a batch norm that multiplies by over {_LARGEST_FACTOR:g}")
        scale = factors[2].reshape(over)
        centred = self.affine(cells, 1.0, -mean.reshape(over), roundings=_NORM_ROUNDINGS)
        shift = bias.reshape(over)
        return self.affine(centred, scale, shift, roundings=_NORM_ROUNDINGS, inexact=ROUNDED)

    def product(self, a: Cells, b: Cells) -> Cells:
        """Return `a * b`, element by element."""
        a, b = np.broadcast_arrays(a, b)
        return self.dot(a[..., None], b[..., None])

    def dot(self, a: Cells, b: Cells) -> Cells:
        """Return the sum of `a * b` over the last axis.

        A product is `((a + b)² - (a - b)²) / 4`: each sum is exact, and the last is rounded.
        """
        a, b = np.broadcast_arrays(a, b)
        terms = a.shape[-1]
        if np.array_equal(a, b):
            squares, signs = self.function(a, "square"), np.ones(terms)
        else:
            every = np.stack([a.reshape(-1), b.reshape(-1)], -1)
            pairs, index = np.unique(every, axis=0, return_inverse=True)
            index = index.reshape(a.shape)
            weights = [np.array([1.0, sign]) for sign in (1.0, -1.0)]
            both = [self.sums(pairs, weight, function="square")[index] for weight in weights]
            squares, signs = np.concatenate(both, -1), np.repeat([0.25, -0.25], terms)
        return self.sums(squares, signs, roundings=terms + 1)

    def softmax(self, cells: Cells) -> Cells:
        """Return `1 / (sum over j of exp(x_j - x_i))` over the last axis.

        An execution subtracts the largest of a row first, which rounds. Therefore all cells of the
        row have weights 1 and -1: these cancel, and count in the error.
        """
        count = cells.shape[-1]
        rows = cells.reshape(-1, count)
        this = np.repeat(rows.reshape(-1), count)
        other = np.repeat(rows, count, axis=0).reshape(-1)
        every = np.repeat(rows, count * count, axis=0)
        parts = np.concatenate([other[:, None], this[:, None], every, every], -1)
        signs = np.concatenate([[1.0, -1.0], np.ones(count), -np.ones(count)])
        ratios = self.sums(parts, signs, function="exp", roundings=4).reshape(*cells.shape, count)
        roundings = count + 16  # of the sum, and of the exponential that it is divided by
        return self.sums(ratios, 1.0, function="reciprocal", roundings=roundings)

    def layer_norm(
        self, cells: Cells, weight: Floats | None, bias: Floats | None, eps: float
    ) -> Cells:
        """Normalize to mean 0 and variance 1 over the last axis, then scale and shift."""
        count = cells.shape[-1]
        rows = cells.reshape(-1, count)
        centre = np.eye(count) - 1 / count
        every, weights = np.repeat(rows, count, axis=0), np.tile(centre, (len(rows), 1))
        centred = self.rows(every, weights, roundings=2 * count + 6, inexact=ROUNDED)
        y = self._divide_by_rms(rows, centred.reshape(rows.shape), eps)
        if weight is not None or bias is not None:
            scale, shift = (1.0 if weight is None else weight), (0.0 if bias is None else bias)
            y = self.affine(y, scale, shift, roundings=4)
        return y.reshape(cells.shape)

    def rms_norm(self, cells: Cells, weight: Floats | None, eps: float) -> Cells:
        """Normalize to root mean square 1 over the last axis, then scale."""
        rows = cells.reshape(-1, cells.shape[-1])
        y = self._divide_by_rms(rows, rows, eps)
        y = y if weight is None else self.affine(y, weight, roundings=4)
        return y.reshape(cells.shape)

    def _divide_by_rms(self, rows: Cells, centred: Cells, eps: float) -> Cells:
        """Return `centred / sqrt(mean of centred² + eps)`.

        The squares of rows cancel, and count in the error: a variance may be computed in one pass.
        """
        count = rows.shape[-1]
        squares, raw = self.function(centred, "square"), self.function(rows, "square")
        parts = np.concatenate([squares, raw, raw], -1)
        signs = np.concatenate([np.ones(count), np.ones(count), -np.ones(count)]) / count
        roundings = 2 * count + 8
        variance = self.sums(parts, signs, function="relu", roundings=roundings, inexact=ROUNDED)
        root = self.rows(variance[:, None], 1.0, eps, function="rsqrt", roundings=3)
        return self.product(centred, root[:, None])

    def attention(self, q: Cells, k: Cells, v: Cells, scale: float, causal: bool) -> Cells:
        """Return `softmax(scale · q · kᵀ) · v` of (heads, tokens, size) each."""
        scores = self.dot(q[:, :, None], k[:, None])
        scores = self.affine(scores, scale, roundings=3, inexact=ROUNDED)
        queries, keys = scores.shape[1:]
        if not causal:
            shares = self.softmax(scores)
            return self.dot(shares[:, :, None], np.swapaxes(v, 1, 2)[:, None])
        rows = []
        for query in range(queries):
            visible = query + 1 + keys - queries
            shares = self.softmax(scores[:, query, :visible])
            rows.append(self.dot(shares[:, None], np.swapaxes(v[:, :visible], 1, 2)))
        return np.stack(rows, 1)

    # The network

    def network(self, cells: Cells) -> Network:
        """Return the network whose outputs are these cells, without nodes that they do not need."""
        flat = cells.reshape(-1)
        number = int(self._node_of(flat[:1])[0])
        if number > 0 and np.array_equal(
            flat, self._starts[number] + np.arange(self._size(number))
        ):
            return simplify(Network(self.inputs, tuple(self.nodes[:number])))
        self.rows(flat[:, None], 1.0)
        return simplify(Network(self.inputs, tuple(self.nodes)))

    def _node_of(self, cells: Cells) -> Cells:
        return np.searchsorted(self._starts, cells, side="right") - 1

    def _terms(self, cells: Cells, weights: Floats, size: int) -> Iterator[tuple[int, Floats]]:
        """Yield each node that is summed, with its matrix or diagonal."""
        width = np.broadcast_shapes(cells.shape, weights.shape)[1]
        if width <= _BY_COLUMN or _repeats(cells):
            columns = np.broadcast_to(cells, (size, width)).T
            factors = np.broadcast_to(weights, (size, width)).T
            for column, factor in zip(columns, factors, strict=True):
                yield from self._column(column, factor)
            return
        owners = self._node_of(cells)
        for number in np.unique(owners[owners >= 0]).tolist():
            matrix = self._zeros(size, number)
            here = owners == number
            if len(cells) == 1:
                columns = cells[0, here[0]] - self._starts[number]
                matrix[:, columns] = np.broadcast_to(weights, (size, width))[:, here[0]]
            else:
                rows, columns = np.nonzero(here)
                factors = np.broadcast_to(weights, (size, width))
                matrix[rows, cells[here] - self._starts[number]] = factors[rows, columns]
            yield number, matrix

    def _column(self, cells: Cells, factors: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield one term of each row, by node."""
        owners = self._node_of(cells)
        for number in np.unique(owners[owners >= 0]).tolist():
            (rows,) = np.nonzero(owners == number)
            columns = cells[rows] - self._starts[number]
            if len(cells) == self._size(number) and np.array_equal(rows, columns):
                diagonal = np.zeros(len(cells))
                diagonal[rows] = factors[rows]
                yield number, diagonal
                continue
            matrix = self._zeros(len(cells), number)
            matrix[rows, columns] = factors[rows]
            yield number, matrix

    def _merge(self, terms: Iterator[tuple[int, Floats]]) -> list[tuple[int, Floats]]:
        """Add terms of one node whose nonzero numbers do not overlap, so that sums are exact."""
        merged: list[tuple[int, Floats]] = []
        for number, matrix in terms:
            for i, (other, before) in enumerate(merged):
                if number == other and matrix.ndim == before.ndim and not (matrix * before).any():
                    merged[i] = number, before + matrix
                    if matrix.ndim == 2:
                        self._bytes -= matrix.nbytes
                    break
            else:
                merged.append((number, matrix))
        return merged

    def _size(self, number: int) -> int:
        return self._starts[number + 1] - self._starts[number]

    def _zeros(self, size: int, number: int) -> Floats:
        shape = size, self._size(number)
        self._bytes += 8 * prod(shape)
        if self._bytes > MAX_BYTES:
            raise UnsupportedError(
                f"{self.path}: as matrices this model takes more than "
                f"{format_size(MAX_BYTES)}; take a smaller model, or smaller images"
            )
        return np.zeros(shape)

    def _refuse_nonfinite(self, *arrays: Any) -> None:
        if not all(np.isfinite(array).all() for array in arrays):
            raise ConfigurationError(
                f"{self.path}: a weight is NaN or infinite, or becomes so in float64; nothing can "
                "be proved of this model",
                source=self.path,
            )


def windows_of(cells: Cells, size: Sequence[int], windows: Windows) -> Cells:
    """Return the windows over the last axes: (…, windows along each axis, elements of each)."""
    widths = [(0, 0)] * (cells.ndim - len(size)) + list(windows.padding)
    padded = np.pad(cells, widths, constant_values=NO_CELL)
    spread = windows.dilation
    reach = tuple((length - 1) * step + 1 for length, step in zip(size, spread, strict=True))
    axes = tuple(range(cells.ndim - len(size), cells.ndim))
    every = np.lib.stride_tricks.sliding_window_view(padded, reach, axes)
    steps = [slice(None, None, step) for step in (*windows.stride, *spread)]
    elements: Cells = every[(Ellipsis, *steps)]  # type: ignore[arg-type]
    return elements


def _spread(
    cells: Cells, kernels: Floats, windows: Windows, groups: int
) -> tuple[Cells, Floats, Windows]:
    """Return a transposed convolution as one by mirrored kernels, of cells set apart."""
    axes = len(windows.stride)
    sizes = [(n - 1) * s + 1 for n, s in zip(cells.shape[1:], windows.stride, strict=True)]
    apart = np.full((len(cells), *sizes), NO_CELL)
    apart[:, *[slice(None, None, step) for step in windows.stride]] = cells
    ends = zip(
        kernels.shape[2:], windows.dilation, windows.padding, windows.more or (), strict=True
    )
    widths = [((k - 1) * d - low, (k - 1) * d - high + m) for k, d, (low, high), m in ends]
    around = [(0, 0), *[(max(low, 0), max(high, 0)) for low, high in widths]]
    apart = np.pad(apart, around, constant_values=NO_CELL)
    inside = [slice(max(-low, 0), min(high, 0) or None) for low, high in widths]
    parts = kernels.reshape(groups, -1, *kernels.shape[1:]).swapaxes(1, 2)
    mirrored = np.flip(parts, tuple(range(3, parts.ndim))).reshape(-1, *parts.shape[2:])
    return apart[:, *inside], mirrored, Windows([1] * axes, [(0, 0)] * axes, windows.dilation)


def simplify(network: Network) -> Network:
    """Drop nodes that the output does not need, and join functions with the node before."""
    nodes = list(network.pruned().nodes)
    uses = Counter(number for node in nodes for number in node.inputs)
    for i, node in enumerate(nodes):
        if not node.function or not _copies_one(node):
            continue
        (source,) = node.inputs
        before = nodes[source - 1] if source else None
        if before is None or before.function or uses[source] > 1 or before.size != node.size:
            continue
        nodes[i] = before._replace(function=node.function)
        uses[source] = 0
    return Network(network.inputs, tuple(nodes)).pruned()


def _copies_one(node: Node) -> bool:
    """Whether the node's sum is another node as it is."""
    if len(node.inputs) != 1 or node.roundings or node.inexact or node.bias.any():
        return False
    (weight,) = node.weights
    return weight.ndim == 1 and bool((weight == 1).all())


def _repeats(cells: Cells) -> bool:
    """Whether a row names a cell twice."""
    ordered = np.sort(cells, axis=1)
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())


def refused(path: str, feature: str, instead: str = INSTEAD) -> UnsupportedError:
    """Return the error for a feature that proofs do not take."""
    return UnsupportedError(f"{path}: proofs do not take {feature}; {instead}")


def rounds(values: Numbers) -> int:
    """Return 1 if float32 does not hold all of these numbers, else 0."""
    with np.errstate(over="ignore"):
        narrow = np.asarray(values).astype(np.float32)
    return int(not np.array_equal(narrow.astype(np.float64), values))


# Networks of derivatives, for properties about slopes

# The tangent of each node goes forward beside its value (forward-mode differentiation). Products
# are made of squares, and the derivative of a ReLU is a step. At a kink a step may be 0 or 1, so
# bounds of these networks hold for every slope that a piecewise function has there (a local
# Lipschitz bound, as in RecurJac, Zhang et al., 2019).

_TANGENT_ERROR = 64 * ROUNDED
"""The relative error of tangents that are numbers: products of some weights."""

Tangent = npt.NDArray[Any]
"""A tangent of each cell along each direction: numbers if all inputs have the same, else cells."""


def derivative(network: Network, along: int, output: int) -> Network:
    """Return the network of the derivative of one output along one input."""
    graph, tangent = _tangents(network, np.eye(network.inputs)[:, [along]])
    return graph.network(_tangent_cells(graph, tangent)[output])


def absolute_sums(network: Network) -> Network:
    """Return the network of `sum over inputs of |derivative|`, for each output."""
    graph, tangent = _tangents(network, np.eye(network.inputs))
    return graph.network(graph.total(graph.absolute(_tangent_cells(graph, tangent))))


def _tangents(network: Network, directions: Floats) -> tuple[Builder, Tangent]:
    """Return the graph of the network, and the tangent of its output: (outputs, directions)."""
    graph = Builder(network.inputs)
    values: list[Cells] = [np.arange(network.inputs)]
    tangents: list[Tangent] = [directions]
    for number, node in enumerate(network.nodes, 1):
        graph.path = f"node {number}"
        cells, weights, parts = [], [], []
        for source, weight in zip(node.inputs, node.weights, strict=True):
            matrix = np.diag(weight) if weight.ndim == 1 else weight
            cells.append(values[source])
            weights.append(matrix)
            parts.append((matrix, tangents[source]))
        joined, matrix = np.concatenate(cells)[None], np.concatenate(weights, axis=1)
        before = graph.rows(joined, matrix, node.bias, inexact=node.inexact)
        tangent = _through_sum(graph, parts, node.inexact)
        if not node.function:
            values.append(before)
            tangents.append(tangent)
            continue
        values.append(graph.function(before, node.function))
        slope = _slope(graph, node.function, before, values[-1])
        if _is_fixed(tangent):
            tangents.append(graph.affine(slope[:, None], tangent, inexact=_TANGENT_ERROR))
        else:
            tangents.append(graph.product(slope[:, None], tangent))
    return graph, tangents[-1]


def _through_sum(graph: Builder, parts: list[tuple[Floats, Tangent]], inexact: float) -> Tangent:
    """Return the tangent of a sum of matrices times values."""
    matrix, tangent = parts[0]
    if len(parts) == 1 and _is_fixed(tangent):
        terms = (matrix != 0).astype(int) @ (tangent != 0).astype(int)
        if int(terms.max()) <= 1:  # nothing would bound the rounding of a sum
            product: Floats = matrix @ tangent
            return product
    cells = np.concatenate([_tangent_cells(graph, tangent) for _, tangent in parts])
    matrix = np.concatenate([weight for weight, _ in parts], axis=1)
    columns = [graph.rows(column[None], matrix, inexact=inexact) for column in cells.T]
    return np.stack(columns, -1)


def _is_fixed(tangent: Tangent) -> bool:
    return bool(tangent.dtype.kind == "f")


def _tangent_cells(graph: Builder, tangent: Tangent) -> Cells:
    return graph.constant(tangent, _TANGENT_ERROR) if _is_fixed(tangent) else tangent


def _slope(graph: Builder, function: str, before: Cells, after: Cells) -> Cells:
    """Return the derivative of a function, from its argument and its value."""
    if function not in _SLOPES:
        raise UnsupportedError(
            f"proofs take no derivative of {function}; monotone and lipschitz are for models of "
            "ReLU, leaky ReLU, sigmoid, tanh, SiLU, ELU and softplus"
        )
    return _SLOPES[function](graph, before, after)


_SLOPES: dict[str, Callable[[Builder, Cells, Cells], Cells]] = {
    "relu": lambda graph, before, after: graph.function(before, "step"),
    "sigmoid": lambda graph, before, after: graph.combine(
        [(1.0, after), (-1.0, graph.function(after, "square"))]
    ),
    "tanh": lambda graph, before, after: graph.combine(
        [(-1.0, graph.function(after, "square"))], 1.0
    ),
    "silu": lambda graph, before, after: graph.product(  # sigmoid(x) * (1 + x - silu(x))
        graph.function(before, "sigmoid"), graph.combine([(1.0, before), (-1.0, after)], 1.0)
    ),
    "exp": lambda graph, before, after: after,
    "elu": lambda graph, before, after: graph.combine(  # 1 + min(elu(x), 0)
        [(-1.0, graph.combine([(-1.0, after)], function="relu"))], 1.0
    ),
    "softplus": lambda graph, before, after: graph.function(before, "sigmoid"),
    "square": lambda graph, before, after: graph.affine(before, 2.0),
    "reciprocal": lambda graph, before, after: graph.affine(graph.function(after, "square"), -1.0),
    "rsqrt": lambda graph, before, after: graph.affine(
        graph.product(after, graph.function(after, "square")), -0.5
    ),
}
