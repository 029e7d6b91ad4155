"""The compilers of a model or a training step, fastest first, and falling back to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from anydevice._arrays.memory.out_of_memory import ran_out
from anydevice._compile.inputs import CallSignature
from anydevice._core.array import Array
from anydevice._core.engine import Absent, Engine
from anydevice._core.record import Record
from anydevice._libraries.base import Arguments
from anydevice._libraries.precision import cast
from anydevice._libraries.registry import part
from anydevice._machine.settings import config as settings
from anydevice.errors import AnyDeviceError

Function = Callable[..., Any]
Compiler = tuple[str, Callable[..., Function]]
"""How a function is run, as text, and what compiles it so."""

AS_WRITTEN = "run as written"
_TURNED_OFF = f"compiling is turned off by configure(jit=False) or a file. It is {AS_WRITTEN}"
_EXPLANATION = "Explanation: "


class Compilers(Record):
    """The compilers to try, in order; `absent` is why there are none."""

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
    """A function run by the first compiler that works: a call may fall back, and later ones stay.

    Where compiled code fails, the function runs as written, and an error of its own is raised. If
    it has none, `warn` gets a text, and the next calls take the next compiler. Running out of
    memory is not fixed by that, and is raised.
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
        self._fall_back(failed)
        return result

    def _fall_back(self, failed: Exception) -> None:
        before = f"not {self._name}: {_reason(failed)}"
        if self._further:
            self._name, make = self._further.pop(0)
            self._run = make(self._function)
        else:
            self._name, self._run = AS_WRITTEN, self._function
        self._warn(f"{before}; {self._name} instead")


class Program:
    """A model for calls of one signature, run by the first compiler that works.

    `function` is the model of its arrays, for callers that trace it, `as_written` runs it. Without
    `gradients`, results carry some only where an input does.
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
        """Return the result, the function that gave it, and how that was made.

        Where a compiler fails, that is noted, and the next one is tried. An error that the model
        raises as written is raised.
        """
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
    """Return the function of its arrays alone; floating ones are cast to a dtype."""

    def run_plain(arguments: Arguments, *arrays: Array) -> Any:
        return function(arguments, *[cast(x, dtype) for x in arrays])

    def run(arguments: Arguments, *arrays: Array) -> Any:
        given, named = signature.filled([cast(x, dtype) for x in arrays])
        return function(arguments, *given, **named)

    return _with_own_code(run_plain if signature.is_plain else run)


def _with_own_code(function: Any) -> Function:
    """Return the function with a code object that no other has.

    PyTorch finds what it compiled by the code object, and does not look whether hooks are new.
    """
    code, scope = function.__code__.replace(), function.__globals__
    return FunctionType(code, scope, function.__name__, None, function.__closure__)


def _reason(error: Exception) -> str:
    """Return the first line of an error, and the one in which PyTorch explains it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if first.endswith(":") and len(lines) > 1:  # what was raised comes in the next line
        first = f"{first} {lines[1]}"
    explained = [line for line in lines[1:] if line.startswith(_EXPLANATION)]
    return f"{first} ({explained[0].removeprefix(_EXPLANATION)})" if explained else first
