"""Estimates of what is there as tensors, in trees and in files, and of quantized weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from anydevice import ConfigurationError, TransferError, estimate_inference
from anydevice._core.files import PlainFile
from anydevice._core.quantized import BLOCK_TYPES
from anydevice._formats import quantize
from anydevice._formats.quantized import unpack_blocks
from anydevice._formats.quantized_folder import READERS, QuantizedTensor, quantized_tensors
from anydevice._formats.safetensors import read_header
from anydevice._plan.model import shape_of
from anydevice._plan.quantization import _FORMATS, BLOCK_BITS, SCHEMES, quantization_of
from tests.plan.test_estimates import LLAMA

MATRICES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (160, 64),
    "mlp.up_proj": (160, 64),
    "mlp.down_proj": (64, 160),
}


def tensors(dtype: torch.dtype = torch.float16, layers: int = 3) -> dict[str, torch.Tensor]:
    found = {
        f"model.layers.{number}.{name}.weight": torch.zeros(sizes, dtype=dtype)
        for number in range(layers)
        for name, sizes in MATRICES.items()
    }
    found["model.embed_tokens.weight"] = torch.zeros(200, 64, dtype=dtype)
    found["lm_head.weight"] = torch.zeros(200, 64, dtype=dtype)
    found["model.norm.weight"] = torch.zeros(64, dtype=dtype)
    return found


def test_safetensors_files_are_counted_from_their_headers(tmp_path: Path) -> None:
    held = tensors()
    save_file(held, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        estimate = estimate_inference(path, context=32)
        assert estimate.weights == sum(each.nbytes for each in held.values())
        assert estimate.dtype == "float16"
        assert estimate.kv_cache == 3 * 32 * 64 * 2
        assert estimate.activations > 0
        assert not estimate.exact
    shape = shape_of(tmp_path, dtype="float32")
    assert shape.weight_bytes == 2 * sum(each.nbytes for each in held.values())
    assert (shape.layers, shape.hidden, shape.intermediate, shape.vocabulary) == (3, 64, 160, 200)
    assert shape.head_parameters == shape.embedding_parameters == 200 * 64
    assert shape.other_parameters == 64


def test_files_beside_a_config_tell_what_the_config_cannot(tmp_path: Path) -> None:
    held = {**tensors(), "model.extra.weight": torch.zeros(100, dtype=torch.float16)}
    save_file(held, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "model_type": "unheard_of"}))
    estimate = estimate_inference(tmp_path, context=32)
    assert estimate.weights == sum(each.nbytes for each in held.values())
    assert estimate.kv_cache == 3 * 32 * 64 * 2
    assert "weights are those of the tensors" in estimate.assumed[0]
    assert "architecture 'unheard_of' is not one of" in estimate.assumed[-1]
    assert not estimate.exact
    config.write_text(json.dumps({**LLAMA, "architectures": ["MyOwnForCausalLM"]}))
    assert estimate_inference(tmp_path, context=32).weights == estimate.weights
    config.write_text(json.dumps({**LLAMA, "hidden_size": "64"}))  # wrong, and not unknown
    with pytest.raises(ConfigurationError, match="hidden_size must be an integer"):
        estimate_inference(tmp_path, context=32)
    config.write_text(json.dumps(LLAMA))  # known exactly: what transformers will allocate
    assert estimate_inference(tmp_path, context=32).exact
    quantized = {**LLAMA, "quantization_config": {"quant_method": "hqq", "bits": 4}}
    config.write_text(json.dumps(quantized))
    assert estimate_inference(tmp_path, context=32).weights == estimate.weights


def test_files_that_are_not_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"neither a config\.json nor a \.safetensors"):
        estimate_inference(tmp_path, context=8)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(TransferError, match="at least 8"):
        estimate_inference(tmp_path, context=8)


def test_trees_of_any_library_are_counted_each_memory_once() -> None:
    array = np.zeros((10, 10), np.float32)
    tree = {"a": array, "again": array, "part": array[2:4], "other": [jnp.zeros(8, jnp.bfloat16)]}
    estimate = estimate_inference(tree, context=8)
    assert estimate.weights == 400 + 16
    assert estimate.kv_cache == estimate.activations == 0
    assert any("no decoder was found" in sentence for sentence in estimate.assumed)
    assert estimate_inference(tree, context=8, dtype="float16").weights == 200 + 16


def test_modules_without_a_config_are_counted() -> None:
    linear = torch.nn.Linear(16, 16, dtype=torch.float64)
    model = torch.nn.Sequential(linear, torch.nn.ReLU(), linear)
    assert estimate_inference(model, context=8).weights == (16 * 16 + 16) * 8
    with torch.device("meta"):
        large = torch.nn.Linear(100_000, 100_000, bias=False, dtype=torch.bfloat16)
    assert estimate_inference(large, context=8).weights == 2 * 10**10

    class Odd:
        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "resnet"}

    model.config = Odd()
    estimate = estimate_inference(model, context=8)
    assert estimate.weights == (16 * 16 + 16) * 8
    assert estimate.assumed[-1] == "its config is not that of a model in the tables"


def test_the_names_of_gpt2_are_known() -> None:
    names = {"wte.weight": (100, 64), "h.0.attn.c_attn.weight": (64, 192)}
    names |= {"h.0.attn.c_proj.weight": (64, 64), "h.0.mlp.c_fc.weight": (64, 256)}
    names |= {"h.0.mlp.c_proj.weight": (256, 64)}
    shape = shape_of({name: np.zeros(sizes, "float16") for name, sizes in names.items()})
    assert (shape.layers, shape.hidden, shape.intermediate) == (1, 64, 256)
    assert shape.kv_elements == (2 * 64,)
    assert estimate_inference(shape, context=8).activations > 0


def test_keys_shared_by_heads_in_one_matrix_are_found() -> None:
    names = {"embed_tokens.weight": (100, 64), "layers.0.self_attn.qkv_proj.weight": (64 + 32, 64)}
    names |= {"layers.0.mlp.down_proj.weight": (64, 160)}
    tree = {name: np.zeros(sizes, "float16") for name, sizes in names.items()}
    assert shape_of(tree).kv_elements == (32,)
    del tree["embed_tokens.weight"]  # without the hidden size, nothing tells keys from queries
    assert shape_of(tree).kv_elements == (0,)


def test_a_tree_without_layers_has_weights_alone() -> None:
    names = {"embed_tokens.weight": (100, 64), "mlp.down_proj.weight": (64, 160)}
    tree = {name: np.zeros(sizes, "float16") for name, sizes in names.items()}
    estimate = estimate_inference(tree, context=8)
    assert estimate.weights == 2 * (100 * 64 + 64 * 160)
    assert (estimate.activations, estimate.kv_cache) == (0, 0)
    assert any("no activations are counted" in sentence for sentence in estimate.assumed)


def test_whole_numbers_keep_their_bytes() -> None:
    tree = {"packed": np.zeros(100, np.int32), "scale": np.zeros(10, np.float32)}
    assert estimate_inference(tree, context=8, dtype="float16").weights == 400 + 20
    only_whole = estimate_inference({"packed": np.zeros(100, np.int32)}, context=8)
    assert only_whole.dtype == "bfloat16"


def test_what_holds_no_array_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="holds no array"):
        estimate_inference([1, "two"], context=8)


def bytes_of(values: Mapping[str, Any], rows: int = 256, columns: int = 1024) -> int:
    found = quantization_of(values, "test")
    assert found is not None
    return found.matrix_bytes(rows, columns, 2)


RECORDED = sorted((Path(__file__).parents[1] / "recorded" / "quantized").glob("*.safetensors"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_each_format_is_counted_as_its_weights_are_kept(path: Path) -> None:
    header = read_header(path)
    settings = json.loads(header.metadata["quantization_config"])
    tensors = quantized_tensors(header.entries, settings["quant_method"], settings, path)
    with PlainFile(path) as file:
        (weight,) = [t.unpack(file) for t in tensors.values() if isinstance(t, QuantizedTensor)]
    sizes = {name: array.nbytes for name, array in weight.arrays.items()}
    if settings["quant_method"] == "compressed-tensors":
        sizes["scales"] //= 2  # models of 16 bits have scales of 16 bits
    *stack, rows, columns = weight.shape
    assert bytes_of(settings, rows, columns) * prod(stack) == sum(sizes.values())


def test_formats_that_are_not_read_are_counted_by_their_bits() -> None:
    size = 256 * 1024
    assert bytes_of({"quant_method": "strange"}) == size + size // 64 * 2
    assert bytes_of({"quant_method": "exl2", "bits": 4.5}) == size * 9 // 16 + size // 64 * 2
    assert bytes_of({"made_by": "hand"}) == size + size // 64 * 2
    assert bytes_of({"quant_method": "compressed-tensors"}) == size + 256 * 2
    assert quantization_of(None, "test") is None
    weights = {"num_bits": 4, "group_size": 128}
    two = {"config_groups": {"one": {"weights": weights}, "two": {"weights": weights}}}
    found = quantization_of({"quant_method": "compressed-tensors", **two}, "test")
    assert found is not None
    assert "first group" in found.assumed[0]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_of_gguf_are_counted_as_they_are_kept(kind: str) -> None:
    block = BLOCK_TYPES[kind]
    weight = unpack_blocks(kind, np.zeros(block.bytes, np.uint8), (1, block.columns))
    kept = sum(array.nbytes for array in weight.arrays.values())
    assert kept * 8 == BLOCK_BITS[kind] * block.columns
    assert BLOCK_BITS.keys() == BLOCK_TYPES.keys()
    assert set(SCHEMES) == set(quantize.SCHEMES)


def test_every_format_that_is_read_is_counted() -> None:
    assert READERS.keys() == _FORMATS.keys()


def test_modules_that_are_left_alone_are_counted_plain() -> None:
    def weights(**more: Any) -> int:
        quantization = {"quant_method": "fp8", **more}
        return estimate_inference({**LLAMA, "quantization_config": quantization}, context=8).weights

    plain, all_of_them = estimate_inference(LLAMA, context=8).weights, weights()
    assert all_of_them < plain
    down = 64 * 160
    one = weights(modules_to_not_convert=["model.layers.1.mlp.down_proj"])
    assert one - all_of_them == down * 2 - (down + 64 * 5 * 4)
    every = weights(ignore=["re:.*down_proj$", "re:(", "lm_head"])
    listed = weights(ignore=[r"re:model\.layers\.(?:0|1)\.mlp\.[duwno]+_proj"])
    assert listed - all_of_them == 2 * (one - all_of_them)
    assert weights(ignore=["re:^(a|b|self_attn)?.?"]) == all_of_them, "it is not followed"
    assert every - all_of_them == 3 * (one - all_of_them)
    assert weights(ignore=["model.layers.*.mlp.down_proj"]) == every
    by_name = weights(modules_to_not_convert=["down_proj"])
    assert by_name == every
    estimate = estimate_inference(
        {**LLAMA, "quantization_config": {"quant_method": "fp8"}}, context=8
    )
    assert not estimate.exact
    assert any("as fp8 keeps them" in sentence for sentence in estimate.assumed)
