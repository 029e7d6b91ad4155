"""What a decoder holds beside weights and cache while it runs, moment by moment.

Each moment is a point of a layer at which much is alive at once: what its tensors come to, in
bytes, follows from the way `transformers` runs a layer on PyTorch's fused attention. The peak is
the largest of them. Nothing here knows a vendor; what a kernel keeps to itself is in `overheads`.

How many tensors the functions between two matrices of a network hold at once.

Most are one operation: its input and its output. Some are formulas, written out operation by
operation in `transformers`, and hold what they have in hand as well. (GELU by "gelu_pytorch_tanh"
is one operation; by "gelu_new", the same formula, it is eight.)
"""

from __future__ import annotations

from anydevice.core.record import Record
from anydevice.planning.architectures import Experts, ModelShape

FLOAT32 = 4
SCORES = "scores"
"""The moment at which all scores of an attention lie in memory, where no fused kernel runs it."""


class Work(Record):
    """What is run at once: so many sequences, new tokens of each, tokens they can look back on.

    `width` is the bytes of an element. `cached` is the length of the cache.
    """

    batch: int
    tokens: int
    cached: int
    width: int

    @property
    def rows(self) -> int:
        """All new tokens."""
        return self.batch * self.tokens


def prefill_peak(shape: ModelShape, batch: int, context: int, width: int) -> int:
    """The bytes of activations at the peak of reading a prompt that fills the context."""
    return max(moments(shape, Work(batch, context, context, width)).values())


def recurring_peak(shape: ModelShape, batch: int, context: int, width: int) -> int:
    """The same without attention's scores.

    They lie in segments of their own, much larger than what else a layer makes: an allocator that
    takes the smallest block that will do leaves these whole.
    """
    found = moments(shape, Work(batch, context, context, width))
    return max(size for name, size in found.items() if name != SCORES)


def decode_peak(shape: ModelShape, batch: int, context: int, width: int) -> int:
    """The same for one more token of each sequence, with a full cache."""
    return max(moments(shape, Work(batch, 1, context, width)).values())


def logit_bytes(shape: ModelShape, batch: int, width: int) -> int:
    """The last token's logits, and their copy in 32 bits that sampling works on."""
    return batch * shape.vocabulary * (width + FLOAT32)


def moments(shape: ModelShape, work: Work) -> dict[str, int]:
    """The bytes that are alive at each of a layer's moments, by name."""
    held = _held(shape, work)
    stream = _stream(shape, work)
    norm = _norm(shape, work, shape.hidden)
    found = {"norm": held + stream + norm, **_attention(shape, work, held + stream)}
    # Beside what is held: the residual, and what the network reads.
    beside = held + 2 * stream
    if shape.build.fused_qkv and shape.build.layer_norm and not shape.parallel:
        beside += stream  # GPT-2's layers keep the output of their attention till the end
    if shape.experts:
        found["experts"] = beside + _expert_network(shape, shape.experts, work)
    if not shape.experts or len(shape.experts.layers) < shape.layers:
        found["network"] = beside + work.rows * work.width * _network(shape)
    return found


def _stream(shape: ModelShape, work: Work) -> int:
    return work.rows * shape.hidden * work.width


def _held(shape: ModelShape, work: Work) -> int:
    """What lives through all layers: the embeddings, the layer's input, rotary tables, masks."""
    streams = min(2, shape.layers) * _stream(shape, work)
    rotary = 2 * work.tokens * int(shape.head_size * shape.build.rotary_share) * work.width
    if shape.build.positions:
        rotary = work.tokens * shape.hidden * work.width
    tables = len(set(shape.windows)) if shape.build.rotary_by_window else 1
    return streams + tables * rotary + work.tokens * 8 + _masks(shape, work)


def _masks(shape: ModelShape, work: Work) -> int:
    """The masks of layers whose window is smaller than what they see, one for all such layers."""
    return sum(mask_bytes(shape, work, window) for window in set(shape.windows))


def mask_bytes(shape: ModelShape, work: Work, window: int | None) -> int:
    """The mask of the layers with this window; 0 where they need none."""
    seen, masked = seen_by(window, work)
    if shape.build.eager:
        return work.rows * seen * work.width
    return work.tokens * seen if masked else 0


def seen_by(window: int | None, work: Work) -> tuple[int, bool]:
    """How many tokens a layer looks at, and whether that takes a mask.

    Reading a prompt takes none, since the kernels know what causal means, unless older tokens are
    out of the window. A single token always has one: the cache may not be full.
    """
    if work.tokens == 1:
        return (work.cached if window is None else min(window, work.cached)), True
    if window is None or window > work.cached:
        return work.tokens, False
    return max(work.tokens, window), True


