"""What is known of one device, as its driver or the operating system tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from anydevice.core.record import NOTHING, Record, as_dict

MemoryKind = Literal["dedicated", "unified", "host"]
Detail = str | int | float | bool | None


class Facts(Record):
    """One device in figures. Memory is in bytes; `None` means that nobody could tell.

    `memory_kind` is "dedicated" for a card's own memory, "unified" where CPU and GPU share one
    memory, "host" for the machine's. `usable_memory` is what this process could ever get of
    `total_memory` (a cgroup or the system keeps the rest); `free_memory` is what is free now.
    `architecture` is the vendor's word ("gfx90a", "x86-64-v4"); `runtime_version` is the newest
    runtime that the driver serves (CUDA "13.0", OpenCL "3.0"). `details` holds what only one
    backend knows, such as the cores of a CPU.

    >>> Facts(name="NVIDIA H200", compute_capability="9.0").free_memory is None
    True
    """

    name: str
    uuid: str | None = None
    pci_address: str | None = None
    memory_kind: MemoryKind = "dedicated"
    total_memory: int | None = None
    usable_memory: int | None = None
    free_memory: int | None = None
    compute_capability: str | None = None
    architecture: str | None = None
    driver_version: str | None = None
    runtime_version: str | None = None
    details: Mapping[str, Detail] = NOTHING

    @property
    def obtainable_memory(self) -> int | None:
        """The most that a process could ever get: what is usable, or all where nobody limits it.

        >>> Facts("a card", total_memory=16).obtainable_memory
        16
        >>> Facts("a container", total_memory=16, usable_memory=4).obtainable_memory
        4
        """
        return self.total_memory if self.usable_memory is None else self.usable_memory

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return {**as_dict(self), "details": dict(self.details)}

    def __hash__(self) -> int:
        return hash((self.name, self.uuid, self.pci_address))


def compare_versions(left: str, right: str) -> int:
    """-1, 0 or 1 as dotted version `left` is before, the same as, or after `right`.

    Missing parts count as zero, and what is not a digit ends a part.

    >>> compare_versions("525.60.13", "525.60"), compare_versions("12.0", "12")
    (1, 0)
    """
    one, two = version_numbers(left), version_numbers(right)
    width = max(len(one), len(two))
    padded = [parts + (0,) * (width - len(parts)) for parts in (one, two)]
    return (padded[0] > padded[1]) - (padded[0] < padded[1])


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> version_numbers("2.13.0+cpu"), version_numbers("6.4.0-150")
    ((2, 13, 0), (6, 4, 0))
    """
    numbers: list[int] = []
    for part in version.split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
        if len(digits) != len(part):
            break
    return tuple(numbers)
