"""Encoders and encoder–decoders against what `transformers` makes of their configs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, EncoderDecoderCache, StaticCache

from anydevice import ConfigurationError, estimate_inference, estimate_training
from anydevice._plan.encoder_families import ENCODERS
from anydevice._plan.model import shape_of
from tests.plan.live_bytes import LiveBytes
from tests.plan.test_families import allocated

SOAK = pytest.mark.soak
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
BERT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
BERT |= {"num_attention_heads": 12, "max_position_embeddings": 512, "vocab_size": 30522}
BERT |= {"model_type": "bert", "type_vocab_size": 2, "position_embedding_type": "absolute"}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
LARGE |= {"num_attention_heads": 16}
ROBERTA = {**BERT, "model_type": "roberta", "vocab_size": 50265, "type_vocab_size": 1}
ROBERTA |= {"max_position_embeddings": 514}
DEBERTA = {**BERT, "model_type": "deberta", "vocab_size": 50265, "type_vocab_size": 0}
DEBERTA |= {"relative_attention": True, "max_relative_positions": -1, "pos_att_type": "c2p|p2c"}
DEBERTA |= {"position_biased_input": False}
DEBERTA_V3 = {**DEBERTA, "model_type": "deberta-v2", "vocab_size": 128100, "position_buckets": 256}
DEBERTA_V3 |= {"norm_rel_ebd": "layer_norm", "share_att_key": True}
DEBERTA_V2 = {**DEBERTA_V3, **LARGE, "hidden_size": 1536, "intermediate_size": 6144}
DEBERTA_V2 |= {"num_attention_heads": 24, "attention_head_size": 64, "conv_kernel_size": 3}
T5 = {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6}
T5 |= {"num_decoder_layers": 6, "num_heads": 8, "vocab_size": 32128, "n_positions": 512}
FLAN = {**T5, "d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_decoder_layers": 24}
FLAN |= {"num_heads": 32, "feed_forward_proj": "gated-gelu", "is_gated_act": True}
FLAN |= {"tie_word_embeddings": False}
BART = {"model_type": "bart", "d_model": 1024, "vocab_size": 50264, "num_hidden_layers": 12}
BART |= {f"{side}_ffn_dim": 4096 for side in ("encoder", "decoder")}
BART |= {f"{side}_attention_heads": 16 for side in ("encoder", "decoder")}
BART |= {"encoder_layers": 12, "decoder_layers": 12, "max_position_embeddings": 1024}
WHISPER = {"model_type": "whisper", "d_model": 1280, "num_mel_bins": 128, "vocab_size": 51866}
WHISPER |= {f"{side}_ffn_dim": 5120 for side in ("encoder", "decoder")}
WHISPER |= {f"{side}_attention_heads": 20 for side in ("encoder", "decoder")}
WHISPER |= {f"{side}_layers": 32 for side in ("encoder", "decoder")}
WHISPER |= {"max_source_positions": 1500, "max_target_positions": 448, "num_hidden_layers": 32}
VIT = {"model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "image_size": 224}
VIT |= {"num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16, "num_channels": 3}
VIT |= {"qkv_bias": True, "id2label": {str(number): str(number) for number in range(1000)}}
CLIP_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
CLIP_TEXT |= {"projection_dim": 768, "num_hidden_layers": 12, "model_type": "clip_text_model"}
CLIP_VISION = {**LARGE, "patch_size": 14, "image_size": 224, "projection_dim": 768}
CLIP_VISION |= {"model_type": "clip_vision_model"}
CLIP = {"model_type": "clip", "projection_dim": 768, "text_config": CLIP_TEXT}
CLIP |= {"vision_config": CLIP_VISION}
XLMR = {**ROBERTA, **LARGE, "model_type": "xlm-roberta", "vocab_size": 250002}

PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    ("BertModel", BERT, 109_482_240),
    ("BertForMaskedLM", BERT, 109_514_298),
    ("BertForMaskedLM", {**BERT, **LARGE}, 335_174_458),
    ("RobertaForMaskedLM", ROBERTA, 124_697_433),
    ("RobertaModel", {**ROBERTA, **LARGE}, 355_359_744),
    ("XLMRobertaForSequenceClassification", XLMR, 559_892_482),
    ("DebertaModel", DEBERTA, 138_601_728),
    ("DebertaV2Model", DEBERTA_V2, 884_593_152),
    ("DebertaV2Model", DEBERTA_V3, 183_831_552),
    ("DebertaV2ForSequenceClassification", DEBERTA_V3, 184_423_682),
    ("T5ForConditionalGeneration", T5, 60_506_624),
    ("T5EncoderModel", T5, 35_330_816),
    ("T5ForConditionalGeneration", FLAN, 2_783_959_040),
    ("BartForConditionalGeneration", BART, 406_290_432),
    ("WhisperForConditionalGeneration", WHISPER, 1_543_490_560),
    ("ViTModel", VIT, 86_389_248),
    ("ViTForImageClassification", VIT, 86_567_656),
    ("CLIPModel", CLIP, 427_616_513),
    ("CLIPTextModel", CLIP_TEXT, 123_060_480),
    ("CLIPTextModelWithProjection", CLIP_TEXT, 123_650_304),
    ("CLIPVisionModel", CLIP_VISION, 303_179_776),
]
"""A class, its published `config.json` as far as it has sizes, and its parameters."""

LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
NEVER = ("transformers_version", "model_type", "architectures", "dtype", "id2label", "label2id")


def made(name: str, values: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The model of a class on `meta`."""
    values = {key: value for key, value in values.items() if key != "architectures"}
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(config, dtype=dtype)


