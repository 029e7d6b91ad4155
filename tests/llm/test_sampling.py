"""Choosing tokens: what each filter keeps, how often each token is drawn, the same everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice._core.device import Device
from anydevice._llm import sampling as samples
from anydevice._llm.sampling import Sampling, choose, gumbel, row_seeds, sampling
from anydevice._machine.engines import registry
from anydevice.errors import ConfigurationError
from tests.comparing import assert_same_integers
from tests.nn.conftest import ENGINES, device_of_engine

NUMPY = anydevice.device("cpu", engine="numpy")


@pytest.fixture(params=ENGINES)
def anywhere(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


def chosen(
    device: Device, logits: Any, options: Sampling, places: Any = 0, seen: Any = None
) -> tuple[Any, Any]:
    """The tokens that are chosen for rows of logits, all with the seed of the options."""
    rows = len(logits)
    arrays = device(
        {
            "logits": np.asarray(logits, np.float32),
            "numbers": np.array(options.numbers, np.float32),
            "seeds": np.full(rows, row_seeds(options.seed, 1)[0], np.int32),
            "place": np.broadcast_to(np.asarray(places, np.int32), (rows,)).copy(),
        }
    )
    if seen is not None:
        arrays["seen"] = device(np.asarray(seen))
    token, logprob = choose(options.filters, **arrays)
    return anydevice.to_numpy(token), None if logprob is None else anydevice.to_numpy(logprob)


def drawn(options: Sampling, logits: Any, count: int) -> Any:
    """How often each token comes first in `count` replies of consecutive places."""
    rows = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    tokens, _ = chosen(NUMPY, rows, options, np.arange(count))
    return np.bincount(tokens, minlength=len(logits))


def chi_square(counts: Any, probabilities: Any) -> float:
    expected = np.asarray(probabilities) * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_tokens_are_drawn_as_often_as_their_probability_says(seed: int) -> None:
    logits = np.random.default_rng(3).standard_normal(40) * 1.5
    exact = np.exp(logits / 0.7 - np.logaddexp.reduce(logits / 0.7))
    counts = drawn(sampling(temperature=0.7, seed=seed), logits, 40_000)
    # 39 degrees of freedom: a right draw stays below 80 but for one in 8,000.
    assert chi_square(counts, exact) < 80
    filtered = drawn(sampling(temperature=0.7, top_k=10, seed=seed), logits, 40_000)
    exact = np.where(exact >= np.sort(exact)[-10], exact, 0)
    kept = exact > 0
    assert filtered[~kept].sum() == 0
    assert chi_square(filtered[kept], exact[kept] / exact.sum()) < 38  # 9 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 5e-324])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    logits = np.random.default_rng(5).standard_normal((20, 50)) * 10
    tokens, _ = chosen(NUMPY, logits, sampling(temperature=temperature, top_p=0.9, seed=1))
    assert_same_integers(tokens, logits.argmax(1))


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 1.0, "temperature": 0.7},
        {"min_p": 0.9, "temperature": 1e-9},
        {"min_p": 1.0, "temperature": 0.7, "top_k": 20},
        {"top_p": 1e-300},
        {"top_p": 1e-300, "top_k": 20},
    ],
    ids=str,
)
def test_strict_filters_leave_the_likeliest(options: dict[str, Any], anywhere: Device) -> None:
    """Compiled too, where a product and a sum become one, with other rounding."""
    logits = np.random.default_rng(5).standard_normal((200, 50)).astype(np.float32) * 10
    asked = sampling(seed=1, **options)
    tokens, _ = chosen(anywhere, logits, asked)
    assert_same_integers(tokens, logits.argmax(1))
    if anywhere.engine == "jax":
        compiled = registry.load("jax").compiler.compile(partial(choose, asked.filters))
        rest = anywhere((np.array(asked.numbers, np.float32), *np.zeros((2, 1), np.int32)))
        for row in logits[:20]:  # one by one: so it is compiled for one reply
            token, _ = compiled(anywhere(row[None]), *rest)
            assert anydevice.to_numpy(token) == row.argmax()


def test_the_largest_temperature_takes_every_token() -> None:
    counts = drawn(sampling(temperature=1e300, seed=1), [0.0, 3.0, -3.0, 50.0], 4000)
    assert counts.min() > 800


def test_draws_of_neighbouring_seeds_and_places_have_nothing_in_common() -> None:
    """Which of two tokens comes is a fair coin; those of two seeds or places agree by half."""
    places = np.arange(20_000)
    coins = [
        chosen(NUMPY, np.zeros((20_000, 2)), sampling(temperature=1, seed=seed), places)[0]
        for seed in range(4)
    ]
    pairs = [(coins[a], coins[b]) for a in range(4) for b in range(a)]
    pairs += [(coin[1:], coin[:-1]) for coin in coins] + [(coin[64:], coin[:-64]) for coin in coins]
    for one, other in pairs:
        assert abs(np.mean(one == other) - 0.5) < 0.016  # 4.5 standard deviations
    assert all(abs(np.mean(coin) - 0.5) < 0.016 for coin in coins)


def test_noise_is_gumbel_and_the_same_everywhere(anywhere: Device) -> None:
    seeds, places = np.array([1, 1, 9], np.int32), np.array([0, 1, 0], np.int32)
    tokens = np.arange(30_000, dtype=np.int32)[None]
    expected = gumbel(seeds, places, tokens)
    found = anydevice.to_numpy(gumbel(*anywhere((seeds, places, tokens))))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    for row in expected.astype(np.float64):
        ordered = np.exp(-np.exp(-np.sort(row)))  # uniform, if the noise is Gumbel's
        distance = np.abs(ordered - (np.arange(30_000) + 0.5) / 30_000).max()
        assert distance < 1.95 / 30_000**0.5  # Kolmogorov and Smirnov: one in a thousand
    assert np.abs(np.corrcoef(expected) - np.eye(3)).max() < 0.03


FILTERS: list[tuple[dict[str, float], list[tuple[str, dict[str, float]]]]] = [
    ({"top_k": 7}, [("TopKLogitsWarper", {"top_k": 7})]),
    ({"top_k": 1}, [("TopKLogitsWarper", {"top_k": 1})]),
    ({"top_k": 65}, [("TopKLogitsWarper", {"top_k": 65})]),
    ({"top_k": 900}, []),
    ({"top_k": 10**30}, []),
    ({"top_p": 0.9}, [("TopPLogitsWarper", {"top_p": 0.9})]),
    ({"top_p": 0.3}, [("TopPLogitsWarper", {"top_p": 0.3})]),
    ({"top_p": 1e-6}, [("TopPLogitsWarper", {"top_p": 1e-6})]),
    ({"min_p": 0.1}, [("MinPLogitsWarper", {"min_p": 0.1})]),
    (
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        [
            ("TemperatureLogitsWarper", {"temperature": 1.7}),
            ("TopKLogitsWarper", {"top_k": 20}),
            ("TopPLogitsWarper", {"top_p": 0.8}),
            ("MinPLogitsWarper", {"min_p": 0.05}),
        ],
    ),
    (
        {"temperature": 0.6, "top_p": 0.95, "min_p": 0.02},
        [
            ("TemperatureLogitsWarper", {"temperature": 0.6}),
            ("TopPLogitsWarper", {"top_p": 0.95}),
            ("MinPLogitsWarper", {"min_p": 0.02}),
        ],
    ),
]


@pytest.mark.parametrize(("options", "theirs"), FILTERS, ids=lambda x: str(x)[:40])
def test_filters_keep_the_tokens_that_transformers_keeps(
    options: dict[str, Any], theirs: list[tuple[str, dict[str, Any]]], anywhere: Device
) -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(5).standard_normal((6, 500)).astype(np.float32) * 3
    scores = torch.from_numpy(logits.copy())
    for name, arguments in theirs:
        scores = getattr(processors, name)(**arguments)(None, scores)
    expected = scores.isfinite().numpy()
    asked = sampling(seed=0, **options)
    assert not asked.filters.greedy
    x = anywhere(logits * np.float32(asked.numbers[0]))
    numbers = anywhere(np.array(asked.numbers, np.float32))
    found = np.zeros_like(expected)
    ids = np.broadcast_to(np.arange(500), (6, 500))
    top_p, distance, top_k = (anydevice.ops.slice_axis(numbers, 0, at, at + 1) for at in (1, 2, 4))
    if asked.top_k:
        x, at = samples._take_candidates(x, asked.filters.candidates, top_k)
        ids = anydevice.to_numpy(at)
    x = anydevice.ops.subtract(x, anydevice.ops.max(x, axis=-1, keepdims=True))
    kept = samples._filter(asked.filters, x, top_p, distance, in_order=asked.top_k > 0)
    np.put_along_axis(found, ids, np.isfinite(anydevice.to_numpy(kept)), -1)
    assert_same_integers(found, expected)


def test_the_penalty_is_that_of_transformers(anywhere: Device) -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(6).standard_normal((50, 12)).astype(np.float32)
    before = np.random.default_rng(7).integers(0, 12, (50, 6))
    penalty = processors.RepetitionPenaltyLogitsProcessor(1.8)
    expected = penalty(torch.from_numpy(before), torch.from_numpy(logits.copy())).argmax(-1).numpy()
    seen = np.zeros((50, 12), bool)
    np.put_along_axis(seen, before, True, -1)
    found, _ = chosen(anywhere, logits, sampling(repetition_penalty=1.8), seen=seen)
    assert_same_integers(found, expected)
    assert (found != logits.argmax(-1)).any()


def test_log_probabilities_are_those_of_the_model_before_filters(anywhere: Device) -> None:
    logits = np.random.default_rng(8).standard_normal((5, 30)).astype(np.float32) * 4
    options = sampling(temperature=0.5, top_k=3, top_p=0.9, seed=4, logprobs=True)
    tokens, logprobs = chosen(anywhere, logits, options)
    wide = logits.astype(np.float64)
    exact = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    np.testing.assert_allclose(logprobs, exact[np.arange(5), tokens], atol=1e-5)


def test_a_row_draws_alone_as_in_a_batch_and_with_candidates_as_without(anywhere: Device) -> None:
    logits = np.random.default_rng(9).standard_normal((8, 300)).astype(np.float32) * 2
    options = sampling(temperature=1, seed=11)
    together, _ = chosen(anywhere, logits, options, np.arange(8))
    alone = [chosen(anywhere, logits[at : at + 1], options, at)[0][0] for at in range(8)]
    assert together.tolist() == alone
    expected, _ = chosen(NUMPY, logits, options, np.arange(8))
    assert_same_integers(together, expected)
    # The noise belongs to the token: candidates that hold the winner give the winner.
    fewer, _ = chosen(anywhere, logits, sampling(temperature=1, top_k=299, seed=11), np.arange(8))
    assert_same_integers(fewer, expected)


def test_greedy_takes_the_first_of_the_largest(anywhere: Device) -> None:
    tokens, _ = chosen(anywhere, [[0, 3, 3, 1], [5, 1, 5, 5]], sampling(temperature=0, top_k=2))
    assert tokens.tolist() == [1, 0]


def test_seeds_of_a_batch_count_on_and_may_be_large() -> None:
    assert row_seeds(7, 3) == [7, 8, 9]
    assert row_seeds(2**31 - 1, 2)[0] == 2**31 - 1
    assert 0 <= row_seeds(2**31 - 1, 2)[1] < 2**31
    assert row_seeds(2**80 + 1, 1) == row_seeds(2**80, 2)[1:]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("logprobs", 5),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("seed", 1.5),
    ],
)
def test_what_is_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        sampling(**{name: value})


def test_greedy_unless_something_asks_for_a_draw() -> None:
    assert sampling().filters.greedy
    assert sampling(seed=3).filters.greedy
    for filtered in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert sampling(**filtered).temperature == 1
    assert sampling(temperature=1).seed != sampling(temperature=1).seed
