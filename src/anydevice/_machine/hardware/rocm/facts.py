"""Facts of AMD GPUs: their architectures, topology, names, software and memory, read from files.

No driver is opened and no context is made. A card with its own memory is plain: the driver counts
its VRAM. A GPU inside a processor has two pools of one physical memory. The carve-out is set aside
by the firmware before the system starts, so Linux does not count it in `MemTotal`; the GTT is
ordinary system memory that the GPU may map. The rule for such a GPU:

- total is carve-out + GTT, and never more than the physical memory, `MemTotal` + carve-out;
- usable is what the compute driver offers of it: current kernels offer the GTT where that is the
  larger one, older ones and large carve-outs offer the carve-out only;
- free is what is left in the offered pool, and of GTT never more than `MemAvailable`.

The MI300A has no carve-out: what its driver counts as VRAM is the system's own memory, so total is
that figure and never more than `MemTotal`.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from anydevice._core.finding import Detail, MemoryKind, version_numbers
from anydevice._core.record import Record, replace
from anydevice._machine.hardware import linux

Support = Literal["supported", "experimental"]

_NAME = re.compile(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])")


class Architecture(Record):
    """One architecture: its generation, how far ROCm supports it, whether it is inside a CPU."""

    generation: str
    support: Support
    integrated: bool = False


def _row(
    generation: str, support: Support, names: str, integrated: bool = False
) -> dict[str, Architecture]:
    return dict.fromkeys(names.split(), Architecture(generation, support, integrated))


ARCHITECTURES: dict[str, Architecture] = {
    **_row("GCN 5", "experimental", "gfx900 gfx904 gfx906"),
    **_row("GCN 5", "experimental", "gfx902 gfx909 gfx90c", integrated=True),
    **_row("CDNA", "supported", "gfx908"),
    **_row("CDNA 2", "supported", "gfx90a"),
    **_row("CDNA 3", "experimental", "gfx940 gfx941"),
    **_row("CDNA 3", "supported", "gfx942"),
    **_row("CDNA 4", "supported", "gfx950"),
    **_row("RDNA", "experimental", "gfx1010 gfx1011 gfx1012"),
    **_row("RDNA", "experimental", "gfx1013", integrated=True),
    **_row("RDNA 2", "supported", "gfx1030"),
    **_row("RDNA 2", "experimental", "gfx1031 gfx1032 gfx1034"),
    **_row("RDNA 2", "experimental", "gfx1033 gfx1035 gfx1036 gfx1037", integrated=True),
    **_row("RDNA 3", "supported", "gfx1100 gfx1101 gfx1102"),
    **_row("RDNA 3", "experimental", "gfx1103", integrated=True),
    **_row("RDNA 3.5", "supported", "gfx1150 gfx1151", integrated=True),
    **_row("RDNA 3.5", "experimental", "gfx1152 gfx1153", integrated=True),
    **_row("RDNA 4", "supported", "gfx1200 gfx1201"),
}

MI300A = 0x74A0
"""The device id of the one accelerator whose only memory is the system's."""

PRODUCTS: dict[int, str] = {
    0x66A1: "AMD Instinct MI50/MI60",
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X/MI250",
    0x740F: "AMD Instinct MI210",
    MI300A: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x744C: "AMD Radeon RX 7900 series",
    0x7550: "AMD Radeon RX 9070 series",
    0x1586: "AMD Radeon 8060S class",
}
"""Names by PCI device id, for a machine where nothing else tells them."""


def too_old(architecture: str | None) -> str | None:
    """Return why ROCm 5 and later do not drive an architecture; `None` if they do."""
    match = _NAME.fullmatch(architecture or "")
    if match is None or int(match[1]) >= 9:
        return None
    return (
        f"{architecture} is older than GCN 5 (gfx900), the oldest architecture that ROCm 5 and "
        "later carry"
    )


def caution(architecture: str | None) -> str | None:
    """Return a warning for users of this architecture; `None` if there is nothing to warn of."""
    if architecture is None:
        return "the kernel does not tell this GPU's architecture; Linux 5.16 or newer does"
    if architecture not in ARCHITECTURES:
        return f"{architecture} is newer than the architectures that anydevice knows"
    known = ARCHITECTURES[architecture]
    if known.support == "experimental":
        return (
            f"{architecture} ({known.generation}) is experimental: AMD's current builds of the "
            "libraries may leave it out"
        )
    return None


NODES = "sys/class/kfd/kfd/topology/nodes"

_FRAME_BUFFERS = (1, 2)  # heap types: memory of the GPU that the host sees, and that it does not


class Gpu(Record):
    """One GPU of the topology: `pool` bytes, and into how many `partitions` its card is divided."""

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
    """Every GPU in ROCm's order, and how many nodes this process may not read."""

    gpus: tuple[Gpu, ...]
    withheld: int


