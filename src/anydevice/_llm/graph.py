"""Quantized decoders on a CPU as graphs of onnxruntime, with weights as they are stored.

A graph has some layers, or the final norm and the head. The weights of a graph are read just before
its session takes them, so that they are in memory twice for one graph at a time.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice._arrays.memory.allocator import trim_heap
from anydevice._arrays.stage import usable_cores
from anydevice._core.device import Device
from anydevice._core.record import replace
from anydevice._core.rope_scaling import depends_on_length, frequencies, kind_of, original_length
from anydevice._formats.gguf import GgufTensor
from anydevice._formats.load import (
    Advance,
    Joined,
    OpenFiles,
    Packed,
    Stored,
    load_joined,
    loading_progress,
    place,
    stored_parts,
)
from anydevice._formats.quantized import dequantize
from anydevice._libraries.onnxruntime.graph import OWN, GraphMatrix, GraphWriter
from anydevice._libraries.onnxruntime.session import Session, join_pages, large_pages
from anydevice._llm import decoder
from anydevice._llm.description import Description, LayerDescription, Rope
from anydevice._llm.generate import Executor, State, select_token
from anydevice._llm.sampling import Filters, log_probability
from anydevice._llm.weights import TreePath, tree_of
from anydevice._machine.engines import registry
from anydevice._machine.settings import config as settings
from anydevice._ops.dispatch import explain
from anydevice.errors import UnsupportedError, VerificationError

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

SECTION = 2**25, 2**27
"""Bytes of stored weights of a graph: at most 1/12 of all within these limits, or one layer."""
SLACK = 128
"""Slots of a cache beyond its window: onnxruntime moves keys only when they are full."""
PIECE = 128
"""Tokens of a prompt that graphs run on at a time: more are hardly faster, and take memory."""
MOST_KEPT = 64
"""Rows up to which the arrays for logits are kept from one step to the next."""


def refusal(description: Description) -> str | None:
    """Return why a decoder cannot be written as a graph, or None."""
    if description.latent is not None:
        return "latent attention"
    if description.value_size != description.head_size:
        return "values of another size than keys"
    for kind in description.layers:
        if kind.experts is not None:
            return "experts"
        if kind.position_scale is not None:
            return "queries that are scaled by their position"
        if kind.rope is not None and (description.head_size % 16 or kind.rope.size % 16):
            return f"rope of {kind.rope.size} of {description.head_size} elements of a head"
        if kind.rope is not None and kind_of(dict(kind.rope.scaling)) == "dynamic":
            return "rope that changes with each token"
    return f"heads of {description.head_size} elements" if description.head_size % 8 else None


class DecoderGraph:
    """Writes some layers of a decoder, or its head, into a graph."""

    def __init__(self, description: Description, weights: StoredWeights) -> None:
        self.description, self.graph = description, GraphWriter()
        self.matrices, self.arrays = weights.matrices, weights.array
        self._ropes = ropes_of(description)

    def layers(self, numbers: Sequence[int]) -> GraphWriter:
        """Return the graph of layers: x, lengths, total and caches in; y, and the caches, out."""
        graph, hidden = self.graph, self.description.hidden
        x, added = graph.input("x", ["rows", "tokens", hidden]), None
        graph.input("lengths", ["rows"], "int32")
        graph.input("total", [1], "int32")
        for number in numbers:
            x, added = self._layer(number, x, added)
        x = x if added is None else graph.node("Add", x, added)
        graph.output("y", ["rows", "tokens", hidden], x)
        return graph

    def head(self) -> GraphWriter:
        """Return the graph from hidden states x (rows, tokens, hidden) to y, their logits."""
        graph, description = self.graph, self.description
        x = graph.input("x", ["rows", "tokens", description.hidden])
        y = self._normalize(x, ("norm",))
        path = ("embedding",) if description.tied else ("head", "weight")
        bias = None if "head" not in description.biases else self.arrays(("head", "bias"))
        y = graph.product(y, self.matrices(path), bias)
        graph.output("y", ["rows", "tokens", description.vocabulary], y)
        return graph

    def _layer(self, number: int, x: str, added: str | None) -> tuple[str, str | None]:
        """Add a layer to x + added; return the same sum after it."""
        kind, block = self.description.layers[number], self.description.block
        path = ("layers", number)
        if block == "post":
            x = x if added is None else self.graph.node("Add", x, added)
            y = self._attend(number, kind, x)
            y = self._scale(self._normalize(y, (*path, "attention_post_norm")))
            x = self.graph.node("Add", x, y)
            y = self._normalize(self._transform(number, x), (*path, "mlp_post_norm"))
            return x, self._scale(y)
        y, x = self._add_and_normalize(x, added, (*path, "attention_norm"))
        added = self._attend(number, kind, y)
        if block == "parallel":
            return x, self._scale(self.graph.node("Add", added, self._transform(number, y)))
        if block == "sandwich":
            added = self._normalize(added, (*path, "attention_post_norm"))
        y, x = self._add_and_normalize(x, self._scale(added), (*path, "mlp_norm"))
        added = self._transform(number, y)
        if block == "sandwich":
            added = self._normalize(added, (*path, "mlp_post_norm"))
        return x, self._scale(added)

    def _scale(self, x: str) -> str:
        factor = self.description.residual_scale
        return x if factor == 1 else self.graph.node("Mul", x, self._number(factor))

    def _number(self, number: float) -> str:
        return self.graph.constant(np.array([number], np.float32))

    def _norm_weight(self, path: Any) -> HostArray:
        weight = self.arrays((*path, "weight"))
        return weight + np.float32(1) if self.description.norm == "rms1" else weight

    def _normalize(self, x: str, path: Any) -> str:
        weight, eps = self.graph.constant(self._norm_weight(path)), self.description.eps
        if self.description.norm == "layer":
            biased = "norm" in self.description.biases
            bias = [self.graph.constant(self.arrays((*path, "bias")))] if biased else []
            return self.graph.node("LayerNormalization", x, weight, *bias, axis=-1, epsilon=eps)
        return self.graph.node("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=eps)

    def _add_and_normalize(self, x: str, added: str | None, path: Any) -> tuple[str, str]:
        """Return the normalized sum, and the sum."""
        if added is None:
            return self._normalize(x, path), x
        if self.description.norm == "layer":
            x = self.graph.node("Add", x, added)
            return self._normalize(x, path), x
        weight = self.graph.constant(self._norm_weight(path))
        name = ".".join(map(str, path))
        names = [f"{name}_y", "", "", f"{name}_sum"]
        outputs = self.graph.node(
            "SkipSimplifiedLayerNormalization", x, added, weight, domain=OWN, outputs=names,
            epsilon=self.description.eps,
        )  # fmt: skip
        return outputs[0], outputs[3]

    def _product(self, x: str, path: Any, part: str) -> str:
        biased = part in self.description.biases
        bias = self.arrays((*path, "bias")) if biased else None
        return self.graph.product(x, self.matrices((*path, "weight")), bias)

    def _attend(self, number: int, kind: LayerDescription, x: str) -> str:
        description, graph, path = self.description, self.graph, ("layers", number)
        size, heads, kv_heads = description.head_size, description.heads, description.kv_heads
        qkv = [self._product(x, (*path, "qkv"), "qkv"), "", ""]
        if description.query_key_norm:
            sizes = graph.constant(np.array([heads, kv_heads, kv_heads], np.int64) * size)
            qkv = graph.node("Split", qkv[0], sizes, outputs=3, axis=-1)
            for place, norm in enumerate(("query_norm", "key_norm")):
                qkv[place] = self._normalize_heads(qkv[place], (*path, norm))
        caches = []
        shape: list[int | str] = ["rows", kv_heads, f"slots{kind.window}", size]
        for name in (f"keys{number}", f"values{number}"):
            caches.append(graph.input(name, shape))
            graph.output(f"{name}_after", shape)
        rope = [] if kind.rope is None else rope_names(self._ropes[kind.rope])
        for name in rope:
            graph.input(name, ["context", "pairs" + name[-1]])
        sinks = ["", "", graph.constant(self.arrays((*path, "sinks")))] if description.sinks else []
        options: dict[str, Any] = {}
        if kind.window is not None:
            options |= {"local_window_size": kind.window, "sliding_window_cache": 1}
        if description.soft_cap is not None:
            options["softcap"] = description.soft_cap
        y = graph.node(
            "GroupQueryAttention", *qkv, *caches, "lengths", "total", *(rope or ["", ""]), *sinks,
            domain=OWN,
            outputs=[f"attended{number}", f"keys{number}_after", f"values{number}_after"],
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=description.scale,
            do_rotary=int(bool(rope)),
            rotary_interleaved=int(kind.rope is not None and kind.rope.interleaved),
            **options,
        )[0]  # fmt: skip
        return self._product(y, (*path, "output"), "output")

    def _normalize_heads(self, x: str, path: Any) -> str:
        if self.description.query_key_norm == "row":
            return self._normalize(x, path)
        apart = self.graph.constant(np.array([0, 0, -1, self.description.head_size], np.int64))
        joined = self.graph.constant(np.array([0, 0, -1], np.int64))
        y = self._normalize(self.graph.node("Reshape", x, apart), path)
        return self.graph.node("Reshape", y, joined)

    def _transform(self, number: int, x: str) -> str:
        graph, path = self.graph, ("layers", number)
        gated = self.description.gated
        y = self._product(x, (*path, "gate_up" if gated else "up"), "mlp")
        if gated:
            gate, up = graph.node("Split", y, outputs=2, axis=-1, num_outputs=2)
            y = graph.node("Mul", self._activate(gate), up)
        else:
            y = self._activate(y)
        return self._product(y, (*path, "down"), "mlp")

    def _activate(self, x: str) -> str:
        graph, name = self.graph, self.description.activation
        if name == "silu":
            return graph.node("QuickGelu", x, domain=OWN, alpha=1.0)
        if name.startswith("gelu"):
            return graph.node("Gelu", x, approximate="tanh" if name == "gelu_tanh" else "none")
        y = graph.node("Relu", x)
        return y if name == "relu" else graph.node("Mul", y, y)


def ropes_of(description: Description) -> dict[Rope, int]:
    """Return the ropes of a decoder with their numbers."""
    ropes = dict.fromkeys(kind.rope for kind in description.layers if kind.rope is not None)
    return {rope: number for number, rope in enumerate(ropes)}


def rope_names(number: int) -> list[str]:
    """Return the names of a rope's tables."""
    return [f"cos{number}", f"sin{number}"]


