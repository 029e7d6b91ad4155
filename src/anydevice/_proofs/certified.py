"""A loss by interval bounds: training with it leaves something to prove.

Beside each example goes the box around it, layer by layer. The loss is partly that of the example,
and partly that of the worst outputs that the box could have.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import Any, NamedTuple

from anydevice import _ops as ops
from anydevice._core import checks
from anydevice._core.checks import is_number
from anydevice._core.record import replace
from anydevice._nn import convolution, layers
from anydevice._nn.layer import Array, Layer, Parameters, Run
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
        """Refused: the output alone does not say what the worst one is."""
        raise ConfigurationError(
            "proofs.certified bounds the layers of a nn.Model; it takes no module of another "
            "library, and nn.evaluate takes the plain loss",
            source="loss",
        )

    def of_layer(
        self, layer: Layer, parameters: Parameters, x: Array, y: Array, run: Run
    ) -> tuple[Array, Array]:
        """The loss of a batch, and the output for it."""
        _check_layers(layer, layer.root)
        grown = self._grown(run)
        radius = ops.multiply(grown, self.eps) if _is_array(grown) else grown * self.eps
        around = [ops.subtract(x, radius), ops.add(x, radius)]
        if isfinite(self.low):
            around = [ops.maximum(each, self.low) for each in around]
        if isfinite(self.high):
            around = [ops.minimum(each, self.high) for each in around]
        through = _through(layer, parameters, Around(x, *around), run)
        plain = self.loss(through.x, y)
        worst = self.loss(_worst(through, y), y)
        share = ops.multiply(grown, self.share) if _is_array(grown) else grown * self.share
        weighted = ops.multiply(plain, ops.subtract(1.0, share) if _is_array(share) else 1 - share)
        return ops.add(weighted, ops.multiply(worst, share)), through.x

    def _grown(self, run: Run) -> Any:
        """How far the ramp is: from 0 to 1 over its steps; 1 outside of a training."""
        if not run.training or not self.ramp:
            return 1.0
        step = run.step
        if not _is_array(step):
            return min(1.0, step / self.ramp)
        return ops.minimum(ops.multiply(ops.astype(step, "float32"), 1 / self.ramp), 1.0)


def certified(
    loss: str,
    eps: float,
    *,
    share: float = 0.5,
    ramp: int = 0,
    low: float = -inf,
    high: float = inf,
) -> Certified:
    """A loss for `nn.train` that makes a `nn.Model` robust, so that `proofs.prove` has a chance.

    `eps` is how much each element of an example may change; `low` and `high` are the range of
    inputs. `share` of the loss is that of the worst outputs by interval bounds, and the rest the
    plain loss. With `ramp`, eps and the share grow from 0 over so many steps, which trains better
    than to start with all of it.

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


class Around(NamedTuple):
    """A batch at one place of a model, and the least and the most that it can be there."""

    x: Array
    low: Array
    high: Array


def _worst(bounds: Around, target: Array) -> Array:
    """The outputs that are worst for the target: its least, and the most of the others."""
    classes = bounds.x.shape[-1]
    chosen = ops.astype(ops.one_hot(target, classes), "float32")
    apart = ops.multiply(chosen, ops.subtract(bounds.low, bounds.high))
    return ops.add(bounds.high, apart)


def _through(layer: Layer, parameters: Parameters, bounds: Around, run: Run) -> Around:
    return _LAYERS[type(layer)](layer, parameters, bounds, run)


def _inside(run: Run, step: str) -> Run:
    path = run.path + step
    return replace(run, path=path, training=run.training and path not in run.frozen, watch=None)


def _chain(layer: Any, parameters: Parameters, bounds: Around, run: Run) -> Around:
    for (step, part), own in zip(layer.parts, parameters, strict=True):
        bounds = _through(part, own, bounds, _inside(run, step))
    return bounds


def _recomputed(layer: Any, parameters: Parameters, bounds: Around, run: Run) -> Around:
    return _through(layer.layer, parameters, bounds, run)


