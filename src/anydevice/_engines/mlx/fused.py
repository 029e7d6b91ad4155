"""MLX's own versions of composite ops: one kernel each on a GPU, several on a CPU.

On a CPU, MLX rounds 16-bit numbers more than once, and computes `float64` only as exactly as
`float32`: such arrays are left to the definitions. `mx.fast.rope` is not used: it takes a first
position, while the op takes the position of each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from anydevice._engines.base import expert_blocks, visible_keys
from anydevice._engines.mlx.decoder_layer import decoder_layer, linear, quantized_linear
from anydevice._engines.mlx.primitives import PRIMITIVES
from anydevice._engines.quantized import dequantizer

_HALF = (mx.float16, mx.bfloat16)
_FLOAT32, _FLOAT64 = mx.float32, mx.float64
_CPU = mx.Device(mx.cpu, 0)
_attend = mx.fast.scaled_dot_product_attention
_MAX_SCORES = 1 << 26
"""Scores that may be in memory together on a CPU."""


def _norm(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return MLX's norm, where it has enough digits: of 16-bit numbers, on a GPU alone."""

    def run(x: mx.array, *others: Any) -> mx.array:
        enough = x.dtype == _FLOAT32 or (x.dtype in _HALF and mx.default_device() != _CPU)
        return function(x, *others) if enough and x.size else NotImplemented

    run.of_one_dtype = True  # type: ignore[attr-defined]
    return run


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
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    valid = None
    if lengths is not None:
        valid = mx.clip(lengths.astype(mx.int64), 0, keys).astype(mx.int32)[:, None, None, None]
    visible: Any = None
    if mask is not None or window is not None or lengths is not None:
        visible = visible_keys(mx.arange, queries, keys, valid, causal, window, mask)
        shown = visible_keys(mx.arange, queries, keys, valid, False, None, mask)
        if shown is not None:
            k, v = _zero_hidden_keys(k, v, shown)
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


def _zero_hidden_keys(k: mx.array, v: mx.array, visible: mx.array) -> tuple[mx.array, mx.array]:
    """Zeros for the keys and values that no query attends to: a weight of 0 times NaN is NaN."""
    shape = (1,) * (4 - visible.ndim) + tuple(visible.shape)
    split = (1, 1) if shape[1] == 1 else (k.shape[1], shape[1] // k.shape[1])
    some = mx.any(visible.reshape(shape[0], *split, *shape[2:]), axis=(2, 3))[..., None]
    return mx.where(some, k, 0), mx.where(some, v, 0)


# Experts: matrices are not copied for each choice. Many choices are sorted by expert and cut into
# blocks of one expert each, the last one padded, so that no shape depends on the choices.


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
        """Apply the numbered experts (…) to rows (…, rows, hidden)."""
        both = _chosen_product(rows, gate_up, gate_up_bias, experts)
        between = _gate(activation, alpha, limit, *mx.split(both, 2, axis=-1))
        return _chosen_product(between.astype(x.dtype), down, down_bias, experts)

    if tokens * k <= 2 * count:
        outputs = through(x[:, None, None, :], mx.where(inside, numbers, 0))[:, :, 0]
    else:
        outputs = _in_blocks(x, numbers.reshape(-1), count, through).reshape(tokens, k, -1)
    # Zeroed before they are multiplied: the gradient of 0 × NaN is NaN.
    own = mx.where(inside[..., None], outputs, 0)
    shares = mx.where(inside, weights.astype(outputs.dtype), 0)
    return mx.sum(own * shares[..., None], axis=1).astype(x.dtype)


def _in_blocks(
    x: mx.array, numbers: mx.array, count: int, through: Callable[..., mx.array]
) -> mx.array:
    """Apply the expert of each choice to its token; `count` stands for none."""
    tokens, hidden = x.shape
    plan = expert_blocks(mx, numbers, count, tokens)
    rows = mx.concatenate([x, mx.zeros((1, hidden), dtype=x.dtype)])[plan.token]
    rows = rows.reshape(-1, plan.rows, hidden)
    if _gathers(x):
        outputs = through(rows, plan.expert)
    else:  # one after the other, so that the copies of the matrices do not add up
        starts = range(len(rows))
        parts = [through(rows[at : at + 1], plan.expert[at : at + 1]) for at in starts]
        outputs = mx.concatenate(parts)
    return outputs.reshape(-1, hidden)[mx.minimum(plan.row, len(plan.token) - 1)]


def _chosen_product(
    rows: mx.array, matrices: mx.array, bias: mx.array | None, numbers: mx.array
) -> mx.array:
    """Multiply rows (…, rows, inputs) with the numbered matrices (…), in 32 bits or more."""
    transposed = matrices.swapaxes(-1, -2)
    if _gathers(rows):
        product = mx.gather_mm(rows, transposed, rhs_indices=numbers.astype(mx.uint32))
    else:
        product = PRIMITIVES.matmul(rows, transposed[numbers])
    product = _wide(product)
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


def _wide(x: mx.array) -> mx.array:
    return x.astype(_FLOAT32) if x.dtype in _HALF else x


def _truths(
    function: Callable[..., mx.array], x: mx.array, axes: tuple[int, ...], keepdims: bool
) -> mx.array:
    return function(x, axis=axes, keepdims=keepdims) if x.size and axes else NotImplemented


def _flip(x: mx.array, axes: tuple[int, ...]) -> mx.array:
    backwards = slice(None, None, -1)
    return x[tuple(backwards if at in axes else slice(None) for at in range(x.ndim))]


FUSED: Mapping[str, Callable[..., Any]] = {
    "all": partial(_truths, mx.all),
    "any": partial(_truths, mx.any),
    "argsort": _argsort,
    "attention": _attention,
    "cumulative_sum": lambda x, axis: (
        mx.cumsum(_wide(x), axis=axis).astype(x.dtype) if x.size else x
    ),
    "decoder_layer": decoder_layer,
    "experts": _experts,
    "flip": _flip,
    "isfinite": mx.isfinite,
    "layernorm": _norm(mx.fast.layer_norm),
    "linear": linear,
    "pad": lambda x, widths, value: mx.pad(
        x, list(widths), constant_values=mx.array(value, dtype=x.dtype)
    ),
    "prod": lambda x, axes, keepdims: (
        mx.prod(_wide(x), axis=axes, keepdims=keepdims).astype(x.dtype)
        if x.size
        else NotImplemented
    ),
    "quantized_linear": quantized_linear,
    "rmsnorm": _norm(mx.fast.rms_norm),
    "round": mx.round,
    "softmax": lambda x, axis: (
        mx.softmax(x, axis=axis, precise=True) if x.size and x.dtype != _FLOAT64 else NotImplemented
    ),
    "sort": _sort,
    "stack": lambda arrays, axis: mx.stack(list(arrays), axis=axis),
    "dequantize": dequantizer(
        mx.stack,
        lambda x: x.astype(_FLOAT32),
        lambda table, codes: mx.array(table, dtype=_FLOAT32)[codes],
    ),
}
