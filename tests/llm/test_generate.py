"""From prompts to replies on a trained model, through `llm.load`: the same on every engine."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import llm, to_numpy
from anydevice._core.record import replace
from anydevice._llm import decoder
from anydevice._llm import generate as generation
from anydevice._llm.generate import CachedTokens, ChunkSizes, DecoderExecutor, chunks, run_steps
from anydevice._llm.sampling import sampling
from anydevice.errors import (
    ConfigurationError,
    OutOfMemoryError,
    UnsupportedError,
    VerificationError,
)
from tests.nn.conftest import ENGINES, device_of_engine

OPENING = "Once upon a time, there was a little girl named Lily."


_loaded: dict[str, llm.LanguageModel] = {}


def loaded(stories: Path, name: str) -> llm.LanguageModel:
    if name not in _loaded:
        _loaded[name] = llm.load(stories, device_of_engine(name))
    return _loaded[name]


SLOW = pytest.param("opencl", marks=pytest.mark.soak)
"""Without an accelerator it takes ten times as long as others: the long forms run it in full."""


@pytest.fixture(params=("numpy", "torch", "jax", "mlx", SLOW))
def model(request: pytest.FixtureRequest, stories: Path) -> llm.LanguageModel:
    return loaded(stories, request.param)


@pytest.fixture
def one(stories: Path) -> llm.LanguageModel:
    """A model on the engine that is fastest for so small a one."""
    return loaded(stories, "numpy")


def test_opencl_gives_the_same_tokens(stories: Path, one: llm.LanguageModel) -> None:
    """What the long forms of the tests below show, in short."""
    model = loaded(stories, "opencl")
    prompts = ["", OPENING]
    for options in ({}, {"temperature": 0.9, "top_p": 0.95, "seed": 5}):
        expected = one.generate(prompts, 6, logprobs=True, **options)  # type: ignore[arg-type]
        found = model.generate(prompts, 6, logprobs=True, **options)  # type: ignore[arg-type]
        assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
        assert found[1].logprobs == pytest.approx(expected[1].logprobs, abs=1e-4)


def test_the_golden_text(model: llm.LanguageModel, stories: Path) -> None:
    reply = model.generate("", 200)
    assert reply.text.strip() == (stories / "golden.txt").read_text("utf-8").strip()
    assert (len(reply.tokens), reply.ended, reply.logprobs) == (200, "length", None)
    assert reply.speed.prompt_tokens == 1
    assert reply.speed.decode > 0 < reply.speed.first_token


SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


def test_five_seeds_give_the_same_text_everywhere(model: llm.LanguageModel, stories: Path) -> None:
    numpy = loaded(stories, "numpy")
    texts = []
    for seed, options in enumerate(SEEDED):
        expected = numpy.generate(OPENING, 40, seed=seed, **options)
        found = model.generate(OPENING, 40, seed=seed, **options)
        assert found.text == expected.text
        texts.append(found.text)
    assert len(set(texts)) == 5


def test_prompts_of_unequal_lengths_get_what_they_get_alone(model: llm.LanguageModel) -> None:
    prompts = ["", OPENING, f"{OPENING} She had a red ball and a big dog. One day", "Tom"]
    for options in ({}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.3}):
        together = model.generate(prompts, 24, **options)  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts):
            own = {**options, "seed": 5 + number} if "seed" in options else options
            assert model.generate(prompt, 24, **own).tokens == together[number].tokens  # type: ignore[arg-type]
    assert len({reply.tokens for reply in together}) == 4


def test_prompts_come_in_pieces(model: llm.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [model.tokenizer.encode(OPENING * count) for count in (3, 1, 2)]
    expected = [reply.tokens for reply in model.generate(prompts, 8)]
    monkeypatch.setattr(generation, "PREFILL_CHUNK", {"cpu": 48, "other": 48})
    monkeypatch.setattr(generation, "CHUNK_SIZES", (4, 16))
    assert [reply.tokens for reply in model.generate(prompts, 8)] == expected


@pytest.mark.parametrize(
    "sizes", [ChunkSizes(7), ChunkSizes(100, (4, 16, 64)), ChunkSizes(1, (4, 16))]
)
def test_pieces_hold_each_token_once_at_its_place(sizes: ChunkSizes) -> None:
    prompts = [list(range(1, length + 1)) for length in (1, 200, 37, 64)]
    found: list[list[int]] = [[] for _ in prompts]
    touched = 0
    for ids, start, count in chunks(prompts, sizes):
        assert not sizes.fixed or ids.shape[1] in sizes.fixed
        assert ids.shape[1] <= sizes.largest
        for row, own in enumerate(found):
            assert start[row] == len(own) or not count[row]
            own += ids[row, : count[row]].tolist()
            touched = max(touched, (start[row] + ids.shape[1]) * (count[row] > 0))
    assert found == prompts
    assert touched <= sizes.padded(200)


class _Recorder:
    """A runner that notes when steps are begun and when they are read."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.synchronous, self.cached = runner, runner.synchronous, CachedTokens()
        self.events: list[tuple[str, int]] = []

    def prefill(self, *arguments: Any) -> Any:
        return self._noted(0, self._runner.prefill(*arguments))

    def step(self) -> Any:
        return self._noted(sum(kind == "began" for kind, _ in self.events), self._runner.step())

    def _noted(self, number: int, step: Any) -> Any:
        def read() -> Any:
            self.events.append(("read", number))
            return step.read()

        self.events.append(("began", number))
        return SimpleNamespace(read=read)


