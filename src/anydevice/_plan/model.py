"""The shape of a model that is given as a file, a folder, a module, a tree of arrays, or numbers.

The bytes of tensors that are there are exact. Layers, heads and vocabulary follow from the names
and sizes of the tensors where no config tells them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from anydevice._core.dtypes import as_dtype
from anydevice._core.record import Record, replace
from anydevice._core.text import shortened
from anydevice._plan.config import (
    NAMES,
    ModelConfig,
    ModelFiles,
    UncountableError,
    as_config,
    is_config_path,
    is_gguf_path,
    locate,
    read_config,
)
from anydevice._plan.decoder import decoder_shape
from anydevice._plan.encoder import encoder_shape
from anydevice._plan.encoder_families import ENCODERS
from anydevice._plan.families import (
    ARCHITECTURES,
    DENSE,
    SPARSE,
    ModelShape,
    float_dtype,
    memory_dtype,
)
from anydevice._plan.overheads import rounding
from anydevice._plan.quantization import QUANTIZED, quantized
from anydevice.errors import ConfigurationError

_KEYWORDS = {word: names[0] for word, names in NAMES.items()} | {
    "architecture": "model_type",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
}
"""The keywords of a shape that is given by numbers, and the keys of a config they stand for."""

_NEEDED = ("layers", "hidden", "intermediate", "heads", "vocabulary")


def shape_of(model: Any = None, *, dtype: object = None, **numbers: Any) -> ModelShape:
    """Return the shape of a model, with its weights in `dtype`, by default in its own.

    `dtype` is a float; "int8" and "int4" are the model in its own dtype with quantized layers.
    `model` is one of these; nothing of it is loaded, and no array library is imported for the
    first four:

    - the path of a Hugging Face `config.json` or of the folder it is in, or the name of a model
      in the local Hugging Face cache;
    - the path of safetensors files, or of a GGUF file, of which only the headers are read;
    - a config as a mapping;
    - `None`, with the dimensions as keywords: `layers hidden intermediate heads vocabulary`, and
      optionally `kv_heads head_size tied window experts experts_per_token expert_size
      architecture`;
    - a `torch.nn.Module`, on any device and on `meta`, or any tree of arrays.

    >>> shape = shape_of(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
    ...                  vocabulary=32000)
    >>> shape.parameters, shape.exact
    (7241732096, True)

    Raises `ConfigurationError` for an unknown model, or for missing or inconsistent dimensions, and
    `TransferError` for invalid safetensors files.
    """
    name = None if dtype is None else memory_dtype(dtype).name
    if name in QUANTIZED:
        return quantized(shape_of(model, **numbers), name)
    if name is not None:
        float_dtype("dtype, if it is not 'int8' or 'int4',", name)
    if model is None:
        return _from_config(_from_numbers(numbers), name)
    if numbers:
        raise ConfigurationError(
            f"give a model or its dimensions ({', '.join(sorted(numbers))}), not both"
        )
    if isinstance(model, ModelShape):
        if name in (None, model.dtype):
            return model
        counted = f"this shape's weights are counted in {model.dtype}"
        raise ConfigurationError(f"{counted}; for {name}, give the model itself")
    if isinstance(model, ModelFiles):
        return _from_files(model, name)
    if isinstance(model, str | os.PathLike):
        return _from_path(model, name)
    if isinstance(model, Mapping) and _is_config(model):
        return _from_config(as_config(model), name)
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return _from_config(as_config(model.to_dict()), name)
    return _from_tree(model, name)


def _from_config(config: ModelConfig, dtype: str | None, *, partly: bool = False) -> ModelShape:
    """The shape of the model that a config describes, its weights in `dtype` or in its own.

    Raises `ConfigurationError` if the model is not in the tables, or is so only partly; if a number
    is missing, wrong, or does not go with another.
    """
    if not config.known:
        known = f"one of the {len(ARCHITECTURES) + len(ENCODERS)} that are known"
        called = f"the architecture {shortened(config.family)!r} is not {known}"
        raise config.refusal(called if config.family else "it has no model_type")
    if config.part and not partly:
        raise config.refusal(f"beside {config.part} it has parts that are not in the table")
    if config.get("per_layer_config"):
        raise config.refusal("layers that differ (per_layer_config) are not in the table")
    try:
        count = encoder_shape if config.encoder else decoder_shape
        return count(config, dtype)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # A value of an unexpected type is an error of the file, not of this code.
        raise ConfigurationError(
            f"{config.source} has a value that is not valid: {error}", config.source
        ) from error


def _from_numbers(numbers: Mapping[str, Any]) -> ModelConfig:
    unknown = [word for word in numbers if word not in _KEYWORDS]
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: unknown dimension; known are {', '.join(_KEYWORDS)}"
        )
    missing = [word for word in _NEEDED if numbers.get(word) is None]
    if missing:
        raise ConfigurationError(
            f"give a model, or its dimensions: {', '.join(missing)} are missing"
        )
    # `None` is the same as not given, but a window of `None` says that there is none.
    given = {word: n for word, n in numbers.items() if n is not None or word == "window"}
    values = {_KEYWORDS[word]: number for word, number in given.items()}
    family = SPARSE if numbers.get("experts") else DENSE
    defaults = {"model_type": family, "num_key_value_heads": numbers["heads"]}
    return as_config({**defaults, **values}, "the shape")


def _from_path(model: str | os.PathLike[str], dtype: str | None) -> ModelShape:
    path = locate(os.fspath(model), planning=True)
    if not is_config_path(path):
        if path.is_dir() and not any(".safetensors" in name for name in os.listdir(path)):
            raise ConfigurationError(
                f"{path} holds neither a config.json nor a .safetensors file; give the folder of "
                "a model, its config.json, or the files with its weights",
                str(path),
            )
        return _shape_from_tensors(_tensors_of_files(path), dtype, path.resolve().stem)
    files = ModelFiles(path, read_config(path))
    if is_gguf_path(path) or path == Path(model).expanduser():
        return _from_files(files, dtype)
    # A folder in the cache is named by a commit.
    return replace(_from_files(files, dtype), name=os.fspath(model))


def _from_files(files: ModelFiles, dtype: str | None) -> ModelShape:
    path, config = files.path, files.config
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    try:
        shape = _from_config(config, dtype, partly=has_weights)
    except UncountableError as error:
        if not has_weights:
            raise
        shape = _shape_from_tensors(_tensors_of_files(path), dtype, files.name)
        return replace(shape, assumed=(*shape.assumed, f"its config does not help: {error.reason}"))
    shape = replace(shape, name=files.name or shape.name)
    if shape.exact or not has_weights:
        return shape
    # For an unknown format or family, headers tell the weights better than a config does.
    in_dtype = None if shape.quantization else dtype
    weights = _weights(_tensors_of_files(path), shape.layers, in_dtype)
    note = "weights are counted from the files' headers"
    return replace(shape, **weights, assumed=(*shape.assumed, note))


def _from_tree(tree: Any, dtype: str | None) -> ModelShape:
    tensors = _tensors_of_tree(tree)
    kind = type(tree).__name__
    measured = _shape_from_tensors(tensors, dtype, kind)
    described = getattr(getattr(tree, "config", None), "to_dict", None)
    if described is None:
        return measured
    own = (cls.__name__ for cls in type(tree).__mro__ if cls.__module__.startswith("transformers."))
    named = {"architectures": [name]} if (name := next(own, None)) else {}
    try:
        config = as_config({**described(), **named})
        shape = _from_config(config, dtype or measured.dtype, partly=True)
    except ConfigurationError:
        note = "its config is not that of a model in the tables"
        return replace(measured, assumed=(*measured.assumed, note))
    if not shape.towers:
        return replace(shape, **_weights(tensors, shape.layers, dtype), name=kind)
    # The layers of several towers have the same numbers in their names.
    if shape.weight_bytes == measured.weight_bytes:
        return replace(shape, name=kind)
    return replace(measured, assumed=(*measured.assumed, "it is not as its config says"))


def _is_config(values: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a config and not a tree of arrays."""
    if "model_type" in values or "architectures" in values:
        return True
    names = (name for word in _NEEDED for name in NAMES[word])
    return any(isinstance(values.get(name), int) for name in names)


