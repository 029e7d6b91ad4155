"""Mixtures of experts against the reference, on each way to compute them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import ops
from anydevice._check import reference
from anydevice._formats.quantize import quantizer_of
from anydevice._machine.engines import registry
from anydevice._ops import transformer
from anydevice.errors import ConfigurationError
from tests.comparing import assert_close, assert_same_values

Array = np.ndarray[Any, Any]
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "clipped_swiglu")


def wanted(*arrays: Array, **options: Any) -> Array:
    return reference.call("experts", *arrays, **options)


def inputs(tokens: int = 7, k: int = 2, count: int = 4, hidden: int = 6, inner: int = 5) -> Any:
    rng = np.random.default_rng(tokens * 100 + count)
    stacks = rng.normal(size=(count, 2 * inner, hidden)), rng.normal(size=(count, hidden, inner))
    chosen = rng.integers(-1, count + 1, (tokens, k))
    return rng.normal(size=(tokens, hidden)), *stacks, chosen, rng.normal(size=(tokens, k))


WAYS = {"host": "host", "device": "device", "traced": "nowhere"}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As if the choices were on the host, on a device to be waited for, or not known yet."""
    monkeypatch.setattr(transformer, "_where", lambda chosen: WAYS[request.param])
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("tokens", "k", "count"), [(7, 2, 4), (1, 3, 4), (1, 2, 30), (3, 1, 1), (140, 2, 4)]
)
def test_it_is_the_sum_over_the_chosen(tokens: int, k: int, count: int, activation: str) -> None:
    given = inputs(tokens, k, count)
    rng = np.random.default_rng(1)
    biases = {
        "gate_up_bias": rng.normal(size=(count, 10)),
        "down_bias": rng.normal(size=(count, 6)),
    }
    for options in ({}, biases, {"alpha": 1.2, "limit": 0.5}):
        result = ops.experts(*given, activation=activation, **options)
        want = wanted(*given, activation=activation, **options)
        np.testing.assert_allclose(result, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("engine", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize(("tokens", "count"), [(7, 4), (1, 30), (140, 4)])
def test_quantized_stacks_are_as_their_numbers(engine: str, tokens: int, count: int) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    cpu = anydevice.device("cpu", engine=engine)
    arrays = inputs(tokens, 2, count, 32, 64)
    x, *stacks, chosen, weights = (a.astype("f4" if a.dtype.kind == "f" else "i4") for a in arrays)
    packed = []
    for stack, kind in zip(stacks, ("q4_0", "q8_0"), strict=True):
        rows = quantizer_of(kind)(stack.reshape(-1, stack.shape[-1]))
        parts = {name: cpu(a.reshape(*stack.shape[:2], -1)) for name, a in rows.arrays.items()}
        packed.append(rows.with_arrays(parts, stack.shape))
    x, chosen, weights = cpu((x, chosen, weights))
    want = ops.experts(x, *map(ops.dequantize, packed), chosen, weights)
    for both in (packed, [packed[0], ops.dequantize(packed[1])]):
        assert_close(ops.experts(x, *both, chosen, weights), want, terms=200)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_nothing_chosen_is_nothing_added(tokens: int) -> None:
    x, gate_up, down, chosen, weights = inputs(tokens)
    nobody = np.full_like(chosen, -1)
    assert not ops.experts(x, gate_up, down, nobody, weights * math.nan).any()
    assert ops.experts(x, gate_up, down, chosen[:, :0], weights[:, :0]).shape == x.shape


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint32, np.int64])
@pytest.mark.usefixtures("way")
def test_numbers_of_any_integer_dtype(kind: Any) -> None:
    x, gate_up, down, chosen, weights = inputs(9, 2, 4)
    chosen = np.abs(chosen).astype(kind)
    np.testing.assert_allclose(
        ops.experts(x, gate_up, down, chosen, weights), wanted(x, gate_up, down, chosen, weights)
    )


def test_a_number_beyond_32_bits_is_none() -> None:
    x, gate_up, down, chosen, weights = inputs()
    far = np.full_like(chosen, 2**32 + 1)
    assert not ops.experts(x, gate_up, down, far, weights).any()


def test_weights_of_another_dtype_keep_their_digits() -> None:
    x, gate_up, down, chosen, _ = (a.astype("f") if a.dtype.kind == "f" else a for a in inputs())
    weights = np.full(chosen.shape, 1 / 3)
    result = ops.experts(x, gate_up, down, chosen, weights)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, wanted(x, gate_up, down, chosen, weights), rtol=1e-4)


@pytest.mark.parametrize(("tokens", "count"), [(1, 30), (6, 3)])
def test_pytorchs_compiler_looks_through_it(tokens: int, count: int) -> None:
    torch = pytest.importorskip("torch")
    given = inputs(tokens, 2, count)
    compiled = torch.compile(ops.experts, backend="eager", fullgraph=True, dynamic=False)
    result = compiled(*map(torch.from_numpy, given))
    np.testing.assert_allclose(result.numpy(), wanted(*given), rtol=1e-10, atol=1e-12)


