"""`compile`: a model of any kind, made fast on a device, in a precision, and checked there."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anydevice.compiling.inputs import (
    Form,
    Signer,
    example_inputs,
    is_traced,
    shapes_text,
    signer_of,
    taken_apart,
)
from anydevice.compiling.report import Checked, CompileReport, Made
from anydevice.compiling.verification import Evidence, Property, refuse_no_functions, verified
from anydevice.compiling.versions import Program, versions_of
from anydevice.core.device import Device
from anydevice.core.engine import Absent, Engine
from anydevice.engines import registry
from anydevice.engines.lookup import owner_of
from anydevice.errors import ConfigurationError
from anydevice.memory.out_of_memory import refuse
from anydevice.models.base import Array, Subject
from anydevice.models.changes import Follower
from anydevice.models.detect import home_of, subject_of
from anydevice.models.native import ModelSubject
from anydevice.models.precision import Policy, policy_of
from anydevice.settings.files import compiled_folder
from anydevice.transfer.moving import is_array, to_device
from anydevice.transfer.trees.tree import flatten

OPTIMIZATIONS = ("none", "default", "aggressive")
MOST_SHAPES = 32
"""How many sets of shapes and types one model is compiled for; more of them run as written."""


def compile(  # noqa: A001 - the public name, which nobody imports by itself
    model: Any,
    device: Device | str | None = None,
    *,
    optimize: str = "default",
    precision: str = "float32",
    verify: Any = None,
    properties: Sequence[Property] = (),
) -> Compiled:
    """A model on a device, compiled there: call it as the model is called.

    `model` is a `nn.Model`, a function over arrays, or a module of PyTorch, Flax NNX, Equinox or
    MLX, which stays in its library. Without a `device`, our own models stay where they are, and
    all else goes where `anydevice.device()` says. Inputs are moved there; code is made when shapes
    are first met (see `Compiled.warm_up`), and kept for later processes.

    - `optimize`: "none" runs the model as written, "default" compiles it, "aggressive" takes more
      time for faster code.
    - `precision`: "float32", "float16" or "bfloat16" is the type of floating weights, inputs and
      results; with "mixed", weights and results are float32 and computing is in 16 bits.
    - `verify`: an example input, a tuple of several, or a dict of those by name. It is run on the
      device and on a float64 reference; whatever is wrong raises `VerificationError` with the
      first layer that is. `properties` are functions of the output, given as NumPy, that must hold.

    What could not be compiled runs as written; `report` says what was done, and why.

    >>> import anydevice, numpy
    >>> from anydevice import nn, ops
    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> x = numpy.ones((3, 4), numpy.float32)
    >>> here = anydevice.device("cpu", engine="numpy")
    >>> fast = anydevice.compile(model, here, verify=x)
    >>> fast(x).shape, fast.report.checked.parts
    ((3, 2), 3)

    Raises `ConfigurationError` for an option or a model that there is not, `DeviceNotFoundError`
    where the device is not usable.
    """
    if optimize not in OPTIMIZATIONS:
        raise ConfigurationError(
            f"optimize is one of {', '.join(OPTIMIZATIONS)}, not {optimize!r}", source="optimize="
        )
    refuse_no_functions(properties)
    if properties and verify is None:
        raise ConfigurationError(
            "properties are checked on an example; give one with verify=", source="properties="
        )
    if isinstance(model, Compiled):
        model = model.model
    source = subject_of(model)
    home = home_of(source, device, compiled=optimize != "none")
    policy = policy_of(precision, home)
    evidence = Evidence.of(source, policy) if verify is not None else None
    moved = source.moved(home, policy.parameters)
    compiled = Compiled(model, moved, home, policy, optimize, _stays(source, device))
    if evidence is not None:
        compiled._verify(evidence, verify, properties)
    return compiled


class Compiled:
    """A model that was compiled; made by `anydevice.compile`.

    `model` is what was given, `device` where it runs, `parameters` are its weights there: for a
    `nn.Model` in their nest, for other models by path. For a new set of shapes and types of its
    inputs, and new numbers or texts among them, code is made anew; for more than `MOST_SHAPES` of
    them it runs as written, with one warning.

    What is changed in a module later is seen by the next call, whatever its library and the
    precision: new weights are taken over, and for other parts or another mode, as after `eval()`,
    code is made anew. Only a write through PyTorch's `.data` cannot be seen where the weights here
    are copies of another type: call `refresh`. A `nn.Model` is not changed by training, which
    gives a new one.
    """

    def __init__(
        self,
        model: Any,
        subject: Subject,
        device: Device,
        policy: Policy,
        optimize: str,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.device = device
        self.policy = policy
        self.optimize = optimize
        self._engine: Engine = registry.load(device.engine or "numpy")
        self._notes = notes
        self._signers: dict[type, Signer] = {}
        self._following = threading.Lock()
        self._take(subject)
        self._kept_in = _kept_in(self._engine, self._versions.compiles)

    def _take(self, subject: Subject) -> None:
        """Begin anew with a subject: there is no code for it yet."""
        self._subject = subject
        self._follower = subject.follower
        self._versions = versions_of(subject, self.policy, self._engine, self.optimize)
        self._programs: dict[Form, Program] = {}
        self._ready: dict[Any, Callable[..., Any]] = {}
        self._ready_plain: dict[Any, Callable[..., Any]] = {}
        self._made: list[Made] = []
        self._overflowed = False
        self._checked: Checked | None = None
        self._watch: Follower | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the model gives for these inputs, which are moved to its device first.

        Raises `ConfigurationError` where they are not what the model takes, `OutOfMemoryError`
        where the device has no room.
        """
        if self._follower is not None:
            self._follow()
        if named:
            return self._moved_first(inputs, named)
        # The way of almost all calls: bare arrays that are there already, of shapes met before.
        signers = self._signers
        try:
            if len(inputs) == 1:
                sign = signers[type(inputs[0])](inputs[0])
            else:
                sign = tuple([signers[type(x)](x) for x in inputs])
            ready = self._ready_plain.get(sign)
        except KeyError:
            ready = None
        if ready is None:
            return self._moved_first(inputs, named)
        try:
            return ready(self._subject.arguments, *inputs)
        except Exception as error:
            refuse(error, self.device)
            raise

    def warm_up(self, example: Any) -> CompileReport:
        """Compile for the shapes of an example, given as for `verify`, and run it once.

        Later calls with these shapes take no time for compiling. Returns the report.
        """
        given, named = self._inputs_of(example)
        self._wait_for(self(*given, **named))
        return self.report

    def refresh(self) -> None:
        """Take the model as it is now: its weights, its parts, its mode; code is made anew.

        Needed only after changes that a call does not see by itself; see `Compiled`.
        """
        self._take(subject_of(self.model).moved(self.device, self.policy.parameters))

    def verify(self, example: Any, properties: Sequence[Property] = ()) -> CompileReport:
        """Check the model on its device against a float64 reference; see `compile`.

        An example is one input, a tuple of several, or a dict of those by name: of names that the
        model gives its inputs. Another dict is one input. Once the module is changed, `report` says
        it is no longer verified. Raises `VerificationError` with the first layer that is wrong.
        """
        refuse_no_functions(properties)
        self._follow()
        self._verify(Evidence.of(subject_of(self.model), self.policy), example, properties)
        return self.report

    def _verify(self, evidence: Evidence, example: Any, properties: Sequence[Property]) -> None:
        self._checked = None
        self._checked = verified(self, evidence, self._inputs_of(example), properties)
        self._watch = self._subject.watch()

    def _inputs_of(self, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = example if isinstance(example, dict) else {}
        if named and named.keys() <= self._subject.input_names():
            return (), named
        return example_inputs(example), {}

    @property
    def parameters(self) -> Any:
        """The weights on the device."""
        self._follow()
        if isinstance(self._subject, ModelSubject):
            return self._subject.arguments
        return dict(self._subject.weights())

    @property
    def report(self) -> CompileReport:
        """What was done so far; printed, it is a short table."""
        fell_back = self._versions.absent + tuple(
            reason for program in self._programs.values() for reason in program.fell_back
        )
        if self._overflowed:
            fell_back += (_too_many(),)
        watch = self._watch
        if watch is not None and watch.sees_changes():
            self._checked = self._watch = None
        return CompileReport(
            model=self._subject.kind,
            device=self.device,
            engine=self._engine.name,
            optimize=self.optimize,
            policy=self.policy,
            how=self._versions.how,
            kept_in=self._kept_in,
            made=tuple(self._made),
            fell_back=tuple(dict.fromkeys(fell_back)),
            notes=self._notes + tuple(self._subject.notes),
            checked=self._checked,
        )

    def _follow(self) -> None:
        """Take what was changed in the module; what was checked is then no longer what there is."""
        if self._follower is None or not self._follower.sees_changes():
            return
        with self._following:
            follower = self._follower
            if follower is None or not follower.sees_changes():
                return  # another thread did it
            seen = follower.look()
            self._checked = self._watch = None
            if self._subject.catches_up(self.device, self.policy.parameters):
                follower.saw(seen)
            else:
                self.refresh()

    def _moved_first(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        form, arrays = taken_apart(inputs, named)
        if is_traced(arrays):
            return self._new_program(form).as_written(self._subject.arguments, *arrays)
        self._subject.accepts(inputs, named)
        placed = self._placed(arrays)
        key = form, tuple([(x.shape, x.dtype) for x in placed])
        ready = self._ready.get(key)
        try:
            if ready is None:
                return self._first_run(form, key, placed)
            self._shorten(form, placed, ready)
            return ready(self._subject.arguments, *placed)
        except Exception as error:
            refuse(error, self.device)
            raise

    def _first_run(self, form: Form, key: Any, arrays: list[Array]) -> Any:
        if len(self._ready) >= MOST_SHAPES and self._versions.compiles:
            if not self._overflowed:
                self._overflowed = True
                warnings.warn(_too_many(), stacklevel=4)
            return self._new_program(form).as_written(self._subject.arguments, *arrays)
        program = self._programs.get(form) or self._new_program(form)
        began = time.perf_counter()
        result, ready, how = program.first_run(self._subject.arguments, arrays)
        self._wait_for(result)
        self._made.append(Made(shapes_text(arrays), how, time.perf_counter() - began))
        self._ready[key] = ready
        self._programs[form] = program
        self._shorten(form, arrays, ready)
        return result

    def _shorten(self, form: Form, placed: list[Array], ready: Callable[..., Any]) -> None:
        """Let later calls with arrays like these find their code at once."""
        if not form.is_plain:
            return
        for x in placed:
            if type(x) not in self._signers:
                self._signers[type(x)] = signer_of(x, self._engine, self.device)
        signs = tuple([self._signers[type(x)](x) for x in placed])
        if None not in signs:
            self._ready_plain[signs[0] if len(signs) == 1 else signs] = ready

    def _new_program(self, form: Form) -> Program:
        return Program(self._versions, form, self._subject.input_type(self.policy))

    def _placed(self, arrays: list[Array]) -> list[Array]:
        # Floating inputs become the policy's type anyway: narrowing them is what was asked for.
        return [to_device(x, self.device, convert=True, narrow=True) for x in arrays]

    def _wait_for(self, result: Any) -> None:
        arrays = flatten(result, is_array)[0].values
        self._engine.finish([x for x in arrays if owner_of(x) is self._engine])

    def __repr__(self) -> str:
        return f"<compiled {self._subject.kind} on {self.device}, {self.policy.name}>"


def _kept_in(engine: Engine, compiles: bool) -> str | None:
    if not compiles or isinstance(engine.compiler, Absent):
        return None
    return engine.compiler.keep(str(compiled_folder(engine.name)))


def _stays(source: Subject, device: Any) -> tuple[str, ...]:
    """What the report says where another engine was asked for than the module's library."""
    if not isinstance(device, Device) or device.engine_is_free:
        return ()
    if source.library in (None, device.engine):
        return ()
    return (
        f"{device.engine} was asked for, and a {source.kind} runs in {source.library}: it stays "
        "there",
    )


def _too_many() -> str:
    return (
        f"there is code for {MOST_SHAPES} sets of shapes, and no more is made: others run as "
        "written, which is slower; pad inputs to a few sizes"
    )
