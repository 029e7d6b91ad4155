"""The shape of a model, given as a file, a folder, a config, a module, a tree or numbers.

A decoder is counted from its config, matrix by matrix (`encoder_families` has all others).
Without a config the bytes of the tensors are exact, and layers, heads and vocabulary follow from
their names.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

from anydevice._core import checks
from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record, replace
from anydevice._core.text import shortened
from anydevice._plan.config import (
    NAMES,
    ModelConfig,
    ModelFiles,
    UncountableError,
    as_config,
    is_config_path,
    is_gguf_path,
    locate,
    read_config,
)
from anydevice._plan.encoder_families import ENCODERS, encoder_shape
from anydevice._plan.families import (
    ARCHITECTURES,
    DENSE,
    NO_DTYPE,
    SPARSE,
    USUAL_DTYPE,
    Experts,
    LatentSizes,
    ModelShape,
    Outputs,
    float_dtype,
    memory_dtype,
    quotient,
    rounding,
)
from anydevice._plan.quantization import (
    BLOCK_BITS,
    QUANTIZED,
    SCHEMES,
    WEIGHTS,
    Quantization,
    in_scheme,
    quantization_of,
    quantized,
)
from anydevice.errors import ConfigurationError

_KEYWORDS = {word: names[0] for word, names in NAMES.items()} | {
    "architecture": "model_type",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
}
"""The keywords of a shape that is given by numbers, and the keys of a config they stand for."""

_NEEDED = ("layers", "hidden", "intermediate", "heads", "vocabulary")


def shape_of(
    model: Any = None, *, dtype: object = None, weights: str = "stored", **numbers: Any
) -> ModelShape:
    """Return the shape of a model, with its weights in `dtype`, by default in its own.

    `dtype` is a float; "int8" and "int4" are the model in its own dtype with quantized layers.
    Quantized `weights` are as they are stored; "float" unpacks them, and the name of a scheme, such
    as "q8_0", quantizes those that are stored as floats.
    `model` is one of these; nothing of it is loaded, and no array library is imported for the
    first four:

    - the path of a Hugging Face `config.json` or of the folder it is in, or the name of a model
      in the local Hugging Face cache;
    - the path of safetensors files or a GGUF file; only the headers are read;
    - a config as a mapping;
    - `None`, with the dimensions as keywords: `layers hidden intermediate heads vocabulary`, and
      optionally `kv_heads head_size tied window experts experts_per_token expert_size
      architecture`;
    - a `torch.nn.Module`, on any device and on `meta`, or any tree of arrays.

    Raises `ConfigurationError` for an unknown model, or for missing or inconsistent dimensions, and
    `TransferError` for invalid safetensors files.
    """
    checks.one_of("weights", weights, WEIGHTS)
    if weights in SCHEMES:
        return in_scheme(shape_of(model, dtype=dtype, **numbers), weights)
    name = None if dtype is None else memory_dtype(dtype).name
    if name in QUANTIZED:
        return quantized(shape_of(model, weights=weights, **numbers), name)
    if name is not None:
        float_dtype("dtype, if it is not 'int8' or 'int4',", name)
    if model is None:
        return _from_config(_from_numbers(numbers), name)
    if numbers:
        raise ConfigurationError(
            f"give a model or its dimensions ({', '.join(sorted(numbers))}), not both"
        )
    if isinstance(model, ModelShape):
        if name in (None, model.dtype):
            return model
        counted = f"this shape's weights are counted in {model.dtype}"
        raise ConfigurationError(f"{counted}; for {name}, give the model itself")
    unpacked = weights == "float"
    if isinstance(model, ModelFiles):
        return _from_files(model, name, unpacked)
    if isinstance(model, str | os.PathLike):
        return _from_path(model, name, unpacked)
    if isinstance(model, Mapping):
        sizes = (model.get(key) for word in _NEEDED for key in NAMES[word])
        named = "model_type" in model or "architectures" in model
        if named or any(isinstance(size, int) for size in sizes):  # and not a tree of arrays
            return _from_config(_without_quantization(as_config(model), unpacked), name)
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return _from_config(as_config(model.to_dict()), name)
    return _from_tree(model, name)


def _from_config(config: ModelConfig, dtype: str | None, *, partly: bool = False) -> ModelShape:
    """Return the shape of the model that a config describes, with `partly` of its text part."""
    if not config.known:
        known = f"one of the {len(ARCHITECTURES) + len(ENCODERS)} that are known"
        called = f"the architecture {shortened(config.family)!r} is not {known}"
        raise config.refusal(called if config.family else "it has no model_type")
    if config.part and not partly:
        raise config.refusal(f"beside {config.part} it has parts that are not in the table")
    if config.get("per_layer_config"):
        raise config.refusal("layers that differ (per_layer_config) are not in the table")
    try:
        count = encoder_shape if config.encoder else decoder_shape
        return count(config, dtype)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # A value of an unexpected type is an error of the file, not of this code.
        raise ConfigurationError(
            f"{config.source} has a value that is not valid: {error}", config.source
        ) from error


def _from_numbers(numbers: Mapping[str, Any]) -> ModelConfig:
    unknown = [word for word in numbers if word not in _KEYWORDS]
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: unknown dimension; known are {', '.join(_KEYWORDS)}"
        )
    missing = [word for word in _NEEDED if numbers.get(word) is None]
    if missing:
        raise ConfigurationError(
            f"give a model, or its dimensions: {', '.join(missing)} are missing"
        )
    # `None` is the same as not given, but a window of `None` says that there is none.
    given = {word: n for word, n in numbers.items() if n is not None or word == "window"}
    values = {_KEYWORDS[word]: number for word, number in given.items()}
    family = SPARSE if numbers.get("experts") else DENSE
    defaults = {"model_type": family, "num_key_value_heads": numbers["heads"]}
    return as_config({**defaults, **values}, "the shape")


def _from_path(model: str | os.PathLike[str], dtype: str | None, unpacked: bool) -> ModelShape:
    path = locate(os.fspath(model), planning=True)
    if not is_config_path(path):
        if path.is_dir() and not any(".safetensors" in name for name in os.listdir(path)):
            raise ConfigurationError(
                f"{path} holds neither a config.json nor a .safetensors file; give the folder of "
                "a model, its config.json, or the files with its weights",
                str(path),
            )
        return _shape_from_tensors(_tensors_of_files(path), dtype, path.resolve().stem)
    files = ModelFiles(path, read_config(path))
    if is_gguf_path(path) or path == Path(model).expanduser():
        return _from_files(files, dtype, unpacked)
    # A folder in the cache is named by a commit.
    return replace(_from_files(files, dtype, unpacked), name=os.fspath(model))


def _without_quantization(config: ModelConfig, unpacked: bool) -> ModelConfig:
    """Return the config, of `unpacked` weights without what says that they are quantized."""
    if not unpacked:
        return config
    values = {key: x for key, x in config.values.items() if key != "quantization_config"}
    return replace(config, values=values, tensors=())


def _from_files(files: ModelFiles, dtype: str | None, unpacked: bool) -> ModelShape:
    path, config = files.path, _without_quantization(files.config, unpacked)
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    try:
        shape = _from_config(config, dtype, partly=has_weights)
    except UncountableError as error:
        if not has_weights:
            raise
        shape = _shape_from_tensors(_tensors_of_files(path), dtype, files.name)
        return replace(shape, assumed=(*shape.assumed, f"its config does not help: {error.reason}"))
    shape = replace(shape, name=files.name or shape.name)
    if config.tensors:
        return _with_blocks(shape, config)
    settings = config.get("quantization_config")
    quantization = quantization_of(settings, config.source) if settings else None
    if shape.exact or not has_weights or (quantization and not quantization.assumed):
        return shape
    # For an unknown format or family, headers tell the weights better than a config does.
    in_dtype = None if shape.quantization else dtype
    weights = _weights(_tensors_of_files(path), shape.layers, in_dtype)
    note = "weights are counted from the files' headers"
    return replace(shape, **weights, assumed=(*shape.assumed, note))


def _with_blocks(shape: ModelShape, config: ModelConfig) -> ModelShape:
    """Return the shape with the weights of a GGUF file, each in memory as its type is kept."""
    names = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
    tensors, schemes = [], Counter[str]()
    for own, sizes, kind in config.tensors:
        name = names.get(own, own.replace("blk.", "layers."))
        bits = BLOCK_BITS.get(kind) if len(sizes) > 1 and "ffn_gate_inp." not in name else None
        if name.startswith("rope_"):
            continue
        stored = int(prod(sizes) * (bits or as_dtype(shape.dtype).bits) // 8)
        schemes[kind.lower()] += stored if bits else 0
        tensors.append(_Tensor(name, sizes, "uint8" if bits else shape.dtype, stored))
    kinds = [kind for kind, size in schemes.most_common() if size]
    if not kinds:
        return shape
    weights = _weights(tensors, shape.layers, None)
    numbers = {name: size for name, size in weights.items() if name.endswith("_bytes")}
    rotary = shape.other_bytes - shape.other_parameters * as_dtype(shape.dtype).itemsize
    numbers["other_bytes"] += rotary
    return replace(shape, **numbers, quantization=" and ".join(kinds), rounding=0)


def _from_tree(tree: Any, dtype: str | None) -> ModelShape:
    tensors = _tensors_of_tree(tree)
    kind = type(tree).__name__
    measured = _shape_from_tensors(tensors, dtype, kind)
    described = getattr(getattr(tree, "config", None), "to_dict", None)
    if described is None:
        return measured
    own = (cls.__name__ for cls in type(tree).__mro__ if cls.__module__.startswith("transformers."))
    named = {"architectures": [name]} if (name := next(own, None)) else {}
    try:
        config = as_config({**described(), **named})
        shape = _from_config(config, dtype or measured.dtype, partly=True)
    except ConfigurationError:
        note = "its config is not that of a model in the tables"
        return replace(measured, assumed=(*measured.assumed, note))
    if not shape.towers:
        return replace(shape, **_weights(tensors, shape.layers, dtype), name=kind)
    # The layers of several towers have the same numbers in their names.
    if shape.weight_bytes == measured.weight_bytes:
        return replace(shape, name=kind)
    return replace(measured, assumed=(*measured.assumed, "it is not as its config says"))


class Matrix(Record):
    """`count` matrices of `rows` x `columns`, stored as one tensor, with or without a bias."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    count: int = 1

    @property
    def elements(self) -> int:
        """All parameters, biases included."""
        return self.count * self.rows * (self.columns + self.bias)

    def stored(self, quantization: Quantization, width: int) -> int:
        """Return their bytes in a quantized format; biases stay as they are."""
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
    """Return the shape of a config's decoder; raise `ConfigurationError` for a wrong number."""
    config.check_options(config.architecture.only)
    sizes, row = decoder_sizes(config), config.architecture
    name = dtype or config.dtype
    own = name or USUAL_DTYPE
    width = as_dtype(own).itemsize
    settings = config.get("quantization_config")
    quantization = quantization_of(settings, config.source) if settings else None
    if quantization and width == 1:  # the dtype of all tensors that are not quantized
        if quantization.method != "fp8":
            method = quantization.method
            raise ConfigurationError(
                f"the weights are quantized already ({method}): leave dtype out", "dtype"
            )
        own = config.dtype or USUAL_DTYPE
        width = as_dtype(own).itemsize
    experts = layer_experts(config, sizes)
    routed = set(experts.layers) if experts else set()
    sparse = [number in routed for number in range(sizes.layers)]
    attention = _latent_attention(config, sizes) if sizes.latent else _attention(config, sizes)
    kinds = {False: attention + _network(config, sizes)}
    if experts:
        kinds[True] = attention + _expert_matrices(config, experts, sizes.hidden)
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
        sizes_in_bytes = [m.count * m.rows * m.columns * width for m in matrices]
        rounded += sparse.count(kind) * rounding(sizes_in_bytes)
        elements[kind] = vectors + sum([matrix.elements for matrix in matrices])
    layer_bytes = []
    for number, kind in enumerate(sparse):
        # The router's bias is a buffer, and no parameter.
        bias = experts.count if experts and kind and row.router_bias else 0
        size = (elements[kind] + bias) * width
        if quantization:
            size = (vectors + bias) * width
            for matrix in kinds[kind]:
                path = f"model.layers.{number}.{matrix.name}"
                whole = matrix.name == "mlp.gate" or quantization.skips(path)
                size += matrix.elements * width if whole else matrix.stored(quantization, width)
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


