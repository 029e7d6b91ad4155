"""From an array to the code that serves it: one lookup by its type.

The tables are filled when a type is first met, from the engine that owns it. After that, nothing
is imported, opened or asked for, so that compilers can look through these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar, cast

from anydevice.core.dtypes import DType, as_dtype
from anydevice.core.hooks import reach
from anydevice.core.primitives import Primitives
from anydevice.engines.lookup import owner_of
from anydevice.errors import AnyDeviceError, ConfigurationError

Array = Any
"""An array of any library that has an engine."""

Op = TypeVar("Op", bound=Callable[..., Any])

# PyTorch's compiler guards what it reads of a table. It reads those by engine and not those by
# type, so that meeting another type later makes it compile nothing anew.
_engines: dict[type, str] = {}

# By the type of an array and then of its elements, the engine where those are of that kind, and
# no name where they are of another. Two steps and not one pair: some libraries' objects for
# element types are slow to compare, and a pair is compared as a whole.
_floating: dict[type, dict[Any, str]] = {}
_truths: dict[type, dict[Any, str]] = {}
_whole: dict[type, dict[Any, str]] = {}

_KINDS = ((_floating, ("float",)), (_truths, ("bool",)), (_whole, ("int", "uint")))

_primitives: dict[str, Primitives] = {}
_fused: dict[str, Mapping[str, Callable[..., Any]]] = {}

_ALSO_PRIMITIVES = ("matmul", "argmax", "top_k")
"""Ops that may have a version of the engine's own, and are a primitive where they have not."""

_ANY_OP = "any op"
"""Key of the whole-op compiler in an engine's table of fused ops."""

_Programs = dict[type, Callable[..., Any]]
_Program = Callable[[type], Callable[..., Any] | None]
_programs: list[tuple[Callable[..., Any], tuple[int, ...], _Programs]] = []


def public(op: Op, module: str, compiled: bool = False) -> Op:
    """The op as users call it: a library that runs out of memory raises `OutOfMemoryError`.

    Any other error passes through unchanged. Its module is given as `module`. A `compiled` op takes
    arrays, and an integer as `axis`; an engine that compiles runs it as one program.

    >>> def double(x):
    ...     return 2 * x
    >>> public(double, __name__)(4)
    8
    """
    code = op.__code__
    names = code.co_varnames[: code.co_argcount]
    call = _SHAPES[names](op, _program_of(op, names)) if compiled else _guarded(op)
    call = wraps(op)(call)
    call.__module__ = module
    return cast("Op", call)


