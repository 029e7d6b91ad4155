"""Quantized weights of folders, compared with what the packages of each method read of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from anydevice._core.files import PlainFile
from anydevice._core.quantized import QuantizedWeight
from anydevice._formats.quantized import dequantize
from anydevice._formats.quantized_folder import READERS, QuantizedTensor, quantized_tensors
from anydevice._formats.safetensors import read_header
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError
from tests.comparing import COPIED, assert_close, assert_same_bits

RECORDED = Path(__file__).parents[1] / "recorded" / "quantized"
FILES = sorted(RECORDED.glob("*.safetensors"))


def read(path: Path, **changes: Any) -> QuantizedTensor:
    """Return the quantized tensor of a recorded file, with other settings, after all checks."""
    header = read_header(path)
    settings = json.loads(header.metadata["quantization_config"]) | changes
    tensors = quantized_tensors(header.entries, settings["quant_method"], settings, path)
    (tensor,) = [each for each in tensors.values() if isinstance(each, QuantizedTensor)]
    with PlainFile(path) as file:
        tensor.check(file)
    return tensor


def unpack(tensor: QuantizedTensor) -> QuantizedWeight:
    with PlainFile(tensor.path) as file:
        return tensor.unpack(file)


def read_floats(tensor: QuantizedTensor) -> Any:
    numbers = np.empty(tensor.shape, np.float32)
    with PlainFile(tensor.path) as file:
        tensor.read(file, numbers.reshape(-1), 0)
    return numbers


def numbers_of(path: Path) -> Any:
    """Return the numbers that the method's own package reads."""
    with safe_open(path, "np") as file:
        return file.get_tensor("numbers")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_are_those_of_the_package_that_wrote_them(path: Path) -> None:
    weight = unpack(read(path))
    assert_close(dequantize(weight), numbers_of(path), terms=4)
    columns, sizes = weight.shape[-1], {name: x.shape[-1] for name, x in weight.arrays.items()}
    assert sizes["codes"] + sizes.get("high", 0) == columns * weight.bits / 8
    assert sizes["scales"] == sizes.get("minimums", sizes["scales"]) == columns / weight.block


def test_every_method_was_recorded() -> None:
    with_float8 = {"fbgemm_fp8"}  # FBGEMM needs a card; its tensors are those of compressed-tensors
    assert {read(path).method for path in FILES} == READERS.keys() - with_float8


def test_format_2_of_gptq_stores_zeros_as_they_are(tmp_path: Path) -> None:
    path = change(tmp_path, "gptq-4-zeros", lambda t: t["layer.qzeros"].__iadd__(0x11111111))
    weight = unpack(read(path, checkpoint_format="gptq_v2"))
    other = unpack(read(RECORDED / "gptq-4-zeros.safetensors"))
    assert_same_bits(dequantize(weight), dequantize(other), because=COPIED)


def test_one_expert_is_read_as_a_matrix() -> None:
    stack = read(RECORDED / "mxfp4.safetensors")
    assert_same_bits(read_floats(stack.row(1)), read_floats(stack)[1], because=COPIED)


def test_columns_out_of_order_are_refused_and_widened(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(128)
    groups = (order // 32).astype("int32")
    path = change(tmp_path, "gptq-4", lambda t: t.update({"layer.g_idx": groups}))
    with pytest.raises(UnsupportedError, match=r"desc_act.*weights='float'"):
        read(path)
    header = read_header(path)
    settings = json.loads(header.metadata["quantization_config"])
    tensor = quantized_tensors(header.entries, "gptq", settings, path)["layer.weight"]
    assert isinstance(tensor, QuantizedTensor)
    weight = unpack(read(RECORDED / "gptq-4.safetensors"))
    scales = weight.scales.astype("f4")
    codes = numbers_of(RECORDED / "gptq-4.safetensors") / np.repeat(scales, 32, -1)
    assert_close(read_floats(tensor), np.round(codes) * scales[:, groups], terms=2)


def change(folder: Path, name: str, alter: Callable[[dict[str, Any]], object]) -> Path:
    """Write a recorded file anew, with other tensors."""
    tensors = load_file(RECORDED / f"{name}.safetensors")
    alter(tensors)
    with safe_open(RECORDED / f"{name}.safetensors", "np") as file:
        metadata = file.metadata()
    save_file(tensors, folder / f"{name}.safetensors", metadata)
    return folder / f"{name}.safetensors"


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def without_groups(tensors: dict[str, Any]) -> None:
    tensors["layer.weight_scale"] = tensors["layer.weight_scale"].reshape(-1, 1)[:, :0].copy()


def shorter(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].copy()})


