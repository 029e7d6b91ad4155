"""The numbers of a decoder layer that an engine may compute in one go, one token of each row."""

from __future__ import annotations

from typing import Any

from anydevice.core.record import Record


class LayerNumbers(Record):
    """What a layer is but for its weights and its cache; it can be hashed.

    Root-mean-square norms with `eps` stand before attention and network, which is a SwiGLU.
    `heads` of queries share `kv_heads` of keys and values, each of `size` elements; scores are
    multiplied by `scale`, and what is added to the residual stream by `factor`. Of each head the
    first `rotated` elements turn, by `theta` and `scaling`, the pairs of the mapping that
    `ops.rope` takes; 0 where positions do not enter. With `ring`, the token at position p is in
    slot p % slots of the cache, and sees as many tokens as there are slots; else it is in slot p.
    """

    heads: int
    kv_heads: int
    size: int
    eps: float
    scale: float
    rotated: int = 0
    theta: float = 10000.0
    interleaved: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()
    ring: bool = False
    factor: float = 1.0
