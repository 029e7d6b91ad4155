"""Adapters of JAX modules: Flax NNX, and Equinox, whose modules are trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
from jax import tree_util as trees

from anydevice._arrays.move import is_array, to_device
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.hooks import is_of
from anydevice._libraries import base
from anydevice._libraries.jax.random import key_of
from anydevice._libraries.precision import Policy, cast
from anydevice._nn.layer import Run
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
        self.name = type(model).__name__
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
    """A module of Equinox, a pair of one and its state, or `jax.vmap` of one.

    A module of one example is mapped over the rows of a batch. It is immutable, so no changes are
    detected.
    """

    kind = "equinox.Module"
    _training_note = base.training_mode_note("equinox.nn.inference_mode")
    _inference_mode = "equinox.nn.inference_mode(model)"

    def _module_of(self, model: Any) -> Any:
        self._maps: dict[str, bool] = {}
        self.has_state = isinstance(model, tuple)
        module = model if self.has_state else mapped_module(model) or model
        self.name = type(self.parted(module)[0]).__name__
        return module

    def parted(self, module: Any) -> tuple[Any, Any]:
        """Return the module and its state, or `None`."""
        return module if self.has_state else (module, None)

    def run(self, module: Any, *inputs: Any, **named: Any) -> Any:
        return self.step(module, inputs, named)[0]

    def step(
        self, module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], run: Run | None = None
    ) -> tuple[Any, Any]:
        """Return the output and the new state; in training, each row has its own random key."""
        if self._given is not self.module:  # the user maps it
            return self.over(module)(*inputs, **named), None
        call = _call_rows if self.maps(module, inputs, named, run) else _call_module
        return call(*self.parted(module), inputs, named, run)

    def maps(self, module: Any, inputs: Any, named: Any, run: Run | None = None) -> bool:
        """Whether the inputs are a batch for a module of one example, by their shapes.

        One with weights for 16 features may take 16 rows of them by accident, but not 7 and 11.
        """
        given = _with_rows((inputs, named))
        known = f"{self.batches} {given}"
        if known not in self._maps:
            self._maps[known] = self._needs_rows(*self.parted(module), given, run)
        return self._maps[known]

    def _needs_rows(self, module: Any, state: Any, given: Any, run: Run | None) -> bool:
        index = equinox().nn.StateIndex
        parts = trees.tree_leaves(module, is_leaf=lambda x: isinstance(x, index))
        if self.batches and state is None and any(isinstance(part, index) for part in parts):
            raise ConfigurationError(
                f"{self.name} has state: give (model, state), as equinox.nn.make_with_state "
                "returned them, in place of model",
                source="model",
            )

        def fits(call: Any, rows: int | None = None) -> bool:
            try:
                make = partial(call, module, state, run=run)
                equinox().filter_eval_shape(make, *_with_rows(given, rows))
            except Exception:  # a module may raise anything for inputs that it does not accept
                return False
            return True

        if not fits(_call_rows):
            return False
        takes_both = fits(_call_module, 7) and fits(_call_module, 11)
        if not takes_both or not self.batches:
            return self.batches or not takes_both
        draw = np.random.default_rng(0).integers
        with jax.ensure_compile_time_eval():
            whole = self.parted(equinox().nn.inference_mode(self.bound(self._own)))
            rows = trees.tree_map(
                lambda x: jax.numpy.asarray(draw(0, 3, x.shape), x.dtype) if _has_rows(x) else x,
                _with_rows(given, 3),
            )
            outputs = [call(*whole, *rows)[0] for call in (_call_module, _call_rows)]
            pairs = zip(*map(trees.tree_leaves, outputs), strict=True)
            if all(a.shape == b.shape and np.allclose(a, b, 1e-3, 1e-5) for a, b in pairs):
                return True
        raise ConfigurationError(
            f"{self.name} takes one example, and takes a batch too, with other outputs; give "
            "jax.vmap(model) if it is written for one example, and otherwise a function: "
            "lambda x: model(x), or in a training loss(model, x, y)",
            source="model",
        )

    def traced(self, after: base.After, *inputs: Any, **named: Any) -> Any:
        if self._given is self.module:  # decide before the outputs of parts are recorded
            self.maps(self.bound(self.arguments), inputs, named)
        return super().traced(after, *inputs, **named)

    def with_weights(self, arguments: Sequence[Array]) -> Any:
        """Return the user's model with other arrays."""
        return self.over(self.bound(arguments))

    def over(self, module: Any) -> Any:
        """Return the user's model over another module."""
        return _with_module(self._given, self.module, module)

    def _all_paths(self, module: Any) -> list[str]:
        module, state = self.parted(module)
        return [*super()._all_paths(module), *state_paths(state)]

    def _parts(self, module: Any) -> dict[str, Any]:
        return dict(_modules_in(self.parted(module)[0], equinox().Module, ""))

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


