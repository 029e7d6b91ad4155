"""The GPU architectures of AMD as data: which ROCm carries, and which sit in a processor."""

from __future__ import annotations

import re
from typing import Literal

from anydevice.core.record import Record

Support = Literal["supported", "experimental"]

_NAME = re.compile(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])")


class Target(Record):
    """One architecture: its generation, how far ROCm supports it, whether it is inside a CPU."""

    generation: str
    support: Support
    integrated: bool = False


def _row(
    generation: str, support: Support, names: str, integrated: bool = False
) -> dict[str, Target]:
    return dict.fromkeys(names.split(), Target(generation, support, integrated))


TARGETS: dict[str, Target] = {
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
    """Why ROCm 5 and later do not drive this architecture at all; `None` where they do."""
    match = _NAME.fullmatch(architecture or "")
    if match is None or int(match[1]) >= 9:
        return None
    return (
        f"{architecture} is older than GCN 5 (gfx900), the oldest architecture that ROCm 5 and "
        "later carry; OpenCL may still drive this card"
    )


def caution(architecture: str | None) -> str | None:
    """What a user of this architecture should know before relying on it; `None` if nothing."""
    if architecture is None:
        return "the kernel does not tell this GPU's architecture; Linux 5.16 or newer does"
    if architecture not in TARGETS:
        return f"{architecture} is newer than the architectures that anydevice knows"
    target = TARGETS[architecture]
    if target.support == "experimental":
        return (
            f"{architecture} ({target.generation}) is experimental: AMD's current builds of the "
            "libraries may leave it out"
        )
    return None
