"""From prompts to tokens: prompts are read in pieces, then each step gives every row one token.

Tokens, positions and what the draw depends on stay on the device. Where a library computes in the
background, the host reads a token while the next step is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from anydevice import _ops as ops
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine, LayerConfig
from anydevice._core.locks import ForkSafeLock
from anydevice._core.rope_scaling import depends_on_length
from anydevice._core.trees import leaf_names, leaves
from anydevice._llm import decoder
from anydevice._llm.chunks import ChunkSizes, Prompts, pieces, slots_for
from anydevice._llm.description import Description, LayerDescription
from anydevice._llm.sampling import NO_TOKEN, Filters, Sampling, choose, log_probability, row_seeds
from anydevice._machine.engines import registry
from anydevice._machine.settings.files import compiled_folder
from anydevice._ops.dispatch import explain, own_version, primitives
from anydevice.errors import VerificationError

Array = Any

COMPILED = ("jax",)
"""Engines for which a layer is compiled.

MLX is not among them: on the CPU a step of stories260K takes 1.8 ms compiled, and 0.9 ms by NumPy
in MLX's memory (`_engines/mlx/decoder_layer.py`).
"""
SYNCHRONOUS = ("numpy", "torch", "mlx")
"""Engines that return from a step on the CPU when it is done."""
SCORED = 256
"""Tokens of a text that are scored at a time."""
KINDS_OF_SAMPLING = 8
"""Compiled sampling programs that are kept, the most recently used ones."""
LOOKED_AT = 2**24
"""Numbers of a weight that are looked at together for one that is not finite."""


class PendingStep(Protocol):
    """The tokens of one step, on their way."""

    def read(self) -> tuple[Array, Array | None]:
        """Wait for them: tokens (rows,) of NumPy, and their log probabilities if asked for."""


class ReplyRunner(Protocol):
    """A batch of rows with their cache. One is used by one generation at a time."""

    synchronous: bool
    """Whether `step` returns only when the step is done: then reading costs nothing."""

    held: HeldTokens
    """What is in the cache of one row."""

    def prefill(self, prompts: Prompts, sampling: Sampling, reuse: bool = False) -> PendingStep:
        """Read the prompts, and choose the first token of each row. What was before is gone.

        With `reuse`, what one row has in common with what the cache holds is not read again.
        """

    def step(self) -> PendingStep:
        """Begin the next token of each row."""

    def new_text(self) -> decoder.Cache:
        """The cache, for others to write into; what was before is gone."""


class HeldTokens:
    """The tokens whose keys and values the cache of one row has: a prompt, and its reply so far."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._prompt, self._reply = list(prompt), list[int]()
        self._begun = 0

    def begin(self) -> None:
        """A step was begun: it writes the token before it, which may not have been read yet."""
        self._begun += 1

    def read(self, token: int) -> None:
        """The next token of the reply."""
        self._reply.append(token)

    @property
    def written(self) -> int:
        """How many tokens were written, known or not."""
        return len(self._prompt) + self._begun

    def common(self, prompt: Sequence[int]) -> int:
        """How many tokens a prompt begins with are held; its last one always has to be read."""
        known = self._prompt + self._reply[: self._begun]
        pairs = zip(known, prompt[:-1], strict=False)
        unlike = (at for at, (own, given) in enumerate(pairs) if own != given)
        return next(unlike, min(len(known), len(prompt) - 1))


def replies(
    executor: DecoderExecutor,
    prompts: Prompts,
    sampling: Sampling,
    most: int,
    context: int,
    reuse: bool = False,
) -> Iterator[Any]:
    """The tokens (rows,) and log probabilities of up to `most` steps, as they come.

    The runner is kept for the next replies of such sizes: making one may take longer than a reply.
    """
    rows = len(prompts)
    slots = slots_for(executor, rows, max(map(len, prompts)), most, context)
    runner = executor.idle_runner(rows, slots) or runner_for(executor, rows, slots)
    try:
        yield from generated(runner, executor, prompts, sampling, most, reuse)
    except GeneratorExit:
        executor.keep_runner(rows, slots, runner)
        raise
    # Not after an error: it may have come in the middle of a step.
    executor.keep_runner(rows, slots, runner)


