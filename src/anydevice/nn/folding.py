"""Losses over classes take what comes before the last softmax: so it is left out for them.

A softmax followed by a logarithm loses the digits of what is unlikely, and all of them at the
ends; done together they lose none. A softmax of a softmax is worse: it trains, slowly, to a model
that is sure of nothing.
"""

from __future__ import annotations

from functools import partial

from anydevice import ops
from anydevice.core.record import replace
from anydevice.nn.activations import Activation
from anydevice.nn.chain import Chain
from anydevice.nn.convolution_layers import Conv2d
from anydevice.nn.dropping import Dropout
from anydevice.nn.layer import Layer
from anydevice.nn.layers import Dense, Flatten
from anydevice.nn.losses import Loss, binary_cross_entropy, cross_entropy, mean_squared_error
from anydevice.nn.recomputing import Recomputed

_IDENTITY = Activation("identity")
_DONE_BY: tuple[tuple[Loss, str], ...] = (
    (cross_entropy, "softmax"),
    (ops.cross_entropy, "softmax"),
    (binary_cross_entropy, "sigmoid"),
)
"""What a loss does itself, and the model must not do before it. Losses need not have a hash."""

_TAKES_SHARES: tuple[Loss, ...] = (mean_squared_error, ops.mean_squared_error)
"""Losses that do nothing of the kind themselves."""

_MAKE_SHARES = ("softmax", "sigmoid")


def folded(layer: Layer, loss: Loss) -> tuple[Layer, bool]:
    """The layer as the loss wants it, and whether that is another one.

    For `cross_entropy` a softmax at the end is left out, for `binary_cross_entropy` a sigmoid,
    also where dropout or nothing of weight comes after it. The layer that comes back takes the same
    parameters: an activation that does nothing stands in.

    >>> from anydevice import nn
    >>> layer, changed = folded(nn.Chain(nn.Dense(4, 2), "softmax"), nn.cross_entropy)
    >>> layer.layers[1], changed
    (Activation(name='identity'), True)
    >>> folded(nn.Dense(4, 2), nn.cross_entropy)[1]
    False
    """
    name = _done_by(loss)
    without = None if name is None else _without(layer, name)
    return (layer, False) if without is None else (without, True)


def remark_on(layer: Layer, loss: Loss) -> str | None:
    """What a user should know of a model's end and a loss; `None` where there is nothing to say.

    That is what `folded` left out, and where an activation may be applied twice: by the model, and
    by a loss that cannot be looked into.

    >>> from anydevice import nn
    >>> print(remark_on(nn.Chain(nn.Dense(4, 2), "sigmoid"), nn.cross_entropy))
    the model ends with sigmoid, and cross_entropy applies a softmax of its own to that; leave \
sigmoid out of the model
    """
    done, name = _done_by(loss), _name_of(loss)
    if done is not None and _without(layer, done) is not None:
        return (
            f"the activation at the end of the model is left out for {name}, which does the same "
            "by itself and more exactly; the trained model still has it"
        )
    found = next((each for each in _MAKE_SHARES if _ends_with(layer, each)), None)
    if found is None or any(_inner(loss) is each for each in _TAKES_SHARES):
        return None
    if done is not None:
        return (
            f"the model ends with {found}, and {name} applies a {done} of its own to that; leave "
            f"{found} out of the model"
        )
    return (
        f"the model ends with {found}, and the loss {name} gets what comes after it; where {name} "
        "applies the same by itself, as nn.cross_entropy does, it is applied twice: give "
        f"nn.cross_entropy itself, or leave {found} out of the model"
    )


def _inner(loss: Loss) -> object:
    """The function that a loss with some arguments filled in calls."""
    inner: object = loss
    while isinstance(inner, partial) and not inner.args:
        inner = inner.func
    return inner


def _done_by(loss: Loss) -> str | None:
    inner = _inner(loss)
    return next((name for known, name in _DONE_BY if known is inner), None)


def _name_of(loss: Loss) -> str:
    inner = _inner(loss)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _without(layer: Layer, name: str) -> Layer | None:
    """The layer without the activation at its end; `None` where it does not end with it."""
    if isinstance(layer, Activation):
        return _IDENTITY if layer.name == name else None
    if isinstance(layer, Dense | Conv2d):
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
    """Whether an activation before this layer does the same after it.

    A softmax of rows is none of the flat array that they make.
    """
    if isinstance(layer, Recomputed):
        return _passes(layer.layer, name)
    if isinstance(layer, Chain):
        return all(_passes(part, name) for part in layer.layers)
    if isinstance(layer, Flatten):
        return name != "softmax"
    return isinstance(layer, Dropout) or layer == _IDENTITY


def _ends_with(layer: Layer, name: str) -> bool:
    """Whether the activation has the last word, be it over the rows of a flat array."""
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
