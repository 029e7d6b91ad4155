"""The reference agrees with what others have written of the same definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from anydevice._check import reference
from anydevice._check.cases.decoding import DYNAMIC, LLAMA3, LONGROPE, YARN
from anydevice._check.reference import frequencies
from tests.comparing import assert_same_bits
from tests.refusals import refuses

Array = Any
RANDOM = np.random.default_rng(0)


def drawn(*shape: int) -> Array:
    return RANDOM.standard_normal(shape)


def agrees(op: str, theirs: Any, *arguments: Any, **options: Any) -> None:
    ours = reference.call(op, *arguments, **options)
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-12, atol=1e-12)


def tensors(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize(
    ("op", "theirs"),
    [
        ("softmax", lambda x: torch.softmax(x, -1)),
        ("log_softmax", lambda x: torch.log_softmax(x, -1)),
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("sigmoid", torch.sigmoid),
        ("erf", torch.erf),
        ("rsqrt", lambda x: torch.rsqrt(x)),
        ("relu", functional.relu),
        ("mean", torch.mean),
        ("argmax", lambda x: torch.argmax(x, -1)),
    ],
)
def test_functions_of_one_array(op: str, theirs: Any) -> None:
    x = np.abs(drawn(3, 7)) if op == "rsqrt" else drawn(3, 7)
    agrees(op, theirs(*tensors(x)), x)


def test_the_other_form_of_gelu() -> None:
    x = drawn(3, 7)
    agrees("gelu", functional.gelu(*tensors(x), approximate="tanh"), x, approximate=True)


def test_norms() -> None:
    x, weight, bias = drawn(3, 7), drawn(7), drawn(7)
    agrees("rmsnorm", functional.rms_norm(*tensors(x), (7,), *tensors(weight), 1e-6), x, weight)
    theirs = functional.layer_norm(*tensors(x), (7,), *tensors(weight, bias), 1e-3)
    agrees("layernorm", theirs, x, weight, bias, 1e-3)
    agrees("layernorm", functional.layer_norm(*tensors(x), (7,)), x, None, None)


def test_products() -> None:
    x, weight, bias = drawn(2, 3, 5), drawn(4, 5), drawn(4)
    agrees("linear", functional.linear(*tensors(x, weight, bias)), x, weight, bias)
    agrees("linear", functional.linear(*tensors(x, weight)), x, weight)


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1), ((2, 1), (0, 2))])
def test_convolution(stride: Any, padding: Any) -> None:
    x, weight, bias = drawn(2, 3, 9, 8), drawn(4, 3, 3, 2), drawn(4)
    theirs = functional.conv2d(*tensors(x, weight, bias), stride=stride, padding=padding)
    agrees("conv2d", theirs, x, weight, bias, stride, padding)


@pytest.mark.parametrize(("size", "stride"), [(2, None), (3, 2), ((2, 3), (1, 2)), (2, 3)])
def test_pooling(size: Any, stride: Any) -> None:
    x = drawn(2, 3, 9, 8)
    agrees("max_pool2d", functional.max_pool2d(*tensors(x), size, stride), x, size, stride)
    agrees("avg_pool2d", functional.avg_pool2d(*tensors(x), size, stride), x, size, stride)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_grouped_heads(causal: bool) -> None:
    q, k, v = drawn(2, 4, 5, 8), drawn(2, 2, 5, 8), drawn(2, 2, 5, 8)
    theirs = functional.scaled_dot_product_attention(
        *tensors(q, k, v), is_causal=causal, enable_gqa=True
    )
    agrees("attention", theirs, q, k, v, causal=causal)


def test_attention_with_a_cache_is_that_of_its_valid_part() -> None:
    q, k, v = drawn(2, 2, 3, 8), drawn(2, 2, 9, 8), drawn(2, 2, 9, 8)
    got = reference.call("attention", q, k, v, causal=True, lengths=np.array([5, 9]))
    for text, valid in enumerate((5, 9)):
        mask = torch.ones(3, valid, dtype=torch.bool).tril(valid - 3)
        theirs = functional.scaled_dot_product_attention(
            *tensors(q[text], k[text, :, :valid], v[text, :, :valid]), attn_mask=mask
        )
        np.testing.assert_allclose(got[text], theirs, rtol=1e-12)


def test_a_window_sees_so_many_keys_and_no_more() -> None:
    q, k = drawn(1, 1, 4, 8), drawn(1, 1, 6, 8)
    v = np.eye(6)[None, None]  # the result is the weights themselves
    weights = reference.call("attention", q, k, v, causal=True, window=2)[0, 0]
    assert [np.flatnonzero(row).tolist() for row in weights] == [[1, 2], [2, 3], [3, 4], [4, 5]]


def test_soft_caps_and_sinks() -> None:
    q, k, v, sinks = drawn(1, 2, 3, 4), drawn(1, 2, 5, 4), drawn(1, 2, 5, 4), drawn(2)
    scores = 1.5 * np.tanh(q @ k.swapaxes(-1, -2) / 2 / 1.5)
    beside = np.broadcast_to(sinks[None, :, None, None], (1, 2, 3, 1))
    both = torch.softmax(torch.from_numpy(np.concatenate([scores, beside], -1)), -1).numpy()
    agrees("attention", both[..., :5] @ v, q, k, v, soft_cap=1.5, sinks=sinks)


def test_experts() -> None:
    x, up, down = drawn(3, 4), drawn(2, 10, 4), drawn(2, 4, 5)
    bias, last = drawn(2, 10), drawn(2, 4)
    chosen, weights = np.array([[0, 1], [1, -1], [0, 0]]), np.abs(drawn(3, 2))
    expected = np.zeros((3, 4))
    for token, at in np.argwhere(chosen >= 0):
        number = chosen[token, at]
        gate, rest = np.split(up[number] @ x[token] + bias[number], 2)
        inner = gate / (1 + np.exp(-gate)) * rest
        expected[token] += weights[token, at] * (down[number] @ inner + last[number])
    biases = {"gate_up_bias": bias, "down_bias": last}
    agrees("experts", expected, x, up, down, chosen, weights, **biases)


def test_a_mask_for_padding_is_one_for_every_head_and_query() -> None:
    q, k, v = drawn(2, 2, 3, 8), drawn(2, 2, 4, 8), drawn(2, 2, 4, 8)
    mask = np.array([[True, True, False, False], [False] * 4])
    got = reference.call("attention", q, k, v, mask=mask)
    short = reference.call("attention", q[:1], k[:1, :, :2], v[:1, :, :2])
    np.testing.assert_allclose(got[:1], short, rtol=1e-12)
    assert not got[1].any(), "who sees nothing gets zeros"


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        {**LLAMA3, "factor": 32},
        YARN,
        {**YARN, "factor": 1.0},
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**YARN, "attention_factor": 1.25, "truncate": False},
        {**YARN, "original_max_position_embeddings": 8},
        {**YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
        {**DYNAMIC, "original_max_position_embeddings": 32768},
        LONGROPE,
        {**LONGROPE, "attention_factor": 1.25},
    ],
    ids=lambda scaling: scaling["rope_type"] if scaling else "default",
)
def test_frequencies_are_those_of_transformers(scaling: Any) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 32768}
    config = LlamaConfig(**sizes, rope_parameters=parameters)
    for length in (8, 100_000):
        ours, factor = frequencies(64, 5e5, scaling, length)
        if scaling is None:
            theirs, theirs_factor = 5e5 ** (-np.arange(0, 64, 2) / 64), 1.0
        else:
            compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            theirs, theirs_factor = compute(config, "cpu", seq_len=length)
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=2e-5)  # theirs are float32
        assert factor == pytest.approx(theirs_factor, rel=1e-6)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_type 'axial'"):
        frequencies(8, 1e4, {"rope_type": "axial", "original_max_position_embeddings": 8})


def test_a_small_yarn_factor_leaves_cosines_alone() -> None:
    assert frequencies(8, 1e4, {**YARN, "factor": 1.0})[1] == 1.0


def test_both_orders_of_rope_turn_the_same_pairs() -> None:
    x, positions = drawn(1, 2, 3, 8), np.array([0, 5, 11])
    halves = reference.call("rope", x, positions)
    order = np.arange(8).reshape(2, 4).T.ravel()  # 0 4 1 5 …: each pair side by side
    interleaved = reference.call("rope", x[..., order], positions, interleaved=True)
    np.testing.assert_allclose(interleaved, halves[..., order], rtol=1e-12)
    np.testing.assert_allclose(halves[:, :, 0], x[:, :, 0])  # position 0 turns nothing
    turned = complex(x[0, 0, 1, 0], x[0, 0, 1, 4]) * np.exp(5j)
    np.testing.assert_allclose(halves[0, 0, 1, [0, 4]], [turned.real, turned.imag])


def test_losses() -> None:
    logits, targets = drawn(2, 3, 7), np.array([[0, 6, 2], [3, 3, 1]])
    theirs = functional.cross_entropy(*tensors(logits.reshape(6, 7), targets.reshape(6)))
    agrees("cross_entropy", theirs, logits, targets)
    x, y = drawn(3, 5), drawn(3, 5)
    agrees("mean_squared_error", functional.mse_loss(*tensors(x, y)), x, y)
    assert np.isnan(reference.call("cross_entropy", logits, targets + 5))


def test_what_is_out_of_range() -> None:
    weight = drawn(3, 2)
    rows = reference.call("embedding", weight, np.array([2, 3, -1]))
    wanted = np.array([weight[2], [np.nan] * 2, [np.nan] * 2])
    assert_same_bits(rows, wanted, because="only picked")
    whole = reference.call("take", np.array([[5, 6]]), np.array([1, 2, -1]), 1)
    assert whole.tolist() == [[6, 0, 0]]
    assert np.isnan(reference.call("take", np.zeros((0, 2)), np.array([0]))).all()
    cache = reference.call(
        "cache_write", np.zeros((1, 1, 2, 1)), np.ones((1, 1, 3, 1)), np.array([-1, 1, 2])
    )
    assert cache.ravel().tolist() == [0, 1]


def test_the_largest_with_nan_first() -> None:
    x = np.array([[1.0, np.nan, 3.0, -np.inf], [2.0, 2.0, 1.0, 0.0]])
    values, places = reference.call("top_k", x, 3)
    assert_same_bits(values, np.array([[np.nan, 3, 1], [2, 2, 1]]), because="only picked")
    assert places.tolist() == [[1, 2, 0], [0, 1, 2]]


def test_conversions() -> None:
    x = np.array([-1.7, 0.0, 2.9])
    assert reference.call("astype", x, "int32").tolist() == [-1, 0, 2]
    assert reference.call("astype", x, "bool").tolist() == [True, False, True]
    assert reference.call("astype", np.array([True]), "float16").dtype == np.float64


@pytest.mark.parametrize("nesterov", [False, True])
def test_descent_with_momentum(nesterov: bool) -> None:
    options: Any = {"momentum": 0.9, "nesterov": nesterov}
    theirs, moved, gradient = stepped(torch.optim.SGD, weight_decay=0.1, **options)
    options |= {"rate": 0.1, "decay": 0.1}
    ours, velocity = [moved], [np.zeros(5)]
    for _ in range(3):
        ours, velocity = reference.call("update_sgd", ours, [gradient], velocity, **options)
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-12)


def test_descent_without_momentum() -> None:
    theirs, moved, gradient = stepped(torch.optim.SGD, weight_decay=0.1)
    ours = [moved]
    for _ in range(3):
        ours, nothing = reference.call("update_sgd", ours, [gradient], None, rate=0.1, decay=0.1)
        assert nothing is None
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-12)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(decoupled: bool) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs, moved, gradient = stepped(kind, weight_decay=0.1)
    options = {"rate": 0.1, "decay": 0.1}
    ours, means, squares = [moved], [np.zeros(5)], [np.zeros(5)]
    for step in (1, 2, 3):
        given = (ours, [gradient], means, squares, step)
        ours, means, squares = reference.call("update_adam", *given, decoupled=decoupled, **options)
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-10)


def test_lion() -> None:
    (moved,), (mean,) = reference.call(
        "update_lion", [np.array([1.0])], [np.array([2.0])], [np.array([-1.0])], rate=0.1, decay=0.5
    )
    # The direction is the sign of 0.9 · -1 + 0.1 · 2; the mean keeps 0.99 of what it was.
    assert moved == pytest.approx(1 - 0.1 * (-1 + 0.5))
    assert mean == pytest.approx(-0.99 + 0.02)


def stepped(kind: Any, **options: Any) -> tuple[Array, Array, Array]:
    start, gradient = drawn(5), drawn(5)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = kind([parameter], lr=0.1, **options)
    for _ in range(3):
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    return parameter.detach().numpy(), start, gradient


def test_a_name_that_no_op_has() -> None:
    refuses("there is no op 'dance'; the ops are abs, acos", reference.call, "dance")
