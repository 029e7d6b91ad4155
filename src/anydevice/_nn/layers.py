"""Activations, dense layers, embeddings, norms, dropout, and chains of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Annotated, Any

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.checks import is_integer, is_number
from anydevice._core.names import find_name
from anydevice._core.record import replace
from anydevice._nn.initializers import FIRST, ZEROS, Initial, Initializer, Normal, draw_weight
from anydevice._nn.layer import (
    Check,
    Flag,
    Inferred,
    Layer,
    Number,
    Parameters,
    Positive,
    Run,
    Shape,
    Share,
    Size,
    _is_size,
    channels_first,
    features_last,
    names_of,
    setting_error,
    without_gradient,
)
from anydevice._nn.random_choice import random_mask
from anydevice._ops.arguments import widened
from anydevice._ops.dispatch import own_version, primitives
from anydevice._ops.dispatch import run as run_op
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._arrays.random.generator import Random


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": ops.relu,
    "leaky_relu": ops.leaky_relu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, approximate=True),
    "silu": ops.silu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
    "softmax": ops.softmax,
    "elu": lambda x: ops.where(ops.less(x, 0.0), ops.expm1(ops.minimum(x, 0.0)), x),
    "softplus": lambda x: ops.logsumexp(ops.stack([x, ops.zeros_like(x)], -1), -1),
}
"""The functions by name; `softmax` is over the last axis, and `leaky_relu` has the slope 0.01."""


def with_activation(output: Any, left_out: Any) -> Any:
    """Return an output after the activations that a loss left out, those of heads by name."""
    if isinstance(left_out, dict):
        return {name: with_activation(y, left_out.get(name)) for name, y in output.items()}
    return output if left_out is None else ACTIVATIONS[left_out](output)


def _is_activation(name: object) -> bool:
    if isinstance(name, str) and name in ACTIVATIONS:
        return True
    ours, hint = find_name("activation", name, ACTIVATIONS)
    hint = f" (did you mean {ours!r}?)" if ours else hint
    raise ConfigurationError(
        f"unknown activation {name!r}{hint}; use one of {', '.join(ACTIVATIONS)}",
        source="activation",
    )


Function = Annotated[str, Check("", _is_activation)]
OptionalFunction = Annotated[
    str | None, Check("", lambda name: name is None or _is_activation(name))
]
"""The type of a field that is the name of an activation, or `None`."""


class Activation(Layer):
    """A function of each element, or of each row for `softmax`; the shape does not change.

    >>> Activation("relu").label
    'relu'
    """

    name: Function

    @property
    def label(self) -> str:
        return self.name

    def output(self, shape: Shape) -> Shape:
        if self.name == "softmax":
            self.takes_axis(shape, "features")
        return shape

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ACTIVATIONS[self.name](x)


def as_layer(spec: Layer | str) -> Layer:
    """Return the layer, or the activation of that name.

    >>> as_layer("gelu")
    Activation(name='gelu')
    """
    if isinstance(spec, Layer):
        return spec
    if isinstance(spec, str):
        return Activation(spec)
    kind = f"this {type(spec).__name__} is"
    if isinstance(spec, type):
        kind = f"{spec.__name__} is a class and"
    raise ConfigurationError(f"{kind} not a layer; {_instead_of(spec)}", source="layer")


def _instead_of(spec: object) -> str:
    """Return the advice for something that is not a layer."""
    if isinstance(spec, type) and issubclass(spec, Layer):
        return f"give one of it, {spec.__name__}(…)"
    if isinstance(spec, list | tuple):
        return "layers are given one by one: nn.build(*layers), nn.Chain(*layers)"
    if hasattr(spec, "layer") and isinstance(spec.layer, Layer):
        return "give its .layer"
    if any(base.__name__ == "Module" for base in type(spec).__mro__):
        return "a module of another library stays as it is: anydevice.compile takes it"
    return "give a layer such as nn.Dense(4, 2), or the name of an activation"


class Dense(Layer):
    """`x · weightᵀ + bias` over the last axis, followed by an optional activation.

    The number of inputs may be `None`, as the first size of other layers: a model takes it from the
    shape of its examples. Its parameters are `weight` (outputs, inputs) and `bias` (outputs,).

    >>> Dense(128, 10).output((5, 128)), Dense(128, 10).label
    ((5, 10), 'Dense(128→10)')
    """

    inputs: Inferred
    outputs: Size
    bias: Flag = True
    activation: OptionalFunction = None
    initializer: Initial = "lecun"

    inferred = ("inputs", -1)

    @property
    def label(self) -> str:
        return f"Dense({self.inputs}→{self.outputs})"

    @property
    def input_shape(self) -> Shape | None:
        return None if self.inputs is None else (self.inputs,)

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.inputs)
        return features_last((*shape[:-1], self.outputs))

    def initial(self, generator: Random) -> Parameters:
        shape, fans = (self.outputs, self.inputs), (self.inputs, self.outputs)
        return draw_weight(self.initializer, generator, shape, fans, self.bias * self.outputs)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        y = ops.linear(x, parameters["weight"], parameters["bias"] if self.bias else None)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


class Embedding(Layer):
    """A row of features for each id; its parameter is `weight` (rows, size).

    >>> Embedding(1000, 64).output((20,))
    (20, 64)
    """

    rows: Size
    size: Size
    initializer: Initial = Normal(0.02)

    @property
    def label(self) -> str:
        return f"Embedding({self.rows}→{self.size})"

    @property
    def takes_ids_below(self) -> int:
        return self.rows

    def output(self, shape: Shape) -> Shape:
        self.takes_axis(shape, "ids")
        return features_last((*shape, self.size))

    def initial(self, generator: Random) -> Parameters:
        return _draw_table(self.initializer, generator, self.rows, self.size)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.embedding(parameters["weight"], x)


def _draw_table(
    initializer: Initializer | str, generator: Random, rows: int, size: int
) -> Parameters:
    return draw_weight(initializer, generator, (rows, size), (size, rows), 0)


class PositionEmbedding(Layer):
    """Adds a learned row to the features of each position.

    It takes (…, tokens, size) with at most as many tokens as it has rows. Its parameter is `weight`
    (tokens, size).

    >>> PositionEmbedding(128, 64).output((20, 64))
    (20, 64)
    """

    tokens: Size
    size: Inferred
    initializer: Initial = Normal(0.02)

    inferred = ("size", -1)

    @property
    def label(self) -> str:
        return f"PositionEmbedding({self.tokens}×{self.size})"

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.size)
        if len(shape) < 2:
            raise self.misfit(f"got the shape {shape}, expected (positions, {self.size})")
        if shape[-2] > self.tokens:
            raise self.misfit(f"got {shape[-2]} tokens, but it has {self.tokens} positions")
        return features_last(shape)

    def initial(self, generator: Random) -> Parameters:
        return _draw_table(self.initializer, generator, self.tokens, self.size)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.add(x, ops.slice_axis(parameters["weight"], 0, 0, x.shape[-2]))


class _Sized(Layer):
    """The base class of layers with parameters (size,), for each feature or each channel."""

    size: Inferred

    _names = "weight"

    @property
    def label(self) -> str:
        return f"{type(self).__name__}({self.size})"

    def initial(self, generator: Random) -> Parameters:
        names = self._names.split()
        return {name: FIRST[name](generator, (self.size,), 1, 1) for name in names}


class _FeatureNorm(_Sized):
    """The base class of norms over the features, with a `weight` (size,)."""

    size: Inferred
    eps: Number = 1e-6

    inferred = ("size", -1)

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.size)
        return features_last(shape)


class LayerNorm(_FeatureNorm):
    """Normalize features to mean 0 and variance 1, then scale and shift.

    Its parameters are `weight` and `bias`, (size,) both.
    """

    eps: Number = 1e-5
    bias: Flag = True

    def initial(self, generator: Random) -> Parameters:
        parameters = super().initial(generator)
        if self.bias:
            parameters["bias"] = ZEROS(generator, tuple(parameters["weight"].shape), 1, 1)
        return parameters

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        bias = parameters["bias"] if self.bias else None
        return ops.layernorm(x, parameters["weight"], bias, self.eps)


class RMSNorm(_FeatureNorm):
    """Normalize features to root mean square 1, then scale; its parameter is `weight` (size,)."""

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.rmsnorm(x, parameters["weight"], self.eps)


Axis = Annotated[int, Check("an integer", is_integer)]
Momentum = Annotated[
    float, Check("a number above 0 and at most 1", lambda x: is_number(x) and 0 < x <= 1)
]


class _OfChannels(_Sized):
    """The base class of layers with parameters for each channel, the first axis of an example."""

    inferred = ("size", 0)
    _names = "weight bias"
    _advice = "use nn.LayerNorm, or put nn.Transpose() before it"

    def output(self, shape: Shape) -> Shape:
        if not shape:
            raise self.misfit(f"got scalars, expected {self.size} channels")
        self.takes_axis(shape, "channels", self._advice)
        if shape[0] != self.size:
            raise self.misfit(f"got {shape[0]} channels, the first axis of the shape {shape}")
        return channels_first(shape)


class BatchNorm(_OfChannels):
    """Normalize each channel to mean 0 and variance 1, then scale and shift.

    An example is (size,), (size, length) or (size, height, width): the channels come first. In
    training, the mean and variance are those of the batch, over all its examples and places; the
    state, `mean` and `variance`, moves towards them by the share `momentum`. Otherwise the state
    is used, and an output does not depend on the other examples. A batch with a single value a
    channel has no variance: it is normalized by the state, which stays.

    Its parameters are `weight`, `bias`, `mean` and `variance`, (size,) each. Statistics are
    computed in float32, also of 16-bit numbers, and the state is best kept in float32.

    >>> BatchNorm(8).output((8, 28, 28)), BatchNorm(8).state_names
    ((8, 28, 28), ('mean', 'variance'))
    """

    momentum: Momentum = 0.1
    eps: Positive = 1e-5

    _names = "weight bias mean variance"

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("mean", "variance")

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        if x.ndim < 2 or x.shape[1] != self.size:
            raise self.misfit(f"got a batch of the shape {tuple(x.shape)}")
        weight, bias = parameters["weight"], parameters["bias"]
        mean, variance = (without_gradient(parameters[name]) for name in self.state_names)
        if not run.training:
            own = own_version(x, "batch_norm", _batch_norm)
            return run_op(own, _batch_norm, x, weight, bias, mean, variance, self.eps)
        if math.prod(x.shape) == self.size:
            y = _batch_norm(x, weight, bias, mean, variance, self.eps)
        else:
            own = own_version(x, "batch_norm_training", _batch_norm_training)
            y, mean, variance = run_op(
                own, _batch_norm_training, x, weight, bias, mean, variance, self.eps, self.momentum
            )
        run.update("mean", mean)
        run.update("variance", variance)
        return y


def _batch_norm_training(
    x: Array, weight: Array, bias: Array, mean: Array, variance: Array, eps: float, momentum: float
) -> tuple[Array, Array, Array]:
    """Return a batch normalized by its own statistics, and the state moved towards them."""
    xp = primitives(x)
    axes = tuple([axis for axis in range(x.ndim) if axis != 1])
    count = math.prod([x.shape[axis] for axis in axes])
    wide = widened(xp, x)
    own_mean = xp.multiply(xp.sum(wide, axes), 1 / count)
    apart = xp.subtract(wide, _over_channels(own_mean, x))
    squares = xp.sum(xp.multiply(apart, apart), axes)
    y = _batch_norm(x, weight, bias, own_mean, xp.multiply(squares, 1 / count), eps)
    # The batch is a sample: the unbiased variance of all examples is larger (Bessel).
    news = own_mean, xp.multiply(squares, 1 / (count - 1))
    moved = [
        xp.add(xp.multiply(widened(xp, old), 1 - momentum), xp.multiply(new, momentum))
        for old, new in zip((mean, variance), news, strict=True)
    ]
    return y, moved[0], moved[1]


def _batch_norm(
    x: Array, weight: Array, bias: Array, mean: Array, variance: Array, eps: float
) -> Array:
    xp = primitives(x)
    weight, bias, mean, variance = (widened(xp, array) for array in (weight, bias, mean, variance))
    scale = xp.multiply(weight, xp.rsqrt(xp.add(variance, eps)))
    apart = xp.subtract(widened(xp, x), _over_channels(mean, x))
    y = xp.add(xp.multiply(apart, _over_channels(scale, x)), _over_channels(bias, x))
    return xp.astype(y, xp.dtype(x))


def _over_channels(values: Array, x: Array) -> Array:
    """Return a number for each channel, in a shape that broadcasts over a batch."""
    return ops.reshape(values, (1, values.shape[0], *[1] * (x.ndim - 2)))


class GroupNorm(_OfChannels):
    """Normalize groups of channels of each example to mean 0 and variance 1, then scale and shift.

    As many groups as channels are an instance norm. Its parameters are `weight` and `bias`.
    """

    groups: Size = 1
    eps: Positive = 1e-5

    def output(self, shape: Shape) -> Shape:
        if super().output(shape)[0] % self.groups:
            raise self.misfit(f"{self.groups} groups do not divide the channels")
        return channels_first(shape)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        rows = ops.reshape(x, (x.shape[0], self.groups, -1))
        y = ops.reshape(ops.layernorm(rows, None, None, self.eps), tuple(x.shape))
        weight, bias = (_over_channels(parameters[name], x) for name in ("weight", "bias"))
        return ops.add(ops.multiply(y, weight), bias)


class PReLU(_OfChannels):
    """`x` where it is positive, else `slope × x`, with a trained `slope` for each channel."""

    _names = "slope"
    _advice = "put nn.Transpose() before it"

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        slope = _over_channels(parameters["slope"], x)
        return ops.add(ops.relu(x), ops.multiply(slope, ops.minimum(x, 0.0)))


class Flatten(Layer):
    """Flatten an example to one axis.

    >>> Flatten().output((3, 4, 5))
    (60,)
    """

    def output(self, shape: Shape) -> Shape:
        size = (math.prod(shape),)
        return features_last(size) if names_of(shape) else size

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.reshape(x, (x.shape[0], math.prod(x.shape[1:])))


class Transpose(Layer):
    """Swap positions and features, so that layers over channels and over features can follow.

    (positions, features) becomes (channels, length), and (channels, length) the former. An image
    (channels, height, width) becomes (positions, features), row by row.

    >>> Transpose().output((64, 20)), Transpose().output((64, 4, 5))
    ((20, 64), (20, 64))
    """

    def output(self, shape: Shape) -> Shape:
        if len(shape) not in (2, 3) or names_of(shape).count("positions") > 1:
            raise self.misfit(f"got {shape}, expected (positions, features) or channels first")
        swapped = (math.prod(shape[1:]), shape[0])
        if "features" in names_of(shape):
            return channels_first(swapped)
        return features_last(swapped) if names_of(shape) or len(shape) == 3 else swapped

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        joined = ops.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))
        return ops.permute(joined, (0, 2, 1))


class Chain(Layer):
    """Layers in sequence; strings name activations.

    Its parameters are a list with those of each layer.

    >>> chain = Chain(Dense(64, 128), "relu", Dense(128, 10))
    >>> chain.output((64,)), len(chain.layers)
    ((10,), 3)
    >>> Chain(Dense(64, 128), "relu", Dense(64, 10)).output((64,))
    Traceback (most recent call last):
    anydevice._nn.layer.MisfitError: Chain[2] Dense(64→10): got 128 features
    """

    layers: tuple[Layer, ...]

    def __init__(self, *given: Layer | str, layers: Sequence[Layer | str] = ()) -> None:
        super().__init__(tuple([as_layer(layer) for layer in (*given, *layers)]))

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [(f"[{at}]", layer) for at, layer in enumerate(self.layers)]

    @property
    def input_shape(self) -> Shape | None:
        return self.layers[0].input_shape

    def settings_fit(self) -> None:
        if not self.layers:
            raise ConfigurationError("Chain: it needs at least one layer")

    def output(self, shape: Shape) -> Shape:
        for step, layer in self.parts:
            shape = self.output_of(step, layer, shape)
        return shape

    def resolved(self, shape: Shape) -> Layer:
        layers: list[Layer] = []
        for step, layer in self.parts:
            layers.append(self.resolved_of(step, layer, shape))
            shape = self.output_of(step, layers[-1], shape)
        return self if all(map(is_, layers, self.layers)) else Chain(*layers)

    def initial(self, generator: Random) -> Parameters:
        # A generator for each, so that a layer's numbers do not depend on the sizes before it.
        own = generator.split(len(self.layers))
        return [layer.initial(one) for layer, one in zip(self.layers, own, strict=True)]

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        for (step, layer), own in zip(self.parts, parameters, strict=True):
            x = run.through(step, layer, own, x)
        return x


class Concatenate(Layer):
    """Layers beside each other, which all get the input; their outputs are put together.

    That is along the first axis of an example, the channels, unless `axis` is another one. Strings
    name activations; "identity" is the input itself.

    >>> Concatenate(nn.Conv2d(3, 8, 1), nn.Conv2d(3, 4, 3, padding=1)).output((3, 28, 28))
    (12, 28, 28)
    """

    layers: tuple[Layer, ...]
    axis: Axis = 0

    def __init__(self, *given: Layer | str, axis: int = 0, layers: Sequence[Layer] = ()) -> None:
        super().__init__(Chain(*given, layers=layers).layers, axis)

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return Chain(*self.layers).parts

    def output(self, shape: Shape) -> Shape:
        shapes = [self.output_of(step, layer, shape) for step, layer in self.parts]
        axis = self.axis + (self.axis < 0) * len(shapes[0])
        alike = len({(len(own), own[:axis], own[axis + 1 :]) for own in shapes}) == 1
        if not alike or not 0 <= axis < len(shapes[0]):
            raise self.misfit(f"got {' and '.join(map(str, shapes))}, which do not fit on {axis=}")
        names = {names_of(own) for own in shapes if names_of(own)}
        joined = (*shapes[0][:axis], sum(own[axis] for own in shapes), *shapes[0][axis + 1 :])
        if len(names) > 1 or any(self.axis == 0 and own[0] == "positions" for own in names):
            got = " and ".join(map(str, shapes))
            raise self.misfit(f"got {got}, expected channels first; give axis=-1 for features")
        if not names:
            return joined
        return features_last(joined) if "features" in names.pop() else channels_first(joined)

    def resolved(self, shape: Shape) -> Layer:
        parts = [self.resolved_of(step, layer, shape) for step, layer in self.parts]
        return replace(self, layers=tuple(parts))

    def initial(self, generator: Random) -> Parameters:
        return Chain(*self.layers).initial(generator)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        pairs = zip(self.parts, parameters, strict=True)
        outputs = [run.through(step, layer, own, x) for (step, layer), own in pairs]
        return ops.concat(outputs, self.axis + (self.axis >= 0))


_SHAPE = Check("the shape of an example", lambda x: all(map(_is_size, x)))
ExampleShape = Annotated[tuple[int, ...], _SHAPE]


class Input(Layer):
    """One of several inputs, by its name: the first layer of each part that takes it.

    The model then takes a dict of arrays, and has the shapes of its examples from these layers.

    >>> words = Chain(nn.Input("words", 20), nn.Embedding(99, 8), nn.GlobalAvgPool("positions"))
    >>> both = Concatenate(words, nn.Input("numbers", 4))
    >>> nn.build(both, nn.Dense(None, 2), device="cpu").input_shape
    {'words': (20,), 'numbers': (4,)}
    """

    name: str
    shape: ExampleShape

    def __init__(self, name: str, shape: int | Sequence[int]) -> None:
        super().__init__(name, tuple(shape) if isinstance(shape, Sequence) else (shape,))

    @property
    def label(self) -> str:
        return f"Input({self.name})"

    def _takes(self, shape: Any) -> None:
        if not isinstance(shape, dict) or self.name not in shape:
            got = (
                ", ".join(map(repr, shape))
                if isinstance(shape, dict)
                else f"one array, {getattr(shape, 'shape', shape)}"
            )
            raise self.misfit(f"got {got}, expected a dict of arrays with {self.name!r}")

    def output(self, shape: Any) -> Any:
        self._takes(shape)
        return shape[self.name]

    def apply(self, parameters: Parameters, x: Any, run: Run) -> Any:
        return self.output(x)


class Heads(Layer):
    """Parallel layers that all get the same input; the output is a dict of their outputs.

    `nn.train` then takes a dict of losses and a dict of targets. Strings name activations.

    >>> Heads({"topic": nn.Dense(16, 5), "score": nn.Dense(16, 1)}).output((16,))
    {'topic': (5,), 'score': (1,)}
    """

    heads: tuple[tuple[str, Layer], ...]

    def __init__(self, heads: Any) -> None:
        pairs = heads.items() if isinstance(heads, Mapping) else heads
        super().__init__(tuple([(name, as_layer(layer)) for name, layer in pairs]))

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [(f".{name}", layer) for name, layer in self.heads]

    def settings_fit(self) -> None:
        if not self.heads or not all(n.isidentifier() and n != "logits" for n, _ in self.heads):
            named = "a dict of layers whose names are not 'logits', which is reserved"
            raise setting_error(self, "heads", named, dict(self.heads))

    def output(self, shape: Shape) -> Any:
        return {step[1:]: self.output_of(step, layer, shape) for step, layer in self.parts}

    def resolved(self, shape: Shape) -> Layer:
        return Heads([(step[1:], self.resolved_of(step, x, shape)) for step, x in self.parts])

    def initial(self, generator: Random) -> Parameters:
        own = generator.split(len(self.heads))
        return {name: x.initial(one) for (name, x), one in zip(self.heads, own, strict=True)}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Any:
        return {n: run.through(f".{n}", own, parameters[n], x) for n, own in self.heads}


class Residual(Layer):
    """A residual connection: `layer(x) + x`, or `layer(x) + shortcut(x)`.

    A `shortcut` is for a layer that changes the shape. Strings name activations. Its parameters are
    `layer`, and with a shortcut `shortcut`.

    >>> Residual(Chain(Dense(8, 8), "relu", Dense(8, 8))).output((8,))
    (8,)
    >>> Residual(Dense(8, 4)).output((8,))
    Traceback (most recent call last):
    anydevice._nn.layer.MisfitError: Residual: got (features 4) from ... and (8,) beside it; ...
    """

    layer: Layer
    shortcut: Layer | None = None

    def __init__(self, layer: Layer | str, shortcut: Layer | str | None = None) -> None:
        super().__init__(as_layer(layer), None if shortcut is None else as_layer(shortcut))

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        inside = [(".layer", self.layer)]
        return inside if self.shortcut is None else [*inside, (".shortcut", self.shortcut)]

    @property
    def input_shape(self) -> Shape | None:
        return self.layer.input_shape

    def output(self, shape: Shape) -> Shape:
        own, beside, *_ = [self.output_of(step, part, shape) for step, part in self.parts] + [shape]
        names = {names_of(sizes) for sizes in (own, beside) if names_of(sizes)}
        if own != beside or len(names) > 1:
            raise self.misfit(
                f"got {own} from {self.layer.label} and {beside} beside it; a shortcut that gives "
                f"{own} too makes them fit"
            )
        return own

    def initial(self, generator: Random) -> Parameters:
        own = generator.split(len(self.parts))
        pairs = zip(self.parts, own, strict=True)
        return {step[1:]: part.initial(one) for (step, part), one in pairs}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        y = run.through(".layer", self.layer, parameters["layer"], x)
        if self.shortcut is not None:
            x = run.through(".shortcut", self.shortcut, parameters["shortcut"], x)
        return ops.add(y, x)


class LeakyReLU(Layer):
    """`x` where it is positive, and `slope × x` elsewhere.

    The name `"leaky_relu"` stands for a slope of 0.01.

    >>> LeakyReLU(0.2).label
    'LeakyReLU(0.2)'
    """

    slope: Number = 0.01

    @property
    def label(self) -> str:
        return f"LeakyReLU({self.slope:g})"

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return ops.leaky_relu(x, self.slope)


class Dropout(Layer):
    """In training, set each element to 0 with probability `rate`, and scale the others.

    They are multiplied by 1 / (1 - rate), so the mean stays. In inference it does nothing.

    The mask depends on the seed and step of the run and on the layer's path: it is the same on
    every engine, and when activations are recomputed.

    >>> x = numpy.ones((2, 4), numpy.float32)
    >>> Dropout(0.5).apply({}, x, Run(training=True, seed=1, step=1)).tolist()
    [[0.0, 0.0, 0.0, 2.0], [2.0, 0.0, 2.0, 0.0]]
    >>> Dropout(0.5).apply({}, x, Run()) is x
    True
    """

    rate: Share

    @property
    def label(self) -> str:
        return f"Dropout({self.rate:g})"

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        if not run.training or not self.rate:
            return x
        dropped = random_mask(run, self.rate, x)
        return ops.where(dropped, 0.0, ops.multiply(x, 1 / (1 - self.rate)))


class TiedEmbedding(Layer):
    """An embedding whose matrix is also the output projection: ids in, logits out.

    `inside` is the model in between; its output has `size` features. Its parameters are `weight`
    (rows, size) and `inside`.

    >>> blocks = nn.Chain(nn.TransformerBlock(64, 4, causal=True, rope=True), nn.RMSNorm(64))
    >>> nn.Model(TiedEmbedding(1000, 64, blocks), (20,), device="cpu").output_shape
    (20, 1000)
    """

    rows: Size
    size: Size
    inside: Layer
    initializer: Initial = Normal(0.02)

    @property
    def label(self) -> str:
        return f"TiedEmbedding({self.rows}→{self.size}→{self.rows})"

    @property
    def takes_ids_below(self) -> int:
        return self.rows

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [(".inside", self.inside)]

    def settings_fit(self) -> None:
        if not isinstance(self.inside, Layer):
            raise ConfigurationError(
                f"TiedEmbedding: inside must be a layer, not {self.inside!r}; "
                "put several into a Chain",
                source="TiedEmbedding.inside",
            )

    def output(self, shape: Shape) -> Shape:
        self.takes_axis(shape, "ids")
        inner = self.output_of(".inside", self.inside, features_last((*shape, self.size)))
        self.takes_axis(inner, "features")
        if not inner or inner[-1] != self.size:
            raise self.misfit(f"got the shape {inner} from {self.inside.label}")
        return features_last((*inner[:-1], self.rows))

    def resolved(self, shape: Shape) -> Layer:
        named = features_last((*shape, self.size))
        inside = self.resolved_of(".inside", self.inside, named)
        return self if inside is self.inside else replace(self, inside=inside)

    def initial(self, generator: Random) -> Parameters:
        own, inner = generator.split(2)
        table = _draw_table(self.initializer, own, self.rows, self.size)
        return {**table, "inside": self.inside.initial(inner)}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        y = ops.embedding(parameters["weight"], x)
        y = run.through(".inside", self.inside, parameters["inside"], y)
        return ops.linear(y, parameters["weight"])
