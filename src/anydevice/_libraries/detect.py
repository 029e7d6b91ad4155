"""The adapter of a model, and the device and engine to compile or train it on.

Only libraries that are already imported are considered.
"""

from __future__ import annotations

from typing import Any, Literal

from anydevice._core.device import Device
from anydevice._core.hooks import is_of
from anydevice._core.text import type_text
from anydevice._libraries.base import ModelAdapter
from anydevice._libraries.native import FunctionAdapter, NativeAdapter
from anydevice._libraries.registry import part, row_of
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice._nn.layer import Layer
from anydevice._nn.model import Model
from anydevice.errors import ConfigurationError, UnsupportedError


def adapter_of(model: Any) -> ModelAdapter:
    """Return the adapter through which a model is moved, compiled and verified.

    >>> adapter_of(abs).kind
    'function'

    Raises `ConfigurationError` for anything but a model or a function.
    """
    if isinstance(model, Model):
        return NativeAdapter(model)
    row = row_of(model)
    if row is not None:
        adapter: ModelAdapter = getattr(part(row.library, "module"), row.adapter)(model)
        return adapter
    if isinstance(model, Layer):
        raise ConfigurationError(
            f"{model.label} is a layer and has no parameters; make it a model with nn.Model(layer)",
            source="model",
        )
    if is_of(model, "flax.linen", "Module"):
        raise ConfigurationError(
            f"{type(model).__name__} is a module of flax.linen, whose parameters are elsewhere; "
            "compile the function lambda x: module.apply(variables, x)",
            source="model",
        )
    if isinstance(model, type):
        raise ConfigurationError(
            f"{model.__qualname__} is a class; give an instance, {model.__qualname__}(…)",
            source="model",
        )
    if not callable(model):
        inside = isinstance(getattr(model, "model", None), Model)
        instead = (
            "give its .model"
            if inside
            else "give a nn.Model, a function over arrays, or a module of PyTorch, Flax NNX, "
            "Equinox or MLX"
        )
        raise ConfigurationError(
            f"{type_text(model)} cannot be compiled; {instead}", source="model"
        )
    return FunctionAdapter(model)


Facet = Literal["compiler", "autodiff"]
"""A capability that some engines lack."""


def compile_device(adapter: ModelAdapter, device: Device | str | None, *, compiled: bool) -> Device:
    """Return the device, and the engine that serves it.

    A module of a library is served by that library. Without `device`, a `nn.Model` stays on its
    device, and a module on its accelerator; everything else goes to `anydevice.device()`. If no
    engine is requested, one that compiles is preferred.

    Raises `DeviceNotFoundError` if the device is not usable, or not by that library.
    """
    if adapter.library is not None:
        return _of_library(adapter, adapter.library, device)
    return _of_any_library(adapter, device, "compiler" if compiled else None)


def training_device(adapter: ModelAdapter, device: Device | str | None) -> Device:
    """Return the device and an engine with gradients: the requested one, or the first that can.

    Raises `UnsupportedError` if the requested engine has no gradients, or no engine there has.
    """
    chosen = _of_any_library(adapter, device, "autodiff")
    if chosen.engine is not None and not _has(chosen.engine, "autodiff"):
        absent = registry.row_of(chosen.engine).lacks["autodiff"]
        raise UnsupportedError(
            f'{absent}: leave device= out, or give one such as device("cpu", engine="torch")',
            absent,
        )
    return chosen


def _of_library(adapter: ModelAdapter, library: str, device: Device | str | None) -> Device:
    if device is None:
        where = adapter.device
        if where is not None and where.kind != "cpu":
            return where.served_by(library)
        return one_device(None, engine=library)
    place = str(device) if isinstance(device, Device) else device
    return one_device(place, engine=library)


def _of_any_library(
    adapter: ModelAdapter, device: Device | str | None, facet: Facet | None
) -> Device:
    if isinstance(device, Device) and not device.engine_is_free:
        return one_device(device)
    chosen = (adapter.device if device is None else None) or one_device(device)
    return chosen if facet is None else _able(chosen, facet)


def _able(device: Device, facet: Facet) -> Device:
    """Return the device, served by an engine with this capability if there is one."""
    if device.engine is not None and _has(device.engine, facet):
        return device
    status = device.status
    able = [name for name in (status.engines if status else ()) if _has(name, facet)]
    able.sort(key=lambda name: not registry.loaded(name))
    return device.served_by(able[0]) if able else device


def _has(engine: str, facet: Facet) -> bool:
    return facet not in registry.row_of(engine).lacks
