"""The base class of layers: frozen settings; the parameters are in a separate tree.

A layer maps shapes, draws its initial parameters, and is applied to parameters and an input. It is
written in ops alone, so it runs on every engine. Layers, optimizers, schedules and initializers
check their settings when they are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from anydevice._core.array import Array
from anydevice._core.checks import is_integer, is_number
from anydevice._core.engine import Absent
from anydevice._core.hooks import is_loaded
from anydevice._core.primitives import Autodiff
from anydevice._core.record import NOTHING, Record, as_dict, replace
from anydevice._core.trees import leaf_names
from anydevice._machine.engines.registry import owner_of
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._arrays.random.generator import Random

Parameters = Any
"""A tree of dicts and lists of arrays; a layer without parameters has an empty dict."""

Shape = tuple[int, ...]
"""The sizes of one example, without the batch."""

Watch = Callable[[str, "Layer", Array], None]
"""Gets the path of a part of the model, the part, and its output."""

Updates = dict[tuple[str, str], Array]
"""New state of layers, by the path of the layer and the name of the parameter."""


class NamedShape(tuple[int, ...]):
    """A shape whose axes have names, so that a layer can refuse to compute over another axis.

    >>> print(features_last((20, 64)), channels_first((3, 28, 28)))
    (positions 20, features 64) (channels 3, height 28, width 28)
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"({', '.join(f'{name} {size}' for name, size in zip(self.names, self, strict=True))})"
        )


def features_last(sizes: Shape) -> Shape:
    """Return a shape whose last axis are features, and all axes before it positions."""
    shape = NamedShape(sizes)
    shape.names = ("positions",) * (len(sizes) - 1) + ("features",)
    return shape


def channels_first(sizes: Shape) -> Shape:
    """Return the shape of an image or a sequence of channels; channels alone are features."""
    shape = NamedShape(sizes)
    space = {2: ("length",), 3: ("height", "width")}.get(
        len(sizes), ("positions",) * len(sizes[1:])
    )
    shape.names = ("channels", *space) if space else ("features",)
    return shape


def names_of(shape: Shape) -> tuple[str, ...]:
    """Return the names of the axes; none if no layer has named them yet."""
    return shape.names if isinstance(shape, NamedShape) else ()


class _InferredSize:
    """The type of a size that may be given as `None`, and is a number in a model."""

    if TYPE_CHECKING:

        def __get__(self, layer: Layer | None, kind: type[Layer]) -> int: ...
        def __set__(self, layer: Layer, size: int | None) -> None: ...


class Check(Record):
    """The check of a field of `Settings`, as in `Annotated[int, Check("even", is_even)]`."""

    wanted: str
    fits: Callable[[Any], bool]


def _is_size(value: object) -> bool:
    return is_integer(value) and value >= 1


def _is_pair(value: object, least: int) -> bool:
    sizes = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    return all(is_integer(size) and size >= least for size in sizes)


_SIZE, _PAIR = "an integer of 1 or more", ", or two of them"
_NUMBER = "a finite number of 0 or more"
Pair = tuple[int, int]
Size = Annotated[int, Check(_SIZE, _is_size)]
OptionalSize = Annotated[int | None, Check(_SIZE, lambda x: x is None or _is_size(x))]
Inferred = Annotated[_InferredSize, Check(_SIZE, lambda x: x is None or _is_size(x))]
Sizes = Annotated[int | Pair, Check(_SIZE + _PAIR, lambda x: _is_pair(x, 1))]
OptionalSizes = Annotated[
    int | Pair | None, Check(_SIZE + _PAIR, lambda x: x is None or _is_pair(x, 1))
]
Padding = Annotated[int, Check("an integer of 0 or more", lambda x: is_integer(x) and x >= 0)]
Paddings = Annotated[int | Pair, Check(f"an integer of 0 or more{_PAIR}", lambda x: _is_pair(x, 0))]
Number = Annotated[float, Check(_NUMBER, lambda x: is_number(x) and 0 <= x < math.inf)]
Share = Annotated[float, Check(f"{_NUMBER} and below 1", lambda x: is_number(x) and 0 <= x < 1)]
Positive = Annotated[
    float, Check("a finite number above 0", lambda x: is_number(x) and 0 < x < math.inf)
]
Flag = Annotated[bool, Check("True or False", lambda x: isinstance(x, bool))]


