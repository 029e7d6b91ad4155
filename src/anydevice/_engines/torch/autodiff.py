"""Gradients on PyTorch: its own tape, around functions that may be compiled or checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Any

import torch
from torch import Tensor

from anydevice._core.engine import Absent
from anydevice._core.primitives import Autodiff
from anydevice._core.trees import leaf_paths, leaves, refilled
from anydevice._engines.base import refuse_non_scalar
from anydevice._engines.torch.recompute import recompute

_under_way = local()


class TorchAutodiff:
    """Reverse mode by `torch.autograd.grad`."""

    compiles = False

    def value_and_grad(
        self, function: Callable[..., Tensor], *, more: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        @wraps(function)
        def with_gradient(first: Any, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
            arrays = leaves(first)
            if not all(map(_has_gradient, arrays)):
                raise _no_gradient(first)
            # The gradient of an outer function passes through this one, so its graph is kept.
            depth = getattr(_under_way, "depth", 0)
            _under_way.depth = depth + 1
            try:
                with torch.enable_grad():
                    inputs = [
                        x.view_as(x) if depth and x.requires_grad else x.detach().requires_grad_()
                        for x in arrays
                    ]
                    result = function(refilled(first, inputs), *others, **named)
                    value = result[0] if more else result
                    gradients = _gradients(value, inputs, depth)
            finally:
                _under_way.depth = depth
            if not depth:
                value = value.detach()
                result = (value, [x.detach() for x in result[1]]) if more else value
            return result, refilled(first, gradients)

        return with_gradient

    def stop_gradient(self, x: Tensor) -> Tensor:
        return x.detach()

    def checkpoint(self, function: Callable[..., Tensor]) -> Callable[..., Any]:
        @wraps(function)
        def run_again(*arguments: Any, **named: Any) -> Any:
            return recompute(function, *arguments, **named)

        return run_again

    def together(self, tree: Any) -> Any:
        return tree


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point


def _no_gradient(tree: Any) -> Exception:
    pairs = zip(leaf_paths(tree), leaves(tree), strict=True)
    path, leaf = next(pair for pair in pairs if not _has_gradient(pair[1]))
    kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
    return Absent(
        f"{path or 'the first argument'} is of type {kind}, which has no gradient",
        instead="pass it as another argument",
    ).error()


def _gradients(value: Any, inputs: list[Tensor], depth: int) -> list[Tensor]:
    refuse_non_scalar(value, isinstance(value, Tensor))
    if not inputs:
        return []
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in inputs]
    gradients = torch.autograd.grad(value, inputs, create_graph=depth > 0, materialize_grads=True)
    return list(gradients)


AUTODIFF: Autodiff = TorchAutodiff()
