"""Seeing that a module was changed after it was compiled, quickly enough to ask at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

from anydevice.core.record import Record

Read = Callable[[], Any]


class Sights(Record):
    """Where to look at a module.

    `views` are what its objects consist of, `readers` give single values of it, `counters` tell
    how often something was changed in place.
    """

    views: list[Iterable[Any]]
    readers: list[Read]
    counters: list[Read]


class Follower:
    """Tells whether a module is made of other objects than when it was last looked at.

    >>> module = {"weight": 1.5}
    >>> follower = Follower(lambda: Sights([module.values()], [], []))
    >>> follower.sees_changes()
    False
    >>> module["weight"] = 2.5
    >>> follower.sees_changes()
    True
    >>> follower.saw(follower.look())
    >>> follower.sees_changes()
    False
    """

    def __init__(self, sights: Callable[[], Sights]) -> None:
        self._sights = sights
        self.saw(self.look())

    def sees_changes(self) -> bool:
        """Whether anything is another than it was."""
        seen = self._seen
        objects, counts = _looked(seen.places)
        return not (
            counts == seen.counts
            and len(objects) == len(seen.objects)
            and all(map(is_, objects, seen.objects))
        )

    def look(self) -> Seen:
        """What there is now, found anew: what took the place of an object has other places."""
        places = self._sights()
        return Seen(places, *_looked(places))

    def saw(self, seen: Seen) -> None:
        """From now on, changes are changes of this."""
        self._seen = seen


class Seen(Record):
    """What a module was made of: the objects themselves, whose addresses nobody else can get."""

    places: Sights
    objects: list[Any]
    counts: list[int]


def _looked(places: Sights) -> tuple[list[Any], list[int]]:
    objects = list(chain.from_iterable(places.views))
    objects += [read() for read in places.readers]
    return objects, [count() for count in places.counters]
