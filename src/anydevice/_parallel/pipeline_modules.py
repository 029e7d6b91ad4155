"""Modules of PyTorch, such as those of Hugging Face, with their layers in several places.

The layers are those of the longest list of modules; what comes before it lies with the first of
them, what comes after with the last. Each gets its inputs where it is. Nothing here imports
PyTorch: who has a module has imported it already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anydevice._arrays.move import refuse_mismatch, to_numpy
from anydevice._core.device import Device
from anydevice._core.record import Record, replace
from anydevice._machine.engines import registry
from anydevice._parallel.offload import Fetcher, KeptArray, kept_in_memory
from anydevice._parallel.pipeline import (
    DISK,
    Place,
    Places,
    Unit,
    folder_for,
    memory_maps,
    moved,
    on_disk,
    placed_units,
)
from anydevice._plan.modules import bytes_of, module_units, tied_units
from anydevice.errors import AnyDeviceError, ConfigurationError, DeviceMismatchError

_MARK = "_anydevice_pipeline"


class PipelinedModule(Record):
    """How a module lies: the places of its units by name, in their order."""

    places: Mapping[str, Place]
    microbatches: int

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that compute, in the order of the units."""
        return tuple(dict.fromkeys(place.device for place in self.places.values()))

    @property
    def last(self) -> Device:
        """The device of the output."""
        return list(self.places.values())[-1].device


def pipeline_of(module: Any) -> PipelinedModule | None:
    """How a module was laid out by `parallel.pipeline`; `None` if it was not."""
    found: PipelinedModule | None = getattr(module, _MARK, None)
    return found


def pipelined_module(
    module: Any, given: Places, microbatches: int, folder: str | os.PathLike[str] | None
) -> Any:
    """The module itself, with its parameters where `given` says."""
    if pipeline_of(module) is not None:
        raise ConfigurationError(
            "this module is already a pipeline; load it again to place it differently",
            source="model",
        )
    parts = module_units(module)
    units = [Unit(name, bytes_of(part), is_layer) for name, (part, is_layer) in parts.items()]
    count = sum(x.numel() for x in module.parameters())
    found, _ = placed_units(units, given, "torch", count)
    places = dict(zip(parts, found, strict=True))
    for name, other in tied_units(parts).items():
        places[name] = places[other]
    target = folder_for(folder, list(places.values()))
    first = next(iter(places.values())).device
    for name, (part, is_layer) in parts.items():
        if not is_layer and not bytes_of(part):  # such as rotations, made once for all layers
            places[name] = Place(first)
    held: dict[Device, list[tuple[Any, Place]]] = {}
    forwards: list[tuple[Any, Callable[..., Any]]] = []
    for name, (part, _) in parts.items():
        place = places[name]
        if place.held and bytes_of(part):
            held.setdefault(place.device, []).append((part, place))
        else:
            forwards.append((part, _on_device(part.forward, place.device)))
    for device, several in held.items():
        forwards += _hold(device, several, target)
    for name, (part, _) in parts.items():
        if not (places[name].held and bytes_of(part)):
            _to_device(_tensors(part), places[name].device)
    _to_device(_outside(module, [part for part, _ in parts.values()]), first)
    forwards.append((module, _checked(module.forward, first)))
    for part, forward in forwards:  # once nothing can fail any more
        part.forward = forward
    setattr(module, _MARK, PipelinedModule(places, microbatches))
    return module


def _outside(module: Any, parts: Sequence[Any]) -> list[Any]:
    """Parameters and buffers of the modules around the units."""
    inside = {id(x) for part in parts for x in _tensors(part)}
    return [x for x in _tensors(module) if id(x) not in inside]


