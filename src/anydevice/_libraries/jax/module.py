"""Adapters of JAX modules: Flax NNX, and Equinox, whose modules are trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import Any

import jax
from jax import tree_util as trees

from anydevice._arrays.move import is_array, to_device
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.hooks import is_of
from anydevice._libraries import base
from anydevice._libraries.precision import Policy, cast
from anydevice.errors import ConfigurationError

_MOST_WRAPPERS = 8
"""Depth to which nested functions are searched for a module."""


class JaxAdapter(base.ArraysAdapter):
    """A module that is a tree of arrays and static values, which are part of the code."""

    library = "jax"
    arguments: list[Array]
    _training_note = base.training_mode_note()
    _inference_mode = "model.eval()"

    def __init__(
        self, model: Any, arguments: list[Array] | None = None, *, reference: bool = False
    ) -> None:
        self._given = model
        self.module = module = self._module_of(model)
        self.is_reference = reference
        values, self._structure = self._flat(module)
        self._paths = self._all_paths(module)
        self._places = [place for place, value in enumerate(values) if _is_numbers(value)]
        self._rest = [None if _is_numbers(value) else value for value in values]
        self._own = [values[place] for place in self._places]
        self.arguments = self._own if arguments is None else arguments
        if self._in_training() is not None:
            self.notes = (*self.notes, self._training_note)

    def bound(self, arguments: Sequence[Array]) -> Any:
        """Return the module with other arrays."""
        values = list(self._rest)
        for place, value in zip(self._places, arguments, strict=True):
            values[place] = value
        return self._whole(values)

    def call(self, arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
        return self.run(self.bound(arguments), *inputs, **named)

    def _module_of(self, model: Any) -> Any:
        return model

    def run(self, module: Any, *inputs: Any, **named: Any) -> Any:
        return module(*inputs, **named)

    def with_policy(self, policy: Policy) -> Callable[..., Any]:
        if not policy.casts_parameters:
            return self.call
        mapped = trees.tree_map

        def run(arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
            result = self.call([cast(x, policy.compute) for x in arguments], *inputs, **named)
            return mapped(lambda x: cast(x, policy.output), result)

        return run

    def traced(self, after: base.After, *inputs: Any, **named: Any) -> Any:
        module = self.bound(self.arguments)
        with base.recording(self._parts(module), after):
            return self.run(module, *inputs, **named)

    def weights(self) -> Mapping[str, Array]:
        names = [self._paths[place] for place in self._places]
        return dict(zip(names, self.arguments, strict=True))

    def moved(self, device: Device, dtype: str) -> base.ModelAdapter:
        arrays = [cast(x, dtype) for x in self.arguments]
        return type(self)(self._given, to_device(arrays, device, convert=True))

    def reference(self, change: base.Change, engine: str) -> base.ModelAdapter:
        with float64_scope():
            place = base.cpu_placer("jax")
            arrays = [place(change(base.host_array(x))) for x in self.arguments]
        return type(self)(self._given, arrays, reference=True)

    def has_coarse_products(self, device: Device) -> bool:
        return device.kind != "cpu"

    def check_verifiable(self) -> None:
        path = self._in_training()
        if path is not None:
            raise base.training_mode_error(path, self._inference_mode)

    def _flat(self, module: Any) -> tuple[list[Any], Any]:
        values, structure = trees.tree_flatten(module)
        return values, structure

    def _whole(self, values: list[Any]) -> Any:
        return self._structure.unflatten(values)

    def _all_paths(self, module: Any) -> list[str]:
        pairs, _ = trees.tree_flatten_with_path(module)
        return [trees.keystr(path).removeprefix(".") for path, _ in pairs]

    def _parts(self, module: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _in_training(self) -> str | None:
        """Return the first part whose output depends on its training mode."""
        raise NotImplementedError


class EquinoxAdapter(JaxAdapter):
    """A module of Equinox, also in `jax.vmap`. It is immutable, so no changes are detected."""

    kind = "equinox.Module"
    _training_note = base.training_mode_note("equinox.nn.inference_mode")
    _inference_mode = "equinox.nn.inference_mode(model)"

    def _module_of(self, model: Any) -> Any:
        return mapped_module(model) or model

    def run(self, module: Any, *inputs: Any, **named: Any) -> Any:
        if self._given is not self.module:
            return self.over(module)(*inputs, **named)
        try:
            return module(*inputs, **named)
        except Exception as error:
            if _runs_mapped(module, inputs, named):
                raise ConfigurationError(
                    f"{type(module).__name__} takes one example, and got a batch: compile "
                    "jax.vmap(model) in place of model",
                    source="inputs",
                ) from error
            raise

    def with_weights(self, arguments: Sequence[Array]) -> Any:
        """Return the user's model with other arrays."""
        return self.over(self.bound(arguments))

    def over(self, module: Any) -> Any:
        """Return the user's model over another module."""
        return _with_module(self._given, self.module, module)

    def _parts(self, module: Any) -> dict[str, Any]:
        return dict(_modules_in(module, equinox().Module, ""))

    def _in_training(self) -> str | None:
        parts = self._parts(self.module).items()
        return next((path for path, part in parts if _is_false(part, "inference")), None)


