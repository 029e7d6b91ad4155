"""A decoder described by data: everything but its weights, from its config.

Families of models differ in where their norms are, how positions enter, which layers see a window,
how experts are chosen. The rows of `planning/architectures.py` say it, for memory planning and for
running alike; here a row and a config become one `Description`, and nothing behind it knows the
name of a family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from anydevice.core.record import Record
from anydevice.core.text import shortened
from anydevice.errors import ConfigurationError, UnsupportedError
from anydevice.planning.architectures import ARCHITECTURES, Experts, LatentSizes, Running
from anydevice.planning.config import ModelConfig
from anydevice.planning.decoder import DecoderSizes, decoder_sizes, layer_experts, layer_windows

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
"""What configs call an activation function, and what we do."""

CLIP, SLOPE = 7.0, 1.702
"""Where experts that clip do so, and the slope of their sigmoid."""


class Rope(Record):
    """Rotary positions: the first `size` elements of a head turn.

    `scaling` are the pairs of the mapping that `ops.rope` takes.
    """

    theta: float
    size: int
    interleaved: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()


class Routing(Record):
    """How tokens choose experts, and how these are.

    Each token passes `per_token` of `count` networks of `intermediate` units. Their weights are, by
    `kind`: `"softmax"` of all scores, of which the best are taken; `"top_k"`, the best scores, and
    their softmax; `"groups"`, the sigmoid of scores, of which the best are taken in the best
    `group_limit` of `groups` groups, with a bias that only chooses. `normalized` weights are
    divided by their sum, and all are multiplied by `factor`. `shared` are the units of the network
    that every token passes as well, weighted by a gate where `shared_gate` is set. `clip` is where
    the inputs of a product are clipped.
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


class LayerDescription(Record):
    """What layers of one model may differ in; layers that are equal run the same program.

    `window` is the number of tokens that a query attends to, its own included; `None`: all.
    Without `rope`, positions do not enter. Without `experts`, the layer has one network.
    `position_scale` is (beta, tokens): queries are multiplied by
    1 + beta × log(1 + floor(position / tokens)).
    """

    window: int | None = None
    rope: Rope | None = None
    experts: Routing | None = None
    position_scale: tuple[float, int] | None = None


