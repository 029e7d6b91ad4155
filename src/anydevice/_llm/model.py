"""A language model on a device: prompts in, replies out."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, Self, TypedDict, Unpack, overload

from anydevice._core import checks
from anydevice._core.device import Device
from anydevice._core.locks import ExitLock
from anydevice._core.names import other_keywords
from anydevice._core.record import NOTHING, Record
from anydevice._core.text import format_count, format_size, warn
from anydevice._formats.gguf import read_gguf, sampling_values
from anydevice._formats.load import Joined, Stored, load_joined
from anydevice._llm.capture import check_kernels
from anydevice._llm.decoder import Parameters
from anydevice._llm.description import Description, describe
from anydevice._llm.generate import DecoderExecutor, Executor, Prompts, Step, replies, score
from anydevice._llm.sampling import GenerationOptions, Sampling, generation_options, sampling
from anydevice._llm.template import refuse_images
from anydevice._llm.text import TextStream
from anydevice._llm.tokenizer import CONFIG, GENERATION, TOKENIZER, Tokenizer, read_values
from anydevice._llm.weights import (
    TreePath,
    lay_out_matrices,
    plan_parameters,
    runnable_dtype,
    tree_of,
    weights_option,
)
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice._plan.config import (
    ModelFiles,
    gguf_config,
    is_gguf_path,
    locate,
    read_config,
    title_of,
)
from anydevice._plan.plan import LOADED_CONTEXT, Plan, loading_options, plan_inference
from anydevice.errors import ConfigurationError, OutOfMemoryError, UnsupportedError

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
"""A text to continue, a conversation, or tokens."""

CPU_ENGINES = ("jax", "torch", "mlx")
"""Engines preferred to NumPy on a CPU by default. They are about equally fast on an idle machine;
on a busy one JAX was ten times as fast as the others, because their threads wait for each other.
"""
SMALL = 32 * 2**20
"""Largest bytes of weights for which NumPy replies before another library is even imported."""


class Speed(Record):
    """The speed of a reply: seconds to the first token, and tokens per second.

    `prefill` counts prompt tokens per second until the first token of the reply. `decode` counts
    reply tokens per second after that; it is 0 for a reply of one token.
    """

    prompt_tokens: int
    first_token: float
    prefill: float
    decode: float


class Reply(Record):
    """The reply of a model.

    `ended` is the reason for the end: `"stop"`, the model's end token; `"stop string"`; `"length"`,
    `max_tokens` or a full context; `"interrupted"`, a closed stream. `tokens` excludes the end
    token; after a stop string, it includes the tokens of that string, although `text` does not.
    `logprobs` are the model's own log probabilities of the tokens, before temperature, filters and
    penalty; `None` if they were not requested.
    """

    text: str
    tokens: tuple[int, ...]
    ended: str
    logprobs: tuple[float, ...] | None
    speed: Speed

    def __str__(self) -> str:
        return self.text


class Score(Record):
    """The log probability of each token of a text but the first, given the tokens before it.

    `total` is their sum; `perplexity` is exp of minus their mean.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """The log probability of the whole text, given its first token."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """1 for a text that was certain; the size of the vocabulary for a guess."""
        mean = -self.total / len(self.logprobs)
        return math.exp(mean) if mean < 700 else math.inf  # exp would overflow


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate`, for type checkers."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    stop: str | Sequence[str] | None
    seed: int | None
    logprobs: bool
    reuse: bool


@other_keywords("loading")
def load(
    folder: str | os.PathLike[str],
    device: Device | str | None = None,
    dtype: object = None,
    context: int | None = None,
    *,
    engine: str | None = None,
    weights: str = "stored",
    activations: str | None = None,
    progress: bool | None = None,
) -> LanguageModel:
    """Load the language model in a folder onto a device, ready to generate.

    `folder` is a Hugging Face folder with `config.json`, safetensors files and `tokenizer.json`;
    the name of a model in the local Hugging Face cache; a GGUF file; or a folder with one. Nothing
    in it is executed.

    `anydevice.device(device, engine=engine)` chooses the device. Without an engine, NumPy runs a
    CPU only if the model is small or no other engine is installed. The weights are in `dtype`; the
    default is the dtype of the files, but float32 on the CPU. `context` is the most tokens of
    prompt and reply together; the default is the model's longest context, up to 8192, or a shorter
    one that fits. Memory is planned before anything is loaded.

    With `weights="stored"`, quantized weights stay as the files have them, and `dtype` is that of
    everything else; `"float"` unpacks them into `dtype`. A scheme, such as "q8_0", "q4_k" or "fp8",
    quantizes the matrices while they are loaded, a few rows at a time. With `activations="exact"`,
    activations are never quantized, however much faster that would be.

    A slow load shows its progress on a terminal and in a notebook; `progress=False` turns that off,
    `progress=True` shows it from the start.

    Raises `OutOfMemoryError` if the model does not fit, and says which options would;
    `UnsupportedError` for a kind of model that cannot be run; `ConfigurationError` and
    `TransferError` for missing or invalid files, naming them.
    """
    path = locate(os.fspath(folder))
    if isinstance(device, list | tuple):
        raise UnsupportedError(f"a model runs on one device here; {_SEVERAL}")
    if (path / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{path} is an adapter, which changes the weights of a model; merge both with peft "
            "(merge_and_unload, then save_pretrained), and load what it saves"
        )
    if activations is not None:
        checks.one_of("activations", activations, ("exact",))
    target = one_device(device, engine=engine)
    file = read_gguf(path) if is_gguf_path(path) else None
    config = read_config(path) if file is None else gguf_config(file)
    description = describe(config)  # a model that cannot be run needs no plan
    kept = weights_option(weights, description)
    if dtype is not None:
        dtype = runnable_dtype(dtype).name
    limit = _context(context, config.optional("longest_context"))
    options = {"dtype": dtype, "weights": weights}
    plan = _plan(ModelFiles(path, config), target, options, limit, given=context is not None)
    dtype = plan.estimate.dtype
    stored = plan_parameters(file or path, description, dtype, kept)
    if file is None:
        generation = read_values(path / GENERATION)
        known = {CONFIG: config.raw, GENERATION: generation}
        tokenizer = Tokenizer.from_folder(path, known)
        defaults = _generation_defaults(generation, path / GENERATION)
    else:
        tokenizer = Tokenizer.from_gguf(file)
        defaults = _checked_sampling(sampling_values(file), path)
    executor: Executor | None = None
    if target.backend == "cpu" and target.engine_is_free and activations is None:
        executor = _session_executor(description, stored, target, plan, progress)
    if executor is None:
        target = _with_fast_engine(target, plan.estimate.weights)
        if target.backend == "cuda":
            check_kernels(target, dtype)
        if target.backend == "cpu" and target.engine == "jax" and dtype in ("bfloat16", "float16"):
            warn(
                f"JAX computes {dtype} on a CPU in three times the time of float32 or more: leave "
                "dtype= out, or name another engine"
            )
        parameters = lay_out_matrices(tree_of(load_joined(stored, target, progress)))
        executor = DecoderExecutor(description, parameters, target, exact=activations is not None)
    model = LanguageModel.__new__(LanguageModel)
    model._begin(executor, tokenizer, plan, title_of(path), defaults)
    return model


class LanguageModel:
    """A decoder on a device, with its tokenizer. `llm.load` makes one.

    `description` describes the decoder, `plan` its memory; `context` is the most tokens of prompt
    and reply together. `generation_defaults` are the options of `generate` that the model's files
    recommend, possibly none; `generate` does not apply them by itself. Several threads may use one
    model: their steps take turns, and each running reply has its own cache.
    """

    def __init__(
        self,
        description: Description,
        parameters: Parameters,
        tokenizer: Tokenizer,
        device: Device,
        plan: Plan,
        name: str = "model",
        generation_defaults: Mapping[str, Any] = NOTHING,
    ) -> None:
        executor = DecoderExecutor(description, parameters, device, exact=False)
        self._begin(executor, tokenizer, plan, name, generation_defaults)

    def _begin(
        self, executor: Executor, tokenizer: Tokenizer, plan: Plan, name: str,
        generation_defaults: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.description, self.tokenizer = executor.description, tokenizer
        self.device, self.plan, self.name = executor.device, plan, name
        self.generation_defaults = dict(generation_defaults)
        self.context = plan.estimate.context
        self.dtype = plan.estimate.dtype
        self._executor = executor

    def __repr__(self) -> str:
        estimate = self.plan.estimate
        scheme = estimate.shape.quantization if estimate.shape else None
        dtype = f"{scheme} with {self.dtype}" if scheme else self.dtype
        model = f"{self.name}: {format_count(estimate.parameters)} parameters in {dtype}"
        where = f"on {self.device} ({self.executor})"
        return f"<{model}, {where}, context {self.context}, {format_size(estimate.total)}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            f"{self.name} is on {self.device}, and cannot be copied or pickled: load it in each "
            "process that needs it; threads of one process share a model"
        )

    @property
    def executor(self) -> str:
        """The library that computes: `"onnxruntime"`, or the engine of `device`."""
        return self._executor.name

    @property
    def parameters(self) -> Parameters:
        """The tree of weights."""
        return self._executor.parameters

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, max_tokens: int = 200, **options: Unpack[GenerateOptions]
    ) -> Reply: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], max_tokens: int = 200, **options: Unpack[GenerateOptions]
    ) -> list[Reply]: ...
    @other_keywords("generation")
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_tokens: int = 200,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        logprobs: bool = False,
        reuse: bool = False,
    ) -> Any:
        """Reply to a prompt, or to a list of several, which are computed together.

        A prompt is a text, which is continued; messages, dicts of `role` and `content`, which the
        model's chat template renders; or a list of tokens. A prompt as long as the context is an
        error.

        Without `temperature` and filters, sampling is greedy. Otherwise tokens are drawn: first
        `repetition_penalty` lowers the logits of tokens that are in the prompt or the reply, then
        logits are divided by the temperature, `top_k` keeps the likeliest tokens,
        `top_p` the fewest that together have this probability, `min_p` those with at least this
        share of the largest probability. The same `seed` gives the same reply, on every engine up
        to rounding; prompt i of several uses `seed` + i. A reply ends with the model's end token,
        before one of the strings in `stop`, after `max_tokens` tokens, or when the context is full.

        With `reuse`, a single prompt that begins with the last prompt and its reply is not read
        again from the start: the next turn of a conversation begins sooner. Results may differ by
        rounding from those of a prompt that is read as a whole.

        Raises `VerificationError` if logits are NaN or infinite, naming such a weight if any.
        """
        several, prompts, continued = self._prompts(prompt)
        choice = sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed, logprobs)
        options = generation_options(choice, max_tokens, stop, reuse)
        batch = _ReplyBatch(self, prompts, continued, options)
        for _ in batch.texts():
            pass
        results = [row.reply(batch.clock) for row in batch.rows]
        return results if several else results[0]

    @other_keywords("generation")
    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 200,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        logprobs: bool = False,
        reuse: bool = False,
    ) -> ReplyStream:
        """Stream the text of a reply as it is computed; the options are those of `generate`.

        The parts, joined, are the text that `generate` returns. `reply` has everything else, after
        the last part or when the stream was closed.
        """
        several, prompts, continued = self._prompts(prompt)
        if several:
            raise ConfigurationError(
                "stream takes one prompt, and this is a list of several; use generate", "prompt"
            )
        choice = sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed, logprobs)
        options = generation_options(choice, max_tokens, stop, reuse)
        return ReplyStream(_ReplyBatch(self, prompts, continued, options))

    def score(self, text: str | Sequence[int]) -> Score:
        """Score a text: the log probability of each token.

        It overwrites the one cache that memory is planned for: the next turn of a conversation with
        `reuse` is read again from its start.

        Raises `ConfigurationError` if it has fewer than two tokens, or more than the context.
        """
        ids = self._encode(text) if isinstance(text, str) else self._tokens(text)
        if len(ids) < 2:
            raise ConfigurationError(
                f"a text to score has at least 2 tokens, and this has {len(ids)}", "text"
            )
        self._check_length(len(ids), self.context)
        room = self.plan.estimate.activations + self.plan.estimate.logits
        return Score(tuple(ids), tuple(score(self._executor, ids, self.context, room)))

    def steps(
        self, prompts: Prompts, sampling: Sampling, max_tokens: int, reuse: bool = False
    ) -> Iterator[Step]:
        """Yield the tokens (rows,) and log probabilities of up to `max_tokens` steps."""
        return replies(self._executor, prompts, sampling, max_tokens, self.context, reuse)

    def _prompts(self, prompt: Any) -> tuple[bool, list[list[int]], list[bool]]:
        """Return whether there are several prompts, their tokens, and whether each is a text."""
        if isinstance(prompt, str) or not _is_list(prompt):
            return False, [self._ids(prompt)], [True]
        if not prompt:
            raise ConfigurationError("there is no prompt: the list is empty", "prompt")
        one = isinstance(prompt[0], Mapping) or _is_integer(prompt[0])
        prompts = [prompt] if one else prompt
        return not one, list(map(self._ids, prompts)), [isinstance(p, str) for p in prompts]

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            ids = self._encode(prompt)
        elif _is_list(prompt) and prompt and _is_integer(prompt[0]):
            ids = self._tokens(prompt)
        elif _is_list(prompt) and prompt and isinstance(prompt[0], Mapping):
            refuse_images(prompt)
            ids = self._check_tokens(self.tokenizer.encode_chat(prompt))
        else:
            raise ConfigurationError(
                "a prompt must be a str, a list of messages (dicts of role and content) or a list "
                f"of tokens, not {type(prompt).__name__}",
                "prompt",
            )
        if not ids:
            raise ConfigurationError(
                "the prompt is empty, and this model has no token that begins a text", "prompt"
            )
        self._check_length(len(ids), self.context - 1)
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._check_tokens(self.tokenizer.encode(text))

    def _check_tokens(self, ids: list[int]) -> list[int]:
        """Return tokens of the tokenizer; raise `ConfigurationError` if the model lacks one."""
        if ids and max(ids) >= self.description.vocabulary:
            raise ConfigurationError(
                f"the tokenizer gives token {max(ids)} for this text, and the model has only "
                f"{self.description.vocabulary}: {TOKENIZER} belongs to another model",
                "prompt",
            )
        return ids

    def _tokens(self, ids: Sequence[int]) -> list[int]:
        known = self.description.vocabulary
        if not _is_list(ids):
            raise ConfigurationError(
                f"text must be a str or a list of tokens, not {type(ids).__name__}", "text"
            )
        return [checks.integer("a token", token, 0, known - 1) for token in ids]

    def _check_length(self, length: int, limit: int) -> None:
        if length > limit:
            raise ConfigurationError(
                f"the prompt has {length} tokens, and the context of {self.context} tokens has "
                f"room for {limit} of them; shorten it, or load the model with a larger context",
                "prompt",
            )


class ReplyStream:
    """The pieces of one reply; an iterator, and a context manager that closes it.

    `reply` is the whole reply after the last piece, or the reply so far if the stream was closed
    or interrupted by Ctrl-C.
    """

    def __init__(self, batch: _ReplyBatch) -> None:
        self._batch = batch
        self._texts = batch.texts()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while True:
            text = next(self._texts)[0]
            if text:
                return text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reply here."""
        self._texts.close()

    @property
    def reply(self) -> Reply:
        """The reply so far; `ended` is `"interrupted"` if it is not complete."""
        return self._batch.rows[0].reply(self._batch.clock)


