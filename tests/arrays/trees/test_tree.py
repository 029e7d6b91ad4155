"""Trees of standard containers: what is a leaf, what comes back, what is refused."""

from __future__ import annotations

import enum
import time
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydevice._arrays.trees import containers
from anydevice._arrays.trees.rules import Rule, SubclassRule
from anydevice._arrays.trees.tree import flatten
from anydevice.errors import TransferError
from tests.programs import output_of


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def paths(tree: object) -> list[str]:
    return [leaf.path for leaf in flatten(tree, is_array)[0]]


def doubled(tree: Any) -> Any:
    leaves, rebuild = flatten(tree, is_array)
    return rebuild([leaf.value * 2 for leaf in leaves])


def one(value: float = 1.0) -> np.ndarray:
    return np.full(2, value)


class Pair(NamedTuple):
    left: Any
    right: Any = None


class Tagged(Pair):
    """A named tuple that also has attributes."""


class Order(OrderedDict):  # type: ignore[type-arg]
    def __setitem__(self, key: object, value: object) -> None:
        raise AssertionError("the subclass's own way of setting items is not used")

    def __init__(self, **given: object) -> None:
        for key, value in given.items():
            OrderedDict.__setitem__(self, key, value)
        self.extra = one(5)


class Stack(list):  # type: ignore[type-arg]
    __slots__ = ("name",)


class Recent(deque):  # type: ignore[type-arg]
    pass


class Colour(enum.Enum):
    RED = 1


