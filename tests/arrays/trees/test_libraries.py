"""The containers of JAX, Flax, Equinox, Optax, MLX, Hugging Face and SciPy in trees."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.train_state import TrainState

from anydevice._arrays.trees.tree import flatten
from anydevice.errors import TransferError
from tests.optional import torch


def is_array(value: object) -> bool:
    of_torch = type(value).__module__ == "torch"  # asked by name, where it may be missing
    return of_torch or isinstance(value, jax.Array | mx.array | np.ndarray)


def paths(tree: object) -> list[str]:
    return [leaf.path for leaf in flatten(tree, is_array)[0]]


def doubled(tree: Any) -> Any:
    leaves, rebuild = flatten(tree, is_array)
    return rebuild([leaf.value * 2 for leaf in leaves])


# --- JAX's registry ---------------------------------------------------------------------------


class Interval:
    """A tree that only JAX knows; its children are not its attributes."""

    def __init__(self, low: Any, high: Any) -> None:
        self.bounds = (low, high)


def test_a_type_counts_as_a_tree_from_the_moment_that_jax_knows_it() -> None:
    class Later(Interval):
        pass

    later = Later(jnp.ones(1), None)
    assert paths(later) == []
    jax.tree_util.register_pytree_node(
        Later, lambda it: (it.bounds, "static"), lambda static, bounds: Later(*bounds)
    )
    assert paths([later]) == ["[0][0]"]
    new = doubled(later)
    assert type(new) is Later
    assert new.bounds[0].tolist() == [2]
    assert new.bounds[1] is None


def test_the_keys_that_jax_knows_are_in_the_path() -> None:
    class Named(Interval):
        pass

    jax.tree_util.register_pytree_with_keys(
        Named,
        lambda it: ([(jax.tree_util.GetAttrKey("low"), it.bounds[0])], it.bounds[1]),
        lambda high, parts: Named(parts[0], high),
    )
    assert paths({"x": Named([jnp.ones(1)], 3)}) == ["['x'].low[0]"]
    assert doubled(Named(jnp.ones(1), 3)).bounds[1] == 3


def test_a_jax_tree_that_holds_itself_is_refused_by_name() -> None:
    class Ring(Interval):
        pass

    jax.tree_util.register_pytree_node(
        Ring, lambda it: (it.bounds, None), lambda _, bounds: Ring(*bounds)
    )
    ring = Ring(jnp.ones(1), None)
    ring.bounds = (ring, None)
    with pytest.raises(TransferError, match=r"^\[0\]: the tree contains .*\(Ring at the root"):
        flatten(ring, is_array)


def test_trees_of_jax_and_its_libraries() -> None:
    frozen = FrozenDict({"params": {"w": jnp.ones(1)}})
    assert paths(frozen) == ["['params']['w']"]
    assert type(doubled(frozen)) is FrozenDict
    partial = jax.tree_util.Partial(jnp.add, jnp.ones(1))
    assert doubled(partial)(0).tolist() == [2]


def test_optax_states_are_named_tuples() -> None:
    params = {"w": jnp.ones(2)}
    state = optax.adam(1e-3).init(params)
    assert "[0].mu['w']" in paths(state)
    new = doubled(jax.tree.map(lambda x: x + 1, state))
    assert type(new[0]) is type(state[0])
    assert new[0].mu["w"].tolist() == [2, 2]
    assert jax.tree.structure(new) == jax.tree.structure(state)


# --- Equinox and Flax -------------------------------------------------------------------------


def test_equinox_modules_are_made_anew() -> None:
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    assert paths(model)[:2] == ["layers[0].weight", "layers[0].bias"]
    new = doubled(model)
    assert type(new) is eqx.nn.MLP
    assert new.activation is model.activation
    np.testing.assert_allclose(new.layers[0].weight, model.layers[0].weight * 2)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert eqx.filter_jit(new)(jnp.ones(2)).shape == (1,)


def test_equinox_state_is_made_anew() -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch")
    new = doubled((norm, state))
    assert jax.tree.structure(new) == jax.tree.structure((norm, state))
    arrays = jax.tree.leaves(eqx.filter((norm, state), eqx.is_array))
    assert len(paths((norm, state))) == len(arrays)


def test_flax_dataclasses_keep_their_static_fields() -> None:
    @struct.dataclass
    class Model:
        weight: Any
        table: Any = struct.field(pytree_node=False)

    model = Model(jnp.ones(1), np.ones(1))
    assert paths(model) == ["weight"]
    assert doubled(model).table is model.table


def test_a_linen_train_state_moves_and_the_module_is_left_alone() -> None:
    module = linen.Dense(2)
    params = module.init(jax.random.key(0), jnp.ones((1, 3)))
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    assert paths([module]) == []
    found = paths(state)
    assert "params['params']['kernel']" in found
    assert any(path.startswith("opt_state[0].trace") for path in found)
    new = doubled(state)
    assert new.tx is state.tx
    assert new.apply_fn(new.params, jnp.ones((1, 3))).shape == (1, 2)


class Shared(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)])
        self.blocks[1].kernel = self.blocks[0].kernel
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_nnx_modules_are_made_anew_and_what_they_share_stays_shared() -> None:
    model = Shared(nnx.Rngs(0))
    model.blocks[0].kernel.set_metadata("note", "kept")
    assert paths(model)[:3] == ["blocks[0].kernel", "blocks[0].bias", "blocks[1].bias"]
    new = doubled(model)
    assert type(new) is Shared
    assert new is not model
    assert new.blocks[0].kernel is new.blocks[1].kernel
    assert new.blocks[0].kernel is not model.blocks[0].kernel
    assert type(new.blocks[0].kernel) is nnx.Param
    np.testing.assert_allclose(new.blocks[0].kernel[...], model.blocks[0].kernel[...] * 2)
    assert new.blocks[0].kernel.get_metadata("note") == "kept"
    assert nnx.graphdef(new) == nnx.graphdef(model)
    new.blocks[0].kernel.set_metadata("note", "other")
    assert model.blocks[0].kernel.get_metadata("note") == "kept"
    assert new._pytree__state is not model._pytree__state
    assert nnx.jit(lambda model, x: model(x))(new, jnp.ones((3, 2))).shape == (3, 2)


def test_nnx_objects_that_are_no_trees_for_jax_are_trees_here() -> None:
    class Plain(nnx.Module, pytree=False):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(1))

    plain = Plain()
    assert jax.tree_util.all_leaves([plain])
    assert paths(plain) == ["weight"]
    assert doubled(plain).weight[...].tolist() == [2]


def test_nnx_states_and_optimizers() -> None:
    model = Shared(nnx.Rngs(0))
    _, state = nnx.split(model)
    assert "['blocks'][0]['kernel']" in paths(state)
    new = doubled(state)
    assert type(new) is nnx.State
    kernel, before = (each["blocks"][0]["kernel"][...] for each in (new, state))
    np.testing.assert_allclose(kernel, before * 2)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    tree = doubled({"model": model, "optimizer": optimizer})
    gradients = nnx.grad(lambda model: model(jnp.ones((3, 2))).sum())(tree["model"])
    tree["optimizer"].update(tree["model"], gradients)


# --- MLX --------------------------------------------------------------------------------------


def mlx_model() -> Any:
    model = mlx.nn.Sequential(mlx.nn.Linear(2, 2), mlx.nn.BatchNorm(2))
    model.stack = [mx.zeros(2)]
    model.freeze(keys="bias")
    return model.eval()


def test_mlx_modules_change_in_place_with_the_lists_inside_them() -> None:
    model = mlx_model()
    layers, stack, first = model.layers, model.stack, model.layers[0]
    assert "layers[0].weight" in paths(model)
    assert "stack[0]" in paths(model)
    leaves, rebuild = flatten({"model": model}, is_array)
    new = rebuild([leaf.value + 1 for leaf in leaves])
    assert new["model"] is model
    assert model.layers is layers
    assert model.layers[0] is first
    assert model.stack is stack
    assert stack[0].tolist() == [1, 1]
    assert not model.training
    assert "bias" not in model.layers[0].trainable_parameters()
    assert model(mx.ones((1, 2))).shape == (1, 2)


def test_mlx_optimizers_keep_the_dicts_of_their_state_inside_and_outside() -> None:
    model = mlx.nn.Linear(2, 2)
    optimizer = mlx.optimizers.Adam(learning_rate=0.1)
    optimizer.init(model.trainable_parameters())
    state, weight = optimizer.state, optimizer.state["weight"]
    assert {"state['step']", "state['weight']['m']"} <= set(paths(optimizer))
    leaves, rebuild = flatten(optimizer, is_array)
    assert rebuild([leaf.value + 1 for leaf in leaves]) is optimizer
    assert optimizer.state is state
    assert state["weight"] is weight
    assert weight["m"].tolist() == [[1, 1], [1, 1]]
    assert state["step"].item() == 1
    optimizer = mlx.optimizers.SGD(learning_rate=0.1)
    leaves, rebuild = flatten([optimizer.state, optimizer], is_array)
    new = rebuild([leaf.value + 1 for leaf in leaves])
    assert new[1] is optimizer
    assert optimizer.state is new[0]
    assert optimizer.state["step"].item() == 1


def test_mlx_objects_refuse_what_is_no_mlx_array_before_anything_changes() -> None:
    model = mlx_model()
    optimizer = mlx.optimizers.SGD(learning_rate=0.1)
    for tree, path, instead in (
        (model, r"stack\[0\]", r"parameters\(\)"),
        (optimizer, r"state\['\w+'\]", "state"),
    ):
        leaves, rebuild = flatten(tree, is_array)
        values = [leaf.value + 1 for leaf in list(leaves)[:-1]]
        with pytest.raises(TransferError, match=rf"^{path}: a mlx.*ndarray; move its {instead} i"):
            rebuild([*values, np.ones(2)])
    assert model.stack[0].tolist() == [0, 0]


# --- Hugging Face and SciPy -------------------------------------------------------------------


def test_hugging_face_batches_keep_what_is_beside_the_tensors() -> None:
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.ones(1, 2), "text": ["a"]}, n_sequences=1)
    assert paths(batch) == ["['input_ids']"]
    new = doubled(batch)
    assert type(new) is BatchEncoding
    assert new is not batch
    assert new.input_ids.tolist() == [[2, 2]]
    assert new["text"] is batch["text"]
    assert new.n_sequences == 1
    assert batch["input_ids"].tolist() == [[1, 1]]


def test_hugging_face_outputs_hold_the_same_tensors_as_items_and_attributes() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(torch.ones(2), hidden_states=(torch.ones(1), torch.ones(1)))
    assert paths(output)[0] == "['last_hidden_state']"
    assert paths(output)[1:] == ["['hidden_states'][0]", "['hidden_states'][1]"]
    new = doubled(output)
    assert type(new) is BaseModelOutput
    assert list(new) == ["last_hidden_state", "hidden_states"]
    assert new.last_hidden_state is new["last_hidden_state"]
    assert new.last_hidden_state is new[0]
    assert new.hidden_states is new["hidden_states"]
    assert new.attentions is None
    assert new.last_hidden_state.tolist() == [2, 2]


@pytest.mark.parametrize("layout", ["csr", "coo", "dok", "lil", "dia", "bsr"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_sparse_matrices_of_scipy_are_left_alone(layout: str, kind: str) -> None:
    matrix = getattr(scipy.sparse, f"{layout}_{kind}")(np.eye(3))
    tree = {"x": matrix}
    assert paths(tree) == []
    assert flatten([matrix, np.ones(1)], is_array)[1]([1])[0] is matrix