class StoredWeights:
    """The parameters of a decoder in their files, read when a graph needs them."""

    def __init__(self, plan: Mapping[TreePath, Stored], device: Device, advance: Advance) -> None:
        self.plan = plan
        self._device, self._advance, self._files = device, advance, OpenFiles()
        self._engine = registry.load("numpy")
        weakref.finalize(self, self._files.__exit__, OSError)  # closes them, without checks

    def array(self, path: TreePath) -> HostArray:
        """Return an array of floats; raise `VerificationError` if one is not finite."""
        stored = self.plan[path]
        assert isinstance(stored, Joined)
        return self._floats(path, stored)

    def _floats(self, path: TreePath, stored: Joined) -> HostArray:
        array = place(stored, self._files, self._engine, self._device, self._advance)
        if not np.isfinite(array).all():
            name = ".".join(map(str, path))
            raise VerificationError(
                f"the weight {name} has numbers that are NaN or infinite: the files of the model "
                "are damaged; download them again",
                where=name,
            )
        return np.asarray(array, np.float32)

    def matrices(self, path: TreePath) -> list[GraphMatrix]:
        """Return the parts of a matrix, to be read later."""
        return [self._matrix(path, part) for part in stored_parts(self.plan[path])]

    def _matrix(self, path: TreePath, stored: Joined | Packed) -> GraphMatrix:
        rows, columns = stored.shape
        if isinstance(stored, Joined):
            read: Any = lambda write: write(slice(None), self._floats(path, stored))  # noqa: E731
            return GraphMatrix(rows, columns, None, read)
        whole = in_whole_bytes(stored)
        read = partial(whole.read_rows, self._files, advance=self._advance)
        return GraphMatrix(rows, columns, whole.row(self._files), read)

    def rows(self, path: TreePath, numbers: HostArray) -> HostArray:
        """Return rows of a matrix in float32, which are read from their file."""
        stored, columns = self.plan[path], self.plan[path].shape[1]  # type: ignore[union-attr]
        tensor = stored.parts[0].tensor  # type: ignore[union-attr]
        unique, places = np.unique(numbers, return_inverse=True)
        file, starts = self._files.of(tensor), (unique.astype(np.int64) * columns).tolist()
        file.confirm_unchanged()
        if isinstance(stored, Packed) and stored.quantizer is None:
            rows = dequantize(tensor.blocks(file, starts, (len(starts), columns)))
        elif isinstance(stored, Packed):
            rows = np.concatenate([dequantize(stored.row(self._files, n)) for n in unique])
        else:
            rows = np.empty((len(starts), columns), np.float32)
            for row, start in zip(rows, starts, strict=True):
                tensor.read(file, row, start)
        return rows[places].reshape(*numbers.shape, columns)


