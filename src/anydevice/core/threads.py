"""Work beside this thread, also where the system gives no further thread.

A container may allow a handful of processes and threads in all. Then everything takes longer, and
nothing fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def started(thread: threading.Thread) -> bool:
    """Start a thread; `False` if the system gives none."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def side_by_side(*works: Callable[[], R]) -> list[R]:
    """The results of functions that are called at the same time, the last one on this thread.

    So are those for which there is no thread, one after the other. All have ended when it returns,
    or raises the error of the last one that failed.

    >>> side_by_side(lambda: 1, lambda: 2)
    [1, 2]
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def call(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            errors[number] = error

    others = [
        threading.Thread(target=call, args=(number,), name="anydevice work")
        for number in range(len(works) - 1)
    ]
    running = [thread if started(thread) else None for thread in others]
    try:
        for number, thread in enumerate([*running, None]):
            if thread is None:
                call(number)
    finally:
        for thread in running:
            if thread is not None:
                thread.join()
    if errors:
        raise errors[max(errors)]
    return [results[number] for number in range(len(works))]