@pytest.mark.parametrize("name", ENGINES)
def test_the_host_reads_a_token_while_the_next_is_computed(stories: Path, name: str) -> None:
    executor = loaded(stories, name)._executor
    runner: Any = _Recorder(generation.runner_for(executor, 1, 64))
    steps = run_steps(runner, executor, [[1]], sampling(), 4)
    tokens = [int(token[0]) for token, _ in steps]
    assert tokens == list(loaded(stories, name).generate("", 4).tokens)
    order = {event: number for number, event in enumerate(runner.events)}
    late = name not in generation.SYNCHRONOUS  # which return from a step when it is done
    for number in range(3):
        assert (order["began", number + 1] < order["read", number]) == late
    assert len(runner.events) == 8  # no step is begun that nobody reads


def test_jax_writes_into_the_cache_that_it_was_given(stories: Path) -> None:
    executor = loaded(stories, "jax")._executor
    runner = generation.OpsRunner(executor, 1, 64)
    steps = run_steps(runner, executor, [[1]], sampling(), 6)
    next(steps)
    addresses = [layer["keys"].unsafe_buffer_pointer() for layer in runner._cache]
    for _ in range(3):
        next(steps)
    assert [layer["keys"].unsafe_buffer_pointer() for layer in runner._cache] == addresses


