"""From prompts to tokens: prompts are read in chunks, then each step gives every row one token.

Chunks bound the memory of activations. Engines that compile a layer for each size use few sizes of
chunks and caches. Tokens, positions and the state of sampling stay on the device. If the library
is asynchronous, the host reads a token while the next step runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine, LayerConfig
from anydevice._core.locks import ForkSafeLock
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import Record
from anydevice._core.rope_scaling import depends_on_length
from anydevice._core.trees import leaf_names, leaves
from anydevice._llm import decoder
from anydevice._llm.description import Description, LayerDescription
from anydevice._llm.sampling import (
    NO_TOKEN,
    Filters,
    Sampling,
    choose,
    log_probability,
    not_implemented,
    row_seeds,
)
from anydevice._machine.engines import registry
from anydevice._machine.settings.files import compiled_folder
from anydevice._ops.dispatch import explain, own_version, primitives
from anydevice._plan.plan import PREFILL_CHUNK
from anydevice.errors import VerificationError

Prompts = Sequence[Sequence[int]]

CHUNK_SIZES = (16, 64, 256)
"""Sizes to which chunks are padded if a layer is compiled for each size."""


class ChunkSizes:
    """The number of tokens of a row that are read at a time."""

    def __init__(self, prefill_chunk: int, fixed: Sequence[int] = ()) -> None:
        self.fixed = tuple(size for size in fixed if size <= prefill_chunk) or tuple(fixed[:1])
        self.largest = max(self.fixed) if self.fixed else max(1, prefill_chunk)

    @classmethod
    def of(cls, executor: Executor, rows: int, prefill_chunk: int | None = None) -> ChunkSizes:
        """Return the sizes for a batch that reads `prefill_chunk` tokens of all rows at a time."""
        if prefill_chunk is None:
            prefill_chunk = PREFILL_CHUNK["cpu" if executor.device.kind == "cpu" else "other"]
        return cls(prefill_chunk // rows, CHUNK_SIZES if executor.compiled else ())

    def next(self, left: int) -> int:
        """Return the size of the next chunk of `left` tokens; it may be padded beyond them."""
        if not self.fixed or left >= self.largest:
            return min(left, self.largest)
        padded = min(size for size in self.fixed if size >= left)
        smaller = [size for size in self.fixed if size <= left]
        return padded if padded <= 2 * left or not smaller else max(smaller)

    def padded(self, length: int) -> int:
        """Return the number of slots that a prompt of this length writes, padding included."""
        done = 0
        while done < length:
            done += self.next(length - done)
        return done


def chunks(
    prompts: Prompts, sizes: ChunkSizes, done: int = 0
) -> Iterator[tuple[np.ndarray[Any, Any], list[int], list[int]]]:
    """Yield the ids of each chunk after `done` tokens, the start of each row, and its count."""
    longest = max(map(len, prompts))
    while done < longest:
        size = sizes.next(longest - done)
        ids = np.zeros((len(prompts), size), np.int32)
        count = [max(0, min(size, len(prompt) - done)) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            ids[row, : count[row]] = prompt[done : done + count[row]]
        yield ids, [min(done, len(prompt)) for prompt in prompts], count
        done += size


def slots_for(executor: Executor, rows: int, prompt: int, reply: int, context: int) -> int:
    """Return the number of cache slots for these lengths, rounded up so that programs are few."""
    needed = max(prompt + reply, ChunkSizes.of(executor, rows).padded(prompt))
    if executor.synchronous:
        return -(-needed // 64) * 64
    power = max(256, 1 << (needed - 1).bit_length())
    return max(needed, min(power, -(-context // 64) * 64))


Tokens = np.ndarray[Any, Any]
Step = tuple[Tokens, Tokens | None]
"""The tokens (rows,) of one step, and their log probabilities if they were requested."""
State = dict[str, Array]
"""Arrays on the device between two steps: see `OpsRunner`."""

COMPILED = ("jax",)
"""Engines for which a layer is compiled.

