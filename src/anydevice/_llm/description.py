"""A decoder described by data: everything but its weights, from its config.

Model families differ in the placement of norms, in position encoding, in attention windows and in
expert routing. The rows of `_plan/families.py` list these differences, both for memory planning and
for running. Here a row and a config become one `Description`; no later code knows a family's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from anydevice._core import checks
from anydevice._core.record import Record
from anydevice._core.rope_scaling import frequencies, kind_of
from anydevice._core.text import shortened
from anydevice._formats.quantized_folder import check_method
from anydevice._plan.config import ModelConfig
from anydevice._plan.families import ARCHITECTURES, Experts, ForwardSpec, LatentSizes, integer
from anydevice._plan.model import (
    DecoderSizes,
    decoder_sizes,
    layer_experts,
    layer_windows,
    rotary_share,
)
from anydevice._plan.quantization import method_of
from anydevice.errors import ConfigurationError, UnsupportedError

Norm = Literal["rms", "rms1", "layer"]
Block = Literal["pre", "post", "sandwich", "parallel"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Our names of activation functions, by their names in configs."""

_LARGEST_ROPE = 2**16
"""Most elements of a head that can be rotated: their frequencies are precomputed."""
CLIP, SLOPE = 7.0, 1.702
"""Defaults for experts that clip: the limit, and the slope of the sigmoid."""


class Rope(Record):
    """Rotary positions (RoPE) of the first `size` elements; `scaling` has items for `ops.rope`."""

    theta: float
    size: int
    interleaved: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()


class Routing(Record):
    """How a router selects experts, and what the experts compute.

    Each token uses `per_token` of `count` experts with `intermediate` units. `kind` is the weights:
    `"softmax"` takes the softmax of all scores, then the best; `"top_k"` takes the best scores,
    then their softmax; `"groups"` takes the sigmoid of the scores, then the best within the best
    `group_limit` of `groups` groups, with a bias that affects only the selection. `normalized`
    weights are divided by their sum; all are multiplied by `factor`. `shared` is the units of an
    expert that every token uses, weighted by a gate if `shared_gate` is set. With `clip`, gate and
    up are clipped to it, 1 is added to up, and the gate's sigmoid has this `slope`.
    """

    count: int
    per_token: int
    intermediate: int
    kind: Literal["softmax", "top_k", "groups"] = "softmax"
    normalized: bool = True
    factor: float = 1.0
    groups: int = 1
    group_limit: int = 1
    shared: int = 0
    shared_gate: bool = False
    clip: float | None = None
    slope: float = 1.0


class LayerDescription(Record):
    """The differences between layers of one model; equal layers run the same program.

    `window` is the number of tokens that a query attends to, its own included; `None` means all.
    Without `rope`, positions are not encoded. Without `experts`, the layer has one MLP.
    `position_scale` is (beta, tokens): queries are multiplied by
    1 + beta × log(1 + floor(position / tokens)).
    """

    window: int | None = None
    rope: Rope | None = None
    experts: Routing | None = None
    position_scale: tuple[float, int] | None = None


