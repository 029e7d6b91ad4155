"""What benchmarking came to, as data: ceilings, measurements, and where they were taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from anydevice.core.record import Record, as_dict
from anydevice.errors import ConfigurationError

FORMAT = 1

Bound = Literal["memory", "compute"]
State = Literal["measured", "unsupported", "failed"]
What = Literal["copy", "read", "matmul", "to device", "to host"]

UNITS: Mapping[What, str] = {
    "copy": "B/s",
    "read": "B/s",
    "matmul": "FLOP/s",
    "to device": "B/s",
    "to host": "B/s",
}
"""What the rate of each ceiling counts."""


class Ceiling(Record):
    """The most that a device was seen to do: bytes a second, operations a second for a matmul.

    `engine` and `kernel` say with what it was reached.
    """

    device: str
    what: What
    rate: float
    engine: str
    kernel: str
    dtype: str | None = None


class Measurement(Record):
    """One op in one case and element type, on one device, through one engine.

    `seconds` is the median, `low` and `high` are the quartiles, `first` is the first call. `moved`
    counts the bytes that must pass to and from memory, 0 where the result is a view, `operations`
    the floating operations. `bound` says which of the two takes longer at the device's ceilings,
    and `fraction` how near the op came to that ceiling. `speed_up` is over `over`, a CPU. Where it
    could not be measured, `reason` says why.
    """

    op: str
    case: str
    dtype: str
    device: str
    engine: str
    state: State = "measured"
    reason: str | None = None
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    first: float = 0.0
    samples: int = 0
    moved: int = 0
    operations: int = 0
    bound: Bound | None = None
    fraction: float | None = None
    speed_up: float | None = None
    over: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What makes it the same measurement in two runs."""
        return self.device, self.engine, self.op, self.case, self.dtype

    @property
    def rate(self) -> float | None:
        """Operations a second where computing binds, else bytes a second; `None` where neither."""
        work = self.operations if self.bound == "compute" else self.moved
        return work / self.seconds if work and self.seconds else None

    @property
    def spread(self) -> float:
        """Half the way from quartile to quartile, as a part of the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds else 0.0


class Machine(Record):
    """One device as it was when it was measured: its card, its driver, its libraries' versions."""

    device: str
    kind: str
    name: str
    uuid: str | None
    driver: str | None
    engines: Mapping[str, str]


class Results(Record):
    """All that one run found.

    >>> Results("0.1.0", "2030-01-01T00:00:00+00:00", "Linux, Python 3.12").measured
    ()
    """

    version: str
    made: str
    system: str
    devices: tuple[Machine, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    quick: bool = False
    limit: float = 0.0
    seconds: float = 0.0

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """What has a time."""
        return tuple(each for each in self.measurements if each.state == "measured")

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return {
            "format": FORMAT,
            **as_dict(self),
            "devices": [
                {**as_dict(device), "engines": dict(device.engines)} for device in self.devices
            ],
            "ceilings": [as_dict(ceiling) for ceiling in self.ceilings],
            "measurements": [as_dict(measurement) for measurement in self.measurements],
            "notes": list(self.notes),
        }


def from_dict(data: Any) -> Results:
    """Results from plain data; raises `ValueError` where it is something else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"it has no {FORMAT!r} under 'format'")
    try:
        fields = {name: value for name, value in data.items() if name != "format"}
        results = Results(
            **{
                **fields,
                "devices": tuple(Machine(**each) for each in data["devices"]),
                "ceilings": tuple(Ceiling(**each) for each in data["ceilings"]),
                "measurements": tuple(Measurement(**each) for each in data["measurements"]),
                "notes": tuple(map(str, data["notes"])),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    for each in results.measurements:
        if not all(_is_number(n) for n in (each.seconds, each.low, each.high)):
            raise ValueError(f"the times of {each.op} are not numbers")
    return results


def read_results(path: str) -> Results:
    """The results that `anydevice bench --json FILE` wrote.

    Raises `ConfigurationError` where there is no such file or it is something else.
    """
    try:
        return from_dict(json.loads(Path(path).read_text("utf-8")))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", path) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not what `anydevice bench --json FILE` writes: {error}", path
        ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
