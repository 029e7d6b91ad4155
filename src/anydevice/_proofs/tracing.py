"""The network of a traced model: each primitive of a library becomes cells of a graph.

A tracer in `_libraries` runs a module once on a batch of one example, and calls a method of
`NetworkTrace` for each primitive. Primitives that together are one function, such as the parts of a
GELU or of a softmax, are recognised by the origin of their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from anydevice._core.protocols import (
    FixedTensor,
    Padding,
    SymbolicTensor,
    Trace,
    TracedTensor,
)
from anydevice._proofs.checking.network import Floats
from anydevice._proofs.evaluation import FUNCTIONS
from anydevice._proofs.graph import (
    NO_CELL,
    ROUNDED,
    Builder,
    Cells,
    LoweredModel,
    refused,
    rounds,
    scale_of_norm,
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


class NetworkTrace(Trace):
    """The network that a traced module computes, primitive by primitive."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.graph = Builder(prod(shape))
        self.input = SymbolicTensor(np.arange(prod(shape)).reshape(1, *shape))
        self._origins: dict[int, tuple[str, float, float]] = {}
        self._rows: list[tuple[int, ...]] = []
        self._next_pending = -10

    @property
    def path(self) -> str:
        return self.graph.path

    @path.setter
    def path(self, path: str) -> None:
        self.graph.path = path

    def refuse(self, feature: str) -> UnsupportedError:
        return refused(self.graph.path, feature)

    # Shapes

    def rearrange(self, change: Callable[..., Any], *tensors: TracedTensor) -> TracedTensor:
        fixed = [tensor for tensor in tensors if isinstance(tensor, FixedTensor)]
        if len(fixed) == len(tensors):
            off = max(tensor.off for tensor in fixed)
            return FixedTensor(change(*[tensor.value for tensor in fixed]), off)
        return SymbolicTensor(change(*[self.cells(tensor) for tensor in tensors]))

    def constant(self, number: float) -> FixedTensor:
        return _constant(number)

    def cells(self, tensor: TracedTensor) -> Cells:
        """Return the cells of a tensor; fixed numbers become cells too."""
        if isinstance(tensor, SymbolicTensor):
            return tensor.cells
        return self.graph.constant(_wide(tensor), tensor.off)

    def pad(self, a: TracedTensor, widths: Padding, fill: float) -> TracedTensor:
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

    def add(self, a: TracedTensor, b: TracedTensor, scale: float = 1.0) -> TracedTensor:
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
            a, b = self._scale(b, _constant(scale)), a
            plain, scale = True, 1.0
        assert isinstance(a, SymbolicTensor)
        assert isinstance(b, FixedTensor)
        off = b.off + (0.0 if plain else ROUNDED)
        return self._shift(a, scale * _wide(b), off, 0 if plain else 1)

    def _shift(self, a: SymbolicTensor, shift: Floats, off: float, extra: int) -> TracedTensor:
        """Return `a + shift`; `extra` roundings are those of the shift itself."""
        shape = np.broadcast_shapes(a.shape, shift.shape)
        if not shift.any() and shape == a.shape:
            return a
        kind, origin = self._origin(a)
        is_one = _same_number(shift) == 1.0
        if kind == "erf" and is_one:
            return self._only_inside("1 + erf", origin[:, 0].reshape(a.shape), 1.0)
        roundings = 1 + extra + int(rounds(shift))
        cells = np.broadcast_to(a.cells, shape)
        shifted = self.graph.shift(cells, shift, roundings=roundings, inexact=off)
        if kind == "tanh of a GELU" and is_one:
            self._note(shifted, "1 + tanh", origin)
        return SymbolicTensor(shifted)

    def _note_sum(self, total: Cells, a: SymbolicTensor, b: SymbolicTensor, scale: float) -> None:
        """Note a sum that is a part of a softmax or of a GELU."""
        first, second = np.broadcast_arrays(a.cells, b.cells)
        if scale == -1.0:
            kind, origin = self._origin(SymbolicTensor(second))
            if kind == "largest":
                rows = origin[:, 0].astype(np.int64).tolist()
                if all(x in self._rows[row] for x, row in zip(first.flat, rows, strict=True)):
                    self._note(total, "shifted", np.stack([first.reshape(-1), origin[:, 0]], -1))
        if scale == 1.0:
            for x, y in ((first, second), (second, first)):
                kind, origin = self._origin(SymbolicTensor(y))
                if kind != "scaled" or abs(_one(origin[:, 1]) - _GELU_CUBIC) > 1e-6:
                    continue
                inner = SymbolicTensor(origin[:, 0].astype(np.int64))
                kind, before = self._origin(inner)
                if kind == "cube" and np.array_equal(before[:, 0], x.reshape(-1)):
                    self._note(total, "cubic", before)

    def multiply(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
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

    def _match_activation(self, x: SymbolicTensor, gate: SymbolicTensor) -> TracedTensor | None:
        """Return SiLU or GELU if `x * gate` is a multiple of one."""
        kind, origin = self._origin(gate)
        if kind not in _GATES:
            return None
        source, factor = origin[:, 0].astype(np.int64), _one(origin[:, 1])
        scale = self._factor(x, source)
        if scale is None:
            return None
        name, doubled = _GATES[kind]
        activation = self.function(name, SymbolicTensor(source.reshape(gate.shape)))
        return self.multiply(activation, _constant(scale * factor * doubled))

    def _scale(self, a: SymbolicTensor, b: FixedTensor) -> TracedTensor:
        scale = _wide(b)
        shape = np.broadcast_shapes(a.shape, scale.shape)
        if (scale == 1).all() and shape == a.shape:
            return a
        a, factor = SymbolicTensor(np.broadcast_to(a.cells, shape)), _same_number(scale)
        kind, origin = self._origin(a)
        if kind == "1 + erf" and factor is not None:
            return self._only_inside(kind, origin[:, 0].reshape(shape), factor * _one(origin[:, 1]))
        extra = int(rounds(scale))
        exact = not extra and bool((np.abs(np.frexp(scale)[0]) == 0.5).all())
        mild = factor is not None and 1 / _MILD <= abs(factor) <= _MILD
        if exact and kind == "scaled" and mild and factor == 1 / _one(origin[:, 1]):
            return SymbolicTensor(origin[:, 0].astype(np.int64).reshape(shape))  # mostly in a GELU
        roundings = 0 if exact else 1 + extra
        cells = self.graph.affine(a.cells, scale, roundings=roundings, inexact=b.off)
        if factor is not None:
            self._note(cells, "scaled", _pair(a.cells, factor))
            if kind == "1 + tanh":
                self._note(cells, kind, origin * np.array([1.0, factor]))
            if kind == "cubic" and abs(factor - _GELU_SCALE) < 1e-6:
                self._note(cells, "tanh argument", origin)
        return SymbolicTensor(cells)

    def _multiples(self, tensor: SymbolicTensor) -> Iterator[tuple[Cells, float]]:
        """Yield the cells that a tensor is a multiple of, with the factor, itself first."""
        cells, factor = tensor.cells.reshape(-1), 1.0
        for _ in range(_MAX_SCALES):
            yield cells, factor
            kind, origin = self._origin(SymbolicTensor(cells))
            factor = factor * _one(origin[:, 1]) if kind == "scaled" else float("nan")
            if not abs(factor) <= _MILD:  # it might overflow on the way
                return
            cells = origin[:, 0].astype(np.int64)

    def _factor(self, tensor: TracedTensor, cells: Cells) -> float | None:
        """Return f if the tensor is f times these cells, else `None`."""
        if isinstance(tensor, FixedTensor):
            return None if _wide(tensor).any() else 0.0
        for base, factor in self._multiples(tensor):
            if np.array_equal(base, cells):
                return factor
        return None

    def divide(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
        """Return `a / b`, or the softmax that this quotient is."""
        if isinstance(b, FixedTensor):
            exact = bool((np.abs(np.frexp(_wide(b))[0]) == 0.5).all())
            return self.multiply(a, FixedTensor(1 / _wide(b), b.off + (0.0 if exact else ROUNDED)))
        shares = self._match_softmax(a, b)
        if shares is not None:
            return shares
        kind, origin = self._origin(b)
        if kind == "sqrt":
            root = SymbolicTensor(origin[:, 0].astype(np.int64).reshape(b.shape))
            return self.multiply(a, self.function("rsqrt", root))
        return self.multiply(a, self.function("reciprocal", b))

    def _match_softmax(self, a: TracedTensor, b: SymbolicTensor) -> TracedTensor | None:
        """Return a softmax if `a / b` is `exp(x - largest)` divided by its sum over the row."""
        if not isinstance(a, SymbolicTensor):
            return None
        kind, origin = self._origin(a)
        below, sums = self._origin(SymbolicTensor(np.broadcast_to(b.cells, a.shape)))
        matches = kind == "shifted exp" and below == "sum of exp"
        if not matches or not np.array_equal(origin[:, 1], sums[:, 0]):
            return None
        shares, lengths = np.zeros(a.cells.size, np.int64), np.zeros(a.cells.size)
        for row in np.unique(sums[:, 0]).astype(np.int64).tolist():
            cells = np.array(self._rows[row])
            by_cell = dict(zip(cells.tolist(), self.graph.softmax(cells).tolist(), strict=True))
            in_row = sums[:, 0] == row
            shares[in_row] = [by_cell[int(cell)] for cell in origin[in_row, 0]]
            lengths[in_row] = len(cells)
        self._note(shares, "softmax", np.stack([origin[:, 0], lengths], -1))
        return SymbolicTensor(shares.reshape(a.shape))

    def maximum(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
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
            if not low.any():
                above = self.function("relu", SymbolicTensor(cells))
                self._note(self.cells(above), "at least", _pair(cells, 0.0))
                return above
            limit = _same_number(low)
            if limit is not None:
                clipped = self.graph.clip(cells, limit, None)
                self._note(clipped, "at least", _pair(cells, limit))
                return SymbolicTensor(clipped)
        return SymbolicTensor(self.graph.maximum(*np.broadcast_arrays(a.cells, self.cells(b))))

    def minimum(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
        """Return the smaller of both; the minimum of a maximum is a clip."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(np.minimum(_wide(a), _wide(b)), max(a.off, b.off))
        if isinstance(b, SymbolicTensor):
            a, b = b, a
        assert isinstance(a, SymbolicTensor)
        high = _same_number(_wide(b)) if isinstance(b, FixedTensor) else None
        if high is not None:
            if np.isposinf(high):
                return a
            kind, origin = self._origin(a)
            if kind == "at least" and _one(origin[:, 1]) <= high:
                source = origin[:, 0].astype(np.int64).reshape(a.shape)
                return SymbolicTensor(self.graph.clip(source, _one(origin[:, 1]), high))
            return SymbolicTensor(self.graph.clip(a.cells, None, high))
        negatives = [self.graph.combine([(-1.0, cells)]) for cells in (a.cells, self.cells(b))]
        larger = self.graph.maximum(*np.broadcast_arrays(*negatives))
        return SymbolicTensor(self.graph.combine([(-1.0, larger)]))

    def clip(self, a: TracedTensor, low: float | None, high: float | None) -> TracedTensor:
        if isinstance(a, FixedTensor):
            return FixedTensor(np.clip(_wide(a), low, high), a.off)
        return SymbolicTensor(self.graph.clip(a.cells, low, high))

    def function(self, name: str, a: TracedTensor) -> TracedTensor:
        if name not in FUNCTIONS:
            raise self.refuse(name)
        if isinstance(a, FixedTensor):
            return FixedTensor(FUNCTIONS[name](_wide(a)), a.off * 4 + 2.0**-20)
        kind, origin = self._origin(a)
        cells = self.graph.function(a.cells, name)
        if name == "square":  # an execution rounds it
            cells = self.graph.affine(cells, roundings=1)
        if name == "exp" and kind == "shifted":
            self._note(cells, "shifted exp", origin)
        elif name == "tanh" and kind == "tanh argument":
            self._note(cells, "tanh of a GELU", origin)
        else:
            self._note(cells, name, _pair(a.cells, 1.0))
        return SymbolicTensor(cells)

    def log(self, a: TracedTensor) -> TracedTensor:
        """Return the logarithm of the sum in a log_softmax; no other is supported."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.log(_wide(a)), float("inf"))
        kind, origin = self._origin(a)
        if kind != "sum of exp":
            raise self.refuse("log but in a log_softmax at the end")
        return self._only_inside("log of sum", origin[:, 0].reshape(a.shape), 1.0)

    def _match_log_softmax(self, a: SymbolicTensor, b: SymbolicTensor) -> TracedTensor | None:
        """Return a log_softmax if `a - b` is `x - largest` minus the logarithm of the sum."""
        shape = np.broadcast_shapes(a.shape, b.shape)
        kind, origin = self._origin(a)
        below, sums = self._origin(SymbolicTensor(np.broadcast_to(b.cells, shape)))
        matches = kind == "shifted" and below == "log of sum"
        if not matches or not np.array_equal(origin[:, 1], sums[:, 0]):
            return None
        cells = origin[:, 0].reshape(shape)
        return self._only_inside("log_softmax", cells, len(self._rows[int(sums[0, 0])]))

    def cube(self, a: TracedTensor) -> TracedTensor:
        cube = self.multiply(self.function("square", a), a)
        if isinstance(a, SymbolicTensor):
            self._note(self.cells(cube), "cube", _pair(a.cells, 1.0))
        return cube

    def sqrt(self, a: TracedTensor) -> TracedTensor:
        """Return a square root, which is supported only as a divisor."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.sqrt(_wide(a)), a.off + 2.0**-22)
        return self._only_inside("sqrt", a.cells, 1.0)

    def erf(self, a: TracedTensor, complement: bool = False) -> TracedTensor:
        """Return the error function, which is supported only as a part of a GELU."""
        sign, name = (-1.0, "1 + erf") if complement else (1.0, "erf")
        if isinstance(a, SymbolicTensor):
            for cells, factor in self._multiples(a):
                if abs(factor - sign * _ROOT_HALF) < 1e-6:
                    return self._only_inside(name, cells.reshape(a.shape), 1.0)
        raise self.refuse("erf but in a GELU")

    def _only_inside(self, name: str, cells: Any, factor: float) -> TracedTensor:
        """Return a tensor without cells: only the pattern that it belongs to may use it.

        Its numbers are below `NO_CELL`, and `Builder.rows` refuses them.
        """
        shape = np.shape(cells)
        self._next_pending -= prod(shape)
        pending = self._next_pending + np.arange(prod(shape)).reshape(shape)
        self._note(pending, name, _pair(cells, factor))
        return SymbolicTensor(pending)

    def compare(self, a: TracedTensor, b: TracedTensor, greater: bool) -> TracedTensor:
        """Return `a > b` or `a < b` for `select`, where equality changes nothing."""
        if isinstance(a, FixedTensor) and isinstance(b, SymbolicTensor):
            return self.compare(b, a, not greater)
        limit = _same_number(_wide(b)) if isinstance(b, FixedTensor) else None
        if isinstance(a, SymbolicTensor) and limit is not None:
            return self._only_inside("above" if greater else "below", a.cells, limit)
        raise self.refuse("a comparison of two values that depend on the input")

    def select(self, where: TracedTensor, yes: TracedTensor, no: TracedTensor) -> TracedTensor:
        """Return `yes` or `no` by a comparison, if that is a leaky ReLU or a clip."""
        if isinstance(where, FixedTensor):
            return self._select_fixed(where.value, yes, no)
        kind, origin = self._origin(where)
        if kind == "above":
            return self._select_by_sign(origin, yes, no)
        if kind == "below":
            return self._select_by_sign(origin, no, yes)
        raise self.refuse("a choice by values that depend on the input")

    def _select_fixed(
        self, where: npt.NDArray[np.generic], yes: TracedTensor, no: TracedTensor
    ) -> TracedTensor:
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

    def _select_by_sign(
        self, origin: Any, above: TracedTensor, below: TracedTensor
    ) -> TracedTensor:
        """Return `above` where the compared cells exceed the limit, else `below`."""
        cells, limit = origin[:, 0].astype(np.int64), _one(origin[:, 1])
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
            return self.maximum(SymbolicTensor(cells.reshape(shape)), _constant(limit))
        if is_limit[0] and slopes[1] == 1.0:
            return self.minimum(SymbolicTensor(cells.reshape(shape)), _constant(limit))
        if is_limit[0] and isinstance(below, SymbolicTensor):
            kind, before = self._origin(below)
            if kind == "at least" and np.array_equal(before[:, 0], origin[:, 0]):
                return self.minimum(below, _constant(limit))
        raise self.refuse("a choice by values that depend on the input")

    def absolute(self, a: TracedTensor) -> TracedTensor:
        if isinstance(a, FixedTensor):
            return FixedTensor(np.abs(_wide(a)), a.off)
        return SymbolicTensor(self.graph.absolute(a.cells))

    def leaky_relu(self, a: TracedTensor, slope: float) -> TracedTensor:
        if isinstance(a, FixedTensor):
            return FixedTensor(np.where(_wide(a) > 0, _wide(a), slope * _wide(a)), a.off + 2.0**-23)
        return SymbolicTensor(self.graph.leaky_relu(a.cells, slope))

    # Sums and products

    def sum(
        self, a: TracedTensor, axes: Sequence[int], keep: bool, mean: bool = False
    ) -> TracedTensor:
        """Return the sum or the mean over some axes."""
        if isinstance(a, FixedTensor):
            value = np.sum(_wide(a), tuple(axes), keepdims=keep)
            count = _wide(a).size / max(value.size, 1)
            return FixedTensor(value / count if mean else value, a.off + 2.0**-20)
        cells = _join_axes(a.cells, axes)
        total = self.graph.mean(cells) if mean else self.graph.total(cells)
        kind, origin = self._origin(SymbolicTensor(cells))
        if kind == "shifted exp" and not mean:
            rows = origin[:, 1].reshape(*total.shape, -1)
            if (rows == rows[..., :1]).all() and self._sums_whole_rows(origin, rows):
                self._note(total, "sum of exp", _pair(rows[..., 0], 1.0))
        return SymbolicTensor(_restore_axes(total, a.cells.ndim, axes, keep))

    def largest(self, a: TracedTensor, axes: Sequence[int], keep: bool) -> TracedTensor:
        """Return the maximum over some axes."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.max(_wide(a), tuple(axes), keepdims=keep), a.off)
        cells = _join_axes(a.cells, axes)
        largest = self.graph.largest(cells)
        if cells.shape[-1] > 1:
            first = len(self._rows)
            self._rows += [tuple(row) for row in cells.reshape(-1, cells.shape[-1]).tolist()]
            rows = np.arange(first, len(self._rows)).reshape(largest.shape)
            self._note(largest, "largest", _pair(rows, 1.0))
        return SymbolicTensor(_restore_axes(largest, a.cells.ndim, axes, keep))

    def matmul(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
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
        extra = int(rounds(weight))
        if weight.ndim == 2:
            return SymbolicTensor(self.graph.dense(cells, weight.T, None, extra, b.off))
        shape = np.broadcast_shapes(cells.shape[:-2], weight.shape[:-2])
        rows = np.broadcast_to(cells, (*shape, *cells.shape[-2:]))[..., :, None, :]
        matrices = np.broadcast_to(weight, (*shape, *weight.shape[-2:]))
        factors: Floats = np.swapaxes(matrices, -1, -2)[..., None, :, :]
        full = np.broadcast_shapes(rows.shape, factors.shape)
        product = self.graph.rows(
            np.broadcast_to(rows, full).reshape(-1, full[-1]),
            np.broadcast_to(factors, full).reshape(-1, full[-1]),
            roundings=full[-1] + 1 + extra,
            inexact=b.off,
        )
        return SymbolicTensor(product.reshape(full[:-1]))

    def _transpose(self, a: TracedTensor) -> TracedTensor:
        return self.rearrange(lambda x: np.swapaxes(x, -1, -2), a)

    def linear(
        self, a: TracedTensor, weight: TracedTensor, bias: TracedTensor | None
    ) -> TracedTensor:
        fixed_bias = bias is None or (isinstance(bias, FixedTensor) and len(bias.shape) == 1)
        fixed_matrix = isinstance(weight, FixedTensor) and len(weight.shape) == 2
        if isinstance(a, FixedTensor) or not fixed_matrix or not fixed_bias:
            product = self.matmul(a, weight)
            return product if bias is None else self.add(product, bias)
        assert isinstance(weight, FixedTensor)
        matrix = _wide(weight).T
        shift = np.broadcast_to(0.0 if bias is None else _numbers_of(bias), (len(matrix),))
        cells = self.graph.dense(a.cells, matrix, shift, int(rounds(matrix)), weight.off)
        return SymbolicTensor(cells)

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
        if not isinstance(a, SymbolicTensor) or not isinstance(weight, FixedTensor):
            raise self.refuse("a convolution by kernels that depend on the input")
        if isinstance(bias, SymbolicTensor):
            raise self.refuse("a bias that depends on the input")
        kernels = _wide(weight)
        cells = self.graph.convolution(
            a.cells[0],
            kernels,
            None if bias is None else _wide(bias),
            tuple(stride),
            tuple(padding),
            tuple(dilation),
            groups,
            int(rounds(kernels)),
        )
        return SymbolicTensor(cells[None])

    def pool(
        self,
        kind: Literal["max", "mean", "sum"],
        a: TracedTensor,
        size: Sequence[int],
        stride: Sequence[int],
        padding: Padding,
        dilation: Sequence[int] | None = None,
    ) -> TracedTensor:
        if isinstance(a, FixedTensor):
            raise self.refuse("a pooling of numbers that do not depend on the input")
        widths = [(0, 0)] * (a.cells.ndim - len(size)) + list(padding)
        cells = np.pad(a.cells, widths, constant_values=NO_CELL)
        spread = None if dilation is None else tuple(dilation)
        windows = windows_of(cells, tuple(size), tuple(stride), spread)
        windows = windows.reshape(*windows.shape[: a.cells.ndim], -1)
        if kind == "max":
            return SymbolicTensor(self.graph.largest(windows))
        return SymbolicTensor(
            self.graph.mean(windows) if kind == "mean" else self.graph.total(windows)
        )

    def softmax(self, a: TracedTensor, axis: int) -> TracedTensor:
        if isinstance(a, FixedTensor):
            raise self.refuse("a softmax of numbers that do not depend on the input")
        shares = np.moveaxis(self.graph.softmax(np.moveaxis(a.cells, axis, -1)), -1, axis)
        self._note(shares, "softmax", _pair(a.cells, a.shape[axis]))
        return SymbolicTensor(shares)

    def log_softmax(self, a: TracedTensor, axis: int) -> TracedTensor:
        """Return a log_softmax, which is supported only at the end, for properties of classes."""
        if isinstance(a, FixedTensor):
            raise self.refuse("a softmax of numbers that do not depend on the input")
        return self._only_inside("log_softmax", a.cells, a.shape[axis])

    def batch_norm(
        self,
        a: TracedTensor,
        weight: TracedTensor | None,
        bias: TracedTensor | None,
        mean: TracedTensor,
        variance: TracedTensor,
        eps: float,
    ) -> TracedTensor:
        if not isinstance(a, SymbolicTensor):
            raise self.refuse("a batch norm of numbers that do not depend on the input")
        size = mean.shape[0]
        over = (-1, *[1] * (a.cells.ndim - 2))
        scale = scale_of_norm(
            np.ones(size) if weight is None else _numbers_of(weight), _numbers_of(variance), eps
        )
        shift = np.zeros(size) if bias is None else _numbers_of(bias)
        cells = self.graph.normalize(
            a.cells, scale.reshape(over), _numbers_of(mean).reshape(over), shift.reshape(over)
        )
        return SymbolicTensor(cells)

    def layer_norm(
        self,
        a: TracedTensor,
        axes: int,
        weight: TracedTensor | None,
        bias: TracedTensor | None,
        eps: float,
    ) -> TracedTensor:
        if not isinstance(a, SymbolicTensor):
            raise self.refuse("a layer norm of fixed numbers")
        cells = a.cells.reshape(*a.shape[: a.cells.ndim - axes], -1)
        scale, shift = [None if x is None else _numbers_of(x).reshape(-1) for x in (weight, bias)]
        return SymbolicTensor(self.graph.layer_norm(cells, scale, shift, eps).reshape(a.shape))

    # The origins of cells

    def lowered(self, output: TracedTensor, classes: bool) -> LoweredModel:
        """Return the network with this output; with `classes`, without a last softmax."""
        if isinstance(output, FixedTensor):
            raise self.refuse("an output that does not depend on the input")
        name, origin = self._origin(output)
        cells, dropped = output.cells, ""
        if classes and name in ("softmax", "log_softmax") and (origin[:, 1] == cells.size).all():
            dropped = name
            cells = origin[:, 0].astype(np.int64).reshape(cells.shape)
        shape = self.input.shape[1:]
        return LoweredModel(self.graph.network(cells), shape, cells.shape[1:], dropped)

    def _sums_whole_rows(self, origin: Any, rows: Any) -> bool:
        """Whether each sum is over all cells of its row, once each."""
        cells = origin[:, 0].reshape(rows.shape).reshape(-1, rows.shape[-1])
        numbers = rows[..., 0].reshape(-1).astype(np.int64).tolist()
        pairs = zip(cells.astype(np.int64).tolist(), numbers, strict=True)
        return all(sorted(terms) == sorted(self._rows[row]) for terms, row in pairs)

    def _note(self, cells: Cells, kind: str, origin: Any) -> None:
        """Remember the kind of these cells, and two numbers for each."""
        pairs = zip(cells.reshape(-1).tolist(), origin.tolist(), strict=True)
        self._origins.update({cell: (kind, *numbers) for cell, numbers in pairs})

    def _origin(self, tensor: SymbolicTensor) -> tuple[str, Any]:
        """Return the kind of all cells of a tensor and the two numbers of each; "" if mixed."""
        origins = [self._origins.get(cell) for cell in tensor.cells.reshape(-1).tolist()]
        if not origins or origins[0] is None:
            return "", None
        kind = origins[0][0]
        if any(origin is None or origin[0] != kind for origin in origins):
            return "", None
        return kind, np.array([origin[1:] for origin in origins if origin is not None], np.float64)


def _constant(number: float) -> FixedTensor:
    return FixedTensor(np.array(number, np.float64))


def _wide(tensor: FixedTensor) -> Floats:
    return np.asarray(tensor.value, np.float64)


def _numbers_of(tensor: TracedTensor) -> Floats:
    """Return the numbers of a weight, which no input may change."""
    assert isinstance(tensor, FixedTensor)
    return _wide(tensor)


def _same_number(values: Floats) -> float | None:
    """Return the number that all of these are; `None` if they differ."""
    first = values.reshape(-1)[:1]
    return float(first[0]) if len(first) and bool((values == first[0]).all()) else None


def _pair(cells: Any, number: float) -> npt.NDArray[np.float64]:
    """Return each cell with a number beside it."""
    flat = np.asarray(cells, np.float64).reshape(-1)
    return np.stack([flat, np.full(flat.shape, number)], -1)


def _one(numbers: Any) -> float:
    """Return the number that they all are; NaN if they differ."""
    return float(numbers[0]) if (numbers == numbers[0]).all() else float("nan")


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
