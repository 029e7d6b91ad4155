"""What is peculiar to JAX: 64 bits that are off, donation, tracers, and several devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice._core.dtypes import DTYPES
from anydevice.errors import ConfigurationError, UnsupportedError

jax = pytest.importorskip("jax")
jnp = jax.numpy

from anydevice._engines.jax.autodiff import AUTODIFF
from anydevice._engines.jax.compiler import COMPILER
from anydevice._engines.jax.fused import FUSED
from anydevice._engines.jax.primitives import PRIMITIVES as xp  # noqa: N811
from tests.comparing import EXACT, assert_same_values, rounding

FLOAT64, INT32 = DTYPES["float64"], DTYPES["int32"]


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bits_that_are_off_are_refused(dtype: str) -> None:
    x = jnp.ones(2)
    for make in (
        lambda: xp.astype(x, DTYPES[dtype]),
        lambda: xp.full((1,), 0, DTYPES[dtype], x),
        lambda: xp.arange(3, DTYPES[dtype], x),
        lambda: xp.asarray(np.zeros(2, dtype), x),
    ):
        with pytest.raises(UnsupportedError, match="x64=True"):
            make()


def test_64_bits_that_are_on() -> None:
    jax.config.update("jax_enable_x64", True)
    x = xp.full((3,), 1 / 3, FLOAT64, jnp.ones(1))
    assert np.asarray(xp.add(x, 1.0)).tolist() == [1 / 3 + 1] * 3
    assert xp.sum(xp.astype(x, INT32), 0).dtype == np.int32
    assert xp.argmax(x, 0).dtype == xp.top_k(x, 1)[1].dtype == np.int32
    indices = jnp.array([2**40, 1, -(2**40)])
    assert np.isnan(np.asarray(xp.take(x, indices, 0))).tolist() == [True, False, True]
    assert xp.matmul(x[None], x[:, None]).dtype == np.float64


def test_dtypes_of_sums_and_of_numbers_of_numpy() -> None:
    x = jnp.ones((300, 2), bool)
    assert xp.sum(x, 0).tolist() == [300, 300]
    assert xp.sum(x, 0).dtype == xp.sum(x, ()).dtype == np.int32
    x = jnp.ones(2, jnp.bfloat16)
    assert xp.multiply(x, np.float64(0.5)).dtype == jnp.bfloat16
    assert xp.add(x, True).dtype == jnp.bfloat16


def test_float32_products_ask_for_all_of_float32() -> None:
    lowered = jax.jit(xp.matmul).lower(jnp.ones((2, 3)), jnp.ones((3, 2)))
    assert "HIGHEST" in lowered.as_text()
    half = jnp.ones((2, 3), jnp.bfloat16)
    gradient = jax.make_jaxpr(jax.grad(lambda a, b: xp.matmul(a, b).sum()))(half, half.T)
    products = [line for line in _equations(gradient) if line.primitive.name == "dot_general"]
    assert products
    assert {str(x.aval.dtype) for line in products for x in line.invars} == {"bfloat16"}


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a program and of the programs inside it."""
    for line in jaxpr.eqns:
        yield line
        for value in line.params.values():
            if hasattr(value, "eqns"):
                yield from _equations(value)


