"""How much memory running a language model takes, part by part, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydevice.core.dtypes import as_dtype
from anydevice.core.record import Record, as_dict, replace
from anydevice.core.text import format_size
from anydevice.planning.activations import decode_peak, logit_bytes, prefill_peak, recurring_peak
from anydevice.planning.architectures import ModelShape, float_type, whole
from anydevice.planning.decoder import USUAL_DTYPE
from anydevice.planning.model import shape_of
from anydevice.planning.overheads import Overhead, overhead_of

PARTS = ("weights", "kv_cache", "activations", "logits", "overhead")


class MemoryEstimate(Record):
    """Bytes, part by part, that one device must have free to run a model; `total` is their sum.

    `weights` are all parameters and buffers, tied ones once, and `kv_cache` a static cache for
    `context` tokens of each of `batch` sequences; both are right to the byte where `exact` is true.
    `activations` and `logits` are what lives beside them at the peak, which reading a prompt as
    long as the context or writing one token more reaches. `overhead` is what the process takes
    beside its tensors on an accelerator, and `overheads` are its parts: the driver's context, the
    libraries' workspace, and what PyTorch's allocator rounds up or holds idle. `assumed` says, in
    sentences, what was not known. `shape` is the model's shape that all this follows from.
    """

    weights: int
    kv_cache: int
    activations: int
    logits: int
    overhead: int
    dtype: str
    kv_dtype: str
    context: int
    batch: int
    parameters: int
    exact: bool = False
    assumed: tuple[str, ...] = ()
    shape: ModelShape | None = None
    overheads: Overhead = Overhead()

    @property
    def total(self) -> int:
        """All parts together: what must be free, within -3 and +8 percent for nine in ten models.

        What PyTorch's allocator holds idle is not known to the byte before it has run, so a model
        with hardly more room than this may still run out; a plan keeps 3 % for that.
        """
        return self.weights + self.kv_cache + self.activations + self.logits + self.overhead

    @property
    def total_gib(self) -> float:
        """All parts together, in GiB."""
        return self.total / 2**30

    def on_cpu(self) -> MemoryEstimate:
        """The same without what only an accelerator takes: the CPU has no such overhead."""
        return replace(self, overhead=0, overheads=Overhead())

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain values, as `anydevice plan --json` prints it."""
        plain = {name: value for name, value in vars(self).items() if name != "shape"}
        plain["assumed"] = list(self.assumed)
        plain["overheads"] = as_dict(self.overheads)
        return {**plain, "total": self.total, "total_gib": self.total_gib}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.context} tokens × {self.batch} in {self.dtype}, cache in {self.kv_dtype}"
        for name in (*PARTS, "total"):
            yield f"  {name.replace('_', ' '):<12} {format_size(getattr(self, name)):>10}"
        for sentence in self.assumed:
            yield f"  note: {sentence}"


def estimate_inference(
    model: Any = None,
    *,
    context: int,
    batch: int = 1,
    dtype: object = None,
    kv_dtype: object = None,
    **numbers: Any,
) -> MemoryEstimate:
    """The memory that running a language model takes on one device; nothing is loaded.

    `model` is the path of a `config.json`, of its folder or of safetensors files, the name of a
    model in the local Hugging Face cache, a config, a `torch.nn.Module` (on `meta`, too), a tree of
    arrays, a `ModelShape`, or nothing, with the shape's numbers instead: `layers hidden
    intermediate heads vocabulary`, and where they matter
    `kv_heads head_size tied window experts experts_per_token expert_size architecture`.

    `context` tokens of each of `batch` sequences can be read and written. The weights are in
    `dtype` (`None`: the model's own type, else bfloat16), the cache in `kv_dtype` (`None`: the
    same; where weights are quantized, the type they are computed in); both are floats. With
    "int8" or "int4" as `dtype`, the layers are quantized as the usual formats do, and no longer
    counted to the byte.

    >>> estimate = estimate_inference(
    ...     layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocabulary=32000,
    ...     context=4096, batch=4, dtype="float16",
    ... )
    >>> estimate.weights, estimate.kv_cache, estimate.exact
    (14483464704, 2147483648, True)
    >>> 19 < estimate.total_gib < 21
    True

    Raises `ConfigurationError` for what is no model and for numbers that cannot be, and
    `TransferError` for safetensors files that are not right.
    """
    context, batch = whole("context", context), whole("batch", batch)
    shape = shape_of(model, dtype=dtype, **numbers)
    # Weights of fewer bits are widened where they are computed with.
    computed = shape.dtype if as_dtype(shape.dtype).itemsize > 1 else USUAL_DTYPE
    cache = float_type("kv_dtype", kv_dtype) if kv_dtype is not None else computed
    width = as_dtype(computed).itemsize
    logits = logit_bytes(shape, batch, width)
    activations = recurring = 0
    if shape.hidden and shape.layers:
        recurring = recurring_peak(shape, batch, context, width)
        layers = max(
            prefill_peak(shape, batch, context, width), decode_peak(shape, batch, context, width)
        )
        last = 2 * batch * context * shape.hidden * width + logits
        activations = max(layers, last) - logits
    kv_cache = sum(shape.kv_bytes(context, batch, cache))
    overheads = overhead_of(shape.rounding, kv_cache, min(recurring, activations))
    return MemoryEstimate(
        weights=shape.weight_bytes,
        kv_cache=kv_cache,
        activations=activations,
        logits=logits,
        overhead=overheads.total,
        dtype=shape.dtype,
        kv_dtype=cache,
        context=context,
        batch=batch,
        parameters=shape.parameters,
        exact=shape.exact,
        assumed=(*shape.assumed, *_beyond(shape, context)),
        shape=shape,
        overheads=overheads,
    )


def _beyond(shape: ModelShape, context: int) -> Iterator[str]:
    longest = shape.longest_context
    if longest is not None and context > longest:
        yield f"the context of {context} tokens is beyond the model's longest, {longest}"
