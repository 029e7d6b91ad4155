"""The memory that training a language model takes, part by part, before anything is loaded.

The forward pass saves, layer by layer, what the backward pass needs; the backward pass frees it
again while gradients grow. The peak lies at one of a few moments, and which one it is depends on
the model: the loss, where all is saved and the logits are there three times; the backward pass of
the last or of the first layer; or the optimizer's step.
"""

from __future__ import annotations

from typing import Any

from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record
from anydevice._core.text import format_size
from anydevice._plan.estimates import CONTEXT, FLOAT32, WORKSPACE, part_lines
from anydevice._plan.families import ModelShape, integer
from anydevice._plan.model import shape_of
from anydevice.errors import ConfigurationError

_PARTS = ("parameters", "gradients", "optimizer", "master", "activations", "logits", "overhead")
_BLOCK = 256  # elements that share a scale in 8-bit optimizers


class OptimizerMemory(Record):
    """Numbers for each parameter, and whether a step makes a `temporary` copy of all parameters."""

    values: int
    eight_bit: bool = False
    temporary: bool = False

    def state_bytes(self, parameters: int, width: int) -> int:
        """Return the bytes of its state."""
        if self.eight_bit:
            return self.values * (parameters + parameters // _BLOCK * FLOAT32)
        return self.values * parameters * width


OPTIMIZERS = {
    "sgd": OptimizerMemory(0),
    "sgd_momentum": OptimizerMemory(1),
    "adam": OptimizerMemory(2, temporary=True),
    "adamw": OptimizerMemory(2, temporary=True),
    "adam8bit": OptimizerMemory(2, eight_bit=True),
    "adamw8bit": OptimizerMemory(2, eight_bit=True),
    "rmsprop": OptimizerMemory(1, temporary=True),
}


class TrainingEstimate(Record):
    """Bytes, part by part, of training a model on one device, and `total`, what must be free.

    Each part is what it comes to by itself: `parameters`, `gradients`, the `optimizer`'s state,
    `master` weights in 32 bits beside parameters of 16, all `activations` that are saved for the
    backward pass (with the casts of weights that mixed precision makes), the `logits` of all tokens
    with their gradients, and the process's `overhead`. `total` is the peak and not their sum:
    gradients grow while activations go, and some moments have copies of their own. `peak_at` names
    the moment at which it is reached. `exact` is about the parameters, `assumed` lists the
    assumptions.
    """

    parameters: int
    gradients: int
    optimizer: int
    master: int
    activations: int
    logits: int
    overhead: int
    total: int
    peak_at: str
    dtype: str
    context: int
    batch: int
    mixed: bool = False
    checkpointing: bool = False
    exact: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def total_gib(self) -> float:
        """The memory that must be free, in GiB."""
        return self.total / 2**30

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values."""
        return {**super().to_dict(), "total_gib": self.total_gib}

    def __str__(self) -> str:
        way = " with mixed precision" if self.mixed else ""
        title = f"training on {self.context} tokens × {self.batch} in {self.dtype}{way}"
        peak = f"  {'peak':<12} {format_size(self.total):>10} ({self.peak_at})"
        notes = [f"  note: {sentence}" for sentence in self.assumed]
        return "\n".join((title, *part_lines(self, _PARTS), peak, *notes))


def estimate_training(
    model: Any = None,
    *,
    context: int,
    batch: int = 1,
    dtype: object = "float32",
    mixed: bool = False,
    master: bool = False,
    optimizer: str = "adamw",
    checkpointing: bool = False,
    **numbers: Any,
) -> TrainingEstimate:
    """Return the memory that one training step takes on one device; nothing is loaded.

    `model` and `numbers` are as in `estimate_inference`. Parameters and gradients are in `dtype`.
    With `mixed`, they are in float32 and products in bfloat16, as under PyTorch's autocast; with
    `master`, the optimizer keeps float32 copies of parameters of 16 bits, and its state in float32.
    `optimizer` is one of `sgd sgd_momentum adam adamw adam8bit adamw8bit rmsprop`. With
    `checkpointing`, each layer saves its input only and is computed again in the backward pass.

    >>> estimate = estimate_training(
    ...     layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, vocabulary=32000,
    ...     context=2048, batch=4, mixed=True, checkpointing=True,
    ... )
    >>> estimate.optimizer == 2 * estimate.gradients, estimate.peak_at
    (True, 'step')
    >>> 20 < estimate.total_gib < 22
    True

    Raises `ConfigurationError` for an unknown model or optimizer, and for options that exclude each
    other.
    """
    context, batch = integer("context", context), integer("batch", batch)
    if optimizer not in OPTIMIZERS:
        raise ConfigurationError(
            f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}", "optimizer="
        )
    row = as_dtype(dtype)
    if row.kind != "float" or row.bits < 16:
        raise ConfigurationError(f"parameters cannot be trained in {row}", "dtype=")
    if mixed and row.name != "float32":
        raise ConfigurationError(
            f"mixed=True needs parameters in float32, not {row}; omit dtype, or use master=True",
            "mixed=",
        )
    if master and row.bits != 16:
        raise ConfigurationError(f"master=True is for parameters of 16 bits, not {row}", "master=")
    shape = shape_of(model, dtype=row.name, **numbers)
    if shape.towers:
        raise ConfigurationError(
            f"the memory of training is estimated for decoders, and {shape.architecture} is an "
            "encoder; find_batch_size finds the largest batch that fits by trying",
            "model",
        )
    step = TrainingStep(batch, context, row.itemsize, mixed, checkpointing)
    count = shape.parameters
    keeper = OPTIMIZERS[optimizer]
    masters = FLOAT32 * count if master else 0
    state = keeper.state_bytes(count, FLOAT32 if master else row.itemsize)
    gradients = count * row.itemsize
    extra = count * (FLOAT32 if master else row.itemsize) if keeper.temporary else 0
    # With masters, the step works on gradients in 32 bits.
    alive = moments(shape, step, gradients, extra + masters)
    peak_at = max(alive, key=lambda name: alive[name])
    overhead = CONTEXT + WORKSPACE
    return TrainingEstimate(
        parameters=shape.weight_bytes,
        gradients=gradients,
        optimizer=state,
        master=masters,
        activations=saved_activations(shape, step),
        logits=logits_in_training(shape, step),
        overhead=overhead,
        total=shape.weight_bytes + state + masters + alive[peak_at] + overhead,
        peak_at=peak_at,
        dtype=row.name,
        context=context,
        batch=batch,
        mixed=mixed,
        checkpointing=checkpointing,
        exact=shape.exact,
        assumed=shape.assumed,
    )


class TrainingStep(Record):
    """One training step; `width` are a parameter's bytes, `mixed` holds casts for products."""

    batch: int
    tokens: int
    width: int
    mixed: bool = False
    checkpointing: bool = False

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def computed(self) -> int:
        """The bytes of an element in products."""
        return 2 if self.mixed else self.width


def logits_in_training(shape: ModelShape, step: TrainingStep) -> int:
    """Return the bytes of logits at the loss: their logarithms and two gradients, in float32."""
    return 3 * FLOAT32 * step.rows * shape.outputs


def saved_activations(shape: ModelShape, step: TrainingStep) -> int:
    """Return the bytes that the forward pass saves, without the logits."""
    per_layer = step.rows * shape.hidden * step.width if step.checkpointing else _layer(shape, step)
    return shape.layers * per_layer + _norm(shape, step)


def moments(
    shape: ModelShape, step: TrainingStep, gradients: int, step_extra: int
) -> dict[str, int]:
    """Return the bytes beside parameters and optimizer, at each moment that can be the peak."""
    saved = saved_activations(shape, step)
    layer = _layer(shape, step)
    of_layers = saved - _norm(shape, step)
    head = shape.outputs * shape.hidden
    # Casts of matrices live until their layer's backward pass.
    cast_layers = 0 if step.checkpointing else sum(shape.layer_weights)
    casts = 2 * (cast_layers + head) if step.mixed else 0
    # All parameters of a layer but its norms are cast for products.
    matrices = max(shape.layer_weights) - shape.build.norms * shape.hidden
    layer_casts = matrices * 2 if step.mixed else 0
    # Gradients of scores where they lie in memory; the network is done by then.
    attention = 2 * _scores(shape, step) - step.rows * _network(shape) * step.computed
    passing = max(_network_backward(shape, step), attention)
    again = layer + layer_casts if step.checkpointing else 0
    head_gradient = head * step.width
    # A gradient of a cast is there in both types for a moment.
    last_gradient = head * (step.width + (2 if step.mixed else 0))
    per_parameter = gradients // max(shape.parameters, 1)
    early = shape.embedding_parameters * (not shape.tied_embeddings) + shape.layer_weights[0]
    grown = gradients - early * per_parameter
    one_layer = again or layer + layer_casts
    # The casts of a block of autocast live to its end, even where nothing is saved for them.
    held_casts = 2 * (sum(shape.layer_weights) + head) if step.mixed else 0
    forward_logits = step.rows * shape.outputs * (2 * FLOAT32 + (2 if step.computed == 2 else 0))
    return {
        "forward": saved + held_casts + forward_logits,
        "loss": saved + casts + logits_in_training(shape, step),
        "head": saved + casts + step.rows * shape.outputs * FLOAT32 + last_gradient,
        "last layer": of_layers + again + (0 if again else casts) + head_gradient + passing,
        "first layer": one_layer + grown + passing,
        "step": gradients + step_extra,
    }


def _layer(shape: ModelShape, step: TrainingStep) -> int:
    """Return the bytes that one layer saves."""
    queries = shape.heads * shape.head_size
    keys = shape.key_elements
    products = step.computed
    build = shape.build
    norms = (1 if shape.parallel and build.norms == 1 else 2) * _norm(shape, step)
    elements = 2 * queries + 2 * keys + _network(shape)
    inside = step.rows * products * elements
    if step.mixed:
        # Each product has a cast of its input to itself: queries, keys, values, gate and up.
        copies = (1 if build.fused_qkv else 3) + (2 if build.gated and not build.fused_gate else 1)
        inside += step.rows * shape.hidden * products * copies
    if build.query_key_norms:
        wide = FLOAT32 if step.computed < FLOAT32 else 0
        inside += step.rows * (queries + keys) * (wide + products * (1 if wide else 2))
    return norms + inside + step.batch * step.tokens * shape.heads * FLOAT32 + _scores(shape, step)


def _norm(shape: ModelShape, step: TrainingStep) -> int:
    """Return the bytes that a norm saves: its input in 32 bits, normalized, and the output."""
    elements = step.rows * shape.hidden
    if shape.build.layer_norm:
        return elements * (step.width + (0 if step.mixed else step.width))
    if step.mixed:
        return elements * 2 * FLOAT32
    return elements * (FLOAT32 + 2 * step.width)


def _network(shape: ModelShape) -> int:
    """Return the elements of a token that the feed-forward network saves."""
    if shape.experts:
        inner, outer = shape.experts.intermediate, shape.hidden
        return shape.experts.per_token * (4 * inner + 3 * outer) + 4 * shape.experts.shared
    if shape.build.gated:
        return 4 * shape.intermediate
    # As in inference, an activation is one operation or several, each with results to be saved.
    return (5 if shape.activation in ("gelu_new", "gelu_fast") else 2) * shape.intermediate


def _scores(shape: ModelShape, step: TrainingStep) -> int:
    """Return the bytes of attention's probabilities if no fused kernel takes the heads."""
    grouped = shape.grouped
    if not (shape.build.eager or (grouped and (step.computed == FLOAT32 or shape.build.unfused))):
        return 0
    copies = 2 * step.rows * shape.heads * shape.head_size * FLOAT32
    return step.batch * shape.heads * step.tokens**2 * FLOAT32 + copies


def _network_backward(shape: ModelShape, step: TrainingStep) -> int:
    """Return the bytes of gradients inside the network, beside a layer's saved tensors."""
    inner = shape.intermediate
    if shape.experts:
        inner = shape.experts.per_token * shape.experts.intermediate
    inside = (2 if shape.build.gated else 1) * step.rows * inner * step.computed
    weights = shape.intermediate * shape.hidden * (step.width + (2 if step.mixed else 0))
    return inside + weights + step.rows * shape.hidden * step.width