MLX is not among them: on the CPU a step of stories260K takes 1.8 ms compiled, and 0.9 ms by NumPy
in MLX's memory (`_engines/mlx/decoder_layer.py`).
"""
SYNCHRONOUS = ("numpy", "torch", "mlx")
"""Engines whose steps on the CPU are done when they return."""
SCORED = 256
"""Number of tokens that are scored at a time."""
KINDS_OF_SAMPLING = 8
"""Number of compiled sampling programs that are kept, the most recently used ones."""
FINITE_CHUNK = 2**24
"""Number of a weight's elements that are widened at a time to check whether they are finite."""


class PendingStep(Protocol):
    """The tokens of one step, possibly still being computed."""

    def read(self) -> Step:
        """Wait for the tokens and return them."""


class CachedTokens:
    """The tokens of one row whose keys and values are cached: a prompt, and its reply so far."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._prompt, self._reply = list(prompt), list[int]()
        self._steps = 0

    def begin(self) -> None:
        """Count a started step: it writes the previous token to the cache."""
        self._steps += 1

    def read(self, token: int) -> None:
        """Append the next token of the reply."""
        self._reply.append(token)

    @property
    def written(self) -> int:
        """The number of tokens in the cache, including any that the host has not read yet."""
        return len(self._prompt) + self._steps

    def common(self, prompt: Sequence[int]) -> int:
        """Return the length of the common prefix, without the last token of the prompt."""
        known = self._prompt + self._reply[: self._steps]
        pairs = zip(known, prompt[:-1], strict=False)
        unlike = (at for at, (own, token) in enumerate(pairs) if own != token)
        return next(unlike, min(len(known), len(prompt) - 1))


def replies(
    executor: Executor,
    prompts: Prompts,
    sampling: Sampling,
    max_tokens: int,
    context: int,
    reuse: bool = False,
) -> Iterator[Step]:
    """Yield the tokens of up to `max_tokens` steps; keep the runner, which is slow to create."""
    rows = len(prompts)
    slots = slots_for(executor, rows, max(map(len, prompts)), max_tokens, context)
    runner = executor.idle_runner(rows, slots) or runner_for(executor, rows, slots)
    try:
        yield from run_steps(runner, executor, prompts, sampling, max_tokens, reuse)
    except GeneratorExit:
        executor.keep_runner(rows, slots, runner)
        raise
    # Do not keep the runner after an error, which may have interrupted a step.
    executor.keep_runner(rows, slots, runner)


def run_steps(
    runner: OpsRunner,
    executor: Executor,
    prompts: Prompts,
    sampling: Sampling,
    max_tokens: int,
    reuse: bool = False,
) -> Iterator[Step]:
    """Yield the tokens of up to `max_tokens` steps; each starts before the last one is read."""
    with executor.lock():
        pending = runner.prefill(prompts, sampling, reuse)
    for number in range(1, max_tokens + 1):
        following = None
        if number < max_tokens and not runner.synchronous:
            with executor.lock():
                runner.cached.begin()
                following = runner.step()
        step = pending.read()
        if step[0].min() == NO_TOKEN:
            raise not_finite(executor, f"token {number} of the reply")
        runner.cached.read(int(step[0][0]))
        yield step
        if number < max_tokens and runner.synchronous:
            with executor.lock():
                runner.cached.begin()
                following = runner.step()
        if following is not None:
            pending = following


class FusedLayer(Record):
    """The engine's function for a layer, or None; the weights; configs without and with a ring."""

    function: Callable[..., Any] | None
    weights: tuple[Array | None, ...]
    configs: tuple[LayerConfig | None, LayerConfig | None]


