"""Letting the choice of engines rest on what was measured."""

from __future__ import annotations

from anydevice.bench.results import Results
from anydevice.choose.discovery import discover, forget_report
from anydevice.choose.measurements import keep_measurements
from anydevice.choose.verdicts import key_of


def save(results: Results) -> str | None:
    """Keep the times, so that `device()` takes the fastest engine from now on.

    They count for this device, driver and version of each library. Where they cannot be kept, a
    sentence says why.
    """
    places = {str(device): device for device in discover().devices}
    kept: dict[str, dict[str, float]] = {}
    for each in results.measured:
        device = places.get(each.device)
        standing = device.standing if device else None
        if device is None or standing is None or not each.seconds:
            continue
        key = key_of(device.backend, device.index, standing.facts, each.engine)
        kept.setdefault(key, {})[f"{each.op} | {each.case} | {each.dtype}"] = each.seconds
    problem = keep_measurements(kept)
    forget_report()  # what remembers who serves a device goes by the report
    return problem
