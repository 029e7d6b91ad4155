"""The libraries of modules: a row for each kind of module, and the adapter and device of a model.

The code of a library is in the folder of its engine, in files of the same names: `module` (how a
module is called, moved and verified), `step` (how it is trained), `mesh` (several processes and
devices), `pipeline`, `random`, `trees`, `trace`. A file is loaded when a value of that library
appears: nothing here imports a library that the user has not imported.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from anydevice._core.device import Device
from anydevice._core.finding import Facts
from anydevice._core.hooks import is_loaded, is_of
from anydevice._core.record import Record, replace
from anydevice._core.text import install_command, type_text
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice._machine.engines.diagnosis import command_for
from anydevice.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from anydevice._libraries.base import ModelAdapter

Facet = Literal["compiler", "autodiff"]
"""A capability that some engines lack."""


class ModuleRow(Record):
    """One kind of module: its class, the engine of its arrays, its adapter and its layer."""

    module: str
    library: str
    adapter: str
    layer: str


ROWS = (
    ModuleRow("torch.nn", "torch", "TorchAdapter", "TorchLayer"),
    ModuleRow("flax.nnx", "jax", "NnxAdapter", "NnxLayer"),
    ModuleRow("mlx.nn", "mlx", "MlxAdapter", "MlxLayer"),
    ModuleRow("equinox", "jax", "EquinoxAdapter", "EquinoxLayer"),
)


def row_of(model: object) -> ModuleRow | None:
    """Return the row of a module; also of an Equinox one with its state, or in `jax.vmap`."""
    if isinstance(model, tuple) and len(model) == 2 and is_of(model[1], "equinox.nn", "State"):
        model = model[0]
    row = next((row for row in ROWS if is_of(model, row.module, "Module")), None)
    if row is None and is_loaded("equinox") and part("jax", "module").mapped_module(model):
        return ROWS[-1]
    return row


def is_torch_module(model: object) -> bool:
    """Whether `model` is a module of PyTorch, which is moved and trained in place."""
    return is_of(model, "torch.nn", "Module")


@cache
def part(library: str, name: str) -> ModuleType:
    """Load a file of a library that is imported already, or that the user requested.

    >>> part("numpy", "module")
    Traceback (most recent call last):
    ModuleNotFoundError: No module named 'anydevice._libraries.numpy'
    """
    return import_module(f"anydevice._libraries.{library}.{name}")


def adapter_of(model: Any) -> ModelAdapter:
    """Return the adapter through which a model is moved, compiled and verified."""
    from anydevice._libraries import native  # it imports `base`, which imports this module
    from anydevice._nn.layer import Layer
    from anydevice._nn.model import Model

    if isinstance(model, Model):
        return native.NativeAdapter(model)
    row = row_of(model)
    if row is not None:
        return getattr(part(row.library, "module"), row.adapter)(model)
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
        instead = (
            "a nn.Model, a function over arrays, or a module of PyTorch, Flax NNX, Equinox or MLX"
        )
        if isinstance(getattr(model, "model", None), Model):
            instead = "its .model"
        raise ConfigurationError(
            f"{type_text(model)} cannot be compiled; give {instead}", source="model"
        )
    return native.FunctionAdapter(model)


def compile_device(adapter: ModelAdapter, device: Device | str | None, *, compiled: bool) -> Device:
    """Return the device, and the engine that serves it.

    A module of a library is served by that library. Without `device`, a `nn.Model` stays on its
    device, and a module on its accelerator; everything else goes to `anydevice.device()`. If no
    engine is requested, one that compiles is preferred.

    Raises `DeviceNotFoundError` if the device is not usable, or not by that library.
    """
    library = adapter.library
    if library is None:
        return _of_any_library(adapter, device, "compiler" if compiled else None)
    home = adapter.device if device is None else None
    if home is not None and home.kind != "cpu":
        return home.served_by(library)
    place = str(device) if isinstance(device, Device) else device
    return one_device(place, engine=library)


def training_device(adapter: ModelAdapter, device: Device | str | None) -> Device:
    """Return the device and an engine with gradients: the requested one, or the first that can."""
    chosen = _of_any_library(adapter, device, "autodiff")
    if chosen.engine is not None and not _has(chosen.engine, "autodiff"):
        raise _no_autodiff(chosen, chosen.engine, is_given=device is not None)
    return chosen


def _no_autodiff(device: Device, engine: str, *, is_given: bool) -> UnsupportedError:
    """Return the error for an engine without gradients: what to install, or what to write."""
    absent = registry.row_of(engine).lacks["autodiff"]
    places = [(p, name) for p in (device.backend, "cpu") for name in registry.engines_for(p)]
    able = [(place, name) for place, name in places if _has(name, "autodiff")]
    place, name = next((row for row in able if registry.installed(row[1]).installed), able[0])
    build = registry.installed(name)
    if build.installed:
        first = "leave device= out, or give" if is_given else "give"
        words = f'{absent}: {first} one such as device("{place}", engine="{name}")'
        return UnsupportedError(words, absent)
    facts = device.status.facts if device.status and place == device.backend else Facts(place)
    command = command_for(build, place, facts) or install_command(name)
    what = f"{absent.what}, and no installed library has it"
    return replace(absent, what=what, instead=f"run: {command}").error()


def _of_any_library(
    adapter: ModelAdapter, device: Device | str | None, facet: Facet | None
) -> Device:
    """Return the device, served by an engine with this capability if there is one."""
    if isinstance(device, Device) and not device.engine_is_free:
        return one_device(device)
    chosen = (adapter.device if device is None else None) or one_device(device)
    if facet is None or (chosen.engine is not None and _has(chosen.engine, facet)):
        return chosen
    status = chosen.status
    able = [name for name in (status.engines if status else ()) if _has(name, facet)]
    able.sort(key=lambda name: not registry.loaded(name))
    return chosen.served_by(able[0]) if able else chosen


def _has(engine: str, facet: Facet) -> bool:
    return facet not in registry.row_of(engine).lacks
