"""Families of encoders and encoder–decoders, one row each, and the shape of a model from its row.

A row lists the tensors of a family: those of one layer, and what lies before, behind and on top.
A size is a number or a key of the family's `config.json`, or a sum of products of these, such as
`"num_heads*d_kv"`. What a config may leave out is in `defaults`. To add a family, print the names
and shapes of a model's parameters and buffers, and write them down as parts. Checked against
transformers 5.22 on its `meta` device: weights and caches that follow from a row are right to the
byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from operator import floordiv
from typing import TYPE_CHECKING, Any

from anydevice._core.dtypes import as_dtype
from anydevice._core.record import NOTHING, Record, replace
from anydevice._plan.families import (
    MOST_LAYERS,
    NO_DTYPE,
    USUAL_DTYPE,
    Flag,
    ModelFamily,
    ModelShape,
    Outputs,
    Tower,
    integer,
    quotient,
    rounding,
)

if TYPE_CHECKING:
    from anydevice._plan.config import ModelConfig

Size = int | str


class ModelPart(Record):
    """`count` matrices of `rows` x `columns`, each with a bias of its rows if `bias` is true.

    `when` is a key (or `"!"` and a key) that says whether the model has it. What is not `learned`
    is a buffer. `width` are the bytes of an element that does not have the model's dtype.
    """

    rows: Size
    columns: Size = 1
    bias: Flag = False
    count: Size = 1
    when: str = ""
    learned: bool = True
    width: int = 0


Parts = tuple[ModelPart, ...]


linear = partial(ModelPart, bias=True)
"""Linear maps from `columns` to `rows` elements; a convolution is one, too."""
norm = partial(ModelPart, bias=True)
"""A norm with weights and a bias."""
table = vector = ModelPart
"""An embedding, and a learned vector."""
buffer = partial(ModelPart, learned=False, width=8)
"""A buffer of integers of 8 bytes."""

PRE_NORM = ModelFamily(gated=False, layer_norm=True, rotary=False, bidirectional=True)
POST_NORM = replace(PRE_NORM, post_norm=True)


class Layers(Record):
    """One tower: equal layers of the parts `layer`, with what lies before and after them.

    `first` are parts of the first layer alone, `later` those of all but the first. `tokens` is the
    number of tokens where it is fixed, as for pictures; otherwise it is the context. A tower with
    a `source` writes: it keeps a cache, and attends to the output of the tower of that number.
    """

    layer: Parts
    before: Parts = ()
    after: Parts = ()
    first: Parts = ()
    later: Parts = ()
    layers: Size = "num_hidden_layers"
    hidden: Size = "hidden_size"
    heads: Size = "num_attention_heads"
    head_size: Size = 0
    intermediate: Size = "intermediate_size"
    activation: str = "hidden_act"
    gated: Flag = False
    tokens: Size = 0
    source: int | None = None
    distances: Size = 0
    build: ModelFamily = POST_NORM


class Head(Record):
    """The head of a class of models: its parts, its number of outputs, and the class's `towers`."""

    parts: Parts = ()
    outputs: Size = 0
    outputs_of: Outputs = "tokens"
    towers: tuple[int, ...] | None = None


class EncoderFamily(Record):
    """One family.

    - `classes`: the heads, by the names of the family's classes without the family's own; a config
      that names no class is one of the `usual` class.
    - `members`: for a model of several models, the key of each one's config and its family.
    - `otherwise`: a key, and the key whose value it has where it is absent or null.
    - `derived`: a name that sizes may use, and how it follows from the config.
    - `only`: options that are counted with this value only.
    - `same`: another name for a key, which may be there too, with the same value.
    - `longest`: the longest context; 0 where there is no limit.
    """

    towers: tuple[Layers, ...] = ()
    before: Parts = ()
    classes: Mapping[str, Head] = NOTHING
    usual: str = "Model"
    members: Mapping[str, str] = NOTHING
    defaults: Mapping[str, Any] = NOTHING
    otherwise: Mapping[str, str] = NOTHING
    derived: Mapping[str, Callable[[Any], Any]] = NOTHING
    only: Mapping[str, Any] = NOTHING
    same: Mapping[str, str] = NOTHING
    longest: Size = "max_position_embeddings"


# The tables are easier to read in fewer lines than the formatter would make of them.
# fmt: off

H, INNER, V, P = "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"
E, D, TYPES, LABELS = "embedding_size", "d_model", "type_vocab_size", "labels"
UNTIED = "!tie_word_embeddings"