class Executor(ABC):
    """Runs the steps of one decoder on a device; one of its runners may be idle."""

    compiled = False
    fused = False
    """Whether functions of the engine for whole layers computed the last chunk."""
    parameters: decoder.Parameters
    like: Array
    """An array on the device, of the dtype that layers compute with."""

    def __init__(self, description: Description, device: Device) -> None:
        assert device.engine is not None
        self.description, self.device = description, device
        self.engine: Engine = registry.load(device.engine)
        self.synchronous = device.engine in SYNCHRONOUS and device.backend == "cpu"
        # Reentrant: a stream may be garbage-collected, and closed, while its thread has the lock.
        self._lock = ForkSafeLock(reentrant=True)
        self._idle: tuple[int, int, OpsRunner] | None = None

    @property
    def name(self) -> str:
        """The name of the library that computes."""
        return self.engine.name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of steps, within the engine's inference scope on the device."""
        # Operations on arrays without a device of their own use the default device.
        shared = self.engine.shares_memory
        default = self.engine.default_scope(self.device) if shared else nullcontext()
        scope = self.engine.inference_scope(self.device)
        # We raise an error for numbers that are not finite, so NumPy need not warn.
        with self._lock.native, default, scope, np.errstate(all="ignore"):
            yield

    def idle_runner(self, rows: int, slots: int) -> OpsRunner | None:
        """Take the idle runner; return None if there is none of this size."""
        with self._lock.native:
            idle, self._idle = self._idle, None
        return idle[2] if idle is not None and idle[:2] == (rows, slots) else None

    def keep_runner(self, rows: int, slots: int, runner: OpsRunner) -> None:
        """Keep this runner only: each holds the memory of a cache."""
        with self._lock.native:
            self._idle = (rows, slots, runner)

    def place(self, values: object, dtype: str = "int32") -> Array:
        """Copy small arrays to the device."""
        return self.engine.place(np.asarray(values, dtype), self.device)

    def lengths(self, texts: Sequence[Sequence[int]]) -> Array | None:
        """Return the lengths of texts if a rope of the decoder depends on them, else None."""
        ropes = [kind.rope for kind in self.description.layers if kind.rope]
        if not any(depends_on_length(dict(rope.scaling)) for rope in ropes):
            return None
        return self.place([len(text) for text in texts])

    @abstractmethod
    def new_cache(self, rows: int, slots: int) -> Any:
        """Return an empty cache; raise `OutOfMemoryError` if there is no room for it."""

    @abstractmethod
    def forward(
        self,
        ids: Array,
        start: Array,
        count: Array,
        cache: Any,
        first: bool = False,
        length: Array | None = None,
        last: bool = False,
    ) -> Array:
        """Run all layers on a chunk of tokens; the cache is changed in place.

        With `first`, all rows begin with this chunk, which is faster. `length` is the result of
        `lengths` for the whole texts, if known. With `last`, the caller needs only the hidden state
        of each row's last valid token, and the result may be just that, (rows, 1, hidden).
        """

    @abstractmethod
    def last(self, x: Array, count: Array, before: Array | None) -> Array:
        """Return the hidden state of each row's last token; `before` for a row without tokens."""

    @abstractmethod
    def select(self, filters: Filters, hidden: Array, state: State) -> State:
        """Return the state with the next token of each row, selected by its hidden state."""

    @abstractmethod
    def select_after(self, filters: Filters, x: Array, ones: Array, state: State) -> State:
        """Select like `select`, after one token of each row; the engine may fuse norm and head."""

    @abstractmethod
    def scores(self, x: Array, targets: Array) -> Array:
        """Return the log probabilities of targets (1, tokens) after the tokens of a chunk."""


