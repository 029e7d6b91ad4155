"""Cases of the decoder layer that an engine may compute in one go: no op, but with kernels.

A kernel of it is used only where it was right here (`engines/trust.py`), like those of ops. Where
an engine has none, or it does not serve a case, that is unsupported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from anydevice.check.case import Call, Case, Draw, Make, Row
from anydevice.core.decoder_layer import LayerNumbers
from anydevice.core.rope_scaling import frequencies
from anydevice.errors import UnsupportedError
from anydevice.ops.dispatch import own_version

Array = Any

ROUNDINGS = 6.0
"""How many roundings to 16 bits of the largest part of a sum its result may be off by."""


def decoder_layer(*arguments: Any) -> Any:
    """The engine's own version of the layer: x, keys and values after it.

    Raises `UnsupportedError` if there is none, or none for these arguments.
    """
    result = own_version(arguments[0], "decoder_layer", _nothing)(*arguments)
    if result is NotImplemented:
        raise UnsupportedError("there is no kernel for this decoder layer; use ops for each step")
    return result


def _nothing(*arguments: Any) -> Any:
    return NotImplemented


def _layer_reference(
    x: Array, positions: Array, keys: Array, values: Array, attention_norm: Array, qkv: Array,
    output: Array, mlp_norm: Array, gate_up: Array, down: Array, qkv_bias: Any, output_bias: Any,
    query_norm: Any, key_norm: Any, numbers: LayerNumbers,
) -> tuple[Array, Array, Array]:  # fmt: skip
    keys, values = keys.copy(), values.copy()
    rows, heads, kv_heads, size = len(x), numbers.heads, numbers.kv_heads, numbers.size
    stream = x[:, 0]
    y = _rms(stream, attention_norm, numbers.eps) @ qkv.T + (0 if qkv_bias is None else qkv_bias)
    y = y.reshape(rows, heads + 2 * kv_heads, size)
    q, k, v = y[:, :heads], y[:, heads : heads + kv_heads], y[:, heads + kv_heads :]
    if query_norm is not None:
        q, k = _rms(q, query_norm, numbers.eps), _rms(k, key_norm, numbers.eps)
    q, k = _turned(q, positions, numbers), _turned(k, positions, numbers)
    attended = np.stack(
        [
            _seen(q[row], k[row], v[row], keys[row], values[row], int(positions[row]), numbers)
            for row in range(rows)
        ]
    )
    added = attended @ output.T + (0 if output_bias is None else output_bias)
    stream = stream + numbers.factor * added
    gate, up = np.split(_rms(stream, mlp_norm, numbers.eps) @ gate_up.T, 2, axis=-1)
    added = (gate / (1 + np.exp(-gate)) * up) @ down.T
    return (stream + numbers.factor * added)[:, None], keys, values


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def _turned(x: Array, positions: Array, numbers: LayerNumbers) -> Array:
    size = numbers.rotated
    if not size:
        return x
    found, factor = frequencies(size, numbers.theta, dict(numbers.scaling) or None)
    # Angles are float32, as everywhere.
    angle = np.asarray(positions, np.float32)[:, None, None] * np.asarray(found, np.float32)
    cosine, sine = np.cos(np.float64(angle)) * factor, np.sin(np.float64(angle)) * factor
    every = np.arange(size)
    first, second = (every[0::2], every[1::2]) if numbers.interleaved else np.split(every, 2)
    left, right = x[..., first], x[..., second]
    turned = x.copy()
    turned[..., first] = left * cosine - right * sine
    turned[..., second] = right * cosine + left * sine
    return turned


def _seen(
    q: Array, k: Array, v: Array, keys: Array, values: Array, position: int, numbers: LayerNumbers
) -> Array:
    """The attention of one row, (heads × size,); its keys and values are written."""
    slots = keys.shape[1]
    if numbers.ring:
        keys[:, position % slots], values[:, position % slots] = k, v
        seen = slice(0, min(position + 1, slots))
    else:
        keys[:, position], values[:, position] = k, v
        seen = slice(0, position + 1)
    group = numbers.heads // numbers.kv_heads
    held, meant = np.repeat(keys[:, seen], group, 0), np.repeat(values[:, seen], group, 0)
    scores = np.einsum("hd,hkd->hk", q, held) * numbers.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hk,hkd->hd", weights / weights.sum(-1, keepdims=True), meant).ravel()


def _budget(want: Any, coarse: float, x: Array, *arguments: Any) -> Any:
    """So many roundings to 16 bits of what is usual in a row: all sums have many parts."""
    after, keys, values = want
    inside = ROUNDINGS * max(coarse, 64.0)
    usual = np.sqrt(np.square(after).mean(-1, keepdims=True))
    new = [inside * np.sqrt(np.square(each).mean(-1, keepdims=True)) for each in (keys, values)]
    return inside * usual, *new


def _drawn(
    draw: Draw, numbers: LayerNumbers, hidden: int, inner: int, slots: int,
    positions: tuple[int, ...], *, biased: bool = False, normed: bool = False,
) -> Call:  # fmt: skip
    rows, size = len(positions), numbers.size
    wide = (numbers.heads + 2 * numbers.kv_heads) * size

    def matrix(outputs: int, inputs: int) -> Array:
        return draw.normal(outputs, inputs, spread=inputs**-0.5)

    def scale(width: int) -> Array:
        return draw.normal(width, spread=0.2, middle=1.0)

    # Queries and keys are large enough that attention picks out a few.
    qkv = matrix(wide, hidden)
    weights = (
        scale(hidden), qkv, matrix(hidden, numbers.heads * size), scale(hidden),
        matrix(2 * inner, hidden), matrix(hidden, inner),
    )  # fmt: skip
    held = [draw.normal(rows, numbers.kv_heads, slots, size) for _ in range(2)]
    biases = (draw.normal(wide), draw.normal(hidden)) if biased else (None, None)
    norms = (scale(size), scale(size)) if normed else (None, None)
    at = np.array(positions, np.int32)
    return Call((draw.normal(rows, 1, hidden), at, *held, *weights, *biases, *norms, numbers))


def _case(name: str, numbers: LayerNumbers, *sizes: Any, **options: Any) -> Case:
    make: Make = partial(_drawn, numbers=numbers, **_sizes(*sizes), **options)
    return Case(name, make)


def _sizes(hidden: int, inner: int, slots: int, positions: tuple[int, ...]) -> dict[str, Any]:
    return {"hidden": hidden, "inner": inner, "slots": slots, "positions": positions}


_LLAMA3 = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 64),
    ("rope_type", "llama3"),
)
_YARN = (("factor", 4.0), ("original_max_position_embeddings", 32), ("rope_type", "yarn"))
_PLAIN = LayerNumbers(4, 2, 64, 1e-5, 64**-0.5, rotated=64)

DECODER_LAYER = Row(
    "decoder_layer",
    (
        _case("one row, a few keys", _PLAIN, 256, 320, 40, (3,)),
        _case("three rows of unequal lengths", _PLAIN, 256, 320, 70, (0, 5, 69)),
        _case(
            "nine rows with biases",
            LayerNumbers(8, 2, 64, 1e-6, 0.1, rotated=64, theta=500000.0, scaling=_LLAMA3),
            200,
            264,
            33,
            (0, 1, 2, 3, 8, 15, 16, 31, 32),
            biased=True,
        ),
        _case(
            "norms of heads, sizes that are no power of two",
            LayerNumbers(6, 3, 80, 1e-6, 80**-0.5, rotated=80, scaling=_YARN),
            248,
            312,
            50,
            (7, 49),
            normed=True,
        ),
        _case(
            "half turned, by neighbours",
            LayerNumbers(4, 1, 96, 1e-5, 96**-0.5, rotated=48, interleaved=True, factor=0.22),
            256,
            256,
            20,
            (6,),
        ),
        _case(
            "a ring that went round",
            LayerNumbers(4, 4, 128, 1e-5, 128**-0.5, rotated=128, ring=True),
            256,
            320,
            24,
            (5, 23, 24, 77),
        ),
        _case("no positions", LayerNumbers(4, 2, 64, 1e-5, 0.125), 256, 320, 40, (4,)),
        _case(
            "seventeen rows, longer",
            LayerNumbers(16, 2, 128, 1e-5, 128**-0.5, rotated=128),
            512,
            640,
            700,
            tuple(range(3, 700, 41)),
        ),
    ),
    ("float16", "bfloat16"),
    budget=_budget,
    function=decoder_layer,
    reference=_layer_reference,
)
"""The row of the layer; it is not in `TABLE`, which has the ops."""
