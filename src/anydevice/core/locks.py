"""Locks that are free in a forked child, and values that are made once.

A fork copies the memory of all threads, but only the thread that forks: a lock that another thread
held would stay held for ever. The fork does not wait, so what such a lock protects must be valid,
or made again, after any single step of its holder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakSet

Key = TypeVar("Key")
Made = TypeVar("Made")


class ForkSafeLock:
    """A lock that is free in a forked child, whoever held it in the parent.

    It is taken by `with lock.native:`. `reentrant=True` lets its holder take it again.

    >>> lock = ForkSafeLock()
    >>> with lock.native:
    ...     lock.native.locked()
    True
    """

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make: Callable[[], Any] = threading.RLock if reentrant else threading.Lock
        self._native = self._make()
        _locks.add(self)

    @property
    def native(self) -> Any:
        """The system's own lock as it is in this process: an interrupt cannot leave it taken."""
        return self._native

    def _renew(self) -> None:
        # A thread that forked in a block of the old one still leaves that one.
        self._native = self._make()


_locks: WeakSet[ForkSafeLock] = WeakSet()


def made_once(make: Callable[[Key], Made]) -> Callable[[Key], Made]:
    """The function, with its results kept, and run only once for each argument by all threads.

    `functools.cache` lets two threads that come first at the same time make one each. What raises
    is tried again the next time.

    >>> made_once(list)("ab") is made_once(list)("ab")
    False
    >>> letters = made_once(list)
    >>> letters("ab") is letters("ab")
    True
    """
    kept: dict[Key, Made] = {}
    making = ForkSafeLock(reentrant=True)

    @wraps(make)
    def get(key: Key) -> Made:
        if key in kept:
            return kept[key]
        with making.native:
            if key not in kept:
                kept[key] = make(key)
            return kept[key]

    return get


def _renew_all() -> None:
    for lock in list(_locks):
        lock._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