def test_writing_takes_the_memory_of_the_array_except_in_a_transformation() -> None:
    x, new, positions = jnp.zeros((1, 1, 3, 2)), jnp.ones((1, 1, 1, 2)), jnp.array([[1]])
    gradient = jax.grad(lambda rows: xp.write(x, rows, positions).sum())(new)
    assert gradient.ravel().tolist() == [1, 1]
    assert jax.jit(xp.write)(x, new, positions).sum() == 2
    assert not x.is_deleted()
    written = xp.write(x, new, positions)
    assert x.is_deleted()
    assert not new.is_deleted()
    assert written[0, 0, :, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_made_for_a_tracer_or_several_devices_goes_with_it(count: int) -> None:
    def made(x: Any) -> Any:
        shape, values = x.shape, np.arange(4, dtype=np.int32)
        return xp.full(shape, 1.0, xp.dtype(x), x) + x + xp.asarray(values, x)

    x = jnp.ones(4)
    assert jax.jit(made)(x).tolist() == [2, 3, 4, 5]
    devices = jax.devices("cpu")[:count]
    if len(devices) < count:
        pytest.skip("JAX shows one device: XLA_FLAGS did not ask for more before it started")
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    assert made(jax.device_put(x, place)).tolist() == [2, 3, 4, 5]


def test_static_and_donated_arguments() -> None:
    traced = []

    def function(x: Any, power: int, cache: Any) -> Any:
        traced.append(power)
        return xp.pow(x, power), xp.add(cache, 1)

    compiled = COMPILER.compile(function, static=["power"], donate=["cache"])
    cache = jnp.zeros(3)
    found, after = compiled(jnp.array([2.0]), 2, cache)
    compiled(jnp.array([3.0]), 2, after)
    assert (found.tolist(), traced) == ([4.0], [2])
    assert cache.is_deleted()


def test_a_static_cache_is_compiled_for_once() -> None:
    traced = []

    def decode(x: Any, cache: Any, position: Any) -> tuple[Any, Any]:
        traced.append(x.shape)
        cache = xp.write(cache, x, xp.reshape(position, (1, 1)))
        attention = FUSED["attention"]
        return attention(x, cache, cache, True, None, None, None, xp.add(position, 1)), cache

    compiled = COMPILER.compile(decode, donate=["cache"])
    cache = jnp.zeros((1, 2, 32, 4))
    for number in range(20):
        token = jnp.full((1, 2, 1, 4), float(number))
        found, cache = compiled(token, cache, jnp.array([number]))
    assert len(traced) == 1
    assert np.isfinite(np.asarray(found)).all()


def test_gradients() -> None:
    def layer(x: Any, weight: Any) -> Any:
        return xp.tanh(xp.matmul(x, weight))

    def loss(parameters: Any, x: Any) -> Any:
        x = AUTODIFF.checkpoint(layer)(x, parameters["weight"])
        return xp.sum(xp.multiply(x, AUTODIFF.stop_gradient(parameters["scale"])), (0, 1))

    parameters = {"weight": jnp.ones((3, 3)), "scale": jnp.ones(3), "none": None}
    x = jnp.arange(6.0).reshape(2, 3)
    value, gradient = AUTODIFF.value_and_grad(loss)(parameters, x)
    again, compiled = AUTODIFF.value_and_grad(COMPILER.compile(loss))(parameters, x)
    allowed = rounding(np.float32, 20)
    assert float(value) == pytest.approx(float(again), rel=allowed)
    assert gradient["none"] is None
    assert not gradient["scale"].any()
    np.testing.assert_allclose(gradient["weight"], compiled["weight"], rtol=allowed, atol=allowed)


def deep(parameters: Any, x: Any, ids: Any, layers: int = 3) -> Any:
    """Some layers, whose rows are then chosen by ids."""
    for weight in parameters["weights"][:layers]:
        x = jnp.tanh(x @ weight)
    return x[ids] * parameters["scale"]


def checkpointed_loss(parameters: Any, x: Any, ids: Any, seed: Any) -> Any:
    """Two checkpoints, with integers, what is closed over, and arguments by name."""
    factor = parameters["scale"] * seed

    def scaled(parameters: Any, x: Any, ids: Any, *, layers: int) -> Any:
        return deep(parameters, x, ids, layers) * factor

    x = AUTODIFF.checkpoint(scaled)(parameters, x, ids, layers=3)
    return (AUTODIFF.checkpoint(scaled)(parameters, x, ids, layers=2) ** 2).sum()


def plain_loss(parameters: Any, x: Any, ids: Any, seed: Any) -> Any:
    factor = parameters["scale"] * seed
    x = deep(parameters, x, ids) * factor
    return ((deep(parameters, x, ids, 2) * factor) ** 2).sum()


def test_a_checkpoint_gives_the_same_gradients_compiled_or_not() -> None:
    drawn = np.random.default_rng(0)
    parameters = {"weights": [jnp.array(drawn.normal(size=(8, 8)))] * 3, "scale": jnp.array(0.5)}
    given = (parameters, jnp.array(drawn.normal(size=(16, 8))), jnp.arange(16)[::-1], jnp.array(3))
    expected = jax.tree.leaves(jax.grad(plain_loss)(*given))
    slopes = jax.grad(checkpointed_loss)
    for gradient in (slopes, jax.jit(slopes), jax.grad(jax.jit(checkpointed_loss))):
        for found, right in zip(jax.tree.leaves(gradient(*given)), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)

    def squared(parameters: Any, slopes: Any) -> Any:
        found = jax.tree.leaves(slopes(parameters, *given[1:]))
        return sum((each**2).sum() for each in found)

    twice = jax.jit(jax.grad(partial(squared, slopes=slopes)))(parameters)
    right = jax.grad(partial(squared, slopes=jax.grad(plain_loss)))(parameters)
    for found, one in zip(jax.tree.leaves(twice), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-4)


def test_what_a_checkpoint_runs_again_stays_apart_from_the_first_run() -> None:
    """On the CPU, XLA drops barriers; elsewhere, a branch would wait for the device."""
    parameters = {"weights": [jnp.ones((8, 8))] * 3, "scale": jnp.array(0.5)}
    given = (parameters, jnp.ones((16, 8)), jnp.arange(16), jnp.array(3))

    def tanhs(loss: Any) -> int:
        compiled = jax.jit(jax.value_and_grad(loss)).lower(*given).compile()
        return int(compiled.as_text().count(" tanh("))

    assert tanhs(checkpointed_loss) == 2 * tanhs(plain_loss)
    traced = jax.jit(jax.value_and_grad(checkpointed_loss)).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.optimization_barrier") == 2
    assert text.count("stablehlo.tanh") == 10, "of branches for other platforms, nothing is left"


@pytest.mark.parametrize(
    ("tree", "where"), [({"step": np.ones(1, np.int32)}, r"\['step'\]"), (3.0, "the first")]
)
def test_there_is_no_gradient_by_what_is_not_a_floating_array(tree: Any, where: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{where}.*another argument"):
        AUTODIFF.value_and_grad(lambda t: jnp.array(1.0))(tree)


def test_what_is_handed_over() -> None:
    whole = jnp.ones((1, 1, 2, 2), jnp.int32)
    assert FUSED["mean"](whole, 0, False) is NotImplemented
    assert FUSED["max_pool2d"](whole, (2, 2), None) is NotImplemented
    assert FUSED["avg_pool2d"](whole, (2, 2), None) is NotImplemented
    shape = jax.ShapeDtypeStruct((1, 32, 2**13, 8), jnp.bfloat16)
    assert FUSED["attention"](shape, shape, shape, True, None, None, None, None) is NotImplemented


@pytest.mark.parametrize(
    ("shape", "size", "stride", "dtype"),
    [
        ((2, 3, 7, 8), (2, 2), (2, 2), "float32"),
        ((1, 2, 7, 11), (3, 3), (3, 3), "bfloat16"),
        ((2, 1, 5, 4), (1, 4), (1, 4), "float32"),
        ((0, 2, 4, 4), (2, 2), (2, 2), "float32"),
        ((1, 2, 9, 9), (4, 4), (4, 4), "float32"),
        ((1, 2, 6, 7), (3, 2), (1, 2), "float32"),
    ],
)
def test_the_gradient_of_the_largest_goes_to_the_first_one(
    shape: tuple[int, ...], size: tuple[int, int], stride: tuple[int, int], dtype: str
) -> None:
    """Whole numbers from a small range: most windows have several that are the largest."""
    window, step = (1, 1, *size), (1, 1, *stride)

    def by_library(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, step, "VALID")

    def own(x: Any) -> Any:
        return ops.max_pool2d(x, size, stride)

    @jax.jit
    def pairs(x: Any, change: Any, by: Any) -> Any:
        expected, back = jax.vjp(by_library, x)
        pooled, own_back = jax.vjp(own, x)
        forward = jax.jvp(own, (x,), (change,))[1]
        slope = jax.grad(lambda x: (own(x).astype(jnp.float32) ** 2).sum())
        second = jax.grad(lambda x: (slope(x) * change).astype(jnp.float32).sum())
        pair = {"largest": (own(x), expected), "with its gradient": (pooled, expected)}
        pair["gradient"] = own_back(by)[0], back(by)[0]
        pair["forward"] = (forward * by).sum(), (change * back(by)[0]).sum()
        pair["second derivative"] = second(x), back(2 * forward)[0]
        return pair

    random = np.random.default_rng(4)
    pooled_shape = jax.eval_shape(by_library, jax.ShapeDtypeStruct(shape, dtype)).shape
    given = [random.integers(-2, 3, each) for each in (shape, shape, pooled_shape)]
    for name, (got, wanted) in pairs(*(jnp.asarray(each, dtype) for each in given)).items():
        assert_same_values(got, wanted, because=f"{name}: {EXACT}")


def test_the_gradient_of_a_window_with_nan_goes_to_it() -> None:
    x = jnp.asarray([[1.0, jnp.nan, 5.0, 6.0], [9.0, jnp.nan, 7.0, 2.0]])[None, None]
    value, gradient = jax.value_and_grad(lambda x: jnp.nansum(ops.max_pool2d(x, 2)))(x)
    assert value == 7.0
    assert gradient[0, 0].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    gradient = jax.grad(lambda x: ops.max_pool2d(x, 2).sum())(x)
    assert gradient[0, 0].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]


def test_a_new_rate_or_step_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._engines.jax import fused

    traced, grown = list[float](), fused._bias_correction

    def noted(base: float, count: Any) -> Any:
        traced.append(base)
        return grown(base, count)

    monkeypatch.setattr(fused, "_bias_correction", noted)
    lists = [[jnp.ones(3)] for _ in range(4)]
    fused._adam.clear_cache()
    for step in (1, 2, 3):
        FUSED["update_adam"](*lists, step, 0.1 / step, 0.9, 0.999, 1e-8, 0.0, True)
        assert traced == [0.9, 0.999]


def test_a_constant_of_numpys_is_refused_in_compiled_code_as_outside_of_it() -> None:
    host = np.ones((2, 3), np.float32)
    for add in (ops.add, jax.jit(lambda x, y: ops.add(x, host))):
        with pytest.raises(ConfigurationError, match=r"^add: a is an array of JAX and b one of Nu"):
            add(jnp.asarray(host), host)


def test_most_effort_is_an_option_that_this_jax_knows() -> None:
    assert COMPILER.compile(lambda x: x + 1, max_effort=True)(jnp.ones(2)).tolist() == [2, 2]