def in_whole_bytes(stored: Packed) -> Packed:
    """Return a weight that unpacks codes of 5 and 6 bits into bytes."""
    parts = [
        replace(part, tensor=replace(part.tensor, bytewise=True))
        if isinstance(part.tensor, GgufTensor) else part
        for part in stored.parts
    ]  # fmt: skip
    return replace(stored, parts=tuple(parts))


def graph_executor(
    description: Description, plan: Mapping[TreePath, Stored], device: Device, context: int,
    progress: bool | None,
) -> GraphExecutor:  # fmt: skip
    """Return an executor; raise `UnsupportedError` if a graph cannot express the decoder."""
    reason = refusal(description)
    if reason is not None:
        raise UnsupportedError(f"graphs of onnxruntime have no {reason}")
    device = device.served_by("numpy", device.chosen_by, picked=True)
    threads = settings.current()[0].threads or usable_cores()
    with loading_progress(plan, progress) as advance:
        weights = StoredWeights(plan, device, advance)
        return GraphExecutor(description, weights, device, context, threads)


class GraphExecutor(Executor):
    """Runs the steps of a decoder on a CPU by onnxruntime."""

    name = "onnxruntime"

    def __init__(
        self,
        description: Description,
        weights: StoredWeights,
        device: Device,
        context: int,
        threads: int,
    ) -> None:
        super().__init__(description, device)
        self.context, self.like = context, np.zeros(1, np.float32)
        self._weights, self._ropes = weights, ropes_of(description)
        self._by_length = any(depends_on_length(dict(rope.scaling)) for rope in self._ropes)
        self._tables = dict[tuple[Rope, bool], tuple[Any, ...]]()
        self._bound_heads = dict[int, Any]()

        def session(graph: GraphWriter) -> Session:
            made = Session(graph, threads, alone=False)
            made.release(graph)
            return made

        trim_heap()  # of what reading the header and the tokenizer took
        before = large_pages()
        # The head is often the largest, so that it is in memory twice while nothing else is.
        self._head = session(DecoderGraph(description, weights).head())
        self.sections = [
            (numbers, session(DecoderGraph(description, weights).layers(numbers)))
            for numbers in self._ranges()
        ]
        join_pages(before)

    def _ranges(self) -> list[range]:
        """Return the layers of each graph."""
        sizes = Counter[int]()
        for path, stored in self._weights.plan.items():
            if path[0] == "layers":
                sizes[int(path[1])] += sum(part.nbytes for part in stored_parts(stored))
        least, most = SECTION
        limit = min(max(least, sizes.total() // 12), most)
        starts, size, count = [0], 0, len(self.description.layers)
        for number in range(count):
            if size and size + sizes[number] > limit:
                starts.append(number)
                size = 0
            size += sizes[number]
        return [range(*pair) for pair in pairwise([*starts, count])]

    @cached_property
    def parameters(self) -> Any:  # type: ignore[override]
        """The tree of weights, which is loaded beside those of the sessions."""
        return tree_of(load_joined(self._weights.plan, self.device))

    def new_cache(self, rows: int, slots: int) -> GraphCache:
        try:
            return GraphCache(self, rows, slots)
        except MemoryError as error:
            explain(error, like=self.like)
            raise

    def forward(
        self, ids: Any, start: Any, count: Any, cache: GraphCache, first: bool = False,
        length: Any = None, last: bool = False,
    ) -> HostArray:  # fmt: skip
        """Run all layers on a chunk: row by row, unless each row has one token."""
        x = self._weights.rows(("embedding",), ids)
        if self.description.embedding_scale != 1:
            x *= np.float32(self.description.embedding_scale)
        ends = start + count
        if x.shape[1] == 1 and count.all() and not (self._by_length and len(x) > 1):
            return cache.run(slice(len(x)), x, ends, ends[0])
        for row in np.flatnonzero(count).tolist():
            own, whole = slice(row, row + 1), ends[row] if length is None else length[row]
            for begin in range(0, count[row], PIECE):
                tokens = slice(begin, min(count[row], begin + PIECE))
                x[own, tokens] = cache.run(own, x[own, tokens], start[own] + tokens.stop, whole)
        return x

    def last(self, x: Any, count: Any, before: Any) -> Any:
        hidden = x[np.arange(len(x)), np.maximum(count, 1) - 1]
        return hidden if before is None else np.where(count[:, None] > 0, hidden, before)

    def select(self, filters: Filters, hidden: Any, state: State) -> State:
        return select_token(filters, self.logits(hidden), state)

    def select_after(self, filters: Filters, x: Any, ones: Any, state: State) -> State:
        return self.select(filters, x[:, 0], state)

    def scores(self, x: Any, targets: Any) -> Any:
        return log_probability(self.logits(x[0])[None], targets)

    def logits(self, hidden: HostArray) -> Any:
        """Return the logits (rows, vocabulary) of hidden states, until the next call."""
        rows = len(hidden)
        bound = self._bound_heads.get(rows)
        if bound is None:
            x = np.empty((rows, self.description.hidden), np.float32)
            y = np.empty((rows, self.description.vocabulary), np.float32)
            bound = x, y, self._head.bind({"x": x[None]}, {"y": y[None]})
        self._bound_heads = {rows: bound} if rows <= MOST_KEPT else {}
        bound[0][...] = hidden
        bound[2]()
        return decoder.scale_logits(self.description, bound[1])

    def tables(self, length: int) -> dict[str, HostArray]:
        """Return the cosines and sines of all ropes (context, rope.size / 2) by their names."""
        tables: dict[str, HostArray] = {}
        for rope, number in self._ropes.items():
            scaling = dict(rope.scaling) or None
            by_length = depends_on_length(scaling)
            long = by_length and length > original_length(scaling or {})
            if (rope, long) not in self._tables:
                known = float(length) if long else None
                angles, factor = frequencies(rope.size, rope.theta, scaling, known)
                turns = np.arange(self.context)[:, None] * np.array(angles)
                both = [function(turns) * factor for function in (np.cos, np.sin)]
                self._tables[rope, long] = tuple(table.astype(np.float32) for table in both)
            tables |= zip(rope_names(number), self._tables[rope, long], strict=True)
        return tables


class GraphCache:
    """Keys and values of rows, and the arrays through which graphs run on them."""

    def __init__(self, executor: GraphExecutor, rows: int, slots: int) -> None:
        self._executor, self._bound = executor, dict[Any, Any]()
        description = executor.description
        self._layers = []
        for kind in description.layers:
            own = slots if kind.window is None else kind.window + SLACK
            shape = (rows, description.kv_heads, own, description.head_size)
            self._layers.append([np.zeros(shape, np.float32) for _ in range(2)])

    def run(self, rows: slice, x: HostArray, ends: HostArray, length: int) -> HostArray:
        """Run all layers on new tokens x (rows, tokens, hidden), which end at `ends`.

        The result is valid until the next call. `length` is that of the whole text.
        """
        tables = self._executor.tables(length)
        key = (rows.start, rows.stop, x.shape, *map(id, tables.values()))
        bound = self._bound.get(key) or self._bind(rows, x.shape, tables)
        self._bound = {key: bound} if x.shape[1] == 1 else {}
        states, lengths, total, runs = bound
        states[0][...], lengths[...], total[...] = x, ends - 1, ends.max()
        for run in runs:
            run()
        result: HostArray = states[len(runs) % 2]
        return result

    def _bind(self, rows: slice, shape: Any, tables: Mapping[str, HostArray]) -> Any:
        states = [np.empty(shape, np.float32) for _ in range(2)]
        lengths, total = np.empty(shape[0], np.int32), np.empty(1, np.int32)
        runs = []
        for turn, (numbers, session) in enumerate(self._executor.sections):
            inputs = {"x": states[turn % 2], "lengths": lengths, "total": total, **tables}
            outputs = {"y": states[1 - turn % 2]}
            for number in numbers:
                for name, array in zip(("keys", "values"), self._layers[number], strict=True):
                    cache = array[rows]
                    inputs[f"{name}{number}"] = outputs[f"{name}{number}_after"] = cache
            runs.append(session.bind(inputs, outputs))
        return states, lengths, total, runs