class Description(Record):
    """A decoder without its weights; hashable, so a static argument of compiled functions.

    - `heads` of queries share `kv_heads` of keys and values; keys have `head_size` elements and
      values `value_size`. With `latent`, keys and values are made from one small vector a token.
    - `norm`: `"rms"`, `"rms1"` (weights are stored without their 1) or `"layer"`, with `eps`.
    - `block`: norms before attention and network (`"pre"`), after them (`"post"`), both
      (`"sandwich"`), or one norm before both, which run in parallel (`"parallel"`).
    - `activation` of the network, which is `gated` or not, with `intermediate` units.
    - `tied`: the embedding is the head.
    - `scale` multiplies scores, `soft_cap` bounds them, `final_soft_cap` bounds the logits.
    - `embedding_scale`, `residual_scale`, `logit_scale`: factors of the embedded tokens, of the
      outputs of attention and network, and of the logits.
    - `query_key_norm`: none, of each head (`"head"`), or of all heads together (`"row"`).
    - `sinks`: each head has a score that belongs to no key.
    - `biases`: the parts with a bias, from `"qkv"` (with latent attention, the products before its
      norms), `"output"`, `"mlp"`, `"router"`, `"experts"`, `"norm"`, `"head"`.
    - `tensor_names`: pairs of a part of a tensor's name in files, and its name in Llama's files.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    eps: float
    layers: tuple[LayerDescription, ...]
    norm: Norm = "rms"
    block: Block = "pre"
    activation: Activation = "silu"
    gated: bool = True
    tied: bool = False
    scale: float = 1.0
    soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    query_key_norm: Literal["", "head", "row"] = ""
    sinks: bool = False
    latent: LatentSizes | None = None
    biases: frozenset[str] = frozenset()
    tensor_names: tuple[tuple[str, str], ...] = ()


def describe(config: ModelConfig) -> Description:
    """Return the description of the decoder that a config describes.

    Raises `UnsupportedError` for a family, or an option of it, that cannot be run, and
    `ConfigurationError` if a number is missing or wrong.
    """
    row, forward = config.architecture, _forward_spec(config)
    config.check_options(row.only)
    sizes = decoder_sizes(config)
    return Description(
        vocabulary=sizes.vocabulary,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        value_size=sizes.latent.value if sizes.latent else sizes.head_size,
        eps=_number(config, forward.eps, 1e-5),
        layers=_layers(config, forward, sizes),
        norm="layer" if row.layer_norm else "rms1" if forward.unit_norm else "rms",
        block=_block(config, forward),
        activation=_activation(config, forward),
        gated=row.gated,
        tied=bool(config.get("tie_word_embeddings")),
        scale=_scale(config, forward, sizes),
        soft_cap=_number(config, forward.soft_cap, 0.0) or None,
        final_soft_cap=_number(config, forward.final_soft_cap, 0.0) or None,
        embedding_scale=sizes.hidden**0.5
        if row.embedding_scale
        else _number(config, forward.embedding_scale),
        residual_scale=_number(config, forward.residual_scale),
        logit_scale=_number(config, forward.logit_scale) / _divisor(config, forward.logit_divisor),
        query_key_norm={"": "", "head": "head", "heads": "row"}[row.query_key_norms],  # type: ignore[arg-type]
        sinks=row.sinks,
        latent=sizes.latent,
        biases=_biases(config),
        tensor_names=forward.tensor_names,
    )


def _forward_spec(config: ModelConfig) -> ForwardSpec:
    forward = config.architecture.forward
    if forward is not None:
        _refuse_options(config, forward)
        return forward
    known = ", ".join(sorted(name for name, row in ARCHITECTURES.items() if row.forward))
    named = f"the family {shortened(config.family)!r}" if config.family else "a model of no family"
    raise UnsupportedError(
        f"{config.source}: {named} (model_type) cannot be run; the families that can are {known}"
    )


def _refuse_options(config: ModelConfig, forward: ForwardSpec) -> None:
    if config.model_class not in ("", "ForCausalLM"):
        raise _refusal(config, f"the class {config.model_class}")
    settings = config.get("quantization_config")
    if isinstance(settings, Mapping) and settings:
        check_method(method_of(settings), config.source)
    for key, value in {**forward.only, "per_layer_config": None}.items():
        if config.get(key) not in (None, value):
            raise _refusal(config, f"{key} = {shortened(repr(config.get(key)))}")
    other = [kind for kind in config.entries("layer_types") or () if kind not in _LAYER_TYPES]
    if other:
        raise _refusal(config, f"{shortened(repr(other[0]))} in layer_types")


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _refusal(config: ModelConfig, what: str) -> UnsupportedError:
    return UnsupportedError(f"{config.source}: {what} of {config.family} cannot be run")


def _number(config: ModelConfig, key: str, default: float = 1.0) -> float:
    """Return a finite number by its key; `default` if there is no key or no value."""
    value = config.get(key) if key else None
    if value is None:
        return default
    return checks.number(key, value, owner=config.source)


def _divisor(config: ModelConfig, key: str) -> float:
    return checks.number(key, _number(config, key), above=0, owner=config.source)


def _block(config: ModelConfig, forward: ForwardSpec) -> Block:
    if config.flag(config.architecture.parallel):
        return "parallel"
    if config.architecture.norms == 4:
        return "sandwich"
    return "post" if forward.post_norm else "pre"


def _activation(config: ModelConfig, forward: ForwardSpec) -> Activation:
    for key in ("hidden_activation", "hidden_act", "activation_function"):
        name = config.get(key)
        if name is not None:
            if not isinstance(name, str) or name not in ACTIVATIONS:
                raise _refusal(config, f"{key} = {shortened(repr(name))}")
            activation = ACTIVATIONS[name]
            return "gelu_tanh" if activation == "gelu" and forward.tanh_gelu else activation
    return "silu"


def _scale(config: ModelConfig, forward: ForwardSpec, sizes: DecoderSizes) -> float:
    if forward.scale:
        return _number(config, forward.scale)
    root = _divisor(config, forward.query_scale) if forward.query_scale else sizes.head_size
    if sizes.latent:  # yarn's `mscale_all_dim` scales the scores (DeepSeek-V2)
        given = rope_parameters(config, "full_attention")
        by, factor = given.get("mscale_all_dim"), given.get("factor") or 1.0
        if kind_of_rope(given) != "default" and by and factor > 1:
            return float(root**-0.5 * (0.1 * by * math.log(factor) + 1) ** 2)
    return float(root**-0.5)


def _biases(config: ModelConfig) -> frozenset[str]:
    row = config.architecture
    flags = {"qkv": row.qkv_bias, "output": row.output_bias, "mlp": row.mlp_bias}
    flags |= {"head": row.head_bias, "norm": row.layer_norm and row.norm_bias}
    flags |= {"router": row.expert_bias, "experts": row.expert_bias}
    return frozenset(name for name, flag in flags.items() if config.flag(flag))


def _layers(
    config: ModelConfig, forward: ForwardSpec, sizes: DecoderSizes
) -> tuple[LayerDescription, ...]:
    windows, experts = layer_windows(config, sizes), layer_experts(config, sizes)
    routing = _routing(config, forward, experts) if experts else None
    ropes = {window: _rope(config, forward, sizes, window) for window in set(windows)}
    rotated = _layers_with_rope(config, forward, sizes)
    routed = frozenset(experts.layers) if experts else frozenset()
    position_scale = None
    if forward.position_scale:
        given = rope_parameters(config, "full_attention")
        beta = given.get("llama_4_scaling_beta")
        tokens = given.get("original_max_position_embeddings")
        position_scale = (float(beta), int(tokens)) if beta and tokens else None

    @cache  # equal layers are one object
    def layer(window: int | None, rotated: bool, routed: bool) -> LayerDescription:
        return LayerDescription(
            window=window,
            rope=ropes[window] if rotated else None,
            experts=routing if routed else None,
            position_scale=position_scale,
        )

    return tuple(
        layer(window, rotated[number], number in routed) for number, window in enumerate(windows)
    )


def _routing(config: ModelConfig, forward: ForwardSpec, experts: Experts) -> Routing:
    if _activation(config, forward) not in ("silu", "gelu", "gelu_tanh"):
        raise _refusal(config, f"experts with {_activation(config, forward)}")
    grouped = forward.routing == "groups"
    groups = config.count("n_group", 1, least=1) if grouped else 1
    limit = config.count("topk_group", 1, least=1) if grouped else 1
    apart = experts.count % groups or limit > groups
    if apart or experts.per_token > experts.count // groups * limit:
        raise ConfigurationError(
            f"{config.source}: a token cannot choose {experts.per_token} of {experts.count} "
            f"experts in {limit} of {groups} groups",
            config.source,
        )
    return Routing(
        count=experts.count,
        per_token=experts.per_token,
        intermediate=experts.intermediate,
        kind=forward.routing,
        normalized=config.flag(forward.normalized),
        factor=_number(config, forward.routed_scale),
        groups=groups,
        group_limit=limit,
        shared=experts.shared,
        shared_gate=config.architecture.shared_gate,
        clip=_number(config, "swiglu_limit", CLIP) if forward.clipped else None,
        slope=_number(config, "swiglu_alpha", SLOPE) if forward.clipped else 1.0,
    )


def _layers_with_rope(config: ModelConfig, forward: ForwardSpec, sizes: DecoderSizes) -> list[bool]:
    """Return for each layer whether it has rope."""
    listed, nth = forward.no_rope
    flags = config.entries(listed) if listed else None
    if flags is None:
        step = config.count(nth) if nth else 0
        return [not step or (number + 1) % step != 0 for number in range(sizes.layers)]
    if len(flags) < sizes.layers:
        raise ConfigurationError(
            f"{config.source}: {listed} names {len(flags)} layers of {sizes.layers}", config.source
        )
    return [bool(flag) for flag in flags[: sizes.layers]]


def rope_parameters(config: ModelConfig, kind: str) -> Mapping[str, Any]:
    """Return the rope parameters of a kind of layers, by their old or their new config keys."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(given, Mapping) and isinstance(given.get(kind), Mapping):
        given = given[kind]
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{config.source}: rope_parameters is not an object", "rope")
    wrong = [key for key, value in given.items() if not _is_sensible(key, value)]
    if wrong:
        said = f"{shortened(wrong[0])} = {shortened(repr(given[wrong[0]]))}"
        raise ConfigurationError(f"{config.source}: {said} is not valid for rope", config.source)
    return given


