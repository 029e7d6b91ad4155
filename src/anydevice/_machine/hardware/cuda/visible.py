"""The cards that CUDA_VISIBLE_DEVICES shows and their order, as CUDA itself reads it.

The rules for odd values (spaces, capitals, numbers with a tail, repeated cards) are those that a
driver of version 580 was seen to follow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anydevice._core.record import Record

VISIBLE = "CUDA_VISIBLE_DEVICES"

_LEADING_NUMBER = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_OLD_MIG_NAME = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d+)/(\d+)")


class InstanceNames(Record):
    """A MIG instance by its names: the UUID, and the numbers that old drivers go by."""

    uuid: str | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


class CardNames(Record):
    """A card by its names; with MIG mode on, CUDA shows its instances and never the card."""

    uuid: str | None
    mig: bool = False
    instances: tuple[InstanceNames, ...] = ()


class Position(Record):
    """A position in the list of cards, and in a card's instances where MIG mode is on."""

    card: int
    instance: int | None = None


class Selection(Record):
    """The visible devices in CUDA's order; `problem` says why an entry was refused."""

    positions: tuple[Position, ...]
    problem: str | None = None


def select(cards: Sequence[CardNames], value: str | None) -> Selection:
    """Return the visible ones of `cards`, in CUDA's order; `value` is the variable's, if set.

    The first entry that names nothing ends the list, and what stands before it stays. A card that
    is named twice leaves none. Where a MIG instance is visible, it is the only device.

    >>> cards = [CardNames("GPU-f425bb54"), CardNames("GPU-a0b1c2d3")]
    >>> select(cards, "1,0").positions
    (Position(card=1, instance=None), Position(card=0, instance=None))
    >>> select(cards, "GPU-f4,7").problem
    '"7" is not a UUID like the first entry'
    """
    if value is None:
        every = [_first_instance(index, card) for index, card in enumerate(cards)]
        return Selection(
            _one_instance_at_most([position for position in every if position is not None])
        )
    by_uuid = _is_uuid(value)
    positions: list[Position] = []
    for entry in value.split(","):
        match = _by_uuid(entry, cards) if by_uuid else _by_index(entry, cards)
        if isinstance(match, str):
            return Selection(_one_instance_at_most(positions), match)
        if match in positions:
            return Selection((), f'"{entry.strip()}" names a card that is named before')
        positions.append(match)
    return Selection(_one_instance_at_most(positions))


def _is_uuid(entry: str) -> bool:
    return entry.startswith(("GPU-", "MIG-"))


def _by_index(entry: str, cards: Sequence[CardNames]) -> Position | str:
    # CUDA reads the leading number and passes over what follows it.
    match = _LEADING_NUMBER.match(entry)
    if match is None:
        return f'"{entry.strip()}" is not an index' if entry.strip() else "an entry is empty"
    number = int(match[1])
    # CUDA reads an unsigned 64-bit number, the largest where it overflows, and keeps 32 bits.
    index = -1 if abs(number) >= 2**64 else (number + 2**31) % 2**32 - 2**31
    if index < 0:
        return f'"{entry.strip()}" ends the list'
    if index >= len(cards):
        return f'"{entry.strip()}" is past the last card, {len(cards) - 1}'
    return _first_instance(index, cards[index]) or f"card {index} has MIG mode on and no instance"


def _by_uuid(entry: str, cards: Sequence[CardNames]) -> Position | str:
    if not _is_uuid(entry):
        return f'"{entry}" is not a UUID like the first entry'
    old = _OLD_MIG_NAME.fullmatch(entry)
    if old is not None:
        return _by_old_name(entry, old, cards)
    matching = [position for position, uuid in _names(cards) if _fits(entry, uuid)]
    if not matching:
        return f'no card has the UUID "{entry}"'
    if len(matching) > 1:
        return f'"{entry}" fits {len(matching)} cards'
    position = matching[0]
    if position.instance is not None:
        return position
    return _first_instance(position.card, cards[position.card]) or f'"{entry}" has no MIG instance'


def _fits(entry: str, uuid: str) -> bool:
    # Capital digits, and characters after a whole UUID, make no difference to CUDA; and "MIG-"
    # goes before the digits of a whole card too.
    wanted, digits = entry[4:].lower(), uuid[4:].lower()
    if entry.startswith("GPU-") and not uuid.startswith("GPU-"):
        return False
    return bool(wanted) and (digits.startswith(wanted) or wanted.startswith(digits))


def _by_old_name(entry: str, old: re.Match[str], cards: Sequence[CardNames]) -> Position | str:
    numbers = (int(old[2]), int(old[3]))
    for index, card in enumerate(cards):
        if card.uuid is None or card.uuid.lower() != old[1].lower():
            continue
        for number, instance in enumerate(card.instances):
            if (instance.gpu_instance, instance.compute_instance) == numbers:
                return Position(index, number)
    return f'no MIG instance is "{entry}"'


def _names(cards: Sequence[CardNames]) -> list[tuple[Position, str]]:
    names = []
    for index, card in enumerate(cards):
        if card.uuid is not None:
            names.append((Position(index), card.uuid))
        for number, instance in enumerate(card.instances):
            if instance.uuid is not None:
                names.append((Position(index, number), instance.uuid))
    return names


def _first_instance(index: int, card: CardNames) -> Position | None:
    if not card.mig:
        return Position(index)
    return Position(index, 0) if card.instances else None


def _one_instance_at_most(positions: list[Position]) -> tuple[Position, ...]:
    for position in positions:
        if position.instance is not None:
            return (position,)
    return tuple(positions)
