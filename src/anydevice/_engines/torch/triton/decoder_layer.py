"""One token of each row through a decoder layer: five launches that overlap.

The first product has the norm inside, attention has rope and the cache, the output and the last
product add to the residual stream, the third has norm and SwiGLU. For several rows a norm may be a
launch of its own, as the tiles say.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from anydevice._core.engine import LayerConfig
from anydevice._engines.torch.triton import quantized
from anydevice._engines.torch.triton.decode_attention import (
    MOST_GROUP,
    AttentionTile,
    Rotation,
    attend,
)
from anydevice._engines.torch.triton.decode_products import MOST_ROWS, ProductTiles, product


class LayerWeights(NamedTuple):
    """The weights of a decoder layer, in the order of the op's arguments.

    Matrices may be quantized, and then be tuples of parts with different schemes.
    """

    attention_norm: Tensor
    qkv: Any
    output: Any
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


def decoder_layer(
    x: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: LayerWeights,
    config: LayerConfig,
    rotation: Rotation,
    tiles: ProductTiles | None = None,
    attention_tile: AttentionTile | None = None,
) -> Tensor:
    """Apply the layer to `x` (rows, 1, hidden), and write keys and values into the cache.

    `positions` is (rows,), `keys` and `values` are (rows, kv heads, slots, size).
    """
    eps, factor = config.eps, config.factor
    rows, _, hidden = x.shape
    stream = x.view(rows, hidden)
    multiply = partial(any_product, exact=config.exact, tiles=tiles)
    y = multiply(
        "qkv", stream, weights.qkv, norm=weights.attention_norm, eps=eps, bias=weights.qkv_bias,
        in_order=True,
    )  # fmt: skip
    norms = weights.query_norm, weights.key_norm
    y = attend(y, positions, keys, values, config, rotation, norms, attention_tile)
    stream = multiply(
        "output", y, weights.output, bias=weights.output_bias, residual=stream, factor=factor
    )
    y = multiply("gate_up", stream, weights.gate_up, norm=weights.mlp_norm, eps=eps, gated=True)
    stream = multiply("down", y, weights.down, residual=stream, factor=factor)
    return stream.view(rows, 1, hidden)


def any_product(kind: str, x: Tensor, weight: Any, *, exact: bool, **options: Any) -> Tensor:
    """Multiply with a weight that may be quantized; `exact` if `x` must not be rounded to int8."""
    if isinstance(weight, Tensor):
        return product(kind, x, weight, **options)
    return quantized.product(kind, x, weight, exact=exact, **options)


def fits(x: Tensor, keys: Tensor, config: LayerConfig) -> bool:
    """Whether the kernels have these sizes, for inputs that any layer takes."""
    group = config.heads // config.kv_heads
    in_range = x.shape[1] == 1 <= x.shape[0] <= MOST_ROWS and group <= MOST_GROUP
    return bool(in_range and keys.shape[2])