def _guarded(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return op(*arguments, **named) if named else op(*arguments)
        except Exception as error:
            _explain(error, *arguments, *named.values())
            raise

    return call


# The ops that take least time have their parameters written out: forwarding `*arguments, **named`
# costs 0.1 µs more a call (bench/calling_ops.py).


def _of_one(op: Callable[..., Any], program: _Program) -> Callable[..., Any]:
    def call(x: Array) -> Array:
        try:
            whole = program(type(x))
            return op(x) if whole is None else whole(x)
        except Exception as error:
            _explain(error, x)
            raise

    return call


def _of_two(op: Callable[..., Any], program: _Program) -> Callable[..., Any]:
    def call(a: Array, b: Array) -> Array:
        try:
            whole = program(type(a))
            return op(a, b) if whole is None or type(b) is not type(a) else whole(a, b)
        except Exception as error:
            _explain(error, a, b)
            raise

    return call


def _of_three(op: Callable[..., Any], program: _Program) -> Callable[..., Any]:
    def call(condition: Array, a: Array, b: Array) -> Array:
        try:
            whole = program(type(condition))
            if whole is None or not type(a) is type(b) is type(condition):
                return op(condition, a, b)
            return whole(condition, a, b)
        except Exception as error:
            _explain(error, condition, a, b)
            raise

    return call


def _along_axis(op: Callable[..., Any], program: _Program) -> Callable[..., Any]:
    def call(x: Array, axis: int) -> Array:
        try:
            whole = program(type(x))
            return op(x, axis) if whole is None or type(axis) is not int else whole(x, axis)
        except Exception as error:
            _explain(error, x)
            raise

    call.__defaults__ = op.__defaults__
    return call


_SHAPES = {
    ("x",): _of_one,
    ("a", "b"): _of_two,
    ("condition", "a", "b"): _of_three,
    ("x", "axis"): _along_axis,
}


def _explain(error: Exception, *arguments: Any) -> None:
    if not isinstance(error, AnyDeviceError):
        from anydevice.memory.out_of_memory import refuse

        refuse(error, among=arguments)


def _program_of(op: Callable[..., Any], names: tuple[str, ...]) -> _Program:
    """A function from a type of arrays to the whole op as one compiled program, or `None`.

    The axis is a constant of the program. Its checks run when it is compiled, once for each shape
    and dtype. It takes arrays of exactly this type.
    """
    table: _Programs = {}
    _programs.append((op, (names.index("axis"),) if "axis" in names else (), table))

    def program(kind: type) -> Callable[..., Any] | None:
        return table.get(kind)

    program._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return program


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


def floats(x: Array) -> Primitives | None:
    """The primitives for an array of floating numbers; `None` for anything else.

    Also `None` where the type of the array is met for the first time, which `primitives` mends.
    """
    engine = _engine_of_floats(type(x), getattr(x, "dtype", None))
    return _primitives[engine] if engine else None


def floating(op: str, x: Array) -> Primitives:
    """The primitives for an array of floating-point numbers; any other is refused."""
    engine = _engine_of_floats(type(x), getattr(x, "dtype", None))
    return _primitives[engine or _settle_floats(x, op)]


def numeric(op: str, x: Array) -> Primitives:
    """The primitives for an array of numbers; a boolean one is refused."""
    engine = _engine_of_floats(type(x), getattr(x, "dtype", None))
    return _primitives[engine or _settle_numbers(x, op)]


def truth_values(x: Array) -> Primitives | None:
    """The same for an array of truth values."""
    engine = _engine_of_truths(type(x), getattr(x, "dtype", None))
    return _primitives[engine] if engine else None


def whole_numbers(x: Array) -> Primitives | None:
    """The same for an array of whole numbers."""
    engine = _engine_of_whole(type(x), getattr(x, "dtype", None))
    return _primitives[engine] if engine else None


def together(a: Array, b: Array) -> bool:
    """Whether two arrays, whose types were met before, are of one library."""
    engine = _engine_of(type(a))
    return engine is not None and engine == _engine_of(type(b))


def version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's own version of an op, or the definition where it has none.

    A version of the engine's own hands over to the definition by returning `NotImplemented`. Both
    take all arguments by place, in the order of the op's signature.
    """
    own = own_version(x, name, definition)
    return definition if own is definition else partial(_own_or_defined, own, definition)


def own_version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with nothing around it: the caller calls the definition on `NotImplemented`.

    An op that takes little time spends less of it here than in `version`.
    """
    return _fused[_engine_of(type(x)) or _settle(x, name)].get(name, definition)


def floating_version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """The same as `own_version`, for ops that take floating numbers; anything else is refused."""
    engine = _engine_of_floats(type(x), getattr(x, "dtype", None))
    return _fused[engine or _settle_floats(x, name)].get(name, definition)


def version_for_dtype(
    x: Array, dtype: Any, name: str, definition: Callable[..., Any]
) -> Callable[..., Any]:
    """The same as `floating_version`, where the caller has read the element type, or `None`."""
    engine = _engine_of_floats(type(x), dtype)
    return _fused[engine or _settle_floats(x, name)].get(name, definition)


def numeric_version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """The same as `own_version`, for ops that take all numbers, but no truth values."""
    engine = _engine_of_floats(type(x), getattr(x, "dtype", None))
    return _fused[engine or _settle_numbers(x, name)].get(name, definition)


def for_several_types(
    own: Callable[..., Any], definition: Callable[..., Any]
) -> Callable[..., Any]:
    """The version where the operands are of several element types: some are for one alone.

    Those say so themselves, by an attribute `of_one_type`.
    """
    return definition if getattr(own, "of_one_type", False) else own


def wrong_kind(op: str, dtype: DType, wanted: str) -> ConfigurationError:
    """The error for elements that an op does not take."""
    return ConfigurationError(f"{op}: this is an array of {dtype}, and it takes {wanted}", op)


def forget() -> None:
    """Empty the tables: every type is looked up anew."""
    _engines.clear()
    for table, _ in _KINDS:
        table.clear()
    for *_, programs in _programs:
        programs.clear()
    _primitives.clear()
    _fused.clear()


def _own_or_defined(
    own: Callable[..., Any], definition: Callable[..., Any], *arguments: Any
) -> Any:
    result = own(*arguments)
    return definition(*arguments) if result is NotImplemented else result


def _engine_of(kind: type) -> str | None:
    return _engines.get(kind)


def _engine_of_floats(kind: type, dtype: Any) -> str:
    """The engine of arrays of this type, where this is an element type of floating numbers."""
    try:
        return _floating[kind][dtype]
    except KeyError:
        return _learn(_floating, kind, dtype)


def _engine_of_truths(kind: type, dtype: Any) -> str:
    """The same for truth values."""
    try:
        return _truths[kind][dtype]
    except KeyError:
        return _learn(_truths, kind, dtype)


def _engine_of_whole(kind: type, dtype: Any) -> str:
    """The same for whole numbers."""
    try:
        return _whole[kind][dtype]
    except KeyError:
        return _learn(_whole, kind, dtype)


def _learn(asked: dict[type, dict[Any, str]], kind: type, dtype: Any) -> str:
    """Put an element type into the tables; what the one that was asked says of it."""
    engine = _engines.get(kind)
    if engine is None:
        return ""  # not for good: the type may be met yet
    here = ""
    with suppress(ConfigurationError):  # an element type that only this library has
        here = as_dtype(dtype).kind
    for table, kinds in _KINDS:
        table.setdefault(kind, {})[dtype] = engine if here in kinds else ""
    return asked[kind][dtype]


def _settle_floats(x: Array, op: str) -> str:
    """The name of the engine; the error where there is none, or these are no floating numbers."""
    engine = _engine_of(type(x)) or _settle(x, op)
    dtype = _primitives[engine].dtype(x)
    if dtype.kind != "float":
        raise wrong_kind(op, dtype, "floating numbers; use astype(x, 'float32')")
    return engine


def _settle_numbers(x: Array, op: str) -> str:
    """The name of the engine; the error where there is none, or these are truth values."""
    engine = _engine_of(type(x)) or _settle(x, op)
    dtype = _primitives[engine].dtype(x)
    if dtype.kind == "bool":
        raise wrong_kind(op, dtype, "numbers; use astype(x, 'int32')")
    return engine


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
        also = {name: getattr(engine.ops, name) for name in _ALSO_PRIMITIVES}
        _fused[engine.name] = {**also, **engine.fused}
        reach("trust_kernels")()
    _engines[type(x)] = engine.name
    one_program = _fused[engine.name].get(_ANY_OP)
    if one_program is not None and not engine.is_traced(x):
        for whole_op, numbers, programs in _programs:
            programs[type(x)] = one_program(whole_op, numbers)
    return engine.name


# PyTorch's compiler runs these while it looks through the caller, and keeps the answers.
_engine_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_engine_of_floats._dynamo_marked_constant = True  # type: ignore[attr-defined]
_engine_of_truths._dynamo_marked_constant = True  # type: ignore[attr-defined]
_engine_of_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]
_settle._dynamo_marked_constant = True  # type: ignore[attr-defined]
