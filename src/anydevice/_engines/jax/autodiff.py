"""Gradients on JAX: its own transformations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from anydevice._core.engine import Absent
from anydevice._core.primitives import Autodiff
from anydevice._engines.base import refuse_non_scalar


class JaxAutodiff:
    """Reverse mode by `jax.value_and_grad`."""

    compiles = True

    def value_and_grad(
        self, function: Callable[..., Array], *, more: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        @wraps(function)
        def one_number(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            value = result[0] if more else result
            refuse_non_scalar(value, isinstance(value, Array))
            return result

        transformed = jax.value_and_grad(one_number, has_aux=more)

        @wraps(function)
        def with_gradient(first: Any, *others: Any, **named: Any) -> tuple[Array, Array]:
            for path, leaf in jax.tree_util.tree_leaves_with_path(first):
                kind = getattr(leaf, "dtype", None)
                if kind is None or not jnp.issubdtype(kind, jnp.floating):
                    where = jax.tree_util.keystr(path) or "the first argument"
                    raise Absent(
                        f"{where} is of type {kind or type(leaf).__name__}, which has no gradient",
                        instead="pass it as another argument",
                    ).error()
            return transformed(first, *others, **named)

        return with_gradient

    def stop_gradient(self, x: Array) -> Array:
        return jax.lax.stop_gradient(x)

    def checkpoint(self, function: Callable[..., Array]) -> Callable[..., Any]:
        """See the protocol. With `jax.checkpoint`, XLA on the CPU would merge the two runs."""

        @wraps(function)
        def run_again(*arguments: Any, **named: Any) -> Any:
            traced, shape = jax.make_jaxpr(partial(function, **named), return_shape=True)(
                *arguments
            )
            # What the function closes over is an input too: it may be a tracer, or have a gradient.
            inputs = [*traced.consts, *map(jnp.asarray, jax.tree_util.tree_leaves(arguments))]
            results = _run_checkpointed(traced.jaxpr, inputs)
            return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), results)

        return run_again

    def together(self, tree: Any) -> Any:
        return tree


def _run(jaxpr: jax.core.Jaxpr, inputs: list[Array]) -> list[Array]:
    constants = len(jaxpr.constvars)
    return jax.core.eval_jaxpr(jaxpr, inputs[:constants], *inputs[constants:])


def _backward(
    jaxpr: jax.core.Jaxpr, inputs: list[Array], slopes: list[Array]
) -> tuple[list[Array]]:
    floating = [at for at, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def gradients(inputs: list[Array], slopes: list[Array]) -> list[Array]:
        def of(floats: list[Array]) -> list[Array]:
            return _run(jaxpr, _with(inputs, floating, floats))

        return jax.vjp(of, [inputs[at] for at in floating])[1](slopes)[0]

    def behind_barrier(inputs: list[Array], slopes: list[Array]) -> Array:
        return gradients(*lax.optimization_barrier((inputs, slopes)))

    def in_branch(inputs: list[Array], slopes: list[Array]) -> Any:
        def never(inputs: list[Array], slopes: list[Array]) -> list[Array]:
            return [jnp.zeros_like(inputs[at]) for at in floating]

        # True in a way that the compiler cannot see: a number times 0 is never above 1.
        numbers = [x for x in slopes if x.size and jnp.issubdtype(x.dtype, jnp.inexact)]
        true = jnp.logical_not(numbers[0].ravel()[0] * 0 > 1) if numbers else True
        return lax.cond(true, gradients, never, inputs, slopes)

    if any(isinstance(slope, jax.core.Tracer) for slope in slopes):
        result = lax.platform_dependent(inputs, slopes, cpu=in_branch, default=behind_barrier)
    else:  # nothing is compiled, so nothing is left out
        result = gradients(inputs, slopes)
    none = [np.zeros(x.shape, jax.dtypes.float0) for x in inputs]
    return (_with(none, floating, result),)


_run_checkpointed = jax.custom_vjp(_run, nondiff_argnums=(0,))
_run_checkpointed.defvjp(lambda jaxpr, inputs: (_run(jaxpr, inputs), inputs), _backward)


def _with(values: list[Array], places: list[int], others: list[Array]) -> list[Array]:
    """Return the values, with others in some places."""
    changed = list(values)
    for at, value in zip(places, others, strict=True):
        changed[at] = value
    return changed


AUTODIFF: Autodiff = JaxAutodiff()
