"""The decoder of every family, in ops, configured by a `Description`.

Parameters are plain trees of dicts and lists of arrays:

    embedding (vocabulary, hidden), norm, head unless tied, and layers, a list of
        attention_norm, mlp_norm, attention_post_norm, mlp_post_norm    as the block has them
        qkv (heads × size + 2 × kv heads × size, hidden), output; query_norm, key_norm, sinks
        gate_up (2 × intermediate, hidden) or up, and down
        router, experts {gate_up (count, 2 × intermediate, hidden), down (count, hidden,
            intermediate), gate_up_bias, down_bias}, shared_gate_up, shared_down, shared_gate
        with latent attention, instead of qkv: query, or query_a, query_a_norm and query_b; and
            kv_a (rank + rotated, hidden), kv_a_norm, kv_b (heads × (plain + value), rank)

A norm and a product are {"weight": …, "bias": … if there is one}; the bias that only selects
experts is the router's "choice_bias"; embedding and sinks are arrays. A joined product has queries
first, then keys, then values; or the gate first, then up. The embedding, the matrices of products
and the stacks of experts may be `QuantizedWeight`s; a matrix with parts of different schemes is a
tuple of them.

Everything that varies between steps is an array on the device, so one compiled layer serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.dtypes import DTYPES
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import Record
from anydevice._core.rope_scaling import depends_on_length
from anydevice._llm.description import Description, LayerDescription, Rope, Routing
from anydevice._llm.sampling import not_implemented
from anydevice._ops.arguments import widened
from anydevice._ops.dispatch import own_version, primitives
from anydevice.errors import ConfigurationError

Weight = Mapping[str, Array]
Parameters = dict[str, Any]
LayerCache = dict[str, Array]
Cache = list[LayerCache]

_INT32 = DTYPES["int32"]
_NEVER = -1e30  # a score that is never the best
LATENT_EPS = 1e-6
"""The epsilon of the norms in latent attention, whatever the config says."""


class RingIndex(Record):
    """Positions of tokens in a ring cache: `slots` to write, and how to read old and new keys."""

    slots: Array
    lengths: Array
    order: Array | None = None
    row: Array | None = None


class CacheIndex(Record):
    """Positions of the tokens of a step, the same for all layers without a window.

    `lengths` counts the valid keys of each row after the step; `length` is the length of the whole
    text, for ropes that depend on it; `rings` has an index for each window size. With `first`, all
    rows begin with these tokens: they attend only to each other, and the cache is only written.
    """

    positions: Array
    lengths: Array | None = None
    length: Array | None = None
    rings: Mapping[int, RingIndex] | None = None
    first: bool = False


def linear(x: Array, weight: Weight) -> Array:
    """Multiply x by a weight and add its bias; all weights but experts go through here."""
    matrix: Any = weight["weight"]
    bias = weight.get("bias")
    if not isinstance(matrix, tuple):
        own = ops.quantized_linear if isinstance(matrix, QuantizedWeight) else ops.linear
        return own(x, matrix, bias)
    parts, start = [], 0
    for part in matrix:
        stop = start + part.shape[0]
        share = {} if bias is None else {"bias": ops.slice_axis(bias, 0, start, stop)}
        parts.append(linear(x, {"weight": part, **share}))
        start = stop
    return ops.concat(parts, -1)


def new_cache(description: Description, batch: int, context: int, like: Array) -> Cache:
    """Return an empty cache for `context` tokens of `batch` rows, with the dtype of `like`.

    A layer has keys and values, (batch, kv heads, slots, size), or with latent attention the
    vectors that they are made from, (batch, 1, slots, rank + rotated). There is one slot a token;
    a layer with a smaller window has one slot a token of the window, used as a ring.
    """
    xp = primitives(like)
    latent, kv_heads = description.latent, description.kv_heads
    sizes = {"keys": description.head_size, "values": description.value_size}
    if latent:
        sizes, kv_heads = {"latent": latent.rank + latent.rotated}, 1

    def layer_cache(window: int | None) -> LayerCache:
        slots = min(window or context, context)
        shapes = {name: (batch, kv_heads, slots, size) for name, size in sizes.items()}
        return {name: xp.full(shape, 0, xp.dtype(like), like) for name, shape in shapes.items()}

    return [layer_cache(kind.window) for kind in description.layers]


def forward(
    description: Description,
    parameters: Parameters,
    ids: Array,
    start: Array | None = None,
    count: Array | None = None,
    cache: Cache | None = None,
    *,
    last: bool = False,
    length: Array | None = None,
) -> tuple[Array, Cache | None]:
    """Return the hidden states (batch, tokens, hidden) of ids (batch, tokens), and the cache.

    With `last`, return only the hidden state of each row's last valid token, (batch, hidden).

    With a cache, row b has `count[b]` valid tokens, and the first is at position `start[b]`; both
    are (batch,) int32. The rest of the row is padding, with meaningless hidden states. No row may
    be longer than its cache, padding included, unless its count is 0. The cache that was passed in
    must not be used afterwards.

    Without a cache, rows are whole sequences from position 0 on, and gradients can be taken.

    Some ropes depend on the length of the text: pass `length` (batch,) if these tokens are only a
    part of it; by default texts end with their last valid token.

    Raises `ConfigurationError` if there is a cache but no `start` or `count`.
    """
    if cache is not None and (start is None or count is None):
        raise ConfigurationError(
            "with a cache, forward needs the position of each token; pass start and count"
        )
    x = embed(description, parameters, ids)
    index = cache_index(description.layers, ids, start, count, cache, length=length)
    after: Cache = []
    for number, kind in enumerate(description.layers):
        layer = DecoderLayer(description, kind, parameters["layers"][number])
        x, written = layer(x, index, None if cache is None else cache[number])
        if written is not None:
            after.append(written)
    x = final(description, parameters, x, count, last=last)
    return x, None if cache is None else after


def embed(description: Description, parameters: Parameters, ids: Array) -> Array:
    """Return the embedded tokens, the input of the first layer."""
    table = parameters["embedding"]
    if isinstance(table, QuantizedWeight):
        like = parameters["norm"]["weight"]
        x = own_version(like, "quantized_embedding", not_implemented)(like, table, ids)
        if x is NotImplemented:
            x = ops.dequantize(table, primitives(ids).dtype(like), rows=ids)
    else:
        x = own_version(table, "embedding", _take_rows)(table, ids)
        if x is NotImplemented:
            x = _take_rows(table, ids)
    if description.embedding_scale == 1:
        return x
    # Models were trained with a factor that is rounded to their dtype.
    xp = primitives(x)
    return ops.multiply(x, xp.full((1, 1, 1), description.embedding_scale, xp.dtype(x), x))


def _take_rows(table: Array, ids: Array) -> Any:
    return primitives(table).take(table, ids, 0)


def run_layer(
    description: Description,
    kind: LayerDescription,
    weights: Parameters,
    x: Array,
    start: Array | None,
    count: Array | None,
    cache: LayerCache | None,
    length: Array | None = None,
) -> tuple[Array, LayerCache | None]:
    """Run one layer on x (batch, tokens, hidden), a function of arrays; also return its cache."""
    index = cache_index((kind,), x, start, count, None if cache is None else [cache], length=length)
    return DecoderLayer(description, kind, weights)(x, index, cache)


def final(
    description: Description,
    parameters: Parameters,
    x: Array,
    count: Array | None = None,
    *,
    last: bool = False,
) -> Array:
    """Return the normalized hidden states, of all tokens or of the last valid ones."""
    batch, tokens, hidden = x.shape
    if last:
        if count is not None and tokens > 1:
            at = ops.reshape(ops.maximum(ops.subtract(count, 1), 0), (batch, 1, 1))
            x = ops.take_along_axis(x, at, 1)
        else:
            x = ops.slice_axis(x, 1, tokens - 1, tokens)
        x = ops.reshape(x, (batch, hidden))
    return normalize(description, x, parameters["norm"])


def logits(description: Description, parameters: Parameters, hidden: Array) -> Array:
    """Return the logits (…, vocabulary) of the hidden states that `forward` returns."""
    head = {"weight": parameters["embedding"]} if description.tied else parameters["head"]
    return scale_logits(description, linear(hidden, head))


def scale_logits(description: Description, logits: Array) -> Array:
    """Scale the product with the head, and bound it by the final soft cap."""
    logits, cap = _scale(logits, description.logit_scale), description.final_soft_cap
    return logits if cap is None else ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)


def cache_index(
    kinds: tuple[LayerDescription, ...],
    like: Array,
    start: Array | None,
    count: Array | None,
    cache: Cache | None,
    first: bool = False,
    length: Array | None = None,
) -> CacheIndex:
    """Return the positions of tokens in the layers' caches; `like` has the shape of the tokens."""
    batch, tokens = like.shape[:2]
    row = primitives(like).arange(tokens, _INT32, like)
    by_length = any(kind.rope and depends_on_length(dict(kind.rope.scaling)) for kind in kinds)
    if cache is None:
        return CacheIndex(row, length=length if by_length else None)
    assert start is not None, "tokens have a place in the cache"
    assert count is not None, "rows have a number of tokens"
    column = ops.reshape(start, (batch, 1))
    positions = column if tokens == 1 else ops.add(column, row)
    if by_length and length is None:
        length = ops.add(start, count)
    rings: dict[int, RingIndex] = {}
    for kind, layer_cache in zip(kinds, cache, strict=True):
        ring = _ring_size(kind, layer_cache)
        if ring and ring not in rings:
            rings[ring] = _ring_index(ring, positions, row, start, count)
    lengths = ops.add(start, tokens)
    return CacheIndex(positions, lengths, length if by_length else None, rings, first)


