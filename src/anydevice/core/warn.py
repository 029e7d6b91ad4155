"""Warnings that point at the caller's file, not at one of anydevice's."""

from __future__ import annotations

import sys
import warnings

from anydevice.core.text import printable

_PASSED_OVER = (__name__.partition(".")[0], "contextlib", "functools")
"""Our own modules, and those of the standard library that lie between them."""


def warn(message: str | Warning) -> None:
    """Warn at the nearest caller whose module is not one of anydevice's.

    It does not matter how many of our own functions lie between.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _package(frame.f_globals) in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    shown = printable(message, lines=True) if isinstance(message, str) else message
    warnings.warn(shown, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
