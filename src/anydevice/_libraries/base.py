"""The interface through which every kind of model is moved, compiled, watched and verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from gc import get_referents
from inspect import Parameter, signature
from math import prod
from typing import TYPE_CHECKING, Any

from anydevice._arrays.move import device_of, download, is_array
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record
from anydevice._libraries.precision import Policy
from anydevice._libraries.registry import part
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

_WITH_FLOAT64_SCOPE = ("torch", "jax", "mlx")

Arguments = Any
"""The first argument of an adapter's function: its weights."""

After = Callable[[str, Any], Any]
"""Called with the name and output of each part; its result is passed to the next part."""

State = Mapping[str, tuple[Any, int]]
"""State of a module by name: each value, and its number of writes."""

Change = Callable[["HostArray"], "HostArray"]
"""Converts a NumPy array to the weights of a reference, mostly in float64."""


Read = Callable[[], Iterable[Any]]


class Watched(Record):
    """The parts of a module that are watched.

    Objects are compared by identity: the contents of collections (`views`), the results of
    `readers`, and the values of `dicts`. One call of Python's garbage collector reads all `dicts`;
    it does not see the values in the `vars` of an object, so these are views. Results of `values`,
    such as counts of writes in place, are compared by equality.
    """

    views: list[Collection[Any]]
    readers: list[Read]
    values: list[Read]
    dicts: tuple[dict[Any, Any], ...] = ()

    def read(self) -> tuple[list[Any], list[Any]]:
        """Return the current objects and values."""
        objects = get_referents(*self.dicts)
        values: list[Any] = []
        for view in self.views:
            objects += view
        for read in self.readers:
            objects += read()
        for read in self.values:
            values += read()
        return objects, values


class Snapshot(Record):
    """The objects of a module at one time, kept alive; those in `equals` may be equal to others."""

    watched: Watched
    objects: list[Any]
    values: list[Any]
    equals: list[int]


class ChangeDetector:
    """Compares a module with its last snapshot, by the identity of its objects.

    >>> module = {"weight": 1.5}
    >>> detector = ChangeDetector(lambda: Watched([module.values()], [], []))
    >>> detector.has_changed()
    False
    >>> module["weight"] = 2.5
    >>> detector.has_changed()
    True
    >>> detector.reset(detector.snapshot())
    >>> detector.has_changed()
    False
    """

    def __init__(self, watched: Callable[[], Watched]) -> None:
        self._watched = watched
        self.reset(self.snapshot())

    def has_changed(self) -> bool:
        """Whether any object was replaced or changed in place."""
        last = self._last
        objects, values = last.watched.read()
        try:
            # Lists compare by identity first, many times faster than a loop.
            if values != last.values or objects != last.objects:
                return True
        except Exception:  # arrays of several elements are neither equal nor different
            return True
        return bool(last.equals) and any(objects[x] is not last.objects[x] for x in last.equals)

    def snapshot(self) -> Snapshot:
        """Return the module's current state; the watched parts are looked up again."""
        watched = self._watched()
        objects, values = watched.read()
        equals = [index for index, x in enumerate(objects) if _may_equal_another(x)]
        return Snapshot(watched, objects, values, equals)

    def reset(self, snapshot: Snapshot) -> None:
        """Compare with this snapshot from now on."""
        self._last = snapshot


def _may_equal_another(x: Any) -> bool:
    """Whether another object may be equal to `x`; never true for arrays of several elements."""
    kind: Any = type(x)
    if kind.__eq__ is object.__eq__:
        return False
    try:
        return bool(prod(x.shape) == 1)
    except Exception:  # no array, or an array without a shape yet
        return True


class ModelAdapter(ABC):
    """One model with its weights on one device.

    `kind` is the class of the model as text; `library` the engine it is written for, `None` if
    it runs on all. `notes` go into the report. `detector` detects later changes of the module;
    `None` if it cannot change. `follows` describes the changes that a call detects. A reference
    `changes_operations` if `change` converts the result of each operation too.
    """

    kind: str
    library: str | None = None
    notes: tuple[str, ...] = ()
    arguments: Arguments = ()
    detector: ChangeDetector | None = None
    batches = False
    follows: str = ""
    changes_operations: bool = False

    @abstractmethod
    def call(self, arguments: Arguments, *inputs: Any, **named: Any) -> Any:
        """Return the output of the model; compilers can trace this."""

    @abstractmethod
    def traced(self, after: After, *inputs: Any, **named: Any) -> Any:
        """Return the output of the model, with the output of each part passed through `after`."""

    @abstractmethod
    def weights(self) -> Mapping[str, Array]:
        """Return the weights by path."""

    def kept_weights(self) -> frozenset[str]:
        """Return the paths of weights that keep their dtype when the others are cast."""
        return frozenset()

    @abstractmethod
    def moved(self, device: Device, dtype: str) -> ModelAdapter:
        """Return the model with weights of this dtype on a device; weights there are shared."""

    @abstractmethod
    def reference(self, change: Change, engine: str) -> ModelAdapter:
        """Return the model on the CPU, converted by `change`, to check a device of `engine`."""

    def update_weights(self, device: Device, dtype: str) -> bool:
        """Take over the module's weights, as `moved` does; False if it must be compiled again."""
        return False

    def verified_detector(self, rewritten: Collection[str]) -> ChangeDetector | None:
        """Detect changes, but of the state the model rewrites; `None` if it cannot change."""
        return self.detector

    def state(self) -> State:
        """Return the current state that a call could change."""
        return {}

    @property
    def device(self) -> Device | None:
        """The device of the weights; `None` without weights, or if they can go anywhere."""
        return None

    def with_policy(self, policy: Policy) -> Callable[..., Any]:
        """Return `call` with weights cast for computing, and outputs cast for the caller."""
        if not policy.casts_parameters:
            return self.call

        def run(arguments: Arguments, *inputs: Any, **named: Any) -> Any:
            return policy.for_output(self.call(policy.for_computing(arguments), *inputs, **named))

        return run

    def for_tracing(self, device: Device, policy: Policy) -> ModelAdapter:
        """Return the adapter with parts that compute like `with_policy(policy)`."""
        return self.moved(device, policy.compute) if policy.casts_parameters else self

    def input_dtype(self, policy: Policy) -> str:
        """Return the dtype of its floating inputs."""
        return policy.compute

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context for calls that are not compiled."""
        return nullcontext()

    def check_inputs(  # noqa: B027 - most models take any inputs
        self, inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Raise `ConfigurationError` if the model does not accept these inputs."""

    def input_names(self) -> frozenset[str]:
        """Return the names of inputs that can be passed by name."""
        return frozenset()

    def with_parts(self, arguments: Arguments, *inputs: Any, **named: Any) -> list[Any] | None:
        """Return all parts' outputs, then the final one, traceable; None if a compiler cannot."""
        return None

    def check_verifiable(self) -> None:  # noqa: B027 - most models can be verified
        """Raise `ConfigurationError` if two runs of the model need not agree."""

    def has_coarse_products(self, device: Device) -> bool:
        """Whether float32 products are computed on a device with fewer digits (TF32)."""
        return False

    def reference_input(self, x: HostArray) -> Array:
        """Return a NumPy array in the form that this reference takes."""
        return x

    def read(self, x: object) -> HostArray | None:
        """Read an output array, floats possibly as float64; None for a tracer or anything else."""
        return host_array(x) if is_array(x) else None


