"""A model's `config.json`: where it is, the part of it that is counted, and its values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydevice._core import checks
from anydevice._core.files import parse_json, read_small
from anydevice._core.record import NOTHING, Record, replace
from anydevice._core.text import shortened
from anydevice._plan.encoder_families import ENCODERS, EncoderFamily
from anydevice._plan.families import (
    ARCHITECTURES,
    LARGEST,
    MOST_LAYERS,
    UNKNOWN,
    ModelFamily,
    float_dtype,
)
from anydevice.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from anydevice._formats.gguf import GgufFile

CONFIG_NAME = "config.json"
LARGEST_CONFIG = 4 * 2**20
"""Bytes; a larger file is not a config."""

NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed", "hidden_dim", "model_dim", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff"),
    "vocabulary": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "longest_context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk", "top_k"),
    "expert_size": ("moe_intermediate_size", "expert_intermediate_size"),
    "shared_expert_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
}
"""Our name for a number, and its names in the configs of families, the usual one first."""
_IN_WORDS = {
    "hidden": "hidden units",
    "layers": "layers",
    "heads": "attention heads",
    "intermediate": "units of the feed-forward network",
    "vocabulary": "tokens of the vocabulary",
    "experts": "experts",
    "experts_per_token": "experts that a token passes",
}

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_INHERITED = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
_OUTER = ("tie_word_embeddings",)
"""Keys for which the whole config overrides its part for text."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_FILES = (".json", ".safetensors", ".gguf")


class UncountableError(ConfigurationError):
    """A config whose model is not in the tables, so that its memory cannot be counted."""

    def __init__(self, reason: str, source: str) -> None:
        advice = "Give the folder with its safetensors files, whose headers tell the weights"
        super().__init__(f"{source} cannot be counted: {reason}. {advice}", source)
        self.reason = reason


class ModelConfig(Record):
    """A config's values, with those that its family leaves out filled in.

    `source` names the file in errors; `family` is the `model_type`; `architecture` is the row of a
    decoder, `encoder` that of any other model. `part` is the key of the text part of a multimodal
    model. `assumed` lists assumptions, in sentences. `values` are the decoder's, `raw` the whole
    config. `tensors` of a GGUF file have a name, a shape and a type each.
    """

    values: Mapping[str, Any]
    family: str
    source: str
    architecture: ModelFamily = UNKNOWN
    encoder: EncoderFamily | None = None
    part: str = ""
    assumed: tuple[str, ...] = ()
    raw: Mapping[str, Any] = NOTHING
    tensors: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    @property
    def known(self) -> bool:
        """Whether the family is in one of the tables."""
        return self.encoder is not None or self.architecture is not UNKNOWN

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The values that a config of the family may omit."""
        return (self.encoder or self.architecture).defaults

    @property
    def model_class(self) -> str:
        """The class that the config names, without the family's name: "ForMaskedLM"; "" if none."""
        classes = None if self.part else self.entries("architectures")
        if not classes:
            return ""
        family = re.sub(r"_(text|text_model|vision_model)$", "", self.family)
        prefix, name = re.sub("[_-]", "", family), str(classes[0]).replace("_", "")
        if not name.lower().startswith(prefix):
            raise self.refusal(f"the class {shortened(name)!r} is not one of {self.family}")
        return name[len(prefix) :]

    @property
    def dtype(self) -> str | None:
        """The dtype that the config names for the weights; `None` if it names no known one."""
        for key in ("dtype", "torch_dtype"):
            name = self.get(key)
            if isinstance(name, str):
                try:
                    return float_dtype("dtype", name.removeprefix("torch."))
                except ConfigurationError:
                    return None
        return None

    @property
    def labels(self) -> int:
        """The number of labels of a classifier."""
        names = self.get("id2label")
        if isinstance(names, Mapping) and self.values.get("num_labels") is None:
            return len(names)
        return self.count("num_labels", 2)

    def member(self, key: str, family: str) -> ModelConfig:
        """Return the config under a key, of one of the models that this one consists of."""
        values = self.get(f"{key}_dict") or self.get(key) or {}
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"{self.source}: {key} is not an object", self.source)
        own = str(values.get("model_type") or family)
        if own != family:
            raise self.refusal(f"{key} of the family {shortened(own)!r} is not in the table")
        return as_config({**values, "model_type": family}, f"{self.source}: {key}")

    def check_options(self, only: Mapping[str, Any]) -> None:
        """Raise `ConfigurationError` for an option with another value than the one counted."""
        for key, value in only.items():
            given = self.get(key)
            if given is not None and given != value:
                raise self.refusal(f"{key} = {shortened(repr(given))} is not in the table")

    def refusal(self, reason: str) -> UncountableError:
        """Return the error for a model that cannot be counted from its config."""
        return UncountableError(reason, self.source)

    def get(self, key: str) -> Any:
        """Return the config's value by its own key, else the family's default; null is `None`."""
        if key in self.values:
            return self.values[key]
        return self.defaults.get(key)

    def flag(self, flag: bool | str) -> bool:
        """Return the value in this config of a flag of the family's row."""
        return bool(self.get(flag)) if isinstance(flag, str) else flag

    def number(self, word: str, default: int | None = None, least: int = 1) -> int:
        """Return a number by our name for it; raise `ConfigurationError` if there is none."""
        value = self.optional(word, least)
        if value is not None:
            return value
        if default is not None:
            return default
        names = ", ".join(NAMES[word])
        raise ConfigurationError(
            f"{self.source} has no number of {_IN_WORDS[word]}: it has none of the keys "
            f"{names}; if it is the config of a language model, add one of them",
            self.source,
        )

    def optional(self, word: str, least: int = 1) -> int | None:
        """Return a number by our name for it, or `None`."""
        for name in NAMES[word]:
            value = self.get(name)
            if value is not None:
                most = MOST_LAYERS if word == "layers" else LARGEST
                return checks.integer(f"{self.source}: {name}", value, least, most)
        return None

    def count(self, key: str, default: int = 0, least: int = 0) -> int:
        """Return an integer by the config's own key, `default` if it is absent or null."""
        value = self.get(key)
        if value is None:
            return default
        return checks.integer(f"{self.source}: {key}", value, least, LARGEST)

    def entries(self, key: str) -> tuple[Any, ...] | None:
        """Return a list by the config's own key, `None` if it is absent or null."""
        value = self.get(key)
        if value is None or isinstance(value, list | tuple):
            return None if value is None else tuple(value)
        raise ConfigurationError(f"{self.source}: {key} is not a list", self.source)


