"""Donation: a block in which updates may write their results into their arguments.

Outside of it an update gives new arrays and leaves the old ones alone. Within it an update may do
either; the identity of its results tells which.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType


class _UnderWay(threading.local):
    allowed: bool = False
    skip: Any = None


under_way = _UnderWay()
"""Whether this thread is in such a block, and the array that says whether nothing is to change."""


class consuming:  # noqa: N801 - it is used like a function
    """While the block runs, an update in this thread may write its results into its arguments.

    `skip` is a float32 array without axes on their device: where it is 1, an update that does so
    must change nothing. One that makes new arrays does not look at it.

    >>> with consuming():
    ...     under_way.allowed
    True
    >>> under_way.allowed
    False
    """

    def __init__(self, skip: Any = None) -> None:
        self._skip = skip
        self._before: tuple[bool, Any] = (False, None)

    def __enter__(self) -> None:
        self._before = under_way.allowed, under_way.skip
        under_way.allowed, under_way.skip = True, self._skip

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        under_way.allowed, under_way.skip = self._before
