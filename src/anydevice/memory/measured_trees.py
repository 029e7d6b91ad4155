"""Shapes of models whose tensors are there: modules, trees of arrays, and safetensors files.

What the tensors weigh is exact. What their names and sizes tell of layers, heads and vocabulary is
used for the rest, where no config says it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from anydevice.core.dtypes import as_dtype
from anydevice.core.record import Record, replace
from anydevice.engines.ownership import owner_of
from anydevice.errors import ConfigurationError
from anydevice.memory.overheads import rounding
from anydevice.memory.shapes import ModelShape
from anydevice.transfer.safetensors_files import read_model
from anydevice.transfer.tree import flatten

_LAYER = re.compile(r"(?:layers?|blocks?|\bh)['\"]?\]?[._\[]['\"]?(\d+)")
_EMBEDDING = re.compile(r"embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|token_embedding")
_HEAD = re.compile(r"lm_head|embed_out|output_projection")
_KEYS = re.compile(r"(?:k_proj|key_proj|\bwk)\W*(?:weight|kernel)")
_FUSED = re.compile(r"(?:qkv_proj|c_attn|query_key_value|\bwqkv)\W*(?:weight|kernel)", re.I)
# Where attention has a c_proj as well, the network's is the one meant.
_DOWN = re.compile(r"(?:down_proj|fc2|mlp\W+c_proj|dense_4h_to_h|\bw2)\W*(?:weight|kernel)")


class Tensor(Record):
    """One tensor of a model: its name, its sizes, its element type, and the bytes that it holds."""

    name: str
    sizes: tuple[int, ...]
    dtype: str
    held: int

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.sizes)

    @property
    def layer(self) -> int | None:
        """The number of the layer that its name puts it into."""
        found = _LAYER.search(self.name)
        return int(found[1]) if found else None

    @property
    def is_weight(self) -> bool:
        """Whether it is learned, as far as its name tells: tables of frequencies are not."""
        return bool(self.sizes) and "inv_freq" not in self.name

    def bytes_in(self, dtype: str | None) -> int:
        """Its bytes once its numbers are in `dtype`; what is quantized or whole stays as it is."""
        row = as_dtype(self.dtype)
        if dtype is None or row.kind != "float" or row.bits < 16 or not self.is_weight:
            return self.held
        return self.elements * as_dtype(dtype).itemsize


def tensors_of_tree(tree: Any) -> list[Tensor]:
    """Every array of a tree, or of a `torch.nn.Module`, each memory once; none is read or moved.

    Raises `ConfigurationError` where the tree holds no array.
    """
    leaves, _ = flatten(tree, lambda value: owner_of(value) is not None)
    found: list[Tensor] = []
    seen: set[object] = set()
    for leaf in leaves:
        engine = owner_of(leaf.value)
        assert engine is not None
        sizes = tuple(int(size) for size in leaf.value.shape)
        dtype = engine.dtype_of(leaf.value)
        storage = None if engine.is_traced(leaf.value) else engine.storage(leaf.value)
        held = prod(sizes) * dtype.itemsize
        if storage is not None:
            place = (str(engine.devices_of(leaf.value)), storage.allocation)
            held = 0 if place in seen else storage.size
            seen.add(place)
        found.append(Tensor(leaf.path, sizes, dtype.name, held))
    if not found:
        raise ConfigurationError(
            f"{type(tree).__name__} holds no array: give a model, a tree of arrays, or the path of "
            "a config.json or of safetensors files"
        )
    return found


def tensors_of_files(path: Path) -> list[Tensor]:
    """Every tensor of a safetensors file, a folder or an index of them, from the headers alone.

    Raises `TransferError` where the files are not there or not right.
    """
    return [
        Tensor(name, placed.entry.shape, placed.entry.dtype.name, placed.entry.nbytes)
        for name, placed in read_model(path).items()
    ]


def with_tensors(shape: ModelShape, tensors: Iterable[Tensor], dtype: str | None) -> ModelShape:
    """A shape from a config, with the weights that are there in place of those that follow."""
    there = list(tensors)
    return replace(shape, **_weights(there, shape.layers, dtype))


def shape_from_tensors(
    tensors: Iterable[Tensor], dtype: str | None, name: str = "model"
) -> ModelShape:
    """A shape from names and sizes alone; what they do not tell is 0, and `assumed` says so."""
    there = list(tensors)
    layers = 1 + max((each.layer for each in there if each.layer is not None), default=-1)
    embedding = _first(there, _EMBEDDING)
    hidden = embedding.sizes[1] if embedding else 0
    down = _first(there, _DOWN)
    per_token = _cached(there, hidden)
    assumed = ["weights are those of the tensors; the rest follows from their names and sizes"]
    if not per_token:
        assumed.append("no key projections were found: no key/value cache is counted")
    if embedding is None or down is None or not layers:
        assumed.append("no decoder was found in the names: no activations are counted")
        hidden = 0
    common = Counter({each.dtype: 0 for each in there})
    for each in there:
        common[each.dtype] += each.held
    floats = [kind for kind, _ in common.most_common() if as_dtype(kind).kind == "float"]
    heads = hidden // 128 or 1
    return ModelShape(
        name=name,
        architecture="unknown",
        dtype=dtype or (floats[0] if floats else "bfloat16"),
        layers=layers,
        hidden=hidden,
        intermediate=max(down.sizes) if down and hidden else 0,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        vocabulary=embedding.sizes[0] if embedding else 0,
        tied_embeddings=_first(there, _HEAD) is None,
        **_weights(there, layers, dtype),
        kv_elements=(per_token,) * layers,
        windows=(None,) * layers,
        exact=False,
        assumed=tuple(assumed),
    )


def _cached(tensors: list[Tensor], hidden: int) -> int:
    """The numbers that a token leaves in a layer's cache: its key and its value."""
    keys, fused = _first(tensors, _KEYS), _first(tensors, _FUSED)
    if keys is not None:
        return 2 * min(keys.sizes)
    # Queries, keys and values in one matrix: what is beside the queries.
    return max(0, fused.elements // hidden - hidden) if fused and hidden else 0


def _first(tensors: list[Tensor], pattern: re.Pattern[str]) -> Tensor | None:
    matching = (each for each in tensors if len(each.sizes) == 2 and pattern.search(each.name))
    return next(matching, None)


def _weights(tensors: list[Tensor], layers: int, dtype: str | None) -> Mapping[str, Any]:
    """The fields of a shape that count weights, each tensor where its name puts it."""
    elements, held = [0] * layers, [0] * layers
    outside = {"embedding": [0, 0], "head": [0, 0], "other": [0, 0]}
    for each in tensors:
        number, size = each.layer, each.bytes_in(dtype) if each.held else 0
        count = each.elements if each.held and each.is_weight else 0
        if number is not None and number < layers:
            elements[number] += count
            held[number] += size
            continue
        head = _HEAD.search(each.name)
        part = "head" if head else "embedding" if _EMBEDDING.search(each.name) else "other"
        outside[part][0] += count
        outside[part][1] += size
    found: dict[str, Any] = {"layer_weights": tuple(elements), "layer_bytes": tuple(held)}
    matrices = (each for each in tensors if each.held and len(each.sizes) > 1)
    found["rounding"] = rounding(each.bytes_in(dtype) for each in matrices)
    for part, (count, size) in outside.items():
        found[f"{part}_parameters"], found[f"{part}_bytes"] = count, size
    return found
