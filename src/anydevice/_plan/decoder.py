"""The shape of a decoder from its config: its matrices and vectors, layer by layer."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from anydevice._core import checks
from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record, replace
from anydevice._plan.families import Experts, LatentSizes, ModelShape, Outputs, quotient
from anydevice._plan.overheads import rounding
from anydevice._plan.quantization import Quantization, quantization_of
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._plan.config import ModelConfig

USUAL_DTYPE = "bfloat16"
"""The dtype of weights where neither the caller nor the model names one."""
NO_DTYPE = f"no dtype is named for the weights: {USUAL_DTYPE} is assumed"


class Matrix(Record):
    """`count` matrices of `rows` x `columns`, stored as one tensor, with or without a bias."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    count: int = 1

    @property
    def matrix_elements(self) -> int:
        """The parameters without biases."""
        return self.count * self.rows * self.columns

    @property
    def elements(self) -> int:
        """All parameters, biases included."""
        return self.count * self.rows * (self.columns + self.bias)

    def stored(self, quantization: Quantization, width: int) -> int:
        """Their bytes in a quantized format; biases stay as they are."""
        bias = self.rows * width if self.bias else 0
        return self.count * (quantization.matrix_bytes(self.rows, self.columns, width) + bias)


class DecoderSizes(Record):
    """The sizes that every family has, by our names for them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    latent: LatentSizes | None = None


def decoder_shape(config: ModelConfig, dtype: str | None = None) -> ModelShape:
    """Return the shape of a config's decoder, with its weights in `dtype` or in its own.

    Raises `ConfigurationError` if a number is missing, wrong, or does not go with another.
    """
    config.check_options(config.architecture.only)
    sizes, row = decoder_sizes(config), config.architecture
    name = dtype or config.dtype
    own = name or USUAL_DTYPE
    width = as_dtype(own).itemsize
    settings = config.get("quantization_config")
    quantization = quantization_of(settings, config.source) if settings else None
    if quantization and width == 1:
        own, width = _beside_quantized(config, quantization)
    experts = layer_experts(config, sizes)
    routed = set(experts.layers) if experts else set()
    sparse = [number in routed for number in range(sizes.layers)]
    kinds = {kind: _matrices(config, sizes, experts if kind else None) for kind in set(sparse)}
    vectors = _vectors(config, sizes)
    head = _head(config, sizes)
    positions = config.number("longest_context") * sizes.hidden if row.positions else 0
    final = sizes.hidden * row.norm_vectors
    assumed = list(config.assumed)
    if name is None:
        assumed.append(NO_DTYPE)
    if quantization:
        assumed.append(f"weights are counted as {quantization.method} keeps them")
        assumed += quantization.assumed
    embedding = sizes.vocabulary * sizes.hidden
    rounded = rounding([embedding * width, head.parameters * width])
    elements: dict[bool, int] = {}
    for kind, matrices in kinds.items():
        sizes_in_bytes = [matrix.matrix_elements * width for matrix in matrices]
        rounded += sparse.count(kind) * rounding(sizes_in_bytes)
        elements[kind] = vectors + sum([matrix.elements for matrix in matrices])
    layer_bytes = []
    for number, kind in enumerate(sparse):
        # The router's bias is a buffer, and no parameter.
        bias = experts.count if experts and kind and row.router_bias else 0
        size = (elements[kind] + bias) * width
        if quantization:
            size = _quantized_bytes(kinds[kind], number, quantization, width)
            size += (vectors + bias) * width
        layer_bytes.append(size)
    return ModelShape(
        name=str(config.raw.get("_name_or_path") or config.family or "model"),
        architecture=config.family or "unknown",
        dtype=own,
        **vars(sizes),
        tied_embeddings=head.tied,
        layer_weights=tuple([elements[kind] for kind in sparse]),
        layer_bytes=tuple(layer_bytes),
        embedding_parameters=embedding,
        embedding_bytes=embedding * width,
        head_parameters=head.parameters,
        head_bytes=head.parameters * width,
        other_parameters=positions + final,
        other_bytes=(positions + final) * width + _buffers(config, sizes, width),
        kv_elements=_cache_elements(config, sizes),
        windows=layer_windows(config, sizes),
        outputs=head.outputs,
        outputs_of=head.outputs_of,
        experts=experts,
        quantization=quantization.method if quantization else None,
        longest_context=config.optional("longest_context"),
        rounding=0 if quantization else rounded,
        build=row,
        activation=str(config.get("hidden_act") or config.get("activation_function") or ""),
        parallel=config.flag(row.parallel),
        exact=quantization is None and not config.assumed,
        assumed=tuple(assumed),
    )


def _beside_quantized(config: ModelConfig, quantization: Quantization) -> tuple[str, int]:
    """The dtype of what is not quantized, and its bytes, where weights of 8 bits are asked for."""
    if quantization.method != "fp8":
        raise ConfigurationError(
            f"the weights are quantized already ({quantization.method}): leave dtype out", "dtype"
        )
    own = config.dtype or USUAL_DTYPE
    return own, as_dtype(own).itemsize


def decoder_sizes(config: ModelConfig) -> DecoderSizes:
    """Return the sizes of a config; raise `ConfigurationError` if they do not fit together."""
    row, source = config.architecture, config.source
    hidden, heads = config.number("hidden"), config.number("heads")
    kv_heads = heads if row.plain_heads else config.number("kv_heads", heads)
    if row.multi_query_if and config.get(row.multi_query_if):
        kv_heads = 1
    if _is_grouped(config):
        kv_heads = config.number("kv_heads", heads)
    latent = _latent_sizes(config) if row.latent else None
    if latent:
        kv_heads, head_size = heads, latent.plain + latent.rotated
    else:
        named = None if row.plain_heads else config.optional("head_size")
        head_size = named or quotient(f"{source}: the hidden size", hidden, "the heads", heads)
    quotient(f"{source}: the number of heads", heads, "the key/value heads", kv_heads)
    usual = config.optional("expert_size") if row.gated else 4 * hidden
    return DecoderSizes(
        layers=config.number("layers"),
        hidden=hidden,
        intermediate=config.number("intermediate", usual),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=config.number("vocabulary"),
        latent=latent,
    )


def _latent_sizes(config: ModelConfig) -> LatentSizes:
    rotated = config.optional("head_size")
    if rotated and rotated != config.get("qk_rope_head_dim"):
        raise config.refusal(f"head_dim = {rotated} is not qk_rope_head_dim")
    return LatentSizes(
        query_rank=config.count("q_lora_rank", least=1),
        rank=config.count("kv_lora_rank", least=1),
        plain=config.count("qk_nope_head_dim", least=1),
        rotated=config.count("qk_rope_head_dim", least=1),
        value=config.count("v_head_dim", least=1),
    )


class DecoderHead(Record):
    """The head behind the last layer: its parameters, and the number of its outputs."""

    parameters: int
    outputs: int
    outputs_of: Outputs = "tokens"
    tied: bool = False


def _head(config: ModelConfig, sizes: DecoderSizes) -> DecoderHead:
    """Return the head of the class that the config names, by default that of a language model."""
    hidden, vocabulary = sizes.hidden, sizes.vocabulary
    kind = config.model_class or "ForCausalLM"
    if kind in ("ForCausalLM", "LMHeadModel"):
        tied = bool(config.get("tie_word_embeddings"))
        bias = vocabulary * config.architecture.head_bias
        own = bias + (0 if tied else vocabulary * hidden)
        return DecoderHead(own, vocabulary, "new token", tied)
    if kind in ("Model", "TextModel"):
        return DecoderHead(0, 0)
    biases = {
        "ForSequenceClassification": 0,
        "ForTokenClassification": 1,
        "ForQuestionAnswering": 1,
    }
    if kind not in biases:
        raise config.refusal(f"the class {kind!r} of {config.family} is not in the table")
    outputs = 2 if kind == "ForQuestionAnswering" else config.labels
    return DecoderHead(outputs * (hidden + biases[kind]), outputs)


def _is_grouped(config: ModelConfig) -> bool:
    """Whether the config says that plain heads share keys."""
    switch = config.architecture.grouped_if
    return bool(switch and config.get(switch))


def _matrices(config: ModelConfig, sizes: DecoderSizes, experts: Experts | None) -> list[Matrix]:
    """Return the matrices of a layer, with `experts` or without."""
    attention = _latent_attention(config, sizes) if sizes.latent else _attention(config, sizes)
    if experts:
        return attention + _expert_matrices(config, experts, sizes.hidden)
    return attention + _network(config, sizes)


def _attention(config: ModelConfig, sizes: DecoderSizes) -> list[Matrix]:
    row, hidden = config.architecture, sizes.hidden
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    bias = config.flag(row.qkv_bias)
    rows = {"q": queries, "k": keys, "v": keys}
    if row.fused_qkv:
        rows = {"qkv": queries + 2 * keys}
    attention = [Matrix(f"self_attn.{k}_proj", n, hidden, bias) for k, n in rows.items()]
    attention.append(Matrix("self_attn.o_proj", hidden, queries, config.flag(row.output_bias)))
    return attention


def _latent_attention(config: ModelConfig, sizes: DecoderSizes) -> list[Matrix]:
    latent, hidden, bias = sizes.latent, sizes.hidden, config.flag(config.architecture.qkv_bias)
    assert latent is not None
    queries, made = sizes.heads * sizes.head_size, sizes.heads * (latent.plain + latent.value)
    into = [Matrix("self_attn.q_proj", queries, hidden)]
    if latent.query_rank:
        into = [
            Matrix("self_attn.q_a_proj", latent.query_rank, hidden, bias),
            Matrix("self_attn.q_b_proj", queries, latent.query_rank),
        ]
    return [
        *into,
        Matrix("self_attn.kv_a_proj_with_mqa", latent.rank + latent.rotated, hidden, bias),
        Matrix("self_attn.kv_b_proj", made, latent.rank),
        Matrix("self_attn.o_proj", hidden, sizes.heads * latent.value, bias),
    ]


def _network(config: ModelConfig, sizes: DecoderSizes) -> list[Matrix]:
    row, hidden, inner = config.architecture, sizes.hidden, sizes.intermediate
    bias = config.flag(row.mlp_bias)
    rows = {"gate": inner, "up": inner} if row.gated else {"up": inner}
    if row.fused_gate:
        rows = {"gate_up": 2 * inner}
    into = [Matrix(f"mlp.{k}_proj", n, hidden, bias) for k, n in rows.items()]
    return [*into, Matrix("mlp.down_proj", hidden, inner, bias)]


def _expert_matrices(config: ModelConfig, experts: Experts, hidden: int) -> list[Matrix]:
    inner, count = experts.intermediate, experts.count
    row, bias = config.architecture, config.flag(config.architecture.mlp_bias)
    found = [
        Matrix("mlp.gate", count, hidden, row.expert_bias),
        Matrix("mlp.experts.gate_up_proj", 2 * inner, hidden, row.expert_bias, count),
        Matrix("mlp.experts.down_proj", hidden, inner, row.expert_bias, count),
    ]
    if experts.shared:
        shared = "mlp.shared_expert" if row.shared_gate else "mlp.shared_experts"
        found += [
            Matrix(f"{shared}.gate_proj", experts.shared, hidden, bias),
            Matrix(f"{shared}.up_proj", experts.shared, hidden, bias),
            Matrix(f"{shared}.down_proj", hidden, experts.shared, bias),
        ]
    if row.shared_gate:
        found.append(Matrix("mlp.shared_expert_gate", 1, hidden))
    return found


def layer_experts(config: ModelConfig, sizes: DecoderSizes) -> Experts | None:
    """Return the experts of a model, with the layers that have them; `None` if it has none."""
    row = config.architecture
    if not row.experts or not (count := config.number("experts", least=not row.dense_if_none)):
        return None
    # Keys of other families say nothing here: only those that the row has are read.
    values = {key: value for key, value in config.values.items() if key in config.defaults}
    own = replace(config, values=values)
    dense = own.entries("mlp_only_layers") or ()
    step = own.count("decoder_sparse_step", default=1, least=1)
    layers = range(own.count("first_k_dense_replace"), sizes.layers)
    inner = config.number("expert_size", sizes.intermediate)
    return Experts(
        count=count,
        per_token=config.number("experts_per_token", config.defaults.get("num_experts_per_tok")),
        intermediate=inner,
        shared=own.optional("shared_expert_size", least=0) or own.count("n_shared_experts") * inner,
        layers=tuple(n for n in layers if n not in dense and (n + 1) % step == 0),
    )


def _vectors(config: ModelConfig, sizes: DecoderSizes) -> int:
    """The elements of a layer's norms and sinks."""
    row = config.architecture
    norms = row.norms
    if row.parallel_norms and config.flag(row.parallel):
        named = config.get(row.parallel_norms)
        norms = 2 if named == 2 or (named is None and _is_grouped(config)) else 1
    each = row.norm_vectors
    total = norms * sizes.hidden * each
    if row.query_key_norms and config.flag(row.query_key_norms_if or True):
        heads = 2 if row.query_key_norms == "head" else sizes.heads + sizes.kv_heads
        total += heads * sizes.head_size * each
    if sizes.latent:
        total += sizes.latent.query_rank + sizes.latent.rank
    return total + sizes.heads * row.sinks