def _residual(layer: Any, parameters: Parameters, bounds: Around, run: Run) -> Around:
    inner = _through(layer.layer, parameters["layer"], bounds, _inside(run, ".layer"))
    if layer.shortcut is not None:
        own = parameters["shortcut"]
        bounds = _through(layer.shortcut, own, bounds, _inside(run, ".shortcut"))
    return Around(*[ops.add(a, b) for a, b in zip(inner, bounds, strict=True)])


def _linear(layer: Any, parameters: Parameters, bounds: Around, run: Run) -> Around:
    """The centre of a box goes through the layer, its radius through the absolute weights."""
    plain = replace(layer, activation=None)
    absolute = replace(plain, bias=False)
    centre, radius = _centred(bounds)
    centre = plain.apply(parameters, centre, run)
    radius = absolute.apply({"weight": ops.abs(parameters["weight"])}, radius, run)
    made = _bounds(plain.apply(parameters, bounds.x, run), centre, radius)
    return made if layer.activation is None else _activated(layer.activation, made)


def _centred(bounds: Around) -> tuple[Array, Array]:
    centre = ops.multiply(ops.add(bounds.low, bounds.high), 0.5)
    return centre, ops.multiply(ops.subtract(bounds.high, bounds.low), 0.5)


def _bounds(x: Array, centre: Array, radius: Array) -> Around:
    return Around(x, ops.subtract(centre, radius), ops.add(centre, radius))


def _batch_norm(layer: Any, parameters: Parameters, bounds: Around, run: Run) -> Around:
    """By the statistics that the examples themselves are normalized by."""
    x = bounds.x
    after = layer.apply(parameters, x, run)
    shape = (1, x.shape[1], *[1] * (x.ndim - 2))
    if run.training:
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        mean = ops.reshape(ops.mean(x, axes), shape)
        apart = ops.subtract(x, mean)
        variance = ops.reshape(ops.mean(ops.multiply(apart, apart), axes), shape)
    else:
        mean, variance = [ops.reshape(parameters[name], shape) for name in ("mean", "variance")]
    scale = ops.multiply(
        ops.reshape(parameters["weight"], shape), ops.rsqrt(ops.add(variance, layer.eps))
    )
    centre, radius = _centred(bounds)
    moved = ops.add(
        ops.multiply(ops.subtract(centre, mean), scale), ops.reshape(parameters["bias"], shape)
    )
    return _bounds(after, moved, ops.multiply(radius, ops.abs(scale)))


def _rising(layer: Any, parameters: Parameters, bounds: Around, run: Run) -> Around:
    """A layer that never falls: its bounds are its outputs for the bounds."""
    return Around(*[layer.apply(parameters, each, run) for each in bounds])


def _activation(layer: Any, parameters: Parameters, bounds: Around, run: Run) -> Around:
    return _activated(layer.name, bounds)


def _activated(name: str, bounds: Around) -> Around:
    function = ACTIVATIONS[name]
    x, low, high = [function(each) for each in bounds]
    if name not in _DIPS:
        return Around(x, low, high)
    place, least = _DIPS[name]
    dips = ops.logical_and(ops.less(bounds.low, place), ops.greater(bounds.high, place))
    lower = ops.where(dips, least, ops.minimum(low, high))
    return Around(x, lower, ops.maximum(low, high))


_DIPS = {
    "gelu": (-0.7517916, -0.1699712),
    "gelu_tanh": (-0.7524614, -0.1700407),
    "silu": (-1.2784645, -0.2784646),
}
"""Where activations that fall and rise are least, and how much they are there."""

_RISING = ("identity", "relu", "leaky_relu", "tanh", "sigmoid")

_LAYERS: dict[type[Layer], Callable[[Any, Any, Around, Run], Around]] = {
    layers.Activation: _activation,
    layers.BatchNorm: _batch_norm,
    layers.Chain: _chain,
    layers.Dense: _linear,
    layers.Dropout: _rising,
    layers.Flatten: _rising,
    layers.LeakyReLU: _rising,
    layers.Residual: _residual,
    Recomputed: _recomputed,
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


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape")