_LAYER = re.compile(r"(?:layers?|blocks?|\bh)['\"]?\]?[._\[]['\"]?(\d{1,5})(?!\d)")
_EMBEDDING = re.compile(r"embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|token_embedding")
_HEAD = re.compile(r"lm_head|embed_out|output_projection")
_KEYS = re.compile(r"(?:k_proj|key_proj|\bwk)\W*(?:weight|kernel)")
_FUSED = re.compile(r"(?:qkv_proj|c_attn|query_key_value|\bwqkv)\W*(?:weight|kernel)", re.I)
# Where attention has a c_proj as well, the network's is the one meant.
_DOWN = re.compile(r"(?:down_proj|fc2|mlp\W+c_proj|dense_4h_to_h|\bw2)\W*(?:weight|kernel)")


class _Tensor(Record):
    """One tensor of a model; `held` are its bytes, 0 if it shares another's memory."""

    name: str
    sizes: tuple[int, ...]
    dtype: str
    held: int

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return prod(self.sizes)

    @property
    def layer(self) -> int | None:
        """The number of its layer, by its name."""
        found = _LAYER.search(self.name)
        return int(found[1]) if found else None

    @property
    def is_weight(self) -> bool:
        """Whether it is learned, as far as its name tells: tables of frequencies are not."""
        return bool(self.sizes) and "inv_freq" not in self.name

    def bytes_in(self, dtype: str | None) -> int:
        """Return its bytes in `dtype`; quantized tensors, integers and buffers stay as they are."""
        row = as_dtype(self.dtype)
        if dtype is None or row.kind != "float" or row.bits < 16 or not self.is_weight:
            return self.held
        return self.elements * as_dtype(dtype).itemsize


