"""Sampling: the next token, computed on the device from the logits, the same on every engine.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, then a
draw from the remaining tokens. The penalty comes first because it applies to logits; temperature
comes before the filters, so that they see the probabilities of the draw.

A draw adds Gumbel noise to the logits and takes the largest sum, which is a draw from their
softmax (the Gumbel-max trick, Gumbel 1954). The noise is a function of the seed, the place in the
reply and the token, by arithmetic on 32-bit integers, which wrap around everywhere. So a seed gives
the same tokens on every engine, unless two sums are equal up to rounding; other rows of a batch
change nothing; and with filters, only the remaining tokens need noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from typing import Any

from anydevice import _ops as ops
from anydevice._core import checks
from anydevice._core.array import Array
from anydevice._core.dtypes import DTYPES
from anydevice._core.record import Record
from anydevice._llm.text import stop_strings
from anydevice._nn.random_choice import BETWEEN, ROUNDS, folded_seed, mixed
from anydevice._ops.dispatch import own_version, primitives

_INT32, _FLOAT32 = DTYPES["int32"], DTYPES["float32"]
# Odd numbers without a pattern, within 31 bits.
_BY_SEED, _BY_PLACE, _BY_TOKEN = 0x1F83D9AB, 0x5BE0CD19, 0x367CD507
_FAINTEST = -40.0
"""Logit, relative to the largest, below which a token adds nothing to a sum of probabilities."""
_LARGEST = 1e30
"""The largest factor of logits: its product with any logit is finite in float32."""
_SMALLEST = 1 / _LARGEST
"""The smallest value of an option above 0: in float32 it is not 0."""
_FEWEST, _MORE = 64, 8
"""The number of candidates for a small `top_k`, and the factor from one size to the next."""
_MOST_EXACT = 2**24
"""Float32 represents every integer up to this one."""
NO_TOKEN = -1
"""The token of a row with a logit that is NaN or infinite."""
_HALVINGS = 28
"""Bisections of the span down to `_FAINTEST`: after them its ends are equal up to rounding."""


class Filters(Record):
    """The steps of sampling on which compiled code depends; `candidates` is 0 for all tokens."""

    greedy: bool = True
    candidates: int = 0
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False
    logprobs: bool = False


class Sampling(Record):
    """How tokens are selected; `sampling` creates it from the options of `generate`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: bool = False

    @property
    def filters(self) -> Filters:
        """The steps that have an effect."""
        penalty = self.repetition_penalty != 1
        if not self.temperature:
            return Filters(penalty=penalty, logprobs=self.logprobs)
        candidates = _FEWEST if self.top_k else 0
        while candidates < self.top_k:
            candidates *= _MORE
        top_p, min_p = self.top_p < 1, self.min_p > 0
        return Filters(False, candidates, top_p, min_p, penalty, self.logprobs)

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """The array that `choose` takes: 1 / temperature, top_p, log(min_p), penalty, top_k."""
        inverse = 1 / self.temperature if self.temperature else 1.0
        distance = math.log(self.min_p) if self.min_p else -math.inf
        penalty = _clamp(self.repetition_penalty)
        top_k = float(min(self.top_k, _MOST_EXACT))
        return _clamp(inverse), _clamp(self.top_p), distance, penalty, top_k


def sampling(
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    logprobs: bool = False,
) -> Sampling:
    """Check the options of `generate`. `None` has no effect; a seed of `None` is random.

    Without a temperature and a filter, or with a temperature of 0, the likeliest token is taken. A
    filter without a temperature has a temperature of 1.

    Raises `ConfigurationError` for a number that is out of its range, by name.
    """
    if temperature is None:
        drawn = top_k is not None or top_p is not None or min_p is not None
        temperature = 1.0 if drawn else 0.0
    penalty = 1.0 if repetition_penalty is None else repetition_penalty
    return Sampling(
        checks.number("temperature", temperature, at_least=0, note="0 is the likeliest token"),
        checks.integer("top_k", 0 if top_k is None else top_k, 0, note="0 is all tokens"),
        checks.number("top_p", 1.0 if top_p is None else top_p, above=0, at_most=1),
        checks.number("min_p", 0.0 if min_p is None else min_p, at_least=0, at_most=1),
        checks.number("repetition_penalty", penalty, above=0, note="1 changes nothing"),
        secrets.randbits(31) if seed is None else checks.integer("seed", seed),
        checks.one_of("logprobs", logprobs, (True, False)),
    )


