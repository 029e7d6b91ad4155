"""Gradients on MLX."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

from anydevice._core.primitives import Autodiff
from anydevice._core.trees import leaves, refilled
from anydevice._engines.base import refuse_non_scalar
from anydevice._engines.mlx.primitives import under_way


class MlxAutodiff:
    """MLX's transformations; a `None` has the gradient `None`, and MLX refuses integers."""

    compiles = True
    stop_gradient = staticmethod(mx.stop_gradient)

    def value_and_grad(
        self, function: Callable[..., mx.array], *, more: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        @wraps(function)
        def run(first: Any, *others: Any, **named: Any) -> tuple[mx.array, mx.array]:
            # MLX takes no tree that holds anything but arrays.
            def value_of(arrays: list[mx.array]) -> Any:
                result = function(refilled(first, arrays), *others, **named)
                value = result[0] if more else result
                refuse_non_scalar(value, isinstance(value, mx.array))
                return result

            depth = getattr(under_way, "gradients", 0)
            under_way.gradients = depth + 1
            try:
                value, gradients = mx.value_and_grad(value_of)(leaves(first))
            finally:
                under_way.gradients = depth
            return value, refilled(first, gradients)

        return run

    def checkpoint(self, function: Callable[..., mx.array]) -> Callable[..., Any]:
        again = mx.checkpoint(function)

        @wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            return again(*arguments, **named)

        return run

    def together(self, tree: Any) -> Any:
        """See the protocol. MLX would compute gradients by weights last, and hold their inputs."""
        arrays = leaves(tree)
        floating = [at for at, x in enumerate(arrays) if mx.issubdtype(x.dtype, mx.floating)]
        joined: Any = _together(*[arrays[at] for at in floating])
        for at, x in zip(floating, joined, strict=True):
            arrays[at] = x
        return refilled(tree, arrays)


@mx.custom_function
def _together(*arrays: mx.array) -> Any:
    return arrays


_together.vjp(lambda arrays, gradients, results: mx.depends(gradients, gradients))


AUTODIFF: Autodiff = MlxAutodiff()