def decoder_sizes(config: ModelConfig) -> DecoderSizes:
    """Return the sizes of a config; raise `ConfigurationError` if they contradict each other."""
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
    matrices = [
        Matrix("mlp.gate", count, hidden, row.expert_bias),
        Matrix("mlp.experts.gate_up_proj", 2 * inner, hidden, row.expert_bias, count),
        Matrix("mlp.experts.down_proj", hidden, inner, row.expert_bias, count),
    ]
    if experts.shared:
        shared = "mlp.shared_expert" if row.shared_gate else "mlp.shared_experts"
        matrices += [
            Matrix(f"{shared}.gate_proj", experts.shared, hidden, bias),
            Matrix(f"{shared}.up_proj", experts.shared, hidden, bias),
            Matrix(f"{shared}.down_proj", hidden, experts.shared, bias),
        ]
    if row.shared_gate:
        matrices.append(Matrix("mlp.shared_expert_gate", 1, hidden))
    return matrices


def layer_experts(config: ModelConfig, sizes: DecoderSizes) -> Experts | None:
    """Return the experts of a model, with the layers that have them; `None` if it has none."""
    row = config.architecture
    if not row.experts or not (count := config.number("experts", least=not row.dense_if_none)):
        return None
    # Only keys of this row count: a config may have keys of other families.
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
    """Return the elements of a layer's norms and sinks."""
    row = config.architecture
    norms = row.norms
    if row.parallel_norms and config.flag(row.parallel):
        named = config.get(row.parallel_norms)
        norms = 2 if named == 2 or (named is None and _is_grouped(config)) else 1
    vectors = row.norm_vectors
    total = norms * sizes.hidden * vectors
    if row.query_key_norms and config.flag(row.query_key_norms_if or True):
        heads = 2 if row.query_key_norms == "head" else sizes.heads + sizes.kv_heads
        total += heads * sizes.head_size * vectors
    if sizes.latent:
        total += sizes.latent.query_rank + sizes.latent.rank
    return total + sizes.heads * row.sinks