class _Clock:
    """The times of a generation's start and of its tokens."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._came: list[float] = []

    def tick(self) -> None:
        """Record the time of a token of each row."""
        self._came.append(time.perf_counter())

    @property
    def first_token(self) -> float:
        """The seconds until the first token; 0 if there is none."""
        return self._came[0] - self._began if self._came else 0.0

    def rate(self, tokens: int) -> float:
        """Return the tokens per second after the first of `tokens`; 0 for fewer than two."""
        if tokens < 2 or len(self._came) < tokens:
            return 0.0
        return (tokens - 1) / max(1e-9, self._came[tokens - 1] - self._came[0])


class _Row:
    """One reply as it grows."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], continued: bool, limit: int,
        options: GenerationOptions,
    ) -> None:  # fmt: skip
        # A continued text keeps the space in between; a reply to messages starts a new text.
        self._stream = TextStream(tokenizer, options.stop, prompt if continued else ())
        self._ends, self._limit, self._prompt = tokenizer.eos_ids, limit, len(prompt)
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] | None = [] if options.sampling.logprobs else None
        self.ended = ""

    def take(self, token: int, logprob: float | None) -> str:
        """Return the text that a token adds."""
        if self.ended:
            return ""
        if token in self._ends:
            return self._end("stop", "")
        self._tokens.append(token)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        text = self._stream.push(token)
        if self._stream.stopped:
            return self._end("stop string", text)
        if len(self._tokens) == self._limit:
            return self._end("length", text)
        self._texts.append(text)
        return text

    def _end(self, reason: str, text: str) -> str:
        text += self._stream.finish()
        self.ended = "stop string" if self._stream.stopped else reason
        self._texts.append(text)
        return text

    def reply(self, clock: _Clock) -> Reply:
        """Return the reply so far."""
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        first, decode = clock.first_token, clock.rate(len(self._tokens))
        speed = Speed(self._prompt, first, self._prompt / first if first else 0.0, decode)
        ended = self.ended or "interrupted"
        return Reply("".join(self._texts), tuple(self._tokens), ended, logprobs, speed)


