"""Measurements saved by `anydevice bench --save`, by device, driver and library version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anydevice._core import hooks
from anydevice._core.checks import is_number
from anydevice._core.choice import Measured, pick_engine
from anydevice._core.device import Device
from anydevice._core.files import writing
from anydevice._machine.discovery.check import key_of
from anydevice._machine.engines import registry
from anydevice._machine.settings.files import measurements_file, read_cache, stamp

Times = Mapping[str, float]
"""Seconds by what was measured: the op, its case and its dtype in one text."""

_kept: tuple[object, dict[str, dict[str, float]]] = (None, {})


def measured_engines(devices: Iterable[Device]) -> tuple[Measured, ...]:
    """Which engine was fastest, for every device on which several were measured.

    They are compared by the total over what all of them were measured with. What was measured
    with another driver or another version of a library does not count.
    """
    kept = read_measurements()
    if not kept:  # then nobody need look at the libraries
        return ()
    return tuple(measured for device in devices if (measured := _measured(device, kept)))


def measured_engine(device: Device) -> str | None:
    """The engine that was fastest on a device; `None` if fewer than two were measured."""
    return next((measured.engine for measured in measured_engines((device,))), None)


def engine_of(device: Device) -> str | None:
    """The engine that serves a device for which none was asked."""
    status = device.status
    if status is None:
        return None
    measured = measured_engine(device)
    return pick_engine(device, status.engines, registry.loaded_engines(), measured)


def _measured(device: Device, kept: Mapping[str, Times]) -> Measured | None:
    status = device.status
    if status is None:
        return None
    times = {}
    for engine in status.engines:
        known = kept.get(key_of(device.backend, device.index, status.facts, engine))
        if known:
            times[engine] = known
    if len(times) < 2:
        return None
    everywhere = set.intersection(*(set(known) for known in times.values()))
    if not everywhere:
        return None
    totals = {engine: sum(known[name] for name in everywhere) for engine, known in times.items()}
    fastest_first = tuple(sorted(totals.items(), key=lambda total: total[1]))
    return Measured(str(device), fastest_first, len(everywhere))


def read_measurements() -> dict[str, dict[str, float]]:
    """Every measurement that is kept, by key; nothing where the file is missing or damaged."""
    global _kept
    path = measurements_file()
    version = stamp(path)
    if _kept[0] != version:
        _kept = (version, _read(path))
    return _kept[1]


def _read(path: Path) -> dict[str, dict[str, float]]:
    return {
        key: {name: float(seconds) for name, seconds in times.items()}
        for key, times in read_cache(path).items()
        if isinstance(times, dict) and all(map(_is_time, times.values()))
    }


def _is_time(value: Any) -> bool:
    return is_number(value) and value > 0


def keep_measurements(new: Mapping[str, Times]) -> str | None:
    """Keep measurements by their key; where that cannot be done, a sentence that says why.

    What was measured before and not now is kept; what was measured again is replaced.
    """
    import json

    path = measurements_file()
    try:
        with writing(path, private=True) as write:
            kept = {key: dict(times) for key, times in read_measurements().items()}
            for key, times in new.items():
                kept.setdefault(key, {}).update(times)
            write(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        return f"the measurements could not be kept in {path}: {error.strerror}"
    return None


hooks.choose_engine.register(engine_of)