def parameters(model: Any) -> int:
    return sum(each.numel() for each in set(model.parameters()))


def as_saved(config: Any, name: str) -> dict[str, Any]:
    return {**json.loads(config.to_json_string(use_diff=True)), "architectures": [name]}


@pytest.mark.parametrize(
    ("name", "values", "expected"), PUBLISHED, ids=[f"{row[0]}-{row[2]}" for row in PUBLISHED]
)
def test_published_models(name: str, values: dict[str, Any], expected: int) -> None:
    model = made(name, values)
    estimate = estimate_inference({**values, "architectures": [name]}, dtype="float32")
    assert estimate.parameters == parameters(model) == expected
    assert estimate.weights == allocated(model)
    assert estimate.exact


def classes() -> Iterator[Any]:
    """Every class of every family, by its name in `transformers`."""
    names = {name.lower(): name for name in dir(transformers)}
    for family, row in ENCODERS.items():
        prefix = family.replace("_text_model", "").replace("_vision_model", "")
        for kind in row.classes:
            name = names[prefix.replace("_", "").replace("-", "") + kind.lower()]
            yield pytest.param(family, name, id=name)


def small(family: str) -> dict[str, Any]:
    """A config with few layers, and everything else as the family has it by default."""
    usual = AutoConfig.for_model(family).to_dict()
    return {"model_type": family} | {key: 2 for key in LAYERS if key in usual}


@pytest.mark.parametrize(("family", "name"), list(classes()))
def test_every_class_is_counted_to_the_byte(family: str, name: str) -> None:
    labels = 2 if name == "DistilBertForQuestionAnswering" else 7
    for changes in ({}, {"tie_word_embeddings": False, "num_labels": labels}):
        values = {**small(family), **changes}
        model = made(name, values, torch.bfloat16)
        counted = (parameters(model), allocated(model))
        for saved in (as_saved(model.config, name), {**values, "architectures": [name]}):
            shape = shape_of(saved, dtype="bfloat16")
            assert (shape.parameters, shape.weight_bytes) == counted


@pytest.mark.parametrize(
    ("family", "name"),
    [("bert", "BertModel"), ("t5", "T5ForConditionalGeneration"), ("clip", "CLIPModel")],
)
def test_a_config_that_names_no_class_is_of_the_usual_one(family: str, name: str) -> None:
    for named in ({}, {"architectures": None}, {"architectures": []}):
        shape = shape_of({"model_type": family, **named})
        assert shape.parameters == parameters(made(name, {"model_type": family}))