def filled(name: str, value: float) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors[name].reshape(-1).__setitem__(3, value)


@pytest.mark.parametrize(
    ("file", "alter", "words"),
    [
        ("gptq-4", without("layer.scales"), "layer.scales' is missing"),
        ("gptq-4", shorter("layer.scales"), "layer.scales|layer.qzeros"),
        ("gptq-4", shorter("layer.qweight"), r"layer.g_idx.*\(120\)"),
        ("awq", shorter("layer.qweight"), "layer.scales.*4 groups do not divide the 127 col"),
        ("gptq-4", filled("layer.scales", np.nan), "layer.scales.*NaN or infinite"),
        ("gptq-4", filled("layer.qzeros", 0), "layer.qzeros.*sym"),
        ("gptq-3", shorter("layer.qzeros"), "layer.qzeros"),
        ("awq", shorter("layer.qzeros"), "layer.qzeros"),
        ("awq", filled("layer.scales", np.inf), "layer.scales.*NaN or infinite"),
        ("int4-group", without("layer.weight_scale"), "layer.weight_scale' is missing"),
        ("int4-group", shorter("layer.weight_packed"), "layer.weight_packed"),
        ("int4-group", filled("layer.weight_scale", -np.inf), "weight_scale.*NaN or infinite"),
        ("int4-zeros", shorter("layer.weight_zero_point"), "layer.weight_zero_point"),
        ("int8-channel", shorter("layer.weight_scale"), "layer.weight_scale"),
        ("int8-channel", without_groups, "layer.weight_scale.*0 groups do not divide"),
        ("mxfp4", shorter("layer.down_proj_scales"), "layer.down_proj_scales"),
        ("mxfp4", filled("layer.down_proj_scales", 255), "layer.down_proj_scales.*NaN"),
        ("bnb-int8", filled("layer.SCB", np.nan), "layer.SCB.*NaN or infinite"),
        ("bnb-nf4", shorter("layer.weight"), "layer.weight.*32 x 128"),
        ("bnb-nf4", shorter("layer.weight.absmax"), "layer.weight.absmax"),
        ("bnb-nf4", filled("layer.weight.quant_state.bitsandbytes__nf4", 7), "not the state"),
        ("bnb-nf4-nested", filled("layer.weight.nested_quant_map", np.nan), "quant_map.*NaN"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_named(tmp_path: Path, file: str, alter: Any, words: str) -> None:
    path = change(tmp_path, file, alter)
    with pytest.raises(TransferError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("gptq-4", {"checkpoint_format": "marlin"}, "GPTQ weights in the format 'marlin'"),
        ("awq", {"version": "gemv"}, "only version 'gemm'"),
        ("int4-group", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("int4-group", {"transform_config": {"a": 1}}, "transforms"),
        ("int4-group", {"sparsity_config": "2:4"}, "sparse weights"),
        ("int4-group", {"quant_method": "aqlm"}, "'aqlm' are not read; known are gptq"),
    ],
)
def test_what_is_not_read_is_refused_with_the_way_out(file: str, changes: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        read(RECORDED / f"{file}.safetensors", **changes)
    assert "save the model in floats" in str(caught.value)


def test_sizes_of_blocks_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="two integers"):
        read(RECORDED / "fp8.safetensors", weight_block_size=[16])
    with pytest.raises(TransferError, match="weight_scale_inv"):
        read(RECORDED / "fp8.safetensors", weight_block_size=[128, 128])
