"""Whole ops on JAX, each compiled as one program, or part of the program that is being traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from anydevice._core.quantized import QuantizedWeight
from anydevice._engines.base import expert_blocks, visible_keys
from anydevice._engines.host import known_dtype
from anydevice._engines.jax.primitives import PRIMITIVES
from anydevice._engines.quantized import block_scales, dequantizer

Function = Callable[..., Any]
Pair = tuple[int, int]

_LARGEST_SCORES = 2**28
"""Scores of attention that are held at once; the definition takes more of them in blocks."""
_BLOCK_OF_WEIGHT = 2**24
"""Elements of a quantized weight that are dequantized at a time."""
_LONG_CACHE, _BLOCK = 767, 256
"""Above this number of keys, one query goes through the valid keys of a cache block by block."""
_FEW_ROWS = 16
_MOST_PLACES = 9
"""The largest window whose elements are visited one by one; beyond, XLA's gradient is as fast."""


def compiled(*static: int) -> Callable[[Function], Function]:
    """Compile as one program; the arguments at these positions are constants."""
    return partial(jax.jit, static_argnums=static, inline=True)


def wide(x: Array) -> Array:
    """Return the array in the dtype that it is computed in: 16 bits as float32."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _product(x: Array, weight: Array, kind: Any) -> Array:
    contracted = ((x.ndim - 1,), (1,)), ((), ())
    precision = jax.lax.Precision.HIGHEST if x.dtype.itemsize > 2 else None
    return jax.lax.dot_general(x, weight, contracted, precision, preferred_element_type=kind)


@compiled()
def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    if bias is not None:
        return (_product(x, weight, wide(bias).dtype) + wide(bias)).astype(x.dtype)
    if x.size == x.shape[-1] or len(weight) == 1:  # on GPUs, XLA adds up a vector's in its dtype
        return _product(x, weight, wide(x).dtype).astype(x.dtype)
    return _product(x, weight, x.dtype)  # added up in float32; gradients' products stay 16-bit ones


@compiled()
def _quantized_linear(x: Array, weight: QuantizedWeight, bias: Array | None) -> Array:
    """Add up products with the columns at the same bits of bytes, which XLA unpacks fast."""
    rows, columns = weight.shape
    step = max(1, _BLOCK_OF_WEIGHT // columns)
    parts = []
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        arrays = {n: jax.lax.slice_in_dim(a, start, stop) for n, a in weight.arrays.items()}
        block = weight.with_arrays(arrays, (stop - start, columns))
        parts.append(_product_of_bits(wide(x), block))
    product = parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)
    return (product if bias is None else product + wide(bias)).astype(x.dtype)


def _product_of_bits(x: Array, weight: QuantizedWeight) -> Array:
    fields: list[tuple[Any, int, int]] = [(weight.codes, weight.low_bits, 0)]
    if weight.high is not None:
        fields.append((weight.high, weight.bits - weight.low_bits, weight.low_bits))
    count = max(8 // bits for _, bits, _ in fields)
    scales = block_scales(weight.scales, weight.super_scales, jnp.float32)[..., None]
    minimums = None
    if weight.minimums is not None:
        minimums = block_scales(weight.minimums, weight.super_minimums, jnp.float32)[..., None]
    total: Any = 0
    for at in range(count):
        codes: Any = 0
        for packed, bits, shift in fields:
            own = packed[:, at * bits // 8 :: count * bits // 8] >> (at * bits % 8)
            codes = codes | ((own & ((1 << bits) - 1)) << shift)
        if weight.table is None:
            numbers = codes.astype(jnp.float32) - weight.zero
        else:
            numbers = jnp.asarray(weight.table, jnp.float32)[codes]
        numbers = numbers.reshape(*weight.scales.shape, weight.block // count) * scales
        numbers = numbers if minimums is None else numbers + minimums
        own_x = x[..., at::count]
        total += _product(own_x, numbers.reshape(len(numbers), -1).astype(x.dtype), x.dtype)
    return total


def _compute_wide(function: Function, *static: int) -> Function:
    """Compile a function of an array, computed in 32 bits or more and rounded once."""
    return compiled(*static)(lambda x, *others: function(wide(x), *others).astype(x.dtype))


def _of_floats(function: Function) -> Function:
    """Return the function, which leaves arrays of other dtypes to the definition."""

    def run(x: Array, *others: Any) -> Any:
        is_float = known_dtype(x.dtype).kind == "float"
        return function(x, *others) if is_float else NotImplemented

    return run


def _variance(x: Array, axis: tuple[int, ...], keepdims: bool, correction: float) -> Array:
    total = jnp.sum(jnp.square(x - jnp.mean(x, axis, keepdims=True)), axis, keepdims=keepdims)
    return total / max(0.0, math.prod([x.shape[one] for one in axis]) - correction)


@compiled(1, 2)
def _sort(x: Array, axis: int, descending: bool) -> Array:
    # Sorted backwards and reversed, equal elements keep their order.
    result = jnp.sort(jnp.flip(x, axis) if descending else x, axis=axis, stable=True)
    return jnp.flip(result, axis) if descending else result


@compiled(1, 2)
def _argsort(x: Array, axis: int, descending: bool) -> Array:
    order = jnp.argsort(jnp.flip(x, axis) if descending else x, axis=axis, stable=True)
    order = x.shape[axis] - 1 - jnp.flip(order, axis) if descending else order
    return order.astype(jnp.int32)


_log_of_sum = _compute_wide(lambda x, axis, keep: jax.nn.logsumexp(x, axis, keepdims=keep), 1, 2)


@compiled(1)
def _pad(x: Array, widths: Sequence[tuple[int, int]], value: Any) -> Array:
    sides = [(before, after, 0) for before, after in widths]
    return jax.lax.pad(x, jnp.asarray(value).astype(x.dtype), sides)


@compiled(2)
def _rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    y = wide(x)
    squares = jnp.mean(y * y, -1, keepdims=True)
    return (y * jax.lax.rsqrt(squares + eps) * weight.astype(y.dtype)).astype(x.dtype)


@compiled(3)
def _layernorm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    y = wide(x)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    y = y if weight is None else y * weight.astype(y.dtype)
    return (y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)


@compiled(2, 3)
def _rotate(x: Array, positions: Array, theta: float, interleaved: bool) -> Array:
    size = x.shape[-1]
    steps = np.array([theta ** (-2 * pair / size) for pair in range(size // 2)], np.float32)
    angles = positions[..., None, :, None].astype(jnp.float32) * steps
    y = wide(x)
    cosine, sine = jnp.cos(angles).astype(y.dtype), jnp.sin(angles).astype(y.dtype)
    if interleaved:
        first, second = y[..., 0::2], y[..., 1::2]
    else:
        first, second = y[..., : size // 2], y[..., size // 2 :]
    turned = first * cosine - second * sine, second * cosine + first * sine
    if interleaved:
        return jnp.stack(turned, -1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, -1).astype(x.dtype)


def _attention(
    q: Array, k: Array, v: Array, causal: bool, scale: float | None, mask: Array | None,
    window: int | None, lengths: Array | None, soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:  # fmt: skip
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if not 0 < scores <= _LARGEST_SCORES:
        return NotImplemented
    if scale is not None and not isinstance(scale, int | float):
        return NotImplemented  # an array, which cannot be a constant of compiled code
    if q.shape[2] == 1 and mask is None and lengths is not None and k.shape[2] > _LONG_CACHE:
        return _one_token((scale, window, soft_cap), q, k, v, lengths, sinks)
    return _attend(q, k, v, mask, lengths, sinks, causal, scale, window, soft_cap)


@compiled(6, 7, 8, 9)
def _attend(
    q: Array, k: Array, v: Array, mask: Array | None, lengths: Array | None, sinks: Array | None,
    causal: bool, scale: float | None, window: int | None, soft_cap: float | None,
) -> Array:  # fmt: skip
    """Attend with the heads of one key head as rows of one product, so that no key is copied."""
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, queries, size)
    product = _product_like(q)
    valid = None if lengths is None else _valid(lengths, keys)
    mask = None if mask is None else _grouped_mask(mask, kv_heads)
    shown = visible_keys(jnp.arange, queries, keys, valid, False, None, mask)
    if shown is not None:  # a weight of 0 is not enough: times NaN it is NaN
        some = shown.any((2, 3))[..., None]
        k, v = jnp.where(some, k, 0), jnp.where(some, v, 0)
    scores = _scores(product, grouped, k) * (size**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = visible_keys(jnp.arange, queries, keys, valid, causal, window, mask)
    if visible is None:
        weights = _softmax_beside(scores, sinks)
    else:
        some = visible.any(-1, keepdims=True)
        # A query without visible keys sees all, and its weights are zeroed: gradients meet no NaN.
        weights = _softmax_beside(jnp.where(visible | ~some, scores, -jnp.inf), sinks)
        weights = jnp.where(some, weights, 0)
    result = product("bghqk,bgks->bghqs", weights.astype(v.dtype), v)
    return result.reshape(batch, heads, queries, v.shape[-1]).astype(q.dtype)


def _product_like(q: Array) -> Function:
    """Return an einsum that adds up in 32 bits or more."""
    precision = jax.lax.Precision.HIGHEST if q.dtype.itemsize > 2 else None
    return partial(jnp.einsum, precision=precision, preferred_element_type=wide(q).dtype)


def _scores(product: Function, q: Array, k: Array) -> Array:
    """Return the score of each query with each key; for few queries, XLA wants the keys first."""
    if q.shape[2] * q.shape[3] > _FEW_ROWS:
        return product("bghqs,bgks->bghqk", q, k)
    return jnp.moveaxis(product("bgks,bghqs->bgkhq", k, q), 2, -1)


@compiled(0)
def _one_token(options: Any, *arrays: Array) -> Array:
    """Attend with one query to a long cache; `options` are scale, window and soft cap."""
    ways = [partial(way, options) for way in (_by_block, _all_keys)]
    return jax.lax.platform_dependent(*arrays, cpu=ways[0], default=ways[1])


def _all_keys(options: Any, q: Array, k: Array, v: Array, *others: Array | None) -> Array:
    return _attend(q, k, v, None, *others, options[1] is not None, *options)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_block(
    options: Any, q: Array, k: Array, v: Array, lengths: Array | None, sinks: Array | None
) -> Array:
    """Attend to the valid keys of a cache by block: online softmax (Milakov, Gimelshein 2018)."""
    scale, window, soft_cap = options
    (batch, heads, _, size), (_, kv_heads, keys, _) = q.shape, k.shape
    product, kind = _product_like(q), wide(q).dtype
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, 1, size)
    valid = _valid(lengths, keys)
    first = jnp.zeros_like(valid) if window is None else jnp.maximum(valid - window, 0)
    factor = size**-0.5 if scale is None else scale

    def step(state: Array) -> Any:
        at, largest, total, gathered = state
        begin = jnp.minimum(at, keys - _BLOCK)  # the last block may reach into the one before
        own, values = (jax.lax.dynamic_slice_in_dim(x, begin, _BLOCK, 2) for x in (k, v))
        key = begin + jnp.arange(_BLOCK)
        visible = (key < valid) & (key >= jnp.maximum(first, at))
        scores = _scores(product, grouped, own) * factor
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, -jnp.inf)
        larger = jnp.maximum(largest, scores.max(-1, keepdims=True))
        base = jnp.where(larger == -jnp.inf, 0, larger)
        weights, fade = jnp.exp(scores - base), jnp.exp(largest - base)
        values = jnp.where(visible[:, :, 0, 0, :, None], values, 0)
        added = product("bghqk,bgks->bghqs", weights.astype(v.dtype), values)
        total = total * fade + weights.sum(-1, keepdims=True)
        return at + _BLOCK, larger, total, gathered * fade + added

    shape = (batch, kv_heads, heads // kv_heads, 1, 1)
    largest, total = jnp.full(shape, -jnp.inf, kind), jnp.zeros(shape, kind)
    if sinks is not None:
        largest, total = largest.at[:].set(sinks.astype(kind).reshape(1, *shape[1:])), total + 1
    gathered = jnp.zeros((*shape[:4], v.shape[3]), kind)
    state = jnp.min(first) // _BLOCK * _BLOCK, largest, total, gathered
    last = jnp.max(valid)
    _, _, total, gathered = jax.lax.while_loop(lambda now: now[0] < last, step, state)
    result = gathered / jnp.where(total == 0, 1, total)
    return result.reshape(batch, heads, 1, v.shape[3]).astype(q.dtype)


_by_block.defjvp(lambda given, values, changes: jax.jvp(partial(_all_keys, given), values, changes))


def _softmax_beside(scores: Array, sinks: Array | None) -> Array:
    """Return the softmax of scores (batch, kv heads, heads of each, queries, keys) and sinks."""
    if sinks is None:
        return jax.nn.softmax(scores, -1)
    beside = sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), beside))
    weights = jnp.exp(scores - largest)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(beside - largest))


def _grouped_mask(mask: Array, kv_heads: int) -> Array:
    """Return the mask on five axes: batch, kv heads, heads of each, queries, keys."""
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    split = (1, 1) if mask.shape[1] == 1 else (kv_heads, mask.shape[1] // kv_heads)
    return mask.reshape(mask.shape[0], *split, *mask.shape[2:])


# Experts. No shape may depend on the choices. A few are computed one by one. Many are sorted by
# expert and cut into blocks of one expert each, the last one padded: one loop over all blocks.


def _experts(
    x: Array, gate_up: Array, down: Array, chosen: Array, weights: Array,
    gate_up_bias: Array | None, down_bias: Array | None, *activation: Any,
) -> Array:  # fmt: skip
    if not (x.size and chosen.size and down.size):
        return NotImplemented
    return _mixture(x, (gate_up, down, gate_up_bias, down_bias), chosen, weights, activation)


@compiled(4)
def _mixture(x: Array, stacks: Any, chosen: Array, weights: Array, activation: Any) -> Array:
    (tokens, k), count = chosen.shape, len(stacks[0])
    between = partial(_gate, *activation)
    narrow = chosen.astype(jnp.int32) if chosen.dtype.itemsize < 4 else chosen
    inside = (narrow >= 0) & (narrow < count)
    numbers = jnp.where(inside, narrow, count).astype(jnp.int32).reshape(-1)
    if tokens * k <= count:
        outputs = _each(stacks, numbers, jnp.repeat(x, k, 0)[:, None], between)
    else:
        outputs = _in_blocks(x, stacks, numbers, between)
    # Zeroed before they are multiplied: the gradient of 0 × NaN is NaN.
    own = jnp.where(inside[..., None], outputs.reshape(tokens, k, -1), 0)
    return (own * jnp.where(inside, weights, 0)[..., None]).sum(1).astype(x.dtype)


def _in_blocks(x: Array, stacks: Array, numbers: Array, between: Function) -> Array:
    """Apply the expert of each choice to its token; the number of experts means none."""
    tokens, hidden = x.shape
    plan = expert_blocks(jnp, numbers, len(stacks[0]), tokens)
    inputs = x.at[plan.token].get(mode="fill", fill_value=0)
    outputs = _each(stacks, plan.expert, inputs.reshape(-1, plan.rows, hidden), between)
    return outputs.reshape(-1, hidden).at[plan.row].get(mode="fill", fill_value=0)


def _each(stacks: Array, numbers: Array, blocks: Array, between: Function) -> Array:
    """Apply the expert of its number to each of the blocks (n, rows, hidden), in one loop."""

    def step(_: None, block: Array) -> Any:
        at, rows = jnp.minimum(block[0], len(stacks[0]) - 1), block[1]
        matrices = [s if s is None else jax.lax.dynamic_slice_in_dim(s, at, 1) for s in stacks]
        return None, _through(matrices, rows[None], between)[0]

    return jax.lax.scan(step, None, (numbers, blocks))[1]


def _through(matrices: Array, rows: Array, between: Function) -> Array:
    """Apply n experts to rows (n, rows, hidden)."""
    gate_up, down, bias, last_bias = matrices
    product, kind = partial(_product_like(rows), "nri,noi->nro"), wide(rows).dtype
    both = product(rows, gate_up)
    both = both if bias is None else both + bias.astype(kind)[:, None]
    inner = between(*jnp.split(both, 2, -1)).astype(rows.dtype)
    outputs = product(inner, down)
    return outputs if last_bias is None else outputs + last_bias.astype(kind)[:, None]


def _gate(activation: str, alpha: float, limit: float, gate: Array, up: Array) -> Array:
    if activation == "clipped_swiglu":
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
    if activation == "swiglu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=activation == "geglu_tanh") * up


def _valid(lengths: Array, keys: int) -> Array:
    narrow = lengths.astype(jnp.int32) if lengths.dtype.itemsize < 4 else lengths
    return jnp.clip(narrow, 0, keys).astype(jnp.int32).reshape(-1, 1, 1, 1, 1)


@compiled()
def _cross_entropy(logits: Array, targets: Array) -> Array:
    logarithms = jax.nn.log_softmax(wide(logits), -1)
    return -jnp.mean(PRIMITIVES.take_along_axis(logarithms, targets[..., None], -1))


def _convolve(x: Array, weight: Array, bias: Array | None, *window: Any, **options: Any) -> Array:
    # In float32: XLA and cuDNN round intermediate results to 16 bits.
    result = jax.lax.conv_general_dilated(
        wide(x), wide(weight), *window, precision=jax.lax.Precision.HIGHEST, **options
    )
    return (result if bias is None else result + wide(bias)[:, None, None]).astype(x.dtype)


@compiled(3, 4)
def _conv2d(x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
    return _convolve(x, weight, bias, stride, [(size, size) for size in padding])


@compiled(3, 4, 5)
def _conv_transpose2d(
    x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair, more: Pair
) -> Array:
    sides = [size - 1 - cut for size, cut in zip(weight.shape[2:], padding, strict=True)]
    around = [(size, size + extra) for size, extra in zip(sides, more, strict=True)]
    turned = jnp.flip(weight, (2, 3)).swapaxes(0, 1)
    return _convolve(x, turned, bias, (1, 1), around, lhs_dilation=stride)


def _scan(x: Array, states: Array, step: Function, last: bool) -> Any:
    """Return the first state after each step over (batch, time, …), or after the last one."""

    def both(states: Array, x: Array) -> Any:
        states = step(states, x)
        return states, None if last else states[0]

    states, outputs = jax.lax.scan(both, states, jnp.swapaxes(x, 0, 1))
    return states[0] if last else jnp.swapaxes(outputs, 0, 1)


@_of_floats
@compiled(1, 2)
def _avg_pool2d(x: Array, size: Pair, stride: Pair | None) -> Array:
    window, step = (1, 1, *size), (1, 1, *(size if stride is None else stride))
    total = jax.lax.reduce_window(wide(x), 0.0, jax.lax.add, window, step, "VALID")
    return (total / (size[0] * size[1])).astype(x.dtype)


# For the gradient, XLA finds the largest again and scatters. Where windows do not overlap, it is a
# plain choice: the window's where the element is its first largest, else zero. The channels are
# last, where XLA puts them for convolutions, so that neighbours are done together.


@compiled(1, 2)
def _max_pool2d(x: Array, size: Pair, stride: Pair) -> Array:
    """Return the largest of each window, NaN above all; the first of equals has the gradient."""
    if size == stride and math.prod(size) <= _MOST_PLACES:
        return _largest_of_disjoint(x, size)
    return _window_max(x, size, stride)


def _window_max(x: Array, size: Pair, stride: Pair) -> Array:
    window, step = (1, 1, *size), (1, 1, *stride)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, step, "VALID")


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest_of_disjoint(x: Array, size: Pair) -> Array:
    return _window_max(x, size, size)


def _largest_and_change(size: Pair, values: tuple[Any], changes: tuple[Any]) -> tuple[Array, Array]:
    windows, moving = (_channels_last(x, size) for (x,) in (values, changes))
    places = [windows[:, :, down, :, along] for down, along in np.ndindex(size)]
    largest = reduce(jnp.maximum, places)  # found again, as part of the loop that compares with it
    first = jnp.full(largest.shape, len(places), jnp.uint8)
    for number, place in reversed(list(enumerate(places))):
        is_largest = (place == largest) | jnp.isnan(place)
        first = jnp.where(is_largest, jnp.uint8(number), first)
    numbers = np.arange(len(places), dtype=np.uint8).reshape(size[0], 1, size[1], 1)
    chosen = first[:, :, None, :, None] == numbers
    change = jnp.where(chosen, moving, 0).sum((2, 4))
    # The op itself, not `largest`: so a second derivative follows the same rule.
    return _largest_of_disjoint(*values, size), jnp.moveaxis(change, -1, 1)


_largest_of_disjoint.defjvp(_largest_and_change)


def _channels_last(x: Array, size: Pair) -> Array:
    """Return the windows as (batch, down, height of one, along, width of one, channels)."""
    batch, channels, height, width = x.shape
    down, along = height // size[0], width // size[1]
    covered = jnp.moveaxis(x, 1, -1)[:, : down * size[0], : along * size[1]]
    return covered.reshape(batch, down, size[0], along, size[1], channels)


def _of_lists(update: Function, count: int) -> Function:
    """Give the update its sequences as lists: JAX compiles again for each kind of sequence."""

    def run(*arguments: Any) -> Any:
        lists = (None if arrays is None else list(arrays) for arrays in arguments[:count])
        return update(*lists, *arguments[count:])

    return run


def _update_each(update: Function, *lists: list[Array] | None) -> tuple[list[Array] | None, ...]:
    """Return parameters and states after `update(full, parameter, gradient, *states)`."""
    results = []
    given = [arrays for arrays in lists if arrays is not None]
    for parameter, gradient, *states in zip(*given, strict=True):
        kind = parameter.dtype if parameter.dtype == jnp.float64 else jnp.float32
        full = partial(jnp.asarray, dtype=kind)
        new = update(full, full(parameter), full(gradient), *map(full, states))
        pairs = zip(new, (parameter, *states), strict=True)
        results.append([array.astype(old.dtype) for array, old in pairs])
    columns = iter([list(column) for column in zip(*results, strict=True)])
    return tuple(None if arrays is None else next(columns) for arrays in (lists[0], *lists[2:]))


@compiled(4, 5, 6)
def _sgd(
    parameters: Array, gradients: Array, velocities: Array,
    rate: Any, momentum: float, decay: float, nesterov: bool,
) -> Any:  # fmt: skip
    def update(full: Function, p: Array, step: Array, velocity: Array = None) -> tuple[Array, ...]:
        step = step + decay * p if decay else step
        if velocity is None:
            return (p - full(rate) * step,)
        velocity = momentum * velocity + step
        step = step + momentum * velocity if nesterov else velocity
        return p - full(rate) * step, velocity

    return _update_each(update, parameters, gradients, velocities)


@compiled(6, 7, 8, 9, 10)
def _adam(
    parameters: Array, gradients: Array, means: Array, squares: Array, step: Array,
    rate: Any, beta1: float, beta2: float, eps: float, decay: float, decoupled: bool,
) -> Any:  # fmt: skip
    def update(full: Function, p: Array, g: Array, mean: Array, square: Array) -> tuple[Array, ...]:
        pace, count = full(rate), full(step)
        g = g if decoupled else g + decay * p
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * g * g
        mean_hat = mean / _bias_correction(beta1, count)
        change = mean_hat / (jnp.sqrt(square / _bias_correction(beta2, count)) + eps)
        p = p - pace * decay * p if decoupled else p
        return p - pace * change, mean, square

    return _update_each(update, parameters, gradients, means, squares)


@compiled(4, 5, 6)
def _lion(
    parameters: Array, gradients: Array, means: Array,
    rate: Any, beta1: float, beta2: float, decay: float,
) -> Any:  # fmt: skip
    def update(full: Function, p: Array, g: Array, mean: Array) -> tuple[Array, ...]:
        direction = jnp.sign(beta1 * mean + (1 - beta1) * g)
        return p - full(rate) * (direction + decay * p), beta2 * mean + (1 - beta2) * g

    return _update_each(update, parameters, gradients, means)


def _bias_correction(beta: float, count: Any) -> Array:
    """Return `1 - beta**count` without cancellation."""
    return -jnp.expm1(count * math.log(beta)) if beta else jnp.ones_like(count)


_nan_to_infinity = partial(jnp.nan_to_num, nan=jnp.inf, posinf=jnp.inf, neginf=-jnp.inf)

FUSED: Mapping[str, Function] = {
    "linear": _linear,
    "any op": lambda op, numbers: compiled(*numbers)(op),
    "relu": compiled()(jax.nn.relu),
    "silu": _compute_wide(jax.nn.silu),
    "gelu": _compute_wide(jax.nn.gelu, 1),
    "swiglu": _compute_wide(lambda gate, up: jax.nn.silu(gate) * wide(up)),
    "softmax": _compute_wide(jax.nn.softmax, 1),
    "log_softmax": _compute_wide(jax.nn.log_softmax, 1),
    "mean": _of_floats(
        compiled(1, 2)(lambda x, axis, keepdims: jnp.mean(x, axis, keepdims=keepdims))
    ),
    "var": _of_floats(_compute_wide(_variance, 1, 2, 3)),
    "std": _of_floats(_compute_wide(lambda *given: jnp.sqrt(_variance(*given)), 1, 2, 3)),
    "sort": _sort,
    "argsort": _argsort,
    "argmin": compiled(1)(lambda x, axis: jax.lax.argmin(x, axis, jnp.int32)),
    "prod": _compute_wide(lambda x, axis, keep: jnp.prod(x, axis, keepdims=keep), 1, 2),
    "any": compiled(1, 2)(lambda x, axis, keepdims: jnp.any(x, axis, keepdims=keepdims)),
    "all": compiled(1, 2)(lambda x, axis, keepdims: jnp.all(x, axis, keepdims=keepdims)),
    "logsumexp": lambda x, *axes: _log_of_sum(x, *axes) if x.size else NotImplemented,
    "cumulative_prod": _compute_wide(jnp.cumprod, 1),
    "cumulative_sum": _compute_wide(jnp.cumsum, 1),
    "searchsorted": compiled(2)(
        lambda x1, x2, left: jnp.searchsorted(
            _nan_to_infinity(x1), _nan_to_infinity(x2), side="left" if left else "right"
        ).astype(jnp.int32)
    ),
    "clip": compiled()(lambda x, low, high: jnp.clip(x, low, high)),
    "diff": compiled(1, 2)(lambda x, axis, times: jnp.diff(wide(x), times, axis).astype(x.dtype)),
    "round": jnp.round,
    "pad": _pad,
    "stack": _of_lists(compiled(1)(jnp.stack), 1),
    "flip": compiled(1)(jnp.flip),
    "leaky_relu": _compute_wide(jax.nn.leaky_relu, 1),
    "argmax": compiled(1)(PRIMITIVES.argmax),
    "quantized_linear": _quantized_linear,
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "rope": lambda x, positions, theta, interleaved, scaling, *_: (
        _rotate(x, positions, theta, interleaved) if scaling is None else NotImplemented
    ),
    "attention": _attention,
    "experts": _experts,
    "embedding": compiled()(lambda weight, ids: PRIMITIVES.take(weight, ids, 0)),
    "cross_entropy": _cross_entropy,
    "mean_squared_error": compiled()(lambda x, y: jnp.mean(jnp.square(wide(x) - wide(y)))),
    "conv2d": _conv2d,
    "conv_transpose2d": _conv_transpose2d,
    "scan": _scan,
    "max_pool2d": _of_floats(lambda x, size, stride: _max_pool2d(x, size, stride or size)),
    "avg_pool2d": _avg_pool2d,
    "update_sgd": _of_lists(_sgd, 3),
    "update_adam": _of_lists(_adam, 4),
    "update_lion": _of_lists(_lion, 3),
    "dequantize": jax.jit(
        dequantizer(
            jnp.stack,
            lambda x: x.astype(jnp.float32),
            lambda table, codes: jnp.asarray(table, jnp.float32)[codes],
        ),
        inline=True,
    ),
}
