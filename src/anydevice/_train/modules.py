"""Modules and optimizers of other libraries, as layers and optimizers that a step takes.

A module's parameters are a dict by their paths in it. What it changes itself when it is called,
such as the statistics of a norm or the counters of its random numbers, is the state of the layer.
Nothing here imports a library: who has a module has imported it already.
"""

from __future__ import annotations

import inspect
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from anydevice._core.text import shortened, type_text
from anydevice._core.trees import Tree
from anydevice._libraries.detect import adapter_of
from anydevice._libraries.jax.module import EquinoxAdapter, mapped_module
from anydevice._nn.layer import Array, Layer, Run
from anydevice._nn.losses import LOSSES
from anydevice._nn.optimizers import Optimizer
from anydevice._train.batches import TARGETS
from anydevice.errors import ConfigurationError

Loss = Callable[..., Array]
"""A function of (output, y), or one whose first parameter is called `model`, of it and a batch."""


class ModuleLayer(Layer):
    """A module of another library.

    `given` is what the user passed, and `parameters` are its arrays by path, of which gradients do
    not change those in `held`. `finished` is what the user gets back, with other parameters in it.
    """

    given: Any
    held: tuple[str, ...] = ()

    library = ""

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.held

    @property
    def label(self) -> str:
        return type(self.given).__name__

    @property
    def root(self) -> str:
        return type(self.given).__name__

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Array]:
        """Its arrays by path, as they are now."""

    @abstractmethod
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Any:
        """A block in which a module has these parameters; its state goes to the run at the end."""

    @abstractmethod
    def finished(self, parameters: Mapping[str, Array]) -> Any:
        """The module with these parameters; the given one, where its library changes modules."""

    def watched(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        """The model and parts of its inputs, so that arrays inside it have numbers."""
        return model, [inputs]

    def loss_and_output(
        self, loss: Loss | None, parameters: Mapping[str, Array], batch: Any, run: Run
    ) -> tuple[Array, Any]:
        """The loss of a batch, and the output of the module; `None` if the loss calls it itself."""
        with self.bound(parameters, run) as module:
            return loss_and_output(loss, module, batch, run)


def loss_and_output(
    loss: Loss | None, module: Any, batch: Any, run: Run | None = None
) -> tuple[Array, Any]:
    """The loss of a module on a batch, and its output; `None` if the loss calls it itself.

    A pair is inputs and targets, a dict is the arguments of the module. Without a loss, it is the
    one in the module's output.
    """
    if loss is not None and takes_model(loss):
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        more = {"key": _key_of(run)} if run is not None and _takes(loss, "key") else {}
        return loss(module, *parts, **more), None
    if isinstance(batch, Mapping):
        output = module(**batch)
        value = own_loss(output) if loss is None else loss_of_output(loss, output, batch)
        return value, logits_of(output)
    if loss is None:
        raise ConfigurationError(
            f"{getattr(module, '__name__', type(module).__name__)} computes a loss of its own from "
            'batches in dicts, such as {"input_ids": …, "labels": …}; for other batches give '
            "loss=, a function of (output, y) or its name",
            source="loss",
        )
    x, y = batch
    if isinstance(x, Mapping):
        output = module(**x)
    else:
        output = module(*x) if isinstance(x, tuple | list) else module(x)
    return loss_of_output(loss, output, y), logits_of(output)


def loss_of_output(loss: Loss, output: Any, target: Any) -> Array:
    """The loss of an output, and of a target or a batch in a dict.

    A loss by name takes arrays: the logits of an output that has some, and the labels of a dict.
    """
    # By identity: a loss may have an equality of its own.
    if not any(loss is own for own in LOSSES.values()):
        return loss(output, target)
    output = logits_of(output)
    target = target_of(target) if isinstance(target, Mapping) else target
    if not hasattr(output, "shape"):
        raise ConfigurationError(
            f"the model returns {type_text(output)}, and {loss.__name__} takes one array; give "
            "loss=, a function of (output, y) that takes what it needs of it",
            source="loss",
        )
    if target is None:
        raise ConfigurationError(
            f"{loss.__name__} needs targets: give batches (x, y), or dicts with 'labels'",
            source="data",
        )
    return loss(output, target)


def logits_of(output: Any) -> Any:
    """The logits in an output that has some, as those of Hugging Face; any other as it is.

    >>> logits_of({"loss": 0.1, "logits": [1.0]}), logits_of([2.0])
    ([1.0], [2.0])
    """
    found = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if found is None else found
    return output if found is None else found


def target_of(batch: Any) -> Any:
    """The target of a batch that is a pair, or a dict with labels; `None` of any other.

    >>> target_of(([1.0], [2])), target_of({"input_ids": [1], "labels": [3]})
    ([2], [3])
    """
    if isinstance(batch, Mapping):
        return next((batch[name] for name in TARGETS if name in batch), None)
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def own_loss(output: Any) -> Array:
    """The loss that a model put into its output, as those of Hugging Face do."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        raise ConfigurationError(
            f"the output of the model ({type_text(output)}) holds no loss: put labels into the "
            "batches, or give loss=",
            source="loss",
        )
    return found


def takes_model(loss: Any) -> bool:
    """Whether a loss gets the model itself: its first parameter is called `model`.

    >>> takes_model(lambda model, x, y: 0), takes_model(lambda output, y: 0)
    (True, False)
    """
    return next(iter(_names(loss)), None) == "model"


def _takes(loss: Any, name: str) -> bool:
    return name in _names(loss)


_known_names: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
"""Of functions that somebody still has: a small step has no time to look at signatures."""


def _names(function: Any) -> tuple[str, ...]:
    """The names of the parameters of a function."""
    if isinstance(function, MethodType):  # a new object at each look
        return _names(function.__func__)[1:]
    try:
        found = _known_names.get(function)
        if found is None:
            found = _known_names[function] = _signature_names(function)
    except TypeError:  # it cannot be a key
        found = _signature_names(function)
    return found


def _signature_names(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # functions in C may have no signature
        return ()


def _key_of(run: Run) -> Any:
    """A key of JAX's random numbers for the batch under way."""
    random: Any = sys.modules["jax"].random
    return random.fold_in(random.key(run.seed), run.step)


class EquinoxLayer(ModuleLayer):
    """A module of Equinox, also in `jax.vmap`. It cannot change, so a new one is the result."""

    adapter: Any = None

    library = "jax"

    def settings_fit(self) -> None:
        object.__setattr__(self, "adapter", EquinoxAdapter(self.given))
        inexact = sys.modules["equinox"].is_inexact_array
        held = [name for name, x in self.parameters.items() if not inexact(x)]
        object.__setattr__(self, "held", tuple(held))

    @property
    def parameters(self) -> dict[str, Array]:
        return dict(self.adapter.weights())

    @contextmanager
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Iterator[Any]:
        yield self.adapter.over(self._module(parameters, training=run.training))

    def loss_and_output(
        self, loss: Loss | None, parameters: Mapping[str, Array], batch: Any, run: Run
    ) -> tuple[Array, Any]:
        if loss is None or takes_model(loss):
            return super().loss_and_output(loss, parameters, batch, run)
        module = self._module(parameters, training=run.training)

        def called(*inputs: Any, **named: Any) -> Any:
            return self.adapter.run(module, *inputs, **named)

        return loss_and_output(loss, called, batch, run)

    def watched(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        inside = mapped_module(model)
        return (model, [inputs]) if inside is None or inside is model else (inside, inputs)

    def finished(self, parameters: Mapping[str, Array]) -> Any:
        return self.adapter.with_weights([parameters[name] for name in self.adapter.weights()])

    def _module(self, parameters: Mapping[str, Array], *, training: bool) -> Any:
        module = self.adapter.bound([parameters[name] for name in self.adapter.weights()])
        mode: Any = sys.modules["equinox"].nn.inference_mode
        return mode(module, value=not training)


class NnxLayer(ModuleLayer):
    """A module of Flax NNX. The given one keeps its mode, and gets the trained values."""

    graphs: Any = None
    structures: Any = None
    names: Any = None
    keys: Any = None

    library = "jax"

    def settings_fit(self) -> None:
        nnx: Any = sys.modules["flax.nnx"]
        copied = nnx.clone(self.given)
        graphs = []
        for mode in (copied.eval, copied.train):
            mode()
            graphs.append(nnx.split(copied, nnx.Param, ...)[0])
        object.__setattr__(self, "graphs", graphs)
        parts = _nnx_parts(self.given)
        names = [[name for name, _ in pairs] for pairs, _ in parts]
        object.__setattr__(self, "structures", [structure for _, structure in parts])
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "held", tuple(names[1]))
        keys = {name: _key_kind(x) for pairs, _ in parts for name, x in pairs}
        object.__setattr__(self, "keys", {n: kind for n, kind in keys.items() if kind is not None})

    @property
    def parameters(self) -> dict[str, Array]:
        return {name: _as_numbers(x) for pairs, _ in _nnx_parts(self.given) for name, x in pairs}

    @contextmanager
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Iterator[Any]:
        nnx: Any = sys.modules["flax.nnx"]
        module = nnx.merge(self.graphs[run.training], *self._states(parameters))
        yield module
        for name, x in _nnx_parts(module)[1][0]:
            run.update(name, _as_numbers(x))

    def finished(self, parameters: Mapping[str, Array]) -> Any:
        nnx: Any = sys.modules["flax.nnx"]
        for state in self._states(parameters):
            nnx.update(self.given, state)
        return self.given

    def _states(self, parameters: Mapping[str, Array]) -> list[Any]:
        random: Any = sys.modules["jax"].random

        def value(name: str) -> Any:
            kind = self.keys.get(name)
            x = parameters[name]
            return x if kind is None else random.wrap_key_data(x, impl=kind)

        pairs = zip(self.structures, self.names, strict=True)
        return [structure.unflatten([value(name) for name in names]) for structure, names in pairs]


def _nnx_parts(module: Any) -> list[tuple[list[tuple[str, Any]], Any]]:
    """The parameters of a module, and all else: each array with its path, and their structure."""
    nnx: Any = sys.modules["flax.nnx"]
    trees: Any = sys.modules["jax"].tree_util
    _, *states = nnx.split(module, nnx.Param, ...)
    found = []
    for state in states:
        pairs, structure = trees.tree_flatten_with_path(state)
        named = [(_dotted(path), x) for path, x in pairs]
        found.append((named, structure))
    return found


def _dotted(path: Any) -> str:
    """The path of a value in a state of Flax NNX, whose last step leads into its variable."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path[:-1])


def _key_kind(x: Any) -> Any:
    """How a key of random numbers is made; `None` of other arrays."""
    jax: Any = sys.modules["jax"]
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return str(jax.random.key_impl(x)) if is_key else None


def _as_numbers(x: Any) -> Any:
    jax: Any = sys.modules["jax"]
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


class MlxLayer(ModuleLayer):
    """A module of MLX. Each call puts parameters into it, and its own back afterwards."""

    library = "mlx"

    def settings_fit(self) -> None:
        flat = _flat(self.given.trainable_parameters())
        held = [name for name in _flat(self.given.parameters()) if name not in flat]
        object.__setattr__(self, "held", tuple(held))

    @property
    def parameters(self) -> dict[str, Array]:
        return _flat(self.given.parameters())

    @contextmanager
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Iterator[Any]:
        module = self.given
        own = module.parameters()
        with in_mode(module, training=run.training):
            module.update(_nested(parameters))
            try:
                yield module
                now = _flat(module.parameters())
                for name in self.held:
                    run.update(name, now[name])
            finally:
                module.update(own)

    def finished(self, parameters: Mapping[str, Array]) -> Any:
        self.given.update(_nested(parameters))
        return self.given


@contextmanager
def in_mode(module: Any, *, training: bool) -> Iterator[None]:
    """A block in which a module of PyTorch or MLX trains, or does not.

    In training, parts that are in inference mode stay in it, unless the whole module is. Afterwards
    all parts are in their own modes again.
    """
    modes = [(part, part.training) for part in module.modules()]
    if training != module.training or not training:
        module.train(training)
    try:
        yield
    finally:
        name = "_training" if _is_of(module, "mlx.nn", "Module") else "training"
        for part, mode in modes:
            setattr(part, name, mode)


def _flat(tree: Any) -> dict[str, Any]:
    return dict(sys.modules["mlx.utils"].tree_flatten(tree))


def _nested(parameters: Mapping[str, Any]) -> Any:
    return sys.modules["mlx.utils"].tree_unflatten(list(parameters.items()))


class _OtherOptimizer(Optimizer):
    """An optimizer of another library; its rate is its own affair."""

    given: Any = None

    def rate_at(self, step: int) -> float:
        return math.nan


class OptaxOptimizer(_OtherOptimizer):
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
        changes, state = self.given.update(gradients, state, parameters)
        return sys.modules["optax"].apply_updates(parameters, changes), state


class MlxOptimizer(_OtherOptimizer):
    """An optimizer of `mlx.optimizers`, which keeps its state as an attribute."""

    def init(self, parameters: Tree) -> Any:
        self.given.init(_present(parameters))
        return dict(self.given.state)

    def update(
        self,
        parameters: Tree,
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
    """The tree without `None`, which MLX takes for an array."""
    return (
        {name: x for name, x in tree.items() if x is not None} if isinstance(tree, dict) else tree
    )


def optimizer_of(given: Any) -> Optimizer | None:
    """The optimizer of a step; `None` for one of PyTorch's, which changes its weights itself.

    Raises `ConfigurationError` for anything else.
    """
    if isinstance(given, Optimizer):
        return given
    if _is_of(given, "torch.optim", "Optimizer"):
        return None
    if _is_of(given, "optax", "GradientTransformation"):
        return OptaxOptimizer(given=given)
    if _is_of(given, "mlx.optimizers", "Optimizer"):
        return MlxOptimizer(given=given)
    is_nnx = _is_of(given, "flax.nnx", "Optimizer")
    shown = "nnx.Optimizer; give what it holds, its tx" if is_nnx else shortened(repr(given))
    raise ConfigurationError(
        f"optimizer must be one such as nn.AdamW(1e-3), or one of torch.optim, optax or "
        f"mlx.optimizers, not {shown}",
        source="optimizer",
    )


def _is_of(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


_LAYERS = (("flax.nnx", NnxLayer), ("mlx.nn", MlxLayer))


def layer_of(model: Any) -> ModuleLayer:
    """The layer of a module of another library; raises `ConfigurationError` for anything else."""
    for library, made in _LAYERS:
        if _is_of(model, library, "Module"):
            return made(model)
    if callable(model) and isinstance(adapter_of(model), EquinoxAdapter):
        return EquinoxLayer(model)
    raise ConfigurationError(
        f"{type_text(model)} cannot be trained; give a nn.Model, or a module of PyTorch, Flax NNX, "
        "Equinox or MLX",
        source="model",
    )
