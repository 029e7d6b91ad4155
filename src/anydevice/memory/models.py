"""The shape of whatever stands for a model: a file, a folder, a tree of arrays, or keywords."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice.core.dtypes import as_dtype
from anydevice.core.record import replace
from anydevice.errors import ConfigurationError
from anydevice.memory.blueprints import shape_from_config
from anydevice.memory.configs import NAMES, Config, as_config, is_config_path, read_config
from anydevice.memory.hub_cache import locate
from anydevice.memory.quantization import QUANTIZED, quantized
from anydevice.memory.shapes import ModelShape, float_type

_KEYWORDS = {word: names[0] for word, names in NAMES.items()} | {
    "architecture": "model_type",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
}
"""The words for a shape that is given by numbers, and the keys of a config that they stand for."""

_NEEDED = ("layers", "hidden", "intermediate", "heads", "vocabulary")


def shape_of(model: Any = None, *, dtype: object = None, **numbers: Any) -> ModelShape:
    """The shape of a model, with its weights in `dtype`, or in its own type where that is `None`.

    `dtype` is a float; "int8" and "int4" are the model in its own type with quantized layers.
    `model` is one of these; nothing of it is loaded, and no array library is imported for the
    first four:

    - the path of a Hugging Face `config.json` or of the folder it is in, or the name of a model
      in the local Hugging Face cache;
    - the path of safetensors files, of which only the headers are read;
    - a config as a mapping;
    - nothing, with numbers instead: `layers hidden intermediate heads vocabulary`, and where they
      matter `kv_heads head_size tied window experts experts_per_token expert_size architecture`;
    - a `torch.nn.Module`, on any device and on `meta`, or any tree of arrays.

    >>> shape = shape_of(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
    ...                  vocabulary=32000)
    >>> shape.parameters, shape.exact
    (7241732096, True)

    Raises `ConfigurationError` for what is no model, misses a number, or has numbers that do not
    go together, and `TransferError` for safetensors files that are not right.
    """
    name = None if dtype is None else as_dtype(dtype).name
    if name in QUANTIZED:
        return quantized(shape_of(model, **numbers), name)
    if name is not None:
        float_type("dtype, if it is not 'int8' or 'int4',", name)
    if model is None:
        return shape_from_config(_from_numbers(numbers), name)
    if numbers:
        raise ConfigurationError(
            f"a model is given, and {', '.join(sorted(numbers))} beside it: give one or the other"
        )
    if isinstance(model, ModelShape):
        return _in_dtype(model, name)
    if isinstance(model, str | os.PathLike):
        return _from_path(model, name)
    if isinstance(model, Mapping) and _is_config(model):
        return shape_from_config(as_config(model), name)
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return shape_from_config(as_config(model.to_dict()), name)
    return _from_tree(model, name)


def _in_dtype(shape: ModelShape, dtype: str | None) -> ModelShape:
    if dtype is None or dtype == shape.dtype:
        return shape
    raise ConfigurationError(
        f"this shape's weights are counted in {shape.dtype}; for {dtype}, give the model itself"
    )


def _from_numbers(numbers: Mapping[str, Any]) -> Config:
    unknown = [word for word in numbers if word not in _KEYWORDS]
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: a shape has no such number; the words are "
            f"{', '.join(_KEYWORDS)}"
        )
    missing = [word for word in _NEEDED if numbers.get(word) is None]
    if missing:
        raise ConfigurationError(
            f"a model is missing, or these numbers of its shape: {', '.join(missing)}"
        )
    # No number is as good as none given, but no window says that all is kept.
    values = {
        _KEYWORDS[word]: value
        for word, value in numbers.items()
        if value is not None or word == "window"
    }
    usual = "mixtral" if numbers.get("experts") else "llama"
    defaults = {"model_type": usual, "num_key_value_heads": numbers["heads"]}
    return as_config({**defaults, **values}, "the shape")


def _from_path(model: str | os.PathLike[str], dtype: str | None) -> ModelShape:
    path = locate(os.fspath(model))
    if not is_config_path(path):
        if path.is_dir() and not any(".safetensors" in name for name in os.listdir(path)):
            raise ConfigurationError(
                f"{path} holds neither a config.json nor a .safetensors file; give the folder of "
                "a model, its config.json, or the files with its weights",
                str(path),
            )
        return _from_files(path, dtype)
    config = read_config(path)
    shape = shape_from_config(config, dtype)
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    if path != Path(model).expanduser():
        name = os.fspath(model)  # its folder in the cache is called by a commit's number
    shape = replace(shape, name=name or shape.name)
    if shape.exact or not path.is_dir() or not _has_files(path):
        return shape
    from anydevice.memory.measured_trees import tensors_of_files, with_tensors

    # What a format or an unknown family makes of the weights is better read than reckoned.
    there = with_tensors(shape, tensors_of_files(path), dtype if not shape.quantization else None)
    return replace(there, assumed=(*there.assumed, "weights are counted from the files' headers"))


def _from_files(path: Path, dtype: str | None) -> ModelShape:
    # Slow to load: a plan of a config.json goes without it.
    from anydevice.memory.measured_trees import shape_from_tensors, tensors_of_files

    return shape_from_tensors(tensors_of_files(path), dtype, path.resolve().stem)


def _from_tree(tree: Any, dtype: str | None) -> ModelShape:
    from anydevice.memory.measured_trees import shape_from_tensors, tensors_of_tree, with_tensors

    tensors = tensors_of_tree(tree)
    kind = type(tree).__name__
    measured = shape_from_tensors(tensors, dtype, kind)
    described = getattr(getattr(tree, "config", None), "to_dict", None)
    if described is None:
        return measured
    try:
        shape = shape_from_config(as_config(described()), dtype or measured.dtype)
    except ConfigurationError as error:
        note = f"its config is no language model's ({error})"
        return replace(measured, assumed=(*measured.assumed, note))
    there = with_tensors(shape, tensors, dtype)
    return replace(there, name=kind, exact=shape.exact)


def _is_config(values: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a config and not a tree of arrays: it names a type or a plain number."""
    if "model_type" in values or "architectures" in values:
        return True
    names = (name for word in _NEEDED for name in NAMES[word])
    return any(isinstance(values.get(name), int) for name in names)


def _has_files(folder: Path) -> bool:
    return any(name.endswith(".safetensors") for name in os.listdir(folder))
