"""The cards that CUDA_VISIBLE_DEVICES shows and their order, as CUDA itself reads it.

The rules for odd values (spaces, capitals, numbers with a tail, repeated cards) are those that a
driver of version 580 was seen to follow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from anydevice._core.finding import Facts
from anydevice._machine.hardware.cuda.facts import CudaCard

VISIBLE = "CUDA_VISIBLE_DEVICES"

_LEADING_NUMBER = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_OLD_MIG_NAME = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d+)/(\d+)")


class Selection(NamedTuple):
    """The visible devices in CUDA's order; `problem` says why an entry was refused."""

    devices: tuple[Facts, ...]
    problem: str | None = None


def select(cards: Sequence[CudaCard], value: str | None) -> Selection:
    """Return the visible devices of `cards`, in CUDA's order; `value` is the variable's, if set."""
    if value is None:
        return Selection(_one_instance_at_most([card.shown[0] for card in cards if card.shown]))
    by_uuid = _is_uuid(value)
    devices: list[Facts] = []
    for entry in value.split(","):
        match = _by_uuid(entry, cards) if by_uuid else _by_index(entry, cards)
        if isinstance(match, str):
            return Selection(_one_instance_at_most(devices), match)
        if any(match is device for device in devices):
            return Selection((), f'"{entry.strip()}" names a card that is named before')
        devices.append(match)
    return Selection(_one_instance_at_most(devices))


def _is_uuid(entry: str) -> bool:
    return entry.startswith(("GPU-", "MIG-"))


def _by_index(entry: str, cards: Sequence[CudaCard]) -> Facts | str:
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
    shown = cards[index].shown
    return shown[0] if shown else f"card {index} has MIG mode on and no instance"


def _by_uuid(entry: str, cards: Sequence[CudaCard]) -> Facts | str:
    if not _is_uuid(entry):
        return f'"{entry}" is not a UUID like the first entry'
    old = _OLD_MIG_NAME.fullmatch(entry)
    if old is not None:
        return _by_old_name(entry, old, cards)
    matching = [
        (card, facts)
        for card in cards
        for facts in (card.facts, *card.instances)
        if facts.uuid is not None and _fits(entry, facts.uuid)
    ]
    if not matching:
        return f'no card has the UUID "{entry}"'
    if len(matching) > 1:
        return f'"{entry}" fits {len(matching)} cards'
    [(card, facts)] = matching
    if facts is not card.facts:
        return facts
    return card.shown[0] if card.shown else f'"{entry}" has no MIG instance'


def _fits(entry: str, uuid: str) -> bool:
    # Capital digits, and characters after a whole UUID, make no difference to CUDA; and "MIG-"
    # goes before the digits of a whole card too.
    wanted, digits = entry[4:].lower(), uuid[4:].lower()
    if entry.startswith("GPU-") and not uuid.startswith("GPU-"):
        return False
    return bool(wanted) and (digits.startswith(wanted) or wanted.startswith(digits))


def _by_old_name(entry: str, old: re.Match[str], cards: Sequence[CudaCard]) -> Facts | str:
    numbers = (int(old[2]), int(old[3]))
    for card in cards:
        if (card.facts.uuid or "").lower() == old[1].lower():
            for instance in card.instances:
                details = instance.details
                if (details.get("gpu_instance"), details.get("compute_instance")) == numbers:
                    return instance
    return f'no MIG instance is "{entry}"'


def _one_instance_at_most(devices: list[Facts]) -> tuple[Facts, ...]:
    instance = next((device for device in devices if device.details.get("mig_mode")), None)
    return tuple(devices) if instance is None else (instance,)
