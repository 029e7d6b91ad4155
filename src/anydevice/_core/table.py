"""A table as a value; `_report` renders it for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice._core.record import Record


class Table(Record):
    """Cells of text; columns in `right` are right-aligned. A table may have no header."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    right: Sequence[int] = ()
    title: str = ""
