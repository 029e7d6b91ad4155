"""`find_batch_size`: the largest batch that fits into memory, found by trying."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from inspect import ismethod
from typing import Any

from anydevice._arrays.memory.out_of_memory import clear_frames, raise_if_oom, ran_out
from anydevice._arrays.memory.stats import free_what_failed
from anydevice._arrays.move import is_array
from anydevice._arrays.trees.tree import flatten
from anydevice._machine.choose.scope import why
from anydevice._machine.engines.registry import owner_of
from anydevice._machine.settings import config as settings
from anydevice._plan.families import integer
from anydevice.errors import ConfigurationError

_Key = tuple[object, ...]
_found: dict[_Key, int] = {}


def find_batch_size(
    fn: Callable[[int], object], start: int, *, minimum: int = 1, again: bool = False
) -> int:
    """Return the first of `start`, `start // 2`, `start // 4`, … for which `fn` has enough memory.

    `fn(batch_size)` runs one batch, such as a training step. With an optimizer, the second step
    needs more memory than the first, so let it run two. Its result is synchronized and discarded.
    If it runs out of memory, with the error of any library or of anydevice, the size is halved; any
    other error is raised as it is. `start` is the largest size that is tried: if it is a power of
    two, so is the result.

    >>> import numpy
    >>> def step(size):
    ...     return numpy.ones(8**size, numpy.int8)
    >>> find_batch_size(step, start=16)
    8

    The memory of a failed try is freed before the next one, and libraries release their cached
    memory. For that, the local variables of the functions in the error's traceback are cleared.
    What `fn` has stored elsewhere stays: begin and end a training step with
    `optimizer.zero_grad(set_to_none=True)`, because a step that fails leaves its gradients on the
    model. Then memory use is the same afterwards as before.

    The answer is remembered for this function object, `start`, the device that `device()` chooses
    and the limit of `configure(memory=…)`, until the process ends: `fn` is not called again, unless
    `again=True`. A lambda in the call is a new function each time. The answer is not saved for
    later processes.

    Raises `OutOfMemoryError` if not even `minimum` fits.
    """
    if not callable(fn):
        raise ConfigurationError(
            f"find_batch_size: {fn!r} cannot be called; give it a function that takes a batch size "
            "and runs one batch of it",
            "fn",
        )
    least = integer("find_batch_size: minimum", minimum)
    size = integer("find_batch_size: start", start, least)
    chosen = why().device
    place = None if chosen is None else (str(chosen), chosen.engine)
    # A bound method is a new object at each access.
    identity = (id(fn.__self__), id(fn.__func__)) if ismethod(fn) else (id(fn), 0)
    key = (*identity, size, least, place, settings.current()[0].memory)
    if key in _found and not again:
        return _found[key]
    failed = False
    while (problem := _problem(fn, size)) is not None:
        failed = True
        free_what_failed()
        if size // 2 < least:
            try:
                raise_if_oom(problem, what=f"not even a batch of {size} fits", smaller=False)
            finally:
                del problem  # else the error may hold this frame, and this frame the error
        size //= 2
    if failed:
        free_what_failed()
    else:
        gc.collect()
    _remember(fn, key, size)
    return size


def _problem(fn: Callable[[int], object], size: int) -> BaseException | None:
    """The error of a try that ran out of memory, without its frames; `None` if it fits."""
    try:
        _finish(fn(size))
    except Exception as error:
        if ran_out(error) is None:
            raise
        clear_frames(error)
        return error.with_traceback(None)
    return None


def _finish(result: object) -> None:
    """Wait for arrays that are computed lazily: only then is it known that they fit."""
    values = [result] if is_array(result) else flatten(result, is_array)[0].values
    for value in values:
        owner = owner_of(value)
        assert owner is not None
        owner.finish([value])


def _remember(fn: Any, key: _Key, size: int) -> None:
    anchor = fn.__self__ if ismethod(fn) else fn
    try:
        # Another object may later have the same identity.
        weakref.finalize(anchor, _found.pop, key, None).atexit = False
    except TypeError:
        return
    _found[key] = size
