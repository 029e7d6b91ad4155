"""Calls that must be refused with an error that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anydevice.errors import ConfigurationError


def refuses(words: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Assert that a call raises a `ConfigurationError` with these words, a pattern."""
    with pytest.raises(ConfigurationError, match=words):
        call(*arguments, **options)