def generated(
    runner: ReplyRunner,
    executor: DecoderExecutor,
    prompts: Prompts,
    sampling: Sampling,
    most: int,
    reuse: bool = False,
) -> Iterator[Any]:
    """The same with this runner.

    Where steps run in the background, one is begun before the one before it is read, and is lost
    if the caller stops there. Steps of several threads take turns.
    """
    with executor.lock():
        step = runner.prefill(prompts, sampling, reuse)
    for number in range(1, most + 1):
        following = None
        if number < most and not runner.synchronous:
            with executor.lock():
                following = _begun(runner)
        found = step.read()
        if found[0].min() == NO_TOKEN:
            raise not_finite(executor, f"token {number} of the reply")
        runner.held.read(int(found[0][0]))
        yield found
        if number < most and runner.synchronous:
            with executor.lock():
                following = _begun(runner)
        if following is not None:
            step = following


def _begun(runner: ReplyRunner) -> PendingStep:
    runner.held.begin()
    return runner.step()


class DecoderExecutor:
    """What the steps of one decoder are made of, compiled where that is faster.

    A layer is compiled, not the model: layers of one kind share their program.
    """

    def __init__(self, description: Description, parameters: decoder.Parameters, device: Device):
        assert device.engine is not None
        self.description, self.parameters, self.device = description, parameters, device
        self.engine: Engine = registry.load(device.engine)
        self.compiled = device.engine in COMPILED
        folder = compiled_folder(device.engine) if self.compiled else None
        if folder is not None and not isinstance(self.engine.compiler, Absent):
            self.engine.compiler.keep(str(folder))  # for later processes
        self.synchronous = device.engine in SYNCHRONOUS and device.backend == "cpu"
        # Taken again by its thread where a stream that nobody has is collected within a turn.
        self._lock = ForkSafeLock(reentrant=True)
        self._wholes: dict[str, Any] = {}
        self.fused = False  # the piece that was read last
        self._idle: tuple[int, int, ReplyRunner] | None = None
        self._layers: dict[LayerDescription, Callable[..., Any]] = {}
        self._embedding = {"embedding": parameters["embedding"]}
        self._norm = {"norm": parameters["norm"]}
        self._head = self._embedding if description.tied else {"head": parameters["head"]}
        compiled = self._compile = partial(_compiled, self.engine if self.compiled else None)
        self._embedded = compiled(partial(decoder.embedded, description))
        self._last = compiled(partial(_last, description))
        self._scores = compiled(partial(_scores, description))
        self._advanced = lru_cache(KINDS_OF_SAMPLING)(
            lambda filters: compiled(partial(_advanced, description, filters))
        )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """A block that no other thread is in, in which arrays are made on the device."""
        # Where arrays have no device of their own, each operation takes the default one.
        shared = self.engine.shares_memory
        default = self.engine.default_scope(self.device) if shared else nullcontext()
        scope = self.engine.inference_scope(self.device)
        # Where NumPy computes: numbers that are not finite are an error of ours.
        with self._lock.native, default, scope, np.errstate(all="ignore"):
            yield

    def idle_runner(self, rows: int, slots: int) -> ReplyRunner | None:
        """The runner that is kept, if it has this size; it is no longer kept then."""
        with self._lock.native:
            kept, self._idle = self._idle, None
        return kept[2] if kept is not None and kept[:2] == (rows, slots) else None

    def keep_runner(self, rows: int, slots: int, runner: ReplyRunner) -> None:
        """Keep a runner, and no other: each has memory for a cache."""
        with self._lock.native:
            self._idle = (rows, slots, runner)

    @property
    def vocabulary(self) -> int:
        """The number of logits."""
        return self.description.vocabulary

    def place(self, values: Any, dtype: str = "int32") -> Array:
        """Small numbers on the device."""
        return self.engine.place(np.asarray(values, dtype), self.device)

    def new_cache(self, rows: int, slots: int) -> decoder.Cache:
        """An empty cache; `OutOfMemoryError` if there is no room for it."""
        like = self.parameters["embedding"]
        try:
            return decoder.new_cache(self.description, rows, slots, like)
        except Exception as error:
            explain(error, like=like)
            raise

    def lengths(self, texts: Sequence[Sequence[int]]) -> Array | None:
        """The lengths of texts that are read in pieces, for a decoder that rotates by them."""
        ropes = [kind.rope for kind in self.description.layers if kind.rope]
        if not any(depends_on_length(dict(rope.scaling)) for rope in ropes):
            return None
        return self.place([len(text) for text in texts])

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
        """What the layers make of a piece; the cache is changed in place.

        With `first`, all rows begin with it: that is faster. `length` is what `lengths` gives for
        the whole texts, if these are known. With `last`, only the last valid token of each row is
        asked for, and it may be all that is returned, (rows, 1, hidden).
        """
        x = self._embedded(self._embedding, ids)
        if self.compiled:
            for number, kind in enumerate(self.description.layers):
                own = self.parameters["layers"][number]
                arguments = own, x, start, count, cache[number], length
                x, cache[number] = self._layer(kind)(*arguments)
            return x
        where, several = None, ids.shape[1] > 1
        for number, kind in enumerate(self.description.layers):
            found: Any = NotImplemented
            if first or not several:
                ends = last and several and number == len(self.description.layers) - 1
                only = (ops.subtract(count, 1),) if ends else ()
                found = self._fused_layer(number, x, start, cache[number], *only)
            if found is NotImplemented:
                if where is None:
                    where = decoder.places(
                        self.description, ids, start, count, cache, first=first, length=length
                    )
                own = self.parameters["layers"][number]
                found = decoder.placed_layer(self.description, kind, own, x, where, cache[number])
            x, cache[number] = found
        self.fused = where is None
        return x

    def _fused_layer(self, number: int, x: Array, position: Array, cache: Any, *only: Array) -> Any:
        """A layer as the engine itself computes it, for one token or the first ones of all rows.

        `NotImplemented` if it cannot. `only` is which token of each row is asked for.
        """
        name = "decoder_layer" if x.shape[1] == 1 else "prompt_layer"
        if name not in self._wholes:
            self._wholes[name] = whole_layers(self.description, self.parameters, x, name)
        function, arguments, numbers = self._wholes[name][number]
        window = self.description.layers[number].window
        if function is None or (window is not None and 1 < x.shape[1] > window):
            return NotImplemented
        keys, values = cache["keys"], cache["values"]
        ring = window == keys.shape[2] and x.shape[1] == 1  # the first tokens go round nothing
        result = function(x, position, keys, values, *arguments, numbers[ring], *only)
        if result is NotImplemented:
            return NotImplemented
        if result[1] is not keys or result[2] is not values:
            cache = {"keys": result[1], "values": result[2]}
        return result[0], cache

    def last(self, x: Array, count: Array, before: Array | None) -> Array:
        """The hidden state of each row's last token; that from before where it has none here."""
        return self._last(self._norm, x, count, before)

    def final_logits(self, x: Array) -> Array:
        """The logits (rows, vocabulary) after one token of each row, norm and product at once.

        `NotImplemented` where the engine does not compute them so.
        """
        norm, head = self._norm["norm"], self._head.get("head")
        weight = self._embedding["embedding"] if head is None else head["weight"]
        if self.description.norm != "rms" or (head is not None and "bias" in head):
            return NotImplemented
        rows = ops.reshape(x, (x.shape[0], x.shape[2]))
        own = own_version(rows, "final_logits", _none)
        found = own(rows, norm["weight"], weight, self.description.eps)
        if found is NotImplemented:
            return NotImplemented
        return decoder.bounded_logits(self.description, found)

    def advance(self, filters: Filters, hidden: Array, state: State) -> State:
        """The state after the next token of each row was chosen."""
        after: State = self._advanced(filters)(self._head, hidden, state)
        return after

    def scores(self, x: Array, targets: Array) -> Array:
        """The log probabilities of targets (1, tokens) after the tokens of a piece."""
        return self._scores({**self._norm, **self._head}, x, targets)

    def _layer(self, kind: LayerDescription) -> Callable[..., Any]:
        if kind not in self._layers:
            function = partial(_layer, self.description, kind)
            self._layers[kind] = self._compile(function, donate=("cache",))
        return self._layers[kind]


