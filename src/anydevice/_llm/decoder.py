"""The decoder of every family, in ops: what it does follows from a `Description` and nothing else.

Parameters are plain trees of dicts and lists of arrays, placed like any other data:

    embedding (vocabulary, hidden), norm, head unless tied, and layers, a list of
        attention_norm, mlp_norm, attention_post_norm, mlp_post_norm    as the block has them
        qkv (heads × size + 2 × kv heads × size, hidden), output; query_norm, key_norm, sinks
        gate_up (2 × intermediate, hidden) or up, and down
        router, experts {gate_up (count, 2 × intermediate, hidden), down (count, hidden,
            intermediate), gate_up_bias, down_bias}, shared_gate_up, shared_down, shared_gate
        with latent attention, instead of qkv: query, or query_a, query_a_norm and query_b; and
            kv_a (rank + rotated, hidden), kv_a_norm, kv_b (heads × (plain + value), rank)

A norm and a product are {"weight": …, "bias": … where there is one}, the router's bias that only
chooses is its "choice_bias"; embedding and sinks are arrays. Of a joined product, queries come
first, then keys, then values; of another, the gate comes first.

All that varies from step to step is an array on the device: one compiled layer serves every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anydevice import _ops as ops
from anydevice._core.dtypes import DTYPES
from anydevice._core.rope_scaling import depends_on_length
from anydevice._llm.description import Description, LayerDescription, Rope, Routing
from anydevice._ops.arguments import widened
from anydevice._ops.dispatch import primitives
from anydevice.errors import ConfigurationError

Array = Any
Weight = Mapping[str, Array]
Parameters = dict[str, Any]
LayerCache = dict[str, Array]
Cache = list[LayerCache]
Places = dict[Any, Any]
"""Where the tokens of a piece stand; see `places`."""

_INT32 = DTYPES["int32"]
_NEVER = -1e30  # a score that is never the best
LATENT_EPS = 1e-6
"""What is added under the root in the norms of latent attention, whatever the config says."""


def linear(x: Array, weight: Weight) -> Array:
    """The product of x and a weight, with its bias: the one way to all weights but experts."""
    return ops.linear(x, weight["weight"], weight.get("bias"))


def new_cache(description: Description, batch: int, context: int, like: Array) -> Cache:
    """An empty cache for `context` tokens of `batch` rows, of the dtype and device of `like`.

    A layer has keys and values, (batch, kv heads, slots, size), or with latent attention what they
    are made from, (batch, 1, slots, rank + rotated). Slots are the context; a layer whose window is
    smaller has as many as that, and the token at position p is in slot p % window.
    """
    xp = primitives(like)
    latent, kv_heads = description.latent, description.kv_heads
    sizes = {"keys": description.head_size, "values": description.value_size}
    if latent:
        sizes, kv_heads = {"latent": latent.rank + latent.rotated}, 1

    def room(window: int | None) -> LayerCache:
        slots = min(window or context, context)
        shapes = {name: (batch, kv_heads, slots, size) for name, size in sizes.items()}
        return {name: xp.full(shape, 0, xp.dtype(like), like) for name, shape in shapes.items()}

    return [room(kind.window) for kind in description.layers]


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
    """The final hidden states (batch, tokens, hidden) for ids (batch, tokens), and the cache.

    With `last`, only that of each row's last valid token, (batch, hidden).

    With a cache, `start` and `count`, (batch,) and int32, say that row b has `count[b]` valid
    tokens, of which the first stands at position `start[b]`; the rest of the row is padding, whose
    hidden states mean nothing. No row may be longer than its cache, padding included, unless its
    count is 0. A cache that was given must not be used afterwards.

    Without a cache, rows are whole sequences from position 0 on, and gradients can be taken.

    Some ropes depend on how long a text is: `length` (batch,), where these tokens are only a part
    of what is known of it; if it is not given, texts end with their last valid token.

    Raises `ConfigurationError` if there is a cache, and no `start` or `count`.
    """
    if cache is not None and (start is None or count is None):
        raise ConfigurationError(
            "with a cache, forward needs the position of each token; pass start and count"
        )
    x = embedded(description, parameters, ids)
    where = places(description, ids, start, count, cache, length=length)
    after: Cache = []
    for number, kind in enumerate(description.layers):
        kept = None if cache is None else cache[number]
        x, kept = placed_layer(description, kind, parameters["layers"][number], x, where, kept)
        if kept is not None:
            after.append(kept)
    x = final(description, parameters, x, count, last=last)
    return x, None if cache is None else after


def embedded(description: Description, parameters: Parameters, ids: Array) -> Array:
    """The embedded tokens that go into the first layer."""
    x = ops.embedding(parameters["embedding"], ids)
    if description.embedding_scale == 1:
        return x
    # The factor is rounded as well: models were trained so.
    xp = primitives(x)
    return ops.multiply(x, xp.full((1, 1, 1), description.embedding_scale, xp.dtype(x), x))


def layer(
    description: Description,
    kind: LayerDescription,
    parameters: Parameters,
    x: Array,
    start: Array | None,
    count: Array | None,
    cache: LayerCache | None,
    length: Array | None = None,
) -> tuple[Array, LayerCache | None]:
    """What one layer makes of x (batch, tokens, hidden), and its cache after it.

    A function of arrays, given description and kind: layers of one kind share its program.
    """
    caches = None if cache is None else [cache]
    where = _places((kind,), x, start, count, caches, length)
    return placed_layer(description, kind, parameters, x, where, cache)


def final(
    description: Description,
    parameters: Parameters,
    x: Array,
    count: Array | None = None,
    *,
    last: bool = False,
) -> Array:
    """The hidden states that logits are made from, of all tokens or of the last valid ones."""
    batch, tokens, hidden = x.shape
    if last:
        if count is not None and tokens > 1:
            at = ops.reshape(ops.maximum(ops.subtract(count, 1), 0), (batch, 1, 1))
            x = ops.take_along_axis(x, at, 1)
        else:
            x = ops.slice_axis(x, 1, tokens - 1, tokens)
        x = ops.reshape(x, (batch, hidden))
    return _normed(description, x, parameters["norm"])


def logits(description: Description, parameters: Parameters, hidden: Array) -> Array:
    """The logits (…, vocabulary) of what `forward` gives."""
    head = {"weight": parameters["embedding"]} if description.tied else parameters["head"]
    return bounded_logits(description, linear(hidden, head))


def bounded_logits(description: Description, logits: Array) -> Array:
    """The logits as the model means them, of their product."""
    return _capped(_scaled(logits, description.logit_scale), description.final_soft_cap)


def places(
    description: Description,
    like: Array,
    start: Array | None,
    count: Array | None,
    cache: Cache | None,
    *,
    first: bool = False,
    length: Array | None = None,
) -> Places:
    """What layers need to know of where the tokens of a piece, `like`, stand: a tree of arrays.

    It is the same for all layers of a step, except for their windows. With `first`, all rows begin
    with this piece: its tokens attend to each other, and the cache is only written.
    """
    found = _places(description.layers, like, start, count, cache, length)
    return {**found, "first": True} if first else found


def _places(
    kinds: tuple[LayerDescription, ...],
    like: Array,
    start: Array | None,
    count: Array | None,
    cache: Cache | None,
    length: Array | None,
) -> Places:
    batch, tokens = like.shape[:2]
    row = primitives(like).arange(tokens, _INT32, like)
    by_length = any(kind.rope and depends_on_length(dict(kind.rope.scaling)) for kind in kinds)
    if cache is None:
        return {"positions": row, "length": length} if by_length else {"positions": row}
    column = ops.reshape(start, (batch, 1))
    found: Places = {
        "positions": column if tokens == 1 else ops.add(column, row),
        "lengths": ops.add(start, tokens),
    }
    if by_length:
        found["length"] = ops.add(start, count) if length is None else length
    for kind, kept in zip(kinds, cache, strict=True):
        ring = _ring(kind, kept)
        if ring and ring not in found:
            found[ring] = _ring_places(ring, found["positions"], row, start, count)
    return found


def _ring(kind: LayerDescription, kept: LayerCache) -> int:
    """The slots of a ring; 0 for a cache that has a slot for every token."""
    slots = next(iter(kept.values())).shape[2]
    return slots if kind.window == slots else 0


def _ring_places(ring: int, positions: Array, row: Array, start: Array, count: Array) -> Places:
    """Where tokens go in a ring, and for several at once, where its keys go in a row of all."""
    batch, tokens = positions.shape
    slots = _remainder(positions, ring)
    valid = ops.less(row, ops.reshape(count, (batch, 1)))
    if tokens == 1:
        lengths = ops.minimum(ops.add(start, 1), ring)
        return {"slots": ops.where(valid, slots, ring), "lengths": lengths}
    # Of more tokens than the ring has slots, the last ones go in: none is written twice.
    kept = ops.less_equal(ops.reshape(ops.subtract(count, ring), (batch, 1)), row)
    slots = ops.where(ops.logical_and(valid, kept), slots, ring)
    first = ops.maximum(ops.subtract(start, ring), 0)
    before = ops.subtract(start, first)
    column = ops.reshape(first, (batch, 1))
    order = ops.add(column, primitives(row).arange(ring, _INT32, row))
    return {
        "slots": slots,
        "order": ops.reshape(_remainder(order, ring), (batch, 1, ring, 1)),
        "row": ops.add(ops.reshape(before, (batch, 1)), row),
        "lengths": ops.add(before, tokens),
    }


def _remainder(x: Array, divisor: int) -> Array:
    """The rest of integers from 0 to some millions, for which float32 is exact enough."""
    wide = ops.divide(ops.add(ops.astype(x, "float32"), 0.5), float(divisor))
    whole = ops.astype(ops.floor(wide), "int32")
    return ops.subtract(x, ops.multiply(whole, divisor))


def placed_layer(
    description: Description,
    kind: LayerDescription,
    parameters: Parameters,
    x: Array,
    where: Places,
    cache: LayerCache | None,
) -> tuple[Array, LayerCache | None]:
    """The same as `layer`, where the places of its tokens are known already."""
    block, factor = description.block, description.residual_scale
    y = x if block == "post" else _normed(description, x, parameters["attention_norm"])
    attend = _attended_latent if description.latent else _attended
    added, cache = attend(description, kind, parameters, y, where, cache)
    if block == "parallel":
        added = ops.add(added, _transformed(description, kind, parameters, y))
        return ops.add(x, _scaled(added, factor)), cache
    if block in ("post", "sandwich"):
        added = _normed(description, added, parameters["attention_post_norm"])
    x = ops.add(x, _scaled(added, factor))
    y = x if block == "post" else _normed(description, x, parameters["mlp_norm"])
    added = _transformed(description, kind, parameters, y)
    if block in ("post", "sandwich"):
        added = _normed(description, added, parameters["mlp_post_norm"])
    return ops.add(x, _scaled(added, factor)), cache


def _attended(
    description: Description,
    kind: LayerDescription,
    parameters: Parameters,
    x: Array,
    where: Places,
    cache: LayerCache | None,
) -> tuple[Array, LayerCache | None]:
    """What attention adds, and the layer's cache after it."""
    q, k, v = _queries_keys_values(description, kind, parameters, x, where)
    lengths, causal = None, True
    if cache is not None:
        causal = x.shape[1] > 1
        k, v, lengths, cache = _kept(kind, cache, k, v, where)
    y = ops.attention(
        q,
        k,
        v,
        causal=causal,
        scale=description.scale,
        window=kind.window if causal else None,
        lengths=lengths,
        soft_cap=description.soft_cap,
        sinks=parameters["sinks"] if description.sinks else None,
    )
    return linear(_joined(y), parameters["output"]), cache


