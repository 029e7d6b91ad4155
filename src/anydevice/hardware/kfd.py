"""The GPUs of AMD's compute driver, as its topology under `/sys/class/kfd` shows them.

Only files are read: the driver is not opened and no context is made.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from anydevice.core.record import Record, replace
from anydevice.hardware import pci
from anydevice.hardware.kernel_files import exists, read_table, read_text

NODES = "sys/class/kfd/kfd/topology/nodes"

_FRAME_BUFFERS = (1, 2)  # heap types: memory of the GPU that the host sees, and that it does not


class Gpu(Record):
    """One GPU of the topology.

    `pool` is how many bytes the driver offers as the GPU's memory; `partitions` is in how many
    parts the card at this PCI address is divided. What the files do not tell is `None`.
    """

    node: int
    architecture: str | None
    device_id: int
    pci_address: str
    uuid: str | None
    render_minor: int | None
    pool: int | None
    has_cpu_cores: bool
    partitions: int = 1


class Topology(Record):
    """Every GPU in the order in which ROCm numbers them, and how many nodes were withheld.

    A node is withheld where the device rules of a container or a job do not let this process read
    its properties; ROCm does not number such a node either.
    """

    gpus: tuple[Gpu, ...]
    withheld: int


def topology(root: Path = Path("/")) -> Topology:
    """What the topology says; no GPUs where there is none. Never raises."""
    found: list[Gpu] = []
    withheld = 0
    for folder in _node_folders(root / NODES):
        if read_text(folder / "properties") is None:
            withheld += 1
            continue
        properties = read_table(folder / "properties")
        if properties.get("simd_count", 0) > 0:
            found.append(_gpu(folder, properties, root))
    parts = Counter(gpu.pci_address for gpu in found)
    gpus = tuple(replace(gpu, partitions=parts[gpu.pci_address]) for gpu in found)
    return Topology(gpus, withheld)


def _node_folders(nodes: Path) -> list[Path]:
    try:
        folders = [entry for entry in nodes.iterdir() if entry.name.isdecimal()]
    except OSError:
        return []
    return sorted(folders, key=lambda folder: int(folder.name))


def _gpu(folder: Path, properties: dict[str, int], root: Path) -> Gpu:
    unique = properties.get("unique_id", 0)
    minor = properties.get("drm_render_minor", 0)
    return Gpu(
        node=int(folder.name),
        architecture=gfx_name(properties.get("gfx_target_version", 0)),
        device_id=properties.get("device_id", 0),
        pci_address=_address_on_bus(properties, root),
        uuid=f"GPU-{unique:016x}" if unique else None,
        render_minor=minor if minor > 0 else None,
        pool=_pool(folder / "mem_banks"),
        has_cpu_cores=properties.get("cpu_cores_count", 0) > 0,
    )


def _pool(banks: Path) -> int | None:
    try:
        tables = [read_table(bank / "properties") for bank in banks.iterdir()]
    except OSError:
        return None
    sizes = [t.get("size_in_bytes", 0) for t in tables if t.get("heap_type") in _FRAME_BUFFERS]
    return sum(sizes) or None


def gfx_name(version: int) -> str | None:
    """The architecture that the driver writes as one decimal number; `None` where it is zero.

    Two decimal digits each for minor and stepping, which the name itself writes in hexadecimal.

    >>> gfx_name(90010), gfx_name(110000), gfx_name(90402), gfx_name(0)
    ('gfx90a', 'gfx1100', 'gfx942', None)
    """
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    if not 1 <= major <= 99 or minor > 15 or stepping > 15:
        return None
    return f"gfx{major}{minor:x}{stepping:x}"


def pci_address(location: int, domain: int) -> str:
    """The PCI address of a location: bus, device and function packed into sixteen bits.

    >>> pci_address(768, 0), pci_address(0xC101, 1)
    ('0000:03:00.0', '0001:c1:00.1')
    """
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def _address_on_bus(properties: dict[str, int], root: Path) -> str:
    address = pci_address(properties.get("location_id", 0), properties.get("domain", 0))
    if exists(root / pci.DEVICES / address):
        return address
    # A divided card counts its partitions in the function, though all of them are function 0.
    return f"{address[:-1]}0"
