"""Plans of trainings on clusters: whether one fits, by which strategy, how fast, and how long.

Weights, gradients and the optimizer's state are in 32 bits, products in 16. The strategy decides
which part of them a card holds; activations follow from its micro-batch; buffers of communication
hold the gathered weights of a layer and the gradients to reduce.

A micro-batch takes the FLOPs of its products and of attention at the rates that are reached, and
the bytes that all other operations move through the card's memory. Beside it, weights are gathered
and gradients reduced, over the links of a node or the network between nodes, and a part of that is
hidden. Rates are shares of what the makers state: `FITTED` has them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Literal, get_args

from anydevice._core.record import Record, replace
from anydevice._core.text import shortened
from anydevice._plan.cards import Cluster, cluster_of
from anydevice._plan.estimates import CONTEXT, FLOAT32, WORKSPACE, RenderedPlan, plannable
from anydevice._plan.families import ModelShape, integer
from anydevice._plan.model import shape_of
from anydevice._plan.training import OPTIMIZERS
from anydevice.errors import ConfigurationError

Strategy = Literal["replicate", "shard_gradients", "shard"]
Recompute = Literal["none", "selective", "full"]

HALF = 2
IDLE = 0.09
"""The share of a card's tensors that the allocator holds beside them, rounded up or idle.

The peaks that torchtitan publishes (reserved bytes) are 1 to 20 % above the sum of the tensors that
are counted here; with this share all of them are within 10 %.
"""

KEPT = 0.5
"""The share of `IDLE` that a full card still holds: the allocator gives the rest back first.

With all of it, 28 of the 216 runs that llm-foundry publishes would not have fit; with half, two.
"""

COMMUNICATORS = 2**30
"""Bytes of the libraries' own buffers for communication, outside of the allocator."""

PLAIN_LOSS, FUSED_LOSS, SPLIT_LOSS = 3 * FLOAT32, 2 * HALF, 4 * FLOAT32
"""Bytes of a logit at the loss: its logarithm and two gradients in 32 bits; itself and its gradient
in 16 where loss and cast are one kernel; one copy more where the vocabulary is split."""


class TrainingRun(Record):
    """How a model is trained on a cluster.

    `micro_batch` sequences of `context` tokens are what a card computes at a time, `accumulate`
    times for each step of the optimizer. A card of a "replicate" holds all of the model; with
    "shard_gradients" its part of gradients and optimizer, and with "shard" its part of the weights
    too. `recompute` says what is computed again in the backward pass: nothing, every second product
    ("selective"), or each layer ("full").

    `fused_loss` is a loss without copies of the logits in 32 bits, `compiled` a model whose layers
    keep only what the backward pass needs, `float8` products in 8 bits, `reduced` the bytes in
    which a gradient is reduced. `tensor`, `pipeline` and `sequence` are the numbers of cards over
    which each product, the layers, and each sequence are split.
    """

    context: int
    micro_batch: int = 1
    strategy: Strategy = "shard"
    recompute: Recompute = "none"
    accumulate: int = 1
    optimizer: str = "adamw"
    fused_loss: bool = False
    compiled: bool = False
    float8: bool = False
    reduced: int = FLOAT32
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1

    @property
    def rows(self) -> int:
        """The tokens that a card computes at a time."""
        return self.micro_batch * self.context // self.sequence


class CardMemory(Record):
    """The bytes that a card needs; `overhead` is what a process takes beside its tensors."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    overhead: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self._fields)

    @property
    def allocated(self) -> int:
        """The bytes that PyTorch's allocator reserves at the peak, if it has room."""
        return int((1 + IDLE) * (self.total - self.overhead)) + WORKSPACE


