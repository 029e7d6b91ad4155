"""`compile`: a model of any kind, compiled for a device and a precision, and verified there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from anydevice._arrays.memory.out_of_memory import raise_if_oom
from anydevice._arrays.move import is_array, refuse_mismatch, to_device
from anydevice._arrays.trees.tree import flatten
from anydevice._compile import versions
from anydevice._compile.properties import (
    Property,
    check_claims,
    check_functions,
    split_claims,
    unproved_claims,
)
from anydevice._compile.report import Checked, CompileReport, Made
from anydevice._compile.verification import Candidate, Original, tolerance_of, verify_model
from anydevice._core.array import Array
from anydevice._core.checks import integer
from anydevice._core.device import Device
from anydevice._core.engine import Absent, Engine
from anydevice._core.locks import ForkSafeLock
from anydevice._core.text import warn
from anydevice._libraries.base import ChangeDetector, ModelAdapter
from anydevice._libraries.native import NativeAdapter
from anydevice._libraries.precision import Policy, policy_of
from anydevice._libraries.registry import adapter_of, compile_device
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice._machine.settings import config as settings
from anydevice._machine.settings.files import compiled_folder
from anydevice.errors import AnyDeviceError, ConfigurationError

if TYPE_CHECKING:
    from anydevice._proofs.claims import Claim

Key = tuple[versions.CallSignature, Any]
"""The key of compiled code: the signature of a call, and the shapes and dtypes of its arrays."""

_KIND = attrgetter("shape", "dtype")
OPTIMIZATIONS = ("none", "default", "aggressive")
MOST_SHAPES = 32
"""Limit of sets of shapes and dtypes that a model is compiled for; others run as written."""


def compile(  # noqa: A001 - the public name
    model: Any,
    device: Device | str | None = None,
    *,
    optimize: str = "default",
    precision: str | None = None,
    verify: Any = None,
    properties: Sequence[Property | Claim] = (),
    gradients: bool = False,
    seed: int | None = None,
) -> Compiled:
    """Compile a model for a device; call the result like the model.

    `model` is a `nn.Model`, a function over arrays, or a module of PyTorch, Flax NNX, Equinox or
    MLX, which stays in its library. Without a `device`, a `nn.Model` stays on its device, a
    module on its accelerator, and everything else goes to `anydevice.device()`. Inputs are moved
    there. Each new set of shapes is compiled at its first call (see `Compiled.warm_up`), and the
    code is kept for later processes.

    - `optimize`: "none" runs the model as written, "default" compiles it, "aggressive" takes more
      time for faster code.
    - `precision`: "float32", "float16" or "bfloat16" is the dtype of floating weights, inputs and
      outputs; with "mixed", weights and outputs are float32 and computing is in 16 bits, and with
      "mixed_float16" in float16. Without it, "mixed" if the setting `mixed_precision` is on, else
      "float32".
    - `verify`: an example input, a tuple of several, or a dict of inputs by name. It runs on the
      device twelve times, and so do inputs drawn from it with other numbers, numbers of rows and
      lengths; all are compared with a float64 reference. An error that is too large raises
      `VerificationError` with the first layer that is wrong. `report` says for which shapes and
      numbers that holds, and the `seed` that repeats the draw. `properties` are functions that
      must hold for the example: they get the output, (y), or the input and the output, (x, y), as
      NumPy, and return true or false. Claims of `anydevice.proofs` among them hold for every input
      of their region: their certificates are checked again for the weights as compiled, and one
      without a certificate is proved. `report.proved` says so, or what is not covered, and the
      report counts claims attached to the model that are not among `properties`.
    - `gradients`: on PyTorch, a backward pass from the results reaches the weights. Without it, it
      only reaches inputs that require gradients. JAX and MLX take gradients of the function itself.

    A model that cannot be compiled runs as written; `report` says so, and why.

    >>> from anydevice import nn, ops
    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> x = numpy.ones((3, 4), numpy.float32)
    >>> here = anydevice.device("cpu", engine="numpy")
    >>> fast = anydevice.compile(model, here, verify=x)
    >>> fast(x).shape, fast.report.checked.parts
    ((3, 2), 3)

    Raises `ConfigurationError` for an unknown option or anything but a model, and
    `DeviceNotFoundError` if the device is not usable.
    """
    if optimize not in OPTIMIZATIONS:
        raise ConfigurationError(
            f"optimize is one of {', '.join(OPTIMIZATIONS)}, not {optimize!r}", source="optimize="
        )
    if seed is not None:
        seed = integer("seed", seed, 0, owner="compile")
    claims, functions = ([], ()) if properties == () else split_claims(properties)
    if functions and verify is None:
        raise ConfigurationError(
            "properties that are functions are checked on an example; give one with verify=",
            source="properties=",
        )
    if isinstance(model, Compiled):
        model = model.model
    source = adapter_of(model)
    target = compile_device(source, device, compiled=optimize != "none")
    policy = policy_of(precision, target)
    original = Original.of(source, policy) if verify is not None else None
    moved = source.moved(target, policy.parameters)
    notes = _other_engine(source, device)
    if precision is None and policy.name != "float32":
        origin = settings.current()[1]["mixed_precision"]
        notes += (
            f'the precision is "{policy.name}" by the setting mixed_precision, from {origin}',
        )
    compiled = Compiled(model, moved, target, policy, optimize, notes, gradients=gradients)
    if original is not None:
        compiled._verify(original, verify, functions, seed)
    if claims:
        compiled._prove(claims)
    if isinstance(source, NativeAdapter):
        compiled._unproved = unproved_claims(source.model.properties, claims)
    return compiled


class Compiled:
    """A compiled model; made by `anydevice.compile`.

    `model` is the given model, `device` where it runs, `parameters` are its weights there: for a
    `nn.Model` in their tree, for other models by path. It is compiled again for each new set of
    shapes and dtypes of its inputs, and for new numbers or strings among them; after `MOST_SHAPES`
    sets, others run as written, with one warning.

    Later changes of a module take effect at the next call, in every library and precision: new
    weights are used, and after a change of its parts, its hooks or its mode (`eval()`) it is
    compiled again. If the compiled weights are copies in another dtype, some changes are missed,
    such as writes through PyTorch's `.data`: `report.follows` names them; call `refresh` after
    them. Training does not change a `nn.Model`; it returns a new one.
    """

    def __init__(
        self,
        model: Any,
        adapter: ModelAdapter,
        device: Device,
        policy: Policy,
        optimize: str,
        notes: tuple[str, ...] = (),
        *,
        gradients: bool = False,
    ) -> None:
        self.model = model
        self.device = device
        self.policy = policy
        self.optimize = optimize
        self._engine: Engine = registry.load(device.engine or "numpy")
        self._gradients = gradients
        self._notes = notes
        self._unproved: tuple[str, ...] = ()
        self._keys: dict[type, versions.KeyFunction] = {}
        self._updating = ForkSafeLock()
        self._start(adapter)
        self._kept_in = _kept_in(self._engine, bool(self._compilers.compilers))

    def _start(self, adapter: ModelAdapter) -> None:
        """Set the model, with nothing compiled yet."""
        self._adapter = adapter
        self._detector = adapter.detector
        self._function = adapter.with_policy(self.policy)
        self._compilers = versions.compilers_for(self._engine, self.optimize)
        self._programs: dict[versions.CallSignature, versions.Program] = {}
        self._ready: dict[Any, Callable[..., Any]] = {}
        self._ready_plain: dict[Any, Callable[..., Any]] = {}
        self._made: dict[Key, Made] = {}
        self._verified: set[Key] = set()
        self._overflowed = False
        self._checked: Checked | None = None
        self._checked_detector: ChangeDetector | None = None
        self._is_outdated = False
        self._proved: tuple[str, ...] = ()
        self._proved_detector: ChangeDetector | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the model for these inputs, which are moved to its device first.

        Raises `ConfigurationError` if the model does not take them, and `OutOfMemoryError` if
        the device runs out of memory.
        """
        if self._detector is not None and self._detector.has_changed():
            self._update()
        if named:
            return self._moved_first(inputs, named)
        # The fast path: arrays on the device, by position, of known shapes.
        keys = self._keys
        try:
            if len(inputs) == 1:
                key = keys[type(inputs[0])](inputs[0])
            else:
                key = tuple([keys[type(x)](x) for x in inputs])
            ready = self._ready_plain.get(key)
        except KeyError:
            ready = None
        if ready is None:
            return self._moved_first(inputs, named)
        try:
            return ready(self._adapter.arguments, *inputs)
        except Exception as error:
            self._explain(error, inputs)
            raise

    def warm_up(self, example: Any) -> CompileReport:
        """Compile for the shapes of an example, given as for `verify`, and run it once.

        Later calls with these shapes do not compile. Returns the report.
        """
        inputs, named = self._inputs_of(example)
        self._wait_for(self(*inputs, **named))
        return self.report

    def refresh(self) -> None:
        """Take over the current weights, parts and mode of the model, and compile it again.

        Only needed after changes that a call does not detect; see `Compiled`.
        """
        was_verified = self._is_outdated or self._checked is not None
        self._end_proofs()
        proved = self._proved
        self._start(adapter_of(self.model).moved(self.device, self.policy.parameters))
        self._is_outdated, self._proved = was_verified, proved

    def verify(
        self, example: Any, properties: Sequence[Property] = (), seed: int | None = None
    ) -> CompileReport:
        """Verify the model on its device against a float64 reference; see `compile`.

        An example is one input, a tuple of several, or a dict of inputs by name if the model has
        inputs of these names; any other dict is one input. After a change of the module, `report`
        says that it is not verified. Raises `VerificationError` with the first wrong layer.
        """
        check_functions(properties)
        self._update()
        self._verify(Original.of(adapter_of(self.model), self.policy), example, properties, seed)
        return self.report

    def _verify(
        self, original: Original, example: Any, properties: Sequence[Property], seed: int | None
    ) -> None:
        self._checked, self._is_outdated = None, False
        compilers = self._compilers.compilers
        compiler = compilers[0][1] if compilers else None
        coarse = self._adapter.has_coarse_products(self.device)
        tolerance = tolerance_of(self.policy.compute, coarse_products=coarse)
        candidate = Candidate(self._adapter, self.device, self.policy, self, compiler, tolerance)
        inputs = self._inputs_of(example)
        self._checked = checked = verify_model(candidate, original, inputs, properties, seed)
        self._checked_detector = self._adapter.verified_detector(checked.rewritten)
        signature, _ = versions.split_inputs(*inputs)
        rows = self._made.items()
        self._verified = {
            key for key, made in rows if key[0] == signature and made.shapes in checked.shapes
        }

    def _prove(self, claims: Sequence[Any]) -> None:
        self._proved = check_claims(self._adapter, self.device, self.policy, claims)
        self._proved_detector = self._adapter.verified_detector(())

    def _inputs_of(self, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = example if isinstance(example, dict) else {}
        if named and named.keys() <= self._adapter.input_names():
            return (), named
        return example if isinstance(example, tuple) else (example,), {}

    @property
    def parameters(self) -> Any:
        """The weights on the device."""
        self._update()
        if isinstance(self._adapter, NativeAdapter):
            return self._adapter.arguments
        return dict(self._adapter.weights())

    @property
    def report(self) -> CompileReport:
        """The report of compiling so far; printed, it is a short table."""
        fell_back = self._compilers.absent + tuple(
            reason for program in self._programs.values() for reason in program.fell_back
        )
        if self._overflowed:
            fell_back += (_too_many(),)
        detector = self._checked_detector
        if detector is not None and detector.has_changed():
            self._end_verdict()
        detector = self._proved_detector
        if detector is not None and detector.has_changed():
            self._end_proofs()
        verified = {self._made[key].shapes for key in self._verified}
        others = [made.shapes for key, made in self._made.items() if key not in self._verified]
        unverified = [x + ", called otherwise" * (x in verified) for x in others]
        return CompileReport(
            model=self._adapter.kind,
            device=self.device,
            engine=self._engine.name,
            optimize=self.optimize,
            policy=self.policy,
            how=self._compilers.how,
            kept_in=self._kept_in,
            made=tuple(self._made.values()),
            fell_back=tuple(dict.fromkeys(fell_back)),
            notes=self._notes + tuple(self._adapter.notes),
            checked=self._checked,
            unverified=tuple(dict.fromkeys(unverified)),
            is_outdated=self._is_outdated,
            follows=self._adapter.follows,
            proved=self._proved,
            unproved=self._unproved,
        )

    def _update(self) -> None:
        """Take over changes of the module, which is then no longer verified."""
        if self._detector is None or not self._detector.has_changed():
            return
        with self._updating.native:
            detector = self._detector
            if detector is None or not detector.has_changed():
                return  # another thread did it
            snapshot = detector.snapshot()
            self._end_verdict()
            if self._adapter.update_weights(self.device, self.policy.parameters):
                detector.reset(snapshot)
            else:
                self.refresh()

    def _end_verdict(self) -> None:
        """Discard the results of verification and proofs: the model has changed."""
        self._is_outdated = self._is_outdated or self._checked is not None
        self._checked = self._checked_detector = None
        self._end_proofs()

    def _end_proofs(self) -> None:
        if self._proved:
            self._proved = ("nothing: the model was changed after its properties were proved",)
        self._proved_detector = None

    def _moved_first(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        signature, arrays = versions.split_inputs(inputs, named)
        if versions.is_traced(arrays):
            return self._new_program(signature).function(self._adapter.arguments, *arrays)
        self._adapter.check_inputs(*signature.filled(arrays))
        # `narrow`: floating inputs are cast to the policy's dtype anyway.
        placed = [to_device(x, self.device, convert=True, narrow=True) for x in arrays]
        key = signature, tuple(map(_KIND, placed))
        ready = self._ready.get(key)
        try:
            if ready is None:
                return self._first_run(signature, key, placed)
            self._shorten(signature, placed, ready)
            return ready(self._adapter.arguments, *placed)
        except Exception as error:
            self._explain(error, placed)
            raise

    def _explain(self, error: Exception, inputs: Sequence[Any]) -> None:
        """Raise our own error for a library's error about memory or devices, if it is one."""
        raise_if_oom(error, self.device)
        if not isinstance(error, AnyDeviceError):
            refuse_mismatch(error, inputs=inputs, weights=self._adapter.arguments)

    def _first_run(self, signature: versions.CallSignature, key: Key, arrays: list[Array]) -> Any:
        if len(self._ready) >= MOST_SHAPES and self._compilers.compilers:
            if not self._overflowed:
                self._overflowed = True
                warn(_too_many())
            return self._new_program(signature).as_written(self._adapter.arguments, *arrays)
        program = self._programs.get(signature) or self._new_program(signature)
        began = time.perf_counter()
        result, ready, how = program.first_run(self._adapter.arguments, arrays)
        self._wait_for(result)
        self._made[key] = Made(versions.shapes_text(arrays), how, time.perf_counter() - began)
        self._ready[key] = ready
        self._programs[signature] = program
        self._shorten(signature, arrays, ready)
        return result

    def _shorten(
        self, signature: versions.CallSignature, placed: list[Array], ready: Callable[..., Any]
    ) -> None:
        """Let later calls with arrays like these take the fast path."""
        if not signature.is_plain:
            return
        for x in placed:
            if type(x) not in self._keys:
                self._keys[type(x)] = versions.key_function(x, self._engine, self.device)
        keys = tuple([self._keys[type(x)](x) for x in placed])
        if None not in keys:
            self._ready_plain[keys[0] if len(keys) == 1 else keys] = ready

    def _new_program(self, signature: versions.CallSignature) -> versions.Program:
        dtype = self._adapter.input_dtype(self.policy)
        return versions.Program(
            self._function,
            self._compilers.compilers,
            self._engine,
            signature,
            dtype,
            gradients=self._gradients,
        )

    def _wait_for(self, result: Any) -> None:
        arrays = flatten(result, is_array)[0].values
        self._engine.finish([x for x in arrays if owner_of(x) is self._engine])

    def __repr__(self) -> str:
        return f"<compiled {self._adapter.kind} on {self.device}, {self.policy.name}>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def _kept_in(engine: Engine, compiles: bool) -> str | None:
    if not compiles or isinstance(engine.compiler, Absent):
        return None
    folder = compiled_folder(engine.name)
    return None if folder is None else engine.compiler.keep(str(folder))


def _other_engine(source: ModelAdapter, device: Any) -> tuple[str, ...]:
    """Return the note for a device whose engine is not the module's library."""
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
        f"{MOST_SHAPES} sets of shapes are compiled, and no more will be: others run as written, "
        "which is slower; pad inputs to a few sizes"
    )
