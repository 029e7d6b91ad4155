"""Steps that are captured give the tokens that steps in ops give; here without a graph.

With a CUDA GPU, the same goes through real graphs and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import anydevice
from anydevice import llm
from anydevice._check.verdicts import Kept
from anydevice._core.device import Device
from anydevice._core.trees import mapped
from anydevice._llm import capture as captured
from anydevice._llm import decoder
from anydevice._llm.capture import CapturedRunner
from anydevice._llm.description import describe
from anydevice._llm.generate import KINDS_OF_SAMPLING, OpsRunner, layer_config, run_steps
from anydevice._llm.sampling import sampling
from anydevice._machine.engines import registry
from anydevice._ops import transformer
from anydevice._plan.config import as_config
from anydevice.errors import UnsupportedError
from tests.llm.families import reference

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from anydevice._engines.torch.captured import CapturedStep  # noqa: E402

GPU = torch.cuda.is_available()
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no CUDA GPU"))]
PROMPTS = ([1, 400, 300], [1, 50])


@pytest.fixture(scope="module", params=PLACES)
def model(request: pytest.FixtureRequest, stories: Path) -> llm.LanguageModel:
    return llm.load(stories, anydevice.device(request.param, engine="torch"), dtype="float32")


def tokens(runner: OpsRunner, model: Any, prompts: Any, most: int, **options: Any) -> Any:
    """All that is read, as lists."""
    steps = run_steps(runner, model._executor, prompts, sampling(**options), most)
    return [
        (token.tolist(), None if logprob is None else logprob.round(4).tolist())
        for token, logprob in steps
    ]


DRAWN = {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "seed": 4, "logprobs": True}


@pytest.mark.parametrize("options", [{}, DRAWN])
def test_tokens_are_those_of_ops(model: llm.LanguageModel, options: Mapping[str, Any]) -> None:
    executor = model._executor
    runner = CapturedRunner(executor, 2, 64, CapturedStep)
    for prompts in (PROMPTS, PROMPTS[::-1]):  # the second time, what was captured is used again
        expected = tokens(OpsRunner(executor, 2, 64), model, prompts, 6, **options)
        found = tokens(runner, model, prompts, 6, **options)
        assert [each for each, _ in found] == [each for each, _ in expected]
        for (_, one), (_, other) in zip(found, expected, strict=True):
            assert one == (other if other is None else pytest.approx(other, abs=1e-3))
    assert len(runner._step_graphs) == 1


def test_steps_of_the_last_kinds_of_sampling_are_kept(model: llm.LanguageModel) -> None:
    executor = model._executor
    runner = CapturedRunner(executor, 2, 64, CapturedStep)
    small: list[dict[str, Any]] = [{"top_k": top_k} for top_k in (1, 7, 64)]
    other = [{"top_k": 8**n, "min_p": share} for n in (2, 3, 4) for share in (0.0, 0.1)]
    other += [{"repetition_penalty": 1.2}, {}, {"logprobs": True}, small[0]]
    for options in (*small, *other):
        found = tokens(runner, model, PROMPTS, 2, seed=2, **options)
        assert len(runner._step_graphs) == 1 or options not in small[1:]
    assert found == tokens(OpsRunner(executor, 2, 64), model, PROMPTS, 2, seed=2, **small[0])
    assert len(runner._step_graphs) == KINDS_OF_SAMPLING


def test_what_cannot_be_captured_is_computed_in_ops(model: llm.LanguageModel) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    executor = model._executor
    runner = CapturedRunner(executor, 2, 64, refuse)
    with pytest.warns(UserWarning, match=r"could not be captured .*: operation not permitted"):
        found = tokens(runner, model, PROMPTS, 3)
    assert found == tokens(OpsRunner(executor, 2, 64), model, PROMPTS, 3)


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
LLAMA |= {"hidden_act": "silu"}


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"model_type": "qwen3", "head_dim": 32}, True),
        ({"model_type": "qwen2"}, True),
        ({"model_type": "granite"}, True),
        ({"hidden_act": "gelu"}, False),
        ({"mlp_bias": True}, False),
        ({"model_type": "gemma2", "head_dim": 16}, False),
        ({"model_type": "olmo2"}, False),
        ({"model_type": "mixtral"}, False),
    ],
)
def test_which_layers_an_engine_may_compute_in_one_go(change: dict[str, Any], fits: bool) -> None:
    description = describe(as_config({**LLAMA, **change}))
    assert (layer_config(description, description.layers[0], False) is not None) == fits


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_read_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph needs it: with tensors that have no numbers to be read."""
    pytest.importorskip("transformers")
    made = reference(name)
    numbers = made.parameters["layers"]
    at = next(at for at, layer in enumerate(numbers) if "experts" in layer)
    kind = made.description.layers[at]
    monkeypatch.setattr(transformer, "_where", lambda chosen: "device")  # as on a card
    assert registry.load("torch").fused  # what is imported there reads numbers
    with FakeTensorMode():
        weights = mapped(lambda x: torch.empty(x.shape), numbers[at])
        layer = decoder.DecoderLayer(made.description, kind, weights)
        for rows in (1, 2, 5, 33, 64, transformer.FEW_TOKENS):
            x = torch.empty((rows, 1, made.description.hidden))
            assert layer.transform(x).shape == x.shape
        x = torch.empty((1, transformer.FEW_TOKENS + 1, made.description.hidden))
        with pytest.raises(UnsupportedError, match="cannot be read"):  # what is read, is seen
            layer.transform(x)


