"""Ops that rearrange, convert, read and write elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice._core.dtypes import DTYPES
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_integers, assert_same_values
from tests.refusals import refuses

X = np.arange(24.0).reshape(2, 3, 4)


def test_reshape() -> None:
    assert_same_values(ops.reshape(X, (4, -1)), X.reshape(4, 6), because=COPIED)
    assert_same_values(ops.reshape(X, -1), X.ravel(), because=COPIED)
    assert_same_values(ops.reshape(X.T, 24), X.T.ravel(), because=COPIED)
    assert ops.reshape(X[:0], (0, 5)).shape == (0, 5)
    assert ops.reshape(X[:0], (-1, 5)).shape == (0, 5)
    assert ops.reshape(np.array(1.0), (1, 1)).shape == (1, 1)


def test_permute_and_broadcast() -> None:
    assert_same_values(ops.permute(X, (2, 0, 1)), X.transpose(2, 0, 1), because=COPIED)
    assert_same_values(ops.permute(X, (-1, 0, 1)), X.transpose(2, 0, 1), because=COPIED)
    assert ops.broadcast_to(X[:, :1], (5, 2, 3, 4)).shape == (5, 2, 3, 4)
    assert ops.broadcast_to(np.array(1.0), (0, 2)).shape == (0, 2)


def test_concat_and_slice_axis() -> None:
    assert_same_values(ops.concat([X, X], -1), np.concatenate([X, X], -1), because=COPIED)
    assert_same_values(ops.concat([X]), X, because=COPIED)
    assert_same_values(ops.slice_axis(X, -1, 1, 4, 2), X[..., 1:4:2], because=COPIED)
    assert ops.slice_axis(X, 0, 2, 2).shape == (0, 3, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", DTYPES["bfloat16"], ml_dtypes.bfloat16])
def test_astype(dtype: Any) -> None:
    assert ops.astype(X, dtype).dtype == ml_dtypes.bfloat16
    assert ops.astype(X, "float64") is X


def test_it_is_said_how_jax_gets_64_bits_in_code_and_for_commands() -> None:
    import jax.numpy as jnp

    with pytest.raises(
        UnsupportedError, match=r"configure\(x64=True\).* x64 = true in anydevice\."
    ):
        ops.astype(jnp.ones(2, jnp.float32), "float64")


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_embedding(dtype: Any) -> None:
    ids = np.array([[3, 0], [1, 1]], dtype)
    assert_same_values(ops.embedding(WEIGHT, ids), WEIGHT[ids], because=COPIED)
    assert ops.embedding(WEIGHT, np.array(2, dtype)).tolist() == [6, 7, 8]
    assert ops.embedding(WEIGHT, np.ones((2, 0), dtype)).shape == (2, 0, 3)


def test_cache_write() -> None:
    new = np.arange(1.0, 13.0).reshape(2, 1, 3, 2)
    for positions in (np.array([0, 3, 1]), np.array([[0, 3, 1], [2, 5, -1]])):
        written = ops.cache_write(np.zeros((2, 1, 4, 2)), new, positions)
        expected = np.zeros((2, 1, 4, 2))
        for b, t in np.ndindex(2, 3):
            place = np.broadcast_to(positions, (2, 3))[b, t]
            if 0 <= place < 4:
                expected[b, :, place] = new[b, :, t]
        assert_same_values(written, expected, because=COPIED)


def test_a_cache_that_is_filled_token_by_token_gives_the_same_attention() -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 2, 4, 6, 8))
    whole = ops.attention(q, k, v, causal=True)
    keys, values = np.zeros((2, 2, 4, 10, 8))
    for at in range(6):
        now = slice(at, at + 1)
        keys = ops.cache_write(keys, k[:, :, now], np.array([at]))
        values = ops.cache_write(values, v[:, :, now], np.array([at]))
        length = np.array([at + 1, at + 1])
        step = ops.attention(q[:, :, now], keys, values, causal=True, lengths=length)
        np.testing.assert_allclose(step, whole[:, :, now], rtol=1e-12)


def test_losses_at_the_edges() -> None:
    huge = np.array([[1e30, -1e30]], np.float32)
    assert ops.cross_entropy(huge, np.array([0])).tolist() == 0
    assert ops.cross_entropy(huge, np.array([1])).tolist() == pytest.approx(2e30)
    impossible = np.array([[0.0, -math.inf]])
    assert ops.cross_entropy(impossible, np.array([1])).tolist() == math.inf
    for target in (2, -1, -100):
        assert math.isnan(ops.cross_entropy(np.zeros((2, 2)), np.array([0, target])))
    assert math.isnan(ops.cross_entropy(np.ones((0, 3)), np.ones(0, int)))
    assert ops.cross_entropy(np.ones((4, 1)), np.zeros(4, int)).tolist() == 0


def test_mean_squared_error() -> None:
    x, y = np.random.default_rng(3).normal(size=(2, 3, 4))
    assert ops.mean_squared_error(x, y).tolist() == pytest.approx(((x - y) ** 2).mean())
    narrow = ops.mean_squared_error(np.full(9, 300, np.float16), np.zeros(9, np.float16))
    assert (narrow.dtype, narrow.tolist()) == (np.float32, 90000)
    assert ops.mean_squared_error(np.array(3.0), np.array(1.0)).tolist() == 4
    assert math.isnan(ops.mean_squared_error(np.ones(0), np.ones(0)))


CACHE = np.zeros((2, 1, 4, 3))
NEW = np.zeros((2, 1, 2, 3))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "zero and unknown": (lambda: ops.reshape(X[:0], (0, -1)), r"\(0, -1\)"),
    "a truth for an axis": (lambda: ops.permute(X[0], (True, False)), "axis must be an integer"),
    "sizes": (lambda: ops.concat([X, X[:, :2]], 0), r"another is \(2, 2, 4\)"),
    "fewer axes": (lambda: ops.concat([X, X[0]], 0), r"another is \(3, 4\)"),
    "dtypes": (lambda: ops.concat([X, X.astype("f")]), "first is float64, another is float32"),
    "no type": (lambda: ops.astype(X, "half"), "did you mean 'float16'"),
    "weight": (lambda: ops.embedding(WEIGHT[0], np.array([0])), r"weight is \(3,\)"),
    "ids": (lambda: ops.embedding(WEIGHT, np.array([0.0])), "integers in ids; use astype"),
    "axis": (lambda: ops.take(WEIGHT, np.array([0]), 2), "axis 2 is out of range"),
    "indices": (lambda: ops.take(WEIGHT, np.array([True])), "integers in indices"),
    "new": (lambda: ops.cache_write(CACHE, NEW[:1], np.arange(2)), r"new is \(1, 1, 2, 3\)"),
    "size": (lambda: ops.cache_write(CACHE, NEW[..., :2], np.arange(2)), r"\(2, 1, 2, 2\)"),
    "axes": (lambda: ops.cache_write(CACHE[0], NEW, np.arange(2)), r"cache is \(1, 4, 3\)"),
    "places": (lambda: ops.cache_write(CACHE, NEW, np.arange(3)), r"positions is \(3,\)"),
    "floats": (lambda: ops.cache_write(CACHE, NEW, np.arange(2.0)), "integers in positions"),
    "types": (lambda: ops.cache_write(CACHE, NEW.astype("f"), np.arange(2)), "new is float32"),
    "targets": (
        lambda: ops.cross_entropy(WEIGHT, np.arange(3)),
        r"logits is \(4, 3\), targets is \(3,\)",
    ),
    "classes": (lambda: ops.cross_entropy(WEIGHT[:, :0], np.arange(4)), r"logits is \(4, 0\)"),
    "no classes": (lambda: ops.cross_entropy(np.array(1.0), np.array(0)), r"logits is \(\)"),
    "chances": (lambda: ops.cross_entropy(WEIGHT, WEIGHT), r"use targets\.argmax\(-1\)"),
    "logits": (
        lambda: ops.cross_entropy(np.ones((4, 3), int), np.arange(4)),
        "floating-point numbers",
    ),
    "shapes": (lambda: ops.mean_squared_error(WEIGHT, WEIGHT[:1]), r"x is \(4, 3\), y is \(1, 3\)"),
    "whole": (lambda: ops.mean_squared_error(np.arange(3), np.arange(3)), "floating-point numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str) -> None:
    call, said = WRONG[name]
    refuses(said, call)


def test_stack_and_split() -> None:
    assert_same_values(ops.stack([X, X], -1), np.stack([X, X], -1), because=COPIED)
    assert [piece.shape for piece in ops.split(X, 2, -1)] == [(2, 3, 2)] * 2
    assert [piece.shape for piece in ops.split(X, [], 1)] == [(2, 3, 4)]
    for call, words in [
        (
            lambda: ops.stack([X, X[:1]]),
            r"the arrays must have the same shape, but first is \(2, 3, 4\)",
        ),
        (lambda: ops.stack([X], 4), "axis 4 must be from -4 to 3"),
        (lambda: ops.stack(X), r"stack: it takes a list of arrays, .* write stack\(\[x, y\]\)"),
        (lambda: ops.stack([]), "stack: it needs at least one array"),
        (lambda: ops.stack([X, X.astype("float32")]), "first is float64, another is float32"),
        (
            lambda: ops.split(X, 2, 1),
            r"axis 1 must divide into 2 equal pieces, but x is \(2, 3, 4\)",
        ),
        (
            lambda: ops.split(X, [3, 1], 2),
            r"the indices \[3, 1\] must be in order and within axis 2",
        ),
        (lambda: ops.split(X, 0), "axis 0 must divide into 0 equal pieces"),
        (lambda: ops.split(X, 1.5), "sections must be an integer or a list of them, not 1.5"),
    ]:
        refuses(words, call)


def test_pad_and_flip(either_version: None) -> None:
    assert_same_values(ops.pad(X, 1, 9), np.pad(X, 1, constant_values=9), because=COPIED)
    widths = [(0, 2), (1, 0), (0, 0)]
    assert_same_values(ops.pad(X, widths), np.pad(X, widths), because=COPIED)
    assert_same_values(ops.flip(X), X[::-1, ::-1, ::-1], because=COPIED)
    assert_same_values(ops.flip(X, (-1, 0)), X[::-1, :, ::-1], because=COPIED)
    assert_same_values(ops.flip(X, ()), X, because=COPIED)
    for widths_, words in [
        ([(1, 1)], r"widths must have one \(before, after\) for each axis and has 1"),
        (-1, "each of widths must be an integer of 0 or more"),
        ((1, 1, 2), r"\(before, after\) for each axis, not a tuple"),  # NumPy's (1, 2)
        (0.5, r"widths must be an integer, or \(before, after\) for each axis, not 0.5"),
    ]:
        refuses(words, ops.pad, X, widths_)
    refuses(r"pad: 0.5 is not an integer, and the array is int64", ops.pad, np.arange(3), 1, 0.5)
    refuses(r"-1 does not fit into uint8 .*; cast x", ops.pad, np.arange(3, dtype="uint8"), 1, -1)


def test_new_arrays() -> None:
    like = np.ones(1, np.uint8)
    assert ops.arange(250, 256, like=like).tolist() == [250, 251, 252, 253, 254, 255]
    assert ops.arange(5, -1, -2, like=like).tolist() == [5, 3, 1]
    assert ops.arange(3, 3, like=like).shape == (0,)
    assert ops.arange(0, 1, 0.25, like=like, dtype="float16").tolist() == [0, 0.25, 0.5, 0.75]
    assert ops.arange(2**40, 2**40 + 2, like=like, dtype="int64").tolist() == [2**40, 2**40 + 1]
    assert ops.eye(2, 3, k=1, like=X).tolist() == [[0, 1, 0], [0, 0, 1]]
    assert_same_integers(ops.eye(3, k=-1, like=like, dtype=bool), np.eye(3, k=-1, dtype=bool))
    assert ops.full((), 7, like=like).dtype == np.uint8
    for call, words in [
        (
            lambda: ops.arange(0, 300, like=like),
            "299 does not fit into uint8 .* give another dtype",
        ),
        (lambda: ops.arange(0, 1, 0.5, like=like), "0.5 is not an integer, and the array is uint8"),
        (lambda: ops.arange(0, 1, 0, like=like), "step must not be 0, but they are 0, 1, 0"),
        (lambda: ops.arange(math.inf, like=X), "start, stop and step must be finite numbers"),
        (lambda: ops.arange(3, like=X > 0), "arange: this is an array of bool"),
        (lambda: ops.full(2, -1, like=like), "-1 does not fit into uint8"),
        (lambda: ops.full(2, X, like=X), "full: value must be a number"),
        (
            lambda: ops.zeros((2, -1), like=X),
            r"a shape must have no negative sizes, but it is \(2, -1\)",
        ),
        (lambda: ops.zeros(2, like=[1.0]), "zeros: like is not an array, but of type list"),
        (lambda: ops.eye(-1, like=X), "rows and columns must be 0 or more"),
        (lambda: ops.one_hot(X, 3), "one_hot: .* integers in x"),
        (lambda: ops.one_hot(np.arange(3), -1), "num_classes must be 0 or more"),
        (lambda: ops.diff(X, n=-1), "diff: n must be 0 or more"),
    ]:
        refuses(words, call)
