"""Run a function of the package in the child, with the caller's import path.

Loaded by `entry.py` in a child process. `arguments["function"]` is "package.module:name"; it is
called with `tell` and the arguments, and returns the function that answers each question.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def serve(tell: Callable[[str], None], arguments: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the function that answers questions, made by the named function."""
    sys.path[:] = arguments["path"]
    module, _, name = arguments["function"].partition(":")
    tell(f"importing {module}")
    answer: Callable[[Any], Any] = getattr(import_module(module), name)(tell, arguments)
    return answer
