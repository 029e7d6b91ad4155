"""Families of language models, one row each, and the shape of one model.

A row says which matrices have biases, how many norms a layer has, which layers have an attention
window, and what a `config.json` of the family may leave out. Checked against transformers 5.22:
weights and caches that follow from a row are right to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from anydevice._core import checks
from anydevice._core.dtypes import DType, as_dtype
from anydevice._core.record import NOTHING, Record
from anydevice.errors import ConfigurationError

Flag = bool | str
"""Whether layers have something: always, never, or where this key of the config is true."""

Windows = Literal["none", "all", "last", "pattern"]
"""The layers that have an attention window, unless the config lists `layer_types`.

`all` of them where there is a `sliding_window`; the `last` ones, from `max_window_layers` on, where
`use_sliding_window` is true; or a `pattern`, where each nth layer (`pattern` of the row, or the
config's `sliding_window_pattern`) has none.
"""


Outputs = Literal["new token", "tokens", "sequence"]
"""The subject of a head's outputs: the new token, each token that is read, or the sequence."""

USUAL_DTYPE = "bfloat16"
"""The dtype of weights if neither the caller nor the model names one."""
NO_DTYPE = f"no dtype is named for the weights: {USUAL_DTYPE} is assumed"


class ForwardSpec(Record):
    """How a family computes, beside what its memory follows from.

    Most fields are keys of the config; "" says that the family has no such thing.

    - `post_norm`: norms come after attention and network, on what they add, and none before.
    - `unit_norm`: the weights of norms are stored without their 1.
    - `interleaved`: whether rope rotates neighbours, always, never, or by key.
    - `rope_by_window`: how rope differs between layers: `"base"`, those with a window have a base
      of their own, `rope_local_base_freq`, and are not scaled; `"scaling"`, they are not scaled;
      `"none"`, those without a window have no rope.
    - `no_rope`: the key of a list that says for each layer whether it has rope, and of the number
      that says which nth layers have none where there is no list.
    - `longrope`: names of rope scaling that mean longrope.
    - `position_scale`: queries grow with their position, as `llama_4_scaling_beta` says.
    - `eps`: what is added under the root in norms.
    - `scale`: the factor of scores; `query_scale`: the number whose inverse root it is.
    - `soft_cap`, `final_soft_cap`: the bounds of scores and of logits.
    - `embedding_scale`, `residual_scale`, `logit_scale`: factors; `logit_divisor`: a divisor.
    - `tanh_gelu`: what is called gelu is its approximation by tanh.
    - `routing`: how a router's scores become weights: `"softmax"` of all, then the best are taken;
      `"top_k"`, the softmax of the best; `"groups"`, their sigmoid, the best of the best groups.
    - `normalized`: whether the weights of the chosen experts add up to 1: always, never, or by key.
    - `routed_scale`: the factor of what experts give.
    - `clipped`: what experts multiply is clipped.
    - `tensor_names`: parts of the names of tensors in its files, and those in Llama's.
    - `only`: options that are run with this value only.
    """

    post_norm: bool = False
    unit_norm: bool = False
    interleaved: Flag = False
    rope_by_window: Literal["", "base", "scaling", "none"] = ""
    no_rope: tuple[str, str] = ("", "")
    longrope: tuple[str, ...] = ()
    position_scale: bool = False
    eps: str = "rms_norm_eps"
    scale: str = ""
    query_scale: str = ""
    soft_cap: str = ""
    final_soft_cap: str = ""
    embedding_scale: str = ""
    residual_scale: str = ""
    logit_scale: str = ""
    logit_divisor: str = ""
    tanh_gelu: bool = False
    routing: Literal["softmax", "top_k", "groups"] = "softmax"
    normalized: Flag = True
    routed_scale: str = ""
    clipped: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()
    only: Mapping[str, Any] = NOTHING


class GgufSpec(Record):
    """How GGUF files store a family.

    - `architecture`: their name for it; the row whose `experts` are as in the file is taken.
    - `permuted`: rows of queries and keys are in the order in which rope rotates neighbours.
    - `values`: config values that all its models have, and files leave out.
    - `unscaled_layers`: a model with this number of layers scales queries by the hidden size
      divided by the heads, others by the size of a head; 0 if queries have no such scale.
    - `refused`: config keys with which a file is another family.
    """

    architecture: str
    permuted: bool = False
    values: Mapping[str, Any] = NOTHING
    unscaled_layers: int = 0
    refused: tuple[str, ...] = ()


class ModelFamily(Record):
    """One family: what its layers have beside the matrices that every decoder has.

    - `norms`: the norms of the hidden size in a layer; with `layer_norm` each has a bias, unless
      `norm_bias` is false.
    - `query_key_norms`: norms of one head (`"head"`) or of all heads (`"heads"`).
    - `rotary`: a table of rotary frequencies, for `rotary_share` of a head or the config's value
      under `rotary_key`; with `rotary_by_window`, layers with a window have another table.
    - `positions`: learned position embeddings.
    - `parallel`: attention and network of a layer have one input; `parallel_norms` is the key of
      the number of norms in such layers.
    - `eager` and `unfused`: attention holds all scores in memory.
    - `post_norm`: a layer's norms come after its attention and its network, and not before.
    - `keeps_embeddings`: those of the words live on beside their sums with positions.
    - `bidirectional`: tokens attend to later ones as well; shorter sequences of a batch are masked.
    - `position_bias`: a learned number for each pair of tokens and head is added to the scores.
    - `score_tensors`: tensors of the size of all scores that attention holds at its peak.
    - `wide_routing`: the results of experts are weighted in float32.
    - `shared_gate`: the experts that every token passes have a gate of their own.
    - `router_bias`: the router has a bias for each expert, kept as a buffer.
    - `expert_bias`: the matrices of experts and their router have biases.
    - `sinks`: each head has a score that belongs to no key.
    - `latent`: keys and values are made from one small vector a token, which is what is cached.
    - `plain_heads`: heads share the hidden size evenly, each with its own keys; all share one key
      where the config's key `multi_query_if` is true, or `kv_heads` of them where `grouped_if` is.
    - `windows_if`: the key that turns windows on.
    - `dense_if_none`: a config with 0 experts has layers without them.
    - `only`: options that are counted with this value only.
    - `aliases`: other names of the family in configs.
    - `keys`: its config keys for sizes, by our names (`hidden`, `layers` …), if they are unusual.
    - `gguf`: how GGUF files store it; `None` if they are not supported.
    - `forward`: how `anydevice.llm` runs it; `None` if it does not.
    """

    qkv_bias: Flag = "attention_bias"
    output_bias: Flag = "attention_bias"
    mlp_bias: Flag = "mlp_bias"
    head_bias: bool = False
    gated: bool = True
    fused_qkv: bool = False
    fused_gate: bool = False
    norms: int = 2
    norm_weights: bool = True
    layer_norm: bool = False
    norm_bias: bool = True
    query_key_norms: Literal["", "head", "heads"] = ""
    query_key_norms_if: str = ""
    parallel: Flag = False
    eager: bool = False
    unfused: bool = False
    post_norm: bool = False
    keeps_embeddings: bool = False
    bidirectional: bool = False
    position_bias: bool = False
    score_tensors: int = 0
    wide_routing: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    latent: bool = False
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
    dense_if_none: bool = False
    plain_heads: bool = False
    multi_query_if: str = ""
    grouped_if: str = ""
    parallel_norms: str = ""
    only: Mapping[str, Any] = NOTHING
    defaults: Mapping[str, Any] = NOTHING
    aliases: tuple[str, ...] = ()
    keys: Mapping[str, str] = NOTHING
    gguf: GgufSpec | None = None
    forward: ForwardSpec | None = None

    @property
    def norm_vectors(self) -> int:
        """The vectors of parameters that a norm has."""
        return self.norm_weights * (1 + (self.layer_norm and self.norm_bias))


TIED = {"tie_word_embeddings": True}
_WIDE = {"rms_norm_eps": 1e-5}
_FINE = {"rms_norm_eps": 1e-6}
_GEMMA = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", **TIED, **_FINE}
_TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_SPARSE = {"mlp_only_layers": None, "decoder_sparse_step": 1}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128}
_LATENT |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_YARN: dict[str, Any] = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_MISTRAL_ROPE = {**_YARN, "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1}
_MISTRAL_ROPE |= {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0}
_GPT_OSS_ROPE = {**_YARN, "rope_theta": 150000.0, "factor": 32.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}
_WHOLE = {"sliding_window": None}
_ONE_WAY = {"use_bidirectional_attention": False}
_NO_WINDOWS = {"use_sliding_window": False}
_SOFT_CAPS: dict[str, Any] = {
    "soft_cap": "attn_logit_softcapping",
    "final_soft_cap": "final_logit_softcapping",
}

UNKNOWN = ModelFamily()
"""The row of a model that is known by its tensors alone: layers like Llama's are assumed."""
DENSE, SPARSE = "llama", "mixtral"
"""The families of a shape that is given by numbers, without and with experts."""


def _biases(flag: Flag) -> dict[str, Any]:
    return {"qkv_bias": flag, "output_bias": flag, "mlp_bias": flag}


ARCHITECTURES: dict[str, ModelFamily] = {
    "llama": ModelFamily(
        gguf=GgufSpec("llama", permuted=True), defaults=_FINE, forward=ForwardSpec(only=_WHOLE)
    ),
    "granite": ModelFamily(
        gguf=GgufSpec("granite", permuted=True),
        defaults=_FINE,
        forward=ForwardSpec(
            scale="attention_multiplier",
            embedding_scale="embedding_multiplier",
            residual_scale="residual_multiplier",
            logit_divisor="logits_scaling",
            only=_WHOLE,
        ),
    ),
    "seed_oss": ModelFamily(
        output_bias="attention_out_bias",
        defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
    ),
    "ernie4_5": ModelFamily(
        **_biases("use_bias"), defaults={"head_dim": 128, "num_key_value_heads": 2, **TIED}
    ),
    "mistral": ModelFamily(
        gguf=GgufSpec("llama", permuted=True),
        **_biases(False),
        forward=ForwardSpec(),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, **_FINE},
    ),
    "ministral3": ModelFamily(
        **_biases(False),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _MISTRAL_ROPE}
        | _WIDE,
        forward=ForwardSpec(position_scale=True),
    ),
    "qwen2": ModelFamily(
        gguf=GgufSpec("qwen2"),
        **_biases(False) | {"qkv_bias": True},
        windows="last",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
        | _FINE,
        forward=ForwardSpec(),
    ),
    "qwen3": ModelFamily(
        gguf=GgufSpec("qwen3"),
        mlp_bias=False,
        query_key_norms="head",
        windows="last",
        defaults={"num_key_value_heads": 32, "head_dim": 128}
        | {"sliding_window": 4096, "max_window_layers": 28, **_FINE},
        forward=ForwardSpec(),
    ),
    "gemma": ModelFamily(
        gguf=GgufSpec("gemma", values=_TANH),
        mlp_bias=False,
        embedding_scale=True,
        defaults={"num_key_value_heads": 16, **_GEMMA},
        forward=ForwardSpec(unit_norm=True, tanh_gelu=True, only=_ONE_WAY | _WHOLE),
    ),
    "gemma2": ModelFamily(
        gguf=GgufSpec("gemma2", values=_TANH, unscaled_layers=46),
        mlp_bias=False,
        norms=4,
        eager=True,
        embedding_scale=True,
        windows="pattern",
        pattern=2,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, **_GEMMA}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"query_pre_attn_scalar": 256},
        forward=ForwardSpec(
            unit_norm=True, query_scale="query_pre_attn_scalar", only=_ONE_WAY, **_SOFT_CAPS
        ),
    ),
    "gemma3_text": ModelFamily(
        aliases=("gemma3",),
        gguf=GgufSpec("gemma3", values=_TANH, unscaled_layers=62),
        mlp_bias=False,
        norms=4,
        query_key_norms="head",
        embedding_scale=True,
        rotary_by_window=True,
        windows="pattern",
        pattern=6,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, **_GEMMA}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256}
        | {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072},
        forward=ForwardSpec(
            unit_norm=True,
            rope_by_window="base",
            query_scale="query_pre_attn_scalar",
            only=_ONE_WAY,
            **_SOFT_CAPS,
        ),
    ),
    "phi": ModelFamily(
        **_biases(True),
        head_bias=True,
        gated=False,
        norms=1,
        layer_norm=True,
        query_key_norms="head",
        query_key_norms_if="qk_layernorm",
        parallel=True,
        rotary_share=0.5,
        rotary_key="partial_rotary_factor",
        defaults={"hidden_act": "gelu_new"},
    ),
    "phi3": ModelFamily(
        gguf=GgufSpec("phi3"),
        **_biases(False),
        fused_qkv=True,
        fused_gate=True,
        rotary_key="partial_rotary_factor",
        defaults={"original_max_position_embeddings": 4096, **_WIDE},
        forward=ForwardSpec(longrope=("su", "yarn")),
    ),
    "mixtral": ModelFamily(
        gguf=GgufSpec("llama", permuted=True),
        **_biases(False),
        experts=True,
        wide_routing=True,
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"rope_theta": 1e6, **_WIDE},
        forward=ForwardSpec(),
    ),
    "qwen3_moe": ModelFamily(
        gguf=GgufSpec("qwen3moe", values={"norm_topk_prob": True}),
        mlp_bias=False,
        query_key_norms="head",
        windows_if="use_sliding_window",
        experts=True,
        dense_if_none=True,
        defaults={"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768, "sliding_window": None, **_SPARSE, **_FINE},
        forward=ForwardSpec(normalized="norm_topk_prob"),
    ),
    "qwen2_moe": ModelFamily(
        gguf=GgufSpec("qwen2moe", values={"norm_topk_prob": False}),
        **_biases(False) | {"qkv_bias": "qkv_bias"},
        windows="none",
        experts=True,
        dense_if_none=True,
        shared_gate=True,
        defaults={"qkv_bias": True, "num_key_value_heads": 16, "num_experts": 60}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632, **_SPARSE, **_FINE},
        forward=ForwardSpec(normalized="norm_topk_prob", only=_NO_WINDOWS),
    ),
    "gpt_oss": ModelFamily(
        mlp_bias=False,
        eager=True,
        windows="pattern",
        pattern=2,
        experts=True,
        expert_bias=True,
        sinks=True,
        defaults={"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8}
        | {"sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4}
        | {"rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE, **_WIDE},
        forward=ForwardSpec(routing="top_k", clipped=True),
    ),
    "deepseek_v2": ModelFamily(
        latent=True,
        experts=True,
        wide_routing=True,
        defaults={"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
        | {"first_k_dense_replace": 0, "num_experts_per_tok": 6, **_LATENT},
    ),
    "deepseek_v3": ModelFamily(
        mlp_bias=False,
        latent=True,
        experts=True,
        wide_routing=True,
        router_bias=True,
        defaults={"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048}
        | {"first_k_dense_replace": 3, "num_experts_per_tok": 8, **_LATENT, **_FINE}
        | {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"rope_interleave": True},
        forward=ForwardSpec(
            interleaved="rope_interleave",
            routing="groups",
            normalized="norm_topk_prob",
            routed_scale="routed_scaling_factor",
            only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
            | _WHOLE,
        ),
    ),
    "olmo": ModelFamily(mlp_bias=False, norm_weights=False),
    "olmo2": ModelFamily(
        gguf=GgufSpec("olmo2", refused=("sliding_window",)),
        mlp_bias=False,
        query_key_norms="heads",
        defaults=_WIDE,
        forward=ForwardSpec(post_norm=True, only=_WHOLE),
    ),
    "olmo3": ModelFamily(
        mlp_bias=False,
        query_key_norms="heads",
        rotary_by_window=True,
        windows="pattern",
        pattern=4,
        defaults={"sliding_window": 4096, "rope_theta": 500000.0, **_WIDE},
        forward=ForwardSpec(post_norm=True, rope_by_window="scaling"),
    ),
    "exaone4": ModelFamily(
        **_biases(False),
        query_key_norms="head",
        windows="pattern",
        pattern=4,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "smollm3": ModelFamily(
        gguf=GgufSpec("smollm3", permuted=True),
        windows="none",
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4}
        | {**TIED, **_FINE},
        forward=ForwardSpec(no_rope=("no_rope_layers", "no_rope_layer_interval"), only=_NO_WINDOWS),
    ),
    "starcoder2": ModelFamily(
        gguf=GgufSpec("starcoder2", values={"sliding_window": 4096, **_TANH}),
        **_biases("use_bias"),
        gated=False,
        layer_norm=True,
        defaults={"use_bias": True, "num_key_value_heads": 2, **TIED}
        | {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
        forward=ForwardSpec(eps="norm_epsilon"),
    ),
    "glm4": ModelFamily(
        output_bias=False,
        mlp_bias=False,
        fused_gate=True,
        norms=4,
        rotary_share=0.5,
        rotary_key="partial_rotary_factor",
        defaults={"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128}
        | {"rms_norm_eps": 1.5625e-7},
        forward=ForwardSpec(interleaved=True, only=_WHOLE),
    ),
    "cohere2": ModelFamily(
        mlp_bias=False,
        norms=1,
        layer_norm=True,
        norm_bias=False,
        parallel=True,
        windows="pattern",
        pattern=4,
        defaults={"sliding_window": 4096, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, **TIED},
        forward=ForwardSpec(
            interleaved=True, rope_by_window="none", eps="layer_norm_eps", logit_scale="logit_scale"
        ),
    ),
    "gpt2": ModelFamily(
        **_biases(True),
        gated=False,
        fused_qkv=True,
        layer_norm=True,
        rotary=False,
        positions=True,
        plain_heads=True,
        only={"add_cross_attention": False},
        defaults={"n_positions": 1024, "activation_function": "gelu_new", **TIED},
    ),
    "gpt_neox": ModelFamily(
        mlp_bias=True,
        gated=False,
        fused_qkv=True,
        layer_norm=True,
        parallel="use_parallel_residual",
        rotary_share=0.25,
        rotary_key="rotary_pct",
        plain_heads=True,
        defaults={"attention_bias": True, "use_parallel_residual": True},
    ),
    "falcon": ModelFamily(
        **_biases("bias"),
        gated=False,
        fused_qkv=True,
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


class Experts(Record):
    """A mixture of experts: how many a layer has, how many a token passes, how wide each is.

    `shared` is the width of the network that every token passes as well, `layers` are the numbers
    of the layers that have experts.
    """

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    layers: tuple[int, ...] = ()


class LatentSizes(Record):
    """The sizes of latent attention (MLA): ranks of queries and keys, and the parts of a head.

    A head of a query or key is `plain` elements and `rotated` ones; keys and values of a token are
    made from `rank` elements, and all its heads share the rotated ones. `query_rank` is 0 where
    queries are made in one step.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    value: int


class LayerStack(Record):
    """Layers of one kind, as the numbers that the memory of running them follows from.

    `kv_elements` are the elements that one token leaves in the cache of each layer (0 where the
    layer has none), `windows` the most tokens that each layer keeps (`None`: all of them).

    `build` is what its family's layers have, `activation` the name of the function in the network,
    `parallel` whether attention and network of a layer work on one input. `distances` is the number
    of distances between tokens for which heads have scores of their own.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    kv_elements: tuple[int, ...]
    windows: tuple[int | None, ...]
    experts: Experts | None = None
    latent: LatentSizes | None = None
    build: ModelFamily = UNKNOWN
    activation: str = ""
    parallel: bool = False
    distances: int = 0

    @property
    def key_elements(self) -> int:
        """The elements of one token's keys, in all heads, as attention reads them."""
        cached = self.kv_elements[0] // 2 if self.kv_elements and not self.latent else 0
        return cached or self.heads * self.head_size

    @property
    def grouped(self) -> bool:
        """Whether several heads of queries share one head of keys."""
        return self.key_elements != self.heads * self.head_size


class Tower(LayerStack):
    """One stack of a model that has several, or none that writes.

    `tokens` is the length of what it reads where that is fixed, as for pictures. `source` is the
    number of the tower whose output it attends to.
    """

    tokens: int | None = None
    source: int | None = None


class ModelShape(LayerStack):
    """A model as the numbers that its memory follows from.

    Parameters are elements, bytes are those of the weights in `dtype`, quantized weights, scales
    and buffers included. `layer_weights` and `layer_bytes` have one number a layer, in order;
    `other_*` is what lies outside of the layers and is neither embedding nor head: final norms,
    buffers, poolers. A head that is tied to the embedding has no parameters of its own.

    A decoder is one stack of layers. Encoders and encoder–decoders have `towers`, and the numbers
    of the shape itself are those of the last one; `cross_elements` are what a token of the text
    that is read leaves in the cache of each layer, and `source_tokens` their number where it is
    fixed.

    `outputs` are the numbers that the head gives (the vocabulary, or labels), `outputs_of` whether
    it gives them for the token that is written, for every one that is read, or for a sequence.

    `rounding` are the bytes that PyTorch's allocator for GPUs adds to the matrices by giving them
    whole blocks, 0 if they are not known one by one.

    `exact` says that weights and cache are right to the byte; where they are not, or where
    something had to be assumed, `assumed` says what, in sentences.
    """

    name: str = ""
    architecture: str = ""
    dtype: str = "bfloat16"
    vocabulary: int = 0
    tied_embeddings: bool = False
    layer_weights: tuple[int, ...] = ()
    layer_bytes: tuple[int, ...] = ()
    embedding_parameters: int = 0
    embedding_bytes: int = 0
    head_parameters: int = 0
    head_bytes: int = 0
    other_parameters: int = 0
    other_bytes: int = 0
    outputs: int = 0
    outputs_of: Outputs = "new token"
    towers: tuple[Tower, ...] = ()
    cross_elements: tuple[int, ...] = ()
    source_tokens: int | None = None
    quantization: str | None = None
    longest_context: int | None = None
    rounding: int = 0
    exact: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        outside = self.embedding_parameters + self.head_parameters + self.other_parameters
        return sum(self.layer_weights) + outside

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights; tied ones count once."""
        outside = self.embedding_bytes + self.head_bytes + self.other_bytes
        return sum(self.layer_bytes) + outside

    @property
    def fixed_context(self) -> int | None:
        """The number of tokens where it does not depend on what is read, as for pictures."""
        fixed = self.towers and all(tower.tokens for tower in self.towers)
        return self.towers[-1].tokens if fixed else None

    def kv_bytes(self, context: int, batch: int = 1, dtype: str | None = None) -> tuple[int, ...]:
        """Return the bytes of a static cache in `dtype`, by default the model's, for each layer."""
        width = as_dtype(dtype or self.dtype).itemsize
        read = self.source_tokens or context
        crossed = self.cross_elements or (0,) * self.layers
        sizes = []
        for own, window, cross in zip(self.kv_elements, self.windows, crossed, strict=True):
            tokens = context if window is None else min(window, context)
            sizes.append(batch * width * (own * tokens + cross * read))
        return tuple(sizes)


MIB = 2**20
_BLOCK_STEP, _LARGE_BLOCK, _SEGMENT_STEP = 512, 10 * MIB, 2 * MIB


def rounding(sizes: Iterable[int]) -> int:
    """Return the bytes that whole blocks add to tensors of these sizes.

    >>> rounding([25 * MIB, 24 * MIB, 1000])
    1048600
    """
    return sum(block_bytes(size) - size for size in sizes)


def block_bytes(size: int) -> int:
    """Return the bytes of the block that PyTorch's allocator gives a tensor of this size."""
    size = -(-size // _BLOCK_STEP) * _BLOCK_STEP
    rest = -size % _SEGMENT_STEP if size >= _LARGE_BLOCK else 0
    return size + rest if rest <= MIB else size


LARGEST = 2**63 - 1
"""The largest number of a shape; a larger one is an error in a file."""
MOST_LAYERS = 100_000


def integer(name: str, value: Any, least: int = 1, most: int = LARGEST) -> int:
    """Return `value` as an `int` from `least` to `most`, else raise `ConfigurationError`."""
    return checks.integer(name, value, least, most)


def memory_dtype(spec: object) -> DType:
    """Return the row of a dtype as people name it where memory is meant: "fp8" is float8_e4m3fn."""
    return as_dtype("float8_e4m3fn" if spec == "fp8" else spec)


def float_dtype(name: str, spec: object) -> str:
    """Return the name of a float of 8 bits or more; raise `ConfigurationError` for others."""
    row = memory_dtype(spec)
    if row.kind != "float" or row.packed:
        raise ConfigurationError(
            f"{name} must be a float of 8 bits or more, such as 'bfloat16', not {row.name!r}", name
        )
    return row.name


def quotient(name: str, value: int, divisor_name: str, divisor: int) -> int:
    """Return `value / divisor`; raise `ConfigurationError` if it is not an integer."""
    if value % divisor:
        raise ConfigurationError(
            f"{name} ({value}) is not a multiple of {divisor_name} ({divisor}); check both", name
        )
    return value // divisor
