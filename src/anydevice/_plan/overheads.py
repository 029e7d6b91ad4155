"""The memory of a process outside of its tensors: context, workspaces, and idle blocks.

Measured on an NVIDIA H200 with PyTorch 2.11 for CUDA 13.0; other devices take less. An estimate
that is to say whether a model fits errs on this side. The CPU takes none of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from anydevice._core.record import Record

MIB = 2**20

CONTEXT = 700 * MIB
"""Bytes that a process with a CUDA context and the usual kernels takes before its first tensor.

695 to 699 MiB were measured, with the kernels of twelve models loaded.
"""

WORKSPACE = 32 * MIB
"""Bytes that the library for matrix products keeps; PyTorch counts them among its allocations."""

MARGIN = 3
"""Percent of what a model needs that a plan keeps free on an accelerator beside it.

By that much `idle_bytes` may be too low.
"""

_STEP, _SMALL = 512, MIB
_LARGE, _SEGMENT_STEP = 10 * MIB, 2 * MIB


class Overhead(Record):
    """The memory that a process takes beside a model's tensors, in bytes.

    `context` is the driver's, `workspace` the libraries'. `rounding` is what PyTorch's allocator
    adds to tensors by giving them whole blocks, and `idle` what it holds at the peak without being
    able to use it, because what was freed lies between what is still in use.

    >>> Overhead(context=3, idle=4).total
    7
    """

    context: int = 0
    workspace: int = 0
    rounding: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.context + self.workspace + self.rounding + self.idle


def overhead_of(rounded: int, cache: int, activations: int) -> Overhead:
    """Return the overhead of a model; `rounded` are the bytes that whole blocks add to weights."""
    return Overhead(CONTEXT, WORKSPACE, rounded, idle_bytes(cache, activations))


def plannable(size: int) -> int:
    """Return the largest estimate with which a model runs in `size` bytes.

    >>> plannable(1030), plannable(1029)
    (1000, 999)
    """
    return size * 100 // (100 + MARGIN)


def rounding(sizes: Iterable[int]) -> int:
    """Return the bytes that whole blocks add to tensors of these sizes.

    >>> rounding([25 * MIB, 24 * MIB, 1000])
    1048600
    """
    total = 0
    for size in sizes:
        total += block_bytes(size) - size
    return total


def block_bytes(size: int) -> int:
    """Return the bytes of the block that PyTorch's allocator gives a tensor of this size.

    Blocks are multiples of 512 bytes. One of 10 MiB or more has a segment of its own, a multiple
    of 2 MiB, whose rest is only cut off where it is more than 1 MiB.

    >>> block_bytes(1), block_bytes(25 * MIB) // MIB, block_bytes(24 * MIB + 1) - 24 * MIB
    (512, 26, 512)
    """
    size = -(-size // _STEP) * _STEP
    rest = -size % _SEGMENT_STEP if size >= _LARGE else 0
    return size + rest if rest <= _SMALL else size


def idle_bytes(cache: int, activations: int) -> int:
    """Return the bytes that the allocator holds idle at the peak, while a prompt fills the cache.

    Each layer's part of the cache is cut from what the activations before it have left, and stays:
    the segment that it lies in is too small for the next layer's largest tensors. So what is idle
    grows with the cache, up to somewhat more than the activations. How much it is depends on all
    sizes and their order, to the byte; this rule was fitted to the allocator's own, played over
    the allocations of twelve models at many lengths. With it, what must be free is right within
    -3 and +8 percent for nine in ten of them.

    >>> idle_bytes(0, 800), idle_bytes(400, 800), idle_bytes(10_000, 800)
    (200, 500, 1000)
    """
    return min((3 * cache + activations) // 4, 5 * activations // 4)