def _tensors(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _to_device(tensors: Sequence[Any], device: Device) -> None:
    for x in tensors:
        x.data = moved(x.data, device)


def _moved_tree(tree: Any, device: Device) -> Any:
    torch: Any = sys.modules["torch"]
    if isinstance(tree, torch.Tensor):
        return moved(tree, device)
    if type(tree) is dict:
        return {name: _moved_tree(x, device) for name, x in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_moved_tree(x, device) for x in tree)
    return tree  # such as a cache, which keeps what each layer gives it where that is


def _on_device(forward: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """A forward function that gets its tensors on a device."""

    def here(*arguments: Any, **named: Any) -> Any:
        return forward(*_moved_tree(arguments, device), **_moved_tree(named, device))

    return here


def _checked(forward: Callable[..., Any], first: Device) -> Callable[..., Any]:
    """The forward function of a whole module, which takes its inputs on the first device."""
    owner = registry.load("torch")

    def checked(*arguments: Any, **named: Any) -> Any:
        torch: Any = sys.modules["torch"]
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


def _hold(
    device: Device, parts: Sequence[tuple[Any, Place]], folder: Path | None
) -> list[tuple[Any, Callable[..., Any]]]:
    """Keep the weights of modules in host memory or on disk; what brings them when these run."""
    engine, host = registry.load("torch"), Device("cpu", engine="torch")
    weights: list[list[Any]] = [list(part.parameters()) for part, _ in parts]
    on_file = {
        f"{n}.{m}": x
        for n, (own, (_, place)) in enumerate(zip(weights, parts, strict=True))
        for m, x in enumerate(own)
        if place.held == DISK
    }
    files: dict[str, KeptArray] = {}
    if on_file and folder is not None:
        files = on_disk(folder, {name: to_numpy(x) for name, x in on_file.items()})
        maps = memory_maps(files)
        for name, x in on_file.items():
            x.requires_grad_(False)
            x.data = _from_map(maps[name], x)

    def kept(name: str, x: Any) -> KeptArray:
        if name in files:
            return files[name]
        x.data = moved(x.data, host).contiguous()
        return replace(kept_in_memory(x.data, engine), holder=x)

    arrays = [[kept(f"{n}.{m}", x) for m, x in enumerate(own)] for n, own in enumerate(weights)]
    fetcher = Fetcher(arrays, device, engine)
    _to_device([x for part, _ in parts for x in part.buffers()], device)
    return [
        (part, _brought(part, number, own, fetcher, device))
        for number, ((part, _), own) in enumerate(zip(parts, weights, strict=True))
    ]


def _from_map(array: Any, like: Any) -> Any:
    """A tensor over a map of a file."""
    import warnings

    import numpy

    torch: Any = sys.modules["torch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written: it is not
        raw = torch.from_numpy(array.reshape(-1).view(numpy.uint8))
    return raw.view(like.dtype).view(like.shape)


def _brought(
    part: Any, number: int, weights: Sequence[Any], fetcher: Fetcher, device: Device
) -> Callable[..., Any]:
    """A forward function whose weights are brought to the device before it runs."""
    torch: Any = sys.modules["torch"]
    forward = part.forward
    homes = [x.data for x in weights]

    def streamed(*arguments: Any, **named: Any) -> Any:
        arguments, named = _moved_tree(arguments, device), _moved_tree(named, device)
        if _takes_gradients(weights, arguments, named):
            return again(*arguments, **named)
        with fetcher.turn.native:  # the weights are those of one call at a time
            for x, here in zip(weights, fetcher.acquire(number), strict=True):
                x.data = here
            try:
                return forward(*arguments, **named)
            finally:
                for x, home in zip(weights, homes, strict=True):
                    x.data = home
                fetcher.release(number, None)

    def again(*arguments: Any, **named: Any) -> Any:
        """Weights are copied for this call, and once more for its gradients."""
        fetcher.close()  # what was brought ahead may be written to

        def called(*inputs: Any, **more: Any) -> Any:
            own = {name: moved(x, device) for name, x in part.named_parameters()}
            part.forward = forward
            try:
                return torch.func.functional_call(part, own, inputs, more)
            finally:
                part.forward = streamed

        checkpoint: Any = torch.utils.checkpoint.checkpoint
        return checkpoint(called, *arguments, use_reentrant=False, **named)

    return streamed


def _takes_gradients(weights: Sequence[Any], arguments: Any, named: Any) -> bool:
    torch: Any = sys.modules["torch"]
    if not torch.is_grad_enabled():
        return False
    return any(x.requires_grad for x in (*weights, *_tensors_in((arguments, named))))


def _tensors_in(tree: Any) -> Iterator[Any]:
    torch: Any = sys.modules["torch"]
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_in(part)
