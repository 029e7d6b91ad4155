"""Estimates from configs: right to the byte, and clear about what they do not know."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydevice import ConfigurationError, MemoryEstimate, estimate_inference, estimate_training
from anydevice._plan.config import LARGEST_CONFIG, read_config
from anydevice._plan.estimates import CONTEXT, WORKSPACE
from anydevice._plan.model import shape_of
from anydevice._plan.quantization import quantization_of
from tests.plan.configs import LLAMA_405B
from tests.programs import output_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}

MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}


def gptq(method: str = "gptq", **values: Any) -> dict[str, Any]:
    """A change that makes a config that of a quantized model."""
    return {"quantization_config": {"quant_method": method, **values}}


def test_the_parts_add_up_and_have_names() -> None:
    estimate = estimate_inference(LLAMA, context=128, batch=2)
    parts = ("weights", "kv_cache", "activations", "logits", "overhead")
    assert type(estimate) is MemoryEstimate
    assert estimate.total == sum(getattr(estimate, part) for part in parts)
    assert estimate.total_gib == estimate.total / 2**30
    overheads = estimate.overheads
    assert estimate.overhead == overheads.total
    assert (overheads.context, overheads.workspace) == (CONTEXT, WORKSPACE)
    assert overheads.idle > 0
    assert estimate.on_cpu().total == estimate.total - estimate.overhead
    assert estimate.exact
    assert estimate.assumed == ()
    assert (estimate.dtype, estimate.kv_dtype) == ("float16", "float16")
    plain = estimate.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["total"] == estimate.total
    assert "shape" not in plain
    assert all(part.replace("_", "-") in str(estimate) for part in (*parts, "total"))


def test_dtypes_are_the_callers_else_the_models_else_bfloat16() -> None:
    own = estimate_inference(LLAMA, context=64)
    wide = estimate_inference(LLAMA, context=64, dtype="float32", kv_dtype="float8_e4m3fn")
    assert (own.dtype, wide.dtype, wide.kv_dtype) == ("float16", "float32", "float8_e4m3fn")
    assert wide.kv_cache * 2 == own.kv_cache
    silent = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assumed = estimate_inference(silent, context=64)
    assert assumed.dtype == "bfloat16"
    assert any("bfloat16 is assumed" in sentence for sentence in assumed.assumed)
    odd = estimate_inference({**LLAMA, "torch_dtype": "strange"}, context=64)
    assert odd.dtype == "bfloat16"
    # Weights of eight bits are computed with in sixteen, and so is what is cached.
    assert estimate_inference(LLAMA, context=64, dtype="float8_e4m3fn").kv_dtype == "bfloat16"


def test_quantized_layers_are_counted_by_their_bits_and_never_exact() -> None:
    plain = estimate_inference(LLAMA, context=64)
    eight = estimate_inference(LLAMA, context=64, dtype="int8")
    four = estimate_inference(LLAMA, context=64, dtype="int4")
    assert plain.shape is not None
    layers = plain.shape.layer_weights
    outside = plain.weights - sum(plain.shape.layer_bytes)
    assert eight.weights == outside + sum(layers)
    assert four.weights == outside + sum(int(each * 4.5 / 8) for each in layers)
    assert not eight.exact
    assert not four.exact
    assert "4.5 bits a weight" in four.assumed[-1]
    assert (four.dtype, four.kv_dtype, four.kv_cache) == ("float16", "float16", plain.kv_cache)
    assert estimate_inference(plain.shape, context=64, dtype="int4") == four
    with pytest.raises(ConfigurationError, match="quantized already"):
        estimate_inference(four.shape, context=64, dtype="int8")


@pytest.mark.parametrize("dtype", ["bool", "complex64", "int16", "uint4", "int2", "float4_e2m1fn"])
def test_only_floats_are_weights_and_caches(dtype: str) -> None:
    with pytest.raises(ConfigurationError, match="float of 8 bits or more"):
        estimate_inference(LLAMA, context=64, dtype=dtype)
    with pytest.raises(ConfigurationError, match="kv_dtype must be a float"):
        estimate_inference(LLAMA, context=64, kv_dtype=dtype)
    with pytest.raises(ConfigurationError, match="kv_dtype must be a float"):
        estimate_inference(LLAMA, context=64, kv_dtype="int8")
    own = estimate_inference({**LLAMA, "torch_dtype": dtype}, context=64)
    assert own.dtype == "bfloat16"
    assert "no dtype is named" in own.assumed[0]


def test_whole_numbers_of_any_library_count() -> None:
    numbers: dict[str, Any] = {"context": np.int64(64), "batch": np.uint8(2)}
    estimate = estimate_inference(LLAMA, **numbers)
    assert estimate == estimate_inference(LLAMA, context=64, batch=2)
    assert type(estimate.context) is type(estimate.batch) is int
    assert json.dumps(estimate.to_dict())
    assert type(estimate_training(LLAMA, **numbers).context) is int
    for wrong in (5.0, True, "5", np.zeros(2)):
        with pytest.raises(ConfigurationError, match="context must be an integer"):
            estimate_inference(LLAMA, context=wrong)  # type: ignore[arg-type]


def test_a_longer_context_or_a_larger_batch_takes_more() -> None:
    small = estimate_inference(LLAMA, context=64)
    longer = estimate_inference(LLAMA, context=128)
    larger = estimate_inference(LLAMA, context=64, batch=2)
    assert small.weights == longer.weights == larger.weights
    assert longer.kv_cache == larger.kv_cache == 2 * small.kv_cache
    assert min(longer.activations, larger.activations) > small.activations


def test_a_config_is_a_file_a_folder_a_mapping_or_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_mapping = estimate_inference(LLAMA, context=64)
    by_file = estimate_inference(tmp_path / "config.json", context=64)
    by_folder = estimate_inference(str(tmp_path), context=64)
    numbers = {"layers": 3, "hidden": 64, "intermediate": 160, "heads": 4, "kv_heads": 2}
    by_numbers = estimate_inference(**numbers, vocabulary=200, context=64, dtype="float16")
    by_shape = estimate_inference(by_mapping.shape, context=64)
    totals = {each.total for each in (by_mapping, by_file, by_folder, by_numbers, by_shape)}
    assert len(totals) == 1
    assert by_folder.shape is not None
    assert by_folder.shape.name == tmp_path.name


@pytest.mark.parametrize("activation", ["silu", "gelu_new", "gelu_fast", "quick_gelu", "relu2"])
@pytest.mark.parametrize("family", ["llama", "phi", "phi3"])
def test_activation_functions_hold_what_their_formulas_take(family: str, activation: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    from tests.plan.live_bytes import LiveBytes

    entered = torch.ones(64, 32)
    with torch.no_grad(), LiveBytes([entered]) as alive:
        ACT2FN[activation](entered)
    tensors = 1 + alive.peak // entered.nbytes
    config = {**LLAMA, "model_type": family, "hidden_act": activation, "intermediate_size": 4096}
    larger = {**config, "intermediate_size": 8192}
    small, large = (estimate_inference(each, context=128) for each in (config, larger))
    expected = {"llama": max(3, tensors), "phi": tensors, "phi3": max(4, 1 + tensors)}[family]
    assert large.activations - small.activations == expected * 128 * 4096 * 2


def test_experts_and_windows_by_numbers() -> None:
    numbers = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "vocabulary": 100}
    dense = shape_of(**numbers)
    experts = shape_of(**numbers, experts=8, experts_per_token=2)
    assert experts.layer_weights[0] - dense.layer_weights[0] == 7 * 3 * 64 * 128 + 8 * 64
    assert shape_of(**numbers, window=16).windows == (16, 16)
    assert shape_of(**numbers, tied=True).head_parameters == 0
    assert shape_of(**numbers, head_size=32).kv_elements == (2 * 4 * 32,) * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden units"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of 1 or more"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be an integer of 1 or more"),
        ({"num_hidden_layers": "three"}, "must be an integer"),
        ({"num_attention_heads": 5}, "not a multiple of the heads"),
        ({"num_key_value_heads": 3}, "not a multiple of the key/value heads"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 3"),
        ({"quantization_config": [4]}, "not an object"),
        (gptq(bits="four"), "bits must be an integer of 1 or more, not 'four'"),
        (gptq(bits=True), "bits must be an integer"),
        (gptq(bits=400), "bits must be at most 16"),
        (gptq(group_size=[1]), "group_size must be an integer"),
        (gptq("awq", w_bit="x"), "bits must be an integer"),
        (gptq("hqq", nbits="x"), "bits must be an integer"),
        (gptq("exl2", bits=float("nan")), "bits cannot be nan"),
        (gptq("fp8", weight_block_size=128), "two integers, rows and columns"),
        (gptq("fp8", weight_block_size=[0, 0]), "weight_block_size must be an integer of 1"),
        (gptq("compressed-tensors", config_groups=[1]), "config_groups is not an object"),
        (gptq("compressed-tensors", config_groups={"a": 1}), "a is not an object"),
        (gptq("compressed-tensors", config_groups={"a": {"weights": 1}}), "weights is not an obj"),
        ({**MIXTURE, "decoder_sparse_step": "x"}, "decoder_sparse_step must be an integer"),
        ({**MIXTURE, "decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of 1"),
        ({**MIXTURE, "mlp_only_layers": 5}, "mlp_only_layers is not a list"),
        ({**MIXTURE, "num_experts": None}, "has no number of experts"),
        ({"sliding_window": "4096"}, "sliding_window must be an integer"),
        ({"sliding_window": -1}, "sliding_window must be an integer of 0 or more"),
        ({"layer_types": "full_attention"}, "layer_types is not a list"),
        ({"model_type": "gemma2", "sliding_window_pattern": "x"}, "window_pattern must be an int"),
        ({"model_type": "phi", "partial_rotary_factor": "half"}, "partial_rotary_factor must be"),
        ({"model_type": "phi", "partial_rotary_factor": float("inf")}, "rotary_factor must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 100000"),
        ({"hidden_size": 10**400}, "hidden_size must be at most 9223372036854775807"),
        ({"model_type": "unheard_of"}, r"'unheard_of' is not one of the \d+ that"),
        ({"model_type": None}, "it has no model_type"),
        ({"architectures": ["LlavaLlamaForCausalLM"]}, "'LlavaLlamaForCausalLM' is not one of"),
        ({"architectures": ["LlamaForSomething"]}, "class 'ForSomething' of llama is not in"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention = True"),
        ({"vocab_size": "9" * 6000}, "vocab_size must be an integer of 1 or more, not '9{39}…9+'$"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        estimate_inference({**LLAMA, **changes}, context=64)


def test_what_layers_are_called_may_be_anything() -> None:
    odd = {**LLAMA, "layer_types": [["sliding_attention"], None, {}], "sliding_window": 8}
    assert shape_of(odd).windows == (None, None, None)


def with_patterns(*patterns: str) -> MemoryEstimate:
    """The estimate of a model of one layer that leaves the modules of these patterns alone."""
    quantization = {"quant_method": "fp8", "ignore": [f"re:{pattern}" for pattern in patterns]}
    model = {**LLAMA, "num_hidden_layers": 1, "quantization_config": quantization}
    return estimate_inference(model, context=8)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*(.*)*(.*)*(.*)*!", "(?:a|a)*!", ".*.*.*.*.*x", ".*" * 200 + "!", "m?" * 40 + "!",
        ("(" + "m|" * 100 + "m)") * 4, "(m|mo)" * 30 + "!", "[z-a]", "a" * 5000, "(a", "a{9}{9}",
    ],
)  # fmt: skip
def test_a_pattern_that_could_take_long_is_not_followed(pattern: str) -> None:
    (note,) = [each for each in with_patterns(pattern).assumed if "are not followed" in each]
    assert len(note) < 200


@pytest.mark.parametrize(
    "pattern", [".*.*.*x", r"\w+.*.+.*!", ("(" + ".|" * 100 + ".)") * 3 + "!", ".?" * 20 + "!"]
)
def test_the_slowest_patterns_that_are_followed_end_soon(pattern: str) -> None:
    began = time.process_time()
    assert not any("are not followed" in each for each in with_patterns(pattern).assumed)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "pattern",
    [
        r".*q_proj$", "q_proj", r"^model", "mode$", r"model[.]layers.\d+.self_attn.(q|k)_proj",
        "m?x?odel", "mo*del.+j", r".*\.(?:up|down)_proj", "model.*?proj", r"\w+$", "z*",
        r".*mlp\.(gate|up|gate_up|down)_proj.*", r"model\.layers\.(0|1|2|58|59)\..*",
    ],
)  # fmt: skip
def test_usual_patterns_are_followed(pattern: str) -> None:
    path = "model.layers.0.self_attn.q_proj"
    found = quantization_of({"quant_method": "fp8", "ignore": [f"re:{pattern}"]}, "")
    assert found is not None
    assert not found.assumed
    assert found.skips(path) is (re.match(pattern, path) is not None)


@pytest.mark.parametrize("arguments", [{"context": 0}, {"context": -1}, {"context": 8, "batch": 0}])
def test_contexts_and_batches_are_positive(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        estimate_inference(LLAMA, **arguments)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such file or folder"):
        estimate_inference(tmp_path / "nothing", context=8)
    file = tmp_path / "config.json"
    for content, said in (
        (b"{not json", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1, 2]", "holds a list"),
        (b'{"a": 1}', "cannot be counted: it has no model_type"),
    ):
        file.write_bytes(content)
        for path in (file, tmp_path):
            with pytest.raises(ConfigurationError, match=said):
                estimate_inference(path, context=8)


def test_configs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_config(tmp_path)
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_config(loop)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(LARGEST_CONFIG + 1)
    with pytest.raises(ConfigurationError, match="it has more than"):
        read_config(large)


def test_a_model_and_numbers_do_not_go_together() -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        estimate_inference(LLAMA, context=8, layers=2)
    with pytest.raises(ConfigurationError, match="unknown dimension"):
        estimate_inference(context=8, stories=2)
    with pytest.raises(ConfigurationError, match=r"hidden.*are missing"):
        estimate_inference(context=8, layers=2)
    shape = shape_of(LLAMA)
    with pytest.raises(ConfigurationError, match="give the model itself"):
        estimate_inference(shape, context=8, dtype="float32")


def test_a_model_for_pictures_is_counted_only_with_its_files(tmp_path: Path) -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    outer = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": 9},
        "torch_dtype": "float16",
    }
    with pytest.raises(ConfigurationError, match="beside text_config it has parts"):
        estimate_inference(outer, context=64)
    (tmp_path / "config.json").write_text(json.dumps(outer))
    picture, words = np.zeros((30, 9), np.float16), np.zeros((200, 64), np.float16)
    tensors = {"vision_tower.patches": picture, "language_model.embed_tokens.weight": words}
    save_file(tensors, tmp_path / "model.safetensors")
    estimate = estimate_inference(tmp_path, context=64)
    assert estimate.weights == picture.nbytes + words.nbytes
    assert estimate.kv_cache == estimate_inference(LLAMA, context=64).kv_cache
    assert not estimate.exact
    assert any("only the text part (text_config)" in each for each in estimate.assumed)


def test_fp8_is_float8_also_of_a_model_that_is_so_already() -> None:
    name = "float8_e4m3fn"
    by_name = estimate_inference(LLAMA, context=64, dtype="fp8", kv_dtype="fp8")
    assert by_name == estimate_inference(LLAMA, context=64, dtype=name, kv_dtype=name)
    assert (by_name.dtype, by_name.kv_dtype) == (name, name)
    halved = estimate_inference(LLAMA, context=64, dtype="bfloat16").weights / 2
    assert by_name.weights == pytest.approx(halved, rel=0.01)
    quantized = {**LLAMA, **gptq("fp8", weight_block_size=[32, 32])}
    assert estimate_inference(quantized, context=64, dtype="fp8") == estimate_inference(
        quantized, context=64
    )
    with pytest.raises(ConfigurationError, match="quantized already"):
        estimate_inference({**LLAMA, **gptq(bits=4)}, context=64, dtype="fp8")


def test_a_context_is_the_usual_or_the_longest_and_one_beyond_is_noted() -> None:
    assert estimate_inference(LLAMA, context=512).assumed == ()
    assert "beyond the model's longest, 512" in estimate_inference(LLAMA, context=513).assumed[-1]
    assert estimate_inference(LLAMA).context == 512
    assert estimate_inference({**LLAMA, "max_position_embeddings": 131072}).context == 4096


def test_nothing_but_the_standard_library_is_needed_for_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    program = (
        "import sys; from anydevice import estimate_inference as e\n"
        f"estimate = e({str(tmp_path)!r}, context=8192, dtype='bfloat16')\n"
        "print(estimate.parameters, [m for m in ('numpy', 'torch', 'jax', 'mlx')"
        " if m in sys.modules])"
    )
    assert output_of("-c", program).strip() == "405853388800 []"


def test_a_prompt_that_is_read_in_pieces_takes_the_memory_of_one() -> None:
    numbers: dict[str, Any] = {"layers": 4, "hidden": 1024, "intermediate": 4096}
    numbers |= {"heads": 8, "vocabulary": 1000}
    whole = estimate_inference(**numbers, context=8192)
    pieces = estimate_inference(**numbers, context=8192, prefill=512)
    short = estimate_inference(**numbers, context=512)
    assert (pieces.weights, pieces.kv_cache) == (whole.weights, whole.kv_cache)
    assert pieces.activations < whole.activations / 8
    assert short.activations <= pieces.activations <= 1.2 * short.activations
    assert estimate_inference(**numbers, context=64, prefill=512).total == (
        estimate_inference(**numbers, context=64).total
    )
