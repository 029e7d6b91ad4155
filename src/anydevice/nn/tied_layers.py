"""A language model whose first and last layer are one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anydevice import ops
from anydevice.errors import ConfigurationError
from anydevice.nn.initializers import Initializer, Normal, initializer_of
from anydevice.nn.layer import Array, Layer, Parameters, Run, Shape

if TYPE_CHECKING:
    from anydevice.transfer.randomness import Random


class TiedEmbedding(Layer):
    """Whole numbers in as rows of a matrix, through `inside`, and out as products with the rows.

    What comes out of `inside` has `size` features, and a number for each of the rows comes out of
    this layer: the logits of a language model that has no head of its own. Its parameters are
    `weight` (rows, size) and `inside`.

    >>> from anydevice import nn
    >>> blocks = nn.Chain(nn.TransformerBlock(64, 4, causal=True, rope=True), nn.RMSNorm(64))
    >>> nn.Model(TiedEmbedding(1000, 64, blocks), (20,), device="cpu").output_shape
    (20, 1000)
    """

    rows: int
    size: int
    inside: Layer
    initializer: Initializer | str = Normal(0.02)

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
        self.whole_numbers(rows=self.rows, size=self.size)
        if not isinstance(self.inside, Layer):
            raise ConfigurationError(
                f"TiedEmbedding: inside must be a layer, not {self.inside!r}; "
                "put several into a Chain",
                source="TiedEmbedding.inside",
            )
        initializer_of(self.initializer)

    def output(self, shape: Shape) -> Shape:
        inner = self.output_of(".inside", self.inside, (*shape, self.size))
        if not inner or inner[-1] != self.size:
            raise self.misfit(f"got the shape {inner} from {self.inside.label}")
        return (*inner[:-1], self.rows)

    def initial(self, generator: Random) -> Parameters:
        own, inner = generator.split(2)
        make = initializer_of(self.initializer)
        return {
            "weight": make(own, (self.rows, self.size), self.size, self.rows),
            "inside": self.inside.initial(inner),
        }

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        y = ops.embedding(parameters["weight"], x)
        y = run.through(".inside", self.inside, parameters["inside"], y)
        return ops.linear(y, parameters["weight"])
