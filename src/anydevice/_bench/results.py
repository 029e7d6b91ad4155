"""Benchmark results: ceilings, measurements, their machine, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from anydevice._core.checks import is_number
from anydevice._core.files import parse_json, read_small
from anydevice._core.record import Record
from anydevice.errors import ConfigurationError

FORMAT = 1
LARGEST_FILE = 2**25
"""Bytes; all ops on ten devices take less than a tenth of it."""

Bound = Literal["memory", "compute"]
State = Literal["measured", "unsupported", "failed"]
What = Literal["copy", "read", "matmul", "to device", "to host"]

_BYTES: Sequence[What] = ("copy", "read", "to device", "to host")
UNITS: Mapping[What, str] = {**dict.fromkeys(_BYTES, "B/s"), "matmul": "FLOP/s"}
"""Units of the rate of each ceiling."""

MARGIN = 1.05
"""Factor by which quartiles must lie apart: runs differ by more than their spread."""

FEW, UNSURE = 3, 1.25
"""Quartiles of fewer samples are widened by the factor `UNSURE`."""

_MAX_NAMED = 3
"""Cases that a sentence names; a longer list is counted."""


class Ceiling(Record):
    """The highest rate of a device, by an engine's kernel: bytes or, for matmul, FLOP a second."""

    device: str
    what: What
    rate: float
    engine: str
    kernel: str
    dtype: str | None = None

    @property
    def name(self) -> str:
        """The kind and the dtype, such as "matmul float32"."""
        return " ".join(filter(None, (self.what, self.dtype)))


class Measurement(Record):
    """One op in one case and dtype, on one device, through one engine.

    `seconds` is the median, `low` and `high` are the quartiles, `first` is the first call. `moved`
    counts the bytes that must pass to and from memory, 0 if the result is a view, `operations`
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
        """The measurement's identity across runs."""
        return self.device, self.engine, self.op, self.case, self.dtype

    @property
    def rate(self) -> float | None:
        """Operations a second where computing binds, else bytes a second; `None` if neither."""
        work = self.operations if self.bound == "compute" else self.moved
        return work / self.seconds if work and self.seconds else None

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds else 0.0


class MeasuredDevice(Record):
    """One device as it was when it was measured: its card, its driver, its libraries' versions."""

    device: str
    kind: str
    name: str
    uuid: str | None
    driver: str | None
    engines: Mapping[str, str]

    @property
    def libraries(self) -> str:
        """The engines with their versions, in one line."""
        return ", ".join(f"{name} {version}".strip() for name, version in self.engines.items())


class Results(Record):
    version: str
    made: str
    system: str
    devices: tuple[MeasuredDevice, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    quick: bool = False
    limit: float = 0.0
    seconds: float = 0.0

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """The measurements that have a time."""
        return tuple(row for row in self.measurements if row.state == "measured")

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **super().to_dict()}


