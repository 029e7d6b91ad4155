"""A decoder's parameters: from the files of a folder straight onto a device.

`parameters_of` lists the parameters of a description, with their shapes and their stored tensors.
Files name tensors in more than one way; the first way whose tensors exist is used. Names and shapes
are checked before anything large is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from anydevice._core import checks
from anydevice._core.dtypes import DTYPES, DType, as_dtype
from anydevice._core.files import expanded
from anydevice._core.record import Record, replace
from anydevice._core.text import format_size, shortened, warn
from anydevice._formats.gguf import GgufFile, GgufTensor, named_tensors, read_gguf
from anydevice._formats.load import (
    Joined,
    OpenFiles,
    Packed,
    Quantizer,
    Segment,
    Stored,
    do_together,
    stored_parts,
)
from anydevice._formats.quantize import SCHEMES, fitting, quantizer_of
from anydevice._formats.quantized_folder import QuantizedTensor, quantized_tensors
from anydevice._formats.safetensors import SafeTensor, StoredTensor, read_model
from anydevice._llm.description import Description, LayerDescription, Routing
from anydevice._ops.dispatch import own_version
from anydevice._plan.config import CONFIG_NAME, is_gguf_path, read_config
from anydevice._plan.families import ARCHITECTURES
from anydevice._plan.quantization import method_of, quantization_of
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError

_FLOAT32 = DTYPES["float32"]
MATRICES = ("qkv", "output", "gate_up", "down")
"""The matrices of a layer that every token is multiplied with."""

MOST_EXPERTS = 4096
"""Limit of experts in a layer, above any model's; each expert has its own name in files."""

TreePath = tuple[str | int, ...]
"""The keys that lead to an array in the tree of parameters."""
Shape = tuple[int, ...]
Products = Sequence[tuple[str, int]]
"""Names and row counts of the matrices of products, which are stacked in this order."""


class Way(Record):
    """Stored tensors, by name and shape, to concatenate; `arrange` first reorders their rows."""

    tensors: tuple[tuple[str, Shape], ...]
    arrange: Callable[[Any], Any] | None = None


class Parameter(Record):
    """One array of the tree: its path, its shape, and the ways to store it; float32 if `wide`."""

    path: TreePath
    shape: Shape
    ways: tuple[Way, ...]
    wide: bool = False

    @property
    def quantizable(self) -> bool:
        """Whether it may stay quantized: all matrices but those that are taken apart when used."""
        *above, last = self.path
        if last == "weight":
            return len(self.shape) > 1 and above[-1] not in ("router", "kv_b")
        return last in ("embedding", "gate_up", "down")


class Weights(Record):
    """How matrices are loaded: as they are stored, unpacked, or quantized.

    `quantizer` returns, for the path and the shape of a matrix that is stored in floating point,
    the function that quantizes its rows, or None to leave it.
    """

    stored: bool = True
    quantizer: Callable[[TreePath, Shape], Quantizer | None] | None = None

    def plan(self, parameter: Parameter, parts: Sequence[Segment], dtype: DType) -> Stored:
        """Return a parameter on its way from its parts; parts of different schemes stay apart."""
        shape = parameter.shape
        if not parameter.quantizable:
            return Joined(shape, dtype, tuple(parts))
        schemes = [part.tensor.scheme if self.stored else None for part in parts]
        if len(set(schemes)) > 1:
            if len(shape) == 2:
                return self._plan_apart(parameter, parts, dtype)
            schemes = [None]
        quantizer = None
        if schemes[0] is None and self.quantizer is not None:
            quantizer = self.quantizer(parameter.path, shape)
        if schemes[0] is None and quantizer is None:
            return Joined(shape, dtype, tuple(parts))
        return Packed(shape, tuple(parts), quantizer)

    def _plan_apart(
        self, parameter: Parameter, parts: Sequence[Segment], dtype: DType
    ) -> tuple[Joined | Packed, ...]:
        planned: list[Joined | Packed] = []
        for _, group in groupby(parts, lambda part: part.tensor.scheme):
            own = list(group)
            rows = sum(part.size for part in own) // prod(parameter.shape[1:])
            piece = replace(parameter, shape=(rows, *parameter.shape[1:]))
            planned += stored_parts(self.plan(piece, own, dtype))
        return tuple(planned)


