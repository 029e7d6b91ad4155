"""Prompts in chunks: how many tokens are read at a time, and the slots that a cache needs for them.

Chunks bound the memory of activations. If a layer is compiled for each size, there are few sizes of
chunks, and of caches.
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
"""Sizes to which chunks are padded if a layer is compiled for each size."""


class ChunkSizes:
    """How many tokens of a row are read at a time."""

    def __init__(self, prefill_chunk: int, fixed: Sequence[int] = ()) -> None:
        self.fixed = tuple(size for size in fixed if size <= prefill_chunk) or tuple(fixed[:1])
        self.largest = max(self.fixed) if self.fixed else max(1, prefill_chunk)

    @classmethod
    def of(
        cls, executor: DecoderExecutor, rows: int, prefill_chunk: int | None = None
    ) -> ChunkSizes:
        """Return the sizes for a batch that reads `prefill_chunk` tokens of all rows at a time."""
        if prefill_chunk is None:
            prefill_chunk = PREFILL_CHUNK["cpu" if executor.device.kind == "cpu" else "other"]
        return cls(prefill_chunk // rows, CHUNK_SIZES if executor.compiled else ())

    def next(self, left: int) -> int:
        """Return the size of the next chunk of `left` tokens; it may be padded beyond them."""
        if not self.fixed or left >= self.largest:
            return min(left, self.largest)
        padded = min(size for size in self.fixed if size >= left)
        smaller = [size for size in self.fixed if size <= left]
        return padded if padded <= 2 * left or not smaller else max(smaller)

    def padded(self, length: int) -> int:
        """Return the slots that reading a prompt of this length touches."""
        done = 0
        while done < length:
            done += self.next(length - done)
        return done


def chunks(
    prompts: Prompts, sizes: ChunkSizes, done: int = 0
) -> Iterator[tuple[np.ndarray[Any, Any], list[int], list[int]]]:
    """Yield the ids (rows, tokens) of each chunk, the start of each row, and its valid tokens.

    All rows advance together; one that has ended has no valid tokens. The first `done` tokens are
    skipped.
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
    """Return the slots of a cache for prompts and replies of these lengths.

    If layers are compiled or steps captured, there are few sizes of caches, and so few programs.
    """
    needed = max(prompt + reply, ChunkSizes.of(executor, rows).padded(prompt))
    if executor.synchronous:
        return -(-needed // 64) * 64
    power = max(256, 1 << (needed - 1).bit_length())
    return max(needed, min(power, -(-context // 64) * 64))