def _quantized_bytes(
    layer: list[Matrix], number: int, quantization: Quantization, width: int
) -> int:
    return sum(
        matrix.elements * width
        if matrix.name == "mlp.gate" or quantization.skips(f"model.layers.{number}.{matrix.name}")
        else matrix.stored(quantization, width)
        for matrix in layer
    )


def _buffers(config: ModelConfig, sizes: DecoderSizes, width: int) -> int:
    """Tables of rotary frequencies, in 32 bits and in two copies each, and a scalar."""
    row = config.architecture
    scale = width if row.embedding_scale else 0
    if not row.rotary:
        return scale
    kinds = {window is None for window in layer_windows(config, sizes)}
    tables = len(kinds) if row.rotary_by_window else 1
    rotated = sizes.latent.rotated if sizes.latent else sizes.head_size * rotary_share(config)
    frequencies = ceil(int(rotated) / 2)
    return tables * frequencies * 4 * 2 + scale


def rotary_share(config: ModelConfig) -> float:
    """Return the part of a head that rope rotates, above 0 and at most 1."""
    row = config.architecture
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    inside = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    share = (row.rotary_key and (inside or config.get(row.rotary_key))) or row.rotary_share
    return checks.number(row.rotary_key, share, above=0, at_most=1, owner=config.source)


