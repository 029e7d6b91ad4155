"""Small tokenizers, as the values of a `tokenizer.json`: of bytes, of pieces, and of words.

Each would cut texts after five tokens and pad them to ten, which nobody should see.
"""

from __future__ import annotations

from typing import Any

from anydevice._llm.tokenizer import LLAMA3

Values = dict[str, Any]

BYTE_LEVEL: Values = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
METASPACE: Values = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
METASPACE["split"] = True
SENTENCE_PIECE: list[Values] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
WORD_PIECE: Values = {"type": "WordPiece", "prefix": "##", "cleanup": True}


def changed(values: Values, **parts: Any) -> Values:
    """The same tokenizer with other parts."""
    return {**values, **parts}


def split_by(pattern: str) -> Values:
    """The pre-tokenizer that splits by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def pairs(tokens: list[str]) -> Values:
    """A model of byte pairs with these tokens, and no merges."""
    none = dict.fromkeys(
        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    vocabulary = {text: i for i, text in enumerate(tokens)}
    own = {"vocab": vocabulary, "merges": [], "fuse_unk": False, "byte_fallback": False}
    return {"type": "BPE", **none, **own}


def added(*texts: str) -> list[Values]:
    """The first tokens; all but `<tool>` are special."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return [
        {"id": i, "content": text, "special": text != "<tool>", **dict.fromkeys(flags, False)}
        for i, text in enumerate(texts)
    ]


def _adding(before: list[str], after: list[str], ids: dict[str, int]) -> Values:
    """The post-processor that puts special tokens around a text."""

    def items(texts: list[str]) -> list[Values]:
        return [{"SpecialToken": {"id": text, "type_id": 0}} for text in texts]

    text: list[Values] = [{"Sequence": {"id": "A", "type_id": 0}}]
    second: list[Values] = [{"Sequence": {"id": "B", "type_id": 1}}]
    known = {
        name: {"id": name, "ids": [number], "tokens": [name]}
        for name, number in ids.items()
        if name in before + after
    }
    return {
        "type": "TemplateProcessing",
        "single": items(before) + text + items(after),
        "pair": items(before) + text + second + items(after),
        "special_tokens": known,
    }


def _alphabet() -> list[str]:
    """A character for each byte: those that can be seen stand for themselves."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [*map(chr, sorted(seen)), *(chr(256 + i) for i in range(256 - len(seen)))]


_LIMITS: Values = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 5, "stride": 0, "strategy": "LongestFirst"},
    "padding": {"strategy": {"Fixed": 10}, "direction": "Right", "pad_token": "<s>", "pad_id": 0}
    | {"pad_to_multiple_of": None, "pad_type_id": 0},
}
_SPECIAL = ["<s>", "</s>", "<tool>"]
_BYTE_TOKENS = [*_SPECIAL, *_alphabet(), "he", "ll", "Ġw", "hell"]

BYTES: Values = {
    **_LIMITS,
    "added_tokens": added(*_SPECIAL),
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [split_by(LLAMA3), {**BYTE_LEVEL, "use_regex": False}],
    },
    "post_processor": _adding(["<s>"], [], {"<s>": 0}),
    "decoder": {**BYTE_LEVEL, "use_regex": True},
    "model": pairs(_BYTE_TOKENS)
    | {"ignore_merges": True, "merges": [["h", "e"], ["l", "l"], ["Ġ", "w"], ["he", "ll"]]},
}

_PIECES = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["▁", -2.0], ["▁he", -3.0], ["ll", -4.0]]
_PIECES += [["o", -5.0], ["h", -6.0], *([f"<0x{byte:02X}>", -10.0] for byte in range(256))]

UNIGRAM: Values = {
    **_LIMITS,
    "added_tokens": added("<unk>", "<s>", "</s>"),
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            {"type": "Strip", "strip_left": False, "strip_right": True},
            {"type": "Lowercase"},
        ],
    },
    "pre_tokenizer": METASPACE,
    "post_processor": _adding([], ["</s>"], {"</s>": 2}),
    "decoder": {"type": "Sequence", "decoders": SENTENCE_PIECE},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": _PIECES, "byte_fallback": True},
}

_WORDS = [*_SPECIAL, "[UNK]", "hello", "##s", "w", "##o", "##r", "##ld", "a", "b", "!"]

WORDS: Values = {
    **_LIMITS,
    "added_tokens": added(*_SPECIAL),
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    | {"strip_accents": None, "lowercase": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]},
    "decoder": WORD_PIECE,
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    | {"max_input_chars_per_word": 100, "vocab": {text: i for i, text in enumerate(_WORDS)}},
}