def _ring_size(kind: LayerDescription, cache: LayerCache) -> int:
    """Return the number of slots of a ring; 0 for a cache with a slot for every token."""
    slots: int = next(iter(cache.values())).shape[2]
    return slots if kind.window == slots else 0


def _ring_index(ring: int, positions: Array, row: Array, start: Array, count: Array) -> RingIndex:
    batch, tokens = positions.shape
    slots = _remainder(positions, ring)
    valid = ops.less(row, ops.reshape(count, (batch, 1)))
    if tokens == 1:
        lengths = ops.minimum(ops.add(start, 1), ring)
        return RingIndex(ops.where(valid, slots, ring), lengths)
    # If there are more tokens than slots, only the last ones are written: no slot twice.
    fits = ops.less_equal(ops.reshape(ops.subtract(count, ring), (batch, 1)), row)
    slots = ops.where(ops.logical_and(valid, fits), slots, ring)
    first = ops.maximum(ops.subtract(start, ring), 0)
    before = ops.subtract(start, first)
    column = ops.reshape(first, (batch, 1))
    order = ops.add(column, primitives(row).arange(ring, _INT32, row))
    return RingIndex(
        slots,
        lengths=ops.add(before, tokens),
        order=ops.reshape(_remainder(order, ring), (batch, 1, ring, 1)),
        row=ops.add(ops.reshape(before, (batch, 1)), row),
    )