def _cache_elements(config: ModelConfig, sizes: DecoderSizes) -> tuple[int, ...]:
    if sizes.latent:
        return (sizes.latent.rank + sizes.latent.rotated,) * sizes.layers
    # Heads that are plain by default copy shared keys and values to each before they are cached.
    heads = sizes.heads if _is_grouped(config) else sizes.kv_heads
    return (2 * heads * sizes.head_size,) * sizes.layers


def layer_windows(config: ModelConfig, sizes: DecoderSizes) -> tuple[int | None, ...]:
    """Return the attention window of each layer; `None`: all tokens."""
    row, window = config.architecture, config.count("sliding_window") or None
    listed = config.entries("layer_types")
    if listed is not None:
        if len(listed) < sizes.layers:
            raise ConfigurationError(
                f"{config.source}: layer_types names {len(listed)} layers of {sizes.layers}",
                config.source,
            )
        chunk = config.count("attention_chunk_size") or None
        sliding = {"sliding_attention": window, "chunked_attention": chunk}
        return tuple(sliding.get(str(kind)) for kind in listed[: sizes.layers])
    if not window or row.windows == "none":
        return (None,) * sizes.layers
    if row.windows == "pattern":
        each = config.count("sliding_window_pattern") or row.pattern
        return tuple(window if (n + 1) % each else None for n in range(sizes.layers))
    if row.windows == "last":
        used = config.get("use_sliding_window")
        first = config.count("max_window_layers") if used else sizes.layers
        return tuple(window if n >= first else None for n in range(sizes.layers))
    used = not row.windows_if or config.get(row.windows_if)
    return (window if used else None,) * sizes.layers