class Run(Record):
    """How a model is applied: in training or not, and with which random numbers.

    `seed` and `step` decide what `Dropout` drops: integers, or 0-d integer arrays so that compiled
    code works for every step; `nn.folded_seed` makes a large seed fit. `path` is the path of the
    layer in the model, and `watch` is called with the output of every layer. If `updates` is a
    dict, layers with state put their new state there, by path and name. `frozen` are the paths of
    layers with frozen state, which behave in training as in inference. If the batch is part of a
    larger one, `rows` is its first row, its number of rows and the rows of the larger batch:
    `Dropout` then drops the same elements as in the larger batch.

    >>> Run(training=True, seed=1, step=20).path
    ''
    """

    training: bool = False
    seed: int | Array = 0
    step: int | Array = 0
    path: str = ""
    watch: Watch | None = None
    updates: Updates | None = None
    frozen: frozenset[str] = frozenset()
    rows: tuple[int, int, int] | None = None

    def through(self, step: str, layer: Layer, parameters: Parameters, x: Array) -> Array:
        """Compute the output of a part of a layer; `step` leads to it: `"[2]"`, `".attention"`."""
        path = self.path + step
        training = self.training and path not in self.frozen
        here = Run(
            training, self.seed, self.step, path, self.watch, self.updates, self.frozen, self.rows
        )
        y = layer.apply(parameters, x, here)
        if self.watch is not None:
            self.watch(path, layer, y)
        return y

    def update(self, name: str, value: Array) -> None:
        """Store the new state of the current layer, as a constant; a no-op without `updates`."""
        if self.updates is not None:
            self.updates[self.path, name] = without_gradient(value)


class MisfitError(ConfigurationError):
    """A shape that a layer does not take; the message has the layer and its path."""

    def __init__(self, layer: str, what: str, where: str = "", steps: str = "") -> None:
        path = f"{where}{steps} " if steps else ""
        super().__init__(f"{path}{layer}: {what}", source=f"{path}{layer}")
        self.layer = layer
        self.what = what
        self.steps = steps

    def seen_from(self, where: str, step: str) -> MisfitError:
        """Return the same error, with the path from the layer around it."""
        return MisfitError(self.layer, self.what, where, step + self.steps)


class Settings(Record):
    """A record whose fields are checked when it is made, by the `Check` of their types."""

    _checks = NOTHING

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The names in annotations are those of the module that the class is in.
        scope = vars(import_module(cls.__module__)) if is_loaded(cls.__module__) else {}
        annotations = vars(cls).get("__annotations__", {})
        own = {name: check for name, check in cls._checks.items() if name not in annotations}
        for name, hint in annotations.items():
            hint = scope.get(hint) if isinstance(hint, str) else hint
            for check in getattr(hint, "__metadata__", ()):
                if isinstance(check, Check):
                    own[name] = check
        cls._checks = own

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        for name, check in self._checks.items():
            if not check.fits(getattr(self, name)):
                raise setting_error(self, name, check.wanted, getattr(self, name))
        self.settings_fit()

    def settings_fit(self) -> None:
        """Raise `ConfigurationError` for invalid fields; called once, when it is made."""


_PLACES = {
    "features": (
        "features last",
        "put nn.Flatten(), nn.GlobalAvgPool() or nn.Transpose() before it",
    ),
    "channels": ("channels first", "put nn.Transpose() before it"),
    "ids": ("ids", "make it the first layer"),
}
"""The place of each axis that layers need, and how other axes become that."""