def _compiled(
    engine: Engine | None, function: Callable[..., Any], donate: Sequence[str] = ()
) -> Callable[..., Any]:
    if engine is None or isinstance(engine.compiler, Absent):
        return function
    return engine.compiler.compile(function, donate=donate)


def whole_layers(
    description: Description,
    parameters: decoder.Parameters,
    like: Array,
    name: str = "decoder_layer",
) -> Any:
    """For each layer the engine's function for all of it, its weights, and its numbers.

    The function is `None` where there is none; numbers are those without a ring, and with one.
    """
    own = own_version(like, name, _none)
    found: list[Any] = []
    for kind, layer in zip(description.layers, parameters["layers"], strict=True):
        numbers = [layer_config(description, kind, ring) for ring in (False, True)]
        if own is _none or None in numbers:
            found.append((None, (), numbers))
            continue
        names = ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down")
        arguments = [layer[name]["weight"] for name in names]
        arguments += [layer[name].get("bias") for name in ("qkv", "output")]
        arguments += [layer.get(name, {}).get("weight") for name in ("query_norm", "key_norm")]
        found.append((own, tuple(arguments), numbers))
    return found


@lru_cache(maxsize=256)
def layer_config(
    description: Description, kind: LayerDescription, ring: bool
) -> LayerConfig | None:
    """The layer in the words of engines; `None` for one that they do not compute in one go."""
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
    )