class NnxAdapter(JaxAdapter):
    """A module of Flax NNX. Changes that it makes to itself in a call are discarded."""

    kind = "flax.nnx.Module"
    _training_note = f"{base.training_mode_note()}; its random numbers are the same in every call"

    def moved(self, device: Device, dtype: str) -> base.ModelAdapter:
        moved = super().moved(device, dtype)
        moved.detector = base.ChangeDetector(lambda: _watch_objects(self.module))
        return moved

    def update_weights(self, device: Device, dtype: str) -> bool:
        now = NnxAdapter(self.module)
        if now._graph != self._graph or now._structure != self._structure:
            return False
        rest = zip(now._rest, self._rest, strict=True)
        if now._places != self._places or not all(new is old for new, old in rest):
            return False
        self.arguments = [
            placed if x is old else to_device(cast(x, dtype), device, convert=True)
            for x, old, placed in zip(now._own, self._own, self.arguments, strict=True)
        ]
        self._own = now._own
        return True

    def _flat(self, module: Any) -> tuple[list[Any], Any]:
        self._graph, state = nnx().split(module)
        if trees.tree_leaves(nnx().state(module, nnx().Not(nnx().Param))):
            self.notes = ("changes that the module makes to itself when called are not kept",)
        return super()._flat(state)

    def _whole(self, values: list[Any]) -> Any:
        return nnx().merge(self._graph, super()._whole(values))

    def _all_paths(self, module: Any) -> list[str]:
        return super()._all_paths(nnx().state(module))

    def _in_training(self) -> str | None:
        for path, part in self._parts(self.module).items():
            if _is_false(part, "deterministic") or _is_false(part, "use_running_average"):
                return path
        return None

    def _parts(self, module: Any) -> dict[str, Any]:
        modules = nnx().iter_modules(module)
        return {".".join(map(str, path)): part for path, part in modules if path}


def mapped_module(function: Any) -> Any:
    """Return the Equinox module inside a function made by `jax.vmap`; `None` for others."""
    module_type = equinox().Module
    inside = function
    while not isinstance(inside, module_type) and hasattr(inside, "__wrapped__"):
        inside = inside.__wrapped__
    if not isinstance(inside, module_type) or _with_module(function, inside, None) is function:
        return None
    return inside


@contextmanager
def in_inference(model: Any) -> Iterator[Any]:
    """Yield a copy of a module, or of a `jax.vmap` of one, in inference mode."""
    if is_of(model, "flax.nnx", "Module"):
        model = nnx().clone(model)
        model.eval()
        yield model
    else:
        module = mapped_module(model)
        module = model if module is None else module
        yield _with_module(model, module, equinox().nn.inference_mode(module))


