"""The outcome of a proof as plain data, and the record of its search."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

from anydevice._core.record import Record

if TYPE_CHECKING:
    from anydevice._proofs.prove import Result
    from anydevice._proofs.search import Progress

_MOST_POINTS = 400


class SearchProgress(Record):
    """How a search went: in which arithmetic, and how far it was after so many seconds.

    There are some hundred points at most, and none where the first bound decided it.
    """

    precision: str = "float32"
    points: tuple[tuple[float, Progress], ...] = ()

    def __repr__(self) -> str:
        return f"SearchProgress({self.precision}, {len(self.points)} points)"


class ProgressRecorder:
    """Keeps how far a search is each time that it tells, and tells it on."""

    def __init__(self, begin: float, tell: Callable[[Progress], None] | None) -> None:
        self._begin, self._tell = begin, tell
        self._kept: list[tuple[float, Progress]] = []
        self._last: tuple[tuple[float, Progress], ...] = ()
        self._told, self._every = 0, 1

    def __call__(self, now: Progress) -> None:
        self._last = ((time.monotonic() - self._begin, now),)
        if self._told % self._every == 0:
            self._kept.append(self._last[0])
        self._told += 1
        if len(self._kept) == _MOST_POINTS:
            self._kept, self._every = self._kept[::2], 2 * self._every
        if self._tell is not None:
            self._tell(now)

    def course(self, precision: str) -> SearchProgress:
        """What was kept, and how far the search was at its end."""
        end = () if self._kept[-1:] == list(self._last) else self._last
        return SearchProgress(precision, (*self._kept, *end))


def outcome_data(result: Result) -> dict[str, Any]:
    """The result as plain data, ready for JSON."""
    from anydevice._proofs.prove import Counterexample, Proof

    if isinstance(result, Proof):
        parts = sum(tree.leaves for each in result.certificates for tree in each.trees)
        found = {"result": "proved", "parts": parts, "boxes": result.boxes}
    elif isinstance(result, Counterexample):
        x, y = result.x.reshape(-1).tolist(), result.y.reshape(-1).tolist()
        found = {"result": "counterexample", "x": x, "y": y, "violation": result.violation}
    else:
        found = {
            "result": "undecided",
            "reason": result.reason,
            "proved_share": result.proved_share,
            "best_bound": result.best_bound if isfinite(result.best_bound) else None,
            "boxes": result.boxes,
        }
    return found | {"precision": result.course.precision, "seconds": result.seconds}