def from_dict(data: Any) -> Results:
    """Return results from plain data; raise `ValueError` if it is something else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"it has no {FORMAT!r} under 'format'")
    try:
        fields = {name: value for name, value in data.items() if name != "format"}
        results = Results(
            **{
                **fields,
                "devices": tuple(MeasuredDevice(**values) for values in data["devices"]),
                "ceilings": tuple(Ceiling(**values) for values in data["ceilings"]),
                "measurements": tuple(Measurement(**values) for values in data["measurements"]),
                "notes": tuple(map(str, data["notes"])),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    for row in results.measurements:
        times = row.seconds, row.low, row.high
        if not all(is_number(seconds) and seconds >= 0 for seconds in times):
            raise ValueError(f"the times of {row.op} are not times in seconds")
    return results


def read_results(path: str) -> Results:
    """Read the results that `anydevice bench --json FILE` wrote."""
    try:
        return from_dict(parse_json(read_small(path, limit=LARGEST_FILE), finite=False))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", path) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not what `anydevice bench --json FILE` writes: {error}", path
        ) from error


class Change(Record):
    """One measurement in both runs. `factor` is how many times as long it takes now."""

    old: Measurement
    new: Measurement
    factor: float

    def to_dict(self) -> dict[str, Any]:
        times = {"before": self.old.seconds, "now": self.new.seconds, "factor": self.factor}
        return {**_names(self.new), **times}


class Comparison(Record):
    """The changes between two runs; true if they can be compared and nothing got worse.

    `lost` are measurements of before that fail now. `alike` counts changes within the noise,
    `only_before` and `only_now` count measurements of one run alone. `elsewhere` has a sentence
    for each difference of machine or version. If the runs have nothing in common, `apart` says
    what each of them has.
    """

    slower: tuple[Change, ...]
    faster: tuple[Change, ...]
    lost: tuple[Measurement, ...]
    alike: int
    only_before: int
    only_now: int
    elsewhere: tuple[str, ...] = ()
    apart: str | None = None

    def __bool__(self) -> bool:
        return not self.slower and not self.lost and self.apart is None

    def to_dict(self) -> dict[str, Any]:
        lost = [{**_names(row), "reason": row.reason} for row in self.lost]
        return {**super().to_dict(), "lost": lost}


def _names(row: Measurement) -> dict[str, str]:
    return {name: getattr(row, name) for name in ("op", "case", "dtype", "device", "engine")}


def compare_runs(old: Results, new: Results) -> Comparison:
    """Compare the measurements that both runs have, the largest change first."""
    before = {row.key: row for row in old.measured}
    now = {row.key: row for row in new.measured}
    changes = [
        Change(before[key], row, row.seconds / before[key].seconds)
        for key, row in now.items()
        if key in before and before[key].seconds
    ]
    slower = [change for change in changes if _is_slower(change.new, change.old)]
    faster = [change for change in changes if _is_slower(change.old, change.new)]
    lost = [row for row in new.measurements if row.key in before and row.key not in now]
    apart = None
    if not {row.key for row in old.measurements} & {row.key for row in new.measurements}:
        texts = (_in_words(run.measured) for run in (old, new))
        apart = "nothing in common: that run has {}, this one {}".format(*texts)
    return Comparison(
        tuple(sorted(slower, key=lambda change: -change.factor)),
        tuple(sorted(faster, key=lambda change: change.factor)),
        tuple(lost),
        len(changes) - len(slower) - len(faster),
        len(before.keys() - now.keys()) - len(lost),
        len(now.keys() - before.keys()),
        tuple(_differences(old, new)),
        apart,
    )


def _in_words(measured: Sequence[Measurement]) -> str:
    """Return the measured ops, dtypes, engines and devices as a phrase."""
    if not measured:
        return "nothing"
    ops = list(dict.fromkeys(f"{row.op} of {row.case}" for row in measured))
    named = ", ".join(ops) if len(ops) <= _MAX_NAMED else f"{len(ops)} cases"
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in measured))
    places = ", ".join(dict.fromkeys(f"{row.engine} on {row.device}" for row in measured))
    return f"{named} in {dtypes} with {places}"


def _is_slower(one: Measurement, other: Measurement) -> bool:
    """Whether `one` took longer than `other`, beyond the noise of both."""
    return one.low / _widening(one) > MARGIN * other.high * _widening(other)


def _widening(row: Measurement) -> float:
    return UNSURE if row.samples < FEW else 1.0


def _differences(old: Results, new: Results) -> Iterator[str]:
    """Yield a sentence for each difference besides the code that may explain a change."""
    if old.version != new.version:
        yield f"anydevice was {old.version}, and is {new.version}"
    if old.system != new.system:
        yield f"the system was {old.system}, and is {new.system}"
    if old.quick != new.quick:
        yield f"{'the earlier' if old.quick else 'this'} run was a quick one"
    earlier = {device.device: device for device in old.devices}
    for device in new.devices:
        before = earlier.get(device.device)
        if before is None:
            continue
        if before.name != device.name:
            yield f"another machine: {device.device} was {before.name}, and is {device.name}"
        elif before.uuid != device.uuid:
            yield f"{device.device} is another card of the same name"
        if before.driver != device.driver:
            yield f"the driver of {device.device} was {before.driver}, and is {device.driver}"
        for engine, version in device.engines.items():
            was = before.engines.get(engine, version)
            if was != version:
                yield f"{engine} on {device.device} was {was}, and is {version}"
