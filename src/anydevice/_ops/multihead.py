"""Scaled dot-product attention, with masks of four kinds, soft caps and sinks."""

from __future__ import annotations

import math
from typing import Any

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf, Shape
from anydevice._ops.arguments import (
    INT32,
    bool_primitives,
    finite_numbers,
    in_words,
    is_finite,
    python_number,
    require_integers,
    require_one_dtype,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import explain, primitives, version_for_dtype
from anydevice.errors import ConfigurationError

_MAX_SCORES = 1 << 26
"""Scores that are in memory at a time, at least for one query: 256 MiB of float32."""


def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: ArrayT | None = None,
    window: int | None = None,
    lengths: ArrayT | None = None,
    soft_cap: float | None = None,
    sinks: ArrayT | None = None,
) -> ArrayT:
    """Return `softmax(scale × q · kᵀ) · v` over the keys that each query attends to.

    q is (batch, heads, queries, size), k (batch, kv heads, keys, size) and v (batch, kv heads,
    keys, value size), where the value size may be another; the result is (batch, heads, queries,
    value size) and has the dtype of q. `heads` is a multiple of `kv heads`, and query head h uses
    key head h // (heads // kv heads). The default `scale` is size ** -0.5. Products are
    accumulated in float32, and the softmax is float32, or float64 for float64 arrays.

    A query attends to all keys, unless one of these excludes them; a query that attends to no key
    gives zeros:

    - `lengths` (batch,), integers on the device: only the first `lengths[b]` keys are valid,
      as in a cache that is not full yet. A length below 0 counts as 0, and one beyond the keys as
      all of them.
    - `causal`: the last query is aligned with the last valid key, and each query attends to the
      keys up to its own. Query i attends to key j if j <= valid - queries + i.
    - `window`, with `causal`: the number of keys that a query attends to, its own included; a
      window larger than the number of keys has no effect.
    - `mask`, booleans, true where a query attends to a key: (batch, keys), or three or four axes
      that broadcast to (batch, heads, queries, keys). Two axes are never (queries, keys); give such
      a mask as `mask[None, None]`.

    `soft_cap` bounds the scores: they become soft_cap × tanh(scores / soft_cap), after `scale` and
    before keys are excluded. `sinks` (heads,) adds one score to each head that has no key: its
    exponential joins the sum that the others are divided by, so that weights add up to less than
    1.

    A key that `lengths` or `mask` excludes from every query may hold anything, and its value too:
    NaN there reaches neither the result nor a gradient. What some queries attend to must be finite.

    >>> import numpy
    >>> q, k = numpy.zeros((1, 1, 2, 4)), numpy.zeros((1, 1, 2, 4))
    >>> v = numpy.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention(q, k, v, causal=True).tolist()
    [[[[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]]]
    """
    kind, dtype = type(q), getattr(q, "dtype", None)
    own = version_for_dtype(q, dtype, "attention", _attention)
    if not (type(k) is type(v) is kind and k.dtype == dtype and v.dtype == dtype):
        require_one_dtype("attention", q=q, k=k, v=v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    fits: int = len(q_shape) == len(k_shape) == 4 and (
        k_shape == v_shape or _differ_in_size(k_shape, v_shape)
    )
    fits = fits and q_shape[0] == k_shape[0] and q_shape[3] == k_shape[3] and k_shape[1]
    if not fits or q_shape[1] % k_shape[1]:
        raise _misfit(q, k, v)
    if type(causal) is not bool or scale is not None or window is not None:
        causal, scale, window = map(python_number, (causal, scale, window))
        _refuse_options(causal, scale, window)
        if window is not None and window >= k_shape[2]:
            window = None
    if mask is not None:
        bool_primitives("attention", mask, "mask", q, "q")
        _refuse_mask(q, k, mask)
    if lengths is not None:
        require_integers("attention", "lengths", lengths, q, "q")
        if tuple(lengths.shape) != (q_shape[0],):
            raise wrong_shapes("attention", "lengths must be (batch,)", q=q, lengths=lengths)
    if soft_cap is not None:
        rule = "above 0"
        (soft_cap,) = finite_numbers("attention", rule, lambda cap: cap > 0, soft_cap=soft_cap)
    if sinks is not None:
        require_one_dtype("attention", q=q, sinks=sinks)
        if tuple(sinks.shape) != (q_shape[1],):
            raise wrong_shapes("attention", "sinks must be (heads,)", q=q, sinks=sinks)
    try:
        result = own(q, k, v, causal, scale, mask, window, lengths, soft_cap, sinks)
        if result is NotImplemented:
            return _attention(q, k, v, causal, scale, mask, window, lengths, soft_cap, sinks)
        return result
    except Exception as error:
        explain(error, q=q, k=k, v=v, mask=mask, lengths=lengths, sinks=sinks)
        raise


def _differ_in_size(k: Shape, v: Shape) -> bool:
    """Whether the shapes of keys and values differ in the last axis alone, and keys have one."""
    return len(k) == len(v) and tuple(k[:-1]) == tuple(v[:-1]) and k[-1] > 0


def _refuse_options(causal: Any, scale: Any, window: Any) -> None:
    if type(causal) is not bool:
        raise wrong("attention", f"causal must be True or False, not {in_words(causal)}")
    if scale is not None and not is_finite(scale):
        rule = f"scale must be a finite number, not {in_words(scale)}"
        raise wrong("attention", f"{rule}; to scale by an array, multiply q by it")
    if window is not None and (type(window) is not int or window < 1 or not causal):
        rule = "window must be an integer of 1 or more, with causal=True"
        raise wrong("attention", f"{rule}, not {in_words(window)} with causal={causal}")


def _misfit(q: Array, k: Array, v: Array) -> ConfigurationError:
    """Return the error for shapes that do not fit."""
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        rule = "q, k and v must have four axes: (batch, heads, tokens, size)"
    elif tuple(k.shape[:3]) != tuple(v.shape[:3]) or (v.shape[3] and not k.shape[3]):
        rule = "k and v must have the same shape except for the last axis"
    elif q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        rule = "q and k must have the same batch and size"
    else:
        rule = "the number of heads of q must be a multiple of that of k"
    return wrong_shapes("attention", rule, q=q, k=k, v=v)


def _refuse_mask(q: Array, k: Array, mask: Array) -> None:
    batch, heads, queries, _ = q.shape
    shape, keys = tuple(mask.shape), k.shape[2]
    wanted = (batch, heads, queries, keys)
    if len(shape) == 2:
        if shape[0] not in (1, batch) or shape[1] not in (1, keys):
            rule = f"a mask with two axes must be (batch, keys) = ({batch}, {keys}), not {shape}"
            hint = "pass a mask of (queries, keys) as mask[None, None]"
            raise wrong("attention", f"{rule}; {hint}")
        return
    pairs = zip(shape[::-1], wanted[::-1], strict=False)
    if len(shape) > 4 or any(size not in (1, full) for size, full in pairs):
        rule = f"mask must broadcast to (batch, heads, queries, keys) = {wanted}"
        raise wrong_shapes("attention", rule, mask=mask)


def _attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    causal: bool,
    scale: float | None,
    mask: ArrayT | None,
    window: int | None,
    lengths: ArrayT | None,
    soft_cap: float | None = None,
    sinks: ArrayT | None = None,
) -> ArrayT:
    xp = primitives(q)
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if not batch * heads * queries * size * keys * v.shape[3]:
        return xp.full((batch, heads, queries, v.shape[3]), 0, xp.dtype(q), q)
    scaled_q = xp.multiply(widened(xp, q), size**-0.5 if scale is None else float(scale))
    if mask is not None:
        mask = _grouped_mask(xp, mask, kv_heads, heads // kv_heads)
    if mask is not None or lengths is not None:
        # A weight of zero is not enough: times NaN it is NaN.
        valid: Any = _valid_keys(xp, q, keys, mask, lengths)
        k, v = xp.where(valid, k, 0), xp.where(valid, v, 0)
    turned = xp.permute_dims(widened(xp, k), (0, 1, 3, 2))
    values = widened(xp, v)
    if sinks is not None:
        sinks = xp.reshape(widened(xp, sinks), (1, kv_heads, heads // kv_heads, 1, 1))
    block = max(1, _MAX_SCORES // (batch * heads * keys))
    blocks = []
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        visible = _visible_keys(xp, q, keys, (start, stop), causal, mask, window, lengths)
        rows = xp.slice_axis(scaled_q, 2, start, stop) if stop - start < queries else scaled_q
        blocks.append(_weighted_values(xp, rows, turned, values, visible, soft_cap, sinks))
    result = blocks[0] if len(blocks) == 1 else xp.concat(blocks, 2)
    return xp.astype(result, xp.dtype(q))


def _weighted_values(
    xp: PrimitivesOf[ArrayT],
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    visible: ArrayT | None,
    soft_cap: float | None,
    sinks: ArrayT | None,
) -> ArrayT:
    """Return the mean of the values for each query; k is (batch, kv heads, size, keys).

    The query heads of one key head are rows of one product, so that no key is copied.
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1], k.shape[3]
    groups = heads // kv_heads
    together = (batch, kv_heads, groups * queries)
    scores = xp.matmul(xp.reshape(q, (*together, size)), k)
    if soft_cap is not None:
        scores = xp.multiply(xp.tanh(xp.divide(scores, float(soft_cap))), float(soft_cap))
    if visible is not None:
        apart = xp.reshape(scores, (batch, kv_heads, groups, queries, keys))
        scores = xp.reshape(xp.where(visible, apart, -math.inf), (*together, keys))
    largest = xp.max(scores, -1, True)
    if sinks is not None:
        full = (batch, kv_heads, groups, queries, 1)
        sinks = xp.reshape(xp.broadcast_to(sinks, full), (*together, 1))
        largest = xp.maximum(largest, sinks)
    if visible is not None:  # where nothing is seen, -inf - -inf would be NaN
        largest = xp.where(xp.equal(largest, -math.inf), 0.0, largest)
    weights = xp.exp(xp.subtract(scores, largest))
    total = xp.sum(weights, -1, True)
    if sinks is not None:
        total = xp.add(total, xp.exp(xp.subtract(sinks, largest)))
    if visible is not None:
        total = xp.where(xp.equal(total, 0.0), 1.0, total)
    averaged = xp.divide(xp.matmul(weights, v), total)
    return xp.reshape(averaged, (batch, heads, queries, v.shape[3]))


def _within(xp: PrimitivesOf[ArrayT], lengths: ArrayT, keys: int) -> ArrayT:
    """Lengths from 0 to the number of keys, as int32, which would not hold larger ones."""
    if xp.dtype(lengths).bits < 32:  # which would not hold the number of keys
        lengths = xp.astype(lengths, INT32)
    return xp.astype(xp.maximum(xp.minimum(lengths, keys), 0), INT32)


def _valid_keys(
    xp: PrimitivesOf[ArrayT], q: ArrayT, keys: int, mask: ArrayT | None, lengths: ArrayT | None
) -> ArrayT | None:
    """Return the keys that lengths and mask leave to any query: (batch, kv heads, keys, 1), or 1
    each.
    """
    valid_keys: ArrayT | None = None
    if lengths is not None:
        valid = xp.reshape(_within(xp, lengths, keys), (q.shape[0], 1, 1, 1))
        valid_keys = xp.less(xp.reshape(xp.arange(keys, INT32, q), (keys, 1)), valid)
    if mask is None:
        return valid_keys
    batch, kv_heads, groups, queries, columns = mask.shape
    if groups * queries > 1:
        mask = xp.less(0, xp.sum(xp.astype(mask, INT32), (2, 3)))
    some = xp.reshape(mask, (batch, kv_heads, columns, 1))
    return some if valid_keys is None else xp.logical_and(some, valid_keys)


def _grouped_mask(xp: PrimitivesOf[ArrayT], mask: ArrayT, kv_heads: int, groups: int) -> ArrayT:
    """Return a mask of five axes: batch, kv heads, heads of each, queries, keys; each may be 1."""
    shape = tuple(mask.shape)
    if len(shape) == 2:
        return xp.reshape(mask, (shape[0], 1, 1, 1, shape[1]))
    batch, heads, queries, keys = (1,) * (4 - len(shape)) + shape
    split = (1, 1) if heads == 1 else (kv_heads, groups)
    return xp.reshape(mask, (batch, *split, queries, keys))


def _visible_keys(
    xp: PrimitivesOf[ArrayT],
    q: ArrayT,
    keys: int,
    block: tuple[int, int],
    causal: bool,
    mask: ArrayT | None,
    window: int | None,
    lengths: ArrayT | None,
) -> ArrayT | None:
    """Return the keys that a block of queries may attend to, of five axes; `None` for all."""
    queries, (start, stop) = q.shape[2], block
    if mask is not None and mask.shape[3] != 1 and stop - start < queries:
        mask = xp.slice_axis(mask, 3, start, stop)
    if not causal and lengths is None:
        return mask
    key = xp.arange(keys, INT32, q)
    valid: ArrayT | int = keys
    if lengths is not None:
        valid = xp.reshape(_within(xp, lengths, keys), (q.shape[0], 1, 1, 1, 1))
    if causal:
        row = xp.reshape(xp.arange(stop - start, INT32, q), (stop - start, 1))
        own = xp.add(row, keys - queries + start)
        if lengths is not None:
            own = xp.add(xp.add(row, start - queries), valid)
        visible = xp.less_equal(key, own)
        if window is not None:
            visible = xp.logical_and(visible, xp.less(xp.subtract(own, window), key))
    else:
        visible = xp.less(key, valid)
    if len(visible.shape) == 2:
        visible = xp.reshape(visible, (1, 1, 1, stop - start, keys))
    return visible if mask is None else xp.logical_and(mask, visible)
