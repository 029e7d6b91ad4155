"""Plans: whether a model fits, which device holds which layers, and what would fit otherwise."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from anydevice._core import hooks
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.record import Record
from anydevice._core.text import no_pages
from anydevice._libraries.registry import part
from anydevice._plan.cards import Cluster, cluster_of, names_cluster
from anydevice._plan.estimates import MemoryEstimate, estimate_inference
from anydevice._plan.families import ModelShape
from anydevice._plan.model import shape_of
from anydevice._plan.placement import (
    DeviceGroup,
    DeviceNames,
    LayeredModel,
    LayerRange,
    MemoryParts,
    assign,
    available_memory,
    device_groups,
    fill,
)
from anydevice._plan.quantization import QUANTIZED, quantized
from anydevice.errors import ConfigurationError

Change = Literal["context", "batch", "kv_dtype", "dtype", "quantization"]


class Placement(Record):
    """A device's part of a model: a range of layers, and the bytes that they need there.

    `free` is the memory that the device has for it, with the limit of `configure(memory=…)`.
    """

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
    """One change that would help: this context, batch or dtype instead of the one asked for.

    A change of "quantization" is one of the layers' weights alone, with their scales counted in.
    `devices` are those that the model would be on then, `total` the bytes that it would need.
    """

    change: Change
    value: int | str
    devices: tuple[Device, ...]
    total: int

    def to_dict(self) -> dict[str, object]:
        """Return the alternative as plain data, ready for JSON."""
        return {**super().to_dict(), "devices": [str(device) for device in self.devices]}


class Plan(Record):
    """Whether a model fits, and what lies where.

    What fits runs: 3 % of the estimate is kept free on every accelerator, because PyTorch's
    allocator took up to that much more in nine of ten models. A share above 97 % does not fit.

    `device` is the one that holds all of it, `None` if it takes several or does not fit.
    `placements` are in the order of the layers. Where the model does not fit, they show how far
    several devices reach, and `unplaced` are the bytes of weights, cache and logits that have no
    place; one device alone is shown with all of it, and a share above 1. Each of the
    `alternatives` by itself would make it fit, or, where it takes several devices or the CPU, fit
    on fewer of them. `notes` say what could not be counted.
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

        The module may be empty, on PyTorch's device "meta". What comes before the layers goes with
        the first of them, what comes after with the last, and a head that is tied to the embedding
        goes with that. Raises `ConfigurationError` for a plan that does not fit or is for another
        model.
        """
        return _device_map(self, model)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain data, ready for JSON."""
        return {**super().to_dict(), "device": str(self.device) if self.device else None}

    def __str__(self) -> str:
        return hooks.render(self, "text")

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    def save_html(self, path: object) -> None:
        """Raise `ConfigurationError`: version 0.3 writes no pages."""
        raise no_pages("save_html")


