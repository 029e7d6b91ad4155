"""Records: values with named fields that do not change."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
from typing import Any

import pytest

from anydevice import Config
from anydevice._core.record import NOTHING, Record, as_dict, replace
from tests.programs import output_of


class Card(Record):
    name: str
    memory: int = 8
    notes: tuple[str, ...] = ()


class Shared(Card):
    owner: str = "nobody"


def test_fields_come_in_their_order_and_have_defaults() -> None:
    card = Card("a", notes=("x",))
    assert (card.name, card.memory, card.notes) == ("a", 8, ("x",))
    assert as_dict(card) == {"name": "a", "memory": 8, "notes": ("x",)}
    assert Shared("a", owner="me") == Shared("a", 8, (), "me")
    assert repr(Shared("a")) == "Shared(name='a', memory=8, notes=(), owner='nobody')"


@pytest.mark.parametrize(
    ("values", "named", "said"),
    [
        ((), {}, "Card needs name"),
        (("a", 1, (), 2), {}, "Card got 4 values"),
        (("a",), {"memry": 1, "size": 2}, "Card has no memry (did you mean 'memory'?) and size"),
        (("a",), {"name": "b"}, "Card got name twice"),
        ((), {"memory": 1}, "Card needs name"),
        ((), {"label": 1}, "Card needs name, has no label"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(values: Any, named: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        Card(*values, **named)
    assert str(caught.value) == f"{said}; it takes name, memory, notes"

    class Empty(Record):
        pass

    with pytest.raises(TypeError, match="Empty got 1 values; it takes nothing"):
        Empty(1)


def test_a_field_that_a_subclass_repeats_is_one_field() -> None:
    class Large(Card):
        memory: int = 80
        cores: int = 4

    assert Large("a", 40, (), 2) == Large("a", memory=40, cores=2)
    assert Large("a").memory == 80
    assert list(as_dict(Large("a"))) == ["name", "memory", "notes", "cores"]


def test_the_signature_is_that_of_the_fields() -> None:
    assert str(inspect.signature(Card)) == (
        "(name: 'str', memory: 'int' = 8, notes: 'tuple[str, ...]' = ())"
    )
    assert list(inspect.signature(Shared).parameters) == ["name", "memory", "notes", "owner"]
    assert "Card(name: 'str', memory: 'int' = 8" in pydoc.render_doc(Card)


def test_the_signature_of_a_class_with_its_own_way_to_be_made() -> None:
    class Forwarding(Card):
        def __init__(self, *values: object, **named: object) -> None:
            super().__init__(*values, **named)  # type: ignore[arg-type]

    class Sheet(Record):
        cells: tuple[int, ...]

        def __init__(self, *given: int) -> None:
            super().__init__(given)

    assert list(inspect.signature(Forwarding).parameters) == ["name", "memory", "notes"]
    assert str(inspect.signature(Sheet)) == "(*given: 'int')"


def test_what_must_be_given_behind_what_need_not_is_shown_by_name() -> None:
    class Named(Card):
        owner: str  # type: ignore[misc]
        floor: int = 0

    assert str(inspect.signature(Named)).endswith("= (), *, owner: 'str', floor: 'int' = 0)")
    assert Named("a", owner="me").floor == 0


def test_the_signature_of_a_record_that_can_be_called_is_that_of_its_call() -> None:
    class Twice(Record):
        factor: int = 2

        def __call__(self, number: int) -> int:
            return number * self.factor

    assert str(inspect.signature(Twice())) == "(number: 'int') -> 'int'"
    assert str(inspect.signature(Twice)) == "(factor: 'int' = 2)"


def test_a_class_of_records_is_made_without_inspecting_anything() -> None:
    made = "from anydevice._core.record import Record\nclass A(Record):\n    x: int = 0\nA(1)\n"
    asked = made + "import sys; print('inspect' in sys.modules)"
    assert output_of("-c", asked) == "False\n"


def test_it_does_not_change() -> None:
    card = Card("a")
    with pytest.raises(AttributeError, match="memory cannot be set"):
        card.memory = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="memory cannot be deleted"):
        del card.memory
    assert replace(card, memory=3) == Card("a", 3)
    assert card.memory == 8
    with pytest.raises(TypeError):
        NOTHING["x"] = 1  # type: ignore[index]


def test_equality_and_hash_go_by_class_and_fields() -> None:
    assert Card("a") == Card("a")
    assert Card("a") != Card("b")
    assert Card("a") != Shared("a")
    assert Card("a") != ("a", 8, ())
    assert len({Card("a"), Card("a"), Card("b")}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Card(["a"]))  # type: ignore[arg-type]


def test_it_survives_pickling_and_copying() -> None:
    card = Card("a", 3, ("x",))
    assert pickle.loads(pickle.dumps(card)) == card
    assert copy.deepcopy(card) == card
    config = Config()  # one of its fields is a read-only view
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
