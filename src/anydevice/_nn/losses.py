"""Losses: functions of an output and its target that return a scalar, computed in float32.

Losses over classes take logits, and `fuse_loss` leaves out a last softmax or sigmoid of the model.
A logarithm after a softmax loses the digits of small probabilities; computed together they lose
none. Trained through a softmax of a softmax, a model stays unsure.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.record import Record, replace
from anydevice._nn.convolution import Conv1d, Conv2d, ConvTranspose2d
from anydevice._nn.layer import Layer, Parameters, Run
from anydevice._nn.layers import Activation, Chain, Dense, Dropout, Flatten, Transpose
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


def cross_entropy(output: Array, target: Array) -> Array:
    """Compute the mean of -log(softmax(output)[target]); output (…, classes), integer target.

    >>> cross_entropy(numpy.zeros((3, 2)), numpy.array([0, 1, 1])).round(4).tolist()
    0.6931
    """
    return ops.cross_entropy(output, target)


def mean_squared_error(output: Array, target: Array) -> Array:
    """Compute the mean of (output - target)² over two arrays of one shape.

    A 16-bit output is compared in float32; its target may be float32 or 16-bit. Raises
    `ConfigurationError` if the shapes differ.

    >>> mean_squared_error(numpy.array([1.0, 2.0]), numpy.array([1.0, 4.0])).tolist()
    2.0
    """
    xp = primitives(output, "mean_squared_error", "output")
    alike = primitives(target, "mean_squared_error", "target") is xp
    if alike and (xp.dtype(output).bits < 32 or xp.dtype(target).bits < 32):
        output, target = widened(xp, output), widened(xp, target)
    if tuple(output.shape) != tuple(target.shape):
        raise different_shapes("mean_squared_error", output=output, target=target)
    return ops.mean_squared_error(output, target)


def binary_cross_entropy(output: Array, target: Array) -> Array:
    """Compute the mean of `-t·log(s) - (1-t)·log(1-s)`, s = sigmoid(output), t = target.

    Both have the same shape. The output is logits, without a sigmoid; the target is booleans,
    integers or numbers from 0 to 1. Raises `ConfigurationError` if the shapes differ.

    >>> binary_cross_entropy(numpy.array([0.0, 100.0]), numpy.array([1, 1])).round(4).tolist()
    0.3466
    """
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
    return ops.mean(ops.negative(ops.sum(ops.multiply(both, shares), axis=-1)))


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "binary_cross_entropy": binary_cross_entropy,
}
"""Each loss by its name."""

_IN_FLOAT32: tuple[Loss, ...] = (*LOSSES.values(), ops.cross_entropy)


def computes_in_float32(loss: Loss) -> bool:
    """Whether a loss computes in float32 by itself, and takes a 16-bit output.

    >>> computes_in_float32(cross_entropy), computes_in_float32(lambda output, target: output)
    (True, False)
    """
    # By identity: a loss may have no hash, or an equality of its own.
    return any(loss is own for own in _IN_FLOAT32)


def loss_of(spec: Loss | str) -> Loss:
    """Return the loss function, by name or as it is."""
    if isinstance(spec, type):
        raise ConfigurationError(
            f"loss is the class {spec.__name__}; give an instance, {spec.__name__}()", source="loss"
        )
    if callable(spec):
        return spec
    if not isinstance(spec, str) or spec not in LOSSES:
        raise ConfigurationError(
            f"unknown loss {spec!r}; use one of {', '.join(LOSSES)}, or a function of "
            "(output, target) that returns a scalar",
            source="loss",
        )
    return LOSSES[spec]


_IDENTITY = Activation("identity")
_APPLIES: tuple[tuple[Loss, str], ...] = (
    (cross_entropy, "softmax"),
    (ops.cross_entropy, "softmax"),
    (binary_cross_entropy, "sigmoid"),
)
"""Losses that apply an activation themselves; the model must not apply it before."""

_TAKES_PROBABILITIES: tuple[Loss, ...] = (mean_squared_error, ops.mean_squared_error)
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
    name = fused_activation(loss)
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


def fused_activation(loss: Loss) -> str | None:
    """Return the activation that a loss applies itself, and `fuse_loss` leaves out.

    >>> fused_activation(cross_entropy)
    'softmax'
    """
    inner = _inner(loss)
    return next((name for known, name in _APPLIES if known is inner), None)


def _name_of(loss: Loss) -> str:
    inner = _inner(loss)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _without(layer: Layer, name: str) -> Layer | None:
    """Return the layer without the activation at its end; `None` if it does not end with it."""
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
