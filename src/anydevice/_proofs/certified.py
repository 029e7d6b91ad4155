"""A loss by interval bound propagation (IBP, Gowal et al., 2018), for models that can be proved.

The box around each example goes through the layers beside it. The loss is partly that of the
example, and partly that of the worst outputs that the box allows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import Any, NamedTuple

from anydevice import _ops as ops
from anydevice._core import checks
from anydevice._core.array import Array
from anydevice._core.checks import is_number
from anydevice._core.record import replace
from anydevice._nn import convolution, layers
from anydevice._nn.layer import Layer, Parameters, Run
from anydevice._nn.layers import ACTIVATIONS
from anydevice._nn.losses import LayerLoss, cross_entropy, loss_of
from anydevice._nn.recompute import Recomputed
from anydevice.errors import ConfigurationError, UnsupportedError


class Certified(LayerLoss):
    """The loss of a model in a box around each example; see `certified`."""

    loss: Any
    eps: float
    share: float = 0.5
    ramp: int = 0
    low: float = -inf
    high: float = inf

    def __call__(self, output: Array, target: Array) -> Array:
        """Raise `ConfigurationError`: the worst output needs the layers."""
        raise ConfigurationError(
            "proofs.certified bounds the layers of a nn.Model; it takes no module of another "
            "library, and nn.evaluate takes the plain loss",
            source="loss",
        )

    def of_layer(
        self, layer: Layer, parameters: Parameters, x: Array, y: Array, run: Run
    ) -> tuple[Array, Array]:
        """Return the loss of a batch, and its outputs."""
        _check_layers(layer, layer.root)
        ramped: Any = 1.0  # the progress of the ramp, from 0 to 1; 1 outside of a training
        if run.training and self.ramp:
            step: Any = run.step
            if hasattr(step, "shape"):
                ramped = ops.minimum(ops.astype(step, "float32") * (1 / self.ramp), 1.0)
            else:
                ramped = min(1.0, step / self.ramp)
        radius = ramped * self.eps
        ends = [ops.subtract(x, radius), ops.add(x, radius)]
        if isfinite(self.low):
            ends = [ops.maximum(end, self.low) for end in ends]
        if isfinite(self.high):
            ends = [ops.minimum(end, self.high) for end in ends]
        output = _propagate(layer, parameters, BoxedBatch(x, *ends), run)
        plain = self.loss(output.x, y)
        # The worst outputs: the least of the target, and the most of the other classes
        is_target = ops.astype(ops.one_hot(y, output.x.shape[-1]), "float32")
        spread = ops.multiply(is_target, ops.subtract(output.low, output.high))
        worst = self.loss(ops.add(output.high, spread), y)
        share = ramped * self.share
        return ops.add(ops.multiply(plain, 1 - share), ops.multiply(worst, share)), output.x


def certified(
    loss: str,
    eps: float,
    *,
    share: float = 0.5,
    ramp: int = 0,
    low: float = -inf,
    high: float = inf,
) -> Certified:
    """Return a loss for `nn.train` that makes a `nn.Model` robust, so that it can be proved.

    `eps` is the largest change of each element of an example; `low` and `high` are the range of
    inputs. `share` of the loss is that of the worst outputs by interval bounds, the rest is the
    plain loss. With `ramp`, eps and the share grow from 0 in as many steps, for better training.

    >>> import numpy
    >>> from anydevice import nn
    >>> x = numpy.linspace(-1, 1, 64, dtype=numpy.float32).reshape(64, 1)
    >>> data = nn.Batches(x, (x[:, 0] > 0).astype("int32"), size=16)
    >>> robust = certified("cross_entropy", 0.1, ramp=20)
    >>> model = nn.build(nn.Dense(1, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> done = nn.train(model, data, nn.Adam(0.01), robust, epochs=5, optimize="none")
    >>> len(done.history)
    5

    The loss is "cross_entropy". Raises `ConfigurationError` for other losses and numbers.
    """
    if loss not in ("cross_entropy", cross_entropy):
        raise ConfigurationError(
            f'proofs.certified takes the loss "cross_entropy", not {loss!r}', source="loss"
        )
    owner = "proofs.certified"
    eps = checks.number("eps", eps, above=0, owner=owner)
    share = checks.number("share", share, at_least=0, at_most=1, owner=owner)
    ramp = checks.integer("ramp", ramp, 0, owner=owner, note="it is a number of steps")
    for name, value in (("low", low), ("high", high)):
        if not is_number(value):
            raise checks.error(name, "a number", value, owner=owner)
    if not low < high:
        raise checks.error("high", "above low", high, owner=owner)
    return Certified(loss_of(loss), eps, share, ramp, float(low), float(high))


class BoxedBatch(NamedTuple):
    """A batch inside a model, with lower and upper bounds over the box of each example."""

    x: Array
    low: Array
    high: Array


def _propagate(layer: Layer, parameters: Parameters, bounds: BoxedBatch, run: Run) -> BoxedBatch:
    return _LAYERS[type(layer)](layer, parameters, bounds, run)


def _inside(run: Run, step: str) -> Run:
    path = run.path + step
    return replace(run, path=path, training=run.training and path not in run.frozen, watch=None)


def _chain(layer: Any, parameters: Parameters, bounds: BoxedBatch, run: Run) -> BoxedBatch:
    for (step, part), of_part in zip(layer.parts, parameters, strict=True):
        bounds = _propagate(part, of_part, bounds, _inside(run, step))
    return bounds


def _residual(layer: Any, parameters: Parameters, bounds: BoxedBatch, run: Run) -> BoxedBatch:
    inner = _propagate(layer.layer, parameters["layer"], bounds, _inside(run, ".layer"))
    if layer.shortcut is not None:
        of_shortcut = parameters["shortcut"]
        bounds = _propagate(layer.shortcut, of_shortcut, bounds, _inside(run, ".shortcut"))
    return BoxedBatch(*[ops.add(a, b) for a, b in zip(inner, bounds, strict=True)])


def _linear(layer: Any, parameters: Parameters, bounds: BoxedBatch, run: Run) -> BoxedBatch:
    """Apply the layer to the centre of a box, and its absolute weights to the radius."""
    plain = replace(layer, activation=None)
    absolute = replace(plain, bias=False)
    centre, radius = _centre_and_radius(bounds)
    centre = plain.apply(parameters, centre, run)
    radius = absolute.apply({"weight": ops.abs(parameters["weight"])}, radius, run)
    y = _bounds(plain.apply(parameters, bounds.x, run), centre, radius)
    return y if layer.activation is None else _apply_activation(layer.activation, y)


def _centre_and_radius(bounds: BoxedBatch) -> tuple[Array, Array]:
    centre = ops.multiply(ops.add(bounds.low, bounds.high), 0.5)
    return centre, ops.multiply(ops.subtract(bounds.high, bounds.low), 0.5)


def _bounds(x: Array, centre: Array, radius: Array) -> BoxedBatch:
    return BoxedBatch(x, ops.subtract(centre, radius), ops.add(centre, radius))


def _batch_norm(layer: Any, parameters: Parameters, bounds: BoxedBatch, run: Run) -> BoxedBatch:
    """Normalize bounds by the statistics of the examples themselves."""
    x = bounds.x
    after = layer.apply(parameters, x, run)
    shape = (1, x.shape[1], *[1] * (x.ndim - 2))
    if run.training:
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        mean = ops.reshape(ops.mean(x, axes), shape)
        centred = ops.subtract(x, mean)
        variance = ops.reshape(ops.mean(ops.multiply(centred, centred), axes), shape)
    else:
        mean, variance = [ops.reshape(parameters[name], shape) for name in ("mean", "variance")]
    scale = ops.multiply(
        ops.reshape(parameters["weight"], shape), ops.rsqrt(ops.add(variance, layer.eps))
    )
    centre, radius = _centre_and_radius(bounds)
    centre = ops.add(
        ops.multiply(ops.subtract(centre, mean), scale), ops.reshape(parameters["bias"], shape)
    )
    return _bounds(after, centre, ops.multiply(radius, ops.abs(scale)))


def _rising(layer: Any, parameters: Parameters, bounds: BoxedBatch, run: Run) -> BoxedBatch:
    """Apply a layer that never falls: its bounds are its outputs for the bounds."""
    return BoxedBatch(*[layer.apply(parameters, x, run) for x in bounds])


def _apply_activation(name: str, bounds: BoxedBatch) -> BoxedBatch:
    function = ACTIVATIONS[name]
    x, low, high = [function(end) for end in bounds]
    if name not in _DIPS:
        return BoxedBatch(x, low, high)
    argument, least = _DIPS[name]
    dips = ops.logical_and(ops.less(bounds.low, argument), ops.greater(bounds.high, argument))
    lower = ops.where(dips, least, ops.minimum(low, high))
    return BoxedBatch(x, lower, ops.maximum(low, high))


_DIPS = {
    "gelu": (-0.7517916, -0.1699712),
    "gelu_tanh": (-0.7524614, -0.1700407),
    "silu": (-1.2784645, -0.2784646),
}
"""The argument and the value of the minimum of activations that fall and rise."""

_RISING = ("identity", "relu", "leaky_relu", "tanh", "sigmoid")

_LAYERS: dict[type[Layer], Callable[[Any, Any, BoxedBatch, Run], BoxedBatch]] = {
    layers.Activation: lambda layer, parameters, bounds, run: _apply_activation(layer.name, bounds),
    layers.BatchNorm: _batch_norm,
    layers.Chain: _chain,
    layers.Dense: _linear,
    layers.Dropout: _rising,
    layers.Flatten: _rising,
    layers.LeakyReLU: _rising,
    layers.Residual: _residual,
    layers.Transpose: _rising,
    Recomputed: lambda layer, parameters, bounds, run: _propagate(
        layer.layer, parameters, bounds, run
    ),
    convolution.AvgPool2d: _rising,
    convolution.Conv1d: _linear,
    convolution.Conv2d: _linear,
    convolution.GlobalAvgPool: _rising,
    convolution.GlobalMaxPool: _rising,
    convolution.MaxPool2d: _rising,
}


def _check_layers(layer: Layer, path: str) -> None:
    """Raise `UnsupportedError`, with its path, for a layer without interval bounds."""
    name = getattr(layer, "name", None) or getattr(layer, "activation", None)
    unknown = name is not None and name not in (*_RISING, *_DIPS)
    if type(layer) not in _LAYERS or unknown:
        raise UnsupportedError(
            f"{path} {layer.label}: proofs.certified has no interval bounds of it; it trains dense "
            "and convolutional layers, poolings, batch norm, residual sums and activations"
        )
    for step, part in layer.parts:
        _check_layers(part, path + step)
