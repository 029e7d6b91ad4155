"""Ops of transformers: attention with masks, caps and sinks, rotary positions, and experts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf, Shape
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.rope_scaling import (
    Frozen,
    Scaling,
    depends_on_length,
    freeze,
    frequencies,
    growth_of_theta,
    kind_of,
    original_length,
    refuse_scaling,
    thaw,
)
from anydevice._machine.engines.registry import owner_of
from anydevice._ops.arguments import (
    FLOAT32,
    INT32,
    bool_primitives,
    finite_numbers,
    in_words,
    is_finite,
    python_number,
    require_integers,
    require_one_dtype,
    require_one_library,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import (
    explain,
    float_version,
    known,
    known_float,
    primitives,
    run,
    version_for_dtype,
    wrong_dtype,
)
from anydevice._ops.elementwise import gelu, multiply, swiglu
from anydevice._ops.products import dequantize, linear, quantized_linear, slice_rows
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
    fits: int = len(q_shape) == len(k_shape) == len(v_shape) == 4 and (
        k_shape == v_shape or (tuple(k_shape[:3]) == tuple(v_shape[:3]) and k_shape[3] > 0)
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
    """Return the mean of the values for each query; k is (batch, kv heads, size, keys)."""
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
    if visible is not None:  # without any visible key, -inf - -inf would be NaN
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
    """Clip lengths to 0 … keys, as int32."""
    if xp.dtype(lengths).bits < 32:  # too short for the number of keys
        lengths = xp.astype(lengths, INT32)
    return xp.astype(xp.maximum(xp.minimum(lengths, keys), 0), INT32)


def _valid_keys(
    xp: PrimitivesOf[ArrayT], q: ArrayT, keys: int, mask: ArrayT | None, lengths: ArrayT | None
) -> ArrayT | None:
    """Return the keys that any query may see: (batch, kv heads, keys, 1), each axis maybe 1."""
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


Key = tuple[str, str, Frozen, str]
"""Size, theta, scaling and length, with numbers as exact texts: see `freeze`."""

_tables: dict[Key, tuple[Any, float]] = {}
_compiler_steps = SimpleNamespace()
_names: dict[tuple[Key, str, bool], str] = {}


def rope(
    x: ArrayT,
    positions: ArrayT,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    scaling: Scaling | None = None,
    length: int | ArrayT | None = None,
) -> ArrayT:
    """Return the array with each pair of elements rotated by an angle that grows with its position.

    x is (batch, heads, tokens, size) with an even size, and positions, integers, is (tokens,) or
    (batch, tokens); the result has the shape and dtype of x. Pair n is rotated by
    theta ** (-2 n / size) per position. A pair is elements n and n + size / 2 or, `interleaved`,
    elements 2 n and 2 n + 1. Angles, cosine and sine are float32.

    `scaling` stretches positions for a longer context, spelled as in Hugging Face's
    `rope_parameters`: a mapping whose `rope_type` is default, linear, llama3, yarn, dynamic or
    longrope, with its numbers. Raises `ConfigurationError` for an unknown type, and for missing or
    invalid values.

    The types dynamic and longrope depend on `length`, how many tokens there are in the whole
    sequence, of which x may be a part: an integer, or integers (batch,) on the device, which may
    differ from call to call of compiled code. If it is not given, it is the largest position of
    each text + 1. So a text that grows token by token is rotated as transformers does with a cache:
    what was rotated before stays as it was. Padding has no part in a length: give it if there is
    any. Both need `original_max_position_embeddings`; longrope needs `factor`, by how much the
    context was extended, or `attention_factor`.

    >>> rope(numpy.ones((1, 1, 2, 2)), numpy.array([0, 1])).round(3).tolist()
    [[[[1.0, 1.0], [-0.301, 1.382]]]]
    """
    own = float_version(x, "rope", _rope)
    require_integers("rope", "positions", positions, x)
    shape = tuple(x.shape)
    if len(shape) != 4 or shape[3] % 2:
        raise wrong_shapes("rope", "x must be (batch, heads, tokens, size) with an even size", x=x)
    if tuple(positions.shape) not in (shape[2:3], (shape[0], shape[2])):
        rule = "positions must be (tokens,) or (batch, tokens)"
        raise wrong_shapes("rope", rule, x=x, positions=positions)
    theta, interleaved = python_number(theta), python_number(interleaved)
    if not is_finite(theta) or theta <= 0:
        raise wrong("rope", f"theta must be a number above 0, not {in_words(theta)}")
    if type(interleaved) is not bool:
        raise wrong("rope", f"interleaved must be True or False, not {in_words(interleaved)}")
    if scaling is not None:
        refuse_scaling(scaling)
    if length is not None:
        length = python_number(length)
        _refuse_length(x, length)
    return run(own, _rope, x, positions, theta, interleaved, scaling, length)


def _refuse_length(x: Array, length: Any) -> None:
    if known(length) is None:
        if type(length) is not int or length < 0:
            rule = "length must be an integer of 0 or more, or an array (batch,)"
            raise wrong("rope", f"{rule}, not {in_words(length)}")
        return
    require_integers("rope", "length", length, x)
    if tuple(length.shape) != (x.shape[0],):
        raise wrong_shapes("rope", "length must be (batch,)", x=x, length=length)


def _rope(
    x: ArrayT,
    positions: ArrayT,
    theta: float,
    interleaved: bool,
    scaling: Scaling | None,
    length: Any = None,
) -> ArrayT:
    xp = primitives(x)
    batch, heads, tokens, size = x.shape
    if not batch * heads * tokens * size:
        return x
    known_length = length if type(length) is int and depends_on_length(scaling) else None
    key = _key(size, theta, scaling, known_length)
    factor = float.fromhex(_factor(key))
    where = xp.reshape(positions, (*positions.shape[:-1], 1, tokens, 1))
    steps = _steps(key, positions)
    if known_length is None and scaling is not None and depends_on_length(scaling):
        if length is None:
            length = xp.add(xp.max(positions, -1), 1)
        steps = _steps_by_length(xp, steps, key, scaling, length)
    angles = xp.multiply(xp.astype(where, FLOAT32), steps)
    y = widened(xp, x)
    cosine, sine = xp.cos(angles), xp.sin(angles)
    if factor != 1:
        cosine, sine = xp.multiply(cosine, factor), xp.multiply(sine, factor)
    cosine, sine = xp.astype(cosine, xp.dtype(y)), xp.astype(sine, xp.dtype(y))
    if interleaved:
        first, second = xp.slice_axis(y, 3, 0, size, 2), xp.slice_axis(y, 3, 1, size, 2)
    else:
        first, second = xp.slice_axis(y, 3, 0, size // 2), xp.slice_axis(y, 3, size // 2, size)
    turned = [
        xp.subtract(xp.multiply(first, cosine), xp.multiply(second, sine)),
        xp.add(xp.multiply(second, cosine), xp.multiply(first, sine)),
    ]
    if interleaved:
        apart = [xp.reshape(half, (batch, heads, tokens, size // 2, 1)) for half in turned]
        rotated = xp.reshape(xp.concat(apart, 4), (batch, heads, tokens, size))
    else:
        rotated = xp.concat(turned, 3)
    return xp.astype(rotated, xp.dtype(x))


def _key(size: int, theta: float, scaling: Scaling | None, length: float | None) -> Key:
    text = "" if length is None else float(length).hex()
    return (float(size).hex(), float(theta).hex(), freeze(scaling), text)


def _steps_by_length(
    xp: PrimitivesOf[ArrayT], short: ArrayT, key: Key, scaling: Scaling, length: ArrayT
) -> ArrayT:
    """Return the steps for lengths on the device, () or (batch,), with axes to broadcast."""
    here = xp.reshape(xp.astype(length, FLOAT32), (-1, 1, 1, 1))
    if kind_of(scaling) == "longrope":
        longer = xp.less(original_length(scaling), here)
        return xp.where(longer, _steps((*key[:3], math.inf.hex()), length), short)
    growth, less = growth_of_theta(scaling)
    grown = xp.maximum(xp.subtract(xp.multiply(here, growth), less), 1.0)
    pairs = short.shape[0]
    powers = xp.multiply(xp.astype(xp.arange(pairs, INT32, length), FLOAT32), -1 / (pairs - 1))
    return xp.multiply(short, xp.exp(xp.multiply(xp.log(grown), powers)))


def _table(key: Key) -> tuple[Any, float]:
    """Return the frequencies as a NumPy array of float32, and the factor, once for each key."""
    if key not in _tables:
        import numpy as np

        size, theta, scaling, text = key
        length = float.fromhex(text) if text else None
        steps, factor = frequencies(
            int(float.fromhex(size)), float.fromhex(theta), thaw(scaling), length
        )
        _tables[key] = np.array(steps, "float32"), float(factor)
    return _tables[key]


def _steps(key: Key, like: ArrayT) -> ArrayT:
    """Return the angle of each pair for one position, on the device of `like`."""
    name = _kept_for_compiler(key, like)
    return (
        getattr(_compiler_steps, name) if name else primitives(like).asarray(_table(key)[0], like)
    )


def _kept_for_compiler(key: Key, like: Array) -> str:
    """Return the name of the steps in `_compiler_steps` for PyTorch's compiler; else nothing.

    The compiler cannot trace how an array is made from NumPy's. It runs this function and reads the
    steps that it made, so they are on the device when the compiled code is called. Others' arrays
    are not kept: a traced one must not outlive its call.
    """
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo."):
        return ""
    steps = primitives(like).asarray(_table(key)[0], like)
    # An array that was made in inference mode cannot be used where gradients are recorded.
    of = (key, str(steps.device), steps.is_inference())  # type: ignore[attr-defined]
    if of not in _names:
        _names[of] = f"steps_{len(_names)}"
        setattr(_compiler_steps, _names[of], steps)
    return _names[of]


def _factor(key: Key) -> str:
    """Return the factor of cosine and sine, as an exact text: to PyTorch's compiler a constant."""
    return _table(key)[1].hex()


