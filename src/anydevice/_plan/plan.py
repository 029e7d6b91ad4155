"""Plans: whether a model fits, which device holds which layers, and what would fit otherwise."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from anydevice._core.backends import KINDS
from anydevice._core.device import Device, parse_place
from anydevice._core.dtypes import DTYPES
from anydevice._core.finding import Facts, same_card
from anydevice._core.record import Record
from anydevice._libraries.registry import part
from anydevice._machine.choose.scope import device_from_library
from anydevice._machine.discovery.discover import Report, discover, kept_report
from anydevice._machine.discovery.discover import devices as usable_devices
from anydevice._machine.engines import registry
from anydevice._machine.settings.config import current
from anydevice._plan.cards import Cluster, cluster_of, names_cluster
from anydevice._plan.estimates import (
    CONTEXT,
    MemoryEstimate,
    MemoryParts,
    RenderedPlan,
    estimate_inference,
    idle_bytes,
    plannable,
)
from anydevice._plan.families import ModelShape
from anydevice._plan.model import shape_of
from anydevice._plan.quantization import OFFERED, SCHEMES, in_scheme
from anydevice.errors import ConfigurationError, DeviceNotFoundError

DeviceNames = str | Device | Iterable[Any] | None
"""Devices as a caller names them: one or several, objects or names, or all that are usable."""

_SHARING = ("unified", "host")
_RECENT = 0.5
"""Seconds for which the free memory that discovery read is not read again."""

_TORCH_NAMES = {"rocm": "cuda", "metal": "mps"}

_looked: tuple[Report, float] | None = None


class AvailableMemory(Record):
    """The bytes that this process may take of a device: `free` or cached ones, within `limit`."""

    device: Device
    free: int
    limit: int | None = None
    facts: Facts = Facts("unknown")

    @property
    def bytes(self) -> int:
        """The bytes that a model may need there; a driver's context does not count as limited."""
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
    """Return the memory of each device, the CPU's last, and notes on devices of unknown memory."""
    recent = kept_report() is None or (
        _looked is not None and _looked[0] is discover() and time.monotonic() - _looked[1] < _RECENT
    )
    devices = _all_devices() if names is None else _named_devices(names)
    memories: list[AvailableMemory] = []
    notes: list[str] = []
    for device in sorted(devices, key=lambda device: device.backend == "cpu"):
        memory = _memory_of(device, recent)
        if memory is None:
            notes.append(f"{device} does not tell how much memory it has: it is not counted")
        else:
            memories.append(memory)
    return tuple(memories), tuple(notes)


def _all_devices() -> tuple[Device, ...]:
    first = (next((device for device in card if device.usable), None) for card in discover().cards)
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
    devices = _one_processor(usable_devices(name))
    if name in KINDS and not devices:
        raise DeviceNotFoundError(
            f"no {name} of this machine is usable; anydevice.devices() lists what is",
            tuple(discover()),
        )
    return devices or (Device(name),)


def _memory_of(device: Device, recent: bool) -> AvailableMemory | None:
    status = device.status
    assert status is not None
    facts, in_use = status.facts, 0
    if recent and not registry.loaded_engines():
        # Discovery has just read the free memory; the driver would take as long again.
        free = facts.free_memory
    elif device.backend == "cpu":
        free = device.facts.free_memory  # no library keeps memory of the host for later
    else:
        # A plan on the command line does not need it.
        from anydevice._arrays.memory.stats import memory_stats

        stats = memory_stats(device)
        free, in_use = stats.available, stats.in_use or 0
    amounts = [n for n in (free, facts.usable_memory, facts.total_memory) if n is not None]
    if not amounts:
        return None
    config, origins = current()
    limit = None
    if "memory" in origins and device.kind != "cpu":  # the CPU's libraries have no limit
        from anydevice._machine.choose.limits import limit_of  # rarely needed, and slow to load

        limit = limit_of(device, config)
    left = None if limit is None else max(0, limit - in_use)
    return AvailableMemory(device, min(amounts), left, facts)


