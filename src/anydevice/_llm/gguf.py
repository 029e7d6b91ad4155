"""Models in GGUF files: their tensors under the names that folders have, and their tokenizer.

The tokenizer is made from the vocabulary, the merges and the name of the way to split text that
are in the file. Byte-level vocabularies with a known way come out exactly as they were; others
need the `tokenizer.json` of the model beside the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anydevice._core.record import Record
from anydevice._core.text import shortened
from anydevice._formats.gguf import GgufFile, Strings, read_gguf, unpacker
from anydevice._formats.join import Segment
from anydevice._llm.description import Description
from anydevice._llm.splitting import GPT4O, LLAMA3, QWEN2
from anydevice._llm.tokenizer import GENERATION, SETTINGS, TOKENIZER, Tokenizer
from anydevice._plan.gguf import family_of
from anydevice.errors import ConfigurationError, UnsupportedError

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_STACKED = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_TABLES = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that are part of the config."""


# --- tensors ----------------------------------------------------------------------------------


def stored_parameters(file: GgufFile, description: Description) -> dict[str, Segment]:
    """The tensors of a file under the names that they have in a folder, in the same order."""
    if any(tensor.packing.elements > 1 for tensor in file.tensors.values()):
        unpacker()  # said now, and not in the middle
    found: dict[str, Segment] = {}
    for name, tensor in file.tensors.items():
        if name in _TABLES or name.endswith((".attn_rot_embd.weight", ".rope_freqs.weight")):
            continue
        inside = _LAYER.fullmatch(name)
        if inside is None:
            found[_OUTER.get(name, name)] = Segment(tensor, _arranged(name, description))
            continue
        number, inner, kind = inside.groups()
        layer = f"model.layers.{number}"
        if inner in _STACKED and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                theirs = f"{layer}.mlp.experts.{expert}.{_STACKED[inner]}.{kind}"
                found[theirs] = Segment(tensor.row(expert))
            continue
        arrange = _arranged(name, description)
        if family_of(file).permuted and inner in ("attn_q", "attn_k"):
            arrange = partial(_unpermuted, size=description.head_size)
        if inner == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            tensor = tensor.as_matrix()
        found[f"{layer}.{_inner(inner, file, number, description)}.{kind}"] = Segment(
            tensor, arrange
        )
    return found


def _inner(inner: str, file: GgufFile, number: str, description: Description) -> str:
    if inner == "ffn_norm" and description.block == "sandwich":
        return "pre_feedforward_layernorm"
    if (
        inner == "ffn_up"
        and description.gated
        and f"blk.{number}.ffn_gate.weight" not in file.tensors
    ):
        return "mlp.gate_up_proj"
    return _INNER.get(inner, inner)


def _arranged(name: str, description: Description) -> Callable[[Any], Any] | None:
    """Norms of models that store them without their 1 have it in these files."""
    return _less_one if description.norm == "rms1" and name.endswith("norm.weight") else None


def _less_one(weights: Any) -> Any:
    return weights - np.float32(1)


