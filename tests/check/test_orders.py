"""A right result is right in every draw, whatever the order and the way of computing it.

Engines add, multiply and scale in orders of their own, and may take tiny numbers for zero on the
way. Each function here is such a way: it must be right for every seed, or a run of `verify` would
now and then find a fault where there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydevice import _ops as ops
from anydevice._check import checks as trials
from anydevice._check.cases.case import SMALLEST_NORMAL
from anydevice._check.cases.drawn import Space, draw_cases
from anydevice._check.cases.table import TABLE
from anydevice._core.device import Device
from anydevice._core.record import replace
from anydevice._machine.engines import registry

Array = Any
ORDERS = ("forwards", "backwards", "shuffled", "large first", "small first")
USUAL = ORDERS[:3]
"""Orders of engines; none sorts, which would bring equal numbers together."""
BLOCK = 1024


def flushed(x: Array) -> Array:
    """The numbers with zeros for those that are too small to have all their digits."""
    return np.where(np.abs(x) < SMALLEST_NORMAL[x.dtype.name], x.dtype.type(0), x)


class Way:
    """Computes in one dtype and one order, and flushes all that comes out."""

    def __init__(self, order: str) -> None:
        self.order = order

    def wide(self, x: Array) -> Array:
        return x if x.dtype == np.float64 else x.astype(np.float32)

    def arranged(self, x: Array) -> Array:
        if self.order == "forwards":
            return x
        if self.order == "backwards":
            return x[..., ::-1]
        if self.order == "shuffled":
            return x[..., np.random.default_rng(x.shape[-1]).permutation(x.shape[-1])]
        sizes = np.argsort(np.abs(x), axis=-1)
        sizes = sizes if self.order == "small first" else sizes[..., ::-1]
        return np.take_along_axis(x, sizes, -1)

    def fold(self, join: Any, x: Array, start: float) -> Array:
        """Join the last axis element by element in each block, then block by block."""
        parts = np.full(x.shape[:-1], start, x.dtype)
        for at in range(0, x.shape[-1], BLOCK):
            block = self.arranged(x)[..., at : at + BLOCK]
            part = np.full(x.shape[:-1], start, x.dtype)
            for place in range(block.shape[-1]):
                part = flushed(join(part, block[..., place]))
            parts = flushed(join(parts, part))
        return parts

    def rows(self, x: Array, axis: Any) -> tuple[Array, tuple[int, ...]]:
        """The array with all reduced axes as its last one, and the shape with sizes of 1."""
        axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        some = sorted(one % x.ndim for one in axes)
        others = [at for at in range(x.ndim) if at not in some]
        shape = tuple(1 if at in some else size for at, size in enumerate(x.shape))
        kept = [x.shape[at] for at in others]
        count = int(np.prod([x.shape[at] for at in some]))
        return self.wide(np.transpose(x, others + some).reshape(*kept, count)), shape

    def reduced(self, result: Array, shape: tuple[int, ...], x: Array, keepdims: bool) -> Array:
        return np.asarray(result.reshape(shape) if keepdims else result).astype(x.dtype)

    def sum(self, x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        rows, shape = self.rows(x, axis)
        return self.reduced(self.fold(np.add, rows, 0), shape, x, keepdims)

    def mean(self, x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        rows, shape = self.rows(x, axis)
        total = self.fold(np.add, rows, 0) / rows.dtype.type(rows.shape[-1])
        return self.reduced(total, shape, x, keepdims)

    def prod(self, x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        rows, shape = self.rows(x, axis)
        return self.reduced(self.fold(np.multiply, rows, 1), shape, x, keepdims)

    def _var(self, x: Array, axis: Any, correction: float) -> tuple[Array, Any]:
        rows, shape = self.rows(x, axis)
        count = rows.dtype.type(rows.shape[-1])
        off = rows - (self.fold(np.add, rows, 0) / count)[..., None]
        squares = self.fold(np.add, flushed(off * off), 0)
        return squares / rows.dtype.type(max(rows.shape[-1] - correction, 0)), shape

    def var(
        self, x: Array, axis: Any = None, correction: float = 0.0, keepdims: bool = False
    ) -> Array:
        result, shape = self._var(x, axis, correction)
        return self.reduced(result, shape, x, keepdims)

    def std(
        self, x: Array, axis: Any = None, correction: float = 0.0, keepdims: bool = False
    ) -> Array:
        result, shape = self._var(x, axis, correction)
        return self.reduced(np.sqrt(result), shape, x, keepdims)

    def vector_norm(
        self, x: Array, axis: Any = None, keepdims: bool = False, ord: float = 2  # noqa: A002
    ) -> Array:  # fmt: skip
        rows, shape = self.rows(np.abs(x), axis)
        if ord in (0, np.inf, -np.inf):
            return ops.vector_norm(x, axis=axis, keepdims=keepdims, ord=ord)
        powers = rows
        for _ in range(int(ord) - 1):
            powers = flushed(powers * rows)
        total = self.fold(np.add, powers, 0) ** rows.dtype.type(1 / ord)
        return self.reduced(total.astype(rows.dtype), shape, x, keepdims)

    def _powers(self, x: Array, axis: Any) -> tuple[Array, Array, Array, Any]:
        rows, shape = self.rows(x, axis)
        most = rows.max(-1, initial=-np.inf)
        most = np.where(np.isinf(most) & (most < 0), 0, most).astype(rows.dtype)
        lower = rows - most[..., None]
        return lower, self.fold(np.add, flushed(np.exp(lower)), 0), most, shape

    def logsumexp(self, x: Array, axis: Any = None, keepdims: bool = False) -> Array:
        rows, shape = self.rows(x, axis)
        most = rows.max(-1, initial=-np.inf)
        middle = np.where(np.isfinite(most), most, 0).astype(rows.dtype)
        total = np.log(self.fold(np.add, flushed(np.exp(rows - middle[..., None])), 0)) + middle
        return self.reduced(total, shape, x, keepdims)

    def _back(self, rows: Array, x: Array, axis: int) -> Array:
        shape = [size for at, size in enumerate(x.shape) if at != axis % x.ndim]
        return np.moveaxis(rows.reshape(*shape, x.shape[axis]), -1, axis).astype(x.dtype)

    def softmax(self, x: Array, axis: int = -1) -> Array:
        if not x.size:
            return x
        rows = self.rows(x, axis)[0]
        powers = flushed(np.exp(rows - rows.max(-1, keepdims=True)))
        inverse = 1 / self.fold(np.add, powers, 0)[..., None]
        return self._back(flushed(powers * inverse), x, axis)

    def log_softmax(self, x: Array, axis: int = -1) -> Array:
        if not x.size:
            return x
        rows = self.rows(x, axis)[0]
        lower = rows - rows.max(-1, keepdims=True)
        total = np.log(self.fold(np.add, flushed(np.exp(lower)), 0))
        return self._back(lower - total[..., None], x, axis)

    def cumulative_sum(self, x: Array, axis: int = -1, include_initial: bool = False) -> Array:
        rows = self.wide(np.moveaxis(x, axis, -1))
        sums = np.zeros((*rows.shape[:-1], rows.shape[-1] + 1), rows.dtype)
        for at in range(0, rows.shape[-1], 32):  # a scan of blocks
            block = np.cumsum(rows[..., at : at + 32], -1, dtype=rows.dtype)
            sums[..., at + 1 : at + 33] = sums[..., at, None] + block
        return np.moveaxis(sums[..., 0 if include_initial else 1 :], -1, axis).astype(x.dtype)

    def matmul(self, x: Array, y: Array) -> Array:
        a, b = (self.wide(one) for one in (x, y))
        terms = flushed(a[..., :, None, :] * np.swapaxes(b, -1, -2)[..., None, :, :])
        return self.fold(np.add, terms, 0).astype(x.dtype)

    def rmsnorm(self, x: Array, weight: Array, eps: float = 1e-6) -> Array:
        rows = self.wide(x)
        squares = self.fold(np.add, flushed(rows * rows), 0) / rows.dtype.type(x.shape[-1])
        inverse = 1 / np.sqrt(squares + rows.dtype.type(eps))
        return (rows * inverse[..., None] * self.wide(weight)).astype(x.dtype)

    def layernorm(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float = 1e-5
    ) -> Array:
        rows = self.wide(x)
        count = rows.dtype.type(x.shape[-1])
        off = rows - (self.fold(np.add, rows, 0) / count)[..., None]
        squares = self.fold(np.add, flushed(off * off), 0) / count
        result = off * (1 / np.sqrt(squares + rows.dtype.type(eps)))[..., None]
        result = result if weight is None else result * self.wide(weight)
        return (result if bias is None else result + self.wide(bias)).astype(x.dtype)

    def mean_squared_error(self, x: Array, y: Array) -> Array:
        off = (self.wide(x) - self.wide(y)).reshape(-1)
        total = self.fold(np.add, flushed(off * off), 0) / off.dtype.type(off.size)
        return np.asarray(total, off.dtype)


NAMES = [name for name in vars(Way) if name in TABLE]


def check(op: str, seeds: range, count: int) -> None:
    engine, row = registry.load("numpy"), TABLE[op]
    for seed in seeds:
        for dtype in (one for one in row.dtypes if one in SMALLEST_NORMAL):
            for number, case in enumerate(draw_cases(row, dtype, seed, count)):
                trial = trials.prepare(row, case, dtype)
                if op == "matmul" and sum(x.size for x in trial.call.arrays()) > 20000:
                    continue  # all its products at once take too much memory
                one = (seed + number) % len(USUAL)
                for order in ORDERS if op == "prod" else USUAL[one : one + 1]:
                    function = np.errstate(all="ignore")(getattr(Way(order), op))
                    other = replace(trial, row=replace(row, function=function))
                    wrong = trials.run(other, engine, Device("cpu"))
                    assert wrong is None, f"{dtype} {order} seed {seed} {case.name}: {wrong}"


@pytest.mark.parametrize("op", NAMES)
def test_no_order_of_computing_is_wrong(op: str) -> None:
    check(op, range(2), 8)


@pytest.mark.soak
@pytest.mark.parametrize("op", NAMES)
def test_no_order_of_computing_is_wrong_for_any_seed(op: str) -> None:
    check(op, range(60), 12)


def test_no_power_of_a_drawn_number_underflows() -> None:
    """The root of the sum of such powers would be 0 on engines that take tiny numbers for zero."""
    for seed in range(20):
        x = Space("vector_norm", "float32", seed).normal(2**17, spread=1e-4)
        assert (np.abs(x.astype(float)) ** 4).min() > SMALLEST_NORMAL["float32"]