_STEPS = 1000
"""The precision of the share to which all devices are filled."""


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
        # A model without layers is one piece: first and last together.
        self.count = max(1, len(weights))
        self._weights = (0, *accumulate(weights or (0,)))
        self._cache = (0, *accumulate(cache or (0,)))
        self._first, self._last, self._tied = first, last, tied
        self._activations, self._logits, self._overhead = activations, logits, overhead

    @classmethod
    def of(cls, shape: ModelShape, estimate: MemoryEstimate) -> LayeredModel:
        idle = estimate.overheads.idle
        rest = estimate.overheads.total - idle
        return cls(
            shape.layer_bytes,
            shape.kv_bytes(estimate.context, estimate.batch, estimate.kv_dtype),
            # Beside layers and head only vision towers are large, and they come first.
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
            return MemoryParts(0, 0, 0, 0, 0)
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
    """Fill the devices with layers, one after the other; `cpus` are the CPU's positions."""
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
    """Fill all devices to the same smallest share, by bisection; `None` if layers do not fit.

    >>> [len(part.layers) for part in spread(LayeredModel((1,) * 12, (0,) * 12), (20, 10)) or ()]
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
        """The bytes to plan with on each device: its memory, less a margin on accelerators."""
        return [
            memory.bytes if memory.device.kind == "cpu" else plannable(memory.bytes)
            for memory in self.devices
        ]

    @property
    def cpus(self) -> tuple[int, ...]:
        """The positions that are the CPU."""
        return tuple(n for n, memory in enumerate(self.devices) if memory.device.kind == "cpu")


def device_groups(available: Sequence[AvailableMemory]) -> Iterator[DeviceGroup]:
    """Yield the groups to try, the preferred one first.

    Each accelerator alone; several accelerators, the largest first and as few as possible; these
    with the CPU; the CPU alone. Devices that share one memory are never in one group.
    """
    backends = [memory.device.backend for memory in available]
    largest = sorted(
        (memory for memory in available if memory.device.kind != "cpu"),
        key=lambda memory: (backends.index(memory.device.backend), -memory.bytes),
    )
    yield from (DeviceGroup((memory,)) for memory in largest)
    apart: list[AvailableMemory] = []
    for owner in largest:
        if not any(owner.shares_memory_with(other) for other in apart):
            apart.append(owner)
            if len(apart) > 1:
                yield DeviceGroup(tuple(sorted(apart, key=available.index)))
    together = tuple(sorted(apart, key=available.index))
    for owner in available:
        if owner.device.kind == "cpu":
            if apart and not any(owner.shares_memory_with(other) for other in apart):
                yield DeviceGroup((*together, owner))
            yield DeviceGroup((owner,))


class Assignment(Record):
    """A group, its number in the order of trial, and the layers that its devices get."""

    number: int
    group: DeviceGroup
    ranges: tuple[LayerRange, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that get layers."""
        return tuple(self.group.devices[stage.slot].device for stage in self.ranges)

    @property
    def only_cpu(self) -> bool:
        """Whether no accelerator gets layers."""
        return all(device.kind == "cpu" for device in self.devices)


def assign(
    model: LayeredModel, groups: Sequence[DeviceGroup], *, evenly: bool = True
) -> Assignment | None:
    """Return the first group that holds all of a model, with its layers; `None` if none does."""
    for number, group in enumerate(groups):
        ranges = fill(model, group.budgets, group.cpus)
        if holds_all(model, ranges):
            if evenly and not group.cpus:
                ranges = spread(model, group.budgets) or ranges
            return Assignment(number, group, tuple(ranges))
    return None


Change = Literal["context", "batch", "kv_dtype", "dtype", "weights"]


class Placement(Record):
    """A device's part of a model: its layers and their bytes, and the memory `free` there."""

    device: Device
    layers: range
    parts: MemoryParts
    free: int

    @property
    def share(self) -> float:
        """How much of the free memory is needed: 1.0 is all of it."""
        return self.parts.total / max(1, self.free)

    def to_dict(self) -> dict[str, object]:
        """Return the placement as plain data for JSON; `layers` are the first and the last."""
        return {
            "device": str(self.device),
            "layers": [self.layers[0], self.layers[-1]] if self.layers else None,
            **self.parts.to_dict(),
            "free": self.free,
            "share": round(self.share, 4),
        }


class Alternative(Record):
    """One change that would help: another context, batch or dtype.

    A change of "weights" quantizes them while the model is loaded; their scales are counted.
    `devices` would then hold the model, in `total` bytes.
    """

    change: Change
    value: int | str
    devices: tuple[Device, ...]
    total: int

    def to_dict(self) -> dict[str, object]:
        """Return the alternative as plain data, ready for JSON."""
        return {**super().to_dict(), "devices": [str(device) for device in self.devices]}


class Plan(RenderedPlan):
    """Whether a model fits, and which device holds which layers.

    A plan keeps 3 % of the estimate free on every accelerator, because PyTorch's allocator took up
    to that much more in nine of ten models. A share above 97 % does not fit.

    `device` holds the whole model; it is `None` if the model takes several or does not fit.
    `placements` are in the order of the layers. If the model does not fit, they show how far
    several devices reach, and `unplaced` are the bytes of weights, cache and logits without a
    place; a single device is shown with the whole model, and a share above 1. Each of the
    `alternatives` alone would make the model fit, or fit on fewer devices than the plan needs.
    `notes` say what could not be counted.
    """

    fits: bool
    device: Device | None
    placements: tuple[Placement, ...]
    estimate: MemoryEstimate
    alternatives: tuple[Alternative, ...] = ()
    unplaced: int = 0
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that hold something, in the order of the layers."""
        return tuple(placement.device for placement in self.placements if placement.layers)

    @property
    def free(self) -> int:
        """The free memory of all devices of the plan together."""
        return sum(placement.free for placement in self.placements)

    def device_map(self, model: Any) -> dict[str, str]:
        """Return the device of each part of a PyTorch module, as transformers takes it.

        The module may be empty, on PyTorch's device "meta". Units before the layers go with the
        first layer, units behind them with the last, and a tied head with the embedding. Raises
        `ConfigurationError` for a plan that does not fit or is for another model.
        """
        torch = part("torch", "pipeline")
        units = torch.module_units(model)
        count = sum(x.numel() for x in model.parameters())
        placements = planned_units(self, [is_layer for _, is_layer in units.values()], count)
        devices = {}
        for name, placement in zip(units, placements, strict=True):
            device = placement.device
            indexed = f"{_TORCH_NAMES.get(device.backend, device.backend)}:{device.index}"
            devices[name] = "cpu" if device.kind == "cpu" else indexed
        first = next(iter(devices.values()))
        for name, (unit, is_layer) in units.items():
            if not is_layer and not torch.bytes_of(unit):  # such as rotations, made for all layers
                devices[name] = first
        return devices | {name: devices[tied] for name, tied in torch.tied_units(units).items()}

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain data, ready for JSON."""
        return {**super().to_dict(), "device": str(self.device) if self.device else None}


def plan_inference(
    model: Any = None,
    devices: DeviceNames | Cluster = None,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: object = None,
    kv_dtype: object = None,
    prefill: int | None = None,
    weights: str = "stored",
    **numbers: Any,
) -> Plan:
    """Plan a model with this context: on one device, on several, or only after a change.

    `model` and `numbers` are as in `estimate_inference`. `devices` are devices or their names
    ("cuda" is every card of it), or cards that need not be here, "2xH100"; the default is all
    usable devices. Free memory is read now, and the limit of `configure(memory=…)` applies. One
    accelerator is preferred to several, and several to the CPU, which takes the layers that do not
    fit on them. Nothing is loaded and no array library is imported.

    >>> model = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    ...          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    ...          "vocab_size": 128256, "tie_word_embeddings": False}
    >>> with testing.fake_machine(cuda=2, memory="12GiB"):
    ...     plan = plan_inference(model, "cuda", context=8192, dtype="bfloat16")
    >>> plan.fits, plan.device, [len(placement.layers) for placement in plan.placements]
    (True, None, [16, 16])

    Raises `ConfigurationError` if the model cannot be read or a number is invalid, and
    `DeviceNotFoundError` if a given device is not usable.
    """
    given = isinstance(model, ModelShape)
    shape = shape_of(model, dtype=dtype, weights=weights, **numbers)
    estimate = estimate_inference(
        shape, context=context, batch=batch, kv_dtype=kv_dtype, prefill=prefill
    )
    request = _Request(
        shape,
        estimate,
        None if given else lambda: shape_of(model, dtype=_HALF, weights=weights, **numbers),
    )
    if isinstance(devices, Cluster) or (isinstance(devices, str) and names_cluster(devices)):
        cluster = cluster_of(devices)
        card, facts = cluster.card, Facts(cluster.card.name)
        cards = (Device(card.backend, index) for index in range(cluster.cards))
        available = tuple(AvailableMemory(device, card.memory, facts=facts) for device in cards)
        notes: tuple[str, ...] = (f"planned for {cluster}, with all of its memory free",)
    else:
        available, notes = available_memory(devices)
    groups = tuple(device_groups(available))
    layered = LayeredModel.of(shape, estimate)
    assignment = assign(layered, groups)
    if assignment is None:
        return _does_not_fit(request, layered, groups, notes)
    placements = _placements(layered, assignment.group, assignment.ranges)
    if assignment.only_cpu:
        estimate = estimate.on_cpu()
    alone = placements[0].device if len(placements) == 1 else None
    settled = alone is not None and alone.kind != "cpu"
    preferred = () if settled else groups[: assignment.number]
    others = request.alternatives(preferred)
    return Plan(True, alone, placements, estimate, others, notes=notes)


LOADED_CONTEXT = 8192
"""The largest default context of a language model that is loaded."""
PREFILL_CHUNK = {"cpu": 512, "other": 4096}
"""Tokens of all prompts that a loaded model reads at a time: more are no faster."""


def loading_options(on_cpu: bool, dtype: object = None) -> dict[str, Any]:
    """Return the options of `plan_inference` for `llm.load`: a CPU computes in float32."""
    wanted = "float32" if dtype is None and on_cpu else dtype
    return {"dtype": wanted, "prefill": PREFILL_CHUNK["cpu" if on_cpu else "other"]}


def plan_loading(
    model: Any, devices: DeviceNames | Cluster = None, *, context: int | None = None,
    dtype: object = None,
    **more: Any,
) -> Plan:  # fmt: skip
    """Return the plan that `llm.load` makes, for any devices; `more` is as in `plan_inference`."""

    def plan_on(on_cpu: bool) -> Plan:
        options = loading_options(on_cpu, dtype)
        longest = shape_of(model, dtype=options["dtype"]).longest_context or LOADED_CONTEXT
        wanted = min(longest, LOADED_CONTEXT) if context is None else context
        return plan_inference(model, devices, context=wanted, **options, **more)

    plan = plan_on(False)
    kinds = {placement.device.kind for placement in plan.placements}
    return plan_on(True) if kinds == {"cpu"} else plan


def _does_not_fit(
    request: _Request, layered: LayeredModel, groups: Sequence[DeviceGroup], notes: tuple[str, ...]
) -> Plan:
    group = max(groups, key=lambda group: sum(group.budgets), default=DeviceGroup(()))
    filled = fill(layered, group.budgets, group.cpus)
    reached = filled[-1].layers.stop if filled else 0
    rest = layered.on(range(reached, layered.count))
    only_cpu = len(group.devices) == len(group.cpus) == 1
    if len(group.devices) == 1:
        filled = [LayerRange(0, range(layered.count))]
    ranges = {slot: LayerRange(slot, range(0)) for slot in range(len(group.devices))}
    ranges |= {stage.slot: stage for stage in filled}
    return Plan(
        False,
        None,
        _placements(layered, group, ranges.values()),
        request.estimate.on_cpu() if only_cpu else request.estimate,
        request.alternatives(groups),
        rest.weights + rest.kv_cache + rest.logits,
        notes,
    )


def _placements(
    layered: LayeredModel, group: DeviceGroup, ranges: Iterable[LayerRange]
) -> tuple[Placement, ...]:
    def placed(slot: int, layers: range) -> Placement:
        memory, parts = group.devices[slot], layered.on(layers, cpu=slot in group.cpus)
        return Placement(memory.device, layers, parts, memory.bytes)

    return tuple(placed(stage.slot, stage.layers) for stage in ranges)


_HALF = "bfloat16"
_SMALL_CACHE = "float8_e4m3fn"


class _Request(Record):
    """A request: the model, its estimate, and the same model with weights of 16 bits."""

    shape: ModelShape
    estimate: MemoryEstimate
    in_half: Callable[[], ModelShape] | None

    def alternatives(self, groups: Sequence[DeviceGroup]) -> tuple[Alternative, ...]:
        """Return the single changes with which the model would fit one of the groups."""
        if not groups:
            return ()
        estimate, cache = self.estimate, None
        if estimate.kv_cache and DTYPES[estimate.kv_dtype].bits > DTYPES[_SMALL_CACHE].bits:
            cache = self._change(groups, "kv_dtype", _SMALL_CACHE)
        fewer = (self._fewer(groups, "context"), self._fewer(groups, "batch"))
        return tuple(change for change in (*fewer, cache, self._narrower(groups)) if change)

    def _fewer(
        self, groups: Sequence[DeviceGroup], change: Literal["context", "batch"]
    ) -> Alternative | None:
        changed = partial(self._change, groups, change)
        smaller = range(1, getattr(self.estimate, change))
        fitting = bisect_right(smaller, False, key=lambda number: changed(number) is None)
        return changed(smaller[fitting - 1]) if fitting else None

    def _narrower(self, groups: Sequence[DeviceGroup]) -> Alternative | None:
        """Return the widest narrower weights that fit; a quantized model stays as it is."""
        bits, change = DTYPES[self.shape.dtype].bits, None
        if self.shape.quantization is not None:
            return None
        if self.in_half is not None and bits > DTYPES[_HALF].bits:
            change = self._change(groups, "dtype", _HALF, self.in_half())
        for name in OFFERED:
            if change is None and SCHEMES[name] < bits:
                change = self._change(groups, "weights", name, in_scheme(self.shape, name))
        return change

    def _change(
        self,
        groups: Sequence[DeviceGroup],
        change: Change,
        value: int | str,
        shape: ModelShape | None = None,
    ) -> Alternative | None:
        """Return the alternative if it fits; `shape` is the model with other weights."""
        names = ("context", "batch", "kv_dtype", "prefill")
        options = {name: getattr(self.estimate, name) for name in names}
        if change in options:
            options[change] = value
        shape = shape or self.shape
        changed = estimate_inference(shape, **options)
        assignment = assign(LayeredModel.of(shape, changed), groups, evenly=False)
        if assignment is None:
            return None
        total = (changed.on_cpu() if assignment.only_cpu else changed).total
        return Alternative(change, value, assignment.devices, total)


def planned_units(
    plan: Plan, are_layers: Sequence[bool], parameters: int | None
) -> list[Placement]:
    """Return the placement of each unit of a model; `are_layers` says which units are layers."""
    if not plan.fits:
        raise ConfigurationError(
            'this plan does not fit; give places such as ["cuda:0", "cpu", "disk"]',
            source="devices",
        )
    of_layer = [placement for placement in plan.placements for _ in placement.layers]
    shape, count = plan.estimate.shape, sum(are_layers)
    other = None
    if len(of_layer) != count:
        other = f"{len(of_layer)} layers, and this model {count}"
    elif shape is not None and shape.exact and parameters not in (None, shape.parameters):
        other = f"{shape.parameters:,} parameters, and this one {parameters:,}"
    if other is not None:
        raise ConfigurationError(
            f"this plan is for another model: it has {other}", source="devices"
        )
    layers = accumulate(are_layers, initial=-1)
    next(layers)
    return [of_layer[max(layer, 0)] for layer in layers]
