"""Plans of memory and of trainings, as lines for a terminal and as tables for a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anydevice._core.device import Device
from anydevice._core.text import (
    UNUSABLE,
    USABLE,
    bar,
    format_count,
    format_size,
    percent,
    shortened,
    wrapped,
)
from anydevice._plan.estimates import MARGIN, PARTS, part_lines, part_sizes
from anydevice._plan.families import ModelShape
from anydevice._plan.plan import Placement, Plan
from anydevice._plan.quantization import OFFERED
from anydevice._report import notebook
from anydevice._report.tables import WIDTH, Paint, plain, table, verdict_lines

if TYPE_CHECKING:
    from anydevice._plan.training_plan import TrainingPlan

_HEAD = ("device", "layers", "needs", "free", "")
_MAX_NAME = 56
_MAX_BAR, _MIN_BAR = 30, 6
_WAYS = {
    "replicate": "replicate the model on every card",
    "shard_gradients": "shard gradients and optimizer over the cards",
    "shard": "shard weights, gradients and optimizer over the cards",
}
_AGAIN = {
    "none": "recompute nothing",
    "selective": "recompute every second product",
    "full": "recompute each layer",
}
_NO_CHANGE = "No smaller context, batch or dtype makes it fit: it takes more devices."
_WORDS = {"kv_dtype": "kv-cache in", "dtype": "weights in", "weights": "weights quantized to"}


def plan_lines(plan: Plan, width: int | None = None, paint: Paint = plain) -> list[str]:
    """Return the text of a plan, at most `width` wide if that is 60 or more."""
    columns = width or WIDTH
    return [
        *wrapped(_title(plan), columns, hanging="  "),
        "",
        *part_lines(plan.estimate, (*PARTS, "total")),
        "",
        *verdict_lines(plan.fits, _verdict(plan), columns, paint),
        "",
        *_placement_table(plan.placements, columns),
        *_suggestions(plan, columns, paint),
    ]


def plan_html(plan: Plan) -> str:
    """Return a plan for a notebook, with a bar for each device."""
    parts = part_sizes(plan.estimate, (*PARTS, "total"))
    rows = [(*cells, notebook.bar(share, said)) for share, said, cells in _shares(plan.placements)]
    mark = USABLE if plan.fits else UNUSABLE
    return notebook.block(
        notebook.line(_title(plan), "strong"),
        notebook.table((), parts, right=(1,)),
        notebook.marked(mark, _verdict(plan), good=plan.fits),
        notebook.table(_HEAD, rows, right=(2, 3)),
        *(notebook.line(line.strip()) for line in _suggestions(plan, 10_000, plain) if line),
    )


def _verdict(plan: Plan) -> str:
    needed = format_size(plan.estimate.total)
    if plan.device is not None:
        return f"fits on {plan.device}"
    if plan.fits:
        return f"fits on {_device_list(plan.devices)} together"
    if not plan.placements:
        return f"does not fit: {needed} needed, and no device tells its memory"
    where = _device_list([placement.device for placement in plan.placements])
    if len(plan.placements) == 1:
        free = format_size(plan.free)
        margin = f" and {MARGIN} % more" if plan.estimate.total <= plan.free else ""
        return f"does not fit on {where}: {needed}{margin} needed, {free} free"
    # Not the sum of what is free: each device needs memory for activations.
    lacking = format_size(plan.unplaced)
    return f"does not fit on {where} together: no place for {lacking} of it"


def _title(plan: Plan) -> str:
    estimate = plan.estimate
    shape = estimate.shape
    name = _model_name(shape)
    dtype = shape.quantization if shape is not None and shape.quantization else estimate.dtype
    differs = estimate.kv_cache and estimate.kv_dtype != dtype
    cache = f", kv-cache in {estimate.kv_dtype}" if differs else ""
    model = f"{name}: {format_count(estimate.parameters)} parameters in {dtype}{cache}"
    return f"{model}, context {estimate.context}, batch {estimate.batch}"


def _model_name(shape: ModelShape | None) -> str:
    return shortened(shape.name, _MAX_NAME) if shape is not None and shape.name else "model"


def _placement_table(placements: Sequence[Placement], columns: int) -> list[str]:
    if not placements:
        return []
    shares = list(_shares(placements))
    longest = max(len(said) for _, said, _ in shares)
    rows = [(*cells, said.rjust(longest)) for _, said, cells in shares]
    used = sum(max(map(len, column)) + 2 for column in zip(_HEAD, *rows, strict=True)) - 1
    width = max(_MIN_BAR, min(_MAX_BAR, columns - used))
    with_bars = [
        (*row[:4], f"{''.join(bar(share, width))} {row[4]}")
        for row, (share, _, _) in zip(rows, shares, strict=True)
    ]
    return table(_HEAD, with_bars, right=(2, 3))


def _shares(placements: Sequence[Placement]) -> Iterator[tuple[float, str, tuple[str, ...]]]:
    """Yield the share of each device, that share as text, and the cells before it."""
    for placement in placements:
        cells = (
            str(placement.device),
            _layers(placement.layers),
            format_size(placement.parts.total) if placement.layers else "–",
            format_size(placement.free),
        )
        yield placement.share, f"{int(placement.share * 100)} %", cells  # 100 % means full


def _layers(layers: range) -> str:
    if not layers:
        return "–"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}–{layers[-1]}"


def _suggestions(plan: Plan, columns: int, paint: Paint) -> Iterator[str]:
    if plan.alternatives:
        yield from ("", "On fewer devices with:" if plan.fits else "It would fit with:")
        for option in plan.alternatives:
            now = getattr(plan.estimate, option.change.replace("weights", "dtype"))
            words = f"{_WORDS.get(option.change, option.change)} {option.value} instead of {now}"
            where = f"{format_size(option.total)}, on {_device_list(option.devices)}"
            price = OFFERED.get(str(option.value)) if option.change == "weights" else None
            where += f" ({price})" if price else ""
            yield from wrapped(f"{words}: {where}", columns, "  ", "  ")
    elif not plan.fits:
        yield from ("", *wrapped(_NO_CHANGE, columns, hanging="  "))
    remarks = [*plan.notes, *plan.estimate.assumed]
    if remarks:
        yield ""
        for remark in remarks:
            lines = wrapped(f"note: {remark}", columns, hanging="  ")
            yield from (paint(line, "dim") for line in lines)


def _device_list(devices: Sequence[Device]) -> str:
    """Return device names joined for a sentence, the first and the last of more than four.

    >>> _device_list([Device("cuda", number) for number in range(8)])
    'cuda:0 … cuda:7'
    """
    names = [str(device) for device in devices]
    if len(names) > 4:
        return f"{names[0]} … {names[-1]}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def training_lines(plan: TrainingPlan, width: int | None = None, paint: Paint = plain) -> list[str]:
    columns = width or WIDTH
    lines = [
        *wrapped(_training_title(plan), columns, hanging="  "),
        "",
        *part_lines(plan.memory, (*plan.memory._fields, "total"), column=13),
        "",
        *verdict_lines(plan.fits, _training_verdict(plan), columns, paint),
    ]
    for detail in _details(plan):
        lines += wrapped(detail, columns, "  ", "  ")
    for note in plan.notes:
        remark = wrapped(f"note: {note}", columns, hanging="  ")
        lines += ["", *(paint(line, "dim") for line in remark)]
    return lines


def training_plan_html(plan: TrainingPlan) -> str:
    mark = USABLE if plan.fits else UNUSABLE
    return notebook.block(
        notebook.line(_training_title(plan), "strong"),
        notebook.table((), part_sizes(plan.memory, (*plan.memory._fields, "total")), right=(1,)),
        notebook.marked(mark, _training_verdict(plan), good=plan.fits),
        *map(notebook.line, (*_details(plan), *(f"note: {note}" for note in plan.notes))),
    )


def _training_title(plan: TrainingPlan) -> str:
    model = f"{_model_name(plan.shape)}: {format_count(plan.shape.parameters)} parameters"
    where = f"training on {plan.cluster}, context {plan.run.context}, batch {plan.batch}"
    return f"{model}, {where}; a card needs"


def _training_verdict(plan: TrainingPlan) -> str:
    needed, free = format_size(plan.memory.total), format_size(plan.free)
    if plan.fits:
        left = format_size(plan.free - plan.memory.total)
        return f"fits on {plan.cluster}: {needed} of {free} a card, {left} left"
    margin = f" and {MARGIN} % more" if plan.memory.total <= plan.free else ""
    more = f"; {plan.enough} would do" if plan.enough else "; more such cards would not do either"
    return f"does not fit on {plan.cluster}: {needed}{margin} needed, {free} a card{more}"


def _details(plan: TrainingPlan) -> Iterator[str]:
    run = plan.run
    way = "one card" if plan.cluster.cards == 1 else _WAYS[run.strategy]
    again = "" if run.accumulate == 1 else f", {run.accumulate} times a step"
    yield f"{way}; {_AGAIN[run.recompute]}; micro-batch {run.micro_batch}{again}"
    rate, error, days = plan.tokens_per_second, plan.error, plan.days
    if rate is None or error is None:
        return
    per_card = rate / plan.cluster.cards
    yield f"{rate:,.0f} tokens a second ± {percent(error)} ({per_card:,.0f} a card)"
    if days is not None and plan.tokens is not None:
        span = f"{_days(days / (1 + error))} to {_days(days / (1 - error))}"
        yield f"{format_count(plan.tokens)} tokens: {_days(days)} days ({span})"


def _days(days: float) -> str:
    return f"{days:,.0f}" if days >= 100 else f"{days:.3g}"
