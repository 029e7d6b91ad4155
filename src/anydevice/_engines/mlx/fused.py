"""MLX's own versions of composite ops.

MLX makes each of them one kernel on a GPU, and puts them together from others on a CPU. There, in
16 bits, it rounds more than once on the way, and in `float64` it computes only as exactly as in
`float32`: such arrays are left to the definitions. `mx.fast.rope` is not among them: it takes a
position to begin at, while an op is given the position of each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from anydevice._engines.mlx.decoder_layer import decoder_layer, linear
from anydevice._engines.mlx.primitives import PRIMITIVES

_HALF = (mx.float16, mx.bfloat16)
_FLOAT32, _FLOAT64 = mx.float32, mx.float64
_CPU = mx.Device(mx.cpu, 0)
_rms_norm, _layer_norm = mx.fast.rms_norm, mx.fast.layer_norm
_attend = mx.fast.scaled_dot_product_attention
_MAX_SCORES = 1 << 26
"""More of them than this are not to be in memory together, as they are on a CPU."""


def _softmax(x: mx.array, axis: int) -> mx.array:
    if not x.size or x.dtype == _FLOAT64:
        return NotImplemented
    return mx.softmax(x, axis=axis, precise=True)


def _rmsnorm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    kind = x.dtype
    if (kind == _FLOAT32 or _half_on_gpu(kind)) and x.size:
        return _rms_norm(x, weight, eps)
    return NotImplemented


def _layernorm(x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array:
    kind = x.dtype
    if (kind == _FLOAT32 or _half_on_gpu(kind)) and x.size:
        return _layer_norm(x, weight, bias, eps)
    return NotImplemented


_rmsnorm.of_one_dtype = _layernorm.of_one_dtype = True  # type: ignore[attr-defined]


def _attention(
    q: mx.array, k: mx.array, v: mx.array, causal: bool, scale: Any, mask: mx.array | None,
    window: Any, lengths: mx.array | None, soft_cap: Any = None, sinks: mx.array | None = None,
) -> mx.array:  # fmt: skip
    if soft_cap is not None or not v.shape[3]:
        return NotImplemented
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    scores = batch * heads * queries * keys
    if not (scores and size) or (scores > _MAX_SCORES and mx.default_device() == _CPU):
        return NotImplemented
    kind = q.dtype
    full = kind == _FLOAT32
    if not full and kind == _FLOAT64:
        return NotImplemented
    # Without its kernel MLX would round the products to 16 bits before the softmax.
    options: dict[str, Any] = {} if full else {"force_fused": True}
    if sinks is not None:
        options["sinks"] = sinks
    factor = size**-0.5 if scale is None else scale
    visible: Any = None
    if mask is not None or window is not None or lengths is not None:
        visible = _visible_keys(queries, keys, causal, mask, window, lengths)
        if mask is not None or lengths is not None:
            k, v = _zero_hidden_keys(k, v, _visible_keys(queries, keys, False, mask, None, lengths))
    elif causal:
        if queries > keys:  # the first queries see nothing
            return NotImplemented
        visible = "causal"
    elif full and sinks is None:
        return _attend(q, k, v, scale=factor)
    try:
        result = _attend(q, k, v, scale=factor, mask=visible, **options)
    except (TypeError, ValueError):
        if full:
            raise
        return NotImplemented  # no kernel for these sizes, or MLX is too old to say so
    if isinstance(visible, mx.array):
        # MLX gives a query that sees nothing the mean of all values.
        result = mx.where(mx.any(visible, axis=-1, keepdims=True), result, 0)
    return result


def _visible_keys(
    queries: int,
    keys: int,
    causal: bool,
    mask: mx.array | None,
    window: Any,
    lengths: mx.array | None,
) -> Any:
    """Return the keys that each query may attend to, broadcast to the scores."""
    key = mx.arange(keys)
    valid = keys if lengths is None else _within(lengths, keys)[:, None, None, None]
    parts = [] if lengths is None else [key < valid]
    if causal:
        last = mx.arange(queries)[:, None] + (valid - queries)
        parts.append(key <= last)
        if window is not None:
            parts.append(key > last - window)
    if mask is not None:
        parts.append(mask[:, None, None, :] if mask.ndim == 2 else mask)
    visible = parts[0]
    for part in parts[1:]:
        visible = mx.logical_and(visible, part)
    return visible


def _zero_hidden_keys(k: mx.array, v: mx.array, visible: mx.array) -> tuple[mx.array, mx.array]:
    """Zeros for the keys and values that no query attends to: a weight of 0 times NaN is NaN."""
    shape = (1,) * (4 - visible.ndim) + tuple(visible.shape)
    split = (1, 1) if shape[1] == 1 else (k.shape[1], shape[1] // k.shape[1])
    some = mx.any(visible.reshape(shape[0], *split, *shape[2:]), axis=(2, 3))[..., None]
    return mx.where(some, k, 0), mx.where(some, v, 0)


def _within(lengths: mx.array, keys: int) -> mx.array:
    return mx.clip(lengths.astype(mx.int64), 0, keys).astype(mx.int32)


# Experts: matrices are multiplied with where they are, for each choice. Many choices are sorted by
# expert and cut into blocks of one expert each, the last of an expert being filled up, so that no
# shape depends on who chose what.


def _experts(
    x: mx.array, gate_up: mx.array, down: mx.array, chosen: mx.array, weights: mx.array,
    gate_up_bias: mx.array | None, down_bias: mx.array | None, activation: str, alpha: float,
    limit: float,
) -> mx.array:  # fmt: skip
    if not (x.size and chosen.size and down.size):
        return NotImplemented
    (tokens, k), count = chosen.shape, gate_up.shape[0]
    wide = chosen.astype(mx.int64)
    inside = mx.logical_and(wide >= 0, wide < count)
    numbers = mx.where(inside, wide, count).astype(mx.int32)

    def through(rows: mx.array, experts: mx.array) -> mx.array:
        """Rows (…, rows, hidden) through the experts of these numbers (…)."""
        both = _chosen_product(rows, gate_up, gate_up_bias, experts)
        between = _gate(activation, alpha, limit, *mx.split(both, 2, axis=-1))
        return _chosen_product(between.astype(x.dtype), down, down_bias, experts)

    if tokens * k <= 2 * count:
        outputs = through(x[:, None, None, :], mx.where(inside, numbers, 0))[:, :, 0]
    else:
        outputs = _in_blocks(x, numbers.reshape(-1), count, through).reshape(tokens, k, -1)
    # Left out before they are multiplied: 0 × NaN would be a gradient.
    own = mx.where(inside[..., None], outputs, 0)
    shares = mx.where(inside, weights.astype(outputs.dtype), 0)
    return mx.sum(own * shares[..., None], axis=1).astype(x.dtype)


def _in_blocks(
    x: mx.array, numbers: mx.array, count: int, through: Callable[..., mx.array]
) -> mx.array:
    """Apply the expert of each choice to its token; `count` stands for none."""
    length, (tokens, hidden) = numbers.size, x.shape
    size = 8
    while size < min(256, length // count):
        size *= 2
    blocks = (length + min(count, length) * (size - 1)) // size
    counts = mx.zeros(count + 1, dtype=mx.int32).at[numbers].add(1)
    ends = mx.cumsum(
        (counts[:count] + size - 1) // size
    )  # in blocks, as far as each expert reaches
    order = mx.argsort(numbers).astype(mx.int32)
    own = numbers[order]
    first = mx.concatenate([mx.zeros(1, dtype=mx.int32), ends]) * size
    place = mx.arange(length) - (mx.cumsum(counts) - counts)[own] + first[own]
    place = mx.where(own < count, place, blocks * size).astype(mx.int32)
    empty = mx.full(blocks * size + 1, length, dtype=mx.int32)
    source = mx.put_along_axis(empty, place, order, axis=0)[:-1] // (length // tokens)
    rows = mx.concatenate([x, mx.zeros((1, hidden), dtype=x.dtype)])[source]
    reached = ends[None] <= mx.arange(blocks)[:, None]
    expert = mx.minimum(mx.sum(reached.astype(mx.int32), axis=1), count - 1)
    rows = rows.reshape(blocks, size, hidden)
    if _gathers(x):
        outputs = through(rows, expert)
    else:  # one after the other, so that the copies of the matrices do not add up
        each = [through(rows[at : at + 1], expert[at : at + 1]) for at in range(blocks)]
        outputs = mx.concatenate(each)
    outputs = outputs.reshape(-1, hidden)
    places = mx.put_along_axis(mx.zeros(length, dtype=mx.int32), order, place, axis=0)
    return outputs[mx.minimum(places, blocks * size - 1)]


def _chosen_product(
    rows: mx.array, matrices: mx.array, bias: mx.array | None, numbers: mx.array
) -> mx.array:
    """Rows (…, rows, inputs) times the matrices of these numbers (…), in 32 bits or more."""
    turned = matrices.swapaxes(-1, -2)
    if _gathers(rows):
        product = mx.gather_mm(rows, turned, rhs_indices=numbers.astype(mx.uint32))
    else:
        product = PRIMITIVES.matmul(rows, turned[numbers])
    if product.dtype in _HALF:
        product = product.astype(_FLOAT32)
    return product if bias is None else product + bias[numbers][..., None, :].astype(product.dtype)


def _gathers(x: mx.array) -> bool:
    """Whether MLX multiplies such arrays with matrices where they are: on a CPU, only `float32`."""
    return bool(x.dtype == _FLOAT32 or mx.default_device() != _CPU)


def _gate(activation: str, alpha: float, limit: float, gate: mx.array, up: mx.array) -> mx.array:
    if activation == "clipped_swiglu":
        gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
        return gate * PRIMITIVES.sigmoid(alpha * gate) * (up + 1)
    if activation == "swiglu":
        return gate * PRIMITIVES.sigmoid(gate) * up
    if activation == "geglu":
        return 0.5 * gate * (1 + PRIMITIVES.erf(gate * 0.5**0.5)) * up
    inner = (gate + 0.044715 * gate * gate * gate) * (2 / math.pi) ** 0.5
    return 0.5 * gate * (1 + mx.tanh(inner)) * up


def _sort(x: mx.array, axis: int, descending: bool) -> mx.array:
    if not x.size:
        return x
    ordered = _flip(x, (axis,)) if descending else x
    result = mx.sort(_sortable(ordered), axis=axis).astype(x.dtype)
    return _flip(result, (axis,)) if descending else result


def _argsort(x: mx.array, axis: int, descending: bool) -> mx.array:
    if not x.size:
        return mx.zeros(x.shape, dtype=mx.int32)
    if not descending:
        return mx.argsort(_sortable(x), axis=axis).astype(mx.int32)
    order = _flip(mx.argsort(_sortable(_flip(x, (axis,))), axis=axis), (axis,))
    return (x.shape[axis] - 1) - order.astype(mx.int32)


def _sortable(x: mx.array) -> mx.array:
    return x.astype(mx.uint8) if x.dtype == mx.bool_ else x


def _cumulative_sum(x: mx.array, axis: int) -> mx.array:
    if not x.size:
        return x
    return mx.cumsum(x.astype(_FLOAT32) if x.dtype in _HALF else x, axis=axis).astype(x.dtype)


def _prod(x: mx.array, axes: tuple[int, ...], keepdims: bool) -> mx.array:
    if not x.size:
        return NotImplemented
    wide = x.astype(_FLOAT32) if x.dtype in _HALF else x
    return mx.prod(wide, axis=axes, keepdims=keepdims).astype(x.dtype)


def _truths(
    function: Callable[..., mx.array], x: mx.array, axes: tuple[int, ...], keepdims: bool
) -> mx.array:
    return function(x, axis=axes, keepdims=keepdims) if x.size and axes else NotImplemented


def _pad(x: mx.array, widths: Sequence[tuple[int, int]], value: float) -> mx.array:
    return mx.pad(x, list(widths), constant_values=mx.array(value, dtype=x.dtype))


def _flip(x: mx.array, axes: tuple[int, ...]) -> mx.array:
    backwards = slice(None, None, -1)
    return x[tuple(backwards if at in axes else slice(None) for at in range(x.ndim))]


def _half_on_gpu(kind: Any) -> bool:
    """Whether these are numbers of 16 bits where MLX normalizes them with enough digits."""
    return bool(kind in _HALF and mx.default_device() != _CPU)


FUSED: Mapping[str, Callable[..., Any]] = {
    "all": partial(_truths, mx.all),
    "any": partial(_truths, mx.any),
    "argsort": _argsort,
    "attention": _attention,
    "cumulative_sum": _cumulative_sum,
    "decoder_layer": decoder_layer,
    "experts": _experts,
    "flip": _flip,
    "isfinite": mx.isfinite,
    "layernorm": _layernorm,
    "linear": linear,
    "pad": _pad,
    "prod": _prod,
    "rmsnorm": _rmsnorm,
    "round": mx.round,
    "softmax": _softmax,
    "sort": _sort,
    "stack": lambda arrays, axis: mx.stack(list(arrays), axis=axis),
}