class ModelFiles(Record):
    """A model in files, with its config, which is read once."""

    path: Path
    config: ModelConfig

    @property
    def name(self) -> str:
        """The name of the folder or the GGUF file."""
        path = self.path.resolve()
        if path.is_dir():
            return path.name
        return path.stem if is_gguf_path(path) else path.parent.name


def is_config_path(path: Path) -> bool:
    """Whether a path is a JSON or GGUF file, or a folder with a `config.json`."""
    if path.is_dir():
        return (path / CONFIG_NAME).is_file()
    if is_gguf_path(path):
        return True
    return path.suffix == ".json" and not path.name.endswith(".index.json")


def is_gguf_path(path: Path) -> bool:
    """Whether a file is GGUF, by its name."""
    return path.suffix.lower() == ".gguf"


def read_config(path: Path) -> ModelConfig:
    """Read the config in a file, in a folder's `config.json`, or in the metadata of a GGUF file."""
    if is_gguf_path(path):
        return gguf_config(path)
    file = path / CONFIG_NAME if path.is_dir() else path
    try:
        values = parse_json(read_small(file, limit=LARGEST_CONFIG), finite=False)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no file {file}; give a model's config.json, or the folder it is in",
            str(file),
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}", str(file)) from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}", str(file)) from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigurationError(f"{file} holds a {kind}, and a config is an object", str(file))
    return as_config(values, str(file))


def gguf_config(file: Path | GgufFile) -> ModelConfig:
    """Return the config that the metadata and the tensors of a GGUF file stand for."""
    from anydevice._formats.gguf import config_values, read_gguf  # it needs NumPy

    file = read_gguf(file) if isinstance(file, Path) else file
    name = file.expect("general.architecture", str, "")
    rows = {
        family: (row, row.gguf)
        for family, row in ARCHITECTURES.items()
        if row.gguf is not None and row.gguf.architecture == name
    }
    if not rows:
        names = dict.fromkeys(row.gguf.architecture for row in ARCHITECTURES.values() if row.gguf)
        raise UnsupportedError(
            f"{file.path}: GGUF files of the architecture {shortened(name)!r} are not supported, "
            f"only {', '.join(names)}. Get the model as a folder of safetensors files"
        )
    own = config_values(file)
    routed = bool(own.get("num_experts"))
    matching = [name for name, (row, _) in rows.items() if row.experts == routed]
    family = (matching or list(rows))[0]
    row, spec = rows[family]
    if routed:
        key = next((name for name in NAMES["experts"] if name in row.defaults), "num_experts")
        own[key] = own.pop("num_experts")
    if own.get("partial_rotary_factor", 1) != 1 and row.rotary_key != "partial_rotary_factor":
        raise UnsupportedError(
            f"{file.path}: {name}.rope.dimension_count is not the size of a head, and {family} "
            "rotates whole heads; get the model as a folder of safetensors files"
        )
    for key in spec.refused:
        if own.get(key):
            raise UnsupportedError(f"{file.path}: {family} with a {key} is not read")
    values = {"model_type": family, "hidden_act": "silu", **spec.values, **own}
    if spec.unscaled_layers:
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        scale = values.get("head_dim", 256)
        unscaled = values.get("num_hidden_layers") == spec.unscaled_layers
        if unscaled and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            scale = hidden // heads
        values["query_pre_attn_scalar"] = scale
    tensors = tuple((x.name, x.shape, x.packing.name) for x in file.tensors.values())
    return replace(as_config(values, str(file.path)), tensors=tensors)


