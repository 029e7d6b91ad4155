"""The parts of a training step, and how its functions are compiled."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from anydevice import _ops as ops
from anydevice._compile.versions import FallbackFunction, compilers_for
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine
from anydevice._core.protocols import Function
from anydevice._core.record import Record
from anydevice._core.text import warn
from anydevice._core.trees import Tree, TreeT, leaves, mapped
from anydevice._libraries.layers import ModuleLayer
from anydevice._libraries.native import cast_weights
from anydevice._libraries.precision import Policy, cast_parameters
from anydevice._machine.settings.files import compiled_folder
from anydevice._nn.layer import Layer, Run
from anydevice._nn.losses import LayerLoss, Loss, computes_in_float32
from anydevice._nn.model import Model
from anydevice._nn.optimizers import Optimizer
from anydevice._ops.dispatch import own_version, primitives

_WORTH_COMPILING = 5e10
"""Parameters times batches of a training that takes some minutes on two cores."""

_STEP_OVERHEAD = 250_000
"""Parameters processed in the time that PyTorch takes to launch the kernels of a small step."""

_USUAL_LENGTH = 1000
"""Batches assumed per epoch if the data has no length."""


class StepConfig(Record):
    """The parts of a step; the loss takes the output of `layer`.

    `trained` tells for each leaf of the parameters whether gradients change it; `None` means all.
    `frozen` are the paths of layers with frozen state. A module of another library is a layer too,
    with a loss of its own.
    """

    layer: Layer
    loss: Loss
    optimizer: Optimizer
    policy: Policy
    clip: float | None = None
    accumulate: int = 1
    optimize: str = "default"
    trained: tuple[bool, ...] | None = None
    frozen: frozenset[str] = frozenset()

    @property
    def is_ours(self) -> bool:
        """Whether layer and loss are from anydevice, so that nothing in them ever changes."""
        return computes_in_float32(self.loss) and _is_ours(self.layer)

    def value(self, parameters: Tree, batch: Any, run: Run) -> Array:
        """Return the loss of one batch in float32; compilers can trace this."""
        return self.value_and_output(parameters, batch, run)[0]

    def value_and_output(self, parameters: Any, batch: Any, run: Run) -> tuple[Array, Any]:
        """Return the loss of one batch, and the output that it was computed from."""
        policy = self.policy
        if policy.casts_parameters:
            parameters = cast_weights(self.layer, parameters, policy.compute)
        if isinstance(self.layer, ModuleLayer):
            given = policy.for_computing(batch) if policy.is_narrow else batch
            value, output = self.layer.loss_and_output(self.loss, parameters, given, run)
        elif isinstance(self.loss, LayerLoss):
            given = policy.for_computing(batch[0])
            value, output = self.loss.of_layer(self.layer, parameters, given, batch[1], run)
        else:
            output = self.layer.apply(parameters, policy.for_computing(batch[0]), run)
            if policy.is_narrow and not computes_in_float32(self.loss):
                output = cast_parameters(output, "float32")
            value = self.loss(output, batch[1])
        return (ops.astype(value, "float32") if policy.is_narrow else value), output


def _is_ours(layer: Layer) -> bool:
    own = type(layer).__module__.startswith("anydevice._nn.")
    return own and all(_is_ours(part) for _, part in layer.parts)


def default_optimize(device: Device, model: Model, epochs: int, batches: int | None) -> str:
    """Return how to compile by default: PyTorch's compiler pays in long trainings only."""
    if device.engine != "torch" or device.kind != "cpu":
        return "default"
    shape = model.output_shape
    heads = shape.values() if isinstance(shape, dict) else [shape]
    used = model.parameter_count * max(math.prod(x[:-1]) for x in heads) + _STEP_OVERHEAD
    return "default" if used * epochs * (batches or _USUAL_LENGTH) >= _WORTH_COMPILING else "none"


class CompiledSteps:
    """Compiles the functions of a step; with `fixed`, the values they close over never change."""

    def __init__(self, engine: Engine, optimize: str, *, fixed: bool) -> None:
        compilers = compilers_for(engine, optimize)
        self.how, self.quiet = compilers.how, False
        self._compilers, self._fixed = compilers.compilers, fixed
        self._warned = False
        if self._compilers and not isinstance(engine.compiler, Absent):
            folder = compiled_folder(engine.name)
            if folder is not None:
                engine.compiler.keep(str(folder))

    @property
    def compiles(self) -> bool:
        """Whether the first step of each shape is compiled."""
        return bool(self._compilers)

    def compiled(self, function: Function, *donate: str) -> Function:
        """Return the compiled function; if compiling is off or fails, the function as written."""
        if not self._compilers:
            return function
        compilers = [
            (name, partial(make, donate=donate, fixed=self._fixed))
            for name, make in self._compilers
        ]
        return FallbackFunction(function, compilers, self._warn)

    def _warn(self, text: str) -> None:
        if not self._warned and not self.quiet:
            self._warned = True
            warn(
                f"a part of the training step is {text}, which is slower; optimize='none' "
                "compiles nothing",
            )


def copied(parameters: TreeT) -> TreeT:
    """Return a copy of all arrays on their device; arrays of booleans are never written."""

    def copy(x: Any) -> Any:
        kind = primitives(x).dtype(x).kind
        return x if kind == "bool" else ops.multiply(x, 1.0 if kind == "float" else 1)

    return mapped(copy, parameters)


def total(tree: Tree) -> Array:
    """Return a float32 that is finite if all numbers of a tree are finite and of sane size."""
    arrays = leaves(tree)
    size = own_version(arrays[0], "total_size", _total)(arrays)
    return _total(arrays) if size is NotImplemented else size


def nonfinite(value: Array) -> Array:
    """Return 1.0 if a number is infinite or NaN, else 0.0."""
    xp = primitives(value)
    return xp.astype(xp.isnan(xp.subtract(value, value)), DTYPES["float32"])


def _total(arrays: list[Array]) -> Array:
    # Column by column first: XLA vectorizes sums on the CPU only if an axis remains.
    sums = (ops.sum(ops.sum(x, axis=0) if x.ndim > 1 else x) for x in arrays)
    return ops.sum(ops.concat([ops.reshape(ops.astype(x, "float32"), (1,)) for x in sums], axis=0))