def _kept(
    kind: LayerDescription, cache: LayerCache, k: Array, v: Array, where: Places
) -> tuple[Array, Array, Array | None, LayerCache]:
    """The keys and values that are attended to, how many are valid, and the cache with new ones."""
    ring = _ring(kind, cache)
    at = where[ring] if ring else {"slots": where["positions"], "lengths": where["lengths"]}
    seen, lengths = None, at["lengths"]
    if "first" in where:
        seen, lengths = (k, v), None
    elif "order" in at:
        seen = _unrolled(cache["keys"], k, at), _unrolled(cache["values"], v, at)
    keys = ops.cache_write(cache["keys"], k, at["slots"])
    values = ops.cache_write(cache["values"], v, at["slots"])
    return *(seen or (keys, values)), lengths, {"keys": keys, "values": values}


def _unrolled(ring: Array, new: Array, at: Places) -> Array:
    """What a ring holds in the order of its positions, and new tokens behind it."""
    xp = primitives(ring)
    batch, heads, tokens, size = new.shape
    old = ops.take_along_axis(ring, at["order"], 2)
    room = xp.full((batch, heads, tokens, size), 0, xp.dtype(new), new)
    return ops.cache_write(ops.concat([old, room], 2), new, at["row"])


def _queries_keys_values(
    description: Description,
    kind: LayerDescription,
    parameters: Parameters,
    x: Array,
    where: Places,
) -> tuple[Array, Array, Array]:
    """Queries, keys and values by head, (batch, heads, tokens, size), rotated."""
    batch, tokens, _ = x.shape
    heads, kv_heads, size = description.heads, description.kv_heads, description.head_size
    y = linear(x, parameters["qkv"])
    asked, held = heads * size, kv_heads * size
    if description.query_key_norm == "row":
        q = _normed(description, ops.slice_axis(y, 2, 0, asked), parameters["query_norm"])
        k = _normed(description, ops.slice_axis(y, 2, asked, asked + held), parameters["key_norm"])
        y = ops.concat([q, k, ops.slice_axis(y, 2, asked + held, asked + 2 * held)], 2)
    y = ops.reshape(y, (batch, tokens, heads + 2 * kv_heads, size))
    y = ops.permute(y, (0, 2, 1, 3))
    both, v = (
        ops.slice_axis(y, 1, 0, heads + kv_heads),
        ops.slice_axis(y, 1, heads + kv_heads, y.shape[1]),
    )
    if description.query_key_norm == "head":
        q = _normed(description, ops.slice_axis(both, 1, 0, heads), parameters["query_norm"])
        k = _normed(
            description, ops.slice_axis(both, 1, heads, both.shape[1]), parameters["key_norm"]
        )
        q, k = _rotated(q, where, kind.rope), _rotated(k, where, kind.rope)
    else:  # one rotation for both
        both = _rotated(both, where, kind.rope)
        q, k = ops.slice_axis(both, 1, 0, heads), ops.slice_axis(both, 1, heads, both.shape[1])
    return _grown(q, where["positions"], kind), k, v