def _is_sensible(key: str, value: Any) -> bool:
    """Whether a value in rope parameters has the type that its key requires."""
    if key in ("type", "rope_type"):
        return value is None or isinstance(value, str)
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list | tuple) and all(_is_sensible("", item) for item in value)
    return value is None or (isinstance(value, int | float) and abs(value) < 1e30)


def kind_of_rope(given: Mapping[str, Any]) -> str:
    """Return the name of the scaling in rope parameters."""
    return str(given.get("rope_type") or given.get("type") or "default")


def _rope(
    config: ModelConfig,
    forward: ForwardSpec,
    sizes: DecoderSizes,
    window: int | None,
) -> Rope | None:
    """Return the rope of the layers with this window."""
    by_window = forward.rope_by_window
    if by_window == "none" and window is None:
        return None
    kind = "full_attention" if window is None else "sliding_attention"
    given = rope_parameters(config, kind)
    nested = given is not (config.get("rope_scaling") or config.get("rope_parameters") or given)
    own_base = by_window == "base" and window is not None and not nested
    key = "rope_local_base_freq" if own_base else "rope_theta"
    theta = _number(config, key, 10000.0) if own_base else given.get("rope_theta")
    scaled = nested or window is None or by_window not in ("base", "scaling")
    size = sizes.latent.rotated if sizes.latent else int(sizes.head_size * rotary_share(config))
    if size % 2 or size > _LARGEST_ROPE:
        raise _refusal(config, f"rope of {size} elements")
    rope = Rope(
        theta=float(_number(config, key, 10000.0) if theta is None else theta),
        size=size,
        interleaved=config.flag(forward.interleaved),
        scaling=_scaling(config, forward, given) if scaled else (),
    )
    if rope.scaling or not 0 < rope.theta < math.inf:
        frequencies(rope.size, rope.theta, dict(rope.scaling) or None)  # raises if one is invalid
    return rope