def topology(root: Path = Path("/")) -> Topology:
    """Return the topology of this machine, without GPUs where there is none. Never raises."""
    rows: list[Gpu] = []
    withheld = 0
    for number in linux.numbers_in(root / NODES):
        folder = root / NODES / str(number)
        if linux.read_text(folder / "properties") is None:
            withheld += 1
            continue
        properties = linux.read_table(folder / "properties")
        if properties.get("simd_count", 0) > 0:
            rows.append(_gpu(folder, properties, root))
    parts = Counter(gpu.pci_address for gpu in rows)
    gpus = tuple(replace(gpu, partitions=parts[gpu.pci_address]) for gpu in rows)
    return Topology(gpus, withheld)


def _gpu(folder: Path, properties: dict[str, int], root: Path) -> Gpu:
    tables = [
        linux.read_table(folder / "mem_banks" / name / "properties")
        for name in linux.names_in(folder / "mem_banks")
    ]
    banks = [table for table in tables if table.get("heap_type") in _FRAME_BUFFERS]
    address = pci_address(properties.get("location_id", 0), properties.get("domain", 0))
    if not os.path.exists(root / linux.DEVICES / address):
        # A divided card counts its partitions in the function, though all of them are function 0.
        address = f"{address[:-1]}0"
    unique = properties.get("unique_id", 0)
    minor = properties.get("drm_render_minor", 0)
    return Gpu(
        node=int(folder.name),
        architecture=gfx_name(properties.get("gfx_target_version", 0)),
        device_id=properties.get("device_id", 0),
        pci_address=address,
        uuid=f"GPU-{unique:016x}" if unique else None,
        render_minor=minor if minor > 0 else None,
        pool=sum(t.get("size_in_bytes", 0) for t in banks) or None,
        has_cpu_cores=properties.get("cpu_cores_count", 0) > 0,
    )


def gfx_name(version: int) -> str | None:
    """Return the architecture that the driver writes as one decimal number; `None` if it is zero.

    Two decimal digits each for minor and stepping, which the name itself writes in hexadecimal.

    >>> gfx_name(90010), gfx_name(110000), gfx_name(90402), gfx_name(0)
    ('gfx90a', 'gfx1100', 'gfx942', None)
    """
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    if not 1 <= major <= 99 or minor > 15 or stepping > 15:
        return None
    return f"gfx{major}{minor:x}{stepping:x}"


def pci_address(location: int, domain: int) -> str:
    """Return the PCI address of a location: bus, device and function packed into sixteen bits.

    >>> pci_address(768, 0), pci_address(0xC101, 1)
    ('0000:03:00.0', '0001:c1:00.1')
    """
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


_VERSION = re.compile(r"\d+(?:\.\d+)+")
_NAME_TABLES = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")


def folders(root: Path, environment: Mapping[str, str]) -> list[Path]:
    """Return the folders of ROCm: ROCM_PATH, /opt/rocm, then the newest /opt/rocm-*."""
    places = [root / "opt/rocm"]
    if environment.get("ROCM_PATH"):
        places.insert(0, root / environment["ROCM_PATH"].lstrip("/"))
    numbered = (root / "opt").glob("rocm-*")
    newest_first = sorted(numbered, key=lambda f: version_numbers(f.name[5:]), reverse=True)
    return places + newest_first


def rocm_version(root: Path, environment: Mapping[str, str]) -> str | None:
    """Return the version of the installed ROCm, such as "6.2.4"; `None` if none is installed."""
    for folder in folders(root, environment):
        match = _VERSION.search(linux.read_text(folder / ".info/version") or "")
        if match:
            return match[0]
    return None


def driver_version(root: Path) -> str | None:
    """Return the version of AMD's own amdgpu package, else that of the Linux kernel."""
    own = linux.read_line(root / "sys/module/amdgpu/version")
    return own or linux.read_line(root / "proc/sys/kernel/osrelease") or None


def product_name(gpu: Gpu, root: Path) -> str | None:
    """Return the card's own name, or the one in libdrm's table."""
    device = root / linux.DEVICES / gpu.pci_address
    own = linux.read_line(device / "product_name")
    return own or _name_in_table(gpu, linux.read_line(device / "revision"), root)


def _name_in_table(gpu: Gpu, revision: str, root: Path) -> str | None:
    wanted = (f"{gpu.device_id:04x}", revision.lower().removeprefix("0x").zfill(2))
    for file in _NAME_TABLES:
        for line in (linux.read_text(root / file) or "").splitlines():
            columns = [column.strip() for column in line.split(",", 2)]
            if len(columns) == 3 and (columns[0].lower(), columns[1].lower()) == wanted:
                return columns[2]
    return None


