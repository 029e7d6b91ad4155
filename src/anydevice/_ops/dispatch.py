"""Dispatch: the version of an op for an array, found by the array's type.

The tables are filled when a type is first met, from the engine that owns it. After that, nothing
is imported, opened or asked for, so that compilers can look through these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast

from anydevice._core.array import Array, ArrayT
from anydevice._core.dtypes import DType, as_dtype
from anydevice._core.engine import Absent
from anydevice._core.primitives import PrimitivesOf
from anydevice._machine.engines.registry import owner_of, row_of
from anydevice.errors import AnyDeviceError, ConfigurationError

Op = TypeVar("Op", bound=Callable[..., Any])
Result = TypeVar("Result")

_EnginesByDtype = dict[type, dict[Any, str]]

# PyTorch's compiler recompiles when an entry that it read changes. It reads the tables by engine,
# not those by type, so another type later causes no recompilation.
_engines: dict[type, str] = {}
_primitives: dict[str, PrimitivesOf[Any]] = {}
_fused: dict[str, Mapping[str, Callable[..., Any]]] = {}

# By the type of an array and then its dtype: the engine where the dtype is of that kind, else "".
# Two steps and not one pair: some libraries' dtypes are slow to compare, and a pair is compared as
# a whole.
_float_engines: _EnginesByDtype = {}
_bool_engines: _EnginesByDtype = {}
_integer_engines: _EnginesByDtype = {}

_BY_DTYPE = (
    (_float_engines, ("float",)),
    (_bool_engines, ("bool",)),
    (_integer_engines, ("int", "uint")),
)

_ALSO_PRIMITIVES = ("matmul", "argmax", "top_k")
"""Ops that may have a version of the engine's own, and are a primitive where they have not."""

_ANY_OP = "any op"
"""Key of the whole-op compiler in an engine's table of fused ops."""

_Programs = dict[type, Callable[..., Any]]
_programs: list[tuple[Callable[..., Any], tuple[int, ...], _Programs]] = []


def primitives(x: ArrayT, op: str = "ops", name: str = "") -> PrimitivesOf[ArrayT]:
    """Return the primitives of the engine whose array `x` is, traced arrays included.

    Raises `ConfigurationError` where `x` is not an array of an imported library; the message names
    the op and the argument.

    >>> x = numpy.ones((2, 3), numpy.float32)
    >>> primitives(x).sum(x, 1).tolist()
    [3.0, 3.0]
    """
    return _primitives[_engine_of(type(x)) or _register(x, op, name)]


def float_primitives(op: str, x: ArrayT) -> PrimitivesOf[ArrayT]:
    """Return the primitives for a floating-point array; refuse any other."""
    engine = _float_engine(type(x), getattr(x, "dtype", None))
    return _primitives[engine or _require_float(x, op)]


def number_primitives(op: str, x: ArrayT) -> PrimitivesOf[ArrayT]:
    """Return the primitives for an array of numbers; refuse booleans."""
    engine = _float_engine(type(x), getattr(x, "dtype", None))
    return _primitives[engine or _require_numbers(x, op)]


def known(x: ArrayT) -> PrimitivesOf[ArrayT] | None:
    """Return the primitives for an array whose type was met before; `None` for anything else."""
    engine = _engine_of(type(x))
    return None if engine is None else _primitives[engine]


def known_float(x: ArrayT) -> PrimitivesOf[ArrayT] | None:
    """Return the primitives for a floating-point array whose type was met before; else `None`."""
    engine = _float_engine(type(x), getattr(x, "dtype", None))
    return _primitives[engine] if engine else None


def known_bool(x: ArrayT) -> PrimitivesOf[ArrayT] | None:
    """Return the primitives for a boolean array whose type was met before; else `None`."""
    engine = _bool_engine(type(x), getattr(x, "dtype", None))
    return _primitives[engine] if engine else None


def known_integer(x: ArrayT) -> PrimitivesOf[ArrayT] | None:
    """Return the primitives for an integer array whose type was met before; else `None`."""
    engine = _integer_engine(type(x), getattr(x, "dtype", None))
    return _primitives[engine] if engine else None


def is_one_library(a: Array, b: Array) -> bool:
    """Whether two arrays, whose types were met before, are of one library."""
    engine = _engine_of(type(a))
    return engine is not None and engine == _engine_of(type(b))


def own_version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return the engine's own version of an op, or the definition where it has none."""
    return _fused[_engine_of(type(x)) or _register(x, name)].get(name, definition)


