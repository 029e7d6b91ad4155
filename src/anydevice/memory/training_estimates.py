"""How much memory training a language model takes, part by part, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydevice.core.dtypes import as_dtype
from anydevice.core.record import Record
from anydevice.core.sizes import format_size
from anydevice.errors import ConfigurationError
from anydevice.memory.models import shape_of
from anydevice.memory.overheads import CONTEXT, WORKSPACE
from anydevice.memory.shapes import whole
from anydevice.memory.training_activations import (
    FLOAT32,
    Step,
    logits_in_training,
    moments,
    saved_activations,
)

TRAINING_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "master",
    "activations",
    "logits",
    "overhead",
)

_BLOCK = 256  # elements that share a scale in 8-bit optimizers


class Optimizer(Record):
    """What an optimizer keeps for each parameter: how many values, and in how many bytes each.

    `temporary` says that its step has a copy of all parameters' size for a moment, as the
    libraries' default way of stepping many tensors at once has.
    """

    values: int
    eight_bit: bool = False
    temporary: bool = False

    def state_bytes(self, parameters: int, width: int) -> int:
        """The bytes of its state."""
        if self.eight_bit:
            return self.values * (parameters + parameters // _BLOCK * FLOAT32)
        return self.values * parameters * width


OPTIMIZERS = {
    "sgd": Optimizer(0),
    "sgd_momentum": Optimizer(1),
    "adam": Optimizer(2, temporary=True),
    "adamw": Optimizer(2, temporary=True),
    "adam8bit": Optimizer(2, eight_bit=True),
    "adamw8bit": Optimizer(2, eight_bit=True),
}


class TrainingEstimate(Record):
    """Bytes, part by part, of training a model on one device, and `total`, what must be free.

    Each part is what it comes to by itself: `parameters`, `gradients`, the `optimizer`'s state,
    `master` weights in 32 bits beside parameters of 16, all `activations` that are saved for the
    backward pass (with the casts of weights that mixed precision makes), the `logits` of all
    tokens with their gradients, and the process's `overhead`. `total` is the peak and not
    their sum: gradients grow while activations go, and some moments have copies of their own.
    `peak_at` names the moment at which it is reached. `exact` is about the parameters, `assumed`
    says what was not known.
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
        """What must be free, in GiB."""
        return self.total / 2**30

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain values."""
        plain = {**vars(self), "assumed": list(self.assumed)}
        return {**plain, "total_gib": self.total_gib}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        way = " with mixed precision" if self.mixed else ""
        yield f"training on {self.context} tokens × {self.batch} in {self.dtype}{way}"
        for name in TRAINING_PARTS:
            yield f"  {name:<12} {format_size(getattr(self, name)):>10}"
        yield f"  {'peak':<12} {format_size(self.total):>10} ({self.peak_at})"
        for sentence in self.assumed:
            yield f"  note: {sentence}"


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
    """The memory that one training step takes on one device; nothing is loaded.

    `model` and `numbers` are as in `estimate_inference`. Parameters and gradients are in `dtype`.
    With `mixed`, they are in float32 and products in bfloat16, as under PyTorch's autocast; with
    `master`, the optimizer keeps float32 copies of parameters of 16 bits, and its state in float32.
    `optimizer` is one of `sgd sgd_momentum adam adamw adam8bit adamw8bit`. With `checkpointing`,
    each layer saves its input only and is computed again in the backward pass.

    >>> estimate = estimate_training(
    ...     layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, vocabulary=32000,
    ...     context=2048, batch=4, mixed=True, checkpointing=True,
    ... )
    >>> estimate.optimizer == 2 * estimate.gradients, estimate.peak_at
    (True, 'step')
    >>> 20 < estimate.total_gib < 22
    True

    Raises `ConfigurationError` for what is no model, an optimizer that is not known, and ways of
    training that do not go together.
    """
    context, batch = whole("context", context), whole("batch", batch)
    if optimizer not in OPTIMIZERS:
        raise ConfigurationError(
            f"there is no optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}", "optimizer="
        )
    row = as_dtype(dtype)
    if row.kind != "float" or row.bits < 16:
        raise ConfigurationError(f"parameters cannot be trained in {row}", "dtype=")
    if mixed and row.name != "float32":
        raise ConfigurationError(
            f"mixed=True keeps parameters in float32, not {row}; leave dtype, or take master=True",
            "mixed=",
        )
    if master and row.bits != 16:
        raise ConfigurationError(f"master=True is for parameters of 16 bits, not {row}", "master=")
    shape = shape_of(model, dtype=row.name, **numbers)
    step = Step(batch, context, row.itemsize, mixed, checkpointing)
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