def options(family: str) -> Iterator[dict[str, Any]]:
    """Every option of a family with another value, one at a time."""
    for key, value in AutoConfig.for_model(**small(family)).to_dict().items():
        if key in NEVER or key.endswith("token_id"):
            continue
        if isinstance(value, bool):
            yield {key: not value}
        elif isinstance(value, int | float):
            yield from ({key: other} for other in (2 * value, value + 1, 0))
        elif value is None:
            yield from ({key: other} for other in (8, True))


def check_options(family: str, changes: list[dict[str, Any]]) -> int:
    """How many of the options are counted; the others are refused, by transformers or by us."""
    name = next(case.values[1] for case in classes() if case.values[0] == family)
    counted = 0
    for change in changes:
        try:
            model = made(name, {**small(family), **change}, torch.bfloat16)
        except Exception:
            continue  # no such model: every library's own error says it in its own way
        try:
            shape = shape_of(as_saved(model.config, name), dtype="bfloat16")
        except ConfigurationError:
            continue
        assert (shape.parameters, shape.weight_bytes) == (parameters(model), allocated(model)), (
            change
        )
        counted += 1
    return counted


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "t5", "whisper", "dinov2"])
def test_an_option_is_counted_or_refused(family: str) -> None:
    switches = [each for each in options(family) if isinstance(next(iter(each.values())), bool)]
    assert check_options(family, switches)


@pytest.mark.soak
@pytest.mark.parametrize("family", ENCODERS)
def test_every_option_is_counted_or_refused(family: str) -> None:
    assert check_options(family, list(options(family))) > 5


PECULIAR: list[tuple[str, dict[str, Any]]] = [
    ("DebertaForMaskedLM", {**DEBERTA, "talking_head": True, "embedding_size": 128}),
    ("DebertaForMaskedLM", {**DEBERTA, "pos_att_type": ["p2c"], "legacy": False}),
    ("DebertaV2ForMaskedLM", {**DEBERTA_V2, "share_att_key": False, "conv_groups": 2}),
    ("DebertaV2Model", {**DEBERTA_V3, "relative_attention": False}),
    ("DebertaV2Model", {**DEBERTA_V2, "position_buckets": -1, "max_relative_positions": 64}),
    ("T5Model", {**T5, "num_decoder_layers": None, "feed_forward_proj": "gated-silu"}),
    ("ModernBertForMaskedLM", {"model_type": "modernbert", "norm_bias": True, "mlp_bias": True}),
    ("ModernBertModel", {"model_type": "modernbert", "global_attn_every_n_layers": 1}),
    ("ViTModel", {**VIT, "image_size": [224, 160], "patch_size": [16, 8], "num_channels": 1}),
    ("Dinov2Model", {"model_type": "dinov2", "use_swiglu_ffn": True, "image_size": 518}),
    ("SiglipVisionModel", {"model_type": "siglip_vision_model", "vision_use_head": False}),
    ("CLIPModel", {**CLIP, "text_config": None, "text_config_dict": {"num_hidden_layers": 2}}),
    ("AlbertForPreTraining", {"model_type": "albert", "num_hidden_groups": 3}),
    ("ElectraForMaskedLM", {"model_type": "electra", "embedding_size": 256}),
    ("DistilBertModel", {"model_type": "distilbert", "dim": 64, "n_heads": 4, "n_layers": 1}),
]


@pytest.mark.parametrize(("name", "values"), PECULIAR, ids=[row[0] for row in PECULIAR])
def test_peculiar_configs(name: str, values: dict[str, Any]) -> None:
    model = made(name, values, torch.bfloat16)
    shape = shape_of({**values, "architectures": [name]}, dtype="bfloat16")
    assert (shape.parameters, shape.weight_bytes) == (parameters(model), allocated(model))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["JinaBertForMaskedLM"]}, "class 'JinaBertForMaskedLM' is not one of"),
        ({"architectures": ["BertForSomething"]}, "class 'ForSomething' of bert is not in the"),
        ({"architectures": "BertModel"}, "architectures is not a list"),
        ({"is_decoder": True}, "is_decoder = True is not in the table"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized weights of bert"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
        ({"hidden_size": "768"}, "hidden_size must be an integer"),
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"num_attention_heads": 7}, "not a multiple of heads"),
        ({"num_attention_heads": 0}, "a value that is not valid"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 100000"),
        ({"vocab_size": -1}, "vocab_size must be an integer of 0 or more"),
        ({**BART, "num_hidden_layers": 6}, "num_hidden_layers = 6 is not in the table"),
        ({**VIT, "image_size": "224"}, "image_size must be an integer"),
        ({**CLIP, "text_config": 5}, "text_config is not an object"),
        ({**CLIP, "text_config": {"model_type": "bert"}}, "text_config of the family 'bert'"),
        ({**DEBERTA, "max_relative_positions": "x"}, "a value that is not valid"),
        ({"model_type": "marian", "share_encoder_decoder_embeddings": False}, "share_encoder"),
    ],
)
def test_what_is_not_in_the_table_is_refused(changes: dict[str, Any], said: str) -> None:
    usual = {} if "model_type" in changes else BERT
    with pytest.raises(ConfigurationError, match=said):
        estimate_inference({**usual, **changes})