AS_STORED = Weights()


def weights_option(choice: str, description: Description) -> Weights:
    """Return how matrices are loaded: "stored", "float", or quantized with a scheme.

    A matrix whose rows are not whole blocks of the scheme gets another one, or stays in floating
    point; a warning says so once. With 6 bits and fewer, the head has a scheme of 6 bits or more.
    """
    checks.one_of("weights", choice, ("stored", "float", *SCHEMES))
    if choice in ("stored", "float"):
        return Weights(stored=choice == "stored")
    head: TreePath = ("embedding",) if description.tied else ("head", "weight")

    def scheme(path: TreePath, shape: Shape) -> str:
        if shape[0] == 1:
            return ""
        if choice == "fp8":
            return choice
        fine = path == head and choice != "q8_0"
        return fitting("Q6_K" if fine else choice.upper(), shape[-1]).lower()

    others: dict[tuple[int, str], TreePath] = {}
    for parameter in parameters_of(description):
        path, shape = parameter.path, parameter.shape
        other = scheme(path, shape)
        if parameter.quantizable and shape[0] > 1 and other not in (choice, "q6_k"):
            others.setdefault((shape[-1], other or "left in floating point"), path)
    if others:
        rows = [
            f"those of {size} numbers, such as {'.'.join(map(str, path))}, are {kind}"
            for (size, kind), path in others.items()
        ]
        warn(f"some rows are not whole blocks of {choice}: {'; '.join(rows)}")

    def quantizer(path: TreePath, shape: Shape) -> Quantizer | None:
        name = scheme(path, shape)
        return quantizer_of(name) if name else None

    return Weights(stored=False, quantizer=quantizer)


def plan_parameters(
    folder: str | Path | GgufFile,
    description: Description,
    dtype: object = None,
    weights: Weights = AS_STORED,
) -> dict[TreePath, Stored]:
    """Return the parameters of a decoder on their way from a folder or a GGUF file.

    `dtype` is that of floating-point parameters, and of the numbers that a layer computes with
    quantized ones; the default is the dtype of the stored embedding.

    Raises, naming file and tensor: `TransferError` for tensors that are missing, left over, of a
    wrong shape or with scales that are not finite, `UnsupportedError` for an unknown quantization.
    """
    if not isinstance(folder, GgufFile) and is_gguf_path(path := expanded(folder)):
        folder = read_gguf(path)
    if isinstance(folder, GgufFile):
        stored, path = _gguf_tensors(folder, description), folder.path
    else:
        stored = _folder_tensors(path, description)
    plan = _plan_stored(stored, description, dtype, source=path, weights=weights)
    with OpenFiles() as files:
        tensors = [part.tensor for part in stored.values()]
        checks = [partial(x.check, files.of(x)) for x in tensors if isinstance(x, GgufTensor)]
        packed, widen = [x for x in tensors if isinstance(x, QuantizedTensor)], not weights.stored
        checks += [partial(x.check, files.of(x), widen=widen) for x in packed]
        if checks:
            do_together(checks)
    return plan


def _folder_tensors(path: Path, description: Description) -> dict[str, Segment]:
    """Return the tensors of a folder, of a quantized weight as one."""
    entries = read_model(path)
    tensors: Mapping[str, StoredTensor] = entries
    config = path / CONFIG_NAME
    settings = read_config(path).get("quantization_config") if config.is_file() else None
    if settings:
        quantization_of(settings, str(config))  # raises for invalid values
        tensors = quantized_tensors(entries, method_of(settings), settings, config)
    stored = {name: Segment(tensor) for name, tensor in tensors.items()}
    return _by_usual_names(stored, description.tensor_names)


