"""An array of any engine is a leaf of any tree, and comes back in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anydevice._arrays.trees.tree import flatten
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._machine.engines.registry import owner_of


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Layer:
    weight: Any
    name: str


def is_array(value: Any) -> bool:
    return owner_of(value) is not None


def test_arrays_are_leaves_and_containers_are_made_anew(engine: Engine, device: Device) -> None:
    first, second, third = (
        engine.place(np.full(3, value, np.float32), device) for value in (1, 2, 3)
    )
    tree = {
        "layers": [Layer(first, "a"), Layer(second, "b")],
        "tied": Pair(first, {"x": (third, "text", 1.5)}),
    }
    leaves, rebuild = flatten(tree, is_array)
    assert [leaf.path for leaf in leaves] == [
        "['layers'][0].weight",
        "['layers'][1].weight",
        "['tied'].second['x'][0]",
    ]
    for leaf, array in zip(leaves, (first, second, third), strict=True):
        assert leaf.value is array
    new = rebuild(["one", "two", "three"])
    assert new == {
        "layers": [Layer("one", "a"), Layer("two", "b")],
        "tied": Pair("one", {"x": ("three", "text", 1.5)}),
    }
    assert tree["layers"][0].weight is first
