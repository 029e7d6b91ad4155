"""Correct results of each op, in float64 NumPy: the one reference for every engine.

It is written from the ops' definitions and calls none of them; optimizers follow their papers.
Arrays come in as float64, int64 or bool; no function changes what it is given. What infinities and
NaN lead to follows from the arithmetic of IEEE 754, so these functions run with NumPy's warnings
off:

>>> import numpy
>>> call("softmax", numpy.array([0.0, numpy.inf]))
array([nan, nan])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anydevice._core.dtypes import as_dtype
from anydevice._core.quantized import SUPER_BLOCK, QuantizedWeight
from anydevice.errors import ConfigurationError

Array = np.ndarray[Any, Any]
Arrays = Sequence[Array]
Axis = int | Sequence[int] | None
Pair = int | tuple[int, int]

_ERF = np.vectorize(math.erf, otypes=[np.float64])


def call(op: str, *arguments: Any, **options: Any) -> Any:
    """Compute an op on wide arrays, or raise `ConfigurationError` for a name that no op has."""
    if op not in REFERENCES:
        raise ConfigurationError(
            f"there is no op {op!r}; the ops are {', '.join(sorted(REFERENCES))}", "op"
        )
    with np.errstate(all="ignore"):
        return REFERENCES[op](*arguments, **options)


# One array


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _gelu(x: Array, approximate: bool = False) -> Array:
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + np.tanh(inner))
    return 0.5 * x * (1 + _ERF(x / math.sqrt(2)))


def _floor_divide(a: Array, b: Array) -> Array:
    """Divide as the standard does, which has an infinity for one by a number."""
    whole = np.floor_divide(a, b)
    return whole if whole.dtype.kind == "i" else np.where(np.isinf(a), a / b, whole)


def _shift(function: Callable[..., Any]) -> Callable[..., Array]:
    """Return the shift for int32: 32 places and more, or fewer than 0, leave no bits."""
    return lambda a, b: function(a, np.where((b < 0) | (b > 31), 32, b)).astype(np.int32)


# Along axes


def _along(function: Callable[..., Array]) -> Callable[..., Array]:
    def reduce(x: Array, axis: Axis = None, keepdims: bool = False, **options: Any) -> Array:
        axes = axis if axis is None or isinstance(axis, int) else tuple(axis)
        return function(x, axis=axes, keepdims=keepdims, **options)

    return reduce


def _spread(x: Array, axis: Axis = None, keepdims: bool = False, correction: float = 0.0) -> Array:
    axes = tuple(range(x.ndim)) if axis is None else axis
    count = np.prod([x.shape[one] for one in np.atleast_1d(axes)])
    off = x - x.sum(axes, keepdims=True) / count
    return (off**2).sum(axes, keepdims=keepdims) / np.maximum(count - correction, 0)


@_along
def _logsumexp(x: Array, axis: Any, keepdims: bool) -> Array:
    largest = x.max(axis, keepdims=True, initial=-np.inf)
    middle = np.where(np.isfinite(largest), largest, 0)
    total = np.log(np.exp(x - middle).sum(axis, keepdims=True)) + middle
    return total if keepdims else total.sum(axis)  # one element each


@_along
def _vector_norm(x: Array, axis: Any, keepdims: bool, ord: float = 2) -> Array:  # noqa: A002
    sizes = np.abs(x)
    if ord == 0:
        return (sizes != 0).sum(axis, keepdims=keepdims).astype(float)
    if abs(ord) == np.inf:
        return (np.max if ord > 0 else np.min)(sizes, axis=axis, keepdims=keepdims)
    return (sizes**ord).sum(axis, keepdims=keepdims) ** (1 / ord)


def _running(function: Callable[..., Array], start: int) -> Callable[..., Array]:
    def run(x: Array, axis: int = -1, include_initial: bool = False) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (int(include_initial), 0)
        return np.pad(function(x, axis), widths, constant_values=start)

    return run


def _argsort(x: Array, axis: int = -1, descending: bool = False) -> Array:
    """Sort by size and then by index; NaN is larger than all."""
    rows = np.moveaxis(x, axis, -1)
    sizes, sign = np.where(np.isnan(rows), 0, rows), -1 if descending else 1
    keys = (
        np.arange(rows.shape[-1]) + 0 * sizes,
        sign * sizes.astype(float),
        sign * np.isnan(rows),
    )
    return np.moveaxis(np.lexsort(keys, axis=-1), -1, axis)


def _top_k(x: Array, k: int) -> tuple[Array, Array]:
    # By size, NaN first; equal elements stay in their order.
    order = np.argsort(-x, axis=-1, kind="stable")
    undefined = np.take_along_axis(np.isnan(x), order, -1)
    first = np.argsort(~undefined, axis=-1, kind="stable")
    chosen = np.take_along_axis(order, first, -1)[..., :k]
    return np.take_along_axis(x, chosen, -1), chosen


# Shapes and dtypes


def _take(x: Array, indices: Array, axis: int = 0) -> Array:
    axis %= x.ndim
    size = x.shape[axis]
    inside = (indices >= 0) & (indices < size)
    missing = np.nan if x.dtype.kind == "f" else 0
    before, after = (1,) * axis, (1,) * (x.ndim - axis - 1)
    shape = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
    if size == 0:
        return np.full(shape, missing, x.dtype)
    taken = np.take(x, np.where(inside, indices, 0), axis)
    return np.where(inside.reshape(before + indices.shape + after), taken, missing).astype(x.dtype)


def _take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    axis %= x.ndim
    others = [1 if at == axis else n for at, n in enumerate(x.shape)]
    numbers = np.broadcast_to(indices, np.broadcast_shapes(indices.shape, others))
    missing = np.nan if x.dtype.kind == "f" else 0
    if not x.shape[axis]:
        return np.full(numbers.shape, missing, x.dtype)
    inside = (numbers >= 0) & (numbers < x.shape[axis])
    taken = np.take_along_axis(x, np.where(inside, numbers, 0), axis)
    return np.where(inside, taken, missing).astype(x.dtype)


def _slice_axis(x: Array, axis: int, start: int, stop: int, step: int = 1) -> Array:
    return np.moveaxis(np.moveaxis(x, axis, 0)[start:stop:step], 0, axis)


def _one_hot(x: Array, num_classes: int, dtype: Any = "float32") -> Array:
    result = np.zeros((*x.shape, num_classes))
    for at in np.ndindex(x.shape):
        if 0 <= x[at] < num_classes:
            result[(*at, x[at])] = 1
    return result


def _arange(
    start: float, stop: float | None = None, step: float = 1, *, like: Array, dtype: Any = None
) -> Array:
    first, last = (0, start) if stop is None else (start, stop)
    return first + np.arange(max(0, math.ceil((last - first) / step))) * step


def _clip(x: Array, min: Any = None, max: Any = None) -> Array:  # noqa: A002
    raised = x if min is None else np.maximum(x, min)
    return raised if max is None else np.minimum(raised, max)


def _astype(x: Array, dtype: Any) -> Array:
    """Return the same numbers; floating-point numbers are truncated to integers."""
    row = as_dtype(dtype)
    if row.kind == "bool":
        return x != 0
    if row.kind in ("int", "uint"):
        return np.trunc(x).astype(np.int64)
    return np.asarray(x, np.float64)


# Layers


def _softmax(x: Array, axis: int = -1) -> Array:
    if not x.size:
        return x
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _log_softmax(x: Array, axis: int = -1) -> Array:
    if not x.size:
        return x
    lowered = x - x.max(axis, keepdims=True)
    return lowered - np.log(np.exp(lowered).sum(axis, keepdims=True))


def _rmsnorm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _layernorm(x: Array, weight: Array | None, bias: Array | None, eps: float = 1e-5) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    scaled = normed if weight is None else normed * weight
    return scaled if bias is None else scaled + bias


# Rotary positions


def frequencies(
    size: int, theta: float, scaling: Mapping[str, Any] | None, length: int = 0
) -> tuple[Array, float]:
    """Return the angle by which each pair of a head turns per position, and a factor.

    The factor multiplies cosines and sines; it is 1 except for YaRN and LongRoPE. `scaling` is
    spelled as the `rope_scaling` of a model's configuration. `length` counts the tokens.
    """
    plain = np.array([theta ** (-2 * pair / size) for pair in range(size // 2)])
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return np.array([_llama3(frequency, scaling) for frequency in plain]), 1.0
    if kind == "yarn":
        return _yarn(plain, size, theta, scaling), _yarn_factor(scaling)
    context = scaling["original_max_position_embeddings"]
    if kind == "dynamic":
        grown = scaling["factor"] * max(length, context) / context - (scaling["factor"] - 1)
        base = theta * grown ** (size / (size - 2))
        return np.array([base ** (-2 * pair / size) for pair in range(size // 2)]), 1.0
    if kind == "longrope":
        factors = scaling["long_factor" if length > context else "short_factor"]
        default = math.sqrt(1 + math.log(scaling.get("factor", 1)) / math.log(context))
        return plain / np.array(factors), scaling.get("attention_factor", default)
    raise ValueError(f"the reference knows no rope_type {kind!r}")


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(share * frequency + (1 - share) * frequency / scaling["factor"])


def _yarn(plain: Array, size: int, theta: float, scaling: Mapping[str, Any]) -> Array:
    context = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    return plain * (1 - slowed) + plain / scaling["factor"] * slowed


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    def grown(by: float) -> float:
        factor = float(scaling["factor"])
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1)


def halves(size: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the slices of the first and the second elements of each pair of a head."""
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, size // 2), slice(size // 2, None)


