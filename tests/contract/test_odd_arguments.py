"""Arguments that make no sense or are far out of range: every engine says and does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice._check import reference
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._engines import trust
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.comparing import assert_close

from .combinations import each

ONE_DEVICE = True  # see conftest.py
Put = Callable[[Any], Any]


@pytest.fixture
def put(engine: Engine, device: Device) -> Put:
    def placed(x: Any) -> Any:
        if isinstance(x, list):
            return [placed(each) for each in x]
        return engine.place(x, device) if isinstance(x, np.ndarray) else x

    return placed


@pytest.fixture(params=["library", "ours"])
def kernels(request: pytest.FixtureRequest, device: Device) -> Iterator[None]:
    """With and without the kernels of our own, where the engine has any."""
    if request.param == "library":
        yield
        return
    with trust.trial([("attention", "float32", str(device))]):
        yield


def numbers(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


Q, K, V = numbers(2, 4, 3, 8), numbers(2, 2, 5, 8), numbers(2, 2, 5, 8)[..., ::-1].copy()
FAR = [[2**32, 2**32 + 2], [2**31, 2**40], [-1, -(2**32) + 3], [-(2**63), 2**63 - 1]]


def attended(at: Any, *arrays: Any, **options: Any) -> Any:
    engine = at.engine
    # MLX decides by the operation where it works; the others by where their arrays are.
    with engine.default_scope(at.device) if engine.shares_memory else nullcontext():
        return engine.to_host(ops.attention(*arrays, **options))


@pytest.mark.usefixtures("kernels")
@each(options=[{}, {"causal": True}, {"causal": True, "window": 2}], lengths=FAR)
def test_odd_lengths(place: Any, put: Put, lengths: list[int], options: dict[str, Any]) -> None:
    clamped = np.clip(lengths, 0, 5)
    try:
        there = put(np.array(lengths, np.int64))
    except UnsupportedError:  # without 64 bits the largest that there is
        there = put(np.clip(lengths, -(2**31), 2**31 - 1).astype(np.int32))
    got = attended(place, *map(put, (Q, K, V)), lengths=there, **options)
    want = reference.call("attention", Q, K, V, lengths=clamped, **options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("kernels")
@each(kind=[np.int8, np.uint8, np.int16])
def test_short_lengths_with_more_keys_than_they_can_count(place: Any, put: Put, kind: Any) -> None:
    q, k = numbers(1, 1, 2, 4), numbers(1, 1, 70_000, 4)
    got = attended(place, put(q), put(k), put(k), lengths=put(np.array([3], kind)), causal=True)
    want = reference.call("attention", q, k[:, :, :3], k[:, :, :3], causal=True)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("kernels")
@each(window=[5, 2**31, 2**40, 2**70])
def test_a_window_wider_than_the_keys_is_as_none(place: Any, put: Put, window: int) -> None:
    there = [put(x) for x in (Q, K, V)]
    lengths = put(np.array([5, 4], np.int32))
    for more in ({}, {"lengths": lengths}):
        got = attended(place, *there, causal=True, window=window, **more)
        assert_close(got, attended(place, *there, causal=True, **more), terms=32)


@pytest.mark.usefixtures("kernels")
def test_a_scale_of_zero_weighs_all_keys_alike(place: Any, put: Put) -> None:
    got = attended(place, put(Q), put(K), put(V), scale=0)
    want = np.repeat(V.mean(2, keepdims=True), 2, 1)
    np.testing.assert_allclose(got, np.broadcast_to(want, Q.shape), rtol=1e-5, atol=1e-6)


IMAGE, FILTERS = numbers(1, 2, 4, 4), numbers(3, 2, 3, 3)
TURNED, PLACES = numbers(1, 1, 2, 4), np.arange(2, dtype=np.int32)
ONE = [np.ones(2, np.float32)]
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
Odd = list[tuple[dict[str, Any], str]]
ATTENTION: Odd = [
    ({"causal": np.ones((), bool)}, "causal must be True or False, not a"),
    ({"causal": 1}, "causal must be True or False, not 1"),
    ({"scale": float("nan")}, "scale must be a finite number, not nan"),
    ({"scale": float("-inf")}, "scale must be a finite number, not -inf"),
    ({"scale": np.ones((), np.float32)}, "scale must be a finite number, not a"),
    ({"causal": True, "window": 0}, "integer of 1 or more"),
    ({"causal": True, "window": -(2**40)}, "integer of 1 or more"),
    ({"causal": True, "window": 2.5}, "not 2.5"),
    ({"causal": True, "window": True}, "not True"),
    ({"window": 3}, "with causal=True, not 3 with causal=False"),
    ({"mask": np.ones((2, 5), np.float32)}, "array of float32, and the op takes booleans"),
    ({"mask": np.ones((2, 5), np.int32)}, "array of int32, and the op takes booleans"),
    ({"lengths": np.ones(2, np.float32)}, "integers in lengths"),
    ({"lengths": np.ones(2, bool)}, "array of bool"),
    ({"soft_cap": 0}, "soft_cap must be a finite number above 0, not"),
    ({"soft_cap": -2.0}, "not -2.0"),
    ({"soft_cap": float("nan")}, "not nan"),
    ({"soft_cap": np.ones((), np.float32)}, "soft_cap must be a finite number"),
    ({"sinks": np.ones(2, np.float32)}, "sinks must be (heads,), but q is (2, 4, 3, 8)"),
    ({"sinks": np.ones(4, np.int32)}, "arrays must have the same dtype, but q is float32"),
]
ROPE: Odd = [
    ({"theta": 0}, "theta must be a number above 0, not 0"),
    ({"theta": -1e4}, "not -10000.0"),
    ({"theta": float("nan")}, "not nan"),
    ({"theta": float("inf")}, "not inf"),
    ({"theta": np.ones((), np.float32)}, "theta must be a number above 0"),
    ({"interleaved": 1}, "interleaved must be True or False"),
    ({"scaling": "linear"}, "scaling must be a mapping such as"),
    ({"scaling": [LINEAR]}, "not a list"),
    ({"scaling": {"rope_type": "su"}}, "the kinds are default, "),
    ({"scaling": {"rope_type": "longrope"}}, "needs 'original_max_pos"),
    ({"length": -1}, "length must be an integer of 0 or more"),
    ({"length": np.ones(3, np.int32)}, "length must be (batch,)"),
    ({"length": np.ones(1, np.float32)}, "integers in length"),
    ({"scaling": {"rope_type": ["yarn"]}}, "there is no rope_type ['yarn']"),
    ({"scaling": {"type": "linear"}}, "needs 'factor', a number above 0"),
    ({"scaling": {**LINEAR, "factor": 0}}, "'factor' of the scaling must be a"),
    ({"scaling": {**LINEAR, "factor": "8"}}, "number, not '8'"),
    ({"scaling": {**LINEAR, "factor": [8]}}, "number, not [8]"),
    ({"scaling": {**LLAMA3, "factor": -1}}, "above 0, not -1"),
    ({"scaling": {**LLAMA3, "low_freq_factor": 4}}, "they are 4 and 4"),
    ({"scaling": {**LLAMA3, "low_freq_factor": 5}}, "they are 5 and 4"),
    ({"scaling": {**YARN, "original_max_position_embeddings": None}}, "needs 'original_max_pos"),
    ({"scaling": {**YARN, "beta_slow": -1}}, "'beta_slow' of the scaling"),
    ({"scaling": {**YARN, "attention_factor": -1}}, "'attention_factor'"),
    ({"scaling": YARN, "theta": 1}, "needs a theta above 1, not 1"),
]
SGD: Odd = [
    ({"rate": "fast"}, "rate must be a number, or an array without axes"),
    ({"rate": None}, "not None"),
    ({"rate": True}, "not True"),
    ({"rate": np.ones(2, np.float32)}, "array of float32 of the shape (2,)"),
    ({"rate": np.ones((), np.int32)}, "array of int32 of the shape ()"),
    ({"rate": 1.0, "momentum": -0.1}, "momentum must be a finite number of 0 or"),
    ({"rate": 1.0, "decay": float("nan")}, "decay must be a finite number of 0 or"),
]
ADAM: Odd = [
    ({"rate": [0.1]}, "not a list"),
    ({"rate": 0.1, "beta1": 1.0}, "beta1 must be a finite number from 0 to below 1"),
    ({"rate": 0.1, "beta2": -0.5}, "not -0.5"),
    ({"rate": 0.1, "eps": -1e-8}, "eps must be a finite number of 0 or more"),
]
CONV: Odd = [
    ({"stride": 0}, "stride must be an integer of 1 or more, or two of them"),
    ({"stride": (1, 0)}, "not (1, 0)"),
    ({"stride": 1.5}, "not 1.5"),
    ({"stride": None}, "not None"),
    ({"padding": -1}, "padding must be an integer of 0 or more"),
    ({"padding": (0, 0.5)}, "not (0, 0.5)"),
    ({"padding": "same"}, "not 'same'"),
]
Refusal = tuple[tuple[Any, ...], dict[str, Any], str]
REFUSED: dict[str, list[Refusal]] = {
    "attention": [
        *(((Q, K, V), *odd) for odd in ATTENTION),
        ((Q, K, V[:, :, :3]), {}, "k and v must have the same shape except for the last axis"),
    ],
    "conv2d": [
        *(((IMAGE, FILTERS), *odd) for odd in CONV),
        ((IMAGE, FILTERS[:, :, :0]), {}, "at least (1, 1)"),
        ((IMAGE, FILTERS[:, :, :, :0]), {}, "weight is (3, 2, 3, 0)"),
        ((IMAGE, numbers(3, 2, 5, 3)), {}, "padding of (0, 0), but x is (1, 2, 4, 4), weight is"),
        ((IMAGE, numbers(3, 2, 3, 7)), {"padding": (9, 1)}, "padding of (9, 1)"),
    ],
    **{
        op: [
            ((IMAGE, 0), {}, "size must be an integer of 1 or more, or two of them, not 0"),
            ((IMAGE, (2, -1)), {}, "not (2, -1)"),
            ((IMAGE, 2.0), {}, "not 2.0"),
            ((IMAGE, 5), {}, "windows of (5, 5) must not be larger than x, but x is (1, 2, 4, 4)"),
            ((IMAGE, (1, 5)), {}, "windows of (1, 5)"),
            ((IMAGE, 2, 0), {}, "stride must be an integer of 1 or more"),
            ((IMAGE[0], 2), {}, "x must be (batch, channels, height, width), but x is (2, 4, 4)"),
        ]
        for op in ("max_pool2d", "avg_pool2d")
    },
    "rope": [
        *(((TURNED, PLACES), *odd) for odd in ROPE),
        ((TURNED[..., :3], PLACES), {}, "even size, but x is (1, 1, 2, 3)"),
        ((TURNED, PLACES.astype(np.float32)), {}, "integers in positions"),
        ((TURNED, PLACES[:1]), {}, "positions must be (tokens,) or (batch, tokens), but x is"),
        ((TURNED, PLACES[:, None]), {}, "positions is (2, 1)"),
    ],
    "update_sgd": [
        *(((ONE, ONE, ONE), *odd) for odd in SGD),
        ((ONE, ONE * 2, None), {"rate": 0.1}, "1 parameters and 2 gradients"),
        ((ONE[0], ONE, None), {"rate": 0.1}, "parameters must be a list of arrays, not"),
    ],
    "update_adam": [
        *(((*[ONE] * 4, 1), *odd) for odd in ADAM),
        *(
            ((*[ONE] * 4, step), {"rate": 0.1}, said)
            for step, said in (
                (0, "step must be an integer of 1 or more, not 0"),
                (-3, "not -3"),
                (1.5, "not 1.5"),
                (True, "not True"),
                (np.ones(1, np.int32), "array of int32 of the shape (1,)"),
                (np.ones((), bool), "array of bool"),
            )
        ),
        ((ONE, ONE, ONE, ONE * 2, 1), {"rate": 0.1}, "as many squares as parameters"),
    ],
    "update_lion": [
        ((ONE, ONE, []), {"rate": 0.1}, "1 parameters and 0 means"),
        ((ONE, ONE, ONE), {"rate": 1j}, "not a complex"),
        ((ONE, ONE, ONE), {"rate": 0.1, "beta2": 1}, "beta2 must be a finite number"),
        ((ONE, ONE, ONE), {"rate": 0.1, "decay": -1}, "decay must be a finite number of 0 or more"),
    ],
}


@pytest.mark.parametrize("op", REFUSED)
@each(("arguments", "options", "said"), lambda op: REFUSED[op])
def test_what_makes_no_sense_is_refused_in_the_same_words(
    put: Put, op: str, arguments: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    there = {name: put(value) for name, value in options.items()}
    with pytest.raises(ConfigurationError) as caught:
        getattr(ops, op)(*map(put, arguments), **there)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{op}: ")
