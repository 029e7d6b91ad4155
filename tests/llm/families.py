"""A tiny random model of every family, made by transformers, and ours from its folder."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from anydevice._core.record import Record
from anydevice._llm import decoder
from anydevice._llm.description import Description, describe
from anydevice._plan.config import ModelConfig, read_config
from tests.llm.random_weights import load_parameters

TOKENS = 21
BASE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3}
MINISTRAL |= {"original_max_position_embeddings": 8}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5]}
LONG |= {"long_factor": [2.0, 3.0, 5.0, 7.0]}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
LATENT |= {"v_head_dim": 20, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4}
LATENT |= {"topk_group": 2, "n_shared_experts": 2, "num_experts_per_tok": 3}
LATENT |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS = {"layer_types": ["sliding_attention", "full_attention"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16, "attention_bias": True}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama, dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 8},
    ),
    "smollm2": ("llama", {"tie_word_embeddings": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 16}),
    "ministral3": (
        "ministral3",
        {"head_dim": 8, "sliding_window": 10, "rope_parameters": MINISTRAL},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", {**SPARSE, "shared_expert_intermediate_size": 40}),
    "qwen3": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**SPARSE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}
        | {"use_sliding_window": True, "sliding_window": 6},
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, **KINDS},
    ),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 9}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONG, "max_position_embeddings": 64}
        | {"original_max_position_embeddings": 16},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 6, "rope_scaling": YARN, **KINDS}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": 7}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere2": ("cohere2", {"sliding_window": 6, **KINDS}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6}
        | {"swiglu_limit": 0.5, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False}
        | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
}
"""By name: the family, and what a tiny model of it has beside `BASE`."""


def whole_logits(description: Description, parameters: Any, ids: Any) -> Any:
    """The logits of whole sequences, without a cache."""
    hidden, cache = decoder.forward(description, parameters, ids)
    assert cache is None
    return decoder.logits(description, parameters, hidden)


def skip_unless_listed(engine: str, error: Exception) -> NoReturn:
    """Skip a test whose engine does not run here, unless the tests are to run it."""
    if engine in os.environ.get("ANYDEVICE_TEST_ENGINES", "").replace(",", " ").split():
        raise error
    pytest.skip(f"{engine} does not run here: {error}")


def random_model(name: str, seed: int = 3) -> tuple[Any, dict[str, Any]]:
    """A random model of a case by transformers, and its arrays."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    family, options = CASES[name]
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**BASE, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, {key: x.normal_().numpy() for key, x in model.state_dict().items()}


class Reference(Record):
    """A model's config and parameters, ids, and the logits that transformers gives for them."""

    config: ModelConfig
    description: Description
    parameters: Any
    ids: Any
    logits: Any


@functools.cache
def reference(name: str) -> Reference:
    """The case of this name; parameters are NumPy arrays."""
    family, options = copy.deepcopy(CASES[name])  # transformers changes inner dicts
    return reference_of(family, options, len(name))


def reference_of(family: str, options: dict[str, Any], seed: int = 0) -> Reference:
    """A tiny model of a family with these options beside `BASE`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from anydevice import device

    quiet: Any = disable_progress_bar
    quiet()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**BASE, **options})
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            spread = 0.3 if tensor.dim() < 2 else tensor.shape[-1] ** -0.5
            around = "norm" in key and key.endswith("weight") and "gemma" not in family
            tensor.copy_(torch.randn_like(tensor) * spread + around)
        ids = torch.randint(3, 97, (3, TOKENS))
        logits = model(ids).logits.numpy()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ours = read_config(Path(folder))
        description = describe(ours)
        parameters = load_parameters(folder, description, device("cpu", engine="numpy"))
    return Reference(ours, description, parameters, ids.numpy().astype(np.int32), logits)
