"""A Llama-style decoder written in ops: one model that runs the same on every engine.

Parameters are a plain tree of dicts and lists of arrays, placed like any other data. With a cache,
positions and lengths are arrays on the device, so one compiled function serves every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError
from anydevice.ops.dispatch import primitives

Array = Any
Parameters = dict[str, Any]
Cache = list[dict[str, Array]]


class DecoderShape(Record):
    """The sizes of a decoder, and the numbers that are no weights.

    `scaling` holds the pairs of the mapping that `ops.rope` takes. A `tied` decoder has no head of
    its own: the embedding serves as one.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    size: int
    intermediate: int
    eps: float = 1e-5
    theta: float = 10000.0
    scaling: tuple[tuple[str, Any], ...] = ()
    tied: bool = False

    @property
    def split(self) -> tuple[int, int, int]:
        """Where queries, keys and values end in a row of their common projection."""
        queries, keys = self.heads * self.size, self.kv_heads * self.size
        return queries, queries + keys, queries + 2 * keys


def random_parameters(shape: DecoderShape, seed: int = 0) -> Parameters:
    """Weights for a decoder as NumPy `float32`, the same for the same seed.

    >>> shape = DecoderShape(10, 8, layers=1, heads=2, kv_heads=1, size=4, intermediate=12)
    >>> random_parameters(shape)["layers"][0]["qkv"].shape
    (16, 8)
    """
    drawn = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> Array:
        return (drawn.standard_normal((outputs, inputs)) * inputs**-0.5).astype(np.float32)

    def scale() -> Array:
        return (1 + 0.1 * drawn.standard_normal(shape.hidden)).astype(np.float32)

    def layer() -> Parameters:
        return {
            "attention_norm": scale(),
            "qkv": matrix(shape.split[2], shape.hidden),
            "output": matrix(shape.hidden, shape.heads * shape.size),
            "mlp_norm": scale(),
            "gate_up": matrix(2 * shape.intermediate, shape.hidden),
            "down": matrix(shape.hidden, shape.intermediate),
        }

    parameters = {
        "embedding": drawn.standard_normal((shape.vocabulary, shape.hidden)).astype(np.float32),
        "layers": [layer() for _ in range(shape.layers)],
        "norm": scale(),
    }
    if not shape.tied:
        parameters["head"] = matrix(shape.vocabulary, shape.hidden)
    return parameters


def from_llama_state(shape: DecoderShape, state: Mapping[str, Array]) -> Parameters:
    """The parameters in a state of NumPy arrays that is named as `LlamaForCausalLM` names it.

    Raises `ConfigurationError` with the name of the first weight that is not there.
    """

    def named(name: str) -> Array:
        if name not in state:
            raise ConfigurationError(
                f"the state has no {name}; for a decoder whose head is its embedding, "
                "set tied=True in its shape",
                source=name,
            )
        return state[name]

    def joined(layer: str, *names: str) -> Array:
        return np.concatenate([named(f"{layer}.{name}_proj.weight") for name in names])

    def one(index: int) -> Parameters:
        layer = f"model.layers.{index}"
        return {
            "attention_norm": named(f"{layer}.input_layernorm.weight"),
            "qkv": joined(f"{layer}.self_attn", "q", "k", "v"),
            "output": named(f"{layer}.self_attn.o_proj.weight"),
            "mlp_norm": named(f"{layer}.post_attention_layernorm.weight"),
            "gate_up": joined(f"{layer}.mlp", "gate", "up"),
            "down": named(f"{layer}.mlp.down_proj.weight"),
        }

    parameters = {
        "embedding": named("model.embed_tokens.weight"),
        "layers": [one(index) for index in range(shape.layers)],
        "norm": named("model.norm.weight"),
    }
    if not shape.tied:
        parameters["head"] = named("lm_head.weight")
    return parameters


def empty_cache(shape: DecoderShape, batch: int, length: int, like: Array) -> Cache:
    """Room for the keys and values of `length` tokens, of the type and on the device of `like`."""
    xp = primitives(like)

    def room() -> Array:
        return xp.full((batch, shape.kv_heads, length, shape.size), 0, xp.dtype(like), like)

    return [{"keys": room(), "values": room()} for _ in range(shape.layers)]


