"""One token of each row through a decoder layer: five launches that overlap.

The first product has the norm inside, attention has rope and the cache, the output and the last
product add to the residual stream, the third has norm and SwiGLU. For several rows a norm may be a
launch of its own, as the tiles say.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from anydevice._core.engine import LayerConfig
from anydevice._engines.torch.triton.decode_attention import (
    LARGEST_SIZE,
    MOST_GROUP,
    AttentionConfig,
    AttentionTile,
    attend,
)
from anydevice._engines.torch.triton.decode_products import MOST_ROWS, ProductTiles, product


def decoder_layer(
    x: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_norm: Tensor,
    qkv: Tensor,
    output: Tensor,
    mlp_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    qkv_bias: Tensor | None,
    output_bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    config: LayerConfig,
    frequencies: Tensor | None,
    rope_factor: float = 1.0,
    tiles: ProductTiles | None = None,
    attention_tile: AttentionTile | None = None,
) -> Tensor:
    """Apply the layer to `x` (rows, 1, hidden); its cache is changed in place.

    `positions` (rows,) says where the tokens stand; `keys` and `values` are (rows, kv heads, slots,
    size). `frequencies` and `rope_factor` are those of `_core/rope_scaling.py`.
    """
    eps, factor = config.eps, config.factor
    rows, _, hidden = x.shape
    stream = x.view(rows, hidden)
    y = product(
        "qkv", stream, qkv, norm=attention_norm, eps=eps, bias=qkv_bias,
        tiles=tiles, in_order=True,
    )  # fmt: skip
    y = attend(
        y, positions, keys, values, _attention_config(config, rope_factor),
        frequencies, query_norm, key_norm, attention_tile,
    )  # fmt: skip
    stream = product(
        "output", y, output, bias=output_bias, residual=stream, factor=factor, tiles=tiles
    )
    y = product("gate_up", stream, gate_up, norm=mlp_norm, eps=eps, gated=True, tiles=tiles)
    stream = product("down", y, down, residual=stream, factor=factor, tiles=tiles)
    return stream.view(rows, 1, hidden)


@lru_cache(maxsize=256)
def _attention_config(config: LayerConfig, rope_factor: float) -> AttentionConfig:
    return AttentionConfig(
        heads=config.heads,
        key_heads=config.kv_heads,
        size=config.size,
        scale=config.scale,
        rotated=config.rotated,
        interleaved=config.interleaved,
        factor=rope_factor,
        ring=config.ring,
        eps=config.eps,
    )


def fits(
    x: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: list[Tensor],
    config: LayerConfig,
) -> bool:
    """Whether the kernels serve these: contiguous, of one dtype, of sizes that they have."""
    group = config.heads // config.kv_heads
    return bool(
        x.ndim == 3
        and x.shape[1] == 1
        and 1 <= x.shape[0] <= MOST_ROWS
        and group <= MOST_GROUP
        and config.size <= LARGEST_SIZE
        and keys.shape[2]
        and keys.shape == values.shape
        and positions.shape == (x.shape[0],)
        and positions.is_contiguous()
        and all(one.dtype == x.dtype and one.is_contiguous() for one in (x, keys, values, *weights))
    )
