"""Starting Triton kernels, and the facts of a device that decide their tiles.

Tiles are a function of the shape, found by `bench/gpu_ops.py`; nothing is measured at a start.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"


LONGEST_ROW = 65536
"""The most bytes of a row that one program keeps to itself; longer ones are read twice."""


def start(
    kernel: Any, grid: Sequence[int], device: torch.device, *arguments: Any, **options: Any
) -> None:
    """Start `grid` programs of a kernel on the current stream of a device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[tuple(grid)](*arguments, **options)
    else:
        with torch.cuda.device(device):
            kernel[tuple(grid)](*arguments, **options)


@cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """Return the options of a kernel that may begin before the one ahead of it has ended.

    It waits for that one before it touches its results, which hides the time of the start.
    """
    cuda = device.type == "cuda" and not torch.version.hip
    if not cuda or torch.cuda.get_device_capability(device) < (9,):
        return {"overlap": False}
    target = triton.runtime.driver.active.get_current_target()
    # The option came with Triton 3.4.
    can = hasattr(triton.compiler.make_backend(target).parse_options({}), "launch_pdl")
    return {"overlap": True, "launch_pdl": True} if can else {"overlap": False}


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors: programs that run side by side."""
    if device.type != "cuda":
        return 4  # under the interpreter: few, and enough to share the work
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def most_warps(device: torch.device) -> int:
    """Return the number of warps that a program can have."""
    if device.type != "cuda":
        return 32
    return int(1024 // torch.cuda.get_device_properties(device).warp_size)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of fast memory that one program can have."""
    if device.type != "cuda":
        return 2**20
    facts = torch.cuda.get_device_properties(device)
    size: int = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    return size


def counters(device: torch.device, count: int) -> Tensor:
    """Return int32 counters on a device, all 0, which a kernel must leave at 0.

    Launches of one stream share them. A CUDA graph may run beside others, and has its own: capture
    one within `own_counters`.
    """
    by_device = _own.counters
    if by_device is None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        by_device = _counters.setdefault(stream, {})
    tensor = by_device.get(device)
    if tensor is None or tensor.numel() < count:
        size = max(count, MOST_COUNTERS)
        tensor = by_device[device] = torch.zeros(size, dtype=torch.int32, device=device)
    return tensor


@contextmanager
def own_counters() -> Iterator[dict[torch.device, Tensor]]:
    """Give this thread's launches their own counters; run them once before a capture."""
    before, _own.counters = _own.counters, {}
    try:
        yield _own.counters
    finally:
        _own.counters = before


class _CountersOfThread(threading.local):
    counters: dict[torch.device, Tensor] | None = None


_own = _CountersOfThread()
_counters: dict[int, dict[torch.device, Tensor]] = {}
MOST_COUNTERS = 4096


@triton.jit
def fetch_ahead(start, size):
    """Prefetch `size` bytes of memory (a multiple of 16, as is `start`) into the cache.

    A later write still counts, so a kernel may ask before it waits for the one ahead. Compute
    capability 9.0 and later.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [start.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
