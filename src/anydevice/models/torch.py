"""Modules of PyTorch. The data path never imports PyTorch: whoever has a module has done so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.engines.lookup import place_of
from anydevice.models.base import (
    After,
    Arguments,
    Array,
    Change,
    Subject,
    in_training,
    names_of_inputs,
    note_of_training,
    placed_on_cpu,
)
from anydevice.models.changes import Follower, Read, Sights
from anydevice.models.precision import Policy
from anydevice.transfer.moving import device_of, to_device, to_numpy

_RANDOM_IN_TRAINING = ("Dropout", "BatchNorm", "InstanceNorm", "RReLU", "DropPath")


class TorchSubject(Subject):
    """A `torch.nn.Module`; hooks tell what its parts give.

    It is moved in place, as PyTorch moves modules. Where its weights are of another type than
    asked for, a copy of it is made, and the module that was given stays as it is; the copy takes
    over what is changed in it later.
    """

    kind = "torch.nn.Module"
    library = "torch"

    def __init__(
        self, module: Any, notes: tuple[str, ...] = (), computing: tuple[str, str] | None = None
    ) -> None:
        self.module = module
        self.notes = notes
        self._computing = computing
        self._copied: Any = None

    def call(self, arguments: Arguments, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def under(self, policy: Policy) -> Callable[..., Any]:
        if not policy.casts_parameters:
            return self.call
        torch: Any = sys.modules["torch"]
        module, kind = self.module, self._device_type()
        dtype, wanted = getattr(torch, policy.compute), getattr(torch, policy.output)

        def widened(x: Any) -> Any:
            floating = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.to(wanted) if floating else x

        def run(arguments: Arguments, *inputs: Any, **named: Any) -> Any:
            with torch.autocast(kind, dtype=dtype):
                result = module(*inputs, **named)
            return torch.utils._pytree.tree_map(widened, result)

        return run

    def for_tracing(self, device: Device, policy: Policy) -> Subject:
        if not policy.casts_parameters:
            return self
        return TorchSubject(self.module, computing=(self._device_type(), policy.compute))

    def input_type(self, policy: Policy) -> str:
        return policy.parameters

    def traced(self, after: After, *inputs: Any, **named: Any) -> Any:
        with ExitStack() as hooks:
            for path, part in self.module.named_modules():
                if path and not _is_script(part):
                    hear = partial(_heard, f"{path} {type(part).__name__}", after)
                    hooks.callback(part.register_forward_hook(hear).remove)
            return self.module(*inputs, **named)

    def weights(self) -> Mapping[str, Array]:
        return {
            **{name: x.detach() for name, x in self.module.named_parameters()},
            **dict(self.module.named_buffers()),
        }

    def moved(self, device: Device, dtype: str) -> Subject:
        torch: Any = sys.modules["torch"]
        wanted = getattr(torch, dtype)
        types = {x.dtype for x in self.weights().values() if x.is_floating_point()}
        if types <= {wanted}:
            return TorchSubject(to_device(self.module, device), _notes(self.module))
        copied = _copy_of(self.module).to(wanted)
        others = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in types - {wanted}))
        note = f"a copy of the module is used, with weights of {dtype} instead of {others}"
        moved = TorchSubject(to_device(copied, device), (*_notes(copied), note))
        moved._copied = self.module
        moved.follower = Follower(lambda: _sights(self.module))
        return moved

    def catches_up(self, device: Device, dtype: str) -> bool:
        torch: Any = sys.modules["torch"]
        pairs = list(zip(self._copied.modules(), self.module.modules(), strict=False))
        if _form_of(self._copied) != _form_of(self.module):
            return False
        with torch.no_grad():
            for source, part in pairs:
                part.training = source.training
                _copy(source._parameters, part._parameters)
                _copy(source._buffers, part._buffers)
        return True

    def watch(self) -> Follower | None:
        # What a module writes into its buffers when it is called, such as a cache, is no change.
        return self.follower or Follower(lambda: _sights(self.module, buffers=False))

    def reference(self, change: Change, engine: str) -> Subject:
        module = _copy_of(self.module)
        for part in module.modules():
            for x in part._parameters.values():
                if x is not None:
                    x.requires_grad_(False)
                    x.data = placed_on_cpu(change(to_numpy(x.detach())), "torch")
            for name, x in part._buffers.items():
                if x is not None:
                    part._buffers[name] = placed_on_cpu(change(to_numpy(x)), "torch")
        return TorchSubject(module)

    @property
    def where(self) -> Device | None:
        return device_of(self.module)

    def scope(self) -> AbstractContextManager[Any]:
        torch: Any = sys.modules["torch"]
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if self._computing is not None:
            kind, dtype = self._computing
            stack.enter_context(torch.autocast(kind, dtype=getattr(torch, dtype)))
        return stack

    def reference_input(self, x: Array) -> Array:
        return placed_on_cpu(x, "torch")

    def input_names(self) -> frozenset[str]:
        return names_of_inputs(self.module.forward)

    def can_be_verified(self) -> None:
        random = [
            name
            for name, part in self.module.named_modules()
            if part.training and any(word in _name_of(part) for word in _RANDOM_IN_TRAINING)
        ]
        if random:
            raise in_training(random[0])

    def has_coarse_products(self, device: Device) -> bool:
        torch: Any = sys.modules["torch"]
        backends = torch.backends
        return device.backend == "cuda" and bool(
            backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32
        )

    def _device_type(self) -> str:
        place = self.where or Device("cpu", 0, engine="torch")
        kind: str = registry.load("torch").native(place_of(place)).type
        return kind


def _heard(name: str, after: After, part: Any, given: Any, result: Any) -> Any:
    return after(name, result)


def _copy_of(module: Any) -> Any:
    copied = deepcopy(module)
    for x in copied.parameters():
        if not x.is_leaf:  # copied by TorchScript, as something computed from the first one
            x.detach_().requires_grad_()
    return copied


def _is_script(module: Any) -> bool:
    """Whether it is TorchScript, which runs its parts by itself and lets nobody listen."""
    return isinstance(module, sys.modules["torch"].jit.ScriptModule)


def _name_of(module: Any) -> str:
    """The name of a module's class; TorchScript has one class for all, and remembers."""
    return str(module.original_name if _is_script(module) else type(module).__name__)


def _sights(module: Any, *, buffers: bool = True) -> Sights:
    views: list[Any] = []
    tensors: list[Any] = []
    for part in module.modules():
        held = [part._parameters, part._buffers] if buffers else [part._parameters]
        views += [x.values() for x in (part._modules, *held)]
        tensors += [x for each in held for x in each.values()]
    modes: list[Read] = [partial(getattr, part, "training") for part in module.modules()]
    counts: list[Read] = [partial(getattr, x, "_version") for x in tensors if _counts(x)]
    return Sights(views, modes, counts)


def _counts(x: Any) -> bool:
    """Whether PyTorch counts changes of this tensor; those made in inference mode have no count."""
    return x is not None and not x.is_inference()


def _form_of(module: Any) -> list[Any]:
    """The parts of a module, and the shapes of its weights."""
    return [
        (path, type(part), [_shapes(x) for x in (part._parameters, part._buffers)])
        for path, part in module.named_modules()
    ]


def _shapes(tensors: Mapping[str, Any]) -> list[Any]:
    return [(name, None if x is None else x.shape) for name, x in tensors.items()]


def _copy(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    for name, x in target.items():
        if x is not None:
            x.copy_(source[name])


def _notes(module: Any) -> tuple[str, ...]:
    return (note_of_training(),) * bool(module.training)