def with_grouped_products() -> Any:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip(f"PyTorch {torch.__version__} has no grouped product")
    return torch


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "k", "count"), [(7, 2, 4), (1, 3, 4), (3, 1, 1), (70, 2, 40)])
def test_grouped_products_of_pytorch(tokens: int, k: int, count: int, activation: str) -> None:
    """The way on cards, which computes on a CPU too: rows, ends, and what is left out."""
    torch = with_grouped_products()
    from anydevice._engines.torch.experts import in_order_of_experts

    given = inputs(tokens, k, count, 8, 16)
    rng = np.random.default_rng(1)
    biases = rng.normal(size=(count, 32)), rng.normal(size=(count, 8))
    for gate_up_bias, down_bias in ((None, None), biases):
        options: Any = {"activation": activation, "alpha": 1.2, "limit": 0.5}
        if gate_up_bias is not None:
            options |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        arrays = [*given, options.get("gate_up_bias"), options.get("down_bias")]
        there = [None if a is None else torch.from_numpy(a) for a in arrays]
        placed: Any = [a if a is None or not a.is_floating_point() else a.float() for a in there]
        result = in_order_of_experts(*placed, activation, 1.2, 0.5)
        np.testing.assert_allclose(result.numpy(), wanted(*given, **options), rtol=1e-4, atol=1e-4)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch, whose CPU counts as a card with a kernel for grouped products."""
    torch = with_grouped_products()
    from anydevice._engines.torch import experts

    monkeypatch.setattr(experts, "_has_kernel", lambda device: True)
    return torch


def in_bfloat16(torch: Any) -> Any:
    placed = map(torch.from_numpy, inputs(70, 2, 4, 8, 16))
    return [a.bfloat16() if a.is_floating_point() else a for a in placed]


def test_grouped_products_take_what_the_op_takes(grouped: Any) -> None:
    given = in_bfloat16(grouped)
    exact: Any = [a.double().numpy() if a.is_floating_point() else a.numpy() for a in given]
    result = ops.experts(*given)
    assert result.dtype == grouped.bfloat16
    np.testing.assert_allclose(result.float().numpy(), wanted(*exact), rtol=0.05, atol=0.5)
    with grouped.inference_mode():
        assert grouped.equal(ops.experts(*given), result)
    for kind in (grouped.int8, grouped.int16, grouped.int32):
        assert grouped.equal(ops.experts(*given[:3], given[3].to(kind), given[4]), result)
    for kind in (grouped.uint8, grouped.uint16, grouped.uint32, grouped.uint64):
        above = given[3].where(given[3] >= 0, 200).to(kind)
        assert grouped.equal(ops.experts(*given[:3], above, given[4]), result)
    far = grouped.full_like(given[3], 2**32 + 1)
    assert not ops.experts(*given[:3], far, given[4]).any()
    for rows in (0, 70):
        for k in (0, 2):
            part: Any = (given[0][:rows], *given[1:3], given[3][:rows, :k], given[4][:rows, :k])
            assert ops.experts(*part).shape == (rows, 8)


def test_products_go_by_blocks_of_tokens(grouped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._engines.torch import experts as on_cards

    given, seen = in_bfloat16(grouped), []
    whole, product = ops.experts(*given), on_cards._grouped_product

    def watched(rows: Any, *others: Any, **options: Any) -> Any:
        seen.append(len(rows))
        return product(rows, *others, **options)

    monkeypatch.setattr(on_cards, "_grouped_product", watched)
    monkeypatch.setattr(on_cards, "_MOST_BETWEEN", 1)
    assert grouped.equal(ops.experts(*given), whole)
    tokens, k = given[3].shape
    assert max(seen) == 64 * k < tokens * k
    assert sum(seen) == 2 * tokens * k


def test_grouped_products_leave_wrapped_tensors_to_others(grouped: Any) -> None:
    """They have no addresses: this raised."""
    x, gate_up, *others = in_bfloat16(grouped)

    def total(x: Any, gate_up: Any) -> Any:
        return ops.experts(x, gate_up, *others).float().sum()

    found = grouped.func.grad(total, argnums=(0, 1))(x, gate_up)
    inputs = [x.clone().requires_grad_(), gate_up.clone().requires_grad_()]
    for a, b in zip(found, grouped.autograd.grad(total(*inputs), inputs), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.float().numpy(), b.float().numpy(), rtol=0.1, atol=1.0)


@pytest.mark.parametrize("library", ["torch", "grouped", "jax", "mlx"])
@pytest.mark.parametrize(("tokens", "count"), [(1, 30), (7, 4), (140, 4)])
def test_a_choice_of_none_has_no_gradient_whatever_its_weight(
    tokens: int, count: int, library: str, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As where a softmax over nothing gave NaN, and -1 says that it is not to count."""
    if library == "grouped":
        request.getfixturevalue("grouped")
    else:
        pytest.importorskip({"mlx": "mlx.core"}.get(library, library))
        monkeypatch.setattr(transformer, "_where", lambda chosen: "device")
    device = anydevice.device("cpu", engine=library.replace("grouped", "torch"))
    given = [a.astype("f" if a.dtype.kind == "f" else "i") for a in inputs(tokens, 2, count, 8, 8)]
    given[3][0] = -1, count - 1
    found = []
    for weight in (0.0, math.nan):
        given[4][0, 0] = weight
        x, gate_up, down, chosen, weights = anydevice.to_device(given, device, convert=True)
        if library == "grouped":
            x, gate_up, down, weights = (a.bfloat16() for a in (x, gate_up, down, weights))

        def loss(tree: Any, others: Any = (chosen, weights)) -> Any:
            return ops.sum(ops.experts(*tree, *others))

        autodiff: Any = registry.load(device.engine).autodiff
        value, gradients = autodiff.value_and_grad(loss)([x, gate_up, down])
        wide = (ops.astype(each, "float32") for each in (value, *gradients))
        found.append([anydevice.to_numpy(each) for each in wide])
    reason = "the same program ran twice, and the weight that differs is left out"
    for without, with_nan in zip(*found, strict=True):
        assert_same_values(with_nan, without, because=reason)


