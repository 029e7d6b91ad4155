"""Attention against the reference, for every combination of its options."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice._check import reference
from anydevice._ops import transformer
from anydevice.errors import ConfigurationError
from tests.comparing import COPIED, assert_close, assert_same_values

Array = np.ndarray[Any, Any]


def wanted(*arrays: Array, **options: Any) -> Array:
    return reference.call("attention", *arrays, **options)


def inputs(
    kv_heads: int = 2, queries: int = 3, keys: int = 5, size: int = 4
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(queries * 10 + keys)
    q = rng.normal(size=(2, 4, queries, size))
    k, v = rng.normal(size=(2, 2, kv_heads, keys, size))
    return q, k, v


MASKS = {
    "none": None,
    "batch-keys": (2, 5),
    "one-keys": (1, 5),
    "keys": (5,),
    "queries-keys": (1, 1, 3, 5),
    "all": (2, 4, 3, 5),
    "heads": (4, 1, 1),
    "batch-queries": (2, 1, 3, 1),
}


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("limit", [1 << 26, 1])
def test_every_mask(
    mask_name: str, kv_heads: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "_MAX_SCORES", limit)
    q, k, v = inputs(kv_heads=kv_heads)
    shape = MASKS[mask_name]
    mask = None if shape is None else np.random.default_rng(1).random(shape) < 0.6
    ways = itertools.product(
        [(False, None), (True, None), (True, 1), (True, 2), (True, 100)],
        [None, np.array([5, 3]), np.array([1, 0])],
        [None, 0.3],
    )
    for (causal, window), lengths, scale in ways:
        options: dict[str, Any] = {"causal": causal, "window": window, "mask": mask}
        options |= {"lengths": lengths, "scale": scale}
        result = ops.attention(q, k, v, **options)
        np.testing.assert_allclose(result, wanted(q, k, v, **options), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (7, 7), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_queries_and_keys(queries: int, keys: int, causal: bool) -> None:
    q, k, v = inputs(queries=queries, keys=keys)
    result = ops.attention(q, k, v, causal=causal)
    np.testing.assert_allclose(result, wanted(q, k, v, causal=causal), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("limit", [1 << 26, 1])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("value_size", [1, 4, 7])
def test_soft_caps_and_sinks_and_values_of_their_own_size(
    value_size: int, kv_heads: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "_MAX_SCORES", limit)
    rng = np.random.default_rng(value_size)
    q, k, _ = inputs(kv_heads=kv_heads)
    v = rng.normal(size=(2, kv_heads, 5, value_size))
    sinks, mask = rng.normal(size=4), rng.random((2, 1, 3, 5)) < 0.6
    for soft_cap, beside, seen, lengths, scale in itertools.product(
        [None, 0.7, 3], [None, sinks], [None, mask], [None, np.array([4, 0])], [None, 2.0]
    ):
        options: dict[str, Any] = {"mask": seen, "lengths": lengths, "scale": scale}
        options |= {"causal": True, "soft_cap": soft_cap, "sinks": beside}
        result = ops.attention(q, k, v, **options)
        np.testing.assert_allclose(result, wanted(q, k, v, **options), rtol=1e-12, atol=1e-14)


def test_a_large_soft_cap_and_sinks_far_below_change_nothing() -> None:
    q, k, v = inputs()
    plain = ops.attention(q, k, v)
    np.testing.assert_allclose(ops.attention(q, k, v, soft_cap=1e9), plain, rtol=1e-12)
    below = np.full(4, -math.inf)
    assert_close(ops.attention(q, k, v, sinks=below), plain, terms=16)
    halved = ops.attention(q * 0, k, v, sinks=np.full(4, math.log(5)))
    np.testing.assert_allclose(halved, ops.attention(q * 0, k, v) / 2, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_numbers_are_rounded_once(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in inputs(queries=4, keys=40, size=16))
    result = ops.attention(q, k, v, causal=True)
    exact = wanted(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    assert result.dtype == dtype
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(result.astype(np.float64), exact, rtol=eps * 0.6 + 3e-6, atol=1e-6)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v = inputs()
    assert not ops.attention(q, k, v, mask=np.zeros((2, 5), bool)).any()
    assert not ops.attention(q, k, v, lengths=np.array([0, 0])).any()
    more = ops.attention(*inputs(queries=6, keys=2), causal=True)
    assert not more[:, :, :4].any()
    assert more[:, :, 4:].all()


def test_keys_that_are_not_valid_do_not_matter() -> None:
    q, k, v = inputs()
    before = ops.attention(q, k, v, lengths=np.array([3, 4]))
    k[0, :, 3:], v[1, :, 4:] = math.nan, 1e30
    after = ops.attention(q, k, v, lengths=np.array([3, 4]))
    assert_same_values(before, after, because=COPIED)


def test_scores_of_any_size_do_not_overflow() -> None:
    q, k, v = inputs(queries=1)
    result = ops.attention(*(x.astype(np.float32) for x in (q * 1e18, k * 1e18, v)))
    assert np.isfinite(result).all()


@pytest.mark.parametrize("shape", [(0, 4, 3, 4), (2, 4, 0, 4), (2, 0, 3, 4)])
def test_nothing_asked_is_nothing_answered(shape: tuple[int, ...]) -> None:
    q = np.ones(shape)
    k = np.ones((shape[0], 2, 5, 4))
    assert ops.attention(q, k, k, causal=True).shape == shape


def test_without_keys_every_query_sees_nothing() -> None:
    q, k, v = inputs(keys=0)
    assert ops.attention(q, k, v).shape == q.shape
    assert not ops.attention(q, k, v).any()


def test_values_without_numbers_give_none() -> None:
    q, k, _ = inputs()
    assert ops.attention(q, k, np.ones((2, 2, 5, 0)), causal=True).shape == (2, 4, 3, 0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "q, k and v must have four axes": ({"q": np.ones((2, 3, 4))}, r"q is \(2, 3, 4\)"),
    "except for the last axis": (
        {"q": np.ones((2, 4, 3, 0)), "k": np.ones((2, 2, 5, 0))},
        r"v is \(2, 2, 5, 4\)",
    ),
    "finite number above": ({"soft_cap": math.inf}, "not inf"),
    "q and k must have the same batch and size": (
        {"q": np.ones((1, 4, 3, 4))},
        r"q is \(1, 4, 3, 4\)",
    ),
    "multiple": ({"q": np.ones((2, 5, 3, 4))}, r"k is \(2, 2, 5, 4\)"),
    "lengths must be": ({"lengths": np.ones((3,), int)}, r"lengths is \(3,\)"),
    "with two axes must be (batch, keys) = (2, 5), not (3, 5)": (
        {"mask": np.ones((3, 5), bool)},
        r"\(queries, keys\) as mask\[None, None\]$",
    ),
    "must broadcast to": ({"mask": np.ones((2, 3, 3, 5), bool)}, r"\(2, 4, 3, 5\)"),
    "batch, heads, queries, keys": ({"mask": np.ones((1, 2, 4, 3, 5), bool)}, r"\(1, 2, 4, 3, 5\)"),
    "same dtype": ({"k": np.ones((2, 2, 5, 4), np.float32)}, "k is float32"),
    "floating-point numbers": ({"q": np.ones((2, 4, 3, 4), int)}, "array of int64"),
}


@pytest.mark.parametrize("rule", WRONG)
def test_what_does_not_fit_is_named(rule: str) -> None:
    changed, said = WRONG[rule]
    q, k, v = inputs()
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, **changed}
    with pytest.raises(ConfigurationError, match=said) as caught:
        ops.attention(**arguments)
    assert rule in str(caught.value)
    assert str(caught.value).startswith("attention: ")


def test_a_mask_of_two_axes_is_of_batch_and_keys_even_where_it_could_be_of_queries() -> None:
    q = np.random.default_rng(0).normal(size=(3, 1, 3, 4))
    mask = np.tri(3, dtype=bool)
    by_batch = ops.attention(q, q, q, mask=mask)
    np.testing.assert_allclose(by_batch, ops.attention(q, q, q, mask=mask[:, None, None]))
    by_query = ops.attention(q, q, q, mask=mask[None, None])
    np.testing.assert_allclose(by_query, ops.attention(q, q, q, causal=True))
    assert not np.allclose(by_batch, by_query)