def _unpermuted(weights: Any, size: int) -> Any:
    """Rows of queries or keys, of which each head's are in pairs, in the order of two halves."""
    heads, rest = weights.shape[0] // size, weights.shape[1:]
    return weights.reshape(heads, size // 2, 2, *rest).swapaxes(1, 2).reshape(weights.shape)


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""What GGUF calls an option of `generate`, behind `general.sampling.`."""


def sampling_of(file: GgufFile) -> dict[str, Any]:
    """The options of `generate` that a file recommends; few do."""
    found = {
        own: file.expect(f"general.sampling.{name}", int if name == "top_k" else float)
        for name, own in _SAMPLING.items()
    }
    return {name: value for name, value in found.items() if value is not None}


# --- tokenizer --------------------------------------------------------------------------------


class Splitting(Record):
    """How text is split before merging: by a pattern, or as GPT-2 does, single digits first.

    With `whole`, a piece that is a token is not merged at all; with `composed`, characters are
    composed (NFC) first. `bos` is whether texts begin with BOS where the file does not say so.
    """

    pattern: str = ""
    digits: bool = False
    whole: bool = False
    composed: bool = False
    bos: bool = False


SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": Splitting(),
    "smollm": Splitting(digits=True),
    "starcoder": Splitting(digits=True),
    "refact": Splitting(digits=True),
    "llama-bpe": Splitting(LLAMA3, whole=True, bos=True),
    "llama3": Splitting(LLAMA3, whole=True, bos=True),
    "dbrx": Splitting(LLAMA3),
    "qwen2": Splitting(QWEN2, composed=True),
    "gpt-4o": Splitting(GPT4O),
}
"""The ways to split text that are known exactly, by the name that GGUF has for them."""

_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_of(file: GgufFile | Path) -> Tokenizer:
    """The tokenizer of a GGUF file, or the one in the `tokenizer.json` beside it.

    Raises `UnsupportedError` where it cannot be reproduced exactly and there is none beside it,
    and `ConfigurationError` for a vocabulary that is damaged.
    """
    file = read_gguf(file) if isinstance(file, Path) else file
    model = file.expect("tokenizer.ggml.model", str, "")
    pre = file.expect("tokenizer.ggml.pre", str, "")
    if model == "gpt2" and pre in SPLITTINGS:
        return Tokenizer.from_files(tokenizer_files(file, SPLITTINGS[pre]), str(file.path))
    if (file.path.parent / TOKENIZER).exists():
        return Tokenizer.from_folder(file.path.parent)
    kind = f"{model}, {pre}" if pre else model
    raise UnsupportedError(
        f"{file.path}: its tokenizer ({shortened(kind) or 'none'}) cannot be reproduced exactly "
        f"from the file; put the {TOKENIZER} of the same model beside it"
    )


def tokenizer_files(file: GgufFile, splitting: Splitting) -> dict[str, Mapping[str, Any]]:
    """What the files of a tokenizer would hold, by name."""
    tokens = list(_strings(file, "tokens"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise _damaged(file, "tokens", "has a token twice")
    kinds = file.expect("tokenizer.ggml.token_type", np.ndarray)
    if kinds is not None and (kinds.shape != (len(tokens),) or kinds.dtype.kind not in "iu"):
        raise _damaged(file, "token_type", "is not one number for each token")
    merges = [merge.split(" ") for merge in _strings(file, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise _damaged(file, "merges", "has one that is not two tokens")
    named = {
        name: _token(file, tokens, f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    special = _added(kinds, _CONTROL) | {vocabulary[t] for t in named.values() if t is not None}
    added = [
        {"id": number, "content": tokens[number], "special": number in special} | _FLAGS
        for number in sorted(special | _added(kinds, _USER_DEFINED))
    ]
    adds_bos = file.expect("tokenizer.ggml.add_bos_token", bool, splitting.bos)
    bos = named["bos"] if adds_bos else None
    ends = [_token(file, tokens, f"{key}_token_id") for key in ("eos", "eot", "eom")]
    template = file.expect("tokenizer.chat_template", str)
    return {
        TOKENIZER: {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if splitting.composed else None,
            "pre_tokenizer": _pre_tokenizer(splitting),
            "post_processor": _post_processor(bos, vocabulary),
            "decoder": _BYTES,
            "model": _MERGING
            | {"ignore_merges": splitting.whole, "vocab": vocabulary, "merges": merges},
        },
        SETTINGS: {f"{name}_token": token for name, token in named.items() if token is not None}
        | ({"chat_template": template} if template else {}),
        GENERATION: {"eos_token_id": [vocabulary[token] for token in ends if token is not None]},
    }


_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_MERGING = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
}


def _pre_tokenizer(splitting: Splitting) -> Mapping[str, Any]:
    steps: list[Mapping[str, Any]] = []
    if splitting.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if splitting.pattern:
        pattern = {"Regex": splitting.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append(_BYTES | {"use_regex": not splitting.pattern})
    return {"type": "Sequence", "pretokenizers": steps}


def _post_processor(bos: str | None, vocabulary: Mapping[str, int]) -> Mapping[str, Any]:
    if bos is None:
        return _BYTES
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [first, *text],
        "pair": [first, *text, first, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [vocabulary[bos]], "tokens": [bos]}},
    }


def _strings(file: GgufFile, name: str) -> Strings:
    found: Strings | None = file.expect(f"tokenizer.ggml.{name}", Strings)
    if found is None:
        raise _damaged(file, name, "is missing")
    return found


def _token(file: GgufFile, tokens: list[str], key: str) -> str | None:
    number: int | None = file.expect(f"tokenizer.ggml.{key}", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise _damaged(file, key, f"is {number}, and there are {len(tokens)} tokens")
    return tokens[number]


def _added(kinds: Any, kind: int) -> set[int]:
    return set() if kinds is None else {int(number) for number in np.flatnonzero(kinds == kind)}


def _damaged(file: GgufFile, name: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file.path}: tokenizer.ggml.{name} {problem}; download the file again", str(file.path)
    )
