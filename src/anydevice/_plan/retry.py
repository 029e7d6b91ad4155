"""Retry when memory runs out: with a smaller batch (`find_batch_size`) or on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, ismethod
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

from anydevice._arrays.memory.out_of_memory import (
    as_oom_error,
    clear_frames,
    in_a_line,
    raise_if_oom,
    ran_out,
)
from anydevice._arrays.memory.stats import free_what_failed
from anydevice._arrays.move import device_of, is_array, to_device
from anydevice._arrays.trees.tree import flatten
from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.finding import Reason
from anydevice._core.record import Record
from anydevice._core.text import warn
from anydevice._machine.choose.scope import use_device, why
from anydevice._machine.engines.registry import owner_of
from anydevice._machine.settings import config as settings
from anydevice._plan.families import integer
from anydevice.errors import AnyDeviceWarning, ConfigurationError, DeviceMismatchError

P = ParamSpec("P")
T = TypeVar("T")
Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""A function with the arguments of one call."""

_CPU = "cpu"


def cpu_fallback(fn: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it falls back to the CPU if its device runs out of memory.

    For the second try every array among the arguments is moved to the CPU, as `to_device` does, in
    a `use_device("cpu")` block; the result stays on the CPU. For a method or a model, the object's
    own arrays are moved too. Models and optimizers that are moved in place, such as a
    `torch.nn.Module`, are moved back afterwards: a backward pass has to be part of the function. If
    they no longer fit, because they have gained gradients, all of them stay on the CPU, with a
    warning. Global and captured arrays are not moved. The first fallback warns with the reason.

    >>> @cpu_fallback
    ... def total(x):
    ...     return x.sum()
    >>> float(total(numpy.ones(3)))
    3.0

    A coroutine function works too, a generator function does not. An error other than running out
    of memory is raised as it is, and so is any error of the second try, with a note of the first
    one. Raises `OutOfMemoryError` if the CPU's memory ran out.
    """
    if not callable(fn):
        raise ConfigurationError(
            f"cpu_fallback takes a function, a method or a model, not {fn!r}", "fn"
        )
    if isgeneratorfunction(fn) or isasyncgenfunction(fn):
        raise ConfigurationError(
            f"cpu_fallback does not take generators such as {_name(fn)}: a call that is not "
            "finished when it returns cannot be tried again",
            "fn",
        )
    warned: list[str] = []

    def prepare(failure: _Failure) -> None:
        free_what_failed()
        if not warned:
            warned.append(failure.message)
            reason = Reason("out_of_memory", failure.message.splitlines()[0])
            warn(AnyDeviceWarning(f"{_name(fn)} runs on the CPU: {reason}", [reason]))

    # `updated=()` below: the `__dict__` of a model has all of its parameters.
    if iscoroutinefunction(fn):

        async def awaited(*arguments: Any, **named: Any) -> Any:
            try:
                return await fn(*arguments, **named)
            except Exception as error:
                failure = _failure(error, (fn, arguments, named))
                if failure is None:
                    raise
            prepare(failure)
            with _on_the_cpu((fn, arguments, named), failure) as (function, given, options):
                return await function(*given, **options)

        return cast("Callable[P, T]", wraps(fn, updated=())(awaited))

    def falling_back(*arguments: P.args, **named: P.kwargs) -> Any:
        try:
            return fn(*arguments, **named)
        except Exception as error:
            failure = _failure(error, (fn, arguments, named))
            if failure is None:
                raise
        prepare(failure)
        with _on_the_cpu((fn, arguments, named), failure) as (function, given, options):
            return function(*given, **options)

    return cast("Callable[P, T]", wraps(fn, updated=())(falling_back))


class _Failure(Record):
    """Why the first try failed, without the error, which would keep its arrays alive."""

    message: str
    engine: str | None


def _failure(error: Exception, call: Call) -> _Failure | None:
    """Return why to try again; `None` if memory did not run out. Raise if the CPU's ran out."""
    shortage = ran_out(error)
    if shortage is None:
        return None
    ours = as_oom_error(error, _device_of_call(call))
    assert ours is not None
    if ours.device is not None and ours.device.backend == _CPU:
        try:
            raise ours
        finally:
            del ours, error
    return _Failure(str(ours), shortage.engine.name if shortage.engine else None)


def _device_of_call(call: Call) -> Device | None:
    """Return the device of the first array off the CPU, else the current device."""
    devices = map(_device_of, flatten(_parts(call), is_array)[0].values)
    accelerators = (device for device in devices if device and device.backend != _CPU)
    return next(accelerators, None) or why().device


@contextmanager
def _on_the_cpu(call: Call, failure: _Failure) -> Iterator[Call]:
    """Yield the same call on the CPU; afterwards, move objects that changed in place back."""
    engine = failure.engine if failure.engine in BACKENDS[_CPU].engines else None
    parts = _parts(call)
    leaves, _ = flatten(parts, is_array)
    places = {leaf.path: _device_of(leaf.value) for leaf in leaves if leaf.kept}
    devices = {path: device for path, device in places.items() if device is not None}
    try:
        with use_device(_CPU, engine=engine, native=True):
            # As NumPy's: so arrays of any library that can live there stay in it.
            owner, arguments, named = to_device(parts, Device(_CPU, engine="numpy"))
            fn = call[0]
            yield MethodType(fn.__func__, owner) if ismethod(fn) else owner, arguments, named
    except Exception as error:
        error.add_note(f"this was the second try, on the CPU; the first one: {failure.message}")
        raise
    finally:
        if devices:
            _put_back(parts, devices)


def _parts(call: Call) -> Call:
    """Return the call as a tree, with the object of a method in place of the method."""
    fn, arguments, named = call
    return fn.__self__ if ismethod(fn) else fn, arguments, named


def _device_of(value: Any) -> Device | None:
    try:
        return device_of(value)
    except DeviceMismatchError:  # an array that is spread over several devices
        return None


def _put_back(parts: Call, devices: Mapping[str, Device]) -> None:
    """Move objects that changed in place back with new leaves; if they do not fit, warn."""
    try:
        leaves, rebuild = flatten(parts, is_array)
        values = list(leaves.values)
        first = next(iter(devices.values()))
        for number, leaf in enumerate(leaves):
            if leaf.kept:
                own = devices.get(leaf.path) or devices.get(leaf.path.removesuffix(".grad"))
                values[number] = to_device(leaf.value, own or first)
        rebuild(values)  # only now is anything changed, and nothing is allocated for it
    except Exception as error:
        problem = in_a_line(error)
        free_what_failed()
        warn(
            f"what was moved to the CPU stays there, because it could not go back to "
            f"{', '.join(dict.fromkeys(map(str, devices.values())))}: {problem}; move it with "
            "to_device(…) once there is memory",
        )


def _name(fn: Any) -> str:
    return f"{getattr(fn, '__qualname__', None) or type(fn).__qualname__}()"


_Key = tuple[object, ...]
_sizes: dict[_Key, int] = {}
"""Answers of `find_batch_size`."""


def find_batch_size(
    fn: Callable[[int], object], start: int, *, minimum: int = 1, again: bool = False
) -> int:
    """Return the first of `start`, `start // 2`, `start // 4`, … for which `fn` has enough memory.

    `fn(batch_size)` runs one batch, such as a training step. With an optimizer, the second step
    needs more memory than the first, so let it run two. Its result is synchronized and discarded.
    If it runs out of memory, with the error of any library or of anydevice, the size is halved; any
    other error is raised as it is. `start` is the largest size that is tried: if it is a power of
    two, so is the result.

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
    if key in _sizes and not again:
        return _sizes[key]
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
    """Return the error of a try that ran out of memory, without its frames; `None` if it fits."""
    try:
        result = fn(size)
        # Only when lazy arrays are computed is it known that they fit.
        for value in [result] if is_array(result) else flatten(result, is_array)[0].values:
            owner = owner_of(value)
            assert owner is not None
            owner.finish([value])
    except Exception as error:
        if ran_out(error) is None:
            raise
        clear_frames(error)
        return error.with_traceback(None)
    return None


def _remember(fn: Any, key: _Key, size: int) -> None:
    anchor = fn.__self__ if ismethod(fn) else fn
    try:
        # Another object may later have the same identity.
        weakref.finalize(anchor, _sizes.pop, key, None).atexit = False
    except TypeError:
        return
    _sizes[key] = size
