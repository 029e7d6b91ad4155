"""Whether two devices, each seen through its own backend, are one card."""

from __future__ import annotations

import re

from anydevice.core.facts import Facts

_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")
_CARD = re.compile(r"gpu-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def same_card(one: Facts, two: Facts) -> bool:
    """True where a trusted identity says so: the same UUID, else the same PCI address.

    Names never count: two cards of one model share theirs. A MIG instance shares the PCI address
    of its card, so it is recognised by its UUID alone; and two NVIDIA UUIDs that differ are two
    cards, whatever the address says. UUIDs of all zeros or all ones, which drivers give for "I do
    not know", count as unknown.

    >>> card = Facts(name="H200", uuid="GPU-1f", pci_address="0000:00:06.0")
    >>> same_card(card, Facts(name="NVIDIA H200", pci_address="00000000:00:06.0"))
    True
    """
    first, second = _uuid(one), _uuid(two)
    if first is not None and first == second:
        return True
    if any(uuid is not None and uuid.startswith("mig-") for uuid in (first, second)):
        return False
    if all(uuid is not None and _CARD.fullmatch(uuid) for uuid in (first, second)):
        return False
    address = _address(one)
    return address is not None and address == _address(two)


def _uuid(facts: Facts) -> str | None:
    if facts.uuid is None:
        return None
    text = facts.uuid.strip().lower()
    digits = set(re.sub(r"^(gpu|mig)-", "", text).replace("-", ""))
    return None if digits <= {"0"} or digits <= {"f"} else text


def _address(facts: Facts) -> tuple[int, ...] | None:
    # NVML writes eight digits of domain where sysfs writes four.
    match = _PCI.fullmatch((facts.pci_address or "").strip().lower())
    return match and tuple(int(part or "0", 16) for part in match.groups())