TEXT = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 500}
TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 1}
PICTURE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
PICTURE |= {"num_attention_heads": 4, "image_size": 144, "patch_size": 16}
SIDES = {f"{side}_ffn_dim": 512 for side in ("encoder", "decoder")}
SIDES |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
SIDES |= {f"{side}_layers": 3 for side in ("encoder", "decoder")}
SIDES |= {"d_model": 128, "vocab_size": 500, "max_position_embeddings": 512, "pad_token_id": 0}
SIDES |= {"eos_token_id": 2, "decoder_start_token_id": 1}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
RELATIVE |= {"position_biased_input": False}
SMALL_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("BertModel", {"model_type": "bert", **TEXT}),
        pytest.param("MPNetModel", {"model_type": "mpnet", **TEXT}, marks=SOAK),
        pytest.param("DebertaModel", {"model_type": "deberta", **TEXT, **RELATIVE}, marks=SOAK),
        ("DebertaV2Model", {"model_type": "deberta-v2", **TEXT, **RELATIVE}),
        ("ModernBertModel", {"model_type": "modernbert", **TEXT, "local_attention": 32}),
        ("T5EncoderModel", {"model_type": "t5", **SMALL_T5, "vocab_size": 500}),
        pytest.param("CLIPTextModel", {"model_type": "clip_text_model", **TEXT}, marks=SOAK),
        ("CLIPVisionModel", {"model_type": "clip_vision_model", **PICTURE}),
        pytest.param("ViTModel", {"model_type": "vit", **PICTURE}, marks=SOAK),
    ],
)
def test_the_peak_of_one_pass(name: str, values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**values)
    model = getattr(transformers, name)(config).eval()
    batch, tokens = 3, 96
    entered: dict[str, torch.Tensor] = {"pixel_values": torch.rand(batch, 3, 144, 144)}
    if "image_size" not in values:
        mask = torch.ones(batch, tokens, dtype=torch.int64)
        mask[0, tokens // 2 :] = 0
        entered = {"input_ids": torch.randint(3, 500, (batch, tokens)), "attention_mask": mask}
    alive = LiveBytes(itertools.chain(model.parameters(), model.buffers(), entered.values()))
    with torch.no_grad(), alive:
        model(**entered)
    estimate = estimate_inference(model, context=tokens, batch=batch)
    assert (estimate.kv_cache, estimate.logits) == (0, 0)
    assert 0.95 <= estimate.activations / alive.peak <= 1.10


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("T5ForConditionalGeneration", {"model_type": "t5", **SMALL_T5, "vocab_size": 500}),
        ("BartForConditionalGeneration", {"model_type": "bart", **SIDES}),
        pytest.param(
            "PegasusForConditionalGeneration",
            {"model_type": "pegasus", **SIDES},
            marks=SOAK,
        ),
        (
            "WhisperForConditionalGeneration",
            {"model_type": "whisper", **SIDES, "max_source_positions": 100, "num_mel_bins": 20}
            | {"max_target_positions": 96, "bos_token_id": 1},
        ),
    ],
)
def test_reading_and_writing_with_two_caches(name: str, values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**values)
    model = getattr(transformers, name)(config).eval()
    batch, tokens = 3, 96
    entered = {"input_ids": torch.randint(3, 500, (batch, tokens))}
    source = config.max_source_positions if "num_mel_bins" in values else tokens
    if "num_mel_bins" in values:
        entered = {"input_features": torch.rand(batch, 20, 2 * source)}
    new = torch.full((batch, 1), 5)
    there = itertools.chain(model.parameters(), model.buffers(), entered.values(), [new])
    alive = LiveBytes(there)
    with torch.no_grad(), alive:
        read = model.get_encoder()(**entered)
        peak = alive.peak
        # The output of the encoder is held, and so are both caches once they are made.
        own, crossed = (StaticCache(config, max_cache_len=size) for size in (tokens, source))
        caches = EncoderDecoderCache(own, crossed)
        for _ in range(2):
            alive.reset()
            answer = model(
                encoder_outputs=read, decoder_input_ids=new, past_key_values=caches, use_cache=True
            )
            new = answer.logits[:, -1].float().argmax(-1)[:, None]
            del answer
    layers = [*own.layers, *crossed.layers]
    held = sum(each.keys.nbytes + each.values.nbytes for each in layers)
    estimate = estimate_inference(model, context=tokens, batch=batch)
    assert estimate.kv_cache == held
    peak = max(peak, alive.peak - held)
    assert 0.95 <= (estimate.activations + estimate.logits) / peak <= 1.10
    assert estimate.exact


