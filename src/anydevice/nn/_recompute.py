"""Gradient checkpointing: activations are recomputed in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from anydevice.core.engine import Absent
from anydevice.core.primitives import Autodiff
from anydevice.core.record import replace
from anydevice.engines.lookup import owner_of
from anydevice.errors import ConfigurationError
from anydevice.nn.layer import Array, Layer, Parameters, Run, Shape
from anydevice.nn.layers import Chain, TiedEmbedding
from anydevice.nn.model import Model

if TYPE_CHECKING:
    from anydevice.transfer.random.generator import Random

_autodiffs: dict[str, Autodiff | None] = {}
_engines: dict[type, str] = {}


class Recomputed(Layer):
    """A layer whose activations are recomputed in the backward pass.

    It has the parameters, shapes and results of the layer inside. On an engine without gradients
    it is that layer.
    """

    layer: Layer

    @property
    def label(self) -> str:
        return f"{self.layer.label}, recomputed"

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [("", self.layer)]

    @property
    def input_shape(self) -> Shape | None:
        return self.layer.input_shape

    def settings_fit(self) -> None:
        if not isinstance(self.layer, Layer):
            raise ConfigurationError(
                f"nn.recompute takes a model or a layer, not {self.layer!r}", source="recompute"
            )

    def output(self, shape: Shape) -> Shape:
        return self.layer.output(shape)

    def initial(self, generator: Random) -> Parameters:
        return self.layer.initial(generator)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        # A watch reads the outputs of parts, which have no numbers yet inside a checkpoint.
        kept = not run.training or run.watch is not None
        autodiff = None if kept else _autodiffs[_engine_of(x)]
        if autodiff is None:
            return self.layer.apply(parameters, x, run)

        def applied(parameters: Parameters, x: Array) -> Array:
            return self.layer.apply(parameters, x, run)

        return autodiff.checkpoint(applied)(parameters, x)


@overload
def recompute(model: Model) -> Model: ...
@overload
def recompute(model: Layer) -> Layer: ...
def recompute(model: Model | Layer) -> Model | Layer:
    """The model or layer with every block recomputed in the backward pass (gradient checkpointing).

    A block is a layer of a `Chain` that has layers inside, such as a `TransformerBlock` or a chain
    of plain layers. If there is none, every layer of the chain is a block. Training then keeps only
    the activations between blocks; gradients stay the same.

    >>> from anydevice import nn
    >>> block = nn.TransformerBlock(8, 2)
    >>> recompute(nn.Chain(nn.Dense(4, 8), block)).layers[1] == Recomputed(block)
    True
    """
    if isinstance(model, Model):
        return model.with_layer(_marked(model.layer))
    return _marked(model)


def _marked(layer: Layer) -> Layer:
    if isinstance(layer, TiedEmbedding):
        return replace(layer, inside=_marked(layer.inside))
    if not isinstance(layer, Chain):
        return layer if isinstance(layer, Recomputed) else Recomputed(layer)
    if not _has_blocks(layer):
        return Chain(*map(_marked, layer.layers))
    return Chain(*[_marked_block(part) if part.parts else part for part in layer.layers])


def _marked_block(layer: Layer) -> Layer:
    if isinstance(layer, Chain) and not _has_blocks(layer):
        return Recomputed(layer)
    return _marked(layer)


def _has_blocks(chain: Chain) -> bool:
    return any(part.parts for part in chain.layers)


def _engine_of(x: Array) -> str:
    """The name of the engine of x, whose gradients are then in the table."""
    kind = type(x)
    if kind not in _engines:
        engine = owner_of(x)
        if engine is None:
            return ""
        autodiff = engine.autodiff
        _autodiffs[engine.name] = None if isinstance(autodiff, Absent) else autodiff
        _engines[kind] = engine.name
    return _engines[kind]


_autodiffs[""] = None  # anything but an array is refused by the layer
# PyTorch's compiler calls this while it traces the caller, and keeps the result.
_engine_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
