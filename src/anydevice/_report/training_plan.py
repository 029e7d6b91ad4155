"""A plan of a training as lines for a terminal and as a table for a notebook."""

from __future__ import annotations

from collections.abc import Iterator

from anydevice._core.text import (
    UNUSABLE,
    USABLE,
    format_count,
    format_size,
    percent,
    shortened,
    wrapped,
)
from anydevice._plan.card_memory import CardMemory
from anydevice._plan.estimates import MARGIN
from anydevice._plan.training_plan import TrainingPlan
from anydevice._report import notebook
from anydevice._report.text import WIDTH, Paint, plain, verdict_lines

_PARTS = (*CardMemory._fields, "total")
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


def training_text(plan: TrainingPlan) -> str:
    """Return the text of a plan."""
    return "\n".join(training_lines(plan))


def training_lines(plan: TrainingPlan, width: int | None = None, paint: Paint = plain) -> list[str]:
    """Return the text of a plan, at most `width` wide if that is 60 or more."""
    columns = width or WIDTH
    lines = [
        *wrapped(_title(plan), columns, hanging="  "),
        "",
        *(f"  {name:<13} {size:>10}" for name, size in _sizes(plan.memory)),
        "",
        *verdict_lines(plan.fits, _verdict(plan), columns, paint),
    ]
    for detail in _details(plan):
        lines += wrapped(detail, columns, "  ", "  ")
    for remark in _remarks(plan):
        lines += ["", *(paint(line, "dim") for line in wrapped(remark, columns, hanging="  "))]
    return lines


def training_plan_html(plan: TrainingPlan) -> str:
    """Return a plan of a training for a notebook."""
    mark = USABLE if plan.fits else UNUSABLE
    return notebook.block(
        notebook.line(_title(plan), "strong"),
        notebook.table((), _sizes(plan.memory), right=(1,)),
        notebook.marked(mark, _verdict(plan), good=plan.fits),
        *(notebook.line(text) for text in (*_details(plan), *_remarks(plan))),
    )


def _sizes(memory: CardMemory) -> list[tuple[str, str]]:
    return [(name, format_size(getattr(memory, name))) for name in _PARTS]


def _title(plan: TrainingPlan) -> str:
    name = shortened(plan.shape.name, 56) if plan.shape.name else "model"
    count = format_count(plan.shape.parameters)
    run = plan.run
    return (
        f"{name}: {count} parameters, training on {plan.cluster}, context {run.context}, "
        f"batch {plan.batch}; a card needs"
    )


def _verdict(plan: TrainingPlan) -> str:
    needed, free = format_size(plan.memory.total), format_size(plan.free)
    if plan.fits:
        left = format_size(plan.free - plan.memory.total)
        return f"fits on {plan.cluster}: {needed} of {free} a card, {left} left"
    margin = f" and {MARGIN} % more" if plan.memory.total <= plan.free else ""
    more = f"; {plan.enough} would do" if plan.enough else "; more such cards would not do either"
    return f"does not fit on {plan.cluster}: {needed}{margin} needed, {free} a card{more}"


def _details(plan: TrainingPlan) -> Iterator[str]:
    run = plan.run
    alone = plan.cluster.cards == 1
    way = "one card" if alone else _WAYS[run.strategy]
    again = "" if run.accumulate == 1 else f", {run.accumulate} times a step"
    yield f"{way}; {_AGAIN[run.recompute]}; micro-batch {run.micro_batch}{again}"
    rate, error, days = plan.tokens_per_second, plan.error, plan.days
    if rate is None or error is None:
        return
    each = rate / plan.cluster.cards
    yield f"{rate:,.0f} tokens a second ± {percent(error)} ({each:,.0f} a card)"
    if days is not None and plan.tokens is not None:
        least, most = days / (1 + error), days / (1 - error)
        yield (
            f"{format_count(plan.tokens)} tokens: {_days(days)} days "
            f"({_days(least)} to {_days(most)})"
        )


def _days(days: float) -> str:
    return f"{days:,.0f}" if days >= 100 else f"{days:.3g}"


def _remarks(plan: TrainingPlan) -> Iterator[str]:
    yield from (f"note: {each}" for each in plan.notes)
