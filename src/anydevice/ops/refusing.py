"""Ops that say in our words that a library ran out of memory.

Every call of an op passes here, so each gets a wrapper with exactly its own parameters: calling it
costs a third of what passing them on as `*arguments, **named` does, and compilers see through it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any, TypeVar, cast

from anydevice.core.late import reach
from anydevice.errors import AnyDeviceError

Op = TypeVar("Op", bound=Callable[..., Any])
_Maker = Callable[[Callable[..., Any]], Callable[..., Any]]

_TAKEN = frozenset({"op", "error", "refuse", "AnyDeviceError", "Exception"})
"""The names that the wrapper has itself, which no parameter may have."""

_WRAPPER = """\
def maker(op):
    def refusing({parameters}):
        try:
            return op({passed})
        except AnyDeviceError:
            raise
        except Exception as error:
            refuse(error, ({given}))
            raise
    return refusing
"""


def refusing(op: Op, module: str) -> Op:
    """The op as users call it: where its library runs out of memory, that is our error.

    It is known by the name that it has in `module`. Anything else that is raised passes through.

    >>> def double(x):
    ...     return 2 * x
    >>> refusing(double, __name__)(4)
    8
    """
    wrapper: Any = wraps(op)(_maker(op.__code__)(op))
    wrapper.__defaults__ = op.__defaults__
    wrapper.__kwdefaults__ = op.__kwdefaults__
    wrapper.__module__ = module
    return cast("Op", wrapper)


def _refuse(error: Exception, arguments: tuple[Any, ...]) -> None:
    reach("refuse")(error, among=arguments)


def _maker(code: CodeType) -> _Maker:
    """What wraps a function that has these parameters."""
    assert not code.co_flags & (CO_VARARGS | CO_VARKEYWORDS), "an op names all of its parameters"
    by_place = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    taken = _TAKEN.intersection((*by_place, *named))
    assert not taken, f"a parameter of an op is not called {', '.join(sorted(taken))}"
    return _compiled(by_place, named, code.co_posonlyargcount)


@cache
def _compiled(by_place: tuple[str, ...], named: tuple[str, ...], without_name: int) -> _Maker:
    parameters = [*by_place, *(("*", *named) if named else ())]
    if without_name:
        parameters.insert(without_name, "/")
    text = _WRAPPER.format(
        parameters=", ".join(parameters),
        passed=", ".join((*by_place, *(f"{name}={name}" for name in named))),
        given=", ".join((*by_place, *named)) + ",",
    )
    names: dict[str, Any] = {"AnyDeviceError": AnyDeviceError, "refuse": _refuse}
    exec(compile(text, "<anydevice.ops>", "exec"), names)
    maker: _Maker = names["maker"]
    return maker