LAYER = (linear(H, H, count=4), norm(H), linear(INNER, H), linear(H, INNER), norm(H))
"""The layer of BERT and, with its norms at other places, of most encoders."""

POOLER = linear(H, H)
_ENCODER_ONLY = {"is_decoder": False, "add_cross_attention": False}
_BASE = {H: 768, INNER: 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_TIED = {"tie_word_embeddings": True}
_TEXT = {**_BASE, **_TIED, V: 30522, P: 512, TYPES: 2, "hidden_act": "gelu"}


def _word_head(size: Size = H, *untied: ModelPart) -> Head:
    """Return a head that scores words; `untied` are its parts if it is not tied."""
    return Head((linear(size, H), norm(size), vector(V), table(V, size, when=UNTIED), *untied), V)


def _sequence_head(*parts: ModelPart, outputs: Size = LABELS, size: Size = H) -> Head:
    """Return a head that gives `outputs` scores for a sequence."""
    return Head((*parts, linear(outputs, size)), outputs, "sequence")


def _token_heads(*parts: ModelPart, size: Size = H) -> Mapping[str, Head]:
    """Return the heads that label every token."""
    head = Head((*parts, linear(LABELS, size)), LABELS)
    return {"ForTokenClassification": head, "ForQuestionAnswering": head}


def _text_classes(model: Head, masked: Head, **more: Head) -> Mapping[str, Head]:
    """Return the heads that most encoders of text have, and `more`."""
    return {
        **_token_heads(),
        "Model": model,
        "ForMaskedLM": masked,
        "ForSequenceClassification": _sequence_head(POOLER),
        "ForMultipleChoice": _sequence_head(POOLER, outputs=1),
        **more,
    }


ENCODERS: dict[str, EncoderFamily] = {}
"""The rows, by the `model_type` of their configs."""

_MASKED = _word_head(H, vector(V, when=UNTIED))
BERT = ENCODERS["bert"] = EncoderFamily(
    towers=(Layers(
        LAYER,
        (table(V, H), table(P, H), table(TYPES, H), norm(H), buffer(P), buffer(P)),
    ),),
    classes=_text_classes(
        Head((POOLER,)), _MASKED,
        ForPreTraining=Head((POOLER, *_MASKED.parts, linear(2, H)), V),
        ForNextSentencePrediction=_sequence_head(POOLER, outputs=2),
    ),
    defaults=_TEXT,
    only=_ENCODER_ONLY,
)
ROBERTA = replace(
    BERT,
    classes=_text_classes(Head((POOLER,)), _MASKED),
    longest=f"{P}+-2",  # positions start behind the padding token
)
ENCODERS["roberta"] = replace(ROBERTA, defaults={**_TEXT, V: 50265})
ENCODERS["xlm-roberta"] = ENCODERS["camembert"] = ROBERTA
ENCODERS["distilbert"] = EncoderFamily(
    towers=(Layers(LAYER, (table(V, H), table(P, H), norm(H), buffer(P))),),
    classes=_text_classes(Head(), _word_head()),
    defaults={**_TIED, V: 30522, P: 512, "dim": 768, "hidden_dim": 3072, "n_layers": 6}
    | {"n_heads": 12, "activation": "gelu"},
    otherwise={H: "dim", INNER: "hidden_dim", "num_hidden_layers": "n_layers"}
    | {"num_attention_heads": "n_heads", "hidden_act": "activation"},
)
ENCODERS["electra"] = EncoderFamily(
    towers=(Layers(
        LAYER,
        (table(V, E), table(P, E), table(TYPES, E), norm(E), linear(H, E, when="projected"),
         buffer(P), buffer(P)),
    ),),
    classes={
        **_token_heads(),
        "Model": Head(),
        "ForPreTraining": Head((linear(H, H), linear(1, H)), 1),
        "ForMaskedLM": _word_head(E),
        "ForSequenceClassification": _sequence_head(POOLER),
    },
    defaults={**_TEXT, E: 128, H: 256, INNER: 1024, "num_attention_heads": 4},
    derived={"projected": lambda config: config.size(E) != config.size(H)},
    only=_ENCODER_ONLY,
)
_ALBERT_MASKED = _word_head(E, vector(V, when=UNTIED))
ENCODERS["albert"] = EncoderFamily(
    towers=(Layers(
        LAYER,
        (table(V, E), table(P, E), table(TYPES, E), norm(E), linear(H, E), buffer(P), buffer(P)),
        layers="num_hidden_groups*inner_group_num",  # those of a group are one, run several times
    ),),
    classes=_text_classes(
        Head((POOLER,)), _ALBERT_MASKED,
        ForPreTraining=Head((POOLER, *_ALBERT_MASKED.parts, linear(LABELS, H)), V),
    ),
    defaults={**_TEXT, V: 30000, E: 128, H: 4096, INNER: 16384, "num_attention_heads": 64}
    | {"num_hidden_groups": 1, "inner_group_num": 1, "hidden_act": "gelu_new"},
)
ENCODERS["mpnet"] = replace(
    ROBERTA,
    towers=(Layers(
        LAYER,
        (table(V, H), table(P, H), norm(H), buffer(P)),
        (table("relative_attention_num_buckets", "num_attention_heads"),),
        build=replace(POST_NORM, score_tensors=3),
    ),),
    defaults={**_TEXT, V: 30527, "relative_attention_num_buckets": 32},
    only={},
)


def _attends_to_positions(config: Any, kind: str, unless: str = "") -> bool:
    """Whether DeBERTa's heads have a matrix of this kind for relative positions."""
    kinds = config.get("pos_att_type") or ()
    listed = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    named = kind in [str(name).strip() for name in listed]
    return bool(config.get("relative_attention")) and named and not config.get(unless)


def _relative_positions(config: Any) -> int:
    """Return the largest distance between two tokens that DeBERTa tells apart."""
    limit = config.get("max_relative_positions") or 0
    return int(limit) if limit >= 1 else int(config.size(P))


_POOLED = linear("pooler_hidden_size", "pooler_hidden_size")
_DEBERTA_BEFORE = (
    table(V, E), table(P, E, when="position_biased_input"), table(TYPES, E),
    linear(H, E, bias=False, when="projected"), norm(H), buffer(P),
    table("2*relative_positions", H, when="relative_attention"),
)
DEBERTA = ENCODERS["deberta"] = EncoderFamily(
    towers=(Layers(
        (linear("3*hidden_size", H, bias=False), vector("2*hidden_size", width=4),
         linear(H, H, bias=False, when="c2p"), linear(H, H, when="p2c"),
         linear("heads", "heads", bias=False, count=2, when="talking_head"),
         linear(H, H), norm(H), linear(INNER, H), linear(H, INNER), norm(H)),
        _DEBERTA_BEFORE,
        # There are twice as many scores of distances as of pairs of tokens.
        build=replace(POST_NORM, fused_qkv=True, score_tensors=5),
    ),),
    classes={
        **_token_heads(),
        "Model": Head(),
        "ForMaskedLM": Head((
            linear("predicted", H), norm("predicted"), vector(V), table(V, E, when="untied"),
            vector(V, when="untied"),
        ), V),
        "ForSequenceClassification": _sequence_head(_POOLED, size="pooler_hidden_size"),
    },
    defaults={**_TEXT, V: 50265, TYPES: 0, "position_biased_input": True, "legacy": True},
    otherwise={E: H, "pooler_hidden_size": H, "heads": "num_attention_heads"},
    derived={
        "projected": lambda config: config.size(E) != config.size(H),
        "c2p": lambda config: _attends_to_positions(config, "c2p"),
        "p2c": lambda config: _attends_to_positions(config, "p2c"),
        "relative_positions": _relative_positions,
        "predicted": lambda config: config.size(E if config.get("legacy") else H),
        "untied": lambda config: config.get("legacy") and not config.get("tie_word_embeddings"),
    },
)
ENCODERS["deberta-v2"] = replace(
    DEBERTA,
    towers=(Layers(
        (linear("all_heads", H, count=3), linear("all_heads", H, when="c2p"),
         linear("all_heads", H, when="p2c"), linear(H, H), norm(H),
         linear(INNER, H), linear(H, INNER), norm(H)),
        _DEBERTA_BEFORE,
        (norm(H, when="relative_norm"), linear(H, "conv_columns", when="conv_kernel_size"),
         norm(H, when="conv_kernel_size")),
        distances="2*relative_positions",
        build=replace(POST_NORM, score_tensors=4),
    ),),
    classes={
        **DEBERTA.classes,
        "ForMultipleChoice": _sequence_head(_POOLED, outputs=1, size="pooler_hidden_size"),
    },
    defaults={**DEBERTA.defaults, V: 128100, H: 1536, INNER: 6144, "num_hidden_layers": 24}
    | {"num_attention_heads": 24},
    derived={
        **DEBERTA.derived,
        "c2p": lambda config: _attends_to_positions(config, "c2p", unless="share_att_key"),
        "p2c": lambda config: _attends_to_positions(config, "p2c", unless="share_att_key"),
        "relative_positions": lambda config: (
            max(0, config.get("position_buckets") or 0) or _relative_positions(config)
        ),
        "relative_norm": lambda config: "layer_norm" in str(config.get("norm_rel_ebd")).lower(),
        "all_heads": lambda config: config.size("heads") * (
            config.get("attention_head_size") or config.size(H) // config.size("heads")
        ),
        "conv_columns": lambda config: (
            config.size(H) // (config.get("conv_groups") or 1) * config.size("conv_kernel_size")
        ),
    },
)


def _kinds_of_layers(config: Any) -> int:
    """Return the number of kinds of layers; each has a table of rotary frequencies."""
    listed = config.get("layer_types")
    every = config.get("global_attn_every_n_layers") or 3
    usual = (bool(number % every) for number in range(config.size("num_hidden_layers")))
    return len(set(listed if listed is not None else usual))


_MODERN_HEAD = (linear(H, H, bias="classifier_bias"), norm(H, bias="norm_bias"))
ENCODERS["modernbert"] = EncoderFamily(
    towers=(Layers(
        (linear("3*hidden_size", H, bias="attention_bias"), linear(H, H, bias="attention_bias"),
         linear("2*intermediate_size", H, bias="mlp_bias"), linear(H, INNER, bias="mlp_bias"),
         norm(H, bias="norm_bias")),
        (table(V, H), norm(H, bias="norm_bias")),
        (norm(H, bias="norm_bias"), buffer("2*kinds_of_layers", "frequencies", width=4)),
        later=(norm(H, bias="norm_bias"),),
        activation="hidden_activation",
        build=replace(PRE_NORM, gated=True, rotary=True, fused_qkv=True, fused_gate=True),
    ),),
    classes={
        **_token_heads(*_MODERN_HEAD),
        "Model": Head(),
        "ForMaskedLM": Head(
            (*_MODERN_HEAD, table(V, H, when=UNTIED), vector(V, when="decoder_bias")), V
        ),
        "ForSequenceClassification": _sequence_head(*_MODERN_HEAD),
        "ForMultipleChoice": _sequence_head(*_MODERN_HEAD, outputs=1),
    },
    defaults={**_BASE, **_TIED, V: 50368, P: 8192, INNER: 1152, "num_hidden_layers": 22}
    | {"hidden_activation": "gelu", "decoder_bias": True},
    derived={
        "kinds_of_layers": _kinds_of_layers,
        "frequencies": lambda config: config.size(H) // config.size("num_attention_heads") // 2,
    },
)

_T5_HEADS = "num_heads*d_kv"
_T5_ATTENTION = (
    linear(_T5_HEADS, D, bias=False, count=3), linear(D, _T5_HEADS, bias=False), norm(D, bias=False)
)
_T5_NETWORK = (
    linear("d_ff", D, bias=False), linear("d_ff", D, bias=False, when="gated"),
    linear(D, "d_ff", bias=False), norm(D, bias=False),
)
_T5_ENCODER = Layers(
    (*_T5_ATTENTION, *_T5_NETWORK),
    after=(norm(D, bias=False),),
    first=(table("relative_attention_num_buckets", "num_heads"),),
    layers="num_layers", hidden=D, heads="num_heads", head_size="d_kv", intermediate="d_ff",
    activation="network_activation", gated="gated",
    build=replace(PRE_NORM, layer_norm=False, position_bias=True),
)
_T5_DECODER = replace(
    _T5_ENCODER, layer=(*_T5_ATTENTION * 2, *_T5_NETWORK), layers="num_decoder_layers", source=0
)
T5 = ENCODERS["t5"] = EncoderFamily(
    towers=(_T5_ENCODER, _T5_DECODER),
    before=(table(V, D),),
    classes={
        "Model": Head(),
        "EncoderModel": Head(towers=(0,)),
        "ForConditionalGeneration": Head((), V, "new token"),
        "ForSequenceClassification": _sequence_head(linear(D, D), size=D),
        "ForTokenClassification": Head((linear(LABELS, D),), LABELS, towers=(0,)),
        "ForQuestionAnswering": Head((linear(LABELS, D),), LABELS),
    },
    usual="ForConditionalGeneration",
    defaults={V: 32128, D: 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
    | {"relative_attention_num_buckets": 32, "feed_forward_proj": "relu"},
    otherwise={"num_decoder_layers": "num_layers"},
    derived={
        "gated": lambda config: (
            config.get("is_gated_act") if config.get("is_gated_act") is not None
            else str(config.get("feed_forward_proj")).startswith("gated-")
        ),
        "network_activation": lambda config: (
            str(config.get("feed_forward_proj")).replace("gated-gelu", "gelu_new").split("-")[-1]
        ),
    },
    only={"is_decoder": False},
    same={H: D, "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    | {"head_dim": "d_kv"},
    longest=0,
)
MT5 = ENCODERS["mt5"] = replace(
    T5,
    defaults={**T5.defaults, V: 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
    | {"feed_forward_proj": "gated-gelu"},
)
_BIASED = (replace(tower, layer=(*tower.layer, *tower.first), first=()) for tower in T5.towers)
ENCODERS["umt5"] = replace(MT5, towers=tuple(_BIASED))


def _sides(**numbers: int) -> dict[str, int]:
    return {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in numbers.items()}


def _bart(
    before: Parts, after: Parts, build: ModelFamily, name: str = "ForConditionalGeneration",
    key_bias: bool = True, logits_bias: bool = True, **defaults: Any,
) -> EncoderFamily:
    """Return a family like BART; its towers have `before` and `after` around their layers."""
    attention: Parts = (linear(D, D, count=3), linear(D, D, bias=key_bias), norm(D))

    def tower(side: str, attentions: int, source: int | None) -> Layers:
        inner = f"{side}_ffn_dim"
        return Layers(
            (*attention * attentions, linear(inner, D), linear(D, inner), norm(D)), before, after,
            layers=f"{side}_layers", hidden=D, heads=f"{side}_attention_heads", intermediate=inner,
            activation="activation_function", source=source, build=build,
        )

    untied = table(V, D, when=UNTIED)
    biases = (buffer(V, width=0),) if logits_bias else ()
    return EncoderFamily(
        towers=(tower("encoder", 1, None), tower("decoder", 2, 0)),
        before=(table(V, D), untied, untied),
        classes={"Model": Head(), name: Head((untied, *biases), V, "new token")},
        usual=name,
        defaults={V: 50265, P: 1024, D: 1024, "activation_function": "gelu", **_TIED}
        | _sides(layers=12, ffn_dim=4096, attention_heads=16) | defaults,
        only={"is_decoder": False, "share_encoder_decoder_embeddings": True},
        same={H: D, "num_hidden_layers": "encoder_layers"}
        | {"num_attention_heads": "encoder_attention_heads"},
    )


_KEPT = {"keeps_embeddings": True, "positions": True}
BART = _bart((table(f"{P}+2", D), norm(D)), (), replace(POST_NORM, **_KEPT))
_LABELLED = {
    "ForSequenceClassification": _sequence_head(linear(D, D), size=D),
    "ForQuestionAnswering": Head((linear(2, D),), 2),
}
BART = ENCODERS["bart"] = replace(
    BART, classes={**BART.classes, **_LABELLED}, defaults={**BART.defaults, "num_labels": 3}
)
ENCODERS["mbart"] = replace(
    _bart((table(f"{P}+2", D), norm(D)), (norm(D),), replace(PRE_NORM, **_KEPT)),
    classes=BART.classes,
)
ENCODERS["pegasus"] = _bart((table(P, D),), (norm(D),), replace(PRE_NORM, positions=True))
ENCODERS["m2m_100"] = _bart(
    (buffer(f"{P}+2", D, width=0),), (norm(D),), replace(PRE_NORM, **_KEPT),
    logits_bias=False, vocab_size=128112,
)
ENCODERS["marian"] = _bart(
    (table(P, D),), (), replace(POST_NORM, positions=True), "MTModel", vocab_size=58101
)
_WHISPER = _bart((), (norm(D),), PRE_NORM, key_bias=False)
ENCODERS["whisper"] = replace(
    _WHISPER,
    towers=(
        replace(
            _WHISPER.towers[0],
            before=(linear(D, "3*num_mel_bins"), linear(D, f"3*{D}"),
                    table("max_source_positions", D)),
            tokens="max_source_positions",
        ),
        replace(_WHISPER.towers[1], before=(table(V, D), table("max_target_positions", D))),
    ),
    before=(),
    classes={
        "Model": Head(),
        "ForConditionalGeneration": Head((table(V, D, when=UNTIED),), V, "new token"),
        "ForAudioClassification": Head(
            (linear("classifier_proj_size", D), linear(LABELS, "classifier_proj_size"),
             vector("encoder_layers+1", when="use_weighted_layer_sum")),
            LABELS, "sequence", towers=(0,),
        ),
    },
    defaults={**_TIED, V: 51865, D: 384, "num_mel_bins": 80, "max_source_positions": 1500}
    | {"max_target_positions": 448, "classifier_proj_size": 256, "activation_function": "gelu"}
    | _sides(layers=4, ffn_dim=1536, attention_heads=6),
    only={},
    longest="max_target_positions",
)


def _pair(config: Any, key: str) -> tuple[int, int]:
    """Return height and width; a config gives one number if they are equal."""
    value = config.get(key)
    high, wide = value if isinstance(value, list | tuple) else (value, value)
    return integer(key, high), integer(key, wide)


_PICTURES: dict[str, Callable[[Any], Any]] = {
    "patches": lambda config: (
        prod(map(floordiv, _pair(config, "image_size"), _pair(config, "patch_size")))
    ),
    "pixels": lambda config: prod(_pair(config, "patch_size")) * config.size("num_channels"),
}
_PICTURE = {**_BASE, "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": "gelu"}
_QKV = (linear(H, H, bias="qkv_bias", count=3), linear(H, H))


def _vit(*tokens: ModelPart) -> EncoderFamily:
    """Return a vision transformer with these tokens beside the patches."""
    count = f"patches+{len(tokens)}"
    return EncoderFamily(
        towers=(Layers(
            (*_QKV, norm(H), linear(INNER, H), linear(H, INNER), norm(H)),
            (*tokens, table(count, H), linear(H, "pixels")), (norm(H),),
            tokens=count, build=PRE_NORM,
        ),),
        classes={
            "Model": Head((linear("pooler_output_size", H),)),
            "ForImageClassification": _sequence_head(),
        },
        defaults={**_PICTURE, "qkv_bias": True},
        otherwise={"pooler_output_size": H},
        derived=_PICTURES,
        longest=0,
    )


ENCODERS["vit"] = _vit(vector(H))
_DEIT = _vit(vector(H), vector(H))
_TAUGHT = {"ForImageClassificationWithTeacher": _sequence_head(linear(LABELS, H))}
ENCODERS["deit"] = replace(_DEIT, classes={**_DEIT.classes, **_TAUGHT})
_DINOV2 = Layers(
    (*_QKV, norm(H), linear("into", H), linear(H, "inner"), norm(H), vector(H), vector(H)),
    (vector(H), vector(H, when="use_mask_token"), table("patches+1", H), linear(H, "pixels")),
    (norm(H),),
    intermediate="inner", gated="use_swiglu_ffn", tokens="patches+1", build=PRE_NORM,
)
DINOV2 = ENCODERS["dinov2"] = EncoderFamily(
    towers=(_DINOV2,),
    classes={"Model": Head(), "ForImageClassification": _sequence_head(size="2*hidden_size")},
    defaults={**_PICTURE, "patch_size": 14, "qkv_bias": True, "mlp_ratio": 4}
    | {"use_mask_token": True},
    derived={
        **_PICTURES,
        "inner": lambda config: _dinov2_network(config)[0],
        "into": lambda config: _dinov2_network(config)[1],
    },
    longest=0,
)
ENCODERS["dinov2_with_registers"] = replace(
    DINOV2,
    towers=(replace(
        _DINOV2,
        before=(*_DINOV2.before, table("num_register_tokens", H)),
        tokens="patches+1+num_register_tokens",
    ),),
    defaults={**DINOV2.defaults, "patch_size": 16, "num_register_tokens": 4},
    only={"use_mask_token": True},
)


def _dinov2_network(config: Any) -> tuple[int, int]:
    """Return the units of DINOv2's network, and the rows of the matrix into it."""
    inner = int(config.size(H) * config.get("mlp_ratio"))
    if not config.get("use_swiglu_ffn"):
        return inner, inner
    inner = (int(inner * 2 / 3) + 7) // 8 * 8
    return inner, 2 * inner


_PROJECTION = Head((linear("projection_dim", H, bias=False),))
_TEXT_TOWER = Layers(LAYER, (table(V, H), table(P, H), buffer(P)), (norm(H),), build=PRE_NORM)
ENCODERS["clip_text_model"] = EncoderFamily(
    towers=(_TEXT_TOWER,),
    classes={"TextModel": Head(), "TextModelWithProjection": _PROJECTION},
    usual="TextModel",
    defaults={**_BASE, V: 49408, P: 77, H: 512, INNER: 2048, "num_attention_heads": 8}
    | {"projection_dim": 512, "hidden_act": "quick_gelu"},
)
ENCODERS["clip_vision_model"] = EncoderFamily(
    towers=(Layers(
        LAYER,
        (vector(H), linear(H, "pixels", bias=False), table("patches+1", H), norm(H),
         buffer("patches+1")),
        (norm(H),),
        tokens="patches+1", build=PRE_NORM,
    ),),
    classes={"VisionModel": Head(), "VisionModelWithProjection": _PROJECTION},
    usual="VisionModel",
    defaults={**_PICTURE, "patch_size": 32, "projection_dim": 512, "hidden_act": "quick_gelu"},
    derived=_PICTURES,
    longest=0,
)
_TEXT_SIZE, _PICTURE_SIZE = "text_config.hidden_size", "vision_config.hidden_size"
_CLASSIFIED = replace(_sequence_head(size=_PICTURE_SIZE), towers=(1,))
ENCODERS["clip"] = EncoderFamily(
    members={"text_config": "clip_text_model", "vision_config": "clip_vision_model"},
    classes={
        "Model": Head((
            vector(1), linear("projection_dim", _TEXT_SIZE, bias=False),
            linear("projection_dim", _PICTURE_SIZE, bias=False),
        )),
        "ForImageClassification": _CLASSIFIED,
    },
    defaults={"projection_dim": 512},
    longest=f"text_config.{P}",
)
ENCODERS["siglip_text_model"] = EncoderFamily(
    towers=(replace(_TEXT_TOWER, after=(norm(H), linear("projection_size", H))),),
    classes={"TextModel": Head()},
    usual="TextModel",
    defaults={**_BASE, V: 32000, P: 64, "hidden_act": "gelu_pytorch_tanh"},
    otherwise={"projection_size": H},
)
_POOLING = (
    vector(H), linear("4*hidden_size", H), norm(H), linear(INNER, H), linear(H, INNER)
)
ENCODERS["siglip_vision_model"] = EncoderFamily(
    towers=(Layers(
        LAYER,
        (linear(H, "pixels"), table("patches", H), buffer("patches")),
        (norm(H), *(replace(part, when="vision_use_head") for part in _POOLING)),
        tokens="patches", build=PRE_NORM,
    ),),
    classes={"VisionModel": Head()},
    usual="VisionModel",
    defaults={**_PICTURE, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": True},
    derived=_PICTURES,
    longest=0,
)
ENCODERS["siglip"] = EncoderFamily(
    members={"text_config": "siglip_text_model", "vision_config": "siglip_vision_model"},
    classes={"Model": Head((vector(2),)), "ForImageClassification": _CLASSIFIED},
    longest=f"text_config.{P}",
)
# fmt: on


class Sizes:
    """The numbers of one config, by the names that the row of its family uses."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.encoder is not None
        self.config, self.row = config, config.encoder
        members = self.row.members.items()
        self.members = {key: Sizes(config.member(key, family)) for key, family in members}
        config.check_options(self.row.only)
        config.check_options({key: self.get(other) for key, other in self.row.same.items()})

    def get(self, key: str) -> Any:
        """Return the value of a key, of a derived name, or, behind a dot, of a member's key."""
        member, _, inner = key.rpartition(".")
        if member:
            return self.members[member].get(inner)
        if key in self.row.derived:
            return self.row.derived[key](self)
        if key == "labels":
            return self.config.labels
        value = self.config.get(key)
        other = self.row.otherwise.get(key)
        return self.get(other) if value is None and other else value

    def size(self, size: Size) -> int:
        """Return a sum of products of numbers and keys; raise if a key has no integer."""
        if isinstance(size, int):
            return size
        return sum(prod(map(self._factor, term.split("*"))) for term in size.split("+"))

    def _factor(self, word: str) -> int:
        if word.lstrip("-").isdigit():
            return int(word)
        return integer(f"{self.config.source}: {word}", self.get(word), least=0)

    def flag(self, flag: Flag) -> bool:
        """Return the value of a flag of the row; `"!"` before a key turns it around."""
        if isinstance(flag, bool):
            return flag
        return not self.get(flag[1:]) if flag.startswith("!") else bool(self.get(flag))


Placed = tuple[Sizes, ModelPart]
"""A part, and the sizes of the model that it belongs to."""


class Count(Record):
    """Parameters, the bytes of all weights and buffers, and those of each matrix."""

    parameters: int
    bytes: int
    matrices: tuple[int, ...]


def encoder_shape(config: ModelConfig, dtype: str | None = None) -> ModelShape:
    """Return the shape of the encoder or encoder–decoder that a config describes."""
    sizes = Sizes(config)
    if config.get("quantization_config"):
        raise config.refusal(f"quantized weights of {config.family} are not counted")
    kind = config.model_class or sizes.row.usual
    head = sizes.row.classes.get(kind)
    if head is None:
        raise config.refusal(f"the class {kind!r} of {config.family} is not in the table")
    named = dtype or config.dtype
    width = as_dtype(named or USUAL_DTYPE).itemsize
    rows = [(own, row) for own in (sizes, *sizes.members.values()) for row in own.row.towers]
    rows = [rows[number] for number in head.towers] if head.towers is not None else rows
    towers = tuple(_tower(own, row) for own, row in rows)
    layers = [layer for own, row in rows for layer in _layers(own, row, width)]
    before = _count(
        [(sizes, part) for part in sizes.row.before]
        + [(own, part) for own, row in rows for part in row.before],
        width,
    )
    after = _count(((own, part) for own, row in rows for part in row.after), width)
    top = _count(((sizes, part) for part in head.parts), width)
    outputs = sizes.size(head.outputs)
    writes = head.outputs_of == "new token"
    vocabulary = outputs if head.outputs == "vocab_size" else 0
    crossed = tuple(
        2 * tower.heads * tower.head_size * (tower.source is not None)
        for tower in towers
        for _ in range(tower.layers)
    )
    last = vars(towers[-1])
    counts = (*layers, before, after, top)
    return ModelShape(
        **{key: last[key] for key in ModelShape._fields if key in last}
        | {
            "layers": len(layers),
            "kv_elements": crossed if writes else (0,) * len(layers),
            "windows": (None,) * len(layers),
        },
        name=str(config.raw.get("_name_or_path") or config.family),
        architecture=config.family,
        dtype=named or USUAL_DTYPE,
        vocabulary=vocabulary,
        tied_embeddings=bool(vocabulary) and top.parameters < vocabulary * towers[-1].hidden,
        layer_weights=tuple(layer.parameters for layer in layers),
        layer_bytes=tuple(layer.bytes for layer in layers),
        embedding_parameters=before.parameters,
        embedding_bytes=before.bytes,
        head_parameters=top.parameters,
        head_bytes=top.bytes,
        other_parameters=after.parameters,
        other_bytes=after.bytes,
        outputs=outputs,
        outputs_of=head.outputs_of,
        towers=towers,
        cross_elements=crossed if writes else (),
        source_tokens=towers[0].tokens,
        longest_context=sizes.size(sizes.row.longest) or None,
        rounding=rounding(size for layer in counts for size in layer.matrices),
        exact=True,
        assumed=() if named else (NO_DTYPE,),
    )


def _tower(sizes: Sizes, row: Layers) -> Tower:
    hidden, heads, layers = map(sizes.size, (row.hidden, row.heads, row.layers))
    integer(f"{sizes.config.source}: {row.layers}", layers, 1, MOST_LAYERS)
    source = sizes.config.source
    even = sizes.size(row.head_size) or quotient(f"{source}: {row.hidden}", hidden, "heads", heads)
    return Tower(
        layers=layers,
        hidden=hidden,
        intermediate=sizes.size(row.intermediate),
        heads=heads,
        kv_heads=heads,
        head_size=even,
        kv_elements=(),
        windows=(None,),
        build=replace(row.build, gated=row.build.gated or sizes.flag(row.gated)),
        activation=str(sizes.get(row.activation) or ""),
        tokens=sizes.size(row.tokens) or None,
        source=row.source,
        distances=sizes.size(row.distances) if sizes.get("relative_attention") else 0,
    )


def _layers(sizes: Sizes, row: Layers, width: int) -> list[Count]:
    """Return the count of each layer of a tower, in order."""
    first, later = (
        _count(((sizes, part) for part in (*row.layer, *more)), width)
        for more in (row.first, row.later)
    )
    return [first, *[later] * (sizes.size(row.layers) - 1)]


def _count(parts: Iterable[Placed], width: int) -> Count:
    parameters = total = 0
    matrices: list[int] = []
    for sizes, part in parts:
        if part.when and not sizes.flag(part.when):
            continue
        rows, columns, count = map(sizes.size, (part.rows, part.columns, part.count))
        elements, element = count * rows * (columns + sizes.flag(part.bias)), part.width or width
        parameters += elements * part.learned
        total += elements * element
        matrices += [rows * columns * element] * (count if columns > 1 else 0)
    return Count(parameters, total, tuple(matrices))
