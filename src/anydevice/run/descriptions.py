"""Layers, and what else is a record of settings, as JSON and back: no code is ever stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from anydevice.core.late import load
from anydevice.core.record import Record, as_dict
from anydevice.errors import ConfigurationError
from anydevice.nn.initializers import Initializer
from anydevice.nn.layer import Layer
from anydevice.nn.optimizers import Optimizer
from anydevice.nn.schedules import Schedule

Kind = TypeVar("Kind", bound=type[Record])

_OURS = "anydevice.nn."
_MODULES = (
    "activations",
    "attention_layers",
    "chain",
    "convolution_layers",
    "dropping",
    "layers",
    "recomputing",
    "tied_layers",
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
        load(f"{_OURS}{module}")
    bases = (Layer, Initializer, Optimizer, Schedule)
    ours = (kind for base in bases for kind in _below(base) if kind.__module__.startswith(_OURS))
    return {**_registered, **{kind.__name__: kind for kind in ours}}


def _below(kind: type[Record]) -> Iterator[type[Record]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
