"""The memory that running a language model takes, part by part, before anything is loaded.

Weights and cache follow from the model's shape. Activations are counted at a few moments, points
of a layer at which many tensors are alive at once: their bytes follow from the way `transformers`
runs a layer on PyTorch's fused attention, and the peak is the largest.

The memory of a process outside of its tensors (context, workspaces, idle blocks) was measured on an
NVIDIA H200 with PyTorch 2.11 for CUDA 13.0; other devices take less, and the CPU takes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from anydevice._core import hooks
from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record, replace
from anydevice._core.text import format_size, no_pages
from anydevice._plan.families import (
    MIB,
    USUAL_DTYPE,
    Experts,
    LatentSizes,
    LayerStack,
    ModelShape,
    float_dtype,
    integer,
)
from anydevice._plan.model import shape_of

CONTEXT = 700 * MIB
"""Bytes of a CUDA context with the usual kernels: 695 to 699 MiB were measured for 12 models."""

WORKSPACE = 32 * MIB
"""Bytes that the library for matrix products keeps; PyTorch counts them among its allocations."""

MARGIN = 3
"""Percent of an estimate that a plan keeps free: `idle_bytes` may be too low by that much."""

USUAL_CONTEXT = 4096
"""Tokens by default."""
PARTS = ("weights", "kv_cache", "activations", "logits", "overhead")
FLOAT32 = 4
SCORES = "scores"
"""The moment at which all scores of an attention are in memory, without a fused kernel."""
_FORMULAS = {
    "gelu_new": 4,
    "gelu_accurate": 4,
    "gelu_python": 4,
    "gelu_python_tanh": 4,
    "gelu_fast": 5,
    "gelu_10": 3,
    "quick_gelu": 3,
    "relu2": 3,
}
"""Tensors alive at the peak of an activation function that `transformers` writes as a formula.

Any other, such as "gelu_pytorch_tanh", is one operation with its input and its output.
"""


class Overhead(Record):
    """The memory that a process takes beside a model's tensors, in bytes.

    `context` is the driver's, `workspace` the libraries'. `rounding` are the bytes that PyTorch's
    allocator adds by whole blocks, `idle` the free blocks at the peak that lie between blocks in
    use.

    >>> Overhead(context=3, idle=4).total
    7
    """

    context: int = 0
    workspace: int = 0
    rounding: int = 0
    idle: int = 0

    @property
    def total(self) -> int:
        return self.context + self.workspace + self.rounding + self.idle


def plannable(size: int) -> int:
    """Return the largest estimate with which a model runs in `size` bytes."""
    return size * 100 // (100 + MARGIN)


def idle_bytes(cache: int, activations: int) -> int:
    """Return the bytes that the allocator holds idle at the peak, while a prompt fills the cache.

    Each layer's cache is cut from a segment that earlier activations have left, and stays there, so
    the rest of the segment is too small for the next layer's largest tensors. Idle bytes grow with
    the cache, up to somewhat more than the activations. The rule was fitted to the allocator's own
    rules over twelve models at many lengths; with it, estimates are within -3 and +8 percent for
    nine in ten of them.

    >>> idle_bytes(0, 800), idle_bytes(400, 800), idle_bytes(10_000, 800)
    (200, 500, 1000)
    """
    return min((3 * cache + activations) // 4, 5 * activations // 4)


class MemoryParts(Record):
    """The bytes that one device needs for a range of layers, by part."""

    weights: int
    kv_cache: int
    activations: int
    logits: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.logits + self.overhead

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "total": self.total}


class MemoryEstimate(MemoryParts):
    """The bytes that one device must have free to run a model, by part; `total` is their sum.

    `total` is right within -3 and +8 percent for nine in ten models: the memory that PyTorch's
    allocator holds idle is not known to the byte before it runs. A plan keeps 3 % free for that.

    `weights` are all parameters and buffers, tied ones once, and `kv_cache` a static cache for
    `context` tokens of each of `batch` sequences; both are exact to the byte if `exact` is true.
    `activations` and `logits` are the sizes at the peak, while `prefill` tokens of a prompt are
    read (`None`: all of them) or one token is written. `overhead` is the memory of the process
    outside of its tensors on an accelerator, and `overheads` are its parts. `assumed` lists the
    assumptions. `shape` is the shape of the model.
    """

    dtype: str
    kv_dtype: str
    context: int
    batch: int
    parameters: int
    exact: bool = False
    assumed: tuple[str, ...] = ()
    shape: ModelShape | None = None
    overheads: Overhead = Overhead()
    prefill: int | None = None

    @property
    def total_gib(self) -> float:
        """All parts together, in GiB."""
        return self.total / 2**30

    def on_cpu(self) -> MemoryEstimate:
        """Return the estimate without the overhead of an accelerator."""
        return replace(self, overhead=0, overheads=Overhead())

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain values, as `anydevice plan --json` prints it."""
        plain = super().to_dict() | {"total_gib": self.total_gib}
        del plain["shape"]
        return plain

    def __str__(self) -> str:
        title = f"{self.context} tokens × {self.batch} in {self.dtype}, cache in {self.kv_dtype}"
        notes = [f"  note: {sentence}" for sentence in self.assumed]
        return "\n".join((title, *part_lines(self, (*PARTS, "total")), *notes))