class GenerationOptions(Record):
    """The options of `generate` and `stream`; `generation_options` checks them."""

    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    reuse: bool = False


def generation_options(
    choice: Sampling, max_tokens: int, stop: str | Iterable[str] | None, reuse: bool
) -> GenerationOptions:
    """Check the options of `generate` that are not about sampling."""
    limit = checks.integer("max_tokens", max_tokens, 1)
    return GenerationOptions(choice, limit, tuple(stop_strings(stop)), bool(reuse))


def row_seeds(seed: int, rows: int) -> list[int]:
    """Return the seeds of prompts: each draws as it would alone with `seed` + its number."""
    return [folded_seed(seed + row) for row in range(rows)]


def choose(
    filters: Filters,
    logits: Array,
    numbers: Array,
    seeds: Array,
    place: Array,
    seen: Array | None = None,
) -> tuple[Array, Array | None]:
    """Return the next token of each row (rows,) int32, and its log probability if requested.

    `logits` are (rows, vocabulary), `numbers` (5,) come from `Sampling`, `seeds` are (rows,) int32;
    `place` (rows,) int32 is the place of the token in its reply, which greedy sampling ignores;
    `seen` (rows, vocabulary) is true for tokens with a penalty. The log probability (rows,) is the
    model's own, before penalty, temperature and filters. A row with a logit that is NaN or infinite
    gets `NO_TOKEN`.
    """
    if not (filters.penalty or filters.candidates):
        own = own_version(logits, "draw_token", not_implemented)
        kind = filters.greedy, filters.top_p, filters.min_p
        token = own(logits, numbers, seeds, place, *kind, _CONSTANTS)
        if token is not NotImplemented:
            if not filters.logprobs:
                return token, None
            known = ops.maximum(token, 0)
            return token, log_probability(ops.astype(logits, _FLOAT32), known)
    raw = ops.astype(logits, _FLOAT32)
    token = _draw(filters, raw, numbers, seeds, place, seen)
    logprob = log_probability(raw, token) if filters.logprobs else None
    # The token itself marks the error: the host reads nothing more.
    return ops.where(ops.isfinite(ops.sum(raw, axis=-1)), token, NO_TOKEN), logprob


def _draw(
    filters: Filters, raw: Array, numbers: Array, seeds: Array, place: Array, seen: Array | None
) -> Array:
    xp = primitives(raw)
    x = raw
    if filters.penalty:
        assert seen is not None, "a penalty needs the tokens before"
        penalty = ops.slice_axis(numbers, 0, 3, 4)
        lowered = ops.where(ops.less(x, 0.0), ops.multiply(x, penalty), ops.divide(x, penalty))
        x = ops.where(seen, lowered, x)
    if filters.greedy:
        return ops.argmax(x)
    inverse, top_p, distance, _, top_k = (ops.slice_axis(numbers, 0, at, at + 1) for at in range(5))
    ids = None
    if filters.candidates:
        x, ids = _take_candidates(x, filters.candidates, top_k)
    # In this order: if a compiler fused product and sum, the largest would not be exactly 0.
    x = ops.multiply(ops.subtract(x, ops.max(x, axis=-1, keepdims=True)), inverse)
    x = _filter(filters, x, top_p, distance, in_order=ids is not None)
    if ids is None:
        every = ops.reshape(xp.arange(x.shape[-1], _INT32, x), (1, -1))
        return ops.argmax(ops.add(x, gumbel(seeds, place, every)))
    at = ops.argmax(ops.add(x, gumbel(seeds, place, ids)))
    return ops.reshape(xp.take_along_axis(ids, ops.reshape(at, (-1, 1)), -1), (-1,))