class Layer(Settings):
    """The base class of layers.

    Your own layer defines `apply`, `output` if the shape changes, and `initial` if it has
    parameters; `settings_fit` can check its fields.

    >>> class Doubled(Layer):
    ...     def apply(self, parameters, x, run):
    ...         return ops.multiply(x, 2.0)
    >>> Doubled().output((3, 4)), Doubled().label
    ((3, 4), 'Doubled')
    """

    inferred = ("", 0)
    """The size that may be `None`, and the axis of an example that it is taken from."""

    @property
    def label(self) -> str:
        """The name of this layer in errors and tables."""
        return type(self).__name__

    @property
    def root(self) -> str:
        """The name with which paths into this layer begin."""
        return type(self).__name__

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        """The layers inside this one, each with its path step."""
        return ()

    @property
    def alone(self) -> Layer:
        """The layer on one device: itself, or the layer that a pipeline cuts into stages."""
        return self

    def like(self, parameters: Parameters) -> Parameters:
        """Return arrays with the library, dtype and device that inputs need."""
        return parameters

    @property
    def input_shape(self) -> Shape | None:
        """The default shape of an example; `None` if the model must name one."""
        return None

    @property
    def takes_ids_below(self) -> int | None:
        """The number of ids if an example is integers, such as tokens; `None` if it is floats."""
        parts = self.parts
        return parts[0][1].takes_ids_below if parts else None

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of its own parameters that training updates without gradients."""
        return ()

    def output(self, shape: Shape) -> Shape:
        """Return the output shape for an example's shape; raises `ConfigurationError`."""
        return shape

    def resolved(self, shape: Shape) -> Layer:
        """Return the layer with the open sizes of itself and its parts, from an example's shape.

        Layers in its fields get the same shape. Raises `ConfigurationError` for a misfit.

        >>> nn.Chain(nn.Flatten(), nn.Dense(None, 10)).resolved((3, 4)).layers[1].inputs
        12
        """
        self._takes(shape)
        parts = {name: part for name, part in as_dict(self).items() if isinstance(part, Layer)}
        new: dict[str, Any] = {name: part.resolved(shape) for name, part in parts.items()}
        name, axis = self.inferred
        if name and getattr(self, name) is None:
            if not shape:
                raise self.misfit("got scalars, expected features")
            new[name] = shape[axis]
        return (
            self if all(new[field] is parts.get(field) for field in new) else replace(self, **new)
        )

    def resolved_of(self, step: str, part: Layer, shape: Shape) -> Layer:
        """Return a part with its sizes; errors name the path to it."""
        try:
            return part.resolved(shape)
        except MisfitError as error:
            raise error.seen_from(self.root, step) from None

    def initial(self, generator: Random) -> Parameters:
        """Draw the initial parameters, on the generator's device."""
        return {}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        """Compute the output for a batch."""
        raise NotImplementedError(f"{type(self).__name__} has no apply")

    def misfit(self, what: str) -> MisfitError:
        """Return the error for a shape that this layer does not take."""
        return MisfitError(self.label, what)

    def output_of(self, step: str, part: Layer, shape: Shape) -> Shape:
        """Return the output shape of a part; errors name the path to it."""
        try:
            part._takes(shape)
            return part.output(shape)
        except MisfitError as error:
            raise error.seen_from(self.root, step) from None

    def _takes(self, shape: Any) -> None:
        """Raise an error for several inputs, unless a part of this layer can select one."""
        if isinstance(shape, dict) and not self.parts:
            one, named = next(iter(shape)), ", ".join(map(repr, shape))
            raise self.misfit(
                f"got several arrays, {named}; put nn.Input({one!r}, …) before this layer"
            )

    def _misuse(self, values: tuple[Any, ...], named: dict[str, Any]) -> str:
        text, name = super()._misuse(values, named), self.inferred[0]
        if not name or None in values:
            return text
        place = self._fields.index(name)
        filled = (*values[:place], None, *values[place:])
        try:
            type(self)(*filled, **named)
        except (TypeError, ConfigurationError):
            return text
        shown = [*map(repr, filled), *(f"{key}={value!r}" for key, value in named.items())]
        call = f"nn.{type(self).__name__}({', '.join(shown)})"
        return f"{text}; {call} takes {name} from the layer before"

    def takes_axis(self, shape: Shape, axis: str, advice: str = "") -> None:
        """Raise an error for named axes without `"features"`, `"channels"` or `"ids"`."""
        names = names_of(shape)
        if len(names) > (axis != "ids") and axis not in names:
            where, usual = _PLACES[axis]
            raise self.misfit(f"got {shape}, expected {where}; {advice or usual}")

    def takes_features(self, shape: Shape, features: int) -> None:
        """Raise an error for a shape with another number of features, or with channels first."""
        self.takes_axis(shape, "features")
        if not shape:
            raise self.misfit(f"got scalars, expected {features} features")
        if shape[-1] != features:
            raise self.misfit(f"got {shape[-1]} features")


class Wrapper(Layer):
    """A layer with the parameters, shapes and paths of the layer inside, and its own `apply`."""

    layer: Layer

    @property
    def root(self) -> str:
        return self.layer.root

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [("", self.layer)]

    @property
    def input_shape(self) -> Shape | None:
        return self.layer.input_shape

    def output(self, shape: Shape) -> Shape:
        return self.layer.output(shape)

    def initial(self, generator: Random) -> Parameters:
        return self.layer.initial(generator)


def state_places(layer: Layer, path: str = "") -> list[tuple[str, str]]:
    """Return the path and name of every parameter in a layer and its parts that is state."""
    own = [(path, name) for name in layer.state_names]
    return own + [place for step, part in layer.parts for place in state_places(part, path + step)]


def state_paths(layer: Layer) -> list[str]:
    """Return the paths of all parameters that are state, as `leaf_names` gives them."""
    return [f"{path}.{name}" for path, name in state_places(layer)]


def state_leaves(layer: Layer, parameters: Parameters) -> list[bool]:
    """Return for each leaf of the parameters whether it is state, which a layer updates itself."""
    state = set(state_paths(layer))
    return [name in state for name in leaf_names(parameters)]


def without_gradient(x: Array) -> Array:
    """Return the array as a constant, without gradients."""
    autodiff = autodiff_of(x)
    return x if autodiff is None else autodiff.stop_gradient(x)


def autodiff_of(x: Array) -> Autodiff | None:
    """Return the autodiff of the engine of x; `None` if it has none, or x is no array."""
    return _autodiffs[_engine_of(x)]


def _engine_of(x: Array) -> str:
    """Return the name of the engine of x, and add its autodiff to the table."""
    kind = type(x)
    if kind not in _engines:
        engine = owner_of(x)
        if engine is None:
            return ""
        autodiff = engine.autodiff
        _autodiffs[engine.name] = None if isinstance(autodiff, Absent) else autodiff
        _engines[kind] = engine.name
    return _engines[kind]


_autodiffs: dict[str, Autodiff | None] = {"": None}
_engines: dict[type, str] = {}
# PyTorch's compiler calls this while it traces the caller, and keeps the result.
_engine_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def setting_error(owner: object, name: str, wanted: str, value: object) -> ConfigurationError:
    """Return the error for one field."""
    kind = type(owner).__name__
    return ConfigurationError(
        f"{kind}: {name} must be {wanted}, not {value!r}", source=f"{kind}.{name}"
    )