class _ReplyBatch:
    """Several replies that are computed together."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: Prompts,
        continued: Sequence[bool],
        options: GenerationOptions,
    ) -> None:
        limits = [min(options.max_tokens, model.context - len(prompt)) for prompt in prompts]
        self._model, self._prompts, self._options = model, prompts, options
        self._max_tokens = max(limits)
        self._lock = ExitLock()
        self.clock = _Clock()
        self.rows = [
            _Row(model.tokenizer, prompt, is_text, limit, options)
            for prompt, is_text, limit in zip(prompts, continued, limits, strict=True)
        ]

    def texts(self) -> Generator[list[str]]:
        """Yield the text that each step adds to each row, until all rows have ended."""
        steps = self._compute()
        while True:
            with self._lock.native:
                texts = next(steps, None)
            if texts is None:
                return
            yield texts

    def _compute(self) -> Generator[list[str]]:
        self.clock = _Clock()  # a stream may be read long after it was made
        sampling, reuse = self._options.sampling, self._options.reuse
        steps = self._model.steps(self._prompts, sampling, self._max_tokens, reuse)
        for tokens, logprobs in steps:
            self.clock.tick()
            texts, open_rows = [], 0
            for number, row in enumerate(self.rows):
                logprob = None if logprobs is None else float(logprobs[number])
                texts.append(row.take(int(tokens[number]), logprob))
                open_rows += not row.ended
            yield texts
            if not open_rows:
                return


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    """Whether a value is a list of tokens; bytes, although a sequence of integers, are not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _session_executor(
    description: Description, stored: Mapping[TreePath, Stored], device: Device, plan: Plan,
    progress: bool | None,
) -> Executor | None:  # fmt: skip
    """Return an executor of onnxruntime for quantized weights, or None with the reason logged."""
    if {*map(type, stored.values())} == {Joined}:
        return None
    try:
        from anydevice._llm.graph import graph_executor

        arguments = description, stored, device, plan.estimate.context, progress
        return graph_executor(*arguments)
    except (ImportError, UnsupportedError) as error:
        logging.getLogger("anydevice").debug("onnxruntime is not used: %s", error)
        return None