def _take_candidates(x: Array, candidates: int, top_k: Array) -> tuple[Array, Array]:
    """Return the largest logits in order, minus infinity behind `top_k`, and their tokens."""
    x, ids = ops.top_k(x, min(candidates, x.shape[-1]))
    rank = ops.astype(primitives(x).arange(x.shape[-1], _INT32, x), _FLOAT32)
    return ops.where(ops.less(ops.reshape(rank, (1, -1)), top_k), x, -math.inf), ids


_CONSTANTS = (_BY_SEED, _BY_PLACE, _BY_TOKEN, BETWEEN, ROUNDS, _HALVINGS, _FAINTEST)


def not_implemented(*arguments: object) -> Any:
    """Stand for a kernel that the engine does not have."""
    return NotImplemented


def log_probability(logits: Array, tokens: Array) -> Array:
    """Return the log probability of one token a row, for float32 logits (…, vocabulary)."""
    xp = primitives(logits)
    own = xp.take_along_axis(logits, ops.reshape(tokens, (*tokens.shape, 1)), -1)
    return ops.subtract(ops.reshape(own, tokens.shape), ops.logsumexp(logits, axis=-1))


def gumbel(seeds: Array, place: Array, tokens: Array) -> Array:
    """Return Gumbel noise (rows, tokens) for tokens (1 or rows, tokens); the rest is (rows,)."""
    rows = (seeds.shape[0], 1)
    key = mixed(ops.multiply(ops.reshape(seeds, rows), _BY_SEED))
    key = mixed(ops.add(key, ops.multiply(ops.reshape(place, rows), _BY_PLACE)))
    # An odd factor for each row, as in random_mask: no compiler may reason about x · x.
    odd = ops.add(ops.multiply(key, 2), 1)
    number = ops.multiply(mixed(ops.add(ops.multiply(tokens, _BY_TOKEN), key)), odd)
    number = ops.where(ops.less(number, 0), ops.subtract(-1, number), number)
    v = ops.multiply(ops.add(ops.astype(number, _FLOAT32), 0.5), 2.0**-31)
    # -log(1 - v), by its series for small v, which gives the largest noise.
    series = ops.multiply(v, ops.add(ops.multiply(v, ops.add(ops.multiply(v, 1 / 3), 0.5)), 1.0))
    logarithm = ops.negative(ops.log(ops.maximum(ops.subtract(1.0, v), 2.0**-25)))
    return ops.negative(ops.log(ops.where(ops.less(v, 2.0**-7), series, logarithm)))


def _filter(filters: Filters, x: Array, top_p: Array, distance: Array, in_order: bool) -> Array:
    """Replace the logits that filters drop by minus infinity; the largest logit is 0."""
    filtered = x
    if filters.top_p:
        if in_order:
            weights = ops.softmax(x)
            above = ops.subtract(ops.cumulative_sum(weights), weights)
            # The first is always kept: the sum above it is 0, up to rounding.
            filtered = ops.where(ops.less(above, top_p), filtered, -math.inf)
            filtered = ops.where(ops.equal(x, 0.0), x, filtered)
        else:
            filtered = ops.where(ops.greater(x, _below_nucleus(x, top_p)), filtered, -math.inf)
    if filters.min_p:
        filtered = ops.where(ops.greater_equal(x, distance), filtered, -math.inf)
    return filtered


def _below_nucleus(x: Array, top_p: Array) -> Array:
    """Return the threshold of each row's nucleus (Holtzman et al. 2020), by bisection."""
    weights = ops.exp(x)
    wanted = ops.multiply(ops.sum(weights, axis=-1, keepdims=True), top_p)
    low = ops.full_like(wanted, _FAINTEST)
    high = ops.full_like(wanted, 0.0)
    for _ in range(_HALVINGS):
        middle = ops.multiply(ops.add(low, high), 0.5)
        above = ops.sum(ops.where(ops.greater(x, middle), weights, 0.0), axis=-1, keepdims=True)
        reached = ops.greater_equal(above, wanted)
        low, high = ops.where(reached, middle, low), ops.where(reached, high, middle)
    return low


def _clamp(number: float) -> float:
    return max(min(number, _LARGEST), _SMALLEST)
