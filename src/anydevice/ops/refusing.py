"""Ops that say in our words that a library ran out of memory.

Every call of an op passes here, so each gets a wrapper with exactly its own parameters: calling it
costs a third of what passing them on as `*arguments, **named` does, and compilers see through it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

from anydevice.core.late import reach
from anydevice.errors import AnyDeviceError
from anydevice.ops.dispatch import programs_of

Op = TypeVar("Op", bound=Callable[..., Any])
_Maker = Callable[[Callable[..., Any], Callable[[type], Any] | None], Callable[..., Any]]

_TAKEN = frozenset(
    {
        "op",
        "program",
        "whole",
        "kind",
        "type",
        "int",
        "error",
        "refuse",
        "AnyDeviceError",
        "Exception",
    }
)
"""The names that the wrapper has itself, which no parameter may have."""

_WRAPPER = """\
def maker(op, program):
    def refusing({parameters}):
        try:{program}
            return op({passed})
        except AnyDeviceError:
            raise
        except Exception as error:
            refuse(error, ({given}))
            raise
    return refusing
"""

_PROGRAM = """
            kind = type({first})
            whole = program(kind)
            if whole is not None and {tests}:
                return whole({passed})"""
"""Where the arrays are of one type: its program of the op, if there is one."""


def refusing(op: Op, module: str, numbers: tuple[str, ...] | None = None) -> Op:
    """The op as users call it: where its library runs out of memory, that is our error.

    It is known by the name that it has in `module`. Anything else that is raised passes through.
    `numbers` says that all parameters are arrays, but for those of these names, which are whole
    numbers; libraries that compile run such an op as one program.

    >>> def double(x):
    ...     return 2 * x
    >>> refusing(double, __name__)(4)
    8
    """
    names = op.__code__.co_varnames
    program = None if numbers is None else programs_of(op, tuple(map(names.index, numbers)))
    wrapper: Any = wraps(op)(_maker(op.__code__, numbers)(_by_place(op), program))
    wrapper.__defaults__ = op.__defaults__
    wrapper.__kwdefaults__ = op.__kwdefaults__
    wrapper.__module__ = module
    return cast("Op", wrapper)


def _by_place(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with all of its parameters by place: to pass one by name takes twice as long."""
    code = op.__code__
    if not code.co_kwonlyargcount:
        return op
    count = code.co_argcount + code.co_kwonlyargcount
    by_place = code.replace(co_argcount=count, co_kwonlyargcount=0)
    return FunctionType(by_place, op.__globals__, op.__name__, None, op.__closure__)


def _refuse(error: Exception, arguments: tuple[Any, ...]) -> None:
    reach("refuse")(error, among=arguments)


def _maker(code: CodeType, numbers: tuple[str, ...] | None) -> _Maker:
    """What wraps a function that has these parameters."""
    assert not code.co_flags & (CO_VARARGS | CO_VARKEYWORDS), "an op names all of its parameters"
    by_place = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    taken = _TAKEN.intersection((*by_place, *named))
    assert not taken, f"a parameter of an op is not called {', '.join(sorted(taken))}"
    return _compiled(by_place, named, code.co_posonlyargcount, numbers)


@cache
def _compiled(
    by_place: tuple[str, ...],
    named: tuple[str, ...],
    without_name: int,
    numbers: tuple[str, ...] | None,
) -> _Maker:
    parameters = [*by_place, *(("*", *named) if named else ())]
    if without_name:
        parameters.insert(without_name, "/")
    passed = ", ".join((*by_place, *named))
    program = ""
    if numbers is not None:
        first, *others = (name for name in by_place if name not in numbers)
        tests = [f"type({name}) is kind" for name in others]
        tests += [f"type({name}) is int" for name in numbers]
        program = _PROGRAM.format(first=first, passed=passed, tests=" and ".join(tests) or "True")
    text = _WRAPPER.format(
        parameters=", ".join(parameters),
        program=program,
        passed=passed,
        given=f"{passed},",
    )
    names: dict[str, Any] = {"AnyDeviceError": AnyDeviceError, "refuse": _refuse}
    exec(compile(text, "<anydevice.ops>", "exec"), names)
    maker: _Maker = names["maker"]
    return maker
