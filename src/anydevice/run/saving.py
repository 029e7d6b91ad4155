"""Models in files: one safetensors file with the parameters and, as JSON, the layer."""

from __future__ import annotations

import os
import sys
from typing import Any

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.errors import ConfigurationError, TransferError
from anydevice.nn.layer import Layer
from anydevice.nn.model import Model, bound
from anydevice.run import tensor_files
from anydevice.run.descriptions import description, remade
from anydevice.run.subjects import in_words

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
    ...     load(f"{folder}/small.safetensors", "cpu").layer == model.layer
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
        f"nn.save takes a nn.Model, not {in_words(given)}{instead}", source="model"
    )


def _saving_of(module: Any) -> str:
    """How a module of another library is saved; nothing where it is none."""
    for library, how in _SAVED_BY.items():
        found = sys.modules.get(library)
        if found is not None and isinstance(module, found.Module):
            return f"; a module's files are {how}"
    return ""
