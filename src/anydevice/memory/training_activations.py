"""What one training step holds beside parameters and optimizer: what is saved, and its peaks.

The forward pass saves, layer by layer, what the backward pass needs; the backward pass frees it
again while gradients grow. The peak lies at one of a few moments, and which one it is depends on
the model: the loss, where all is saved and the logits are there three times; the backward pass of
the last or of the first layer; or the optimizer's step.
"""

from __future__ import annotations

from anydevice.core.record import Record
from anydevice.memory.shapes import ModelShape

FLOAT32 = 4


class Step(Record):
    """One training step: sequences, tokens of each, the bytes of a parameter and of a product.

    `mixed` keeps 32-bit parameters and casts them for each product, so casts of them are held.
    """

    batch: int
    tokens: int
    width: int
    mixed: bool = False
    checkpointing: bool = False

    @property
    def rows(self) -> int:
        """All tokens."""
        return self.batch * self.tokens

    @property
    def computed(self) -> int:
        """The bytes of an element in products."""
        return 2 if self.mixed else self.width


def logits_in_training(shape: ModelShape, step: Step) -> int:
    """The logits of all tokens at the loss: their logarithms, and two gradients, in 32 bits."""
    return 3 * FLOAT32 * step.rows * shape.vocabulary


def saved_activations(shape: ModelShape, step: Step) -> int:
    """All that the forward pass saves, without the logits."""
    each = step.rows * shape.hidden * step.width if step.checkpointing else _layer(shape, step)
    return shape.layers * each + _norm(shape, step)


def moments(shape: ModelShape, step: Step, gradients: int, step_extra: int) -> dict[str, int]:
    """The bytes alive beside parameters and optimizer, at each moment that can be the peak.

    `gradients` are the bytes of all of them, `step_extra` what the optimizer's step takes.
    """
    saved = saved_activations(shape, step)
    layer = _layer(shape, step)
    kept = saved - _norm(shape, step)
    casts = _casts(shape, step)
    layer_casts = _matrices(shape) * 2 if step.mixed else 0
    passing = max(_network_backward(shape, step), _attention_backward(shape, step))
    again = layer + layer_casts if step.checkpointing else 0
    head = shape.vocabulary * shape.hidden
    head_gradient = head * step.width
    # A gradient of a cast is there in both types for a moment.
    last_gradient = head * (step.width + (2 if step.mixed else 0))
    per_parameter = gradients // max(shape.parameters, 1)
    early = shape.embedding_parameters * (not shape.tied_embeddings) + shape.layer_weights[0]
    grown = gradients - early * per_parameter
    one_layer = again or layer + layer_casts
    # The casts of a block of autocast live to its end, even where nothing is saved for them.
    held_casts = 2 * (sum(shape.layer_weights) + head) if step.mixed else 0
    forward_logits = step.rows * shape.vocabulary * (2 * FLOAT32 + (2 if step.computed == 2 else 0))
    return {
        "forward": saved + held_casts + forward_logits,
        "loss": saved + casts + logits_in_training(shape, step),
        "head": saved + casts + step.rows * shape.vocabulary * FLOAT32 + last_gradient,
        "last layer": kept + again + (0 if again else casts) + head_gradient + passing,
        "first layer": one_layer + grown + passing,
        "step": gradients + step_extra,
    }


def _layer(shape: ModelShape, step: Step) -> int:
    """The bytes that one layer saves."""
    queries = shape.heads * shape.head_size
    keys = shape.kv_elements[0] // 2
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


def _norm(shape: ModelShape, step: Step) -> int:
    """What a norm saves: its input in 32 bits, the same at unit length, and the output."""
    elements = step.rows * shape.hidden
    if shape.build.layer_norm:
        return elements * (step.width + (0 if step.mixed else step.width))
    if step.mixed:
        return elements * 2 * FLOAT32
    return elements * (FLOAT32 + 2 * step.width)


def _network(shape: ModelShape) -> int:
    """The elements of a token that the feed-forward network saves."""
    if shape.experts:
        inner, outer = shape.experts.intermediate, shape.hidden
        return shape.experts.per_token * (4 * inner + 3 * outer) + 4 * shape.experts.shared
    if shape.build.gated:
        return 4 * shape.intermediate
    # As in inference, an activation is one operation or several, each with results to be saved.
    return (5 if shape.activation in ("gelu_new", "gelu_fast") else 2) * shape.intermediate


def _scores(shape: ModelShape, step: Step) -> int:
    """Attention's probabilities, where no fused kernel takes the heads; see inference."""
    grouped = shape.kv_elements[0] != 2 * shape.heads * shape.head_size
    if not (shape.build.eager or (grouped and (step.computed == FLOAT32 or shape.build.unfused))):
        return 0
    copies = 2 * step.rows * shape.heads * shape.head_size * FLOAT32
    return step.batch * shape.heads * step.tokens**2 * FLOAT32 + copies


def _network_backward(shape: ModelShape, step: Step) -> int:
    """Beside a layer's saved tensors: gradients inside the network, less what is freed already."""
    inner = shape.intermediate
    if shape.experts:
        inner = shape.experts.per_token * shape.experts.intermediate
    inside = (2 if shape.build.gated else 1) * step.rows * inner * step.computed
    weights = shape.intermediate * shape.hidden * (step.width + (2 if step.mixed else 0))
    return inside + weights + step.rows * shape.hidden * step.width


def _attention_backward(shape: ModelShape, step: Step) -> int:
    """Gradients of scores where they lie in memory; the network is done by then."""
    scores = _scores(shape, step)
    return max(0, 2 * scores - step.rows * _network(shape) * step.computed)


def _matrices(shape: ModelShape) -> int:
    """The parameters of a layer that are cast for products: all but its norms."""
    return max(shape.layer_weights) - shape.build.norms * shape.hidden


def _casts(shape: ModelShape, step: Step) -> int:
    """Casts of all matrices, which live until their layer's backward pass."""
    if not step.mixed:
        return 0
    head = shape.vocabulary * shape.hidden
    layers = 0 if step.checkpointing else sum(shape.layer_weights)
    return 2 * (layers + head)
