"""Rules for PyTorch's containers: modules, optimizers, packed sequences, storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anydevice._arrays.trees import rules
from anydevice._arrays.trees.rules import InPlaceRule, Parts, TypeRule


class TensorsRule(InPlaceRule):
    """Containers that hold tensors of PyTorch and nothing else."""

    arrays, instead = "torch tensors", "its state_dict()"

    def holds(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)


class ModuleRule(TensorsRule):
    """`torch.nn.Module`: parameters with their gradients, buffers, and the modules within.

    A `Parameter` stays the same object with new data, so that optimizers, ties between modules,
    hooks and `requires_grad` are as before. Plain tensor attributes stay, as in PyTorch.
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
        for kind, parts_by_name in (("buffer", container._buffers), ("module", container._modules)):
            for name, part in parts_by_name.items():
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
            container.flatten_parameters()  # cuDNN wants the weights of an RNN contiguous
        return list(moved.values())

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        for (kind, name), part in zip(keys, parts, strict=True):
            if kind == "buffer" and part is not container._buffers[name]:
                container._buffers[name] = part
        return container


class OptimizerRule(TensorsRule):
    """`torch.optim.Optimizer`: its state. The parameters belong to the model, and move with it.

    A `step` stays on the host unless the optimizer is fused or capturable, as PyTorch requires.
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


class PackedSequenceRule(TypeRule):
    """`PackedSequence`: its batch sizes stay on the host, where PyTorch reads them."""

    _MOVED = ("data", "sorted_indices", "unsorted_indices")

    def take_apart(self, container: Any) -> Parts:
        return self._MOVED, [getattr(container, name) for name in self._MOVED]

    def step(self, key: Any) -> str:
        return rules.attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        data, *indices = parts
        return tuple.__new__(type(container), (data, container.batch_sizes, *indices))


class StorageRule(TypeRule):
    """`torch.UntypedStorage`, the memory of tensors: its bytes, as a tensor."""

    def take_apart(self, container: Any) -> Parts:
        return (None,), [torch.empty(0, dtype=torch.uint8, device=container.device).set_(container)]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return parts[0].untyped_storage()


def _gradient_of(tensor: Any) -> Any:
    """Return the gradient that a tensor stores, without the warning for intermediate results."""
    return tensor.grad if tensor.is_leaf else None


def _renew(parameter: Any, new: Any, new_gradient: Any) -> None:
    """Give a parameter and its gradient new data, keeping both objects."""
    gradient = _gradient_of(parameter)
    if gradient is not None:
        # Set aside meanwhile: PyTorch requires a parameter and its gradient to match at all times.
        parameter.grad = None
    if new is not parameter and _is_composite(new):
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
    """Whether a tensor is made of other tensors, without data of its own."""
    return hasattr(tensor, "__tensor_flatten__")
