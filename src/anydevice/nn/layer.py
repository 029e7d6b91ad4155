"""What a layer is: a frozen description of itself, whose parameters lie elsewhere, in a plain tree.

A layer says which shape it makes of another, makes its first parameters, and is applied to
parameters and an input. It is written in ops alone, so it runs on every engine.

Refusing settings that make no sense, in the name of whoever has them.

Layers, optimizers, schedules and initializers are descriptions: what is wrong in one is said when
it is made, and not in the middle of a training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anydevice.core.record import Record
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice.transfer.random.generator import Random


Array = Any
"""An array of any library that has an engine."""

Parameters = Any
"""A nest of dicts and lists of arrays; a layer without parameters has an empty dict."""

Shape = tuple[int, ...]
"""The sizes of one example, without the batch."""

Watch = Callable[[str, "Layer", Array], None]
"""Is told the path of a part of the model, the part, and what it gave."""


class Run(Record):
    """How a model is applied: in training or not, and with which random numbers.

    `seed` and `step` settle what `Dropout` leaves out: whole numbers, or arrays without axes that
    hold them, so that compiled code serves every step; `nn.folded_seed` makes a large seed fit.
    `path` is where in the model the layer is, and `watch` is called with what every part of a model
    gives.

    >>> Run(training=True, seed=1, step=20).path
    ''
    """

    training: bool = False
    seed: int | Array = 0
    step: int | Array = 0
    path: str = ""
    watch: Watch | None = None

    def through(self, step: str, layer: Layer, parameters: Parameters, x: Array) -> Array:
        """What a part of a layer gives for x; `step` leads to it: `"[2]"`, `".attention"`."""
        here = Run(self.training, self.seed, self.step, self.path + step, self.watch)
        y = layer.apply(parameters, x, here)
        if self.watch is not None:
            self.watch(here.path, layer, y)
        return y


class MisfitError(ConfigurationError):
    """A shape that a layer does not take; the message leads to the layer and names it."""

    def __init__(self, layer: str, what: str, where: str = "", steps: str = "") -> None:
        path = f"{where}{steps} " if steps else ""
        super().__init__(f"{path}{layer}: {what}", source=f"{path}{layer}")
        self.layer = layer
        self.what = what
        self.steps = steps

    def seen_from(self, where: str, step: str) -> MisfitError:
        """The same, told from the layer around it."""
        return MisfitError(self.layer, self.what, where, step + self.steps)


class Layer(Record):
    """The base of all layers. A layer of your own gives `output`, `apply` and, where it has
    parameters, `initial`; `settings_fit` may refuse fields that make no sense.

    >>> from anydevice import ops
    >>> class Doubled(Layer):
    ...     def apply(self, parameters, x, run):
    ...         return ops.multiply(x, 2.0)
    >>> Doubled().output((3, 4)), Doubled().label
    ((3, 4), 'Doubled')
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.settings_fit()

    @property
    def label(self) -> str:
        """How errors and tables call this layer."""
        return type(self).__name__

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        """The layers inside this one, each with the step that leads there; mostly none."""
        return ()

    @property
    def input_shape(self) -> Shape | None:
        """The shape of an example where a model names none; `None` where it must be named."""
        return None

    @property
    def takes_ids_below(self) -> int | None:
        """Where an example is whole numbers that name something, as tokens do: how many there are.

        They count from 0. `None` where an example is floating numbers.
        """
        parts = self.parts
        return parts[0][1].takes_ids_below if parts else None

    def settings_fit(self) -> None:
        """Raise `ConfigurationError` where the fields make no sense; called once, at the start."""

    def output(self, shape: Shape) -> Shape:
        """The shape that it makes of an example's; raises `ConfigurationError` where none fits."""
        return shape

    def initial(self, generator: Random) -> Parameters:
        """Its first parameters, from the generator's numbers and on the generator's device."""
        return {}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        """What it gives for a batch."""
        raise NotImplementedError(f"{type(self).__name__} has no apply")

    def misfit(self, what: str) -> MisfitError:
        """The error for a shape that does not fit, in this layer's name."""
        return MisfitError(self.label, what)

    def output_of(self, step: str, part: Layer, shape: Shape) -> Shape:
        """The output of a part; where it refuses, the error leads from this layer to it."""
        try:
            return part.output(shape)
        except MisfitError as error:
            raise error.seen_from(type(self).__name__, step) from None

    def takes_features(self, shape: Shape, features: int) -> None:
        """Refuse shapes whose last size is another."""
        if not shape:
            raise self.misfit(f"got single numbers, and it takes {features} features each")
        if shape[-1] != features:
            raise self.misfit(f"got {shape[-1]} features")

    def check_integers(self, least: int = 1, **fields: object) -> None:
        """Refuse fields that are no whole numbers, or too small."""
        check_integers(self, least, **fields)

    def share(self, **fields: object) -> None:
        """Refuse fields that are not from 0 up to and without 1."""
        numbers(self, 1.0, **fields)


def check_integers(owner: object, least: int = 1, /, **fields: object) -> None:
    """Refuse fields that are no whole numbers, or too small."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise refusal(owner, name, f"a whole number from {least} on", value)


def numbers(owner: object, below: float = math.inf, /, **fields: object) -> None:
    """Refuse fields that are no finite numbers from 0 on, or not below a bound."""
    for name, value in fields.items():
        if not _is_number(value) or not 0 <= value < below:  # type: ignore[operator]
            bound = "" if below == math.inf else f" and below {below:g}"
            raise refusal(owner, name, f"a finite number from 0 on{bound}", value)


def positive(owner: object, /, **fields: object) -> None:
    """Refuse fields that are no finite numbers above 0."""
    for name, value in fields.items():
        if not _is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
            raise refusal(owner, name, "a finite number above 0", value)


def check_booleans(owner: object, /, **fields: object) -> None:
    """Refuse fields that are neither `True` nor `False`."""
    for name, value in fields.items():
        if not isinstance(value, bool):
            raise refusal(owner, name, "True or False", value)


def refusal(owner: object, name: str, wanted: str, value: object) -> ConfigurationError:
    """The error for one field."""
    kind = type(owner).__name__
    return ConfigurationError(
        f"{kind}: {name} must be {wanted}, not {value!r}", source=f"{kind}.{name}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