class DecoderExecutor(Executor):
    """Runs the decoder in ops; compiles single layers if the engine is faster that way."""

    def __init__(
        self,
        description: Description,
        parameters: decoder.Parameters,
        device: Device,
        *,
        exact: bool,
    ) -> None:
        super().__init__(description, device)
        self.parameters = parameters
        self._exact = exact
        self._fuses_quantized = device.engine == "torch" and device.backend == "cuda"
        self.compiled = device.engine in COMPILED
        folder = compiled_folder(self.engine.name) if self.compiled else None
        if folder is not None and not isinstance(self.engine.compiler, Absent):
            self.engine.compiler.keep(str(folder))  # for later processes
        self.layers = [
            decoder.DecoderLayer(description, kind, weights)
            for kind, weights in zip(description.layers, parameters["layers"], strict=True)
        ]
        self._fused_layers: dict[str, list[FusedLayer]] = {}
        self._compiled_layers: dict[LayerDescription, Callable[..., Any]] = {}
        self._norm = {"norm": parameters["norm"]}
        self._embedding = {"embedding": parameters["embedding"], **self._norm}
        self.like = parameters["norm"]["weight"]
        self._head = self._embedding if description.tied else {"head": parameters["head"]}
        self._embed = self._compile(partial(decoder.embed, description))
        self._last = self._compile(partial(_last_hidden, description))
        self._scores = self._compile(partial(_score_targets, description))
        self._select = lru_cache(KINDS_OF_SAMPLING)(
            lambda filters: self._compile(
                lambda head, hidden, state: select_token(
                    filters, decoder.logits(description, head, hidden), state
                )
            )
        )

    def _compile(self, function: Callable[..., Any], donate: Sequence[str] = ()) -> Any:
        """Return the function, compiled if this engine compiles layers."""
        if not self.compiled or isinstance(self.engine.compiler, Absent):
            return function
        return self.engine.compiler.compile(function, donate=donate)

    def new_cache(self, rows: int, slots: int) -> decoder.Cache:
        try:
            return decoder.new_cache(self.description, rows, slots, self.like)
        except Exception as error:
            explain(error, like=self.like)
            raise

    def forward(
        self,
        ids: Array,
        start: Array,
        count: Array,
        cache: decoder.Cache,
        first: bool = False,
        length: Array | None = None,
        last: bool = False,
    ) -> Array:
        x = self._embed(self._embedding, ids)
        if self.compiled:
            for number, layer in enumerate(self.layers):
                run = self._compiled_layers.get(layer.kind)
                if run is None:
                    function = partial(decoder.run_layer, self.description, layer.kind)
                    run = self._compile(function, donate=("cache",))
                    self._compiled_layers[layer.kind] = run
                x, cache[number] = run(layer.weights, x, start, count, cache[number], length)
            return x
        index, several = None, ids.shape[1] > 1
        for number, layer in enumerate(self.layers):
            result: Any = NotImplemented
            if first or not several:
                ends = last and several and number == len(self.layers) - 1
                only = (ops.subtract(count, 1),) if ends else ()
                result = self._fused_layer(number, x, start, cache[number], *only)
            if result is NotImplemented:
                if index is None:
                    index = decoder.cache_index(
                        self.description.layers, ids, start, count, cache, first, length
                    )
                result = layer(x, index, cache[number])
            x, cache[number] = result
        self.fused = index is None
        return x

    def _fused_layer(self, number: int, x: Array, position: Array, cache: Any, *only: Array) -> Any:
        """Run a layer by the engine's own function, if it has one for these tokens."""
        name = "decoder_layer" if x.shape[1] == 1 else "prompt_layer"
        if name not in self._fused_layers:
            self._fused_layers[name] = [
                fused_layer(layer, x, name, self._fuses_quantized, self._exact)
                for layer in self.layers
            ]
        fused = self._fused_layers[name][number]
        window = self.layers[number].kind.window
        if fused.function is None or (window is not None and 1 < x.shape[1] > window):
            return NotImplemented
        keys, values = cache["keys"], cache["values"]
        ring = window == keys.shape[2] and x.shape[1] == 1  # first tokens do not wrap around
        config = fused.configs[ring]
        result = fused.function(x, position, keys, values, *fused.weights, config, *only)
        if result is NotImplemented:
            return NotImplemented
        if result[1] is not keys or result[2] is not values:
            cache = {"keys": result[1], "values": result[2]}
        return result[0], cache

    def last(self, x: Array, count: Array, before: Array | None) -> Array:
        return self._last(self._norm, x, count, before)

    def select(self, filters: Filters, hidden: Array, state: State) -> State:
        return self._select(filters)(self._head, hidden, state)

    def select_after(self, filters: Filters, x: Array, ones: Array, state: State) -> State:
        logits = self._fused_logits(x)
        if logits is NotImplemented:
            return self.select(filters, self.last(x, ones, None), state)
        return select_token(filters, decoder.scale_logits(self.description, logits), state)

    def _fused_logits(self, x: Array) -> Any:
        """Return the product of the normalized x with the head by the engine's own function."""
        norm, head = self._norm["norm"], self._head.get("head")
        own = own_version(x, "final_logits", not_implemented)
        if own is not_implemented or self.description.norm != "rms":
            return NotImplemented
        if head is not None and "bias" in head:
            return NotImplemented
        weight = self._embedding["embedding"] if head is None else head["weight"]
        rows = primitives(x).reshape(x, (x.shape[0], x.shape[2]))
        given = rows, norm["weight"], weight, self.description.eps
        if not isinstance(weight, QuantizedWeight | tuple):
            return own(*given)
        return own(*given, self._exact) if self._fuses_quantized else NotImplemented

    def scores(self, x: Array, targets: Array) -> Array:
        return self._scores({**self._norm, **self._head}, x, targets)


