"""Trees of parameters: the order of leaves, and containers that come back as they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import numpy as np
import pytest

from anydevice._core.trees import difference, first_leaf, leaf_paths, leaves, mapped, refilled


class Pair(NamedTuple):
    first: object
    second: object


TREE = {"b": [1, None, (2,)], "a": Pair(3, {"d": 4, "c": 5}), "e": {}}


def test_leaves_and_paths_come_in_the_order_of_sorted_keys() -> None:
    assert leaves(TREE) == [3, 5, 4, 1, 2]
    paths = ["['a'][0]", "['a'][1]['c']", "['a'][1]['d']", "['b'][0]", "['b'][2][0]"]
    assert leaf_paths(TREE) == paths
    assert first_leaf(TREE) == 3
    assert first_leaf({"a": [None, {}]}) is None


def test_a_rebuilt_tree_has_the_same_containers_and_the_same_order_of_keys() -> None:
    doubled = mapped(lambda leaf: 2 * leaf, TREE)
    assert doubled == {"b": [2, None, (4,)], "a": Pair(6, {"d": 8, "c": 10}), "e": {}}
    assert list(doubled) == ["b", "a", "e"]
    assert type(doubled["a"]) is Pair
    for kept in (OrderedDict(z=1, a=2), defaultdict(list, z=1, a=2)):
        again = refilled(kept, [20, 10])
        assert (type(again), list(again.items())) == (type(kept), [("z", 10), ("a", 20)])
        assert dict(kept) == {"z": 1, "a": 2}
    assert refilled(defaultdict(list, a=1), [2]).default_factory is list


def test_the_wrong_number_of_leaves_is_refused() -> None:
    with pytest.raises(ValueError, match="this tree has 5 leaves, and 2 were given"):
        refilled(TREE, [1, 2])


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ([{"a": np.ones(3)}], None),
        (({"a": np.ones(3, np.int8)},), None),
        ([{"a": np.ones(2)}], r"[0]['a'] has the shape (3,), and (2,) was given"),
        ([{"b": np.ones(3)}], "[0] has a dict of 'a', and a dict of 'b' was given"),
        ([], "the tree has a list of 1, and a list of 0 was given"),
        ([{"a": None}], "[0]['a'] has the shape (3,), and a NoneType was given"),
    ],
)
def test_the_first_difference_of_two_trees(other: object, sentence: str | None) -> None:
    assert difference([{"a": np.ones(3)}], other) == sentence
