"""What the layers of each family of models have: one row a family, as `transformers` builds it.

A row says which matrices have biases, how many norms a layer has, which layers forget old tokens,
and what a `config.json` of the family may leave out. Checked against transformers 5.22: weights
and caches that follow from a row are right to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from anydevice.core.record import NOTHING, Record

Flag = bool | str
"""Whether layers have something: always, never, or where the config's key of that name is true."""

Windows = Literal["none", "all", "last", "pattern"]
"""Which layers keep a window only, where the config does not list `layer_types`.

`all` of them where there is a `sliding_window`; the `last` ones, from `max_window_layers` on, where
`use_sliding_window` is true; or a `pattern`, where each nth layer (`pattern` of the row, or the
config's `sliding_window_pattern`) keeps everything.
"""


class Architecture(Record):
    """One family: what its layers have beside the matrices that every decoder has.

    `norms` is the number of norms with a vector of the hidden size that a layer has, `norm_bias`
    says that each has a second vector. `query_key_norms` are norms of one head (`"head"`) or of
    all heads (`"heads"`). `rotary` tells of a table of rotary frequencies,
    for `rotary_share` of a head or what the config has under `rotary_key`; with
    `rotary_by_window`, layers with a window have another. `parallel` layers
    feed attention and network from one input. `eager` attention holds all scores in memory,
    and so does `unfused` attention, whose heads no fused kernel takes. `wide_routing` weighs what
    experts give in 32 bits.
    `positions` are learned, one vector each. `plain_heads` share the hidden size
    evenly, each with keys of its own, unless the config's key `multi_query_if` is true, and all
    share one, or `grouped_if` is, and they share those of `kv_heads`. `windows_if` is the key that
    turns windows on, `parallel_norms` the one that says how many norms parallel layers have.

    >>> ARCHITECTURES["qwen2"].qkv_bias, ARCHITECTURES["qwen2"].output_bias
    (True, False)
    """

    qkv_bias: Flag = "attention_bias"
    output_bias: Flag = "attention_bias"
    mlp_bias: Flag = "mlp_bias"
    head_bias: bool = False
    gated: bool = True
    fused_qkv: bool = False
    fused_gate: bool = False
    norms: int = 2
    norm_bias: bool = False
    norm_weights: bool = True
    layer_norm: bool = False
    query_key_norms: Literal["", "head", "heads"] = ""
    query_key_norms_if: str = ""
    parallel: Flag = False
    eager: bool = False
    unfused: bool = False
    wide_routing: bool = False
    embedding_scale: bool = False
    rotary: bool = True
    rotary_by_window: bool = False
    rotary_share: float = 1.0
    rotary_key: str = ""
    positions: bool = False
    windows: Windows = "all"
    windows_if: str = ""
    pattern: int = 0
    experts: bool = False
    plain_heads: bool = False
    multi_query_if: str = ""
    grouped_if: str = ""
    parallel_norms: str = ""
    defaults: Mapping[str, Any] = NOTHING


TIED = {"tie_word_embeddings": True}
_GEMMA = {"head_dim": 256, **TIED}

UNKNOWN = Architecture()
"""What is assumed of a family that is not in the table: the layers of Llama."""

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "granite": Architecture(),
    "seed_oss": Architecture(
        output_bias="attention_out_bias",
        defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
    ),
    "ernie4_5": Architecture(
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        defaults={"head_dim": 128, "num_key_value_heads": 2, **TIED},
    ),
    "mistral": Architecture(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Architecture(
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        windows="last",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Architecture(
        mlp_bias=False,
        query_key_norms="head",
        windows="last",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "gemma": Architecture(
        mlp_bias=False, embedding_scale=True, defaults={"num_key_value_heads": 16, **_GEMMA}
    ),
    "gemma2": Architecture(
        mlp_bias=False,
        norms=4,
        eager=True,
        embedding_scale=True,
        windows="pattern",
        pattern=2,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, **_GEMMA},
    ),
    "gemma3_text": Architecture(
        mlp_bias=False,
        norms=4,
        query_key_norms="head",
        embedding_scale=True,
        rotary_by_window=True,
        windows="pattern",
        pattern=6,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, **_GEMMA},
    ),
    "phi": Architecture(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
        norms=1,
        norm_bias=True,
        layer_norm=True,
        query_key_norms="head",
        query_key_norms_if="qk_layernorm",
        parallel=True,
        rotary_share=0.5,
        rotary_key="partial_rotary_factor",
        defaults={"hidden_act": "gelu_new"},
    ),
    "phi3": Architecture(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        fused_qkv=True,
        fused_gate=True,
        rotary_key="partial_rotary_factor",
    ),
    "mixtral": Architecture(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        experts=True,
        wide_routing=True,
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": Architecture(
        mlp_bias=False,
        query_key_norms="head",
        windows_if="use_sliding_window",
        experts=True,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "sliding_window": None,
        },
    ),
    "qwen2_moe": Architecture(
        qkv_bias="qkv_bias",
        output_bias=False,
        mlp_bias=False,
        windows="none",
        experts=True,
        defaults={
            "qkv_bias": True,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "olmo": Architecture(mlp_bias=False, norm_weights=False),
    "olmo2": Architecture(mlp_bias=False, query_key_norms="heads"),
    "smollm3": Architecture(windows="none", defaults={"num_key_value_heads": 4, **TIED}),
    "starcoder2": Architecture(
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        norm_bias=True,
        layer_norm=True,
        defaults={"use_bias": True, "num_key_value_heads": 2, **TIED},
    ),
    "gpt2": Architecture(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        fused_qkv=True,
        norm_bias=True,
        layer_norm=True,
        rotary=False,
        positions=True,
        plain_heads=True,
        defaults={"n_positions": 1024, "activation_function": "gelu_new", **TIED},
    ),
    "gpt_neox": Architecture(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=True,
        gated=False,
        fused_qkv=True,
        norm_bias=True,
        layer_norm=True,
        parallel="use_parallel_residual",
        rotary_share=0.25,
        rotary_key="rotary_pct",
        plain_heads=True,
        defaults={"attention_bias": True, "use_parallel_residual": True},
    ),
    "falcon": Architecture(
        qkv_bias="bias",
        output_bias="bias",
        mlp_bias="bias",
        gated=False,
        fused_qkv=True,
        norm_bias=True,
        layer_norm=True,
        parallel="parallel_attn",
        unfused=True,
        plain_heads=True,
        multi_query_if="multi_query",
        grouped_if="new_decoder_architecture",
        parallel_norms="num_ln_in_parallel_attn",
        defaults={"multi_query": True, "parallel_attn": True, **TIED},
    ),
}
