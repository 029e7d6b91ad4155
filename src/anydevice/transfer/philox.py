"""Philox 4x32-10: four random words from a counter and a key, by arithmetic on integers alone.

J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011. A word depends on nothing but its key and its counter, so any stretch of a stream can
be made alone, in any order and on any machine, and is always the same.

A stream here is the published generator with the key `seed` and with `stream` in the upper half of
the counter. The lower half counts blocks of four words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anydevice.transfer.pieces import Scratch

Words = NDArray[np.uint32]
Lanes = NDArray[np.uint64]

LENGTH = 2**66
"""How many words a stream has: 2**64 blocks of four."""

_ROUNDS = 10
_LOW = 0xFFFFFFFF
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_MASK = np.uint64(_LOW)
_HALF = np.uint64(32)


_BLOCKS_AT_ONCE = 2**14 + 1
"""So many blocks are worked on together: they stay in the cache, and the calls weigh little.

It is one more than a power of two, as a stretch of words may begin within a block.
"""
_FOLLOWING = np.arange(_BLOCKS_AT_ONCE, dtype=np.uint64)


def philox(counters: NDArray[Any], key: tuple[int, int]) -> Words:
    """The four words of every counter: rows of four words in, rows of four words out.

    >>> [hex(word) for word in philox(np.zeros((1, 4), np.uint32), (0, 0))[0]]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    lanes = np.empty((3, 2, len(counters)), dtype=np.uint64)
    lanes[:2] = np.asarray(counters).T.reshape(2, 2, -1).swapaxes(0, 1)
    _mix(lanes, key)
    return _rows(lanes, np.empty((len(counters), 4), dtype=np.uint32))


def words(seed: int, stream: int, start: int, count: int, scratch: Scratch | None = None) -> Words:
    """The words `start` to `start + count` of a stream; `seed` and `stream` are 64-bit numbers.

    With a `scratch`, they lie in it, until the next call with it.

    >>> bool((words(7, 0, 5, 3) == words(7, 0, 0, 8)[5:]).all())
    True
    """
    scratch = scratch or Scratch()
    first, skipped = divmod(start, 4)
    blocks = (skipped + count + 3) // 4
    made = scratch("words", blocks, 4, dtype=np.uint32)
    for begin in range(0, blocks, _BLOCKS_AT_ONCE):
        part = made[begin : begin + _BLOCKS_AT_ONCE]
        lanes = scratch("lanes", 3, 2, len(part), dtype=np.uint64)
        numbers = scratch("blocks", len(part), dtype=np.uint64)
        np.add(_FOLLOWING[: len(part)], np.uint64(first + begin), out=numbers)
        _count(lanes, stream, numbers)
        _mix(lanes, (seed & _LOW, seed >> 32))
        _rows(lanes, part)
    return made.reshape(-1)[skipped : skipped + count]


def words_at(seed: int, stream: int, start: int, places: NDArray[np.intp]) -> Words:
    """The words of a stream at single places, counted from `start`.

    >>> bool((words_at(7, 0, 5, np.array([9, 2])) == words(7, 0, 5, 10)[[9, 2]]).all())
    True
    """
    first, skipped = divmod(start, 4)
    blocks, within = divmod(places + skipped, 4)
    lanes = np.empty((3, 2, len(places)), dtype=np.uint64)
    _count(lanes, stream, blocks.astype(np.uint64) + np.uint64(first))
    _mix(lanes, (seed & _LOW, seed >> 32))
    made = _rows(lanes, np.empty((len(places), 4), dtype=np.uint32))
    return made[np.arange(len(places)), within]


def _count(lanes: Lanes, stream: int, blocks: NDArray[np.uint64]) -> None:
    """Set the counters: the number of the block below, the stream above."""
    even, odd, _ = lanes
    np.bitwise_and(blocks, _MASK, out=even[0])
    np.right_shift(blocks, _HALF, out=odd[0])
    even[1], odd[1] = stream & _LOW, stream >> 32


def _mix(lanes: Lanes, key: tuple[int, int]) -> None:
    """The ten rounds, in place.

    `lanes` holds words 0 and 2 of each counter, then words 1 and 3, then room for products. A word
    takes 64 bits there, so that the product of two fits and its upper half can be read.
    """
    even, odd, products = lanes
    crossed = products[::-1]
    for turn in range(_ROUNDS):
        keys = [[(part + turn * step) & _LOW] for part, step in zip(key, _WEYL, strict=True)]
        np.multiply(even, _FACTORS, out=products)
        np.right_shift(crossed, _HALF, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, np.array(keys, dtype=np.uint64), out=even)
        np.bitwise_and(crossed, _MASK, out=odd)


def _rows(lanes: Lanes, made: Words) -> Words:
    """Write the words of each block as one row of `made`."""
    even, odd, _ = lanes
    made[:, 0], made[:, 1], made[:, 2], made[:, 3] = even[0], odd[0], even[1], odd[1]
    return made
