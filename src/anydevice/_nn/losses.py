"""Losses: functions of an output and its target that return a scalar, computed in float32.

A target may be a pair of it and weights of its examples, or of their parts: errors are multiplied
by them before the mean, which does not divide by their sum: parts of a batch add up to the whole.

Losses over classes take logits, and `fuse_loss` leaves out a last softmax or sigmoid of the model.
A logarithm after a softmax loses the digits of small probabilities; computed together they lose
none. Trained through a softmax of a softmax, a model stays unsure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._core import checks
from anydevice._core.array import Array
from anydevice._core.names import find_name
from anydevice._core.record import Record, replace
from anydevice._nn.convolution import Conv1d, Conv2d, ConvTranspose2d
from anydevice._nn.layer import Layer, Parameters, Run
from anydevice._nn.layers import Activation, Chain, Dense, Dropout, Flatten, Heads, Transpose
from anydevice._nn.recompute import Recomputed
from anydevice._ops.arguments import different_shapes, wide, widened
from anydevice._ops.dispatch import primitives
from anydevice.errors import ConfigurationError

Loss = Callable[[Array, Array], Array]


class LayerLoss(Record):
    """The base class of losses of layer and batch, made from `loss`, the loss of an output."""

    loss: Loss

    def of_layer(
        self, layer: Layer, parameters: Parameters, x: Array, y: Array, run: Run
    ) -> tuple[Array, Array]:
        """Compute the loss of a batch, and the output for it."""
        raise NotImplementedError

    def __call__(self, output: Array, target: Array) -> Array:
        """Return the loss of an output."""
        return self.loss(output, target)


class HeadLosses(Record):
    """The sum of the losses of heads, by their names, times weights."""

    parts: tuple[tuple[str, Loss, float], ...]

    def __call__(self, output: Any, target: Any) -> Array:
        target, weights = split_weights(target)
        names = sorted(name for name, *_ in self.parts)
        for what, given in (("the output", output), ("y", target)):
            own = sorted(given) if isinstance(given, Mapping) else "no dict"
            if own != names:
                raise ConfigurationError(f"loss is for {names}, {what} is {own}", source="loss")
        pairs: Any = target if weights is None else {n: (y, weights) for n, y in target.items()}
        values = [ops.multiply(loss(output[n], pairs[n]), w) for n, loss, w in self.parts]
        return reduce(ops.add, values)


def cross_entropy(
    output: Array, target: Any, class_weights: Sequence[float] | None = None
) -> Array:
    """Compute the mean of -log(softmax(output)[target]); output (…, classes), integer target.

    `class_weights` has a weight for each class, as in `partial(cross_entropy, class_weights=…)`.

    >>> cross_entropy(numpy.zeros((3, 2)), numpy.array([0, 1, 1])).round(4).tolist()
    0.6931
    >>> cross_entropy(numpy.zeros((3, 2)), numpy.array([0, 1, 1]), (1.0, 4.0)).round(4).tolist()
    2.0794
    """
    if class_weights is None and not isinstance(target, tuple):
        return ops.cross_entropy(output, target)
    target, weights = split_weights(target)
    if tuple(output.shape[:-1]) != tuple(target.shape):
        ops.cross_entropy(output, target)  # raises
    shares = ops.log_softmax(widened(primitives(output), output))
    rows = ops.take_along_axis(shares, ops.reshape(target, (*target.shape, 1)))
    errors = ops.negative(ops.reshape(rows, target.shape))
    if class_weights is not None:
        errors = ops.multiply(errors, ops.take(_numbers(class_weights, errors), target))
    return _weighted_mean(errors, weights)


def split_weights(target: Any) -> tuple[Array, Array | None]:
    """Return a target and its weights; `None` if there are none."""
    return target if isinstance(target, tuple) else (target, None)


def _numbers(values: Sequence[float], like: Array) -> Array:
    xp = primitives(like)
    return xp.astype(xp.asarray(np.asarray(values, np.float32), like), xp.dtype(like))


def _weighted_mean(errors: Array, weights: Array | None) -> Array:
    if weights is not None:
        given, wanted = tuple(weights.shape), tuple(errors.shape)
        if given != wanted[: len(given)]:
            raise different_shapes("weights", errors=errors, weights=weights)
        weights = ops.astype(weights, primitives(errors).dtype(errors))
        weights = ops.reshape(weights, given + (1,) * (len(wanted) - len(given)))
        errors = ops.multiply(errors, weights)
    return ops.mean(errors)


def _off(op: str, output: Array, target: Array) -> Array:
    if tuple(output.shape) != tuple(target.shape):
        raise different_shapes(op, output=output, target=target)
    output = widened(primitives(output, op, "output"), output)
    return ops.subtract(output, ops.astype(target, primitives(output).dtype(output)))


def huber(output: Array, target: Any, delta: float = 1.0) -> Array:
    """Compute the mean of d² / 2 if |d| < `delta`, else `delta`·(|d| - `delta` / 2); d = o - t.

    >>> huber(numpy.array([1.0, 2.0]), numpy.array([1.5, 6.0])).tolist()
    1.8125
    """
    target, weights = split_weights(target)
    size = ops.abs(_off("huber", output, target))
    least = ops.minimum(size, float(delta))
    errors = ops.multiply(least, ops.subtract(size, ops.multiply(least, 0.5)))
    return _weighted_mean(errors, weights)


def kl_divergence(output: Array, target: Any) -> Array:
    """Compute the mean over rows of sum(t·(log(t) - log(softmax(output)))), t = target.

    The target has the probabilities of the classes, in the shape of the output, which is logits.

    >>> kl_divergence(numpy.zeros((1, 2)), numpy.array([[1.0, 0.0]])).round(4).tolist()
    0.6931
    """
    target, weights = split_weights(target)
    _off("kl_divergence", output, target)
    shares = ops.log_softmax(widened(primitives(output), output))
    target = ops.astype(target, primitives(shares).dtype(shares))
    own = ops.log(ops.maximum(target, 1e-37))  # 0·log(0) is 0
    return _weighted_mean(ops.sum(ops.multiply(target, ops.subtract(own, shares)), -1), weights)


def mean_squared_error(output: Array, target: Any) -> Array:
    """Compute the mean of (output - target)² over two arrays of one shape.

    A 16-bit output is compared in float32; its target may be float32 or 16-bit. Raises
    `ConfigurationError` if the shapes differ.

    >>> mean_squared_error(numpy.array([1.0, 2.0]), numpy.array([1.0, 4.0])).tolist()
    2.0
    """
    if isinstance(target, tuple):
        off = _off("mean_squared_error", output, target[0])
        return _weighted_mean(ops.multiply(off, off), target[1])
    xp = primitives(output, "mean_squared_error", "output")
    alike = primitives(target, "mean_squared_error", "target") is xp
    if alike and (xp.dtype(output).bits < 32 or xp.dtype(target).bits < 32):
        output, target = widened(xp, output), widened(xp, target)
    if tuple(output.shape) != tuple(target.shape):
        raise different_shapes("mean_squared_error", output=output, target=target)
    return ops.mean_squared_error(output, target)


def binary_cross_entropy(
    output: Array, target: Any, class_weights: Sequence[float] | None = None
) -> Array:
    """Compute the mean of `-t·log(s) - (1-t)·log(1-s)`, s = sigmoid(output), t = target.

    Both have the same shape. The output is logits, without a sigmoid; the target is booleans,
    integers or numbers from 0 to 1. `class_weights` are those of 0 and 1. Raises
    `ConfigurationError` if the shapes differ.

    >>> binary_cross_entropy(numpy.array([0.0, 100.0]), numpy.array([1, 1])).round(4).tolist()
    0.3466
    """
    target, weights = split_weights(target)
    if tuple(output.shape) != tuple(target.shape):
        raise different_shapes("binary_cross_entropy", output=output, target=target)
    xp = primitives(output, "binary_cross_entropy", "output")
    dtype = wide(xp.dtype(output))
    # Both logarithms by one softmax: exact for large outputs, and smooth at 0.
    yes = ops.reshape(ops.astype(output, dtype), (*output.shape, 1))
    no = xp.full(tuple(yes.shape), 0, dtype, output)
    shares = ops.log_softmax(ops.concat([yes, no], axis=-1))
    wanted = ops.reshape(ops.astype(target, dtype), (*output.shape, 1))
    both = ops.concat([wanted, ops.subtract(1.0, wanted)], axis=-1)
    if class_weights is not None:
        both = ops.multiply(both, _numbers(tuple(class_weights)[::-1], shares))
    return _weighted_mean(ops.negative(ops.sum(ops.multiply(both, shares), axis=-1)), weights)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "binary_cross_entropy": binary_cross_entropy,
    "huber": huber,
    "kl_divergence": kl_divergence,
}
"""Each loss by its name."""

_IN_FLOAT32: tuple[Loss, ...] = (*LOSSES.values(), ops.cross_entropy)


def computes_in_float32(loss: Loss) -> bool:
    """Whether a loss computes in float32 by itself, and takes a 16-bit output.

    >>> computes_in_float32(cross_entropy), computes_in_float32(lambda output, target: output)
    (True, False)
    """
    if isinstance(loss, HeadLosses):
        return all(computes_in_float32(own) for _, own, _ in loss.parts)
    # By identity: a loss may have no hash, or an equality of its own.
    plain = loss.func if isinstance(loss, partial) else loss
    return any(plain is own for own in _IN_FLOAT32)


def loss_of(spec: Loss | str, *, of_module: bool = False) -> Loss:
    """Return the loss function, by its name here or in other libraries, or as it is.

    A name that takes probabilities elsewhere is refused for a module of another library, whose last
    activation cannot be left out.
    """
    if isinstance(spec, type):
        raise ConfigurationError(
            f"loss is the class {spec.__name__}; give an instance, {spec.__name__}()", source="loss"
        )
    if callable(spec):
        return spec
    if isinstance(spec, Mapping):
        parts = []
        for head, own in spec.items():
            own, weight = own if isinstance(own, tuple) else (own, 1.0)
            weight = checks.number(f"the weight of loss[{head!r}]", weight, at_least=0)
            parts.append((head, loss_of(own, of_module=of_module), weight))
        return HeadLosses(tuple(parts))
    name, hint = find_name("loss of a module" if of_module else "loss", spec, LOSSES)
    if name is None:
        raise ConfigurationError(
            f"unknown loss {spec!r}{hint}; use one of {', '.join(LOSSES)}, or a function of "
            "(output, target) that returns a scalar",
            source="loss",
        )
    return LOSSES[name]


_IDENTITY = Activation("identity")
_APPLIES: tuple[tuple[Loss, str], ...] = (
    (cross_entropy, "softmax"),
    (ops.cross_entropy, "softmax"),
    (kl_divergence, "softmax"),
    (binary_cross_entropy, "sigmoid"),
)
"""Losses that apply an activation themselves; the model must not apply it before."""

_TAKES_PROBABILITIES: tuple[Loss, ...] = (mean_squared_error, ops.mean_squared_error, huber)
"""Losses that apply no activation."""

_GIVES_PROBABILITIES = ("softmax", "sigmoid")


def fuse_loss(layer: Layer, loss: Loss) -> tuple[Layer, bool]:
    """Leave out a final softmax or sigmoid that the loss includes; also return whether it did.

    That is a softmax for `cross_entropy` and a sigmoid for `binary_cross_entropy`, also before a
    dropout. The returned layer takes the same parameters: "identity" stands in for the activation.

    >>> layer, changed = fuse_loss(nn.Chain(nn.Dense(4, 2), "softmax"), nn.cross_entropy)
    >>> layer.layers[1], changed
    (Activation(name='identity'), True)
    >>> fuse_loss(nn.Dense(4, 2), nn.cross_entropy)[1]
    False
    """
    name = fused_activation(loss, layer)
    without = None if name is None else _without(layer, name)
    return (layer, False) if without is None else (without, True)


def threshold_of(layer: Layer) -> float:
    """Return the output above which a layer says yes: 0.5 after a sigmoid, 0 for logits.

    >>> threshold_of(nn.Chain(nn.Dense(4, 1), "sigmoid")), threshold_of(nn.Dense(4, 1))
    (0.5, 0.0)
    """
    return 0.5 if _ends_with(layer, "sigmoid") else 0.0


def remark_on(layer: Layer, loss: Loss) -> str | None:
    """Return a warning about a last activation that the loss repeats or leaves out, or `None`."""
    if isinstance(loss, HeadLosses):
        heads = _heads_of(layer)
        remarks = [remark_on(heads[n], own) for n, own, _ in loss.parts if n in heads]
        return next(filter(None, remarks), None)
    done, name = fused_activation(loss), _name_of(loss)
    if done is not None and _without(layer, done) is not None:
        return (
            f"the activation at the end of the model is left out for {name}, which does the same "
            "by itself and more exactly; the trained model still has it"
        )
    activation = next((known for known in _GIVES_PROBABILITIES if _ends_with(layer, known)), None)
    if activation is None or any(_inner(loss) is known for known in _TAKES_PROBABILITIES):
        return None
    if done is not None:
        return (
            f"the model ends with {activation}, and {name} applies a {done} of its own to that; "
            f"leave {activation} out of the model"
        )
    return (
        f"the model ends with {activation}, and the loss {name} gets what comes after it; where "
        f"{name} applies the same by itself, as nn.cross_entropy does, it is applied twice: give "
        f"nn.cross_entropy itself, or leave {activation} out of the model"
    )


def _inner(loss: Loss) -> object:
    """Return the function inside a `functools.partial`, or a loss of a layer."""
    inner: object = loss.loss if isinstance(loss, LayerLoss) else loss
    while isinstance(inner, partial) and not inner.args:
        inner = inner.func
    return inner


def fused_activation(loss: Loss, layer: Layer | None = None) -> Any:
    """Return the activation that a loss applies itself, and `fuse_loss` leaves out.

    For losses of heads, it is a dict of those that the heads of the layer end with.

    >>> fused_activation(cross_entropy)
    'softmax'
    """
    if isinstance(loss, HeadLosses):
        heads = {} if layer is None else _heads_of(layer)
        pairs = [(n, fused_activation(own)) for n, own, _ in loss.parts if n in heads]
        return {n: name for n, name in pairs if name and _without(heads[n], name)}
    inner = _inner(loss)
    return next((name for known, name in _APPLIES if known is inner), None)


def _heads_of(layer: Layer) -> dict[str, Layer]:
    """Return the heads that a layer ends with, by name."""
    if isinstance(layer, Heads):
        return dict(layer.heads)
    return _heads_of(layer.parts[-1][1]) if layer.parts else {}


def _name_of(loss: Loss) -> str:
    inner = _inner(loss)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _without(layer: Layer, name: Any) -> Layer | None:
    """Return the layer without the activation at its end; `None` if it does not end with it."""
    if isinstance(layer, Heads) and isinstance(name, dict):
        return Heads([(n, (n in name and _without(own, name[n])) or own) for n, own in layer.heads])
    if isinstance(layer, Activation):
        return _IDENTITY if layer.name == name else None
    if isinstance(layer, Dense | Conv1d | Conv2d | ConvTranspose2d):
        return replace(layer, activation=None) if layer.activation == name else None
    if isinstance(layer, Recomputed):
        inside = _without(layer.layer, name)
        return None if inside is None else Recomputed(inside)
    if isinstance(layer, Chain):
        for at in reversed(range(len(layer.layers))):
            last = _without(layer.layers[at], name)
            if last is not None:
                return Chain(*layer.layers[:at], last, *layer.layers[at + 1 :])
            if not _passes(layer.layers[at], name):
                break
    return None


def _passes(layer: Layer, name: str) -> bool:
    """Whether this layer and an activation commute; flattening and a softmax of rows do not."""
    if isinstance(layer, Recomputed):
        return _passes(layer.layer, name)
    if isinstance(layer, Chain):
        return all(_passes(part, name) for part in layer.layers)
    if isinstance(layer, Flatten | Transpose):
        return name != "softmax"
    return isinstance(layer, Dropout) or layer == _IDENTITY


def _ends_with(layer: Layer, name: str) -> bool:
    """Whether the activation is the last one, possibly before a flattening."""
    if isinstance(layer, Recomputed):
        return _ends_with(layer.layer, name)
    if isinstance(layer, Chain):
        for part in reversed(layer.layers):
            if _ends_with(part, name):
                return True
            if not _passes(part, "sigmoid"):
                return False
        return False
    return _without(layer, name) is not None