def _rotated(x: Array, where: Places, rope: Rope | None) -> Array:
    if rope is None:
        return x
    size = x.shape[3]
    turned = x if rope.size == size else ops.slice_axis(x, 3, 0, rope.size)
    turned = ops.rope(
        turned,
        where["positions"],
        theta=rope.theta,
        interleaved=rope.interleaved,
        scaling=dict(rope.scaling) if rope.scaling else None,
        length=where.get("length"),
    )
    return (
        turned
        if rope.size == size
        else ops.concat([turned, ops.slice_axis(x, 3, rope.size, size)], 3)
    )


def _grown(q: Array, positions: Array, kind: LayerDescription) -> Array:
    """Queries, larger with their position where the layer has it so."""
    if kind.position_scale is None:
        return q
    beta, tokens = kind.position_scale
    wide = ops.floor(ops.divide(ops.astype(positions, "float32"), float(tokens)))
    factor = ops.add(ops.multiply(ops.log(ops.add(wide, 1.0)), beta), 1.0)
    shape = (*positions.shape[:-1], 1, positions.shape[-1], 1)
    return ops.multiply(q, ops.astype(ops.reshape(factor, shape), primitives(q).dtype(q)))


def _attended_latent(
    description: Description,
    kind: LayerDescription,
    parameters: Parameters,
    x: Array,
    where: Places,
    cache: LayerCache | None,
) -> tuple[Array, LayerCache | None]:
    """The same where keys and values are made from one small vector a token, which is cached.

    With a cache, queries are brought to that vector, and not the vector to each head: scores with
    `kv_b` on the side of the queries are the same, and no key is made again in every step. For
    tokens that attend to each other alone, making the keys is less work.
    """
    sizes = description.latent
    assert sizes is not None
    batch, tokens, _ = x.shape
    heads, positions = description.heads, where["positions"]
    plain, rotated = _latent_queries(description, kind, parameters, x, where)
    latent = _latent_keys(description, kind, parameters, x, where)
    made = ops.reshape(parameters["kv_b"]["weight"], (heads, sizes.plain + sizes.value, sizes.rank))
    to_keys = ops.slice_axis(made, 1, 0, sizes.plain)
    to_values = ops.permute(ops.slice_axis(made, 1, sizes.plain, made.shape[1]), (0, 2, 1))
    if cache is not None:
        cache = {"latent": ops.cache_write(cache["latent"], latent, positions)}
    if cache is not None and "first" not in where:
        latent = cache["latent"]
        queries = ops.concat([ops.matmul(plain, to_keys), rotated], 3)
        y = ops.attention(
            queries,
            latent,
            ops.slice_axis(latent, 3, 0, sizes.rank),
            causal=tokens > 1,
            scale=description.scale,
            lengths=where["lengths"],
        )
        y = ops.matmul(y, to_values)
    else:
        vector = ops.slice_axis(latent, 3, 0, sizes.rank)
        turned = ops.slice_axis(latent, 3, sizes.rank, latent.shape[3])
        shared = ops.broadcast_to(turned, (batch, heads, tokens, sizes.rotated))
        keys = ops.concat([ops.matmul(vector, ops.permute(to_keys, (0, 2, 1))), shared], 3)
        y = ops.attention(
            ops.concat([plain, rotated], 3),
            keys,
            ops.matmul(vector, to_values),
            causal=True,
            scale=description.scale,
        )
    return linear(_joined(y), parameters["output"]), cache


