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

_MAX_POINTS = 400


class SearchProgress(Record):
    """The progress of a search: its arithmetic, and points of seconds and `Progress`.

    There are at most 401 points, and none if the first bound decided the query.
    """

    precision: str = "float32"
    points: tuple[tuple[float, Progress], ...] = ()

    def __repr__(self) -> str:
        return f"SearchProgress({self.precision}, {len(self.points)} points)"


class ProgressRecorder:
    """Stores some of the reports of a search, and passes all of them on."""

    def __init__(self, begin: float, tell: Callable[[Progress], None] | None) -> None:
        self._begin, self._tell = begin, tell
        self._points: list[tuple[float, Progress]] = []
        self._last: tuple[tuple[float, Progress], ...] = ()
        self._reports, self._every = 0, 1

    def __call__(self, now: Progress) -> None:
        self._last = ((time.monotonic() - self._begin, now),)
        if self._reports % self._every == 0:
            self._points.append(self._last[0])
        self._reports += 1
        if len(self._points) == _MAX_POINTS:
            self._points, self._every = self._points[::2], 2 * self._every
        if self._tell is not None:
            self._tell(now)

    def progress(self, precision: str) -> SearchProgress:
        """Return the stored reports, and the last one."""
        end = () if self._points[-1:] == list(self._last) else self._last
        return SearchProgress(precision, (*self._points, *end))


def outcome_data(result: Result) -> dict[str, Any]:
    """Return the result as plain data, ready for JSON."""
    from anydevice._proofs.prove import Counterexample, Proof

    if isinstance(result, Proof):
        trees = [tree for certificate in result.certificates for tree in certificate.trees]
        parts = sum(tree.leaves for tree in trees)
        data = {"result": "proved", "parts": parts, "boxes": result.boxes}
    elif isinstance(result, Counterexample):
        x, y = result.x.reshape(-1).tolist(), result.y.reshape(-1).tolist()
        data = {"result": "counterexample", "x": x, "y": y, "violation": result.violation}
    else:
        data = {
            "result": "undecided",
            "reason": result.reason,
            "proved_share": result.proved_share,
            "best_bound": result.best_bound if isfinite(result.best_bound) else None,
            "boxes": result.boxes,
        }
    return data | {"precision": result.course.precision, "seconds": result.seconds}
