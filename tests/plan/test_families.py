"""Weights and caches of every known family against what `transformers` really allocates."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from anydevice import estimate_inference
from anydevice._plan.families import ARCHITECTURES
from anydevice._plan.model import shape_of

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 211, "pad_token_id": 0}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 24}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
LATENT |= {"n_group": 2, "topk_group": 1}
FEW = {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
OF_FAMILY = {"deepseek_v2": LATENT, "deepseek_v3": LATENT, "qwen2_moe": FEW, "qwen3_moe": FEW}
"""What a small model of a family has beside the sizes that all have."""
CONTEXT, BATCH = 24, 2

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "use_bias": True, "qkv_bias": False},
    "windows": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
    "without windows": {"sliding_window": None},
}
PECULIAR: dict[str, list[dict[str, Any]]] = {
    "llama": [{"head_dim": 24}],
    "qwen3": [{"head_dim": 24, "attention_bias": True}],
    "gemma3_text": [{"num_hidden_layers": 7, "sliding_window": 8, "head_dim": 32}],
    "phi": [{"qk_layernorm": True, "partial_rotary_factor": 0.25}],
    "phi3": [{"partial_rotary_factor": 0.5}],
    "qwen3_moe": [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0], "head_dim": 24}],
    "deepseek_v2": [{"q_lora_rank": None}, {"attention_bias": True, "n_shared_experts": 3}],
    "deepseek_v3": [
        {"q_lora_rank": None, "attention_bias": True},
        {"first_k_dense_replace": 0, "n_shared_experts": 2},
        {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
    ],
    "olmo3": [{"num_hidden_layers": 5}],
    "exaone4": [{"num_hidden_layers": 5, "head_dim": 24}],
    "cohere2": [{"num_hidden_layers": 5, "sliding_window_pattern": 2}],
    "glm4": [{"partial_rotary_factor": 0.25, "head_dim": 24}],
    "gpt_oss": [{"num_local_experts": 4, "head_dim": 24, "attention_bias": False}],
    "gpt_neox": [{"use_parallel_residual": False, "rotary_pct": 0.5}],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"multi_query": False, "parallel_attn": False},
    ],
}
OF_EIGHT_BILLION = {  # as published, tied and not
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "qwen2": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    "gemma": {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28},
    "gemma2": {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42},
    "gemma3_text": {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48},
    "phi": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32},
    "phi3": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "mixtral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}


def config_of(family: str, **values: Any) -> Any:
    small = OF_FAMILY.get(family, {}) if values.get("hidden_size") == 64 else {}
    return AutoConfig.for_model(family, **{**values, **small, **_given(values)})


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """What a test asks for, beside the sizes that all small models have."""
    return {key: value for key, value in values.items() if SMALL.get(key, ...) != value}


def as_saved(config: Any) -> dict[str, Any]:
    """What `save_pretrained` writes into a config.json."""
    saved: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return saved


def model_of(config: Any, dtype: torch.dtype, device: str) -> Any:
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        return make(config, dtype=dtype)


def allocated(model: Any) -> int:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum({id(each): each.nbytes for each in tensors}.values())


def cache_bytes(config: Any) -> int:
    """The bytes of a static cache of 8192 tokens for two sequences, in 16 bits."""
    cache: Any = StaticCache(config=config, max_cache_len=8192)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, meta = config.num_key_value_heads, torch.device("meta")
    cache.early_initialization(2, heads, size, torch.bfloat16, meta)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def cases() -> list[Any]:
    found = [
        pytest.param(family, changes, id=f"{family}-{name}")
        for family in ARCHITECTURES
        for name, changes in VARIANTS.items()
        if (family, name) != ("exaone4", "without windows")  # transformers divides by zero
    ]
    return found + [
        pytest.param(family, changes, id=f"{family}-{'-'.join(changes)}")
        for family, each in PECULIAR.items()
        for changes in each
    ]


@pytest.mark.parametrize(("family", "changes"), cases())
def test_weights_are_those_that_are_allocated(family: str, changes: dict[str, Any]) -> None:
    config = config_of(family, **{**SMALL, **changes})
    for dtype in (torch.bfloat16, torch.float32):
        model = model_of(config, dtype, "meta")
        estimate = estimate_inference(as_saved(config), context=CONTEXT, dtype=dtype)
        assert estimate.weights == allocated(model)
        assert estimate.parameters == sum(each.numel() for each in set(model.parameters()))
        assert estimate.exact


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_cache_is_the_one_that_is_allocated(family: str) -> None:
    for changes in ({}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}):
        config = config_of(family, **{**SMALL, "intermediate_size": 48, **changes})
        model = model_of(config, torch.float32, "cpu").eval()
        cache: Any = StaticCache(config=model.config, max_cache_len=CONTEXT)
        with torch.no_grad():
            model(torch.ones(BATCH, 4, dtype=torch.int64), past_key_values=cache, use_cache=True)
        held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
        shape = shape_of(as_saved(config), dtype="float32")
        assert list(shape.kv_bytes(CONTEXT, BATCH)) == held


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "phi3"])
def test_configs_that_do_not_list_their_layers(family: str) -> None:
    for changes in (
        {},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 8, "use_sliding_window": False},
    ):
        config = config_of(family, **{**SMALL, "num_hidden_layers": 8, **changes})
        cache: Any = StaticCache(config=config, max_cache_len=CONTEXT)
        windows = shape_of(config_values(config, changes), dtype="float32").windows
        kept = [CONTEXT if window is None else min(window, CONTEXT) for window in windows]
        assert kept == [layer.max_cache_len for layer in cache.layers]


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"])
def test_a_window_that_is_null_is_none(family: str) -> None:
    config = config_of(family, **SMALL, sliding_window=None)
    saved = {**as_saved(config), "sliding_window": None}
    estimate = estimate_inference(saved, context=8192, batch=BATCH, dtype="float16")
    assert (estimate.kv_cache, estimate.exact) == (cache_bytes(config), True)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_null_is_not_a_missing_key(family: str) -> None:
    saved = as_saved(config_of(family, **SMALL))
    for key in ("layer_types", "sliding_window"):
        saved.pop(key, None)
    assert 4096 in shape_of(saved).windows
    assert set(shape_of({**saved, "sliding_window": None}).windows) == {None}
    numbers = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 4, "vocabulary": 100}
    assert 4096 in shape_of(**numbers, architecture=family).windows
    assert set(shape_of(**numbers, architecture=family, window=None).windows) == {None}


def test_keys_that_are_null_are_shared_by_no_heads() -> None:
    for family in ("seed_oss", "smollm3"):
        config = config_of(family, **{**SMALL, "num_key_value_heads": None})
        assert config.num_key_value_heads == 4
        saved = {**as_saved(config), "num_key_value_heads": None}
        weights = estimate_inference(saved, context=CONTEXT, dtype="bfloat16").weights
        assert weights == allocated(model_of(config, torch.bfloat16, "meta"))


def config_values(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """A config as it was written before layers were listed: with what was given, not derived."""
    saved = as_saved(config)
    for derived in ("layer_types", "sliding_window"):
        saved.pop(derived, None)
    return {**saved, **changes}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", OF_EIGHT_BILLION)
def test_models_of_full_size(family: str, tied: bool) -> None:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    numbers = OF_EIGHT_BILLION[family]
    if family == "qwen2":
        heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    if family.startswith(("gemma", "phi")):
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    config = config_of(family, **numbers, **heads, tie_word_embeddings=tied)
    model = model_of(config, torch.bfloat16, "meta")
    estimate = estimate_inference(as_saved(config), context=8192, batch=2, dtype="bfloat16")
    assert estimate.weights == allocated(model)
    assert estimate.exact
    assert estimate.kv_cache == cache_bytes(config)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "phi"])
def test_a_module_is_counted_as_it_is(family: str) -> None:
    config = config_of(family, **SMALL)
    by_config = estimate_inference(as_saved(config), context=CONTEXT, dtype="bfloat16")
    for device in ("meta", "cpu"):
        model = model_of(config, torch.bfloat16, device)
        by_module = estimate_inference(model, context=CONTEXT)
        assert by_module.weights == allocated(model)
        assert by_module.exact
        assert by_module.kv_cache == by_config.kv_cache
        assert by_module.activations == by_config.activations
        assert by_module.shape is not None
        assert by_config.shape is not None
        assert by_module.shape.layer_bytes == by_config.shape.layer_bytes
        wide = estimate_inference(model, context=CONTEXT, dtype="float32")
        parameters = by_module.parameters
        assert wide.weights - by_module.weights in range(2 * parameters - 8, 2 * parameters + 8)
    assert estimate_inference(model.config, context=CONTEXT, dtype="bfloat16").total == (
        by_config.total
    )


DEEPSEEK_V3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432}
DEEPSEEK_V3 |= {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
DEEPSEEK_V3 |= {"vocab_size": 129280, "moe_intermediate_size": 2048, "n_routed_experts": 256}
DEEPSEEK_V3 |= {"n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
DEEPSEEK_V3 |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
DEEPSEEK_V3 |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1}
DEEPSEEK_V3 |= {"max_position_embeddings": 163840, "moe_layer_freq": 1, "n_group": 8}
DEEPSEEK_V2 = {**DEEPSEEK_V3, "model_type": "deepseek_v2", "hidden_size": 5120}
DEEPSEEK_V2 |= {"intermediate_size": 12288, "num_hidden_layers": 60, "vocab_size": 102400}
DEEPSEEK_V2 |= {"moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2}
DEEPSEEK_V2 |= {"num_experts_per_tok": 6, "first_k_dense_replace": 1}
DEEPSEEK_LITE = {**DEEPSEEK_V2, "hidden_size": 2048, "intermediate_size": 10944}
DEEPSEEK_LITE |= {"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16}
DEEPSEEK_LITE |= {"moe_intermediate_size": 1408, "n_routed_experts": 64, "q_lora_rank": None}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
GPT_OSS |= {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
GPT_OSS |= {"vocab_size": 201088}


@pytest.mark.parametrize(
    ("values", "expected", "cached"),
    [
        # One vector of 512 and one of 64 for each token and layer, whatever the heads.
        (DEEPSEEK_V3, 671_026_404_352, 61 * (512 + 64) * 8192),
        (DEEPSEEK_V2, 235_741_434_880, 60 * (512 + 64) * 8192),
        (DEEPSEEK_LITE, 15_706_484_224, 27 * (512 + 64) * 8192),
        # Every other layer keeps 128 tokens: 8 heads of 64 keys and 64 values each.
        (GPT_OSS, 20_914_757_184, 12 * (8192 + 128) * 2 * 8 * 64),
    ],
    ids=["V3", "V2", "V2-Lite", "gpt-oss"],
)
def test_published_models_of_full_size(values: dict[str, Any], expected: int, cached: int) -> None:
    config = AutoConfig.for_model(**values)
    model = model_of(config, torch.bfloat16, "meta")
    for given in (values, as_saved(config)):
        estimate = estimate_inference(given, context=8192, batch=2, dtype="bfloat16")
        assert estimate.parameters == sum(each.numel() for each in model.parameters()) == expected
        assert estimate.weights == allocated(model)
        assert estimate.kv_cache == cached * 2 * 2
        assert estimate.exact


CLASSES = {
    "llama": ["Model", "ForSequenceClassification", "ForTokenClassification"],
    "gpt2": ["Model", "LMHeadModel", "ForSequenceClassification", "ForTokenClassification"],
    "qwen3": ["Model", "ForQuestionAnswering"],
    "deepseek_v3": ["ForCausalLM", "Model", "ForSequenceClassification"],
    "phi": ["ForCausalLM", "Model", "ForTokenClassification"],
    "gemma3_text": ["ForCausalLM", "TextModel"],
}


@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family, kinds in CLASSES.items() for kind in kinds]
)
def test_a_decoder_is_counted_as_the_class_that_its_config_names(family: str, kind: str) -> None:
    prefix = {"gpt2": "GPT2", "deepseek_v3": "DeepseekV3", "gemma3_text": "Gemma3"}
    name = prefix.get(family, family.capitalize()) + kind
    for changes in ({}, {"num_labels": 5, "tie_word_embeddings": True}):
        config = config_of(family, **{**SMALL, **changes})
        with torch.device("meta"):
            model = getattr(transformers, name)._from_config(config, dtype=torch.bfloat16)
        saved = {**as_saved(config), "architectures": [name]}
        estimate = estimate_inference(saved, context=CONTEXT, dtype="bfloat16")
        assert estimate.weights == allocated(model)
        assert estimate.parameters == sum(each.numel() for each in set(model.parameters()))
        writes = kind in ("ForCausalLM", "LMHeadModel")
        assert (estimate.logits == BATCH // 2 * 211 * 6) == writes
