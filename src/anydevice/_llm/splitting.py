"""Patterns by which text is split and replaced before it becomes tokens, known ones and others.

`tokenizer.json` holds regular expressions from anywhere. Those of well-known models take time in
proportion to the text. Another one may take hours for one line, and block this process: a tokenizer
with such a pattern runs in a child process, and is stopped there after a while.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from anydevice._core.child.parent import Conversation, Outcome
from anydevice._core.locks import ForkSafeLock
from anydevice._core.text import shortened
from anydevice.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers

SECONDS, CHARACTERS = 5.0, 100_000
"""How long a pattern may take for a text, and how many characters add a second to it."""
_SECONDS_TO_START = 60.0

_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
)
_REST_OF_CASED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTED}{_WORD}|\p{{N}}{{1,3}}{_REST}"
QWEN2 = rf"{_CONTRACTED}{_WORD}|\p{{N}}{_REST}"
GPT4O = _CASED.replace("{end}", f"{_CONTRACTED}?") + r"|\p{N}{1,3}" + _REST_OF_CASED
_TEKKEN = _CASED.replace("{end}", "") + r"|\p{N}" + _REST_OF_CASED
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_KANJI_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

KNOWN = {GPT2, LLAMA3, QWEN2, GPT4O, _TEKKEN, _DEEPSEEK, _KANJI_AND_KANA}
KNOWN |= {r"\p{N}", r"\p{N}{1,3}", r"\d", r"\s+", " {2,}", " +"}
"""Patterns that are harmless: none of them tries one place of a text in many ways."""


class BoundedTokenizer:
    """A tokenizer in a child process, which is stopped where it takes too long."""

    @classmethod
    def where_needed(
        cls, backend: tokenizers.Tokenizer, steps: Sequence[dict[str, Any]], source: str
    ) -> BoundedTokenizer | None:
        """Return one if these steps of the tokenizer have a pattern that may be harmful."""
        given = (step["pattern"] for step in steps if isinstance(step.get("pattern"), dict))
        patterns = [each["Regex"] for each in given if "Regex" in each]
        unknown = [pattern for pattern in patterns if _escape_line_ends(pattern) not in KNOWN]
        return cls(backend, unknown[0], source) if unknown else None

    def __init__(self, backend: tokenizers.Tokenizer, pattern: str, source: str) -> None:
        self._backend, self._pattern, self._source = backend, pattern, source
        self._key = next(_keys)

    def ids(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text."""
        return list(self._ask("special" if special else "ids", text))

    def text(self, ids: list[int]) -> str:
        """Return the text of tokens, without the special ones."""
        return str(self._ask("text", ids))

    def _start(self) -> Outcome:
        """Give the child this tokenizer, unless it has it; that may take a while."""
        nothing: tuple[Any, ...] = (self._key, None, "text", [])
        outcome = _child().ask(nothing, limit=_SECONDS_TO_START)
        if outcome.how == "crashed":  # it was ended since the last request
            outcome = _child().ask(nothing, limit=_SECONDS_TO_START)
        if outcome.how == "answered" and outcome.answer is None:
            request = (self._key, self._backend.to_str(), *nothing[2:])
            outcome = _child().ask(request, limit=_SECONDS_TO_START)
        return outcome

    def _ask(self, kind: str, given: str | list[int]) -> Any:
        limit = SECONDS + len(given) / CHARACTERS
        with _turn.native:  # the child has one tokenizer at a time
            outcome = self._start()
            if outcome.how == "answered":
                outcome = _child().ask((self._key, None, kind, given), limit=limit)
        if outcome.how == "not_started":
            raise UnsupportedError(
                f"{self._source} has the pattern {shortened(self._pattern)!r}, which may run "
                f"forever, and no child process can be started to limit it: {outcome.error}"
            )
        how, value = outcome.answer if outcome.how == "answered" else (outcome.how, outcome.error)
        if how == "done":
            return value
        what = f"took more than {limit:g} s" if how == "timed_out" else f"failed ({value or how})"
        raise ConfigurationError(
            f"{self._source} {what} on a text of {len(given)} characters, and was stopped; its "
            f"pattern is {shortened(self._pattern, 200)!r}",
            self._source,
        )


def _escape_line_ends(pattern: str) -> str:
    """Return a pattern with line ends as most files write them."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


_keys, _turn = itertools.count(), ForkSafeLock()


@lru_cache(1)
def _child() -> Conversation:
    path = [entry or os.getcwd() for entry in sys.path]
    function = f"{answering.__module__}:{answering.__qualname__}"
    return Conversation("function", {"path": path, "function": function}, pause=0.0, site=True)


def answering(
    tell: Callable[[str], None], arguments: dict[str, Any]
) -> Callable[[Any], tuple[str, Any] | None]:
    """Called in the child: what encodes and decodes, `None` for a tokenizer that it has not."""
    import tokenizers

    held: dict[int, tokenizers.Tokenizer] = {}

    def answer(question: Any) -> tuple[str, Any] | None:
        key, made, kind, given = question
        if made is not None:
            held.clear()  # vocabularies are large
            held[key] = tokenizers.Tokenizer.from_str(made)
        if key not in held:
            return None
        try:
            if kind == "text":
                return "done", held[key].decode(given, skip_special_tokens=True)
            return "done", held[key].encode(given, add_special_tokens=kind == "special").ids
        except BaseException as error:
            return "failed", str(error)

    return answer
