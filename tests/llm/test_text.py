"""Text from tokens as they come: exactly the text of all of them, cut before a stop string."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anydevice import llm
from anydevice._llm.text import TextStream
from anydevice._llm.tokenizer import Tokenizer
from anydevice.errors import ConfigurationError
from tests.llm.tokenizer_files import (
    BYTE_LEVEL,
    METASPACE,
    SENTENCE_PIECE,
    WORD_PIECE,
    Values,
    added,
    pairs,
)

tokenizers = pytest.importorskip("tokenizers")


def joined(**after: Any) -> Values:
    """A decoder that joins all tokens, and then does this."""
    return {"type": "Sequence", "decoders": [{"type": "Fuse"}, after]}


DECODERS: dict[str, Any] = {
    "byte level": {**BYTE_LEVEL, "use_regex": True},
    "sentence piece": {"type": "Sequence", "decoders": SENTENCE_PIECE},
    "gemma": {"type": "Sequence", "decoders": SENTENCE_PIECE[:3]},
    "metaspace": METASPACE,
    "word piece": WORD_PIECE,
    "suffix": {"type": "BPEDecoder", "suffix": "</w>"},
    "repeats": {"type": "CTC", "pad_token": "é", "word_delimiter_token": "|", "cleanup": True},
    "stripped when joined": joined(type="Strip", content="a", start=2, stop=0),
    "replaced when joined": joined(type="Replace", pattern={"String": "ab"}, content="c"),
    "none": None,
}
PIECES = ["<s>", "</s>", "<tool>", "▁", "▁▁", "▁a", "a", "b", "ab", ".", " '", "##b", "a</w>", "|"]
SHORT = len(PIECES)
PIECES += ["é", "ÃŁ", "ðŁ", "ĺĢ", "Ã", "©", "漢", "�", *(f"<0x{byte:02X}>" for byte in range(256))]
# Mostly those that change with what stands beside them.
IDS = st.integers(2, SHORT + 8) | st.integers(4, 8) | st.integers(0, len(PIECES) + 3)


@lru_cache
def tokenizer_with(decoder: str) -> Tokenizer:
    names = "truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"
    whole = {"version": "1.0", "added_tokens": added(*PIECES[:3]), **dict.fromkeys(names)}
    whole |= {"decoder": DECODERS[decoder], "model": pairs(PIECES)}
    return Tokenizer.from_files({"tokenizer.json": json.dumps(whole).encode()}, "test")


def streamed(stream: TextStream, ids: Sequence[int]) -> str:
    return "".join([*map(stream.push, ids), stream.finish()])


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, written the slow and obvious way."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(ids=st.lists(IDS, max_size=12), data=st.data())
def test_pieces_join_to_the_whole_text(decoder: str, ids: list[int], data: st.DataObject) -> None:
    tokenizer = tokenizer_with(decoder)
    text = tokenizer.decode(ids)
    assert streamed(TextStream(tokenizer), ids) == text

    stops = data.draw(st.lists(st.text("ab é�", min_size=1, max_size=4), max_size=3))
    stream = TextStream(tokenizer, stops)
    assert (streamed(stream, ids), stream.stopped) == cut(text, stops)

    before = data.draw(st.integers(0, len(ids)))
    first = tokenizer.decode(ids[:before])
    if text.startswith(first) and tokenizer.decoder_kinds != ("ByteLevel",):
        stream = TextStream(tokenizer, after=ids[:before])
        ran_on = first + streamed(stream, ids[before:])
        assert ran_on == text or "<0x" in "".join(PIECES[i] for i in ids if i < len(PIECES))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 511), max_size=40), st.lists(st.text("ab e", min_size=1), max_size=2)
)
def test_tokens_of_stories_at_random(stories: Path, ids: list[int], stops: list[str]) -> None:
    tokenizer = _stories(stories)
    stream = TextStream(tokenizer, stops)
    assert (streamed(stream, ids), stream.stopped) == cut(tokenizer.decode(ids), stops)


@lru_cache
def _stories(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", ["Once upon a time", "Ça va? 漢字 und 🎉🎉!", "  two   spaces "])
def test_a_text_is_streamed_character_by_character(stories: Path, text: str) -> None:
    tokenizer = _stories(stories)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join([*pieces, stream.finish()]) == text
    assert "�" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 2  # and not all of it at the end


def test_a_reply_goes_on_from_its_prompt(stories: Path) -> None:
    tokenizer = _stories(stories)
    prompt, reply = tokenizer.encode("Once upon"), tokenizer.encode("a time")[1:]
    assert streamed(TextStream(tokenizer), reply) == "a time"
    assert streamed(TextStream(tokenizer, after=prompt), reply) == " a time"


def model_with(stories: Path, tmp_path: Path, name: str, text: str) -> llm.LanguageModel:
    """The model, with one more file in its folder."""
    folder = shutil.copytree(stories, tmp_path / "model")
    (folder / name).write_text(text)
    return llm.load(folder, device="cpu")


def test_a_reply_to_messages_begins_anew_and_a_text_goes_on(stories: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    model = model_with(stories, tmp_path, "chat_template.jinja", template)
    text = model.generate("Once upon", max_tokens=5)
    reply = model.generate([{"role": "user", "content": "Once upon"}], max_tokens=5)
    tokens = model.generate(model.tokenizer.encode("Once upon"), max_tokens=5)
    assert text.tokens == reply.tokens == tokens.tokens
    assert text.text == " " + reply.text == " " + tokens.text
    assert reply.text == model.tokenizer.decode(reply.tokens)


def test_a_tokenizer_of_another_model_is_refused(stories: Path, tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {"512": {"content": "<new>", "normalized": False}}}
    model = model_with(stories, tmp_path, "tokenizer_config.json", json.dumps(added))
    for use in (model.generate, model.score):
        with pytest.raises(ConfigurationError, match=r"gives token 512 for this .* has only 512"):
            use("a<new>")


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["time"], "Once upon a "),
        (["me", "time there"], "Once upon a ti"),
        (["on a t", "upon a t"], "Once "),  # both end at once: before the longest
        ("a", "Once upon "),
        (["upon a timely"], "Once upon a time there"),
        ([], "Once upon a time there"),
    ],
)
def test_a_reply_ends_before_a_stop(stories: Path, stops: list[str] | str, expected: str) -> None:
    tokenizer = _stories(stories)
    stream = TextStream(tokenizer, stops)
    assert streamed(stream, tokenizer.encode("Once upon a time there")) == expected
    assert stream.stopped == (expected != "Once upon a time there")
    assert stream.stopped <= (stream.push(403) == "")  # nothing comes after a stop string
    assert stream.finish() == "" or not stream.stopped


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1), max_size=3))
@example(text="aaab", stops=["aab"])
@example(text="ababac", stops=["abac", "bb"])
def test_stop_strings_that_begin_within_themselves(text: str, stops: list[str]) -> None:
    tokenizer = tokenizer_with("gemma")
    stream = TextStream(tokenizer, stops)
    ids = [PIECES.index(character) for character in text if character in PIECES]
    assert (streamed(stream, ids), stream.stopped) == cut(tokenizer.decode(ids), stops)


def test_text_that_cannot_become_a_stop_string_is_shown_at_once(stories: Path) -> None:
    tokenizer = _stories(stories)
    stream = TextStream(tokenizer, ["upon the hill"])
    _, once, upon, a, time = tokenizer.encode("Once upon a time")
    assert [stream.push(token) for token in (once, upon)] == ["Once", " "]
    assert [stream.push(token) for token in (a, time)] == ["upon a", " time"]


@pytest.mark.parametrize("stop", ["", [""], [1], ["a", None]])
def test_a_stop_string_that_is_none_is_refused(stories: Path, stop: Any) -> None:
    with pytest.raises(ConfigurationError, match="a stop string is a text"):
        TextStream(_stories(stories), stop)


@example(tokens=["▁"])
@example(tokens=["<0xFF>"])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(tokens=st.lists(st.sampled_from(PIECES), min_size=1, max_size=3))
@pytest.mark.parametrize("decoder", ["byte level", "sentence piece"])
def test_a_token_costs_the_same_in_a_long_text(decoder: str, tokens: list[str]) -> None:
    tokenizer = tokenizer_with(decoder)
    ids = [PIECES.index(text) for text in tokens] * 500
    with mock.patch.object(tokenizer, "decode", side_effect=tokenizer.decode) as decode:
        streamed(TextStream(tokenizer, ["zzz"]), ids)
    assert sum(len(call.args[0]) for call in decode.call_args_list) <= 16 * len(ids)
