"""CUDA_VISIBLE_DEVICES as CUDA itself reads it."""

from __future__ import annotations

import pytest

from anydevice._core.finding import Facts
from anydevice._machine.hardware.cuda.facts import CudaCard
from anydevice._machine.hardware.cuda.visible import select


def card(uuid: str | None, *instances: Facts, mig: bool = False) -> CudaCard:
    return CudaCard(Facts("card", uuid, details={"mig_mode": mig}), instances)


def instance(uuid: str | None, gpu: int, compute: int) -> Facts:
    numbers = {"gpu_instance": gpu, "compute_instance": compute}
    return Facts("instance", uuid, details={"mig_mode": True, **numbers})


FIRST = "GPU-f425bb54-c4e9-c26e-8ead-eeb33db6c9aa"
SECOND = "GPU-f4a0b1c2-aaaa-4bbb-8ccc-ddddeeeeffff"
THIRD = "GPU-97b1c2d3-aaaa-4bbb-8ccc-ddddeeeeffff"
PLAIN = (card(FIRST), card(SECOND), card(THIRD))

PARENT = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
ONE = instance("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", 1, 0)
TWO = instance("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", 2, 0)
SPLIT, WHOLE = card(PARENT, ONE, TWO, mig=True), card(FIRST)


def shown(value: str | None) -> list[int]:
    uuids = [card.facts.uuid for card in PLAIN]
    return [uuids.index(device.uuid) for device in select(PLAIN, value).devices]


@pytest.mark.parametrize(
    ("value", "cards"),
    [
        (None, [0, 1, 2]),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("\t1", [1]),
        ("+1", [1]),
        ("-0", [0]),
        ("0x1", [0]),
        ("0 1", [0]),
        ("4294967297", [1]),
        ("9999999999999999999999", []),
        ("-9999999999999999999999", []),
        ("-4294967296", [0]),
        ("\u0661", []),
        ("\xa01", []),
        ("01", [1]),
        ("1gpu,2x", [1, 2]),
        ("0,2,-1,1", [0, 2]),
        ("1,9,0", [1]),
        ("0,,1", [0]),
        ("0,nonsense,1", [0]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("-2", []),
        ("9", []),
        ("NoDevFiles", []),
        ("none", []),
        ("0,0", []),
        ("0,1,00", []),
        (FIRST, [0]),
        (f"{THIRD},{FIRST}", [2, 0]),
        ("GPU-97", [2]),
        ("GPU-f425,GPU-9", [0, 2]),
        ("GPU-f4", []),
        ("GPU-97,GPU-f4", [2]),
        ("GPU-", []),
        (FIRST.lower(), []),
        (f"GPU-{FIRST[4:].upper()}", [0]),
        (f" {FIRST}", []),
        (f"{FIRST} ", [0]),
        ("GPU-f425 ", []),
        (f"{FIRST}0", [0]),
        (f"MIG-{FIRST[4:]}", [0]),
        (f"MIG-{FIRST}", []),
        ("GPU-0000", []),
        (f"{FIRST},{FIRST}", []),
        (f"{FIRST},GPU-f425", []),
        (f"{FIRST},1", [0]),
        (f"1,{FIRST}", [1]),
    ],
)
def test_what_a_value_shows(value: str | None, cards: list[int]) -> None:
    assert shown(value) == cards


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "an entry is empty"),
        ("9", '"9" is past the last card, 2'),
        ("-1", '"-1" ends the list'),
        ("x", '"x" is not an index'),
        ("0,0", '"0" names a card that is named before'),
        ("GPU-f4", '"GPU-f4" fits 2 cards'),
        ("GPU-0000", 'no card has the UUID "GPU-0000"'),
        (f"{FIRST},1", '"1" is not a UUID like the first entry'),
        (f"MIG-{FIRST}", f'no card has the UUID "MIG-{FIRST}"'),
        ("MIG-GPU-0/1/0", 'no MIG instance is "MIG-GPU-0/1/0"'),
    ],
)
def test_why_an_entry_is_refused(value: str, problem: str) -> None:
    assert select(PLAIN, value).problem == problem


def test_a_good_value_has_no_problem() -> None:
    assert select(PLAIN, "2,0").problem is None
    assert select(PLAIN, None).problem is None


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        (None, (ONE,)),
        ("0", (ONE,)),
        ("1", (WHOLE.facts,)),
        ("1,0", (ONE,)),
        (PARENT, (ONE,)),
        ("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", (TWO,)),
        ("MIG-cba", (TWO,)),
        ("MIG-c6d4f1ef,MIG-cba663e8", (ONE,)),
        (f"MIG-{PARENT}/2/0", (TWO,)),
        (f"MIG-{PARENT}/7/0", ()),
        ("MIG-c", ()),
        ("GPU-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", ()),
        ("MIG-0", ()),
    ],
)
def test_a_process_sees_one_instance_only(value: str | None, devices: tuple[Facts, ...]) -> None:
    assert select((SPLIT, WHOLE), value).devices == devices


def test_mig_mode_without_an_instance_shows_nothing_of_that_card() -> None:
    empty = card(PARENT, mig=True)
    assert select((empty, WHOLE), None).devices == (WHOLE.facts,)
    assert select((empty,), None).devices == ()
    assert select((empty,), "0").problem == "card 0 has MIG mode on and no instance"
    assert select((empty,), PARENT).problem == f'"{PARENT}" has no MIG instance'


def test_cards_and_instances_without_a_uuid_are_named_by_number_alone() -> None:
    part = instance(None, 1, 0)
    nameless = (card(None), card(PARENT, part, mig=True))
    assert select(nameless, "0").devices == (nameless[0].facts,)
    assert select(nameless, f"MIG-{PARENT}/1/0").devices == (part,)
    assert select(nameless, "MIG-1").devices == ()
