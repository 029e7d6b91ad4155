"""Opening of vendors' libraries. Runs in a child process."""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False  # `import typing` would take longer than opening a library
if TYPE_CHECKING:
    from collections.abc import Sequence


def open_first(names: Sequence[str]) -> tuple[str | None, ctypes.CDLL | None, str | None]:
    """Return name and handle of the first library that opens, or why one that exists does not."""
    problem = None
    for name in names:
        try:
            return name, ctypes.CDLL(name), None
        except OSError as error:
            text = str(error)
            absent = isinstance(error, FileNotFoundError) or (
                text.startswith(f"{name}:") and "No such file" in text
            )
            if not absent:
                problem = problem or text
    return None, None, problem
