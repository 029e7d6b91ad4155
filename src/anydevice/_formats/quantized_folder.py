"""Quantized weights of safetensors folders, as the packages of each method write them.

`READERS` has a row for each method of a `quantization_config`. Layouts are checked from the headers
alone; `QuantizedTensor.check` reads scales, and `read` everything. Codes stay as they are stored,
only their order changes to that of `QuantizedWeight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from anydevice._core.checks import integer, number
from anydevice._core.dtypes import DTYPES
from anydevice._core.files import PlainFile, parse_json
from anydevice._core.quantized import FP4_TABLE, QuantizedWeight
from anydevice._core.record import Record, replace
from anydevice._core.text import shortened
from anydevice._formats.quantized import (
    FLOAT8_TABLES,
    dequantize,
    pack_codes,
    power_scales,
    unpack_stream,
)
from anydevice._formats.safetensors import SafeTensor, StoredTensor
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

Arrays = Mapping[str, Any]
"""The arrays of a weight's tensors, by the names of their roles."""

_UNPACK = "load it with weights='float', which unpacks it, if there is memory for that"
_AGAIN = "the file is damaged, or of another model than its config: download both again"


class CodeLayout(Record):
    """How a weight is quantized, with functions that return its codes and its scales."""

    shape: tuple[int, ...]
    bits: int
    block: int
    codes: Callable[[HostArray], dict[str, HostArray]]
    scales: Callable[[Arrays], dict[str, HostArray]]
    zero: int = 0
    table: tuple[float, ...] | None = None