def fused_layer(
    layer: decoder.DecoderLayer,
    like: Array,
    name: str,
    quantized: bool = False,
    exact: bool = True,
) -> FusedLayer:
    """Return the engine's function for a whole layer, with the layer's weights and configs.

    Only with `quantized` does it take quantized weights; `exact` is as in `LayerConfig`.
    """
    own = own_version(like, name, not_implemented)
    plain, ring = (
        layer_config(layer.description, layer.kind, ring, exact) for ring in (False, True)
    )
    if own is not_implemented or plain is None or ring is None:
        return FusedLayer(None, (), (plain, ring))
    names = ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down")
    weights = [layer.weights[name]["weight"] for name in names]
    if not quantized and any(isinstance(weight, QuantizedWeight | tuple) for weight in weights):
        return FusedLayer(None, (), (plain, ring))
    weights += [layer.weights[name].get("bias") for name in ("qkv", "output")]
    norms = ("query_norm", "key_norm")
    weights += [layer.weights.get(name, {}).get("weight") for name in norms]
    return FusedLayer(own, tuple(weights), (plain, ring))


@lru_cache(maxsize=256)
def layer_config(
    description: Description, kind: LayerDescription, ring: bool, exact: bool = True
) -> LayerConfig | None:
    """Return the layer's config for engines; None if no engine has a fused version of the layer."""
    plain = (
        description.norm == "rms"
        and description.block == "pre"
        and description.activation == "silu"
        and description.gated
        and description.latent is None
        and description.soft_cap is None
        and not description.sinks
        and description.query_key_norm in ("", "head")
        and description.value_size == description.head_size
        and not description.biases & {"mlp", "norm"}
        and kind.experts is None
        and kind.position_scale is None
    )
    if not plain:
        return None
    rope = kind.rope
    return LayerConfig(
        heads=description.heads,
        kv_heads=description.kv_heads,
        size=description.head_size,
        eps=description.eps,
        scale=description.scale,
        rotated=0 if rope is None else rope.size,
        theta=10000.0 if rope is None else rope.theta,
        interleaved=rope is not None and rope.interleaved,
        scaling=() if rope is None else rope.scaling,
        ring=ring,
        factor=description.residual_scale,
        exact=exact,
    )


def _last_hidden(
    description: Description, norm: decoder.Parameters, x: Array, count: Array, before: Array | None
) -> Array:
    hidden = decoder.final(description, norm, x, count, last=True)
    if before is None:
        return hidden
    return ops.where(ops.reshape(ops.less(0, count), (-1, 1)), hidden, before)


def select_token(filters: Filters, logits: Array, state: State) -> State:
    """Return the state with the next token of each row, selected by its logits."""
    seen, place = state.get("seen"), state["position"]
    if not filters.greedy:  # noise depends on the token's place in its reply
        place = ops.subtract(place, state["prompt_length"])
    token, logprob = choose(filters, logits, state["numbers"], state["seeds"], place, seen)
    after = {**state, "token": token}
    if logprob is not None:
        after["logprob"] = logprob
    if seen is not None:
        column = ops.reshape(token, (-1, 1))
        vocabulary = primitives(token).arange(logits.shape[-1], DTYPES["int32"], token)
        after["seen"] = ops.logical_or(seen, ops.equal(column, ops.reshape(vocabulary, (1, -1))))
    return after


