"""A decoder's parameters: from the files of a folder, or random, straight onto a device.

`parameters_of` says for each parameter of a description its shape and which stored tensors it is
made of. Files name tensors in more than one way; a parameter has a list of ways, and the one is
taken whose tensors are there. Names and shapes are checked before anything large is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._core.device import Device, not_driven
from anydevice._core.dtypes import DTYPES, DType, as_dtype
from anydevice._core.files import expanded
from anydevice._core.record import Record
from anydevice._core.text import shortened
from anydevice._formats.gguf import GgufFile, named_tensors, read_gguf
from anydevice._formats.join import Joined, SafeTensor, Segment
from anydevice._formats.load import load_joined
from anydevice._formats.safetensors import read_model
from anydevice._llm.description import Description, LayerDescription, Routing
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice._nn.random_choice import folded_seed, mixed
from anydevice._ops.dispatch import primitives
from anydevice._plan.config import is_gguf_path
from anydevice._plan.families import ARCHITECTURES
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError

_INT32, _FLOAT32 = DTYPES["int32"], DTYPES["float32"]
_BY_ROW, _BY_COLUMN = 0x243F6A89, 0x13198A2F  # odd numbers without a pattern

MOST_EXPERTS = 4096
"""More than any model has; each has a name of its own in files."""

Where = tuple[str | int, ...]
"""The keys that lead to an array in the tree of parameters."""
Shape = tuple[int, ...]
Products = Sequence[tuple[str, int]]
"""Names of products, and the rows of their matrices, one behind the other."""


class Way(Record):
    """Stored tensors, by name and shape, that one behind the other are a parameter.

    With `arrange`, each row of their first axis is brought into order first.
    """

    tensors: tuple[tuple[str, Shape], ...]
    arrange: Callable[[Any], Any] | None = None


class Parameter(Record):
    """One array of the tree: where it is, its shape, and the ways to store it.

    With `wide` it is float32 whatever the dtype of the others.
    """

    where: Where
    shape: Shape
    ways: tuple[Way, ...]
    wide: bool = False


def load_parameters(
    folder: str | Path | GgufFile,
    description: Description,
    device: Device,
    dtype: object = None,
    *,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The parameters of a decoder on a device, in `dtype`, from a folder or a GGUF file.

    They are read one after another, each straight into its place in the array that it belongs to;
    beside the parameters there is one array in memory at most. Without `dtype`, they have that of
    the stored embedding.

    Raises before anything is read, naming file and tensor: `TransferError` for tensors that are
    missing, left over or of another shape than the config says, `UnsupportedError` for weights of 8
    bits or less.
    """
    if isinstance(folder, GgufFile):
        stored, source = _gguf_tensors(folder, description), folder.path
        return load_stored(stored, description, device, dtype, source=source, progress=progress)
    path = expanded(folder)
    if is_gguf_path(path):
        return load_parameters(read_gguf(path), description, device, dtype, progress=progress)
    stored = _by_usual_names(
        {
            name: Segment(SafeTensor(each.header, each.entry))
            for name, each in read_model(path).items()
        }
    )
    return load_stored(stored, description, device, dtype, source=path, progress=progress)


def _gguf_tensors(file: GgufFile, description: Description) -> dict[str, Segment]:
    """Return the tensors of a GGUF file by the names that folders have, arranged as there."""
    name = file.metadata["general.architecture"]
    specs = [row.gguf for row in ARCHITECTURES.values() if row.gguf is not None]
    permuted = any(spec.permuted for spec in specs if spec.architecture == name)
    names = [
        name
        for parameter in parameters_of(description)
        for way in parameter.ways
        for name, _ in way.tensors
    ]
    stored: dict[str, Segment] = {}
    for name, tensor in named_tensors(file, names).items():
        arrange: Callable[[Any], Any] | None = None
        if description.norm == "rms1" and tensor.name.endswith("norm.weight"):
            arrange = _subtract_one
        if permuted and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
            arrange = partial(_order_halves, size=description.head_size)
        if ".ffn_gate_inp_shexp." in tensor.name and len(tensor.shape) == 1:
            tensor = tensor.as_matrix()
        stored[name] = Segment(tensor, arrange)
    return stored


def _subtract_one(weights: Any) -> Any:
    return weights - np.float32(1)