def _latent_queries(
    description: Description,
    kind: LayerDescription,
    parameters: Parameters,
    x: Array,
    where: Places,
) -> tuple[Array, Array]:
    """The part of the queries that positions do not enter, and the one that they do."""
    sizes = description.latent
    assert sizes is not None
    batch, tokens, _ = x.shape
    if sizes.query_rank:
        x = linear(x, parameters["query_a"])
        x = ops.rmsnorm(x, parameters["query_a_norm"]["weight"], LATENT_EPS)
    y = linear(x, parameters["query_b" if sizes.query_rank else "query"])
    y = ops.reshape(y, (batch, tokens, description.heads, description.head_size))
    y = ops.permute(y, (0, 2, 1, 3))
    plain, rotated = (
        ops.slice_axis(y, 3, 0, sizes.plain),
        ops.slice_axis(y, 3, sizes.plain, y.shape[3]),
    )
    return plain, _rotated(rotated, where, kind.rope)


def _latent_keys(
    description: Description,
    kind: LayerDescription,
    parameters: Parameters,
    x: Array,
    where: Places,
) -> Array:
    """What keys and values are made from, and behind it the rotated part that all heads share."""
    sizes = description.latent
    assert sizes is not None
    y = linear(x, parameters["kv_a"])
    y = ops.reshape(y, (y.shape[0], 1, *y.shape[1:]))
    vector, rotated = (
        ops.slice_axis(y, 3, 0, sizes.rank),
        ops.slice_axis(y, 3, sizes.rank, y.shape[3]),
    )
    vector = ops.rmsnorm(vector, parameters["kv_a_norm"]["weight"], LATENT_EPS)
    return ops.concat([vector, _rotated(rotated, where, kind.rope)], 3)