def _none(*arguments: Any) -> Any:
    return NotImplemented


State = dict[str, Array]
"""What lies on the device between two steps: see `OpsRunner`."""


def _layer(
    description: Description,
    kind: LayerDescription,
    parameters: decoder.Parameters,
    x: Array,
    start: Array,
    count: Array,
    cache: decoder.LayerCache,
    length: Array | None,
) -> tuple[Array, decoder.LayerCache | None]:
    return decoder.layer(description, kind, parameters, x, start, count, cache, length)


def _last(
    description: Description, norm: decoder.Parameters, x: Array, count: Array, before: Array | None
) -> Array:
    hidden = decoder.final(description, norm, x, count, last=True)
    if before is None:
        return hidden
    return ops.where(ops.reshape(ops.less(0, count), (-1, 1)), hidden, before)


def _advanced(
    description: Description,
    filters: Filters,
    head: decoder.Parameters,
    hidden: Array,
    state: State,
) -> State:
    after = chosen(filters, decoder.logits(description, head, hidden), state)
    return {**after, "place": ops.add(state["place"], 1)}


def chosen(filters: Filters, logits: Array, state: State) -> State:
    """The state after the next token of each row was chosen by its logits (rows, vocabulary).

    The place is not counted on: whoever counts positions too does both at once.
    """
    seen = state.get("seen")
    token, logprob = choose(filters, logits, state["numbers"], state["seeds"], state["place"], seen)
    after = {**state, "token": token}
    if logprob is not None:
        after["logprob"] = logprob
    if seen is not None:
        column = ops.reshape(token, (-1, 1))
        every = primitives(token).arange(logits.shape[-1], DTYPES["int32"], token)
        after["seen"] = ops.logical_or(seen, ops.equal(column, ops.reshape(every, (1, -1))))
    return after


