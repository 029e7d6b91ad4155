"""Warnings point at the file that called anydevice."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import anydevice
from anydevice._core.text import warn
from anydevice.testing import fake_machine

SOURCE = Path(__file__).parents[2] / "src" / "anydevice"


def test_a_warning_of_ours_is_at_the_caller_s_line() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn("here")
        with fake_machine():
            anydevice.device()
    assert [Path(each.filename).name for each in said] == ["test_warn.py", "test_warn.py"]
    assert str(said[0].message) == "here"


def test_no_other_file_counts_frames() -> None:
    found = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "stacklevel" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg == "stacklevel"
    ]
    assert found == ["_core/text.py"]
