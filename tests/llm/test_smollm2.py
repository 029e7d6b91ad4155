"""A real model, SmolLM2 from its GGUF file: the tokens of transformers, and their probability."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import llm

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PROMPTS: list[Any] = [
    "The capital of France is a city that",
    [{"role": "user", "content": "What is a computer? Answer in three sentences."}],
    [
        {"role": "system", "content": "You are a helpful teacher."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "def fibonacci(n):\n    ",
    "In the year 1969, the first people",
]

SKY = [504, 6376, 314, 4461, 975, 282, 253, 980, 1217, 13739, 43464, 24484, 30, 669, 7613, 4149]
"""The first tokens of the reply to the third prompt."""


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    """The same weights in transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    return model.eval()


def expected(model: Any, ids: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
    """The tokens that transformers takes greedily, without the one that ends them."""
    import torch

    prompt = torch.tensor([ids])
    how = {"max_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with torch.inference_mode():
        found = model.generate(prompt, eos_token_id=list(ends), pad_token_id=ends[0], **how)
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens[:-1] if tokens[-1] in ends else tokens


def loaded(file: Path, name: str, dtype: str = "float32") -> llm.LanguageModel:
    pytest.importorskip({"mlx": "mlx.core"}.get(name, name))
    return llm.load(file, anydevice.device("cpu", engine=name), dtype)


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_greedy_tokens_are_those_that_transformers_gave(smollm2: Path, name: str) -> None:
    """The long form asks transformers itself, which takes a minute to unpack the weights."""
    reply = loaded(smollm2, name).generate(PROMPTS[2], 16)
    assert list(reply.tokens) == SKY
    assert reply.text == "The sky is blue because of a process called Rayleigh scattering. " + (
        "This phenomenon occurs"
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", ["torch", "jax", "mlx", "numpy"])
def test_tokens_are_those_of_transformers(theirs: Any, smollm2: Path, name: str) -> None:
    model = loaded(smollm2, name)
    encode, chat = model.tokenizer.encode, model.tokenizer.encode_chat
    together = model.generate(PROMPTS, 100)
    for prompt, batched in zip(PROMPTS, together, strict=True):
        ids = encode(prompt) if isinstance(prompt, str) else chat(prompt)
        right = expected(theirs, ids, 100, model.tokenizer.eos_ids)
        assert list(model.generate(prompt, 100).tokens) == right
        assert list(batched.tokens) == right
        assert prompt is not PROMPTS[2] or right[:16] == SKY


@pytest.mark.parametrize("tokens", [128, pytest.param(1500, marks=pytest.mark.soak)])
def test_sixteen_bits_hardly_change_the_perplexity(smollm2: Path, tokens: int) -> None:
    full = loaded(smollm2, "torch")
    ids = full.tokenizer.encode(PAGE.read_text("utf-8"))[:tokens]
    exact = full.score(ids).perplexity
    narrow = loaded(smollm2, "torch", "bfloat16").score(ids).perplexity
    assert narrow == pytest.approx(exact, rel=0.005)
    assert 20 < exact < 200  # English prose with tables: far from a guess of 49,152 tokens


@pytest.mark.parametrize("pieces", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_stored_weights_on_onnxruntime_give_what_their_numbers_give(
    smollm2: Path, pieces: int
) -> None:
    """Rounded activations move each token's log probability by about 0.07, up or down."""
    pytest.importorskip("onnxruntime")
    floats = llm.load(smollm2, anydevice.device("cpu", engine="torch"), weights="float")
    stored = llm.load(smollm2, "cpu", context=1024)
    assert (stored.executor, floats.executor) == ("onnxruntime", "torch")
    assert list(stored.generate(PROMPTS[2], 8).tokens) == SKY[:8]  # a near tie decides the 13th
    ids = floats.tokenizer.encode(PAGE.read_text("utf-8"))
    parts = [ids[256 * number : 256 * number + 256] for number in range(pieces)]
    pairs = [(stored.score(part).logprobs, floats.score(part).logprobs) for part in parts]
    off = np.concatenate([np.subtract(*pair) for pair in pairs])
    assert np.abs(off).mean() < 0.1
    expected_spread = 3 * off.std() / len(off) ** 0.5
    assert abs(np.expm1(-off.mean())) < (0.005 if pieces > 1 else expected_spread + 0.005)


@pytest.mark.soak
def test_memory_is_what_was_planned(smollm2: Path) -> None:
    """On NumPy, all of whose arrays are counted: within 3 %."""
    import tracemalloc

    loaded(smollm2, "numpy").generate([5] * 40, 2)  # imports and tables are not the model's
    gc.collect()
    tracemalloc.start()
    try:
        model = llm.load(smollm2, anydevice.device("cpu", engine="numpy"), "float32", context=1024)
        model.generate([5] * 1000, 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak == pytest.approx(model.plan.estimate.total, rel=0.03)