def _remainder(x: Array, divisor: int) -> Array:
    """Return x % divisor for integers up to a few million, which float32 divides exactly."""
    wide = ops.divide(ops.add(ops.astype(x, "float32"), 0.5), float(divisor))
    whole = ops.astype(ops.floor(wide), "int32")
    return ops.subtract(x, ops.multiply(whole, divisor))


class DecoderLayer(Record):
    """One layer: its description and its weights."""

    description: Description
    kind: LayerDescription
    weights: Parameters

    def __call__(
        self, x: Array, index: CacheIndex, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        """Run the layer on x (batch, tokens, hidden); return the result and the layer's cache."""
        block, factor = self.description.block, self.description.residual_scale
        y = x if block == "post" else self._normalize(x, "attention_norm")
        attend = self._attend_latent if self.description.latent else self._attend
        added, cache = attend(y, index, cache)
        if block == "parallel":
            added = ops.add(added, self.transform(y))
            return ops.add(x, _scale(added, factor)), cache
        if block in ("post", "sandwich"):
            added = self._normalize(added, "attention_post_norm")
        x = ops.add(x, _scale(added, factor))
        y = x if block == "post" else self._normalize(x, "mlp_norm")
        added = self.transform(y)
        if block in ("post", "sandwich"):
            added = self._normalize(added, "mlp_post_norm")
        return ops.add(x, _scale(added, factor)), cache

    def _normalize(self, x: Array, norm: str) -> Array:
        return normalize(self.description, x, self.weights[norm])

    def _attend(
        self, x: Array, index: CacheIndex, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        """Return the output of attention, and the layer's cache."""
        q, k, v = self._queries_keys_values(x, index)
        lengths, causal = None, True
        if cache is not None:
            causal = x.shape[1] > 1
            k, v, lengths, cache = self._write_cache(cache, k, v, index)
        y = ops.attention(
            q,
            k,
            v,
            causal=causal,
            scale=self.description.scale,
            window=self.kind.window if causal else None,
            lengths=lengths,
            soft_cap=self.description.soft_cap,
            sinks=self.weights["sinks"] if self.description.sinks else None,
        )
        return linear(_join_heads(y), self.weights["output"]), cache

    def _write_cache(
        self, cache: LayerCache, k: Array, v: Array, index: CacheIndex
    ) -> tuple[Array, Array, Array | None, LayerCache]:
        """Return the keys and values to attend to, how many are valid, and the written cache."""
        window = _ring_size(self.kind, cache)
        ring = index.rings[window] if window and index.rings else None
        slots = index.positions if ring is None else ring.slots
        lengths = index.lengths if ring is None else ring.lengths
        attended = None
        if index.first:
            attended, lengths = (k, v), None
        elif ring is not None and ring.order is not None:
            attended = _unroll(cache["keys"], k, ring), _unroll(cache["values"], v, ring)
        keys = ops.cache_write(cache["keys"], k, slots)
        values = ops.cache_write(cache["values"], v, slots)
        return *(attended or (keys, values)), lengths, {"keys": keys, "values": values}

    def _queries_keys_values(self, x: Array, index: CacheIndex) -> tuple[Array, Array, Array]:
        """Return rotated queries and keys, and values, each (batch, heads, tokens, size)."""
        description = self.description
        batch, tokens, _ = x.shape
        heads, kv_heads, size = description.heads, description.kv_heads, description.head_size
        y = linear(x, self.weights["qkv"])
        q_size, k_size = heads * size, kv_heads * size
        if description.query_key_norm == "row":
            q = self._normalize(ops.slice_axis(y, 2, 0, q_size), "query_norm")
            k = self._normalize(ops.slice_axis(y, 2, q_size, q_size + k_size), "key_norm")
            y = ops.concat([q, k, ops.slice_axis(y, 2, q_size + k_size, y.shape[2])], 2)
        y = ops.reshape(y, (batch, tokens, heads + 2 * kv_heads, size))
        y = ops.permute(y, (0, 2, 1, 3))
        both = ops.slice_axis(y, 1, 0, heads + kv_heads)
        v = ops.slice_axis(y, 1, heads + kv_heads, y.shape[1])
        if description.query_key_norm == "head":
            q = self._normalize(ops.slice_axis(both, 1, 0, heads), "query_norm")
            k = self._normalize(ops.slice_axis(both, 1, heads, both.shape[1]), "key_norm")
            q, k = _rotate(q, index, self.kind.rope), _rotate(k, index, self.kind.rope)
        else:  # one rotation for both
            both = _rotate(both, index, self.kind.rope)
            q, k = ops.slice_axis(both, 1, 0, heads), ops.slice_axis(both, 1, heads, both.shape[1])
        return self._scale_queries(q, index.positions), k, v

    def _scale_queries(self, q: Array, positions: Array) -> Array:
        """Scale queries by their position, as Llama 4 does."""
        if self.kind.position_scale is None:
            return q
        beta, tokens = self.kind.position_scale
        wide = ops.floor(ops.divide(ops.astype(positions, "float32"), float(tokens)))
        factor = ops.add(ops.multiply(ops.log(ops.add(wide, 1.0)), beta), 1.0)
        shape = (*positions.shape[:-1], 1, positions.shape[-1], 1)
        return ops.multiply(q, ops.astype(ops.reshape(factor, shape), primitives(q).dtype(q)))

    def _attend_latent(
        self, x: Array, index: CacheIndex, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        """Run multi-head latent attention (MLA, DeepSeek-V2), which caches one vector a token."""
        description, weights = self.description, self.weights
        sizes = description.latent
        assert sizes is not None
        batch, tokens, _ = x.shape
        heads = description.heads
        plain, rotated = self._latent_queries(x, index)
        latent = self._latent_keys(x, index)
        shape = (heads, sizes.plain + sizes.value, sizes.rank)
        kv_b = ops.reshape(weights["kv_b"]["weight"], shape)
        to_keys = ops.slice_axis(kv_b, 1, 0, sizes.plain)
        to_values = ops.permute(ops.slice_axis(kv_b, 1, sizes.plain, shape[1]), (0, 2, 1))
        if cache is not None:
            cache = {"latent": ops.cache_write(cache["latent"], latent, index.positions)}
        if cache is not None and not index.first:
            latent = cache["latent"]
            y = ops.attention(
                ops.concat([ops.matmul(plain, to_keys), rotated], 3),
                latent,
                ops.slice_axis(latent, 3, 0, sizes.rank),
                causal=tokens > 1,
                scale=description.scale,
                lengths=index.lengths,
            )
            y = ops.matmul(y, to_values)
        else:
            vector = ops.slice_axis(latent, 3, 0, sizes.rank)
            shared = ops.slice_axis(latent, 3, sizes.rank, latent.shape[3])
            shared = ops.broadcast_to(shared, (batch, heads, tokens, sizes.rotated))
            keys = ops.concat([ops.matmul(vector, ops.permute(to_keys, (0, 2, 1))), shared], 3)
            y = ops.attention(
                ops.concat([plain, rotated], 3),
                keys,
                ops.matmul(vector, to_values),
                causal=True,
                scale=description.scale,
            )
        return linear(_join_heads(y), weights["output"]), cache

    def _latent_queries(self, x: Array, index: CacheIndex) -> tuple[Array, Array]:
        """Return the plain part and the rotated part of the queries."""
        description, weights = self.description, self.weights
        sizes = description.latent
        assert sizes is not None
        batch, tokens, _ = x.shape
        if sizes.query_rank:
            x = linear(x, weights["query_a"])
            x = ops.rmsnorm(x, weights["query_a_norm"]["weight"], LATENT_EPS)
        y = linear(x, weights["query_b" if sizes.query_rank else "query"])
        y = ops.reshape(y, (batch, tokens, description.heads, description.head_size))
        y = ops.permute(y, (0, 2, 1, 3))
        rotated = ops.slice_axis(y, 3, sizes.plain, y.shape[3])
        return ops.slice_axis(y, 3, 0, sizes.plain), _rotate(rotated, index, self.kind.rope)

    def _latent_keys(self, x: Array, index: CacheIndex) -> Array:
        """Return the vectors of keys and values, with the rotated part that all heads share."""
        sizes = self.description.latent
        assert sizes is not None
        y = linear(x, self.weights["kv_a"])
        y = ops.reshape(y, (y.shape[0], 1, *y.shape[1:]))
        vector = ops.slice_axis(y, 3, 0, sizes.rank)
        vector = ops.rmsnorm(vector, self.weights["kv_a_norm"]["weight"], LATENT_EPS)
        rotated = ops.slice_axis(y, 3, sizes.rank, y.shape[3])
        return ops.concat([vector, _rotate(rotated, index, self.kind.rope)], 3)

    def transform(self, x: Array) -> Array:
        """Return the output of the MLP or of the experts."""
        if self.kind.experts is None:
            return self._network(x)
        return self._apply_experts(self.kind.experts, x)

    def _network(self, x: Array, prefix: str = "") -> Array:
        activate, weights = _ACTIVATIONS[self.description.activation], self.weights
        if not self.description.gated:
            y = activate(linear(x, weights[f"{prefix}up"]))
            return linear(y, weights[f"{prefix}down"])
        y = linear(x, weights[f"{prefix}gate_up"])
        axis, size = len(y.shape) - 1, y.shape[-1] // 2
        gate, up = ops.slice_axis(y, axis, 0, size), ops.slice_axis(y, axis, size, 2 * size)
        silu = self.description.activation == "silu"
        y = ops.swiglu(gate, up) if silu else ops.multiply(activate(gate), up)
        return linear(y, weights[f"{prefix}down"])

    def _apply_experts(self, routing: Routing, x: Array) -> Array:
        """Return the weighted sum of each token's selected experts, plus the shared expert."""
        y = ops.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))
        weights, selected = _route(routing, self.weights["router"], y)
        experts, clip = self.weights["experts"], routing.clip
        gate = _GATES[self.description.activation] if clip is None else "clipped_swiglu"
        clipping = {} if clip is None else {"alpha": routing.slope, "limit": clip}
        result = ops.experts(
            y,
            experts["gate_up"],
            experts["down"],
            selected,
            weights,
            gate_up_bias=experts.get("gate_up_bias"),
            down_bias=experts.get("down_bias"),
            activation=gate,
            **clipping,
        )
        result = ops.reshape(result, tuple(x.shape))
        if not routing.shared:
            return result
        shared = self._network(x, "shared_")
        if routing.shared_gate:
            shared = ops.multiply(shared, ops.sigmoid(linear(x, self.weights["shared_gate"])))
        return ops.add(result, shared)


def normalize(description: Description, x: Array, norm: Weight) -> Array:
    """Normalize the last axis of x as the description says."""
    weight = norm["weight"]
    if description.norm == "layer":
        return ops.layernorm(x, weight, norm.get("bias"), description.eps)
    if description.norm == "rms1":
        weight = ops.add(widened(primitives(weight), weight), 1)
    return ops.rmsnorm(x, weight, description.eps)


def _unroll(ring: Array, new: Array, index: RingIndex) -> Array:
    """Return the rows of a ring in the order of their positions, followed by the new rows."""
    xp = primitives(ring)
    batch, heads, tokens, size = new.shape
    assert index.order is not None
    assert index.row is not None
    old = ops.take_along_axis(ring, index.order, 2)
    room = xp.full((batch, heads, tokens, size), 0, xp.dtype(new), new)
    return ops.cache_write(ops.concat([old, room], 2), new, index.row)


def _rotate(x: Array, index: CacheIndex, rope: Rope | None) -> Array:
    """Apply rotary positions (RoPE, Su et al. 2021) to the first `rope.size` elements of heads."""
    if rope is None:
        return x
    size = x.shape[3]
    rotated = x if rope.size == size else ops.slice_axis(x, 3, 0, rope.size)
    rotated = ops.rope(
        rotated,
        index.positions,
        theta=rope.theta,
        interleaved=rope.interleaved,
        scaling=dict(rope.scaling) if rope.scaling else None,
        length=index.length,
    )
    if rope.size == size:
        return rotated
    return ops.concat([rotated, ops.slice_axis(x, 3, rope.size, size)], 3)


def _join_heads(y: Array) -> Array:
    """Return (batch, heads, tokens, size) as (batch, tokens, heads × size)."""
    batch, heads, tokens, size = y.shape
    return ops.reshape(ops.permute(y, (0, 2, 1, 3)), (batch, tokens, heads * size))


def _relu2(x: Array) -> Array:
    x = ops.relu(x)
    return ops.multiply(x, x)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, True),
    "relu": ops.relu,
    "relu2": _relu2,
}
_GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
"""Names of gates in `ops.experts`, by activation."""