def _buffers(config: ModelConfig, sizes: DecoderSizes, width: int) -> int:
    """Return the bytes of rotary tables, in 32 bits and two copies each, and of a scalar."""
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
        period = config.count("sliding_window_pattern") or row.pattern
        return tuple(window if (n + 1) % period else None for n in range(sizes.layers))
    if row.windows == "last":
        used = config.get("use_sliding_window")
        first = config.count("max_window_layers") if used else sizes.layers
        return tuple(window if n >= first else None for n in range(sizes.layers))
    used = not row.windows_if or config.get(row.windows_if)
    return (window if used else None,) * sizes.layers


_LAYER = re.compile(r"(?:layers?|blocks?|\bh)['\"]?\]?[._\[]['\"]?(\d{1,5})(?!\d)")
_EMBEDDING = re.compile(r"embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|token_embedding")
_HEAD = re.compile(r"lm_head|embed_out|output_projection")
_KEYS = re.compile(r"(?:k_proj|key_proj|\bwk)\W*(?:weight|kernel)")
_FUSED = re.compile(r"(?:qkv_proj|c_attn|query_key_value|\bwqkv)\W*(?:weight|kernel)", re.I)
# If attention has a c_proj as well, this is the network's.
_DOWN = re.compile(r"(?:down_proj|fc2|mlp\W+c_proj|dense_4h_to_h|\bw2)\W*(?:weight|kernel)")


