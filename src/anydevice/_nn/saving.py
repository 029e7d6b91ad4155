"""`nn.save` and `nn.load`: a safetensors file with the parameters, and the layers as JSON."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from anydevice._arrays.random.generator import ShapesOnly
from anydevice._core import hooks
from anydevice._core.device import Device
from anydevice._core.record import Record, as_dict
from anydevice._core.text import say, type_text
from anydevice._core.trees import difference, leaf_names
from anydevice._formats import model as tensor_files
from anydevice._machine.choose.scope import one_device
from anydevice._nn import convolution, initializers, layers, optimizers, recurrent, transformer
from anydevice._nn import recompute as _recompute
from anydevice._nn.initializers import Initializer
from anydevice._nn.layer import Layer
from anydevice._nn.model import Model, bound, inputs_of
from anydevice._nn.optimizers import Optimizer, Schedule
from anydevice.errors import ConfigurationError, TransferError

Kind = TypeVar("Kind", bound=type[Record])

_KIND = "model"
_PLAIN = (bool, int, float, str)
_BASES = (Layer, Initializer, Optimizer, Schedule)
_kinds: dict[str, type[Record]] = {
    name: kind
    for module in (
        _recompute,
        convolution,
        initializers,
        layers,
        optimizers,
        recurrent,
        transformer,
    )
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, _BASES)
}
"""The classes that files may name: our own, and registered ones."""
_warned: set[tuple[str, ...]] = set()
"""Claims that a line was printed about, so that a loop that saves prints one."""

_SAVED_BY = {
    "torch": "PyTorch's: torch.save(module.state_dict(), path)",
    "flax": "Flax's: save flax.nnx.state(module) with Orbax",
    "equinox": "Equinox's: equinox.tree_serialise_leaves(path, module)",
    "mlx": "MLX's: module.save_weights(path)",
}
"""How modules of other libraries are saved, by the package of their class `Module`."""


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model to a file, atomically.

    The file holds the parameters as safetensors and the layers as JSON, and no code: any engine and
    device can load it. Its name ends with `.safetensors`. An existing file is replaced when the new
    one is complete.

    >>> import tempfile
    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/small.safetensors")
    ...     load(f"{folder}/small.safetensors", "cpu").layer == model.layer
    True

    A line on the error stream says how many claims of the model have no proof.

    Raises `ConfigurationError` if the model has your own layer that is not registered with
    `nn.register_layer`, or a property that is a Python function, and `TransferError` if the file
    cannot be written.
    """
    if not isinstance(model, Model):
        raise _not_a_model(model)
    metadata = {"layer": to_json(model.layer.alone), "input_shape": list(model.input_shape)}
    if model.frozen:
        metadata["frozen"] = sorted(model.frozen)
    if model.properties:
        metadata["properties"] = [hooks.claim_to_json(claim) for claim in model.properties]
    trees = {"parameters": model.parameters}
    tensor_files.write(tensor_files.checked_path(path), _KIND, trees, metadata)
    unproved = tuple([str(claim) for claim in model.properties if not claim.certificates])
    if unproved and (os.fspath(path), *unproved) not in _warned:
        _warned.add((os.fspath(path), *unproved))
        count = len(unproved)
        say(
            f"{path} has {count} claim{'s' * (count > 1)} without a proof: claim.proved(model) "
            "proves one, and its certificate is saved with it"
        )


def load(path: str | os.PathLike[str], device: Device | str | None = None) -> Model:
    """Load a model that `nn.save` wrote, on the given device or on `anydevice.device()`.

    Its version and hash are checked first. Raises `TransferError` if the file is missing, damaged,
    truncated, of another kind or written by a newer anydevice, and `ConfigurationError` if it has
    an unknown layer.
    """
    source = tensor_files.checked_path(path)
    target = one_device(device)
    contents = tensor_files.read(source, _KIND, target)
    try:
        layer = from_json(contents.metadata["layer"])
        shape: Any = tuple(contents.metadata["input_shape"])
        shape = inputs_of(layer) or shape if isinstance(layer, Layer) else shape
        parameters = contents.trees["parameters"]
        frozen = frozenset(contents.metadata.get("frozen", ()))  # not in files of early versions
        if not frozen.issubset(leaf_names(parameters)):
            raise ValueError(f"it freezes {sorted(frozen)}, and has other parameters")
        if type(shape) is tuple and not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"its examples have the shape {shape}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise tensor_files.misread(source, contents.written_by, error) from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}", source=error.source) from error
    if not isinstance(layer, Layer):
        raise TransferError(f"{source} does not describe a layer")
    mismatch = _misfit(layer, parameters)
    if mismatch is not None:
        raise TransferError(f"{source}: its tensors do not fit its layers: {mismatch}")
    claims = contents.metadata.get("properties", ())
    try:
        properties = tuple([hooks.claim_from_json(claim) for claim in claims])
    except (ConfigurationError, TypeError) as error:
        raise TransferError(f"{source}: its properties are damaged: {error}") from error
    try:
        return bound(layer, shape, parameters, frozen, properties)
    except ConfigurationError as error:
        raise TransferError(f"{source}: its layers do not fit together: {error}") from error


