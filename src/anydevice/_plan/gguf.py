"""The config of a GGUF file: its metadata as the config that the same model has on Hugging Face.

GGUF names numbers alike for all architectures. A row says what one is called as a family, and what
its files leave unsaid. Metadata that is not known here could change what the model computes, so
that it is refused by name, like architectures without a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anydevice._core.checks import is_number
from anydevice._core.record import NOTHING, Record
from anydevice._core.rope_scaling import frequencies
from anydevice._core.text import shortened
from anydevice._formats.files import PlainFile
from anydevice._formats.gguf import GgufFile, read_gguf
from anydevice._plan.config import ModelConfig, as_config
from anydevice.errors import ConfigurationError, UnsupportedError

Values = dict[str, Any]


class GgufFamily(Record):
    """An architecture of GGUF as a family.

    `values` are those of all its models, `more` adds what follows from others. Where `permuted`,
    rows of queries and keys are in the order in which rope rotates neighbours.
    """

    family: str
    permuted: bool = False
    values: Mapping[str, Any] = NOTHING
    more: Callable[[GgufFile, Values], Values] | None = None


_NUMBERS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of GGUF, after the name of the architecture, and what configs call the same number."""

_ELSEWHERE = {
    "attention.value_length",
    "attention.causal",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "use_parallel_residual",
    "tensor_data_layout",
}
"""Keys that are looked at otherwise, or that say nothing of what is computed."""


def config_of(file: GgufFile) -> ModelConfig:
    """The config that the metadata and the names of tensors stand for.

    Raises `UnsupportedError` for an architecture, or an option of it, that does not map exactly,
    and `ConfigurationError` for values that cannot be.
    """
    name = file.expect("general.architecture", str, "")
    row = GGUF_FAMILIES.get(name)
    if row is None:
        known = ", ".join(GGUF_FAMILIES)
        raise UnsupportedError(
            f"{file.path}: GGUF files of the architecture {shortened(name)!r} are not supported, "
            f"only {known}. Get the model as a folder of safetensors files"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(
            f"{file.path} is one of several files; join them first: llama-gguf-split --merge"
        )
    values = {"model_type": row.family, "hidden_act": "silu", **row.values, **_values(file, name)}
    if row.more is not None:
        values |= row.more(file, values)
    if row.more is not _partly_rotated and _share(file, values) not in (None, 1):
        raise UnsupportedError(
            f"{file.path}: {name}.rope.dimension_count is not the size of a head, and {row.family} "
            "rotates whole heads; get the model as a folder of safetensors files"
        )
    return as_config(values, str(file.path))


def family_of(file: GgufFile) -> GgufFamily:
    """The row of a file whose config could be made."""
    return GGUF_FAMILIES[file.metadata["general.architecture"]]


def read_gguf_config(path: Path) -> ModelConfig:
    """The config of a file."""
    return config_of(read_gguf(path))


def _values(file: GgufFile, name: str) -> Values:
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    unknown = sorted(own.keys() - _NUMBERS.keys() - _ELSEWHERE)
    if unknown or own.get("attention.causal", True) is not True:
        key = f"{name}.{unknown[0] if unknown else 'attention.causal'}"
        raise UnsupportedError(
            f"{file.path}: its key {shortened(key)} is unknown and could change what the model "
            "computes; get the model as a folder of safetensors files"
        )
    values: Values = {_NUMBERS[key]: _number(file, key, own[key]) for key in own if key in _NUMBERS}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        values["vocab_size"] = embedding.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    values["dtype"] = _dtype(file)
    for key in ("bos", "eos"):
        token = file.expect(f"tokenizer.ggml.{key}_token_id", int)
        if token is not None:
            values[f"{key}_token_id"] = token
    size = values.get("head_dim")
    if size is not None and own.get("attention.value_length", size) != size:
        raise UnsupportedError(f"{file.path}: keys and values of different sizes are not supported")
    return values | _rope(file, own, values)


def _number(file: GgufFile, key: str, value: Any) -> int | float | None:
    """A number; of a list with one for each layer, the one that all have."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()
    if not is_number(value):
        raise UnsupportedError(
            f"{file.path}: {key} must be one number for all layers, not {shortened(repr(value))}"
        )
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise ConfigurationError(f"{file.path}: {key} is {value}", str(file.path))
    # The shortest number that is the same in float32: what was written, before it was stored.
    return float(np.format_float_scientific(np.float32(value), unique=True))


def _dtype(file: GgufFile) -> str:
    """The dtype for the unpacked weights: that of most of them, bfloat16 for packed ones."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        packed = tensor.packing.elements > 1
        name = "bfloat16" if packed else tensor.dtype.name
        sizes[name] = sizes.get(name, 0) + math.prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name]) if sizes else "bfloat16"


