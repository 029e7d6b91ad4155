"""How much memory MLX may hold, watched over here: MLX itself goes on beyond its limit.

What MLX calls its memory limit is a guideline, beyond which it gives back what it keeps for later
and then allocates all the same. Where the machine has no room on a CPU it does not say so either,
but takes the process down. So an array is refused here before MLX makes it.
"""

from __future__ import annotations

from functools import cache
from math import inf, prod
from typing import Any

import mlx.core as mx

from anydevice.core.sizes import format_size
from anydevice.hardware import cpu

_limit: int | None = None
_guideline: int | None = None
"""MLX's own limit, from before ours."""


class LimitReachedError(MemoryError):
    """An array would have gone beyond what MLX may hold; `asked` is its size in bytes."""

    def __init__(self, message: str, asked: int) -> None:
        super().__init__(message)
        self.asked = asked


def limit() -> int | None:
    """The most bytes that MLX may hold; `None` where nobody has set a limit."""
    return _limit


def set_limit(limit: int | None) -> None:
    """Let MLX hold at most so many bytes; `None` lifts the limit."""
    global _limit, _guideline
    _limit = limit
    if limit is not None:
        before = mx.set_memory_limit(limit)
        _guideline = before if _guideline is None else _guideline
    elif _guideline is not None:
        mx.set_memory_limit(_guideline)
        _guideline = None


def refuse_beyond_limit(size: int) -> None:
    """Raise `LimitReachedError` where so many bytes more are too many, for MLX or the machine.

    A container counts as a machine of its size.
    """
    most = _machine() if _limit is None else _limit
    held = mx.get_active_memory()
    if held + size <= most:
        return
    whose = "the memory that this process can have" if _limit is None else "the limit of MLX"
    raise LimitReachedError(
        f"{format_size(size)} more than the {format_size(held)} in use are beyond {whose}, "
        f"{format_size(int(most))}",
        size,
    )


def size_of(shape: tuple[int, ...], dtype: Any) -> int:
    """The bytes of an array."""
    return prod(shape) * int(dtype.size)


@cache
def _machine() -> float:
    """The memory that this process can have; reading it takes longer than making a small array."""
    most = cpu.look().devices[0].facts.obtainable_memory
    return inf if most is None else most
