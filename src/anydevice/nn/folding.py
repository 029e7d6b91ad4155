"""Losses over classes take what comes before the last softmax: so it is left out for them.

A softmax followed by a logarithm loses the digits of what is unlikely, and all of them at the
ends; done together they lose none.
"""

from __future__ import annotations

from anydevice.core.record import replace
from anydevice.nn.activations import Activation
from anydevice.nn.chain import Chain
from anydevice.nn.layer import Layer
from anydevice.nn.layers import Dense
from anydevice.nn.losses import Loss, binary_cross_entropy, cross_entropy
from anydevice.nn.recomputing import Recomputed

_IDENTITY = Activation("identity")
_FOLDED: dict[Loss, str] = {cross_entropy: "softmax", binary_cross_entropy: "sigmoid"}
"""What a loss does itself, and the model must not do before it."""


def folded(layer: Layer, loss: Loss) -> tuple[Layer, bool]:
    """The layer as the loss wants it, and whether that is another one.

    For `cross_entropy` a softmax at the end is left out, for `binary_cross_entropy` a sigmoid. The
    layer that comes back takes the same parameters: an activation that does nothing stands in.

    >>> from anydevice import nn
    >>> layer, changed = folded(nn.Chain(nn.Dense(4, 2), "softmax"), nn.cross_entropy)
    >>> layer.layers[1], changed
    (Activation(name='identity'), True)
    >>> folded(nn.Dense(4, 2), nn.cross_entropy)[1]
    False
    """
    name = _FOLDED.get(loss)
    without = None if name is None else _without(layer, name)
    return (layer, False) if without is None else (without, True)


def _without(layer: Layer, name: str) -> Layer | None:
    """The layer without the activation at its end; `None` where it does not end with it."""
    if isinstance(layer, Activation):
        return _IDENTITY if layer.name == name else None
    if isinstance(layer, Dense):
        return replace(layer, activation=None) if layer.activation == name else None
    if isinstance(layer, Recomputed):
        inside = _without(layer.layer, name)
        return None if inside is None else Recomputed(inside)
    if isinstance(layer, Chain):
        last = _without(layer.layers[-1], name)
        return None if last is None else Chain(*layer.layers[:-1], last)
    return None
