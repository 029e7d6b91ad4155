"""Parts of what a reader tells of its backend."""

from __future__ import annotations

from anydevice._core.finding import BackendScan, RawDevice
from tests.reasons import text_of


def only(scan: BackendScan) -> RawDevice:
    (device,) = scan.devices
    return device


def stop_of(scan: BackendScan) -> tuple[bool, str | None, str | None]:
    """Return whether the hardware is there, and where and why the backend stopped."""
    return scan.present, scan.stage, text_of(scan)