def _joined(y: Array) -> Array:
    """(batch, heads, tokens, size) as (batch, tokens, heads × size)."""
    batch, heads, tokens, size = y.shape
    return ops.reshape(ops.permute(y, (0, 2, 1, 3)), (batch, tokens, heads * size))


def _transformed(
    description: Description, kind: LayerDescription, parameters: Parameters, x: Array
) -> Array:
    """What the network adds, or the experts do."""
    if kind.experts is not None:
        return _by_experts(description, kind.experts, parameters, x)
    return _network(description, parameters, x)


def _network(description: Description, parameters: Parameters, x: Array, prefix: str = "") -> Array:
    if not description.gated:
        y = _activated(description, linear(x, parameters[f"{prefix}up"]))
        return linear(y, parameters[f"{prefix}down"])
    y = linear(x, parameters[f"{prefix}gate_up"])
    return linear(_gated(description, y), parameters[f"{prefix}down"])


def _gated(description: Description, y: Array) -> Array:
    """The first half of the last axis, activated, times the second."""
    axis, size = len(y.shape) - 1, y.shape[-1] // 2
    gate, up = ops.slice_axis(y, axis, 0, size), ops.slice_axis(y, axis, size, 2 * size)
    if description.activation == "silu":
        return ops.swiglu(gate, up)
    return ops.multiply(_activated(description, gate), up)


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


