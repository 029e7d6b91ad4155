"""The functions between layers, as layers and by name."""

from __future__ import annotations

from collections.abc import Callable

from anydevice import ops
from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Array, Layer, Parameters, Run


def _identity(x: Array) -> Array:
    return x


def _gelu_tanh(x: Array) -> Array:
    return ops.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": _identity,
    "relu": ops.relu,
    "gelu": ops.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": ops.silu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
    "softmax": ops.softmax,
}
"""Each function by its name; `softmax` is over the last axis."""


class Activation(Layer):
    """A function of each element, or of each row for `softmax`: the shape stays.

    >>> Activation("relu").label
    'relu'
    """

    name: str

    @property
    def label(self) -> str:
        return self.name

    def settings_fit(self) -> None:
        refuse_unknown(self.name)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ACTIVATIONS[self.name](x)


def refuse_unknown(name: object) -> None:
    """Raise `ConfigurationError`, with those that there are, where it names no activation."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigurationError(
            f"there is no activation {name!r}; take one of {', '.join(ACTIVATIONS)}",
            source="activation",
        )


def as_layer(spec: Layer | str) -> Layer:
    """The layer, or the activation of that name.

    >>> as_layer("gelu")
    Activation(name='gelu')
    """
    if isinstance(spec, Layer):
        return spec
    if isinstance(spec, str):
        return Activation(spec)
    raise ConfigurationError(f"{_called(spec)}; {_instead_of(spec)}", source="layer")


def _called(spec: object) -> str:
    if isinstance(spec, type):
        return f"{spec.__name__} is a class and no layer"
    return f"this {type(spec).__name__} is no layer"


def _instead_of(spec: object) -> str:
    """What to give in place of something that is no layer."""
    if isinstance(spec, type) and issubclass(spec, Layer):
        return f"give one of it, {spec.__name__}(…)"
    if isinstance(spec, list | tuple):
        return "layers are given one by one: nn.build(*layers), nn.Chain(*layers)"
    if hasattr(spec, "layer") and isinstance(spec.layer, Layer):
        return "give its .layer"
    if any(base.__name__ == "Module" for base in type(spec).__mro__):
        return "a module of another library stays as it is: anydevice.compile takes it"
    return "give a layer such as nn.Dense(4, 2), or the name of an activation"
