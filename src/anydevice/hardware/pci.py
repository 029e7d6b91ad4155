"""Which cards of a vendor sit on the PCI bus, read from files and without any driver."""

from __future__ import annotations

from pathlib import Path

NVIDIA = 0x10DE
AMD = 0x1002

DEVICES = "sys/bus/pci/devices"
"""The folder, below the root, that has a folder of files a device of the bus."""

_DISPLAY = 0x03
_PROCESSING_ACCELERATOR = 0x12


def cards(vendor: int, root: Path = Path("/")) -> tuple[str, ...]:
    """The PCI addresses of the vendor's display and compute cards, such as "0000:00:06.0", sorted.

    A card counts by its class: a display controller (3D controllers are among them) or a
    processing accelerator; a card's audio function does not. Empty where the machine has no such
    card, and where the system has no `sys/bus/pci/devices` under `root`.
    """
    try:
        entries = list((root / DEVICES).iterdir())
    except OSError:
        return ()
    return tuple(sorted(entry.name for entry in entries if _is_card(entry, vendor)))


def _is_card(entry: Path, vendor: int) -> bool:
    if _number(entry / "vendor") != vendor:
        return False
    device_class = _number(entry / "class")
    return device_class is not None and device_class >> 16 in (_DISPLAY, _PROCESSING_ACCELERATOR)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(), 16)
    except (OSError, ValueError):
        # A card may be unplugged between the listing and the reading.
        return None


def bound_driver(address: str, root: Path = Path("/")) -> str | None:
    """The kernel driver that holds a card, such as "nvidia" or "vfio-pci"; `None` for none."""
    try:
        return (root / DEVICES / address / "driver").readlink().name
    except OSError:
        return None


def normal_address(written: str) -> str:
    """A PCI address as the kernel writes it, however a vendor's library does.

    >>> normal_address("00000000:00:06.0"), normal_address("0000:0B:00.0")
    ('0000:00:06.0', '0000:0b:00.0')
    """
    domain, colon, rest = written.strip().lower().partition(":")
    if len(domain) == 8 and domain.startswith("0000"):
        domain = domain[4:]
    return domain + colon + rest