_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
"""What `ops.experts` calls a gate with an activation."""


def _activated(description: Description, x: Array) -> Array:
    return _ACTIVATIONS[description.activation](x)


def _by_experts(
    description: Description, routing: Routing, parameters: Parameters, x: Array
) -> Array:
    """What the experts give that each token chooses, and those that all pass."""
    y = ops.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))
    weights, chosen = _routed(routing, parameters["router"], y)
    experts, clip = parameters["experts"], routing.clip
    gated = _GATED[description.activation] if clip is None else "clipped_swiglu"
    clipped = {} if clip is None else {"alpha": routing.slope, "limit": clip}
    result = ops.experts(
        y,
        experts["gate_up"],
        experts["down"],
        chosen,
        weights,
        gate_up_bias=experts.get("gate_up_bias"),
        down_bias=experts.get("down_bias"),
        activation=gated,
        **clipped,
    )
    result = ops.reshape(result, tuple(x.shape))
    if not routing.shared:
        return result
    shared = _network(description, parameters, x, "shared_")
    if routing.shared_gate:
        shared = ops.multiply(shared, ops.sigmoid(linear(x, parameters["shared_gate"])))
    return ops.add(result, shared)


def _routed(routing: Routing, router: Weight, x: Array) -> tuple[Array, Array]:
    """The weights of the experts that each token chooses, and their numbers: (tokens, chosen)."""
    xp = primitives(x)
    if routing.kind == "top_k":
        scores, chosen = ops.top_k(widened(xp, linear(x, router)), routing.per_token)
        return ops.softmax(scores), chosen
    if routing.kind == "softmax":
        scores = ops.softmax(widened(xp, linear(x, router)))
        weights, chosen = ops.top_k(scores, routing.per_token)
    else:
        weight = widened(xp, router["weight"])
        scores = ops.sigmoid(ops.linear(widened(xp, x), weight))
        _, chosen = ops.top_k(_in_best_groups(routing, scores, router), routing.per_token)
        weights = ops.take_along_axis(scores, chosen, 1)
    if routing.normalized:
        weights = ops.divide(weights, ops.add(ops.sum(weights, axis=1, keepdims=True), 1e-20))
    return _scaled(weights, routing.factor), chosen


def _in_best_groups(routing: Routing, scores: Array, router: Weight) -> Array:
    """What experts are chosen by: scores with their bias, in the groups whose two best are best."""
    tokens, count = scores.shape
    groups, limit = routing.groups, routing.group_limit
    bias = ops.astype(router["choice_bias"], primitives(scores).dtype(scores))
    scores = ops.add(scores, ops.broadcast_to(ops.reshape(bias, (1, count)), (tokens, count)))
    if groups == limit:
        return scores
    apart = ops.reshape(scores, (tokens, groups, count // groups))
    best, _ = ops.top_k(apart, min(2, count // groups))
    totals = ops.sum(best, axis=2)
    _, taken = ops.top_k(totals, limit)
    numbers = ops.reshape(primitives(scores).arange(groups, _INT32, scores), (1, groups, 1))
    inside = ops.any(ops.equal(ops.reshape(taken, (tokens, 1, limit)), numbers), axis=2)
    apart = ops.where(ops.reshape(inside, (tokens, groups, 1)), apart, _NEVER)
    return ops.reshape(apart, (tokens, count))


def _normed(description: Description, x: Array, norm: Weight) -> Array:
    weight = norm["weight"]
    if description.norm == "layer":
        return ops.layernorm(x, weight, norm.get("bias"), description.eps)
    if description.norm == "rms1":
        weight = ops.add(widened(primitives(weight), weight), 1)
    return ops.rmsnorm(x, weight, description.eps)


def _scaled(x: Array, factor: float) -> Array:
    return x if factor == 1 else ops.multiply(x, factor)


def _capped(x: Array, cap: float | None) -> Array:
    return x if cap is None else ops.multiply(ops.tanh(ops.divide(x, cap)), cap)
