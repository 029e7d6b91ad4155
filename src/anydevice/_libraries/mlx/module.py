"""The adapter of MLX modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from anydevice._arrays.move import to_device
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.locks import ForkSafeLock
from anydevice._core.trees import leaves, mapped, refilled
from anydevice._libraries import base
from anydevice._libraries.native import paths_of
from anydevice._libraries.precision import cast, cast_parameters

_changing = ForkSafeLock(reentrant=True, leaves="the weights of a model")
"""Locked while a module has other weights than its own."""


class MlxAdapter(base.ArraysAdapter):
    """An `mlx.nn.Module`. Each call sets its weights, and restores its own afterwards."""

    kind = "mlx.nn.Module"
    library = "mlx"
    follows = (
        "weights, parts, mode; not writes into an array in place, such as w[0] = 1: call "
        "refresh() after that"
    )

    def __init__(self, module: Any, arguments: Any = None, *, reference: bool = False) -> None:
        self.module = module
        with _changing.native:
            self._own = module.parameters()
            self._structure = _structure_of(module)
        self.arguments = self._own if arguments is None else arguments
        self.is_reference = reference
        if any(part.training for part in module.modules()):
            self.notes = (base.training_mode_note(),)

    def call(self, arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
        with _changing.native:
            own = self.module.parameters()
            self.module.update(arguments)
            try:
                return self.module(*inputs, **named)
            finally:
                self.module.update(own)

    def traced(self, after: base.After, *inputs: Any, **named: Any) -> Any:
        parts = {path: part for path, part in self.module.named_modules() if path}
        with base.recording(parts, after):
            return self.call(self.arguments, *inputs, **named)

    def weights(self) -> Mapping[str, Array]:
        return paths_of(self.arguments)

    def moved(self, device: Device, dtype: str) -> base.ModelAdapter:
        arrays = cast_parameters(self.arguments, dtype)
        moved = MlxAdapter(self.module, to_device(arrays, device))
        moved.detector = _LockedDetector(lambda: base.Watched(list(_views(self.module)), [], []))
        return moved

    def update_weights(self, device: Device, dtype: str) -> bool:
        with _changing.native:
            own = self.module.parameters()
            if _structure_of(self.module) != self._structure:
                return False
        before, there = leaves(self._own), leaves(self.arguments)
        taken = [
            placed if x is old else to_device(cast(x, dtype), device)
            for x, old, placed in zip(leaves(own), before, there, strict=True)
        ]
        self._own, self.arguments = own, refilled(own, taken)
        return True

    def reference(self, change: base.Change, engine: str) -> base.ModelAdapter:
        place = base.cpu_placer("mlx")
        changed = mapped(lambda x: place(change(base.host_array(x))), self.arguments)
        return MlxAdapter(self.module, changed, reference=True)


class _LockedDetector(base.ChangeDetector):
    def has_changed(self) -> bool:
        with _changing.native:
            return super().has_changed()

    def snapshot(self) -> base.Snapshot:
        with _changing.native:
            return super().snapshot()


def _views(value: Any) -> Iterator[Any]:
    """Yield the contents of a module, and of everything inside it."""
    inside: Any = value.values() if isinstance(value, dict) else value
    yield inside
    if hasattr(value, "__dict__"):
        yield vars(value).values()
    for part in inside:
        if isinstance(part, dict | list | tuple):
            yield from _views(part)


def _structure_of(module: Any) -> list[Any]:
    """Return the parts of a module, and the shapes and dtypes of its weights."""
    parts = [(path, type(part), part.training) for path, part in module.named_modules()]
    weights = [(path, x.shape, x.dtype) for path, x in paths_of(module.parameters()).items()]
    return [parts, weights]


@contextmanager
def float64_scope() -> Iterator[None]:
    """Compute on the CPU inside the block, because MLX has float64 only there."""
    with mx.stream(mx.cpu):
        yield


@contextmanager
def in_inference(model: Any) -> Iterator[Any]:
    """Hold the module in inference mode inside the block."""
    with base.in_mode(model, training=False, attribute="_training"):
        yield model