class QuantizedTensor(StoredTensor):
    """A quantized weight of a folder; `parts` are its tensors by role, its codes the first."""

    method: str
    parts: Mapping[str, SafeTensor]
    layout: CodeLayout

    @property
    def whole(self) -> bool:
        """True: rows of some methods are spread over the whole tensor."""
        return True

    @property
    def scheme(self) -> str:
        """A text that is equal for weights whose rows can be joined."""
        layout = self.layout
        roles = {role: str(part.dtype) for role, part in self.parts.items() if role != "shape"}
        return repr((self.method, layout.bits, layout.block, layout.zero, layout.table, roles))

    def row(self, number: int) -> QuantizedTensor:
        """Return one matrix of a stack as a tensor of its own."""
        parts = {role: part.row(number) for role, part in self.parts.items()}
        size = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], parts=parts, nbytes=size)

    def check(self, file: PlainFile, *, widen: bool = False) -> None:
        """Read all but the codes, and raise for scales that are not finite or not supported."""
        self._scales(file, widen)

    def read(self, file: PlainFile, target: Any, first: int) -> None:
        numbers = dequantize(self.unpack(file, widen=True)).reshape(-1)
        self.convert(numbers[first : first + target.size], target)

    def blocks(self, file: PlainFile, first: int, shape: tuple[int, int]) -> QuantizedWeight:
        """Return the whole weight."""
        return self.unpack(file)

    def unpack(self, file: PlainFile, *, widen: bool = False) -> QuantizedWeight:
        """Read the weight into host memory; `file` is the one with its codes.

        Raises `UnsupportedError` for columns out of the order of their groups; with `widen`, each
        column then has a scale of its own.
        """
        fields, layout = self._scales(file, widen), self.layout
        return QuantizedWeight(
            scheme=self.method,
            shape=self.shape,
            bits=layout.bits,
            block=fields.pop("block", layout.block),
            zero=layout.zero,
            table=layout.table,
            **layout.codes(_array(self.parts["codes"], file)),
            **fields,
        )

    def _scales(self, file: PlainFile, widen: bool) -> dict[str, Any]:
        arrays = {}
        for role, part in list(self.parts.items())[1:]:
            arrays[role] = _array(part, file)
            if part.dtype.kind == "float" and not np.isfinite(arrays[role]).all():
                raise part.error(f"it holds NaN or infinite numbers; {_AGAIN}")
        fields, groups = self.layout.scales(arrays), arrays.get("g_idx")
        columns = self.shape[-1]
        if groups is None or np.array_equal(groups, np.arange(columns) // self.layout.block):
            return fields
        if not widen:
            raise UnsupportedError(
                f"{self.path}: the columns of {shortened(self.name)!r} are not in the order of "
                f"their groups (desc_act, actorder), which no product here takes; {_UNPACK}"
            )
        if groups.min() < 0 or groups.max() >= columns // self.layout.block:
            raise self.parts["g_idx"].error(f"it names groups that do not exist; {_AGAIN}")
        return {name: field[:, groups] for name, field in fields.items()} | {"block": 1}


def _array(tensor: SafeTensor, file: PlainFile | None = None) -> Any:
    """Read a tensor, from an opened file if it is in that one."""
    if file is None or tensor.path != file.path:
        with PlainFile(tensor.path, tensor.stamp) as own:
            return _array(tensor, own)
    array = np.empty(tensor.shape, tensor.dtype.numpy())
    tensor.read(file, array.reshape(-1), 0)
    return array


class ModuleTensors(Record):
    """The tensors of one weight by role, with the values of the `quantization_config`."""

    name: str
    tensors: Mapping[str, SafeTensor]
    settings: Mapping[str, Any]

    def __getitem__(self, role: str) -> SafeTensor:
        return self.tensors[role]

    def __contains__(self, role: str) -> bool:
        return role in self.tensors

    def expect(self, role: str, shape: Sequence[int | None], *dtypes: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raise `TransferError` for another shape or dtype.

        A length of None allows any but 0, and the dtype "float" every float of 16 bits or more.
        """
        tensor = self[role]
        name = tensor.dtype.name
        if tensor.dtype.kind == "float" and tensor.dtype.bits > 8 and "float" in dtypes:
            name = "float"
        same = len(shape) == len(tensor.shape) and all(
            length == wanted if wanted is not None else length
            for length, wanted in zip(tensor.shape, shape, strict=True)
        )
        if not same or name not in dtypes:
            wanted = ", ".join("…" if length is None else str(length) for length in shape)
            raise tensor.error(
                f"it is {tensor.dtype} of shape {shortened(str(tensor.shape))}, where {self.name} "
                f"needs {' or '.join(dtypes)} of shape ({wanted}); {_AGAIN}"
            )
        return tensor.shape

    def block(self, columns: int, blocks: int) -> int:
        """Return the columns of a block; raise if they are not the same for all."""
        if not blocks or columns % blocks:
            raise self["scales"].error(
                f"its {blocks} groups do not divide the {columns} columns of the weight; {_AGAIN}"
            )
        return columns // blocks

    def bits(self, words: int, codes: int, role: str, known: Sequence[int]) -> int:
        """Return the bits of a code if `codes` of them fill `words` of 32 bits; else raise."""
        bits = words * 32 // codes
        if bits not in known or words != -(-codes * bits // 32):
            listed = ", ".join(map(str, known))
            raise self[role].error(
                f"{words} words of 32 bits for {codes} codes are not of {listed} bits; {_AGAIN}"
            )
        return bits

    def block_sizes(self) -> tuple[int, int]:
        """Return the rows and columns of a block that has one scale."""
        sizes = self.settings.get("weight_block_size") or (128, 128)
        for scheme in _schemes(self.settings):
            sizes = scheme.get("block_structure") or sizes
        if not isinstance(sizes, list | tuple) or len(sizes) != 2:
            raise ConfigurationError(f"{self.name}: the sizes of blocks are two integers")
        rows, columns = (integer("a size of blocks", size, 1) for size in sizes)
        return rows, columns

    def refuse(self, problem: str) -> NoReturn:
        """Raise `UnsupportedError` for a variant of the method."""
        raise UnsupportedError(f"{next(iter(self.tensors.values())).path}: {problem}; {_CONVERT}")


_CONVERT = (
    "let the package that wrote it save the model in floats (such as transformers' "
    "model.dequantize()), or get it as a GGUF file"
)


class Reader(Record):
    """The names of a quantized weight's tensors, and the function that checks them.

    The name of the tensor with the codes, of one of `dtypes`, ends in `main`, and that of the
    weight in `stem` instead. `parts` are the ends of the other names, several for a role if
    packages differ; the role of an optional tensor ends in "?".
    """

    main: str
    dtypes: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    layout: Callable[[ModuleTensors], CodeLayout]
    stem: str = ".weight"


def check_method(method: str, source: object) -> None:
    """Raise `UnsupportedError` for a method that is not read."""
    if method not in READERS:
        raise UnsupportedError(
            f"{source}: weights quantized by {shortened(repr(method))} are not read; known are "
            f"{', '.join(READERS)}: {_CONVERT}"
        )


def quantized_tensors(
    stored: Mapping[str, SafeTensor], method: str, settings: Mapping[str, Any], source: Path
) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with one `QuantizedTensor` for those of a quantized weight.

    Modules that were left in floats stay as they are. Raises, from headers alone,
    `UnsupportedError` for a method or variant that is not read, and `TransferError` for missing
    tensors and wrong shapes, naming them.
    """
    check_method(method, source)
    tensors: dict[str, StoredTensor] = dict(stored)
    for name, tensor in stored.items():
        for reader in READERS[method]:
            if not name.endswith(reader.main) or tensor.dtype.name not in reader.dtypes:
                continue
            stem = name.removesuffix(reader.main)
            parts = _parts(stem, tensor, stored, reader)
            weight = stem + reader.stem
            group = ModuleTensors(weight, parts, settings)
            layout = reader.layout(group)
            for part in parts.values():
                del tensors[part.name]
            tensors[weight] = QuantizedTensor(
                name=name,
                path=tensor.path,
                stamp=tensor.stamp,
                dtype=DTYPES["float32"],
                shape=layout.shape,
                start=tensor.start,
                nbytes=sum(part.nbytes for part in parts.values()),
                method=method,
                parts=parts,
                layout=layout,
            )
            break
    return tensors


def _parts(
    stem: str, main: SafeTensor, stored: Mapping[str, SafeTensor], reader: Reader
) -> dict[str, SafeTensor]:
    parts = {"codes": main}
    for role, endings in reader.parts.items():
        names = [stem + ending for ending in endings if stem + ending in stored]
        if names:
            parts[role.removesuffix("?")] = stored[names[0]]
        elif not role.endswith("?"):
            raise TransferError(
                f"{main.path}: the tensor {shortened(stem + endings[0])!r} is missing, and "
                f"{shortened(main.name)!r} cannot be read without it; {_AGAIN}",
                stem + endings[0],
            )
    return parts


# --- GPTQ and AWQ -----------------------------------------------------------------------------


def _bytes(words: HostArray) -> HostArray:
    """Return the bytes of words, the lowest first."""
    raw: HostArray = np.ascontiguousarray(words).view(np.uint8)
    return raw


def _stream(raw: HostArray, bits: int) -> dict[str, HostArray]:
    """Return the fields of codes that lie in a row of bytes without gaps, low bits first."""
    if bits in (2, 4, 8):
        return {"codes": raw}
    codes, high = pack_codes(unpack_stream(raw, bits), bits)
    assert high is not None
    return {"codes": codes, "high": high}


def _with_zeros(scales: HostArray, zeros: HostArray | None) -> dict[str, HostArray]:
    """Return scales with the minimums that stand for zero points, if any, exactly, in float32."""
    if zeros is None:
        return {"scales": scales}
    minimums = -scales.astype(np.float32) * zeros.astype(np.float32)
    return {"scales": scales, "minimums": minimums}


def _describe_gptq(group: ModuleTensors) -> CodeLayout:
    """Codes and zeros lie in words of 32 bits without gaps: codes along columns, zeros along rows.

    Format 1 stores each zero less 1. (AutoGPTQ and GPTQModel, `pack` of their linear layers.)
    """
    settings = group.settings
    form = str(settings.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        group.refuse(f"GPTQ weights in the format {shortened(repr(form))} are not read")
    groups, rows = group.expect("scales", (None, None), "float")
    words, _ = group.expect("codes", (None, rows), "int32")
    _, zero_words = group.expect("zeros", (groups, None), "int32")
    bits = group.bits(zero_words, rows, "zeros", (2, 3, 4, 8))
    columns = words * 32 // bits
    block, symmetric = group.block(columns, groups), settings.get("sym", True)
    middle, limit = 1 << (bits - 1), (1 << bits) - 1
    if "g_idx" in group:
        group.expect("g_idx", (columns,), "int32", "int64")

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        factors = np.ascontiguousarray(arrays["scales"].T)
        zeros = unpack_stream(_bytes(arrays["zeros"]), bits).T[:rows]
        zeros = (zeros + (form == "gptq")) & limit
        if symmetric and (zeros != middle).any():
            raise group["zeros"].error(
                f"its zeros are not {middle}, as the config's symmetric weights (sym) have them; "
                'write "sym": false into the quantization_config'
            )
        return _with_zeros(factors, None if symmetric else zeros)

    def codes(words: HostArray) -> dict[str, HostArray]:
        by_row = _bytes(words).reshape(*words.shape, 4).transpose(1, 0, 2)
        return _stream(by_row.reshape(rows, -1), bits)

    return CodeLayout((rows, columns), bits, block, codes, scales, zero=middle if symmetric else 0)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of 8 rows; AutoAWQ packs rows 0 2 4 6 1 3 5 7."""


def _describe_awq(group: ModuleTensors) -> CodeLayout:
    """Codes and zeros of 8 rows lie in a word of 32 bits, interleaved (AutoAWQ, version "gemm")."""
    settings = group.settings
    version, bits = str(settings.get("version") or "gemm").lower(), settings.get("bits", 4)
    if version != "gemm" or bits != 4 or not settings.get("zero_point", True):
        group.refuse("of AWQ, only version 'gemm' of 4 bits with zero points is read")
    groups, rows = group.expect("scales", (None, None), "float")
    columns, words = group.expect("codes", (None, None), "int32")
    group.expect("zeros", (groups, words), "int32")
    group.bits(words, rows, "codes", (4,))
    block = group.block(columns, groups)

    def by_row(packed: HostArray) -> HostArray:
        """Return one code a byte, (rows, …)."""
        words = unpack_stream(_bytes(packed), 4).reshape(len(packed), -1, 8)
        return np.ascontiguousarray(words[..., _AWQ_ORDER].reshape(len(packed), rows).T)

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        return _with_zeros(np.ascontiguousarray(arrays["scales"].T), by_row(arrays["zeros"]))

    def codes(packed: HostArray) -> dict[str, HostArray]:
        return {"codes": pack_codes(by_row(packed), 4)[0]}

    return CodeLayout((rows, columns), 4, block, codes, scales)


# --- one byte a code ----------------------------------------------------------------------------


def _spread(
    group: ModuleTensors, rows: int, columns: int
) -> tuple[int, Callable[[HostArray], HostArray]]:
    """Return the columns of a block, and a function from stored scales to those of each row.

    Scales are of the tensor, of each row, of groups of columns, or of blocks of both.
    """
    stored = group["scales"].shape
    if stored in ((), (1,), (1, 1), (rows,), (rows, 1)):
        return columns, lambda scales: np.broadcast_to(scales.reshape(-1, 1), (rows, 1)).copy()
    if len(stored) == 2 and stored[0] == rows:
        return group.block(columns, stored[1]), lambda scales: scales
    down, across = group.block_sizes()
    group.expect("scales", (-(-rows // down), -(-columns // across)), "float")
    step = gcd(across, columns)

    def spread(scales: HostArray) -> HostArray:
        wide = scales.repeat(down, 0)[:rows].repeat(across // step, 1)
        return np.ascontiguousarray(wide[:, : columns // step])

    return step, spread


def _describe_float8(group: ModuleTensors) -> CodeLayout:
    """Numbers of 8 bits, whose scale multiplies (DeepSeek-V3's `weight_scale_inv`, FBGEMM)."""
    _check_variant(group)
    dtype = group["codes"].dtype.name
    rows, columns = group.expect("codes", (None, None), dtype)
    group.expect("scales", group["scales"].shape, "float")
    block, spread = _spread(group, rows, columns)

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        return {"scales": spread(arrays["scales"])}

    table = FLOAT8_TABLES[dtype]
    return CodeLayout(
        (rows, columns), 8, block, lambda raw: {"codes": raw.view(np.uint8)}, scales, table=table
    )


def _describe_int8(group: ModuleTensors) -> CodeLayout:
    """Integers of 8 bits, maybe with zero points of the scales' shape (compressed-tensors)."""
    _check_variant(group)
    rows, columns = group.expect("codes", (None, None), "int8")
    shape = group.expect("scales", group["scales"].shape, "float")
    if "zeros" in group:
        group.expect("zeros", shape, "int8")
    block, spread = _spread(group, rows, columns)

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        zeros = spread(arrays["zeros"]) if "zeros" in arrays else None
        return _with_zeros(spread(arrays["scales"]), zeros)

    return CodeLayout((rows, columns), 8, block, _offset, scales, zero=128)


def _offset(codes: HostArray) -> dict[str, HostArray]:
    return {"codes": codes.view(np.uint8) ^ np.uint8(128)}


def _describe_bytes(group: ModuleTensors) -> CodeLayout:
    """Integers of 8 bits; `SCB` has the largest magnitude of each row (bitsandbytes, LLM.int8)."""
    rows, columns = group.expect("codes", (None, None), "int8")
    group.expect("scales", (rows,), "float32")

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        return {"scales": (arrays["scales"] / np.float32(127))[:, None]}

    return CodeLayout((rows, columns), 8, columns, _offset, scales, zero=128)


# --- four bits and fewer --------------------------------------------------------------------------


def _describe_words(group: ModuleTensors) -> CodeLayout:
    """Codes lie in words of 32 bits without gaps, zeros along rows (compressed-tensors)."""
    _check_variant(group)
    group.expect("shape", (2,), "int64", "int32")
    rows, columns = (int(size) for size in _array(group["shape"]))
    _, words = group.expect("codes", (max(rows, 1), None), "int32")
    bits = group.bits(words, max(columns, 1), "codes", (2, 3, 4, 5, 6, 8))
    shape = group.expect("scales", group["scales"].shape, "float")
    block, spread = _spread(group, rows, columns)
    if "g_idx" in group:
        group.expect("g_idx", (columns,), "int32", "int64")
    if "zeros" in group:
        if group["zeros"].dtype.name == "int8":
            group.refuse("packed weights with zero points that are not packed are not read")
        group.expect("zeros", (-(-rows * bits // 32), shape[-1]), "int32")

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        words = arrays.get("zeros")
        zeros = None if words is None else unpack_stream(_bytes(words.T), bits).T[:rows]
        return _with_zeros(spread(arrays["scales"]), zeros)

    def codes(words: HostArray) -> dict[str, HostArray]:
        return _stream(np.ascontiguousarray(_bytes(words)[:, : columns * bits // 8]), bits)

    zero = 0 if "zeros" in group else 1 << (bits - 1)
    return CodeLayout((rows, columns), bits, block, codes, scales, zero)


def _describe_microscaling(group: ModuleTensors) -> CodeLayout:
    """Codes of e2m1 in blocks of 32 with exponents of two (OCP Microscaling), experts stacked."""
    shape = (*[None] * len(group["codes"].shape[:-1]), 16)
    *outer, blocks, _ = group.expect("codes", shape, "uint8")
    group.expect("scales", (*outer, blocks), "uint8")

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        if (arrays["scales"] == 255).any():
            raise group["scales"].error(f"it holds NaN; {_AGAIN}")
        return {"scales": power_scales(arrays["scales"])}

    def codes(raw: HostArray) -> dict[str, HostArray]:
        return {"codes": raw.reshape(*raw.shape[:-2], -1)}

    return CodeLayout((*outer, blocks * 32), 4, 32, codes, scales, table=FP4_TABLE)


def _describe_pairs(group: ModuleTensors) -> CodeLayout:
    """Codes of 4 bits, the first in the high bits, in blocks that run through all rows.

    Scales may be quantized themselves, with a table, scales and an offset (QLoRA's double
    quantization).
    """
    group.expect("state", (None,), "uint8")
    group.expect("table", (16,), "float32")
    try:
        state = parse_json(_array(group["state"]).tobytes())
        rows, columns = (integer("shape", size) for size in state["shape"])
        size = integer("blocksize", state["blocksize"])
        nested = integer("nested_blocksize", state["nested_blocksize"]) if "nested" in group else 0
        offset = number("nested_offset", state["nested_offset"]) if nested else 0.0
    except (ValueError, KeyError, TypeError, ConfigurationError) as error:
        raise group["state"].error(f"it is not the state of a weight: {error}; {_AGAIN}") from error
    if 2 * prod(group["codes"].shape) != rows * columns:
        raise group["codes"].error(f"its shape is not that of {rows} x {columns} codes; {_AGAIN}")
    blocks, step = -(-rows * columns // size), gcd(size, columns)
    group.expect("scales", (blocks,), "uint8" if nested else "float32")
    if nested:
        group.expect("nested", (-(-blocks // nested),), "float32")
        group.expect("nested_table", (256,), "float32")

    def scales(arrays: Arrays) -> dict[str, HostArray]:
        factors = arrays["scales"]
        if nested:
            factors = arrays["nested_table"][factors]
            factors *= arrays["nested"].repeat(nested)[:blocks]
            factors += np.float32(offset)
        return {"scales": factors.repeat(size // step)[: rows * columns // step].reshape(rows, -1)}

    def codes(raw: HostArray) -> dict[str, HostArray]:
        return {"codes": ((raw << 4) | (raw >> 4)).reshape(rows, -1)}

    table = tuple(_array(group["table"]).tolist())
    return CodeLayout((rows, columns), 4, step, codes, scales, table=table)


def _schemes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return how the groups of layers of a compressed-tensors config store their weights."""
    groups = settings.get("config_groups")
    return [
        group["weights"] | {"format": group.get("format")}
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]


_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")


def _check_variant(group: ModuleTensors) -> None:
    """Raise `UnsupportedError` for a format of compressed-tensors that is not read."""
    settings = group.settings
    for form in (settings.get("format"), *[s["format"] for s in _schemes(settings)]):
        if form not in (*_COMPRESSED, "mixed-precision", None):
            group.refuse(f"compressed-tensors in the format {shortened(repr(form))} is not read")
    sparsity = settings.get("sparsity_config") or {"format": "dense"}
    is_dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    if settings.get("transform_config") or not is_dense:
        group.refuse("compressed-tensors with transforms or sparse weights is not read")


_FLOAT8 = Reader(
    ".weight",
    tuple(FLOAT8_TABLES),
    {"scales": (".weight_scale_inv", ".weight_scale")},
    _describe_float8,
)
_COMPRESSED_SCALE = {"scales": (".weight_scale",), "zeros?": (".weight_zero_point",)}

READERS: dict[str, tuple[Reader, ...]] = {
    "gptq": (
        Reader(
            ".qweight",
            ("int32",),
            {"scales": (".scales",), "zeros": (".qzeros",), "g_idx?": (".g_idx",)},
            _describe_gptq,
        ),
    ),
    "awq": (
        Reader(
            ".qweight", ("int32",), {"scales": (".scales",), "zeros": (".qzeros",)}, _describe_awq
        ),
    ),
    "compressed-tensors": (
        Reader(
            ".weight_packed",
            ("int32",),
            {**_COMPRESSED_SCALE, "shape": (".weight_shape",), "g_idx?": (".weight_g_idx",)},
            _describe_words,
        ),
        Reader(".weight", ("int8",), _COMPRESSED_SCALE, _describe_int8),
        _FLOAT8,
    ),
    "fp8": (_FLOAT8,),
    "fbgemm_fp8": (_FLOAT8,),
    "mxfp4": (
        Reader(
            "_blocks", ("uint8",), {"scales": ("_scales",)}, _describe_microscaling, stem="_blocks"
        ),
    ),
    "bitsandbytes": (
        Reader(".weight", ("int8",), {"scales": (".SCB",)}, _describe_bytes),
        Reader(
            ".weight",
            ("uint8",),
            {
                "scales": (".weight.absmax",),
                "table": (".weight.quant_map",),
                "state": tuple(f".weight.quant_state.bitsandbytes__{t}" for t in ("nf4", "fp4")),
                "nested?": (".weight.nested_absmax",),
                "nested_table?": (".weight.nested_quant_map",),
            },
            _describe_pairs,
        ),
    ),
}
"""The methods that are read, by their names in a `quantization_config`."""
