"""The ways to run a model or a step, fastest first, and falling back from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from anydevice.compiling.inputs import Form
from anydevice.core.engine import Absent, Engine
from anydevice.core.record import Record
from anydevice.errors import AnyDeviceError
from anydevice.memory.out_of_memory import ran_out
from anydevice.models.base import Arguments, Array, Subject
from anydevice.models.precision import Policy, cast
from anydevice.settings import config as settings

Function = Callable[..., Any]

AS_WRITTEN = "run as written"
_TURNED_OFF = f"compiling is turned off by configure(jit=False) or a file. It is {AS_WRITTEN}"
_EXPLAINED = "Explanation: "


class Ways(Record):
    """The compilers to try, in order, each with its name; `absent` is why there are none."""

    ways: tuple[tuple[str, Callable[..., Function]], ...]
    how: str
    absent: tuple[str, ...] = ()


def ways_of(engine: Engine, optimize: str) -> Ways:
    """The ways to compile on an engine; none where that is not asked for, or not had."""
    if optimize == "none":
        return Ways((), AS_WRITTEN)
    if not settings.current()[0].jit:
        return Ways((), AS_WRITTEN, (_TURNED_OFF,))
    compiler = engine.compiler
    if isinstance(compiler, Absent):
        return Ways((), AS_WRITTEN, (f"{compiler}. It is {AS_WRITTEN}",))
    most = optimize == "aggressive"
    ways = [("compiled as a whole", partial(compiler.compile, most=most))]
    if engine.name == "torch":
        ways.append(("compiled in pieces", partial(compiler.compile, most=most, whole=False)))
    return Ways(tuple(ways), compiler.efforts(most))


class Versions(Record):
    """How a model is compiled: `ways` are the compilers to try, in order, each with its name."""

    function: Function
    ways: tuple[tuple[str, Callable[..., Function]], ...]
    engine: Engine
    how: str
    absent: tuple[str, ...] = ()

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled at all."""
        return bool(self.ways)


def versions_of(subject: Subject, policy: Policy, engine: Engine, optimize: str) -> Versions:
    """The ways to compile a subject on an engine; none where that is not asked for, or not had."""
    found = ways_of(engine, optimize)
    return Versions(subject.under(policy), found.ways, engine, found.how, found.absent)


class FirstThatWorks:
    """A function in the fastest version that works: each call may fall back, and later ones stay.

    A call that compiled code fails is answered by the function as it is written, so that an error
    of its own is raised as such; where it has none, `say` is told what failed, and the next calls
    go the next way. Running out of memory is never mended by that, and is raised.
    """

    def __init__(
        self,
        function: Function,
        ways: Sequence[tuple[str, Callable[..., Function]]],
        say: Callable[[str], None],
    ) -> None:
        self._function = function
        self._further = list(ways)
        self._say = say
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
        self._say(f"{before}; {self._name} instead")


class Program:
    """The model for calls of one form, in the best version that works."""

    def __init__(self, versions: Versions, form: Form, dtype: str) -> None:
        self._versions = versions
        self._first_way = 0
        self._compiled: dict[int, Function] = {}
        self.fell_back: list[str] = []
        self.as_written: Function = _of_arrays(versions.function, form, dtype)

    def first_run(self, arguments: Arguments, arrays: list[Array]) -> tuple[Any, Function, str]:
        """The result, the function that gave it, and how that was made.

        What compiling could not do is noted, and the next version is tried. An error that the
        model raises as it is written is its own, and is raised.
        """
        failed: list[str] = []
        for way in range(self._first_way, len(self._versions.ways)):
            name, make = self._versions.ways[way]
            try:
                if way not in self._compiled:
                    self._compiled[way] = make(self.as_written)
                run = self._compiled[way]
                result = run(arguments, *arrays)
            except Exception as error:  # compilers fail with errors of any kind
                if self._versions.engine.memory.ran_out(error):
                    raise
                failed.append(f"not {name}: {_reason(error)}")
                continue
            self._fall_back_to(way, name, failed)
            return result, run, name
        result = self.as_written(arguments, *arrays)
        self._fall_back_to(len(self._versions.ways), AS_WRITTEN, failed)
        return result, self.as_written, AS_WRITTEN

    def _fall_back_to(self, way: int, name: str, failed: list[str]) -> None:
        self._first_way = way
        if failed:
            self.fell_back.append(f"{'; '.join(failed)}; {name} instead")


def _of_arrays(function: Function, form: Form, dtype: str) -> Function:
    """The function of its arrays alone; those of floating numbers are cast to a type."""
    if form.is_plain:

        def run_plain(arguments: Arguments, *arrays: Array) -> Any:
            return function(arguments, *[cast(x, dtype) for x in arrays])

        return run_plain

    def run(arguments: Arguments, *arrays: Array) -> Any:
        given, named = form.filled([cast(x, dtype) for x in arrays])
        return function(arguments, *given, **named)

    return run


def _reason(error: Exception) -> str:
    """The first line of an error, and the one in which PyTorch explains it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    explained = [line for line in lines[1:] if line.startswith(_EXPLAINED)]
    return f"{first} ({explained[0].removeprefix(_EXPLAINED)})" if explained else first
