"""Steps that are captured give the tokens that steps in ops give; here without a graph.

With a CUDA GPU, the same goes through real graphs and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anydevice
from anydevice import llm
from anydevice.llm import captured
from anydevice.llm.captured import CapturedRunner, layer_numbers, stepped
from anydevice.llm.description import describe
from anydevice.llm.generation import OpsRunner, generated
from anydevice.llm.sampling import sampling
from anydevice.planning.config import as_config

torch = pytest.importorskip("torch")
from anydevice.engines.torch.captured import CapturedStep  # noqa: E402

GPU = torch.cuda.is_available()
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no CUDA GPU"))]
PROMPTS = ([1, 400, 300], [1, 50])


@pytest.fixture(scope="module", params=PLACES)
def model(request: pytest.FixtureRequest, stories: Path) -> llm.LanguageModel:
    return llm.load(stories, anydevice.device(request.param, engine="torch"), dtype="float32")


def tokens(runner: OpsRunner, model: Any, prompts: Any, most: int, **options: Any) -> Any:
    """All that is read, as lists."""
    steps = generated(runner, model._programs, prompts, sampling(**options), most)
    return [
        (token.tolist(), None if logprob is None else logprob.round(4).tolist())
        for token, logprob in steps
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "seed": 4, "logprobs": True},
    ],
)
def test_the_tokens_are_those_of_steps_in_ops(
    model: llm.LanguageModel, options: Mapping[str, Any]
) -> None:
    programs = model._programs
    runner = CapturedRunner(programs, 2, 64, CapturedStep)
    for prompts in (PROMPTS, PROMPTS[::-1]):  # the second time, what was captured is used again
        expected = tokens(OpsRunner(programs, 2, 64), model, prompts, 6, **options)
        assert tokens(runner, model, prompts, 6, **options) == expected
    assert len(runner._captured) == 1


def test_what_cannot_be_captured_is_computed_in_ops(model: llm.LanguageModel) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    programs = model._programs
    runner = CapturedRunner(programs, 2, 64, refuse)
    with pytest.warns(UserWarning, match=r"could not be captured .*: operation not permitted"):
        found = tokens(runner, model, PROMPTS, 3)
    assert found == tokens(OpsRunner(programs, 2, 64), model, PROMPTS, 3)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
    "hidden_act": "silu",
}


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
    assert (layer_numbers(description, description.layers[0], False) is not None) == fits


def test_a_layer_of_the_engine_takes_the_place_of_ops(
    model: llm.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's version is given what it needs, and its result and cache are used."""
    programs, seen = model._programs, []
    cache = programs.new_cache(1, 16)

    def doubled(x: Any, position: Any, keys: Any, values: Any, *others: Any) -> Any:
        seen.append((others[-1].heads, position.tolist(), len(others)))
        return x * 2, keys + 1, values + 2

    monkeypatch.setattr(captured, "own_version", lambda x, name, definition: doubled)
    ids, at = programs.place([[5]]), programs.place([3])
    run = partial(stepped, programs.description, programs.parameters)
    result = run(ids, at, programs.place([1]), cache)
    layers = len(programs.description.layers)
    assert seen == [(programs.description.heads, [3], 11)] * layers
    embedding = programs.parameters["embedding"][5]
    torch.testing.assert_close(result[0, 0], embedding * 2**layers)
    assert all((kept["keys"] == 1).all() and (kept["values"] == 2).all() for kept in cache)
