"""Trees of classes: dataclasses, attrs, and what a user registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, InitVar, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from anydevice._arrays.trees import containers
from anydevice._arrays.trees.containers import register_type
from anydevice._arrays.trees.tree import flatten
from anydevice.errors import ConfigurationError, TransferError
from tests.arrays.trees.test_tree import doubled, is_array, one, paths


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(containers, "_registered", {})
    containers.known.clear()
    yield
    containers.known.clear()


@dataclass
class Layer:
    weight: Any
    scale: InitVar[float]
    bias: Any = None
    settings: Any = field(default_factory=dict)
    total: Any = field(init=False)
    kind: ClassVar[str] = "layer"

    def __post_init__(self, scale: float) -> None:
        self.total = self.weight.sum() * scale
        self.made = getattr(self, "made", 0) + 1


@dataclass(frozen=True, slots=True)
class Point:
    position: Any
    name: str = "point"


@dataclass(frozen=True)
class Both(Point):
    """A class with slots and a `__dict__`."""

    extra: Any = None


def test_a_dataclass_is_made_again_without_its_init() -> None:
    layer = Layer(one(), 3.0, bias=[one(2)])
    assert paths(layer) == ["weight", "bias[0]"]
    new = doubled(layer)
    assert type(new) is Layer
    assert new.weight.tolist() == [2, 2]
    assert new.bias[0].tolist() == [4, 4]
    assert new.total == 6.0  # computed when the object was made, and kept
    assert new.made == 1
    assert new.settings is layer.settings
    assert layer.weight.tolist() == [1, 1]


def test_a_field_that_was_never_set_stays_unset() -> None:
    layer = object.__new__(Layer)
    layer.weight = one()
    new = doubled(layer)
    assert vars(new).keys() == {"weight"}


def test_a_frozen_dataclass_with_slots_is_no_obstacle() -> None:
    new = doubled([Point(one())])[0]
    assert type(new) is Point
    assert new.position.tolist() == [2, 2]
    assert new.name == "point"
    with pytest.raises(FrozenInstanceError):
        new.name = "other"
    both = Both(one(), extra={"a": one(3)})  # slots and other attributes together
    assert vars(both).keys() == {"extra"}
    assert paths(both) == ["position", "extra['a']"]
    new = doubled(both)
    assert new.position.tolist() == [2, 2]
    assert new.extra["a"].tolist() == [6, 6]


def test_what_a_dataclass_holds_beside_its_fields_moves_too() -> None:
    @dataclass
    class Lazy:
        rows: Any

        @cached_property
        def mean(self) -> np.ndarray:
            return self.rows.mean(keepdims=True)

    lazy = Lazy(one())
    assert lazy.mean.tolist() == [1]
    assert paths(lazy) == ["rows", "mean"]
    assert doubled(lazy).mean.tolist() == [2]


def test_a_default_that_the_class_holds_moves_with_the_object() -> None:
    class Hashable(np.ndarray):
        __hash__ = object.__hash__

    @dataclass
    class Shifted:
        offset: Any = field(init=False, default=one().view(Hashable))

    shifted = Shifted()
    assert "offset" not in vars(shifted)
    new = doubled(shifted)
    assert new.offset.tolist() == [2, 2]
    assert shifted.offset.tolist() == [1, 1]


@pytest.mark.parametrize("metadata", [{"static": True}, {"pytree_node": False}])
def test_a_static_field_is_left_alone(metadata: dict[str, bool]) -> None:
    @dataclass
    class Module:
        weight: Any
        table: Any = field(metadata=metadata)

    module = Module(one(), one())
    assert paths(module) == ["weight"]
    assert doubled(module).table is module.table


def test_an_array_type_that_is_a_dataclass_is_an_array() -> None:
    @dataclass
    class Tensor:
        data: Any

    leaves, rebuild = flatten([Tensor(one())], lambda value: isinstance(value, Tensor))
    assert [leaf.path for leaf in leaves] == ["[0]"]
    assert rebuild(["moved"]) == ["moved"]


@attrs.define
class Slotted:
    weight: Any
    name: str = "slotted"
    count: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.count += 1


@attrs.frozen(slots=False)
class Frozen:
    inner: Any


def test_attrs_classes_with_and_without_slots() -> None:
    tree = Frozen(Slotted(one()))
    assert paths(tree) == ["inner.weight"]
    new = doubled(tree)
    assert type(new) is Frozen
    assert new.inner.weight.tolist() == [2, 2]
    assert new.inner.count == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        new.inner = None


def test_a_wrapper_without_a_dict_does_not_show_what_it_wraps() -> None:
    @attrs.define
    class Wrapper:
        inner: Any

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    wrapper = Wrapper(Frozen(one()))
    assert paths(wrapper) == ["inner.inner"]
    assert doubled(wrapper).inner.inner.tolist() == [2, 2]


def test_a_class_that_cannot_be_made_without_its_init_says_what_to_do() -> None:
    @dataclass
    class ProblemError(Exception):
        data: Any

    leaves, rebuild = flatten({"problem": ProblemError(one())}, is_array)
    with pytest.raises(
        TransferError,
        match=r"^\['problem'\]: a .*ProblemError could not be made again: .*register_type",
    ) as caught:
        rebuild([leaf.value for leaf in leaves])
    assert caught.value.path == "['problem']"
    assert isinstance(caught.value.__cause__, TypeError)


class Batch:
    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = images, labels


class SmallBatch(Batch):
    pass


def register_batch() -> None:
    register_type(Batch, parts_of_batch, new_batch)


def parts_of_batch(batch: Batch) -> dict[str, Any]:
    return {"images": batch.images, "0": batch.labels}


def new_batch(batch: Batch, parts: dict[str, Any]) -> Batch:
    return type(batch)(parts["images"], parts["0"])


def test_a_registered_class_and_its_subclasses_move() -> None:
    assert paths(SmallBatch(one(), one())) == []
    register_batch()
    batch = SmallBatch({"first": one()}, one(2))
    assert paths([batch]) == ["[0].images['first']", "[0][0]"]
    new = doubled(batch)
    assert type(new) is SmallBatch
    assert new.images["first"].tolist() == [2, 2]
    assert new.labels.tolist() == [4, 4]


def test_what_a_user_registers_goes_before_our_own_rules() -> None:
    class Unit(np.ndarray):
        pass

    class Colours(dict):  # type: ignore[type-arg]
        pass

    register_type(Unit, lambda unit: {"value": unit.view(np.ndarray)}, lambda unit, parts: "unit")
    register_type(Colours, lambda colours: {}, lambda colours, parts: colours)
    assert paths([one().view(Unit), Colours(red=one())]) == ["[0].value"]


def test_parts_may_have_numbers_for_names() -> None:
    register_type(
        Batch,
        lambda batch: {0: batch.images, 1: batch.labels},  # type: ignore[dict-item]
        lambda batch, parts: list(parts),
    )
    assert paths(Batch(one(), one())) == ["[0]", "[1]"]
    assert doubled(Batch(one(), one())) == [0, 1]


def test_the_same_registration_twice_is_fine_and_another_is_refused() -> None:
    register_batch()
    register_batch()
    with pytest.raises(ConfigurationError, match="Batch is registered already"):
        register_type(Batch, parts_of_batch, lambda batch, parts: batch)
    register_type(SmallBatch, parts_of_batch, lambda batch, parts: "small")
    assert doubled(SmallBatch(one(), 1)) == "small"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Batch", parts_of_batch, new_batch), "takes a class, not 'Batch'"),
        ((dict, parts_of_batch, new_batch), "dict is a built-in type"),
        ((object, parts_of_batch, new_batch), "object is a built-in type"),
        ((Batch, None, new_batch), "flatten must be a function, not None"),
        ((Batch, parts_of_batch, 3), "rebuild must be a function, not 3"),
    ],
)
def test_a_wrong_registration_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        register_type(*arguments)


def test_errors_of_registered_functions_name_the_place() -> None:
    register_type(Batch, lambda batch: [batch.images], new_batch)  # type: ignore[arg-type]
    with pytest.raises(
        TransferError, match=r"^\[1\]: a .*Batch could not be taken apart: .* returned a list"
    ) as caught:
        flatten([0, Batch(one(), 1)], is_array)
    assert caught.value.path == "[1]"

    def fails(batch: Batch, parts: dict[str, Any]) -> Batch:
        raise KeyError("labels")

    register_type(SmallBatch, parts_of_batch, fails)
    with pytest.raises(TransferError, match=r"^the tree: a .*Batch could not be made again: KeyE"):
        doubled(SmallBatch(one(), 1))


def test_our_own_errors_and_a_lack_of_memory_pass_unchanged() -> None:
    def no_memory(batch: Batch, *parts: Any) -> Any:
        raise MemoryError

    register_type(Batch, parts_of_batch, no_memory)
    register_type(SmallBatch, no_memory, no_memory)
    with pytest.raises(MemoryError):
        doubled(Batch(one(), 1))
    with pytest.raises(MemoryError):
        doubled(SmallBatch(one(), 1))


def test_an_object_that_refers_to_its_owner_is_refused_by_name() -> None:
    @dataclass
    class Node:
        children: list[Any]
        parent: Any = None

    root = Node([Node([one()])])
    root.children[0].parent = root
    with pytest.raises(TransferError, match=r"^children\[0\].parent: the tree contains .*\(Node"):
        flatten(root, is_array)
