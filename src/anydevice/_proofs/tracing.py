"""The network of a traced model: each primitive of a library becomes cells of a graph.

A tracer in `_libraries` runs a module once on a batch of one example, and calls a method of
`NetworkTrace` for each primitive. Primitives that together are one function, such as the parts of a
GELU or of a softmax, are recognised by the origin of their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isnan, nan, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._core.protocols import FixedTensor, Padding, SymbolicTensor, Windows
from anydevice._core.protocols import TracedTensor as Tensor
from anydevice._proofs.checking.network import Floats
from anydevice._proofs.evaluation import FUNCTIONS
from anydevice._proofs.graph import (
    NO_CELL,
    ROUNDED,
    Builder,
    Cells,
    LoweredModel,
    Numbers,
    refused,
    rounds,
    windows_of,
)
from anydevice.errors import UnsupportedError

_ROOT_HALF = float(np.sqrt(0.5))
_GELU_SCALE, _GELU_CUBIC = float(np.sqrt(2 / np.pi)), 0.044715
_GATES = {"sigmoid": ("silu", 1.0), "1 + erf": ("gelu", 2.0), "1 + tanh": ("gelu_tanh", 2.0)}
"""The activation `x * gate(x)` by its gate, and the factor of this product."""
_MILD = 4.0
"""Scales up to this one, and down to its reciprocal, neither overflow nor lose a number."""
_MAX_SCALES = 4
"""Scalings that are followed back in search of an activation."""


class Origin(NamedTuple):
    """The kind of all cells of a tensor, "" if they differ, and two numbers of each cell.

    `cells` are the cells that they were computed from; for the kind "largest", numbers of rows.
    """

    kind: str
    cells: Cells
    numbers: Floats


class NetworkTrace:
    """The network that a traced module computes, primitive by primitive.

    Shapes are NumPy's, with a batch of one in front.
    """

    def __init__(self, shape: tuple[int, ...], graph: Builder | None = None) -> None:
        self.graph = graph or Builder(prod(shape))
        self.input = SymbolicTensor(np.arange(prod(shape)).reshape(1, *shape))
        self._origins: dict[int, tuple[str, int, float]] = {}
        self._rows: list[tuple[int, ...]] = []
        self._next_pending = -10

    @property
    def path(self) -> str:
        """The module that runs now, for errors."""
        return self.graph.path

    @path.setter
    def path(self, path: str) -> None:
        self.graph.path = path

    def refuse(self, feature: str) -> UnsupportedError:
        return refused(self.graph.path, feature)

    # Shapes

    def rearrange(self, change: Callable[..., Any], *tensors: Tensor) -> Tensor:
        """Move elements: `change` gets NumPy arrays, and copies elements without computing."""
        fixed = [tensor for tensor in tensors if isinstance(tensor, FixedTensor)]
        if len(fixed) == len(tensors):
            off = max(tensor.off for tensor in fixed)
            return FixedTensor(change(*[tensor.value for tensor in fixed]), off)
        return SymbolicTensor(change(*[self.cells(tensor) for tensor in tensors]))

    def pixel_shuffle(self, a: Tensor, size: int) -> Tensor:
        *rest, rows, columns = a.shape
        apart = (*rest[:-1], -1, size, size, rows, columns)
        whole = (*rest[:-1], -1, rows * size, columns * size)
        return self.rearrange(
            lambda x: np.moveaxis(x.reshape(apart), (-4, -3), (-3, -1)).reshape(whole), a
        )

    def constant(self, number: float) -> FixedTensor:
        return FixedTensor(np.array(number, np.float64))

    def cells(self, tensor: Tensor) -> Cells:
        """Return the cells of a tensor; fixed numbers become cells too."""
        if isinstance(tensor, SymbolicTensor):
            return tensor.cells
        return self.graph.constant(_wide(tensor), tensor.off)

    def pad(self, a: Tensor, widths: Padding, fill: float) -> Tensor:
        if isinstance(a, FixedTensor):
            return FixedTensor(np.pad(a.value, widths, constant_values=fill), a.off)
        cells = np.pad(a.cells, widths, constant_values=NO_CELL)
        if np.isneginf(fill):  # around a maximum, which ignores NO_CELL
            return SymbolicTensor(cells)
        if (cells == NO_CELL).any():
            filler = self.graph.constant(np.full(1, fill))[0]
            cells = np.where(cells == NO_CELL, filler, cells)
        return SymbolicTensor(cells)

    # Arithmetic

    def add(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """Compute `a + scale * b`."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return _add_fixed(a, b, scale)
        plain = scale in (1.0, -1.0)
        if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
            logarithms = self._match_log_softmax(a, b) if scale == -1.0 else None
            if logarithms is not None:
                return logarithms
            parts, inexact = [(1.0, a.cells), (scale, b.cells)], 0.0 if plain else ROUNDED
            total = self.graph.combine(parts, roundings=1 if plain else 3, inexact=inexact)
            self._note_sum(total, a, b, scale)
            return SymbolicTensor(total)
        if isinstance(b, SymbolicTensor):
            a, b = self._scale(b, self.constant(scale)), a
            plain, scale = True, 1.0
        assert isinstance(a, SymbolicTensor)
        assert isinstance(b, FixedTensor)
        off = b.off + (0.0 if plain else ROUNDED)
        return self._shift(a, scale * _wide(b), off, 0 if plain else 1)

    def _shift(self, a: SymbolicTensor, shift: Floats, off: float, extra: int) -> Tensor:
        """Return `a + shift`; the shift itself has `extra` roundings."""
        shape = np.broadcast_shapes(a.shape, shift.shape)
        if not shift.any() and shape == a.shape:
            return a
        kind, source, numbers = self._origin(a.cells)
        is_one = _same_number(shift) == 1.0
        if kind == "erf" and is_one:
            return self._only_inside("1 + erf", np.broadcast_to(source.reshape(a.shape), shape))
        roundings = 1 + extra + rounds(shift)
        cells = np.broadcast_to(a.cells, shape)
        shifted = self.graph.shift(cells, shift, roundings=roundings, inexact=off)
        if kind == "tanh of a GELU" and is_one:
            self._note(shifted, "1 + tanh", source, numbers)
        return SymbolicTensor(shifted)

    def _note_sum(self, total: Cells, a: SymbolicTensor, b: SymbolicTensor, scale: float) -> None:
        """Note a sum that is a part of a softmax or of a GELU."""
        first, second = np.broadcast_arrays(a.cells, b.cells)
        if scale == -1.0:
            kind, rows, _ = self._origin(second)
            pairs = zip(first.flat, rows.tolist(), strict=False)
            if kind == "largest" and all(x in self._rows[row] for x, row in pairs):
                self._note(total, "shifted", first, rows)
        if scale == 1.0:
            for x, y in ((first, second), (second, first)):
                kind, inner, factors = self._origin(y)
                if kind != "scaled" or not abs(_same_number(factors) - _GELU_CUBIC) <= 1e-6:
                    continue
                kind, source, numbers = self._origin(inner)
                if kind == "cube" and np.array_equal(source, x.reshape(-1)):
                    self._note(total, "cubic", source, numbers)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a * b`, or the activation that this product is."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(_wide(a) * _wide(b), a.off + b.off + 2.0**-23)
        if isinstance(b, FixedTensor):
            a, b = b, a
        assert isinstance(b, SymbolicTensor)
        if isinstance(a, FixedTensor):
            return self._scale(b, a)
        for x, gate in ((a, b), (b, a)):
            activation = self._match_activation(x, gate)
            if activation is not None:
                return activation
        return SymbolicTensor(self.graph.product(a.cells, b.cells))

    def _match_activation(self, x: SymbolicTensor, gate: SymbolicTensor) -> Tensor | None:
        """Return SiLU or GELU if `x * gate` is a multiple of one."""
        kind, source, factors = self._origin(gate.cells)
        is_gate = kind in _GATES and x.shape == gate.shape
        scale = self._factor(x, source) if is_gate else None
        if scale is None:
            return None
        name, doubled = _GATES[kind]
        activation = self.function(name, SymbolicTensor(source.reshape(gate.shape)))
        return self.multiply(activation, self.constant(scale * _same_number(factors) * doubled))

    def _scale(self, a: SymbolicTensor, b: FixedTensor) -> Tensor:
        scale = _wide(b)
        shape = np.broadcast_shapes(a.shape, scale.shape)
        if (scale == 1).all() and shape == a.shape:
            return a
        unscaled, factor = np.broadcast_to(a.cells, shape), _same_number(scale)
        kind, source, numbers = self._origin(unscaled)
        if kind == "1 + erf" and not isnan(factor):
            return self._only_inside(kind, source.reshape(shape), factor * _same_number(numbers))
        extra = rounds(scale)
        exact = not extra and _is_power_of_two(scale)
        mild = 1 / _MILD <= abs(factor) <= _MILD
        if exact and kind == "scaled" and mild and factor * _same_number(numbers) == 1:
            return SymbolicTensor(source.reshape(shape))  # mostly in a GELU
        roundings = 0 if exact else 1 + extra
        cells = self.graph.affine(unscaled, scale, roundings=roundings, inexact=b.off)
        if not isnan(factor):
            self._note(cells, "scaled", unscaled, factor)
            if kind == "1 + tanh":
                self._note(cells, kind, source, numbers * factor)
            if kind == "cubic" and abs(factor - _GELU_SCALE) < 1e-6:
                self._note(cells, "tanh argument", source, numbers)
        return SymbolicTensor(cells)

    def _multiples(self, tensor: SymbolicTensor) -> Iterator[tuple[Cells, float]]:
        """Yield the cells that a tensor is a multiple of, with the factor, itself first."""
        cells, factor = tensor.cells.reshape(-1), 1.0
        for _ in range(_MAX_SCALES):
            yield cells, factor
            kind, cells, factors = self._origin(cells)
            factor = factor * _same_number(factors) if kind == "scaled" else nan
            if not abs(factor) <= _MILD:  # it might overflow on the way
                return

    def _factor(self, tensor: Tensor, cells: Cells) -> float | None:
        """Return f if the tensor is f times these cells, else `None`."""
        if isinstance(tensor, FixedTensor):
            return None if _wide(tensor).any() else 0.0
        for base, factor in self._multiples(tensor):
            if np.array_equal(base, cells):
                return factor
        return None

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a / b`, or the softmax that this quotient is."""
        if isinstance(b, FixedTensor):
            off = b.off + (0.0 if _is_power_of_two(_wide(b)) else ROUNDED)
            return self.multiply(a, FixedTensor(1 / _wide(b), off))
        shares = self._match_softmax(a, b)
        if shares is not None:
            return shares
        kind, source, _ = self._origin(b.cells)
        if kind == "sqrt":
            root = self.function("rsqrt", SymbolicTensor(source.reshape(b.shape)))
            return self.multiply(a, root)
        return self.multiply(a, self.function("reciprocal", b))

    def _match_softmax(self, a: Tensor, b: SymbolicTensor) -> Tensor | None:
        """Return a softmax if `a / b` is `exp(x - largest)` divided by its sum over the row."""
        if isinstance(a, FixedTensor) or np.broadcast_shapes(a.shape, b.shape) != a.shape:
            return None
        kind, source, row_of_cell = self._origin(a.cells)
        below, rows, _ = self._origin(np.broadcast_to(b.cells, a.shape))
        matches = kind == "shifted exp" and below == "sum of exp"
        if not matches or not np.array_equal(row_of_cell, rows):
            return None
        shares, lengths = np.zeros(a.cells.size, np.int64), np.zeros(a.cells.size)
        for row in np.unique(rows).tolist():
            cells = np.array(self._rows[row])
            by_cell = dict(zip(cells.tolist(), self.graph.softmax(cells).tolist(), strict=True))
            in_row = rows == row
            shares[in_row] = [by_cell[cell] for cell in source[in_row].tolist()]
            lengths[in_row] = len(cells)
        self._note(shares, "softmax", source, lengths)
        return SymbolicTensor(shares.reshape(a.shape))

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(np.maximum(_wide(a), _wide(b)), max(a.off, b.off))
        if isinstance(b, SymbolicTensor):
            a, b = b, a
        assert isinstance(a, SymbolicTensor)
        if isinstance(b, FixedTensor):
            low = _wide(b)
            cells = np.broadcast_to(a.cells, np.broadcast_shapes(a.shape, low.shape))
            if np.isneginf(low).all():
                return SymbolicTensor(cells)
            limit = _same_number(low)
            if limit == 0:
                above = self.graph.function(cells, "relu")
                self._note(above, "at least", cells, 0.0)
                return SymbolicTensor(above)
            if not isnan(limit):
                clipped = self.graph.clip(cells, limit, None)
                self._note(clipped, "at least", cells, limit)
                return SymbolicTensor(clipped)
        return SymbolicTensor(self.graph.maximum(*np.broadcast_arrays(a.cells, self.cells(b))))

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the smaller of both; the minimum of a maximum is a clip."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(np.minimum(_wide(a), _wide(b)), max(a.off, b.off))
        if isinstance(b, SymbolicTensor):
            a, b = b, a
        assert isinstance(a, SymbolicTensor)
        high = _same_number(_wide(b)) if isinstance(b, FixedTensor) else nan
        if not isnan(high):
            shape = np.broadcast_shapes(a.shape, b.shape)
            a = SymbolicTensor(np.broadcast_to(a.cells, shape))
            if np.isposinf(high):
                return a
            kind, source, limits = self._origin(a.cells)
            if kind == "at least" and _same_number(limits) <= high:
                low = _same_number(limits)
                return SymbolicTensor(self.graph.clip(source.reshape(a.shape), low, high))
            return SymbolicTensor(self.graph.clip(a.cells, None, high))
        negatives = [self.graph.combine([(-1.0, cells)]) for cells in (a.cells, self.cells(b))]
        larger = self.graph.maximum(*np.broadcast_arrays(*negatives))
        return SymbolicTensor(self.graph.combine([(-1.0, larger)]))

    def clip(self, a: Tensor, low: float | None, high: float | None) -> Tensor:
        if isinstance(a, FixedTensor):
            return FixedTensor(np.clip(_wide(a), low, high), a.off)
        return SymbolicTensor(self.graph.clip(a.cells, low, high))

    def layer(self, name: str, a: Tensor, *options: Any) -> Tensor:
        return SymbolicTensor(getattr(self.graph, name)(self.cells(a), *options))

    def function(self, name: str, a: Tensor) -> Tensor:
        if name not in FUNCTIONS:
            raise self.refuse(name)
        if isinstance(a, FixedTensor):
            return FixedTensor(FUNCTIONS[name](_wide(a)), a.off * 4 + 2.0**-20)
        kind, source, numbers = self._origin(a.cells)
        cells = self.graph.function(a.cells, name)
        if name == "square":  # an execution rounds it
            cells = self.graph.affine(cells, roundings=1)
        if name == "exp" and kind == "shifted":
            self._note(cells, "shifted exp", source, numbers)
        elif name == "tanh" and kind == "tanh argument":
            self._note(cells, "tanh of a GELU", source, numbers)
        else:
            self._note(cells, name, a.cells)
        return SymbolicTensor(cells)

    def log(self, a: Tensor) -> Tensor:
        """Return the logarithm of the sum in a log_softmax; no other is supported."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.log(_wide(a)), float("inf"))
        kind, rows, _ = self._origin(a.cells)
        if kind != "sum of exp":
            raise self.refuse("log but in a log_softmax at the end")
        return self._only_inside("log of sum", rows.reshape(a.shape))

    def _match_log_softmax(self, a: SymbolicTensor, b: SymbolicTensor) -> Tensor | None:
        """Return a log_softmax if `a - b` is `x - largest` minus the logarithm of the sum."""
        shape = np.broadcast_shapes(a.shape, b.shape)
        kind, source, row_of_cell = self._origin(a.cells)
        below, rows, _ = self._origin(np.broadcast_to(b.cells, shape))
        matches = kind == "shifted" and below == "log of sum"
        if not matches or not np.array_equal(row_of_cell, rows):
            return None
        return self._only_inside("log_softmax", source.reshape(shape), len(self._rows[rows[0]]))

    def cube(self, a: Tensor) -> Tensor:
        cube = self.multiply(self.function("square", a), a)
        if isinstance(a, SymbolicTensor):
            self._note(self.cells(cube), "cube", a.cells)
        return cube

    def sqrt(self, a: Tensor) -> Tensor:
        """Return a square root, which is supported only as a divisor."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.sqrt(_wide(a)), a.off + 2.0**-22)
        return self._only_inside("sqrt", a.cells)

    def erf(self, a: Tensor, complement: bool = False) -> Tensor:
        """Return the error function, which is supported only as a part of a GELU."""
        sign, name = (-1.0, "1 + erf") if complement else (1.0, "erf")
        if isinstance(a, SymbolicTensor):
            for cells, factor in self._multiples(a):
                if abs(factor - sign * _ROOT_HALF) < 1e-6:
                    return self._only_inside(name, cells.reshape(a.shape))
        raise self.refuse("erf but in a GELU")

    def _only_inside(self, kind: str, source: Cells, number: float = 1.0) -> Tensor:
        """Return a tensor for its pattern alone: `Builder.rows` refuses numbers below `NO_CELL`."""
        self._next_pending -= source.size
        pending = self._next_pending + np.arange(source.size).reshape(source.shape)
        self._note(pending, kind, source, number)
        return SymbolicTensor(pending)

    def compare(self, a: Tensor, b: Tensor, greater: bool) -> Tensor:
        """Return `a > b` or `a < b` for `select`, where equality changes nothing."""
        if isinstance(a, FixedTensor) and isinstance(b, SymbolicTensor):
            return self.compare(b, a, not greater)
        limit = _same_number(_wide(b)) if isinstance(b, FixedTensor) else nan
        if isinstance(a, SymbolicTensor) and not isnan(limit):
            cells = np.broadcast_to(a.cells, np.broadcast_shapes(a.shape, b.shape))
            return self._only_inside("above" if greater else "below", cells, limit)
        raise self.refuse("a comparison of two values that depend on the input")

    def select(self, where: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        """Return `yes` or `no` by a comparison, if that is a leaky ReLU or a clip."""
        if isinstance(where, FixedTensor):
            return self._select_fixed(where.value, yes, no)
        kind, cells, limits = self._origin(where.cells)
        if kind == "above":
            return self._select_by_sign(cells, _same_number(limits), yes, no)
        if kind == "below":
            return self._select_by_sign(cells, _same_number(limits), no, yes)
        raise self.refuse("a choice by values that depend on the input")

    def _select_fixed(self, where: npt.NDArray[np.generic], yes: Tensor, no: Tensor) -> Tensor:
        choices = {bool(choice) for choice in where.flat}
        if len(choices) == 1:
            chosen = yes if True in choices else no
            return self.rearrange(
                lambda x: np.broadcast_to(x, np.broadcast_shapes(x.shape, where.shape)), chosen
            )
        if isinstance(yes, FixedTensor) and isinstance(no, FixedTensor):
            return FixedTensor(np.where(where, yes.value, no.value), max(yes.off, no.off))
        return SymbolicTensor(
            np.where(*np.broadcast_arrays(where, self.cells(yes), self.cells(no)))
        )

    def _select_by_sign(self, cells: Cells, limit: float, above: Tensor, below: Tensor) -> Tensor:
        """Return `above` where the compared cells exceed the limit, else `below`."""
        slopes = [self._factor(tensor, cells) for tensor in (above, below)]
        shape = np.broadcast_shapes(above.shape, below.shape)
        if limit == 0 and None not in slopes:
            scale = [float(slope or 0.0) for slope in slopes]
            bent = self.graph.function(cells, "relu")
            parts = [(scale[1], cells), (scale[0] - scale[1], bent)]
            leaky = self.graph.combine(parts, roundings=3, inexact=ROUNDED)
            return SymbolicTensor(leaky.reshape(shape))
        is_limit = [
            isinstance(x, FixedTensor) and bool((_wide(x) == limit).all()) for x in (above, below)
        ]
        if is_limit[1] and slopes[0] == 1.0:
            return self.maximum(SymbolicTensor(cells.reshape(shape)), self.constant(limit))
        if is_limit[0] and slopes[1] == 1.0:
            return self.minimum(SymbolicTensor(cells.reshape(shape)), self.constant(limit))
        if is_limit[0] and isinstance(below, SymbolicTensor):
            kind, source, _ = self._origin(below.cells)
            if kind == "at least" and np.array_equal(source, cells):
                return self.minimum(below, self.constant(limit))
        raise self.refuse("a choice by values that depend on the input")

    def absolute(self, a: Tensor) -> Tensor:
        if isinstance(a, FixedTensor):
            return FixedTensor(np.abs(_wide(a)), a.off)
        return SymbolicTensor(self.graph.absolute(a.cells))

    def leaky_relu(self, a: Tensor, slope: Tensor | float) -> Tensor:
        if isinstance(slope, SymbolicTensor):
            raise self.refuse("a slope that depends on the input")
        slopes = _wide(slope) if isinstance(slope, FixedTensor) else np.array(slope)
        if isinstance(a, FixedTensor):
            return FixedTensor(
                np.where(_wide(a) > 0, _wide(a), slopes * _wide(a)), a.off + 2.0**-23
            )
        cells = np.broadcast_to(a.cells, np.broadcast_shapes(a.shape, slopes.shape))
        return SymbolicTensor(self.graph.leaky_relu(cells, slopes))

    # Sums and products

    def sum(self, a: Tensor, axes: Sequence[int], keep: bool, mean: bool = False) -> Tensor:
        """Return the sum or the mean over some axes."""
        if isinstance(a, FixedTensor):
            value = np.sum(_wide(a), tuple(axes), keepdims=keep)
            count = _wide(a).size / max(value.size, 1)
            return FixedTensor(value / count if mean else value, a.off + 2.0**-20)
        cells = _join_axes(a.cells, axes)
        total = self.graph.mean(cells) if mean else self.graph.total(cells)
        kind, source, row_of_cell = self._origin(cells)
        if kind == "shifted exp" and not mean:
            rows = row_of_cell.astype(np.int64).reshape(*total.shape, -1)
            if (rows == rows[..., :1]).all() and self._sums_whole_rows(source, rows):
                self._note(total, "sum of exp", rows[..., 0])
        return SymbolicTensor(_restore_axes(total, a.cells.ndim, axes, keep))

    def largest(self, a: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
        """Return the maximum over some axes."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.max(_wide(a), tuple(axes), keepdims=keep), a.off)
        cells = _join_axes(a.cells, axes)
        largest = self.graph.largest(cells)
        if cells.shape[-1] > 1:
            first = len(self._rows)
            self._rows += [tuple(row) for row in cells.reshape(-1, cells.shape[-1]).tolist()]
            self._note(largest, "largest", np.arange(first, len(self._rows)))
        return SymbolicTensor(_restore_axes(largest, a.cells.ndim, axes, keep))

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(_wide(a) @ _wide(b), a.off + b.off + 2.0**-18)
        if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
            columns = np.swapaxes(b.cells, -1, -2)
            return SymbolicTensor(
                self.graph.dot(a.cells[..., :, None, :], columns[..., None, :, :])
            )
        if isinstance(a, FixedTensor):
            return self._transpose(self.matmul(self._transpose(b), self._transpose(a)))
        assert isinstance(b, FixedTensor)
        weight, cells = _wide(b), a.cells
        extra = rounds(weight)
        if weight.ndim == 2:
            return SymbolicTensor(self.graph.dense(cells, weight.T, None, extra, b.off))
        shape = np.broadcast_shapes(cells.shape[:-2], weight.shape[:-2])
        rows = np.broadcast_to(cells, (*shape, *cells.shape[-2:]))[..., :, None, :]
        matrices = np.broadcast_to(weight, (*shape, *weight.shape[-2:]))
        factors: Floats = np.swapaxes(matrices, -1, -2)[..., None, :, :]
        full = np.broadcast_shapes(rows.shape, factors.shape)
        every, roundings = np.broadcast_to(rows, full), full[-1] + 1 + extra
        return SymbolicTensor(self.graph.sums(every, factors, roundings=roundings, inexact=b.off))

    def _transpose(self, a: Tensor) -> Tensor:
        return self.rearrange(lambda x: np.swapaxes(x, -1, -2), a)

    def linear(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        fixed_bias = bias is None or (isinstance(bias, FixedTensor) and len(bias.shape) == 1)
        fixed_matrix = isinstance(weight, FixedTensor) and len(weight.shape) == 2
        if isinstance(a, FixedTensor) or not fixed_matrix or not fixed_bias:
            product = self.matmul(a, weight)
            return product if bias is None else self.add(product, bias)
        assert isinstance(weight, FixedTensor)
        matrix = _wide(weight).T
        shift = np.broadcast_to(0.0 if bias is None else _numbers_of(bias), (len(matrix),))
        cells = self.graph.dense(a.cells, matrix, shift, rounds(matrix), weight.off)
        return SymbolicTensor(cells)

    def convolution(
        self, a: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, groups: int
    ) -> Tensor:
        if isinstance(a, FixedTensor) or isinstance(weight, SymbolicTensor) or a.shape[0] != 1:
            raise self.refuse("a convolution of a batch, or by kernels that depend on the input")
        if isinstance(bias, SymbolicTensor):
            raise self.refuse("a bias that depends on the input")
        kernels, offset = _wide(weight), None if bias is None else _wide(bias)
        image, extra = a.cells[0], rounds(kernels)
        cells = self.graph.convolution(image, kernels, offset, windows, groups, extra)
        return SymbolicTensor(cells[None])

    def pool(
        self, kind: Literal["max", "mean", "sum"], a: Tensor, size: Sequence[int], windows: Windows
    ) -> Tensor:
        cells = self._cells_of_input(a, "a pooling")
        elements = windows_of(cells, size, windows)
        elements = elements.reshape(*elements.shape[: cells.ndim], -1)
        if kind == "max":
            return SymbolicTensor(self.graph.largest(elements))
        scale = 1 / elements.shape[-1] if kind == "mean" else 1.0
        return SymbolicTensor(self.graph.total(elements, scale))

    def softmax(self, a: Tensor, axis: int) -> Tensor:
        cells = self._cells_of_input(a, "a softmax")
        shares = np.moveaxis(self.graph.softmax(np.moveaxis(cells, axis, -1)), -1, axis)
        self._note(shares, "softmax", cells, a.shape[axis])
        return SymbolicTensor(shares)

    def log_softmax(self, a: Tensor, axis: int) -> Tensor:
        """Return a log_softmax, which is supported only at the end, for properties of classes."""
        cells = self._cells_of_input(a, "a softmax")
        return self._only_inside("log_softmax", cells, a.shape[axis])

    def batch_norm(
        self,
        a: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
    ) -> Tensor:
        cells = np.swapaxes(self._cells_of_input(a, "a batch norm"), 0, 1)
        scale = np.ones(mean.shape) if weight is None else _numbers_of(weight)
        shift = np.zeros(mean.shape) if bias is None else _numbers_of(bias)
        statistics = _numbers_of(mean), _numbers_of(variance)
        y = self.graph.normalize(cells, scale, shift, *statistics, eps)
        return SymbolicTensor(np.swapaxes(y, 0, 1))

    def layer_norm(
        self, a: Tensor, axes: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        cells = self._cells_of_input(a, "a layer norm")
        cells = cells.reshape(*a.shape[: cells.ndim - axes], -1)
        scale, shift = [None if x is None else _numbers_of(x).reshape(-1) for x in (weight, bias)]
        return SymbolicTensor(self.graph.layer_norm(cells, scale, shift, eps).reshape(a.shape))

    def group_norm(
        self, a: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> Tensor:
        cells = self._cells_of_input(a, "a group norm")
        y = self.graph.layer_norm(cells.reshape(len(cells), groups, -1), None, None, eps)
        column = (-1, *[1] * (cells.ndim - 2))
        scale = 1.0 if weight is None else _numbers_of(weight).reshape(column)
        shift = 0.0 if bias is None else _numbers_of(bias).reshape(column)
        return SymbolicTensor(self.graph.affine(y.reshape(a.shape), scale, shift, roundings=4))

    def recurrent(self, kind: str, x: Tensor, weights: Sequence[Any]) -> list[Tensor]:
        """Return the output of each step of "gru", "lstm", "relu" or "tanh".

        The weights are those of PyTorch, for x of (positions, batch, features).
        """
        weight, own_weight = map(self._transpose, weights[:2])
        size, outputs = own_weight.shape[0], list[Tensor]()

        def part(tensor: Tensor, k: int) -> Tensor:
            return self.rearrange(lambda a: a[:, k * size : (k + 1) * size], tensor)

        # Other executions sum all of a gate at once.
        self.graph.more_roundings = weight.shape[0] + 2 * size + 8
        h: Tensor = FixedTensor(np.zeros((x.shape[1], size)))
        cell = h
        for at in range(x.shape[0]):
            now = self.linear(self.rearrange(lambda a, at=at: a[at], x), weight, weights[2])
            own = self.linear(h, own_weight, weights[3])
            gates = self.add(now, own)
            if kind == "gru":
                reset, update = (self.function("sigmoid", part(gates, k)) for k in (0, 1))
                rest = self.multiply(reset, part(own, 2))
                new = self.function("tanh", self.add(part(now, 2), rest))
                h = self.add(new, self.multiply(update, self.add(h, new, -1.0)))
            elif kind == "lstm":
                enter, forget, leave = (self.function("sigmoid", part(gates, k)) for k in (0, 1, 3))
                new = self.multiply(enter, self.function("tanh", part(gates, 2)))
                cell = self.add(self.multiply(forget, cell), new)
                h = self.multiply(leave, self.function("tanh", cell))
            elif kind == "relu":
                h = self.function(kind, gates)
            else:  # 2 sigmoid(2 z) - 1, as onnxruntime has an absolute error for this tanh
                h = self.function("sigmoid", self.multiply(gates, self.constant(2.0)))
                h = self.add(self.multiply(h, self.constant(2.0)), self.constant(-1.0))
            outputs.append(h)
        self.graph.more_roundings = 0
        return outputs

    # The origins of cells

    def lowered(self, output: Tensor, classes: bool) -> LoweredModel:
        """Return the network with this output; with `classes`, without a last softmax."""
        if isinstance(output, FixedTensor):
            raise self.refuse("an output that does not depend on the input")
        kind, logits, lengths = self._origin(output.cells)
        cells, dropped = output.cells, ""
        if classes and kind in ("softmax", "log_softmax") and (lengths == cells.size).all():
            cells, dropped = logits.reshape(cells.shape), kind
        shape = self.input.shape[1:]
        return LoweredModel(self.graph.network(cells), shape, cells.shape[1:], dropped)

    def _cells_of_input(self, a: Tensor, feature: str) -> Cells:
        """Return the cells of a tensor; a feature of fixed numbers is refused."""
        if isinstance(a, FixedTensor):
            raise self.refuse(f"{feature} of numbers that do not depend on the input")
        return a.cells

    def _sums_whole_rows(self, source: Cells, rows: Cells) -> bool:
        """Whether each sum is over all cells of its row, once each."""
        sums = source.reshape(-1, rows.shape[-1]).tolist()
        pairs = zip(sums, rows[..., 0].reshape(-1).tolist(), strict=True)
        return all(sorted(terms) == sorted(self._rows[row]) for terms, row in pairs)

    def _note(self, cells: Cells, kind: str, source: Cells, number: Numbers | Cells = 1.0) -> None:
        """Remember the kind of these cells, their sources, and a number for each."""
        numbers = np.broadcast_to(np.reshape(number, -1), (cells.size,))
        columns = cells.reshape(-1).tolist(), source.reshape(-1).tolist(), numbers.tolist()
        for cell, before, value in zip(*columns, strict=True):
            self._origins[cell] = (kind, before, value)

    def _origin(self, cells: Cells) -> Origin:
        origins = [self._origins.get(cell) for cell in cells.reshape(-1).tolist()]
        known = [origin for origin in origins if origin is not None]
        kinds = {kind for kind, _, _ in known}
        if len(kinds) != 1 or len(known) < len(origins):
            return Origin("", np.zeros(0, np.int64), np.zeros(0))
        source, numbers = zip(*[origin[1:] for origin in known], strict=True)
        return Origin(kinds.pop(), np.array(source, np.int64), np.array(numbers, np.float64))


def _wide(tensor: FixedTensor) -> Floats:
    return np.asarray(tensor.value, np.float64)


def _numbers_of(tensor: Tensor) -> Floats:
    """Return the numbers of a weight, which no input may change."""
    assert isinstance(tensor, FixedTensor)
    return _wide(tensor)


def _same_number(values: Floats) -> float:
    """Return the number that all of these are; NaN if they differ."""
    first = values.reshape(-1)[:1]
    return float(first[0]) if len(first) and bool((values == first[0]).all()) else nan


def _is_power_of_two(values: Floats) -> bool:
    """Whether no product with these numbers is rounded, unless it overflows or underflows."""
    return bool((np.abs(np.frexp(values)[0]) == 0.5).all())


def _add_fixed(a: FixedTensor, b: FixedTensor, scale: float) -> FixedTensor:
    """Return `a + scale * b`; cancellation makes the relative error larger."""
    first, second = _wide(a), scale * _wide(b)
    total = first + second
    size = np.abs(first) + np.abs(second)
    with np.errstate(all="ignore"):
        growth = np.where(size == 0, 1.0, size / np.abs(total))
    return FixedTensor(total, float(growth.max(initial=1.0)) * (a.off + b.off + 2.0**-23))


def _join_axes(cells: Cells, axes: Sequence[int]) -> Cells:
    """Join these axes to one, the last."""
    joined = [axis % cells.ndim for axis in axes]
    rest = [axis for axis in range(cells.ndim) if axis not in joined]
    return cells.transpose(*rest, *joined).reshape(*[cells.shape[axis] for axis in rest], -1)


def _restore_axes(cells: Cells, ndim: int, axes: Sequence[int], keep: bool) -> Cells:
    return np.expand_dims(cells, tuple([axis % ndim for axis in axes])) if keep else cells
