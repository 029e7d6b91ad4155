"""The one sentence for a device that a library does not see."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice.core.device import Device
from anydevice.errors import DeviceNotFoundError


def not_seen(library: str, device: Device, seen: Sequence[Device]) -> DeviceNotFoundError:
    """The error for a device that a library does not have, with those that it has."""
    have = ", ".join(map(str, seen)) or "no device"
    return DeviceNotFoundError(f"{library} has no {device}; it sees {have}")
