"""Modules of MLX."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from anydevice.core.device import Device
from anydevice.nn.trees import leaves, mapped
from anydevice.run.libraries import float64_scope, placed_on_cpu
from anydevice.run.own_models import paths_of
from anydevice.run.precision import cast_parameters
from anydevice.run.recording import recording
from anydevice.run.subjects import After, Arguments, Array, Change, Subject
from anydevice.transfer.moving import device_of, to_device, to_numpy


class MlxSubject(Subject):
    """A `mlx.nn.Module`. It has its weights put in for each call, and its own back after it."""

    kind = "mlx.nn.Module"
    library = "mlx"

    def __init__(self, module: Any, arguments: Any = None, *, reference: bool = False) -> None:
        self.module = module
        self.arguments = module.parameters() if arguments is None else arguments
        self._reference = reference

    def call(self, arguments: Arguments, *inputs: Any, **named: Any) -> Any:
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
        return MlxSubject(self.module, to_device(arrays, device))

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
