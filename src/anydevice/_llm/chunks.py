"""Prompts in pieces: how many tokens are read at a time, and the slots that a cache needs for them.

Pieces bound the memory of activations. Where a layer is compiled for each size, there are few of
them, and few sizes of caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice._plan.plan import PREFILL_CHUNK

if TYPE_CHECKING:
    from anydevice._llm.generate import DecoderExecutor

Prompts = Sequence[Sequence[int]]

CHUNK_SIZES = (16, 64, 256)
"""Sizes to which pieces of prompts are padded where a layer is compiled for each size."""


class ChunkSizes:
    """How many tokens of a row are read at a time."""

    def __init__(self, largest: int, fixed: Sequence[int] = ()) -> None:
        self.fixed = tuple(size for size in fixed if size <= largest) or tuple(fixed[:1])
        self.largest = max(self.fixed) if self.fixed else max(1, largest)

    @classmethod
    def of(cls, executor: DecoderExecutor, rows: int, most: int | None = None) -> ChunkSizes:
        """The sizes for a batch of rows, which have `most` tokens together at a time."""
        kind = "cpu" if executor.device.kind == "cpu" else "other"
        largest = PREFILL_CHUNK[kind] if most is None else most
        return cls(largest // rows, CHUNK_SIZES if executor.compiled else ())

    def next(self, left: int) -> int:
        """The size of the next piece, when so many tokens are left; it may be larger than that."""
        if not self.fixed or left >= self.largest:
            return min(left, self.largest)
        padded = min(size for size in self.fixed if size >= left)
        smaller = [size for size in self.fixed if size <= left]
        return padded if padded <= 2 * left or not smaller else max(smaller)

    def padded(self, length: int) -> int:
        """The slots that reading a prompt of this length touches."""
        done = 0
        while done < length:
            done += self.next(length - done)
        return done


def pieces(
    prompts: Prompts, sizes: ChunkSizes, done: int = 0
) -> Iterator[tuple[Any, list[int], list[int]]]:
    """The ids (rows, tokens) of one piece after another, where each row starts, how many count.

    All rows go on together; one that has ended has a count of 0. The first `done` are left out.
    """
    longest = max(map(len, prompts))
    while done < longest:
        size = sizes.next(longest - done)
        ids = np.zeros((len(prompts), size), np.int32)
        count = [max(0, min(size, len(prompt) - done)) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            ids[row, : count[row]] = prompt[done : done + count[row]]
        yield ids, [min(done, len(prompt)) for prompt in prompts], count
        done += size


def slots_for(executor: DecoderExecutor, rows: int, prompt: int, reply: int, context: int) -> int:
    """The slots of a cache for prompts and replies of these lengths.

    Where layers are compiled or steps captured, there are few sizes of caches, and so few executor.
    """
    needed = max(prompt + reply, ChunkSizes.of(executor, rows).padded(prompt))
    if executor.synchronous:
        return -(-needed // 64) * 64
    few = max(256, 1 << (needed - 1).bit_length())
    return max(needed, min(few, -(-context // 64) * 64))
