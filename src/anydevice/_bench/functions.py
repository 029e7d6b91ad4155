"""`benchmark`: a user's own function or model, timed on every device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from anydevice._arrays.memory.allocator import trim_heap
from anydevice._arrays.memory.out_of_memory import in_a_line
from anydevice._arrays.memory.stats import PeakMeter
from anydevice._arrays.move import device_of, is_array, to_device
from anydevice._arrays.trees.tree import flatten
from anydevice._bench.timing import seconds_of, time_calls
from anydevice._core import hooks
from anydevice._core.device import Device
from anydevice._core.record import NOTHING, Record, replace
from anydevice._machine.choose.scope import device as choose_device
from anydevice._machine.discovery.discover import devices as usable_devices
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice.errors import ConfigurationError, DeviceMismatchError


class DeviceTiming(Record):
    """The seconds of one call on one device: the median, the quartiles, and the first call.

    `speed_up` is relative to the first row of the CPU, or to the first row if the CPU was not
    measured. `peak` is the extra memory at the peak of one call, in bytes; on a CPU, of the whole
    process; `None` if unknown. If it could not be run, `reason` says why and there
    are no times.
    """

    device: str
    engine: str | None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    first: float | None = None
    samples: int = 0
    speed_up: float | None = None
    peak: int | None = None
    reason: str | None = None

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles, as a fraction of the median."""
        if not self.seconds or self.low is None or self.high is None or self.samples < 2:
            return None
        return (self.high - self.low) / 2 / self.seconds


class Timings(Record):
    """The result of `benchmark`, one row for each device and engine; print it, or use its `rows`.

    `timings["cpu"]` is the row of a device. If a device was measured with several engines, its rows
    are named by both: `timings["cpu with torch"]`.
    """

    function: str
    rows: tuple[DeviceTiming, ...]

    def __iter__(self) -> Iterator[DeviceTiming]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> DeviceTiming:
        named = self._by_name()
        if name in named:
            return named[name]
        several = any(row.device == name for row in self.rows)
        problem = "was measured with several engines" if several else "was not measured"
        raise ConfigurationError(
            f"{name!r} {problem}; the rows are: {', '.join(named)}", repr(name)
        )

    @property
    def speed_ups(self) -> dict[str, float]:
        """The speed-up of each row over the CPU, by its name in `timings[…]`."""
        named = self._by_name().items()
        return {name: row.speed_up for name, row in named if row.speed_up is not None}

    def _by_name(self) -> dict[str, DeviceTiming]:
        devices = Counter(row.device for row in self.rows)
        return {
            row.device if devices[row.device] == 1 else f"{row.device} with {row.engine}": row
            for row in self.rows
        }

    def __str__(self) -> str:
        return hooks.render(self, "text")

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")


def benchmark(
    function: Callable[..., Any],
    *arguments: Any,
    devices: Device | str | Sequence[Device | str] | None = None,
    named: Mapping[str, Any] = NOTHING,
    limit: float = 1.0,
    **unknown: Any,
) -> Timings:
    """Time your own function or model with these arguments on each device.

    The arguments, those in `named` (by name) and the model itself are moved to the device with
    `to_device`. Each call is synchronized, the first one is reported separately, and measuring
    takes `limit` seconds per device. Arrays stay in their library if it can use the device. Models,
    which are moved in place, are moved back afterwards. Without `devices`, every usable one is
    tried, the CPU first (and not again through OpenCL); a device on which it fails is a row with
    the reason. A device with an engine is measured with that engine, so several engines of one
    device can be compared.

    A function may write into its arguments: it gets copies, and the arrays that you passed are not
    changed, except tensors that require gradients. Its own state, such as that of a model, may
    change.

    >>> timings = benchmark(numpy.tanh, numpy.ones(1000), devices=["cpu"], limit=0.01)
    >>> timings["cpu"].speed_up
    1.0

    Raises `DeviceNotFoundError` if a given device is not usable, and `ConfigurationError` for an
    unknown option (your function's own go into `named`), an invalid limit, or an empty list of
    devices.
    """
    if unknown:
        inside = ", ".join(f"{name!r}: …" for name in unknown)
        raise ConfigurationError(
            f"benchmark() has no option {', '.join(map(repr, unknown))}; pass what your function "
            f"takes by name as named={{{inside}}}",
            ", ".join(unknown),
        )
    if not callable(function):
        raise ConfigurationError(
            f"benchmark() takes a function or a model, not a {type(function).__name__}", "function"
        )
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ConfigurationError(
            f"named is a mapping from names to arguments, such as {{'x': x}}, not {named!r:.80}",
            "named",
        )
    limit = seconds_of(limit)
    tree = (function, arguments, dict(named))
    owners = (owner_of(array) for array in flatten(tree, is_array)[0].values)
    library = next((owner.name for owner in owners if owner and owner.name != "numpy"), None)
    places = list(dict.fromkeys(_targets(devices, library)))
    if not places:
        raise ConfigurationError(
            "benchmark() was given no devices; leave them out for all", "devices"
        )
    homes = [(part, _home(part)) for part in (function, *arguments, *named.values())]
    rows = []
    try:
        for place, engine in places:
            rows.append(_row(tree, place.served_by(engine), limit))
    finally:
        for part, home in homes:
            if home is not None:
                to_device(part, home)  # does nothing unless it was moved in place
    name = str(getattr(function, "__name__", None) or type(function).__name__)
    return Timings(name, _with_speed_ups(rows))


