"""JAX's random numbers."""

from __future__ import annotations

import jax

from anydevice._nn.layer import Run


def key_of(run: Run) -> jax.Array:
    """Return a JAX random key for the current batch."""
    return jax.random.fold_in(jax.random.key(run.seed), run.step)
