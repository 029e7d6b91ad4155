"""From what NVML and the CUDA driver answered to facts: each card, and each MIG instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anydevice.core.facts import Detail, Facts
from anydevice.core.record import Record, replace
from anydevice.hardware import cuda_visible
from anydevice.hardware.cuda_surroundings import Surroundings
from anydevice.hardware.cuda_visible import Place
from anydevice.hardware.pci import normal_address

_ARCHITECTURES = {
    (2, 0): "Fermi",
    (3, 0): "Kepler",
    (5, 0): "Maxwell",
    (6, 0): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 9): "Ada Lovelace",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
}
"""The first compute capability of each architecture, oldest first."""

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


class Card(Record):
    """One card as NVML shows it: its facts, its names, and the facts of its MIG instances."""

    facts: Facts
    names: cuda_visible.Card
    instances: tuple[Facts, ...] = ()

    def at(self, place: Place) -> Facts:
        """The facts of the card itself, or of the instance that `place` names."""
        return self.facts if place.instance is None else self.instances[place.instance]


def cards_of_nvml(answer: Mapping[str, Any]) -> tuple[Card, ...]:
    """The cards of NVML's answer in its order, without those that it could not read."""
    return tuple(_card(row, answer) for row in answer["cards"] if row["error"] is None)


def devices_of_driver(answer: Mapping[str, Any], around: Surroundings) -> tuple[Facts, ...]:
    """The devices of the CUDA driver's answer in its order, without those it could not read."""
    return tuple(
        _driver_facts(row, answer, around) for row in answer["devices"] if row["error"] is None
    )


def in_order_of_driver(cards: Iterable[Card], devices: Iterable[Facts]) -> tuple[Facts, ...]:
    """The driver's devices in its order, each with what NVML knows of the same card."""
    known = {}
    for card in cards:
        for facts in (card.facts, *card.instances):
            known[_bare(facts.uuid)] = facts
    return tuple(_joined(known.get(_bare(device.uuid)), device) for device in devices)


def capability_numbers(facts: Facts) -> tuple[int, int] | None:
    """The compute capability as two numbers, to be compared; `None` where it is unknown."""
    if facts.compute_capability is None:
        return None
    major, _, minor = facts.compute_capability.partition(".")
    return int(major), int(minor)


def version_of(number: int | None) -> str | None:
    """CUDA's way to write a version as a number, in the usual form.

    >>> version_of(12040), version_of(13000)
    ('12.4', '13.0')
    """
    return None if not number else f"{number // 1000}.{number % 1000 // 10}"


def _card(row: Mapping[str, Any], answer: Mapping[str, Any]) -> Card:
    details: dict[str, Detail] = {"source": "nvml"}
    # free_memory() must find the same library again where only a full path finds it.
    if "/" in answer["library"]:
        details["nvml_library"] = answer["library"]
    known = {
        "mig_mode": row["mig"],
        "compute_mode": _COMPUTE_MODES.get(row["compute_mode"]),
        "cuda_cores": row["cuda_cores"],
    }
    facts = Facts(
        name=row["name"] or "NVIDIA card",
        uuid=row["uuid"],
        pci_address=None if row["bus"] is None else normal_address(row["bus"]),
        compute_capability=_capability(row["capability"]),
        architecture=_architecture(row["capability"]),
        driver_version=answer["driver_version"],
        runtime_version=version_of(answer["cuda_version"]),
        details=details | {key: value for key, value in known.items() if value is not None},
        **_memory(row),
    )
    instances = tuple(_instance(part, facts, details) for part in row["instances"])
    names = cuda_visible.Card(
        uuid=row["uuid"],
        mig=bool(row["mig"]),
        instances=tuple(
            cuda_visible.Instance(part["uuid"], part["gpu_instance"], part["compute_instance"])
            for part in row["instances"]
        ),
    )
    return Card(facts, names, instances)


def _instance(part: Mapping[str, Any], card: Facts, details: dict[str, Detail]) -> Facts:
    own = {
        "mig_mode": True,
        "parent_uuid": card.uuid,
        "compute_mode": card.details.get("compute_mode"),
        "gpu_instance": part["gpu_instance"],
        "compute_instance": part["compute_instance"],
        "multiprocessors": part["multiprocessors"],
    }
    return replace(
        card,
        name=part["name"] or f"{card.name} MIG",
        uuid=part["uuid"],
        details=details | {key: value for key, value in own.items() if value is not None},
        **_memory(part),
    )


def _memory(row: Mapping[str, Any]) -> dict[str, Any]:
    total, reserved = row["total"], row["reserved"]
    usable = None if total is None else total - (reserved or 0)
    return {"total_memory": total, "usable_memory": usable, "free_memory": row["free"]}


def _driver_facts(row: Mapping[str, Any], answer: Mapping[str, Any], around: Surroundings) -> Facts:
    name = row["name"] or "NVIDIA device"
    kind = "MIG" if " MIG " in name else "GPU"
    known = {
        "compute_mode": _COMPUTE_MODES.get(row["compute_mode"]),
        "multiprocessors": row["multiprocessors"],
    }
    unified, total = row["integrated"], row["total"]
    free = around.available_memory if unified else row["free"]
    return Facts(
        name=name,
        uuid=None if row["uuid"] is None else f"{kind}-{row['uuid']}",
        pci_address=None if unified or row["bus"] is None else normal_address(row["bus"]),
        memory_kind="unified" if unified else "dedicated",
        total_memory=total,
        usable_memory=total,
        free_memory=free if free is None or total is None else min(free, total),
        compute_capability=_capability(row["capability"]),
        architecture=_architecture(row["capability"]),
        driver_version=around.tegra or around.module,
        runtime_version=version_of(answer["cuda_version"]),
        details={"source": "driver"}
        | {key: value for key, value in known.items() if value is not None},
    )


def _joined(card: Facts | None, device: Facts) -> Facts:
    if card is None:
        return device
    joined = replace(card, details={**device.details, **card.details})
    if card.total_memory is not None:
        return joined
    # NVML tells no memory where CPU and GPU share it.
    return replace(
        joined,
        memory_kind=device.memory_kind,
        total_memory=device.total_memory,
        usable_memory=device.usable_memory,
        free_memory=device.free_memory,
    )


def _bare(uuid: str | None) -> str | None:
    return None if uuid is None else uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _capability(pair: list[int] | None) -> str | None:
    return None if pair is None else f"{pair[0]}.{pair[1]}"


def _architecture(pair: list[int] | None) -> str | None:
    name = None
    for first, architecture in _ARCHITECTURES.items():
        if pair is not None and tuple(pair) >= first:
            name = architecture
    return name