class RenderedPlan(Record):
    """A plan that `_report` shows as text and in notebooks."""

    def __str__(self) -> str:
        return hooks.render(self, "text")

    def _repr_html_(self) -> str:
        return hooks.render(self, "html")

    def save_html(self, path: object) -> None:
        """Raise `ConfigurationError`: version 0.3 writes no pages."""
        raise no_pages("save_html")


def part_sizes(estimate: Record, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the size of each part of an estimate, as text."""
    return [(name.replace("_", "-"), format_size(getattr(estimate, name))) for name in names]


def part_lines(estimate: Record, names: Sequence[str], column: int = 12) -> list[str]:
    """Return a line for each part of an estimate; sizes begin behind `column`."""
    return [f"  {name:<{column}} {size:>10}" for name, size in part_sizes(estimate, names)]


def estimate_inference(
    model: Any = None,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: object = None,
    kv_dtype: object = None,
    prefill: int | None = None,
    weights: str = "stored",
    **numbers: Any,
) -> MemoryEstimate:
    """Return the memory that running a model takes on one device; nothing is loaded.

    `model` is the path of a `config.json`, of its folder or of safetensors files, the name of a
    model in the local Hugging Face cache, a config, a `torch.nn.Module` (on `meta`, too), a tree of
    arrays, a `ModelShape`, or `None`, with the dimensions as keywords: `layers hidden intermediate
    heads vocabulary`, and optionally `kv_heads head_size tied window experts experts_per_token
    expert_size architecture`.

    `context` tokens of each of `batch` sequences can be read and written (`None`: 4096, or as many
    as the model allows where that is less). An encoder–decoder reads as many and writes as many.
    A prompt is read `prefill` tokens at a time (`None`: all at once, as `transformers` does).
    The weights are in `dtype` (`None`: the model's own, else bfloat16), the cache in `kv_dtype`
    (`None`: the same; where weights are quantized, the dtype they are computed in); both are
    floats, and "fp8" is float8_e4m3fn. With "int8" or "int4" as `dtype`, the layers are quantized
    as the usual formats do, and no longer counted to the byte. `weights` are as for `llm.load`:
    "stored", unpacked ("float"), or quantized while loading ("q8_0", "q4_k", "q4_0", "fp8").

    >>> estimate = estimate_inference(
    ...     layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocabulary=32000,
    ...     context=4096, batch=4, dtype="float16",
    ... )
    >>> estimate.weights, estimate.kv_cache, estimate.exact
    (14483464704, 2147483648, True)
    >>> 19 < estimate.total_gib < 21
    True

    Raises `ConfigurationError` for a model that is not known or cannot be counted and for invalid
    dimensions, and `TransferError` for invalid safetensors files.
    """
    batch = integer("batch", batch)
    requested = None if context is None else integer("context", context)
    prefill = None if prefill is None else integer("prefill", prefill)
    shape = shape_of(model, dtype=dtype, weights=weights, **numbers)
    context = (
        shape.fixed_context
        or requested
        or min(USUAL_CONTEXT, shape.longest_context or USUAL_CONTEXT)
    )
    # Weights of fewer bits are widened where they are computed with.
    computed = shape.dtype if as_dtype(shape.dtype).itemsize > 1 else USUAL_DTYPE
    cache = float_dtype("kv_dtype", kv_dtype) if kv_dtype is not None else computed
    width = as_dtype(computed).itemsize
    logits = logit_bytes(shape, batch, context, width)
    activations = recurring = 0
    if shape.hidden and shape.layers:
        piece = min(context, prefill or context) if not shape.towers else context
        peaks = list(_passes(shape, batch, context, width, piece))
        # The head's input, and its intermediate results besides the logits.
        beside = 2 if shape.outputs_of == "new token" else 3
        last = beside * batch * piece * shape.hidden * width + logits
        activations = max(last, *[size for peak in peaks for size in peak.values()]) - logits
        # Scores are in segments of their own, much larger than other temporaries: an allocator that
        # takes the smallest sufficient block does not cut them.
        recurring = max([size for name, size in peaks[0].items() if name != SCORES])
        if shape.quantization is not None:
            activations += _unpacked_bytes(shape)
    kv_cache = sum(shape.kv_bytes(context, batch, cache))
    idle = idle_bytes(kv_cache, min(recurring, activations))
    overheads = Overhead(CONTEXT, WORKSPACE, shape.rounding, idle)
    assumed, longest = shape.assumed, shape.longest_context
    if longest is not None and context > longest:
        note = f"the context of {context} tokens is beyond the model's longest, {longest}"
        assumed = (*assumed, note)
    if requested not in (None, context):
        note = f"what it reads is always {context} tokens long: the context changes nothing"
        assumed = (*assumed, note)
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
        assumed=assumed,
        shape=shape,
        overheads=overheads,
        prefill=prefill,
    )


UNPACKED = 2**24
"""Elements of a quantized matrix that are unpacked at a time."""


def _unpacked_bytes(shape: ModelShape) -> int:
    """Return the bytes of unpacked rows: numbers and their product with scales, in float32."""
    largest = max(shape.vocabulary, 2 * shape.intermediate) * shape.hidden
    return min(UNPACKED, largest) * 2 * FLOAT32


class ForwardPass(Record):
    """`tokens` new tokens of `batch` sequences, a cache of `cached`, elements of `width` bytes."""

    batch: int
    tokens: int
    cached: int
    width: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


def logit_bytes(shape: ModelShape, batch: int, context: int, width: int) -> int:
    """Return the bytes of the outputs; those of a new token also in float32, for sampling."""
    if shape.outputs_of == "new token":
        return batch * shape.outputs * (width + FLOAT32)
    tokens = context if shape.outputs_of == "tokens" else 1
    return batch * tokens * shape.outputs * width


def _passes(
    shape: ModelShape, batch: int, context: int, width: int, piece: int
) -> Iterator[dict[str, int]]:
    """Yield the moments of each pass: a decoder reads and writes, every tower works by itself."""
    if not shape.towers:
        yield moments(shape, ForwardPass(batch, piece, context, width))
        yield moments(shape, ForwardPass(batch, 1, context, width))
    for tower in shape.towers:
        tokens = tower.tokens or context
        beside = 0
        if tower.source is not None:
            tokens = 1 if shape.outputs_of == "new token" else context
            read = batch * (shape.towers[tower.source].tokens or context)
            beside = read * (tower.hidden + 2 * tower.heads * tower.head_size) * width
        sizes = moments(tower, ForwardPass(batch, tokens, max(tokens, context), width))
        yield {name: size + beside for name, size in sizes.items()}


def moments(shape: LayerStack, work: ForwardPass) -> dict[str, int]:
    """Return the bytes alive at each moment of a layer, by name."""
    lasting = _lasting_bytes(shape, work)
    stream = _stream(shape, work)
    norm = _norm(shape, work, shape.hidden)
    sizes = {"norm": lasting + stream + norm, **_attention(shape, work, lasting + stream)}
    # Beside the lasting tensors: the residual, and the input of the network.
    beside = lasting + (1 if shape.build.post_norm else 2) * stream
    if shape.build.fused_qkv and shape.build.layer_norm and not shape.parallel:
        beside += stream  # GPT-2's layers keep the output of their attention till the end
    if shape.experts:
        sizes["experts"] = beside + _expert_network(shape, shape.experts, work)
    if not shape.experts or len(shape.experts.layers) < shape.layers:
        sizes["network"] = beside + work.rows * work.width * _network(shape)
    return sizes


def _stream(shape: LayerStack, work: ForwardPass) -> int:
    return work.rows * shape.hidden * work.width


def _lasting_bytes(shape: LayerStack, work: ForwardPass) -> int:
    """Return the bytes alive in all layers: embeddings, a layer's input, rotary tables, masks."""
    streams = (min(2, shape.layers) + shape.build.keeps_embeddings) * _stream(shape, work)
    rotary = 2 * work.tokens * int(shape.head_size * shape.build.rotary_share) * work.width
    if not shape.build.rotary:
        rotary = work.tokens * shape.hidden * work.width * shape.build.positions
    if shape.build.position_bias:
        streams += shape.heads * work.tokens * work.cached * work.width
    tables = len(set(shape.windows)) if shape.build.rotary_by_window else 1
    # Layers with the same window share one mask.
    masks = sum(_mask_bytes(shape, work, window) for window in set(shape.windows))
    return streams + tables * rotary + work.tokens * 8 + masks


def _mask_bytes(shape: LayerStack, work: ForwardPass, window: int | None) -> int:
    """Return the bytes of the mask for layers with this window; 0 if they need none."""
    if shape.build.bidirectional:
        return work.rows * work.cached * (work.batch > 1)
    attended, masked = _attended_tokens(window, work)
    if shape.build.eager:
        return work.rows * attended * work.width
    return work.tokens * attended if masked else 0


def _attended_tokens(window: int | None, work: ForwardPass) -> tuple[int, bool]:
    """Return how many tokens a layer attends to, and whether that takes a mask."""
    if work.tokens == 1:
        return (work.cached if window is None else min(window, work.cached)), True
    if window is None or window > work.cached:
        return work.tokens, False
    return max(work.tokens, window), True


def _attention(shape: LayerStack, work: ForwardPass, lasting: int) -> dict[str, int]:
    """Return the moments of attention: projections, rotation, norms, and the attention itself."""
    if shape.latent:
        return _latent_attention(shape, shape.latent, work, lasting)
    queries = work.rows * shape.heads * shape.head_size * work.width
    keys = work.rows * shape.key_elements * work.width
    projected = queries + 2 * keys
    sizes = {"projections": lasting + projected}
    if shape.build.rotary:
        share = shape.build.rotary_share
        rotated = max(3 * queries, queries + 3 * keys) * share
        # Rotated and plain elements are joined in a copy of the whole.
        whole = queries if share < 1 or shape.build.fused_qkv else 0
        sizes["rotation"] = lasting + projected + int(rotated) + whole
    if shape.build.bidirectional:
        sizes[SCORES] = lasting + projected + _pair_scores(shape, work)
        return sizes
    if shape.build.query_key_norms:
        together = shape.build.norms > 2 or shape.build.query_key_norms == "heads"
        before = projected if together else queries
        inner = _norm(shape, work, shape.heads * shape.head_size)
        sizes["norms of queries"] = lasting + before + inner
    for window in set(shape.windows):
        name = "attention" if window is None else f"attention in {window}"
        if shape.build.eager or _is_plain(shape, work, window):
            name = SCORES
        sizes[name] = lasting + _scores(shape, work, window, queries, keys)
    return sizes


def _latent_attention(
    shape: LayerStack, latent: LatentSizes, work: ForwardPass, lasting: int
) -> dict[str, int]:
    """Return the moments of latent attention (MLA), which rebuilds keys and values per head."""
    queries = work.rows * shape.heads * shape.head_size
    rotated = work.rows * shape.heads * latent.rotated
    compressed = work.rows * (2 * latent.rank + latent.rotated)
    made = work.batch * work.cached * shape.heads * (latent.plain + latent.value + shape.head_size)
    output = work.rows * shape.heads * latent.value
    mask = work.rows * work.cached if work.tokens == 1 else 0
    beside = 2 * queries + rotated + compressed
    return {
        "rotation": lasting + (queries + 4 * rotated + compressed) * work.width,
        "attention": lasting + (beside + made + 2 * output + mask) * work.width,
    }


def _pair_scores(shape: LayerStack, work: ForwardPass) -> int:
    """Return the bytes of bidirectional attention: its output, and tensors for pairs of tokens."""
    build, pairs = shape.build, work.rows * work.cached
    scores = shape.heads * pairs * work.width
    output = work.rows * shape.heads * shape.head_size * work.width
    if build.score_tensors:
        far = work.rows * shape.heads * shape.distances * work.width
        far += 2 * work.batch * shape.distances * shape.hidden * work.width
        integers = 8 * (pairs + 3 * work.tokens * work.cached) * (build.score_tensors > 3)
        copies = 7 if build.fused_qkv else 2
        return copies * output + build.score_tensors * scores + far + integers
    masked = work.batch > 1
    if build.position_bias:
        return output + (2 * scores if masked else scores // work.batch)
    return output + pairs * work.width * masked


def _scores(
    shape: LayerStack, work: ForwardPass, window: int | None, queries: int, keys: int
) -> int:
    """Return the bytes of queries, the output, and the kernel's copies of keys and values."""
    attended, masked = _attended_tokens(window, work)
    if shape.build.eager:
        attended = work.cached if window is None or work.tokens > 1 else min(window, work.cached)
    every_head = work.batch * shape.heads * attended
    copies = 2 * every_head * shape.head_size * work.width * shape.grouped
    if shape.build.eager:
        return queries + copies + every_head * work.tokens * (2 * work.width + FLOAT32)
    partial = 3 * (queries + keys) // 2 if shape.build.rotary_share < 1 else 0
    if _is_plain(shape, work, window):
        # No fused kernel takes these heads: scores and their softmax lie in memory, in 32 bits,
        # and a boolean for each score, by which rows without any are made zero.
        scores = every_head * work.tokens * (2 * FLOAT32 + 1)
        wide = (2 * queries + copies) * FLOAT32 // work.width
        return wide + scores + work.tokens * attended * FLOAT32
    if not masked:
        return 2 * queries + partial
    if shape.kv_heads == 1:
        copies = 0  # one head is enough, without a copy for each
    rolled = 2 * keys * attended if work.tokens == 1 and window else 0
    fresh = 2 * keys if work.tokens > 1 else 0
    mask = work.rows * attended * work.width
    return max(2 * queries + copies + mask + fresh + partial, rolled)


def _is_plain(shape: LayerStack, work: ForwardPass, window: int | None) -> bool:
    """Whether no fused kernel runs: it takes grouped heads only in 16 bits, or with a mask."""
    masked = _attended_tokens(window, work)[1]
    return shape.grouped and (shape.build.unfused or (work.width == FLOAT32 and not masked))


def _norm(shape: LayerStack, work: ForwardPass, size: int) -> int:
    """Return the bytes of a norm over `size` elements: twice in float32, if not one operation."""
    if shape.build.layer_norm:
        return work.rows * size * work.width
    return 2 * work.rows * size * FLOAT32


def _network(shape: LayerStack) -> int:
    """Return the elements of a token in the feed-forward network at its peak."""
    function = _FORMULAS.get(shape.activation, 2)
    if shape.build.fused_gate:
        # Its input is one half of a tensor that stays whole.
        return max(4, 1 + function) * shape.intermediate
    # The activation of the gate runs before the other half of the network.
    return max(3 if shape.build.gated else 2, function) * shape.intermediate


def _expert_network(shape: LayerStack, experts: Experts, work: ForwardPass) -> int:
    """Return the bytes of an expert network; each token is copied for each of its experts."""
    inner, outer, width = experts.intermediate, shape.hidden, work.width
    weighed = FLOAT32 if shape.build.wide_routing else width
    per_token = max((4 * inner + outer) * width, outer * 2 * (width + weighed))
    return work.rows * max(experts.per_token * per_token, 3 * experts.shared * width)
