"""The sensors that Linux shows under `hwmon`, and small conversions of what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from anydevice.hardware.kernel_files import read_number, read_text


def monitors(folder: Path) -> list[Path]:
    """The folders of sensors in a folder, in the order of their numbers; none where it has none."""
    try:
        found = [entry for entry in folder.iterdir() if entry.name.startswith("hwmon")]
    except OSError:
        return []
    return sorted(found, key=lambda entry: (len(entry.name), entry.name))


def scaled(path: Path, divisor: float) -> float | None:
    """The number in a file, divided; `None` where there is none."""
    number = read_number(path)
    return None if number is None else number / divisor


def temperature(sensors: Path, labels: Sequence[str] = ()) -> float | None:
    """°C of the first of these labels that the sensors have, else of their first sensor."""
    found: dict[str, float] = {}
    for number in range(1, 9):
        degrees = scaled(sensors / f"temp{number}_input", 1000)
        if degrees is not None:
            label = (read_text(sensors / f"temp{number}_label") or "").strip()
            found.setdefault(label, degrees)
    named = (found[label] for label in labels if label in found)
    return next(named, next(iter(found.values()), None))
