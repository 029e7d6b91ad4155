"""Initializers draw the parameters before training, the same for the same seed on every engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from anydevice._core.array import Array
from anydevice._core.checks import is_number
from anydevice._nn.layer import Check, Flag, Number, Pair, Settings, Shape
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._arrays.random.generator import Random

_FANS = ("inputs", "outputs", "both")
AnyNumber = Annotated[float, Check("a number", is_number)]
Fan = Annotated[
    Literal["inputs", "outputs", "both"],
    Check(f"one of {', '.join(_FANS)}", lambda by: by in _FANS),
]


class Initializer(Settings):
    """Draws the initial values of a parameter by fan-in and fan-out, in `__call__`."""

    def __call__(self, generator: Random, shape: Shape, inputs: int, outputs: int) -> Array:
        """Return an array of this shape."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class Constant(Initializer):
    """The same number everywhere.

    >>> Constant(2.0)(anydevice.rng(0, "cpu"), (2,), 1, 1).tolist()
    [2.0, 2.0]
    """

    value: AnyNumber = 0.0

    def __call__(self, generator: Random, shape: Shape, inputs: int, outputs: int) -> Array:
        return generator.filled(shape, self.value)


class Normal(Initializer):
    """A normal distribution with mean 0 and this standard deviation."""

    deviation: Number = 0.02

    def __call__(self, generator: Random, shape: Shape, inputs: int, outputs: int) -> Array:
        return generator.normal(shape, std=self.deviation)


class Uniform(Initializer):
    """A uniform distribution from -limit to limit."""

    limit: Number = 0.05

    def __call__(self, generator: Random, shape: Shape, inputs: int, outputs: int) -> Array:
        return generator.uniform(shape, -self.limit, self.limit)


class Scaled(Initializer):
    """A distribution with variance `gain / fan`; `by` selects fan-in, fan-out or their mean.

    It is normal, or uniform with `uniform=True`: a `gain` of 2 is that of He et al. (2015), a mean
    of both fans that of Glorot and Bengio (2010).
    """

    gain: Number = 1.0
    by: Fan = "inputs"
    uniform: Flag = False

    def __call__(self, generator: Random, shape: Shape, inputs: int, outputs: int) -> Array:
        counts = {"inputs": inputs, "outputs": outputs, "both": (inputs + outputs) / 2}
        deviation = math.sqrt(self.gain / counts[self.by])
        make = Uniform(deviation * math.sqrt(3)) if self.uniform else Normal(deviation)
        return make(generator, shape, inputs, outputs)


ZEROS, ONES = Constant(0.0), Constant(1.0)
FIRST = {"weight": ONES, "bias": ZEROS, "mean": ZEROS, "variance": ONES, "slope": Constant(0.25)}
"""The initial values of parameters that norms and activations have, by their names."""

INITIALIZERS: dict[str, Initializer] = {
    "zeros": ZEROS,
    "ones": ONES,
    "lecun": Scaled(),
    "he": Scaled(2.0),
    "glorot": Scaled(1.0, "both", uniform=True),
}
"""The usual initializers by name."""


def initializer_of(spec: Initializer | str) -> Initializer:
    """Return the initializer, or the one of that name.

    >>> initializer_of("he")
    Scaled(gain=2.0, by='inputs', uniform=False)
    """
    if isinstance(spec, Initializer):
        return spec
    if not isinstance(spec, str) or spec not in INITIALIZERS:
        raise ConfigurationError(
            f"unknown initializer {spec!r}; use one of {', '.join(INITIALIZERS)}, or a Constant, "
            "Normal, Uniform or Scaled",
            source="initializer",
        )
    return INITIALIZERS[spec]


Initial = Annotated[
    Initializer | str, Check("", lambda spec: isinstance(initializer_of(spec), Initializer))
]
"""The type of a field that is an initializer or the name of one."""


def draw_weight(
    initializer: Initializer | str, generator: Random, shape: Shape, fans: Pair, biases: int
) -> dict[str, Array]:
    """Draw a `weight` by its fan-in and fan-out, and `biases` zeros as `bias` unless that is 0."""
    parameters = {"weight": initializer_of(initializer)(generator, shape, *fans)}
    if biases:
        parameters["bias"] = ZEROS(generator, (biases,), *fans)
    return parameters
