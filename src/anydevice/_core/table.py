"""A table as a value, which `_report` writes for terminals and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice._core.record import Record


class Table(Record):
    """Cells of text; columns in `right` are right-aligned, and a table may lack a head."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    right: Sequence[int] = ()
    title: str = ""
