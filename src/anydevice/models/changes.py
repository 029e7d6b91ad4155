"""Detecting that a module was changed after it was compiled, fast enough for every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

from anydevice.core.record import Record

Read = Callable[[], Any]


class Watched(Record):
    """The parts of a module that are watched.

    `views` are collections of its objects, `readers` return single values of it, `counters` return
    how often something was changed in place.
    """

    views: list[Iterable[Any]]
    readers: list[Read]
    counters: list[Read]


class Snapshot(Record):
    """The objects of a module at one time. They are kept alive, so identities are not reused."""

    watched: Watched
    objects: list[Any]
    counts: list[int]


class ChangeDetector:
    """Compares a module with its last snapshot, by the identity of its objects.

    >>> module = {"weight": 1.5}
    >>> detector = ChangeDetector(lambda: Watched([module.values()], [], []))
    >>> detector.has_changed()
    False
    >>> module["weight"] = 2.5
    >>> detector.has_changed()
    True
    >>> detector.reset(detector.snapshot())
    >>> detector.has_changed()
    False
    """

    def __init__(self, watched: Callable[[], Watched]) -> None:
        self._watched = watched
        self.reset(self.snapshot())

    def has_changed(self) -> bool:
        """Whether any object is another one, or was changed in place."""
        last = self._last
        objects, counts = _read(last.watched)
        return not (
            counts == last.counts
            and len(objects) == len(last.objects)
            and all(map(is_, objects, last.objects))
        )

    def snapshot(self) -> Snapshot:
        """The module as it is now. The watched parts are looked up again: they may be new."""
        watched = self._watched()
        return Snapshot(watched, *_read(watched))

    def reset(self, snapshot: Snapshot) -> None:
        """From now on, compare with this snapshot."""
        self._last = snapshot


def _read(watched: Watched) -> tuple[list[Any], list[int]]:
    objects = list(chain.from_iterable(watched.views))
    objects += [read() for read in watched.readers]
    return objects, [count() for count in watched.counters]