def _misfit(layer: Layer, parameters: Any) -> str | None:
    """Return the first difference from the parameters that the layer would draw, as a sentence."""
    try:
        expected = layer.initial(ShapesOnly())
    except ConfigurationError as error:
        return str(error)
    except Exception:  # your own layer may need real numbers, and shows at its first call what fits
        return None
    return difference(expected, parameters)


def _not_a_model(value: Any) -> ConfigurationError:
    inside = getattr(value, "model", None)
    if isinstance(inside, Model):
        instead = "; give its .model"
    else:
        instead = _saving_of(value) or _saving_of(inside)
    return ConfigurationError(
        f"nn.save takes a nn.Model, not {type_text(value)}{instead}", source="model"
    )


def _saving_of(module: Any) -> str:
    """Return how a module of another library is saved; empty for anything else."""
    for kind in type(module).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind.__name__ == "Module" and package in _SAVED_BY:
            return f"; a module's files are {_SAVED_BY[package]}"
    return ""


def register_layer(kind: Kind) -> Kind:
    """Allow models with your own layer, initializer or schedule to be saved and loaded.

    Files name the class; register it in the program that saves and in those that load.

    >>> @register_layer
    ... class Tripled(nn.Layer):
    ...     def apply(self, parameters, x, run):
    ...         return 3 * x
    >>> from_json(to_json(Tripled())) == Tripled()
    True

    Raises `ConfigurationError` for anything else, and if the name is taken.
    """
    if not isinstance(kind, type) or not issubclass(kind, Record):
        raise ConfigurationError(f"register_layer takes a class of layers, not {kind!r}")
    other = _kinds.get(kind.__name__)
    if other is not None and (other.__module__, other.__qualname__) != (
        kind.__module__,
        kind.__qualname__,
    ):
        raise ConfigurationError(
            f"there is another class {kind.__name__!r} already, {other.__module__}."
            f"{other.__qualname__}; give yours another name",
            source=kind.__name__,
        )
    _kinds[kind.__name__] = kind
    return kind


def to_json(value: Any, where: str = "the model") -> Any:
    """Return a record of settings as JSON: its class by name, and its fields."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [to_json(part, f"{where}[{at}]") for at, part in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[key, to_json(part, where)] for key, part in value.items()]}
    if not isinstance(value, Record):
        raise ConfigurationError(
            f"{where} holds {value!r}, which cannot be written as JSON; save its parameters alone"
        )
    name = type(value).__name__
    if _kinds.get(name) is not type(value):
        raise ConfigurationError(
            f"{where} holds a {name}, which is not one of anydevice's own; "
            f"call nn.register_layer({name}) before you save, and before you load",
            source=name,
        )
    fields = {key: to_json(part, f"{name}.{key}") for key, part in as_dict(value).items()}
    return {"kind": name, "fields": fields}


def from_json(described: Any) -> Any:
    """Return the value that `to_json` converted; raise for an unknown class."""
    if described is None or isinstance(described, _PLAIN):
        return described
    if "kind" in described:
        kind = _kinds.get(described["kind"])
        if kind is None:
            raise ConfigurationError(
                f"there is no layer {described['kind']!r} here; if it is your own, import it "
                "and call nn.register_layer with it before you load",
                source=described["kind"],
            )
        return kind(**{key: from_json(part) for key, part in described["fields"].items()})
    ((form, parts),) = described.items()
    if form == "dict":
        return {key: from_json(part) for key, part in parts}
    again = [from_json(part) for part in parts]
    return again if form == "list" else tuple(again)
