"""Record quantized weights and their numbers, as the packages of each method write and read them.

`python tests/formats/record_quantized.py tests/recorded/quantized` needs auto-gptq 0.7.1,
auto-round 0.16, compressed-tensors 0.20, bitsandbytes 0.50 and transformers 5.23, on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROWS, COLUMNS, GROUP = 32, 128, 32
GENERATOR = torch.Generator().manual_seed(29)
WEIGHT = torch.randn(ROWS, COLUMNS, generator=GENERATOR)
WEIGHT += torch.randn(ROWS, 1, generator=GENERATOR)  # so that zero points differ


def module_of(package: str, file: str) -> Any:
    """Return a module of a package whose `__init__` does not load with today's transformers."""
    folder = importlib.util.find_spec(package).submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(file.replace("/", "."), f"{folder}/{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scales_of(bits: int, symmetric: bool, group: int) -> tuple[Any, Any]:
    """Return scales and zero points (rows, groups) for the weight."""
    blocks, limit = WEIGHT.view(ROWS, -1, group), 2**bits - 1
    if symmetric:
        scales = 2 * blocks.abs().amax(-1) / limit
        return scales.half().float(), torch.full_like(scales, (limit + 1) // 2)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = ((high - low) / limit).half().float()
    return scales, torch.round(-low / scales).clamp(1, limit)  # AutoGPTQ cannot store 0


def gptq(bits: int, symmetric: bool, group: int = GROUP) -> tuple[Any, ...]:
    """Pack by AutoGPTQ; it multiplies by the identity to unpack."""
    kind = module_of("auto_gptq", "nn_modules/qlinear/qlinear_cuda_old").QuantLinear
    layer = kind(bits, group, COLUMNS, ROWS, bias=False, weight_dtype=torch.float32)
    scales, zeros = scales_of(bits, symmetric, group)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = WEIGHT.clone()
    layer.pack(linear, scales, zeros.clone(), None)
    numbers = layer(torch.eye(COLUMNS)).T
    tensors = dict(layer.state_dict())
    tensors["scales"] = tensors["scales"].half()
    settings = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return "gptq", settings, tensors, numbers


def awq() -> tuple[Any, ...]:
    """Pack and unpack by auto-round's copy of AutoAWQ."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm

    scales, zeros = scales_of(4, False, GROUP)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = WEIGHT.clone()
    layer = WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous(), device="cpu"
    )
    tensors = layer.state_dict()
    wide = tensors["scales"].float()
    numbers = dequantize_gemm(tensors["qweight"], tensors["qzeros"], wide, 4, GROUP).T
    settings = {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return "awq", settings, tensors, numbers


def compressed(form: str, weights: dict[str, Any]) -> tuple[Any, ...]:
    """Compress and decompress by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    strategy, group = weights["strategy"], weights.get("group_size", COLUMNS)
    blocks = WEIGHT.view(1, -1) if strategy == "tensor" else WEIGHT.view(ROWS, -1, group)
    if strategy == "block":
        down, across = weights["block_structure"]
        blocks = WEIGHT.view(ROWS // down, down, COLUMNS // across, across).transpose(1, 2)
        blocks = blocks.flatten(2)
    scales, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    state = {"weight": WEIGHT.clone(), "weight_scale": scales, "weight_zero_point": zeros}
    kind = BaseCompressor.get_value_from_registry(form)
    tensors = kind.compress(state, scheme)
    numbers = kind.decompress(tensors, scheme)["weight"]
    settings = {"format": form, "config_groups": {"group_0": {"weights": weights}}}
    return "compressed-tensors", settings, tensors, numbers


def fp8() -> tuple[Any, ...]:
    """Quantize in blocks of 16 x 64; transformers unpacks."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    blocks = WEIGHT.view(2, 16, 2, 64)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    numbers = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    settings = {"weight_block_size": [16, 64], "activation_scheme": "dynamic"}
    return "fp8", settings, {"weight": codes, "weight_scale_inv": scales}, numbers


def mxfp4() -> tuple[Any, ...]:
    """Take random codes and exponents of 2 experts; transformers unpacks, and transposes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shape = (2, ROWS, COLUMNS // 32, 16)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=GENERATOR)
    scales = torch.randint(110, 140, shape[:3], dtype=torch.uint8, generator=GENERATOR)
    numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return "mxfp4", {}, {"down_proj_blocks": blocks, "down_proj_scales": scales}, numbers


def bits_and_bytes(kind: str, nested: bool) -> tuple[Any, ...]:
    """Quantize and dequantize by bitsandbytes."""
    from bitsandbytes import functional

    if kind == "int8":
        codes, largest, _ = functional.int8_vectorwise_quant(WEIGHT.half())
        numbers = functional.int8_vectorwise_dequant(codes, largest)
        form = torch.tensor(0, dtype=torch.uint8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": form}
        return "bitsandbytes", {"load_in_8bit": True}, tensors, numbers
    codes, state = functional.quantize_4bit(
        WEIGHT, quant_type=kind, blocksize=64, compress_statistics=nested
    )
    packed = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    numbers = functional.dequantize_4bit(codes, state)
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return "bitsandbytes", settings, {"weight": codes, **packed}, numbers


def main(folder: Path) -> None:
    """Write one file for each way to quantize."""
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
    fp = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    recordings = {
        **{f"gptq-{bits}": gptq(bits, True) for bits in (2, 3, 4, 8)},
        "gptq-4-zeros": gptq(4, False),
        "gptq-3-zeros": gptq(3, False, COLUMNS),
        "awq": awq(),
        "int4-group": compressed("pack-quantized", int4),
        "int4-zeros": compressed("pack-quantized", int4 | {"symmetric": False}),
        "int3-channel": compressed("pack-quantized", int8 | {"num_bits": 3}),
        "int8-channel": compressed("int-quantized", int8),
        "int8-tensor-zeros": compressed(
            "int-quantized", int8 | {"strategy": "tensor", "symmetric": False}
        ),
        "fp8-tensor": compressed("float-quantized", fp),
        "fp8-channel": compressed("float-quantized", fp | {"strategy": "channel"}),
        "fp8-block": compressed(
            "float-quantized", fp | {"strategy": "block", "block_structure": [16, 64]}
        ),
        "fp8": fp8(),
        "mxfp4": mxfp4(),
        "bnb-int8": bits_and_bytes("int8", False),
        "bnb-nf4": bits_and_bytes("nf4", False),
        "bnb-nf4-nested": bits_and_bytes("nf4", True),
        "bnb-fp4-nested": bits_and_bytes("fp4", True),
    }
    for name, (method, settings, tensors, numbers) in recordings.items():
        stored = {f"layer.{key}": part.contiguous() for key, part in tensors.items()}
        stored["numbers"] = numbers.float().contiguous()
        metadata = {"quantization_config": json.dumps(settings | {"quant_method": method})}
        save_file(stored, folder / f"{name}.safetensors", metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
