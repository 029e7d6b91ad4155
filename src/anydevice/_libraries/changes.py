"""Detecting that a module was changed after it was compiled, fast enough for every call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from gc import get_referents
from math import prod
from typing import Any

from anydevice._core.record import Record

Read = Callable[[], Iterable[Any]]


class Watched(Record):
    """The parts of a module that are watched.

    Objects are compared by identity: those in collections (`views`), those that `readers` return,
    and the values of `dicts`. One call of Python's garbage collector reads all `dicts`; it does not
    see the values in the `vars` of an object, so these are views. Results of `values`, such as
    counts of writes in place, are compared by equality.
    """

    views: list[Collection[Any]]
    readers: list[Read]
    values: list[Read]
    dicts: tuple[dict[Any, Any], ...] = ()

    def read(self) -> tuple[list[Any], list[Any]]:
        """Return the objects and the values as they are now."""
        objects = get_referents(*self.dicts)
        values: list[Any] = []
        for view in self.views:
            objects += view
        for read in self.readers:
            objects += read()
        for read in self.values:
            values += read()
        return objects, values


class Snapshot(Record):
    """The objects of a module at one time. They are kept alive, so identities are not reused.

    `equals` are the indices of objects that may be equal to another object.
    """

    watched: Watched
    objects: list[Any]
    values: list[Any]
    equals: list[int]


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
        """Whether any object was replaced or changed in place."""
        last = self._last
        objects, values = last.watched.read()
        try:
            # Lists compare by identity first, many times faster than a loop.
            if values != last.values or objects != last.objects:
                return True
        except Exception:  # arrays of several elements are neither equal nor different
            return True
        return bool(last.equals) and any(objects[x] is not last.objects[x] for x in last.equals)

    def snapshot(self) -> Snapshot:
        """Return the module's current state; the watched parts are looked up again."""
        watched = self._watched()
        objects, values = watched.read()
        equals = [place for place, x in enumerate(objects) if _may_equal_another(x)]
        return Snapshot(watched, objects, values, equals)

    def reset(self, snapshot: Snapshot) -> None:
        """Compare with this snapshot from now on."""
        self._last = snapshot


def _may_equal_another(x: Any) -> bool:
    """Whether another object may be equal to `x`; never true for arrays of several elements."""
    kind: Any = type(x)
    if kind.__eq__ is object.__eq__:
        return False
    try:
        return bool(prod(x.shape) == 1)
    except Exception:  # no array, or an array without a shape yet
        return True