def amdsmi_folder(root: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the folder from which the Python package `amdsmi` can be imported, if it is there."""
    places = [folder / "share/amd_smi" for folder in folders(root, environment)]
    if root == Path("/"):
        places += [Path(entry) for entry in sys.path if entry]
    return next((place for place in places if os.path.exists(place / "amdsmi/__init__.py")), None)


Pool = Literal["carve-out", "gtt", "carve-out and gtt", "system memory"]

_SMALLEST_CARD = 2 * 2**30  # no card of an architecture that ROCm carries has less


class GpuMemory(Record):
    """Bytes of one GPU, `None` if unknown; `details` goes into its facts."""

    kind: MemoryKind
    total: int | None
    usable: int | None
    free: int | None
    details: dict[str, Detail]


class Counters(Record):
    """The figures of the driver and of the system at one moment."""

    vram: int | None
    vram_used: int | None
    gtt: int | None
    gtt_used: int | None
    system: int | None
    available: int | None


def counters(pci_address: str, root: Path = Path("/")) -> Counters:
    """Read the counters again; `None` if a counter cannot be read."""
    device = root / linux.DEVICES / pci_address
    system = linux.read_table(root / "proc/meminfo")
    own = ("vram_total", "vram_used", "gtt_total", "gtt_used")
    vram, vram_used, gtt, gtt_used = (linux.read_number(device / f"mem_info_{n}") for n in own)
    total, available = system.get("MemTotal"), system.get("MemAvailable")
    return Counters(vram, vram_used, gtt, gtt_used, total, available)


def memory_of(gpu: Gpu, root: Path = Path("/")) -> GpuMemory:
    now = counters(gpu.pci_address, root)
    if gpu.device_id == MI300A:
        sizes = [size for size in (now.vram or now.gtt, now.system) if size]
        total = min(sizes, default=gpu.pool)
        return _shared_memory(total, gpu.pool, now, "system memory", carve_out=0)
    known = ARCHITECTURES.get(gpu.architecture or "")
    is_small = now.vram is not None and now.vram < _SMALLEST_CARD
    if gpu.has_cpu_cores or is_small or (known is not None and known.integrated):
        return _with_carve_out(gpu, now)
    details: dict[str, Detail] = {}
    total = now.vram or gpu.pool
    if gpu.partitions > 1:
        total = gpu.pool or (now.vram and now.vram // gpu.partitions)
        details["partitions"] = gpu.partitions
    return GpuMemory("dedicated", total, total, free_of_card(total, now), details)


def free_of_card(total: int | None, now: Counters) -> int | None:
    """Return the free bytes of a card, or of a partition of `total` bytes."""
    return None if total is None else _smaller(_unused_bytes(now.vram, now.vram_used), total)


def _with_carve_out(gpu: Gpu, now: Counters) -> GpuMemory:
    if now.vram is None or now.gtt is None:
        total = gpu.pool
    elif now.system is None:
        total = now.vram + now.gtt
    else:
        total = now.vram + min(now.gtt, now.system)
    pool: Pool = "carve-out and gtt"
    if gpu.pool is not None and now.vram is not None:
        pool = "carve-out" if gpu.pool <= now.vram else "gtt"
    return _shared_memory(total, gpu.pool, now, pool, carve_out=now.vram)


def _shared_memory(
    total: int | None, offered: int | None, now: Counters, pool: Pool, carve_out: int | None
) -> GpuMemory:
    usable = total if total is None or offered is None else min(total, offered)
    details: dict[str, Detail] = {"integrated": True, "carve_out": carve_out}
    details |= {"gtt": now.gtt, "pool": pool}
    return GpuMemory("unified", total, usable, free_of_shared(usable, pool, now), details)


def free_of_shared(usable: int | None, pool: Detail, now: Counters) -> int | None:
    """Return the free bytes of the pool of a GPU inside a processor."""
    carve_out = _unused_bytes(now.vram, now.vram_used)
    mapped = _smaller(_unused_bytes(now.gtt, now.gtt_used), now.available)
    if pool == "carve-out":
        left = carve_out
    elif pool == "gtt":
        left = mapped
    elif pool == "system memory":
        left = _smaller(
            _unused_bytes(usable, (now.vram_used or 0) + (now.gtt_used or 0)), now.available
        )
    else:
        left = None if carve_out is None or mapped is None else carve_out + mapped
    return _smaller(left, usable)


def _unused_bytes(size: int | None, used: int | None) -> int | None:
    return None if size is None or used is None else max(0, size - used)


def _smaller(one: int | None, other: int | None) -> int | None:
    return one if one is None or other is None else min(one, other)
