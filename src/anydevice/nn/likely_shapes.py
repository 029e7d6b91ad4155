"""A shape of an example to show to somebody who has named none."""

from __future__ import annotations

from collections.abc import Iterator

from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Layer, Shape


def likely_shape(layer: Layer) -> Shape:
    """A shape that the layer takes, or at least its first part, of those that are often met.

    >>> from anydevice import nn
    >>> likely_shape(nn.Conv2d(1, 8, 3)), likely_shape(nn.LayerNorm(64))
    ((1, 28, 28), (128, 64))
    """
    for shape in _often(layer):
        try:
            layer.output(shape)
        except ConfigurationError:
            continue
        return shape
    return likely_shape(layer.parts[0][1]) if layer.parts else (28, 28)


def _often(layer: Layer) -> Iterator[Shape]:
    if layer.takes_ids_below is not None:
        yield from ((128,), (16,), (1,))
        return
    yield from ((28, 28), (3, 28, 28))
    for features in _features(layer):
        yield (features, 28, 28)
        yield (features, 224, 224)
        yield from ((128, features), (16, features), (1, features))
        yield (features,)


def _features(layer: Layer) -> Iterator[int]:
    """The numbers of features and channels that the parts of a layer name, from the first on."""
    for name in ("inputs", "size"):
        value = getattr(layer, name, None)
        if isinstance(value, int):
            yield value
    for _, part in layer.parts:
        yield from _features(part)