def _tensors_of_tree(tree: Any) -> list[_Tensor]:
    """Every array of a tree or a `torch.nn.Module`; shared memory counts once, nothing is read.

    Raises `ConfigurationError` if the tree holds no array.
    """
    # Slow to load, as the reader of files is: a plan of a config.json goes without both.
    from anydevice._arrays.trees.tree import flatten
    from anydevice._machine.engines.registry import owner_of

    leaves, _ = flatten(tree, lambda value: owner_of(value) is not None)
    found: list[_Tensor] = []
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
        found.append(_Tensor(leaf.path, sizes, dtype.name, held))
    if not found:
        raise ConfigurationError(
            f"{type(tree).__name__} holds no array: give a model, a tree of arrays, or the path of "
            "a config.json or of safetensors files"
        )
    return found


def _tensors_of_files(path: Path) -> list[_Tensor]:
    """Every tensor of a safetensors file, a folder or an index of them, from the headers alone.

    Raises `TransferError` if the files are missing or not valid.
    """
    from anydevice._formats.safetensors import read_model

    return [
        _Tensor(name, entry.shape, entry.dtype.name, entry.nbytes)
        for name, entry in read_model(path).items()
    ]


def _shape_from_tensors(there: list[_Tensor], dtype: str | None, name: str) -> ModelShape:
    """A shape from names and sizes alone; what they do not tell is 0, and `assumed` says so."""
    layers = 1 + max((each.layer for each in there if each.layer is not None), default=-1)
    embedding = _first(there, _EMBEDDING)
    hidden = embedding.sizes[1] if embedding else 0
    down = _first(there, _DOWN)
    per_token = _cache_elements(there, hidden)
    assumed = ["weights are those of the tensors; the rest follows from their names and sizes"]
    if not per_token:
        assumed.append("no key projections were found: no key/value cache is counted")
    if embedding is None or down is None or not layers:
        assumed.append("no decoder was found in the names: no activations are counted")
        hidden = 0
    common: Counter[str] = Counter()
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
        outputs=embedding.sizes[0] if embedding else 0,
        exact=False,
        assumed=tuple(assumed),
    )


def _cache_elements(tensors: list[_Tensor], hidden: int) -> int:
    """The elements of a token in a layer's cache: its key and its value."""
    keys, fused = _first(tensors, _KEYS), _first(tensors, _FUSED)
    if keys is not None:
        return 2 * min(keys.sizes)
    # Queries, keys and values in one matrix: all but the queries.
    return max(0, fused.elements // hidden - hidden) if fused and hidden else 0


def _first(tensors: list[_Tensor], pattern: re.Pattern[str]) -> _Tensor | None:
    matching = (each for each in tensors if len(each.sizes) == 2 and pattern.search(each.name))
    return next(matching, None)


def _weights(tensors: list[_Tensor], layers: int, dtype: str | None) -> Mapping[str, Any]:
    """The fields of a shape that count weights; names tell the layer of a tensor."""
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
