"""Records: values with named fields that do not change."""

from __future__ import annotations

import copy
import pickle

import pytest

from anydevice import Config
from anydevice.core.record import NOTHING, Record, as_dict, replace


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
    ("values", "named"),
    [
        ((), {}),
        (("a", 1, (), 2), {}),
        (("a",), {"memry": 1}),
        (("a",), {"name": "b"}),
        ((), {"memory": 1}),
    ],
)
def test_a_wrong_call_is_a_type_error(values: tuple[object, ...], named: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"Card\(name, memory, notes\)"):
        Card(*values, **named)  # type: ignore[arg-type]


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
