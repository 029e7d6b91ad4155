"""Modules of JAX: those of Flax NNX, and those of Equinox, which are trees themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from anydevice.core.device import Device
from anydevice.core.hooks import load
from anydevice.models.base import (
    After,
    Arguments,
    Array,
    Change,
    Subject,
    float64_scope,
    in_training,
    names_of_inputs,
    note_of_training,
    placed_on_cpu,
    recording,
)
from anydevice.models.changes import Follower, Read, Sights
from anydevice.models.precision import Policy, cast
from anydevice.transfer.moving import device_of, is_array, to_device, to_numpy


class JaxSubject(Subject):
    """A module that is a tree of arrays and of what is no array; the latter is part of the code.

    `bound` puts a module together from arrays.
    """

    library = "jax"
    arguments: list[Array]
    _note_of_training = note_of_training()

    def __init__(
        self, module: Any, arguments: list[Array] | None = None, *, reference: bool = False
    ) -> None:
        self.module = module
        self._reference = reference
        values, self._structure = self._flat(module)
        self._paths = self._all_paths(module)
        self._places = [place for place, value in enumerate(values) if _is_numbers(value)]
        self._rest = [None if _is_numbers(value) else value for value in values]
        self._own = [values[place] for place in self._places]
        self.arguments = self._own if arguments is None else arguments
        if self._in_training() is not None:
            self.notes = (*self.notes, self._note_of_training)

    def bound(self, arguments: Sequence[Array]) -> Any:
        """The module with other arrays."""
        values = list(self._rest)
        for place, value in zip(self._places, arguments, strict=True):
            values[place] = value
        return self._whole(values)

    def call(self, arguments: Arguments, *inputs: Any, **named: Any) -> Any:
        return self.bound(arguments)(*inputs, **named)

    def under(self, policy: Policy) -> Callable[..., Any]:
        if not policy.casts_parameters:
            return self.call
        mapped = _trees().tree_map

        def run(arguments: Arguments, *inputs: Any, **named: Any) -> Any:
            result = self.call([cast(x, policy.compute) for x in arguments], *inputs, **named)
            return mapped(lambda x: cast(x, policy.output), result)

        return run

    def traced(self, after: After, *inputs: Any, **named: Any) -> Any:
        module = self.bound(self.arguments)
        with recording(self._parts(module), after):
            return module(*inputs, **named)

    def weights(self) -> Mapping[str, Array]:
        names = [self._paths[place] for place in self._places]
        return dict(zip(names, self.arguments, strict=True))

    def moved(self, device: Device, dtype: str) -> Subject:
        arrays = [cast(x, dtype) for x in self.arguments]
        return type(self)(self.module, to_device(arrays, device, convert=True))

    def reference(self, change: Change, engine: str) -> Subject:
        with float64_scope("jax"):
            arrays = [placed_on_cpu(change(to_numpy(x)), "jax") for x in self.arguments]
        return type(self)(self.module, arrays, reference=True)

    @property
    def where(self) -> Device | None:
        return device_of(self.arguments)

    def scope(self) -> AbstractContextManager[Any]:
        return float64_scope("jax") if self._reference else super().scope()

    def reference_input(self, x: Array) -> Array:
        return placed_on_cpu(x, "jax")

    def input_names(self) -> frozenset[str]:
        return names_of_inputs(self.module)

    def has_coarse_products(self, device: Device) -> bool:
        return device.kind != "cpu"

    def _flat(self, module: Any) -> tuple[list[Any], Any]:
        values, structure = _trees().tree_flatten(module)
        return values, structure

    def _whole(self, values: list[Any]) -> Any:
        return self._structure.unflatten(values)

    def _all_paths(self, module: Any) -> list[str]:
        trees = _trees()
        pairs, _ = trees.tree_flatten_with_path(module)
        return [trees.keystr(path).removeprefix(".") for path, _ in pairs]

    def _parts(self, module: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _in_training(self) -> str | None:
        """The first part that works otherwise in training, and is in training mode."""
        raise NotImplementedError


class PytreeSubject(JaxSubject):
    """A module of Equinox. Nothing in it can be changed, so there is nothing to follow."""

    kind = "equinox.Module"
    _note_of_training = note_of_training("equinox.nn.inference_mode")

    def can_be_verified(self) -> None:
        path = self._in_training()
        if path is not None:
            raise in_training(path, "equinox.nn.inference_mode(model)")

    def _parts(self, module: Any) -> dict[str, Any]:
        return dict(_modules_in(module, sys.modules["equinox"].Module, ""))

    def _in_training(self) -> str | None:
        parts = self._parts(self.module).items()
        return next((path for path, part in parts if _is_off(part, "inference")), None)


class NnxSubject(JaxSubject):
    """A module of Flax NNX. What it changes in itself when it is called is not kept."""

    kind = "flax.nnx.Module"
    _note_of_training = f"{note_of_training()}; its random numbers are the same in every call"

    def moved(self, device: Device, dtype: str) -> Subject:
        moved = super().moved(device, dtype)
        moved.follower = Follower(lambda: _sights(self.module))
        return moved

    def catches_up(self, device: Device, dtype: str) -> bool:
        now = NnxSubject(self.module)
        if now._graph != self._graph or now._structure != self._structure:
            return False
        rest = zip(now._rest, self._rest, strict=True)
        if now._places != self._places or not all(new is old for new, old in rest):
            return False
        self.arguments = [
            kept if x is old else to_device(cast(x, dtype), device, convert=True)
            for x, old, kept in zip(now._own, self._own, self.arguments, strict=True)
        ]
        self._own = now._own
        return True

    def _flat(self, module: Any) -> tuple[list[Any], Any]:
        nnx: Any = sys.modules["flax.nnx"]
        self._graph, state = nnx.split(module)
        if _trees().tree_leaves(nnx.state(module, nnx.Not(nnx.Param))):
            self.notes = ("what the module changes in itself when it is called is not kept",)
        return super()._flat(state)

    def _whole(self, values: list[Any]) -> Any:
        nnx: Any = sys.modules["flax.nnx"]
        return nnx.merge(self._graph, super()._whole(values))

    def _all_paths(self, module: Any) -> list[str]:
        nnx: Any = sys.modules["flax.nnx"]
        return super()._all_paths(nnx.state(module))

    def can_be_verified(self) -> None:
        path = self._in_training()
        if path is not None:
            raise in_training(path)

    def _in_training(self) -> str | None:
        for path, part in self._parts(self.module).items():
            if _is_off(part, "deterministic") or _is_off(part, "use_running_average"):
                return path
        return None

    def _parts(self, module: Any) -> dict[str, Any]:
        nnx: Any = sys.modules["flax.nnx"]
        found = nnx.iter_modules(module)
        return {".".join(map(str, path)): part for path, part in found if path}


def _sights(module: Any) -> Sights:
    """Where a module of Flax NNX keeps its parts and its numbers."""
    nnx: Any = sys.modules["flax.nnx"]
    base = nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object  # the name in earlier releases
    views: list[Any] = []
    readers: list[Read] = []
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            readers.append(_reader_of(node))
        elif isinstance(node, dict):
            views.append(node.values())
        elif isinstance(node, list | tuple):
            views.append(node)
        elif isinstance(node, base):
            views.append(vars(node).values())
    return Sights(views, readers, [])


def _reader_of(variable: Any) -> Read:
    # In earlier releases it is an attribute.
    return getattr(variable, "get_raw_value", None) or (lambda: variable.raw_value)


def _is_off(part: Any, switch: str) -> bool:
    return getattr(part, switch, None) is False


def _modules_in(value: Any, base: type, path: str) -> Iterator[tuple[str, Any]]:
    """The callable modules inside a module, by path, depth first."""
    if isinstance(value, base):
        inside = [(f"{path}.{name}", part) for name, part in vars(value).items()]
    elif isinstance(value, Mapping):
        inside = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"{path}[{place}]", part) for place, part in enumerate(value)]
    else:
        return
    for name, part in inside:
        yield from _modules_in(part, base, name)
    if path and isinstance(value, base) and callable(value):
        yield path.removeprefix("."), value


def _is_numbers(value: Any) -> bool:
    """Whether it is an array, and none of keys of random numbers."""
    if not is_array(value):
        return False
    dtypes = load("jax.dtypes")
    return not dtypes.issubdtype(value.dtype, dtypes.extended)


def _trees() -> Any:
    return load("jax.tree_util")
