"""The memory that each device has now, and the range of a model's layers that each one gets."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from anydevice._core.backends import KINDS
from anydevice._core.device import Device, parse_place
from anydevice._core.finding import Facts, same_card
from anydevice._core.record import Record
from anydevice._machine.choose.scope import device_from_library
from anydevice._machine.discovery.discover import Report, discover, kept_report
from anydevice._machine.discovery.discover import devices as usable_devices
from anydevice._machine.engines import registry
from anydevice._machine.settings.config import current
from anydevice._plan.estimates import MemoryEstimate
from anydevice._plan.families import ModelShape
from anydevice._plan.overheads import CONTEXT, idle_bytes, plannable
from anydevice.errors import ConfigurationError, DeviceNotFoundError

DeviceNames = str | Device | Iterable[Any] | None
"""Devices as a caller names them: one or several, objects or names, or all that are usable."""

_SHARING = ("unified", "host")
_RECENT = 0.5
"""Seconds for which the free memory that discovery read is not read again."""

_looked: tuple[Report, float] | None = None


class AvailableMemory(Record):
    """The memory that this process may still take of a device, in bytes.

    `free` is what is free now, and what the libraries of this process hold without using it.
    `limit` is what they may still take of the amount that `configure(memory=…)` allows, `None`
    if nothing was set.
    """

    device: Device
    free: int
    limit: int | None = None
    facts: Facts = Facts("unknown")

    @property
    def bytes(self) -> int:
        """The bytes that a model may need there in all.

        A driver's context is part of what a model needs, but does not count for the limit.
        """
        return self.free if self.limit is None else min(self.free, self.limit + CONTEXT)

    def shares_memory_with(self, other: AvailableMemory) -> bool:
        """Whether both take from one memory: two views of a card, or of the host."""
        if self.device == other.device or same_card(self.facts, other.facts):
            return True
        return self.facts.memory_kind in _SHARING and other.facts.memory_kind in _SHARING


def look_ahead() -> None:
    """Discover the machine now, in a thread, while a model's files are read."""
    global _looked
    if kept_report() is None:
        _looked = discover(), time.monotonic()


def available_memory(names: DeviceNames) -> tuple[tuple[AvailableMemory, ...], tuple[str, ...]]:
    """Return the memory of each device, the CPU's last, and notes on those that do not tell it.

    Without `names` they are all usable devices of this machine; one that is seen through two
    backends counts once. Raises `DeviceNotFoundError` if a device that is named is not usable.
    """
    recent = kept_report() is None or (
        _looked is not None and _looked[0] is discover() and time.monotonic() - _looked[1] < _RECENT
    )
    devices = _all_devices() if names is None else _named_devices(names)
    found: list[AvailableMemory] = []
    notes: list[str] = []
    for device in sorted(devices, key=lambda device: device.backend == "cpu"):
        memory = _memory_of(device, recent)
        if memory is None:
            notes.append(f"{device} does not tell how much memory it has: it is not counted")
        else:
            found.append(memory)
    return tuple(found), tuple(notes)


def _all_devices() -> tuple[Device, ...]:
    first = (next((each for each in card if each.usable), None) for card in discover().cards)
    # The processor seen once more through OpenCL is only used by name.
    return _one_processor(
        device
        for device in first
        if device is not None and (device.kind != "cpu" or device.backend == "cpu")
    )


