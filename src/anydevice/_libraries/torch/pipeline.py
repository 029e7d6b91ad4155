"""PyTorch modules with layers in several places: their units, and forwards that fetch weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from anydevice._arrays.move import refuse_mismatch
from anydevice._core.device import Device
from anydevice._engines.torch.recompute import recompute, tensors_in
from anydevice._machine.engines import registry
from anydevice.errors import AnyDeviceError, ConfigurationError, DeviceMismatchError

if TYPE_CHECKING:
    from anydevice._parallel.offload import Fetcher

Units = Mapping[str, tuple[Any, bool]]
"""Modules by name, in order, and whether each is a layer."""


def module_units(module: nn.Module) -> Units:
    """Return the units that a module can be cut into; it needs a list of layers."""
    blocks = _blocks(module)
    if blocks is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no list of layers (a torch.nn.ModuleList or Sequential) "
            "between which it could be cut",
            source="model",
        )
    return dict(_walk(module, "", blocks))


def _walk(module: nn.Module, path: str, blocks: str) -> Iterator[tuple[str, tuple[Any, bool]]]:
    for name, part in module.named_children():
        here = f"{path}{name}"
        if path.rstrip(".") == blocks:
            yield here, (part, True)
        elif blocks == here or blocks.startswith(f"{here}."):
            yield from _walk(part, f"{here}.", blocks)
        else:
            yield here, (part, False)


def _blocks(module: nn.Module) -> str | None:
    """Return the name of the list of layers with the most parameters; ties go to the outer one."""
    lists = [
        (bytes_of(part), -len(name), name)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    ]
    return max(lists)[2] if lists else None


def bytes_of(module: nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in module.parameters())


def tied_units(units: Units) -> dict[str, str]:
    """Return the names of units that share a parameter with an earlier unit, and its name."""
    owners: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, (part, _) in units.items():
        for x in part.parameters():
            first = owners.setdefault(id(x), name)
            if first != name:
                tied[name] = first
    return tied


def outside(module: nn.Module, parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters and buffers of the modules around the units."""
    inside = {id(x) for part in parts for x in tensors_of(part)}
    return [x for x in tensors_of(module) if id(x) not in inside]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def move_tensors(tensors: Sequence[torch.Tensor], device: Device) -> None:
    for x in tensors:
        x.data = move_tensor(x.data, device)


def _moved_tree(tree: Any, device: Device) -> Any:
    if isinstance(tree, torch.Tensor):
        return move_tensor(tree, device)
    if type(tree) is dict:
        return {name: _moved_tree(x, device) for name, x in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_moved_tree(x, device) for x in tree)
    return tree  # for example a cache, which stores each layer's tensors on its device


def on_device(forward: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """Return a forward function that moves its tensors to a device first."""

    def here(*arguments: Any, **named: Any) -> Any:
        return forward(*_moved_tree(arguments, device), **_moved_tree(named, device))

    return here


def check_inputs(forward: Callable[..., Any], first: Device) -> Callable[..., Any]:
    """Return a whole module's forward function that checks for inputs on the first device."""
    owner = registry.load("torch")

    def checked(*arguments: Any, **named: Any) -> Any:
        given = {**{f"input {n}": x for n, x in enumerate(arguments)}, **named}
        for name, x in given.items():
            if isinstance(x, torch.Tensor) and owner.devices_of(x) != (first,):
                here = ", ".join(map(str, owner.devices_of(x)))
                raise DeviceMismatchError(
                    f"{name} is on {here}, and the pipeline begins on {first}; move it with "
                    f'to_device(…, "{first}")',
                    (name, "model"),
                )
        try:
            return forward(*arguments, **named)
        except AnyDeviceError:
            raise
        except RuntimeError as error:
            refuse_mismatch(error, **given)
            raise

    return checked


def move_tensor(x: torch.Tensor, device: Device) -> torch.Tensor:
    """Return a tensor on a device, by a direct copy."""
    owner = registry.load("torch")
    return x if owner.devices_of(x) == (device,) else owner.move(x, device)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Move the data of a parameter to contiguous host memory; return the data."""
    x.data = move_tensor(x.data, Device("cpu", engine="torch")).contiguous()
    return x.data


def read_from(array: np.ndarray, x: torch.Tensor) -> None:
    """Back a parameter by a memory map of a file; it cannot be trained any more."""
    x.requires_grad_(False)
    x.data = from_map(array, x)


def from_map(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over a memory map of a file, with the dtype and shape of `like`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that the map is read-only, but nothing writes
        raw = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return raw.view(like.dtype).view(like.shape)


def stream_weights(
    part: nn.Module,
    number: int,
    weights: Sequence[torch.Tensor],
    fetcher: Fetcher,
    device: Device,
) -> Callable[..., Any]:
    """Return a forward function that first fetches its weights to the device."""
    forward = part.forward
    homes = [x.data for x in weights]

    def streamed(*arguments: Any, **named: Any) -> Any:
        arguments, named = _moved_tree(arguments, device), _moved_tree(named, device)
        if takes_gradients((*weights, *tensors_in((arguments, named)))):
            return again(*arguments, **named)
        with fetcher.turn.native:  # one call at a time has the weights
            for x, here in zip(weights, fetcher.acquire(number), strict=True):
                x.data = here
            try:
                return forward(*arguments, **named)
            finally:
                for x, home in zip(weights, homes, strict=True):
                    x.data = home
                fetcher.release(number, None)

    def again(*arguments: Any, **named: Any) -> Any:
        """Copy the weights for this call, and once more for its gradients."""
        fetcher.close()  # prefetched weights may be written to

        def called(*inputs: Any, **more: Any) -> Any:
            own = {name: move_tensor(x, device) for name, x in part.named_parameters()}
            part.forward = forward
            try:
                return torch.func.functional_call(part, own, inputs, more)
            finally:
                part.forward = streamed

        return recompute(called, *arguments, **named)

    return streamed


def takes_gradients(arrays: Sequence[Any]) -> bool:
    """Whether gradients are taken with respect to any of these arrays."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in arrays)


def wait_for_computed(place: torch.device) -> Callable[[], None]:
    """Return a function that waits for all work started on a card until now."""
    return _record(torch.cuda.current_stream(place))


class CopyStream:
    def __init__(self, place: torch.device) -> None:
        self._stream = torch.cuda.Stream(place)
        self.handle: int = self._stream.cuda_stream

    def synchronize(self) -> None:
        self._stream.synchronize()

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for the copies started until now."""
        return _record(self._stream)


def _record(stream: torch.cuda.Stream) -> Callable[[], None]:
    event = torch.cuda.Event()
    event.record(stream)
    return event.synchronize
