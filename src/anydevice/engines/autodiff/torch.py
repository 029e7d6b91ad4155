"""Gradients on PyTorch: its own tape, around functions that may be compiled or checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Any

import optree
import torch
from torch.utils.checkpoint import checkpoint

from anydevice.core.engine import Absent
from anydevice.core.primitives import Autodiff
from anydevice.engines.autodiff.scalars import refuse_all_but_one_number

_under_way = local()


class TorchAutodiff:
    """Reverse mode by `torch.autograd.grad`."""

    compiles = False

    def value_and_grad(self, function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        @wraps(function)
        def with_gradient(first: Any, *others: Any, **named: Any) -> tuple[Any, Any]:
            paths, leaves, structure = optree.tree_flatten_with_path(first)
            for path, leaf in zip(paths, leaves, strict=True):
                _refuse_constant(path, leaf)
            # Inside of another gradient, this one is part of what that one passes through.
            depth = getattr(_under_way, "depth", 0)
            _under_way.depth = depth + 1
            try:
                with torch.enable_grad():
                    inputs = [_input(leaf, depth) for leaf in leaves]
                    value = function(optree.tree_unflatten(structure, inputs), *others, **named)
                    gradients = _gradients(value, inputs, depth)
            finally:
                _under_way.depth = depth
            tree = optree.tree_unflatten(structure, gradients)
            return (value if depth else value.detach()), tree

        return with_gradient

    def stop_gradient(self, x: Any) -> Any:
        return x.detach()

    def checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run_again(*arguments: Any, **named: Any) -> Any:
            return checkpoint(function, *arguments, use_reentrant=False, **named)

        return run_again


def _refuse_constant(path: tuple[Any, ...], leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
        where = "".join(f"[{key!r}]" for key in path) or "the first argument"
        kind = leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        raise Absent(
            f"there is no gradient by {where}, which is of type {kind}",
            instead="give what has no gradient as another argument",
        ).error()


def _input(leaf: torch.Tensor, depth: int) -> torch.Tensor:
    """The tensor as one that gradients are taken by, and nobody else's."""
    return leaf.view_as(leaf) if depth and leaf.requires_grad else leaf.detach().requires_grad_()


def _gradients(value: Any, inputs: list[torch.Tensor], depth: int) -> list[torch.Tensor]:
    refuse_all_but_one_number(value, isinstance(value, torch.Tensor))
    if not inputs:
        return []
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in inputs]
    found = torch.autograd.grad(value, inputs, create_graph=depth > 0, materialize_grads=True)
    return list(found)


AUTODIFF: Autodiff = TorchAutodiff()
