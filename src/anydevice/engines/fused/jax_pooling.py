"""Pooling on JAX, with a gradient of its own where XLA's is slow.

XLA finds the largest of a window again for the gradient, with four further arrays of places, and
then scatters. Where windows do not overlap, each element has one window, so the gradient is a plain
choice: the window's where the element is its first largest, else zero. It is written with the
channels last, where XLA puts them for convolutions, so that neighbours are worked on together.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Pair = tuple[int, int]
_MOST_PLACES = 9
"""Places of a window that are gone through one by one; beyond, XLA's own gradient is as fast."""


def largest_of_windows(x: Any, size: Pair, stride: Pair) -> Any:
    """The largest of each window of (batch, channels, height, width); what is no number wins.

    Of several that are the largest, the first one gets the gradient.
    """
    if size == stride and math.prod(size) <= _MOST_PLACES:
        return _largest_of_disjoint(x, size)
    return _reduced(x, size, stride)


def _reduced(x: Any, size: Pair, stride: Pair) -> Any:
    window, step = (1, 1, *size), (1, 1, *stride)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, step, "VALID")


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest_of_disjoint(x: Any, size: Pair) -> Any:
    return _reduced(x, size, size)


def _largest_and_change(size: Pair, values: tuple[Any], changes: tuple[Any]) -> tuple[Any, Any]:
    windows, moving = (_channels_last(x, size) for (x,) in (values, changes))
    places = [windows[:, :, down, :, along] for down, along in np.ndindex(size)]
    largest = reduce(jnp.maximum, places)  # found again, as part of the loop that compares with it
    first = jnp.full(largest.shape, len(places), jnp.uint8)
    for number, place in reversed(list(enumerate(places))):
        found = (place == largest) | jnp.isnan(place)
        first = jnp.where(found, jnp.uint8(number), first)
    numbers = np.arange(len(places), dtype=np.uint8).reshape(size[0], 1, size[1], 1)
    chosen = first[:, :, None, :, None] == numbers
    change = jnp.where(chosen, moving, 0).sum((2, 4))
    # The op itself, not `largest`: so a second derivative follows the same rule.
    return _largest_of_disjoint(*values, size), jnp.moveaxis(change, -1, 1)


_largest_of_disjoint.defjvp(_largest_and_change)


def _channels_last(x: Any, size: Pair) -> Any:
    """The windows as (batch, down, height of one, along, width of one, channels)."""
    batch, channels, height, width = x.shape
    down, along = height // size[0], width // size[1]
    covered = jnp.moveaxis(x, 1, -1)[:, : down * size[0], : along * size[1]]
    return covered.reshape(batch, down, size[0], along, size[1], channels)
