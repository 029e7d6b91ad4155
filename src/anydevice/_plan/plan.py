"""Plans: whether a model fits, which device holds which layers, and what would fit otherwise."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from anydevice import __version__
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.record import Record
from anydevice._core.text import (
    UNUSABLE,
    USABLE,
    bar,
    format_count,
    format_part,
    format_size,
    shortened,
    table,
    wrapped,
)
from anydevice._plan.available import AvailableMemory, DeviceNames, available_memory
from anydevice._plan.cards import Cluster, cluster_of, names_cluster
from anydevice._plan.estimates import PARTS, MemoryEstimate, estimate_inference, part_lines
from anydevice._plan.families import ModelShape
from anydevice._plan.model import shape_of
from anydevice._plan.overheads import MARGIN
from anydevice._plan.placement import (
    DeviceGroup,
    LayeredModel,
    LayerRange,
    MemoryParts,
    assign,
    device_groups,
    fill,
)
from anydevice._plan.quantization import QUANTIZED, quantized
from anydevice._report import notebook, page
from anydevice._report.summary import Paint, plain
from anydevice._report.svg import Bar

Change = Literal["context", "batch", "kv_dtype", "dtype", "quantization"]


class Placement(Record):
    """What one device is to hold: a range of layers, and the bytes that they need there.

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
        """The placement as plain data, ready for JSON; `layers` are the first and the last."""
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
        """The alternative as plain data, ready for JSON."""
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
        """The device of each part of a PyTorch module, as transformers and accelerate take it.

        The module may be empty, on PyTorch's device "meta". What comes before the layers goes with
        the first of them, what comes after with the last, and a head that is tied to the embedding
        goes with that. Raises `ConfigurationError` for a plan that does not fit or is for another
        model.
        """
        from anydevice._plan.modules import device_map

        return device_map(self, model)

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data, ready for JSON."""
        return {**super().to_dict(), "device": str(self.device) if self.device else None}

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    def _repr_html_(self) -> str:
        return _html(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a page with plots that needs no other file.

        Raises `ConfigurationError` for a name that ends neither in .html nor in .htm, and
        `TransferError` where the file cannot be written.
        """
        page.save_page(path, _page(self))


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
    """Where a model fits with this context: on one device, on several, or only after a change.

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
    available, notes = _available(devices)
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
"""The tokens of the context of a language model that is loaded, at most, where nobody says."""
PREFILL_CHUNK = {"cpu": 512, "other": 4096}
"""Tokens of all prompts that a loaded model reads at a time: more are no faster, and take more."""


def loading_options(on_cpu: bool, dtype: object = None) -> dict[str, Any]:
    """What `llm.load` plans with, as options of `plan_inference`: a CPU computes in float32."""
    wanted = "float32" if dtype is None and on_cpu else dtype
    return {"dtype": wanted, "prefill": PREFILL_CHUNK["cpu" if on_cpu else "other"]}


def plan_loading(
    model: Any, devices: DeviceNames | Cluster = None, *, context: int | None = None,
    dtype: object = None,
    **more: Any,
) -> Plan:  # fmt: skip
    """The plan that `llm.load` makes, for any devices; `more` is as in `plan_inference`."""

    def planned(on_cpu: bool) -> Plan:
        options = loading_options(on_cpu, dtype)
        longest = shape_of(model, dtype=options["dtype"]).longest_context or LOADED_CONTEXT
        wanted = min(longest, LOADED_CONTEXT) if context is None else context
        return plan_inference(model, devices, context=wanted, **options, **more)

    plan = planned(False)
    kinds = {placement.device.kind for placement in plan.placements}
    return planned(True) if kinds == {"cpu"} else plan


def _available(
    devices: DeviceNames | Cluster,
) -> tuple[tuple[AvailableMemory, ...], tuple[str, ...]]:
    if isinstance(devices, Cluster) or (isinstance(devices, str) and names_cluster(devices)):
        cluster = cluster_of(devices)
        return cluster.available(), (f"planned for {cluster}, with all of its memory free",)
    return available_memory(devices)


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
    """What was asked for, what it would need, and the same model with weights of 16 bits."""

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


WIDTH = 80
"""The columns where nobody says how many there are."""

_HEAD = ("device", "layers", "needs", "free", "")
_LONGEST_NAME = 56
_LONGEST_BAR, _SHORTEST_BAR = 30, 6
_MOST_BARS = 16
"""Devices with a bar each on a page; the table has all."""
_SHORT_WORDS: dict[Change, str] = {
    "context": "context",
    "batch": "batch",
    "kv_dtype": "cache",
    "dtype": "weights",
    "quantization": "layers",
}
_WORDS = {"kv_dtype": "kv-cache in", "dtype": "weights in", "quantization": "layers quantized to"}


def plan_lines(plan: Plan, width: int | None = None, paint: Paint = plain) -> list[str]:
    """The text of a plan, no wider than `width` where that is 60 or more."""
    columns = width or WIDTH
    mark, style = (USABLE, "good") if plan.fits else (UNUSABLE, "bad")
    first, *rest = wrapped(f"{mark} {_verdict(plan)}", columns, hanging="  ")
    return [
        *wrapped(_title(plan), columns, hanging="  "),
        "",
        *part_lines(plan.estimate, (*PARTS, "total")),
        "",
        paint(mark, style) + first[len(mark) :],
        *rest,
        "",
        *_placement_table(plan.placements, columns),
        *_help(plan, columns, paint),
    ]


def _html(plan: Plan) -> str:
    """What a notebook shows of a plan."""
    parts = [
        (name.replace("_", "-"), format_size(getattr(plan.estimate, name)))
        for name in (*PARTS, "total")
    ]
    rows = [(*cells, notebook.bar(share, said)) for share, said, cells in _shares(plan.placements)]
    mark = USABLE if plan.fits else UNUSABLE
    return notebook.block(
        notebook.line(_title(plan), "strong"),
        notebook.table((), parts, right=(1,)),
        notebook.marked(mark, _verdict(plan), good=plan.fits),
        notebook.table(_HEAD, rows, right=(2, 3)),
        *(notebook.line(each.strip()) for each in _help(plan, 10_000, plain) if each),
    )


def _page(plan: Plan) -> str:
    needed, mark = plan.estimate, USABLE if plan.fits else UNUSABLE
    parts = [_part(name) for name in PARTS]
    sizes = [(_part(name), format_size(getattr(needed, name))) for name in (*PARTS, "total")]
    head = (*_HEAD[:-1], "of it")
    rows = [(*cells, share) for _, share, cells in _shares(plan.placements)]
    free = {each.device: each.free for each in plan.placements}
    return page.document(
        "anydevice plan",
        [f"anydevice {__version__}", _title(plan)],
        page.verdict(mark, _verdict(plan), good=plan.fits),
        page.paragraphs(() if plan.fits or plan.alternatives else (_NO_CHANGE,)),
        page.cards(_cards(plan)),
        page.figures(
            page.memory_figure(
                "Memory by device",
                "the line is what is free",
                [_bar_of(each) for each in plan.placements[:_MOST_BARS]],
                parts,
            ),
            page.memory_figure(
                "On fewer devices" if plan.fits else "What would fit",
                "with one change; the line is what is free there",
                [_asked(plan), *(_changed(each, free) for each in plan.alternatives)],
                ["needed"],
            )
            if plan.alternatives
            else "",
            page.beside(sizes),
        ),
        page.section("Devices", page.table(head, rows, texts=2)) if rows[1:] else "",
        notes=(*plan.notes, *needed.assumed),
    )


def _cards(plan: Plan) -> Iterator[tuple[str, str, str]]:
    needed = plan.estimate
    yield format_size(needed.total), "needed", f"context {needed.context:,}, batch {needed.batch:,}"
    if plan.placements:
        count, fullest = len(plan.placements), max(plan.placements, key=lambda each: each.share)
        where = f"on {count} devices" if count > 1 else f"on {fullest.device}"
        yield format_size(plan.free), "free", where
        if fullest.layers:
            yield f"{int(fullest.share * 100)} %", "of what is free", f"on {fullest.device}"
    yield format_size(needed.weights), "weights", f"{format_count(needed.parameters)} parameters"
    if needed.kv_cache:
        yield format_size(needed.kv_cache), "kv-cache", f"in {needed.kv_dtype}"
    if plan.unplaced:
        yield format_size(plan.unplaced), "without a place", "of weights, cache and logits"


def _part(name: str) -> str:
    return name.replace("_", "-")


def _bar_of(each: Placement) -> Bar:
    names = PARTS if each.layers else ()
    pieces = tuple((_part(name), float(getattr(each.parts, name))) for name in names)
    needs = format_part(each.parts.total, each.free) if names else f"0/{format_size(each.free)}"
    return Bar(str(each.device), needs, pieces, float(each.free))


def _asked(plan: Plan) -> Bar:
    total = plan.estimate.total
    return Bar("as asked", format_size(total), (("needed", float(total)),))


def _changed(each: Alternative, free: Mapping[Device, int]) -> Bar:
    words = f"{_SHORT_WORDS[each.change]} {each.value}"
    ceiling = sum(free[device] for device in each.devices) if set(each.devices) <= set(free) else 0
    count = len(each.devices)
    where = f"{count} devices" if count > 1 else str(each.devices[0])
    return Bar(
        words,
        f"{format_size(each.total)}, {where}",
        (("needed", float(each.total)),),
        float(ceiling) or None,
    )


def _verdict(plan: Plan) -> str:
    """The answer in one sentence."""
    needed = format_size(plan.estimate.total)
    if plan.device is not None:
        return f"fits on {plan.device}"
    if plan.fits:
        return f"fits on {_listed(plan.devices)} together"
    if not plan.placements:
        return f"does not fit: {needed} needed, and no device tells its memory"
    where = _listed([placement.device for placement in plan.placements])
    if len(plan.placements) == 1:
        free = format_size(plan.free)
        margin = f" and {MARGIN} % more" if plan.estimate.total <= plan.free else ""
        return f"does not fit on {where}: {needed}{margin} needed, {free} free"
    # Not the sum of what is free: each device needs memory for activations.
    lacking = format_size(plan.unplaced)
    return f"does not fit on {where} together: no place for {lacking} of it"


def _title(plan: Plan) -> str:
    asked = plan.estimate
    shape = asked.shape
    name = shortened(shape.name, _LONGEST_NAME) if shape is not None and shape.name else "model"
    kept = shape.quantization if shape is not None and shape.quantization else asked.dtype
    apart = asked.kv_cache and asked.kv_dtype != kept
    cache = f", kv-cache in {asked.kv_dtype}" if apart else ""
    model = f"{name}: {format_count(asked.parameters)} parameters in {kept}{cache}"
    return f"{model}, context {asked.context}, batch {asked.batch}"


def _placement_table(placements: Sequence[Placement], columns: int) -> list[str]:
    if not placements:
        return []
    shares = list(_shares(placements))
    longest = max(len(percent) for _, percent, _ in shares)
    rows = [(*cells, percent.rjust(longest)) for _, percent, cells in shares]
    used = sum(max(map(len, column)) + 2 for column in zip(_HEAD, *rows, strict=True)) - 1
    width = max(_SHORTEST_BAR, min(_LONGEST_BAR, columns - used))
    with_bars = [
        (*row[:4], f"{''.join(bar(share, width))} {row[4]}")
        for row, (share, _, _) in zip(rows, shares, strict=True)
    ]
    return table(_HEAD, with_bars, right=(2, 3))


def _shares(placements: Sequence[Placement]) -> Iterator[tuple[float, str, tuple[str, ...]]]:
    """How full each device is, the same in percent, and the cells before that."""
    for each in placements:
        cells = (
            str(each.device),
            _layers(each.layers),
            format_size(each.parts.total) if each.layers else "–",
            format_size(each.free),
        )
        yield each.share, f"{int(each.share * 100)} %", cells  # 100 % is full, not nearly


def _layers(layers: range) -> str:
    if not layers:
        return "–"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}–{layers[-1]}"


def _help(plan: Plan, columns: int, paint: Paint) -> Iterator[str]:
    if plan.alternatives:
        yield from ("", "On fewer devices with:" if plan.fits else "It would fit with:")
        for each in plan.alternatives:
            yield from wrapped(_alternative_text(each, plan), columns, "  ", "  ")
    elif not plan.fits:
        yield from ("", *wrapped(_NO_CHANGE, columns, hanging="  "))
    remarks = [*plan.notes, *plan.estimate.assumed]
    if remarks:
        yield ""
        for remark in remarks:
            lines = wrapped(f"note: {remark}", columns, hanging="  ")
            yield from (paint(line, "dim") for line in lines)


_NO_CHANGE = "No smaller context, batch or dtype makes it fit: it takes more devices."


def _alternative_text(each: Alternative, plan: Plan) -> str:
    now = plan.estimate.dtype
    if each.change != "quantization":
        now = getattr(plan.estimate, each.change)
    words = f"{_WORDS.get(each.change, each.change)} {each.value} instead of {now}"
    return f"{words}: {format_size(each.total)}, on {_listed(each.devices)}"


def _listed(devices: Sequence[Device]) -> str:
    """Devices as a sentence has them; many are shortened to the first and the last.

    >>> _listed([Device("cuda:0"), Device("cpu")]), _listed([Device("cuda", n) for n in range(8)])
    ('cuda:0 and cpu', 'cuda:0 … cuda:7')
    """
    names = [str(device) for device in devices]
    if len(names) > 4:
        return f"{names[0]} … {names[-1]}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