def rotary_angles(
    x: Array, positions: Array, theta: float, scaling: Mapping[str, Any] | None, length: Any
) -> tuple[Array, float]:
    """Return the angles, (batch, 1, tokens, size / 2), and a factor of cosines and sines."""
    rows = np.broadcast_to(positions, (x.shape[0], x.shape[2]))
    lengths = rows.max(-1, initial=-1) + 1 if length is None else length
    columns = [
        frequencies(x.shape[-1], theta, scaling, int(one))
        for one in np.broadcast_to(lengths, x.shape[:1])
    ]
    turns = np.array([turn for turn, _ in columns])
    return rows[:, None, :, None] * turns[:, None, None], columns[0][1]


def _rope(
    x: Array,
    positions: Array,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    length: Any = None,
) -> Array:
    angles, factor = rotary_angles(x, positions, theta, scaling, length)
    cosines, sines = np.cos(angles) * factor, np.sin(angles) * factor
    first, second = halves(x.shape[-1], interleaved)
    turned = np.empty_like(x)
    turned[..., first] = x[..., first] * cosines - x[..., second] * sines
    turned[..., second] = x[..., second] * cosines + x[..., first] * sines
    return turned


# Attention


def seen_keys(
    q: Array,
    k: Array,
    causal: bool = False,
    mask: Array | None = None,
    window: int | None = None,
    lengths: Array | None = None,
) -> Array:
    """Return which key each query sees: bool, (batch, heads, queries, keys)."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    visible = np.ones((batch, heads, queries, keys), bool)
    for b in range(batch):
        valid = keys if lengths is None else min(max(int(lengths[b]), 0), keys)
        key = np.arange(keys)[None, :]
        newest = valid - queries + np.arange(queries)[:, None]
        visible[b] &= key < valid
        if causal:
            visible[b] &= key <= newest
        if window is not None:
            visible[b] &= key > newest - window
    if mask is not None:
        shaped = mask[:, None, None, :] if mask.shape == (batch, keys) else mask
        visible &= np.broadcast_to(shaped, visible.shape)
    return visible


def _attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: Array | None = None,
    window: int | None = None,
    lengths: Array | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    keys = seen_keys(q, k, causal, mask, window, lengths)
    result = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(q.shape[0]):
        for h in range(k.shape[1]):  # the queries of all heads that share these keys
            own = slice(h * group, (h + 1) * group)
            visible = keys[b, own].reshape(-1, k.shape[2])
            some = visible.any(-1)  # a query without visible keys stays zero
            used = visible.any(0)  # a key that no query sees may hold anything
            if some.any():
                scores = q[b, own].reshape(-1, q.shape[3])[some] @ k[b, h, used].T * factor
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                scores[~visible[some][:, used]] = -np.inf
                extra = np.full(group, -np.inf) if sinks is None else sinks[own]
                beside = np.repeat(extra, q.shape[2])[some, None]
                weights = _softmax(np.concatenate([scores, beside], 1))[:, :-1]
                averaged = np.zeros((len(visible), v.shape[3]))
                averaged[some] = weights @ v[b, h, used]
                result[b, own] = averaged.reshape(group, q.shape[2], v.shape[3])
    return result


def _cache_write(cache: Array, new: Array, positions: Array) -> Array:
    written = cache.copy()
    rows = np.broadcast_to(positions, (new.shape[0], new.shape[2]))
    for b in range(new.shape[0]):
        for t in range(new.shape[2]):
            if 0 <= rows[b, t] < cache.shape[2]:
                written[b, :, rows[b, t]] = new[b, :, t]
    return written


# Experts


def gated(
    gate: Array, up: Array, activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0
) -> Array:
    """Apply the gate between the two products of an expert."""
    if activation == "clipped_swiglu":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * _sigmoid(alpha * gate) * (up + 1)
    if activation == "swiglu":
        return _silu(gate) * up
    return _gelu(gate, activation == "geglu_tanh") * up


def _experts(
    x: Array,
    gate_up: Array,
    down: Array,
    chosen: Array,
    weights: Array,
    *,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Array:
    result = np.zeros(x.shape)
    inner = down.shape[2]
    for token, place in np.ndindex(chosen.shape):
        expert = chosen[token, place]
        if 0 <= expert < len(down):
            both = gate_up[expert] @ x[token]
            both = both if gate_up_bias is None else both + gate_up_bias[expert]
            output = down[expert] @ gated(both[:inner], both[inner:], activation, alpha, limit)
            output = output if down_bias is None else output + down_bias[expert]
            result[token] += weights[token, place] * output
    return result


# Losses


def _cross_entropy(logits: Array, targets: Array) -> Array:
    classes = logits.shape[-1]
    logarithms = _log_softmax(logits).reshape(-1, classes)
    wanted = targets.reshape(-1)
    inside = (wanted >= 0) & (wanted < classes)
    picked = logarithms[np.arange(len(wanted)), np.where(inside, wanted, 0)]
    return np.asarray(-np.where(inside, picked, np.nan).mean())


# Images


def _both(size: Pair) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _windows(x: Array, size: Pair, stride: Pair) -> list[Array]:
    """For each place in a window, the elements of all windows there: (batch, channels, y, x)."""
    (high, wide), (down, right) = _both(size), _both(stride)
    rows = (x.shape[2] - high) // down + 1
    columns = (x.shape[3] - wide) // right + 1
    return [
        x[:, :, i : i + down * rows : down, j : j + right * columns : right]
        for i in range(high)
        for j in range(wide)
    ]


def _conv2d(
    x: Array, weight: Array, bias: Array | None = None, stride: Pair = 1, padding: Pair = 0
) -> Array:
    down, right = _both(padding)
    padded = np.pad(x, ((0, 0), (0, 0), (down, down), (right, right)))
    places = _windows(padded, weight.shape[2:], stride)
    weights = np.moveaxis(weight.reshape(*weight.shape[:2], -1), 2, 0)
    pairs = zip(places, weights, strict=True)
    result = sum(np.einsum("bchw,oc->bohw", place, weight) for place, weight in pairs)
    return result if bias is None else result + bias[:, None, None]


def _conv_transpose2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
) -> Array:
    (down, right), cut, more = _both(stride), _both(padding), _both(output_padding)
    (high, wide), (rows, columns) = weight.shape[2:], x.shape[2:]
    sizes = (rows - 1) * down + high + more[0], (columns - 1) * right + wide + more[1]
    result = np.zeros((x.shape[0], weight.shape[1], *sizes))
    for i, j in np.ndindex(high, wide):
        there = result[:, :, i : i + down * rows : down, j : j + right * columns : right]
        there[:, :, :rows, :columns] += np.einsum("bchw,co->bohw", x, weight[:, :, i, j])
    cropped = result[:, :, cut[0] : sizes[0] - cut[0], cut[1] : sizes[1] - cut[1]]
    return cropped if bias is None else cropped + bias[:, None, None]


def _pool(reduce: Callable[..., Array]) -> Callable[..., Array]:
    def pooled(x: Array, size: Pair, stride: Pair | None = None) -> Array:
        return reduce(_windows(x, size, size if stride is None else stride), axis=0)

    return pooled


# Optimizers


def _sgd(
    parameters: Arrays,
    gradients: Arrays,
    velocities: Arrays | None,
    *,
    rate: float,
    momentum: float = 0.0,
    decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[list[Array], list[Array] | None]:
    steps = [g + decay * p for p, g in zip(parameters, gradients, strict=True)]
    faster = None
    if velocities is not None:
        faster = [momentum * v + step for v, step in zip(velocities, steps, strict=True)]
        ahead = [step + momentum * v for step, v in zip(steps, faster, strict=True)]
        steps = ahead if nesterov else faster
    return [p - rate * step for p, step in zip(parameters, steps, strict=True)], faster


def _adam(
    parameters: Arrays,
    gradients: Arrays,
    means: Arrays,
    squares: Arrays,
    step: Any,
    *,
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 0.0,
    decoupled: bool = True,
) -> tuple[list[Array], list[Array], list[Array]]:
    moved, new_means, new_squares = [], [], []
    for p, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
        g = gradient if decoupled else gradient + decay * p
        m = beta1 * mean + (1 - beta1) * g
        v = beta2 * square + (1 - beta2) * g**2
        update = m / (1 - beta1 ** float(step)) / (np.sqrt(v / (1 - beta2 ** float(step))) + eps)
        shrunk = p - rate * decay * p if decoupled else p
        moved.append(shrunk - rate * update)
        new_means.append(m)
        new_squares.append(v)
    return moved, new_means, new_squares


def _lion(
    parameters: Arrays,
    gradients: Arrays,
    means: Arrays,
    *,
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    decay: float = 0.0,
) -> tuple[list[Array], list[Array]]:
    moved, new_means = [], []
    for p, g, m in zip(parameters, gradients, means, strict=True):
        direction = np.sign(beta1 * m + (1 - beta1) * g)
        moved.append(p - rate * (direction + decay * p))
        new_means.append(beta2 * m + (1 - beta2) * g)
    return moved, new_means


def quantized_parts(weight: QuantizedWeight) -> tuple[Array, Array, Array | float]:
    """Return the codes less the zero point, or their levels; the scale and minimum of each."""

    def split(packed: Any, bits: int) -> Array:
        shifts = np.arange(0, 8, bits)
        return (packed[..., None] >> shifts & (1 << bits) - 1).reshape(weight.shape)

    def spread(values: Any, factors: Any) -> Array:
        wide = values.repeat(weight.block, -1).reshape(weight.shape)
        return wide if factors is None else wide * factors.repeat(SUPER_BLOCK, -1)

    codes: Any = split(weight.codes, weight.low_bits)
    if weight.high is not None:
        codes = codes + (split(weight.high, weight.bits - weight.low_bits) << weight.low_bits)
    numbers = np.array(weight.table)[codes] if weight.table else codes - float(weight.zero)
    scales = spread(weight.scales, weight.super_scales)
    if weight.minimums is None:
        return numbers, scales, 0.0
    return numbers, scales, spread(weight.minimums, weight.super_minimums)


def _dequantize(
    weight: QuantizedWeight, dtype: str = "float32", rows: Array | None = None
) -> Array:
    numbers, scales, minimums = quantized_parts(weight)
    result = numbers * scales + minimums
    return result if rows is None else _take(result, rows)


def _quantized_linear(x: Array, weight: QuantizedWeight, bias: Array | None = None) -> Array:
    return x @ _dequantize(weight).T + (0 if bias is None else bias)


_SAME_IN_NUMPY = """
    add subtract multiply divide power maximum minimum equal not_equal less less_equal greater
    greater_equal logical_and logical_or where negative abs sign floor exp log sqrt sin cos tanh
    isnan isfinite logical_not reshape broadcast_to matmul outer einsum flip ceil cosh sinh tan
    expm1 log10 log1p log2 trunc isinf positive square signbit bitwise_and bitwise_or bitwise_xor
    copysign hypot logaddexp logical_xor remainder expand_dims squeeze moveaxis repeat roll tile
    tril triu tensordot nonzero
