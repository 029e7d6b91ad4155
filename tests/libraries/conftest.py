"""Some of what is tested here runs in processes of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def lines_of_children(children_count_lines: None) -> None:
    """Count the lines that they run."""