class ArraysAdapter(ModelAdapter):
    """A module that can be called with other arrays; its reference is in float64 on the CPU."""

    library: str
    module: Any
    is_reference: bool

    @property
    def device(self) -> Device | None:
        return device_of(self.arguments)

    def scope(self) -> AbstractContextManager[Any]:
        return float64_scope(self.library) if self.is_reference else super().scope()

    def reference_input(self, x: HostArray) -> Array:
        return cpu_placer(self.library)(x)

    def input_names(self) -> frozenset[str]:
        return parameter_names(self.module)


def training_mode_error(path: str, instead: str = "model.eval()") -> ConfigurationError:
    """Return the error for verifying a module in training mode."""
    return ConfigurationError(
        f"{path} is in training mode, where its output is random or depends on the batch, so there "
        f"is nothing to compare with; call {instead} before compile",
        source="verify=",
    )


def training_mode_note(instead: str = "its eval()") -> str:
    """Return the note in the report of a module in training mode."""
    return f"the module is in training mode; call {instead} for inference"


def parameter_names(call: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's arguments that can be passed by name.

    >>> sorted(parameter_names(lambda x, /, mask, *rest, scale=1, **more: x))
    ['mask', 'scale']
    """
    try:
        parameters = signature(call).parameters.values()
    except (TypeError, ValueError):  # functions in C may have no signature
        return frozenset()
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def host_array(x: Any) -> HostArray:
    owner = owner_of(x)
    assert owner is not None, "only arrays are read"
    return x if owner.name == "numpy" else download(x, owner)


def cpu_placer(engine: str) -> Callable[[HostArray], Array]:
    """Return a function that copies NumPy arrays to a library's CPU arrays, bit for bit."""
    return partial(registry.load(engine).place, device=Device("cpu", 0, engine=engine))


def float64_scope(engine: str) -> AbstractContextManager[None]:
    """Return a context in which the library computes in float64 on the CPU, if it can."""
    if engine not in _WITH_FLOAT64_SCOPE:
        return nullcontext()
    return part(engine, "module").float64_scope()


@contextmanager
def in_mode(module: Any, *, training: bool, attribute: str = "training") -> Iterator[None]:
    """Set the mode of a module of PyTorch or MLX inside the block, and restore each part's."""
    modes = [(part, part.training) for part in module.modules()]
    if training != module.training or not training:
        module.train(training)
    try:
        yield
    finally:
        for part, mode in modes:
            setattr(part, attribute, mode)


_changing_classes = ForkSafeLock(reentrant=True, leaves="the classes of a model")


@contextmanager
def recording(
    parts: Mapping[str, Any],
    after: After,
    around: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[None]:
    """Pass the output of each of these objects, when called inside the block, through `after`.

    Each is called inside `around(name)`. This is for modules without hooks: Python looks up
    `__call__` in the class, so the block replaces it there; other objects of the class behave as
    before.
    """
    names = {id(part): f"{path} {type(part).__name__}" for path, part in parts.items()}
    with _changing_classes.native:
        changed: list[tuple[type, Any]] = []
        try:
            for kind in {type(part): None for part in parts.values()}:
                before = kind.__dict__.get("__call__")
                type.__setattr__(
                    kind, "__call__", _record_calls(kind.__call__, names, after, around)
                )
                changed.append((kind, before))
            yield
        finally:
            for kind, before in reversed(changed):
                if before is None:
                    type.__delattr__(kind, "__call__")
                else:
                    type.__setattr__(kind, "__call__", before)


def _record_calls(
    original: Any,
    names: Mapping[int, str],
    after: After,
    around: Callable[[str], AbstractContextManager[Any]],
) -> Any:
    def call(self: Any, *inputs: Any, **named: Any) -> Any:
        name = names.get(id(self))
        if name is None:
            return original(self, *inputs, **named)
        with around(name):
            return after(name, original(self, *inputs, **named))

    return call