"""
_REDUCTIONS = ("count_nonzero", "max", "mean", "min", "prod", "sum")
_INVERSE = ("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh")

REFERENCES: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_IN_NUMPY.split()},
    **{name: _along(getattr(np, name)) for name in _REDUCTIONS},
    **{name: getattr(np, f"arc{name[1:]}") for name in _INVERSE},
    "bitwise_invert": np.invert,
    "bitwise_left_shift": _shift(np.left_shift),
    "bitwise_right_shift": _shift(np.right_shift),
    "floor_divide": _floor_divide,
    "reciprocal": lambda x: 1 / x,
    "cumulative_prod": _running(np.cumprod, 1),
    "searchsorted": lambda x1, x2, side="left": np.searchsorted(
        np.sort(np.where(np.isnan(x1), np.inf, x1)), np.where(np.isnan(x2), np.inf, x2), side
    ),
    "unique_values": lambda x: np.unique(x, equal_nan=False),
    "matrix_transpose": lambda x: np.swapaxes(x, -1, -2),
    "broadcast_arrays": lambda *arrays: list(np.broadcast_arrays(*arrays)),
    "meshgrid": lambda *arrays, **how: list(np.meshgrid(*arrays, **how)),
    "unstack": lambda x, axis=0: tuple(np.moveaxis(x, axis, 0)),
    "linspace": lambda start, stop, num, *, like, dtype=None: np.linspace(start, stop, num),
    "vecdot": lambda a, b, axis=-1: (
        np.moveaxis(a, axis, -1)[..., None, :] @ np.moveaxis(b, axis, -1)[..., None]
    )[..., 0, 0],
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "erf": _ERF,
    "round": np.rint,
    "clip": _clip,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x, slope=0.01: np.where(x < 0, slope * x, x),
    "silu": _silu,
    "gelu": _gelu,
    "swiglu": lambda gate, up: _silu(gate) * up,
    "var": _spread,
    "std": lambda x, *how, **named: np.sqrt(_spread(x, *how, **named)),
    "any": _along(lambda x, **how: np.any(x != 0, **how)),
    "all": _along(lambda x, **how: np.all(x != 0, **how)),
    "logsumexp": _logsumexp,
    "vector_norm": _vector_norm,
    "cumulative_sum": _running(np.cumsum, 0),
    "argmax": lambda x, axis=-1: np.argmax(x, axis),  # the first of equal ones; NaN before all
    "argmin": lambda x, axis=-1: np.argmin(x, axis),  # the first of equal ones; NaN before all
    "argsort": _argsort,
    "sort": lambda x, *how, **named: np.take_along_axis(
        x, _argsort(x, *how, **named), how[0] if how else named.get("axis", -1)
    ),
    "top_k": _top_k,
    "take": _take,
    "take_along_axis": _take_along_axis,
    "permute": np.transpose,
    "concat": lambda arrays, axis=0: np.concatenate(arrays, axis),
    "slice_axis": _slice_axis,
    "stack": lambda arrays, axis=0: np.stack(arrays, axis),
    "split": lambda x, sections, axis=0: list(np.split(x, sections, axis)),
    "pad": lambda x, widths, value=0: np.pad(x, widths, constant_values=value) if x.ndim else x,
    "diff": lambda x, axis=-1, n=1: np.diff(x, n, axis),
    "one_hot": _one_hot,
    "zeros_like": lambda x, dtype=None: np.zeros(x.shape),
    "ones_like": lambda x, dtype=None: np.ones(x.shape),
    "full_like": lambda x, value, dtype=None: np.full(x.shape, value),
    "zeros": lambda shape, *, like, dtype=None: np.zeros(shape),
    "ones": lambda shape, *, like, dtype=None: np.ones(shape),
    "full": lambda shape, value, *, like, dtype=None: np.full(shape, value),
    "arange": _arange,
    "eye": lambda rows, columns=None, *, k=0, like, dtype=None: np.eye(rows, columns, k),
    "astype": _astype,
    "linear": lambda x, weight, bias=None: x @ weight.T + (0 if bias is None else bias),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "rope": _rope,
    "attention": _attention,
    "experts": _experts,
    "cache_write": _cache_write,
    "embedding": _take,
    "cross_entropy": _cross_entropy,
    "mean_squared_error": lambda x, y: np.asarray(((x - y) ** 2).mean()),
    "conv2d": _conv2d,
    "conv_transpose2d": _conv_transpose2d,
    "max_pool2d": _pool(np.max),
    "avg_pool2d": _pool(np.mean),
    "dequantize": _dequantize,
    "quantized_linear": _quantized_linear,
    "update_sgd": _sgd,
    "update_adam": _adam,
    "update_lion": _lion,
}
"""Every public op by name, with the arguments that it takes."""
