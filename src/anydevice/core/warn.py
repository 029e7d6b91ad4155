"""Where a warning belongs: in the file of the person who called, not in one of ours."""

from __future__ import annotations

import sys

_OURS = __name__.partition(".")[0]


def level_outside() -> int:
    """The `stacklevel` with which `warnings.warn`, where this is called, points out of anydevice.

    That is the nearest caller whose module is not one of anydevice's, however many of our own
    functions lie between.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _module(frame.f_globals) == _OURS:
        frame, level = frame.f_back, level + 1
    return level


def _module(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