# PyTorch's compiler runs these while it looks through the caller, and keeps what they return.
_kept_for_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
_factor._dynamo_marked_constant = True  # type: ignore[attr-defined]


def experts(
    x: ArrayT,
    gate_up: ArrayT | QuantizedWeight,
    down: ArrayT | QuantizedWeight,
    chosen: ArrayT,
    weights: ArrayT,
    *,
    gate_up_bias: ArrayT | None = None,
    down_bias: ArrayT | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> ArrayT:
    """Compute a mixture of experts: for each token, the weighted sum of its experts' outputs.

    x is (tokens, hidden). `chosen`, integers, and `weights` are (tokens, k): which experts, and how
    much each counts. An expert is a gated feed-forward network, down · activation(gate, up): the
    first half of the rows of its matrix in `gate_up`, (experts, 2 × inner, hidden), gives the gate
    and the second half gives up; `down` is (experts, hidden, inner). Biases are (experts,
    2 × inner) and (experts, hidden). The result has the shape and dtype of x. `gate_up` and `down`
    may be `QuantizedWeight`s, each of its own scheme; what is computed of them is dequantized.

    `activation` is one of

    - swiglu: silu(gate) × up
    - geglu: gelu(gate) × up, and geglu_tanh the same with the approximation of gelu by tanh
    - clipped_swiglu: gate × sigmoid(alpha × gate) × (up + 1), as in gpt-oss, where the gate is at
      most `limit`, and up between -limit and limit

    An index in `chosen` that is negative or too large adds nothing, so that -1 stands for none. The
    weights may have another floating-point dtype than x. Sums are float32, or float64 for float64;
    in 16 bits, the gate, up and the activation are rounded on the way.

    Only chosen experts are computed, a product for each that any token uses. On an accelerator, up
    to 128 tokens wait for nothing: for a few choices the matrices are gathered, and for more, which
    use most of the experts anyway, every expert computes every token. More tokens wait for
    `chosen`, to be sorted by expert. JAX and MLX never wait, nor does PyTorch in bfloat16 on cards
    such as NVIDIA's H100 and B200, where it has a kernel for grouped products of contiguous
    matrices whose sizes are multiples of 8. In code compiled by PyTorch every expert computes every
    token, except for a few choices.

    >>> gate_up, down = numpy.ones((3, 2, 1)), numpy.array([[[1.0]], [[10.0]], [[100.0]]])
    >>> chosen, weights = numpy.array([[0, 2], [1, -1]]), numpy.array([[0.5, 0.5], [1.0, 0.0]])
    >>> experts(numpy.ones((2, 1)), gate_up, down, chosen, weights).round(2).tolist()
    [[36.92], [7.31]]
    """
    own = float_version(x, "experts", _experts)
    floats = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, stack in (("gate_up", gate_up), ("down", down)):
        if isinstance(stack, QuantizedWeight):
            require_one_library("experts", "x", x, name, stack.codes)
            own = _experts
        else:
            floats[name] = stack
    present = {name: array for name, array in floats.items() if array is not None}
    require_one_dtype("experts", x=x, **present)
    require_integers("experts", "chosen", chosen, x)
    if type(weights) is not type(x):
        require_one_library("experts", "x", x, "weights", weights)
    if known_float(weights) is None:
        wanted = "floating-point numbers in weights; use astype(weights, 'float32')"
        raise wrong_dtype("experts", primitives(weights).dtype(weights), wanted)
    _refuse_shapes(x, gate_up, down, chosen, weights, gate_up_bias, down_bias)
    if not isinstance(activation, str) or activation not in _GATED:
        names = ", ".join(_GATED)
        raise wrong("experts", f"activation must be one of {names}, not {in_words(activation)}")
    alpha, limit = finite_numbers("experts", "above 0", lambda n: n > 0, alpha=alpha, limit=limit)
    return run(
        own, _experts,
        x, gate_up, down, chosen, weights, gate_up_bias, down_bias, activation, alpha, limit,
    )  # fmt: skip


def _refuse_shapes(
    x: Array, gate_up: Array, down: Array, chosen: Array, weights: Array, bias: Any, last_bias: Any
) -> None:
    if len(x.shape) != 2:
        raise wrong_shapes("experts", "x must be (tokens, hidden)", x=x)
    hidden, inner = x.shape[1], down.shape[-1] if len(down.shape) == 3 else -1
    count = gate_up.shape[0] if len(gate_up.shape) else -1
    wanted: tuple[tuple[str, Array, Shape, str], ...] = (
        ("gate_up", gate_up, (count, 2 * inner, hidden), "(experts, 2 × inner, hidden)"),
        ("down", down, (count, hidden, inner), "(experts, hidden, inner)"),
        ("gate_up_bias", bias, (count, 2 * inner), "(experts, 2 × inner)"),
        ("down_bias", last_bias, (count, hidden), "(experts, hidden)"),
    )
    for name, array, shape, rule in wanted:
        if array is not None and tuple(array.shape) != shape:
            arrays = {"x": x, "gate_up": gate_up, "down": down, name: array}
            raise wrong_shapes("experts", f"{name} must be {rule}", **arrays)
    if len(chosen.shape) != 2 or chosen.shape[0] != x.shape[0] or chosen.shape != weights.shape:
        rule = "chosen and weights must be (tokens, k)"
        raise wrong_shapes("experts", rule, x=x, chosen=chosen, weights=weights)


# The networks


def _clipped_swiglu(gate: ArrayT, up: ArrayT, alpha: float, limit: float) -> ArrayT:
    xp = primitives(gate)
    gate = xp.minimum(gate, limit)
    up = xp.maximum(xp.minimum(up, limit), -limit)
    opened = xp.multiply(gate, xp.sigmoid(xp.multiply(gate, alpha)))
    return xp.multiply(opened, xp.add(up, 1.0))


_GATED: Mapping[str, Callable[[Array, Array, float, float], Array]] = {
    "swiglu": lambda gate, up, alpha, limit: swiglu(gate, up),
    "geglu": lambda gate, up, alpha, limit: multiply(gelu(gate), up),
    "geglu_tanh": lambda gate, up, alpha, limit: multiply(gelu(gate, approximate=True), up),
    "clipped_swiglu": _clipped_swiglu,
}


class _Networks:
    """The matrices of all experts, applied to rows; results are in the dtype that sums have."""

    def __init__(
        self, xp: PrimitivesOf[Any], stacks: tuple[Array, Array, Array | None, Array | None],
        activation: str, alpha: float, limit: float,
    ) -> None:  # fmt: skip
        self.xp, self.stacks, self.count = xp, stacks, stacks[0].shape[0]
        self.activation, self.numbers = _GATED[activation], (alpha, limit)

    def one(self, number: int, rows: Array) -> Array:
        """Apply one expert to rows (rows, hidden)."""
        xp = self.xp
        gate_up, down, bias, last_bias = (_one_of(xp, s, number) for s in self.stacks)
        between = self._between(_multiply(rows, gate_up, bias), rows)
        return widened(xp, _multiply(between, down, last_bias))

    def of_each(self, numbers: Array, rows: Array) -> Array:
        """Apply each row's own expert to it; the expert's matrices are copied."""
        xp = self.xp
        gate_up, down, *biases = self.stacks
        taken: list[Any] = [
            dequantize(s, xp.dtype(rows), numbers) if isinstance(s, QuantizedWeight)
            else xp.take(s, numbers, 0) for s in (gate_up, down)
        ]  # fmt: skip
        taken += [None if bias is None else xp.take(bias, numbers, 0) for bias in biases]
        row = xp.reshape(rows, (rows.shape[0], 1, rows.shape[1]))
        between = self._between(self._product(row, taken[0], taken[2]), rows)
        return xp.reshape(self._product(between, taken[1], taken[3]), tuple(rows.shape))

    def of_all(self, rows: Array) -> Array:
        """Apply every expert to rows (rows, hidden): (experts × rows, hidden)."""
        xp, (gate_up, down, bias, last_bias) = self.xp, self.stacks
        shape = (self.count, *rows.shape)
        every = xp.broadcast_to(xp.reshape(rows, (1, *rows.shape)), shape)
        between = self._between(self._product(every, gate_up, bias), rows)
        outputs = self._product(between, down, last_bias)
        return xp.reshape(outputs, (shape[0] * shape[1], shape[2]))

    def _between(self, both: Array, like: Array) -> Array:
        """Apply the activation between the two products of an expert."""
        xp, last = self.xp, len(both.shape) - 1
        inner, both = both.shape[last] // 2, widened(xp, both)
        gate, up = xp.slice_axis(both, last, 0, inner), xp.slice_axis(both, last, inner, 2 * inner)
        return xp.astype(self.activation(gate, up, *self.numbers), xp.dtype(like))

    def _product(self, rows: Array, matrices: Array, bias: Any) -> Array:
        xp = self.xp
        product = widened(xp, xp.matmul(rows, xp.permute_dims(matrices, (0, 2, 1))))
        if bias is None:
            return product
        return xp.add(product, xp.reshape(widened(xp, bias), (bias.shape[0], 1, bias.shape[1])))


def _one_of(xp: PrimitivesOf[Any], stack: Any, number: int) -> Any:
    if stack is None:
        return None
    if not isinstance(stack, QuantizedWeight):
        return xp.reshape(xp.slice_axis(stack, 0, number, number + 1), tuple(stack.shape[1:]))
    one, shape = slice_rows(stack, number, number + 1).arrays.items(), stack.shape[1:]
    return stack.with_arrays({name: xp.reshape(x, tuple(x.shape[1:])) for name, x in one}, shape)


def _multiply(rows: Array, matrix: Any, bias: Any) -> Array:
    return (quantized_linear if isinstance(matrix, QuantizedWeight) else linear)(rows, matrix, bias)


# Which products are computed


def _experts(
    x: ArrayT, gate_up: Any, down: Any, chosen: ArrayT, weights: ArrayT, gate_up_bias: Any,
    down_bias: Any, activation: str, alpha: float, limit: float,
) -> ArrayT:  # fmt: skip
    xp = primitives(x)
    (tokens, k), count = chosen.shape, gate_up.shape[0]
    if not tokens * k * count * x.shape[1] * down.shape[2]:
        return xp.full(tuple(x.shape), 0, xp.dtype(x), x)
    packed = isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight)
    networks = _Networks(xp, (gate_up, down, gate_up_bias, down_bias), activation, alpha, limit)
    weights = xp.astype(weights, xp.dtype(widened(xp, x)))
    where = _where(chosen)
    if where == "host" or (where == "device" and tokens > FEW_TOKENS):
        engine = owner_of(chosen)
        assert engine is not None
        result = _sort_by_expert(networks, x, engine.to_host(chosen), weights)
    elif tokens * k * (1 if packed else COPIED) <= count:
        result = _gather_experts(networks, x, chosen, weights)
    elif packed:
        gate_up, down = (
            dequantize(s, xp.dtype(x)) if isinstance(s, QuantizedWeight) else s
            for s in (gate_up, down)
        )
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        options: Any = {"activation": activation, "alpha": alpha, "limit": limit}
        return experts(x, gate_up, down, chosen, weights, **biases, **options)
    elif tokens <= FEW_TOKENS:
        result = _side_by_side(networks, x, chosen, weights)
    else:
        result = _all_experts(networks, x, chosen, weights)
    return xp.astype(result, xp.dtype(x))


