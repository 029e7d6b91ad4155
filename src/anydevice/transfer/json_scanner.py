"""JSON read step by step: nothing is built but what the caller asks for.

A general parser builds whatever the text describes before anybody can look at it, and a hostile
text of a hundred megabytes describes gigabytes of little lists. Here the caller says what must come
next, and the first thing that differs is an error with its place. What is accepted is JSON in
UTF-8, less the keys that occur twice in one object and the texts that are no valid Unicode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import isinf

_SPACE = rb"[ \t\n\r]*+"
_START = re.compile(_SPACE)
_OPENS_OBJECT = re.compile(_SPACE + rb"\{")
_CLOSES_OBJECT = re.compile(_SPACE + rb"\}")
_AFTER_MEMBER = re.compile(_SPACE + rb"([,}])")
_COLON = re.compile(_SPACE + rb":")
_OPENS_LIST = re.compile(_SPACE + rb"\[")
_CLOSES_LIST = re.compile(_SPACE + rb"\]")
_AFTER_ITEM = re.compile(_SPACE + rb"([,\]])")
# Possessive: the engine would else keep a way back for each escape, in sixty times their size.
_TEXT = re.compile(_SPACE + rb'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"')
_WHOLE = re.compile(_SPACE + rb"(0|[1-9][0-9]{0,19}+)(?![0-9.eE])")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_WORD = re.compile(rb"true|false|null")

_DEEPEST = 64
"""How far values that are skipped may be nested."""

_LONGEST_NUMBER = 400
"""Digits and signs of a number that is skipped; a float has at most some 330."""

_A_WHOLE = "a whole number of zero or more, below 2 to the 64th"


class MalformedError(ValueError):
    """The text is not what the caller expects; the message says what, and at which byte."""


class Scanner:
    """A place in a JSON text, which moves forward with everything that is read.

    >>> scanner = Scanner(b'{"shape": [2, 3]}')
    >>> [(key, scanner.wholes(32)) for key in scanner.members()]
    [('shape', (2, 3))]
    """

    def __init__(self, text: bytes | bytearray) -> None:
        self._text = text
        self._at = 0

    def members(self) -> Iterator[str]:
        """Each key of an object; the caller reads the value before it asks for the next key."""
        self._take(_OPENS_OBJECT, "an object")
        if self._passes(_CLOSES_OBJECT):
            return
        seen: set[str] = set()
        while True:
            key = self.text("a key")
            if key in seen:
                raise MalformedError(f"the key {_short(key)} occurs twice in one object")
            seen.add(key)
            self._take(_COLON, 'a ":"')
            yield key
            if self._take(_AFTER_MEMBER, 'a "," or a "}"')[1] == b"}":
                return

    def items(self) -> Iterator[None]:
        """One step for each item of a list; the caller reads the item in each."""
        self._take(_OPENS_LIST, "a list")
        if self._passes(_CLOSES_LIST):
            return
        while True:
            yield
            if self._take(_AFTER_ITEM, 'a "," or a "]"')[1] == b"]":
                return

    def text(self, what: str = "a text") -> str:
        """A text, with its escapes resolved."""
        match = self._take(_TEXT, what)
        raw = match[1]
        try:
            found = raw.decode()
            if "\\" not in found:
                return found
            found = str(json.loads(f'"{found}"'))
            found.encode()  # half of a surrogate pair can be escaped, but is no character
        except ValueError as error:
            at = match.start(1)
            raise MalformedError(f"the text at byte {at} is not valid Unicode: {error}") from error
        return found

    def wholes(self, most: int) -> tuple[int, ...]:
        """A list of at most so many whole numbers, from zero up and below 2 to the 64th."""
        numbers: list[int] = []
        for _ in self.items():
            if len(numbers) == most:
                raise self._problem(f"the end of a list of {most}")
            start = self._at
            number = int(self._take(_WHOLE, _A_WHOLE)[1])
            if number >= 2**64:
                self._at = start
                raise self._problem(_A_WHOLE)
            numbers.append(number)
        return tuple(numbers)

    def texts(self) -> dict[str, str]:
        """An object that maps texts to texts."""
        return {key: self.text() for key in self.members()}

    def skip(self, depth: int = 0) -> None:
        """Pass over any one value."""
        start = self._skip_space()
        if depth > _DEEPEST:
            raise MalformedError(f"byte {start} is nested more than {_DEEPEST} levels deep")
        first = self._text[start : start + 1]
        if first == b"{":
            for _ in self.members():
                self.skip(depth + 1)
        elif first == b"[":
            for _ in self.items():
                self.skip(depth + 1)
        elif first == b'"':
            self.text()
        elif not self._passes(_WORD):
            number = self._take(_NUMBER, "a value")[0]
            if len(number) > _LONGEST_NUMBER or isinf(float(number)):
                self._at = start
                raise self._problem("a number that a float can hold")

    def end(self) -> None:
        """Nothing but white space may follow."""
        if self._skip_space() != len(self._text):
            raise self._problem("the end of the text")

    def _skip_space(self) -> int:
        match = _START.match(self._text, self._at)
        assert match is not None  # the pattern matches nothing, too
        self._at = match.end()
        return self._at

    def _passes(self, pattern: re.Pattern[bytes]) -> bool:
        match = pattern.match(self._text, self._at)
        if match is None:
            return False
        self._at = match.end()
        return True

    def _take(self, pattern: re.Pattern[bytes], what: str) -> re.Match[bytes]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._problem(what)
        self._at = match.end()
        return match

    def _problem(self, expected: str) -> MalformedError:
        """What was expected here, and what stands here instead."""
        start = self._skip_space()
        found = self._text[start : start + 20]
        shown = repr(found.decode("utf-8", "backslashreplace")) if found else "the end"
        return MalformedError(f"expected {expected} at byte {start}, found {shown}")


def _short(key: str) -> str:
    return repr(key if len(key) <= 80 else key[:79] + "…")