def _one_processor(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices without the extra CPU devices of JAX."""
    return tuple(device for device in devices if device.backend != "cpu" or not device.index)


def _named_devices(names: str | Device | Iterable[Any]) -> tuple[Device, ...]:
    several = isinstance(names, Iterable) and not isinstance(names, str | Device)
    listed: Iterable[Any] = names if several else (names,)  # type: ignore[assignment]
    devices = tuple(dict.fromkeys(device for name in listed for device in _devices_of(name)))
    for device in devices:
        if not device.usable:
            raise DeviceNotFoundError(
                f"{device} is not usable: {device.why_not}; anydevice.devices() lists what is",
                tuple(discover()),
            )
    if not devices:
        raise ConfigurationError("no device is named; leave devices out to use all", "devices")
    return devices


def _devices_of(name: Any) -> tuple[Device, ...]:
    if isinstance(name, Device):
        return (name,)
    if not isinstance(name, str):
        device = device_from_library(name)
        if device is None:
            raise ConfigurationError(
                f"{name!r} is not a device; write a Device or a name such as 'cuda:0'", "devices"
            )
        return (device,)
    if name not in KINDS and parse_place(name)[1] is not None:
        return (Device(name),)
    found = _one_processor(usable_devices(name))
    if name in KINDS and not found:
        raise DeviceNotFoundError(
            f"no {name} of this machine is usable; anydevice.devices() lists what is",
            tuple(discover()),
        )
    return found or (Device(name),)


def _memory_of(device: Device, recent: bool) -> AvailableMemory | None:
    status = device.status
    assert status is not None
    facts, in_use = status.facts, 0
    if recent and not registry.loaded_engines():
        # Discovery has just read what is free: asking the driver again would take as long again.
        free = facts.free_memory
    else:
        from anydevice._arrays.memory.stats import (
            memory_stats,  # a plan on the command line needs none
        )

        stats = memory_stats(device)
        free, in_use = stats.available, stats.in_use or 0
    amounts = [n for n in (free, facts.usable_memory, facts.total_memory) if n is not None]
    if not amounts:
        return None
    limit = _limit(device)
    left = None if limit is None else max(0, limit - in_use)
    return AvailableMemory(device, min(amounts), left, facts)


def _limit(device: Device) -> int | None:
    """The memory that the settings allow this process; the CPU's libraries keep to no limit."""
    config, origins = current()
    if "memory" not in origins or device.kind == "cpu":
        return None
    from anydevice._machine.choose.limits import limit_of  # rarely needed, and slow to load

    return limit_of(device, config)


_STEPS = 1000
"""Precision with which the common share of all devices is searched."""


class MemoryParts(Record):
    """The bytes of a range of layers on one device, part by part, as in `MemoryEstimate`.

    >>> MemoryParts(weights=10, kv_cache=4, activations=2).total
    16
    """

    weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.kv_cache + self.activations + self.logits + self.overhead

    def to_dict(self) -> dict[str, int]:
        """Return the same as plain data, ready for JSON."""
        return {**super().to_dict(), "total": self.total}


class LayerRange(Record):
    """Consecutive layers on one device; `slot` is the device's position in its group."""

    slot: int
    layers: range


class LayeredModel:
    """The memory of a model that can be split between its layers.

    `weights` and `cache` have the bytes of each layer. `first` is what lies with the first layer
    (embedding, vision tower), `last` what lies with the last (head). `tied` is counted once more
    where the two are on different devices, because the head is then a copy of the embedding. Every
    device needs the `activations`, the last one also the `logits`, and every one but the CPU an
    `overhead`, which follows from the bytes of the cache on it.

    >>> model = LayeredModel((10, 10, 10), (1, 1, 1), first=5, last=0, tied=5, logits=2)
    >>> model.on(range(0, 3)).weights, model.on(range(0, 1)).weights, model.on(range(2, 3)).total
    (35, 15, 18)
    """

    def __init__(
        self,
        weights: Sequence[int],
        cache: Sequence[int],
        *,
        first: int = 0,
        last: int = 0,
        tied: int = 0,
        activations: int = 0,
        logits: int = 0,
        overhead: Callable[[int], int] = lambda _: 0,
    ) -> None:
        # A model without layers is one piece, that of first and last together.
        self.count = max(1, len(weights))
        self._weights = (0, *accumulate(weights or (0,)))
        self._cache = (0, *accumulate(cache or (0,)))
        self._first, self._last, self._tied = first, last, tied
        self._activations, self._logits, self._overhead = activations, logits, overhead

    @classmethod
    def of(cls, shape: ModelShape, estimate: MemoryEstimate) -> LayeredModel:
        """Return a model with its needs for the context of the estimate."""
        idle = estimate.overheads.idle
        rest = estimate.overheads.total - idle
        return cls(
            shape.layer_bytes,
            shape.kv_bytes(estimate.context, estimate.batch, estimate.kv_dtype),
            # Of what is neither layer nor head only vision towers are large, and they come first.
            first=shape.embedding_bytes + shape.other_bytes,
            last=shape.head_bytes,
            tied=shape.embedding_bytes if shape.tied_embeddings else 0,
            activations=estimate.activations,
            logits=estimate.logits,
            overhead=lambda cache: rest + min(idle, idle_bytes(cache, estimate.activations)),
        )

    def on(self, layers: range, *, cpu: bool = False) -> MemoryParts:
        """Return the memory that a device with these layers needs."""
        if not layers:
            return MemoryParts()
        start, stop = layers.start, layers.stop
        cache = self._cache[stop] - self._cache[start]
        return MemoryParts(
            self._weights_of(start, stop),
            cache,
            self._activations,
            self._logits if stop == self.count else 0,
            0 if cpu else self._overhead(cache),
        )

    def needed(self, cpu: bool, start: int, stop: int) -> int:
        """Return the total of a range that is not empty, at a fraction of the time of `on`."""
        cache = self._cache[stop] - self._cache[start]
        logits = self._logits if stop == self.count else 0
        always = self._activations + (0 if cpu else self._overhead(cache))
        return self._weights_of(start, stop) + cache + logits + always

    def _weights_of(self, start: int, stop: int) -> int:
        weights = self._weights[stop] - self._weights[start]
        if start == 0:
            weights += self._first
        if stop == self.count:
            weights += self._last + (self._tied if start else 0)
        return weights


def fill(
    model: LayeredModel, budgets: Sequence[int], cpus: Collection[int] = ()
) -> list[LayerRange]:
    """Fill the devices with layers, one device after the other, until none is left.

    `budgets` are the bytes of the devices, `cpus` the positions of those that are the CPU. A device
    that is too small for a single layer is passed over. If the last range does not end at the last
    layer, the model does not fit in this order, however it is split: no other split has more
    layers on the first devices.

    >>> model = LayeredModel((10,) * 6, (0,) * 6)
    >>> [str(each.layers) for each in fill(model, (25, 5, 100))]
    ['range(0, 2)', 'range(2, 6)']
    """
    ranges: list[LayerRange] = []
    start = 0
    for slot, budget in enumerate(budgets):
        ends = range(start + 1, model.count + 1)
        fitting = bisect_right(ends, budget, key=partial(model.needed, slot in cpus, start))
        if fitting:
            ranges.append(LayerRange(slot, range(start, start + fitting)))
            start += fitting
    return ranges


def holds_all(model: LayeredModel, ranges: Sequence[LayerRange]) -> bool:
    """Whether the ranges reach to the last layer."""
    return bool(ranges) and ranges[-1].layers.stop == model.count


def spread(model: LayeredModel, budgets: Sequence[int]) -> list[LayerRange] | None:
    """Split layers so that the fullest device has most left; return `None` if they do not fit.

    Every device is filled to about the same share of its memory, so a large device gets more
    layers than a small one.

    >>> [len(each.layers) for each in spread(LayeredModel((1,) * 12, (0,) * 12), (20, 10)) or ()]
    [8, 4]
    """

    def filled(step: int) -> list[LayerRange]:
        return fill(model, [budget * step // _STEPS for budget in budgets])

    if not holds_all(model, filled(_STEPS)):
        return None
    steps = range(1, _STEPS)
    return filled(1 + bisect_right(steps, False, key=lambda step: holds_all(model, filled(step))))


class DeviceGroup(Record):
    """Devices that would hold a model together, in the order of its layers."""

    devices: tuple[AvailableMemory, ...]

    @property
    def budgets(self) -> list[int]:
        """The bytes to plan with on each: what it has, less a margin on an accelerator."""
        return [
            each.bytes if each.device.kind == "cpu" else plannable(each.bytes)
            for each in self.devices
        ]

    @property
    def cpus(self) -> tuple[int, ...]:
        """The positions that are the CPU."""
        return tuple(n for n, each in enumerate(self.devices) if each.device.kind == "cpu")


def device_groups(available: Sequence[AvailableMemory]) -> Iterator[DeviceGroup]:
    """Yield the groups to try, the preferred one first.

    Every accelerator alone; then as few of them together as it takes, those with most memory
    first; then with the CPU for what is left; then the CPU. Devices that share one memory are
    never in one group.
    """
    backends = [each.device.backend for each in available]
    largest = sorted(
        (each for each in available if each.device.kind != "cpu"),
        key=lambda each: (backends.index(each.device.backend), -each.bytes),
    )
    yield from (DeviceGroup((each,)) for each in largest)
    apart: list[AvailableMemory] = []
    for each in largest:
        if not any(each.shares_memory_with(other) for other in apart):
            apart.append(each)
            if len(apart) > 1:
                yield DeviceGroup(tuple(sorted(apart, key=available.index)))
    together = tuple(sorted(apart, key=available.index))
    for each in available:
        if each.device.kind == "cpu":
            if apart and not any(each.shares_memory_with(other) for other in apart):
                yield DeviceGroup((*together, each))
            yield DeviceGroup((each,))


class Assignment(Record):
    """A group, its number among those that were tried, and the layers that its devices get."""

    number: int
    group: DeviceGroup
    ranges: tuple[LayerRange, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that get layers."""
        return tuple(self.group.devices[each.slot].device for each in self.ranges)

    @property
    def only_cpu(self) -> bool:
        """Whether no accelerator gets layers."""
        return all(device.kind == "cpu" for device in self.devices)


def assign(
    model: LayeredModel, groups: Sequence[DeviceGroup], *, evenly: bool = True
) -> Assignment | None:
    """Return the first group that holds all of a model, and how; `None` if none does.

    The layers are spread over the devices in proportion to their memory, unless `evenly` is false.
    Layers on the CPU slow the rest down: it gets those that the others cannot hold.
    """
    for number, group in enumerate(groups):
        ranges = fill(model, group.budgets, group.cpus)
        if holds_all(model, ranges):
            if evenly and not group.cpus:
                ranges = spread(model, group.budgets) or ranges
            return Assignment(number, group, tuple(ranges))
    return None