FEW_TOKENS = 128
"""Up to this many tokens go through all experts: on an H200, faster than sorting them."""
COPIED = 12
"""Cost of gathering a matrix, in matrices that are read in place, on an H200."""


def _where(chosen: Array) -> str:
    """Return where the indices are: on the host, on a device, or nowhere while code is traced."""
    engine = owner_of(chosen)
    compiling = sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo.")
    if compiling or engine is None or engine.is_traced(chosen):
        return "nowhere"
    return "host" if all(d.backend == "cpu" for d in engine.devices_of(chosen)) else "device"


_where._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sort_by_expert(networks: _Networks, x: ArrayT, chosen: Any, weights: ArrayT) -> ArrayT:
    """Compute one product for each chosen expert, over all rows that chose it."""
    import numpy as np

    xp, (tokens, k) = networks.xp, chosen.shape
    flat = chosen.reshape(-1).astype(np.int64)
    order = np.argsort(flat, kind="stable").astype(np.int32)  # JAX has no 64 bits by default
    order = order[(flat[order] >= 0) & (flat[order] < networks.count)]
    starts = np.flatnonzero(np.diff(flat[order], prepend=-1)).tolist()
    shares = xp.reshape(weights, (tokens * k, 1))
    pieces = []
    for start, stop in pairwise([*starts, len(order)]):
        mine = order[start:stop]
        alone = tokens == 1 and len(mine) == 1
        rows = x if alone else xp.take(x, xp.asarray(mine // k, x), 0)
        share = xp.slice_axis(shares, 0, int(mine[0]), int(mine[0]) + 1)
        share = share if len(mine) == 1 else xp.take(shares, xp.asarray(mine, x), 0)
        pieces.append(xp.multiply(networks.one(int(flat[mine[0]]), rows), share))
    nothing = xp.full((1, x.shape[1]), 0, xp.dtype(weights), x)
    if tokens == 1:
        return xp.sum(xp.concat([nothing, *pieces], 0), 0, True)
    places = np.zeros(tokens * k, np.int32)
    places[order] = np.arange(1, len(order) + 1)
    outputs = xp.take(xp.concat([nothing, *pieces], 0), xp.asarray(places, x), 0)
    return xp.sum(xp.reshape(outputs, (tokens, k, x.shape[1])), 1)


def _gather_experts(networks: _Networks, x: ArrayT, chosen: ArrayT, weights: ArrayT) -> ArrayT:
    """Copy the matrices of each choice, so that the host need not know the choices."""
    xp, (tokens, k) = networks.xp, chosen.shape
    inside, safe = _inside(xp, chosen, networks.count)
    rows = xp.broadcast_to(xp.reshape(x, (tokens, 1, x.shape[1])), (tokens, k, x.shape[1]))
    outputs = networks.of_each(
        xp.reshape(safe, (tokens * k,)), xp.reshape(rows, (tokens * k, x.shape[1]))
    )
    return _weighted_sum(xp, outputs, inside, weights)


def _side_by_side(networks: _Networks, x: ArrayT, chosen: ArrayT, weights: ArrayT) -> ArrayT:
    """Apply every expert to every token at once, and take the outputs that were chosen."""
    xp, (tokens, k) = networks.xp, chosen.shape
    inside, safe = _inside(xp, chosen, networks.count)
    row = xp.reshape(xp.arange(tokens, INT32, x), (tokens, 1))
    places = xp.reshape(xp.add(xp.multiply(safe, tokens), row), (tokens * k,))
    return _weighted_sum(xp, xp.take(networks.of_all(x), places, 0), inside, weights)


def _weighted_sum(
    xp: PrimitivesOf[ArrayT], outputs: ArrayT, inside: ArrayT, weights: ArrayT
) -> ArrayT:
    """Return the weighted sum of the outputs (tokens × k, hidden) of each token's choices."""
    shape = (*weights.shape, 1)
    outputs = xp.reshape(outputs, (*weights.shape, outputs.shape[1]))
    # Masked before they are multiplied: 0 × NaN would be a gradient.
    own = xp.where(xp.reshape(inside, shape), outputs, 0.0)
    shares = xp.reshape(xp.where(inside, weights, 0.0), shape)
    return xp.sum(xp.multiply(own, shares), 1)


def _all_experts(networks: _Networks, x: ArrayT, chosen: ArrayT, weights: ArrayT) -> ArrayT:
    """Apply every expert to every token, one expert after the other; mask what was not chosen."""
    xp, (tokens, _) = networks.xp, chosen.shape
    inside, safe = _inside(xp, chosen, networks.count)
    total: Any = None
    for number in range(networks.count):
        own = xp.logical_and(inside, xp.equal(safe, number))
        some = xp.reshape(xp.less(0, xp.sum(xp.astype(own, INT32), 1)), (tokens, 1))
        share = xp.reshape(xp.sum(xp.where(own, weights, 0.0), 1), (tokens, 1))
        output = xp.where(some, xp.multiply(networks.one(number, x), share), 0.0)
        total = output if total is None else xp.add(total, output)
    return total


def _inside(xp: PrimitivesOf[ArrayT], chosen: ArrayT, count: int) -> tuple[ArrayT, ArrayT]:
    """Return whether each choice is in range, and the choices as int32, 0 where they are not."""
    if xp.dtype(chosen).bits < 32:
        chosen = xp.astype(chosen, INT32)
    inside = xp.less(chosen, count)
    if xp.dtype(chosen).kind == "int":
        inside = xp.logical_and(inside, xp.less_equal(0, chosen))
    return inside, xp.astype(xp.where(inside, chosen, 0), INT32)
