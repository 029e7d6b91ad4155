"""The table of our own kernels that passed verification on a device and may be used.

The table is in memory only. Kernels enter it by `trust` or `replace` once they are verified, here
or in an earlier process; engines ask `is_trusted` before each use.

While a kernel is on trial, only the thread that tries it uses it: to all others the table is what
it was. Changes add before they remove, so that no thread sees a table that is half empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident

Entry = tuple[str, str, str]
"""A kernel, a dtype and a device."""

_trusted: set[str] = set()
_trials: dict[int, frozenset[str]] = {}
"""The kernels on trial by thread, the only ones used there meanwhile; usually empty."""


def trust(kernel: str, dtype: str, device: str) -> None:
    """Let a kernel be used for one dtype on one device."""
    _trusted.add(_row(kernel, dtype, device))


def is_trusted(kernel: str, dtype: str, device: str) -> bool:
    """Whether a kernel may be used for this dtype on this device."""
    row = _row(kernel, dtype, device)
    if _trials:
        tried = _is_tried(row)
        if tried is not None:
            return tried
    return row in _trusted


def replace(entries: Iterable[Entry]) -> None:
    rows = {_row(*entry) for entry in entries}
    _trusted.update(rows)
    _trusted.intersection_update(rows)


def forget() -> None:
    _trusted.clear()


@contextmanager
def trial(entries: Iterable[Entry]) -> Iterator[None]:
    """Use these kernels and no others in the calling thread within the block."""
    thread, rows = get_ident(), frozenset(_row(*entry) for entry in entries)
    before = _trials.get(thread)
    _trials[thread] = rows
    try:
        yield
    finally:
        if before is None:
            del _trials[thread]
        else:
            _trials[thread] = before


def _is_tried(row: str) -> bool | None:
    """Whether the calling thread tries it; `None` if it tries nothing."""
    rows = _trials.get(get_ident())
    return None if rows is None else row in rows


def _row(kernel: str, dtype: str, device: str) -> str:
    # One string and not a tuple: a compiler that traces this keeps it as a constant.
    return f"{kernel} {dtype} {device}"


# PyTorch's compiler runs this while it looks through the caller, and keeps the answer.
_is_tried._dynamo_marked_constant = True  # type: ignore[attr-defined]
