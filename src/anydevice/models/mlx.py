"""Modules of MLX."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from anydevice.core.device import Device
from anydevice.core.trees import leaves, mapped, refilled
from anydevice.models.base import (
    After,
    Arguments,
    Array,
    Change,
    Subject,
    float64_scope,
    names_of_inputs,
    note_of_training,
    placed_on_cpu,
    recording,
)
from anydevice.models.changes import Follower, Seen, Sights
from anydevice.models.native import paths_of
from anydevice.models.precision import cast, cast_parameters
from anydevice.transfer.moving import device_of, to_device, to_numpy

_changing = threading.RLock()
"""Held while a module has other weights put in: nobody must take those for its own."""


class MlxSubject(Subject):
    """A `mlx.nn.Module`. It has its weights put in for each call, and its own back after it."""

    kind = "mlx.nn.Module"
    library = "mlx"

    def __init__(self, module: Any, arguments: Any = None, *, reference: bool = False) -> None:
        self.module = module
        with _changing:
            self._own = module.parameters()
            self._form = _form_of(module)
        self.arguments = self._own if arguments is None else arguments
        self._reference = reference
        if any(part.training for part in module.modules()):
            self.notes = (note_of_training(),)

    def call(self, arguments: Arguments, *inputs: Any, **named: Any) -> Any:
        with _changing:
            own = self.module.parameters()
            self.module.update(arguments)
            try:
                return self.module(*inputs, **named)
            finally:
                self.module.update(own)

    def traced(self, after: After, *inputs: Any, **named: Any) -> Any:
        parts = {path: part for path, part in self.module.named_modules() if path}
        with recording(parts, after):
            return self.call(self.arguments, *inputs, **named)

    def weights(self) -> Mapping[str, Array]:
        return paths_of(self.arguments)

    def moved(self, device: Device, dtype: str) -> Subject:
        arrays = cast_parameters(self.arguments, dtype)
        moved = MlxSubject(self.module, to_device(arrays, device))
        moved.follower = _LockedFollower(lambda: _sights(self.module))
        return moved

    def catches_up(self, device: Device, dtype: str) -> bool:
        with _changing:
            own = self.module.parameters()
            if _form_of(self.module) != self._form:
                return False
        before, there = leaves(self._own), leaves(self.arguments)
        taken = [
            kept if x is old else to_device(cast(x, dtype), device)
            for x, old, kept in zip(leaves(own), before, there, strict=True)
        ]
        self._own, self.arguments = own, refilled(own, taken)
        return True

    def reference(self, change: Change, engine: str) -> Subject:
        def placed(x: Array) -> Array:
            return placed_on_cpu(change(to_numpy(x)), "mlx")

        return MlxSubject(self.module, mapped(placed, self.arguments), reference=True)

    @property
    def where(self) -> Device | None:
        return device_of(leaves(self.arguments))

    def scope(self) -> AbstractContextManager[Any]:
        return float64_scope("mlx") if self._reference else super().scope()

    def reference_input(self, x: Array) -> Array:
        return placed_on_cpu(x, "mlx")

    def input_names(self) -> frozenset[str]:
        return names_of_inputs(self.module)


class _LockedFollower(Follower):
    def sees_changes(self) -> bool:
        with _changing:
            return super().sees_changes()

    def look(self) -> Seen:
        with _changing:
            return super().look()


def _sights(module: Any) -> Sights:
    return Sights(list(_views(module)), [], [])


def _views(value: Any) -> Iterator[Any]:
    """What is in a module, and in everything inside it."""
    inside: Any = value.values() if isinstance(value, dict) else value
    yield inside
    if hasattr(value, "__dict__"):
        yield vars(value).values()
    for each in inside:
        if isinstance(each, dict | list | tuple):
            yield from _views(each)


def _form_of(module: Any) -> list[Any]:
    """All of a module but the numbers in its weights."""
    parts = [(path, type(part), part.training) for path, part in module.named_modules()]
    weights = [(path, x.shape, x.dtype) for path, x in paths_of(module.parameters()).items()]
    return [parts, weights]
