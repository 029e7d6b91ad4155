"""GGUF files: what they say as a config, their tensors unpacked and in order, their tokenizer."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unicodedata import ucd_3_2_0

import numpy as np
import pytest
from safetensors.numpy import load_file

from anydevice import device, ops, to_numpy
from anydevice._core.quantized import BLOCK_TYPES, QuantizedWeight
from anydevice._core.record import replace
from anydevice._core.rope_scaling import frequencies
from anydevice._core.trees import leaves
from anydevice._formats import load as loading
from anydevice._formats.gguf import read_gguf
from anydevice._llm.description import describe
from anydevice._llm.tokenizer import GPT2, SPLITTINGS, Tokenizer
from anydevice._llm.weights import Weights
from anydevice._plan.config import locate, read_config
from anydevice._plan.model import shape_of
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError
from anydevice.llm import load
from tests.comparing import (
    COPIED,
    SAME_PROGRAM,
    assert_close,
    assert_same_integers,
    assert_same_values,
)
from tests.llm.random_weights import load_parameters

gguf = pytest.importorskip("gguf")
from tests.llm.families import BASE, whole_logits  # noqa: E402
from tests.llm.gguf_files import add, finish, write, writer_of  # noqa: E402

CPU = device("cpu", engine="numpy")


def tokenizer_of(file: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(file))


NUMBERS = {"context_length": 64, "block_count": 3, "embedding_length": 32}
NUMBERS |= {"feed_forward_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
SIZES = {**BASE, "intermediate_size": 64, "num_hidden_layers": 3, "rms_norm_eps": 1e-5}
SIXTEEN = {"attention.key_length": 16, "attention.value_length": 16}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}, {**RMS, "rope.dimension_count": 8}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0}
            | {"original_max_position_embeddings": 16}
        },
        {**RMS, "rope.freq_base": 50000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        | {"rope.scaling.original_context_length": 16},
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "sliding_window": None},
        {**RMS, **EXPERTS} | {"rope.freq_base": 1e6},
    ),
    "qwen2": ("qwen2", {"rope_theta": 1e6}, {**RMS, "rope.freq_base": 1e6}),
    "qwen3": ("qwen3", {"head_dim": 16}, {**RMS, **SIXTEEN}),
    "qwen3moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 32},
        {**RMS, **SIXTEEN, **EXPERTS, "expert_feed_forward_length": 32},
    ),
    "qwen2moe": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
        {**RMS, **EXPERTS, "expert_feed_forward_length": 32}
        | {"expert_shared_feed_forward_length": 96},
    ),
    "gemma": ("gemma", {"head_dim": 16}, {**RMS, **SIXTEEN}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
        {**RMS, **SIXTEEN, "attention.sliding_window": 6, "attn_logit_softcapping": 50.0}
        | {"final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
        {**RMS, **SIXTEEN, "attention.sliding_window": 6, "rope.freq_base": 1e6},
    ),
    "phi3": (
        "phi3",
        {"sliding_window": 7},
        {**RMS, "attention.sliding_window": 7} | {"rope.dimension_count": 8},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.25}
        | {"logits_scaling": 8.0},
        {**RMS, "attention.scale": 0.25, "embedding_scale": 12.0, "residual_scale": 0.25}
        | {"logit_scale": 8.0},
    ),
    "smollm3": ("smollm3", {"rope_theta": 2e6}, {**RMS, "rope.freq_base": 2e6}),
    "olmo2": ("olmo2", {}, RMS),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": 4096, "use_bias": True, "norm_epsilon": 1e-5},
        {"attention.layer_norm_epsilon": 1e-5},
    ),
}
PERMUTED = ("llama", "llama, yarn", "mixtral", "granite", "smollm3")


def made(folder: Path, name: str, *, wide: bool = False, **more: Any) -> tuple[Path, Path]:
    """A tiny random model of a family, as a folder and as a GGUF file."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    family, options, numbers = FAMILIES[name]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if wide else {}
    if wide:
        numbers = {**numbers, "embedding_length": 256, "feed_forward_length": 256}
        numbers |= {"rope.dimension_count": 64} | {key: 64 for key in SIXTEEN if key in numbers}
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **options, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, tensor in model.state_dict().items():
        tensor.normal_().mul_(0.3).add_(float("norm" in key))
    model.save_pretrained(folder / "folder")
    state = load_file(folder / "folder" / "model.safetensors")
    architecture = "llama" if name in ("mixtral", "llama, yarn") else name
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    more |= {"heads": (4, 2) if name in PERMUTED else None, "unit_norm": name.startswith("gemma")}
    file = write(folder / "model.gguf", architecture, state, {**NUMBERS, **numbers}, **more)
    return folder / "folder", file


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_describes_the_model_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    folder, file = made(tmp_path, name)
    theirs, ours = (describe(read_config(each)) for each in (folder, file))
    assert ours == theirs
    first, second = (load_parameters(each, theirs, CPU, "float32") for each in (folder, file))
    for a, b in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-7 if name.startswith("gemma") else 0)