def _with_module(function: Any, old: Any, new: Any, depth: int = 0) -> Any:
    """Return the function over another module, without `jax.jit`; unchanged if not over `old`."""
    if function is old:
        return new
    if isinstance(function, jax.stages.Wrapped):
        inside = function.__wrapped__
        made = _with_module(inside, old, new, depth + 1)
        return function if made is inside else made
    if not isinstance(function, FunctionType) or depth > _MOST_WRAPPERS:
        return function
    before = function.__closure__ or ()
    after = [_with_module(cell.cell_contents, old, new, depth + 1) for cell in before]
    cells = [
        cell if value is cell.cell_contents else CellType(value)
        for cell, value in zip(before, after, strict=True)
    ]
    if all(map(is_, cells, before)):
        return function
    code, scope, defaults = function.__code__, function.__globals__, function.__defaults__
    made = FunctionType(code, scope, function.__name__, defaults, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    if hasattr(function, "__wrapped__"):  # marks a function over a module
        made.__dict__["__wrapped__"] = _with_module(function.__wrapped__, old, new, depth + 1)
    return made


def _runs_mapped(module: Any, inputs: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the module accepts each of these examples alone."""
    axes = [0 if getattr(x, "shape", ()) else None for x in inputs]
    mapped = jax.vmap(lambda *one: module(*one, **named), in_axes=axes)
    try:
        jax.eval_shape(mapped, *inputs)
    except Exception:  # a module may raise anything for inputs that it does not accept
        return False
    return True


def _watch_objects(module: Any) -> base.Watched:
    """Return the objects of a module of Flax NNX, and the values of its variables."""
    # An `Object` in earlier releases.
    object_type = nnx().Pytree if hasattr(nnx(), "Pytree") else nnx().Object
    views: list[Any] = []
    values: list[Callable[[], Any]] = []
    for _, node in nnx().iter_graph(module):
        if isinstance(node, nnx().Variable):
            # An attribute in earlier releases.
            read = getattr(node, "get_raw_value", None) or partial(getattr, node, "raw_value")
            values.append(read)
        elif isinstance(node, dict):
            views.append(node.values())
        elif isinstance(node, list | tuple):
            views.append(node)
        elif isinstance(node, object_type):
            views.append(vars(node).values())
    return base.Watched(views, [lambda: [read() for read in values]], [])


def _is_false(part: Any, name: str) -> bool:
    return getattr(part, name, None) is False


def _modules_in(value: Any, kind: type, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the callable modules inside a module, by path, depth first."""
    if isinstance(value, kind):
        inside = [(f"{path}.{name}", part) for name, part in vars(value).items()]
    elif isinstance(value, Mapping):
        inside = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"{path}[{place}]", part) for place, part in enumerate(value)]
    else:
        return
    for name, part in inside:
        yield from _modules_in(part, kind, name)
    if path and isinstance(value, kind) and callable(value):
        yield path.removeprefix("."), value


def _is_numbers(value: Any) -> bool:
    """Whether the value is an array, but not of random keys."""
    if not is_array(value):
        return False
    dtypes = jax.dtypes
    return not dtypes.issubdtype(value.dtype, dtypes.extended)


def nnx() -> ModuleType:
    """Return Flax NNX, already imported by the user of its module."""
    from flax import nnx

    return nnx


def equinox() -> ModuleType:
    """Return Equinox, already imported by the user of its module."""
    import equinox

    return equinox


@contextmanager
def float64_scope() -> Iterator[None]:
    """Compute in float64 on the CPU inside the block."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


def wide_numbers() -> AbstractContextManager[None]:
    """Return a context in which JAX supports 64-bit numbers."""
    block: AbstractContextManager[None] = jax.enable_x64(True)
    return block
