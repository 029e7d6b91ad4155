"""Plans of trainings on clusters: whether one fits, by which strategy, how fast, and how long."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, get_args

from anydevice import __version__
from anydevice._core.record import Record, replace
from anydevice._core.text import (
    UNUSABLE,
    USABLE,
    format_count,
    format_part,
    format_size,
    format_time,
    percent,
    shortened,
    wrapped,
)
from anydevice._plan.card_memory import CardMemory, Recompute, Strategy, TrainingRun, card_memory
from anydevice._plan.cards import Cluster, cluster_of
from anydevice._plan.families import ModelShape, integer
from anydevice._plan.model import shape_of
from anydevice._plan.overheads import MARGIN, plannable
from anydevice._plan.step_time import ERROR, UNMEASURED_ERROR, StepTime, step_time
from anydevice._plan.training import OPTIMIZERS
from anydevice._report import notebook, page
from anydevice._report.summary import Paint, plain
from anydevice._report.svg import Bar, bar_chart
from anydevice.errors import ConfigurationError

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
_CONTEXT = 4096
_MOST_ROWS = 65536  # tokens of a micro-batch; more make nothing faster
_MOST_CARDS = 65536
_MEASURED_CARDS = 512
_AS_FAST = 0.98
_DAY = 86_400
_PARTS = (*CardMemory._fields, "total")
_SPENT = {
    "products": "products",
    "attention": "attention",
    "memory traffic": "traffic",
    "communication": "exposed",
    "optimizer": "update",
}
"""What the time of a step is spent on, and the fields that have it."""


class TrainingPlan(Record):
    """Whether a training fits on a cluster, how it is done there, and how long it takes.

    `run` is the fastest way that fits, the simplest of those that are about as fast; where none
    fits, the one that needs least. `memory` is what a card needs, part by part, and `free` what it
    has: a training fits if 3 % more than it needs is free. If it does not fit, `enough` is the
    smallest cluster of the same cards on which it would; it is `None` if more cards do not help,
    because a layer and the logits of a micro-batch have to fit on one card: a plan splits neither
    products nor sequences.

    `tokens_per_second` are those of all cards, and may be off by `error` (0.15: 15 %); both are
    `None` for a card whose speed is not known. `notes` say what the figures do not cover.
    """

    fits: bool
    cluster: Cluster
    run: TrainingRun
    memory: CardMemory
    free: int
    shape: ModelShape
    tokens: int | None = None
    time: StepTime | None = None
    enough: Cluster | None = None
    notes: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        """The sequences of one step of the optimizer, on all cards."""
        return self.run.micro_batch * self.run.accumulate * self.cluster.cards

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens that all cards together train on in a second."""
        return self.batch * self.run.context / self.time.total if self.time else None

    @property
    def error(self) -> float | None:
        """How far the speed may be off, as a share of it."""
        if self.time is None:
            return None
        return ERROR if self.cluster.card.measured else UNMEASURED_ERROR

    @property
    def days(self) -> float | None:
        """The days that `tokens` take."""
        rate = self.tokens_per_second
        return self.tokens / rate / _DAY if self.tokens and rate else None

    @property
    def share(self) -> float:
        """How much of a card is needed: 1.0 is all of it."""
        return self.memory.total / self.free

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data, ready for JSON; memory is in bytes a card."""
        rate, days = self.tokens_per_second, self.days
        return {
            "fits": self.fits,
            "cluster": str(self.cluster),
            "cards": self.cluster.cards,
            "parameters": self.shape.parameters,
            "context": self.run.context,
            "batch": self.batch,
            "strategy": self.run.strategy,
            "recompute": self.run.recompute,
            "micro_batch": self.run.micro_batch,
            "accumulate": self.run.accumulate,
            "memory": {**self.memory.to_dict(), "total": self.memory.total},
            "free": self.free,
            "share": round(self.share, 4),
            "tokens": self.tokens,
            "tokens_per_second": None if rate is None else round(rate, 1),
            "error": self.error,
            "days": None if days is None else round(days, 3),
            "enough": str(self.enough) if self.enough else None,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(training_lines(self))

    def _repr_html_(self) -> str:
        mark = USABLE if self.fits else UNUSABLE
        return notebook.block(
            notebook.line(_title(self), "strong"),
            notebook.table((), _sizes(self.memory), right=(1,)),
            notebook.marked(mark, _verdict(self), good=self.fits),
            *(notebook.line(each) for each in (*_details(self), *_remarks(self))),
        )

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a page with plots that needs no other file.

        Raises `ConfigurationError` for a name that ends neither in .html nor in .htm, and
        `TransferError` where the file cannot be written.
        """
        page.save_page(path, _page(self))


