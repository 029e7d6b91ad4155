"""Modules and optimizers of other libraries, wrapped as layers and optimizers of a step.

A module's parameters are a dict by path. Values that it changes itself in a call, such as the
statistics of a norm or random counters, are the state of the layer. The layers of each library are
in its `step.py`.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from anydevice._core.array import Array
from anydevice._core.hooks import is_of
from anydevice._core.names import find_name
from anydevice._core.text import shortened, type_text
from anydevice._libraries.registry import part, row_of
from anydevice._nn.layer import Layer, Run
from anydevice._nn.losses import LOSSES
from anydevice._nn.optimizers import OPTIMIZERS, Optimizer
from anydevice.errors import ConfigurationError

TARGETS = ("labels", "label", "label_ids", "targets", "target", "y")
"""Keys of the target in dict batches."""

Loss = Callable[..., Array]
"""A function of (output, y), or of (model, batch) if its first parameter is called `model`."""


class ModuleLayer(Layer):
    """A module of another library: the user's `given`, arrays by path, `held` without gradients."""

    given: Any
    held: tuple[str, ...] = ()

    library = ""
    has_stepper = False
    """Whether the library has its own stepper, which trains the module in place."""

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.held

    @property
    def label(self) -> str:
        return type(self.given[0] if isinstance(self.given, tuple) else self.given).__name__

    @property
    def root(self) -> str:
        return self.label

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Array]:
        """The current arrays by path."""

    @abstractmethod
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Any:
        """Run a block in which a module has these parameters; at its end, `run` gets the state."""

    @abstractmethod
    def finished(self, parameters: Mapping[str, Array]) -> Any:
        """Return the module with these parameters; the user's own if its library is mutable."""

    def watched(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        """Return the model and parts of its inputs, so that its arrays have concrete values."""
        return model, [inputs]

    def loss_and_output(
        self, loss: Loss | None, parameters: Mapping[str, Array], batch: Any, run: Run
    ) -> tuple[Array, Any]:
        """Return the loss of a batch, and the output; `None` if the loss calls the module."""
        with self.bound(parameters, run) as module:
            return loss_and_output(loss, module, batch, run)


def loss_and_output(
    loss: Loss | None, module: Any, batch: Any, run: Run | None = None
) -> tuple[Array, Any]:
    """Return the loss of a module on a batch, and its output; `None` if the loss calls it."""
    if loss is not None and takes_model(loss):
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        if run is not None and "key" in _names(loss):
            return loss(module, *parts, key=part("jax", "random").key_of(run)), None
        return loss(module, *parts), None
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
    """Return the loss of an output, or of its logits, given a target or the labels of a dict."""
    if not is_named(loss):
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


def is_named(loss: Loss) -> bool:
    """Whether a loss is one of ours, by identity: a loss may define its own equality."""
    return any(loss is own for own in LOSSES.values())


def logits_of(output: Any) -> Any:
    """Return the logits of an output, as in Hugging Face; other outputs are returned unchanged.

    >>> logits_of({"loss": 0.1, "logits": [1.0]}), logits_of([2.0])
    ([1.0], [2.0])
    """
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    return output if logits is None else logits


def target_of(batch: Any) -> Any:
    """Return the target of a pair, or the labels of a dict; `None` for any other batch.

    >>> target_of(([1.0], [2])), target_of({"input_ids": [1], "labels": [3]})
    ([2], [3])
    """
    if isinstance(batch, Mapping):
        return next((batch[name] for name in TARGETS if name in batch), None)
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def loss_in(output: Any) -> Array | None:
    """Return the loss that a model put into its output, as in Hugging Face, if any."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def own_loss(output: Any) -> Array:
    """Return the loss in an output; raise `ConfigurationError` if there is none."""
    loss = loss_in(output)
    if loss is None:
        raise ConfigurationError(
            f"the output of the model ({type_text(output)}) holds no loss: put labels into the "
            "batches, or give loss=",
            source="loss",
        )
    return loss


def takes_model(loss: Any) -> bool:
    """Whether a loss takes the model itself: its first parameter is called `model`.

    >>> takes_model(lambda model, x, y: 0), takes_model(lambda output, y: 0)
    (True, False)
    """
    return next(iter(_names(loss)), None) == "model"


_known_names: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
"""Cache of parameter names: reading signatures is too slow for a small step."""


def _names(function: Any) -> tuple[str, ...]:
    if isinstance(function, MethodType):  # a new object at each access
        return _names(function.__func__)[1:]
    try:
        names = _known_names.get(function)
        if names is None:
            names = _known_names[function] = _signature_names(function)
    except TypeError:  # not hashable
        names = _signature_names(function)
    return names


def _signature_names(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # functions in C may have no signature
        return ()


class LibraryOptimizer(Optimizer):
    """An optimizer of another library, which controls its own rate."""

    given: Any = None

    def rate_at(self, step: int) -> float:
        return math.nan


_OPTIMIZERS = (
    ("optax", "GradientTransformation", "jax", "OptaxOptimizer"),
    ("mlx.optimizers", "Optimizer", "mlx", "MlxOptimizer"),
)
"""Optimizers of libraries: their module and class, and our class in the library's `step.py`."""


def optimizer_of(given: Any) -> Optimizer | None:
    """Return the optimizer of a step; `None` for PyTorch's, which updates weights itself."""
    if isinstance(given, Optimizer):
        return given
    name, hint = find_name("optimizer", given, OPTIMIZERS) if isinstance(given, str) else (None, "")
    if name is not None:
        return OPTIMIZERS[name]()
    if is_of(given, "torch.optim", "Optimizer"):
        return None
    for module, name, library, own in _OPTIMIZERS:
        if is_of(given, module, name):
            return getattr(part(library, "step"), own)(given=given)
    is_nnx = is_of(given, "flax.nnx", "Optimizer")
    shown = "nnx.Optimizer; give what it holds, its tx" if is_nnx else shortened(repr(given))
    if hasattr(given, "shape"):
        hint = "; data is a pair: give (x, y) as one argument"
    raise ConfigurationError(
        f"optimizer must be one such as nn.AdamW(1e-3), or one of torch.optim, optax or "
        f"mlx.optimizers, not {shown}{hint}",
        source="optimizer",
    )


def layer_of(model: Any) -> ModuleLayer:
    """Return the layer of a library's module; raise `ConfigurationError` for anything else."""
    row = row_of(model)
    if row is None:
        raise ConfigurationError(
            f"{type_text(model)} cannot be trained; give a nn.Model, or a module of PyTorch, Flax "
            "NNX, Equinox or MLX",
            source="model",
        )
    return getattr(part(row.library, "step"), row.layer)(model)
