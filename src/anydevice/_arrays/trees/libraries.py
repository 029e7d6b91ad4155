"""The rules of array libraries' containers. Libraries are found in `sys.modules`, never imported.

PyTorch's and MLX's modules and optimizers are changed in place and returned, as `Module.to` does,
because others hold on to them: an optimizer has the very `Parameter` objects of its model. JAX's
and Flax's containers, where models are values, are new objects. JAX's own registry takes apart
the trees that it knows; Flax NNX objects are graphs that may share variables, which the registry
would double, so they have their own rules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from anydevice._arrays.trees import rules
from anydevice._arrays.trees.rules import AttributeRule, InPlaceRule, Parts, Rule
from anydevice.errors import ConfigurationError


class ModuleRule(InPlaceRule):
    """`torch.nn.Module`: parameters with their gradients, buffers, and the modules within.

    A `Parameter` stays the same object with new data, so that optimizers, ties between modules,
    hooks and `requires_grad` are as before. A plain tensor attribute is left alone, as PyTorch
    itself leaves it.
    """

    def take_apart(self, container: Any) -> Parts:
        keys: list[tuple[str, str]] = []
        parts: list[Any] = []
        for name, parameter in container._parameters.items():
            if parameter is None:
                continue
            keys.append(("parameter", name))
            parts.append(parameter)
            if (gradient := _gradient_of(parameter)) is not None:
                keys.append(("gradient", name))
                parts.append(gradient)
        for kind, held in (("buffer", container._buffers), ("module", container._modules)):
            for name, part in held.items():
                keys.append((kind, name))
                parts.append(part)
        return keys, parts

    def step(self, key: Any) -> str:
        kind, name = key
        return rules.attribute_step(name) + (".grad" if kind == "gradient" else "")

    def renew(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> list[Any]:
        moved = dict(zip(keys, parts, strict=True))
        changed = False
        for name, parameter in container._parameters.items():
            if parameter is None:
                continue
            new, gradient = moved["parameter", name], moved.get(("gradient", name))
            if new is not parameter or gradient is not _gradient_of(parameter):
                moved["parameter", name] = parameter
                _renew(parameter, new, gradient)
                if gradient is not None:
                    moved["gradient", name] = parameter.grad
                changed = True
        if changed and hasattr(container, "flatten_parameters"):
            container.flatten_parameters()  # cuDNN wants the weights of an RNN in one piece
        return list(moved.values())

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        for (kind, name), part in zip(keys, parts, strict=True):
            if kind == "buffer" and part is not container._buffers[name]:
                container._buffers[name] = part
        return container


class OptimizerRule(InPlaceRule):
    """`torch.optim.Optimizer`: its state. The parameters belong to the model, and move with it.

    A `step` stays on the host unless the optimizer is fused or capturable, as PyTorch wants it.
    """

    def take_apart(self, container: Any) -> Parts:
        numbers: dict[Any, int] = {}
        on_device: set[Any] = set()
        for group in container.param_groups:
            for parameter in group["params"]:
                numbers[parameter] = len(numbers)
                if group.get("fused") or group.get("capturable"):
                    on_device.add(parameter)
        keys: list[tuple[str, Any, Any]] = []
        parts: list[Any] = []
        for owner, entry in container.state.items():
            number = numbers.get(owner, owner if isinstance(owner, str) else len(numbers))
            where = f".state{rules.item_step(number)}"
            if not isinstance(entry, dict):
                keys.append((where, container.state, owner))
                parts.append(entry)
                continue
            for name, part in entry.items():
                if name != "step" or owner in on_device:
                    keys.append((where + rules.item_step(name), entry, name))
                    parts.append(part)
        return keys, parts

    def step(self, key: Any) -> str:
        return str(key[0])

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        for (_, holder, name), part in zip(keys, parts, strict=True):
            holder[name] = part
        return container


class PackedSequenceRule(Rule):
    """`PackedSequence`: its batch sizes stay on the host, where PyTorch reads them."""

    _MOVED = ("data", "sorted_indices", "unsorted_indices")

    def take_apart(self, container: Any) -> Parts:
        return self._MOVED, [getattr(container, name) for name in self._MOVED]

    def step(self, key: Any) -> str:
        return rules.attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        data, *indices = parts
        return tuple.__new__(type(container), (data, container.batch_sizes, *indices))


class StorageRule(Rule):
    """`torch.UntypedStorage`, the memory of tensors: its bytes, as a tensor."""

    def take_apart(self, container: Any) -> Parts:
        torch = sys.modules["torch"]
        return (None,), [torch.empty(0, dtype=torch.uint8, device=container.device).set_(container)]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return parts[0].untyped_storage()


def _gradient_of(tensor: Any) -> Any:
    """The gradient of a tensor that stores one; reading that of an intermediate result warns."""
    return tensor.grad if tensor.is_leaf else None


def _renew(parameter: Any, new: Any, new_gradient: Any) -> None:
    """Give a parameter and its gradient new data, and keep both objects."""
    gradient = _gradient_of(parameter)
    if gradient is not None:
        # Put aside meanwhile: PyTorch wants a parameter and its gradient to fit at any moment.
        parameter.grad = None
    if new is not parameter and _is_composite(new):
        torch = sys.modules["torch"]
        replacement = torch.nn.Parameter(new.detach(), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, replacement)
    elif new is not parameter:
        parameter.data = new.detach()
    if gradient is not None:
        if new_gradient is not gradient and not _is_composite(new_gradient):
            gradient.data = new_gradient.detach()
            new_gradient = gradient
        parameter.grad = new_gradient


def _is_composite(tensor: Any) -> bool:
    """Whether a tensor is made of other tensors, and has no data of its own."""
    return hasattr(tensor, "__tensor_flatten__")


class RegisteredTreeRule(Rule):
    """The rule of every type that has no other: JAX's registry decides, if JAX is imported.

    JAX is asked about each object, because a type may be registered, and JAX be imported, at any
    time.
    """

    certain = False

    def take_apart(self, container: Any) -> Parts | None:
        trees: Any = sys.modules.get("jax.tree_util")
        if trees is None or trees.all_leaves((container,)):
            return None
        # One level: the first thing that JAX asks about is the container, all others are parts.
        answers = chain((False,), repeat(True))
        parts, structure = trees.tree_flatten(container, is_leaf=lambda _: next(answers))
        # JAX would never come to an end with the names of what holds itself.
        named = None if any(part is container for part in parts) else container
        return [(index, structure, named) for index in range(len(parts))], parts

    def step(self, key: Any) -> str:
        index, _, container = key
        if container is None:
            return rules.item_step(index)
        trees: Any = sys.modules["jax.tree_util"]
        named = trees.tree_flatten_with_path(container, lambda value: value is not container)
        (entry,), _ = named[0][index]
        if isinstance(entry, trees.FlattenedIndexKey):
            return rules.item_step(entry.key)
        return str(trees.keystr((entry,)))

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        _, structure, _ = keys[0]
        return structure.unflatten(parts)


class VariableRule(Rule):
    """`flax.nnx.Variable`: a new variable with the same metadata and the new value."""

    def take_apart(self, container: Any) -> Parts:
        # Earlier versions of Flax have an attribute in place of the method.
        read = getattr(type(container), "get_raw_value", None)
        return (None,), [read(container) if read else container.raw_value]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return container.replace(parts[0])


class TableRule(Rule):
    """A DataFrame or a Series of pandas or polars: an array of its rows, which takes its place."""

    def take_apart(self, container: Any) -> Parts:
        return (None,), [self.array(container)]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return parts[0]

    def array(self, table: Any) -> Any:
        """The rows as one NumPy array, of the smallest dtype that holds every column.

        Raises `ConfigurationError`, with the column, where that holds anything but numbers or has
        missing values, and where its integers do not fit into the floating dtype of the others.
        """
        import numpy as np  # a walk through a tree imports no library

        if hasattr(table, "collect"):
            raise ConfigurationError("a LazyFrame has no rows yet; collect() it first")
        columns = _columns(table)
        if columns is None:
            return _numbers(table)
        arrays = [_numbers(column) for column in columns]
        dtype = np.result_type(*arrays) if arrays else np.dtype("float32")
        rows = np.empty((len(table), len(arrays)), dtype)
        for at, (column, array) in enumerate(zip(columns, arrays, strict=True)):
            rows[:, at] = array
            if dtype.kind == "f" and array.dtype.kind in "iu" and array.size:
                most = 2 ** (np.finfo(dtype).nmant + 1)
                if not -most <= int(array.min()) <= int(array.max()) <= most:
                    raise _not_numbers(column, f"has integers that {dtype} does not hold")
        return rows


def _columns(table: Any) -> list[Any] | None:
    """The columns of a DataFrame as Series; `None` for a Series itself."""
    if hasattr(table, "get_columns"):  # polars
        return list(table.get_columns())
    return [column for _, column in table.items()] if hasattr(table, "columns") else None


def _numbers(column: Any) -> Any:
    """The column as an array of numbers; raises `ConfigurationError` for any other."""
    array = column.to_numpy()
    declared = _declared_kind(column.dtype)
    if declared in "biuf" and array.dtype.kind != declared:
        raise _not_numbers(column, "has missing values; fill them, or leave its rows out")
    if array.dtype.kind not in "biufc" or array.ndim != 1:
        raise _not_numbers(
            column, f"is {column.dtype}, not numbers; leave it out, or encode it as numbers"
        )
    return array


def _declared_kind(dtype: Any) -> str:
    """The kind of numbers that a column is to hold, as NumPy writes it; "O" for anything else."""
    if hasattr(dtype, "kind"):  # of pandas
        return str(dtype.kind)
    integer = "u" if dtype.is_unsigned_integer() else "i"
    known = {"Boolean": "b", "Float32": "f", "Float64": "f"}
    return integer if dtype.is_integer() else known.get(str(dtype), "O")


def _not_numbers(column: Any, what: str) -> ConfigurationError:
    name = "this Series" if column.name in (None, "") else f"the column {column.name!r}"
    return ConfigurationError(f"{name} {what}")


def nnx_object_rule(kind: type) -> Rule:
    """The rule of a Flax NNX module, optimizer, or other object."""
    return AttributeRule(kind, copied=("_pytree__state", "_object__state"))


def nnx_state_rule(kind: type) -> Rule:
    """The rule of `flax.nnx.State`, a wrapper of a dict that does not show in paths."""
    return AttributeRule(kind, hidden=("_mapping",))


class MlxModuleRule(InPlaceRule):
    """`mlx.nn.Module`, which is a dict of its arrays and inner modules."""

    module, array, arrays = "mlx.core", "array", "MLX arrays"
    instead = "its parameters()"

    def take_apart(self, container: Any) -> Parts:
        return list(container), list(dict.values(container))

    def step(self, key: Any) -> str:
        return rules.attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        for key, part in zip(keys, parts, strict=True):
            dict.__setitem__(container, key, part)
        return container


class MlxOptimizerRule(MlxModuleRule):
    """`mlx.optimizers.Optimizer`: its state, a dict that stays the same dict."""

    instead = "its state"

    def take_apart(self, container: Any) -> Parts:
        return ("state",), [container.state]

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        # Reached only where the same dict also occurs outside the optimizer, and was made again.
        container.state = parts[0]
        return container
