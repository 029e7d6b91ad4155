"""The epochs of a training as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydevice.run.history import Epoch

_COLUMNS: dict[str, Callable[[Epoch], str]] = {
    "epoch": lambda each: str(each.epoch),
    "loss": lambda each: f"{each.loss:.4g}",
    "validation": lambda each: "" if each.validation is None else f"{each.validation:.4g}",
    "rate": lambda each: f"{each.rate:.3g}",
    "steps": lambda each: f"{each.steps:,}",
    "left out": lambda each: f"{each.left_out:,}" if each.left_out else "",
    "seconds": lambda each: f"{each.seconds:.1f}",
}

_WHERE_THERE_IS_ONE = ("validation", "left out")

_SHOWN = 24
"""As many epochs have a row each; of more, the first and the last ones have."""


def table_of(epochs: Sequence[Epoch]) -> str:
    """A row for each epoch, those in the middle of many left out, under the names of the columns.

    A column in which no epoch has anything is left out. Without epochs it says so.
    """
    if not epochs:
        return "no epoch has ended"
    rows = {name: [shown(each) for each in epochs] for name, shown in _COLUMNS.items()}
    for name in _WHERE_THERE_IS_ONE:
        if not any(rows[name]):
            del rows[name]
    columns = [[name, *cells] for name, cells in rows.items()]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in zip(*columns, strict=True)]
    if len(epochs) > _SHOWN:
        half = _SHOWN // 2
        lines[1 + half : -half] = [f"… {len(epochs) - _SHOWN} more …"]
    return "\n".join(lines)