def _scores(
    description: Description, parameters: decoder.Parameters, x: Array, targets: Array
) -> Array:
    logits = decoder.logits(description, parameters, decoder.final(description, parameters, x))
    return log_probability(ops.astype(logits, DTYPES["float32"]), targets)


class OpsRunner:
    """The runner that every engine has: a decoder in ops.

    Between two steps there is a state on the device: token, position, place (in the reply), seeds,
    numbers (of the sampling), logprob and seen where they are asked for.
    """

    def __init__(self, executor: DecoderExecutor, rows: int, slots: int) -> None:
        self._executor, self.rows, self.slots = executor, rows, slots
        self.synchronous = executor.synchronous
        self._filters = Filters()
        self._cache: decoder.Cache = []
        self._state: State = {}
        self._position: Array = None
        self._ones = executor.place([1] * rows)
        self.held = HeldTokens()

    def new_text(self) -> decoder.Cache:
        self.held = HeldTokens()  # until all is written
        # What an earlier reply left there is never read: a row sees what it has written itself.
        self._cache = self._cache or self._executor.new_cache(self.rows, self.slots)
        return self._cache

    def prefill(self, prompts: Prompts, sampling: Sampling, reuse: bool = False) -> PendingStep:
        executor = self._executor
        done = self._common(prompts[0]) if reuse and self.rows == 1 else 0
        self.new_text()
        self._filters = sampling.filters
        hidden, length = None, executor.lengths(prompts)
        for ids, start, count in pieces(prompts, self._sizes(), done):
            hidden = self._read(ids, start, count, hidden, length)
        self._position = executor.place([len(prompt) for prompt in prompts])
        self._state = {
            "numbers": executor.place(sampling.numbers, "float32"),
            "seeds": executor.place(row_seeds(sampling.seed, self.rows)),
            "place": executor.place([0] * self.rows),
        }
        if sampling.filters.penalty:
            self._state["seen"] = executor.place(self._seen(prompts), "bool")
        self.held = HeldTokens(prompts[0])
        return self._advance(hidden)

    def _read(self, ids: Any, start: Any, count: Any, before: Array, length: Array) -> Array:
        """Read a piece of the prompts: the hidden state of each row's last token so far."""
        executor = self._executor
        counted = executor.place(count)
        placed = executor.place(ids), executor.place(start), counted
        x = executor.forward(*placed, self._cache, not any(start), length, last=True)
        return executor.last(x, counted, before)

    def _common(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be read again.

        Rings have lost what was before the last tokens: there it is all that was written, or none.
        """
        found, sizes = self.held.common(prompt), self._sizes()
        while found and found + sizes.padded(len(prompt) - found) > self.slots:
            found -= 1  # padding needs slots, too
        layers = self._executor.description.layers
        if any(kind.window and kind.window < self.slots for kind in layers):
            found = found if found == self.held.written else 0
        return 0 if self._executor.lengths([prompt]) is not None else found

    def step(self) -> PendingStep:
        executor = self._executor
        ids = ops.reshape(self._state["token"], (self.rows, 1))
        x = executor.forward(ids, self._position, self._ones, self._cache)
        self._position = ops.add(self._position, 1)
        return self._advance(executor.last(x, self._ones, None))

    def _advance(self, hidden: Array) -> PendingStep:
        self._state = self._executor.advance(self._filters, hidden, self._state)
        found = [self._state["token"]]
        if "logprob" in self._state:
            found.append(self._state["logprob"])
        self._executor.engine.launch(found)
        return _OnDevice(self._executor.engine, *found)

    def _sizes(self) -> ChunkSizes:
        return ChunkSizes.of(self._executor, self.rows)

    def _seen(self, prompts: Prompts) -> Any:
        seen = np.zeros((self.rows, self._executor.vocabulary), bool)
        for row, prompt in enumerate(prompts):
            seen[row, list(prompt)] = True
        return seen


def runner_for(executor: DecoderExecutor, rows: int, slots: int) -> ReplyRunner:
    """What computes a batch of so many rows and slots."""
    from anydevice._llm.capture import captured_runner

    return captured_runner(executor, rows, slots) or OpsRunner(executor, rows, slots)


class _OnDevice:
    """Arrays of one step, read when they are needed."""

    def __init__(self, engine: Engine, token: Array, logprob: Array | None = None) -> None:
        self._engine, self._token, self._logprob = engine, token, logprob

    def read(self) -> tuple[Array, Array | None]:
        logprob = None if self._logprob is None else self._engine.to_host(self._logprob)
        return self._engine.to_host(self._token), logprob


def score(executor: DecoderExecutor, ids: Sequence[int], context: int, room: int) -> list[float]:
    """The log probability of each token but the first, given those before it.

    Like a reply, it has the one cache that is kept; logits take `room` bytes, as far as possible.
    """
    inputs, targets = ids[:-1], np.asarray(ids[1:], np.int32)
    slots = slots_for(executor, 1, len(inputs), 1, context)
    runner = executor.idle_runner(1, slots) or runner_for(executor, 1, slots)
    sizes = ChunkSizes.of(executor, 1, SCORED)
    together = _scored_together(executor, room)
    found: list[tuple[Array, int]] = []
    with executor.lock():
        cache = runner.new_text()
    for piece, start, count in pieces([inputs], sizes):
        wanted = np.zeros_like(piece)
        wanted[0, : count[0]] = targets[start[0] : start[0] + count[0]]
        with executor.lock():
            placed = executor.place(piece), executor.place(start), executor.place(count)
            x = executor.forward(*placed, cache, not any(start), executor.lengths([inputs]))
        for at in range(0, count[0], together):
            end = min(at + together, piece.shape[1])
            with executor.lock():
                scores = executor.scores(
                    ops.slice_axis(x, 1, at, end), executor.place(wanted[:, at:end])
                )
                executor.engine.launch([scores])
            found.append((scores, min(end, count[0]) - at))
    values = np.concatenate([executor.engine.to_host(s)[0, :count] for s, count in found])
    finite = np.isfinite(values)
    if not finite.all():
        raise not_finite(executor, f"token {int(finite.argmin()) + 2} of the text")
    executor.keep_runner(1, slots, runner)
    return [float(value) for value in values]


def _scored_together(executor: DecoderExecutor, room: int) -> int:
    """Tokens whose logits, in float32 and twice more for the sum, fit: 1, 2, 4 … up to a piece."""
    fit = room // (3 * 4 * executor.vocabulary)
    return min(SCORED, 1 << max(0, fit.bit_length() - 1))


def not_finite(executor: DecoderExecutor, where: str) -> VerificationError:
    """The error for logits that are not finite: it names the first weight that is not, if any."""
    begun = f"the logits of {where} are NaN or infinite"
    tree = executor.parameters
    for name, weight in zip(leaf_names(tree), leaves(tree), strict=True):
        if not _is_finite(executor, weight):
            return VerificationError(
                f"{begun}, because the weight {name[1:]} has such numbers: the files of the model "
                "are damaged; download them again",
                where=name[1:],
            )
    like = executor.parameters["embedding"]
    dtype = primitives(like).dtype(like).name
    advice = f"'anydevice verify --device {executor.device}' says whether an op is wrong there"
    if dtype == "float16":
        advice = "numbers went beyond float16: load the model with dtype='bfloat16' or 'float32'"
    return VerificationError(f"{begun}, and all weights are finite; {advice}", where=where)


def _is_finite(executor: DecoderExecutor, weight: Array) -> bool:
    """Whether all numbers of a weight are; little of it is widened at a time."""
    rows = weight.shape[0]
    step = max(1, LOOKED_AT * rows // math.prod(weight.shape))
    with executor.lock():
        parts = (ops.slice_axis(weight, 0, at, min(rows, at + step)) for at in range(0, rows, step))
        totals = [ops.sum(ops.astype(part, DTYPES["float32"])) for part in parts]
    return all(np.isfinite(executor.engine.to_host(total)) for total in totals)
