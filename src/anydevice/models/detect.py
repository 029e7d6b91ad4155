"""Which kind of model is this? Asks only the libraries that are imported already.

Where a model is compiled or trained: on the device that was asked for, by an engine that can.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.errors import ConfigurationError, UnsupportedError
from anydevice.models.base import Subject, in_words
from anydevice.models.jax import NnxSubject, PytreeSubject
from anydevice.models.mlx import MlxSubject
from anydevice.models.native import FunctionSubject, ModelSubject
from anydevice.models.torch import TorchSubject
from anydevice.nn.layer import Layer
from anydevice.nn.model import Model

_MODULES: tuple[tuple[str, Callable[[Any], Subject]], ...] = (
    ("torch.nn", TorchSubject),
    ("flax.nnx", NnxSubject),
    ("mlx.nn", MlxSubject),
    ("equinox", PytreeSubject),
)
"""Where a library's class `Module` is, and what its modules are for us."""


def subject_of(model: Any) -> Subject:
    """The model as something that can be moved, compiled and checked.

    >>> subject_of(abs).kind
    'function'

    Raises `ConfigurationError` for anything that is no model and no function.
    """
    if isinstance(model, Model):
        return ModelSubject(model)
    for library, made in _MODULES:
        module = sys.modules.get(library)
        if module is not None and isinstance(model, module.Module):
            return made(model)
    if isinstance(model, Layer):
        raise ConfigurationError(
            f"{model.label} is a layer and has no parameters; make it a model with nn.Model(layer)",
            source="model",
        )
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        raise ConfigurationError(
            f"{type(model).__name__} is a module of flax.linen, whose parameters are elsewhere; "
            "compile the function lambda x: module.apply(variables, x)",
            source="model",
        )
    if isinstance(model, type):
        raise ConfigurationError(
            f"{model.__qualname__} is a class; give one of it, {model.__qualname__}(…)",
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
        raise ConfigurationError(f"{in_words(model)} cannot be compiled; {instead}", source="model")
    return FunctionSubject(model)


Facet = Literal["compiler", "autodiff"]
"""What not every engine has."""


def home_of(subject: Subject, device: Device | str | None, *, compiled: bool) -> Device:
    """The device, and the engine that serves it.

    A module of a library is served by that library. Without a device, our own models stay where
    they are, modules that are on an accelerator too; all else goes where `anydevice.device()` says.
    Where nobody asked for an engine, one that compiles is taken before one that does not.

    Raises `DeviceNotFoundError` where the device is not usable, or not by that library.
    """
    if subject.library is not None:
        return _of_library(subject, subject.library, device)
    return _of_any_library(subject, device, "compiler" if compiled else None)


def home_for_training(subject: Subject, device: Device | str | None) -> Device:
    """The device and an engine with gradients: the one that is asked for, or the first that can.

    Raises `UnsupportedError` where the engine that was asked for has none, or none there can.
    """
    home = _of_any_library(subject, device, "autodiff")
    if home.engine is not None and not _has(home.engine, "autodiff"):
        absent = registry.row_of(home.engine).lacks["autodiff"]
        raise UnsupportedError(
            f'{absent}: leave device= out, or give one such as device("cpu", engine="torch")',
            absent,
        )
    return home


def _of_library(subject: Subject, library: str, device: Device | str | None) -> Device:
    if device is None:
        where = subject.where
        if where is not None and where.kind != "cpu":
            return where.served_by(library)
        return choose_device(None, engine=library)
    place = str(device) if isinstance(device, Device) else device
    return choose_device(place, engine=library)


def _of_any_library(subject: Subject, device: Device | str | None, facet: Facet | None) -> Device:
    if isinstance(device, Device) and not device.engine_is_free:
        return choose_device(device)
    where = subject.where if device is None else None
    home = where or choose_device(device)
    return home if facet is None else _able(home, facet)


def _able(device: Device, facet: Facet) -> Device:
    """The same place, served by an engine that has this, where there is one."""
    if device.engine is not None and _has(device.engine, facet):
        return device
    standing = device.standing
    able = [name for name in (standing.engines if standing else ()) if _has(name, facet)]
    able.sort(key=lambda name: not registry.loaded(name))
    return device.served_by(able[0]) if able else device


def _has(engine: str, facet: Facet) -> bool:
    return facet not in registry.row_of(engine).lacks
