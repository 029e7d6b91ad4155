"""What a module of PyTorch can be cut between, and where a plan has each part of it.

The layers are those of the list of modules with most parameters; what comes before it goes with
the first of them, what comes after with the last. Nothing here imports PyTorch: who has a module
has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._plan.plan import Placement, Plan

Units = Mapping[str, tuple[Any, bool]]
"""Modules by name, in their order, and whether each is a layer."""

_NAMES = {"rocm": "cuda", "metal": "mps"}
"""What PyTorch calls a backend where it has a name of its own."""


def module_units(module: Any) -> Units:
    """The modules that a module can be cut between.

    Raises `ConfigurationError` for one without a list of layers.
    """
    blocks = _blocks(module)
    if blocks is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no list of layers (a torch.nn.ModuleList or Sequential) "
            "between which it could be cut",
            source="model",
        )
    return dict(_walked(module, "", blocks))


def _walked(module: Any, path: str, blocks: str) -> Iterator[tuple[str, tuple[Any, bool]]]:
    for name, part in module.named_children():
        here = f"{path}{name}"
        if path.rstrip(".") == blocks:
            yield here, (part, True)
        elif blocks == here or blocks.startswith(f"{here}."):
            yield from _walked(part, f"{here}.", blocks)
        else:
            yield here, (part, False)


def _blocks(module: Any) -> str | None:
    """The name of the list of layers with most parameters; of two, that of the outer one."""
    nn: Any = sys.modules["torch.nn"]
    lists = [
        (bytes_of(part), -len(name), name)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    ]
    return max(lists)[2] if lists else None


def bytes_of(module: Any) -> int:
    """The bytes of all parameters."""
    return sum(x.numel() * x.element_size() for x in module.parameters())


def tied_units(units: Units) -> dict[str, str]:
    """The units that share a parameter with an earlier one, by name, and the name of that one."""
    seen: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, (part, _) in units.items():
        for x in part.parameters():
            first = seen.setdefault(id(x), name)
            if first != name:
                found[name] = first
    return found


def planned_units(
    plan: Plan, are_layers: Sequence[bool], parameters: int | None
) -> list[Placement]:
    """The placement of each unit of a model, given which of them are layers.

    Raises `ConfigurationError` for a plan that does not fit, or that is of another model:
    `parameters` is how many this one has.
    """
    if not plan.fits:
        raise ConfigurationError(
            'this plan does not fit; give places such as ["cuda:0", "cpu", "disk"]',
            source="devices",
        )
    of_layer = [each for each in plan.placements for _ in each.layers]
    shape, count = plan.estimate.shape, sum(are_layers)
    other = None
    if len(of_layer) != count:
        other = f"{len(of_layer)} layers, and this model {count}"
    elif shape is not None and shape.exact and parameters not in (None, shape.parameters):
        other = f"{shape.parameters:,} parameters, and this one {parameters:,}"
    if other is not None:
        raise ConfigurationError(
            f"this plan is for another model: it has {other}", source="devices"
        )
    found, at = [], -1
    for is_layer in are_layers:
        at += is_layer
        found.append(of_layer[max(at, 0)])
    return found


def device_map(plan: Plan, module: Any) -> dict[str, str]:
    """The device of each unit of a module, as transformers and accelerate name both."""
    units = module_units(module)
    count = sum(x.numel() for x in module.parameters())
    places = planned_units(plan, [is_layer for _, is_layer in units.values()], count)
    found = {name: _torch_name(each) for name, each in zip(units, places, strict=True)}
    first = next(iter(found.values()))
    for name, (part, is_layer) in units.items():
        if not is_layer and not bytes_of(part):  # such as rotations, made once for all layers
            found[name] = first
    return found | {name: found[other] for name, other in tied_units(units).items()}


def _torch_name(placement: Placement) -> str:
    device = placement.device
    if device.kind == "cpu":
        return "cpu"
    return f"{_NAMES.get(device.backend, device.backend)}:{device.index}"
