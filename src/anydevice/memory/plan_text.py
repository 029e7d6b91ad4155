"""A plan as lines that a person reads: what is needed, a bar for each device, what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from anydevice.choose.marks import UNUSABLE, USABLE
from anydevice.core.bars import bar
from anydevice.core.device import Device
from anydevice.core.sizes import format_size
from anydevice.memory.overheads import MARGIN
from anydevice.memory.placements import Alternative, Placement, Plan
from anydevice.memory.shapes import shortened

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