def card_memory(shape: ModelShape, run: TrainingRun, cluster: Cluster) -> CardMemory:
    """Return the memory that a card needs at the peak of a training step."""
    parameters = _stage(shape, run)
    ways = max(1, cluster.cards // (run.tensor * run.pipeline))
    sharded = parameters if run.strategy == "replicate" else -(-parameters // ways)
    state = OPTIMIZERS[run.optimizer].state_bytes(sharded, FLOAT32)
    tensors = {
        "weights": FLOAT32 * sharded,
        "gradients": FLOAT32 * sharded,
        "optimizer": state,
        "activations": _activations(shape, run),
        "communication": _communication_bytes(shape, run, cluster.cards > 1),
    }
    fixed = CONTEXT + WORKSPACE + (COMMUNICATORS if cluster.cards > 1 else 0)
    overhead = fixed + int(KEPT * IDLE * sum(tensors.values()))
    return CardMemory(**tensors, overhead=overhead)


def _stage(shape: ModelShape, run: TrainingRun) -> int:
    """Return the parameters of one stage of the pipeline on one card of a split product."""
    layers = max(shape.layer_weights) * -(-shape.layers // run.pipeline)
    if run.pipeline == 1:
        return shape.parameters // run.tensor
    outside = max(shape.embedding_parameters, shape.head_parameters) + shape.other_parameters
    return (layers + outside) // run.tensor


def _communication_bytes(shape: ModelShape, run: TrainingRun, several: bool) -> int:
    """Return the bytes of gathered weights in 16 bits, their buffer, and gradients to reduce."""
    parameters = _stage(shape, run)
    if run.strategy == "replicate":
        return (HALF + run.reduced * several) * parameters  # casts, and the buckets of gradients
    if run.pipeline > 1:
        return (HALF + run.reduced) * parameters
    outside = shape.embedding_parameters + shape.head_parameters + shape.other_parameters
    part = (outside + max(shape.layer_weights)) // run.tensor
    if run.strategy == "shard_gradients":
        return HALF * parameters + (HALF + run.reduced) * part
    return (2 * HALF + run.reduced) * part


def _activations(shape: ModelShape, run: TrainingRun) -> int:
    """Return the bytes saved for the backward pass, and the largest temporary ones beside them."""
    elements = saved_elements(shape, run.recompute, run.compiled)
    sums = FLOAT32 * shape.heads if run.recompute != "full" else 0
    layer_bytes = run.rows * (HALF * elements + sums) // run.tensor
    weights = -(-shape.layers // run.pipeline) * layer_bytes
    working, loss = _working(shape, run), _loss(shape, run)
    first = run.pipeline * weights + working
    return max(first, weights + max(working, loss))


def saved_elements(shape: ModelShape, recompute: Recompute, compiled: bool = False) -> int:
    """Return the elements that one layer saves of a token.

    All of them: the stream before attention and network, both after their norm, queries, keys and
    values, what attention gives, and the network's inside. Of every second product: the stream,
    queries, values, attention, and the first half of the network (its output too where nothing
    is compiled that knows it is not needed).
    """
    stream, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.key_elements
    inner = _inner(shape)
    if recompute == "full":
        return stream
    if recompute == "selective":
        return 2 * stream + 2 * queries + keys + inner - (stream if compiled else 0)
    inside = (3 if compiled else 4) if shape.build.gated else 2
    norms = 0 if compiled else 2 * stream
    return 2 * stream + norms + 2 * queries + 2 * keys + inside * inner


def _inner(shape: ModelShape) -> int:
    """Return the width of the network that one token passes."""
    experts = shape.experts
    if experts is None:
        return shape.intermediate
    return experts.per_token * experts.intermediate + experts.shared


def _working(shape: ModelShape, run: TrainingRun) -> int:
    """Return the bytes of a layer in its backward pass: recomputed tensors and gradients."""
    again = 0
    if run.recompute != "none":
        again = saved_elements(shape, "none") - saved_elements(shape, run.recompute)
    inside = 2 * _inner(shape) + 2 * shape.hidden
    gathered = 2 * shape.hidden if run.tensor > 1 else 0
    return HALF * run.rows * ((again + inside) // run.tensor + gathered)


def _loss(shape: ModelShape, run: TrainingRun) -> int:
    """Return the bytes of all logits, their gradients, and the gathered input of a split head."""
    per_logit = FUSED_LOSS if run.fused_loss else SPLIT_LOSS if run.tensor > 1 else PLAIN_LOSS
    gathered = HALF * shape.hidden if run.tensor > 1 else 0
    return run.rows * (per_logit * shape.outputs // run.tensor + gathered)


class Constants(Record):
    """Fitted efficiencies, as fractions of the card's peak.

    `products` and `attention` are shares of the stated FLOPs, for products of many tokens and for
    attention; only the half that a token sees counts. `few_tokens` is the size of a
    micro-batch whose products reach half of that. `traffic` is the bytes that move, in one pass,
    for each element that a layer would save of a token; `loss_traffic` those for each logit;
    `update_traffic` those for each parameter that a card updates.

    `link` and `network` are shares of the stated bandwidths, within a node and between nodes; `hop`
    is how long one step of a ring between nodes waits, in microseconds. `overlap` is the share of
    communication that is hidden behind computing. `float8` is how much faster products in 8 bits
    are, `compiled` the share of the traffic that compiled layers have left.
    """

    a100_products: float = 0.889
    h100_products: float = 0.75
    a100_attention: float = 0.316
    h100_attention: float = 0.178
    few_tokens: float = 1210
    traffic: float = 8.28
    loss_traffic: float = 38.3
    update_traffic: float = 193
    link: float = 0.763
    network: float = 0.608
    hop: float = 5.04
    overlap: float = 0.803
    float8: float = 1.54
    compiled: float = 0.4


FITTED = Constants()
"""Fitted to the 189 runs on 8 to 64 cards of llm-foundry's table by `bench/plan_training.py`.

They are those of layers that are not compiled, and of the attention kernels of 2023; `compiled` is
from torchtitan's two runs on 8 cards that differ in nothing else.
"""

ERROR, UNMEASURED_ERROR = 0.15, 0.4
"""How far a rate may be off: on a card that published runs are of, and on another one.

Of llm-foundry's runs on 128 to 512 cards, which were not fitted to, all are within the first.
"""


class StepTime(Record):
    """The seconds of a step; `exposed` is the part of `communication` that nothing hides."""

    products: float
    attention: float
    traffic: float
    communication: float
    exposed: float
    update: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.traffic + self.exposed + self.update


def step_time(
    shape: ModelShape, run: TrainingRun, cluster: Cluster, constants: Constants = FITTED
) -> StepTime:
    """Return the time of one step of the optimizer on a card whose rates are known."""
    card, times = cluster.card, run.accumulate
    h100 = card.like == "h100"
    share = constants.h100_products if h100 else constants.a100_products
    share *= run.rows / (run.rows + constants.few_tokens) * (constants.float8 if run.float8 else 1)
    attention_share = constants.h100_attention if h100 else constants.a100_attention
    products = times * _product_flops(shape, run) / (card.flops * share)
    attention = times * _attention_flops(shape, run) / (card.flops * attention_share)
    traffic = times * _traffic(shape, run, constants) / card.bandwidth
    computing = products + attention + traffic
    moving, waiting = _communication_seconds(shape, run, cluster, constants)
    longer, shorter = max(computing, moving), min(computing, moving)
    exposed = longer + (1 - constants.overlap) * shorter - computing + waiting
    updated = shape.parameters if run.strategy == "replicate" else shape.parameters / cluster.cards
    update = updated * constants.update_traffic / card.bandwidth
    return StepTime(products, attention, traffic, moving + waiting, exposed, update)


def tokens_a_second(
    shape: ModelShape, run: TrainingRun, cluster: Cluster, constants: Constants = FITTED
) -> float:
    """Return the tokens that all cards together train on in a second."""
    seconds = step_time(shape, run, cluster, constants).total
    return run.rows * run.accumulate * cluster.cards / seconds


def active_parameters(shape: ModelShape) -> int:
    """Return the parameters of all layers that one token passes."""
    experts = shape.experts
    if experts is None:
        return sum(shape.layer_weights)
    matrices = 3 if shape.build.gated else 2
    idle = (experts.count - experts.per_token) * matrices * shape.hidden * experts.intermediate
    return sum(shape.layer_weights) - len(experts.layers) * idle


def _product_flops(shape: ModelShape, run: TrainingRun) -> float:
    """Return two FLOPs for each parameter and token, forward, twice backward, and recomputed."""
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[run.recompute]
    layers = (3 + again) * active_parameters(shape)
    return 2.0 * run.rows * (layers + 3 * shape.outputs * shape.hidden)


def _attention_flops(shape: ModelShape, run: TrainingRun) -> float:
    """Return the FLOPs of the causal half; the backward pass computes the scores again."""
    again = 1 if run.recompute == "full" else 0
    width = 2.0 * shape.heads * shape.head_size
    attended = sum(min(window or run.context, run.context) for window in shape.windows)
    return run.rows * (3.5 + again) * width * attended


def _traffic(shape: ModelShape, run: TrainingRun, constants: Constants) -> float:
    again = 0 if run.recompute == "none" else 1
    moved = constants.traffic * (constants.compiled if run.compiled else 1)
    layers = shape.layers * saved_elements(shape, "none") * moved * (3 + again)
    return run.rows * (layers + shape.outputs * constants.loss_traffic)


def _communication_seconds(
    shape: ModelShape, run: TrainingRun, cluster: Cluster, constants: Constants
) -> tuple[float, float]:
    """Return the seconds of a step in which tensors move, and in which rings wait."""
    if cluster.cards == 1:
        return 0.0, 0.0
    if run.strategy == "replicate":  # one all-reduce, which is a reduction and a gathering
        volume, rings, times = 2 * run.reduced, 2, 1
    else:
        gathered = 1 if run.strategy == "shard_gradients" else 2
        volume, rings, times = HALF * gathered + run.reduced, gathered + 1, run.accumulate
    card = cluster.card
    bandwidth, hops = card.link * constants.link, 0
    if cluster.nodes > 1:
        bandwidth = min(bandwidth, card.network * constants.network)
        hops = cluster.cards - 1
    moved = shape.parameters * volume * (cluster.cards - 1) / cluster.cards
    waiting = rings * shape.layers * hops * constants.hop * 1e-6
    return times * moved / bandwidth, times * waiting


STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
_CONTEXT = 4096
_MOST_ROWS = 65536  # tokens of a micro-batch; more make nothing faster
_MOST_CARDS = 65536
_MEASURED_CARDS = 512
_AS_FAST = 0.98
_DAY = 86_400


class TrainingPlan(RenderedPlan):
    """Whether a training fits on a cluster, how it is done there, and how long it takes.

    `run` is the fastest run that fits, the simplest among about equally fast ones; if none fits, it
    is the run that needs least. `memory` is the need of a card, part by part, and `free` its
    memory: a training fits if 3 % more than it needs is free. If it does not fit, `enough` is the
    smallest cluster of the same cards on which it would; it is `None` if more cards do not help,
    because a layer and the logits of a micro-batch have to fit on one card.

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
    """Plan the training of a model on a cluster: whether it fits, how, how fast, how many days.

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
    run, fits = _best(shape, cluster, start, ways)
    return TrainingPlan(
        fits,
        cluster,
        run,
        card_memory(shape, run, cluster),
        cluster.card.memory,
        shape,
        None if tokens is None else _tokens(tokens),
        step_time(shape, run, cluster) if fits and cluster.card.like else None,
        None if fits else _enough(shape, cluster, start, ways),
        _notes(shape, cluster),
    )


class _Ways(Record):
    """The choices of a plan."""

    strategies: tuple[Strategy, ...]
    recompute: tuple[Recompute, ...]
    micro_batch: int | None
    batch: int | None

    def runs(self, start: TrainingRun, cards: int) -> Iterator[TrainingRun]:
        """Yield the runs on this number of cards, the simplest first."""
        most = max(1, _MOST_ROWS // start.context)
        if self.batch is not None:
            most = min(most, max(1, self.batch // cards))
        sizes = [2**power for power in range(most.bit_length())]
        sizes = sizes if self.micro_batch is None else [self.micro_batch]
        strategies = self.strategies if cards > 1 else self.strategies[:1]
        for strategy, recompute, size in product(strategies, self.recompute, sizes):
            times = -(-self.batch // (cards * size)) if self.batch else 1
            way = {"strategy": strategy, "recompute": recompute}
            yield replace(start, **way, micro_batch=size, accumulate=times)


def _best(
    shape: ModelShape, cluster: Cluster, start: TrainingRun, ways: _Ways
) -> tuple[TrainingRun, bool]:
    """Return the fastest run that fits, else the one that needs least; and whether it fits."""

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
    return next(run for run, speed in zip(fitting, rates, strict=True) if speed >= enough), True


def _enough(shape: ModelShape, cluster: Cluster, start: TrainingRun, ways: _Ways) -> Cluster | None:
    """Return the smallest cluster of these cards that would do, by doubling, then bisection."""

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
    first = bisect_left(between, True, key=would_do)
    return cluster.of(between[first] if first < len(between) else count)


def _notes(shape: ModelShape, cluster: Cluster) -> tuple[str, ...]:
    card, notes = cluster.card, list(shape.assumed)
    if not card.like:
        notes.append(f"the speed of {card.name} is not known: no time is planned")
    elif not card.measured:
        like = card.like.upper()
        notes.append(f"no published run on {card.name} was compared with; it is planned as {like}")
    if cluster.cards > _MEASURED_CARDS:
        notes.append(f"published runs reach {_MEASURED_CARDS} cards; more were not compared with")
    return tuple(notes)


def _one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise ConfigurationError(
            f"{name} is one of {', '.join(known)}, not {shortened(repr(value))}", name
        )
    return value


_TOKENS = re.compile(r"\s*(\d+(?:[._]\d+)*|\d+(?:\.\d+)?e\d+)\s*([kmbt]?)\s*", re.IGNORECASE)
_MOST_TOKENS = 10**18


def _tokens(value: Any) -> int:
    """Return a number of tokens, also from words: a k is 1000 here.

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