def plan_training(
    model: Any = None,
    cluster: str | Cluster | None = None,
    *,
    context: int | None = None,
    batch: int | None = None,
    tokens: int | float | str | None = None,
    strategy: Strategy | None = None,
    recompute: Recompute | None = None,
    micro_batch: int | None = None,
    optimizer: str = "adamw",
    fused_loss: bool = False,
    compiled: bool = False,
    **numbers: Any,
) -> TrainingPlan:
    """Whether a model can be trained on a cluster, how, how fast, and for how many days.

    `model` and `numbers` are as in `estimate_inference`. `cluster` is in words: "16xH100-80GB",
    "2xH100", "4x8xA100-40GB" (4 nodes of 8), or "8xMyCard-48GB", a card whose speed is not known.
    Training is in mixed precision: weights, gradients and the `optimizer`'s state in 32 bits,
    products in 16. `context` is the number of tokens in a sequence (default: 4096, or the model's
    longest), `batch` the number of sequences in a step on all cards (default: one micro-batch on
    each), and `tokens` the number to train on in all: 2e12, or "2T".

    The plan chooses what is not given. A `strategy` is "replicate", "shard_gradients" (gradients
    and optimizer are split over the cards) or "shard" (weights too). `recompute` is "none",
    "selective" (every second product is computed again in the backward pass) or "full" (each layer
    is). `fused_loss` and `compiled` say that the loss keeps no copies of the logits in 32 bits, and
    that layers are compiled: both take less memory, and compiled layers less time.

    >>> plan = plan_training(
    ...     cluster="16xH100-80GB", tokens="2T", context=4096,
    ...     layers=32, hidden=4096, intermediate=11008, heads=32, vocabulary=32000,
    ... )
    >>> plan.fits, plan.run.strategy, plan.error
    (True, 'shard_gradients', 0.15)
    >>> 100_000 < plan.tokens_per_second < 200_000, 100 < plan.days < 250
    (True, True)

    Raises `ConfigurationError` for a model, a cluster or an option that is not known.
    """
    if cluster is None:
        raise ConfigurationError(
            "no cluster is given; write one, such as '16xH100-80GB'", "cluster"
        )
    cluster = cluster_of(cluster)
    shape = shape_of(model, dtype="float32", **numbers)
    if shape.towers:
        raise ConfigurationError(
            f"only the training of decoders can be planned; {shape.architecture} is not a decoder",
            "model",
        )
    if not (shape.layer_weights and shape.hidden and shape.heads):
        raise ConfigurationError(
            "the layers of this model are not known; give its config or its dimensions", "model"
        )
    longest = shape.longest_context
    start = TrainingRun(
        integer("context", min(_CONTEXT, longest or _CONTEXT) if context is None else context),
        optimizer=_one_of("optimizer", optimizer, tuple(OPTIMIZERS)),
        fused_loss=fused_loss,
        compiled=compiled,
    )
    ways = _Ways(
        (_one_of("strategy", strategy, STRATEGIES),) if strategy else STRATEGIES,
        (_one_of("recompute", recompute, RECOMPUTE),) if recompute else RECOMPUTE,
        None if micro_batch is None else integer("micro_batch", micro_batch),
        None if batch is None else integer("batch", batch),
    )
    if ways.batch is not None and ways.batch < cluster.cards * (ways.micro_batch or 1):
        raise ConfigurationError(
            f"a batch of {ways.batch} sequences is less than one micro-batch for each of "
            f"{cluster.cards} cards",
            "batch",
        )
    wanted = None if tokens is None else _tokens(tokens)
    return _planned(shape, cluster, start, ways, wanted)