def _route(routing: Routing, router: Weight, x: Array) -> tuple[Array, Array]:
    """Return the weights and the numbers of the experts of each token, (tokens, per token)."""
    xp = primitives(x)
    if routing.kind == "top_k":
        scores, selected = ops.top_k(widened(xp, linear(x, router)), routing.per_token)
        return ops.softmax(scores), selected
    if routing.kind == "softmax":
        scores = ops.softmax(widened(xp, linear(x, router)))
        weights, selected = ops.top_k(scores, routing.per_token)
    else:
        weight = widened(xp, router["weight"])
        scores = ops.sigmoid(ops.linear(widened(xp, x), weight))
        _, selected = ops.top_k(_limit_groups(routing, scores, router), routing.per_token)
        weights = ops.take_along_axis(scores, selected, 1)
    if routing.normalized:
        weights = ops.divide(weights, ops.add(ops.sum(weights, axis=1, keepdims=True), 1e-20))
    return _scale(weights, routing.factor), selected


def _limit_groups(routing: Routing, scores: Array, router: Weight) -> Array:
    """Return biased scores in the best groups by their two best experts (DeepSeek-V3)."""
    tokens, count = scores.shape
    groups, limit = routing.groups, routing.group_limit
    bias = ops.astype(router["choice_bias"], primitives(scores).dtype(scores))
    scores = ops.add(scores, ops.broadcast_to(ops.reshape(bias, (1, count)), (tokens, count)))
    if groups == limit:
        return scores
    grouped = ops.reshape(scores, (tokens, groups, count // groups))
    best, _ = ops.top_k(grouped, min(2, count // groups))
    _, selected = ops.top_k(ops.sum(best, axis=2), limit)
    numbers = ops.reshape(primitives(scores).arange(groups, _INT32, scores), (1, groups, 1))
    inside = ops.any(ops.equal(ops.reshape(selected, (tokens, 1, limit)), numbers), axis=2)
    grouped = ops.where(ops.reshape(inside, (tokens, groups, 1)), grouped, _NEVER)
    return ops.reshape(grouped, (tokens, count))


def _scale(x: Array, factor: float) -> Array:
    return x if factor == 1 else ops.multiply(x, factor)