def _rope(file: GgufFile, own: Mapping[str, Any], values: Mapping[str, Any]) -> Values:
    kind = own.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3(file, values)}
    if "rope_factors_long.weight" in file.tensors or kind == "longrope":
        return _longrope(file, own)
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn") or "rope.scaling.attn_factor" in own:
        raise UnsupportedError(
            f"{file.path}: rope scaling of the kind {shortened(repr(kind))} is not supported"
        )
    scaling = {"rope_type": kind, "factor": _number(file, "factor", own.get("rope.scaling.factor"))}
    if "rope.scaling.original_context_length" in own:
        context = own["rope.scaling.original_context_length"]
        scaling["original_max_position_embeddings"] = _number(file, "context", context)
    return {"rope_scaling": scaling}


def _llama3(file: GgufFile, values: Mapping[str, Any]) -> Values:
    """Llama 3's scaling, which files keep as the factor of each frequency.

    Its other three numbers are the same in all models; that they are here is checked.
    """
    found = _floats(file, "rope_freqs.weight")
    theta = float(values.get("rope_theta", 10000.0))
    scaling = {
        "rope_type": "llama3",
        "factor": max(found, default=0.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    size = 2 * len(found)
    try:
        plain, _ = frequencies(size, theta, None)
        scaled, _ = frequencies(size, theta, scaling)
    except (ConfigurationError, ArithmeticError):
        plain, scaled = [], []
    expected = [a / b for a, b in zip(plain, scaled, strict=True)]
    if len(expected) != len(found) or not np.allclose(found, expected, rtol=1e-4):
        raise UnsupportedError(
            f"{file.path}: its rope factors (rope_freqs.weight) are not those of Llama 3; "
            "get the model as a folder of safetensors files"
        )
    return scaling


def _longrope(file: GgufFile, own: Mapping[str, Any]) -> Values:
    long, short = (_floats(file, f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    context = own.get("rope.scaling.original_context_length")
    return {
        "rope_scaling": {"rope_type": "longrope", "long_factor": long, "short_factor": short},
        "original_max_position_embeddings": _number(file, "original_context_length", context),
    }


def _floats(file: GgufFile, name: str) -> list[float]:
    """The numbers of a small tensor."""
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise UnsupportedError(
            f"{file.path}: its rope factors ({name}) are missing or of another shape"
        )
    numbers = np.empty(tensor.shape, np.float32)
    with PlainFile(file.path, file.stamp) as opened:
        tensor.read(opened, numbers, 0)
    return [float(np.format_float_scientific(each, unique=True)) for each in numbers]


def _share(file: GgufFile, values: Values) -> float | None:
    """The share of a head that rope rotates, where a file says so."""
    name = file.metadata["general.architecture"]
    rotated = file.expect(f"{name}.rope.dimension_count", int)
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if rotated is None or not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return None
    return float(rotated / (values.get("head_dim") or hidden / heads))


def _partly_rotated(file: GgufFile, values: Values) -> Values:
    share = _share(file, values)
    return {} if share is None else {"partial_rotary_factor": share}


def _with_experts(_: GgufFile, values: Values) -> Values:
    """Llama's architecture with experts is Mixtral."""
    if not values.get("num_experts"):
        return {}
    return {
        "model_type": "mixtral",
        "num_local_experts": values["num_experts"],
        "sliding_window": None,
    }


def _gemma_scale(layers: int) -> Callable[[GgufFile, Values], Values]:
    """Gemma scales queries by the size of a head, but the model with so many layers does not."""

    def more(_: GgufFile, values: Values) -> Values:
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        largest = values.get("num_hidden_layers") == layers
        if largest and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            return {"query_pre_attn_scalar": hidden // heads}
        return {"query_pre_attn_scalar": values.get("head_dim", 256)}

    return more


def _without_windows(file: GgufFile, values: Values) -> Values:
    """OLMo 3 has the name of OLMo 2, and windows."""
    if values.get("sliding_window"):
        raise UnsupportedError(f"{file.path}: olmo2 with a sliding_window is not read")
    return {}


_TANH = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", permuted=True, more=_with_experts),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen2moe": GgufFamily("qwen2_moe", values={"norm_topk_prob": False}),
    "qwen3moe": GgufFamily("qwen3_moe", values={"norm_topk_prob": True}),
    "gemma": GgufFamily("gemma", values=_TANH),
    "gemma2": GgufFamily("gemma2", values=_TANH, more=_gemma_scale(46)),
    "gemma3": GgufFamily("gemma3_text", values=_TANH, more=_gemma_scale(62)),
    "phi3": GgufFamily("phi3", more=_partly_rotated),
    "granite": GgufFamily("granite", permuted=True),
    "smollm3": GgufFamily("smollm3", permuted=True),
    "olmo2": GgufFamily("olmo2", more=_without_windows),
    "starcoder2": GgufFamily("starcoder2", values={"sliding_window": 4096, **_TANH}),
}
"""The architectures that map exactly, by the name that GGUF has for them."""
