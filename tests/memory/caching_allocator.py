"""How PyTorch's allocator on a GPU holds memory: a model of its rules that needs no GPU.

It takes segments from the driver, cuts blocks from them, and keeps what is freed for later. So it
holds more than its blocks come to: a segment of which one block is still in use cannot be given
back, and what is left of it may be too small for the next block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

MIB = 2**20
STEP = 512
"""Blocks are multiples of so many bytes."""

SMALL = MIB
"""The largest block of the small pool, and what is left of a large one is only cut off above it."""

_SMALL_SEGMENT = 2 * MIB
_MIDDLE, _MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
_SEGMENT_STEP = 2 * MIB


def segment_bytes(size: int) -> int:
    """The segment that is taken for a block of so many bytes where none that is free will do.

    >>> [segment_bytes(size) // MIB for size in (1, 3 * MIB, 25 * MIB)]
    [2, 20, 26]
    """
    if size <= SMALL:
        return _SMALL_SEGMENT
    if size < _MIDDLE:
        return _MIDDLE_SEGMENT
    return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP


def block_bytes(size: int) -> int:
    """What a tensor of so many bytes counts for, in a segment of its own where it is large.

    >>> block_bytes(1), block_bytes(25 * MIB) // MIB, block_bytes(24 * MIB + 1) / MIB < 24.01
    (512, 26, True)
    """
    size = max(STEP, -(-size // STEP) * STEP)
    if size < _MIDDLE:
        return size
    segment = segment_bytes(size)
    return size if segment - size > SMALL else segment


def rounding(sizes: Iterable[int]) -> tuple[int, int]:
    """What rounding adds to tensors that stay: to their blocks, and beside these in the segments.

    >>> rounding([25 * MIB, 24 * MIB + MIB // 2])
    (1048576, 1572864)
    """
    added = beside = 0
    for size in sizes:
        block = block_bytes(size)
        added += block - size
        if block >= _MIDDLE:
            beside += segment_bytes(size) - block
    return added, beside


class Block:
    """A stretch of a segment, in use or free, between its neighbours."""

    __slots__ = ("after", "before", "free", "number", "size")

    def __init__(self, size: int, number: int, before: Block | None, after: Block | None) -> None:
        self.size, self.number, self.free = size, number, False
        self.before, self.after = before, after

    def __lt__(self, other: Block) -> bool:
        # Equal sizes are taken in the order of their addresses.
        return self.number < other.number


class CachingAllocator:
    """`take` a block, `give` it back; `held` and `in_use` are bytes, with the most of each so far.

    Of the free blocks the smallest that is large enough is taken. What is too much is cut off,
    and free neighbours become one again. Only large blocks are followed: the small ones of a
    model come to a few MiB.

    >>> memory = CachingAllocator()
    >>> large = memory.take(100 * MIB)
    >>> memory.give(large)
    >>> small = memory.take(10 * MIB)  # it is cut from the large one, which is then too small
    >>> again = memory.take(100 * MIB)
    >>> memory.most_held // MIB, memory.most_in_use // MIB
    (200, 110)
    """

    def __init__(self) -> None:
        self.held = self.in_use = self.most_held = self.most_in_use = 0
        self._free: list[tuple[int, Block]] = []
        self._numbers = 0

    def take(self, size: int) -> Block | None:
        """A block for a tensor of so many bytes; `None` for a small one, which is not followed."""
        if size <= SMALL:
            return None
        size = -(-size // STEP) * STEP
        free = self._free
        place = bisect_left(free, size, key=_size_of)
        if place < len(free):
            block = free.pop(place)[1]
            block.free = False
        else:
            # Numbers stand for addresses: what is cut off a block comes right after it.
            self._numbers += 1
            block = Block(segment_bytes(size), self._numbers << 32, None, None)
            self.held += block.size
            self.most_held = max(self.most_held, self.held)
        if block.size - size > SMALL:
            self._cut(block, size)
        self.in_use += block.size
        self.most_in_use = max(self.most_in_use, self.in_use)
        return block

    def give(self, *blocks: Block | None) -> None:
        """Free blocks, in this order."""
        for block in blocks:
            if block is not None:
                self.in_use -= block.size
                for other in (block.before, block.after):
                    if other is not None and other.free:
                        self._forget(other)
                        block = self._joined(block, other)
                self._keep(block)

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.number + size // STEP, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._keep(rest)

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.size, block))

    def _forget(self, block: Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block))]

    def _joined(self, block: Block, other: Block) -> Block:
        first, second = (other, block) if other is block.before else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first


def _size_of(entry: tuple[int, Block]) -> int:
    return entry[0]
