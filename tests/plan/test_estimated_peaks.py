"""Estimated peaks against the bytes that are really alive, operation by operation, on the CPU.

Kernels differ on a GPU in one respect that matters: no fused one takes float32 in groups of heads,
so those cases run on PyTorch's plain attention here as well.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.integrations import sdpa_attention

from anydevice import estimate_inference, estimate_training
from anydevice._plan.estimates import (
    CONTEXT,
    WORKSPACE,
    ForwardPass,
    MemoryEstimate,
    logit_bytes,
    moments,
)
from tests.plan.live_bytes import LiveBytes

SMALL = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "head_dim": 16}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 500, "pad_token_id": 0}
ALL_HEADS = {"num_key_value_heads": 8}
# Heads of values are as large as those of keys: PyTorch has no fused kernel for others on the CPU.
LATENT = {**ALL_HEADS, "head_dim": 8, "q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 24}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 8, "n_group": 2}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "topk_group": 1}
LATENT |= {"first_k_dense_replace": 1}


def made(family: str, dtype: torch.dtype, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    return make(AutoConfig.for_model(family, **{**SMALL, **changes}), dtype=dtype)


def plain_attention(needed: bool) -> Any:
    if not needed:
        return nullcontext()
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def repeated_keys() -> Any:
    """Write as compiled code does, which a static cache gets on a GPU: grouped keys are repeated.

    From transformers 5.23 on, code that is not compiled packs the heads of a single token instead.
    """
    if not hasattr(sdpa_attention, "pack_gqa"):
        return nullcontext()
    return mock.patch.object(sdpa_attention, "is_torchdynamo_compiling", return_value=True)


def activations(estimate: MemoryEstimate, tokens: int, width: int) -> int:
    assert estimate.shape is not None
    work = ForwardPass(estimate.batch, tokens, estimate.context, width)
    logits = logit_bytes(estimate.shape, estimate.batch, estimate.context, width)
    return max(logits, *moments(estimate.shape, work).values())


@pytest.mark.parametrize(
    ("family", "dtype", "batch", "context", "changes"),
    [
        ("llama", torch.bfloat16, 2, 68, {}),
        ("llama", torch.float32, 2, 68, {}),
        ("llama", torch.float32, 2, 68, ALL_HEADS),
        ("mistral", torch.bfloat16, 2, 68, {"sliding_window": 32}),
        ("qwen2", torch.bfloat16, 8, 36, {}),
        ("qwen3", torch.bfloat16, 2, 68, {"head_dim": 32}),
        ("gemma", torch.bfloat16, 2, 68, {"num_key_value_heads": 1, "head_dim": 32}),
        ("gemma3_text", torch.bfloat16, 2, 68, {"num_hidden_layers": 7, "sliding_window": 16}),
        ("phi3", torch.bfloat16, 2, 68, ALL_HEADS),
        ("phi", torch.float32, 2, 68, ALL_HEADS),
        ("mixtral", torch.bfloat16, 2, 68, {}),
        ("gpt_neox", torch.bfloat16, 2, 68, ALL_HEADS),
        ("deepseek_v3", torch.bfloat16, 2, 68, LATENT),
        ("deepseek_v2", torch.float32, 2, 68, LATENT | {"q_lora_rank": None}),
    ],
)
def test_reading_and_writing(
    family: str, dtype: torch.dtype, batch: int, context: int, changes: dict[str, Any]
) -> None:
    model = made(family, dtype, changes).eval()
    estimate = estimate_inference(model, context=context, batch=batch)
    tokens = torch.randint(0, 500, (batch, context - 4))
    grouped = model.config.num_key_value_heads != model.config.num_attention_heads
    alive = LiveBytes(itertools.chain(model.parameters(), model.buffers(), [tokens]))
    peaks = []
    with torch.no_grad(), alive:
        cache: Any = StaticCache(config=model.config, max_cache_len=context)
        plain = plain_attention(grouped and dtype == torch.float32)
        for route in (plain, repeated_keys(), nullcontext()):
            alive.reset()
            with route:
                output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = output.logits[:, -1].to(copy=True, dtype=torch.float32).argmax(-1)[:, None]
            peaks.append(alive.peak)
            del output
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert estimate.kv_cache == held
    reading, writing, packed = (peak - held for peak in peaks)
    if grouped and dtype == torch.float32:
        # On a GPU the softmax is several operations, and keeps a truth value for each score.
        reading += batch * model.config.num_attention_heads * (context - 4) ** 2
    assert 0.97 <= activations(estimate, context - 4, dtype.itemsize) / reading <= 1.10
    assert 0.90 <= activations(estimate, 1, dtype.itemsize) / writing <= 1.10
    assert packed <= writing
    whole = estimate.weights + held + max(reading, writing)
    assert 0.97 <= (estimate.total - estimate.overhead) / whole <= 1.10


@pytest.mark.parametrize(
    ("family", "mixed", "checkpointing", "changes"),
    [
        ("llama", False, False, ALL_HEADS),
        ("llama", True, False, ALL_HEADS),
        ("llama", False, True, ALL_HEADS),
        ("llama", True, True, {}),
        ("llama", False, False, {}),
        ("qwen3", True, False, {"tie_word_embeddings": True, "vocab_size": 2000}),
        ("phi", False, True, ALL_HEADS),
    ],
)
def test_training(family: str, mixed: bool, checkpointing: bool, changes: dict[str, Any]) -> None:
    model = made(family, torch.float32, changes).train()
    if checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
        (newer or model.gradient_checkpointing_enable)()
    batch, context = 4, 48
    estimate = estimate_training(
        model, context=context, batch=batch, mixed=mixed, checkpointing=checkpointing
    )
    assert estimate.gradients == 4 * sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, 500, (batch, context))
    grouped = model.config.num_key_value_heads != model.config.num_attention_heads
    there = sum(each.nbytes for each in itertools.chain(model.parameters(), model.buffers()))
    alive = LiveBytes(itertools.chain(model.parameters(), model.buffers(), [tokens]))
    with alive, plain_attention(grouped and not mixed):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            alive.reset()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
    assert 0.93 <= (estimate.total - CONTEXT - WORKSPACE) / (there + alive.peak) <= 1.10