def _with_fast_engine(device: Device, weights: int) -> Device:
    """Return the device; a CPU with NumPy by default gets a faster engine for a large model."""
    status = device.status
    if device.engine != "numpy" or not device.engine_is_free or weights <= SMALL or not status:
        return device
    usable = [engine for engine in CPU_ENGINES if engine in status.engines]
    imported = [engine for engine in usable if engine in registry.loaded_engines()]
    engine = next(iter([*imported, *usable]), "numpy")
    return device.served_by(engine, device.chosen_by, picked=True)


def _plan(
    files: ModelFiles, device: Device, own: Mapping[str, Any], context: int, given: bool
) -> Plan:
    """Plan a model on a device, with a smaller context if the caller did not set one."""
    options = {**own, **loading_options(device.kind == "cpu", own["dtype"])}
    plan = plan_inference(files, device, context=context, **options)
    if plan.device == device or not plan.placements:  # no placements: its memory is unknown
        return plan
    smaller = [change for change in plan.alternatives if change.change == "context"]
    if smaller and not given:
        return plan_inference(files, device, context=int(smaller[0].value), **options)
    needed, free = plan.estimate.total, plan.free
    advice = [
        f"{option.change}={option.value!r}"
        for option in plan.alternatives
        if option.change in ("context", "dtype", "weights")
    ]
    elsewhere = plan_inference(files, context=context, **options)
    if elsewhere.device not in (None, device):
        advice.append(f"device={str(elsewhere.device)!r}")
    then = f"; llm.load would fit with {' or '.join(advice)}" if advice else ""
    raise OutOfMemoryError(
        f"{title_of(files.path)} does not fit on {device}: it needs {format_size(needed)} with a "
        f"context of {context}, and {format_size(free)} are free{then or '; ' + _SEVERAL}",
        asked=needed,
        free=free,
        device=device,
        advice=advice,
    )


_SEVERAL = "several devices together are used by vLLM, or by transformers with device_map='auto'"


def _context(given: int | None, longest: int | None) -> int:
    if given is None:
        return min(longest or LOADED_CONTEXT, LOADED_CONTEXT)
    given = checks.integer("context", given, 2)
    if longest is not None and given > longest:
        raise ConfigurationError(
            f"a context of {given} tokens is more than the {longest} that the model supports",
            "context",
        )
    return int(given)


def _generation_defaults(values: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return the options of `generate` that a `generation_config.json` recommends."""
    if not values:
        return {}
    if not values.get("do_sample"):
        return {"temperature": 0.0}  # greedy, as in transformers
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    options = {name: values[name] for name in names if values.get(name) is not None}
    # By default, sample from the model's own probabilities.
    return _checked_sampling({"temperature": 1.0, **options}, source)


def _checked_sampling(options: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return options of `generate`; raise `ConfigurationError`, with the file, if one is wrong."""
    try:
        sampling(**options)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}", str(source)) from error
    return options
