"""Which kernels of our own may be used: those that gave the right answers here.

The table is kept in memory only. Whoever has checked a kernel on a device, or has read that it was
checked, says so with `trust`; the engines ask with `is_trusted` before each use.
"""

from __future__ import annotations

_trusted: set[str] = set()


def trust(kernel: str, dtype: str, device: str) -> None:
    """Let a kernel be used for one element type on one device.

    >>> trust("softmax", "bfloat16", "cuda:7")
    >>> is_trusted("softmax", "bfloat16", "cuda:7"), is_trusted("softmax", "float16", "cuda:7")
    (True, False)
    >>> forget()
    """
    _trusted.add(_row(kernel, dtype, device))


def is_trusted(kernel: str, dtype: str, device: str) -> bool:
    """Whether a kernel may be used for this element type on this device."""
    return _row(kernel, dtype, device) in _trusted


def forget() -> None:
    """Trust no kernel any more."""
    _trusted.clear()


def _row(kernel: str, dtype: str, device: str) -> str:
    # One string and not a tuple: a compiler that traces this keeps it as a constant.
    return f"{kernel} {dtype} {device}"
