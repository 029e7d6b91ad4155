"""PyTorch's containers: modules, optimizers, packed sequences.

Modules and optimizers are changed in place and returned, as `Module.to` does, because they hold
on to each other: an optimizer has the very `Parameter` objects of its model. Packed sequences are
made anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from anydevice.transfer.rules import InPlaceRule, Parts, Rule, attribute_step, item_step, kind_name


class TensorsOnlyRule(InPlaceRule):
    """What modules and optimizers have in common: they can hold tensors and nothing else."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, sys.modules["torch"].Tensor)

    def refusal(self, container: Any, value: Any) -> str:
        return (
            f"a {kind_name(type(container))} is changed in place and can hold only torch tensors, "
            f"and this would become a {kind_name(type(value))}; move its state_dict() instead"
        )


class ModuleRule(TensorsOnlyRule):
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
            if (gradient := gradient_of(parameter)) is not None:
                keys.append(("gradient", name))
                parts.append(gradient)
        for kind, held in (("buffer", container._buffers), ("module", container._modules)):
            for name, part in held.items():
                keys.append((kind, name))
                parts.append(part)
        return keys, parts

    def step(self, key: Any) -> str:
        kind, name = key
        return attribute_step(name) + (".grad" if kind == "gradient" else "")

    def renew(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> list[Any]:
        moved = dict(zip(keys, parts, strict=True))
        changed = False
        for name, parameter in container._parameters.items():
            if parameter is None:
                continue
            new, gradient = moved["parameter", name], moved.get(("gradient", name))
            if new is not parameter or gradient is not gradient_of(parameter):
                moved["parameter", name] = parameter
                renew(parameter, new, gradient)
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


class OptimizerRule(TensorsOnlyRule):
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
            where = f".state{item_step(number)}"
            if not isinstance(entry, dict):
                keys.append((where, container.state, owner))
                parts.append(entry)
                continue
            for name, part in entry.items():
                if name != "step" or owner in on_device:
                    keys.append((where + item_step(name), entry, name))
                    parts.append(part)
        return keys, parts

    def step(self, key: Any) -> str:
        text: str = key[0]
        return text

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
        return attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        data, sorted_indices, unsorted_indices = parts
        fields = (data, container.batch_sizes, sorted_indices, unsorted_indices)
        return tuple.__new__(type(container), fields)


def gradient_of(tensor: Any) -> Any:
    """The gradient that is stored with a tensor; reading that of an inner result would warn."""
    return tensor.grad if tensor.is_leaf else None


def renew(parameter: Any, new: Any, new_gradient: Any) -> None:
    """Give a parameter, and the gradient that it holds, other data, and keep both objects."""
    gradient = gradient_of(parameter)
    if gradient is not None:
        # Put aside meanwhile: PyTorch wants a parameter and its gradient to fit at any moment.
        parameter.grad = None
    if new is not parameter:
        _give_data(parameter, new)
    if gradient is not None:
        if new_gradient is not gradient and not _is_composite(new_gradient):
            gradient.data = new_gradient.detach()
            new_gradient = gradient
        parameter.grad = new_gradient


def _give_data(parameter: Any, new: Any) -> None:
    if not _is_composite(new):
        parameter.data = new.detach()
        return
    torch = sys.modules["torch"]
    replacement = torch.nn.Parameter(new.detach(), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, replacement)


def _is_composite(tensor: Any) -> bool:
    """Whether a tensor is made of other tensors, and has no data of its own to be given away."""
    return hasattr(tensor, "__tensor_flatten__")