def _scaling(
    config: ModelConfig, forward: ForwardSpec, given: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Return the scaling as `ops.rope` takes it, completed from the rest of the config."""
    kind = kind_of_rope(given)
    if kind in forward.longrope:
        kind = "longrope"
    if kind == "default":
        return ()
    try:
        kind_of({"rope_type": kind})
    except ConfigurationError as error:
        raise _refusal(config, f"rope of the type {shortened(repr(kind))}") from error
    longest = config.optional("longest_context")
    original = given.get("original_max_position_embeddings")
    if kind == "longrope":
        original = config.count("original_max_position_embeddings", least=1) or original
    if kind == "dynamic":
        original = longest
    scaling = {**given, "rope_type": kind, "original_max_position_embeddings": original or longest}
    if kind in ("yarn", "longrope") and not scaling.get("factor") and longest and original:
        scaling["factor"] = longest / integer(f"{config.source}: the original context", original)
    pairs = [
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in scaling.items()
        if key in _SCALING_KEYS and value is not None
    ]
    return tuple(sorted(pairs))


_SCALING_KEYS = {"rope_type", "factor", "low_freq_factor", "high_freq_factor", "mscale"}
_SCALING_KEYS |= {"original_max_position_embeddings", "attention_factor", "mscale_all_dim"}
_SCALING_KEYS |= {"beta_fast", "beta_slow", "truncate", "short_factor", "long_factor"}
