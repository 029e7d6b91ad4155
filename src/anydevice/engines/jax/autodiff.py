"""Gradients on JAX: its own transformations."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from anydevice.core.engine import Absent
from anydevice.core.primitives import Autodiff
from anydevice.engines.base import refuse_non_scalar


class JaxAutodiff:
    """Reverse mode by `jax.value_and_grad`."""

    compiles = True

    def value_and_grad(self, function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        @wraps(function)
        def one_number(*arguments: Any, **named: Any) -> Any:
            value = function(*arguments, **named)
            refuse_non_scalar(value, isinstance(value, jax.Array))
            return value

        transformed = jax.value_and_grad(one_number)

        @wraps(function)
        def with_gradient(first: Any, *others: Any, **named: Any) -> tuple[Any, Any]:
            for path, leaf in jax.tree_util.tree_leaves_with_path(first):
                _refuse_constant(path, leaf)
            result: tuple[Any, Any] = transformed(first, *others, **named)
            return result

        return with_gradient

    def stop_gradient(self, x: Any) -> Any:
        return jax.lax.stop_gradient(x)

    def checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        run_again: Callable[..., Any] = jax.checkpoint(function)
        return run_again


def _refuse_constant(path: Any, leaf: Any) -> None:
    kind = getattr(leaf, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.floating):
        where = jax.tree_util.keystr(path) or "the first argument"
        raise Absent(
            f"there is no gradient by {where}, which is of type {kind or type(leaf).__name__}",
            instead="give what has no gradient as another argument",
        ).error()


AUTODIFF: Autodiff = JaxAutodiff()
