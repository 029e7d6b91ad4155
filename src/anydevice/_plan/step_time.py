"""The time of a training step on many cards: products, attention, memory traffic, communication.

A micro-batch takes the FLOPs of its products and of attention at the rates that are reached, and
the bytes that all other operations move through the card's memory. Beside it, weights are gathered
and gradients reduced, over the links of a node or the network between nodes, and a part of that is
hidden. Rates are shares of what the makers state: `FITTED` has them.
"""

from __future__ import annotations

from anydevice._core.record import Record
from anydevice._plan.card_memory import HALF, TrainingRun, saved_elements
from anydevice._plan.cards import Cluster
from anydevice._plan.families import ModelShape


class Constants(Record):
    """Fitted efficiencies, as fractions of the card's peak.

    `products` and `attention` are shares of the stated FLOPs, for products of many tokens and for
    attention, of which only the half that a token sees counts. `few_tokens` is the size of a
    micro-batch whose products reach half of that. `traffic` is the bytes that move, in one pass,
    for each element that a layer would save of a token; `loss_traffic` those for each logit;
    `update_traffic` those for each parameter that a card updates.

    `link` and `network` are shares of the stated bandwidths, within a node and between nodes; `hop`
    is how long one step of a ring between nodes waits, in microseconds. `overlap` is the share of
    communication that is hidden behind computing. `float8` is how much faster products in 8 bits
    are, `compiled` the share of the traffic that compiled layers have left.
    """

    a100_products: float
    h100_products: float
    a100_attention: float
    h100_attention: float
    few_tokens: float
    traffic: float
    loss_traffic: float
    update_traffic: float
    link: float
    network: float
    hop: float
    overlap: float
    float8: float
    compiled: float


FITTED = Constants(
    a100_products=0.889,
    h100_products=0.75,
    a100_attention=0.316,
    h100_attention=0.178,
    few_tokens=1210,
    traffic=8.28,
    loss_traffic=38.3,
    update_traffic=193,
    link=0.763,
    network=0.608,
    hop=5.04,
    overlap=0.803,
    float8=1.54,
    compiled=0.4,
)
"""Fitted to the 189 runs on 8 to 64 cards of llm-foundry's table by `bench/plan_training.py`.

They are those of layers that are not compiled, and of the attention kernels of 2023; `compiled` is
from torchtitan's two runs on 8 cards that differ in nothing else.
"""

ERROR, UNMEASURED_ERROR = 0.15, 0.4
"""How far a rate may be off: on a card that published runs are of, and on another one.

Of llm-foundry's runs on 128 to 512 cards, which were not fitted to, all are within the first.
"""


class StepTime(Record):
    """The seconds of a step of the optimizer, by what they are spent on.

    `communication` is all of it, `exposed` the part that nothing hides.
    """

    products: float
    attention: float
    traffic: float
    communication: float
    exposed: float
    update: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.products + self.attention + self.traffic + self.exposed + self.update


def step_time(
    shape: ModelShape, run: TrainingRun, cluster: Cluster, constants: Constants = FITTED
) -> StepTime:
    """Return the time of one step of the optimizer on a card of which the rates are known.

    The times of split products, sequences and pipelines are not known.

    >>> from anydevice._plan.cards import cluster_of
    >>> from anydevice._plan.model import shape_of
    >>> shape = shape_of(layers=32, hidden=4096, intermediate=11008, heads=32, vocabulary=32000)
    >>> one = step_time(shape, TrainingRun(context=2048, micro_batch=4), cluster_of("8xH100"))
    >>> two = step_time(shape, TrainingRun(context=2048, micro_batch=4), cluster_of("8xA100"))
    >>> 1.5 < two.total / one.total < 3.2
    True
    """
    card, times = cluster.card, run.accumulate
    h100 = card.like == "h100"
    share = constants.h100_products if h100 else constants.a100_products
    share *= run.rows / (run.rows + constants.few_tokens) * (constants.float8 if run.float8 else 1)
    seen = constants.h100_attention if h100 else constants.a100_attention
    products = times * _product_flops(shape, run) / (card.flops * share)
    attention = times * _attention_flops(shape, run) / (card.flops * seen)
    traffic = times * _traffic(shape, run, constants) / card.bandwidth
    computing = products + attention + traffic
    moving, waiting = _communication(shape, run, cluster, constants)
    longer, shorter = max(computing, moving), min(computing, moving)
    exposed = longer + (1 - constants.overlap) * shorter - computing + waiting
    held = shape.parameters if run.strategy == "replicate" else shape.parameters / cluster.cards
    update = held * constants.update_traffic / card.bandwidth
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
    """Two for each parameter and token: forward, twice backward, and what is computed again."""
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[run.recompute]
    layers = (3 + again) * active_parameters(shape)
    return 2.0 * run.rows * (layers + 3 * shape.outputs * shape.hidden)


def _attention_flops(shape: ModelShape, run: TrainingRun) -> float:
    """Return the FLOPs of the causal half; the backward pass computes the scores again."""
    again = 1 if run.recompute == "full" else 0
    width = 2.0 * shape.heads * shape.head_size
    seen = sum(min(window or run.context, run.context) for window in shape.windows)
    return run.rows * (3.5 + again) * width * seen


def _traffic(shape: ModelShape, run: TrainingRun, constants: Constants) -> float:
    again = 0 if run.recompute == "none" else 1
    moved = constants.traffic * (constants.compiled if run.compiled else 1)
    layers = shape.layers * saved_elements(shape, "none") * moved * (3 + again)
    return run.rows * (layers + shape.outputs * constants.loss_traffic)


def _communication(
    shape: ModelShape, run: TrainingRun, cluster: Cluster, constants: Constants
) -> tuple[float, float]:
    """The seconds of a step in which weights and gradients move, and in which rings wait."""
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
