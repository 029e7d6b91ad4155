"""Modules of PyTorch, such as those of Hugging Face, with their layers in several places."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anydevice._arrays.move import to_numpy
from anydevice._core.device import Device
from anydevice._core.record import Record, replace
from anydevice._libraries.registry import part as library_part
from anydevice._machine.engines import registry
from anydevice._parallel import pipeline
from anydevice._parallel.offload import Fetcher, KeptArray, kept_in_memory
from anydevice.errors import ConfigurationError

_MARK = "_anydevice_pipeline"


class PipelinedModule(Record):
    """The places of a module's units by name, in their order."""

    places: Mapping[str, pipeline.Place]
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
    """Return the layout of a module that `parallel.pipeline` made; `None` for other modules."""
    return getattr(module, _MARK, None)


def pipelined_module(
    module: Any, given: pipeline.Places, microbatches: int, folder: str | os.PathLike[str] | None
) -> Any:
    """Return the module itself, with its parameters where `given` says."""
    if pipeline_of(module) is not None:
        raise ConfigurationError(
            "this module is already a pipeline; load it again to place it differently",
            source="model",
        )
    torch = library_part("torch", "pipeline")
    parts = torch.module_units(module)
    units = [
        pipeline.Unit(name, torch.bytes_of(part), is_layer)
        for name, (part, is_layer) in parts.items()
    ]
    count = sum(x.numel() for x in module.parameters())
    places = dict(zip(parts, pipeline.placed_units(units, given, "torch", count)[0], strict=True))
    for name, other in torch.tied_units(parts).items():
        places[name] = places[other]
    target = pipeline.folder_for(folder, list(places.values()))
    first = next(iter(places.values())).device
    for name, (part, is_layer) in parts.items():
        if not is_layer and not torch.bytes_of(part):  # such as rotations, made once for all layers
            places[name] = pipeline.Place(first)
    offloaded: dict[Device, list[tuple[Any, pipeline.Place]]] = {}
    forwards: list[tuple[Any, Callable[..., Any]]] = []
    for name, (part, _) in parts.items():
        place = places[name]
        if place.held and torch.bytes_of(part):
            offloaded.setdefault(place.device, []).append((part, place))
        else:
            forwards.append((part, torch.on_device(part.forward, place.device)))
    for device, several in offloaded.items():
        forwards += _hold(device, several, target)
    for name, (part, _) in parts.items():
        if not (places[name].held and torch.bytes_of(part)):
            torch.move_tensors(torch.tensors_of(part), places[name].device)
    torch.move_tensors(torch.outside(module, [part for part, _ in parts.values()]), first)
    forwards.append((module, torch.check_inputs(module.forward, first)))
    for part, forward in forwards:  # once nothing can fail any more
        part.forward = forward
    setattr(module, _MARK, PipelinedModule(places, microbatches))
    return module


def _hold(
    device: Device, parts: Sequence[tuple[Any, pipeline.Place]], folder: Path | None
) -> list[tuple[Any, Callable[..., Any]]]:
    """Keep weights in host memory or on disk; return modules and forwards that bring them."""
    engine, torch = registry.load("torch"), library_part("torch", "pipeline")
    weights: list[list[Any]] = [list(part.parameters()) for part, _ in parts]
    on_file = {
        f"{n}.{m}": x
        for n, (own, (_, place)) in enumerate(zip(weights, parts, strict=True))
        for m, x in enumerate(own)
        if place.held == pipeline.DISK
    }
    files: dict[str, KeptArray] = {}
    if on_file and folder is not None:
        files = pipeline.on_disk(folder, {name: to_numpy(x) for name, x in on_file.items()})
        maps = pipeline.memory_maps(files)
        for name, x in on_file.items():
            torch.read_from(maps[name], x)

    def kept(name: str, x: Any) -> KeptArray:
        if name in files:
            return files[name]
        return replace(kept_in_memory(torch.to_host(x), engine), holder=x)

    arrays = [[kept(f"{n}.{m}", x) for m, x in enumerate(own)] for n, own in enumerate(weights)]
    fetcher = Fetcher(arrays, device, engine)
    torch.move_tensors([x for part, _ in parts for x in part.buffers()], device)
    return [
        (part, torch.stream_weights(part, number, own, fetcher, device))
        for number, ((part, _), own) in enumerate(zip(parts, weights, strict=True))
    ]