@pytest.mark.parametrize("packing", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_packed_tensors_are_what_the_package_unpacks(tmp_path: Path, packing: str) -> None:
    folder, file = made(tmp_path, "llama", packing=packing)
    description = describe(read_config(file))
    kept = load_parameters(file, description, CPU, "float32")
    found = load_parameters(file, description, CPU, "float32", weights=Weights(stored=False))
    exact = load_parameters(folder, description, CPU, "float32")
    reader = {t.name: t for t in gguf.GGUFReader(file).tensors}
    tensor = reader["blk.1.ffn_down.weight"]
    assert tensor.tensor_type.name == packing
    theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert_same_values(found["layers"][1]["down"]["weight"], theirs, because=SAME_PROGRAM)
    stored = kept["layers"][1]["down"]["weight"]
    assert isinstance(stored, QuantizedWeight) == (packing not in ("F32", "F16", "BF16"))
    if isinstance(stored, QuantizedWeight):
        assert_same_values(ops.dequantize(stored), theirs, because=SAME_PROGRAM)
    error = np.abs(found["layers"][1]["down"]["weight"] - exact["layers"][1]["down"]["weight"])
    assert error.max() < {"F32": 1e-9, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.01}.get(packing, 0.15)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "TQ2_0", "IQ3_S"])
