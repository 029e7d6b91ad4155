"""From an array to the code that serves it: one lookup by its type.

The tables are filled when a type is first met, from the engine that owns it. After that, nothing
is imported, opened or asked for, so that compilers can look through these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from anydevice.core.late import reach
from anydevice.core.primitives import Primitives
from anydevice.engines.ownership import owner_of
from anydevice.errors import ConfigurationError

Array = Any
"""An array of any library that has an engine."""

# PyTorch's compiler guards what it reads of a table. It reads those by engine and not the one by
# type, so that meeting another type later makes it compile nothing anew.
_engines: dict[type, str] = {}
_primitives: dict[str, Primitives] = {}
_fused: dict[str, Mapping[str, Callable[..., Any]]] = {}


def primitives(x: Array, op: str = "ops", name: str = "") -> Primitives:
    """The primitives of the engine whose array `x` is, traced arrays included.

    Raises `ConfigurationError` where `x` is not an array of an imported library; it names the op
    and what the argument is called there.

    >>> import numpy
    >>> x = numpy.ones((2, 3), numpy.float32)
    >>> primitives(x).sum(x, 1).tolist()
    [3.0, 3.0]
    """
    return _primitives[_engine_of(type(x)) or _settle(x, op, name)]


def known(x: Array) -> Primitives | None:
    """The primitives for an array whose type was met before; `None` for anything else."""
    engine = _engine_of(type(x))
    return None if engine is None else _primitives[engine]


def version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's own version of an op, or the definition where it has none.

    A version of the engine's own hands over to the definition by returning `NotImplemented`. Both
    take all arguments by place, in the order of the op's signature.
    """
    own = _fused[_engine_of(type(x)) or _settle(x, name)].get(name)
    return definition if own is None else partial(_own_or_defined, own, definition)


def forget() -> None:
    """Empty the tables: every type is looked up anew."""
    _engines.clear()
    _primitives.clear()
    _fused.clear()


def _own_or_defined(
    own: Callable[..., Any], definition: Callable[..., Any], *arguments: Any
) -> Any:
    result = own(*arguments)
    return definition(*arguments) if result is NotImplemented else result


def _engine_of(kind: type) -> str | None:
    return _engines.get(kind)


def _settle(x: Array, op: str, argument: str = "") -> str:
    """Fill the tables for the type of `x`; the name of its engine."""
    engine = owner_of(x)
    if engine is None:
        kind = type(x)
        name = (
            kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        )
        x_there = argument if argument.isidentifier() else "x"
        raise ConfigurationError(
            f"{op}: {argument or 'this'} is no array, but of type {name}; make it one with "
            f"numpy.asarray({x_there}), and place it with anydevice.to_device({x_there}, device)",
            source=op,
        )
    if engine.name not in _primitives:
        _primitives[engine.name] = engine.ops
        _fused[engine.name] = engine.fused
        reach("trust_kernels")()
    _engines[type(x)] = engine.name
    return engine.name


# PyTorch's compiler runs these while it looks through the caller, and keeps the answers.
_engine_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_settle._dynamo_marked_constant = True  # type: ignore[attr-defined]
