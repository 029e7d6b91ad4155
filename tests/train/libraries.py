"""The same small module and its loop by hand in PyTorch, Flax NNX, Equinox and MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(24, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
DATA = [(X[at : at + 8], Y[at : at + 8]) for at in range(0, 24, 8)]
"""Three batches."""

EPOCHS = 3
RATE = 1e-2


class Torch:
    """`torch.nn`, with dropout and a norm."""

    engine = "torch"

    def __init__(self) -> None:
        self.torch: Any = pytest.importorskip("torch")
        self.loss = self.torch.nn.functional.cross_entropy

    def model(self) -> Any:
        modules = self.torch.nn
        self.torch.manual_seed(0)
        parts = modules.Linear(4, 8), modules.BatchNorm1d(8), modules.ReLU(), modules.Dropout(0.2)
        return modules.Sequential(*parts, modules.Linear(8, 3))

    def optimizer(self, model: Any) -> Any:
        return self.torch.optim.AdamW(model.parameters(), lr=RATE)

    def sgd(self, model: Any) -> Any:
        return self.torch.optim.SGD(model.parameters(), lr=RATE)

    def step(self, model: Any, optimizer: Any) -> Callable[[Any, Any], float]:
        def taken(x: Any, y: Any) -> float:
            x, y = self.torch.tensor(x), self.torch.tensor(y)
            loss = self.loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return taken

    def weights(self, model: Any) -> dict[str, Any]:
        return {name: x.float().numpy().copy() for name, x in model.state_dict().items()}


class Nnx:
    """`flax.nnx`, with dropout and a norm."""

    engine = "jax"

    def __init__(self) -> None:
        self.optax: Any = pytest.importorskip("optax")
        self.nnx: Any = pytest.importorskip("flax.nnx")

    def model(self) -> Any:
        nnx = self.nnx
        rngs = nnx.Rngs(0)
        parts = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.relu
        more = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        return nnx.Sequential(*parts, *more)

    def optimizer(self, model: Any) -> Any:
        return self.optax.adamw(RATE)

    def sgd(self, model: Any) -> Any:
        return self.optax.sgd(RATE)

    def loss(self, output: Any, y: Any) -> Any:
        return self.optax.softmax_cross_entropy_with_integer_labels(output, y).mean()

    def step(self, model: Any, optimizer: Any) -> Callable[[Any, Any], float]:
        nnx = self.nnx
        kept = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        def whole(model: Any, kept: Any, x: Any, y: Any) -> Any:
            loss, gradients = nnx.value_and_grad(lambda model: self.loss(model(x), y))(model)
            kept.update(model, gradients)
            return loss

        fast = nnx.jit(whole)
        return lambda x, y: float(fast(model, kept, x, y))

    def weights(self, model: Any) -> dict[str, Any]:
        state = self.nnx.to_flat_state(self.nnx.state(model))
        return {
            ".".join(map(str, path)): np.asarray(x[...]) for path, x in state if "key" not in path
        }


class Equinox(Nnx):
    """`equinox`, which takes one example."""

    def __init__(self) -> None:
        self.jax: Any = pytest.importorskip("jax")
        self.optax: Any = pytest.importorskip("optax")
        self.eqx: Any = pytest.importorskip("equinox")

    def model(self) -> Any:
        return self.jax.vmap(self.eqx.nn.MLP(4, 3, 8, 1, key=self.jax.random.key(0)))

    def step(self, model: Any, optimizer: Any) -> Callable[[Any, Any], float]:
        now = [model.__wrapped__, None]
        now[1] = optimizer.init(self.eqx.filter(now[0], self.eqx.is_inexact_array))

        def whole(module: Any, state: Any, x: Any, y: Any) -> Any:
            def value(module: Any) -> Any:
                return self.loss(self.jax.vmap(module)(x), y)

            loss, gradients = self.eqx.filter_value_and_grad(value)(module)
            changes, state = optimizer.update(gradients, state, module)
            return loss, self.eqx.apply_updates(module, changes), state

        fast = self.eqx.filter_jit(whole)

        def taken(x: Any, y: Any) -> float:
            loss, *now[:] = fast(*now, x, y)
            return float(loss)

        return taken

    def weights(self, model: Any) -> dict[str, Any]:
        module = model.__wrapped__
        return {
            f"{at}.{name}": np.asarray(getattr(layer, name))
            for at, layer in enumerate(module.layers)
            for name in ("weight", "bias")
        }


class Mlx:
    """`mlx.nn`, with dropout and a norm."""

    engine = "mlx"

    def __init__(self) -> None:
        self.mx: Any = pytest.importorskip("mlx.core")
        self.modules: Any = pytest.importorskip("mlx.nn")
        self.optimizers: Any = pytest.importorskip("mlx.optimizers")

    def model(self) -> Any:
        self.mx.random.seed(0)
        nn = self.modules
        parts = nn.Linear(4, 8), nn.BatchNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
        model = nn.Sequential(*parts)
        self.mx.eval(model.parameters())
        return model

    def optimizer(self, model: Any) -> Any:
        return self.optimizers.AdamW(RATE)

    def sgd(self, model: Any) -> Any:
        return self.optimizers.SGD(RATE)

    def loss(self, output: Any, y: Any) -> Any:
        return self.modules.losses.cross_entropy(output, y).mean()

    def step(self, model: Any, optimizer: Any) -> Callable[[Any, Any], float]:
        both = self.modules.value_and_grad(model, lambda x, y: self.loss(model(x), y))

        def taken(x: Any, y: Any) -> float:
            loss, gradients = both(self.mx.array(x), self.mx.array(y.astype(np.int32)))
            optimizer.update(model, gradients)
            self.mx.eval(model.parameters(), optimizer.state)
            return float(loss)

        return taken

    def weights(self, model: Any) -> dict[str, Any]:
        from mlx.utils import tree_flatten

        return {name: np.array(x) for name, x in tree_flatten(model.parameters())}


CASES: dict[str, Any] = {"torch": Torch, "nnx": Nnx, "equinox": Equinox, "mlx": Mlx}
