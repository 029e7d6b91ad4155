"""Weights packed as each method's files have them, from codes and scales that are chosen here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file

GROUP = 32
Quantized = tuple[dict[str, Any], Any]
"""Tensors by their endings, and the numbers that they stand for."""
NF4 = np.sort(np.random.default_rng(0).normal(size=16)).astype("f4")


def grouped(weight: Any, group: int, bits: int, symmetric: bool) -> tuple[Any, ...]:
    """Return codes, scales and zeros by groups of columns, and the numbers."""
    rows, limit = len(weight), 2**bits - 1
    blocks = weight.reshape(rows, -1, group)
    scales = (np.ptp(blocks, -1) / limit + 1e-3).astype("f2").astype("f4")
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if not symmetric:
        zeros = np.clip(np.rint(-blocks.min(-1) / scales), 1, limit).astype(int)
    codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, limit).astype(int)
    numbers = (codes - zeros[..., None]).astype("f4") * scales[..., None]
    return codes.reshape(weight.shape), scales, zeros, numbers.reshape(weight.shape)


def words(codes: Any, bits: int) -> Any:
    """Pack the last axis into words of 32 bits without gaps."""
    planes = np.unpackbits(codes.astype("u1")[..., None], axis=-1, bitorder="little")[..., :bits]
    flat = planes.reshape(*codes.shape[:-1], -1)
    return np.packbits(flat, axis=-1, bitorder="little").view(np.int32)


def gptq(weight: Any, bits: int = 4, symmetric: bool = True) -> Quantized:
    codes, scales, zeros, numbers = grouped(weight, GROUP, bits, symmetric)
    return {
        ".qweight": words(codes, bits).T,
        ".qzeros": words(zeros.T - 1, bits),
        ".scales": scales.T.astype("f2"),
        ".g_idx": np.arange(weight.shape[1], dtype="i4") // GROUP,
    }, numbers


def awq(weight: Any) -> Quantized:
    codes, scales, zeros, numbers = grouped(weight, GROUP, 4, False)

    def packed(x: Any) -> Any:
        return words(x.T.reshape(x.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]], 4)[..., 0]

    scales = scales.T.astype("f2")
    return {".qweight": packed(codes), ".qzeros": packed(zeros), ".scales": scales}, numbers


def int4(weight: Any) -> Quantized:
    codes, scales, _, numbers = grouped(weight, GROUP, 4, True)
    tensors = {".weight_packed": words(codes, 4), ".weight_scale": scales}
    return tensors | {".weight_shape": np.array(weight.shape, "i8")}, numbers


def int8(weight: Any) -> Quantized:
    codes, scales, _, numbers = grouped(weight, weight.shape[1], 8, True)
    tensors = {".weight": (codes - 128).astype("i1"), ".weight_scale": scales}
    return tensors | {".input_scale": np.ones(1, "f4")}, numbers


def fp8(weight: Any) -> Quantized:
    rows, columns = weight.shape
    scales = np.abs(weight.reshape(rows // 32, 32, columns // 32, 32)).max((1, 3)) / 448
    wide = scales.repeat(32, 0).repeat(32, 1)
    codes = (weight / wide).astype(ml_dtypes.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scales}, codes.astype("f4") * wide


def int8_rows(weight: Any) -> Quantized:
    largest = np.abs(weight).max(1)
    codes = np.rint(weight / largest[:, None] * 127).astype("i1")
    tensors = {".weight": codes, ".SCB": largest, ".weight_format": np.array(0, "u1")}
    return tensors, codes * (largest[:, None] / 127)


def nf4(weight: Any) -> Quantized:
    blocks = weight.reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    codes = np.abs(blocks[..., None] / largest[:, None, None] - NF4).argmin(-1).astype("u1")
    state = {"quant_type": "nf4", "blocksize": 64, "shape": weight.shape}
    return {
        ".weight": (codes[:, 0::2] << 4 | codes[:, 1::2]).reshape(-1, 1),
        ".weight.absmax": largest,
        ".weight.quant_map": NF4,
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), "u1"),
    }, (NF4[codes] * largest[:, None]).reshape(weight.shape)


METHODS: dict[str, tuple[dict[str, Any], Callable[[Any], Quantized]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq-8-zeros": (
        {"quant_method": "gptq", "sym": False},
        lambda weight: gptq(weight, 8, symmetric=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4}, awq),
    "int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, int4),
    "int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_rows),
    "bnb-nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
}
"""The `quantization_config` of each method, and how it packs a matrix."""


def as_torch(array: Any) -> Any:
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array.copy())


def write_folders(
    folder: Path, config: dict[str, Any], state: dict[str, Any], method: str
) -> tuple[Path, Path]:
    """Write a model with its projections quantized, and one with the same numbers as floats."""
    settings, quantize = METHODS[method]
    packed, floats = {}, {}
    for name, x in state.items():
        stem = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            tensors, floats[name] = quantize(x)
            packed |= {f"{stem}{ending}": part for ending, part in tensors.items()}
        else:
            packed[name] = floats[name] = x
    for name, tensors, more in (
        ("quantized", packed, {"quantization_config": settings}),
        ("floats", floats, {}),
    ):
        path = folder / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **more}))
        save_file({n: as_torch(x) for n, x in tensors.items()}, path / "model.safetensors")
    return folder / "quantized", folder / "floats"