def _attention(shape: ModelShape, work: Work, held: int) -> dict[str, int]:
    """Projections with their rotation, norms of queries and keys, and the attention itself."""
    queries = work.rows * shape.heads * shape.head_size * work.width
    keys = work.rows * shape.kv_elements[0] // 2 * work.width
    projected = queries + 2 * keys
    found = {"projections": held + projected}
    if shape.build.rotary:
        share = shape.build.rotary_share
        rotated = max(3 * queries, queries + 3 * keys) * share
        # What is not rotated is put beside what is, in a copy of the whole.
        whole = queries if share < 1 or shape.build.fused_qkv else 0
        found["rotation"] = held + projected + int(rotated) + whole
    if shape.build.query_key_norms:
        together = shape.build.norms > 2 or shape.build.query_key_norms == "heads"
        before = projected if together else queries
        inner = _norm(shape, work, shape.heads * shape.head_size)
        found["norms of queries"] = held + before + inner
    for window in set(shape.windows):
        name = "attention" if window is None else f"attention in {window}"
        if shape.build.eager or _is_plain(shape, work, window):
            name = SCORES
        found[name] = held + _scores(shape, work, window, queries, keys)
    return found


def _scores(shape: ModelShape, work: Work, window: int | None, queries: int, keys: int) -> int:
    """Queries, the output, and what is copied for the kernel: keys and values of every head."""
    seen, masked = seen_by(window, work)
    grouped = shape.kv_elements[0] != 2 * shape.heads * shape.head_size
    if shape.build.eager:
        seen = work.cached if window is None or work.tokens > 1 else min(window, work.cached)
    every_head = work.batch * shape.heads * seen
    copies = 2 * every_head * shape.head_size * work.width * grouped
    if shape.build.eager:
        return queries + copies + every_head * work.tokens * (2 * work.width + FLOAT32)
    partial = 3 * (queries + keys) // 2 if shape.build.rotary_share < 1 else 0
    if _is_plain(shape, work, window):
        # No fused kernel takes these heads: scores and their softmax lie in memory, in 32 bits,
        # and a truth value for each score, by which rows without any are made zero.
        scores = every_head * work.tokens * (2 * FLOAT32 + 1)
        wide = (2 * queries + copies) * FLOAT32 // work.width
        return wide + scores + work.tokens * seen * FLOAT32
    if not masked:
        return 2 * queries + partial
    if shape.kv_heads == 1:
        copies = 0  # one head stands for all without a copy
    rolled = 2 * keys * seen if work.tokens == 1 and window else 0
    fresh = 2 * keys if work.tokens > 1 else 0
    mask = work.rows * seen * work.width
    return max(2 * queries + copies + mask + fresh + partial, rolled)


def _is_plain(shape: ModelShape, work: Work, window: int | None) -> bool:
    """Whether no fused kernel takes the heads: in groups they have to be of 16 bits, or masked."""
    grouped = shape.kv_elements[0] != 2 * shape.heads * shape.head_size
    masked = seen_by(window, work)[1]
    return grouped and (shape.build.unfused or (work.width == FLOAT32 and not masked))


def _norm(shape: ModelShape, work: Work, size: int) -> int:
    """A norm of `size` numbers a token: in 32 bits and twice, unless the library has it whole."""
    if shape.build.layer_norm:
        return work.rows * size * work.width
    return 2 * work.rows * size * FLOAT32


def _network(shape: ModelShape) -> int:
    """The elements that a token has in the feed-forward network at its peak."""
    function = tensors_of(shape.activation)
    if shape.build.fused_gate:
        # Its input is one half of a tensor that stays whole.
        return max(4, 1 + function) * shape.intermediate
    # The gate's function works before the other half of the network is there.
    return max(3 if shape.build.gated else 2, function) * shape.intermediate


def _expert_network(shape: ModelShape, experts: Experts, work: Work) -> int:
    """Each token goes to several experts, so there are as many copies of it."""
    inner, outer, width = experts.intermediate, shape.hidden, work.width
    weighed = FLOAT32 if shape.build.wide_routing else width
    each = max((4 * inner + outer) * width, outer * 2 * (width + weighed))
    return work.rows * max(experts.per_token * each, 3 * experts.shared * width)


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


def tensors_of(activation: str) -> int:
    """The tensors of its input's size that are alive at its peak, input and output included.

    >>> tensors_of("silu"), tensors_of("gelu_new")
    (2, 4)
    """
    return _FORMULAS.get(activation, 2)