def decoder_tensors(path: Path, description: Description) -> dict[str, Segment]:
    """Return the tensors of a folder that a decoder consists of, by the names of Llama's files."""
    stored = _folder_tensors(path, description)
    parts = [_parts(parameter, stored, "", path) for parameter in parameters_of(description)]
    used = {part.tensor.name for several in parts for part in several}
    left = {name for name, part in stored.items() if part.tensor.name not in used}
    _refuse_left_over(left, stored, description)
    return {name: part for name, part in stored.items() if name not in left}


def _warn_of_unpacked(tensors: Sequence[StoredTensor], dtype: DType, source: Path) -> None:
    """Say which quantized tensors take more memory than in the file, why, and how much."""
    mixed = [x for x in tensors if x.scheme]
    packed = [x for x in tensors if isinstance(x, GgufTensor) and x.packing.elements > 1]
    foreign = [x for x in packed if not x.scheme]
    kinds, tensors = ", ".join(sorted({x.packing.name for x in foreign})), [*mixed, *foreign]
    reasons = [f"{kinds} can only be unpacked, slowly, by the package gguf"] if foreign else []
    if mixed:
        reasons.append(f"{shortened(mixed[0].name)!r} is in a stack of experts that mixes types")
    if reasons:
        sizes = sum(x.nbytes for x in tensors), sum(prod(x.shape) for x in tensors) * dtype.itemsize
        warn(
            f"{source}: some quantized weights are unpacked to {dtype}, from "
            f"{format_size(sizes[0])} in the file to {format_size(sizes[1])} in memory: "
            f"{' and '.join(reasons)}. Q4_K_M, Q8_0 and most other types stay quantized"
        )


def _gguf_tensors(file: GgufFile, description: Description) -> dict[str, Segment]:
    """Return the tensors of a GGUF file with the names and the layout of Hugging Face folders."""
    name = file.metadata["general.architecture"]
    specs = [row.gguf for row in ARCHITECTURES.values() if row.gguf is not None]
    permuted = any(spec.permuted for spec in specs if spec.architecture == name)
    ways = (way for parameter in parameters_of(description) for way in parameter.ways)
    names = [name for way in ways for name, _ in way.tensors]
    stored: dict[str, Segment] = {}
    for name, tensor in named_tensors(file, names).items():
        arrange: Callable[[Any], Any] | None = None
        if description.norm == "rms1" and tensor.name.endswith("norm.weight"):
            arrange = partial(np.add, np.float32(-1))
        if permuted and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
            arrange = partial(_order_halves, size=description.head_size)
        if ".ffn_gate_inp_shexp." in tensor.name and len(tensor.shape) == 1:
            tensor = tensor.as_matrix()
        stored[name] = Segment(tensor, arrange)
    return stored


