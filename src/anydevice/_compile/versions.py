"""The program of one kind of call: its signature, and the compilers to try, fastest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

from anydevice._arrays.memory.out_of_memory import ran_out
from anydevice._arrays.move import destination_of
from anydevice._arrays.trees.containers import without_tables
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.engine import Absent, Engine
from anydevice._core.record import Record
from anydevice._libraries.base import Arguments
from anydevice._libraries.precision import cast
from anydevice._libraries.registry import part
from anydevice._machine.engines.registry import owner_of
from anydevice._machine.settings import config as settings
from anydevice.errors import AnyDeviceError, ConfigurationError

Function = Callable[..., Any]
Compiler = tuple[str, Callable[..., Function]]
"""How a compiled function runs, as text, and the function that compiles it."""

KeyFunction = Callable[[Any], Hashable]
Path = tuple[Any, ...]

AS_WRITTEN = "run as written"
_TURNED_OFF = f"compiling is turned off by configure(jit=False) or a file. It is {AS_WRITTEN}"
_EXPLANATION = "Explanation: "
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


class StaticInput(Record):
    """An input that is no array. 1, 1.0 and True differ; NaN equals NaN.

    >>> StaticInput(1) == StaticInput(True), StaticInput(float("nan")) == StaticInput(float("nan"))
    (False, True)
    """

    value: Any

    def changed(self) -> StaticInput:
        """Return another number for a floating one, and anything else unchanged."""
        return StaticInput(self.value * 0.75) if isinstance(self.value, float) else self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticInput) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


class CallSignature(Record):
    """The tree of a call's inputs with its static values; `is_plain` without any structure."""

    structure: Any
    constants: tuple[tuple[int, StaticInput], ...]
    count: int
    is_plain: bool = False

    def filled(self, arrays: Sequence[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs, by position and by name, with these arrays."""
        if self.is_plain:
            return tuple(arrays), {}
        static, rest = dict(self.constants), iter(arrays)
        values = [
            static[place].value if place in static else next(rest) for place in range(self.count)
        ]
        given, named = _unflatten(self.structure, iter(values))
        return tuple(given), dict(named)


def split_inputs(
    inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[CallSignature, list[Array]]:
    """Split a call into its signature and its arrays.

    >>> signature, arrays = split_inputs([{"x": numpy.ones(2), "mask": None}], {"scale": 3})
    >>> len(arrays), signature.filled(["an array"])
    (1, (({'x': 'an array', 'mask': None},), {'scale': 3}))

    Raises `ConfigurationError` for anything but arrays, numbers and texts in dicts, lists and
    tuples.
    """
    leaves: list[tuple[Path, Any]] = []
    structure = _structure((tuple(inputs), dict(sorted(named.items()))), (), leaves)
    arrays: list[Array] = []
    constants: list[tuple[int, StaticInput]] = []
    for place, (path, leaf) in enumerate(leaves):
        value = without_tables(leaf)
        if owner_of(value) is not None:
            arrays.append(value)
        elif isinstance(value, _CONSTANTS):
            constants.append((place, StaticInput(value)))
        else:
            raise ConfigurationError(
                f"{_path_text(path)} is a {type(value).__module__}.{type(value).__qualname__}; "
                "a compiled model takes arrays, numbers and texts, in dicts, lists and tuples",
                source="inputs",
            )
    is_plain = not named and len(arrays) == len(inputs) and all(map(is_, arrays, inputs))
    return CallSignature(structure, tuple(constants), len(leaves), is_plain), arrays


def _structure(tree: Any, path: Path, leaves: list[tuple[Path, Any]]) -> Any:
    """Return the tree without its leaves, as a value that can be compared and hashed."""
    if isinstance(tree, dict):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        parts = [(key, _structure(tree[key], (*path, key), leaves)) for key in tree]
        return kind, tuple(parts)
    if isinstance(tree, list | tuple):
        parts = []
        for at, part in enumerate(tree):
            parts.append(_structure(part, (*path, at), leaves))
        return type(tree), tuple(parts)
    leaves.append((path, tree))
    return None


def _unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    kind, parts = structure
    if issubclass(kind, dict):
        return kind((key, _unflatten(part, leaves)) for key, part in parts)
    values = [_unflatten(part, leaves) for part in parts]
    return kind._make(values) if hasattr(kind, "_make") else kind(values)


def _path_text(path: Path) -> str:
    side, name, *steps = path
    start = f"{name}=" if side == 1 else f"input {name}"
    return start + "".join(f"[{step!r}]" for step in steps)


def is_traced(arrays: Sequence[Array]) -> bool:
    """Whether the caller is itself being compiled or differentiated."""
    for x in arrays:
        owner = owner_of(x)
        if owner is not None and owner.is_traced(x):
            return True
    return False


def key_function(x: Any, engine: Engine, device: Device) -> KeyFunction:
    """Return the function that computes the key of an array by shape, dtype and device."""
    if engine.shares_memory or engine.name == "numpy":
        return attrgetter("shape", "dtype")
    if engine.name == "torch":
        return attrgetter("shape", "dtype", "device")
    if engine.name == "jax":
        # `aval` has shape and dtype, and is fast to read; devices are slower.
        if len(engine.devices()) == 1:
            return attrgetter("aval")
        here = x.sharding.device_set
        return lambda x: x.aval if x.sharding.device_set == here else None
    is_there = destination_of(device).already_there.get(type(x))
    if is_there is None:
        return lambda x: None
    return lambda x: (x.shape, x.dtype) if is_there(x) else None


def shapes_text(arrays: Sequence[Array]) -> str:
    """Return the shapes and dtypes of arrays as text: `(32, 64) float32`."""
    rows = []
    for x in arrays:
        owner = owner_of(x)
        assert owner is not None
        rows.append(f"{tuple(x.shape)} {owner.dtype_of(x).name}")
    return ", ".join(rows) or "no arrays"


class Compilers(Record):
    """The compilers to try, in order; `absent` is the reason for none."""

    compilers: tuple[Compiler, ...]
    how: str
    absent: tuple[str, ...] = ()


def compilers_for(engine: Engine, optimize: str) -> Compilers:
    """Return the compilers of an engine; none if compiling is off or not available."""
    if optimize == "none":
        return Compilers((), AS_WRITTEN)
    if not settings.current()[0].jit:
        return Compilers((), AS_WRITTEN, (_TURNED_OFF,))
    compiler = engine.compiler
    if isinstance(compiler, Absent):
        return Compilers((), AS_WRITTEN, (f"{compiler}. It is {AS_WRITTEN}",))
    max_effort = optimize == "aggressive"
    compilers = [("compiled as a whole", partial(compiler.compile, max_effort=max_effort))]
    if engine.name == "torch":
        compilers.append(
            ("compiled in pieces", partial(compiler.compile, max_effort=max_effort, whole=False))
        )
    return Compilers(tuple(compilers), compiler.efforts(max_effort))


class FallbackFunction:
    """A function run by the first compiler that works; later calls stay with it.

    If compiled code fails, the function runs as written, and its own error is raised. If it has
    none, `warn` gets a text, and later calls use the next compiler. Running out of memory is raised
    at once: another compiler would not help.
    """

    def __init__(
        self,
        function: Function,
        compilers: Sequence[Compiler],
        warn: Callable[[str], None],
    ) -> None:
        self._function = function
        self._further = list(compilers)
        self._warn = warn
        self._name, make = self._further.pop(0)
        self._run = make(function)

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._run(*arguments)
        except Exception as error:  # compilers fail with errors of any kind
            if self._run is self._function or ran_out(error) is not None:
                raise
            failed = error
        try:
            result = self._function(*arguments)
        except AnyDeviceError:
            raise
        except Exception as own:
            raise own from failed
        before = f"not {self._name}: {_reason(failed)}"
        if self._further:
            self._name, make = self._further.pop(0)
            self._run = make(self._function)
        else:
            self._name, self._run = AS_WRITTEN, self._function
        self._warn(f"{before}; {self._name} instead")
        return result


class Program:
    """A model for calls of one signature, run by the first compiler that works.

    `function` is the model as a function of its arrays, for callers that trace it; `as_written`
    runs it. Without `gradients`, results carry gradients only if an input does.
    """

    def __init__(
        self,
        function: Function,
        compilers: Sequence[Compiler],
        engine: Engine,
        signature: CallSignature,
        dtype: str,
        *,
        gradients: bool = False,
    ) -> None:
        self._compilers = compilers
        self._engine = engine
        self._first = 0
        self._compiled: dict[int, Function] = {}
        self.fell_back: list[str] = []
        self.function: Function = _of_arrays(function, signature, dtype)
        carries_none = engine.name == "torch" and not gradients
        self._finished: Callable[[Function], Function] = (
            part("torch", "module").without_gradients if carries_none else lambda function: function
        )
        self.as_written = self._finished(self.function)

    def first_run(self, arguments: Arguments, arrays: list[Array]) -> tuple[Any, Function, str]:
        """Return the result, the function that computed it, and how it was compiled."""
        failed: list[str] = []
        for number in range(self._first, len(self._compilers)):
            name, make = self._compilers[number]
            try:
                if number not in self._compiled:
                    self._compiled[number] = self._finished(make(self.function))
                run = self._compiled[number]
                result = run(arguments, *arrays)
            except Exception as error:  # compilers fail with errors of any kind
                if self._engine.memory.ran_out(error):
                    raise
                failed.append(f"not {name}: {_reason(error)}")
                continue
            self._fall_back_to(number, name, failed)
            return result, run, name
        result = self.as_written(arguments, *arrays)
        self._fall_back_to(len(self._compilers), AS_WRITTEN, failed)
        return result, self.as_written, AS_WRITTEN

    def _fall_back_to(self, number: int, name: str, failed: list[str]) -> None:
        self._first = number
        if failed:
            self.fell_back.append(f"{'; '.join(failed)}; {name} instead")


def _of_arrays(function: Function, signature: CallSignature, dtype: str) -> Function:
    """Return the function of its arrays alone; floating arrays are cast to a dtype."""

    def run_plain(arguments: Arguments, *arrays: Array) -> Any:
        return function(arguments, *[cast(x, dtype) for x in arrays])

    def run(arguments: Arguments, *arrays: Array) -> Any:
        given, named = signature.filled([cast(x, dtype) for x in arrays])
        return function(arguments, *given, **named)

    own = run_plain if signature.is_plain else run
    # With its own code object: PyTorch looks up compiled code by that, and ignores new hooks.
    code, scope = own.__code__.replace(), own.__globals__
    return FunctionType(code, scope, own.__name__, None, own.__closure__)


def _reason(error: Exception) -> str:
    """Return the first line of an error, and the line in which PyTorch explains it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if first.endswith(":") and len(lines) > 1:  # the next line has the error itself
        first = f"{first} {lines[1]}"
    explained = [line for line in lines[1:] if line.startswith(_EXPLANATION)]
    return f"{first} ({explained[0].removeprefix(_EXPLANATION)})" if explained else first
