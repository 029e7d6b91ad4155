"""Cases of what an engine may compute in one go, no op, but with kernels: layers, logits, a draw.

A kernel is used only where it was right here (`_engines/trust.py`), like those of ops. Where an
engine has none, or it does not serve a case, that is unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from anydevice._check.cases.case import Call, Case, Draw, Make, Row, index
from anydevice._core.engine import LayerConfig
from anydevice._core.rope_scaling import frequencies
from anydevice._ops.dispatch import own_version
from anydevice.errors import UnsupportedError

Array = np.ndarray[Any, Any]

ROUNDINGS = 6.0
"""How many roundings to 16 bits of the largest part of a sum its result may be off by."""


def _own(name: str) -> Callable[..., Any]:
    """The engine's own version, which raises `UnsupportedError` where it has none for arguments."""

    def run(*arguments: Any) -> Any:
        result = own_version(arguments[0], name, lambda *arguments: NotImplemented)(*arguments)
        if result is NotImplemented:
            raise UnsupportedError(f"there is no kernel for this {name}; use ops for each step")
        return result

    return run


def _layer_reference(
    x: Array, positions: Array, keys: Array, values: Array, attention_norm: Array, qkv: Array,
    output: Array, mlp_norm: Array, gate_up: Array, down: Array, qkv_bias: Any, output_bias: Any,
    query_norm: Any, key_norm: Any, numbers: LayerConfig,
) -> tuple[Array, Array, Array]:  # fmt: skip
    keys, values = keys.copy(), values.copy()
    rows, heads, kv_heads, size = len(x), numbers.heads, numbers.kv_heads, numbers.size
    stream = x[:, 0]
    y = _rms(stream, attention_norm, numbers.eps) @ qkv.T + (0 if qkv_bias is None else qkv_bias)
    y = y.reshape(rows, heads + 2 * kv_heads, size)
    q, k, v = y[:, :heads], y[:, heads : heads + kv_heads], y[:, heads + kv_heads :]
    if query_norm is not None:
        q, k = _rms(q, query_norm, numbers.eps), _rms(k, key_norm, numbers.eps)
    q, k = _rotate(q, positions, numbers), _rotate(k, positions, numbers)
    attended = np.stack(
        [
            _attend(q[row], k[row], v[row], keys[row], values[row], int(positions[row]), numbers)
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


def _rotate(x: Array, positions: Array, numbers: LayerConfig) -> Array:
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


def _attend(
    q: Array, k: Array, v: Array, keys: Array, values: Array, position: int, numbers: LayerConfig
) -> Array:
    """Write the keys and values of one row; return its attention, (heads × size,)."""
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
    """Return a budget of roundings to 16 bits of a usual element of a row."""
    after, keys, values = want
    inside = ROUNDINGS * max(coarse, 64.0)
    usual = np.sqrt(np.square(after).mean(-1, keepdims=True))
    new = [inside * np.sqrt(np.square(each).mean(-1, keepdims=True)) for each in (keys, values)]
    return inside * usual, *new


def _layer_call(
    draw: Draw, numbers: LayerConfig, hidden: int, inner: int, slots: int,
    positions: tuple[int, ...], *, biased: bool = False, normed: bool = False, tokens: int = 1,
    only: tuple[int, ...] | None = None,
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
    rest = () if only is None else (np.array(only, np.int32),)
    x = draw.normal(rows, tokens, hidden)
    return Call((x, at, *held, *weights, *biases, *norms, numbers, *rest))


def _case(name: str, numbers: LayerConfig, *sizes: Any, **options: Any) -> Case:
    make: Make = partial(_layer_call, numbers=numbers, **_sizes(*sizes), **options)
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
_PLAIN = LayerConfig(4, 2, 64, 1e-5, 64**-0.5, rotated=64)

DECODER_LAYER = Row(
    "decoder_layer",
    (
        _case("one row, a few keys", _PLAIN, 256, 320, 40, (3,)),
        _case("three rows of unequal lengths", _PLAIN, 256, 320, 70, (0, 5, 69)),
        _case(
            "nine rows with biases",
            LayerConfig(8, 2, 64, 1e-6, 0.1, rotated=64, theta=500000.0, scaling=_LLAMA3),
            200,
            264,
            33,
            (0, 1, 2, 3, 8, 15, 16, 31, 32),
            biased=True,
        ),
        _case(
            "norms of heads, sizes that are no power of two",
            LayerConfig(6, 3, 80, 1e-6, 80**-0.5, rotated=80, scaling=_YARN),
            248,
            312,
            50,
            (7, 49),
            normed=True,
        ),
        _case(
            "half turned, by neighbours",
            LayerConfig(4, 1, 96, 1e-5, 96**-0.5, rotated=48, interleaved=True, factor=0.22),
            256,
            256,
            20,
            (6,),
        ),
        _case(
            "a ring that went round",
            LayerConfig(4, 4, 128, 1e-5, 128**-0.5, rotated=128, ring=True),
            256,
            320,
            24,
            (5, 23, 24, 77),
        ),
        _case("no positions", LayerConfig(4, 2, 64, 1e-5, 0.125), 256, 320, 40, (4,)),
        _case(
            "seventeen rows, longer",
            LayerConfig(16, 2, 128, 1e-5, 128**-0.5, rotated=128),
            512,
            640,
            700,
            tuple(range(3, 700, 41)),
        ),
    ),
    ("float16", "bfloat16"),
    budget=_budget,
    function=_own("decoder_layer"),
    reference=_layer_reference,
)


def _prompt_reference(
    x: Array, positions: Array, keys: Array, values: Array, *others: Any
) -> tuple[Array, Array, Array]:
    """Token by token: the cache has nothing before the first."""
    only = others[11] if len(others) > 11 else None
    after = []
    for at in range(x.shape[1]):
        y, keys, values = _layer_reference(
            x[:, at : at + 1], positions + at, keys, values, *others[:11]
        )
        after.append(y)
    whole = np.concatenate(after, 1)
    if only is not None:
        whole = whole[np.arange(len(x)), only][:, None]
    return whole, keys, values


PROMPT_LAYER = Row(
    "prompt_layer",
    (
        _case("three tokens", _PLAIN, 256, 320, 40, (0,), tokens=3),
        _case(
            "two rows with biases",
            LayerConfig(8, 2, 64, 1e-6, 0.1, rotated=64, theta=500000.0, scaling=_LLAMA3),
            200,
            264,
            33,
            (0, 0),
            biased=True,
            tokens=33,
        ),
        _case(
            "norms of heads, sizes that are no power of two",
            LayerConfig(6, 3, 80, 1e-6, 80**-0.5, rotated=80, scaling=_YARN),
            248,
            312,
            50,
            (0,),
            normed=True,
            tokens=21,
        ),
        _case(
            "half turned, by neighbours",
            LayerConfig(4, 1, 96, 1e-5, 96**-0.5, rotated=48, interleaved=True, factor=0.22),
            256,
            256,
            20,
            (0,),
            tokens=17,
        ),
        _case("no positions", LayerConfig(4, 4, 64, 1e-5, 0.125), 256, 320, 40, (0,), tokens=9),
        _case("the last tokens alone", _PLAIN, 256, 320, 40, (0, 0), tokens=9, only=(8, 3)),
        _case(
            "many tokens",
            LayerConfig(8, 2, 128, 1e-5, 128**-0.5, rotated=128),
            256,
            320,
            150,
            (0,),
            tokens=150,
        ),
    ),
    ("float16", "bfloat16"),
    budget=_budget,
    function=_own("prompt_layer"),
    reference=_prompt_reference,
)


def _logits_call(rows: int, width: int, words: int) -> Callable[[Draw], Call]:
    def make(draw: Draw) -> Call:
        head = draw.normal(words, width, spread=width**-0.5)
        return Call((draw.normal(rows, width), draw.normal(width, middle=1.0), head, 1e-5))

    return make


FINAL_LOGITS = Row(
    "final_logits",
    (
        Case("one row", _logits_call(1, 256, 500)),
        Case("one row, odd sizes", _logits_call(1, 200, 333)),
        Case("five rows", _logits_call(5, 256, 333)),
        Case("thirty rows", _logits_call(30, 512, 500)),
    ),
    ("float16", "bfloat16"),
    budget=lambda want, coarse, *arguments: (
        ROUNDINGS * max(coarse, 64.0) * np.sqrt(np.square(want).mean(-1, keepdims=True))
    ),
    function=_own("final_logits"),
    reference=lambda x, norm, head, eps: _rms(x, norm, eps) @ head.T,
)


DRAW = (0x1F83D9AB, 0x5BE0CD19, 0x367CD507, 0x510E527F, 3, 28, -40.0)
"""Constants as `draw_token` takes them."""


def _wrap(x: Array) -> Array:
    """Wrap integers to 32 bits."""
    return (x + 2**31) % 2**32 - 2**31


def _mix(x: Array, between: int, rounds: int) -> Array:
    for number in range(rounds):
        x = _wrap(_wrap(x * _wrap(2 * x + 1)) + between + number)
    return x


def _draw_reference(
    logits: Array, numbers: Array, seeds: Array, place: Array, greedy: bool, top_p: bool,
    min_p: bool, constants: tuple[Any, ...],
) -> Array:  # fmt: skip
    finite: Any = np.isfinite(logits).all(1)
    logits = np.where(finite[:, None], logits, 0.0)
    if greedy:
        return np.where(finite, np.argmax(logits, 1), -1)
    by_seed, by_place, by_token, between, rounds, _, _ = constants
    key = _mix(_wrap(seeds * by_seed), between, rounds)
    key = _mix(_wrap(key + _wrap(place * by_place)), between, rounds)[:, None]
    token = _wrap(_wrap(np.arange(logits.shape[1]) * by_token) + key)
    number = _wrap(_mix(token, between, rounds) * _wrap(2 * key + 1))
    chance = (np.where(number < 0, -1 - number, number) + 0.5) / 2**31
    x = logits * numbers[0]
    x = x - x.max(1, keepdims=True)
    score = x - np.log(-np.log1p(-chance))
    if top_p:
        order = np.argsort(-x, axis=1, kind="stable")
        weights = np.take_along_axis(np.exp(x), order, 1)
        above = np.cumsum(weights, 1) - weights
        kept = above < numbers[1] * weights.sum(1, keepdims=True)
        faint = np.empty_like(kept)
        np.put_along_axis(faint, order, ~kept, 1)
        score = np.where(faint, -np.inf, score)
    if min_p:
        score = np.where(x < numbers[2], -np.inf, score)
    return np.where(finite, np.argmax(score, 1), -1)


def _logits(
    rows: int, width: int, heat: float, top_p: float = 1.0, min_p: float = 0.0, *,
    greedy: bool = False, damaged: bool = False,
) -> Callable[[Draw], Call]:  # fmt: skip
    def make(draw: Draw) -> Call:
        distance = np.log(min_p) if min_p else -np.inf
        numbers = np.array([1 / heat, top_p, distance, 1.0, 0.0], np.float32)
        seeds, place = draw.integers(-(2**31), 2**31 - 1, rows), draw.integers(0, 5000, rows)
        spread = draw.normal(rows, width, spread=4.0)
        if damaged:
            spread[0, width // 2], spread[-1, -1] = np.nan, -np.inf
        return Call((spread, numbers, seeds, place, greedy, top_p < 1, min_p > 0, DRAW))

    return make


DRAW_TOKEN = Row(
    "draw_token",
    (
        Case("three rows", _logits(3, 1000, 1.0)),
        Case("the likeliest that reach a part", _logits(3, 1000, 0.8, top_p=0.9)),
        Case("those that are not too faint", _logits(5, 777, 1.2, min_p=0.05)),
        Case("a large vocabulary, both", _logits(3, 20011, 1.0, top_p=0.95, min_p=0.01)),
        Case("few words, cold", _logits(9, 7, 0.2, top_p=0.5)),
        Case("cold, only the likeliest", _logits(9, 777, 1e-3, min_p=1.0)),
        Case("the likeliest", _logits(3, 20011, 1.0, greedy=True)),
        Case("many words", _logits(2, 40000, 0.7)),
        Case("cold, of many words", _logits(3, 5000, 1e-6)),
        Case("NaN and infinity", _logits(3, 3000, 1.0, damaged=True)),
        Case("NaN and infinity, the likeliest", _logits(3, 3000, 1.0, greedy=True, damaged=True)),
        Case("NaN and infinity, of a part", _logits(3, 3000, 1.0, top_p=0.9, damaged=True)),
    ),
    ("float32", "float16", "bfloat16"),
    gives=index,
    function=_own("draw_token"),
    reference=_draw_reference,
)

OTHERS: Mapping[str, Row] = {
    row.op: row for row in (DECODER_LAYER, PROMPT_LAYER, FINAL_LOGITS, DRAW_TOKEN)
}
"""The rows of what is no op; `TABLE` has those of ops."""
