"""Arithmetic on what a model of another library computes: cells of a graph, or fixed numbers.

PyTorch and JAX say which primitives a module runs; each of these is one of the methods here.
A batch of one example goes through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from anydevice._libraries.base import ModelAdapter
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
    windows_of,
)
from anydevice.errors import UnsupportedError

_ROOT_HALF = float(np.sqrt(0.5))
_GELU_SCALE, _GELU_CUBIC = float(np.sqrt(2 / np.pi)), 0.044715
_GATES = {"sigmoid": ("silu", 1.0), "1 + erf": ("gelu", 2.0), "1 + tanh": ("gelu_tanh", 2.0)}
"""Activations that are `x` times one of these, and how many times."""
_MILD = 4.0
"""Scales up to this one, and down to its reciprocal, neither overflow nor lose a number."""
_MOST_SCALES = 4
"""Scalings that are followed back in search of an activation."""


class FixedTensor(NamedTuple):
    """Numbers that do not depend on the input; `off` bounds their relative error."""

    value: Any
    off: float = 0.0


class SymbolicTensor(NamedTuple):
    """Numbers that depend on the input: cells of the graph, in the shape of a batch of one."""

    cells: Cells


Value = FixedTensor | SymbolicTensor


class Trace:
    """What a module computes, primitive by primitive."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.graph = Builder(prod(shape))
        self.input = SymbolicTensor(np.arange(prod(shape)).reshape(1, *shape))
        self._origins: dict[int, tuple[str, float, float]] = {}
        self._rows: list[tuple[int, ...]] = []
        self._pendings = -10

    def refuse(self, what: str) -> UnsupportedError:
        """The error for a primitive that proofs do not take."""
        return refused(self.graph.path, what)

    # Shapes

    def moved(self, change: Callable[..., Any], *values: Value) -> Value:
        """A change of shapes alone: `change` gets arrays, and puts their elements elsewhere."""
        if all(isinstance(value, FixedTensor) for value in values):
            off = max(value.off for value in values if isinstance(value, FixedTensor))
            return FixedTensor(change(*[value.value for value in values]), off)  # type: ignore[union-attr]
        return SymbolicTensor(change(*[self.cells(value) for value in values]))

    def cells(self, value: Value) -> Cells:
        """The cells of a value; fixed numbers become cells too."""
        if isinstance(value, SymbolicTensor):
            return value.cells
        return self.graph.constant(np.asarray(value.value, np.float64), value.off)

    def padded(self, value: Value, widths: Sequence[tuple[int, int]], fill: float) -> Value:
        """Zeros around; other numbers become cells."""
        if isinstance(value, FixedTensor):
            return FixedTensor(np.pad(value.value, widths, constant_values=fill), value.off)
        made = np.pad(value.cells, widths, constant_values=NO_CELL)
        if np.isneginf(fill):  # of a maximum, which leaves out what is no cell
            return SymbolicTensor(made)
        if fill:
            made = np.where(made == NO_CELL, self.graph.constant(np.full((1,), fill))[0], made)
        return SymbolicTensor(self._without_gaps(made))

    def _without_gaps(self, cells: Cells) -> Cells:
        if not (cells == NO_CELL).any():
            return cells
        return np.where(cells == NO_CELL, self.graph.constant(np.zeros(1))[0], cells)

    # Arithmetic

    def add(self, a: Value, b: Value, scale: float = 1.0) -> Value:
        """`a + scale * b`; what belongs to a GELU or a softmax is noted."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return _fixed_sum(a, b, scale)
        plain = scale in (1.0, -1.0)
        if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
            logarithms = self._log_shares(a, b) if scale == -1.0 else None
            if logarithms is not None:
                return logarithms
            parts, inexact = [(1.0, a.cells), (scale, b.cells)], 0.0 if plain else ROUNDED
            made = self.graph.combined(parts, roundings=1 if plain else 3, inexact=inexact)
            self._note_sum(made, a, b, scale)
            return SymbolicTensor(made)
        if isinstance(b, SymbolicTensor):
            a, b = self._scaled(b, FixedTensor(np.float64(scale))), a
            plain, scale = True, 1.0
        assert isinstance(a, SymbolicTensor)
        assert isinstance(b, FixedTensor)
        return self._shifted(a, scale * _wide(b), _off(b, scale), 0 if plain else 1)

    def _shifted(self, a: SymbolicTensor, shift: Floats, off: float, extra: int) -> Value:
        shape = np.broadcast_shapes(a.cells.shape, shift.shape)
        if not shift.any() and shape == a.cells.shape:
            return a
        kind, given = self._origin(a)
        one = _same_number(shift) == 1.0
        if kind == "erf" and one:
            return self._only_inside("1 + erf", given[:, 0].reshape(a.cells.shape), 1.0)
        roundings = 1 + extra + int(rounds(shift))
        cells = np.broadcast_to(a.cells, shape)
        made = self.graph.shifted(cells, shift, roundings=roundings, inexact=off)
        if kind == "tanh of a GELU" and one:
            self._note(made, "1 + tanh", given)
        return SymbolicTensor(made)

    def _note_sum(self, made: Cells, a: SymbolicTensor, b: SymbolicTensor, scale: float) -> None:
        first, second = np.broadcast_arrays(a.cells, b.cells)
        if scale == -1.0:
            kind, given = self._origin(SymbolicTensor(second))
            if kind == "largest":
                rows = given[:, 0].astype(np.int64).tolist()
                if all(x in self._rows[row] for x, row in zip(first.flat, rows, strict=True)):
                    self._note(made, "shifted", np.stack([first.reshape(-1), given[:, 0]], -1))
        if scale == 1.0:
            for x, y in ((first, second), (second, first)):
                kind, given = self._origin(SymbolicTensor(y))
                if kind != "scaled" or abs(_one(given[:, 1]) - _GELU_CUBIC) > 1e-6:
                    continue
                inner = SymbolicTensor(given[:, 0].astype(np.int64))
                kind, before = self._origin(inner)
                if kind == "cube" and np.array_equal(before[:, 0], x.reshape(-1)):
                    self._note(made, "cubic", before)

    def multiply(self, a: Value, b: Value) -> Value:
        """`a * b`; what is `x * sigmoid(x)` or a GELU is found."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(_wide(a) * _wide(b), a.off + b.off + 2.0**-23)
        if isinstance(b, FixedTensor):
            a, b = b, a
        assert isinstance(b, SymbolicTensor)
        if isinstance(a, FixedTensor):
            return self._scaled(b, a)
        for x, gate in ((a, b), (b, a)):
            found = self._gated(x, gate)
            if found is not None:
                return found
        return SymbolicTensor(self.graph.product(a.cells, b.cells))

    def _gated(self, x: SymbolicTensor, gate: SymbolicTensor) -> Value | None:
        """An activation that is a product of its argument, or a multiple of it."""
        kind, given = self._origin(gate)
        if kind not in _GATES or given is None:
            return None
        source, factor = given[:, 0].astype(np.int64), _one(given[:, 1])
        scale = self._times(x, source)
        if scale is None:
            return None
        name, doubled = _GATES[kind]
        made = self.function(name, SymbolicTensor(source.reshape(gate.cells.shape)))
        return self.multiply(made, FixedTensor(np.float64(scale * factor * doubled)))

    def _scaled(self, a: SymbolicTensor, b: FixedTensor) -> Value:
        scale = _wide(b)
        shape = np.broadcast_shapes(a.cells.shape, scale.shape)
        if (scale == 1).all() and shape == a.cells.shape:
            return a
        a, factor = SymbolicTensor(np.broadcast_to(a.cells, shape)), _same_number(scale)
        kind, given = self._origin(a)
        if kind == "1 + erf" and factor is not None:
            return self._only_inside(kind, given[:, 0].reshape(shape), factor * _one(given[:, 1]))
        extra = int(rounds(scale))
        exact = not extra and bool((np.abs(np.frexp(scale)[0]) == 0.5).all())
        known = exact and kind == "scaled" and factor is not None and _is_mild(factor)
        if known and factor == 1 / _one(given[:, 1]):
            return SymbolicTensor(given[:, 0].astype(np.int64).reshape(shape))  # of a GELU, mostly
        cells = self.graph.affine(
            a.cells, scale, roundings=0 if exact else 1 + extra, inexact=_off(b)
        )
        if factor is not None:
            self._note(cells, "scaled", _with(a.cells, factor))
            if kind == "1 + tanh":
                self._note(cells, kind, given * np.array([1.0, factor]))
            if kind == "cubic" and abs(factor - _GELU_SCALE) < 1e-6:
                self._note(cells, "tanh argument", given)
        return SymbolicTensor(cells)

    def _multiples(self, value: SymbolicTensor) -> Iterator[tuple[Cells, float]]:
        """What a value is a multiple of, and how many times: itself, and what was scaled."""
        cells, factor = value.cells.reshape(-1), 1.0
        for _ in range(_MOST_SCALES):
            yield cells, factor
            kind, given = self._origin(SymbolicTensor(cells))
            factor = factor * _one(given[:, 1]) if kind == "scaled" else float("nan")
            if not abs(factor) <= _MILD:  # it might overflow on the way
                return
            cells = given[:, 0].astype(np.int64)

    def _times(self, value: SymbolicTensor, cells: Cells) -> float | None:
        """How many times these cells a value is; `None` if it is no multiple of them."""
        found = [factor for base, factor in self._multiples(value) if np.array_equal(base, cells)]
        return found[0] if found else None

    def divide(self, a: Value, b: Value) -> Value:
        """`a / b`; what is a softmax is found."""
        if isinstance(b, FixedTensor):
            exact = bool((np.abs(np.frexp(_wide(b))[0]) == 0.5).all())
            return self.multiply(a, FixedTensor(1 / _wide(b), b.off + (0.0 if exact else ROUNDED)))
        found = self._share(a, b)
        if found is not None:
            return found
        kind, given = self._origin(b)
        if kind == "sqrt":
            root = SymbolicTensor(given[:, 0].astype(np.int64).reshape(b.cells.shape))
            return self.multiply(a, self.function("rsqrt", root))
        return self.multiply(a, self.function("reciprocal", b))

    def _share(self, a: Value, b: SymbolicTensor) -> Value | None:
        """A softmax: `exp(x - largest)` divided by its sum over the same row."""
        if not isinstance(a, SymbolicTensor):
            return None
        kind, given = self._origin(a)
        below, sums = self._origin(SymbolicTensor(np.broadcast_to(b.cells, a.cells.shape)))
        if kind != "shifted exp" or below != "sum of exp":
            return None
        if not np.array_equal(given[:, 1], sums[:, 0]):
            return None
        made, lengths = np.zeros(a.cells.size, np.int64), np.zeros(a.cells.size)
        for row in np.unique(sums[:, 0]).astype(np.int64).tolist():
            cells = np.array(self._rows[row])
            shares = dict(zip(cells.tolist(), self.graph.softmax(cells).tolist(), strict=True))
            mine = sums[:, 0] == row
            made[mine] = [shares[int(cell)] for cell in given[mine, 0]]
            lengths[mine] = len(cells)
        self._note(made, "softmax", np.stack([given[:, 0], lengths], -1))
        return SymbolicTensor(made.reshape(a.cells.shape))

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger of both."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(np.maximum(_wide(a), _wide(b)), max(a.off, b.off))
        if isinstance(b, SymbolicTensor):
            a, b = b, a
        assert isinstance(a, SymbolicTensor)
        if isinstance(b, FixedTensor):
            low = _wide(b)
            cells = np.broadcast_to(a.cells, np.broadcast_shapes(a.cells.shape, low.shape))
            if np.isneginf(low).all():
                return SymbolicTensor(cells)
            if not low.any():
                made = self.function("relu", SymbolicTensor(cells))
                self._note(self.cells(made), "at least", _with(cells, 0.0))
                return made
            least = _same_number(low)
            if least is not None:
                above = self.graph.clip(cells, least, None)
                self._note(above, "at least", _with(cells, least))
                return SymbolicTensor(above)
        return SymbolicTensor(self.graph.maximum(*np.broadcast_arrays(a.cells, self.cells(b))))

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller of both; together with a maximum it is a clip."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(np.minimum(_wide(a), _wide(b)), max(a.off, b.off))
        if isinstance(b, SymbolicTensor):
            a, b = b, a
        assert isinstance(a, SymbolicTensor)
        high = _same_number(_wide(b)) if isinstance(b, FixedTensor) else None
        if high is not None:
            if np.isposinf(high):
                return a
            kind, given = self._origin(a)
            if kind == "at least" and _one(given[:, 1]) <= high:
                source = given[:, 0].astype(np.int64).reshape(a.cells.shape)
                return SymbolicTensor(self.graph.clip(source, _one(given[:, 1]), high))
            return SymbolicTensor(self.graph.clip(a.cells, None, high))
        turned = [self.graph.combined([(-1.0, each)]) for each in (a.cells, self.cells(b))]
        larger = self.graph.maximum(*np.broadcast_arrays(*turned))
        return SymbolicTensor(self.graph.combined([(-1.0, larger)]))

    def clip(self, a: Value, low: float | None, high: float | None) -> Value:
        """Limited from both sides, or one."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.clip(_wide(a), low, high), a.off)
        return SymbolicTensor(self.graph.clip(a.cells, low, high))

    def function(self, name: str, a: Value) -> Value:
        """A function of each element, under the name that networks have for it."""
        if name not in FUNCTIONS:
            raise self.refuse(name)
        if isinstance(a, FixedTensor):
            return FixedTensor(FUNCTIONS[name](_wide(a)), a.off * 4 + 2.0**-20)
        kind, given = self._origin(a)
        made = self.graph.function(a.cells, name)
        if name == "square":  # an execution rounds it
            made = self.graph.affine(made, roundings=1)
        if name == "exp" and kind == "shifted":
            self._note(made, "shifted exp", given)
        elif name == "tanh" and kind == "tanh argument":
            self._note(made, "tanh of a GELU", given)
        else:
            self._note(made, name, _with(a.cells, 1.0))
        return SymbolicTensor(made)

    def log(self, a: Value) -> Value:
        """Only of the sum in a log_softmax."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.log(_wide(a)), float("inf"))
        kind, given = self._origin(a)
        if kind != "sum of exp":
            raise self.refuse("log but in a log_softmax at the end")
        return self._only_inside("log of sum", given[:, 0].reshape(a.cells.shape), 1.0)

    def _log_shares(self, a: SymbolicTensor, b: SymbolicTensor) -> Value | None:
        """A log_softmax: `x - largest` minus the logarithm of the sum over the same row."""
        shape = np.broadcast_shapes(a.cells.shape, b.cells.shape)
        kind, given = self._origin(a)
        below, sums = self._origin(SymbolicTensor(np.broadcast_to(b.cells, shape)))
        if (
            kind != "shifted"
            or below != "log of sum"
            or not np.array_equal(given[:, 1], sums[:, 0])
        ):
            return None
        cells = given[:, 0].reshape(shape)
        return self._only_inside("log_softmax", cells, len(self._rows[int(sums[0, 0])]))

    def cube(self, a: Value) -> Value:
        """`x * x * x`."""
        made = self.multiply(self.function("square", a), a)
        if isinstance(a, SymbolicTensor):
            self._note(self.cells(made), "cube", _with(a.cells, 1.0))
        return made

    def sqrt(self, a: Value) -> Value:
        """Only as a divisor."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.sqrt(_wide(a)), a.off + 2.0**-22)
        return self._only_inside("sqrt", a.cells, 1.0)

    def erf(self, a: Value, complement: bool = False) -> Value:
        """The error function, only as a part of a GELU."""
        sign, name = (-1.0, "1 + erf") if complement else (1.0, "erf")
        if isinstance(a, SymbolicTensor):
            for cells, factor in self._multiples(a):
                if abs(factor - sign * _ROOT_HALF) < 1e-6:
                    return self._only_inside(name, cells.reshape(a.cells.shape), 1.0)
        raise self.refuse("erf but in a GELU")

    def _only_inside(self, name: str, cells: Any, factor: float) -> Value:
        """What is no cell: whoever uses it otherwise than it is meant is refused."""
        made = self._pending(np.shape(cells))
        self._note(made, name, _with(cells, factor))
        return SymbolicTensor(made)

    def _pending(self, shape: tuple[int, ...]) -> Cells:
        self._pendings -= prod(shape)
        return self._pendings + np.arange(prod(shape)).reshape(shape)

    def compared(self, a: Value, b: Value, greater: bool) -> Value:
        """`a > b` or `a < b`, only to choose by it; whether they may be equal changes nothing."""
        if isinstance(a, FixedTensor) and isinstance(b, SymbolicTensor):
            return self.compared(b, a, not greater)
        limit = _same_number(_wide(b)) if isinstance(b, FixedTensor) else None
        if isinstance(a, SymbolicTensor) and limit is not None:
            return self._only_inside("above" if greater else "below", a.cells, limit)
        raise self.refuse("a comparison of two values that depend on the input")

    def chosen(self, where: Value, yes: Value, no: Value) -> Value:
        """One of two by a comparison, where that is a leaky ReLU or a clip."""
        if isinstance(where, FixedTensor):
            decided = {bool(each) for each in np.asarray(where.value).flat}
            if len(decided) == 1:
                taken, shape = yes if True in decided else no, np.shape(where.value)
                return self.moved(
                    lambda x: np.broadcast_to(x, np.broadcast_shapes(x.shape, shape)), taken
                )
            if isinstance(yes, FixedTensor) and isinstance(no, FixedTensor):
                return FixedTensor(np.where(where.value, yes.value, no.value), max(yes.off, no.off))
            both = np.broadcast_arrays(where.value, self.cells(yes), self.cells(no))
            return SymbolicTensor(np.where(*both))
        kind, given = self._origin(where)
        if kind == "below":
            kind, yes, no = "above", no, yes
            return self._chosen(given, yes, no)
        if kind == "above":
            return self._chosen(given, yes, no)
        raise self.refuse("a choice by values that depend on the input")

    def _chosen(self, given: Any, above: Value, below: Value) -> Value:
        cells, limit = given[:, 0].astype(np.int64), _one(given[:, 1])
        slopes = [self._slope(value, cells) for value in (above, below)]
        shape = np.broadcast_shapes(
            *[
                x.cells.shape if isinstance(x, SymbolicTensor) else np.shape(x.value)
                for x in (above, below)
            ]
        )
        if limit == 0 and None not in slopes:
            scale = [float(slope or 0.0) for slope in slopes]
            bent = self.graph.function(cells, "relu")
            parts = [(scale[1], cells), (scale[0] - scale[1], bent)]
            made = self.graph.combined(parts, roundings=3, inexact=ROUNDED)
            return SymbolicTensor(made.reshape(shape))
        fixed = [
            isinstance(x, FixedTensor) and bool((_wide(x) == limit).all()) for x in (above, below)
        ]
        own = [slope == 1.0 for slope in slopes]
        if fixed[1] and own[0]:
            return self.maximum(
                SymbolicTensor(cells.reshape(shape)), FixedTensor(np.float64(limit))
            )
        if fixed[0] and own[1]:
            return self.minimum(
                SymbolicTensor(cells.reshape(shape)), FixedTensor(np.float64(limit))
            )
        if fixed[0] and isinstance(below, SymbolicTensor):
            kind, before = self._origin(below)
            if kind == "at least" and np.array_equal(before[:, 0], given[:, 0]):
                return self.minimum(below, FixedTensor(np.float64(limit)))
        raise self.refuse("a choice by values that depend on the input")

    def _slope(self, value: Value, cells: Cells) -> float | None:
        """How many times these cells a value is; `None` if it is no multiple of them."""
        if isinstance(value, FixedTensor):
            return 0.0 if not _wide(value).any() else None
        return self._times(value, cells)

    def absolute(self, a: Value) -> Value:
        """The magnitude of each element."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.abs(_wide(a)), a.off)
        return SymbolicTensor(self.graph.absolute(a.cells))

    def leaky_relu(self, a: Value, slope: float) -> Value:
        """`slope * x` below 0."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.where(_wide(a) > 0, _wide(a), slope * _wide(a)), a.off + 2.0**-23)
        return SymbolicTensor(self.graph.leaky_relu(a.cells, slope))

    # Sums and products

    def total(self, a: Value, axes: Sequence[int], keep: bool, mean: bool = False) -> Value:
        """The sum, or the mean, over some axes."""
        if isinstance(a, FixedTensor):
            value = np.sum(_wide(a), tuple(axes), keepdims=keep)
            count = _wide(a).size / max(value.size, 1)
            return FixedTensor(value / count if mean else value, a.off + 2.0**-20)
        cells = _last(a.cells, axes)
        made = self.graph.mean(cells) if mean else self.graph.total(cells)
        kind, given = self._origin(SymbolicTensor(cells))
        if kind == "shifted exp" and not mean:
            by_sum = given[:, 1].reshape(*made.shape, -1)
            if (by_sum == by_sum[..., :1]).all() and self._are_rows(given, by_sum):
                self._note(made, "sum of exp", _with(by_sum[..., 0], 1.0))
        return SymbolicTensor(_kept(made, a.cells.ndim, axes, keep))

    def largest(self, a: Value, axes: Sequence[int], keep: bool) -> Value:
        """The maximum over some axes."""
        if isinstance(a, FixedTensor):
            return FixedTensor(np.max(_wide(a), tuple(axes), keepdims=keep), a.off)
        cells = _last(a.cells, axes)
        made = self.graph.largest(cells)
        if cells.shape[-1] > 1:
            first = len(self._rows)
            self._rows += [tuple(row) for row in cells.reshape(-1, cells.shape[-1]).tolist()]
            rows = np.arange(first, len(self._rows)).reshape(made.shape)
            self._note(made, "largest", _with(rows, 1.0))
        return SymbolicTensor(_kept(made, a.cells.ndim, axes, keep))

    def matmul(self, a: Value, b: Value) -> Value:
        """`a @ b`, with the shapes of NumPy."""
        if isinstance(a, FixedTensor) and isinstance(b, FixedTensor):
            return FixedTensor(_wide(a) @ _wide(b), a.off + b.off + 2.0**-18)
        if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
            turned = np.swapaxes(b.cells, -1, -2)
            return SymbolicTensor(self.graph.dot(a.cells[..., :, None, :], turned[..., None, :, :]))
        if isinstance(a, FixedTensor):
            flipped: Value = _transposed(self.matmul(_transposed(b), _transposed(a)))
            return flipped
        assert isinstance(b, FixedTensor)
        weight = _wide(b)
        extra = int(rounds(weight))
        cells = a.cells
        if weight.ndim == 2:
            return SymbolicTensor(self.graph.dense(cells, weight.T, None, extra, _off(b)))
        shape = np.broadcast_shapes(cells.shape[:-2], weight.shape[:-2])
        rows = np.broadcast_to(cells, (*shape, *cells.shape[-2:]))[..., :, None, :]
        spread = np.broadcast_to(weight, (*shape, *weight.shape[-2:]))
        columns: Floats = np.swapaxes(spread, -1, -2)[..., None, :, :]
        full = np.broadcast_shapes(rows.shape, columns.shape)
        taken = np.broadcast_to(rows, full).reshape(-1, full[-1])
        factors = np.broadcast_to(columns, full).reshape(-1, full[-1])
        made = self.graph.rows(taken, factors, roundings=full[-1] + 1 + extra, inexact=_off(b))
        return SymbolicTensor(made.reshape(full[:-1]))

    def convolution(
        self,
        a: Value,
        weight: Value,
        bias: Value | None,
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int,
    ) -> Value:
        """Of (1, channels, …) by kernels (outputs, channels / groups, …)."""
        if not isinstance(a, SymbolicTensor) or not isinstance(weight, FixedTensor):
            raise self.refuse("a convolution by kernels that depend on the input")
        if isinstance(bias, SymbolicTensor):
            raise self.refuse("a bias that depends on the input")
        kernels = _wide(weight)
        made = self.graph.convolution(
            a.cells[0],
            kernels,
            None if bias is None else _wide(bias),
            tuple(stride),
            tuple(padding),
            tuple(dilation),
            groups,
            int(rounds(kernels)),
        )
        return SymbolicTensor(made[None])

    def windows(
        self,
        a: Value,
        size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int] | None = None,
    ) -> Cells:
        """The windows over the last axes, elements along the last axis; padding is `NO_CELL`."""
        if isinstance(a, FixedTensor):
            raise self.refuse("a pooling of numbers that do not depend on the input")
        around = [(0, 0)] * (a.cells.ndim - len(size)) + list(padding)
        padded = np.pad(a.cells, around, constant_values=NO_CELL)
        spread = None if dilation is None else tuple(dilation)
        found = windows_of(padded, tuple(size), tuple(stride), spread)
        return found.reshape(*found.shape[: a.cells.ndim], -1)

    def softmax(self, a: Value, axis: int) -> Value:
        """Over one axis."""
        if isinstance(a, FixedTensor):
            raise self.refuse("a softmax of numbers that do not depend on the input")
        made = self.graph.softmax(np.moveaxis(a.cells, axis, -1))
        result = np.moveaxis(made, -1, axis)
        self._note(result, "softmax", _with(a.cells, a.cells.shape[axis]))
        return SymbolicTensor(result)

    def log_softmax(self, a: Value, axis: int) -> Value:
        """Only at the end of a model, where it is left out for properties about classes."""
        if isinstance(a, FixedTensor):
            raise self.refuse("a softmax of numbers that do not depend on the input")
        return self._only_inside("log_softmax", a.cells, a.cells.shape[axis])

    # What is known of values that were made

    def result(self, value: Value, classes: bool) -> LoweredModel:
        """The network whose output this is."""
        if isinstance(value, FixedTensor):
            raise self.refuse("an output that does not depend on the input")
        name, given = self._origin(value)
        cells, dropped = value.cells, ""
        if classes and name in ("softmax", "log_softmax") and (given[:, 1] == cells.size).all():
            dropped = name
            cells = given[:, 0].astype(np.int64).reshape(cells.shape)
        shape = self.input.cells.shape[1:]
        return LoweredModel(self.graph.network(cells), shape, cells.shape[1:], dropped)

    def _are_rows(self, given: Any, by_sum: Any) -> bool:
        """Whether each sum is over all cells of its row, once each."""
        cells = given[:, 0].reshape(by_sum.shape).reshape(-1, by_sum.shape[-1])
        rows = by_sum[..., 0].reshape(-1).astype(np.int64).tolist()
        pairs = zip(cells.astype(np.int64).tolist(), rows, strict=True)
        return all(sorted(own) == sorted(self._rows[row]) for own, row in pairs)

    def _note(self, cells: Cells, kind: str, given: Any) -> None:
        """Remember where cells come from: two numbers of each."""
        pairs = zip(cells.reshape(-1).tolist(), given.tolist(), strict=True)
        self._origins.update({cell: (kind, *both) for cell, both in pairs})

    def _origin(self, value: SymbolicTensor) -> tuple[str, Any]:
        """What all cells of a value are, and the two numbers of each; "" if they differ."""
        cells = value.cells.reshape(-1).tolist()
        found = [self._origins.get(cell) for cell in cells]
        if not found or found[0] is None:
            return "", None
        kind = found[0][0]
        if any(each is None or each[0] != kind for each in found):
            return "", None
        return kind, np.array([each[1:] for each in found if each is not None], np.float64)


def one_call(
    adapter: ModelAdapter, shape: tuple[int, ...], call: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """The module as a function of a batch of one, also where it takes an example by itself."""

    def batch(x: Any) -> Any:
        return adapter.call(adapter.arguments, x) if call is None else call(x)

    def single(x: Any) -> Any:
        return batch(x[0])[None]

    if adapter.kind != "equinox.Module":
        return batch
    jax: Any = sys.modules["jax"]
    dtype = adapter.arguments[0].dtype if adapter.arguments else np.float32
    try:
        jax.eval_shape(single, jax.ShapeDtypeStruct((1, *shape), dtype))
    except Exception:  # whatever a module raises for an input that it does not take
        return batch
    return single


def _wide(value: FixedTensor) -> Floats:
    return np.asarray(value.value, np.float64)


def _off(value: FixedTensor, scale: float = 1.0) -> float:
    return value.off + (0.0 if scale in (1.0, -1.0) else ROUNDED)


def _same_number(values: Floats) -> float | None:
    """The number that all of these are; `None` if they differ."""
    first = values.reshape(-1)[:1]
    return float(first[0]) if len(first) and bool((values == first[0]).all()) else None


def _with(cells: Any, number: float) -> Any:
    """Cells, and a number beside each."""
    flat = np.asarray(cells, np.float64).reshape(-1)
    return np.stack([flat, np.full(flat.shape, number)], -1)


def _one(numbers: Any) -> float:
    """The number that they all are; NaN if they differ."""
    return float(numbers[0]) if (numbers == numbers[0]).all() else float("nan")


def _is_mild(factor: float) -> bool:
    return 1 / _MILD <= abs(factor) <= _MILD


def _fixed_sum(a: FixedTensor, b: FixedTensor, scale: float) -> FixedTensor:
    """A sum of fixed numbers; what cancels makes the relative error larger."""
    first, second = _wide(a), scale * _wide(b)
    made = first + second
    size = np.abs(first) + np.abs(second)
    with np.errstate(all="ignore"):
        growth = np.where(size == 0, 1.0, size / np.abs(made))
    return FixedTensor(made, float(growth.max(initial=1.0)) * (a.off + b.off + 2.0**-23))


def _transposed(value: Value) -> Any:
    if isinstance(value, FixedTensor):
        return FixedTensor(np.swapaxes(_wide(value), -1, -2), value.off)
    return SymbolicTensor(np.swapaxes(value.cells, -1, -2))


def _last(cells: Cells, axes: Sequence[int]) -> Cells:
    """These axes as one, the last."""
    chosen = [axis % cells.ndim for axis in axes]
    rest = [axis for axis in range(cells.ndim) if axis not in chosen]
    return cells.transpose(*rest, *chosen).reshape(*[cells.shape[axis] for axis in rest], -1)


def _kept(made: Cells, ndim: int, axes: Sequence[int], keep: bool) -> Cells:
    if not keep:
        return made
    return np.expand_dims(made, tuple([axis % ndim for axis in axes]))
