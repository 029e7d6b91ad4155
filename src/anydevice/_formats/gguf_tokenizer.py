"""Tokenizers of GGUF files: their metadata as the files of Hugging Face's folders, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anydevice._core.record import Record
from anydevice._formats.gguf import GgufFile, Strings
from anydevice.errors import ConfigurationError


class Splitting(Record):
    """How text is split before merging: by a pattern, or as GPT-2 does, single digits first.

    With `whole`, a word that is a token is not merged; with `composed`, characters are composed
    (NFC) first. `bos` is whether texts begin with BOS if the file does not say so. With `pieces`,
    the vocabulary is SentencePiece's: spaces are written "▁", and scores rank the merges.
    """

    pattern: str = ""
    digits: bool = False
    whole: bool = False
    composed: bool = False
    bos: bool = False
    pieces: bool = False


PIECES = Splitting(pieces=True, bos=True)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_files(file: GgufFile, splitting: Splitting) -> dict[str, Mapping[str, Any]]:
    """Return the contents of a tokenizer's files by name, as Hugging Face's folders have them."""
    tokens = list(_token_strings(file, "tokens"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise _damage(file, "tokens", "has a token twice")
    kinds = file.expect("tokenizer.ggml.token_type", np.ndarray)
    if kinds is not None and (kinds.shape != (len(tokens),) or kinds.dtype.kind not in "iu"):
        raise _damage(file, "token_type", "is not one number for each token")
    if splitting.pieces:
        scores = file.expect("tokenizer.ggml.scores", np.ndarray)
        if scores is None or scores.shape != (len(tokens),) or scores.dtype.kind != "f":
            raise _damage(file, "scores", "is not one number for each token")
        merges = _merges_of_scores(vocabulary, scores, kinds)
    else:
        merges = [merge.split(" ") for merge in _token_strings(file, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise _damage(file, "merges", "has one that is not two tokens")
    named = {
        name: _token(file, tokens, f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    special = _tokens_of_type(kinds, _CONTROL) | {
        vocabulary[t] for t in named.values() if t is not None
    }
    added = [
        {"id": number, "content": tokens[number], "special": number in special} | _FLAGS
        for number in sorted(special | _tokens_of_type(kinds, _USER_DEFINED))
    ]
    adds_bos = file.expect("tokenizer.ggml.add_bos_token", bool, splitting.bos)
    bos = named["bos"] if adds_bos else None
    ends = [_token(file, tokens, f"{key}_token_id") for key in ("eos", "eot", "eom")]
    template = file.expect("tokenizer.chat_template", str)
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            **(
                _steps_of_pieces(file.expect("tokenizer.ggml.add_space_prefix", bool, True))
                if splitting.pieces
                else _steps(splitting)
            ),
            "post_processor": _post_processor(bos, vocabulary),
            "model": _MERGING
            | {"ignore_merges": splitting.whole, "vocab": vocabulary, "merges": merges}
            | (_FALLBACK | {"unk_token": named["unk"]} if splitting.pieces else {}),
        },
        "tokenizer_config.json": {
            f"{name}_token": token for name, token in named.items() if token is not None
        }
        | ({"chat_template": template} if template else {}),
        "generation_config.json": {
            "eos_token_id": [vocabulary[token] for token in ends if token is not None]
        },
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
_FALLBACK = {"fuse_unk": True, "byte_fallback": True}
_SPACE = "▁"


def _steps(splitting: Splitting) -> dict[str, Any]:
    normalizer = {"type": "NFC"} if splitting.composed else None
    pre_tokenizer = _pre_tokenizer(splitting)
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": _BYTES}


def _steps_of_pieces(prefix: bool) -> dict[str, Any]:
    """Return the steps that write spaces as "▁" and back; with `prefix`, one begins a text."""

    def replacement(old: str, new: str) -> Mapping[str, Any]:
        return {"type": "Replace", "pattern": {"String": old}, "content": new}

    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    before = [{"type": "Prepend", "prepend": _SPACE}] * prefix + [replacement(" ", _SPACE)]
    after = [
        replacement(_SPACE, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *[strip] * prefix,
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": before},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": after},
    }


def _merges_of_scores(vocabulary: Mapping[str, int], scores: Any, kinds: Any) -> list[list[str]]:
    """Return the merges of a SentencePiece vocabulary, the best first.

    Each way to split a token into two tokens is a merge, and the token's score ranks it.
    """
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, number in vocabulary.items():
        if kinds is not None and kinds[number] not in (_NORMAL, _USER_DEFINED):
            continue
        for at in range(1, len(token)):
            left, right = vocabulary.get(token[:at]), vocabulary.get(token[at:])
            if left is not None and right is not None:
                score = -float(scores[number])
                ranked.append((score, number, left, right, token[:at], token[at:]))
    return [[left, right] for *_, left, right in sorted(ranked)]


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


def _token_strings(file: GgufFile, name: str) -> Strings:
    strings: Strings | None = file.expect(f"tokenizer.ggml.{name}", Strings)
    if strings is None:
        raise _damage(file, name, "is missing")
    return strings


def _token(file: GgufFile, tokens: list[str], key: str) -> str | None:
    number: int | None = file.expect(f"tokenizer.ggml.{key}", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise _damage(file, key, f"is {number}, and there are {len(tokens)} tokens")
    return tokens[number]


def _tokens_of_type(kinds: Any, kind: int) -> set[int]:
    return set() if kinds is None else {int(number) for number in np.flatnonzero(kinds == kind)}


def _damage(file: GgufFile, name: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file.path}: tokenizer.ggml.{name} {problem}; download the file again", str(file.path)
    )


# --- and back -----------------------------------------------------------------------------------


def tokenizer_metadata(
    values: Mapping[str, Any], size: int, splittings: Mapping[str, Splitting]
) -> dict[str, Any] | None:
    """Return the vocabulary of a `tokenizer.json` as metadata; `None` if GGUF has none like it.

    `size` is the number of tokens of the model; unused ones fill the vocabulary up.
    """
    model, added = values.get("model", {}), values.get("added_tokens") or ()
    if model.get("type") != "BPE":
        return None
    vocabulary: dict[str, int] = model["vocab"] | {row["content"]: row["id"] for row in added}
    tokens = [f"[unused {number}]" for number in range(max(size, 1 + max(vocabulary.values())))]
    kinds = np.full(len(tokens), _UNUSED, np.int32)
    for token, number in vocabulary.items():
        tokens[number], kinds[number] = token, _NORMAL
    for row in added:
        kinds[row["id"]] = _CONTROL if row.get("special") else _USER_DEFINED
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    steps = _flat(values.get("normalizer")) + _flat(values.get("pre_tokenizer"))
    common = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if model.get("byte_fallback"):
        for number, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x"):
                kinds[number] = _BYTE
        if model.get("unk_token") in vocabulary:
            kinds[vocabulary[model["unk_token"]]] = _UNKNOWN
        scores = np.full(len(tokens), -len(merges), np.float32)
        for rank in range(len(merges) - 1, -1, -1):
            number = vocabulary.get("".join(merges[rank]), -1)
            if number >= 0:
                scores[number] = -rank
        prefix = any(step["type"] in ("Prepend", "Metaspace") for step in steps)
        return common | {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.add_space_prefix": prefix,
        }
    for name, splitting in splittings.items():
        own = _steps(splitting)
        same = steps == _flat(own["normalizer"]) + _flat(own["pre_tokenizer"])
        if same and splitting.whole == bool(model.get("ignore_merges")):
            return common | {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": name,
                "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            }
    return None


def _flat(step: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a part of a tokenizer, without what does not change tokens."""
    if not step:
        return []
    if step["type"] != "Sequence":
        plain = {key: value for key, value in step.items() if key != "trim_offsets"}
        return [plain]
    inner = next(value for key, value in step.items() if key != "type")
    return [single for part in inner for single in _flat(part)]
