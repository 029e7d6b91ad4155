"""The answer to whether a model fits: what lies where, and what would fit if it does not.

A plan as lines that a person reads: what is needed, a bar for each device, what would fit.

What could be asked instead: the context, batch or element type with which a model would fit.

Does a model fit, where, and what would fit if not: answered before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import Any, Literal

from anydevice.core.device import Device
from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.core.text import bar, format_size
from anydevice.planning.architectures import ModelShape, shortened
from anydevice.planning.available import Places, rooms_of
from anydevice.planning.estimates import MemoryEstimate, estimate_inference
from anydevice.planning.model import shape_of
from anydevice.planning.overheads import MARGIN
from anydevice.planning.placement import (
    Group,
    Parts,
    Pieces,
    Stretch,
    arrange,
    fill,
    groups_of,
    pieces_of,
)
from anydevice.planning.quantization import QUANTIZED, quantized
from anydevice.rendering.summary import UNUSABLE, USABLE

Change = Literal["context", "batch", "kv_dtype", "dtype", "quantization"]


class Placement(Record):
    """What one device is to hold: a stretch of layers, and the bytes that they need there.

    `free` is the room that the device has for it, with the limit of `configure(memory=…)`.
    """

    device: Device
    layers: range
    parts: Parts
    free: int

    @property
    def share(self) -> float:
        """How much of the room is needed: 1.0 is all of it."""
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
    """One change that would help: this context, batch or element type instead of the one asked.

    A change of "quantization" is one of the layers' weights alone, with their scales counted in.
    `devices` are those that the model would lie on then, `total` the bytes that it would need.
    """

    change: Change
    value: int | str
    devices: tuple[Device, ...]
    total: int

    def to_dict(self) -> dict[str, object]:
        """The alternative as plain data, ready for JSON."""
        return {
            "change": self.change,
            "value": self.value,
            "devices": [str(device) for device in self.devices],
            "total": self.total,
        }


class Plan(Record):
    """Whether a model fits, and what lies where.

    What fits runs: beside what the estimate says, 3 % of it are free on every accelerator, which
    is what PyTorch's allocator took more in nine of ten models. A share above 97 % does not fit.

    `device` is the one that holds all of it, `None` where it takes several or does not fit.
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
        """The room of all devices of the plan together."""
        return sum(placement.free for placement in self.placements)

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data, ready for JSON."""
        return {
            "fits": self.fits,
            "device": str(self.device) if self.device else None,
            "estimate": self.estimate.to_dict(),
            "placements": [placement.to_dict() for placement in self.placements],
            "unplaced": self.unplaced,
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:

        return "\n".join(plan_lines(self))


WIDTH = 80
"""The columns where nobody says how many there are."""

_LONGEST_NAME = 56
_LONGEST_BAR, _SHORTEST_BAR = 30, 6
_WORDS = {"kv_dtype": "kv-cache in", "dtype": "weights in", "quantization": "layers quantized to"}


def plan_lines(plan: Plan, width: int | None = None) -> list[str]:
    """The lines of a plan, no wider than `width` where that is 60 or more."""
    columns = width or WIDTH
    return [
        *_wrapped(_title(plan), columns, ""),
        "",
        *_needs(plan),
        "",
        *_wrapped(verdict(plan), columns, ""),
        "",
        *_table(plan.placements, columns),
        *_help(plan, columns),
    ]


def verdict(plan: Plan) -> str:
    """The answer in one sentence, with its mark."""
    needed = format_size(plan.estimate.total)
    if plan.device is not None:
        return f"{USABLE} fits on {plan.device}"
    if plan.fits:
        return f"{USABLE} fits on {_listed(plan.devices)} together"
    if not plan.placements:
        return f"{UNUSABLE} does not fit: {needed} needed, and no device tells its memory"
    where = _listed([placement.device for placement in plan.placements])
    if len(plan.placements) == 1:
        free = format_size(plan.free)
        margin = f" and {MARGIN} % more" if plan.estimate.total <= plan.free else ""
        return f"{UNUSABLE} does not fit on {where}: {needed}{margin} needed, {free} free"
    # Not the sum of what is free: each device needs room of its own for activations.
    lacking = format_size(plan.unplaced)
    return f"{UNUSABLE} does not fit on {where} together: no place for {lacking} of it"


def _title(plan: Plan) -> str:
    asked = plan.estimate
    shape = asked.shape
    name = shortened(shape.name, _LONGEST_NAME) if shape is not None and shape.name else "model"
    kept = shape.quantization if shape is not None and shape.quantization else asked.dtype
    cache = f", kv-cache in {asked.kv_dtype}" if asked.kv_dtype != kept else ""
    return (
        f"{name}: {_counted(asked.parameters)} parameters in {kept}{cache}, "
        f"context {asked.context}, batch {asked.batch}"
    )


def _counted(parameters: int) -> str:
    """A count as people of the field say it: "8.03 B".

    >>> _counted(8_030_261_248), _counted(405_853_388_800), _counted(12_345)
    ('8.03 B', '406 B', '12,345')
    """
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return f"{parameters:,}"


def _needs(plan: Plan) -> Iterator[str]:
    asked = plan.estimate
    for label, size in (
        ("weights", asked.weights),
        ("kv-cache", asked.kv_cache),
        ("activations", asked.activations),
        ("logits", asked.logits),
        ("overhead", asked.overhead),
        ("total", asked.total),
    ):
        yield f"  {label:<12} {format_size(size):>10}"


def _table(placements: Sequence[Placement], columns: int) -> Iterator[str]:
    if not placements:
        return
    rows = [("device", "layers", "needs", "free")] + [
        (
            str(each.device),
            _layers(each.layers),
            format_size(each.parts.total) if each.layers else "–",
            format_size(each.free),
        )
        for each in placements
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    percents = [f"{int(each.share * 100)} %" for each in placements]  # 100 % is full, not nearly
    last = max(map(len, percents))
    left = columns - sum(widths) - 2 * len(widths) - 1 - last
    width = max(_SHORTEST_BAR, min(_LONGEST_BAR, left))
    bars = ["", *("".join(bar(each.share, width)) for each in placements)]
    for cells, shown, percent in zip(rows, bars, ["", *percents], strict=True):
        texts = [cell.ljust(size) for cell, size in zip(cells[:2], widths[:2], strict=True)]
        texts += [cell.rjust(size) for cell, size in zip(cells[2:], widths[2:], strict=True)]
        yield f"{'  '.join(texts)}  {shown} {percent.rjust(last)}".rstrip()


def _layers(layers: range) -> str:
    if not layers:
        return "–"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}–{layers[-1]}"


def _help(plan: Plan, columns: int) -> Iterator[str]:
    if plan.alternatives:
        yield from ("", "On fewer devices with:" if plan.fits else "It would fit with:")
        for each in plan.alternatives:
            yield from _wrapped(_alternative(each, plan), columns, "  ")
    elif not plan.fits:
        yield from ("", *_wrapped(_NO_CHANGE, columns, ""))
    remarks = [*plan.notes, *plan.estimate.assumed]
    if remarks:
        yield ""
        for remark in remarks:
            yield from _wrapped(f"note: {remark}", columns, "")


_NO_CHANGE = "No smaller context, batch or element type makes it fit: it takes more devices."


def _alternative(each: Alternative, plan: Plan) -> str:
    now = plan.estimate.dtype
    if each.change != "quantization":
        now = getattr(plan.estimate, each.change)
    words = f"{_WORDS.get(each.change, each.change)} {each.value} instead of {now}"
    where = _listed(each.devices)
    return f"{words}: {format_size(each.total)}, on {where}"


def _listed(devices: Sequence[Device]) -> str:
    """Devices as a sentence has them; many are shortened to the first and the last.

    >>> _listed([Device("cuda:0"), Device("cpu")]), _listed([Device("cuda", n) for n in range(8)])
    ('cuda:0 and cpu', 'cuda:0 … cuda:7')
    """
    names = [str(device) for device in devices]
    if len(names) > 4:
        return f"{names[0]} … {names[-1]}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _wrapped(words: str, columns: int, indent: str) -> list[str]:
    return wrap(
        words,
        columns,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


_HALF = "bfloat16"
_SMALL_CACHE = "float8_e4m3fn"


class Asked(Record):
    """What was asked for, and what it would need."""

    shape: ModelShape
    estimate: MemoryEstimate
    in_half: Callable[[], ModelShape] | None
    """The same model with its weights in 16 bits, where it can be had so."""


def alternatives(asked: Asked, groups: Sequence[Group]) -> Iterator[Alternative]:
    """The changes with which the model would fit one of the groups, each by itself.

    The largest context and the largest batch below those asked for; a smaller element type for
    the cache; 16 bits for the weights, else the layers quantized as little as it takes.
    """
    if not groups:
        return
    estimate = asked.estimate
    yield from _fewer(asked, "context", estimate.context, groups)
    yield from _fewer(asked, "batch", estimate.batch, groups)
    if estimate.kv_cache and DTYPES[estimate.kv_dtype].bits > DTYPES[_SMALL_CACHE].bits:
        yield from _found(asked.shape, estimate, "kv_dtype", _SMALL_CACHE, groups)
    for change, value, shape in _narrower(asked):
        found = list(_found(shape, estimate, change, value, groups))
        if found:
            yield from found
            return


def _narrower(asked: Asked) -> Iterator[tuple[Change, str, ModelShape]]:
    """The model with narrower weights, the widest first; a quantized one stays as it is."""
    shape = asked.shape
    if shape.quantization is not None:
        return
    now = DTYPES[shape.dtype].bits
    if asked.in_half is not None and now > DTYPES[_HALF].bits:
        yield "dtype", _HALF, asked.in_half()
    for name, bits in QUANTIZED.items():
        if bits < now:
            yield "quantization", name, quantized(shape, name)


def _fewer(
    asked: Asked, change: Change, most: int, groups: Sequence[Group]
) -> Iterator[Alternative]:
    def found(number: int) -> list[Alternative]:
        return list(_found(asked.shape, asked.estimate, change, number, groups))

    number = largest(most - 1, lambda number: bool(found(number)))
    if number:
        yield from found(number)


def _found(
    shape: ModelShape,
    estimate: MemoryEstimate,
    change: Change,
    value: int | str,
    groups: Sequence[Group],
) -> Iterator[Alternative]:
    numbers: dict[str, Any] = {
        "context": estimate.context,
        "batch": estimate.batch,
        "kv_dtype": estimate.kv_dtype,
    }
    if change in numbers:
        numbers[change] = value
    changed = estimate_inference(shape, **numbers)
    arrangement = arrange(pieces_of(shape, changed), groups, evenly=False)
    if arrangement is not None:
        total = (changed.on_cpu() if arrangement.only_cpu else changed).total
        yield Alternative(change, value, arrangement.devices, total)


def largest(most: int, works: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that works, where all smaller ones do; 0 for none.

    >>> largest(1000, lambda number: number * number < 500), largest(5, lambda number: False)
    (22, 0)
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low


def plan_inference(
    model: Any = None,
    devices: Places = None,
    *,
    context: int,
    batch: int = 1,
    dtype: object = None,
    kv_dtype: object = None,
    **numbers: Any,
) -> Plan:
    """Where a model would run with so much context: one device, several, or which change it takes.

    `model` and `numbers` are whatever `estimate_inference` takes. `devices` are devices or their
    names ("cuda" is every card of it); without them, all that are usable here. What is free is
    read now, and what `configure(memory=…)` allows is kept to. One accelerator goes before
    several, and several before the CPU, which takes the layers that they have no room for.
    Nothing is loaded and no array library is imported.

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

    Raises `ConfigurationError` where the model cannot be read or a number is wrong, and
    `DeviceNotFoundError` where a device that is named is not usable.
    """
    given = isinstance(model, ModelShape)
    shape = shape_of(model, dtype=dtype, **numbers)
    estimate = estimate_inference(shape, context=context, batch=batch, kv_dtype=kv_dtype)
    asked = Asked(
        shape,
        estimate,
        None if given else lambda: shape_of(model, dtype="bfloat16", **numbers),
    )
    rooms, notes = rooms_of(devices)
    groups = tuple(groups_of(rooms))
    pieces = pieces_of(shape, estimate)
    arrangement = arrange(pieces, groups)
    if arrangement is None:
        return _does_not_fit(asked, pieces, groups, notes)
    stretches = {stretch.place: stretch for stretch in arrangement.stretches}
    placements = _placements(pieces, arrangement.group, stretches)
    if arrangement.only_cpu:
        estimate = estimate.on_cpu()
    alone = placements[0].device if len(placements) == 1 else None
    settled = alone is not None and alone.kind != "cpu"
    preferred = () if settled else groups[: arrangement.number]
    others = tuple(alternatives(asked, preferred))
    return Plan(True, alone, placements, estimate, others, notes=notes)


def _does_not_fit(
    asked: Asked, pieces: Pieces, groups: Sequence[Group], notes: tuple[str, ...]
) -> Plan:
    roomiest = max(groups, key=lambda group: sum(group.bytes), default=Group(()))
    filled = fill(pieces, roomiest.bytes, roomiest.cpus)
    reached = filled[-1].layers.stop if filled else 0
    rest = pieces.on(range(reached, pieces.count))
    alone = len(roomiest.rooms) == len(roomiest.cpus) == 1
    if len(roomiest.rooms) == 1:
        filled = [Stretch(0, range(pieces.count))]
    stretches = {place: Stretch(place, range(0)) for place in range(len(roomiest.rooms))}
    stretches |= {stretch.place: stretch for stretch in filled}
    return Plan(
        False,
        None,
        _placements(pieces, roomiest, stretches),
        asked.estimate.on_cpu() if alone else asked.estimate,
        tuple(alternatives(asked, groups)),
        rest.weights + rest.kv_cache + rest.logits,
        notes,
    )


def _placements(
    pieces: Pieces, group: Group, stretches: dict[int, Stretch]
) -> tuple[Placement, ...]:
    return tuple(
        Placement(room.device, each.layers, pieces.on(each.layers, cpu=cpu), room.room)
        for place, each in stretches.items()
        for room, cpu in ((group.rooms[place], place in group.cpus),)
    )