def test_any_block_may_be_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Packed by hand, in blocks of any bytes but finite scales; read in pieces and whole."""
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(2).integers(0, 60, (12 * 1024 // elements, size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", blocks.reshape(12, -1), raw_dtype=number)
    finish(writer)
    theirs = gguf.quants.dequantize(blocks.reshape(12, -1), number)
    assert len(np.unique(theirs)) > 2
    tensor = read_gguf(tmp_path / "x.gguf").tensors["x"]
    assert tensor.shape == theirs.shape == (12, 1024)
    monkeypatch.setattr(loading, "CHUNK", 2048)
    with loading.OpenFiles() as files:
        joined = loading.Joined(tensor.shape, tensor.dtype, (loading.Segment(tensor),))
        whole: Any = np.empty(tensor.shape, np.float32)
        loading._read(joined, files, whole.reshape(-1), lambda _: None)
        row = np.empty(1024, np.float32)
        tensor.row(7).read(files.of(tensor), row, 0)
    assert_same_values(whole, theirs, because=SAME_PROGRAM)
    assert_same_values(row, theirs[7], because=SAME_PROGRAM)


def test_without_gguf_configs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = made(tmp_path, "llama", packing="Q8_0")[1]
    monkeypatch.setitem(sys.modules, "gguf", None)
    description = describe(read_config(packed))
    with pytest.raises(UnsupportedError, match=r'gguf.*pip install "\.\[llm\]"'):
        load_parameters(packed, description, CPU)


def split(file: Path, count: int) -> list[Path]:
    """Write the tensors of a file into several, as llama.cpp's `gguf-split` does."""
    reader, paths = gguf.GGUFReader(file), []
    for number in range(count):
        paths.append(file.with_name(f"split-{number + 1:05}-of-{count:05}.gguf"))
        writer = gguf.GGUFWriter(paths[-1], "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if key.startswith("llama."):
                    value = field.contents()
                    writer_of(writer, value)(key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return paths


def test_a_model_in_several_files(tmp_path: Path) -> None:
    file = made(tmp_path, "llama", packing="Q5_0")[1]
    paths = split(file, 3)
    description = describe(read_config(file))
    whole = load_parameters(file, description, CPU, "float32")
    for path in (paths[0], paths[2]):
        assert describe(read_config(path)) == description
        parts = load_parameters(path, description, CPU, "float32")
        for a, b in zip(leaves(whole), leaves(parts), strict=True):
            for x, y in zip(*(getattr(w, "arrays", {"": w}).values() for w in (a, b)), strict=True):
                assert_same_values(x, y, because=COPIED)
    file.unlink()
    (tmp_path / "folder" / "model.safetensors").unlink()
    assert locate(str(tmp_path)) == paths[0]
    paths[1].rename(tmp_path / "other")
    with pytest.raises(TransferError, match=r"split-00002-of-00003\.gguf is missing"):
        read_gguf(paths[0])
    (paths[1]).write_bytes(paths[2].read_bytes())
    with pytest.raises(TransferError, match=r"00002-of-00003\.gguf does not belong to .*00001"):
        read_gguf(paths[0])
    with pytest.raises(TransferError, match=r"one of 3 files .*-00001-of-00003\.gguf"):
        read_gguf(paths[0].rename(tmp_path / "renamed.gguf"))


def test_other_types_are_unpacked_with_one_warning(tmp_path: Path) -> None:
    file = made(tmp_path, "llama", packing="TQ2_0", wide=True)[1]
    description = describe(read_config(file))
    with pytest.warns(UserWarning, match=r"303\.3 KiB in .* 4\.6 MiB in .*TQ2_0") as caught:
        parameters = load_parameters(file, description, CPU, "float32")
    assert len(caught) == 1
    assert not any(isinstance(x, QuantizedWeight) for x in leaves(parameters))


def stacks_of(file: Path, stored: bool = True) -> tuple[list[str], Any]:
    """Return the dtypes of the stacks of experts, and the logits of a text."""
    description = describe(read_config(file))
    parameters = load_parameters(file, description, CPU, "float32", weights=Weights(stored))
    stacks = [x for layer in parameters["layers"] for x in layer["experts"].values()]
    ids = np.arange(9, dtype="int32")[None]
    return [str(stack.dtype) for stack in stacks], whole_logits(description, parameters, ids)


@pytest.mark.filterwarnings("error")
def test_each_stack_of_experts_keeps_its_own_type(tmp_path: Path) -> None:
    others = {"blk.0.ffn_down_exps": "Q4_0", "blk.1.ffn_gate_exps": "Q5_1"}
    others |= {"blk.1.ffn_up_exps": "Q5_1", "blk.2.ffn_down_exps": "F32"}
    file = made(tmp_path, "qwen3moe", packing="Q8_0", others=others)[1]
    kinds, logits = stacks_of(file)
    assert kinds == ["q8_0", "q4_0", "q5_1", "q8_0", "q8_0", "float32"]
    assert_close(logits, stacks_of(file, stored=False)[1], terms=2_000)


@pytest.mark.parametrize(
    ("other", "why"),
    [("Q4_0", "mixes types"), ("TQ2_0", "TQ2_0 can only be unpacked.*mixes types")],
)
def test_a_mixed_stack_is_unpacked_with_one_warning(tmp_path: Path, other: str, why: str) -> None:
    options = {"packing": "Q8_0", "others": {"blk.1.ffn_up_exps": other}, "wide": True}
    file = made(tmp_path, "qwen3moe", **options)[1]
    with pytest.warns(UserWarning, match=rf"float32, .* 256\.0 KiB in .*{why}") as caught:
        kinds, logits = stacks_of(file)
    assert len(caught) == 1
    assert kinds == ["q8_0", "q8_0", "float32", "q8_0", "q8_0", "q8_0"]
    assert_close(logits, stacks_of(file, stored=False)[1], terms=4_000)


def test_llama_3s_factors_are_recognized(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    scaling: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config = transformers.AutoConfig.for_model("llama", **{**SIZES, "rope_parameters": scaling})
    plain, scaled = frequencies(8, 500000.0, None)[0], frequencies(8, 500000.0, scaling)[0]
    factors = np.array([a / b for a, b in zip(plain, scaled, strict=True)], np.float32)
    state = {"model.layers.2.mlp.up_proj.weight": np.zeros((64, 32), np.float32)}
    numbers = {**NUMBERS, **RMS, "rope.freq_base": 500000.0}

    def read(factors: Any) -> Any:
        tables = {"rope_freqs.weight": factors}
        return read_config(write(tmp_path / "a.gguf", "llama", state, numbers, tables=tables))

    found = read(factors).get("rope_scaling")
    assert {**found, "rope_theta": 500000.0} == config.to_dict()["rope_parameters"]
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight.*not those of Llama 3"):
        read(np.linspace(1, 8, 4, dtype=np.float32))


def test_a_plan_of_a_file_is_that_of_the_folder(tmp_path: Path) -> None:
    folder, file = made(tmp_path, "qwen3", packing="Q8_0")
    theirs, ours = shape_of(folder, dtype="bfloat16"), shape_of(file, weights="float")
    assert ours.name == "model"
    assert ours.dtype == "bfloat16"
    assert ours.exact
    assert replace(ours, name="", rounding=0) == replace(theirs, name="", rounding=0)
    in_scheme = shape_of(folder, weights="q8_0")
    assert in_scheme.quantization == shape_of(file).quantization == "q8_0"
    assert abs(in_scheme.weight_bytes / shape_of(file).weight_bytes - 1) < 0.03
    assert shape_of(file, weights="q4_0").weight_bytes < 0.6 * shape_of(file).weight_bytes


@pytest.mark.parametrize(
    ("name", "packing"), [("qwen3", "Q8_0"), ("qwen2moe", "Q4_1"), ("llama", "Q5_0")]
)
def test_a_plan_counts_what_is_kept(tmp_path: Path, name: str, packing: str) -> None:
    file = made(tmp_path, name, packing=packing)[1]
    parameters = load_parameters(file, describe(read_config(file)), CPU, "float32")
    arrays = [list(getattr(x, "arrays", {"": x}).values()) for x in leaves(parameters)]
    shape = shape_of(file, dtype="float32")
    rotary = 4 * shape.head_size
    assert shape.weight_bytes == sum(x.nbytes for several in arrays for x in several) + rotary
    assert shape.quantization == packing.lower()


def sized(folder: Path, architecture: str, numbers: Any) -> Path:
    writer = gguf.GGUFWriter(folder / "x.gguf", architecture)
    for key, value in {**NUMBERS, **numbers}.items():
        writer_of(writer, value)(f"{architecture}.{key}", value)
    add(writer, "token_embd.weight", np.zeros((97, 32), np.float32), "F32")
    finish(writer)
    return folder / "x.gguf"


@pytest.mark.parametrize(
    ("architecture", "numbers", "said"),
    [
        ("mamba", {}, "architecture 'mamba'"),
        ("deepseek2", {}, "architecture 'deepseek2'"),
        ("llama", {"attention.new_thing": 3}, r"llama\.attention\.new_thing"),
        ("llama", {"rope.scaling.type": "other"}, "kind 'other'"),
        ("olmo2", {"attention.sliding_window": 8}, "olmo2 with a sliding_window"),
        ("qwen3", {"attention.value_length": 8, "attention.key_length": 16}, "different sizes"),
        ("llama", {"rope.dimension_count": 4}, r"llama\.rope\.dimension_count .* whole heads"),
    ],
)
def test_what_is_no_exact_match(tmp_path: Path, architecture: str, numbers: Any, said: str) -> None:
    file = sized(tmp_path, architecture, numbers)
    with pytest.raises(UnsupportedError, match=rf"x\.gguf.*{said}"):
        read_config(file)


@pytest.mark.parametrize("key", [*NUMBERS, "attention.key_length", "rope.dimension_count"])
def test_sizes_of_zero_are_refused(tmp_path: Path, key: str) -> None:
    file = sized(tmp_path, "llama", {"rope.dimension_count": 8, key: 0})
    with pytest.raises((ConfigurationError, UnsupportedError), match=r"x\.gguf"):
        load(file, device="cpu")


def test_types_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_K
    writer.add_tensor("blk.0.x", np.zeros((2, 292), np.uint8), raw_dtype=kind)
    finish(writer)
    with pytest.raises(TransferError, match=r"x\.gguf: .*blk\.0\.x.* type Q8_K.*Q4_K") as caught:
        read_gguf(tmp_path / "x.gguf")
    assert caught.value.path == "blk.0.x"


# --- tokenizers -------------------------------------------------------------------------------


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """A vocabulary that was learned from a few lines, with special tokens in front."""
    tokenizers = pytest.importorskip("tokenizers")
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<|user|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    learned.train_from_iterator(LINES * 3, trainer)
    model = json.loads(learned.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "bos_token_id": 0, "eos_token_id": 1}
    values["token_type"] = [3, 3, 4] + [1] * (len(tokens) - 3)
    values["merges"] = [" ".join(merge) for merge in model["merges"]]
    named = {f"tokenizer.ggml.{key}": value for key, value in {**values, **more}.items()}
    return named | {"tokenizer.chat_template": "{{ messages[0].content }}"}


LINES = [
    "It's what they'LL say: we've been here before, haven't we?",
    "In 1789, 12345 people walked 42.195 km; x2 = y10 + 3.",
    "    indented\n\n\tand tabs  \r\n  ... trailing   ",
    "Ärger über Größe, naïve café, e\u0301a\u0300, Ελληνικά, 日本語のテキスト, 한국어, عربى",
    "👩‍👩‍👧 emoji 🚀🚀, ½ ² Ⅳ ١٢٣ \u200b\u00a0end",
    "def f(x): return {'a': [1, 2, 3], \"b\": None}  # comment",
    "CamelCaseWords and snake_case_words and SHOUTING-words/paths/x.py",
    "<s>a <|user|> b</s>",
    "",
    " ",
    "\n\n\n",
]


def tokenizer_file(folder: Path, metadata: Mapping[str, Any]) -> Path:
    state = {"model.layers.0.mlp.up_proj.weight": np.zeros((64, 32), np.float32)}
    return write(folder / "t.gguf", "llama", state, NUMBERS, tokenizer=metadata)


def test_errors_of_the_template_name_the_file_it_is_in(tmp_path: Path) -> None:
    refusing = {"tokenizer.chat_template": "{{ raise_exception('not so') }}"}
    file = tokenizer_file(tmp_path, byte_level("gpt-2") | refusing)
    with pytest.raises(ConfigurationError, match="not so") as error:
        tokenizer_of(file).encode_chat([{"role": "user", "content": "Hi"}])
    assert f"the chat template of {file} refuses" in str(error.value)
    assert error.value.source == str(file)


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_byte_level_text_comes_back(tmp_path: Path, pre: str) -> None:
    file = tokenizer_file(tmp_path, byte_level(pre))
    tokenizer = tokenizer_of(file)
    for line in LINES:
        if "<" in line or (SPLITTINGS[pre].composed and "e\u0301" in line):
            continue
        assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.adds_bos == SPLITTINGS[pre].bos
    assert tokenizer.eos_ids == (1,)
    ids = tokenizer.encode("a<|user|>b</s>")
    assert (ids.count(2), ids.count(1)) == (1, 1)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "dbrx", "gpt-4o", "gpt-2"])
def test_tokens_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    transformers = pytest.importorskip("transformers")
    file = tokenizer_file(tmp_path, byte_level(pre, add_bos_token=False))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = tokenizer_of(file)
    composed = SPLITTINGS[pre].composed
    for line in LINES:  # its conversion does not compose characters, as the model's own files do
        if not (composed and "e\u0301" in line):
            assert ours.encode(line) == theirs(line).input_ids, line


def test_digits_are_split_before_spaces_are_joined(tmp_path: Path) -> None:
    ours = tokenizer_of(tokenizer_file(tmp_path, byte_level("smollm")))
    tokens = [ours.token_text(token) for token in ours.encode("    12")]
    assert tokens[-2:] == ["1", "2"]
    plain = tokenizer_of(tokenizer_file(tmp_path, byte_level("gpt-2")))
    alone = [ours.token_text(token) for token in ours.encode("    ")]
    assert tokens[:-2] == alone == [plain.token_text(token) for token in plain.encode("    ")]
    assert plain.encode("    12")[: len(alone)] != plain.encode("    ")


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact"])
def test_numeric_characters_of_every_script_are_split_alone(tmp_path: Path, pre: str) -> None:
    """As by `Digits` (Nd, Nl and No) of the models' `tokenizer.json`, and by llama.cpp's `\\p{N}`.

    The conversion in transformers has no such step: it joins the space and a part of the ½ in " ½".
    """
    from tokenizers import Regex, pre_tokenizers

    own = tokenizer_of(tokenizer_file(tmp_path, byte_level(pre)))._backend.pre_tokenizer
    patterns = [pre_tokenizers.Split(Regex(x), "isolated") for x in (r"\p{N}", GPT2)]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_patterns = pre_tokenizers.Sequence([*patterns, last])
    # Characters that an old Unicode has already: libraries learn newer ones at different times.
    characters = [x for x in map(chr, range(0x20000)) if ucd_3_2_0.category(x) not in ("Cn", "Cs")]
    numeric = [x for x in characters if unicodedata.category(x) in ("Nd", "Nl", "No")]
    assert {*"①½²Ⅷ٣৩"} < {*numeric}
    for x in numeric:
        parts = own.pre_tokenize_str(f"x {x}{x}")
        assert [where for _, where in parts] == [(0, 1), (1, 2), (2, 3), (3, 4)], x
        assert parts == by_patterns.pre_tokenize_str(f"x {x}{x}")
    for x in characters[::50]:
        assert own.pre_tokenize_str(f"x {x}") == by_patterns.pre_tokenize_str(f"x {x}"), x


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tokenizer_file(tmp_path, byte_level("gpt-2", add_bos_token=True)))
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("<s>a")[:2] == tokenizer.encode("a")


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["a"]},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "never-heard-of"},
        {"tokenizer.ggml.model": "gpt2"},
        {},
    ],
)
def test_others_need_a_json_file(stories: Path, tmp_path: Path, metadata: dict[str, Any]) -> None:
    file = tokenizer_file(tmp_path, metadata)
    with pytest.raises(UnsupportedError, match=r"t\.gguf.*put the tokenizer\.json"):
        tokenizer_of(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((stories / name).read_bytes())
    assert tokenizer_of(file).encode("Once upon a time")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokens has a token twice"),
        ({"token_type": [1, 1]}, "token_type is not one number for each"),
        ({"merges": ["a b c"]}, "merges has one that is not two"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000, and there are 400"),
        ({"merges": ["zzz yyy"]}, "damaged"),
    ],
)
def test_a_damaged_vocabulary(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = tokenizer_file(tmp_path, byte_level("gpt-2", **change))
    with pytest.raises(ConfigurationError, match=rf"t\.gguf.*{said}"):
        tokenizer_of(file)


# --- a real one -------------------------------------------------------------------------------


@pytest.mark.soak
def test_smollm2_gives_the_logits_of_transformers(smollm2: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    tokenizer, here = tokenizer_of(smollm2), device("cpu", engine="torch")
    ids = np.array([tokenizer.encode("The three largest cities of France are Paris,")], np.int32)
    description = describe(read_config(smollm2))
    parameters = load_parameters(smollm2, description, here, "float32")
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
        found = to_numpy(whole_logits(description, parameters, here(ids)))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert_same_integers(found.argmax(-1), expected.argmax(-1))


@pytest.mark.soak
def test_smollm2_has_the_tokens_of_transformers(smollm2: Path) -> None:
    """But for spaces in front of digits, which its conversion joins as no SmolLM2 does."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = tokenizer_of(smollm2)
    docs = Path(__file__).parents[2] / "docs"
    pages = [page.read_text(encoding="utf-8") for page in sorted(docs.glob("*.md"))]
    lines = [line for page in pages for line in page.splitlines(keepends=True)]
    lines = [line for line in [*LINES, *lines] if not re.search(r"\s\d", line)]
    assert len(lines) > 1000
    for line in lines:
        assert ours.encode(line) == theirs(line).input_ids, line
    assert ours.encode("    8") == [*ours.encode("    "), *ours.encode("8")]
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
