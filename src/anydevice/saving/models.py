"""Models in files: one safetensors file with the parameters and, as JSON, the layer.

Layers, and what else is a record of settings, as JSON and back: no code is ever stored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.core.hooks import load as load_by_name
from anydevice.core.record import Record, as_dict
from anydevice.errors import ConfigurationError, TransferError
from anydevice.models.base import type_text
from anydevice.nn.initializers import Initializer
from anydevice.nn.layer import Layer
from anydevice.nn.model import Model, bound
from anydevice.nn.optimizers import Optimizer, Schedule
from anydevice.saving import files as tensor_files

_KIND = "model"
_SAVED_BY = {
    "torch.nn": "PyTorch's: torch.save(module.state_dict(), path)",
    "flax.nnx": "Flax's: save flax.nnx.state(module) with Orbax",
    "equinox": "Equinox's: equinox.tree_serialise_leaves(path, module)",
    "mlx.nn": "MLX's: module.save_weights(path)",
}
"""By the place of a library's class `Module`: whose files hold its modules, and how."""


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model to one file, whole or not at all.

    The file holds the parameters as safetensors and the layers as JSON, and no code: any engine
    and device can load it. Its name ends with `.safetensors`. A file that is there is replaced
    once the new one is on the disk.

    >>> import tempfile
    >>> from anydevice import nn
    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/small.safetensors")
    ...     load_by_name(f"{folder}/small.safetensors", "cpu").layer == model.layer
    True

    Raises `ConfigurationError` where the model holds a layer of your own that is not registered
    with `nn.register_layer`, and `TransferError` where the file cannot be written.
    """
    if not isinstance(model, Model):
        raise _no_model(model)
    said = {"layer": description(model.layer), "input_shape": list(model.input_shape)}
    trees = {"parameters": model.parameters}
    tensor_files.write(tensor_files.checked_path(path), _KIND, trees, said)


def load(path: str | os.PathLike[str], device: Device | str | None = None) -> Model:
    """The model that `nn.save` wrote, on a device; without one, on that of `anydevice.device()`.

    The file's version and hash are checked before anything is made of it. Raises `TransferError`
    where it is damaged, cut short, from a newer anydevice or no such file, and
    `ConfigurationError` where it holds a layer that is not known here.
    """
    source = tensor_files.checked_path(path)
    target = choose_device(device)
    contents = tensor_files.read(source, _KIND, target)
    try:
        layer = remade(contents.said["layer"])
        shape = tuple(contents.said["input_shape"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise tensor_files.misread(source, contents.written_by, error) from error
    if not isinstance(layer, Layer):
        raise TransferError(f"{source}: it describes no layer")
    return bound(layer, shape, contents.trees["parameters"])


def _no_model(given: Any) -> ConfigurationError:
    inside = getattr(given, "model", None)
    if isinstance(inside, Model):
        instead = "; give its .model"
    else:
        instead = _saving_of(given) or _saving_of(inside)
    return ConfigurationError(
        f"nn.save takes a nn.Model, not {type_text(given)}{instead}", source="model"
    )


def _saving_of(module: Any) -> str:
    """How a module of another library is saved; nothing where it is none."""
    for library, how in _SAVED_BY.items():
        found = sys.modules.get(library)
        if found is not None and isinstance(module, found.Module):
            return f"; a module's files are {how}"
    return ""


Kind = TypeVar("Kind", bound=type[Record])

_OURS = "anydevice.nn."
_MODULES = (
    "convolution",
    "layers",
    "recompute",
    "transformer",
)
_PLAIN = (bool, int, float, str)
_registered: dict[str, type[Record]] = {}


def register_layer(kind: Kind) -> Kind:
    """Let models with a layer, initializer or schedule of your own be saved and loaded.

    The class is known by its name; register it in the program that saves and in those that load.

    >>> from anydevice import nn
    >>> @register_layer
    ... class Tripled(nn.Layer):
    ...     def apply(self, parameters, x, run):
    ...         return 3 * x
    >>> remade(description(Tripled())) == Tripled()
    True

    Raises `ConfigurationError` for what is no such class, and where another has the name.
    """
    if not isinstance(kind, type) or not issubclass(kind, Record):
        raise ConfigurationError(f"register_layer takes a class of layers, and {kind!r} is none")
    other = _known().get(kind.__name__)
    if other is not None and (other.__module__, other.__qualname__) != (
        kind.__module__,
        kind.__qualname__,
    ):
        raise ConfigurationError(
            f"there is another class {kind.__name__!r} already, {other.__module__}."
            f"{other.__qualname__}; give yours another name",
            source=kind.__name__,
        )
    _registered[kind.__name__] = kind
    return kind


def description(value: Any, where: str = "the model") -> Any:
    """A record of settings as JSON: its class by name, and its fields.

    Raises `ConfigurationError` where it holds what JSON cannot, or a class that nobody registered.

    >>> from anydevice import nn
    >>> description(nn.Dropout(0.5))
    {'kind': 'Dropout', 'fields': {'rate': 0.5}}
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [description(part, f"{where}[{at}]") for at, part in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[key, description(part, where)] for key, part in value.items()]}
    if not isinstance(value, Record):
        raise ConfigurationError(
            f"{where} holds {value!r}, which cannot be written as JSON; save its parameters alone"
        )
    name = type(value).__name__
    if _known().get(name) is not type(value):
        raise ConfigurationError(
            f"{where} holds a {name}, which is not one of anydevice's own; "
            f"call nn.register_layer({name}) before you save, and before you load",
            source=name,
        )
    fields = {key: description(part, f"{name}.{key}") for key, part in as_dict(value).items()}
    return {"kind": name, "fields": fields}


def remade(described: Any) -> Any:
    """What a description describes.

    Raises `ConfigurationError` where it names a class that is not known here.
    """
    if described is None or isinstance(described, _PLAIN):
        return described
    if "kind" in described:
        kind = _known().get(described["kind"])
        if kind is None:
            raise ConfigurationError(
                f"there is no layer {described['kind']!r} here; where it is your own, import it "
                "and call nn.register_layer with it before you load",
                source=described["kind"],
            )
        return kind(**{key: remade(part) for key, part in described["fields"].items()})
    ((form, parts),) = described.items()
    if form == "dict":
        return {key: remade(part) for key, part in parts}
    again = [remade(part) for part in parts]
    return again if form == "list" else tuple(again)


def _known() -> dict[str, type[Record]]:
    for module in _MODULES:
        load_by_name(f"{_OURS}{module}")
    bases = (Layer, Initializer, Optimizer, Schedule)
    ours = (kind for base in bases for kind in _below(base) if kind.__module__.startswith(_OURS))
    return {**_registered, **{kind.__name__: kind for kind in ours}}


def _below(kind: type[Record]) -> Iterator[type[Record]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