def test_a_bare_array_has_an_empty_path() -> None:
    leaves, rebuild = flatten(one(), is_array)
    assert [leaf.path for leaf in leaves] == [""]
    assert rebuild(["other"]) == "other"
    assert repr(leaves[0]) == "Leaf('', numpy.ndarray)"


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"weight": [one(), "x", one()]}, ["['weight'][0]", "['weight'][2]"]),
        ({1: one(), ("a", 2): one()}, ["[1]", "[('a', 2)]"]),
        (Pair(one(), (one(),)), ["left", "right[0]"]),
        (deque([one()]), ["[0]"]),
        (MappingProxyType({"a": one()}), ["['a']"]),
        (UserDict({"a": [one()]}), ["['a'][0]"]),
        (UserList([one()]), ["[0]"]),
        (ChainMap({"a": one()}), ["maps[0]['a']"]),
        (SimpleNamespace(a=SimpleNamespace(b=one())), ["a.b"]),
        (Order(a=one()), ["['a']", "extra"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_paths_read_like_python(tree: object, expected: list[str]) -> None:
    assert paths(tree) == expected


@pytest.mark.parametrize(
    "value",
    [
        *("text", b"bytes", 3, 2.5, True, None, 1j, range(3), slice(1), ..., len, np, int),
        *({1, 2}, frozenset((1,)), Colour.RED, (lambda: 0), np.float32, np.float32(1), object()),
        *(np.random.default_rng(0), [], {}, (), iter([1]), Counter("aab"), dict.fromkeys("ab")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_no_array_is_the_same_object(value: object) -> None:
    leaves, rebuild = flatten({"value": value, "array": one()}, is_array)
    assert [leaf.path for leaf in leaves] == ["['array']"]
    assert rebuild([one()])["value"] is value
    alone, again = flatten(value, is_array)
    assert list(alone) == []
    assert again([]) is value


def test_every_container_that_holds_an_array_is_made_anew_even_if_nothing_changes() -> None:
    tree = {"a": [one()], "b": {"c": {"no": "array"}}}
    leaves, rebuild = flatten(tree, is_array)
    new = rebuild([leaf.value for leaf in leaves])
    assert new is not tree
    assert new["a"] is not tree["a"]
    assert new["a"][0] is tree["a"][0]  # type: ignore[index]
    assert new["b"] is tree["b"]


def test_the_order_of_keys_is_kept() -> None:
    tree = OrderedDict(z=one(), a=one(2), m="text")
    tree.move_to_end("z")
    new = doubled(tree)
    assert type(new) is OrderedDict
    assert list(new) == ["a", "m", "z"]
    assert new["z"].tolist() == [2, 2]
    assert list(doubled({"z": one(), "a": one()})) == ["z", "a"]


def test_standard_containers_keep_what_makes_them_special() -> None:
    tree = defaultdict(list, {"a": [one()]})
    new = doubled(tree)
    assert type(new) is defaultdict
    assert new["new"] == []
    assert "new" not in tree
    new = doubled(Recent([one(0), one(1)], maxlen=2))
    assert type(new) is Recent
    new.append("last")
    assert len(new) == 2
    assert new[0].tolist() == [2, 2]
    proxy = doubled(MappingProxyType({"a": one()}))
    assert isinstance(proxy, MappingProxyType)
    assert proxy["a"].tolist() == [2, 2]


def test_named_tuples_keep_their_class_and_their_attributes() -> None:
    tree = Tagged(one(), "b")
    tree.note = one(3)  # type: ignore[attr-defined]
    assert paths(tree) == ["left", "note"]
    new = doubled(tree)
    assert type(new) is Tagged
    assert new.right == "b"
    assert new.note.tolist() == [6, 6]

    kind = type("Row", (tuple,), {})
    new = doubled(kind((one(), 1)))
    assert type(new) is kind
    assert paths(new) == ["[0]"]
    now = time.localtime()
    assert flatten([now, one()], is_array)[1]([one()])[0] is now
    filled = time.struct_time((one(), *now[1:]))
    assert paths(filled) == ["tm_year"]
    new = doubled(filled)
    assert type(new) is time.struct_time
    assert new.tm_year.tolist() == [2, 2]


def test_subclasses_of_dict_and_list_keep_what_they_hold_beside_their_items() -> None:
    new = doubled(Order(b=one(), a=one()))
    assert type(new) is Order
    assert list(new) == ["b", "a"]
    assert new.extra.tolist() == [10, 10]
    stack = Stack([one()])
    assert type(doubled(stack)) is Stack  # with a slot that was never filled
    stack.name = "top"
    assert doubled(stack).name == "top"


def test_what_occurs_twice_stays_one() -> None:
    array = one()
    leaves, rebuild = flatten({"a": array, "b": [array]}, is_array)
    assert [leaf.path for leaf in leaves] == ["['a']"]
    new = rebuild([one(2)])
    assert new["a"] is new["b"][0]
    shared = [one()]
    new = doubled({"a": shared, "b": {"c": shared}})
    assert new["a"] is new["b"]["c"]
    assert new["a"] is not shared


def many(change: Callable[[list[Any]], Any]) -> Any:
    return change([one(index) for index in range(40)])


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        (many(list), 40),
        (many(lambda arrays: [*arrays, arrays[3]]), 40),
        (many(lambda arrays: [arrays[5], arrays, tuple(arrays)]), 40),
        (many(lambda arrays: [*arrays, "text"]), 40),
        (many(lambda arrays: [np.float32(1), *arrays[:20], None]), 20),
        ([object() for _ in range(40)], 0),
        ([[one(index)] for index in range(40)], 40),
        ([np.ma.masked_array(one()) for _ in range(40)], 40),
    ],
    ids=["all", "twice", "seen before", "mixed", "other types", "none", "containers", "subclass"],
)
def test_many_parts_at_once(tree: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, rebuild = flatten(tree, is_array)
    new = rebuild([leaf.path for leaf in leaves])
    monkeypatch.setattr("anydevice._arrays.trees.tree._MANY", 10**9)
    one_by_one, rebuild = flatten(tree, is_array)
    assert len(leaves) == count
    assert [leaf.path for leaf in leaves] == [leaf.path for leaf in one_by_one]
    assert all(a.value is b.value for a, b in zip(leaves, one_by_one, strict=True))
    assert new == rebuild([leaf.path for leaf in one_by_one])


def test_sharing_is_not_walked_through_again_and_again() -> None:
    tree: Any = ["no array"]
    other: Any = [one()]
    for _ in range(200):  # 2²⁰⁰ ways lead to the bottom
        tree, other = [tree, tree], [other, other]
    leaves, rebuild = flatten([tree, other], is_array)
    assert len(leaves) == 1
    assert rebuild([1])[0] is tree


def test_ten_thousand_levels_are_no_obstacle() -> None:
    tree: Any = one()
    for _ in range(10_000):
        tree = [tree]
    leaves, rebuild = flatten(tree, is_array)
    assert leaves[0].path == "[0]" * 10_000
    new = rebuild(["bottom"])
    for _ in range(10_000):
        (new,) = new
    assert new == "bottom"


def test_a_tree_that_holds_itself_is_refused_by_name() -> None:
    tree: dict[str, Any] = {"layers": [{"weight": one()}]}
    tree["layers"][0]["parent"] = tree
    with pytest.raises(
        TransferError, match=r"^\['layers'\]\[0\]\['parent'\]: the tree contains .*\(dict at the r"
    ) as caught:
        flatten(tree, is_array)
    assert caught.value.path == "['layers'][0]['parent']"
    tree["layers"][0]["parent"] = tree["layers"]
    with pytest.raises(TransferError, match=r"\(list at \['layers'\]"):
        flatten(tree, is_array)

    alone: list[Any] = []
    alone.append(alone)
    with pytest.raises(TransferError, match=r"^\[0\]: the tree contains .*\(list at the root"):
        flatten(alone, is_array)


def test_parts_made_on_the_fly_are_not_taken_for_one_another() -> None:
    class Fresh:
        """Hands out lists that nobody else keeps, so that their identities are used again."""

        def __init__(self, values: list[Any]) -> None:
            self.values = values

    containers.register_type(
        Fresh,
        flatten=lambda fresh: {str(index): [value] for index, value in enumerate(fresh.values)},
        rebuild=lambda fresh, parts: Fresh([part[0] for part in parts.values()]),
    )
    tree = [Fresh(["a", object(), one(index), object()]) for index in range(50)]
    new = doubled(tree)
    assert [fresh.values[2][0] for fresh in new] == [2 * index for index in range(50)]
    assert paths(tree)[:2] == ["[0][2][0]", "[1][2][0]"]


def test_the_table_of_known_types_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_MOST", 8)
    containers.known.clear()
    for index in range(50):
        assert paths(type(f"Row{index}", (list,), {})([one()])) == ["[0]"]
        assert len(containers.known) <= 8


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rule().take_apart([]),
        lambda: Rule().rebuild([], (), []),
        lambda: SubclassRule(list).make([], (), []),
    ],
)
def test_a_rule_must_say_how(call: Callable[[], object]) -> None:
    with pytest.raises(NotImplementedError):
        call()


def test_walking_a_tree_imports_no_library() -> None:
    code = """
import sys
from dataclasses import dataclass
from anydevice._arrays.trees.tree import flatten
@dataclass
class Box:
    value: object
leaves, rebuild = flatten({"a": [Box(b"x"), object()]}, lambda value: type(value) is object)
assert [leaf.path for leaf in leaves] == ["['a'][1]"], leaves
print(*{"numpy", "torch", "jax", "flax", "mlx", "scipy", "attr", "equinox"} & set(sys.modules))
"""
    assert output_of("-W", "error", "-c", code).split() == []


Arrays = st.integers(0, 9).map(lambda value: np.full(1, value))
Trees = st.recursive(
    Arrays | st.none() | st.text(max_size=3) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=25,
)


@settings(deadline=None, derandomize=True)
@given(Trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    leaves, rebuild = flatten(tree, is_array)
    tags = [("leaf", index) for index in range(len(leaves))]
    by_identity = {id(leaf.value): tag for leaf, tag in zip(leaves, tags, strict=True)}
    assert rebuild(tags) == mapped(tree, lambda array: by_identity[id(array)])


@settings(deadline=None, derandomize=True)
@given(Trees)
def test_a_path_leads_to_its_leaf(tree: Any) -> None:
    for leaf in flatten(tree, is_array)[0]:
        steps = leaf.path if leaf.path.startswith("[") or not leaf.path else f".{leaf.path}"
        assert eval(f"tree{steps}", {"tree": tree}) is leaf.value


def mapped(tree: Any, change: Callable[[np.ndarray], Any]) -> Any:
    """The plainest definition of what rebuilding does."""
    if isinstance(tree, np.ndarray):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, Pair):
        return Pair(*(mapped(value, change) for value in tree))
    if isinstance(tree, list | tuple | deque):
        return type(tree)(mapped(value, change) for value in tree)
    return tree


def test_leaves_are_a_sequence_of_a_fixed_length() -> None:
    leaves, rebuild = flatten([one() for _ in range(20)], is_array)
    assert [leaf.path for leaf in list(leaves)[2:5]] == ["[2]", "[3]", "[4]"]
    assert leaves[-1].path == "[19]"
    assert len(leaves.values) == len(leaves) == 20
    with pytest.raises(ValueError, match="20 arrays, and 1 were given"):
        rebuild([1])
