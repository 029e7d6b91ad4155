"""Detecting that a module was changed after it was compiled, fast enough for every call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain
from operator import is_
from typing import Any

from anydevice.core.record import Record

Read = Callable[[], Iterable[Any]]


class Watched(Record):
    """The parts of a module that are watched.

    `views` are collections of its objects, each of `readers` returns further ones: these are
    compared by identity. What `values` return, such as counts of changes in place, is compared by
    equality, which is faster.
    """

    views: list[Collection[Any]]
    readers: list[Read]
    values: list[Read]


class Snapshot(Record):
    """The objects of a module at one time. They are kept alive, so identities are not reused."""

    watched: Watched
    empty: list[Collection[Any]]
    objects: list[Any]
    values: list[Any]


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
        if any(last.empty):
            return True
        objects, values = _read(last.watched)
        return not (
            values == last.values
            and len(objects) == len(last.objects)
            and all(map(is_, objects, last.objects))
        )

    def snapshot(self) -> Snapshot:
        """The module as it is now. The watched parts are looked up again: they may be new."""
        watched = self._watched()
        # Most collections hold nothing, and whether they still do is the fastest question.
        filled = Watched([x for x in watched.views if x], watched.readers, watched.values)
        return Snapshot(filled, [x for x in watched.views if not x], *_read(filled))

    def reset(self, snapshot: Snapshot) -> None:
        """From now on, compare with this snapshot."""
        self._last = snapshot


def _read(watched: Watched) -> tuple[list[Any], list[Any]]:
    objects: list[Any] = list(chain.from_iterable(watched.views))
    values: list[Any] = []
    for read in watched.readers:
        objects.extend(read())
    for read in watched.values:
        values.extend(read())
    return objects, values
