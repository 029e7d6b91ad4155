"""Adapters of `nn.Model` and of plain functions over arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from anydevice._arrays.move import is_array, to_device, to_numpy
from anydevice._arrays.trees.tree import flatten
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.record import replace
from anydevice._core.trees import combined, leaves, mapped, partition
from anydevice._libraries import base
from anydevice._libraries.precision import Policy, cast_parameters, has_coarse_products
from anydevice._libraries.registry import part
from anydevice._nn.layer import Layer, Parameters, Run, state_leaves
from anydevice._nn.model import Model, check_batch, parameters_device
from anydevice._ops.dispatch import primitives
from anydevice.errors import AnyDeviceError, ConfigurationError, DeviceMismatchError


class NativeAdapter(base.ModelAdapter):
    """A `nn.Model`. Its reference runs the same layers on NumPy."""

    kind = "anydevice.nn.Model"

    def __init__(self, model: Model) -> None:
        self.model = model
        self.arguments = model.parameters

    def call(self, arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
        return self.model.apply(arguments, *inputs)

    def traced(self, after: base.After, *inputs: Any, **named: Any) -> Any:
        return self._through(self.arguments, after, *inputs)

    def _through(self, arguments: base.Arguments, after: base.After, *inputs: Any) -> Any:
        layer = self.model.layer
        run = _Traced(root=layer.root, after=after)
        y = self.model.apply(arguments, inputs[0], run)
        return y if layer.parts else after(layer.label, y)

    def with_parts(self, arguments: base.Arguments, *inputs: Any, **named: Any) -> list[Any] | None:
        values: list[Any] = []

        def after(name: str, value: Any) -> Any:
            values.append(value)
            return value

        values.append(self._through(arguments, after, *inputs))
        return values

    def weights(self) -> Mapping[str, Array]:
        root = self.model.layer.root
        return {root + path: x for path, x in paths_of(self.model.parameters).items()}

    def kept_weights(self) -> frozenset[str]:
        parameters = self.model.parameters
        pairs = zip(leaves(parameters), state_leaves(self.model.layer, parameters), strict=True)
        state = {id(leaf) for leaf, own in pairs if own}
        return frozenset(path for path, leaf in self.weights().items() if id(leaf) in state)

    def moved(self, device: Device, dtype: str) -> NativeAdapter:
        cast = cast_weights(self.model.layer, self.model.parameters, dtype)
        return NativeAdapter(self.model.with_parameters(to_device(cast, device, convert=True)))

    def with_policy(self, policy: Policy) -> Callable[..., Any]:
        if not policy.casts_parameters:
            return self.call

        def run(arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
            cast = cast_weights(self.model.layer, arguments, policy.compute)
            return policy.for_output(self.call(cast, *inputs, **named))

        return run

    def reference(self, change: base.Change, engine: str) -> base.ModelAdapter:
        changed = mapped(change, to_numpy(self.model.parameters))
        return NativeAdapter(self.model.with_parameters(changed))

    def has_coarse_products(self, device: Device) -> bool:
        """Whether TF32 is used, as in the base class; ops use only PyTorch's matrix products."""
        return device.engine == "torch" and has_coarse_products(device, convolutions=False)

    @property
    def device(self) -> Device | None:
        layer = self.model.layer
        try:
            return parameters_device(self.model.parameters)
        except DeviceMismatchError as error:
            if layer.alone is layer:
                raise
            raise Absent(
                "a model on several devices is not compiled as a whole",
                instead="call it as it is: its stages are compiled on their devices; or move it to "
                "one device with to_device; or give validation= to nn.train",
                code="no_collectives",
            ).error() from error

    def check_inputs(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        if named or len(inputs) != 1 or not is_array(inputs[0]):
            given = [type(x).__name__ for x in inputs] + [f"{name}=" for name in named]
            raise ConfigurationError(
                f"this model takes one array, a batch of examples of the shape "
                f"{self.model.input_shape}, and got {', '.join(given) or 'nothing'}",
                source="inputs",
            )
        shape = tuple(inputs[0].shape)
        if not shape:
            raise ConfigurationError(
                "this model takes a batch, and got an array without axes", source="inputs"
            )
        check_batch(self.model, shape)


def cast_weights(layer: Layer, parameters: Parameters, dtype: str) -> Parameters:
    """Return the parameters in a dtype.

    State keeps its dtype, since a variance may overflow a narrower one.

    >>> norm = {name: numpy.ones(1) for name in ("weight", "bias", "mean", "variance")}
    >>> {name: str(x.dtype) for name, x in cast_weights(nn.BatchNorm(1), norm, "float16").items()}
    {'weight': 'float16', 'bias': 'float16', 'mean': 'float64', 'variance': 'float64'}
    """
    state = state_leaves(layer, parameters)
    if not any(state):
        return cast_parameters(parameters, dtype)
    unchanged, others = partition(parameters, state)
    return combined(cast_parameters(others, dtype), unchanged)


class _Traced(Run):
    """A run that passes the output of each part through a function."""

    root: str = ""
    after: Any = None

    def through(self, step: str, layer: Layer, parameters: Parameters, x: Array) -> Array:
        path = self.path + step
        y = layer.apply(parameters, x, replace(self, path=path, watch=None))
        return self.after(f"{self.root}{path} {layer.label}", y)


class FunctionAdapter(base.ModelAdapter):
    """A function over arrays; its reference is the function itself over float64 arrays."""

    kind = "function"
    follows = "no variable that the function closes over; a verification is for their old values"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def call(self, arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
        return self.function(*inputs, **named)

    def traced(self, after: base.After, *inputs: Any, **named: Any) -> Any:
        return self.function(*inputs, **named)

    def weights(self) -> Mapping[str, Array]:
        return {}

    def moved(self, device: Device, dtype: str) -> base.ModelAdapter:
        return self

    def reference(self, change: base.Change, engine: str) -> base.ModelAdapter:
        return _FunctionReference(self.function, engine, change)

    def has_coarse_products(self, device: Device) -> bool:
        return has_coarse_products(device)

    def input_names(self) -> frozenset[str]:
        return base.parameter_names(self.function)


class _FunctionReference(FunctionAdapter):
    def __init__(self, function: Callable[..., Any], engine: str, change: base.Change) -> None:
        super().__init__(function)
        self.engine, self.change = engine, change

    def traced(self, after: base.After, *inputs: Any, **named: Any) -> Any:
        try:
            result = self.function(*inputs, **named)
            dtypes = [primitives(x).dtype(x) for x in flatten(result, is_array)[0].values]
            # A 32-bit library takes NumPy arrays too, and loses precision.
            if all(dtype.kind != "float" or dtype.name == "float64" for dtype in dtypes):
                return result
        except (AnyDeviceError, TypeError, AttributeError, ValueError):
            if self.engine == "numpy":
                raise
        self.changes_operations = self.engine == "torch"
        arrays, rebuild = flatten((inputs, named), is_array)
        given, by_name = rebuild(list(map(base.cpu_placer(self.engine), arrays.values)))
        return self.function(*given, **by_name)

    def scope(self) -> AbstractContextManager[Any]:
        if self.engine != "torch":
            return base.float64_scope(self.engine)
        return part("torch", "module").changed_scope(self.change)


def paths_of(tree: Any) -> dict[str, Array]:
    """Return the arrays of a tree by path."""
    return {leaf.path: leaf.value for leaf in flatten(tree, is_array)[0]}
