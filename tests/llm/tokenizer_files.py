"""Small tokenizers, as the values of a `tokenizer.json`: of bytes, of pieces, and of words.

Each would cut texts after five tokens and pad them to ten, which nobody should see.
"""

from __future__ import annotations

from typing import Any

from anydevice._llm.tokenizer import LLAMA3

Values = dict[str, Any]


def changed(values: Values, **parts: Any) -> Values:
    """The same tokenizer with other parts."""
    return {**values, **parts}


def _added(*texts: str) -> list[Values]:
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
    "truncation": {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    },
    "padding": {
        "strategy": {"Fixed": 10},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    },
}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_SPECIAL = ["<s>", "</s>", "<tool>"]
_BYTE_TOKENS = [*_SPECIAL, *_alphabet(), "he", "ll", "Ġw", "hell"]

BYTES: Values = {
    **_LIMITS,
    "added_tokens": _added(*_SPECIAL),
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": LLAMA3},
                "behavior": "Isolated",
                "invert": False,
            },
            {**_BYTE_LEVEL, "use_regex": False},
        ],
    },
    "post_processor": _adding(["<s>"], [], {"<s>": 0}),
    "decoder": {**_BYTE_LEVEL, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {text: i for i, text in enumerate(_BYTE_TOKENS)},
        "merges": [["h", "e"], ["l", "l"], ["Ġ", "w"], ["he", "ll"]],
    },
}

_PIECES = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["▁", -2.0], ["▁he", -3.0], ["ll", -4.0]]
_PIECES += [["o", -5.0], ["h", -6.0], *([f"<0x{byte:02X}>", -10.0] for byte in range(256))]

UNIGRAM: Values = {
    **_LIMITS,
    "added_tokens": _added("<unk>", "<s>", "</s>"),
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            {"type": "Strip", "strip_left": False, "strip_right": True},
            {"type": "Lowercase"},
        ],
    },
    "pre_tokenizer": {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
        "split": True,
    },
    "post_processor": _adding([], ["</s>"], {"</s>": 2}),
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {"type": "Unigram", "unk_id": 0, "vocab": _PIECES, "byte_fallback": True},
}

_WORDS = [*_SPECIAL, "[UNK]", "hello", "##s", "w", "##o", "##r", "##ld", "a", "b", "!"]

WORDS: Values = {
    **_LIMITS,
    "added_tokens": _added(*_SPECIAL),
    "normalizer": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {text: i for i, text in enumerate(_WORDS)},
    },
}
