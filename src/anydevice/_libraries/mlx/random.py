"""MLX's global random numbers. A state is a list of two integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx


def state(loader: object) -> dict[str, Any]:
    """Return the state of MLX's generator; loaders have no generator."""
    state: Any = mx.random.state
    return {"mlx": state[0].tolist()}


def set_state(saved: Mapping[str, Any], loader: object) -> None:
    """Set the generator to a result of `state`."""
    high, low = saved["mlx"]
    mx.random.seed(high << 32 | low)


def seed(number: int) -> None:
    mx.random.seed(number)