def forward(
    parameters: Parameters,
    shape: DecoderShape,
    ids: Array,
    positions: Array | None = None,
    cache: Cache | None = None,
    lengths: Array | None = None,
) -> tuple[Array, Cache | None]:
    """The logits (batch, tokens, vocabulary) for ids (batch, tokens), and the cache after them.

    Without a cache, tokens stand at positions from 0 on. With one, `positions`, (tokens,) or
    (batch, tokens), says where these tokens stand, one behind the other, and `lengths` (batch,)
    how many keys are valid with them, up to the last position where it is not given. A cache that
    was given must not be used afterwards.

    Raises `ConfigurationError` if there is a cache and no positions.
    """
    if positions is None:
        if cache is not None:
            raise ConfigurationError(
                "with a cache, forward needs the position of each token; pass positions="
            )
        positions = primitives(ids).arange(ids.shape[1], DTYPES["int32"], ids)
    if cache is not None and lengths is None:
        last = ops.add(ops.max(positions, axis=-1), 1)
        lengths = ops.broadcast_to(last, (ids.shape[0],))
    x = ops.embedding(parameters["embedding"], ids)
    after: Cache = []
    for index, layer in enumerate(parameters["layers"]):
        kept = None if cache is None else cache[index]
        attended, kept = _attended(layer, shape, x, positions, kept, lengths)
        x = ops.add(x, attended)
        x = ops.add(x, _transformed(layer, shape, x))
        if kept is not None:
            after.append(kept)
    x = ops.rmsnorm(x, parameters["norm"], shape.eps)
    logits = ops.linear(x, parameters["embedding" if shape.tied else "head"])
    return logits, None if cache is None else after


def loss(parameters: Parameters, shape: DecoderShape, ids: Array, targets: Array) -> Array:
    """The mean cross entropy of the logits for ids with the targets, both (batch, tokens)."""
    return ops.cross_entropy(forward(parameters, shape, ids)[0], targets)


def _attended(
    layer: Parameters,
    shape: DecoderShape,
    x: Array,
    positions: Array,
    kept: dict[str, Array] | None,
    lengths: Array | None,
) -> tuple[Array, dict[str, Array] | None]:
    """What attention adds to x, and the layer's cache after it."""
    batch, tokens, _ = x.shape
    y = ops.linear(ops.rmsnorm(x, layer["attention_norm"], shape.eps), layer["qkv"])
    queries, keys, values = shape.split
    q = _by_head(ops.part(y, 2, 0, queries), shape.heads)
    k = _by_head(ops.part(y, 2, queries, keys), shape.kv_heads)
    v = _by_head(ops.part(y, 2, keys, values), shape.kv_heads)
    scaling = dict(shape.scaling) or None
    q = ops.rope(q, positions, theta=shape.theta, scaling=scaling)
    k = ops.rope(k, positions, theta=shape.theta, scaling=scaling)
    if kept is not None:
        k = ops.cache_write(kept["keys"], k, positions)
        v = ops.cache_write(kept["values"], v, positions)
        kept = {"keys": k, "values": v}
    y = ops.attention(q, k, v, causal=True, lengths=None if kept is None else lengths)
    y = ops.reshape(ops.permute(y, (0, 2, 1, 3)), (batch, tokens, queries))
    return ops.linear(y, layer["output"]), kept


def _transformed(layer: Parameters, shape: DecoderShape, x: Array) -> Array:
    """What the two-layer network adds to x."""
    y = ops.linear(ops.rmsnorm(x, layer["mlp_norm"], shape.eps), layer["gate_up"])
    gate = ops.part(y, 2, 0, shape.intermediate)
    up = ops.part(y, 2, shape.intermediate, 2 * shape.intermediate)
    return ops.linear(ops.swiglu(gate, up), layer["down"])


def _by_head(x: Array, heads: int) -> Array:
    """(batch, tokens, heads × size) as (batch, heads, tokens, size)."""
    batch, tokens, width = x.shape
    return ops.permute(ops.reshape(x, (batch, tokens, heads, width // heads)), (0, 2, 1, 3))
