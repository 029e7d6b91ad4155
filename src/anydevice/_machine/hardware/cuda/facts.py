"""Facts of NVIDIA cards: from the machine's files, and from what NVML and the driver answered."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anydevice._core.finding import Detail, Facts
from anydevice._core.record import Record, replace
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.linux import normal_address, read_table, read_text

_WSL_LIBRARIES = "/usr/lib/wsl/lib"
_TEGRA_LIBRARIES = "/usr/lib/aarch64-linux-gnu/tegra"
_NODE = re.compile(r"nvidia\d+|nvidiactl|nvidia-uvm|nvhost-gpu|nvgpu|nvmap|dxg")
_MODULE_VERSION = re.compile(r"Kernel Module\D*(?:x86_64|aarch64)?\s+(\d+(?:\.\d+)+)")
_TEGRA_RELEASE = re.compile(r"R(\d+) \(release\), REVISION: ([\d.]+)")


class Surroundings(Record):
    """The platform, and the traces that NVIDIA hardware and drivers leave in its files.

    `system` is `sys.platform`; `cards` are PCI addresses and `holders` the kernel drivers that
    hold them; `nodes` are device files; `module` is the loaded kernel module's version; `tegra`
    is a Jetson's release, "L4T 36.3.0"; `distribution` has the names of this Linux.
    """

    system: str
    cards: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    module: str | None = None
    tegra: str | None = None
    container: bool = False
    wsl: bool = False
    distribution: tuple[str, ...] = ()
    available_memory: int | None = None


def read_surroundings(
    environment: Mapping[str, str], root: Path = Path("/"), system: str = sys.platform
) -> Surroundings:
    """Return the surroundings as the files under `root` tell them; on Windows they tell nothing."""
    if system != "linux":
        return Surroundings(system)
    cards = linux.cards(linux.NVIDIA, root)
    holders = {linux.bound_driver(card, root) for card in cards}
    nodes = linux.names_in(root / "dev")
    module = _MODULE_VERSION.search(read_text(root / "proc/driver/nvidia/version") or "")
    tegra = _TEGRA_RELEASE.search(read_text(root / "etc/nv_tegra_release") or "")
    return Surroundings(
        system=system,
        cards=cards,
        holders=tuple(sorted(holder for holder in holders if holder)),
        nodes=tuple(sorted(f"/dev/{name}" for name in nodes if _NODE.fullmatch(name))),
        module=module[1] if module else None,
        tegra=f"L4T {tegra[1]}.{tegra[2]}" if tegra else None,
        container=linux.in_container(root, environment),
        wsl="microsoft" in (read_text(root / "proc/sys/kernel/osrelease") or "").lower(),
        distribution=linux.distribution(root),
        available_memory=available_memory(root),
    )


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the available bytes of main memory; `None` if unknown."""
    return read_table(root / "proc/meminfo").get("MemAvailable")


def nvml_libraries(around: Surroundings, environment: Mapping[str, str]) -> list[str]:
    """Return the names under which NVML may be found, in the order to try them."""
    if around.system == "win32":
        windows = environment.get("WINDIR", r"C:\Windows")
        programs = environment.get("ProgramFiles", r"C:\Program Files")
        return [rf"{windows}\System32\nvml.dll", rf"{programs}\NVIDIA Corporation\NVSMI\nvml.dll"]
    return _linux_libraries("libnvidia-ml.so.1", around)


def driver_libraries(around: Surroundings) -> list[str]:
    """Return the names under which the CUDA driver may be found, in the order to try them."""
    return ["nvcuda.dll"] if around.system == "win32" else _linux_libraries("libcuda.so.1", around)


def _linux_libraries(name: str, around: Surroundings) -> list[str]:
    folders = ((around.wsl, _WSL_LIBRARIES), (around.tegra, _TEGRA_LIBRARIES))
    return [name, *(f"{folder}/{name}" for there, folder in folders if there)]


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


class CudaCard(Record):
    """One card as NVML shows it: its facts, and those of its MIG instances."""

    facts: Facts
    instances: tuple[Facts, ...] = ()

    @property
    def shown(self) -> tuple[Facts, ...]:
        """The devices that CUDA can show: with MIG mode on the instances, and never the card."""
        return self.instances if self.facts.details.get("mig_mode") else (self.facts,)