class Description(Record):
    """A decoder but for its weights. It can be hashed: a static argument of compiled functions.

    - `heads` of queries share `kv_heads` of keys and values; keys have `head_size` elements and
      values `value_size`. With `latent`, keys and values are made from one small vector a token.
    - `norm`: `"rms"`, `"rms1"` (weights are stored without their 1) or `"layer"`, with `eps`.
    - `block`: norms before attention and network (`"pre"`), after them (`"post"`), both
      (`"sandwich"`), or one norm before both, which work side by side (`"parallel"`).
    - `activation` of the network, which is `gated` or not, with `intermediate` units.
    - `tied`: the embedding is the head.
    - `scale` multiplies scores, `soft_cap` bounds them, `final_soft_cap` bounds the logits.
    - `embedding_scale`, `residual_scale`, `logit_scale`: factors of the embedded tokens, of what
      attention and network add, and of the logits.
    - `query_key_norm`: none, of each head (`"head"`), or of all heads together (`"row"`).
    - `sinks`: each head has a score that belongs to no key.
    - `biases`: which products have one: some of `"qkv"`, `"output"`, `"mlp"`, `"router"`,
      `"experts"`, `"norm"`, `"head"`.

    >>> from anydevice.planning.config import as_config
    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> more = {"intermediate_size": 128, "vocab_size": 100, "hidden_act": "silu"}
    >>> description = describe(as_config({"model_type": "llama", **sizes, **more}))
    >>> description.block, description.head_size, len(description.layers)
    ('pre', 16, 2)
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


def describe(config: ModelConfig, context: int | None = None) -> Description:
    """The description of the decoder that a config describes.

    `context` is the most tokens that it will see, for the kinds of rope that depend on it; where it
    is not given, the longest that the config names.

    Raises `UnsupportedError` for a family, or an option of it, that cannot be run, and
    `ConfigurationError` if a number is missing or wrong.
    """
    row, running = config.architecture, _running(config)
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
        eps=_number(config, running.eps, 1e-5),
        layers=_layers(config, running, sizes, context),
        norm="layer" if row.layer_norm else "rms1" if running.unit_norm else "rms",
        block=_block(config, running),
        activation=_activation(config),
        gated=row.gated,
        tied=bool(config.get("tie_word_embeddings")),
        scale=_scale(config, running, sizes),
        soft_cap=_cap(config, running.soft_cap),
        final_soft_cap=_cap(config, running.final_soft_cap),
        embedding_scale=sizes.hidden**0.5
        if row.embedding_scale
        else _number(config, running.embedding_scale),
        residual_scale=_number(config, running.residual_scale),
        logit_scale=_number(config, running.logit_scale) / _number(config, running.logit_divisor),
        query_key_norm={"": "", "head": "head", "heads": "row"}[row.query_key_norms],  # type: ignore[arg-type]
        sinks=running.sinks,
        latent=sizes.latent,
        biases=_biases(config),
    )


def _running(config: ModelConfig) -> Running:
    if config.architecture.running is not None:
        return config.architecture.running
    known = ", ".join(sorted(name for name, row in ARCHITECTURES.items() if row.running))
    named = f"the family {shortened(config.family)!r}" if config.family else "a model of no family"
    raise UnsupportedError(
        f"{config.source}: {named} (model_type) is not one that can be run; those are {known}"
    )


def _unsupported(config: ModelConfig, what: str) -> UnsupportedError:
    return UnsupportedError(f"{config.source}: {what} of {config.family} cannot be run")


def _number(config: ModelConfig, key: str, default: float = 1.0) -> float:
    """A finite number by its key; `default` where there is no key, or no value."""
    value = config.get(key) if key else None
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        said = shortened(repr(value))
        raise ConfigurationError(f"{config.source}: {key} must be a number, not {said}", key)
    return float(value)


def _cap(config: ModelConfig, key: str) -> float | None:
    return _number(config, key, 0.0) or None


def _block(config: ModelConfig, running: Running) -> Block:
    if config.flag(config.architecture.parallel):
        return "parallel"
    if config.architecture.norms == 4:
        return "sandwich"
    return "post" if running.post_norm else "pre"


def _activation(config: ModelConfig) -> Activation:
    for key in ("hidden_activation", "hidden_act", "activation_function"):
        name = config.get(key)
        if name is not None:
            if name not in ACTIVATIONS:
                raise _unsupported(config, f"{key} = {shortened(repr(name))}")
            return ACTIVATIONS[name]
    return "silu"


def _scale(config: ModelConfig, running: Running, sizes: DecoderSizes) -> float:
    usual = _number(config, running.query_scale, sizes.head_size) ** -0.5
    return _number(config, running.scale, usual)


def _biases(config: ModelConfig) -> frozenset[str]:
    row = config.architecture
    flags = {"qkv": row.qkv_bias, "output": row.output_bias, "mlp": row.mlp_bias}
    flags |= {"head": row.head_bias, "norm": row.layer_norm}
    return frozenset(name for name, flag in flags.items() if config.flag(flag))


def _layers(
    config: ModelConfig, running: Running, sizes: DecoderSizes, context: int | None
) -> tuple[LayerDescription, ...]:
    windows = layer_windows(config, sizes)
    experts = layer_experts(config, sizes)
    routing = _routing(config, running, experts) if experts else None
    return tuple(
        LayerDescription(
            window=window,
            rope=_rope(config, running, sizes, number, window),
            experts=routing if experts and number in experts.layers else None,
        )
        for number, window in enumerate(windows)
    )


def _routing(config: ModelConfig, running: Running, experts: Experts) -> Routing:
    return Routing(
        count=experts.count,
        per_token=experts.per_token,
        intermediate=experts.intermediate,
        kind=running.routing,
        normalized=config.flag(running.normalized),
        shared=experts.shared,
        shared_gate=config.architecture.shared_gate,
        clip=CLIP if running.clipped else None,
    )


def _rope(
    config: ModelConfig, running: Running, sizes: DecoderSizes, number: int, window: int | None
) -> Rope | None:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{config.source}: rope_parameters is not an object", "rope")
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = given.get("rope_type") or given.get("type") or "default"
    scaling = () if kind == "default" else tuple(sorted(given.items()))
    return Rope(theta=float(theta), size=sizes.head_size, scaling=scaling)