def float_version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return `own_version` for a floating-point array; refuse any other."""
    engine = _float_engine(type(x), getattr(x, "dtype", None))
    return _fused[engine or _require_float(x, name)].get(name, definition)


def version_for_dtype(
    x: Array, dtype: Any, name: str, definition: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `float_version` for an array whose dtype, or `None`, the caller has read."""
    engine = _float_engine(type(x), dtype)
    return _fused[engine or _require_float(x, name)].get(name, definition)


def number_version(x: Array, name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return `own_version` for an array of numbers; refuse booleans."""
    engine = _float_engine(type(x), getattr(x, "dtype", None))
    return _fused[engine or _require_numbers(x, name)].get(name, definition)


def version_for_mixed_dtypes(
    own: Callable[..., Any], definition: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the version for operands of several dtypes: not one with `of_one_dtype` set."""
    return definition if getattr(own, "of_one_dtype", False) else own


def run(own: Callable[..., Any], definition: Callable[..., Result], *arguments: Any) -> Result:
    """Call the engine's version, or the definition for `NotImplemented`; `explain` its errors."""
    try:
        result: Any = own(*arguments)
        return definition(*arguments) if result is NotImplemented else result
    except Exception as error:
        explain(error, **_arguments_by_name(definition, *arguments))
        raise


# The same with two and three arguments: not to forward `*arguments` saves 0.05 µs a call
# (bench/calling_ops.py).


def run2(own: Callable[..., Any], definition: Callable[..., Result], a: Any, b: Any) -> Result:
    """Call as `run` does, with two arguments."""
    try:
        result: Any = own(a, b)
        return definition(a, b) if result is NotImplemented else result
    except Exception as error:
        explain(error, **_arguments_by_name(definition, a, b))
        raise


def run3(
    own: Callable[..., Any], definition: Callable[..., Result], a: Any, b: Any, c: Any
) -> Result:
    """Call as `run` does, with three arguments."""
    try:
        result: Any = own(a, b, c)
        return definition(a, b, c) if result is NotImplemented else result
    except Exception as error:
        explain(error, **_arguments_by_name(definition, a, b, c))
        raise


def run_primitive(primitive: Callable[..., Result], *arguments: Any) -> Result:
    """Call a primitive; errors of its library are explained, as by `explain`."""
    try:
        return primitive(*arguments)
    except Exception as error:
        explain(error, **_arguments_by_name(primitive, *arguments))
        raise


def explain(error: Exception, **arguments: Any) -> None:
    """Raise our own error if a library's error means the same; else return."""
    if isinstance(error, AttributeError):
        for name, xp in _primitives.items():
            if error.obj is xp:
                what = f"{row_of(name).label} has no {error.name}"
                raise Absent(what, "use other ops").error() from error
    if not isinstance(error, AnyDeviceError):
        from anydevice._arrays.memory.out_of_memory import raise_if_oom
        from anydevice._arrays.move import refuse_mismatch

        raise_if_oom(error, among=tuple(arguments.values()))
        refuse_mismatch(error, **arguments)


def _arguments_by_name(definition: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return the arguments by the names that they have in the definition of an op."""
    code = getattr(definition, "__code__", None)  # a function of a library may have none
    names = code.co_varnames[: code.co_argcount] if code else ()
    if hasattr(definition, "__self__"):  # a primitive, a method of its engine
        names = names[1:]
    return dict(zip(names or ("x", "y", "z"), arguments, strict=False))


def type_name(kind: type) -> str:
    """Return the name of a type with its module, except for Python's own types.

    >>> type_name(int)
    'int'
    """
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def wrong_dtype(op: str, dtype: DType, wanted: str) -> ConfigurationError:
    """Return the error for an array whose dtype an op does not take."""
    return ConfigurationError(f"{op}: this is an array of {dtype}, and the op takes {wanted}", op)


def compiled(op: Op) -> Op:
    """Let an engine that compiles run the whole op, checks included, as one program.

    It takes arrays, and an integer as `axis`. Errors of its library are explained, as by `explain`.

    >>> def double(x):
    ...     return 2 * x
    >>> compiled(double)(4)
    8
    """
    code = op.__code__
    names = code.co_varnames[: code.co_argcount]
    programs: _Programs = {}
    _programs.append((op, (names.index("axis"),) if "axis" in names else (), programs))

    def program(kind: type) -> Callable[..., Any] | None:
        """Return the whole op as one program for this type; its checks run when it is compiled."""
        return programs.get(kind)

    program._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast("Op", wraps(op)(_WRAPPERS[names](op, program)))


# Parameters are written out: forwarding `*arguments, **named` costs 0.1 µs more a call
# (bench/calling_ops.py).


def _of_one(op: Callable[..., Any], program: Callable[[type], Any]) -> Callable[..., Any]:
    def call(x: Array) -> Array:
        try:
            whole = program(type(x))
            return op(x) if whole is None else whole(x)
        except Exception as error:
            explain(error, x=x)
            raise

    return call


def _of_two(op: Callable[..., Any], program: Callable[[type], Any]) -> Callable[..., Any]:
    def call(a: Array, b: Array) -> Array:
        try:
            whole = program(type(a))
            return op(a, b) if whole is None or type(b) is not type(a) else whole(a, b)
        except Exception as error:
            explain(error, a=a, b=b)
            raise

    return call


def _of_three(op: Callable[..., Any], program: Callable[[type], Any]) -> Callable[..., Any]:
    def call(condition: Array, a: Array, b: Array) -> Array:
        try:
            whole = program(type(condition))
            if whole is None or not type(a) is type(b) is type(condition):
                return op(condition, a, b)
            return whole(condition, a, b)
        except Exception as error:
            explain(error, condition=condition, a=a, b=b)
            raise

    return call


def _along_axis(op: Callable[..., Any], program: Callable[[type], Any]) -> Callable[..., Any]:
    def call(x: Array, axis: int) -> Array:
        try:
            whole = program(type(x))
            return op(x, axis) if whole is None or type(axis) is not int else whole(x, axis)
        except Exception as error:
            explain(error, x=x)
            raise

    call.__defaults__ = op.__defaults__
    return call


_WRAPPERS = {
    ("x",): _of_one,
    ("a", "b"): _of_two,
    ("condition", "a", "b"): _of_three,
    ("x", "axis"): _along_axis,
}


def forget() -> None:
    """Empty the tables: every type is looked up again."""
    _engines.clear()
    _primitives.clear()
    _fused.clear()
    for table, _ in _BY_DTYPE:
        table.clear()
    for *_, programs in _programs:
        programs.clear()


def _engine_of(kind: type) -> str | None:
    return _engines.get(kind)


def _finder(table: _EnginesByDtype) -> Callable[[type, Any], str]:
    """Return the lookup of an engine in one of the tables by type and dtype."""

    def engine(kind: type, dtype: Any) -> str:
        try:
            return table[kind][dtype]
        except KeyError:
            _add_dtype(kind, dtype)
            return table.get(kind, {}).get(dtype, "")

    engine._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return engine


_float_engine, _bool_engine, _integer_engine = (_finder(table) for table, _ in _BY_DTYPE)


def _add_dtype(kind: type, dtype: Any) -> None:
    """Put a dtype into the tables, where the type of the array was met before."""
    engine = _engines.get(kind)
    if engine is None:
        return
    dtype_kind = ""
    with suppress(ConfigurationError):  # a dtype that only this library has
        dtype_kind = as_dtype(dtype).kind
    for table, kinds in _BY_DTYPE:
        table.setdefault(kind, {})[dtype] = engine if dtype_kind in kinds else ""


def _require_float(x: Array, op: str) -> str:
    """Return the engine of a floating-point array; refuse any other."""
    engine = _engine_of(type(x)) or _register(x, op)
    dtype = _primitives[engine].dtype(x)
    if dtype.kind != "float":
        raise wrong_dtype(op, dtype, "floating-point numbers; use astype(x, 'float32')")
    return engine


def _require_numbers(x: Array, op: str) -> str:
    """Return the engine of an array of numbers; refuse booleans."""
    engine = _engine_of(type(x)) or _register(x, op)
    dtype = _primitives[engine].dtype(x)
    if dtype.kind == "bool":
        raise wrong_dtype(op, dtype, "numbers; use astype(x, 'int32')")
    return engine


def _register(x: Array, op: str, argument: str = "") -> str:
    """Fill the tables for the type of `x`; return the name of its engine."""
    kind, engine = type(x), owner_of(x)
    if engine is None:
        named = argument if argument.isidentifier() else "x"
        raise ConfigurationError(
            f"{op}: {argument or 'this'} is not an array, but of type {type_name(kind)}; "
            f"convert it with numpy.asarray({named}), and move it with "
            f"anydevice.to_device({named}, device)",
            source=op,
        )
    if engine.name not in _primitives:
        from anydevice._ops.trusted_kernels import load_trusted

        _primitives[engine.name] = engine.ops
        also = {name: getattr(engine.ops, name) for name in _ALSO_PRIMITIVES}
        _fused[engine.name] = {**also, **engine.fused}
        load_trusted()
    _engines[kind] = engine.name
    compile_op = _fused[engine.name].get(_ANY_OP)
    if compile_op is not None and not engine.is_traced(x):
        for op_, constants, programs in _programs:
            programs[kind] = compile_op(op_, constants)
    return engine.name


# PyTorch's compiler runs these while it looks through the caller, and keeps the answers.
_engine_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
_register._dynamo_marked_constant = True  # type: ignore[attr-defined]