def _key_of_call(module: Any, named: Mapping[str, Any], run: Run | None) -> Any:
    """Return the random key of a call: of the step in training, a fixed one if it needs one."""
    parameter = signature(type(module).__call__).parameters.get("key")
    if parameter is None or "key" in named:
        return named.get("key")
    if run is not None and run.training:
        return key_of(run)
    return jax.random.key(0) if parameter.default is parameter.empty else None


def _call_module(
    module: Any, state: Any, inputs: Any, named: Any, run: Run | None = None, key: Any = None
) -> tuple[Any, Any]:
    """Return the output of a module and its new state; the state comes after the inputs."""
    key = _key_of_call(module, named, run) if key is None else key
    named = named if key is None else {**named, "key": key}
    if state is None:
        return module(*inputs, **named), None
    if not inputs:
        return tuple(module(**named, state=state))
    return tuple(module(*inputs, state, **named))


def _call_rows(
    module: Any, state: Any, inputs: Any, named: Any, run: Run | None = None
) -> tuple[Any, Any]:
    """Return the outputs for all rows, each with its own key, and one new state."""
    key = _key_of_call(module, named, run)
    named = {name: x for name, x in named.items() if name != "key"}
    if key is not None:
        count = next(x.shape[0] for x in trees.tree_leaves((inputs, named)) if _has_rows(x))
        first = 0 if run is None or run.rows is None else run.rows[0]
        key = jax.vmap(partial(jax.random.fold_in, key))(jax.numpy.arange(first, first + count))
    parts = [module, *dict(_modules_in(module, equinox().Module, "")).values()]
    names = [part.axis_name for part in parts if getattr(part, "axis_name", None) is not None]
    mapped = equinox().filter_vmap(
        lambda state, key, inputs, named: _call_module(module, state, inputs, named, run, key),
        in_axes=(None, *[lambda x: 0 if _has_rows(x) else None] * 3),
        out_axes=(equinox().if_array(0), None),
        axis_name=names[0] if names else "batch",  # by which a BatchNorm reaches the other rows
    )
    return tuple(mapped(state, key, inputs, named))


def _has_rows(x: Any) -> bool:
    return bool(getattr(x, "shape", ()))


def _with_rows(inputs: Any, rows: int | None = None) -> Any:
    """Return the shapes of inputs, with another number of rows if it is given."""
    make = jax.ShapeDtypeStruct
    return trees.tree_map(
        lambda x: make((rows or x.shape[0], *x.shape[1:]), x.dtype) if _has_rows(x) else x, inputs
    )


def state_paths(state: Any) -> dict[str, Any]:
    """Return the values of the state of a module by path; empty for `None`."""
    pairs, _ = trees.tree_flatten_with_path(state)
    names = [trees.keystr(path).replace("<flat index ", "").replace(">", "") for path, _ in pairs]
    return {f"[state]{name}": x for name, (_, x) in zip(names, pairs, strict=True)}


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
    return jax.enable_x64(True)
