"""Text from tokens as they come: characters stay whole, and stop strings are never shown.

A token is not a piece of text. It may hold half a character, lose its space at the beginning of a
text, or be a byte that only its neighbours complete. The pieces of a `TextStream`, joined, equal
the text of decoding all tokens at once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._llm.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x..>", re.DOTALL)
_CONTEXT = 16
"""Number of earlier tokens that may change the text of the first; more than enough."""


class TextStream:
    """The text of tokens that come one by one, up to the first of the stop strings.

    `push(token)` returns the text that is certain by now, often none; `finish()` the rest. Joined,
    they are `tokenizer.decode(tokens)`, cut before the stop string that is complete first, or the
    longest of several that end together. `stopped` tells whether there was one: later tokens are
    ignored. `after` are tokens before the first, such as the prompt: the text then continues
    theirs, with any space in between. A token takes constant time on average.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Iterable[str] | None = None,
        after: Sequence[int] = (),
    ) -> None:
        self._stops = [_Stop(text) for text in stop_strings(stop)]
        self._decoder = _token_decoder(tokenizer, list(after[-_CONTEXT:]))
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that this token makes certain."""
        return "" if self.stopped else self._before_stops(self._decoder.push(token))

    def finish(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._before_stops(self._decoder.finish())
        rest, self._pending = "" if self.stopped else self._pending, ""
        return text + rest

    def _before_stops(self, text: str) -> str:
        if not self._stops or not text:
            return text
        buffer = self._pending + text
        for place in range(len(self._pending), len(buffer)):
            # A list: every stop string has to read each character.
            complete = [stop for stop in self._stops if stop.reads(buffer[place])]
            if complete:
                self.stopped, self._pending = True, ""
                return buffer[: place + 1 - max(len(stop.text) for stop in complete)]
        certain = len(buffer) - max(stop.matched for stop in self._stops)
        self._pending = buffer[certain:]
        return buffer[:certain]


def stop_strings(stop: str | Iterable[str] | None) -> list[str]:
    """Check the option `stop` and return its texts."""
    if stop is None:
        return []
    if not isinstance(stop, Iterable):
        raise ConfigurationError(f"stop is a text or a list of texts, not {stop!r}", source="stop")
    texts = [stop] if isinstance(stop, str) else list(stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigurationError(
                f"a stop string is a text of at least one character, not {text!r}", source="stop"
            )
    return texts


class _Stop:
    """A search for a text in characters that come one by one (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0] * len(text)
        for place in range(1, len(text)):
            self._shorter[place] = self._next(self._shorter[place - 1], text[place])

    def reads(self, character: str) -> bool:
        """Whether this character completes the text."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.text)

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)


def _token_decoder(tokenizer: Tokenizer, after: list[int]) -> _Bytes | _Window | _Whole:
    kinds = tokenizer.decoder_kinds
    if kinds == ("ByteLevel",):
        return _Bytes(tokenizer, after)
    joined = next((i for i, kind in enumerate(kinds) if kind in ("Fuse", "ByteLevel")), len(kinds))
    # A step on the joined text, such as a replacement, may change text that was already shown.
    if {*kinds[joined:]} <= {"Fuse", "Strip"}:
        return _Window(tokenizer, after)
    return _Whole(tokenizer, after)


class _Bytes:
    """Byte-level tokens: each stands for bytes, and all bytes together are UTF-8."""

    def __init__(self, tokenizer: Tokenizer, after: list[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token in after:
            self.push(token)

    def push(self, token: int) -> str:
        return self._utf8.decode(self._bytes_of(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Tokens whose text depends on neighbours: `_context` was shown as `_shown`, `_new` was not."""

    def __init__(self, tokenizer: Tokenizer, after: list[int]) -> None:
        self._tokenizer = tokenizer
        self._has_bytes = "ByteFallback" in tokenizer.decoder_kinds
        self._context: list[int] = []
        self._new: list[int] = []
        self._shown = ""
        for token in after:
            self.push(token)

    def push(self, token: int) -> str:
        text = self._tokenizer.token_text(token)
        if text is None:
            return ""
        self._new.append(token)
        # A run of bytes is decoded as a whole or not at all.
        return "" if self._has_bytes and _BYTE_TOKEN.fullmatch(text) else self.finish()

    def finish(self) -> str:
        if not self._new:
            return ""
        tokens, count = self._context + self._new, len(self._new)
        new = self._tokenizer.decode(tokens)[len(self._shown) :]
        self._new = []
        while not (shown := self._tokenizer.decode(tokens[-count:])) and count < len(tokens):
            count *= 2
        self._context, self._shown = tokens[-count:], shown
        return new


class _Whole:
    """Tokens whose text is only known when all of them are there."""

    def __init__(self, tokenizer: Tokenizer, after: list[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = after
        self._shown = len(tokenizer.decode(after))

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return ""

    def finish(self) -> str:
        text = self._tokenizer.decode(self._tokens)[self._shown :]
        self._shown += len(text)
        return text