class _Tensor(Record):
    """One tensor of a model; `stored` are its bytes, 0 if it shares another's memory."""

    name: str
    sizes: tuple[int, ...]
    dtype: str
    stored: int

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def layer(self) -> int | None:
        """The number of its layer, by its name."""
        match = _LAYER.search(self.name)
        return int(match[1]) if match else None

    @property
    def is_weight(self) -> bool:
        """Whether the tensor is learned, by its name: tables of frequencies are not."""
        return bool(self.sizes) and "inv_freq" not in self.name

    def bytes_in(self, dtype: str | None) -> int:
        """Return its bytes in `dtype`; quantized tensors, integers and buffers stay as they are."""
        row = as_dtype(self.dtype)
        if dtype is None or row.kind != "float" or row.bits < 16 or not self.is_weight:
            return self.stored
        return self.elements * as_dtype(dtype).itemsize


def _tensors_of_tree(tree: Any) -> list[_Tensor]:
    """Return all arrays of a tree or a module; shared memory counts once."""
    # Slow to load, as the reader of files is: a plan of a config.json goes without both.
    from anydevice._arrays.trees.tree import flatten
    from anydevice._machine.engines.registry import owner_of

    leaves, _ = flatten(tree, lambda value: owner_of(value) is not None)
    tensors: list[_Tensor] = []
    counted: set[object] = set()
    for leaf in leaves:
        engine = owner_of(leaf.value)
        assert engine is not None
        sizes = tuple(int(size) for size in leaf.value.shape)
        dtype = engine.dtype_of(leaf.value)
        storage = None if engine.is_traced(leaf.value) else engine.storage(leaf.value)
        stored = prod(sizes) * dtype.itemsize
        if storage is not None:
            place = (str(engine.devices_of(leaf.value)), storage.allocation)
            stored = 0 if place in counted else storage.size
            counted.add(place)
        tensors.append(_Tensor(leaf.path, sizes, dtype.name, stored))
    if not tensors:
        raise ConfigurationError(
            f"{type(tree).__name__} holds no array: give a model, a tree of arrays, or the path of "
            "a config.json or of safetensors files"
        )
    return tensors


