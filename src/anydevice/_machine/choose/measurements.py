"""Measurements saved by `anydevice bench --save`, by device, driver and library version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anydevice._core import hooks
from anydevice._core.checks import is_number
from anydevice._core.choice import Measured, pick_engine
from anydevice._core.device import Device
from anydevice._machine.discovery.check import key_of
from anydevice._machine.engines import registry
from anydevice._machine.settings.config import stamp
from anydevice._machine.settings.files import measurements_file, read_cache, write_cache

Times = Mapping[str, float]
"""Seconds by a text that names op, case and dtype."""

_cache: tuple[object, dict[str, dict[str, float]]] = (None, {})


def measured_engines(devices: Iterable[Device]) -> tuple[Measured, ...]:
    """Return the fastest engine of each device, by the cases that all its engines ran."""
    saved = read_measurements()
    if not saved:  # then the libraries need not be read
        return ()
    return tuple(fastest for device in devices if (fastest := _compare_engines(device, saved)))


def measured_engine(device: Device) -> str | None:
    """Return the engine that was fastest on a device; `None` if fewer than two were measured."""
    return next((measured.engine for measured in measured_engines((device,))), None)


def engine_of(device: Device) -> str | None:
    """Return the engine for a device for which none is requested."""
    status = device.status
    if status is None:
        return None
    measured = measured_engine(device)
    return pick_engine(device, status.engines, registry.loaded_engines(), measured)


def _compare_engines(device: Device, saved: Mapping[str, Times]) -> Measured | None:
    status = device.status
    if status is None:
        return None
    keys = {e: key_of(device.backend, device.index, status.facts, e) for e in status.engines}
    times = {engine: saved[key] for engine, key in keys.items() if saved.get(key)}
    shared = set.intersection(*map(set, times.values())) if len(times) > 1 else set()
    if not shared:
        return None
    totals = {engine: sum(own[name] for name in shared) for engine, own in times.items()}
    fastest_first = tuple(sorted(totals.items(), key=lambda total: total[1]))
    return Measured(str(device), fastest_first, len(shared))


def read_measurements() -> dict[str, dict[str, float]]:
    """Return the saved measurements by key; none if the file is missing or damaged."""
    global _cache
    path = measurements_file()
    version = stamp(path)
    if _cache[0] != version:
        times_by_key = {
            key: {name: float(seconds) for name, seconds in times.items()}
            for key, times in read_cache(path).items()
            if isinstance(times, dict) and all(is_number(t) and t > 0 for t in times.values())
        }
        _cache = (version, times_by_key)
    return _cache[1]


def keep_measurements(new: Mapping[str, Times]) -> str | None:
    """Save measurements beside the earlier ones; return a sentence if that fails."""

    def merged() -> object:
        saved = read_measurements()
        return {key: {**saved.get(key, {}), **new.get(key, {})} for key in {**saved, **new}}

    return write_cache(measurements_file(), "the measurements", merged)


hooks.choose_engine.register(engine_of)
