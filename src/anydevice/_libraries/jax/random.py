"""JAX's random numbers."""

from __future__ import annotations

import jax

from anydevice._nn.layer import Run


def key_of(run: Run) -> jax.Array:
    """Return a key of JAX's random numbers for the batch under way."""
    return jax.random.fold_in(jax.random.key(run.seed), run.step)