def _home(part: Any) -> Device | None:
    """Return the device of `part`; `None` if it has none, or several."""
    try:
        return device_of(part)
    except DeviceMismatchError:
        return None


def _targets(
    devices: Device | str | Sequence[Device | str] | None, library: str | None
) -> Iterator[tuple[Device, str | None]]:
    """Yield each device with the requested engine, or the one of the arrays' library."""
    if devices is None:
        # Every usable device once: the CPU first, and not again through OpenCL.
        for device in sorted(usable_devices(), key=lambda device: device.kind != "cpu"):
            if device.kind != "cpu" or (device.backend, device.index) == ("cpu", 0):
                yield device, _engine(device, library)
        return
    for place in [devices] if isinstance(devices, Device | str) else devices:
        engine = place.engine_asked if isinstance(place, Device) else None
        device = choose_device(place)
        yield device, engine or _engine(device, library)


def _engine(device: Device, library: str | None) -> str | None:
    status = device.status
    return library if status and library in status.engines else device.engine


def _row(tree: tuple[Any, Any, Any], device: Device, limit: float) -> DeviceTiming:
    try:
        figures = _figures_on(tree, device, limit)
    except Exception as error:  # an error of the function is a result
        figures = {"reason": in_a_line(error, device)}
    return DeviceTiming(str(device), device.engine, **figures)


def _figures_on(tree: tuple[Any, Any, Any], device: Device, limit: float) -> dict[str, Any]:
    function, *given = to_device(tree, device)
    arguments, named = _with_copies(tuple(given), of=tree[1:])
    engine = registry.load(device.engine or "numpy")

    def finish(results: list[Any]) -> None:
        groups: dict[str, list[Any]] = {}
        for value in _arrays(results):
            owner = owner_of(value)
            assert owner is not None
            groups.setdefault(owner.name, []).append(value)
        for name, values in groups.items():
            registry.load(name).finish(values)
        if not groups:  # it gives no arrays: wait for all that it started
            engine.synchronize(device)

    def call(_: int) -> Any:
        return function(*arguments, **named)

    timing = time_calls(call, finish, limit=limit, max_calls=100)
    engine.memory.release(device)
    trim_heap()  # else memory freed by earlier calls would hide this call's
    meter = PeakMeter(device)
    result = call(0)
    finish([result])
    peak = None if meter.peak is None else max(0, meter.peak - (meter.before or 0))
    return {**timing.figures, "peak": peak}


def _arrays(tree: Any) -> Iterator[Any]:
    """Yield the arrays of a result; common trees take the fast path, since this is timed."""
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from _arrays(part)
    elif isinstance(tree, dict):
        yield from _arrays(list(tree.values()))
    elif is_array(tree):
        yield tree
    else:
        yield from flatten(tree, is_array)[0].values


def _with_speed_ups(rows: Sequence[DeviceTiming]) -> tuple[DeviceTiming, ...]:
    timed = [row for row in rows if row.seconds]
    base = next((row for row in timed if row.device == "cpu"), next(iter(timed), None))
    if base is None or base.seconds is None:
        return tuple(rows)
    return tuple(
        replace(row, speed_up=base.seconds / row.seconds) if row.seconds else row for row in rows
    )


def _with_copies(tree: Any, *, of: Any) -> Any:
    """Return the tree with a copy of each array that is also in `of`: the caller's own arrays.

    Arrays of a model that is moved in place are its state and are not copied, nor are arrays that
    require gradients, since no gradient would flow through a copy.

    >>> given = numpy.ones(2)
    >>> _with_copies([given], of=[given])[0] is given
    False
    """
    theirs = set(map(id, flatten(of, is_array)[0].values))
    leaves, rebuild = flatten(tree, is_array)
    values = list(leaves.values)
    for position, value in enumerate(values):
        if id(value) in theirs and not leaves[position].kept:
            values[position] = _copy(value)
    return rebuild(values)


def _copy(value: Any) -> Any:
    if getattr(value, "requires_grad", False):
        return value
    try:
        return deepcopy(value)  # which keeps the order of its elements in memory
    except Exception:  # a library without such copies says so in its own way
        owner = owner_of(value)
        assert owner is not None
        return owner.place(owner.to_host(value), owner.devices_of(value)[0])