def _order_halves(weights: Any, size: int) -> Any:
    """Bring rows of queries or keys from neighbouring pairs into the order of two halves."""
    heads, rest = weights.shape[0] // size, weights.shape[1:]
    return weights.reshape(heads, size // 2, 2, *rest).swapaxes(1, 2).reshape(weights.shape)


def load_stored(
    stored: Mapping[str, Segment],
    description: Description,
    device: Device,
    dtype: object = None,
    *,
    source: Path,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The parameters of a decoder from stored tensors under the names that Llama's files have."""
    wanted = _dtype(dtype, stored)
    plan: dict[Where, Joined] = {}
    used: set[str] = set()
    for parameter in parameters_of(description):
        parts = _parts(parameter, stored, source)
        kind = _FLOAT32 if parameter.wide else wanted
        plan[parameter.where] = Joined(parameter.shape, kind, parts)
        for part in parts:
            used.add(part.tensor.name)
    left = {name for name, part in stored.items() if part.tensor.name not in used}
    _refuse_left_over(left, stored, description)
    return tree_of(load_joined(plan, device, progress))


def tree_of(arrays: Mapping[Where, Any]) -> dict[str, Any]:
    """The tree of parameters from its arrays.

    >>> tree_of({("layers", 0, "output", "weight"): 1, ("embedding",): 2})
    {'layers': [{'output': {'weight': 1}}], 'embedding': 2}
    """
    tree: dict[str, Any] = {}
    for where, array in arrays.items():
        holder: Any = tree
        for key, then in pairwise(where):
            empty: Any = [] if isinstance(then, int) else {}
            if isinstance(key, int):
                if key == len(holder):
                    holder.append(empty)
                holder = holder[key]
            else:
                holder = holder.setdefault(key, empty)
        holder[where[-1]] = array
    return tree


def random_parameters(
    description: Description, seed: int = 0, device: Device | None = None, dtype: object = "float32"
) -> dict[str, Any]:
    """Random parameters on a device, made there: the same numbers for the same seed everywhere.

    Matrices are uniform with the spread that keeps the size of what they multiply, norms are near
    1, and biases near 0. Beside the parameters there are a few copies of one array in memory.
    """
    target = one_device(device)
    if target.engine is None:
        raise not_driven(target)
    engine, wanted = registry.load(target.engine), as_dtype(dtype)
    like = engine.place(np.zeros((1, 1), "float32"), target)
    arrays: dict[Where, Any] = {}
    for number, each in enumerate(parameters_of(description)):
        kind = _FLOAT32 if each.wide else wanted
        arrays[each.where] = _random(each, description, folded_seed(seed), number, kind, like)
        engine.finish(arrays[each.where])
    return tree_of(arrays)


def _random(
    parameter: Parameter, description: Description, seed: int, number: int, dtype: DType, like: Any
) -> Any:
    xp, shape = primitives(like), parameter.shape
    columns = shape[-1] if len(shape) > 1 else 1
    rows = prod(shape) // columns

    def placed(size: int, shape: tuple[int, int], factor: int) -> Any:
        places = ops.reshape(xp.arange(size, _INT32, like), shape)
        key = folded_seed(seed * 1_000_003 + number)
        return mixed(ops.add(ops.multiply(places, factor), key))

    down = placed(rows, (rows, 1), _BY_ROW)
    numbers = mixed(ops.add(down, placed(columns, (1, columns), _BY_COLUMN)))
    values = ops.multiply(ops.astype(numbers, "float32"), 2.0**-31)  # from -1 to 1
    near, spread = _around(parameter, description)
    values = ops.add(ops.multiply(values, spread), near)
    return ops.reshape(ops.astype(values, dtype), shape)


def _around(parameter: Parameter, description: Description) -> tuple[float, float]:
    """Where the numbers of a parameter lie: around this one, and so far from it."""
    where, wide = parameter.where, 3**0.5  # a uniform number of this size has a variance of 1
    if where == ("embedding",):
        return 0.0, wide
    if where[-1] == "weight" and "norm" in str(where[-2]):
        return (0.0 if description.norm == "rms1" else 1.0), 0.1 * wide
    if len(parameter.shape) == 1 or str(where[-1]).endswith("bias"):
        return 0.0, 0.1 * wide
    return 0.0, wide * parameter.shape[-1] ** -0.5


# --- what a decoder's parameters are, and what they are called in files ---------------------


def parameters_of(description: Description) -> Iterator[Parameter]:
    """Every parameter of a decoder, layer by layer."""
    table = (description.vocabulary, description.hidden)
    yield Parameter(("embedding",), table, _named("model.embed_tokens.weight", table))
    for number, kind in enumerate(description.layers):
        yield from _layer(description, kind, ("layers", number), f"model.layers.{number}")
    yield from _norm(description, ("norm",), ["model.norm"], description.hidden)
    if not description.tied:
        yield from _product(
            ("head",), [[("lm_head", table[0])]], table[1], "head" in description.biases
        )


def _layer(
    description: Description, kind: LayerDescription, at: Where, prefix: str
) -> Iterator[Parameter]:
    for name, theirs in _NORMS[description.block].items():
        stems = [f"{prefix}.{each}" for each in theirs]
        yield from _norm(description, (*at, name), stems, description.hidden)
    attention = _latent_attention if description.latent else _attention
    yield from attention(description, at, f"{prefix}.self_attn")
    if kind.experts is None:
        stems = [f"{prefix}.mlp"]
        yield from _network(description, at, stems, description.intermediate)
    else:
        yield from _experts(description, kind.experts, at, prefix)


_NORMS: dict[str, dict[str, list[str]]] = {
    "pre": {
        "attention_norm": ["input_layernorm"],
        "mlp_norm": ["post_attention_layernorm"],
    },
    "post": {
        "attention_post_norm": ["post_attention_layernorm"],
        "mlp_post_norm": ["post_feedforward_layernorm"],
    },
    "sandwich": {
        "attention_norm": ["input_layernorm"],
        "attention_post_norm": ["post_self_attn_layernorm", "post_attention_layernorm"],
        "mlp_norm": ["pre_feedforward_layernorm", "post_attention_layernorm"],
        "mlp_post_norm": ["post_feedforward_layernorm", "post_mlp_layernorm"],
    },
    "parallel": {"attention_norm": ["input_layernorm"]},
}
"""Our names for the norms of a kind of layer, and theirs in files, the one that decides first."""


def _attention(description: Description, at: Where, prefix: str) -> Iterator[Parameter]:
    hidden, size, biases = description.hidden, description.head_size, description.biases
    asked, held = description.heads * size, description.kv_heads * size
    apart = [(f"{prefix}.q_proj", asked), (f"{prefix}.k_proj", held), (f"{prefix}.v_proj", held)]
    joined = [(f"{prefix}.qkv_proj", asked + 2 * held)]
    yield from _product((*at, "qkv"), [apart, joined], hidden, "qkv" in biases)
    yield from _product(
        (*at, "output"), [[(f"{prefix}.o_proj", hidden)]], asked, "output" in biases
    )
    rows = {"head": (size, size), "row": (asked, held)}
    if description.query_key_norm:
        queries, keys = rows[description.query_key_norm]
        yield from _norm(description, (*at, "query_norm"), [f"{prefix}.q_norm"], queries)
        yield from _norm(description, (*at, "key_norm"), [f"{prefix}.k_norm"], keys)
    if description.sinks:
        shape = (description.heads,)
        yield Parameter((*at, "sinks"), shape, _named(f"{prefix}.sinks", shape))


def _latent_attention(description: Description, at: Where, prefix: str) -> Iterator[Parameter]:
    sizes, hidden, heads = description.latent, description.hidden, description.heads
    assert sizes is not None
    bias, queries = "qkv" in description.biases, heads * description.head_size

    def product(name: str, theirs: str, rows: int, inputs: int, bias: bool = False) -> Any:
        return _product((*at, name), [[(f"{prefix}.{theirs}", rows)]], inputs, bias)

    def norm(name: str, theirs: str, size: int) -> Any:
        return _norm(description, (*at, name), [f"{prefix}.{theirs}"], size)

    if sizes.query_rank:
        yield from product("query_a", "q_a_proj", sizes.query_rank, hidden, bias)
        yield from norm("query_a_norm", "q_a_layernorm", sizes.query_rank)
        yield from product("query_b", "q_b_proj", queries, sizes.query_rank)
    else:
        yield from product("query", "q_proj", queries, hidden)
    yield from product("kv_a", "kv_a_proj_with_mqa", sizes.rank + sizes.rotated, hidden, bias)
    yield from norm("kv_a_norm", "kv_a_layernorm", sizes.rank)
    yield from product("kv_b", "kv_b_proj", heads * (sizes.plain + sizes.value), sizes.rank)
    output_bias = "output" in description.biases
    yield from product("output", "o_proj", hidden, heads * sizes.value, output_bias)


def _network(
    description: Description, at: Where, stems: Sequence[str], inner: int, ours: str = ""
) -> Iterator[Parameter]:
    hidden, bias = description.hidden, "mlp" in description.biases
    if description.gated:
        apart = [[(f"{s}.gate_proj", inner), (f"{s}.up_proj", inner)] for s in stems]
        joined = [[(f"{s}.gate_up_proj", 2 * inner)] for s in stems]
        yield from _product((*at, f"{ours}gate_up"), [*apart, *joined], hidden, bias)
    else:
        into = [[(f"{s}.{name}", inner)] for s in stems for name in ("up_proj", "c_fc", "fc1")]
        yield from _product((*at, f"{ours}up"), into, hidden, bias)
    out = [[(f"{s}.{name}", hidden)] for s in stems for name in ("down_proj", "c_proj", "fc2")]
    yield from _product((*at, f"{ours}down"), out, inner, bias)


def _experts(
    description: Description, routing: Routing, at: Where, prefix: str
) -> Iterator[Parameter]:
    count, hidden, inner = routing.count, description.hidden, routing.intermediate
    if count > MOST_EXPERTS:
        raise UnsupportedError(f"{count} experts in a layer: at most {MOST_EXPERTS} are run")
    stems = [f"{prefix}.mlp", f"{prefix}.block_sparse_moe"]
    routers = [[(f"{s}.{name}", count)] for s in stems for name in ("gate", "router")]
    yield from _product((*at, "router"), routers, hidden, "router" in description.biases)
    if routing.kind == "groups":
        ways = _named(f"{prefix}.mlp.gate.e_score_correction_bias", (count,))
        yield Parameter((*at, "router", "choice_bias"), (count,), ways, wide=True)
    biased = "experts" in description.biases
    stacked = _stacked_turned if biased else _stacked
    for name, shape, theirs in (
        ("gate_up", (count, 2 * inner, hidden), (("gate_proj", "up_proj"), ("w1", "w3"))),
        ("down", (count, hidden, inner), (("down_proj",), ("w2",))),
    ):
        each = (shape[1] // len(theirs[0]), shape[2])
        single = [
            Way(tuple((f"{s}.experts.{e}.{t}.weight", each) for e in range(count) for t in names))
            for s in stems
            for names in theirs
        ]
        whole = stacked(f"{prefix}.mlp.experts.{name}_proj", shape, name)
        yield Parameter((*at, "experts", name), shape, (*single, whole))
        if biased:
            bias = Way(
                ((f"{prefix}.mlp.experts.{name}_proj_bias", shape[:2]),),
                _apart if name == "gate_up" else None,
            )
            yield Parameter((*at, "experts", f"{name}_bias"), shape[:2], (bias,))
    if routing.shared:
        stems = [f"{prefix}.mlp.shared_experts", f"{prefix}.mlp.shared_expert"]
        yield from _network(description, at, stems, routing.shared, "shared_")
    if routing.shared_gate:
        gate = [[(f"{prefix}.mlp.shared_expert_gate", 1)]]
        yield from _product((*at, "shared_gate"), gate, hidden, False)


def _stacked(name: str, shape: Shape, _: str) -> Way:
    """All experts of a layer in one tensor, as they are computed with."""
    return Way(((name, shape),))


def _stacked_turned(name: str, shape: Shape, ours: str) -> Way:
    """All experts in one tensor whose matrices are transposed; of gates, each is beside its up."""
    turned = (shape[0], shape[2], shape[1])
    return Way(((name, turned),), _turned_apart if ours == "gate_up" else _turned)


def _turned(matrix: Any) -> Any:
    return matrix.T


def _turned_apart(matrix: Any) -> Any:
    return _apart(matrix.T)


def _apart(rows: Any) -> Any:
    """Rows 0, 2, 4 … and behind them rows 1, 3, 5 …"""
    return np.concatenate([rows[0::2], rows[1::2]])


def _norm(
    description: Description, at: Where, stems: Sequence[str], size: int
) -> Iterator[Parameter]:
    kinds = ("weight", "bias") if "norm" in description.biases else ("weight",)
    for kind in kinds:
        ways = tuple(Way(((f"{stem}.{kind}", (size,)),)) for stem in stems)
        yield Parameter((*at, kind), (size,), ways)


def _product(at: Where, ways: Sequence[Products], inputs: int, bias: bool) -> Iterator[Parameter]:
    """A matrix, and its bias where it has one, whose rows are those of one or several products."""
    rows = sum(count for _, count in ways[0])
    weights = (tuple((f"{name}.weight", (count, inputs)) for name, count in way) for way in ways)
    yield Parameter((*at, "weight"), (rows, inputs), tuple(map(Way, weights)))
    if bias:
        biases = (tuple((f"{name}.bias", (count,)) for name, count in way) for way in ways)
        yield Parameter((*at, "bias"), (rows,), tuple(map(Way, biases)))


def _named(name: str, shape: Shape) -> tuple[Way, ...]:
    return (Way(((name, shape),)),)


# --- checks -----------------------------------------------------------------------------------


def _parts(
    parameter: Parameter, stored: Mapping[str, Segment], source: Path
) -> tuple[Segment, ...]:
    """Return the stored tensors of a parameter, in order, by the first way that is there.

    Raises `TransferError` for a missing tensor or another shape, `UnsupportedError` for quantized
    weights.
    """
    way = parameter.ways[0]
    for other in parameter.ways:
        if other.tensors[0][0] in stored:
            way = other
            break
    parts: list[Segment] = []
    for name, shape in way.tensors:
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
                f"{_sizes(tensor.shape)}, but the config says {_sizes(shape)}; config and weights "
                "are of different models: download both again",
                tensor.name,
            )
        dtype = tensor.dtype
        if dtype.kind != "float" or dtype.bits < 16:
            raise UnsupportedError(
                f"{tensor.path}: the tensor {shortened(tensor.name)!r} is {dtype}: quantized "
                "weights cannot be run; get the model in bfloat16, float16 or float32"
            )
        if way.arrange is None:
            parts.append(stored[name])
        else:
            rows = range(tensor.shape[0])
            parts += [Segment(tensor.row(number), way.arrange) for number in rows]
    return tuple(parts)


def _sizes(shape: Shape) -> str:
    return shortened(str(shape))


_PASSED_OVER = re.compile(
    r"(^|\.)rotary_emb\.|\.attention\.(masked_)?bias$|\.attn\.(masked_)?bias$"
    r"|^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower"
    r"|patch_merger|vision_encoder|vision_adapter|vision_language_adapter|embed_vision)\."
)
"""Tensors of files that are no weights of the decoder: tables of frequencies, eyes and ears."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def _refuse_left_over(
    left: set[str], stored: Mapping[str, Segment], description: Description
) -> None:
    layers = {name: found[1] for name in left if (found := _LAYER.match(name))}
    ahead = {number for name, number in layers.items() if name.endswith(".eh_proj.weight")}
    tied = {"lm_head.weight"} if description.tied else set()
    left = {
        name
        for name in left - tied
        if not _PASSED_OVER.search(name) and layers.get(name) not in ahead
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


def _dtype(dtype: object, stored: Mapping[str, Segment]) -> DType:
    embedding = stored.get("model.embed_tokens.weight")
    if dtype is None and embedding is not None:
        return embedding.tensor.dtype
    return runnable_dtype(dtype or "float32")


def runnable_dtype(spec: object) -> DType:
    """The dtype of parameters that is asked for; `ConfigurationError` if none can have it."""
    wanted = as_dtype(spec)
    if wanted.kind != "float" or wanted.bits < 16:
        raise ConfigurationError(
            f"a decoder cannot be loaded as {wanted}; its dtype is 'bfloat16', 'float16' or "
            "'float32'",
            "dtype",
        )
    return wanted


_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")


def _by_usual_names(stored: Mapping[str, Segment]) -> dict[str, Segment]:
    """The tensors by the names that they have in a folder of a model for text alone.

    Of a folder for more than text, the decoder is under `language_model`; a decoder that was saved
    without its head has no prefix.
    """
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in stored), "model.")
    outer = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
    found = {}
    for name, part in stored.items():
        if name.startswith(prefix) and (prefix or not name.startswith("lm_head.")):
            name = f"model.{name[len(prefix) :]}"
        elif outer and name.startswith(outer):
            name = name[len(outer) :]
        found[name] = part
    return found
