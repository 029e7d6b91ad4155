"""The `config.json` of models that plans are made for."""

from __future__ import annotations

from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Llama 3.1 8B."""
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64}
LLAMA_405B = LLAMA_8B | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
LLAMA_405B |= {"num_attention_heads": 128}