def plan_inference(
    model: Any = None,
    devices: DeviceNames | Cluster = None,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: object = None,
    kv_dtype: object = None,
    prefill: int | None = None,
    **numbers: Any,
) -> Plan:
    """Plan a model with this context: on one device, on several, or only after a change.

    `model` and `numbers` are as in `estimate_inference`. `devices` are devices or their names
    ("cuda" is every card of it), or cards that need not be here, "2xH100"; the default is all
    usable devices. Free memory is read now, and the limit of `configure(memory=…)` applies. One
    accelerator is preferred to several, and several to the CPU, which takes the layers that do not
    fit on them. Nothing is loaded and no array library is imported.

    3 % of what a model needs on an accelerator has to be free beside it, because PyTorch's
    allocator may hold that much more idle than the estimate knows.

    >>> from anydevice import testing
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
    shape = shape_of(model, dtype=dtype, **numbers)
    estimate = estimate_inference(
        shape, context=context, batch=batch, kv_dtype=kv_dtype, prefill=prefill
    )
    request = _Request(
        shape, estimate, None if given else lambda: shape_of(model, dtype=_HALF, **numbers)
    )
    if isinstance(devices, Cluster) or (isinstance(devices, str) and names_cluster(devices)):
        cluster = cluster_of(devices)
        available = cluster.available()
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
    others = _alternatives(request, preferred)
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
    ranges |= {each.slot: each for each in filled}
    return Plan(
        False,
        None,
        _placements(layered, group, ranges.values()),
        request.estimate.on_cpu() if only_cpu else request.estimate,
        _alternatives(request, groups),
        rest.weights + rest.kv_cache + rest.logits,
        notes,
    )


def _placements(
    layered: LayeredModel, group: DeviceGroup, ranges: Iterable[LayerRange]
) -> tuple[Placement, ...]:
    def placed(slot: int, layers: range) -> Placement:
        memory, parts = group.devices[slot], layered.on(layers, cpu=slot in group.cpus)
        return Placement(memory.device, layers, parts, memory.bytes)

    return tuple(placed(each.slot, each.layers) for each in ranges)


_HALF = "bfloat16"
_SMALL_CACHE = "float8_e4m3fn"


class _Request(Record):
    """A request: the model, its estimate, and the same model with weights of 16 bits."""

    shape: ModelShape
    estimate: MemoryEstimate
    in_half: Callable[[], ModelShape] | None


def _alternatives(request: _Request, groups: Sequence[DeviceGroup]) -> tuple[Alternative, ...]:
    """The changes with which the model would fit one of the groups, each by itself.

    The largest context and the largest batch below those asked for; a smaller dtype for the cache;
    16 bits for the weights, else the layers quantized as little as it takes.
    """
    if not groups:
        return ()
    fewer = (_fewer(request, "context", groups), _fewer(request, "batch", groups))
    narrower = (_smaller_cache(request, groups), _narrower(request, groups))
    return tuple(found for found in (*fewer, *narrower) if found)


def _fewer(
    request: _Request, change: Literal["context", "batch"], groups: Sequence[DeviceGroup]
) -> Alternative | None:
    def changed(number: int) -> Alternative | None:
        return _alternative(request.shape, request.estimate, change, number, groups)

    smaller = range(1, getattr(request.estimate, change))
    fitting = bisect_right(smaller, False, key=lambda number: changed(number) is None)
    return changed(smaller[fitting - 1]) if fitting else None


def _smaller_cache(request: _Request, groups: Sequence[DeviceGroup]) -> Alternative | None:
    estimate = request.estimate
    if not estimate.kv_cache or DTYPES[estimate.kv_dtype].bits <= DTYPES[_SMALL_CACHE].bits:
        return None
    return _alternative(request.shape, estimate, "kv_dtype", _SMALL_CACHE, groups)


def _narrower(request: _Request, groups: Sequence[DeviceGroup]) -> Alternative | None:
    """The widest narrower weights that fit; a quantized model stays as it is."""
    shape, estimate = request.shape, request.estimate
    bits = DTYPES[shape.dtype].bits
    if shape.quantization is not None:
        return None
    found = None
    if request.in_half is not None and bits > DTYPES[_HALF].bits:
        found = _alternative(request.in_half(), estimate, "dtype", _HALF, groups)
    for name, fewer in QUANTIZED.items():
        if found is None and fewer < bits:
            found = _alternative(quantized(shape, name), estimate, "quantization", name, groups)
    return found


def _alternative(
    shape: ModelShape,
    estimate: MemoryEstimate,
    change: Change,
    value: int | str,
    groups: Sequence[DeviceGroup],
) -> Alternative | None:
    asked = ("context", "batch", "kv_dtype", "prefill")
    numbers: dict[str, Any] = {name: getattr(estimate, name) for name in asked}
    if change in asked:
        numbers[change] = value
    changed = estimate_inference(shape, **numbers)
    assignment = assign(LayeredModel.of(shape, changed), groups, evenly=False)
    if assignment is None:
        return None
    total = (changed.on_cpu() if assignment.only_cpu else changed).total
    return Alternative(change, value, assignment.devices, total)


_TORCH_NAMES = {"rocm": "cuda", "metal": "mps"}
"""Backends to which PyTorch gives another name."""


def planned_units(
    plan: Plan, are_layers: Sequence[bool], parameters: int | None
) -> list[Placement]:
    """Return the placement of each unit of a model, given which of them are layers.

    Raises `ConfigurationError` for a plan that does not fit, or that is of another model:
    `parameters` is how many this one has.
    """
    if not plan.fits:
        raise ConfigurationError(
            'this plan does not fit; give places such as ["cuda:0", "cpu", "disk"]',
            source="devices",
        )
    of_layer = [each for each in plan.placements for _ in each.layers]
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
    found, at = [], -1
    for is_layer in are_layers:
        at += is_layer
        found.append(of_layer[max(at, 0)])
    return found


def _device_map(plan: Plan, module: Any) -> dict[str, str]:
    """Return the device of each unit of a module, as transformers and accelerate name both."""
    torch = part("torch", "pipeline")
    units = torch.module_units(module)
    count = sum(x.numel() for x in module.parameters())
    places = planned_units(plan, [is_layer for _, is_layer in units.values()], count)
    found = {}
    for name, each in zip(units, places, strict=True):
        backend = each.device.backend
        torch_name = f"{_TORCH_NAMES.get(backend, backend)}:{each.device.index}"
        found[name] = "cpu" if each.device.kind == "cpu" else torch_name
    first = next(iter(found.values()))
    for name, (unit, is_layer) in units.items():
        if not is_layer and not torch.bytes_of(unit):  # such as rotations, made once for all layers
            found[name] = first
    return found | {name: found[other] for name, other in torch.tied_units(units).items()}
