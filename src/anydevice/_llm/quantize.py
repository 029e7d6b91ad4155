"""A model's files as one GGUF file with quantized weights.

The header is written first, read back, and compared with the source: a file is made only if it
describes the same decoder and the same tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from anydevice._core.files import (
    PlainFile,
    check_folder,
    check_writable,
    expanded,
    remove_leftovers,
)
from anydevice._core.record import Record, replace
from anydevice._core.rope_scaling import frequencies
from anydevice._core.text import format_size, shortened
from anydevice._formats.gguf import GgufFile, gguf_names, read_gguf
from anydevice._formats.gguf_tokenizer import tokenizer_metadata
from anydevice._formats.gguf_writer import (
    ALIGNMENT,
    FILE_TYPES,
    NewTensor,
    choose_kind,
    header,
    write_gguf,
)
from anydevice._formats.load import Segment, progress_in_bytes
from anydevice._llm.description import Description, Rope, describe
from anydevice._llm.tokenizer import SPLITTINGS, TOKENIZER, Tokenizer
from anydevice._llm.weights import decoder_tensors
from anydevice._plan.config import (
    ModelConfig,
    gguf_config,
    is_gguf_path,
    locate,
    read_config,
    title_of,
)
from anydevice.errors import (
    AnyDeviceError,
    ConfigurationError,
    TransferError,
    UnsupportedError,
)

_DROPPED = (
    *("general.file_type", "general.quantization_version", "general.alignment"),
    *("split.no", "split.count", "split.tensors.count"),
)


class QuantizedFile(Record):
    """A GGUF file that was written: its bytes, its parameters, and its tensors of each type."""

    path: Path
    scheme: str
    nbytes: int
    parameters: int
    kinds: Mapping[str, int]

    @property
    def bits(self) -> float:
        """The bits of the file for each parameter."""
        return 8 * self.nbytes / self.parameters


def quantize(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    scheme: str = "q4_k_m",
    *,
    force: bool = False,
    progress: bool | None = None,
) -> QuantizedFile:
    """Write a language model as a GGUF file with quantized weights.

    `folder` is what `llm.load` takes: a folder, a name in the Hugging Face cache, or a GGUF file,
    whose weights are unpacked and quantized again. `scheme` is "q8_0", "q6_k", "q5_k_m", "q4_k_m",
    "q5_0", "q5_1", "q4_0", "q4_1" or "f16". Tensors get the types that llama.cpp gives them: more
    bits for the head and some matrices, none fewer than 16 for norms, biases and routers.

    Rows are quantized a few at a time. The file appears when it is complete; an error or Ctrl-C
    leaves none. `force` replaces an existing file. A slow write shows its progress, as in `load`.

    Raises `ConfigurationError` for an unknown scheme or an existing file, `UnsupportedError` for a
    model that GGUF cannot describe exactly, and `TransferError` for weights that are NaN or
    infinite, with the tensor, and for a file that cannot be written.
    """
    if scheme not in FILE_TYPES:
        raise ConfigurationError(
            f"there is no scheme {shortened(repr(scheme))}; files have {', '.join(FILE_TYPES)}",
            "scheme",
        )
    source, target = locate(os.fspath(folder)), expanded(path)
    if target.exists() and not force:
        raise ConfigurationError(f"{target} exists; force=True (--force) replaces it", "path")
    check_folder(target)
    if is_gguf_path(source):
        metadata, tensors = _read_gguf_source(read_gguf(source))
    else:
        metadata, tensors = _read_folder(source)
    metadata["general.file_type"] = FILE_TYPES[scheme].number
    if scheme != "f16":
        metadata["general.quantization_version"] = 2
    names = {tensor.name for tensor in tensors}
    layers = len({name.split(".")[1] for name in names if name.startswith("blk.")})
    stacks = [tensor.shape[0] for tensor in tensors if ".ffn_gate_exps." in tensor.name]
    rule = layers, max(stacks, default=0), "output.weight" not in names
    tensors = [replace(tensor, kind=choose_kind(tensor, scheme, *rule)) for tensor in tensors]
    if not is_gguf_path(source):
        _check_header(source, metadata, tensors)
    check_writable(target)
    remove_leftovers(target)
    size = len(header(metadata, tensors)) + sum(tensor.nbytes for tensor in tensors)
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise TransferError(
            f"{target} cannot be written: it takes {format_size(size)}, and {format_size(free)} "
            "are free there"
        )

    def count() -> int:
        return sum(part.tensor.nbytes for tensor in tensors for part in tensor.parts)

    with progress_in_bytes(count, progress, "quantizing weights") as advance:
        write_gguf(target, metadata, tensors, advance)
    kinds = Counter(tensor.kind for tensor in tensors)
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    return QuantizedFile(target, scheme, target.stat().st_size, parameters, dict(kinds))


def _read_gguf_source(file: GgufFile) -> tuple[dict[str, Any], list[NewTensor]]:
    """Return the metadata of a GGUF file, in bytes as it has them, and its tensors."""
    gguf_config(file)  # raises for a file that is not read
    metadata: dict[str, Any] = {}
    with PlainFile(file.path, file.stamp) as opened:
        for key, (start, end) in file.spans.items():
            if key not in _DROPPED:
                metadata[key] = bytes(opened.read(end - start, start))
    tensors = [NewTensor(t.name, t.shape, (Segment(t),)) for t in file.tensors.values()]
    return metadata, tensors


# --- a folder as GGUF ---------------------------------------------------------------------------


def _read_folder(folder: Path) -> tuple[dict[str, Any], list[NewTensor]]:
    """Return the metadata and the tensors of a GGUF file for a folder."""
    config = read_config(folder)
    description, spec = describe(config), config.architecture.gguf
    if spec is None:
        raise UnsupportedError(
            f"{folder}: models of the family {shortened(config.family)} are not written as GGUF"
        )
    metadata: dict[str, Any] = {
        "general.architecture": spec.architecture,
        "general.type": "model",
        "general.name": title_of(folder),
    }
    for key, value in _numbers(config, description).items():
        metadata[f"{spec.architecture}.{key}"] = value
    metadata |= _tokenizer(folder, description.vocabulary)
    stored = decoder_tensors(folder, description)
    tensors: dict[str, NewTensor] = {}
    for name, (own, expert) in gguf_names(spec.architecture, stored).items():
        part = stored[name]
        if not own:
            raise UnsupportedError(
                f"{part.tensor.path}: GGUF has no name for the tensor {shortened(name)!r} of "
                f"{spec.architecture}"
            )
        if description.norm == "rms1" and own.endswith("norm.weight"):
            part = replace(part, arrange=partial(np.add, np.float32(1)))
        if spec.permuted and (".attn_q." in own or ".attn_k." in own):
            part = replace(part, arrange=partial(_interleave, size=description.head_size))
        shape, before = part.tensor.shape, tensors.get(own)
        if expert is not None:
            shape = (1 if before is None else 1 + before.shape[0], *shape)
        elif ".ffn_gate_inp_shexp." in own:
            shape = shape[1:]
        parts = () if before is None else before.parts
        tensors[own] = NewTensor(own, shape, (*parts, part))
    return metadata, [*tensors.values(), *_rope_tables(description)]


def _interleave(weights: Any, size: int) -> Any:
    """Reorder rows of queries or keys from two halves to interleaved pairs."""
    heads, rest = weights.shape[0] // size, weights.shape[1:]
    return weights.reshape(heads, 2, size // 2, *rest).swapaxes(1, 2).reshape(weights.shape)


def _numbers(config: ModelConfig, description: Description) -> dict[str, Any]:
    """Return the metadata of a decoder; keys lack the name of its architecture."""
    plain = next((layer.rope for layer in description.layers if layer.rope), None)
    whole = next((x.rope for x in description.layers if x.rope and x.window is None), plain)
    routing = next((layer.experts for layer in description.layers if layer.experts), None)
    window = next((layer.window for layer in description.layers if layer.window), None)
    norm = "layer_norm" if description.norm == "layer" else "layer_norm_rms"
    numbers: dict[str, Any] = {
        "context_length": config.optional("longest_context"),
        "block_count": len(description.layers),
        "embedding_length": description.hidden,
        "feed_forward_length": description.intermediate,
        "vocab_size": description.vocabulary,
        "attention.head_count": description.heads,
        "attention.head_count_kv": description.kv_heads,
        "attention.key_length": description.head_size,
        "attention.value_length": description.value_size,
        f"attention.{norm}_epsilon": description.eps,
        "attention.sliding_window": window,
        "attn_logit_softcapping": description.soft_cap,
        "final_logit_softcapping": description.final_soft_cap,
    }
    if whole is not None:
        numbers |= {"rope.dimension_count": whole.size, "rope.freq_base": whole.theta}
        numbers |= _rope_numbers(config, dict(whole.scaling))
    if config.architecture.forward and config.architecture.forward.embedding_scale:
        numbers |= {
            "attention.scale": description.scale,
            "embedding_scale": description.embedding_scale,
            "residual_scale": description.residual_scale,
            "logit_scale": 1 / description.logit_scale,
        }
    if routing is not None:
        numbers |= {
            "expert_count": routing.count,
            "expert_used_count": routing.per_token,
            "expert_feed_forward_length": routing.intermediate,
            "expert_shared_feed_forward_length": routing.shared or None,
        }
    return {key: value for key, value in numbers.items() if value is not None}


def _rope_numbers(config: ModelConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    kind = scaling.get("rope_type")
    if kind not in ("linear", "yarn", "longrope"):
        return {}
    original = scaling["original_max_position_embeddings"]
    numbers = {"rope.scaling.type": kind, "rope.scaling.original_context_length": original}
    if kind != "longrope":
        return {**numbers, "rope.scaling.factor": float(scaling["factor"])}
    factor = frequencies(2 * len(scaling["long_factor"]), 1e4, scaling)[1]
    return {**numbers, "rope.scaling.attn_factor": factor}


def _rope_tables(description: Description) -> list[NewTensor]:
    """Return the factors of frequencies that GGUF has as tensors."""
    for rope in (layer.rope for layer in description.layers if layer.rope):
        scaling = dict(rope.scaling)
        if scaling.get("rope_type") == "longrope":
            tables = {f"factors_{kind}": scaling[f"{kind}_factor"] for kind in ("long", "short")}
        elif scaling.get("rope_type") == "llama3":
            plain = frequencies(rope.size, rope.theta, None)[0]
            scaled = frequencies(rope.size, rope.theta, scaling)[0]
            tables = {"freqs": [a / b for a, b in zip(plain, scaled, strict=True)]}
        else:
            continue
        return [
            NewTensor(f"rope_{name}.weight", (len(table),), numbers=np.asarray(table, np.float32))
            for name, table in tables.items()
        ]
    return []


def _tokenizer(folder: Path, size: int) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer."""
    tokenizer = Tokenizer.from_folder(folder)
    values = json.loads((folder / TOKENIZER).read_bytes())
    metadata = tokenizer_metadata(values, size, SPLITTINGS)
    if metadata is None:
        raise UnsupportedError(f"{folder}: its tokenizer is of a kind that GGUF files do not have")
    if len(metadata["tokenizer.ggml.tokens"]) > size:
        raise ConfigurationError(
            f"{folder}: its tokenizer has {len(metadata['tokenizer.ggml.tokens'])} tokens, and the "
            f"model only {size}: {TOKENIZER} belongs to another model",
            str(folder),
        )
    number_of = {token: n for n, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ids = {"bos": tokenizer.bos_id}
    ids |= dict(zip(("eos", "eot", "eom"), tokenizer.ends, strict=False))
    for name, key in (("unk", "unknown"), ("pad", "padding")):
        ids[key] = number_of.get(tokenizer.special_tokens.get(f"{name}_token", ""))
    metadata["tokenizer.ggml.add_bos_token"] = tokenizer.adds_bos
    for name, number in ids.items():
        if number is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = number
    template = tokenizer.templates.get("default")
    return metadata | ({"tokenizer.chat_template": template.text} if template else {})


_SAMPLE = "Hello, World! It's 1234.5 naïve  cafés —\n\n\tdef f(x): return x**2  # 你好 🙂 "


def _check_header(folder: Path, metadata: Mapping[str, Any], tensors: list[NewTensor]) -> None:
    """Raise `UnsupportedError` if a header describes another decoder or tokenizer."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "header.gguf")
        with path.open("wb") as file:
            at = file.write(header(metadata, tensors))
            for tensor in tensors:
                file.seek(at)
                if tensor.numbers is not None:
                    file.write(tensor.numbers.tobytes())
                at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            file.truncate(at)  # what is not written takes no room on the disk
        try:
            written = read_gguf(path)
            theirs, other = describe(gguf_config(written)), Tokenizer.from_gguf(written)
        except AnyDeviceError as error:
            raise UnsupportedError(f"{folder} cannot be described in GGUF: {error}") from error
    ours, one = describe(read_config(folder)), Tokenizer.from_folder(folder)
    for name in Description.__annotations__.keys() - {"layers", "tensor_names"}:
        if getattr(ours, name) != getattr(theirs, name):
            raise UnsupportedError(
                f"{folder} cannot be described in GGUF: its {name} is {getattr(ours, name)}, and "
                f"in the file it would be {getattr(theirs, name)}"
            )
    for number, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        if replace(a, rope=None) != replace(b, rope=None) or not _same_rope(a.rope, b.rope):
            raise UnsupportedError(
                f"{folder} cannot be described in GGUF: its layer {number} is {a}, and in the "
                f"file it would be {b}"
            )
    if one.encode(_SAMPLE) != other.encode(_SAMPLE) or one.eos_ids != other.eos_ids:
        raise UnsupportedError(f"{folder}: its tokenizer gives other tokens than GGUF's form of it")


def _same_rope(a: Rope | None, b: Rope | None) -> bool:
    """Whether two ropes rotate by the same angles, up to the rounding of stored factors."""
    if a is None or b is None:
        return a is b
    if (a.size, a.interleaved) != (b.size, b.interleaved):
        return False
    for length in (None, 2.0**24):
        (one, factor), (other, same) = (
            frequencies(rope.size, rope.theta, dict(rope.scaling) or None, length)
            for rope in (a, b)
        )
        if not np.allclose([*one, factor], [*other, same], rtol=1e-5, atol=0):
            return False
    return True
