"""Work on a long array piece by piece: pieces that fit the cache, on as many threads as help."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anydevice.core.device import Device
from anydevice.discovery._discover import standing_of

MOST_THREADS = 8
"""More do not help: what a call of NumPy does before it lets other threads run adds up."""
_PIECES_WORTH_A_THREAD = 8


class Scratch:
    """Memory for what lies between, used again for each piece.

    To ask the system for it each time, and to have it cleared, takes as long as to compute.

    >>> scratch = Scratch()
    >>> first = scratch("squares", 2, 3)
    >>> first.shape, np.shares_memory(first, scratch("squares", 4))
    ((2, 3), True)
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, Any], NDArray[Any]] = {}

    def __call__(self, name: str, *shape: int, dtype: Any = np.float64) -> NDArray[Any]:
        """An array with anything in it: what was asked for by this name before is lost."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or len(held) < size:
            held = np.empty(1 << max(0, size - 1).bit_length(), dtype)
            self._held[name, dtype] = held
        return held[:size].reshape(shape)


def in_pieces(count: int, step: int, work: Callable[[int, int, Scratch], None]) -> None:
    """Call `work(begin, end, scratch)` for all pieces of `range(count)`, `step` long each.

    Where there are many, several threads share them out, each with a scratch of its own; in which
    order is left open. An error of one ends the others after their piece, and is raised.
    """
    begins = deque(range(0, count, step))
    threads = min(len(begins) // _PIECES_WORTH_A_THREAD, MOST_THREADS)
    threads = threads if threads < 2 else min(threads, usable_cores())

    def work_through() -> None:
        scratch = Scratch()
        try:
            while (begin := _next(begins)) is not None:
                work(begin, min(begin + step, count), scratch)
        except BaseException:
            begins.clear()
            raise

    if threads < 2:
        work_through()
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(work_through) for _ in range(threads - 1)]
        work_through()
    for other in others:
        other.result()


def _next(begins: deque[int]) -> int | None:
    try:
        return begins.popleft()
    except IndexError:
        return None


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and by what a container grants."""
    standing = standing_of(Device("cpu"))
    usable = standing.facts.details.get("usable_cores") if standing else None
    return int(usable) if isinstance(usable, int | float) else os.cpu_count() or 1
