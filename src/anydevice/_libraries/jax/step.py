"""Training of Equinox and Flax NNX modules, and with optax optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from anydevice._core.array import Array
from anydevice._core.trees import Tree
from anydevice._libraries.jax.module import (
    EquinoxAdapter,
    equinox,
    mapped_module,
    nnx,
    state_paths,
)
from anydevice._libraries.layers import (
    LibraryOptimizer,
    Loss,
    ModuleLayer,
    loss_and_output,
    takes_model,
)
from anydevice._nn.layer import Run


class EquinoxLayer(ModuleLayer):
    """A module of Equinox, or a pair of one and its state. It is immutable: the result is new."""

    adapter: Any = None

    library = "jax"

    def settings_fit(self) -> None:
        adapter = EquinoxAdapter(self.given)
        adapter.batches = True
        object.__setattr__(self, "adapter", adapter)
        inexact = equinox().is_inexact_array
        state = state_paths(self.given[1]) if adapter.has_state else {}
        names = [name for name, x in self.parameters.items() if not inexact(x) or name in state]
        object.__setattr__(self, "held", tuple(names))

    @property
    def parameters(self) -> dict[str, Array]:
        return dict(self.adapter.weights())

    @contextmanager
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Iterator[Any]:
        yield self.adapter.over(self._module(parameters, training=run.training))

    def loss_and_output(
        self, loss: Loss | None, parameters: Mapping[str, Array], batch: Any, run: Run
    ) -> tuple[Array, Any]:
        adapter = self.adapter
        if not adapter.has_state and (loss is None or takes_model(loss)):
            return super().loss_and_output(loss, parameters, batch, run)
        module = self._module(parameters, training=run.training)

        def called(*inputs: Any, **named: Any) -> Any:
            output, state = adapter.step(module, inputs, named, run)
            for name, x in state_paths(state).items():
                run.update(name, x)
            return output

        return loss_and_output(loss, called, batch, run)

    def watched(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        inside = mapped_module(model)
        return (model, [inputs]) if inside is None or inside is model else (inside, inputs)

    def finished(self, parameters: Mapping[str, Array]) -> Any:
        return self.adapter.with_weights([parameters[name] for name in self.adapter.weights()])

    def _module(self, parameters: Mapping[str, Array], *, training: bool) -> Any:
        module = self.adapter.bound([parameters[name] for name in self.adapter.weights()])
        return equinox().nn.inference_mode(module, value=not training)


class NnxLayer(ModuleLayer):
    """A module of Flax NNX. The user's module keeps its mode, and gets the trained values."""

    graphs: Any = None
    structures: Any = None
    names: Any = None
    keys: Any = None

    library = "jax"

    def settings_fit(self) -> None:
        copied = nnx().clone(self.given)
        graphs = []
        for mode in (copied.eval, copied.train):
            mode()
            graphs.append(nnx().split(copied, nnx().Param, ...)[0])
        object.__setattr__(self, "graphs", graphs)
        parts = _nnx_parts(self.given)
        names = [[name for name, _ in pairs] for pairs, _ in parts]
        object.__setattr__(self, "structures", [structure for _, structure in parts])
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "held", tuple(names[1]))
        keys = [(name, x) for pairs, _ in parts for name, x in pairs if _is_key(x)]
        kinds = {name: str(jax.random.key_impl(x)) for name, x in keys}
        object.__setattr__(self, "keys", kinds)

    @property
    def parameters(self) -> dict[str, Array]:
        return {name: _as_numbers(x) for pairs, _ in _nnx_parts(self.given) for name, x in pairs}

    @contextmanager
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Iterator[Any]:
        module = nnx().merge(self.graphs[run.training], *self._states(parameters))
        yield module
        for name, x in _nnx_parts(module)[1][0]:
            run.update(name, _as_numbers(x))

    def finished(self, parameters: Mapping[str, Array]) -> Any:
        for state in self._states(parameters):
            nnx().update(self.given, state)
        return self.given

    def _states(self, parameters: Mapping[str, Array]) -> list[Any]:
        def value(name: str) -> Any:
            kind = self.keys.get(name)
            x = parameters[name]
            return x if kind is None else jax.random.wrap_key_data(x, impl=kind)

        pairs = zip(self.structures, self.names, strict=True)
        return [structure.unflatten([value(name) for name in names]) for structure, names in pairs]


def _nnx_parts(module: Any) -> list[tuple[list[tuple[str, Any]], Any]]:
    """Return the parameters of a module, and the rest: arrays by path, and their structure."""
    _, *states = nnx().split(module, nnx().Param, ...)
    parts = []
    for state in states:
        pairs, structure = jax.tree_util.tree_flatten_with_path(state)
        named = [(_path_text(path), x) for path, x in pairs]
        parts.append((named, structure))
    return parts


def _path_text(path: Any) -> str:
    """Return the path of a value in a state of Flax NNX, without the step into its variable."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path[:-1])


def _is_key(x: Any) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def _as_numbers(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


class OptaxOptimizer(LibraryOptimizer):
    """A `GradientTransformation` of optax."""

    def init(self, parameters: Tree) -> Any:
        return self.given.init(parameters)

    def update(
        self,
        parameters: Tree,
        gradients: Tree,
        state: Any,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, Any]:
        import optax

        changes, state = self.given.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state
