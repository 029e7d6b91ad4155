"""Placement of the units of a model, and of a PyTorch module, by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anydevice._libraries.registry import part
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._plan.plan import Placement, Plan

_NAMES = {"rocm": "cuda", "metal": "mps"}
"""Backends to which PyTorch gives another name."""


def planned_units(
    plan: Plan, are_layers: Sequence[bool], parameters: int | None
) -> list[Placement]:
    """Return the placement of each unit of a model, given which of them are layers.

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
    """Return the device of each unit of a module, as transformers and accelerate name both."""
    torch = part("torch", "pipeline")
    units = torch.module_units(module)
    count = sum(x.numel() for x in module.parameters())
    places = planned_units(plan, [is_layer for _, is_layer in units.values()], count)
    found = {name: _torch_name(each) for name, each in zip(units, places, strict=True)}
    first = next(iter(found.values()))
    for name, (unit, is_layer) in units.items():
        if not is_layer and not torch.bytes_of(unit):  # such as rotations, made once for all layers
            found[name] = first
    return found | {name: found[other] for name, other in torch.tied_units(units).items()}


def _torch_name(placement: Placement) -> str:
    device = placement.device
    if device.kind == "cpu":
        return "cpu"
    return f"{_NAMES.get(device.backend, device.backend)}:{device.index}"
