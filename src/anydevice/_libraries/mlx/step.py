"""Training of MLX modules, and with MLX optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlx.utils import tree_flatten, tree_unflatten

from anydevice._core.array import Array
from anydevice._core.trees import Tree
from anydevice._libraries.base import in_mode
from anydevice._libraries.layers import LibraryOptimizer, ModuleLayer
from anydevice._nn.layer import Run


class MlxLayer(ModuleLayer):
    """A module of MLX. Each call sets its parameters, and restores its own afterwards."""

    library = "mlx"

    def settings_fit(self) -> None:
        flat = _flat(self.given.trainable_parameters())
        frozen = [name for name in _flat(self.given.parameters()) if name not in flat]
        object.__setattr__(self, "held", tuple(frozen))

    @property
    def parameters(self) -> dict[str, Array]:
        return _flat(self.given.parameters())

    @contextmanager
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Iterator[Any]:
        module = self.given
        own = module.parameters()
        with in_mode(module, training=run.training, attribute="_training"):
            module.update(_nest(parameters))
            try:
                yield module
                now = _flat(module.parameters())
                for name in self.held:
                    run.update(name, now[name])
            finally:
                module.update(own)

    def finished(self, parameters: Mapping[str, Array]) -> Any:
        self.given.update(_nest(parameters))
        return self.given


def _flat(tree: Any) -> dict[str, Any]:
    return dict(tree_flatten(tree))


def _nest(parameters: Mapping[str, Any]) -> Any:
    return tree_unflatten(list(parameters.items()))


class MlxOptimizer(LibraryOptimizer):
    """An optimizer of `mlx.optimizers`, which keeps its state as an attribute."""

    def init(self, parameters: Tree) -> Any:
        self.given.init(_present(parameters))
        return dict(self.given.state)

    def update(
        self,
        parameters: Any,
        gradients: Tree,
        state: Any,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, Any]:
        before = self.given.state
        self.given.state = state
        try:
            new = self.given.apply_gradients(_present(gradients), _present(parameters))
            return {**parameters, **new}, dict(self.given.state)
        finally:
            self.given.state = before


def _present(tree: Tree) -> Tree:
    """Return the tree without `None`, which MLX would treat as an array."""
    return (
        {name: x for name, x in tree.items() if x is not None} if isinstance(tree, dict) else tree
    )
