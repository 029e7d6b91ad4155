"""The memory of one card in a training on many cards.

Weights, gradients and the optimizer's state are in 32 bits, products in 16. The strategy decides
which part of them a card holds; activations follow from its micro-batch; buffers of communication
hold the gathered weights of a layer and the gradients to reduce.
"""

from __future__ import annotations

from typing import Literal

from anydevice._core.record import Record
from anydevice._plan.cards import Cluster
from anydevice._plan.estimates import CONTEXT, FLOAT32, WORKSPACE
from anydevice._plan.families import ModelShape
from anydevice._plan.training import OPTIMIZERS

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
    """The bytes that a card needs, part by part.

    `overhead` is what a process takes beside its tensors: the driver's context, workspaces, the
    communicators, and what the allocator holds idle.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    overhead: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, name) for name in self._fields)

    @property
    def allocated(self) -> int:
        """The bytes that PyTorch's allocator reserves at the peak, if it has room."""
        return int((1 + IDLE) * (self.total - self.overhead)) + WORKSPACE


def card_memory(shape: ModelShape, run: TrainingRun, cluster: Cluster) -> CardMemory:
    """Return the memory that a card needs at the peak of a training step.

    >>> from anydevice._plan.cards import cluster_of
    >>> from anydevice._plan.model import shape_of
    >>> shape = shape_of(layers=32, hidden=4096, intermediate=11008, heads=32, vocabulary=32000)
    >>> sixteen, eight = cluster_of("16xH100"), cluster_of("8xH100")
    >>> run = TrainingRun(context=4096)
    >>> halved = card_memory(shape, run, sixteen).weights / card_memory(shape, run, eight).weights
    >>> halved
    0.5
    """
    held = _stage(shape, run)
    ways = max(1, cluster.cards // (run.tensor * run.pipeline))
    apart = held if run.strategy == "replicate" else -(-held // ways)
    state = OPTIMIZERS[run.optimizer].state_bytes(apart, FLOAT32)
    tensors = {
        "weights": FLOAT32 * apart,
        "gradients": FLOAT32 * apart,
        "optimizer": state,
        "activations": _activations(shape, run),
        "communication": _communication(shape, run, cluster.cards > 1),
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


def _communication(shape: ModelShape, run: TrainingRun, several: bool) -> int:
    """Return the bytes of gathered weights in 16 bits, their buffer, and gradients to reduce.

    Embedding and head are gathered as one, before the first layer, and layers one ahead. A
    pipeline keeps its stage gathered, and its gradients whole until the last micro-batch.
    """
    held = _stage(shape, run)
    if run.strategy == "replicate":
        return (HALF + run.reduced * several) * held  # casts, and the buckets of gradients
    if run.pipeline > 1:
        return (HALF + run.reduced) * held
    outside = shape.embedding_parameters + shape.head_parameters + shape.other_parameters
    part = (outside + max(shape.layer_weights)) // run.tensor
    if run.strategy == "shard_gradients":
        return HALF * held + (HALF + run.reduced) * part
    return (2 * HALF + run.reduced) * part


def _activations(shape: ModelShape, run: TrainingRun) -> int:
    """Return the bytes saved for the backward pass, and the largest temporary ones beside them.

    A stage of a pipeline holds as many micro-batches as there are stages from it to the last one,
    which has the loss.
    """
    elements = saved_elements(shape, run.recompute, run.compiled)
    sums = FLOAT32 * shape.heads if run.recompute != "full" else 0
    layer_bytes = run.rows * (HALF * elements + sums) // run.tensor
    kept = -(-shape.layers // run.pipeline) * layer_bytes
    working, loss = _working(shape, run), _loss(shape, run)
    first = run.pipeline * kept + working
    return max(first, kept + max(working, loss))


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
    each = FUSED_LOSS if run.fused_loss else SPLIT_LOSS if run.tensor > 1 else PLAIN_LOSS
    gathered = HALF * shape.hidden if run.tensor > 1 else 0
    return run.rows * (each * shape.outputs // run.tensor + gathered)
