"""Rotary positions against the reference, transformers, and rotations of complex numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice._check import reference
from anydevice._check.cases.decoding import LLAMA3
from anydevice._core.rope_scaling import freeze, frequencies, thaw
from tests.comparing import SAME_PROGRAM, assert_close, assert_same_values
from tests.refusals import refuses

Array = np.ndarray[Any, Any]
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}

SCALINGS: dict[str, tuple[float, Mapping[str, Any] | None]] = {
    "none": (10000.0, None),
    "default": (500000.0, {"rope_type": "default"}),
    "linear": (10000.0, {"rope_type": "linear", "factor": 4.0}),
    "llama3": (500000.0, LLAMA3),
    "llama3 of 3.2": (500000.0, {**LLAMA3, "factor": 32}),
    "yarn": (10000.0, YARN),
    "yarn, its own factor": (1e6, {**YARN, "attention_factor": 1.25}),
    "yarn, not truncated": (150000.0, {**YARN, "truncate": False, "beta_fast": 48.0}),
    "yarn, mscale": (10000.0, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "yarn, shorter": (10000.0, {**YARN, "factor": 1.0}),
    "yarn, no room": (10000.0, {**YARN, "original_max_position_embeddings": 6}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_it_is_what_llama_does(name: str) -> None:
    """As the reference does, which `tests/check/test_reference.py` compares with transformers."""
    theta, scaling = SCALINGS[name]
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 64)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 100, 250, 400]])
    steps, factor = frequencies(64, theta, scaling)
    np.testing.assert_allclose(steps, reference.frequencies(64, theta, scaling)[0], rtol=1e-12)
    assert factor == pytest.approx(reference.frequencies(64, theta, scaling)[1])
    result = ops.rope(x, positions, theta=theta, scaling=scaling)
    expected = reference.call("rope", x, positions, theta=theta, scaling=scaling)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, atol=2e-4, rtol=0)
    np.testing.assert_allclose(result[0], expected[0], atol=3e-6, rtol=0)


LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1 + pair / 40 for pair in range(16)],
    "long_factor": [1 + pair / 3 for pair in range(16)],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16}

BY_LENGTH: dict[str, dict[str, Any]] = {
    "longrope": LONGROPE,
    "longrope, its own factor": {**LONGROPE, "attention_factor": 1.3},
    "longrope, not extended": {**LONGROPE, "factor": 1.0},
    "dynamic": DYNAMIC,
}


class Rotary:
    """Rotary positions of a model that remembers the longest text it has seen, by transformers."""

    def __init__(self, scaling: dict[str, Any], theta: float = 1e4) -> None:
        from transformers import Phi3Config
        from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

        lengths = {"max_position_embeddings": 16, "original_max_position_embeddings": 16}
        config = Phi3Config(hidden_size=64, num_attention_heads=2, **lengths)
        config.rope_parameters = {**scaling, "rope_theta": theta, "partial_rotary_factor": 1.0}
        self.module = Phi3RotaryEmbedding(config)

    def __call__(self, x: Array, positions: Array) -> Array:
        import torch
        from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

        given = torch.from_numpy(x)
        cosine, sine = self.module(given, torch.from_numpy(np.atleast_2d(positions)))
        return apply_rotary_pos_emb(given, given, cosine, sine)[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", BY_LENGTH)
@pytest.mark.parametrize("length", [1, 16, 17, 40, 64])
def test_a_whole_text_is_turned_by_its_length_as_transformers_does(name: str, length: int) -> None:
    scaling, theirs = BY_LENGTH[name], Rotary(BY_LENGTH[name])
    x = np.random.default_rng(0).normal(size=(1, 2, length, 32)).astype(np.float32)
    expected = theirs(x, np.arange(length))
    steps, factor = frequencies(32, 1e4, scaling, length)
    np.testing.assert_allclose(steps, theirs.module.inv_freq.numpy(), rtol=2e-6)
    assert factor == pytest.approx(theirs.module.attention_scaling)
    for given in (None, length, np.array([length])):
        result = ops.rope(x, np.arange(length), scaling=scaling, length=given)
        np.testing.assert_allclose(result, expected, atol=3e-5, rtol=0)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", BY_LENGTH)
def test_token_by_token_each_is_turned_as_the_text_was_long_then(name: str) -> None:
    scaling, theirs = BY_LENGTH[name], Rotary(BY_LENGTH[name])
    x = np.random.default_rng(0).normal(size=(1, 2, 1, 32)).astype(np.float32)
    for position in range(12, 30):
        at = np.array([position])
        result = ops.rope(x, at, scaling=scaling)
        np.testing.assert_allclose(result, theirs(x, at), atol=3e-5, rtol=0)


def test_each_text_has_its_own_length() -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 32)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [13, 14, 15, 16, 17], [3, 4, 5, 6, 7]])
    for scaling in BY_LENGTH.values():
        together = ops.rope(x, positions, scaling=scaling)
        given = ops.rope(x, positions, scaling=scaling, length=np.array([5, 18, 40]))
        for text, length in ((0, 5), (1, 18), (2, 40)):
            part = slice(text, text + 1)
            alone = ops.rope(x[part], positions[text], scaling=scaling)
            np.testing.assert_allclose(together[part], alone, atol=5e-6)
            alone = ops.rope(x[part], positions[text], scaling=scaling, length=length)
            np.testing.assert_allclose(given[part], alone, atol=5e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, while it compiles
@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_compiled_code_takes_any_length(name: str) -> None:
    import jax
    import torch

    x = np.random.default_rng(0).normal(size=(1, 2, 1, 32)).astype(np.float32)

    def rotate(x: Any, positions: Any, length: Any) -> Any:
        return ops.rope(x, positions, scaling=BY_LENGTH[name], length=length)

    torch.compiler.reset()
    by_torch = torch.compile(rotate, fullgraph=True, backend="eager")
    traced = []

    def traced_once(*arrays: Any) -> Any:
        traced.append(arrays)
        return rotate(*arrays)

    by_jax = jax.jit(traced_once)
    for length in (10, 17, 30):
        at = np.array([9], np.int32), np.array([length], np.int32)
        expected = rotate(x, *at)
        found = by_torch(torch.from_numpy(x), *map(torch.from_numpy, at)).numpy()
        np.testing.assert_allclose(found, expected, atol=2e-6)
        found = by_jax(jax.numpy.asarray(x), *map(jax.numpy.asarray, at))
        np.testing.assert_allclose(found, expected, atol=2e-6)
    assert len(traced) == 1


def turned(x: Array, positions: Array, theta: float, interleaved: bool) -> Array:
    """The same with complex numbers, in float64 but for the angles."""
    size = x.shape[-1]
    steps = (theta ** (-np.arange(0, size, 2) / size)).astype(np.float32)
    angles = positions.astype(np.float32)[..., None] * steps
    if interleaved:
        pairs = x[..., ::2] + 1j * x[..., 1::2]
    else:
        pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
    pairs = pairs * np.exp(1j * angles.astype(np.float64)).reshape(-1, 1, *angles.shape[-2:])
    if interleaved:
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
    return np.concatenate([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [np.arange(5), np.arange(10).reshape(2, 5) * 1000], ids=len)
def test_it_is_a_rotation(interleaved: bool, positions: Array) -> None:
    x = np.random.default_rng(1).normal(size=(2, 3, 5, 8))
    result = ops.rope(x, positions, theta=500.0, interleaved=interleaved)
    expected = turned(x, positions, 500.0, interleaved)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_numbers_are_rounded_once(dtype: Any) -> None:
    x = np.random.default_rng(2).normal(size=(1, 2, 6, 16)).astype(dtype)
    wide = ops.rope(x.astype(np.float32), np.arange(6))
    result = ops.rope(x, np.arange(6))
    assert result.dtype == dtype
    assert_close(result, wide.astype(dtype), terms=2)


def test_only_distances_matter_between_a_query_and_a_key() -> None:
    q, k = np.random.default_rng(3).normal(size=(2, 1, 1, 1, 32))
    scores = [
        float((ops.rope(q, np.array([at])) * ops.rope(k, np.array([at + 7]))).sum())
        for at in (0, 10, 1000)
    ]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-3)


def test_no_tokens_and_one_batch() -> None:
    assert ops.rope(np.ones((2, 3, 0, 4)), np.zeros((0,), int)).shape == (2, 3, 0, 4)
    assert ops.rope(np.ones((1, 1, 1, 2)), np.zeros((1, 1), int)).tolist() == [[[[1, 1]]]]


def test_a_scaling_is_read_again_when_it_changes() -> None:
    x, scaling = np.ones((1, 1, 2, 4)), {"rope_type": "linear", "factor": 2.0}
    first = ops.rope(x, np.arange(2), scaling=scaling)
    scaling["factor"] = 4.0
    assert np.abs(first - ops.rope(x, np.arange(2), scaling=scaling)).max() > 0.01
    assert_same_values(
        ops.rope(x, np.arange(2)), ops.rope(x, np.arange(2), scaling={}), because=SAME_PROGRAM
    )


def test_freezing_keeps_what_matters() -> None:
    assert thaw(freeze(None)) is None
    known = {"type": "yarn", "factor": 1 / 3, "truncate": False}
    assert thaw(freeze({**known, "finetuned": True, "unknown": [1, 2]})) == known
    assert thaw(freeze(LONGROPE)) == LONGROPE
    assert freeze(LONGROPE) != freeze({**LONGROPE, "long_factor": LONGROPE["short_factor"]})


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        (LONGROPE, "'short_factor', a list of a number for each of 2 pairs, not 16 numbers"),
        ({**LONGROPE, "long_factor": [1.0] * 2, "short_factor": None}, "not None"),
        ({**LONGROPE, "long_factor": [1.0, 0.0], "short_factor": [1.0, 1.0]}, "numbers above 0"),
        (
            {**LONGROPE, "long_factor": [1.0, "2"], "short_factor": [1.0, 1.0]},
            "must be a number, not",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "needs 'original_max_position_embeddings'"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs 'low_freq_factor'"),
        ({"rope_type": "default", "rope_theta": 5e5}, r"give theta=500000\.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_scaling_that_cannot_be_followed_is_refused(scaling: dict[str, Any], said: str) -> None:
    refuses(said, ops.rope, np.ones((1, 1, 1, 4)), np.arange(1), scaling=scaling)


@pytest.mark.parametrize(
    ("x", "positions", "options", "said"),
    [
        (np.ones((1, 1, 4)), np.arange(1), {}, r"but x is \(1, 1, 4\)"),
        (np.ones((2, 1, 2, 4)), np.zeros((1, 2), int), {}, r"positions is \(1, 2\)"),
        (np.ones((1, 1, 2, 4), int), np.arange(2), {}, "floating-point numbers"),
        (np.ones((1, 1, 1, 4)), np.arange(1), {"length": 1.5}, "not 1.5"),
        (np.ones((1, 1, 1, 2)), np.arange(1), {"scaling": DYNAMIC}, "a size of 4 or more, not 2"),
    ],
)
def test_what_does_not_fit_is_named(x: Array, positions: Array, options: Any, said: str) -> None:
    refuses(said, ops.rope, x, positions, **options)


def two_rotations(x: Any, positions: Any) -> Any:
    near = ops.rope(x, positions, theta=1e4)
    far = ops.rope(x, positions, theta=1e6, scaling={"rope_type": "linear", "factor": 2.0})
    again = ops.rope(x, positions, theta=1e4, interleaved=True)
    magnified = ops.rope(x, positions, scaling=YARN)
    return ops.sum(ops.add(ops.multiply(near, far), ops.multiply(again, magnified)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, while it compiles
def test_torch_compiles_several_of_them_first_without_gradients_then_with() -> None:
    import torch

    torch.compiler.reset()
    compiled = torch.compile(two_rotations, fullgraph=True, backend="aot_eager")
    x, positions = torch.rand(1, 2, 5, 8, requires_grad=True), torch.arange(5)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, positions), two_rotations(x, positions))
    (ours,) = torch.autograd.grad(compiled(x, positions), x)
    (plain,) = torch.autograd.grad(two_rotations(x, positions), x)
    torch.testing.assert_close(ours, plain)