def as_config(values: Mapping[str, Any], source: str = "the config") -> ModelConfig:
    """Return the config of these values; of a multimodal model, its part for text."""
    text, part = dict(values), ""
    family = str(values.get("model_type") or "")
    for name in _NESTED if family not in ENCODERS else ():
        inner = values.get(name)
        if isinstance(inner, Mapping) and all(values.get(key) is None for key in NAMES["hidden"]):
            text = {**{k: v for k, v in values.items() if k in _INHERITED}, **inner}
            text |= {k: values[k] for k in _OUTER if values.get(k) is not None}
            family, part = str(text.get("model_type") or family), name
            break
    for name, row in ARCHITECTURES.items():
        if family in row.aliases:
            family = name
    architecture = ARCHITECTURES.get(family, UNKNOWN)
    for word, key in architecture.keys.items():
        if key in text:
            text[NAMES[word][0]] = text[key]
    assumed = (f"only the text part ({part}) is known by its config",) if part else ()
    encoder = ENCODERS.get(family)
    return ModelConfig(text, family, source, architecture, encoder, part, assumed, dict(values))


def locate(
    model: str, environment: Mapping[str, str] = os.environ, *, planning: bool = False
) -> Path:
    """Return the path of a model, given a path or its name on the Hugging Face hub."""
    exists = False
    with suppress(OSError, RuntimeError, ValueError):  # no such user, or no file can be called this
        path = Path(model).expanduser()
        exists = path.exists()
    if exists:
        return _model_in(path)
    shown = shortened(model)
    if not _HUB_NAME.fullmatch(model) or model.endswith(_FILES):
        raise ConfigurationError(
            f"{shown}: there is no such file or folder; write the path of a config.json, of its "
            "folder, or the name of a model in the Hugging Face cache, such as 'org/name'",
            model,
        )
    direct = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    cache = Path(os.path.expanduser(direct or f"{home}/hub"))
    for snapshot in _snapshots(cache / f"models--{model.replace('/', '--')}"):
        path = _model_in(snapshot)
        has_config = (snapshot / CONFIG_NAME).exists()
        if path != snapshot or has_config or any(snapshot.glob("*.safetensors")):
            return path
    advice = f"give the path of its folder or file, or its whole name, such as 'org/{shown}'"
    if "/" in model:
        enough = " (a plan needs no more of it than config.json)" if planning else ""
        advice = f"to get it: hf download {shown}{enough}"
    raise ConfigurationError(
        f"{shown}: there is no such file or folder, and no such model in the Hugging Face cache "
        f"{cache}; {advice}",
        model,
    )


def title_of(path: Path) -> str:
    """Return the name of the model at a path: its folder or file, or its name on the Hub.

    >>> title_of(Path("models--org--name/snapshots/0123abcd"))
    'org/name'
    """
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name or path.resolve().name


def _model_in(path: Path) -> Path:
    """Return the GGUF file that is the whole model of a folder, else the path itself."""
    try:
        names = sorted([name for name in os.listdir(path) if not name.startswith(".")])
    except OSError:
        return path  # a file, or a folder whose reader says what is wrong
    files = [name for name in names if name.lower().endswith(".gguf")]
    has_config, has_weights = CONFIG_NAME in names, ".safetensors" in "\n".join(names)
    if not files or (has_config and has_weights):
        return path
    if len({_SPLIT.sub("", name) for name in files}) == 1:  # one model, in one file or several
        return path / files[0]
    if has_config or has_weights:
        return path
    raise ConfigurationError(
        f"{path} holds {len(files)} GGUF files ({', '.join(map(shortened, files))}); give the path "
        f"of one of them, such as {path / files[0]}",
        str(path),
    )


def _snapshots(repository: Path) -> Iterator[Path]:
    """Yield the downloaded snapshots of a repository: its main branch's, then the newest."""
    try:
        commit = read_small(repository / "refs" / "main").decode("utf-8").strip()
        if commit:
            yield repository / "snapshots" / commit
    except (OSError, ValueError):
        pass  # a single commit may have been requested by its number
    try:
        folders = list((repository / "snapshots").iterdir())
    except OSError:
        return  # no such model, or none can be called this
    yield from sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