class _Ways(Record):
    """What a plan may choose from."""

    strategies: tuple[Strategy, ...]
    recompute: tuple[Recompute, ...]
    micro_batch: int | None
    batch: int | None

    def runs(self, start: TrainingRun, cards: int) -> Iterator[TrainingRun]:
        """All ways on so many cards, the simplest first."""
        for strategy, recompute, size in product(
            self.strategies if cards > 1 else self.strategies[:1],
            self.recompute,
            self._micro_batches(start.context, cards),
        ):
            accumulate = -(-self.batch // (cards * size)) if self.batch else 1
            yield replace(
                start,
                strategy=strategy,
                recompute=recompute,
                micro_batch=size,
                accumulate=accumulate,
            )

    def _micro_batches(self, context: int, cards: int) -> list[int]:
        if self.micro_batch is not None:
            return [self.micro_batch]
        most = max(1, _MOST_ROWS // context)
        if self.batch is not None:
            most = min(most, max(1, self.batch // cards))
        return [2**power for power in range(most.bit_length())]


def _planned(
    shape: ModelShape, cluster: Cluster, start: TrainingRun, ways: _Ways, tokens: int | None
) -> TrainingPlan:
    run, fits = _best(shape, cluster, start, ways)
    return TrainingPlan(
        fits,
        cluster,
        run,
        card_memory(shape, run, cluster),
        cluster.card.memory,
        shape,
        tokens,
        step_time(shape, run, cluster) if fits and cluster.card.like else None,
        None if fits else _enough(shape, cluster, start, ways),
        _notes(shape, cluster),
    )


def _best(
    shape: ModelShape, cluster: Cluster, start: TrainingRun, ways: _Ways
) -> tuple[TrainingRun, bool]:
    """The fastest way that fits, or the one that needs least."""

    def needs(run: TrainingRun) -> int:
        return card_memory(shape, run, cluster).total

    def rate(run: TrainingRun) -> float:
        # Where no speed is known, a card that recomputes least is the fastest.
        if not cluster.card.like:
            return -RECOMPUTE.index(run.recompute) * _MOST_ROWS + run.rows
        return run.rows * run.accumulate / step_time(shape, run, cluster).total

    runs = list(ways.runs(start, cluster.cards))
    fitting = [run for run in runs if needs(run) <= plannable(cluster.card.memory)]
    if not fitting:
        return min(runs, key=needs), False
    rates = [rate(run) for run in fitting]
    enough = max(rates) * (_AS_FAST if cluster.card.like else 1)
    return next(run for run, each in zip(fitting, rates, strict=True) if each >= enough), True


def _enough(shape: ModelShape, cluster: Cluster, start: TrainingRun, ways: _Ways) -> Cluster | None:
    """The smallest cluster of these cards that would do: by doubling, then node by node."""

    def would_do(cards: int) -> bool:
        larger = cluster.of(cards)
        if ways.batch is not None and ways.batch < larger.cards * (ways.micro_batch or 1):
            return False
        return _best(shape, larger, start, ways)[1]

    count = 2 * cluster.cards
    while not would_do(count):
        count *= 2
        if count > _MOST_CARDS:
            return None
    node = cluster.of(count).per_node
    between = range(count // 2 + node, count, node)
    found = bisect_left(between, True, key=would_do)
    return cluster.of(between[found] if found < len(between) else count)


def _notes(shape: ModelShape, cluster: Cluster) -> tuple[str, ...]:
    card, found = cluster.card, list(shape.assumed)
    if not card.like:
        found.append(f"the speed of {card.name} is not known: no time is planned")
    elif not card.measured:
        like = card.like.upper()
        found.append(f"no published run on {card.name} was compared with; it is planned as {like}")
    if cluster.cards > _MEASURED_CARDS:
        found.append(f"published runs reach {_MEASURED_CARDS} cards; more were not compared with")
    return tuple(found)


def _one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise ConfigurationError(
            f"{name} is one of {', '.join(known)}, not {shortened(repr(value))}", name
        )
    return value


_TOKENS = re.compile(r"\s*(\d+(?:[._]\d+)*|\d+(?:\.\d+)?e\d+)\s*([kmbt]?)\s*", re.IGNORECASE)
_MOST_TOKENS = 10**18


def _tokens(value: Any) -> int:
    """A number of tokens, also in words: a k is 1000 here.

    >>> _tokens("2T"), _tokens(3e9), _tokens("1.5b")
    (2000000000000, 3000000000, 1500000000)
    """
    match = _TOKENS.fullmatch(value) if isinstance(value, str) else None
    try:
        if match is not None:
            number = float(match[1]) * 1000.0 ** " kmbt".index(match[2].lower() or " ")
        else:
            number = float(value) if not isinstance(value, bool | str) else 0.0
    except (TypeError, ValueError):
        number = 0.0
    if not 1 <= number <= _MOST_TOKENS:
        raise ConfigurationError(
            f"tokens must be a number above 0, such as 2e12 or '2T', not {shortened(repr(value))}",
            "tokens",
        )
    return round(number)


WIDTH = 80
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


def training_lines(plan: TrainingPlan, width: int | None = None, paint: Paint = plain) -> list[str]:
    """The text of a plan, no wider than `width` where that is 60 or more."""
    columns = width or WIDTH
    mark, style = (USABLE, "good") if plan.fits else (UNUSABLE, "bad")
    first, *rest = wrapped(f"{mark} {_verdict(plan)}", columns, hanging="  ")
    lines = [
        *wrapped(_title(plan), columns, hanging="  "),
        "",
        *(f"  {name:<13} {size:>10}" for name, size in _sizes(plan.memory)),
        "",
        paint(mark, style) + first[len(mark) :],
        *rest,
    ]
    for detail in _details(plan):
        lines += wrapped(detail, columns, "  ", "  ")
    remarks = list(_remarks(plan))
    for remark in remarks:
        lines += ["", *(paint(line, "dim") for line in wrapped(remark, columns, hanging="  "))]
    return lines


def _page(plan: TrainingPlan) -> str:
    memory, mark = plan.memory, USABLE if plan.fits else UNUSABLE
    pieces = tuple((name, float(getattr(memory, name))) for name in memory._fields)
    bar = Bar("a card", format_part(memory.total, plan.free), pieces, float(plan.free))
    return page.document(
        "anydevice plan",
        [f"anydevice {__version__}", _title(plan).removesuffix("; a card needs")],
        page.verdict(mark, _verdict(plan), good=plan.fits),
        page.cards(_cards(plan)),
        page.figures(
            page.memory_figure(
                "Memory of a card", "the line is what it has", [bar], memory._fields
            ),
            _step_figure(plan.time) if plan.time else "",
            page.beside([*_sizes(memory), ("a card has", format_size(plan.free))]),
        ),
        page.section("How it is trained", page.listed(_details(plan))),
        notes=plan.notes,
    )


def _cards(plan: TrainingPlan) -> Iterator[tuple[str, str, str]]:
    yield format_size(plan.memory.total), "needed on a card", f"{percent(plan.share)} of it"
    rate, error, days = plan.tokens_per_second, plan.error, plan.days
    if rate is not None and error is not None:
        yield f"{rate:,.0f}", "tokens a second", f"± {percent(error)}, all cards together"
    if days is not None and error is not None:
        within = f"{_days(days / (1 + error))} to {_days(days / (1 - error))}"
        yield f"{_days(days)} days", f"for {format_count(plan.tokens or 0)} tokens", within
    if plan.time is not None:
        yield format_time(plan.time.total), "a step", f"{plan.batch:,} sequences"
    yield plan.run.strategy.replace("_", " "), "strategy", f"recompute {plan.run.recompute}"


def _step_figure(spent: StepTime) -> str:
    """What the time of a step is spent on, as far as nothing hides it."""
    parts = [(name, float(getattr(spent, key))) for name, key in _SPENT.items()]
    bars = [Bar(name, percent(time / spent.total), ((name, time),)) for name, time in parts]
    unit = (1.0, "s") if spent.total >= 1 else (1e-3, "ms")
    title = "Time of a step"
    plot = bar_chart(bars, list(_SPENT), format_time, unit, title=title)
    return page.figure(title, f"{format_time(spent.total)} in all", plot)


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
