"""Updates of parameters on several devices, one device after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anydevice._core.device import Device
from anydevice._core.trees import Tree, combined, leaves, partition
from anydevice._machine.engines.registry import owner_of


def home_of(x: Any) -> Device:
    """Return the device of an array, served by its engine."""
    owner = owner_of(x)
    assert owner is not None
    return owner.devices_of(x)[0].served_by(owner.name)


def device_masks(tree: Tree) -> list[list[bool]]:
    """Return a mask for each device: whether each leaf of a tree is on it."""
    homes = [home_of(x) for x in leaves(tree)]
    return [[home == device for home in homes] for device in dict.fromkeys(homes)]


def update_by_device(
    update: Callable[..., Any],
    masks: Sequence[Sequence[bool]],
    trees: tuple[Tree, Tree, Mapping[str, Tree]],
    step: int,
    rate: float,
) -> tuple[Any, Any]:
    """Update `trees`: parameters and state, given gradients in between, device by device."""
    parameters, gradients, state = trees
    if len(masks) == 1:
        return update(parameters, gradients, state, step, rate)
    results: list[Any] = [None, None]
    for mask in masks:
        own, slopes = (partition(tree, mask)[0] for tree in (parameters, gradients))
        own_state = {name: partition(tree, mask)[0] for name, tree in state.items()}
        moved = update(own, slopes, own_state, step, rate)
        results = [combined(before, after) for before, after in zip(results, moved, strict=True)]
    return results[0], results[1]
