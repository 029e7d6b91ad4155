"""Plans of trainings on clusters: whether one fits, by which strategy, how fast, and how long."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, get_args

from anydevice._core import hooks
from anydevice._core.record import Record, replace
from anydevice._core.text import no_pages, shortened
from anydevice._plan.card_memory import CardMemory, Recompute, Strategy, TrainingRun, card_memory
from anydevice._plan.cards import Cluster, cluster_of
from anydevice._plan.families import ModelShape, integer
from anydevice._plan.model import shape_of
from anydevice._plan.overheads import plannable
from anydevice._plan.step_time import ERROR, UNMEASURED_ERROR, StepTime, step_time
from anydevice._plan.training import OPTIMIZERS
from anydevice.errors import ConfigurationError

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
_CONTEXT = 4096
_MOST_ROWS = 65536  # tokens of a micro-batch; more make nothing faster
_MOST_CARDS = 65536
_MEASURED_CARDS = 512
_AS_FAST = 0.98
_DAY = 86_400


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
        """Return the plan as plain data, ready for JSON; memory is in bytes a card."""
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
        return hooks.render(self, "text")

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    def save_html(self, path: object) -> None:
        """Raise `ConfigurationError`: version 0.3 writes no pages."""
        raise no_pages("save_html")


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
    return _make_plan(shape, cluster, start, ways, wanted)


class _Ways(Record):
    """The choices of a plan."""

    strategies: tuple[Strategy, ...]
    recompute: tuple[Recompute, ...]
    micro_batch: int | None
    batch: int | None

    def runs(self, start: TrainingRun, cards: int) -> Iterator[TrainingRun]:
        """Yield the runs on this number of cards, the simplest first."""
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


def _make_plan(
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