def cards_of_nvml(answer: Mapping[str, Any]) -> tuple[CudaCard, ...]:
    """Return the cards of NVML's answer in its order, without those that it could not read."""
    return tuple(_card(row, answer) for row in answer["cards"] if row["error"] is None)


def devices_of_driver(answer: Mapping[str, Any], around: Surroundings) -> tuple[Facts, ...]:
    """Return the CUDA driver's devices in its order, without those it could not read."""
    return tuple(
        _driver_facts(row, answer, around) for row in answer["devices"] if row["error"] is None
    )


def in_order_of_driver(cards: Iterable[CudaCard], devices: Iterable[Facts]) -> tuple[Facts, ...]:
    """Return the driver's devices in its order, each with what NVML knows of the same card."""
    every = (facts for card in cards for facts in (card.facts, *card.instances))
    known = {_bare(facts.uuid): facts for facts in every}
    return tuple(_join_facts(known.get(_bare(device.uuid)), device) for device in devices)


def capability_numbers(facts: Facts) -> tuple[int, int] | None:
    """Return the compute capability as two numbers, to be compared; `None` if it is unknown."""
    if facts.compute_capability is None:
        return None
    major, _, minor = facts.compute_capability.partition(".")
    return int(major), int(minor)


def version_of(number: int | None) -> str | None:
    """Return CUDA's way to write a version as a number, in the usual form.

    >>> version_of(12040), version_of(13000)
    ('12.4', '13.0')
    """
    return None if not number else f"{number // 1000}.{number % 1000 // 10}"


def _card(row: Mapping[str, Any], answer: Mapping[str, Any]) -> CudaCard:
    details: dict[str, Detail] = {"source": "nvml"}
    # free_memory() must find the same library again where only a full path finds it.
    if "/" in answer["library"]:
        details["nvml_library"] = answer["library"]
    facts = Facts(
        name=row["name"] or "NVIDIA card",
        uuid=row["uuid"],
        pci_address=None if row["bus"] is None else normal_address(row["bus"]),
        compute_capability=_capability(row["capability"]),
        architecture=_architecture(row["capability"]),
        driver_version=answer["driver_version"],
        runtime_version=version_of(answer["cuda_version"]),
        details=_add_details(
            details,
            mig_mode=row["mig"],
            compute_mode=_COMPUTE_MODES.get(row["compute_mode"]),
            cuda_cores=row["cuda_cores"],
        ),
        **_memory(row),
    )
    return CudaCard(facts, tuple(_instance(part, facts, details) for part in row["instances"]))


def _instance(part: Mapping[str, Any], card: Facts, details: dict[str, Detail]) -> Facts:
    numbers = {name: part[name] for name in ("gpu_instance", "compute_instance", "multiprocessors")}
    mode = card.details.get("compute_mode")
    own = _add_details(details, mig_mode=True, parent_uuid=card.uuid, compute_mode=mode, **numbers)
    name = part["name"] or f"{card.name} MIG"
    return replace(card, name=name, uuid=part["uuid"], details=own, **_memory(part))


def _add_details(details: Mapping[str, Detail], **more: Detail) -> dict[str, Detail]:
    """Return the details with the further ones that are known."""
    return {**details, **{key: value for key, value in more.items() if value is not None}}


def _memory(row: Mapping[str, Any]) -> dict[str, Any]:
    total, reserved = row["total"], row["reserved"]
    usable = None if total is None else total - (reserved or 0)
    return {"total_memory": total, "usable_memory": usable, "free_memory": row["free"]}


def _driver_facts(row: Mapping[str, Any], answer: Mapping[str, Any], around: Surroundings) -> Facts:
    name = row["name"] or "NVIDIA device"
    kind = "MIG" if " MIG " in name else "GPU"
    mode = _COMPUTE_MODES.get(row["compute_mode"])
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
        details=_add_details(
            {"source": "driver"}, compute_mode=mode, multiprocessors=row["multiprocessors"]
        ),
    )


def _join_facts(card: Facts | None, device: Facts) -> Facts:
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
    newest_first = reversed(_ARCHITECTURES.items())
    return next((name for first, name in newest_first if pair and tuple(pair) >= first), None)
