"""`cpu_fallback`: a function that falls back to the CPU if its device runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, ismethod
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

from anydevice._arrays.memory.out_of_memory import as_oom_error, in_a_line, ran_out
from anydevice._arrays.memory.stats import free_what_failed
from anydevice._arrays.move import device_of, is_array, to_device
from anydevice._arrays.trees.tree import flatten
from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.finding import Reason
from anydevice._core.record import Record
from anydevice._core.text import warn
from anydevice._machine.choose.scope import use_device, why
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

    >>> import numpy
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
            warned.append(failure.said)
            reason = Reason("out_of_memory", failure.said.splitlines()[0])
            warn(AnyDeviceWarning(f"{_name(fn)} runs on the CPU: {reason}", [reason]))

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

        return cast("Callable[P, T]", _wrap(awaited, fn))

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

    return cast("Callable[P, T]", _wrap(falling_back, fn))


class _Failure(Record):
    """Why the first try failed, without the error, which would keep its arrays alive."""

    said: str
    engine: str | None


def _failure(error: Exception, call: Call) -> _Failure | None:
    """Why to try again; `None` if memory did not run out. Raises where it was the CPU's."""
    found = ran_out(error)
    if found is None:
        return None
    ours = as_oom_error(error, _device_of_call(call))
    assert ours is not None
    if ours.device is not None and ours.device.backend == _CPU:
        try:
            raise ours
        finally:
            del ours, error
    return _Failure(str(ours), found.engine.name if found.engine else None)


def _device_of_call(call: Call) -> Device | None:
    """The device of the call: that of its first array off the CPU, else the current device."""
    places = map(_device_of, flatten(_parts(call), is_array)[0].values)
    elsewhere = (place for place in places if place is not None and place.backend != _CPU)
    return next(elsewhere, None) or why().device


@contextmanager
def _on_the_cpu(call: Call, failure: _Failure) -> Iterator[Call]:
    """A block with the same call on the CPU; what was moved in place is back after it."""
    engine = failure.engine if failure.engine in BACKENDS[_CPU].engines else None
    parts = _parts(call)
    devices = _devices_of(parts)
    try:
        with use_device(_CPU, engine=engine, native=True):
            # As NumPy's: so arrays of any library that can live there stay in it.
            owner, arguments, named = to_device(parts, Device(_CPU, engine="numpy"))
            fn = call[0]
            yield MethodType(fn.__func__, owner) if ismethod(fn) else owner, arguments, named
    except Exception as error:
        error.add_note(f"this was the second try, on the CPU; the first one: {failure.said}")
        raise
    finally:
        if devices:
            _put_back(parts, devices)


def _parts(call: Call) -> Call:
    """The call as a tree, with the object of a method in place of the method."""
    fn, arguments, named = call
    return fn.__self__ if ismethod(fn) else fn, arguments, named


def _devices_of(parts: Call) -> dict[str, Device]:
    """The devices, by path, of the arrays whose objects would be changed in place."""
    leaves, _ = flatten(parts, is_array)
    devices = {leaf.path: _device_of(leaf.value) for leaf in leaves if leaf.kept}
    return {path: device for path, device in devices.items() if device is not None}


def _device_of(value: Any) -> Device | None:
    try:
        return device_of(value)
    except DeviceMismatchError:  # an array that is spread over several devices
        return None


def _put_back(parts: Call, devices: Mapping[str, Device]) -> None:
    """Move what was moved in place back, with what it has gained meanwhile; all of it or nothing.

    Its device has just run out of memory. If it does not fit there, that is a warning: the result
    matters more than where the model is.
    """
    try:
        _move_back(parts, devices)
    except Exception as error:
        problem = in_a_line(error)
        free_what_failed()
        warn(
            f"what was moved to the CPU stays there, because it could not go back to "
            f"{', '.join(dict.fromkeys(map(str, devices.values())))}: {problem}; move it with "
            "to_device(…) once there is memory",
        )


def _move_back(parts: Call, devices: Mapping[str, Device]) -> None:
    leaves, rebuild = flatten(parts, is_array)
    values = list(leaves.values)
    first = next(iter(devices.values()))
    for number, leaf in enumerate(leaves):
        if leaf.kept:
            device = devices.get(leaf.path) or devices.get(leaf.path.removesuffix(".grad")) or first
            values[number] = to_device(leaf.value, device)
    rebuild(values)  # only now is anything changed, and nothing is allocated for it


def _wrap(wrapper: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    # Not what is in its `__dict__`: of a model that would be all of its parameters.
    return wraps(fn, updated=())(wrapper)


def _name(fn: Any) -> str:
    return f"{getattr(fn, '__qualname__', None) or type(fn).__qualname__}()"
