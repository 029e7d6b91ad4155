"""The allocator of glibc: how it returns freed memory to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

from anydevice._machine.settings.config import current

_M_MMAP_THRESHOLD = -3
"""The parameter's number in glibc's malloc.h."""
_THRESHOLD = 2**20


def return_freed_memory() -> None:
    """Have glibc unmap freed blocks of 1 MiB or more, unless settings say otherwise."""
    chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ
    chosen |= "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if current()[0].return_memory and not chosen:
        _set_threshold()


def trim_heap() -> None:
    """Return the free pages of the heap to the system, if the C library is glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _set_threshold() -> None:
    # glibc raises its threshold with each block that is freed, up to 32 MiB. Activations then come
    # from a heap whose holes are too small for the next aligned block: steps took twice the memory.
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)


@cache
def _glibc() -> Any:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "gnu_get_libc_version") else None