@pytest.mark.parametrize("window", [None, 4, 40])
def test_the_first_piece_attends_to_itself_as_to_its_cache(window: int | None) -> None:
    torch.manual_seed(3)
    family = {"model_type": "mistral", "sliding_window": window} if window else {}
    description = describe(as_config({**LLAMA, **family}))
    shapes = {"qkv": (128, 64), "output": (64, 64), "gate_up": (192, 64), "down": (64, 96)}
    parameters = {name: {"weight": torch.randn(shape) / 8} for name, shape in shapes.items()}
    norms = {name: {"weight": torch.ones(64)} for name in ("attention_norm", "mlp_norm")}
    x, start = torch.randn(2, 9, 64), torch.zeros(2, dtype=torch.int32)
    count = torch.tensor([9, 5], dtype=torch.int32)
    valid = torch.arange(9) < count[:, None]
    found = []
    for first in (False, True):
        cache = decoder.new_cache(description, 2, 16, x)
        index = decoder.cache_index(description.layers, x, start, count, cache, first=first)
        weights = {**parameters, **norms}
        layer = decoder.DecoderLayer(description, description.layers[0], weights)
        y, written = layer(x, index, cache[0])
        assert written is not None
        found.append((y[valid], written["values"][:, :, :4]))  # type: ignore[index]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_kernels_are_checked_where_none_was_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    known = [("softmax", "float16", "cuda:0"), ("softmax", "bfloat16", "cuda:1")]
    monkeypatch.setattr(captured, "load_trusted", lambda: known)

    def checked(device: Device, dtypes: Any) -> Kept:
        asked.append((str(device), dtypes))
        return Kept((), (), "there is no room for it")

    monkeypatch.setattr(captured, "warm_up", checked)
    card = Device("cuda", 0, engine="torch")
    with pytest.warns(UserWarning, match="no room"):
        captured.check_kernels(card, "bfloat16")
    captured.check_kernels(card, "float16")
    captured.check_kernels(Device("cpu", engine="torch"), "bfloat16")
    captured.check_kernels(Device("cuda", 0, engine="jax"), "bfloat16")
    assert asked == [("cuda:0", ["bfloat16"])]


def test_graphs_read_prompts(model: llm.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one length, and padded: the same tokens, and few graphs are kept."""
    if model.device.backend == "cuda":
        pytest.skip("in ops a prompt cannot be captured there")
    executor = model._executor
    runner = CapturedRunner(executor, 2, 320, CapturedStep)
    # What is read in ops here counts as read in few launches.
    always = property(lambda _: True, lambda _, value: None)
    monkeypatch.setattr(type(executor), "fused", always, raising=False)
    lengths = (3, 5, 2, 70, 100, 150, 150, 4, 4)
    for number, length in enumerate(lengths):
        prompts = [[1, *range(20, 19 + length)], [1, *range(60, 60 + length // 2)]]
        expected = tokens(OpsRunner(executor, 2, 320), model, prompts, 4)
        assert tokens(runner, model, prompts, 4) == expected, number
        assert len(runner._prompt_graphs) <= captured.MAX_PROMPT_GRAPHS
    assert all(isinstance(reader, CapturedStep) for reader in runner._prompt_graphs.values())


def test_prompts_have_one_size(model: llm.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries round otherwise for other sizes, and the same call gives the same numbers."""
    executor, sizes = model._executor, []
    whole = executor.forward

    def noted(ids: Any, *others: Any, **options: Any) -> Any:
        sizes.append(ids.shape[1])
        return whole(ids, *others, **options)

    monkeypatch.setattr(executor, "forward", noted)
    runner = CapturedRunner(executor, 2, 320, CapturedStep)
    for _ in range(3):
        tokens(runner, model, PROMPTS, 2)
        assert list(runner._prompt_graphs.values()) == [NotImplemented], "they take many launches"
    assert set(sizes) == {1, captured.PROMPT_PADDING}
