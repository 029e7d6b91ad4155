"""What is peculiar to MLX: its gaps, its own versions of ops, its gradients and its compiler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from anydevice._core.dtypes import DTYPES
from anydevice._ops.dispatch import version_for_mixed_dtypes
from anydevice.errors import ConfigurationError, UnsupportedError

mx = pytest.importorskip("mlx.core")

from anydevice._engines.mlx import primitives
from anydevice._engines.mlx.autodiff import AUTODIFF
from anydevice._engines.mlx.compiler import COMPILER
from anydevice._engines.mlx.fused import FUSED
from anydevice._engines.mlx.primitives import PRIMITIVES as XP
from tests.comparing import COPIED, assert_same_values

HALF = ("float16", "bfloat16")


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(numbers).astype(getattr(mx, dtype))


def host(x: Any) -> Any:
    return np.array(x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x)


# Primitives


@pytest.mark.parametrize("name", ["exp", "sin", "cos", "sigmoid", "erf"])
def test_float64_is_computed_in_full(name: str) -> None:
    special = pytest.importorskip("scipy.special")
    numbers = np.linspace(-20, 20, 4001)
    exact = {"sigmoid": special.expit, "erf": special.erf}.get(name) or getattr(np, name)
    found = getattr(XP, name)(mx.array(numbers, dtype=mx.float64))
    np.testing.assert_allclose(np.array(found), exact(numbers), rtol=1e-14, atol=5e-16)


@pytest.mark.parametrize("name", ["exp", "sin", "cos", "sigmoid", "erf"])
def test_the_gradient_of_float64_is_computed_in_full(name: str) -> None:
    x = mx.array(np.array([-2.0, 0.1, 0.9]), dtype=mx.float64)
    step = 1e-6
    rise = getattr(XP, name)(x + step) - getattr(XP, name)(x - step)
    _, found = AUTODIFF.value_and_grad(lambda x: mx.sum(getattr(XP, name)(x)))(x)
    np.testing.assert_allclose(np.array(found), np.array(rise) / (2 * step), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("function", ["sum", "max", "min"])
def test_what_has_no_elements_is_reduced_without_mlx(function: str) -> None:
    # MLX itself may never return from this.
    for _ in range(50):
        assert getattr(XP, function)(mx.zeros((3, 0)), 0).shape == (0,)
        assert getattr(XP, function)(mx.zeros((3, 0, 2)), 0, True).shape == (1, 0, 2)
    assert XP.argmax(mx.zeros((0, 3)), 1).shape == (0,)
    with pytest.raises(ValueError, match="zero-size"):
        XP.max(mx.zeros((3, 0)), 1)


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_the_way_to_argmax_on_a_gpu(dtype: str) -> None:
    x = mx.array([[1.0, 5.0, 5.0], [2.0, math.nan, math.nan], [math.inf, 1.0, math.nan]])
    found = primitives._argmax_of_numbers_and_others(x.astype(getattr(mx, dtype)), 1)
    assert found.dtype == mx.int32
    assert found.tolist() == [1, 1, 2] == XP.argmax(x, 1).tolist()


def test_a_type_that_mlx_lacks_is_named() -> None:
    with pytest.raises(UnsupportedError, match="MLX has no complex128"):
        XP.full((1,), 0, DTYPES["complex128"], mx.zeros(1))


@pytest.mark.parametrize("dtype", ["float64", "float32", *HALF])
def test_one_row_is_replaced_whatever_it_held(dtype: str) -> None:
    held = mx.array([math.nan, math.inf, -0.0, 3.0]).astype(getattr(mx, dtype))
    x = mx.broadcast_to(held[:, None, None, None], (4, 2, 3, 5))
    new = drawn(4, 2, 1, 5, dtype=dtype)
    written = XP.write(x + 0, new, mx.array([[1], [2], [3], [-1]]))
    expected = host(x).copy()
    expected[0, :, 1], expected[1, :, 2] = host(new)[0, :, 0], host(new)[1, :, 0]
    assert_same_values(host(written), expected, because=COPIED)


def test_a_cache_that_nobody_else_holds_is_not_copied() -> None:
    cache, new = mx.zeros((1, 4, 4096, 64)), mx.ones((1, 4, 1, 64))
    mx.eval(cache, new)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for place in range(4):
        cache = XP.write(cache, new, mx.array([[place]]))
        mx.eval(cache)
    assert mx.get_peak_memory() - before < cache.nbytes / 2
    assert mx.sum(cache).item() == 4 * 4 * 64


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_gradient_of_writing(tokens: int) -> None:
    places = mx.array([[1, 7][:tokens]])

    def total(arrays: Any) -> Any:
        return mx.sum(XP.write(arrays[0], arrays[1], places) * mx.arange(3)[:, None])

    arrays = mx.ones((1, 1, 3, 1)), mx.ones((1, 1, tokens, 1))
    _, (old, new) = AUTODIFF.value_and_grad(total)(arrays)
    assert old.reshape(-1).tolist() == [0, 0, 2]
    assert new.reshape(-1).tolist() == [1, 0][:tokens]
    with pytest.raises(ValueError, match="vjp"):
        mx.grad(lambda new: mx.sum(XP.write(arrays[0], new, mx.array([[1]]))))(arrays[1][:, :, :1])


# Its own versions of ops


@pytest.mark.parametrize("row", [[-math.inf] * 2, [math.inf, 1.0], [math.nan, 1.0]])
def test_softmax_of_what_is_no_number(row: list[float]) -> None:
    assert np.isnan(np.array(FUSED["softmax"](mx.array([row]), 1))).all()


def queries_keys_values(queries: int, keys: int, dtype: str = "float32") -> list[Any]:
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16))
    return [drawn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def test_what_is_left_to_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = (False, None, None, None, None)
    attention = FUSED["attention"]
    for dtype in ("float64", *HALF):
        assert attention(*queries_keys_values(3, 3, dtype), *plain) is NotImplemented
        x, weight = drawn(2, 8, dtype=dtype), drawn(8, dtype=dtype)
        assert FUSED["rmsnorm"](x, weight, 1e-6) is NotImplemented
        assert FUSED["layernorm"](x, weight, None, 1e-6) is NotImplemented
    assert FUSED["softmax"](drawn(2, 8, dtype="float64"), 1) is NotImplemented
    for name in ("rmsnorm", "layernorm"):
        assert version_for_mixed_dtypes(FUSED[name], len) is len
    assert attention(*queries_keys_values(3, 0), *plain) is NotImplemented
    first_sees_nothing = queries_keys_values(4, 3)
    assert attention(*first_sees_nothing, True, None, None, None, None) is NotImplemented
    for name, arguments in {"softmax": (-1,), "rmsnorm": (drawn(8), 1e-6)}.items():
        assert FUSED[name](mx.zeros((0, 8)), *arguments) is NotImplemented
    monkeypatch.setattr("anydevice._engines.mlx.fused._MAX_SCORES", 71)
    assert attention(*queries_keys_values(3, 3), *plain) is NotImplemented


def test_an_error_of_attention_is_not_taken_for_a_missing_kernel() -> None:
    q, k, v = queries_keys_values(3, 3)
    with pytest.raises(ValueError, match="broadcast"):
        FUSED["attention"](q, k, v, False, None, mx.ones((2, 4, 3, 5), dtype=mx.bool_), None, None)


# Gradients


def loss(tree: Any, factor: Any = 1.0) -> Any:
    return mx.sum(tree["a"] * tree["b"][0]) * factor


def test_a_gradient_is_a_tree_like_its_argument() -> None:
    tree = {"a": mx.array([1.0, 2.0]), "b": [mx.array([3.0, 4.0]), None]}
    value, gradient = AUTODIFF.value_and_grad(loss)(tree, factor=2.0)
    assert value.item() == 22
    assert gradient["a"].tolist() == [6, 8]
    assert gradient["b"][0].tolist() == [2, 4]
    assert gradient["b"][1] is None
    stopped = AUTODIFF.value_and_grad(lambda x: mx.sum(x * AUTODIFF.stop_gradient(x)))
    assert stopped(mx.array([3.0]))[1].tolist() == [3]


def test_gradients_of_compiled_functions_and_compiled_gradients() -> None:
    tree = {"a": mx.array([1.0, 2.0]), "b": [mx.array([3.0, 4.0])]}
    for function in (
        AUTODIFF.value_and_grad(COMPILER.compile(loss)),
        COMPILER.compile(AUTODIFF.value_and_grad(loss)),
    ):
        value, gradient = function(tree)
        assert value.item() == 11
        assert gradient["a"].tolist() == [3, 4]


def test_a_checkpoint_runs_again_for_its_gradient() -> None:
    runs = []

    def square(x: Any, *, scale: float) -> Any:
        runs.append(1)
        return {"square": x * x * scale}

    again = AUTODIFF.checkpoint(square)
    _, gradient = AUTODIFF.value_and_grad(lambda x: mx.sum(again(x, scale=2.0)["square"]))(
        mx.array([3.0])
    )
    assert gradient.tolist() == [12]
    assert len(runs) == 2


# The compiler


def test_static_arguments_are_hashable_constants() -> None:
    made = []

    def scaled(x: Any, power: int, *more: Any, shift: float = 0.0, **named: Any) -> Any:
        made.append(power)
        return x**power + shift + sum(more) + sum(named.values())

    compiled = COMPILER.compile(scaled, static=["power", "shift"], donate=["x"])
    x = mx.array([2.0])
    assert compiled(x, 2).tolist() == [4]
    assert compiled(mx.array([3.0]), power=2).tolist() == [9]
    assert made == [2]
    assert compiled(x, 3, mx.array(1.0), shift=0.5, y=mx.array(2.0)).tolist() == [11.5]
    assert compiled.__name__ == "scaled"
    compiled = COMPILER.compile(lambda x, sizes: x, static=["sizes"])
    with pytest.raises(ConfigurationError, match=r"must be hashable.*among sizes"):
        compiled(mx.zeros(1), [1])
    with pytest.raises(ConfigurationError, match="no argument size; it has x, sizes"):
        COMPILER.compile(lambda x, sizes: x, static=["size"])


def test_its_own_versions_can_be_compiled() -> None:
    def block(x: Any, weight: Any, lengths: Any) -> Any:
        y = FUSED["rmsnorm"](x, weight, 1e-6)
        y = FUSED["attention"](y, y, y, True, None, None, None, lengths)
        return FUSED["softmax"](FUSED["layernorm"](y, weight, None, 1e-6), -1)

    arguments = drawn(2, 2, 3, 8), drawn(8, seed=1), mx.array([3, 2])
    compiled = COMPILER.compile(block)(*arguments)
    np.testing.assert_allclose(host(compiled), host(block(*arguments)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("static", [(), ("name",)])
def test_random_numbers_go_on_after_a_failed_compilation(static: tuple[str, ...]) -> None:
    def fails(x: mx.array, name: str = "no") -> mx.array:
        mx.random.uniform(shape=(2,))
        raise ValueError(name)

    mx.random.seed(7)
    mx.random.uniform(shape=(2,))
    before = mx.random.state[0].tolist()
    with pytest.raises(ValueError, match="no"):
        COMPILER.compile(fails, static=static)(mx.ones(2))
    assert mx.random.state[0].tolist() == before
    assert mx.random.uniform(shape=(2,)).shape == (2,)