def _score_targets(
    description: Description, parameters: decoder.Parameters, x: Array, targets: Array
) -> Array:
    logits = decoder.logits(description, parameters, decoder.final(description, parameters, x))
    return log_probability(ops.astype(logits, DTYPES["float32"]), targets)


class OpsRunner:
    """A batch of rows with their cache, for every engine: a decoder in ops.

    One generation uses it at a time. With `synchronous`, a step is done when `step` returns, so
    reading costs nothing. `cached` has the tokens in the cache of the first row. The state on the
    device is token, position, prompt_length, seeds, the numbers of the sampling and, if needed,
    logprob and seen.
    """

    def __init__(self, executor: Executor, rows: int, slots: int) -> None:
        self._executor, self.rows, self.slots = executor, rows, slots
        self.synchronous = executor.synchronous
        self._filters = Filters()
        self._cache: decoder.Cache = []
        self._state: State = {}
        self._ones = executor.place([1] * rows)
        self._sizes = ChunkSizes.of(executor, rows)
        self.cached = CachedTokens()

    def new_text(self) -> decoder.Cache:
        """Forget the text, and return the cache for the caller to write."""
        self.cached = CachedTokens()  # until all is written
        # Keys of an earlier reply are never read: a row attends only to keys that it wrote.
        self._cache = self._cache or self._executor.new_cache(self.rows, self.slots)
        return self._cache

    def prefill(self, prompts: Prompts, sampling: Sampling, reuse: bool = False) -> PendingStep:
        """Read new prompts (with `reuse`, not what is cached), and choose their first tokens."""
        executor = self._executor
        done = self._reusable(prompts[0]) if reuse and self.rows == 1 else 0
        self.new_text()
        self._filters = sampling.filters
        hidden, length = None, executor.lengths(prompts)
        for ids, start, count in chunks(prompts, self._sizes, done):
            hidden = self._read(ids, start, count, hidden, length)
        lengths = [len(prompt) for prompt in prompts]
        self._state = {
            "position": executor.place(lengths),
            "prompt_length": executor.place(lengths),
            "numbers": executor.place(sampling.numbers, "float32"),
            "seeds": executor.place(row_seeds(sampling.seed, self.rows)),
        }
        if sampling.filters.penalty:
            seen = np.zeros((self.rows, executor.description.vocabulary), bool)
            for row, prompt in enumerate(prompts):
                seen[row, list(prompt)] = True
            self._state["seen"] = executor.place(seen, "bool")
        self.cached = CachedTokens(prompts[0])
        assert hidden is not None
        return self._launch(executor.select(self._filters, hidden, self._state))

    def _read(
        self, ids: Tokens, start: Sequence[int], count: Sequence[int], before: Array | None,
        length: Array | None,
    ) -> Array:  # fmt: skip
        """Read a chunk of the prompts; return the hidden state of each row's last token so far."""
        executor = self._executor
        counts = executor.place(count)
        placed = executor.place(ids), executor.place(start), counts
        x = executor.forward(*placed, self._cache, not any(start), length, last=True)
        return executor.last(x, counts, before)

    def _reusable(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt are reused; a ring cache is reused whole or not."""
        common = self.cached.common(prompt)
        while common and common + self._sizes.padded(len(prompt) - common) > self.slots:
            common -= 1  # padding needs slots, too
        layers = self._executor.description.layers
        if any(kind.window and kind.window < self.slots for kind in layers):
            common = common if common == self.cached.written else 0
        return 0 if self._executor.lengths([prompt]) is not None else common

    def step(self) -> PendingStep:
        """Start computing the next token of each row."""
        return self._launch(self._next_state(self._state))

    def _next_state(self, state: State) -> State:
        """Run one step; return the state with the next token."""
        executor, xp = self._executor, primitives(state["token"])
        ids = xp.reshape(state["token"], (self.rows, 1))
        x = executor.forward(ids, state["position"], self._ones, self._cache)
        after = {**state, "position": xp.add(state["position"], 1)}
        return executor.select_after(self._filters, x, self._ones, after)

    def _launch(self, state: State) -> PendingStep:
        self._state = state
        arrays = [state["token"], state["logprob"]] if "logprob" in state else [state["token"]]
        self._executor.engine.launch(arrays)
        return _DeviceStep(self._executor.engine, *arrays)


def runner_for(executor: Executor, rows: int, slots: int) -> OpsRunner:
    """Return a runner for a batch of this size, with CUDA graphs if the device has them."""
    from anydevice._llm.capture import captured_runner

    return captured_runner(executor, rows, slots) or OpsRunner(executor, rows, slots)


class _DeviceStep:
    """Arrays of one step, copied to the host when they are read."""

    def __init__(self, engine: Engine, token: Array, logprob: Array | None = None) -> None:
        self._engine, self._token, self._logprob = engine, token, logprob

    def read(self) -> Step:
        logprob = None if self._logprob is None else self._engine.to_host(self._logprob)
        return self._engine.to_host(self._token), logprob


def score(executor: Executor, ids: Sequence[int], context: int, room: int) -> list[float]:
    """Return the log probability of each token but the first; logits take about `room` bytes."""
    inputs, targets = ids[:-1], np.asarray(ids[1:], np.int32)
    slots = slots_for(executor, 1, len(inputs), 1, context)
    runner = executor.idle_runner(1, slots) or runner_for(executor, 1, slots)
    # Logits are float32, and the log-sum-exp needs twice their bytes in addition.
    fit = room // (3 * 4 * executor.description.vocabulary)
    together = min(SCORED, 1 << max(0, fit.bit_length() - 1))
    parts: list[tuple[Array, int]] = []
    with executor.lock():
        cache = runner.new_text()
    for chunk, start, count in chunks([inputs], ChunkSizes.of(executor, 1, SCORED)):
        wanted = np.zeros_like(chunk)
        wanted[0, : count[0]] = targets[start[0] : start[0] + count[0]]
        with executor.lock():
            placed = executor.place(chunk), executor.place(start), executor.place(count)
            x = executor.forward(*placed, cache, not any(start), executor.lengths([inputs]))
        for at in range(0, count[0], together):
            end = min(at + together, chunk.shape[1])
            with executor.lock():
                part = ops.slice_axis(x, 1, at, end)
                scores = executor.scores(part, executor.place(wanted[:, at:end]))
                executor.engine.launch([scores])
            parts.append((scores, min(end, count[0]) - at))
    values = np.concatenate([executor.engine.to_host(s)[0, :count] for s, count in parts])
    finite = np.isfinite(values)
    if not finite.all():
        raise not_finite(executor, f"token {int(finite.argmin()) + 2} of the text")
    executor.keep_runner(1, slots, runner)
    return [float(value) for value in values]


def not_finite(executor: Executor, where: str) -> VerificationError:
    """Return the error for logits that are not finite; it names the first such weight, if any."""
    problem = f"the logits of {where} are NaN or infinite"
    tree = executor.parameters
    for name, weight in zip(leaf_names(tree), leaves(tree), strict=True):
        if not _is_finite(executor, weight):
            return VerificationError(
                f"{problem}, because the weight {name[1:]} has such numbers: the files of the "
                "model are damaged; download them again",
                where=name[1:],
            )
    dtype = primitives(executor.like).dtype(executor.like).name
    advice = f"'anydevice verify --device {executor.device}' says whether an op is wrong there"
    if dtype == "float16":
        advice = "numbers went beyond float16: load the model with dtype='bfloat16' or 'float32'"
    return VerificationError(f"{problem}, and all weights are finite; {advice}", where=where)


def _is_finite(executor: Executor, weight: Array | QuantizedWeight) -> bool:
    """Whether all elements of a weight are finite; they are widened chunk by chunk."""
    if isinstance(weight, QuantizedWeight):
        return all(_is_finite(executor, array) for array in weight.arrays.values())
    rows = weight.shape[0]
    step = max(1, FINITE_CHUNK * rows // math.prod(weight.shape))
    with executor.lock():
        parts = (ops.slice_axis(weight, 0, at, min(rows, at + step)) for at in range(0, rows, step))
        totals = [ops.sum(ops.astype(part, DTYPES["float32"])) for part in parts]
    return all(np.isfinite(executor.engine.to_host(total)) for total in totals)
