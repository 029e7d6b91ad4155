"""Where a model is compiled: on the device that is asked for, with a library that can compile."""

from __future__ import annotations

from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.engines import registry
from anydevice.run.subjects import Subject


def home_of(subject: Subject, device: Device | str | None, *, compiled: bool) -> Device:
    """The device, and the engine that serves it.

    A module of a library is served by that library. Without a device, our own models stay where
    they are, modules that are on an accelerator too; all else goes where `anydevice.device()` says.
    Where nobody asked for an engine, one that compiles is taken before one that does not.

    Raises `DeviceNotFoundError` where the device is not usable, or not by that library.
    """
    if subject.library is not None:
        return _of_library(subject, subject.library, device)
    if isinstance(device, Device) and not device.engine_is_free:
        return choose_device(device)
    chosen = subject.where if device is None else None
    chosen = chosen or choose_device(device)
    return _compiling(chosen) if compiled else chosen


def _of_library(subject: Subject, library: str, device: Device | str | None) -> Device:
    if device is None:
        where = subject.where
        if where is not None and where.kind != "cpu":
            return where.served_by(library)
        return choose_device(None, engine=library)
    place = str(device) if isinstance(device, Device) else device
    return choose_device(place, engine=library)


def _compiling(device: Device) -> Device:
    """The same place, served by an engine that compiles, where there is one."""
    if device.engine is not None and "compiler" not in registry.row_of(device.engine).lacks:
        return device
    standing = device.standing
    able = [
        name
        for name in (standing.engines if standing else ())
        if "compiler" not in registry.row_of(name).lacks
    ]
    able.sort(key=lambda name: not registry.loaded(name))
    return device.served_by(able[0]) if able else device
