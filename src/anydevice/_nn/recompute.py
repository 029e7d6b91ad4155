"""Gradient checkpointing: activations are recomputed in the backward pass instead of kept.

A chain of plain layers is recomputed in segments: the forward pass keeps the input of each, and the
backward pass has the activations of one of them at a time. A segment of one layer saves nothing,
since a layer keeps its input anyway. A layer with state runs as it is, between segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

from anydevice._core.array import Array
from anydevice._core.primitives import Autodiff
from anydevice._core.record import replace
from anydevice._nn.layer import Layer, Parameters, Run, Wrapper, autodiff_of, state_places
from anydevice._nn.layers import Activation, Chain, Dropout, Heads, TiedEmbedding
from anydevice._nn.model import Model
from anydevice.errors import ConfigurationError

Step = tuple[str, Layer, Parameters]
"""A layer of a chain, or of a chain inside it: its path, the layer, and its parameters."""


class Recomputed(Wrapper):
    """A layer whose activations are recomputed in the backward pass, segment by segment."""

    @property
    def label(self) -> str:
        return f"{self.layer.label}, recomputed"

    def settings_fit(self) -> None:
        if not isinstance(self.layer, Layer):
            raise ConfigurationError(
                f"nn.recompute takes a model or a layer, not {self.layer!r}", source="recompute"
            )

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        # A watch reads the outputs of parts, which have no values inside a checkpoint.
        keeps_outputs = not run.training or run.watch is not None
        autodiff = None if keeps_outputs else autodiff_of(x)
        if autodiff is None:
            return self.layer.apply(parameters, x, run)

        for steps in _runs(_steps(self.layer, parameters, "")):
            if _has_state(steps[0]):  # a checkpoint would keep its updates to itself
                for path, layer, own in steps:
                    x = run.through(path, layer, own, x)
                continue
            for segment in _segments(steps):
                layers = [(path, layer) for path, layer, _ in segment]
                applied = autodiff.checkpoint(_chain_function(layers, run, autodiff))
                x = applied([own for _, _, own in segment], x)
        return x


@overload
def recompute(model: Model) -> Model: ...
@overload
def recompute(model: Layer) -> Layer: ...
def recompute(model: Model | Layer) -> Model | Layer:
    """Recompute the activations of a model or layer in the backward pass.

    Training then takes less memory and up to a third more time; gradients stay the same. A block is
    a layer with layers inside, such as a `TransformerBlock`: it keeps only its input. A chain
    without blocks is cut into segments of several layers, and each segment keeps only its input:
    n layers keep about 2√n activations at once. Parts with several inputs or outputs keep theirs.

    >>> block = nn.TransformerBlock(8, 2)
    >>> recompute(nn.Chain(nn.Dense(4, 8), block)).layers[1] == Recomputed(block)
    True
    >>> chain = nn.Chain(nn.Dense(8, 8), "relu", nn.Dense(8, 8), "relu")
    >>> recompute(chain) == Recomputed(chain)
    True
    """
    if isinstance(model, Model):
        return model.with_layer(_mark_blocks(model.layer))
    return _mark_blocks(model)


def _mark_blocks(layer: Layer) -> Layer:
    if isinstance(layer, TiedEmbedding):
        return replace(layer, inside=_mark_blocks(layer.inside))
    if isinstance(layer, Chain) and _has_blocks(layer):
        return Chain(*[_mark_blocks(part) if part.parts else part for part in layer.layers])
    return layer if isinstance(layer, Recomputed | Heads) else Recomputed(layer)


def _has_blocks(layer: Layer) -> bool:
    """Whether a layer has others inside that are more than a chain of plain layers."""
    if not isinstance(layer, Chain):
        return bool(layer.parts)
    return any(_has_blocks(part) for part in layer.layers)


def _steps(layer: Layer, parameters: Parameters, path: str) -> list[Step]:
    """Return the layers of a chain and of the chains inside it; any other layer is one step."""
    if not isinstance(layer, Chain):
        return [(path, layer, parameters)]
    parts = zip(layer.parts, parameters, strict=True)
    return [inner for (step, part), own in parts for inner in _steps(part, own, path + step)]


def _runs(steps: list[Step]) -> list[list[Step]]:
    """Group consecutive steps; a group has only steps with state, or none."""
    runs: list[list[Step]] = []
    for step in steps:  # a plain loop, which every compiler of PyTorch can trace
        if runs and _has_state(runs[-1][0]) == _has_state(step):
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _segments(steps: list[Step]) -> list[list[Step]]:
    """Cut steps into segments with few activations; activations and dropouts stay with a layer."""
    followers = Activation | Dropout
    starts = [at for at, step in enumerate(steps) if not at or not isinstance(step[1], followers)]
    ends = [*starts[1:], len(steps)]
    segments, first = [], 0
    for size in segment_sizes(len(starts)):
        segments.append(steps[starts[first] : ends[first + size - 1]])
        first += size
    return segments


def _has_state(step: Step) -> bool:
    return bool(state_places(step[1]))


def segment_sizes(count: int) -> list[int]:
    """Return the sizes of the segments of `count` layers.

    A layer with its activation keeps about two arrays while its segment is recomputed, and each
    earlier segment keeps its input. So every second segment is shorter by one, and all of them
    reach the same peak: about 2√n arrays for n layers.

    >>> segment_sizes(20), segment_sizes(3), segment_sizes(1)
    ([4, 4, 3, 3, 2, 2, 1, 1], [2, 1], [1])
    """
    largest = 1
    while largest * (largest + 1) < count:
        largest += 1
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(largest - len(sizes) // 2, count - sum(sizes)))
    return sizes


def _chain_function(
    layers: list[tuple[str, Layer]], run: Run, autodiff: Autodiff
) -> Callable[[list[Parameters], Array], Array]:
    """Return layers as a function of their parameters and input."""

    def applied(parameters: list[Parameters], x: Array) -> Array:
        for (path, layer), own in zip(layers, parameters, strict=True):
            own, x = autodiff.together((own, x))
            x = run.through(path, layer, own, x)
        return x

    return applied
