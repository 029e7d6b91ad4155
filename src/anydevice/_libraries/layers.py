"""Modules and optimizers of other libraries, as layers and optimizers that a step takes.

A module's parameters are a dict by their paths in it. What it changes itself when it is called,
such as the statistics of a norm or the counters of its random numbers, is the state of the layer.
The layers of each library are in its `step.py`.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from anydevice._core.array import Array
from anydevice._core.loaded import is_of
from anydevice._core.text import shortened, type_text
from anydevice._libraries.precision import Policy
from anydevice._libraries.registry import part, row_of
from anydevice._nn.layer import Layer, Run
from anydevice._nn.losses import LOSSES
from anydevice._nn.optimizers import Optimizer
from anydevice.errors import ConfigurationError

TARGETS = ("labels", "label", "label_ids", "targets", "target", "y")
"""Keys of the target in batches that are dicts."""

Loss = Callable[..., Array]
"""A function of (output, y), or one whose first parameter is called `model`, of it and a batch."""


class StepSettings(Protocol):
    """The settings of a step that a library's own stepper reads."""

    @property
    def layer(self) -> Layer: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def clip(self) -> float | None: ...
    @property
    def accumulate(self) -> int: ...


class ModuleLayer(Layer):
    """A module of another library.

    `given` is what the user passed, and `parameters` are its arrays by path, of which gradients do
    not change those in `held`. `finished` is what the user gets back, with other parameters in it.
    """

    given: Any
    held: tuple[str, ...] = ()

    library = ""
    has_stepper = False
    """Whether its library has a stepper of its own, which trains the module in place."""

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
        """The present arrays by path."""

    @abstractmethod
    def bound(self, parameters: Mapping[str, Array], run: Run) -> Any:
        """Return a block in which a module has these parameters.

        Its state goes to the run at the end.
        """

    @abstractmethod
    def finished(self, parameters: Mapping[str, Array]) -> Any:
        """Return the module with these parameters.

        The given one, where its library changes modules.
        """

    def watched(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        """Return the model and parts of its inputs, so that arrays inside it have numbers."""
        return model, [inputs]

    def loss_and_output(
        self, loss: Loss | None, parameters: Mapping[str, Array], batch: Any, run: Run
    ) -> tuple[Array, Any]:
        """Return the loss of a batch, and the output of the module.

        `None` if the loss calls it itself.
        """
        with self.bound(parameters, run) as module:
            return loss_and_output(loss, module, batch, run)


def loss_and_output(
    loss: Loss | None, module: Any, batch: Any, run: Run | None = None
) -> tuple[Array, Any]:
    """Return the loss of a module on a batch, and its output; `None` if the loss calls it itself.

    A pair is inputs and targets, a dict is the arguments of the module. Without a loss, it is the
    one in the module's output.
    """
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
    """Return the loss of an output, and of a target or a batch in a dict.

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
    """Return the logits in an output that has some, as those of Hugging Face; any other as it is.

    >>> logits_of({"loss": 0.1, "logits": [1.0]}), logits_of([2.0])
    ([1.0], [2.0])
    """
    found = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if found is None else found
    return output if found is None else found


def target_of(batch: Any) -> Any:
    """Return the target of a batch that is a pair, or a dict with labels; `None` of any other.

    >>> target_of(([1.0], [2])), target_of({"input_ids": [1], "labels": [3]})
    ([2], [3])
    """
    if isinstance(batch, Mapping):
        return next((batch[name] for name in TARGETS if name in batch), None)
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def loss_in(output: Any) -> Array | None:
    """Return the loss that a model put into its output, as those of Hugging Face do, if any."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def own_loss(output: Any) -> Array:
    """Return the loss in an output; raises `ConfigurationError` without one."""
    found = loss_in(output)
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


_known_names: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
"""Parameter names of functions in use: a small step has no time to look at signatures."""


def _names(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a function."""
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


class LibraryOptimizer(Optimizer):
    """An optimizer of another library; its rate is its own affair."""

    given: Any = None

    def rate_at(self, step: int) -> float:
        return math.nan


_OPTIMIZERS = (
    ("optax", "GradientTransformation", "jax", "OptaxOptimizer"),
    ("mlx.optimizers", "Optimizer", "mlx", "MlxOptimizer"),
)
"""The optimizers of libraries: their module and class, and our class in a library's `step.py`."""


def optimizer_of(given: Any) -> Optimizer | None:
    """Return the optimizer of a step; `None` for one of PyTorch's, which changes weights itself.

    Raises `ConfigurationError` for anything else.
    """
    if isinstance(given, Optimizer):
        return given
    if is_of(given, "torch.optim", "Optimizer"):
        return None
    for module, name, library, own in _OPTIMIZERS:
        if is_of(given, module, name):
            optimizer: Optimizer = getattr(part(library, "step"), own)(given=given)
            return optimizer
    is_nnx = is_of(given, "flax.nnx", "Optimizer")
    shown = "nnx.Optimizer; give what it holds, its tx" if is_nnx else shortened(repr(given))
    raise ConfigurationError(
        f"optimizer must be one such as nn.AdamW(1e-3), or one of torch.optim, optax or "
        f"mlx.optimizers, not {shown}",
        source="optimizer",
    )


def layer_of(model: Any) -> ModuleLayer:
    """Return the layer of a library's module; raises `ConfigurationError` for anything else."""
    row = row_of(model)
    if row is None:
        raise ConfigurationError(
            f"{type_text(model)} cannot be trained; give a nn.Model, or a module of PyTorch, Flax "
            "NNX, Equinox or MLX",
            source="model",
        )
    layer: ModuleLayer = getattr(part(row.library, "step"), row.layer)(model)
    return layer