def test_scores_of_words_for_every_token_are_logits() -> None:
    masked = {**BERT, "architectures": ["BertForMaskedLM"]}
    estimate = estimate_inference(masked, context=512, batch=8, dtype="float32")
    assert estimate.logits == 8 * 512 * 30522 * 4
    labels = {**BERT, "architectures": ["BertForSequenceClassification"]}
    assert estimate_inference(labels, context=512, batch=8, dtype="float32").logits == 8 * 2 * 4


def test_the_context_is_what_the_model_reads() -> None:
    assert estimate_inference(BERT).context == 512
    assert estimate_inference(ROBERTA).context == 512
    assert estimate_inference(T5).context == 4096
    assert estimate_inference(WHISPER).context == 448
    picture = estimate_inference(VIT, context=4096)
    assert picture.context == 197
    assert picture.assumed[-1] == (
        "what it reads is always 197 tokens long: the context changes nothing"
    )
    assert "beyond the model's longest, 512" in estimate_inference(BERT, context=513).assumed[-1]
    heard = estimate_inference(WHISPER, context=100, dtype="float16")
    assert heard.kv_cache == 32 * 2 * 1280 * 2 * (100 + 1500)


def test_modules_are_counted_as_their_class() -> None:
    values = {"model_type": "t5", **SMALL_T5, "vocab_size": 500}
    for name in ("T5ForConditionalGeneration", "T5EncoderModel", "T5Model"):
        model = made(name, values, torch.bfloat16)
        model.config.architectures = ["T5ForConditionalGeneration"]  # as one from the hub says

        class Mine(type(model)):  # type: ignore[misc]
            pass

        model.__class__ = Mine
        estimate = estimate_inference(model, context=64)
        assert estimate.weights == allocated(model)
        assert estimate.exact
        by_config = estimate_inference({**values, "architectures": [name]}, context=64)
        assert (estimate.total, estimate.kv_cache) == (by_config.total, by_config.kv_cache)
    model.encoder.more = torch.nn.Linear(8, 8, device="meta", dtype=torch.bfloat16)
    changed = estimate_inference(model, context=64)
    assert changed.weights == allocated(model)
    assert "not as its config says" in changed.assumed[-1]


def test_layers_are_those_of_the_encoder_and_then_of_the_decoder() -> None:
    shape = shape_of(BART, dtype="float16")
    assert len(shape.layer_bytes) == shape.layers == 24
    assert shape.layer_bytes[0] < shape.layer_bytes[-1]
    cache = shape.kv_bytes(100)
    assert cache[:12] == (0,) * 12
    assert cache[12:] == (2 * 2 * 1024 * 2 * 100,) * 12


def test_training_of_encoders_is_not_estimated() -> None:
    with pytest.raises(ConfigurationError, match="estimated for decoders, and bert is an encoder"):
        estimate_training(BERT, context=128)