def _order_halves(weights: Any, size: int) -> Any:
    """Reorder rows of queries or keys from interleaved pairs to two halves."""
    heads, rest = weights.shape[0] // size, weights.shape[1:]
    return weights.reshape(heads, size // 2, 2, *rest).swapaxes(1, 2).reshape(weights.shape)


def _plan_stored(
    stored: Mapping[str, Segment],
    description: Description,
    dtype: object = None,
    *,
    source: Path,
    weights: Weights = AS_STORED,
) -> dict[TreePath, Stored]:
    """Return the parameters of a decoder on their way from tensors with names of Llama's files."""
    embedding = stored.get("model.embed_tokens.weight")
    wanted = runnable_dtype(dtype or "float32")
    if dtype is None and embedding is not None:
        wanted = embedding.tensor.dtype
    plan: dict[TreePath, Stored] = {}
    packed = weights.stored and {type(part.tensor) for part in stored.values()} != {SafeTensor}
    unpacked: list[StoredTensor] = []
    used: set[str] = set()
    for path, prefix, parameters in _groups(description):
        for parameter in parameters:
            parts = _parts(parameter, stored, prefix, source)
            kind = _FLOAT32 if parameter.wide else wanted
            planned = plan[(*path, *parameter.path)] = weights.plan(parameter, parts, kind)
            for part in parts:
                used.add(part.tensor.name)
            for one in stored_parts(planned) if packed and parameter.quantizable else ():
                if isinstance(one, Joined):
                    unpacked += [part.tensor for part in one.parts]
    if unpacked:
        _warn_of_unpacked(unpacked, wanted, source)
    left = {name for name, part in stored.items() if part.tensor.name not in used}
    _refuse_left_over(left, stored, description)
    return plan


def lay_out_matrices(parameters: dict[str, Any]) -> dict[str, Any]:
    """Store the matrices of layers in the order in which the engine multiplies one row fastest."""
    lay_out = own_version(parameters["norm"]["weight"], "lay_out_matrices", lambda matrices: None)
    parts = [layer[name] for layer in parameters["layers"] for name in MATRICES if name in layer]
    lay_out([matrix for matrix in parts if "weight" in matrix])
    return parameters


def tree_of(arrays: Mapping[TreePath, Any]) -> dict[str, Any]:
    """Return the tree of parameters from its arrays."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        node: Any = tree
        for key, following in pairwise(path):
            empty: Any = [] if isinstance(following, int) else {}
            if isinstance(key, int):
                if key == len(node):
                    node.append(empty)
                node = node[key]
            else:
                node = node.setdefault(key, empty)
        node[path[-1]] = array
    return tree


# --- a decoder's parameters and their names in files -----------------------------------------


def parameters_of(description: Description) -> list[Parameter]:
    """Return every parameter of a decoder, layer by layer, with the full names of tensors."""
    return [
        replace(
            parameter,
            path=(*path, *parameter.path),
            ways=tuple(
                replace(way, tensors=tuple((prefix + name, shape) for name, shape in way.tensors))
                for way in parameter.ways
            ),
        )
        for path, prefix, parameters in _groups(description)
        for parameter in parameters
    ]


def _groups(description: Description) -> list[tuple[TreePath, str, list[Parameter]]]:
    """Return groups of parameters with their path and tensor prefix; equal layers share a list."""
    table = (description.vocabulary, description.hidden)
    embedding = _stored_alone(("embedding",), "model.embed_tokens.weight", table)
    groups: list[tuple[TreePath, str, list[Parameter]]] = [((), "", [embedding])]
    kinds: dict[int, list[Parameter]] = {}  # equal layers are one object
    for number, kind in enumerate(description.layers):
        if id(kind) not in kinds:
            kinds[id(kind)] = _layer(description, kind)
        groups.append((("layers", number), f"model.layers.{number}", kinds[id(kind)]))
    last = _norm(description, "norm", ["model.norm"], description.hidden)
    if not description.tied:
        last += _product("head", [[("lm_head", table[0])]], table[1], "head" in description.biases)
    return [*groups, ((), "", last)]


def _layer(description: Description, kind: LayerDescription) -> list[Parameter]:
    """Return the parameters of a layer, with paths and names that are relative to it."""
    parameters: list[Parameter] = []
    for name, stems in _NORMS[description.block].items():
        parameters += _norm(description, name, stems, description.hidden)
    parameters += (_latent_attention if description.latent else _attention)(description)
    if kind.experts is not None:
        return parameters + _experts(description, kind.experts)
    return parameters + _network(description, [".mlp"], description.intermediate)


_NORMS: dict[str, dict[str, list[str]]] = {
    "pre": {
        "attention_norm": [".input_layernorm"],
        "mlp_norm": [".post_attention_layernorm"],
    },
    "post": {
        "attention_post_norm": [".post_attention_layernorm"],
        "mlp_post_norm": [".post_feedforward_layernorm"],
    },
    "sandwich": {
        "attention_norm": [".input_layernorm"],
        "attention_post_norm": [".post_self_attn_layernorm", ".post_attention_layernorm"],
        "mlp_norm": [".pre_feedforward_layernorm", ".post_attention_layernorm"],
        "mlp_post_norm": [".post_feedforward_layernorm", ".post_mlp_layernorm"],
    },
    "parallel": {"attention_norm": [".input_layernorm"]},
}
"""Our names for the norms of a block, and their names in files in the order of preference."""


def _attention(description: Description) -> list[Parameter]:
    hidden, size, biases = description.hidden, description.head_size, description.biases
    queries, keys = description.heads * size, description.kv_heads * size
    sizes = {"q": queries, "k": keys, "v": keys}
    apart = [(f".self_attn.{letter}_proj", rows) for letter, rows in sizes.items()]
    joined = [(".self_attn.qkv_proj", queries + 2 * keys)]
    parameters = _product("qkv", [apart, joined], hidden, "qkv" in biases)
    parameters += _product("output", [[(".self_attn.o_proj", hidden)]], queries, "output" in biases)
    if description.query_key_norm:
        q_size, k_size = (size, size) if description.query_key_norm == "head" else (queries, keys)
        parameters += _norm(description, "query_norm", [".self_attn.q_norm"], q_size)
        parameters += _norm(description, "key_norm", [".self_attn.k_norm"], k_size)
    if description.sinks:
        parameters.append(_stored_alone(("sinks",), ".self_attn.sinks", (description.heads,)))
    return parameters


def _latent_attention(description: Description) -> list[Parameter]:
    sizes, hidden, heads = description.latent, description.hidden, description.heads
    assert sizes is not None
    bias, queries = "qkv" in description.biases, heads * description.head_size

    def product(
        name: str, theirs: str, rows: int, inputs: int, bias: bool = False
    ) -> list[Parameter]:
        return _product(name, [[(f".self_attn.{theirs}", rows)]], inputs, bias)

    def norm(name: str, theirs: str, size: int) -> list[Parameter]:
        return _norm(description, name, [f".self_attn.{theirs}"], size)

    if sizes.query_rank:
        parameters = [
            *product("query_a", "q_a_proj", sizes.query_rank, hidden, bias),
            *norm("query_a_norm", "q_a_layernorm", sizes.query_rank),
            *product("query_b", "q_b_proj", queries, sizes.query_rank),
        ]
    else:
        parameters = product("query", "q_proj", queries, hidden)
    return [
        *parameters,
        *product("kv_a", "kv_a_proj_with_mqa", sizes.rank + sizes.rotated, hidden, bias),
        *norm("kv_a_norm", "kv_a_layernorm", sizes.rank),
        *product("kv_b", "kv_b_proj", heads * (sizes.plain + sizes.value), sizes.rank),
        *product("output", "o_proj", hidden, heads * sizes.value, "output" in description.biases),
    ]


def _network(
    description: Description, stems: Sequence[str], inner: int, prefix: str = ""
) -> list[Parameter]:
    hidden, bias = description.hidden, "mlp" in description.biases
    if description.gated:
        name = "gate_up"
        into = [[(f"{s}.gate_proj", inner), (f"{s}.up_proj", inner)] for s in stems]
        into += [[(f"{s}.gate_up_proj", 2 * inner)] for s in stems]
    else:
        name = "up"
        into = [[(f"{s}.{up}", inner)] for s in stems for up in ("up_proj", "c_fc", "fc1")]
    out = [[(f"{s}.{down}", hidden)] for s in stems for down in ("down_proj", "c_proj", "fc2")]
    parameters = _product(f"{prefix}{name}", into, hidden, bias)
    return parameters + _product(f"{prefix}down", out, inner, bias)


def _experts(description: Description, routing: Routing) -> list[Parameter]:
    count, hidden, inner = routing.count, description.hidden, routing.intermediate
    if count > MOST_EXPERTS:
        raise UnsupportedError(f"{count} experts in a layer: at most {MOST_EXPERTS} are run")
    stems = [".mlp", ".block_sparse_moe"]
    routers = [[(f"{s}.{name}", count)] for s in stems for name in ("gate", "router")]
    parameters = _product("router", routers, hidden, "router" in description.biases)
    if routing.kind == "groups":
        name = ".mlp.gate.e_score_correction_bias"
        parameters.append(_stored_alone(("router", "choice_bias"), name, (count,), wide=True))
    biased = "experts" in description.biases
    for name, shape, theirs in (
        ("gate_up", (count, 2 * inner, hidden), (("gate_proj", "up_proj"), ("w1", "w3"))),
        ("down", (count, hidden, inner), (("down_proj",), ("w2",))),
    ):
        expert_shape = (shape[1] // len(theirs[0]), shape[2])
        ways = [
            Way(
                tuple(
                    (f"{stem}.experts.{expert}.{part}.weight", expert_shape)
                    for expert in range(count)
                    for part in parts
                )
            )
            for stem in stems
            for parts in theirs
        ]
        stacked = f".mlp.experts.{name}_proj"
        gated = name == "gate_up"
        if biased:  # matrices are transposed, and rows of gate and up are interleaved
            transposed = (shape[0], shape[2], shape[1])
            arrange = (lambda matrix: _separate_rows(matrix.T)) if gated else np.transpose
            ways.append(Way(((stacked, transposed),), arrange))
            packed = ((f"{stacked}_blocks", shape),)
            ways.append(Way(packed, _separate_rows if gated else None))
        else:
            ways.append(Way(((stacked, shape),)))
        parameters.append(Parameter(("experts", name), shape, tuple(ways)))
        if biased:
            bias = Way(((f"{stacked}_bias", shape[:2]),), _separate_rows if gated else None)
            parameters.append(Parameter(("experts", f"{name}_bias"), shape[:2], (bias,)))
    if routing.shared:
        stems = [".mlp.shared_experts", ".mlp.shared_expert"]
        parameters += _network(description, stems, routing.shared, "shared_")
    if routing.shared_gate:
        gate = [[(".mlp.shared_expert_gate", 1)]]
        parameters += _product("shared_gate", gate, hidden, False)
    return parameters


def _separate_rows(rows: Any) -> Any:
    """Return the even rows, followed by the odd rows."""
    return np.concatenate([rows[0::2], rows[1::2]])


def _norm(description: Description, name: str, stems: Sequence[str], size: int) -> list[Parameter]:
    kinds = ("weight", "bias") if "norm" in description.biases else ("weight",)
    return [
        Parameter((name, kind), (size,), tuple([Way(((f"{s}.{kind}", (size,)),)) for s in stems]))
        for kind in kinds
    ]


def _product(name: str, ways: Sequence[Products], inputs: int, bias: bool) -> list[Parameter]:
    """Return a matrix, and its bias if it has one, with the rows of one or several products."""
    total = sum([rows for _, rows in ways[0]])
    weights = [Way(tuple([(f"{s}.weight", (rows, inputs)) for s, rows in way])) for way in ways]
    parameters = [Parameter((name, "weight"), (total, inputs), tuple(weights))]
    if bias:
        biases = [Way(tuple([(f"{s}.bias", (rows,)) for s, rows in way])) for way in ways]
        parameters.append(Parameter((name, "bias"), (total,), tuple(biases)))
    return parameters


def _stored_alone(path: TreePath, name: str, shape: Shape, wide: bool = False) -> Parameter:
    return Parameter(path, shape, (Way(((name, shape),)),), wide)


# --- checks -----------------------------------------------------------------------------------


def _parts(
    parameter: Parameter, stored: Mapping[str, Segment], prefix: str, source: Path
) -> tuple[Segment, ...]:
    """Return the stored tensors of a parameter, in order, by the first way that the files have."""
    way = parameter.ways[0]
    for other in parameter.ways:
        if prefix + other.tensors[0][0] in stored:
            way = other
            break
    parts: list[Segment] = []
    for inner_name, shape in way.tensors:
        name = prefix + inner_name
        if name not in stored:
            raise TransferError(
                f"{source}: the tensor {name!r} is missing; the files are incomplete, or not "
                "those of the model that the config describes: download both again",
                name,
            )
        tensor = stored[name].tensor
        if tensor.shape != shape:
            raise TransferError(
                f"{tensor.path}: the tensor {shortened(tensor.name)!r} has the shape "
                f"{shortened(str(tensor.shape))}, but the config says {shortened(str(shape))}; "
                "config and weights are of different models: download both again",
                tensor.name,
            )
        dtype = tensor.dtype
        if dtype.kind != "float" or dtype.bits < 16:
            raise UnsupportedError(
                f"{tensor.path}: the tensor {shortened(tensor.name)!r} is {dtype}, and no "
                f"quantization_config in {CONFIG_NAME} says how it is read; get the model with its "
                "own config, or in bfloat16, float16 or float32"
            )
        if way.arrange is None:
            parts.append(stored[name])
        else:
            rows = range(tensor.shape[0])
            parts += [Segment(tensor.row(number), way.arrange) for number in rows]
    return tuple(parts)


_NOT_DECODER = re.compile(
    r"(^|\.)rotary_emb\.|\.attention\.(masked_)?bias$|\.attn\.(masked_)?bias$"
    r"|^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower"
    r"|patch_merger|vision_encoder|vision_adapter|vision_language_adapter|embed_vision)\."
    r"|[._](input|output|activation|q|k|v|kv)_(scale|scale_ub|zero_point)$|\.weight_format$"
)
"""Tensors that do not belong to the decoder: frequency tables, vision and audio towers, and how to
quantize activations, which stay as they are."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def _refuse_left_over(
    left: set[str], stored: Mapping[str, Segment], description: Description
) -> None:
    layers = {name: match[1] for name in left if (match := _LAYER.match(name))}
    ahead = {number for name, number in layers.items() if name.endswith(".eh_proj.weight")}
    tied = {"lm_head.weight"} if description.tied else set()
    left = {
        name
        for name in left - tied
        if not _NOT_DECODER.search(name) and layers.get(name) not in ahead
    }
    if left:
        name = min(left)
        tensor = stored[name].tensor
        raise TransferError(
            f"{tensor.path}: the model that the config describes has no tensor "
            f"{shortened(tensor.name)!r} (one of {len(left)}); config and weights are of "
            "different models: download both again",
            tensor.name,
        )


def runnable_dtype(spec: object) -> DType:
    """Return the dtype `spec`; raise `ConfigurationError` if parameters cannot have it."""
    wanted = as_dtype(spec)
    if wanted.kind != "float" or wanted.bits < 16:
        raise ConfigurationError(
            f"a decoder cannot be loaded as {wanted}; its dtype is 'bfloat16', 'float16' or "
            "'float32'",
            "dtype",
        )
    return wanted


_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")


def _by_usual_names(
    stored: Mapping[str, Segment], tensor_names: Sequence[tuple[str, str]]
) -> dict[str, Segment]:
    """Return the tensors by their names in a text-only model that has its head."""
    for theirs, ours in tensor_names:
        stored = {name.replace(theirs, ours): part for name, part in stored.items()}
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in stored), "model.")
    outer = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
    renamed = {}
    for name, part in stored.items():
        if name.startswith(prefix) and (prefix or not name.startswith("lm_head.")):
            name = f"model.{name[len(prefix) :]}"
        elif outer and name.startswith(outer):
            name = name[len(outer) :]
        renamed[name] = part
    return renamed
