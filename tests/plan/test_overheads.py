"""What must be free so that a model runs: estimates against the rules of PyTorch's allocator.

The allocations are those of `transformers` on tensors without memory, so models are as large as
on a GPU. A plan that says "fits" has to run, and one that needs 10 % more than there is must not.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from anydevice import MemoryEstimate, estimate_inference
from anydevice._plan.estimates import CONTEXT, WORKSPACE
from anydevice._plan.families import MIB, block_bytes
from tests.plan.caching_allocator import Allocation, CachingAllocator, Recorded, runs

SMALL = {
    "model_type": "llama",
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
LARGE = SMALL | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 24}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
EVERY_HEAD = SMALL | {"model_type": "phi3", "num_attention_heads": 20, "num_key_value_heads": 20}
FORMULA = EVERY_HEAD | {"model_type": "phi", "hidden_size": 2560}
NORMED = SMALL | {"model_type": "qwen3", "intermediate_size": 9728, "head_dim": 128}


def fused(queries: Any, *_: Any, **__: Any) -> Any:
    """What a fused kernel allocates; tensors without memory would take PyTorch's plain way."""
    batch, heads, tokens, size = queries.shape
    output = queries.new_empty(batch, tokens, heads, size).transpose(1, 2)
    queries.new_empty(batch, heads, tokens, dtype=torch.float32)
    return output


def recorded(
    config: dict[str, Any], context: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> list[Allocation]:
    """Loading a model, and reading a prompt into a static cache."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    numbers = {name: value for name, value in config.items() if name != "model_type"}
    full = AutoConfig.for_model(config["model_type"], **numbers, pad_token_id=0)
    make: Any = AutoModelForCausalLM.from_config
    with torch.no_grad(), Recorded() as record, torch.device("meta"):
        model = make(full, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        gc.collect()
        record.allocations.append((0, WORKSPACE))
        cache: Any = StaticCache(config=full, max_cache_len=context)
        tokens = torch.zeros(batch, context - 4, dtype=torch.int64)
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return list(record.allocations)


def held(estimate: MemoryEstimate) -> int:
    """What the allocator is to hold at most."""
    return estimate.total - CONTEXT


@pytest.mark.parametrize(
    ("config", "context", "batch"),
    [
        (SMALL, 3582, 4),
        (SMALL, 8000, 4),
        (LARGE, 1024, 4),
        (LARGE, 4098, 4),
        (LARGE, 6058, 4),
        (EVERY_HEAD, 4096, 4),
        (FORMULA, 2048, 4),
        (NORMED, 8192, 2),
    ],
)
def test_what_fits_runs_and_what_needs_a_tenth_more_does_not(
    config: dict[str, Any], context: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocations = recorded(config, context, batch, monkeypatch)
    estimate = estimate_inference(config, context=context, batch=batch, dtype="bfloat16")
    unlimited = runs(allocations, None)
    assert unlimited is not None
    in_use = held(estimate) - estimate.overheads.idle
    assert 0.99 <= in_use / unlimited.most_in_use <= 1.02
    assert runs(allocations, int(1.03 * held(estimate))) is not None
    assert runs(allocations, int(held(estimate) / 1.1)) is None


def test_without_what_is_idle_it_would_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = recorded(LARGE, 6058, 4, monkeypatch)
    estimate = estimate_inference(LARGE, context=6058, batch=4, dtype="bfloat16")
    assert runs(allocations, held(estimate) - estimate.overheads.idle) is None


def test_blocks_are_those_of_the_allocator() -> None:
    for size in (1, 512, 513, MIB, 3 * MIB + 5, 10 * MIB, 25 * MIB, 24 * MIB + 1, 47 * MIB - 1):
        memory = CachingAllocator()
        memory.take(size)
        assert block_bytes(size) == memory.in_use


def test_the_rounding_of_weights_follows_from_their_sizes() -> None:
    # As measured on an NVIDIA H200 with PyTorch 2.11, to the MiB: 11,252,954,112 bytes.
    phi = {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240}
    phi |= {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 51200}
    estimate = estimate_inference(phi, context=2048, batch=4, dtype="float32")
    assert estimate.weights == 11_118_735_520
    assert (estimate.weights + estimate.overheads.rounding) // MIB == 11_252_954_112 // MIB
    # Its activation function is a formula of several operations.
    one = estimate_inference({**phi, "hidden_act": "gelu"}, context=2048, batch=4, dtype="float32")
    assert estimate.activations - one.activations == 2 * 10240 * 2048 * 4 * 4
