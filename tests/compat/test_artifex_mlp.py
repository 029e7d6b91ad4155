"""Artifex's `MLP`, row X10: it is a module of Flax NNX, and a `nn.Model`."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import anydevice
from anydevice import Device, UnsupportedError, device_of, nn, to_device, use_device
from anydevice.compat import artifex
from anydevice.compat.artifex import MLP
from tests.comparing import rounding

X = np.random.default_rng(0).standard_normal((32, 8)).astype("float32")
Y = np.stack([X[:, 0] > 0, X[:, 1] > 0], axis=1).astype("float32")


def made(**options: Any) -> Any:
    with use_device("cpu"):
        return MLP([16, 16, 2], 8, **{"rngs": nnx.Rngs(0), **options})


def error(model: Any, x: Any = X, y: Any = Y) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def test_flax_compiles_it_and_takes_its_state() -> None:
    mlp = made()
    assert isinstance(mlp, nnx.Module)
    close = {"rtol": rounding(np.float32, 32), "atol": rounding(np.float32, 32)}
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(mlp, X), mlp(X), **close)
    state = nnx.state(mlp, nnx.Param)
    sizes = [leaf.size for leaf in jax.tree.leaves(state)]
    assert sum(sizes) == mlp.parameter_count == 8 * 16 + 16 + 16 * 16 + 16 + 16 * 2 + 2
    again = nnx.merge(*nnx.split(mlp))
    np.testing.assert_array_equal(again(X), mlp(X))
    assert mlp.layers[0].kernel[...].shape == (8, 16)


def test_flax_makes_it_without_numbers_and_inside_compiled_code() -> None:
    shapes = nnx.eval_shape(made)
    assert shapes.layers[2].kernel.shape == (16, 2)
    inside = nnx.jit(made)()
    allowed = rounding(np.float32, 8)
    np.testing.assert_allclose(inside(X), made()(X), rtol=allowed, atol=allowed)


def test_flax_differentiates_and_trains_it() -> None:
    mlp = made(use_gradient_checkpointing=True)
    slopes = nnx.grad(error)(mlp)
    small = 1e-2
    for layer in (0, 2):
        bias = mlp.layers[layer].bias
        before = bias[...]
        bias[...] = before.at[1].add(small)
        above = error(mlp)
        bias[...] = before.at[1].add(-small)
        below = error(mlp)
        bias[...] = before
        expected = (above - below) / (2 * small)
        assert slopes["layers"][layer]["bias"][1] == pytest.approx(float(expected), rel=0.02)

    optimizer = nnx.Optimizer(mlp, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, slopes = nnx.value_and_grad(error)(model)
        optimizer.update(model, slopes)
        return loss

    losses = [float(step(mlp, optimizer)) for _ in range(100)]
    assert losses[-1] < 0.2 * losses[0]
    assert float(error(mlp)) < losses[0] / 5


def test_what_was_compiled_follows_what_flax_trains() -> None:
    mlp = made()
    fast = anydevice.compile(mlp, "cpu", optimize="none")
    optimizer = nnx.Optimizer(mlp, optax.sgd(0.5), wrt=nnx.Param)
    before = np.asarray(fast(X))
    optimizer.update(mlp, nnx.grad(error)(mlp))
    allowed = rounding(np.float32, 32)
    np.testing.assert_allclose(np.asarray(fast(X)), mlp(X), rtol=allowed, atol=allowed)
    assert not np.allclose(before, mlp(X), atol=1e-3)


def test_its_gradients_keep_fewer_activations_with_checkpointing() -> None:
    """Also where flax asks for the gradient, and not `nn.train`."""

    def kept(**options: Any) -> int:
        with use_device("cpu"):
            mlp = MLP([64] * 20, 64, rngs=nnx.Rngs(0), **options)
        graph, state = nnx.split(mlp)
        x = jnp.ones((7, 64))
        backward = jax.vjp(lambda state: nnx.merge(graph, state)(x).sum(), state)[1]
        return sum(each.size for each in jax.tree.leaves(backward) if each.shape[:1] == (7,))

    assert kept(use_gradient_checkpointing=True) <= 0.6 * kept()


def test_dropout_is_on_until_it_is_turned_off_as_in_flax() -> None:
    mlp = made(dropout_rate=0.5)
    call = nnx.jit(lambda model, x: model(x))
    for once in (lambda: mlp(X), lambda: call(mlp, X)):
        mlp.train()
        assert not np.array_equal(once(), once())
        mlp.eval()
        np.testing.assert_array_equal(once(), once())
    plain = made()
    allowed = rounding(np.float32, 32)
    np.testing.assert_allclose(mlp(X), plain(X), rtol=allowed, atol=allowed)
    fast = anydevice.compile(mlp, "cpu", optimize="none", verify=X)
    np.testing.assert_allclose(np.asarray(fast(X)), mlp(X), rtol=allowed, atol=allowed)
    noted = anydevice.compile(made(dropout_rate=0.5), "cpu", optimize="none").report.notes
    assert any("training mode" in note for note in noted)


def test_it_is_made_where_the_block_says_and_goes_where_it_is_sent() -> None:
    with use_device("cpu:1"):
        mlp = MLP([4, 2], 8, dropout_rate=0.1, rngs=nnx.Rngs(0))
    assert mlp.layers[1].kernel[...].device == jax.devices("cpu")[1]
    assert device_of(mlp) == Device("cpu:1")
    assert mlp(X).device == jax.devices("cpu")[1]
    assert nnx.jit(lambda model, x: model(x))(mlp, X).device == jax.devices("cpu")[1]
    moved = to_device(mlp, "cpu:2")
    assert isinstance(moved, nnx.Module)
    assert type(moved) is MLP
    assert moved(X).device == jax.devices("cpu")[2]
    assert jax.device_put(mlp, jax.devices("cpu")[2])(X).device == jax.devices("cpu")[2]
    assert mlp.layers[1].kernel[...].device == jax.devices("cpu")[1]


def test_it_is_trained_saved_and_pickled_as_other_models_are(tmp_path: Any) -> None:
    mlp = made(dropout_rate=0.1)
    data, optimizer = nn.Batches(X, Y, 16), nn.Adam(1e-2)
    trained = nn.train(mlp, data, optimizer, nn.mean_squared_error, epochs=20, progress=False).model
    assert float(error(trained)) < 0.5 * float(error(mlp.eval() or mlp))
    assert trained.layer == mlp.layer
    nn.save(mlp, tmp_path / "mlp.safetensors")
    with use_device("cpu"):
        again = nn.load(tmp_path / "mlp.safetensors")
    assert again.layer == mlp.layer
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(made()))(X), made()(X))


def test_without_flax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "anydevice.compat.artifex_mlp")
    with pytest.raises(UnsupportedError, match="pip install flax") as caught:
        _ = artifex.MLP
    assert caught.value.code == "library_missing"
    assert not hasattr(artifex, "CNN")