@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_compiled_by_others_it_does_not_wait(library: str) -> None:
    if library == "jax":
        import jax

        compile_, place = jax.jit, jax.numpy.asarray
    else:
        mx = pytest.importorskip("mlx.core")
        compile_, place = mx.compile, mx.array
    for tokens, count in ((1, 8), (9, 3)):
        given = [a.astype("f" if a.dtype.kind == "f" else "i") for a in inputs(tokens, 2, count)]
        result = compile_(lambda *arrays: ops.experts(*arrays))(*map(place, given))
        np.testing.assert_allclose(np.array(result), wanted(*given), rtol=1e-4, atol=1e-5)


def test_of_many_experts_only_those_that_were_chosen_are_read() -> None:
    """Matrices that would take 200 GB: one that is repeated without being copied."""
    count, hidden, inner = 2**16, 512, 512
    rows = np.lib.stride_tricks.as_strided
    memory = np.random.default_rng(0).normal(size=(1, 2 * inner, hidden)).astype("f")
    gate_up = rows(memory, (count, 2 * inner, hidden), (0, *memory.strides[1:]))
    down = rows(memory, (count, hidden, inner), (0, memory.strides[1], memory.strides[2]))
    x = np.ones((3, hidden), "f")
    chosen = np.array([[count - 1, 7]] * 3)
    result = ops.experts(x, gate_up, down, chosen, np.full((3, 2), 0.5, "f"))
    both = memory[0] @ x[0]
    gate, up = np.split(both.astype(float), 2)
    want = memory[0, :hidden] @ (gate / (1 + np.exp(-gate)) * up)
    np.testing.assert_allclose(result[2], want, rtol=1e-2, atol=1e-2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "x must be (tokens, hidden)": ({"x": np.ones((1, 7, 6))}, r"x is \(1, 7, 6\)"),
    "gate_up must be (experts, 2 × inner, hidden)": (
        {"gate_up": np.ones((4, 6, 10))},
        r"gate_up is \(4, 6, 10\), down is \(4, 6, 5\)",
    ),
    "down must be (experts, hidden, inner)": ({"down": np.ones((3, 6, 5))}, r"down is \(3, 6, 5\)"),
    "gate_up must be": ({"down": np.ones(3)}, r"down is \(3,\)"),
    "gate_up_bias must be (experts": (
        {"gate_up_bias": np.ones((4, 5))},
        r"gate_up_bias is \(4, 5\)",
    ),
    "down_bias must be (experts, hidden)": ({"down_bias": np.ones(6)}, r"down_bias is \(6,\)"),
    "chosen and weights must be (tokens, k)": (
        {"weights": np.ones((7, 3))},
        r"weights is \(7, 3\)",
    ),
    "chosen and weights must be": ({"chosen": np.ones(7, int)}, r"chosen is \(7,\)"),
    "integers in chosen": ({"chosen": np.ones((7, 2))}, "array of float64"),
    "floating-point numbers in weights": ({"weights": np.ones((7, 2), int)}, "array of int64"),
    "same dtype": ({"down": np.ones((4, 6, 5), "f")}, "down is float32"),
    "floating-point numbers": ({"x": np.ones((7, 6), int)}, "array of int64"),
    "activation must be one of swiglu, geglu": ({"activation": "relu"}, "not 'relu'"),
    "limit must be a finite number": ({"limit": 0.0}, "above 0, not 0.0"),
    "alpha must be a finite number": ({"alpha": math.nan}, "not nan"),
}


@pytest.mark.parametrize("rule", WRONG)
def test_what_does_not_fit_is_named(rule: str) -> None:
    changed, said = WRONG[rule]
    names = ("x", "gate_up", "down", "chosen", "weights")
    arguments = {**dict(zip(names, inputs(), strict=True)), **changed}
    with pytest.raises(ConfigurationError, match=said) as caught:
        ops.experts(**arguments)
    assert rule in str(caught.value)
    assert str(caught.value).startswith("experts: ")
