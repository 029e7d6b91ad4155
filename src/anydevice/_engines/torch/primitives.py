"""The primitives on PyTorch, eager or traced by `torch.compile` without a break in the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anydevice._core.dtypes import DType
from anydevice._core.primitives import Primitives, Shape
from anydevice._engines.host import known_dtype, lacking
from anydevice._engines.primitives import Axes, BasePrimitives, functions_of
from anydevice._engines.torch.arrays import KNOWN, NATIVE

_PLAIN = (Tensor, torch.nn.Parameter)
# By name and not by row: names are constants to the compiler.
_THEIRS = {row.name: theirs for row, theirs in NATIVE.items()}


def _two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return the primitive of two arrays, or of an array and a number."""
    return lambda a, b: function(*_pair(a, b))


def _two_arrays(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return the same where PyTorch's function takes arrays only: a number becomes one."""

    def call(a: Tensor, b: Tensor) -> Any:
        if not isinstance(b, Tensor):
            return function(a, a.new_full((), b))
        return function(a if isinstance(a, Tensor) else b.new_full((), a), b)

    return call


class TorchPrimitives(
    BasePrimitives[Tensor], one=functions_of(torch), two=functions_of(torch, _two_arrays)
):
    """Every primitive over `Tensor`."""

    def full(self, shape: Shape, value: float, dtype: DType, like: Tensor) -> Tensor:
        return torch.full(shape, value, dtype=_theirs(dtype), device=like.device)

    def arange(self, stop: int, dtype: DType, like: Tensor) -> Tensor:
        return torch.arange(stop, dtype=_theirs(dtype), device=like.device)

    def asarray(self, values: Any, like: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which cannot ask an array of NumPy for its dtype
            return torch.as_tensor(values, device=like.device)
        if values.dtype.kind == "V":  # of ml_dtypes, which PyTorch does not read; float32 holds it
            kind = _theirs(known_dtype(values.dtype))
            return torch.tensor(values.astype(np.float32), dtype=kind, device=like.device)
        return torch.tensor(values, device=like.device)

    def dtype(self, x: Tensor) -> DType:
        row = KNOWN.get(x.dtype)
        return known_dtype(x.dtype) if row is None else row

    def astype(self, x: Tensor, dtype: DType) -> Tensor:
        return x.to(_theirs(dtype))

    reshape = staticmethod(torch.reshape)
    broadcast_to = staticmethod(torch.broadcast_to)

    def permute_dims(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return torch.permute(x, tuple(axes))

    def concat(self, arrays: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(tuple(arrays), axis)

    def sign(self, x: Tensor) -> Tensor:
        # PyTorch's sign of NaN is 0.
        signs = torch.sign(x)
        return torch.where(torch.isnan(x), x, signs) if x.dtype.is_floating_point else signs

    add = staticmethod(_two(operator.add))
    subtract = staticmethod(_two(operator.sub))
    multiply = staticmethod(_two(operator.mul))
    divide = staticmethod(_two(operator.truediv))
    pow = staticmethod(_two(torch.pow))
    equal = staticmethod(_two(operator.eq))
    less = staticmethod(_two(operator.lt))
    less_equal = staticmethod(_two(operator.le))

    def where(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, *_pair(a, b))

    def sum(self, x: Tensor, axis: Axes, keepdims: bool = False) -> Tensor:
        kind = x.dtype
        if axis == ():  # to PyTorch, no axes are all of them
            return x.to(torch.int32) if kind == torch.bool else x
        if kind.is_floating_point:
            return torch.sum(x, axis, keepdims)
        # A sum of booleans is a count, and PyTorch would give any other as int64.
        kind = torch.int32 if kind == torch.bool else kind
        return torch.sum(x, axis, keepdims, dtype=kind)

    def max(self, x: Tensor, axis: Axes, keepdims: bool = False) -> Tensor:
        return x if axis == () else torch.amax(x, axis, keepdim=keepdims)

    def min(self, x: Tensor, axis: Axes, keepdims: bool = False) -> Tensor:
        return x if axis == () else torch.amin(x, axis, keepdim=keepdims)

    def argmax(self, x: Tensor, axis: int) -> Tensor:
        return torch.argmax(sortable(x), axis).to(torch.int32)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        largest, places = torch.topk(sortable(x), k)
        return largest.to(x.dtype), places.to(torch.int32)

    matmul = staticmethod(torch.matmul)

    _take_along_axis = staticmethod(torch.take_along_dim)

    def _take(self, x: Tensor, safe: Tensor, axis: int) -> Tensor:
        shape = (*x.shape[:axis], *safe.shape, *x.shape[axis + 1 :])
        return torch.index_select(x, axis, safe.reshape(-1)).reshape(shape)

    def _clamp(self, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
        # An index out of range would end a process on CUDA.
        wide = indices.to(torch.int64)
        safe = wide.clamp(0, size - 1)
        return safe == wide, safe

    def write(self, x: Tensor, new: Tensor, positions: Tensor) -> Tensor:
        if not (x.numel() and new.numel()):
            return x
        in_place = not (x.requires_grad or 0 in x.stride())
        if in_place and is_eager_on_cpu(x, new, positions):
            starts = _starts(positions.tolist(), x.shape[2])
            if starts is not None:
                for row, start in enumerate(starts):
                    x[row, :, start : start + new.shape[2]] = new[row]
                return x
        inside, target = self._clamp(positions, x.shape[2])
        if new.shape[2] > 1:
            # A row out of range must not change another: it repeats the write of the first row of
            # its sequence that is in range.
            some = inside.any(1, keepdim=True)
            order = torch.arange(new.shape[2], device=new.device)
            first = inside.to(torch.uint8).argmax(1, keepdim=True)
            source = torch.where(inside, order, first)
            target = torch.gather(target, 1, source)
            new = torch.gather(new, 2, _over_rows(source, new))
            inside = some.expand(inside.shape)
        target = _over_rows(target, new)
        rows = torch.where(_over_rows(inside, new), new, torch.gather(x, 2, target))
        # Autograd may still need the old values.
        return (x.scatter_ if in_place else x.scatter)(2, target, rows)


def _theirs(dtype: DType) -> torch.dtype:
    native = _THEIRS.get(dtype.name)
    if native is None:
        raise lacking("PyTorch", dtype)
    return native


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands; a Python number keeps the other operand's dtype."""
    if not isinstance(b, Tensor):
        return a, _number(b, a)
    if not isinstance(a, Tensor):
        return _number(a, b), b
    return a, b


def _number(value: Any, beside: Tensor) -> Any:
    if beside.dtype.is_floating_point or beside.dtype.is_complex:
        return int(value) if type(value) is bool else value  # it subtracts no booleans
    return bool(value) if beside.dtype == torch.bool else int(value)


def sortable(x: Tensor) -> Tensor:
    """Return the array in a dtype that PyTorch can sort."""
    return x.to(torch.uint8) if x.dtype == torch.bool else x


def is_eager(*tensors: Tensor) -> bool:
    """Whether these tensors are neither traced nor wrapped, so that they have addresses."""
    return not torch.compiler.is_compiling() and all(map(is_plain, tensors))


def is_plain(x: Tensor) -> bool:
    """Whether a tensor has memory of its own: no subclass, no transformation under way."""
    return type(x) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_eager_on_cpu(*tensors: Tensor) -> bool:
    """Whether reading these tensors is cheap: on the CPU, neither traced nor wrapped."""
    return all(x.is_cpu for x in tensors) and is_eager(*tensors)


def _starts(positions: list[list[int]], keys: int) -> list[int] | None:
    """Return the first position of each row if positions are consecutive and in range."""
    starts = [row[0] for row in positions]
    count = len(positions[0])
    follow = count == 1 or all(row == list(range(row[0], row[0] + count)) for row in positions)
    return starts if follow and min(starts) >= 0 and max(starts) + count <= keys else None


def _over_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return a flag for each row, (batch, tokens), broadcast to each of its numbers."""
    return x[:, None, :, None].expand(rows.shape)


PRIMITIVES = TorchPrimitives()
_CONFORMS: Primitives = PRIMITIVES
