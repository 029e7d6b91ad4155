"""Whether a module's path matches a pattern from a config, in a time that no pattern can stretch.

A config may come from anyone, and a regular expression can be written so that it never ends. So
the pattern is taken apart, and what it can have read is followed for all of its ways at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LONGEST = 2000
_PART = re.compile(
    r"(?P<start>\^)|(?P<end>\$)"
    r"|(?P<one>\\[.\w-]|\[[\w.\-]+\]|[^\\()\[\]{}?*+|^$])(?P<repeat>[*+?]?)\??"
    r"|\((?:\?:)?(?P<choices>(?:\\\.|[\w.|-])+)\)"
)


def is_simple(pattern: str) -> bool:
    r"""Whether a pattern is one that `starts_like` can follow.

    Characters, classes of them with `* + ?`, groups of words such as `(up|down)`, `^` and `$`.

    >>> is_simple(r".*mlp\.(gate|up)_proj$"), is_simple("(a*)*b")
    (True, False)
    """
    if len(pattern) > _LONGEST:
        return False
    try:
        return sum(len(part[0]) for part in _parts(pattern)) == len(pattern)
    except re.error:
        return False


def starts_like(pattern: str, path: str) -> bool:
    r"""Whether a path starts with what the pattern stands for, as in `re.match`.

    >>> starts_like(r"layers\.[01]\.", "layers.1.mlp"), starts_like("mlp$", "mlp.up")
    (True, False)
    """
    reached = {0}
    for part in _parts(pattern):
        reached = {end for start in reached for end in _ends(part, path, start)}
    return bool(reached)


def _parts(pattern: str) -> Iterator[re.Match[str]]:
    place = 0
    while (part := _PART.match(pattern, place)) is not None:
        if part["one"]:
            re.compile(part["one"])
        yield part
        place = part.end()


def _ends(part: re.Match[str], path: str, start: int) -> Iterator[int]:
    """The places in a path that one part of a pattern can end at."""
    if part["start"] or part["end"]:
        if start == (0 if part["start"] else len(path)):
            yield start
    elif part["choices"]:
        for choice in part["choices"].split("|"):
            found = re.compile(choice).match(path, start)
            if found:
                yield found.end()
    else:
        if part["repeat"] in ("*", "?"):
            yield start
        most = start + 1 if part["repeat"] in ("", "?") else len(path)
        while start < most and re.compile(part["one"]).match(path, start):
            start += 1
            yield start
