"""How much memory an AMD GPU has, from the counters of its driver.

A card with its own memory is plain: the driver counts its VRAM. A GPU inside a processor has two
pools of one physical memory. The carve-out is set aside by the firmware before the system starts,
so Linux does not count it in `MemTotal`; the GTT is ordinary system memory that the GPU may map.
The rule for such a GPU:

- total is carve-out + GTT, and never more than the physical memory, `MemTotal` + carve-out;
- usable is what the compute driver offers of it: current kernels offer the GTT where that is the
  larger one, older ones and large carve-outs offer the carve-out only;
- free is what is left in the offered pool, and of GTT never more than `MemAvailable`.

The MI300A has no carve-out: what its driver counts as VRAM is the system's own memory, so total is
that figure and never more than `MemTotal`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from anydevice.core.facts import Detail, MemoryKind
from anydevice.core.record import Record
from anydevice.hardware import pci
from anydevice.hardware.kernel_files import read_number, read_table
from anydevice.hardware.kfd import Gpu
from anydevice.hardware.rocm_targets import MI300A, TARGETS

Pool = Literal["carve-out", "gtt", "carve-out and gtt", "system memory"]

_SMALLEST_CARD = 2 * 2**30  # no card of an architecture that ROCm carries has less


class Memory(Record):
    """Bytes of one GPU, `None` where unknown; `details` goes into its facts."""

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
    """Read them anew; what cannot be read is `None`."""
    device = root / pci.DEVICES / pci_address
    system = read_table(root / "proc/meminfo")
    return Counters(
        vram=read_number(device / "mem_info_vram_total"),
        vram_used=read_number(device / "mem_info_vram_used"),
        gtt=read_number(device / "mem_info_gtt_total"),
        gtt_used=read_number(device / "mem_info_gtt_used"),
        system=system.get("MemTotal"),
        available=system.get("MemAvailable"),
    )


def memory_of(gpu: Gpu, root: Path = Path("/")) -> Memory:
    """The memory of a GPU of the topology."""
    now = counters(gpu.pci_address, root)
    if gpu.device_id == MI300A:
        return _without_carve_out(gpu, now)
    if _is_integrated(gpu, now):
        return _with_carve_out(gpu, now)
    return _of_a_card(gpu, now)


def _is_integrated(gpu: Gpu, now: Counters) -> bool:
    target = TARGETS.get(gpu.architecture or "")
    return (
        gpu.has_cpu_cores
        or (target is not None and target.integrated)
        or (now.vram is not None and now.vram < _SMALLEST_CARD)
    )


def _of_a_card(gpu: Gpu, now: Counters) -> Memory:
    if gpu.partitions == 1:
        total = now.vram or gpu.pool
        return Memory("dedicated", total, total, free_of_card(total, now), {})
    share = None if now.vram is None else now.vram // gpu.partitions
    total = gpu.pool or share
    details: dict[str, Detail] = {"partitions": gpu.partitions}
    return Memory("dedicated", total, total, free_of_card(total, now), details)


def free_of_card(total: int | None, now: Counters) -> int | None:
    """What a card, or a partition of it that holds `total`, has left."""
    if now.vram is None or now.vram_used is None or total is None:
        return None
    return min(total, max(0, now.vram - now.vram_used))


def _with_carve_out(gpu: Gpu, now: Counters) -> Memory:
    if now.vram is None or now.gtt is None:
        total = gpu.pool
    elif now.system is None:
        total = now.vram + now.gtt
    else:
        total = now.vram + min(now.gtt, now.system)
    pool: Pool = "carve-out and gtt"
    if gpu.pool is not None and now.vram is not None:
        pool = "carve-out" if gpu.pool <= now.vram else "gtt"
    return _shared(total, gpu.pool, now, pool, carve_out=now.vram)


def _without_carve_out(gpu: Gpu, now: Counters) -> Memory:
    known = [size for size in (now.vram or now.gtt, now.system) if size]
    return _shared(min(known, default=gpu.pool), gpu.pool, now, "system memory", carve_out=0)


def _shared(
    total: int | None, offered: int | None, now: Counters, pool: Pool, carve_out: int | None
) -> Memory:
    usable = total if total is None or offered is None else min(total, offered)
    details: dict[str, Detail] = {
        "integrated": True,
        "carve_out": carve_out,
        "gtt": now.gtt,
        "pool": pool,
    }
    return Memory("unified", total, usable, free_of_shared(usable, pool, now), details)


def free_of_shared(usable: int | None, pool: Detail, now: Counters) -> int | None:
    """What the offered pool of a GPU inside a processor has left."""
    carve_out = _left(now.vram, now.vram_used)
    mapped = _smaller(_left(now.gtt, now.gtt_used), now.available)
    if pool == "carve-out":
        left = carve_out
    elif pool == "gtt":
        left = mapped
    elif pool == "system memory":
        left = _smaller(_left(usable, (now.vram_used or 0) + (now.gtt_used or 0)), now.available)
    else:
        left = None if carve_out is None or mapped is None else carve_out + mapped
    return None if left is None else _smaller(left, usable)


def _left(size: int | None, used: int | None) -> int | None:
    return None if size is None or used is None else max(0, size - used)


def _smaller(one: int | None, other: int | None) -> int | None:
    known = [size for size in (one, other) if size is not None]
    return None if one is None else min(known)
