"""Devices and backends as drivers and libraries show them, and why some cannot be used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Self

from anydevice._core.record import NOTHING, Record

if TYPE_CHECKING:
    from anydevice._core.device import Device

Kind = Literal["cpu", "gpu", "tpu"]
Tier = Literal["stable", "experimental", "untested"]
MemoryKind = Literal["dedicated", "unified", "host"]
Detail = str | int | float | bool | None

Stage = Literal["driver", "device", "library", "compute"]
"""The stages of a backend, in the order in which they are read; it stops at one of them."""


class Reason(Record):
    """Why something cannot be used: a code for programs, a sentence for people, and a fix.

    Every code is in `docs/troubleshooting.md`. The wording of `text` and `fix` may change at any
    time; programs should use the code.

    >>> print(Reason("cpu_only_build", "torch 2.13.0+cpu is a CPU-only build"))
    torch 2.13.0+cpu is a CPU-only build
    """

    code: str
    text: str
    fix: str | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def with_fix(self) -> str:
        """The sentence, with the fix in brackets if it is known."""
        return f"{self.text} (fix: {self.fix})" if self.fix else self.text


class _Explained:
    """A device or backend with the reasons why it cannot be used."""

    reasons: tuple[Reason, ...]

    @property
    def code(self) -> str | None:
        """The code of the first reason; `None` if it is usable."""
        return self.reasons[0].code if self.reasons else None

    @property
    def reason(self) -> str | None:
        """All reasons as one sentence; `None` if it is usable."""
        return "; ".join(map(str, self.reasons)) or None


class Facts(Record):
    """The properties of one device. Memory is in bytes; `None` means unknown.

    `memory_kind` is "dedicated" for a card's own memory, "unified" if CPU and GPU share one memory,
    "host" for main memory. `usable_memory` is the part of `total_memory` that this process may use
    (a cgroup or the system keeps the rest); `free_memory` is the memory free now. `architecture` is
    the vendor's name ("gfx90a", "x86-64-v4"); `runtime_version` is the newest runtime that the
    driver supports (CUDA "13.0", OpenCL "3.0"). `details` has facts of single backends, such as the
    cores of a CPU.

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
        """The most memory that a process may use: all of it, unless there is a limit.

        >>> Facts("a card", total_memory=16).obtainable_memory
        16
        >>> Facts("a container", total_memory=16, usable_memory=4).obtainable_memory
        4
        """
        return self.total_memory if self.usable_memory is None else self.usable_memory

    def __hash__(self) -> int:
        return hash((self.name, self.uuid, self.pci_address))


def compare_versions(left: str, right: str) -> int:
    """Return -1, 0 or 1 as dotted version `left` is before, the same as, or after `right`.

    Missing parts count as zero; a part ends at the first character that is not a digit.

    >>> compare_versions("525.60.13", "525.60"), compare_versions("12.0", "12")
    (1, 0)
    """
    one, two = version_numbers(left), version_numbers(right)
    width = max(len(one), len(two))
    padded = [parts + (0,) * (width - len(parts)) for parts in (one, two)]
    return (padded[0] > padded[1]) - (padded[0] < padded[1])


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> version_numbers("2.13.0+cpu"), version_numbers("6.4.0-150")
    ((2, 13, 0), (6, 4, 0))
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


class RawDevice(Record):
    """One device as its driver shows it, with a `reason` if it cannot be used."""

    index: int
    kind: Kind
    facts: Facts
    reason: Reason | None = None


class BackendScan(Record):
    """One backend as the hardware layer, or a user's own probe, sees it.

    `present` separates "here but not usable" from "not in this machine". `stage` and `reason` are
    set if the whole backend stopped at its driver or devices. `engines` names the libraries that
    can drive a backend unknown to anydevice; if it is empty, the installed libraries are asked.
    """

    backend: str
    present: bool
    devices: tuple[RawDevice, ...] = ()
    stage: Stage | None = None
    reason: Reason | None = None
    notes: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()

    @classmethod
    def stopped(
        cls,
        backend: str,
        code: str,
        text: str,
        fix: str | None = None,
        *,
        stage: Stage = "driver",
        present: bool = True,
        notes: tuple[str, ...] = (),
    ) -> Self:
        """Return the scan of a backend that stopped as a whole."""
        return cls(backend, present, stage=stage, reason=Reason(code, text, fix), notes=notes)


class Refusal(Record):
    """Why one engine cannot drive one device."""

    engine: str
    reason: Reason


class Verdict(Record):
    """The outcome of a small computation on a device through one engine; true if it was right."""

    device: str
    engine: str
    right: bool
    reason: Reason | None = None
    seconds: float = 0.0
    first_call: float | None = None
    second_call: float | None = None

    def __bool__(self) -> bool:
        return self.right

    def to_dict(self) -> dict[str, object]:
        """Return the verdict as plain data, ready for JSON."""
        return {
            **super().to_dict(),
            "code": self.reason.code if self.reason else None,
            "reason": self.reason.text if self.reason else None,
            "fix": self.reason.fix if self.reason else None,
        }


class DeviceStatus(Record, _Explained):
    """One device with all that discovery knows about it.

    `engines` can drive it, in order of choice; `refusals` says why the others cannot. If no engine
    is left, `stage` and `reasons` say what stopped it, and `fix` is the best next step.
    """

    kind: Kind
    facts: Facts
    engines: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    stage: Stage | None = None
    reasons: tuple[Reason, ...] = ()
    fix: str | None = None

    @property
    def usable(self) -> bool:
        return self.stage is None


class Finding(Record, _Explained):
    """One backend as discovery sees it.

    `usable` is true if at least one of `devices` is. Otherwise `stage` says how far it got,
    `reasons` what stopped it and `fix` the one command that would help. `present` is true if this
    hardware or its driver is in the machine.
    """

    backend: str
    present: bool
    usable: bool
    tier: Tier
    devices: tuple[Device, ...] = ()
    stage: Stage | None = None
    reasons: tuple[Reason, ...] = ()
    fix: str | None = None
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    def to_dict(self) -> dict[str, object]:
        """Return the finding as plain data, ready for JSON."""
        devices = [device.to_dict() for device in self.devices]
        explained = {"code": self.code, "reason": self.reason}
        return {**super().to_dict(), **explained, "devices": devices}


_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")
_CARD = re.compile(r"gpu-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def same_card(one: Facts, two: Facts) -> bool:
    """Whether two devices are the same card: the same UUID, else the same PCI address.

    Names never count: two cards of one model share theirs. A MIG instance shares the PCI address
    of its card, so only its UUID counts. Two NVIDIA UUIDs that differ are two cards, whatever the
    address says. UUIDs of all zeros or all ones mean "unknown" to drivers, and count as unknown.
    """
    first, second = _uuid(one), _uuid(two)
    if first is not None and first == second:
        return True
    are_tiles = first and second and first[:-2] == second[:-2]  # of one card of Intel's
    if are_tiles or any(uuid and uuid.startswith("mig-") for uuid in (first, second)):
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