def test_jax_compiles_a_layer_of_each_kind(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = counted(monkeypatch, decoder, "run_layer")  # called only to be traced
    model = llm.load(stories, device_of_engine("jax"))
    model.generate(OPENING, 4)
    assert len(model.description.layers) == 5
    assert len(traced) == 2  # one for prompts, one for steps
    model.generate(OPENING + " She had a dog.", 30)
    assert len(traced) == 2  # same sizes: same programs


def test_jax_compiles_one_small_top_k(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = counted(monkeypatch, generation, "select_token")
    model, numpy = llm.load(stories, device_of_engine("jax")), loaded(stories, "numpy")
    model.generate("", 2, top_k=7, seed=1)
    before = len(traced)
    assert before > 0
    for top_k in (1, 20, 64):
        found = model.generate("", 12, temperature=1.5, top_k=top_k, seed=1)
        assert len(traced) == before
        assert found.tokens == numpy.generate("", 12, temperature=1.5, top_k=top_k, seed=1).tokens
        before = len(traced)
    for top_k in (8**n for n in range(3, 20)):  # more kinds than are kept
        model._executor._select(sampling(top_k=top_k).filters)
    assert model._executor._select.cache_info().currsize == generation.KINDS_OF_SAMPLING


def counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[None]:
    """One entry a call of a function of a module from now on."""
    function, calls = getattr(module, name), list[None]()

    @wraps(function)  # the compiler reads its signature
    def noted(*arguments: Any) -> Any:
        calls.append(None)
        return function(*arguments)

    monkeypatch.setattr(module, name, noted)
    return calls


def test_a_reply_ends_before_a_stop_string(one: llm.LanguageModel) -> None:
    whole = one.generate(OPENING, 60)
    stop = whole.text[40:52]
    reply = one.generate(OPENING, 60, stop=["not there", stop])
    assert reply.ended == "stop string"
    assert reply.text == whole.text[: whole.text.index(stop)]
    assert reply.tokens == whole.tokens[: len(reply.tokens)]
    pieces = one.stream(OPENING, 60, stop=stop)
    assert "".join(pieces) == reply.text
    assert pieces.reply.ended == "stop string"


def test_a_reply_ends_where_the_model_ends_it(one: llm.LanguageModel) -> None:
    whole = one.generate(OPENING, 30)
    ends = one.tokenizer.eos_ids
    try:
        one.tokenizer.eos_ids = (whole.tokens[12],)
        first = whole.tokens.index(whole.tokens[12])
        reply = one.generate(OPENING, 30, logprobs=True)
        assert (reply.ended, reply.tokens) == ("stop", whole.tokens[:first])
        assert reply.logprobs is not None
        assert len(reply.logprobs) == first
        other = one.generate([OPENING, ""], 30)  # one row ends, the other goes on
        assert other[0].tokens == reply.tokens
    finally:
        one.tokenizer.eos_ids = ends


def test_a_full_context_ends_a_reply(stories: Path, model: llm.LanguageModel) -> None:
    small = llm.load(stories, model.device, context=24)
    assert small.context == 24
    prompt = model.tokenizer.encode(OPENING)
    assert len(prompt) < 24
    reply = small.generate(OPENING, 100)
    assert (reply.ended, len(reply.tokens)) == ("length", 24 - len(prompt))
    assert reply.tokens == model.generate(OPENING, 24 - len(prompt)).tokens
    both = small.generate([OPENING, ""], 100)
    assert [len(each.tokens) for each in both] == [24 - len(prompt), 23]
    assert both[1].tokens == model.generate("", 23).tokens


def test_a_prompt_that_is_too_long_names_both_numbers(one: llm.LanguageModel) -> None:
    for length in (512, 700):
        with pytest.raises(ConfigurationError, match=rf"{length} tokens.* context of 512"):
            one.generate([5] * length)
    assert len(one.generate([5] * 511, 10).tokens) <= 1
    with pytest.raises(ConfigurationError, match=r"513 tokens.* context of 512"):
        one.score([5] * 513)


def test_pieces_of_a_stream_are_the_text(model: llm.LanguageModel) -> None:
    expected = model.generate(OPENING, 20, temperature=0.7, seed=3, logprobs=True)
    stream = model.stream(OPENING, 20, temperature=0.7, seed=3, logprobs=True)
    found = list(stream)
    assert all(found)
    assert len(found) > 5
    assert "".join(found) == expected.text
    reply = stream.reply
    assert (reply.text, reply.tokens, reply.ended) == (expected.text, expected.tokens, "length")
    assert reply.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_streams_may_be_closed(model: llm.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.generate(OPENING, 12)
    with model.stream(OPENING, 100) as stream:
        first = next(stream)
    assert list(stream) == []
    assert stream.reply.ended == "interrupted"
    assert stream.reply.text == first
    for _ in model.stream(OPENING, 100):
        break
    held = model.stream(OPENING, 12)  # one that is still open, in the same thread
    start = next(held)
    assert model.generate(OPENING, 12).tokens == expected.tokens
    assert start + "".join(held) == expected.text

    stream = model.stream(OPENING, 100)
    next(stream)
    forward = DecoderExecutor.forward
    with monkeypatch.context() as patch:

        def interrupted(self: DecoderExecutor, *arguments: Any) -> Any:
            forward(self, *arguments)  # the caches that were given are gone by now
            raise KeyboardInterrupt

        patch.setattr(DecoderExecutor, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in stream:
                pass
    assert stream.reply.ended == "interrupted"
    assert expected.text.startswith(stream.reply.text)
    assert model.generate(OPENING, 12).tokens == expected.tokens


def test_threads_use_one_model(model: llm.LanguageModel) -> None:
    prompts = ["", OPENING, "Tom", "Lily"]
    expected = [model.generate(prompt, 10).tokens for prompt in prompts]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = model.generate(prompts[number], 10).tokens

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found.get(number) for number in range(4)] == expected


def test_log_probabilities_of_a_reply_are_its_score(model: llm.LanguageModel) -> None:
    prompt = model.tokenizer.encode(OPENING)
    reply = model.generate(OPENING, 12, temperature=1.5, top_k=30, seed=2, logprobs=True)
    score = model.score([*prompt, *reply.tokens])
    np.testing.assert_allclose(score.logprobs[len(prompt) - 1 :], reply.logprobs, atol=2e-4)
    assert len(score.logprobs) == len(score.tokens) - 1


def in_transformers(stories: Path) -> tuple[Any, Any]:
    """PyTorch, and the model in transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    make = transformers.AutoModelForCausalLM.from_pretrained
    return torch, make(stories, dtype=torch.float32)


def test_a_text_is_scored_as_transformers_does(model: llm.LanguageModel, stories: Path) -> None:
    torch, theirs = in_transformers(stories)
    text = (stories / "golden.txt").read_text("utf-8")
    score = model.score(text)
    ids = torch.tensor([score.tokens])
    assert ids.shape[1] > 150
    with torch.no_grad():
        exact = theirs(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(score.logprobs, exact.numpy(), atol=1e-3)
    assert score.total == pytest.approx(float(exact.sum()), rel=1e-4)
    assert score.perplexity == pytest.approx(float((-exact.mean()).exp()), rel=1e-4)


def test_a_penalty_counts_prompt_and_reply(one: llm.LanguageModel, stories: Path) -> None:
    torch, theirs = in_transformers(stories)
    ids = torch.tensor([one.tokenizer.encode(OPENING)])
    how = {"max_new_tokens": 40, "do_sample": False, "repetition_penalty": 1.5, "pad_token_id": 2}
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **how)
    found = one.generate(OPENING, 40, repetition_penalty=1.5)
    assert list(found.tokens) == expected[0, ids.shape[1] :].tolist()
    assert found.tokens != one.generate(OPENING, 40).tokens


def test_what_is_no_prompt_is_refused(one: llm.LanguageModel) -> None:
    wrong: Any
    for wrong in ([], [None], [[]], [1, "two"], [1, 10**6], {"role": "user"}):
        with pytest.raises(ConfigurationError, match=r"prompt|token"):
            one.generate(wrong)
    for wrong in (b"abc", bytearray(b"abc"), None, 5, 1.5, True):
        kind = type(wrong).__name__
        with pytest.raises(ConfigurationError, match=rf"(prompt|token).* not {kind}"):
            one.generate(wrong)
        with pytest.raises(ConfigurationError, match=f"text must be .* not {kind}"):
            one.score(wrong)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("one prompt", lambda: one.stream(["two", "prompts"])),  # type: ignore[arg-type]
        ("max_tokens", lambda: one.generate("", 0)),
        ("at least 2 tokens", lambda: one.score("")),
        ("chat template", lambda: one.generate([{"role": "user", "content": "Hello"}])),
    ]
    for said, call in calls:
        with pytest.raises(ConfigurationError, match=said):
            call()


def test_a_stream_that_is_collected_within_a_step_holds_nobody_up(one: llm.LanguageModel) -> None:
    def work() -> None:
        stream = one.stream("Once upon a time", 20)
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        with one._executor.lock():
            gc.collect()  # as it may come at any time

    gc.disable()
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(30)
    finally:
        gc.enable()
    assert not thread.is_alive()


def test_what_others_do_is_named(one: llm.LanguageModel, stories: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="vLLM"):
        llm.load(stories, ["cpu", "cpu:1"])  # type: ignore[arg-type]
    picture = {"type": "image_url", "image_url": {"url": "file:///a.png"}}
    with pytest.raises(UnsupportedError, match=r"'image_url'.*transformers"):
        one.generate([{"role": "user", "content": [picture]}])
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="peft"):
        llm.load(tmp_path)


def test_what_does_not_fit_says_what_would_and_the_model_goes_on(stories: Path) -> None:
    fails = pytest.raises(OutOfMemoryError, match="does not fit on cuda:0")
    with anydevice.testing.fake_machine(cuda=1, memory="400MiB"), fails as caught:
        llm.load(stories, "cuda", context=512)
    assert caught.value.asked is not None
    assert "device='cpu'" in str(caught.value)
    with pytest.raises(ConfigurationError, match="600 tokens is more than the 512"):
        llm.load(stories, "cpu", context=600)
    with anydevice.testing.fake_machine(cuda=1, memory="1GiB"):
        model = llm.load(stories, "cuda")
        expected = model.generate("", 5).tokens
        with pytest.raises(OutOfMemoryError, match="cuda:0"):
            model.generate([[1] * 480] * 2000, 5)
        assert model.generate("", 5).tokens == expected


def test_a_model_says_what_it_is_and_where(one: llm.LanguageModel) -> None:
    said = repr(one)
    for part in ("stories260K", "260,032 parameters", "float32", "cpu", "numpy", "context 512"):
        assert part in said
    assert one.plan.device == one.device
    assert one.dtype == "float32"


def begun(model: llm.LanguageModel, prompt: list[int], reuse: bool = True) -> list[int]:
    """Some tokens of a reply that was stopped, with the cache that a conversation has."""
    limit = model.context - len(prompt)
    steps = model.steps([prompt], sampling(), limit, reuse)
    found = [int(next(steps)[0][0]) for _ in range(12)]
    steps.close()  # type: ignore[attr-defined]
    return found


def from_the_start(model: llm.LanguageModel, prompt: list[int]) -> list[int]:
    model._executor.keep_runner(0, 0, None)  # type: ignore[arg-type]
    return begun(model, prompt, reuse=False)


@pytest.mark.parametrize("name", ENGINES)
def test_a_turn_reads_new_text(stories: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = loaded(stories, name), list[int]()
    passed = model._executor.forward

    def noting(ids: Any, start: Any, count: Any, *more: Any, **options: Any) -> Any:
        if len(more) > 1:  # a piece of a prompt
            read.append(int(to_numpy(count)[0]))
        return passed(ids, start, count, *more, **options)

    monkeypatch.setattr(model._executor, "forward", noting)
    first = [1, *range(300, 340)]
    for forgotten in (0, 5):
        turn = [*first, *begun(model, first)]
        turn = [*turn[: len(turn) - forgotten], *range(400, 410)]
        read.clear()
        again = begun(model, turn)
        assert 10 <= sum(read) <= 11  # of what was read last, it may not have been written
        read.clear()
        assert again == from_the_start(model, turn)
        assert sum(read) == len(turn)


@pytest.mark.parametrize("name", ["numpy", "jax"])
def test_a_ring_is_gone_on_with_whole_or_not_at_all(stories: Path, name: str) -> None:
    full = loaded(stories, name)
    layers = tuple(replace(kind, window=8) for kind in full.description.layers)
    model = with_parts(full, replace(full.description, layers=layers), full.parameters)
    first = list(range(3, 23))
    for kept in (32, 31, 30, 25, 20):
        held = [*first, *begun(model, first)]
        second = [*held[:kept], 7, 8, 9]
        assert begun(model, second) == from_the_start(model, second)


def test_a_cache_without_room_for_padding_is_read_again(stories: Path) -> None:
    model = loaded(stories, "jax")
    first = [1, *range(10, 486)]
    begun(model, first)
    second = [*first[:450], *range(20, 70)]
    assert begun(model, second) == from_the_start(model, second)


def with_parts(model: llm.LanguageModel, description: Any, parameters: Any) -> llm.LanguageModel:
    return llm.LanguageModel(description, parameters, model.tokenizer, model.device, model.plan)


def with_weight(model: llm.LanguageModel, value: float, *path: Any) -> llm.LanguageModel:
    """The model with one number of a weight replaced."""
    parameters = {**model.parameters, "layers": [dict(each) for each in model.parameters["layers"]]}
    *way, last = path
    place = parameters
    for key in way:
        place = place[key]
    inner = place[last]
    weight = np.array(to_numpy(inner["weight"] if isinstance(inner, dict) else inner))
    weight.flat[7] = value
    placed = model.device(weight)
    place[last] = {**inner, "weight": placed} if isinstance(inner, dict) else placed
    return with_parts(model, model.description, parameters)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "mlx", SLOW])
def test_a_weight_that_is_no_number_is_named(stories: Path, name: str) -> None:
    value = np.inf if name in ("numpy", "mlx") else np.nan
    model = with_weight(loaded(stories, name), value, "layers", 2, "down")
    refused = pytest.raises(VerificationError, match=r"token 1 of the reply .* layers\[2\]")
    for options in ({}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}):
        with refused as caught:
            model.generate(["", OPENING], 3, **options)  # type: ignore[arg-type]
        assert caught.value.where == "layers[2].down.weight"
    with refused:
        list(model.stream("", 3))
    with pytest.raises(VerificationError, match=r"token 2 of the text .* layers\[2\]"):
        model.score(OPENING)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_reply_stops_where_its_numbers_end(stories: Path, name: str) -> None:
    """A token of the reply whose embedding is damaged: the text before it is there."""
    good = loaded(stories, name)
    expected = good.generate(OPENING, 12)
    rare = next(token for token in expected.tokens if token not in good.tokenizer.encode(OPENING))
    at = expected.tokens.index(rare)
    embedding = np.array(to_numpy(good.parameters["embedding"]))
    embedding[rare] = np.nan
    # A head of its own: else the damaged token could never be chosen.
    description = replace(good.description, tied=False)
    head = {"weight": good.parameters["embedding"]}
    parameters = {**good.parameters, "embedding": good.device(embedding), "head": head}
    stream = with_parts(good, description, parameters).stream(OPENING, 12)
    said = rf"token {at + 2} of the reply .* weight embedding"
    with pytest.raises(VerificationError, match=said):
        list(stream)
    assert stream.reply.tokens == expected.tokens[: at + 1]


def test_float16_that_is_too_narrow_is_said(stories: Path) -> None:
    model = llm.load(stories, device_of_engine("torch"), dtype="float16")
    for layer in (large := with_weight(model, 0, "layers", 0, "down")).parameters["layers"]:
        layer["down"] = {"weight": layer["down"]["weight"] * 3e4}
    with pytest.raises(VerificationError, match=r"all weights are finite; .*dtype='bfloat16'"):
        large.generate(OPENING, 3)
