"""Layers on several devices: every layer once, nothing over its memory, no better way left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest

from anydevice._plan.plan import LayeredModel, MemoryParts, fill, holds_all, spread


def layered(count: int, **others: Any) -> LayeredModel:
    return LayeredModel((10,) * count, (2,) * count, **others)


def some_way(model: LayeredModel, budgets: Sequence[int]) -> bool:
    """Whether any cut of the layers goes into the budgets in their order; every one is tried."""
    for cuts in combinations_with_replacement(range(model.count + 1), len(budgets) - 1):
        stops = (0, *cuts, model.count)
        needs = [model.on(range(*pair)).total for pair in pairwise(stops)]
        if all(need <= budget for need, budget in zip(needs, budgets, strict=True)):
            return True
    return False


def test_the_parts_of_the_first_and_the_last_device() -> None:
    model = layered(4, first=7, last=5, activations=3, logits=4, overhead=lambda cache: cache // 4)
    assert model.on(range(4)) == MemoryParts(52, 8, 3, 4, 2)
    assert model.on(range(2)) == MemoryParts(27, 4, 3, 0, 1)
    assert model.on(range(1, 3)) == MemoryParts(20, 4, 3, 0, 1)
    assert model.on(range(3, 4)) == MemoryParts(15, 2, 3, 4, 0)
    assert model.on(range(2, 2)) == MemoryParts(0, 0, 0, 0, 0)
    assert model.on(range(4), cpu=True) == MemoryParts(52, 8, 3, 4, 0)
    assert model.on(range(2)).to_dict()["total"] == 35


def test_a_tied_head_is_a_copy_only_where_the_embedding_is_elsewhere() -> None:
    model = layered(2, first=7, tied=7)
    assert model.on(range(2)).weights == 27
    assert model.on(range(1)).weights + model.on(range(1, 2)).weights == 34


def test_a_model_without_layers_is_one_piece() -> None:
    model = LayeredModel((), (), first=9, last=1, logits=2)
    assert (model.count, model.on(range(1)).total) == (1, 12)
    assert holds_all(model, fill(model, [12]))
    assert fill(model, [11]) == []


@pytest.mark.parametrize("seed", range(60))
def test_filling_finds_a_way_wherever_there_is_one(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    first = draw.randint(0, 9)
    share = draw.randint(1, 4)
    model = LayeredModel(
        [draw.randint(1, 9) for _ in range(count)],
        [draw.randint(0, 4) for _ in range(count)],
        first=first,
        last=draw.randint(0, 9),
        tied=draw.choice((0, first)),
        activations=draw.randint(0, 3),
        logits=draw.randint(0, 3),
        overhead=lambda cache: cache // share,
    )
    budgets = [draw.randint(0, 40) for _ in range(draw.randint(1, 4))]
    filled = fill(model, budgets)
    assert holds_all(model, filled) == some_way(model, budgets)
    assert all(model.on(each.layers).total <= budgets[each.slot] for each in filled)
    ends = [each.layers.stop for each in filled]
    assert [each.layers.start for each in filled] == [0, *ends][: len(ends)]
    even = spread(model, budgets)
    assert (even is not None) == holds_all(model, filled)
    if even is not None:
        assert holds_all(model, even)
        assert all(model.on(each.layers).total <= budgets[each.slot] for each in even)


def test_spreading_leaves_the_fullest_device_more_room_than_filling() -> None:
    model, budgets = layered(12, activations=1), (200, 100)
    fullest = [
        max(model.on(each.layers).total / budgets[each.slot] for each in ways)
        for ways in (fill(model, budgets), spread(model, budgets) or ())
    ]
    assert fullest[1] < 0.6 < fullest[0]


def test_a_device_that_is_too_small_is_passed_over() -> None:
    filled = fill(layered(4), [30, 5, 30])
    assert [(each.slot, len(each.layers)) for each in filled] == [(0, 2), (2, 2)]