def _tensors_of_files(path: Path) -> list[_Tensor]:
    """Return the tensors of safetensors files; raise `TransferError` if these are not valid."""
    from anydevice._formats.safetensors import read_model

    return [
        _Tensor(name, entry.shape, entry.dtype.name, entry.nbytes)
        for name, entry in read_model(path).items()
    ]


def _shape_from_tensors(tensors: list[_Tensor], dtype: str | None, name: str) -> ModelShape:
    """Return a shape from names and sizes alone; unknown sizes are 0, and `assumed` says so."""
    layers = 1 + max((tensor.layer for tensor in tensors if tensor.layer is not None), default=-1)
    embedding = _first(tensors, _EMBEDDING)
    hidden = embedding.sizes[1] if embedding else 0
    down = _first(tensors, _DOWN)
    keys, fused = _first(tensors, _KEYS), _first(tensors, _FUSED)
    per_token = 2 * min(keys.sizes) if keys else 0
    if not keys and fused and hidden:  # queries, keys and values in one matrix: all but the queries
        per_token = max(0, fused.elements // hidden - hidden)
    assumed = ["weights are those of the tensors; the rest follows from their names and sizes"]
    if not per_token:
        assumed.append("no key projections were found: no key/value cache is counted")
    if embedding is None or down is None or not layers:
        assumed.append("no decoder was found in the names: no activations are counted")
        hidden = 0
    common: Counter[str] = Counter()
    for tensor in tensors:
        common[tensor.dtype] += tensor.stored
    floats = [kind for kind, _ in common.most_common() if as_dtype(kind).kind == "float"]
    heads = hidden // 128 or 1
    return ModelShape(
        name=name,
        architecture="unknown",
        dtype=dtype or (floats[0] if floats else "bfloat16"),
        layers=layers,
        hidden=hidden,
        intermediate=max(down.sizes) if down and hidden else 0,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        vocabulary=embedding.sizes[0] if embedding else 0,
        tied_embeddings=_first(tensors, _HEAD) is None,
        **_weights(tensors, layers, dtype),
        kv_elements=(per_token,) * layers,
        windows=(None,) * layers,
        outputs=embedding.sizes[0] if embedding else 0,
        exact=False,
        assumed=tuple(assumed),
    )


def _first(tensors: list[_Tensor], pattern: re.Pattern[str]) -> _Tensor | None:
    matching = (t for t in tensors if len(t.sizes) == 2 and pattern.search(t.name))
    return next(matching, None)


def _weights(tensors: list[_Tensor], layers: int, dtype: str | None) -> Mapping[str, Any]:
    """Return the fields of a shape that count weights; names tell the layer of a tensor."""
    elements, layer_bytes = [0] * layers, [0] * layers
    outside = {"embedding": [0, 0], "head": [0, 0], "other": [0, 0]}
    for tensor in tensors:
        number, size = tensor.layer, tensor.bytes_in(dtype) if tensor.stored else 0
        count = tensor.elements if tensor.stored and tensor.is_weight else 0
        if number is not None and number < layers:
            elements[number] += count
            layer_bytes[number] += size
            continue
        head = _HEAD.search(tensor.name)
        part = "head" if head else "embedding" if _EMBEDDING.search(tensor.name) else "other"
        outside[part][0] += count
        outside[part][1] += size
    fields: dict[str, Any] = {"layer_weights": tuple(elements), "layer_bytes": tuple(layer_bytes)}
    matrices = (tensor for tensor in tensors if tensor.stored and len(tensor.sizes) > 1)
    fields["rounding"] = rounding(matrix.bytes_in(dtype) for matrix in matrices)
    for part, (count, size) in outside.items():
        fields[f"{part}_parameters"], fields[f"{part}_bytes"] = count, size
    return fields
